/* dequantize.cu - the CUDA backend's dequantization of NF4 and INT8 weights.
 *
 * Grid: one thread a byte of codes.  Bound by memory.
 * Invariant: each element is computed alone, in the order of roundings of device/ref/ref.c. */
#include "device/cuda/vec.cuh"

enum { THREADS = 256 };

static __device__ __forceinline__ void put(float *w, int64_t i, float v) { w[i] = v; }
static __device__ __forceinline__ void put(__nv_bfloat16 *w, int64_t i, float v) { w[i] = __float2bfloat16_rn(v); }

struct book {
    float v[16];
};

/* A thread turns one byte into two neighbours of the flat matrix. */
template <typename T>
static __global__ void __launch_bounds__(THREADS)
    nf4_kernel(T *w, const uint8_t *code, const float *scale, int64_t n, struct book book) {
    __shared__ float value[16];
    if (threadIdx.x < 16) value[threadIdx.x] = book.v[threadIdx.x];
    __syncthreads();
    const int64_t at = (int64_t)blockIdx.x * THREADS + threadIdx.x, i = 2 * at;
    if (i >= n) return;
    const float s = scale[i / DEV_NF4_BLOCK];
    put(w, i, __fmul_rn(value[code[at] >> 4], s));
    if (i + 1 < n) put(w, i + 1, __fmul_rn(value[code[at] & 15], s));
}

template <typename T>
static __global__ void __launch_bounds__(THREADS) int8_kernel(T *w, const int8_t *code, const float *scale, int64_t n, int64_t k) {
    const int64_t i = (int64_t)blockIdx.x * THREADS + threadIdx.x;
    if (i < n) put(w, i, __fdiv_rn(__fmul_rn((float)code[i], scale[i / k]), 127.0f));
}

template <typename T> static int dequant(struct dev *d, const struct dequant_args *a) {
    const int64_t n = tensor_count(a->w), work = a->kind == QUANT_NF4 ? (n + 1) / 2 : n;
    const unsigned blocks = (unsigned)ceil_div(work, THREADS);
    cudaStream_t stream = cuda_of(d)->stream;
    T *w = (T *)a->w.data;
    if (a->kind == QUANT_NF4) {
        struct book book;
        for (int i = 0; i < 16; i++) book.v[i] = dev_nf4_book[i];
        nf4_kernel<T><<<blocks, THREADS, 0, stream>>>(w, (const uint8_t *)a->code.data, (const float *)a->scale.data, n, book);
    } else {
        int8_kernel<T>
            <<<blocks, THREADS, 0, stream>>>(w, (const int8_t *)a->code.data, (const float *)a->scale.data, n, a->w.dim[1]);
    }
    CU_LAUNCHED();
    return 0;
}

int cuda_dequant(struct dev *d, const struct dequant_args *a) {
    return a->w.dt == DT_BF16 ? dequant<__nv_bfloat16>(d, a) : dequant<float>(d, a);
}
