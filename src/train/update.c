/* update.c - see update.h. */
#include "train/update.h"

#include "train/perf_metrics.h"

#include "base/buf.h"
#include "base/clock.h"
#include "base/err.h"
#include "base/rng.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

/* ---- metrics ---- */

void update_metric_add(struct update_metrics *m, const char *name, enum reduce how, double value) {
    int64_t i = 0;
    while (i < m->n && strcmp(m->v[i].name, name) != 0) i++;
    if (i == m->n) {
        xgrow((void **)&m->v, &m->cap, m->n + 1, sizeof *m->v);
        m->v[m->n++] = (struct update_metric){.how = how};
        snprintf(m->v[i].name, sizeof m->v[i].name, "%s", name);
    }
    struct update_metric *x = &m->v[i];
    if (how == REDUCE_MEAN || how == REDUCE_SUM) {
        x->mini += value;
        x->n_mini++;
        return;
    }
    if (how == REDUCE_FLAT) x->sum += value;
    else if (x->n == 0 || (how == REDUCE_MIN ? value < x->sum : value > x->sum)) x->sum = value;
    x->n++;
}

/* The end of a mini-batch. */
static void close_mini(struct update_metrics *m) {
    for (int64_t i = 0; i < m->n; i++) {
        struct update_metric *x = &m->v[i];
        if (x->n_mini == 0) continue;
        x->sum += x->how == REDUCE_MEAN ? x->mini / (double)x->n_mini : x->mini;
        x->n++;
        x->mini = 0;
        x->n_mini = 0;
    }
}

void update_metrics_set(struct update_metrics *m, struct metrics *out) {
    for (int64_t i = 0; i < m->n; i++) {
        const struct update_metric *x = &m->v[i];
        const bool extreme = x->how == REDUCE_MIN || x->how == REDUCE_MAX;
        if (x->n > 0) metrics_set(out, extreme ? x->sum : x->sum / (double)x->n, "%s", x->name);
    }
    free(m->v);
    *m = (struct update_metrics){0};
}

/* ---- the stage ---- */

static void epoch_order(const struct update *u, int64_t epoch, int64_t *order) {
    for (int64_t i = 0; i < u->n; i++) order[i] = i;
    if (!u->shuffle) return;
    struct rng r = {.seed = u->seed, .stream = RNG_MINIBATCH, .n = (uint64_t)(u->step * 1000 + epoch) << 24};
    rng_shuffle(&r, order, u->n);
}

static void keep_bad(struct update_result *r, const struct optim_result *why, const int64_t *rows, int64_t n) {
    r->why = *why;
    r->bad_rows = xmalloc((size_t)n * sizeof *rows);
    r->n_bad = n;
    memcpy(r->bad_rows, rows, (size_t)n * sizeof *rows);
}

static void router_metrics(const struct update *u, const struct router_load *r) {
    const struct {
        const char *name;
        double value;
        bool on;
    } v[] = {{"load_max_over_mean", r->max_over_mean, true},
             {"load_entropy", r->entropy, true},
             {"aux_loss", r->loss, r->balanced},
             {"z_loss", r->z_loss, r->has_z}};
    for (size_t i = 0; i < sizeof v / sizeof *v && u->router && r->layers > 0 && r->rows > 0; i++) {
        char name[112];
        snprintf(name, sizeof name, "%s/%s", u->router, v[i].name);
        if (v[i].on) update_metric_add(u->metrics, name, REDUCE_FLAT, v[i].value);
    }
}

/* One optimizer step over these rows, in the order of balanced micro-batches. */
static int one_step(const struct update *u, int64_t *rows, int64_t n, struct update_result *sum) {
    const double start = clock_now();
    struct mini_batch m = {.temperature = 1};
    struct micro_batch_limits cut = u->cut;
    struct step_result r;
    int64_t *len = xmalloc((size_t)n * sizeof *len);
    for (int64_t i = 0; i < n; i++) len[i] = u->len[rows[i]];
    int rc = micro_batch_order(&cut, len, rows, n);
    if (rc == 0) rc = u->take(u->ctx, rows, n, &m);
    m.cut = cut;
    if (rc == 0) rc = trained_model_step(u->model, &m, u->optim, u->lr, &r);
    if (rc == 0) {
        if (r.mtp.n > 0) update_metric_add(u->metrics, u->mtp_metric, REDUCE_MEAN, -r.mtp.logp / (double)r.mtp.n);
        close_mini(u->metrics);
        router_metrics(u, &r.router);
        sum->n_tokens += r.n_rows;
        sum->bad = !isfinite(r.optim.grad_norm);
        if (sum->bad) keep_bad(sum, &r.optim, rows, n);
    }
    if (rc == 0 && !sum->bad) {
        sum->grad_norm += r.optim.grad_norm;
        sum->flops += train_flops(&trained_model_model(u->model)->cfg, len, n) / (clock_now() - start);
        sum->n_steps++;
    }
    u->drop(u->ctx);
    free(cut.ends);
    free(len);
    return rc;
}

int update_run(const struct update *u, struct update_result *r) {
    CHECK(u->mini_batch > 0);
    int64_t *order = xmalloc((size_t)u->n * sizeof *order);
    int rc = 0;
    *r = (struct update_result){0};
    for (int64_t epoch = 0; epoch < u->epochs && rc == 0 && !r->bad; epoch++) {
        epoch_order(u, epoch, order);
        for (int64_t lo = 0; lo < u->n && rc == 0 && !r->bad; lo += u->mini_batch)
            rc = one_step(u, order + lo, u->n - lo < u->mini_batch ? u->n - lo : u->mini_batch, r);
    }
    free(order);
    TRY(rc);
    if (r->n_steps == 0) return 0;
    r->grad_norm /= (double)r->n_steps;
    r->flops /= (double)r->n_steps;
    return 0;
}
