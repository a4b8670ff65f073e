/* async_schedule.c - see async_schedule.h. */
#include "track/async_schedule.h"

#include "base/buf.h"
#include "base/err.h"
#include "base/file.h"

#include <sqlite3.h>
#include <stdlib.h>
#include <string.h>

static int read_row(struct track_schedule *s, int64_t *cap, sqlite3_stmt *st, const char *path) {
    const size_t bytes = (size_t)sqlite3_column_bytes(st, 4);
    const void *runs = sqlite3_column_blob(st, 4);
    if (bytes % (2 * sizeof(int32_t)) != 0) FAIL(ERR_FORMAT, "%s: the versions of a sample are damaged", path);
    const int64_t number = sqlite3_column_int64(st, 0), sample = sqlite3_column_int64(st, 1);
    struct track_schedule_row *r = s->n > 0 ? &s->rows[s->n - 1] : NULL;
    if (r && r->number == number && r->sample == sample) { /* an episode of several samples: the last one */
        free(r->runs);
    } else {
        xgrow((void **)&s->rows, cap, s->n + 1, sizeof *s->rows);
        r = &s->rows[s->n++];
    }
    *r = (struct track_schedule_row){.number = number,
                                     .sample = sample,
                                     .step = sqlite3_column_int64(st, 2),
                                     .place = sqlite3_column_int64(st, 3),
                                     .n_runs = (int64_t)(bytes / (2 * sizeof(int32_t))),
                                     .runs = xmalloc(bytes + 1)};
    if (bytes) memcpy(r->runs, runs, bytes);
    for (int64_t i = 0; i < r->n_runs; i++)
        if (r->runs[2 * i] < 1 || (i > 0 && r->runs[2 * i + 1] <= r->runs[2 * i - 1]))
            FAIL(ERR_FORMAT, "%s: the versions of a sample are damaged", path);
    return 0;
}

static int read_rows(struct track_schedule *s, sqlite3 *db, const char *path) {
    sqlite3_stmt *st = NULL;
    int64_t cap = 0;
    int rc = 0, got;
    if (sqlite3_prepare_v2(db,
                           "SELECT prompt_number, sample, step, place, versions FROM samples"
                           " WHERE validation = 0 AND place IS NOT NULL ORDER BY prompt_number, sample, id",
                           -1, &st, NULL) != SQLITE_OK)
        FAIL(ERR_INPUT, "%s: %s; it must be the run.db of a fully asynchronous run", path, sqlite3_errmsg(db));
    while ((got = sqlite3_step(st)) == SQLITE_ROW && rc == 0) rc = read_row(s, &cap, st, path);
    if (rc == 0 && got != SQLITE_DONE) rc = err_set(ERR_FORMAT, __FILE__, __LINE__, "%s: %s", path, sqlite3_errmsg(db));
    if (rc == 0 && s->n == 0) rc = err_set(ERR_INPUT, __FILE__, __LINE__, "%s: no step of a fully asynchronous run is in it", path);
    sqlite3_finalize(st);
    return rc;
}

int track_schedule_read(struct track_schedule *out, const char *path) {
    char *file = file_is_dir(path) ? file_join(path, "run.db") : xstrdup(path);
    sqlite3 *db = NULL;
    int rc = 0;
    *out = (struct track_schedule){0};
    if (sqlite3_open_v2(file, &db, SQLITE_OPEN_READONLY, NULL) != SQLITE_OK)
        rc = err_set(ERR_INPUT, __FILE__, __LINE__, "%s: %s", file, sqlite3_errmsg(db));
    if (rc == 0) rc = read_rows(out, db, file);
    sqlite3_close(db);
    free(file);
    if (rc < 0) track_schedule_free(out);
    return rc;
}

void track_schedule_free(struct track_schedule *s) {
    for (int64_t i = 0; i < s->n; i++) free(s->rows[i].runs);
    free(s->rows);
    *s = (struct track_schedule){0};
}

static int by_prompt(const void *x, const void *y) {
    const struct track_schedule_row *a = x, *b = y;
    if (a->number != b->number) return a->number < b->number ? -1 : 1;
    return a->sample < b->sample ? -1 : a->sample > b->sample;
}

const struct track_schedule_row *track_schedule_find(const struct track_schedule *s, int64_t number, int64_t sample) {
    const struct track_schedule_row key = {.number = number, .sample = sample};
    return s->n ? bsearch(&key, s->rows, (size_t)s->n, sizeof key, by_prompt) : NULL;
}
