/* delta_rule_fwd.cu - the gated delta rule over packed sequences, from the start or from a state.
 *
 * Two kernels compute rows: `rows` takes a block of value columns of a value head of a sequence through its chunks (columns
 * of S never meet), `step` one new row of each sequence, reading S without writing it: decoding steps, and the rows of a step with
 * drafts one after the other.  Sequences with more rows leave their open chunk's keys and G by a third kernel, when nobody
 * reads the old ones any more.
 *
 * The order of every sum, alike in both: k.k, q.k, S^T k, S^T q over the head's elements, ascending; the sums over j ascending;
 * each one chain of fused multiply-adds.  So a row's bits do not depend on what computes it. */
#include "device/cuda/delta_net/delta_rule.cuh"

typedef __nv_bfloat16 bf16;

enum {
    LD = DEV_DELTA_DIM + 4, /* floats between rows of heads in shared memory: chunks of 4 in different banks */
    PART = 16,              /* rows of a chunk whose e are made at a time */
    PARTS = DELTA_C / PART,
    TILE = 4,     /* a thread has TILE rows, one of each part, and TILE columns next to each other */
    FEW_ROWS = 9, /* of a sequence: as many steps are quicker than a chunk's products */
};

/* The kernel of rows, for CB value columns. */
template <int CB> struct rows_of {
    enum { THREADS = DELTA_C / TILE * CB / TILE, WARPS = THREADS / 32, COL_LANES = CB / TILE < 8 ? CB / TILE : 8 };
    struct memory {
        float k[DELTA_C][LD], q[DELTA_C][LD];           /* q: in the end the keys times `left` */
        float a[DELTA_C][DELTA_C], p[DELTA_C][DELTA_C]; /* decayed k.k and q.k */
        float s[DEV_DELTA_DIM][CB], e[DELTA_C][CB];
        float u[PART][CB], sum[PART][CB];                            /* of one part */
        float beta[DELTA_C], g[DELTA_C], by[DELTA_C], left[DELTA_C]; /* by: exp(G_i); left: exp(G_last - G_j) */
    };
};

/* G of rows [n0, n1), of whose g (in m.g) one thread makes the sums. */
static __device__ __forceinline__ void running_sum(float *g, int n0, int n1, float before) {
    for (int i = n0; i < n1; i++) {
        before = i ? __fadd_rn(before, g[i]) : g[i];
        g[i] = before;
    }
}

/* Rows [n0, n1) of a chunk, the first in row t of the batch. open: those before are in the state. */
struct chunk_rows {
    int64_t t;
    int n0, n1;
    bool open;
};
/* Keys, queries and gates of value head n in them, and where they are open of the rows before. */
template <typename T, int CB>
static __device__ void load_chunk(const delta_job<T> &j, typename rows_of<CB>::memory &m, const delta_seq &s, int64_t n,
                                  const chunk_rows &x) {
    enum { THREADS = rows_of<CB>::THREADS, WARPS = rows_of<CB>::WARPS };
    const int n0 = x.n0, n1 = x.n1, warp = threadIdx.x / 32;
    const int64_t t = x.t, head = n / j.group;
    for (int i = warp; i < n1; i += WARPS) {
        if (i >= n0) {
            const T *row = j.qkv + (t + i - n0) * j.width;
            warp_l2(m.q[i], 1, row + head * j.dk, j.dk, delta_q_scale(j.dk));
            warp_l2(m.k[i], 1, row + (j.hk + head) * j.dk, j.dk, 1.0f);
        } else if (x.open) {
            for (int64_t d = threadIdx.x & 31; d < j.dk; d += 32)
                m.k[i][d] = j.k[((s.slot * j.hk + head) * j.dk + d) * DELTA_C + i];
        }
    }
    for (int i = threadIdx.x; i < n1; i += THREADS) {
        if (i >= n0) {
            m.beta[i] = delta_beta(j, t + i - n0, n);
            m.g[i] = delta_g(act_at(j.a_log, n), delta_input(j, t + i - n0, n));
        } else if (x.open) {
            m.g[i] = j.g[(s.slot * j.hv + n) * DELTA_C + i];
        }
    }
    __syncthreads();
    if (threadIdx.x == 0) running_sum(m.g, n0, n1, n0 ? m.g[n0 - 1] : 0.0f);
    __syncthreads();
    for (int i = threadIdx.x; i < n1; i += THREADS) {
        m.by[i] = decay_exp(m.g[i]);
        m.left[i] = decay_exp(__fsub_rn(m.g[n1 - 1], m.g[i]));
    }
}

static __device__ __forceinline__ float dot4(float4 a, float4 b, float sum) {
    return __fmaf_rn(a.w, b.w, __fmaf_rn(a.z, b.z, __fmaf_rn(a.y, b.y, __fmaf_rn(a.x, b.x, sum))));
}

/* a, p of rows [n0, n1). A thread has up to 4 rows and 4 columns at a time, with strides. */
template <int CB> static __device__ void chunk_dots(typename rows_of<CB>::memory &m, int n0, int n1, int64_t dk) {
    enum { STRIDE = rows_of<CB>::THREADS / 16, ALL = DELTA_C / STRIDE, ROWS = ALL < 4 ? ALL : 4 };
    const int ti = threadIdx.x / 16, tj = threadIdx.x % 16;
    for (int i0 = ti; i0 < DELTA_C; i0 += ROWS * STRIDE) {
        float kk[ROWS][4] = {}, qk[ROWS][4] = {};
        for (int64_t d = 0; d < dk; d += 4) {
            float4 col[4];
#pragma unroll
            for (int y = 0; y < 4; y++) col[y] = *(const float4 *)&m.k[tj + 16 * y][d];
#pragma unroll
            for (int x = 0; x < ROWS; x++) {
                const float4 a = *(const float4 *)&m.k[i0 + STRIDE * x][d], b = *(const float4 *)&m.q[i0 + STRIDE * x][d];
#pragma unroll
                for (int y = 0; y < 4; y++) kk[x][y] = dot4(a, col[y], kk[x][y]), qk[x][y] = dot4(b, col[y], qk[x][y]);
            }
        }
#pragma unroll
        for (int x = 0; x < ROWS; x++)
#pragma unroll
            for (int y = 0; y < 4; y++) {
                const int i = i0 + STRIDE * x, c = tj + 16 * y;
                if (i < n0 || i >= n1 || c > i) continue;
                const float d = decay_exp(__fsub_rn(m.g[i], m.g[c]));
                m.a[i][c] = __fmul_rn(kk[x][y], d);
                m.p[i][c] = __fmul_rn(qk[x][y], d);
            }
    }
}

/* e of the rows of a part in one column, from u and the sums over the rows of parts before. Rows before n0 have theirs. */
template <int CB> static __device__ void part_e(typename rows_of<CB>::memory &m, int part, int n0, int c) {
    float sum[PART];
#pragma unroll
    for (int r = 0; r < PART; r++) sum[r] = m.sum[r][c];
#pragma unroll
    for (int y = 0; y < PART; y++) {
        const int i = part * PART + y;
        if (i >= n0) m.e[i][c] = __fmul_rn(m.beta[i], __fsub_rn(m.u[y][c], sum[y]));
        const float e = m.e[i][c];
#pragma unroll
        for (int r = y + 1; r < PART; r++) sum[r] = __fmaf_rn(m.a[part * PART + r][i], e, sum[r]);
    }
}
static __device__ __forceinline__ void fma4(float sum[TILE], float w, float4 e) {
    sum[0] = __fmaf_rn(w, e.x, sum[0]), sum[1] = __fmaf_rn(w, e.y, sum[1]);
    sum[2] = __fmaf_rn(w, e.z, sum[2]), sum[3] = __fmaf_rn(w, e.w, sum[3]);
}

template <typename T, int CB>
static __global__ void __launch_bounds__(rows_of<CB>::THREADS) delta_rows_kernel(const delta_job<T> j) {
    enum { THREADS = rows_of<CB>::THREADS, CL = rows_of<CB>::COL_LANES, DEPTH = DEV_DELTA_DIM / PART };
    typename rows_of<CB>::memory &m = dynamic_shared<typename rows_of<CB>::memory>();
    const delta_seq s = delta_seq_at(j, blockIdx.z);
    const int64_t n = blockIdx.y, c0 = (int64_t)blockIdx.x * CB;
    /* lanes: CL column tiles by 32 / CL rows; warps: first over columns */
    const int lane = threadIdx.x & 31, warp = threadIdx.x / 32, across = CB / TILE / CL;
    const int c = (warp % across * CL + lane % CL) * TILE, row = warp / across * (32 / CL) + lane / CL;
    float *const slot_s = s.slot >= 0 ? j.s + (s.slot * j.hv + n) * j.dk * j.dv + c0 + c : NULL;
    float *const slot_e = s.slot >= 0 ? j.e + (s.slot * j.hv + n) * DELTA_C * j.dv + c0 + c : NULL;
    if (slot_s && s.pos0 >= DELTA_C)
        for (int64_t d = row; d < j.dk; d += PART) *(float4 *)&m.s[d][c] = *(const float4 *)&slot_s[d * j.dv];
    for (int64_t r = 0; r < s.n;) {
        const int64_t chunk = (s.pos0 + r) / DELTA_C, t = s.row0 + r;
        const int n0 = (int)((s.pos0 + r) % DELTA_C), n1 = s.n - r < DELTA_C - n0 ? n0 + (int)(s.n - r) : DELTA_C;
        __syncthreads();
        load_chunk<T, CB>(j, m, s, n, {t, n0, n1, r == 0});
        for (int i = row; i < n0; i += PART) *(float4 *)&m.e[i][c] = *(const float4 *)&slot_e[i * j.dv];
        __syncthreads();
        chunk_dots<CB>(m, n0, n1, j.dk);
        float u[PARTS][TILE] = {}, o[PARTS][TILE] = {}, sum[PARTS][TILE] = {};
        if (chunk > 0)
            for (int64_t d = 0; d < j.dk; d += 4) {
                float4 st[4];
#pragma unroll
                for (int y = 0; y < 4; y++) st[y] = *(const float4 *)&m.s[d + y][c];
#pragma unroll
                for (int x = 0; x < PARTS; x++) {
                    const float4 a = *(const float4 *)&m.k[row + PART * x][d], b = *(const float4 *)&m.q[row + PART * x][d];
                    fma4(u[x], a.x, st[0]), fma4(u[x], a.y, st[1]), fma4(u[x], a.z, st[2]), fma4(u[x], a.w, st[3]);
                    fma4(o[x], b.x, st[0]), fma4(o[x], b.y, st[1]), fma4(o[x], b.z, st[2]), fma4(o[x], b.w, st[3]);
                }
            }
#pragma unroll
        for (int x = 0; x < PARTS; x++) {
            const int i = row + PART * x;
            if (i < n0 || i >= n1) continue;
#pragma unroll
            for (int y = 0; y < TILE; y++) {
                const float v = act_at(j.qkv, (t + i - n0) * j.width + 2 * j.hk * j.dk + n * j.dv + c0 + c + y);
                u[x][y] = chunk > 0 ? __fmaf_rn(-m.by[i], u[x][y], v) : v;
                o[x][y] = chunk > 0 ? __fmul_rn(m.by[i], o[x][y]) : 0.0f;
            }
        }
#pragma unroll
        for (int part = 0; part < PARTS; part++) {
            if (part * PART >= n1) break;
#pragma unroll
            for (int y = 0; y < TILE; y++) m.u[row][c + y] = u[part][y], m.sum[row][c + y] = sum[part][y];
            __syncthreads();
            if (threadIdx.x < CB) part_e<CB>(m, part, n0, threadIdx.x);
            __syncthreads();
            for (int y = part * PART; y < (part + 1) * PART; y++) {
                const float4 e = *(const float4 *)&m.e[y][c];
                if (y <= row + part * PART) fma4(o[part], m.p[row + part * PART][y], e);
#pragma unroll
                for (int x = part + 1; x < PARTS; x++) {
                    fma4(sum[x], m.a[row + PART * x][y], e);
                    fma4(o[x], m.p[row + PART * x][y], e);
                }
            }
        }
#pragma unroll
        for (int x = 0; x < PARTS; x++) {
            const int i = row + PART * x;
            if (i < n0 || i >= n1) continue;
            const int64_t at = ((t + i - n0) * j.hv + n) * j.dv + c0 + c;
#pragma unroll
            for (int y = 0; y < TILE; y++) act_put(j.out, at + y, o[x][y]);
            if (j.kept) *(float4 *)&j.kept[at] = *(const float4 *)&m.e[i][c];
        }
        r += n1 - n0;
        if (n1 < DELTA_C) { /* the last one, open */
            for (int i = row; i < n1 && slot_e; i += PART)
                if (i >= n0) *(float4 *)&slot_e[i * j.dv] = *(const float4 *)&m.e[i][c];
            continue;
        }
        __syncthreads(); /* q has been read */
        for (int64_t i = threadIdx.x; i < DELTA_C * j.dk; i += THREADS)
            m.q[i / j.dk][i % j.dk] = __fmul_rn(m.k[i / j.dk][i % j.dk], m.left[i / j.dk]);
        __syncthreads();
        float next[DEPTH][TILE];
#pragma unroll
        for (int x = 0; x < DEPTH; x++)
#pragma unroll
            for (int y = 0; y < TILE; y++)
                next[x][y] = chunk > 0 && row * DEPTH < j.dk ? __fmul_rn(m.by[DELTA_C - 1], m.s[row * DEPTH + x][c + y]) : 0.0f;
        if (row * DEPTH >= j.dk) continue;
        for (int y = 0; y < DELTA_C; y++) {
            const float4 e = *(const float4 *)&m.e[y][c], lo = *(const float4 *)&m.q[y][row * DEPTH],
                         hi = *(const float4 *)&m.q[y][row * DEPTH + 4];
            fma4(next[0], lo.x, e), fma4(next[1], lo.y, e), fma4(next[2], lo.z, e), fma4(next[3], lo.w, e);
            fma4(next[4], hi.x, e), fma4(next[5], hi.y, e), fma4(next[6], hi.z, e), fma4(next[7], hi.w, e);
        }
#pragma unroll
        for (int x = 0; x < DEPTH; x++) {
            const int64_t d = row * DEPTH + x;
            const float4 v = make_float4(next[x][0], next[x][1], next[x][2], next[x][3]);
            *(float4 *)&m.s[d][c] = v;
            if (slot_s) *(float4 *)&slot_s[d * j.dv] = v;
            if (j.states && r < s.n) *(float4 *)&j.states[(((s.entry + chunk + 1) * j.hv + n) * j.dk + d) * j.dv + c0 + c] = v;
        }
    }
}

/* Keys and G of the open chunk that a sequence ends in, to its slot. A block: a key head of a sequence. */
template <typename T> static __global__ void __launch_bounds__(DELTA_THREADS) delta_open_kernel(const delta_job<T> j) {
    __shared__ float g[DELTA_C];
    const delta_seq s = delta_seq_at(j, blockIdx.y);
    const int64_t head = blockIdx.x, end = s.pos0 + s.n, chunk = end / DELTA_C * DELTA_C;
    const int n0 = (int)(s.pos0 > chunk ? s.pos0 - chunk : 0), n1 = (int)(end - chunk);
    const int64_t t = s.row0 + s.n - (n1 - n0); /* the row of n0 */
    if (s.n == 0) return;
    float *const keys = j.k + (s.slot * j.hk + head) * j.dk * DELTA_C;
    for (int i = n0 + threadIdx.x / 32; i < n1; i += DELTA_WARPS)
        warp_l2(keys + i, DELTA_C, j.qkv + (t + i - n0) * j.width + (j.hk + head) * j.dk, j.dk, 1.0f);
    for (int64_t n = head * j.group; n < (head + 1) * j.group; n++) {
        float *const slot_g = j.g + (s.slot * j.hv + n) * DELTA_C;
        for (int i = n0 + threadIdx.x; i < n1; i += DELTA_THREADS)
            g[i] = delta_g(act_at(j.a_log, n), delta_input(j, t + i - n0, n));
        __syncthreads();
        if (threadIdx.x == 0) running_sum(g, n0, n1, n0 ? slot_g[n0 - 1] : 0.0f);
        __syncthreads();
        for (int i = n0 + threadIdx.x; i < n1; i += DELTA_THREADS) slot_g[i] = g[i];
        __syncthreads();
    }
}

/* Row `row` of those that a sequence has in the batch, or none: a block has a value head, 2 dv threads. */
template <typename T> static __global__ void __launch_bounds__(2 * DEV_DELTA_DIM) delta_step_kernel(const delta_job<T> j, int row) {
    __shared__ float k[DEV_DELTA_DIM], q[DEV_DELTA_DIM], a[DELTA_C], p[DELTA_C], g[DELTA_C], us[DEV_DELTA_DIM], es[DEV_DELTA_DIM];
    __shared__ float beta, added;
    const delta_seq s = delta_seq_at(j, blockIdx.y);
    if (row >= s.n) return;
    const int64_t n = blockIdx.x, head = n / j.group, t = s.row0 + row, pos = s.pos0 + row;
    const int i = (int)(pos % DELTA_C), threads = (int)blockDim.x, c = (int)(threadIdx.x % j.dv);
    const bool first = pos < DELTA_C, is_q = threadIdx.x >= j.dv;
    float *const st = j.s + (s.slot * j.hv + n) * j.dk * j.dv, *const keys = j.k + (s.slot * j.hk + head) * j.dk * DELTA_C;
    float *const slot_e = j.e + (s.slot * j.hv + n) * DELTA_C * j.dv, *const slot_g = j.g + (s.slot * j.hv + n) * DELTA_C;
    for (int w = threadIdx.x / 32; w < 2; w += threads / 32) {
        const T *x = j.qkv + t * j.width + ((w ? j.hk : 0) + head) * j.dk;
        warp_l2(w ? k : q, 1, x, j.dk, w ? 1.0f : delta_q_scale(j.dk));
    }
    for (int x = threadIdx.x; x < i; x += threads) g[x] = slot_g[x];
    if (threadIdx.x == 0) {
        beta = delta_beta(j, t, n);
        added = delta_g(act_at(j.a_log, n), delta_input(j, t, n));
    }
    __syncthreads();
    if (threadIdx.x == 0) g[i] = i ? __fadd_rn(g[i - 1], added) : added;
    __syncthreads();
    for (int x = threadIdx.x; x < 2 * DELTA_C; x += threads) { /* half of them k.k, half q.k */
        const int y = x % DELTA_C;
        const float *const mine = x < DELTA_C ? k : q;
        float sum = 0;
        if (y > i) continue;
#pragma unroll 8
        for (int64_t d = 0; d < j.dk; d++) sum = __fmaf_rn(mine[d], y < i ? keys[d * DELTA_C + y] : k[d], sum);
        (x < DELTA_C ? a : p)[y] = __fmul_rn(sum, decay_exp(__fsub_rn(g[i], g[y])));
    }
    float u = 0; /* S^T k, S^T q */
    if (!first)
#pragma unroll 16
        for (int64_t d = 0; d < j.dk; d++) u = __fmaf_rn(is_q ? q[d] : k[d], st[d * j.dv + c], u);
    const float by = decay_exp(g[i]), v = act_at(j.qkv, t * j.width + 2 * j.hk * j.dk + n * j.dv + c);
    __syncthreads();
    float sum = 0, o = first ? 0.0f : __fmul_rn(by, u);
#pragma unroll 4
    for (int y = 0; y < i; y++) {
        const float e = slot_e[y * j.dv + c];
        if (is_q) o = __fmaf_rn(p[y], e, o);
        else sum = __fmaf_rn(a[y], e, sum);
    }
    if (!is_q) es[c] = __fmul_rn(beta, __fsub_rn(first ? v : __fmaf_rn(-by, u, v), sum));
    __syncthreads();
    if (is_q) act_put(j.out, (t * j.hv + n) * j.dv + c, __fmaf_rn(p[i], es[c], o));
    else slot_e[i * j.dv + c] = es[c];
    if (n % j.group == 0)
        for (int64_t d = threadIdx.x; d < j.dk; d += threads) keys[d * DELTA_C + i] = k[d];
    if (threadIdx.x == 0) slot_g[i] = g[i];
    if (i < DELTA_C - 1) return;
    const float last = decay_exp(g[i]);
    for (int x = threadIdx.x; x < DELTA_C; x += threads) us[x] = decay_exp(__fsub_rn(g[i], g[x]));
    __syncthreads();
    for (int64_t d = is_q; d < j.dk; d += 2) {
        float next = first ? 0.0f : __fmul_rn(last, st[d * j.dv + c]);
        for (int y = 0; y < DELTA_C; y++) {
            const float key = y < i ? keys[d * DELTA_C + y] : k[d];
            next = __fmaf_rn(__fmul_rn(key, us[y]), y < i ? slot_e[y * j.dv + c] : es[c], next);
        }
        st[d * j.dv + c] = next;
    }
}

template <typename T, int CB> static int rows_any(struct cuda *c, const struct delta_args *a, const delta_job<T> &j) {
    typedef rows_of<CB> rows;
    const dim3 grid((unsigned)(j.dv / CB), (unsigned)j.hv, (unsigned)a->seqs.n);
    TRY(delta_shared(c, (const void *)delta_rows_kernel<T, CB>, sizeof(typename rows::memory), a));
    CU_TRY(cuda_launch_plain(c, delta_rows_kernel<T, CB>, grid, rows::THREADS, sizeof(typename rows::memory), j));
    return 0;
}
/* The most columns a block that leave no multiprocessor without one: k.k and q.k are made by each block. */
template <typename T> static int rows_by_width(struct cuda *c, const struct delta_args *a, const delta_job<T> &j) {
    const auto fits = [&](int64_t cols, size_t bytes) {
        return j.dv % cols == 0 && j.hv * a->seqs.n * (j.dv / cols) >= c->n_sm && bytes <= c->smem_max;
    };
    if (fits(128, sizeof(rows_of<128>::memory))) return rows_any<T, 128>(c, a, j);
    if (fits(64, sizeof(rows_of<64>::memory))) return rows_any<T, 64>(c, a, j);
    return j.dv % 32 == 0 ? rows_any<T, 32>(c, a, j) : rows_any<T, 16>(c, a, j);
}
template <typename T> static int forward_any(struct cuda *c, const struct delta_args *a) {
    const delta_job<T> j = delta_job_of<T>(a);
    if (a->seqs.n == 0) return 0;
    if (j.s && a->seqs.max_rows <= FEW_ROWS) {
        const dim3 grid((unsigned)j.hv, (unsigned)a->seqs.n);
        for (int row = 0; row < (int)a->seqs.max_rows; row++)
            CU_TRY(cuda_launch_plain(c, delta_step_kernel<T>, grid, (int)(2 * j.dv), 0, j, row));
        return 0;
    }
    TRY(rows_by_width<T>(c, a, j));
    if (j.s) CU_TRY(cuda_launch_plain(c, delta_open_kernel<T>, dim3((unsigned)j.hk, (unsigned)a->seqs.n), DELTA_THREADS, 0, j));
    return 0;
}

int cuda_delta_fwd(struct dev *d, const struct delta_args *a) {
    return a->qkv.dt == DT_BF16 ? forward_any<bf16>(cuda_of(d), a) : forward_any<float>(cuda_of(d), a);
}
