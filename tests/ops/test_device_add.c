/* test_device_add.c - what adds to a weight's gradient adds one sum with one rounding: y += op(x) has the bits of y + op(x), for
 * every op that has such a result, on every backend this machine has; and dev_fold is the left fold of such sums.
 *
 * So a gradient over several calls is a fold of theirs, wherever each was computed. */
#include "ops/ops_table.h"

static struct backends backends;

/* Every += result that sums over rows, from zero and from random values. */
static bool check_op(const struct op_def *op, const struct op_shape *shape, int backend, enum dtype act) {
    struct run alone, added;
    run_init(&alone, op, shape, act, &backends.dev[backend]);
    run_init(&added, op, shape, act, &backends.dev[backend]);
    added.accumulate = true;
    const int rc = run_exec(&alone, op);
    if (rc < 0 && rc != ERR_UNSUPPORTED) fail_msg("%s %s: %s", backends.name[backend], op->name, err_msg());
    if (rc == 0 && run_exec(&added, op) < 0) fail_msg("%s %s: %s", backends.name[backend], op->name, err_msg());
    for (int k = 0; rc == 0 && k < added.n_out + added.n_gin; k++) {
        const bool out = k < added.n_out;
        const struct slot *sum = out ? &added.out[k] : &added.gin[k - added.n_out],
                          *x = out ? &alone.out[k] : &alone.gin[k - alone.n_out];
        if (!sum->acc || sum->per_row) continue;
        struct slot from = {.name = "acc", .dt = sum->dt, .nd = sum->nd};
        memcpy(from.dim, sum->dim, sizeof from.dim);
        slot_fill(&from, 0.1f, 0);
        for (int64_t i = 0; i < slot_count(sum); i++)
            if (sum->f[i] != from.f[i] + x->f[i])
                fail_msg("%s %s %s, %lld rows: %s[%lld]: %.9g += %.9g is %.9g", backends.name[backend], op->name, dtype_name(act),
                         (long long)shape->rows, sum->name, (long long)i, (double)from.f[i], (double)x->f[i], (double)sum->f[i]);
        free(from.f);
    }
    run_free(&alone);
    run_free(&added);
    return rc == 0;
}

static void test_op(void **state) {
    const struct op_def *op = *state;
    if (!op->bwd || strcmp(op->name, "attn") == 0) return; /* no such result */
    for (int b = 0; b < backends.n; b++)
        for (int64_t i = 0; i < cases_of(op->n_shapes, 2); i++)
            if (!check_op(op, &op->shapes[i], b, DT_F32) || !check_op(op, &op->shapes[i], b, DT_BF16))
                report_skip(backends.name[b], op->name);
}

/* Sizes at which a GPU's algorithms differ from those of small ones: the layers of a 0.5B model, and more rows of the head than
 * it takes at a time. */
static void test_large(void **state) {
    static const struct op_shape dw[] = {{.rows = 3000, .n = 1152, .k = 896},  {.rows = 3000, .n = 896, .k = 896},
                                         {.rows = 3000, .n = 9728, .k = 896},  {.rows = 3000, .n = 896, .k = 4864},
                                         {.rows = 20000, .n = 896, .k = 1024}, {.rows = 100, .n = 2048, .k = 2048}};
    static const struct op_shape head = {.rows = 9000, .n = 21000, .k = 128, .flags = S_ENTROPY};
    (void)state;
    for (int b = 0; b < backends.n; b++) {
        if (strcmp(backends.name[b], "cuda") != 0) continue; /* the others are slow, and cut alike at any size */
        for (int64_t i = 0; i < N_OPS; i++) {
            const struct op_def *op = &ops_table[i];
            for (int64_t k = 0; strcmp(op->name, "matmul") == 0 && k < COUNT(dw); k++) check_op(op, &dw[k], b, DT_BF16);
            if (strcmp(op->name, "lmhead") == 0) check_op(op, &head, b, DT_BF16);
        }
    }
}

static void test_fold(void **state) {
    (void)state;
    enum { ARRAYS = 19 }; /* more than a launch of the cuda backend takes */
    static const int64_t lengths[] = {1, 7, 8, 1000, 70001};
    for (int b = 0; b < backends.n; b++)
        for (int64_t k = 0; k < COUNT(lengths); k++)
            for (int n = 1; n <= ARRAYS; n += n < 4 ? 1 : 5)
                for (int add = 0; add < 2; add++) {
                    const int64_t len = lengths[k];
                    struct run r = {.d = &backends.dev[b], .accumulate = true};
                    const struct tensor y = up_acc(&r, shape_1d(DT_F32, len), false);
                    float *want = down_values(&r, y);
                    struct tensor x[ARRAYS];
                    for (int i = 0; i < n; i++) {
                        const float *f = normals((uint64_t)(i + 1), len);
                        x[i] = up_values(&r, shape_1d(DT_F32, len), false, f, NULL);
                        for (int64_t j = 0; j < len; j++) want[j] = i == 0 && !add ? f[j] : want[j] + f[j];
                    }
                    if (dev_fold(r.d, y, x, n, add) < 0) fail_msg("%s: %s", backends.name[b], err_msg());
                    float *got = down_values(&r, y);
                    if (memcmp(got, want, (size_t)len * sizeof *got) != 0)
                        fail_msg("%s: the fold of %d arrays of %lld differs", backends.name[b], n, (long long)len);
                    free(got);
                    free(want);
                    run_free_blocks(&r);
                }
}

int main(void) {
    struct CMUnitTest tests[N_OPS + 2];
    backends_open(&backends, 2);
    for (int64_t i = 0; i < N_OPS; i++)
        tests[i] = (struct CMUnitTest){ops_table[i].name, test_op, NULL, NULL, (void *)(uintptr_t)&ops_table[i]};
    tests[N_OPS] = (struct CMUnitTest)cmocka_unit_test(test_large);
    tests[N_OPS + 1] = (struct CMUnitTest)cmocka_unit_test(test_fold);
    const int failed = cmocka_run_group_tests_name("ops: sums are made first and added once", tests, NULL, NULL);
    backends_close(&backends);
    return failed;
}
