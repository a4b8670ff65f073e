/* speculative.c - speculative decoding: tokens that the model's MTP layer drafts are verified by one forward pass over the last
 * token of each sample and its drafts, when all running samples only decode. A drafted token is accepted where it is the token that
 * is drawn there, with the random number of that place; so the first draw that differs from its draft is right as well, and what
 * follows it is dropped: KV blocks are written again. Other steps make drafts, and verify none.
 *
 * Whether it pays depends on the model, the text and how many samples run, so both ways are timed, and the quicker one is kept
 * until half of the samples have ended. Steps with useless drafts take up to twice as long: a few are timed first, and more of them
 * only where the two ways come close. What the MTP layer has not seen meanwhile it drafts without.
 * Invariant: drafts change when a token is drawn, never which. */
#include "engine/engine_int.h"

#include "base/buf.h"
#include "base/err.h"

#include <stdlib.h>
#include <string.h>

enum {
    WARM_CALLS = 3,    /* of a trial: graphs are captured, kernels are tuned */
    LOOK_SAMPLES = 48, /* verified at a first look, of all samples, in no less than LOOK_STEPS */
    LOOK_STEPS = 3,
    PLAIN_STEPS = 12,  /* compared with them */
    TRIAL_STEPS = 24,  /* with drafts, where the look does not tell */
    AGAIN_AFTER = 4096 /* steps: texts change */
};

static const double CLOSE = 0.9; /* a look does not tell paces with such a ratio from one another */

void engine__draft_create(struct engine *e) {
    struct drafting *const d = &e->drafting;
    const size_t seqs = (size_t)e->cfg.max_seqs, wide = (size_t)e->model.max_draft + 1;
    d->on = e->model.max_draft > 0 && e->cfg.draft != ENGINE_DRAFT_NEVER;
    d->state = e->cfg.draft == ENGINE_DRAFT_MEASURED ? DRAFT_TRIAL : DRAFT_FIXED;
    if (!d->on) return;
    CHECK(e->model.max_draft <= ENGINE_MAX_DRAFT);
    d->rows = xmalloc(seqs * sizeof *d->rows);
    d->n_draft = xmalloc(seqs * sizeof *d->n_draft);
    d->n_blocks = xmalloc(seqs * sizeof *d->n_blocks);
    d->ids = xmalloc(seqs * wide * sizeof *d->ids);
    d->id = xmalloc(seqs * wide * sizeof *d->id);
    d->logp = xmalloc(seqs * wide * sizeof *d->logp);
    d->logp_kept = xmalloc(seqs * wide * sizeof *d->logp_kept);
    d->draft = xmalloc(seqs * wide * sizeof *d->draft);
    d->next = xmalloc((size_t)e->cfg.max_rows * sizeof *d->next);
}

void engine__draft_free(struct engine *e) {
    struct drafting *const d = &e->drafting;
    free(d->rows);
    free(d->n_draft);
    free(d->n_blocks);
    free(d->ids);
    free(d->id);
    free(d->logp);
    free(d->logp_kept);
    free(d->draft);
    free(d->next);
}

static bool drafting(const struct engine *e) { return e->drafting.on && e->running.n <= e->model.draft_seqs; }

/* ---- which way is quicker ---- */

static double pace(const struct draft_trial *t) { return t->tokens / (t->seconds > 0 ? t->seconds : 1e-9); }

/* Steps of this part of a trial. */
static int64_t wanted_steps(const struct drafting *d, int64_t running) {
    if (d->state == DRAFT_PLAIN_TRIAL) return PLAIN_STEPS;
    const int64_t look = (LOOK_SAMPLES + running - 1) / running;
    if (d->trial[0].steps > 0 || look > TRIAL_STEPS) return TRIAL_STEPS;
    return look > LOOK_STEPS ? look : LOOK_STEPS;
}

static void begin_trial(struct drafting *d) {
    memset(d->trial, 0, sizeof d->trial);
    d->state = DRAFT_TRIAL;
    d->on = true;
}

void engine__draft_timed(struct engine *e, const struct draft_time *x) {
    struct drafting *const d = &e->drafting;
    struct draft_trial *const t = &d->trial[x->drafted];
    if (d->state == DRAFT_FIXED || !d->next || x->running == 0) return;
    if (d->state == DRAFT_CHOSEN) {
        d->since += x->steps;
        if (2 * x->running <= d->chosen_at || d->since >= AGAIN_AFTER) begin_trial(d);
        return;
    }
    if (x->drafted != (d->state == DRAFT_TRIAL)) return;
    if (t->calls++ < (x->steps > 1 ? 1 : WARM_CALLS)) return;
    t->steps += x->steps;
    t->seconds += x->seconds;
    t->tokens += x->tokens / (double)x->running;
    if (t->steps < wanted_steps(d, x->running)) return;
    const double gain = pace(&d->trial[1]) / pace(&d->trial[0]);
    if (d->trial[0].steps == 0) d->state = DRAFT_PLAIN_TRIAL;
    else if (d->state == DRAFT_PLAIN_TRIAL && gain > CLOSE && gain < 1 / CLOSE && d->trial[1].steps < TRIAL_STEPS) {
        d->state = DRAFT_TRIAL;
        d->trial[1].calls = WARM_CALLS - 1; /* the first call has nothing to verify */
    } else {
        d->state = DRAFT_CHOSEN;
        d->chosen_at = x->running;
        d->since = 0;
    }
    d->on = d->state == DRAFT_TRIAL || (d->state == DRAFT_CHOSEN && gain > 1);
}

/* ---- steps that make drafts ---- */

void engine__draft_plan(struct engine *e, struct engine_plan *p) {
    struct drafting *const d = &e->drafting;
    int64_t row = 0, k = 0;
    if (!drafting(e)) return;
    for (const struct sample *s = e->running.head; s; s = s->next)
        if (!engine__plain_rule(s)) return; /* they would not be verified */
    for (int64_t i = 0; i < p->n_seqs; i++) {
        const struct sample *const s = e->planned[i];
        for (int64_t t = s->n_computed + 1; t <= s->n_computed + s->n_planned; t++)
            d->next[row++] = t < s->n_tokens ? s->tokens[t] : -1;
        if (s->n_computed + s->n_planned != s->n_tokens) continue;
        d->rows[k] = engine__decode_row(e, s);
        d->rows[k++].at++; /* the token after the one that is drawn */
    }
    p->next = d->next;
    p->draft_rule = d->rows;
    p->draft = d->draft;
}

/* Keeps the drafts that a sample may still draw, up to one that is no token. */
static void keep(const struct engine *e, struct sample *s, const int32_t *draft, int64_t n) {
    const int64_t most = engine__left(s) - 1;
    s->n_draft = 0;
    while (s->n_draft < n && s->n_draft < most && draft[s->n_draft] >= 0 && draft[s->n_draft] < e->model.vocab) {
        s->draft[s->n_draft] = draft[s->n_draft];
        s->n_draft++;
    }
}

void engine__draft_take(const struct engine *e, struct sample *s, int64_t k) { keep(e, s, &e->drafting.draft[k], 1); }

/* ---- verification ---- */

/* A chunk that a state has made whole cannot be taken back (device/ops.h): of drafts none is its last row. A step from that row on
 * has all drafts again, so little is lost. */
static int64_t taken_back(const struct engine *e, const struct sample *s) {
    const int64_t left = DEV_DELTA_CHUNK - 2 - s->n_computed % DEV_DELTA_CHUNK;
    return e->model.n_states > 0 && left >= 0 && left < s->n_draft ? left : s->n_draft;
}

/* False when too few blocks are free (those taken stay with their samples). */
static bool plan(struct engine *e, struct engine_verify *v) {
    struct drafting *const d = &e->drafting;
    const int64_t wide = v->most + 1;
    for (struct sample *s = e->running.head; s; s = s->next) {
        const int64_t i = v->n_seqs++;
        s->n_draft = taken_back(e, s);
        if (!engine__grow_blocks(e, s, s->n_tokens + s->n_draft)) return false;
        d->n_draft[i] = s->n_draft;
        d->n_blocks[i] = s->n_blocks;
        d->rows[i] = engine__decode_row(e, s);
        d->ids[i * wide] = s->tokens[s->n_computed];
        memcpy(d->ids + i * wide + 1, s->draft, (size_t)s->n_draft * sizeof *d->ids);
        e->pos[i] = (int32_t)s->n_computed;
        e->planned[i] = s;
        if (s->n_blocks > v->max_blocks) v->max_blocks = s->n_blocks;
    }
    return true;
}

/* Takes what sample i has drawn. */
static int take(struct engine *e, const struct engine_verify *v, int64_t i) {
    struct sample *const s = e->planned[i];
    const int64_t n = engine_accepted(v, i), at = i * (v->most + 1);
    engine__publish_full(e, s, s->n_computed);
    s->n_verified++;
    s->n_drafted += v->n_draft[i];
    s->n_accepted += n;
    e->stats.verified++;
    e->stats.drafted += v->n_draft[i];
    e->stats.accepted += n;
    e->stats.rows += v->n_draft[i] + 1;
    for (int64_t j = 0; j <= n; j++) {
        s->n_computed++;
        const int ended = engine__accept(e, s, v->id[at + j], v->logp[at + j], v->logp_kept[at + j]);
        if (ended != 0) return ended;
    }
    keep(e, s, v->draft + i * v->most, v->most);
    return engine__progress(e, s);
}

/* Whether the next step may verify. One that admits a sample is no replayed graph, and the others draw a single token in it; so
 * where samples end one by one, nobody is admitted for about the tokens of a burst, in which nobody is either. */
static bool may_verify(struct engine *e) {
    struct drafting *const d = &e->drafting;
    const bool only = engine__only_decode(e);
    if (!only && (d->left == 0 || !engine__all_decode(e))) {
        d->left = 0;
        return false;
    }
    if (only && d->left == 0) d->left = engine__burst_limit(e) / 2;
    if (d->left > 0) d->left--;
    return true;
}

int engine__verify(struct engine *e) {
    const struct drafting *const d = &e->drafting;
    struct engine_verify v = {.most = e->model.max_draft};
    if (!drafting(e) || !may_verify(e) || !plan(e, &v)) return 0;
    engine__fill_tables(e, v.n_seqs, v.max_blocks);
    v.ids = d->ids;
    v.pos = e->pos;
    v.n_draft = d->n_draft;
    v.n_blocks = d->n_blocks;
    v.block_table = e->block_table;
    v.state = e->states;
    v.rows = d->rows;
    v.id = d->id;
    v.logp = d->logp;
    v.logp_kept = d->logp_kept;
    v.draft = d->draft;
    TRY(e->model.verify(e->model.ctx, &v));
    e->stats.steps++;
    const int64_t used = e->pool.n_blocks - e->pool.n_free;
    if (used > e->stats.kv_blocks_peak) e->stats.kv_blocks_peak = used;
    for (int64_t i = 0; i < v.n_seqs; i++) TRY(take(e, &v, i));
    return 1;
}
