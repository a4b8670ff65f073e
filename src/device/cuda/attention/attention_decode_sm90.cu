/* attention_decode_sm90.cu - decode attention on Hopper: one new row of each sequence, a paged KV cache,
 * heads of 64, 128 and 256.  attention_fwd.cu serves everything else.
 *
 * A work unit is a KV head with its group of query heads for some neighbouring sequences, at most 16 packed rows.  The kernel
 * is warp-specialized: two producer warps load tiles of 64 rows of K and V by cp.async into two multi-stage pipelines, four
 * softmax warps compute Q.K^T and the online softmax, four PV warps accumulate P.V.  KV blocks that
 * neighbours share (the prompt of several samples) are read once for all of them; then follow the tiles of each.  A block has
 * one unit, or several where there are more units than blocks run at a time: the producers go on from one to the
 * next without draining the pipeline.
 * In a CUDA graph all but the newest keys are loaded before the previous kernel, which makes those, has ended
 * (device/graph.h allows it), unless sequences see each other's.
 * The new rows' queries come from memory, or, with their K and V, from the QKV GEMM before RoPE
 * (dev_qkv_attn_fwd): then a block norms, rotates and stores what its own units need.
 *
 * The softmax warps have a tile each, side by side; all of them then know the maxima after each of the four
 * (their order does not matter), so that probabilities are final.  Each PV warp walks all tiles for some columns of
 * the output, which is the only sequential chain.  With heads of 256 shared memory has no room for four tiles of keys:
 * the softmax warps have a quarter each of the same tile, and each pipeline two producer warps.
 *
 * Invariant: a row goes through the operations that attention_fwd.cu lists, in that order; a tile
 * that is not of its sequence leaves its state as it is, bit for bit. */
#include "device/cuda/attention/online_softmax.cuh"
#include "device/cuda/norm_rope.cuh"
#include "device/cuda/tma.cuh"

enum { KEYS = DEV_KEY_TILE, PIECE = 16, PIECES = KEYS / PIECE, PANEL = KEYS * PANEL_ROW };
enum { MAX_SEQS = 8, MAX_RUNS = 2 * MAX_SEQS }; /* of a unit */
enum { GROUP = 4 };                             /* softmax warps, and as many PV warps */
/* pipeline stages, so that two blocks with heads of 64 fit a multiprocessor, else one */
enum { STAGES_64 = 6, STAGES_64_MANY = 5, STAGES_128 = 6, STAGES_256 = 3 };
enum { MANY_64 = 5, MANY_128 = 4, MANY_256 = 3 }; /* units of a block where there are many */

/* Consecutive tiles of a sequence, the first being job `from` of the unit; the rows of the mask `rows` see keys
 * [lo, hi) of them. A run that several sequences share has no end, and no newest key. */
struct run {
    int from, tile, rows, seq, lo, hi;
};
struct runs {
    struct run run[MAX_RUNS];
    int n, n_jobs;
};
/* A tile's probabilities, from the softmax warps to the PV warps. */
struct weight_tile {
    uint4 p[4][32];     /* fragments (16 keys each), by lane */
    float2 part[4][32]; /* sums of a quarter, of the lane's two rows */
    float correction[16];
    int rows; /* mask of those that see the tile */
};

/* D: head size; S: pipeline stages; U: most units. In bytes: */
template <int D, int S, int U> struct decode_shape {
    static constexpr int DIM = D, STAGES = S, UNITS = U;
    static constexpr bool QUARTERS = S < GROUP; /* softmax warps have a quarter of a tile each, not a tile each */
    static constexpr int WEIGHT_TILES = QUARTERS ? 2 : GROUP, SOFTMAX = QUARTERS ? GROUP * 32 : 32; /* lanes of a tile */
    static constexpr int COPIERS = QUARTERS ? 2 : 1; /* producer warps of a pipeline */
    static constexpr int WARPS = 2 * GROUP + 2 * COPIERS, THREADS = WARPS * 32;
    static constexpr int TILE = D / 64 * PANEL, COLS = D / 8 / GROUP; /* 64 keys; groups of 8 columns that a PV warp has */
    static constexpr int V = S * TILE, WEIGHTS = 2 * S * TILE;
    static constexpr int TOPS =
        WEIGHTS + WEIGHT_TILES * (int)sizeof(struct weight_tile); /* maxima of scores: (2, tile or quarter, 16) */
    static constexpr int SUMS = TOPS + 2 * GROUP * 16 * 4;        /* at a unit's end: (U, quarter, 16) */
    static constexpr int MAXIMA = SUMS + U * 4 * 16 * 4;          /* at a unit's end: (U, 16) */
    /* mbarriers: full and empty of each stage, of the keys, then of the values; of the probabilities; the new rows are ready */
    static constexpr int K_FULL = MAXIMA + U * 16 * 4, K_EMPTY = K_FULL + S * 8, V_FULL = K_EMPTY + S * 8, V_EMPTY = V_FULL + S * 8;
    static constexpr int P_FULL = V_EMPTY + S * 8, P_EMPTY = P_FULL + WEIGHT_TILES * 8, READY = P_EMPTY + WEIGHT_TILES * 8;
    static constexpr int RUNS = READY + 16, RUNS_EACH = ((int)sizeof(struct runs) + 15) / 16 * 16;
    static constexpr int Q = RUNS + U * RUNS_EACH, Q_EACH = 16 * tile_stride(D); /* a unit's packed rows of tile_stride(D) */
    static constexpr int SMEM = Q + U * Q_EACH;
    static_assert(U <= 2 * GROUP, "a warp plans a unit");
    static_assert(sizeof(struct weight_tile) % 16 == 0 && K_FULL % 8 == 0 && RUNS % 16 == 0, "fragments and mbarriers are aligned");
};

using one_64 = decode_shape<64, STAGES_64, 1>;
using one_128 = decode_shape<128, STAGES_128, 1>;
using one_256 = decode_shape<256, STAGES_256, 1>;
using many_64 = decode_shape<64, STAGES_64_MANY, MANY_64>;
using many_128 = decode_shape<128, STAGES_128, MANY_128>;
using many_256 = decode_shape<256, STAGES_256, MANY_256>;

/* ---- what the block has to do ---- */

/* n units of a KV head: first, first + step, ... of all that its sequences are divided into, the first `larger` of which have one
 * sequence more than `each`. So blocks that run at a time have neighbouring units, whose common KV blocks are in L2. */
struct work {
    int head, first, step, n, each, larger;
};
/* Sequences [seq, seq + n). */
struct unit {
    int seq, n;
};
static __device__ __forceinline__ struct unit unit_of(const struct work &w, int u) {
    const int i = w.first + u * w.step;
    return {i * w.each + min(i, w.larger), w.each + (i < w.larger)};
}

/* A stage of a pipeline, and the parity of its phase. */
struct pipeline_place {
    int stage;
    uint32_t parity;
};
template <int S> static __device__ __forceinline__ void advance(struct pipeline_place &p, int by) {
    p.stage += by;
    if (p.stage >= S) p.stage -= S, p.parity ^= 1;
}
template <class shape> static __device__ __forceinline__ struct runs *runs_of(int u) {
    return (struct runs *)(panel_memory() + shape::RUNS + u * shape::RUNS_EACH);
}

/* Number of the run that job j is of; lanes may ask for different ones. */
static __device__ __forceinline__ int run_of(const struct runs *r, int j) {
    int i = 0;
#pragma unroll
    for (int step = MAX_RUNS / 2; step > 0; step /= 2)
        if (i + step < r->n && r->run[i + step].from <= j) i += step;
    return i;
}

/* How many leading tiles sequence seq + lane has in the same KV blocks as the one before it, lanes 1 .. n - 1; a tile with
 * either's newest key is not shared. The first block tables are loaded before their lengths are known. */
static __device__ __forceinline__ int shared_tiles(const struct cuda_attn &a, int seq, int n) {
    const int lane = (int)threadIdx.x % 32;
    int hi = 0, same = 0, going = (1 << n) - 1; /* bit i: all so far of sequence i are equal */
    for (int base = 0; going > 1; base += 32) {
        int id[MAX_SEQS][PIECES];
#pragma unroll
        for (int i = 0; i < MAX_SEQS; i++)
#pragma unroll
            for (int k = 0; k < PIECES; k++) {
                const int kv_block = ((base + lane) * KEYS + k * PIECE) >> a.block_shift;
                id[i][k] = i < n && kv_block < a.max_blocks ? a.block_table[(int64_t)(seq + i) * a.max_blocks + kv_block] : -1 - i;
            }
        if (base == 0) hi = lane < n ? a.pos0[seq + lane] : 0;
#pragma unroll
        for (int i = 1; i < MAX_SEQS; i++) {
            if (i >= n) break;
            const int end = min(__shfl_sync(WARP_ALL, hi, i - 1), __shfl_sync(WARP_ALL, hi, i));
            bool equal = (base + lane + 1) * KEYS <= end;
#pragma unroll
            for (int k = 0; k < PIECES; k++) equal &= id[i][k] == id[i - 1][k];
            const unsigned differs = ~__ballot_sync(WARP_ALL, equal);
            const int more = differs ? __ffs((int)differs) - 1 : 32;
            if (going >> i & 1 && lane == i) same += more;
            if (differs) going &= ~(1 << i);
        }
    }
    return same;
}

/* Writes the runs of a unit, one warp. Neighbours share a run as long as that saves tiles. */
static __device__ __forceinline__ void plan(const struct cuda_attn &a, struct unit at, struct runs *r) {
    const int seq = at.seq, n = at.n;
    const int lane = (int)threadIdx.x % 32;
    const int same = n > 1 && a.window == 0 ? shared_tiles(a, seq, n) : 0;
    const int rows = lane < n ? a.q_start[seq + lane + 1] - a.q_start[seq + lane] : 0;
    const int hi = rows > 0 ? a.pos0[seq + lane] + 1 : 0, lo = rows > 0 ? first_key(a, hi - 1) : 0;
    const int group = (1 << a.group) - 1;
    int n_runs = 0, jobs = 0;
    /* tiles [from, to) */
    const auto add = [&](int first, int count, int from, int to, int lo_key, int hi_key) {
        if (to <= from) return;
        int mask = 0;
        for (int i = 0; i < count; i++) mask |= group << (first + i) * a.group;
        if (lane == 0) r->run[n_runs] = {jobs, from, mask, seq + first, lo_key, hi_key};
        n_runs++;
        jobs += to - from;
    };
    for (int s = 0; s < n;) {
        int end = s + 1, common = INT_MAX;
        for (; end < n; end++) { /* without the next: saves (end - s - 1) * common tiles */
            const int with = min(common, __shfl_sync(WARP_ALL, same, end));
            const int next = end + 1 < n ? __shfl_sync(WARP_ALL, same, end + 1) : 0;
            if (with == 0 || next > 2 * with || (end > s + 1 && (end - s) * with < (end - s - 1) * common)) break;
            common = with;
        }
        if (end == s + 1) common = 0;
        add(s, end - s, 0, common, 0, INT_MAX);
        for (int i = s; i < end; i++) {
            const int from = __shfl_sync(WARP_ALL, lo, i), to = __shfl_sync(WARP_ALL, hi, i);
            add(i, 1, max(common, from / KEYS), (to + KEYS - 1) / KEYS, from, to);
        }
        s = end;
    }
    if (lane == 0) r->n = n_runs, r->n_jobs = jobs;
}

/* ---- the new rows ---- */

/* Where they come from: rows of the QKV GEMM before heads are split (qkv_args), or, qkv being NULL, queries that are
 * ready in cuda_attn's q, their K and V being in the KV cache. */
struct new_rows {
    const __nv_bfloat16 *qkv, *q_norm, *k_norm;
    const float *rope;
    const int32_t *pos, *slots;
    float eps;
    int n_pos, n_slots;
};

/* A lane's part of one head of a new row: of packed row `row` of the block, or of a sequence's new key or value. */
struct new_head {
    int64_t at; /* element of q or qkv */
    const __nv_bfloat16 *norm;
    __nv_bfloat16 *to; /* destination; NULL: none */
    int pos;           /* for the rotation; -1: none */
    bool have;         /* the sequence has a row */
};

/* The lane's head is number `number` of the unit: packed rows 0 .. 15, then key and value of each sequence. */
static __device__ __forceinline__ struct new_head new_head_of(const struct cuda_attn &a, const struct new_rows &f, struct unit at,
                                                              int head, int number, int i, char *q) {
    const bool is_q = number < 16, is_v = !is_q && number % 2;
    const int D = a.dim, s = is_q ? number / a.group : (number - 16) / 2, t = s < at.n ? a.q_start[at.seq + s] : 0;
    struct new_head x = {};
    x.pos = -1;
    x.have = s < at.n && t < a.q_start[at.seq + s + 1];
    if (is_q) x.to = (__nv_bfloat16 *)(q + number * tile_stride(D)) + i;
    const int of_q = head * a.group + number - s * a.group;
    if (!f.qkv) {
        x.have &= is_q;
        x.at = ((int64_t)t * a.n_q_heads + of_q) * D + i;
    } else if (x.have) {
        const int pos = f.pos[t], slot = f.slots[t];
        if (pos < 0 || pos >= f.n_pos || slot < 0 || slot >= f.n_slots) __trap();
        const int of_qkv = is_q ? of_q : a.n_q_heads + (is_v ? a.n_kv_heads : 0) + head;
        const int row = (((slot >> a.block_shift) * a.n_kv_heads + head) << a.block_shift) + (slot & (a.block_len - 1));
        x.at = ((int64_t)t * (a.n_q_heads + 2 * a.n_kv_heads) + of_qkv) * D + i;
        if (!is_q) x.to = (__nv_bfloat16 *)(is_v ? a.v : a.k) + (int64_t)row * D + i;
        if (!is_v) x.norm = is_q ? f.q_norm : f.k_norm, x.pos = pos;
    }
    return x;
}

/* All units' queries to shared memory, zeros for absent rows, new K and V to the KV cache; the steps of
 * qkv_fwd_kernel. Warp `warp` of 2 * GROUP has every 2 * GROUP-th part. What is read before pdl_wait only the last kernel of a
 * CUDA graph writes. */
template <class shape>
static __device__ __forceinline__ void make_new_rows(const struct cuda_attn &a, const struct new_rows &f, const struct work &w,
                                                     int most, int warp) {
    constexpr int D = shape::DIM, LANES = D / 16, HEADS = 32 / LANES; /* of a head; of a part */
    const int lane = (int)threadIdx.x % 32, i = lane % LANES * CHUNK;
    const int parts = (16 + 2 * most + HEADS - 1) / HEADS; /* of a unit */
#pragma unroll 1
    for (int part = warp; part < w.n * parts; part += 2 * GROUP) {
        const int u = part / parts, first = (part - u * parts) * HEADS;
        char *q = panel_memory() + shape::Q + u * shape::Q_EACH;
        const struct new_head h = new_head_of(a, f, unit_of(w, u), w.head, first + lane / LANES, i, q);
        const __nv_bfloat16 *from = (f.qkv ? f.qkv : (const __nv_bfloat16 *)a.q) + h.at;
        float x0[CHUNK] = {}, x1[CHUNK] = {}, w0[CHUNK] = {}, w1[CHUNK] = {}, cs[2 * CHUNK] = {};
        if (h.pos >= 0) load_rope<true>(cs, f.rope, h.pos, D, i, CHUNK);
        if (h.norm) load8<true>(w0, h.norm + i, CHUNK), load8<true>(w1, h.norm + D / 2 + i, CHUNK);
        pdl_wait();
        if (h.have) load8<true>(x0, from, CHUNK), load8<true>(x1, from + D / 2, CHUNK);
        if (f.q_norm || f.k_norm) { /* alike for all lanes */
            const float rs = head_rstd(x0, x1, D, LANES, f.eps);
            if (h.norm) norm_head<__nv_bfloat16>(x0, x1, w0, w1, rs);
        }
        if (h.pos >= 0) rotate(x0, x1, cs);
        if (h.to) store8<true>(h.to, x0, CHUNK), store8<true>(h.to + D / 2, x1, CHUNK);
    }
    pdl_wait();
    mbarrier_arrive(smem_addr(panel_memory()) + shape::READY);
}

/* ---- producer warps ---- */

/* 16 keys of a job: where they start, as KV block and offset, and [first, last) of them that are seen: seen = first | last << 8. */
struct piece {
    int kv_block, off, seen;
    bool newest, shared; /* a sequence's newest key is among them; several sequences see them */
};
/* Lane (job - base, piece): its piece; nothing is seen of one that no job has. */
static __device__ __forceinline__ struct piece piece_of(const struct cuda_attn &a, const struct runs *runs, int base) {
    const int lane = (int)threadIdx.x % 32, j = base + lane / PIECES;
    struct piece p = {};
    if (j >= runs->n_jobs) return p;
    const struct run r = runs->run[run_of(runs, j)];
    const int key = (r.tile + j - r.from) * KEYS + lane % PIECES * PIECE;
    if (key >= r.hi || key + PIECE <= r.lo) return p;
    p.kv_block = a.block_table[(int64_t)r.seq * a.max_blocks + (key >> a.block_shift)];
    p.off = key & (a.block_len - 1);
    p.seen = max(r.lo - key, 0) | min(r.hi - key, (int)PIECE) << 8;
    p.newest = r.hi - key <= PIECE;
    p.shared = r.hi == INT_MAX;
    return p;
}

/* Queues the copy of the N pieces of a tile whose first rows are at src; lane k of `seen`: what is seen of piece k - first. The
 * lanes have a row's chunks side by side, and whole rows at a time. */
template <class shape, bool WHOLE, int N>
static __device__ __forceinline__ void copy_pieces(uint32_t to, const char *const (&src)[N], const char *anywhere, int seen,
                                                   int first, uint64_t policy) {
    constexpr int CHUNKS = shape::DIM / 8, ROWS = 32 / CHUNKS, TURN = 8 / ROWS; /* rows a copy; copies until places repeat */
    constexpr bool POLICY = shape::UNITS > 1; /* else no other unit follows that could hit in L2 */
    const int lane = (int)threadIdx.x % 32, row = lane / CHUNKS;
    uint32_t place_of[TURN]; /* of my chunk of copy i, without its offset of i * ROWS rows */
#pragma unroll
    for (int i = 0; i < TURN; i++)
        place_of[i] = (uint32_t)(lane % CHUNKS / 8 * PANEL + row * PANEL_ROW + ((lane % 8 ^ (row + i * ROWS)) << 4));
#pragma unroll
    for (int k = 0; k < N; k++) {
        const int seen_of = WHOLE ? PIECE << 8 : __shfl_sync(WARP_ALL, seen, first + k);
#pragma unroll
        for (int n = 0; n < PIECE / ROWS; n++) {
            const int r = n * ROWS + row;
            const bool take = WHOLE || (r >= (seen_of & 255) && r < seen_of >> 8);
            cp_async16_l2<POLICY>(to + (k * PIECE + n * ROWS) * PANEL_ROW + place_of[n % TURN], take ? src[k] + n * 512 : anywhere,
                                  take, policy);
        }
    }
}

/* One producer warp, `part` of COPIERS, loads its part of all units' tiles of x (keys or values); keys that no row sees become
 * zeros. Tiles with a sequence's newest key wait for the new rows. */
template <class shape>
static __device__ __forceinline__ void produce_tiles(const struct cuda_attn &a, const void *x, const struct work &w,
                                                     uint32_t stages, uint32_t full, int part) {
    constexpr int AT_ONCE = 32 / PIECES, N = PIECES / shape::COPIERS, ALL = (1 << N) - 1;
    const char *from = (const char *)x + (int)threadIdx.x % 32 * 16;
    const uint64_t usual = l2_evict_normal(),
                   once = l2_evict_first(); /* keys that one unit sees are evicted first, a shared prompt's stay */
    struct pipeline_place at = {0, 1};
    bool waited = a.shared_new_keys;
    if (waited) mbarrier_wait(smem_addr(panel_memory()) + shape::READY, 0);
    struct piece next = piece_of(a, runs_of<shape>(0), 0);
#pragma unroll 1
    for (int u = 0; u < w.n; u++) {
        const struct runs *runs = runs_of<shape>(u);
        const int n_jobs = runs->n_jobs;
#pragma unroll 1
        for (int base = 0; base == 0 || base < n_jobs; base += AT_ONCE) {
            const int row = ((next.kv_block * a.n_kv_heads + w.head) << a.block_shift) + next.off, seen = next.seen;
            const unsigned whole = __ballot_sync(WARP_ALL, seen == PIECE << 8), newest = __ballot_sync(WARP_ALL, next.newest);
            const unsigned shared = __ballot_sync(WARP_ALL, next.shared);
            if (base + AT_ONCE < n_jobs) next = piece_of(a, runs, base + AT_ONCE);
            else if (u + 1 < w.n) next = piece_of(a, runs_of<shape>(u + 1), 0);
#pragma unroll 1
            for (int i = 0; i < AT_ONCE && base + i < n_jobs; i++, advance<shape::STAGES>(at, 1)) {
                const int first = i * PIECES + part * N;
                const uint32_t to = stages + (uint32_t)(at.stage * shape::TILE + part * (N * PIECE * PANEL_ROW));
                const uint64_t policy = shared >> first & 1 ? usual : once;
                const char *src[N];
#pragma unroll
                for (int k = 0; k < N; k++) src[k] = from + (int64_t)__shfl_sync(WARP_ALL, row, first + k) * (shape::DIM * 2);
                if (!waited && newest >> first & ALL) mbarrier_wait(smem_addr(panel_memory()) + shape::READY, 0), waited = true;
                mbarrier_wait(full + (shape::STAGES + at.stage) * 8, at.parity);
                if ((whole >> first & ALL) == ALL) copy_pieces<shape, true>(to, src, from, seen, first, policy);
                else copy_pieces<shape, false>(to, src, from, seen, first, policy);
                mbarrier_arrive_cp_async(full + at.stage * 8);
            }
        }
    }
}

/* ---- consumer warps ---- */

/* A unit's packed rows as A fragments. */
template <int D> static __device__ __forceinline__ void load_rows(uint32_t (&q)[D / 16][4], uint32_t rows) {
    const int lane = (int)threadIdx.x % 32;
    rows += (lane % 16) * tile_stride(D) + lane / 16 * 16;
#pragma unroll
    for (int k = 0; k < D / 16; k++) ldmatrix_x4(q[k], rows + k * 32);
}

/* s (16, 64) = q . K^T */
template <int D>
static __device__ __forceinline__ void tile_scores(float (&s)[8][4], const uint32_t (&q)[D / 16][4], uint32_t k_tile) {
    const int lane = (int)threadIdx.x % 32, row = lane % 8 + lane / 16 * 8, half = lane / 8 % 2;
    fill_zero(s);
#pragma unroll
    for (int k = 0; k < D / 16; k++)
#pragma unroll
        for (int n = 0; n < 4; n++) {
            uint32_t y[4];
            ldmatrix_x4(y, k_tile + k / 4 * PANEL + n * 16 * PANEL_ROW + panel_offset(row, k % 4 * 2 + half));
            mma_bf16(s[2 * n], q[k], y[0], y[1]);
            mma_bf16(s[2 * n + 1], q[k], y[2], y[3]);
        }
}

/* s (16, 16) = q . K^T of the quarter of a tile whose first key is at `keys` of its first panel. */
template <int D>
static __device__ __forceinline__ void quarter_scores(float (&s)[2][4], const uint32_t (&q)[D / 16][4], uint32_t keys) {
    const int lane = (int)threadIdx.x % 32, row = lane % 8 + lane / 16 * 8, half = lane / 8 % 2;
    fill_zero(s);
#pragma unroll
    for (int k = 0; k < D / 16; k++) {
        uint32_t y[4];
        ldmatrix_x4(y, keys + k / 4 * PANEL + panel_offset(row, k % 4 * 2 + half));
        mma_bf16(s[0], q[k], y[0], y[1]);
        mma_bf16(s[1], q[k], y[2], y[3]);
    }
}

/* Scores of keys outside of [lo, hi) become -inf; the first key is `first`. */
template <int N> static __device__ __forceinline__ void hide_ends(float (&s)[N][4], int first, int lo, int hi) {
#pragma unroll
    for (int n = 0; n < N; n++)
#pragma unroll
        for (int e = 0; e < 4; e++) {
            const int key = first + n * 8 + (int)threadIdx.x % 4 * 2 + e % 2;
            if (key < lo || key >= hi) s[n][e] = -INFINITY;
        }
}

/* The lane's largest score of its row i, then the row's. */
static __device__ __forceinline__ float tile_top(const float (&s)[8][4], int i) {
    float top[4];
#pragma unroll
    for (int n = 0; n < 4; n++) top[n] = fmaxf(fmaxf(s[n][2 * i], s[n][2 * i + 1]), fmaxf(s[n + 4][2 * i], s[n + 4][2 * i + 1]));
    return quad_max(fmaxf(fmaxf(top[0], top[1]), fmaxf(top[2], top[3])));
}

/* Probabilities of quarters first, first + 1, ... relative to base, as fragments, and their sums. */
template <int N>
static __device__ __forceinline__ void softmax_weights(float (&s)[N][4], const float (&base)[2], float scale_log2,
                                                       struct weight_tile *to, int first) {
    const int lane = (int)threadIdx.x % 32;
#pragma unroll
    for (int k = 0; k < N / 2; k++) {
#pragma unroll
        for (int n = 2 * k; n < 2 * k + 2; n++)
#pragma unroll
            for (int e = 0; e < 4; e++) s[n][e] = row_p(s[n][e], scale_log2, base[e / 2]);
        to->p[first + k][lane] =
            make_uint4(pack_bf16(s[2 * k][0], s[2 * k][1]), pack_bf16(s[2 * k][2], s[2 * k][3]),
                       pack_bf16(s[2 * k + 1][0], s[2 * k + 1][1]), pack_bf16(s[2 * k + 1][2], s[2 * k + 1][3]));
        to->part[first + k][lane] = make_float2(row_quarter(s[2 * k][0], s[2 * k][1], s[2 * k + 1][0], s[2 * k + 1][1]),
                                                row_quarter(s[2 * k][2], s[2 * k][3], s[2 * k + 1][2], s[2 * k + 1][3]));
    }
}

/* A row's maximum m goes over the four tiles of a wave, whose maxima are tops[0, 16, 32, 48]; row_rescale's results
 * for tile `mine`, whose maximum is `top`. */
static __device__ __forceinline__ float rescale(float *m, const float *tops, int mine, float top, float scale_log2,
                                                float *correction) {
    float before = *m;
#pragma unroll
    for (int u = 0; u < GROUP; u++) {
        const float scaled = __fmul_rn(tops[u * 16], scale_log2);
        if (u < mine) before = fmaxf(before, scaled);
        *m = fmaxf(*m, scaled);
    }
    return row_rescale(&before, top, scale_log2, correction);
}

/* Softmax warp: Q.K^T and online softmax of tiles warp, warp + GROUP, ... of each unit. */
template <class shape> static __device__ __forceinline__ void softmax_tiles(float scale_log2, const struct work &w, int warp) {
    constexpr int D = shape::DIM, S = shape::STAGES;
    const int lane = (int)threadIdx.x % 32, row = lane / 4;
    const uint32_t smem = smem_addr(panel_memory()), p_full = smem + shape::P_FULL + warp * 8,
                   p_empty = smem + shape::P_EMPTY + warp * 8;
    struct weight_tile *to = (struct weight_tile *)(panel_memory() + shape::WEIGHTS) + warp;
    float *tops = (float *)(panel_memory() + shape::TOPS);
    uint32_t wave = 0, turn = 0;
    struct pipeline_place start = {0, 0};
    mbarrier_wait(smem + shape::READY, 0);
#pragma unroll 1
    for (int u = 0; u < w.n; u++) {
        const struct runs *runs = runs_of<shape>(u);
        const int n_jobs = runs->n_jobs;
        float m[2] = {-INFINITY, -INFINITY};
        uint32_t q[D / 16][4];
        load_rows<D>(q, smem + shape::Q + u * shape::Q_EACH);
        struct pipeline_place at = start;
        advance<S>(at, warp);
        const int wraps = (start.stage + n_jobs) / S;
        start.stage += n_jobs - wraps * S, start.parity ^= wraps & 1;
#pragma unroll 1
        for (int base = 0; base < n_jobs; base += GROUP, wave ^= 1, advance<S>(at, GROUP)) {
            const int j = base + warp;
            float s[8][4], top[2] = {-INFINITY, -INFINITY}, from[2], correction[2];
            int rows = 0; /* mask */
            if (j < n_jobs) {
                const struct run x = runs->run[run_of(runs, j)];
                const int first = (x.tile + j - x.from) * KEYS;
                rows = x.rows;
                mbarrier_wait(smem + shape::K_FULL + at.stage * 8, at.parity);
                tile_scores<D>(s, q, smem + (uint32_t)(at.stage * shape::TILE));
                mbarrier_arrive(smem + shape::K_EMPTY + at.stage * 8);
                if (first < x.lo || first + KEYS > x.hi) hide_ends(s, first, x.lo, x.hi);
                const float t[2] = {tile_top(s, 0), tile_top(s, 1)};
                if (rows >> row & 1) top[0] = t[0];
                if (rows >> (row + 8) & 1) top[1] = t[1];
            }
            float *of_wave = tops + wave * GROUP * 16 + row;
            if (lane % 4 == 0) of_wave[warp * 16] = top[0], of_wave[warp * 16 + 8] = top[1];
            named_barrier_sync(1, GROUP * 32);
#pragma unroll
            for (int i = 0; i < 2; i++) from[i] = rescale(&m[i], of_wave + 8 * i, warp, top[i], scale_log2, &correction[i]);
            if (j >= n_jobs) continue;
            mbarrier_wait(p_empty, turn ^ 1);
            turn ^= 1;
            if (lane % 4 == 0) to->correction[row] = correction[0], to->correction[row + 8] = correction[1];
            if (lane == 0) to->rows = rows;
            softmax_weights(s, from, scale_log2, to, 0);
            if (j == n_jobs - 1 && lane % 4 == 0) {
                float *max = (float *)(panel_memory() + shape::MAXIMA) + u * 16;
                max[row] = m[0], max[row + 8] = m[1];
            }
            mbarrier_arrive(p_full);
        }
    }
}

/* Softmax warp: Q.K^T and online softmax of quarter `warp` of all tiles. */
template <class shape> static __device__ __forceinline__ void softmax_quarters(float scale_log2, const struct work &w, int warp) {
    constexpr int D = shape::DIM, S = shape::STAGES;
    const int lane = (int)threadIdx.x % 32, row = lane / 4;
    const uint32_t smem = smem_addr(panel_memory());
    struct weight_tile *const weights = (struct weight_tile *)(panel_memory() + shape::WEIGHTS);
    float *const tops = (float *)(panel_memory() + shape::TOPS);
    struct pipeline_place at = {0, 0};
    uint32_t wave = 0, turns = 0; /* bit i: parity of the next weight tile i */
    mbarrier_wait(smem + shape::READY, 0);
#pragma unroll 1
    for (int u = 0; u < w.n; u++) {
        const struct runs *runs = runs_of<shape>(u);
        const int n_jobs = runs->n_jobs;
        float m[2] = {-INFINITY, -INFINITY};
        uint32_t q[D / 16][4];
        load_rows<D>(q, smem + shape::Q + u * shape::Q_EACH);
#pragma unroll 1
        for (int j = 0; j < n_jobs; j++, wave ^= 1, advance<S>(at, 1)) {
            const struct run x = runs->run[run_of(runs, j)];
            const int first = (x.tile + j - x.from) * KEYS;
            float s[2][4], from[2], correction[2];
            mbarrier_wait(smem + shape::K_FULL + at.stage * 8, at.parity);
            quarter_scores<D>(s, q, smem + (uint32_t)(at.stage * shape::TILE + warp * (PIECE * PANEL_ROW)));
            mbarrier_arrive(smem + shape::K_EMPTY + at.stage * 8);
            if (first < x.lo || first + KEYS > x.hi) hide_ends(s, first + warp * PIECE, x.lo, x.hi);
            float *const of_tile = tops + wave * GROUP * 16 + row;
#pragma unroll
            for (int i = 0; i < 2; i++) {
                const float top = quad_max(fmaxf(fmaxf(s[0][2 * i], s[0][2 * i + 1]), fmaxf(s[1][2 * i], s[1][2 * i + 1])));
                if (lane % 4 == 0) of_tile[warp * 16 + 8 * i] = x.rows >> (row + 8 * i) & 1 ? top : -INFINITY;
            }
            named_barrier_sync(1, GROUP * 32);
#pragma unroll
            for (int i = 0; i < 2; i++) {
                const float *const y = of_tile + 8 * i;
                from[i] = row_rescale(&m[i], fmaxf(fmaxf(y[0], y[16]), fmaxf(y[32], y[48])), scale_log2, &correction[i]);
            }
            const int i = j % shape::WEIGHT_TILES;
            struct weight_tile *const to = weights + i;
            mbarrier_wait(smem + shape::P_EMPTY + i * 8, (turns >> i & 1) ^ 1);
            turns ^= 1u << i;
            if (warp == 0 && lane % 4 == 0) to->correction[row] = correction[0], to->correction[row + 8] = correction[1];
            if (warp == 0 && lane == 0) to->rows = x.rows;
            softmax_weights(s, from, scale_log2, to, warp);
            if (j == n_jobs - 1 && warp == 0 && lane % 4 == 0) {
                float *max = (float *)(panel_memory() + shape::MAXIMA) + u * 16;
                max[row] = m[0], max[row + 8] = m[1];
            }
            mbarrier_arrive(smem + shape::P_FULL + i * 8);
        }
    }
}

/* Operands of half a tile, 32 keys, for a warp's columns of P.V. */
template <int COLS> struct operands {
    uint4 p[2];
    uint32_t v[COLS][4];
};
/* State of the lane's two rows; l: sums of this warp's quarter of the tiles. */
template <int COLS> struct pv_rows { float l[2], acc[COLS][4]; };

template <int COLS> static __device__ __forceinline__ void pv_half(float (&sum)[COLS][4], const struct operands<COLS> &y) {
#pragma unroll
    for (int k = 0; k < 2; k++) {
        const uint32_t p[4] = {y.p[k].x, y.p[k].y, y.p[k].z, y.p[k].w};
#pragma unroll
        for (int n = 0; n < COLS; n++) mma_bf16(sum[n], p, y.v[n][2 * k], y.v[n][2 * k + 1]);
    }
}

template <class shape>
static __device__ __forceinline__ void store_rows(const struct cuda_attn &a, struct unit u, int head, int warp,
                                                  const struct pv_rows<shape::COLS> &x, const float *sums, const float *max) {
    const int lane = (int)threadIdx.x % 32, t = lane % 4;
#pragma unroll
    for (int i = 0; i < 2; i++) {
        const int r = lane / 4 + 8 * i, s = r / a.group;
        if (s >= u.n || a.q_start[u.seq + s + 1] == a.q_start[u.seq + s]) continue;
        const float l = __fadd_rn(__fadd_rn(sums[r], sums[16 + r]), __fadd_rn(sums[32 + r], sums[48 + r])), inv = __frcp_rn(l);
        const int64_t at = (int64_t)a.q_start[u.seq + s] * a.n_q_heads + head * a.group + (r - s * a.group);
        uint16_t *out = (uint16_t *)a.out + at * shape::DIM;
#pragma unroll
        for (int c = 0; c < shape::COLS; c++)
            *(uint32_t *)(out + (warp + GROUP * c) * 8 + 2 * t) = row_out(x.acc[c][2 * i], x.acc[c][2 * i + 1], inv);
        if (a.lse && t == 0 && warp == 0) a.lse[at] = row_lse(max[r], l);
    }
}

/* PV warp: groups warp, warp + GROUP, ... of 8 columns, and the sums of quarter `warp` of the tiles. The operands of a half
 * are loaded before the MMAs of the half before it. */
template <class shape> static __device__ __forceinline__ void pv_tiles(const struct cuda_attn &a, const struct work &w, int warp) {
    constexpr int COLS = shape::COLS;
    const int lane = (int)threadIdx.x % 32, row = lane / 4;
    const uint32_t smem = smem_addr(panel_memory()), v_mine = smem + shape::V + panel_offset(lane, warp);
    const struct weight_tile *const weights = (const struct weight_tile *)(panel_memory() + shape::WEIGHTS);
    struct pipeline_place at = {0, 0};
    uint32_t turns = 0; /* bit i: parity of the next weight tile i */
    const auto load = [&](struct operands<COLS> &y, int half, int tile) {
        const uint32_t v = v_mine + (uint32_t)(at.stage * shape::TILE + half * 32 * PANEL_ROW);
#pragma unroll
        for (int n = 0; n < COLS; n++) /* group warp + 4 n: the swizzle takes 4 as the other half of the panel */
            ldmatrix_x4_trans(y.v[n], (n % 2 ? v ^ 64 : v) + n / 2 * PANEL);
        const struct weight_tile *x = weights + tile % shape::WEIGHT_TILES;
#pragma unroll
        for (int k = 0; k < 2; k++) y.p[k] = x->p[2 * half + k][lane];
    };
    const auto wait = [&](int tile) {
        const int i = tile % shape::WEIGHT_TILES;
        mbarrier_wait(smem + shape::V_FULL + at.stage * 8, at.parity);
        mbarrier_wait(smem + shape::P_FULL + i * 8, turns >> i & 1);
        turns ^= 1u << i;
    };
#pragma unroll 1
    for (int u = 0; u < w.n; u++) {
        const int n_jobs = runs_of<shape>(u)->n_jobs;
        struct pv_rows<COLS> x = {};
        struct operands<COLS> first, second;
        if (n_jobs > 0) wait(0), load(first, 0, 0);
#pragma unroll 1
        for (int j = 0; j < n_jobs; j++) {
            const struct weight_tile *y = weights + j % shape::WEIGHT_TILES;
            const float correction[2] = {y->correction[row], y->correction[row + 8]};
            const float2 part = y->part[warp][lane];
            const int rows = y->rows >> row;
            const bool seen[2] = {(rows & 1) != 0, (rows >> 8 & 1) != 0}; /* the tile is of this row's sequence */
            float sum[COLS][4];
            load(second, 1, j);
#pragma unroll
            for (int n = 0; n < COLS; n++)
#pragma unroll
                for (int e = 0; e < 4; e++) sum[n][e] = __fmul_rn(x.acc[n][e], correction[e / 2]);
            if (seen[0]) x.l[0] = row_sum(x.l[0], correction[0], part.x);
            if (seen[1]) x.l[1] = row_sum(x.l[1], correction[1], part.y);
            pv_half(sum, first);
            mbarrier_arrive(smem + shape::V_EMPTY + at.stage * 8);
            mbarrier_arrive(smem + shape::P_EMPTY + j % shape::WEIGHT_TILES * 8);
            advance<shape::STAGES>(at, 1);
            if (j + 1 < n_jobs) wait(j + 1), load(first, 0, j + 1);
            pv_half(sum, second);
#pragma unroll
            for (int n = 0; n < COLS; n++)
#pragma unroll
                for (int e = 0; e < 4; e++) x.acc[n][e] = seen[e / 2] ? sum[n][e] : x.acc[n][e];
        }
        float *sums = (float *)(panel_memory() + shape::SUMS) + u * 4 * 16;
#pragma unroll
        for (int i = 0; i < 2; i++) {
            x.l[i] = quad_sum(x.l[i]);
            if (lane % 4 == 0) sums[warp * 16 + row + 8 * i] = x.l[i];
        }
        named_barrier_sync(2, GROUP * 32);
        store_rows<shape>(a, unit_of(w, u), w.head, warp, x, sums, (const float *)(panel_memory() + shape::MAXIMA) + u * 16);
    }
}

template <class shape> static __device__ __forceinline__ void init_mbarriers() {
    const uint32_t smem = smem_addr(panel_memory());
    constexpr int copiers = shape::COPIERS * 32;
    for (int i = 0; i < shape::STAGES; i++) {
        mbarrier_init(smem + shape::K_FULL + i * 8, copiers), mbarrier_init(smem + shape::K_EMPTY + i * 8, shape::SOFTMAX);
        mbarrier_init(smem + shape::V_FULL + i * 8, copiers), mbarrier_init(smem + shape::V_EMPTY + i * 8, GROUP * 32);
    }
    for (int i = 0; i < shape::WEIGHT_TILES; i++)
        mbarrier_init(smem + shape::P_FULL + i * 8, shape::SOFTMAX), mbarrier_init(smem + shape::P_EMPTY + i * 8, GROUP * 32);
    mbarrier_init(smem + shape::READY, 2 * GROUP * 32);
    mbarrier_init_fence();
}

/* Block (its first unit, KV head). Units have at most `most` sequences and differ by at most one, and no two make the same
 * key. Before pdl_wait only what the previous kernel does not write is read: where the sequences and their keys are, and all
 * keys but the newest. Every lane that has read or written arrives at an mbarrier, not one for its warp, as racecheck does not
 * follow an order through __syncwarp; it costs nothing. */
template <class shape, int BLOCKS>
__global__ void __launch_bounds__(shape::THREADS, BLOCKS)
    decode_kernel(const struct cuda_attn a, const struct new_rows f, int n_seqs, int most) {
    const int warp = (int)threadIdx.x / 32, planned = shape::WARPS - 1 - warp; /* the producer warps plan first */
    const int first = (int)blockIdx.x, step = (int)gridDim.x, units = shape::UNITS > 1 ? (n_seqs + most - 1) / most : step;
    const struct work w = {(int)blockIdx.y, first,         step, shape::UNITS > 1 ? (units - first + step - 1) / step : 1,
                           n_seqs / units,  n_seqs % units};
    const uint32_t smem = smem_addr(panel_memory());
    pdl_launch_dependents();
    if (threadIdx.x == 0) init_mbarriers<shape>();
    if (planned < w.n) plan(a, unit_of(w, planned), runs_of<shape>(planned));
    __syncthreads();
    if (warp < 2 * GROUP) make_new_rows<shape>(a, f, w, most, warp);
    if (warp < GROUP) pv_tiles<shape>(a, w, warp);
    else if (warp < 2 * GROUP) {
        if constexpr (shape::QUARTERS) softmax_quarters<shape>(a.scale_log2, w, warp - GROUP);
        else softmax_tiles<shape>(a.scale_log2, w, warp - GROUP);
    } else {
        const int part = warp - 2 * GROUP;
        if (part < shape::COPIERS) produce_tiles<shape>(a, a.k, w, smem, smem + shape::K_FULL, part);
        else produce_tiles<shape>(a, a.v, w, smem + shape::V, smem + shape::V_FULL, part - shape::COPIERS);
    }
}

/* ---- the op ---- */

template <class shape, int BLOCKS>
static int launch(struct cuda *c, const struct cuda_attn &p, const struct new_rows &f, int64_t n, int64_t blocks, int most) {
    const auto kernel = decode_kernel<shape, BLOCKS>;
    CU_TRY(cudaFuncSetAttribute((const void *)kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, shape::SMEM));
    CU_TRY(cuda_launch(c, kernel, dim3((unsigned)blocks, (unsigned)p.n_kv_heads), shape::THREADS, shape::SMEM, p, f, (int)n, most));
    return 0;
}
/* Blocks of one unit as long as they are one wave, with as few sequences as that allows; else full units, distributed over one
 * wave of blocks, or over several. */
static int launch_any(struct cuda *c, const struct cuda_attn &p, const struct new_rows &f, int64_t n) {
    if (n == 0) return 0;
    const auto choose = [&](auto d64, auto d128, auto d256) { return p.dim == 64 ? d64 : p.dim == 128 ? d128 : d256; };
    const int most = 16 / p.group < MAX_SEQS ? 16 / p.group : MAX_SEQS;
    const int64_t at_once = (int64_t)c->n_sm * (p.dim == 64 ? 2 : 1) / p.n_kv_heads, room = at_once > 0 ? at_once : 1;
    if (n <= room * most) {
        const auto run = choose(launch<one_64, 2>, launch<one_128, 1>, launch<one_256, 1>);
        return run(c, p, f, n, n < room ? n : room, most);
    }
    const int64_t full = room * most * choose(MANY_64, MANY_128, MANY_256), blocks = (n + full - 1) / full * room;
    const auto run = choose(launch<many_64, 2>, launch<many_128, 1>, launch<many_256, 1>);
    return run(c, p, f, n, blocks, most);
}

static bool takes(const struct cuda *c, const struct attn_args *a, const struct cuda_attn &p) {
    return cuda_hopper(c) && attn_on_tensor_cores(a) && (p.dim == 64 || p.dim == 128 || p.dim == 256) && p.block_table &&
           a->seqs.max_q == 1 && p.group <= 16 && p.block_shift >= 0 && p.block_len >= PIECE && p.n_kv_heads <= 65535 &&
           p.softcap == 0 && c->smem_max >= (size_t)(p.dim == 256 ? many_256::SMEM : many_128::SMEM);
}

int cuda_attn_decode_sm90(struct cuda *c, const struct attn_args *a, const struct cuda_attn &p, bool *ran) {
    *ran = takes(c, a, p);
    return *ran ? launch_any(c, p, new_rows{}, a->seqs.n) : 0;
}

/* The two ops where the kernel does not fit. */
int cuda_qkv_attn_fwd(struct dev *d, const struct qkv_args *q, const struct attn_args *a) {
    struct cuda *c = cuda_of(d);
    struct cuda_attn p;
    TRY(attn_params("qkv_attn_fwd", a, &p));
    const struct new_rows f = {(const __nv_bfloat16 *)q->qkv.data,
                               (const __nv_bfloat16 *)q->q_norm.data,
                               (const __nv_bfloat16 *)q->k_norm.data,
                               (const float *)q->rope.data,
                               (const int32_t *)q->pos.data,
                               (const int32_t *)q->slots.data,
                               q->eps,
                               q->rope.dim[0] > INT32_MAX ? INT32_MAX : (int)q->rope.dim[0],
                               (int)(q->kv.k.dim[0] * q->kv.k.dim[2])};
    const bool wide = aligned16(f.qkv) && aligned16(f.q_norm) && aligned16(f.k_norm) && aligned16(f.rope);
    if (wide && takes(c, a, p)) return launch_any(c, p, f, a->seqs.n);
    TRY(cuda_qkv_fwd(d, q));
    return cuda_attn_fwd(d, a);
}
