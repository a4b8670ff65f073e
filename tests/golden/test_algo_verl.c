/* test_algo_verl.c - the whole of algo against verl 0.9.1: each line of algo.jsonl is a
 * request with the answer that verl's functions and torch autograd gave in float64
 * (tools/oracle_algo.py).  Every key of the answer is compared. */
#include "algo/algo.h"
#include "base/err.h"
#include "base/file.h"
#include "base/json.h"

#include <math.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

/* Both sides compute in float64; sums of a few tens of terms in another order,
 * and 12 printed digits, differ by less.  Lines where verl goes through float32
 * carry their own. */
#define TOLERANCE 1e-10
/* Shares of tokens and sequences among the metrics are float32 in verl: 2^-24 each. */
#define TOLERANCE_METRIC 1e-7

static int n_cases, n_numbers;

static void compare(const json_t *got, const json_t *want, double tol, const char *where, const char *path) {
    char sub[256];
    if (json_is_number(want)) {
        const double w = json_number_value(want);
        if (!json_is_number(got)) fail_msg("%s: %s is not a number", where, path);
        const double g = json_number_value(got);
        if (!(fabs(g - w) <= tol * fmax(1, fabs(w)))) fail_msg("%s: %s is %.17g, verl has %.17g", where, path, g, w);
        n_numbers++;
    } else if (json_is_array(want)) {
        size_t i;
        json_t *e;
        if (json_array_size(got) != json_array_size(want)) fail_msg("%s: %s has another length", where, path);
        json_array_foreach(want, i, e) {
            snprintf(sub, sizeof sub, "%s[%zu]", path, i);
            compare(json_array_get(got, i), e, tol, where, sub);
        }
    } else if (json_is_object(want)) {
        const char *key;
        json_t *e;
        json_object_foreach((json_t *)want, key, e) {
            snprintf(sub, sizeof sub, "%s.%s", path, key);
            if (!json_object_get(got, key)) fail_msg("%s: %s is missing", where, sub);
            const bool metric = strchr(key, '/') || strcmp(key, "vf_clipfrac") == 0;
            compare(json_object_get(got, key), e, metric ? fmax(tol, TOLERANCE_METRIC) : tol, where, sub);
        }
    } else if (!json_is_null(want) || !json_is_null(got)) {
        fail_msg("%s: %s differs", where, path);
    }
}

static int one_case(void *arg, char *line, size_t n, int64_t no) {
    (void)arg;
    char where[128];
    json_t *request, *answer = NULL;
    snprintf(where, sizeof where, "algo.jsonl:%lld", (long long)no);
    TRY(json_parse(&request, line, n, where));
    const char *op = json_string_value(json_object_get(request, "op"));
    const char *name = json_string_value(json_object_get(request, "estimator"));
    if (!name) name = json_string_value(json_object_get(request, "loss_mode"));
    snprintf(where, sizeof where, "algo.jsonl:%lld %s %s", (long long)no, op, name ? name : "");
    double tol = TOLERANCE;
    TRY(json_f64_opt(request, "tol", &tol, where));
    json_t *expect = json_incref(json_object_get(request, "expect"));
    json_object_del(request, "tol");
    json_object_del(request, "expect"); /* what is left is what the tool would be sent */
    if (algo_json(request, where, &answer) < 0) fail_msg("%s: %s", where, err_msg());
    compare(answer, expect, tol, where, "answer");
    json_decref(expect);
    json_decref(request);
    json_decref(answer);
    n_cases++;
    return 0;
}

static void verl_agrees(void **state) {
    (void)state;
    if (file_each_line(FIXTURES "/algo/algo.jsonl", one_case, NULL) < 0) fail_msg("%s", err_msg());
    print_message("%d cases, %d numbers\n", n_cases, n_numbers);
    assert_true(n_cases >= 240);
}

int main(void) {
    const struct CMUnitTest tests[] = {cmocka_unit_test(verl_agrees)};
    return cmocka_run_group_tests(tests, NULL, NULL);
}
