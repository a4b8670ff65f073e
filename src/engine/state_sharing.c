/* state_sharing.c - samples of a prompt compute it once, where the model has states (gated delta nets). The one in front leads: it
 * stops at the end of the prompt's last whole KV block. The others, which have been admitted and wait, get a copy of its state,
 * with the rows of an open chunk, and share its KV blocks; the rows after that each computes itself. A leader that is preempted is
 * waited for no longer.
 *
 * Invariant: sharing changes which rows are computed, never a token. */
#include "engine/engine_int.h"

#include "base/err.h"

/* Rows of a prompt that its samples share: whole KV blocks, and one row at least is left. */
static int64_t shared_rows(const struct request *q) { return (q->n_prompt - 1) / KV_BLOCK_LEN * KV_BLOCK_LEN; }

void engine__lead_or_follow(struct engine *e, struct sample *s) {
    struct request *const q = s->req;
    const struct sample *const next = e->waiting.head == s ? s->next : e->waiting.head;
    if (!e->shares_states || shared_rows(q) == 0) return;
    if (q->leader) {
        s->follows = true;
        s->promised = engine__blocks_for(s->n_tokens) - shared_rows(q) / KV_BLOCK_LEN;
        e->promised += s->promised;
    } else if (next && next->req == q) {
        q->leader = s;
    }
}

void engine__stop_following(struct engine *e, struct sample *s) {
    e->promised -= s->promised;
    s->promised = 0;
    s->follows = false;
}

void engine__stop_leading(struct engine *e, struct sample *s) {
    struct request *const q = s->req;
    if (q->leader != s) return;
    q->leader = NULL;
    for (struct sample *o = e->running.head; o; o = o->next)
        if (o->req == q) engine__stop_following(e, o);
}

int64_t engine__until_shared(const struct sample *s, int64_t take) {
    const int64_t left = shared_rows(s->req) - s->n_computed;
    return s->req->leader == s && take > left ? left : take;
}

void engine__share_state(struct engine *e, struct sample *s) {
    struct request *const q = s->req;
    if (q->leader != s || s->n_computed < shared_rows(q)) return;
    for (struct sample *o = e->running.head; o; o = o->next) {
        if (o->req != q || !o->follows) continue;
        for (int64_t i = 0; i < s->n_computed / KV_BLOCK_LEN; i++) engine__share_block(e, o, s->blocks[i]);
        o->n_computed = s->n_computed;
        if (o->n_preempted == 0) o->n_cached = o->n_computed;
        e->stats.cached_rows += o->n_computed;
        e->copy_from[e->n_copies] = s->state;
        e->copy_to[e->n_copies++] = o->state;
    }
    engine__stop_leading(e, s);
}

int engine__copy_states(struct engine *e) {
    const int64_t n = e->n_copies;
    e->n_copies = 0;
    return n ? e->model.copy_states(e->model.ctx, n, e->copy_from, e->copy_to) : 0;
}
