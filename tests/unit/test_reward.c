/* test_reward.c - results that are not scores, routing, the overlong penalty, and
 * user code in a helper: numbers, dicts, async, exceptions, exits, hangs. */
#include "base/buf.h"
#include "base/err.h"
#include "base/file.h"
#include "base/json.h"
#include "reward/reward_int.h"

#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include <cmocka.h>

static struct reward *make(const struct reward_args *args) {
    struct reward *r = NULL;
    if (reward_create(&r, args) < 0) fail_msg("%s", err_msg());
    return r;
}

static struct reward_result score(struct reward *r, const char *source, const char *text, json_t *truth) {
    struct reward_result out = {0};
    const struct reward_request q = {.data_source = source, .solution = text, .n_solution = strlen(text), .ground_truth = truth};
    if (reward_score(r, &q, &out) < 0) fail_msg("%s", err_msg());
    json_decref(truth);
    return out;
}

static void native(struct reward *r, const char *source, const char *text, json_t *truth, enum reward_status status, double want) {
    struct reward_result out = score(r, source, text, truth);
    assert_string_equal(reward_status_name(out.status), reward_status_name(status));
    assert_true(out.score == want);
    assert_true((out.message != NULL) == (status != REWARD_SCORE));
    assert_non_null(out.extra);
    reward_result_free(&out);
}

static void data_source_picks_the_grader(void **state) {
    (void)state;
    struct reward *r = make(&(struct reward_args){0});
    native(r, "openai/gsm8k", "so #### 72", json_string("72"), REWARD_SCORE, 1);
    native(r, "openai/gsm8k", "so 72", json_string("72"), REWARD_SCORE, 0);
    native(r, "lighteval/MATH", "\\boxed{0.5}", json_string("\\frac12"), REWARD_SCORE, 1);
    native(r, "aime_2024", "Answer: 7", json_string("8"), REWARD_SCORE, -1);
    native(r, "math", "Answer: 7", json_string("7"), REWARD_SCORE, 1);
    native(r, "mathematics", "Answer: 7", json_string("7"), REWARD_MISSING, 0);
    native(r, "taco", "code", json_string("7"), REWARD_MISSING, 0);
    native(r, NULL, "x", json_string("7"), REWARD_MISSING, 0);
    native(r, "openai/gsm8k", "#### 72", json_null(), REWARD_MISSING, 0);
    native(r, "openai/gsm8k", "#### 72", json_integer(72), REWARD_MISSING, 0);
    native(r, "openai/gsm8k", "", json_string("72"), REWARD_SCORE, 0);
    reward_destroy(r);
}

/* A NUL is a character like any other: what follows it counts, and an answer with one is not the answer without. */
static void nul_is_a_character(void **state) {
    (void)state;
    static const char box[] = "so \0 \\boxed{5}", gsm[] = "a\0b #### 72", tail[] = "#### 72\0 6", said[] = "Answer: 7\0x\ny";
    const struct {
        const char *source, *text;
        size_t n;
        const char *truth;
        size_t n_truth;
        double want;
    } cases[] = {
        {"lighteval/MATH", box, sizeof box - 1, "5", 1, 1},  {"lighteval/MATH", box, sizeof box - 1, "5\0", 2, 0},
        {"openai/gsm8k", gsm, sizeof gsm - 1, "72", 2, 1},   {"openai/gsm8k", gsm, sizeof gsm - 1, "72\0x", 4, 0},
        {"openai/gsm8k", tail, sizeof tail - 1, "72", 2, 1}, {"math", said, sizeof said - 1, "7", 1, -1},
        {"math", said, sizeof said - 1, "7\0x", 3, 1},
    };
    struct reward *r = make(&(struct reward_args){0});
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        struct reward_result out;
        json_t *truth = json_stringn(cases[i].truth, cases[i].n_truth);
        const struct reward_request q = {
            .data_source = cases[i].source, .solution = cases[i].text, .n_solution = cases[i].n, .ground_truth = truth};
        assert_int_equal(reward_score(r, &q, &out), 0);
        if (out.status != REWARD_SCORE || out.score != cases[i].want) fail_msg("case %zu: %g", i, out.score);
        const json_t *pred = json_object_get(out.extra, "pred");
        if (pred) assert_int_equal(json_string_length(pred), 3);
        if (pred) assert_memory_equal(json_string_value(pred), "7\0x", 3);
        reward_result_free(&out);
        json_decref(truth);
    }
    reward_destroy(r);
}

static void window_is_300_code_points(void **state) {
    (void)state;
    struct reward *r = make(&(struct reward_args){0});
    /* "#### 7" and then n two-byte characters: the mark must lie in the last 300 */
    for (int n = 290; n < 300; n++) {
        struct buf b = {0};
        buf_adds(&b, "#### 7");
        for (int i = 0; i < n; i++) buf_adds(&b, "é");
        native(r, "openai/gsm8k", b.p, json_string("7"), REWARD_SCORE, n <= 294);
        buf_free(&b);
    }
    reward_destroy(r);
}

static void overlong_responses_pay(void **state) {
    (void)state;
    struct reward *r = NULL;
    const struct reward_args bad = {.overlong_len = 10, .max_resp_len = 5};
    assert_int_equal(reward_create(&r, &bad), ERR_INVAL);
    r = make(&(struct reward_args){.overlong_len = 4, .max_resp_len = 20, .overlong_penalty_factor = 0.5, .overlong_log = true});
    json_t *truth = json_string("7");
    for (int64_t len = 14; len <= 20; len++) {
        struct reward_result out;
        const struct reward_request q = {
            .data_source = "openai/gsm8k", .solution = "#### 7", .n_solution = 6, .ground_truth = truth, .response_len = len};
        assert_int_equal(reward_score(r, &q, &out), 0);
        const double penalty = len > 16 ? -(double)(len - 16) / 4 * 0.5 : 0;
        assert_true(out.score == 1 + penalty);
        assert_true(json_is_true(json_object_get(out.extra, "overlong")) == (len > 16));
        reward_result_free(&out);
    }
    json_decref(truth);
    reward_destroy(r);
}

static void submitted_samples_come_back(void **state) {
    (void)state;
    struct reward *r = make(&(struct reward_args){0});
    json_t *truth = json_string("7");
    const struct reward_request q = {.data_source = "openai/gsm8k", .solution = "#### 7", .n_solution = 6, .ground_truth = truth};
    for (int64_t tag = 0; tag < 5; tag++) assert_int_equal(reward_submit(r, &q, tag), 0);
    assert_int_equal(reward_pending(r), 5);
    int64_t tag;
    struct reward_result out;
    for (int64_t want = 0; want < 4; want++) { /* the fifth is freed by destroy */
        assert_int_equal(reward_poll(r, 0, &tag, &out), 1);
        assert_int_equal(tag, want);
        reward_result_free(&out);
    }
    json_decref(truth);
    reward_destroy(r);
}

/* ---- user code ---- */

static const char user_file[] =
    "import asyncio, os, time\n"
    "def compute_score(data_source, solution_str, ground_truth, extra_info=None, bonus=0.0, **kw):\n"
    "    print('noise on stdout')\n"
    "    if solution_str == 'raise': raise KeyError('no such key')\n"
    "    if solution_str == 'none': return None\n"
    "    if solution_str == 'nan': return float('nan')\n"
    "    if solution_str == 'exit': os._exit(3)\n"
    "    if solution_str == 'sysexit': raise SystemExit(3)\n"
    "    if solution_str == 'hang': time.sleep(60)\n"
    "    if solution_str == 'dict': return {'score': 0.5, 'format': True, 'odd': {1, 2}, 'extra': extra_info}\n"
    "    if solution_str == 'nodict': return {'reward': 1}\n"
    "    return float(solution_str == ground_truth) + bonus\n"
    "async def slow_score(data_source, solution_str, ground_truth, extra_info=None):\n"
    "    await asyncio.sleep(0.01)\n"
    "    return 2\n";

static char *write_user_file(const char *text) {
    char *path = xasprintf("%s/verlc_test_reward_%d.py", getenv("TMPDIR") ? getenv("TMPDIR") : "/tmp", (int)getpid());
    assert_int_equal(file_write_atomic(path, text, strlen(text)), 0);
    return path;
}

static void expect(struct reward *r, const char *text, enum reward_status status, const char *says) {
    struct reward_result out = score(r, "any/source", text, json_string("yes"));
    assert_string_equal(reward_status_name(out.status), reward_status_name(status));
    if (says && (!out.message || !strstr(out.message, says)))
        fail_msg("'%s' does not say '%s'", out.message ? out.message : "", says);
    reward_result_free(&out);
}

static void user_code_is_contained(void **state) {
    (void)state;
    char *path = write_user_file(user_file);
    json_t *kwargs = json_pack("{s:f}", "bonus", 0.25);
    struct reward *r = make(&(struct reward_args){.path = path, .kwargs = kwargs, .timeout_s = 5});
    struct reward_result out = score(r, "any/source", "yes", json_string("yes"));
    assert_int_equal(out.status, REWARD_SCORE);
    assert_true(out.score == 1.25);
    assert_true(json_number_value(json_object_get(out.extra, "acc")) == 1.25);
    reward_result_free(&out);
    out = score(r, "any/source", "dict", json_string("yes"));
    assert_true(out.status == REWARD_SCORE && out.score == 0.5);
    assert_true(json_is_true(json_object_get(out.extra, "format")));
    reward_result_free(&out);
    expect(r, "raise", REWARD_CRASH, "KeyError");
    expect(r, "sysexit", REWARD_CRASH, "SystemExit");
    expect(r, "none", REWARD_UNPARSED, "None");
    expect(r, "nan", REWARD_UNPARSED, "nan");
    expect(r, "nodict", REWARD_UNPARSED, "reward");
    expect(r, "exit", REWARD_CRASH, "");
    expect(r, "hang", REWARD_TIMEOUT, "");
    expect(r, "yes", REWARD_SCORE, NULL); /* a fresh helper after both */
    reward_destroy(r);
    json_decref(kwargs);
    unlink(path);
    free(path);
}

static void user_code_may_be_async_and_parallel(void **state) {
    (void)state;
    char *path = write_user_file(user_file);
    struct reward *r = make(&(struct reward_args){.path = path, .name = "slow_score", .n_workers = 2});
    json_t *truth = json_string("x");
    const struct reward_request q = {.data_source = "s", .solution = "x", .n_solution = 1, .ground_truth = truth};
    bool seen[6] = {false};
    for (int64_t tag = 0; tag < 6; tag++) assert_int_equal(reward_submit(r, &q, tag), 0);
    for (int i = 0; i < 6; i++) {
        int64_t tag = -1;
        struct reward_result out;
        assert_int_equal(reward_poll(r, 30, &tag, &out), 1);
        assert_true(out.status == REWARD_SCORE && out.score == 2 && !seen[tag]);
        seen[tag] = true;
        reward_result_free(&out);
    }
    assert_int_equal(reward_pending(r), 0);
    json_decref(truth);
    reward_destroy(r);
    unlink(path);
    free(path);
}

/* tools/oracle_rate_limit.py: when verl's AsyncTokenBucket lets the same requests go. */
static void the_rate_is_verls(void **state) {
    (void)state;
    json_t *cases = NULL, *c;
    size_t k, i;
    if (json_load(&cases, FIXTURES "/algo/rate_limit.json", 1 << 20) < 0) fail_msg("%s", err_msg());
    json_array_foreach(cases, k, c) {
        const double rate = json_number_value(json_object_get(c, "per_minute")) / 60;
        struct reward__rate r = {.bucket = {{.rate = rate, .cost = json_number_value(json_object_get(c, "cost"))}}};
        const json_t *arrivals = json_object_get(c, "arrivals"), *times = json_object_get(c, "times");
        double now = 0;
        for (i = 0; i < json_array_size(arrivals); i++) {
            const double arrival = json_number_value(json_array_get(arrivals, i)),
                         want = json_number_value(json_array_get(times, i));
            if (now < arrival) now = arrival;
            for (double wait; (wait = reward__rate_wait(&r, now)) > 0;) now += wait + 1e-9;
            reward__rate_sent(&r);
            /* verl's waits of the oracle end up to 1e-9 s late, one after the other */
            if (now < want - 1e-6 || now > want + 1e-6) fail_msg("case %zu, request %zu: %.9f s, verl %.9f s", k, i, now, want);
        }
    }
    assert_true(json_array_size(cases) >= 20);
    json_decref(cases);
}

static void a_bad_file_is_refused_at_once(void **state) {
    (void)state;
    struct reward *r = NULL;
    assert_int_equal(reward_create(&r, &(struct reward_args){.path = "/nowhere/reward.py"}), ERR_INPUT);
    char *path = write_user_file("def compute_score(:\n");
    assert_true(reward_create(&r, &(struct reward_args){.path = path}) < 0);
    assert_non_null(strstr(err_msg(), "SyntaxError"));
    unlink(path);
    free(path);
    path = write_user_file("x = 1\n");
    assert_true(reward_create(&r, &(struct reward_args){.path = path}) < 0);
    assert_non_null(strstr(err_msg(), "no function 'compute_score'"));
    unlink(path);
    free(path);
    assert_null(r);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(data_source_picks_the_grader),
        cmocka_unit_test(window_is_300_code_points),
        cmocka_unit_test(nul_is_a_character),
        cmocka_unit_test(overlong_responses_pay),
        cmocka_unit_test(submitted_samples_come_back),
        cmocka_unit_test(user_code_is_contained),
        cmocka_unit_test(user_code_may_be_async_and_parallel),
        cmocka_unit_test(the_rate_is_verls),
        cmocka_unit_test(a_bad_file_is_refused_at_once),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
