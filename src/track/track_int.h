/* track_int.h - what track.c asks of each tracker; private to track. */
#ifndef VERLC_TRACK_INT_H
#define VERLC_TRACK_INT_H

#include "track/track.h"

/* A tracker runs on the writer thread only (open and close on the caller's,
 * before and after it). A failing call disables it, with one warning. */
struct tracker {
    const char *name;
    int (*open)(void **ctx, const struct track_args *a);
    int (*log)(void *ctx, int64_t step, const struct metrics *m, double wall_time);
    int (*sample)(void *ctx, const struct track_sample *s); /* may be NULL */
    int (*flush)(void *ctx);
    void (*close)(void *ctx);
};
extern const struct tracker track_file, track_tensorboard, track_db;

/* ---- console (console.c): draws on stderr, step lines on stdout ---- */
struct console;
struct console *console_create(const struct track_args *a, bool step_lines);
void console_destroy(struct console *c);
void console_step(struct console *c, int64_t step, const struct metrics *m);
void console_progress(struct console *c, int64_t step, const char *phase, int64_t done, int64_t total, double tok_s);
void console_headline(struct console *c, const char *metric, const char *label);

#endif
