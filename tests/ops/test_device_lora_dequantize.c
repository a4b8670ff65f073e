/* test_device_lora_dequantize.c - dequantization of NF4 and INT8 weights, blocks of LoRA adapters added to blocks, also those of
 * stacks, packed stacks, and the LM head's backward without a weight gradient.  Every backend against sums made here, to the bit;
 * blocks and stacks on a GPU too.  Argument `blocks`: added blocks alone. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <cmocka.h>

#include "base/buf.h"
#include "base/err.h"
#include "base/rng.h"
#include "device/device.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

#define OK(call)                                                                \
    do {                                                                        \
        if ((call) < 0) fail_msg("%s: %s (%s)", #call, err_msg(), err_trace()); \
    } while (0)

static void each_device(void (*check)(struct dev *d)) {
    struct dev d;
    OK(dev_open_ref(&d));
    check(&d);
    dev_close(&d);
    for (int threads = 1; threads <= 2; threads++) {
        OK(dev_open_cpu(&d, threads, NULL));
        check(&d);
        assert_int_equal(d.allocated, 0);
        dev_close(&d);
    }
}

static void on_gpu(void (*check)(struct dev *d)) {
    const char *only = getenv("VERLC_TEST_BACKENDS");
    char why[512];
    struct dev d;
    if (only && !strstr(only, "cuda")) return;
    if (!dev_cuda_present(why, sizeof why)) {
        print_message("skip: %s\n", why);
        return;
    }
    OK(dev_open_cuda(&d, 0));
    check(&d);
    dev_close(&d);
}

static void *up(struct dev *d, const void *host, size_t bytes) {
    void *p = NULL;
    OK(dev_alloc(d, bytes, &p));
    OK(dev_copy_in(d, p, host, bytes));
    return p;
}
static float *random_floats(int64_t n, uint64_t seed) {
    struct rng r = {.seed = seed, .stream = RNG_TEST};
    float *v = xmalloc((size_t)n * sizeof *v);
    for (int64_t i = 0; i < n; i++) v[i] = rng_normal(&r);
    return v;
}

/* ---- blocks ---- */

/* In one matrix and in stacks: what lies outside of the blocks does not change, and each has the bits that it has alone. */
static void check_block(struct dev *d) {
    enum { COUNT = 5, R = 70, C = 301, R2 = 40, C2 = 290, DST_NEXT = R * C + 33, SRC_NEXT = R2 * C2 + 1, DST = COUNT * DST_NEXT };
    static const struct {
        int64_t count, dst_row, dst_col, src_row, src_col, rows, cols;
        float scale;
    } cases[] = {{0, 0, 0, 0, 0, R2, C2, 1}, /* a count of 0 is one */
                 {1, 3, 7, 5, 11, 30, 200, -1.7f},
                 {0, R - 1, C - 1, 0, 0, 1, 1, 2},
                 {0, 5, 5, 5, 5, 0, 9, 3},
                 {0, 0, 4, 39, 0, 1, 1, 0.3f},
                 {COUNT, 0, 0, 0, 0, R2, C2, 1},
                 {COUNT, 2, 16, 1, 0, 39, 16, -1.7f}, /* a B: few columns */
                 {3, R - 1, C - 1, 39, 3, 1, 1, 0.3f}};
    float *dst = random_floats(DST, 7), *src = random_floats(COUNT * SRC_NEXT, 8), *got = xmalloc(sizeof(float) * DST);
    float *want = xmalloc(sizeof(float) * DST);
    void *src_dev = up(d, src, sizeof(float) * COUNT * SRC_NEXT);
    for (size_t c = 0; c < sizeof cases / sizeof *cases; c++) {
        void *dst_dev = up(d, dst, sizeof(float) * DST);
        const struct add_block_args a = {.dst = tensor_2d(dst_dev, DT_F32, R, C),
                                         .src = tensor_2d(src_dev, DT_F32, R2, C2),
                                         .dst_row = cases[c].dst_row,
                                         .dst_col = cases[c].dst_col,
                                         .src_row = cases[c].src_row,
                                         .src_col = cases[c].src_col,
                                         .rows = cases[c].rows,
                                         .cols = cases[c].cols,
                                         .scale = cases[c].scale,
                                         .count = cases[c].count,
                                         .dst_next = DST_NEXT,
                                         .src_next = SRC_NEXT};
        OK(dev_add_block(d, &a));
        OK(dev_copy_out(d, got, dst_dev, sizeof(float) * DST));
        memcpy(want, dst, sizeof(float) * DST);
        for (int64_t n = 0; n < (a.count ? a.count : 1); n++)
            for (int64_t i = 0; i < a.rows; i++)
                for (int64_t j = 0; j < a.cols; j++) {
                    const float product = a.scale * src[n * SRC_NEXT + (a.src_row + i) * C2 + a.src_col + j];
                    want[n * DST_NEXT + (a.dst_row + i) * C + a.dst_col + j] += product;
                }
        for (int64_t i = 0; i < DST; i++)
            if (memcmp(&got[i], &want[i], sizeof *got) != 0)
                fail_msg("%s, case %zu: element %d is %g, want %g", d->ops->name, c, (int)i, (double)got[i], (double)want[i]);
        dev_free(d, dst_dev, sizeof(float) * DST);
    }
    const struct tensor one = tensor_2d(src_dev, DT_F32, R2, C2);
    const struct add_block_args out = {.dst = one, .src = one, .dst_row = 1, .rows = R2, .cols = C2, .scale = 1};
    assert_int_equal(dev_add_block(d, &out), ERR_INVAL);
    struct add_block_args bad = {.dst = one, .src = one, .rows = 1, .cols = 1, .scale = 1, .count = 2, .src_next = R2 * C2};
    bad.dst_next = R2 * C2 - 1; /* they overlap */
    assert_int_equal(dev_add_block(d, &bad), ERR_INVAL);
    bad.dst_next = R2 * C2;
    bad.count = -1;
    assert_int_equal(dev_add_block(d, &bad), ERR_INVAL);
    dev_free(d, src_dev, sizeof(float) * COUNT * SRC_NEXT);
    free(dst);
    free(src);
    free(got);
    free(want);
}
static void test_add_block(void **state) {
    (void)state;
    each_device(check_block);
    on_gpu(check_block);
}

/* A packed stack has the bytes of its matrices, packed one by one; unpacked, their rows. */
static void check_pack(struct dev *d) {
    enum { COUNT = 3, N = 48, K = 70 };
    float *rows = random_floats(COUNT * N * K, 9);
    void *src = up(d, rows, sizeof(float) * COUNT * N * K);
    for (int dt = 0; dt < 2; dt++) {
        const enum dtype act = dt ? DT_BF16 : DT_F32;
        const size_t one = dev_weight_bytes(d, act, N, K);
        char *want = xcalloc(COUNT, one), *got = xcalloc(COUNT, one);
        void *each = up(d, want, COUNT * one), *stack = up(d, want, COUNT * one);
        for (int64_t i = 0; i < COUNT; i++)
            OK(dev_weight_pack(d, (struct weight){.data = (char *)each + (size_t)i * one, .dt = act, .n = N, .k = K},
                               tensor_2d((float *)src + i * N * K, DT_F32, N, K)));
        const struct weight_stack all = {{.data = stack, .dt = act, .n = N, .k = K}, COUNT};
        OK(dev_weight_stack_pack(d, all, tensor_2d(src, DT_F32, COUNT * N, K)));
        OK(dev_copy_out(d, want, each, COUNT * one));
        OK(dev_copy_out(d, got, stack, COUNT * one));
        assert_memory_equal(got, want, COUNT * one);
        float *back = xcalloc(COUNT * N * K, sizeof *back);
        void *back_dev = up(d, back, sizeof(float) * COUNT * N * K);
        OK(dev_weight_stack_unpack(d, tensor_2d(back_dev, DT_F32, COUNT * N, K), all));
        OK(dev_copy_out(d, back, back_dev, sizeof(float) * COUNT * N * K));
        for (int i = 0; i < COUNT * N * K; i++) assert_true(back[i] == (dt ? bf16_to_f32(f32_to_bf16(rows[i])) : rows[i]));
        dev_free(d, back_dev, sizeof(float) * COUNT * N * K);
        free(back);
        assert_int_equal(dev_weight_stack_pack(d, all, tensor_2d(src, DT_F32, N, K)), ERR_INVAL);
        dev_free(d, each, COUNT * one);
        dev_free(d, stack, COUNT * one);
        free(want);
        free(got);
    }
    dev_free(d, src, sizeof(float) * COUNT * N * K);
    free(rows);
}
static void test_pack(void **state) {
    (void)state;
    each_device(check_pack);
    on_gpu(check_pack);
}

/* ---- codes ---- */

static float decoded(enum quant_kind kind, const uint8_t *code, const float *scale, int64_t k, int64_t i) {
    if (kind == QUANT_INT8) return (float)(int8_t)code[i] * scale[i / k] / 127.0f;
    return dev_nf4_book[i % 2 ? code[i / 2] & 15 : code[i / 2] >> 4] * scale[i / DEV_NF4_BLOCK];
}

static void check_dequant(struct dev *d) {
    static const int64_t shapes[][2] = {{1, 1}, {3, 5}, {64, 64}, {7, 129}, {300, 96}}; /* blocks across rows, odd counts */
    for (size_t s = 0; s < sizeof shapes / sizeof *shapes; s++)
        for (int kind = QUANT_NF4; kind <= QUANT_INT8; kind++)
            for (int bf16 = 0; bf16 < 2; bf16++) {
                const int64_t n = shapes[s][0] * shapes[s][1], nf4 = kind == QUANT_NF4;
                const int64_t codes = nf4 ? (n + 1) / 2 : n, scales = nf4 ? (n + DEV_NF4_BLOCK - 1) / DEV_NF4_BLOCK : shapes[s][0];
                const enum dtype dt = bf16 ? DT_BF16 : DT_F32;
                uint8_t *code = xmalloc((size_t)codes);
                for (int64_t i = 0; i < codes; i++) code[i] = (uint8_t)(i * 37 + 11);
                float *scale = random_floats(scales, 3);
                for (int64_t i = 0; i < scales; i++) scale[i] = fabsf(scale[i]);
                const size_t bytes = (size_t)n * dtype_size(dt);
                char *got = xmalloc(bytes);
                void *code_dev = up(d, code, (size_t)codes), *scale_dev = up(d, scale, (size_t)scales * 4), *w = up(d, got, bytes);
                const struct dequant_args a = {(enum quant_kind)kind, tensor_1d(code_dev, DT_U8, codes),
                                               tensor_1d(scale_dev, DT_F32, scales), tensor_2d(w, dt, shapes[s][0], shapes[s][1])};
                OK(dev_dequant(d, &a));
                OK(dev_copy_out(d, got, w, bytes));
                for (int64_t i = 0; i < n; i++) {
                    const float want = decoded(a.kind, code, scale, shapes[s][1], i);
                    if (bf16) assert_int_equal(((uint16_t *)got)[i], f32_to_bf16(want));
                    else assert_memory_equal((float *)got + i, &want, 4);
                }
                struct dequant_args bad = a;
                bad.code.dim[0]++;
                assert_int_equal(dev_dequant(d, &bad), ERR_INVAL);
                dev_free(d, code_dev, (size_t)codes);
                dev_free(d, scale_dev, (size_t)scales * 4);
                dev_free(d, w, bytes);
                free(code);
                free(scale);
                free(got);
            }
}
static void test_dequant(void **state) {
    (void)state;
    each_device(check_dequant);
}

/* ---- the head with a frozen weight ---- */

static void check_head(struct dev *d) {
    enum { R = 9, H = 24, V = 5000 };
    float *x = random_floats(R * H, 4), *w = random_floats(V * H, 5), *dl = random_floats(R, 6), temp[R], dx[2][R * H];
    int32_t target[R];
    for (int i = 0; i < R; i++) {
        temp[i] = 1.1f;
        target[i] = i * 500;
    }
    const size_t wb = dev_weight_bytes(d, DT_F32, V, H);
    void *xd = up(d, x, sizeof(float) * R * H), *src = up(d, w, sizeof(float) * V * H), *packed = NULL, *dw = NULL;
    void *td = up(d, target, sizeof target), *ld = up(d, dl, sizeof(float) * R), *cd = up(d, temp, sizeof temp);
    void *out = up(d, x, sizeof dx[0]), *lse = up(d, temp, sizeof temp), *logp = up(d, temp, sizeof temp);
    OK(dev_alloc(d, wb, &packed));
    OK(dev_alloc(d, sizeof(float) * V * H, &dw));
    OK(dev_zero(d, dw, sizeof(float) * V * H));
    const struct lmhead_args a = {.x = tensor_2d(xd, DT_F32, R, H),
                                  .w = {packed, DT_F32, V, H},
                                  .inv_temp = tensor_1d(cd, DT_F32, R),
                                  .target = tensor_1d(td, DT_I32, R),
                                  .lse = tensor_1d(lse, DT_F32, R),
                                  .logp = tensor_1d(logp, DT_F32, R)};
    OK(dev_weight_pack(d, a.w, tensor_2d(src, DT_F32, V, H)));
    OK(dev_lmhead_fwd(d, &a));
    for (int i = 0; i < 2; i++) {
        OK(dev_lmhead_bwd(d, &a,
                          &(struct lmhead_bwd_args){.dlogp = tensor_1d(ld, DT_F32, R),
                                                    .dx = tensor_2d(out, DT_F32, R, H),
                                                    .dw = i ? TENSOR_NONE : tensor_2d(dw, DT_F32, V, H),
                                                    .add = true}));
        OK(dev_copy_out(d, dx[i], out, sizeof dx[i]));
    }
    assert_memory_equal(dx[0], dx[1], sizeof dx[0]);
    assert_true(dx[0][0] != x[0]);
    void *const all[] = {xd, src, packed, dw, td, ld, cd, out, lse, logp};
    const size_t sizes[] = {sizeof(float) * R * H, sizeof(float) * V * H, wb,           sizeof(float) * V * H, sizeof target,
                            sizeof(float) * R,     sizeof temp,           sizeof dx[0], sizeof temp,           sizeof temp};
    for (int i = 0; i < 10; i++) dev_free(d, all[i], sizes[i]);
    free(x);
    free(w);
    free(dl);
}
static void test_frozen_head(void **state) {
    (void)state;
    each_device(check_head);
}

int main(int argc, char **argv) {
    const struct CMUnitTest blocks[] = {cmocka_unit_test(test_add_block)};
    const struct CMUnitTest tests[] = {cmocka_unit_test(test_add_block), cmocka_unit_test(test_pack),
                                       cmocka_unit_test(test_dequant), cmocka_unit_test(test_frozen_head)};
    if (argc > 1 && strcmp(argv[1], "blocks") == 0) return cmocka_run_group_tests(blocks, NULL, NULL);
    return cmocka_run_group_tests(tests, NULL, NULL);
}
