/* config_int.h - what the files that read config.json have in common. Not for other files. */
#ifndef VERLC_MODEL_CONFIG_INT_H
#define VERLC_MODEL_CONFIG_INT_H

#include "model/config.h"

struct config_dim {
    const char *key;
    int64_t *out;
    int64_t fallback; /* used when the key is absent; 0: required */
    int64_t max;
};
/* The n sizes d of object o, each in 1 .. max. where: the file, for messages. ERR_FORMAT. */
int model__parse_dims(const json_t *o, const char *where, const struct config_dim *d, int n);

/* config_experts.c: experts, their router, and which layers have them. ERR_FORMAT, ERR_UNSUPPORTED. */
int model__parse_experts(struct model_config *c, const json_t *o, const char *where);

/* config_rope.c: the tables of rotary angles; after the sizes of heads. ERR_FORMAT, ERR_UNSUPPORTED, ERR_INPUT. */
int model__parse_rope(struct model_config *c, const json_t *o, const char *where);

#endif
