/* dcp.h - a checkpoint of torch.distributed.checkpoint: .metadata and the *.distcp files next to it. */
#ifndef VERLC_MODEL_DCP_H
#define VERLC_MODEL_DCP_H

#include "model/files/torch_file.h"

struct dcp_chunk { /* a box of a tensor, as one rank saved it */
    int64_t at[TORCH_MAX_DIMS], dim[TORCH_MAX_DIMS];
    struct torch_tensor data; /* of that shape; borrows from its file's mapping */
};
struct dcp_tensor { /* whole */
    char *name;
    enum dtype dt;
    int nd; /* >= 1 */
    int64_t dim[TORCH_MAX_DIMS], count;
    struct dcp_chunk *chunks;
    int64_t n_chunks;
};
/* Which tensors are opened, by their names: 1 opened, 0 left; < 0 is an error, which dcp_open returns. */
typedef int dcp_choice(void *arg, const char *name);

struct dcp;
bool dcp_is_dir(const char *dir); /* a .metadata is in it */
/* Reads .metadata as values (pickle.h: an allow-list, nothing is called) and maps the files of the tensors that `choose` takes.
 * Their chunks tile them exactly, each lies in its file, and no two in the same bytes.
 * ERR_INPUT: a file is missing, or a name that is not allowed; ERR_FORMAT: damaged, or not what torch writes; ERR_UNSUPPORTED:
 * a dtype, chunks that were transformed (compressed). */
int dcp_open(struct dcp **out, const char *dir, dcp_choice *choose, void *arg);
void dcp_close(struct dcp *d); /* NULL ok */
int64_t dcp_count(const struct dcp *d);
const struct dcp_tensor *dcp_at(const struct dcp *d, int64_t i); /* in the order of .metadata */
int64_t dcp_files(const struct dcp *d);                          /* that are mapped */
int64_t dcp_left(const struct dcp *d);                           /* tensors that were not opened */
/* n elements from element `first` on, row-major. */
void dcp_read(const struct dcp_tensor *t, int64_t first, int64_t n, void *dst);

#endif
