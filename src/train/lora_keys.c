/* lora_keys.c - see lora_keys.h.
 * Invariant: what an adapter is put on is frozen; no master of it is ever allocated. */
#include "train/lora_keys.h"

#include "base/buf.h"
#include "base/err.h"
#include "base/file.h"
#include "base/log.h"

#include <stdlib.h>
#include <string.h>

/* The name that peft and `model merge` will look for: a hub id as it is, a directory with its full path. */
static char *base_name(const char *model_path) {
    char *full = file_is_dir(model_path) ? realpath(model_path, NULL) : NULL;
    return full ? full : xstrdup(model_path);
}

int train_make_lora(struct train_lora *l, const char *section, const struct train_lora_keys *k, const char *model_path) {
    l->on = k->rank > 0 || k->path;
    l->quant = k->quant;
    if (k->quant != QUANT_NONE && !l->on)
        FAIL(ERR_INVAL, "%s.quantization=%s: a quantised model is frozen, what is trained is an adapter on it; set %s.lora_rank",
             section, k->quant == QUANT_NF4 ? "nf4" : "int8", section);
    if (!l->on) return 0;
    if (k->path) {
        l->adapter = xstrdup(k->path);
        const int rc = lora_config_load(&l->cfg, l->adapter);
        if (rc < 0) return err_wrap(rc, "%s.lora_adapter_path", section);
        if (k->rank > 0 && k->rank != l->cfg.rank)
            log_note("%s has rank %lld and alpha %g; lora_rank and lora_alpha are not used", k->path, (long long)l->cfg.rank,
                     l->cfg.alpha);
    } else {
        l->cfg.rank = k->rank;
        l->cfg.alpha = (double)k->alpha;
        l->cfg.targets = json_deep_copy(k->targets);
        l->cfg.exclude = json_deep_copy(k->exclude);
    }
    free(l->cfg.base);
    l->cfg.base = base_name(model_path);
    return 0;
}

void train_lora_free(struct train_lora *l) {
    lora_config_free(&l->cfg);
    free(l->adapter);
}

void train_model_config_free(struct train_model_config *m) {
    free(m->dir);
    train_lora_free(&m->lora);
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
    args.flags = (l->on ? MODEL_INFER : MODEL_TRAIN) |
                 (a->flags & (MODEL_HOST_MASTER | MODEL_SHARED_BASE | MODEL_SHARDED_WEIGHTS | MODEL_FILE_LAYERS));
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
