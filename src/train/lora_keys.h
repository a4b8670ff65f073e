/* lora_keys.h - the keys of an adapter, the same ones in ppo and sft, and the model
 * that they describe. */
#ifndef VERLC_TRAIN_LORA_KEYS_H
#define VERLC_TRAIN_LORA_KEYS_H

#include "conf/conf.h"
#include "model/files/load.h"
#include "model/lora/lora.h"
#include "train/activation_recompute.h"
#include "train/router_balance.h"
#include "train/mtp_keys.h"

struct train_lora {
    bool on;                /* lora_rank > 0, or lora_adapter_path is set */
    struct lora_config cfg; /* of the adapter to come, or of the one in adapter */
    char *adapter;          /* peft directory to start from; NULL: a new one; owned */
    enum quant_kind quant;  /* of the frozen base */
};
/* The group `model` of a configuration; the row of conf/keys is MODEL. */
struct train_model_config {
    char *dir; /* owned */
    const char *tokenizer_dir;
    struct train_lora lora;
    struct train_router_keys router;
    struct train_mtp mtp;
    enum dtype act;
    enum train_recompute recompute;
};
/* SECTION.* as they are written; filled by the rows ADAPTER of shared_groups.def, and SECTION.quantization. */
struct train_lora_keys {
    int64_t rank, alpha;
    const json_t *targets, *exclude; /* NULL: null */
    const char *path;
    enum quant_kind quant;
};
/* The adapter that they describe. section: "model", "actor_rollout_ref.model", "critic.model"; model_path: the user's name of
 * the base model. ERR_INVAL names the key; ERR_INPUT, ERR_FORMAT: the adapter to start from. */
int train_make_lora(struct train_lora *l, const char *section, const struct train_lora_keys *k, const char *model_path);
void train_lora_free(struct train_lora *l);
void train_model_config_free(struct train_model_config *m);

/* The model to train: all of it with a master, or frozen with an adapter. of a->flags, where the master is (MODEL_HOST_MASTER)
 * and whether a critic's base is a->base's (MODEL_SHARED_BASE).
 * seed: of a new adapter and of a critic's new head. */
int train_open_model(struct model **out, struct dev *dev, const struct model_open_args *a, const struct train_lora *l,
                     uint64_t seed);
int train_open_critic(struct model **out, struct dev *dev, const struct model_open_args *a, const struct train_lora *l,
                      uint64_t seed);

#endif
