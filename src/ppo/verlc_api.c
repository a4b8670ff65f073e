/* verlc_api.c - the calls of include/verlc.h: a run's steps and stages for a user's
 * program, and for ppo.c.
 *
 * A call times its stage, checks that the batch has what the stage reads, and keeps the
 * first failure; the work is in controller.c and the stages' files.
 * Invariant: between verlc_begin_step and verlc_end_step the run's step is the one being
 * made; after a failure it is the last whole one, whose state is saved. */
#include "ppo/controller.h"
#include "ppo/worker/ppo_worker_calls.h"

#include "base/err.h"
#include "base/file.h"
#include "base/log.h"
#include "base/process.h"
#include "ranks/launcher.h"

#include <stdlib.h>
#include <string.h>

extern char **environ;

struct verlc_batch {
    struct batch b;
};
struct verlc {
    struct controller c;
    struct conf *conf;             /* of verlc_open; NULL: the caller's */
    int rc;                        /* the first failure */
    struct err_saved error;        /* its message */
    struct rollout_async *rollout; /* of this step's verlc_rollout_start; NULL: none */
    bool started, answered;        /* answered: --help, --cfg: there is nothing to run */
};

/* ---- failures ---- */

/* Waits for an update that still runs when a call has failed, so that the state can be saved. */
static void join_updates(struct verlc *v) {
    struct err_saved why;
    struct worker *const w = &v->c.worker.base;
    err_save(&why);
    if (w->ops && w->ops->join(w) < 0) log_debug("%s", err_msg());
    err_restore(&why);
}

/* Of a call that goes with the run, in a step or not. */
static int failed(struct verlc *v, int rc) {
    if (v->rc < 0) return v->rc;
    v->c.worker.base.overlapped.step = NULL;
    join_updates(v);
    if (v->c.run.in_step) rc = run_fail(&v->c.run, rc);
    v->rc = rc;
    err_save(&v->error);
    return rc;
}

/* 0: the call may do its work, inside a step. */
static int ready(struct verlc *v, const char *call) {
    if (v->rc < 0) return v->rc;
    if (v->c.run.in_step) return 0;
    return failed(v, err_set(ERR_INVAL, __FILE__, __LINE__,
                             "%s: there is no step; call it between verlc_begin_step and "
                             "verlc_end_step",
                             call));
}

static int ended_at(struct verlc *v, int rc, int line) { return rc < 0 ? failed(v, err_pass(rc, __FILE__, line)) : 0; }
#define ended(v, call) ended_at((v), (call), __LINE__)

/* 0: the batch has the column. */
static int want(const struct verlc_batch *b, const char *call, const char *name, enum batch_type type, const char *maker) {
    const struct batch_col *c = batch_find(&b->b, name), *responses = batch_find(&b->b, "responses");
    if (!c) FAIL(ERR_INVAL, "%s: the batch has no column %s; %s makes it", call, name, maker);
    if (c->type != type) FAIL(ERR_INVAL, "%s: the column %s is not of the type that %s gives it", call, name, maker);
    for (int64_t i = 0; type == BATCH_F64 && responses && strcmp(name, "score") != 0 && i < b->b.n_rows; i++)
        if (batch_len(c, i) != batch_len(responses, i))
            FAIL(ERR_INVAL, "%s: the column %s does not have the shape of responses", call, name);
    return 0;
}

static int want_samples(const struct verlc_batch *b, const char *call) {
    TRY(want(b, call, "prompts", BATCH_I32, "verlc_rollout"));
    TRY(want(b, call, "rollout_log_probs", BATCH_F32, "verlc_rollout"));
    return want(b, call, "responses", BATCH_I32, "verlc_rollout");
}

/* ---- the run ---- */

/* A program that its own controller, or a launcher, has started as a rank is that rank, and nothing else. */
static int serve_if_worker(const struct conf *c) {
    struct launch l;
    TRY(launch_read(&l, environ));
    if (!workers_started_this(&l)) return 0;
    const int rc = ppo_worker_serve(c, &l);
    if (rc < 0) log_error("%s", err_msg());
    exit(rc < 0 ? err_exit_status(rc) : 0);
}

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
    TRY(serve_if_worker(v->conf));
    conf_notes(v->conf);
    return 0;
}

struct verlc *verlc_open_conf(const struct conf *c) {
    struct verlc *v = xcalloc(1, sizeof *v);
    ended(v, controller_open(&v->c, c));
    return v;
}

struct verlc *verlc_open(const char *const *own, int argc, char **argv) {
    struct verlc *v = xcalloc(1, sizeof *v);
    process_prepare();
    v->c.worker.embedded = true;
    const int rc = load(v, own, argc, argv);
    if (rc == 0 && !v->answered) ended(v, controller_open(&v->c, v->conf));
    else ended(v, rc);
    return v;
}

int verlc_end(struct verlc *v) {
    const int rc = v->rc;
    ppo_rollout_drop(v->rollout);
    controller_close(&v->c, rc);
    if (rc < 0) err_restore(&v->error);
    free(v);
    return rc;
}

int verlc_close(struct verlc *v) {
    struct conf *conf = v->conf;
    const int rc = verlc_end(v);
    conf_free(conf);
    if (rc < 0) log_error("%s", err_msg());
    if (rc < 0) log_debug("%s: %s", err_name(rc), err_trace());
    if (rc == ERR_SIGNAL) return 128 + phase_stop_signal();
    return rc < 0 ? err_exit_status(rc) : 0;
}

int verlc_failed(const struct verlc *v) { return v->rc; }
int64_t verlc_step(const struct verlc *v) { return v->c.run.step; }
int64_t verlc_last_step(const struct verlc *v) { return v->c.run.total_steps; }
bool verlc_resamples(const struct verlc *v) { return v->c.k->algorithm.use_pf_ppo; }
struct controller *verlc_controller(struct verlc *v) {
    return &v->c;
}

bool verlc_has(const struct verlc *v, enum verlc_role role) {
    return v->rc == 0 && (unsigned)role < N_ROLES && v->c.worker.base.has[role];
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
    const struct batch_col *old = batch_find(&b->b, name);
    if (old && old->type != BATCH_F64)
        return failed(v, err_set(ERR_INVAL, __FILE__, __LINE__,
                                 "verlc_add_column: the column %s holds no doubles; choose another name", name));
    if (strcmp(name, like) != 0) batch_drop(&b->b, name);
    const int rc = ppo_add_f64(&b->b, name, like, &x);
    if (rc < 0) return failed(v, rc);
    for (int64_t t = 0; t < batch_find(&b->b, name)->off[b->b.n_rows]; t++) x[t] = value;
    return 0;
}

int verlc_carry(struct verlc *v, const struct verlc_batch *b) {
    if (v->rc < 0) return v->rc;
    v->c.carry = b ? &b->b : NULL;
    return 0;
}

bool verlc_carried(struct verlc *v, struct verlc_batch *b) {
    if (v->rc < 0 || v->c.carried.n_cols == 0) return false;
    batch_free(&b->b);
    b->b = v->c.carried;
    v->c.carried = (struct batch){0};
    return true;
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

struct batch *verlc_batch_data(struct verlc_batch *b) {
    return &b->b;
}

/* ---- the stages ---- */

int verlc_stage(struct verlc *v, const char *name, int (*fn)(void *arg, const struct stage *s, const struct generation *in),
                void *arg) {
    TRY(ready(v, name));
    phase_begin(v->c.run.stages, name);
    return ended(v, fn(arg, &v->c.stage, &v->c.generation));
}

/* 0: a generation may begin. */
static int no_open_rollout(struct verlc *v, const char *call) {
    TRY(ready(v, call));
    if (!v->rollout) return 0;
    return failed(v, err_set(ERR_INVAL, __FILE__, __LINE__, "%s: verlc_rollout_wait comes first, after verlc_rollout_start", call));
}

int verlc_rollout(struct verlc *v, struct verlc_batch *b) {
    TRY(no_open_rollout(v, "verlc_rollout"));
    batch_free(&b->b);
    phase_begin(v->c.run.stages, "gen");
    return ended(v, ppo_rollout(&v->c.stage, &v->c.generation, &b->b));
}

int verlc_rollout_start(struct verlc *v) {
    TRY(no_open_rollout(v, "verlc_rollout_start"));
    phase_begin(v->c.run.stages, v->c.worker.base.disaggregated ? "sync_rollout_weights" : "gen");
    return ended(v, ppo_rollout_start(&v->c.stage, &v->c.generation, &v->rollout));
}

int verlc_rollout_wait(struct verlc *v, struct verlc_batch *b) {
    struct rollout_async *const a = v->rollout;
    TRY(ready(v, "verlc_rollout_wait"));
    if (!a) return failed(v, err_set(ERR_INVAL, __FILE__, __LINE__, "verlc_rollout_wait: verlc_rollout_start comes first"));
    batch_free(&b->b);
    if (v->c.worker.base.disaggregated) phase_begin(v->c.run.stages, "wait_prev_gen");
    v->rollout = NULL;
    return ended(v, ppo_rollout_wait(a, &b->b));
}

static int reward(const struct stage *s, const struct controller *c, struct verlc_batch *b) {
    TRY(want_samples(b, "verlc_reward"));
    TRY(want(b, "verlc_reward", "score", BATCH_F64, "verlc_rollout"));
    phase_begin(s->run->stages, "reward");
    struct batch dropped;
    const int rc = ppo_reward(s, &c->k->reward, &b->b, &dropped);
    if (rc == 0)
        ppo_record(s, c->tok, &dropped, &c->generation.rollout->train, false); /* what is not trained on can be looked at, too */
    batch_free(&dropped);
    return rc;
}

int verlc_reward(struct verlc *v, struct verlc_batch *b) {
    TRY(ready(v, "verlc_reward"));
    return ended(v, reward(&v->c.stage, &v->c, b));
}

/* 0: the run has a model of this role. */
static int want_role(const struct stage *s, const char *call, enum verlc_role role) {
    static const char *const lacks[N_ROLES] = {
        [VERLC_REF] = "there is no reference; it comes with actor_rollout_ref.actor.use_kl_loss=True or "
                      "algorithm.use_kl_in_reward=True",
        [VERLC_CRITIC] = "there is no critic; it comes with algorithm.adv_estimator=gae or critic.enable=True",
        [VERLC_TEACHER] = "there is no teacher; it comes with distillation.enabled=True",
    };
    if (!s->worker->has[role]) FAIL(ERR_INVAL, "%s: %s", call, lacks[role]);
    return 0;
}

static int log_probs(const struct stage *s, const struct controller *c, enum verlc_role role, struct verlc_batch *b) {
    const char *call = "verlc_log_probs";
    TRY(want_samples(b, call));
    if ((unsigned)role >= N_ROLES || role == VERLC_CRITIC)
        FAIL(ERR_INVAL, "%s: a critic has none; the roles are VERLC_ACTOR, VERLC_REF and VERLC_TEACHER", call);
    TRY(want_role(s, call, role));
    phase_begin(s->run->stages, role == VERLC_ACTOR ? "old_log_prob" : role == VERLC_REF ? "ref" : "teacher");
    if (role == VERLC_ACTOR) return ppo_old_log_probs(s, &c->k->algorithm, &b->b);
    return role == VERLC_REF ? ppo_reference(s, &b->b) : ppo_teacher(s, &c->k->distill, &b->b);
}

int verlc_log_probs(struct verlc *v, enum verlc_role role, struct verlc_batch *b) {
    TRY(ready(v, "verlc_log_probs"));
    return ended(v, log_probs(&v->c.stage, &v->c, role, b));
}

static int values(const struct stage *s, struct verlc_batch *b) {
    TRY(want_role(s, "verlc_values", VERLC_CRITIC));
    TRY(want_samples(b, "verlc_values"));
    phase_begin(s->run->stages, "values");
    return ppo_values(s, &b->b);
}

int verlc_values(struct verlc *v, struct verlc_batch *b) {
    TRY(ready(v, "verlc_values"));
    return ended(v, values(&v->c.stage, b));
}

static int advantage(const struct stage *s, const struct ppo_algorithm_config *k, struct algo_kl_ctrl *kl, struct verlc_batch *b) {
    const char *call = "verlc_advantage";
    TRY(want_samples(b, call));
    TRY(want(b, call, "token_level_scores", BATCH_F64, "verlc_reward"));
    TRY(want(b, call, "old_log_probs", BATCH_F64, "verlc_log_probs"));
    if (k->use_kl_in_reward) TRY(want(b, call, "ref_log_prob", BATCH_F64, "verlc_log_probs with VERLC_REF"));
    if (k->adv->needs & ALGO_NEEDS_VALUES) TRY(want(b, call, "values", BATCH_F64, "verlc_values"));
    phase_begin(s->run->stages, "adv");
    return ppo_advantage(s, k, kl, &b->b);
}

int verlc_advantage(struct verlc *v, struct verlc_batch *b) {
    TRY(ready(v, "verlc_advantage"));
    return ended(v, advantage(&v->c.stage, &v->c.k->algorithm, &v->c.kl_ctrl, b));
}

static int resample(const struct stage *s, const struct ppo_algorithm_config *k, const struct verlc_batch *b,
                    struct verlc_batch *out) {
    TRY(want(b, "verlc_resample", "score", BATCH_F64, "verlc_rollout"));
    batch_free(&out->b);
    return ppo_pf_resample(s, k, &b->b, &out->b);
}

int verlc_resample(struct verlc *v, const struct verlc_batch *b, struct verlc_batch *out) {
    TRY(ready(v, "verlc_resample"));
    return ended(v, resample(&v->c.stage, &v->c.k->algorithm, b, out));
}

static int update(const struct stage *s, enum verlc_role role, struct verlc_batch *b) {
    struct worker *const w = s->worker;
    const char *call = "verlc_update";
    TRY(want_samples(b, call));
    if (role == VERLC_CRITIC) {
        TRY(want_role(s, call, role));
        TRY(want(b, call, "values", BATCH_F64, "verlc_values"));
        TRY(want(b, call, "returns", BATCH_F64, "verlc_advantage"));
        phase_begin(s->run->stages, "update_critic");
        return w->ops->update(w, &ppo_update_critic, s->run, &b->b);
    }
    if (role != VERLC_ACTOR) FAIL(ERR_INVAL, "%s: the reference and the teacher are frozen", call);
    TRY(want(b, call, "old_log_probs", BATCH_F64, "verlc_log_probs"));
    TRY(want(b, call, "advantages", BATCH_F64, "verlc_advantage"));
    const struct ppo_worker_config *const k = ppo_worker_slices(w);
    if (k->actor.use_kl_loss) TRY(want(b, call, "ref_log_prob", BATCH_F64, "verlc_log_probs with VERLC_REF"));
    if (k->distill->enable) TRY(want(b, call, "teacher_logprobs", BATCH_F32, "verlc_log_probs with VERLC_TEACHER"));
    if (s->run->step < k->critic.actor_from && !s->run->probing) return w->ops->join(w);
    phase_begin(s->run->stages, "update_actor");
    TRY(w->ops->update(w, &ppo_update_actor, s->run, &b->b));
    return w->ops->join(w);
}

int verlc_update(struct verlc *v, enum verlc_role role, struct verlc_batch *b) {
    TRY(ready(v, "verlc_update"));
    const int rc = update(&v->c.stage, role, b);
    run_updated(&v->c.run);
    return ended(v, rc);
}

/* ---- a step's begin and end ---- */

static bool profiled(const struct controller *c) {
    for (int64_t i = 0; !c->run.probing && i < c->k->output.n_profile_steps; i++)
        if (c->k->output.profile_steps[i] == (double)c->run.step) return true;
    return false;
}

/* Writes the step's trace. Its updates are done by then, so a failure is a warning. */
static void write_trace(struct controller *c) {
    char *path = xasprintf("%s/trace_step_%lld.json", c->k->trainer.run.default_local_dir, (long long)c->run.step);
    int rc = file_mkdirs(c->k->trainer.run.default_local_dir);
    if (rc == 0) rc = c->worker.base.ops->trace(&c->worker.base, path);
    if (rc < 0) log_warn("step %lld was not traced: %s", (long long)c->run.step, err_msg());
    else
        log_info("the trace of step %lld is in %s%s", (long long)c->run.step, path,
                 c->worker.base.n_ranks > 1 ? ", those of other ranks next to it" : "");
    free(path);
}

bool verlc_begin_step(struct verlc *v) {
    struct controller *c = &v->c;
    if (v->rc < 0 || v->answered) return false;
    if (c->run.in_step) {
        failed(v, err_set(ERR_INVAL, __FILE__, __LINE__, "verlc_begin_step: the step before has no verlc_end_step"));
        return false;
    }
    const struct run_config *const k = &c->k->trainer.run;
    const bool first = !v->started;
    v->started = true;
    if (first && c->val_data && !c->run.probing && (k->val_before_train || k->val_only) &&
        ended(v, run_validate_first(&c->run)) < 0)
        return false;
    if (k->val_only || !run_begin_step(&c->run)) return false;
    if (!profiled(c)) return true;
    phase_begin(c->run.stages, "start_profile");
    const int rc = c->worker.base.ops->trace(&c->worker.base, NULL);
    phase_end(c->run.stages);
    return ended(v, rc) == 0;
}

/* Metrics and samples of a step whose updates are done. */
static int record(struct controller *c, struct verlc_batch *b) {
    struct run *const r = &c->run;
    TRY(want_samples(b, "verlc_end_step"));
    TRY(want(b, "verlc_end_step", "score", BATCH_F64, "verlc_rollout"));
    TRY(c->worker.base.ops->join(&c->worker.base));
    phase_begin(r->stages, "dump_rollout_generations");
    ppo_dump(&c->stage, c->tok, &b->b, &c->rollout_dir);
    ppo_record(&c->stage, c->tok, &b->b, &c->generation.rollout->train, false);
    phase_end(r->stages);
    if (profiled(c)) {
        phase_begin(r->stages, "stop_profile");
        write_trace(c);
        phase_end(r->stages);
    }
    phases_metrics(r->stages, &r->metrics);
    TRY(ppo_data_metrics(&c->stage, &c->k->data, &b->b));
    metrics_set_i64(&r->metrics, r->step, "training/global_step");
    metrics_set_i64(&r->metrics, r->sampler.epoch, "training/epoch");
    return 0;
}

int verlc_end_step(struct verlc *v, struct verlc_batch *b) {
    TRY(no_open_rollout(v, "verlc_end_step"));
    TRY(ended(v, record(&v->c, b)));
    return ended(v, run_end_step(&v->c.run));
}

static int save(struct run *r) {
    if (r->in_step) FAIL(ERR_INVAL, "verlc_save: a step is being made; call it after verlc_end_step");
    if (r->step < 1) FAIL(ERR_INVAL, "verlc_save: no step was done, so there is nothing to save");
    return run_save(r);
}

int verlc_save(struct verlc *v) {
    if (v->rc < 0 || v->answered) return v->rc;
    return ended(v, save(&v->c.run));
}
