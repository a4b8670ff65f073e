/* config_int.h - what the files that derive struct ppo_config have in common. Not for other files. */
#ifndef VERLC_PPO_CONFIG_INT_H
#define VERLC_PPO_CONFIG_INT_H

#include "ppo/config.h"

/* The directory that a key names: its configuration and tokenizer; ppo_config_fetch gets the weights. *out is owned by the
 * configuration. */
int ppo_config__model_dir(const char *key, const char *path, char **out);

/* config_reward.c: the reward's manager with its arguments; the reward model, after the sizes. ERR_INVAL and the model's errors. */
int ppo_config__reward(struct ppo_config *k);
int ppo_config__reward_model(struct ppo_config *k);

#endif
