/* worker.c - a rank's process: the calls of all programs with several ranks. */
#include "train/offline/generator.h"
#include "train/ppo/worker_service.h"
#include "train/run/rank_group.h"
#include "train/run/rank_service.h"
#include "train/sft/service.h"
#include "train/train.h"

#include "base/err.h"

int train_worker(const struct launch *l, const struct ctl_args *a, const struct ctl_service *more) {
    const struct ctl_service *const tables[] = {rank_services, ppo_worker_services, sft_services, generator_services, more};
    struct ctl_service all[64] = {0};
    size_t n = 0;
    for (size_t t = 0; t < sizeof tables / sizeof *tables; t++)
        for (const struct ctl_service *s = tables[t]; s && s->name; s++) {
            CHECK(n + 1 < sizeof all / sizeof *all);
            all[n++] = *s;
        }
    const int rc = ctl_serve(a ? a : &(struct ctl_args){.start_s = RANK_START_S}, l, all);
    rank_close();
    return rc < 0 ? err_pass(rc, __FILE__, __LINE__) : 0;
}
