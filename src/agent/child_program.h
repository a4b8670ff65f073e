/* child_program.h - a command of the user's that runs as one agent: a shell's process with variables of its own, whose last line on
 * standard output and end of standard error are kept.
 *
 * What it prints is read and thrown away but for those; nothing of it is waited for.
 * Invariant: when child_program_ended has said so, or child_program_stop has returned, nothing that the command started runs any
 * more (base/process.h). */
#ifndef VERLC_AGENT_CHILD_PROGRAM_H
#define VERLC_AGENT_CHILD_PROGRAM_H

#include "base/buf.h"

#include <jansson.h>
#include <stdbool.h>
#include <stdint.h>

struct child_program;
struct child_program_args {     /* borrowed for the call */
    const char *command;        /* for /bin/sh -c */
    const char *const *env;     /* "NAME=VALUE", in place of variables of this process of that name; ends with NULL */
    const char *const *without; /* names of variables of this process that it does not have; ends with NULL */
    const char *input;          /* standard input, n_input bytes */
    size_t n_input;
    int64_t max_files;       /* most open files of each of its processes; 0: as here */
    bool sandbox;            /* it has nothing of this process but env, may read dirs, and reaches us at 127.0.0.1 and port alone */
    const char *const *dirs; /* the first is its working directory; ends with NULL */
    int64_t port;
    double wall_s; /* of one in a sandbox */
};
/* Whether this machine has sandboxes; ERR_UNSUPPORTED. */
int child_program_check_sandbox(void);
/* ERR_HELPER: no process can be made. */
int child_program_start(struct child_program **out, const struct child_program_args *a);
/* Reads what it has printed. Whether it has ended. */
bool child_program_ended(struct child_program *p);
/* Of one in a sandbox: the socket that listens inside, once; the caller's. -1: not yet, or it has been given. */
int child_program_listener(struct child_program *p);
/* Ends it if it runs, and closes. *how (NULL ok) gets how it ended ("exit code 0", "signal 9 (Killed)"), the caller frees. */
void child_program_stop(struct child_program *p, char **how);

/* The last line that is not blank of what it has printed on standard output; "" for one of more than 64 KiB. Borrowed. */
const char *child_program_last_line(const struct child_program *p, size_t *n);
/* The last line of standard error, for people, without control characters; caller frees. "" for none. */
char *child_program_last_error(const struct child_program *p);
/* {"reward": x, ...}, the object of such a line; NULL: it is none. A new reference. */
json_t *child_program_reward_line(const char *line, size_t n);

#endif
