/* gemm_fallback.cu - helpers around the GEMMs: a fallback GEMM for sizes that cuBLASLt does not take, the
 * epilogue of a GEMM whose sums are in f32, column sums, and what autotuning needs (test values, bitwise comparison).
 *
 * The fallback GEMM is for odd and small models: correct at any size, not fast.
 * Invariant: an element of the fallback GEMM is one chain of fused multiply-adds over r
 * ascending, whatever tile it is in. */
#include "device/cuda/gemm/gemm.cuh"

#include <stdint.h>

static __device__ __forceinline__ float load(const float *p, int64_t i) { return p[i]; }
static __device__ __forceinline__ float load(const __nv_bfloat16 *p, int64_t i) { return __bfloat162float(p[i]); }
static __device__ __forceinline__ void put(float *p, int64_t i, float v) { p[i] = v; }
static __device__ __forceinline__ void put(__nv_bfloat16 *p, int64_t i, float v) { p[i] = __float2bfloat16_rn(v); }

/* ---- out (rows, cols) = sum over r of A(row, r) B(r, col) ---- */

enum { TILE = 32, SIDE = 16 }; /* a block of SIDE x SIDE threads makes TILE x TILE elements */

struct plain {
    int64_t rows, cols, r;
    const void *a, *b, *bias;
    int64_t a_row, a_r, b_r, b_col; /* strides in elements */
    void *out;
    int64_t ld_out;
    bool add;
};

/* tile[r][i] = src[(i0 + i) * s_i + (r0 + r) * s_r], zero outside. Neighbour threads take neighbour addresses. */
template <typename In>
static __device__ void load_tile(float (*tile)[TILE + 1], const In *src, int64_t i0, int64_t n_i, int64_t s_i, int64_t r0,
                                 int64_t n_r, int64_t s_r) {
    for (int e = threadIdx.y * SIDE + threadIdx.x; e < TILE * TILE; e += SIDE * SIDE) {
        const int i = s_r == 1 ? e / TILE : e % TILE, r = s_r == 1 ? e % TILE : e / TILE;
        const bool inside = i0 + i < n_i && r0 + r < n_r;
        tile[r][i] = inside ? load(src, (i0 + i) * s_i + (r0 + r) * s_r) : 0.0f;
    }
}

template <typename In, typename Out> static __device__ void plain_tile(const struct plain &p, int64_t row0, int64_t col0) {
    __shared__ float ta[TILE][TILE + 1], tb[TILE][TILE + 1];
    float sum[2][2] = {};
    for (int64_t r0 = 0; r0 < p.r; r0 += TILE) {
        load_tile(ta, (const In *)p.a, row0, p.rows, p.a_row, r0, p.r, p.a_r);
        load_tile(tb, (const In *)p.b, col0, p.cols, p.b_col, r0, p.r, p.b_r);
        __syncthreads();
        const int n = (int)(p.r - r0 < TILE ? p.r - r0 : TILE);
        for (int r = 0; r < n; r++)
            for (int i = 0; i < 2; i++)
                for (int j = 0; j < 2; j++)
                    sum[i][j] = fmaf(ta[r][threadIdx.y + i * SIDE], tb[r][threadIdx.x + j * SIDE], sum[i][j]);
        __syncthreads();
    }
    for (int i = 0; i < 2; i++)
        for (int j = 0; j < 2; j++) {
            const int64_t row = row0 + threadIdx.y + i * SIDE, col = col0 + threadIdx.x + j * SIDE;
            if (row >= p.rows || col >= p.cols) continue;
            float v = sum[i][j];
            if (p.bias) v += load((const In *)p.bias, col);
            if (p.add) v += load((const Out *)p.out, row * p.ld_out + col);
            put((Out *)p.out, row * p.ld_out + col, v);
        }
}

template <typename In, typename Out> static __global__ void __launch_bounds__(SIDE *SIDE) plain_kernel(const struct plain p) {
    plain_tile<In, Out>(p, (int64_t)blockIdx.x * TILE, (int64_t)blockIdx.y * TILE);
}

static struct plain plain_of(const struct cuda_gemm_args *a) {
    struct plain p = {};
    p.a = a->a;
    p.b = a->b;
    p.bias = a->bias;
    p.out = a->out;
    p.ld_out = a->ld_out;
    p.add = a->add;
    switch (a->op) {
    case CUDA_GEMM_FWD: /* r is k: a (m, k), b (n, k) */
        p.rows = a->m, p.cols = a->n, p.r = a->k;
        p.a_row = a->k, p.a_r = 1, p.b_r = 1, p.b_col = a->k;
        break;
    case CUDA_GEMM_DX: /* r is n: a (m, n), b (n, k) */
        p.rows = a->m, p.cols = a->k, p.r = a->n;
        p.a_row = a->n, p.a_r = 1, p.b_r = a->k, p.b_col = 1;
        break;
    case CUDA_GEMM_DW: /* r is m: a (m, n), b (m, k) */
        p.rows = a->n, p.cols = a->k, p.r = a->m;
        p.a_row = 1, p.a_r = a->n, p.b_r = a->k, p.b_col = 1;
        break;
    }
    return p;
}

int gemm_fallback(struct cuda *c, const struct cuda_gemm_args *a) {
    const struct plain p = plain_of(a);
    const int64_t x = gemm_ceil_div(p.rows, TILE), y = gemm_ceil_div(p.cols, TILE);
    if (x > INT32_MAX || y > 65535)
        FAIL(ERR_UNSUPPORTED, "cuda: a GEMM with an output of %lld x %lld elements is too large", (long long)p.rows,
             (long long)p.cols);
    const dim3 grid((unsigned)x, (unsigned)y), block(SIDE, SIDE);
    if (a->in == DT_F32) plain_kernel<float, float><<<grid, block, 0, c->stream>>>(p);
    else if (a->out_dt == DT_F32) plain_kernel<__nv_bfloat16, float><<<grid, block, 0, c->stream>>>(p);
    else plain_kernel<__nv_bfloat16, __nv_bfloat16><<<grid, block, 0, c->stream>>>(p);
    CU_LAUNCHED();
    return 0;
}

/* Grid (columns, tiles of rows over all experts), of DW (columns, rows of an expert's matrix, experts). */
template <typename In, typename Out>
static __global__ void __launch_bounds__(SIDE *SIDE) grouped_plain_kernel(const struct gemm_grouped g) {
    int expert = (int)blockIdx.z;
    int64_t row0 = (int64_t)blockIdx.y * TILE, rows = 0;
    struct plain p = {};
    pdl_launch_dependents();
    pdl_wait();
    if (g.op == CUDA_GEMM_DW) {
        const int64_t lo = g.offset[expert];
        p.rows = g.n, p.cols = g.k, p.r = g.offset[expert + 1] - lo;
        if (p.r == 0 && g.add) return;
        p.a_row = 1, p.a_r = g.n, p.b_r = g.k, p.b_col = 1;
        p.a = (const In *)g.a + lo * g.n;
        p.b = (const In *)g.b + lo * g.k;
        p.out = (Out *)g.out + expert * g.n * g.k;
        p.add = g.add;
    } else {
        if (!gemm_group_tile(g, TILE, (int)blockIdx.y, &expert, &row0, &rows)) return;
        const bool fwd = g.op == CUDA_GEMM_FWD;
        p.rows = row0 + rows, p.cols = fwd ? g.n : g.k, p.r = fwd ? g.k : g.n;
        p.a_row = p.r, p.a_r = 1, p.b_r = fwd ? 1 : g.k, p.b_col = fwd ? g.k : 1;
        p.a = g.a;
        p.b = (const In *)g.b + expert * g.n * g.k;
        p.out = g.out;
    }
    p.ld_out = p.cols;
    plain_tile<In, Out>(p, row0, (int64_t)blockIdx.x * TILE);
}

int gemm_grouped_fallback(struct cuda *c, const struct gemm_grouped *g) {
    const bool dw = g->op == CUDA_GEMM_DW;
    const int64_t x = gemm_ceil_div(g->op == CUDA_GEMM_FWD ? g->n : g->k, TILE);
    const int64_t y = dw ? gemm_ceil_div(g->n, TILE) : gemm_group_tiles(g, TILE);
    if (x > INT32_MAX || y > 65535)
        FAIL(ERR_UNSUPPORTED, "cuda: a grouped GEMM of %lld rows by %lld x %lld is too large", (long long)g->m, (long long)g->n,
             (long long)g->k);
    const dim3 grid((unsigned)x, (unsigned)y, dw ? (unsigned)g->experts : 1), block(SIDE, SIDE);
    if (g->in == DT_F32) grouped_plain_kernel<float, float><<<grid, block, 0, c->stream>>>(*g);
    else if (g->out_dt == DT_F32) grouped_plain_kernel<__nv_bfloat16, float><<<grid, block, 0, c->stream>>>(*g);
    else grouped_plain_kernel<__nv_bfloat16, __nv_bfloat16><<<grid, block, 0, c->stream>>>(*g);
    CU_LAUNCHED();
    return 0;
}

/* ---- epilogue: out = round(acc + bias), or out + (acc + bias) ---- */

static unsigned grid_of(const struct cuda *c, int64_t work, int64_t per_block) {
    const int64_t blocks = gemm_ceil_div(work, per_block), most = (int64_t)c->n_sm * 8;
    return (unsigned)(blocks < 1 ? 1 : gemm_min(blocks, most));
}

/* acc and out may be the same memory, so neither is restrict. */
template <typename In, typename Out>
static __global__ void epilogue_kernel(Out *out, int64_t ld_out, const float *acc, int64_t ld_acc, const In *bias, int64_t m,
                                       int64_t n, bool add) {
    const int64_t step = (int64_t)gridDim.x * blockDim.x;
    for (int64_t e = (int64_t)blockIdx.x * blockDim.x + threadIdx.x; e < m * n; e += step) {
        const int64_t row = e / n, col = e % n;
        float v = acc[row * ld_acc + col];
        if (bias) v += load(bias, col);
        if (add) v += load(out, row * ld_out + col);
        put(out, row * ld_out + col, v);
    }
}

int gemm_epilogue(struct cuda *c, const struct cuda_gemm_args *a, const float *acc, int64_t ld_acc) {
    const int64_t width = gemm_out_width(a->op, a->n, a->k);
    const unsigned grid = grid_of(c, a->m * width, 256);
    if (a->in == DT_F32)
        epilogue_kernel<<<grid, 256, 0, c->stream>>>((float *)a->out, a->ld_out, acc, ld_acc, (const float *)a->bias, a->m, width,
                                                     a->add);
    else if (a->out_dt == DT_F32)
        epilogue_kernel<<<grid, 256, 0, c->stream>>>((float *)a->out, a->ld_out, acc, ld_acc, (const __nv_bfloat16 *)a->bias, a->m,
                                                     width, a->add);
    else
        epilogue_kernel<<<grid, 256, 0, c->stream>>>((__nv_bfloat16 *)a->out, a->ld_out, acc, ld_acc,
                                                     (const __nv_bfloat16 *)a->bias, a->m, width, a->add);
    CU_LAUNCHED();
    return 0;
}

/* ---- column sums: first of bands of rows, then of the bands in order ---- */

enum { BAND = CUDA_COLSUM_ROWS, BAND_Y = 8 }; /* rows of a band; of its BAND_Y threads a column each takes every 8th */

template <typename In, int V> struct row_vec; /* V neighbour values, one load */
template <typename In> struct row_vec<In, 1> { In v[1]; };
template <> struct __align__(16) row_vec<float, 4> { float v[4]; };
template <> struct __align__(16) row_vec<__nv_bfloat16, 8> { __nv_bfloat16 v[8]; };

/* part (bands, n); a thread owns V columns. pre: n % V == 0, and 16-byte rows where V > 1 */
template <typename In, int V>
static __global__ void __launch_bounds__(32 * BAND_Y) band_kernel(float *part, const In *dy, int64_t m, int64_t n) {
    __shared__ float s[BAND_Y][32 * V];
    const int lane = (int)threadIdx.x % 32, y = (int)threadIdx.x / 32;
    const int64_t col = ((int64_t)blockIdx.x * 32 + lane) * V;
    const int64_t row0 = (int64_t)blockIdx.y * BAND, end = row0 + BAND < m ? row0 + BAND : m;
    float sum[V] = {};
    pdl_launch_dependents();
    pdl_wait();
    if (col < n)
#pragma unroll 8
        for (int64_t row = row0 + y; row < end; row += BAND_Y) {
            const row_vec<In, V> x = *(const row_vec<In, V> *)(dy + row * n + col);
            for (int i = 0; i < V; i++) sum[i] += load(x.v, i);
        }
    for (int i = 0; i < V; i++) s[y][lane * V + i] = sum[i];
    __syncthreads();
    if (y != 0 || col >= n) return;
    for (int i = 0; i < V; i++) {
        float total = 0;
        for (int k = 0; k < BAND_Y; k++) total += s[k][lane * V + i];
        part[(int64_t)blockIdx.y * n + col + i] = total;
    }
}

static __global__ void bands_kernel(float *db, const float *part, int64_t bands, int64_t n, bool add) {
    const int64_t col = (int64_t)blockIdx.x * blockDim.x + threadIdx.x;
    float sum = 0;
    pdl_launch_dependents();
    pdl_wait();
#pragma unroll 16
    for (int64_t b = 0; b < bands && col < n; b++) sum += part[b * n + col];
    if (col < n) db[col] = add ? db[col] + sum : sum;
}

template <typename In, int V> static cudaError_t launch_bands(struct cuda *c, float *part, const void *dy, int64_t m, int64_t n) {
    const dim3 grid((unsigned)gemm_ceil_div(n, 32 * V), (unsigned)gemm_ceil_div(m, BAND));
    return cuda_launch_pdl(c, band_kernel<In, V>, grid, 32 * BAND_Y, 0, part, (const In *)dy, m, n);
}

int gemm_colsum(struct cuda *c, float *db, struct tensor dy, bool add) {
    const int64_t m = dy.dim[0], n = dy.dim[1], bands = gemm_ceil_div(m, BAND), vec = 16 / (int64_t)dtype_size(dy.dt);
    const bool wide = n % vec == 0 && (uintptr_t)dy.data % 16 == 0; /* the same sums either way */
    void *part;
    if (bands > 65535) FAIL(ERR_UNSUPPORTED, "cuda: matmul_dw: %lld rows are too many", (long long)m);
    TRY(cuda_scratch(c, CUDA_SCRATCH_GEMM, (size_t)(bands * n) * sizeof(float), &part));
    if (dy.dt == DT_F32 && wide) CU_TRY((launch_bands<float, 4>(c, (float *)part, dy.data, m, n)));
    else if (dy.dt == DT_F32) CU_TRY((launch_bands<float, 1>(c, (float *)part, dy.data, m, n)));
    else if (wide) CU_TRY((launch_bands<__nv_bfloat16, 8>(c, (float *)part, dy.data, m, n)));
    else CU_TRY((launch_bands<__nv_bfloat16, 1>(c, (float *)part, dy.data, m, n)));
    CU_TRY(cuda_launch_pdl(c, bands_kernel, (unsigned)gemm_ceil_div(n, 128), 128, 0, db, (const float *)part, bands, n, add));
    return 0;
}

/* ---- test values ---- */

static __device__ __forceinline__ uint32_t mix(uint64_t x) { /* SplitMix64 (Steele, Lea & Flood 2014) */
    x += 0x9e3779b97f4a7c15u;
    x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9u;
    x = (x ^ (x >> 27)) * 0x94d049bb133111ebu;
    return (uint32_t)((x ^ (x >> 31)) >> 32);
}

template <typename T>
static __global__ void fill_kernel(T *dst, int64_t rows, int64_t cols, unsigned seed, int mirror, float scale) {
    const int64_t step = (int64_t)gridDim.x * blockDim.x;
    for (int64_t e = (int64_t)blockIdx.x * blockDim.x + threadIdx.x; e < rows * cols; e += step) {
        const int64_t row = e / cols, col = e % cols;
        const bool by_rows = mirror == -2;
        const bool second = mirror != 0 && (by_rows ? row >= (rows + 1) / 2 : col >= (cols + 1) / 2);
        const int64_t twin = !second ? e : by_rows ? (rows - 1 - row) * cols + col : row * cols + cols - 1 - col;
        const float v = (float)(int32_t)mix(((uint64_t)seed << 48) ^ (uint64_t)twin) * 0x1p-31f * scale;
        put(dst, e, second && mirror < 0 ? -v : v);
    }
}

int gemm_fill_test_values(struct cuda *c, struct tensor dst, unsigned seed, int mirror, float scale) {
    const int64_t rows = dst.dim[0], cols = dst.dim[1];
    const unsigned grid = grid_of(c, rows * cols, 256);
    if (dst.dt == DT_F32) fill_kernel<<<grid, 256, 0, c->stream>>>((float *)dst.data, rows, cols, seed, mirror, scale);
    else fill_kernel<<<grid, 256, 0, c->stream>>>((__nv_bfloat16 *)dst.data, rows, cols, seed, mirror, scale);
    CU_LAUNCHED();
    return 0;
}

/* Threads that find a difference all write the same value. */
static __global__ void compare_kernel(const uint4 *x, const uint4 *y, int64_t n, int *flag) {
    const int64_t step = (int64_t)gridDim.x * blockDim.x;
    bool differ = false;
    for (int64_t i = (int64_t)blockIdx.x * blockDim.x + threadIdx.x; i < n; i += step) {
        const uint4 a = x[i], b = y[i];
        differ |= a.x != b.x || a.y != b.y || a.z != b.z || a.w != b.w;
    }
    if (differ) *flag = 1;
}

int gemm_compare(struct cuda *c, const void *x, const void *y, size_t bytes, int *flag) {
    const int64_t n = (int64_t)(bytes / 16);
    compare_kernel<<<grid_of(c, n, 256), 256, 0, c->stream>>>((const uint4 *)x, (const uint4 *)y, n, flag);
    CU_LAUNCHED();
    return 0;
}
