/* micro_batch.c - see micro_batch.h. */
#include "train/micro_batch.h"

#include "algo/micro_batch_balance.h"
#include "base/buf.h"
#include "base/err.h"
#include "train/router_replay.h"

#include <stdlib.h>
#include <string.h>

int64_t packed_seq_targets(const struct packed_seq *s) {
    if (!s->mask) return s->n > s->first ? s->n - s->first : 0;
    int64_t k = 0;
    for (int64_t t = 1; t < s->n; t++) k += s->mask[t] != 0;
    return k;
}

int micro_batch_rows_check(const char *key, int64_t seqs, int64_t longest, int64_t rows) {
    if (rows <= INT32_MAX) return 0;
    FAIL(ERR_INVAL, "%s=%lld: a micro-batch of samples of up to %lld tokens has at most 2^31 tokens; lower it", key,
         (long long)seqs, (long long)longest);
}

bool micro_batch_limits_lower(struct micro_batch_limits *l, int64_t longest) {
    int64_t *limit = l->max_seqs > 0 ? &l->max_seqs : &l->max_rows;
    const int64_t least = l->max_seqs > 0 ? 1 : longest, next = *limit > 16 ? *limit / 2 : *limit - 1;
    if (*limit <= least) return false;
    *limit = next < least ? least : next;
    return true;
}

/* Of all rows. */
static int64_t routes_count(const struct pack *p) { return model_router_layers(p->routed) * p->max_rows * p->routed->n_choices; }

/* Of a part: q_start, pos0 and kv_start. */
static int64_t part_words(const struct pack *p) { return 3 * p->max_seqs + 1; }

void micro_batch_layout(struct pack *p, struct arena *a) {
    const size_t rows = SIZE_OF(p->max_rows, 4), seqs = SIZE_OF(p->max_seqs, 4);
    p->d_ids = arena_take(a, rows);
    p->d_pos = arena_take(a, rows);
    p->d_slots = arena_take(a, rows);
    p->d_q_start = arena_take(a, seqs + 4);
    p->d_pos0 = arena_take(a, seqs);
    p->d_kv_start = arena_take(a, seqs);
    if (p->routed) p->d_routes = arena_take(a, (size_t)routes_count(p) * sizeof *p->d_routes);
    if (p->most_parts) p->d_parts = arena_take(a, (size_t)(p->most_parts * part_words(p)) * sizeof *p->d_parts);
}

void micro_batch_alloc_host(struct pack *p) {
    const size_t rows = (size_t)p->max_rows * 4;
    p->ids = xmalloc(rows);
    p->pos = xmalloc(rows);
    p->row = xmalloc(rows);
    p->target = xmalloc(rows);
    p->q_start = xmalloc(((size_t)p->max_seqs + 1) * 4);
    p->zeros = xcalloc((size_t)p->max_seqs, 4);
    if (p->routed) p->routes = xmalloc((size_t)routes_count(p) * sizeof *p->routes);
}

void micro_batch_free_host(struct pack *p) {
    free(p->ids);
    free(p->pos);
    free(p->row);
    free(p->target);
    free(p->q_start);
    free(p->zeros);
    free(p->routes);
}

int micro_batch_order(struct micro_batch_limits *cut, const int64_t *len, int64_t *order, int64_t n) {
    if (n == 0) return 0;
    int64_t *row = xmalloc((size_t)n * 2 * sizeof *row), *was = row + n, *end = xmalloc((size_t)n * sizeof *end);
    int64_t most = cut->max_rows, n_micro;
    for (int64_t i = 0; i < n; i++) most = len[i] > most ? len[i] : most;
    const struct algo_update_rows u = {.len = len, .n = n, .max_rows = cut->max_seqs, .max_tokens = most};
    const int rc = algo_update_micro_batches(&u, row, end, &n_micro);
    memcpy(was, order, (size_t)n * sizeof *was);
    for (int64_t i = 0; i < n && rc == 0; i++) order[i] = was[row[i]];
    free(row);
    if (rc == 0) cut->ends = end;
    else free(end);
    return rc;
}

int micro_batch_next(const struct pack *p, const struct packed_seq *seqs, int64_t n, int64_t lo, struct micro_batch_limits cut,
                     struct pack_micro *m) {
    *m = (struct pack_micro){.lo = lo, .hi = lo};
    for (; cut.ends && *cut.ends <= lo; cut.ends++) {
    }
    while (m->hi < n) {
        const struct packed_seq *s = &seqs[m->hi];
        const bool over = cut.ends ? m->hi == *cut.ends : cut.max_rows > 0 && m->n_rows + s->n > cut.max_rows;
        const bool full =
            over || (cut.max_seqs > 0 && m->hi - lo >= cut.max_seqs) || m->n_rows + s->n > p->max_rows || m->hi - lo >= p->max_seqs;
        if (full && m->hi > lo) break;
        if (s->n > p->max_rows)
            FAIL(ERR_INVAL, "a sequence of %lld tokens is longer than the %lld planned for a micro-batch", (long long)s->n,
                 (long long)p->max_rows);
        m->n_rows += s->n;
        m->n_targets += packed_seq_targets(s);
        m->hi++;
    }
    return 0;
}

int micro_batch_list(const struct pack *p, const struct packed_seq *seqs, int64_t n, struct micro_batch_limits cut,
                     struct pack_micro **list, int64_t *n_list) {
    struct pack_micro *v = xmalloc((size_t)(n + 1) * sizeof *v);
    int64_t k = 0, t0 = 0;
    for (int64_t lo = 0; lo < n; lo = v[k++].hi) {
        const int rc = micro_batch_next(p, seqs, n, lo, cut, &v[k]);
        if (rc < 0) free(v);
        TRY(rc);
        v[k].index = k;
        v[k].t0 = t0;
        t0 += v[k].n_targets;
    }
    *list = v;
    *n_list = k;
    return 0;
}

static struct tensor device_routes(const struct pack *p) {
    return (struct tensor){p->d_routes, DT_I32, 3, {model_router_layers(p->routed), p->max_rows, p->routed->n_choices, 1}};
}

int micro_batch_routes(struct pack *p, const struct pack_micro *m, int32_t *words) {
    TRY(dev_copy_out(p->dev, p->routes, p->d_routes, (size_t)routes_count(p) * sizeof *p->routes));
    router_replay_pack(p->routed, p->routes, p->max_rows, 0, m->n_rows, words);
    return 0;
}

/* Recorded choices to the device, where sequences have them; tokens of others choose. */
static int fill_routes(struct pack *p, const struct packed_seq *seqs, const struct pack_micro *m, struct model_batch *b) {
    int64_t r = 0;
    bool any = false;
    for (int64_t i = m->lo; i < m->hi; i++) any |= seqs[i].routes != NULL;
    if (!any && !p->keep_routes) return 0;
    CHECK(p->routed);
    b->routes = device_routes(p);
    b->routes_kept = p->keep_routes;
    if (p->keep_routes) return 0;
    memset(p->routes, 0xff, (size_t)routes_count(p) * sizeof *p->routes);
    for (int64_t i = m->lo; i < m->hi; r += seqs[i++].n)
        if (seqs[i].routes) TRY(router_replay_unpack(p->routed, seqs[i].routes, seqs[i].n, p->max_rows, r, p->routes));
    return dev_copy_in(p->dev, p->d_routes, p->routes, (size_t)routes_count(p) * sizeof *p->routes);
}

int micro_batch_fill(struct pack *p, const struct packed_seq *seqs, const struct pack_micro *m, struct model_batch *b) {
    int64_t r = 0, k = 0, longest = 0;
    for (int64_t i = m->lo; i < m->hi; i++) {
        const struct packed_seq *s = &seqs[i];
        p->q_start[i - m->lo] = (int32_t)r;
        if (s->n > longest) longest = s->n;
        for (int64_t t = 0; t < s->n; t++) {
            p->ids[r + t] = s->ids[t];
            p->pos[r + t] = (int32_t)t;
            if (t == 0 || (s->mask ? s->mask[t] == 0 : t < s->first)) continue;
            p->row[k] = (int32_t)(r + t - 1);
            p->target[k++] = s->ids[t];
        }
        r += s->n;
    }
    const int64_t n_seqs = m->hi - m->lo;
    p->q_start[n_seqs] = (int32_t)r;
    CHECK(r == m->n_rows && k == m->n_targets);
    TRY(dev_copy_in(p->dev, p->d_ids, p->ids, (size_t)r * 4));
    TRY(dev_copy_in(p->dev, p->d_pos, p->pos, (size_t)r * 4));
    TRY(dev_copy_in(p->dev, p->d_q_start, p->q_start, (size_t)(n_seqs + 1) * 4));
    TRY(dev_copy_in(p->dev, p->d_kv_start, p->q_start, (size_t)n_seqs * 4));
    TRY(dev_copy_in(p->dev, p->d_pos0, p->zeros, (size_t)n_seqs * 4));
    for (int64_t t = 0; t < r; t++) p->pos[t] = (int32_t)t; /* slots: the row itself */
    TRY(dev_copy_in(p->dev, p->d_slots, p->pos, (size_t)r * 4));
    *b = (struct model_batch){
        .n_rows = r,
        .ids = tensor_1d(p->d_ids, DT_I32, r),
        .pos = tensor_1d(p->d_pos, DT_I32, r),
        .slots = tensor_1d(p->d_slots, DT_I32, r),
        .seqs = {.n = n_seqs,
                 .max_q = longest,
                 .max_kv = longest,
                 .q_start = tensor_1d(p->d_q_start, DT_I32, n_seqs + 1),
                 .pos0 = tensor_1d(p->d_pos0, DT_I32, n_seqs),
                 .kv_start = tensor_1d(p->d_kv_start, DT_I32, n_seqs)},
    };
    return fill_routes(p, seqs, m, b);
}

static int64_t within(int64_t x, struct model_range r) { return x < r.lo ? r.lo : x > r.hi ? r.hi : x; }

/* The sequences with rows in r, whose rows count from r.lo on; their keys are where the micro-batch has them. */
static int part_seqs(const struct pack *p, const struct attn_seqs *all, struct model_range r, int32_t *at, struct attn_seqs *s) {
    int32_t *const host = xmalloc((size_t)part_words(p) * sizeof *host);
    int32_t *const q_start = host, *const pos0 = host + p->max_seqs + 1, *const kv_start = pos0 + p->max_seqs;
    *s = (struct attn_seqs){0};
    for (int64_t i = 0; i < all->n; i++) {
        const int64_t lo = within(p->q_start[i], r), hi = within(p->q_start[i + 1], r), before = lo - p->q_start[i];
        if (lo == hi) continue;
        q_start[s->n] = (int32_t)(lo - r.lo);
        pos0[s->n] = (int32_t)before;
        kv_start[s->n++] = p->q_start[i];
        if (hi - lo > s->max_q) s->max_q = hi - lo;
        if (before + hi - lo > s->max_kv) s->max_kv = before + hi - lo;
    }
    q_start[s->n] = (int32_t)(r.hi - r.lo);
    s->q_start = tensor_1d(at, DT_I32, s->n + 1);
    s->pos0 = tensor_1d(at + p->max_seqs + 1, DT_I32, s->n);
    s->kv_start = tensor_1d(at + 2 * p->max_seqs + 1, DT_I32, s->n);
    const int rc = dev_copy_in(p->dev, at, host, (size_t)part_words(p) * sizeof *host);
    free(host);
    return rc;
}

int micro_batch_part_seqs(struct pack *p, const struct model_parts *parts, int64_t first, struct model_batch *b) {
    CHECK(parts->n <= p->most_parts);
    for (int i = 0; i < parts->n; i++)
        TRY(part_seqs(p, &b->seqs, (struct model_range){first + parts->cut[i], first + parts->cut[i + 1]},
                      p->d_parts + i * part_words(p), &p->part_seqs[i]));
    b->part_seqs = p->part_seqs;
    return 0;
}

struct pack_targets micro_batch_targets(const struct pack *p, const struct pack_micro *m, const struct model_parts *cut, int i) {
    struct pack_targets r = {0, 0};
    while (r.lo < m->n_targets && p->row[r.lo] < cut->cut[i]) r.lo++;
    for (r.hi = r.lo; r.hi < m->n_targets && p->row[r.hi] < cut->cut[i + 1];) r.hi++;
    return r;
}

struct pack_targets micro_batch_part(struct pack *p, const struct pack_micro *m, const struct model_parts *cut, int i,
                                     struct model_batch *b) {
    const int64_t lo = cut->cut[i], n = cut->cut[i + 1] - lo;
    const struct pack_targets own = micro_batch_targets(p, m, cut, i);
    b->n_rows = n;
    b->ids = tensor_rows(b->ids, lo, n);
    b->pos = tensor_rows(b->pos, lo, n);
    b->slots = tensor_rows(b->slots, 0, n);
    if (b->routes.data) b->routes.data = (int32_t *)b->routes.data + lo * b->routes.dim[2];
    for (int64_t k = own.lo; k < own.hi; k++) p->row[k] -= (int32_t)lo;
    return own;
}
