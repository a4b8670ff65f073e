/* resource_pools.c - see resource_pools.h. */
#include "ppo/worker/resource_pools.h"

#include "base/err.h"

const char *ppo_pool_name(enum ppo_pool pool) {
    static const char *const names[PPO_POOLS] = {"train", "rollout", "critic", "teacher", "reward"};
    return names[pool];
}

enum ppo_pool ppo_pool_of(const struct ppo_pools *p, enum ppo_pool part) {
    if (p->n[part] > 0) return part;
    return part == PPO_REWARD && p->n[PPO_ROLLOUT] > 0 ? PPO_ROLLOUT : PPO_TRAIN;
}

int64_t ppo_pool_first(const struct ppo_pools *p, enum ppo_pool pool) {
    int64_t first = 0;
    for (int i = 0; i < (int)pool; i++) first += p->n[i];
    return first;
}

int64_t ppo_pool_ranks(const struct ppo_pools *p) {
    int64_t n = 0;
    for (int i = 0; i < PPO_POOLS; i++) n += p->n[i];
    return n;
}

json_t *ppo_pools_json(const struct ppo_pools *p) {
    json_t *list = json_array();
    for (int i = 0; i < PPO_POOLS; i++) json_array_append_new(list, json_integer((json_int_t)p->n[i]));
    return list;
}

int ppo_pools_read(struct ppo_pools *p, const json_t *list, int64_t ranks) {
    bool sound = json_array_size(list) == PPO_POOLS;
    for (int i = 0; i < PPO_POOLS; i++) {
        p->n[i] = json_integer_value(json_array_get(list, (size_t)i));
        sound &= p->n[i] >= (i == PPO_TRAIN);
    }
    if (!sound || ppo_pool_ranks(p) != ranks)
        FAIL(ERR_FORMAT, "the controller's pools are not those of %lld ranks", (long long)ranks);
    return 0;
}
