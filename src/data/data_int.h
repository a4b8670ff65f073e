/* data_int.h - private to src/data: child programs, and remote paths. */
#ifndef VERLC_DATA_INT_H
#define VERLC_DATA_INT_H

#include "data/data.h"

#include "base/buf.h"
#include "base/rng.h"

/* A path that can be opened: ~ expanded; of another store the copy (data_remote_fetch). Caller frees. */
int data__local_path(char **out, const char *path);
/* verl's hdfs_io.makedirs + copy: dir to an hdfs:// or a local directory. */
int data__copy_dir(const char *dir, const char *to);

/* Columns that rows must have. */
struct data__columns {
    const char *const *required; /* NULL-terminated; NULL: none */
    const char *advice;          /* what to say behind the names of those that are missing; may be NULL */
};

/* Rows of several files as one array, capped: verl's data.*_max_samples.  Row i of
 * the result is row uid[i] of all rows together. */
struct data__table {
    json_t *rows; /* array of objects */
    int64_t *uid; /* n */
    int64_t n, n_total;
    const char *const *files; /* borrowed */
    int64_t *file_end;        /* n_files: rows up to and with file f */
    int64_t n_files;
};
struct data__table_args {
    const char *const *files;
    int64_t n_files;
    struct data__columns need;
    int64_t max_samples;
    bool shuffle;
    uint64_t seed;
    const char *what;             /* the configuration key, for messages */
    const struct data_class *cls; /* whose rows these are; NULL: those of the files */
    const char *prompt_key;       /* with cls: the column of its raw_prompt */
};
int data__table_read(struct data__table *t, const struct data__table_args *a);
void data__table_free(struct data__table *t);
/* "FILE row 12" (1-based) of row i; caller frees. */
char *data__table_place(const struct data__table *t, int64_t i);

/* One word problem with its worked solution ("... #### 42"); question and answer are reset first. */
void data__arith_problem(struct rng *r, int level, struct buf *question, struct buf *answer);

#endif
