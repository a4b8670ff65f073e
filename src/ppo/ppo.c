/* ppo.c - one step of PPO, GRPO and related algorithms as the algorithm reads on paper, in the calls of include/verlc.h as any
 * program of them; and `verlc plan`. */
#include "ppo/ppo.h"

#include "ppo/controller.h"
#include "ppo/worker/ppo_worker_calls.h"
#include "ranks/restart.h"
#include "run/phase_watchdog.h"

#include "base/err.h"
#include "base/log.h"
#include "ranks/launcher.h"

extern char **environ;

/* ---- one step ---- */

int ppo_update(struct verlc *v, struct verlc_batch *b, struct verlc_batch *drawn) {
    struct verlc_batch *train = b;
    TRY(verlc_reward(v, b));
    if (!batch_find(verlc_batch_data(b), "old_log_probs")) TRY(verlc_log_probs(v, VERLC_ACTOR, b));
    if (verlc_has(v, VERLC_REF)) TRY(verlc_log_probs(v, VERLC_REF, b));
    if (verlc_has(v, VERLC_TEACHER)) TRY(verlc_log_probs(v, VERLC_TEACHER, b));
    if (verlc_has(v, VERLC_CRITIC)) TRY(verlc_values(v, b));
    TRY(verlc_advantage(v, b));
    if (verlc_resamples(v)) {
        TRY(verlc_resample(v, b, drawn));
        train = drawn;
    }
    if (verlc_has(v, VERLC_CRITIC)) TRY(verlc_update(v, VERLC_CRITIC, train));
    return verlc_update(v, VERLC_ACTOR, train);
}

static int train_on(struct verlc *v, struct verlc_batch *b, struct verlc_batch *drawn) {
    TRY(ppo_update(v, b, drawn));
    return verlc_end_step(v, b);
}

int ppo_step(struct verlc *v, struct verlc_batch *b, struct verlc_batch *drawn) {
    TRY(verlc_rollout(v, b));
    return train_on(v, b, drawn);
}

static void in_turn(struct verlc *v) {
    struct verlc_batch *b = verlc_batch_create(), *drawn = verlc_batch_create();
    if (verlc_carried(v, b))
        log_note("the checkpoint has samples of an asynchronous run; they are dropped, and their prompts with them");
    while (verlc_begin_step(v))
        if (ppo_step(v, b, drawn) < 0) break;
    verlc_batch_free(b);
    verlc_batch_free(drawn);
}

int ppo_train(const struct conf *c) {
    struct launch l;
    TRY(launch_read(&l, environ));
    if (workers_started_this(&l)) return ppo_worker_serve(c, &l);
    static void (*const schedules[])(struct verlc * v) = {
        [PPO_SYNC] = in_turn, [PPO_ONE_STEP_OFF] = ppo_one_step_off, [PPO_FULLY_ASYNC] = ppo_fully_async};
    struct restart restart;
    restart_begin(&restart);
    struct verlc *v = verlc_open_conf(c);
    const struct controller *const run = verlc_controller(v);
    schedules[run->k->schedule](v);
    const struct trainer_config trainer = run->k->trainer;
    restart.k = &trainer;
    restart.ranks = run->ranks.all;
    restart.pool_ranks = restart.ranks.n - run->ranks.pools.n[PPO_TRAIN];
    const int rc = verlc_end(v);
    return rc < 0 ? err_pass(restart_run(&restart, rc, phase_stop_signal() != 0), __FILE__, __LINE__) : 0;
}

/* ---- the memory plan alone ---- */

/* What a rank of this pool takes: the trainer's is the plan, others join it as "pools". */
static int plan_pool(const struct ppo_worker_config *all, enum ppo_pool pool, const struct memory_plan_shapes *shapes,
                     struct dev *dev, struct run_plan *out) {
    struct ppo_worker_config k = *all;
    struct memory_plan p;
    k.ranks.pool = pool;
    TRY(memory_plan_make(&p, &k, shapes, dev));
    json_t *json = memory_plan_print(&p, &k, shapes, dev, &out->text);
    const bool fits = memory_plan_check(&p, &k, shapes, dev) == 0;
    json_object_set_new(json, "fits", json_boolean(fits));
    if (pool == PPO_TRAIN) out->json = json;
    else json_object_set_new(json_object_get(out->json, "pools"), ppo_pool_name(pool), json);
    if (!fits) TRY(buf_addf(&out->text, "  does not fit: %s\n", err_msg()));
    out->fits &= fits;
    return 0;
}

/* Of a whole run where the number of its steps is known, else of its first step. */
static void plan_disk(const struct ppo_worker_config *k, const struct controller_rows *rows, struct run_plan *out) {
    const int64_t epoch = k->schedule == PPO_FULLY_ASYNC ? 0 : rows->train / k->data->train_batch_size;
    const struct trainer_config *const t = k->trainer;
    const int64_t steps = t->total_training_steps > 0 ? t->total_training_steps : epoch * t->total_epochs;
    json_t *disk = ppo_disk_print(k, steps, rows->val, &out->text);
    if (disk) json_object_set_new(out->json, "disk", disk);
}

/* What is planned: the configuration on the ranks that it would have. */
static int place(const struct ppo_config *k, const struct train_plan_args *a, struct dev *dev, struct ppo_worker_config *out) {
    const struct train_pool_devices other = ppo_config_pool_devices(k);
    struct ppo_placement ranks = {0};
    TRY(run_plan_ranks(k->conf, &k->trainer, &other, a, dev, &ranks.all));
    ppo_config_pools(k, false, &ranks);
    *out = ppo_worker_config(k, &ranks);
    memory_plan_offload(out, dev);
    return 0;
}

int ppo_plan(const struct conf *c, const struct train_plan_args *a, struct run_plan *out) {
    const struct ppo_config *read;
    struct ppo_worker_config k;
    struct memory_plan_shapes shapes = {0};
    struct dev dev = {0};
    int rc = 0;
    TRYG(ppo_config_read(&read, c, PPO_PLAN), end);
    TRYG(place(read, a, &dev, &k), end);
    TRYG(memory_plan_shapes_load(&shapes, &k), end);
    out->fits = true;
    TRYG(plan_pool(&k, PPO_TRAIN, &shapes, &dev, out), end);
    const bool pools = k.ranks.all.n > k.ranks.pools.n[PPO_TRAIN];
    if (pools) json_object_set_new(out->json, "pools", json_object());
    for (int i = PPO_TRAIN + 1; i < PPO_POOLS; i++)
        if (k.ranks.pools.n[i] > 0) TRYG(plan_pool(&k, (enum ppo_pool)i, &shapes, &dev, out), end);
    struct controller_rows rows;
    if (controller_try_data(read, &rows) < 0) log_warn("verlc ppo would refuse this here: %s", err_msg());
    plan_disk(&k, &rows, out);
end:
    memory_plan_shapes_free(&shapes);
    dev_close(&dev);
    ppo_config_free(read);
    return rc;
}
