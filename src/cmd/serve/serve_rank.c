/* serve_rank.c - the calls of a rank of `verlc serve`: it opens the model, or its part, and makes steps of its engine.
 * Invariant: ranks that draw together make the same steps; what they have drawn is hashed, and the first of them reports it. */
#include "cmd/serve/serve_ranks.h"

#include "base/err.h"
#include "base/hash.h"
#include "base/json.h"
#include "base/log.h"
#include "cmd/serve/serve_tickets.h"
#include "ranks/launcher.h"
#include "ranks/worker_calls.h"

static struct {
    struct serve_model m;
    struct tokenizer *tok;
    struct serve_tickets *tickets;
} self;

static void close_all(void) {
    split_model_leave(&self.m.split);
    serve_tickets_destroy(self.tickets);
    serve_model_close(&self.m);
    tokenizer_close(self.tok);
}

static int read_args(const struct comm_call *call, struct serve_model_args *a, const char **device, int64_t *threads) {
    const json_t *const x = call->args;
    int64_t act;
    *a = (struct serve_model_args){0};
    TRY(json_str(x, "dir", &a->dir, call->name));
    TRY(json_str_opt(x, "adapter", &a->adapter, call->name));
    TRY(json_str(x, "device", device, call->name));
    TRY(json_i64(x, "act", &act, call->name));
    TRY(json_i64(x, "max_len", &a->max_len, call->name));
    TRY(json_i64(x, "max_seqs", &a->max_seqs, call->name));
    TRY(json_i64(x, "max_rows", &a->max_rows, call->name));
    TRY(json_i64(x, "max_draft", &a->max_draft, call->name));
    TRY(json_i64(x, "together", &a->together, call->name));
    TRY(json_i64(x, "threads", threads, call->name));
    a->act = (enum dtype)act;
    a->memory = json_number_value(json_object_get(x, "memory"));
    return 0;
}

static int open_all(struct comm *comm, const struct comm_call *call, struct ctl_result *out) {
    struct serve_model_args a;
    const char *device;
    int64_t threads;
    log_set_level(LOG_WARN); /* the controller logs what is to be logged once */
    rank_self()->comm = rank_self()->pool = comm;
    rank_self()->close = close_all;
    TRY(read_args(call, &a, &device, &threads));
    TRY(rank_open_device(call, &self.m.dev, device, (int)threads));
    TRY(tokenizer_open(&self.tok, a.dir));
    TRY(serve_model_open(&self.m, &a, comm));
    TRY(serve_tickets_create(&self.tickets, self.m.decoder, self.tok, NULL, NULL));
    out->value = json_pack("{s:I, s:I, s:I}", "max_len", (json_int_t)self.m.max_len, "weights", (json_int_t)self.m.weights, "kv",
                           (json_int_t)self.m.kv);
    rank_describe(out->value, &self.m.dev);
    return 0;
}

static int add(void *tickets, struct engine_request *q) {
    serve_tickets_submit(tickets, q, (uint64_t)(uintptr_t)q->user);
    return 0;
}

static int step(struct comm *comm, const struct comm_call *call, struct ctl_result *out) {
    struct message_reader in = {.head = call->args, .arrays = call->arrays, .n = call->n_arrays, .who = "the controller"};
    struct serve_tickets *const t = self.tickets;
    const int64_t *cancelled;
    int64_t n;
    (void)comm;
    TRY(message_read_requests(&in, add, t));
    TRY(message_items(&in, sizeof *cancelled, &n, (void **)&cancelled));
    for (int64_t i = 0; i < n; i++) serve_tickets_cancel(t, (uint64_t)cancelled[i]);
    TRY(serve_tickets_step(t));
    struct buf *const reports = serve_tickets_reports(t);
    const struct engine_stats stats = serve_tickets_stats(t);
    const uint64_t both[] = {hash64(reports->p, reports->n), hash64(&stats, sizeof stats)}, hash = hash64(both, sizeof both);
    struct message m = message_new(false);
    message_add(&m, &hash, sizeof hash);
    message_add(&m, &stats, sizeof stats);
    if (!self.m.split.together || comm_rank(self.m.split.together) == 0) message_add(&m, reports->p, reports->n);
    buf_reset(reports);
    *out = (struct ctl_result){m.head, m.arrays, m.n};
    return 0;
}

const struct worker_process_service serve_services[] = {{"serve_open", open_all}, {"serve_step", step}, {NULL, NULL}};

int serve_ranks_serve(const struct launch *l) {
    return rank_serve(l, ".", NULL, (const struct worker_process_service *const[]){serve_services, NULL});
}
