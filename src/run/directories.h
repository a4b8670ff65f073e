/* directories.h - the directories and files of a run: where a model path leads, the directory that the run writes to, and whether
 * what it reads is there.
 *
 * Invariant: what is checked here is checked before anything is loaded. */
#ifndef VERLC_RUN_DIRECTORIES_H
#define VERLC_RUN_DIRECTORIES_H

#include "conf/conf.h"

#include <stdbool.h>
#include <stdint.h>

/* A local directory for a model path: a directory as it is, else what data_hub_fetch gives for a hub id
 * ("Qwen/Qwen2.5-0.5B-Instruct"): the snapshot in the local cache, or a download. weights false: configuration and
 * tokenizer are enough. ERR_INPUT says how to get it. Caller frees. */
int run_model_dir(const char *path, bool weights, char **dir);
/* The weights next to the configuration that run_model_dir found in dir, for the path that a key names; dir NULL: nothing. */
int run_model_weights(const char *key, const char *path, const char *dir);

/* Makes the directory that a key names and tries that a file can be written there,
 * before anything is loaded. ERR_IO. */
int run_directory(const char *key, const char *dir);
/* Whether there are files to validate on: those that data.val_files names, its default only where that file is there. */
bool run_val_files(const struct conf *c, const char *const *files, int64_t n);
/* Whether files that a key names can be read, before anything is loaded. ERR_INPUT has the key. */
int run_check_files(const char *key, const char *const *files, int64_t n);

#endif
