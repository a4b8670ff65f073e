/* train.h - the programs: ppo, sft, their plans. Each is a list of named, timed
 * stages; the arithmetic lives in the modules above. */
#ifndef VERLC_TRAIN_H
#define VERLC_TRAIN_H

#include "conf/conf.h"
#include "base/buf.h"

#include <stdint.h>

/* Runs the trainer of a resolved configuration to its end. 0; ERR_SIGNAL after
 * SIGINT, SIGTERM or SIGHUP with the state saved (stage_stop_signal says which). */
int train_ppo(const struct conf *c);
int train_sft(const struct conf *c);
/* The memory plan of a run as a table, appended to out; *fits says whether the device has that
 * much: trainer.device, or with gpu > 0 a GPU with so many bytes, be there one or not.
 * Reads config.json of the model, no weights. */
int train_plan_ppo(const struct conf *c, int64_t gpu, struct buf *out, bool *fits);
int train_plan_sft(const struct conf *c, int64_t gpu, struct buf *out, bool *fits);      /* data.max_length: the longest sample */
int train_plan_generate(const struct conf *c, int64_t gpu, struct buf *out, bool *fits); /* full prompts and responses */

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

#endif
