/* mtp_keys.h - the keys of multi-token prediction, the same ones in ppo and sft, and the shape of the model that they describe. */
#ifndef VERLC_TRAIN_MTP_KEYS_H
#define VERLC_TRAIN_MTP_KEYS_H

#include "conf/conf.h"
#include "model/config.h"

/* SECTION.mtp; filled by the rows MTP_TRAINED of shared_groups.def. */
struct train_mtp {
    bool enable, train, rollout, detach;
    double loss;
    int64_t tokens, steps;
    /* derived */
    bool used;     /* the MTP layer is a part of the model; else its tensors are kept as they are */
    int64_t draft; /* tokens drafted at a time; 0: none */
};
/* Derives. section: "model", "actor_rollout_ref.model". ERR_INVAL names the key. */
int train_make_mtp(struct train_mtp *m, const char *section, const struct conf *c, bool adapter);
/* Weight of the loss; 0: none. */
double train_mtp_loss(const struct train_mtp *m);
/* config.json of dir, with the MTP layer where it is used. */
int train_model_shape(struct model_config *out, const char *dir, const struct train_mtp *m);

#endif
