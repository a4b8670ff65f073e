/* group_host.c - the operations of a group through host memory and comm: for devices that are the host (cpu, ref), and for GPUs
 * whose memory their peers cannot read. Everything is done when a call returns, or queued on the compute stream, so there is
 * nothing to reuse or join.
 *
 * Bytes of flat arrays go in pieces, so memory stays small; rows of the token embedding go at once, only to the ranks that own
 * a part of them.
 * Invariant: all ranks compute the same list of pieces and rows, so comm sees the same calls everywhere. */
#include "dev/group_int.h"

#include "base/buf.h"

#include <stdlib.h>
#include <string.h>

enum { PIECE = 1 << 20 }; /* elements of a piece of one rank */
#define PIECE_BYTES ((size_t)PIECE * sizeof(float))

size_t group_host_bytes(const struct dev *d, int size) { return dev_has_own_memory(d) ? (size_t)size * PIECE_BYTES : 0; }

int group_host_open(struct dev_group *g) {
    g->host.in = xmalloc((size_t)g->size * PIECE_BYTES);
    if (!dev_has_own_memory(g->d)) return 0;
    g->host.out = xmalloc((size_t)g->size * PIECE_BYTES);
    return dev_alloc(g->d, (size_t)g->size * PIECE_BYTES, &g->host.staging);
}

void group_host_close(struct dev_group *g) {
    free(g->host.in);
    free(g->host.out);
    dev_free(g->d, g->host.staging, (size_t)g->size * PIECE_BYTES);
    dev_free(g->d, g->host.rows, g->host.row_bytes);
    g->host = (struct group_host){0};
}

static int64_t least(int64_t a, int64_t b) { return a < b ? a : b; }

/* ---- rows of the token embedding ---- */

/* What is added of each rank's rows: those that touch this rank's elements, on the device. */
struct rows {
    struct tensor *ids, *dx; /* (size) */
    int32_t *all;            /* host: the ids of all ranks, one rank after the other */
    size_t *at;              /* (size + 1) bytes */
    char *sent, *in;         /* host: rows for other ranks, and from them; the ids of those from them */
};

static void rows_free(struct rows *w) {
    free(w->ids);
    free(w->dx);
    free(w->all);
    free(w->at);
    free(w->sent);
    free(w->in);
}

/* Whether a part of row `id` is rank r's. */
static bool touches(const struct dev_bucket *b, int r, int64_t id) {
    return id * b->width < b->cut[r + 1] && (id + 1) * b->width > b->cut[r];
}

static int gather_ids(struct dev_group *g, const struct dev_bucket *b, struct rows *w) {
    for (int r = 0; r < g->size; r++) w->at[r + 1] = w->at[r] + (r < b->n ? (size_t)b->n_rows[r] * sizeof(int32_t) : 0);
    w->all = xmalloc(w->at[g->size] + 1);
    TRY(dev_copy_out(g->d, (char *)w->all + w->at[g->rank], b->ids, w->at[g->rank + 1] - w->at[g->rank]));
    TRY(comm_all_gather(g->comm, w->all, w->at));
    const int64_t vocab = b->cut[g->size] / b->width;
    for (size_t i = 0; i < w->at[g->size] / sizeof(int32_t); i++)
        if (w->all[i] < 0 || w->all[i] >= vocab)
            FAIL(ERR_INVAL, "dev group: token %d in a table of %lld rows", (int)w->all[i], (long long)vocab);
    return 0;
}

static const int32_t *ids_of(const struct rows *w, int r, int64_t *n) {
    *n = (int64_t)((w->at[r + 1] - w->at[r]) / sizeof(int32_t));
    return w->all + w->at[r] / sizeof(int32_t);
}

/* How many rows of rank `from` touch what rank `to` owns. */
static size_t count_rows(const struct dev_bucket *b, const struct rows *w, int from, int to) {
    int64_t n;
    size_t count = 0;
    const int32_t *id = ids_of(w, from, &n);
    for (int64_t t = 0; t < n; t++) count += touches(b, to, id[t]);
    return count;
}

/* This rank's rows for every other one, one rank after the other. */
static int pack_rows(struct dev_group *g, const struct dev_bucket *b, struct rows *w, struct comm_bytes *out) {
    const size_t row = (size_t)b->width * sizeof(float);
    int64_t n;
    const int32_t *const id = ids_of(w, g->rank, &n);
    size_t total = 0, at = 0;
    for (int r = 0; r < g->size; r++) total += r == g->rank ? 0 : row * count_rows(b, w, g->rank, r);
    char *const own = dev_has_own_memory(g->d) && total ? xmalloc((size_t)n * row) : NULL;
    const char *const dx = own ? own : (const char *)b->dx;
    const int rc = own ? dev_copy_out(g->d, own, b->dx, (size_t)n * row) : 0;
    w->sent = xmalloc(total + 1);
    for (int r = 0; rc >= 0 && r < g->size; r++) {
        out[r].p = w->sent + at;
        for (int64_t t = 0; r != g->rank && t < n; t++) {
            if (!touches(b, r, id[t])) continue;
            memcpy(w->sent + at, dx + (size_t)t * row, row);
            at += row;
        }
        out[r].n = (size_t)(w->sent + at - (char *)out[r].p);
    }
    free(own);
    return rc;
}

/* Where the rows of the other ranks go: their ids first, then the rows. */
static size_t plan_rows(struct dev_group *g, const struct dev_bucket *b, struct rows *w, struct comm_bytes *in) {
    size_t rows = 0, at;
    for (int r = 0; r < g->size; r++) {
        in[r].n = r == g->rank ? 0 : count_rows(b, w, r, g->rank) * (size_t)b->width * sizeof(float);
        rows += in[r].n / ((size_t)b->width * sizeof(float));
    }
    const size_t ids = (rows * sizeof(int32_t) + 255) & ~(size_t)255;
    w->in = xmalloc(ids + rows * (size_t)b->width * sizeof(float) + 1);
    int32_t *id = (int32_t *)w->in;
    at = ids;
    for (int r = 0; r < g->size; r++) {
        int64_t n;
        const int32_t *const all = ids_of(w, r, &n);
        in[r].p = w->in + at;
        at += in[r].n;
        for (int64_t t = 0; r != g->rank && t < n; t++)
            if (touches(b, g->rank, all[t])) *id++ = all[t];
    }
    return ids + rows * (size_t)b->width * sizeof(float);
}

/* What was received, to the device. */
static int take_rows(struct dev_group *g, struct rows *w, size_t bytes, char **at) {
    *at = w->in;
    if (!dev_has_own_memory(g->d)) return 0;
    if (bytes > g->host.row_bytes) {
        dev_free(g->d, g->host.rows, g->host.row_bytes);
        g->host.rows = NULL;
        g->host.row_bytes = 0;
        TRY(dev_alloc(g->d, bytes, &g->host.rows));
        g->host.row_bytes = bytes;
    }
    *at = g->host.rows;
    return dev_copy_in(g->d, g->host.rows, w->in, bytes);
}

static int exchange_rows(struct dev_group *g, const struct dev_bucket *b, struct rows *w) {
    struct comm_bytes *out = xcalloc((size_t)g->size, sizeof *out), *in = xcalloc((size_t)g->size, sizeof *in);
    char *at;
    int rc;
    w->ids = xcalloc((size_t)g->size, sizeof *w->ids);
    w->dx = xcalloc((size_t)g->size, sizeof *w->dx);
    w->at = xcalloc((size_t)g->size + 1, sizeof *w->at);
    TRYG(gather_ids(g, b, w), out);
    TRYG(pack_rows(g, b, w, out), out);
    const size_t bytes = plan_rows(g, b, w, in);
    TRYG(comm_exchange(g->comm, out, in), out);
    TRYG(take_rows(g, w, bytes, &at), out);
    const int32_t *id = (const int32_t *)at;
    for (int r = 0; r < g->size; r++) {
        const bool own = r == g->rank;
        int64_t n = (int64_t)(in[r].n / ((size_t)b->width * sizeof(float)));
        if (own) ids_of(w, r, &n);
        w->ids[r] = tensor_1d(own ? (void *)(uintptr_t)b->ids : (void *)(uintptr_t)id, DT_I32, n);
        w->dx[r] = tensor_2d(own ? (void *)(uintptr_t)b->dx : at + ((char *)in[r].p - w->in), DT_F32, n, b->width);
        if (!own) id += n;
    }
out:
    free(out);
    free(in);
    return rc;
}

/* ---- folds ---- */

/* Piece k of what rank r owns: elements [*lo, *hi) of the bucket. */
static int64_t piece(const struct dev_bucket *b, int r, int64_t k, int64_t *lo, int64_t *hi) {
    *lo = least(b->cut[r] + k * PIECE, b->cut[r + 1]);
    *hi = least(*lo + PIECE, b->cut[r + 1]);
    return *hi - *lo;
}

/* Piece k from all ranks that have a summand: x (size). */
static int exchange_piece(struct dev_group *g, const struct dev_bucket *b, int64_t k, struct tensor *x) {
    struct comm_bytes out[COMM_MOST_RANKS], in[COMM_MOST_RANKS];
    const bool far = dev_has_own_memory(g->d);
    int64_t lo, hi;
    for (int r = 0; r < g->size; r++) {
        const size_t n = (size_t)piece(b, r, k, &lo, &hi) * sizeof(float);
        const bool sends = r != g->rank && g->rank < b->n;
        out[r] = (struct comm_bytes){(void *)(uintptr_t)(b->x + lo), sends ? n : 0};
        if (!far || !out[r].n) continue;
        out[r].p = g->host.out + (size_t)r * PIECE_BYTES;
        TRY(dev_copy_out(g->d, out[r].p, b->x + lo, n));
    }
    const int64_t n = piece(b, g->rank, k, &lo, &hi);
    for (int r = 0; r < g->size; r++)
        in[r] = (struct comm_bytes){g->host.in + (size_t)r * PIECE_BYTES, r != g->rank && r < b->n ? (size_t)n * sizeof(float) : 0};
    TRY(comm_exchange(g->comm, out, in));
    for (int r = 0; r < b->n; r++) {
        char *const at = r == g->rank ? (char *)(uintptr_t)(b->x + lo)
                         : far        ? (char *)g->host.staging + (size_t)r * PIECE_BYTES
                                      : (char *)in[r].p;
        if (far) TRY(dev_copy_in(g->d, at, in[r].p, in[r].n));
        x[r] = tensor_1d(at, DT_F32, n);
    }
    return 0;
}

/* Elements [lo, hi) of the bucket, of which x (or NULL) has those of each rank. */
static int add_up(struct dev_group *g, const struct dev_bucket *b, const struct rows *w, int64_t lo, int64_t hi,
                  const struct tensor *x) {
    const struct tensor y = tensor_1d(b->own + (lo - b->cut[g->rank]), DT_F32, hi - lo);
    if (lo == hi) return 0;
    if (x && !b->ids) return dev_fold(g->d, y, x, b->n, b->add);
    if (!x && !b->add) TRY(dev_zero(g->d, y.data, (size_t)(hi - lo) * sizeof(float)));
    for (int r = 0; r < b->n; r++) {
        if (x) TRY(dev_fold(g->d, y, &x[r], 1, b->add || r > 0));
        TRY(dev_embed_bwd_part(g->d, y, lo, b->cut[g->size] / b->width, w->ids[r], w->dx[r]));
    }
    return 0;
}

int group_host_fold(struct dev_group *g, const struct dev_bucket *b) {
    struct tensor x[COMM_MOST_RANKS];
    struct rows w = {0};
    int64_t pieces = 0, lo, hi;
    int rc = 0;
    if (b->ids) TRYG(exchange_rows(g, b, &w), out);
    if (!b->x) TRYG(add_up(g, b, &w, b->cut[g->rank], b->cut[g->rank + 1], NULL), out);
    for (int r = 0; b->x && r < g->size; r++)
        while (piece(b, r, pieces, &lo, &hi) > 0) pieces++;
    for (int64_t k = 0; k < pieces; k++) {
        TRYG(exchange_piece(g, b, k, x), out);
        piece(b, g->rank, k, &lo, &hi);
        TRYG(add_up(g, b, &w, lo, hi, x), out);
    }
out:
    rows_free(&w);
    return rc;
}

/* ---- all-gather ---- */

/* A rank's bytes of all parts, one after the other, are its stream. Copies bytes [lo, hi) of rank r's between `whole` and the
 * host. */
static int move_stream(struct dev_group *g, char *whole, const size_t *at, int64_t n_parts, int r, size_t lo, size_t hi, char *host,
                       bool out) {
    size_t begin = 0; /* of this part, in the stream */
    for (int64_t i = 0; i < n_parts && begin < hi; i++) {
        const size_t *const part = at + i * (g->size + 1) + r;
        const size_t end = begin + (part[1] - part[0]);
        const size_t from = lo > begin ? lo : begin, to = hi < end ? hi : end;
        char *const there = whole + part[0] + (from - begin);
        if (from < to && out) TRY(dev_copy_out(g->d, host + (from - lo), there, to - from));
        if (from < to && !out) TRY(dev_copy_in(g->d, there, host + (from - lo), to - from));
        begin = end;
    }
    return 0;
}

int group_host_all_gather(struct dev_group *g, char *whole, const size_t *at, int64_t n_parts) {
    size_t total[COMM_MOST_RANKS] = {0}, window[COMM_MOST_RANKS + 1] = {0}, most = 0;
    for (int r = 0; r < g->size; r++) {
        for (int64_t i = 0; i < n_parts; i++) total[r] += at[i * (g->size + 1) + r + 1] - at[i * (g->size + 1) + r];
        if (total[r] > most) most = total[r];
    }
    for (size_t lo = 0; lo < most; lo += PIECE_BYTES) {
        for (int r = 0; r < g->size; r++) {
            const size_t left = total[r] > lo ? total[r] - lo : 0;
            window[r + 1] = window[r] + (left < PIECE_BYTES ? left : PIECE_BYTES);
        }
        const size_t mine = window[g->rank + 1] - window[g->rank];
        TRY(move_stream(g, whole, at, n_parts, g->rank, lo, lo + mine, g->host.in + window[g->rank], true));
        TRY(comm_all_gather(g->comm, g->host.in, window));
        for (int r = 0; r < g->size; r++)
            if (r != g->rank)
                TRY(move_stream(g, whole, at, n_parts, r, lo, lo + window[r + 1] - window[r], g->host.in + window[r], false));
    }
    return 0;
}
