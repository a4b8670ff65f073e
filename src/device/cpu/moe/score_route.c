/* score_route.c - the CPU backend's routers that choose by scores: sigmoids or a softmax, a bias that only the choice sees, groups.
 *
 * Invariant: a token's results are made by one thread in one order. */
#include "device/cpu/moe/token_rows.h"

#include <math.h>
#include <string.h>

struct job {
    const struct route_args *a;
    struct tensor dlogits, dweight;
};

/* s (E): scores of row t. */
static void scores_of(const struct route_args *a, int64_t t, float *s) {
    const int64_t n = a->logits.dim[1];
    float max = -INFINITY, sum = 0;
    for (int64_t e = 0; e < n; e++) {
        s[e] = value_at(a->logits, t * n + e);
        max = s[e] > max ? s[e] : max;
    }
    for (int64_t e = 0; e < n; e++) {
        s[e] = a->sigmoid ? 1 / (1 + expf(-s[e])) : expf(s[e] - max);
        sum += s[e];
    }
    for (int64_t e = 0; e < n && !a->sigmoid; e++) s[e] /= sum;
}

static float group_score(const float *c, int64_t n, bool two) {
    float first = -INFINITY, second = -INFINITY;
    for (int64_t e = 0; e < n; e++) {
        if (c[e] > first) second = first, first = c[e];
        else if (c[e] > second) second = c[e];
    }
    return two ? first + second : first;
}

/* -infinity in the groups that are not among the best; equal ones: the lower number is better. */
static void drop_groups(const struct route_args *a, float *c) {
    float score[DEV_MAX_EXPERT_GROUPS];
    if (a->groups <= 1) return;
    const int64_t n = a->logits.dim[1] / a->groups;
    for (int64_t g = 0; g < a->groups; g++) score[g] = group_score(c + g * n, n, a->sigmoid);
    for (int64_t g = 0; g < a->groups; g++) {
        int64_t better = 0;
        for (int64_t o = 0; o < a->groups; o++) better += score[o] > score[g] || (score[o] == score[g] && o < g);
        for (int64_t e = g * n; e < (g + 1) * n && better >= a->top_groups; e++) c[e] = -INFINITY;
    }
}

static float scale_of(const struct route_args *a) { return a->scale != 0 ? a->scale : 1; }
/* The sum of the chosen, in their order; 1 where weights are not normalised. */
static float chosen_sum(const struct route_args *a, const float *s, const int32_t *id) {
    float sum = 0;
    for (int64_t i = 0; i < a->expert.dim[1]; i++) sum += s[id[i]];
    return a->normalize ? sum + 1e-20f : 1;
}

static void fwd_part(void *arg, int64_t part, int thread) {
    const struct route_args *const a = ((const struct job *)arg)->a;
    const int64_t n = a->logits.dim[1], k = a->expert.dim[1], rows = a->logits.dim[0];
    float s[DEV_MAX_EXPERTS], c[DEV_MAX_EXPERTS];
    (void)thread;
    for (int64_t t = part * ROWS; t < rows && t < (part + 1) * ROWS; t++) {
        int32_t *const id = (int32_t *)a->expert.data + t * k;
        const int32_t *const given = a->given.data ? (const int32_t *)a->given.data + t * k : NULL;
        const bool replayed = given && given[0] >= 0;
        int64_t have = 0;
        scores_of(a, t, s);
        for (int64_t e = 0; e < n; e++) {
            c[e] = s[e] + (a->bias.data ? ((const float *)a->bias.data)[e] : 0);
            c[e] = isnan(c[e]) ? -INFINITY : c[e];
        }
        drop_groups(a, c);
        if (replayed) memcpy(id, given, (size_t)k * sizeof *id);
        for (int64_t e = 0; e < n && !replayed; e++) { /* by insertion; equal ones keep the lower id first */
            if (have == k && !(c[e] > c[id[k - 1]])) continue;
            int64_t i = have < k ? have++ : k - 1;
            for (; i > 0 && c[e] > c[id[i - 1]]; i--) id[i] = id[i - 1];
            id[i] = (int32_t)e;
        }
        for (int64_t i = 0; i < k; i++) CHECK(id[i] >= 0 && id[i] < n);
        const float sum = chosen_sum(a, s, id);
        for (int64_t i = 0; i < k; i++) put(a->weight, t * k + i, s[id[i]] / sum * scale_of(a));
    }
}

int cpu_score_route_fwd(struct dev *d, const struct route_args *a) {
    struct job j = {.a = a};
    pool_run(cpu_of(d)->pool, (a->logits.dim[0] + ROWS - 1) / ROWS, fwd_part, &j);
    return 0;
}

static void bwd_part(void *arg, int64_t part, int thread) {
    const struct job *const j = arg;
    const struct route_args *const a = j->a;
    const int64_t n = a->logits.dim[1], k = a->expert.dim[1], rows = a->logits.dim[0];
    float s[DEV_MAX_EXPERTS], ds[DEV_MAX_EXPERTS];
    (void)thread;
    for (int64_t t = part * ROWS; t < rows && t < (part + 1) * ROWS; t++) {
        const int32_t *const id = (const int32_t *)a->expert.data + t * k;
        const float *const dw = (const float *)j->dweight.data + t * k;
        float dot = 0, mean = 0;
        scores_of(a, t, s);
        const float sum = chosen_sum(a, s, id);
        for (int64_t i = 0; i < k && a->normalize; i++) dot += s[id[i]] / sum * dw[i];
        for (int64_t e = 0; e < n; e++) ds[e] = 0;
        for (int64_t i = 0; i < k; i++) {
            ds[id[i]] = scale_of(a) * (dw[i] - dot) / sum;
            if (!a->sigmoid) mean += s[id[i]] * ds[id[i]];
        }
        for (int64_t e = 0; e < n; e++) put(j->dlogits, t * n + e, a->sigmoid ? ds[e] * s[e] * (1 - s[e]) : s[e] * (ds[e] - mean));
    }
}

int cpu_score_route_bwd(struct dev *d, const struct route_args *a, struct tensor dlogits, struct tensor dweight) {
    struct job j = {a, dlogits, dweight};
    pool_run(cpu_of(d)->pool, (a->logits.dim[0] + ROWS - 1) / ROWS, bwd_part, &j);
    return 0;
}
