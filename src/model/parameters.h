/* parameters.h - struct model: its parameters as the files name them, and the groups (fused matrices and
 * vectors) that the forward pass reads.  Opened by files/load.h, run by forward.h, updated by optim/optimizer.h.
 *
 * Invariant: a parameter is a range of rows of its group in the flat fp32 master, in the gradients and in the
 * optimizer's state alike. */
#ifndef VERLC_MODEL_PARAMETERS_H
#define VERLC_MODEL_PARAMETERS_H

#include "device/device.h"
#include "model/families.h"

#include <stdbool.h>
#include <stdint.h>

/* One Hugging Face tensor. */
struct model_param {
    char name[96];      /* "model.layers.0.self_attn.q_proj.weight" */
    int64_t rows, cols; /* cols == 1, nd == 1 for vectors */
    int nd;             /* 3: (rows, 1, cols) in the files */
    int64_t offset;     /* elements into the flat master, gradient and moments */
    int64_t group;      /* index into model.groups */
    enum dtype src_dt;  /* dtype in the file it came from; export keeps it */
};

/* One tensor of the forward pass: a matrix or a vector, made of one or more
 * parameters (q, k, v; gate, up) that are neighbours in the flat master, so
 * that each Hugging Face tensor is a range of its rows. */
struct model_group {
    int64_t offset;    /* elements into the flat master */
    int64_t n, k;      /* matrix (n, k); k == 0: vector of n */
    int64_t count;     /* matrices of n / count rows, one below the other: experts; else 1 */
    struct weight mat; /* compute copy of a matrix, of the first of several */
    struct tensor vec; /* compute copy of a vector, act */
    int64_t first_param, n_params;
    enum model_role role;     /* MODEL_LINEAR of a quantised model: mat is empty */
    bool split_experts;       /* the files that it came from have a matrix of each expert, and so have those that are written */
    struct model_group *bias; /* of a layer's matrix; NULL: none */
    struct lora_group *lora;  /* adapters on its modules, NULL: none; private to model */
};

/* Consecutive elements of the flat arrays. */
struct model_range {
    int64_t lo, hi;
};
/* Which part of master, gradients and optimizer state a rank keeps (parameter_segments.h: model_own), and of sharded weights. */
struct model_shard {
    int rank, size;      /* size <= 1: all */
    bool whole_matrices; /* a matrix of the layers is not cut (Muon) */
    bool experts;        /* of the layers' experts a rank has a run, whole (parallel/expert_dispatch.h) */
};

/* Numbers of a layer that training leaves as they are: what a router adds to scores where it chooses. Not in the master, and not
 * rounded to act. */
struct model_buffer {
    char name[96];
    int64_t n;
    enum dtype src_dt;
    float *host;       /* as the file has it; NULL: a shape */
    struct tensor dev; /* (n) f32 */
};

struct model_layer {
    struct model_group *first, *last; /* all its groups, neighbours; its linear layers are those of that role */
    int64_t window;                   /* sliding window of its attention, 0: none */
    enum model_rope_table rope;
    /* NULL: it has none. Norms are of the input of attention and MLP, of what they add to the residual stream (post), or both. */
    struct model_group *attn_norm, *qkv, *q_norm, *k_norm, *q_row_norm, *k_row_norm, *q_rope_norm, *k_rope_norm, *o,
        *attn_post_norm;
    struct model_group *mlp_norm, *gate_up, *down, *mlp_post_norm;
    struct model_group *router, *expert_gate_up, *expert_down; /* in the place of gate_up and down */
    struct model_buffer *route_bias;
    struct model_group *mla_q_a, *mla_q_norm, *mla_q, *mla_kv_a, *mla_kv_norm, *mla_kv; /* latent attention */
    struct model_group *sinks;                                                          /* of attention */
    struct model_group *shared_gate_up, *shared_down, *shared_gate;
    /* in the place of qkv, q_norm and k_norm: a gated delta net. delta_in: q, k, v and z of all heads, b of all, then a; where
     * model_joint_delta says so q, k, v and z of a key head after the other, then b and a likewise */
    struct model_group *delta_in, *delta_conv, *delta_a_log, *delta_dt_bias, *delta_norm;
};

/* The MTP layer around its layer (families.h). */
struct model_mtp {
    struct model_group *first, *last; /* all its groups, its layer's included, neighbours; NULL: none */
    struct model_group *hidden_norm, *token_norm, *proj, *norm;
};

struct model {
    struct model_config cfg;
    struct dev *dev; /* borrowed until model_close */
    enum dtype act;  /* compute dtype */
    struct model_param *params;
    int64_t n_params; /* entries of params */
    int64_t n_elems;  /* elements of the flat master, without gaps */
    struct model_group *groups;
    int64_t n_groups;
    struct model_layer *layers; /* (model_layer_places) */
    struct model_mtp mtp;
    struct model_group *g_embed, *g_head, *g_norm; /* g_head == g_embed when tied; the score of a value model */
    struct model_group *g_head_bias;               /* score.bias, or NULL */
    struct model_buffer *buffers;                  /* (n_buffers), of layers */
    int64_t n_buffers;
    /* compute copy, on the device */
    struct weight embed, head; /* head.data == embed.data when tied */
    struct tensor final_norm;
    struct tensor rope[MODEL_ROPE_TABLES]; /* (rope_len, D/2, 2) f32 each that a layer reads; rope_len is
                                              model_open_args.max_len */
    struct tensor query_scale;             /* (rope_len) f32: of each position; absent where all are 1 */
    void *weights;                         /* the one block behind all groups, or a rank's shares of it */
    struct tensor flat;          /* (n_elems) act: that block as one array in the master's order; absent where it is not one,
                                    as model_is_flat says */
    int flags;                   /* model_load_flags it was opened with */
    bool frozen_routers;         /* routers of layers with experts are not trained: no gradient, no weight decay */
    const struct model *base;    /* whose weights it reads below its head; NULL: its own */
    struct model_stream *stream; /* how weights that are not here as a whole are streamed; NULL: they are here; private */
    size_t weights_bytes;        /* of weights: all of them, or a rank's shares */
    char base_hash[33];          /* of sharded weights as they were read: an adapter's base (lora_int.h) */
    /* fp32 master, flat (n_train) f32, on the device or with MODEL_HOST_MASTER in host memory; NULL in inference-only models */
    float *master;
    /* what is trained: the parameters above, or with an adapter its matrices and nothing else */
    const struct model_param *train_params;
    int64_t n_train_params, n_train; /* entries; elements of master, gradients, moments, where they are whole */
    struct model_shard shard;
    struct model_range *own;         /* (n_own) what the master has, one after the other; NULL: all. Owned */
    int64_t n_own, n_master;         /* ranges; elements of the master */
    struct model_lora *lora;         /* NULL: no adapter; private to model */
    struct model_quant *quant;       /* NULL: not quantised; private to model */
    struct model_files *files;       /* from which layers are read later (MODEL_FILE_LAYERS); NULL: all is read; private to model */
    struct model_kept *kept;         /* tensors that are written as the files have them; NULL: none; private to model */
    struct model_dispatch *dispatch; /* private: of shard.experts, once passes may begin */
    struct model_tp *tp; /* its layers are split over ranks (parallel/tensor_parallel.h); NULL: they are whole; private */
};

/* Whether the compute copy is one array in the master's order: no group is padded, packed or quantised. */
bool model_is_flat(const struct model *m);

#endif
