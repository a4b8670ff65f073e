/* ptx.cuh - the instructions of src/device/cuda/ptx.cuh that the kernels here use, in C. */
#ifndef VERLC_TESTS_CUDA_THREADS_PTX_CUH
#define VERLC_TESTS_CUDA_THREADS_PTX_CUH

#include <cuda_runtime.h>
#include <stdio.h>
#include <stdlib.h>

#define WARP_ALL 0xffffffffu
static inline float exp2_approx(float x) { return exp2f(x); }
static inline void pdl_launch_dependents() {}
static inline void pdl_wait() {}
static inline float rcp_approx(float x) { return 1.0f / x; }
template <class T> static inline T &dynamic_shared() { return *(T *)threads_shared; }

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
