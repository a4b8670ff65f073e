/* forward.h - the decoder: activations, forward, log-probs, values, backward.
 *
 * Invariant: model_forward is the only forward pass in the program.  Prefill, decode, log-prob passes and
 * training call it; they differ in where the KV cache lives and in what is kept for backward, never in
 * arithmetic. */
#ifndef VERLC_MODEL_FORWARD_H
#define VERLC_MODEL_FORWARD_H

#include "base/arena.h"
#include "model/parallel/context_parallel.h"
#include "model/parallel/parameter_segments.h"
#include "model/parameters.h"

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

/* The state of a layer with a gated delta net, in slots (device/ops.h). */
struct model_state {
    struct tensor conv; /* (slots, DEV_CONV_TAPS - 1 or more, channels) act */
    struct delta_state delta;
};
/* The KV cache of all layers; a layer with a gated delta net has a state instead. */
struct model_kv {
    struct kv *layers;          /* (n_layers) */
    struct model_state *states; /* (n_layers); NULL where no layer has one */
};

struct model_batch { /* T packed rows; arrays on the device */
    int64_t n_rows;
    struct tensor ids;   /* (T) i32 */
    struct tensor pos;   /* (T) i32, position in its sequence */
    struct tensor slots; /* (T) i32, KV-cache slot of the row; kv == NULL: row index */
    struct attn_seqs seqs;
    const struct model_kv *kv; /* NULL: K and V are in the activations (one block of max_rows) */
    struct tensor state_slots; /* (seqs.n) i32: of kv->states, each sequence's own */
    struct row_seqs
        state_seqs;       /* the sequences of layers with a state, where several of seqs are rows of one; n 0: they are seqs */
    bool no_adapter;      /* the base model alone: the reference of an adapter's training */
    struct tensor routes; /* (model_router_layers, R, k) i32, R >= T, optional: experts of each token by layer with a router. They
                                  are written (routes_kept), or they are what the routers choose: route_args.given */
    bool routes_kept;
    bool own_keys; /* one row a sequence, whose key no other sequence of the batch sees (dev_qkv_attn_fwd) */
    /* How the rows here are cut, in backward a summand of the gradient each; NULL: not. With a context they are those of this rank,
     * slots count from 0, and seqs are of the whole micro-batch. */
    const struct model_parts *parts;
    struct model_context *context;
    const struct attn_seqs *part_seqs; /* latent attention, where rows are cut: of each part the sequences that it has rows of */
};

/* What a training forward keeps of its layers until backward. The rest is recomputed there by the same code, so
 * that no bit depends on it. Layers in their order: the first `all` keep everything that backward reads, the next
 * `attention` everything but the MLP's wide buffers, the others their input alone. Counts above the number of layers
 * mean all of them. The last layer's buffers are still there when backward begins, and need no place of their own. */
struct model_keep {
    bool train; /* false: inference, layers share all buffers */
    int64_t all, attention;
    int context;  /* ranks that share the rows (parallel/context_parallel.h), of which each has a part; 0: whole */
    int parts;    /* these are runs of so many parts; 0: as many as ranks */
    bool experts; /* training: those of layers are on ranks (parallel/expert_dispatch.h), and so is what they compute */
    /* Training: the logits of the first so many outputs here are kept for backward, rounded up to DEV_KEPT_ROWS; at most all.
     * 0: all are made again, as are those with a list. */
    int64_t logits;
};
#define MODEL_KEEP_NONE ((struct model_keep){0})
#define MODEL_KEEP_LAYER ((struct model_keep){.train = true})
#define MODEL_KEEP_ATTENTION ((struct model_keep){.train = true, .attention = INT64_MAX})
#define MODEL_KEEP_ALL ((struct model_keep){.train = true, .all = INT64_MAX})
/* Buffers of one forward (and backward) of at most max_rows rows. */
struct model_acts;
/* Bytes for these limits; model_acts_create takes that much from the device. max_rows: of a micro-batch, shared or not. */
size_t model_acts_bytes(const struct model_config *c, enum dtype act, int64_t max_rows, struct model_keep keep);
/* The most that fits `extra` bytes above those of MODEL_KEEP_LAYER: first the attention of as many layers as it can be
 * (a quarter to a third of a layer's memory, and a larger share of its time the longer the sequences are), then all of them.
 * like: whose context and experts it has. */
struct model_keep model_keep_fit(const struct model_config *c, enum dtype act, int64_t max_rows, struct model_keep like,
                                 size_t extra);
/* Bytes of the kept logits of n outputs, and the most that there may be of these: those of all rows here, or 0 without an LM
 * head. */
size_t model_kept_bytes(const struct model_config *c, int64_t n);
int64_t model_kept_most(const struct model_config *c, int64_t max_rows, struct model_keep keep);
/* block: model_acts_bytes bytes of device memory, or NULL to allocate (then owned). */
int model_acts_create(struct model_acts **out, const struct model *m, int64_t max_rows, struct model_keep keep, void *block);
void model_acts_destroy(struct model_acts *a);

/* Runs the decoder. The residual stream after the last layer stays in `a`. */
int model_forward(struct model *m, const struct model_batch *b, struct model_acts *a);
/* out (R, h) act: final norm of rows idx (R) i32 of the last model_forward; without idx of the first R. */
int model_hidden(struct model *m, struct model_acts *a, struct tensor idx, struct tensor out);
/* logits (R, V) f32 raw of such rows x (R, h) act. */
int model_logits(struct model *m, struct tensor logits, struct tensor x);

/* After model_forward of the same rows, in inference with nothing to read of its residual stream any more: the MTP layer. b: as
 * model_forward's, with b->ids the token after each row's own. hidden (T, h) act: the states that it reads; absent: the final
 * norm's of that forward pass. */
int model_mtp_forward(struct model *m, const struct model_batch *b, struct model_acts *a, struct tensor hidden);
/* The rows' order that model_mtp_forward reads on the device; again after others have used the block. */
int model_mtp_begin(struct model *m, struct model_acts *a);
/* out (R, h) act: norm of rows idx (R) i32 after the MTP layer; the head reads it, and a next MTP pass. */
int model_mtp_hidden(struct model *m, struct model_acts *a, struct tensor idx, struct tensor out);

/* Log-probs of chosen rows (host in, host out), in blocks of rows so that the
 * head's buffers stay small: logp[i] belongs to target[i] predicted from row
 * row[i] of the last forward. entropy, sum_pi_sq may be NULL. n is at most the
 * max_rows of the activations; model_backward wants distinct rows. */
struct model_logp_args {
    int64_t n;
    const int32_t *row, *target; /* host */
    const float *inv_temp;       /* (n) host */
    float *logp, *entropy, *sum_pi_sq;
    struct model_list *list; /* NULL: none */
    bool train;              /* model_backward follows, so that logits may be kept */
};
/* Log-probs of several tokens of each row (distillation): of given ones, of the k most probable, or both.
 * Device arrays for a block of rows come from model_list_layout; host arrays are the caller's, (n, k). */
struct model_list {
    int64_t k; /* at most the vocabulary */
    struct tensor d_id, d_logp, d_top_id, d_top_logp;
    const int32_t *id; /* distinct in a row; NULL: no given tokens */
    float *logp;       /* of these, at the row's temperature */
    int32_t *top_id;   /* largest first, equal ones by id; NULL: not wanted */
    float *top_logp;
    const float *dlogp; /* model_backward: d loss / d logp; NULL: none */
};
/* Claims the device arrays for activations of max_rows rows: measure, then bind (base/arena.h). */
void model_list_layout(struct model_list *l, int64_t k, int64_t max_rows, struct arena *a);
int model_logp(struct model *m, struct model_acts *a, const struct model_logp_args *l);
/* The same of rows after the MTP layer; without entropy, sum_pi_sq and list. */
int model_mtp_logp(struct model *m, struct model_acts *a, const struct model_logp_args *l);

/* Values of chosen rows of a model with a value head: value[i] (n) host, of the state after row
 * row[i] of the last forward. n is at most the max_rows of the activations. */
int model_value(struct model *m, struct model_acts *a, const int32_t *row, int64_t n, float *value);

/* ---- routers of layers with experts (router_load.c) ---- */
int64_t model_router_layers(const struct model_config *c); /* how many layers have one */
/* Training passes to come also count the choices that routers would make by scores alone: no recorded choices, bias, groups. */
void model_router_by_scores(struct model_acts *a);
/* After a training forward: load (model_router_layers, n_experts) += how many choices of its rows each expert has; scored, after
 * model_router_by_scores: by the scores alone, the same shape; else it is left alone. */
int model_router_load(struct model *m, struct model_acts *a, int64_t *load, int64_t *scored);
/* The losses of routers that the backward passes to come add for their rows (struct balance_args). */
struct model_router_losses {
    const float *load; /* (model_router_layers, n_experts) host */
    float z;
};
int model_router_balance(struct model *m, struct model_acts *a, const struct model_router_losses *losses); /* NULL: none */
/* Their values in the last of them of these rows, added layer by layer, row by row. */
int model_router_balance_loss(struct model *m, const struct model_acts *a, struct model_range rows, double *loss, double *z_loss);

/* ---- backward ---- */
/* Where the gradients of one micro-batch go. Without begin: written to flat, or added; the micro-batches of a step are then
 * summed in place. With begin: bucket by bucket, in the order in which they are made, into memory that the sink names, so that it
 * can move a bucket while others are made; a left fold of buckets that are written (dev_fold) has the bits of the sum in place.
 * Buckets are ranges of the flat array: the MTP layer, the head, the final norm, the layers from the last one to the first; with
 * an adapter one of all. */
struct model_grad_sink {
    float *flat; /* (n_train) f32, device */
    bool add;    /* += instead of = ; without it flat, or a bucket's memory, may hold anything */
    void *ctx;
    /* *at: memory for the bucket's summands, where they are written; the first congruent modulo 256 bytes with its place in a flat
     * array. */
    int (*begin)(void *ctx, struct model_range bucket, float **at);
    /* With begin: the parts of a batch are not added up, but are summands each, one model_summand_stride behind the other. */
    bool separate;
    int (*end)(void *ctx, struct model_range bucket); /* it is complete, once the device gets there */
    /* The token embedding, after all buckets: the rows dx (T, h) f32 of these ids (T) i32, in the place of dev_embed_bwd onto
     * `table`. A tied embedding has this part and the head's. */
    int (*rows)(void *ctx, struct model_range table, struct tensor ids, struct tensor dx);
    /* Where a rank sums the gradient of the experts that it has of this bucket (parallel/expert_dispatch.h): += or =. */
    int (*experts)(void *ctx, struct model_range bucket, float **at, bool *add);
};

static inline int64_t model_summand_stride(struct model_range bucket) { return (bucket.hi - bucket.lo + 63) / 64 * 64; }

struct model_backward_args {
    const struct model_batch *batch;    /* of model_forward */
    const struct model_logp_args *logp; /* of model_logp */
    const float *dlogp, *dentropy;      /* (n) host; dentropy may be NULL, and needs logp->entropy */
    /* Of model_mtp_forward and model_mtp_logp; its head's weights get no gradient, and with mtp_detached nothing below it does.
     * With logp NULL the MTP layer's gradient is 0. */
    struct {
        const struct model_batch *batch;
        const struct model_logp_args *logp;
        const float *dlogp;
    } mtp;
    const struct model_grad_sink *sink;
};
/* After model_forward (keep.train) and model_logp over the same rows: d loss / d parameters to the sink. */
int model_backward(struct model *m, struct model_acts *a, const struct model_backward_args *args);

struct model_value_backward_args {
    const struct model_batch *batch; /* of model_forward */
    int64_t n;
    const int32_t *row;  /* (n) host, those of model_value, distinct */
    const float *dvalue; /* (n) host */
    const struct model_grad_sink *sink;
};
/* The same after model_value. */
int model_value_backward(struct model *m, struct model_acts *a, const struct model_value_backward_args *args);

#endif
