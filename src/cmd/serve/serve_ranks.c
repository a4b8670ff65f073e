/* serve_ranks.c - see serve_ranks.h: the controller's end. */
#include "cmd/serve/serve_ranks.h"

#include "base/err.h"
#include "base/json.h"
#include "base/log.h"
#include "cmd/serve/serve_tickets.h"
#include "ranks/launcher.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

extern char **environ;

/* The longest wait for a reply while another group may get a request. */
#define REPLY_S 0.002

struct serve_group {              /* ranks that draw together */
    struct request_list requests; /* for its next call */
    int64_t *cancelled, n_cancelled, cap_cancelled;
    int64_t n_new;             /* samples of those requests */
    struct engine_stats stats; /* of the last answer */
    int answers;               /* that are not here yet, of the call under way */
    uint64_t hash;             /* of the first one */
};

static int64_t open_samples(const struct serve_group *h) { return h->stats.waiting + h->stats.running + h->n_new; }

static void submit(void *ctx, const struct engine_request *r, uint64_t ticket) {
    struct serve_ranks *const s = ctx;
    struct serve_group *least = s->groups;
    struct engine_request own = *r;
    for (struct serve_group *h = s->groups; h < s->groups + s->n_groups; h++)
        if (open_samples(h) < open_samples(least)) least = h;
    own.user = (void *)(uintptr_t)ticket;
    request_list_add(&least->requests, &own);
    least->n_new += r->n;
}

/* Whose it is the groups know. */
static void cancel(void *ctx, uint64_t ticket) {
    struct serve_ranks *const s = ctx;
    for (struct serve_group *h = s->groups; h < s->groups + s->n_groups; h++) {
        xgrow((void **)&h->cancelled, &h->cap_cancelled, h->n_cancelled + 1, sizeof *h->cancelled);
        h->cancelled[h->n_cancelled++] = (int64_t)ticket;
    }
}

/* A step of its ranks, with what has been ordered since. */
static int send_step(struct serve_ranks *s, int group) {
    struct serve_group *const h = &s->groups[group];
    struct message m = message_new(true);
    int rc = 0;
    message_requests(&m, &h->requests);
    message_add(&m, h->cancelled, (size_t)h->n_cancelled * sizeof *h->cancelled);
    for (int i = 0; i < s->together && rc == 0; i++) {
        rc = rank_group_start(&s->g, group * s->together + i, "serve_step", &m);
        h->answers += rc == 0;
    }
    message_free(&m);
    request_list_clear(&h->requests);
    h->stats.waiting += h->n_new; /* until its answer */
    h->n_new = h->n_cancelled = 0;
    return rc;
}

static void report(struct serve_ranks *s, const struct comm_bytes *reports) {
    struct engine_stats sum = {0};
    for (const struct serve_group *h = s->groups; h < s->groups + s->n_groups; h++) {
        sum.waiting += h->stats.waiting;
        sum.running += h->stats.running;
        sum.kv_blocks_used += h->stats.kv_blocks_used;
        sum.n_kv_blocks += h->stats.n_kv_blocks;
    }
    serve_engine_report(s->to, reports->p, reports->n, &sum);
}

static int take_answer(struct serve_ranks *s, int rank, const struct coordinator_reply *reply) {
    struct serve_group *const h = &s->groups[rank / s->together];
    struct message_reader in = rank_group_reader(&s->g, rank, reply);
    struct comm_bytes hash, stats, reports;
    TRY(message_next(&in, sizeof h->hash, &hash));
    TRY(message_next(&in, sizeof h->stats, &stats));
    if (h->answers-- == s->together) memcpy(&h->hash, hash.p, sizeof h->hash);
    if (memcmp(&h->hash, hash.p, sizeof h->hash) != 0)
        FAIL(ERR_INPUT, "%s: it has drawn other tokens than the ranks that it serves with", in.who);
    if (rank % s->together != 0) return 0;
    TRY(message_next(&in, SIZE_MAX, &reports));
    memcpy(&h->stats, stats.p, sizeof h->stats);
    TRY(serve_reports_read(reports.p, reports.n, NULL));
    report(s, &reports);
    return 0;
}

/* Groups with samples make steps again and again; those without are asked once a second whether they are still there. */
static int step(void *ctx) {
    struct serve_ranks *const s = ctx;
    bool idle = true;
    for (const struct serve_group *h = s->groups; h < s->groups + s->n_groups; h++)
        idle &= h->answers == 0 && open_samples(h) == 0 && h->n_cancelled == 0;
    for (int i = 0; i < s->n_groups; i++) {
        const struct serve_group *const h = &s->groups[i];
        if (h->answers == 0 && (idle || open_samples(h) > 0 || h->n_cancelled > 0)) TRY(send_step(s, i));
    }
    for (double most = REPLY_S;; most = 0) { /* all that have answered by now */
        struct coordinator_reply reply;
        int rank;
        const int got = rank_group_take(&s->g, most, &rank, &reply);
        TRY(got);
        if (got == 0) break;
        const int rc = take_answer(s, rank, &reply);
        coordinator_reply_free(&reply);
        TRY(rc);
    }
    bool more = false;
    for (const struct serve_group *h = s->groups; h < s->groups + s->n_groups; h++) more |= h->answers > 0 || open_samples(h) > 0;
    return more;
}

struct serve_source serve_ranks_source(struct serve_ranks *s) {
    return (struct serve_source){.ctx = s, .submit = submit, .cancel = cancel, .step = step};
}

/* ---- opening ---- */

static json_t *open_args(const struct serve_ranks_args *a) {
    const struct serve_model_args *const m = &a->model;
    return json_pack("{s:s, s:s?, s:s, s:i, s:I, s:I, s:I, s:I, s:I, s:f, s:I}", "dir", m->dir, "adapter", m->adapter, "device",
                     a->device, "act", (int)m->act, "max_len", (json_int_t)m->max_len, "max_seqs", (json_int_t)m->max_seqs,
                     "max_rows", (json_int_t)m->max_rows, "max_draft", (json_int_t)m->max_draft, "together",
                     (json_int_t)m->together, "memory", m->memory, "threads", (json_int_t)a->threads);
}

/* Before processes are started: whether the model can be split so. */
static int check_split(const struct serve_ranks_args *a) {
    struct model_config c;
    int64_t len;
    if (a->model.max_draft > 0 && a->model.together > 1)
        FAIL(ERR_UNSUPPORTED, "unsupported --draft with --tensor-parallel-size %lld: an MTP layer is each rank's own",
             (long long)a->model.together);
    TRY(model_config_load(&c, a->model.dir));
    int rc = serve_model_length(&a->model, &c, &len);
    const char *const why = a->model.together > 1 ? model_tp_unable(&c, QUANT_NONE, (int)a->model.together) : NULL;
    if (rc == 0 && why)
        rc = err_set(ERR_UNSUPPORTED, __FILE__, __LINE__, "unsupported --tensor-parallel-size %lld of this model: %s",
                     (long long)a->model.together, why);
    model_config_free(&c);
    return rc;
}

static int take_opened(struct serve_ranks *s, const json_t *results) {
    double weights = 0, kv = 0;
    for (int r = 0; r < s->g.n; r++) {
        const json_t *const x = json_array_get(results, (size_t)r);
        const char *const who = coordinator_who(s->g.coordinator, r);
        int64_t max_len, bytes;
        TRY(json_i64(x, "max_len", &max_len, who));
        s->max_len = r == 0 || max_len < s->max_len ? max_len : s->max_len;
        TRY(json_i64(x, "weights", &bytes, who));
        weights = (double)bytes > weights ? (double)bytes : weights;
        TRY(json_i64(x, "kv", &bytes, who));
        kv = (double)bytes > kv ? (double)bytes : kv;
    }
    if (s->together > 1)
        log_info("tensor parallel: %d ranks have the model together; on each %.2f GiB of weights and passes, %.2f GiB of KV cache",
                 s->together, weights / 0x1p30, kv / 0x1p30);
    if (s->n_groups > 1) log_info("data parallel: %d copies of the model", s->n_groups);
    return 0;
}

int serve_ranks_open(struct serve_ranks *s, const struct serve_ranks_args *a, struct serve_engine *to) {
    struct launch l;
    json_t *results = NULL;
    TRY(check_split(a));
    TRY(launch_read(&l, environ));
    const int64_t ranks = a->model.together * a->copies;
    if (l.by && l.size != ranks)
        FAIL(ERR_INVAL, "%s started %d processes, and --tensor-parallel-size times --data-parallel-size are %lld", l.by, l.size,
             (long long)ranks);
    const struct rank_group_args g = {.ranks = (int)ranks, .dir = "."};
    TRY(rank_group_open(&s->g, &g, "serve_open", open_args(a), &results));
    s->to = to;
    s->together = (int)a->model.together;
    s->n_groups = s->g.n / s->together;
    s->groups = xcalloc((size_t)s->n_groups, sizeof *s->groups);
    const int rc = take_opened(s, results);
    json_decref(results);
    return rc;
}

void serve_ranks_close(struct serve_ranks *s, bool ok) {
    for (int i = 0; i < s->n_groups; i++) {
        request_list_clear(&s->groups[i].requests);
        free(s->groups[i].cancelled);
    }
    free(s->groups);
    rank_group_close(&s->g, ok);
    *s = (struct serve_ranks){0};
}
