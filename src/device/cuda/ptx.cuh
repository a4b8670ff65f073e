/* ptx.cuh - wrappers of PTX instructions that every target has (sm_80), one function each: cp.async,
 * ldmatrix, mma.sync with bf16 and TF32 operands, named barriers, approximate base-2 exponential and logarithm,
 * L2 cache policies; and programmatic dependent launch, which is empty below sm_90.
 *
 * Hopper's instructions are in wgmma.cuh and tma.cuh.  docs/kernels/ptx.md says why these are not <cuda/ptx>.
 * One function is one instruction, so a kernel's bits depend on the order of its calls alone.
 *
 * Fragments of mma.m16n8k16 (lane = 4 g + t), with pairs of bf16 in a word, the lower
 * column in the lower half:
 *   A (16, 16): a[0] row g columns 2t, 2t+1; a[1] row g + 8; a[2], a[3] the same rows, columns + 8
 *   B (16, 8):  b0 rows 2t, 2t+1 of column g; b1 rows + 8
 *   C (16, 8):  c[0], c[1] row g columns 2t, 2t+1; c[2], c[3] row g + 8
 * Invariant: row r of C depends on row r of A, on B and on row r of the old C alone. */
#ifndef VERLC_DEV_CUDA_PTX_CUH
#define VERLC_DEV_CUDA_PTX_CUH

#include <cuda_runtime.h>
#include <stdint.h>

/* Address of shared memory as the instructions below want it. */
static __device__ __forceinline__ uint32_t smem_addr(const void *p) { return (uint32_t)__cvta_generic_to_shared(p); }

/* The launch's dynamic shared memory. */
template <class T> static __device__ __forceinline__ T &dynamic_shared() {
    extern __shared__ float4 dynamic_shared_memory[];
    return *(T *)dynamic_shared_memory;
}

/* 16 bytes from global to shared memory, both aligned to as much. */
static __device__ __forceinline__ void cp_async16(uint32_t dst, const void *src) {
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(dst), "l"(src) : "memory");
}
/* 16 or 8 bytes; zeros when !take (src is not read). */
static __device__ __forceinline__ void cp_async16(uint32_t dst, const void *src, bool take) {
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(dst), "l"(src), "r"(take ? 16 : 0) : "memory");
}
static __device__ __forceinline__ void cp_async8(uint32_t dst, const void *src, bool take) {
    asm volatile("cp.async.ca.shared.global [%0], [%1], 8, %2;" ::"r"(dst), "l"(src), "r"(take ? 8 : 0) : "memory");
}
/* cp_async16 that also prefetches 256 bytes into L2; with POLICY, L2 keeps the line by that cache policy. */
template <bool POLICY>
static __device__ __forceinline__ void cp_async16_l2(uint32_t dst, const void *src, bool take, uint64_t policy) {
    const int bytes = take ? 16 : 0;
    if (POLICY)
        asm volatile("cp.async.cg.shared.global.L2::cache_hint.L2::256B [%0], [%1], 16, %2, %3;" ::"r"(dst), "l"(src), "r"(bytes),
                     "l"(policy)
                     : "memory");
    else asm volatile("cp.async.cg.shared.global.L2::256B [%0], [%1], 16, %2;" ::"r"(dst), "l"(src), "r"(bytes) : "memory");
}
static __device__ __forceinline__ uint64_t l2_evict_normal() {
    uint64_t policy;
    asm("createpolicy.fractional.L2::evict_normal.b64 %0, 1.0;" : "=l"(policy));
    return policy;
}
static __device__ __forceinline__ uint64_t l2_evict_first() {
    uint64_t policy;
    asm("createpolicy.fractional.L2::evict_first.b64 %0, 1.0;" : "=l"(policy));
    return policy;
}
/* This thread's cp.async since the last commit are a group; wait until at most N groups are in flight. */
static __device__ __forceinline__ void cp_commit() { asm volatile("cp.async.commit_group;" ::: "memory"); }
template <int N> static __device__ __forceinline__ void cp_wait() { asm volatile("cp.async.wait_group %0;" ::"n"(N) : "memory"); }

/* Four 8x8 matrices of bf16; lane i gives the address of row i % 8 of matrix i / 8 (16 bytes). Lane 4 g + t gets
 * columns 2t, 2t+1 of row g of each; trans: rows 2t, 2t+1 of column g. */
static __device__ __forceinline__ void ldmatrix_x4(uint32_t (&r)[4], uint32_t addr) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
                 : "r"(addr)
                 : "memory");
}
static __device__ __forceinline__ void ldmatrix_x4_trans(uint32_t (&r)[4], uint32_t addr) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
                 : "r"(addr)
                 : "memory");
}

/* c (16, 8) f32 += a (16, 16) . b (16, 8). */
static __device__ __forceinline__ void mma_bf16(float (&c)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
    asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
        : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

/* c (16, 8) f32 += a (16, 8) . b (8, 8), TF32: lane 4 g + t has a[0] row g column t, a[1] row g + 8, a[2], a[3] the same rows,
 * column t + 4; b0 row t of column g, b1 row t + 4; c as in mma_bf16. */
static __device__ __forceinline__ void mma_tf32(float (&c)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
    asm("mma.sync.aligned.m16n8k8.row.col.f32.tf32.tf32.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
        : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

/* Named barrier `id` of the block among `threads` threads: wait for all; or arrive and go on. */
static __device__ __forceinline__ void named_barrier_sync(int id, int threads) {
    asm volatile("bar.sync %0, %1;" ::"r"(id), "r"(threads) : "memory");
}
static __device__ __forceinline__ void named_barrier_arrive(int id, int threads) {
    asm volatile("bar.arrive %0, %1;" ::"r"(id), "r"(threads) : "memory");
}

/* Programmatic dependent launch: lets the next kernel of the stream start; waits until the one before has ended. See
 * cuda_launch in context.cuh. */
static __device__ __forceinline__ void pdl_launch_dependents(void) {
#if defined __CUDA_ARCH__ && __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
}
static __device__ __forceinline__ void pdl_wait(void) {
#if defined __CUDA_ARCH__ && __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}

/* Butterflies over the warp: the same bits in every lane. */
#define WARP_ALL 0xffffffffu
static __device__ __forceinline__ float warp_sum(float v) {
#pragma unroll
    for (int lane = 16; lane > 0; lane /= 2) v = __fadd_rn(v, __shfl_xor_sync(WARP_ALL, v, lane));
    return v;
}
static __device__ __forceinline__ float warp_max(float v) {
#pragma unroll
    for (int lane = 16; lane > 0; lane /= 2) v = fmaxf(v, __shfl_xor_sync(WARP_ALL, v, lane));
    return v;
}

/* Two values rounded to bf16, to nearest even, as one word. */
static __device__ __forceinline__ uint32_t pack_bf16(float lo, float hi) {
    uint32_t r;
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(r) : "f"(hi), "f"(lo));
    return r;
}

/* 2^x to 2 ulp; 1 at 0, 0 at -inf, results under 2^-126 are 0. */
static __device__ __forceinline__ float exp2_approx(float x) {
    float y;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}
/* 1 / x to 1 ulp; 0 at inf. */
static __device__ __forceinline__ float rcp_approx(float x) {
    float y;
    asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}
/* log2(x) to a relative 2^-22. */
static __device__ __forceinline__ float log2_approx(float x) {
    float y;
    asm("lg2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}

#endif
