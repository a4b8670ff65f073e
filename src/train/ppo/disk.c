/* disk.c - the disk that a ppo run takes (train/run/disk_plan.h): its models, samples and records. */
#include "train/ppo/memory_plan.h"
#include "train/ppo/stages.h"
#include "train/run/disk_plan.h"

#include "base/err.h"

/* What a disk plan is asked for, with what it points to. */
struct asked {
    struct model_shapes shapes;
    struct disk_model models[2];
    struct disk_plan_args args;
};

static int ask(struct asked *q, const struct ppo_config *k, const struct ppo_disk_args *a) {
    *q = (struct asked){0};
    TRY(model_shapes_load(&q->shapes, k));
    q->models[0] = (struct disk_model){&q->shapes.policy, k->model_dir, &k->lora, &k->optim};
    q->models[1] = (struct disk_model){&q->shapes.critic, k->model_dir, &k->critic.lora, &k->critic.optim};
    q->args = (struct disk_plan_args){.run = a->run,
                                      .keep_key = "trainer.max_actor_ckpt_to_keep",
                                      .models = q->models,
                                      .n_models = k->critic.enable ? 2 : 1,
                                      .from = a->from,
                                      .steps = a->steps,
                                      .samples = k->train_batch_size * k->train.n,
                                      .val_samples = a->val_rows * k->val.n,
                                      .prompt_tokens = k->max_prompt_length,
                                      .new_tokens = k->max_response_length,
                                      .n_clients = a->n_clients};
    return 0;
}

int ppo_disk_check(const struct ppo_config *k, const struct ppo_disk_args *a, void (*say)(void *arg, const char *line), void *arg) {
    struct asked q;
    struct disk_plan p;
    int rc = ask(&q, k, a);
    if (rc == 0) rc = disk_plan_make(&p, &q.args);
    if (rc == 0) rc = disk_plan_check(&p, &q.args, say, arg);
    model_shapes_free(&q.shapes);
    return rc < 0 ? err_pass(rc, __FILE__, __LINE__) : 0;
}

json_t *ppo_disk_print(const struct ppo_config *k, const struct ppo_disk_args *a, struct buf *out) {
    struct asked q;
    struct disk_plan p;
    json_t *json = NULL;
    if (ask(&q, k, a) == 0 && disk_plan_make(&p, &q.args) == 0) json = disk_plan_print(&p, &q.args, out);
    model_shapes_free(&q.shapes);
    return json;
}
