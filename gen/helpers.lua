--[[ helpers: the small functions that emitted masks and scores call, one row each.

  helpers.texts(needed, language, static) -> list of function texts for the names in the set `needed` and all they use

A row is {name, needs, doc, text} or {name, needs, doc, c = text, cuda = text}; text leaves out the `static inline` in front.
Names: i32_ and f32_ are exact IEEE or wrapping operations, the same bits in both languages (masks); fast_ are CUDA
approximations for scores, with their error; iv_ are intervals of i32 in 64 bits, fv_ of f32, cl_ tile classes: the same
operations as the table `numbers` of gen/interval.lua, which the tests compare.

Called by functions. ]]

local helpers = {}

local rows = {
    -- i32, wrapping
    {"i32_add", {}, "a + b, wrapping.",
     "int i32_add(int a, int b) {\n    return (int)((unsigned)a + (unsigned)b);\n}"},
    {"i32_sub", {}, "a - b, wrapping.",
     "int i32_sub(int a, int b) {\n    return (int)((unsigned)a - (unsigned)b);\n}"},
    {"i32_mul", {}, "a * b, wrapping.",
     "int i32_mul(int a, int b) {\n    return (int)((unsigned)a * (unsigned)b);\n}"},
    {"i32_div", {"i32_sub"}, "Floor of a / b; 0 by 0.", [[
int i32_div(int a, int b) {
    if (b == 0) return 0;
    if (b == -1) return i32_sub(0, a);
    return a / b - (a % b != 0 && (a < 0) != (b < 0));
}]]},
    {"i32_mod", {}, "Remainder of floor division, with the sign of b; 0 by 0.", [[
int i32_mod(int a, int b) {
    if (b == 0 || b == -1) return 0;
    const int rest = a % b;
    return rest != 0 && (rest < 0) != (b < 0) ? rest + b : rest;
}]]},
    {"i32_min", {}, nil, "int i32_min(int a, int b) {\n    return a < b ? a : b;\n}"},
    {"i32_max", {}, nil, "int i32_max(int a, int b) {\n    return a > b ? a : b;\n}"},
    {"i32_abs", {"i32_sub"}, "|a|, wrapping.", "int i32_abs(int a) {\n    return a < 0 ? i32_sub(0, a) : a;\n}"},
    {"i32_popcount", {}, "Number of one bits.", [[
int i32_popcount(int a) {
    unsigned x = (unsigned)a;
    x = x - (x >> 1 & 0x55555555u);
    x = (x & 0x33333333u) + (x >> 2 & 0x33333333u);
    return (int)(((x + (x >> 4)) & 0x0f0f0f0fu) * 0x01010101u >> 24);
}]]},
    {"mix_bits", {}, "Finaliser of MurmurHash3.", [[
unsigned mix_bits(unsigned x) {
    x = (x ^ x >> 16) * 0x85ebca6bu;
    x = (x ^ x >> 13) * 0xc2b2ae35u;
    return x ^ x >> 16;
}]]},
    {"i32_hash", {"mix_bits"}, "Hash of a and b under a seed.", [[
int i32_hash(int a, int b, int seed) {
    return (int)mix_bits(mix_bits(mix_bits((unsigned)seed + 0x9e3779b9u) + (unsigned)a) + (unsigned)b);
}]]},
    {"i32_of_f32", {}, "Truncates and saturates; NaN gives 0.", [[
int i32_of_f32(float x) {
    if (!(x > -2147483648.0f)) return x <= -2147483648.0f ? -2147483647 - 1 : 0;
    return x >= 2147483648.0f ? 2147483647 : (int)x;
}]]},

    -- f32, IEEE round to nearest, never contracted
    {"f32_mul", {}, "a * b, rounded: a later sum cannot be fused with it.",
     c = "float f32_mul(float a, float b) {\n    return (float)((double)a * (double)b);\n}",
     cuda = "float f32_mul(float a, float b) {\n    return __fmul_rn(a, b);\n}"},
    {"f32_div", {}, "a / b, rounded.",
     c = "float f32_div(float a, float b) {\n    return a / b;\n}",
     cuda = "float f32_div(float a, float b) {\n    return __fdiv_rn(a, b);\n}"},
    {"f32_sqrt", {}, "Square root, rounded.",
     c = "float f32_sqrt(float x) {\n    return sqrtf(x);\n}",
     cuda = "float f32_sqrt(float x) {\n    return __fsqrt_rn(x);\n}"},
    {"f32_min", {}, "The number where one side is NaN.",
     "float f32_min(float a, float b) {\n    return b != b || a < b ? a : b;\n}"},
    {"f32_max", {}, "The number where one side is NaN.",
     "float f32_max(float a, float b) {\n    return b != b || a > b ? a : b;\n}"},
    {"f32_differ", {}, "a != b; false with NaN.",
     "bool f32_differ(float a, float b) {\n    return a < b || a > b;\n}"},
    {"f32_bits", {}, "The bits of a float.",
     c = "unsigned f32_bits(float x) {\n    const union {\n        float f;\n        unsigned u;\n    } both = {x};\n    return both.u;\n}",
     cuda = "unsigned f32_bits(float x) {\n    return __float_as_uint(x);\n}"},
    {"f32_of_bits", {}, "The float of some bits.",
     c = "float f32_of_bits(unsigned u) {\n    const union {\n        unsigned u;\n        float f;\n    } both = {u};\n    return both.f;\n}",
     cuda = "float f32_of_bits(unsigned u) {\n    return __uint_as_float(u);\n}"},
    {"f32_exp", {"f32_mul", "f32_of_bits"}, "e^x in steps that every target rounds alike; error below 1 unit in the last place.", [[
float f32_exp(float x) {
    if (x != x) return x;
    if (x > 89.0f) return f32_of_bits(0x7f800000u);
    if (x < -104.0f) return 0.0f;
    const float n = floorf(f32_mul(x, 1.44269504f) + 0.5f);
    const float r = x - f32_mul(n, 0.693359375f) - f32_mul(n, -2.12194440e-4f);
    float p = 1.98412698e-4f;
    p = f32_mul(p, r) + 1.38888889e-3f;
    p = f32_mul(p, r) + 8.33333333e-3f;
    p = f32_mul(p, r) + 4.16666667e-2f;
    p = f32_mul(p, r) + 1.66666667e-1f;
    p = f32_mul(p, r) + 0.5f;
    p = f32_mul(f32_mul(p, r), r) + r + 1.0f;
    const int half = (int)n / 2;  // two steps: 2^n alone may not be a float
    return f32_mul(f32_mul(p, f32_of_bits((unsigned)(half + 127) << 23)), f32_of_bits((unsigned)((int)n - half + 127) << 23));
}]]},
    {"f32_div_saturating", {"f32_div"}, "a / b for b > 0, at most the largest f32 where a is finite.", cuda = [[
float f32_div_saturating(float a, float b) {
    const float most = 3.40282347e38f, quotient = f32_div(a, b);
    return fabsf(a) <= most && fabsf(quotient) > most ? copysignf(most, a) : quotient;
}]]},
    {"f32_log", {"f32_mul", "f32_div", "f32_bits", "f32_of_bits"},
     "ln x in steps that every target rounds alike; error below 1 unit in the last place.", [[
float f32_log(float x) {
    if (x != x || x < 0.0f) return f32_of_bits(0x7fc00000u);
    if (x == 0.0f) return f32_of_bits(0xff800000u);
    if (x == f32_of_bits(0x7f800000u)) return x;
    int exponent = -127;
    if (x < 1.17549435e-38f) {
        x = f32_mul(x, 8388608.0f);
        exponent -= 23;
    }
    exponent += (int)(f32_bits(x) >> 23);
    float m = f32_of_bits((f32_bits(x) & 0x007fffffu) | 0x3f800000u);
    if (m > 1.41421356f) {
        m = f32_mul(m, 0.5f);
        exponent += 1;
    }
    const float z = f32_div(m - 1.0f, m + 1.0f);
    const float w = f32_mul(z, z);
    float p = 0.181818182f;
    p = f32_mul(p, w) + 0.222222222f;
    p = f32_mul(p, w) + 0.285714286f;
    p = f32_mul(p, w) + 0.4f;
    p = f32_mul(p, w) + 0.666666667f;
    // ln m = 2z + z^3 p; 2z = (m - 1) - z (m - 1) keeps the leading digits
    const float f = m - 1.0f;
    const float small = f32_mul(z, f32_mul(w, p) - f);
    const float n = (float)exponent;
    return f32_mul(n, 0.693359375f) + (f + (small + f32_mul(n, -2.12194440e-4f)));
}]]},
    {"f32_tanh", {"f32_exp", "f32_mul", "f32_div"},
     "tanh x in steps that every target rounds alike; error below 2 units in the last place.", [[
float f32_tanh(float x) {
    const float a = fabsf(x);
    if (a < 0.625f) {
        const float w = f32_mul(x, x);
        float p = -5.70498872e-3f;
        p = f32_mul(p, w) + 2.06390887e-2f;
        p = f32_mul(p, w) - 5.37397155e-2f;
        p = f32_mul(p, w) + 1.33314422e-1f;
        p = f32_mul(p, w) - 3.33332819e-1f;
        return x + f32_mul(x, f32_mul(w, p));
    }
    const float t = 1.0f - f32_div(2.0f, f32_exp(a + a) + 1.0f);
    return x < 0.0f ? -t : t;
}]]},
    {"f32_sincos", {"f32_mul", "f32_of_bits"}, "sin of x + quarter * pi/2 in steps that every target rounds alike; absolute error below 1e-7 for |x| < 8192.", [[
float f32_sincos(float x, int quarter) {
    if (!(fabsf(x) < 1.0e9f)) return f32_of_bits(0x7fc00000u);
    const float n = floorf(f32_mul(x, 0.636619772f) + 0.5f);
    const float r = x - f32_mul(n, 1.5703125f) - f32_mul(n, 4.83751297e-4f) - f32_mul(n, 7.54979013e-8f);
    const float w = f32_mul(r, r);
    const int place = ((int)n + quarter) & 3;
    float p;
    if (place & 1) {
        p = 2.44331571e-5f;
        p = f32_mul(p, w) - 1.38873162e-3f;
        p = f32_mul(p, w) + 4.16666456e-2f;
        p = f32_mul(f32_mul(p, w), w) - f32_mul(w, 0.5f) + 1.0f;
    } else {
        p = -1.95152959e-4f;
        p = f32_mul(p, w) + 8.33216087e-3f;
        p = f32_mul(p, w) - 1.66666546e-1f;
        p = f32_mul(f32_mul(p, w), r) + r;
    }
    return place & 2 ? -p : p;
}]]},
    {"f32_sin", {"f32_sincos"}, nil, "float f32_sin(float x) {\n    return f32_sincos(x, 0);\n}"},
    {"f32_cos", {"f32_sincos"}, nil, "float f32_cos(float x) {\n    return f32_sincos(x, 1);\n}"},
    {"f32_of_bf16", {}, nil,
     c = "float f32_of_bf16(unsigned short bits) {\n    const union {\n        unsigned u;\n        float f;\n    } both = {(unsigned)bits << 16};\n    return both.f;\n}",
     cuda = "float f32_of_bf16(unsigned short bits) {\n    return __uint_as_float((unsigned)bits << 16);\n}"},
    {"f32_of_f16", {}, nil,
     c = [[
float f32_of_f16(unsigned short bits) {
    const unsigned exponent = bits >> 10 & 31u, mantissa = bits & 1023u;
    float value;
    if (exponent == 31u) value = mantissa ? NAN : INFINITY;
    else if (exponent == 0u) value = ldexpf((float)mantissa, -24);
    else value = ldexpf((float)(mantissa + 1024u), (int)exponent - 25);
    return bits >> 15 ? -value : value;
}]],
     cuda = [[
float f32_of_f16(unsigned short bits) {
    float value;
    asm("cvt.f32.f16 %0, %1;" : "=f"(value) : "h"(bits));
    return value;
}]]},

    -- approximations of scores on CUDA
    {"fast_exp", {}, "e^x; relative error below 2^-22 (1 + |x|).", cuda = [[
float fast_exp(float x) {
    float y;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x * 1.44269504f));
    return y;
}]]},
    {"fast_log", {}, "ln x; absolute error below 2^-22 near 1, else relative error below 2^-21; subnormal x counts as 0.", cuda = [[
float fast_log(float x) {
    float y;
    asm("lg2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y * 0.693147181f;
}]]},
    {"fast_tanh", {}, "tanh x = 1 - 2 / (1 + e^2x); absolute error below 2^-21.", cuda = [[
float fast_tanh(float x) {
    float e, y;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(e) : "f"(x * 2.88539008f));
    asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(e + 1.0f));
    return 1.0f - 2.0f * y;
}]]},
    {"tanh_near", {}, nil, type = "constexpr float tanh_near = 0.5f;  // where a polynomial does for tanh x: |x| below it"},
    {"tanh_of_near", {}, "tanh x for |x| < tanh_near; absolute error below 2^-21. Rounds alike wherever it stands.", cuda = [[
float tanh_of_near(float x) {
    const float square = __fmul_rn(x, x);
    return __fmul_rn(x, fmaf(fmaf(fmaf(-0.0444022268f, square, 0.131902963f), square, -0.333263189f), square, 0.999999464f));
}]]},
    {"any_tanh", {"tanh_near", "tanh_of_near", "fast_tanh"}, "tanh x, the same bits as tanh_of_near where that holds; absolute error below 2^-21.", cuda = [[
float any_tanh(float x) {
    return fabsf(x) < tanh_near ? tanh_of_near(x) : fast_tanh(x);
}]]},
    {"fast_sqrt", {}, "Square root; relative error below 2^-22.", cuda = [[
float fast_sqrt(float x) {
    float y;
    asm("sqrt.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}]]},
    {"fast_div", {}, "a / b; error of 2 units in the last place, 0 for |b| above 2^126.", cuda = [[
float fast_div(float a, float b) {
    float y;
    asm("div.approx.ftz.f32 %0, %1, %2;" : "=f"(y) : "f"(a), "f"(b));
    return y;
}]]},
    {"whole_turns_off", {}, "x less whole turns, in -pi .. pi; absolute error below 2^-22 (1 + |x| / 64).", cuda = [[
float whole_turns_off(float x) {
    const float turns = rintf(x * 0.159154943f);
    return fmaf(turns, 1.74845553e-7f, fmaf(turns, -6.28318548f, x));
}]]},
    {"fast_sin", {"whole_turns_off"}, "sin x; absolute error below 2^-20 for |x| < 64.", cuda = [[
float fast_sin(float x) {
    float y;
    asm("sin.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(whole_turns_off(x)));
    return y;
}]]},
    {"fast_cos", {"whole_turns_off"}, "cos x; absolute error below 2^-20 for |x| < 64.", cuda = [[
float fast_cos(float x) {
    float y;
    asm("cos.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(whole_turns_off(x)));
    return y;
}]]},

    -- spans
    {"wide_min", {}, nil, "long long wide_min(long long a, long long b) {\n    return a < b ? a : b;\n}"},
    {"wide_max", {}, nil, "long long wide_max(long long a, long long b) {\n    return a > b ? a : b;\n}"},
    {"in_i32", {}, nil, "bool in_i32(long long x) {\n    return x >= -2147483648LL && x <= 2147483647LL;\n}"},
    {"span", {}, nil, [[
Span span(long long lo, long long hi) {
    Span result = {1, 0};
    if (lo <= hi) {
        result.lo = (int)lo;
        result.hi = (int)hi;
    }
    return result;
}]]},

    {"i32_span", {}, nil, [[
Span i32_span(int lo, int hi) {
    Span result = {1, 0};
    if (lo <= hi) {
        result.lo = lo;
        result.hi = hi;
    }
    return result;
}]]},

    -- intervals of i32, in 64 bits
    {"Iv", {}, nil, type = "typedef struct Iv {  // an i32 lies in lo .. hi\n    long long lo, hi;\n} Iv;"},
    {"iv", {"Iv"}, nil, "Iv iv(long long lo, long long hi) {\n    Iv x = {lo, hi};\n    return x;\n}"},
    {"iv_point", {"iv"}, nil, "Iv iv_point(int x) {\n    return iv(x, x);\n}"},
    {"iv_add", {"iv"}, nil, "Iv iv_add(Iv a, Iv b) {\n    return iv(a.lo + b.lo, a.hi + b.hi);\n}"},
    {"iv_sub", {"iv"}, nil, "Iv iv_sub(Iv a, Iv b) {\n    return iv(a.lo - b.hi, a.hi - b.lo);\n}"},
    {"iv_scale", {"iv"}, nil, "Iv iv_scale(Iv a, int c) {\n    return c < 0 ? iv(c * a.hi, c * a.lo) : iv(c * a.lo, c * a.hi);\n}"},
    {"iv_shift", {"iv"}, nil, "Iv iv_shift(Iv a, long long c) {\n    return iv(a.lo + c, a.hi + c);\n}"},
    {"iv_any", {"iv"}, nil, "Iv iv_any(void) {\n    return iv(-2147483648LL, 2147483647LL);\n}"},
    {"iv_wrap", {"iv_any", "in_i32"}, "What a sum or product is after wrapping: anything, if it may leave i32.",
     "Iv iv_wrap(Iv a) {\n    return in_i32(a.lo) && in_i32(a.hi) ? a : iv_any();\n}"},
    {"iv_corners", {"iv", "wide_min", "wide_max"}, nil, [[
Iv iv_corners(long long a, long long b, long long c, long long d) {
    return iv(wide_min(wide_min(a, b), wide_min(c, d)), wide_max(wide_max(a, b), wide_max(c, d)));
}]]},
    {"iv_mul", {"iv_corners"}, nil,
     "Iv iv_mul(Iv a, Iv b) {\n    return iv_corners(a.lo * b.lo, a.lo * b.hi, a.hi * b.lo, a.hi * b.hi);\n}"},
    {"floor_div", {}, "Floor of a / b, b not 0.", [[
long long floor_div(long long a, long long b) {
    return a / b - (a % b != 0 && (a < 0) != (b < 0));
}]]},
    {"iv_div", {"iv_corners", "iv_wrap", "iv_any", "floor_div"}, "Floor division; anything where the divisor may be 0.", [[
Iv iv_div(Iv a, Iv b) {
    if (b.lo <= 0 && b.hi >= 0) return iv_any();
    return iv_wrap(iv_corners(floor_div(a.lo, b.lo), floor_div(a.lo, b.hi), floor_div(a.hi, b.lo), floor_div(a.hi, b.hi)));
}]]},
    {"iv_mod", {"iv", "floor_div", "wide_min", "wide_max"}, "The remainder has the divisor's sign and is smaller; by 0 it is 0.", [[
Iv iv_mod(Iv a, Iv b) {
    if (b.lo == b.hi && b.lo != 0) {
        const long long quotient = floor_div(a.lo, b.lo);
        if (quotient == floor_div(a.hi, b.lo)) {
            const long long x = a.lo - quotient * b.lo, y = a.hi - quotient * b.lo;
            return iv(x, y);
        }
    }
    Iv result = iv(wide_min(b.lo + 1, 0), wide_max(b.hi - 1, 0));
    if (b.lo > 0 && a.lo >= 0) result.hi = wide_min(result.hi, a.hi);
    return result;
}]]},
    {"iv_min", {"iv", "wide_min"}, nil, "Iv iv_min(Iv a, Iv b) {\n    return iv(wide_min(a.lo, b.lo), wide_min(a.hi, b.hi));\n}"},
    {"iv_max", {"iv", "wide_max"}, nil, "Iv iv_max(Iv a, Iv b) {\n    return iv(wide_max(a.lo, b.lo), wide_max(a.hi, b.hi));\n}"},
    {"iv_abs", {"iv_any", "wide_max"}, nil, [[
Iv iv_abs(Iv a) {
    if (a.lo == -2147483648LL) return iv_any();
    return iv(wide_max(0, wide_max(a.lo, -a.hi)), wide_max(-a.lo, a.hi));
}]]},
    {"iv_select", {"iv", "wide_min", "wide_max"}, nil, [[
Iv iv_select(int c, Iv a, Iv b) {
    if (c != 1) return c == 2 ? a : b;
    return iv(wide_min(a.lo, b.lo), wide_max(a.hi, b.hi));
}]]},
    {"iv_of_class", {"iv"}, nil, "Iv iv_of_class(int c) {\n    return iv(c / 2, (c + 1) / 2);\n}"},
    {"iv_of_float", {"Fv", "iv_any", "i32_of_f32"}, nil, [[
Iv iv_of_float(Fv a) {
    return a.lo != a.lo ? iv_any() : iv(i32_of_f32(a.lo), i32_of_f32(a.hi));
}]]},

    -- intervals of f32
    {"Fv", {}, nil, type = "typedef struct Fv {  // an f32 lies in lo .. hi; NaN: it may be anything, NaN too\n    float lo, hi;\n} Fv;"},
    {"fv", {"Fv"}, nil, "Fv fv(float lo, float hi) {\n    Fv x = {lo, hi};\n    return x;\n}"},
    {"fv_unknown", {"fv", "f32_of_bits"}, nil, "Fv fv_unknown(void) {\n    return fv(f32_of_bits(0x7fc00000u), f32_of_bits(0x7fc00000u));\n}"},
    {"fv_point", {"fv"}, nil, "Fv fv_point(float x) {\n    return fv(x, x);\n}"},
    {"fv_finite", {"Fv"}, nil, "bool fv_finite(Fv a) {\n    return a.lo - a.lo == 0.0f && a.hi - a.hi == 0.0f;\n}"},
    {"fv_of_int", {"Iv", "fv"}, nil, "Fv fv_of_int(Iv a) {\n    return fv((float)a.lo, (float)a.hi);\n}"},
    {"fv_of_class", {"fv"}, nil, "Fv fv_of_class(int c) {\n    return fv((float)(c / 2), (float)((c + 1) / 2));\n}"},
    {"fv_add", {"fv", "fv_finite", "fv_unknown"}, nil,
     "Fv fv_add(Fv a, Fv b) {\n    return fv_finite(a) && fv_finite(b) ? fv(a.lo + b.lo, a.hi + b.hi) : fv_unknown();\n}"},
    {"fv_sub", {"fv", "fv_finite", "fv_unknown"}, nil,
     "Fv fv_sub(Fv a, Fv b) {\n    return fv_finite(a) && fv_finite(b) ? fv(a.lo - b.hi, a.hi - b.lo) : fv_unknown();\n}"},
    {"fv_corners", {"fv", "f32_min", "f32_max"}, nil, [[
Fv fv_corners(float a, float b, float c, float d) {
    return fv(f32_min(f32_min(a, b), f32_min(c, d)), f32_max(f32_max(a, b), f32_max(c, d)));
}]]},
    {"fv_mul", {"fv_corners", "fv_finite", "fv_unknown", "f32_mul"}, nil, [[
Fv fv_mul(Fv a, Fv b) {
    if (!fv_finite(a) || !fv_finite(b)) return fv_unknown();
    return fv_corners(f32_mul(a.lo, b.lo), f32_mul(a.lo, b.hi), f32_mul(a.hi, b.lo), f32_mul(a.hi, b.hi));
}]]},
    {"fv_div", {"fv_corners", "fv_finite", "fv_unknown", "f32_div"}, nil, [[
Fv fv_div(Fv a, Fv b) {
    if (!fv_finite(a) || !fv_finite(b) || (b.lo <= 0.0f && b.hi >= 0.0f)) return fv_unknown();
    return fv_corners(f32_div(a.lo, b.lo), f32_div(a.lo, b.hi), f32_div(a.hi, b.lo), f32_div(a.hi, b.hi));
}]]},
    {"fv_neg", {"fv"}, nil, "Fv fv_neg(Fv a) {\n    return fv(-a.hi, -a.lo);\n}"},
    {"fv_min", {"fv", "fv_finite", "fv_unknown", "f32_min"}, nil,
     "Fv fv_min(Fv a, Fv b) {\n    return fv_finite(a) && fv_finite(b) ? fv(f32_min(a.lo, b.lo), f32_min(a.hi, b.hi)) : fv_unknown();\n}"},
    {"fv_max", {"fv", "fv_finite", "fv_unknown", "f32_max"}, nil,
     "Fv fv_max(Fv a, Fv b) {\n    return fv_finite(a) && fv_finite(b) ? fv(f32_max(a.lo, b.lo), f32_max(a.hi, b.hi)) : fv_unknown();\n}"},
    {"fv_abs", {"fv", "fv_finite", "fv_unknown", "f32_max"}, nil, [[
Fv fv_abs(Fv a) {
    if (!fv_finite(a)) return fv_unknown();
    return fv(f32_max(0.0f, f32_max(a.lo, -a.hi)), f32_max(-a.lo, a.hi));
}]]},
    {"fv_sqrt", {"fv", "fv_finite", "fv_unknown", "f32_sqrt"}, nil,
     "Fv fv_sqrt(Fv a) {\n    return fv_finite(a) && a.lo >= 0.0f ? fv(f32_sqrt(a.lo), f32_sqrt(a.hi)) : fv_unknown();\n}"},
    {"fv_floor", {"fv", "fv_finite", "fv_unknown"}, nil,
     "Fv fv_floor(Fv a) {\n    return fv_finite(a) ? fv(floorf(a.lo), floorf(a.hi)) : fv_unknown();\n}"},
    {"fv_select", {"fv", "fv_unknown", "f32_min", "f32_max"}, nil, [[
Fv fv_select(int c, Fv a, Fv b) {
    if (c != 1) return c == 2 ? a : b;
    if (a.lo != a.lo || b.lo != b.lo) return fv_unknown();
    return fv(f32_min(a.lo, b.lo), f32_max(a.hi, b.hi));
}]]},

    -- classes: 0 empty, 1 partial, 2 full
    {"cl_point", {}, nil, "int cl_point(bool x) {\n    return x ? 2 : 0;\n}"},
    {"cl_and", {}, nil, "int cl_and(int a, int b) {\n    return a < b ? a : b;\n}"},
    {"cl_or", {}, nil, "int cl_or(int a, int b) {\n    return a > b ? a : b;\n}"},
    {"cl_not", {}, nil, "int cl_not(int a) {\n    return 2 - a;\n}"},
    {"cl_alike", {}, "Class of a == b.", "int cl_alike(int a, int b) {\n    return a == 1 || b == 1 ? 1 : a == b ? 2 : 0;\n}"},
    {"cl_select", {}, nil, "int cl_select(int c, int a, int b) {\n    return c == 2 || a == b ? a : c == 0 ? b : 1;\n}"},
    {"cl_at_most_zero", {"Iv"}, nil, "int cl_at_most_zero(Iv a) {\n    return a.hi <= 0 ? 2 : a.lo > 0 ? 0 : 1;\n}"},
    {"cl_zero", {"Iv"}, nil, "int cl_zero(Iv a) {\n    return a.lo > 0 || a.hi < 0 ? 0 : a.lo == a.hi ? 2 : 1;\n}"},
    {"cl_if_fits", {"Iv", "in_i32"}, "c, if the exact value a of a side of the comparison cannot wrap.",
     "int cl_if_fits(int c, Iv a) {\n    return in_i32(a.lo) && in_i32(a.hi) ? c : 1;\n}"},
    {"cl_below", {"Fv"}, "Class of a < b.", "int cl_below(Fv a, Fv b) {\n    return a.hi < b.lo ? 2 : a.lo >= b.hi ? 0 : 1;\n}"},
    {"cl_not_above", {"Fv"}, "Class of a <= b.", "int cl_not_above(Fv a, Fv b) {\n    return a.hi <= b.lo ? 2 : a.lo > b.hi ? 0 : 1;\n}"},
    {"cl_equal", {"Fv"}, "Class of a == b.", [[
int cl_equal(Fv a, Fv b) {
    if (a.hi < b.lo || a.lo > b.hi) return 0;
    return a.lo == a.hi && b.lo == b.hi && a.lo == b.lo ? 2 : 1;
}]]},
}

local by_name = {}
for _, row in ipairs(rows) do by_name[row[1]] = row end

-- Texts of all needed helpers in the order of use: what a function calls stands before it.
function helpers.texts(needed, language, static)
    local done, out = {}, {}
    local function add(row)
        if done[row[1]] then return end
        done[row[1]] = true
        for _, name in ipairs(row[2]) do add(by_name[name]) end
        if row.type then
            out[#out + 1] = row.type
            return
        end
        local text = row[4] or row[language]
        out[#out + 1] = (row[3] and "// " .. row[3] .. "\n" or "") .. static .. " " .. text
    end
    for _, row in ipairs(rows) do
        if needed[row[1]] then add(row) end
    end
    return out
end

return helpers
