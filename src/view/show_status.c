/* show_status.c - what a run does now: is its process there, phase and progress, the last steps' times, when it ends. */
#include "view/show.h"

#include "track/run_lock.h"

#include "base/clock.h"
#include "base/err.h"
#include "base/json.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

enum { LAST_STEPS = 5, MEAN_STEPS = 10, MAX_PHASES = 12 };

/* ---- times of steps ---- */

struct phase {
    const char *name; /* of timing_s/ */
    double seconds;
};
struct step_time {
    int64_t step;
    double seconds;
    struct metrics m; /* its phases are in it */
};

/* Of each step: not what all of them take together, not what is done once, not a part of a phase (update_weights of gen;
 * agent_loop/..., which also counts tokens). */
static bool is_phase(const char *name) {
    return strncmp(name, "timing_s/", 9) == 0 && strcmp(name + 9, "step") != 0 && strcmp(name + 9, "start") != 0 &&
           strcmp(name + 9, "update_weights") != 0 && !strchr(name + 9, '/');
}

static int read_step(struct run_reader *r, int64_t step, struct step_time *t) {
    *t = (struct step_time){.step = step};
    TRY(run_reader_step(r, step, &t->m));
    for (int64_t i = 0; i < t->m.n; i++)
        if (is_phase(t->m.items[i].name) && t->m.items[i].value > 0) t->seconds += t->m.items[i].value;
    return 0;
}

/* The last ones, the newest first; how many. */
static int last_steps(struct run_reader *r, struct step_time *list, int most) {
    struct run_steps s;
    int n = 0, rc = 0;
    TRY(run_reader_steps(r, 0, &s));
    for (int64_t i = s.n - 1; i >= 0 && n < most && rc == 0; i--) {
        rc = read_step(r, s.v[i], &list[n]);
        if (rc == 0) n++;
    }
    run_steps_free(&s);
    if (rc == 0) return n;
    while (n > 0) metrics_free(&list[--n].m);
    return rc;
}

static int longer(const void *a, const void *b) {
    const struct phase *x = a, *y = b;
    return x->seconds < y->seconds ? 1 : x->seconds > y->seconds ? -1 : 0;
}

static void phases(const struct step_time *s, const struct terminal *t, struct buf *out) {
    struct phase list[64];
    int n = 0;
    for (int64_t i = 0; i < s->m.n && n < 64; i++)
        if (is_phase(s->m.items[i].name) && s->m.items[i].value > 0)
            list[n++] = (struct phase){s->m.items[i].name + 9, s->m.items[i].value};
    if (n == 0) return;
    qsort(list, (size_t)n, sizeof *list, longer);
    term_add(t, out, TERM_BOLD, "phases of step %lld\n", (long long)s->step);
    const int bar = t->width - 48 < 60 ? t->width - 48 : 60;
    for (int i = 0; i < n && i < MAX_PHASES; i++) {
        struct buf time = {0};
        const double share = list[i].seconds / s->seconds;
        term_duration(&time, list[i].seconds);
        buf_adds(out, "  ");
        term_cell(out, list[i].name, strlen(list[i].name), 26, true);
        buf_addf(out, "%9s %4.0f%%  ", time.p, 100 * share);
        for (int k = 0; k < (int)(share * bar + 0.5); k++) buf_adds(out, "▇");
        buf_addc(out, '\n');
        buf_free(&time);
    }
}

/* ---- the process ---- */

static const char *state_of(const struct run_meta *m, const struct run_holder *h) {
    return h->state == RUN_HELD ? "running" : m->exit ? "ended" : h->state == RUN_LEFT || m->format > 1 ? "killed" : "unknown";
}

static void process(const struct run_meta *m, const struct run_status *s, const struct run_holder *h, const struct terminal *t,
                    struct buf *out) {
    const char *state = state_of(m, h);
    if (strcmp(state, "running") == 0) {
        term_add(t, out, TERM_GREEN, "running");
        buf_addf(out, ": pid %lld on %s, since %s\n", (long long)h->pid, h->host, h->started);
    } else if (strcmp(state, "ended") == 0) {
        const bool done = strcmp(m->exit, "done") == 0;
        term_begin(t, out, done ? TERM_GREEN : TERM_RED);
        buf_adds(out, "ended ");
        term_when(out, m->ended);
        buf_adds(out, ": ");
        term_text(out, m->exit, strlen(m->exit), false);
        term_end(t, out);
        buf_addc(out, '\n');
    } else if (strcmp(state, "killed") == 0) {
        term_add(t, out, TERM_RED, "no process, and no word of its end");
        buf_adds(out, ": killed, or the machine went down");
        if (s->known) {
            buf_adds(out, "\n  last heard of ");
            term_when(out, s->wall);
        }
        buf_adds(out, "\n  the same command goes on from its last checkpoint (trainer.resume_mode=auto)\n");
    } else buf_adds(out, "no process has its lock (an earlier verlc wrote it, which does not record how it ended)\n");
}

int show_process(struct run_reader *r, const struct run_meta *m, const struct terminal *t, struct buf *out) {
    struct run_status s;
    struct run_holder h;
    run_lock_look(&h, run_reader_dir(r));
    TRY(run_reader_status(r, &s));
    process(m, &s, &h, t, out);
    return 0;
}

/* ---- what it does ---- */

static void now(const struct run_meta *m, const struct run_status *s, const struct terminal *t, struct buf *out) {
    buf_addf(out, "step %lld", (long long)s->step);
    if (m->total_steps > 0) buf_addf(out, " of %lld", (long long)m->total_steps);
    buf_adds(out, "  ");
    term_begin(t, out, TERM_BOLD);
    term_text(out, *s->phase ? s->phase : "between phases", strlen(*s->phase ? s->phase : "between phases"), false);
    term_end(t, out);
    buf_adds(out, " for ");
    term_duration(out, clock_wall() - s->since);
    if (s->total > 0) buf_addf(out, ", %lld of %lld", (long long)s->done, (long long)s->total);
    if (s->tok_s > 0) buf_addf(out, ", %.0f tokens/s", s->tok_s);
    buf_addc(out, '\n');
}

static double mean_seconds(const struct step_time *list, int n) {
    double sum = 0;
    for (int i = 0; i < n; i++) sum += list[i].seconds;
    return n > 0 ? sum / n : 0;
}

/* All that is shown. */
struct snapshot {
    struct run_meta meta;
    struct run_status status;
    struct run_holder holder;
    struct step_time list[MEAN_STEPS]; /* the last n steps, the newest first */
    int n;
};

static int as_text(struct run_reader *r, const struct snapshot *x, const struct terminal *t, struct buf *out) {
    const struct run_meta *const m = &x->meta;
    const struct run_status *const s = &x->status;
    const struct run_holder *const h = &x->holder;
    const struct step_time *const list = x->list;
    const int n = x->n;
    const double mean = mean_seconds(list, n);
    TRY(show_heading(r, m, t, out));
    process(m, s, h, t, out);
    if (h->state == RUN_HELD && s->known) now(m, s, t, out);
    if (n > 0) {
        buf_adds(out, "last steps");
        for (int i = 0; i < n && i < LAST_STEPS; i++) {
            buf_addf(out, "%s %lld: ", i ? "," : " ", (long long)list[i].step);
            term_duration(out, list[i].seconds);
        }
        buf_addc(out, '\n');
    }
    if (h->state == RUN_HELD && n > 0 && m->total_steps > m->last_step) {
        buf_adds(out, "ends in about ");
        term_duration(out, mean * (double)(m->total_steps - m->last_step));
        buf_addf(out, " (%lld steps, mean of the last %d)\n", (long long)(m->total_steps - m->last_step), n);
    }
    if (n > 0) phases(&list[0], t, out);
    return 0;
}

static int as_json(struct run_reader *r, const struct snapshot *x, struct buf *out) {
    const struct run_meta *const m = &x->meta;
    const struct run_status *const s = &x->status;
    const struct run_holder *const h = &x->holder;
    const struct step_time *const list = x->list;
    const int n = x->n;
    json_t *times = json_array();
    for (int i = 0; i < n; i++)
        json_array_append_new(times,
                              json_pack("{s:I, s:o}", "step", (json_int_t)list[i].step, "seconds", show_number(list[i].seconds)));
    json_t *o = json_pack("{s:s, s:s, s:s?, s:I, s:I, s:o}", "run", run_reader_dir(r), "state", state_of(m, h), "exit", m->exit,
                          "last_step", (json_int_t)m->last_step, "total_steps", (json_int_t)m->total_steps, "last_steps", times);
    if (!o) FAIL(ERR_FORMAT, "%s: its directory's name is no UTF-8", run_reader_dir(r));
    if (h->state != RUN_FREE) json_object_set_new(o, "pid", json_integer((json_int_t)h->pid));
    if (h->state != RUN_FREE) json_object_set_new(o, "host", json_string(h->host));
    if (s->known)
        json_object_set_new(o, "now",
                            json_pack("{s:I, s:s, s:f, s:I, s:I, s:f, s:f}", "step", (json_int_t)s->step, "phase", s->phase,
                                      "since", s->since, "done", (json_int_t)s->done, "total", (json_int_t)s->total, "tok_s",
                                      s->tok_s, "wall", s->wall));
    if (h->state == RUN_HELD && n > 0 && m->total_steps > m->last_step)
        json_object_set_new(o, "eta_s", json_real(mean_seconds(list, n) * (double)(m->total_steps - m->last_step)));
    const int rc = json_dump_line(out, o);
    json_decref(o);
    return rc == 0 ? buf_addc(out, '\n') : rc;
}

int show_status(struct run_reader *r, const struct show_args *a, struct buf *out, bool *alive) {
    struct snapshot x = {0};
    run_lock_look(&x.holder, run_reader_dir(r)); /* before the end is read: a run that ends in between has then reported it */
    *alive = x.holder.state == RUN_HELD;
    TRY(run_reader_meta(r, &x.meta));
    int rc = run_reader_status(r, &x.status);
    if (rc == 0) rc = x.n = last_steps(r, x.list, MEAN_STEPS);
    if (rc >= 0) rc = a->json ? as_json(r, &x, out) : as_text(r, &x, &a->term, out);
    for (int i = 0; i < x.n; i++) metrics_free(&x.list[i].m);
    run_meta_free(&x.meta);
    return rc;
}
