/* run_db_schema.h - the tables of run.db; private to track. run_db_schema.c says what each column is. */
#ifndef VERLC_TRACK_RUN_DB_SCHEMA_H
#define VERLC_TRACK_RUN_DB_SCHEMA_H

#include <sqlite3.h>

enum { RUN_DB_FORMAT = 2 };
extern const char run_db_schema[]; /* SQL that makes the tables where they are not there yet */
/* A format-1 database gets the columns that it lacks, and a new one those that format 1 had not. ERR_IO. */
int run_db_add_columns(sqlite3 *db, const char *path);

#endif
