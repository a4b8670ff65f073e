/* helper.h - supervised Python helper processes.
 *
 * What is Python by nature (Jinja templates, Parquet, users' reward functions,
 * trackers) runs in `python3 -m MODULE` under python/verlc_helpers; requests and
 * replies are JSON values, length-prefixed, over a socketpair.  This module
 * knows nothing of what they mean.  A helper that dies, hangs, answers garbage
 * or too much is killed with all that descends from it and started again by the next
 * request; the message says which helper, what happened and what to do.
 *
 * Invariants: every wait has a deadline; a reply always belongs to its request;
 * no zombie and no descriptor is left behind; a helper, and all that descends from it, dies with the program
 * (base/process.h).  SIGTERM, SIGINT and SIGHUP are for the program: one that is sent to all of its processes, as
 * `ray job stop` does, ends no helper. */
#ifndef VERLC_HELPER_H
#define VERLC_HELPER_H

#include <jansson.h>
#include <stdint.h>

struct helper;

struct helper_args {
    const char *module;      /* "verlc_helpers.chat_template_renderer"; copied */
    const json_t *init;      /* sent to the module's init() at every start, so that a restart
                              * finds the same state; may be NULL; copied */
    const char *python;      /* its interpreter, a path or a name in PATH; NULL: helper_create's own choice; copied */
    const char *log_as;      /* what it prints goes to the log as "log_as: line", some lines a second (VERL_LOGGING_LEVEL=DEBUG
                              * shows all); NULL: to the debug log alone; static */
    int64_t memory_bytes;    /* address space; 0: 8 GiB, < 0: no limit */
    int64_t cpu_s;           /* processor seconds one request may use; 0: no limit */
    double start_timeout_s;  /* interpreter, imports and init(); 0: 60 */
    int64_t max_reply_bytes; /* 0: 256 MiB; at most 4 GiB */
    int (*check)(void);      /* polled while helper_recv waits, ten times a second: < 0 ends the wait with that error, and the
                              * process at the latest with helper_destroy; NULL: none */
};

/* The directory of verlc's Python modules, in which `module` ("verlc_helpers.reward") must have its file: VERLC_HELPERS_DIR,
 * else python/ or share/verlc/python/ next to the executable. ERR_HELPER: not found. Caller frees. */
int helper_find_dir(const char *module, char **path);

/* Checks that the interpreter and the module's file exist; the process itself
 * starts with the first request.  Interpreter: args->python, else $VERLC_PYTHON, else python3 in
 * the program's own directory (a virtual environment's), else .venv/bin/python
 * there, in a directory above it or in the source tree, else python3 in PATH.  ERR_HELPER says what to install. */
int helper_create(struct helper **out, const struct helper_args *args);
/* Closes the socket, gives the process 2 s to end, then kills it. NULL ok. */
void helper_destroy(struct helper *h);

/* One request, one reply (new reference, any JSON value).  A request that the
 * helper itself refuses gives its own code and message (ERR_INPUT, ERR_FORMAT,
 * ...) and the helper lives on; ERR_TIMEOUT and ERR_HELPER mean it was killed.
 * timeout_s counts from when the helper is ready to take the request. */
int helper_call(struct helper *h, const json_t *request, double timeout_s, json_t **reply);

/* Pipelining: requests are queued and written as the helper takes them; replies
 * come in the order of the requests.  After ERR_TIMEOUT or ERR_HELPER all pending
 * requests are lost (helper_pending is 0). helper_send does not wait. */
int helper_send(struct helper *h, const json_t *request);
int helper_recv(struct helper *h, double timeout_s, json_t **reply);
int64_t helper_pending(const struct helper *h);

/* n processes of one kind behind one queue.  No threads: progress is made inside send and recv. */
struct helper_pool_args {
    int n;           /* processes, 1 to 256 */
    int64_t n_calls; /* requests in flight in each, 0: 1; above 1 the module has to serve them concurrently (protocol.py:
                      * init returns an async handler) */
    int64_t n_tries; /* processes that a request may end before that is its result, 0: 1.  Above 1 a request that was in
                      * flight in a process that died is sent again, and is not blamed for what another has done */
};
struct helper_pool;
struct helper_result {
    int64_t ticket;
    int rc;        /* 0, or the ERR_* code with `error` set */
    json_t *reply; /* when rc == 0 */
    char *error;   /* when rc < 0 */
};
int helper_pool_create(struct helper_pool **out, const struct helper_args *args, const struct helper_pool_args *pool);
void helper_pool_destroy(struct helper_pool *p); /* NULL ok */
/* Forgets every request and result; processes that were serving one are killed. */
void helper_pool_cancel(struct helper_pool *p);
/* Queues a request; tickets count up from 0.  timeout_s as in helper_call; with n_calls > 1 the
 * module answers ERR_TIMEOUT for that request alone, and is killed if it answers nothing for
 * timeout_s and 5 s more. */
int helper_pool_send(struct helper_pool *p, const json_t *request, double timeout_s, int64_t *ticket);
/* To that process of the pool, 0 to n - 1, which may have state from earlier requests; after its end to the one in its place.
 * -1: to any. */
int helper_pool_send_to(struct helper_pool *p, int worker, const json_t *request, double timeout_s, int64_t *ticket);
/* 1: *out is one finished request, in the order of finishing; 0: none within
 * wait_s (0: only look) or none pending. Free with helper_result_free. */
int helper_pool_recv(struct helper_pool *p, double wait_s, struct helper_result *out);
int64_t helper_pool_pending(const struct helper_pool *p); /* queued, running or unread */
void helper_result_free(struct helper_result *r);

#endif
