/* lora.h - adapters (LoRA, Hu et al. 2021) by peft's rules: configuration, directories, what they take. */
#ifndef VERLC_MODEL_LORA_H
#define VERLC_MODEL_LORA_H

#include "base/file_writer.h"
#include "model/parameters.h"

#include <jansson.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

/* An adapted linear layer of n outputs and k inputs computes y = W x + scale B (A x), A (r, k), B (n, r);
 * W and everything else is frozen.  A x is rounded to act; the sum is f32 and rounded once, as without an
 * adapter.  Compute copies: A, and scale B, each rounded to act.  No dropout.
 * On a value model the head is trained with the adapter, in full: peft's modules_to_save of a TOKEN_CLS adapter. */
struct lora_config {
    int64_t rank;
    double alpha;
    bool rslora;     /* scale = alpha / sqrt(rank) (Kalajdzievski 2023) instead of alpha / rank */
    json_t *targets; /* target_modules: list of names, "all-linear", or one regular expression; owned */
    json_t *exclude; /* exclude_modules: list or regular expression, NULL: none; owned */
    char *base;      /* base_model_name_or_path: what the adapter is for; NULL: not given; owned */
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
/* Writes a directory that peft loads: adapter_config.json, adapter_model.safetensors (f32). w: of the latter, as safetensors_write
 * has it; may be NULL. */
int model_lora_export(const struct model *m, const char *dir, struct file_writer *w);
/* The memory of the compute copies that training changes: all weights of m, or with an adapter its own. Borrowed. */
void model_trained_weights(const struct model *m, void **p, size_t *bytes);
/* A model's parameters, with an adapter's where lora is not NULL, without any memory: for sizes of what is to be opened.
 * dev NULL: of files alone. */
int model_shape(struct model **out, const struct model_config *c, struct dev *dev, enum dtype act, enum quant_kind quant,
                const struct lora_config *lora);
void model_shape_free(struct model *m); /* NULL ok */

#endif
