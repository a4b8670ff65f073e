/* eval.c - verl's main_eval: scores of responses in a file.
 *
 * Prints test_score/SOURCE, the mean over prompts of the mean over their responses,
 * as verl does, and in addition the validation statistics of the same scores (mean@n,
 * best@k, pass@k, maj@k), under the names that training gives them. Responses that are episodes (episode_record.h) are scored as
 * training does: one that failed has no score, and one whose program gave a reward has that.
 * Invariant: a response without a score is counted, never a number. */
#include "generate/eval.h"

#include "generate/episode_record.h"

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
    const char *path, *response_key, *source_key, *reward_key, *episodes_key; /* episodes_key NULL: none are looked for */
    struct reward_args reward_args;
    struct reward *reward;
    json_t *rows;
    struct val_row *v; /* one a response; unscored ones have data_source NULL */
    int64_t n, n_failed, n_done;
    struct turns { /* of the responses that are episodes */
        int64_t n, sum, min, max;
    } turns;
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

/* The episodes of a row, each response's; NULL: they are no episodes. */
static const json_t *episodes_of(const struct eval *e, const json_t *row) {
    const json_t *list = e->episodes_key ? json_object_get(row, e->episodes_key) : NULL;
    return json_is_null(list) ? NULL : list;
}

/* Whether all responses of a row have a score, or will have none, without a scorer. */
static bool needs_no_scorer(const struct eval *e, const json_t *row) {
    const json_t *episodes = episodes_of(e, row);
    for (size_t k = 0; k < json_array_size(episodes); k++) {
        struct episode x;
        if (episode_read(&x, json_array_get(episodes, k)) < 0 || (!x.failure && !x.has_score)) return false;
    }
    return episodes != NULL;
}

static void count_turns(struct turns *t, int64_t n) {
    if (t->n == 0 || n < t->min) t->min = n;
    if (t->n == 0 || n > t->max) t->max = n;
    t->sum += n;
    t->n++;
}

/* Checks what a row has of episodes, and makes objects of it. */
static int take_episodes(struct eval *e, json_t *row, size_t i) {
    const json_t *list = episodes_of(e, row);
    json_t *records;
    struct episode x;
    if (!list) return 0;
    const int64_t n = (int64_t)n_responses(json_object_get(row, e->response_key));
    const int rc = episode_records_read(&records, list, n);
    if (rc < 0)
        return err_wrap(ERR_INPUT, "%s row %zu: column '%s' (data.episodes_key=null reads none)", e->path, i + 1, e->episodes_key);
    json_object_set_new(row, e->episodes_key, records);
    for (int64_t k = 0; k < n; k++) {
        TRY(episode_read(&x, json_array_get(records, (size_t)k)));
        count_turns(&e->turns, x.num_turns);
    }
    return 0;
}

static int check_row(const struct eval *e, const json_t *row, size_t i) {
    const json_t *list = json_object_get(row, e->response_key), *source = json_object_get(row, e->source_key);
    if (!json_is_string(source)) FAIL(ERR_INPUT, "%s row %zu: column '%s' is not text", e->path, i + 1, e->source_key);
    if (strlen(json_string_value(source)) < json_string_length(source))
        FAIL(ERR_INPUT, "%s row %zu: column '%s' holds a NUL character, which the name of a metric cannot", e->path, i + 1,
             e->source_key);
    if (!json_object_get(json_object_get(row, e->reward_key), "ground_truth") && !needs_no_scorer(e, row))
        FAIL(ERR_INPUT, "%s row %zu: column '%s' has no ground_truth", e->path, i + 1, e->reward_key);
    if (n_responses(list) == 0) FAIL(ERR_INPUT, "%s row %zu: column '%s' has no responses", e->path, i + 1, e->response_key);
    for (size_t k = 0; k < n_responses(list); k++)
        if (!json_is_string(response(list, k))) FAIL(ERR_INPUT, "%s row %zu: response %zu is not text", e->path, i + 1, k + 1);
    return 0;
}

static int read_rows(struct eval *e) {
    const char *const required[] = {e->response_key, e->source_key, NULL};
    json_t *row;
    size_t i;
    TRY(data_read_rows(&e->rows, e->path, required));
    if (json_array_size(e->rows) == 0) FAIL(ERR_INPUT, "%s has no rows", e->path);
    json_array_foreach(e->rows, i, row) {
        TRY(take_episodes(e, row, i));
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
        if (!needs_no_scorer(e, row)) TRY(reward_check_sources(e->reward, &source, 1));
    }
    return 0;
}

/* ---- scores ---- */

static void say_progress(struct eval *e) {
    if (clock_now() < e->say_at || e->n_done == e->n) return;
    log_info("%lld of %lld responses scored", (long long)e->n_done, (long long)e->n);
    e->say_at = clock_now() + SAY_S;
}

/* Takes over what r owns. */
static void take_one(struct eval *e, int64_t tag, struct reward_result *r) {
    struct val_row *v = &e->v[tag];
    if (r->status == REWARD_SCORE) {
        v->reward = r->score;
        v->extra = r->extra ? json_incref(r->extra) : json_object();
    } else {
        v->data_source = NULL;
        if (e->n_failed++ == 0) e->first_failure = xasprintf("%s: %s", reward_status_name(r->status), r->message ? r->message : "");
    }
    reward_result_free(r);
    e->n_done++;
    say_progress(e);
}

static int take(struct eval *e, double wait_s) {
    int64_t tag;
    struct reward_result r;
    int got;
    while ((got = reward_poll(e->reward, wait_s, &tag, &r)) > 0) take_one(e, tag, &r);
    return got;
}

/* What an episode says of its score itself; false: the scorer says it. */
static bool score_of(const struct episode *x, struct reward_result *r) {
    if (x->failure) {
        *r = (struct reward_result){.status = REWARD_CRASH, .message = xstrdup(x->failure)};
        return true;
    }
    if (!x->has_score) return false;
    *r =
        (struct reward_result){.status = REWARD_SCORE, .score = x->score, .extra = json_incref((json_t *)(uintptr_t)x->score_info)};
    reward_check_score(r);
    return true;
}

/* Response k of a row, to its score. */
static int submit(struct eval *e, const json_t *row, size_t k, int64_t tag) {
    const json_t *text = response(json_object_get(row, e->response_key), k), *given = json_object_get(row, "extra_info");
    const json_t *record = json_array_get(episodes_of(e, row), k);
    struct reward_result r;
    struct episode x;
    json_t *extra = json_is_object(given) ? json_incref((json_t *)(uintptr_t)given) : NULL;
    if (record) {
        TRY(episode_read(&x, record));
        if (score_of(&x, &r)) {
            json_decref(extra);
            take_one(e, tag, &r);
            return 0;
        }
        json_t *own = extra ? json_copy(extra) : json_object();
        json_decref(extra);
        extra = own;
        json_object_update(extra, (json_t *)(uintptr_t)x.extra_info);
    }
    const struct reward_request q = {
        .data_source = json_string_value(json_object_get(row, e->source_key)),
        .solution = json_string_value(text),
        .n_solution = json_string_length(text),
        .ground_truth = json_object_get(json_object_get(row, e->reward_key), "ground_truth"),
        .extra_info = extra,
    };
    const int rc = reward_submit(e->reward, &q, tag);
    json_decref(extra);
    return rc;
}

static int score_all(struct eval *e) {
    const json_t *row;
    size_t i;
    int64_t tag = 0;
    e->say_at = clock_now() + FIRST_S;
    json_array_foreach(e->rows, i, row) {
        const char *source = json_string_value(json_object_get(row, e->source_key));
        for (size_t k = 0; k < n_responses(json_object_get(row, e->response_key)); k++, tag++) {
            e->v[tag] = (struct val_row){.data_source = source, .uid = (int64_t)i};
            TRY(submit(e, row, k, tag));
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

/* How the episodes went, as training says it. */
static int episode_metrics(const struct eval *e, struct metrics *m) {
    const json_t *row;
    struct batch b;
    struct batch_col *c;
    size_t i, k;
    int64_t at = 0;
    if (e->turns.n == 0) return 0;
    metrics_set_i64(m, e->turns.min, "val-aux/num_turns/min");
    metrics_set_i64(m, e->turns.max, "val-aux/num_turns/max");
    metrics_set(m, (double)e->turns.sum / (double)e->turns.n, "val-aux/num_turns/mean");
    batch_init(&b, e->turns.n);
    const int rc = batch_add(&b, BATCH_EPISODE, BATCH_JSON, NULL, NULL, &c);
    if (rc == 0) {
        json_array_foreach(e->rows, i, row) {
            const json_t *episodes = episodes_of(e, row);
            for (k = 0; k < json_array_size(episodes); k++, at++) {
                json_decref(c->json[at]);
                c->json[at] = json_incref(json_array_get(episodes, k));
            }
        }
        ppo_episode_metrics(m, &b);
    }
    batch_free(&b);
    return rc;
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
    if (rc == 0) rc = episode_metrics(e, &m);
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
