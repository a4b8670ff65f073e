/* show.h - a run as text for a terminal: the run, runs side by side, a step, a sample, what the run does at the moment; and as
 * JSON for scripts.
 * Reads through run_reader.h alone; nothing is printed here. */
#ifndef VERLC_VIEW_SHOW_H
#define VERLC_VIEW_SHOW_H

#include "view/run_episode.h"
#include "view/run_reader.h"
#include "view/terminal.h"

/* What tokens are coloured by. */
enum show_colour { SHOW_LOGP, SHOW_ENTROPY, SHOW_ADVANTAGE, SHOW_KL };

struct show_args {
    struct terminal term;
    bool json;
    int64_t step;       /* -1: the run; of a sample: the last step that has one */
    int64_t uid, index; /* a sample; uid -1: none, index -1: all of the prompt */
    bool validation;
    struct run_episode_filter fits; /* of a step's table and a prompt's samples */
    int64_t limit;                  /* samples of a step's table, 0: all */
    enum show_colour by;
    const char *metric; /* of a comparison: the curves that are drawn, commas between them; NULL: the usual ones */
};
/* Appends to out. ERR_INPUT: there is no such step or sample; says which there are. */
int show_run(struct run_reader *r, const struct show_args *a, struct buf *out);
int show_step(struct run_reader *r, const struct show_args *a, struct buf *out);
int show_sample(struct run_reader *r, const struct show_args *a, struct buf *out);
/* n runs side by side; one with a chosen metric. ERR_INVAL: no run has that metric. */
enum { SHOW_MAX_RUNS = 8 };
int show_compare(struct run_reader *const *runs, int n, const struct show_args *a, struct buf *out);
/* *alive: a process has the run's lock. */
int show_status(struct run_reader *r, const struct show_args *a, struct buf *out, bool *alive);

/* ---- shared by these ---- */
/* The run's directory, project and experiment, and how far it is. */
int show_heading(struct run_reader *r, const struct run_meta *m, const struct terminal *t, struct buf *out);
/* Whether its process is there, or how it ended. */
int show_process(struct run_reader *r, const struct run_meta *m, const struct terminal *t, struct buf *out);
json_t *show_number(double v); /* NaN and Inf: null */
/* The metrics that are drawn of a run: its headlines, then its validation's; appended to list. */
void show_headlines(const struct run_meta *m, const struct run_names *all, struct run_names *list);
bool show_on_log_scale(const char *name);

#endif
