/* run_plan.c - see run_plan.h. */
#include "plan/run_plan.h"

#include "base/err.h"
#include "device/device.h"
#include "ranks/trainer_config.h"
#include "run/resume.h"

void run_plan_free(struct run_plan *p) {
    buf_free(&p->text);
    json_decref(p->json);
    *p = (struct run_plan){0};
}

int run_plan_ranks(const struct conf *c, const struct trainer_config *trainer, const struct train_pool_devices *pools,
                   const struct train_plan_args *a, struct dev *dev, struct rank_placement *out) {
    const struct train_devices_keys *const k = &trainer->devices;
    const int64_t gpu = a->gpu, gpus = a->gpus; /* --gpu, --gpus */
    const struct resume none = {.step = -1};
    *out = (struct rank_placement){.host_memory = a->host};
    out->n = gpus > 0 ? gpus : rank_count_devices(c, k) + (pools ? pools->gpus : 0);
    if (gpu == 0 && gpus == 0) TRY(rank_count_decide(c, trainer, pools, false, out));
    if (gpu > 0) dev_open_cuda_planned(dev, (size_t)gpu);
    else TRY(resume_open_device(dev, &none, trainer->run.device, trainer->run.threads));
    const int64_t n = out->n, there = gpu > 0 || gpus > 0 || k->ranks == 0 || !dev_has_own_memory(dev) ? n : dev_cuda_count();
    if (n > there) dev->mem_total /= (size_t)((n + there - 1) / there); /* as ranks that share a GPU plan */
    if (gpus > 0 && !dev_has_own_memory(dev))
        FAIL(ERR_INVAL, "--gpus %lld: there is no GPU here whose memory is known; say it with --gpu, as in --gpu 80GB",
             (long long)gpus);
    const bool per_node = k->ranks == 0 && conf_is_set(c, "trainer.n_gpus_per_node") && dev_has_own_memory(dev);
    out->n_local = per_node ? (k->n_gpus_per_node < n ? k->n_gpus_per_node : n) : (n + k->nnodes - 1) / k->nnodes;
    return 0;
}
