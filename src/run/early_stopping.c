/* early_stopping.c - see early_stopping.h.  verl has none; metric, mode, patience, min_delta and
 * stopping_threshold mean what they mean in Keras and Lightning.
 * Invariant: the state is a function of the validations seen, so a resumed run stops
 * where an unbroken one does. */
#include "run/early_stopping.h"

#include "base/buf.h"
#include "base/err.h"
#include "base/file.h"
#include "base/json.h"
#include "base/log.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

/* A loss is better when it is low, everything else when it is high. */
static void watch(struct early_stop *e, const char *metric) {
    e->metric = metric;
    e->maximize = e->mode == STOP_MAX || (e->mode == STOP_BY_METRIC && metric && strstr(metric, "loss") == NULL);
}

int early_stop_read(struct early_stop *e, const struct early_stop_keys *k, const char *default_metric, bool validates) {
    *e = (struct early_stop){.enable = k->enable,
                             .mode = (int)k->mode,
                             .patience = k->patience,
                             .min_delta = k->min_delta,
                             .threshold = k->threshold,
                             .has_threshold = !isnan(k->threshold),
                             .best_step = -1};
    if (!e->enable) return 0;
    if (!validates) FAIL(ERR_INVAL, "trainer.early_stopping.enable needs validations: set data.val_files and trainer.test_freq");
    watch(e, k->metric ? k->metric : default_metric);
    return 0;
}

void early_stop_free(struct early_stop *e) { free(e->chosen); }

static void choose(struct early_stop *e, const char *metric) {
    free(e->chosen);
    e->chosen = xstrdup(metric);
    watch(e, e->chosen);
}

/* ---- names ---- */

enum { SOME = 8 }; /* names in a message */

/* The rest of name behind "val-core/SOURCE/"; NULL: it is of no such source. */
static const char *behind_source(const char *name, const char *const *sources, int64_t n_sources) {
    for (int64_t i = 0; i < n_sources; i++) {
        const size_t k = strlen(sources[i]);
        if (strncmp(name, sources[i], k) == 0 && name[k] == '/') return name + k + 1;
    }
    return NULL;
}

int early_stop_expect(const struct early_stop *e, const char *const *sources, int64_t n_sources, int64_t n) {
    static const char core[] = "val-core/";
    struct buf names = {0};
    if (!e->enable || (e->metric && strncmp(e->metric, core, sizeof core - 1) != 0) || (!e->metric && n_sources == 1)) return 0;
    const char *rest = e->metric ? behind_source(e->metric + sizeof core - 1, sources, n_sources) : NULL;
    const char *of = rest ? strrchr(rest, '@') : NULL;
    if (of && atoll(of + 1) == n) return 0;
    for (int64_t i = 0; i < n_sources && i < SOME; i++)
        buf_addf(&names, "%s%s%s/acc/mean@%lld", i ? ", " : "", core, sources[i], (long long)n);
    const int rc = err_set(ERR_INVAL, __FILE__, __LINE__,
                           "trainer.early_stopping.metric%s%s; take %s%s (reward in place of acc where the scorer returns a dict "
                           "without acc)",
                           e->metric ? "=" : " is not set", e->metric ? e->metric : "",
                           e->metric ? "the validation will have no such metric: " : "one of ", names.p);
    buf_free(&names);
    return rc;
}

static bool is_core_mean(const char *name) { return strncmp(name, "val-core/", 9) == 0 && strstr(name, "/mean@"); }

/* Names of validation metrics for the message: the means, where there are any. */
static char *some_names(const struct metrics *m) {
    struct buf b = {0};
    int n = 0;
    for (int pass = 0; pass < 2 && n == 0; pass++)
        for (int64_t i = 0; i < m->n && n < SOME; i++) {
            const char *name = m->items[i].name;
            if (pass == 0 ? is_core_mean(name) : strncmp(name, "val", 3) == 0) buf_addf(&b, "%s%s", n++ ? ", " : "", name);
        }
    return n ? buf_take(&b) : xstrdup("none");
}

int early_stop_find(struct early_stop *e, const struct metrics *m) {
    const char *only = NULL;
    int64_t n = 0;
    double v;
    if (!e->enable || (e->metric && metrics_get(m, e->metric, &v))) return 0;
    for (int64_t i = 0; i < m->n && !e->metric; i++)
        if (is_core_mean(m->items[i].name) && n++ == 0) only = m->items[i].name;
    if (n == 1) {
        choose(e, only);
        log_info("trainer.early_stopping.metric is not set: it is %s, the one mean among val-core", e->metric);
        return 0;
    }
    char *names = some_names(m);
    const int rc =
        err_set(ERR_INVAL, __FILE__, __LINE__, "trainer.early_stopping.metric%s%s%s; this validation has %s",
                e->metric ? "=" : " is not set", e->metric ? e->metric : "", e->metric ? ": there is no such metric" : "", names);
    free(names);
    return rc;
}

/* v is as good as the threshold asks; false for NaN. */
static bool good_enough(const struct early_stop *e, double v) {
    return e->has_threshold && (e->maximize ? v >= e->threshold : v <= e->threshold);
}

int early_stop_look(struct early_stop *e, const struct metrics *m, int64_t step) {
    double v = NAN;
    if (!e->enable) return 0;
    TRY(early_stop_find(e, m));
    metrics_get(m, e->metric, &v);
    const double gain = e->maximize ? v - e->best : e->best - v;
    /* past the threshold is a new best, however small the gain */
    if (isfinite(v) && (e->best_step < 0 || gain > e->min_delta || (good_enough(e, v) && !good_enough(e, e->best)))) {
        e->best = v;
        e->best_step = step;
        e->waited = 0;
        return 1;
    }
    e->waited++;
    return 0;
}

static bool arrived(const struct early_stop *e) { return e->best_step >= 0 && good_enough(e, e->best); }

bool early_stop_done(const struct early_stop *e) { return e->enable && (e->waited >= e->patience || arrived(e)); }

void early_stop_say(const struct early_stop *e, int64_t step) {
    if (!early_stop_done(e)) return;
    if (arrived(e)) log_info("stopped early after step %lld: %s has reached %g", (long long)step, e->metric, e->threshold);
    else
        log_info("stopped early after step %lld: %s has not improved for %lld validations", (long long)step, e->metric,
                 (long long)e->waited);
}

json_t *early_stop_state(const struct early_stop *e) {
    if (!e->enable || !e->metric) return json_null();
    return json_pack("{s:s, s:s, s:f, s:I, s:I}", "metric", e->metric, "mode", e->maximize ? "max" : "min", "best", e->best,
                     "best_step", (json_int_t)e->best_step, "waited", (json_int_t)e->waited);
}

int early_stop_restore(struct early_stop *e, const json_t *state, const char *where) {
    const char *metric, *mode;
    if (!e->enable || !json_is_object(state)) return 0;
    TRY(json_str(state, "metric", &metric, where));
    TRY(json_str(state, "mode", &mode, where));
    if (!e->metric) choose(e, metric);
    if (strcmp(metric, e->metric) != 0 || (strcmp(mode, "max") == 0) != e->maximize) {
        log_note("early stopping looks at %s (%s) now, before at %s (%s): the best so far is reset", e->metric,
                 e->maximize ? "max" : "min", metric, mode);
        return 0;
    }
    TRY(json_f64(state, "best", &e->best, where));
    TRY(json_i64(state, "best_step", &e->best_step, where));
    return json_i64(state, "waited", &e->waited, where);
}

int early_stop_publish(const struct early_stop *e, const char *root) {
    if (!e->enable || e->best_step < 0) return 0;
    char *name = xasprintf("global_step_%lld", (long long)e->best_step), *path = file_join(root, "best_checkpoint.json");
    json_t *o = json_pack("{s:I, s:s, s:s, s:f, s:s}", "step", (json_int_t)e->best_step, "metric", e->metric, "mode",
                          e->maximize ? "max" : "min", "value", e->best, "checkpoint", name);
    CHECK(o);
    const int rc = json_save_atomic(path, o);
    json_decref(o);
    free(path);
    free(name);
    return rc;
}

void early_stop_report(const struct early_stop *e, const char *root, const char *part) {
    if (!e->enable || e->best_step < 0) return;
    log_info("best: %s %g at step %lld; its model is in %s/global_step_%lld/%s", e->metric, e->best, (long long)e->best_step, root,
             (long long)e->best_step, part);
}
