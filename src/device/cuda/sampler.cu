/* sampler.cu - draws a token from each row of logits, on the device.
 *
 * Two kernels.  The first has a block for each chunk of a row: softmax statistics (device/cuda/lm_head/log_softmax.cuh), unless
 * the fused head left them.  The second has a block a row and draws.  Without truncation it reads one chunk, the
 * one where the draw falls.  With truncation (top-k, top-p, min-p) it finds the cut, a key such that the entries above it are
 * kept, by narrowing an interval of keys: each pass measures
 * (counts, or adds the probability of) the entries above seven keys inside the interval.
 * Once the interval holds few entries they are listed in shared memory.  Nothing is sorted.
 *
 * Probabilities are summed as integers, fractions of the largest entry's in fixed point, so
 * sums do not depend on order, and equal inputs give equal draws.
 *
 * Invariant: logp comes from the raw logits' statistics alone, whatever the parameters; penalty
 * and truncation change the draw and logp_kept. */
#include "device/cuda/lm_head/log_softmax.cuh"
#include "device/cuda/sampler.cuh"

enum { MAX_CHUNKS = 1024, /* 4 Mi entries: bounds the shared memory of draw_kernel */ TILES_THREADS = 64 };

/* Scratch: outputs of the first kernel, and the second's own. */
struct sample_mem {
    head_stats *raw, *penalised_stats; /* (R, chunks): of raw * inv_temp; with the repetition penalty, where there is one */
    float *group_max;                  /* (R, groups): of the rows that are truncated */
    mass_t *group_mass;                /* (R, groups) */
    uint32_t *group_ties;              /* (R, groups) */
};

struct sample_job {
    const float *logits;              /* (R, vocab) */
    const struct sample_param *param; /* (R) */
    const uint8_t *seen;              /* (R, seen_bytes), or NULL */
    int64_t vocab, seen_bytes;
    int chunks, groups;
    struct sample_mem mem;
    int32_t *id;
    float *logp, *logp_kept; /* logp_kept may be NULL */
};

static __device__ bool truncates(const struct sample_param &p, int64_t vocab) {
    return !p.greedy && ((p.top_k > 0 && p.top_k < vocab) || p.top_p < 1 || p.min_p > 0);
}
static __device__ bool penalised(const struct sample_job &j, const struct sample_param &p) {
    return j.seen && p.repetition_penalty != 1;
}
static __device__ __forceinline__ float penalise(float raw, float by) { return raw > 0 ? __fdiv_rn(raw, by) : __fmul_rn(raw, by); }

/* ---- statistics: block (x, y) takes chunk x of row y ---- */

__global__ static void __launch_bounds__(HEAD_THREADS, 5) sample_stats_kernel(struct sample_job j) {
    __shared__ head_shared shared;
    const int64_t row = blockIdx.x / j.chunks, chunk = blockIdx.x % j.chunks, first = chunk * DEV_VOCAB_CHUNK;
    const int n = j.vocab - first < DEV_VOCAB_CHUNK ? (int)(j.vocab - first) : DEV_VOCAB_CHUNK;
    pdl_launch_dependents();
    pdl_wait();
    const struct sample_param p = j.param[row];
    const float inv_temp = p.inv_temp, *raw = j.logits + row * j.vocab + first;
    float z[HEAD_PER_THREAD];
    head_load(z, raw, n);
    head_scale(z, n, inv_temp);
    head_stats s = head_chunk_stats<false>(z, &shared);
    if (threadIdx.x == 0) j.mem.raw[row * j.chunks + chunk] = s;
    if (penalised(j, p)) {
        const uint8_t *seen = j.seen + row * j.seen_bytes + first / 8;
        head_load(z, raw, n);
#pragma unroll
        for (int i = 0; i < HEAD_PER_THREAD; i++) {
            const int at = head_at(i);
            if (at < n && (seen[at / 8] >> (at % 8) & 1)) z[i] = penalise(z[i], p.repetition_penalty);
        }
        head_scale(z, n, inv_temp);
        s = head_chunk_stats<false>(z, &shared);
        if (threadIdx.x == 0) j.mem.penalised_stats[row * j.chunks + chunk] = s;
    }
    const int64_t group = chunk * HEAD_WARPS + threadIdx.x;
    if (threadIdx.x < HEAD_WARPS && group < j.groups && truncates(p, j.vocab))
        j.mem.group_max[row * j.groups + group] = shared.max[threadIdx.x];
}

/* The same from the statistics of the tiles (tiles, rows), where nothing is penalised: a thread a row, chunk y. */
__global__ static void __launch_bounds__(TILES_THREADS)
    sample_tiles_kernel(struct sample_job j, const head_stats *tiles, int64_t n_tiles, int64_t rows) {
    const int64_t row = (int64_t)blockIdx.x * TILES_THREADS + threadIdx.x, chunk = blockIdx.y;
    head_stats v[HEAD_TILES];
    pdl_launch_dependents();
    pdl_wait();
    if (row >= rows) return;
    head_load_tiles(v, tiles, chunk * HEAD_TILES, n_tiles, rows, row);
    if (truncates(j.param[row], j.vocab))
#pragma unroll
        for (int g = 0; g < HEAD_WARPS; g++) {
            const int64_t group = chunk * HEAD_WARPS + g;
            if (group < j.groups) j.mem.group_max[row * j.groups + group] = fmaxf(v[2 * g].max, v[2 * g + 1].max);
        }
    j.mem.raw[row * j.chunks + chunk] = head_merge_tiles<false>(v);
}

/* ---- one row, by a block of DRAW_THREADS, or of DRAW_MANY where there are more rows than such blocks run at a time. No result
 * depends on how many: sums are of integers. ---- */

enum {
    DRAW_THREADS = 512,
    DRAW_MANY = 256,
    DRAW_BLOCKS = 2,                /* of DRAW_THREADS on a multiprocessor */
    DRAW_WARPS = DRAW_THREADS / 32, /* at most */
    GROUP_PER_LANE = HEAD_GROUP / 32,
    CHUNK_PER_THREAD = DEV_VOCAB_CHUNK / DRAW_MANY, /* at most */
};

static __device__ __forceinline__ int draw_threads(void) { return (int)blockDim.x; }

struct row {
    const float *raw;
    const uint8_t *seen; /* NULL: no penalty */
    float inv_temp, penalty;
    int64_t vocab;
    int chunks, groups;
    const head_stats *sums; /* (chunks) of the z that is drawn from */
    const float *group_max;
    mass_t *group_mass;
    uint32_t *group_ties;
    float max;  /* of z */
    float unit; /* mass of probability 1, in the scale of the largest */
};

struct draw_shared {
    double prefix[MAX_CHUNKS]; /* without truncation: weight of the chunks up to here */
    uint32_t list[LIST_ROOM];  /* with truncation: keys inside the interval */
    uint32_t n_list;
    mass_t part[N_CUTS][DRAW_WARPS], total[N_CUTS];
    mass_t warp[DRAW_WARPS];
    int pick, chunk;   /* the entry; its chunk or group */
    mass_t rest, ties; /* of the draw, inside the group */
    uint32_t key;
};

static __device__ __forceinline__ float z_at(const struct row &r, float raw, int64_t id) {
    if (r.seen && (r.seen[id / 8] >> (id % 8) & 1)) raw = penalise(raw, r.penalty);
    return __fmul_rn(raw, r.inv_temp);
}

/* Mass of an entry: a probability over the largest entry's, in units. NaN has none. */
static __device__ __forceinline__ mass_t mass_of(float z, float max, float unit) {
    const float e = expf(__fsub_rn(z, max));
    return e > 0 ? (mass_t)__float2ull_rn(__fmul_rn(e, unit)) : 0; /* unit is a power of 2 */
}

static __device__ __forceinline__ mass_t warp_total(mass_t m) {
    for (int d = 16; d > 0; d /= 2) m += __shfl_xor_sync(WARP_ALL, m, d);
    return m;
}
static __device__ __forceinline__ mass_t warp_through(mass_t m) { /* of the lanes up to and with this one */
    const int lane = (int)threadIdx.x % 32;
    for (int d = 1; d < 32; d *= 2) {
        const mass_t o = __shfl_up_sync(WARP_ALL, m, d);
        if (lane >= d) m += o;
    }
    return m;
}

/* Sum over the block of `mine` of the threads before this one; *total of all. */
static __device__ mass_t block_before(mass_t mine, mass_t *total, struct draw_shared *s) {
    const int warp = (int)threadIdx.x / 32, lane = (int)threadIdx.x % 32;
    const mass_t in_warp = warp_through(mine);
    __syncthreads(); /* s->warp was read */
    if (lane == 31) s->warp[warp] = in_warp;
    __syncthreads();
    mass_t before = in_warp - mine, sum = 0;
    for (int w = 0; w < draw_threads() / 32; w++) {
        if (w == warp) before += sum;
        sum += s->warp[w];
    }
    *total = sum;
    return before;
}

/* ---- without truncation ---- */

/* The weights of the chunks, added in order: sum of e^(z - max) over the row; s->prefix after each chunk. */
static __device__ double chunk_prefix(const head_stats *sums, int chunks, float max, struct draw_shared *s) {
    __syncthreads();
    for (int i = (int)threadIdx.x; i < chunks; i += draw_threads()) s->prefix[i] = head_weight(sums[i], max);
    __syncthreads();
    if (threadIdx.x == 0) {
        double sum = 0;
        for (int i = 0; i < chunks; i++) s->prefix[i] = sum = __dadd_rn(sum, s->prefix[i]);
    }
    __syncthreads();
    return s->prefix[chunks - 1];
}

static __device__ float chunks_max(const head_stats *sums, int chunks) {
    float m = -CUDART_INF_F;
    for (int i = (int)threadIdx.x % 32; i < chunks; i += 32) m = fmaxf(m, sums[i].max);
    return warp_max(m);
}

/* The first entry whose running sum passes u of the whole, which is `sum`; s->prefix is that of r.sums.
 * NaN anywhere: entry 0. */
static __device__ int64_t draw_all(const struct row &r, float u, double sum, struct draw_shared *s) {
    const double target = (double)u * sum;
    if (threadIdx.x == 0) s->chunk = s->pick = -1;
    __syncthreads();
    for (int i = (int)threadIdx.x; i < r.chunks; i += draw_threads())
        if (s->prefix[i] > target && !(i > 0 && s->prefix[i - 1] > target)) s->chunk = i;
    __syncthreads();
    const int chunk = s->chunk;
    if (chunk < 0) return 0;
    const float max = r.sums[chunk].max, unit = mass_unit(DEV_VOCAB_CHUNK);
    const double before = chunk > 0 ? s->prefix[chunk - 1] : 0, rest = (target - before) / exp((double)max - (double)r.max);
    const int per = DEV_VOCAB_CHUNK / draw_threads();
    const int64_t first = (int64_t)chunk * DEV_VOCAB_CHUNK + (int64_t)threadIdx.x * per;
    mass_t m[CHUNK_PER_THREAD], mine = 0, total;
#pragma unroll
    for (int i = 0; i < CHUNK_PER_THREAD; i++) {
        m[i] = i < per && first + i < r.vocab ? mass_of(z_at(r, r.raw[first + i], first + i), max, unit) : 0;
        mine += m[i];
    }
    mass_t sum_to = block_before(mine, &total, s), want = (mass_t)__double2ull_rd(rest * (double)unit);
    if (total == 0) return 0;
    if (want >= total) want = total - 1; /* the chunk's sum in f32 was a little larger: the last entry that has a weight */
    if (want >= sum_to && want < sum_to + mine)
#pragma unroll
        for (int i = 0; i < CHUNK_PER_THREAD; i++) {
            if (want >= sum_to && want < sum_to + m[i]) s->pick = (int)(first + i);
            sum_to += m[i];
        }
    __syncthreads();
    return s->pick;
}

/* The largest, the lowest id of equal ones; NaN ranks below all. */
static __device__ int64_t largest(const struct row &r, struct draw_shared *s) {
    if (threadIdx.x == 0) s->pick = 0x7fffffff;
    __syncthreads();
    for (int chunk = 0; chunk < r.chunks; chunk++) {
        if (r.sums[chunk].max != r.max) continue;
        const int64_t first = (int64_t)chunk * DEV_VOCAB_CHUNK;
        for (int64_t i = threadIdx.x; i < DEV_VOCAB_CHUNK && first + i < r.vocab; i += draw_threads())
            if (z_at(r, r.raw[first + i], first + i) == r.max) {
                atomicMin(&s->pick, (int)(first + i));
                break;
            }
        __syncthreads();
        const int pick = s->pick;
        __syncthreads();
        if (pick != 0x7fffffff) return pick;
    }
    return 0;
}

/* ---- with truncation: passes over the row, or over the list ---- */

/* f(key, z, id) of the entries of group g, by one warp. IN_ORDER: a lane's entries follow each other in id. */
template <bool IN_ORDER, class F> static __device__ __forceinline__ void for_group(const struct row &r, int g, F f) {
    enum { AT_ONCE = 8 };
    const int lane = (int)threadIdx.x % 32;
    const int64_t first = (int64_t)g * HEAD_GROUP + (IN_ORDER ? lane * GROUP_PER_LANE : lane);
    const float *raw = r.raw;
    const int64_t vocab = r.vocab;
#pragma unroll 1
    for (int i0 = 0; i0 < GROUP_PER_LANE; i0 += AT_ONCE) {
        float v[AT_ONCE];
#pragma unroll
        for (int i = 0; i < AT_ONCE; i++) {
            const int64_t id = first + (i0 + i) * (IN_ORDER ? 1 : 32);
            v[i] = id < vocab ? raw[id] : 0;
        }
#pragma unroll
        for (int i = 0; i < AT_ONCE; i++) {
            const int64_t id = first + (i0 + i) * (IN_ORDER ? 1 : 32);
            if (id >= vocab) break;
            const float z = z_at(r, v[i], id);
            f(key_of(z), z, id);
        }
    }
}

/* f(key) of every listed entry, or of every entry of the row that may be at or above key lo. */
template <class F>
static __device__ __forceinline__ void for_keys(const struct row &r, bool listed, const struct draw_shared *s, uint32_t lo, F f) {
    if (listed) {
        for (uint32_t i = threadIdx.x; i < s->n_list; i += draw_threads()) f(s->list[i]);
        return;
    }
    for (int g = (int)threadIdx.x / 32; g < r.groups; g += draw_threads() / 32)
        if (group_reaches(r.group_max[g], lo)) for_group<false>(r, g, [&](uint32_t key, float, int64_t) { f(key); });
}

/* s->total[i] = measure of the entries with keys in [cut[i], hi); these keys lie in [lo, hi]. Unless `listed`,
 * the keys in [lo, hi) are listed, s->n_list says how many there are: more than LIST_ROOM is too many. */
template <bool MASS>
static __device__ void measure_pass(const struct row &r, bool listed, uint32_t lo, uint32_t hi, const uint32_t (&cut)[N_CUTS],
                                    struct draw_shared *s) {
    const int warp = (int)threadIdx.x / 32, lane = (int)threadIdx.x % 32;
    bool room = !listed;
    mass_t sum[N_CUTS];
#pragma unroll
    for (int i = 0; i < N_CUTS; i++) sum[i] = 0;
    if (!listed && threadIdx.x == 0) s->n_list = 0;
    __syncthreads();
    for_keys(r, listed, s, lo, [&](uint32_t key) {
        if (key < lo || key >= hi) return;
        if (room) {
            const uint32_t at = atomicAdd(&s->n_list, 1u);
            room = at < LIST_ROOM;
            if (room) s->list[at] = key;
        }
        const mass_t m = MASS ? mass_of(z_of(key), r.max, r.unit) : 1;
#pragma unroll
        for (int i = 0; i < N_CUTS; i++)
            if (key >= cut[i]) sum[i] += m;
    });
#pragma unroll
    for (int i = 0; i < N_CUTS; i++) {
        const mass_t w = warp_total(sum[i]);
        if (lane == 0) s->part[i][warp] = w;
    }
    __syncthreads();
    if (threadIdx.x < N_CUTS) {
        mass_t t = 0;
        for (int w = 0; w < draw_threads() / 32; w++) t += s->part[threadIdx.x][w];
        s->total[threadIdx.x] = t;
    }
    __syncthreads();
}

/* The largest key whose entries at or above it measure at least `target`, among keys from lo.key on, at
 * which they surely do; and how many of the entries with that very key are needed. For masses the target
 * is the part top_p of all entries above lo.key and lo.ties of those equal to it. `listed`: s->list and
 * s->n_list hold the keys already. */
template <bool MASS>
static __device__ __noinline__ struct cut narrow(const struct row &r, struct cut lo, mass_t target, float top_p, bool listed,
                                                 struct draw_shared *s) {
    struct interval v = {lo.key, key_of(r.max) + 1, 0};
    for (int round = 0; round == 0 || v.hi - v.lo > 1; round++) {
        uint32_t cut[N_CUTS];
        interval_cuts(cut, &v, round, r.max);
        measure_pass<MASS>(r, listed, v.lo, v.hi, cut, s);
        mass_t total[N_CUTS];
#pragma unroll
        for (int i = 0; i < N_CUTS; i++) total[i] = s->total[i];
        listed = s->n_list <= LIST_ROOM;
        __syncthreads();        /* all have read */
        if (MASS && round == 0) /* cut[0] is lo + 1 */
            target = mass_part(total[0] + (lo.ties ? lo.ties * mass_of(z_of(lo.key), r.max, r.unit) : 0), top_p);
        interval_narrow(&v, cut, total, target);
    }
    return interval_cut(&v, target, MASS ? mass_of(z_of(v.lo), r.max, r.unit) : 1);
}

/* A key that at least k entries reach: the k-th largest of the groups' maxima. */
static __device__ uint32_t bound_top_k(const struct row &r, mass_t k, struct draw_shared *s) {
    if (k > (mass_t)r.groups || r.groups > LIST_ROOM) return 0;
    __syncthreads();
    for (int g = (int)threadIdx.x; g < r.groups; g += draw_threads()) s->list[g] = key_of(r.group_max[g]);
    if (threadIdx.x == 0) s->n_list = (uint32_t)r.groups;
    __syncthreads();
    const struct cut none = {0, 0};
    const uint32_t key = narrow<false>(r, none, k, 0, true, s).key;
    __syncthreads();
    return key;
}

/* The smallest key whose probability is at least min_p times the largest's. */
static __device__ uint32_t min_p_key(const struct row &r, uint32_t lo, float min_p, struct draw_shared *s) {
    if (threadIdx.x == 0) {
        uint32_t below = lo, hi = key_of(r.max); /* hi: surely kept */
        if (exp((double)z_of(lo) - (double)r.max) >= (double)min_p) hi = lo;
        while (hi - below > 1) {
            const uint32_t mid = below + (hi - below) / 2;
            if (exp((double)z_of(mid) - (double)r.max) >= (double)min_p) hi = mid;
            else below = mid;
        }
        s->key = hi;
    }
    __syncthreads();
    return s->key;
}

/* The kept: keys above cut.key, and the first cut.ties of the entries equal to it. */
static __device__ struct cut find_cut(const struct row &r, const struct sample_param &p, struct draw_shared *s) {
    struct cut c = {0, 0};
    if (p.top_k > 0 && p.top_k < r.vocab) {
        const struct cut from = {bound_top_k(r, (mass_t)p.top_k, s), 0};
        c = narrow<false>(r, from, (mass_t)p.top_k, 0, false, s);
    }
    if (p.top_p < 1) c = narrow<true>(r, c, 0, p.top_p, false, s);
    if (p.min_p > 0) {
        const uint32_t key = min_p_key(r, c.key, p.min_p, s);
        if (key > c.key) c.key = key - 1, c.ties = 0; /* all with this key stay */
    }
    return c;
}

/* Mass above the cut and ties at it, of each group. */
static __device__ void group_pass(const struct row &r, struct cut c, struct draw_shared *s) {
    for (int g = (int)threadIdx.x / 32; g < r.groups; g += draw_threads() / 32) {
        mass_t mass = 0, ties = 0;
        if (group_reaches(r.group_max[g], c.key)) {
            for_group<false>(r, g, [&](uint32_t key, float z, int64_t) {
                if (key > c.key) mass += mass_of(z, r.max, r.unit);
                else if (key == c.key) ties++;
            });
            mass = warp_total(mass);
            ties = warp_total(ties);
        }
        if (threadIdx.x % 32 == 0) r.group_mass[g] = mass, r.group_ties[g] = (uint32_t)ties;
    }
    if (threadIdx.x == 0) s->pick = -1;
    __syncthreads();
}

/* The entry of group s->chunk where the kept mass passes s->rest; s->ties of the group's ties are kept. */
static __device__ void pick_in_group(const struct row &r, struct cut c, mass_t tie_mass, struct draw_shared *s) {
    mass_t ties = 0, mass = 0;
    for_group<true>(r, s->chunk, [&](uint32_t key, float, int64_t) { ties += key == c.key; });
    mass_t tie = warp_through(ties) - ties;
    const mass_t first_tie = tie;
    for_group<true>(r, s->chunk, [&](uint32_t key, float z, int64_t) {
        if (key > c.key) mass += mass_of(z, r.max, r.unit);
        else if (key == c.key && tie++ < s->ties) mass += tie_mass;
    });
    mass_t at = warp_through(mass) - mass;
    tie = first_tie;
    for_group<true>(r, s->chunk, [&](uint32_t key, float z, int64_t id) {
        mass_t m = 0;
        if (key > c.key) m = mass_of(z, r.max, r.unit);
        else if (key == c.key && tie++ < s->ties) m = tie_mass;
        if (s->rest >= at && s->rest < at + m) s->pick = (int)id;
        at += m;
    });
}

/* Inverse CDF over the kept entries in id order. NaN throughout: entry 0, and a log-prob that tells. */
static __device__ int64_t draw_truncated(const struct row &r, const struct sample_param &p, float *logp_kept,
                                         struct draw_shared *s) {
    *logp_kept = CUDART_NAN_F;
    if (!isfinite(r.max)) return 0;
    const struct cut c = find_cut(r, p, s);
    const mass_t tie_mass = c.ties ? mass_of(z_of(c.key), r.max, r.unit) : 0;
    group_pass(r, c, s);
    const int per = (r.groups + draw_threads() - 1) / draw_threads();
    const int lo = min((int)threadIdx.x * per, r.groups), hi = min(lo + per, r.groups);
    mass_t ties = 0, mass = 0, all_ties, total;
    for (int g = lo; g < hi; g++) ties += r.group_ties[g];
    const mass_t ties_before = block_before(ties, &all_ties, s);
    mass_t left = kept_ties(c.ties, ties_before, c.ties);
    for (int g = lo; g < hi; g++) {
        const mass_t n = left < r.group_ties[g] ? left : r.group_ties[g];
        mass += r.group_mass[g] + n * tie_mass;
        left -= n;
    }
    mass_t at = block_before(mass, &total, s);
    if (total == 0) return 0;
    mass_t want = (mass_t)__double2ull_rd((double)p.u * (double)total);
    if (want >= total) want = total - 1;
    left = kept_ties(c.ties, ties_before, c.ties);
    for (int g = lo; g < hi; g++) {
        const mass_t n = left < r.group_ties[g] ? left : r.group_ties[g], m = r.group_mass[g] + n * tie_mass;
        if (want >= at && want < at + m) s->chunk = g, s->rest = want - at, s->ties = n;
        at += m;
        left -= n;
    }
    __syncthreads();
    if (threadIdx.x < 32) pick_in_group(r, c, tie_mass, s);
    __syncthreads();
    const int64_t id = s->pick;
    *logp_kept = (float)((double)z_at(r, r.raw[id], id) - (double)r.max - log((double)total / (double)r.unit));
    return id;
}

/* ---- the row's results ---- */

__global__ static void __launch_bounds__(DRAW_THREADS, DRAW_BLOCKS) draw_kernel(struct sample_job j) {
    __shared__ struct draw_shared s;
    const int64_t n = blockIdx.x;
    pdl_launch_dependents();
    pdl_wait();
    const struct sample_param p = j.param[n];
    const bool penalty = penalised(j, p);
    const head_stats *raw_sums = j.mem.raw + n * j.chunks;
    struct row r; /* the same in all threads */
    r.raw = j.logits + n * j.vocab;
    r.seen = penalty ? j.seen + n * j.seen_bytes : NULL;
    r.inv_temp = p.inv_temp, r.penalty = p.repetition_penalty;
    r.vocab = j.vocab, r.chunks = j.chunks, r.groups = j.groups;
    r.sums = penalty ? j.mem.penalised_stats + n * j.chunks : raw_sums;
    r.group_max = j.mem.group_max + n * j.groups;
    r.group_mass = j.mem.group_mass + n * j.groups;
    r.group_ties = j.mem.group_ties + n * j.groups;
    r.max = chunks_max(r.sums, r.chunks);
    r.unit = mass_unit(j.vocab);
    const float raw_max = chunks_max(raw_sums, j.chunks);
    double sum = chunk_prefix(raw_sums, j.chunks, raw_max, &s);
    const double lse = head_lse(raw_max, sum);
    int64_t id;
    float kept = 0;
    if (p.greedy) {
        id = largest(r, &s);
    } else if (truncates(p, j.vocab)) {
        id = draw_truncated(r, p, &kept, &s);
    } else {
        if (penalty) sum = chunk_prefix(r.sums, r.chunks, r.max, &s);
        id = draw_all(r, p.u, sum, &s);
        kept = head_logp(z_at(r, r.raw[id], id), head_lse(r.max, sum));
    }
    if (threadIdx.x != 0) return;
    j.id[n] = (int32_t)id;
    j.logp[n] = head_logp(__fmul_rn(r.raw[id], r.inv_temp), lse);
    if (j.logp_kept) j.logp_kept[n] = kept;
}

/* ---- the op ---- */

static size_t padded(size_t bytes) { return (bytes + 255) & ~(size_t)255; }

int cuda_sample_device(struct cuda *c, const struct sample_args *a, const struct head_stats *tiles) {
    const int64_t rows = a->logits.dim[0], vocab = a->logits.dim[1];
    const int64_t chunks = head_chunks(vocab), groups = (vocab + HEAD_GROUP - 1) / HEAD_GROUP;
    if (chunks > MAX_CHUNKS)
        FAIL(ERR_UNSUPPORTED, "cuda sample: a vocabulary of %lld entries is more than the %d that the device can draw from",
             (long long)vocab, MAX_CHUNKS * DEV_VOCAB_CHUNK);
    const size_t sums = padded((size_t)(rows * chunks) * sizeof(head_stats)), values = padded((size_t)(rows * groups) * 4);
    void *mem;
    TRY(cuda_scratch(c, CUDA_SCRATCH_SAMPLE, 2 * sums + 4 * values, &mem));
    char *p = (char *)mem;
    struct sample_job j = {};
    j.logits = (const float *)a->logits.data;
    j.param = a->param;
    j.seen = (const uint8_t *)a->seen.data;
    j.vocab = vocab, j.seen_bytes = (vocab + 7) / 8;
    j.chunks = (int)chunks, j.groups = (int)groups;
    j.mem.raw = (head_stats *)p;
    j.mem.penalised_stats = (head_stats *)(p + sums);
    j.mem.group_max = (float *)(p + 2 * sums);
    j.mem.group_ties = (uint32_t *)(p + 2 * sums + values);
    j.mem.group_mass = (mass_t *)(p + 2 * sums + 2 * values);
    j.id = (int32_t *)a->id.data;
    j.logp = (float *)a->logp.data;
    j.logp_kept = (float *)a->logp_kept.data;
    const dim3 by_rows((unsigned)((rows + TILES_THREADS - 1) / TILES_THREADS), (unsigned)chunks);
    if (tiles) CU_TRY(cuda_launch(c, sample_tiles_kernel, by_rows, TILES_THREADS, 0, j, tiles, head_tiles(vocab), rows));
    else CU_TRY(cuda_launch(c, sample_stats_kernel, (unsigned)(rows * chunks), HEAD_THREADS, 0, j));
    CU_TRY(cuda_launch(c, draw_kernel, (unsigned)rows, rows > DRAW_BLOCKS * c->n_sm ? DRAW_MANY : DRAW_THREADS, 0, j));
    return 0;
}

int cuda_sample(struct dev *d, const struct sample_args *a) {
    struct cuda *c = cuda_of(d);
    const size_t bytes = (size_t)a->logits.dim[0] * sizeof *a->param;
    void *host, *param;
    TRY(cuda_pinned(c, bytes, &host));
    TRY(cuda_scratch(c, CUDA_SCRATCH_SAMPLE_PARAM, bytes, &param));
    memcpy(host, a->param, bytes);
    CU_TRY(cudaMemcpyAsync(param, host, bytes, cudaMemcpyHostToDevice, c->stream));
    struct sample_args on_device = *a;
    on_device.param = (const struct sample_param *)param;
    TRY(cuda_sample_device(c, &on_device, NULL));
    CU_TRY(cudaStreamSynchronize(c->stream));
    return 0;
}
