/* verlc_api.c - the calls of include/verlc.h: a run's steps and stages for a program of
 * one's own, and for ppo.c.
 *
 * A call times its stage, checks that the batch has what the stage reads, and keeps the
 * first failure; the work is in ppo.c and the stages' files.
 * Invariant: between verlc_begin_step and verlc_end_step the run's step is the one being
 * made; after a failure it is the last whole one, whose state is saved. */
#include "train/ppo/ppo_int.h"

#include "conf/conf.h"
#include "base/err.h"
#include "base/file.h"
#include "base/log.h"

#include <signal.h>
#include <stdlib.h>
#include <string.h>

/* ---- failures ---- */

static int failed(struct verlc *v, int rc) {
    if (v->rc < 0) return v->rc;
    if (v->in_step) {
        stage_end(v->p.stages);
        v->p.step--; /* made again after a resume, from the cursor of the step before */
        v->in_step = false;
        rc = ppo_run_end_early(&v->p, rc);
    }
    v->rc = rc;
    v->error = xstrdup(err_msg());
    return rc;
}

/* 0: the call may do its work, inside a step. */
static int ready(struct verlc *v, const char *call) {
    if (v->rc < 0) return v->rc;
    if (v->in_step) return 0;
    return failed(v, err_set(ERR_INVAL, __FILE__, __LINE__,
                             "%s: there is no step; call it between verlc_begin_step and "
                             "verlc_end_step",
                             call));
}

static int ended(struct verlc *v, int rc) { return rc < 0 ? failed(v, rc) : 0; }

/* 0: the batch has the column. */
static int want(const struct verlc_batch *b, const char *call, const char *name, enum batch_type type, const char *maker) {
    const struct batch_col *c = batch_find(&b->b, name), *responses = batch_find(&b->b, "responses");
    if (!c) FAIL(ERR_INVAL, "%s: the batch has no column %s; %s makes it", call, name, maker);
    if (c->type != type) FAIL(ERR_INVAL, "%s: the column %s is not of the type that %s gives it", call, name, maker);
    for (int64_t i = 0; type == BATCH_F64 && responses && strcmp(name, "score") != 0 && i < b->b.n_rows; i++)
        if (batch_len(c, i) != batch_len(responses, i))
            FAIL(ERR_INVAL, "%s: the column %s has not the shape of responses", call, name);
    return 0;
}

static int want_samples(const struct verlc_batch *b, const char *call) {
    TRY(want(b, call, "prompts", BATCH_I32, "verlc_rollout"));
    TRY(want(b, call, "rollout_log_probs", BATCH_F32, "verlc_rollout"));
    return want(b, call, "responses", BATCH_I32, "verlc_rollout");
}

/* ---- the run ---- */

static int load(struct verlc *v, const char *const *own, int argc, char **argv) {
    int n = 0, n_own = 0;
    while (own && own[n_own]) n_own++;
    char **args = xcalloc((size_t)(n_own + argc) + 1, sizeof *args);
    for (int i = 0; i < n_own; i++) args[n++] = (char *)(uintptr_t)own[i];
    for (int i = 1; i < argc; i++) args[n++] = argv[i];
    int rc = conf_load(&v->conf, "ppo_trainer", n, args);
    free(args);
    TRY(rc);
    TRY(rc = conf_answer(v->conf, stdout));
    v->answered = rc > 0;
    if (v->answered) return 0;
    TRY(conf_check(v->conf));
    conf_notes(v->conf);
    return 0;
}

struct verlc *verlc_open(const char *const *own, int argc, char **argv) {
    struct verlc asked = {0};
    signal(SIGPIPE, SIG_IGN); /* as in the program: a closed pipe is an error of the write, not a death */
    signal(SIGXFSZ, SIG_IGN);
    const int rc = load(&asked, own, argc, argv);
    struct verlc *v = rc < 0 || asked.answered ? xcalloc(1, sizeof *v) : ppo_run_open(asked.conf);
    if (rc < 0) failed(v, rc);
    v->conf = asked.conf;
    v->answered = asked.answered;
    return v;
}

int verlc_close(struct verlc *v) {
    struct conf *conf = v->conf;
    const int rc = ppo_run_close(v);
    conf_free(conf);
    if (rc < 0) log_error("%s", err_msg());
    if (rc == ERR_SIGNAL) return 128 + stage_stop_signal();
    return rc < 0 ? err_exit_status(rc) : 0;
}

int verlc_failed(const struct verlc *v) { return v->rc; }
const char *verlc_error(const struct verlc *v) { return v->error ? v->error : ""; }
int64_t verlc_step(const struct verlc *v) { return v->p.step; }

bool verlc_has(const struct verlc *v, enum verlc_role role) {
    if (v->rc < 0) return false;
    switch (role) {
    case VERLC_ACTOR: return v->p.actor != NULL;
    case VERLC_REF: return v->p.ref_actor != NULL;
    case VERLC_CRITIC: return v->p.critic != NULL;
    case VERLC_TEACHER: return v->p.teacher_actor != NULL;
    }
    return false;
}

/* ---- batches ---- */

struct verlc_batch *verlc_batch_create(void) {
    return xcalloc(1, sizeof(struct verlc_batch));
}

void verlc_batch_free(struct verlc_batch *b) {
    if (!b) return;
    batch_free(&b->b);
    free(b);
}

static int find_column(const struct verlc_batch *b, const char *name, struct verlc_column *out) {
    const struct batch_col *c = batch_find(&b->b, name);
    if (!c) FAIL(ERR_INVAL, "verlc_column: the batch has no column %s", name);
    out->n = b->b.n_rows;
    out->off = c->off;
    switch (c->type) {
    case BATCH_I32: out->i32 = c->i32; break;
    case BATCH_I64: out->i64 = c->i64; break;
    case BATCH_F32: out->f32 = c->f32; break;
    case BATCH_F64: out->f64 = c->f64; break;
    case BATCH_STR: out->str = c->str, out->str_len = c->str_len; break;
    case BATCH_JSON: FAIL(ERR_INVAL, "verlc_column: the column %s holds JSON values, not numbers or strings", name);
    }
    return 0;
}

int verlc_column(struct verlc *v, const struct verlc_batch *b, const char *name, struct verlc_column *out) {
    *out = (struct verlc_column){0};
    if (v->rc < 0) return v->rc;
    return ended(v, find_column(b, name, out));
}

int verlc_add_column(struct verlc *v, struct verlc_batch *b, const char *name, const char *like, double value) {
    double *x;
    if (v->rc < 0) return v->rc;
    if (!batch_find(&b->b, like))
        return failed(v, err_set(ERR_INVAL, __FILE__, __LINE__, "verlc_add_column: the batch has no column %s", like));
    if (strcmp(name, like) != 0) batch_drop(&b->b, name);
    const int rc = ppo_add_f64(&b->b, name, like, &x);
    if (rc < 0) return failed(v, rc);
    for (int64_t t = 0; t < batch_find(&b->b, name)->off[b->b.n_rows]; t++) x[t] = value;
    return 0;
}

int verlc_select(struct verlc *v, const struct verlc_batch *b, const int64_t *rows, int64_t n, struct verlc_batch *out) {
    struct batch chosen;
    if (v->rc < 0) return v->rc;
    for (int64_t i = 0; i < n; i++)
        if (rows[i] < 0 || rows[i] >= b->b.n_rows)
            return failed(v, err_set(ERR_INVAL, __FILE__, __LINE__, "verlc_select: row %lld of a batch of %lld", (long long)rows[i],
                                     (long long)b->b.n_rows));
    const int rc = batch_select(&chosen, &b->b, rows, n);
    if (rc < 0) return failed(v, rc);
    batch_free(&out->b);
    out->b = chosen;
    return 0;
}

/* ---- the stages ---- */

int verlc_rollout(struct verlc *v, struct verlc_batch *b) {
    TRY(ready(v, "verlc_rollout"));
    batch_free(&b->b);
    stage_begin(v->p.stages, "gen");
    return ended(v, ppo_rollout(&v->p, &b->b));
}

static int reward(struct ppo *p, struct verlc_batch *b) {
    TRY(want_samples(b, "verlc_reward"));
    TRY(want(b, "verlc_reward", "score", BATCH_F64, "verlc_rollout"));
    TRY(ppo_reward_errors(p, &b->b));
    TRY(ppo_reward_weights(p, &b->b));
    return ppo_token_scores(&b->b);
}

int verlc_reward(struct verlc *v, struct verlc_batch *b) {
    TRY(ready(v, "verlc_reward"));
    stage_begin(v->p.stages, "reward");
    return ended(v, reward(&v->p, b));
}

static int log_probs(struct ppo *p, enum verlc_role role, struct verlc_batch *b) {
    TRY(want_samples(b, "verlc_log_probs"));
    if (role == VERLC_ACTOR) return ppo_old_log_probs(p, &b->b);
    if (role == VERLC_TEACHER) {
        if (!p->teacher_actor) FAIL(ERR_INVAL, "verlc_log_probs: there is no teacher; it comes with distillation.enabled=True");
        stage_begin(p->stages, "teacher");
        return ppo_teacher(p, &b->b);
    }
    if (role != VERLC_REF)
        FAIL(ERR_INVAL, "verlc_log_probs: a critic has none; the roles are VERLC_ACTOR, VERLC_REF and VERLC_TEACHER");
    if (!p->ref_actor)
        FAIL(ERR_INVAL, "verlc_log_probs: there is no reference; it comes with actor_rollout_ref.actor.use_kl_loss=True or "
                        "algorithm.use_kl_in_reward=True");
    stage_begin(p->stages, "ref");
    return ppo_reference(p, &b->b);
}

int verlc_log_probs(struct verlc *v, enum verlc_role role, struct verlc_batch *b) {
    TRY(ready(v, "verlc_log_probs"));
    return ended(v, log_probs(&v->p, role, b));
}

static int has_critic(const struct ppo *p, const char *call) {
    if (!p->critic)
        FAIL(ERR_INVAL, "%s: there is no critic; it comes with algorithm.adv_estimator=gae or critic.enable=True", call);
    return 0;
}

static int values(struct ppo *p, struct verlc_batch *b) {
    TRY(has_critic(p, "verlc_values"));
    TRY(want_samples(b, "verlc_values"));
    return ppo_values(p, &b->b);
}

int verlc_values(struct verlc *v, struct verlc_batch *b) {
    TRY(ready(v, "verlc_values"));
    stage_begin(v->p.stages, "values");
    return ended(v, values(&v->p, b));
}

static int advantage(struct ppo *p, struct verlc_batch *b) {
    const char *call = "verlc_advantage";
    TRY(want_samples(b, call));
    TRY(want(b, call, "token_level_scores", BATCH_F64, "verlc_reward"));
    TRY(want(b, call, "old_log_probs", BATCH_F64, "verlc_log_probs"));
    if (p->k.use_kl_in_reward) TRY(want(b, call, "ref_log_prob", BATCH_F64, "verlc_log_probs with VERLC_REF"));
    if (p->k.adv->needs & ALGO_NEEDS_VALUES) TRY(want(b, call, "values", BATCH_F64, "verlc_values"));
    return ppo_advantage(p, &b->b);
}

int verlc_advantage(struct verlc *v, struct verlc_batch *b) {
    TRY(ready(v, "verlc_advantage"));
    stage_begin(v->p.stages, "adv");
    return ended(v, advantage(&v->p, b));
}

static int resample(struct ppo *p, const struct verlc_batch *b, struct verlc_batch *out) {
    TRY(want(b, "verlc_resample", "score", BATCH_F64, "verlc_rollout"));
    batch_free(&out->b);
    return ppo_pf_resample(p, &b->b, &out->b);
}

int verlc_resample(struct verlc *v, const struct verlc_batch *b, struct verlc_batch *out) {
    TRY(ready(v, "verlc_resample"));
    return ended(v, resample(&v->p, b, out));
}

static int update(struct ppo *p, enum verlc_role role, struct verlc_batch *b) {
    const char *call = "verlc_update";
    TRY(want_samples(b, call));
    if (role == VERLC_CRITIC) {
        TRY(has_critic(p, call));
        TRY(want(b, call, "values", BATCH_F64, "verlc_values"));
        TRY(want(b, call, "returns", BATCH_F64, "verlc_advantage"));
        stage_begin(p->stages, "update_critic");
        return ppo_update_critic(p, &b->b);
    }
    if (role != VERLC_ACTOR) FAIL(ERR_INVAL, "verlc_update: the reference and the teacher are frozen");
    TRY(want(b, call, "old_log_probs", BATCH_F64, "verlc_log_probs"));
    TRY(want(b, call, "advantages", BATCH_F64, "verlc_advantage"));
    if (p->k.use_kl_loss) TRY(want(b, call, "ref_log_prob", BATCH_F64, "verlc_log_probs with VERLC_REF"));
    if (p->k.distill.enable) TRY(want(b, call, "teacher_logprobs", BATCH_F32, "verlc_log_probs with VERLC_TEACHER"));
    if (p->step < p->k.critic.actor_from) return 0;
    stage_begin(p->stages, "update_actor");
    return ppo_update(p, &b->b);
}

int verlc_update(struct verlc *v, enum verlc_role role, struct verlc_batch *b) {
    TRY(ready(v, "verlc_update"));
    return ended(v, update(&v->p, role, b));
}

/* ---- a step's begin and end ---- */

static bool profiled(const struct ppo *p) {
    for (int64_t i = 0; i < p->k.n_profile_steps; i++)
        if (p->k.profile_steps[i] == (double)p->step) return true;
    return false;
}

/* Writes the step's trace; the step is done by then, so a failure is a warning. */
static void write_trace(struct ppo *p) {
    char *path = xasprintf("%s/trace_step_%lld.json", p->k.default_local_dir, (long long)p->step);
    int rc = file_mkdirs(p->k.default_local_dir);
    if (rc == 0) rc = dev_trace_stop(&p->dev, path, NULL);
    if (rc < 0) log_warn("step %lld was not traced: %s", (long long)p->step, err_msg());
    else log_info("the trace of step %lld is in %s", (long long)p->step, path);
    free(path);
}

/* What comes before the first step. */
static int start(struct verlc *v) {
    struct ppo *p = &v->p;
    v->started = true;
    if (p->val_data && (p->k.val_before_train || p->k.val_only)) TRY(ppo_run_validate(p));
    if (!p->k.val_only && p->step >= p->total_steps)
        log_note("nothing to do: step %lld of %lld is already done; raise trainer.total_training_steps or total_epochs to go on",
                 (long long)p->step, (long long)p->total_steps);
    return 0;
}

bool verlc_begin_step(struct verlc *v) {
    struct ppo *p = &v->p;
    if (v->rc < 0 || v->answered) return false;
    if (v->in_step) {
        failed(v, err_set(ERR_INVAL, __FILE__, __LINE__, "verlc_begin_step: the step before has no verlc_end_step"));
        return false;
    }
    if (!v->started && ended(v, start(v)) < 0) return false;
    if (p->k.val_only || p->step >= p->total_steps || early_stop_done(&p->early)) return false;
    v->in_step = true;
    p->step++;
    if (profiled(p)) dev_trace_start(&p->dev);
    metrics_reset(&p->metrics);
    p->step_bad = false;
    return true;
}

/* Metrics and samples of a step whose updates are done. */
static int record(struct ppo *p, struct verlc_batch *b) {
    TRY(want_samples(b, "verlc_end_step"));
    TRY(want(b, "verlc_end_step", "score", BATCH_F64, "verlc_rollout"));
    if (!p->step_bad) p->bad_steps = 0;
    stage_begin(p->stages, "dump_rollout_generations");
    ppo_dump(p, &b->b, &p->k.rollout_data_dir);
    ppo_record(p, &b->b, false);
    stage_end(p->stages);
    stages_metrics(p->stages, &p->metrics);
    TRY(ppo_data_metrics(p, &b->b));
    metrics_set_i64(&p->metrics, p->step, "training/global_step");
    metrics_set_i64(&p->metrics, p->sampler.epoch, "training/epoch");
    return 0;
}

int verlc_end_step(struct verlc *v, struct verlc_batch *b) {
    struct ppo *p = &v->p;
    TRY(ready(v, "verlc_end_step"));
    int rc = record(p, b);
    if (rc < 0) return failed(v, rc);
    if (profiled(p)) write_trace(p);
    v->in_step = false; /* the step is done, whatever becomes of its validation and checkpoint */
    rc = ppo_run_finish(p);
    return rc < 0 ? failed(v, ppo_run_end_early(p, rc)) : 0;
}

static int save(struct verlc *v) {
    struct ppo *p = &v->p;
    if (v->in_step) FAIL(ERR_INVAL, "verlc_save: a step is being made; call it after verlc_end_step");
    if (p->step < 1) FAIL(ERR_INVAL, "verlc_save: no step was done, so there is nothing to save");
    return p->saved_step == p->step ? 0 : ppo_run_save(p, p->step, p->k.keep_ckpts);
}

int verlc_save(struct verlc *v) {
    if (v->rc < 0 || v->answered) return v->rc;
    return ended(v, save(v));
}
