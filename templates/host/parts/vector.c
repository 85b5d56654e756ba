//@ local only_reads = k.name == "backward_delta"
//@ local element = dtype == "fp32" and "float" or "unsigned short"
typedef ${element} Element;  // storage of ${dtype}

// a * b + c, in one step where the processor has one. The compiler may not contract by itself, so that masks
// mean the same in every kernel.
static inline float fused(float a, float b, float c) {
#if defined(FP_FAST_FMAF) || defined(__FMA__)
    return __builtin_fmaf(a, b, c);
#else
    return a * b + c;
#endif
}
//@ if not only_reads or dtype == "fp16" then

static inline uint32_t bits_of(float x) {
    uint32_t bits;
    memcpy(&bits, &x, sizeof bits);
    return bits;
}
//@ end
//@ if not only_reads or dtype ~= "fp32" then

static inline float float_of(uint32_t bits) {
    float x;
    memcpy(&x, &bits, sizeof x);
    return x;
}
//@ end
//@ if not only_reads then

// e^x within 1.5 units in the last place; 0 below -86.9, where e^x nears the least normal number. NaN stays.
static inline float exp_approx(float x) {
    const float shift = 12582912.0f;  // 1.5 * 2^23: adding it rounds to an integer in the low bits
    const float shifted = fused(x, 1.44269504f, shift);
    const float n = shifted - shift;
    float r = fused(n, -0.693359375f, x);  // x - n ln 2, ln 2 in two parts: the first product is exact
    r = fused(n, 2.12194440e-4f, r);
    float y = 0.0013814467f;
    y = fused(y, r, 0.008368781f);
    y = fused(y, r, 0.041668393f);
    y = fused(y, r, 0.1666652f);
    y = fused(y, r, 0.49999994f);
    y = fused(y, r * r, r) + 1;
    y = y * float_of((bits_of(shifted) - bits_of(shift) + 126) << 23) * 2;
    y = x < -86.9f ? 0 : y;
    return x > 89.0f ? INFINITY : y;
}
//@ end

static inline float to_float(Element x) {
//@ if dtype == "fp32" then
    return x;
//@ elseif dtype == "bf16" then
    return float_of((uint32_t)x << 16);
//@ else
    const uint32_t magnitude = (x & 0x7fffu) << 13;
    const uint32_t finite = bits_of(float_of(magnitude) * 0x1p112f);  // moves the bias, subnormals too
    return float_of((magnitude >= 0x0f800000u ? magnitude | 0x7f800000u : finite) | (x & 0x8000u) << 16);
//@ end
}
//@ if not only_reads then

// Rounds to nearest, ties to even.
static inline Element from_float(float x) {
//@ if dtype == "fp32" then
    return x;
//@ elseif dtype == "bf16" then
    const uint32_t bits = bits_of(x);
    const uint32_t rounded = (bits + 0x7fffu + (bits >> 16 & 1u)) >> 16;
    return (Element)((bits & 0x7fffffffu) > 0x7f800000u ? bits >> 16 | 0x40u : rounded);
//@ else
    const uint32_t magnitude = bits_of(x) & 0x7fffffffu;
    const uint32_t normal = (magnitude - 0x38000000u + 0xfffu + (magnitude >> 13 & 1u)) >> 13;
    const uint32_t subnormal = bits_of(float_of(magnitude) + 0.5f) - 0x3f000000u;  // 0.5 has units of 2^-24
    const uint32_t special = magnitude > 0x7f800000u ? 0x7e00u : 0x7c00u;
    const uint32_t half = magnitude >= 0x47800000u ? special : magnitude < 0x38800000u ? subnormal : normal;
    return (Element)(half | (bits_of(x) >> 16 & 0x8000u));
//@ end
}

// Whether no element of a row is inf or NaN.
static inline bool is_finite_row(const float *row, int dim) {
    uint32_t largest = 0;
    for (int x = 0; x < dim; ++x) {
        const uint32_t magnitude = bits_of(row[x]) & 0x7fffffffu;
        largest = magnitude > largest ? magnitude : largest;
    }
    return largest < 0x7f800000u;
}

// Rows of a tensor as f32 [rows][dim], zeros in the rest of the last ${c.block_rows}. Returns whether all is finite.
static inline bool load_rows(const Element *from, long long stride, int rows, int dim, float *tile) {
    bool finite = true;
    for (int r = 0; r < rows; ++r) {
        for (int x = 0; x < dim; ++x) tile[r * dim + x] = to_float(from[r * stride + x]);
        finite = is_finite_row(tile + r * dim, dim) && finite;
    }
    for (int i = rows * dim; i < (rows + block_rows - 1) / block_rows * block_rows * dim; ++i) tile[i] = 0;
    return finite;
}

// The same transposed, as [dim][pitch], zeros in the rest of the last ${c.block_lanes} columns.
static inline void load_columns(const Element *from, long long stride, int rows, int dim, int pitch,
                                float *tile) {
    for (int r = 0; r < (rows + block_lanes - 1) / block_lanes * block_lanes; ++r) {
        for (int x = 0; x < dim; ++x) tile[x * pitch + r] = r < rows ? to_float(from[r * stride + x]) : 0;
    }
}

// Writes a row as scale * row / divisor. Adding 0 turns -0 into 0: a tile in which the row sees nothing may
// or may not have been added, and must not show.
static inline void store_row(Element *to, const float *row, int dim, float scale, float divisor) {
    for (int x = 0; x < dim; ++x) to[x] = from_float(row[x] * scale / divisor + 0.0f);
}
//@ end
