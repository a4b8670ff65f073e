/* train.h - the programs: ppo, sft, their plans. Each is a list of named, timed
 * stages; the arithmetic lives in the modules above. */
#ifndef VERLC_TRAIN_H
#define VERLC_TRAIN_H

#include "base/buf.h"
#include "conf/conf.h"
#include "ctl/ctl.h"

#include <stdint.h>

/* Runs the trainer of a resolved configuration to its end. 0; ERR_SIGNAL after
 * SIGINT, SIGTERM or SIGHUP with the state saved (stage_stop_signal says which). */
int train_ppo(const struct conf *c);
int train_sft(const struct conf *c);
/* A rank of somebody else's run: serves its controller's calls, and those of `more` (NULL, or ended by a name NULL), until the
 * controller ends the group. a: where a launcher's ranks find the controller; NULL: the environment says. */
int train_worker(const struct launch *l, const struct ctl_args *a, const struct ctl_service *more);
/* What is planned for, be it there or not; 0: what is. */
struct train_plan_args {
    int64_t gpu, host; /* bytes of a GPU, of a host's memory */
    int64_t gpus;      /* ranks, one a GPU; without it those that the keys ask for, of what is there where gpu is 0 */
};
struct train_plan {
    struct buf text; /* a table */
    json_t *json;    /* the same: total, limit, parts (track/run_db.c has their form), fits, of several ranks "ranks" */
    bool fits;
};
void train_plan_free(struct train_plan *p);
/* The memory plan of a run, of one of its ranks, with sequences of the full length. Reads config.json of the model, no weights. */
int train_plan_ppo(const struct conf *c, const struct train_plan_args *a, struct train_plan *out);
int train_plan_sft(const struct conf *c, const struct train_plan_args *a, struct train_plan *out);
int train_plan_generate(const struct conf *c, const struct train_plan_args *a, struct train_plan *out);

/* Time: a few real steps of such a run in its own directory (trainer.default_local_dir), which the caller removes, and what
 * they took (train/run/time_probe.h). whole: with a step at full length, a validation pass and a checkpoint. */
struct time_probe;
int train_probe_ppo(const struct conf *c, bool whole, struct time_probe *out);
int train_probe_sft(const struct conf *c, bool whole, struct time_probe *out);
/* Changes of keys whose time a probe cannot know but by trying, as overrides, one a line, appended to out. own_memory: the
 * device has memory of its own. */
int train_choices_ppo(const struct conf *c, bool own_memory, struct buf *out);
int train_choices_sft(const struct conf *c, bool own_memory, struct buf *out);

/* verl's main_eval: the scores of the responses in data.path, one JSON object, appended to out. */
int train_eval(const struct conf *c, struct buf *out);
/* verl's main_generation: data.n_samples responses for each prompt of data.path, to data.output_path. */
int train_generate(const struct conf *c);

/* A local directory for a model path: a directory as it is, else what data_hub_fetch gives for a hub id
 * ("Qwen/Qwen2.5-0.5B-Instruct"): the snapshot in the local cache, or a download. weights false: configuration and
 * tokenizer are enough. ERR_INPUT says how to get it. Caller frees. */
int train_model_dir(const char *path, bool weights, char **dir);
/* The weights beside the configuration that train_model_dir found in dir, for the path that a key names; dir NULL: nothing. */
int train_model_weights(const char *key, const char *path, const char *dir);

/* Makes the directory that a key names and tries that a file can be written there,
 * before anything is loaded. ERR_IO. */
int train_run_dir(const char *key, const char *dir);
/* Whether there are files to validate on: those that data.val_files names, its default only where that file is there. */
bool train_val_files(const struct conf *c, const char *const *files, int64_t n);
/* Whether files that a key names can be read, before anything is loaded. ERR_INPUT has the key. */
int train_check_files(const char *key, const char *const *files, int64_t n);

#endif
