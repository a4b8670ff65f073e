/* grade.c - the router of native graders: by name, else by data source as verl's default_compute_score does.
 *
 * Knows which grader a row gets and what may be wrong with the row; how an answer is graded is in grade_*.c.
 * Invariant: a row that no grader is for has no score, and the message says what is known. */
#include "reward/reward_int.h"

#include "base/err.h"

#include <stdlib.h>
#include <string.h>

static struct reward_result scored(double score) {
    struct reward_result r = {.status = REWARD_SCORE, .score = score, .extra = json_object()};
    json_object_set_new(r.extra, "acc", json_real(score));
    return r;
}

/* ---- graders ---- */

static struct reward_result grade_gsm8k(const struct reward_request *q, const char *truth) {
    return scored(reward_gsm8k(q->solution, q->n_solution, truth, q->method));
}

static struct reward_result grade_math(const struct reward_request *q, const char *truth) {
    return scored(reward_math(q->solution, q->n_solution, truth));
}

static struct reward_result grade_math_dapo(const struct reward_request *q, const char *truth) {
    char *pred;
    struct reward_result r = scored(reward_math_dapo(q->solution, q->n_solution, truth, &pred));
    json_object_set_new(r.extra, "score", json_real(r.score));
    json_object_set_new(r.extra, "acc", json_boolean(r.score > 0));
    json_object_set_new(r.extra, "pred", json_string(pred));
    free(pred);
    return r;
}

/* verl's default_compute_score; a name that ends in '*' is a prefix. grade NULL:
 * verl has a grader, this program has not. */
static const struct route {
    const char *data_source;
    struct reward_result (*grade)(const struct reward_request *q, const char *truth);
} routes[] = {
    {"openai/gsm8k", grade_gsm8k},
    {"lighteval/MATH", grade_math},
    {"DigitalLearningGmbH/MATH-lighteval", grade_math},
    {"HuggingFaceH4/MATH-500", grade_math},
    {"math_dapo", grade_math_dapo},
    {"math", grade_math_dapo},
    {"math_dapo_reasoning", grade_math_dapo},
    {"aime*", grade_math_dapo},
    {"numina_*", NULL},
    {"codecontests", NULL},
    {"apps", NULL},
    {"codeforces", NULL},
    {"taco", NULL},
    {"hiyouga/geometry3k", NULL},
    {"searchR1_*", NULL},
};

static const struct route *route_of(const char *data_source) {
    for (size_t i = 0; i < sizeof routes / sizeof *routes; i++) {
        const char *name = routes[i].data_source, *star = strchr(name, '*');
        if (star ? strncmp(data_source, name, (size_t)(star - name)) == 0 : strcmp(data_source, name) == 0) return &routes[i];
    }
    return NULL;
}
/* The graders work on C strings.  A NUL in a text is this for them, a character that no text has, and comes back as
 * a NUL in what they say. */
static const struct {
    const char *p;
    size_t n;
} nul = {"", 1}, stand_in = {"\xF4\x8F\xBF\xBF", 4}; /* U+10FFFF */

static struct buf swap_nul(const char *s, size_t n, bool back) {
    const char *from = back ? stand_in.p : nul.p, *to = back ? nul.p : stand_in.p, *hit;
    const size_t n_from = back ? stand_in.n : nul.n, n_to = back ? nul.n : stand_in.n;
    struct buf out = {0};
    for (; (hit = memmem(s, n, from, n_from)); n -= (size_t)(hit - s) + n_from, s = hit + n_from) {
        buf_add(&out, s, (size_t)(hit - s));
        buf_add(&out, to, n_to);
    }
    buf_add(&out, s, n);
    return out;
}

static struct reward_result grade_without_nul(const struct route *r, const struct reward_request *q) {
    const char *truth = json_string_value(q->ground_truth);
    const size_t n_truth = json_string_length(q->ground_truth);
    if (!memchr(truth, 0, n_truth) && !(q->n_solution > 0 && memchr(q->solution, 0, q->n_solution))) return r->grade(q, truth);
    struct buf want = swap_nul(truth, n_truth, false), said = swap_nul(q->n_solution > 0 ? q->solution : "", q->n_solution, false);
    struct reward_request clean = *q;
    clean.solution = said.p;
    clean.n_solution = said.n;
    struct reward_result result = r->grade(&clean, want.p);
    const json_t *pred = json_object_get(result.extra, "pred");
    if (pred) {
        struct buf text = swap_nul(json_string_value(pred), json_string_length(pred), true);
        json_object_set_new(result.extra, "pred", json_stringn(text.p, text.n));
        buf_free(&text);
    }
    buf_free(&want);
    buf_free(&said);
    return result;
}

struct reward_result reward__grade(const struct reward_request *q) {
    const char *source = q->data_source ? q->data_source : "";
    const struct route *r = route_of(source);
    if (!r || !r->grade)
        return reward__failure(REWARD_MISSING, xasprintf("data_source '%s' has no %sgrader; give a compute_score with "
                                                         "custom_reward_function.path",
                                                         source, r ? "native " : ""));
    if (!json_is_string(q->ground_truth))
        return reward__failure(REWARD_MISSING,
                               xasprintf("reward_model.ground_truth of data_source '%s' is %s, not a string", source,
                                         q->ground_truth && !json_is_null(q->ground_truth) ? "of another type" : "missing"));
    return grade_without_nul(r, q);
}
