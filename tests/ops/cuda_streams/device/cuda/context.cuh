/* context.cuh - of the backend's context what groups use, with buffers so small that a fold has many pieces. */
#ifndef VERLC_TESTS_CUDA_STREAMS_CONTEXT_CUH
#define VERLC_TESTS_CUDA_STREAMS_CONTEXT_CUH

#include "base/err.h"
#include "device/device.h"

#include <cuda_runtime.h>
#include <stdlib.h>
#include <string.h>

enum { CUDA_PEER_HALF = 32 << 10, CUDA_PEER_FLAGS = 4096, CUDA_PEER_ROWS = 256 };
enum { CUDA_GATHER_BLOCKS = 13, CUDA_GATHER_THREADS = 1, CUDA_GATHER_LINES = 3 };
enum { CUDA_GATHER_SLOTS = 2 * CUDA_GATHER_BLOCKS * CUDA_GATHER_THREADS * CUDA_GATHER_LINES * 16 };
enum { CUDA_NCCL_SLOT = 16 << 10, CUDA_NCCL_IDS = 256, CUDA_NCCL_TABLE = 64 };
static inline size_t cuda_peer_bytes(void) { return 2 * (size_t)CUDA_PEER_HALF; }
static inline size_t cuda_nccl_slot(int size) { return (void)size, (size_t)CUDA_NCCL_SLOT; }
static inline size_t cuda_nccl_staging(int size) { return (size_t)(size - 1) * CUDA_NCCL_SLOT / 2 * 5; }
static inline size_t cuda_nccl_bytes(int size) { return cuda_nccl_staging(size); }

struct cuda {
    int index;
    cudaStream_t stream;
    size_t held;
    struct cuda_peer_streams *peer_streams;
    struct nccl *nccl;
};
static inline struct cuda *cuda_of(struct dev *d) { return (struct cuda *)d->ctx; }
#define CU_TRY(call)                                                                          \
    do {                                                                                      \
        const cudaError_t cu_e_ = (call);                                                     \
        if (cu_e_ != cudaSuccess) FAIL(ERR_DEVICE, "%s failed with %d", #call, (int)(cu_e_)); \
    } while (0)

/* What kernels use. */
static inline void pdl_launch_dependents(void) {}
static inline void pdl_wait(void) {}
static inline float __uint_as_float(uint32_t v) {
    float f;
    return memcpy(&f, &v, sizeof f), f;
}
static inline uint32_t __float_as_uint(float f) {
    uint32_t v;
    return memcpy(&v, &f, sizeof v), v;
}
static inline float __fadd_rn(float a, float b) { return a + b; }
template <class A>
static inline cudaError_t cuda_launch_pdl(const struct cuda *c, void (*kernel)(A), dim3 grid, int threads, size_t, A a) {
    const cudaLaunchConfig_t config = {grid, dim3((unsigned)threads), c->stream};
    return cudaLaunchKernelEx(&config, kernel, a);
}

int cuda_driver_entry(const char *name, void **f);
int cuda_hold(struct cuda *c, size_t bytes, void **out);
int cuda_drop(struct cuda *c, void *p, size_t bytes);
size_t cuda_embed_bwd_table(int64_t lo, int64_t n, int64_t h);
struct cuda_embed_bwd_args {
    struct tensor dw;
    int64_t lo, vocab;
    struct tensor ids, dx;
};
int cuda_embed_bwd_on(cudaStream_t s, void *table, const struct cuda_embed_bwd_args *a);
int cuda_load_group_kernels(void);
int cuda_fold_on(cudaStream_t s, struct tensor y, const struct tensor *x, int n, bool add);
static inline int cuda_stamp_on(struct cuda *c, cudaStream_t s, int64_t i) { return (void)c, (void)s, (void)i, 0; }

extern const struct dev_peer_ops cuda_peers;
extern const struct dev_nccl_ops cuda_nccl_ops;

#endif
