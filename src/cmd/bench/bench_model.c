/* bench_model.c - `verlc bench train|generate|logprob`: tokens per second of a
 * whole model in the shapes that training and rollout have.  One JSON line, so that
 * tools/bench_peers.py can alternate with other programs in one run. */
#include "cmd/bench/bench.h"

#include "base/buf.h"
#include "base/clock.h"
#include "base/err.h"
#include "base/rng.h"
#include "cmd/cmd.h"
#include "engine/engine.h"
#include "plan/memory_limit.h"
#include "plan/model_memory.h"
#include "train/activation_recompute.h"
#include "text/text.h"
#include "train/trained_model.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

struct model_bench {
    const char *model, *dtype, *device; /* device: NULL is auto */
    enum dtype act;
    int64_t batch, n, prompt, len, steps, threads, draft, repeat, logits;
    const char *recompute, *draft_mode, *text;
    struct text_ids ids;        /* of text */
    enum engine_draft drafting; /* draft_mode */
    struct model_keep keep;
    const char *trace_file;
    struct dev dev;
    struct model *m;
};

static int parse(struct model_bench *b, int argc, char **argv, const char *usage, const char *about) {
    const struct cmd_opt opts[] = {
        {"--model", CMD_STR, &b->model, "DIR", "model directory (verlc model init makes one)"},
        {"--dtype", CMD_STR, &b->dtype, "bf16|fp32", "compute dtype (bf16)"},
        {"--batch", CMD_I64(CMD_COUNT), &b->batch, "N", "sequences"},
        {"--n", CMD_I64(CMD_COUNT), &b->n, "N", "of them with the same prompt (generate)"},
        {"--prompt", CMD_I64(CMD_COUNT), &b->prompt, "N", "prompt tokens (generate)"},
        {"--len", CMD_I64("int[2,2^28]"), &b->len, "N", "tokens a sequence; new tokens for generate"},
        {"--draft", CMD_I64(CMD_DRAFT), &b->draft, "N", "tokens that the MTP layer drafts at a time (generate)"},
        {"--draft-mode", CMD_STR, &b->draft_mode, "always|measured|never", "when they are drafted (always)"},
        {"--repeat", CMD_I64("int[0,2^20]"), &b->repeat, "N", "prompts are N random tokens again and again (generate; 0: random)"},
        {"--text", CMD_STR, &b->text, "TEXT", "prompts are the tokens of this text again and again (generate)"},
        {"--steps", CMD_I64(CMD_COUNT), &b->steps, "N", "measured repetitions; the best counts"},
        {"--device", CMD_STR, &b->device, "NAME", CMD_DEVICE_HELP},
        {"--threads", CMD_I64(CMD_THREADS), &b->threads, "N", "threads (all)"},
        {"--trace", CMD_STR, &b->trace_file, "FILE", "traces the last repetition: Chrome's format to FILE, a table to stderr"},
        {"--recompute", CMD_STR, &b->recompute, BENCH_RECOMPUTE " (none; train)"},
        {"--kept-logits", CMD_I64("int[0,2^28]"), &b->logits, "N",
         "tokens whose logits backward need not make again (as many as a run's plan would keep; train)"},
    };
    const struct cmd_spec spec = CMD_SPEC(opts, usage, about);
    const int rc = cmd_parse(&spec, argc, argv);
    if (rc != 0) return rc;
    if (!b->model) FAIL(ERR_INVAL, "--model is missing; usage: %s", usage);
    b->drafting = ENGINE_DRAFT_ALWAYS;
    if (b->draft_mode && strcmp(b->draft_mode, "measured") == 0) b->drafting = ENGINE_DRAFT_MEASURED;
    else if (b->draft_mode && strcmp(b->draft_mode, "never") == 0) b->drafting = ENGINE_DRAFT_NEVER;
    else if (b->draft_mode && strcmp(b->draft_mode, "always") != 0)
        FAIL(ERR_INVAL, "--draft-mode %s; it is always, measured or never", b->draft_mode);
    TRY(cmd_compute_dtype(b->dtype, &b->act));
    TRY(bench_keep(b->recompute ? b->recompute : "none", &b->keep));
    if (b->batch % b->n) FAIL(ERR_INVAL, "--n %lld does not divide --batch %lld", (long long)b->n, (long long)b->batch);
    return cmd_batch_size(b->batch, b->prompt, b->len);
}

static int open_model(struct model_bench *b, int flags, int64_t max_len) {
    TRY(dev_open_named(&b->dev, b->device, (int)b->threads, NULL));
    const struct model_open_args a = {.dir = b->model, .act = b->act, .flags = flags, .max_len = max_len, .mtp = b->draft > 0};
    return model_open(&b->m, &b->dev, &a);
}

static void random_ids(struct rng *r, int64_t vocab, int32_t *ids, int64_t n) {
    for (int64_t i = 0; i < n; i++) ids[i] = (int32_t)rng_below(r, (uint64_t)vocab);
}

static int bench_loss(void *arg, const struct micro_loss *m) {
    for (int64_t t = 0; t < m->t1 - m->t0; t++) m->dout[t] = -*(const float *)arg;
    return 0;
}

/* Sequences of equal length with every token but the first a target. */
static int make_seqs(const struct model_bench *b, struct packed_seq **seqs, int32_t **ids) {
    struct rng r = {.seed = 1, .stream = RNG_TEST};
    *ids = xmalloc((size_t)(b->batch * b->len) * 4);
    *seqs = xmalloc((size_t)b->batch * sizeof **seqs);
    random_ids(&r, b->m->cfg.vocab, *ids, b->batch * b->len);
    for (int64_t i = 0; i < b->batch; i++) (*seqs)[i] = (struct packed_seq){.ids = *ids + i * b->len, .n = b->len, .first = 1};
    return 0;
}

/* The logits that it keeps: those asked for, or what a run's plan would keep on a device with memory of its own. */
static int keep_logits(struct model_bench *b, struct trained_model_args *a, const struct optim_config *o) {
    const struct model_config *const c = &b->m->cfg;
    const struct train_lora none = {0};
    const struct model_open_args open = {.dir = b->model, .act = b->act, .flags = MODEL_TRAIN, .max_len = b->len};
    const struct model_memory_args model = {
        .config = c, .dev = &b->dev, .open = &open, .lora = &none, .optim = o, .max_rows = a->max_rows};
    const struct dev_sizes sizes = model_dev_sizes(c, b->act, a->max_rows, a->max_rows, 1);
    struct model_memory m;
    a->keep.logits = b->logits > 0 ? b->logits : 0;
    if (b->logits >= 0 || !dev_has_own_memory(&b->dev)) return 0;
    TRY(model_memory(&m, &model));
    const size_t used = model_memory_bytes(&m) + dev_driver_bytes(&b->dev) + dev_working_bytes(&b->dev, &sizes) +
                        train_pages(trained_model_block_bytes(c, b->act, a)),
                 limit = plan_memory_limit(&b->dev, 0);
    a->keep = train_keep_logits(a->keep, &b->dev, c, b->act, a->max_rows, limit > used ? limit - used : 0);
    return 0;
}

static int run_actor(struct model_bench *b, bool train) {
    struct trained_model *a = NULL;
    struct packed_seq *seqs = NULL;
    int32_t *ids = NULL;
    double best = 1e30, best_step = 1e30;
    int rc = 0;
    TRY(open_model(b, train ? MODEL_TRAIN : MODEL_INFER, b->len));
    const struct optim_config o = {
        .lr = 1e-6, .beta1 = 0.9, .beta2 = 0.999, .eps = 1e-8, .weight_decay = 0.01, .clip = 1, .schedule = "constant"};
    struct trained_model_args args = {
        .dev = &b->dev, .model = b->m, .train = train, .keep = b->keep, .max_rows = b->batch * b->len, .max_seqs = b->batch};
    if (train) TRYG(keep_logits(b, &args, &o), out);
    TRYG(trained_model_create(&a, &args), out);
    TRYG(make_seqs(b, &seqs, &ids), out);
    float scale = 1.0f / (float)(b->batch * (b->len - 1));
    float *logp = xmalloc((size_t)(b->batch * b->len) * 4);
    const struct mini_batch s = {
        .seqs = seqs, .n = b->batch, .cut = {.max_seqs = b->batch}, .temperature = 1, .loss = bench_loss, .arg = &scale};
    for (int64_t i = 0; i <= b->steps && rc == 0; i++) { /* the first one warms up */
        struct step_result r;
        if (b->trace_file && i == b->steps) dev_trace_start(&b->dev);
        double t = clock_now();
        rc = train ? trained_model_backward(a, &s, &r)
                   : trained_model_forward(a, seqs, b->batch, s.cut, 1, (struct forward_out){.logp = logp});
        if (rc == 0) rc = dev_sync(&b->dev);
        const double pass = clock_now() - t;
        t = clock_now();
        if (rc == 0 && train) rc = optim_step(trained_model_optim(a), b->m, trained_model_grads(a), &o, 1e-6, &r.optim);
        if (rc == 0) rc = dev_sync(&b->dev);
        const double step = clock_now() - t;
        if (i > 0 && pass < best) best = pass;
        if (i > 0 && step < best_step) best_step = step;
    }
    if (rc == 0) rc = dev_trace_stop(&b->dev, b->trace_file, stderr);
    free(logp);
    if (rc == 0) {
        const double tokens = (double)(b->batch * b->len);
        printf("{\"subject\":\"%s\",\"tokens\":%.0f,\"seconds\":%.6f,\"tokens_per_s\":%.2f", train ? "train" : "logprob", tokens,
               best, tokens / best);
        if (train) printf(",\"optimizer_seconds\":%.6f,\"kept_logits\":%lld", best_step, (long long)args.keep.logits);
        printf(",\"peak_bytes\":%zu,\"device\":\"%s\"}\n", b->dev.peak, b->dev.describe);
    }
out:
    trained_model_destroy(a);
    free(seqs);
    free(ids);
    model_close(b->m);
    dev_close(&b->dev);
    return rc;
}

int bench_train(int argc, char **argv) {
    struct model_bench b = {.dtype = "bf16", .n = 1, .batch = 4, .prompt = 1, .len = 512, .steps = 2, .logits = -1};
    const int rc = parse(&b, argc, argv, "verlc bench train --model DIR [options]",
                         "Forward and backward over --batch packed sequences of --len tokens;\n"
                         "the optimizer step is timed separately.");
    return rc != 0 ? (rc < 0 ? rc : 0) : run_actor(&b, true);
}

int bench_logprob(int argc, char **argv) {
    struct model_bench b = {.dtype = "bf16", .n = 1, .batch = 4, .prompt = 1, .len = 512, .steps = 2};
    const int rc = parse(&b, argc, argv, "verlc bench logprob --model DIR [options]",
                         "Log-probs of --batch packed sequences of --len tokens.");
    return rc != 0 ? (rc < 0 ? rc : 0) : run_actor(&b, false);
}

/* ---- generation ---- */

/* Seconds: of the prompts' steps together, and for a token each of all samples, as the
 * mean and as the median (which a machine that was busy for a moment does not move). */
struct gen_times {
    double prefill, decode, decode_median, accepted; /* accepted: tokens of a verifying step; 0: none */
};

/* Runs e to its end; its samples all have their first token. */
static int decode_times(struct engine *e, int64_t batch, int64_t len, struct gen_times *out) {
    double *steps = xmalloc((size_t)(batch * len) * sizeof *steps);
    const double start = clock_now();
    int64_t n = 0, before = engine_stats(e).sampled;
    const int64_t first = before;
    int more;
    do {
        const double t = clock_now();
        more = engine_step(e);
        const int64_t now = engine_stats(e).sampled;
        if (more >= 0 && now > before) steps[n++] = (clock_now() - t) * (double)batch / (double)(now - before);
        before = now;
    } while (more > 0);
    out->decode = (clock_now() - start) / (double)(before - first);
    out->decode_median = n > 0 ? bench_median(steps, n) : 0;
    free(steps);
    return more < 0 ? more : 0;
}

/* The tokens of --text. */
static int read_text(struct model_bench *b) {
    struct tokenizer *tok = NULL;
    if (!b->text) return 0;
    TRY(tokenizer_open(&tok, b->model));
    const int rc = tokenizer_encode(tok, b->text, strlen(b->text), false, &b->ids);
    tokenizer_close(tok);
    TRY(rc);
    if (b->ids.n == 0) FAIL(ERR_INVAL, "--text has no tokens");
    for (int64_t i = 0; i < b->ids.n; i++)
        if (b->ids.p[i] >= b->m->cfg.vocab)
            FAIL(ERR_INVAL, "--text: token %d; the model's vocabulary has %lld", b->ids.p[i], (long long)b->m->cfg.vocab);
    return 0;
}

static int generate_once(struct model_bench *b, struct decoder *d, struct gen_times *times) {
    const struct engine_config cfg = {.draft = b->drafting};
    struct engine *e = NULL;
    int rc = decoder_engine(&e, d, &cfg);
    if (rc == 0)
        rc = bench_submit(e, &(struct bench_prompts){b->m->cfg.vocab, b->batch / b->n, b->n, b->prompt, b->len, b->repeat,
                                                     b->text ? b->ids.p : NULL, b->ids.n});
    const double t = clock_now();
    while (rc >= 0 && engine_stats(e).sampled < b->batch) rc = engine_step(e); /* every sample has its first token */
    times->prefill = clock_now() - t;
    if (rc >= 0) rc = decode_times(e, b->batch, b->len, times);
    const struct engine_stats s = engine_stats(e);
    if (s.verified > 0) times->accepted = 1 + (double)s.accepted / (double)s.verified;
    engine_destroy(e);
    return rc;
}

int bench_generate(int argc, char **argv) {
    struct model_bench b = {.dtype = "bf16", .n = 1, .batch = 1, .prompt = 64, .len = 64, .steps = 2};
    struct decoder *d = NULL;
    struct gen_times best = {1e30, 1e30, 1e30, 0};
    int rc = parse(&b, argc, argv, "verlc bench generate --model DIR [options]",
                   "Samples --len tokens after random prompts of --prompt tokens, --batch at a time, --n for each prompt.");
    if (rc != 0) return rc < 0 ? rc : 0;
    const double start = clock_now();
    const int64_t total = b.prompt + b.len, max_rows = b.batch * b.prompt; /* all prompts in one step: two clean phases */
    TRYG(open_model(&b, MODEL_INFER, total), out);
    TRYG(read_text(&b), out);
    const struct decoder_args limits = {.max_seqs = b.batch, .max_rows = max_rows, .max_len = total, .max_draft = b.draft};
    struct decoder_args a = decoder_size(&b.dev, &b.m->cfg, b.m->act, &limits, SIZE_MAX);
    a.model = b.m;
    TRYG(decoder_open(&d, &a), out);
    const double load = clock_now() - start;
    for (int64_t i = 0; i <= b.steps; i++) {
        struct gen_times t = {0};
        if (b.trace_file && i == b.steps) dev_trace_start(&b.dev);
        TRYG(generate_once(&b, d, &t), out);
        if (i > 0 && t.prefill < best.prefill) best.prefill = t.prefill;
        if (i > 0 && t.decode < best.decode) best.decode = t.decode;
        if (i > 0 && t.decode_median < best.decode_median) best.decode_median = t.decode_median;
        best.accepted = t.accepted;
    }
    TRYG(dev_trace_stop(&b.dev, b.trace_file, stderr), out);
    const double whole = best.prefill + best.decode * (double)(b.batch * (b.len - 1));
    printf("{\"subject\":\"generate\",\"batch\":%lld,\"load_seconds\":%.3f,\"prefill_seconds\":%.4f,\"decode_tokens_per_s\":%.2f,"
           "\"decode_step_median_s\":%.6f,\"tokens_per_s\":%.2f,\"draft\":%lld,\"accept_length\":%.3f,\"weight_bytes\":%zu,"
           "\"device\":\"%s\"}\n",
           (long long)b.batch, load, best.prefill, 1 / best.decode, best.decode_median, (double)(b.batch * b.len) / whole,
           (long long)b.draft, best.accepted, b.m->weights_bytes, b.dev.describe);
out:
    text_ids_free(&b.ids);
    decoder_close(d);
    model_close(b.m);
    dev_close(&b.dev);
    return rc;
}

int bench_read(int argc, char **argv) {
    int64_t threads = 0;
    double best = 0, median = 0;
    struct dev dev = {0};
    const struct cmd_opt opts[] = {{"--threads", CMD_I64(CMD_THREADS), &threads, "N", "threads (all)"}};
    const struct cmd_spec spec =
        CMD_SPEC(opts, "verlc bench read [--threads N]", "Best and median of some passes over 128 MiB a thread, 1 GiB at most.");
    int rc = cmd_parse(&spec, argc, argv);
    if (rc != 0) return rc < 0 ? rc : 0;
    TRY(dev_open_cpu(&dev, (int)threads, NULL));
    rc = bench_read_bandwidth(&dev, (int)threads, &best, &median);
    if (rc == 0) printf("{\"subject\":\"read\",\"bytes_per_s\":%.0f,\"median_bytes_per_s\":%.0f}\n", best, median);
    dev_close(&dev);
    return rc;
}
