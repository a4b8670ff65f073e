/* idle_ranks.c - see idle_ranks.h. */
#include "ranks/idle_ranks.h"

#include "base/buf.h"
#include "base/err.h"

#include <stdlib.h>
#include <string.h>

/* Tokens of a call: the generation's end may have to wait for one. */
enum { PIECE = 8192 };

struct under_way {
    int pass;
    int64_t lo, hi; /* sequences; none: lo == hi */
};
struct idle_ranks {
    struct rank_group *g;
    struct worker_generation of;
    struct packed_seq *seqs; /* ids owned */
    int64_t *tags;
    int64_t n, cap, cap_tags;
    int64_t next[WORKER_IDLE_PASSES];
    struct under_way *at; /* of each rank */
};

struct idle_ranks *idle_ranks_open(struct rank_group *g, const struct worker_generation *of) {
    struct idle_ranks *s = xcalloc(1, sizeof *s);
    CHECK(of->n_passes >= 1 && of->n_passes <= WORKER_IDLE_PASSES);
    *s = (struct idle_ranks){.g = g, .of = *of, .at = xcalloc((size_t)g->n, sizeof *s->at)};
    return s;
}

void idle_ranks_close(struct idle_ranks *s) {
    if (!s) return;
    for (int64_t i = 0; i < s->n; i++) free((void *)(uintptr_t)s->seqs[i].ids);
    free(s->seqs);
    free(s->tags);
    free(s->at);
    free(s);
}

void idle_ranks_add(struct idle_ranks *s, const struct engine_sample *sample, int64_t tag) {
    const int64_t n_prompt = sample->n_prompt, n = sample->n;
    int32_t *ids = xmalloc((size_t)(n_prompt + n) * sizeof *ids);
    memcpy(ids, sample->prompt, (size_t)n_prompt * sizeof *ids);
    memcpy(ids + n_prompt, sample->ids, (size_t)n * sizeof *ids);
    xgrow((void **)&s->seqs, &s->cap, s->n + 1, sizeof *s->seqs);
    xgrow((void **)&s->tags, &s->cap_tags, s->n + 1, sizeof *s->tags);
    s->seqs[s->n] = (struct packed_seq){.ids = ids, .n = n_prompt + n, .first = n_prompt};
    s->tags[s->n++] = tag;
}

int idle_ranks_start(struct idle_ranks *s, int rank) {
    int p = 0;
    while (p < s->of.n_passes && s->next[p] == s->n) p++;
    if (p == s->of.n_passes) return 0;
    const struct worker_idle_pass *const pass = &s->of.passes[p];
    struct under_way *u = &s->at[rank];
    struct message m = message_new(false);
    int64_t tokens = 0;
    *u = (struct under_way){.pass = p, .lo = s->next[p], .hi = s->next[p]};
    while (u->hi < s->n && (u->hi == u->lo || tokens + s->seqs[u->hi].n <= PIECE)) tokens += s->seqs[u->hi++].n;
    s->next[p] = u->hi;
    json_t *args = json_pack("{s:i, s:s, s:b, s:b, s:b, s:b, s:i}", "role", pass->role, "phase", pass->phase, "may_stop", 1, "logp",
                             !pass->value, "sum_pi_sq", 0, "value", pass->value, "list", 0);
    json_object_update(m.head, args);
    json_decref(args);
    message_seqs(&m, s->seqs + u->lo, u->hi - u->lo, 0);
    const int rc = rank_group_start(s->g, rank, "forward", &m);
    message_free(&m);
    return rc < 0 ? rc : 1;
}

int idle_ranks_take(struct idle_ranks *s, int rank, const struct coordinator_reply *reply) {
    const struct under_way u = s->at[rank];
    struct message_reader in = rank_group_reader(s->g, rank, reply);
    struct comm_bytes numbers;
    int64_t n = 0, at = 0;
    if (reply->n_arrays == 0) return 0; /* a stop was requested */
    for (int64_t i = u.lo; i < u.hi; i++) n += packed_seq_targets(&s->seqs[i]);
    TRY(message_next(&in, (size_t)n * sizeof(float), &numbers));
    for (int64_t i = u.lo; i < u.hi; i++) {
        const int64_t own = packed_seq_targets(&s->seqs[i]);
        TRY(s->of.pass_done(s->of.arg, u.pass, s->tags[i], (const float *)numbers.p + at, own));
        at += own;
    }
    return 0;
}
