/* run_reader_int.h - what the files of the reader share: an open database, and rows of it with their types checked.
 * Private to view. */
#ifndef VERLC_VIEW_RUN_READER_INT_H
#define VERLC_VIEW_RUN_READER_INT_H

#include "view/run_reader.h"

#include <sqlite3.h>

enum reader__column {
    COLUMN_ENTROPY,
    COLUMN_REF_LOGP,
    COLUMN_ADVANTAGES,
    COLUMN_REWARD_MESSAGE,
    COLUMN_TOKEN_BYTES,
    COLUMN_VERSIONS,
    COLUMN_PROMPT_BYTES,
    COLUMN_SEGMENTS,
    COLUMN_EPISODE,
    N_COLUMNS
};

struct run_reader {
    sqlite3 *db;
    char *dir, *path;
    double deadline; /* clock_now at which a query is given up */
    int64_t format;
    bool has_status, has_events, has_histograms, has[N_COLUMNS]; /* has: columns of samples */
};

/* ---- rows: a query, then reader__row until it is not 1, then sqlite3_finalize ---- */
int reader__query(struct run_reader *r, sqlite3_stmt **st, const char *sql);
int reader__row(struct run_reader *r, sqlite3_stmt *st); /* 1: a row; 0: no more; the error of the database */

/* ---- a row's values; one of another type is 0, NaN or empty ---- */
int64_t reader__i64(sqlite3_stmt *st, int column);
double reader__f64(sqlite3_stmt *st, int column); /* NaN: NULL */
/* Texts of a row live in a list until reader__texts_free. */
struct reader__texts {
    char *v[16];
    int n;
};
struct track_text reader__text(sqlite3_stmt *st, int column, struct reader__texts *keep); /* never NULL; NUL at the end; repaired */
bool reader__is_text(sqlite3_stmt *st, int column);
void reader__texts_free(struct reader__texts *t);

#endif
