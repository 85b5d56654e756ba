/* emulate.c - see emulate.h. Fibers begin as those of ucontext and then change by _longjmp, which is no
 * system call. */
#define _XOPEN_SOURCE 700
#undef _FORTIFY_SOURCE /* it takes jumps between stacks for errors */
#include "emulate.h"

#include <math.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <ucontext.h>

#include "reference.h"

enum {
    LANES = 32,
    MAX_THREADS = 1024,
    MAX_WARPS = MAX_THREADS / LANES,
    STACK_BYTES = 256 * 1024,
    MAX_SMEM_BYTES = 227 * 1024,
    MAX_BARRIERS = 256,
    NUM_NAMED = 16,
    MAX_COPIES = 1024,
    MAX_PRODUCTS = 256,     /* of a warp, not done yet */
    COPY_ROUNDS = 60,       /* at most so many rounds of the scheduler until a copy is done, */
    LATE_ROUNDS = 2000,     /* but of one in ten; a tile takes some hundreds */
    DEADLOCK_ROUNDS = 2000, /* without any progress */
    BOX_BYTES = 128         /* of a row of 64 columns */
};

/* -- State of the block ------------------------------------------------------------------------------- */

typedef struct fiber {
    ucontext_t begins;
    jmp_buf goes_on;
    void *stack;
    bool has_begun, is_done;
    const char *waits_for;
    const long *word; /* what it waits for, if not for a turn alone: a change of this, */
    long value;       /* which was that */
} fiber;

typedef struct product {
    int n;
    bool is_bf16, adds, a_transposed, b_transposed;
    float *sum[LANES];
    const unsigned *a[LANES]; /* NULL: by descriptor */
    uint64_t a_descriptor, b_descriptor;
} product;

typedef struct warp {
    const char *meets_for; /* what those that wait for the others are doing */
    int num_met;
    long num_meetings;
    uint64_t in[LANES], out[LANES];
    product now;
    product products[MAX_PRODUCTS]; /* oldest first */
    int num_products, num_open;     /* the last num_open are not committed */
    int groups[MAX_PRODUCTS];       /* products of each committed group, oldest first */
    int num_groups;
    bool is_slow;
} warp;

typedef struct barrier {
    unsigned at;
    int arrivals, pending; /* of a phase, and still to come in this one */
    long bytes;            /* still to come */
    long phase;            /* parity of the one that is not complete */
} barrier;

typedef struct copy {
    emu_map map;
    int at[5];
    unsigned smem, barrier, thread;
    bool is_load;
    int rounds; /* until it is done */
} copy;

emu_index emu_thread, emu_block, emu_grid;
unsigned char *emu_shared;

typedef struct block {
    fiber fibers[MAX_THREADS];
    warp warps[MAX_WARPS];
    barrier barriers[MAX_BARRIERS];
    int num_barriers;
    copy copies[MAX_COPIES];
    int num_copies;
    struct {
        int num_arrived;
        long num_turns;
    } named[NUM_NAMED + 1]; /* the last is __syncthreads() */
    unsigned char *shared;
} block;

static const emu_launch *launch;
static ucontext_t scheduler_begins;
static jmp_buf scheduler;
static block *blocks[EMU_MAX_BLOCKS], *now; /* those that run together, and the one whose turn it is */
static long progress;                       /* grows with whatever happens */
static uint64_t random_state;
static char failure[2048];

static unsigned random_below(unsigned limit) {
    uint64_t x = random_state += 0x9e3779b97f4a7c15u;
    x = (x ^ x >> 30) * 0xbf58476d1ce4e5b9u;
    x = (x ^ x >> 27) * 0x94d049bb133111ebu;
    return (unsigned)((x ^ x >> 31) >> 32) % limit;
}

static fiber *this_fiber(void) { return &now->fibers[emu_thread.x]; }
static warp *this_warp(void) { return &now->warps[emu_thread.x / LANES]; }
static unsigned this_lane(void) { return emu_thread.x % LANES; }

static void leave(const char *waits_for) {
    fiber *self = this_fiber();
    self->waits_for = waits_for;
    if (!_setjmp(self->goes_on)) _longjmp(scheduler, 1);
}

/* Until the word has another value. */
static void wait_while(const long *word, long value, const char *what) {
    fiber *self = this_fiber();
    self->value = value;
    for (self->word = word; *word == value;) leave(what);
    self->word = NULL;
}

/* The scheduler's: runs a fiber until it leaves. */
static void go_on(fiber *f) {
    if (_setjmp(scheduler)) return;
    if (f->has_begun) _longjmp(f->goes_on, 1);
    f->has_begun = true;
    swapcontext(&scheduler_begins, &f->begins);
}

static void set_failure(const char *format, va_list list) {
    if (failure[0]) return;
    int used = snprintf(failure, sizeof failure, "block %u, thread %u: ", emu_block.x, emu_thread.x);
    vsnprintf(failure + used, sizeof failure - (size_t)used, format, list);
}

/* The scheduler's own failures. */
static void report(const char *format, ...) {
    va_list list;
    va_start(list, format);
    set_failure(format, list);
    va_end(list);
}

/* Ends the launch. Only for fibers. */
void emu_fail(const char *format, ...) {
    va_list list;
    va_start(list, format);
    set_failure(format, list);
    va_end(list);
    for (;;) leave("the end");
}

void emu_check_shared(unsigned at, unsigned bytes) {
    if (at % bytes || at + bytes > launch->smem_bytes)
        emu_fail("%u bytes at %u of %u bytes of shared memory", bytes, at, launch->smem_bytes);
}

void emu_poll(void) { leave("another block"); }

/* -- Warps and blocks that meet ----------------------------------------------------------------------- */

/* Lanes wait for each other; the last to come acts for all. */
static void meet(const char *what, void (*act)(warp *)) {
    warp *w = this_warp();
    if (w->num_met == 0) w->meets_for = what;
    if (strcmp(w->meets_for, what)) emu_fail("a warp diverged: %s, others %s", what, w->meets_for);
    long meeting = w->num_meetings;
    if (++w->num_met == LANES) {
        act(w);
        w->num_met = 0;
        w->num_meetings++;
        progress++;
        return;
    }
    wait_while(&w->num_meetings, meeting, what);
}

static void publish(warp *w) { memcpy(w->out, w->in, sizeof w->out); }

const uint64_t *emu_exchange(const char *what, uint64_t value) {
    this_warp()->in[this_lane()] = value;
    meet(what, publish);
    return this_warp()->out;
}

static void come(int index, int num_threads, bool waits, const char *what) {
    long turn = now->named[index].num_turns;
    if (++now->named[index].num_arrived == num_threads) {
        now->named[index].num_arrived = 0;
        now->named[index].num_turns++;
        progress++;
        return;
    }
    if (waits) wait_while(&now->named[index].num_turns, turn, what);
}

void emu_block_sync(void) { come(NUM_NAMED, (int)launch->threads, true, "__syncthreads"); }

void emu_named_barrier(int id, int num_threads, int waits) {
    if (id < 1 || id >= NUM_NAMED) emu_fail("named barrier %d", id);
    come(id, num_threads, waits, "named barrier");
}

/* -- Barriers in shared memory ------------------------------------------------------------------------ */

static barrier *barrier_at(unsigned at) {
    for (int i = 0; i < now->num_barriers; i++)
        if (now->barriers[i].at == at) return &now->barriers[i];
    return NULL;
}

static barrier *need_barrier(unsigned at) {
    barrier *found = barrier_at(at);
    if (!found) emu_fail("no barrier was initialised at %u", at);
    return found;
}

static void complete(barrier *b) {
    if (b->pending || b->bytes) return;
    b->phase ^= 1;
    b->pending = b->arrivals;
    progress++;
}

void emu_barrier_init(unsigned at, int arrivals) {
    emu_check_shared(at, 8);
    if (barrier_at(at) || now->num_barriers == MAX_BARRIERS)
        emu_fail("barrier at %u initialised again, or too many", at);
    now->barriers[now->num_barriers++] = (barrier){.at = at, .arrivals = arrivals, .pending = arrivals};
}

void emu_barrier_arrive(unsigned at, int bytes) {
    barrier *b = need_barrier(at);
    if (b->pending <= 0) emu_fail("more arrivals at the barrier at %u than it counts", at);
    b->bytes += bytes;
    b->pending--;
    complete(b);
}

void emu_barrier_wait(unsigned at, int parity) {
    barrier *b = need_barrier(at);
    if (random_below(4) == 0) leave("barrier");
    wait_while(&b->phase, parity & 1, "barrier");
    progress++;
}

/* -- Copies by TMA ------------------------------------------------------------------------------------ */

/* Calls `move` for each piece of 16 bytes of a box; tensor is NULL where all of it is outside. */
static void each_piece(const copy *c,
                       void (*move)(unsigned char *smem, unsigned char *tensor, unsigned bytes)) {
    const emu_map *m = &c->map;
    bool is_inside = c->at[3] >= 0 && (uint64_t)c->at[3] < m->extents[3] && c->at[4] >= 0 &&
                     (uint64_t)c->at[4] < m->extents[4];
    for (unsigned chunk = 0; chunk < m->box[2]; chunk++) {
        for (unsigned row = 0; row < m->box[1]; row++) {
            for (unsigned piece = 0; piece < BOX_BYTES / 16; piece++) {
                int64_t x[3] = {c->at[0] + 8 * (int64_t)piece, c->at[1] + (int64_t)row,
                                c->at[2] + (int64_t)chunk};
                bool is_in = is_inside;
                for (int i = 0; i < 3; i++) is_in = is_in && x[i] >= 0 && x[i] < (int64_t)m->extents[i];
                int64_t columns = (int64_t)m->extents[0] - x[0];
                unsigned line = chunk * m->box[1] + row;
                move(emu_shared + c->smem + BOX_BYTES * line + 16 * (piece ^ line % 8),
                     is_in ? m->data + 2 * x[0] + x[1] * (int64_t)m->strides[0] +
                                 x[2] * (int64_t)m->strides[1] + c->at[3] * (int64_t)m->strides[2] +
                                 c->at[4] * (int64_t)m->strides[3]
                           : NULL,
                     columns < 8 ? 2 * (unsigned)columns : 16);
            }
        }
    }
}

static unsigned box_bytes(const emu_map *m) { return BOX_BYTES * m->box[1] * m->box[2]; }

static void load_piece(unsigned char *smem, unsigned char *tensor, unsigned bytes) {
    memset(smem, 0, 16);
    if (tensor) memcpy(smem, tensor, bytes);
}

static void store_piece(unsigned char *smem, unsigned char *tensor, unsigned bytes) {
    if (tensor) memcpy(tensor, smem, bytes);
}

static void start_copy(bool is_load, unsigned smem, const void *map, const int *at, unsigned bar) {
    copy *c = &now->copies[now->num_copies];
    if (now->num_copies == MAX_COPIES) emu_fail("more than %d copies are pending", MAX_COPIES);
    *c = (copy){.smem = smem, .barrier = bar, .thread = emu_thread.x, .is_load = is_load};
    memcpy(&c->map, map, sizeof c->map);
    memcpy(c->at, at, sizeof c->at);
    c->rounds = 1 + (int)random_below(random_below(10) ? COPY_ROUNDS : LATE_ROUNDS);
    if (c->map.box[0] * 2 != BOX_BYTES || c->map.box[3] != 1 || c->map.box[4] != 1)
        emu_fail("not a map of such boxes");
    if (smem % 1024 || smem + box_bytes(&c->map) > launch->smem_bytes) emu_fail("a copy's box at %u", smem);
    if (is_load) {
        need_barrier(bar);
        memset(emu_shared + smem, 0xff, box_bytes(&c->map));
        launch->loaded[emu_block.x] += box_bytes(&c->map);
    }
    now->num_copies++;
}

void emu_load(unsigned to, const void *map, int column, int row, int chunk, int head, int batch,
              unsigned bar) {
    start_copy(true, to, map, (int[]){column, row, chunk, head, batch}, bar);
}

void emu_store(const void *map, int column, int row, int chunk, int head, int batch, unsigned from) {
    start_copy(false, from, map, (int[]){column, row, chunk, head, batch}, 0);
}

/* Of the thread that has started them. */
void emu_stores_wait(void) {
    for (int i = 0; i < now->num_copies;) {
        if (now->copies[i].is_load || now->copies[i].thread != emu_thread.x) {
            i++;
            continue;
        }
        leave("stores");
        i = 0;
    }
}

static void do_copy(const copy *c) {
    each_piece(c, c->is_load ? load_piece : store_piece);
    progress++;
    if (!c->is_load) return;
    barrier *b = barrier_at(c->barrier);
    b->bytes -= box_bytes(&c->map);
    complete(b);
}

/* One round less to wait; with `all`, all are done. */
static void move_copies(bool all) {
    int kept = 0;
    for (int i = 0; i < now->num_copies; i++) {
        if (all || --now->copies[i].rounds <= 0)
            do_copy(&now->copies[i]);
        else
            now->copies[kept++] = now->copies[i];
    }
    now->num_copies = kept;
}

/* -- Products ----------------------------------------------------------------------------------------- */

/* The value of every 16-bit pattern, as bf16 and as fp16. */
static float values_of[2][65536];

static float value_of(unsigned half, bool is_bf16) { return values_of[is_bf16][half & 0xffff]; }

static void make_values(void) {
    if (values_of[1][0x3f80] == 1) return;
    for (unsigned i = 0; i < 65536; i++) {
        values_of[0][i] = loom__fp16_to_float((uint16_t)i);
        values_of[1][i] = loom__bf16_to_float((uint16_t)i);
    }
}

unsigned emu_pack(float lo, float hi, int is_bf16) {
    if (is_bf16) return loom__float_to_bf16(lo) | (unsigned)loom__float_to_bf16(hi) << 16;
    return loom__float_to_fp16(lo) | (unsigned)loom__float_to_fp16(hi) << 16;
}

int emu_is_finite(unsigned half, int is_bf16) { return isfinite(value_of(half, is_bf16)) != 0; }

float emu_fp16(unsigned half) { return value_of(half, false); }

/* Element (i, k) of an operand in shared memory, swizzled by 128 bytes, or not at all with its depth
 * contiguous; i counts rows of A or columns of B. False where it is outside. */
static bool operand(uint64_t descriptor, int i, int k, bool transposed, bool is_bf16, float *value) {
    enum { NOT_SWIZZLED, SWIZZLED_128 };
    unsigned address = (descriptor & 0x3fff) << 4;
    unsigned leading = (descriptor >> 16 & 0x3fff) << 4, stride = (descriptor >> 32 & 0x3fff) << 4;
    unsigned at = transposed
                      ? address + (unsigned)i / 64 * leading + (unsigned)k / 8 * stride +
                            (unsigned)k % 8 * BOX_BYTES + (unsigned)i % 64 * 2
                      : address + (unsigned)i / 8 * stride + (unsigned)i % 8 * BOX_BYTES + (unsigned)k * 2;
    at ^= (at >> 7 & 7) << 4;
    if (descriptor >> 62 == NOT_SWIZZLED) {
        if (transposed) return false;
        at = address + (unsigned)i / 8 * stride + (unsigned)i % 8 * 16 + (unsigned)k / 8 * leading +
             (unsigned)k % 8 * 2;
    } else if (descriptor >> 62 != SWIZZLED_128) {
        return false;
    }
    if (at + 2 > launch->smem_bytes) return false;
    uint16_t half;
    memcpy(&half, emu_shared + at, 2);
    *value = value_of(half, is_bf16);
    return true;
}

/* A warp's 16 rows of D = A B + D. */
static void multiply(const product *p, unsigned warp_index) {
    static float a[16][16], b[16][256];
    bool is_inside = true;
    for (int k = 0; k < 16; k++)
        for (int n = 0; n < p->n; n++)
            is_inside = operand(p->b_descriptor, n, k, p->b_transposed, p->is_bf16, &b[k][n]) && is_inside;
    for (int lane = 0; lane < LANES && p->a[0]; lane++) {
        for (int i = 0; i < 4; i++) {
            int row = lane / 4 + 8 * (i % 2), k = lane % 4 * 2 + 8 * (i / 2);
            a[row][k] = value_of(p->a[lane][i], p->is_bf16);
            a[row][k + 1] = value_of(p->a[lane][i] >> 16, p->is_bf16);
        }
    }
    for (int row = 0; row < 16 && !p->a[0]; row++)
        for (int k = 0; k < 16; k++)
            is_inside = operand(p->a_descriptor, 16 * (int)(warp_index % 4) + row, k, p->a_transposed,
                                p->is_bf16, &a[row][k]) &&
                        is_inside;
    if (!is_inside) {
        emu_fail("an operand of wgmma is outside of shared memory, or swizzled in a way that is not known");
    }
    for (int lane = 0; lane < LANES; lane++) {
        for (int i = 0; i < p->n / 2; i++) {
            int row = lane / 4 + 8 * (i / 2 % 2), n = i / 4 * 8 + lane % 4 * 2 + i % 2;
            float sum = p->adds ? p->sum[lane][i] : 0;
            for (int k = 0; k < 16; k++) sum += a[row][k] * b[k][n];
            p->sum[lane][i] = sum;
        }
    }
}

static void nothing(warp *w) { (void)w; }

static void queue_product(warp *w) {
    product *p = &w->now;
    if (w->num_products == MAX_PRODUCTS) emu_fail("more than %d products are pending", MAX_PRODUCTS);
    for (int lane = 1; lane < LANES; lane++)
        if (w->in[lane] != w->in[0]) emu_fail("a descriptor differs between lanes");
    for (int lane = 0; lane < LANES && !p->adds; lane++)
        for (int i = 0; i < p->n / 2; i++) p->sum[lane][i] = NAN; /* until it is done */
    w->products[w->num_products++] = *p;
    w->num_open++;
}

void emu_wgmma(int n, int is_bf16, int adds, float *sum, const unsigned *a, uint64_t a_descriptor,
               uint64_t b_descriptor, int a_transposed, int b_transposed) {
    warp *w = this_warp();
    unsigned lane = this_lane();
    w->now.n = n;
    w->now.is_bf16 = is_bf16;
    w->now.adds = adds;
    w->now.a_transposed = a_transposed;
    w->now.b_transposed = b_transposed;
    w->now.a_descriptor = a_descriptor;
    w->now.b_descriptor = b_descriptor;
    w->now.sum[lane] = sum;
    w->now.a[lane] = a;
    w->in[lane] = b_descriptor ^ a_descriptor << 7;
    meet("wgmma", queue_product);
}

/* Does the oldest groups until so many are left. */
static void finish_groups(warp *w, int left) {
    while (w->num_groups > left) {
        int num = w->groups[0];
        for (int i = 0; i < num; i++) multiply(&w->products[i], (unsigned)(w - now->warps));
        w->num_products -= num;
        w->num_groups--;
        memmove(w->products, w->products + num, (size_t)w->num_products * sizeof *w->products);
        memmove(w->groups, w->groups + 1, (size_t)w->num_groups * sizeof *w->groups);
    }
}

static void commit(warp *w) {
    w->groups[w->num_groups++] = w->num_open;
    w->num_open = 0;
    if (random_below(4) == 0) finish_groups(w, 0); /* early */
}

static void wait_for_groups(warp *w) {
    if (w->num_open) emu_fail("wgmma was not committed before a wait");
    finish_groups(w, (int)w->in[0]);
}

void emu_wgmma_fence(void) { meet("wgmma.fence", nothing); }
void emu_wgmma_commit(void) { meet("wgmma.commit", commit); }

void emu_wgmma_wait(int groups) {
    if (random_below(2)) leave("wgmma.wait");
    this_warp()->in[this_lane()] = (uint64_t)groups;
    meet("wgmma.wait", wait_for_groups);
}

/* -- The scheduler ------------------------------------------------------------------------------------ */

static void enter(void) {
    launch->kernel(launch->args);
    this_fiber()->is_done = true;
    progress++;
    for (;;) leave("the end");
}

static bool begin_fiber(fiber *f) {
    if (!f->stack) f->stack = malloc(STACK_BYTES);
    if (!f->stack || getcontext(&f->begins)) return false;
    f->has_begun = f->is_done = false;
    f->word = NULL;
    f->waits_for = "its start";
    f->begins.uc_stack.ss_sp = f->stack;
    f->begins.uc_stack.ss_size = STACK_BYTES;
    f->begins.uc_link = NULL;
    makecontext(&f->begins, enter, 0);
    return true;
}

static bool begin_block(void) {
    unsigned num_warps = launch->threads / LANES;
    memset(now->named, 0, sizeof now->named);
    memset(now->shared, 0xff, MAX_SMEM_BYTES);
    now->num_barriers = now->num_copies = 0;
    for (unsigned i = 0; i < num_warps; i++) {
        now->warps[i].num_met = now->warps[i].num_products = now->warps[i].num_open =
            now->warps[i].num_groups = 0;
        now->warps[i].is_slow = random_below(3) == 0;
    }
    for (unsigned i = 0; i < launch->threads; i++)
        if (!begin_fiber(&now->fibers[i])) return false;
    return true;
}

/* One turn for every thread that is not done, but not for all of slow warps. Returns how many are left. */
static unsigned run_round(void) {
    unsigned left = 0, first = random_below(launch->threads);
    for (unsigned i = 0; i < launch->threads && !failure[0]; i++) {
        unsigned thread = (first + i) % launch->threads;
        if (now->fibers[thread].is_done) continue;
        left++;
        if (now->fibers[thread].word && *now->fibers[thread].word == now->fibers[thread].value) continue;
        if (now->warps[thread / LANES].is_slow && random_below(8)) continue;
        emu_thread.x = thread;
        go_on(&now->fibers[thread]);
    }
    return left;
}

static void report_deadlock(unsigned num) {
    char text[1024];
    int used = 0;
    for (unsigned n = 0; n < num && used < 900; n++) {
        const block *b = blocks[n];
        used += snprintf(text + used, sizeof text - (size_t)used, " (%u)", n);
        for (unsigned i = 0; i < launch->threads && used < 900; i += LANES)
            if (!b->fibers[i].is_done)
                used += snprintf(text + used, sizeof text - (size_t)used, " %u: %s;", i / LANES,
                                 b->fibers[i].waits_for);
        for (int i = 0; i < b->num_barriers && used < 900; i++)
            used += snprintf(text + used, sizeof text - (size_t)used,
                             " [%u]: %d to come, %ld bytes, phase %ld;", b->barriers[i].at,
                             b->barriers[i].pending, b->barriers[i].bytes, b->barriers[i].phase);
    }
    report("deadlock. Warps of blocks wait for%s", text);
}

static void check_end(void) {
    for (int i = 0; i < now->num_copies; i++)
        if (now->copies[i].is_load) report("the block ended before a load was done");
    for (unsigned i = 0; i < launch->threads / LANES; i++)
        if (now->warps[i].num_products) report("warp %u ended before its products were done", i);
}

/* It is block `index`'s turn, which runs as the n-th of those that run together. */
static bool take_block(unsigned n, unsigned index) {
    if (!blocks[n] && !(blocks[n] = calloc(1, sizeof **blocks))) return false;
    now = blocks[n];
    if (!now->shared && !(now->shared = aligned_alloc(1024, MAX_SMEM_BYTES))) return false;
    emu_shared = now->shared;
    emu_block.x = index;
    return true;
}

/* Blocks first..first + num - 1, a round of each in turn. Not all have room at once: the next begins when one
 * has ended. */
static void run_blocks(unsigned first, unsigned num) {
    const unsigned room = 1 + random_below(num);
    int idle = 0;
    for (unsigned left = num; left && !failure[0];) {
        long before = progress;
        bool copies_move = false;
        left = 0;
        for (unsigned n = 0; n < num && left < room && !failure[0]; n++) {
            take_block(n, first + n);
            left += run_round() != 0;
            move_copies(false);
            copies_move = copies_move || now->num_copies;
            for (unsigned i = 0; i < launch->threads / LANES && random_below(50) == 0; i++)
                now->warps[i].is_slow = random_below(3) == 0;
        }
        idle = progress == before && !copies_move ? idle + 1 : 0;
        if (idle == DEADLOCK_ROUNDS) report_deadlock(num);
    }
    for (unsigned n = 0; n < num && !failure[0]; n++) {
        take_block(n, first + n);
        check_end();
        if (!failure[0]) move_copies(true);
    }
}

const char *emu_run(const emu_launch *what) {
    launch = what;
    failure[0] = 0;
    random_state = launch->seed;
    emu_grid.x = launch->blocks;
    make_values();
    if (launch->threads > MAX_THREADS || launch->threads % LANES || launch->smem_bytes > MAX_SMEM_BYTES)
        return "the block is too large";
    const unsigned together = launch->stays ? launch->blocks : 1;
    if (together > EMU_MAX_BLOCKS) return "too many blocks that stay";
    for (unsigned first = 0; first < launch->blocks && !failure[0]; first += together) {
        for (unsigned n = 0; n < together; n++)
            if (!take_block(n, first + n) || !begin_block()) return "no memory for a block";
        run_blocks(first, together);
    }
    return failure[0] ? failure : NULL;
}
