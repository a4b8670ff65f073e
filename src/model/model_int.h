/* model_int.h - private to model: the parameter layout, linear layers, and the
 * activations that forward and backward share.  Not for other modules. */
#ifndef VERLC_MODEL_INT_H
#define VERLC_MODEL_INT_H

#include "base/arena.h"
#include "base/size.h"
#include "model/forward.h"
#include "model/parameters.h"

/* ---- parameters ---- */
/* Fills params, groups, layers and n_elems of a model whose cfg is set; no memory of the device. */
void model__params_build(struct model *m);
void model__params_free(struct model *m);
/* Claims the compute copy of every group: measure, then bind. */
void model__weights_layout(struct model *m, struct arena *a);
/* Fills m->flat; after the layout was bound. */
void model__find_flat(struct model *m);

/* What the names of layers, embedding and final norm begin with in the files. */
const char *model__prefix(const struct model_config *c);
static inline struct tensor model__vec(const struct model_group *g) { return g ? g->vec : TENSOR_NONE; }
/* The group's range of a flat f32 array (master or gradients): (n, k) or (n). */
static inline struct tensor model__flat(float *flat, const struct model_group *g) {
    if (!g) return TENSOR_NONE;
    return g->k ? tensor_2d(flat + g->offset, DT_F32, g->n, g->k) : tensor_1d(flat + g->offset, DT_F32, g->n);
}
static inline int64_t model__group_count(const struct model_group *g) { return g->n * (g->k ? g->k : 1); }
/* A group of matrices that may have adapters and be quantised. */
static inline bool model__adaptable(const struct model_group *g) { return g->role == MODEL_LINEAR || g->role == MODEL_EXPERTS; }
/* ---- quantised base (quantize.c) ---- */
struct model_quant {
    enum quant_kind kind;
    struct quant_part {
        struct tensor code, scale;
    } * parts;   /* (n_params): of the layers' matrices, the others are empty */
    void *stage; /* the largest group as (n, k) act, and packed for the GEMMs */
    void *pack;
};
/* After model__params_build; QUANT_NONE: nothing happens. */
void model__quant_create(struct model *m, enum quant_kind kind);
void model__quant_free(struct model *m);
void model__quant_layout(struct model *m, struct arena *a); /* measure, then bind: codes and scales of all, and the scratch */
void model__quant_place(struct model *m, const struct model_group *g, struct arena *a); /* codes and scales of a group */
/* What those of tensors take that do not lie as one; whether all of a group do, all codes and then all scales. */
void model__quant_measure(const struct model *m, const struct model_group *g, struct arena *a);
bool model__quant_one_part(const struct model *m, const struct model_group *g);
void model__quant_scratch(struct model *m, struct arena *a);
int64_t model__quant_codes(enum quant_kind kind, int64_t n); /* bytes of n elements */
int64_t model__quant_scales(enum quant_kind kind, int64_t rows, int64_t cols);
/* The group's matrix to multiply by. Of a quantised model it lies in the one scratch that all groups share: valid
 * until the next call. */
int model__weight(const struct model *m, const struct model_group *g, struct weight *out);

/* Bytes of a group's compute copy. */
size_t model__group_bytes(const struct model *m, const struct model_group *g);
/* Its matrices from rows (n, k) f32 or act on the device, and the other way round: f32 or act. */
int model__pack(const struct model *m, const struct model_group *g, struct tensor rows);
int model__unpack(const struct model *m, const struct model_group *g, struct tensor rows);
/* A group's compute copy from its elements in f32 on the device. */
int model__group_from(struct model *m, const struct model_group *g, float *flat);
/* Memory for the master of what is trained: all of it, or what m->shard owns. */
int model__alloc_master(struct model *m);
void model__free_master(struct model *m); /* one without is fine */
/* Memory of the device, or of the host where m's flags have this one. */
int model__alloc(struct model *m, int on_host, size_t bytes, void **out);
void model__release(struct model *m, int on_host, void *p, size_t bytes); /* NULL ok */

/* ---- linear layers (linear.c) ---- */
/* y (T, n) = x W^T + bias and, unless base, what the group's adapters add; add: y (f32) = from + that. */
struct linear_args {
    const struct model_group *group;
    struct tensor y, x;
    bool add, base;
    struct tensor from; /* add: (T, n) f32; may be y */
};
int model__linear(struct model *m, const struct linear_args *a);
/* y f32: what the group's adapters add, alone. */
int model__lora_linear(struct model *m, const struct linear_args *a);
/* out (T, n / 2) = SwiGLU or GeGLU, as the family has it, of gate_up. */
int model__gated(struct model *m, struct tensor out, struct tensor gate_up);
/* The same of y; y holds the output of the GEMM afterwards only where the activation is not its epilogue. */
int model__linear_gated(struct model *m, const struct linear_args *a, struct tensor out);
/* What rows of the embedding are multiplied by. */
static inline float model__embed_scale(const struct model *m) {
    const float s = m->cfg.embed_scale;
    return m->cfg.family->scaled_embedding && m->act == DT_BF16 ? bf16_to_f32(f32_to_bf16(s)) : s;
}
/* The gradients of a backward pass: of what m trains, elements [bucket.lo, bucket.hi) are at `at` now. */
struct model_grads {
    const struct model_grad_sink *sink;
    struct model_range bucket;
    struct model_range hole;         /* of the bucket: elements that are not there, the experts of ranks */
    float *at;                       /* NULL: none was opened yet */
    bool add;                        /* += ; else = , and what ops only add to is zeroed first */
    const struct model_parts *parts; /* a summand each, in their order; NULL: all rows are one */
    int64_t stride;                  /* from a part's summand to the next; 0: they are added up */
};
/* Where an element of the bucket is from `at` on. */
static inline int64_t model__place_in(const struct model_grads *g, int64_t element) {
    return element - g->bucket.lo - (element >= g->hole.hi ? g->hole.hi - g->hole.lo : 0);
}
static inline int model__n_parts(const struct model_grads *g) { return g->parts ? g->parts->n : 1; }
/* Where the gradient of part i goes. */
static inline struct model_grads model__summand(const struct model_grads *g, int i) {
    struct model_grads own = *g;
    if (g->stride) own.at += i * g->stride;
    else own.add |= i > 0;
    return own;
}
/* The rows of part i of a pass of so many. */
static inline struct model_range model__part(const struct model_grads *g, int i, int64_t rows) {
    return g->parts ? (struct model_range){g->parts->cut[i], g->parts->cut[i + 1]} : (struct model_range){0, rows};
}
/* Those of n outputs that are read from its rows; row (n): ascending where there are several parts. */
struct model_range model__part_outputs(const struct model_grads *g, int i, const int32_t *row, int64_t n);
static inline struct tensor model__range(struct tensor t, struct model_range r) {
    return t.nd == 0 ? t : tensor_rows(t, r.lo, r.hi - r.lo);
}
/* What is trained of the groups from this one to that, both included: with an adapter its matrices on them, else themselves; a
 * value model's head in any case. */
struct model_range model__trained(const struct model *m, const struct model_group *from, const struct model_group *to);
/* Opens a bucket, of what is trained of these groups; closes it. */
int model__bucket_begin(struct model *m, struct model_grads *g, const struct model_group *from, const struct model_group *to);
int model__bucket_end(struct model_grads *g);
/* A group's gradient, (n, k) or (n); absent where it is NULL. With an adapter a value head's alone. */
struct tensor model__grad(const struct model *m, const struct model_grads *g, const struct model_group *group);
/* dx (T, k) = gradient of its input, adapters included; weights' gradients are written or added, adapters' are added.
 * add: dx (f32) += instead of =. */
struct linear_bwd_args {
    const struct model_group *group;
    struct tensor dx, dy, x;
    const struct model_grads *grads;
    bool add;
};
int model__linear_bwd(struct model *m, const struct linear_bwd_args *a);
/* Zeroes what the ops of these groups only add to, unless the bucket adds. */
int model__zero_norms(struct model *m, const struct model_grads *g, const struct model_group *first,
                      const struct model_group *last);
/* Where the gradient of a vector goes: as model__grad, or scratch that nobody reads where it is frozen. */
struct tensor model__vec_grad(const struct model *m, const struct model_grads *g, const struct model_group *group);

/* ---- weights that the device does not have as a whole (weight_streaming.c); nothing where it has ---- */
void model__stream_create(struct model *m); /* after a layout, of the flags and shard that m has */
void model__stream_free(struct model *m);
/* Claims a rank's shares of a sharded model: measure, then bind. */
void model__shares_layout(struct model *m, int rank, struct arena *a);
size_t model__shares_most(struct model *m, struct model_shard shard); /* their bytes on the rank with the most; m: a shape */
/* Loading of a sharded model: the groups of its span i are at `at` (model__span_most bytes; NULL: where a pass has them); false:
 * there is none. Then what is this rank's is kept. */
size_t model__span_most(const struct model *m);
bool model__span_open(struct model *m, int64_t i, void *at, struct model_range *groups);
int model__span_keep(struct model *m, int64_t i, const void *at);
/* The groups of layer l lie one after the other from base on (NULL: measures). Returns its bytes. */
size_t model__layer_place(struct model *m, int64_t l, char *base);
/* Layers that have stayed in the files (load.c): layer l is read to a room that all share, until the next one or the end. taken:
 * nothing of the model's weights is read any more, and they are freed. */
int model__files_layer(struct model *m, int64_t l);
void model__files_end(struct model *m, bool taken);
void model__stream_with_experts(struct model *m);         /* until the stream begins again: layers are gathered with them */
void *model__stream_room(const struct model *m);          /* model_stream_shape.room bytes, and one layer's experts at least */
bool model__dispatches(const struct model *m, int64_t l); /* layer l's experts are on their ranks in the pass at hand */
int model__stream_start(struct model *m);                 /* a forward begins; the embedding is read from here on */
int model__stream_head(struct model *m);                  /* norm and head are read from here on */

/* ---- layers split over ranks (parallel/tensor_parallel.c): m->tp ---- */
/* What ranks have columns of: outputs of attention, keys, outputs of a gated delta net, of the MLP's activation, of a shared
 * expert's, of the matrices that add to the residual stream and of the embedding, of the head. */
enum model_tp_dim {
    MODEL_TP_HEADS,
    MODEL_TP_KEYS,
    MODEL_TP_DELTA,
    MODEL_TP_FFN,
    MODEL_TP_SHARED,
    MODEL_TP_HIDDEN,
    MODEL_TP_VOCAB,
    MODEL_TP_DIMS
};
int model__tp_rank(const struct model *m, int *size);
const struct model *model__tp_whole(const struct model *m); /* that it is a part of */
/* Where this rank's columns of so many rows are computed. */
struct tensor model__tp_part(const struct model *m, enum model_tp_dim d, int64_t rows);
/* *whole (rows, all columns) act: those of all ranks; until the next call. */
int model__tp_gather(struct model *m, enum model_tp_dim d, int64_t rows, struct tensor *whole);
/* x (T, h) f32 = rows ids (T) of the embedding; logits (R, V) f32 of x (R, h) act, as dev_logits. */
int model__tp_embed(struct model *m, struct tensor x, struct tensor ids);
int model__tp_logits(struct model *m, struct tensor logits, struct tensor x);
/* As dev_qk_norm_fwd of a rank's heads, whose norms are of all heads' rows. */
int model__tp_qk_norm(struct model *m, const struct qk_norm_args *a);
/* What a gated delta net's delta_in gives of so many rows: q, k, v and z of the rank's heads, then b and a of all heads; until the
 * next gather. */
struct tensor model__tp_delta_rows(const struct model *m, int64_t rows);
/* Computes them, and sets those columns of a->y that are b and a of the rank's heads. */
int model__tp_delta_in(struct model *m, const struct linear_args *a);
/* As model__linear of what gives a->y (T, h), all its columns. */
int model__tp_linear(struct model *m, const struct linear_args *a);
/* Where rows of so many act are computed that are gathered by rows; then all of them: rank r has rows cut[r] to cut[r + 1]. */
struct tensor model__tp_rows(const struct model *m, struct model_range rows, int64_t width);
int model__tp_gather_rows(struct model *m, const int64_t *cut, int64_t width);
/* ---- and their experts (parallel/expert_parallel.c) ---- */
struct model_range model__ep_experts(int64_t n, int rank, int size); /* of n, those that a rank has */
/* A rank's part of the group g of whole: measure (m NULL), then bind that of the split model m. Adapters: its own copy has all. */
void model__ep_layout(struct model *whole, const struct model_group *g, int rank, int size, struct model *m, struct arena *a);
struct model_group model__ep_part(const struct model_group *g, int rank, int size); /* places: those of g */
struct lora_group model__ep_lora(const struct model *whole, const struct lora_group *all, int rank, int size);
int model__ep_take(struct model *m, const struct model_group *from, const struct model_group *to); /* its weights */
/* The slots of a pass, sorted by expert, that ranks compute. */
struct model_ep {
    int64_t cut[DEV_MOST_COLUMNS + 1]; /* rank r has rows cut[r] to cut[r + 1] */
    struct model_range rows;           /* this rank's */
    struct tensor offset;              /* of its experts, from its first row on */
};
/* offset: dev_expert_sort's of all experts, which is overwritten. */
int model__ep_begin(struct model *m, struct tensor offset, struct model_ep *p);
/* Where outputs (n, h) act of these rows are computed, and after the gather are read; until the next gather. */
struct tensor model__ep_outputs(const struct model *m, struct model_range rows);
int model__ep_gather(struct model *m, const struct model_ep *p);

/* ---- what a layer's experts compute of rows that are sorted by them (experts.c) ---- */
struct model_experts {
    const struct model_group *gate_up, *down; /* all, or those that a rank has */
};
struct model_expert_rows {
    struct tensor x, gate_up, mlp, y, offset; /* y may be x */
};
int model__experts_mlp(struct model *m, bool no_adapter, const struct model_experts *e, const struct model_expert_rows *r);
/* The same up to the second matrix, with its adapter; the gradient of the activation. */
int model__experts_inner(struct model *m, const struct model_group *g, struct tensor x, struct tensor gate_up, struct tensor mlp,
                         struct tensor offset);
int model__experts_gate_bwd(struct model *m, struct tensor dgate_up, struct tensor dmlp, struct tensor gate_up);

/* ---- experts on their ranks (parallel/expert_dispatch.c): layers of model__dispatches ---- */
void model__dispatch_free(struct model_dispatch *d); /* NULL ok */
/* y (P, h): the outputs of rows xn (T, h) in the order of token (P), by the experts of offset; zeros: this rank has no rows. */
struct dispatch_forward {
    struct tensor xn, token, offset, y;
    bool no_adapter;
};
int model__dispatch_forward(struct model *m, int64_t l, const struct dispatch_forward *home);
/* dx (P, h) from dy (P, h); gradients of matrices go to the ranks that have them. */
struct dispatch_backward {
    struct tensor xn, token, offset, dy, dx;
};
int model__dispatch_backward(struct model *m, int64_t l, const struct dispatch_backward *home, const struct model_grad_sink *sink);

/* ---- activations ---- */
/* Claims a buffer: measure, then bind (base/arena.h). */
static inline struct tensor model__take2(struct arena *m, enum dtype dt, int64_t r, int64_t c) {
    return tensor_2d(arena_take(m, SIZE_OF(r, c, (int64_t)dtype_size(dt))), dt, r, c);
}
static inline struct tensor model__take1(struct arena *m, enum dtype dt, int64_t n) {
    return tensor_1d(arena_take(m, SIZE_OF(n, (int64_t)dtype_size(dt))), dt, n);
}

/* What a layer with experts computes in the place of gate_up and mlp; E experts of width f, k of a token, P = T k rows. */
struct model_expert_stage {
    struct tensor logits;  /* (T, E) act or f32, router */
    struct tensor expert;  /* (T, k) i32 */
    struct tensor weight;  /* (T, k) act or f32 */
    struct tensor offset;  /* (parts, E + 1) i32   rows by expert: dev_expert_sort; inference: one */
    struct tensor token;   /* (P) i32 */
    struct tensor row;     /* (T, k) i32 */
    struct tensor gate_up; /* (P, 2f) act */
    struct tensor mlp;     /* (P, f) act */
    struct tensor y;       /* (P, h) act       experts' outputs; in inference the memory of their inputs */
};

/* What the expert that all tokens have computes; absent without one. */
struct model_shared_stage {
    struct tensor gate_up; /* (T, 2f) act */
    struct tensor mlp;     /* (T, f) act */
    struct tensor y;       /* (T, h) act */
    struct tensor gate;    /* (T, 1) act   what y is multiplied by the sigmoid of; absent without */
};
/* What a gated delta net computes in the place of qkv to att; C channels of its convolution, N = Hv heads of Dv. */
struct model_delta_stage {
    struct tensor in;     /* (T, C + Hv Dv + 2 Hv) act   of the matrix: q, k and v, to be convolved; z, the norm's gate; b; a */
    struct tensor u;      /* (T, C) act         convolved */
    struct tensor o;      /* (T, Hv Dv) act     of the delta rule */
    struct tensor y;      /* (T, Hv Dv) act     normalised, gated */
    struct tensor rstd;   /* (T Hv) f32         absent unless keep.train, as are states and e */
    struct tensor states; /* (T / DEV_DELTA_CHUNK + 1, Hv, Dk, Dv) f32 */
    struct tensor e;      /* (T, Hv Dv) f32 */
    /* with a context, in the place of in: of all rows and a rank's heads, as u, states and e are; z of own rows */
    struct tensor qkv, ba, z;
};
/* Of attention with an output gate; absent without. */
struct model_gate_stage {
    struct tensor gate; /* (T, Hq D) act */
    struct tensor att;  /* (T, Hq D) act     attention's own output; absent unless keep.train: the stage's att has it then */
};

/* Latent attention, in the place of what makes q, K and V; absent without. */
struct model_mla_stage {
    struct tensor qa, qa_rstd; /* (T, rq) f32, (T) f32   latent of queries; 1/rms, absent unless keep.train */
    struct tensor qan;         /* (T, rq) act */
    struct tensor q;           /* (T, Hq (nope + rope)) act */
    struct tensor latent;      /* (T, r + rope) f32      of K and V, and what RoPE turns of keys */
    struct tensor c, c_rstd;   /* (T, r) f32, (T) f32    the first part */
    struct tensor cn;          /* (T, r) act */
    struct tensor y;           /* (T, Hq v) act          what attention gives */
};

/* What one layer computes over T <= max_rows rows. */
struct model_stage {
    struct tensor xn1;         /* (T, h) act       attention's normalised input */
    struct tensor rstd1;       /* (T) f32          its 1/rms; absent unless keep.train, as are rstd2 and lse */
    struct tensor qkv;         /* (T, (Hq+2Hk) D) act    absent with latent attention */
    struct tensor raw;         /* (T, (Hq+2Hk) D) act   qkv before norms of rows, or after RoPE; absent without */
    struct tensor qk_rstd;     /* (T, 2), (T, Hq+Hk) f32   their 1/rms; absent unless keep.train */
    struct tensor q;           /* (T, Hq D) act    rotated queries */
    struct kv kv;              /* (1, Hk, max_rows, D) act; with latent attention v is k */
    struct tensor att;         /* (T, Hq D) act */
    struct tensor lse;         /* (T, Hq) f32 */
    struct tensor context_att; /* (A, q D) act   with a context: attention's own output; q, kv and lse are of all A rows
                                  then, and of a rank's q and kv heads; absent without, and with latent attention, where kv alone
                                  is of all rows */
    struct tensor x_mid;       /* (T, h) f32       residual after attention */
    struct tensor xn2;         /* (T, h) act */
    struct tensor rstd2;       /* (T) f32 */
    struct tensor gate_up;     /* (T, 2f) act */
    struct tensor mlp;         /* (T, f) act       silu(gate) * up */
    struct model_expert_stage experts;
    struct model_shared_stage shared;
    struct model_mla_stage mla;
    struct model_delta_stage delta;
    struct model_gate_stage gate;
    /* what a norm reads before it is added to the residual stream, and its 1/rms; absent without that norm */
    struct tensor att_out, mlp_out;           /* (T, h) f32 */
    struct tensor att_out_rstd, mlp_out_rstd; /* (T) f32; absent unless keep.train */
};

/* An MTP layer's input and its gradient; R = max_rows. Absent in a model without. */
struct model_mtp_acts {
    struct tensor hidden;               /* (R, h) act         states that it reads */
    struct tensor in;                   /* (2R, h) f32        the same, from row R on embeddings; in inference (R, h) */
    struct tensor normed;               /* (2R, h) act        norms of both */
    struct tensor joined;               /* (R, 2h) act        both in a row */
    struct tensor pair;                 /* (2R) i32           rows of normed in the order of joined as (2R, h) */
    struct tensor logp, lse;            /* (R) f32, of its head */
    struct tensor hidden_rstd, in_rstd; /* (R), (2R) f32, training: 1/rms of the final norm's input and of in */
    struct tensor djoined;              /* (R, 2h) act, backward */
    struct tensor unpair;               /* (2R) i32: the other way round */
    struct tensor dnormed;              /* (2R, h) act */
    struct tensor din;                  /* (2R, h) f32 */
    struct tensor rows, ids;            /* (2R, h) f32, (2R) i32: what the embedding's gradient is made of, with the model's rows */
    int32_t *host;                      /* (4R): pair, unpair */
    bool live;                          /* the backward pass under way has a loss here */
};

struct model_acts {
    struct dev *dev;
    struct model_keep keep;                /* counts within n_layers - 1 */
    int64_t max_rows, n_layers, head_rows; /* max_rows: of this rank */
    int64_t all_rows;                      /* of a micro-batch */
    void *owned;                           /* NULL when the caller gave the block */
    size_t bytes;
    struct tensor *x; /* (model_layer_places + 1) of (T, h) f32: the residual stream entering each layer
                              and leaving the last; one and the same buffer unless keep.train */
    struct model_stage
        *stages; /* (model_layer_places); what keep says layer by layer is its own, the rest one and the same buffers */
    /* the head: forward R <= head_rows rows at a time, N = head_rows; backward all rows, N = max_rows, so that each gradient
     * is one sum, and what is R rows long block by block */
    struct {
        struct tensor x;                     /* (R, h) f32 gathered rows */
        struct tensor xn;                    /* (N, h) act */
        struct tensor row, target;           /* (N) i32 */
        struct tensor inv_temp;              /* (N) f32 */
        struct tensor logp, entropy, lse;    /* (max_rows) f32: kept for backward */
        struct tensor sum_pi_sq;             /* (max_rows) f32 */
        struct tensor rstd, dlogp, dentropy; /* (N) f32, backward */
        struct tensor dvalue;                /* (N, 1) act, backward of a value head */
        struct tensor dx;                    /* (R, h) f32, backward */
        struct tensor dnorm;                 /* (h) f32, backward: of the norm's weight */
        struct tensor kept;                  /* (K, C) f32: lmhead_args.kept; absent: none */
    } head;
    struct tensor joint; /* (T, (2 Hq + 2 Hk) D) act   with gates: what the matrix gives, and its gradient */
    /* backward: gradients of the buffers of the same name */
    struct tensor dx;       /* (T, h) f32       of the residual stream, in place from layer to layer */
    struct tensor dx_act;   /* (T, h) act       dx rounded for the matmuls; dx itself when act is f32 */
    struct tensor dxn;      /* (T, h) act       of a norm's output */
    struct tensor dout;     /* (T, h) f32       of att_out, mlp_out; absent without their norms */
    struct tensor dmlp;     /* (T, f) act */
    struct tensor dgate_up; /* (T, 2f) act */
    struct {
        struct tensor x;        /* (P, h) act   experts' inputs, in forward too; then their gradient */
        struct tensor dmlp;     /* (P, f) act */
        struct tensor dgate_up; /* (P, 2f) act */
        struct tensor dweight;  /* (T, k) f32 */
        struct tensor dlogits;  /* (T, E) act */
        struct tensor dx;       /* (T, h) f32   what comes through the router */
        int n_parts;            /* of the last forward pass' rows */
        /* training: rows by expert of each layer and part, and while `by_scores` those of the largest scores,
         * (n_layers, MODEL_MOST_PARTS, E + 1) i32; while
         * `balanced` the load that the load-balancing loss reads (n_layers, E) f32, that loss and the z-loss (n_layers, T) f32 */
        struct tensor offsets, scored, load, loss, z_loss;
        bool balanced, by_scores;
        float z; /* of model_router_losses */
    } experts;
    struct {
        struct tensor dmlp;     /* (T, f) act */
        struct tensor dgate_up; /* (T, 2f) act */
        struct tensor dgate;    /* (T, 1) act */
    } shared;
    struct {
        struct tensor dqan, dqa; /* (T, rq) act, f32 */
        struct tensor dq;        /* (T, Hq (nope + rope)) act */
        struct tensor dlatent;   /* (T, r + rope) act */
        struct tensor dc, dcn;   /* (T, r) f32, act */
        struct tensor dy;        /* (T, Hq v) act */
        struct tensor dx;        /* (T, h) f32: of the normalised input */
        struct tensor dk, dv;    /* as acts' dk: of a part of the rows, where one rank has several; else absent */
    } mla;
    struct {
        struct tensor joint;         /* as in: what a joint matrix gives, and its gradient; absent without */
        struct tensor in;            /* with a context: what the matrix gives of own rows */
        struct tensor dy, dout;      /* (T, Hv Dv) act */
        struct tensor din;           /* as in */
        struct tensor du;            /* (T, C) act */
        struct tensor dqkv, dba, dz; /* with a context: parts of din, of own rows */
    } delta;
    struct tensor dgate; /* (T, Hq D) act; absent without gates */
    struct model_mtp_acts mtp;
    struct tensor datt;   /* (T, Hq D) act; with a context (A, q D), as context_att */
    struct tensor dq;     /* (T, Hq D) act */
    struct tensor dk, dv; /* (1, Hk, max_rows, D) f32 */
    struct tensor dqkv;   /* (T, (Hq+2Hk) D) act; absent with latent attention */
    /* the last forward and head pass, to refuse a backward that does not follow them */
    int64_t n_rows, n_head;
    bool head_entropy, head_kept; /* head_kept: its logits are in head.kept, as far as there is room */
};

/* The first n rows of a buffer; absent buffers stay absent. */
static inline struct tensor model__top(struct tensor t, int64_t n) { return t.nd == 0 ? t : tensor_rows(t, 0, n); }
/* Fills stage l from acts->x[l]: x_mid = x + o(attn(norm(x))), then the MLP from x_mid up to silu(gate) * up;
 * acts->x[l + 1] is x_mid plus its down projection.  Used by the forward pass and by the recompute of backward. */
int model__attention_stage(struct model *m, const struct model_batch *b, struct model_acts *a, int64_t l);
int model__mlp_stage(struct model *m, const struct model_batch *b, struct model_acts *a, int64_t l);
/* Then acts->x[l + 1]. Recomputed as well where a norm follows the down projection. */
int model__mlp_output(struct model *m, const struct model_batch *b, struct model_acts *a, int64_t l);
/* ---- gated delta nets, and attention's output gate (delta_net.c) ---- */
/* Their buffers: of a stage, of all layers, of backward. Nothing in a model without. */
void model__delta_layout(struct model_delta_stage *s, const struct model_acts *a, struct arena *m, const struct model_config *c,
                         enum dtype act);
void model__gate_layout(struct model_gate_stage *s, struct arena *m, const struct model_config *c, enum dtype act, int64_t rows,
                        bool train);
void model__hybrid_layout(struct model_acts *a, struct arena *m, const struct model_config *c, enum dtype act);
void model__hybrid_backward_layout(struct model_acts *a, struct arena *m, const struct model_config *c, enum dtype act);
/* From xn1 to delta.y; from the gradient of what the layer's last matrix gives to that of what its first one gives, in
 * a->delta.joint where there is one, else in din. */
int model__delta_forward(struct model *m, const struct model_batch *b, struct model_acts *a, int64_t l);
int model__delta_backward(struct model *m, const struct model_batch *b, struct model_acts *a, int64_t l, struct tensor dy,
                          const struct model_grads *g);
struct gate_split_args model__gate_args(const struct model *m, struct tensor joint, struct tensor rest, struct tensor gate);
/* ---- latent attention (mla.c) ---- */
void model__mla_layout(struct model_mla_stage *s, struct arena *m, const struct model_config *c, enum dtype act, int64_t rows,
                       bool train);
void model__mla_backward_layout(struct model_acts *a, struct arena *m, const struct model_config *c, enum dtype act);
/* From xn1 to mla.y; backward, from dy (T, h) act to a->mla.dx. */
int model__mla_forward(struct model *m, const struct model_batch *b, struct model_acts *a, int64_t l);
int model__mla_backward(struct model *m, const struct model_batch *b, struct model_acts *a, int64_t l, struct tensor dy,
                        const struct model_grads *g);
/* ---- the linear layers of experts (expert_linear.c): rows by expert, as dev_expert_sort gives them in offset ---- */
/* y (P, n) act = x (P, k) act W_e^T and, unless base, what the adapters of expert e add. */
int model__expert_linear(struct model *m, const struct model_group *g, struct tensor y, struct tensor x, struct tensor offset,
                         bool base);
/* dx (P, k) act, which may be x; gradients of adapters are added. */
struct expert_linear_bwd_args {
    const struct model_group *group;
    struct tensor dx, dy, x, offset;
    const struct model_grads *grads;
};
int model__expert_linear_bwd(struct model *m, const struct expert_linear_bwd_args *a);
/* Of a group's matrices, each part's own rectangle of the sums in model_lora's mat_a and mat_b; outside of those of mat_b are cross
 * terms of different modules. */
int model__add_adapter_grads(struct model *m, const struct lora_group *g, const struct model_grads *grads);
/* ---- layers with experts (experts.c) ---- */
/* Their buffers: of all layers, of a stage, of backward. Nothing in a model without. */
void model__experts_layout(struct model_acts *a, struct arena *m, const struct model_config *c, enum dtype act);
void model__experts_stage_layout(struct model_expert_stage *e, const struct model_acts *a, struct arena *m,
                                 const struct model_config *c, enum dtype act);
void model__experts_backward_layout(struct model_acts *a, struct arena *m, const struct model_config *c, enum dtype act);
/* From xn2 to the experts' outputs; then acts->x[l + 1]; backward, from dy (T, h) act of what they add to acts->dxn. */
int model__experts_stage(struct model *m, const struct model_batch *b, struct model_acts *a, int64_t l);
int model__experts_output(struct model *m, const struct model_batch *b, struct model_acts *a, int64_t l);
int model__experts_backward(struct model *m, struct model_acts *a, int64_t l, struct tensor dy, const struct model_grads *g);
/* The gradient of a matrix of MODEL_ROUTER from that of what it gives; of one that is not trained zeros. */
int model__router_dw(struct model *m, const struct model_grads *g, const struct model_group *router, struct tensor dlogits,
                     struct tensor xn);
/* ---- their shared expert (shared_expert.c); nothing in a layer without ---- */
void model__shared_stage_layout(struct model_shared_stage *s, struct arena *m, const struct model_config *c, enum dtype act,
                                int64_t rows);
void model__shared_backward_layout(struct model_acts *a, struct arena *m, const struct model_config *c, enum dtype act);
/* From xn2 to its output; then acts->x[l + 1] += that; backward, from dy (T, h) act of what it adds to dx (T, h) f32. */
int model__shared_stage(struct model *m, const struct model_batch *b, struct model_acts *a, int64_t l);
int model__shared_output(struct model *m, const struct model_batch *b, struct model_acts *a, int64_t l);
int model__shared_backward(struct model *m, struct model_acts *a, int64_t l, struct tensor dy, struct tensor dx,
                           const struct model_grads *g);
/* out (T, h) = norm of x, the residual stream; from: norm of what is added to it, out f32 = from + that. rstd may be absent. */
int model__norm(struct model *m, struct tensor out, struct tensor rstd, struct tensor x, struct tensor w, struct tensor from);
/* Arguments of the two attention ops of layer l, for forward and backward alike. */
void model__attn_args(const struct model *m, const struct model_batch *b, const struct model_acts *a, int64_t l,
                      struct qkv_args *qkv, struct attn_args *attn);
/* Attention's own output of own rows, before an output gate. */
static inline struct tensor model__att_rows(const struct model_stage *s, int64_t n) {
    return tensor_rows(s->gate.att.nd ? s->gate.att : s->att, 0, n);
}
/* dev_rmsnorm_bwd, a part of the rows after the other. */
int model__norm_backward(struct model *m, const struct model_grads *g, const struct model_group *w,
                         const struct rmsnorm_bwd_args *all);
/* ---- rows over ranks (parallel/context_parallel.c): b->context ---- */
/* Completes model__attn_args: qkv's q, K and V go where they are exchanged, attention has all rows of this rank's heads. */
void model__context_args(const struct model_batch *b, const struct model_stage *s, struct qkv_args *qkv, struct attn_args *attn);
/* Latent attention: each rank has its rows of it, and of what they all read, which is the keys of one head, all rows. Forward:
 * the keys go from where model__context_args has them to attn. Backward, from datt of own rows: dq, and dk and dv of own keys. Each
 * part's dk and dv of all keys are a summand, in the order of parts. */
int model__context_latent_fwd(const struct model_batch *b, const struct attn_args *attn);
int model__context_latent_bwd(const struct model_batch *b, const struct attn_args *attn, struct tensor datt,
                              const struct qkv_bwd_args *out);
/* Attention's backward of the rows of part i: dq (T, Hq D) of all rows here; dk, dv: of all keys, zeros where the part sees none.
 * Without a context too. */
int model__latent_part_bwd(const struct model *m, const struct model_batch *b, int i, const struct attn_args *attn,
                           struct tensor datt, const struct qkv_bwd_args *out);
/* After dev_qkv_fwd: attention, with sinks (NULL: none); att (T, Hq D): of own rows. */
int model__context_attn_fwd(const struct model_batch *b, const struct attn_args *attn, const struct model_group *sinks,
                            struct tensor att);
/* Where the gradient (T, Hq D) of att goes before model__context_attn_bwd, which sets out's dq, dk and dv of own rows, dk and dv
 * (1, Hk, T, D). room: for all rows of this rank's heads. Of sinks (NULL: none) a rank adds its heads' gradients to dsinks. */
struct tensor model__context_datt(const struct model_batch *b);
struct context_bwd_args {
    const struct attn_args *attn;
    const struct model_group *sinks;
    struct tensor dsinks, room;
    const struct qkv_bwd_args *out;
};
int model__context_attn_bwd(const struct model_batch *b, const struct context_bwd_args *a);
/* Of a gated delta net: from what its matrix gives of own rows q, k and v, and b and a to where they go before
 * model__context_delta_fwd, which gives o (T Hv, Dv), what the delta rule gives, of own rows; and z. */
int model__context_delta_rows(const struct model_batch *b, struct tensor in, struct tensor z);
/* The ops' arguments of own heads and all rows. */
void model__context_delta_args(const struct model_batch *b, const struct model_delta_stage *s, struct causal_conv_args *conv,
                               struct delta_args *rule);
int model__context_delta_fwd(const struct model_batch *b, const struct causal_conv_args *of, const struct delta_args *r,
                             struct tensor o);
/* Where the gradient (T, Hv Dv) of o goes before model__context_delta_bwd, which sets dqkv and dba of own rows, and adds to the
 * gradients of all heads what is of own ones. */
struct tensor model__context_delta_dout(const struct model_batch *b);
struct context_delta_bwd_args {
    const struct causal_conv_args *conv;
    const struct delta_args *rule;
    struct tensor dout, du;                /* room for all rows of own heads */
    struct tensor dtaps, da_log, ddt_bias; /* f32 */
    struct tensor dqkv, dba;               /* the results */
};
int model__context_delta_bwd(const struct model_batch *b, const struct context_delta_bwd_args *a);
/* Gathers the rows of the token embedding's gradient: those of all ranks on the last one, none on others. */
int model__context_rows(const struct model_batch *b, struct tensor *ids, struct tensor *dx);
/* Norms of rows of queries and keys of layer l. */
struct qk_norm_args model__qk_norm_args(const struct model *m, const struct model_stage *s, int64_t l, int64_t n);
/* RoPE and norms after it, likewise. */
struct rope_norm_args model__rope_norm_args(const struct model *m, const struct model_batch *b, const struct model_stage *s,
                                            int64_t l);
/* Backward from the gradient of the last residual stream (a->dx) through all layers and the embedding. */
int model__body_backward(struct model *m, const struct model_batch *b, struct model_acts *a, struct model_grads *g);
/* Rows [lo, lo + n) of l: gathered, normalised into head.xn; with 1/rms for backward. */
int model__head_input(struct model *m, struct model_acts *a, const struct model_logp_args *l, int64_t lo, int64_t n);
/* The same of the n rows in head.row. */
int model__head_norm(struct model *m, struct model_acts *a, int64_t n);
/* Its arguments, of rows [lo, lo + n) of l, to the device. */
int model__head_copy(struct model *m, struct model_acts *a, const struct model_logp_args *l, int64_t lo, int64_t n);
/* out: norm with weight w of rows idx (R) of the residual stream x (T, h), by way of head.x; rstd may be absent. */
struct norm_rows {
    struct tensor x, w, idx, out, rstd;
};
int model__norm_rows(struct model *m, struct model_acts *a, const struct norm_rows *r);
/* ERR_INVAL: a row or a token that is not there. */
int model__check_logp(const struct model *m, const struct model_acts *a, const struct model_logp_args *l);
/* Layer l from its stage on: a->dx is the gradient of a->x[l + 1], then of a->x[l]. */
int model__layer_backward(struct model *m, const struct model_batch *b, struct model_acts *a, int64_t l,
                          const struct model_grads *g);
/* dx_all (T, h) and dw += what comes through the norm, weight w, of rows idx (R) of x; its output has the gradient dy (R, h). */
struct norm_rows_backward {
    struct tensor x, w, idx, rstd, dy, dx_all, dw;
};
int model__norm_rows_backward(struct model *m, struct model_acts *a, const struct norm_rows_backward *r);

/* ---- the MTP layer (mtp.c); nothing in a model without ---- */
void model__mtp_layout(struct model_acts *a, struct arena *m, const struct model_config *c, enum dtype act);
void model__mtp_free(struct model_acts *a);
/* Its part of model_backward, before the head's: a->mtp.din, and a bucket of its own. */
int model__mtp_backward(struct model *m, struct model_acts *a, const struct model_backward_args *args, struct model_grads *g);
/* Of what that left for the final norm of these rows: onto a->dx and dnorm. */
int model__mtp_norm_backward(struct model *m, struct model_acts *a, struct model_range rows, struct tensor dnorm);
/* ids (2T), rows (2T, h): the model's T and the MTP layer's, for one sum. */
int model__mtp_rows(struct model *m, struct model_acts *a, struct tensor *ids, struct tensor *rows);
/* Backward of the final norm of the rows in head.row, row of the host, from dxn, the gradient of head.xn: a->dx = theirs, zeros
 * elsewhere; a bucket of its own. */
int model__head_norm_backward(struct model *m, struct model_acts *a, const int32_t *row, struct tensor dxn, struct model_grads *g);
/* Arguments of the head ops on these rows; logp, lse and entropy at their kept places. */
struct lmhead_args model__head_args(const struct model *m, const struct model_acts *a, int64_t lo, int64_t n, bool entropy);

/* The lists of rows [lo, lo + n) as arguments of the head ops, given ids on the device. */
int model__list_input(struct model *m, const struct model_list *list, int64_t lo, int64_t n, struct lmhead_args *h);

#endif
