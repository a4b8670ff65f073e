/* fuzz_reward.c - the native graders on arbitrary answers: a JSON object {"text", "gold"},
 * or plain bytes with a gold answer of "7".  A score is a finite number, and grading
 * twice gives it twice.
 * And what the reward helper may answer a call: any JSON value.  compute_score.c is included whole, so that no process has
 * to be started.  A score has an object beside it that can be printed; everything else is a failure with a message. */
#include "fuzz.h"

#include "base/json.h"

#include "reward/compute_score.c"

static const char *const sources[] = {"openai/gsm8k", "lighteval/MATH", "math_dapo"};

static double grade(struct reward *r, const struct reward_request *q) {
    struct reward_result out;
    fuzz_check_rc(reward_score(r, q, &out));
    CHECK(out.status != REWARD_SCORE || out.score - out.score == 0);
    CHECK(out.status == REWARD_SCORE || out.message != NULL);
    const double score = out.status == REWARD_SCORE ? out.score : -99;
    reward_result_free(&out);
    return score;
}

static void check_reply(const json_t *reply) {
    struct buf line = {0};
    struct reward_result r = from_reply(reply);
    CHECK(json_is_object(r.extra) && json_dump_line(&line, r.extra) == 0);
    CHECK((r.status == REWARD_SCORE) == (r.message == NULL));
    CHECK(r.status != REWARD_SCORE || r.score - r.score == 0);
    reward_result_free(&r);
    buf_free(&line);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t n) {
    static struct reward *r;
    json_t *o = NULL, *gold = NULL, *text;
    fuzz_quiet();
    if (!r) CHECK(reward_create(&r, &(struct reward_args){.overlong_len = 0}) == 0);
    if (json_parse(&o, (const char *)data, n, "fuzz") == 0) gold = json_object_get(o, "gold");
    if (o) check_reply(o);
    gold = gold ? json_incref(gold) : json_string("7");
    text = json_object_get(o, "text");
    char *copy = xstrndup((const char *)data, n);
    for (int i = 0; i < 6; i++) {
        const struct reward_request q = {.data_source = sources[i / 2],
                                         .solution = json_is_string(text) ? json_string_value(text) : copy,
                                         .n_solution = json_is_string(text) ? json_string_length(text) : n,
                                         .ground_truth = gold,
                                         .method = i % 2 ? REWARD_FLEXIBLE : REWARD_STRICT};
        CHECK(grade(r, &q) == grade(r, &q));
    }
    free(copy);
    json_decref(gold);
    json_decref(o);
    return 0;
}
