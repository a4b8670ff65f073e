/* helper_int.h - private to src/helper: the process, and one step of its protocol. */
#ifndef VERLC_HELPER_INT_H
#define VERLC_HELPER_INT_H

#include "helper/helper.h"

#include "base/buf.h"
#include "base/process.h"

#include <poll.h>
#include <stdbool.h>
#include <stddef.h>

/* --- helper_process.c: find, start, stop --- */
struct helper__proc {
    struct process process;
    int sock; /* ours of the socketpair, non-blocking */
    int err;  /* read end of its stdout and stderr, non-blocking */
};
#define HELPER__NOT_RUNNING ((struct helper__proc){{-1, -1}, -1, -1})
struct helper__spawn_args {
    const char *python, *dir, *module;
    int64_t memory_bytes; /* < 0: no limit */
};
int helper__find_python(const char *requested, char **path); /* requested: the user's choice or NULL; caller frees */
int helper__spawn(struct helper__proc *p, const struct helper__spawn_args *a);
/* Closes both descriptors and ends the process (process_stop). */
void helper__stop(struct helper__proc *p, double grace_s, char *how, size_t n);

/* --- helper_restart.c --- */
/* The process runs, started again where it has ended. Does not wait for it to be ready. */
int helper__ensure_started(struct helper *h);
/* The process is dead (what == NULL) or has broken the protocol: ends it, says why. ERR_HELPER. */
int helper__died(struct helper *h, const char *what);
/* Kills the process for having taken longer than timeout_s (start-up: its own limit). ERR_TIMEOUT. */
int helper__expire(struct helper *h, double timeout_s);
void helper__kill(struct helper *h);                /* ends the process and forgets every pending request */
void helper__end(struct helper *h, double grace_s); /* for good: it has grace_s to end by itself */
void helper__drain_output(struct helper *h);        /* what it printed goes to the log; the last line is kept for messages */

/* --- helper.c --- */
enum { HELPER__LINE_MAX = 512 };
struct helper {
    struct helper_args a; /* module and init point to our copies */
    char *python, *dir;
    struct helper__proc proc;
    bool ready; /* init has been answered */
    double start_deadline;
    struct buf out; /* frames not yet written, from out_pos on */
    size_t out_pos;
    struct buf in;    /* bytes read, at most one incomplete frame after a step */
    int64_t last_id;  /* of the request sent last */
    int64_t *pending; /* ids sent and not answered, oldest first */
    int64_t n_pending, cap_pending;
    /* its stdout and stderr, line by line */
    char line[HELPER__LINE_MAX], last_line[HELPER__LINE_MAX];
    size_t n_line;
    double second;           /* since when n_shown counts */
    int64_t n_shown, n_kept; /* lines to the log in this second; lines kept from it since */
};
/* Queues the init (id 0) or a request. */
int helper__queue_frame(struct helper *h, const char *key, const json_t *value, int64_t id, double timeout_s);
enum { HELPER__N_FDS = 2 };
/* What poll(2) has to watch before the next step. */
void helper__fds(const struct helper *h, struct pollfd fds[HELPER__N_FDS]);
/* Queues a request.  timeout_s goes with it, for a module that serves many at once (0: none). */
int helper__send(struct helper *h, const json_t *request, double timeout_s, int64_t *id);
struct helper__reply {
    int64_t id;    /* of its request */
    int rc;        /* 0, or the error that the module answered, with the thread's message */
    json_t *value; /* rc 0: new reference */
    bool last;     /* the process ends now, because of this request */
};
/* Reads and writes what is possible without waiting.  1: *r answers one pending request; 0: nothing
 * yet; < 0: the process has exited, and every pending request is lost. */
int helper__step(struct helper *h, struct helper__reply *r);
bool helper__ready(const struct helper *h); /* past start-up */
double helper__start_deadline(const struct helper *h);

#endif
