/* delta_rule_fwd.cu - the gated delta rule over packed sequences, from the start or from a state.
 *
 * Two kernels compute rows: `rows` takes a block of value columns of a value head of a sequence through its chunks (columns
 * of S never meet), `step` one new row of each sequence, reading S without writing it: decoding steps, and the rows of a step with
 * drafts one after the other.  Sequences with more rows leave their open chunk's keys and G by a third kernel, when nobody
 * reads the old ones any more.
 *
 * The order of every sum, alike in both: k.k, q.k, S^T k, S^T q over the head's elements, ascending; the sums over j ascending;
 * each one chain of fused multiply-adds.  So a row's bits do not depend on what computes it.
 *
 * VERLC_DELTA_FORWARD=mma takes the kernels of delta_chunk_mma.cu and delta_step_mma.cu in their place, until both are measured. */
#include "device/cuda/delta_net/delta_mma.cuh"

#include <stdlib.h>
#include <string.h>

typedef __nv_bfloat16 bf16;

enum {
    LD = DEV_DELTA_DIM + 4, /* floats between rows of heads in shared memory: chunks of 4 in different banks */
    PART = 16,              /* rows of a chunk whose e are made at a time */
    PARTS = DELTA_C / PART,
    TILE = 4,     /* floats of a load from shared memory */
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
    enum { BATCH = 2 }; /* rows that a warp loads at a time */
    for (int i0 = warp; i0 < n1; i0 += BATCH * WARPS) {
        lane_head q[BATCH], k[BATCH];
#pragma unroll
        for (int b = 0; b < BATCH; b++) {
            const int i = i0 + b * WARPS;
            if (i < n0 || i >= n1) continue;
            const T *row = j.qkv + (t + i - n0) * j.width;
            q[b] = head_load(row + head * j.dk, j.dk), k[b] = head_load(row + (j.hk + head) * j.dk, j.dk);
        }
#pragma unroll
        for (int b = 0; b < BATCH; b++) {
            const int i = i0 + b * WARPS;
            if (i >= n1) continue;
            if (i >= n0) {
                head_normalize(m.q[i], q[b], j.dk, delta_q_scale(j.dk));
                head_normalize(m.k[i], k[b], j.dk, 1.0f);
            } else if (x.open) {
                const int64_t at = (s.slot * j.hk + head) * DELTA_C + i;
                for (int64_t d = threadIdx.x & 31; d < j.dk; d += 32) m.k[i][d] = __fmul_rn(act_at(j.k, at * j.dk + d), j.r[at]);
            }
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
static __device__ __forceinline__ void fma4(float *sum, float w, float4 e) {
    sum[0] = __fmaf_rn(w, e.x, sum[0]), sum[1] = __fmaf_rn(w, e.y, sum[1]);
    sum[2] = __fmaf_rn(w, e.z, sum[2]), sum[3] = __fmaf_rn(w, e.w, sum[3]);
}

/* ALL: heads have DEV_DELTA_DIM elements. */
template <typename T, int CB, bool ALL>
static __global__ void __launch_bounds__(rows_of<CB>::THREADS) delta_rows_kernel(const delta_job<T> job) {
    delta_job<T> j = job;
    if (ALL) j.dk = j.dv = DEV_DELTA_DIM; /* numbers that the compiler knows */
    enum { CL = rows_of<CB>::COL_LANES, DEPTH = DEV_DELTA_DIM / PART };
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
        for (int i = threadIdx.x / 32; i < DELTA_C; i += rows_of<CB>::WARPS)
            for (int d = lane; d < (int)j.dk; d += 32) m.q[i][d] = __fmul_rn(m.k[i][d], m.left[i]);
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
    const int64_t keys = (s.slot * j.hk + head) * DELTA_C;
    for (int i = n0 + threadIdx.x / 32; i < n1; i += DELTA_WARPS) {
        const lane_head k = head_load(j.qkv + (t + i - n0) * j.width + (j.hk + head) * j.dk, j.dk);
        const float r = head_scale(k);
        head_put(j.k + (keys + i) * j.dk, k, j.dk);
        if ((threadIdx.x & 31) == 0) j.r[keys + i] = r;
    }
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

/* The kernel of one new row. Its first COLUMNS threads have a value column each, the others a row of the open chunk. */
template <typename T> struct step_memory {
    enum { COLUMNS = DEV_DELTA_DIM, THREADS = COLUMNS + DELTA_C, BATCH = 32, CLOSE = 16 };
    enum { LDK = DEV_DELTA_DIM + 16 / sizeof(T) }; /* rows of keys that eight lanes read are in different banks */
    float k[DEV_DELTA_DIM], q[DEV_DELTA_DIM];      /* the new row's, normalised */
    float a[DELTA_C], p[DELTA_C], g[DELTA_C], r[DELTA_C];
    float e[DELTA_C][DEV_DELTA_DIM];
    T keys[DELTA_C][LDK];       /* as they came */
    float left[DELTA_C][CLOSE]; /* of a chunk that ends: k_j times its decay to the end, CLOSE elements at a time */
    float beta, added;
};
/* A column of S (dk, dv). dk: a multiple of TILE. */
struct step_column {
    const float *p;
    int dv, dk;
};
/* Its numbers [d0, d0 + BATCH): many loads under way at a time. */
template <int BATCH> static __device__ __forceinline__ void load_column(float (&v)[BATCH], const step_column &of, int d0) {
    if (d0 + BATCH <= of.dk) {
#pragma unroll
        for (int x = 0; x < BATCH; x++) v[x] = of.p[(d0 + x) * of.dv];
    } else {
#pragma unroll
        for (int x = 0; x < BATCH; x++) v[x] = d0 + x < of.dk ? of.p[(d0 + x) * of.dv] : 0.0f;
    }
}
/* `rows` rows of dim numbers to shared memory, not waited for. A thread has the same columns of each of its rows. */
template <int THREADS, typename T, int LDT>
static __device__ __forceinline__ void copy_rows(T (*to)[LDT], const T *from, int rows, int dim) {
    enum { UNIT = 16 / sizeof(T), LANES = DEV_DELTA_DIM / UNIT };
    const int d = (int)threadIdx.x % LANES * UNIT;
    if (d >= dim) return;
    for (int x = (int)threadIdx.x / LANES; x < rows; x += THREADS / LANES)
        cp_async16(smem_addr(&to[x][d]), from + x * dim + d, true);
}
/* Sums of k and q times a column, ascending: v has the first BATCH numbers of it. */
template <typename T, int BATCH>
static __device__ __forceinline__ void column_dots(float *by_k, float *by_q, const step_memory<T> &m, float (&v)[BATCH],
                                                   const step_column &of) {
    float k = 0, q = 0;
    for (int d0 = 0; d0 < of.dk; d0 += BATCH) {
        if (d0) load_column(v, of, d0);
#pragma unroll
        for (int x = 0; x < BATCH; x += TILE) {
            if (d0 + x >= of.dk) break;
            const float4 y = make_float4(v[x], v[x + 1], v[x + 2], v[x + 3]);
            k = dot4(*(const float4 *)&m.k[d0 + x], y, k), q = dot4(*(const float4 *)&m.q[d0 + x], y, q);
        }
    }
    *by_k = k, *by_q = q;
}
/* The same with the key of row y. */
template <typename T>
static __device__ __forceinline__ void row_dots(float *by_k, float *by_q, const step_memory<T> &m, int y, int dk) {
    const float r = m.r[y];
    float k = 0, q = 0;
#pragma unroll 4
    for (int d = 0; d < dk; d += CHUNK) {
        float v[CHUNK];
        load8<true>(v, &m.keys[y][d], CHUNK);
#pragma unroll
        for (int x = 0; x < CHUNK; x += TILE) {
            const float4 key =
                make_float4(__fmul_rn(v[x], r), __fmul_rn(v[x + 1], r), __fmul_rn(v[x + 2], r), __fmul_rn(v[x + 3], r));
            k = dot4(*(const float4 *)&m.k[d + x], key, k), q = dot4(*(const float4 *)&m.q[d + x], key, q);
        }
    }
    *by_k = k, *by_q = q;
}
/* S' of a chunk whose last row this is: by passes of CLOSE rows of S; a thread has 4 of them in 4 columns. */
template <typename T> static __device__ void close_chunk(const delta_job<T> &j, step_memory<T> &m, float *st, float g, bool first) {
    enum { CLOSE = step_memory<T>::CLOSE };
    const int last = DELTA_C - 1, c = (int)threadIdx.x % 32 * TILE, row = (int)threadIdx.x / 32 * TILE;
    const float by = decay_exp(g);
    for (int64_t d0 = 0; d0 < j.dk; d0 += CLOSE) {
        __syncthreads(); /* keys of the pass before have been read */
        for (int x = threadIdx.x; x < DELTA_C * CLOSE; x += step_memory<T>::THREADS) {
            const int y = x / CLOSE, d = x % CLOSE;
            if (d0 + d >= j.dk) continue;
            const float key = __fmul_rn(act_at(m.keys[y], d0 + d), m.r[y]);
            m.left[y][d] = __fmul_rn(key, decay_exp(__fsub_rn(g, y < last ? m.g[y] : g)));
        }
        __syncthreads();
        if (row >= CLOSE || d0 + row >= j.dk || c >= j.dv) continue;
        float next[TILE][TILE];
#pragma unroll
        for (int x = 0; x < TILE; x++) {
            const float4 v = first ? make_float4(0, 0, 0, 0) : *(const float4 *)&st[(d0 + row + x) * j.dv + c];
            next[x][0] = first ? 0.0f : __fmul_rn(by, v.x), next[x][1] = first ? 0.0f : __fmul_rn(by, v.y);
            next[x][2] = first ? 0.0f : __fmul_rn(by, v.z), next[x][3] = first ? 0.0f : __fmul_rn(by, v.w);
        }
#pragma unroll 4
        for (int y = 0; y < DELTA_C; y++) {
            const float4 e = *(const float4 *)&m.e[y][c], key = *(const float4 *)&m.left[y][row];
            fma4(next[0], key.x, e), fma4(next[1], key.y, e), fma4(next[2], key.z, e), fma4(next[3], key.w, e);
        }
#pragma unroll
        for (int x = 0; x < TILE; x++)
            *(float4 *)&st[(d0 + row + x) * j.dv + c] = make_float4(next[x][0], next[x][1], next[x][2], next[x][3]);
    }
}

/* Row `row` of those that a sequence has in the batch, or none: a block has a value head. S, the keys and e of the chunk are read
 * once, and loads are begun before what they are multiplied with is there. */
template <typename T>
static __global__ void __launch_bounds__(step_memory<T>::THREADS, 4) delta_step_kernel(const delta_job<T> j, int row) {
    typedef step_memory<T> memory;
    enum { BATCH = memory::BATCH, THREADS = memory::THREADS };
    pdl_launch_dependents();
    pdl_wait();
    memory &m = dynamic_shared<memory>();
    const delta_seq s = delta_seq_at(j, blockIdx.y);
    if (row >= s.n) return;
    const int64_t n = blockIdx.x, head = n / j.group, t = s.row0 + row, pos = s.pos0 + row;
    const int i = (int)(pos % DELTA_C), warp = (int)threadIdx.x / 32, dk = (int)j.dk, dv = (int)j.dv;
    const int c = (int)threadIdx.x, y = c - memory::COLUMNS;
    const bool first = pos < DELTA_C, column = c < dv;
    float *const st = j.s + (s.slot * j.hv + n) * dk * dv, *const slot_r = j.r + (s.slot * j.hk + head) * DELTA_C;
    float *const slot_e = j.e + (s.slot * j.hv + n) * DELTA_C * dv, *const slot_g = j.g + (s.slot * j.hv + n) * DELTA_C;
    T *const keys = j.k + (s.slot * j.hk + head) * DELTA_C * dk;
    float v[BATCH], by_k = 0, by_q = 0;
    const step_column of = {st + c, dv, dk};
    if (column && !first) load_column(v, of, 0);
    copy_rows<THREADS>(m.keys, keys, i, dk);
    cp_commit();
    copy_rows<THREADS>(m.e, slot_e, i, dv);
    cp_commit();
    if (warp < 2) {
        const lane_head x = head_load(j.qkv + t * j.width + ((warp ? j.hk : 0) + head) * dk, dk);
        const float r = head_normalize(warp ? m.k : m.q, x, dk, warp ? 1.0f : delta_q_scale(dk));
        if (warp) head_put(m.keys[i], x, dk), m.r[i] = r;
    }
    if (y >= 0 && y < i) m.g[y] = slot_g[y], m.r[y] = slot_r[y];
    if (threadIdx.x == THREADS - 1) {
        m.beta = delta_beta(j, t, n);
        m.added = delta_g(act_at(j.a_log, n), delta_input(j, t, n));
    }
    const float value = column ? act_at(j.qkv, t * j.width + 2 * j.hk * dk + n * dv + c) : 0.0f;
    cp_wait<1>(); /* the keys */
    __syncthreads();
    const float g = i ? __fadd_rn(m.g[i - 1], m.added) : m.added;
    if (column && !first) column_dots(&by_k, &by_q, m, v, of);
    if (y >= 0 && y <= i) {
        row_dots(&by_k, &by_q, m, y, dk);
        const float decay = decay_exp(__fsub_rn(g, y < i ? m.g[y] : g));
        m.a[y] = __fmul_rn(by_k, decay), m.p[y] = __fmul_rn(by_q, decay);
    }
    cp_wait<0>();
    __syncthreads();
    if (column) {
        const float by = decay_exp(g);
        float sum = 0, o = first ? 0.0f : __fmul_rn(by, by_q);
#pragma unroll 8
        for (int x = 0; x < i; x++) {
            const float e = m.e[x][c];
            o = __fmaf_rn(m.p[x], e, o), sum = __fmaf_rn(m.a[x], e, sum);
        }
        const float e = __fmul_rn(m.beta, __fsub_rn(first ? value : __fmaf_rn(-by, by_k, value), sum));
        act_put(j.out, (t * j.hv + n) * dv + c, __fmaf_rn(m.p[i], e, o));
        slot_e[i * dv + c] = m.e[i][c] = e;
    }
    if (n % j.group == 0 && c < dk) keys[i * dk + c] = m.keys[i][c];
    if (y == i) {
        slot_g[i] = g;
        if (n % j.group == 0) slot_r[i] = m.r[i];
    }
    if (i == DELTA_C - 1) close_chunk(j, m, st, g, first);
}

template <typename T, int CB> static int rows_any(struct cuda *c, const struct delta_args *a, const delta_job<T> &j) {
    typedef rows_of<CB> rows;
    const dim3 grid((unsigned)(j.dv / CB), (unsigned)j.hv, (unsigned)a->seqs.n);
    const bool all = j.dk == DEV_DELTA_DIM && j.dv == DEV_DELTA_DIM;
    void (*const kernel)(delta_job<T>) = all ? delta_rows_kernel<T, CB, true> : delta_rows_kernel<T, CB, false>;
    TRY(delta_shared(c, (const void *)kernel, sizeof(typename rows::memory), a));
    CU_TRY(cuda_launch_plain(c, kernel, grid, rows::THREADS, sizeof(typename rows::memory), j));
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
template <typename T> static int step_any(struct cuda *c, const struct delta_args *a, const delta_job<T> &j, int row) {
    const dim3 grid((unsigned)j.hv, (unsigned)a->seqs.n);
    TRY(delta_shared(c, (const void *)delta_step_kernel<T>, sizeof(step_memory<T>), a));
    CU_TRY(cuda_launch_pdl(c, delta_step_kernel<T>, grid, (int)step_memory<T>::THREADS, sizeof(step_memory<T>), j, row));
    return 0;
}
static int on_tensor_cores(bool *mma) {
    static const char *const asked = getenv("VERLC_DELTA_FORWARD");
    *mma = asked && strcmp(asked, "mma") == 0;
    if (asked && !*mma && strcmp(asked, "fma") != 0)
        FAIL(ERR_INVAL, "VERLC_DELTA_FORWARD=%s: neither fma (the default) nor mma", asked);
    return 0;
}
template <typename T> static int forward_any(struct cuda *c, const struct delta_args *a) {
    const delta_job<T> j = delta_job_of<T>(a);
    if (a->seqs.n == 0) return 0;
    bool mma;
    TRY(on_tensor_cores(&mma));
    if (mma && !aligned16(j.qkv)) FAIL(ERR_INVAL, "cuda delta rule: heads are copied by 16 bytes, which they are not aligned to");
    if (j.s && a->seqs.max_rows <= FEW_ROWS) {
        for (int row = 0; row < (int)a->seqs.max_rows; row++) TRY(mma ? delta_step_mma(c, a, j, row) : step_any(c, a, j, row));
        return 0;
    }
    TRY(mma ? delta_chunk_mma(c, a, j) : rows_by_width<T>(c, a, j));
    if (j.s) CU_TRY(cuda_launch_plain(c, delta_open_kernel<T>, dim3((unsigned)j.hk, (unsigned)a->seqs.n), DELTA_THREADS, 0, j));
    return 0;
}

int cuda_delta_fwd(struct dev *d, const struct delta_args *a) {
    return a->qkv.dt == DT_BF16 ? forward_any<bf16>(cuda_of(d), a) : forward_any<float>(cuda_of(d), a);
}
