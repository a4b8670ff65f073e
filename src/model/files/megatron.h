/* megatron.h - verl's Megatron checkpoints: dist_ckpt/ of megatron-core, huggingface/, transformer_config.json. */
#ifndef VERLC_MODEL_MEGATRON_H
#define VERLC_MODEL_MEGATRON_H

#include "model/files/dcp.h"

struct megatron_tensor { /* one weight of the Hugging Face model */
    char *name;
    enum dtype dt;
    int nd;
    int64_t dim[TORCH_MAX_DIMS], count;
    /* count elements: every `stride` from `first` on, `block` of them */
    const struct dcp_tensor *of;
    int64_t first, block, stride;
    bool buffer; /* numbers that no optimizer moves (a router's correction bias), which keep their dtype */
};
struct megatron_args {
    const char *dir;        /* that dist_ckpt/ is in, or its files themselves, as verl's converter_hf_to_mcore.py writes them */
    const char *config_dir; /* of config.json */
    bool no_head;           /* output_layer is left out: verl.model_merger's --tie-word-embedding */
};
struct megatron;
bool megatron_is_dir(const char *dir); /* dist_ckpt/.metadata is in it */
/* Every weight that config.json asks for, under Hugging Face's name, but for a head, which may be absent. A head with one row is a
 * critic's: score.weight.
 * ERR_UNSUPPORTED: a family or a weight that verlc does not have; ERR_FORMAT: a weight missing, or of another shape than
 * config.json asks for; else as dcp_open. */
int megatron_open(struct megatron **out, const struct megatron_args *a);
void megatron_close(struct megatron *m); /* NULL ok */
int64_t megatron_count(const struct megatron *m);
const struct megatron_tensor *megatron_at(const struct megatron *m, int64_t i);
int64_t megatron_files(const struct megatron *m);
int64_t megatron_left(const struct megatron *m); /* tensors that are no weights: the optimizer's state */
bool megatron_has_score(const struct megatron *m);
/* n elements from element `first` on, row-major. */
void megatron_read(const struct megatron_tensor *t, int64_t first, int64_t n, void *dst);

#endif
