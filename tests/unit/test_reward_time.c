/* test_reward_time.c - the time of every native grader is linear in the response, whatever is in it; and no answer takes a
 * grader longer than its deadline.
 *
 * Hostile responses: a unit repeated, in each form in which a grader looks for an answer. CPU time, the least of several runs,
 * so that a busy machine does not count. */
#include "base/buf.h"
#include "base/err.h"
#include "base/json.h"
#include "reward/reward_int.h"

#include <math.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include <cmocka.h>

static const char *const units[] = {"{",
                                    "}",
                                    "{}",
                                    "{{}",
                                    "(",
                                    "[(",
                                    "()",
                                    "<",
                                    "<answer>",
                                    "</answer>",
                                    "<answer>x</answer>",
                                    "<answer><answer></answer>",
                                    "<think>",
                                    "</think>",
                                    "<think></think>\\boxed{",
                                    "1",
                                    "1,",
                                    "1,234",
                                    ",234",
                                    "1,234,",
                                    "12,345 ",
                                    "1.",
                                    ".",
                                    "-",
                                    "- ",
                                    "0",
                                    "1/2",
                                    "1 2",
                                    "7 3/4 ",
                                    "\\boxed",
                                    "\\boxed{",
                                    "\\boxed ",
                                    "\\boxed{1}",
                                    "\\fbox{",
                                    "\\frac",
                                    "\\frac1",
                                    "\\frac{1}",
                                    "\\frac12",
                                    "\\sqrt",
                                    "\\sqrt3",
                                    "\\sqrt{",
                                    "\\text{",
                                    "\\text{ ",
                                    "\\text{a}",
                                    "\\pi",
                                    "2\\pi",
                                    "^",
                                    "^ ",
                                    "^\\circ",
                                    "^{\\circ}",
                                    "^{",
                                    "^2^",
                                    "cm",
                                    "cm^2 ",
                                    "inches",
                                    "degree s",
                                    " ",
                                    "\t",
                                    "\n",
                                    " \n",
                                    "\xC2\xA0",
                                    "\xE3\x80\x80",
                                    "a",
                                    "a ",
                                    "the ",
                                    "an a the ",
                                    "\xC3\xA9",
                                    "\xE4\xB8\x80",
                                    "\xF0\x9F\x98\x80",
                                    "\xCE\xA3",
                                    "\xCE\xA3.",
                                    "\xC4\xB0",
                                    "\xD9\xA3",
                                    "\xCC\x81",
                                    "\x80",
                                    "\xFF",
                                    "$",
                                    "$1",
                                    "$$",
                                    "%",
                                    "\\%",
                                    "=",
                                    "= ",
                                    "is ",
                                    "be ",
                                    "answer is",
                                    "answer: ",
                                    "is the answer",
                                    ". ",
                                    "Answer",
                                    "Answer:",
                                    "Answer: ",
                                    "Answer :\t",
                                    "Answer: $A",
                                    "#### ",
                                    "#### 1",
                                    "####",
                                    "\\!",
                                    ",\\!",
                                    "\\\\",
                                    "\\",
                                    " or ",
                                    " and ",
                                    "million",
                                    "Interval(",
                                    "Point(",
                                    "_",
                                    "_8",
                                    "inf",
                                    "1e",
                                    "e",
                                    "\"",
                                    "'",
                                    "tfrac",
                                    "dfrac",
                                    "\\left(",
                                    "\\right",
                                    " .",
                                    "{.",
                                    "\\dots",
                                    "mbox"};
static const struct {
    const char *before, *behind;
} forms[] = {{"", ""},
             {"\\boxed{", "}"},
             {"Answer: ", "\nx"},
             {"<answer>", "</answer>"},
             {"<think></think> \\boxed{", "}"},
             {"The answer is $", "$."},
             {"\\boxed{\\text{", "}}"},
             {"\\boxed{(", ")}"}};
enum { N_UNITS = sizeof units / sizeof *units, N_FORMS = sizeof forms / sizeof *forms };

static char *hostile(int unit, int form, size_t n_bytes) {
    struct buf b = {0};
    buf_adds(&b, forms[form].before);
    while (b.n < n_bytes) buf_adds(&b, units[unit]);
    buf_adds(&b, forms[form].behind);
    return buf_take(&b);
}

static int unit_of(const char *text) {
    int i = 0;
    while (i < N_UNITS && strcmp(units[i], text) != 0) i++;
    assert_true(i < N_UNITS);
    return i;
}

static double cpu(void) {
    struct timespec t;
    clock_gettime(CLOCK_THREAD_CPUTIME_ID, &t);
    return (double)t.tv_sec + 1e-9 * (double)t.tv_nsec;
}

/* What a helper could say to each question of a grader: as long a text as the response. */
static double seconds(const struct reward__grader *g, const char *text, const json_t *answers) {
    json_t *targets = json_pack("[s, s]", "twelve", "12");
    const double begin = cpu();
    for (int asked = 0; asked < (g->packages ? 2 : 1); asked++) { /* as at first, and with answers */
        struct reward__grading q = {.text = text,
                                    .n = strlen(text),
                                    .truth = "(1,234,\\frac{1}{2})",
                                    .targets = targets,
                                    .answers = asked ? answers : NULL};
        struct reward_result r = g->grade(&q);
        assert_true(r.status == REWARD_SCORE);
        json_decref(q.question);
        reward_result_free(&r);
    }
    const double s = cpu() - begin;
    json_decref(targets);
    return s;
}

static double least(const struct reward__grader *g, int unit, int form, size_t n_bytes, int runs) {
    char *text = hostile(unit, form, n_bytes);
    json_t *one = json_string(text), *answers = json_array();
    if (!one) one = json_string("1");
    for (int i = 0; i < 8; i++) json_array_append_new(answers, json_pack("{s:O, s:b, s:b}", "text", one, "zero", 0, "empty", 0));
    json_decref(one);
    double s = seconds(g, text, answers);
    for (int i = 1; i < runs; i++) s = fmin(s, seconds(g, text, answers));
    json_decref(answers);
    free(text);
    return s;
}

/* Four times the response takes at most 6.8 times the time (2.6 for each doubling); a quadratic grader takes 16 times. What takes
 * less than 0.4 ms is not told from noise: 12 ns a byte, some dozens of passes. */
static bool is_linear(const struct reward__grader *g, int unit, int form, double *small, double *big) {
    enum { SMALL = 8 << 10, TIMES = 4, TRIES = 5 };
    const double nothing = 0.4e-3, most = 6.8;
    *small = 0;
    *big = least(g, unit, form, TIMES * SMALL, 1);
    for (int tries = 0; *big > nothing; tries++) {
        const double s = least(g, unit, form, SMALL, 1 + tries);
        *small = fmax(tries == 0 ? s : fmin(s, *small), nothing / most);
        if (*big <= most * *small) return true;
        if (tries == TRIES) return false;
        *big = fmin(*big, least(g, unit, form, TIMES * SMALL, 1 + tries));
    }
    return true;
}

static void time_is_linear(void **state) {
#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
    skip(); /* a sanitizer's strstr reads the whole text at each call */
#endif
    size_t n;
    int bad = 0;
    const struct reward__grader *all = reward__all_graders(&n);
    (void)state;
    for (size_t i = 0; i < n; i++)
        for (int unit = 0; all[i].grade && unit < N_UNITS; unit++)
            for (int form = 0; form < N_FORMS && bad < 8; form++) {
                double small, big;
                if (is_linear(&all[i], unit, form, &small, &big)) continue;
                bad++;
                print_error("%s: %s%s...%s: %.2f ms for 8 KiB, %.2f ms for 32 KiB\n", all[i].name, forms[form].before, units[unit],
                            forms[form].behind, 1e3 * small, 1e3 * big);
            }
    assert_int_equal(bad, 0);
}

/* A response that takes longer than reward.timeout has no score, and the next one has its own time. */
static void a_deadline_holds(void **state) {
    enum { BYTES = 24 << 20 };
#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
    const double most = 30; /* between two looks at the clock they read much more */
#else
    const double most = 1.5;
#endif
    static const char *const graders[] = {"math_reward", "prime_math", "geo3k", "search_r1_like_qa_em"};
    (void)state;
    json_t *truth = json_string("12"), *target = json_pack("{s:s}", "target", "12");
    for (size_t i = 0; i < sizeof graders / sizeof *graders; i++) {
        struct reward *r;
        struct reward_result out;
        char *text = hostile(unit_of(i == 3 ? "an a the " : "\\left("), i == 3 ? 3 : 1, BYTES);
        struct reward_request q = {.grader = graders[i], .solution = text, .n_solution = strlen(text)};
        q.ground_truth = i == 3 ? target : truth;
        assert_int_equal(reward_create(&r, &(struct reward_args){.timeout_s = 0.02}), 0);
        const double begin = cpu();
        assert_int_equal(reward_score(r, &q, &out), 0);
        assert_true(cpu() - begin < most);
        assert_int_equal(out.status, REWARD_TIMEOUT);
        assert_non_null(strstr(out.message, "reward.timeout"));
        reward_result_free(&out);
        q.solution = i == 3 ? "<answer>12</answer>" : "\\boxed{12}";
        q.n_solution = strlen(q.solution);
        assert_int_equal(reward_score(r, &q, &out), 0);
        assert_int_equal(out.status, REWARD_SCORE);
        assert_true(out.score >= 0.9);
        reward_result_free(&out);
        free(text);
        reward_destroy(r);
    }
    json_decref(truth);
    json_decref(target);
}

int main(void) {
    const struct CMUnitTest tests[] = {cmocka_unit_test(time_is_linear), cmocka_unit_test(a_deadline_holds)};
    return cmocka_run_group_tests(tests, NULL, NULL);
}
