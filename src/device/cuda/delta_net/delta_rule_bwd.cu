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
 * Invariant: a warp has whole rows of every product, and each sum one order. */
#include "device/cuda/delta_net/delta_rule.cuh"

typedef __nv_bfloat16 bf16;

enum {
    ROWS = DELTA_C / DELTA_WARPS, /* of a warp */
    COLS = DEV_DELTA_DIM / 32,    /* of a lane, with a stride of 32 */
    LD = DEV_DELTA_DIM + 1,       /* floats between rows of heads in shared memory, */
    LDX = DELTA_C + 1,            /* and between rows of squares: neighbours are in different banks */
};

struct bwd_memory {
    float k[DELTA_C][LD], q[DELTA_C][LD], e[DELTA_C][LD], x[DELTA_C][LD], square[DELTA_C][LDX];
    float beta[DELTA_C], g[DELTA_C], by[DELTA_C], left[DELTA_C], rk[DELTA_C], rq[DELTA_C];
    float start[DELTA_C], after[DELTA_C], pairs[DELTA_WARPS][DELTA_C], whole; /* the parts of dg */
    float red[32], da_log, ddt_bias;
};

/* acc[r][c] += sum over i in [0, n) of a(row, i) b(i, column), rows of the warp, columns of the lane below `cols`. */
template <class A, class B>
static __device__ __forceinline__ void warp_mm(float acc[ROWS][COLS], int64_t n, int64_t cols, const A &a, const B &b) {
    const int row = (int)threadIdx.x / 32 * ROWS, lane = threadIdx.x & 31;
    for (int64_t i = 0; i < n; i++) {
        float y[COLS];
#pragma unroll
        for (int c = 0; c < COLS; c++) y[c] = lane + 32 * c < cols ? b(i, lane + 32 * c) : 0.0f;
#pragma unroll
        for (int r = 0; r < ROWS; r++) {
            const float w = a(row + r, i);
#pragma unroll
            for (int c = 0; c < COLS; c++) acc[r][c] = __fmaf_rn(w, y[c], acc[r][c]);
        }
    }
}
static __device__ __forceinline__ void zero(float acc[ROWS][COLS]) {
#pragma unroll
    for (int r = 0; r < ROWS; r++)
#pragma unroll
        for (int c = 0; c < COLS; c++) acc[r][c] = 0;
}
static __device__ __forceinline__ void add_to(float to[ROWS][COLS], const float acc[ROWS][COLS]) {
#pragma unroll
    for (int r = 0; r < ROWS; r++)
#pragma unroll
        for (int c = 0; c < COLS; c++) to[r][c] = __fadd_rn(to[r][c], acc[r][c]);
}
/* Row r of acc times row `with`, over all columns; every lane gets it. */
static __device__ __forceinline__ float row_dot(const float acc[COLS], const float *with, int64_t cols) {
    const int lane = threadIdx.x & 31;
    float sum = 0;
#pragma unroll
    for (int c = 0; c < COLS; c++)
        if (lane + 32 * c < cols) sum = __fmaf_rn(acc[c], with[lane + 32 * c], sum);
    return lanes_sum(sum, 32);
}

/* Chunk `chunk` of a sequence: rows of the batch [t, t + n). */
struct bwd_chunk {
    int64_t t, chunk, head, value_head;
    int n;
    const float *s, *ds; /* NULL: zeros */
};

/* Rows of a chunk, sizes of heads. */
struct bwd_size {
    int n;
    int64_t dk, dv;
};

/* square = dots of rows of `of` with keys, decayed; 0 from the diagonal on (strict) or behind it. */
static __device__ void dots(bwd_memory &m, const float (*of)[LD], int n, int64_t dk, bool strict) {
    const int row = (int)threadIdx.x / 32 * ROWS, lane = threadIdx.x & 31;
#pragma unroll
    for (int c = 0; c < DELTA_C; c += 32) {
        float sum[ROWS] = {};
        for (int64_t d = 0; d < dk; d++) {
            const float key = m.k[lane + c][d];
#pragma unroll
            for (int r = 0; r < ROWS; r++) sum[r] = __fmaf_rn(of[row + r][d], key, sum[r]);
        }
#pragma unroll
        for (int r = 0; r < ROWS; r++) {
            const int i = row + r, j = lane + c;
            const bool on = i < n && (strict ? j < i : j <= i);
            m.square[i][j] = on ? __fmul_rn(sum[r], decay_exp(__fsub_rn(m.g[i], m.g[j]))) : 0.0f;
        }
    }
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
/* square = a(i, c) . e_j decayed, likewise; pairs[x] += the sum over the warp's rows i and j < t <= i of that times row i of `of`
 * . k_j, t = lane + 32 x. */
template <class A>
static __device__ void value_dots(bwd_memory &m, const bwd_size &z, bool strict, const A &a, const float (*of)[LD],
                                  float pairs[2]) {
    const int row = (int)threadIdx.x / 32 * ROWS, lane = threadIdx.x & 31;
    float w[ROWS][2];
#pragma unroll
    for (int x = 0; x < 2; x++) {
        const int j = lane + 32 * x;
        float sum[ROWS] = {}, dot[ROWS] = {};
        for (int64_t d = 0; d < z.dv; d++) {
            const float e = m.e[j][d];
#pragma unroll
            for (int r = 0; r < ROWS; r++) sum[r] = __fmaf_rn(a(row + r, d), e, sum[r]);
        }
        for (int64_t d = 0; d < z.dk; d++) {
            const float key = m.k[j][d];
#pragma unroll
            for (int r = 0; r < ROWS; r++) dot[r] = __fmaf_rn(of[row + r][d], key, dot[r]);
        }
#pragma unroll
        for (int r = 0; r < ROWS; r++) {
            const int i = row + r;
            const bool on = i < z.n && (strict ? j < i : j <= i);
            const float y = on ? __fmul_rn(sum[r], decay_exp(__fsub_rn(m.g[i], m.g[j]))) : 0.0f;
            m.square[i][j] = y;
            w[r][x] = on && j < i ? __fmul_rn(y, dot[r]) : 0.0f;
        }
    }
#pragma unroll
    for (int r = 0; r < ROWS; r++) {
        const float low = lanes_scan(w[r][0]), all = __shfl_sync(WARP_ALL, low, 31), high = __fadd_rn(all, lanes_scan(w[r][1]));
        const float before_low = __shfl_up_sync(WARP_ALL, low, 1), before_high = __shfl_up_sync(WARP_ALL, high, 1);
        if (lane && lane <= row + r) pairs[0] = __fadd_rn(pairs[0], before_low);
        if (lane + 32 <= row + r) pairs[1] = __fadd_rn(pairs[1], lane ? before_high : all);
    }
}

template <typename T> static __device__ void load_heads(const delta_job<T> &j, bwd_memory &m, const bwd_chunk &b) {
    const int lane = threadIdx.x & 31;
    for (int i = threadIdx.x / 32; i < DELTA_C; i += DELTA_WARPS) {
        const T *row = j.qkv + (b.t + i) * j.width;
        if (i < b.n) {
            const float rq = warp_l2(m.q[i], 1, row + b.head * j.dk, j.dk, delta_q_scale(j.dk));
            const float rk = warp_l2(m.k[i], 1, row + (j.hk + b.head) * j.dk, j.dk, 1.0f);
            if (lane == 0) m.rq[i] = rq, m.rk[i] = rk;
        } else {
            for (int64_t d = lane; d < j.dk; d += 32) m.q[i][d] = m.k[i][d] = 0;
        }
    }
}
template <typename T> static __device__ void load_values(const delta_job<T> &j, bwd_memory &m, const bwd_chunk &b) {
    const int lane = threadIdx.x & 31;
    for (int i = threadIdx.x / 32; i < DELTA_C; i += DELTA_WARPS)
        for (int64_t c = lane; c < j.dv; c += 32) m.e[i][c] = i < b.n ? j.kept[((b.t + i) * j.hv + b.value_head) * j.dv + c] : 0.0f;
    for (int i = threadIdx.x; i < DELTA_C; i += DELTA_THREADS) {
        m.beta[i] = i < b.n ? delta_beta(j, b.t + i, b.value_head) : 0.0f;
        m.g[i] = i < b.n ? delta_g(act_at(j.a_log, b.value_head), delta_input(j, b.t + i, b.value_head)) : 0.0f;
    }
    __syncthreads();
    if (threadIdx.x == 0)
        for (int i = 1; i < b.n; i++) m.g[i] = __fadd_rn(m.g[i - 1], m.g[i]);
    __syncthreads();
    for (int i = threadIdx.x; i < DELTA_C; i += DELTA_THREADS) {
        m.by[i] = i < b.n ? decay_exp(m.g[i]) : 0.0f;
        m.left[i] = i < b.n ? decay_exp(__fsub_rn(m.g[b.n - 1], m.g[i])) : 0.0f;
    }
    __syncthreads();
}

/* x of all rows, to m.x; and the gradients of beta and v. */
template <typename T> static __device__ void solve(const delta_job<T> &j, bwd_memory &m, const bwd_chunk &b) {
    const int row = (int)threadIdx.x / 32 * ROWS, lane = threadIdx.x & 31;
    const T *dout = j.dout + (b.t * j.hv + b.value_head) * j.dv;
    const int64_t step = j.hv * j.dv;
    float acc[ROWS][COLS], sum[ROWS][COLS];
    zero(acc), zero(sum);
    if (b.ds)
        warp_mm(
            acc, j.dk, j.dv, [&](int r, int64_t d) { return m.k[r][d]; }, [&](int64_t d, int c) { return b.ds[d * j.dv + c]; });
#pragma unroll
    for (int r = 0; r < ROWS; r++)
#pragma unroll
        for (int c = 0; c < COLS; c++) acc[r][c] = __fmul_rn(m.left[row + r], acc[r][c]);
    dots(m, m.q, b.n, j.dk, false);
    __syncthreads();
    warp_mm(
        acc, b.n, j.dv, [&](int r, int64_t i) { return m.square[i][r]; },
        [&](int64_t i, int c) { return act_at(dout, i * step + c); });
    __syncthreads();
    dots(m, m.k, b.n, j.dk, true);
    __syncthreads();
    for (int y = b.n - 1; y >= 0; y--) { /* row y is whole; the rows before it take it */
#pragma unroll
        for (int r = 0; r < ROWS; r++)
            if (row + r == y)
#pragma unroll
                for (int c = 0; c < COLS; c++)
                    if (lane + 32 * c < j.dv) m.x[y][lane + 32 * c] = __fsub_rn(acc[r][c], sum[r][c]);
        __syncthreads();
        const float beta = m.beta[y];
#pragma unroll
        for (int c = 0; c < COLS; c++) {
            const float x = lane + 32 * c < j.dv ? __fmul_rn(beta, m.x[y][lane + 32 * c]) : 0.0f;
#pragma unroll
            for (int r = 0; r < ROWS; r++)
                if (row + r < y) sum[r][c] = __fmaf_rn(m.square[y][row + r], x, sum[r][c]);
        }
    }
    for (int i = b.n; i < DELTA_C; i++)
        for (int64_t c = threadIdx.x; c < j.dv; c += DELTA_THREADS) m.x[i][c] = 0;
    for (int i = row; i < row + ROWS && i < b.n; i++) {
        float dot = 0;
        for (int64_t c = lane; c < j.dv; c += 32) {
            dot = __fmaf_rn(m.x[i][c], m.e[i][c], dot);
            act_put(j.dqkv, (b.t + i) * j.width + 2 * j.hk * j.dk + b.value_head * j.dv + c, __fmul_rn(m.beta[i], m.x[i][c]));
        }
        dot = lanes_sum(dot, 32);
        if (lane == 0) act_put(j.dba, (b.t + i) * 2 * j.hv + b.value_head, __fmul_rn(dot, __fsub_rn(1.0f, m.beta[i])));
    }
    __syncthreads();
}

/* dq, dk += a value head's, and the parts of dg. */
template <typename T>
static __device__ void heads_back(const delta_job<T> &j, bwd_memory &m, const bwd_chunk &b, float dq[ROWS][COLS],
                                  float dk[ROWS][COLS]) {
    const int row = (int)threadIdx.x / 32 * ROWS, lane = threadIdx.x & 31;
    const T *dout = j.dout + (b.t * j.hv + b.value_head) * j.dv;
    const int64_t step = j.hv * j.dv;
    const bwd_size z = {b.n, j.dk, j.dv};
    const auto dout_at = [&](int r, int64_t c) { return r < b.n ? act_at(dout, r * step + c) : 0.0f; };
    const auto r_at = [&](int r, int64_t c) { return __fmul_rn(m.beta[r], m.x[r][c]); };
    const auto key = [&](int64_t i, int d) { return m.k[i][d]; };
    const auto state = [&](int64_t c, int d) { return b.s[d * j.dv + c]; };
    float acc[ROWS][COLS], start[ROWS], pairs[2] = {};
    zero(acc);
    if (b.s)
        warp_mm(
            acc, j.dv, j.dk, [&](int r, int64_t c) { return __fmul_rn(m.by[r], dout_at(r, c)); }, state);
#pragma unroll
    for (int r = 0; r < ROWS; r++) start[r] = row_dot(acc[r], m.q[row + r], j.dk);
    value_dots(m, z, false, dout_at, m.q, pairs);
    __syncthreads();
    warp_mm(
        acc, b.n, j.dk, [&](int r, int64_t i) { return m.square[r][i]; }, key);
    add_to(dq, acc);
    zero(acc);
    warp_mm(
        acc, b.n, j.dk, [&](int r, int64_t i) { return m.square[i][r]; }, [&](int64_t i, int d) { return m.q[i][d]; });
    add_to(dk, acc);
    __syncthreads();
    value_dots(
        m, z, true, [&](int r, int64_t c) { return -r_at(r, c); }, m.k, pairs);
    m.pairs[threadIdx.x / 32][lane] = pairs[0], m.pairs[threadIdx.x / 32][lane + 32] = pairs[1];
    __syncthreads();
    zero(acc);
    if (b.s)
        warp_mm(
            acc, j.dv, j.dk, [&](int r, int64_t c) { return -__fmul_rn(m.by[r], r_at(r, c)); }, state);
#pragma unroll
    for (int r = 0; r < ROWS; r++) {
        start[r] = __fadd_rn(start[r], row_dot(acc[r], m.k[row + r], j.dk));
        if (lane == 0) m.start[row + r] = start[r];
    }
    warp_mm(
        acc, b.n, j.dk, [&](int r, int64_t i) { return m.square[r][i]; }, key);
    warp_mm(
        acc, b.n, j.dk, [&](int r, int64_t i) { return m.square[i][r]; }, key);
    add_to(dk, acc);
    zero(acc);
    if (b.ds)
        warp_mm(
            acc, j.dv, j.dk, [&](int r, int64_t c) { return __fmul_rn(m.left[r], m.e[r][c]); },
            [&](int64_t c, int d) { return b.ds[d * j.dv + c]; });
#pragma unroll
    for (int r = 0; r < ROWS; r++) {
        const float after = row_dot(acc[r], m.k[row + r], j.dk);
        if (lane == 0) m.after[row + r] = after;
    }
    add_to(dk, acc);
    float whole = 0;
    for (int64_t i = threadIdx.x; i < j.dk * j.dv && b.s && b.ds; i += DELTA_THREADS)
        whole = __fmaf_rn(__fmul_rn(m.by[b.n - 1], b.s[i]), b.ds[i], whole);
    whole = block_sum(whole, m.red);
    if (threadIdx.x == 0) m.whole = whole;
    __syncthreads();
}

/* The gradient of the state at the chunk's start, to where that is. A warp has DEV_DELTA_DIM / DELTA_WARPS rows of it. */
template <typename T> static __device__ void state_back(const delta_job<T> &j, bwd_memory &m, const bwd_chunk &b, float *to) {
    const int lane = threadIdx.x & 31;
    const T *dout = j.dout + (b.t * j.hv + b.value_head) * j.dv;
    for (int64_t row = (int64_t)threadIdx.x / 32 * ROWS; row < j.dk; row += DELTA_WARPS * ROWS) {
        float acc[ROWS][COLS];
#pragma unroll
        for (int r = 0; r < ROWS; r++)
#pragma unroll
            for (int c = 0; c < COLS; c++)
                acc[r][c] = b.ds && lane + 32 * c < j.dv ? __fmul_rn(m.by[b.n - 1], b.ds[(row + r) * j.dv + lane + 32 * c]) : 0.0f;
        for (int i = 0; i < b.n; i++) {
            float x[COLS], o[COLS];
#pragma unroll
            for (int c = 0; c < COLS; c++) {
                const bool on = lane + 32 * c < j.dv;
                x[c] = on ? -__fmul_rn(m.by[i], __fmul_rn(m.beta[i], m.x[i][lane + 32 * c])) : 0.0f;
                o[c] = on ? __fmul_rn(m.by[i], act_at(dout, i * j.hv * j.dv + lane + 32 * c)) : 0.0f;
            }
#pragma unroll
            for (int r = 0; r < ROWS; r++) {
                const float k = m.k[i][row + r], q = m.q[i][row + r];
#pragma unroll
                for (int c = 0; c < COLS; c++) acc[r][c] = __fmaf_rn(q, o[c], __fmaf_rn(k, x[c], acc[r][c]));
            }
        }
#pragma unroll
        for (int r = 0; r < ROWS; r++)
#pragma unroll
            for (int c = 0; c < COLS; c++)
                if (lane + 32 * c < j.dv) to[(row + r) * j.dv + lane + 32 * c] = acc[r][c];
    }
}

/* From the parts of dg the gradients of a, a_log and dt_bias. */
template <typename T> static __device__ void gates_back(const delta_job<T> &j, bwd_memory &m, const bwd_chunk &b) {
    if (threadIdx.x) return;
    const float a_log = act_at(j.a_log, b.value_head), decay = -expf(a_log);
    float after = m.whole;
    for (int i = b.n - 2; i >= 0; i--) m.start[i] = __fadd_rn(m.start[i], m.start[i + 1]);
    for (int i = 0; i < b.n; i++) {
        const float x = delta_input(j, b.t + i, b.value_head);
        float dg = __fadd_rn(m.start[i], after);
        for (int w = 0; w < DELTA_WARPS; w++) dg = __fadd_rn(dg, m.pairs[w][i]);
        after = __fadd_rn(after, m.after[i]);
        const float da = __fmul_rn(__fmul_rn(dg, decay), delta_sigmoid(x));
        act_put(j.dba, (b.t + i) * 2 * j.hv + j.hv + b.value_head, da);
        m.da_log = __fmaf_rn(dg, delta_g(a_log, x), m.da_log);
        m.ddt_bias = __fadd_rn(m.ddt_bias, da);
    }
}

/* The warp's rows of dk, or of dq (dy), through the norm: dx = r by (dy - n (n.dy)), n = y / by. */
template <typename T>
static __device__ void norm_back(const delta_job<T> &j, const bwd_memory &m, const bwd_chunk &b, const float dy[ROWS][COLS],
                                 bool key) {
    const int row = (int)threadIdx.x / 32 * ROWS, lane = threadIdx.x & 31;
    const float(*const y)[LD] = key ? m.k : m.q, *const rn = key ? m.rk : m.rq;
    const float by = key ? 1.0f : delta_q_scale(j.dk), inv = __fdiv_rn(1.0f, by);
    const int64_t head = (key ? j.hk : 0) + b.head;
#pragma unroll
    for (int r = 0; r < ROWS; r++) {
        if (row + r >= b.n) continue;
        const float dot = __fmul_rn(row_dot(dy[r], y[row + r], j.dk), inv), scale = __fmul_rn(rn[row + r], by);
#pragma unroll
        for (int c = 0; c < COLS; c++) {
            const int d = lane + 32 * c;
            if (d >= j.dk) continue;
            const float n = __fmul_rn(y[row + r][d], inv);
            act_put(j.dqkv, (b.t + row + r) * j.width + head * j.dk + d, __fmul_rn(scale, __fmaf_rn(-n, dot, dy[r][c])));
        }
    }
}

template <typename T> static __global__ void __launch_bounds__(DELTA_THREADS) delta_bwd_kernel(const delta_job<T> j) {
    extern __shared__ float4 shared[];
    bwd_memory &m = *(bwd_memory *)shared;
    const delta_seq s = delta_seq_at(j, blockIdx.y);
    const int64_t head = blockIdx.x, chunks = (s.n + DELTA_C - 1) / DELTA_C;
    for (int64_t n = head * j.group; n < (head + 1) * j.group && threadIdx.x == 0; n++)
        j.sums[blockIdx.y * 2 * j.hv + n] = j.sums[(blockIdx.y * 2 + 1) * j.hv + n] = 0;
    for (int64_t chunk = chunks - 1; chunk >= 0; chunk--) {
        bwd_chunk b = {s.row0 + chunk * DELTA_C, chunk, head, 0, 0, NULL, NULL};
        b.n = s.n - chunk * DELTA_C < DELTA_C ? (int)(s.n - chunk * DELTA_C) : DELTA_C;
        float dq[ROWS][COLS], dk[ROWS][COLS];
        zero(dq), zero(dk);
        __syncthreads();
        load_heads(j, m, b);
        for (int64_t n = head * j.group; n < (head + 1) * j.group; n++) {
            float *const state = j.states + ((s.entry + chunk) * j.hv + n) * j.dk * j.dv;
            float *const da_log = j.sums + blockIdx.y * 2 * j.hv + n, *const ddt_bias = da_log + j.hv;
            b.value_head = n;
            b.s = chunk ? state : NULL;
            b.ds = chunk + 1 < chunks ? state + j.hv * j.dk * j.dv : NULL;
            __syncthreads();
            if (threadIdx.x == 0) m.da_log = *da_log, m.ddt_bias = *ddt_bias;
            load_values(j, m, b);
            solve(j, m, b);
            heads_back(j, m, b, dq, dk);
            if (chunk) state_back(j, m, b, state);
            gates_back(j, m, b);
            if (threadIdx.x == 0) *da_log = m.da_log, *ddt_bias = m.ddt_bias;
        }
        norm_back(j, m, b, dq, false);
        norm_back(j, m, b, dk, true);
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
    j.dout = (const T *)b->dout.data, j.dqkv = (T *)b->dqkv.data, j.dba = (T *)b->dba.data, j.sums = (float *)sums;
    TRY(delta_shared(c, (const void *)delta_bwd_kernel<T>, sizeof(bwd_memory), a));
    delta_bwd_kernel<T><<<dim3((unsigned)j.hk, (unsigned)a->seqs.n), DELTA_THREADS, sizeof(bwd_memory), c->stream>>>(j);
    CU_LAUNCHED();
    delta_sums_kernel<<<(unsigned)ceil_div(2 * j.hv, 128), 128, 0, c->stream>>>((float *)b->da_log.data, (float *)b->ddt_bias.data,
                                                                                j.sums, a->seqs.n, j.hv);
    CU_LAUNCHED();
    return 0;
}

int cuda_delta_bwd(struct dev *d, const struct delta_args *a, const struct delta_bwd_args *b) {
    return a->qkv.dt == DT_BF16 ? backward_any<bf16>(cuda_of(d), a, b) : backward_any<float>(cuda_of(d), a, b);
}
