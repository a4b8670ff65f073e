/* decode_burst.c - multi-step decode bursts.  A burst is several decode steps that the device makes in a
 * row, feeding each sampled token to the next step itself; the host sees the tokens afterwards.  It is for
 * devices on which a round trip to the host for each token would cost as much as the token.
 *
 * A burst is possible when every running sample lacks exactly its last token and no waiting sample can be
 * admitted.  KV blocks for all its steps are allocated beforehand.  Results are copied out in parts, while
 * the device makes the next part.  A sample that ends within a burst idles until the burst is over; tokens
 * after a stop string are dropped.  No block changes its owner within a burst.
 *
 * Invariant: a burst changes when tokens are drawn, never which. */
#include "engine/engine_int.h"

#include "base/buf.h"
#include "base/err.h"

#include <string.h>

bool engine__all_decode(const struct engine *e) {
    for (const struct sample *s = e->running.head; s; s = s->next)
        if (s->n_tokens - s->n_computed != 1 || !engine__plain_rule(s)) return false;
    return e->running.n > 0;
}
bool engine__only_decode(const struct engine *e) {
    const bool room = e->running.n < e->cfg.max_seqs && !e->no_room;
    return !(e->waiting.head && room) && engine__all_decode(e);
}

/* Plans up to `steps` steps; false when too few blocks are free (those taken stay with their samples). */
static bool plan(struct engine *e, int64_t steps, struct engine_burst *b) {
    int64_t longest = 0;
    for (struct sample *s = e->running.head; s; s = s->next) {
        const int64_t take = engine__left(s) < steps ? engine__left(s) : steps;
        if (!engine__grow_blocks(e, s, s->n_computed + take)) return false;
        if (take > b->steps) b->steps = take;
        if (s->n_blocks > longest) longest = s->n_blocks;
        if (!s->req->r.ignore_eos && s->req->n_stop_ids > b->max_stop) b->max_stop = s->req->n_stop_ids;
        e->planned[b->n_seqs++] = s;
    }
    b->max_blocks = longest;
    return true;
}

struct decode_row engine__decode_row(const struct engine *e, const struct sample *s) {
    const struct request *const q = s->req;
    return (struct decode_row){.rule = engine__rule(e, &q->r),
                               .sample = (uint32_t)s->index,
                               .at = (uint32_t)(s->n_tokens - q->n_prompt),
                               .seed = q->r.seed,
                               .uid = q->r.uid,
                               .left = 1};
}

static void fill(struct engine *e, struct engine_burst *b) {
    struct burst_arrays *a = &e->burst;
    engine__fill_tables(e, b->n_seqs, b->max_blocks);
    xgrow((void **)&a->stop, &a->cap_stop, b->n_seqs * b->max_stop, sizeof *a->stop);
    for (int64_t i = 0; i < b->n_seqs; i++) {
        const struct sample *s = e->planned[i];
        const struct request *q = s->req;
        const int64_t left = engine__left(s) < b->steps ? engine__left(s) : b->steps;
        e->ids[i] = s->tokens[s->n_computed];
        e->pos[i] = (int32_t)s->n_computed;
        a->rows[i] = engine__decode_row(e, s);
        a->rows[i].left = (int32_t)left;
        const int64_t n_stop = q->r.ignore_eos ? 0 : q->n_stop_ids;
        for (int64_t k = 0; k < b->max_stop; k++) a->stop[i * b->max_stop + k] = k < n_stop ? q->stop_ids[k] : -1;
    }
    b->ids = e->ids;
    b->pos = e->pos;
    b->block_table = e->block_table;
    b->state = e->states;
    b->rows = a->rows;
    b->stop = a->stop;
}

/* Takes the tokens of sample i from step `have` on; 1: it has ended, and was freed. */
static int take(struct engine *e, const struct engine_results *r, int64_t i, int64_t have) {
    struct sample *s = e->planned[i];
    const int64_t left = e->burst.rows[i].left - have;
    engine__publish_full(e, s, s->n_computed); /* of the part before: after the last one the device waits */
    for (int64_t t = 0; t < r->steps && t < left; t++) {
        const int64_t k = t * r->stride + i;
        s->n_computed++;
        e->stats.rows++;
        const int ended = engine__accept(e, s, r->id[k], r->logp[k], r->logp_kept[k]);
        if (ended != 0) return ended;
    }
    return have < e->burst.rows[i].left ? engine__progress(e, s) : 0;
}

enum { FEW = 128 }; /* samples; with more a step takes long, and what is lost between bursts counts more than who waits */

int64_t engine__burst_limit(struct engine *e) {
    const int64_t most = e->model.max_burst;
    if (e->cfg.first_burst == 0 || e->burst_steps >= most || e->running.n > FEW) return most;
    const int64_t steps = e->burst_steps < 2 ? 2 : e->burst_steps;
    e->burst_steps = 2 * steps;
    return steps;
}

int engine__burst(struct engine *e) {
    struct engine_burst b = {0};
    if (e->model.max_burst < 2 || !engine__only_decode(e) || !plan(e, engine__burst_limit(e), &b) || b.steps < 2) return 0;
    fill(e, &b);
    TRY(e->model.burst(e->model.ctx, &b));
    e->stats.steps += b.steps;
    e->stats.bursts++;
    const int64_t used = e->pool.n_blocks - e->pool.n_free;
    if (used > e->stats.kv_blocks_peak) e->stats.kv_blocks_peak = used;
    struct engine_results r = {0};
    for (int64_t have = 0; have < b.steps; have += r.steps) {
        TRY(e->model.burst_results(e->model.ctx, have, &r));
        for (int64_t i = 0; i < b.n_seqs; i++) {
            if (!e->planned[i]) continue;
            const int ended = take(e, &r, i, have);
            TRY(ended);
            if (ended) e->planned[i] = NULL;
        }
        if (e->cfg.part) TRY(e->cfg.part(e->cfg.done_arg));
    }
    return 1;
}
