/* dispatch.c - see dispatch.h. */
#include "ranks/dispatch.h"

#include "base/err.h"
#include "base/json.h"
#include "base/log.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

/* A rank's share of a forward pass is sent in so many pieces at most, of so many tokens at least: the rank waits between two. */
enum { PIECES = 8, PIECE_TOKENS = 1 << 16 };

struct rank_share {
    int64_t open;                /* samples that it has or will get */
    struct request_list waiting; /* for its next call */
    struct engine_stats stats;
    enum { SLICE, INTERLEAVED, IDLE_PASS } call; /* the call under way, or the last one */
    bool cache_dropped;                          /* it has begun a pass, which took the KV cache's block */
    int64_t lo, hi;                              /* sequences of the piece under way */
    /* of the first of ranks that generate together: calls of a slice that are not answered, and what the first answer was */
    int answers;
    char hash[17];
    struct engine_stats same;
};

/* Ranks that generate as one; the first of them has their share. */
static int together(const struct rank_dispatch *d) { return d->together > 1 ? d->together : 1; }

/* Ranks that an interleaved call takes at once. */
static int interleaved_together(const struct rank_dispatch *d) { return d->interleaved.together > 1 ? d->interleaved.together : 1; }

void rank_dispatch_init(struct rank_dispatch *d, struct rank_group *g) {
    *d = (struct rank_dispatch){.g = g, .share = xcalloc((size_t)g->n, sizeof *d->share)};
}

static void drop_waiting(struct rank_dispatch *d) {
    for (int r = 0; d->share && r < d->g->n; r++) request_list_clear(&d->share[r].waiting);
}

void rank_dispatch_free(struct rank_dispatch *d) {
    drop_waiting(d);
    map_free(&d->home);
    free(d->share);
    *d = (struct rank_dispatch){0};
}

/* ---- generation ---- */

static int generate_begin(struct worker *w, const struct worker_generation *g) {
    struct rank_dispatch *const d = w->ranks->generates;
    for (int r = 0; r < d->g->n; r++) d->share[r] = (struct rank_share){0};
    d->to = *g;
    TRY(rank_group_plain_call(d->g, "generate_begin", json_object(), NULL));
    if (g->n_passes > 0 && d->g->n > 1 && together(d) == 1 && interleaved_together(d) == 1 && !w->disaggregated)
        d->idle = idle_ranks_open(d->g, g);
    return 0;
}

/* A response that continues goes where it was, as its K and V are there; another one to the least loaded. */
static int generate_add(struct worker *w, const struct engine_request *q) {
    struct rank_dispatch *const d = w->ranks->generates;
    const int64_t user = (int64_t)(intptr_t)q->user;
    struct rank_share *least = d->share;
    int64_t home;
    for (int r = together(d); r < d->g->n; r += together(d))
        if (d->share[r].open < least->open) least = &d->share[r];
    if (q->n_begun > 0 && map_get(&d->home, (const char *)&user, sizeof user, &home)) least = &d->share[home];
    else map_set(&d->home, (const char *)&user, sizeof user, least - d->share);
    CHECK(!least->cache_dropped); /* with d->idle all requests come before the first slice */
    request_list_add(&least->waiting, q);
    least->open += q->n;
    return 0;
}

static void idle_add(struct worker *w, const struct engine_sample *s, int64_t tag) {
    if (w->ranks->generates->idle) idle_ranks_add(w->ranks->generates->idle, s, tag);
}

/* Its requests, and a slice of generation, or the end of it. */
static int send_slice(struct rank_dispatch *d, int rank, bool interrupt) {
    struct rank_share *r = &d->share[rank];
    struct message m = message_new(true);
    message_requests(&m, &r->waiting);
    json_object_set_new(m.head, "interrupt", json_boolean(interrupt));
    int rc = 0;
    r->answers = 0;
    for (int i = 0; i < together(d) && rc == 0; i++) {
        d->share[rank + i].call = SLICE;
        rc = rank_group_start(d->g, rank + i, "generate", &m);
        r->answers += rc == 0;
    }
    message_free(&m);
    request_list_clear(&r->waiting);
    return rc;
}

static bool open_elsewhere(const struct rank_dispatch *d) {
    int64_t open = 0;
    for (int r = 0; r < d->g->n; r++) open += d->share[r].open;
    return open > 0;
}

static bool is_free(const struct rank_dispatch *d, int rank) { return !d->g->busy[rank] && d->share[rank].answers == 0; }

/* Where an interleaved call takes several ranks: in turns with generation, too. Where it is the next for all of them, those that
 * are free wait for the others. */
static int next_of_several(struct rank_dispatch *d, int rank) {
    const int n = interleaved_together(d), first = rank - rank % n;
    struct rank_share *const r = &d->share[rank];
    bool due = d->interleaved.due(d->interleaved.arg, first), all_free = true;
    for (int i = first; i < first + n; i++) {
        due &= d->share[i].call != INTERLEAVED || d->share[i].open == 0;
        all_free &= is_free(d, i);
    }
    if (due && !all_free) return 0;
    if (due) {
        for (int i = first; i < first + n; i++) d->share[i].call = INTERLEAVED;
        const int started = d->interleaved.start(d->interleaved.arg, first);
        return started < 0 ? started : 0;
    }
    for (int i = rank; i < rank + together(d); i++)
        if (!is_free(d, i)) return 0;
    return r->open > 0 ? send_slice(d, rank, false) : 0;
}

/* The rank's next call: interleaved ones in turns with generation; without samples of its own, an idle rank's pass. */
static int next_call(struct rank_dispatch *d, int rank) {
    struct rank_share *r = &d->share[rank];
    if (interleaved_together(d) > 1) return next_of_several(d, rank);
    if (d->interleaved.start && (r->call != INTERLEAVED || r->open == 0)) {
        const int started = d->interleaved.start(d->interleaved.arg, rank);
        TRY(started);
        r->call = INTERLEAVED;
        if (started > 0) return 0;
    }
    r->call = SLICE;
    if (r->open > 0) return send_slice(d, rank, false);
    if (!d->idle || !open_elsewhere(d)) return 0;
    r->call = IDLE_PASS;
    const int started = idle_ranks_start(d->idle, rank);
    TRY(started);
    r->cache_dropped |= started > 0;
    return 0;
}

/* Ranks that generate together have drawn the same: the answer against the first one of this slice. */
static int compare(struct rank_dispatch *d, int rank, const struct message_reader *in, const void *stats) {
    struct rank_share *const r = &d->share[rank - rank % together(d)];
    const char *hash;
    TRY(json_str(in->head, "hash", &hash, in->who));
    if (r->answers == together(d)) {
        snprintf(r->hash, sizeof r->hash, "%s", hash);
        memcpy(&r->same, stats, sizeof r->same);
        return 0;
    }
    if (strcmp(hash, r->hash) == 0 && memcmp(stats, &r->same, sizeof r->same) == 0) return 0;
    FAIL(ERR_INPUT, "%s: it has drawn other tokens than the ranks that it generates with", in->who);
}

static int take_reply(struct rank_dispatch *d, int rank, const struct coordinator_reply *reply) {
    if (d->share[rank].call == IDLE_PASS) {
        TRY(idle_ranks_take(d->idle, rank, reply));
        return d->interrupting ? 0 : next_call(d, rank);
    }
    if (d->share[rank].call == INTERLEAVED) {
        TRY(d->interleaved.take(d->interleaved.arg, rank, reply));
        return d->interrupting ? 0 : next_call(d, interleaved_together(d) > 1 ? rank - rank % together(d) : rank);
    }
    struct message_reader in = rank_group_reader(d->g, rank, reply);
    const int first = rank - rank % together(d);
    struct rank_share *r = &d->share[first];
    struct comm_bytes stats;
    TRY(message_next(&in, sizeof r->stats, &stats));
    if (together(d) > 1) TRY(compare(d, rank, &in, stats.p));
    r->stats = *(const struct engine_stats *)stats.p;
    r->open -= message_n_samples(&in);
    r->answers--;
    if (!d->interrupting && r->answers == 0) TRY(next_call(d, first)); /* before the samples are read, so that no rank waits */
    return message_read_samples(&in, d->to.done, d->to.arg);
}

/* The answers of all calls under way. */
static int take_all(struct rank_dispatch *d) {
    for (int r = 0; r < d->g->n; r++)
        while (d->g->busy[r]) {
            struct coordinator_reply reply;
            int rank;
            const int got = rank_group_take(d->g, RANK_SLICE_S, &rank, &reply);
            TRY(got);
            rank_group_heartbeat(d->g, NULL);
            if (got == 0) continue;
            const int rc = take_reply(d, rank, &reply);
            coordinator_reply_free(&reply);
            TRY(rc);
        }
    return 0;
}

static int interrupt(struct rank_dispatch *d) {
    TRY(take_all(d));
    for (int r = 0; r < d->g->n; r += together(d)) {
        d->share[r].call = SLICE;
        if (d->share[r].open > 0) TRY(send_slice(d, r, true));
    }
    return take_all(d);
}

static int generate_interrupt(struct worker *w) {
    struct rank_dispatch *const d = w->ranks->generates;
    d->interrupting = true; /* no further slices */
    const int rc = interrupt(d);
    d->interrupting = false;
    return rc;
}

int rank_dispatch_step(struct rank_dispatch *d, bool wait) {
    struct coordinator_reply reply;
    int rank, more = 0;
    for (int r = 0, each = d->to.done ? together(d) : 1; r < d->g->n; r += each)
        if (!d->g->busy[r] && d->share[r].answers == 0) TRY(next_call(d, r));
    for (double most = wait ? 0.05 : 0;; most = 0) { /* all that have answered by now */
        const int got = rank_group_take(d->g, most, &rank, &reply);
        TRY(got);
        if (got == 0) break;
        const int rc = take_reply(d, rank, &reply);
        coordinator_reply_free(&reply);
        TRY(rc);
    }
    for (int r = 0; r < d->g->n; r++) more |= d->share[r].open > 0 || (d->g->busy[r] && d->share[r].call == IDLE_PASS);
    return more;
}

static int generate_step(struct worker *w, bool wait) { return rank_dispatch_step(w->ranks->generates, wait); }

static struct engine_stats generate_stats(struct worker *w) {
    const struct rank_dispatch *const d = w->ranks->generates;
    struct engine_stats sum = {0};
    for (int r = 0; r < d->g->n; r++) {
        const struct engine_stats *x = &d->share[r].stats;
        const double most = sum.n_kv_blocks ? (double)sum.kv_blocks_peak / (double)sum.n_kv_blocks : 0;
        sum.running += d->share[r].open; /* including requests that were not sent yet */
        sum.finished += x->finished;
        sum.rows += x->rows;
        sum.sampled += x->sampled;
        sum.steps += x->steps;
        sum.bursts += x->bursts;
        sum.cached_rows += x->cached_rows;
        sum.preempted += x->preempted;
        sum.kv_blocks_used += x->kv_blocks_used;
        if (x->n_kv_blocks == 0 || (double)x->kv_blocks_peak / (double)x->n_kv_blocks < most) continue;
        sum.kv_blocks_peak = x->kv_blocks_peak; /* of the rank with the fullest cache */
        sum.n_kv_blocks = x->n_kv_blocks;
    }
    if (sum.n_kv_blocks == 0) sum.n_kv_blocks = 1;
    return sum;
}

static void generate_end(struct worker *w) {
    struct rank_dispatch *const d = w->ranks->generates;
    struct err_saved why;
    if (!d->to.done) return;
    err_save(&why);
    rank_group_drain(d->g);
    drop_waiting(d);
    for (int r = 0; r < d->g->n; r++) d->share[r].answers = 0;
    if (rank_group_plain_call(d->g, "generate_end", json_object(), NULL) < 0) log_debug("%s", err_msg()); /* the group has ended */
    idle_ranks_close(d->idle);
    d->idle = NULL;
    map_free(&d->home);
    d->to = (struct worker_generation){0};
    err_restore(&why);
}

/* ---- the end of an overlapped update ---- */

static int join(struct worker *w) {
    const struct worker_update *const u = w->ranks->updating;
    struct batch none = {0};
    struct coordinator_reply *replies;
    if (!u) return 0;
    struct rank_group *const g = w->ranks->has[u->role]->g;
    w->ranks->updating = NULL;
    int rc = rank_group_take_all(g, u->name, &replies);
    if (rc == 0) rc = rank_group_updated(g, replies, &none);
    rank_group_free(g, replies);
    batch_free(&none);
    return rc;
}

/* ---- forward passes ---- */

struct pass {
    const struct worker_pass *p;
    json_t *args;       /* of the call */
    int64_t next, done; /* sequences: the first not sent, done */
    int64_t *target;    /* (n + 1): the first target of each */
    int64_t *row;       /* (n + 1): its first token */
    int64_t share;      /* tokens of a piece */
    int open;           /* calls under way */
    int context;        /* consecutive ranks that get the same sequences; the first of them answers */
};

/* Sends the sequences from the first not sent up to `end` to a rank, and to those that share their rows with it. */
static int send_seqs(struct rank_dispatch *d, struct pass *p, int rank, int64_t end) {
    const int64_t lo = p->next;
    struct message m = message_new(false);
    int rc = 0;
    json_object_update(m.head, p->args);
    message_seqs(&m, p->p->seqs + lo, end - lo, p->p->words);
    for (int i = 0; i < p->context && rank + i < d->g->n && rc == 0; i++) {
        d->share[rank + i].lo = i == 0 ? lo : end;
        d->share[rank + i].hi = end;
        json_object_set_new(m.head, "answers", json_boolean(i == 0));
        rc = rank_group_start(d->g, rank + i, "forward", &m);
        p->open += rc == 0;
    }
    p->next = end;
    message_free(&m);
    return rc;
}

static int send_piece(struct rank_dispatch *d, struct pass *p, int rank) {
    int64_t end = p->next, tokens = 0;
    while (end < p->p->n && (end == p->next || tokens + p->p->seqs[end].n <= p->share)) tokens += p->p->seqs[end++].n;
    return send_seqs(d, p, rank, end);
}

/* Sends each rank, or those that share rows, its share of the tokens, which may be empty. Ranks that are left over have none. */
static int send_shares(struct rank_dispatch *d, struct pass *p, int64_t tokens) {
    const int groups = d->g->n / p->context;
    int64_t end = 0, sum = 0;
    for (int i = 0; i <= groups && i * p->context < d->g->n; i++) {
        const int64_t most = i < groups ? (int64_t)((__int128)tokens * (i + 1) / groups) : tokens;
        while (end < p->p->n && sum + p->p->seqs[end].n <= most) sum += p->p->seqs[end++].n;
        TRY(send_seqs(d, p, i * p->context, end));
    }
    return 0;
}

static int take_pass(struct rank_dispatch *d, const struct pass *p, int rank, const struct coordinator_reply *reply) {
    const struct rank_share *r = &d->share[rank];
    const int64_t target = p->target[r->lo], n_targets = p->target[r->hi] - target, row = p->row[r->lo];
    const int64_t n_rows = p->row[r->hi] - row;
    const struct forward_out *const out = &p->p->out;
    struct message_reader in = rank_group_reader(d->g, rank, reply);
    const struct {
        void *to;
        int64_t per, at, n;
    } arrays[] = {{out->logp, 1, target, n_targets},
                  {out->sum_pi_sq, 1, target, n_targets},
                  {out->value, 1, target, n_targets},
                  {out->list ? out->list->top_id : NULL, p->p->k, target, n_targets},
                  {out->list ? out->list->top_logp : NULL, p->p->k, target, n_targets},
                  {out->routes, p->p->words, row, n_rows}};
    for (int i = 0; i < 6; i++) {
        struct comm_bytes a;
        const int64_t at = arrays[i].at, n = arrays[i].n;
        if (!arrays[i].to) continue;
        TRY(message_next(&in, (size_t)(n * arrays[i].per) * 4, &a));
        memcpy((char *)arrays[i].to + at * arrays[i].per * 4, a.p, a.n);
    }
    return 0;
}

static json_t *pass_args(const struct worker_pass *p) {
    const struct forward_out *const out = &p->out;
    return json_pack("{s:i, s:s, s:b, s:b, s:b, s:b, s:I, s:I}", "role", p->role, "phase", p->phase, "may_stop", !phase_stop_held(),
                     "logp", out->logp != NULL, "sum_pi_sq", out->sum_pi_sq != NULL, "value", out->value != NULL, "list",
                     (json_int_t)(out->list ? p->k : 0), "routes", (json_int_t)(out->routes ? p->words : 0));
}

/* Sends what comes first, then the others as the ranks answer. */
static int run_pass(struct rank_dispatch *d, struct pass *p, bool collective, int64_t tokens) {
    const struct worker_pass *const a = p->p;
    if (collective) TRY(send_shares(d, p, tokens));
    else
        for (int r = 0; r < d->g->n && p->next < a->n; r++) TRY(send_piece(d, p, r));
    while (p->open > 0) {
        struct coordinator_reply reply;
        int rank;
        const int got = rank_group_take(d->g, RANK_SLICE_S, &rank, &reply);
        int rc = got < 0 ? got : phase_check_stop();
        if (got > 0 && rc == 0) rc = take_pass(d, p, rank, &reply);
        if (got > 0) coordinator_reply_free(&reply);
        TRY(rc);
        rank_group_heartbeat(d->g, collective ? a->phase : NULL);
        if (got == 0) continue;
        p->open--;
        p->done += d->share[rank].hi - d->share[rank].lo;
        if (p->next < a->n) TRY(send_piece(d, p, rank));
        phase_progress(a->at, a->phase, p->done, a->n, 0);
    }
    return 0;
}

static int forward(struct worker *w, const struct worker_pass *a) {
    struct rank_dispatch *const d = w->ranks->has[a->role];
    int64_t tokens = 0;
    if (w->ranks->own[a->role]) TRY(join(w));
    struct pass p = {.p = a,
                     .args = pass_args(a),
                     .context = w->context[a->role] > 1 ? w->context[a->role] : 1,
                     .target = xcalloc((size_t)(a->n + 1), sizeof *p.target),
                     .row = xcalloc((size_t)(a->n + 1), sizeof *p.row)};
    for (int64_t i = 0; i < a->n; i++) {
        p.target[i + 1] = p.target[i] + packed_seq_targets(&a->seqs[i]);
        p.row[i + 1] = tokens += a->seqs[i].n;
    }
    const int64_t own = tokens / d->g->n + 1, pieces = own / PIECE_TOKENS;
    p.share = own / (pieces < 1 ? 1 : pieces > PIECES ? PIECES : pieces) + 1;
    const int rc = run_pass(d, &p, w->collective[a->role], tokens);
    if (rc < 0) rank_group_drain(d->g);
    json_decref(p.args);
    free(p.target);
    free(p.row);
    return rc;
}

/* ---- updates ---- */

static int update(struct worker *w, const struct worker_update *u, struct run *run, struct batch *b) {
    struct worker_ranks *const r = w->ranks;
    struct rank_group *const g = r->has[u->role]->g;
    const bool overlapped = r->own[u->role];
    struct message m = message_new(true);
    struct coordinator_reply *replies;
    int rc = overlapped ? join(w) : 0;
    json_object_set_new(m.head, "update", json_string(u->name));
    json_object_set_new(m.head, "step", json_integer((json_int_t)run->step));
    json_object_set_new(m.head, "may_stop", json_boolean(!overlapped && !phase_stop_held()));
    message_columns(&m, b, u->reads);
    g->steps = -1;
    if (u->role == WORKER_POLICY) r->stale = true;
    if (rc == 0 && overlapped) {
        rc = rank_group_start_all(g, "update", &m);
        r->updating = rc == 0 ? u : NULL;
    } else if (rc == 0) {
        rc = rank_group_call(g, "update", u->name, &m, &replies);
        if (rc == 0) rc = rank_group_updated(g, replies, b);
        rank_group_free(g, replies);
    }
    message_free(&m);
    return rc;
}

static int send_weights(struct worker *w) {
    struct worker_ranks *const r = w->ranks;
    struct coordinator_reply *replies;
    if (!r->weight_sync || !r->stale) return 0;
    struct message m = message_new(true);
    int rc = rank_group_call(r->weight_sync, "send_weights", NULL, &m, &replies);
    if (rc == 0) rc = rank_group_same(r->weight_sync, replies, "sum", "checksum of the weights");
    rank_group_free(r->weight_sync, replies);
    r->stale = rc < 0;
    message_free(&m);
    return rc;
}

/* ---- the run around it ---- */

static int ready(struct worker *w, struct run *run) {
    (void)run;
    return rank_group_plain_call(&w->ranks->all, "ready", json_object(), NULL);
}

static int memory(struct worker *w, struct run *run, const char *prefix) {
    return rank_group_memory(&w->ranks->all, &run->metrics, prefix);
}

static void checkpoints(struct worker *w, struct checkpoints *out) {
    struct checkpoints trainer, own;
    rank_group_checkpoints(w->ranks->has[WORKER_POLICY]->g, &trainer);
    *out = trainer;
    for (int i = 0; i < WORKER_ROLES; i++) {
        if (!w->ranks->own[i]) continue;
        rank_group_checkpoints(w->ranks->has[i]->g, &own);
        checkpoints_joint(out, &own, &trainer);
    }
}

static int export_policy(struct worker *w, const char *dir) {
    struct rank_group *const g = w->ranks->has[WORKER_POLICY]->g;
    return rank_group_plain_call(g, "export_policy", json_pack("{s:s}", "dir", dir), NULL);
}

static int trace(struct worker *w, const char *path) {
    return rank_group_plain_call(&w->ranks->all, "trace", json_pack("{s:s?}", "path", path), NULL);
}

static const struct worker_ops on_ranks = {.send_weights = send_weights,
                                           .generate_begin = generate_begin,
                                           .generate_add = generate_add,
                                           .generate_step = generate_step,
                                           .generate_interrupt = generate_interrupt,
                                           .generate_stats = generate_stats,
                                           .generate_end = generate_end,
                                           .idle_add = idle_add,
                                           .forward = forward,
                                           .update = update,
                                           .join = join,
                                           .ready = ready,
                                           .memory = memory,
                                           .checkpoints = checkpoints,
                                           .export_policy = export_policy,
                                           .trace = trace};

int dispatch_open(struct worker *w, struct worker_ranks *r, const struct rank_group_args *a, const char *open, json_t *more,
                  json_t **results) {
    w->ops = &on_ranks;
    w->ranks = r;
    TRY(rank_group_open(&r->all, a, open, more, results));
    rank_dispatch_init(&r->dispatch, &r->all);
    r->generates = &r->dispatch;
    for (int i = 0; i < WORKER_ROLES; i++) r->has[i] = &r->dispatch;
    w->n_ranks = r->all.n;
    w->device = r->all.device;
    w->own_memory = r->all.own_memory;
    return 0;
}

void dispatch_close(struct worker_ranks *r, bool ok) {
    rank_dispatch_free(&r->dispatch);
    rank_group_close(&r->all, ok);
}
