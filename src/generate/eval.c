/* eval.c - verl's main_eval: scores of responses in a file.
 *
 * Prints test_score/SOURCE, the mean over prompts of the mean over their responses,
 * as verl does, and in addition the validation statistics of the same scores (mean@n,
 * best@k, pass@k, maj@k), under the names that training gives them.
 * Invariant: a response without a score is counted, never a number. */
#include "generate/eval.h"

#include "ppo/stages/stages.h"

#include "base/clock.h"
#include "base/err.h"
#include "base/json.h"
#include "base/log.h"
#include "base/map.h"

#include <stdlib.h>
#include <string.h>

enum { FIRST_S = 2, SAY_S = 5 }; /* until the next line about the scores, and from there */

struct eval {
    const char *path, *response_key, *source_key, *reward_key;
    struct reward_args reward_args;
    struct reward *reward;
    json_t *rows;
    struct val_row *v; /* one a response; unscored ones have data_source NULL */
    int64_t n, n_failed, n_done;
    double say_at;       /* the next line about them, on the clock */
    char *first_failure; /* its message */
};

#define CONF_STRUCT struct eval
#include "conf/bind.h"

static const struct conf_binding bindings[] = {
#include "conf/keys/eval.def"
};

/* Responses of a row; a string is a list of one. */
static size_t n_responses(const json_t *list) { return json_is_string(list) ? 1 : json_array_size(list); }
static const json_t *response(const json_t *list, size_t i) { return json_is_string(list) ? list : json_array_get(list, i); }

static int check_row(const struct eval *e, const json_t *row, size_t i) {
    const json_t *list = json_object_get(row, e->response_key), *source = json_object_get(row, e->source_key);
    if (!json_is_string(source)) FAIL(ERR_INPUT, "%s row %zu: column '%s' is not text", e->path, i + 1, e->source_key);
    if (strlen(json_string_value(source)) < json_string_length(source))
        FAIL(ERR_INPUT, "%s row %zu: column '%s' holds a NUL character, which the name of a metric cannot", e->path, i + 1,
             e->source_key);
    if (!json_object_get(json_object_get(row, e->reward_key), "ground_truth"))
        FAIL(ERR_INPUT, "%s row %zu: column '%s' has no ground_truth", e->path, i + 1, e->reward_key);
    if (n_responses(list) == 0) FAIL(ERR_INPUT, "%s row %zu: column '%s' has no responses", e->path, i + 1, e->response_key);
    for (size_t k = 0; k < n_responses(list); k++)
        if (!json_is_string(response(list, k))) FAIL(ERR_INPUT, "%s row %zu: response %zu is not text", e->path, i + 1, k + 1);
    return 0;
}

static int read_rows(struct eval *e) {
    const char *const required[] = {e->response_key, e->source_key, e->reward_key, NULL};
    const json_t *row;
    size_t i;
    TRY(data_read_rows(&e->rows, e->path, required));
    if (json_array_size(e->rows) == 0) FAIL(ERR_INPUT, "%s has no rows", e->path);
    json_array_foreach(e->rows, i, row) {
        TRY(check_row(e, row, i));
        e->n += (int64_t)n_responses(json_object_get(row, e->response_key));
    }
    e->v = xcalloc((size_t)e->n, sizeof *e->v);
    return 0;
}

/* Before the first score: checks that every row has a grader. */
static int check_sources(const struct eval *e) {
    const json_t *row;
    size_t i;
    json_array_foreach(e->rows, i, row) {
        const char *source = json_string_value(json_object_get(row, e->source_key));
        TRY(reward_check_sources(e->reward, &source, 1));
    }
    return 0;
}

/* ---- scores ---- */

static void say_progress(struct eval *e) {
    if (clock_now() < e->say_at || e->n_done == e->n) return;
    log_info("%lld of %lld responses scored", (long long)e->n_done, (long long)e->n);
    e->say_at = clock_now() + SAY_S;
}

static int take(struct eval *e, double wait_s) {
    int64_t tag;
    struct reward_result r;
    int got;
    while ((got = reward_poll(e->reward, wait_s, &tag, &r)) > 0) {
        struct val_row *v = &e->v[tag];
        if (r.status == REWARD_SCORE) {
            v->reward = r.score;
            v->extra = r.extra ? json_incref(r.extra) : json_object();
        } else {
            v->data_source = NULL;
            if (e->n_failed++ == 0)
                e->first_failure = xasprintf("%s: %s", reward_status_name(r.status), r.message ? r.message : "");
        }
        reward_result_free(&r);
        e->n_done++;
        say_progress(e);
    }
    return got;
}

static int score_all(struct eval *e) {
    const json_t *row;
    size_t i;
    int64_t tag = 0;
    e->say_at = clock_now() + FIRST_S;
    json_array_foreach(e->rows, i, row) {
        const json_t *list = json_object_get(row, e->response_key);
        for (size_t k = 0; k < n_responses(list); k++, tag++) {
            const json_t *text = response(list, k), *extra = json_object_get(row, "extra_info");
            const struct reward_request q = {
                .data_source = json_string_value(json_object_get(row, e->source_key)),
                .solution = json_string_value(text),
                .n_solution = json_string_length(text),
                .ground_truth = json_object_get(json_object_get(row, e->reward_key), "ground_truth"),
                .extra_info = json_is_object(extra) ? extra : NULL,
            };
            e->v[tag] = (struct val_row){.data_source = q.data_source, .uid = (int64_t)i};
            TRY(reward_submit(e->reward, &q, tag));
            TRY(take(e, 0));
        }
    }
    while (reward_pending(e->reward) > 0) TRY(take(e, 1.0));
    return 0;
}

/* ---- the answer ---- */

/* test_score/SOURCE into m: rows of one prompt are neighbours. */
static void test_scores(const struct eval *e, struct metrics *m) {
    struct map index = {0};
    double *sum = NULL;
    int64_t *count = NULL, cap = 0, cap_n = 0;
    for (int64_t i = 0, j; i < e->n; i = j) {
        const char *source = NULL;
        double s = 0;
        int64_t k = 0, at;
        for (j = i; j < e->n && e->v[j].uid == e->v[i].uid; j++) {
            if (!e->v[j].data_source) continue;
            source = e->v[j].data_source;
            s += e->v[j].reward;
            k++;
        }
        if (k == 0) continue;
        if (!map_gets(&index, source, &at)) {
            at = index.n;
            map_set(&index, source, strlen(source), at);
            xgrow((void **)&sum, &cap, at + 1, sizeof *sum);
            xgrow((void **)&count, &cap_n, at + 1, sizeof *count);
            sum[at] = 0;
            count[at] = 0;
        }
        sum[at] += s / (double)k;
        count[at]++;
    }
    for (int64_t i = 0; i < index.n; i++) metrics_set(m, sum[i] / (double)count[i], "test_score/%s", index.entries[i].key);
    map_free(&index);
    free(sum);
    free(count);
}

static int answer(const struct eval *e, struct buf *out) {
    struct metrics m = {0};
    struct val_row *scored = xmalloc((size_t)e->n * sizeof *scored);
    int64_t n = 0;
    test_scores(e, &m);
    for (int64_t i = 0; i < e->n; i++)
        if (e->v[i].data_source) scored[n++] = e->v[i];
    int rc = validation_metrics(scored, n, &m);
    if (e->n_failed > 0) metrics_set_i64(&m, e->n_failed, "errors");
    json_t *o = json_object();
    for (int64_t i = 0; i < m.n; i++) json_object_set_new(o, m.items[i].name, json_real(m.items[i].value));
    if (rc == 0) rc = json_dump_line(out, o);
    if (rc == 0) rc = buf_addc(out, '\n');
    json_decref(o);
    metrics_free(&m);
    free(scored);
    return rc;
}

int eval_run(const struct conf *c, struct buf *out) {
    struct eval e = {0};
    int rc = 0;
    TRYG(conf_fill(c, bindings, sizeof bindings / sizeof *bindings, &e), out);
    TRYG(read_rows(&e), out);
    TRYG(reward_create(&e.reward, &e.reward_args), out);
    TRYG(check_sources(&e), out);
    TRYG(score_all(&e), out);
    if (e.n_failed > 0)
        log_warn("reward: %lld of %lld responses have no score (first: %s)", (long long)e.n_failed, (long long)e.n,
                 e.first_failure);
    if (e.n_failed == e.n)
        FAILG(out, ERR_HELPER, "none of the %lld responses has a score (first: %s)", (long long)e.n, e.first_failure);
    rc = answer(&e, out);
out:
    for (int64_t i = 0; e.v && i < e.n; i++) json_decref((json_t *)(uintptr_t)e.v[i].extra);
    free(e.v);
    free(e.first_failure);
    reward_destroy(e.reward);
    json_decref(e.rows);
    return rc;
}
