/* bench_step.c - `verlc bench step`: the phases of one GRPO step on a model's arithmetic
 * alone: generation, reference log-probs, update.  No tokenizer, data or reward, so it needs
 * a config and weights only; `make bench-gpu` times the whole program.
 *
 * As the program does it, policy and reference are resident and the phases share one block.
 * One optimizer step a batch; every response has --len tokens. */
#include "cmd/bench/bench.h"

#include "base/buf.h"
#include "base/clock.h"
#include "base/err.h"
#include "base/log.h"
#include "base/rng.h"
#include "cmd/cmd.h"
#include "engine/engine.h"
#include "train/trained_model.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

struct step_bench {
    const char *model, *dtype, *device;
    enum dtype act;
    int64_t batch, n, prompt, len, micro, steps, threads;
    const char *recompute;
    struct model_keep keep;
    bool offload;
    struct optim_config optim;
    struct dev dev;
    struct model *policy, *reference;
    struct trained_model *actor, *ref_actor;
    struct decoder *decoder;
    void *block;
    size_t block_bytes;
    int32_t *ids;            /* (batch, prompt + len) */
    struct packed_seq *seqs; /* (batch) */
    float *logp;             /* of the reference: (batch, len) */
    int64_t max_rows;        /* of a generation step */
};

static int take_sample(void *arg, const struct engine_sample *s) {
    struct step_bench *b = arg;
    const int64_t i = (int64_t)(intptr_t)s->user * b->n + s->index, total = b->prompt + b->len;
    memcpy(b->ids + i * total, s->prompt, (size_t)s->n_prompt * 4);
    memcpy(b->ids + i * total + s->n_prompt, s->ids, (size_t)s->n * 4);
    b->seqs[i] = (struct packed_seq){.ids = b->ids + i * total, .n = s->n_prompt + s->n, .first = s->n_prompt};
    return 0;
}

static int generate(struct step_bench *b) {
    const struct engine_config cfg = {.done = take_sample, .done_arg = b};
    struct engine *e = NULL;
    int rc = decoder_engine(&e, b->decoder, &cfg);
    if (rc == 0)
        rc = bench_submit(
            e,
            &(struct bench_prompts){
                .vocab = b->policy->cfg.vocab, .prompts = b->batch / b->n, .n = b->n, .length = b->prompt, .max_tokens = b->len});
    if (rc == 0) rc = engine_run(e);
    engine_destroy(e);
    return rc;
}

/* The gradient of a mean over tokens, with the sign of the sample's index as its advantage. */
static int step_loss(void *arg, const struct micro_loss *m) {
    const struct step_bench *b = arg;
    const float scale = 1.0f / (float)(b->batch * b->len);
    for (int64_t t = 0; t < m->t1 - m->t0; t++) m->dout[t] = (m->lo + t / b->len) % 2 ? scale : -scale;
    return 0;
}

static int open_all(struct step_bench *b) {
    const int64_t total = b->prompt + b->len;
    TRY(dev_open_named(&b->dev, b->device, (int)b->threads, NULL));
    const bool far = b->offload && dev_has_own_memory(&b->dev);
    struct model_open_args o = {.dir = b->model, .act = b->act, .max_len = total};
    if (b->offload && !far) log_note("--offload changes nothing on this device, whose memory is the host's");
    b->optim.host_state = b->optim.host_master = far;
    o.flags = MODEL_TRAIN | (far ? MODEL_HOST_MASTER : 0);
    TRY(model_open(&b->policy, &b->dev, &o));
    o.flags = far ? MODEL_HOST_WEIGHTS : MODEL_INFER;
    TRY(model_open(&b->reference, &b->dev, &o));
    b->max_rows = b->batch * b->prompt < 8192 ? b->batch * b->prompt : 8192;
    if (b->max_rows < b->batch) b->max_rows = b->batch;
    const struct decoder_args limits = {.max_seqs = b->batch, .max_rows = b->max_rows, .max_len = total};
    struct decoder_args r = decoder_size(&b->dev, &b->policy->cfg, o.act, &limits, SIZE_MAX);
    r.model = b->policy;
    struct trained_model_args t = {.dev = &b->dev,
                                   .model = b->policy,
                                   .train = true,
                                   .keep = b->keep,
                                   .optim = &b->optim,
                                   .max_rows = b->micro * total,
                                   .max_seqs = b->micro};
    struct trained_model_args f = {.dev = &b->dev,
                                   .model = b->reference,
                                   .stream = far ? MODEL_STREAM_HOST : MODEL_STREAM_NONE,
                                   .max_rows = 2 * b->micro * total,
                                   .max_seqs = 2 * b->micro};
    const struct model_config *c = &b->policy->cfg;
    const size_t sizes[] = {decoder_bytes(c, o.act, &r), trained_model_block_bytes(c, o.act, &t),
                            trained_model_block_bytes(c, o.act, &f)};
    for (int i = 0; i < 3; i++)
        if (sizes[i] > b->block_bytes) b->block_bytes = sizes[i];
    TRY(dev_alloc(&b->dev, b->block_bytes, &b->block));
    r.block = t.block = f.block = b->block;
    TRY(decoder_open(&b->decoder, &r));
    TRY(trained_model_create(&b->actor, &t));
    TRY(trained_model_create(&b->ref_actor, &f));
    b->ids = xmalloc((size_t)(b->batch * total) * 4);
    b->seqs = xcalloc((size_t)b->batch, sizeof *b->seqs);
    b->logp = xmalloc((size_t)(b->batch * b->len) * 4);
    return 0;
}

static void close_all(struct step_bench *b) {
    trained_model_destroy(b->ref_actor);
    trained_model_destroy(b->actor);
    decoder_close(b->decoder);
    model_close(b->reference);
    model_close(b->policy);
    if (b->block) dev_free(&b->dev, b->block, b->block_bytes);
    dev_close(&b->dev);
    free(b->ids);
    free(b->seqs);
    free(b->logp);
}

/* seconds: generation, reference, update. */
static int one_step(struct step_bench *b, double seconds[3]) {
    const struct mini_batch s = {
        .seqs = b->seqs, .n = b->batch, .cut = {.max_seqs = b->micro}, .temperature = 1, .loss = step_loss, .arg = b};
    struct step_result r;
    double t = clock_now();
    TRY(generate(b));
    TRY(dev_sync(&b->dev));
    seconds[0] = clock_now() - t;
    t = clock_now();
    trained_model_begin(b->ref_actor);
    TRY(trained_model_forward(b->ref_actor, b->seqs, b->batch, (struct micro_batch_limits){.max_seqs = 2 * b->micro}, 1,
                              (struct forward_out){.logp = b->logp}));
    seconds[1] = clock_now() - t;
    t = clock_now();
    TRY(trained_model_step(b->actor, &s, &b->optim, 1e-6, &r));
    TRY(dev_sync(&b->dev));
    seconds[2] = clock_now() - t;
    return 0;
}

static int measure(struct step_bench *b) {
    double best[3] = {0}, least = 1e30;
    for (int64_t i = 0; i <= b->steps; i++) { /* the first one warms up */
        double s[3] = {0};
        TRY(one_step(b, s));
        if (i == 0 || s[0] + s[1] + s[2] >= least) continue;
        least = s[0] + s[1] + s[2];
        memcpy(best, s, sizeof best);
    }
    struct dev_memory m;
    TRY(dev_memory(&b->dev, &m));
    printf("{\"subject\":\"step\",\"samples\":%lld,\"tokens\":%lld,\"seconds\":%.6f,\"gen_seconds\":%.6f,\"ref_seconds\":%.6f,"
           "\"update_seconds\":%.6f,\"peak_bytes\":%zu,\"device\":\"%s\"}\n",
           (long long)b->batch, (long long)(b->batch * (b->prompt + b->len)), least, best[0], best[1], best[2],
           b->dev.peak + m.working + m.system, b->dev.describe);
    return 0;
}

int bench_step(int argc, char **argv) {
    struct step_bench b = {
        .dtype = "bf16",
        .batch = 8,
        .n = 4,
        .prompt = 64,
        .len = 64,
        .micro = 4,
        .steps = 2,
        .recompute = "layer",
        .optim = {.lr = 1e-6, .beta1 = 0.9, .beta2 = 0.999, .eps = 1e-8, .weight_decay = 0.01, .clip = 1, .schedule = "constant"}};
    const struct cmd_opt opts[] = {
        {"--model", CMD_STR, &b.model, "DIR", "model directory (verlc model init makes one)"},
        {"--dtype", CMD_STR, &b.dtype, "bf16|fp32", "compute dtype (bf16)"},
        {"--batch", CMD_I64(CMD_COUNT), &b.batch, "N", "samples"},
        {"--n", CMD_I64(CMD_COUNT), &b.n, "N", "of them with the same prompt"},
        {"--prompt", CMD_I64(CMD_COUNT), &b.prompt, "N", "prompt tokens"},
        {"--len", CMD_I64("int[2,2^28]"), &b.len, "N", "new tokens of each sample"},
        {"--micro", CMD_I64(CMD_COUNT), &b.micro, "N", "samples of a micro-batch of the update; the reference takes twice as many"},
        {"--steps", CMD_I64(CMD_COUNT), &b.steps, "N", "measured steps; the best counts"},
        {"--recompute", CMD_STR, &b.recompute, BENCH_RECOMPUTE " (layer)"},
        {"--offload", CMD_FLAG, &b.offload, NULL, "optimizer state, fp32 master and reference weights in host memory"},
        {"--device", CMD_STR, &b.device, "NAME", CMD_DEVICE_HELP},
        {"--threads", CMD_I64(CMD_THREADS), &b.threads, "N", "threads (all)"},
    };
    const struct cmd_spec spec = CMD_SPEC(opts, "verlc bench step --model DIR [options]",
                                          "The phases of one GRPO step: generation, reference log-probs, update.");
    int rc = cmd_parse(&spec, argc, argv);
    if (rc != 0) return rc < 0 ? rc : 0;
    if (!b.model) FAIL(ERR_INVAL, "--model is missing; usage: %s", spec.usage);
    if (b.batch % b.n) FAIL(ERR_INVAL, "--n %lld does not divide --batch %lld", (long long)b.n, (long long)b.batch);
    TRY(cmd_batch_size(b.batch, b.prompt, b.len));
    if (b.micro > b.batch) b.micro = b.batch;
    TRY(cmd_compute_dtype(b.dtype, &b.act));
    TRY(bench_keep(b.recompute, &b.keep));
    rc = open_all(&b);
    if (rc == 0) rc = measure(&b);
    close_all(&b);
    return rc;
}
