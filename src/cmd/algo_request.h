/* algo_request.h - reads the arrays, numbers and names of a JSON request of algo_json.c.
 *
 * Arrays nest as samples x tokens and need not be rectangular; null is NaN, which may only stand where it is not read. Keys are
 * found at the top level, in "config", or in config's policy_loss, global_batch_info and kl_ctrl. A key that is not there
 * leaves *out as it is. Invariant: every array of a request has the shape of its mask. ERR_FORMAT: a value of another kind. */
#ifndef VERLC_CMD_ALGO_REQUEST_H
#define VERLC_CMD_ALGO_REQUEST_H

#include "algo/kl_controller.h"
#include "base/json.h"
#include "base/map.h"
#include "cmd/algo_json.h"

enum { ALGO_REQUEST_OWNED = 32 };
struct algo_request {
    const json_t *req;
    const char *where;    /* "stdin:LINE" */
    struct algo_ragged r; /* shape and mask, once known */
    int64_t *off;         /* owned: r.off, r.mask */
    uint8_t *mask;
    bool flat; /* arrays came as one row without nesting, and go back so */
    void *owned[ALGO_REQUEST_OWNED];
    int n_owned;
    const struct algo_json_user *user; /* NULL: none */
    struct map *looked_for;            /* keys that the operation read; NULL: not kept */
    struct algo_metrics metrics;
};
void algo_request_free(struct algo_request *q); /* what it owns */
/* Zeroed memory for n elements, of the request. */
void *algo_request_own(struct algo_request *q, size_t n, size_t size);

/* The value of a key; NULL where it is missing or null. */
const json_t *algo_request_find(const struct algo_request *q, const char *key);
bool algo_request_is_null(const struct algo_request *q, const char *key);
int algo_request_f64(const struct algo_request *q, const char *key, double *out);
int algo_request_i64(const struct algo_request *q, const char *key, int64_t *out);
int algo_request_bool(const struct algo_request *q, const char *key, bool *out);
int algo_request_str(const struct algo_request *q, const char *key, const char **out);
/* Thresholds of `in` may be numbers, texts or a list of them; they come out as one text with commas, q's. */
int algo_request_text(struct algo_request *q, const struct algo_request *in, const char *key, const char **out);

int algo_request_array(const struct algo_request *q, const char *key, const char *alias, const json_t **out);
/* Takes the shape of `key` as that of the request; the mask is 1, or the key's numbers. */
int algo_request_shape(struct algo_request *q, const char *key);
int algo_request_mask(struct algo_request *q, const char *key);
/* An array of the request's shape; NULL where it is missing and optional. */
int algo_request_tokens(struct algo_request *q, const char *key, const char *alias, bool required, const double **out);
/* One number for each sample, of v; x (samples). */
int algo_request_samples(struct algo_request *q, const char *key, const json_t *v, double *x);
/* uid, session: any JSON scalars; equal ones are one group. */
int algo_request_groups(struct algo_request *q, const char *key, const char *alias, const int64_t **out);
int algo_request_agg(struct algo_request *q, const char *default_mode, struct algo_agg *agg);

#endif
