/* grep.c - verlc grep: a regular expression in the prompts and responses of a run. */
#include "cmd/cmd.h"

#include "base/buf.h"
#include "base/clock.h"
#include "base/err.h"
#include "base/json.h"
#include "view/show.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#define SILENT_S 2.0 /* so long without a progress line */
#define SLICE_S 0.25

struct output {
    struct terminal term;
    bool count, json, cut; /* cut: lines to the width */
    bool progress, shown;  /* on standard error; a line of it is there */
    double started;
    int64_t n;
};

static void clear_progress(struct output *o) {
    if (o->shown) fputs("\r\x1b[K", stderr);
    o->shown = false;
}

static void progress(struct output *o, const struct run_search *s) {
    int64_t done, total;
    if (!o->progress || clock_now() - o->started < SILENT_S) return;
    run_search_progress(s, &done, &total);
    fprintf(stderr, "\r\x1b[K%lld of %lld samples searched, %lld lines match", (long long)done, (long long)total, (long long)o->n);
    fflush(stderr);
    o->shown = true;
}

/* The line with its matches, from a byte on that leaves the first one visible. */
static void add_line(const struct output *o, struct run_search *s, const struct run_match *m, int columns, struct buf *b) {
    size_t from = 0, lo = m->lo, hi = m->hi, end = m->line.n;
    if (o->cut && term_width(m->line.p, m->line.n) > columns) {
        while (from < lo && term_width(m->line.p + from, hi - from) > columns * 2 / 3) from += (size_t)1;
        while (from < lo && ((unsigned char)m->line.p[from] & 0xc0) == 0x80) from++;
        while (end > hi && term_width(m->line.p + from, end - from) > columns - 2) end--;
        while (end > hi && end < m->line.n && ((unsigned char)m->line.p[end] & 0xc0) == 0x80) end--;
    }
    if (from > 0) buf_adds(b, "…");
    while (lo < end) {
        term_text(b, m->line.p + from, lo - from, false);
        const size_t stop = hi < end ? hi : end;
        term_begin(&o->term, b, "1;31");
        term_text(b, m->line.p + lo, stop - lo, false);
        term_end(&o->term, b);
        from = stop;
        if (hi == lo) break; /* an empty match */
        if (!run_search_in_line(s, m->line, from, &lo, &hi)) break;
    }
    if (from < end) term_text(b, m->line.p + from, end - from, false);
    if (end < m->line.n) buf_adds(b, "…");
}

static int print_match(struct output *o, struct run_search *s, const struct run_match *m) {
    struct buf b = {0};
    int rc = 0;
    const char *where = m->in_response ? "response" : "prompt";
    if (o->json) {
        json_t *v =
            json_pack("{s:I, s:I, s:I, s:I, s:b, s:o, s:s, s:I, s:s%}", "id", (json_int_t)m->id, "step", (json_int_t)m->step, "uid",
                      (json_int_t)m->uid, "sample", (json_int_t)m->index, "validation", m->validation, "score",
                      show_number(m->score), "where", where, "line_no", (json_int_t)m->line_no, "line", m->line.p, m->line.n);
        rc = json_dump_line(&b, v);
        json_decref(v);
    } else {
        char head[128];
        snprintf(head, sizeof head, "%lld:%lld.%lld:%s%s:%lld:", (long long)m->step, (long long)m->uid, (long long)m->index,
                 m->validation ? "validation " : "", where, (long long)m->line_no);
        term_add(&o->term, &b, TERM_MAGENTA, "%s", head);
        buf_addc(&b, ' ');
        add_line(o, s, m, o->term.width - (int)strlen(head) - 1, &b);
    }
    clear_progress(o);
    if (rc == 0) rc = cmd_print_line(b.p, b.n);
    if (rc == 0 && o->cut) rc = cmd_flush(); /* somebody is looking on */
    buf_free(&b);
    return rc;
}

static int search(struct output *o, struct run_search *s) {
    struct run_match m;
    o->started = clock_now();
    for (;;) {
        const int rc = run_search_next(s, SLICE_S, &m);
        TRY(rc);
        if (rc == RUN_SEARCH_END) break;
        if (rc == RUN_SEARCH_MORE) {
            progress(o, s);
            continue;
        }
        o->n++;
        if (!o->count) TRY(print_match(o, s, &m));
    }
    clear_progress(o);
    if (!o->count) return 0;
    char text[32];
    const int n = snprintf(text, sizeof text, "%lld", (long long)o->n);
    return cmd_print_line(text, (size_t)n);
}

/* As grep's. */
static void long_names(int argc, char **argv) {
    for (int i = 1; i < argc; i++) {
        if (strcmp(argv[i], "-i") == 0) argv[i] = (char *)(uintptr_t) "--ignore-case";
        if (strcmp(argv[i], "-c") == 0) argv[i] = (char *)(uintptr_t) "--count";
    }
}

int cmd_grep(int argc, char **argv) {
    const char *operands[2], *colour = "auto";
    struct output o = {0};
    struct run_search_args a = {.step = -1};
    bool prompt = false, response = false;
    int n = 0;
    const struct cmd_opt opts[] = {
        {"--step", CMD_I64("int[0,2^53]"), &a.step, "N", "this step's samples alone"},
        {"--prompt", CMD_FLAG, &prompt, NULL, "prompts alone"},
        {"--response", CMD_FLAG, &response, NULL, "responses alone"},
        {"--ignore-case", CMD_FLAG, &a.ignore_case, NULL, "-i: upper and lower case are the same"},
        {"--count", CMD_FLAG, &o.count, NULL, "-c: the number of lines that match"},
        {"--color", CMD_STR, &colour, "WHEN", "auto (a terminal, no NO_COLOR; or VERLC_COLOR), always, never"},
        {"--json", CMD_FLAG, &o.json, NULL, "a JSON object a line that matches"}};
    struct cmd_spec spec =
        CMD_SPEC(opts, "verlc grep PATTERN RUN [--step N] [--prompt | --response] [-i] [-c]",
                 "Lines of prompts and responses that match a regular expression (PCRE2), the newest step first:\n"
                 "step:uid.sample:where:line. 'verlc show RUN --step N --sample UID.K' shows the sample.\n"
                 "Exit status 0: there are some; 1: none. RUN is the run's directory or its run.db.");
    struct run_reader *r = NULL;
    struct run_search *s = NULL;
    spec.operands = operands;
    spec.max_operands = 2;
    spec.n_operands = &n;
    long_names(argc, argv);
    int rc = cmd_parse(&spec, argc, argv);
    TRY(rc);
    if (rc) return 0;
    if (n < 2) FAIL(ERR_INVAL, "grep: a pattern and a run are needed; usage: %s", spec.usage);
    TRY(terminal_of_output(&o.term, colour));
    a.pattern = operands[0];
    a.prompts = prompt || !response;
    a.responses = response || !prompt;
    o.cut = isatty(STDOUT_FILENO);
    o.progress = isatty(STDERR_FILENO);
    TRY(run_reader_open(&r, operands[1]));
    rc = run_search_create(&s, r, &a);
    if (rc == 0) rc = search(&o, s);
    run_search_destroy(s);
    run_reader_close(r);
    if (rc < 0) return err_pass(rc, __FILE__, __LINE__);
    TRY(cmd_flush());
    return o.n > 0 ? 0 : 1;
}
