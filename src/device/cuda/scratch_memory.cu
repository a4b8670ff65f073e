/* scratch_memory.cu - reserves the scratch buffers of a run of given sizes (scratch_sizes.h) before it.
 *
 * A buffer that an op outgrows grows all the same: that is counted (struct dev_memory), and tests/inv
 * checks that the count stays.
 * Invariant: cuda_working_bytes counts what cuda_reserve takes. */
#include "device/cuda/gemm/gemm.cuh"
#include "device/cuda/lm_head/log_softmax.cuh"
#include "device/cuda/scratch_sizes.h"

static struct cuda_shape shape_of(const struct cuda *c, const struct dev_sizes *s) {
    int l2 = 0;
    struct cuda_shape gpu = {c->n_sm, 0, s->act == DT_BF16 ? cuda_head_check_bytes(s->hidden, s->vocab) : 0};
    if (cudaDeviceGetAttribute(&l2, cudaDevAttrL2CacheSize, c->index) == cudaSuccess) gpu.l2_bytes = (size_t)l2;
    return gpu;
}

size_t cuda_working_bytes(struct dev *d, const struct dev_sizes *s) {
    const struct cuda_shape gpu = shape_of(cuda_of(d), s);
    return cuda_scratch_sum(&gpu, s);
}

int cuda_reserve(struct dev *d, const struct dev_sizes *s) {
    const struct cuda_shape gpu = shape_of(cuda_of(d), s);
    size_t bytes[CUDA_N_SCRATCH];
    void *p;
    cuda_scratch_sizes(&gpu, s, bytes);
    for (int i = 0; i < CUDA_N_SCRATCH; i++)
        if (bytes[i]) TRY(cuda_scratch(cuda_of(d), (enum cuda_scratch_id)i, cuda_scratch_round(bytes[i]), &p));
    return 0;
}
