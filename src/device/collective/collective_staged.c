/* collective_staged.c - a fold whose summands a transport brings: what each rank sends to whom, piece by piece, and what is added
 * in which order; and an all-to-all.
 *
 * Summands go from where they are to slots of a bounded size, a piece of each rank at a time. Of the rows of the token embedding a
 * rank sends, with the piece that they belong to, the sums of equal ids: one row for each id, in ascending order, made as
 * dev_embed_bwd makes them. The ids themselves go through the host: so every rank knows what comes.
 * Invariant: all ranks compute the same pieces and rows, so the transport sees calls that fit everywhere. */
#include "device/collective/collective_int.h"

#include "base/buf.h"

#include <stdlib.h>
#include <string.h>

enum { ALIGN = 256 }; /* bytes: a piece lies in its slot as in the summand modulo this */

/* ---- rows of the token embedding ---- */

/* The ids of all ranks, each one's ascending and distinct. */
struct rows {
    int32_t *ids;       /* host: rank r's at at[r]..at[r + 1]; behind them, for each of this rank's rows, which of its ids it has */
    int64_t *at;        /* (size + 1) */
    const int32_t *dev; /* both on the device */
};

static void rows_free(struct rows *w) {
    free(w->ids);
    free(w->at);
}

/* The ids of all ranks as they are, rank r's at first[r]..first[r + 1]. */
static int gather_ids(struct collective *g, const struct dev_bucket *b, int32_t **all, size_t *first) {
    const size_t unit = sizeof **all;
    size_t at[COMM_MOST_RANKS + 1] = {0};
    for (int r = 0; r < g->size; r++) {
        first[r + 1] = first[r] + (r < b->n ? (size_t)b->n_rows[r] : 0);
        at[r + 1] = first[r + 1] * unit;
    }
    *all = xmalloc(at[g->size] + 1);
    if (first[g->size] == 0) return 0;
    TRY(dev_copy_out(g->d, *all + first[g->rank], b->ids, at[g->rank + 1] - at[g->rank]));
    TRY(comm_all_gather(g->comm, *all, at));
    const int64_t vocab = b->cut[g->size] / b->width;
    for (size_t i = 0; i < first[g->size]; i++)
        if ((*all)[i] < 0 || (*all)[i] >= vocab)
            FAIL(ERR_INVAL, "dev group: token %d in a table of %lld rows", (int)(*all)[i], (long long)vocab);
    return 0;
}

/* A set of ids: a bit for each, and how many come before each word of 64. */
struct id_set {
    uint64_t *bits;
    int32_t *before;
    int64_t words;
};

/* ids as a set; its members to `out`, ascending; how many. */
static int64_t make_set(struct id_set *s, const int32_t *ids, size_t n, int32_t *out) {
    int32_t count = 0;
    memset(s->bits, 0, (size_t)s->words * sizeof *s->bits);
    for (size_t i = 0; i < n; i++) s->bits[ids[i] / 64] |= (uint64_t)1 << ids[i] % 64;
    for (int64_t k = 0; k < s->words; k++) {
        s->before[k] = count;
        for (uint64_t left = s->bits[k]; left; left &= left - 1) out[count++] = (int32_t)(k * 64 + __builtin_ctzll(left));
    }
    return count;
}
static int32_t place_in(const struct id_set *s, int32_t id) {
    const uint64_t below = ((uint64_t)1 << id % 64) - 1;
    return s->before[id / 64] + __builtin_popcountll(s->bits[id / 64] & below);
}

static void distinct_ids(struct collective *g, int64_t vocab, const int32_t *all, const size_t *first, struct rows *w) {
    const size_t own = first[g->rank + 1] - first[g->rank];
    struct id_set s = {.words = (vocab + 63) / 64};
    s.bits = xmalloc((size_t)s.words * sizeof *s.bits + 1);
    s.before = xmalloc((size_t)s.words * sizeof *s.before + 1);
    w->ids = xmalloc((first[g->size] + own) * sizeof *w->ids + 1);
    int32_t *const places = xmalloc(own * sizeof *places + 1);
    for (int r = 0; r < g->size; r++) {
        w->at[r + 1] = w->at[r] + make_set(&s, all + first[r], first[r + 1] - first[r], w->ids + w->at[r]);
        for (size_t i = 0; r == g->rank && i < own; i++) places[i] = place_in(&s, all[first[r] + i]);
    }
    memcpy(w->ids + w->at[g->size], places, own * sizeof *places);
    free(places);
    free(s.before);
    free(s.bits);
}

static int plan_rows(struct collective *g, const struct dev_bucket *b, struct rows *w) {
    size_t first[COMM_MOST_RANKS + 1] = {0};
    int32_t *all = NULL;
    const int rc = gather_ids(g, b, &all, first);
    w->at = xcalloc((size_t)g->size + 1, sizeof *w->at);
    if (rc >= 0) distinct_ids(g, b->cut[g->size] / b->width, all, first, w);
    free(all);
    return rc;
}

/* How many of rank r's ids are below `id`. */
static int64_t ids_below(const struct rows *w, int r, int64_t id) {
    int64_t lo = w->at[r], hi = w->at[r + 1];
    while (lo < hi) {
        const int64_t mid = (lo + hi) / 2;
        if (w->ids[mid] < id) lo = mid + 1;
        else hi = mid;
    }
    return lo - w->at[r];
}

/* ---- pieces ---- */

/* A fold: what of it does not change from piece to piece. */
struct folding {
    struct collective *g;
    const struct dev_bucket *b;
    struct rows rows;
    struct dev_slots slots; /* of the piece at hand */
    int64_t piece;          /* elements; 0: not known before the first slots are */
};

/* Elements [lo, hi) of the bucket. */
struct range {
    int64_t lo, hi;
};
static struct range piece_of(const struct folding *f, int r, int64_t k) {
    const int64_t end = f->b->cut[r + 1], from = f->b->cut[r] + k * f->piece;
    const struct range p = {from < end ? from : end, end - from < f->piece ? end : from + f->piece};
    return p;
}

/* Those of rank r's ids, ascending, of which a part is in the range: count, and the first one's place. */
static int64_t rows_in(const struct folding *f, int r, struct range p, int64_t *first) {
    *first = 0;
    if (p.lo >= p.hi) return 0;
    *first = ids_below(&f->rows, r, p.lo / f->b->width);
    return ids_below(&f->rows, r, (p.hi - 1) / f->b->width + 1) - *first;
}

/* Whether the rows of every piece fit a half of a slot. */
static bool rows_fit(const struct folding *f) {
    const int64_t most = (int64_t)(f->slots.bytes / 2 / sizeof(float)) / f->b->width;
    int64_t first;
    for (int to = 0; to < f->g->size; to++)
        for (int64_t k = 0; k * f->piece < f->b->cut[to + 1] - f->b->cut[to]; k++)
            for (int r = 0; r < f->b->n; r++)
                if (r != to && rows_in(f, r, piece_of(f, to, k), &first) > most) return false;
    return true;
}

static int times_of(const struct dev_bucket *b, int r) { return b->times ? b->times[r] : 1; }
static int most_times(const struct dev_bucket *b) {
    int most = 1;
    for (int r = 0; r < b->n; r++) most = times_of(b, r) > most ? times_of(b, r) : most;
    return most;
}

/* With rows a half of a slot is for the piece, the other for its rows. Rows alone: as few pieces as they allow. Of several summands
 * each has its share of the slot. */
static int size_pieces(struct folding *f) {
    const struct dev_bucket *const b = f->b;
    const int64_t room = (int64_t)(f->slots.bytes / sizeof(float)), pad = ALIGN / sizeof(float);
    const int64_t times = b->x ? most_times(b) : 1;
    f->piece = b->ids ? room / 2 - 2 * b->width - pad : room - pad;
    if (times > 1) f->piece = room / (b->ids ? 2 : 1) / times / pad * pad - pad;
    if (b->ids && f->piece > room / 2 - 2 * b->width - pad) f->piece = room / 2 - 2 * b->width - pad;
    if (f->piece < 1) FAIL(ERR_UNSUPPORTED, "dev group: rows of %lld elements among %d ranks", (long long)b->width, f->g->size);
    if (b->x) return 0;
    const int64_t least = f->piece;
    for (f->piece = b->cut[f->g->size]; f->piece > least && !rows_fit(f);) f->piece /= 2;
    if (f->piece < least) f->piece = least;
    return 0;
}

/* The place of rank r among the others. */
static int slot_of(const struct folding *f, int r) { return r < f->g->rank ? r : r - 1; }
static char *in_slot(const struct folding *f, int r) { return f->slots.in + (size_t)slot_of(f, r) * f->slots.bytes; }

/* Elements p of rank r's summand i, where they are on this rank once they have come. */
static struct tensor summand(const struct folding *f, struct range p, int r, int i) {
    const struct dev_bucket *const b = f->b;
    const float *const own = b->x + i * b->stride + p.lo;
    const size_t room = (((size_t)f->piece * sizeof *b->x + ALIGN - 1) / ALIGN + 1) * ALIGN;
    char *const come = r == f->g->rank ? NULL : in_slot(f, r) + (size_t)i * room + ((uintptr_t)own & (ALIGN - 1));
    return tensor_1d(come ? (void *)come : (void *)(uintptr_t)own, DT_F32, p.hi - p.lo);
}

/* Piece k of the i-th summands, from all ranks that have one. */
static int exchange_piece(struct folding *f, int64_t k, int i) {
    const struct dev_bucket *const b = f->b;
    const int own = f->g->rank;
    struct dev_part out[COMM_MOST_RANKS] = {{0}}, in[COMM_MOST_RANKS] = {{0}};
    const struct range mine = piece_of(f, own, k);
    for (int r = 0; r < f->g->size; r++) {
        const struct range p = piece_of(f, r, k);
        const bool sends = r != own && own < b->n && i < times_of(b, own), takes = r != own && r < b->n && i < times_of(b, r);
        const float *const from = b->x + i * b->stride + p.lo;
        if (sends) out[r] = (struct dev_part){(void *)(uintptr_t)from, (size_t)(p.hi - p.lo) * sizeof *b->x};
        if (takes) in[r] = (struct dev_part){summand(f, mine, r, i).data, (size_t)(mine.hi - mine.lo) * sizeof *b->x};
    }
    return f->g->move->exchange(f->g->t, out, in);
}

/* The sums of this rank's rows that belong to piece p of rank r, where they are sent from. */
static int make_sums(struct folding *f, int r, struct range p, struct dev_part *out) {
    const struct collective *const g = f->g;
    const int64_t ids = f->rows.at[g->rank + 1] - f->rows.at[g->rank], n_rows = f->b->n_rows[g->rank], width = f->b->width;
    int64_t first;
    const int64_t n = rows_in(f, g->rank, p, &first);
    if (n == 0) return 0;
    *out = (struct dev_part){f->slots.out + (size_t)slot_of(f, r) * (f->slots.bytes / 2), (size_t)(n * width) * sizeof(float)};
    const int32_t *const places = f->rows.dev + f->rows.at[g->size];
    return g->move->sum_rows(g->t, tensor_1d(out->p, DT_F32, n * width), first * width, ids,
                             tensor_1d((void *)(uintptr_t)places, DT_I32, n_rows),
                             tensor_2d((void *)(uintptr_t)f->b->dx, DT_F32, n_rows, width));
}

/* The sums of rows that belong to piece k: ids and rows (size); this rank's own are as they came. */
static int exchange_rows(struct folding *f, int64_t k, struct tensor *ids, struct tensor *rows) {
    const struct dev_bucket *const b = f->b;
    const int own = f->g->rank;
    struct dev_part out[COMM_MOST_RANKS] = {{0}}, in[COMM_MOST_RANKS] = {{0}};
    const struct range mine = piece_of(f, own, k);
    for (int r = 0; r < f->g->size; r++) {
        int64_t first, n = rows_in(f, r, mine, &first);
        const int32_t *id = f->rows.dev + f->rows.at[r] + first;
        const void *from = b->dx;
        if (r == own) {
            n = r < b->n ? b->n_rows[r] : 0;
            id = b->ids;
        } else {
            if (own < b->n) TRY(make_sums(f, r, piece_of(f, r, k), &out[r]));
            from = in_slot(f, r) + f->slots.bytes / 2;
            in[r] = (struct dev_part){(void *)(uintptr_t)from, (size_t)(n * b->width) * sizeof(float)};
        }
        ids[r] = tensor_1d((void *)(uintptr_t)id, DT_I32, n);
        rows[r] = tensor_2d((void *)(uintptr_t)from, DT_F32, n, b->width);
    }
    return f->g->move->exchange(f->g->t, out, in);
}

/* Elements p of the bucket, with its summands if it has any; ids and rows (or NULL) have what is added of the table. */
static int add_up(struct folding *f, struct range p, const struct tensor *ids, const struct tensor *rows) {
    const struct dev_bucket *const b = f->b;
    const struct dev_transport_ops *const move = f->g->move;
    void *const t = f->g->t;
    if (p.lo >= p.hi) return 0;
    const struct tensor y = tensor_1d(b->own + (p.lo - b->cut[f->g->rank]), DT_F32, p.hi - p.lo);
    if (!b->x && !b->add) TRY(move->zero(t, y.data, (size_t)(p.hi - p.lo) * sizeof(float)));
    struct tensor x[COMM_MOST_RANKS + DEV_BUCKET_TIMES];
    bool add = b->add;
    for (int r = 0, n = 0; r < b->n; r++) { /* of several ranks at a time, but where rows come between */
        for (int i = 0; b->x && i < times_of(b, r); i++) x[n++] = summand(f, p, r, i);
        if (n > 0 && (ids || r == b->n - 1 || n >= COMM_MOST_RANKS)) {
            TRY(move->fold(t, y, x, n, add));
            add = true;
            n = 0;
        }
        if (ids && ids[r].dim[0] > 0) TRY(move->add_rows(t, y, p.lo, b->cut[f->g->size] / b->width, ids[r], rows[r]));
    }
    return 0;
}

static int fold_piece(struct folding *f, int64_t k) {
    struct tensor ids[COMM_MOST_RANKS], rows[COMM_MOST_RANKS];
    for (int i = 0; f->b->x && i < most_times(f->b); i++) TRY(exchange_piece(f, k, i));
    if (f->b->ids) TRY(exchange_rows(f, k, ids, rows));
    return add_up(f, piece_of(f, f->g->rank, k), f->b->ids ? ids : NULL, rows);
}

/* Pieces of the rank that has most. */
static int64_t count_pieces(const struct folding *f) {
    int64_t most = 0;
    for (int r = 0; r < f->g->size; r++) {
        const int64_t n = (f->b->cut[r + 1] - f->b->cut[r] + f->piece - 1) / f->piece;
        most = n > most ? n : most;
    }
    return most;
}

static int start(struct folding *f) {
    const struct collective *const g = f->g;
    TRY(g->move->begin(g->t));
    if (f->b->ids) {
        const int64_t places = g->rank < f->b->n ? f->b->n_rows[g->rank] : 0;
        TRY(g->move->ids(g->t, f->rows.ids, f->rows.at[g->size] + places, &f->rows.dev));
    }
    TRY(g->move->turn(g->t, &f->slots));
    return size_pieces(f);
}

int collective_staged_fold(struct collective *g, const struct dev_bucket *b) {
    struct folding f = {.g = g, .b = b};
    int rc = 0;
    if (b->ids) TRYG(plan_rows(g, b, &f.rows), out);
    TRYG(start(&f), out);
    for (int64_t k = 0, n = count_pieces(&f); k < n; k++) {
        if (k > 0) TRYG(g->move->turn(g->t, &f.slots), out);
        TRYG(fold_piece(&f, k), out);
    }
    TRYG(g->move->end(g->t), out);
out:
    rows_free(&f.rows);
    return rc;
}

/* ---- all-to-all ---- */

/* Bytes [lo, hi) of n. */
static size_t piece_bytes(size_t n, size_t lo, size_t room) { return n <= lo ? 0 : n - lo < room ? n - lo : room; }

int collective_staged_exchange(struct collective *g, const struct dev_exchange *x) {
    struct dev_slots slots;
    size_t most = 0;
    for (int i = 0; i < g->size * g->size; i++)
        if (i % g->size != i / g->size && x->bytes[i] > most) most = x->bytes[i];
    TRY(g->move->begin(g->t));
    TRY(g->move->turn(g->t, &slots));
    for (size_t lo = 0; lo < most; lo += slots.bytes) {
        struct dev_part out[COMM_MOST_RANKS] = {{0}}, in[COMM_MOST_RANKS] = {{0}};
        char *to = x->to;
        if (lo > 0) TRY(g->move->turn(g->t, &slots));
        for (int r = 0; r < g->size; r++) {
            const int sent = g->rank * g->size + r, taken = r * g->size + g->rank;
            char *const from = (char *)(uintptr_t)x->from + x->at[sent] + lo;
            if (r != g->rank) out[r] = (struct dev_part){from, piece_bytes(x->bytes[sent], lo, slots.bytes)};
            if (r != g->rank) in[r] = (struct dev_part){to + lo, piece_bytes(x->bytes[taken], lo, slots.bytes)};
            to += x->bytes[taken];
        }
        TRY(g->move->exchange(g->t, out, in));
    }
    TRY(g->move->end(g->t));
    return g->move->join(g->t);
}
