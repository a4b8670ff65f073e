/* wgmma.cuh - the warpgroup's matrix product of Hopper (sm_90a), one function an
 * instruction: 64 x 64 results of f32 from operands of bf16, kept in flight.
 *
 * A panel is 64 columns of bf16 in shared memory, rows of 128 bytes whose 16-byte chunks are
 * permuted: chunk c of row r lies at place c ^ (r % 8).  A panel starts at a multiple of 1024
 * bytes.  It serves as an operand in two ways: by rows, where the sum runs over its columns,
 * and by columns, where it runs over its rows.
 *
 * Results and the fragments of a first operand in registers are those of mma.m16n8k16
 * (ptx.cuh), warp w of the group having rows 16 w and on.
 * Invariant: between a product and the wait for it nobody touches its registers. Only code for
 * sm_90a may use this; what else is compiled sees empty functions that no kernel may reach. */
#ifndef VERLC_DEV_CUDA_WGMMA_CUH
#define VERLC_DEV_CUDA_WGMMA_CUH

#include "dev/cuda/ptx.cuh"

#if !defined(__CUDA_ARCH__) || defined(__CUDA_ARCH_FEAT_SM90_ALL)
#define WGMMA_HERE 1
#else
#define WGMMA_HERE 0
#endif

enum { PANEL_ROW = 128 }; /* bytes of a row of a panel */

/* Where 8 columns from 8 * chunk on, of row `row`, lie in a panel. */
static __device__ __forceinline__ uint32_t panel_at(int row, int chunk) {
    return (uint32_t)(row * PANEL_ROW + ((chunk ^ (row & 7)) << 4));
}

/* What the instruction wants to know of an operand: 8 rows are 1024 bytes, the 128-byte permutation. */
static __device__ __forceinline__ uint64_t panel_desc(uint32_t addr) {
    return (uint64_t)((addr & 0x3ffffu) >> 4) | (uint64_t)1 << 16 | (uint64_t)(1024 >> 4) << 32 | (uint64_t)1 << 62;
}

/* Its lower half; the upper one, of any panel, is 0x40000040. */
static __device__ __forceinline__ uint32_t panel_low(uint32_t addr) { return (uint32_t)panel_desc(addr); }

/* Makes this thread's writes to shared memory visible to the products after the next barrier. */
static __device__ __forceinline__ void wgmma_publish() {
#if WGMMA_HERE
    asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
#endif
}
/* Before the first product after registers of one were written. */
static __device__ __forceinline__ void wgmma_fence() {
#if WGMMA_HERE
    asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
#endif
}
/* The products since the last commit are a group; wait until at most N groups are under way. */
static __device__ __forceinline__ void wgmma_commit() {
#if WGMMA_HERE
    asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
#endif
}
template <int N> static __device__ __forceinline__ void wgmma_wait() {
#if WGMMA_HERE
    asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(N) : "memory");
#endif
}
/* Keeps uses of these registers on their side of the fences and waits. */
template <int N> static __device__ __forceinline__ void wgmma_hold(float (&d)[N][4]) {
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

/* d (64, 64) = (add ? d : 0) + A . B^T over 16 columns: A and B 64 rows each, by rows. */
static __device__ __forceinline__ void wgmma_rows(float (&d)[8][4], uint64_t a, uint64_t b, int add) {
#if WGMMA_HERE
    asm volatile("{.reg .pred p; setp.ne.b32 p, %34, 0; wgmma.mma_async.sync.aligned.m64n64k16.f32.bf16.bf16 " WGMMA_REGS
                 ", %32, %33, p, 1, 1, 0, 0;}"
                 : WGMMA_D(d)
                 : "l"(a), "l"(b), "r"(add));
#endif
}
#define WGMMA_NEW8(d, i)                                                                                                 \
    "=f"(d[i][0]), "=f"(d[i][1]), "=f"(d[i][2]), "=f"(d[i][3]), "=f"(d[i + 1][0]), "=f"(d[i + 1][1]), "=f"(d[i + 1][2]), \
        "=f"(d[i + 1][3])
/* The same into registers that nobody has written: d = A . B^T. Nothing needs to define them while products are under way. */
static __device__ __forceinline__ void wgmma_rows_new(float (&d)[8][4], uint64_t a, uint64_t b) {
#if WGMMA_HERE
    asm volatile("wgmma.mma_async.sync.aligned.m64n64k16.f32.bf16.bf16 " WGMMA_REGS ", %32, %33, 0, 1, 1, 0, 0;"
                 : WGMMA_NEW8(d, 0), WGMMA_NEW8(d, 2), WGMMA_NEW8(d, 4), WGMMA_NEW8(d, 6)
                 : "l"(a), "l"(b));
#endif
}
/* d (64, 64) += A . B: A (64, 16) in registers, B 16 rows of a panel, by columns. */
static __device__ __forceinline__ void wgmma_cols(float (&d)[8][4], const uint32_t (&a)[4], uint64_t b) {
#if WGMMA_HERE
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
#define WGMMA_FEW(N, REGS, A, B, P, ...)                                                                                 \
    asm volatile("{\n.reg .pred p;\n.reg .b64 a, b;\nmov.b64 a, {" A ", 0x40000040};\nmov.b64 b, {" B ", 0x40000040};\n" \
                 "setp.ne.b32 p, " P ", 0;\nwgmma.mma_async.sync.aligned.m64n" N "k16.f32.bf16.bf16 "                    \
                 "{" REGS "}, a, b, p, 1, 1, 0, 0;\n}"                                                                   \
                 : __VA_ARGS__                                                                                           \
                 : "r"(a), "r"(b), "r"(1))
/* d (64, 8 NB) += A . B^T over 16 columns: A 64 rows, B 8 NB rows, by rows. a, b: panel_low. Where the compiler sees that
 * all of a warp has the same a and b (they come from a shuffle, say), products follow each other without a move between. */
template <int NB> static __device__ __forceinline__ void wgmma_few(float (&d)[NB][4], uint32_t a, uint32_t b) {
#if WGMMA_HERE
    static_assert(NB % 2 == 0 && NB <= 12, "a size that is written out below");
    if constexpr (NB == 2) WGMMA_FEW("16", WGMMA_R8, "%8", "%9", "%10", WGMMA_D8(d, 0));
    if constexpr (NB == 4) WGMMA_FEW("32", WGMMA_R16, "%16", "%17", "%18", WGMMA_D8(d, 0), WGMMA_D8(d, 2));
    if constexpr (NB == 6) WGMMA_FEW("48", WGMMA_R24, "%24", "%25", "%26", WGMMA_D8(d, 0), WGMMA_D8(d, 2), WGMMA_D8(d, 4));
    if constexpr (NB == 8)
        WGMMA_FEW("64", WGMMA_R32, "%32", "%33", "%34", WGMMA_D8(d, 0), WGMMA_D8(d, 2), WGMMA_D8(d, 4), WGMMA_D8(d, 6));
    if constexpr (NB == 10)
        WGMMA_FEW("80", WGMMA_R40, "%40", "%41", "%42", WGMMA_D8(d, 0), WGMMA_D8(d, 2), WGMMA_D8(d, 4), WGMMA_D8(d, 6),
                  WGMMA_D8(d, 8));
    if constexpr (NB == 12)
        WGMMA_FEW("96", WGMMA_R48, "%48", "%49", "%50", WGMMA_D8(d, 0), WGMMA_D8(d, 2), WGMMA_D8(d, 4), WGMMA_D8(d, 6),
                  WGMMA_D8(d, 8), WGMMA_D8(d, 10));
#endif
}

#endif
