/* test_delta_inexact.cu - the forms of tools/gpu_delta_inexact.cu as threads of a CPU, beside its plain recurrence in double. */
#include <cuda_runtime.h>

#include "device/cuda/ptx.cuh"

#define GPU_DELTA_INEXACT_TEST
#define VERLC_STMATRIX_TRANS
static inline void stmatrix_x4_trans(uint32_t addr, const uint32_t (&r)[4]) {
    const lane_bytes *const all = threads_exchange(&addr, sizeof addr);
    const int lane = (int)threadIdx.x & 31, g = lane / 4, t = lane % 4;
    for (int i = 0; i < 4; i++)
        for (int k = 0; k < 2; k++) {
            uint32_t row;
            const uint16_t x = (uint16_t)(r[i] >> 16 * k);
            memcpy(&row, all[8 * i + 2 * t + k], sizeof row);
            memcpy(threads_shared + row + 2 * g, &x, sizeof x);
        }
}
static inline float rsqrtf(float x) { return 1.0f / sqrtf(x); }

struct delta_shape;
static void *gpu_alloc(size_t bytes) {
    void *const p = aligned_alloc(256, (bytes + 255) & ~(size_t)255);
    memset(p, 0xff, bytes);
    return p;
}
static void gpu_free(void *p) { free(p); }
static void gpu_copy(void *to, const void *from, size_t bytes) { memcpy(to, from, bytes); }
static void launch(void (*kernel)(delta_shape), dim3 grid, int threads, size_t shared, bool early, const delta_shape &j);

#include "tools/gpu_delta_inexact.cu"

static void launch(void (*kernel)(delta_shape), dim3 grid, int threads, size_t shared, bool, const delta_shape &j) {
    if (shared > 227 << 10) abort();
    threads_run(grid, (unsigned)threads, shared, [&] { kernel(j); });
}

int main() {
    bool ok = check_rows(false);
    ok = check_rows(true) && ok;
    ok = check_steps() && ok;
    return ok ? 0 : 1;
}
