/* time_probe.c - see time_probe.h. */
#include "plan/time_probe.h"

#include "base/clock.h"
#include "base/err.h"
#include "base/json.h"
#include "base/log.h"

#include <stdlib.h>
#include <string.h>

/* ---- measuring ---- */

void probe_prepare(struct time_probe *p, struct run *r, const char *device, bool own_memory) {
    snprintf(p->device, sizeof p->device, "%s", device);
    p->memory = r->program.plan ? json_deep_copy(r->program.plan(r->program.ctx)) : NULL;
    p->own_memory = own_memory;
    p->total_steps = r->total_steps;
    p->done_steps = r->step;
    p->save_freq = r->k.save_freq;
    p->test_freq = r->k.test_freq;
    p->keep_ckpts = r->k.keep_ckpts;
    p->validates = r->k.validates;
    p->early_stopping = r->early.enable;
    p->full = p->validation = p->checkpoint = -1;
    r->probing = true;
    r->k.save_freq = 0;
    r->k.test_freq = -1;
    r->early.enable = false;
    if (r->total_steps < r->step + PROBE_STEPS + 1) r->total_steps = r->step + PROBE_STEPS + 1;
}

struct time_probe probe_opening(void) {
    const struct time_probe p = {.level = log_level(), .start = clock_now()};
    if (p.level == LOG_INFO) log_set_level(LOG_WARN);
    return p;
}

void probe_opened(struct time_probe *p) {
    p->start = clock_now() - p->start;
    log_set_level(p->level);
}

void probe_choices(const struct probe_keys *k, struct buf *out) {
    const bool samples = k->cut.max_seqs > 0;
    const char *key = samples ? k->samples : k->tokens;
    const int64_t now = samples ? k->cut.max_seqs : k->cut.max_rows;
    if (!samples || now * 2 <= k->most) buf_addf(out, "%s=%lld\n", key, (long long)now * 2);
    if (now > 1) buf_addf(out, "%s=%lld\n", key, (long long)now / 2);
    if (k->recompute != RECOMPUTE_NONE) buf_addf(out, "trainer.recompute=none\n");
    if (k->recompute != RECOMPUTE_LAYER) buf_addf(out, "trainer.recompute=layer\n");
    if (k->offload) buf_addf(out, "%s=%s\n", k->offload, k->offloads ? "False" : "True");
}

void time_probe_free(struct time_probe *p) {
    json_decref(p->memory);
    p->memory = NULL;
}

static struct probe_phase *phase_of(struct time_probe *p, const char *name) {
    int i = 0;
    while (i < p->n_phases && strcmp(p->phase[i].name, name) != 0) i++;
    if (i == PROBE_MAX_PHASES) return &p->phase[i - 1];
    if (i == p->n_phases) {
        p->phase[i] = (struct probe_phase){0};
        snprintf(p->phase[i].name, sizeof p->phase[i].name, "%s", name);
        p->n_phases++;
    }
    return &p->phase[i];
}

/* Whether timing_s/NAME is a stage of a step: not the sum, not the start, which the first step reports, not a part of a stage. */
static bool is_stage(const char *name) {
    static const char *const others[] = {"step", "start", "update_weights"};
    for (size_t i = 0; i < sizeof others / sizeof *others; i++)
        if (strcmp(name, others[i]) == 0) return false;
    return strchr(name, '/') == NULL;
}

/* The stages of a step from its metrics. step: which one; PROBE_STEPS: the one at full length. */
static void take_phases(struct time_probe *p, const struct metrics *m, int step, double seconds) {
    static const char prefix[] = "timing_s/";
    double rest = seconds;
    for (int64_t i = 0; i < m->n; i++) {
        const char *name = m->items[i].name + sizeof prefix - 1;
        if (strncmp(m->items[i].name, prefix, sizeof prefix - 1) != 0 || !is_stage(name)) continue;
        struct probe_phase *f = phase_of(p, name);
        *(step == PROBE_STEPS ? &f->full : &f->step[step]) += m->items[i].value;
        rest -= m->items[i].value;
    }
    struct probe_phase *f = phase_of(p, "between phases");
    *(step == PROBE_STEPS ? &f->full : &f->step[step]) = rest > 0 ? rest : 0;
}

static int one_step(const struct probe_calls *c, struct time_probe *p, double *seconds) {
    const double start = clock_now();
    if (!c->begin(c->ctx)) FAIL(ERR_INVAL, "the probe found no step to make; see trainer.val_only and the data's size");
    TRY(c->step(c->ctx, p));
    *seconds = clock_now() - start;
    return 0;
}

/* Of a checkpoint, by its manifest. */
static int64_t checkpoint_bytes(const struct run *r) {
    char *path = xasprintf("%s/global_step_%lld/manifest.json", r->k.default_local_dir, (long long)r->step);
    json_t *manifest = json_load_file(path, 0, NULL);
    const char *name;
    json_t *file;
    int64_t sum = 0;
    json_object_foreach(json_object_get(manifest, "files"), name, file) sum += json_integer_value(json_object_get(file, "bytes"));
    json_decref(manifest);
    free(path);
    return sum;
}

static int measure_rest(struct time_probe *p, struct run *r, const struct probe_calls *c) {
    enum { FULL_AT_MOST = 8 }; /* times as many tokens as the probe's step: more is left to arithmetic */
    if (c->full_length && p->clipped < 0.95 && (double)p->limit < FULL_AT_MOST * p->length) {
        struct time_probe scratch = *p;
        log_info("probe: a step with every response at full length");
        c->full_length(c->ctx);
        TRY(one_step(c, &scratch, &p->full));
        take_phases(p, &r->metrics, PROBE_STEPS, p->full);
    }
    if (p->validates) {
        log_info("probe: a validation pass");
        const double start = clock_now();
        TRY(c->validate(c->ctx, p));
        p->validation = clock_now() - start;
    }
    if (p->save_freq != 0) {
        log_info("probe: a checkpoint");
        const double start = clock_now();
        TRY(run_save_timed(r, &p->checkpoint_waits));
        p->checkpoint = clock_now() - start;
        p->checkpoint_bytes = checkpoint_bytes(r);
    }
    return 0;
}

int probe_measure(struct time_probe *p, struct run *r, const struct probe_calls *c, bool whole) {
    struct time_probe sum = {0};
    for (int i = 0; i < PROBE_STEPS; i++) {
        TRY(one_step(c, p, &p->step[i]));
        take_phases(p, &r->metrics, i, p->step[i]);
        p->n_steps = i + 1;
        log_info("probe: step %d of %d: %.3g s%s", i + 1, PROBE_STEPS, p->step[i], i == 0 ? " (the first, not in the mean)" : "");
        if (i == 0) continue;
        const double w = 1.0 / (PROBE_STEPS - 1);
        sum.tokens += w * p->tokens;
        sum.prompt += w * p->prompt;
        sum.length += w * p->length;
        sum.clipped += w * p->clipped;
        sum.half += w * p->half;
        sum.longest = p->longest > sum.longest ? p->longest : sum.longest;
    }
    p->tokens = sum.tokens;
    p->prompt = sum.prompt;
    p->length = sum.length;
    p->clipped = sum.clipped;
    p->half = sum.half;
    p->longest = sum.longest;
    return whole ? measure_rest(p, r, c) : 0;
}

/* ---- arithmetic ---- */

static double mean_of(const double step[PROBE_STEPS], int n) {
    double sum = 0;
    for (int i = 1; i < n; i++) sum += step[i];
    return n > 1 ? sum / (n - 1) : 0;
}

static double phase_mean(const struct time_probe *p, const char *name) {
    for (int i = 0; i < p->n_phases; i++)
        if (strcmp(p->phase[i].name, name) == 0) return mean_of(p->phase[i].step, p->n_steps);
    return 0;
}

/* Steps in (done, total] at which something with this frequency is due: the last one is. */
static int64_t times_due(int64_t done, int64_t total, int64_t freq) {
    if (freq <= 0 || total <= done) return 0;
    return total / freq - done / freq + (total % freq != 0);
}

static int64_t validations(const struct time_probe *p, int64_t freq) {
    return (p->validates ? times_due(p->done_steps, p->total_steps, freq) : 0) + p->val_first;
}

static int64_t checkpoints(const struct time_probe *p, int64_t freq) {
    return freq < 0 ? p->total_steps > p->done_steps : times_due(p->done_steps, p->total_steps, freq);
}

/* Of all validation rows. */
static double validation_seconds(const struct time_probe *p) {
    return p->validation > 0 && p->validated > 0 ? p->validation * (double)p->val_rows / (double)p->validated : 0;
}

/* What the run waits for all its checkpoints: for the last one until it is on disk, for the others until the next step can
 * begin; one that is still being written when the next is due is waited for. */
static double checkpoint_seconds(const struct time_probe *p, int64_t freq) {
    const int64_t n = checkpoints(p, freq);
    const double overlap = freq > 0 ? (double)freq * mean_of(p->step, p->n_steps) : 0, late = p->checkpoint - overlap;
    if (n == 0 || p->checkpoint < 0) return 0;
    return p->checkpoint + (double)(n - 1) * (late > p->checkpoint_waits ? late : p->checkpoint_waits);
}

/* Tokens of a step at full length over those of the probe's. */
static double full_growth(const struct time_probe *p) {
    return p->length > 0 ? (p->prompt + (double)p->limit) / (p->prompt + p->length) : 1;
}

/* A step with every response at full length: measured, else by the number of tokens. */
static double full_step(const struct time_probe *p, double step) { return p->full > 0 ? p->full : step * full_growth(p); }

static double share(double part, double whole) { return whole > 0 ? part / whole : 0; }

static void make_time_plan(struct time_plan *t, const struct time_probe *p) {
    const int64_t left = p->total_steps > p->done_steps ? p->total_steps - p->done_steps : 0;
    const int64_t warm = p->policy_from - 1 - p->done_steps;
    *t = (struct time_plan){.step = mean_of(p->step, p->n_steps), .least = p->step[1], .most = p->step[1], .steps = left};
    for (int i = 2; i < p->n_steps; i++) {
        if (p->step[i] < t->least) t->least = p->step[i];
        if (p->step[i] > t->most) t->most = p->step[i];
    }
    t->critic_steps = warm < 0 ? 0 : warm < left ? warm : left;
    t->validations = validations(p, p->test_freq);
    t->checkpoints = checkpoints(p, p->save_freq);
    const double first = left > 0 && p->step[0] > t->step ? p->step[0] - t->step : 0;
    const double update = phase_mean(p, "update_actor");
    t->train = first + (double)left * t->step - (double)t->critic_steps * update;
    t->validate = (double)t->validations * validation_seconds(p);
    t->save = checkpoint_seconds(p, p->save_freq);
    t->total = p->start + t->train + t->validate + t->save;
    t->full = -1;
    if (p->limit > 0) {
        const double full = full_step(p, t->step), growth = share(full, t->step);
        t->full = p->start + first + (double)left * full - (double)t->critic_steps * update * growth +
                  t->validate * (p->full > 0 ? growth : full_growth(p)) + t->save;
    }
}

/* ---- what a change costs ---- */

enum { MAX_CHANGES = 48 };
struct change {
    char text[160], how[256];
    double step, run; /* seconds more (less where < 0) of a step, of the run */
    const char *error;
};
struct changes {
    struct change v[MAX_CHANGES];
    int n;
};

static struct change *add(struct changes *l, const char *key, int64_t value) {
    struct change *c = &l->v[l->n < MAX_CHANGES ? l->n++ : l->n - 1];
    *c = (struct change){0};
    snprintf(c->text, sizeof c->text, "%s=%lld", key, (long long)value);
    return c;
}

struct freq_change {
    const char *key, *what;
    int64_t freq, times, now; /* times: how often with freq, and now */
    double run;               /* seconds more of the run */
};

static void change_freq(struct changes *l, const struct freq_change *f) {
    struct change *c = add(l, f->key, f->freq);
    c->run = f->run;
    snprintf(c->how, sizeof c->how, "computed: %lld %s, now %lld", (long long)f->times, f->what, (long long)f->now);
}

static void change_frequencies(struct changes *l, const struct time_probe *p, const struct time_plan *t) {
    const int64_t f = p->test_freq, s = p->save_freq;
    for (int i = 0; i < 2 && p->validation > 0 && f > 0; i++) {
        const int64_t freq = i ? -1 : f * 2, times = validations(p, freq);
        const double run = (double)(times - t->validations) * validation_seconds(p);
        change_freq(
            l, &(struct freq_change){
                   .key = "trainer.test_freq", .what = "passes", .freq = freq, .times = times, .now = t->validations, .run = run});
    }
    for (int i = 0; i < 2 && p->checkpoint > 0 && s > 0; i++) {
        const int64_t freq = i ? s / 2 : s * 2;
        if (freq > 0)
            change_freq(l, &(struct freq_change){.key = "trainer.save_freq",
                                                 .what = "checkpoints",
                                                 .freq = freq,
                                                 .times = checkpoints(p, freq),
                                                 .now = t->checkpoints,
                                                 .run = checkpoint_seconds(p, freq) - t->save});
    }
}

/* One sample more of each prompt, responses that end at half the limit: by the number of tokens. */
static void change_samples(struct changes *l, const struct time_probe *p, const struct time_plan *t) {
    if (p->limit < 2 || p->length <= 0) return;
    const double steps = (double)t->steps;
    struct change *c = add(l, "actor_rollout_ref.rollout.n", p->n + 1);
    c->step = t->step / (double)p->n;
    c->run = c->step * steps;
    snprintf(c->how, sizeof c->how,
             "predicted, at most: as many more tokens; a decoding step with more samples costs less than that");
    c = add(l, "data.max_response_length", p->limit / 2);
    const double gen = phase_mean(p, "gen"), half = share(p->half, p->length),
                 all = share(p->prompt + p->half, p->prompt + p->length);
    c->step = gen * (half - 1) + (t->step - gen) * (all - 1);
    c->run = c->step * steps + t->validate * (half - 1);
    snprintf(c->how, sizeof c->how, "predicted, by tokens: the probe's responses cut there, %.0f for %.0f on average", p->half,
             p->length);
}

static void change_measured(struct changes *l, const struct time_plan *t, const struct probe_choice *m) {
    struct change *c = add(l, "", 0);
    struct time_plan other;
    snprintf(c->text, sizeof c->text, "%s", m->change);
    c->error = m->error;
    if (m->error) return;
    make_time_plan(&other, m->probe);
    c->step = other.step - t->step;
    c->run = (double)other.steps * other.step - (double)t->steps * t->step;
    const double spread = t->most - t->least > other.most - other.least ? t->most - t->least : other.most - other.least;
    const bool noise = c->step < spread && -c->step < spread;
    snprintf(c->how, sizeof c->how, "measured: %d steps of its own%s", m->probe->n_steps,
             noise ? "; no more than the steps differ among themselves" : "");
}

/* What was measured of a key is not predicted as well. */
static void drop_predicted(struct changes *l, const char *text) {
    const size_t key = strcspn(text, "=");
    for (int i = l->n - 1; i >= 0; i--)
        if (strncmp(l->v[i].text, text, key + 1) == 0) memmove(&l->v[i], &l->v[i + 1], (size_t)(--l->n - i) * sizeof l->v[0]);
}

static void make_changes(struct changes *l, const struct time_probe *p, const struct time_plan *t, const struct probe_choice *c,
                         int n) {
    l->n = 0;
    change_frequencies(l, p, t);
    change_samples(l, p, t);
    for (int i = 0; i < n; i++)
        if (!c[i].error) drop_predicted(l, c[i].change);
    for (int i = 0; i < n; i++) change_measured(l, t, &c[i]);
}

/* ---- the table ---- */

static const char *duration(double s, char out[32]) {
    const double a = s < 0 ? -s : s;
    if (a < 120) snprintf(out, 32, "%.3g s", s);
    else if (a < 7200) snprintf(out, 32, "%.1f min", s / 60);
    else snprintf(out, 32, "%.1f h", s / 3600);
    return out;
}

static const char *signed_duration(double s, char out[32]) {
    char text[32];
    if (s > -1e-9 && s < 1e-9) return strcpy(out, "same");
    snprintf(out, 32, "%s%s", s > 0 ? "+" : "", duration(s, text));
    return out;
}

static void print_step(const struct time_probe *p, const struct time_plan *t, struct buf *b) {
    char d[32], e[32];
    buf_addf(b, "time plan: %s; a step is the mean of steps 2 to %d (%.3g to %.3g s), without the first\n", p->device, p->n_steps,
             t->least, t->most);
    buf_addf(b, "  %-34s %12s %12s %7s\n", "phase", "first step", "a step", "share");
    for (int i = 0; i < p->n_phases; i++) {
        const double mean = mean_of(p->phase[i].step, p->n_steps);
        if (mean < 5e-3 * t->step && p->phase[i].step[0] < 5e-3 * p->step[0]) continue;
        buf_addf(b, "  %-34s %12s %12s %5.0f %%\n", p->phase[i].name, duration(p->phase[i].step[0], d), duration(mean, e),
                 100 * share(mean, t->step));
    }
    buf_addf(b, "  %-34s %12s %12s  %.0f tokens a second\n", "step", duration(p->step[0], d), duration(t->step, e),
             share(p->tokens, t->step));
    if (p->limit > 0)
        buf_addf(b, "  responses: %.0f tokens on average, the longest %.0f, %.0f %% of them at the limit of %lld\n", p->length,
                 p->longest, 100 * p->clipped, (long long)p->limit);
}

static void print_run(const struct time_probe *p, const struct time_plan *t, struct buf *b) {
    char d[32], each[32];
    if (p->done_steps > 0)
        buf_addf(b, "to the end, from the checkpoint of step %lld of %lld:\n", (long long)p->done_steps, (long long)p->total_steps);
    else buf_addf(b, "the whole run:\n");
    buf_addf(b, "  %-34s %12s\n", "start", duration(p->start, d));
    buf_addf(b, "  %-34s %12s  %lld x %s", "steps", duration(t->train, d), (long long)t->steps, duration(t->step, each));
    if (t->critic_steps > 0) buf_addf(b, ", %lld of them without the policy's update", (long long)t->critic_steps);
    buf_addf(b, "\n");
    if (p->validation > 0) {
        buf_addf(b, "  %-34s %12s  %lld x %s", "validation passes", duration(t->validate, d), (long long)t->validations,
                 duration(validation_seconds(p), each));
        if (p->validated < p->val_rows)
            buf_addf(b, ", measured on %lld of %lld rows", (long long)p->validated, (long long)p->val_rows);
        buf_addf(b, "\n");
    }
    if (p->checkpoint > 0) {
        const int64_t kept = p->keep_ckpts > 0 && p->keep_ckpts < t->checkpoints ? p->keep_ckpts : t->checkpoints;
        buf_addf(b, "  %-34s %12s  %lld x %s, %.2f GiB each, %.1f GiB on disk at the end\n", "checkpoints", duration(t->save, d),
                 (long long)t->checkpoints, duration(p->checkpoint_waits, each), (double)p->checkpoint_bytes / 0x1p30,
                 (double)(kept * p->checkpoint_bytes) / 0x1p30);
        if (p->checkpoint_waits < 0.9 * p->checkpoint)
            buf_addf(b, "  %-34s %12s  %s to disk, overlapped with the next steps; the last one is waited for\n", "", "",
                     duration(p->checkpoint, each));
    }
    buf_addf(b, "  %-34s %12s\n", "total", duration(t->total, d));
    if (t->full > t->total)
        buf_addf(b, "  %-34s %12s  %s\n", "at full length, at most", duration(t->full, d),
                 p->full > 0 ? "every response at the limit: one such step was measured"
                             : "every response at the limit: predicted by tokens; attention grows faster");
    if (p->limit > 0)
        buf_addf(
            b, "  assumed: responses as long as the probe's. How lengths develop cannot be known; the range ends at full length\n");
    if (p->early_stopping) buf_addf(b, "  early stopping may end it sooner; what it saves besides is not counted\n");
}

static void print_changes(const struct changes *l, const struct time_plan *t, struct buf *b) {
    char d[32], e[32];
    if (l->n > 0) buf_addf(b, "what a change costs (-: saves):\n  %-58s %10s %7s %10s\n", "key", "a step", "", "the run");
    for (int i = 0; i < l->n; i++) {
        const struct change *c = &l->v[i];
        if (c->error) buf_addf(b, "  %-58s not measured: %s\n", c->text, c->error);
        else if (c->step > -1e-9 && c->step < 1e-9)
            buf_addf(b, "  %-58s %10s %7s %10s  %s\n", c->text, "same", "", signed_duration(c->run, e), c->how);
        else
            buf_addf(b, "  %-58s %10s %+5.0f %% %10s  %s\n", c->text, signed_duration(c->step, d), 100 * share(c->step, t->step),
                     signed_duration(c->run, e), c->how);
    }
}

void time_plan_print(const struct time_probe *p, const struct probe_choice *c, int n, struct buf *b) {
    struct time_plan t;
    struct changes *l = xcalloc(1, sizeof *l);
    make_time_plan(&t, p);
    make_changes(l, p, &t, c, n);
    print_step(p, &t, b);
    print_run(p, &t, b);
    print_changes(l, &t, b);
    free(l);
}

static json_t *number_or_null(double x) { return x < 0 ? json_null() : json_real(x); }

json_t *time_plan_json(const struct time_probe *p, const struct probe_choice *c, int n) {
    struct time_plan t;
    struct changes *l = xcalloc(1, sizeof *l);
    json_t *phases = json_object(), *steps = json_array(), *changes = json_array();
    make_time_plan(&t, p);
    make_changes(l, p, &t, c, n);
    for (int i = 0; i < p->n_steps; i++) json_array_append_new(steps, json_real(p->step[i]));
    for (int i = 0; i < p->n_phases; i++)
        json_object_set_new(phases, p->phase[i].name,
                            json_pack("{s:f, s:f}", "first", p->phase[i].step[0], "mean", mean_of(p->phase[i].step, p->n_steps)));
    for (int i = 0; i < l->n; i++)
        json_array_append_new(changes, l->v[i].error ? json_pack("{s:s, s:s}", "change", l->v[i].text, "error", l->v[i].error)
                                                     : json_pack("{s:s, s:f, s:f, s:s}", "change", l->v[i].text, "step",
                                                                 l->v[i].step, "run", l->v[i].run, "how", l->v[i].how));
    json_t *out = json_pack("{s:s, s:o, s:o, s:f, s:f, s:o, s:f}", "device", p->device, "steps", steps, "phases", phases, "step",
                            t.step, "start", p->start, "step_at_full_length", number_or_null(p->full), "tokens", p->tokens);
    json_object_set_new(out, "validation",
                        json_pack("{s:o, s:I, s:I, s:I}", "seconds", number_or_null(p->validation > 0 ? validation_seconds(p) : -1),
                                  "rows", (json_int_t)p->val_rows, "measured_rows", (json_int_t)p->validated, "passes",
                                  (json_int_t)t.validations));
    json_object_set_new(out, "checkpoint",
                        json_pack("{s:o, s:f, s:I, s:I}", "seconds", number_or_null(p->checkpoint), "waits", p->checkpoint_waits,
                                  "bytes", (json_int_t)p->checkpoint_bytes, "count", (json_int_t)t.checkpoints));
    if (p->limit > 0)
        json_object_set_new(out, "responses",
                            json_pack("{s:f, s:f, s:f, s:I}", "mean", p->length, "longest", p->longest, "share_at_limit",
                                      p->clipped, "limit", (json_int_t)p->limit));
    json_object_set_new(out, "run",
                        json_pack("{s:I, s:I, s:f, s:o}", "done_steps", (json_int_t)p->done_steps, "total_steps",
                                  (json_int_t)p->total_steps, "seconds", t.total, "seconds_at_full_length",
                                  number_or_null(t.full)));
    json_object_set_new(out, "changes", changes);
    if (p->memory) json_object_set(out, "memory", p->memory);
    free(l);
    return out;
}
