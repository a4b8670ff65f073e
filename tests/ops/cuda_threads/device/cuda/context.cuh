/* context.cuh - of the backend's context what kernels and their launches use. */
#ifndef VERLC_TESTS_CUDA_THREADS_CONTEXT_CUH
#define VERLC_TESTS_CUDA_THREADS_CONTEXT_CUH

#include "base/err.h"
#include "device/cuda/gemm/gemm_args.h"
#include "device/cuda/ptx.cuh"
#include "device/cuda/scratch_sizes.h"
#include "device/device.h"

#include <cuda_bf16.h>
#include <cuda_runtime.h>
#include <string.h>

enum cuda_checked { CUDA_UNCHECKED, CUDA_SAME, CUDA_DIFFERS };
struct cuda_gemm;
struct cuda {
    int n_sm;
    size_t smem_max;
    bool capturing;
    enum cuda_checked grouped;
    cudaStream_t stream;
    struct cuda_gemm *gemm;
    void *scratch[CUDA_N_SCRATCH];
};
static inline struct cuda *cuda_of(struct dev *d) { return (struct cuda *)d->ctx; }
static inline bool cuda_hopper(const struct cuda *c) { return c->smem_max >= 227 << 10; }
#define CU_TRY(call)                                                                          \
    do {                                                                                      \
        const cudaError_t cu_e_ = (call);                                                     \
        if (cu_e_ != cudaSuccess) FAIL(ERR_DEVICE, "%s failed with %d", #call, (int)(cu_e_)); \
    } while (0)
#define CU_LAUNCHED() CU_TRY(cudaGetLastError())
int cuda_scratch(struct cuda *c, enum cuda_scratch_id id, size_t bytes, void **out);
template <class... P, class... A>
static inline cudaError_t cuda_launch_plain(const struct cuda *c, void (*kernel)(P...), dim3 grid, int threads, size_t smem,
                                            A... args) {
    (void)c;
    threads_run(grid, (unsigned)threads, smem, [&] { kernel(static_cast<P>(args)...); });
    return cudaSuccess;
}
template <class... P, class... A>
static inline cudaError_t cuda_launch_pdl(const struct cuda *c, void (*kernel)(P...), dim3 grid, int threads, size_t smem,
                                          A... args) {
    return cuda_launch_plain(c, kernel, grid, threads, smem, args...);
}
template <class... P, class... A>
static inline cudaError_t cuda_launch(const struct cuda *c, void (*kernel)(P...), dim3 grid, int threads, size_t smem, A... args) {
    return cuda_launch_plain(c, kernel, grid, threads, smem, args...);
}
template <class... P, class... A>
static inline cudaError_t cuda_launch_pairs(const struct cuda *c, void (*kernel)(P...), dim3 grid, int threads, size_t smem,
                                            A... args) {
    (void)c;
    threads_run(
        grid, (unsigned)threads, smem, [&] { kernel(static_cast<P>(args)...); }, 2);
    return cudaSuccess;
}
bool cuda_keeps_logits(struct dev *d, struct weight w); /* lm_head.cu */
int cuda_score_route_fwd(struct dev *d, const struct route_args *a);
int cuda_score_route_bwd(struct dev *d, const struct route_args *a, struct tensor dlogits, struct tensor dweight);
int cuda_add_parts(struct cuda *c, float *out, const float *part, int64_t n, int64_t stride, int64_t cols);

#define OP(name, ...) int cuda_##name(struct dev *d, __VA_ARGS__);
#define OP_FUSED OP
#include "device/ops.def"

#endif
