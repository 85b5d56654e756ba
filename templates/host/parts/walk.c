//@ local tile, seq, start = "tile_k", "seq_k", "k_start"
//@ local own_tile, own_seq, own_start = "tile_q", "seq_q", "q_start"
//@ if over == "queries" then
//@     tile, seq, start, own_tile, own_seq, own_start = "tile_q", "seq_q", "q_start", "tile_k", "seq_k", "k_start"
//@ end
// Which tiles of ${over} the work visits, and which of them need no mask.
typedef struct Walk {
    int own_lo, own_hi;     // positions of the work's ${over == "keys" and "queries" or "keys"}
    int end;                // one past the last tile there is
//@ if walk == "range" then
    Span outer[num_spans];  // positions where something is visible
    Span inner[num_spans];  // positions where all is visible
//@ end
} Walk;

static Walk walk_begin(const LoomArgs *args, const Work *work) {
    Walk walk;
    const int left = work->${own_seq} - work->tile * ${own_tile};
    walk.own_lo = work->${own_start} + work->tile * ${own_tile};
    walk.own_hi = walk.own_lo + (left < ${own_tile} ? left : ${own_tile}) - 1;
    walk.end = (int)(((long long)work->${seq} + ${tile} - 1) / ${tile});
//@ if walk == "range" then
    visible_${over}(args, work, walk.own_lo, walk.own_hi, walk.outer, walk.inner);
//@ else
    (void)args;
//@ end
    return walk;
}

// The first visited tile at or after `from`, walk->end if there is none. *full: all of it is visible.
static int walk_next(const LoomArgs *args, const Work *work, const Walk *walk, int from, bool *full) {
//@ if walk == "range" then
    (void)args;
    long long next = walk->end;
    for (int i = 0; i < num_spans; ++i) {
        const long long lo = (long long)walk->outer[i].lo - work->${start};
        const long long hi = (long long)walk->outer[i].hi - work->${start};
        const long long tile = lo > (long long)from * ${tile} ? lo / ${tile} : from;
        if (lo <= hi && hi >= tile * ${tile} && tile < next) next = tile;
    }
    const long long lo = work->${start} + next * ${tile};
    const long long last = work->${start} + (long long)work->${seq} - 1;
    const long long hi = lo + ${tile} - 1 < last ? lo + ${tile} - 1 : last;
    *full = false;
    for (int i = 0; i < num_spans; ++i) *full = *full || (walk->inner[i].lo <= lo && hi <= walk->inner[i].hi);
    return (int)next;
//@ else
    *full = false;
    for (; from < walk->end; ++from) {
        const int left = work->${seq} - from * ${tile};
        const int lo = work->${start} + from * ${tile}, hi = lo + (left < ${tile} ? left : ${tile}) - 1;
//@     if over == "keys" then
        const int what = tile_class(args, work, walk->own_lo, walk->own_hi, lo, hi);
//@     else
        const int what = tile_class(args, work, lo, hi, walk->own_lo, walk->own_hi);
//@     end
        if (what != 0) {
            *full = what == 2;
            return from;
        }
    }
    return walk->end;
//@ end
}
