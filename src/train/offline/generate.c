/* generate.c - verl's main_generation and main_generation_server: n samples for each prompt of the files, written
 * beside the rows they belong to in a column "responses" (a list of texts).
 *
 * Invariant: a sample is a function of (trainer.seed, row, sample): batch-invariant. */
#include "data/data.h"
#include "rollout/rollout.h"
#include "text/text.h"
#include "train/run/devices_asked.h"
#include "train/run/resume.h"
#include "train/train.h"

#include "base/clock.h"
#include "base/err.h"
#include "base/file.h"
#include "base/log.h"
#include "model/files/load.h"
#include "model/lora/lora.h"
#include "model/optim/optimizer.h"

#include <jansson.h>
#include <stdlib.h>
#include <string.h>

struct generate {
    const char *const *files;
    const char *prompt_key, *output_path, *device, *model_path, *tokenizer_dir, *chat_template;
    const char *adapter; /* peft directory; NULL: none */
    char *model_dir;
    int64_t n_files, n_samples, batch_size, prompt_length, response_length, max_num_seqs, max_num_batched_tokens, seed, nnodes,
        n_gpus_per_node;
    int threads;
    double temperature, top_p, memory_fraction;
    int64_t top_k;
    bool ignore_eos;
    enum dtype act;
    const json_t *chat_kwargs;
    const char *length_key, *n_key; /* of prompt_length and n_samples, for messages */
    /* the run */
    struct dev dev;
    struct tokenizer *tok;
    struct chat_template *chat;
    struct model *model;
    struct rollout_decoder *decoder;
    json_t *rows;
    int64_t n;
    struct text_ids *prompts; /* (n) */
    json_t **texts;           /* (n, n_samples); NULL: not yet there */
    int64_t tokens;
};

#define CONF_STRUCT struct generate
#include "conf/bind.h"

static const struct conf_binding bindings[] = {
#include "conf/keys_generate.def"
};

static bool ends_with(const char *s, const char *end) {
    const size_t n = strlen(s), m = strlen(end);
    return n > m && strcmp(s + n - m, end) == 0;
}

static int config_read(struct generate *g, const struct conf *c) {
    const bool server = strcmp(conf_schema(c), "generation_server") == 0;
    TRY(conf_fill(c, bindings, sizeof bindings / sizeof *bindings, g));
    g->n_key = server ? "actor_rollout_ref.rollout.n" : "data.n_samples";
    g->length_key = server ? "actor_rollout_ref.rollout.prompt_length" : "rollout.prompt_length";
    if (g->temperature == 0 && g->n_samples > 1)
        FAIL(ERR_INVAL, "%s=%lld with temperature=0: greedy samples of a prompt are all the same; take 1, or a temperature above 0",
             g->n_key, (long long)g->n_samples);
    if (!g->output_path) FAIL(ERR_INVAL, "data.output_path is not set: the file that gets the responses");
    if (!ends_with(g->output_path, ".parquet") && !ends_with(g->output_path, ".jsonl"))
        FAIL(ERR_INVAL, "data.output_path=%s: expected a name that ends with .parquet or .jsonl", g->output_path);
    train_note_devices(c, g->nnodes, g->n_gpus_per_node, g->device);
    const int rc = train_model_dir(g->model_path, false, &g->model_dir);
    if (rc < 0) return err_wrap(rc, "%s", server ? "actor_rollout_ref.model.path" : "model.path");
    if (!g->tokenizer_dir) g->tokenizer_dir = g->model_dir;
    return 0;
}

/* ---- prompts ---- */

/* The rows of all files, one after another. */
static int read_rows(struct generate *g) {
    const char *const required[] = {g->prompt_key, NULL};
    g->rows = json_array();
    for (int64_t i = 0; i < g->n_files; i++) {
        json_t *rows = NULL;
        TRY(data_read_rows(&rows, g->files[i], required));
        json_array_extend(g->rows, rows);
        json_decref(rows);
    }
    g->n = (int64_t)json_array_size(g->rows);
    if (g->n == 0) FAIL(ERR_INPUT, "%s has no rows", g->n_files == 1 ? g->files[0] : "data.train_files");
    if (g->batch_size == 0) g->batch_size = g->n;
    return 0;
}

static int read_prompts(struct generate *g) {
    const char *const where = g->n_files == 1 ? g->files[0] : "data.train_files"; /* rows are counted over all files */
    json_t *each = json_array(), *common = json_deep_copy(g->chat_kwargs), *row;
    int64_t done = 0;
    size_t i;
    int rc = 0;
    TRYG(read_rows(g), out);
    json_array_foreach(g->rows, i, row) {
        json_t *prompt = json_object_get(row, g->prompt_key);
        if (!json_is_string(prompt) && json_array_size(prompt) == 0)
            FAILG(out, ERR_INPUT, "%s row %zu: column '%s' is neither text nor a list of messages {role, content}", where, i + 1,
                  g->prompt_key);
        json_array_append_new(each, json_is_array(prompt)
                                        ? json_pack("{s:O}", "messages", prompt)
                                        : json_pack("{s:[{s:s, s:O}]}", "messages", "role", "user", "content", prompt));
    }
    json_object_set_new(common, "add_generation_prompt", json_true());
    if (g->chat_template) json_object_set_new(common, "chat_template", json_string(g->chat_template));
    g->prompts = xcalloc((size_t)g->n, sizeof *g->prompts);
    rc = chat_template_encode_many(g->chat, common, each, g->prompts, &done);
    if (rc < 0) err_wrap(rc, "%s row %lld", where, (long long)done + 1);
    for (int64_t k = 0; rc == 0 && k < g->n; k++) {
        if (g->prompts[k].n == 0) FAILG(out, ERR_INPUT, "%s row %lld: the prompt has no tokens", where, (long long)k + 1);
        if (g->prompts[k].n > g->prompt_length)
            FAILG(out, ERR_INPUT, "%s row %lld: %lld tokens, the limit is %s=%lld; raise it", where, (long long)k + 1,
                  (long long)g->prompts[k].n, g->length_key, (long long)g->prompt_length);
    }
out:
    json_decref(each);
    json_decref(common);
    return rc;
}

/* ---- sampling ---- */

static int64_t least(int64_t a, int64_t b) { return a < b ? a : b; }

static int open_model(struct generate *g) {
    int64_t longest = 1;
    for (int64_t i = 0; i < g->n; i++) longest = g->prompts[i].n > longest ? g->prompts[i].n : longest;
    const int64_t max_len = longest + g->response_length, seqs = least(g->max_num_seqs, least(g->batch_size, g->n) * g->n_samples);
    const int64_t rows = least(g->max_num_batched_tokens > seqs ? g->max_num_batched_tokens : seqs, seqs * max_len);
    const struct model_open_args o = {.dir = g->model_dir, .act = g->act, .flags = MODEL_INFER, .max_len = max_len};
    TRY(model_open(&g->model, &g->dev, &o));
    if (g->adapter) TRY(model_lora_load(g->model, g->adapter));
    struct rollout_decoder_args a = rollout_decoder_size(&g->dev, &g->model->cfg, g->act, seqs, rows, max_len,
                                                         (size_t)(g->memory_fraction * (double)g->dev.mem_total));
    a.model = g->model;
    return rollout_decoder_open(&g->decoder, &a);
}

static int on_sample(void *arg, const struct rollout_sample *s) {
    struct generate *g = arg;
    struct buf text = {0};
    const int rc = tokenizer_decode(g->tok, s->ids, s->n, true, &text);
    if (rc == 0) g->texts[(int64_t)(intptr_t)s->user * g->n_samples + s->index] = json_stringn(text.p ? text.p : "", text.n);
    buf_free(&text);
    g->tokens += s->n;
    return rc;
}

static int submit(struct generate *g, struct rollout_engine *e, int64_t row) {
    const struct model_config *c = &g->model->cfg;
    const struct rollout_stop_ids stop = rollout_stop_ids(c, g->tok);
    const struct rollout_request q = {.prompt = g->prompts[row].p,
                                      .n_prompt = g->prompts[row].n,
                                      .n = g->n_samples,
                                      .max_tokens = g->response_length,
                                      .temperature = (float)g->temperature,
                                      .top_p = (float)g->top_p,
                                      .top_k = (int32_t)g->top_k,
                                      .repetition_penalty = 1,
                                      .seed = (uint64_t)g->seed,
                                      .uid = (uint64_t)row,
                                      .ignore_eos = g->ignore_eos,
                                      .stop_ids = stop.id,
                                      .n_stop_ids = stop.n,
                                      .user = (void *)(intptr_t)row};
    return rollout_submit(e, &q, NULL);
}

static int sample_all(struct generate *g) {
    const struct rollout_config cfg = {.tok = g->tok, .done = on_sample, .done_arg = g};
    const double start = clock_now();
    g->texts = calloc((size_t)g->n, (size_t)g->n_samples * sizeof *g->texts);
    if (!g->texts)
        FAIL(ERR_NOMEM, "no memory for %lld samples of each of %lld prompts; lower %s", (long long)g->n_samples, (long long)g->n,
             g->n_key);
    for (int64_t lo = 0; lo < g->n; lo += g->batch_size) {
        struct rollout_engine *e = NULL;
        const int64_t hi = g->n - lo < g->batch_size ? g->n : lo + g->batch_size;
        int rc = rollout_decoder_engine(&e, g->decoder, &cfg);
        for (int64_t i = lo; i < hi && rc == 0; i++) rc = submit(g, e, i);
        if (rc == 0) rc = rollout_run(e);
        rollout_destroy(e);
        TRY(rc);
        log_info("%lld of %lld prompts, %.0f tokens a second", (long long)hi, (long long)g->n,
                 (double)g->tokens / (clock_now() - start));
    }
    return 0;
}

/* ---- the file ---- */

static int write_rows(struct generate *g) {
    json_t *row;
    size_t i;
    json_array_foreach(g->rows, i, row) {
        json_t *list = json_array();
        for (int64_t k = 0; k < g->n_samples; k++) json_array_append(list, g->texts[(int64_t)i * g->n_samples + k]);
        json_object_set_new(row, "responses", list);
    }
    char *dir = xstrdup(g->output_path), *slash = strrchr(dir, '/');
    int rc = 0;
    if (slash && slash != dir) {
        *slash = '\0';
        rc = file_mkdirs(dir);
    }
    free(dir);
    TRY(rc);
    TRY(data_write_rows(g->output_path, g->rows, NULL));
    log_info("%lld samples of %lld prompts are in %s", (long long)(g->n * g->n_samples), (long long)g->n, g->output_path);
    return 0;
}

static void generate_close(struct generate *g) {
    rollout_decoder_close(g->decoder);
    model_close(g->model);
    chat_template_destroy(g->chat);
    tokenizer_close(g->tok);
    dev_close(&g->dev);
    for (int64_t i = 0; g->prompts && i < g->n; i++) text_ids_free(&g->prompts[i]);
    for (int64_t i = 0; g->texts && i < g->n * g->n_samples; i++) json_decref(g->texts[i]);
    free(g->prompts);
    free(g->texts);
    json_decref(g->rows);
    free(g->model_dir);
}

int train_generate(const struct conf *c) {
    struct generate g = {0};
    const struct resume none = {.step = -1};
    int rc = 0;
    TRYG(config_read(&g, c), out);
    TRYG(train_model_weights("model.path", g.model_path, g.model_dir), out);
    TRYG(tokenizer_open(&g.tok, g.tokenizer_dir), out);
    TRYG(chat_template_create(&g.chat, g.tok), out);
    TRYG(read_prompts(&g), out);
    TRYG(resume_open_device(&g.dev, &none, g.device, g.threads), out);
    TRYG(open_model(&g), out);
    TRYG(sample_all(&g), out);
    rc = write_rows(&g);
out:
    generate_close(&g);
    return rc;
}

/* What the adapter takes on the device. */
static int adapter_bytes(struct generate *g, const struct model_config *shape, size_t *bytes) {
    const struct optim_config none = {0}; /* nothing is trained */
    struct lora_config cfg = {0};
    struct lora_plan p = {0};
    *bytes = 0;
    if (!g->adapter) return 0;
    TRY(lora_config_load(&cfg, g->adapter));
    const int rc = model_lora_plan(&p, shape, &g->dev, g->act, &cfg, &none);
    lora_config_free(&cfg);
    *bytes = p.weights;
    return rc;
}

int train_plan_generate(const struct conf *c, int64_t gpu, struct buf *out, bool *fits) {
    struct generate g = {0};
    const struct resume none = {.step = -1};
    struct model_config shape = {0};
    int rc = 0;
    TRYG(config_read(&g, c), out);
    if (gpu > 0) dev_open_cuda_planned(&g.dev, (size_t)gpu);
    else TRYG(resume_open_device(&g.dev, &none, g.device, g.threads), out);
    size_t adapter;
    TRYG(model_config_load(&shape, g.model_dir), out);
    TRYG(adapter_bytes(&g, &shape, &adapter), out);
    const int64_t max_len = g.prompt_length + g.response_length;
    const int64_t seqs = g.batch_size > 0 ? least(g.max_num_seqs, g.batch_size * g.n_samples) : g.max_num_seqs;
    const int64_t rows = least(g.max_num_batched_tokens > seqs ? g.max_num_batched_tokens : seqs, seqs * max_len);
    const struct model_open_args o = {.dir = g.model_dir, .act = g.act, .flags = MODEL_INFER, .max_len = max_len};
    const struct rollout_decoder_args a =
        rollout_decoder_size(&g.dev, &shape, g.act, seqs, rows, max_len, (size_t)(g.memory_fraction * (double)g.dev.mem_total));
    const double gib = 0x1p30, weights = (double)(model_open_bytes(&shape, &g.dev, &o) + adapter),
                 decoder = (double)rollout_decoder_bytes(&shape, g.act, &a);
    *fits = weights + decoder <= (double)g.dev.mem_total;
    buf_addf(out,
             "memory plan: generation with %.3f B parameters, %s, up to %lld + %lld tokens\n"
             "  weights                %9.2f GiB\n  KV cache, activations  %9.2f GiB  %lld samples at a time\n"
             "  device                 %9.2f GiB\n",
             (double)model_config_params(&shape) / 1e9, dtype_name(g.act), (long long)g.prompt_length, (long long)g.response_length,
             weights / gib, decoder / gib, (long long)seqs, (double)g.dev.mem_total / gib);
    if (!*fits) buf_adds(out, "  does not fit: lower rollout.max_num_seqs, or rollout.gpu_memory_utilization\n");
    model_config_free(&shape);
out:
    generate_close(&g);
    return rc;
}
