/* reward.h - the score of one finished response.
 *
 * Native graders chosen by name, or by data_source as verl's default_compute_score does, or
 * the user's Python compute_score in helper processes.  A result says what
 * happened: only REWARD_SCORE carries a number (DESIGN 2, invariant 8), and what
 * to do with the others (drop the sample, drop the group, stop) is the trainer's
 * policy.  That a policy wrote no answer is a score like any other, as in verl.
 *
 * Samples are submitted as they end and polled when convenient; the order of
 * results is that of finishing, each with the caller's tag. */
#ifndef VERLC_REWARD_H
#define VERLC_REWARD_H

#include <jansson.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

enum reward_status {
    REWARD_SCORE,
    REWARD_TIMEOUT,  /* the scorer did not answer in time */
    REWARD_CRASH,    /* it raised, died, or refused its input */
    REWARD_UNPARSED, /* its answer is not a number that float32 holds, nor a dict with such a "score" */
    REWARD_MISSING,  /* no scorer for this data_source, or no usable ground_truth */
};
enum { REWARD_N_STATUS = REWARD_MISSING + 1 };
const char *reward_status_name(enum reward_status s); /* "score", "timeout", ... */

struct reward_result {
    enum reward_status status;
    double score;  /* REWARD_SCORE only */
    json_t *extra; /* reward_extra_info: an object ("acc", or the keys of a dict result); owned */
    char *message; /* what went wrong, one line; NULL for a score; owned */
};
void reward_result_free(struct reward_result *r);

struct reward_request { /* borrowed for the call */
    const char *data_source;
    const char *grader;   /* of this request: a native grader's name; NULL: reward_args.grader, else by data_source */
    const char *solution; /* the decoded response without special tokens, UTF-8 */
    size_t n_solution;
    const json_t *ground_truth;
    const json_t *extra_info; /* object or NULL */
    int64_t response_len;     /* tokens; for the overlong penalty */
    const json_t *data;       /* for a manager of the user: what its DataProto holds (verlc_helpers/reward_manager.py), or NULL */
};

/* How the function is called: by name (data_source, solution_str, ground_truth, extra_info); the same by position, as
 * verl's prime manager does; or once with all samples (data_sources, solution_strs, ground_truths, extra_infos). */
enum reward_style { REWARD_NAMED, REWARD_POSITIONAL, REWARD_BATCH };
struct reward_code_args {    /* of data sources that are programs with tests; 0 and NULL: the default */
    int64_t max_concurrent;  /* programs that run at once in the sandbox; 0: as many as there are cores */
    int64_t memory_limit_mb; /* of each; 0: 1024 */
    const char *service_url; /* a SandboxFusion service that runs them instead; NULL: none */
    int64_t service_max_concurrent, service_memory_limit_mb; /* requests at once, 0: 64; 0: 1024 */
};
struct reward_args {
    const char *path;                   /* custom_reward_function.path; NULL: native graders */
    const char *name;                   /* its function; NULL: compute_score */
    const char *grader;                 /* native graders: the one of every row, by name (docs/rewards.md); NULL: by data_source */
    const char *python;                 /* interpreter that runs it (struct helper_args); NULL: the helpers' own */
    const json_t *kwargs;               /* custom_reward_function.reward_kwargs, object or NULL; copied */
    const struct reward_request *trial; /* a call of the function before all others, in a process that ends with it; NULL: none */
    bool trial_binds;                   /* only whether it takes the arguments */
    double trial_s;                     /* most of that call */
    int (*check)(void);                 /* polled while the function is loaded and tried: < 0 ends reward_create; NULL: none */
    double timeout_s;                   /* of one call; 0: 300, verl's */
    int n_workers;                      /* helper processes; 0: 1 */
    int64_t max_concurrent;             /* calls of an async function in flight in each; 0: 256 */
    enum reward_style style;
    const json_t *manager; /* a reward manager's class of the user, which calls the function: {"path", "names", "config",
                            * "tokenizer", "kwargs"} as reward_manager.py reads it; NULL: none */
    /* Of all processes together; max_in_flight 0: no limits, else the others 0: none. */
    int64_t max_in_flight;
    double max_rpm, max_tpm, tokens_per_request; /* requests and tokens a minute */
    const char *router_address;                  /* HOST:PORT of a judge's server, an argument of the function; NULL: none */
    const char *rm_tokenizer;                    /* with it: directory of the judge's tokenizer, or NULL */
    struct reward_code_args code;
    /* The dapo manager's overlong_buffer_cfg; overlong_len 0: off. */
    int64_t overlong_len, max_resp_len;
    double overlong_penalty_factor;
    bool overlong_log;
};
struct reward;
/* ERR_INPUT: the file is missing, or the trial shows that no call can work (arguments that do not fit, an import that fails, a
 * value that is no score); what else goes wrong in it is a warning. ERR_INVAL: overlong lengths do not fit, no such grader. */
int reward_create(struct reward **out, const struct reward_args *args);
/* Whether native graders can score rows of these data sources, before a run: ERR_INPUT names the first that none is for,
 * ERR_HELPER the packages that a grader's helper lacks and the line that installs them, ERR_UNSUPPORTED why this machine has
 * no sandbox for programs. With a path: 0. */
int reward_check_sources(struct reward *r, const char *const *sources, int64_t n);
/* ERR_INVAL: there is no such native grader; the message lists them. */
int reward_check_grader(const char *name);
void reward_destroy(struct reward *r); /* NULL ok */

/* An answer as the grader of that name compares it (math_reward, math_dapo, search_r1_like_qa_em); caller frees. ERR_INVAL: no
 * such form; ERR_FORMAT: this answer has none. */
int reward_normal_form(const char *grader, const json_t *answer, char **out);

/* Scores now.  Returns 0 with *out set, whatever its status; a negative code
 * only where no scoring is possible at all (no Python, file cannot be loaded). */
int reward_score(struct reward *r, const struct reward_request *q, struct reward_result *out);

/* Queues one sample; `tag` comes back with its result. */
int reward_submit(struct reward *r, const struct reward_request *q, int64_t tag);
/* No more samples come for now: a scorer that takes all of them in one call is called. */
int reward_flush(struct reward *r);
/* 1: *tag and *out are one finished sample; 0: none within wait_s (0: only
 * look), or none pending.  The caller frees *out. */
int reward_poll(struct reward *r, double wait_s, int64_t *tag, struct reward_result *out);
/* No sample with this status has been reported yet. reward_mark_reported: one has been. */
bool reward_is_unreported(const struct reward *r, enum reward_status s);
void reward_mark_reported(struct reward *r, enum reward_status s);
int64_t reward_pending(const struct reward *r);
void reward_drop(struct reward *r); /* forgets all of them; calls under way are killed */

/* The overlong penalty of a (the fields above) on a score; anything else stays. */
int reward_check_overlong(const struct reward_args *a); /* ERR_INVAL: the lengths do not fit */
void reward_penalise_overlong(const struct reward_args *a, int64_t response_len, struct reward_result *r);
/* A score that float32 does not hold (verl's rewards are float32) becomes REWARD_UNPARSED: sums and squares of the others are
 * finite in double. */
void reward_check_score(struct reward_result *r);

#endif
