/* run_db_store.h - rows on their way to run.db: what cannot be written there now is kept, and written later; private to track.
 *
 * Records are inserted into a database in memory (the stage). A flush moves its rows to run.db in one transaction; where
 * run.db is locked, its disk full or the file read-only, to RUN_DIR/run.kept.db, and where that fails too they stay in
 * memory. Every flush tries run.db again, at most twice a second, and what was kept goes first.
 * Invariant: a row is in exactly one of the three until run.db has it, within MAX_STAGE bytes of memory. */
#ifndef VERLC_TRACK_RUN_DB_STORE_H
#define VERLC_TRACK_RUN_DB_STORE_H

#include <sqlite3.h>
#include <stdbool.h>
#include <stdint.h>

struct run_db_store;
/* Opens run.db of the directory, which may be new, with schema, and takes in what an earlier run kept, unless fresh: then it is
 * removed. schema: SQL, and a function that adds what an older database lacks. ERR_IO names who may have locked it. */
struct run_db_store_args {
    const char *dir, *schema;
    int (*complete)(sqlite3 *db, const char *path);
    bool fresh;
};
int run_db_store_open(struct run_db_store **out, const struct run_db_store_args *a);
/* What is not moved by then (clock_awake) goes to the kept file, with one line that says where; NULL ok. */
void run_db_store_close(struct run_db_store *s, double end_by);
sqlite3 *run_db_store_file(struct run_db_store *s);  /* run.db; for the start alone, in transactions that end there */
sqlite3 *run_db_store_stage(struct run_db_store *s); /* where records are inserted */
/* A record of that many bytes is to be inserted: false: there is no room, and it is counted as lost. Samples have half of it,
 * so that metrics, which are small, are not lost with them. */
bool run_db_store_room(struct run_db_store *s, int64_t bytes, bool is_sample);
/* The stage to run.db, or to where there is room. Fails only where the stage itself is broken. */
int run_db_store_flush(struct run_db_store *s);
/* True once, after run.db could first not be written. why: for an event; valid until the next call of this store. */
bool run_db_store_is_news(struct run_db_store *s, const char **why);

#endif
