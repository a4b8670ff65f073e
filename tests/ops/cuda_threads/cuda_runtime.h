/* cuda_runtime.h - what kernels without asynchronous copies use of CUDA, for threads.cu: the threads of a block on one CPU thread.
 *
 * A kernel is a function of the host's; a block's threads take turns, in an order that is drawn anew at each barrier, so that a
 * result that depends on the order between two barriers differs from run to run.
 * Invariant: a warp's exchange and a block's barrier wait for all threads that have not ended; one that some never reach ends the
 * program with a message. */
#ifndef VERLC_TESTS_CUDA_THREADS_RUNTIME_H
#define VERLC_TESTS_CUDA_THREADS_RUNTIME_H

#include <algorithm>
#include <climits>
#include <cmath>
#include <functional>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define __host__
#define __device__
#define __global__
#define __shared__ static
#define __forceinline__ inline
#define __noinline__ __attribute__((noinline))
#define __launch_bounds__(...)
#define __cluster_dims__(...) /* cluster_rank says it */
#define __grid_constant__
#define __trap() __builtin_trap()

struct dim3 {
    unsigned x, y, z;
    dim3(unsigned x_ = 1, unsigned y_ = 1, unsigned z_ = 1) : x(x_), y(y_), z(z_) {}
};
using std::max;
using std::min;
struct int2 {
    int x, y;
};
struct alignas(16) float4 {
    float x, y, z, w;
};
struct float2 {
    float x, y;
};
struct alignas(16) uint4 {
    uint32_t x, y, z, w;
};
static inline float2 make_float2(float x, float y) { return float2{x, y}; }
static inline uint4 make_uint4(uint32_t x, uint32_t y, uint32_t z, uint32_t w) { return uint4{x, y, z, w}; }
static inline float4 make_float4(float x, float y, float z, float w) { return float4{x, y, z, w}; }
extern dim3 threadIdx, blockIdx, blockDim, gridDim;

typedef struct stream *cudaStream_t;
enum cudaError_t { cudaSuccess = 0 };
static inline cudaError_t cudaGetLastError() { return cudaSuccess; }
static inline cudaError_t cudaLaunchKernel(const void *, dim3, dim3, void **, size_t, cudaStream_t) { abort(); }
enum { cudaFuncAttributeMaxDynamicSharedMemorySize };
static inline cudaError_t cudaFuncSetAttribute(const void *, int, int) { return cudaSuccess; }
/* One cluster runs at a time. */
enum { cudaLaunchAttributeClusterDimension };
struct cudaLaunchAttribute {
    int id;
    struct {
        dim3 clusterDim;
    } val;
};
struct cudaLaunchConfig_t {
    dim3 gridDim, blockDim;
    size_t dynamicSmemBytes;
    cudaLaunchAttribute *attrs;
    unsigned numAttrs;
};
static inline cudaError_t cudaOccupancyMaxActiveClusters(int *n, const void *, const cudaLaunchConfig_t *) {
    *n = 1;
    return cudaSuccess;
}
enum { cudaMemcpyHostToDevice, cudaMemcpyDeviceToHost };
static inline cudaError_t cudaMemcpyAsync(void *to, const void *from, size_t bytes, int, cudaStream_t) {
    memcpy(to, from, bytes);
    return cudaSuccess;
}
static inline cudaError_t cudaMemsetAsync(void *p, int v, size_t bytes, cudaStream_t) {
    memset(p, v, bytes);
    return cudaSuccess;
}
static inline cudaError_t cudaStreamSynchronize(cudaStream_t) { return cudaSuccess; }

/* Blocks in clusters of so many along x, whose blocks run side by side. 1: or of two, if threads_in_pairs says so. */
void threads_run(dim3 grid, unsigned threads, size_t shared, const std::function<void()> &kernel, unsigned cluster = 1);
void threads_block_barrier();
/* The values of the warp's 32 lanes; valid until this lane's next exchange but one. */
typedef char lane_bytes[64];
const lane_bytes *threads_exchange(const void *mine, size_t bytes);
/* Shared memory of this block; of the block of that rank in the cluster. The number of this thread among those of the cluster. */
extern char *threads_shared;
char *threads_shared_of(unsigned rank);
unsigned threads_number(), threads_cluster_rank();
size_t threads_shared_bytes(); /* of a block of this launch */
/* Blocks of this kernel are in clusters of two: begins it again so if they are not. */
void threads_in_pairs();
void threads_cluster_barrier();
/* Waits until another thread wakes all that wait for `what`; whether one does. */
void threads_wait(const void *what);
void threads_wake(const void *what);
bool threads_awaited(const void *what);
/* The kernel in front of a launch: `hook` is called at the start of each cluster and, when none of its threads can go on without,
 * at that kernel's end (ended). How many copies were issued in between since it was set. */
extern "C" void threads_in_front(void (*hook)(void *of, bool ended), void *of);
extern "C" int64_t threads_early_copies();
void threads_pdl_wait(), threads_copy_issued();
/* Whether copies, or WGMMAs, happen at once in this block, and not as late as they may. */
enum { THREADS_COPY = 1, THREADS_WGMMA = 2 };
bool threads_eager(int what);
uint64_t threads_block_number();
void threads_named_barrier(int id, int threads, bool wait);

static inline void __syncthreads() { threads_block_barrier(); }
static inline void __syncwarp(unsigned = ~0u) {
    const int none = 0;
    threads_exchange(&none, sizeof none);
}
template <class T> static inline T threads_lane(T v, int lane) {
    memcpy(&v, threads_exchange(&v, sizeof v)[lane], sizeof v);
    return v;
}
template <class T> static inline T __shfl_sync(unsigned, T v, int from, int width = 32) {
    const int lane = (int)threadIdx.x & 31;
    return threads_lane(v, (lane & ~(width - 1)) + (from & (width - 1)));
}
template <class T> static inline T __shfl_xor_sync(unsigned, T v, int by, int = 32) {
    return threads_lane(v, ((int)threadIdx.x & 31) ^ by);
}
template <class T> static inline T __shfl_up_sync(unsigned, T v, int by, int width = 32) {
    const int lane = (int)threadIdx.x & 31;
    return threads_lane(v, (lane & (width - 1)) >= by ? lane - by : lane);
}
template <class T> static inline T __shfl_down_sync(unsigned, T v, int by, int width = 32) {
    const int lane = (int)threadIdx.x & 31;
    return threads_lane(v, (lane & (width - 1)) + by < width ? lane + by : lane);
}

static inline void __threadfence() {}
static inline void __nanosleep(unsigned) {
    const char text[] = "threads: a wait for a block that has not run\n";
    fwrite(text, 1, sizeof text - 1, stderr);
    abort();
}
template <class T> static inline T __ldcg(const T *p) { return *p; }
template <class T> static inline T __ldcs(const T *p) { return *p; }
template <class T> static inline void __stcs(T *p, T v) { *p = v; }
static inline unsigned __ballot_sync(unsigned, bool v) {
    const lane_bytes *const all = threads_exchange(&v, sizeof v);
    unsigned bits = 0;
    for (int i = 0; i < 32; i++) bits |= (unsigned)(*all[i] != 0) << i;
    return bits;
}
static inline int __popc(unsigned v) { return __builtin_popcount(v); }
static inline int __ffs(int v) { return __builtin_ffs(v); }
static inline bool __any_sync(unsigned, bool v) {
    const lane_bytes *const all = threads_exchange(&v, sizeof v);
    bool any = false;
    for (int i = 0; i < 32; i++) any |= *all[i] != 0;
    return any;
}

/* The compiler fuses nothing (-ffp-contract=off). */
static inline float __fmaf_rn(float a, float b, float c) { return fmaf(a, b, c); }
static inline float __fmul_rn(float a, float b) { return a * b; }
static inline float __fadd_rn(float a, float b) { return a + b; }
static inline double __dadd_rn(double a, double b) { return a + b; }
static inline double __dmul_rn(double a, double b) { return a * b; }
static inline float __fsub_rn(float a, float b) { return a - b; }
static inline float __fdiv_rn(float a, float b) { return a / b; }
static inline float __fsqrt_rn(float a) { return sqrtf(a); }
static inline float __frcp_rn(float a) { return 1.0f / a; }
static inline uint32_t __float_as_uint(float x) {
    uint32_t u;
    memcpy(&u, &x, sizeof u);
    return u;
}
static inline float __uint_as_float(uint32_t u) {
    float x;
    memcpy(&x, &u, sizeof x);
    return x;
}

#endif
