/* score_route.c - the ref backend's routers that choose by scores: sigmoids or a softmax, a bias that only the choice sees, groups.
 *
 * Invariant: a token's choices read its own logits alone; what is compared is rounded to f32, as the other backends have it. */
#include "device/ref/ref_int.h"

#include <math.h>

/* s (E): scores of row t. */
static void scores_of(const struct route_args *a, int64_t t, double *s) {
    const int64_t n = a->logits.dim[1];
    double max = -INFINITY, sum = 0;
    for (int64_t e = 0; e < n; e++) max = fmax(max, ref_at(a->logits, t * n + e));
    for (int64_t e = 0; e < n; e++) {
        const double z = ref_at(a->logits, t * n + e);
        s[e] = a->sigmoid ? 1 / (1 + exp(-z)) : exp(z - max);
        sum += s[e];
    }
    for (int64_t e = 0; e < n && !a->sigmoid; e++) s[e] /= sum;
}

/* How good group g is, of c (E). */
static float group_score(const struct route_args *a, const float *c, int64_t g) {
    const int64_t n = a->logits.dim[1] / a->groups;
    float first = -INFINITY, second = -INFINITY;
    for (int64_t e = g * n; e < (g + 1) * n; e++) {
        if (c[e] > first) second = first, first = c[e];
        else if (c[e] > second) second = c[e];
    }
    return a->sigmoid ? first + second : first;
}

/* -infinity in the groups that are not among the best; equal ones: the lower number is better. */
static void drop_groups(const struct route_args *a, float *c) {
    float score[DEV_MAX_EXPERT_GROUPS];
    const int64_t n = a->logits.dim[1] / (a->groups > 1 ? a->groups : 1);
    for (int64_t g = 0; g < a->groups && a->groups > 1; g++) score[g] = group_score(a, c, g);
    for (int64_t g = 0; g < a->groups && a->groups > 1; g++) {
        int64_t better = 0;
        for (int64_t o = 0; o < a->groups; o++) better += score[o] > score[g] || (score[o] == score[g] && o < g);
        for (int64_t e = g * n; e < (g + 1) * n && better >= a->top_groups; e++) c[e] = -INFINITY;
    }
}

static double scale_of(const struct route_args *a) { return a->scale != 0 ? (double)a->scale : 1; }

int ref_score_route_fwd(const struct route_args *a) {
    const int64_t n = a->logits.dim[1], k = a->expert.dim[1];
    int32_t *const id = a->expert.data;
    double s[DEV_MAX_EXPERTS];
    float c[DEV_MAX_EXPERTS];
    bool taken[DEV_MAX_EXPERTS];
    for (int64_t t = 0; t < a->logits.dim[0]; t++) {
        double sum = 1e-20;
        scores_of(a, t, s);
        for (int64_t e = 0; e < n; e++) {
            c[e] = (float)s[e] + (a->bias.data ? ref_f32(a->bias)[e] : 0);
            c[e] = isnan(c[e]) ? -INFINITY : c[e];
            taken[e] = false;
        }
        drop_groups(a, c);
        const bool given = a->given.data && ((const int32_t *)a->given.data)[t * k] >= 0;
        for (int64_t i = 0; i < k; i++) {
            int64_t at = given ? ref_index(a->given, t * k + i, n) : -1;
            for (int64_t e = 0; e < n && !given; e++)
                if (!taken[e] && (at < 0 || c[e] > c[at])) at = e;
            taken[at] = true;
            id[t * k + i] = (int32_t)at;
            sum += s[at];
        }
        for (int64_t i = 0; i < k; i++)
            ref_put(a->weight.data, a->weight.dt, t * k + i, s[id[t * k + i]] / (a->normalize ? sum : 1) * scale_of(a));
    }
    return 0;
}

int ref_score_route_bwd(const struct route_args *a, struct tensor dlogits, struct tensor dweight) {
    const int64_t n = a->logits.dim[1], k = a->expert.dim[1];
    double s[DEV_MAX_EXPERTS], ds[DEV_MAX_EXPERTS];
    for (int64_t t = 0; t < a->logits.dim[0]; t++) {
        double sum = 1e-20, dot = 0, mean = 0;
        scores_of(a, t, s);
        for (int64_t i = 0; i < k; i++) sum += s[ref_index(a->expert, t * k + i, n)];
        if (!a->normalize) sum = 1;
        for (int64_t i = 0; i < k && a->normalize; i++)
            dot += s[ref_index(a->expert, t * k + i, n)] / sum * ref_f32(dweight)[t * k + i];
        for (int64_t e = 0; e < n; e++) ds[e] = 0;
        for (int64_t i = 0; i < k; i++)
            ds[ref_index(a->expert, t * k + i, n)] = scale_of(a) * (ref_f32(dweight)[t * k + i] - dot) / sum;
        for (int64_t e = 0; e < n && !a->sigmoid; e++) mean += s[e] * ds[e];
        for (int64_t e = 0; e < n; e++)
            ref_put(dlogits.data, dlogits.dt, t * n + e, a->sigmoid ? ds[e] * s[e] * (1 - s[e]) : s[e] * (ds[e] - mean));
    }
    return 0;
}
