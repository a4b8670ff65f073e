/* elementwise.cu - the CUDA backend's ops that move or change elements one by one: casts,
 * embedding, rows by index, SwiGLU, sums of squares, ordered sums, AdamW.
 *
 * All are bound by memory: 16-byte accesses where width and alignment allow.
 * Invariant: sums have one order (rows in row order in embed_bwd, a fixed tree in sumsq); atomics
 * count whole numbers only.  Bad ids and indices stop the kernel as ref's CHECK stops ref. */
#include "device/cuda/swiglu.cuh"
#include "device/cuda/vec.cuh"

#include <math.h>

typedef __nv_bfloat16 bf16;

enum { THREADS = 256 };

/* ---- cast ---- */

template <typename D, typename S, bool VEC> static __global__ void cast_kernel(D *dst, const S *src, int64_t n) {
    const int64_t i = ((int64_t)blockIdx.x * THREADS + threadIdx.x) * CHUNK;
    float v[CHUNK];
    if (i >= n) return;
    const int left = n - i < CHUNK ? (int)(n - i) : CHUNK;
    if (VEC && left == CHUNK) {
        load8<true>(v, src + i, CHUNK);
        store8<true>(dst + i, v, CHUNK);
    } else {
        load8<false>(v, src + i, left);
        store8<false>(dst + i, v, left);
    }
}
template <typename D, typename S> static int cast_any(struct cuda *c, void *dst, const void *src, int64_t n) {
    const unsigned blocks = (unsigned)ceil_div(n, THREADS * CHUNK);
    if (aligned16(dst) && aligned16(src)) cast_kernel<D, S, true><<<blocks, THREADS, 0, c->stream>>>((D *)dst, (const S *)src, n);
    else cast_kernel<D, S, false><<<blocks, THREADS, 0, c->stream>>>((D *)dst, (const S *)src, n);
    CU_LAUNCHED();
    return 0;
}

int cuda_cast(struct dev *d, struct tensor dst, struct tensor src) {
    struct cuda *c = cuda_of(d);
    const int64_t n = tensor_count(src);
    if (dst.dt == src.dt) {
        if (dst.data != src.data)
            CU_TRY(cudaMemcpyAsync(dst.data, src.data, (size_t)n * dtype_size(src.dt), cudaMemcpyDefault, c->stream));
        return 0;
    }
    return dst.dt == DT_BF16 ? cast_any<bf16, float>(c, dst.data, src.data, n) : cast_any<float, bf16>(c, dst.data, src.data, n);
}

/* ---- rows by index ---- */

/* A block of `threads` covers `threads` chunks of one row: grid (rows, column blocks). */
static dim3 row_grid(int64_t rows, int64_t chunks, int threads) {
    return dim3((unsigned)rows, (unsigned)ceil_div(chunks, threads));
}

static __device__ __forceinline__ int64_t checked(const int32_t *idx, int64_t i, int64_t limit) {
    const int64_t v = idx[i];
    if (v < 0 || v >= limit) __trap();
    return v;
}

template <typename W, bool VEC>
static __global__ void embed_fwd_kernel(float *x, const int32_t *ids, const W *w, int64_t vocab, int64_t h) {
    const int64_t t = blockIdx.x, c = ((int64_t)blockIdx.y * blockDim.x + threadIdx.x) * CHUNK;
    pdl_launch_dependents();
    pdl_wait();
    if (c >= h) return;
    const int n = h - c < CHUNK ? (int)(h - c) : CHUNK;
    float v[CHUNK];
    load8<VEC>(v, w + checked(ids, t, vocab) * h + c, n);
    store8<VEC>(x + t * h + c, v, n);
}
template <typename W> static int embed_fwd_any(struct cuda *c, struct tensor x, struct tensor ids, struct weight w) {
    const int64_t chunks = ceil_div(w.k, CHUNK);
    const int threads = warps_for(chunks, 128);
    const dim3 grid = row_grid(ids.dim[0], chunks, threads);
    float *out = (float *)x.data;
    const int32_t *rows = (const int32_t *)ids.data;
    const W *table = (const W *)w.data;
    if (w.k % CHUNK == 0 && aligned16(out) && aligned16(table))
        CU_TRY(cuda_launch(c, embed_fwd_kernel<W, true>, grid, threads, 0, out, rows, table, w.n, w.k));
    else CU_TRY(cuda_launch(c, embed_fwd_kernel<W, false>, grid, threads, 0, out, rows, table, w.n, w.k));
    return 0;
}
int cuda_embed_fwd(struct dev *d, struct tensor x, struct tensor ids, struct weight w) {
    return w.dt == DT_BF16 ? embed_fwd_any<bf16>(cuda_of(d), x, ids, w) : embed_fwd_any<float>(cuda_of(d), x, ids, w);
}

/* Rows of `units` elements of type U, whatever they mean. */
template <typename U>
static __global__ void gather_kernel(U *dst, const U *src, const int32_t *idx, int64_t src_rows, int64_t units) {
    const int64_t r = blockIdx.x, i = (int64_t)blockIdx.y * blockDim.x + threadIdx.x;
    pdl_launch_dependents();
    pdl_wait();
    if (i < units) dst[r * units + i] = src[checked(idx, r, src_rows) * units + i];
}
template <typename U> static int gather_any(struct cuda *c, struct tensor dst, struct tensor src, struct tensor idx) {
    const int64_t units = src.dim[1] * (int64_t)dtype_size(src.dt) / (int64_t)sizeof(U);
    const int threads = warps_for(units, 128);
    CU_TRY(cuda_launch(c, gather_kernel<U>, row_grid(idx.dim[0], units, threads), threads, 0, (U *)dst.data, (const U *)src.data,
                       (const int32_t *)idx.data, src.dim[0], units));
    return 0;
}
int cuda_gather_rows(struct dev *d, struct tensor dst, struct tensor src, struct tensor idx) {
    const size_t row = (size_t)src.dim[1] * dtype_size(src.dt);
    if (row % 16 == 0 && aligned16(dst.data) && aligned16(src.data)) return gather_any<uint4>(cuda_of(d), dst, src, idx);
    return src.dt == DT_BF16 ? gather_any<uint16_t>(cuda_of(d), dst, src, idx) : gather_any<uint32_t>(cuda_of(d), dst, src, idx);
}

template <bool VEC>
static __global__ void scatter_add_kernel(float *dst, const void *src, bool src_bf16, const int32_t *idx, int64_t dst_rows,
                                          int64_t cols) {
    const int64_t r = blockIdx.x, c = ((int64_t)blockIdx.y * blockDim.x + threadIdx.x) * CHUNK;
    if (c >= cols) return;
    const int n = cols - c < CHUNK ? (int)(cols - c) : CHUNK;
    float *to = dst + checked(idx, r, dst_rows) * cols + c;
    float a[CHUNK], b[CHUNK];
    load8<VEC>(a, to, n);
    load8_any<VEC>(b, src, src_bf16, r * cols + c, n);
#pragma unroll
    for (int i = 0; i < CHUNK; i++) a[i] = __fadd_rn(a[i], b[i]);
    store8<VEC>(to, a, n);
}
int cuda_scatter_rows_add(struct dev *d, struct tensor dst, struct tensor src, struct tensor idx) {
    struct cuda *c = cuda_of(d);
    const int64_t cols = dst.dim[1], chunks = ceil_div(cols, CHUNK);
    const int threads = warps_for(chunks, 128);
    const dim3 grid = row_grid(idx.dim[0], chunks, threads);
    const bool wide = cols % CHUNK == 0 && aligned16(dst.data) && aligned16(src.data), half = src.dt == DT_BF16;
    float *to = (float *)dst.data;
    const int32_t *rows = (const int32_t *)idx.data;
    if (wide) scatter_add_kernel<true><<<grid, threads, 0, c->stream>>>(to, src.data, half, rows, dst.dim[0], cols);
    else scatter_add_kernel<false><<<grid, threads, 0, c->stream>>>(to, src.data, half, rows, dst.dim[0], cols);
    CU_LAUNCHED();
    return 0;
}

template <typename T, bool VEC>
static __global__ void scale_rows_kernel(T *x, const float *factor, const int32_t *pos, int64_t n_pos, int64_t cols) {
    const int64_t r = blockIdx.x, c = ((int64_t)blockIdx.y * blockDim.x + threadIdx.x) * CHUNK;
    pdl_launch_dependents();
    pdl_wait();
    if (c >= cols) return;
    const int n = cols - c < CHUNK ? (int)(cols - c) : CHUNK;
    const float by = factor[checked(pos, r, n_pos)];
    float v[CHUNK];
    load8<VEC>(v, x + r * cols + c, n);
#pragma unroll
    for (int i = 0; i < CHUNK; i++) v[i] = __fmul_rn(v[i], by);
    store8<VEC>(x + r * cols + c, v, n);
}
template <typename T> static int scale_rows_any(struct cuda *c, struct tensor x, struct tensor factor, struct tensor pos) {
    const int64_t cols = x.dim[1], chunks = ceil_div(cols, CHUNK);
    const int threads = warps_for(chunks, 128);
    const dim3 grid = row_grid(x.dim[0], chunks, threads);
    const bool wide = cols % CHUNK == 0 && aligned16(x.data);
    const float *by = (const float *)factor.data;
    const int32_t *at = (const int32_t *)pos.data;
    T *const to = (T *)x.data;
    if (wide) CU_TRY(cuda_launch_pdl(c, scale_rows_kernel<T, true>, grid, threads, 0, to, by, at, factor.dim[0], cols));
    else CU_TRY(cuda_launch_pdl(c, scale_rows_kernel<T, false>, grid, threads, 0, to, by, at, factor.dim[0], cols));
    return 0;
}
int cuda_scale_rows(struct dev *d, struct tensor x, struct tensor factor, struct tensor pos) {
    return x.dt == DT_BF16 ? scale_rows_any<__nv_bfloat16>(cuda_of(d), x, factor, pos)
                           : scale_rows_any<float>(cuda_of(d), x, factor, pos);
}

/* A chunk of a row of y; VEC: no chunk has columns of two blocks. */
template <typename T, bool VEC> static __global__ void join_columns_kernel(const struct join_columns_args a) {
    const int64_t rows = a.y.dim[0], cols = a.y.dim[1], r = blockIdx.x;
    const int64_t c = ((int64_t)blockIdx.y * blockDim.x + threadIdx.x) * (VEC ? CHUNK : 1);
    pdl_launch_dependents();
    pdl_wait();
    if (c >= cols) return;
    const int n = VEC ? CHUNK : 1;
    int i = 0;
    while (c >= a.cut[i + 1]) i++;
    const int64_t width = a.cut[i + 1] - a.cut[i];
    float v[CHUNK], from[CHUNK];
    load8<VEC>(v, (const T *)a.x.data + rows * a.cut[i] + r * width + (c - a.cut[i]), n);
    if (a.from.data) {
        load8<VEC>(from, (const float *)a.from.data + r * cols + c, n);
#pragma unroll
        for (int k = 0; k < CHUNK; k++)
            if (k < n) v[k] = __fadd_rn(from[k], v[k]);
    }
    store8<VEC>((T *)a.y.data + r * cols + c, v, n);
}
template <typename T> static int join_columns_any(struct cuda *c, const struct join_columns_args *a) {
    bool wide = aligned16(a->y.data) && aligned16(a->x.data) && (!a->from.data || aligned16(a->from.data));
    for (int i = 0; i <= a->n; i++) wide = wide && a->cut[i] % CHUNK == 0;
    const int64_t chunks = wide ? a->y.dim[1] / CHUNK : a->y.dim[1];
    const int threads = warps_for(chunks, 128);
    const dim3 grid = row_grid(a->y.dim[0], chunks, threads);
    if (wide) CU_TRY(cuda_launch_pdl(c, join_columns_kernel<T, true>, grid, threads, 0, *a));
    else CU_TRY(cuda_launch_pdl(c, join_columns_kernel<T, false>, grid, threads, 0, *a));
    return 0;
}
int cuda_join_columns(struct dev *d, const struct join_columns_args *a) {
    return a->y.dt == DT_BF16 ? join_columns_any<__nv_bfloat16>(cuda_of(d), a) : join_columns_any<float>(cuda_of(d), a);
}

/* Rows of n units of type U, whatever they mean, between matrices with so many units to a row. A kernel, not a 2D copy: in a CUDA
 * graph a copy's node keeps its neighbours from starting early. */
template <typename U>
static __global__ void copy_columns_kernel(U *to, int64_t to_row, const U *from, int64_t from_row, int64_t n) {
    const int64_t r = blockIdx.x, i = (int64_t)blockIdx.y * blockDim.x + threadIdx.x;
    pdl_launch_dependents();
    pdl_wait();
    if (i < n) to[r * to_row + i] = from[r * from_row + i];
}
template <typename U> static int copy_columns_any(struct cuda *c, const struct copy_columns_args *a) {
    const int64_t unit = (int64_t)dtype_size(a->y.dt), to_row = a->y.dim[1] * unit / (int64_t)sizeof(U);
    const int64_t from_row = a->x.dim[1] * unit / (int64_t)sizeof(U), n = a->n * unit / (int64_t)sizeof(U);
    U *const to = (U *)((char *)a->y.data + a->y_at * unit);
    const U *const from = (const U *)((const char *)a->x.data + a->x_at * unit);
    const int threads = warps_for(n, 128);
    CU_TRY(
        cuda_launch_pdl(c, copy_columns_kernel<U>, row_grid(a->y.dim[0], n, threads), threads, 0, to, to_row, from, from_row, n));
    return 0;
}
int cuda_copy_columns(struct dev *d, const struct copy_columns_args *a) {
    const int64_t unit = (int64_t)dtype_size(a->y.dt);
    bool wide = aligned16(a->y.data) && aligned16(a->x.data);
    for (int64_t cols : {a->y.dim[1], a->x.dim[1], a->y_at, a->x_at, a->n}) wide = wide && cols * unit % 16 == 0;
    if (wide) return copy_columns_any<uint4>(cuda_of(d), a);
    return unit == 2 ? copy_columns_any<uint16_t>(cuda_of(d), a) : copy_columns_any<uint32_t>(cuda_of(d), a);
}

/* ---- rows that are copied within a matrix ---- */

enum { COPY_PAIRS = 256, COPY_BLOCKS = 32 }; /* pairs of rows of a launch, which are in its arguments; most blocks of a row */
struct copy_pairs {
    char *x;
    size_t bytes; /* of a row */
    int32_t from[COPY_PAIRS], to[COPY_PAIRS];
};

/* Block (b, i): part b of pair i. T: 16 bytes where rows are aligned to that. */
template <typename T> static __global__ void copy_rows_kernel(const __grid_constant__ struct copy_pairs p) {
    const T *const from = (const T *)(p.x + (size_t)p.from[blockIdx.y] * p.bytes);
    T *const to = (T *)(p.x + (size_t)p.to[blockIdx.y] * p.bytes);
    const size_t n = p.bytes / sizeof(T), step = (size_t)gridDim.x * THREADS;
    size_t i = (size_t)blockIdx.x * THREADS + threadIdx.x;
    for (; i + 3 * step < n; i += 4 * step) { /* four loads under way */
        T v[4];
#pragma unroll
        for (int k = 0; k < 4; k++) v[k] = from[i + k * step];
#pragma unroll
        for (int k = 0; k < 4; k++) to[i + k * step] = v[k];
    }
    for (; i < n; i += step) to[i] = from[i];
}
template <typename T> static int copy_rows_any(struct cuda *c, const struct copy_rows_args *a, size_t bytes) {
    const size_t blocks = (bytes / sizeof(T) + THREADS * 4 - 1) / (THREADS * 4);
    for (int64_t at = 0; at < a->n; at += COPY_PAIRS) {
        const int64_t n = a->n - at < COPY_PAIRS ? a->n - at : COPY_PAIRS;
        struct copy_pairs p = {(char *)a->x.data, bytes, {}, {}};
        memcpy(p.from, a->from + at, (size_t)n * sizeof *p.from);
        memcpy(p.to, a->to + at, (size_t)n * sizeof *p.to);
        const dim3 grid((unsigned)(blocks < COPY_BLOCKS ? blocks : COPY_BLOCKS), (unsigned)n);
        copy_rows_kernel<T><<<grid, THREADS, 0, c->stream>>>(p);
        CU_LAUNCHED();
    }
    return 0;
}
int cuda_copy_rows(struct dev *d, const struct copy_rows_args *a) {
    const size_t bytes = (size_t)a->x.dim[1] * dtype_size(a->x.dt);
    if (aligned16(a->x.data) && bytes % 16 == 0) return copy_rows_any<uint4>(cuda_of(d), a, bytes);
    return copy_rows_any<uint16_t>(cuda_of(d), a, bytes);
}

/* ---- embedding, backward: the first row of each id adds up all rows of that id, in order, then adds the sum once ---- */

/* Of an id: how far its first row is from the end, and how many rows have it; zeros before. */
struct id_rows {
    int from_end, count;
};
/* The elements [lo, hi) of the table and the ids id0 to id1 that they belong to, of which `of` has the rows. */
struct embed_part {
    int64_t lo, hi, id0, id1;
};
static __global__ void note_kernel(struct id_rows *of, const int32_t *ids, int64_t rows, int64_t vocab, struct embed_part part) {
    const int64_t t = (int64_t)blockIdx.x * THREADS + threadIdx.x;
    if (t >= rows) return;
    const int64_t id = checked(ids, t, vocab);
    if (id < part.id0 || id > part.id1) return;
    struct id_rows *const mine = &of[id - part.id0];
    atomicMax(&mine->from_end, (int)(rows - t));
    atomicAdd(&mine->count, 1);
}

enum { EMBED_TILE = 4 * THREADS }; /* ids scanned between two barriers */

/* Positions of `mine` among ids[base, base + THREADS) that are behind t, into list in order; how many. */
static __device__ int matches(int32_t *list, int *counts, const int32_t *ids, int64_t base, int64_t t, int64_t rows, int32_t mine) {
    const int64_t r = base + threadIdx.x;
    const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5;
    const bool hit = r > t && r < rows && ids[r] == mine;
    const unsigned votes = __ballot_sync(WARP_ALL, hit);
    if (lane == 0) counts[warp] = __popc(votes);
    __syncthreads();
    int at = 0, total = 0;
    for (int i = 0; i < THREADS / 32; i++) {
        if (i < warp) at += counts[i];
        total += counts[i];
    }
    if (hit) list[at + __popc(votes & ((1u << lane) - 1))] = (int32_t)threadIdx.x;
    __syncthreads();
    return total;
}

/* grid (rows, blocks of THREADS columns x 4); thread: columns c, c + THREADS, ... of its block. */
static __global__ void __launch_bounds__(THREADS)
    embed_bwd_kernel(float *dw, const int32_t *ids, const float *dx, const struct id_rows *of, int64_t rows, int64_t vocab,
                     int64_t h, struct embed_part part) {
    enum { COLS = 4 };
    __shared__ int32_t list[THREADS];
    __shared__ int counts[THREADS / 32];
    const int64_t t = blockIdx.x, c0 = (int64_t)blockIdx.y * THREADS * COLS + threadIdx.x;
    const int32_t mine = (int32_t)checked(ids, t, vocab);
    if (mine < part.id0 || mine > part.id1 || rows - of[mine - part.id0].from_end != t) return; /* the whole block */
    int left = of[mine - part.id0].count - 1;
    const int64_t row = (int64_t)mine * h - part.lo, to = part.hi - part.lo - row < h ? part.hi - part.lo - row : h;
    float *out = dw + row, acc[COLS];
    bool has[COLS];
#pragma unroll
    for (int k = 0; k < COLS; k++) {
        has[k] = row + c0 + k * THREADS >= 0 && c0 + k * THREADS < to;
        acc[k] = has[k] ? __fadd_rn(0.0f, dx[t * h + c0 + k * THREADS]) : 0.0f;
    }
    for (int64_t base = t / EMBED_TILE * EMBED_TILE; left > 0 && base < rows; base += EMBED_TILE) {
        bool any = false;
        for (int64_t r = base + threadIdx.x; r < base + EMBED_TILE && r < rows; r += THREADS) any |= r > t && ids[r] == mine;
        if (!__syncthreads_or(any)) continue;
        for (int64_t sub = base; sub < base + EMBED_TILE; sub += THREADS) {
            const int n = matches(list, counts, ids, sub, t, rows, mine);
            left -= n;
#pragma unroll 4
            for (int i = 0; i < n; i++) {
                const float *const more = dx + (sub + list[i]) * h;
#pragma unroll
                for (int k = 0; k < COLS; k++)
                    if (has[k]) acc[k] = __fadd_rn(acc[k], more[c0 + k * THREADS]);
            }
            __syncthreads(); /* list and counts are read */
        }
    }
#pragma unroll
    for (int k = 0; k < COLS; k++)
        if (has[k]) out[c0 + k * THREADS] = __fadd_rn(out[c0 + k * THREADS], acc[k]);
}

static struct embed_part embed_part_of(int64_t lo, int64_t n, int64_t h) { return {lo, lo + n, lo / h, (lo + n - 1) / h}; }
size_t cuda_embed_bwd_table(int64_t lo, int64_t n, int64_t h) {
    const struct embed_part part = embed_part_of(lo, n, h);
    return (size_t)(part.id1 - part.id0 + 1) * sizeof(struct id_rows);
}

int cuda_embed_bwd_on(cudaStream_t s, void *table, const struct cuda_embed_bwd_args *a) {
    const int64_t rows = a->ids.dim[0], h = a->dx.dim[1];
    const struct embed_part part = embed_part_of(a->lo, a->dw.dim[0], h);
    const int32_t *const ids = (const int32_t *)a->ids.data;
    struct id_rows *const of = (struct id_rows *)table;
    CU_TRY(cudaMemsetAsync(of, 0, cuda_embed_bwd_table(a->lo, a->dw.dim[0], h), s));
    note_kernel<<<(unsigned)ceil_div(rows, THREADS), THREADS, 0, s>>>(of, ids, rows, a->vocab, part);
    CU_LAUNCHED();
    const dim3 grid((unsigned)rows, (unsigned)ceil_div(h, 4 * THREADS));
    embed_bwd_kernel<<<grid, THREADS, 0, s>>>((float *)a->dw.data, ids, (const float *)a->dx.data, of, rows, a->vocab, h, part);
    CU_LAUNCHED();
    return 0;
}
int cuda_embed_bwd(struct dev *d, struct tensor dw, int64_t lo, int64_t vocab, struct tensor ids, struct tensor dx) {
    void *table;
    TRY(cuda_scratch(cuda_of(d), CUDA_SCRATCH_ROW, cuda_embed_bwd_table(lo, dw.dim[0], dx.dim[1]), &table));
    const struct cuda_embed_bwd_args a = {dw, lo, vocab, ids, dx};
    return cuda_embed_bwd_on(cuda_of(d)->stream, table, &a);
}

/* ---- SwiGLU (Shazeer 2020): silu(g) * u, silu(g) = g * sigmoid(g); with GELU in the place of silu, GeGLU ---- */

/* Blocks of a row follow each other. */
template <bool GELU, typename T, bool VEC>
static __global__ void swiglu_fwd_kernel(T *y, const T *gate_up, int64_t f, unsigned per_row) {
    const unsigned block = cuda_block_reversed();
    const int64_t t = block / per_row, c = ((int64_t)(block % per_row) * blockDim.x + threadIdx.x) * CHUNK;
    pdl_launch_dependents();
    pdl_wait();
    if (c >= f) return;
    const int n = f - c < CHUNK ? (int)(f - c) : CHUNK;
    float g[CHUNK], u[CHUNK];
    load8<VEC>(g, gate_up + t * 2 * f + c, n);
    load8<VEC>(u, gate_up + t * 2 * f + f + c, n);
#pragma unroll
    for (int i = 0; i < CHUNK; i++) g[i] = GELU ? geglu(g[i], u[i]) : swiglu(g[i], u[i]);
    store8<VEC>(y + t * f + c, g, n);
}
template <bool GELU, typename T, bool VEC>
static __global__ void swiglu_bwd_kernel(T *dgate_up, const T *dy, const T *gate_up, int64_t f, unsigned per_row) {
    const unsigned block = cuda_block_reversed();
    const int64_t t = block / per_row, c = ((int64_t)(block % per_row) * blockDim.x + threadIdx.x) * CHUNK, at = t * 2 * f + c;
    pdl_launch_dependents();
    pdl_wait();
    if (c >= f) return;
    const int n = f - c < CHUNK ? (int)(f - c) : CHUNK;
    float g[CHUNK], u[CHUNK], dv[CHUNK];
    load8<VEC>(g, gate_up + at, n);
    load8<VEC>(u, gate_up + at + f, n);
    load8<VEC>(dv, dy + t * f + c, n);
#pragma unroll
    for (int i = 0; i < CHUNK; i++) {
        const float s = GELU ? gelu_sigmoid(g[i]) : sigmoid(g[i]);
        float slope;
        if (GELU) {
            const float du = __fmul_rn(GELU_K, __fmaf_rn(__fmul_rn(3 * 0.044715f, g[i]), g[i], 1.0f));
            slope = __fmul_rn(s, __fmaf_rn(__fmul_rn(g[i], __fsub_rn(1.0f, s)), du, 1.0f));
        } else slope = __fmul_rn(s, __fmaf_rn(g[i], __fsub_rn(1.0f, s), 1.0f));
        const float dg = __fmul_rn(__fmul_rn(dv[i], u[i]), slope), du = __fmul_rn(__fmul_rn(dv[i], g[i]), s);
        g[i] = dg;
        u[i] = du;
    }
    store8<VEC>(dgate_up + at, g, n);
    store8<VEC>(dgate_up + at + f, u, n);
}

template <bool GELU, typename T> static int swiglu_fwd_any(struct cuda *c, struct tensor y, struct tensor gate_up) {
    const int64_t f = y.dim[1], chunks = ceil_div(f, CHUNK);
    const int threads = warps_for(chunks, 128);
    const unsigned per_row = (unsigned)ceil_div(chunks, threads), grid = (unsigned)y.dim[0] * per_row;
    T *out = (T *)y.data;
    const T *in = (const T *)gate_up.data;
    if (f % CHUNK == 0 && aligned16(out) && aligned16(in))
        CU_TRY(cuda_launch_pdl(c, swiglu_fwd_kernel<GELU, T, true>, grid, threads, 0, out, in, f, per_row));
    else CU_TRY(cuda_launch_pdl(c, swiglu_fwd_kernel<GELU, T, false>, grid, threads, 0, out, in, f, per_row));
    return 0;
}
int cuda_swiglu(struct cuda *c, struct tensor y, struct tensor gate_up) {
    return y.dt == DT_BF16 ? swiglu_fwd_any<false, bf16>(c, y, gate_up) : swiglu_fwd_any<false, float>(c, y, gate_up);
}
int cuda_geglu_fwd(struct dev *d, struct tensor y, struct tensor gate_up) {
    return y.dt == DT_BF16 ? swiglu_fwd_any<true, bf16>(cuda_of(d), y, gate_up)
                           : swiglu_fwd_any<true, float>(cuda_of(d), y, gate_up);
}
int cuda_swiglu_fwd(struct dev *d, struct tensor y, struct tensor gate_up) { return cuda_swiglu(cuda_of(d), y, gate_up); }

template <bool GELU, typename T>
static int swiglu_bwd_any(struct cuda *c, struct tensor dgate_up, struct tensor dy, struct tensor gate_up) {
    const int64_t f = dy.dim[1], chunks = ceil_div(f, CHUNK);
    const int threads = warps_for(chunks, 128);
    const unsigned per_row = (unsigned)ceil_div(chunks, threads), grid = (unsigned)dy.dim[0] * per_row;
    T *out = (T *)dgate_up.data;
    const T *in = (const T *)gate_up.data, *g = (const T *)dy.data;
    if (f % CHUNK == 0 && aligned16(out) && aligned16(in) && aligned16(g))
        CU_TRY(cuda_launch_pdl(c, swiglu_bwd_kernel<GELU, T, true>, grid, threads, 0, out, g, in, f, per_row));
    else CU_TRY(cuda_launch_pdl(c, swiglu_bwd_kernel<GELU, T, false>, grid, threads, 0, out, g, in, f, per_row));
    return 0;
}
int cuda_swiglu_bwd(struct dev *d, struct tensor dgate_up, struct tensor dy, struct tensor gate_up) {
    return dy.dt == DT_BF16 ? swiglu_bwd_any<false, bf16>(cuda_of(d), dgate_up, dy, gate_up)
                            : swiglu_bwd_any<false, float>(cuda_of(d), dgate_up, dy, gate_up);
}
int cuda_geglu_bwd(struct dev *d, struct tensor dgate_up, struct tensor dy, struct tensor gate_up) {
    return dy.dt == DT_BF16 ? swiglu_bwd_any<true, bf16>(cuda_of(d), dgate_up, dy, gate_up)
                            : swiglu_bwd_any<true, float>(cuda_of(d), dgate_up, dy, gate_up);
}

/* ---- sums of squares ---- */

/* Sum over the block in double, for thread 0. */
static __device__ double block_sum_f64(double v) {
    __shared__ double sh[THREADS];
    sh[threadIdx.x] = v;
    __syncthreads();
    for (int o = THREADS / 2; o > 0; o >>= 1) {
        if ((int)threadIdx.x < o) sh[threadIdx.x] += sh[threadIdx.x + o];
        __syncthreads();
    }
    return sh[0];
}

/* A block a segment; elements are dealt by their place in it. */
static __global__ void __launch_bounds__(THREADS)
    sumsq_kernel(double *sums, const float *x, int64_t n_x, const int64_t *segments, int64_t base) {
    const int64_t at = segments[2 * blockIdx.x] - base, n = segments[2 * blockIdx.x + 1];
    if (at < 0 || n < 1 || n > DEV_SEGMENT || at + n > n_x) __trap();
    const float *const from = x + at;
    const bool wide = aligned16(from);
    double s[2] = {0, 0}; /* of even and odd elements of a chunk: two chains of additions */
    for (int64_t i = (int64_t)threadIdx.x * CHUNK; i < n; i += THREADS * CHUNK) {
        float v[CHUNK];
        if (wide && n - i >= CHUNK) load8<true>(v, from + i, CHUNK);
        else load8<false>(v, from + i, n - i < CHUNK ? (int)(n - i) : CHUNK);
#pragma unroll
        for (int k = 0; k < CHUNK; k++) s[k & 1] = fma((double)v[k], (double)v[k], s[k & 1]);
    }
    const double sum = block_sum_f64(s[0] + s[1]);
    if (threadIdx.x == 0) sums[blockIdx.x] = sum;
}

int cuda_sumsq(struct dev *d, struct tensor sums, struct tensor x, struct tensor segments, int64_t base) {
    sumsq_kernel<<<(unsigned)segments.dim[0], THREADS, 0, cuda_of(d)->stream>>>((double *)sums.data, (const float *)x.data,
                                                                                x.dim[0], (const int64_t *)segments.data, base);
    CU_LAUNCHED();
    return 0;
}

/* ---- checksums ---- */

enum { CHECKSUM_BLOCKS = 2048 };

/* Whole numbers: the order of the additions does not matter. tail: bytes behind the last whole word. */
static __global__ void __launch_bounds__(THREADS)
    checksum_kernel(unsigned long long *sum, const uint64_t *words, int64_t n, const uint8_t *tail, int n_tail) {
    const int64_t first = (int64_t)blockIdx.x * THREADS + threadIdx.x;
    uint64_t s = 0;
    for (int64_t i = first; i < n; i += (int64_t)gridDim.x * THREADS) s += dev_checksum_word(words[i], i);
    if (first == 0 && n_tail > 0) {
        uint64_t w = 0;
        for (int k = 0; k < n_tail; k++) w |= (uint64_t)tail[k] << (8 * k);
        s += dev_checksum_word(w, n);
    }
    for (int o = 16; o > 0; o >>= 1) s += __shfl_down_sync(0xffffffffu, s, o);
    if (threadIdx.x % 32 == 0) atomicAdd(sum, (unsigned long long)s);
}

int cuda_checksum(struct dev *d, struct tensor sum, struct tensor bytes) {
    const int64_t n = bytes.dim[0] / 8, blocks = (n + THREADS - 1) / THREADS;
    const uint8_t *const p = (const uint8_t *)bytes.data;
    const unsigned grid = (unsigned)(blocks < 1 ? 1 : blocks < CHECKSUM_BLOCKS ? blocks : (int64_t)CHECKSUM_BLOCKS);
    if ((uintptr_t)p % 8) FAIL(ERR_UNSUPPORTED, "checksum: memory that does not begin at a multiple of 8 bytes");
    CU_TRY(cudaMemsetAsync(sum.data, 0, 8, cuda_of(d)->stream));
    checksum_kernel<<<grid, THREADS, 0, cuda_of(d)->stream>>>((unsigned long long *)sum.data, (const uint64_t *)bytes.data, n,
                                                              p + 8 * n, (int)(bytes.dim[0] % 8));
    CU_LAUNCHED();
    return 0;
}

/* ---- ordered sums ---- */

enum { FOLD_ARRAYS = 16 }; /* of a launch */
struct fold_arrays {
    const float *x[FOLD_ARRAYS];
    int n;
};

template <bool VEC>
static __global__ void __launch_bounds__(THREADS) fold_kernel(float *y, const fold_arrays a, int64_t count, bool add) {
    const int64_t i = ((int64_t)blockIdx.x * THREADS + threadIdx.x) * CHUNK;
    if (i >= count) return;
    const int left = count - i < CHUNK ? (int)(count - i) : CHUNK;
    const bool whole = VEC && left == CHUNK;
    float sum[CHUNK], v[CHUNK];
    const float *const first = add ? y : a.x[0];
    if (whole) load8<true>(sum, first + i, CHUNK);
    else load8<false>(sum, first + i, left);
    for (int k = add ? 0 : 1; k < a.n; k++) {
        if (whole) load8<true>(v, a.x[k] + i, CHUNK);
        else load8<false>(v, a.x[k] + i, left);
#pragma unroll
        for (int c = 0; c < CHUNK; c++) sum[c] = __fadd_rn(sum[c], v[c]);
    }
    if (whole) store8<true>(y + i, sum, CHUNK);
    else store8<false>(y + i, sum, left);
}

int cuda_fold(struct dev *d, struct tensor y, const struct tensor *x, int n, bool add) {
    return cuda_fold_on(cuda_of(d)->stream, y, x, n, add);
}
int cuda_fold_on(cudaStream_t s, struct tensor y, const struct tensor *x, int n, bool add) {
    const int64_t count = tensor_count(y);
    const unsigned blocks = (unsigned)ceil_div(count, THREADS * CHUNK);
    for (int lo = 0; lo < n; lo += FOLD_ARRAYS) {
        fold_arrays a = {};
        bool wide = aligned16(y.data);
        for (a.n = 0; a.n < FOLD_ARRAYS && lo + a.n < n; a.n++) {
            a.x[a.n] = (const float *)x[lo + a.n].data;
            wide = wide && aligned16(a.x[a.n]);
        }
        if (wide) fold_kernel<true><<<blocks, THREADS, 0, s>>>((float *)y.data, a, count, add || lo > 0);
        else fold_kernel<false><<<blocks, THREADS, 0, s>>>((float *)y.data, a, count, add || lo > 0);
        CU_LAUNCHED();
    }
    return 0;
}

/* The driver may load a kernel at its first launch, and waits there until every stream of the GPU has come to its end. */
int cuda_load_group_kernels(void) {
    cudaFuncAttributes a;
    CU_TRY(cudaFuncGetAttributes(&a, fold_kernel<true>));
    CU_TRY(cudaFuncGetAttributes(&a, fold_kernel<false>));
    CU_TRY(cudaFuncGetAttributes(&a, note_kernel));
    CU_TRY(cudaFuncGetAttributes(&a, embed_bwd_kernel));
    return 0;
}

/* ---- AdamW: Loshchilov & Hutter (2019), in torch.optim.AdamW's order of f32 operations ---- */

static __device__ __forceinline__ void store4(float *to, const float (&v)[4]) {
    *(float4 *)to = make_float4(v[0], v[1], v[2], v[3]);
}
static __device__ __forceinline__ void store4(bf16 *to, const float (&v)[4]) {
    alignas(8) const __nv_bfloat162 b[2] = {__floats2bfloat162_rn(v[0], v[1]), __floats2bfloat162_rn(v[2], v[3])};
    *(uint2 *)to = *(const uint2 *)b;
}

struct adamw_scalars {
    float scale, keep, one_b1, b2, one_b2, eps, step_size, root_bias2;
};

/* Every rounding is spelled out, so that the bits are ref's. */
static __device__ __forceinline__ void adamw_one(float &p, float &m, float &v, float grad, const adamw_scalars &a) {
    const float g = __fmul_rn(grad, a.scale);
    m = __fadd_rn(m, __fmul_rn(a.one_b1, __fsub_rn(g, m)));
    v = __fadd_rn(__fmul_rn(v, a.b2), __fmul_rn(__fmul_rn(a.one_b2, g), g));
    const float root = __fadd_rn(__fdiv_rn(__fsqrt_rn(v), a.root_bias2), a.eps);
    p = __fsub_rn(__fmul_rn(p, a.keep), __fdiv_rn(__fmul_rn(a.step_size, m), root));
}

/* rounded: of p; NULL: not wanted. */
template <bool VEC, typename T>
static __global__ void __launch_bounds__(THREADS)
    adamw_kernel(float *p, float *m, float *v, const float *g, T *rounded, int64_t n, adamw_scalars a) {
    const int64_t i = ((int64_t)blockIdx.x * THREADS + threadIdx.x) * 4;
    if (i >= n) return;
    if (VEC && i + 4 <= n) {
        float4 p4 = *(float4 *)(p + i), m4 = *(float4 *)(m + i), v4 = *(float4 *)(v + i);
        const float4 g4 = *(const float4 *)(g + i);
        adamw_one(p4.x, m4.x, v4.x, g4.x, a);
        adamw_one(p4.y, m4.y, v4.y, g4.y, a);
        adamw_one(p4.z, m4.z, v4.z, g4.z, a);
        adamw_one(p4.w, m4.w, v4.w, g4.w, a);
        *(float4 *)(p + i) = p4;
        if (rounded) {
            const float to[4] = {p4.x, p4.y, p4.z, p4.w};
            store4(rounded + i, to);
        }
        *(float4 *)(m + i) = m4;
        *(float4 *)(v + i) = v4;
    } else {
        for (int64_t k = i; k < i + 4 && k < n; k++) {
            adamw_one(p[k], m[k], v[k], g[k], a);
            if (rounded) store8<false>(rounded + k, p + k, 1);
        }
    }
}

template <typename T> static int adamw_any(struct cuda *c, const struct adamw_args *a, T *rounded) {
    const double t = (double)a->step; /* scalars are formed in double and rounded once */
    adamw_scalars s;
    s.scale = a->grad_scale;
    s.keep = (float)(1.0 - a->lr * a->weight_decay);
    s.one_b1 = (float)(1.0 - a->beta1);
    s.b2 = (float)a->beta2;
    s.one_b2 = (float)(1.0 - a->beta2);
    s.eps = (float)a->eps;
    s.step_size = (float)(a->lr / (1.0 - pow(a->beta1, t)));
    s.root_bias2 = (float)sqrt(1.0 - pow(a->beta2, t));
    float *p = (float *)a->p.data, *m = (float *)a->m.data, *v = (float *)a->v.data;
    const float *g = (const float *)a->g.data;
    const int64_t n = tensor_count(a->p);
    const unsigned blocks = (unsigned)ceil_div(n, THREADS * 4);
    if (aligned16(p) && aligned16(m) && aligned16(v) && aligned16(g) && aligned16(rounded))
        adamw_kernel<true><<<blocks, THREADS, 0, c->stream>>>(p, m, v, g, rounded, n, s);
    else adamw_kernel<false><<<blocks, THREADS, 0, c->stream>>>(p, m, v, g, rounded, n, s);
    CU_LAUNCHED();
    return 0;
}
int cuda_adamw(struct dev *d, const struct adamw_args *a) { return adamw_any<float>(cuda_of(d), a, NULL); }
int cuda_adamw_round(struct dev *d, const struct adamw_args *a, struct tensor rounded) {
    return rounded.dt == DT_BF16 ? adamw_any<bf16>(cuda_of(d), a, (bf16 *)rounded.data)
                                 : adamw_any<float>(cuda_of(d), a, (float *)rounded.data);
}
