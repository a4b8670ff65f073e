/* test_gemm_small_m.cu - every kernel of gemm_small_m_sm90.cu, its threads and clusters on the CPU: the bits of one sum over K in
 * steps of 16, whatever the tile, the stages and who loads them. */
#include "device/cuda/gemm/gemm.cuh"
#include "device/cuda/swiglu.cuh"

#include <stdarg.h>
#include <stddef.h>
#include <setjmp.h>
#include <vector>
extern "C" {
#include <cmocka.h>
}

enum { N_KINDS = GEMM_N_SMALL_M_TMA + GEMM_N_SMALL_M_SWIGLU };
typedef std::vector<__nv_bfloat16> halves;

struct gemm_case {
    int64_t m, n, k;
    bool bias, f32, add;
};
static struct cuda_gemm gemm;
static struct cuda device;
static int n_ran[N_KINDS];

static halves noise(int64_t count, uint32_t seed) {
    halves v((size_t)count);
    uint32_t s = seed * 2654435761u + 12345;
    for (auto &x : v) {
        s = s * 1664525u + 1013904223u;
        x = __float2bfloat16_rn((float)(s >> 8) * 0x1p-23f - 1.0f);
    }
    return v;
}
/* The sums as threads_wgmma_run makes them. */
static std::vector<float> sums(const struct gemm_case &g, const halves &x, const halves &w) {
    std::vector<float> out((size_t)(g.m * g.n));
    for (int64_t i = 0; i < g.m; i++)
        for (int64_t j = 0; j < g.n; j++) {
            float sum = 0;
            for (int64_t k = 0; k < g.k; k += 16) {
                double step = (double)sum;
                for (int64_t e = k; e < k + 16; e++)
                    step += (double)__bfloat162float(x[(size_t)(i * g.k + e)]) * (double)__bfloat162float(w[(size_t)(j * g.k + e)]);
                sum = (float)step;
            }
            out[(size_t)(i * g.n + j)] = sum;
        }
    return out;
}

/* out has a row more than m, which must stay. */
static void check(const struct gemm_case &g, bool fused) {
    const halves x = noise(g.m * g.k, 1), w = noise(g.n * g.k, 2), bias = noise(g.n, 3);
    const std::vector<float> sum = sums(g, x, w);
    const int64_t width = fused ? g.n / 2 : g.n, rows = g.m + 1;
    for (int kind = fused ? GEMM_N_SMALL_M_TMA : 0; kind < (fused ? (int)N_KINDS : (int)GEMM_N_SMALL_M_TMA); kind++) {
        std::vector<float> f((size_t)(rows * width), 3.0f);
        halves h((size_t)(rows * width), __float2bfloat16_rn(3.0f)), unused((size_t)(g.m * g.n));
        struct cuda_gemm_args a = {};
        a.op = CUDA_GEMM_FWD, a.m = g.m, a.n = g.n, a.k = g.k, a.a = x.data(), a.b = w.data(), a.in = DT_BF16;
        a.out_dt = g.f32 ? DT_F32 : DT_BF16, a.out = g.f32 ? (void *)f.data() : (void *)h.data(), a.ld_out = width, a.add = g.add;
        a.bias = g.bias ? bias.data() : NULL, a.gate_up = fused ? unused.data() : NULL;
        bool ran = false;
        assert_int_equal(gemm_small_m_tma(&device, &a, kind, &ran), 0);
        if (!ran) continue;
        n_ran[kind]++;
        const auto with_bias = [&](int64_t i, int64_t j) {
            return sum[(size_t)(i * g.n + j)] + (g.bias ? __bfloat162float(bias[(size_t)j]) : 0.0f);
        };
        for (int64_t i = 0; i < rows; i++)
            for (int64_t j = 0; j < width; j++) {
                const size_t at = (size_t)(i * width + j);
                const float got = g.f32 ? f[at] : __bfloat162float(h[at]);
                float want = 3.0f;
                if (i < g.m && fused)
                    want = swiglu(__bfloat162float(__float2bfloat16_rn(with_bias(i, j))),
                                  __bfloat162float(__float2bfloat16_rn(with_bias(i, j + width))));
                else if (i < g.m) want = with_bias(i, j) + (g.add ? 3.0f : 0.0f);
                if (!g.f32) want = __bfloat162float(__float2bfloat16_rn(want));
                if (memcmp(&got, &want, sizeof got) != 0)
                    fail_msg("kernel %d, %lld x %lld x %lld: row %lld, column %lld is %.9g, not %.9g", kind, (long long)g.m,
                             (long long)g.n, (long long)g.k, (long long)i, (long long)j, (double)got, (double)want);
            }
    }
}

static void test_plain(void **) {
    static const struct gemm_case cases[] = {{80, 136, 5120, false, false, false}, {80, 64, 6144, false, true, true},
                                             {1, 72, 512, true, false, false},     {17, 200, 768, false, true, false},
                                             {96, 96, 3072, false, true, true},    {41, 48, 2048, true, false, false},
                                             {8, 16, 256, false, true, true},      {64, 128, 1024, false, true, true},
                                             {128, 96, 2560, false, true, true},   {100, 64, 1024, false, false, false}};
    for (const auto &g : cases) check(g, false);
    for (int i = 0; i < GEMM_N_SMALL_M_TMA; i++) assert_int_not_equal(n_ran[i], 0);
}
static void test_swiglu(void **) {
    /* the last kernel wants more columns than tiles of 40 for each multiprocessor */
    static const struct gemm_case cases[] = {{80, 208, 2048, false, false, false},
                                             {40, 400, 1024, true, false, false},
                                             {3, 176, 640, false, false, false},
                                             {128, 192, 1024, false, false, false}};
    for (const auto &g : cases) check(g, true);
    for (int i = GEMM_N_SMALL_M_TMA; i < N_KINDS; i++) assert_int_not_equal(n_ran[i], 0);
}

int main(void) {
    device.n_sm = 2, device.smem_max = 227 << 10, device.gemm = &gemm;
    const struct CMUnitTest tests[] = {cmocka_unit_test(test_plain), cmocka_unit_test(test_swiglu)};
    return cmocka_run_group_tests(tests, NULL, NULL);
}
