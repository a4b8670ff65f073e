/* reward_model_ranks.h - scores of finished samples by a model, during generation: a reward model, or a judge that is served. As a
 * worker's operations, in this process or on ranks; chosen once.
 *
 * Invariant: a score depends on its own sample alone (reward_model.h), so not on which rank gave it. */
#ifndef VERLC_PPO_WORKER_REWARD_MODEL_RANKS_H
#define VERLC_PPO_WORKER_REWARD_MODEL_RANKS_H

#include "ranks/dispatch.h"
#include "ranks/start_workers.h"
#include "reward_model/judge_server.h"
#include "reward_model/reward_model.h"

struct ppo_scorer { /* a zeroed one may be closed */
    const struct ppo_scorer_ops *ops;
    struct reward_model *rm;    /* of a reward model, borrowed: the worker's */
    struct judge_server *judge; /* of a served judge, borrowed: the worker's */
    struct scorer_ranks *ranks; /* of ranks */
};
struct ppo_scorer_ops {
    /* As reward_model.h has them; without a model there is never anything pending. */
    int (*submit)(struct ppo_scorer *m, const struct reward_model_sample *s, int64_t tag);
    int (*step)(struct ppo_scorer *m, bool flush); /* 1: it did something, or a judge that is served has more to do */
    int (*pause)(struct ppo_scorer *m);            /* of a rank: its steps are over, for those that have the model with it */
    int (*poll)(struct ppo_scorer *m, int64_t *tag, struct reward_result *out);
    int64_t (*pending)(struct ppo_scorer *m);
    void (*rest)(struct ppo_scorer *m); /* a generation is over: no call is under way on ranks that do nothing else */
    void (*drop)(struct ppo_scorer *m);
};
/* In this process; both NULL: there is neither. */
void ppo_scorer_open_local(struct ppo_scorer *m, struct reward_model *rm, struct judge_server *judge);
struct ppo_rm_config;
/* On d's ranks, of which the first serves a judge. together: consecutive ones that have the model together; alone: they do nothing
 * else. */
void ppo_scorer_open_ranks(struct ppo_scorer *m, const struct ppo_rm_config *k, struct rank_dispatch *d, int together, bool alone);
void ppo_scorer_close(struct ppo_scorer *m);
/* A rank's side of the call "score", and of "score_together", which the other ranks get that have the model with it. */
int ppo_scorer_follow(struct ppo_scorer *m);
int ppo_scorer_answer(struct ppo_scorer *m, const struct comm_call *call, struct ctl_result *out);

#endif
