/* delta_rule_fwd.cu - the gated delta rule over packed sequences, from the start or from a state.
 *
 * Two kernels compute rows: `rows` takes a block of value columns of a value head of a sequence through its chunks (columns
 * of S never meet), `step` one new row of each sequence (decode), reading S without writing it.  Sequences with more rows
 * leave their open chunk's keys and G by a third kernel, when nobody reads the old ones any more.
 *
 * The order of every sum, alike in both: k.k, q.k, S^T k, S^T q over the head's elements, ascending; the sums over j ascending;
 * each one chain of fused multiply-adds.  So a row's bits do not depend on what computes it. */
#include "device/cuda/delta_net/delta_rule.cuh"

typedef __nv_bfloat16 bf16;

enum { LD = DEV_DELTA_DIM + 4 }; /* floats between rows of heads in shared memory: chunks of 4 in different banks */

/* Shared memory of the kernel of rows, for CB value columns. */
template <int CB> struct rows_memory {
    float k[DELTA_C][LD], q[DELTA_C][LD];
    float a[DELTA_C][DELTA_C], p[DELTA_C][DELTA_C]; /* decayed k.k and q.k */
    float s[DEV_DELTA_DIM][CB], e[DELTA_C][CB];
    float beta[DELTA_C], g[DELTA_C], by[DELTA_C], left[DELTA_C]; /* by: exp(G_i); left: exp(G_last - G_j) */
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
static __device__ void load_chunk(const delta_job<T> &j, rows_memory<CB> &m, const delta_seq &s, int64_t n, const chunk_rows &x) {
    const int n0 = x.n0, n1 = x.n1;
    const int64_t t = x.t;
    const bool open = x.open;
    const int warp = threadIdx.x / 32;
    const int64_t head = n / j.group;
    for (int i = warp; i < n1; i += DELTA_WARPS) {
        if (i >= n0) {
            const T *row = j.qkv + (t + i - n0) * j.width;
            warp_l2(m.q[i], 1, row + head * j.dk, j.dk, delta_q_scale(j.dk));
            warp_l2(m.k[i], 1, row + (j.hk + head) * j.dk, j.dk, 1.0f);
        } else if (open) {
            for (int64_t d = threadIdx.x & 31; d < j.dk; d += 32)
                m.k[i][d] = j.k[((s.slot * j.hk + head) * j.dk + d) * DELTA_C + i];
        }
    }
    for (int i = threadIdx.x; i < n1; i += DELTA_THREADS) {
        if (i >= n0) {
            m.beta[i] = delta_beta(j, t + i - n0, n);
            m.g[i] = delta_g(act_at(j.a_log, n), delta_input(j, t + i - n0, n));
        } else if (open) {
            m.g[i] = j.g[(s.slot * j.hv + n) * DELTA_C + i];
        }
    }
    __syncthreads();
    if (threadIdx.x == 0) running_sum(m.g, n0, n1, n0 ? m.g[n0 - 1] : 0.0f);
    __syncthreads();
    for (int i = threadIdx.x; i < n1; i += DELTA_THREADS) {
        m.by[i] = decay_exp(m.g[i]);
        m.left[i] = decay_exp(__fsub_rn(m.g[n1 - 1], m.g[i]));
    }
}

/* a, p of rows [n0, n1). A thread has rows and columns of its own, with a stride of 16. */
template <int CB> static __device__ void chunk_dots(rows_memory<CB> &m, int n0, int n1, int64_t dk) {
    const int ti = threadIdx.x / 16, tj = threadIdx.x % 16;
    float kk[4][4] = {}, qk[4][4] = {};
    for (int64_t d = 0; d < dk; d += 4) {
        float4 col[4];
#pragma unroll
        for (int y = 0; y < 4; y++) col[y] = *(const float4 *)&m.k[tj + 16 * y][d];
#pragma unroll
        for (int x = 0; x < 4; x++) {
            const float4 a = *(const float4 *)&m.k[ti + 16 * x][d], b = *(const float4 *)&m.q[ti + 16 * x][d];
#pragma unroll
            for (int y = 0; y < 4; y++) {
                kk[x][y] = __fmaf_rn(a.w, col[y].w,
                                     __fmaf_rn(a.z, col[y].z, __fmaf_rn(a.y, col[y].y, __fmaf_rn(a.x, col[y].x, kk[x][y]))));
                qk[x][y] = __fmaf_rn(b.w, col[y].w,
                                     __fmaf_rn(b.z, col[y].z, __fmaf_rn(b.y, col[y].y, __fmaf_rn(b.x, col[y].x, qk[x][y]))));
            }
        }
    }
#pragma unroll
    for (int x = 0; x < 4; x++)
#pragma unroll
        for (int y = 0; y < 4; y++) {
            const int i = ti + 16 * x, c = tj + 16 * y;
            if (i < n0 || i >= n1 || c > i) continue;
            const float d = decay_exp(__fsub_rn(m.g[i], m.g[c]));
            m.a[i][c] = __fmul_rn(kk[x][y], d);
            m.p[i][c] = __fmul_rn(qk[x][y], d);
        }
}

/* Rows of a thread in the sums over value columns: DELTA_C / WAYS, with that stride. */
template <typename T, int CB> static __global__ void __launch_bounds__(DELTA_THREADS) delta_rows_kernel(const delta_job<T> j) {
    enum { WAYS = DELTA_THREADS / CB, ROWS = DELTA_C / WAYS, DEPTH = DEV_DELTA_DIM / WAYS };
    extern __shared__ float4 shared[];
    rows_memory<CB> &m = *(rows_memory<CB> *)shared;
    const delta_seq s = delta_seq_at(j, blockIdx.z);
    const int64_t n = blockIdx.y, c0 = (int64_t)blockIdx.x * CB;
    const int c = threadIdx.x % CB, way = threadIdx.x / CB;
    float *const slot_s = s.slot >= 0 ? j.s + (s.slot * j.hv + n) * j.dk * j.dv + c0 + c : NULL;
    float *const slot_e = s.slot >= 0 ? j.e + (s.slot * j.hv + n) * DELTA_C * j.dv + c0 + c : NULL;
    if (slot_s && s.pos0 >= DELTA_C)
        for (int64_t d = way; d < j.dk; d += WAYS) m.s[d][c] = slot_s[d * j.dv];
    for (int64_t r = 0; r < s.n;) {
        const int64_t chunk = (s.pos0 + r) / DELTA_C, t = s.row0 + r;
        const int n0 = (int)((s.pos0 + r) % DELTA_C), n1 = s.n - r < DELTA_C - n0 ? n0 + (int)(s.n - r) : DELTA_C;
        __syncthreads();
        load_chunk(j, m, s, n, {t, n0, n1, r == 0});
        for (int i = way; i < n0; i += WAYS) m.e[i][c] = slot_e[i * j.dv];
        __syncthreads();
        chunk_dots(m, n0, n1, j.dk);
        float u[ROWS] = {}, o[ROWS] = {}, sum[ROWS] = {};
        if (chunk > 0)
            for (int64_t d = 0; d < j.dk; d += 4) {
                const float s0 = m.s[d][c], s1 = m.s[d + 1][c], s2 = m.s[d + 2][c], s3 = m.s[d + 3][c];
#pragma unroll
                for (int x = 0; x < ROWS; x++) {
                    const float4 a = *(const float4 *)&m.k[way + WAYS * x][d], b = *(const float4 *)&m.q[way + WAYS * x][d];
                    u[x] = __fmaf_rn(a.w, s3, __fmaf_rn(a.z, s2, __fmaf_rn(a.y, s1, __fmaf_rn(a.x, s0, u[x]))));
                    o[x] = __fmaf_rn(b.w, s3, __fmaf_rn(b.z, s2, __fmaf_rn(b.y, s1, __fmaf_rn(b.x, s0, o[x]))));
                }
            }
#pragma unroll
        for (int x = 0; x < ROWS; x++) {
            const int i = way + WAYS * x;
            if (i < n0 || i >= n1) continue;
            const float v = act_at(j.qkv, (t + i - n0) * j.width + 2 * j.hk * j.dk + n * j.dv + c0 + c);
            u[x] = chunk > 0 ? __fmaf_rn(-m.by[i], u[x], v) : v;
            o[x] = chunk > 0 ? __fmul_rn(m.by[i], o[x]) : 0.0f;
        }
        __syncthreads();
        for (int y = 0; y < n1; y++) {
            if (y >= n0 && y % WAYS == way) {
#pragma unroll
                for (int x = 0; x < ROWS; x++)
                    if (way + WAYS * x == y) m.e[y][c] = __fmul_rn(m.beta[y], __fsub_rn(u[x], sum[x]));
            }
            if (y >= n0) __syncthreads();
            const float e = m.e[y][c];
#pragma unroll
            for (int x = 0; x < ROWS; x++) {
                const int i = way + WAYS * x;
                if (i < n0 || i >= n1 || i < y) continue;
                if (i > y) sum[x] = __fmaf_rn(m.a[i][y], e, sum[x]);
                o[x] = __fmaf_rn(m.p[i][y], e, o[x]);
            }
        }
#pragma unroll
        for (int x = 0; x < ROWS; x++) {
            const int i = way + WAYS * x;
            if (i < n0 || i >= n1) continue;
            const int64_t at = ((t + i - n0) * j.hv + n) * j.dv + c0 + c;
            act_put(j.out, at, o[x]);
            if (j.kept) j.kept[at] = m.e[i][c];
        }
        r += n1 - n0;
        if (n1 < DELTA_C) { /* the last one, open */
            for (int i = n0 + way; i < n1 && slot_e; i += WAYS) slot_e[i * j.dv] = m.e[i][c];
            continue;
        }
        float next[DEPTH];
#pragma unroll
        for (int x = 0; x < DEPTH; x++) {
            const int64_t d = way + WAYS * x;
            next[x] = chunk > 0 && d < j.dk ? __fmul_rn(m.by[DELTA_C - 1], m.s[d][c]) : 0.0f;
        }
        for (int y = 0; y < DELTA_C; y++) {
            const float e = m.e[y][c];
#pragma unroll
            for (int x = 0; x < DEPTH; x++)
                if (way + WAYS * x < j.dk) next[x] = __fmaf_rn(__fmul_rn(m.k[y][way + WAYS * x], m.left[y]), e, next[x]);
        }
#pragma unroll
        for (int x = 0; x < DEPTH; x++) {
            const int64_t d = way + WAYS * x;
            if (d >= j.dk) continue;
            m.s[d][c] = next[x];
            if (slot_s) slot_s[d * j.dv] = next[x];
            if (j.states && r < s.n) j.states[(((s.entry + chunk + 1) * j.hv + n) * j.dk + d) * j.dv + c0 + c] = next[x];
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

/* One new row of a sequence (or none): a block has a value head, 2 dv threads. */
template <typename T> static __global__ void __launch_bounds__(2 * DEV_DELTA_DIM) delta_step_kernel(const delta_job<T> j) {
    __shared__ float k[DEV_DELTA_DIM], q[DEV_DELTA_DIM], a[DELTA_C], p[DELTA_C], g[DELTA_C], us[DEV_DELTA_DIM], es[DEV_DELTA_DIM];
    __shared__ float beta, added;
    const delta_seq s = delta_seq_at(j, blockIdx.y);
    if (s.n == 0) return;
    const int64_t n = blockIdx.x, head = n / j.group, t = s.row0;
    const int i = (int)(s.pos0 % DELTA_C), threads = (int)blockDim.x, c = (int)(threadIdx.x % j.dv);
    const bool first = s.pos0 < DELTA_C, is_q = threadIdx.x >= j.dv;
    float *const st = j.s + (s.slot * j.hv + n) * j.dk * j.dv, *const keys = j.k + (s.slot * j.hk + head) * j.dk * DELTA_C;
    float *const slot_e = j.e + (s.slot * j.hv + n) * DELTA_C * j.dv, *const slot_g = j.g + (s.slot * j.hv + n) * DELTA_C;
    for (int w = threadIdx.x / 32; w < 2; w += threads / 32) {
        const T *row = j.qkv + t * j.width + ((w ? j.hk : 0) + head) * j.dk;
        warp_l2(w ? k : q, 1, row, j.dk, w ? 1.0f : delta_q_scale(j.dk));
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
    const dim3 grid((unsigned)(j.dv / CB), (unsigned)j.hv, (unsigned)a->seqs.n);
    TRY(delta_shared(c, (const void *)delta_rows_kernel<T, CB>, sizeof(rows_memory<CB>), a));
    delta_rows_kernel<T, CB><<<grid, DELTA_THREADS, sizeof(rows_memory<CB>), c->stream>>>(j);
    CU_LAUNCHED();
    return 0;
}
template <typename T> static int forward_any(struct cuda *c, const struct delta_args *a) {
    const delta_job<T> j = delta_job_of<T>(a);
    if (a->seqs.n == 0) return 0;
    if (j.s && a->seqs.max_rows == 1) {
        delta_step_kernel<T><<<dim3((unsigned)j.hv, (unsigned)a->seqs.n), (unsigned)(2 * j.dv), 0, c->stream>>>(j);
        CU_LAUNCHED();
        return 0;
    }
    if (j.dv % 32 == 0) TRY((rows_any<T, 32>(c, a, j)));
    else TRY((rows_any<T, 16>(c, a, j)));
    if (!j.s) return 0;
    delta_open_kernel<T><<<dim3((unsigned)j.hk, (unsigned)a->seqs.n), DELTA_THREADS, 0, c->stream>>>(j);
    CU_LAUNCHED();
    return 0;
}

int cuda_delta_fwd(struct dev *d, const struct delta_args *a) {
    return a->qkv.dt == DT_BF16 ? forward_any<bf16>(cuda_of(d), a) : forward_any<float>(cuda_of(d), a);
}
