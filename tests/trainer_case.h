/* trainer_case.h - what the tests of a step's stages share: a configuration, a worker on one device with the tiny models of
 * tests/fixtures, a run with its tracker in a directory of its own. Everything stops at the first failure, by cmocka's asserts. */
#ifndef TESTS_TRAINER_CASE_H
#define TESTS_TRAINER_CASE_H

#include "model_case.h"

#include "ppo/stages/stages.h"

struct trainer_case {
    struct ppo_config k;
    struct ppo_worker w;
    struct run run;
    struct stage stage;
    char *dir; /* the run's */
};

/* The run and where stages report; k and the worker follow. */
static inline void trainer_case_open(struct trainer_case *c, const char *name) {
    *c = (struct trainer_case){.dir = case_temp_dir()};
    c->run.k.max_bad_steps = 1;
    c->run.step = 1;
    c->stage = (struct stage){.worker = &c->w.base, .run = &c->run};
    OK(phases_create(&c->run.stages, 600));
    json_t *config = json_object();
    const struct track_args t = {.project = "test", .experiment = name, .run_dir = c->dir, .config = config};
    OK(track_open(&c->run.track, &t));
    json_decref(config);
}

/* The worker's slices of k as it is now. */
static inline void trainer_case_configure(struct trainer_case *c) {
    const struct ppo_placement alone = {.all = {.n = 1, .n_local = 1}, .pools = {.n = {[PPO_TRAIN] = 1}}};
    ppo_config_sizes(&c->k);
    c->w.k = ppo_worker_config(&c->k, &alone);
}

/* A model of the worker on its open device: tests/fixtures/model/qwen2, for a critic with a new head, or critic_dir. */
struct trainer_case_model {
    enum verlc_role role;
    const char *critic_dir;
    int64_t max_len, max_seqs;
};
static inline void trainer_case_model(struct trainer_case *c, const struct trainer_case_model *a) {
    struct model **const m = &c->w.model[a->role];
    const bool train = a->role == VERLC_ACTOR || a->role == VERLC_CRITIC;
    char *dir = a->critic_dir ? xstrdup(a->critic_dir) : case_path("qwen2", "");
    const struct model_open_args open = {
        .dir = dir, .act = DT_F32, .flags = train ? MODEL_TRAIN : MODEL_INFER, .max_len = (int)a->max_len};
    if (a->role == VERLC_CRITIC) OK(model_open_value(m, &c->w.base.dev, &open, 7));
    else OK(model_open(m, &c->w.base.dev, &open));
    free(dir);
    const struct trained_model_args t = {.dev = &c->w.base.dev,
                                         .model = *m,
                                         .train = train,
                                         .keep = MODEL_KEEP_LAYER,
                                         .max_rows = a->max_seqs * a->max_len,
                                         .max_seqs = a->max_seqs,
                                         .list = memory_plan_distill_list(&c->k.distill)};
    OK(trained_model_create(&c->w.base.role[a->role].model, &t));
    c->w.base.vocab = (*m)->cfg.vocab;
}

/* All models are there. */
static inline void trainer_case_ready(struct trainer_case *c) {
    trainer_case_configure(c);
    worker_open_local(&c->w.base, NULL);
    for (int i = 0; i < N_ROLES; i++) {
        const struct worker_role role = {c->w.base.role[i].model, c->k.rollout.logp_cut, (float)c->k.rollout.train.temperature};
        if (role.model) worker_set_role(&c->w.base, i, &role);
    }
}

static inline void trainer_case_close(struct trainer_case *c) {
    track_close(c->run.track, 0);
    phases_destroy(c->run.stages);
    for (int i = 0; i < N_ROLES; i++) trained_model_destroy(c->w.base.role[i].model);
    for (int i = 0; i < N_ROLES; i++) model_close(c->w.model[i]);
    assert_int_equal(c->w.base.dev.allocated, 0);
    if (c->w.base.dev.ops) dev_close(&c->w.base.dev);
    metrics_free(&c->run.metrics);
    case_drop_dir(c->dir);
}

#endif
