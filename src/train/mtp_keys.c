/* mtp_keys.c - see mtp_keys.h. */
#include "train/mtp_keys.h"

#include "base/buf.h"
#include "base/err.h"
#include "base/log.h"

#include <stdlib.h>

int train_make_mtp(struct train_mtp *m, const char *section, const struct conf *c, bool adapter) {
    m->used = m->enable && (m->train || m->rollout);
    if (!m->enable && (m->train || m->rollout))
        log_note("%s.mtp.enable is False: the MTP layer is neither trained nor used, as in verl", section);
    if (!m->used) return 0;
    if (adapter)
        FAIL(ERR_INVAL,
             "%s.mtp.enable=True with an adapter: unsupported; the MTP layer is trained with all weights. Leave lora_rank "
             "at 0, or mtp.enable_train and mtp.enable_rollout out",
             section);
    if (!m->train)
        FAIL(ERR_INVAL,
             "%s.mtp.enable_rollout=True without enable_train: drafts of a layer that is not trained fall behind the policy; "
             "set %s.mtp.enable_train=True",
             section, section);
    if (!m->rollout) return 0;
    char *tokens = xasprintf("%s.mtp.num_speculative_tokens", section), *steps = xasprintf("%s.mtp.speculative_num_steps", section);
    m->draft = conf_is_set(c, steps) && !conf_is_set(c, tokens) ? m->steps : m->tokens;
    free(tokens);
    free(steps);
    return 0;
}

double train_mtp_loss(const struct train_mtp *m) { return m->used && m->train ? m->loss : 0; }

int train_model_shape(struct model_config *out, const char *dir, const struct train_mtp *m) {
    TRY(model_config_load(out, dir));
    const int rc = m->used ? model_config_use_mtp(out, m->detach, dir) : 0;
    if (rc < 0) model_config_free(out);
    return rc;
}
