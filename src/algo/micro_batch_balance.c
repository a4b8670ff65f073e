/* micro_batch_balance.c - rows assigned to micro-batches so that each has about the same work and
 * none more than its tokens or rows.
 *
 * The largest differencing method of Karmarkar and Karp (1982) over 24576 L + L^2, the work of a row
 * of L tokens in a 7B decoder; its balanced form (Tsai, 1992), which starts from groups of one row for each
 * micro-batch, where rows are limited; more micro-batches until every one is within its tokens.
 * verl's rearrange_micro_batches on one rank (verl.utils.seqlen_balancing) is the first, one more micro-batch
 * at a time, with the largest in the middle.  Invariant: every comparison is a total order on the
 * rows, so the answer does not depend on how things are sorted. */
#include "algo/micro_batch_balance.h"

#include "base/buf.h"
#include "base/err.h"

#include <stdbool.h>
#include <stdlib.h>
#include <string.h>

enum { MAX_LEN = 1 << 24 }; /* tokens of a row: the work of 32,000 such rows fits in 64 bits */

/* A micro-batch to be: a list of rows through next[]. */
struct part {
    int64_t work, n, first, last;
};
/* One partial solution: at most k parts, the largest first; missing ones are empty. */
struct state {
    struct part *part;
    int64_t n;
};

static int64_t work_of(int64_t len) { return 24576 * len + len * len; }

static int compare_parts(const void *x, const void *y) { /* descending */
    const struct part *a = x, *b = y;
    if (a->work != b->work) return a->work > b->work ? -1 : 1;
    if (a->n != b->n) return a->n > b->n ? -1 : 1;
    return (a->first < b->first) - (a->first > b->first); /* lists are disjoint: their first rows decide */
}

static int64_t spread(const struct state *s, int64_t k) { return s->part[0].work - (s->n == k ? s->part[k - 1].work : 0); }

/* Whether a is taken before b: the wider one, then that with the larger first part. */
static bool before(const struct state *a, const struct state *b, int64_t k) {
    const int64_t x = spread(a, k), y = spread(b, k);
    return x != y ? x > y : compare_parts(&a->part[0], &b->part[0]) < 0;
}

static void sift_down(struct state *heap, int64_t n, int64_t i, int64_t k) {
    for (int64_t c; (c = 2 * i + 1) < n; i = c) {
        if (c + 1 < n && before(&heap[c + 1], &heap[c], k)) c++;
        if (!before(&heap[c], &heap[i], k)) return;
        const struct state t = heap[i];
        heap[i] = heap[c];
        heap[c] = t;
    }
}

static struct state pop(struct state *heap, int64_t *n, int64_t k) {
    const struct state top = heap[0];
    heap[0] = heap[--*n];
    sift_down(heap, *n, 0, k);
    return top;
}

static void push(struct state *heap, int64_t *n, struct state s, int64_t k) {
    int64_t i = (*n)++;
    for (; i > 0 && before(&s, &heap[(i - 1) / 2], k); i = (i - 1) / 2) heap[i] = heap[(i - 1) / 2];
    heap[i] = s;
}

/* a's largest parts with b's smallest and so on; consumes both. The parts of a that b's do not reach stay sorted. */
static struct state merge(struct state a, struct state b, int64_t k, int64_t *next) {
    const int64_t n = a.n + b.n < k ? a.n + b.n : k, kept = n - b.n;
    struct part *out = xmalloc((size_t)n * sizeof *out), *tail = b.part;
    for (int64_t i = kept; i < a.n; i++) { /* b's part at the other end of the k */
        struct part *p = &b.part[k - 1 - i];
        next[a.part[i].last] = p->first;
        *p = (struct part){a.part[i].work + p->work, a.part[i].n + p->n, a.part[i].first, p->last};
    }
    qsort(tail, (size_t)b.n, sizeof *tail, compare_parts);
    for (int64_t o = 0, i = 0, j = 0; o < n; o++)
        out[o] = j == b.n || (i < kept && compare_parts(&a.part[i], &tail[j]) < 0) ? a.part[i++] : tail[j++];
    free(a.part);
    free(b.part);
    return (struct state){out, n};
}

struct weighed { /* a row, for sorting by its work */
    int64_t work, row;
};
static int compare_weighed(const void *x, const void *y) { /* descending */
    const struct weighed *a = x, *b = y;
    if (a->work != b->work) return a->work > b->work ? -1 : 1;
    return (a->row > b->row) - (a->row < b->row);
}

/* k parts, 1 <= k <= n, none of them empty. even: none has more than ceil(n / k) rows. */
static struct state partition(const int64_t *len, int64_t n, int64_t k, bool even, int64_t *next) {
    const int64_t group = even ? k : 1; /* rows that begin in different parts */
    struct state *heap = xmalloc((size_t)n * sizeof *heap);
    struct weighed *order = xmalloc((size_t)n * sizeof *order);
    int64_t size = 0;
    for (int64_t i = 0; i < n; i++) {
        order[i] = (struct weighed){work_of(len[i]), i};
        next[i] = -1;
    }
    if (even) qsort(order, (size_t)n, sizeof *order, compare_weighed);
    for (int64_t lo = 0; lo < n; lo += group) {
        struct state s = {.n = n - lo < group ? n - lo : group};
        s.part = xmalloc((size_t)s.n * sizeof *s.part);
        for (int64_t i = 0; i < s.n; i++) {
            const struct weighed *o = &order[lo + i];
            s.part[i] = (struct part){o->work, 1, o->row, o->row};
        }
        qsort(s.part, (size_t)s.n, sizeof *s.part, compare_parts);
        push(heap, &size, s, k);
    }
    free(order);
    while (size > 1) {
        const struct state a = pop(heap, &size, k), b = pop(heap, &size, k);
        push(heap, &size, merge(a, b, k, next), k);
    }
    const struct state all = heap[0];
    free(heap);
    return all;
}

static bool fits(const struct state *s, const int64_t *len, const int64_t *next, int64_t max_tokens) {
    for (int64_t i = 0; i < s->n; i++) {
        int64_t tokens = 0;
        for (int64_t r = s->part[i].first; r >= 0; r = next[r]) tokens += len[r];
        if (tokens > max_tokens) return false;
    }
    return true;
}

static int ascending(const void *x, const void *y) {
    const int64_t a = *(const int64_t *)x, b = *(const int64_t *)y;
    return (a > b) - (a < b);
}

/* No fewer micro-batches can hold the rows: rows over half of the tokens share none, and of the others only the short ones fit next
 * to them (Martello and Toth, 1990, L2). sorted: ascending. */
static int64_t fewest(const int64_t *sorted, int64_t n, int64_t max_tokens) {
    int64_t total = 0, large = 0, best;
    for (int64_t i = 0; i < n; i++) {
        total += sorted[i];
        large += 2 * sorted[i] > max_tokens;
    }
    best = (total + max_tokens - 1) / max_tokens;
    int64_t middle = 0, room = large * max_tokens, top = n; /* rows >= small and <= half; room next to rows that leave small */
    for (int64_t i = n - 1; i >= n - large; i--) room -= sorted[i];
    for (int64_t i = 0; i < n - large; i++) middle += sorted[i];
    for (int64_t i = 0; i < n - large; middle -= sorted[i++]) {
        for (; top > n - large && sorted[top - 1] > max_tokens - sorted[i]; top--) room -= max_tokens - sorted[top - 1];
        const int64_t over = middle - room;
        const int64_t need = large + (over > 0 ? (over + max_tokens - 1) / max_tokens : 0);
        if (need > best) best = need;
    }
    return best > large ? best : large;
}

struct micro_batch { /* a part with its rows in ascending order, for the last sort */
    int64_t work, at, n, first;
};

static int compare_micro_batches(const void *x, const void *y) { /* descending */
    const struct micro_batch *a = x, *b = y;
    if (a->work != b->work) return a->work > b->work ? -1 : 1;
    return (a->first < b->first) - (a->first > b->first);
}

/* Rows and ends of the micro-batches: the largest first, or in the middle, the smaller ones towards both ends. */
static int64_t lay_out(const struct state *s, const int64_t *next, bool largest_first, int64_t *row, int64_t *end) {
    struct micro_batch *parts = xmalloc((size_t)s->n * sizeof *parts);
    int64_t n_rows = 0;
    for (int64_t i = 0; i < s->n; i++) n_rows += s->part[i].n;
    int64_t *rows = xmalloc((size_t)n_rows * sizeof *rows), at = 0;
    for (int64_t i = 0; i < s->n; i++) {
        parts[i] = (struct micro_batch){.work = s->part[i].work, .at = at, .n = s->part[i].n};
        for (int64_t r = s->part[i].first; r >= 0; r = next[r]) rows[at++] = r;
        qsort(rows + parts[i].at, (size_t)parts[i].n, sizeof *rows, ascending);
        parts[i].first = rows[parts[i].at];
    }
    qsort(parts, (size_t)s->n, sizeof *parts, compare_micro_batches);
    at = 0;
    const int64_t half = (s->n + 1) / 2;
    for (int64_t o = 0; o < s->n; o++) { /* in the middle: the even places backwards, then the odd ones */
        const struct micro_batch *p = &parts[largest_first ? o : o < half ? 2 * (half - 1 - o) : 2 * (o - half) + 1];
        memcpy(row + at, rows + p->at, (size_t)p->n * sizeof *row);
        at += p->n;
        end[o] = at;
    }
    free(rows);
    free(parts);
    return s->n;
}

static int check(const int64_t *len, int64_t n, int64_t max_tokens) {
    if (n < 1 || n > INT64_MAX / work_of(MAX_LEN))
        FAIL(ERR_INVAL, "micro-batches of %lld rows: expected 1 to %lld", (long long)n, (long long)(INT64_MAX / work_of(MAX_LEN)));
    if (max_tokens < 1 || max_tokens > INT64_MAX / 2)
        FAIL(ERR_INVAL, "max_token_len=%lld: expected a number above 0", (long long)max_tokens);
    for (int64_t i = 0; i < n; i++)
        if (len[i] < 0 || len[i] > max_tokens || len[i] > MAX_LEN)
            FAIL(ERR_INVAL, "row %lld has %lld tokens, a micro-batch takes 0 to %lld", (long long)i, (long long)len[i],
                 (long long)(max_tokens < MAX_LEN ? max_tokens : MAX_LEN));
    return 0;
}

/* The fewest micro-batches that max_tokens allows; work: (n). */
static int64_t fewest_of(const int64_t *len, int64_t n, int64_t max_tokens, int64_t *work) {
    memcpy(work, len, (size_t)n * sizeof *work);
    qsort(work, (size_t)n, sizeof *work, ascending);
    const int64_t k = fewest(work, n, max_tokens);
    return k < 1 ? 1 : k; /* rows without tokens */
}

int algo_micro_batches(const int64_t *len, int64_t n, int64_t max_tokens, int64_t *row, int64_t *end, int64_t *n_micro) {
    TRY(check(len, n, max_tokens));
    int64_t *next = xmalloc((size_t)n * sizeof *next), k = fewest_of(len, n, max_tokens, next);
    struct state s = partition(len, n, k, false, next);
    while (!fits(&s, len, next, max_tokens)) { /* ends at one row each, at the latest */
        free(s.part);
        s = partition(len, n, ++k, false, next);
    }
    *n_micro = lay_out(&s, next, false, row, end);
    free(s.part);
    free(next);
    return 0;
}

/* What ranks share evenly, k at least. */
static int64_t rounded_up(int64_t k) {
    int64_t r = 1;
    while (r < k && r < 8) r *= 2;
    return k <= 8 ? r : (k + 7) / 8 * 8;
}

int64_t algo_update_micro_batch_count(int64_t rows, int64_t each) {
    const int64_t k = rounded_up((rows + each - 1) / each);
    return k < rows ? k : rows;
}

int algo_update_micro_batches(const struct algo_update_rows *u, int64_t *row, int64_t *end, int64_t *n_micro) {
    const bool by_rows = u->max_rows > 0;
    const int64_t *const len = u->len, n = u->n, max_tokens = by_rows ? INT64_MAX / 2 : u->max_tokens;
    TRY(check(len, n, max_tokens));
    int64_t *next = xmalloc((size_t)n * sizeof *next),
            k = by_rows ? (n + u->max_rows - 1) / u->max_rows : fewest_of(len, n, max_tokens, next);
    struct state s = {0};
    do { /* ends at one row each, at the latest */
        free(s.part);
        k = rounded_up(k) < n ? rounded_up(k) : n;
        s = partition(len, n, k++, by_rows, next);
    } while (!fits(&s, len, next, max_tokens));
    *n_micro = lay_out(&s, next, true, row, end);
    free(s.part);
    free(next);
    return 0;
}
