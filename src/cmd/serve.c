/* serve.c - `verlc serve`: a model behind OpenAI's and Anthropic's HTTP interfaces, until SIGINT or SIGTERM.
 *
 * The engine runs on this thread, where the device was opened; the HTTP server, templates and tokens to text on another.
 * Invariant: a request that was accepted is answered, or its connection closed, before the command ends. */
#include "cmd/cmd.h"

#include "base/buf.h"
#include "base/clock.h"
#include "base/err.h"
#include "base/file.h"
#include "base/json.h"
#include "base/log.h"
#include "cmd/serve_engine.h"
#include "model/files/load.h"
#include "model/lora/lora.h"
#include "run/directories.h"
#include "serve/serve.h"

#include <pthread.h>
#include <stdlib.h>
#include <string.h>
#include <sys/resource.h>

enum { MAX_BODY = 8 << 20, LOG_S = 10, LAST_WORDS_S = 2, MAX_BURST = 8 };

struct options {
    const char *model, *adapter, *dtype, *device, *name, *host, *tool_parser;
    int64_t port, threads, max_len, max_seqs, max_rows, max_queue, max_connections, drain_s, draft;
    double memory;
    bool token;
};
struct serving {
    struct options o;
    char *dir;
    enum dtype act;
    struct model_config config;
    struct dev dev;
    struct model *model;
    struct decoder *decoder;
    struct tokenizer *tok;
    struct serve_engine *engine;
    struct serve *serve;
    struct http_server *http;
    double drain_until; /* clock_awake; 0: not asked to end */
    double last_log;
    int64_t last_tokens;
};

/* ---- the server's thread ---- */

static void end_when_answered(struct serving *g) {
    if (g->drain_until > 0 && (!http_server_is_busy(g->http) || clock_awake() > g->drain_until)) http_server_stop(g->http);
}

static void on_request(void *arg, struct http_exchange *x) { serve_request(((struct serving *)arg)->serve, x); }
static void on_refused(void *arg, struct http_exchange *x, int status, const char *message) {
    serve_refused(((struct serving *)arg)->serve, x, status, message);
}

static void on_woken(void *arg) {
    struct serving *g = arg;
    if (!serve_engine_deliver(g->engine, g->serve) && g->drain_until <= 0) {
        g->drain_until = clock_awake() + LAST_WORDS_S;
        http_server_drain(g->http);
    }
}

/* What goes on, while something does. */
static void log_progress(struct serving *g) {
    const struct serve_counts c = serve_counts(g->serve);
    const double now = clock_now();
    if (now - g->last_log < LOG_S) return;
    struct engine_stats e;
    const struct serve_backend b = serve_engine_backend(g->engine);
    b.stats(b.ctx, &e);
    if (c.open > 0 || c.tokens > g->last_tokens)
        log_info(
            "serve: %lld open requests, %lld samples running, %lld waiting, %.0f tokens/s, KV cache %.0f%%, %lld requests done",
            (long long)c.open, (long long)e.running, (long long)e.waiting,
            (double)(c.tokens - g->last_tokens) / (now - g->last_log),
            100 * (double)e.kv_blocks_used / (double)(e.n_kv_blocks > 0 ? e.n_kv_blocks : 1), (long long)c.requests);
    g->last_log = now;
    g->last_tokens = c.tokens;
}

static void on_tick(void *arg) {
    struct serving *g = arg;
    serve_tick(g->serve);
    log_progress(g);
    end_when_answered(g);
}

/* The first one lets requests be answered, the second does not wait for that. */
static void on_signal(void *arg) {
    struct serving *g = arg;
    const bool again = g->drain_until > 0;
    if (again) {
        http_server_stop(g->http);
        return;
    }
    g->drain_until = clock_awake() + (double)g->o.drain_s;
    if (serve_open(g->serve) > 0)
        log_info("serve: %lld requests are open; they have %lld s, or end at another signal", (long long)serve_open(g->serve),
                 (long long)g->o.drain_s);
    serve_drain(g->serve);
    http_server_drain(g->http); /* on_tick ends it */
}

static void *server_thread(void *arg) {
    struct serving *g = arg;
    http_server_run(g->http);
    serve_engine_stop(g->engine);
    return NULL;
}

/* ---- opening ---- */

/* A model's directory, a checkpoint's, or a hub id. */
static int find_model(struct serving *g) {
    char *local = file_expand(g->o.model), *merged = cmd_merged_model(local);
    const int rc = merged ? 0 : run_model_dir(g->o.model, true, &g->dir);
    if (merged) g->dir = merged;
    free(local);
    return rc;
}

static int64_t least(int64_t a, int64_t b) { return a < b ? a : b; }

static int open_model(struct serving *g) {
    const int64_t max_len = g->o.max_len > 0 ? g->o.max_len : g->config.max_pos;
    const struct model_open_args o = {
        .dir = g->dir, .act = g->act, .flags = MODEL_INFER, .max_len = max_len, .mtp = g->o.draft > 0};
    if (g->o.draft > 0 && g->o.adapter) FAIL(ERR_UNSUPPORTED, "unsupported --draft with --adapter: the model's MTP layer has none");
    if (max_len > g->config.max_pos)
        FAIL(ERR_INVAL, "--max-model-len %lld: the model has %lld positions", (long long)max_len, (long long)g->config.max_pos);
    TRY(model_open(&g->model, &g->dev, &o));
    if (g->o.adapter) TRY(model_lora_load(g->model, g->o.adapter));
    const int64_t rows = g->o.max_rows > g->o.max_seqs ? g->o.max_rows : g->o.max_seqs;
    const struct decoder_args limits = {.max_seqs = g->o.max_seqs, .max_rows = rows, .max_len = max_len, .max_draft = g->o.draft};
    struct decoder_args least_kv = decoder_size(&g->dev, &g->model->cfg, g->model->act, &limits, 0);
    const size_t other = model_open_bytes(&g->model->cfg, &g->dev, &o) + decoder_bytes(&g->model->cfg, g->model->act, &least_kv);
    const size_t share = (size_t)(g->o.memory * (double)g->dev.mem_total);
    struct decoder_args a = decoder_size(&g->dev, &g->model->cfg, g->model->act, &limits, share > other ? share - other : 0);
    a.max_burst = least(a.max_burst, MAX_BURST); /* a request that comes within a burst waits for its end */
    a.model = g->model;
    TRY(decoder_open(&g->decoder, &a));
    TRY(serve_engine_create(&g->engine, g->decoder, g->tok));
    const struct serve_args s = {.backend = serve_engine_backend(g->engine),
                                 .tok = g->tok,
                                 .model = g->o.name ? g->o.name : g->o.model,
                                 .tool_format = g->o.tool_parser,
                                 .stop = engine_stop_ids(&g->model->cfg, g->tok),
                                 .max_len = least(max_len, a.n_kv_blocks * KV_BLOCK_LEN),
                                 .max_open = g->o.max_seqs + g->o.max_queue};
    return serve_create(&g->serve, &s);
}

/* Each connection is a file. */
static void raise_file_limit(int64_t n) {
    struct rlimit l;
    if (getrlimit(RLIMIT_NOFILE, &l) < 0 || (l.rlim_cur != RLIM_INFINITY && l.rlim_cur >= (rlim_t)n)) return;
    l.rlim_cur = l.rlim_max == RLIM_INFINITY || l.rlim_max >= (rlim_t)n ? (rlim_t)n : l.rlim_max;
    (void)!setrlimit(RLIMIT_NOFILE, &l);
}

static int listen_on(struct serving *g) {
    const char *key = getenv("VERLC_API_KEY");
    raise_file_limit(g->o.max_connections + 512);
    const struct http_server_args a = {.host = g->o.host,
                                       .port = g->o.port,
                                       .token = g->o.token,
                                       .key = key && *key ? key : NULL,
                                       .open_path = "/health",
                                       .max_connections = g->o.max_connections,
                                       .max_of_peer = g->o.max_connections,
                                       .max_body = MAX_BODY,
                                       .request_s = 30,
                                       .answer_s = 24 * 3600,
                                       .serve = on_request,
                                       .refused = on_refused,
                                       .signalled = on_signal,
                                       .woken = on_woken,
                                       .tick = on_tick,
                                       .arg = g};
    TRY(http_server_open(&g->http, &a));
    serve_engine_attach(g->engine, g->http);
    return 0;
}

static int say_where(const struct serving *g) {
    struct buf line = {0};
    char *url = xasprintf("%s/v1", http_server_address(g->http));
    json_t *o = json_pack("{s:s, s:s}", "url", url, "model", g->o.name ? g->o.name : g->o.model);
    if (*http_server_token(g->http)) json_object_set_new(o, "api_key", json_string(http_server_token(g->http)));
    int rc = json_dump_line(&line, o);
    if (rc == 0) rc = cmd_print_line(line.p, line.n);
    if (rc == 0) rc = cmd_flush();
    json_decref(o);
    free(url);
    buf_free(&line);
    return rc;
}

static int run(struct serving *g) {
    pthread_t server;
    if (pthread_create(&server, NULL, server_thread, g) != 0) FAIL(ERR_NOMEM, "no thread for the server");
    int rc = say_where(g);
    if (rc == 0) rc = serve_engine_run(g->engine);
    else serve_engine_fail(g->engine);
    pthread_join(server, NULL);
    return rc;
}

static void close_all(struct serving *g) {
    http_server_close(g->http);
    serve_destroy(g->serve);
    serve_engine_destroy(g->engine);
    decoder_close(g->decoder);
    model_close(g->model);
    dev_close(&g->dev);
    tokenizer_close(g->tok);
    model_config_free(&g->config);
    free(g->dir);
}

static int serve(struct serving *g) {
    TRY(cmd_compute_dtype(g->o.dtype, &g->act));
    TRY(find_model(g));
    TRY(model_config_load(&g->config, g->dir));
    TRY(tokenizer_open(&g->tok, g->dir));
    TRY(dev_open_named(&g->dev, g->o.device, (int)g->o.threads, NULL));
    TRY(open_model(g));
    TRY(listen_on(g));
    return run(g);
}

int cmd_serve(int argc, char **argv) {
    struct serving g = {.o = {.dtype = "bf16",
                              .device = "auto",
                              .host = "127.0.0.1",
                              .port = 8000,
                              .max_seqs = 256,
                              .max_rows = 2048,
                              .max_queue = 1024,
                              .max_connections = 2048,
                              .drain_s = 60,
                              .memory = 0.9}};
    struct options *o = &g.o;
    int n = 0;
    const struct cmd_opt opts[] = {
        {"--port", CMD_I64("int[0,65535]"), &o->port, "N", "the port (8000); 0: any free one"},
        {"--host", CMD_STR, &o->host, "ADDRESS", "listen there (127.0.0.1); beyond this machine an API key is required"},
        {"--token", CMD_FLAG, &o->token, NULL, "ask for an API key on 127.0.0.1 too; VERLC_API_KEY sets which"},
        {"--name", CMD_STR, &o->name, "NAME", "the model's name for clients (MODEL)"},
        {"--adapter", CMD_STR, &o->adapter, "DIR", "peft adapter to put on it"},
        {"--tool-parser", CMD_STR, &o->tool_parser, "NAME", "format of tool calls (as the chat template shows them)"},
        {"--dtype", CMD_STR, &o->dtype, "bf16|fp32", "compute dtype (bf16)"},
        {"--device", CMD_STR, &o->device, "NAME", CMD_DEVICE_HELP},
        {"--threads", CMD_I64(CMD_THREADS), &o->threads, "N", "threads (all)"},
        {"--max-model-len", CMD_I64("int[0,2^28]"), &o->max_len, "N", "tokens of prompt and answer (the model's positions)"},
        {"--max-num-seqs", CMD_I64("int[1,2^20]"), &o->max_seqs, "N", "samples drawn at a time (256)"},
        {"--max-num-batched-tokens", CMD_I64("int[1,2^20]"), &o->max_rows, "N", "tokens of one step (2048)"},
        {"--draft", CMD_I64(CMD_DRAFT), &o->draft, "N", "tokens that the MTP layer drafts at a time (0); changes speed only"},
        {"--max-queue", CMD_I64("int[0,2^20]"), &o->max_queue, "N", "samples that wait (1024); beyond them status 429"},
        {"--max-connections", CMD_I64("int[16,65536]"), &o->max_connections, "N", "connections (2048)"},
        {"--memory", CMD_F64("float(0,1]"), &o->memory, "F", "share of the device's memory for weights and KV cache (0.9)"},
        {"--drain", CMD_I64("int[0,86400]"), &o->drain_s, "S", "seconds for open requests after SIGTERM (60)"}};
    struct cmd_spec spec =
        CMD_SPEC(opts, "verlc serve MODEL [options]",
                 "A model behind HTTP: OpenAI's chat completions, completions and models, Anthropic's messages and\n"
                 "count_tokens. MODEL is a model directory, a checkpoint's (global_step_N) or a hub id. When it listens it\n"
                 "prints one JSON line: {\"url\": \"http://127.0.0.1:8000/v1\", \"model\": NAME}. Ctrl-C lets open requests\n"
                 "be answered and ends it. /health and /metrics (Prometheus). docs/serve.md says what is supported.");
    spec.operands = &o->model;
    spec.max_operands = 1;
    spec.n_operands = &n;
    const int answered = cmd_parse(&spec, argc, argv);
    if (answered != 0) return answered < 0 ? answered : 0;
    if (n == 0) FAIL(ERR_INVAL, "MODEL is missing; usage: %s", spec.usage);
    const int rc = serve(&g);
    close_all(&g);
    return rc;
}
