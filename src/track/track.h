/* track.h - where the numbers of a run go: the terminal, files, run.db, and trackers with clients in Python.
 *
 * Invariant: tracking never blocks and never ends a step.  Records are queued
 * to a writer thread; a tracker that fails says so once, is counted, and the
 * run goes on.  What was queued before track_close or a checkpoint's
 * track_flush is on disk after it; what a client has not taken is, too. */
#ifndef VERLC_TRACK_H
#define VERLC_TRACK_H

#include <jansson.h>
#include <stdbool.h>
#include <stdint.h>
#include <stdio.h>

/* ---- one step's metrics, in the order they were set ---- */
struct metric {
    char *name; /* owned; of any length: data sources and scorers' keys are in it */
    double value;
    bool whole; /* print as an integer */
};
struct metrics {
    struct metric *items;
    int64_t n, cap;
};
void metrics_free(struct metrics *m);  /* a zeroed struct is empty and valid */
void metrics_reset(struct metrics *m); /* keeps the array */
void metrics_set(struct metrics *m, double value, const char *fmt, ...) __attribute__((format(printf, 3, 4)));
void metrics_set_i64(struct metrics *m, int64_t value, const char *fmt, ...) __attribute__((format(printf, 3, 4)));
void metrics_merge(struct metrics *into, const struct metrics *from); /* later wins, place kept */
bool metrics_get(const struct metrics *m, const char *name, double *value);

/* ---- the run ---- */
struct track_text { /* may hold NUL */
    const char *p;  /* NULL: empty */
    size_t n;
};
/* What a trace of a sample has in addition to the sample. */
struct track_trace {
    bool wanted;
    int64_t sample_index;               /* its prompt's, as the data counts */
    double ended, seconds;              /* wall clock; from its first scheduling on */
    struct track_text prompt, response; /* with special tokens; NULL: token ids alone */
    const json_t *sampling;             /* sampling parameters */
};
/* One generated sample, for run.db and the dumps. Borrowed during the call. */
struct track_sample {
    int64_t step;
    bool validation;
    int64_t uid;   /* dataset row */
    int64_t index; /* sample of its prompt */
    const char *data_source;
    struct track_text prompt, response, ground_truth;
    const int32_t *prompt_ids, *ids;
    int64_t n_prompt, n;
    const float *logp;                            /* (n) */
    const float *entropy, *ref_logp, *advantages; /* (n) each; NULL: not computed, or advantage is that of every token */
    const uint16_t *token_bytes;                  /* (n) bytes of response that came with each token; NULL: not known */
    const uint16_t *prompt_bytes;                 /* (n_prompt) the same of prompt */
    const int32_t *versions;                      /* (n) of the weights that drew each token; NULL: those of before the step */
    const int32_t *segments;                      /* (n_segments, 2): tokens and kind (data.h); NULL: one, of the policy */
    int64_t n_segments;
    const int32_t *routes; /* (n_routes): recorded choices of experts (run_db_schema.c); NULL: none */
    int64_t n_routes;
    const json_t *episode;        /* its turns and calls of tools (agent/tool_agent.h); NULL: it has one turn */
    int64_t prompt_number, place; /* fully asynchronous: of the prompt in the order of the data and in the step; else -1 */
    double score, advantage;      /* NaN: none; advantage: of the policy's first token */
    const char *reward_status;    /* "score", "timeout", "crash", "unparsed", ... */
    const char *reward_message;   /* why there is no score; NULL: there is one */
    const json_t *extra;          /* reward extra info, object or NULL */
    const char *finish;           /* "stop", "length" */
    struct track_trace trace;
};

/* Which trackers a run has. */
enum track_client { TRACK_MLFLOW, TRACK_WANDB, TRACK_SWANLAB, TRACK_CLEARML, TRACK_TRACKIO, TRACK_N_CLIENTS };
struct track_loggers {
    bool console, file, tensorboard, client[TRACK_N_CLIENTS];
    bool absent[TRACK_N_CLIENTS]; /* its Python package is missing: records are kept in the run's directory, nothing is sent */
    bool trace;                   /* rollouts go to MLflow as traces */
};
/* The names of trainer.logger; *out's trace is the caller's and is checked too. A client whose Python package is missing is
 * absent, with a warning that has the line which installs it; where the names are a default (chosen false) it is left out
 * with a note. ERR_INVAL: an unknown name, with the list. ERR_HELPER: no Python. */
int track_choose(struct track_loggers *out, const char *const *names, int64_t n, bool chosen);

struct track_args {
    const struct track_loggers *loggers; /* NULL: run.db alone */
    const char *project, *experiment;
    const char *run_dir;                          /* run.db, and files whose place is not set in the environment */
    const json_t *config;                         /* resolved configuration */
    const json_t *set;                            /* the keys of it that the user set, a list; NULL: not known */
    const json_t *special_tokens;                 /* {"151645": "<|im_end|>", ...}, those without text; NULL: not known */
    const json_t *plan;                           /* the memory plan (run_db_schema.c says its form); NULL: none */
    int64_t total_steps;                          /* for the progress bar; 0: unknown */
    int64_t resume_step;                          /* > 0: append, and drop what is newer than this step */
    const char *title;                            /* "grpo", "sft": in front of the bar */
    const char *const (*headlines)[2];            /* metrics of a short step line, the first three of the bar, with labels;
                                                     ends with NULL, NULL: none */
    const char *wandb_proxy;                      /* NULL: the environment's */
    const char *trace_project, *trace_experiment; /* of the traces; NULL: as above */
};
struct track;
int track_open(struct track **out, const struct track_args *a);
/* Flushes and closes; prints counts of lost records if any. rc: how the run ended. Clients have a minute for what they have
 * not sent, up to ten while they are sending; where a signal ended the run 10 s, a minute where they are still starting, up to
 * 90 s while they are sending. What is waited for is reported. NULL ok. */
void track_close(struct track *t, int rc);
/* What a run could not write to run.db, because another program had locked it or the disk was full, from run.kept.db into it. 1: it
 * is there now; 0: there is nothing, or its run goes on; ERR_IO, ERR_FORMAT. */
int track_take_in(const char *run_dir);
/* Wall clock of the first start of the run whose run.db is in run_dir; 0: not known. */
double track_began(const char *run_dir);
/* One line on the console, one record in each tracker. m is copied. */
void track_log(struct track *t, int64_t step, const struct metrics *m);
void track_sample(struct track *t, const struct track_sample *s);
/* Validation samples to show: [[input, output, score], ...]; takes rows over. */
void track_generations(struct track *t, int64_t step, json_t *rows);
/* Something that happened and that a reader of the run is to see: kind "warning", "reward_error", "checkpoint", ...; copied. */
void track_event(struct track *t, int64_t step, const char *kind, const char *message);
/* What the run does from now on; NULL: nothing that is timed. Any thread. */
void track_phase(struct track *t, int64_t step, const char *phase);
/* Live progress (terminal only; in a pipe a plain line at most every 10 s), and of the phase in run.db:
 * phase "rollout", done of total, tokens per second. */
void track_progress(struct track *t, int64_t step, const char *phase, int64_t done, int64_t total, double tok_s);
/* Waits (up to 30 s) until all that was queued is on disk. ERR_TIMEOUT, ERR_IO. */
int track_flush(struct track *t);

/* ---- what a run that is over has not sent ---- */
enum { TRACK_N_QUEUES = TRACK_N_CLIENTS + 1 }; /* the clients' records, and traces */
struct track_pending {
    const char *name;                    /* "mlflow", "mlflow_traces", ... */
    int64_t n_records, n_metrics, bytes; /* not sent; of them metrics of a step */
    int64_t first_step, last_step;       /* of these */
    int64_t sent;                        /* records that it has been sent, all of them numbered */
    bool open;                           /* the end of the run has not been reported to it */
    char id[200], end[16];               /* what the tracker calls the run, "": none yet; how it ended there, "": not reported */
};
/* The trackers with a client that a run directory knows, with what it has not sent them: their number, in the order in
 * which they are to be sent. Reads only. ERR_INPUT: a file cannot be read. */
int track_pending(struct track_pending out[TRACK_N_QUEUES], const char *run_dir);
struct track_sync_args {
    const struct track_args *track; /* as the run had it: project, experiment, run_dir, config, proxy, traces */
    const char *how;                /* the run is "done", "failed" or "killed" */
    double ended;                   /* wall clock, 0: not known */
    int (*progress)(void *arg, const char *name, int64_t done, int64_t total); /* after each request; its error ends the sync */
    void *arg;
};
/* Sends one tracker all that is kept for it, in order, and ends its run there as the run has ended. The caller has the run's
 * lock. What is sent is taken out of the file as it goes, so that the next sync continues one that ends at any point.
 * ERR_HELPER: it fails (several attempts), with its own words; ERR_INPUT: a file cannot be read. */
int track_sync(const char *name, const struct track_sync_args *a);
/* ERR_HELPER: the client's package is missing or it is not logged in; says what to do. */
int track_client_usable(const char *name);

#endif
