/* split_model.c - see split_model.h. */
#include "ranks/split_model.h"

#include "base/buf.h"
#include "base/err.h"
#include "comm/comm.h"
#include "model/lora/lora.h"

#include <stdlib.h>

int64_t split_model_together(const struct model_config *c, int64_t n, int64_t ranks, int64_t local, const char **why) {
    *why = NULL;
    if (n <= 1) return 1;
    *why = ranks == 1       ? "there is one rank"
           : ranks % n != 0 ? "it does not divide the ranks"
           : local % n != 0 ? "it does not divide the ranks of a host"
                            : model_tp_unable(c, QUANT_NONE, (int)n);
    return *why ? 1 : n;
}

static struct model_open_args open_args(const struct split_model_args *a) {
    return (struct model_open_args){.dir = a->dir, .act = a->act, .flags = MODEL_FILE_LAYERS, .max_len = a->max_len};
}

/* Of its part. */
static int part_bytes(const struct split_model_args *a, const struct model_config *c, int64_t max_rows, size_t *bytes) {
    struct model_tp_shape shape = {.config = c, .dev = a->dev, .act = a->act, .size = a->size, .max_rows = max_rows};
    struct lora_config lora;
    if (a->adapter) TRY(lora_config_load(&lora, a->adapter));
    if (a->adapter) shape.lora = &lora;
    const int rc = model_tp_bytes(&shape, bytes);
    if (a->adapter) lora_config_free(&lora);
    return rc;
}

int split_model_bytes(const struct split_model_args *a, const struct model_config *c, int64_t max_rows, size_t *bytes) {
    const struct model_open_args open = open_args(a);
    TRY(part_bytes(a, c, max_rows, bytes));
    *bytes += model_open_bytes(c, a->dev, &open) - model_file_ends(c, a->dev, a->act);
    return 0;
}

int split_model_open(struct split_model *s, const struct split_model_args *a) {
    const struct model_open_args open = open_args(a);
    s->a = *a;
    TRY((a->reward ? model_open_reward : model_open)(&s->whole, a->dev, &open));
    return a->adapter ? model_lora_load(s->whole, a->adapter) : 0;
}

int split_model_split(struct split_model *s, struct comm *comm, int64_t max_rows) {
    const int rank = comm_rank(comm), size = s->a.size;
    TRY(part_bytes(&s->a, &s->whole->cfg, max_rows, &s->block_bytes));
    TRY(dev_alloc(s->a.dev, s->block_bytes, &s->block));
    TRY(comm_part(&s->together, comm, rank - rank % size, size));
    TRY(collective_open(&s->devices, s->a.dev, s->together));
    TRY(model_tp_open(&s->part, s->whole, s->devices, max_rows, s->block));
    return model_tp_take(s->part);
}

int split_model_agree_blocks(struct comm *comm, int64_t *n) {
    const int size = comm_size(comm);
    int64_t *all = xcalloc((size_t)size, sizeof *all);
    size_t *at = xcalloc((size_t)size + 1, sizeof *at);
    for (int r = 0; r <= size; r++) at[r] = (size_t)r * sizeof *all;
    all[comm_rank(comm)] = *n;
    const int rc = comm_all_gather(comm, all, at);
    for (int r = 0; r < size && rc == 0; r++) *n = all[r] < *n ? all[r] : *n;
    free(at);
    free(all);
    return rc;
}

void split_model_leave(struct split_model *s) {
    collective_close(s->devices);
    s->devices = NULL;
}

void split_model_close(struct split_model *s) {
    split_model_leave(s);
    model_tp_close(s->part);
    comm_close(s->together);
    model_close(s->whole);
    if (s->block) dev_free(s->a.dev, s->block, s->block_bytes);
    *s = (struct split_model){0};
}
