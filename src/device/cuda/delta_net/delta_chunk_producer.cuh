/* delta_chunk_producer.cuh - the producer warps of delta_chunk_mma.cu, which know no columns of S: they load the next chunk's
 * heads and make its gates, a and p in shared memory.
 *
 * Invariant: what a buffer holds of a row depends on that row and those before it; of rows that are not there it is finite. */
#ifndef VERLC_DEV_CUDA_DELTA_CHUNK_PRODUCER_CUH
#define VERLC_DEV_CUDA_DELTA_CHUNK_PRODUCER_CUH

#include "device/cuda/delta_net/delta_mma.cuh"

typedef __nv_bfloat16 bf16;

enum {
    PART = 16, /* rows of a chunk whose e are made at a time, columns of a warp */
    PARTS = DELTA_C / PART,
    PRODUCER_WARPS = 4,
    PRODUCER_THREADS = 32 * PRODUCER_WARPS,
    LD = DEV_DELTA_DIM + 8, /* bf16 between rows in shared memory: eight rows' 16 bytes are in different banks */
    LDS = DELTA_C + 8,
    PRODUCERS = 7, /* named barrier of these warps */
};

/* A chunk's heads, and what their products are scaled by. Of rows that come from a state (before n0): row = 0 and beta = 1, so that
 * u is e; of rows that are not there: zeros. */
template <typename T> struct alignas(16) chunk_heads {
    enum { CONSUMER_WARPS = sizeof(T) == 2 ? 8 : 4, COLS = CONSUMER_WARPS * PART, LDV = COLS + 8 };
    bf16 k[delta_parts<T>::X][DELTA_C][LD], q[delta_parts<T>::X][DELTA_C][LD];
    T v[DELTA_C][LDV];
    float row[DELTA_C], key[DELTA_C], query[DELTA_C]; /* 1 / |k| of i, of j; 1 / |q| / sqrt(Dk) */
    float g[DELTA_C], beta[DELTA_C];
    float u_by[DELTA_C], o_by[DELTA_C], end_by[DELTA_C]; /* of k . S, q . S, e_j in S' */
    bf16 square[delta_parts<T>::F][DELTA_C][LDS];        /* tile (j, i) of 16: p if j <= i; a of tile (i, j) if j > i */
    float diagonal[PARTS][PART][PART]; /* a within a part; of row j: a quad's lane t has i = 2t, 2t+1, 8+2t, 9+2t */
    float s_by;                        /* exp(G_63) */
};

/* Rows [n0, n1) of a chunk, row 0 of which were row t of the batch. Those before n0 are in the state. */
struct chunk_rows {
    int chunk, t, n0, n1;
};
/* The chunk that has a sequence's row r of the batch. */
static __device__ __forceinline__ chunk_rows chunk_at(const delta_seq &s, int r) {
    const int at = (int)s.pos0 + r, n0 = at % DELTA_C, left = (int)s.n - r;
    return {at / DELTA_C, (int)s.row0 + r - n0, n0, left < DELTA_C - n0 ? n0 + left : DELTA_C};
}
/* A block's columns of value head n: from col on, `cols` of them or what the head has. */
struct chunk_cols {
    int64_t n;
    int col, cols;
};

/* ---- heads; thread: its number among those of the producer warps ---- */

/* Columns of v, not waited for; zeros of rows and columns that are not here. WHOLE: all 64 rows are. */
template <bool WHOLE, typename T>
static __device__ __forceinline__ void load_values(chunk_heads<T> &m, const delta_job<T> &j, const chunk_cols &c,
                                                   const chunk_rows &x, int thread) {
    enum { UNIT = 16 / sizeof(T), LANES = chunk_heads<T>::COLS / UNIT, ROWS = PRODUCER_THREADS / LANES };
    const int row = thread / LANES, col = thread % LANES * UNIT;
    const bool on = col < c.cols && c.col + col < j.dv;
    const T *from = j.qkv + (on ? (x.t + row) * j.width + 2 * j.hk * j.dk + c.n * j.dv + c.col + col : 0);
    const int64_t stride = on ? ROWS * j.width : 0;
#pragma unroll
    for (int i = 0; i < DELTA_C; i += ROWS, from += stride) {
        const bool take = on && (WHOLE || (i + row >= x.n0 && i + row < x.n1));
        cp_async16(smem_addr(&m.v[i + row][col]), WHOLE || take ? from : j.qkv, take);
    }
}
/* Heads as they came, the same; zeros of elements from dk on. */
template <bool WHOLE>
static __device__ __forceinline__ void load_heads(chunk_heads<bf16> &m, const delta_job<bf16> &j, const delta_seq &s, int64_t head,
                                                  const chunk_rows &x, int thread) {
    enum { LANES = DEV_DELTA_DIM / CHUNK, ROWS = PRODUCER_THREADS / LANES };
    const int row = thread / LANES, d = thread % LANES * CHUNK;
    const bool on = d < j.dk;
    const bf16 *q = j.qkv + (on ? (x.t + row) * j.width + head * j.dk + d : 0), *k = q + (on ? j.hk * j.dk : 0);
    const bf16 *const old = j.k + ((s.slot * j.hk + head) * DELTA_C + row) * j.dk + d;
    const int64_t stride = on ? ROWS * j.width : 0;
#pragma unroll
    for (int i = 0; i < DELTA_C; i += ROWS, q += stride, k += stride) {
        const bool here = on && (WHOLE || i + row < x.n1), mine = here && (WHOLE || i + row >= x.n0);
        cp_async16(smem_addr(&m.k[0][i + row][d]), WHOLE || mine ? k : here ? old + i * j.dk : j.qkv, here);
        cp_async16(smem_addr(&m.q[0][i + row][d]), WHOLE || mine ? q : j.qkv, mine);
    }
}
/* Sums of squares of their rows, in the order of head_scale: its lane l is element l % 8 of quarter l / 8 here. */
static __device__ __forceinline__ void head_squares(chunk_heads<bf16> &m, int warp) {
    const int lane = (int)threadIdx.x & 31, quarter = lane / 8;
    const int from = warp ? 5 * (warp - 1) : 15, to = warp ? from + 5 : 16; /* eight rows at a time; warp 0 makes G, too */
#pragma unroll 1
    for (int i = 8 * from + lane % 8; i < 8 * to; i += 8) {
        const bf16 *const row = i < DELTA_C ? m.k[0][i] : m.q[0][i - DELTA_C];
        float sum[CHUNK] = {};
#pragma unroll
        for (int y = 0; y < DEV_DELTA_DIM / 32; y++) {
            float v[CHUNK];
            load8<true>(v, &row[32 * y + CHUNK * quarter], CHUNK);
#pragma unroll
            for (int z = 0; z < CHUNK; z++) sum[z] = __fmaf_rn(v[z], v[z], sum[z]);
        }
#pragma unroll
        for (int o = 1; o < CHUNK; o *= 2)
#pragma unroll
            for (int z = 0; z < CHUNK; z += 2 * o) sum[z] = __fadd_rn(sum[z], sum[z + o]);
        sum[0] = __fadd_rn(sum[0], __shfl_xor_sync(WARP_ALL, sum[0], 8));
        sum[0] = __fadd_rn(sum[0], __shfl_xor_sync(WARP_ALL, sum[0], 16));
        if (quarter == 0) (i < DELTA_C ? m.key : m.query)[i & (DELTA_C - 1)] = sum[0];
    }
}
/* f32: parts by registers, row by row. */
template <bool>
static __device__ void load_heads(chunk_heads<float> &m, const delta_job<float> &j, const delta_seq &s, int64_t head,
                                  const chunk_rows &x, int thread) {
    enum { X = delta_parts<float>::X };
    const int lane = thread & 31;
    for (int i = thread / 32; i < 2 * DELTA_C; i += PRODUCER_WARPS) {
        const int y = i & (DELTA_C - 1);
        lane_head h = {};
        if (y >= x.n0 && y < x.n1) h = head_load(j.qkv + (x.t + y) * j.width + ((i < DELTA_C ? j.hk : 0) + head) * j.dk, j.dk);
        else if (y < x.n0 && i < DELTA_C) h = head_load(j.k + ((s.slot * j.hk + head) * DELTA_C + y) * j.dk, j.dk);
        float sum = 0;
#pragma unroll
        for (int z = 0; z < DEV_DELTA_DIM / 32; z++) {
            uint32_t w[X];
            sum = __fmaf_rn(h.v[z], h.v[z], sum);
            split_pair(w, h.v[z], 0.0f);
#pragma unroll
            for (int p = 0; p < X; p++) *(uint16_t *)&(i < DELTA_C ? m.k : m.q)[p][y][lane + 32 * z] = (uint16_t)w[p];
        }
        sum = lanes_sum(sum, 32);
        if (lane == 0) (i < DELTA_C ? m.key : m.query)[y] = sum;
    }
}
static __device__ void head_squares(chunk_heads<float> &, int) {}

/* Heads and what scales them. */
template <typename T>
static __device__ __forceinline__ void make_heads(chunk_heads<T> &m, const delta_job<T> &j, const delta_seq &s, const chunk_cols &c,
                                                  const chunk_rows &x, int thread) {
    const int64_t head = (int)c.n / (int)j.group;
    const int i = thread % DELTA_C; /* the thread's row */
    const bool upper = thread >= DELTA_C, mine = i >= x.n0 && i < x.n1;
    if (x.n0 == 0 && x.n1 == DELTA_C) load_values<true>(m, j, c, x, thread), load_heads<true>(m, j, s, head, x, thread);
    else load_values<false>(m, j, c, x, thread), load_heads<false>(m, j, s, head, x, thread);
    cp_commit();
    if (upper) {
        m.beta[i] = mine ? delta_beta(j, x.t + i, c.n) : i < x.n0 ? 1.0f : 0.0f;
    } else {
        float g = 0;
        if (mine) g = delta_g(act_at(j.a_log, c.n), delta_input(j, x.t + i, c.n));
        else if (i < x.n0) g = j.g[(s.slot * j.hv + c.n) * DELTA_C + i];
        m.g[i] = g;
    }
    cp_wait<0>();
    named_barrier_sync(PRODUCERS, PRODUCER_THREADS);
    if (thread == 0) {
        running_sum(m.g, x.n0, x.n1, x.n0 ? m.g[x.n0 - 1] : 0.0f);
        for (int y = x.n1; y < DELTA_C; y++) m.g[y] = m.g[x.n1 - 1];
    }
    head_squares(m, thread / 32);
    named_barrier_sync(PRODUCERS, PRODUCER_THREADS);
    const float last = m.g[DELTA_C - 1], g = m.g[i], by = decay_exp(g);
    if (upper) {
        const float r = __fmul_rn(scale_of(m.query[i]), delta_q_scale(j.dk));
        m.query[i] = r, m.o_by[i] = __fmul_rn(by, r);
    } else {
        const float r = scale_of(m.key[i]), row = i < x.n0 ? 0.0f : r;
        m.row[i] = row, m.key[i] = r;
        m.u_by[i] = -__fmul_rn(by, row), m.end_by[i] = __fmul_rn(decay_exp(__fsub_rn(last, g)), r);
        if (i == DELTA_C - 1) m.s_by = by;
    }
    named_barrier_sync(PRODUCERS, PRODUCER_THREADS);
}

/* ---- a and p ---- */

/* Numbers n0 .. n0 + N of a warp's accumulators as mma_parts wants them. */
template <int N, int M> static __device__ __forceinline__ float (&tiles(float (&acc)[M][4], int n0))[1][N][4] {
    return *(float(*)[1][N][4]) & acc[n0];
}
/* Both B (16, 8) of a tile in shared memory, and A. */
template <int P> static __device__ __forceinline__ void load_b(uint32_t (&b)[2][P][2], int p, uint32_t addr, bool trans) {
    uint32_t r[4];
    if (trans) ldmatrix_x4_trans(r, addr);
    else ldmatrix_x4(r, addr);
    b[0][p][0] = r[0], b[0][p][1] = r[1], b[1][p][0] = r[2], b[1][p][1] = r[3];
}

/* Products of a part's keys or queries with keys, to numbers of a or p. What they are scaled by: of a tile's rows g, g + 8
 * (keys), of its columns 2t, 2t+1, 8+2t, 9+2t. */
struct pair_keys {
    float by[2], g[2];
};
struct pair_rows {
    float2 by[2], g[2];
};
template <typename T> static __device__ __forceinline__ pair_keys keys_of(const chunk_heads<T> &h, int part) {
    const int at = PART * part + ((int)threadIdx.x & 31) / 4;
    return {{h.key[at], h.key[at + 8]}, {h.g[at], h.g[at + 8]}};
}
template <typename T>
static __device__ __forceinline__ pair_rows rows_of(const chunk_heads<T> &h, const float (&by)[DELTA_C], int part) {
    const int at = PART * part + ((int)threadIdx.x & 3) * 2;
    return {{*(const float2 *)&by[at], *(const float2 *)&by[at + 8]}, {*(const float2 *)&h.g[at], *(const float2 *)&h.g[at + 8]}};
}
static __device__ __forceinline__ void scale_pairs(float (&v)[2][4], const pair_keys &key, const pair_rows &row) {
#pragma unroll
    for (int x = 0; x < 2; x++)
#pragma unroll
        for (int y = 0; y < 4; y++)
            v[x][y] = delta_pair(v[x][y], y & 1 ? row.by[x].y : row.by[x].x, key.by[y / 2], y & 1 ? row.g[x].y : row.g[x].x,
                                 key.g[y / 2]);
}
/* A tile to the square, in parts, its row 0 at `row`. */
template <typename T> static __device__ __forceinline__ void put_tile(chunk_heads<T> &m, const float (&v)[2][4], int row, int col) {
    enum { F = delta_parts<T>::F };
#pragma unroll
    for (int y = 0; y < 4; y += 2)
#pragma unroll
        for (int x = 0; x < 2; x++) {
            uint32_t w[F];
            split_pair(w, v[x][y], v[x][y + 1]);
#pragma unroll
            for (int p = 0; p < F; p++) *(uint32_t *)&m.square[p][row + acc_row(y)][col + 8 * x + acc_col(0)] = w[p];
        }
}
/* On the diagonal: a, and p, which is 0 of keys after the row. */
template <typename T> static __device__ __forceinline__ void put_own_a(chunk_heads<T> &m, const float (&v)[2][4], int part) {
#pragma unroll
    for (int y = 0; y < 4; y += 2)
        *(float4 *)&m.diagonal[part][acc_row(y)][2 * acc_col(0)] = make_float4(v[0][y], v[0][y + 1], v[1][y], v[1][y + 1]);
}
template <typename T> static __device__ __forceinline__ void put_own_p(chunk_heads<T> &m, const float (&v)[2][4], int part) {
    float p[2][4];
#pragma unroll
    for (int x = 0; x < 2; x++)
#pragma unroll
        for (int y = 0; y < 4; y++) p[x][y] = acc_row(y) > 8 * x + acc_col(y) ? 0.0f : v[x][y];
    put_tile(m, p, PART * part, PART * part);
}
/* A warp's of the ten tiles (rows i, keys j <= i) of a and of p: two of the same rows, and one of a or p alone. */
template <typename T> static __device__ __forceinline__ void make_pairs(chunk_heads<T> &h, int warp, int dk) {
    enum { X = delta_parts<T>::X, MOST = delta_parts<T>::MOST, NEXT = DELTA_C * LD * sizeof(bf16) /* part */ };
    static_assert(PARTS == 4 && PRODUCER_WARPS == 4, "ten tiles of four warps");
    const int i = warp < 2 ? 3 : warp == 2 ? 2 : 1, j = warp == 1 ? 2 : 0, own = warp & 1 ? 2 : 0;
    const bool query = warp >= 2; /* p of (own, own); else a */
    const uint32_t rows = 2 * tile_by_rows(LD), cols = 2 * tile_by_cols(LD);
    const uint32_t at_a = smem_addr(h.k[0][PART * j]) + rows, at_k = smem_addr(h.k[0][PART * i]) + cols;
    const uint32_t at_own = smem_addr(h.k[0][PART * own]) + rows, at_last = smem_addr((query ? h.q : h.k)[0][PART * own]) + cols;
    const uint32_t at_q = smem_addr(h.q[0][PART * i]) + cols;
    float kk[2][2][4] = {}, qk[2][2][4] = {}, last[1][2][4] = {};
#pragma unroll 2
    for (uint32_t d = 0; d < 2 * (uint32_t)dk; d += 32) {
        uint32_t a[2][X][4], own_a[1][X][4], k[2][X][2], q[2][X][2], own_b[2][X][2];
#pragma unroll
        for (int p = 0; p < X; p++) {
            ldmatrix_x4(a[0][p], at_a + d + p * NEXT), ldmatrix_x4(a[1][p], at_a + d + p * NEXT + 2 * PART * LD);
            load_b(k, p, at_k + d + p * NEXT, false), load_b(q, p, at_q + d + p * NEXT, false);
            ldmatrix_x4(own_a[0][p], at_own + d + p * NEXT);
            load_b(own_b, p, at_last + d + p * NEXT, false);
        }
        mma_parts<MOST>(kk, a, k), mma_parts<MOST>(qk, a, q), mma_parts<MOST>(last, own_a, own_b);
    }
    const pair_keys keys[2] = {keys_of(h, j), keys_of(h, j + 1)}, own_keys = keys_of(h, own);
    const pair_rows of_k = rows_of(h, h.row, i), of_q = rows_of(h, h.query, i), of_last = rows_of(h, query ? h.query : h.row, own);
#pragma unroll
    for (int y = 0; y < 2; y++) scale_pairs(kk[y], keys[y], of_k), scale_pairs(qk[y], keys[y], of_q);
    scale_pairs(last[0], own_keys, of_last);
    put_tile(h, qk[0], PART * j, PART * i);
    put_tile(h, kk[0], PART * i, PART * j);
    if (i == j + 1) put_own_p(h, qk[1], i), put_own_a(h, kk[1], i);
    else put_tile(h, qk[1], PART * j + PART, PART * i), put_tile(h, kk[1], PART * i, PART * j + PART);
    if (query) put_own_p(h, last[0], own);
    else put_own_a(h, last[0], own);
}

#endif
