/* bench_grade.c - `verlc bench grade`: responses that the native graders score per second on one core, from text to
 * reward_result, as a run calls them.
 *
 * Responses are made here: prose with arithmetic of a given number of tokens (four characters each), half of them right.
 * Graders that may ask a helper are left out. */
#include "cmd/bench/bench.h"
#include "cmd/cmd.h"

#include "base/buf.h"
#include "base/clock.h"
#include "base/err.h"
#include "reward/reward.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { N_RESPONSES = 512, CHARS_PER_TOKEN = 4 };

/* How a right and a wrong response end. */
static const struct form {
    const char *grader, *right, *wrong, *truth;
    bool targets;
} forms[] = {
    {"gsm8k", "#### 1,234", "#### 1234.", "1234", false},
    {"gsm8k_flexible", "so it is 12 apples", "so it is 13 apples", "12", false},
    {"math_reward", "so $x = \\boxed{\\dfrac{1}{2}}$.", "so $x = \\boxed{\\frac{3}{2}}$.", "\\frac12", false},
    {"math_dapo", "Answer: $\\frac{1}{2}$", "Answer: $\\frac{3}{2}$", "\\frac{1}{2}", false},
    {"math_dapo_strict_box", "\\boxed{12}", "\\boxed{13}", "12", false},
    {"gpqa", "Answer: B", "Answer: C", "B", false},
    {"search_r1_like_qa_em", "<answer>The Tower.</answer>", "<answer>a bridge</answer>", "tower", true},
};

static void add_response(struct buf *b, const char *end, int64_t n_chars, uint32_t *seed) {
    buf_reset(b);
    while ((int64_t)b->n < n_chars) {
        *seed = *seed * 1664525u + 1013904223u;
        const unsigned x = *seed >> 20 & 63, y = *seed >> 26;
        buf_addf(b, "We have %u of them, and $%u \\cdot %u = %u$, so that \\frac{%u}{%u} is left over.\n", x, x, y, x * y, x,
                 y + 1);
    }
    buf_adds(b, end);
}

/* Scores the responses again and again for min_time seconds. */
static int time_grader(struct reward *r, const struct form *f, int64_t tokens, double min_time) {
    struct buf text = {0};
    uint32_t seed = 1;
    int64_t scored = 0, right = 0;
    json_t *truth = f->targets ? json_pack("{s:[s]}", "target", f->truth) : json_string(f->truth);
    char *responses[N_RESPONSES];
    int rc = 0;
    for (int i = 0; i < N_RESPONSES; i++) {
        add_response(&text, i % 2 ? f->right : f->wrong, tokens * CHARS_PER_TOKEN, &seed);
        responses[i] = xstrdup(text.p);
    }
    const double start = clock_now();
    double seconds = 0;
    for (; rc == 0 && seconds < min_time; seconds = clock_now() - start)
        for (int i = 0; rc == 0 && i < N_RESPONSES; i++, scored++) {
            struct reward_result out = {0};
            const struct reward_request q = {
                .grader = f->grader, .solution = responses[i], .n_solution = strlen(responses[i]), .ground_truth = truth};
            rc = reward_score(r, &q, &out);
            right += out.score > 0;
            reward_result_free(&out);
        }
    if (rc == 0)
        printf("{\"subject\":\"grade\",\"grader\":\"%s\",\"tokens\":%lld,\"per_s\":%.0f,\"right\":%.3f}\n", f->grader,
               (long long)tokens, (double)scored / seconds, (double)right / (double)scored);
    for (int i = 0; i < N_RESPONSES; i++) free(responses[i]);
    json_decref(truth);
    buf_free(&text);
    return rc;
}

int bench_grade(int argc, char **argv) {
    int64_t tokens = 0;
    double min_time = 0.5;
    const struct cmd_opt opts[] = {{"--tokens", CMD_I64("int[1,2^20]"), &tokens, "N", "of a response (300 and 1000)"},
                                   {"--min-time", CMD_F64("float(0,3600]"), &min_time, "S", "seconds for each grader (0.5)"}};
    const struct cmd_spec spec = CMD_SPEC(opts, "verlc bench grade [--tokens N]", "Responses scored per second by one core.");
    const int64_t lengths[] = {tokens ? tokens : 300, 1000};
    struct reward *r;
    int rc = cmd_parse(&spec, argc, argv);
    if (rc != 0) return rc < 0 ? rc : 0;
    const int64_t n_lengths = tokens ? 1 : 2;
    TRY(reward_create(&r, &(struct reward_args){.path = NULL}));
    for (size_t i = 0; rc == 0 && i < sizeof forms / sizeof *forms; i++)
        for (int64_t k = 0; rc == 0 && k < n_lengths; k++) rc = time_grader(r, &forms[i], lengths[k], min_time);
    reward_destroy(r);
    return rc;
}
