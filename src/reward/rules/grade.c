/* grade.c - the native graders by name, and the router: by name, else by data source as verl's default_compute_score does.
 *
 * Knows which grader a row gets, what may be wrong with the row, and which Python packages a grader's questions need; how an
 * answer is graded is in grade_*.c, who answers the questions in grade_helper.c.
 * Invariant: a row that no grader is for has no score, and the message says what is known. */
#include "reward/reward_int.h"

#include "base/err.h"

#include <stdlib.h>
#include <string.h>

/* ---- graders ---- */

static struct reward_result scored(double score) {
    struct reward_result r = {.status = REWARD_SCORE, .score = score, .extra = json_object()};
    json_object_set_new(r.extra, "acc", json_real(score));
    return r;
}

static struct reward_result gsm8k(struct reward__grading *g) { return scored(reward__gsm8k(g->text, g->n, g->truth, false)); }
static struct reward_result gsm8k_flexible(struct reward__grading *g) {
    return scored(reward__gsm8k(g->text, g->n, g->truth, true));
}
static struct reward_result math_reward(struct reward__grading *g) { return scored(reward__math(g->text, g->n, g->truth)); }

static struct reward_result dapo(struct reward__grading *g, bool strict_box_verify) {
    char *pred;
    struct reward_result r = scored(reward__math_dapo(g->text, g->n, g->truth, strict_box_verify, &pred));
    json_object_set_new(r.extra, "score", json_real(r.score));
    json_object_set_new(r.extra, "acc", json_boolean(r.score > 0));
    json_object_set_new(r.extra, "pred", reward__answer_of(pred));
    free(pred);
    return r;
}
static struct reward_result math_dapo(struct reward__grading *g) { return dapo(g, false); }
static struct reward_result math_dapo_strict_box(struct reward__grading *g) { return dapo(g, true); }

static struct reward_result prime_math(struct reward__grading *g) { return scored(reward__prime_math(g)); }
static struct reward_result geo3k(struct reward__grading *g) { return scored(reward__geo3k(g)); }
static struct reward_result gpqa(struct reward__grading *g) { return scored(reward__choice(g->text, g->n, g->truth)); }
static struct reward_result search_r1_em(struct reward__grading *g) {
    return scored(reward__search_r1(g->text, g->targets, false));
}
static struct reward_result search_r1_subem(struct reward__grading *g) {
    return scored(reward__search_r1(g->text, g->targets, true));
}

static struct reward_result math_verify(struct reward__grading *g) {
    const json_t *answer = reward__ask(g, json_pack("{s:s, s:s}", "math_verify", g->text, "gold", g->truth));
    const char *timeout = json_string_value(json_object_get(answer, "timeout"));
    if (timeout) return reward__failure(REWARD_TIMEOUT, xstrdup(timeout));
    return scored(json_number_value(json_object_get(answer, "score")));
}

#define SYMPY "sympy pylatexenc"
static const struct reward__grader graders[] = {
    {"gsm8k", gsm8k, NULL, false},
    {"gsm8k_flexible", gsm8k_flexible, NULL, false},
    {"math_reward", math_reward, NULL, false},
    {"math_dapo", math_dapo, NULL, false},
    {"math_dapo_strict_box", math_dapo_strict_box, NULL, false},
    {"math_verify", math_verify, "math-verify", false},
    {"prime_math", prime_math, SYMPY, false},
    {"geo3k", geo3k, SYMPY, false},
    {"gpqa", gpqa, NULL, false},
    {"search_r1_like_qa_em", search_r1_em, NULL, true},
    {"search_r1_like_qa_subem", search_r1_subem, NULL, true},
    {"prime_code", NULL, NULL, false}, /* grade_code.c, with or without a service */
};

/* ---- the router ---- */

/* verl's default_compute_score; then the data of verl's recipe r1. A name that ends in '*' is a prefix. */
static const struct route {
    const char *data_source, *grader;
} routes[] = {
    {"openai/gsm8k", "gsm8k"},
    {"lighteval/MATH", "math_reward"},
    {"DigitalLearningGmbH/MATH-lighteval", "math_reward"},
    {"HuggingFaceH4/MATH-500", "math_reward"},
    {"math_dapo", "math_dapo"},
    {"math", "math_dapo"},
    {"math_dapo_reasoning", "math_dapo"},
    {"aime*", "math_dapo"},
    {"numina_aops_forum", "prime_math"},
    {"numina_synthetic_math", "prime_math"},
    {"numina_amc_aime", "prime_math"},
    {"numina_synthetic_amc", "prime_math"},
    {"numina_cn_k12", "prime_math"},
    {"numina_olympiads", "prime_math"},
    {"codecontests", "prime_code"},
    {"apps", "prime_code"},
    {"codeforces", "prime_code"},
    {"taco", "prime_code"},
    {"hiyouga/geometry3k", "geo3k"},
    {"searchR1_nq", "search_r1_like_qa_em"},
    {"searchR1_triviaqa", "search_r1_like_qa_em"},
    {"searchR1_popqa", "search_r1_like_qa_em"},
    {"searchR1_hotpotqa", "search_r1_like_qa_em"},
    {"searchR1_2wikimultihopqa", "search_r1_like_qa_em"},
    {"searchR1_musique", "search_r1_like_qa_em"},
    {"searchR1_bamboogle", "search_r1_like_qa_em"},
    {"Idavidrein/gpqa", "gpqa"},
    {"Maxwell-Jia/AIME_2024", "math_verify"},
    {"opencompass/cnmo2024_en", "math_verify"},
    {"opencompass/cnmo2024_zh", "math_verify"},
};
#define COUNT(a) (sizeof(a) / sizeof *(a))

const struct reward__grader *reward__all_graders(size_t *n) {
    *n = COUNT(graders);
    return graders;
}

static const struct reward__grader *grader_named(const char *name) {
    for (size_t i = 0; i < COUNT(graders); i++)
        if (strcmp(name, graders[i].name) == 0) return &graders[i];
    return NULL;
}

static const struct reward__grader *grader_of_source(const char *data_source) {
    for (size_t i = 0; i < COUNT(routes); i++) {
        const char *name = routes[i].data_source, *star = strchr(name, '*');
        if (star ? strncmp(data_source, name, (size_t)(star - name)) == 0 : strcmp(data_source, name) == 0)
            return grader_named(routes[i].grader);
    }
    return NULL;
}

static char *known_sources(void) {
    struct buf list = {0};
    for (size_t i = 0; i < COUNT(routes); i++) buf_addf(&list, "%s%s", i ? ", " : "", routes[i].data_source);
    return buf_take(&list);
}

int reward_check_grader(const char *name) {
    struct buf list = {0};
    const struct reward__grader *g = grader_named(name);
    if (g) return 0;
    for (size_t i = 0; i < COUNT(graders); i++) buf_addf(&list, "%s%s", list.n ? ", " : "", graders[i].name);
    err_set(ERR_INVAL, __FILE__, __LINE__, "reward.grader: '%s' is no grader; known are %s", name, list.p);
    buf_free(&list);
    return ERR_INVAL;
}

const struct reward__grader *reward__route(const char *name, const char *data_source, char **why) {
    const struct reward__grader *g = name ? grader_named(name) : grader_of_source(data_source);
    *why = NULL;
    if (g) return g;
    char *known = known_sources();
    *why = xasprintf("data_source '%s' has no grader; known are %s. Set reward.grader=NAME for all rows, or give a "
                     "compute_score with custom_reward_function.path",
                     data_source, known);
    free(known);
    return NULL;
}

int reward_normal_form(const char *grader, const json_t *answer, char **out) {
    char *text = reward__text(answer), *form = NULL;
    int rc = 0;
    if (strcmp(grader, "math_dapo") == 0) {
        form = reward__minerva_normal(text);
    } else if (strcmp(grader, "search_r1_like_qa_em") == 0) {
        form = reward__qa_normal(text);
    } else if (strcmp(grader, "math_reward") == 0) {
        form = xstrdup(text);
        if (!reward__strip_string(&form, false)) FAILG(out, ERR_FORMAT, "the answer has no normal form of MATH");
    } else {
        FAILG(out, ERR_INVAL, "grader '%s' has no normal form; math_reward, math_dapo and search_r1_like_qa_em have one", grader);
    }
    *out = form;
    form = NULL;
out:
    free(form);
    free(text);
    return rc;
}

static bool are_targets(const json_t *v) {
    size_t i;
    const json_t *one;
    if (json_is_string(v)) return true;
    json_array_foreach(v, i, one) if (!json_is_string(one)) return false;
    return json_is_array(v);
}

char *reward__check_truth(const struct reward__grader *g, const char *data_source, const json_t *truth) {
    const bool missing = !truth || json_is_null(truth);
    if (!g->targets && !json_is_string(truth))
        return xasprintf("reward_model.ground_truth of data_source '%s' is %s, not a string", data_source,
                         missing ? "missing" : "of another type");
    if (g->targets && !are_targets(json_object_get(truth, "target")))
        return xasprintf("reward_model.ground_truth of data_source '%s' is %s, not {\"target\": a string or a list of them}",
                         data_source, missing ? "missing" : "of another form");
    return NULL;
}
