/* run_reader.h - reads run.db (src/track/run_db_schema.c has the schema), while its run goes on or afterwards.
 *
 * Changes nothing in the database; SQLite may make its -wal and -shm files next to it. Each call is one short read of what
 * is committed, so that it never holds up the run. What a file does not have (format 1: entropy, histograms, events,
 * status) is absent, not an error. The file may come from anybody: what has another type or size than it should have is
 * absent, text is UTF-8 after repair, every number of rows is bounded, and a query ends after a deadline.
 * One reader is not for two threads at once; several readers of one file are. */
#ifndef VERLC_VIEW_RUN_READER_H
#define VERLC_VIEW_RUN_READER_H

#include "track/track.h"

#include <jansson.h>
#include <stdbool.h>
#include <stdint.h>

/* ---- which runs there are ---- */
struct run_place {
    char *dir;       /* where its run.db is; owned */
    double modified; /* wall clock of the last write */
};
struct run_list {
    struct run_place *v; /* the last written first */
    int64_t n, cap;
};
/* The runs in and below root, not below a run, not below a checkpoint; at most 1,000 of them. ERR_INPUT: no such directory. */
int run_list_find(struct run_list *out, const char *root);
void run_list_free(struct run_list *p);

/* ---- one run ---- */
struct run_reader;
/* path: the run's directory, or its run.db. ERR_INPUT: there is none; says what there is. ERR_FORMAT: it is something else.
 * ERR_UNSUPPORTED: of a later verlc. */
int run_reader_open(struct run_reader **out, const char *path);
void run_reader_close(struct run_reader *r); /* NULL ok */
const char *run_reader_dir(const struct run_reader *r);

struct run_meta {
    int64_t format, total_steps, last_step; /* total_steps 0: not known; last_step: with metrics, -1: none yet */
    char *version, *project, *experiment;   /* "" where not known */
    char *exit;                             /* how it ended; NULL: it has not, or was killed with SIGKILL */
    double started, ended;                  /* wall clock, 0: not known */
    json_t *config, *plan, *headline;       /* an object, an object or NULL, an array; headline never NULL */
    json_t *set, *special_tokens;           /* a list of keys that the user set; an object, id -> name; NULL: not known */
};
int run_reader_meta(struct run_reader *r, struct run_meta *m);
void run_meta_free(struct run_meta *m);

/* What the run does, by its last report. */
struct run_status {
    bool known;
    char phase[48], host[256];
    int64_t step, done, total, pid;
    double tok_s, since, wall;
};
int run_reader_status(struct run_reader *r, struct run_status *s);

struct run_event {
    int64_t id, step;
    double wall;
    const char *kind, *message;
};
/* Those with a larger id, in order; the callback's error ends it. */
int run_reader_events(struct run_reader *r, int64_t after_id, int (*each)(void *arg, const struct run_event *e), void *arg);

/* ---- metrics ---- */
struct run_steps {
    int64_t *v, n, cap;
};
/* Steps with metrics after this one (-1: all), ascending. */
int run_reader_steps(struct run_reader *r, int64_t after, struct run_steps *out);
void run_steps_free(struct run_steps *s);

struct run_names {
    char **v; /* sorted */
    int64_t n, cap;
};
int run_reader_metric_names(struct run_reader *r, struct run_names *out);
void run_names_free(struct run_names *n);

struct run_series {
    int64_t *step;
    double *value; /* NaN: it was not a number */
    int64_t n, cap;
};
/* One metric's values after a step (-1: all), ascending. An unknown metric has none. */
int run_reader_series(struct run_reader *r, const char *name, int64_t after, struct run_series *out);
void run_series_free(struct run_series *s);
/* n metrics in one pass: out[i] is of names[i]. Quicker than run_reader_series from a few metrics on. */
int run_reader_curves(struct run_reader *r, const char *const *names, int n, int64_t after, struct run_series *out);

/* The last value of each metric, sorted by name; NaN: it was not a number. */
int run_reader_last(struct run_reader *r, int (*each)(void *arg, const char *name, int64_t step, double value), void *arg);

/* Of the metrics whose names begin so, in the newest step that has one, the first by name, a mean ("/mean@") before others: its
 * name ("": none has) and the mean of its last n values. Looks at no more than the newest `look` steps. */
int run_reader_recent(struct run_reader *r, const char *prefix, int n, int64_t look, char name[256], double *mean);

/* All metrics of a step, sorted by name; after an error out is empty. */
int run_reader_step(struct run_reader *r, int64_t step, struct metrics *out);

struct run_histogram {
    int64_t step;
    double lo, hi;
    const int32_t *counts; /* bins of equal width from lo to hi */
    int64_t n;
};
/* name: "score" or "response_length". In order of steps. */
int run_reader_histograms(struct run_reader *r, const char *name, bool validation, int64_t after,
                          int (*each)(void *arg, const struct run_histogram *h), void *arg);

/* ---- samples ---- */
/* Steps that have samples of training or of validation, ascending. */
int run_reader_sample_steps(struct run_reader *r, bool validation, struct run_steps *out);
/* Those of them that have samples of this prompt. */
int run_reader_prompt_steps(struct run_reader *r, int64_t uid, bool validation, struct run_steps *out);

struct run_sample {
    int64_t id, step, uid, index;
    bool validation;
    const char *data_source, *reward_status, *finish;
    const char *reward_message; /* NULL: none */
    double score, advantage;    /* NaN: none */
    int64_t n_prompt, n;        /* tokens */
    json_t *episode;            /* of a conversation with tools its record (run_episode.h), an object; else NULL */
    /* below: only where the query is for whole samples */
    struct track_text prompt, response, ground_truth; /* may hold NUL */
    const int32_t *prompt_ids, *ids;
    const float *logp, *entropy, *ref_logp, *advantages; /* (n); NULL: not recorded */
    const int64_t *ends;        /* (n): where a token's text ends in response, ascending, the last is response.n; NULL: not known */
    const int64_t *prompt_ends; /* (n_prompt): the same of prompt */
    json_t *extra;              /* an object, or NULL */
    /* Of the weights that drew the tokens: (n_runs, 2) counts of tokens and their version; n_runs 0: those of before the step. */
    const int32_t *runs;
    int64_t n_runs;
    /* Who wrote the tokens: (n_segments, 2) counts of tokens and 0: the policy, 1: an environment; n_segments 0: the policy. */
    const int32_t *segments;
    int64_t n_segments;
};
/* "policy", "environment" */
const char *run_segment_name(const struct run_sample *s, int64_t k);
json_t *run_segments_json(const struct run_sample *s); /* [[tokens, "policy"], ...] */
struct run_sample_query {
    int64_t id;               /* this one; else 0, and: */
    int64_t step, uid, index; /* uid, index -1: all */
    bool validation;
    bool whole;            /* texts and numbers of each token too */
    int64_t offset, limit; /* limit 0: 100,000 */
};
/* In order of uid and sample. s lives until the callback returns; its error ends it. */
int run_reader_samples(struct run_reader *r, const struct run_sample_query *q, int (*each)(void *arg, const struct run_sample *s),
                       void *arg);

/* Where the last message of the user is in a sample's prompt, without space around it; the whole prompt where its template
 * shows none. special: run_meta's, may be NULL. Borrows of s. */
struct track_text run_user_message(const struct run_sample *s, const json_t *special);

/* ---- search ---- */
struct run_search_args {
    const char *pattern; /* PCRE2 */
    bool ignore_case, prompts, responses;
    int64_t step; /* -1: all, the newest first */
    bool ranged;  /* only samples with a score from min to max */
    double min, max;
};
struct run_match {                         /* a line with a match; lives until the next call */
    int64_t id, step, uid, index, line_no; /* line_no from 1 */
    bool validation, in_response;
    double score; /* NaN: none */
    struct track_text line;
    size_t lo, hi; /* the first match in it */
};
struct run_search;
/* ERR_INVAL: the pattern, with the place. r is borrowed and may be used between two calls. */
int run_search_create(struct run_search **out, struct run_reader *r, const struct run_search_args *a);
void run_search_destroy(struct run_search *s); /* NULL ok */
enum { RUN_SEARCH_END, RUN_SEARCH_MATCH, RUN_SEARCH_MORE };
/* The next line that matches. RUN_SEARCH_MORE: `seconds` have passed; call again. */
int run_search_next(struct run_search *s, double seconds, struct run_match *m);
/* Goes on with the next sample, whatever lines of this one match as well. */
void run_search_skip_sample(struct run_search *s);
/* The next match in a line, from a byte on; false: none. */
bool run_search_in_line(struct run_search *s, struct track_text line, size_t from, size_t *lo, size_t *hi);
void run_search_progress(const struct run_search *s, int64_t *samples_done, int64_t *samples_total);

#endif
