/* tma.cuh - Hopper's bulk tensor copies between device and shared memory, the barriers
 * in shared memory that they complete on, and clusters of two blocks, one function an instruction;
 * and the host's description of a matrix for them.
 *
 * A tile is rows of 64 bf16 (128 bytes) whose 16-byte chunks are permuted as in wgmma.cuh: a panel.
 * What lies outside of the matrix reads as zeros and is not written.
 * Invariant: as in wgmma.cuh, only code for sm_90a may use this; what else is compiled sees
 * empty functions that no kernel may reach. */
#ifndef VERLC_DEV_CUDA_TMA_CUH
#define VERLC_DEV_CUDA_TMA_CUH

#include "dev/cuda/context.cuh"
#include "dev/cuda/wgmma.cuh"

#include <cuda.h>

/* ---- barriers: 8 bytes of shared memory; a phase ends when all arrivals and all announced bytes have come ---- */

static __device__ __forceinline__ void bar_init(uint32_t bar, int arrivals) {
#if WGMMA_HERE
    asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(bar), "r"(arrivals) : "memory");
#endif
}
/* After all bar_init, before the cluster's first cluster_sync. */
static __device__ __forceinline__ void bar_init_done() {
#if WGMMA_HERE
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
#endif
}
/* One arrival, and `bytes` more to come. */
static __device__ __forceinline__ void bar_expect(uint32_t bar, uint32_t bytes) {
#if WGMMA_HERE
    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(bar), "r"(bytes) : "memory");
#endif
}
/* One arrival. */
static __device__ __forceinline__ void bar_arrive(uint32_t bar) {
#if WGMMA_HERE
    asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(bar) : "memory");
#endif
}
/* One arrival when all of this thread's cp_async so far have ended. */
static __device__ __forceinline__ void bar_arrive_after_copies(uint32_t bar) {
#if WGMMA_HERE
    asm volatile("cp.async.mbarrier.arrive.noinc.shared::cta.b64 [%0];" ::"r"(bar) : "memory");
#endif
}
/* One arrival at the barrier in the same place of block `rank` of the cluster. It orders nothing between the blocks but reads by
 * products that have ended: release.cluster would wait for all of this thread's stores, at a thousand cycles a time. */
static __device__ __forceinline__ void bar_arrive_at(uint32_t bar, uint32_t rank) {
#if WGMMA_HERE
    asm volatile("{.reg .b32 at; mapa.shared::cluster.u32 at, %0, %1; mbarrier.arrive.shared::cluster.b64 _, [at];}" ::"r"(bar),
                 "r"(rank)
                 : "memory");
#endif
}
/* Waits for the end of the phase of this parity; of the one before the first: parity 1, which does not wait. */
static __device__ __forceinline__ void bar_wait(uint32_t bar, uint32_t parity) {
#if WGMMA_HERE
    asm volatile(
        "{.reg .pred p;\nWAIT: mbarrier.try_wait.parity.shared::cta.b64 p, [%0], %1;\n@p bra DONE;\nbra WAIT;\nDONE:}" ::"r"(bar),
        "r"(parity)
        : "memory");
#endif
}
/* Whether bar_wait would return at once. */
static __device__ __forceinline__ bool bar_test(uint32_t bar, uint32_t parity) {
    uint32_t ended = 1;
#if WGMMA_HERE
    asm volatile("{.reg .pred p; mbarrier.test_wait.parity.shared::cta.b64 p, [%1], %2; selp.u32 %0, 1, 0, p;}"
                 : "=r"(ended)
                 : "r"(bar), "r"(parity)
                 : "memory");
#endif
    return ended;
}

/* ---- copies; x: column, y: row of the tile's first element ---- */

static __device__ __forceinline__ void tma_load(uint32_t dst, const CUtensorMap *map, int x, int y, uint32_t bar) {
#if WGMMA_HERE
    asm volatile(
        "cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1, {%3, %4}], [%2];" ::"r"(dst),
        "l"(map), "r"(bar), "r"(x), "r"(y)
        : "memory");
#endif
}
/* The map is asked for, so that the first copy by it need not wait. */
static __device__ __forceinline__ void tma_prefetch_map(const CUtensorMap *map) {
#if WGMMA_HERE
    asm volatile("prefetch.tensormap [%0];" ::"l"(map) : "memory");
#endif
}
/* Both tiles of a map of a pair: that of the first matrix, then that of the second. */
static __device__ __forceinline__ void tma_load_pair(uint32_t dst, const CUtensorMap *map, int x, int y, uint32_t bar) {
#if WGMMA_HERE
    asm volatile(
        "cp.async.bulk.tensor.3d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1, {%3, %4, %5}], [%2];" ::"r"(dst),
        "l"(map), "r"(bar), "r"(x), "r"(y), "r"(0)
        : "memory");
#endif
}
/* Into the same place of the blocks of the cluster that have a bit in `to`, completing on the barrier of each. */
static __device__ __forceinline__ void tma_load_all(uint32_t dst, const CUtensorMap *map, int x, int y, uint32_t bar, uint16_t to) {
#if WGMMA_HERE
    asm volatile("cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes.multicast::cluster "
                 "[%0], [%1, {%3, %4}], [%2], %5;" ::"r"(dst),
                 "l"(map), "r"(bar), "r"(x), "r"(y), "h"(to)
                 : "memory");
#endif
}
/* One group of this thread's stores. */
static __device__ __forceinline__ void tma_store(const CUtensorMap *map, int x, int y, uint32_t src) {
#if WGMMA_HERE
    asm volatile("cp.async.bulk.tensor.2d.global.shared::cta.bulk_group [%0, {%2, %3}], [%1];\n"
                 "cp.async.bulk.commit_group;" ::"l"(map),
                 "r"(src), "r"(x), "r"(y)
                 : "memory");
#endif
}
/* At most N of this thread's stores have not read their source yet; all have ended. */
template <int N> static __device__ __forceinline__ void tma_stores_read() {
#if WGMMA_HERE
    asm volatile("cp.async.bulk.wait_group.read %0;" ::"n"(N) : "memory");
#endif
}
static __device__ __forceinline__ void tma_stores_end() {
#if WGMMA_HERE
    asm volatile("cp.async.bulk.wait_group 0;" ::: "memory");
#endif
}
/* Four 8x8 matrices of bf16 to shared memory: as ldmatrix_x4, the other way. */
static __device__ __forceinline__ void stmatrix_x4(uint32_t addr, const uint32_t (&r)[4]) {
#if WGMMA_HERE
    asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(addr), "r"(r[0]), "r"(r[1]), "r"(r[2]),
                 "r"(r[3])
                 : "memory");
#endif
}

/* ---- clusters and warpgroups ---- */

static __device__ __forceinline__ uint32_t cluster_rank() {
    uint32_t r = 0;
#if WGMMA_HERE
    asm volatile("mov.u32 %0, %%cluster_ctarank;" : "=r"(r));
#endif
    return r;
}
static __device__ __forceinline__ void cluster_sync() {
#if WGMMA_HERE
    asm volatile("barrier.cluster.arrive.release.aligned;\nbarrier.cluster.wait.acquire.aligned;" ::: "memory");
#endif
}
/* Whether this thread is the one of its warp that shall act for it; the compiler knows then that there is but one. */
static __device__ __forceinline__ bool warp_elect() {
    uint32_t mine = 0;
#if WGMMA_HERE
    asm volatile("{.reg .pred p; elect.sync _|p, 0xffffffff; selp.u32 %0, 1, 0, p;}" : "=r"(mine));
#endif
    return mine;
}
/* Named barrier `id` of the block among `threads` threads: wait for all; or arrive and go on. */
static __device__ __forceinline__ void group_sync(int id, int threads) {
    asm volatile("bar.sync %0, %1;" ::"r"(id), "r"(threads) : "memory");
}
static __device__ __forceinline__ void group_arrive(int id, int threads) {
    asm volatile("bar.arrive %0, %1;" ::"r"(id), "r"(threads) : "memory");
}
/* Registers of a thread of this warpgroup from here on. */
template <int N> static __device__ __forceinline__ void registers_down() {
#if WGMMA_HERE
    asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(N));
#endif
}
template <int N> static __device__ __forceinline__ void registers_up() {
#if WGMMA_HERE
    asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(N));
#endif
}

/* ---- the product of 64 x 256 results ---- */

#define TMA_D32(d, i) WGMMA_D8(d, i), WGMMA_D8(d, i + 2), WGMMA_D8(d, i + 4), WGMMA_D8(d, i + 6)
#define TMA_REGS                                                                                                                \
    "{%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, %16, %17, %18, %19, %20, %21, %22, %23, %24, %25, " \
    "%26, %27, %28, %29, %30, %31, %32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47, %48, %49, "  \
    "%50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63, %64, %65, %66, %67, %68, %69, %70, %71, %72, %73, "  \
    "%74, %75, %76, %77, %78, %79, %80, %81, %82, %83, %84, %85, %86, %87, %88, %89, %90, %91, %92, %93, %94, %95, %96, %97, "  \
    "%98, %99, %100, %101, %102, %103, %104, %105, %106, %107, %108, %109, %110, %111, %112, %113, %114, %115, %116, %117, "    \
    "%118, %119, %120, %121, %122, %123, %124, %125, %126, %127}"

/* d (64, 256) = (add ? d : 0) + A . B^T over 16 columns: A 64 rows, B 256 rows, by rows. */
static __device__ __forceinline__ void wgmma_rows_256(float (&d)[32][4], uint64_t a, uint64_t b, int add) {
#if WGMMA_HERE
    asm volatile("{.reg .pred p; setp.ne.b32 p, %130, 0; wgmma.mma_async.sync.aligned.m64n256k16.f32.bf16.bf16 " TMA_REGS
                 ", %128, %129, p, 1, 1, 0, 0;}"
                 : TMA_D32(d, 0), TMA_D32(d, 8), TMA_D32(d, 16), TMA_D32(d, 24)
                 : "l"(a), "l"(b), "r"(add));
#endif
}

/* ---- host ---- */

/* A row-major bf16 matrix (rows, cols) cut into tiles of `box` rows and 64 columns; data and rows aligned to 16 bytes. */
int cuda_tensor_map(CUtensorMap *map, const void *data, int64_t rows, int64_t cols, int box);
/* Two such matrices, one behind the other, for tma_load_pair: a tile is `box` rows of each. */
int cuda_tensor_map_pair(CUtensorMap *map, const void *data, int64_t rows, int64_t cols, int box);

#endif
