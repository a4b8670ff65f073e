/* ppo.c - one step of PPO, GRPO and related algorithms as the algorithm reads on paper, in the calls of include/verlc.h as any
 * program of them; and `verlc plan`. */
#include "train/run/devices_asked.h"
#include "train/ppo/controller.h"
#include "train/train.h"

#include "base/err.h"
#include "base/log.h"

/* ---- one step ---- */

int ppo_step(struct verlc *v, struct verlc_batch *b, struct verlc_batch *drawn) {
    struct verlc_batch *train = b;
    TRY(verlc_rollout(v, b));
    TRY(verlc_reward(v, b));
    TRY(verlc_log_probs(v, VERLC_ACTOR, b));
    if (verlc_has(v, VERLC_REF)) TRY(verlc_log_probs(v, VERLC_REF, b));
    if (verlc_has(v, VERLC_TEACHER)) TRY(verlc_log_probs(v, VERLC_TEACHER, b));
    if (verlc_has(v, VERLC_CRITIC)) TRY(verlc_values(v, b));
    TRY(verlc_advantage(v, b));
    if (verlc_resamples(v)) {
        TRY(verlc_resample(v, b, drawn));
        train = drawn;
    }
    if (verlc_has(v, VERLC_CRITIC)) TRY(verlc_update(v, VERLC_CRITIC, train));
    TRY(verlc_update(v, VERLC_ACTOR, train));
    return verlc_end_step(v, b);
}

int train_ppo(const struct conf *c) {
    struct verlc *v = verlc_open_conf(c);
    struct verlc_batch *b = verlc_batch_create(), *drawn = verlc_batch_create();
    while (verlc_begin_step(v))
        if (ppo_step(v, b, drawn) < 0) break;
    verlc_batch_free(b);
    verlc_batch_free(drawn);
    const int rc = verlc_end(v);
    return rc < 0 ? err_pass(rc, __FILE__, __LINE__) : 0;
}

/* ---- the memory plan alone ---- */

int train_plan_ppo(const struct conf *c, int64_t gpu, struct buf *out, bool *fits) {
    const struct resume none = {.step = -1};
    struct ppo_config k = {0};
    struct memory_plan p;
    struct model_shapes shapes = {0};
    struct dev dev = {0};
    int rc = 0;
    TRYG(ppo_config_read(&k, c, false), out);
    if (gpu > 0) dev_open_cuda_planned(&dev, (size_t)gpu);
    else TRYG(resume_open_device(&dev, &none, k.run.device, k.run.threads), out);
    memory_plan_offload(&k, &dev);
    TRYG(model_shapes_load(&shapes, &k), out);
    TRYG(memory_plan_make(&p, &k, &shapes, &dev), out);
    memory_plan_print(&p, &k, &shapes, out, NULL);
    *fits = memory_plan_check(&p, &k, &shapes, &dev) == 0;
    if (!*fits) rc = buf_addf(out, "  does not fit: %s\n", err_msg());
    if (controller_try_data(&k) < 0) log_warn("verlc ppo would refuse this here: %s", err_msg());
out:
    model_shapes_free(&shapes);
    dev_close(&dev);
    ppo_config_free(&k);
    return rc;
}
