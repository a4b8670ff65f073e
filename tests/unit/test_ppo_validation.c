/* test_ppo_validation.c - validation statistics and data metrics against the values that
 * verl 0.9.1's own functions gave (tools/oracle_train.py): the same names, no name
 * more, and the same numbers. */
#include "base/buf.h"
#include "base/err.h"
#include "worst.h"
#include "base/json.h"
#include "ppo/stages/stages.h"

#include <math.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stdlib.h>
#include <string.h>
#include <cmocka.h>

/* Of the committed fixtures, or of a directory that the oracle made with batches by the thousand. */
static json_t *fixture(const char *name) {
    char path[512];
    json_t *v = NULL;
    const char *dir = getenv("VERLC_TRAIN_FIXTURES");
    snprintf(path, sizeof path, "%s/%s", dir ? dir : FIXTURES "/train", name);
    if (json_load(&v, path, 1 << 28) < 0) fail_msg("%s", err_msg());
    return v;
}

/* Every expected name is there with its value, within TOLERANCE: fp64 sums in another order. */
#define TOLERANCE 1e-12
static void check_values(const json_t *want, const struct metrics *got, const char *what, double *worst) {
    const char *name;
    json_t *v;
    json_object_foreach((json_t *)(uintptr_t)want, name, v) {
        double x;
        if (!metrics_get(got, name, &x)) fail_msg("%s: %s is missing", what, name);
        const double w = json_number_value(v), e = fabs(x - w) / fmax(1, fabs(w));
        if (!(e <= TOLERANCE)) fail_msg("%s: %s is %.17g, verl has %.17g", what, name, x, w);
        *worst = worse_of(*worst, e);
    }
}

static void test_val_metrics(void **state) {
    (void)state;
    json_t *cases = fixture("val_metrics.json");
    size_t i, r;
    json_t *c, *row;
    double worst = 0;
    json_array_foreach(cases, i, c) {
        const json_t *rows = json_object_get(c, "rows"), *want = json_object_get(c, "metrics");
        const char *name = json_string_value(json_object_get(c, "name"));
        struct val_row *v = calloc(json_array_size(rows), sizeof *v);
        struct metrics m = {0};
        json_array_foreach((json_t *)(uintptr_t)rows, r, row) v[r] = (struct val_row){
            json_string_value(json_object_get(row, "data_source")), json_integer_value(json_object_get(row, "uid")),
            json_number_value(json_object_get(row, "reward")), json_object_get(row, "extra")};
        assert_int_equal(validation_metrics(v, (int64_t)json_array_size(rows), &m), 0);
        check_values(want, &m, name, &worst);
        for (int64_t k = 0; k < m.n; k++)
            if (!json_object_get(want, m.items[k].name) && !strstr(m.items[k].name, "/pass@"))
                fail_msg("%s: verl has no %s", name, m.items[k].name);
        metrics_free(&m);
        free(v);
    }
    assert_true(json_array_size(cases) >= 8);
    print_message("validation metrics: %zu batches, largest difference %.1e\n", json_array_size(cases), worst);
    json_decref(cases);
}

/* Data sources and the scorer's keys are text from outside: of any length, with any character but NUL. */
static void test_long_names(void **state) {
    (void)state;
    enum { LONG = 100000 };
    static char source[2][LONG + 1], key[LONG + 1];
    for (int k = 0; k < 2; k++) memset(source[k], 'a', LONG - 1);
    source[0][LONG - 1] = 'x'; /* they differ in the last character alone */
    source[1][LONG - 1] = 'y';
    memset(key, '\x1f', LONG);
    json_t *extra[2] = {json_object(), json_object()};
    for (int k = 0; k < 2; k++) assert_int_equal(json_object_set_new(extra[k], key, json_integer(k + 3)), 0);
    const struct val_row rows[] = {{source[0], 1, 0.25, extra[0]},
                                   {source[1], 1, 0.5, extra[1]},
                                   {"a\x1f"
                                    "b",
                                    2, 7, NULL},
                                   {"a", 2, 8, NULL}};
    struct metrics m = {0};
    double v;
    assert_int_equal(validation_metrics(rows, 4, &m), 0);
    for (int k = 0; k < 2; k++) {
        char *name[] = {xasprintf("val-core/%s/reward/mean@1", source[k]), xasprintf("val-aux/%s/%s/mean@1", source[k], key)};
        assert_true(metrics_get(&m, name[0], &v) && v == rows[k].reward);
        assert_true(metrics_get(&m, name[1], &v) && v == k + 3);
        free(name[0]);
        free(name[1]);
    }
    assert_true(metrics_get(&m,
                            "val-core/a\x1f"
                            "b/reward/mean@1",
                            &v) &&
                v == 7);
    assert_true(metrics_get(&m, "val-core/a/reward/mean@1", &v) && v == 8);
    assert_int_equal(m.n, 6);
    metrics_free(&m);
    for (int k = 0; k < 2; k++) json_decref(extra[k]);
}

/* C(n, k), exact: below 2^53 for n <= 40. */
static double choose(int n, int k) {
    uint64_t c = 1;
    if (k > n) return 0;
    for (int i = 1; i <= k; i++) c = c * (uint64_t)(n - k + i) / (uint64_t)i;
    return (double)c;
}

/* The product against the quotient of whole numbers, which is rounded once: 40 factors and a difference near 1. */
static void test_pass_at_k(void **state) {
    (void)state;
    double worst = 0;
    for (int n = 1; n <= 40; n++)
        for (int c = 0; c <= n; c++)
            for (int k = 1; k <= n; k++) {
                const double all = choose(n, k), want = (all - choose(n - c, k)) / all, got = validation_pass_at_k(n, c, k);
                worst = worse_of(worst, fabs(got - want));
                assert_true(got >= 0 && got <= 1);
            }
    assert_true(worst <= 50 * 0x1p-53);
    assert_true(validation_pass_at_k(8, 0, 8) == 0 && validation_pass_at_k(8, 8, 1) == 1 && validation_pass_at_k(8, 1, 8) == 1);
    assert_true(validation_pass_at_k(4, 1, 2) == 0.5);                     /* 1 - 3/6 */
    assert_true(fabs(validation_pass_at_k(10, 3, 5) - 11.0 / 12) < 1e-15); /* 1 - 21/252 */
    assert_true(validation_pass_at_k(1000000, 1, 500000) == 0.5);          /* factorials of these have millions of digits */
    assert_true(fabs(validation_pass_at_k(1000000, 500000, 2) - (1 - 499999.0 / 1999998)) < 1e-15);
    print_message("pass@k: largest difference from exact quotients %.1e\n", worst);
}

/* Names and means of pass@k: of variables of 0 and 1 alone, at k = 2, 4, 8, ... and n; the largest is core. */
static void test_pass_metrics(void **state) {
    (void)state;
    enum { PROMPTS = 3, N = 6 };
    static const int right[PROMPTS] = {0, 1, 5};
    struct val_row rows[PROMPTS * N];
    json_t *extra[PROMPTS * N];
    struct metrics m = {0};
    double v;
    for (int i = 0; i < PROMPTS * N; i++) {
        const bool acc = i % N < right[i / N];
        extra[i] = json_pack("{s:b, s:f}", "acc", (int)acc, "format", i == 7 ? 0.5 : 1.0);
        rows[i] = (struct val_row){"s", i / N, acc ? 1 : -1, extra[i]};
    }
    assert_int_equal(validation_metrics(rows, PROMPTS * N, &m), 0);
    assert_true(metrics_get(&m, "val-aux/s/acc/pass@2", &v) && fabs(v - (0 + 1.0 / 3 + 1) / 3) < 1e-15);
    assert_true(metrics_get(&m, "val-aux/s/acc/pass@4", &v) && fabs(v - (0 + 2.0 / 3 + 1) / 3) < 1e-15);
    assert_true(metrics_get(&m, "val-core/s/acc/pass@6", &v) && fabs(v - 2.0 / 3) < 1e-15);
    assert_false(metrics_get(&m, "val-core/s/acc/pass@2", &v));
    assert_false(metrics_get(&m, "val-aux/s/reward/pass@2", &v)); /* -1 and 1 */
    assert_false(metrics_get(&m, "val-aux/s/format/pass@2", &v)); /* one sample has 0.5, of the second prompt */
    assert_true(metrics_get(&m, "val-aux/s/format/best@2/mean", &v));
    metrics_free(&m);
    for (int i = 0; i < PROMPTS * N; i++) json_decref(extra[i]);
}

static void test_no_rows(void **state) {
    (void)state;
    struct metrics m = {0};
    assert_int_equal(validation_metrics(NULL, 0, &m), 0);
    assert_int_equal(m.n, 0);
    metrics_free(&m);
}

/* A column of each row's list of that name. */
static void add_column(struct batch *b, const json_t *rows, const char *name, enum batch_type type) {
    struct batch_col *c;
    int64_t *lens = calloc((size_t)b->n_rows, sizeof *lens);
    for (int64_t i = 0; i < b->n_rows; i++)
        lens[i] = (int64_t)json_array_size(json_object_get(json_array_get(rows, (size_t)i), name));
    assert_int_equal(batch_add(b, name, type, lens, NULL, &c), 0);
    for (int64_t i = 0; i < b->n_rows; i++) {
        const json_t *list = json_object_get(json_array_get(rows, (size_t)i), name);
        for (int64_t t = 0; t < lens[i]; t++) {
            const double x = json_number_value(json_array_get(list, (size_t)t));
            if (type == BATCH_F64) c->f64[c->off[i] + t] = x;
            else c->i32[c->off[i] + t] = (int32_t)x;
        }
    }
    free(lens);
}

/* The batch of one case as the trainer has it. uid and score: two rows a prompt, the first prompt's scores equal. */
static void data_batch(struct batch *b, const json_t *rows) {
    static const char *const columns[] = {"token_level_scores", "token_level_rewards", "advantages",        "returns", "values",
                                          "old_log_probs",      "sum_pi_squared",      "rollout_is_weights"};
    const int64_t n = (int64_t)json_array_size(rows);
    *b = (struct batch){.n_rows = n};
    int64_t *lens = calloc((size_t)n, sizeof *lens), *resp = calloc((size_t)n, sizeof *resp), *uid = calloc((size_t)n, sizeof *uid);
    double *score = calloc((size_t)n, sizeof *score);
    for (size_t i = 0; i < sizeof columns / sizeof *columns; i++)
        if (json_object_get(json_array_get(rows, 0), columns[i])) add_column(b, rows, columns[i], BATCH_F64);
    add_column(b, rows, "response_mask", BATCH_I32);
    for (int64_t i = 0; i < n; i++) {
        lens[i] = json_integer_value(json_object_get(json_array_get(rows, (size_t)i), "prompt"));
        resp[i] = (int64_t)json_array_size(json_object_get(json_array_get(rows, (size_t)i), "returns"));
        uid[i] = i / 2;
        score[i] = i < 2 ? 1 : (double)i;
    }
    assert_int_equal(batch_add(b, "prompts", BATCH_I32, lens, NULL, NULL), 0);
    assert_int_equal(batch_add(b, "responses", BATCH_I32, resp, NULL, NULL), 0);
    assert_int_equal(batch_add(b, "uid", BATCH_I64, NULL, uid, NULL), 0);
    assert_int_equal(batch_add(b, "group", BATCH_I64, NULL, uid, NULL), 0);
    assert_int_equal(batch_add(b, "score", BATCH_F64, NULL, score, NULL), 0);
    free(lens);
    free(resp);
    free(uid);
    free(score);
}

static void test_data_metrics(void **state) {
    (void)state;
    json_t *cases = fixture("data_metrics.json"), *c, *v;
    size_t i;
    double worst = 0;
    json_array_foreach(cases, i, c) {
        const json_t *rows = json_object_get(c, "rows");
        const char *stage;
        char what[32];
        struct ppo_config k = {0};
        struct worker w = {.ops = &worker_local, .n_ranks = 1};
        struct run run = {0};
        const struct stage st = {.worker = &w, .run = &run};
        struct batch b;
        double x, step = 0;
        assert_int_equal(dev_open_ref(&w.dev), 0);
        k.data.max_prompt_length = json_integer_value(json_object_get(c, "max_prompt_length"));
        k.data.max_response_length = json_integer_value(json_object_get(c, "max_response_length"));
        data_batch(&b, rows);
        json_object_foreach(json_object_get(c, "timing_s"), stage, v) if (strcmp(stage, "step") != 0)
            metrics_set(&run.metrics, json_number_value(v), "timing_s/%s", stage);
        else step = json_number_value(v);
        metrics_set(&run.metrics, json_number_value(json_object_get(c, "grad_norm")), "actor/grad_norm");
        snprintf(what, sizeof what, "data metrics %zu", i);
        if (ppo_data_metrics(&st, &k.data, &b) < 0) fail_msg("%s", err_msg());
        check_values(json_object_get(c, "metrics"), &run.metrics, what, &worst);
        const double groups = ceil((double)b.n_rows / 2), flat = 1 + (b.n_rows > 2 && b.n_rows % 2); /* a last row alone */
        assert_true(metrics_get(&run.metrics, "train/zero_variance_groups", &x) && x == flat / groups);
        assert_true(metrics_get(&run.metrics, "timing_s/step", &x) && fabs(x - step) <= 1e-12 * step);
        metrics_free(&run.metrics);
        batch_free(&b);
        dev_close(&w.dev);
    }
    assert_true(i >= 12);
    print_message("data metrics: %zu batches, largest difference %.1e\n", i, worst);
    json_decref(cases);
}

/* Where rejection has left no token: verl's NaN for what is over tokens, as ever for what is over samples. */
static void test_no_valid_token(void **state) {
    (void)state;
    static const char *const nothing[] = {"critic/advantages/mean", "critic/advantages/max", "critic/returns/min",
                                          "critic/values/mean", "critic/vf_explained_var"};
    json_t *rows = json_pack("[{s:i, s:[f, f], s:[f, f], s:[f, f], s:[f, f], s:[f, f], s:[i, i]}]", "prompt", 3,
                             "token_level_scores", 0.0, 1.0, "token_level_rewards", 0.0, 1.0, "advantages", 1.0, 1.0, "returns",
                             1.0, 1.0, "values", 0.5, 0.5, "response_mask", 0, 0);
    struct ppo_config k = {.data.max_prompt_length = 8, .data.max_response_length = 8};
    struct worker w = {.ops = &worker_local, .n_ranks = 1};
    struct run run = {0};
    const struct stage st = {.worker = &w, .run = &run};
    struct batch b;
    double x;
    assert_non_null(rows);
    assert_int_equal(dev_open_ref(&w.dev), 0);
    data_batch(&b, rows);
    if (ppo_data_metrics(&st, &k.data, &b) < 0) fail_msg("%s", err_msg());
    for (size_t i = 0; i < sizeof nothing / sizeof *nothing; i++)
        if (!metrics_get(&run.metrics, nothing[i], &x) || !isnan(x)) fail_msg("%s is not NaN", nothing[i]);
    assert_true(metrics_get(&run.metrics, "critic/score/mean", &x) && x == 1);
    assert_true(metrics_get(&run.metrics, "response_length/clip_ratio", &x) && x == 0); /* of the limit, not of the longest */
    metrics_free(&run.metrics);
    batch_free(&b);
    dev_close(&w.dev);
    json_decref(rows);
}

/* A NaN among the errors is not forgotten. */
static void test_worse_of(void **state) {
    (void)state;
    assert_true(worse_of(1, 2) == 2 && worse_of(2, 1) == 2);
    assert_true(isnan(worse_of(1, NAN)) && isnan(worse_of(NAN, 1)));
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_worse_of),     cmocka_unit_test(test_val_metrics),    cmocka_unit_test(test_long_names),
        cmocka_unit_test(test_no_rows),      cmocka_unit_test(test_data_metrics),   cmocka_unit_test(test_pass_at_k),
        cmocka_unit_test(test_pass_metrics), cmocka_unit_test(test_no_valid_token),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
