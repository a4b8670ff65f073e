/* disk_rows.c - the disk that a ppo run takes (plan/disk_plan.h): its models, samples and records. */
#include "plan/disk_plan.h"
#include "ppo/plan/memory_plan.h"

#include "base/err.h"

/* The arguments of a disk plan, with the structs that they point to. */
struct disk_query {
    struct memory_plan_shapes shapes;
    struct disk_model models[2];
    struct disk_plan_args args;
};

static int fill_query(struct disk_query *q, const struct ppo_worker_config *k, int64_t val_rows) {
    *q = (struct disk_query){0};
    TRY(memory_plan_shapes_load(&q->shapes, k));
    q->models[0] = (struct disk_model){&q->shapes.policy, k->model.dir, &k->model.lora, &k->actor.optim};
    q->models[1] = (struct disk_model){&q->shapes.critic, k->model.dir, &k->critic.lora, &k->critic.optim};
    q->args = (struct disk_plan_args){.run = &k->trainer->run,
                                      .keep_key = "trainer.max_actor_ckpt_to_keep",
                                      .models = q->models,
                                      .n_models = k->critic.enable ? 2 : 1,
                                      .samples = k->sizes->samples,
                                      .val_samples = val_rows * k->rollout.val.n,
                                      .prompt_tokens = k->data->max_prompt_length,
                                      .new_tokens = k->data->max_response_length,
                                      .sends = k->rollout.external.n_urls > 0 && !k->rollout.external.weights_dir};
    return 0;
}

int ppo_disk_check(const struct ppo_worker_config *k, struct run *r, int64_t val_rows) {
    struct disk_query q;
    int rc = fill_query(&q, k, val_rows);
    if (rc == 0) rc = disk_plan_check(&q.args, r);
    memory_plan_shapes_free(&q.shapes);
    return rc < 0 ? err_pass(rc, __FILE__, __LINE__) : 0;
}

json_t *ppo_disk_print(const struct ppo_worker_config *k, int64_t steps, int64_t val_rows, struct buf *out) {
    struct disk_query q;
    const int rc = fill_query(&q, k, val_rows);
    q.args.steps = steps;
    json_t *json = rc == 0 ? disk_plan_print(&q.args, out) : NULL;
    memory_plan_shapes_free(&q.shapes);
    return json;
}
