/* torch_file.h - the tensors of a state_dict that torch.save wrote. */
#ifndef VERLC_MODEL_TORCH_FILE_H
#define VERLC_MODEL_TORCH_FILE_H

#include "device/tensor.h"

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

enum { TORCH_MAX_DIMS = 8 };

struct torch_tensor {
    char *name;
    enum dtype dt;
    int nd;
    int64_t dim[TORCH_MAX_DIMS];    /* of what this file holds: a DTensor's local part */
    int64_t stride[TORCH_MAX_DIMS]; /* elements */
    bool contiguous;                /* row-major without gaps */
    const uint8_t *data;            /* of element 0, into the mapping; not aligned; NULL where a size is 0 */
    /* of a DTensor */
    bool dtensor;
    int shard_dim; /* the parts of the ranks lie one behind the other along it; -1: every rank holds all of it */
    int full_nd;   /* of the whole tensor */
    int64_t full_dim[TORCH_MAX_DIMS];
};
struct torch_file;
/* Maps a file of torch.save's zip format. Its pickle is read by pickle.h: an allow-list of what makes a tensor, and nothing is
 * called. Every tensor lies inside its storage, every storage inside the file.
 * ERR_INPUT: not a readable regular file, a name that is not allowed; ERR_FORMAT: damaged, or not what torch.save writes;
 * ERR_UNSUPPORTED: a dtype, placement or device mesh. */
int torch_file_open(struct torch_file **out, const char *path);
void torch_file_close(struct torch_file *f); /* NULL ok */
int64_t torch_file_count(const struct torch_file *f);
const struct torch_tensor *torch_file_at(const struct torch_file *f, int64_t i); /* in the state_dict's order */
const struct torch_tensor *torch_file_find(const struct torch_file *f, const char *name);
/* Ranks that a DTensor is sharded over and copies of it, from the device mesh; 0: the file has no DTensor. */
int64_t torch_file_shards(const struct torch_file *f);
int64_t torch_file_replicas(const struct torch_file *f);
/* The one plain tensor that torch.save wrote as the n bytes at p, which t borrows. name and path are for messages; t->name stays
 * NULL. Errors as torch_file_open's. */
int torch_tensor_open(struct torch_tensor *t, const void *p, size_t n, const char *name, const char *path);
/* n elements from element `first` on, row-major. */
void torch_tensor_read(const struct torch_tensor *t, int64_t first, int64_t n, void *dst);

#endif
