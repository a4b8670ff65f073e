/* config.c - the keys of an sft run, read once into struct sft_config.
 * verl's engine keys; the older ones of fsdp_sft_trainer are moved to these by conf. */
#include "train/sft/config.h"

#include "base/err.h"
#include "base/log.h"
#include "train/run/optimizer_keys.h"
#include "train/run/sampler_keys.h"
#include "train/train.h"

#include <stdlib.h>
#include <string.h>

static const char **terminated(const char *const *v, int64_t n) {
    if (n == 0) return NULL;
    const char **out = xcalloc((size_t)n + 1, sizeof *out);
    memcpy(out, v, (size_t)n * sizeof *out);
    return out;
}

static int read_freq(const struct conf *c, const char *key, int64_t *out) {
    const char *s;
    TRY(conf_str(c, key, &s));
    if (strcmp(s, "after_each_epoch") == 0) {
        *out = SFT_EVERY_EPOCH;
        return 0;
    }
    return conf_i64(c, key, out);
}

static int read_data(struct sft_config *k, const struct conf *c) {
    const char *truncation;
    const char *const *keys;
    int64_t n;
    bool multiturn = false, dynamic;
    struct sft_dataset_args *t = &k->train;
    TRY(conf_strs(c, "data.train_files", &t->files, &t->n_files));
    TRY(conf_strs(c, "data.val_files", &k->val.files, &k->val.n_files));
    TRY(conf_i64(c, "data.train_batch_size", &k->train_batch_size));
    TRY(conf_i64(c, "data.max_length", &k->max_length));
    TRY(conf_str(c, "data.truncation", &truncation));
    TRY(data_truncation_parse(truncation, &t->truncation));
    TRY(conf_i64(c, "data.train_max_samples", &t->max_samples));
    TRY(conf_i64(c, "data.val_max_samples", &k->val.max_samples));
    TRY(conf_bool_opt(c, "data.multiturn.enable", &multiturn));
    if (multiturn || conf_is_null(c, "data.prompt_key")) {
        TRY(conf_str(c, "data.messages_key", &t->messages_key));
        TRY(conf_str_opt(c, "data.tools_key", &t->tools_key));
        TRY(conf_str_opt(c, "data.enable_thinking_key", &t->enable_thinking_key));
        TRY(conf_bool_opt(c, "data.ignore_input_ids_mismatch", &t->ignore_input_ids_mismatch));
    } else {
        TRY(conf_str(c, "data.prompt_key", &t->prompt_key));
        TRY(conf_str(c, "data.response_key", &t->response_key));
        TRY(conf_strs(c, "data.prompt_dict_keys", &keys, &n));
        t->prompt_dict_keys = k->prompt_dict_keys = terminated(keys, n);
        TRY(conf_strs(c, "data.response_dict_keys", &keys, &n));
        t->response_dict_keys = k->response_dict_keys = terminated(keys, n);
    }
    TRY(train_read_sampler(c, true, "data_source", &k->sampler));
    TRY(conf_json(c, "data.apply_chat_template_kwargs", &t->chat_kwargs));
    TRY(conf_bool(c, "data.use_dynamic_bsz", &dynamic));
    if (dynamic) return conf_i64(c, "data.max_token_len_per_gpu", &k->cut.max_rows);
    return conf_i64(c, "data.micro_batch_size_per_gpu", &k->cut.max_seqs);
}

static int read_optim(struct sft_config *k, const struct conf *c) {
    k->zero_indexed_step = true;
    TRY(train_read_optim(c, "optim", &k->optim, &k->warmup_ratio, &k->zero_indexed_step));
    return conf_f64_opt(c, "optim.clip_grad", &k->optim.clip);
}

/* As in ppo: param_offload is the fp32 master's, the others the optimizer state's too. */
static int read_offload(struct optim_config *o, const struct conf *c) {
    bool policy = false;
    TRY(conf_bool_opt(c, "engine.param_offload", &o->host_master));
    TRY(conf_bool_opt(c, "engine.optimizer_offload", &o->host_state));
    TRY(conf_bool_opt(c, "engine.offload_policy", &policy));
    o->host_state |= policy;
    o->host_master |= o->host_state;
    return 0;
}

static int read_model(struct sft_config *k, const struct conf *c) {
    const char *path, *dtype = "bfloat16", *template = NULL;
    TRY(conf_str(c, "model.path", &path));
    TRY(train_model_dir(path, &k->model_dir));
    TRY(train_read_lora(c, "model", path, &k->lora));
    k->tokenizer_dir = k->model_dir;
    TRY(conf_str_opt(c, "model.tokenizer_path", &k->tokenizer_dir));
    TRY(conf_str_opt(c, "model.custom_chat_template", &template));
    k->chat_kwargs = json_deep_copy(k->train.chat_kwargs);
    if (template) json_object_set_new(k->chat_kwargs, "chat_template", json_string(template));
    k->train.chat_kwargs = k->chat_kwargs;
    TRY(train_read_recompute(c, "model.enable_gradient_checkpointing", &k->recompute));
    TRY(conf_str_opt(c, "engine.dtype", &dtype));
    if (strcmp(dtype, "bfloat16") != 0 && strcmp(dtype, "float32") != 0 && strcmp(dtype, "fp32") != 0)
        FAIL(ERR_INVAL, "engine.dtype=%s: the compute dtypes are bfloat16 and float32", dtype);
    k->act = strcmp(dtype, "bfloat16") == 0 ? DT_BF16 : DT_F32;
    return 0;
}

static int read_trainer(struct sft_config *k, const struct conf *c) {
    const char *limit = NULL;
    int64_t seed;
    TRY(conf_str(c, "trainer.project_name", &k->project));
    TRY(conf_str(c, "trainer.experiment_name", &k->experiment));
    TRY(conf_str(c, "trainer.default_local_dir", &k->default_local_dir));
    TRY(conf_str(c, "trainer.resume_mode", &k->resume_mode));
    TRY(conf_str_opt(c, "trainer.resume_from_path", &k->resume_from));
    TRY(conf_str_opt(c, "trainer.device", &k->device));
    TRY(conf_strs(c, "trainer.logger", &k->loggers, &k->n_loggers));
    TRY(conf_i64(c, "trainer.total_epochs", &k->total_epochs));
    TRY(conf_i64_opt(c, "trainer.total_training_steps", &k->total_training_steps));
    TRY(read_freq(c, "trainer.save_freq", &k->save_freq));
    TRY(read_freq(c, "trainer.test_freq", &k->test_freq));
    TRY(conf_i64_opt(c, "trainer.max_ckpt_to_keep", &k->keep_ckpts));
    TRY(conf_i64_opt(c, "trainer.threads", &k->threads));
    k->max_bad_steps = 3;
    TRY(conf_i64_opt(c, "trainer.max_bad_steps", &k->max_bad_steps));
    TRY(conf_f64(c, "trainer.deadline", &k->deadline_s));
    TRY(conf_str_opt(c, "trainer.device_memory_limit", &limit));
    if (limit) TRY(train_read_bytes("trainer.device_memory_limit", limit, &k->memory_limit));
    TRY(conf_i64(c, "trainer.seed", &seed));
    k->seed = (uint64_t)seed;
    return 0;
}

int sft_config_read(struct sft_config *k, const struct conf *c) {
    TRY(read_data(k, c));
    TRY(read_model(k, c));
    TRY(read_optim(k, c));
    TRY(read_offload(&k->optim, c));
    return read_trainer(k, c);
}

void sft_config_free(struct sft_config *k) {
    free(k->model_dir);
    train_lora_free(&k->lora);
    json_decref(k->chat_kwargs);
    free(k->prompt_dict_keys);
    free(k->response_dict_keys);
}
