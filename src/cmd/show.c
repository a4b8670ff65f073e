/* show.c - verlc show and verlc status: a run in a terminal. */
#include "cmd/cmd.h"

#include "base/buf.h"
#include "base/err.h"
#include "conf/conf.h"
#include "view/show.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

enum { LIMIT = 40, WATCH_S = 2 };

#define RUN_HELP "RUN is the run's directory (trainer.default_local_dir) or its run.db; it may still be going on."

static int print(const struct buf *b) { return cmd_print_line(b->p ? b->p : "", b->n ? b->n - 1 : 0); }

/* "33.1": sample 1 of the prompt with uid 33; "33": all of the prompt. */
static int parse_sample(const char *text, struct show_args *a) {
    char *prompt = xstrdup(text), *dot = strchr(prompt, '.');
    if (dot) *dot = '\0';
    int rc = conf_whole("--sample", "int[0,2^53]", prompt, &a->uid);
    if (rc == 0 && dot) rc = conf_whole("--sample", "int[0,2^31]", dot + 1, &a->index);
    free(prompt);
    return rc;
}

static int parse_colour(const char *name, enum show_colour *by) {
    static const char *const names[] = {"logp", "entropy", "advantage", "kl"};
    for (int i = 0; i < 4; i++)
        if (strcmp(name, names[i]) == 0) {
            *by = (enum show_colour)i;
            return 0;
        }
    FAIL(ERR_INVAL, "--color-by %s: expected logp, entropy, advantage or kl", name);
}

/* "5": so many; "3..": as many or more; "..8", "3..8". */
static int parse_turns(const char *text, struct run_episode_filter *f) {
    static const char type[] = "int[1,2^31]";
    const char *dots = text ? strstr(text, "..") : NULL;
    if (!text) return 0;
    char *first = dots ? xstrndup(text, (size_t)(dots - text)) : xstrdup(text);
    int rc = *first || !dots ? conf_whole("--turns", type, first, &f->min_turns) : 0;
    if (rc == 0 && dots && dots[2]) rc = conf_whole("--turns", type, dots + 2, &f->max_turns);
    if (!dots) f->max_turns = f->min_turns;
    free(first);
    return rc;
}

static int open_runs(const char *const *paths, int n, struct run_reader **runs) {
    for (int i = 0; i < n; i++) TRY(run_reader_open(&runs[i], paths[i]));
    return 0;
}

int cmd_show(int argc, char **argv) {
    const char *paths[SHOW_MAX_RUNS], *sample = NULL, *by = "logp", *colour = "auto", *turns = NULL;
    struct show_args a = {.step = -1, .uid = -1, .index = -1, .limit = LIMIT};
    int n = 0;
    const struct cmd_opt opts[] = {
        {"--step", CMD_I64("int[0,2^53]"), &a.step, "N", "a step: its metrics and a table of its samples"},
        {"--sample", CMD_STR, &sample, "UID.K", "sample K of a prompt (UID alone: all of them), of --step or of the last step"},
        {"--metric", CMD_STR, &a.metric, "NAME,...", "the curves to draw, of one run or of several over each other"},
        {"--validation", CMD_FLAG, &a.validation, NULL, "the samples of the step's validation"},
        {"--limit", CMD_I64("int[0,2^31]"), &a.limit, "N", "samples in the table (40; 0: all)"},
        {"--tool", CMD_STR, &a.fits.tool, "NAME", "samples that called this tool"},
        {"--failed-calls", CMD_FLAG, &a.fits.failed, NULL, "samples with a call of a tool that failed, or was malformed"},
        {"--turns", CMD_STR, &turns, "N|A..B", "samples of so many turns; A.. and ..B too"},
        {"--color-by", CMD_STR, &by, "WHAT", "tokens by logp, entropy, advantage or kl (to the reference)"},
        {"--color", CMD_STR, &colour, "WHEN", "auto (a terminal, no NO_COLOR; or VERLC_COLOR), always, never"},
        {"--json", CMD_FLAG, &a.json, NULL, "JSON, a line"}};
    struct cmd_spec spec =
        CMD_SPEC(opts, "verlc show RUN [RUN...] [--metric NAME] [--step N] [--sample UID.K] [options]",
                 "A run in the terminal: headline metrics as plots, the last validation, what happened, the\n"
                 "memory plan; a step; a sample with its tokens coloured. Several runs: curves over each other,\n"
                 "the last metrics side by side, the keys in which they differ.\n" RUN_HELP);
    struct run_reader *runs[SHOW_MAX_RUNS] = {0};
    struct buf out = {0};
    spec.operands = paths;
    spec.max_operands = SHOW_MAX_RUNS;
    spec.n_operands = &n;
    int rc = cmd_parse(&spec, argc, argv);
    TRY(rc);
    if (rc) return 0;
    if (n == 0) FAIL(ERR_INVAL, "show: which run? usage: %s", spec.usage);
    if ((n > 1 || a.metric) && (sample || a.step >= 0))
        FAIL(ERR_INVAL, "show: --step and --sample are of one run, without --metric");
    if (sample) TRY(parse_sample(sample, &a));
    TRY(parse_turns(turns, &a.fits));
    TRY(parse_colour(by, &a.by));
    TRY(terminal_of_output(&a.term, colour));
    rc = open_runs(paths, n, runs);
    if (rc == 0 && (n > 1 || a.metric)) rc = show_compare(runs, n, &a, &out);
    else if (rc == 0)
        rc = sample ? show_sample(runs[0], &a, &out) : a.step >= 0 ? show_step(runs[0], &a, &out) : show_run(runs[0], &a, &out);
    if (rc == 0) rc = print(&out);
    for (int i = 0; i < n; i++) run_reader_close(runs[i]);
    buf_free(&out);
    return rc < 0 ? err_pass(rc, __FILE__, __LINE__) : cmd_flush();
}

/* On a terminal over what was there, else one after the other. */
static int print_again(const struct buf *b, bool over) {
    if (over) fputs("\x1b[H\x1b[2J\x1b[3J", stdout);
    TRY(print(b));
    return cmd_flush();
}

int cmd_status(int argc, char **argv) {
    const char *run = NULL, *colour = "auto";
    struct show_args a = {.step = -1, .uid = -1, .index = -1};
    bool watch = false, alive = true;
    int n = 0;
    const struct cmd_opt opts[] = {
        {"--watch", CMD_FLAG, &watch, NULL, "again every two seconds until the run has ended"},
        {"--color", CMD_STR, &colour, "WHEN", "auto (a terminal, no NO_COLOR; or VERLC_COLOR), always, never"},
        {"--json", CMD_FLAG, &a.json, NULL, "JSON, a line"}};
    struct cmd_spec spec =
        CMD_SPEC(opts, "verlc status RUN [--watch]",
                 "What a run does now: is its process there, phase and progress, the last steps' times, when it\n"
                 "will end; or how it ended.\n" RUN_HELP);
    struct run_reader *r = NULL;
    spec.operands = &run;
    spec.max_operands = 1;
    spec.n_operands = &n;
    int rc = cmd_parse(&spec, argc, argv);
    TRY(rc);
    if (rc) return 0;
    if (n == 0) FAIL(ERR_INVAL, "status: which run? usage: %s", spec.usage);
    TRY(terminal_of_output(&a.term, colour));
    TRY(run_reader_open(&r, run));
    const bool over = watch && !a.json && isatty(STDOUT_FILENO);
    do {
        struct buf out = {0};
        rc = show_status(r, &a, &out, &alive);
        if (rc == 0) rc = print_again(&out, over);
        buf_free(&out);
        if (rc == 0 && watch && alive) nanosleep(&(struct timespec){.tv_sec = WATCH_S}, NULL);
    } while (rc == 0 && watch && alive);
    run_reader_close(r);
    return rc < 0 ? err_pass(rc, __FILE__, __LINE__) : 0;
}
