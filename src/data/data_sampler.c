/* data_sampler.c - which rows come next.  An epoch's order is a Philox shuffle
 * addressed by (seed, epoch), so the cursor (epoch, index) is all there is to save.
 * Invariant: restoring a state gives exactly the batches that would have come. */
#include "data/data.h"

#include "base/buf.h"
#include "base/json.h"
#include "base/rng.h"

#include <stdlib.h>

int data_sampler_init(struct data_sampler *s, const struct data_sampler_args *a) {
    if (a->n_rows < 1 || a->batch_size < 1)
        FAIL(ERR_INVAL, "cannot take batches of %lld from %lld rows", (long long)a->batch_size,
             (long long)a->n_rows);
    if (a->drop_last && a->n_rows < a->batch_size)
        FAIL(ERR_INVAL,
             "the dataset has %lld rows, fewer than one batch of %lld: lower the batch size or add data",
             (long long)a->n_rows, (long long)a->batch_size);
    *s = (struct data_sampler){.a = *a, .order_epoch = -1};
    s->order = xmalloc((size_t)a->n_rows * sizeof *s->order);
    return 0;
}

void data_sampler_free(struct data_sampler *s) {
    free(s->order);
    *s = (struct data_sampler){0};
}

int64_t data_sampler_batches(const struct data_sampler *s) {
    return (s->a.n_rows + (s->a.drop_last ? 0 : s->a.batch_size - 1)) / s->a.batch_size;
}

static void make_order(struct data_sampler *s) {
    struct rng r = {.seed = s->a.seed, .stream = RNG_SHUFFLE + ((uint64_t)s->epoch << 32)};
    for (int64_t i = 0; i < s->a.n_rows; i++) s->order[i] = i;
    if (s->a.shuffle) rng_shuffle(&r, s->order, s->a.n_rows);
    s->order_epoch = s->epoch;
}

int data_sampler_next(struct data_sampler *s, const int64_t **rows, int64_t *n) {
    const int64_t left = s->a.n_rows - s->index;
    if (left == 0 || (s->a.drop_last && left < s->a.batch_size)) {
        s->epoch++;
        s->index = 0;
        return 0;
    }
    if (s->order_epoch != s->epoch) make_order(s);
    *rows = s->order + s->index;
    *n = left < s->a.batch_size ? left : s->a.batch_size;
    s->index += *n;
    return 1;
}

json_t *data_sampler_state(const struct data_sampler *s) {
    /* the seed as text: JSON integers are signed */
    char *seed = xasprintf("%llu", (unsigned long long)s->a.seed);
    json_t *v =
        json_pack("{s:I, s:I, s:I, s:s, s:b}", "epoch", (json_int_t)s->epoch, "index", (json_int_t)s->index,
                  "n_rows", (json_int_t)s->a.n_rows, "seed", seed, "shuffle", s->a.shuffle);
    CHECK(v != NULL);
    free(seed);
    return v;
}

int data_sampler_restore(struct data_sampler *s, const json_t *state, const char *where) {
    int64_t epoch, index, n_rows;
    const char *seed;
    bool shuffle;
    TRY(json_i64(state, "epoch", &epoch, where));
    TRY(json_i64(state, "index", &index, where));
    TRY(json_i64(state, "n_rows", &n_rows, where));
    TRY(json_str(state, "seed", &seed, where));
    TRY(json_bool(state, "shuffle", &shuffle, where));
    if (n_rows != s->a.n_rows)
        FAIL(ERR_INPUT,
             "%s: the data had %lld rows when this was saved and has %lld now; resume with the same files, "
             "filters and caps, or start anew with trainer.resume_mode=disable",
             where, (long long)n_rows, (long long)s->a.n_rows);
    if (shuffle != s->a.shuffle || (shuffle && strtoull(seed, NULL, 10) != s->a.seed))
        FAIL(ERR_INPUT,
             "%s: saved with data.shuffle=%s data.seed=%s, which gives another order; resume with these, or "
             "start anew with trainer.resume_mode=disable",
             where, shuffle ? "true" : "false", seed);
    if (epoch < 0 || epoch >= (int64_t)1 << 31 || index < 0 || index > n_rows)
        FAIL(ERR_FORMAT, "%s: no such position: epoch %lld, row %lld of %lld", where, (long long)epoch,
             (long long)index, (long long)n_rows);
    s->epoch = epoch;
    s->index = index;
    return 0;
}
