/* row_sampler.c - which rows come next: in order, shuffled, weighted or by a column.
 * An epoch's order is a Philox shuffle addressed by (seed, epoch), a weighted batch a
 * draw addressed by (seed, epoch, index), so the cursor (epoch, index) is all there is
 * to save.
 * Invariant: restoring a state gives exactly the batches that would have come. */
#include "data/data.h"

#include "base/buf.h"
#include "base/hash.h"
#include "base/json.h"
#include "base/rng.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

/* ---- what is requested ---- */

static const char *const orders[] = {"sequential", "shuffle", "weighted", "curriculum"};

int data_sampler_spec_check(const struct data_sampler_spec *s) {
    const char *source;
    json_t *w;
    if (s->order == DATA_CURRICULUM && !s->column)
        FAIL(ERR_INVAL, "data.sampler.name=curriculum needs data.sampler.column, the number to go by (extra_info.level)");
    if (s->order != DATA_WEIGHTED) return 0;
    if (!s->column && !json_object_size(s->weights))
        FAIL(ERR_INVAL, "data.sampler.name=weighted needs data.sampler.weights={source: weight} or data.sampler.column");
    json_object_foreach((json_t *)(uintptr_t)s->weights, source, w) if (!json_is_number(w) || !(json_number_value(w) >= 0))
        FAIL(ERR_INVAL, "data.sampler.weights.%s: expected a number, 0 or more", source);
    return 0;
}

int data_sampler_key(const struct data_sampler_spec *s, const json_t *row, double *key) {
    if (s->order == DATA_WEIGHTED && json_object_size(s->weights)) {
        const char *source = json_string_value(json_object_get(row, s->source_key));
        const json_t *w = source ? json_object_get(s->weights, source) : NULL;
        *key = w ? json_number_value(w) : 1;
        return 0;
    }
    const json_t *v = row;
    for (const char *p = s->column, *end; v && p; p = *end ? end + 1 : NULL) {
        end = strchrnul(p, '.');
        v = json_object_getn(v, p, (size_t)(end - p));
    }
    if (!json_is_number(v)) FAIL(ERR_INPUT, "data.sampler.column=%s is not a number here", s->column);
    *key = json_number_value(v);
    if (s->order == DATA_WEIGHTED && *key < 0)
        FAIL(ERR_INPUT, "data.sampler.column=%s: %g is no weight: expected 0 or more", s->column, *key);
    if (s->descending && s->order == DATA_CURRICULUM) *key = -*key;
    return 0;
}

/* ---- the cursor ---- */

int data_sampler_init(struct data_sampler *s, const struct data_sampler_args *a) {
    if (a->n_rows < 1 || a->batch_size < 1)
        FAIL(ERR_INVAL, "cannot take batches of %lld from %lld rows", (long long)a->batch_size, (long long)a->n_rows);
    if (a->drop_last && a->n_rows < a->batch_size)
        FAIL(ERR_INVAL, "the dataset has %lld rows, fewer than one batch of %lld: lower the batch size or add data",
             (long long)a->n_rows, (long long)a->batch_size);
    const bool keyed = a->order == DATA_WEIGHTED || a->order == DATA_CURRICULUM;
    int64_t possible = 0;
    CHECK(!keyed || a->keys);
    for (int64_t i = 0; keyed && i < a->n_rows; i++) possible += a->keys[i] > 0;
    if (a->order == DATA_WEIGHTED && possible < a->batch_size)
        FAIL(ERR_INVAL, "%lld rows have a weight above 0, fewer than one batch of %lld (data.sampler)", (long long)possible,
             (long long)a->batch_size);
    *s = (struct data_sampler){.a = *a, .order_epoch = -1};
    s->order = xmalloc((size_t)a->n_rows * sizeof *s->order);
    if (!keyed) return 0;
    s->keys = xmalloc((size_t)a->n_rows * sizeof *s->keys);
    memcpy(s->keys, a->keys, (size_t)a->n_rows * sizeof *s->keys);
    s->a.keys = s->keys;
    return 0;
}

void data_sampler_free(struct data_sampler *s) {
    free(s->order);
    free(s->keys);
    *s = (struct data_sampler){0};
}

int64_t data_sampler_batches(const struct data_sampler *s) {
    return (s->a.n_rows + (s->a.drop_last ? 0 : s->a.batch_size - 1)) / s->a.batch_size;
}

struct ranked {
    double rank;
    int64_t row;
};
static int by_rank(const void *x, const void *y) {
    const struct ranked *a = x, *b = y;
    if (a->rank != b->rank) return a->rank < b->rank ? -1 : 1;
    return (a->row > b->row) - (a->row < b->row);
}

/* Stable: rows of equal keys stay as the shuffle left them. */
static void sort_by_key(struct data_sampler *s) {
    struct ranked *v = xmalloc((size_t)s->a.n_rows * sizeof *v);
    int64_t *old = xmalloc((size_t)s->a.n_rows * sizeof *old);
    memcpy(old, s->order, (size_t)s->a.n_rows * sizeof *old);
    for (int64_t i = 0; i < s->a.n_rows; i++) v[i] = (struct ranked){s->keys[old[i]], i};
    qsort(v, (size_t)s->a.n_rows, sizeof *v, by_rank);
    for (int64_t i = 0; i < s->a.n_rows; i++) s->order[i] = old[v[i].row];
    free(old);
    free(v);
}

static void make_order(struct data_sampler *s) {
    struct rng r = {.seed = s->a.seed, .stream = RNG_SHUFFLE + ((uint64_t)s->epoch << 32)};
    for (int64_t i = 0; i < s->a.n_rows; i++) s->order[i] = i;
    if (s->a.order != DATA_SEQUENTIAL) rng_shuffle(&r, s->order, s->a.n_rows);
    if (s->a.order == DATA_CURRICULUM) sort_by_key(s);
    s->order_epoch = s->epoch;
}

/* n distinct rows, one after the other in proportion to the weights that are left: the n smallest of
 * -log(u) / weight (Efraimidis and Spirakis, 2006). */
static void draw(struct data_sampler *s, int64_t n) {
    const uint64_t batch = (uint64_t)(s->index / s->a.batch_size + 1);
    struct rng r = {.seed = s->a.seed, .stream = RNG_SHUFFLE + ((uint64_t)s->epoch << 32) + (batch << 8)};
    struct ranked *v = xmalloc((size_t)s->a.n_rows * sizeof *v);
    for (int64_t i = 0; i < s->a.n_rows; i++) {
        const double u = ((double)rng_u32(&r) + 0.5) * 0x1p-32;
        v[i] = (struct ranked){s->keys[i] > 0 ? -log(u) / s->keys[i] : INFINITY, i};
    }
    qsort(v, (size_t)s->a.n_rows, sizeof *v, by_rank);
    for (int64_t i = 0; i < n; i++) s->order[i] = v[i].row;
    free(v);
}

int data_sampler_next(struct data_sampler *s, const int64_t **rows, int64_t *n) {
    const int64_t left = s->a.n_rows - s->index;
    if (left == 0 || (s->a.drop_last && left < s->a.batch_size)) {
        s->epoch++;
        s->index = 0;
        return 0;
    }
    *n = left < s->a.batch_size ? left : s->a.batch_size;
    if (s->a.order == DATA_WEIGHTED) {
        draw(s, *n);
        *rows = s->order;
    } else {
        if (s->order_epoch != s->epoch) make_order(s);
        *rows = s->order + s->index;
    }
    s->index += *n;
    return 1;
}

int64_t data_sampler_take(struct data_sampler *s) {
    if (s->index >= s->a.n_rows) {
        s->epoch++;
        s->index = 0;
    }
    if (s->a.order != DATA_WEIGHTED) {
        if (s->order_epoch != s->epoch) make_order(s);
        return s->order[s->index++];
    }
    const int64_t size = s->a.batch_size < s->a.n_rows ? s->a.batch_size : s->a.n_rows, at = s->index % s->a.batch_size;
    if (at == 0 || s->order_epoch != s->epoch) draw(s, size); /* the batch that this row is in */
    s->order_epoch = s->epoch;
    s->index++;
    return s->order[at];
}

/* What distinguishes one set of keys from another; "" without keys. */
static void keys_sum(const struct data_sampler *s, char out[33]) {
    out[0] = '\0';
    if (s->keys) hash_hex(s->keys, (size_t)s->a.n_rows * sizeof *s->keys, out);
}

json_t *data_sampler_state(const struct data_sampler *s) {
    /* the seed as text: JSON integers are signed */
    char *seed = xasprintf("%llu", (unsigned long long)s->a.seed), keys[33];
    keys_sum(s, keys);
    json_t *v = json_pack("{s:I, s:I, s:I, s:s, s:b, s:s, s:s}", "epoch", (json_int_t)s->epoch, "index", (json_int_t)s->index,
                          "n_rows", (json_int_t)s->a.n_rows, "seed", seed, "shuffle", s->a.order == DATA_SHUFFLE, "sampler",
                          orders[s->a.order], "keys", keys);
    CHECK(v != NULL);
    free(seed);
    return v;
}

static int same_order(const struct data_sampler *s, const json_t *state, const char *where) {
    const char *seed, *name = NULL, *keys = "";
    char own[33];
    bool shuffle;
    TRY(json_str(state, "seed", &seed, where));
    TRY(json_bool(state, "shuffle", &shuffle, where));
    TRY(json_str_opt(state, "sampler", &name, where)); /* older states have none */
    TRY(json_str_opt(state, "keys", &keys, where));
    if (!name) name = orders[shuffle ? DATA_SHUFFLE : DATA_SEQUENTIAL];
    keys_sum(s, own);
    if (strcmp(name, orders[s->a.order]) != 0 || (s->a.order != DATA_SEQUENTIAL && strtoull(seed, NULL, 10) != s->a.seed))
        FAIL(ERR_INPUT,
             "%s: saved with data.shuffle=%s data.sampler.name=%s data.seed=%s, which gives another order; resume with these, or "
             "start from scratch with trainer.resume_mode=disable",
             where, shuffle ? "true" : "false", name, seed);
    if (strcmp(keys, own) != 0)
        FAIL(ERR_INPUT,
             "%s: saved with other data.sampler weights or another column; resume with these, or start from scratch with "
             "trainer.resume_mode=disable",
             where);
    return 0;
}

int data_sampler_restore(struct data_sampler *s, const json_t *state, const char *where) {
    int64_t epoch, index, n_rows;
    TRY(json_i64(state, "epoch", &epoch, where));
    TRY(json_i64(state, "index", &index, where));
    TRY(json_i64(state, "n_rows", &n_rows, where));
    if (n_rows != s->a.n_rows)
        FAIL(ERR_INPUT,
             "%s: the data had %lld rows when this was saved and has %lld now; resume with the same files, "
             "filters and caps, or start from scratch with trainer.resume_mode=disable",
             where, (long long)n_rows, (long long)s->a.n_rows);
    TRY(same_order(s, state, where));
    if (epoch < 0 || epoch >= (int64_t)1 << 31 || index < 0 || index > n_rows)
        FAIL(ERR_FORMAT, "%s: no such position: epoch %lld, row %lld of %lld", where, (long long)epoch, (long long)index,
             (long long)n_rows);
    s->epoch = epoch;
    s->index = index;
    s->order_epoch = -1;
    return 0;
}
