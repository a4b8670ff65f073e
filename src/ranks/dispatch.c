/* dispatch.c - see dispatch.h. */
#include "ranks/dispatch.h"

#include "base/err.h"
#include "base/log.h"

#include <stdlib.h>
#include <string.h>

/* A rank's share of a forward pass is sent in so many pieces at most, of so many tokens at least: the rank waits between two. */
enum { PIECES = 8, PIECE_TOKENS = 1 << 16 };

struct rank_share {
    int64_t open;                /* samples that it has or will get */
    struct request_list waiting; /* for its next call */
    struct rollout_stats stats;
    enum { SLICE, BETWEEN, IDLE_PASS } call; /* the call under way, or the last one */
    bool cache_dropped;                      /* it has begun a pass, which took the KV cache's block */
    int64_t lo, hi;                          /* sequences of the piece under way */
};

void rank_dealing_init(struct rank_dealing *d, struct rank_group *g) {
    *d = (struct rank_dealing){.g = g, .share = xcalloc((size_t)g->n, sizeof *d->share)};
}

static void drop_waiting(struct rank_dealing *d) {
    for (int r = 0; d->share && r < d->g->n; r++) request_list_clear(&d->share[r].waiting);
}

void rank_dealing_free(struct rank_dealing *d) {
    drop_waiting(d);
    free(d->share);
    *d = (struct rank_dealing){0};
}

/* ---- generation ---- */

int rank_generate_begin(struct rank_dealing *d, const struct rollout_config *c) {
    for (int r = 0; r < d->g->n; r++) d->share[r] = (struct rank_share){0};
    d->to = c;
    return rank_group_plain_call(d->g, "generate_begin", json_object(), NULL);
}

void rank_generate_add(struct rank_dealing *d, const struct rollout_request *q) {
    struct rank_share *least = d->share;
    for (int r = 1; r < d->g->n; r++)
        if (d->share[r].open < least->open) least = &d->share[r];
    CHECK(!least->cache_dropped); /* with d->idle all requests come before the first slice */
    request_list_add(&least->waiting, q);
    least->open += q->n;
}

/* Its requests, and a slice of generation, or the end of it. */
static int generate(struct rank_dealing *d, int rank, bool interrupt) {
    struct rank_share *r = &d->share[rank];
    struct message m = message_new(true);
    message_requests(&m, &r->waiting);
    json_object_set_new(m.head, "interrupt", json_boolean(interrupt));
    const int rc = rank_group_start(d->g, rank, "generate", &m);
    message_free(&m);
    request_list_clear(&r->waiting);
    return rc;
}

static bool open_elsewhere(const struct rank_dealing *d) {
    int64_t open = 0;
    for (int r = 0; r < d->g->n; r++) open += d->share[r].open;
    return open > 0;
}

/* The rank's next call: of `between` in turns with generation; without samples of its own, an idle rank's pass. */
static int next_call(struct rank_dealing *d, int rank) {
    struct rank_share *r = &d->share[rank];
    if (d->between.start && (r->call != BETWEEN || r->open == 0)) {
        const int started = d->between.start(d->between.arg, rank);
        TRY(started);
        r->call = BETWEEN;
        if (started > 0) return 0;
    }
    r->call = SLICE;
    if (r->open > 0) return generate(d, rank, false);
    if (!d->idle || !open_elsewhere(d)) return 0;
    r->call = IDLE_PASS;
    const int started = rank_spare_start(d->idle, rank);
    TRY(started);
    r->cache_dropped |= started > 0;
    return 0;
}

static int take_reply(struct rank_dealing *d, int rank, const struct hub_reply *reply) {
    if (d->share[rank].call == IDLE_PASS) {
        TRY(rank_spare_take(d->idle, rank, reply));
        return d->interrupting ? 0 : next_call(d, rank);
    }
    if (d->share[rank].call == BETWEEN) {
        TRY(d->between.take(d->between.arg, rank, reply));
        return d->interrupting ? 0 : next_call(d, rank);
    }
    struct message_reader in = rank_group_reader(d->g, rank, reply);
    struct rank_share *r = &d->share[rank];
    struct comm_bytes stats;
    TRY(message_next(&in, sizeof r->stats, &stats));
    r->stats = *(const struct rollout_stats *)stats.p;
    r->open -= message_n_samples(&in);
    if (!d->interrupting) TRY(next_call(d, rank)); /* before the samples are read, so that the rank does not wait */
    return message_read_samples(&in, d->to->done, d->to->done_arg);
}

/* The answers of all calls under way. */
static int take_all(struct rank_dealing *d) {
    for (int r = 0; r < d->g->n; r++)
        while (d->g->busy[r]) {
            struct hub_reply reply;
            int rank;
            const int got = rank_group_take(d->g, RANK_SLICE_S, &rank, &reply);
            TRY(got);
            rank_group_look_around(d->g, NULL);
            if (got == 0) continue;
            const int rc = take_reply(d, rank, &reply);
            hub_reply_free(&reply);
            TRY(rc);
        }
    return 0;
}

static int interrupt(struct rank_dealing *d) {
    TRY(take_all(d));
    for (int r = 0; r < d->g->n; r++) {
        d->share[r].call = SLICE;
        if (d->share[r].open > 0) TRY(generate(d, r, true));
    }
    return take_all(d);
}

int rank_generate_interrupt(struct rank_dealing *d) {
    d->interrupting = true; /* no further slices */
    const int rc = interrupt(d);
    d->interrupting = false;
    return rc;
}

int rank_generate_step(struct rank_dealing *d, bool wait) {
    struct hub_reply reply;
    int rank, more = 0;
    for (int r = 0; r < d->g->n; r++)
        if (!d->g->busy[r]) TRY(next_call(d, r));
    for (double most = wait ? 0.05 : 0;; most = 0) { /* all that have answered by now */
        const int got = rank_group_take(d->g, most, &rank, &reply);
        TRY(got);
        if (got == 0) break;
        const int rc = take_reply(d, rank, &reply);
        hub_reply_free(&reply);
        TRY(rc);
    }
    for (int r = 0; r < d->g->n; r++) more |= d->share[r].open > 0 || (d->g->busy[r] && d->share[r].call == IDLE_PASS);
    return more;
}

struct rollout_stats rank_generate_stats(const struct rank_dealing *d) {
    struct rollout_stats sum = {0};
    for (int r = 0; r < d->g->n; r++) {
        const struct rollout_stats *x = &d->share[r].stats;
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

void rank_generate_end(struct rank_dealing *d) {
    struct err_saved why;
    if (!d->to) return;
    err_save(&why);
    rank_group_drain(d->g);
    drop_waiting(d);
    if (rank_group_plain_call(d->g, "generate_end", json_object(), NULL) < 0) log_debug("%s", err_msg()); /* the group has ended */
    d->to = NULL;
    err_restore(&why);
}

/* ---- forward passes ---- */

struct pass {
    const json_t *args;
    const struct packed_seq *seqs;
    int64_t n, next, done, k; /* sequences: all, the first not sent, done; tokens of a list */
    int64_t *target;          /* (n + 1): the first target of each */
    int64_t share;            /* tokens of a piece */
    int open;                 /* calls under way */
    struct forward_out out;
};

/* Sends the sequences from the first not sent up to `end`. */
static int send_seqs(struct rank_dealing *d, struct pass *p, int rank, int64_t end) {
    struct rank_share *r = &d->share[rank];
    struct message m = message_new(false);
    r->lo = p->next;
    r->hi = p->next = end;
    json_object_update(m.head, (json_t *)(uintptr_t)p->args);
    message_seqs(&m, p->seqs + r->lo, r->hi - r->lo);
    const int rc = rank_group_start(d->g, rank, "forward", &m);
    message_free(&m);
    p->open += rc == 0;
    return rc;
}

static int send_piece(struct rank_dealing *d, struct pass *p, int rank) {
    int64_t end = p->next, tokens = 0;
    while (end < p->n && (end == p->next || tokens + p->seqs[end].n <= p->share)) tokens += p->seqs[end++].n;
    return send_seqs(d, p, rank, end);
}

/* Sends each rank its share of the tokens, which may be empty. */
static int send_shares(struct rank_dealing *d, struct pass *p, int64_t tokens) {
    int64_t end = 0, sum = 0;
    for (int r = 0; r < d->g->n; r++) {
        const int64_t most = (int64_t)((__int128)tokens * (r + 1) / d->g->n);
        while (end < p->n && sum + p->seqs[end].n <= most) sum += p->seqs[end++].n;
        TRY(send_seqs(d, p, r, end));
    }
    return 0;
}

static int take_pass(struct rank_dealing *d, const struct pass *p, int rank, const struct hub_reply *reply) {
    const struct rank_share *r = &d->share[rank];
    const int64_t at = p->target[r->lo], n = p->target[r->hi] - at;
    struct message_reader in = rank_group_reader(d->g, rank, reply);
    const struct {
        void *to;
        int64_t per;
    } arrays[] = {{p->out.logp, 1},
                  {p->out.sum_pi_sq, 1},
                  {p->out.value, 1},
                  {p->out.list ? p->out.list->top_id : NULL, p->k},
                  {p->out.list ? p->out.list->top_logp : NULL, p->k}};
    for (int i = 0; i < 5; i++) {
        struct comm_bytes a;
        if (!arrays[i].to) continue;
        TRY(message_next(&in, (size_t)(n * arrays[i].per) * 4, &a));
        memcpy((char *)arrays[i].to + at * arrays[i].per * 4, a.p, a.n);
    }
    return 0;
}

static void add_args(const struct rank_forward_args *a) {
    json_object_set_new(a->args, "may_stop", json_boolean(!stage_stop_held()));
    json_object_set_new(a->args, "logp", json_boolean(a->out.logp != NULL));
    json_object_set_new(a->args, "sum_pi_sq", json_boolean(a->out.sum_pi_sq != NULL));
    json_object_set_new(a->args, "value", json_boolean(a->out.value != NULL));
    json_object_set_new(a->args, "list", json_integer(a->out.list ? (json_int_t)a->k : 0));
}

int rank_forward(struct rank_dealing *d, const struct rank_forward_args *a) {
    struct rank_group *g = d->g;
    const int64_t n = a->n;
    struct pass p = {
        .args = a->args, .seqs = a->seqs, .n = n, .k = a->k, .out = a->out, .target = xmalloc((size_t)(n + 1) * sizeof *p.target)};
    int64_t tokens = 0;
    int rc = 0;
    add_args(a);
    p.target[0] = 0;
    for (int64_t i = 0; i < n; i++) {
        p.target[i + 1] = p.target[i] + packed_seq_targets(&a->seqs[i]);
        tokens += a->seqs[i].n;
    }
    const int64_t own = tokens / g->n + 1, pieces = own / PIECE_TOKENS;
    p.share = own / (pieces < 1 ? 1 : pieces > PIECES ? PIECES : pieces) + 1;
    if (a->collective) TRYG(send_shares(d, &p, tokens), out);
    for (int r = 0; r < g->n && p.next < n; r++) TRYG(send_piece(d, &p, r), out);
    while (p.open > 0) {
        struct hub_reply reply;
        int rank;
        const int got = rank_group_take(g, RANK_SLICE_S, &rank, &reply);
        rc = got < 0 ? got : stage_check_stop();
        if (got > 0 && rc == 0) rc = take_pass(d, &p, rank, &reply);
        if (got > 0) hub_reply_free(&reply);
        if (rc < 0) break;
        rank_group_look_around(g, a->collective ? a->phase : NULL);
        if (got == 0) continue;
        p.open--;
        p.done += d->share[rank].hi - d->share[rank].lo;
        if (p.next < n) TRYG(send_piece(d, &p, rank), out);
        progress_report(a->at, a->phase, p.done, n, 0);
    }
out:
    if (rc < 0) rank_group_drain(g);
    free(p.target);
    return rc;
}
