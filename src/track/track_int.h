/* track_int.h - what track.c requires of each tracker; private to track. */
#ifndef VERLC_TRACK_INT_H
#define VERLC_TRACK_INT_H

#include "track/track.h"

/* What the run does at the moment. */
struct track_status {
    int64_t step, done, total; /* done of total: of the phase; total 0: not reported */
    double tok_s, since;       /* tokens per second, 0: not reported; wall clock at which the phase began */
    char phase[48];            /* "": nothing that is timed */
};

/* A tracker runs on the writer thread only (open and close on the caller's,
 * before and after it). A failing call disables it, with one warning. */
struct tracker {
    const char *name;
    int (*open)(void **ctx, const char *name, const struct track_args *a);
    int (*log)(void *ctx, int64_t step, const struct metrics *m, double wall_time);
    /* each may be NULL */
    int (*sample)(void *ctx, const struct track_sample *s);
    int (*generations)(void *ctx, int64_t step, const json_t *rows, double wall_time); /* as in track_generations */
    int (*event)(void *ctx, int64_t step, const char *kind, const char *message, double wall_time);
    int (*status)(void *ctx, const struct track_status *s, double wall_time); /* at most once a second */
    int (*flush)(void *ctx);
    /* Before close, which then waits until end_by, longer only while records are sent or a client starts: the run is "done",
     * "failed" or "killed"; why NULL: it is done. */
    void (*end)(void *ctx, const char *how, const char *why, double end_by);
    void (*close)(void *ctx);
};
extern const struct tracker track_file, track_tensorboard, track_db, track_traces;
extern const struct tracker track_clients[TRACK_N_CLIENTS];

/* What the helpers' interpreter, *python (caller frees), has of these Python packages. */
enum track_client_state { TRACK_USABLE, TRACK_MISSING, TRACK_LOGGED_OUT }; /* logged out: wandb without a key */
int track_client_check(const char *const *names, int64_t n, enum track_client_state state[], char **python);
#define TRACK_WANDB_LOGIN "'wandb login' or WANDB_API_KEY logs in, WANDB_MODE=offline writes to ./wandb"

/* ---- console (console.c): draws on stderr, step lines on stdout ---- */
struct console;
struct console *console_create(const struct track_args *a, bool step_lines);
void console_destroy(struct console *c);
void console_step(struct console *c, int64_t step, const struct metrics *m);
void console_progress(struct console *c, int64_t step, const char *phase, int64_t done, int64_t total, double tok_s);

#endif
