/* config.c - the keys of a supervised run in struct supervised_config: filled by the rows of the table, then derived where a
 * member is more than a key's value. verl's engine keys; conf moves the older ones of fsdp_sft_trainer to these. */
#include "run/directories.h"
#include "supervised/supervised.h"

#include "base/err.h"
#include "base/log.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

#define CONF_STRUCT struct supervised_config
#include "conf/bind.h"

static const struct conf_binding bindings[] = {
#include "conf/keys/sft.def"
};

static int derive_data(struct supervised_config *k, const struct supervised_program *p, const struct conf *c) {
    const struct supervised_raw_config *r = &k->raw;
    const int64_t devices = rank_count_data_parallel(c, &k->trainer.devices, "engine");
    TRY(p->read(k));
    k->data.chat_kwargs = json_deep_copy(r->chat_kwargs);
    if (r->chat_template) json_object_set_new(k->data.chat_kwargs, "chat_template", json_string(r->chat_template));
    k->data.train.chat_kwargs = k->data.chat_kwargs;
    if (r->cut.dynamic) k->data.cut.max_rows = r->cut.tokens;
    else k->data.cut.max_seqs = r->cut.each;
    if (conf_is_null(c, "data.sampler.name")) k->data.sampler.order = DATA_SHUFFLE;
    k->data.sampler.source_key = "data_source";
    TRY(data_sampler_spec_check(&k->data.sampler));
    if (k->data.train_batch_size % devices != 0)
        FAIL(ERR_INVAL, "data.train_batch_size (%lld) must be divisible by trainer.nnodes * trainer.n_gpus_per_node (%lld)",
             (long long)k->data.train_batch_size, (long long)devices);
    return 0;
}

static int derive_model(struct supervised_config *k, const struct conf *c) {
    const int rc = run_model_dir(k->raw.model_path, false, &k->model.dir);
    if (rc < 0) return err_wrap(rc, "model.path");
    TRY(train_make_lora(&k->model.lora, "model", &k->raw.lora, k->raw.model_path));
    train_router_given(&k->model.router, c, "model", "engine");
    TRY(train_make_mtp(&k->model.mtp, "model", c, k->model.lora.on));
    if (!k->model.tokenizer_dir) k->model.tokenizer_dir = k->model.dir;
    if (conf_is_null(c, "trainer.recompute")) k->model.recompute = k->raw.checkpointing ? RECOMPUTE_AUTO : RECOMPUTE_NONE;
    k->data.context = k->raw.engine.context > 1 ? k->raw.engine.context : 1;
    k->data.experts = k->raw.engine.experts;
    if (k->data.context > 1 && k->data.grad_chunk > 1)
        FAIL(ERR_INVAL,
             "data.grad_chunk and engine.ulysses_sequence_parallel_size both say how gradients are summed; leave one out");
    return train_make_optim(&k->optim, "optim", &k->raw.optim, &k->raw.engine);
}

int supervised_config_read(struct supervised_config *k, const struct supervised_program *p, const struct conf *c) {
    k->conf = c;
    k->trainer.run.early_stop.threshold = NAN; /* null: none */
    TRY(conf_fill(c, bindings, sizeof bindings / sizeof *bindings, k));
    k->trainer.seed = (uint64_t)k->raw.seed;
    TRY(derive_data(k, p, c));
    k->trainer.run.title = p->name;
    k->trainer.run.stop_metric = "val/loss";
    const char *stop = k->trainer.run.early_stop.enable ? k->trainer.run.early_stop.metric : NULL;
    if (stop && strncmp(stop, "val", 3) == 0 && strcmp(stop, k->trainer.run.stop_metric) != 0)
        FAIL(ERR_INVAL, "trainer.early_stopping.metric=%s: the metric of a validation is val/loss, and it is the default", stop);
    const bool val = run_val_files(c, k->data.val.files, k->data.val.n_files);
    if (!val && (k->data.val.n_files > 0 ||
                 (conf_is_set(c, "trainer.test_freq") && k->trainer.run.test_freq != 0 && k->trainer.run.test_freq != -1)))
        log_note("data.val_files is not set: there is no validation, and trainer.test_freq has no effect");
    if (!val) k->data.val.n_files = 0;
    k->trainer.run.validates = k->data.val.n_files > 0 && k->trainer.run.test_freq != 0 && k->trainer.run.test_freq != -1;
    return derive_model(k, c);
}

void supervised_config_free(struct supervised_config *k) {
    run_lock_release(k->trainer.run.lock);
    train_model_config_free(&k->model);
    json_decref(k->data.chat_kwargs);
}
