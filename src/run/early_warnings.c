/* early_warnings.c - see early_warnings.h. */
#include "run/early_warnings.h"

#include "base/err.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static const struct early_warning rows[] = {
#define WARNING(name, metric, kind, limit, over, least, steps, gain, unless, what, reason, helps) \
    {name, metric, EARLY_##kind, limit, over, least, steps, gain, unless, what, reason, helps},
#include "run/early_warning_rules.def"
#undef WARNING
};
enum { N_ROWS = sizeof rows / sizeof *rows, SCORES = sizeof((struct early_score *)0)->last / sizeof(double) };
_Static_assert(sizeof rows / sizeof *rows <= EARLY_MAX, "EARLY_MAX");

const struct early_warning *early_warning_rows(size_t *n) {
    *n = N_ROWS;
    return rows;
}

const struct early_warning *early_warning_of(const char *name) {
    for (int i = 0; i < N_ROWS; i++)
        if (strcmp(rows[i].name, name) == 0) return &rows[i];
    return NULL;
}

void early_warning_when(const struct early_warning *w, struct buf *b) {
    const char *m = w->metric;
    switch (w->kind) {
    case EARLY_ABOVE: buf_addf(b, "%s above %g", m, w->limit); break;
    case EARLY_ABOVE_ABS: buf_addf(b, "%s beyond %g or -%g", m, w->limit, w->limit); break;
    case EARLY_SHARE: buf_addf(b, "%s above %g %% of the step's samples", m, 100 * w->limit); break;
    case EARLY_SAME: buf_addf(b, "%s/max equal to %s/min", m, m); break;
    case EARLY_FALL:
        buf_addf(b, "%s below %g of its first %d steps (if that was at least %g)", m, w->limit, EARLY_FIRST, w->least);
        break;
    case EARLY_JUMP:
        buf_addf(b, "%s above %g x the median of the %d steps before, and above %g", m, w->limit, EARLY_WINDOW, w->least);
        break;
    case EARLY_RISE: buf_addf(b, "%s above %g x its least value", m, w->limit); break;
    }
    buf_addf(b, ", %d %s in a row", w->steps, w->kind == EARLY_RISE ? "validations" : "steps");
    if (w->gain > 0) buf_addf(b, "; not where the mean score has risen by %g of the scores' range", w->gain);
}

/* ---- the score: whether the run learns ---- */

static double mean(const double *x, int64_t n) {
    double sum = 0;
    for (int64_t i = 0; i < n; i++) sum += x[i];
    return n > 0 ? sum / (double)n : 0;
}

static void take_score(struct early_score *s, const struct metrics *m) {
    double x, low, high;
    if (!metrics_get(m, "critic/score/mean", &x) || !metrics_get(m, "critic/score/min", &low) ||
        !metrics_get(m, "critic/score/max", &high))
        return;
    s->low = s->seen == 0 || low < s->low ? low : s->low;
    s->high = s->seen == 0 || high > s->high ? high : s->high;
    if (s->seen < EARLY_FIRST) s->first += x / EARLY_FIRST;
    s->last[s->seen++ % SCORES] = x;
}

/* Share of the range of all scores by which their mean has risen since the first steps. */
static double gain(const struct early_score *s) {
    if (s->seen < EARLY_FIRST || s->high <= s->low) return 0;
    return (mean(s->last, s->seen < SCORES ? s->seen : SCORES) - s->first) / (s->high - s->low);
}

/* ---- a condition ---- */

static int by_size(const void *a, const void *b) {
    const double x = *(const double *)a, y = *(const double *)b;
    return (x > y) - (x < y);
}

/* Of the last values, before the one of this step. */
static double median(const struct early_watch *h) {
    double v[EARLY_WINDOW];
    const int64_t n = h->seen < EARLY_WINDOW ? h->seen : EARLY_WINDOW;
    memcpy(v, h->last, (size_t)n * sizeof *v);
    qsort(v, (size_t)n, sizeof *v, by_size);
    return n % 2 ? v[n / 2] : (v[n / 2 - 1] + v[n / 2]) / 2;
}

/* What the limits are compared with: the metric, or its ratio to what it was. False: there is nothing to compare it with. */
static bool measure(const struct early_warnings *e, const struct early_warning *w, const struct early_watch *h, double x,
                    double *value) {
    double base = 1;
    switch (w->kind) {
    case EARLY_ABOVE: break;
    case EARLY_ABOVE_ABS: x = fabs(x); break;
    case EARLY_SHARE: base = (double)e->samples; break;
    case EARLY_SAME: break;
    case EARLY_FALL:
        base = h->seen >= EARLY_FIRST ? h->first / EARLY_FIRST : 0;
        if (base < w->least) return false;
        break;
    case EARLY_JUMP:
        if (h->seen < EARLY_WINDOW / 2) return false;
        base = fmax(median(h), w->least / w->limit);
        break;
    case EARLY_RISE: base = h->seen > 0 ? h->lowest : 0; break;
    }
    *value = x / base;
    return base > 0;
}

static bool metric_of(const struct early_warning *w, const struct metrics *m, double *x) {
    char name[128];
    double low;
    if (w->kind != EARLY_SAME) return metrics_get(m, w->metric, x);
    snprintf(name, sizeof name, "%s/min", w->metric);
    if (!metrics_get(m, name, &low)) return false;
    snprintf(name, sizeof name, "%s/max", w->metric);
    if (!metrics_get(m, name, x)) return false;
    *x -= low;
    return true;
}

static void remember(struct early_watch *h, double x) {
    if (h->seen < EARLY_FIRST) h->first += x;
    h->lowest = h->seen == 0 || x < h->lowest ? x : h->lowest;
    h->last[h->seen++ % EARLY_WINDOW] = x;
}

static bool holds(const struct early_warning *w, double value) {
    if (w->kind == EARLY_SAME) return value <= w->limit;
    return w->kind == EARLY_FALL ? value < w->limit : value > w->limit;
}

static bool cleared(const struct early_warning *w, double value) {
    if (w->kind == EARLY_SAME) return value > w->over;
    return w->kind == EARLY_FALL ? value >= w->over : value <= w->over;
}

static bool covered(const struct early_warnings *e, const struct early_warning *w) {
    for (int i = 0; i < N_ROWS && w->unless[0]; i++)
        if (strcmp(rows[i].name, w->unless) == 0 && e->watch[i].active) return true;
    return false;
}

static char *line_of(const struct early_warnings *e, const struct early_warning *w, double x, double value) {
    const double latest = e->score.seen > 0 ? e->score.last[(e->score.seen - 1) % SCORES] : NAN;
    struct buf b = {0};
    buf_addf(&b, "%s: %s (", w->name, w->what);
    switch (w->kind) {
    case EARLY_SAME: buf_addf(&b, "all are %.3g", latest); break;
    case EARLY_SHARE: buf_addf(&b, "%s %.0f of %lld", w->metric, x, (long long)e->samples); break;
    case EARLY_FALL: buf_addf(&b, "%s %.3g, %.2g of what it was", w->metric, x, value); break;
    case EARLY_JUMP: buf_addf(&b, "%s %.3g, %.3g times the median before", w->metric, x, value); break;
    case EARLY_RISE: buf_addf(&b, "%s %.3g, %.3g times the best", w->metric, x, value); break;
    case EARLY_ABOVE:
    case EARLY_ABOVE_ABS: buf_addf(&b, "%s %.3g, limit %g", w->metric, x, w->limit); break;
    }
    buf_addf(&b, ", %d %s in a row", w->steps, w->kind == EARLY_RISE ? "validations" : "steps");
    if (w->gain > 0 && w->kind != EARLY_SAME && !isnan(latest)) buf_addf(&b, "; mean score %.3g", latest);
    buf_addf(&b, "). What usually helps: %s", w->helps);
    return buf_take(&b);
}

void early_warnings_add(struct early_warnings *e, const struct metrics *m,
                        void (*say)(void *arg, const struct early_warning *w, const char *line), void *arg) {
    take_score(&e->score, m);
    for (int i = 0; i < N_ROWS; i++) {
        const struct early_warning *w = &rows[i];
        struct early_watch *h = &e->watch[i];
        double x, value;
        if (strcmp(w->metric, "train/zero_variance_groups") == 0 && e->n < 2) continue; /* each sample is a group */
        if (!metric_of(w, m, &x) || !isfinite(x)) continue;
        const bool known = measure(e, w, h, x, &value), quiet = w->gain > 0 && gain(&e->score) >= w->gain;
        remember(h, x);
        if (!known) continue;
        h->held = holds(w, value) && !quiet ? h->held + 1 : 0;
        h->cleared = cleared(w, value) || quiet ? h->cleared + 1 : 0;
        if (h->cleared >= EARLY_OVER_STEPS) h->active = false;
        if (h->held < w->steps || h->active || covered(e, w)) continue;
        h->active = true;
        char *line = line_of(e, w, x, value);
        say(arg, w, line);
        free(line);
    }
}
