/* lora_int.h - private to model: an adapter on a model, its compute copies, matching by peft's rules, merging. */
#ifndef VERLC_MODEL_LORA_INT_H
#define VERLC_MODEL_LORA_INT_H

#include "model/lora/lora.h"
#include "model/model_int.h"

struct lora_part { /* the adapter of one linear module: rows [row, row + n) of its group */
    int64_t row, n;
    int64_t a, b; /* elements into the adapter's flat master: A (rank, k), then B (n, rank) */
};
struct lora_group {                         /* adapters of one group side by side: part i owns `rank` of `width` from i * rank on */
    struct lora_part part[MODEL_MAX_PARTS]; /* of experts: of the first one; those of expert e are e * stride elements further */
    int64_t n_parts, n, k;
    int64_t count, stride; /* of experts: how many there are; else 1, 0 */
    int64_t width;         /* n_parts * rank, rounded up for the matrix units; the rest is zeros */
    struct weight a, b;    /* (width, k): the A on top of each other; (n, width): scale B, block-diagonal; of experts the first of
                              `count` of them */
};
struct model_lora {
    struct lora_config cfg;
    float scale;
    struct lora_group *groups;
    int64_t n_groups;
    struct model_param *params; /* peft's names without "base_model.model."; group: of the base model */
    int64_t n_params, n_elems;
    char base_hash[33]; /* of the base model, in the files (lora_files.c) */
    int64_t n_sides;    /* of the params: A and B in turn; then a value model's head, weight and bias */
    void *block;        /* compute copies and scratch, on the device; owned */
    size_t block_bytes;
    /* scratch; rows at a time: LORA_ROWS */
    void *z, *dz;         /* (rows, width) act */
    float *wide;          /* (rows, n or k) f32: a sum that is not rounded yet; NULL when act is f32 */
    float *mat_a, *mat_b; /* (count, width, k), (count, n, width): gradients of a group, or what is packed */
    float *vec;           /* gradient of a frozen vector */
    /* with experts: two sums (rows, n or k) f32; (E + 1) i32, the offsets of some rows */
    float *sum[2];
    int32_t *offset;
};
enum { LORA_ROWS = 1024 };
void model__lora_layout(struct model_lora *l, struct model *m, struct arena *a); /* measure, then bind */
int model__lora_attach(struct model *m, const struct lora_config *c);            /* with its memory; master not filled */
int model__lora_hash_base(struct model *m);                                      /* fills base_hash */
/* It is made of bits (caller frees); what these groups, which are on the device, have of them. */
uint16_t *model__base_bits_new(const struct model *m);
int model__base_bits(struct model *m, struct model_range groups, uint16_t *bits);
void model__base_bits_hash(const struct model *m, const uint16_t *bits, char hash[33]);
/* master -> compute copies, of whole groups whose elements are [r.lo, r.hi): flat has these alone */
int model__lora_refresh(struct model *m, struct model_range r, float *flat);
int model__lora_head_start(struct model *m, float *flat); /* a value head as it was loaded, into its range of flat (host) */
void model__lora_free(struct model *m);
/* Whether peft's rules put an adapter on the module; name: "model.layers.0.self_attn.q_proj". */
struct lora_match;
int model__lora_match_create(struct lora_match **out, const struct lora_config *l);
bool model__lora_match(struct lora_match *t, const char *module);
/* A value model's head may be listed among the targets: it takes no adapter, as it is trained in full. */
void model__lora_match_head(struct lora_match *t);
/* ERR_INVAL when nothing, or not every listed name, has matched; names the modules of m. */
int model__lora_match_check(const struct lora_match *t, const struct model *m);
void model__lora_match_free(struct lora_match *t);
/* adapter_config.json of m's adapter. */
json_t *model__lora_json(const struct model *m);
/* The adapter on the host, for merging: w, elements [at, at + n) of parameter p, += scale B A; a head's are replaced. */
struct lora_host {
    const struct model *m;
    float *flat; /* the adapter's master; NULL: no adapter, nothing is added */
};
int model__lora_host_open(struct lora_host *h, const struct model *m);
void model__lora_host_close(struct lora_host *h);
void model__lora_merge(const struct lora_host *h, const struct model_param *p, int64_t at, float *w, int64_t n);

#endif
