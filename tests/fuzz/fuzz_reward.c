/* fuzz_reward.c - the native graders on arbitrary answers: a JSON object {"text", "gold"},
 * or plain bytes with a gold answer of "7".  A score is a finite number, and grading
 * twice gives it twice.  A grader's questions are answered from the object's "answers", so that whatever a helper says is taken.
 * And what the reward helper may answer a call: any JSON value.  custom_reward_function.c is included whole, so that no process has
 * to be started.  A score has an object beside it that can be printed; everything else is a failure with a message. */
#include "fuzz.h"

#include "base/json.h"

#include "reward/custom_reward_function.c"

#include <string.h>

static const char *const names[] = {"gsm8k",
                                    "gsm8k_flexible",
                                    "math_reward",
                                    "math_dapo",
                                    "math_dapo_strict_box",
                                    "math_verify",
                                    "prime_math",
                                    "geo3k",
                                    "gpqa",
                                    "search_r1_like_qa_em",
                                    "search_r1_like_qa_subem"};

/* The score, or -99; -98: it asks for more answers than there are. */
static double grade(const struct reward__grader *grader, const char *text, const json_t *gold, const json_t *answers) {
    char *why = reward__check_truth(grader, "fuzz", gold), *truth = NULL;
    double score = -99;
    if (why) {
        free(why);
        return score;
    }
    if (!grader->targets) truth = reward__text(gold);
    struct reward__grading g = {
        .text = text, .n = strlen(text), .truth = truth, .targets = json_object_get(gold, "target"), .answers = answers};
    struct reward_result r = grader->grade(&g);
    CHECK(r.status != REWARD_SCORE || r.score - r.score == 0);
    CHECK(r.status == REWARD_SCORE || r.message != NULL);
    if (g.question) score = -98;
    else if (r.status == REWARD_SCORE) score = r.score;
    json_decref(g.question);
    reward_result_free(&r);
    free(truth);
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
    json_t *o = NULL, *gold = NULL, *text;
    fuzz_quiet();
    if (json_parse(&o, (const char *)data, n, "fuzz") == 0) gold = json_object_get(o, "gold");
    if (o) check_reply(o);
    gold = gold ? json_incref(gold) : json_string("7");
    text = json_object_get(o, "text");
    char *said = json_is_string(text) ? reward__text(text) : reward__text_of((const char *)data, n);
    for (size_t i = 0; i < sizeof names / sizeof *names; i++) {
        char *why;
        const struct reward__grader *grader = reward__route(names[i], "", &why);
        const json_t *answers = json_object_get(o, "answers");
        CHECK(grade(grader, said, gold, answers) == grade(grader, said, gold, answers));
    }
    free(said);
    json_decref(gold);
    json_decref(o);
    return 0;
}
