/* ckpt.h - checkpoint directories: save, find, verify, load, retain.
 *
 *   ROOT/latest_checkpointed_iteration.txt       the number of the newest complete one
 *   ROOT/global_step_N/actor/                    a Hugging Face model directory and nothing else; with an adapter a peft one
 *   ROOT/global_step_N/actor/huggingface/        configuration and tokenizer, for scripts written for verl; also lora_adapter/
 *   ROOT/global_step_N/critic/                   the same of a critic
 *   ROOT/global_step_N/optim/actor.safetensors   fp32 master, the optimizer's arrays (optim_arrays), step; critic.safetensors
 *   ROOT/global_step_N/trainer.json              step, data cursor, controller values
 *   ROOT/global_step_N/config.yaml               resolved configuration
 *   ROOT/global_step_N/manifest.json             format, verlc's version, parts; size and XXH3-128 of every file; written last
 *
 * Invariants: a directory named global_step_N with such a manifest is complete.  It is written as
 * global_step_N.PID-RANDOM.tmp, every file and directory fsynced, then renamed; readers accept it only if the
 * manifest lists what its parts need and every size and checksum hold.  A global_step_N that verlc did
 * not write (ckpt_is_ours) is never written over, moved, deleted or counted. */
#ifndef VERLC_CKPT_H
#define VERLC_CKPT_H

#include "model/files/tokenizer_files.h"
#include "model/optim/optimizer.h"
#include "model/parameters.h"

#include <jansson.h>
#include <stdbool.h>
#include <stdint.h>

/* One model with its optimizer, stored under `name` ("actor", "critic"). */
struct ckpt_part {
    const char *name;
    struct model *model;
    struct optim *optim;                     /* NULL, when loading alone: only the weights are wanted */
    const struct tokenizer_files *tokenizer; /* saved with it; NULL: none */
};
struct ckpt_save_args {
    const char *root; /* trainer.default_local_dir */
    int64_t step;
    const struct ckpt_part *parts;
    int n_parts;
    const json_t *trainer; /* everything else that a resumed run needs */
    const char *config_yaml;
    int64_t keep; /* newest checkpoints kept on disk after this one; <= 0: all */
    int64_t best; /* the step of a checkpoint that is kept in addition to these; <= 0: none */
    /* Parts that another process has, of the same root and step. parts_only: these go to root/global_step_N.parts.tmp and are
     * published there, with nothing else. joins: what is there comes into this checkpoint, behind its own parts. */
    bool parts_only, joins;
    bool hf_model; /* PART/huggingface/ has the weights too */
};
/* ERR_IO (disk full, not writable; global_step_N is there and not ours), ERR_NUMERIC (a weight is not finite; named):
 * nothing half-written remains, older ones untouched. A tracker file
 * that names a checkpoint which is not ours stays as it is. */
int ckpt_save(const struct ckpt_save_args *a);
/* Where in a part's optim/PART.safetensors the arrays begin, one behind another: a whole model's master and its optimizer's (n
 * together). In memory that lies like that, to a FILE_WRITER_BLOCK, they are written without another copy. */
size_t ckpt_optim_begin(const struct ckpt_part *p, const struct optim_array *a, int n);
/* A copy of another place, dir named global_step_N, becomes root's checkpoint of step N, and its newest. ERR_FORMAT: it is damaged
 * or of another step; ERR_IO: one that is not ours has the name. */
int ckpt_adopt(const char *root, const char *dir, int64_t step);
/* Removes or brings back what a process left that was killed while it saved or deleted a checkpoint under root. For whoever
 * holds the directory's lock (track/run_lock.h). ERR_IO. */
int ckpt_recover(const char *root);

/* The complete checkpoint that was saved last under root: *step = -1 when there is
 * none. A torn or altered one is named in a warning and the one before it taken.
 * ERR_UNSUPPORTED: the newest one there is not ours; named. *dir: caller frees. */
int ckpt_find(const char *root, int64_t *step, char **dir);
/* Whether verlc wrote dir: its manifest.json has verlc's version; of a damaged one, trainer.json and config.yaml are there. */
bool ckpt_is_ours(const char *dir);
/* The least step in (after, to] whose directory under root is there and not ours; *step = -1: none. */
int ckpt_foreign(const char *root, int64_t after, int64_t to, int64_t *step);
/* How many complete or torn checkpoints of verlc's are under root, up to this step: what retention counts. */
int ckpt_count(const char *root, int64_t to, int64_t *n);
/* Verifies dir against its manifest; ERR_FORMAT names the file. */
int ckpt_verify(const char *dir);
/* Reads trainer.json; caller owns. */
int ckpt_read_trainer(const char *dir, json_t **trainer);
/* Elements of a part's master: which of its model's layers were trained. ERR_FORMAT, ERR_INPUT. */
int ckpt_master_size(const char *dir, const char *part, int64_t *n);
/* Loads weights (master and compute copy) and, where there is one, optimizer state into an opened model of the same shape; of
 * master and state what the model's shard has. */
int ckpt_load_part(const char *dir, const struct ckpt_part *part);
/* Directory of a part's model: dir/name; caller frees. For opening the model straight from the checkpoint. */
char *ckpt_part_dir(const char *dir, const char *name);
/* "…/global_step_12" -> 12; ERR_INVAL when the path does not end so. */
int ckpt_step_of(const char *dir, int64_t *step);

#endif
