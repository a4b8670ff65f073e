/* generate.c - verl's main_generation and main_generation_server: n samples for each prompt of the files, written with the rows
 * that they belong to, in a column "responses" (a list of texts).
 *
 * This file has rows and text; samples come from a generator (generator.h), in this process or in those of several ranks. Where
 * rows have several turns, all samples are episodes (episodes.h), and a column more has what they were.
 * Invariant: the file does not depend on batches nor on ranks, but for the seconds that tools took. */
#include "generate/generate.h"

#include "data/data.h"
#include "generate/episode_record.h"
#include "generate/episodes.h"
#include "generate/generator.h"
#include "plan/memory_rows.h"
#include "ranks/dispatch.h"
#include "ranks/restart.h"
#include "ranks/worker_calls.h"
#include "run/directories.h"
#include "run/phase_watchdog.h"
#include "run/resume.h"

#include "base/clock.h"
#include "base/err.h"
#include "base/file.h"
#include "base/json.h"
#include "base/log.h"
#include "model/files/load.h"
#include "model/lora/lora.h"
#include "model/optim/optimizer.h"
#include "model/parallel/tensor_parallel.h"
#include "ranks/launcher.h"

#include <jansson.h>
#include <stdlib.h>
#include <string.h>

extern char **environ;

struct generate {
    struct generate_config k; /* constant once read */
    struct rank_placement placement;
    struct generator generator; /* several ranks: without a device */
    struct worker_ranks ranks;
    struct tokenizer *tok;
    struct chat_template *chat;
    struct episodes *episodes;
    json_t *rows;
    int64_t n, batch;         /* prompts, and how many at a time */
    struct text_ids *prompts; /* (n) */
    json_t **texts;           /* (n, n_samples); NULL: not yet there */
    json_t **records;         /* the same of episodes; NULL: there are none */
    int64_t tokens;
};

/* ---- prompts ---- */

/* The rows of all files, one after another. */
static int read_rows(struct generate *g) {
    const char *const required[] = {g->k.prompt_key, NULL};
    g->rows = json_array();
    for (int64_t i = 0; i < g->k.n_files; i++) {
        json_t *rows = NULL;
        TRY(data_read_rows(&rows, g->k.files[i], required));
        json_array_extend(g->rows, rows);
        json_decref(rows);
    }
    g->n = (int64_t)json_array_size(g->rows);
    if (g->n == 0) FAIL(ERR_INPUT, "%s has no rows", g->k.n_files == 1 ? g->k.files[0] : "data.train_files");
    g->batch = g->k.batch_size > 0 && g->k.batch_size < g->n ? g->k.batch_size : g->n;
    return 0;
}

static int read_prompts(struct generate *g) {
    const char *const where = g->k.n_files == 1 ? g->k.files[0] : "data.train_files"; /* rows are counted over all files */
    json_t *each = json_array(), *common = json_deep_copy(g->k.chat_kwargs), *row;
    int64_t done = 0;
    size_t i;
    int rc = 0;
    TRYG(read_rows(g), out);
    json_array_foreach(g->rows, i, row) {
        json_t *prompt = json_object_get(row, g->k.prompt_key);
        if (!json_is_string(prompt) && json_array_size(prompt) == 0)
            FAILG(out, ERR_INPUT, "%s row %zu: column '%s' is neither text nor a list of messages {role, content}", where, i + 1,
                  g->k.prompt_key);
        json_t *tools = NULL, *q = json_is_array(prompt)
                                       ? json_pack("{s:O}", "messages", prompt)
                                       : json_pack("{s:[{s:s, s:O}]}", "messages", "role", "user", "content", prompt);
        json_array_append_new(each, q);
        rc = episodes_row(g->episodes, row, &tools);
        if (json_array_size(tools) > 0) json_object_set(q, "tools", tools);
        json_decref(tools);
        if (rc < 0) {
            err_wrap(rc, "%s row %zu", where, i + 1);
            goto out;
        }
    }
    episodes_check(g->episodes);
    json_object_set_new(common, "add_generation_prompt", json_true());
    g->prompts = xcalloc((size_t)g->n, sizeof *g->prompts);
    rc = chat_template_encode_many(g->chat, common, each, g->prompts, &done);
    if (rc < 0) err_wrap(rc, "%s row %lld", where, (long long)done + 1);
    for (int64_t k = 0; rc == 0 && k < g->n; k++) {
        if (g->prompts[k].n == 0) FAILG(out, ERR_INPUT, "%s row %lld: the prompt has no tokens", where, (long long)k + 1);
        if (g->prompts[k].n > g->k.prompt_length)
            FAILG(out, ERR_INPUT, "%s row %lld: %lld tokens, the limit is %s=%lld; raise it", where, (long long)k + 1,
                  (long long)g->prompts[k].n, g->k.length_key, (long long)g->k.prompt_length);
    }
out:
    json_decref(each);
    json_decref(common);
    return rc;
}

/* ---- sampling ---- */

static void note_alone(const struct generate *g, const char *why) {
    if (why)
        log_note("rollout.tensor_model_parallel_size=%lld: each rank generates alone: %s; the result is the same",
                 (long long)g->k.rollout.tensor_parallel, why);
}

/* The device, or the processes that have some. */
static int open_ranks(struct generate *g, int64_t longest, int64_t prompts) {
    char *dir = generate_output_dir(&g->k);
    struct rank_group_args a = rank_group_args_of(g->k.conf, &g->k.trainer, &g->placement, NULL);
    a.dir = dir;
    const int rc = dispatch_open(&g->generator.base, &g->ranks, &a, "generator_device", NULL, NULL);
    free(dir);
    TRY(rc);
    json_t *first = NULL;
    int64_t together = 1;
    TRY(rank_group_plain_call(&g->ranks.all, "generator_model",
                              json_pack("{s:I, s:I}", "longest", (json_int_t)longest, "prompts",
                                        (json_int_t)((prompts + g->ranks.all.n - 1) / g->ranks.all.n)),
                              &first));
    const int got = json_i64(first, "tensor_parallel", &together, "rank 0");
    note_alone(g, json_string_value(json_object_get(first, "alone")));
    json_decref(first);
    g->ranks.dispatch.together = (int)together;
    if (together > 1) log_info("tensor parallel: %lld ranks generate together", (long long)together);
    return got;
}

static int open_generator(struct generate *g) {
    const struct resume none = {.step = -1};
    int64_t longest = 1;
    for (int64_t i = 0; i < g->n; i++) longest = g->prompts[i].n > longest ? g->prompts[i].n : longest;
    if (episodes_any(g->episodes)) longest = g->k.prompt_length; /* a loop may begin with another prompt */
    if (g->placement.n > 1) return open_ranks(g, longest, g->batch);
    g->generator.k = &g->k;
    TRY(resume_open_device(&g->generator.base.dev, &none, g->k.trainer.run.device, g->k.trainer.run.threads));
    worker_open_local(&g->generator.base, NULL);
    TRY(generator_open(&g->generator, (struct generator_size){.longest = longest, .prompts = g->batch, .local_ranks = 1}));
    note_alone(g, g->generator.alone);
    return 0;
}

static int on_sample(void *arg, const struct engine_sample *s) {
    struct generate *g = arg;
    struct buf text = {0};
    const int rc = tokenizer_decode(g->tok, s->ids, s->n, true, &text);
    if (rc == 0)
        g->texts[(int64_t)(intptr_t)s->user * g->k.rollout.train.n + s->index] = json_stringn(text.p ? text.p : "", text.n);
    buf_free(&text);
    g->tokens += s->n;
    return rc;
}

static int submit(struct generate *g, int64_t row) {
    const struct generate_config *const k = &g->k;
    const struct engine_request q = {.prompt = g->prompts[row].p,
                                     .n_prompt = g->prompts[row].n,
                                     .n = k->rollout.train.n,
                                     .max_tokens = k->response_length,
                                     .temperature = (float)k->rollout.train.temperature,
                                     .top_p = (float)k->rollout.train.top_p,
                                     .top_k = (int32_t)k->rollout.train.top_k,
                                     .repetition_penalty = 1,
                                     .seed = k->trainer.seed,
                                     .uid = (uint64_t)row,
                                     .ignore_eos = k->rollout.train.ignore_eos,
                                     .user = (void *)(intptr_t)row};
    return g->generator.base.ops->generate_add(&g->generator.base, &q);
}

/* Rows [lo, hi) together. */
static int sample_some(struct generate *g, int64_t lo, int64_t hi) {
    struct worker *const w = &g->generator.base;
    const int64_t at = lo * g->k.rollout.train.n;
    if (g->records)
        return episodes_draw(g->episodes, &(struct episodes_rows){.rows = g->rows, .prompts = g->prompts, .lo = lo, .hi = hi},
                             g->texts + at, g->records + at, &g->tokens);
    int rc = w->ops->generate_begin(w, &(struct worker_generation){.done = on_sample, .arg = g});
    for (int64_t i = lo; i < hi && rc >= 0; i++) rc = submit(g, i);
    if (rc >= 0) do
            rc = w->ops->generate_step(w, true);
        while (rc > 0);
    w->ops->generate_end(w);
    return rc;
}

static int sample_all(struct generate *g) {
    const struct generate_config *const k = &g->k;
    const double start = clock_now();
    const bool episodes = episodes_any(g->episodes);
    g->texts = calloc((size_t)g->n, (size_t)k->rollout.train.n * sizeof *g->texts);
    if (episodes) g->records = calloc((size_t)g->n, (size_t)k->rollout.train.n * sizeof *g->records);
    if (!g->texts || (episodes && !g->records))
        FAIL(ERR_NOMEM, "no memory for %lld samples of each of %lld prompts; lower %s", (long long)k->rollout.train.n,
             (long long)g->n, k->n_key);
    for (int64_t lo = 0; lo < g->n; lo += g->batch) {
        const int64_t hi = g->n - lo < g->batch ? g->n : lo + g->batch;
        TRY(sample_some(g, lo, hi));
        log_info("%lld of %lld prompts, %.0f tokens a second", (long long)hi, (long long)g->n,
                 (double)g->tokens / (clock_now() - start));
    }
    return 0;
}

/* ---- the file ---- */

/* The samples of row i. */
static json_t *list_of(const struct generate *g, json_t *const *samples, size_t i) {
    const int64_t n = g->k.rollout.train.n;
    json_t *list = json_array();
    for (int64_t k = 0; k < n; k++) json_array_append(list, samples[(int64_t)i * n + k]);
    return list;
}

static int write_rows(struct generate *g) {
    json_t *row;
    size_t i;
    if (g->records && generate_writes_parquet(&g->k)) episode_records_as_text(g->records, g->n * g->k.rollout.train.n);
    json_array_foreach(g->rows, i, row) {
        json_object_set_new(row, "responses", list_of(g, g->texts, i));
        if (g->records) json_object_set_new(row, g->k.episodes_key, list_of(g, g->records, i));
    }
    char *dir = generate_output_dir(&g->k);
    const int rc = file_mkdirs(dir);
    free(dir);
    TRY(rc);
    TRY(data_write_rows(g->k.output_path, g->rows, NULL));
    log_info("%lld samples of %lld prompts are in %s", (long long)(g->n * g->k.rollout.train.n), (long long)g->n, g->k.output_path);
    return 0;
}

static void generate_close(struct generate *g, bool ok) {
    episodes_close(g->episodes);
    dispatch_close(&g->ranks, ok);
    generator_close(&g->generator);
    chat_template_destroy(g->chat);
    tokenizer_close(g->tok);
    for (int64_t i = 0; g->prompts && i < g->n; i++) text_ids_free(&g->prompts[i]);
    for (int64_t i = 0; g->texts && i < g->n * g->k.rollout.train.n; i++) json_decref(g->texts[i]);
    for (int64_t i = 0; g->records && i < g->n * g->k.rollout.train.n; i++) json_decref(g->records[i]);
    free(g->prompts);
    free(g->texts);
    free(g->records);
    json_decref(g->rows);
    generate_config_free(&g->k);
}

/* A rank's process that a launcher has started next to the controller. */
static int serve(const struct conf *c, const struct launch *l) {
    struct generate_config k = {0};
    char *dir = NULL;
    int rc = generate_config_read(&k, c);
    if (rc == 0) {
        dir = generate_output_dir(&k);
        rc = rank_serve(l, dir, k.trainer.devices.controller,
                        (const struct worker_process_service *const[]){generator_services, NULL});
    }
    free(dir);
    generate_config_free(&k);
    return rc;
}

/* main_generation has no agent loops. */
static int open_episodes(struct generate *g) {
    const struct episodes_args a = {.k = &g->k, .tok = g->tok, .worker = &g->generator.base};
    return g->k.episodes_key ? episodes_open(&g->episodes, &a) : 0;
}

int generate_run(const struct conf *c) {
    struct generate g = {0};
    struct restart restart;
    struct launch l;
    int rc = 0;
    TRY(launch_read(&l, environ));
    if (workers_started_this(&l)) return serve(c, &l);
    restart_begin(&restart);
    TRYG(generate_config_read(&g.k, c), out);
    TRYG(rank_count_decide(c, &g.k.trainer, NULL, true, &g.placement), out);
    TRYG(run_model_weights("model.path", g.k.raw.model_path, g.k.model.dir), out);
    TRYG(tokenizer_open(&g.tok, g.k.model.tokenizer_dir), out);
    TRYG(chat_template_create(&g.chat, g.tok), out);
    TRYG(open_episodes(&g), out);
    TRYG(read_prompts(&g), out);
    TRYG(open_generator(&g), out);
    TRYG(sample_all(&g), out);
    episodes_report(g.episodes);
    rc = write_rows(&g);
out:
    restart.k = &g.k.trainer;
    restart.ranks = g.placement;
    generate_close(&g, rc == 0);
    return rc < 0 ? err_pass(restart_run(&restart, rc, phase_stop_signal() != 0), __FILE__, __LINE__) : 0;
}

/* What the adapter takes on the device. */
static int adapter_bytes(const struct generate_config *k, struct dev *dev, const struct model_config *shape, size_t *bytes) {
    const struct optim_config none = {0}; /* nothing is trained */
    struct lora_config cfg = {0};
    struct optim_plan p = {0};
    *bytes = 0;
    if (!k->adapter) return 0;
    TRY(lora_config_load(&cfg, k->adapter));
    const int rc = optim_plan(&p, shape, dev, k->model.act, &cfg, &none);
    lora_config_free(&cfg);
    *bytes = p.adapter;
    return rc;
}

int generate_plan(const struct conf *c, const struct train_plan_args *a, struct run_plan *out) {
    struct generate_config k = {0};
    struct dev dev = {0};
    struct model_config shape = {0};
    struct rank_placement ranks;
    int rc = 0;
    TRYG(generate_config_read(&k, c), end);
    TRYG(run_plan_ranks(c, &k.trainer, NULL, a, &dev, &ranks), end);
    size_t adapter;
    TRYG(model_config_load(&shape, k.model.dir), end);
    TRYG(adapter_bytes(&k, &dev, &shape, &adapter), end);
    const char *why;
    const int64_t together = split_model_together(&shape, k.rollout.tensor_parallel, ranks.n, ranks.n_local, &why);
    const struct generator_size size = {.longest = k.prompt_length,
                                        .prompts = (k.batch_size + ranks.n - 1) / ranks.n * together,
                                        .together = together,
                                        .local_ranks = (int)ranks.n_local};
    const struct model_config part = model_tp_config(&shape, -1, (int)together);
    struct decoder_args d;
    size_t own;
    TRYG(generator_decoder(&d, &k, &dev, &shape, size, &own), end);
    const size_t weights = own + adapter, decoder = decoder_bytes(&part, k.model.act, &d),
                 there = dev_has_own_memory(&dev) ? dev.mem_total : dev.mem_total / (size_t)ranks.n_local;
    out->fits = weights + decoder <= there;
    buf_addf(&out->text, "memory plan: generation with %.3f B parameters, %s, up to %lld + %lld tokens",
             (double)model_config_params(&shape) / 1e9, dtype_name(k.model.act), (long long)k.prompt_length,
             (long long)k.response_length);
    if (ranks.n > 1) buf_addf(&out->text, "; each of %lld ranks:", (long long)ranks.n);
    buf_adds(&out->text, "\n");
    struct memory_rows rows = {.text = &out->text, .narrow = true};
    char note[64];
    snprintf(note, sizeof note, "%lld samples at a time", (long long)d.max_seqs);
    memory_rows_open(&rows, weights + decoder, there);
    memory_row(&rows, "weights", weights, together > 1 ? "a part of all matrices" : "");
    memory_row(&rows, "KV cache, activations", decoder, note);
    memory_row_text(&rows, "device", there, "");
    if (together > 1) buf_addf(&out->text, "  tensor parallel: %lld ranks generate together\n", (long long)together);
    else if (why)
        buf_addf(&out->text, "  tensor parallel: 1, not the %lld asked for: %s\n", (long long)k.rollout.tensor_parallel, why);
    if (!out->fits)
        buf_addf(&out->text, "  does not fit: %s\n",
                 weights > there ? "rollout.tensor_model_parallel_size splits the layers over so many ranks"
                                 : "lower rollout.max_num_seqs, or rollout.gpu_memory_utilization");
    out->json = rows.json;
    json_object_set_new(out->json, "fits", json_boolean(out->fits));
    if (ranks.n > 1) json_object_set_new(out->json, "ranks", json_pack("{s:I}", "n", (json_int_t)ranks.n));
    model_config_free(&shape);
end:
    dev_close(&dev);
    generate_config_free(&k);
    return rc;
}
