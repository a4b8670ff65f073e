/* generate.c - verlc generate: JSONL requests in, one JSONL line a sample
 * out.  All requests are in the engine together; lines come out in
 * order, each as soon as everything before it is done. */
#include "cmd/cmd.h"

#include "base/buf.h"
#include "base/err.h"
#include "base/file.h"
#include "base/json.h"
#include "base/log.h"
#include "base/encoding/number.h"
#include "engine/engine.h"
#include "model/files/load.h"
#include "model/lora/lora.h"
#include "run/directories.h"
#include "text/text.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

struct gen_request { /* one input line */
    int64_t no;      /* line number, 1-based */
    int32_t *ids;
    int64_t n_ids, n, max_tokens;
    double temperature, top_p, min_p, repetition_penalty;
    int64_t top_k, seed;
    bool ignore_eos;
    char **stop;
    int64_t n_stop;
    char **lines; /* (n) finished output lines */
};

struct generation_state {
    struct tokenizer *tok;
    struct chat_template *chat;
    const char *model_dir, *adapter; /* adapter: NULL or a peft directory */
    int64_t vocab, max_pos;
    struct gen_request *rq;
    int64_t n, cap;
    int64_t next, next_sample; /* first line not yet printed */
};

static void request_free(struct gen_request *q) {
    for (int64_t i = 0; i < q->n_stop; i++) free(q->stop[i]);
    for (int64_t i = 0; q->lines && i < q->n; i++) free(q->lines[i]);
    free(q->stop);
    free(q->lines);
    free(q->ids);
}

static int open_tokenizer(struct generation_state *g, const char *where) {
    if (g->tok) return 0;
    const int rc = tokenizer_open(&g->tok, g->model_dir);
    return rc < 0 ? err_wrap(rc, "%s", where) : 0;
}

/* "prompt", "messages" or "ids" -> token ids. */
static int read_prompt(struct generation_state *g, const json_t *o, struct gen_request *q, const char *where) {
    const json_t *ids = json_object_get(o, "ids"), *messages = json_object_get(o, "messages");
    const json_t *prompt = json_object_get(o, "prompt");
    struct text_ids v = {0};
    int rc = 0;
    if ((ids != NULL) + (messages != NULL) + (prompt != NULL) != 1)
        FAIL(ERR_FORMAT, "%s: needs exactly one of \"prompt\", \"messages\" and \"ids\"", where);
    if (ids) {
        if (!json_is_array(ids)) FAIL(ERR_FORMAT, "%s: \"ids\" is not an array", where);
        for (size_t i = 0; i < json_array_size(ids); i++) {
            const json_t *x = json_array_get(ids, i);
            const json_int_t id = json_is_integer(x) ? json_integer_value(x) : -1;
            const int32_t id32 = (int32_t)id;
            if (id < 0 || id >= g->vocab)
                FAILG(out, ERR_FORMAT, "%s: \"ids\"[%zu] is not a token id below %lld", where, i, (long long)g->vocab);
            text_ids_add(&v, &id32, 1);
        }
    } else if (prompt) {
        if (!json_is_string(prompt)) FAIL(ERR_FORMAT, "%s: \"prompt\" is not a string", where);
        TRYG(open_tokenizer(g, where), out);
        TRYG(tokenizer_encode(g->tok, json_string_value(prompt), json_string_length(prompt), true, &v), out);
    } else {
        TRYG(open_tokenizer(g, where), out);
        if (!g->chat) TRYG(chat_template_create(&g->chat, g->tok), out);
        json_t *request = json_pack("{s:O, s:b}", "messages", messages, "add_generation_prompt", 1);
        rc = chat_template_encode(g->chat, request, NULL, &v);
        json_decref(request);
        if (rc < 0) rc = err_wrap(rc, "%s", where);
    }
    if (rc == 0 && v.n == 0) rc = err_set(ERR_FORMAT, __FILE__, __LINE__, "%s: the prompt has no tokens", where);
out:
    if (rc < 0) {
        text_ids_free(&v);
        return rc;
    }
    q->ids = v.p;
    q->n_ids = v.n;
    return 0;
}

static int read_stop(const json_t *o, struct gen_request *q, const char *where) {
    const json_t *stop = json_object_get(o, "stop");
    if (!stop || json_is_null(stop)) return 0;
    const bool one = json_is_string(stop);
    const size_t n = one ? 1 : json_array_size(stop);
    if (!one && !json_is_array(stop)) FAIL(ERR_FORMAT, "%s: \"stop\" is neither a string nor an array of strings", where);
    q->stop = xcalloc(n, sizeof *q->stop);
    for (size_t i = 0; i < n; i++) {
        const json_t *s = one ? stop : json_array_get(stop, i);
        if (!json_is_string(s) || json_string_length(s) == 0)
            FAIL(ERR_FORMAT, "%s: \"stop\" has an entry that is not a string or is empty", where);
        q->stop[q->n_stop++] = xstrdup(json_string_value(s));
    }
    return 0;
}

static int read_line(void *arg, char *line, size_t n, int64_t no) {
    struct generation_state *g = arg;
    char where[48];
    json_t *o = NULL;
    int rc = 0;
    if (n == 0) return 0;
    snprintf(where, sizeof where, "stdin:%lld", (long long)no);
    TRY(json_parse(&o, line, n, where));
    struct gen_request q = {
        .no = no, .n = 1, .max_tokens = 128, .temperature = 1, .top_p = 1, .repetition_penalty = 1, .top_k = -1};
    if (!json_is_object(o)) FAILG(out, ERR_FORMAT, "%s: not an object", where);
    TRYG(json_i64_opt(o, "n", &q.n, where), out);
    TRYG(json_i64_opt(o, "max_tokens", &q.max_tokens, where), out);
    TRYG(json_f64_opt(o, "temperature", &q.temperature, where), out);
    TRYG(json_f64_opt(o, "top_p", &q.top_p, where), out);
    TRYG(json_f64_opt(o, "min_p", &q.min_p, where), out);
    TRYG(json_f64_opt(o, "repetition_penalty", &q.repetition_penalty, where), out);
    TRYG(json_i64_opt(o, "top_k", &q.top_k, where), out);
    TRYG(json_i64_opt(o, "seed", &q.seed, where), out);
    TRYG(json_bool_opt(o, "ignore_eos", &q.ignore_eos, where), out);
    if (q.n < 1 || q.n > 4096) FAILG(out, ERR_FORMAT, "%s: \"n\" is %lld; expected 1 to 4096", where, (long long)q.n);
    if (q.max_tokens < 1)
        FAILG(out, ERR_FORMAT, "%s: \"max_tokens\" is %lld; it must be at least 1", where, (long long)q.max_tokens);
    if (q.top_k < -1 || q.top_k > INT32_MAX)
        FAILG(out, ERR_FORMAT, "%s: \"top_k\" is %lld; expected -1 (all) or a count", where, (long long)q.top_k);
    TRYG(read_stop(o, &q, where), out);
    if (q.n_stop > 0) TRYG(open_tokenizer(g, where), out);
    TRYG(read_prompt(g, o, &q, where), out);
    if (q.max_tokens > g->max_pos - q.n_ids)
        FAILG(out, ERR_FORMAT, "%s: %lld prompt tokens and max_tokens %lld exceed the model's %lld positions", where,
              (long long)q.n_ids, (long long)q.max_tokens, (long long)g->max_pos);
    q.lines = xcalloc((size_t)q.n, sizeof *q.lines);
    xgrow((void **)&g->rq, &g->cap, g->n + 1, sizeof *g->rq);
    g->rq[g->n++] = q;
out:
    if (rc < 0) request_free(&q);
    json_decref(o);
    return rc;
}

/* Prints what is finished from the front. */
static int print_ready(struct generation_state *g) {
    while (g->next < g->n) {
        struct gen_request *q = &g->rq[g->next];
        if (g->next_sample == q->n) {
            g->next++;
            g->next_sample = 0;
            continue;
        }
        char *line = q->lines[g->next_sample];
        if (!line) break;
        q->lines[g->next_sample++] = NULL;
        const int rc = cmd_print_line(line, strlen(line));
        free(line);
        TRY(rc);
    }
    return cmd_flush();
}

static int on_sample(void *arg, const struct engine_sample *s) {
    struct generation_state *g = arg;
    const int64_t at = (int64_t)(intptr_t)s->user;
    struct gen_request *q = &g->rq[at];
    struct buf text = {0}, line = {0};
    int rc = 0;
    if (g->tok) TRYG(tokenizer_decode(g->tok, s->ids, s->n, true, &text), out);
    size_t n_text = text.n;
    if (s->text_bytes >= 0 && (size_t)s->text_bytes < n_text) n_text = (size_t)s->text_bytes;
    json_t *ids = json_array(), *logp = json_array();
    for (int64_t t = 0; t < s->n; t++) {
        json_array_append_new(ids, json_integer(s->ids[t]));
        json_array_append_new(logp, json_real(number_of_f32(s->logp[t])));
    }
    json_t *o =
        json_pack("{s:I, s:I, s:o, s:o, s:o, s:s}", "index", (json_int_t)at, "sample", (json_int_t)s->index, "ids", ids, "text",
                  json_stringn(text.p ? text.p : "", n_text), "logp", logp, "finish_reason", engine_finish_name(s->finish));
    if (!o) FAILG(out, ERR_INTERNAL, "a sample's text cannot be written as JSON");
    rc = json_dump_line(&line, o);
    json_decref(o);
    if (rc == 0) q->lines[s->index] = buf_take(&line);
    if (rc == 0) rc = print_ready(g);
out:
    buf_free(&text);
    buf_free(&line);
    return rc;
}

static int submit(struct generation_state *g, struct engine *e, const struct model_config *c) {
    const struct engine_stop_ids stop = engine_stop_ids(c, NULL);
    for (int64_t i = 0; i < g->n; i++) {
        const struct gen_request *q = &g->rq[i];
        const struct engine_request r = {.prompt = q->ids,
                                         .n_prompt = q->n_ids,
                                         .n = q->n,
                                         .max_tokens = q->max_tokens,
                                         .temperature = (float)q->temperature,
                                         .top_p = (float)q->top_p,
                                         .min_p = (float)q->min_p,
                                         .repetition_penalty = (float)q->repetition_penalty,
                                         .top_k = (int32_t)q->top_k,
                                         .seed = (uint64_t)q->seed,
                                         .ignore_eos = q->ignore_eos,
                                         .stop_ids = stop.id,
                                         .n_stop_ids = stop.n,
                                         .stop = (const char *const *)q->stop,
                                         .n_stop = q->n_stop,
                                         .user = (void *)(intptr_t)i};
        const int rc = engine_submit(e, &r, NULL);
        if (rc < 0) return err_wrap(rc == ERR_INVAL ? ERR_FORMAT : rc, "stdin:%lld", (long long)q->no);
    }
    return 0;
}

static int run(struct generation_state *g, struct dev *dev, enum dtype act, int64_t max_seqs, int64_t draft) {
    struct model *m = NULL;
    struct decoder *d = NULL;
    struct engine *e = NULL;
    int64_t longest = 1, samples = 0, most_prompt = 1, blocks = 0;
    int rc = 0;
    for (int64_t i = 0; i < g->n; i++) {
        const int64_t len = g->rq[i].n_ids + g->rq[i].max_tokens;
        longest = len > longest ? len : longest;
        most_prompt = g->rq[i].n_ids > most_prompt ? g->rq[i].n_ids : most_prompt;
        samples += g->rq[i].n;
        blocks += g->rq[i].n * ((len + KV_BLOCK_LEN - 1) / KV_BLOCK_LEN);
    }
    if (samples < max_seqs) max_seqs = samples;
    int64_t rows = max_seqs > 1024 ? max_seqs : 1024;
    if (rows > samples * most_prompt) rows = samples * most_prompt > max_seqs ? samples * most_prompt : max_seqs;
    const struct model_open_args o = {.dir = g->model_dir, .act = act, .flags = MODEL_INFER, .max_len = longest, .mtp = draft > 0};
    if (draft > 0 && g->adapter) FAIL(ERR_UNSUPPORTED, "unsupported --draft with --adapter: the model's MTP layer has none");
    TRYG(model_open(&m, dev, &o), out);
    if (g->adapter) TRYG(model_lora_load(m, g->adapter), out);
    const struct decoder_args limits = {.max_seqs = max_seqs, .max_rows = rows, .max_len = longest, .max_draft = draft};
    struct decoder_args a = decoder_size(dev, &m->cfg, m->act, &limits, dev->mem_total / 2);
    if (blocks < a.n_kv_blocks) a.n_kv_blocks = blocks;
    a.model = m;
    TRYG(decoder_open(&d, &a), out);
    const struct engine_config cfg = {.tok = g->tok, .done = on_sample, .done_arg = g};
    TRYG(decoder_engine(&e, d, &cfg), out);
    TRYG(submit(g, e, &m->cfg), out);
    TRYG(engine_run(e), out);
    rc = print_ready(g);
out:
    engine_destroy(e);
    decoder_close(d);
    model_close(m);
    return rc;
}

/* Whether the first argument is key=value, +key=value, ~key or a flag of Hydra: main_generation's command line. */
static bool takes_keys(int argc, char **argv) {
    if (argc < 2) return false;
    if (argv[1][0] != '-') return strchr(argv[1], '=') || argv[1][0] == '~';
    return strncmp(argv[1], "--config-", 9) == 0 || strcmp(argv[1], "--cfg") == 0;
}

int cmd_generate(int argc, char **argv) {
    if (takes_keys(argc, argv)) return cmd_generate_rows(argc, argv);
    const char *model = NULL, *adapter = NULL, *dtype = "bf16", *device = "auto";
    int64_t max_seqs = 256, threads = 0, draft = 0;
    const struct cmd_opt opts[] = {
        {"--model", CMD_STR, &model, "DIR", "Hugging Face model directory"},
        {"--adapter", CMD_STR, &adapter, "DIR", "peft adapter to put on it"},
        {"--dtype", CMD_STR, &dtype, "bf16|fp32", "compute dtype (bf16)"},
        {"--device", CMD_STR, &device, "NAME", CMD_DEVICE_HELP},
        {"--max-seqs", CMD_I64("int[1,2^24]"), &max_seqs, "N", "samples at a time (256); changes speed only"},
        {"--draft", CMD_I64(CMD_DRAFT), &draft, "N", "tokens that the MTP layer drafts at a time (0); changes speed only"},
        {"--threads", CMD_I64(CMD_THREADS), &threads, "N", "threads (all)"},
    };
    const struct cmd_spec spec =
        CMD_SPEC(opts, "verlc generate --model DIR [options] < requests.jsonl",
                 "A request: {\"prompt\" | \"messages\" | \"ids\", \"n\": 1, \"temperature\": 1, \"top_p\": 1, \"top_k\": -1,\n"
                 "\"min_p\": 0, \"repetition_penalty\": 1, \"max_tokens\": 128, \"stop\": [], \"seed\": 0}. One line a sample:\n"
                 "{\"index\", \"sample\", \"ids\", \"text\", \"logp\", \"finish_reason\"}. Temperature 0 is greedy.\n\n"
                 "With key=value arguments it is verl's main_generation: model.path=DIR data.path=IN.parquet\n"
                 "data.output_path=OUT.parquet data.n_samples=N ... (verlc generate --cfg job shows all keys).\n"
                 "With actor_rollout_ref.model.path=DIR data.train_files=IN data.output_path=OUT it is\n"
                 "main_generation_server, whose rows may have tools and agent loops (docs/agents.md).");
    enum dtype act;
    struct generation_state g = {0};
    struct dev dev = {0};
    struct model_config c = {0};
    char *dir = NULL;
    int rc = cmd_parse(&spec, argc, argv);
    if (rc != 0) return rc < 0 ? rc : 0;
    if (!model) FAIL(ERR_INVAL, "--model is missing; usage: %s", spec.usage);
    TRY(cmd_compute_dtype(dtype, &act));
    g.adapter = adapter;
    TRYG(run_model_dir(model, true, &dir), out);
    g.model_dir = dir;
    TRYG(model_config_load(&c, dir), out);
    g.vocab = c.vocab;
    g.max_pos = c.max_pos;
    char *file = file_join(dir, "tokenizer.json");
    if (file_exists(file)) rc = tokenizer_open(&g.tok, dir); /* without one, ids are answered with empty text */
    free(file);
    if (rc < 0) goto out;
    cmd_reads_stdin("requests, a JSON object a line, such as {\"prompt\": \"2 + 3 =\"}");
    TRYG(file_each_line("-", read_line, &g), out);
    if (g.n == 0) goto out;
    TRYG(dev_open_named(&dev, device, (int)threads, NULL), out);
    TRYG(run(&g, &dev, act, max_seqs, draft), out);
out:
    dev_close(&dev);
    for (int64_t i = 0; i < g.n; i++) request_free(&g.rq[i]);
    free(g.rq);
    chat_template_destroy(g.chat);
    tokenizer_close(g.tok);
    free(dir);
    model_config_free(&c);
    return rc;
}
