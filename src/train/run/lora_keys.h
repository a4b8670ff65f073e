/* lora_keys.h - the keys of an adapter, the same ones in ppo and sft, and the model
 * that they ask for.  Private to train. */
#ifndef VERLC_TRAIN_LORA_H
#define VERLC_TRAIN_LORA_H

#include "conf/conf.h"
#include "model/files/load.h"
#include "model/lora/lora.h"

struct train_lora {
    bool on;                /* lora_rank > 0, or lora_adapter_path is set */
    struct lora_config cfg; /* of the adapter to come, or of the one in adapter */
    char *adapter;          /* peft directory to start from; NULL: a new one; owned */
    enum quant_kind quant;  /* of the frozen base */
};
/* Reads SECTION.lora_rank, lora_alpha, target_modules, exclude_modules, lora_adapter_path, quantization ("model",
 * "actor_rollout_ref.model", "critic.model"). model_path: the user's name of the base model. */
int train_read_lora(const struct conf *c, const char *section, const char *model_path, struct train_lora *l);
void train_lora_free(struct train_lora *l);

/* The model to train: all of it with a master, or frozen with an adapter. of a->flags, where the master is (MODEL_HOST_MASTER)
 * and whether a critic's base is a->base's (MODEL_SHARED_BASE).
 * seed: of a new adapter and of a critic's new head. */
int train_open_model(struct model **out, struct dev *dev, const struct model_open_args *a, const struct train_lora *l,
                     uint64_t seed);
int train_open_critic(struct model **out, struct dev *dev, const struct model_open_args *a, const struct train_lora *l,
                      uint64_t seed);

#endif
