/* resume_changes.h - what a resumed run does differently from the one that saved its checkpoint: logged key by key. A change that
 * is not allowed is refused.
 *
 * Invariant: a line is logged for each key that acts and whose value has changed, in the form
 * "changed since step N: KEY old -> new", and for nothing else. docs/checkpoints.md has the rules. */
#ifndef VERLC_RUN_RESUME_CHANGES_H
#define VERLC_RUN_RESUME_CHANGES_H

#include "conf/conf.h"
#include "model/lora/lora.h"
#include "run/resume.h"

/* A model directory that the run reads. fixed: a resumed run needs the same (the reference, an adapter's frozen base), so that
 * another one is refused; else it is logged. */
struct resume_model {
    const char *key, *dir;
    bool fixed;
};
struct resume_tell_args {
    const struct conf *conf;
    const char *mode, *root; /* trainer.resume_mode, trainer.default_local_dir */
    const struct resume_model *models;
    int n_models;
    bool other_model; /* trainer.resume_other_model: another one is logged, not refused */
};
/* Of a run from scratch: only the fingerprints of its models, for its checkpoints. Of a resumed one also the lines, on the
 * console and in r->changes for run.db. ERR_INPUT: another model than the checkpoint's run began from. A checkpoint without
 * fingerprints, and a directory that cannot be read, pass. */
int resume_tell(struct resume *r, const struct resume_tell_args *a);

/* Whether what is trained is of the kind that the checkpoint's part has: all weights, or an adapter of this rank and alpha.
 * l: NULL: all weights. section: of the keys ("actor_rollout_ref.model"). ERR_INPUT says both in words. */
int resume_check_adapter(const struct resume *r, const char *part, const char *section, const struct lora_config *l);

#endif
