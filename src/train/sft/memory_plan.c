/* memory_plan.c - see memory_plan.h. */
#include "train/sft/memory_plan.h"

#include "train/run/memory_limit.h"
#include "train/run/model_memory.h"

#include "base/err.h"
#include "base/log.h"
#include "base/size.h"

#include <stdio.h>

/* Device bytes of all but activations: weights, adapter, master, gradients, optimizer state, and the driver's. */
static int fixed_bytes(const struct sft_config *k, struct dev *dev, const struct model_config *c, const struct optim_config *o,
                       size_t *out) {
    const struct model_open_args open = {.act = k->act, .flags = MODEL_INFER, .max_len = k->max_length, .quant = k->lora.quant};
    struct model_memory m;
    TRY(model_memory(&m, c, dev, &open, &k->lora, o));
    *out = model_memory_bytes(&m) + dev_driver_bytes(dev);
    return 0;
}

static size_t pass_bytes(const struct sft_config *k, struct dev *dev, const struct model_config *c,
                         const struct trained_model_args *a) {
    const struct dev_sizes z = model_dev_sizes(c, k->act, a->max_rows, 1);
    return dev_working_bytes(dev, &z) + train_pages(trained_model_block_bytes(c, k->act, a));
}

static void set_cut(struct trained_model_args *a, struct micro_batch_limits cut, int64_t longest, int64_t batch) {
    a->max_rows = cut.max_rows == 0 ? size_mul(cut.max_seqs, longest) : cut.max_rows > longest ? cut.max_rows : longest;
    a->max_seqs = cut.max_seqs > 0 ? cut.max_seqs : batch;
}

/* The first micro-batch on the way to the smallest one whose pass takes at most `room` bytes; false: none does. */
static bool smaller_cut(const struct sft_config *k, struct dev *dev, const struct model_config *c, struct trained_model_args a,
                        int64_t longest, size_t room, struct micro_batch_limits *cut) {
    while (micro_batch_limits_lower(cut, longest)) {
        set_cut(&a, *cut, longest, k->train_batch_size);
        if (pass_bytes(k, dev, c, &a) <= room) return true;
    }
    return false;
}

/* The nearest change that fits: first those that leave the result as it is and cost least. */
static int refuse(const struct sft_config *k, struct dev *dev, const struct model_config *c, const struct trained_model_args *a,
                  int64_t longest, size_t fixed, size_t limit) {
    struct trained_model_args again = *a;
    struct micro_batch_limits cut = k->cut;
    struct optim_config o = k->optim;
    char need[96];
    snprintf(need, sizeof need, "the run needs %.2f GiB, the limit is %.2f GiB",
             (double)(fixed + pass_bytes(k, dev, c, a)) / 0x1p30, (double)limit / 0x1p30);
    again.keep = train_keep(RECOMPUTE_AUTO, c, k->act, a->max_rows, 0);
    if (fixed + pass_bytes(k, dev, c, &again) <= limit)
        FAIL(ERR_NOMEM, "%s; model.enable_gradient_checkpointing=True, without a trainer.recompute, fits (the result is the same)",
             need);
    if (fixed < limit && smaller_cut(k, dev, c, *a, longest, limit - fixed, &cut))
        FAIL(ERR_NOMEM, "%s; data.%s=%lld fits (the result is the same)", need,
             cut.max_seqs > 0 ? "micro_batch_size_per_gpu" : "max_token_len_per_gpu",
             (long long)(cut.max_seqs > 0 ? cut.max_seqs : cut.max_rows));
    o.host_master = o.host_state = true;
    if (dev_has_own_memory(dev) && !k->optim.host_state) {
        TRY(fixed_bytes(k, dev, c, &o, &fixed));
        if (fixed + pass_bytes(k, dev, c, a) <= limit)
            FAIL(ERR_NOMEM, "%s; engine.optimizer_offload=True fits (the result is the same)", need);
    }
    FAIL(ERR_NOMEM, "%s; no smaller micro-batch fits: train an adapter (model.lora_rank), or lower data.max_length", need);
}

int sft_memory_plan(struct sft_config *k, struct dev *dev, const struct model_config *c, int64_t longest,
                    struct trained_model_args *a) {
    struct optim_config *const o = &k->optim;
    if (o->host_master && !dev_has_own_memory(dev)) {
        log_note("param_offload and optimizer_offload change nothing on this device, whose memory is the host's");
        o->host_master = o->host_state = false;
    }
    *a = (struct trained_model_args){.dev = dev, .train = true, .optim = o};
    set_cut(a, k->cut, longest, k->train_batch_size);
    TRY(micro_batch_rows_check("data.micro_batch_size_per_gpu", a->max_seqs, longest, a->max_rows));
    const struct dev_sizes sizes = model_dev_sizes(c, k->act, a->max_rows, 1);
    const size_t limit = train_memory_limit(dev, k->memory_limit);
    size_t fixed;
    char text[96];
    TRY(fixed_bytes(k, dev, c, &k->optim, &fixed));
    a->keep = train_keep(k->recompute, c, k->act, a->max_rows, 0);
    const size_t least = fixed + pass_bytes(k, dev, c, a);
    if (dev_has_own_memory(dev) && k->recompute == RECOMPUTE_AUTO && least < limit)
        a->keep = train_keep(RECOMPUTE_AUTO, c, k->act, a->max_rows, limit - least);
    log_info("update: micro-batch of %lld tokens, %.2f GiB of activations, %s", (long long)a->max_rows,
             (double)trained_model_block_bytes(c, k->act, a) / 0x1p30, train_keep_text(a->keep, c, text, sizeof text));
    if (least > limit) return refuse(k, dev, c, a, longest, fixed, limit);
    return dev_reserve(dev, &sizes);
}
