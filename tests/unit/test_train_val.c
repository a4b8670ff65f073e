/* test_train_val.c - validation statistics and data metrics against the values that
 * verl 0.9.1's own functions gave (tools/oracle_train.py): the same names, no name
 * more, and the same numbers. */
#include "base/err.h"
#include "base/json.h"
#include "train/ppo_int.h"

#include <math.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stdlib.h>
#include <string.h>
#include <cmocka.h>

static json_t *fixture(const char *name) {
    char path[512];
    json_t *v = NULL;
    snprintf(path, sizeof path, FIXTURES "/train/%s", name);
    assert_int_equal(json_load(&v, path, 1 << 24), 0);
    return v;
}

/* Every expected name is there with its value, within `rel`. */
static void check_values(const json_t *want, const struct metrics *got, double rel, const char *what) {
    const char *name;
    json_t *v;
    json_object_foreach((json_t *)(uintptr_t)want, name, v) {
        double x;
        if (!metrics_get(got, name, &x)) fail_msg("%s: %s is missing", what, name);
        const double w = json_number_value(v);
        if (fabs(x - w) > rel * fmax(1, fabs(w))) fail_msg("%s: %s is %.17g, verl has %.17g", what, name, x, w);
    }
}

static void test_val_metrics(void **state) {
    (void)state;
    json_t *cases = fixture("val_metrics.json");
    size_t i, r;
    json_t *c, *row;
    json_array_foreach(cases, i, c) {
        const json_t *rows = json_object_get(c, "rows"), *want = json_object_get(c, "metrics");
        const char *name = json_string_value(json_object_get(c, "name"));
        struct val_row *v = calloc(json_array_size(rows), sizeof *v);
        struct metrics m = {0};
        json_array_foreach((json_t *)(uintptr_t)rows, r, row)
            v[r] = (struct val_row){json_string_value(json_object_get(row, "data_source")),
                                    json_integer_value(json_object_get(row, "uid")),
                                    json_number_value(json_object_get(row, "reward")), json_object_get(row, "extra")};
        assert_int_equal(val_metrics(v, (int64_t)json_array_size(rows), &m), 0);
        check_values(want, &m, 1e-12, name);
        for (int64_t k = 0; k < m.n; k++)
            if (!json_object_get(want, m.items[k].name)) fail_msg("%s: verl has no %s", name, m.items[k].name);
        metrics_free(&m);
        free(v);
    }
    assert_true(json_array_size(cases) >= 8);
    json_decref(cases);
}

static void test_no_rows(void **state) {
    (void)state;
    struct metrics m = {0};
    assert_int_equal(val_metrics(NULL, 0, &m), 0);
    assert_int_equal(m.n, 0);
    metrics_free(&m);
}

/* A column of doubles from each row's list of that name. */
static void add_column(struct batch *b, const json_t *rows, const char *name) {
    struct batch_col *c;
    int64_t *lens = calloc((size_t)b->n_rows, sizeof *lens);
    for (int64_t i = 0; i < b->n_rows; i++)
        lens[i] = (int64_t)json_array_size(json_object_get(json_array_get(rows, (size_t)i), name));
    assert_int_equal(batch_add(b, name, BATCH_F64, lens, NULL, &c), 0);
    for (int64_t i = 0; i < b->n_rows; i++) {
        const json_t *list = json_object_get(json_array_get(rows, (size_t)i), name);
        for (int64_t t = 0; t < lens[i]; t++)
            c->f64[c->off[i] + t] = json_number_value(json_array_get(list, (size_t)t));
    }
    free(lens);
}

static void test_data_metrics(void **state) {
    (void)state;
    json_t *f = fixture("data_metrics.json");
    const json_t *rows = json_object_get(f, "rows");
    const int64_t n = (int64_t)json_array_size(rows);
    struct ppo p = {0};
    struct batch b = {.n_rows = n};
    assert_int_equal(dev_open_ref(&p.dev), 0);
    p.k.max_prompt_length = json_integer_value(json_object_get(f, "max_prompt_length"));
    p.k.max_response_length = json_integer_value(json_object_get(f, "max_response_length"));
    static const char *const columns[] = {"token_level_scores", "token_level_rewards", "advantages", "returns"};
    for (int i = 0; i < 4; i++) add_column(&b, rows, columns[i]);
    int64_t lens[8], resp[8];
    const int64_t uid[8] = {4, 4, 9, 9};
    const double score[8] = {1, 1, -0.5, 1}; /* the first group teaches nothing */
    assert_true(n == 4);
    for (int64_t i = 0; i < n; i++) {
        lens[i] = json_integer_value(json_object_get(json_array_get(rows, (size_t)i), "prompt"));
        resp[i] = (int64_t)json_array_size(json_object_get(json_array_get(rows, (size_t)i), "returns"));
    }
    assert_int_equal(batch_add(&b, "prompts", BATCH_I32, lens, NULL, NULL), 0);
    assert_int_equal(batch_add(&b, "responses", BATCH_I32, resp, NULL, NULL), 0);
    assert_int_equal(batch_add(&b, "uid", BATCH_I64, NULL, uid, NULL), 0);
    assert_int_equal(batch_add(&b, "group", BATCH_I64, NULL, uid, NULL), 0);
    assert_int_equal(batch_add(&b, "score", BATCH_F64, NULL, score, NULL), 0);
    metrics_set(&p.metrics, 2, "timing_s/gen");
    metrics_set(&p.metrics, 0.5, "timing_s/update_actor");
    assert_int_equal(ppo_data_metrics(&p, &b), 0);
    check_values(json_object_get(f, "metrics"), &p.metrics, 1e-6, "data metrics"); /* verl averages lengths in fp32 */
    double x;
    assert_true(metrics_get(&p.metrics, "train/zero_variance_groups", &x) && x == 0.5);
    assert_true(metrics_get(&p.metrics, "timing_s/step", &x) && x == 2.5);
    assert_true(metrics_get(&p.metrics, "perf/total_num_tokens", &x) && x == 27);
    assert_true(metrics_get(&p.metrics, "perf/throughput", &x) && x == 27 / 2.5);
    assert_true(metrics_get(&p.metrics, "timing_per_token_ms/gen", &x) && fabs(x - 2000.0 / 15) < 1e-9);
    metrics_free(&p.metrics);
    batch_free(&b);
    dev_close(&p.dev);
    json_decref(f);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_val_metrics),
        cmocka_unit_test(test_no_rows),
        cmocka_unit_test(test_data_metrics),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
