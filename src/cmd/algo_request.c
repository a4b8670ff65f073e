/* algo_request.c - see algo_request.h. Knows no operation.
 * Invariant: what a request owns is freed with it. */
#include "cmd/algo_request.h"

#include "base/buf.h"
#include "base/err.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

void algo_request_free(struct algo_request *q) {
    for (int k = 0; k < q->n_owned; k++) free(q->owned[k]);
    free(q->off);
    free(q->mask);
    algo_metrics_free(&q->metrics);
}

void *algo_request_own(struct algo_request *q, size_t n, size_t size) {
    CHECK(q->n_owned < ALGO_REQUEST_OWNED);
    return q->owned[q->n_owned++] = xcalloc(n + 1, size);
}

const json_t *algo_request_find(const struct algo_request *q, const char *key) {
    if (q->looked_for) map_set(q->looked_for, key, strlen(key), 1);
    const json_t *config = json_object_get(q->req, "config");
    const json_t *places[] = {
        q->req,
        config,
        json_object_get(config, "policy_loss"),
        json_object_get(config, "global_batch_info"),
        json_object_get(config, "kl_ctrl"),
        json_object_get(q->req, "kl_ctrl"),
        json_object_get(q->req, "global_batch_info"),
    };
    for (size_t i = 0; i < sizeof places / sizeof places[0]; i++) {
        const json_t *v = json_object_get(places[i], key);
        if (v && !json_is_null(v)) return v;
    }
    return NULL;
}

bool algo_request_is_null(const struct algo_request *q, const char *key) {
    return json_is_null(json_object_get(q->req, key)) || json_is_null(json_object_get(json_object_get(q->req, "config"), key));
}

int algo_request_f64(const struct algo_request *q, const char *key, double *out) {
    const json_t *v = algo_request_find(q, key);
    if (!v) return 0;
    if (!json_is_number(v)) FAIL(ERR_FORMAT, "%s: \"%s\" is not a number", q->where, key);
    *out = json_number_value(v);
    return 0;
}

int algo_request_i64(const struct algo_request *q, const char *key, int64_t *out) {
    double f = (double)*out;
    TRY(algo_request_f64(q, key, &f));
    if (f != floor(f) || fabs(f) > 9e15) FAIL(ERR_FORMAT, "%s: \"%s\" is not a whole number", q->where, key);
    *out = (int64_t)f;
    return 0;
}

int algo_request_bool(const struct algo_request *q, const char *key, bool *out) {
    const json_t *v = algo_request_find(q, key);
    if (!v) return 0;
    if (!json_is_boolean(v)) FAIL(ERR_FORMAT, "%s: \"%s\" is not true or false", q->where, key);
    *out = json_is_true(v);
    return 0;
}

int algo_request_str(const struct algo_request *q, const char *key, const char **out) {
    const json_t *v = algo_request_find(q, key);
    if (!v) return 0;
    if (!json_is_string(v)) FAIL(ERR_FORMAT, "%s: \"%s\" is not a string", q->where, key);
    *out = json_string_value(v);
    return 0;
}

int algo_request_text(struct algo_request *q, const struct algo_request *in, const char *key, const char **out) {
    const json_t *v = algo_request_find(in, key);
    if (!v) return 0;
    struct buf text = {0};
    const size_t n = json_is_array(v) ? json_array_size(v) : 1;
    for (size_t i = 0; i < n; i++) {
        const json_t *e = json_is_array(v) ? json_array_get(v, i) : v;
        if (i > 0) buf_addc(&text, ',');
        if (json_is_string(e)) {
            buf_adds(&text, json_string_value(e));
        } else if (json_is_number(e)) {
            buf_addf(&text, "%.17g", json_number_value(e));
        } else {
            buf_free(&text);
            FAIL(ERR_FORMAT, "%s: \"%s\" is neither a number nor a string", in->where, key);
        }
    }
    CHECK(q->n_owned < ALGO_REQUEST_OWNED);
    *out = q->owned[q->n_owned++] = buf_take(&text);
    return 0;
}

int algo_request_array(const struct algo_request *q, const char *key, const char *alias, const json_t **out) {
    *out = algo_request_find(q, key);
    if (!*out && alias) *out = algo_request_find(q, alias);
    if (!*out) FAIL(ERR_FORMAT, "%s: \"%s\" is missing", q->where, key);
    if (!json_is_array(*out)) FAIL(ERR_FORMAT, "%s: \"%s\" is not an array", q->where, key);
    return 0;
}

int algo_request_shape(struct algo_request *q, const char *key) {
    const json_t *v;
    TRY(algo_request_array(q, key, NULL, &v));
    q->flat = json_array_size(v) > 0 && !json_is_array(json_array_get(v, 0));
    q->r.n = q->flat ? 1 : (int64_t)json_array_size(v);
    q->r.off = q->off = xcalloc((size_t)q->r.n + 1, sizeof *q->off);
    for (int64_t i = 0; i < q->r.n; i++) {
        const json_t *row = q->flat ? v : json_array_get(v, (size_t)i);
        if (!json_is_array(row)) FAIL(ERR_FORMAT, "%s: \"%s\" row %lld is not an array", q->where, key, (long long)i);
        q->off[i + 1] = q->off[i] + (int64_t)json_array_size(row);
    }
    q->r.mask = q->mask = xmalloc((size_t)q->off[q->r.n] + 1);
    memset(q->mask, 1, (size_t)q->off[q->r.n] + 1);
    return 0;
}

int algo_request_tokens(struct algo_request *q, const char *key, const char *alias, bool required, const double **out) {
    const json_t *v = NULL;
    *out = NULL;
    if (!required && !algo_request_find(q, key) && !(alias && algo_request_find(q, alias))) return 0;
    TRY(algo_request_array(q, key, alias, &v));
    double *x = algo_request_own(q, (size_t)q->off[q->r.n], sizeof *x);
    const int64_t rows = q->flat ? 1 : (int64_t)json_array_size(v);
    if (rows != q->r.n)
        FAIL(ERR_FORMAT, "%s: \"%s\" has %lld rows, the mask %lld", q->where, key, (long long)rows, (long long)q->r.n);
    for (int64_t i = 0; i < rows; i++) {
        const json_t *row = q->flat ? v : json_array_get(v, (size_t)i);
        const int64_t n = q->off[i + 1] - q->off[i];
        if (!json_is_array(row) || (int64_t)json_array_size(row) != n)
            FAIL(ERR_FORMAT, "%s: \"%s\" row %lld is not an array of %lld numbers like the mask's", q->where, key, (long long)i,
                 (long long)n);
        for (int64_t k = 0; k < n; k++) {
            const json_t *e = json_array_get(row, (size_t)k);
            if (json_is_null(e)) x[q->off[i] + k] = NAN;
            else if (json_is_number(e)) x[q->off[i] + k] = json_number_value(e);
            else FAIL(ERR_FORMAT, "%s: \"%s\" row %lld token %lld is not a number", q->where, key, (long long)i, (long long)k);
        }
    }
    *out = x;
    return 0;
}

int algo_request_mask(struct algo_request *q, const char *key) {
    TRY(algo_request_shape(q, key));
    const json_t *v = algo_request_find(q, key);
    for (int64_t i = 0; i < q->r.n; i++) {
        const json_t *row = q->flat ? v : json_array_get(v, (size_t)i);
        for (int64_t t = q->off[i]; t < q->off[i + 1]; t++) {
            const json_t *e = json_array_get(row, (size_t)(t - q->off[i]));
            const double m = json_is_boolean(e) ? json_is_true(e) : json_is_number(e) ? json_number_value(e) : -1;
            if (m != 0 && m != 1)
                FAIL(ERR_FORMAT, "%s: \"%s\" row %lld token %lld is not 0 or 1", q->where, key, (long long)i,
                     (long long)(t - q->off[i]));
            q->mask[t] = m != 0;
        }
    }
    return 0;
}

int algo_request_samples(struct algo_request *q, const char *key, const json_t *v, double *x) {
    if (!json_is_array(v) || (int64_t)json_array_size(v) != q->r.n)
        FAIL(ERR_FORMAT, "%s: \"%s\" is not an array of %lld numbers, one for each sample", q->where, key, (long long)q->r.n);
    for (int64_t i = 0; i < q->r.n; i++) {
        const json_t *e = json_array_get(v, (size_t)i);
        if (!json_is_number(e)) FAIL(ERR_FORMAT, "%s: \"%s\" element %lld is not a number", q->where, key, (long long)i);
        x[i] = json_number_value(e);
    }
    return 0;
}

int algo_request_groups(struct algo_request *q, const char *key, const char *alias, const int64_t **out) {
    const json_t *v = algo_request_find(q, key);
    if (!v && alias) v = algo_request_find(q, alias);
    if (!v) return 0;
    if (!json_is_array(v) || (int64_t)json_array_size(v) != q->r.n)
        FAIL(ERR_FORMAT, "%s: \"%s\" is not an array with one entry for each of the %lld samples", q->where, key,
             (long long)q->r.n);
    int64_t *id = algo_request_own(q, (size_t)q->r.n, sizeof *id);
    struct map seen = {0};
    for (int64_t i = 0; i < q->r.n; i++) {
        struct buf text = {0};
        const int rc = json_dump_line(&text, json_array_get(v, (size_t)i));
        if (rc == 0 && !map_get(&seen, text.p, text.n, &id[i])) {
            id[i] = seen.n;
            map_set(&seen, text.p, text.n, id[i]);
        }
        buf_free(&text);
        if (rc < 0) return map_free(&seen), rc;
    }
    map_free(&seen);
    *out = id;
    return 0;
}

int algo_request_agg(struct algo_request *q, const char *default_mode, struct algo_agg *agg) {
    const char *mode = default_mode;
    TRY(algo_request_str(q, "loss_agg_mode", &mode));
    agg->mode = algo_agg_find(mode);
    if (!agg->mode) return ERR_INVAL;
    TRY(algo_request_i64(q, "dp_size", &agg->dp_size));
    TRY(algo_request_i64(q, "batch_num_tokens", &agg->batch_num_tokens));
    TRY(algo_request_i64(q, "global_batch_size", &agg->global_batch_size));
    return algo_request_f64(q, "loss_scale_factor", &agg->loss_scale_factor);
}
