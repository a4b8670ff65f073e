/* delta_rule_bwd.cu - the backward of the gated delta rule, chunk by chunk from a sequence's last one.
 *
 * A block has a key head of a sequence, with its value heads one after the other.  Per chunk and value head, with the start
 * state S and the e of forward, D_ij = exp(G_i - G_j), A_ij = D_ij k_i.k_j, P_ij = D_ij q_i.k_j, y_i = exp(G_i),
 * z_j = exp(G_C - G_j), dS' the gradient of the state after it:
 *   de_j = sum_{i>=j} P_ij do_i + z_j dS'^T k_j;  x_j = de_j - sum_{i>j} A_ij beta_i x_i, from the last row up;  r = beta x = dv
 *   dq_i = y_i S do_i + sum_{j<=i} D_ij (do_i.e_j) k_j
 *   dk_i = -y_i S r_i - sum_{j<i} D_ij (r_i.e_j) k_j
 *        + sum_{j>=i} D_ji (do_j.e_i) q_j - sum_{j>i} D_ji (r_j.e_i) k_j + z_i dS' e_i
 *   dg_t = sum_{i>=t} (y_i q_i.(S do_i) - y_i k_i.(S r_i)) + sum_{j<t} z_j k_j.(dS' e_j) + exp(G_C) S.dS'
 *        + sum_{j<t<=i} (P_ij do_i.e_j - A_ij r_i.e_j): no term is added that another one takes away again
 *   dS = exp(G_C) dS' - sum_i y_i k_i r_i^T + sum_i y_i q_i do_i^T
 * dS takes the place of S in states.
 *
 * Products are on tensor cores (tf32x3.cuh); q, k and do are as they came, bf16 where TF32 holds them, and what they are multiplied
 * with (1 / |k|, 1 / |q| / sqrt(Dk), y, z) is taken into the other operand or the result.
 * A warp has 16 rows of a chunk and a quarter of the columns: of heads 32, of squares 16.
 * x comes in parts of 16 rows, from the last: within a part a thread has a column, the parts before take a part's by a product.
 * Invariant: each sum has one order, whatever else is in the batch. */
#include "device/cuda/delta_net/delta_rule.cuh"
#include "device/cuda/delta_net/tf32x3.cuh"

typedef __nv_bfloat16 bf16;

enum {
    BWD_THREADS = 512,
    BWD_WARPS = BWD_THREADS / 32,
    PART = 16,                      /* rows of a warp, and of a part of x */
    PARTS = DELTA_C / PART,         /* warps are PARTS by ACROSS */
    ACROSS = BWD_WARPS / PARTS,     /* warps that share rows */
    COLS = DEV_DELTA_DIM / ACROSS,  /* columns of a warp, */
    SQUARE_COLS = DELTA_C / ACROSS, /* and of a square */
    WIDE = COLS / 8,                /* tiles of them */
    NARROW = SQUARE_COLS / 8,
    DEEP = DEV_DELTA_DIM / PART,                   /* of a state: warps over its rows, */
    STATE_COLS = DEV_DELTA_DIM * DEEP / BWD_WARPS, /* columns of a warp */
    LD = DEV_DELTA_DIM + 4,                        /* floats between rows of heads in shared memory, */
    LDX = DELTA_C + 4,                             /* and between rows of squares: the rows of a tile are in different banks */
};
static_assert(ACROSS * PARTS == BWD_WARPS && BWD_WARPS % DEEP == 0 && NARROW > 0, "a warp has 16 rows");

template <typename T> struct bwd_memory {
    enum { STAGED = sizeof(T) == 2, LDT = DEV_DELTA_DIM + 16 / sizeof(T) };
    float e[DELTA_C][LD], x[DELTA_C][LD], square[DELTA_C][LDX];
    T k[DELTA_C][LDT], q[DELTA_C][LDT]; /* as they came */
    T dout[STAGED ? DELTA_C : 1][LDT];  /* f32 is read where it is */
    float beta[DELTA_C], g[DELTA_C], by[DELTA_C], left[DELTA_C];
    float rk[DELTA_C], rq[DELTA_C], sq[DELTA_C];                                        /* 1 / |k|, 1 / |q|, that / sqrt(Dk) */
    float start[ACROSS][DELTA_C], after[ACROSS][DELTA_C], pairs[PARTS][DELTA_C], whole; /* the parts of dg; of a warp's columns */
    float keys[ACROSS][DELTA_C];                                                        /* of start: -y_i k_i.(S r_i) */
    float low[ACROSS][DELTA_C]; /* a row's sum over a warp's columns of a square */
    float red[32], da_log, ddt_bias;
};
/* Where shared memory is large enough, with a copy of S or of dS'. */
template <typename T> struct bwd_memory_staged {
    bwd_memory<T> m;
    alignas(16) float s[DEV_DELTA_DIM][LD];
};

/* Chunk `chunk` of a sequence: rows of the batch [t, t + n). */
struct bwd_chunk {
    int64_t t, chunk, head, value_head;
    int n;
    const float *s, *ds; /* NULL: zeros */
};
/* Rows of a chunk, sizes of heads. */
struct bwd_size {
    int n, dk, dv;
};
/* A warp's place: its rows and columns of a head. Warps of a scheduler have different rows, since of a triangle they have more or
 * less to do. ALL: heads have DEV_DELTA_DIM elements. */
template <bool ALL> struct bwd_warp {
    int row, part, col;
    __device__ __forceinline__ tile_place<ALL> head(int64_t cols) const { return {row, col, (int)cols}; }
};
template <bool ALL> static __device__ __forceinline__ bwd_warp<ALL> warp_place() {
    const int w = (int)threadIdx.x / 32;
    return {(w + w / PARTS) % PARTS * PART, w / PARTS, w / PARTS * COLS};
}
/* And its rows and columns of a square; the first warps have what is not above the diagonal. */
struct square_warp {
    int row, part, col;
    bool on;
    __device__ __forceinline__ tile_place<true> square() const { return {row, col, DELTA_C}; }
};
static __device__ __forceinline__ square_warp square_place() {
    static_assert(PARTS == 4 && ACROSS == 4, "a warp's row and column, two bits each");
    const int at = (int)(0xb76321fedca98540 >> (int)threadIdx.x / 32 * 4) & 15, row = at / ACROSS, part = at % ACROSS;
    return {row * PART, part, part * SQUARE_COLS, part <= row};
}

/* S or dS' as products read it. */
struct bwd_state {
    const float *p;
    int64_t ld;
};
/* Collective. Not STAGED: products read it where it is. */
template <bool STAGED>
static __device__ __forceinline__ bwd_state stage_state(float *to, const float *from, int64_t dk, int64_t dv) {
    if (!STAGED) return {from, dv};
    __syncthreads(); /* what was there has been read */
    const int c = (int)threadIdx.x % 32 * 4;
#pragma unroll 8
    for (int d = (int)threadIdx.x / 32; d < dk; d += BWD_WARPS)
        if (c < dv) *(float4 *)&to[d * LD + c] = *(const float4 *)&from[d * dv + c];
    __syncthreads();
    return {to, LD};
}

/* The same, not waited for: what was there has been read. */
static __device__ __forceinline__ void begin_state(float *to, const float *from, int64_t dk, int64_t dv) {
    const int c = (int)threadIdx.x % 32 * 4;
#pragma unroll 8
    for (int d = (int)threadIdx.x / 32; d < dk; d += BWD_WARPS)
        if (c < dv) cp_async16(smem_addr(&to[d * LD + c]), &from[d * dv + c], true);
    cp_commit();
}

/* Element d of row i's normalised key. */
template <typename T> static __device__ __forceinline__ float key_at(const bwd_memory<T> &m, int i, int d) {
    return __fmul_rn(act_at(m.k[i], d), m.rk[i]);
}
/* Rows of k or q, and what makes them normalised ones. */
template <typename T> struct bwd_rows {
    const T (*row)[bwd_memory<T>::LDT];
    const float *by;
};
/* square = dots of rows of `of` with keys, decayed, in tiles up to the diagonal; 0 from it on (strict) or behind it. */
template <typename T> static __device__ void dots(bwd_memory<T> &m, const bwd_rows<T> &of, int n, int dk, bool strict) {
    const square_warp w = square_place();
    float acc[NARROW][4];
    if (!w.on) return;
    tiles_zero(acc);
    tiles_mm(
        acc, w.square(), dk, [&](int i, int d) { return tf32_of(of.row[i][d]); }, [&](int d, int c) { return tf32_of(m.k[c][d]); });
#pragma unroll
    for (int y = 0; y < NARROW; y++)
#pragma unroll
        for (int x = 0; x < 4; x++) {
            const int i = w.row + tile_row(x), j = w.col + 8 * y + tile_col(x);
            const bool on = i < n && (strict ? j < i : j <= i);
            const float dot = __fmul_rn(acc[y][x], __fmul_rn(of.by[i], m.rk[j]));
            m.square[i][j] = on ? __fmul_rn(dot, decay_exp(__fsub_rn(m.g[i], m.g[j]))) : 0.0f;
        }
}
/* Each number of a warp's columns of a square becomes the sum of those before it in its row. Collective; m.low is free before and
 * after a barrier. */
template <typename T> static __device__ void before_in_row(bwd_memory<T> &m, const square_warp &w, float (&a)[NARROW][4]) {
    const int t = (int)threadIdx.x & 3;
#pragma unroll
    for (int h = 0; h < 4; h += 2) {
        float carry = 0;
#pragma unroll
        for (int y = 0; y < NARROW; y++) {
            const float first = a[y][h], both = __fadd_rn(first, a[y][h + 1]);
            float v = both;
            const float one = __shfl_up_sync(WARP_ALL, v, 1, 4);
            if (t >= 1) v = __fadd_rn(one, v);
            const float two = __shfl_up_sync(WARP_ALL, v, 2, 4);
            if (t >= 2) v = __fadd_rn(two, v);
            const float before = __shfl_up_sync(WARP_ALL, v, 1, 4), all = __shfl_sync(WARP_ALL, v, 3, 4);
            a[y][h] = t ? __fadd_rn(carry, before) : carry;
            a[y][h + 1] = __fadd_rn(a[y][h], first);
            carry = __fadd_rn(carry, all);
        }
        if (t == 0) m.low[w.part][w.row + tile_row(h)] = carry;
    }
    __syncthreads();
#pragma unroll
    for (int h = 0; h < 4; h += 2) {
        float before = 0;
        for (int p = 0; p < w.part; p++) before = __fadd_rn(before, m.low[p][w.row + tile_row(h)]);
#pragma unroll
        for (int y = 0; y < NARROW; y++) a[y][h] = __fadd_rn(before, a[y][h]), a[y][h + 1] = __fadd_rn(before, a[y][h + 1]);
    }
}
/* square = a(i, c) . e_j decayed, likewise; pairs[y][x] += the sum over the lane's rows i and j < t <= i of that times row i of
 * `of` . k_j, t the lane's column x of tile y. Collective. */
template <typename T, class A>
static __device__ void value_dots(bwd_memory<T> &m, const bwd_size &z, bool strict, const A &a, const bwd_rows<T> &of,
                                  float (&pairs)[NARROW][2]) {
    const square_warp w = square_place();
    float value[NARROW][4], dot[NARROW][4];
    tiles_zero(value), tiles_zero(dot);
    if (w.on) {
        tiles_mm(value, w.square(), z.dv, a, [&](int c, int j) { return m.e[j][c]; });
        tiles_mm(
            dot, w.square(), z.dk, [&](int i, int d) { return tf32_of(of.row[i][d]); },
            [&](int d, int j) { return tf32_of(m.k[j][d]); });
    }
#pragma unroll
    for (int y = 0; y < NARROW; y++)
#pragma unroll
        for (int x = 0; x < 4; x++) {
            const int i = w.row + tile_row(x), j = w.col + 8 * y + tile_col(x);
            const bool on = i < z.n && (strict ? j < i : j <= i);
            const float v = on ? __fmul_rn(value[y][x], decay_exp(__fsub_rn(m.g[i], m.g[j]))) : 0.0f;
            m.square[i][j] = v;
            dot[y][x] = on && j < i ? __fmul_rn(v, __fmul_rn(dot[y][x], __fmul_rn(of.by[i], m.rk[j]))) : 0.0f;
        }
    before_in_row(m, w, dot);
#pragma unroll
    for (int y = 0; y < NARROW; y++)
#pragma unroll
        for (int x = 0; x < 4; x++)
            if (w.col + 8 * y + tile_col(x) <= w.row + tile_row(x)) pairs[y][x & 1] = __fadd_rn(pairs[y][x & 1], dot[y][x]);
}
/* The lanes' sums over all rows of the warp, to m.pairs. */
template <typename T> static __device__ void pairs_put(bwd_memory<T> &m, float (&pairs)[NARROW][2]) {
    const square_warp w = square_place();
#pragma unroll
    for (int y = 0; y < NARROW; y++)
#pragma unroll
        for (int x = 0; x < 2; x++) {
            float v = pairs[y][x];
            for (int o = 4; o < 32; o <<= 1) v = __fadd_rn(v, __shfl_xor_sync(WARP_ALL, v, o));
            if ((threadIdx.x & 31) < 4) m.pairs[w.row / PART][w.col + 8 * y + tile_col(x)] = v;
        }
}

template <typename T> static __device__ void load_heads(const delta_job<T> &j, bwd_memory<T> &m, const bwd_chunk &b) {
    enum { BATCH = 4 }; /* rows that a warp loads at a time */
    const int lane = threadIdx.x & 31;
    for (int i0 = threadIdx.x / 32; i0 < DELTA_C; i0 += BATCH * BWD_WARPS) {
        lane_head q[BATCH], k[BATCH];
#pragma unroll
        for (int x = 0; x < BATCH; x++) {
            const int i = i0 + x * BWD_WARPS;
            const T *row = j.qkv + (b.t + i) * j.width;
            q[x] = k[x] = {};
            if (i < b.n) q[x] = head_load(row + b.head * j.dk, j.dk), k[x] = head_load(row + (j.hk + b.head) * j.dk, j.dk);
        }
#pragma unroll
        for (int x = 0; x < BATCH; x++) {
            const int i = i0 + x * BWD_WARPS;
            const float rq = head_scale(q[x]), rk = head_scale(k[x]);
            head_put(m.q[i], q[x], j.dk), head_put(m.k[i], k[x], j.dk);
            if (lane == 0) m.rq[i] = rq, m.sq[i] = __fmul_rn(rq, delta_q_scale(j.dk)), m.rk[i] = rk;
        }
    }
}
template <typename T> static __device__ __forceinline__ const T *dout_of(const delta_job<T> &j, const bwd_chunk &b) {
    return j.dout + (b.t * j.hv + b.value_head) * j.dv;
}

/* e and do of a value head, whose copies are under way. */
template <typename T>
static __device__ __forceinline__ void begin_values(const delta_job<T> &j, bwd_memory<T> &m, const bwd_chunk &b) {
    const int c = (int)threadIdx.x % 32 * 4, dv = (int)j.dv;
    const float *const e = j.kept + (b.t * j.hv + b.value_head) * dv;
#pragma unroll
    for (int i = (int)threadIdx.x / 32; i < DELTA_C; i += BWD_WARPS)
        if (c < dv) cp_async16(smem_addr(&m.e[i][c]), i < b.n ? &e[i * j.hv * dv + c] : e, i < b.n);
    if (bwd_memory<T>::STAGED) {
        enum { UNIT = 16 / sizeof(T), LANES = DEV_DELTA_DIM / UNIT };
        const int d = (int)threadIdx.x % LANES * UNIT;
        const T *const from = dout_of(j, b);
#pragma unroll
        for (int i = (int)threadIdx.x / LANES; i < DELTA_C; i += BWD_THREADS / LANES)
            if (d < dv) cp_async16(smem_addr(&m.dout[i][d]), i < b.n ? &from[i * j.hv * dv + d] : from, i < b.n);
    }
    cp_commit();
}
/* What begin_values copies, and the head's gates. */
template <typename T> static __device__ void load_values(const delta_job<T> &j, bwd_memory<T> &m, const bwd_chunk &b) {
    for (int i = threadIdx.x; i < DELTA_C; i += BWD_THREADS) {
        m.beta[i] = i < b.n ? delta_beta(j, b.t + i, b.value_head) : 0.0f;
        m.g[i] = i < b.n ? delta_g(act_at(j.a_log, b.value_head), delta_input(j, b.t + i, b.value_head)) : 0.0f;
    }
    __syncthreads();
    if (threadIdx.x == 0) running_sum(m.g, 0, b.n, 0);
    __syncthreads();
    for (int i = threadIdx.x; i < DELTA_C; i += BWD_THREADS) {
        m.by[i] = i < b.n ? decay_exp(m.g[i]) : 0.0f;
        m.left[i] = i < b.n ? decay_exp(__fsub_rn(m.g[b.n - 1], m.g[i])) : 0.0f;
    }
    cp_wait<0>();
    __syncthreads();
}
/* do: element c of row i of the chunk, 0 behind its last one. */
template <typename T> struct bwd_dout {
    const bwd_memory<T> &m;
    const T *from;
    int64_t step;
    int n;
    __device__ __forceinline__ auto operator()(int i, int c) const {
        if (bwd_memory<T>::STAGED) return tf32_of(m.dout[i][c]);
        return tf32_of(i < n ? from[i * step + c] : T{});
    }
};
template <typename T>
static __device__ __forceinline__ bwd_dout<T> dout_as(const delta_job<T> &j, const bwd_memory<T> &m, const bwd_chunk &b) {
    return {m, dout_of(j, b), j.hv * j.dv, b.n};
}
/* A warp's rows times a number each. */
template <int N, class F> static __device__ __forceinline__ void tiles_scale(float (&acc)[N][4], int row, const F &by) {
#pragma unroll
    for (int h = 0; h < 4; h += 2) {
        const float s = by(row + tile_row(h));
#pragma unroll
        for (int y = 0; y < N; y++) acc[y][h] = __fmul_rn(acc[y][h], s), acc[y][h + 1] = __fmul_rn(acc[y][h + 1], s);
    }
}

/* What dS' gives: de = z_j dS'^T k_j, and to dk and `after` z_i dS' e_i. */
template <bool ALL, bool STAGED, typename T>
static __device__ void from_next(const delta_job<T> &j, bwd_memory<T> &m, float *stage, const bwd_chunk &b, float (&de)[WIDE][4],
                                 float (&dk)[WIDE][4]) {
    const bwd_warp<ALL> w = warp_place<ALL>();
    float acc[WIDE][4];
    tiles_zero(de), tiles_zero(acc);
    if (b.ds) {
        const bwd_state ds = stage_state<STAGED>(stage, b.ds, j.dk, j.dv);
        tiles_mm(
            de, w.head(j.dv), (int)j.dk, [&](int i, int d) { return tf32_of(m.k[i][d]); },
            [&](int d, int c) { return ds.p[d * ds.ld + c]; });
        tiles_mm(
            acc, w.head(j.dk), (int)j.dv, [&](int i, int c) { return m.e[i][c]; },
            [&](int c, int d) { return ds.p[d * ds.ld + c]; });
        tiles_scale(de, w.row, [&](int i) { return __fmul_rn(m.left[i], m.rk[i]); });
        tiles_scale(acc, w.row, [&](int i) { return m.left[i]; });
    }
    tiles_row_sums(m.after[w.part], acc, w.head(j.dk), [&](int i, int d, float v) { return __fmul_rn(v, key_at(m, i, d)); });
#pragma unroll
    for (int y = 0; y < WIDE; y++)
#pragma unroll
        for (int x = 0; x < 4; x++) dk[y][x] = __fadd_rn(dk[y][x], acc[y][x]);
}

/* A column of a part of x, from de less what the parts after it take: x_j = de_j - sum_{i>j} A_ij beta_i x_i. */
template <typename T> static __device__ __forceinline__ void part_x(bwd_memory<T> &m, int part, int c) {
    float v[PART];
#pragma unroll
    for (int r = 0; r < PART; r++) v[r] = m.x[part * PART + r][c];
#pragma unroll
    for (int y = PART - 1; y > 0; y--) {
        const float x = __fmul_rn(m.beta[part * PART + y], v[y]);
#pragma unroll
        for (int r = 0; r < y; r++) v[r] = __fmaf_rn(-m.square[part * PART + y][part * PART + r], x, v[r]);
    }
#pragma unroll
    for (int r = 0; r < PART; r++) m.x[part * PART + r][c] = v[r];
}
/* x of all rows, to m.x; and the gradients of beta and v. S is on its way to shared memory. */
template <bool ALL, bool STAGED, typename T>
static __device__ void solve(const delta_job<T> &j, bwd_memory<T> &m, float *stage, const bwd_chunk &b, float (&de)[WIDE][4]) {
    const bwd_warp<ALL> w = warp_place<ALL>();
    const int lane = threadIdx.x & 31, dk = (int)j.dk, dv = (int)j.dv;
    dots<T>(m, {m.q, m.sq}, b.n, dk, false);
    __syncthreads();
    if (STAGED && b.s) begin_state(stage, b.s, j.dk, j.dv); /* of dS' all is read */
    const bwd_dout<T> dout = dout_as(j, m, b);
    tiles_mm(/* rows from the warp's own on */
             de, w.head(dv), DELTA_C - w.row, [&](int r, int i) { return m.square[w.row + i][r]; },
             [&](int i, int c) { return dout(w.row + i, c); });
    __syncthreads();
    dots<T>(m, {m.k, m.rk}, b.n, dk, true);
    __syncthreads();
    for (int part = PARTS - 1; part >= 0; part--) {
        if (w.row == part * PART)
#pragma unroll
            for (int y = 0; y < WIDE; y++)
#pragma unroll
                for (int x = 0; x < 4; x++)
                    if (w.col + 8 * y < dv) m.x[w.row + tile_row(x)][w.col + 8 * y + tile_col(x)] = de[y][x];
        __syncthreads();
        if (threadIdx.x < dv) part_x(m, part, threadIdx.x);
        __syncthreads();
        if (w.row < part * PART)
            tiles_mm(
                de, w.head(dv), PART,
                [&](int r, int i) { return -__fmul_rn(m.square[part * PART + i][r], m.beta[part * PART + i]); },
                [&](int i, int c) { return m.x[part * PART + i][c]; });
    }
    for (int i = threadIdx.x / 32; i < b.n; i += BWD_WARPS) {
        float dot = 0;
        for (int64_t c = lane; c < j.dv; c += 32) {
            dot = __fmaf_rn(m.x[i][c], m.e[i][c], dot);
            act_put(j.dqkv, (b.t + i) * j.width + 2 * j.hk * j.dk + b.value_head * j.dv + c, __fmul_rn(m.beta[i], m.x[i][c]));
        }
        dot = lanes_sum(dot, 32);
        if (lane == 0) act_put(j.dba, (b.t + i) * j.ba_width + b.value_head, __fmul_rn(dot, __fsub_rn(1.0f, m.beta[i])));
    }
}

/* dq, dk += a value head's, and the parts of dg. */
template <bool ALL, bool STAGED, typename T>
static __device__ void heads_back(const delta_job<T> &j, bwd_memory<T> &m, float *stage, const bwd_chunk &b, float (&dq)[WIDE][4],
                                  float (&dk)[WIDE][4]) {
    const bwd_warp<ALL> w = warp_place<ALL>();
    const int n_dk = (int)j.dk, n_dv = (int)j.dv;
    const bwd_dout<T> dout = dout_as(j, m, b);
    const auto minus_r = [&](int r, int c) { return -__fmul_rn(m.beta[r], m.x[r][c]); };
    const auto key = [&](int i, int d) { return tf32_of(m.k[i][d]); };
    const auto square = [&](int r, int i) { return __fmul_rn(m.square[r][i], m.rk[i]); };
    const int above = w.row + PART, below = DELTA_C - w.row; /* rows up to the warp's last one, and from its first one on */
    float acc[WIDE][4], pairs[NARROW][2] = {};
    const bwd_state s = {STAGED ? stage : b.s, STAGED ? (int64_t)LD : j.dv};
    if (STAGED && b.s) {
        cp_wait<0>();
        __syncthreads();
    }
    const auto state = [&](int c, int d) { return s.p[d * s.ld + c]; };
    tiles_zero(acc);
    if (b.s) tiles_mm(acc, w.head(n_dk), n_dv, dout, state);
    tiles_scale(acc, w.row, [&](int i) { return m.by[i]; });
    tiles_row_sums(m.start[w.part], acc, w.head(n_dk),
                   [&](int i, int d, float v) { return __fmul_rn(v, __fmul_rn(act_at(m.q[i], d), m.sq[i])); });
#pragma unroll
    for (int y = 0; y < WIDE; y++)
#pragma unroll
        for (int x = 0; x < 4; x++) dq[y][x] = __fadd_rn(dq[y][x], acc[y][x]);
    value_dots<T>(m, {b.n, n_dk, n_dv}, false, dout, {m.q, m.sq}, pairs);
    __syncthreads();
    tiles_mm(dq, w.head(n_dk), above, square, key);
    tiles_mm(
        dk, w.head(n_dk), below, [&](int r, int i) { return __fmul_rn(m.square[w.row + i][r], m.sq[w.row + i]); },
        [&](int i, int d) { return tf32_of(m.q[w.row + i][d]); });
    __syncthreads();
    value_dots<T>(m, {b.n, n_dk, n_dv}, true, minus_r, {m.k, m.rk}, pairs);
    pairs_put(m, pairs);
    tiles_zero(acc);
    if (b.s) tiles_mm(acc, w.head(n_dk), n_dv, minus_r, state);
    tiles_scale(acc, w.row, [&](int i) { return m.by[i]; });
    tiles_row_sums(m.keys[w.part], acc, w.head(n_dk), [&](int i, int d, float v) { return __fmul_rn(v, key_at(m, i, d)); });
#pragma unroll
    for (int y = 0; y < WIDE; y++)
#pragma unroll
        for (int x = 0; x < 4; x++) dk[y][x] = __fadd_rn(dk[y][x], acc[y][x]);
    tiles_mm(dk, w.head(n_dk), above, square, key);
    tiles_mm(
        dk, w.head(n_dk), below, [&](int r, int i) { return __fmul_rn(m.square[w.row + i][r], m.rk[w.row + i]); },
        [&](int i, int d) { return key(w.row + i, d); });
    float whole = 0;
    if (b.s && b.ds) {
        const int c = ((int)threadIdx.x & 31) * 4;
#pragma unroll 8
        for (int d = (int)threadIdx.x / 32; d < n_dk; d += BWD_WARPS) {
            if (c >= n_dv) break;
            const float4 v = *(const float4 *)&s.p[d * s.ld + c], to = *(const float4 *)&b.ds[d * n_dv + c];
            whole = __fmaf_rn(v.x, to.x, whole), whole = __fmaf_rn(v.y, to.y, whole);
            whole = __fmaf_rn(v.z, to.z, whole), whole = __fmaf_rn(v.w, to.w, whole);
        }
        whole = __fmul_rn(m.by[b.n - 1], whole);
    }
    whole = block_sum(whole, m.red);
    if (threadIdx.x == 0) m.whole = whole;
    __syncthreads();
}

/* The gradient of the state at the chunk's start, to where that is. A warp has 16 rows of it and STATE_COLS columns. */
template <bool ALL, typename T>
static __device__ void state_back(const delta_job<T> &j, bwd_memory<T> &m, const bwd_chunk &b, float *to) {
    const int warp = (int)threadIdx.x / 32, row = warp % DEEP * PART, end = (warp / DEEP + 1) * STATE_COLS, dv = (int)j.dv;
    if (row >= j.dk) return;
    for (int col = end - STATE_COLS; col < end && col < dv; col += COLS) {
        const tile_place<ALL> at = {row, col, dv};
        float acc[WIDE][4];
#pragma unroll
        for (int y = 0; y < WIDE; y++)
#pragma unroll
            for (int x = 0; x < 4; x += 2) {
                const int d = (row + tile_row(x)) * dv + col + 8 * y + tile_col(x);
                const float2 next = b.ds && at.has(y) ? *(const float2 *)&b.ds[d] : make_float2(0, 0);
                acc[y][x] = __fmul_rn(m.by[b.n - 1], next.x), acc[y][x + 1] = __fmul_rn(m.by[b.n - 1], next.y);
            }
        tiles_mm(
            acc, at, DELTA_C, [&](int d, int i) { return tf32_of(m.k[i][d]); },
            [&](int i, int c) { return -__fmul_rn(__fmul_rn(__fmul_rn(m.by[i], m.beta[i]), m.rk[i]), m.x[i][c]); });
        tiles_mm(
            acc, at, DELTA_C, [&](int d, int i) { return __fmul_rn(__fmul_rn(m.by[i], m.sq[i]), act_at(m.q[i], d)); },
            dout_as(j, m, b));
#pragma unroll
        for (int y = 0; y < WIDE; y++)
#pragma unroll
            for (int x = 0; x < 4; x += 2)
                if (at.has(y))
                    *(float2 *)&to[(row + tile_row(x)) * dv + col + 8 * y + tile_col(x)] = make_float2(acc[y][x], acc[y][x + 1]);
    }
}

/* What the warps that share a row have of it, in order. */
static __device__ __forceinline__ float warps_sum(const float (*part)[DELTA_C], int row) {
    float sum = part[0][row];
#pragma unroll
    for (int p = 1; p < ACROSS; p++) sum = __fadd_rn(sum, part[p][row]);
    return sum;
}
/* Sums of v over the lanes up to each, in a fixed order. */
static __device__ __forceinline__ float lanes_scan(float v) {
    const int lane = threadIdx.x & 31;
#pragma unroll
    for (int o = 1; o < 32; o <<= 1) {
        const float below = __shfl_up_sync(WARP_ALL, v, o);
        if (lane >= o) v = __fadd_rn(below, v);
    }
    return v;
}
/* From the parts of dg the gradients of a, a_log and dt_bias. By one warp: a lane has row `lane` and the one 32 later. */
template <typename T> static __device__ void gates_back(const delta_job<T> &j, bwd_memory<T> &m, const bwd_chunk &b) {
    const int lane = threadIdx.x;
    if (lane >= 32) return;
    const float a_log = act_at(j.a_log, b.value_head), decay = -expf(a_log);
    float start[2], after[2], sum = 0, da_log = 0, ddt_bias = 0;
#pragma unroll
    for (int h = 1; h >= 0; h--) { /* start: over the rows from each on */
        const int i = 31 - lane + 32 * h;
        const float v = lanes_scan(i < b.n ? __fadd_rn(warps_sum(m.start, i), warps_sum(m.keys, i)) : 0.0f);
        start[h] = __fadd_rn(sum, __shfl_sync(WARP_ALL, v, 31 - lane));
        sum = __fadd_rn(sum, __shfl_sync(WARP_ALL, v, 31));
    }
    sum = m.whole;
#pragma unroll
    for (int h = 0; h < 2; h++) { /* after: over the rows before each */
        const int i = lane + 32 * h;
        const float v = lanes_scan(i < b.n ? warps_sum(m.after, i) : 0.0f), before = __shfl_up_sync(WARP_ALL, v, 1);
        after[h] = lane ? __fadd_rn(sum, before) : sum;
        sum = __fadd_rn(sum, __shfl_sync(WARP_ALL, v, 31));
    }
#pragma unroll
    for (int h = 0; h < 2; h++) {
        const int i = lane + 32 * h;
        if (i >= b.n) continue;
        const float x = delta_input(j, b.t + i, b.value_head);
        float dg = __fadd_rn(start[h], after[h]);
        for (int w = 0; w < PARTS; w++) dg = __fadd_rn(dg, m.pairs[w][i]);
        const float da = __fmul_rn(__fmul_rn(dg, decay), delta_sigmoid(x));
        act_put(j.dba, (b.t + i) * j.ba_width + j.hv + b.value_head, da);
        da_log = __fmaf_rn(dg, delta_g(a_log, x), da_log);
        ddt_bias = __fadd_rn(ddt_bias, da);
    }
    da_log = lanes_sum(da_log, 32), ddt_bias = lanes_sum(ddt_bias, 32);
    if (lane == 0) m.da_log = __fadd_rn(m.da_log, da_log), m.ddt_bias = __fadd_rn(m.ddt_bias, ddt_bias);
}

/* Two neighbours of a row that begins at an even place. */
static __device__ __forceinline__ void put_two(float *to, float a, float b) { *(float2 *)to = make_float2(a, b); }
static __device__ __forceinline__ void put_two(bf16 *to, float a, float b) { *(uint32_t *)to = pack_bf16(a, b); }
/* The warp's part of dk, or of dq (dy), through the norm: dx = r by (dy - n (n.dy)), n = x r. part: free. Collective. */
template <bool ALL, typename T>
static __device__ void norm_back(const delta_job<T> &j, const bwd_memory<T> &m, float (*part)[DELTA_C], const bwd_chunk &b,
                                 const float (&dy)[WIDE][4], bool key) {
    const bwd_warp<ALL> w = warp_place<ALL>();
    const auto &x = key ? m.k : m.q;
    const float *const r = key ? m.rk : m.rq, *const by = key ? m.rk : m.sq; /* by: r by of the above */
    const int64_t head = (key ? j.hk : 0) + b.head;
    const auto normal = [&](int i, int d) { return __fmul_rn(act_at(x[i], d), r[i]); };
    tiles_row_sums(part[w.part], dy, w.head(j.dk), [&](int i, int d, float v) { return __fmul_rn(v, normal(i, d)); });
    __syncthreads();
#pragma unroll
    for (int h = 0; h < 4; h += 2) {
        const int i = w.row + tile_row(h);
        if (i >= b.n) continue;
        const float dot = warps_sum(part, i), scale = by[i];
        T *const to = j.dqkv + (b.t + i) * j.width + head * j.dk;
#pragma unroll
        for (int c = 0; c < WIDE; c++) {
            const int d = w.col + 8 * c + tile_col(0);
            if (d >= j.dk) continue;
            put_two(to + d, __fmul_rn(scale, __fmaf_rn(-normal(i, d), dot, dy[c][h])),
                    __fmul_rn(scale, __fmaf_rn(-normal(i, d + 1), dot, dy[c][h + 1])));
        }
    }
}

template <typename T, bool STAGED, bool ALL>
static __global__ void __launch_bounds__(BWD_THREADS) delta_bwd_kernel(const delta_job<T> job) {
    delta_job<T> j = job;
    if (ALL) j.dk = j.dv = DEV_DELTA_DIM; /* numbers that the compiler knows */
    bwd_memory<T> &m = STAGED ? dynamic_shared<bwd_memory_staged<T>>().m : dynamic_shared<bwd_memory<T>>();
    float *const stage = STAGED ? dynamic_shared<bwd_memory_staged<T>>().s[0] : NULL;
    const delta_seq s = delta_seq_at(j, blockIdx.y);
    const int64_t head = blockIdx.x, chunks = (s.n + DELTA_C - 1) / DELTA_C;
    for (int64_t n = head * j.group; n < (head + 1) * j.group && threadIdx.x == 0; n++)
        j.sums[blockIdx.y * 2 * j.hv + n] = j.sums[(blockIdx.y * 2 + 1) * j.hv + n] = 0;
    for (int64_t chunk = chunks - 1; chunk >= 0; chunk--) {
        bwd_chunk b = {s.row0 + chunk * DELTA_C, chunk, head, 0, 0, NULL, NULL};
        b.n = s.n - chunk * DELTA_C < DELTA_C ? (int)(s.n - chunk * DELTA_C) : DELTA_C;
        float dq[WIDE][4], dk[WIDE][4], de[WIDE][4];
        tiles_zero(dq), tiles_zero(dk);
        for (int64_t n = head * j.group; n < (head + 1) * j.group; n++) {
            float *const state = j.states + ((s.entry + chunk) * j.hv + n) * j.dk * j.dv;
            float *const da_log = j.sums + blockIdx.y * 2 * j.hv + n, *const ddt_bias = da_log + j.hv;
            b.value_head = n;
            b.s = chunk ? state : NULL;
            b.ds = chunk + 1 < chunks ? state + j.hv * j.dk * j.dv : NULL;
            __syncthreads(); /* all of the head before, or of the chunk after, has been read */
            begin_values(j, m, b);
            if (n == head * j.group) load_heads(j, m, b);
            if (threadIdx.x == 0) m.da_log = *da_log, m.ddt_bias = *ddt_bias;
            load_values(j, m, b);
            from_next<ALL, STAGED>(j, m, stage, b, de, dk);
            solve<ALL, STAGED>(j, m, stage, b, de);
            heads_back<ALL, STAGED>(j, m, stage, b, dq, dk);
            if (chunk) state_back<ALL>(j, m, b, state);
            gates_back(j, m, b);
            if (threadIdx.x == 0) *da_log = m.da_log, *ddt_bias = m.ddt_bias;
        }
        __syncthreads();
        norm_back<ALL>(j, m, m.start, b, dq, false);
        norm_back<ALL>(j, m, m.after, b, dk, true);
    }
}

/* The sequences' sums in order, added to the gradients. */
static __global__ void delta_sums_kernel(float *da_log, float *ddt_bias, const float *sums, int64_t n, int64_t hv) {
    const int64_t i = (int64_t)blockIdx.x * blockDim.x + threadIdx.x;
    if (i >= 2 * hv) return;
    float sum = sums[i];
    for (int64_t s = 1; s < n; s++) sum = __fadd_rn(sum, sums[s * 2 * hv + i]);
    float *const to = i < hv ? da_log + i : ddt_bias + i - hv;
    *to = __fadd_rn(*to, sum);
}

template <typename T> static int backward_any(struct cuda *c, const struct delta_args *a, const struct delta_bwd_args *b) {
    delta_job<T> j = delta_job_of<T>(a);
    void *sums;
    if (a->seqs.n == 0) return 0;
    TRY(cuda_scratch(c, CUDA_SCRATCH_ROW, (size_t)(a->seqs.n * 2 * j.hv) * sizeof(float), &sums));
    j.dout = (const T *)b->dout.data, j.dqkv = (T *)b->dqkv.data, j.dba = (T *)b->dba.data + a->ba_at, j.sums = (float *)sums;
    const bool all = j.dk == DEV_DELTA_DIM && j.dv == DEV_DELTA_DIM, staged = all && sizeof(bwd_memory_staged<T>) <= c->smem_max;
    void (*const kernel)(delta_job<T>) = staged ? delta_bwd_kernel<T, true, true>
                                         : all  ? delta_bwd_kernel<T, false, true>
                                                : delta_bwd_kernel<T, false, false>;
    const size_t bytes = staged ? sizeof(bwd_memory_staged<T>) : sizeof(bwd_memory<T>);
    TRY(delta_shared(c, (const void *)kernel, bytes, a));
    CU_TRY(cuda_launch_plain(c, kernel, dim3((unsigned)j.hk, (unsigned)a->seqs.n), BWD_THREADS, bytes, j));
    CU_TRY(cuda_launch_plain(c, delta_sums_kernel, dim3((unsigned)ceil_div(2 * j.hv, 128)), 128, 0, (float *)b->da_log.data,
                             (float *)b->ddt_bias.data, (const float *)j.sums, a->seqs.n, j.hv));
    return 0;
}

int cuda_delta_bwd(struct dev *d, const struct delta_args *a, const struct delta_bwd_args *b) {
    return a->qkv.dt == DT_BF16 ? backward_any<bf16>(cuda_of(d), a, b) : backward_any<float>(cuda_of(d), a, b);
}
