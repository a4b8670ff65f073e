/* lora_keys.c - see lora_keys.h.
 * Invariant: what an adapter is put on is frozen; no master of it is ever allocated. */
#include "train/run/lora_keys.h"
#include "train/train.h"

#include "base/buf.h"
#include "base/err.h"
#include "base/file.h"
#include "base/log.h"
#include "model/quantize.h"

#include <limits.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static const char *key_of(char key[96], const char *section, const char *name) {
    snprintf(key, 96, "%s.%s", section, name);
    return key;
}
#define KEY(name) key_of(key, section, (name))

/* The name that peft and `model merge` will look for: a hub id as it is, a directory with its full path. */
static char *base_name(const char *model_path) {
    char full[PATH_MAX], *local = file_expand(model_path);
    char *name = xstrdup(file_is_dir(local) && realpath(local, full) ? full : model_path);
    free(local);
    return name;
}

static int read_new(const struct conf *c, const char *section, int64_t rank, struct lora_config *l) {
    char key[96];
    int64_t alpha = 16;
    const json_t *v;
    TRY(conf_i64_opt(c, KEY("lora_alpha"), &alpha));
    l->rank = rank;
    l->alpha = (double)alpha;
    TRY(conf_json(c, KEY("target_modules"), &v));
    l->targets = json_deep_copy(v);
    if (conf_is_null(c, KEY("exclude_modules"))) return 0;
    TRY(conf_json(c, key, &v));
    l->exclude = json_deep_copy(v);
    return 0;
}

static int read_quantization(const struct conf *c, const char *section, struct train_lora *l) {
    char key[96];
    const char *name = NULL;
    TRY(conf_str_opt(c, KEY("quantization"), &name));
    const int rc = model_quant_parse(name, &l->quant);
    if (rc < 0) return err_wrap(rc, "%s", key);
    if (l->quant != QUANT_NONE && !l->on)
        FAIL(ERR_INVAL, "%s=%s: a quantised model is frozen, what is trained is an adapter on it; set %s.lora_rank", key, name,
             section);
    return 0;
}

int train_read_lora(const struct conf *c, const char *section, const char *model_path, struct train_lora *l) {
    char key[96];
    const char *path = NULL;
    int64_t rank = 0;
    TRY(conf_i64_opt(c, KEY("lora_rank"), &rank));
    if (rank < 0) FAIL(ERR_INVAL, "%s=%lld: a rank is at least 1, and 0 trains every weight", key, (long long)rank);
    TRY(conf_str_opt(c, KEY("lora_adapter_path"), &path));
    l->on = rank > 0 || path;
    TRY(read_quantization(c, section, l));
    if (!l->on) return 0;
    if (path) {
        l->adapter = file_expand(path);
        TRY(lora_config_load(&l->cfg, l->adapter));
        if (rank > 0 && rank != l->cfg.rank)
            log_note("%s has rank %lld and alpha %g; lora_rank and lora_alpha are not used", path, (long long)l->cfg.rank,
                     l->cfg.alpha);
    } else {
        TRY(read_new(c, section, rank, &l->cfg));
    }
    free(l->cfg.base);
    l->cfg.base = base_name(model_path);
    return 0;
}

void train_lora_free(struct train_lora *l) {
    lora_config_free(&l->cfg);
    free(l->adapter);
}

static int put_adapter(struct model *m, const struct train_lora *l, uint64_t seed) {
    if (!l->adapter) return model_lora_create(m, &l->cfg, seed);
    TRY(model_lora_load(m, l->adapter));
    model_lora_set_base(m, l->cfg.base);
    return 0;
}

static int open_model(struct model **out, struct dev *dev, const struct model_open_args *a, const struct train_lora *l, bool critic,
                      uint64_t seed) {
    struct model_open_args args = *a;
    struct model *m;
    args.flags = (l->on ? MODEL_INFER : MODEL_TRAIN) | (a->flags & (MODEL_HOST_MASTER | MODEL_SHARED_BASE));
    args.quant = l->quant;
    TRY(critic ? model_open_value(&m, dev, &args, seed) : model_open(&m, dev, &args));
    const int rc = l->on ? put_adapter(m, l, seed) : 0;
    if (rc < 0) model_close(m);
    else *out = m;
    return rc;
}

int train_open_model(struct model **out, struct dev *dev, const struct model_open_args *a, const struct train_lora *l,
                     uint64_t seed) {
    return open_model(out, dev, a, l, false, seed);
}

int train_open_critic(struct model **out, struct dev *dev, const struct model_open_args *a, const struct train_lora *l,
                      uint64_t seed) {
    return open_model(out, dev, a, l, true, seed);
}
