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
struct rank_spare {
    struct rank_group *g;
    struct rank_spare_pass pass[RANK_SPARE_PASSES];
    int n_passes;
    int (*done)(void *arg, int pass, int64_t tag, const float *x, int64_t n);
    void *arg;
    struct packed_seq *seqs; /* ids owned */
    int64_t *tags;
    int64_t n, cap, cap_tags;
    int64_t next[RANK_SPARE_PASSES];
    struct under_way *at; /* of each rank */
};

int rank_spare_open(struct rank_spare **out, struct rank_group *g, const struct rank_spare_pass *passes, int n,
                    int (*done)(void *arg, int pass, int64_t tag, const float *x, int64_t n), void *arg) {
    CHECK(n >= 1 && n <= RANK_SPARE_PASSES);
    struct rank_spare *s = *out = xcalloc(1, sizeof *s);
    *s = (struct rank_spare){.g = g, .n_passes = n, .done = done, .arg = arg, .at = xcalloc((size_t)g->n, sizeof *s->at)};
    memcpy(s->pass, passes, (size_t)n * sizeof *passes);
    return 0;
}

void rank_spare_close(struct rank_spare *s) {
    if (!s) return;
    for (int64_t i = 0; i < s->n; i++) free((void *)(uintptr_t)s->seqs[i].ids);
    free(s->seqs);
    free(s->tags);
    free(s->at);
    free(s);
}

void rank_spare_add(struct rank_spare *s, const int32_t *prompt, int64_t n_prompt, const int32_t *response, int64_t n,
                    int64_t tag) {
    int32_t *ids = xmalloc((size_t)(n_prompt + n) * sizeof *ids);
    memcpy(ids, prompt, (size_t)n_prompt * sizeof *ids);
    memcpy(ids + n_prompt, response, (size_t)n * sizeof *ids);
    xgrow((void **)&s->seqs, &s->cap, s->n + 1, sizeof *s->seqs);
    xgrow((void **)&s->tags, &s->cap_tags, s->n + 1, sizeof *s->tags);
    s->seqs[s->n] = (struct packed_seq){.ids = ids, .n = n_prompt + n, .first = n_prompt};
    s->tags[s->n++] = tag;
}

int rank_spare_start(struct rank_spare *s, int rank) {
    int p = 0;
    while (p < s->n_passes && s->next[p] == s->n) p++;
    if (p == s->n_passes) return 0;
    struct under_way *u = &s->at[rank];
    struct message m = message_new(false);
    int64_t tokens = 0;
    *u = (struct under_way){.pass = p, .lo = s->next[p], .hi = s->next[p]};
    while (u->hi < s->n && (u->hi == u->lo || tokens + s->seqs[u->hi].n <= PIECE)) tokens += s->seqs[u->hi++].n;
    s->next[p] = u->hi;
    json_t *args = json_pack("{s:i, s:b, s:b, s:b, s:b, s:i}", "role", s->pass[p].role, "may_stop", 1, "logp", !s->pass[p].value,
                             "sum_pi_sq", 0, "value", s->pass[p].value, "list", 0);
    json_object_update(m.head, args);
    json_decref(args);
    message_seqs(&m, s->seqs + u->lo, u->hi - u->lo);
    const int rc = rank_group_start(s->g, rank, "forward", &m);
    message_free(&m);
    return rc < 0 ? rc : 1;
}

int rank_spare_take(struct rank_spare *s, int rank, const struct hub_reply *reply) {
    const struct under_way u = s->at[rank];
    struct message_reader in = rank_group_reader(s->g, rank, reply);
    struct comm_bytes numbers;
    int64_t n = 0, at = 0;
    if (reply->n_arrays == 0) return 0; /* a stop was requested */
    for (int64_t i = u.lo; i < u.hi; i++) n += packed_seq_targets(&s->seqs[i]);
    TRY(message_next(&in, (size_t)n * sizeof(float), &numbers));
    for (int64_t i = u.lo; i < u.hi; i++) {
        const int64_t own = packed_seq_targets(&s->seqs[i]);
        TRY(s->done(s->arg, u.pass, s->tags[i], (const float *)numbers.p + at, own));
        at += own;
    }
    return 0;
}
