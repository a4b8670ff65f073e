/* run.c - see run.h. */
#include "run/run.h"

#include "run/unusual_settings.h"

#include "base/buf.h"
#include "base/clock.h"
#include "base/err.h"
#include "base/file.h"
#include "base/json.h"
#include "base/log.h"

#include "text/text.h"

#include <stdlib.h>
#include <string.h>

/* ---- opening ---- */

int run_config_lock(struct run_config *k) {
    static const char *const written[] = {"", "custom", "bad_batches"};
    if (k->lock) return 0;
    TRY(run_lock_take(&k->lock, "trainer.default_local_dir", k->default_local_dir));
    for (size_t i = 0; i < sizeof written / sizeof *written; i++) {
        char *dir = file_join(k->default_local_dir, written[i]);
        const int rc = file_remove_temps(dir);
        free(dir);
        TRY(rc);
    }
    TRY(remote_remove_left(k->default_local_dir));
    return ckpt_recover(k->default_local_dir);
}

void run_warn_early(void *run, const char *line) {
    log_warn("%s", line);
    json_array_append_new(((struct run *)run)->odd, json_string(line));
}

/* Prompts that have the date in them stay what they were when the run began. */
static int keep_date(const struct resume *from) {
    int64_t date = 0;
    if (from->trainer) TRY(json_i64_opt(from->trainer, "template_date", &date, from->dir));
    if (date == 0) return 0;
    const int rc = chat_template_set_date(date);
    return rc < 0 ? err_wrap(rc, "%s/trainer.json", from->dir) : 0;
}

int run_open(struct run *r, const struct conf *c, const struct run_config *k, const struct run_program *p) {
    struct buf yaml = {0};
    const struct resume_args a = {.mode = k->resume_mode, .path = k->resume_from, .root = k->default_local_dir};
    *r = (struct run){.k = *k, .program = *p, .saved_step = -1, .begun_step = -1, .from = {.step = -1}};
    r->odd = json_array();
    if (k->early_warnings) unusual_settings_find(c, run_warn_early, r);
    r->loggers.trace = k->trace.backend != NULL;
    TRY(track_choose(&r->loggers, k->loggers, k->n_loggers, conf_is_set(c, "trainer.logger")));
    TRY(early_stop_read(&r->early, &k->early_stop, k->stop_metric, k->validates));
    TRY(run_config_lock(&r->k));
    TRY(conf_yaml(c, &yaml));
    r->config_yaml = buf_take(&yaml);
    TRY(phases_create(&r->stages, k->deadline_s));
    phase_begin(r->stages, "start");
    TRY(resume_find(&r->from, &a));
    if (k->default_hdfs_dir && *k->default_hdfs_dir) {
        TRY(remote_open(&r->remote, k->default_hdfs_dir, k->default_local_dir, r->stages));
        TRY(remote_resume(r->remote, &r->from, &a));
    }
    return keep_date(&r->from);
}

int run_tell_changes(struct run *r, const struct conf *c, const struct resume_model *models, int n) {
    const struct resume_tell_args a = {.conf = c,
                                       .mode = r->k.resume_mode,
                                       .root = r->k.default_local_dir,
                                       .models = models,
                                       .n_models = n,
                                       .other_model = r->k.other_model};
    r->program_name = conf_schema(c);
    return resume_tell(&r->from, &a);
}

int run_open_device(struct run *r, struct dev *dev) { return resume_open_device(dev, &r->from, r->k.device, r->k.threads); }

int run_open_sampler(struct run *r, const struct data_sampler_args *a, int64_t epochs, int64_t total_training_steps) {
    const int rc = data_sampler_init(&r->sampler, a);
    if (rc < 0) return err_wrap(rc, "data.train_batch_size");
    r->total_steps = total_training_steps > 0 ? total_training_steps : data_sampler_batches(&r->sampler) * epochs;
    return r->k.val_only ? 0 : resume_check_room(&r->from, r->k.default_local_dir, r->total_steps);
}

static int open_track(struct run *r, const struct conf *c) {
    const json_t *config;
    TRY(conf_json(c, "", &config));
    json_t *set = conf_set_keys(c), *tokens = r->program.special_tokens ? r->program.special_tokens(r->program.ctx) : NULL;
    const struct track_args a = {.loggers = &r->loggers,
                                 .wandb_proxy = r->k.wandb_proxy,
                                 .trace_project = r->k.trace.project,
                                 .trace_experiment = r->k.trace.experiment,
                                 .project = r->k.project,
                                 .experiment = r->k.experiment,
                                 .run_dir = r->k.default_local_dir,
                                 .config = config,
                                 .set = set,
                                 .special_tokens = tokens,
                                 .plan = r->program.plan ? r->program.plan(r->program.ctx) : NULL,
                                 .total_steps = r->total_steps,
                                 .resume_step = r->from.step,
                                 .title = r->k.title,
                                 .headlines = r->program.headlines};
    const int rc = track_open(&r->track, &a);
    json_decref(set);
    json_decref(tokens);
    return rc;
}

static int64_t optim_steps(const struct run *r) { return r->checkpoints.steps(r->checkpoints.ctx); }

/* Of the step that has just become the last whole one: a step that is discarded later leaves no trace in what is saved. */
static void keep_state(struct run *r) {
    json_decref(r->state);
    r->state = json_pack("{s:I, s:s, s:o, s:I}", "global_step", (json_int_t)r->step, "isa", r->checkpoints.isa, "data",
                         data_sampler_state(&r->sampler), "bad_steps", (json_int_t)r->bad_steps);
    json_object_set_new(r->state, "template_date", json_integer((json_int_t)chat_template_date()));
    if (r->from.models) json_object_set(r->state, "models", r->from.models);
    if (r->program_name) json_object_set_new(r->state, "config_name", json_string(r->program_name));
    r->program.state(r->program.ctx, r->state);
    r->optim_done = optim_steps(r);
    phase_hold_stop(false);
}

static int restore(struct run *r) {
    const char *const dir = r->from.dir;
    TRY(r->checkpoints.load(r->checkpoints.ctx, dir));
    TRY(json_i64_opt(r->from.trainer, "bad_steps", &r->bad_steps, dir));
    TRY(data_sampler_restore(&r->sampler, json_object_get(r->from.trainer, "data"), dir));
    TRY(early_stop_restore(&r->early, json_object_get(r->from.trainer, "early_stopping"), dir));
    TRY(early_stop_publish(&r->early, r->k.default_local_dir));
    TRY(r->program.restore(r->program.ctx, r->from.trainer, dir));
    r->step = r->saved_step = r->begun_step = r->from.step;
    log_info("resumed from %s", dir);
    return 0;
}

/* Where only the last step is saved there is no next step to overlap with. */
static int open_copy(struct run *r) {
    if (!r->k.async_save || (r->k.save_freq <= 0 && !r->early.enable)) return 0;
    TRY(r->checkpoints.open_copy(r->checkpoints.ctx));
    r->saving = SAVE_IDLE;
    return 0;
}

/* The run's stages are phases of a trace, and the run's state in run.db. */
static void phase(void *run, const char *name) {
    struct run *r = run;
    if (r->program.phase) r->program.phase(r->program.ctx, name);
    track_phase(r->track, r->step, name);
}

/* What was logged before there was a run.db. */
static void record_start(struct run *r) {
    size_t i;
    json_t *line;
    json_array_foreach(r->odd, i, line) track_event(r->track, r->step, "warning", json_string_value(line));
    json_array_foreach(r->from.changes, i, line) track_event(r->track, r->from.step, "changed", json_string_value(line));
}

int run_ready(struct run *r, const struct conf *c, const struct checkpoints *models) {
    r->checkpoints = *models;
    TRY(open_track(r, c));
    if (r->from.dir) TRY(restore(r));
    record_start(r);
    if (r->k.save_freq == 0)
        log_note("trainer.save_freq=0: %s; -1 saves the last one",
                 r->early.enable ? "of the steps only the best validations are saved" : "no step is saved");
    keep_state(r);
    r->first_step = r->step;
    r->optim_first = r->optim_done;
    if (r->from.dir && !r->k.val_only) remote_put_missing(r->remote, r->from.step);
    TRY(open_copy(r));
    phases_follow(r->stages, phase, r);
    phase_end(r->stages);
    return 0;
}

/* ---- checkpoints ---- */

static int published(struct run *r, int64_t step) {
    char *where = xasprintf("%s/global_step_%lld", r->k.default_local_dir, (long long)step);
    track_event(r->track, step, "checkpoint", where);
    free(where);
    r->saved_step = step;
    if (!r->probing) remote_put(r->remote, step);
    if (r->early.best_step > step) return 0; /* a newer best is about to be saved: its own publication names it */
    return early_stop_publish(&r->early, r->k.default_local_dir);
}

/* Takes the result of the checkpoint under way, if it is published or has failed. wait: until then. */
static int settle(struct run *r, bool wait) {
    const double start = clock_awake();
    int64_t step;
    int got = 0;
    if (r->saving != SAVE_WRITING) return 0;
    if (wait) phase_begin(r->stages, "save_checkpoint");
    while ((got = r->checkpoints.take(r->checkpoints.ctx, wait ? 1 : 0, &step)) == 0 && wait)
        phase_progress(&(struct progress){r->stages, r->track, r->step}, "save_checkpoint", (int64_t)(clock_awake() - start), 0, 0);
    if (wait) phase_end(r->stages);
    if (got != 0) r->saving = SAVE_IDLE;
    if (got < 0) r->begun_step = r->saved_step;
    TRY(got);
    return got == 1 ? published(r, step) : 0;
}

static void flush_track(void *track) {
    if (track_flush(track) < 0) log_warn("tracking: %s", err_msg()); /* a tracker never ends a run */
}

static bool saves_hf_model(const struct run_config *k) {
    for (int64_t i = 0; i < k->n_save_contents; i++)
        if (strcmp(k->save_contents[i], "hf_model") == 0) return true;
    return false;
}

/* keep: how many checkpoints stay on disk, <= 0: all. Where writing overlaps with the next steps this only copies; write_copy does
 * the rest. */
static int save(struct run *r, int64_t keep) {
    TRY(run_lock_hold(r->k.lock));
    TRY(settle(r, true));
    const bool overlapped = r->saving != SAVE_FOREGROUND;
    json_object_set_new(r->state, "early_stopping", early_stop_state(&r->early));
    const struct ckpt_save_args a = {.root = r->k.default_local_dir,
                                     .step = r->step,
                                     .trainer = r->state,
                                     .config_yaml = r->config_yaml,
                                     .keep = keep,
                                     .best = r->early.best_step,
                                     .hf_model = saves_hf_model(&r->k)};
    phase_begin(r->stages, "save_checkpoint");
    if (!overlapped) flush_track(r->track);
    const int rc = overlapped ? r->checkpoints.copy(r->checkpoints.ctx, &a) : r->checkpoints.save(r->checkpoints.ctx, &a);
    phase_end(r->stages);
    TRY(rc);
    r->begun_step = r->step;
    if (!overlapped) return published(r, r->step);
    r->saving = SAVE_COPIED;
    return 0;
}

/* Writes the copy of this step, if there is one, to disk; the tracker's records before it. */
static int write_copy(struct run *r, bool wait) {
    if (r->saving == SAVE_COPIED) {
        TRY(r->checkpoints.write(r->checkpoints.ctx, flush_track, r->track));
        r->saving = SAVE_WRITING;
    }
    return wait ? settle(r, true) : 0;
}

/* Saved and published, whatever it was before. */
static int save_now(struct run *r, int64_t keep) {
    if (r->begun_step != r->step) TRY(save(r, keep));
    return write_copy(r, true);
}

int run_save(struct run *r) { return save_now(r, r->k.keep_ckpts); }

int run_save_timed(struct run *r, double *waits) {
    const double start = clock_now();
    TRY(save(r, r->k.keep_ckpts));
    *waits = clock_now() - start;
    return write_copy(r, true);
}

/* ---- steps ---- */

bool run_begin_step(struct run *r) {
    if (!r->begun && r->step >= r->total_steps)
        log_note("nothing to do: step %lld of %lld is already done; raise trainer.total_training_steps or total_epochs to go on",
                 (long long)r->step, (long long)r->total_steps);
    r->begun = true;
    if (r->step >= r->total_steps || early_stop_done(&r->early)) return false;
    r->in_step = true;
    r->step++;
    r->step_bad = false;
    metrics_reset(&r->metrics);
    return true;
}

int run_validate_first(struct run *r) {
    metrics_reset(&r->metrics);
    TRY(r->program.validate(r->program.ctx));
    if (!r->k.val_only) TRY(early_stop_find(&r->early, &r->metrics));
    phases_metrics(r->stages, &r->metrics);
    track_log(r->track, r->step, &r->metrics);
    return 0;
}

static bool due(const struct run *r, int64_t freq) { return freq > 0 && (r->step == r->total_steps || r->step % freq == 0); }

/* The last step is saved without save_freq too, so that a run leaves a model; save_freq=0 says that it shall not. */
static bool save_due(const struct run *r) { return due(r, r->k.save_freq) || (r->k.save_freq < 0 && r->step == r->total_steps); }

static void say_warning(void *run, const struct early_warning *w, const char *line) {
    const struct run *r = run;
    (void)w;
    log_warn("step %lld: %s", (long long)r->step, line);
    track_event(r->track, r->step, "warning", line);
}

/* A run that ends without a failure has changed the model, or fails with a message that it has not. */
static int check_learned(struct run *r) {
    const long long n = (long long)(r->step - r->first_step);
    if (n == 0 || r->all_bad < n || r->probing) return 0;
    if (optim_steps(r) == r->optim_first)
        FAIL(ERR_NUMERIC,
             "none of the %lld steps of this run has changed the model: each met a gradient that was not finite; their batches are "
             "below %s/bad_batches; look at the rewards and the data, or lower the learning rate",
             n, r->k.default_local_dir);
    char *line = xasprintf("each of the %lld steps of this run has skipped an update whose gradient was not finite "
                           "(actor/skipped_steps, critic/skipped_steps)",
                           n);
    log_warn("%s", line);
    track_event(r->track, r->step, "warning", line);
    free(line);
    return 0;
}

/* Records what was copied to the store in the meantime. */
static void look_at_remote(struct run *r) {
    const int64_t step = remote_poll(r->remote);
    if (step < 0) return;
    char *where = xasprintf("%s/global_step_%lld", r->k.default_hdfs_dir, (long long)step);
    track_event(r->track, step, "checkpoint", where);
    free(where);
}

/* A signal in the validation ends it; the step itself is done and is saved. */
static int finish(struct run *r) {
    int best = 0;
    keep_state(r);
    TRY(settle(r, false));
    look_at_remote(r);
    if (r->k.validates && !phase_stop_signal() && due(r, r->k.test_freq)) {
        const int rc = r->program.validate(r->program.ctx);
        if (rc < 0 && rc != ERR_SIGNAL) return err_pass(rc, __FILE__, __LINE__);
        if (rc == 0) TRY(best = early_stop_look(&r->early, &r->metrics, r->step));
    }
    const int stop = phase_stop_signal(); /* read once: it may come at any moment */
    const bool last = stop || early_stop_done(&r->early) || r->step == r->total_steps;
    if ((stop && !r->probing) || best > 0 || early_stop_done(&r->early) || save_due(r)) TRY(save(r, r->k.keep_ckpts));
    phases_metrics(r->stages, &r->metrics);
    if (r->k.early_warnings && !r->probing) early_warnings_add(&r->warnings, &r->metrics, say_warning, r);
    track_log(r->track, r->step, &r->metrics);
    TRY(write_copy(r, last));
    if (stop) FAIL(ERR_SIGNAL, "stopped by %s", phase_signal_name(stop));
    return last ? check_learned(r) : 0;
}

void run_updated(struct run *r) { phase_hold_stop(optim_steps(r) != r->optim_done); }

int run_check_stop(struct run *r, int64_t done, int64_t total) {
    if (!phase_stop_signal() || done == total) return 0;
    if (optim_steps(r) == r->optim_done) return phase_check_stop();
    if (!r->logged_stop)
        log_info("stopping: step %lld has changed the weights; this update ends in about %.0f s, then the step is saved; once more "
                 "ends at once",
                 (long long)r->step, phase_seconds(r->stages) * (double)(total - done) / (double)done);
    r->logged_stop = true;
    return 0;
}

int run_end_step(struct run *r) {
    if (!r->step_bad) r->bad_steps = 0;
    r->in_step = false; /* the step is done, whatever becomes of its validation and checkpoint */
    const int rc = finish(r);
    return rc < 0 ? run_fail(r, err_pass(rc, __FILE__, __LINE__)) : 0;
}

/* Not saved: weights of a step that was half made, and weights that give no finite numbers; nothing of a device or rank
 * that failed. After a numerical stop nothing is retired, since an older checkpoint may be the one to return to. */
int run_fail(struct run *r, int rc) {
    struct err_saved why;
    if (r->probing) return err_pass(rc, __FILE__, __LINE__);
    phase_hold_stop(false);
    err_save(&why);
    if (r->in_step) {
        phase_end(r->stages);
        r->step--; /* made again after a resume, from the cursor of the step before */
        r->in_step = false;
    }
    if (settle(r, true) < 0 && rc != ERR_RANK) log_warn("%s", err_msg());
    const bool whole = optim_steps(r) == r->optim_done, diverged = rc == ERR_NUMERIC && r->bad_steps < r->k.max_bad_steps;
    const bool there = rc != ERR_IO && rc != ERR_DEVICE && rc != ERR_RANK; /* the disk, the weights, all of their shards */
    if (r->step > 0 && r->saved_step != r->step && whole && !diverged && there &&
        save_now(r, rc == ERR_NUMERIC ? 0 : r->k.keep_ckpts) < 0)
        log_warn("%s", err_msg());
    err_restore(&why);
    if (r->saved_step > 0)
        return err_append(
            rc, "; the state of step %lld is in %s/global_step_%lld; trainer.resume_mode=auto or resume_path goes on from there",
            (long long)r->saved_step, r->k.default_local_dir, (long long)r->saved_step);
    return err_append(rc, "; no step was saved, so there is nothing to go on from");
}

/* ---- closing ---- */

void run_close(struct run *r, int rc) {
    struct err_saved why;
    err_save(&why);
    if (settle(r, true) < 0) log_error("%s", err_msg());
    if (rc == 0 && r->state && !r->probing) {
        early_stop_say(&r->early, r->step);
        if (r->saved_step > 0)
            log_info("done: %lld steps; the model %sis in %s/global_step_%lld/actor", (long long)r->step,
                     r->saved_step < r->step ? "of the last saved step " : "", r->k.default_local_dir, (long long)r->saved_step);
        else log_info("done: %lld steps; none was saved (trainer.save_freq=0)", (long long)r->step);
        early_stop_report(&r->early, r->k.default_local_dir, "actor");
    }
    if (r->checkpoints.close) r->checkpoints.close(r->checkpoints.ctx);
    remote_close(r->remote);
    track_close(r->track, rc);
    phases_destroy(r->stages);
    data_sampler_free(&r->sampler);
    resume_free(&r->from);
    metrics_free(&r->metrics);
    early_stop_free(&r->early);
    json_decref(r->odd);
    json_decref(r->state);
    free(r->config_yaml);
    err_restore(&why);
}
