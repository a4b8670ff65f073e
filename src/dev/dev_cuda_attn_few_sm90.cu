/* dev_cuda_attn_few_sm90.cu - attention of a decoding step on Hopper: one new row of each
 * sequence, keys in pages, heads of 64 and of 128. dev_cuda_attn_fwd.cu serves everything else.
 *
 * A block has a kv head and the heads of its group of some neighbouring sequences, at most 16
 * packed rows. Tiles of 64 keys come into two rings, of keys and of values, each filled by a warp
 * of its own. What neighbours see in the same pages (the samples of a prompt) is read once for
 * all of them, then follow the tiles of each. In recorded work all but the newest keys are on
 * their way before the kernel in front, which makes those, has ended (dev_graph_begin allows it).
 * The new rows' queries come from memory, or, with their keys and values, from the product before RoPE
 * (dev_qkv_attn_fwd): a block then norms, rotates and stores what its own sequences and kv head need.
 *
 * Four warps weigh: a tile each, side by side; all then know the maxima after each of the four
 * (their order does not matter), so that the weights are final. Four others add up: each walks
 * the tiles for some columns of the result, which is the only chain.
 *
 * Invariant: a row goes through the operations that dev_cuda_attn_fwd.cu lists, in that order; a tile
 * that is not of its sequence leaves its state as it is, bit for bit. */
#include "dev/dev_cuda_attn_row.cuh"
#include "dev/dev_cuda_qkv.cuh"
#include "dev/dev_cuda_tma.cuh"

#include <string.h>

extern __shared__ __align__(1024) char few_smem[];

enum { KEYS = DEV_KEY_TILE, PIECE = 16, PIECES = KEYS / PIECE, PANEL = KEYS * PANEL_ROW };
enum { MAX_SEQS = 8, MAX_RUNS = 2 * MAX_SEQS }; /* of a block */
enum { GROUP = 4, THREADS = (2 * GROUP + 2) * 32 }; /* warps that weigh, as many that add up, two that copy */
enum { RING_64 = 6, RING_128 = 6 };              /* tiles of a ring: two blocks of heads of 64 fit a multiprocessor, one of 128 */

/* A tile's weights as the warps that add up want them. */
struct weighed {
    uint4 p[4][32];      /* fragments (16 keys each), by lane */
    float2 part[4][32];  /* sums of a quarter, of the lane's two rows */
    float shrink[16];
    int rows;            /* mask of those that see the tile */
};

/* D: head size; S: tiles of a ring. In bytes: */
template <int D, int S> struct few_shape {
    static constexpr int TILE = D / 64 * PANEL, COLS = D / 8 / GROUP; /* 64 keys; blocks of 8 columns that a warp has */
    static constexpr int V = S * TILE, WEIGHED = 2 * S * TILE;
    static constexpr int TOPS = WEIGHED + GROUP * (int)sizeof(struct weighed); /* largest scores: (2, tile, 16) */
    static constexpr int SUMS = TOPS + 2 * GROUP * 16 * 4; /* at the end: (quarter, 16) */
    static constexpr int MAXIMA = SUMS + 4 * 16 * 4;       /* at the end: (16) */
    static constexpr int BARS = MAXIMA + 16 * 4; /* full, empty (S each) of the keys, of the values; (GROUP each) of the weights; */
    static constexpr int READY = BARS + (4 * S + 2 * GROUP) * 8; /* of the new rows */
    static constexpr int RUNS = READY + 16;
    static constexpr int Q = RUNS + (MAX_RUNS + 1) * 32; /* the 16 packed rows, tile_stride(D) apart */
    static constexpr int SMEM = Q + 16 * tile_stride(D);
    static_assert(S >= GROUP, "the warps that weigh wait for a tile each before any of them goes on");
    static_assert(sizeof(struct weighed) % 16 == 0 && Q % 16 == 0, "fragments are aligned");
};

/* ---- what the block has to do ---- */

/* Consecutive tiles of a sequence's pages, the first being job `from` of the block; the rows of the mask `rows` see keys
 * [lo, hi) of them. A run of several sequences has no end, and no newest key. */
struct run {
    int from, tile, rows, seq, lo, hi;
};
struct runs {
    struct run run[MAX_RUNS];
    int n, n_jobs;
};
/* Number of the run that job j is of; lanes may ask for different ones. */
static __device__ __forceinline__ int run_of(const struct runs *r, int j) {
    int i = 0;
#pragma unroll
    for (int step = MAX_RUNS / 2; step > 0; step /= 2)
        if (i + step < r->n && r->run[i + step].from <= j) i += step;
    return i;
}

/* How many of its leading tiles sequence seq + lane has in the same pages as the one before it, lanes 1 .. n - 1; a tile with
 * either's newest key is not shared. The first tables are asked for before it is known how long they are. */
static __device__ __forceinline__ int shared_tiles(const struct cuda_attn &a, int seq, int n) {
    const int lane = (int)threadIdx.x % 32;
    int hi = 0, same = 0, going = (1 << n) - 1; /* bit i: all so far of sequence i are equal */
    for (int base = 0; going > 1; base += 32) {
        int id[MAX_SEQS][PIECES];
#pragma unroll
        for (int i = 0; i < MAX_SEQS; i++)
#pragma unroll
            for (int k = 0; k < PIECES; k++) {
                const int page = ((base + lane) * KEYS + k * PIECE) >> a.page_shift;
                id[i][k] = i < n && page < a.max_pages ? a.pages[(int64_t)(seq + i) * a.max_pages + page] : -1 - i;
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

/* Writes the runs of sequences [seq, seq + n), one warp. Neighbours are taken together as long as that saves tiles. */
static __device__ __forceinline__ void plan(const struct cuda_attn &a, int seq, int n, struct runs *r) {
    const int lane = (int)threadIdx.x % 32;
    const int same = n > 1 && a.window == 0 ? shared_tiles(a, seq, n) : 0;
    const int rows = lane < n ? a.q_start[seq + lane + 1] - a.q_start[seq + lane] : 0;
    const int hi = rows > 0 ? a.pos0[seq + lane] + 1 : 0, lo = rows > 0 ? first_key(a, hi - 1) : 0;
    const int group = (1 << a.group) - 1;
    int n_runs = 0, jobs = 0;
    const auto add = [&](int first, int count, int from, int to, int lo_key, int hi_key) { /* tiles [from, to) */
        if (to <= from) return;
        int mask = 0;
        for (int i = 0; i < count; i++) mask |= group << (first + i) * a.group;
        if (lane == 0) r->run[n_runs] = {jobs, from, mask, seq + first, lo_key, hi_key};
        n_runs++;
        jobs += to - from;
    };
    for (int s = 0; s < n;) {
        int end = s + 1, common = INT_MAX;
        for (; end < n; end++) { /* without the next: (end - s - 1) * common tiles are not read */
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

/* Where they come from: the rows of the product before heads are split (qkv_args), or, qkv being NULL, queries that are
 * ready in cuda_attn's q beside keys and values that are in their pages. */
struct new_rows {
    const __nv_bfloat16 *qkv, *q_norm, *k_norm;
    const float *rope;
    const int32_t *pos, *slots;
    float eps;
    int n_pos, n_slots;
};

/* A lane's part of one head of a new row: of packed row `row` of the block, or of a sequence's new key or value. */
struct new_head {
    int64_t at;        /* element of q or qkv */
    const __nv_bfloat16 *norm;
    __nv_bfloat16 *to; /* where it goes; NULL: nowhere */
    int pos;           /* for the rotation; -1: none */
    bool have;         /* the sequence has a row */
};

/* The lane's head is number `unit`: packed rows 0 .. 15, then key and value of each sequence. */
template <int D, int S>
static __device__ __forceinline__ struct new_head new_head_of(const struct cuda_attn &a, const struct new_rows &f, int seq, int n,
                                                              int head, int unit, int i) {
    const bool is_q = unit < 16, is_v = !is_q && unit % 2;
    const int s = is_q ? unit / a.group : (unit - 16) / 2, t = s < n ? a.q_start[seq + s] : 0;
    struct new_head x = {};
    x.pos = -1;
    x.have = s < n && t < a.q_start[seq + s + 1];
    if (is_q) x.to = (__nv_bfloat16 *)(few_smem + few_shape<D, S>::Q + unit * tile_stride(D)) + i;
    const int of_q = head * a.group + unit - s * a.group;
    if (!f.qkv) {
        x.have &= is_q;
        x.at = ((int64_t)t * a.n_q_heads + of_q) * D + i;
    } else if (x.have) {
        const int pos = f.pos[t], slot = f.slots[t];
        if (pos < 0 || pos >= f.n_pos || slot < 0 || slot >= f.n_slots) __trap();
        const int of_qkv = is_q ? of_q : a.n_q_heads + (is_v ? a.n_kv_heads : 0) + head;
        const int row = (((slot >> a.page_shift) * a.n_kv_heads + head) << a.page_shift) + (slot & (a.page_len - 1));
        x.at = ((int64_t)t * (a.n_q_heads + 2 * a.n_kv_heads) + of_qkv) * D + i;
        if (!is_q) x.to = (__nv_bfloat16 *)(is_v ? a.v : a.k) + (int64_t)row * D + i;
        if (!is_v) x.norm = is_q ? f.q_norm : f.k_norm, x.pos = pos;
    }
    return x;
}

/* D / 16 warps: queries to shared memory, zeros for rows that are not there, new keys and values to their pages; the steps of
 * qkv_fwd_kernel. What is read before the wait no kernel of recorded work but its last writes. */
template <int D, int S>
static __device__ __forceinline__ void make_rows(const struct cuda_attn &a, const struct new_rows &f, int seq, int n, int head) {
    constexpr int LANES = D / 16; /* of a head: 32 heads, since 16 packed rows are of at most MAX_SEQS sequences */
    static_assert(16 + 2 * MAX_SEQS == 32 && LANES <= 2 * GROUP, "a lane for every part of a head");
    const int i = (int)threadIdx.x % LANES * CHUNK;
    const struct new_head h = new_head_of<D, S>(a, f, seq, n, head, (int)threadIdx.x / LANES, i);
    const __nv_bfloat16 *from = (f.qkv ? f.qkv : (const __nv_bfloat16 *)a.q) + h.at;
    float x0[CHUNK] = {}, x1[CHUNK] = {}, w0[CHUNK] = {}, w1[CHUNK] = {}, cs[2 * CHUNK] = {};
    if (h.pos >= 0) load_rope<true>(cs, f.rope, h.pos, D, i, CHUNK);
    if (h.norm) load8<true>(w0, h.norm + i, CHUNK), load8<true>(w1, h.norm + D / 2 + i, CHUNK);
    cuda_wait_before();
    if (h.have) load8<true>(x0, from, CHUNK), load8<true>(x1, from + D / 2, CHUNK);
    if (f.q_norm || f.k_norm) { /* alike for all lanes */
        const float rs = head_rstd(x0, x1, D, LANES, f.eps);
        if (h.norm) norm_head<__nv_bfloat16>(x0, x1, w0, w1, rs);
    }
    if (h.pos >= 0) rotate(x0, x1, cs);
    if (h.to) store8<true>(h.to, x0, CHUNK), store8<true>(h.to + D / 2, x1, CHUNK);
    __syncwarp();
    if (threadIdx.x % 32 == 0) bar_arrive(smem_addr(few_smem) + few_shape<D, S>::READY);
}

/* ---- the copies ---- */

/* A place in a ring. */
struct place {
    int slot;
    uint32_t parity;
};
template <int S> static __device__ __forceinline__ void move_on(struct place &p, int by) {
    p.slot += by;
    if (p.slot >= S) p.slot -= S, p.parity ^= 1;
}

/* 16 bytes; zeros unless take. */
static __device__ __forceinline__ void copy16(uint32_t dst, const char *src, bool take) {
    asm volatile("cp.async.cg.shared.global.L2::256B [%0], [%1], 16, %2;" ::"r"(dst), "l"(src), "r"(take ? 16 : 0) : "memory");
}

/* 16 keys of a job: where they start, as page and offset, and [first, last) of them that are seen: seen = first | last << 8. */
struct piece {
    int page, off, seen;
    bool newest; /* a sequence's newest key is among them */
};
/* Lane (job - base, piece): its piece; nothing is seen of one that no job has. */
static __device__ __forceinline__ struct piece piece_of(const struct cuda_attn &a, const struct runs *runs, int base) {
    const int lane = (int)threadIdx.x % 32, j = base + lane / PIECES;
    struct piece p = {};
    if (j >= runs->n_jobs) return p;
    const struct run r = runs->run[run_of(runs, j)];
    const int key = (r.tile + j - r.from) * KEYS + lane % PIECES * PIECE;
    if (key >= r.hi || key + PIECE <= r.lo) return p;
    p.page = a.pages[(int64_t)r.seq * a.max_pages + (key >> a.page_shift)];
    p.off = key & (a.page_len - 1);
    p.seen = max(r.lo - key, 0) | min(r.hi - key, PIECE) << 8;
    p.newest = r.hi - key <= PIECE;
    return p;
}

/* One warp fills a ring from x with all jobs' tiles, whole rows at a time; keys that nobody sees become zeros. Tiles with a
 * sequence's newest key wait for the new rows. */
template <int D, int S>
static __device__ __forceinline__ void fill_ring(const struct cuda_attn &a, const void *x, int head, const struct runs *runs,
                                                 uint32_t ring, uint32_t full, uint32_t empty) {
    constexpr int CHUNKS = D / 8, ROWS = 32 / CHUNKS, TURN = 8 / ROWS; /* of a row; rows a copy; copies until places repeat */
    constexpr int AT_ONCE = 32 / PIECES, ALL = (1 << PIECES) - 1;
    const int lane = (int)threadIdx.x % 32, n_jobs = runs->n_jobs;
    uint32_t place_of[TURN]; /* of my chunk of copy i, beside what it has of i * ROWS rows */
#pragma unroll
    for (int i = 0; i < TURN; i++)
        place_of[i] = (uint32_t)(lane % CHUNKS / 8 * PANEL + lane / CHUNKS * PANEL_ROW +
                                 ((lane % 8 ^ (lane / CHUNKS + i * ROWS)) << 4));
    const char *from = (const char *)x + lane * 16;
    struct place at = {0, 1};
    bool waited = false;
    struct piece next = piece_of(a, runs, 0);
#pragma unroll 1
    for (int base = 0; base < n_jobs; base += AT_ONCE) {
        const int row = ((next.page * a.n_kv_heads + head) << a.page_shift) + next.off, seen = next.seen;
        const unsigned whole = __ballot_sync(WARP_ALL, seen == PIECE << 8), newest = __ballot_sync(WARP_ALL, next.newest);
        next = piece_of(a, runs, base + AT_ONCE);
#pragma unroll 1
        for (int i = 0; i < AT_ONCE && base + i < n_jobs; i++, move_on<S>(at, 1)) {
            const uint32_t slot = ring + (uint32_t)(at.slot * few_shape<D, S>::TILE);
            const char *src[PIECES];
#pragma unroll
            for (int k = 0; k < PIECES; k++) src[k] = from + (int64_t)__shfl_sync(WARP_ALL, row, i * PIECES + k) * (D * 2);
            if (!waited && newest >> i * PIECES & ALL) bar_wait(smem_addr(few_smem) + few_shape<D, S>::READY, 0), waited = true;
            bar_wait(empty + at.slot * 8, at.parity);
            if ((whole >> i * PIECES & ALL) == ALL) {
#pragma unroll
                for (int k = 0; k < PIECES; k++)
#pragma unroll
                    for (int n = 0; n < PIECE / ROWS; n++)
                        copy16(slot + (k * PIECE + n * ROWS) * PANEL_ROW + place_of[n % TURN], src[k] + n * 512, true);
            } else {
#pragma unroll
                for (int k = 0; k < PIECES; k++) {
                    const int seen_of = __shfl_sync(WARP_ALL, seen, i * PIECES + k);
#pragma unroll
                    for (int n = 0; n < PIECE / ROWS; n++) {
                        const int r = n * ROWS + lane / CHUNKS;
                        const bool take = r >= (seen_of & 255) && r < seen_of >> 8;
                        copy16(slot + (k * PIECE + n * ROWS) * PANEL_ROW + place_of[n % TURN], take ? src[k] + n * 512 : from,
                               take);
                    }
                }
            }
            bar_arrive_after_copies(full + at.slot * 8);
        }
    }
}

/* ---- the arithmetic ---- */

/* The block's packed rows as A fragments. */
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
            ldmatrix_x4(y, k_tile + k / 4 * PANEL + n * 16 * PANEL_ROW + panel_at(row, k % 4 * 2 + half));
            mma_bf16(s[2 * n], q[k], y[0], y[1]);
            mma_bf16(s[2 * n + 1], q[k], y[2], y[3]);
        }
}

/* Scores of keys outside of [lo, hi) become -inf; the tile's first key is `first`. */
static __device__ __forceinline__ void hide_ends(float (&s)[8][4], int first, int lo, int hi) {
#pragma unroll
    for (int n = 0; n < 8; n++)
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
    for (int n = 0; n < 4; n++)
        top[n] = fmaxf(fmaxf(s[n][2 * i], s[n][2 * i + 1]), fmaxf(s[n + 4][2 * i], s[n + 4][2 * i + 1]));
    return quad_max(fmaxf(fmaxf(top[0], top[1]), fmaxf(top[2], top[3])));
}

/* Weights relative to base, as fragments, and their sums. */
static __device__ __forceinline__ void weigh(float (&s)[8][4], const float (&base)[2], float scale_log2, struct weighed *to) {
    const int lane = (int)threadIdx.x % 32;
#pragma unroll
    for (int k = 0; k < 4; k++) {
#pragma unroll
        for (int n = 2 * k; n < 2 * k + 2; n++)
#pragma unroll
            for (int e = 0; e < 4; e++) s[n][e] = row_p(s[n][e], scale_log2, base[e / 2]);
        to->p[k][lane] = make_uint4(pack_bf16(s[2 * k][0], s[2 * k][1]), pack_bf16(s[2 * k][2], s[2 * k][3]),
                                    pack_bf16(s[2 * k + 1][0], s[2 * k + 1][1]), pack_bf16(s[2 * k + 1][2], s[2 * k + 1][3]));
        to->part[k][lane] = make_float2(row_quarter(s[2 * k][0], s[2 * k][1], s[2 * k + 1][0], s[2 * k + 1][1]),
                                        row_quarter(s[2 * k][2], s[2 * k][3], s[2 * k + 1][2], s[2 * k + 1][3]));
    }
}

/* A row's maximum m moves over the four tiles of a wave, whose largest scores are tops[0, 16, 32, 48]; row_rescale's results
 * for tile `mine`, whose largest is `top`. */
static __device__ __forceinline__ float rescale(float *m, const float *tops, int mine, float top, float scale_log2, float *shrink) {
    float before = *m;
#pragma unroll
    for (int u = 0; u < GROUP; u++) {
        const float scaled = __fmul_rn(tops[u * 16], scale_log2);
        if (u < mine) before = fmaxf(before, scaled);
        *m = fmaxf(*m, scaled);
    }
    return row_rescale(&before, top, scale_log2, shrink);
}

/* A warp that weighs: tiles warp, warp + GROUP, ... */
template <int D, int S>
static __device__ __forceinline__ void weigh_tiles(float scale_log2, int warp) {
    using shape = few_shape<D, S>;
    const int lane = (int)threadIdx.x % 32, row = lane / 4;
    const uint32_t smem = smem_addr(few_smem), k_full = smem + shape::BARS, k_empty = k_full + S * 8;
    const uint32_t p_full = k_full + 4 * S * 8 + warp * 8, p_empty = p_full + GROUP * 8;
    const struct runs *runs = (const struct runs *)(few_smem + shape::RUNS);
    struct weighed *to = (struct weighed *)(few_smem + shape::WEIGHED) + warp;
    float *tops = (float *)(few_smem + shape::TOPS), m[2] = {-INFINITY, -INFINITY};
    uint32_t q[D / 16][4], wave = 0;
    bar_wait(smem + shape::READY, 0);
    load_rows<D>(q, smem + shape::Q);
    struct place at = {warp, 0};
    const int n_jobs = runs->n_jobs;
#pragma unroll 1
    for (int base = 0; base < n_jobs; base += GROUP, wave ^= 1, move_on<S>(at, GROUP)) {
        const int j = base + warp;
        float s[8][4], top[2] = {-INFINITY, -INFINITY}, from[2], shrink[2];
        int rows = 0; /* mask */
        if (j < n_jobs) {
            const struct run x = runs->run[run_of(runs, j)];
            const int first = (x.tile + j - x.from) * KEYS;
            rows = x.rows;
            bar_wait(k_full + at.slot * 8, at.parity);
            tile_scores<D>(s, q, smem + (uint32_t)(at.slot * shape::TILE));
            __syncwarp();
            if (lane == 0) bar_arrive(k_empty + at.slot * 8);
            if (first < x.lo || first + KEYS > x.hi) hide_ends(s, first, x.lo, x.hi);
            const float t[2] = {tile_top(s, 0), tile_top(s, 1)};
            if (rows >> row & 1) top[0] = t[0];
            if (rows >> (row + 8) & 1) top[1] = t[1];
        }
        float *of_wave = tops + wave * GROUP * 16 + row;
        if (lane % 4 == 0) of_wave[warp * 16] = top[0], of_wave[warp * 16 + 8] = top[1];
        group_sync(1, GROUP * 32);
#pragma unroll
        for (int i = 0; i < 2; i++) from[i] = rescale(&m[i], of_wave + 8 * i, warp, top[i], scale_log2, &shrink[i]);
        if (j >= n_jobs) continue;
        bar_wait(p_empty, wave ^ 1);
        if (lane % 4 == 0) to->shrink[row] = shrink[0], to->shrink[row + 8] = shrink[1];
        if (lane == 0) to->rows = rows;
        weigh(s, from, scale_log2, to);
        __syncwarp();
        if (lane == 0) bar_arrive(p_full);
    }
    if (warp == 0 && lane % 4 == 0) {
        float *max = (float *)(few_smem + shape::MAXIMA);
        max[row] = m[0], max[row + 8] = m[1];
    }
}

/* What a warp needs of half a tile, 32 keys, for its columns of P.V. */
template <int COLS> struct operands {
    uint4 p[2];
    uint32_t v[COLS][4];
};
/* State of the lane's two rows; sums: of this warp's quarter of the tiles. */
template <int COLS> struct few_rows {
    float l[2], acc[COLS][4];
};

template <int COLS> static __device__ __forceinline__ void add_half(float (&sum)[COLS][4], const struct operands<COLS> &y) {
#pragma unroll
    for (int k = 0; k < 2; k++) {
        const uint32_t p[4] = {y.p[k].x, y.p[k].y, y.p[k].z, y.p[k].w};
#pragma unroll
        for (int n = 0; n < COLS; n++) mma_bf16(sum[n], p, y.v[n][2 * k], y.v[n][2 * k + 1]);
    }
}

/* A warp that adds up: blocks warp, warp + GROUP, ... of 8 columns, and the sums of quarter `warp` of the tiles. What the
 * products of a half need is asked for before the products of the half before it. */
template <int D, int S>
static __device__ __forceinline__ void add_tiles(struct few_rows<few_shape<D, S>::COLS> &x, int warp) {
    using shape = few_shape<D, S>;
    constexpr int COLS = shape::COLS;
    const int lane = (int)threadIdx.x % 32, row = lane / 4;
    const uint32_t smem = smem_addr(few_smem), v_full = smem + shape::BARS + 2 * S * 8, v_empty = v_full + S * 8;
    const uint32_t p_full = v_empty + S * 8, p_empty = p_full + GROUP * 8, v_mine = smem + shape::V + panel_at(lane, warp);
    const struct weighed *const weights = (const struct weighed *)(few_smem + shape::WEIGHED);
    struct place at = {0, 0};
    const auto load = [&](struct operands<COLS> &y, int half, int tile) {
        const uint32_t v = v_mine + (uint32_t)(at.slot * shape::TILE + half * 32 * PANEL_ROW);
#pragma unroll
        for (int n = 0; n < COLS; n++) /* block warp + 4 n: the permutation takes 4 as the other half of the panel */
            ldmatrix_x4_trans(y.v[n], (n % 2 ? v ^ 64 : v) + n / 2 * PANEL);
        const struct weighed *w = weights + tile % GROUP;
#pragma unroll
        for (int k = 0; k < 2; k++) y.p[k] = w->p[2 * half + k][lane];
    };
    const auto wait = [&](int tile) {
        bar_wait(v_full + at.slot * 8, at.parity);
        bar_wait(p_full + tile % GROUP * 8, (uint32_t)(tile / GROUP & 1));
    };
    const int n_jobs = ((const struct runs *)(few_smem + shape::RUNS))->n_jobs;
    struct operands<COLS> first, second;
    if (n_jobs > 0) wait(0), load(first, 0, 0);
#pragma unroll 1
    for (int j = 0; j < n_jobs; j++) {
        const struct weighed *w = weights + j % GROUP;
        const float shrink[2] = {w->shrink[row], w->shrink[row + 8]};
        const float2 part = w->part[warp][lane];
        const int rows = w->rows >> row;
        const bool mine[2] = {(rows & 1) != 0, (rows >> 8 & 1) != 0}; /* the tile is of this row's sequence */
        float sum[COLS][4];
        load(second, 1, j);
#pragma unroll
        for (int n = 0; n < COLS; n++)
#pragma unroll
            for (int e = 0; e < 4; e++) sum[n][e] = __fmul_rn(x.acc[n][e], shrink[e / 2]);
        if (mine[0]) x.l[0] = row_sum(x.l[0], shrink[0], part.x);
        if (mine[1]) x.l[1] = row_sum(x.l[1], shrink[1], part.y);
        add_half(sum, first);
        __syncwarp();
        if (lane == 0) bar_arrive(v_empty + at.slot * 8), bar_arrive(p_empty + j % GROUP * 8);
        move_on<S>(at, 1);
        if (j + 1 < n_jobs) wait(j + 1), load(first, 0, j + 1);
        add_half(sum, second);
#pragma unroll
        for (int n = 0; n < COLS; n++)
#pragma unroll
            for (int e = 0; e < 4; e++) x.acc[n][e] = mine[e / 2] ? sum[n][e] : x.acc[n][e];
    }
    float *sums = (float *)(few_smem + shape::SUMS) + warp * 16;
#pragma unroll
    for (int i = 0; i < 2; i++) {
        x.l[i] = quad_sum(x.l[i]);
        if (lane % 4 == 0) sums[row + 8 * i] = x.l[i];
    }
}

template <int D, int S>
static __device__ __forceinline__ void store_rows(const struct cuda_attn &a, int seq, int n, int head, int warp,
                                                  const struct few_rows<few_shape<D, S>::COLS> &x) {
    const int lane = (int)threadIdx.x % 32, t = lane % 4;
    const float *sums = (const float *)(few_smem + few_shape<D, S>::SUMS);
    const float *max = (const float *)(few_smem + few_shape<D, S>::MAXIMA);
#pragma unroll
    for (int i = 0; i < 2; i++) {
        const int r = lane / 4 + 8 * i, s = r / a.group;
        if (s >= n || a.q_start[seq + s + 1] == a.q_start[seq + s]) continue;
        const float l = __fadd_rn(__fadd_rn(sums[r], sums[16 + r]), __fadd_rn(sums[32 + r], sums[48 + r])), inv = __frcp_rn(l);
        const int64_t at = (int64_t)a.q_start[seq + s] * a.n_q_heads + head * a.group + (r - s * a.group);
        uint16_t *out = (uint16_t *)a.out + at * D;
#pragma unroll
        for (int c = 0; c < few_shape<D, S>::COLS; c++)
            *(uint32_t *)(out + (warp + GROUP * c) * 8 + 2 * t) = row_out(x.acc[c][2 * i], x.acc[c][2 * i + 1], inv);
        if (a.lse && t == 0 && warp == 0) a.lse[at] = row_lse(max[r], l);
    }
}

/* Block (part of the sequences, kv head): parts differ by at most one sequence, and no two have a new key in common. Until the
 * kernel before has ended only what it does not write is read: where the sequences and their keys are, and all keys but the
 * newest. */
template <int D, int S, int BLOCKS>
__global__ void __launch_bounds__(THREADS, BLOCKS)
few_kernel(const struct cuda_attn a, const struct new_rows f, int n_seqs) {
    using shape = few_shape<D, S>;
    const int warp = (int)threadIdx.x / 32, head = (int)blockIdx.y, seq = (int)((int64_t)blockIdx.x * n_seqs / gridDim.x);
    const int n = (int)((int64_t)(blockIdx.x + 1) * n_seqs / gridDim.x) - seq;
    const uint32_t smem = smem_addr(few_smem), bars = smem + shape::BARS;
    struct runs *runs = (struct runs *)(few_smem + shape::RUNS);
    struct few_rows<shape::COLS> x = {};
    cuda_next_may_start();
    if (threadIdx.x == 0) {
        for (int i = 0; i < S; i++) {
            bar_init(bars + i * 8, 32), bar_init(bars + (S + i) * 8, 1);
            bar_init(bars + (2 * S + i) * 8, 32), bar_init(bars + (3 * S + i) * 8, GROUP);
        }
        for (int i = 0; i < GROUP; i++) bar_init(bars + (4 * S + i) * 8, 1), bar_init(bars + (4 * S + GROUP + i) * 8, GROUP);
        bar_init(smem + shape::READY, D / 16);
        bar_init_done();
    }
    if (warp == 2 * GROUP) plan(a, seq, n, runs);
    __syncthreads();
    if (warp < D / 16) make_rows<D, S>(a, f, seq, n, head);
    if (warp < GROUP) add_tiles<D, S>(x, warp);
    else if (warp < 2 * GROUP) weigh_tiles<D, S>(a.scale_log2, warp - GROUP);
    else if (warp == 2 * GROUP) fill_ring<D, S>(a, a.k, head, runs, smem, bars, bars + S * 8);
    else fill_ring<D, S>(a, a.v, head, runs, smem + shape::V, bars + 2 * S * 8, bars + 3 * S * 8);
    __syncthreads();
    if (warp < GROUP) store_rows<D, S>(a, seq, n, head, warp, x);
}

/* ---- the op ---- */

/* As many sequences a block as there must be for all blocks to run at once, as far as 16 packed rows allow. */
template <int D, int S, int BLOCKS>
static int launch(struct cuda *c, const struct cuda_attn &p, const struct new_rows &f, int64_t n) {
    const auto kernel = few_kernel<D, S, BLOCKS>;
    constexpr int smem = few_shape<D, S>::SMEM;
    const int64_t most = 16 / p.group < MAX_SEQS ? 16 / p.group : MAX_SEQS;
    const int64_t least = (n + most - 1) / most, room = (int64_t)c->n_sm * BLOCKS / p.n_kv_heads, blocks = n < room ? n : room;
    CU_TRY(cudaFuncSetAttribute((const void *)kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, smem));
    const dim3 grid((unsigned)(blocks > least ? blocks : least), (unsigned)p.n_kv_heads);
    CU_TRY(cuda_launch(c, kernel, grid, THREADS, smem, p, f, (int)n));
    return 0;
}
static int launch_any(struct cuda *c, const struct cuda_attn &p, const struct new_rows &f, int64_t n) {
    if (n == 0) return 0;
    return p.dim == 64 ? launch<64, RING_64, 2>(c, p, f, n) : launch<128, RING_128, 1>(c, p, f, n);
}

static bool takes(const struct cuda *c, const struct attn_args *a, const struct cuda_attn &p) {
    static const char built[] = VERLC_CUDA_ARCHS;
    return c->cc == 90 && strstr(built, "sm_90a") != NULL && attn_on_tensor_cores(a) && (p.dim == 64 || p.dim == 128) && p.pages &&
           a->seqs.max_q == 1 && p.group <= 16 && p.page_shift >= 0 && p.page_len >= PIECE && p.n_kv_heads <= 65535 &&
           c->smem_max >= (size_t)few_shape<128, RING_128>::SMEM;
}

int cuda_attn_few_sm90(struct cuda *c, const struct attn_args *a, const struct cuda_attn &p, bool *ran) {
    *ran = takes(c, a, p);
    return *ran ? launch_any(c, p, new_rows{}, a->seqs.n) : 0;
}

/* The two ops where the kernel does not fit. */
int cuda_qkv_attn_fwd(struct dev *d, const struct qkv_args *q, const struct attn_args *a) {
    struct cuda *c = cuda_of(d);
    struct cuda_attn p;
    TRY(attn_params("qkv_attn_fwd", a, &p));
    const struct new_rows f = {
        (const __nv_bfloat16 *)q->qkv.data, (const __nv_bfloat16 *)q->q_norm.data, (const __nv_bfloat16 *)q->k_norm.data,
        (const float *)q->rope.data, (const int32_t *)q->pos.data, (const int32_t *)q->slots.data, q->eps,
        q->rope.dim[0] > INT32_MAX ? INT32_MAX : (int)q->rope.dim[0], (int)(q->kv.k.dim[0] * q->kv.k.dim[2])};
    const bool wide = aligned16(f.qkv) && aligned16(f.q_norm) && aligned16(f.k_norm) && aligned16(f.rope);
    if (wide && takes(c, a, p)) return launch_any(c, p, f, a->seqs.n);
    TRY(cuda_qkv_fwd(d, q));
    return cuda_attn_fwd(d, a);
}
