/* weights_dir.h - private to model: the tensors of a Hugging Face directory, whatever files they are in. */
#ifndef VERLC_MODEL_WEIGHTS_DIR_H
#define VERLC_MODEL_WEIGHTS_DIR_H

#include "base/map.h"
#include "model/files/safetensors.h"
#include "model/files/shards.h"

#include <stdint.h>

struct weights_dir {
    struct safetensors_file **files;
    char **paths;
    int64_t n;
    struct map by_name;               /* tensor -> file; empty when there is one file and no index */
    struct shards *shards;            /* verl's shards instead of files; paths[0] is their directory */
    struct safetensors_tensor *whole; /* the shards' tensors, without data */
};
/* Opens the files of dir; w is zeros, and to be closed after an error too.
 * ERR_INPUT (no weights there), ERR_FORMAT, ERR_UNSUPPORTED (pickled weights; the shards of a LoRA run). */
int weights_dir_open(struct weights_dir *w, const char *dir);
void weights_dir_close(struct weights_dir *w);
/* The tensor of that name, borrowed; NULL: not in the files. dir: a weights_dir, untyped for bnb_args.find. */
const struct safetensors_tensor *weights_dir_find(void *dir, const char *name);
/* How many tensors file f has, and tensor i of it, borrowed. */
int64_t weights_dir_count(const struct weights_dir *w, int64_t f);
const struct safetensors_tensor *weights_dir_at(const struct weights_dir *w, int64_t f, int64_t i);

#endif
