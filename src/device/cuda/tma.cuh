/* tma.cuh - TMA (bulk tensor copies between global and shared memory), mbarriers and thread block clusters on
 * Hopper, one function an instruction; and the host's tensor maps.
 *
 * A TMA tile is rows of 64 bf16 (128 bytes) with the 128-byte swizzle: a panel of wgmma.cuh.  What
 * lies outside of the matrix reads as zeros and is not written.
 * Invariant: as in wgmma.cuh, only code for sm_90a may use this; what else is compiled sees
 * empty functions that no kernel may reach. */
#ifndef VERLC_DEV_CUDA_TMA_CUH
#define VERLC_DEV_CUDA_TMA_CUH

#include "device/cuda/context.cuh"
#include "device/cuda/wgmma.cuh"

#include <cuda.h>

/* ---- mbarriers: 8 bytes of shared memory; a phase completes when all arrivals and all expected bytes have come ---- */

static __device__ __forceinline__ void mbarrier_init(uint32_t bar, int arrivals) {
#if WGMMA_ENABLED
    asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(bar), "r"(arrivals) : "memory");
#endif
}
/* After all mbarrier_init, before the cluster's first cluster_sync. */
static __device__ __forceinline__ void mbarrier_init_fence() {
#if WGMMA_ENABLED
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
#endif
}
/* One arrival, and `bytes` more to be expected. */
static __device__ __forceinline__ void mbarrier_expect_tx(uint32_t bar, uint32_t bytes) {
#if WGMMA_ENABLED
    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(bar), "r"(bytes) : "memory");
#endif
}
/* One arrival. */
static __device__ __forceinline__ void mbarrier_arrive(uint32_t bar) {
#if WGMMA_ENABLED
    asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(bar) : "memory");
#endif
}
/* One arrival when all cp.async of this thread so far have completed. */
static __device__ __forceinline__ void mbarrier_arrive_cp_async(uint32_t bar) {
#if WGMMA_ENABLED
    asm volatile("cp.async.mbarrier.arrive.noinc.shared::cta.b64 [%0];" ::"r"(bar) : "memory");
#endif
}
/* One arrival at the mbarrier at the same offset in block `rank` of the cluster. It orders only reads by WGMMAs that have
 * completed: release.cluster would wait for all of this thread's stores, a thousand cycles each time. */
static __device__ __forceinline__ void mbarrier_arrive_cluster(uint32_t bar, uint32_t rank) {
#if WGMMA_ENABLED
    asm volatile("{.reg .b32 at; mapa.shared::cluster.u32 at, %0, %1; mbarrier.arrive.shared::cluster.b64 _, [at];}" ::"r"(bar),
                 "r"(rank)
                 : "memory");
#endif
}
/* Waits until the phase of this parity completes. Parity 1 of a new mbarrier does not wait. */
static __device__ __forceinline__ void mbarrier_wait(uint32_t bar, uint32_t parity) {
#if WGMMA_ENABLED
    asm volatile(
        "{.reg .pred p;\nWAIT: mbarrier.try_wait.parity.shared::cta.b64 p, [%0], %1;\n@p bra DONE;\nbra WAIT;\nDONE:}" ::"r"(bar),
        "r"(parity)
        : "memory");
#endif
}
/* Whether mbarrier_wait would return at once. */
static __device__ __forceinline__ bool mbarrier_test(uint32_t bar, uint32_t parity) {
    uint32_t ended = 1;
#if WGMMA_ENABLED
    asm volatile("{.reg .pred p; mbarrier.test_wait.parity.shared::cta.b64 p, [%1], %2; selp.u32 %0, 1, 0, p;}"
                 : "=r"(ended)
                 : "r"(bar), "r"(parity)
                 : "memory");
#endif
    return ended;
}

/* ---- TMA; x: column, y: row of the tile's first element ---- */

static __device__ __forceinline__ void tma_load(uint32_t dst, const CUtensorMap *map, int x, int y, uint32_t bar) {
#if WGMMA_ENABLED
    asm volatile(
        "cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1, {%3, %4}], [%2];" ::"r"(dst),
        "l"(map), "r"(bar), "r"(x), "r"(y)
        : "memory");
#endif
}
/* Prefetches the tensor map, so that the first copy by it need not wait. */
static __device__ __forceinline__ void tma_prefetch_map(const CUtensorMap *map) {
#if WGMMA_ENABLED
    asm volatile("prefetch.tensormap [%0];" ::"l"(map) : "memory");
#endif
}
/* A tile of matrix z of a stack. */
static __device__ __forceinline__ void tma_load_stack(uint32_t dst, const CUtensorMap *map, int x, int y, int z, uint32_t bar) {
#if WGMMA_ENABLED
    asm volatile(
        "cp.async.bulk.tensor.3d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1, {%3, %4, %5}], [%2];" ::"r"(dst),
        "l"(map), "r"(bar), "r"(x), "r"(y), "r"(z)
        : "memory");
#endif
}
/* Both tiles of a pair map: that of the first matrix, then that of the second. */
static __device__ __forceinline__ void tma_load_pair(uint32_t dst, const CUtensorMap *map, int x, int y, uint32_t bar) {
    tma_load_stack(dst, map, x, y, 0, bar);
}
/* Multicast to the same offset in the blocks of the cluster with a bit in `to`; completes on the mbarrier of each. */
static __device__ __forceinline__ void tma_load_multicast(uint32_t dst, const CUtensorMap *map, int x, int y, uint32_t bar,
                                                          uint16_t to) {
#if WGMMA_ENABLED
    asm volatile("cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes.multicast::cluster "
                 "[%0], [%1, {%3, %4}], [%2], %5;" ::"r"(dst),
                 "l"(map), "r"(bar), "r"(x), "r"(y), "h"(to)
                 : "memory");
#endif
}
/* tma_load_stack to both blocks of a cluster of two. */
static __device__ __forceinline__ void tma_load_stack_pair(uint32_t dst, const CUtensorMap *map, int x, int y, int z,
                                                           uint32_t bar) {
#if WGMMA_ENABLED
    asm volatile("cp.async.bulk.tensor.3d.shared::cluster.global.mbarrier::complete_tx::bytes.multicast::cluster "
                 "[%0], [%1, {%3, %4, %5}], [%2], %6;" ::"r"(dst),
                 "l"(map), "r"(bar), "r"(x), "r"(y), "r"(z), "h"((uint16_t)3)
                 : "memory");
#endif
}
/* `bytes` of global memory into L2; both multiples of 16. */
static __device__ __forceinline__ void bulk_prefetch_l2(const void *src, uint32_t bytes) {
#if WGMMA_ENABLED
    asm volatile("cp.async.bulk.prefetch.L2.global [%0], %1;" ::"l"(src), "r"(bytes) : "memory");
#endif
}
/* One bulk group of this thread. */
static __device__ __forceinline__ void tma_store(const CUtensorMap *map, int x, int y, uint32_t src) {
#if WGMMA_ENABLED
    asm volatile("cp.async.bulk.tensor.2d.global.shared::cta.bulk_group [%0, {%2, %3}], [%1];\n"
                 "cp.async.bulk.commit_group;" ::"l"(map),
                 "r"(src), "r"(x), "r"(y)
                 : "memory");
#endif
}
/* Waits until at most N stores of this thread have not read their source; until all have completed. */
template <int N> static __device__ __forceinline__ void tma_store_wait_read() {
#if WGMMA_ENABLED
    asm volatile("cp.async.bulk.wait_group.read %0;" ::"n"(N) : "memory");
#endif
}
static __device__ __forceinline__ void tma_store_wait() {
#if WGMMA_ENABLED
    asm volatile("cp.async.bulk.wait_group 0;" ::: "memory");
#endif
}

/* ---- clusters ---- */

static __device__ __forceinline__ uint32_t cluster_rank() {
    uint32_t r = 0;
#if WGMMA_ENABLED
    asm volatile("mov.u32 %0, %%cluster_ctarank;" : "=r"(r));
#endif
    return r;
}
static __device__ __forceinline__ void cluster_sync() {
#if WGMMA_ENABLED
    asm volatile("barrier.cluster.arrive.release.aligned;\nbarrier.cluster.wait.acquire.aligned;" ::: "memory");
#endif
}
/* Stores 16 bytes at the same offset in block `rank` of the cluster, which are 16 expected bytes of its mbarrier at `bar`. */
static __device__ __forceinline__ void cluster_store16(uint32_t to, uint32_t bar, uint32_t rank, const float (&x)[4]) {
#if WGMMA_ENABLED
    asm volatile("{.reg .b32 to, bar;\nmapa.shared::cluster.u32 to, %0, %2;\nmapa.shared::cluster.u32 bar, %1, %2;\n"
                 "st.async.weak.shared::cluster.mbarrier::complete_tx::bytes.v4.f32 [to], {%3, %4, %5, %6}, [bar];}" ::"r"(to),
                 "r"(bar), "r"(rank), "f"(x[0]), "f"(x[1]), "f"(x[2]), "f"(x[3])
                 : "memory");
#endif
}

/* ---- host ---- */

/* A row-major bf16 matrix (rows, cols) cut into tiles of `box` rows and 64 columns; data and rows aligned to 16 bytes. */
int cuda_tensor_map(CUtensorMap *map, const void *data, int64_t rows, int64_t cols, int box);
/* Two such matrices, one after the other in memory, for tma_load_pair: a tile is `box` rows of each. */
int cuda_tensor_map_pair(CUtensorMap *map, const void *data, int64_t rows, int64_t cols, int box);
/* `count` such matrices, one after the other in memory, for tma_load_stack: a tile is of one of them. */
int cuda_tensor_map_stack(CUtensorMap *map, const void *data, int64_t count, int64_t rows, int64_t cols, int box);

#endif
