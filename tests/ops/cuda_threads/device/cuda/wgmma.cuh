/* wgmma.cuh - the instructions of src/device/cuda/wgmma.cuh that the kernels here use, in C: what a matrix descriptor with the
 * 128-byte swizzle means, and where each lane's accumulators are.
 *
 * In one half of the blocks a WGMMA happens where it is issued, in the other where it is waited for: a kernel that reads shared
 * memory too early, or overwrites it too early, gives other results. */
#ifndef VERLC_TESTS_CUDA_THREADS_WGMMA_CUH
#define VERLC_TESTS_CUDA_THREADS_WGMMA_CUH

#include "device/cuda/ptx.cuh"

#define WGMMA_ENABLED 1

enum { PANEL_ROW = 128 };
static inline char *panel_memory() { return threads_shared; }
static inline uint32_t panel_offset(int row, int chunk) { return (uint32_t)(row * PANEL_ROW + ((chunk ^ (row & 7)) << 4)); }
static inline uint64_t panels_desc_mn(uint32_t addr, int next) {
    return (uint64_t)((addr & 0x3ffffu) >> 4) | (uint64_t)(next >> 4) << 16 | (uint64_t)(1024 >> 4) << 32 | (uint64_t)1 << 62;
}
static inline uint64_t panel_desc(uint32_t addr) { return panels_desc_mn(addr, 16); }
static inline uint32_t panel_desc_low(uint32_t addr) { return (uint32_t)panel_desc(addr); }

/* d (64, n) = (add ? d : 0) + A . B^T over 16 columns. */
struct threads_wgmma {
    float *d;
    int n;
    bool add, a_in_registers, b_mn;
    uint32_t a[4];
    uint64_t a_desc, b_desc;
    bool a_mn = false;
};
static threads_groups<threads_wgmma> threads_wgmmas;

/* Element (i, k) of an operand: i its row or column, k in the sum. */
static inline double threads_operand(uint64_t desc, bool mn, int i, int k) {
    const auto field = [&](int bit) { return (uint32_t)(desc >> bit & 0x3fff) << 4; };
    uint32_t at = field(0);
    if (mn) at += (uint32_t)(i / 64) * field(16) + (uint32_t)(k / 8) * field(32) + (uint32_t)(k % 8 * 128 + i % 64 * 2);
    else at += (uint32_t)(i / 8) * field(32) + (uint32_t)(i % 8 * 128 + k * 2);
    at ^= (at >> 7 & 7) << 4;
    if (at >= threads_shared_bytes()) {
        fprintf(stderr, "wgmma: an operand lies behind the block's shared memory\n");
        abort();
    }
    uint16_t x;
    memcpy(&x, threads_shared + at, sizeof x);
    return (double)__uint_as_float((uint32_t)x << 16);
}
/* The order of its sums is not the hardware's. */
static inline void threads_wgmma_run(const threads_wgmma &w) {
    const int lane = (int)threadIdx.x & 31, g = lane / 4, t = lane % 4, row = (int)threadIdx.x / 32 % 4 * 16 + g;
    double a[2][16];
    if (w.a_in_registers) {
        const lane_bytes *const all = threads_exchange(w.a, sizeof w.a);
        for (int i = 0; i < 2; i++)
            for (int k = 0; k < 16; k++) {
                uint16_t x;
                memcpy(&x, all[g * 4 + k % 8 / 2] + 4 * (i + k / 8 * 2) + k % 2 * 2, sizeof x);
                a[i][k] = (double)__uint_as_float((uint32_t)x << 16);
            }
    } else
        for (int i = 0; i < 2; i++)
            for (int k = 0; k < 16; k++) a[i][k] = threads_operand(w.a_desc, w.a_mn, row + 8 * i, k);
    for (int c = 0; c < w.n; c += 8)
        for (int e = 0; e < 2; e++) {
            double b[16];
            for (int k = 0; k < 16; k++) b[k] = threads_operand(w.b_desc, w.b_mn, c + 2 * t + e, k);
            for (int i = 0; i < 2; i++) {
                float *const d = &w.d[c / 2 + i * 2 + e];
                double sum = w.add ? (double)*d : 0;
                for (int k = 0; k < 16; k++) sum += a[i][k] * b[k];
                *d = (float)sum;
            }
        }
}
static inline void threads_wgmma_issue(const threads_wgmma &w) {
    if (threads_eager(THREADS_WGMMA)) threads_wgmma_run(w);
    else threads_wgmmas.issue(w);
}

static inline void fence_proxy_async() {}
template <int N> static inline void setmaxnreg_dec() {}
template <int N> static inline void setmaxnreg_inc() {}
static inline void wgmma_fence() {}
static inline void wgmma_commit() { threads_wgmmas.commit(); }
/* All of a warp together, as on a GPU: none says that an operand may be overwritten before all have read it. */
template <int N> static inline void wgmma_wait() {
    threads_wgmmas.wait(N, threads_wgmma_run);
    __syncwarp();
}
template <int N> static inline void wgmma_fence_registers(float (&)[N][4]) {}

static inline void wgmma_m64n64_ss(float (&d)[8][4], uint64_t a, uint64_t b, int add) {
    threads_wgmma_issue({d[0], 64, add != 0, false, false, {}, a, b});
}
static inline void wgmma_m64n64_ss_zero(float (&d)[8][4], uint64_t a, uint64_t b) { wgmma_m64n64_ss(d, a, b, 0); }
static inline void wgmma_m64n64_rs(float (&d)[8][4], const uint32_t (&a)[4], uint64_t b) {
    threads_wgmma_issue({d[0], 64, true, true, true, {a[0], a[1], a[2], a[3]}, 0, b});
}
static inline void wgmma_m64n256_rs(float (&d)[32][4], const uint32_t (&a)[4], uint64_t b) {
    threads_wgmma_issue({d[0], 256, true, true, true, {a[0], a[1], a[2], a[3]}, 0, b});
}
template <int A_MN = 0, int B_MN = 0> static inline void wgmma_m64n256_ss(float (&d)[32][4], uint64_t a, uint64_t b, int add) {
    threads_wgmma_issue({d[0], 256, add != 0, false, B_MN != 0, {}, a, b, A_MN != 0});
}
static inline bool elect_one() {
    __syncwarp();
    return threadIdx.x % 32 == 0;
}
template <int NB> static inline void wgmma_small_n(float (&d)[NB][4], uint32_t a, uint32_t b) {
    const uint64_t upper = (uint64_t)0x40000040 << 32;
    threads_wgmma_issue({d[0], 8 * NB, true, false, false, {}, upper | a, upper | b});
}

/* Each lane writes its part of a row whose address another lane has. */
static inline void stmatrix_x4(uint32_t addr, const uint32_t (&r)[4]) {
    const lane_bytes *const all = threads_exchange(&addr, sizeof addr);
    const int lane = (int)threadIdx.x & 31;
    for (int i = 0; i < 4; i++) {
        uint32_t row;
        memcpy(&row, all[8 * i + lane / 4], sizeof row);
        memcpy(threads_shared + row + lane % 4 * 4, &r[i], 4);
    }
}

#endif
