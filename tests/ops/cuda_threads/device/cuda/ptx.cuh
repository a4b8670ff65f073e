/* ptx.cuh - the instructions of src/device/cuda/ptx.cuh that the kernels here use, in C. */
#ifndef VERLC_TESTS_CUDA_THREADS_PTX_CUH
#define VERLC_TESTS_CUDA_THREADS_PTX_CUH

#include <cuda_bf16.h>
#include <cuda_runtime.h>
#include <stdio.h>
#include <stdlib.h>
#include <vector>

#define WARP_ALL 0xffffffffu
static inline float exp2_approx(float x) { return exp2f(x); }
static inline void pdl_launch_dependents() {}
static inline void pdl_wait() { threads_pdl_wait(); }
static inline float rcp_approx(float x) { return 1.0f / x; }
static inline float log2_approx(float x) { return log2f(x); }
template <class T> static inline T &dynamic_shared() { return *(T *)threads_shared; }
static inline uint32_t pack_bf16(float lo, float hi) {
    return (uint32_t)__float2bfloat16_rn(lo).bits | (uint32_t)__float2bfloat16_rn(hi).bits << 16;
}
static inline float warp_sum(float v) {
    for (int lane = 16; lane > 0; lane /= 2) v += __shfl_xor_sync(WARP_ALL, v, lane);
    return v;
}

static inline float warp_max(float v) {
    for (int lane = 16; lane > 0; lane /= 2) v = fmaxf(v, __shfl_xor_sync(WARP_ALL, v, lane));
    return v;
}

/* A copy happens at once or, in the other half of the blocks, where it is waited for. */
struct threads_copy {
    char *dst;
    const void *src;
    uint32_t bytes;
    bool take;
};
/* Of each thread of the block: groups of what it has issued; the last is not committed yet. */
template <class T> struct threads_groups {
    std::vector<std::vector<T>> of[1024];
    uint64_t block[1024];
    std::vector<std::vector<T>> &mine() {
        const unsigned i = threads_number();
        if (block[i] != threads_block_number()) of[i].clear(), block[i] = threads_block_number(); /* nobody has waited */
        if (of[i].empty()) of[i].emplace_back();
        return of[i];
    }
    void issue(const T &x) { mine().back().push_back(x); }
    void commit() { mine().emplace_back(); }
    template <class F> void wait(size_t left, F run) {
        for (auto &groups = mine(); groups.size() > left + 1; groups.erase(groups.begin()))
            for (const T &x : groups[0]) run(x);
    }
};
static threads_groups<threads_copy> threads_copies;
static inline void threads_copy_run(const threads_copy &c) {
    if (c.take) memcpy(c.dst, c.src, c.bytes);
    else memset(c.dst, 0, c.bytes);
}
static inline uint32_t smem_addr(const void *p) { return (uint32_t)((const char *)p - threads_shared); }
static inline void threads_copy_issue(const threads_copy &c) {
    if ((uintptr_t)c.dst % c.bytes || (c.take && (uintptr_t)c.src % c.bytes)) {
        fprintf(stderr, "cp_async: an address is not aligned\n");
        abort();
    }
    threads_copy_issued();
    if (threads_eager(THREADS_COPY)) threads_copy_run(c);
    else threads_copies.issue(c);
}
static inline void cp_async16(uint32_t dst, const void *src, bool take) {
    threads_copy_issue({threads_shared + dst, src, 16, take});
}
static inline void cp_async8(uint32_t dst, const void *src, bool take) { threads_copy_issue({threads_shared + dst, src, 8, take}); }
template <bool> static inline void cp_async16_l2(uint32_t dst, const void *src, bool take, uint64_t) { cp_async16(dst, src, take); }
static inline uint64_t l2_evict_normal() { return 0; }
static inline uint64_t l2_evict_first() { return 0; }
static inline void cp_commit() { threads_copies.commit(); }
template <int N> static inline void cp_wait() { threads_copies.wait(N, threads_copy_run); }
static inline void named_barrier_sync(int id, int threads) { threads_named_barrier(id, threads, true); }
static inline void named_barrier_arrive(int id, int threads) { threads_named_barrier(id, threads, false); }

static inline void threads_ldmatrix(uint32_t (&r)[4], uint32_t addr, bool trans) {
    const lane_bytes *const all = threads_exchange(&addr, sizeof addr);
    const int lane = (int)threadIdx.x & 31, g = lane / 4, t = lane % 4;
    if (addr % 16) {
        fprintf(stderr, "ldmatrix: an address is not aligned\n");
        abort();
    }
    for (int i = 0; i < 4; i++)
        for (int k = 0; k < 2; k++) {
            uint32_t row;
            uint16_t x;
            memcpy(&row, all[8 * i + (trans ? 2 * t + k : g)], sizeof row);
            memcpy(&x, threads_shared + row + (trans ? 2 * g : 4 * t + 2 * k), sizeof x);
            r[i] = k ? r[i] | (uint32_t)x << 16 : x;
        }
}
static inline void ldmatrix_x4(uint32_t (&r)[4], uint32_t addr) { threads_ldmatrix(r, addr, false); }
static inline void ldmatrix_x4_trans(uint32_t (&r)[4], uint32_t addr) { threads_ldmatrix(r, addr, true); }

/* m16n8k16. The order of its sums is not the hardware's; with MMA_CHAIN they are rounded at each step, so that kernels with
 * different orders of k differ. */
static inline void mma_bf16(float (&c)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
    const uint32_t mine[6] = {a[0], a[1], a[2], a[3], b0, b1};
    const lane_bytes *const all = threads_exchange(mine, sizeof mine);
    const int lane = (int)threadIdx.x & 31, g = lane / 4, t = lane % 4;
    float x[2][16], y[16][2]; /* rows g, g + 8; columns 2t, 2t + 1 */
    for (int k = 0; k < 16; k++)
        for (int h = 0; h < 2; h++) {
            uint16_t of_a, of_b;
            memcpy(&of_a, all[4 * g + k % 8 / 2] + 4 * (h + k / 8 * 2) + 2 * (k & 1), 2);
            memcpy(&of_b, all[4 * (2 * t + h) + k % 8 / 2] + 4 * (4 + k / 8) + 2 * (k & 1), 2);
            x[h][k] = __uint_as_float((uint32_t)of_a << 16), y[k][h] = __uint_as_float((uint32_t)of_b << 16);
        }
    static const bool chain = getenv("MMA_CHAIN") != NULL;
    double sum[4] = {c[0], c[1], c[2], c[3]};
    for (int k = 0; k < 16 && !chain; k++)
        for (int i = 0; i < 4; i++) sum[i] += (double)x[i / 2][k] * (double)y[k][i & 1];
    for (int i = 0; i < 4; i++) c[i] = chain ? c[i] : (float)sum[i];
    for (int k = 0; k < 16 && chain; k++) /* products of bf16 are exact */
        for (int i = 0; i < 4; i++) c[i] += x[i / 2][k] * y[k][i & 1];
}

/* m16n8k8; operands must be TF32. The order of its sums is not the hardware's. */
static inline void mma_tf32(float (&c)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
    const uint32_t mine[6] = {a[0], a[1], a[2], a[3], b0, b1};
    for (uint32_t u : mine)
        if (u & 0x1fff) {
            fprintf(stderr, "mma_tf32: an operand is not TF32\n");
            abort();
        }
    const lane_bytes *const all = threads_exchange(mine, sizeof mine);
    const auto at = [&](int from, int i) {
        float x;
        memcpy(&x, all[from] + 4 * i, 4);
        return (double)x;
    };
    const int lane = (int)threadIdx.x & 31, g = lane / 4, t = lane % 4;
    for (int i = 0; i < 4; i++) {
        const int row = g + (i & 2 ? 8 : 0), col = 2 * t + (i & 1);
        double sum = (double)c[i];
        for (int k = 0; k < 8; k++)
            sum += at(row % 8 * 4 + k % 4, (row >= 8) + (k >= 4 ? 2 : 0)) * at(col * 4 + k % 4, 4 + (k >= 4));
        c[i] = (float)sum;
    }
}

#endif
