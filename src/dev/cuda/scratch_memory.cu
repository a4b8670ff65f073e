/* scratch_memory.cu - how much device memory the backend needs for its ops in a run of given
 * sizes, and taking it before the run.
 *
 * The sizes are scratch_sizes.h's.  A slot that an op outgrows grows all the same: that is
 * counted (struct dev_memory), and tests/inv holds the count still.
 * Invariant: cuda_working_bytes counts what cuda_reserve takes. */
#include "dev/cuda/gemm/gemm.cuh"
#include "dev/cuda/lm_head/log_softmax.cuh"
#include "dev/cuda/scratch_sizes.h"

static_assert(sizeof(head_sum) == CUDA_HEAD_SUM && (int)HEAD_GROUP == (int)CUDA_HEAD_GROUP && (int)HEAD_TILE == (int)CUDA_HEAD_TILE,
              "scratch_sizes.h knows the head's parts");

static struct cuda_shape shape_of(const struct cuda *c, const struct dev_sizes *s) {
    int l2 = 0;
    struct cuda_shape gpu = {c->n_sm, 0, s->act == DT_BF16 ? cuda_head_try_bytes(s->hidden, s->vocab) : 0};
    if (cudaDeviceGetAttribute(&l2, cudaDevAttrL2CacheSize, c->index) == cudaSuccess) gpu.l2_bytes = (size_t)l2;
    return gpu;
}

size_t cuda_working_bytes(struct dev *d, const struct dev_sizes *s) {
    const struct cuda_shape gpu = shape_of(cuda_of(d), s);
    return cuda_sizes_sum(&gpu, s);
}

int cuda_reserve(struct dev *d, const struct dev_sizes *s) {
    const struct cuda_shape gpu = shape_of(cuda_of(d), s);
    size_t bytes[CUDA_N_SLOTS];
    void *p;
    cuda_slot_bytes(&gpu, s, bytes);
    for (int i = 0; i < CUDA_N_SLOTS; i++)
        if (bytes[i]) TRY(cuda_scratch(cuda_of(d), (enum cuda_slot)i, cuda_slot_round(bytes[i]), &p));
    return 0;
}
