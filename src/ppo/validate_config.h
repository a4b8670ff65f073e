/* validate_config.h - verl's rules between keys (verl/utils/config.py validate_config). */
#ifndef VERLC_PPO_VALIDATE_CONFIG_H
#define VERLC_PPO_VALIDATE_CONFIG_H

#include "ppo/config.h"

/* k: filled, not yet derived (ppo_config_fill). verl's validate_config for this program: batch sizes that divide, micro-batch
 * sizes set once, modes that exist. ERR_INVAL. */
int ppo_validate_config(const struct ppo_config *k);
/* The part of it that is about a critic, for a user-defined estimator that needs one. ERR_INVAL. */
int ppo_validate_critic_config(const struct ppo_config *k);

#endif
