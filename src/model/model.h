/* model.h - one decoder for Llama 3.x, Qwen2/2.5, Qwen3 and Mistral.
 *
 * Invariant: model_forward is the only forward pass in the program.  Prefill,
 * decode, log-prob passes and training call it; they differ in where keys and
 * values live and in what is kept for backward, never in arithmetic. */
#ifndef VERLC_MODEL_H
#define VERLC_MODEL_H

#include "base/arena.h"
#include "dev/dev.h"

#include <jansson.h>
#include <stdbool.h>
#include <stdint.h>

/* ---- config.json ---- */
enum model_arch { MODEL_LLAMA, MODEL_QWEN2, MODEL_QWEN3, MODEL_MISTRAL };
enum rope_kind { ROPE_DEFAULT, ROPE_LINEAR, ROPE_DYNAMIC, ROPE_LLAMA3, ROPE_YARN };

struct model_config {
    enum model_arch arch;
    int64_t n_layers, hidden, ffn, n_q_heads, n_kv_heads, head_dim, vocab;
    int64_t max_pos;        /* max_position_embeddings */
    int64_t window;         /* sliding window, 0: none */
    int64_t window_from;    /* layers >= this use it (Qwen2 max_window_layers; 0 for Mistral) */
    bool tied;              /* lm_head shares embed_tokens */
    bool value, value_bias; /* a value head (score.weight, score.bias) in the place of lm_head */
    bool qkv_bias, qk_norm; /* Qwen2, attention_bias; Qwen3 */
    bool o_bias, mlp_bias;  /* attention_bias of Llama and Qwen3; Llama mlp_bias */
    float rms_eps;
    double init_range; /* initializer_range */
    struct {
        enum rope_kind kind;
        double theta, factor;
        double low_freq_factor, high_freq_factor;      /* llama3 */
        double attention_factor, beta_fast, beta_slow; /* yarn; attention_factor 0: computed */
        double mscale, mscale_all_dim;                 /* yarn, optional (0: absent) */
        bool truncate;                                 /* yarn: round the correction range */
        int64_t original_max_pos;
    } rope;
    bool saved_nf4;   /* quantization_config: matrices of the layers are bitsandbytes' NF4 in the files */
    enum dtype dtype; /* torch_dtype / dtype of the source: DT_F32, DT_BF16, DT_F16 */
    int64_t eos[16];  /* end tokens: generation_config.json, else config.json */
    int n_eos;
    int64_t bos, pad;        /* -1: none */
    json_t *json;            /* config.json as read, for export; owned */
    json_t *generation_json; /* generation_config.json or NULL; owned */
};
/* Reads dir/config.json (transformers 4 and 5 spellings) and generation_config.json.
 * ERR_INPUT: directory or file missing. ERR_UNSUPPORTED: names the architecture or feature. */
int model_config_load(struct model_config *c, const char *dir);
int model_config_from_json(struct model_config *c, const json_t *config, const char *where);
void model_config_free(struct model_config *c);
/* The same model as a critic: Hugging Face's ForTokenClassification with one label. The head has
 * a bias unless config.json says token_classification_bias=false. */
void model_config_make_value(struct model_config *c);
/* The same model as a reward model: ForSequenceClassification with one label, whose head has no bias. ERR_UNSUPPORTED:
 * config.json names another head, or more labels; `where` names the directory. */
int model_config_make_reward(struct model_config *c, const char *where);
/* Which of a sequence's rows has the score: the last that is not config.json's pad token (transformers' rule). */
int64_t model_reward_row(const struct model_config *c, const int32_t *ids, int64_t n);
int64_t model_config_params(const struct model_config *c);                               /* number of parameters */
double model_config_flops(const struct model_config *c, const int64_t *lens, int64_t n); /* verl 4.5: 6N.tokens + attention */
/* cos and sin of positions [0, n_pos): out (n_pos, head_dim/2, 2) f32, host. max_len: longest
 * sequence of the run (dynamic NTK is fixed from it). */
void model_rope_table(const struct model_config *c, int64_t n_pos, int64_t max_len, float *out);

/* ---- parameters ---- */
/* One Hugging Face tensor. */
struct model_param {
    char name[96];      /* "model.layers.0.self_attn.q_proj.weight" */
    int64_t rows, cols; /* cols == 1, nd == 1 for vectors */
    int nd;
    int64_t offset;    /* elements into the flat master, gradient and moments */
    int64_t group;     /* index into model.groups */
    enum dtype src_dt; /* dtype in the file it came from; export keeps it */
};

/* One tensor of the forward pass: a matrix or a vector, made of one or more
 * parameters (q, k, v; gate, up) that are neighbours in the flat master, so
 * that each Hugging Face tensor is a range of its rows. */
struct model_group {
    int64_t offset;    /* elements into the flat master */
    int64_t n, k;      /* matrix (n, k); k == 0: vector of n */
    struct weight mat; /* compute copy of a matrix */
    struct tensor vec; /* compute copy of a vector, act */
    int64_t first_param, n_params;
    struct lora_group *lora; /* adapters on its modules, NULL: none; private to model */
    bool linear;             /* a matrix of a layer: what is quantised in a quantised model, whose mat is empty */
};

struct model_layer { /* NULL: this model has none */
    struct model_group *attn_norm, *qkv, *qkv_bias, *q_norm, *k_norm, *o, *o_bias;
    struct model_group *mlp_norm, *gate_up, *gate_up_bias, *down, *down_bias;
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
    struct model_layer *layers;
    struct model_group *g_embed, *g_head, *g_norm; /* g_head == g_embed when tied; the score of a value model */
    struct model_group *g_head_bias;               /* score.bias, or NULL */
    /* compute copy, on the device */
    struct weight embed, head; /* head.data == embed.data when tied */
    struct tensor final_norm;
    struct tensor rope;          /* (rope_len, D/2, 2) f32; rope_len is model_open_args.max_len */
    void *weights;               /* the one block behind all groups */
    struct tensor flat;          /* (n_elems) act: that block as one array in the master's order; absent where it is not one */
    int flags;                   /* model_load_flags it was opened with */
    const struct model *base;    /* whose weights it reads below its head; NULL: its own */
    struct model_stream *stream; /* how weights come from host memory; NULL: they are on the device; private to model */
    size_t weights_bytes;
    /* fp32 master, flat (n_train) f32, on the device or with MODEL_HOST_MASTER in host memory; NULL in inference-only models */
    float *master;
    /* what is trained: the parameters above, or with an adapter its matrices and nothing else */
    const struct model_param *train_params;
    int64_t n_train_params, n_train; /* entries; elements of master, gradients, moments */
    struct model_lora *lora;         /* NULL: no adapter; private to model */
    struct model_quant *quant;       /* NULL: not quantised; private to model */
};

enum model_load_flags {
    MODEL_INFER = 0,        /* compute copy only */
    MODEL_TRAIN = 1,        /* and the fp32 master */
    MODEL_HOST_MASTER = 2,  /* the master of what is trained (an adapter's too) is in host memory */
    MODEL_HOST_WEIGHTS = 4, /* the compute copy is: for forward passes by model_stream_bind; not with MODEL_TRAIN */
    MODEL_SHARED_BASE = 8,  /* a value model's compute copy below its head is that of model_open_args.base */
};
struct model_open_args {
    const char *dir; /* Hugging Face directory */
    enum dtype act;  /* DT_F32 or DT_BF16 */
    int flags;
    int64_t max_len;          /* longest sequence of the run: sizes the rope table */
    enum quant_kind quant;    /* matrices of the layers in 4 or 8 bits, quantised as they are read; MODEL_INFER alone.
                              A directory that is saved so (saved_nf4) opens as QUANT_NF4 only, with the codes it has */
    const struct model *base; /* with MODEL_SHARED_BASE: a frozen model of the same directory, act and quant, on the same
                                 device; borrowed, and closed after this one */
};
/* "nf4", "int8"; NULL and "none": QUANT_NONE. */
int model_quant_parse(const char *name, enum quant_kind *out);
/* What a load does to a matrix (rows, cols): code and scale as struct dequant_args has them, host. */
void model_quantize(enum quant_kind kind, const float *w, int64_t rows, int64_t cols, uint8_t *code, float *scale);
/* Validates every tensor (name, shape, dtype, finiteness of values) before use.
 * ERR_INPUT, ERR_FORMAT (file and tensor named), ERR_UNSUPPORTED, ERR_NOMEM. */
int model_open(struct model **out, struct dev *dev, const struct model_open_args *a);
/* The same directory as a critic (model_config_make_value): lm_head is not read; a head that the files lack is
 * new, drawn as transformers does (normal with initializer_range, bias 0), a pure function of head_seed. */
int model_open_value(struct model **out, struct dev *dev, const struct model_open_args *a, uint64_t head_seed);
/* The same directory as a reward model (model_config_make_reward): its head must be there. */
int model_open_reward(struct model **out, struct dev *dev, const struct model_open_args *a);
void model_close(struct model *m); /* NULL ok */
/* Device bytes that model_open keeps for these settings (compute copy, rope table, master); dir is not read.
 * For a critic c has gone through model_config_make_value. */
size_t model_open_bytes(const struct model_config *c, struct dev *dev, const struct model_open_args *a);
/* master -> compute copy, after a load of the master. */
int model_refresh(struct model *m);
/* The same from another flat array (n_train) f32 on the device: a copy of a master in host memory. */
int model_refresh_from(struct model *m, float *flat);

/* Weights that rest in host memory (MODEL_HOST_WEIGHTS) come to the device layer by layer in each forward, through
 * a block of this size: two layers, the final norm and the head. */
size_t model_stream_bytes(const struct model_config *c, struct dev *dev, enum dtype act);
void model_stream_bind(struct model *m, void *block); /* once; forwards alone from then on. block may be shared between passes */
void model_stream_begin(struct model *m); /* of a pass: others may have used the block. Weights on the device: nothing */
/* Copies the whole state of another model of the same shape (the reference policy). */
int model_copy_weights(struct model *dst, const struct model *src);

/* ---- forward ---- */
/* Keys and values of all layers. */
struct model_kv {
    struct kv *layers; /* (n_layers) */
};

struct model_batch { /* T packed rows; arrays on the device */
    int64_t n_rows;
    struct tensor ids;   /* (T) i32 */
    struct tensor pos;   /* (T) i32, position in its sequence */
    struct tensor slots; /* (T) i32, key/value slot of the row; kv == NULL: row index */
    struct attn_seqs seqs;
    const struct model_kv *kv; /* NULL: keys and values live in the activations (one page of max_rows) */
    bool no_adapter;           /* the base model alone: the reference of an adapter's training */
    bool own_keys;             /* one row a sequence, whose key no other sequence of the batch sees (dev_qkv_attn_fwd) */
};

/* What a training forward keeps of its layers until backward. The rest is computed again there by the same code, so
 * that no bit depends on it. Layers in their order: the first `all` keep everything that backward reads, the next
 * `attention` everything but the MLP's wide buffers, the others their input alone. Counts above the number of layers
 * mean all of them. The last layer's buffers are still there when backward begins, and need no place of their own. */
struct model_keep {
    bool train; /* false: inference, layers share all buffers */
    int64_t all, attention;
};
#define MODEL_KEEP_NONE ((struct model_keep){0})
#define MODEL_KEEP_LAYER ((struct model_keep){.train = true})
#define MODEL_KEEP_ATTENTION ((struct model_keep){.train = true, .attention = INT64_MAX})
#define MODEL_KEEP_ALL ((struct model_keep){.train = true, .all = INT64_MAX})
/* Buffers of one forward (and backward) of at most max_rows rows. */
struct model_acts;
/* Bytes for these limits; model_acts_create takes that much from the device. */
size_t model_acts_bytes(const struct model_config *c, enum dtype act, int64_t max_rows, struct model_keep keep);
/* The most that fits `extra` bytes above those of MODEL_KEEP_LAYER: first the attention of as many layers as it can be
 * (a quarter to a third of a layer's memory, and a larger share of its time the longer the sequences are), then all of them. */
struct model_keep model_keep_fit(const struct model_config *c, enum dtype act, int64_t max_rows, size_t extra);
/* block: model_acts_bytes bytes of device memory, or NULL to allocate (then owned). */
int model_acts_create(struct model_acts **out, const struct model *m, int64_t max_rows, struct model_keep keep, void *block);
void model_acts_destroy(struct model_acts *a);

/* Runs the decoder. The residual stream after the last layer stays in `a`. */
int model_forward(struct model *m, const struct model_batch *b, struct model_acts *a);
/* out (R, h) act: final norm of rows idx (R) i32 of the last model_forward. */
int model_hidden(struct model *m, struct model_acts *a, struct tensor idx, struct tensor out);

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
struct arena;
void model_list_layout(struct model_list *l, int64_t k, int64_t max_rows, struct arena *a);
int model_logp(struct model *m, struct model_acts *a, const struct model_logp_args *l);

/* Values of chosen rows of a model with a value head: value[i] (n) host, of the state after row
 * row[i] of the last forward. n is at most the max_rows of the activations. */
int model_value(struct model *m, struct model_acts *a, const int32_t *row, int64_t n, float *value);

/* ---- backward ---- */
/* After model_forward (keep.train) and model_logp over the same rows: grads (n_train) f32 on the
 * device = d loss / d parameters, given dlogp (n) and dentropy (n, may be NULL; needs l->entropy),
 * host. add: += instead of =; without it grads may hold anything. */
int model_backward(struct model *m, const struct model_batch *b, struct model_acts *a, const struct model_logp_args *l,
                   const float *dlogp, const float *dentropy, float *grads, bool add);

/* The same after model_value over the same distinct rows, given dvalue (n) host. */
int model_value_backward(struct model *m, const struct model_batch *b, struct model_acts *a, const int32_t *row, int64_t n,
                         const float *dvalue, float *grads, bool add);

/* ---- LoRA (Hu et al. 2021), by peft's rules ----
 * An adapted linear layer of n outputs and k inputs computes y = W x + scale B (A x), A (r, k), B (n, r);
 * W and everything else is frozen.  A x is rounded to act; the sum is f32 and rounded once, as without an
 * adapter.  Compute copies: A, and scale B, each rounded to act.  No dropout.
 * On a value model the head is trained beside the adapter, in full: peft's modules_to_save of a TOKEN_CLS adapter. */
struct lora_config {
    int64_t rank;
    double alpha;
    bool rslora;     /* scale = alpha / sqrt(rank) (Kalajdzievski 2023) instead of alpha / rank */
    json_t *targets; /* target_modules: list of names, "all-linear", or one regular expression; owned */
    json_t *exclude; /* exclude_modules: list or regular expression, NULL: none; owned */
    char *base;      /* base_model_name_or_path: what the adapter is for; NULL: not said; owned */
    bool saves_head; /* modules_to_save has the score head: a critic's adapter */
};
/* Reads dir/adapter_config.json. ERR_UNSUPPORTED names what only peft can. Caller: lora_config_free. */
int lora_config_load(struct lora_config *l, const char *dir);
void lora_config_free(struct lora_config *l);
/* Puts a new adapter on an inference-only model: A uniform in +-1/sqrt(k) (peft's Kaiming init), a pure
 * function of seed; B zero; a value head begins as it is.  From then on master, train_params and gradients are the adapter's.
 * ERR_INVAL: a target that no module has; names those there are. */
int model_lora_create(struct model *m, const struct lora_config *l, uint64_t seed);
/* Puts on the adapter of a peft directory; a value head that is not in it stays. ERR_FORMAT, ERR_UNSUPPORTED name
 * file and tensor; ERR_INPUT: an adapter that was made for another base. */
int model_lora_load(struct model *m, const char *dir);
void model_lora_set_base(struct model *m, const char *base); /* after a load: the name it will be written with */
/* Writes a directory that peft loads: adapter_config.json, adapter_model.safetensors (f32). */
int model_lora_export(const struct model *m, const char *dir);
/* What an adapter takes on the device, in bytes. */
struct optim_config;
struct lora_plan {
    size_t weights, master, moments; /* compute copies and scratch; gradients take as much as the master */
    size_t host;                     /* of the moments: what is in host memory instead */
    int64_t n_train;                 /* elements */
};
int model_lora_plan(struct lora_plan *p, const struct model_config *c, struct dev *dev, enum dtype act, const struct lora_config *l,
                    const struct optim_config *o);

/* ---- optimizer ---- */
enum optim_kind {
    OPTIM_ADAMW,  /* torch.optim.AdamW on everything */
    OPTIM_ADAMW8, /* the same with 8-bit moments of matrices (Dettmers et al., 2022) */
    OPTIM_SGD,    /* torch.optim.SGD: momentum, dampening, nesterov; weight decay in the gradient */
    OPTIM_MUON,   /* torch.optim.Muon on the matrices of the layers, AdamW on embedding, head and vectors */
};
/* By a name that verl takes from torch.optim or bitsandbytes.optim; false: no such optimizer. */
bool optim_kind_find(const char *name, enum optim_kind *out);
const char *optim_kind_name(enum optim_kind k);

struct optim_config {
    enum optim_kind kind;
    double lr, beta1, beta2, eps, weight_decay, clip;
    double momentum, dampening;   /* SGD; Muon: momentum */
    bool nesterov;                /* SGD, Muon */
    int64_t ns_steps;             /* Muon: Newton-Schulz iterations */
    bool host_state, host_master; /* state arrays, and what model_open put there: the master, are in host memory */
    bool muon_original_lr;        /* Muon's update times sqrt(max(1, rows / cols)), else 0.2 sqrt(max(rows, cols)), AdamW's size */
    const char *schedule;         /* constant | cosine | linear | wsd */
    int64_t warmup_steps, total_steps;
    double min_lr_ratio, num_cycles, init_lr_ratio;
};
double optim_lr(const struct optim_config *c, int64_t step); /* factor * lr at 0-based step (spec 2.10) */

/* A stretch of the flat master under one rule. State indices count elements of their arrays. */
struct optim_run {
    enum optim_kind rule;
    int64_t offset, n, rows, cols;
    int64_t m_at, v_at; /* f32 state; -1: none */
    int64_t q_at, b_at; /* 8-bit state: codes and blocks; -1: none */
};
/* Optimizer state, on the device, in arrays that are as long as this optimizer needs. */
struct optim {
    enum optim_kind kind;
    struct optim_run *runs; /* in the order of the master, without gaps */
    int64_t n_runs;
    int64_t n_m, n_v, n_q, n_b;
    float *m, *v;             /* (n_m) momentum, (n_v) second moment */
    uint8_t *m_code, *v_code; /* (n_q) */
    float *m_scale, *v_scale; /* (n_b) */
    float *book;              /* (2, 256): code books of m and of v */
    struct optim_scratch {    /* of one matrix, or of a piece of it */
        float *x, *y;         /* f32 */
        void *act, *pack;     /* compute dtype; packed for the products */
        void *gram_act;
        float *gram, *gram2; /* (r, r), r the shorter side */
        size_t pack_bytes;
        float *piece[2][3]; /* AdamW, of what is in host memory: master, m, v on the device, two pieces in turn */
    } s;
    bool host_state, host_master;
    void *host_block; /* the state arrays where they are in host memory; owned */
    size_t host_bytes;
    void *sum;   /* one f64 */
    void *block; /* all of the above; owned */
    size_t block_bytes;
    int64_t step; /* steps taken */
};
/* Device bytes of the state of this optimizer for a model of this shape. *host: bytes in host memory; NULL ok. */
size_t optim_bytes(const struct model_config *m, struct dev *dev, enum dtype act, const struct optim_config *c, size_t *host);
/* c: which optimizer, and its momentum; the rest may change from step to step. All state is zero. */
int optim_create(struct optim **out, struct model *m, const struct optim_config *c);
void optim_destroy(struct optim *o, struct model *m);
/* The arrays that a checkpoint must hold, under their names there ("exp_avg", ...). */
enum { OPTIM_MAX_ARRAYS = 6 };
struct optim_array {
    const char *name;
    enum dtype dt;
    int64_t n;
    void *data; /* device */
};
int optim_arrays(const struct optim *o, struct optim_array out[OPTIM_MAX_ARRAYS]);
struct optim_result {
    double grad_norm;    /* before clipping; not finite: nothing was changed */
    char bad_tensor[96]; /* first tensor with a non-finite gradient, or "" */
};
/* Clips by global norm, updates master and state, refreshes the compute copy. A
 * non-finite norm changes nothing and is reported in r (return is 0). grads is spoiled. */
int optim_step(struct optim *o, struct model *m, float *grads, const struct optim_config *c, double lr, struct optim_result *r);

/* ---- files ---- */
/* Writes a directory that transformers loads as it is: config.json, generation_config.json,
 * model*.safetensors (shards of <= max_shard bytes, 0: 5 GB). dt: DT_F32/DT_BF16, or -1: each
 * tensor's source dtype. Tokenizer files are copied from tokenizer_dir when not NULL. An adapter
 * is merged into the weights: W + scale B A in f32, rounded once. */
int model_export(const struct model *m, const char *dir, int dt, const char *tokenizer_dir, size_t max_shard);
/* Random weights: transformers' init (normal, initializer_range; norms 1, biases 0). Value i of
 * tensor t is a pure function of (seed, t, i). */
int model_init_dir(const json_t *config, const char *dir, uint64_t seed, enum dtype dt);
/* Built-in shapes of `model init --arch`; NULL if unknown. Caller owns. */
json_t *model_arch_config(const char *name);
void model_arch_names(void (*fn)(void *arg, const char *name), void *arg);
/* Copies the tokenizer's files that are in `from` to `to`; ERR_INPUT when there are none. */
int model_copy_tokenizer(const char *from, const char *to);

/* ---- safetensors ---- */
struct st_tensor {
    char *name;
    enum dtype dt;
    int nd;
    int64_t dim[8];
    const uint8_t *data; /* into the mapping */
    size_t bytes;
};
struct st_file;                                      /* one mapped file */
int st_open(struct st_file **out, const char *path); /* validates header and every range; ERR_INPUT, ERR_FORMAT */
void st_close(struct st_file *f);
int64_t st_count(const struct st_file *f);
const struct st_tensor *st_at(const struct st_file *f, int64_t i);
const struct st_tensor *st_find(const struct st_file *f, const char *name); /* NULL if absent */
const char *st_metadata(const struct st_file *f, const char *key);          /* a string of __metadata__, or NULL */
/* Streaming writer: header from the declared tensors, then data in that order. */
struct st_write_tensor {
    const char *name;
    enum dtype dt;
    int nd;
    int64_t dim[8];
    /* fills up to n bytes of this tensor starting at byte off */
    int (*read)(void *arg, size_t off, void *dst, size_t n);
    void *arg;
};
/* Writes path (not atomic itself: ckpt publishes whole directories), fsyncs. metadata may be NULL. */
int st_write(const char *path, const struct st_write_tensor *t, int64_t n, const json_t *metadata);

#endif
