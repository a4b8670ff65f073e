/* test_run_early_warnings.c - what is said of crafted histories, once when it begins and again only after it has gone; and
 * what is said of the metrics that real runs left: nothing of those that learn (tests/fixtures/train/run_metrics.json: GRPO
 * and SFT runs of the tests, the tutorial and the demo, three digits; `warns` of one whose prompts were too hard). */
#include "run/early_warnings.h"
#include "run/unusual_settings.h"

#include <jansson.h>
#include <math.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <cmocka.h>

enum { MAX_SAID = 64 };
struct said {
    int64_t step, at[MAX_SAID];
    const struct early_warning *row[MAX_SAID];
    char line[MAX_SAID][1024];
    int n;
};
static void say(void *arg, const struct early_warning *w, const char *line) {
    struct said *s = arg;
    assert_true(s->n < MAX_SAID);
    assert_null(strchr(line, '\n'));
    s->at[s->n] = s->step;
    s->row[s->n] = w;
    snprintf(s->line[s->n++], sizeof s->line[0], "%s", line);
}

struct watched {
    struct early_warnings e;
    struct said said;
};
/* One more step of these metrics: name, value, ..., NULL. */
static void step(struct watched *w, ...) {
    struct metrics m = {0};
    va_list ap;
    va_start(ap, w);
    for (const char *name; (name = va_arg(ap, const char *));) metrics_set(&m, va_arg(ap, double), "%s", name);
    va_end(ap);
    w->said.step++;
    early_warnings_add(&w->e, &m, say, &w->said);
    metrics_free(&m);
}
static struct watched start(void) { return (struct watched){.e = {.samples = 64, .n = 8}}; }
static void one(struct watched *w, const char *metric, double x, int times) {
    for (int i = 0; i < times; i++) step(w, metric, x, NULL);
}
/* Exactly these were said, at these steps: step, name, ..., 0. */
static void expect(const struct watched *w, ...) {
    va_list ap;
    int n = 0;
    va_start(ap, w);
    for (int at; (at = va_arg(ap, int)); n++) {
        const char *name = va_arg(ap, const char *);
        assert_true(n < w->said.n);
        assert_string_equal(w->said.row[n]->name, name);
        assert_int_equal(w->said.at[n], at);
    }
    va_end(ap);
    assert_int_equal(w->said.n, n);
}

/* Every condition that the table has is reached by a history of its own. */
static void each_is_said(void **state) {
    (void)state;
    size_t n;
    const struct early_warning *rows = early_warning_rows(&n);
    for (size_t i = 0; i < n; i++) {
        const struct early_warning *r = &rows[i];
        struct watched w = start();
        char high[128], low[128];
        snprintf(high, sizeof high, "%s/max", r->metric);
        snprintf(low, sizeof low, "%s/min", r->metric);
        const double usual = r->kind == EARLY_FALL   ? 2 * r->least + 1
                             : r->kind == EARLY_JUMP ? 2 * r->least
                             : r->kind == EARLY_RISE ? 1
                                                     : 0;
        const double bad = r->kind == EARLY_FALL    ? usual * r->limit / 2
                           : r->kind == EARLY_JUMP  ? usual * r->limit * 2
                           : r->kind == EARLY_SHARE ? 64 * r->limit * 2
                           : r->kind == EARLY_RISE  ? r->limit * 1.1
                                                    : r->limit + (1 - r->limit) / 2;
        for (int k = 0; k < 12; k++) {
            if (r->kind == EARLY_SAME) step(&w, high, 1.0, low, 0.0, NULL);
            else one(&w, r->metric, usual, 1);
        }
        assert_int_equal(w.said.n, 0);
        for (int k = 0; k < r->steps; k++) {
            assert_int_equal(w.said.n, 0); /* not before so many in a row */
            if (r->kind == EARLY_SAME) step(&w, high, 1.0, low, 1.0, NULL);
            else one(&w, r->metric, bad, 1);
        }
        expect(&w, 12 + r->steps, r->name, 0);
        assert_non_null(strstr(w.said.line[0], r->what));
        assert_non_null(strstr(w.said.line[0], r->helps));
        assert_ptr_equal(early_warning_of(r->name), r);
    }
}

static void once_until_it_has_gone(void **state) {
    (void)state;
    struct watched w = start();
    one(&w, "train/zero_variance_groups", 0.9, 40);  /* said at 3, and not again */
    one(&w, "train/zero_variance_groups", 0.75, 40); /* below the limit, not gone */
    one(&w, "train/zero_variance_groups", 0.9, 10);
    expect(&w, 3, "zero_variance_groups", 0);
    one(&w, "train/zero_variance_groups", 0.2, EARLY_OVER_STEPS - 1); /* gone, but not for long */
    one(&w, "train/zero_variance_groups", 0.9, 10);
    expect(&w, 3, "zero_variance_groups", 0);
    one(&w, "train/zero_variance_groups", 0.2, EARLY_OVER_STEPS);
    one(&w, "train/zero_variance_groups", 0.9, 10);
    expect(&w, 3, "zero_variance_groups", 90 + 9 + 10 + 10 + 3, "zero_variance_groups", 0);
}

static void flicker_is_quiet(void **state) {
    (void)state;
    struct watched w = start();
    for (int i = 0; i < 100; i++) one(&w, "train/zero_variance_groups", i % 3 ? 0.9 : 0.5, 1); /* never three in a row */
    for (int i = 0; i < 100; i++) one(&w, "actor/grad_norm", i % 10 ? 0.5 : 20, 1);            /* single spikes */
    one(&w, "actor/pg_clipfrac", NAN, 20);
    expect(&w, 0);
}

/* A group of one sample is no group; a share needs the number of samples. */
static void what_cannot_be_judged(void **state) {
    (void)state;
    struct watched w = start();
    w.e.n = 1;
    w.e.samples = 0;
    one(&w, "train/zero_variance_groups", 1, 20);
    one(&w, "reward/num_errors", 50, 20);
    one(&w, "actor/entropy", 0.01, 3); /* was never high */
    one(&w, "actor/entropy", 0.0001, 20);
    expect(&w, 0);
}

static void score_step(struct watched *w, const char *metric, double x, double score) {
    step(w, metric, x, "critic/score/mean", score, "critic/score/min", 0.0, "critic/score/max", 1.0, NULL);
}

/* The same fall of entropy: a policy that has learned is sure, one that has not has collapsed. */
static void learning_is_no_collapse(void **state) {
    (void)state;
    struct watched learns = start(), collapses = start();
    for (int i = 0; i < 40; i++) {
        const double entropy = 2 * exp(-i / 6.0), done = i / 39.0;
        score_step(&learns, "actor/entropy", entropy, 0.1 + 0.9 * fmin(1, 3 * done));
        score_step(&collapses, "actor/entropy", entropy, 0.1 + 0.1 * done);
    }
    expect(&learns, 0);
    assert_int_equal(collapses.said.n, 1);
    assert_string_equal(collapses.said.row[0]->name, "entropy_collapse");
    assert_non_null(strstr(collapses.said.line[0], "mean score 0.1"));
}

/* One line where two rows say the same. */
static void the_more_precise_speaks(void **state) {
    (void)state;
    struct watched w = start();
    for (int i = 0; i < 20; i++)
        step(&w, "train/zero_variance_groups", 1.0, "critic/score/mean", 0.0, "critic/score/min", 0.0, "critic/score/max", 0.0,
             NULL);
    expect(&w, 3, "reward_constant", 0);
    assert_non_null(strstr(w.said.line[0], "all are 0"));
    for (int i = 0; i < 20; i++) /* one sample has a score now, the groups are as flat as before */
        step(&w, "train/zero_variance_groups", 0.97, "critic/score/mean", 0.02, "critic/score/min", 0.0, "critic/score/max", 1.0,
             NULL);
    expect(&w, 3, "reward_constant", 20 + EARLY_OVER_STEPS, "zero_variance_groups", 0);
}

static void real_runs(void **state) {
    (void)state;
    size_t i;
    json_t *run, *runs = json_load_file(FIXTURES "/train/run_metrics.json", 0, NULL);
    assert_true(json_array_size(runs) >= 5);
    json_array_foreach(runs, i, run) {
        struct watched w = start();
        const char *name;
        json_t *values, *all = json_object_get(run, "metrics");
        size_t steps = json_array_size(json_object_iter_value(json_object_iter(all)));
        w.e.samples = json_integer_value(json_object_get(run, "samples"));
        w.e.n = json_integer_value(json_object_get(run, "n"));
        assert_true(steps >= 20);
        for (size_t k = 0; k < steps; k++) {
            struct metrics m = {0};
            json_object_foreach(all, name, values) {
                const json_t *x = json_array_get(values, k);
                if (json_is_number(x)) metrics_set(&m, json_number_value(x), "%s", name);
            }
            w.said.step++;
            early_warnings_add(&w.e, &m, say, &w.said);
            metrics_free(&m);
        }
        const json_t *warns = json_object_get(run, "warns");
        for (int k = 0; k < w.said.n; k++)
            print_message("%s, step %d: %s\n", json_string_value(json_object_get(run, "run")), (int)w.said.at[k], w.said.line[k]);
        assert_int_equal(w.said.n, json_array_size(warns));
        for (int k = 0; k < w.said.n; k++) {
            assert_string_equal(w.said.row[k]->name, json_string_value(json_array_get(json_array_get(warns, (size_t)k), 0)));
            assert_int_equal(w.said.at[k], json_integer_value(json_array_get(json_array_get(warns, (size_t)k), 1)));
        }
    }
    json_decref(runs);
}

/* ---- unusual values ---- */

/* A row is of a key that some program has, inside the bounds of its table: else it could never be said. */
static void unusual_rows(void **state) {
    (void)state;
    size_t n;
    FILE *const nowhere = fopen("/dev/null", "w");
    const struct unusual_setting *rows = unusual_setting_rows(&n);
    for (size_t i = 0; i < n; i++) {
        bool known = false;
        assert_true(rows[i].least < rows[i].most && strlen(rows[i].text) > 10);
        for (const char *const *s = conf_schemas(); *s; s++) {
            struct conf *c = NULL;
            const json_t *v;
            assert_int_equal(conf_load(&c, *s, 0, NULL), 0);
            if (!conf_is_null(c, rows[i].key) && conf_json(c, rows[i].key, &v) == 0 && json_is_number(v)) {
                const double x = json_number_value(v);
                known = true;
                if (!(x >= rows[i].least && x <= rows[i].most) && !(x <= rows[i].off)) fail_msg("%s: default %g", rows[i].key, x);
            }
            char *prefix = xstrdup(rows[i].key);
            known |= conf_help(nowhere, *s, prefix) == 0;
            free(prefix);
            conf_free(c);
        }
        if (!known) fail_msg("%s is no key", rows[i].key);
    }
    fclose(nowhere);
}

static void add_line(void *arg, const char *line) { assert_int_equal(buf_addf(arg, "%.*s|", (int)strcspn(line, "("), line), 0); }

static void unusual_found(void **state) {
    (void)state;
    struct conf *c = NULL;
    struct buf said = {0};
    char *argv[] = {"actor_rollout_ref.actor.optim.lr=0.2",         "actor_rollout_ref.actor.kl_loss_coef=-1",
                    "actor_rollout_ref.actor.optim.betas=[1e-3,0]", "actor_rollout_ref.rollout.top_k=1",
                    "actor_rollout_ref.rollout.temperature=2",      "algorithm.rollout_correction.rollout_is_threshold='1_2'",
                    "actor_rollout_ref.actor.grad_clip=inf"};
    assert_int_equal(conf_load(&c, "ppo_trainer", sizeof argv / sizeof *argv, argv), 0);
    unusual_settings_find(c, add_line, &said);
    assert_string_equal(said.p, "unusual_setting: actor_rollout_ref.actor.optim.lr=0.2 |"
                                "unusual_setting: actor_rollout_ref.actor.optim.betas.1=0 |"
                                "unusual_setting: actor_rollout_ref.actor.kl_loss_coef=-1 |"
                                "unusual_setting: actor_rollout_ref.rollout.top_k=1 |");
    buf_free(&said);
    conf_free(c);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(each_is_said),
        cmocka_unit_test(once_until_it_has_gone),
        cmocka_unit_test(flicker_is_quiet),
        cmocka_unit_test(what_cannot_be_judged),
        cmocka_unit_test(learning_is_no_collapse),
        cmocka_unit_test(the_more_precise_speaks),
        cmocka_unit_test(real_runs),
        cmocka_unit_test(unusual_rows),
        cmocka_unit_test(unusual_found),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
