/* cuda_runtime.h - what peers.cu, gather_columns.cu and nccl.cu of src/device/cuda/collective use of CUDA's runtime, for
 * runtime.cu: streams without a GPU. */
#ifndef VERLC_TESTS_CUDA_STREAMS_RUNTIME_H
#define VERLC_TESTS_CUDA_STREAMS_RUNTIME_H

#include <functional>
#include <stddef.h>
#include <stdint.h>

typedef struct stream *cudaStream_t;
typedef struct event *cudaEvent_t;
enum cudaError_t { cudaSuccess = 0, cudaErrorNotReady = 600 };
enum { cudaStreamNonBlocking, cudaEventDisableTiming, cudaHostAllocDefault, cudaHostAllocMapped, cudaIpcMemLazyEnablePeerAccess };
enum cudaMemcpyKind { cudaMemcpyHostToDevice, cudaMemcpyDeviceToHost, cudaMemcpyDefault };
struct cudaIpcMemHandle_t {
    char bytes[64];
};

cudaError_t cudaGetLastError();
const char *cudaGetErrorString(cudaError_t e);
cudaError_t cudaDeviceGetStreamPriorityRange(int *least, int *greatest);
cudaError_t cudaStreamCreateWithPriority(cudaStream_t *s, unsigned flags, int priority);
cudaError_t cudaStreamDestroy(cudaStream_t s);
cudaError_t cudaStreamQuery(cudaStream_t s);
cudaError_t cudaStreamSynchronize(cudaStream_t s);
cudaError_t cudaEventCreateWithFlags(cudaEvent_t *e, unsigned flags);
cudaError_t cudaEventDestroy(cudaEvent_t e);
cudaError_t cudaEventRecord(cudaEvent_t e, cudaStream_t s);
cudaError_t cudaEventSynchronize(cudaEvent_t e);
cudaError_t cudaStreamWaitEvent(cudaStream_t s, cudaEvent_t e, unsigned flags);
cudaError_t cudaMemcpy(void *to, const void *from, size_t n, cudaMemcpyKind kind);
cudaError_t cudaMemcpyAsync(void *to, const void *from, size_t n, cudaMemcpyKind kind, cudaStream_t s);
cudaError_t cudaMemsetAsync(void *to, int byte, size_t n, cudaStream_t s);
cudaError_t cudaMalloc(void **p, size_t n);
cudaError_t cudaFree(void *p); /* waits for all streams of this device, as CUDA's */
cudaError_t cudaHostAlloc(void **p, size_t n, unsigned flags);
cudaError_t cudaFreeHost(void *p);
cudaError_t cudaMemGetInfo(size_t *now, size_t *total);
cudaError_t cudaIpcGetMemHandle(cudaIpcMemHandle_t *h, void *p);
cudaError_t cudaIpcOpenMemHandle(void **p, cudaIpcMemHandle_t h, unsigned flags);
cudaError_t cudaIpcCloseMemHandle(void *p);

/* This thread's device: its streams are spread over so many hardware queues, each in the order of submission. */
void streams_device(int queues);
void streams_idle(); /* waits for all its streams */
void streams_end();
void streams_lose_writes(bool lose); /* of stream memory operations, from now on */
/* The driver loads a kernel at its first launch, or when it is asked for: then it waits for all streams of this device. */
void streams_load(const void *kernel);
/* What s does next, again and again until it says true. */
void streams_push(cudaStream_t s, std::function<bool()> what);

/* ---- kernels whose threads run one after the other, each to its end; one that waits has the queue meanwhile ---- */

#define __global__
#define __device__
#define __host__
#define __forceinline__ inline
#define __grid_constant__
#define __launch_bounds__(n)
struct dim3 {
    unsigned x, y;
    dim3(unsigned nx = 1, unsigned ny = 1) : x(nx), y(ny) {}
};
extern thread_local dim3 threadIdx, blockIdx, blockDim, gridDim;
struct cudaLaunchConfig_t {
    dim3 gridDim, blockDim;
    cudaStream_t stream;
};
struct cudaFuncAttributes {};

template <class F> cudaError_t cudaFuncGetAttributes(cudaFuncAttributes *, F *kernel) {
    streams_load((const void *)kernel);
    return cudaSuccess;
}
template <class A> cudaError_t cudaLaunchKernelEx(const cudaLaunchConfig_t *config, void (*kernel)(A), A a) {
    const cudaLaunchConfig_t l = *config;
    streams_load((const void *)kernel);
    streams_push(l.stream, [=] {
        gridDim = l.gridDim;
        blockDim = l.blockDim;
        for (blockIdx.y = 0; blockIdx.y < l.gridDim.y; blockIdx.y++)
            for (blockIdx.x = 0; blockIdx.x < l.gridDim.x; blockIdx.x++)
                for (threadIdx.x = 0; threadIdx.x < l.blockDim.x; threadIdx.x++) kernel(a);
        return true;
    });
    return cudaSuccess;
}

#endif
