/* context.cuh - what the files of the CUDA backend share: the context, error checks, launches, scratch memory,
 * the GEMM entry and the list of ops.
 *
 * The backend is one shared object (libverlc_cuda.so) that src/device/open.c opens at
 * run time.  It links the CUDA runtime statically; cuBLASLt is opened at run time
 * (cublaslt_open.cu), so that a machine without it still gets a clear message.  Errors
 * go through err_set of the program that opened it.
 *
 * Invariant: every op queues its kernels on the compute stream and returns; none waits, allocates or
 * reads back, but those that device.h says wait and those that grow a scratch buffer or autotune.  So ops can be captured
 * in a CUDA graph once they have run before at that size. */
#ifndef VERLC_DEV_CUDA_CONTEXT_CUH
#define VERLC_DEV_CUDA_CONTEXT_CUH

#include "base/err.h"
#include "device/cuda/gemm/gemm_args.h"
#include "device/cuda/ptx.cuh"
#include "device/cuda/scratch_sizes.h"
#include "device/device.h"

#include <cuda_bf16.h>
#include <cuda_runtime.h>
#include <string.h>

enum { CUDA_MAX_HEADS = 64 };

struct cuda_offload;      /* pinned host memory and copy streams: host_offload.cu */
struct cuda_gemm;         /* GEMM plans and cuBLASLt's handle: device/cuda/gemm/gemm.cu */
struct cuda_peer_streams; /* of groups: peers.cu */
struct nccl;              /* a group: nccl.cu */

enum cuda_checked { CUDA_UNCHECKED, CUDA_SAME, CUDA_DIFFERS };

struct cuda {
    int index;           /* device number */
    int n_sm, cc;        /* multiprocessors; compute capability, 90 for sm_90 */
    size_t smem_max;     /* bytes of shared memory a block may have (opt-in) */
    cudaStream_t stream; /* the compute stream */
    bool capturing;      /* between graph_begin and graph_end */
    struct cuda_gemm *gemm;
    struct {
        void *p;
        size_t bytes;
    } scratch[CUDA_N_SCRATCH];
    void *pinned; /* staging of ops that wait */
    size_t pinned_bytes;
    cudaEvent_t *stamps; /* events of a trace */
    int64_t n_stamps;
    size_t held;                  /* bytes of device memory through cuda_hold */
    int64_t n_holds;              /* calls of it */
    size_t used_at_open;          /* bytes of the device in use when this context was ready, by anyone, without held */
    struct cuda_offload *offload; /* NULL: none was asked for */
    /* groups that have streams here, any number of one kind */
    struct cuda_peer_streams *peer_streams; /* of peers.cu; NULL: none */
    struct nccl *nccl;                      /* of nccl.cu, a list; NULL: none */
    struct {
        int64_t k, vocab;
        bool same;
    } head[CUDA_MAX_HEADS]; /* shapes of LM heads whose fused kernel lm_head.cu has checked */
    int n_heads;
    enum cuda_checked grouped; /* the bits of its two kernels: grouped_gemm.cu */
};
static inline struct cuda *cuda_of(struct dev *d) { return (struct cuda *)d->ctx; }

/* err_set with the CUDA call named; ERR_NOMEM for cudaErrorMemoryAllocation, else ERR_DEVICE. */
int cuda_err(cudaError_t e, const char *what, const char *file, int line);
#define CU_TRY(call)                                                                 \
    do {                                                                             \
        const cudaError_t cu_e_ = (call);                                            \
        if (cu_e_ != cudaSuccess) return cuda_err(cu_e_, #call, __FILE__, __LINE__); \
    } while (0)
/* After a launch: returns from the op with the launch's error. */
#define CU_LAUNCHED() CU_TRY(cudaGetLastError())

/* A function of the driver, of CUDA 12.0's interface. It is asked of the runtime, so nothing links libcuda. */
int cuda_driver_entry(const char *name, void **f);
/* One that newer drivers have (CUDA 12.3); *f stays as it is where this one does not. */
void cuda_driver_has(const char *name, void **f);

/* ---- launches ----
 * Programmatic dependent launch (PDL), sm_90 and later: a kernel may start while the one before it still runs, which
 * hides its launch.  Such a kernel calls pdl_launch_dependents() at once.
 * cuda_launch_pdl: always; every thread calls pdl_wait() before its first access to memory.
 * cuda_launch: in a CUDA graph only; weights may be read before pdl_wait(), since no graph writes one, and so may what
 * device/graph.h says of attention and of the delta rule.
 * (pdl_wait ends when the previous kernel has ended, which itself has waited: so everything before is done.) */
static inline cudaLaunchConfig_t cuda_launch_config(const struct cuda *c, dim3 grid, int threads, size_t smem,
                                                    cudaLaunchAttribute *attr, bool pdl) {
    cudaLaunchConfig_t config = {};
    attr->id = cudaLaunchAttributeProgrammaticStreamSerialization;
    attr->val.programmaticStreamSerializationAllowed = 1;
    config.gridDim = grid;
    config.blockDim = dim3((unsigned)threads);
    config.dynamicSmemBytes = smem;
    config.stream = c->stream;
    config.attrs = attr;
    config.numAttrs = pdl && c->cc >= 90 ? 1 : 0;
    return config;
}
template <class... P, class... A>
static inline cudaError_t cuda_launch(const struct cuda *c, void (*kernel)(P...), dim3 grid, int threads, size_t smem, A... args) {
    cudaLaunchAttribute attr = {};
    const cudaLaunchConfig_t config = cuda_launch_config(c, grid, threads, smem, &attr, c->capturing);
    return cudaLaunchKernelEx(&config, kernel, static_cast<P>(args)...);
}
/* cuda_launch of blocks in clusters of two along x; Hopper. */
template <class... P, class... A>
static inline cudaError_t cuda_launch_pairs(const struct cuda *c, void (*kernel)(P...), dim3 grid, int threads, size_t smem,
                                            A... args) {
    cudaLaunchAttribute attr[2] = {};
    attr[0].id = cudaLaunchAttributeClusterDimension;
    attr[0].val.clusterDim.x = 2, attr[0].val.clusterDim.y = attr[0].val.clusterDim.z = 1;
    cudaLaunchConfig_t config = cuda_launch_config(c, grid, threads, smem, &attr[1], c->capturing);
    config.attrs = attr;
    config.numAttrs++;
    return cudaLaunchKernelEx(&config, kernel, static_cast<P>(args)...);
}
template <class... P, class... A>
static inline cudaError_t cuda_launch_pdl(const struct cuda *c, void (*kernel)(P...), dim3 grid, int threads, size_t smem,
                                          A... args) {
    cudaLaunchAttribute attr = {};
    const cudaLaunchConfig_t config = cuda_launch_config(c, grid, threads, smem, &attr, true);
    return cudaLaunchKernelEx(&config, kernel, static_cast<P>(args)...);
}

/* Without PDL, in a CUDA graph too. */
template <class... P, class... A>
static inline cudaError_t cuda_launch_plain(const struct cuda *c, void (*kernel)(P...), dim3 grid, int threads, size_t smem,
                                            A... args) {
    cudaLaunchAttribute attr = {};
    const cudaLaunchConfig_t config = cuda_launch_config(c, grid, threads, smem, &attr, false);
    return cudaLaunchKernelEx(&config, kernel, static_cast<P>(args)...);
}

/* Whether this GPU runs what is built for sm_90a alone: the files *_sm90.cu. */
static inline bool cuda_hopper(const struct cuda *c) {
    static const char built[] = VERLC_CUDA_ARCHS;
    return c->cc == 90 && strstr(built, "sm_90a") != NULL;
}

/* blockIdx.x counted from the end of the grid. What the previous kernel wrote last is still in L2: a kernel that
 * starts there reads part of its input from L2, and leaves there what the next one starts with. */
static __device__ __forceinline__ unsigned cuda_block_reversed(void) { return gridDim.x - 1 - blockIdx.x; }

/* Device memory of the backend's own, counted. ERR_NOMEM. */
int cuda_hold(struct cuda *c, size_t bytes, void **out);
int cuda_drop(struct cuda *c, void *p, size_t bytes); /* NULL ok */

/* At least `bytes` of this scratch buffer, 256-aligned; contents undefined. A buffer that was
 * outgrown stays until the device is closed: a CUDA graph may still use it. */
int cuda_scratch(struct cuda *c, enum cuda_scratch_id id, size_t bytes, void **out);
/* At least `bytes` of pinned host memory. */
int cuda_pinned(struct cuda *c, size_t bytes, void **out);

/* ---- pinned host memory and copy streams (host_offload.cu): see device/memory.h ---- */
int cuda_host_alloc(struct dev *d, size_t bytes, void **out);
void cuda_host_free(struct dev *d, void *p, size_t bytes);
int cuda_host_register(struct dev *d, void *p, size_t bytes);
void cuda_host_unregister(struct dev *d, void *p);
int cuda_fetch(struct dev *d, int stream, void *dst, const void *src, size_t bytes);
int cuda_evict(struct dev *d, int stream, void *dst, const void *src, size_t bytes);
int cuda_copy_stream_wait(struct dev *d, int stream);
int cuda_copy_stream_sync(struct dev *d, int stream);
bool cuda_offload_has(const struct cuda *c, const void *p); /* whether p points into such memory */
int cuda_offload_settle(struct cuda *c);                    /* waits for the compute stream and for all copies */
void cuda_offload_close(struct cuda *c);

extern const struct dev_peer_ops cuda_peers;    /* peers.cu */
extern const struct dev_nccl_ops cuda_nccl_ops; /* nccl.cu */

/* What tells a profiler of ranges (nvtx.cu): struct dev's range. NULL: none listens. */
void (*cuda_range_of(void))(const char *name);

bool cuda_keeps_logits(struct dev *d, struct weight w); /* lm_head.cu: see dev_keeps_logits */

/* ---- the backend's memory (scratch_memory.cu): see dev_working_bytes and dev_reserve ---- */
size_t cuda_working_bytes(struct dev *d, const struct dev_sizes *s);
int cuda_reserve(struct dev *d, const struct dev_sizes *s);

/* ---- GEMM (device/cuda/gemm/gemm.cu) ---- */
int cuda_gemm(struct cuda *c, const struct cuda_gemm_args *a);
int cuda_gemm_open(struct cuda *c);
void cuda_gemm_close(struct cuda *c);

/* ---- the ops: arithmetic only (device.c has checked) ---- */
#define OP(name, ...) int cuda_##name(struct dev *d, __VA_ARGS__);
#define OP_FUSED OP
#include "device/ops.def"
size_t cuda_weight_bytes(struct dev *d, enum dtype dt, int64_t n, int64_t k); /* weights are plain row-major (n, k) */

/* elementwise.cu */
/* On any stream; table: cuda_embed_bwd_table bytes of scratch. dx may be another GPU's. */
size_t cuda_embed_bwd_table(int64_t lo, int64_t n, int64_t h);
struct cuda_embed_bwd_args { /* of dev_embed_bwd_part */
    struct tensor dw;
    int64_t lo, vocab;
    struct tensor ids, dx;
};
int cuda_embed_bwd_on(cudaStream_t s, void *table, const struct cuda_embed_bwd_args *a);
/* Routers that choose by scores (moe/score_route.cu). */
int cuda_score_route_fwd(struct dev *d, const struct route_args *a);
int cuda_score_route_bwd(struct dev *d, const struct route_args *a, struct tensor dlogits, struct tensor dweight);
int cuda_swiglu(struct cuda *c, struct tensor y, struct tensor gate_up); /* the kernel of cuda_swiglu_fwd */
/* Those of cuda_fold_on and cuda_embed_bwd_on, before a stream waits for a peer. */
int cuda_load_group_kernels(void);
int cuda_fold_on(cudaStream_t s, struct tensor y, const struct tensor *x, int n, bool add);
/* norm_rope.cu: out[c] += sum over n of part[i * stride + c], c in [0, cols), in a fixed order. */
int cuda_add_parts(struct cuda *c, float *out, const float *part, int64_t n, int64_t stride, int64_t cols);
/* sampler.cu: the kernels of cuda_sample; a->param is on the device, nothing waits. tiles: the statistics of tiles where the
 * fused head left them (then seen is not read); or NULL. */
struct head_stats;
int cuda_sample_device(struct cuda *c, const struct sample_args *a, const struct head_stats *tiles);
/* cuda_graph.cu */
int cuda_decode_next(struct dev *d, const struct decode_args *a);
int cuda_graph_begin(struct dev *d);
int cuda_graph_end(struct dev *d, void **graph);
int cuda_graph_run(struct dev *d, void *graph);
void cuda_graph_free(struct dev *d, void *graph);
int cuda_stamp(struct dev *d, int64_t i);
int cuda_stamp_on(struct cuda *c, cudaStream_t s, int64_t i);
int cuda_stamp_us(struct dev *d, int64_t i, double *us);

#endif
