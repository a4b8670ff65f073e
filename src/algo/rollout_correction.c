/* rollout_correction.c - correction for a rollout policy that is not the training policy:
 * importance weights, rejection of tokens and sequences, and the diagnostics
 * (verl trainer/ppo/rollout_corr_helper.py).
 *
 * Log-ratios are training - rollout, clamped to +-20 before exp.  Weights carry
 * no gradient.  Metric names are verl's, with the prefix rollout_corr/.
 * Invariant: a masked token never counts, in weights, statistics or rejection. */
#include "algo/algo_int.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

/* ---- parsing ---- */

enum scope { TOKEN, SEQ_SUM, SEQ_MEAN, SEQ_MAX };
struct rs_option { /* what is compared with the threshold */
    const char *name;
    enum scope scope;
    int k; /* estimator 1, 2, 3 */
};
static const struct rs_option rs_options[ALGO_RS_MAX] = {
    {"token_k1", TOKEN, 1},       {"token_k2", TOKEN, 2},     {"token_k3", TOKEN, 3},       {"seq_sum_k1", SEQ_SUM, 1},
    {"seq_sum_k2", SEQ_SUM, 2},   {"seq_sum_k3", SEQ_SUM, 3}, {"seq_mean_k1", SEQ_MEAN, 1}, {"seq_mean_k2", SEQ_MEAN, 2},
    {"seq_mean_k3", SEQ_MEAN, 3}, {"seq_max_k2", SEQ_MAX, 2}, {"seq_max_k3", SEQ_MAX, 3},
};

/* The next piece of a comma list without spaces around it; NULL at the end. Caller frees. */
static char *next_item(const char **list) {
    while (**list) {
        const char *p = *list + strspn(*list, " \t"), *end = strchrnul(p, ',');
        *list = *end ? end + 1 : end;
        while (end > p && strchr(" \t", end[-1])) end--;
        if (end > p) return xstrndup(p, (size_t)(end - p));
    }
    return NULL;
}

static int number(const char *key, const char *text, const char *s, size_t n, double *out) {
    char *copy = xstrndup(s, n), *end;
    *out = strtod(copy, &end);
    const bool whole = n > 0 && *end == '\0';
    free(copy);
    if (!whole || !isfinite(*out)) FAIL(ERR_INVAL, "%s: '%s' is not a number", key, text);
    if (*out <= 0) FAIL(ERR_INVAL, "%s: '%s' must be positive", key, text);
    return 0;
}

/* "upper" or "lower_upper"; *lower stays where there is none. */
static int bounds(const char *key, const char *text, double *lower, double *upper) {
    const char *u = strchr(text, '_');
    if (u) {
        TRY(number(key, text, text, (size_t)(u - text), lower));
        TRY(number(key, text, u + 1, strlen(u + 1), upper));
        if (*lower > *upper) FAIL(ERR_INVAL, "%s: in '%s' the lower bound is above the upper one", key, text);
        return 0;
    }
    return number(key, text, text, strlen(text), upper);
}

static int find_rs(const char *name) {
    for (int i = 0; i < ALGO_RS_MAX; i++)
        if (strcmp(name, rs_options[i].name) == 0) return i;
    struct buf known = {0};
    for (int i = 0; i < ALGO_RS_MAX; i++) buf_addf(&known, "%s%s", i ? ", " : "", rs_options[i].name);
    err_set(ERR_INVAL, __FILE__, __LINE__, "rollout_rs '%s' is unknown; use some of %s", name, known.p);
    buf_free(&known);
    return ERR_INVAL;
}

static int parse_options(struct algo_corr *c, const char *options) {
    for (char *item; (item = next_item(&options));) {
        const int k = find_rs(item);
        bool seen = false;
        free(item);
        TRY(k);
        for (int j = 0; j < c->n_rs; j++) seen |= c->rs[j].option == k;
        if (!seen) c->rs[c->n_rs++].option = k;
    }
    if (c->n_rs == 0) FAIL(ERR_INVAL, "rollout_rs names no option");
    return 0;
}

static int parse_threshold(struct algo_rs *rs, const char *t) {
    const bool k1 = rs_options[rs->option].k == 1;
    if (!k1 && strchr(t, '_'))
        FAIL(ERR_INVAL, "rollout_rs_threshold '%s': %s takes one upper bound", t, rs_options[rs->option].name);
    TRY(bounds("rollout_rs_threshold", t, &rs->lower, &rs->upper));
    if (k1 && !strchr(t, '_')) rs->lower = 1 / rs->upper;
    if (rs->lower > rs->upper) FAIL(ERR_INVAL, "rollout_rs_threshold '%s': a single ratio bound must be at least 1", t);
    return 0;
}

static int parse_rs(struct algo_corr *c, const char *options, const char *thresholds) {
    TRY(parse_options(c, options));
    const char *rest = thresholds ? thresholds : "";
    char *text[ALGO_RS_MAX + 1];
    int n = 0, rc = 0;
    while (n <= ALGO_RS_MAX && (text[n] = next_item(&rest))) n++;
    if (n == 0) FAIL(ERR_INVAL, "rollout_rs is set: rollout_rs_threshold is needed too");
    if (n != 1 && n != c->n_rs)
        rc =
            err_set(ERR_INVAL, __FILE__, __LINE__, "rollout_rs_threshold has %d%s values for %d options; give one, or one for each",
                    n, n > ALGO_RS_MAX ? " or more" : "", c->n_rs);
    for (int j = 0; j < c->n_rs && rc == 0; j++) rc = parse_threshold(&c->rs[j], text[n == 1 ? 0 : j]);
    for (int i = 0; i < n; i++) free(text[i]);
    return rc;
}

static bool given(const char *s) { return s && *s && strcmp(s, "null") != 0 && strcmp(s, "None") != 0; }

int algo_corr_parse(struct algo_corr *out, const struct algo_corr_spec *s) {
    struct algo_corr c = {.is_upper = 2, .is_batch_normalize = s->rollout_is_batch_normalize};
    if (given(s->rollout_is)) {
        c.is = strcmp(s->rollout_is, "token") == 0      ? ALGO_IS_TOKEN
               : strcmp(s->rollout_is, "sequence") == 0 ? ALGO_IS_SEQUENCE
                                                        : ALGO_IS_NONE;
        if (c.is == ALGO_IS_NONE) FAIL(ERR_INVAL, "rollout_is '%s' is unknown; use token, sequence or null", s->rollout_is);
    }
    if (c.is != ALGO_IS_NONE && given(s->rollout_is_threshold))
        TRY(bounds("rollout_is_threshold", s->rollout_is_threshold, &c.is_lower, &c.is_upper));
    if (given(s->rollout_rs)) TRY(parse_rs(&c, s->rollout_rs, s->rollout_rs_threshold));
    if (given(s->loss_type)) {
        c.reinforce = strcmp(s->loss_type, "reinforce") == 0;
        if (!c.reinforce && strcmp(s->loss_type, "ppo_clip") != 0)
            FAIL(ERR_INVAL, "rollout_correction.loss_type '%s' is unknown; use ppo_clip or reinforce", s->loss_type);
    }
    *out = c;
    return 0;
}

/* ---- statistics ---- */

static void metric(struct algo_metrics *m, const char *prefix, const char *name, double v) {
    char full[sizeof m->v->name];
    snprintf(full, sizeof full, "rollout_corr/%s%s", prefix, name);
    algo_metrics_set(m, full, v);
}

static double clamp20(double x) { return algo__clamp(x, -ALGO__LOG_CLAMP, ALGO__LOG_CLAMP); }

/* Mean, sample standard deviation (n - 1; 0 below two), extremes of n numbers. */
struct summary {
    double mean, std, max, min;
};
static struct summary summarise(const double *x, int64_t n) {
    if (n == 0) return (struct summary){0};
    struct summary s = {0, 0, x[0], x[0]};
    for (int64_t i = 0; i < n; i++) {
        s.mean += x[i] / (double)n;
        s.max = fmax(s.max, x[i]);
        s.min = fmin(s.min, x[i]);
    }
    for (int64_t i = 0; i < n; i++) s.std += (x[i] - s.mean) * (x[i] - s.mean);
    s.std = n > 1 ? sqrt(s.std / (double)(n - 1)) : 0;
    return s;
}

/* Share of n numbers above hi and below lo. */
static void outside(const double *x, int64_t n, double lo, double hi, double *low, double *high) {
    *low = *high = 0;
    for (int64_t i = 0; i < n; i++) {
        *high += (x[i] > hi) / (double)n;
        *low += (x[i] < lo) / (double)n;
    }
}

/* sqrt(E[c^2] - E[c]^2) over valid tokens, c = x clamped to [lo, hi]; 0 for fewer than two. */
static double clamped_std(const struct algo_ragged *r, const double *x, double lo, double hi) {
    double s1 = 0, s2 = 0;
    ALGO__EACH_VALID(r, i, t) {
        const double c = algo__clamp(x[t], lo, hi);
        s1 += c;
        s2 += c * c;
    }
    const int64_t valid = algo_n_valid(r);
    const double n = (double)valid + ALGO__EPS, var = s2 / n - (s1 / n) * (s1 / n);
    return valid > 1 && var > 0 ? sqrt(var) : 0;
}

/* ---- importance weights ---- */

static void is_metrics(const struct algo_ragged *r, const struct algo_corr *c, const double *log_ratio, const double *raw,
                       const double *w, struct algo_metrics *m) {
    const double hi = c->is_upper, lo = c->is_lower > 0 ? c->is_lower : 1 / hi;
    const double n_valid = (double)algo_n_valid(r) + ALGO__EPS;
    double *row = xcalloc((size_t)r->n + 1, sizeof *row), low, high;
    const char *p = "rollout_is_";
    metric(m, p, "mean", algo_masked_mean(r, w));
    if (c->is == ALGO_IS_SEQUENCE) { /* extremes from the logs: unclamped below, at most e^20 above */
        for (int64_t i = 0; i < r->n; i++) row[i] = algo__row_sum(r, i, log_ratio);
        const struct summary s = summarise(row, r->n);
        metric(m, p, "max", exp(fmin(s.max, ALGO__LOG_CLAMP)));
        metric(m, p, "min", exp(s.min));
        outside(row, r->n, log(lo), log(hi), &low, &high);
    } else {
        double max = -INFINITY, min = INFINITY;
        low = high = 0;
        ALGO__EACH_VALID(r, i, t) {
            max = fmax(max, w[t]);
            min = fmin(min, w[t]);
            high += (raw[t] > hi) / n_valid;
            low += (raw[t] < lo) / n_valid;
        }
        metric(m, p, "max", max);
        metric(m, p, "min", min);
    }
    metric(m, p, "ratio_fraction_high", high);
    metric(m, p, "ratio_fraction_low", low);
    metric(m, p, "std", clamped_std(r, w, 0, hi));
    double s1 = 0, s2 = 0; /* effective sample size: 1 / E[(w / E w)^2] */
    ALGO__EACH_VALID(r, i, t) s1 += algo__clamp(w[t], 0, hi);
    const double mean = s1 / n_valid + ALGO__EPS;
    ALGO__EACH_VALID(r, i, t) {
        const double x = algo__clamp(w[t], 0, hi) / mean;
        s2 += x * x;
    }
    metric(m, p, "eff_sample_size", s2 > 0 ? n_valid / s2 : 0);
    for (int64_t i = 0; i < r->n; i++) row[i] = algo__row_mean(r, i, w);
    const struct summary s = summarise(row, r->n);
    metric(m, p, "seq_mean", s.mean);
    metric(m, p, "seq_std", s.std);
    metric(m, p, "seq_max", s.max);
    metric(m, p, "seq_min", s.min);
    metric(m, p, "seq_max_deviation", fmax(fabs(s.max - 1), fabs(s.min - 1)));
    for (int64_t i = 0; i < r->n; i++) row[i] = algo__row_mean(r, i, raw);
    outside(row, r->n, lo, hi, &low, &high);
    metric(m, p, "seq_fraction_high", high);
    metric(m, p, "seq_fraction_low", low);
    if (c->is_lower > 0) {
        double oob = 0;
        ALGO__EACH_VALID(r, i, t) oob += raw[t] < lo || raw[t] > hi;
        metric(m, p, "oob_ratio", oob / n_valid);
    }
    free(row);
}

/* So that the mean weight is 1: over tokens, or over the sequences with a token. */
static void batch_normalize(const struct algo_ragged *r, const struct algo_corr *c, double *w, struct algo_metrics *m) {
    double mean = algo_masked_mean(r, w);
    if (c->is == ALGO_IS_SEQUENCE) {
        double sum = 0, n = 0;
        for (int64_t i = 0; i < r->n; i++) {
            if (algo__row_valid(r, i) == 0) continue;
            sum += algo__row_mean(r, i, w);
            n++;
        }
        mean = sum / n;
    }
    if (!(mean > 1e-8)) mean = 1;
    ALGO__EACH_VALID(r, i, t) w[t] /= mean;
    metric(m, "", "rollout_is_batch_norm_factor", mean);
}

static void importance(const struct algo_ragged *r, const struct algo_corr *c, const double *log_ratio, double *w,
                       struct algo_metrics *m) {
    double *raw = algo__tokens(r);
    for (int64_t i = 0; i < r->n; i++) {
        const double seq = exp(clamp20(algo__row_sum(r, i, log_ratio)));
        for (int64_t t = r->off[i]; t < r->off[i + 1]; t++) {
            w[t] = 0;
            if (!r->mask[t]) continue;
            raw[t] = c->is == ALGO_IS_SEQUENCE ? seq : exp(clamp20(log_ratio[t]));
            const bool over = raw[t] > c->is_upper, under = raw[t] < c->is_lower;
            if (c->is_lower > 0) /* out of bounds counts as nothing */
                w[t] = over || under ? 0 : raw[t];
            else /* truncated */ w[t] = over ? c->is_upper : raw[t];
        }
    }
    is_metrics(r, c, log_ratio, raw, w, m);
    if (c->is_batch_normalize) batch_normalize(r, c, w, m);
    free(raw);
}

/* ---- rejection ---- */

static double divergence(int k, double log_ratio) {
    const double x = clamp20(log_ratio);
    return k == 1 ? -x : k == 2 ? 0.5 * x * x : exp(x) - 1 - x;
}

/* The statistic of each valid token: its own, or that of its sequence. */
static void rs_statistic(const struct algo_ragged *r, const struct rs_option *o, const double *log_ratio, double *stat,
                         double *row) {
    ALGO__EACH_VALID(r, i, t) stat[t] = divergence(o->k, log_ratio[t]);
    for (int64_t i = 0; i < r->n; i++) {
        double max = -INFINITY;
        for (int64_t t = r->off[i]; t < r->off[i + 1]; t++)
            if (r->mask[t] && stat[t] > max) max = stat[t];
        row[i] = o->scope == SEQ_SUM   ? algo__row_sum(r, i, stat)
                 : o->scope == SEQ_MAX ? (isfinite(max) ? max : 0)
                                       : algo__row_mean(r, i, stat);
    }
    if (o->scope == TOKEN) return;
    ALGO__EACH_VALID(r, i, t) stat[t] = row[i];
}

/* Shares of valid tokens that keep says to drop, and of sequences with such a token. */
static void masked_fractions(const struct algo_ragged *r, const uint8_t *keep, int64_t n_rows, double *tokens, double *rows) {
    *tokens = *rows = 0;
    for (int64_t i = 0; i < r->n; i++) {
        bool any = false;
        for (int64_t t = r->off[i]; t < r->off[i + 1]; t++) {
            if (!r->mask[t] || keep[t]) continue;
            *tokens += 1;
            any = true;
        }
        *rows += any;
    }
    *tokens /= (double)algo_n_valid(r) + ALGO__EPS;
    *rows = n_rows ? *rows / (double)n_rows : 0;
}

/* What an option rejects by: its statistic and the bounds of it. */
struct rs_values {
    const struct rs_option *o;
    const double *stat; /* per token */
    const double *row;  /* of each sequence, packed to the n_rows that have a token */
    int64_t n_rows;
    double lo, hi;
};
static void rs_metrics(const struct algo_ragged *r, const struct rs_values *v, struct algo_metrics *m) {
    char p[48];
    snprintf(p, sizeof p, "rollout_rs_%s_", v->o->name);
    const double lo = v->lo, hi = v->hi, n_valid = (double)algo_n_valid(r) + ALGO__EPS, *const stat = v->stat;
    const bool k1 = v->o->k == 1;
    const struct summary s = summarise(v->row, v->n_rows);
    double seq_low, seq_high, low = 0, high = 0, max = s.max, min = s.min;
    outside(v->row, v->n_rows, lo, hi, &seq_low, &seq_high);
    if (v->o->scope == TOKEN) {
        max = -INFINITY, min = INFINITY;
        ALGO__EACH_VALID(r, i, t) {
            max = fmax(max, stat[t]);
            min = fmin(min, stat[t]);
            high += (stat[t] > hi) / n_valid;
            low += (stat[t] < lo) / n_valid;
        }
    } else {
        low = seq_low;
        high = seq_high;
    }
    metric(m, p, "mean", algo_masked_mean(r, stat));
    metric(m, p, "max", max);
    metric(m, p, "min", min);
    metric(m, p, "fraction_high", high);
    metric(m, p, "fraction_low", k1 ? low : 0);
    metric(m, p, "std", clamped_std(r, stat, k1 ? lo : 0, hi));
    metric(m, p, "seq_mean", s.mean);
    metric(m, p, "seq_std", s.std);
    metric(m, p, "seq_max", s.max);
    metric(m, p, "seq_min", s.min);
    metric(m, p, "seq_max_deviation", fmax(fabs(s.max), fabs(s.min)));
    metric(m, p, "seq_fraction_high", seq_high);
    if (k1) metric(m, p, "seq_fraction_low", seq_low);
}

static void reject(const struct algo_ragged *r, const struct algo_corr *c, const double *log_ratio, uint8_t *keep,
                   struct algo_metrics *m) {
    double *stat = algo__tokens(r), *row = xcalloc((size_t)r->n + 1, sizeof *row), tokens, rows;
    uint8_t *one = xmalloc((size_t)algo__last(r) + 1);
    memset(keep + algo__first(r), 1, (size_t)(algo__last(r) - algo__first(r)));
    for (int j = 0; j < c->n_rs; j++) {
        const struct rs_option *o = &rs_options[c->rs[j].option];
        const bool k1 = o->k == 1; /* ratio bounds are compared as logs; note k1 = rollout - training */
        const double lo = k1 ? log(c->rs[j].lower) : 0, hi = k1 ? log(c->rs[j].upper) : c->rs[j].upper;
        rs_statistic(r, o, log_ratio, stat, row);
        ALGO__EACH_VALID(r, i, t) {
            one[t] = stat[t] <= hi && (!k1 || stat[t] >= lo);
            keep[t] = keep[t] && one[t];
        }
        int64_t n_rows = 0;
        for (int64_t i = 0; i < r->n; i++)
            if (algo__row_valid(r, i) > 0) row[n_rows++] = row[i];
        const struct rs_values v = {.o = o, .stat = stat, .row = row, .n_rows = n_rows, .lo = lo, .hi = hi};
        rs_metrics(r, &v, m);
        masked_fractions(r, one, n_rows, &tokens, &rows);
        char p[48];
        snprintf(p, sizeof p, "rollout_rs_%s_", o->name);
        metric(m, p, "masked_fraction", tokens);
        metric(m, p, "seq_masked_fraction", rows);
    }
    masked_fractions(r, keep, r->n, &tokens, &rows); /* over all rows, as in verl */
    metric(m, "", "rollout_rs_masked_fraction", tokens);
    metric(m, "", "rollout_rs_seq_masked_fraction", rows);
    free(stat);
    free(row);
    free(one);
}

/* ---- distance of the policies ---- */

static void distance_metrics(const struct algo_ragged *r, const struct algo_corr_args *a, const double *log_ratio,
                             struct algo_metrics *m) {
    double kl = 0, k3 = 0, chi2_token = 0;
    ALGO__EACH_VALID(r, i, t) {
        kl -= log_ratio[t];
        k3 += exp(log_ratio[t]) - log_ratio[t] - 1;
        chi2_token += exp(2 * clamp20(log_ratio[t]));
    }
    double t_ppl = 0, t_log = 0, r_ppl = 0, r_log = 0, diff = 0, abs_diff = 0, ratio = 0, chi2_seq = 0;
    double max = -INFINITY, min = INFINITY;
    for (int64_t i = 0; i < r->n; i++) {
        const double lt = algo__row_mean(r, i, a->old_logp), lr = algo__row_mean(r, i, a->rollout_logp);
        t_ppl += exp(-lt);
        t_log -= lt;
        r_ppl += exp(-lr);
        r_log -= lr;
        diff += lr - lt;
        abs_diff += fabs(lr - lt);
        max = fmax(max, lr - lt);
        min = fmin(min, lr - lt);
        ratio += exp(lr - lt);
        chi2_seq += exp(2 * clamp20(algo__row_sum(r, i, log_ratio)));
    }
    const double n = (double)r->n, n_valid = (double)algo_n_valid(r) + ALGO__EPS;
    metric(m, "", "training_ppl", t_ppl / n);
    metric(m, "", "training_log_ppl", t_log / n);
    metric(m, "", "kl", kl / n_valid);
    metric(m, "", "k3_kl", k3 / n_valid);
    metric(m, "", "rollout_ppl", r_ppl / n);
    metric(m, "", "rollout_log_ppl", r_log / n);
    metric(m, "", "log_ppl_diff", diff / n);
    metric(m, "", "log_ppl_abs_diff", abs_diff / n);
    metric(m, "", "log_ppl_diff_max", max);
    metric(m, "", "log_ppl_diff_min", min);
    metric(m, "", "ppl_ratio", ratio / n);
    metric(m, "", "chi2_token", chi2_token / n_valid - 1);
    metric(m, "", "chi2_seq", chi2_seq / n - 1);
}

int algo_corr_run(const struct algo_corr_args *a, double *is_weights, uint8_t *mask_out, struct algo_metrics *m) {
    const struct algo_ragged *r = a->r;
    const int64_t first = algo__first(r), last = algo__last(r);
    if (algo_n_valid(r) == 0) { /* nothing to correct, and no statistic is defined */
        if (a->c->is != ALGO_IS_NONE)
            for (int64_t t = first; t < last; t++) is_weights[t] = 0;
        memset(mask_out + first, 0, (size_t)(last - first));
        metric(m, "", "no_valid_tokens", 1);
        return 0;
    }
    double *log_ratio = algo__tokens(r);
    ALGO__EACH_VALID(r, i, t) log_ratio[t] = a->old_logp[t] - a->rollout_logp[t];
    if (a->c->is != ALGO_IS_NONE) importance(r, a->c, log_ratio, is_weights, m);
    uint8_t *keep = xmalloc((size_t)last + 1);
    memset(keep, 1, (size_t)last + 1);
    if (a->c->n_rs > 0) reject(r, a->c, log_ratio, keep, m);
    distance_metrics(r, a, log_ratio, m); /* reads the mask: before it may be overwritten */
    for (int64_t t = first; t < last; t++) mask_out[t] = r->mask[t] && keep[t];
    free(keep);
    free(log_ratio);
    return 0;
}
