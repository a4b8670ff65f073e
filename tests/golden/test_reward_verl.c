/* test_reward_verl.c - the native graders against verl 0.9.1's on generated responses (tools/oracle_graders.py).
 * What a grader asks of its helper is answered from the file, with what sympy and pylatexenc answered verl.
 * With an argument it reads that file instead. */
#include "base/buf.h"
#include "base/err.h"
#include "base/file.h"
#include "base/json.h"
#include "base/map.h"
#include "reward/reward_int.h"

#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

static const char *path = FIXTURES "/algo/graders.jsonl";
static struct map graders; /* name -> lines */
static int n_right, n_asked;

/* The answer that verl got; the question is an object of one text. */
static json_t *answer_of(const json_t *line, const json_t *question) {
    const char *text;
    json_t *answer;
    json_object_foreach(json_object_get(line, "asked"), text, answer) {
        json_t *asked = json_loads(text, 0, NULL);
        const bool same = json_equal(asked, question);
        json_decref(asked);
        if (same) return answer;
    }
    return NULL;
}

static struct reward_result grade(const struct reward__grader *grader, const json_t *line) {
    const json_t *gold = json_object_get(line, "gold");
    char *text = reward__text(json_object_get(line, "text")), *truth = grader->targets ? NULL : reward__text(gold);
    json_t *answers = json_array();
    struct reward_result r;
    for (;;) {
        struct reward__grading g = {
            .text = text, .n = strlen(text), .truth = truth, .targets = json_object_get(gold, "target"), .answers = answers};
        r = grader->grade(&g);
        if (!g.question) break;
        json_t *answer = answer_of(line, g.question);
        if (!answer) fail_msg("asks what verl did not: %s in %s", json_dumps(g.question, 0), json_dumps(line, 0));
        json_array_append(answers, answer);
        json_decref(g.question);
        reward_result_free(&r);
        n_asked++;
    }
    json_decref(answers);
    free(text);
    free(truth);
    return r;
}

static int one_case(void *arg, char *raw, size_t n, int64_t no) {
    (void)arg;
    json_t *line, *expect;
    const char *key;
    char *why;
    int64_t lines = 0;
    TRY(json_parse(&line, raw, n, path));
    const char *name = json_string_value(json_object_get(line, "grader"));
    const struct reward__grader *grader = reward__route(name, "", &why);
    if (!grader) fail_msg("%s", why);
    struct reward_result r = grade(grader, line);
    assert_int_equal(r.status, REWARD_SCORE);
    json_object_set_new(r.extra, "score", json_real(r.score));
    json_object_foreach(json_object_get(line, "expect"), key, expect) {
        const json_t *got = json_object_get(r.extra, key);
        if (json_is_number(got) ? json_number_value(got) != json_number_value(expect) : !json_equal(got, expect))
            fail_msg("line %d, %s: %s, verl %s", (int)no, key, json_dumps(got, JSON_ENCODE_ANY),
                     json_dumps(expect, JSON_ENCODE_ANY));
    }
    n_right += r.score > 0;
    map_gets(&graders, name, &lines);
    map_set(&graders, name, strlen(name), lines + 1);
    reward_result_free(&r);
    json_decref(line);
    return 0;
}

static void verl_agrees(void **state) {
    (void)state;
    if (file_each_line(path, one_case, NULL) < 0) fail_msg("%s", err_msg());
    for (int64_t i = 0; i < graders.n; i++) print_message("%s: %d\n", graders.entries[i].key, (int)graders.entries[i].value);
    print_message("%d scores above 0, %d questions\n", n_right, n_asked);
    assert_true(graders.n == 10 && n_right >= 80 && n_asked >= 40);
    for (int64_t i = 0; i < graders.n; i++) assert_true(graders.entries[i].value >= 55);
    map_free(&graders);
}

/* float() takes Unicode's spaces and decimals, but not the separators \x1c to \x1f, which str.strip() takes for spaces. */
static void float_is_pythons(void **state) {
    (void)state;
    static const struct {
        const char *text;
        bool number;
    } cases[] = {{"5", true},
                 {" 5\x0b", true},
                 {"5\xc2\xa0", true},
                 {"\xef\xbc\x95", true},
                 {"5\x1c", false},
                 {"\x1f"
                  "5",
                  false},
                 {"5\x1c\xe2\x80\x83", false},
                 {"", false}};
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        double x = 0;
        if (reward__float(cases[i].text, &x) != cases[i].number || (cases[i].number && x != 5)) fail_msg("case %d: %g", (int)i, x);
    }
}

int main(int argc, char **argv) {
    if (argc > 1) path = argv[1];
    const struct CMUnitTest tests[] = {cmocka_unit_test(verl_agrees), cmocka_unit_test(float_is_pythons)};
    return cmocka_run_group_tests(tests, NULL, NULL);
}
