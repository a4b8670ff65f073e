/* test_reward_verl.c - the native graders against verl 0.9.1's on perturbed
 * answers (tools/oracle_graders.py): scores and extracted answers, string for string.
 * With an argument it reads that file instead. */
#include "base/buf.h"
#include "base/err.h"
#include "base/file.h"
#include "base/json.h"
#include "reward/reward.h"

#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

static const char *path = FIXTURES "/algo/reward.jsonl";
static int n_gsm8k, n_math, n_right;

static void same_answer(char *got, const json_t *want, const char *text) {
    const char *w = json_string_value(want); /* NULL: verl found none */
    if ((got == NULL) != (w == NULL) || (got && strcmp(got, w) != 0))
        fail_msg("extracted '%s', verl '%s', from: %s", got ? got : "(none)", w ? w : "(none)", text);
    free(got);
}

static void same_score(double got, const json_t *line, const char *key, const char *text) {
    const double want = json_number_value(json_object_get(line, key));
    if (got != want) fail_msg("%s: score %g, verl %g, for: %s", key, got, want, text);
    n_right += want > 0;
}

static int one_case(void *arg, char *raw, size_t n, int64_t no) {
    (void)arg;
    (void)no;
    json_t *line;
    TRY(json_parse(&line, raw, n, path));
    const json_t *j = json_object_get(line, "text");
    const char *text = json_string_value(j), *gold = json_string_value(json_object_get(line, "gold"));
    const size_t len = json_string_length(j);
    if (strcmp(json_string_value(json_object_get(line, "kind")), "gsm8k") == 0) {
        same_answer(reward_gsm8k_extract(text, len, REWARD_STRICT), json_object_get(line, "answer"), text);
        same_answer(reward_gsm8k_extract(text, len, REWARD_FLEXIBLE), json_object_get(line, "loose"), text);
        same_score(reward_gsm8k(text, len, gold, REWARD_STRICT), line, "strict", text);
        same_score(reward_gsm8k(text, len, gold, REWARD_FLEXIBLE), line, "flexible", text);
        n_gsm8k++;
    } else {
        char *pred;
        same_score(reward_math(text, len, gold), line, "math", text);
        same_score(reward_math_dapo(text, len, gold, false, &pred), line, "dapo", text);
        same_answer(pred, json_object_get(line, "pred"), text);
        n_math++;
    }
    json_decref(line);
    return 0;
}

static void verl_agrees(void **state) {
    (void)state;
    if (file_each_line(path, one_case, NULL) < 0) fail_msg("%s", err_msg());
    print_message("%d GSM8K and %d MATH strings, %d scores above 0\n", n_gsm8k, n_math, n_right);
    assert_true(n_gsm8k >= 250 && n_math >= 350 && n_right >= 100);
}

int main(int argc, char **argv) {
    if (argc > 1) path = argv[1];
    const struct CMUnitTest tests[] = {cmocka_unit_test(verl_agrees)};
    return cmocka_run_group_tests(tests, NULL, NULL);
}
