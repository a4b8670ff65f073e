/* validation.c - validation: generate over the validation set, and verl's
 * statistics of it (verl/trainer/ppo/metric_utils.py process_validation_metrics,
 * with numpy's MT19937 reproduced so that best@n and worst@n are the same numbers),
 * and verlc's own pass@k, without a bootstrap. */
#include "ppo/stages/stages.h"

#include "algo/advantage.h"
#include "base/buf.h"
#include "base/err.h"
#include "base/json.h"
#include "base/map.h"

#include <float.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>

/* ---- numpy's legacy generator: np.random.seed(42); np.random.choice(n, size, replace=True) ---- */

struct mt19937 {
    uint32_t s[624];
    int i;
};
static void mt_seed(struct mt19937 *m, uint32_t seed) { /* init_genrand, Matsumoto and Nishimura 2002 */
    m->s[0] = seed;
    for (uint32_t i = 1; i < 624; i++) m->s[i] = 1812433253u * (m->s[i - 1] ^ (m->s[i - 1] >> 30)) + i;
    m->i = 624;
}
static uint32_t mt_next(struct mt19937 *m) {
    if (m->i == 624) {
        for (int k = 0; k < 624; k++) {
            const uint32_t y = (m->s[k] & 0x80000000u) | (m->s[(k + 1) % 624] & 0x7fffffffu);
            m->s[k] = m->s[(k + 397) % 624] ^ (y >> 1) ^ ((y & 1u) ? 0x9908b0dfu : 0u);
        }
        m->i = 0;
    }
    uint32_t y = m->s[m->i++];
    y ^= y >> 11;
    y ^= (y << 7) & 0x9d2c5680u;
    y ^= (y << 15) & 0xefc60000u;
    return y ^ (y >> 18);
}
static int64_t mt_below(struct mt19937 *m, int64_t n) { /* masked rejection */
    uint32_t mask = (uint32_t)n - 1, v;
    if (n <= 1) return 0;
    mask |= mask >> 1;
    mask |= mask >> 2;
    mask |= mask >> 4;
    mask |= mask >> 8;
    mask |= mask >> 16;
    do v = mt_next(m) & mask;
    while (v > (uint32_t)n - 1);
    return v;
}

/* ---- statistics of one prompt's samples ---- */

enum { N_BOOT = 1000 };

static void mean_std(const double *x, int64_t n, double *mean, double *std) {
    double s = 0, q = 0;
    for (int64_t i = 0; i < n; i++) s += x[i];
    *mean = s / (double)n;
    for (int64_t i = 0; i < n; i++) q += (x[i] - *mean) * (x[i] - *mean);
    *std = sqrt(q / (double)n);
}

/* A subset of k fails when it has none of the c: its chance is the product over i < k of (n - c - i) / (n - i), which is that over
 * i < c of (n - k - i) / (n - i); the shorter one is taken. No factor is above 1, so nothing overflows. */
double validation_pass_at_k(int64_t n, int64_t c, int64_t k) {
    const int64_t few = c < k ? c : k, many = c < k ? k : c;
    double none = 1;
    if (c + k > n) return c > 0 ? 1 : 0;
    for (int64_t i = 0; i < few; i++) none *= (double)(n - many - i) / (double)(n - i);
    return 1 - none;
}

/* Majority answer of the drawn samples: its first value; ties go to the one seen first. */
static double majority(const double *x, const char *const *pred, const int64_t *draw, int64_t k) {
    int64_t best = 0, best_count = 0;
    for (int64_t i = 0; i < k; i++) {
        int64_t count = 0;
        bool first = true;
        for (int64_t j = 0; j < k; j++) {
            if (strcmp(pred[draw[j]], pred[draw[i]]) != 0) continue;
            if (j < i) first = false;
            count++;
        }
        if (first && count > best_count) {
            best = i;
            best_count = count;
        }
    }
    return x[draw[best]];
}

/* A metric of one variable of one data source: a mean over prompts. Names come from the data and the scorer: of any length
 * and content, borrowed from the rows. */
struct cell {
    const char *source, *var;
    char metric[48]; /* "best@4/mean" */
    int64_t of;      /* its 4 */
    double sum;
    int64_t n; /* prompts */
};
struct accum {
    struct map index;   /* source NUL variable NUL metric -> place in cells */
    struct map largest; /* source NUL variable -> the largest N of an @N */
    struct map graded;  /* source NUL variable with a value that is neither 0 nor 1: it has no pass@k */
    struct cell *cells; /* in the order of the first prompt that has them */
    int64_t n, cap;
    struct buf key;
};
static void accum_free(struct accum *a) {
    map_free(&a->index);
    map_free(&a->largest);
    map_free(&a->graded);
    free(a->cells);
    buf_free(&a->key);
}

/* No name holds a NUL, so that it separates them. */
static void put_key(struct buf *key, const char *source, const char *var) {
    buf_reset(key);
    buf_add(key, source, strlen(source) + 1);
    buf_adds(key, var);
}

static void accum_add(struct accum *a, const struct cell *what, double v) {
    int64_t i, most;
    put_key(&a->key, what->source, what->var);
    if (!map_get(&a->largest, a->key.p, a->key.n, &most) || what->of > most) map_set(&a->largest, a->key.p, a->key.n, what->of);
    buf_addc(&a->key, '\0');
    buf_adds(&a->key, what->metric);
    if (!map_get(&a->index, a->key.p, a->key.n, &i)) {
        map_set(&a->index, a->key.p, a->key.n, i = a->n++);
        xgrow((void **)&a->cells, &a->cap, a->n, sizeof *a->cells);
        a->cells[i] = *what;
    }
    a->cells[i].sum += v;
    a->cells[i].n++;
}

/* One metric of it, "kind@of" and what follows. */
static void add_metric(struct accum *a, struct cell what, const char *kind, int64_t of, const char *tail, double v) {
    what.of = of;
    snprintf(what.metric, sizeof what.metric, "%s@%lld%s", kind, (long long)of, tail);
    accum_add(a, &what, v);
}

/* 2, 4, 8, ... < n, then n. */
static int64_t next_k(int64_t k, int64_t n) { return k < n && 2 * k > n ? n : 2 * k; }

/* pass@k of one variable of one prompt, as long as all its values are 0 or 1. */
static void pass_metrics(struct accum *a, const struct cell *what, const double *x, int64_t n) {
    int64_t passed = 0, graded = 0;
    for (int64_t i = 0; i < n; i++) {
        passed += x[i] == 1;
        graded += x[i] != 0 && x[i] != 1;
    }
    put_key(&a->key, what->source, what->var);
    if (graded > 0) map_set(&a->graded, a->key.p, a->key.n, 0);
    for (int64_t k = 2; k <= n && graded == 0; k = next_k(k, n))
        add_metric(a, *what, "pass", k, "", validation_pass_at_k(n, passed, k));
}

/* All metrics of one variable of one prompt. */
static void prompt_metrics(struct accum *a, const struct cell *what, const double *x, const char *const *pred, int64_t n) {
    double mean, std, best[N_BOOT], worst[N_BOOT], maj[N_BOOT];
    mean_std(x, n, &mean, &std);
    add_metric(a, *what, "mean", n, "", mean);
    if (n < 2) return;
    add_metric(a, *what, "std", n, "", std);
    int64_t *draw = xmalloc((size_t)n * sizeof *draw);
    for (int64_t k = 2; k <= n; k = next_k(k, n)) {
        struct mt19937 rng;
        mt_seed(&rng, 42);
        for (int b = 0; b < N_BOOT; b++) {
            for (int64_t j = 0; j < k; j++) draw[j] = mt_below(&rng, n);
            best[b] = worst[b] = x[draw[0]];
            for (int64_t j = 1; j < k; j++) {
                best[b] = fmax(best[b], x[draw[j]]);
                worst[b] = fmin(worst[b], x[draw[j]]);
            }
            if (pred) maj[b] = majority(x, pred, draw, k);
        }
        const struct {
            const char *name;
            const double *v;
        } kinds[] = {{"best", best}, {"worst", worst}, {"maj", pred ? maj : NULL}};
        for (int i = 0; i < 3; i++) {
            if (!kinds[i].v) continue;
            mean_std(kinds[i].v, N_BOOT, &mean, &std);
            add_metric(a, *what, kinds[i].name, k, "/mean", mean);
            add_metric(a, *what, kinds[i].name, k, "/std", std);
        }
    }
    free(draw);
    pass_metrics(a, what, x, n);
}

/* The value of variable `name` of a row; false when it is no number there that float32 holds, as of a score. */
static bool variable(const struct val_row *r, const char *name, double *v) {
    if (strcmp(name, "reward") == 0) {
        *v = r->reward;
        return fabs(*v) <= (double)FLT_MAX;
    }
    const json_t *x = json_object_get(r->extra, name);
    if (json_is_boolean(x)) *v = json_is_true(x) ? 1 : 0;
    else if (json_is_number(x)) *v = json_number_value(x);
    else return false;
    return fabs(*v) <= (double)FLT_MAX;
}

/* An answer as a text that is the same for answers that Python calls equal (1, 1.0 and True are); NULL: none.
 * Caller frees. */
static char *vote_of(const json_t *pred) {
    if (!pred || json_is_null(pred)) return NULL;
    if (json_is_boolean(pred)) return xstrdup(json_is_true(pred) ? "n1" : "n0");
    if (json_is_integer(pred)) return xasprintf("n%lld", (long long)json_integer_value(pred));
    if (json_is_real(pred)) {
        const double x = json_real_value(pred);
        return fabs(x) < 0x1p63 && x == floor(x) ? xasprintf("n%lld", (long long)x) : xasprintf("n%.17g", x);
    }
    struct buf text = {0};
    if (json_dump_line(&text, pred) < 0) return NULL;
    return buf_take(&text);
}

/* Samples that lack the variable are left out, as verl leaves out None; the vote
 * needs an answer of every sample. */
static void group_metrics(struct accum *a, const struct val_row *rows, const int64_t *idx, int64_t n, const char *name) {
    double *x = xmalloc((size_t)n * sizeof *x);
    char **pred = xmalloc((size_t)n * sizeof *pred);
    bool have_pred = true;
    int64_t k = 0;
    for (int64_t i = 0; i < n; i++) {
        if (variable(&rows[idx[i]], name, &x[k])) k++;
        pred[i] = vote_of(json_object_get(rows[idx[i]].extra, "pred"));
        have_pred &= pred[i] != NULL;
    }
    if (k > 0) {
        const struct cell what = {.source = rows[idx[0]].data_source, .var = name};
        prompt_metrics(a, &what, x, have_pred && k == n ? (const char *const *)pred : NULL, k);
    }
    for (int64_t i = 0; i < n; i++) free(pred[i]);
    free(x);
    free(pred);
}

/* val-core or val-aux (ray_trainer._val_metrics_update). */
static void publish(struct accum *a, struct metrics *m) {
    for (int64_t i = 0; i < a->n; i++) {
        const struct cell *c = &a->cells[i];
        int64_t most = 0;
        put_key(&a->key, c->source, "acc");
        const char *core = map_get(&a->largest, a->key.p, a->key.n, NULL) ? "acc" : "reward";
        put_key(&a->key, c->source, c->var);
        map_get(&a->largest, a->key.p, a->key.n, &most);
        const char *metric = c->metric;
        const bool pass = strncmp(metric, "pass", 4) == 0;
        if (pass && map_get(&a->graded, a->key.p, a->key.n, NULL)) continue;
        const bool kind =
            pass || strncmp(metric, "mean", 4) == 0 || strncmp(metric, "maj", 3) == 0 || strncmp(metric, "best", 4) == 0;
        const bool is_core = strcmp(c->var, core) == 0 && kind && c->of == most;
        metrics_set(m, c->sum / (double)c->n, "%s/%s/%s/%s", is_core ? "val-core" : "val-aux", c->source, c->var, metric);
    }
}

int validation_metrics(const struct val_row *rows, int64_t n, struct metrics *m) {
    struct accum a = {0};
    struct map groups = {0}, names = {0};
    int64_t *of = xmalloc((size_t)n * sizeof *of), *idx = xmalloc((size_t)n * sizeof *idx);
    struct buf key = {0};
    map_set(&names, "reward", 6, 0);
    for (int64_t i = 0; i < n; i++) {
        buf_reset(&key);
        buf_add(&key, rows[i].data_source, strlen(rows[i].data_source) + 1);
        buf_add(&key, &rows[i].uid, sizeof rows[i].uid);
        if (!map_get(&groups, key.p, key.n, &of[i])) map_set(&groups, key.p, key.n, of[i] = groups.n);
        const char *name;
        json_t *v;
        json_object_foreach((json_t *)(uintptr_t)rows[i].extra, name, v) if (json_is_number(v) || json_is_boolean(v))
            map_set(&names, name, strlen(name), 0);
    }
    for (int64_t g = 0; g < groups.n; g++) {
        int64_t k = 0;
        for (int64_t i = 0; i < n; i++)
            if (of[i] == g) idx[k++] = i;
        for (int64_t v = 0; v < names.n; v++) group_metrics(&a, rows, idx, k, names.entries[v].key);
    }
    publish(&a, m);
    map_free(&groups);
    map_free(&names);
    accum_free(&a);
    buf_free(&key);
    free(of);
    free(idx);
    return 0;
}

/* ---- trainer.log_val_generations: some samples as a table ---- */

struct shown {
    struct buf input;
    int64_t row;
};
static int by_input(const void *a, const void *b) {
    const struct shown *x = a, *y = b;
    const size_t n = x->input.n < y->input.n ? x->input.n : y->input.n;
    const int c = n ? memcmp(x->input.p, y->input.p, n) : 0;
    if (c) return c;
    if (x->input.n != y->input.n) return x->input.n < y->input.n ? -1 : 1;
    return x->row < y->row ? -1 : 1;
}

/* verl's choice: sorted by input, numpy.random.RandomState(42).shuffle, the first ones; so the same prompts each time. */
static void show_samples(const struct stage *s, const struct tokenizer *tok, const struct batch *b, int64_t n) {
    const struct batch_col *prompts = batch_find(b, "prompts"), *text = batch_find(b, "text"), *score = batch_find(b, "score");
    struct shown *v = xcalloc((size_t)b->n_rows, sizeof *v);
    struct mt19937 rng;
    json_t *rows = json_array();
    for (int64_t i = 0; i < b->n_rows; i++) {
        v[i].row = i;
        if (tokenizer_decode(tok, prompts->i32 + prompts->off[i], batch_len(prompts, i), true, &v[i].input) < 0)
            buf_reset(&v[i].input);
    }
    qsort(v, (size_t)b->n_rows, sizeof *v, by_input);
    mt_seed(&rng, 42);
    for (int64_t i = b->n_rows - 1; i > 0; i--) {
        const int64_t j = mt_below(&rng, i + 1);
        const struct shown x = v[i];
        v[i] = v[j];
        v[j] = x;
    }
    for (int64_t i = 0; i < b->n_rows && i < n; i++) {
        const int64_t r = v[i].row;
        json_array_append_new(rows,
                              json_pack("[s%, s%, o]", v[i].input.p ? v[i].input.p : "", v[i].input.n, text->str[r],
                                        (size_t)text->str_len[r], isnan(score->f64[r]) ? json_null() : json_real(score->f64[r])));
    }
    track_generations(s->run->track, s->run->step, rows);
    for (int64_t i = 0; i < b->n_rows; i++) buf_free(&v[i].input);
    free(v);
}

/* ---- the stage ---- */

struct val_rows {
    struct val_row *v;
    int64_t n, cap, errors;
};

/* Of an episode its last sample alone, as verl. */
static void keep_rows(struct val_rows *out, const struct batch *b) {
    const struct batch_col *session = batch_find(b, BATCH_SESSION);
    int64_t *final = xmalloc((size_t)(b->n_rows + 1) * sizeof *final);
    algo_session_finals(b->n_rows, session ? session->i64 : NULL, final);
    const struct batch_col *uid = batch_find(b, "uid"), *score = batch_find(b, "score"), *source = batch_find(b, "data_source"),
                           *extra = batch_find(b, "reward_extra_info");
    for (int64_t i = 0; i < b->n_rows; i++) {
        if (final[i] != i) continue;
        if (isnan(score->f64[i])) { /* an error is never a number */
            out->errors++;
            continue;
        }
        /* verl counts a session that failed as acc 0, and without it here; ours has no number and is in neither */
        json_t *info = json_copy(extra->json[i]), *acc = json_object_get(info, "acc");
        if (json_is_number(acc) || json_is_boolean(acc)) json_object_set(info, "acc_success_only", acc);
        xgrow((void **)&out->v, &out->cap, out->n + 1, sizeof *out->v);
        out->v[out->n++] = (struct val_row){xstrdup(source->str[i]), uid->i64[i], score->f64[i], info};
    }
    free(final);
}

int ppo_validate(const struct stage *s, const struct generation *g, const struct rl_dataset *data, int64_t shown,
                 const char **dump_dir) {
    const int64_t n = data->n, size = g->rows->val_batch_size > 0 && g->rows->val_batch_size < n ? g->rows->val_batch_size : n;
    struct val_rows rows = {0};
    int64_t *idx = xmalloc((size_t)size * sizeof *idx);
    struct batch whole = {0};
    int rc = 0;
    phase_begin(s->run->stages, "testing");
    for (int64_t lo = 0; lo < n && rc == 0; lo += size) {
        struct batch prompts, out;
        const int64_t k = n - lo < size ? n - lo : size;
        for (int64_t i = 0; i < k; i++) idx[i] = lo + i;
        TRYG(rl_dataset_batch(data, idx, k, &prompts), out);
        const struct ppo_generate_args a = {.prompts = &prompts, .sampling = &g->rollout->val, .seed = s->seed, .validation = true};
        rc = ppo_generate(s, g, &a, &out);
        batch_free(&prompts);
        if (rc < 0) break;
        ppo_share_scores(&out);
        keep_rows(&rows, &out);
        ppo_record(s, g->tok, &out, &g->rollout->val, true);
        if (whole.n_rows == 0) {
            whole = out;
        } else {
            const struct batch *parts[2] = {&whole, &out};
            struct batch joined;
            rc = batch_concat(&joined, parts, 2);
            batch_free(&out);
            if (rc == 0) {
                batch_free(&whole);
                whole = joined;
            }
        }
    }
    if (rc == 0) rc = validation_metrics(rows.v, rows.n, &s->run->metrics);
    if (rc == 0) {
        metrics_set_i64(&s->run->metrics, rows.errors, "val-aux/reward_errors");
        ppo_reward_counts(&s->run->metrics, &whole, "val-aux/reward_errors/");
        ppo_turn_metrics(&s->run->metrics, &whole, "val-aux/");
        ppo_dump(s, g->tok, &whole, dump_dir);
        if (shown > 0) show_samples(s, g->tok, &whole, shown);
    }
out:
    phase_end(s->run->stages);
    for (int64_t i = 0; i < rows.n; i++) {
        free((char *)(uintptr_t)rows.v[i].data_source);
        json_decref((json_t *)(uintptr_t)rows.v[i].extra);
    }
    free(rows.v);
    free(idx);
    batch_free(&whole);
    return rc;
}
