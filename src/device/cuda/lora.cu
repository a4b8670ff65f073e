/* lora.cu - the CUDA backend's op for LoRA adapters: a block of one matrix, or of those of a stack, added to a block of another.
 *
 * Grid: columns along x, rows along y, matrices of the stack along z. Of a block's threads 2^shift are along columns, which for
 * the few of a B (its rank) leaves the others to further rows. Bound by memory.
 * Invariant: each element is computed alone, in the order of roundings of device/ref/ref.c. */
#include "device/cuda/vec.cuh"

enum { THREADS = 256, MAX_SHIFT = 8 /* 2^8 = THREADS */, MAX_GRID = 65535 };

struct block {
    float *dst;
    const float *src;
    int64_t ld_dst, ld_src, dst_next, src_next, rows, cols, count;
    float scale;
    int shift;
};

static __global__ void __launch_bounds__(THREADS) add_block_kernel(const struct block b) {
    const int64_t j = ((int64_t)blockIdx.x << b.shift) + (threadIdx.x & ((1u << b.shift) - 1));
    const int64_t high = THREADS >> b.shift, first = blockIdx.y * high + (threadIdx.x >> b.shift);
    if (j >= b.cols) return;
    for (int64_t n = blockIdx.z; n < b.count; n += gridDim.z) {
        float *const dst = b.dst + n * b.dst_next + j;
        const float *const src = b.src + n * b.src_next + j;
        for (int64_t i = first; i < b.rows; i += gridDim.y * high)
            dst[i * b.ld_dst] = __fadd_rn(dst[i * b.ld_dst], __fmul_rn(b.scale, src[i * b.ld_src]));
    }
}

int cuda_add_block(struct dev *d, const struct add_block_args *a) {
    struct block b = {};
    b.ld_dst = a->dst.dim[1];
    b.ld_src = a->src.dim[1];
    b.dst = (float *)a->dst.data + a->dst_row * b.ld_dst + a->dst_col;
    b.src = (const float *)a->src.data + a->src_row * b.ld_src + a->src_col;
    b.dst_next = a->dst_next;
    b.src_next = a->src_next;
    b.rows = a->rows;
    b.cols = a->cols;
    b.count = a->count;
    b.scale = a->scale;
    while (b.shift < MAX_SHIFT && ((int64_t)1 << b.shift) < b.cols) b.shift++;
    const int64_t high = ceil_div(b.rows, THREADS >> b.shift);
    const dim3 grid((unsigned)ceil_div(b.cols, (int64_t)1 << b.shift), (unsigned)(high < MAX_GRID ? high : MAX_GRID),
                    (unsigned)(b.count < MAX_GRID ? b.count : MAX_GRID));
    CU_TRY(cuda_launch_plain(cuda_of(d), add_block_kernel, grid, THREADS, 0, b));
    return 0;
}
