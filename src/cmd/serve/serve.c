/* serve.c - `verlc serve`: a model behind OpenAI's and Anthropic's HTTP interfaces, until SIGINT or SIGTERM.
 *
 * The engine runs on this thread, where the device was opened, or the ranks (serve_ranks.h); the HTTP server, templates and tokens
 * to text on another.
 * Invariant: a request that was accepted is answered, or its connection closed, before the command ends. */
#include "cmd/cmd.h"

#include "base/buf.h"
#include "base/clock.h"
#include "base/err.h"
#include "base/file.h"
#include "base/json.h"
#include "base/log.h"
#include "cmd/serve/serve_ranks.h"
#include "cmd/serve/serve_tickets.h"
#include "ranks/launcher.h"
#include "run/directories.h"
#include "serve/serve.h"

#include <pthread.h>
#include <stdlib.h>
#include <string.h>
#include <sys/resource.h>

extern char **environ;

enum { MAX_BODY = 8 << 20, LOG_S = 10, LAST_WORDS_S = 2 };
static const double FLUSH_S = 0.004; /* a burst's parts are passed on as they come, but not more often */

struct options {
    const char *model, *adapter, *dtype, *device, *name, *host, *tool_parser;
    int64_t port, threads, max_len, max_seqs, max_rows, max_queue, max_connections, drain_s, draft, together, copies;
    double memory;
    bool token, plan;
    const char *gpu; /* to plan for; NULL: what is there */
};
struct serving {
    struct options o;
    char *dir;
    enum dtype act;
    struct model_config config;
    struct tokenizer *tok;
    struct serve_engine *engine;
    /* what draws: this process, or ranks */
    struct serve_model model;
    struct serve_tickets *tickets;
    struct serve_ranks ranks;
    double flushed; /* clock_now */
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

/* ---- on this process' device ---- */

static void flush(struct serving *g) {
    struct buf *const reports = serve_tickets_reports(g->tickets);
    const struct engine_stats stats = serve_tickets_stats(g->tickets);
    g->flushed = clock_now();
    serve_engine_report(g->engine, reports->p, reports->n, &stats);
    buf_reset(reports);
}

static int on_part(void *arg) {
    struct serving *g = arg;
    if (clock_now() - g->flushed > FLUSH_S) flush(g);
    return 0;
}

static void submit_here(void *ctx, const struct engine_request *r, uint64_t ticket) {
    serve_tickets_submit(((struct serving *)ctx)->tickets, r, ticket);
}
static void cancel_here(void *ctx, uint64_t ticket) { serve_tickets_cancel(((struct serving *)ctx)->tickets, ticket); }
static int step_here(void *ctx) {
    struct serving *g = ctx;
    const int more = serve_tickets_step(g->tickets);
    flush(g);
    return more;
}

static int open_here(struct serving *g, const struct serve_model_args *a) {
    TRY(dev_open_named(&g->model.dev, g->o.device, (int)g->o.threads, NULL));
    TRY(serve_model_open(&g->model, a, NULL));
    return serve_tickets_create(&g->tickets, g->model.decoder, g->tok, on_part, g);
}

/* ---- the model ---- */

static bool on_ranks(const struct serving *g) { return g->o.together * g->o.copies > 1; }

static struct serve_ranks_args model_args(const struct serving *g) {
    const struct options *const o = &g->o;
    const struct serve_model_args a = {.dir = g->dir,
                                       .adapter = o->adapter,
                                       .act = g->act,
                                       .max_len = o->max_len,
                                       .max_seqs = o->max_seqs,
                                       .max_rows = o->max_rows,
                                       .max_draft = o->draft,
                                       .together = o->together,
                                       .memory = o->memory};
    return (struct serve_ranks_args){.model = a, .device = o->device, .copies = o->copies, .threads = o->threads};
}

static int open_model(struct serving *g) {
    const struct options *const o = &g->o;
    const struct serve_ranks_args ranks = model_args(g);
    if (o->draft > 0 && o->adapter) FAIL(ERR_UNSUPPORTED, "unsupported --draft with --adapter: the model's MTP layer has none");
    g->engine = serve_engine_create();
    const int rc = on_ranks(g) ? serve_ranks_open(&g->ranks, &ranks, g->engine) : open_here(g, &ranks.model);
    if (rc == ERR_NOMEM)
        return err_append(rc, "; %s--tensor-parallel-size N splits the model over N GPUs", on_ranks(g) ? "a larger " : "");
    TRY(rc);
    const struct serve_args s = {.backend = serve_engine_backend(g->engine),
                                 .tok = g->tok,
                                 .model = o->name ? o->name : o->model,
                                 .tool_format = o->tool_parser,
                                 .stop = engine_stop_ids(&g->config, g->tok),
                                 .max_len = on_ranks(g) ? g->ranks.max_len : g->model.max_len,
                                 .max_open = o->max_seqs * o->copies + o->max_queue};
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
    const struct serve_source here = {.ctx = g, .submit = submit_here, .cancel = cancel_here, .step = step_here};
    const struct serve_source source = on_ranks(g) ? serve_ranks_source(&g->ranks) : here;
    int rc = say_where(g);
    if (rc == 0) rc = serve_engine_run(g->engine, &source);
    else serve_engine_fail(g->engine);
    pthread_join(server, NULL);
    return rc;
}

static void close_all(struct serving *g, bool ok) {
    http_server_close(g->http);
    serve_destroy(g->serve);
    serve_ranks_close(&g->ranks, ok);
    serve_tickets_destroy(g->tickets);
    serve_model_close(&g->model);
    serve_engine_destroy(g->engine);
    tokenizer_close(g->tok);
    model_config_free(&g->config);
    free(g->dir);
}

static int plan(struct serving *g) {
    const struct serve_ranks_args a = model_args(g);
    int64_t gpu = 0;
    if (g->o.gpu) TRY(cmd_gpu_bytes("--gpu", g->o.gpu, &gpu));
    return serve_plan(&a, &g->config, gpu);
}

static int serve(struct serving *g) {
    TRY(cmd_compute_dtype(g->o.dtype, &g->act));
    TRY(find_model(g));
    TRY(model_config_load(&g->config, g->dir));
    if (g->o.plan) return plan(g);
    TRY(tokenizer_open(&g->tok, g->dir));
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
                              .memory = 0.9,
                              .together = 1,
                              .copies = 1}};
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
        {"--tensor-parallel-size", CMD_I64("int[1,16]"), &o->together, "N", "ranks, a GPU each, that have the model together (1)"},
        {"--data-parallel-size", CMD_I64("int[1,64]"), &o->copies, "N",
         "whole copies of it, on so many ranks or groups of them (1)"},
        {"--memory", CMD_F64("float(0,1]"), &o->memory, "F", "share of the device's memory for weights and KV cache (0.9)"},
        {"--plan", CMD_FLAG, &o->plan, NULL, "print the memory that it takes, and whether it fits, and serve nothing"},
        {"--gpu", CMD_STR, &o->gpu, "NAME|SIZE", "with --plan: for such a GPU, which need not be there: H100, 80GB"},
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
    if (o->gpu && !o->plan) FAIL(ERR_INVAL, "--gpu goes with --plan");
    struct launch l;
    TRY(launch_read(&l, environ));
    if (!on_ranks(&g) && l.size > 1)
        FAIL(ERR_INVAL, "%s started %d processes: --tensor-parallel-size and --data-parallel-size say what they are for", l.by,
             l.size);
    if (workers_started_this(&l)) return serve_ranks_serve(&l);
    const int rc = serve(&g);
    close_all(&g, rc == 0);
    return rc;
}
