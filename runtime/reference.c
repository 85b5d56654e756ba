/* reference.c - attention in float64 and an evaluator of mask and score text; see reference.h.
 *
 * An expression is a tree whose nodes are evaluated for up to LANES keys at once, so that the cost of walking
 * the tree is shared. Attention itself is reference_pass.h, compiled twice: in double, and in float with the
 * roundings of the problem's dtype.
 */
#include "reference.h"

#include <ctype.h>
#include <limits.h>
#include <math.h>
#include <pthread.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "common.h"

enum { LANES = 64, MAX_DEPTH = 400 };

/* -- Storage types --------------------------------------------------------------------------------------- */

size_t loom__storage_bytes(loom__storage storage) {
    switch (storage) {
    case LOOM__F32:
    case LOOM__I32: return 4;
    case LOOM__F16:
    case LOOM__BF16: return 2;
    case LOOM__I64: return 8;
    default: return 1;
    }
}

static uint32_t bits_of(float value) {
    uint32_t bits;
    memcpy(&bits, &value, 4);
    return bits;
}

static float float_of(uint32_t bits) {
    float value;
    memcpy(&value, &bits, 4);
    return value;
}

float loom__bf16_to_float(uint16_t bits) { return float_of((uint32_t)bits << 16); }

uint16_t loom__float_to_bf16(float value) {
    uint32_t bits = bits_of(value);
    if (isnan(value)) return (uint16_t)(bits >> 16 | 0x40); /* quiet, so that the cut mantissa is not 0 */
    return (uint16_t)((bits + 0x7fff + (bits >> 16 & 1)) >> 16);
}

float loom__fp16_to_float(uint16_t bits) {
    uint32_t sign = (uint32_t)(bits & 0x8000) << 16, exponent = bits >> 10 & 31, mantissa = bits & 0x3ff;
    if (exponent == 31) return float_of(sign | 0x7f800000 | mantissa << 13);
    if (exponent) return float_of(sign | (exponent + 112) << 23 | mantissa << 13);
    float tiny = (float)mantissa * 0x1p-24f;
    return sign ? -tiny : tiny;
}

uint16_t loom__float_to_fp16(float value) {
    uint32_t bits = bits_of(value), sign = bits >> 16 & 0x8000, magnitude = bits & 0x7fffffff;
    if (magnitude > 0x7f800000) return (uint16_t)(sign | 0x7e00 | (magnitude >> 13 & 0x3ff));
    if (magnitude >= 0x477ff000) /* 65520 and up round to infinity */
        return (uint16_t)(sign | 0x7c00);
    if (magnitude <
        0x38800000) { /* below 2^-14: the sum leaves the subnormal's bits, rounded, at the bottom */
        float shifted = float_of(magnitude) + 0.5f;
        return (uint16_t)(sign | (bits_of(shifted) - bits_of(0.5f)));
    }
    return (uint16_t)(sign | ((magnitude - 0x38000000 + 0xfff + (magnitude >> 13 & 1)) >> 13));
}

float loom__element_get(const void *data, loom__storage storage, int64_t index) {
    switch (storage) {
    case LOOM__F16: return loom__fp16_to_float(((const uint16_t *)data)[index]);
    case LOOM__BF16: return loom__bf16_to_float(((const uint16_t *)data)[index]);
    default: return ((const float *)data)[index];
    }
}

void loom__element_set(void *data, loom__storage storage, int64_t index, float value) {
    switch (storage) {
    case LOOM__F16: ((uint16_t *)data)[index] = loom__float_to_fp16(value); break;
    case LOOM__BF16: ((uint16_t *)data)[index] = loom__float_to_bf16(value); break;
    default: ((float *)data)[index] = value;
    }
}

static float rounded_to(loom__storage storage, float value) {
    switch (storage) {
    case LOOM__F16: return loom__fp16_to_float(loom__float_to_fp16(value));
    case LOOM__BF16: return loom__bf16_to_float(loom__float_to_bf16(value));
    default: return value;
    }
}

/* -- Expressions: tree ----------------------------------------------------------------------------------- */

typedef enum op {
    OP_NUMBER,
    OP_VARIABLE,
    OP_SCALAR,
    OP_LOAD,
    OP_NEG,
    OP_NOT,
    OP_ADD,
    OP_SUB,
    OP_MUL,
    OP_DIV,
    OP_MOD,
    OP_LT,
    OP_LE,
    OP_GT,
    OP_GE,
    OP_EQ,
    OP_NE,
    OP_AND,
    OP_OR,
    OP_SELECT,
    OP_MIN,
    OP_MAX,
    OP_ABS,
    OP_I32,
    OP_F32,
    OP_EXP,
    OP_LOG,
    OP_TANH,
    OP_SQRT,
    OP_SIN,
    OP_COS,
    OP_FLOOR,
    OP_XOR,
    OP_POPCOUNT,
    OP_HASH
} op;

typedef enum variable {
    VAR_Q,
    VAR_K,
    VAR_ROW,
    VAR_COL,
    VAR_B,
    VAR_H,
    VAR_HKV,
    VAR_SEQ_Q,
    VAR_SEQ_K,
    VAR_S,
    NUM_VARIABLES
} variable;

static const char *const variable_names[NUM_VARIABLES] = {"q", "k",   "row",   "col",   "b",
                                                          "h", "hkv", "seq_q", "seq_k", "s"};

static const struct {
    const char *name;
    op op;
    int num_args;
} functions[] = {{"min", OP_MIN, 2}, {"max", OP_MAX, 2},           {"abs", OP_ABS, 1},
                 {"i32", OP_I32, 1}, {"f32", OP_F32, 1},           {"exp", OP_EXP, 1},
                 {"log", OP_LOG, 1}, {"tanh", OP_TANH, 1},         {"sqrt", OP_SQRT, 1},
                 {"sin", OP_SIN, 1}, {"cos", OP_COS, 1},           {"floor", OP_FLOOR, 1},
                 {"xor", OP_XOR, 2}, {"popcount", OP_POPCOUNT, 1}, {"hash", OP_HASH, 3}};

/* A dimension of a param: `number`, or a size of the shape divided by it and rounded up. */
typedef struct dim {
    int size; /* place among a shape's; -1: none */
    int64_t number;
} dim;

typedef struct node {
    op op;
    loom__type type;
    int num_args;
    struct node *args[LOOM__MAX_DIMS];
    bool depends;  /* f32 that varies with s */
    int32_t whole; /* a number, a variable or the slot of a param */
    double real;
    dim dims[LOOM__MAX_DIMS]; /* of an array */
    struct node *next; /* all nodes of the expression, to free them */
} node;

struct loom__expression {
    node *root, *nodes;
    const loom__param_facts *params;
    int num_params;
    loom__param_facts *own_params;
};

/* -- Dimensions of params -------------------------------------------------------------------------------- */

/* "61", "seq_k" or "ceil(seq_k/64)" */
static bool parse_dim(const char *text, dim *d) {
    static const char *const names[] = {"batch", "heads_q", "heads_kv", "seq_q", "seq_k"};
    char name[16];
    long long number = 1;
    *d = (dim){.size = -1};
    if (sscanf(text, "%lld", &number) != 1) {
        if (sscanf(text, "ceil( %15[a-z_] / %lld )", name, &number) != 2 &&
            sscanf(text, "%15[a-z_]", name) != 1)
            return false;
        for (int i = 0; i < (int)(sizeof names / sizeof *names); i++)
            if (!strcmp(name, names[i])) d->size = i;
        if (d->size < 0 || number <= 0) return false;
    }
    d->number = number;
    return true;
}

static int64_t dim_for(const dim *d, const loom_shape *shape) {
    const int64_t sizes[] = {shape->batch, shape->heads_q, shape->heads_kv, shape->seq_q, shape->seq_k};
    return d->size < 0 ? d->number : (sizes[d->size] + d->number - 1) / d->number;
}

int64_t loom__param_dim(const loom__param_facts *param, int axis, const loom_shape *shape) {
    dim d;
    return parse_dim(param->dims[axis], &d) ? dim_for(&d, shape) : -1;
}

/* -- Expressions: parser --------------------------------------------------------------------------------- */

typedef struct parser {
    const char *text, *at;
    loom__expression *expression;
    loom_error *error;
    loom_status status;
    int depth;
} parser;

static node *parse_select(parser *p);

static node *refuse(parser *p, const char *what) {
    if (!p->status)
        p->status = loom__fail(p->error, LOOM_INVALID, "reference.expression", "%s at byte %d of \"%s\"",
                               what, (int)(p->at - p->text), p->text);
    return NULL;
}

static node *new_node(parser *p, op op, loom__type type, node *a, node *b, node *c) {
    node *n = calloc(1, sizeof *n);
    if (!n) {
        p->status = loom__fail(p->error, LOOM_MEMORY, "reference.expression", "no memory for a node");
        return NULL;
    }
    n->op = op;
    n->type = type;
    n->args[0] = a;
    n->args[1] = b;
    n->args[2] = c;
    n->num_args = c ? 3 : b ? 2 : a ? 1 : 0;
    for (int i = 0; i < n->num_args && type == LOOM__TYPE_F32; i++)
        n->depends = n->depends || n->args[i]->depends;
    n->next = p->expression->nodes;
    p->expression->nodes = n;
    return n;
}

static void skip_space(parser *p) {
    while (isspace((unsigned char)*p->at)) p->at++;
}

/* Takes the mark if it comes next and is not the start of a longer one. */
static bool take(parser *p, const char *mark) {
    size_t length = strlen(mark);
    skip_space(p);
    if (strncmp(p->at, mark, length)) return false;
    if (length == 1 && strchr("<>!=", mark[0]) && p->at[1] == '=') return false;
    p->at += length;
    return true;
}

static node *parse_number(parser *p) {
    const char *end = p->at;
    bool real = false;
    while (isdigit((unsigned char)*end) || *end == '.' || *end == 'e' ||
           ((*end == '-' || *end == '+') && end > p->at && end[-1] == 'e')) {
        real = real || *end == '.' || *end == 'e';
        end++;
    }
    node *n = new_node(p, OP_NUMBER, real ? LOOM__TYPE_F32 : LOOM__TYPE_I32, NULL, NULL, NULL);
    if (!n) return NULL;
    if (real) {
        n->real = strtof(p->at, NULL);
    } else {
        unsigned long long whole = strtoull(p->at, NULL, 10);
        if (whole > 2147483648ull) return refuse(p, "a whole number outside i32");
        n->whole = (int32_t)(uint32_t)whole; /* 2147483648 stands only after a minus sign */
    }
    p->at = end;
    return n;
}

static bool has_real(const node *a, const node *b) {
    return a->type == LOOM__TYPE_F32 || b->type == LOOM__TYPE_F32;
}

static loom__type type_of_call(op op, node *const *args) {
    switch (op) {
    case OP_MIN:
    case OP_MAX: return has_real(args[0], args[1]) ? LOOM__TYPE_F32 : LOOM__TYPE_I32;
    case OP_ABS: return args[0]->type;
    case OP_XOR:
    case OP_I32:
    case OP_POPCOUNT:
    case OP_HASH: return LOOM__TYPE_I32;
    default: return LOOM__TYPE_F32;
    }
}

/* Arguments up to `close`; returns how many. */
static int parse_arguments(parser *p, const char *close, node **args) {
    int num = 0;
    do {
        if (num == LOOM__MAX_DIMS) {
            refuse(p, "too many arguments");
            return 0;
        }
        if (!(args[num++] = parse_select(p))) return 0;
    } while (take(p, ","));
    if (!take(p, close)) {
        refuse(p, "no closing bracket");
        return 0;
    }
    return num;
}

static node *parse_name(parser *p) {
    char name[64];
    size_t length = 0;
    while (isalnum((unsigned char)p->at[length]) || p->at[length] == '_') length++;
    if (length >= sizeof name) return refuse(p, "a name longer than 63 bytes");
    memcpy(name, p->at, length);
    name[length] = 0;
    node *args[LOOM__MAX_DIMS] = {0};
    if (!strcmp(name, "true") || !strcmp(name, "false") || !strcmp(name, "inf")) {
        node *n = new_node(p, OP_NUMBER, name[0] == 'i' ? LOOM__TYPE_F32 : LOOM__TYPE_BOOL, NULL, NULL, NULL);
        if (n) {
            n->whole = name[0] == 't';
            n->real = INFINITY;
        }
        p->at += length;
        return n;
    }
    for (size_t i = 0; i < sizeof functions / sizeof *functions; i++) {
        if (strcmp(name, functions[i].name)) continue;
        p->at += length;
        if (!take(p, "(")) return refuse(p, "a function without (");
        int num = parse_arguments(p, ")", args);
        if (!num) return NULL;
        if (num != functions[i].num_args) return refuse(p, "a function with the wrong number of arguments");
        return new_node(p, functions[i].op, type_of_call(functions[i].op, args), args[0], args[1], args[2]);
    }
    for (int i = 0; i < p->expression->num_params; i++) {
        const loom__param_facts *param = &p->expression->params[i];
        if (strcmp(name, param->name)) continue;
        loom__type type = param->storage == LOOM__BOOL                                ? LOOM__TYPE_BOOL
                          : param->storage >= LOOM__I32 && param->storage <= LOOM__U8 ? LOOM__TYPE_I32
                                                                                      : LOOM__TYPE_F32;
        p->at += length;
        int num = 0;
        if (param->num_dims) {
            if (!take(p, "[")) return refuse(p, "an array without [");
            num = parse_arguments(p, "]", args);
            if (num != param->num_dims) return refuse(p, "an array with the wrong number of indices");
        }
        node *n = new_node(p, num ? OP_LOAD : OP_SCALAR, type, NULL, NULL, NULL);
        if (!n) return NULL;
        n->whole = i;
        n->num_args = num;
        memcpy(n->args, args, sizeof args);
        for (int axis = 0; axis < num; axis++)
            if (!parse_dim(param->dims[axis], &n->dims[axis])) return refuse(p, "an array of unknown size");
        return n;
    }
    for (int i = 0; i < NUM_VARIABLES; i++) {
        if (strcmp(name, variable_names[i])) continue;
        node *n = new_node(p, OP_VARIABLE, i == VAR_S ? LOOM__TYPE_F32 : LOOM__TYPE_I32, NULL, NULL, NULL);
        if (n) {
            n->whole = i;
            n->depends = i == VAR_S;
        }
        p->at += length;
        return n;
    }
    return refuse(p, "an unknown name");
}

static node *parse_operand(parser *p) {
    node *n;
    skip_space(p);
    if (++p->depth > MAX_DEPTH) return refuse(p, "an expression nested too deep");
    if (take(p, "(")) {
        n = parse_select(p);
        if (n && !take(p, ")")) n = refuse(p, "no closing bracket");
    } else if (take(p, "-")) {
        n = parse_operand(p);
        if (n) n = new_node(p, OP_NEG, n->type, n, NULL, NULL);
    } else if (take(p, "!")) {
        n = parse_operand(p);
        if (n) n = new_node(p, OP_NOT, LOOM__TYPE_BOOL, n, NULL, NULL);
    } else if (isdigit((unsigned char)*p->at) || *p->at == '.') {
        n = parse_number(p);
    } else if (isalpha((unsigned char)*p->at) || *p->at == '_') {
        n = parse_name(p);
    } else {
        n = refuse(p, "no operand");
    }
    p->depth--;
    return n;
}

typedef struct operator{
    const char *mark;
    op op;
    int level;
}
operator;

/* Levels as in C: the higher binds tighter. Longer marks come first. */
static const operator operators[] = {{"<=", OP_LE, 4}, {">=", OP_GE, 4}, {"==", OP_EQ, 3}, {"!=", OP_NE, 3},
                                     {"<", OP_LT, 4},  {">", OP_GT, 4},  {"|", OP_OR, 1},  {"&", OP_AND, 2},
                                     {"+", OP_ADD, 5}, {"-", OP_SUB, 5}, {"*", OP_MUL, 6}, {"/", OP_DIV, 6},
                                     {"%", OP_MOD, 6}};

static node *parse_binary(parser *p, int level) {
    node *left = parse_operand(p);
    while (left) {
        const operator* found = NULL;
        const char *before;
        skip_space(p);
        before = p->at;
        for (size_t i = 0; i < sizeof operators / sizeof *operators && !found; i++)
            if (take(p, operators[i].mark)) found = &operators[i];
        if (!found || found->level < level) {
            p->at = before;
            return left;
        }
        node *right = parse_binary(p, found->level + 1);
        if (!right) return NULL;
        bool bits = found->op == OP_AND || found->op == OP_OR;
        loom__type type = bits                    ? left->type
                          : found->op >= OP_LT    ? LOOM__TYPE_BOOL
                          : has_real(left, right) ? LOOM__TYPE_F32
                                                  : LOOM__TYPE_I32;
        if (bits && (left->type != right->type || type == LOOM__TYPE_F32))
            return refuse(p, "& or | of types that are not both bool or both i32");
        left = new_node(p, found->op, type, left, right, NULL);
    }
    return NULL;
}

static node *parse_select(parser *p) {
    if (++p->depth > MAX_DEPTH) return refuse(p, "an expression nested too deep");
    node *condition = parse_binary(p, 1), *yes, *no;
    if (condition && take(p, "?")) {
        if (!(yes = parse_select(p))) return NULL;
        if (!take(p, ":")) return refuse(p, "? without :");
        if (!(no = parse_select(p))) return NULL;
        loom__type type = has_real(yes, no) ? LOOM__TYPE_F32 : yes->type;
        condition = new_node(p, OP_SELECT, type, condition, yes, no);
    }
    p->depth--;
    return condition;
}

loom_status loom__expression_create(const char *text, const loom__param_facts *params, int num_params,
                                    loom__expression **expression, loom_error *error) {
    loom__expression *e = calloc(1, sizeof *e);
    if (!e) return loom__fail(error, LOOM_MEMORY, "reference.expression", "no memory for an expression");
    parser p = {.text = text, .at = text, .expression = e, .error = error};
    e->own_params = malloc((size_t)(num_params + 1) * sizeof *params);
    if (!e->own_params) {
        loom__expression_destroy(e);
        return loom__fail(error, LOOM_MEMORY, "reference.expression", "no memory for %d params", num_params);
    }
    if (num_params) memcpy(e->own_params, params, (size_t)num_params * sizeof *params);
    e->params = e->own_params;
    e->num_params = num_params;
    e->root = parse_select(&p);
    skip_space(&p);
    if (e->root && *p.at) refuse(&p, "something after the end of the expression");
    if (p.status) {
        loom__expression_destroy(e);
        return p.status;
    }
    *expression = e;
    return LOOM_OK;
}

void loom__expression_destroy(loom__expression *expression) {
    if (!expression) return;
    for (node *n = expression->nodes, *next; n; n = next) {
        next = n->next;
        free(n);
    }
    free(expression->own_params);
    free(expression);
}

loom__type loom__expression_type(const loom__expression *expression) { return expression->root->type; }

/* -- Expressions: values --------------------------------------------------------------------------------- */

/* One row's place and up to LANES keys. Lane c stands for column col + c. */
typedef struct place {
    const loom__expression *expression;
    const loom_shape *shape;
    const loom_param *params;
    loom__arithmetic arithmetic;
    int32_t q, row, b, h, hkv, k, col;
    int num_lanes;
    const double *s; /* one per lane; NULL in a mask */
} place;

typedef struct lanes {
    int32_t i[LANES];
    double f[LANES], slope[LANES];
} lanes;

static int32_t wrap(int64_t value) { return (int32_t)(uint32_t)(uint64_t)value; }

static int32_t floor_divide(int32_t a, int32_t b) {
    if (b == 0) return 0;
    int64_t quotient = (int64_t)a / b;
    if ((int64_t)a % b != 0 && (a < 0) != (b < 0)) quotient--;
    return wrap(quotient);
}

static int32_t floor_remainder(int32_t a, int32_t b) {
    if (b == 0) return 0;
    int64_t remainder = (int64_t)a % b;
    return (int32_t)(remainder != 0 && (remainder < 0) != (b < 0) ? remainder + b : remainder);
}

static int32_t saturate(double value) {
    if (isnan(value)) return 0;
    return value >= 2147483647.0 ? INT32_MAX : value <= -2147483648.0 ? INT32_MIN : (int32_t)value;
}

static double round_real(const place *place, double value) {
    return place->arithmetic == LOOM__ROUNDED ? (double)(float)value : value;
}

/* What does not depend on s has no derivative, whatever the factor. */
static double chain(bool depends, double slope, double factor) { return depends ? slope * factor : 0; }

static double load(const void *data, loom__storage storage, int64_t index) {
    switch (storage) {
    case LOOM__I32: return ((const int32_t *)data)[index];
    case LOOM__I64: return wrap(((const int64_t *)data)[index]);
    case LOOM__U8: return ((const uint8_t *)data)[index];
    case LOOM__BOOL: return ((const uint8_t *)data)[index] != 0;
    default: return loom__element_get(data, storage, index);
    }
}

static void fill(lanes *out, loom__type type, int num_lanes, double value) {
    for (int c = 0; c < num_lanes; c++) {
        out->i[c] = type == LOOM__TYPE_F32 ? 0 : (int32_t)value;
        out->f[c] = value;
        out->slope[c] = 0;
    }
}

static void evaluate(const node *n, const place *place, lanes *out);

static void evaluate_variable(const node *n, const place *place, lanes *out) {
    int num_lanes = place->num_lanes;
    switch ((variable)n->whole) {
    case VAR_Q: fill(out, n->type, num_lanes, place->q); break;
    case VAR_ROW: fill(out, n->type, num_lanes, place->row); break;
    case VAR_B: fill(out, n->type, num_lanes, place->b); break;
    case VAR_H: fill(out, n->type, num_lanes, place->h); break;
    case VAR_HKV: fill(out, n->type, num_lanes, place->hkv); break;
    case VAR_SEQ_Q: fill(out, n->type, num_lanes, (double)place->shape->seq_q); break;
    case VAR_SEQ_K: fill(out, n->type, num_lanes, (double)place->shape->seq_k); break;
    case VAR_S:
        for (int c = 0; c < num_lanes; c++) {
            out->f[c] = round_real(place, place->s ? place->s[c] : 0);
            out->slope[c] = 1;
        }
        break;
    default:
        for (int c = 0; c < num_lanes; c++)
            out->i[c] = wrap((int64_t)(n->whole == VAR_K ? place->k : place->col) + c);
    }
}

static void evaluate_load(const node *n, const place *place, lanes *out) {
    const loom__param_facts *facts = &place->expression->params[n->whole];
    const loom_param *param = &place->params[n->whole];
    if (n->op == OP_SCALAR) {
        fill(out, n->type, place->num_lanes,
             n->type == LOOM__TYPE_F32    ? (double)(float)param->scalar
             : n->type == LOOM__TYPE_BOOL ? param->scalar != 0
                                          : (double)(int32_t)param->scalar);
        return;
    }
    int64_t offset[LANES] = {0};
    bool inside[LANES];
    for (int c = 0; c < place->num_lanes; c++) inside[c] = true;
    for (int axis = 0; axis < n->num_args; axis++) {
        lanes index;
        int64_t size = dim_for(&n->dims[axis], place->shape);
        evaluate(n->args[axis], place, &index);
        for (int c = 0; c < place->num_lanes; c++) {
            inside[c] = inside[c] && index.i[c] >= 0 && index.i[c] < size;
            offset[c] += index.i[c] * param->stride[axis];
        }
    }
    for (int c = 0; c < place->num_lanes; c++) {
        double value = inside[c] ? load(param->data, facts->storage, offset[c]) : 0;
        out->i[c] = n->type == LOOM__TYPE_F32 ? 0 : (int32_t)value;
        out->f[c] = value;
        out->slope[c] = 0;
    }
}

static void to_real(const node *n, int num_lanes, lanes *value) {
    if (n->type == LOOM__TYPE_F32) return;
    for (int c = 0; c < num_lanes; c++) {
        value->f[c] = (double)(float)value->i[c];
        value->slope[c] = 0;
    }
}

static double remainder_real(const place *place, double a, double b) {
    if (b == 0) return 0;
    double remainder = fmod(a, b);
    if (remainder != 0 && (remainder < 0) != (b < 0)) remainder += b;
    return round_real(place, remainder);
}

static void real_operation(const node *n, const place *place, const lanes *a, const lanes *b, lanes *out) {
    bool on_x = n->args[0]->depends, on_y = n->num_args > 1 && n->args[1]->depends;
    for (int c = 0; c < place->num_lanes; c++) {
        double x = a->f[c], y = b->f[c], dx = a->slope[c], dy = b->slope[c], value = 0, slope = 0;
        bool left;
        switch (n->op) {
        case OP_ADD: value = x + y, slope = dx + dy; break;
        case OP_SUB: value = x - y, slope = dx - dy; break;
        case OP_MUL: value = x * y, slope = chain(on_x, dx, y) + chain(on_y, dy, x); break;
        case OP_DIV: value = x / y, slope = chain(on_x, dx, 1 / y) - chain(on_y, dy, x / y / y); break;
        case OP_MOD: value = remainder_real(place, x, y); break;
        case OP_MIN:
        case OP_MAX: /* on a tie and beside NaN the left counts, unless it is the left that is NaN */
            left = isnan(y) || (n->op == OP_MIN ? x <= y : x >= y);
            value = left ? x : y, slope = left ? dx : dy;
            break;
        case OP_NEG: value = -x, slope = -dx; break;
        case OP_ABS: value = fabs(x), slope = x < 0 ? -dx : dx; break;
        case OP_EXP: value = round_real(place, exp(x)), slope = chain(on_x, dx, value); break;
        case OP_LOG: value = log(x), slope = chain(on_x, dx, 1 / x); break;
        case OP_TANH: value = round_real(place, tanh(x)), slope = chain(on_x, dx, 1 - value * value); break;
        case OP_SQRT: value = round_real(place, sqrt(x)), slope = chain(on_x, dx, 0.5 / value); break;
        case OP_SIN: value = sin(x), slope = chain(on_x, dx, cos(x)); break;
        case OP_COS: value = cos(x), slope = chain(on_x, dx, -sin(x)); break;
        default: /* OP_FLOOR */ value = floor(x);
        }
        out->f[c] = round_real(place, value);
        out->slope[c] = round_real(place, slope);
    }
}

static int32_t popcount(int32_t value) {
    int32_t count = 0;
    for (uint32_t bits = (uint32_t)value; bits; bits &= bits - 1) count++;
    return count;
}

/* Finaliser of MurmurHash3: each bit of the result depends on all bits of x. */
static uint32_t mix(uint32_t x) {
    x = (x ^ x >> 16) * 0x85ebca6bu;
    x = (x ^ x >> 13) * 0xc2b2ae35u;
    return x ^ x >> 16;
}

static int32_t hash(int32_t a, int32_t b, int32_t seed) {
    return (int32_t)mix(mix(mix((uint32_t)seed + 0x9e3779b9u) + (uint32_t)a) + (uint32_t)b);
}

static int32_t whole_operation(op op, int32_t x, int32_t y) {
    switch (op) {
    case OP_ADD: return wrap((int64_t)x + y);
    case OP_SUB: return wrap((int64_t)x - y);
    case OP_MUL: return wrap((int64_t)x * y);
    case OP_DIV: return floor_divide(x, y);
    case OP_MOD: return floor_remainder(x, y);
    case OP_MIN: return x < y ? x : y;
    case OP_MAX: return x > y ? x : y;
    case OP_NEG: return wrap(-(int64_t)x);
    case OP_ABS: return wrap(x < 0 ? -(int64_t)x : x);
    case OP_XOR: return x ^ y;
    case OP_POPCOUNT: return popcount(x);
    case OP_LT: return x < y;
    case OP_LE: return x <= y;
    case OP_GT: return x > y;
    case OP_GE: return x >= y;
    case OP_EQ: return x == y;
    case OP_NE: return x != y;
    case OP_AND: return x & y;
    case OP_OR: return x | y;
    default: /* OP_NOT */ return !x;
    }
}

static bool real_compare(op op, double x, double y) {
    switch (op) {
    case OP_LT: return x < y;
    case OP_LE: return x <= y;
    case OP_GT: return x > y;
    case OP_GE: return x >= y;
    case OP_EQ: return x == y;
    default: return x != y && !isnan(x) && !isnan(y); /* every comparison with NaN is false */
    }
}

static void evaluate(const node *n, const place *place, lanes *out) {
    lanes a, b, third;
    int num_lanes = place->num_lanes;
    switch (n->op) {
    case OP_NUMBER: fill(out, n->type, num_lanes, n->type == LOOM__TYPE_F32 ? n->real : n->whole); return;
    case OP_VARIABLE: evaluate_variable(n, place, out); return;
    case OP_SCALAR:
    case OP_LOAD: evaluate_load(n, place, out); return;
    case OP_SELECT:
        evaluate(n->args[0], place, &a);
        evaluate(n->args[1], place, &b);
        evaluate(n->args[2], place, &third);
        if (n->type == LOOM__TYPE_F32) {
            to_real(n->args[1], num_lanes, &b);
            to_real(n->args[2], num_lanes, &third);
        }
        for (int c = 0; c < num_lanes; c++) {
            out->i[c] = a.i[c] ? b.i[c] : third.i[c];
            out->f[c] = a.i[c] ? b.f[c] : third.f[c];
            out->slope[c] = a.i[c] ? b.slope[c] : third.slope[c];
        }
        return;
    default: break;
    }
    evaluate(n->args[0], place, &a);
    if (n->num_args > 1) evaluate(n->args[1], place, &b);
    if (n->op == OP_I32) {
        for (int c = 0; c < num_lanes; c++)
            out->i[c] = n->args[0]->type == LOOM__TYPE_F32 ? saturate(a.f[c]) : a.i[c];
        return;
    }
    if (n->op == OP_F32) {
        to_real(n->args[0], num_lanes, &a);
        *out = a;
        return;
    }
    if (n->op == OP_HASH) {
        evaluate(n->args[2], place, &third);
        for (int c = 0; c < num_lanes; c++) out->i[c] = hash(a.i[c], b.i[c], third.i[c]);
        return;
    }
    bool compare = n->op >= OP_LT && n->op <= OP_NE;
    if (n->type == LOOM__TYPE_F32 || (compare && has_real(n->args[0], n->args[1]))) {
        to_real(n->args[0], num_lanes, &a);
        if (n->num_args > 1)
            to_real(n->args[1], num_lanes, &b);
        else
            b = a;
        if (!compare) real_operation(n, place, &a, &b, out);
        for (int c = 0; compare && c < num_lanes; c++) out->i[c] = real_compare(n->op, a.f[c], b.f[c]);
        return;
    }
    for (int c = 0; c < num_lanes; c++)
        out->i[c] = whole_operation(n->op, a.i[c], n->num_args > 1 ? b.i[c] : 0);
}

loom__value loom__expression_value(const loom__expression *expression, loom__arithmetic arithmetic,
                                   const loom__point *point) {
    lanes out = {0};
    place place = {.expression = expression,
                   .shape = point->shape,
                   .params = point->params,
                   .arithmetic = arithmetic,
                   .q = point->q,
                   .row = point->row,
                   .b = point->b,
                   .h = point->h,
                   .hkv = point->hkv,
                   .k = point->k,
                   .col = point->col,
                   .num_lanes = 1,
                   .s = &point->s};
    evaluate(expression->root, &place, &out);
    bool real = expression->root->type == LOOM__TYPE_F32;
    return (loom__value){out.i[0], real ? out.f[0] : out.i[0], real ? out.slope[0] : 0};
}

/* -- Attention ------------------------------------------------------------------------------------------- */

enum { ROWS = 8 };

typedef struct job {
    const loom__reference *reference;
    const loom_args *args;
    loom_shape shape;
    int64_t q_start, k_start;
    double scale;
    bool backward;
    int width, num_threads;
    loom__reference_result *result;
} job;

static place make_place(const job *job, int64_t batch, int64_t head, int64_t head_kv, int64_t row) {
    return (place){.shape = &job->shape,
                   .params = job->args->params,
                   .b = (int32_t)batch,
                   .h = (int32_t)head,
                   .hkv = (int32_t)head_kv,
                   .row = (int32_t)row,
                   .q = wrap(job->q_start + row)};
}

static double read_dlse(const job *job, int64_t batch, int64_t head, int64_t row) {
    const loom_tensor *t = &job->args->dlse;
    if (!t->data) return 0;
    return ((const float *)t->data)[batch * t->stride[0] + row * t->stride[1] + head * t->stride[2]];
}

typedef struct crew {
    bool (*task)(void *context, int64_t index);
    void *context;
    int64_t num_tasks;
    atomic_int_least64_t next;
    atomic_bool failed;
} crew;

static void *work_off(void *argument) {
    crew *crew = argument;
    for (int64_t i; (i = atomic_fetch_add(&crew->next, 1)) < crew->num_tasks && !atomic_load(&crew->failed);)
        if (!crew->task(crew->context, i)) atomic_store(&crew->failed, true);
    return NULL;
}

/* Runs the tasks on this thread and up to num_threads - 1 others. False: one of them found no memory. */
static bool run_tasks(bool (*task)(void *, int64_t), void *context, int64_t num_tasks, int num_threads) {
    enum { MAX_THREADS = 64 };
    pthread_t threads[MAX_THREADS];
    crew crew = {.task = task, .context = context, .num_tasks = num_tasks};
    int started = 0;
    while (started < num_threads - 1 && started < MAX_THREADS && started + 1 < num_tasks &&
           !pthread_create(&threads[started], NULL, work_off, &crew))
        started++;
    work_off(&crew);
    while (started) pthread_join(threads[--started], NULL);
    return !crew.failed;
}

#define REAL        double
#define NAME(x)     x##_float64
#define ARITHMETIC  LOOM__DOUBLE
#define EXP         exp
#define LOG         log
#define ROUND(r, x) (x)
#include "reference_pass.h"

#define REAL        float
#define NAME(x)     x##_same_dtype
#define ARITHMETIC  LOOM__ROUNDED
#define EXP         expf
#define LOG         logf
#define ROUND(r, x) rounded_to((r)->dtype, x)
#include "reference_pass.h"

loom_status loom__reference_run(const loom__reference *reference, const loom_args *args, bool backward,
                                loom__precision precision, int num_threads, loom__reference_result *result,
                                loom_error *error) {
    const loom_shape *shape = &args->shape;
    float scale = args->scale != 0 ? args->scale : (float)(1 / sqrt(reference->d));
    job job = {.reference = reference,
               .args = args,
               .shape = *shape,
               .scale = scale,
               .backward = backward,
               .width = shape->seq_k < LANES ? (int)(shape->seq_k ? shape->seq_k : 1) : LANES,
               .num_threads = num_threads,
               .result = result};
    job.q_start = args->q_start == LOOM_DEFAULT_START ? shape->seq_k - shape->seq_q : args->q_start;
    job.k_start = args->k_start == LOOM_DEFAULT_START ? 0 : args->k_start;
    size_t rows = (size_t)(shape->batch * shape->heads_q * shape->seq_q);
    size_t keys = (size_t)(shape->batch * shape->heads_kv * shape->seq_k);
    *result = (loom__reference_result){0};
    result->o = malloc((rows * (size_t)reference->dv + 1) * sizeof(double));
    result->lse = malloc((rows + 1) * sizeof(double));
    if (backward) {
        result->dq = malloc((rows * (size_t)reference->d + 1) * sizeof(double));
        result->dk = malloc((keys * (size_t)reference->d + 1) * sizeof(double));
        result->dv = malloc((keys * (size_t)reference->dv + 1) * sizeof(double));
    }
    bool done = result->o && result->lse && (!backward || (result->dq && result->dk && result->dv));
    if (done) done = precision == LOOM__FLOAT64 ? attention_float64(&job) : attention_same_dtype(&job);
    if (!done) {
        loom__reference_result_free(result);
        return loom__fail(error, LOOM_MEMORY, "reference",
                          "no memory for the reference of %lld rows and %lld keys", (long long)rows,
                          (long long)keys);
    }
    return LOOM_OK;
}

void loom__reference_result_free(loom__reference_result *result) {
    free(result->o);
    free(result->lse);
    free(result->dq);
    free(result->dk);
    free(result->dv);
    *result = (loom__reference_result){0};
}

/* -- Problem text ---------------------------------------------------------------------------------------- */

/* Copies the inside of `{...}` at `at` to a new string; NULL without memory or without the closing brace. */
static char *braced(const char *at, const char **end) {
    const char *close = strchr(at, '}');
    if (*at != '{' || !close) return NULL;
    size_t length = (size_t)(close - at - 1);
    char *text = malloc(length + 1);
    if (text) {
        memcpy(text, at + 1, length);
        text[length] = 0;
    }
    *end = close + 1;
    return text;
}

static bool parse_storage(const char *word, loom__storage *storage) {
    static const struct {
        const char *word;
        loom__storage storage;
    } words[] = {{"f32", LOOM__F32}, {"f16", LOOM__F16}, {"bf16", LOOM__BF16}, {"i32", LOOM__I32},
                 {"i64", LOOM__I64}, {"u8", LOOM__U8},   {"bool", LOOM__BOOL}};
    for (size_t i = 0; i < sizeof words / sizeof *words; i++) {
        if (!strcmp(word, words[i].word)) {
            *storage = words[i].storage;
            return true;
        }
    }
    return false;
}

/* "doc: i32[seq_k], cap: f32" */
static bool parse_params(const char *text, loom__reference *r) {
    while (*text) {
        char word[8];
        int used = 0;
        loom__param_facts *param = &r->params[r->num_params];
        if (r->num_params == LOOM__MAX_PARAMS ||
            sscanf(text, " %63[A-Za-z0-9_] : %7[a-z0-9]%n", param->name, word, &used) != 2 ||
            !parse_storage(word, &param->storage))
            return false;
        text += used;
        if (*text == '[') {
            do {
                text++;
                if (param->num_dims == LOOM__MAX_DIMS ||
                    sscanf(text, " %47[^],]%n", param->dims[param->num_dims], &used) != 1)
                    return false;
                param->num_dims++;
                text += used;
            } while (*text == ',');
            if (*text++ != ']') return false;
        }
        r->num_params++;
        text += strspn(text, " ,");
    }
    return true;
}

loom_status loom__reference_create(const char *canonical, loom__reference **reference, loom_error *error) {
    static const char field[] = "reference.problem";
    loom_status status = LOOM_OK;
    char *mask = NULL, *score = NULL, *params = NULL, word[64];
    const char *at = canonical;
    loom__reference *r = calloc(1, sizeof *r);
    if (!r) return loom__fail(error, LOOM_MEMORY, field, "no memory for the reference");
    while (!status && *(at += strspn(at, " \n"))) {
        size_t length = strcspn(at, " {");
        if (at[length] == '{') {
            char **text = !strncmp(at, "mask={", 6)     ? &mask
                          : !strncmp(at, "score={", 7)  ? &score
                          : !strncmp(at, "params={", 8) ? &params
                                                        : NULL;
            if (!text || *text || !(*text = braced(at + length, &at)))
                status = loom__fail(error, LOOM_INVALID, field, "cannot read \"%s\"", at);
            continue;
        }
        snprintf(word, sizeof word, "%.*s", (int)length, at);
        at += length;
        if (!strcmp(word, "fp32"))
            r->dtype = LOOM__F32;
        else if (!strcmp(word, "fp16"))
            r->dtype = LOOM__F16;
        else if (!strcmp(word, "bf16"))
            r->dtype = LOOM__BF16;
        else if (!strcmp(word, "backward"))
            r->backward = true;
        else if (!strcmp(word, "deterministic"))
            r->deterministic = true;
        else if (sscanf(word, "d=%d", &r->d) == 1)
            r->dv = strchr(word, ':') ? atoi(strchr(word, ':') + 1) : r->d;
        else
            status = loom__fail(error, LOOM_INVALID, field, "unknown word \"%s\" in \"%s\"", word, canonical);
    }
    if (!status && params && !parse_params(params, r))
        status = loom__fail(error, LOOM_INVALID, field, "cannot read params={%s}", params);
    if (!status && mask) status = loom__expression_create(mask, r->params, r->num_params, &r->mask, error);
    if (!status && score) status = loom__expression_create(score, r->params, r->num_params, &r->score, error);
    free(mask);
    free(score);
    free(params);
    if (status)
        loom__reference_destroy(r);
    else
        *reference = r;
    return status;
}

void loom__reference_destroy(loom__reference *reference) {
    if (!reference) return;
    loom__expression_destroy(reference->mask);
    loom__expression_destroy(reference->score);
    free(reference);
}
