/* cmd_selftest.c - `verlc selftest`: does this device compute what `ref` computes?
 *
 * Three questions, each a few lines of a table: every op of the device against `ref` on odd
 * and usual shapes in both dtypes (cmd_selftest_ops.c); rows of an op alone and in company,
 * bit for bit; and the log-probs of a rollout against those of the training forward pass of
 * the same tokens, bit for bit, on a small model with random weights.
 * Invariant: a line says ok only after a comparison that ran; what a device lacks is a line
 * of its own, and no success. */
#include "cmd/cmd.h"

#include "base/buf.h"
#include "base/err.h"
#include "base/file.h"
#include "base/rng.h"
#include "cmd/cmd_selftest.h"
#include "roll/roll.h"
#include "train/actor.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static void line(struct selftest *t, const char *what, bool ok, const char *detail) {
    printf("%-40s %-9s %s\n", what, ok ? "ok" : "DIFFERENT", detail);
    fflush(stdout);
    if (!ok) t->failed++;
    t->lines++;
}

void selftest_line(struct selftest *t, const char *what, bool ok, const char *detail) { line(t, what, ok, detail); }

/* ---- rollout against training ---- */

enum { PROMPTS = 6, SAMPLES = 3, BATCH = PROMPTS * SAMPLES, NEW = 48, LONGEST = 150, MAX_LEN = LONGEST + NEW };
static const int64_t prompt_len[PROMPTS] = {1, 16, 17, 40, 97, LONGEST};

struct rollout {
    int32_t ids[BATCH][MAX_LEN];
    float logp[BATCH][NEW];
    struct actor_seq seqs[BATCH];
    int64_t n[BATCH], tokens;
};

static int take_sample(void *arg, const struct roll_sample *s) {
    struct rollout *o = arg;
    const int64_t i = (int64_t)(intptr_t)s->user * SAMPLES + s->index;
    memcpy(o->ids[i], s->prompt, (size_t)s->n_prompt * 4);
    memcpy(o->ids[i] + s->n_prompt, s->ids, (size_t)s->n * 4);
    memcpy(o->logp[i], s->logp, (size_t)s->n * 4);
    o->seqs[i] = (struct actor_seq){.ids = o->ids[i], .n = s->n_prompt + s->n, .first = s->n_prompt};
    o->n[i] = s->n;
    o->tokens += s->n;
    return 0;
}

/* Samples with so many rows and sequences at a time. */
static int sample(struct model *m, int64_t max_rows, int64_t max_seqs, struct rollout *o) {
    struct roll_decoder *d = NULL;
    struct roll_engine *e = NULL;
    struct rng r = {.seed = 9, .stream = RNG_TEST};
    int32_t prompt[LONGEST];
    const struct roll_decoder_args a = {.model = m, .n_pages = BATCH * ((MAX_LEN + ROLL_PAGE_LEN - 1) / ROLL_PAGE_LEN),
                                        .max_rows = max_rows, .max_seqs = max_seqs, .max_len = MAX_LEN,
                                        .max_burst = roll_device_burst(m->dev)};
    memset(o, 0, sizeof *o);
    TRY(roll_decoder_open(&d, &a));
    const struct roll_model rm = roll_decoder_model(d);
    const struct roll_config cfg = {.max_rows = max_rows, .max_seqs = max_seqs, .done = take_sample, .done_arg = o};
    int rc = roll_create(&e, &rm, &cfg);
    for (int64_t i = 0; i < PROMPTS && rc == 0; i++) {
        for (int64_t t = 0; t < prompt_len[i]; t++) prompt[t] = (int32_t)rng_below(&r, (uint64_t)m->cfg.vocab);
        const struct roll_request q = {.prompt = prompt, .n_prompt = prompt_len[i], .n = SAMPLES, .max_tokens = NEW - 3 * i,
                                       .temperature = 0.7f, .top_p = i == 2 ? 0.9f : 1, .repetition_penalty = 1, .top_k = -1,
                                       .seed = 5, .uid = (uint64_t)i, .ignore_eos = true, .user = (void *)(intptr_t)i};
        rc = roll_submit(e, &q, NULL);
    }
    if (rc == 0) rc = roll_run(e);
    roll_destroy(e);
    roll_decoder_close(d);
    return rc;
}

static int64_t differing(const struct rollout *o, const float *logp) {
    int64_t bad = 0;
    for (int64_t i = 0; i < BATCH; i++)
        for (int64_t t = 0; t < o->n[i]; t++) {
            const float f = *logp++;
            bad += memcmp(&o->logp[i][t], &f, sizeof f) != 0 || !isfinite(f);
        }
    return bad;
}

static int compare_rollout(struct selftest *t, struct model *m, const char *name) {
    static const struct {
        const char *what;
        int64_t max_rows, max_seqs;
        struct actor_cut cut;
    } ways[] = {{"all at once", 4096, BATCH, {.max_seqs = BATCH}},
                {"7 rows a step", 7, 7, {.max_seqs = 1}},
                {"one by one", 512, 1, {.max_rows = 300}}};
    struct rollout *o = xmalloc(sizeof *o);
    float *logp = xmalloc(sizeof(float) * BATCH * NEW);
    struct actor *a = NULL;
    const struct actor_args args = {.dev = m->dev, .model = m, .max_rows = BATCH * MAX_LEN, .max_seqs = BATCH};
    int rc = actor_create(&a, &args);
    for (size_t i = 0; i < sizeof ways / sizeof *ways && rc == 0; i++) {
        char what[96], detail[96];
        if ((rc = sample(m, ways[i].max_rows, ways[i].max_seqs, o)) < 0) break;
        if ((rc = actor_logp(a, o->seqs, BATCH, ways[i].cut, 0.7f, (struct actor_out){.logp = logp})) < 0) break;
        const int64_t bad = differing(o, logp);
        snprintf(what, sizeof what, "rollout = training, %s, %s", name, ways[i].what);
        snprintf(detail, sizeof detail, "%lld of %lld log-probs differ", (long long)bad, (long long)o->tokens);
        line(t, what, bad == 0 && o->tokens > 0, detail);
    }
    actor_destroy(a);
    free(logp);
    free(o);
    return rc;
}

/* A small model in a directory of its own; heads of 64 and 128, a vocabulary of several chunks. */
static json_t *small_config(bool qwen3) {
    json_t *c = json_pack("{s:s, s:[s], s:i, s:i, s:i, s:i, s:i, s:i, s:i, s:i, s:f, s:s, s:f, s:i, s:b, s:f, s:s}",
                          "model_type", qwen3 ? "qwen3" : "qwen2", "architectures", qwen3 ? "Qwen3ForCausalLM" : "Qwen2ForCausalLM",
                          "hidden_size", 256, "intermediate_size", 704, "num_hidden_layers", 3, "num_attention_heads", 4,
                          "num_key_value_heads", 2, "head_dim", qwen3 ? 128 : 64, "vocab_size", 9000,
                          "max_position_embeddings", 512, "rms_norm_eps", 1e-6, "hidden_act", "silu", "initializer_range", 0.15,
                          "eos_token_id", 2, "tie_word_embeddings", 1, "rope_theta", 1e4, "torch_dtype", "float32");
    CHECK(c != NULL);
    return c;
}

static int check_model(struct selftest *t, bool qwen3, enum dtype act) {
    char dir[] = "/tmp/verlc-selftest-XXXXXX", name[64];
    struct model *m = NULL;
    json_t *c = NULL;
    if (!mkdtemp(dir)) FAIL(ERR_IO, "selftest: no directory can be made in /tmp");
    char *path = file_join(dir, "model");
    int rc = 0;
    c = small_config(qwen3);
    TRYG(model_init_dir(c, path, 3, DT_F32), out);
    TRYG(model_open(&m, t->dev, &(struct model_open_args){.dir = path, .act = act, .flags = MODEL_INFER, .max_len = MAX_LEN}), out);
    snprintf(name, sizeof name, "%s %s", qwen3 ? "qwen3" : "qwen2", dtype_name(act));
    rc = compare_rollout(t, m, name);
out:
    model_close(m);
    json_decref(c);
    free(path);
    (void)file_remove_tree(dir);
    return rc;
}

int cmd_selftest(int argc, char **argv) {
    const char *device = NULL;
    int64_t threads = 0;
    struct dev dev, ref;
    const struct cmd_opt opts[] = {{"--device", CMD_STR, &device, "NAME", CMD_DEVICE_HELP},
                                   {"--threads", CMD_I64, &threads, "N", "CPU threads (all)"}};
    const struct cmd_spec spec = {.usage = "verlc selftest [--device NAME]",
                                  .about = "Compares every op of a device with the plain C definition, rows alone with rows in\n"
                                           "company, and the log-probs of a rollout with those of training. Exit status 1:\n"
                                           "something differs.",
                                  .opts = opts, .n_opts = sizeof opts / sizeof *opts};
    int rc = cmd_parse(&spec, argc, argv);
    if (rc != 0) return rc < 0 ? rc : 0;
    TRY(dev_open_named(&dev, device, (int)threads, NULL));
    rc = dev_open_ref(&ref);
    struct selftest t = {.dev = &dev, .ref = &ref};
    printf("%s\n", dev.describe);
    if (rc == 0) rc = selftest_ops(&t);
    for (int i = 0; i < 4 && rc == 0; i++) rc = check_model(&t, i / 2 == 1, i % 2 ? DT_BF16 : DT_F32);
    if (rc == 0) printf("%d comparisons, %d different, %d not on this device\n", t.lines, t.failed, t.missing);
    dev_close(&ref);
    dev_close(&dev);
    if (rc < 0) return rc;
    return t.failed ? 1 : 0;
}
