/* delta_step_mma.cu - one new row of each sequence by the tensor-core form of the gated delta rule (delta_mma.cuh): decoding steps,
 * and the rows of a step with drafts one after the other.
 *
 * A block has a value head, a warp 32 of its value columns. What a warp reads of S and then of e goes by in stages of 16 rows,
 * copied to shared memory by the lanes that read them, so that no warp waits for another's; of the chunk's keys a warp has 16,
 * and their products with the row's k and q are what is exchanged, at the only barrier. Of a tile of 16 columns, tile x has column
 * 4 g + 2 x in row g and 4 g + 2 x + 1 in row g + 8; in operand B column 0 has to do with the row's k, column 1 with its q.
 *
 * Invariant: a row has the bits that the chunk kernel gives it: the same products, sums and roundings in the same order. */
#include "device/cuda/delta_net/delta_mma.cuh"

typedef __nv_bfloat16 bf16;

enum { STEP_WARPS = 4, STEP_THREADS = 32 * STEP_WARPS, COLS = 32, TILES = COLS / 16, K16 = 16 };
enum { STAGES = DELTA_C / K16 }; /* under way at a time; in the end all of e is there, part p in stage p */

template <typename T> struct step_mma_memory {
    enum { UNIT = 16 / sizeof(T), LDK = DEV_DELTA_DIM + UNIT, LDP = DELTA_C + 8, F = delta_parts<T>::F, HEADS = sizeof(T) / 2 };
    T keys[DELTA_C][LDK]; /* as they came */
    float stage[STAGES][STEP_WARPS][K16][COLS];
    float kk[DELTA_C], qk[DELTA_C];
    float scalar[STEP_WARPS];       /* beta; what G grows by; 1 / |k|; 1 / |q| times its scale */
    struct {                        /* of one warp */
        T x[2][LDK];                /* the row's k and q, as they came */
        float a[K16];               /* of the row's part of the chunk */
        float row[COLS], sum[COLS]; /* x_k . S, then o; sums over the parts before */
        uint16_t ap[F][2][LDP];     /* parts of a and of p of the row */
    } own[STEP_WARPS];
};

/* A thread's place: lane 4 g + t of a warp, whose columns begin with c0. It has columns 4 g .. 4 g + 3, if there are so many. */
struct step_lane {
    int warp, lane, g, t, c0;
    bool has;
};
/* Row x of the four of 16 that it has. */
static __device__ __forceinline__ int lane_row(int t, int x) { return 2 * t + (x & 1) + (x & 2 ? 8 : 0); }
/* Where column c of row r of a stage is, and the lane's four of its row x: eight lanes that read at a time have different banks. */
static __device__ __forceinline__ int stage_at(int r, int c) { return r * COLS + ((c + 4 * (r & 6)) & (COLS - 1)); }
static __device__ __forceinline__ int lane_at(const step_lane &l, int x) {
    return stage_at(2 * l.t, 4 * l.g) + lane_row(0, x) * COLS;
}

/* The row: of chunk row i, in its part; S has so many stages, none in a sequence's first chunk. */
template <typename T> struct step_row {
    int64_t n, head, t;
    int i, part, stages, dk, dv;
    float *s, *r, *e, *g;
    T *keys;
    const T *q, *k;
};
template <typename T>
static __device__ __forceinline__ step_row<T> step_row_at(const delta_job<T> &j, const delta_seq &s, int row) {
    step_row<T> x;
    const int64_t pos = s.pos0 + row;
    x.n = blockIdx.x, x.head = (int)blockIdx.x / (int)j.group, x.t = s.row0 + row;
    x.i = (int)(pos % DELTA_C), x.part = x.i / K16, x.dk = (int)j.dk, x.dv = (int)j.dv;
    x.stages = pos < DELTA_C ? 0 : x.dk / K16;
    const int64_t head = s.slot * j.hv + x.n, key_head = s.slot * j.hk + x.head;
    x.s = j.s + head * j.dk * j.dv, x.e = j.e + head * DELTA_C * j.dv, x.g = j.g + head * DELTA_C;
    x.keys = j.k + key_head * DELTA_C * j.dk, x.r = j.r + key_head * DELTA_C;
    x.q = j.qkv + x.t * j.width + x.head * j.dk, x.k = x.q + j.hk * j.dk;
    return x;
}

/* ---- loads, of which none is waited for ---- */

/* 16 keys of the chunk; from the row on zeros. */
template <typename T>
static __device__ __forceinline__ void copy_keys(step_mma_memory<T> &m, const step_row<T> &x, const step_lane &l) {
    enum { UNIT = step_mma_memory<T>::UNIT, LANES = DEV_DELTA_DIM / UNIT, ROWS = 32 / LANES };
    const int d = l.lane % LANES * UNIT, y0 = l.warp * K16 + l.lane / LANES;
    const T *const from = x.keys + y0 * x.dk + d;
    const uint32_t to = smem_addr(&m.keys[y0][d]);
#pragma unroll
    for (int y = 0; y < K16; y += ROWS)
        if (d < x.dk) cp_async16(to + y * step_mma_memory<T>::LDK * sizeof(T), from + y * x.dk, y0 + y < x.i);
    cp_commit();
}
/* Its key among the chunk's. */
template <typename T>
static __device__ __forceinline__ void place_key(step_mma_memory<T> &m, const step_row<T> &x, const step_lane &l) {
    const int d = l.lane * step_mma_memory<T>::UNIT;
    if (l.warp == x.part && d < x.dk) *(uint4 *)&m.keys[x.i][d] = *(const uint4 *)&m.own[l.warp].x[0][d];
    __syncwarp();
}
/* The lane's numbers of 16 rows: of S, or of e, where rows from the new one on are zeros. */
template <typename T>
static __device__ __forceinline__ void copy_stage(step_mma_memory<T> &m, const step_row<T> &x, const step_lane &l, int at) {
    const int z = at - x.stages, lane = 2 * l.t * x.dv + l.c0 + 4 * l.g;
    const uint32_t to = smem_addr(&m.stage[z & (STAGES - 1)][l.warp][0][lane_at(l, 0)]);
    if (z < 0) {
        const float *const from = x.s + at * K16 * x.dv + lane;
#pragma unroll
        for (int y = 0; y < 4; y++) cp_async16(to + lane_row(0, y) * COLS * sizeof(float), from + lane_row(0, y) * x.dv, l.has);
    } else if (z <= x.part) {
        const float *const from = x.e + z * K16 * x.dv + lane;
        const int rows = l.has ? x.i - z * K16 - 2 * l.t : 0;
#pragma unroll
        for (int y = 0; y < 4; y++)
            cp_async16(to + lane_row(0, y) * COLS * sizeof(float), from + lane_row(0, y) * x.dv, lane_row(0, y) < rows);
    }
    cp_commit();
}

/* The row's k and q, of which a lane has HEADS pieces of 16 bytes. */
template <typename T, int HEADS>
static __device__ __forceinline__ void load_heads(uint4 (&v)[HEADS], const step_row<T> &x, const step_lane &l) {
    enum { UNIT = step_mma_memory<T>::UNIT, LANES = DEV_DELTA_DIM / UNIT };
#pragma unroll
    for (int h = 0; h < HEADS; h++) {
        const int d = l.lane % LANES * UNIT;
        if (d < x.dk) v[h] = *(const uint4 *)&(h + l.lane / LANES ? x.q : x.k)[d];
    }
}
template <typename T, int HEADS>
static __device__ __forceinline__ void put_heads(step_mma_memory<T> &m, const uint4 (&v)[HEADS], const step_row<T> &x,
                                                 const step_lane &l) {
    enum { UNIT = step_mma_memory<T>::UNIT, LANES = DEV_DELTA_DIM / UNIT };
#pragma unroll
    for (int h = 0; h < HEADS; h++) {
        const int d = l.lane % LANES * UNIT;
        if (d < x.dk) *(uint4 *)&m.own[l.warp].x[h + l.lane / LANES][d] = v[h];
    }
}

/* ---- operands ---- */

/* A lane's four rows as operand A: the warp's columns, of which those rows are k. */
template <int P> static __device__ __forceinline__ void rows_split(uint32_t (&a)[TILES][P][4], const float4 (&v)[4]) {
#pragma unroll
    for (int h = 0; h < 2; h++) {
        const float4 x = v[2 * h], y = v[2 * h + 1];
        uint32_t w[4][P];
        split_pair(w[0], x.x, y.x), split_pair(w[1], x.y, y.y), split_pair(w[2], x.z, y.z), split_pair(w[3], x.w, y.w);
#pragma unroll
        for (int p = 0; p < P; p++) {
            a[0][p][2 * h] = w[0][p], a[0][p][2 * h + 1] = w[1][p];
            a[1][p][2 * h] = w[2][p], a[1][p][2 * h + 1] = w[3][p];
        }
    }
}
template <typename T>
static __device__ __forceinline__ void load_rows(float4 (&v)[4], const step_mma_memory<T> &m, int stage, const step_lane &l) {
    const float *const from = &m.stage[stage][l.warp][0][0];
#pragma unroll
    for (int x = 0; x < 4; x++) v[x] = *(const float4 *)&from[lane_at(l, x)];
}
/* Two numbers that came in T, as they are. */
static __device__ __forceinline__ void pair_parts(uint32_t (&w)[1], const bf16 *x) { w[0] = *(const uint32_t *)x; }
static __device__ __forceinline__ void pair_parts(uint32_t (&w)[3], const float *x) { split_pair(w, x[0], x[1]); }
/* The row's k and q from element d on, as operand B. */
template <typename T, int X, int LDK>
static __device__ __forceinline__ void heads_tile(uint32_t (&b)[1][X][2], const T (&x)[2][LDK], int d, const step_lane &l) {
#pragma unroll
    for (int h = 0; h < 2; h++) {
        uint32_t w[X] = {};
        if (l.g < 2) pair_parts(w, &x[l.g][d + 2 * l.t + 8 * h]);
#pragma unroll
        for (int p = 0; p < X; p++) b[0][p][h] = w[p];
    }
}
/* The row's a and p from row y of the chunk on, as operand B. */
template <int F, int LDP>
static __device__ __forceinline__ void weights_tile(uint32_t (&b)[1][F][2], const uint16_t (&ap)[F][2][LDP], int y,
                                                    const step_lane &l) {
#pragma unroll
    for (int p = 0; p < F; p++)
#pragma unroll
        for (int h = 0; h < 2; h++) b[0][p][h] = l.g < 2 ? *(const uint32_t *)&ap[p][l.g][y + 2 * l.t + 8 * h] : 0;
}
/* 16 keys as operand A, of their elements from d on. */
template <int LDK>
static __device__ __forceinline__ void keys_tile(uint32_t (&a)[1][1][4], const bf16 (*keys)[LDK], int d, const step_lane &) {
    ldmatrix_x4(a[0][0], smem_addr(&keys[0][d] + tile_by_rows(LDK)));
}
template <int LDK>
static __device__ __forceinline__ void keys_tile(uint32_t (&a)[1][3][4], const float (*keys)[LDK], int d, const step_lane &l) {
#pragma unroll
    for (int x = 0; x < 4; x++) {
        uint32_t w[3];
        pair_parts(w, &keys[l.g + (x & 1 ? 8 : 0)][d + 2 * l.t + (x & 2 ? 8 : 0)]);
#pragma unroll
        for (int p = 0; p < 3; p++) a[0][p][x] = w[p];
    }
}
/* Elements [d, d + 16) of 16 keys, which are k, as operand B. */
template <int LDK>
static __device__ __forceinline__ void elements_tile(uint32_t (&b)[2][1][2], const bf16 (*keys)[LDK], int d, const step_lane &) {
    uint32_t r[4];
    ldmatrix_x4_trans(r, smem_addr(&keys[0][d] + tile_by_rows(LDK)));
    b[0][0][0] = r[0], b[0][0][1] = r[1], b[1][0][0] = r[2], b[1][0][1] = r[3];
}
template <int LDK>
static __device__ __forceinline__ void elements_tile(uint32_t (&b)[2][3][2], const float (*keys)[LDK], int d, const step_lane &l) {
#pragma unroll
    for (int n = 0; n < 2; n++)
#pragma unroll
        for (int h = 0; h < 2; h++) {
            const int y = 2 * l.t + 8 * h, at = d + 8 * n + l.g;
            uint32_t w[3];
            split_pair(w, keys[y][at], keys[y + 1][at]);
#pragma unroll
            for (int p = 0; p < 3; p++) b[n][p][h] = w[p];
        }
}

/* ---- parts of the row ---- */

/* Products of the row's k and q with the warp's keys. */
template <typename T> static __device__ __forceinline__ void part_dots(step_mma_memory<T> &m, int dk, const step_lane &l) {
    typedef delta_parts<T> parts;
    float acc[1][1][4] = {};
#pragma unroll 8
    for (int d = 0; d < dk; d += K16) {
        uint32_t a[1][parts::X][4], b[1][parts::X][2];
        keys_tile(a, &m.keys[l.warp * K16], d, l);
        heads_tile(b, m.own[l.warp].x, d, l);
        mma_parts<parts::MOST>(acc, a, b);
    }
    if (l.t) return;
    const int y = l.warp * K16 + l.g;
    m.kk[y] = acc[0][0][0], m.qk[y] = acc[0][0][1], m.kk[y + 8] = acc[0][0][2], m.qk[y + 8] = acc[0][0][3];
}
/* 1 / |k|, 1 / |q| times its scale, and the row's gates: a warp each. */
template <typename T>
static __device__ __forceinline__ void row_scalars(step_mma_memory<T> &m, const delta_job<T> &j, const step_row<T> &x,
                                                   const step_lane &l) {
    float v;
    if (l.warp == 0) v = delta_beta(j, x.t, x.n);
    else if (l.warp == 1) v = delta_g(act_at(j.a_log, x.n), delta_input(j, x.t, x.n));
    else v = head_scale(head_load(l.warp == 2 ? x.k : x.q, x.dk));
    if (l.warp == 3) v = __fmul_rn(v, delta_q_scale(x.dk));
    if (l.lane == 0) m.scalar[l.warp] = v;
}
/* acc += a stage . b. */
template <typename T, int PB>
static __device__ __forceinline__ void stage_mma(float (&acc)[TILES][1][4], const step_mma_memory<T> &m, int stage,
                                                 const uint32_t (&b)[1][PB][2], const step_lane &l) {
    float4 v[4];
    uint32_t a[TILES][delta_parts<T>::F][4];
    load_rows(v, m, stage, l);
    rows_split(a, v);
    mma_parts<delta_parts<T>::MOST>(acc, a, b);
}
/* Column h of accumulators, of the k (0) or of the q (1), to the warp's row of columns. */
static __device__ __forceinline__ void put_column(float (&to)[COLS], const float (&acc)[TILES][1][4], int h, const step_lane &l) {
    if (l.t == 0) *(float4 *)&to[4 * l.g] = make_float4(acc[0][0][h], acc[0][0][h + 2], acc[1][0][h], acc[1][0][h + 2]);
}

/* S' of a chunk whose last row this is, in the warp's columns; w: what e of rows lane, lane + 32 is multiplied with. */
template <typename T>
static __device__ __forceinline__ void close_chunk(const step_mma_memory<T> &m, const step_row<T> &x, float by, const float (&w)[2],
                                                   const step_lane &l) {
    typedef delta_parts<T> parts;
    uint32_t a[STAGES][TILES][parts::F][4];
#pragma unroll
    for (int s = 0; s < STAGES; s++) {
        float4 v[4];
        load_rows(v, m, s, l);
#pragma unroll
        for (int y = 0; y < 4; y++) {
            const float f = __shfl_sync(WARP_ALL, w[s / 2], s % 2 * K16 + lane_row(l.t, y));
            v[y] = make_float4(__fmul_rn(f, v[y].x), __fmul_rn(f, v[y].y), __fmul_rn(f, v[y].z), __fmul_rn(f, v[y].w));
        }
        rows_split(a[s], v);
    }
    float *const st = x.s + 2 * l.t * x.dv + l.c0 + 4 * l.g;
    const bool first = x.stages == 0;
    float4 old[4] = {};
    const auto load = [&](int d) {
#pragma unroll
        for (int y = 0; y < 4; y++)
            if (!first && l.has && d < x.dk) old[y] = *(const float4 *)&st[(d + lane_row(0, y)) * x.dv];
    };
    load(0);
#pragma unroll 1
    for (int d = 0; d < x.dk; d += K16) {
        float acc[TILES][2][4];
#pragma unroll
        for (int y = 0; y < 4; y++) {
            const float4 v = old[y];
            acc[0][y / 2][y % 2] = first ? 0.0f : __fmul_rn(by, v.x), acc[0][y / 2][y % 2 + 2] = first ? 0.0f : __fmul_rn(by, v.y);
            acc[1][y / 2][y % 2] = first ? 0.0f : __fmul_rn(by, v.z), acc[1][y / 2][y % 2 + 2] = first ? 0.0f : __fmul_rn(by, v.w);
        }
        load(d + K16);
#pragma unroll
        for (int s = 0; s < STAGES; s++) {
            uint32_t b[2][parts::X][2];
            elements_tile(b, &m.keys[s * K16], d, l);
            mma_parts<parts::MOST>(acc, a[s], b);
        }
#pragma unroll
        for (int y = 0; y < 4; y++)
            if (l.has)
                *(float4 *)&st[(d + lane_row(0, y)) * x.dv] =
                    make_float4(acc[0][y / 2][y % 2], acc[0][y / 2][y % 2 + 2], acc[1][y / 2][y % 2], acc[1][y / 2][y % 2 + 2]);
    }
}

/* Row `row` of those that a sequence has in the batch, or none. ALL: heads have DEV_DELTA_DIM elements. Of a row that the kernel in
 * front is not of, the state is read before that kernel has ended (device/graph.h). */
template <typename T, bool ALL>
static __global__ void __launch_bounds__(STEP_THREADS, sizeof(T) == 2 ? 4 : 3)
    delta_step_mma_kernel(const delta_job<T> job, int row) {
    typedef delta_parts<T> parts;
    pdl_launch_dependents();
    if (row) pdl_wait(); /* for the row before */
    delta_job<T> j = job;
    if (ALL) j.dk = j.dv = DEV_DELTA_DIM; /* numbers that the compiler knows */
    step_mma_memory<T> &m = dynamic_shared<step_mma_memory<T>>();
    const delta_seq seq = delta_seq_at(j, blockIdx.y);
    if (row >= seq.n) {
        pdl_wait();
        return;
    }
    const step_row<T> x = step_row_at(j, seq, row);
    const int warp = (int)threadIdx.x / 32, lane = (int)threadIdx.x % 32, i = x.i, c = warp * COLS + lane;
    const step_lane l = {warp, lane, lane / 4, lane % 4, warp * COLS, ALL || warp * COLS + lane / 4 * 4 < x.dv};
    auto &own = m.own[warp];
    const bool first = x.stages == 0, column = ALL || c < x.dv;

    float g_at[2], r_at[2]; /* of rows lane, lane + 32 of the chunk; from L2, as the copies */
#pragma unroll
    for (int h = 0; h < 2; h++) {
        const int y = lane + 32 * h;
        g_at[h] = y < i ? __ldcg(&x.g[y]) : 0.0f, r_at[h] = y < i ? __ldcg(&x.r[y]) : 0.0f;
    }
    const float before = i ? __ldcg(&x.g[i - 1]) : 0.0f;
    copy_keys(m, x, l);
#pragma unroll
    for (int at = 0; at < STAGES; at++) copy_stage(m, x, l, at);
    pdl_wait();
    uint4 heads[step_mma_memory<T>::HEADS];
    load_heads(heads, x, l);
    T value = {};
    if (column) value = j.qkv[x.t * j.width + 2 * j.hk * x.dk + x.n * x.dv + c];
    row_scalars(m, j, x, l);
    put_heads(m, heads, x, l);
    cp_wait<STAGES>(); /* the warp's keys */
    __syncwarp();
    place_key(m, x, l);
    if (warp <= x.part) part_dots(m, x.dk, l);
    __syncthreads();

    const float beta = m.scalar[0], added = m.scalar[1], r = m.scalar[2], rq = m.scalar[3];
    const float g = i ? __fadd_rn(before, added) : added, by = decay_exp(g);
    float w[2];
#pragma unroll
    for (int h = 0; h < 2; h++) {
        const int y = lane + 32 * h;
        const float r_y = y < i ? r_at[h] : r, g_y = y < i ? g_at[h] : g;
        const float a = delta_pair(m.kk[y], r, r_y, g, g_y), p = delta_pair(m.qk[y], rq, r_y, g, g_y);
        uint32_t both[parts::F];
        split_pair(both, y < i ? a : 0.0f, y <= i ? p : 0.0f);
#pragma unroll
        for (int z = 0; z < parts::F; z++) own.ap[z][0][y] = (uint16_t)both[z], own.ap[z][1][y] = (uint16_t)(both[z] >> 16);
        if (y / K16 == x.part) own.a[y % K16] = a;
        w[h] = delta_we(decay_exp(__fsub_rn(g, g_y)), r_y, 1.0f);
    }
    const bool keeps = x.n == x.head * j.group && warp == STEP_WARPS - 1; /* the key */
    const int d = lane * step_mma_memory<T>::UNIT;
    if (keeps && d < x.dk) *(uint4 *)&x.keys[i * x.dk + d] = *(const uint4 *)&m.keys[i][d];
    if (keeps && lane == 0) x.r[i] = r;
    if (threadIdx.x == 0) x.g[i] = g;

    float acc[TILES][1][4] = {};
#pragma unroll 1
    for (int at = 0; at < x.stages; at++) {
        uint32_t b[1][parts::X][2];
        heads_tile(b, own.x, at * K16, l);
        cp_wait<STAGES - 1>();
        stage_mma(acc, m, (at - x.stages) & (STAGES - 1), b, l);
        copy_stage(m, x, l, at + STAGES);
    }
    put_column(own.row, acc, 0, l);
#pragma unroll
    for (int z = 0; z < TILES; z++)
#pragma unroll
        for (int h = 0; h < 4; h++) acc[z][0][h] = first || h % 2 == 0 ? 0.0f : delta_o(acc[z][0][h], by, rq);
    __syncwarp(); /* a and p */
#pragma unroll 1
    for (int part = 0; part < x.part; part++) {
        uint32_t b[1][parts::F][2];
        weights_tile(b, own.ap, part * K16, l);
        cp_wait<STAGES - 1>();
        stage_mma(acc, m, part, b, l);
        cp_commit(); /* nothing is to come */
    }
    put_column(own.sum, acc, 0, l);
    cp_wait<0>();
    __syncwarp();
    float *const last = &m.stage[x.part][warp][0][0], sum = own.sum[lane];
#pragma unroll
    for (int y = 0; y < K16 - 1; y++) {
        const float next = __fmaf_rn(own.a[y], last[stage_at(y, lane)], sum);
        sum = y < i % K16 ? next : sum;
    }
    const float v = act_at(&value, 0), u = first ? v : delta_u(own.row[lane], by, r, v), e = delta_e(beta, u, sum);
    last[stage_at(i % K16, lane)] = e;
    if (column) x.e[i * x.dv + c] = e;
    __syncwarp();
    uint32_t b[1][parts::F][2];
    weights_tile(b, own.ap, x.part * K16, l);
    stage_mma(acc, m, x.part, b, l);
    put_column(own.row, acc, 1, l);
    __syncwarp();
    if (column) act_put(j.out, (x.t * j.hv + x.n) * x.dv + c, own.row[lane]);
    if (i == DELTA_C - 1) close_chunk(m, x, by, w, l);
}

template <typename T> int delta_step_mma(struct cuda *c, const struct delta_args *a, const delta_job<T> &j, int row) {
    const dim3 grid((unsigned)j.hv, (unsigned)a->seqs.n);
    const bool all = j.dk == DEV_DELTA_DIM && j.dv == DEV_DELTA_DIM;
    void (*const kernel)(delta_job<T>, int) = all ? delta_step_mma_kernel<T, true> : delta_step_mma_kernel<T, false>;
    TRY(delta_shared(c, (const void *)kernel, sizeof(step_mma_memory<T>), a));
    if (row) CU_TRY(cuda_launch_pdl(c, kernel, grid, (int)STEP_THREADS, sizeof(step_mma_memory<T>), j, row));
    else CU_TRY(cuda_launch(c, kernel, grid, (int)STEP_THREADS, sizeof(step_mma_memory<T>), j, row));
    return 0;
}
template int delta_step_mma(struct cuda *, const struct delta_args *, const delta_job<bf16> &, int);
template int delta_step_mma(struct cuda *, const struct delta_args *, const delta_job<float> &, int);
