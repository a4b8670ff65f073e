/* test_cmd_algo_verl.c - the whole of algo against verl 0.9.1: each line of algo.jsonl is a
 * request with the answer that verl's functions and torch autograd gave in float64
 * (tools/oracle_algo.py), or what docs/differences.md says instead.  Every key is compared. */
#include "cmd/algo_json.h"
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

/* Both sides compute in float64; sums of a few tens of terms in another order, exp of two
 * libraries, and 12 printed digits differ by less, relative to the largest number of an array. */
#define TOLERANCE 1e-10
/* sqrt(E[x^2] - E[x]^2) keeps half the digits of E[x]; a token share's 1e-8 in the divisor likewise. */
#define TOLERANCE_STD 1e-6

static int n_cases, n_numbers, n_differences;

static double largest(const json_t *v) {
    double x = json_is_number(v) ? fabs(json_number_value(v)) : 0;
    size_t i;
    json_t *e;
    json_array_foreach((json_t *)(uintptr_t)v, i, e) x = fmax(x, largest(e));
    return x;
}

/* size: the largest number of the array that `want` belongs to. */
static void compare(const json_t *got, const json_t *want, double tol, double size, const char *where, const char *path) {
    char sub[256];
    if (json_is_number(want)) {
        const double w = json_number_value(want);
        if (!json_is_number(got)) fail_msg("%s: %s is not a number", where, path);
        const double g = json_number_value(got);
        if (!(fabs(g - w) <= tol * size)) fail_msg("%s: %s is %.17g, verl has %.17g", where, path, g, w);
        n_numbers++;
    } else if (json_is_array(want)) {
        size_t i;
        json_t *e;
        if (json_array_size(got) != json_array_size(want)) fail_msg("%s: %s has another length", where, path);
        json_array_foreach(want, i, e) {
            snprintf(sub, sizeof sub, "%s[%zu]", path, i);
            compare(json_array_get(got, i), e, tol, size, where, sub);
        }
    } else if (json_is_object(want)) {
        const char *key;
        json_t *e;
        json_object_foreach((json_t *)(uintptr_t)want, key, e) {
            snprintf(sub, sizeof sub, "%s.%s", path, key);
            if (!json_object_get(got, key)) fail_msg("%s: %s is missing", where, sub);
            const size_t n = strlen(key);
            const bool std = n > 4 && strcmp(key + n - 4, "_std") == 0;
            const double least = tol > TOLERANCE ? 1 : 1e-3; /* a sum in fp32 is off by its terms */
            compare(json_object_get(got, key), e, std ? TOLERANCE_STD : tol, fmax(largest(e), least), where, sub);
        }
    } else if (!json_is_null(want) || !json_is_null(got)) {
        fail_msg("%s: %s differs", where, path);
    }
}

static int one_case(void *arg, char *line, size_t n, int64_t no) {
    const char *file = arg;
    char where[128];
    json_t *request, *answer = NULL;
    snprintf(where, sizeof where, "%s:%lld", file, (long long)no);
    TRY(json_parse(&request, line, n, where));
    const char *op = json_string_value(json_object_get(request, "op"));
    const char *name = json_string_value(json_object_get(request, "estimator"));
    if (!name) name = json_string_value(json_object_get(request, "loss_mode"));
    snprintf(where, sizeof where, "%s:%lld %s %s", file, (long long)no, op, name ? name : "");
    json_t *expect = json_incref(json_object_get(request, "expect"));
    n_differences += json_object_get(request, "difference") != NULL;
    double tol = TOLERANCE;
    TRY(json_f64_opt(request, "tol", &tol, where)); /* where verl computes in fp32 */
    json_object_del(request, "tol");
    json_object_del(request, "difference");
    json_object_del(request, "expect"); /* what is left is what the tool would be sent */
    const int rc = algo_json(request, where, NULL, &answer);
    if (json_object_get(expect, "error")) { /* verl raises */
        if (rc >= 0) fail_msg("%s: answered, where verl raises", where);
    } else {
        if (rc < 0) fail_msg("%s: %s", where, err_msg());
        compare(answer, expect, tol, 1, where, "answer");
    }
    json_decref(expect);
    json_decref(request);
    json_decref(answer);
    n_cases++;
    return 0;
}

static void verl_agrees(void **state) {
    (void)state;
    static char *const files[] = {"algo.jsonl", "distill.jsonl"};
    for (int i = 0; i < 2; i++) {
        char path[512];
        snprintf(path, sizeof path, FIXTURES "/algo/%s", files[i]);
        if (file_each_line(path, one_case, files[i]) < 0) fail_msg("%s", err_msg());
    }
    print_message("%d batches, %d numbers; on %d an intended difference acts\n", n_cases, n_numbers, n_differences);
    assert_true(n_cases >= 239 && n_differences >= 10);
}

int main(void) {
    const struct CMUnitTest tests[] = {cmocka_unit_test(verl_agrees)};
    return cmocka_run_group_tests(tests, NULL, NULL);
}
