/* lora.cu - the CUDA backend's op for LoRA adapters: a block of one matrix added to a block of another.
 *
 * Grid: one thread a column, rows along y.  Bound by memory.
 * Invariant: each element is computed alone, in the order of roundings of device/ref/ref.c. */
#include "device/cuda/vec.cuh"

enum { THREADS = 256, MAX_GRID_Y = 65535 };

static __global__ void __launch_bounds__(THREADS)
    add_block_kernel(float *dst, int64_t ld_dst, const float *src, int64_t ld_src, int64_t rows, int64_t cols, float scale) {
    const int64_t j = (int64_t)blockIdx.x * THREADS + threadIdx.x;
    if (j >= cols) return;
    for (int64_t i = blockIdx.y; i < rows; i += gridDim.y)
        dst[i * ld_dst + j] = __fadd_rn(dst[i * ld_dst + j], __fmul_rn(scale, src[i * ld_src + j]));
}

int cuda_add_block(struct dev *d, const struct add_block_args *a) {
    const int64_t ld_dst = a->dst.dim[1], ld_src = a->src.dim[1];
    const int64_t high = a->rows < (int64_t)MAX_GRID_Y ? a->rows : (int64_t)MAX_GRID_Y;
    const dim3 grid((unsigned)ceil_div(a->cols, THREADS), (unsigned)high);
    float *dst = (float *)a->dst.data + a->dst_row * ld_dst + a->dst_col;
    const float *src = (const float *)a->src.data + a->src_row * ld_src + a->src_col;
    add_block_kernel<<<grid, THREADS, 0, cuda_of(d)->stream>>>(dst, ld_dst, src, ld_src, a->rows, a->cols, a->scale);
    CU_LAUNCHED();
    return 0;
}
