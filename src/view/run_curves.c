/* run_curves.c - several metrics of a run in one pass over its rows, which lie by step and name. */
#include "view/run_reader_int.h"

#include "base/buf.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

enum { MAX_POINTS = 10000000 }; /* rows looked at */

struct wanted {
    const char *name;
    struct run_series *into;
};
static int by_name(const void *a, const void *b) {
    return strcmp(((const struct wanted *)a)->name, ((const struct wanted *)b)->name);
}

static void add_point(struct run_series *s, int64_t step, double value) {
    int64_t cap = s->cap; /* of both arrays */
    xgrow((void **)&s->step, &cap, s->n + 1, sizeof *s->step);
    xgrow((void **)&s->value, &s->cap, s->n + 1, sizeof *s->value);
    s->step[s->n] = step;
    s->value[s->n++] = value;
}

int run_reader_curves(struct run_reader *r, const char *const *names, int n, int64_t after, struct run_series *out) {
    sqlite3_stmt *st;
    struct wanted *w = xcalloc((size_t)n, sizeof *w);
    int rc = reader__query(r, &st, "SELECT step, name, value FROM metrics WHERE step > ? ORDER BY step, name LIMIT ?");
    int at = 0;
    int64_t step = -1;
    for (int i = 0; i < n; i++) {
        out[i] = (struct run_series){0};
        w[i] = (struct wanted){names[i], &out[i]};
    }
    qsort(w, (size_t)n, sizeof *w, by_name);
    if (rc == 0) {
        sqlite3_bind_int64(st, 1, after);
        sqlite3_bind_int64(st, 2, MAX_POINTS);
        while ((rc = reader__row(r, st)) == 1) {
            const int64_t row_step = reader__i64(st, 0);
            const char *name = reader__is_text(st, 1) ? (const char *)sqlite3_column_text(st, 1) : NULL;
            if (row_step != step) at = 0;
            step = row_step;
            while (name && at < n && strcmp(w[at].name, name) < 0) at++;
            for (int k = at; name && k < n && strcmp(w[k].name, name) == 0; k++) add_point(w[k].into, step, reader__f64(st, 2));
        }
        sqlite3_finalize(st);
    }
    free(w);
    for (int i = 0; i < n && rc < 0; i++) run_series_free(&out[i]);
    return rc;
}
