/* wgmma.cuh - Hopper's asynchronous warpgroup MMA with bf16 operands and f32 accumulators, one function an
 * instruction; stmatrix, elect.sync and setmaxnreg for warp-specialized kernels.
 *
 * A panel is 64 columns of bf16 in shared memory with the 128-byte swizzle: rows of 128 bytes, chunk c (16
 * bytes) of row r lies at place c ^ (r % 8).  A panel starts at a multiple of 1024 bytes.  It serves as a K-major operand, where
 * the sum runs over its columns, and as an MN-major one, where it runs over its rows.
 *
 * ss: both operands in shared memory; rs: A in registers.  Accumulators and A fragments in registers have the layout of
 * mma.m16n8k16 (ptx.cuh), warp w of the warpgroup having rows 16 w and on.
 * Invariant: between a WGMMA and the wait for it nobody touches its registers.  Only code for
 * sm_90a may use this; what else is compiled sees empty functions that no kernel may reach. */
#ifndef VERLC_DEV_CUDA_WGMMA_CUH
#define VERLC_DEV_CUDA_WGMMA_CUH

#include "device/cuda/ptx.cuh"

#if !defined(__CUDA_ARCH__) || defined(__CUDA_ARCH_FEAT_SM90_ALL)
#define WGMMA_ENABLED 1
#else
#define WGMMA_ENABLED 0
#endif

enum { PANEL_ROW = 128 }; /* bytes of a row of a panel */

/* The launch's dynamic shared memory, which starts where a panel may. */
static __device__ __forceinline__ char *panel_memory() {
    extern __shared__ __align__(1024) char dynamic_panel_memory[];
    return dynamic_panel_memory;
}

/* Where 8 columns from 8 * chunk on, of row `row`, lie in a panel. */
static __device__ __forceinline__ uint32_t panel_offset(int row, int chunk) {
    return (uint32_t)(row * PANEL_ROW + ((chunk ^ (row & 7)) << 4));
}

/* Shared-memory matrix descriptor: 8 rows are 1024 bytes, 128-byte swizzle. */
static __device__ __forceinline__ uint64_t panel_desc(uint32_t addr) {
    return (uint64_t)((addr & 0x3ffffu) >> 4) | (uint64_t)1 << 16 | (uint64_t)(1024 >> 4) << 32 | (uint64_t)1 << 62;
}

/* The same of an MN-major operand of several panels, one every `next` bytes: 64 columns each, one after the other. */
static __device__ __forceinline__ uint64_t panels_desc_mn(uint32_t addr, int next) {
    return (uint64_t)((addr & 0x3ffffu) >> 4) | (uint64_t)(next >> 4) << 16 | (uint64_t)(1024 >> 4) << 32 | (uint64_t)1 << 62;
}

/* Its lower half; the upper half is 0x40000040 for any panel. */
static __device__ __forceinline__ uint32_t panel_desc_low(uint32_t addr) { return (uint32_t)panel_desc(addr); }

/* Makes this thread's writes to shared memory visible to the async proxy (WGMMA, TMA) after the next barrier. */
static __device__ __forceinline__ void fence_proxy_async() {
#if WGMMA_ENABLED
    asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
#endif
}
/* Before the first WGMMA after its registers were written. */
static __device__ __forceinline__ void wgmma_fence() {
#if WGMMA_ENABLED
    asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
#endif
}
/* The WGMMAs since the last commit are a group; wait until at most N groups are in flight. */
static __device__ __forceinline__ void wgmma_commit() {
#if WGMMA_ENABLED
    asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
#endif
}
template <int N> static __device__ __forceinline__ void wgmma_wait() {
#if WGMMA_ENABLED
    asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(N) : "memory");
#endif
}
/* A compiler fence: keeps uses of these registers on their side of the fences and waits. */
template <int N> static __device__ __forceinline__ void wgmma_fence_registers(float (&d)[N][4]) {
#pragma unroll
    for (int i = 0; i < N; i++) asm volatile("" : "+f"(d[i][0]), "+f"(d[i][1]), "+f"(d[i][2]), "+f"(d[i][3])::"memory");
}

#define WGMMA_D8(d, i)                                                                                                   \
    "+f"(d[i][0]), "+f"(d[i][1]), "+f"(d[i][2]), "+f"(d[i][3]), "+f"(d[i + 1][0]), "+f"(d[i + 1][1]), "+f"(d[i + 1][2]), \
        "+f"(d[i + 1][3])
#define WGMMA_D(d) WGMMA_D8(d, 0), WGMMA_D8(d, 2), WGMMA_D8(d, 4), WGMMA_D8(d, 6)
#define WGMMA_REGS                                                                                          \
    "{%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, %16, %17, %18, %19, %20, %21, " \
    "%22, %23, %24, %25, %26, %27, %28, %29, %30, %31}"

/* d (64, 64) = (add ? d : 0) + A . B^T over 16 columns: A and B 64 rows each, K-major. */
static __device__ __forceinline__ void wgmma_m64n64_ss(float (&d)[8][4], uint64_t a, uint64_t b, int add) {
#if WGMMA_ENABLED
    asm volatile("{.reg .pred p; setp.ne.b32 p, %34, 0; wgmma.mma_async.sync.aligned.m64n64k16.f32.bf16.bf16 " WGMMA_REGS
                 ", %32, %33, p, 1, 1, 0, 0;}"
                 : WGMMA_D(d)
                 : "l"(a), "l"(b), "r"(add));
#endif
}
#define WGMMA_NEW8(d, i)                                                                                                 \
    "=f"(d[i][0]), "=f"(d[i][1]), "=f"(d[i][2]), "=f"(d[i][3]), "=f"(d[i + 1][0]), "=f"(d[i + 1][1]), "=f"(d[i + 1][2]), \
        "=f"(d[i + 1][3])
/* d = A . B^T: scale-d 0, so registers need no initial value. */
static __device__ __forceinline__ void wgmma_m64n64_ss_zero(float (&d)[8][4], uint64_t a, uint64_t b) {
#if WGMMA_ENABLED
    asm volatile("wgmma.mma_async.sync.aligned.m64n64k16.f32.bf16.bf16 " WGMMA_REGS ", %32, %33, 0, 1, 1, 0, 0;"
                 : WGMMA_NEW8(d, 0), WGMMA_NEW8(d, 2), WGMMA_NEW8(d, 4), WGMMA_NEW8(d, 6)
                 : "l"(a), "l"(b));
#endif
}
/* d (64, 64) += A . B: A (64, 16) in registers, B 16 rows of a panel, MN-major. */
static __device__ __forceinline__ void wgmma_m64n64_rs(float (&d)[8][4], const uint32_t (&a)[4], uint64_t b) {
#if WGMMA_ENABLED
    asm volatile("wgmma.mma_async.sync.aligned.m64n64k16.f32.bf16.bf16 " WGMMA_REGS ", {%32, %33, %34, %35}, %36, 1, 1, 1, 1;"
                 : WGMMA_D(d)
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b));
#endif
}

#define WGMMA_R8 "%0, %1, %2, %3, %4, %5, %6, %7"
#define WGMMA_R16 WGMMA_R8 ", %8, %9, %10, %11, %12, %13, %14, %15"
#define WGMMA_R24 WGMMA_R16 ", %16, %17, %18, %19, %20, %21, %22, %23"
#define WGMMA_R32 WGMMA_R24 ", %24, %25, %26, %27, %28, %29, %30, %31"
#define WGMMA_R40 WGMMA_R32 ", %32, %33, %34, %35, %36, %37, %38, %39"
#define WGMMA_R48 WGMMA_R40 ", %40, %41, %42, %43, %44, %45, %46, %47"
#define WGMMA_SMALL_N(N, REGS, A, B, P, ...)                                                                             \
    asm volatile("{\n.reg .pred p;\n.reg .b64 a, b;\nmov.b64 a, {" A ", 0x40000040};\nmov.b64 b, {" B ", 0x40000040};\n" \
                 "setp.ne.b32 p, " P ", 0;\nwgmma.mma_async.sync.aligned.m64n" N "k16.f32.bf16.bf16 "                    \
                 "{" REGS "}, a, b, p, 1, 1, 0, 0;\n}"                                                                   \
                 : __VA_ARGS__                                                                                           \
                 : "r"(a), "r"(b), "r"(1))
/* d (64, 8 NB) += A . B^T over 16 columns: A 64 rows, B 8 NB rows, K-major. a, b: panel_desc_low. Where the compiler sees that
 * a and b are warp-uniform (they come from a shuffle, say), WGMMAs follow each other without a move between. */
template <int NB> static __device__ __forceinline__ void wgmma_small_n(float (&d)[NB][4], uint32_t a, uint32_t b) {
#if WGMMA_ENABLED
    static_assert(NB % 2 == 0 && NB <= 12, "a size that is written out below");
    if constexpr (NB == 2) WGMMA_SMALL_N("16", WGMMA_R8, "%8", "%9", "%10", WGMMA_D8(d, 0));
    if constexpr (NB == 4) WGMMA_SMALL_N("32", WGMMA_R16, "%16", "%17", "%18", WGMMA_D8(d, 0), WGMMA_D8(d, 2));
    if constexpr (NB == 6) WGMMA_SMALL_N("48", WGMMA_R24, "%24", "%25", "%26", WGMMA_D8(d, 0), WGMMA_D8(d, 2), WGMMA_D8(d, 4));
    if constexpr (NB == 8)
        WGMMA_SMALL_N("64", WGMMA_R32, "%32", "%33", "%34", WGMMA_D8(d, 0), WGMMA_D8(d, 2), WGMMA_D8(d, 4), WGMMA_D8(d, 6));
    if constexpr (NB == 10)
        WGMMA_SMALL_N("80", WGMMA_R40, "%40", "%41", "%42", WGMMA_D8(d, 0), WGMMA_D8(d, 2), WGMMA_D8(d, 4), WGMMA_D8(d, 6),
                      WGMMA_D8(d, 8));
    if constexpr (NB == 12)
        WGMMA_SMALL_N("96", WGMMA_R48, "%48", "%49", "%50", WGMMA_D8(d, 0), WGMMA_D8(d, 2), WGMMA_D8(d, 4), WGMMA_D8(d, 6),
                      WGMMA_D8(d, 8), WGMMA_D8(d, 10));
#endif
}

#define WGMMA_D32(d, i) WGMMA_D8(d, i), WGMMA_D8(d, i + 2), WGMMA_D8(d, i + 4), WGMMA_D8(d, i + 6)
#define WGMMA_REGS_256                                                                                                          \
    "{%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, %16, %17, %18, %19, %20, %21, %22, %23, %24, %25, " \
    "%26, %27, %28, %29, %30, %31, %32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47, %48, %49, "  \
    "%50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63, %64, %65, %66, %67, %68, %69, %70, %71, %72, %73, "  \
    "%74, %75, %76, %77, %78, %79, %80, %81, %82, %83, %84, %85, %86, %87, %88, %89, %90, %91, %92, %93, %94, %95, %96, %97, "  \
    "%98, %99, %100, %101, %102, %103, %104, %105, %106, %107, %108, %109, %110, %111, %112, %113, %114, %115, %116, %117, "    \
    "%118, %119, %120, %121, %122, %123, %124, %125, %126, %127}"

/* d (64, 256) = (add ? d : 0) + A . B^T over 16 columns: A 64 rows, B 256 rows, K-major; A_MN, B_MN: that operand is MN-major. */
template <int A_MN = 0, int B_MN = 0>
static __device__ __forceinline__ void wgmma_m64n256_ss(float (&d)[32][4], uint64_t a, uint64_t b, int add) {
#if WGMMA_ENABLED
    asm volatile("{.reg .pred p; setp.ne.b32 p, %130, 0; wgmma.mma_async.sync.aligned.m64n256k16.f32.bf16.bf16 " WGMMA_REGS_256
                 ", %128, %129, p, 1, 1, %131, %132;}"
                 : WGMMA_D32(d, 0), WGMMA_D32(d, 8), WGMMA_D32(d, 16), WGMMA_D32(d, 24)
                 : "l"(a), "l"(b), "r"(add), "n"(A_MN), "n"(B_MN));
#endif
}

/* d (64, 256) += A . B: A (64, 16) in registers, B 16 rows of four panels, MN-major (panels_desc_mn). */
static __device__ __forceinline__ void wgmma_m64n256_rs(float (&d)[32][4], const uint32_t (&a)[4], uint64_t b) {
#if WGMMA_ENABLED
    asm volatile("wgmma.mma_async.sync.aligned.m64n256k16.f32.bf16.bf16 " WGMMA_REGS_256
                 ", {%128, %129, %130, %131}, %132, 1, 1, 1, 1;"
                 : WGMMA_D32(d, 0), WGMMA_D32(d, 8), WGMMA_D32(d, 16), WGMMA_D32(d, 24)
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b));
#endif
}

/* ---- warps and warpgroups ---- */

/* Four 8x8 matrices of bf16 to shared memory: the inverse of ldmatrix_x4. */
static __device__ __forceinline__ void stmatrix_x4(uint32_t addr, const uint32_t (&r)[4]) {
#if WGMMA_ENABLED
    asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(addr), "r"(r[0]), "r"(r[1]), "r"(r[2]),
                 "r"(r[3])
                 : "memory");
#endif
}
/* elect.sync: true for one thread of the warp; the compiler then knows that it is one. */
static __device__ __forceinline__ bool elect_one() {
    uint32_t mine = 0;
#if WGMMA_ENABLED
    asm volatile("{.reg .pred p; elect.sync _|p, 0xffffffff; selp.u32 %0, 1, 0, p;}" : "=r"(mine));
#endif
    return mine;
}
/* setmaxnreg: registers of each thread of this warpgroup from here on. */
template <int N> static __device__ __forceinline__ void setmaxnreg_dec() {
#if WGMMA_ENABLED
    asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(N));
#endif
}
template <int N> static __device__ __forceinline__ void setmaxnreg_inc() {
#if WGMMA_ENABLED
    asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(N));
#endif
}

#endif
