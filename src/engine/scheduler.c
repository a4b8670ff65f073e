/* scheduler.c - continuous batching. See rollout.h for what it promises.
 *
 * Every step it plans, for each running sample, the rows that are missing ("pending"): one for a sample
 * that decodes, many for one that starts or was preempted. Decoding samples go first, then longer runs in
 * chunks, then waiting samples are admitted, oldest first or longest first. preemption.c makes room when the KV cache is
 * full.
 *
 * A block is published (made findable) when its last row is planned, so a sibling in the same step may
 * already read it: the forward pass writes all keys of a layer before it reads any. The last block of a
 * sample that ends, which is partly filled, waits for the turn that continues it. */
#include "engine/engine_int.h"

#include "base/buf.h"
#include "base/clock.h"
#include "base/err.h"
#include "base/rng.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

const char *engine_finish_name(enum engine_finish f) {
    static const char *const names[] = {"stop", "length", "interrupted"};
    return names[f];
}

/* ---- creating and destroying ---- */

int engine_create(struct engine **out, const struct engine_model *m, const struct engine_config *c) {
    if (c->max_rows < 1 || c->max_seqs < 1)
        FAIL(ERR_INVAL, "rollout: max_num_batched_tokens (%lld) and max_num_seqs (%lld) must be at least 1", (long long)c->max_rows,
             (long long)c->max_seqs);
    if (m->n_kv_blocks < 1 || m->n_kv_blocks > INT32_MAX)
        FAIL(ERR_INVAL, "rollout: a KV cache of %lld blocks", (long long)m->n_kv_blocks);
    struct engine *e = xcalloc(1, sizeof *e);
    e->model = *m;
    e->cfg = *c;
    if (e->cfg.max_seqs > e->cfg.max_rows) e->cfg.max_seqs = e->cfg.max_rows; /* a decoding sample needs a row */
    if (m->n_states > 0 && e->cfg.max_seqs > m->n_states) e->cfg.max_seqs = m->n_states;
    e->shares_states = m->n_states > 0 && !c->no_prefix_cache;
    if (m->n_states > 0) e->cfg.no_prefix_cache = true; /* nothing is found by its tokens */
    kv_pool_init(&e->pool, (int32_t)m->n_kv_blocks);
    const size_t rows = (size_t)e->cfg.max_rows, seqs = (size_t)e->cfg.max_seqs;
    e->ids = xmalloc(rows * sizeof *e->ids);
    e->pos = xmalloc(rows * sizeof *e->pos);
    e->slots = xmalloc(rows * sizeof *e->slots);
    e->q_start = xmalloc((seqs + 1) * sizeof *e->q_start);
    e->pos0 = xmalloc(seqs * sizeof *e->pos0);
    e->out_row = xmalloc(seqs * sizeof *e->out_row);
    e->out_id = xmalloc(seqs * sizeof *e->out_id);
    e->param = xmalloc(seqs * sizeof *e->param);
    e->out_logp = xmalloc(seqs * sizeof *e->out_logp);
    e->out_logp_kept = xmalloc(seqs * sizeof *e->out_logp_kept);
    e->planned = xmalloc(seqs * sizeof *e->planned);
    e->burst.rows = xmalloc(seqs * sizeof *e->burst.rows);
    e->states = xmalloc(seqs * sizeof *e->states);
    e->free_states = xmalloc(seqs * sizeof *e->free_states);
    e->copy_from = xmalloc(seqs * sizeof *e->copy_from);
    e->copy_to = xmalloc(seqs * sizeof *e->copy_to);
    for (int64_t i = 0; i < m->n_states && i < e->cfg.max_seqs; i++) e->free_states[e->n_free_states++] = (int32_t)i;
    engine__draft_create(e);
    *out = e;
    return 0;
}

static void request_release(struct request *q) {
    if (--q->n_open > 0) return;
    for (int64_t i = 0; i < q->n_stop; i++) free(q->stop[i]);
    free(q->stop);
    free(q->stop_ids);
    free(q->prompt);
    free(q);
}

void engine__drop_blocks(struct engine *e, struct sample *s) {
    for (int64_t i = s->n_blocks; i-- > 0;) kv_unref(&e->pool, s->blocks[i]); /* the prefix is freed last, lives longest */
    s->n_blocks = s->n_keyed = s->n_computed = 0;
    engine__stop_leading(e, s);
    engine__stop_following(e, s);
    if (s->state >= 0) e->free_states[e->n_free_states++] = s->state;
    s->state = -1;
    s->key = (struct kv_key){0, 0};
}

static void sample_free(struct engine *e, struct sample *s) {
    engine__drop_blocks(e, s);
    tokenizer_stream_destroy(s->text);
    buf_free(&s->decoded);
    free(s->tokens);
    free(s->blocks);
    free(s->logp);
    free(s->logp_kept);
    free(s->top_id);
    free(s->top_logp);
    free(s->seen);
    request_release(s->req);
    free(s);
}

void engine_cancel(struct engine *e, int64_t id) {
    struct list *lists[] = {&e->waiting, &e->running};
    for (int k = 0; k < 2; k++)
        for (struct sample *s = lists[k]->head, *next; s; s = next) {
            next = s->next;
            if (s->req->id != id) continue;
            if (s->n_computed < s->req->n_prompt) s->req->planned = 0;
            list_remove(lists[k], s);
            sample_free(e, s);
            e->no_room = false;
        }
}

void engine_cancel_all(struct engine *e) {
    struct list *lists[] = {&e->waiting, &e->running};
    for (int k = 0; k < 2; k++) {
        for (struct sample *s; (s = lists[k]->head);) {
            list_remove(lists[k], s);
            sample_free(e, s);
        }
    }
}

void engine_destroy(struct engine *e) {
    if (!e) return;
    engine_cancel_all(e);
    kv_pool_free(&e->pool);
    free(e->ids);
    free(e->pos);
    free(e->slots);
    free(e->q_start);
    free(e->pos0);
    free(e->block_table);
    free(e->out_row);
    free(e->out_id);
    free(e->param);
    free(e->seen);
    free(e->out_logp);
    free(e->out_logp_kept);
    free(e->n_top);
    free(e->top_id);
    free(e->top_logp);
    free(e->planned);
    free(e->states);
    free(e->free_states);
    free(e->copy_from);
    free(e->copy_to);
    free(e->burst.rows);
    free(e->burst.stop);
    engine__draft_free(e);
    free(e);
}

static int check_request(const struct engine *e, const struct engine_request *r) {
    if (r->n_prompt < 1) FAIL(ERR_INVAL, "generate: the prompt has no tokens");
    if (r->n < 1) FAIL(ERR_INVAL, "generate: n is %lld; it must be at least 1", (long long)r->n);
    if (r->max_tokens < 1) FAIL(ERR_INVAL, "generate: max_tokens is %lld; it must be at least 1", (long long)r->max_tokens);
    if (r->n_begun < 0 || r->n_begun >= r->max_tokens || (r->n_begun > 0 && r->n != 1) || r->first_index < 0 ||
        (r->pause_at != 0 && r->pause_at <= r->n_begun) || r->segment < 0 || r->segment > r->n_begun)
        FAIL(ERR_INVAL, "generate: %lld of %lld tokens begun, the segment from %lld on, %lld samples, interrupted at %lld",
             (long long)r->n_begun, (long long)r->max_tokens, (long long)r->segment, (long long)r->n, (long long)r->pause_at);
    if (r->temperature != 0 && !(r->temperature >= 1e-6f && r->temperature <= 1e6f))
        FAIL(ERR_INVAL, "generate: temperature is %g; it must be 0, or 1e-6 to 1e6", (double)r->temperature);
    if (!(r->top_p > 0 && r->top_p <= 1)) FAIL(ERR_INVAL, "generate: top_p is %g; it must be in (0, 1]", (double)r->top_p);
    if (!(r->min_p >= 0 && r->min_p <= 1)) FAIL(ERR_INVAL, "generate: min_p is %g; it must be in [0, 1]", (double)r->min_p);
    if (!(r->repetition_penalty > 0) || !isfinite(r->repetition_penalty))
        FAIL(ERR_INVAL, "generate: repetition_penalty is %g; it must be above 0", (double)r->repetition_penalty);
    for (int64_t i = 0; i < r->n_prompt; i++)
        if (r->prompt[i] < 0 || r->prompt[i] >= e->model.vocab)
            FAIL(ERR_INVAL, "generate: token id %d at position %lld is outside the vocabulary of %lld", r->prompt[i], (long long)i,
                 (long long)e->model.vocab);
    for (int64_t i = 0; i < r->n_begun; i++)
        if (r->begun[i] < 0 || r->begun[i] >= e->model.vocab)
            FAIL(ERR_INVAL, "generate: token id %d at position %lld of the response is outside the vocabulary of %lld", r->begun[i],
                 (long long)i, (long long)e->model.vocab);
    if (r->n_stop > 0 && !e->cfg.tok) FAIL(ERR_INVAL, "generate: stop strings need the model's tokenizer");
    for (int64_t i = 0; i < r->n_stop; i++)
        if (r->stop[i][0] == '\0') FAIL(ERR_INVAL, "generate: a stop string is empty");
    if (r->n_top < 0 || r->n_top > ENGINE_MAX_TOP || r->n_top > e->model.vocab || (r->n_top > 0 && r->n_begun > 0))
        FAIL(ERR_INVAL, "generate: %lld most probable tokens; at most %d, and not of a response that continues",
             (long long)r->n_top, ENGINE_MAX_TOP);
    const int64_t need = engine__blocks_for(r->n_prompt + r->max_tokens - 1); /* the last token's keys are never written */
    if (need > e->model.n_kv_blocks)
        FAIL(ERR_NOMEM,
             "generate: %lld prompt and %lld response tokens need %lld KV blocks of %d tokens, the cache has %lld; "
             "raise gpu_memory_utilization or lower max_response_length",
             (long long)r->n_prompt, (long long)r->max_tokens, (long long)need, KV_BLOCK_LEN, (long long)e->model.n_kv_blocks);
    return 0;
}

static struct request *request_copy(const struct engine_request *r, int64_t id) {
    struct request *q = xcalloc(1, sizeof *q);
    q->id = id;
    q->r = *r;
    q->n_prompt = r->n_prompt;
    q->max_tokens = r->max_tokens;
    q->n_open = r->n;
    q->prompt = xmalloc((size_t)r->n_prompt * sizeof *q->prompt);
    memcpy(q->prompt, r->prompt, (size_t)r->n_prompt * sizeof *q->prompt);
    q->n_stop_ids = r->n_stop_ids;
    q->stop_ids = xmalloc((size_t)r->n_stop_ids * sizeof *q->stop_ids);
    if (r->n_stop_ids) memcpy(q->stop_ids, r->stop_ids, (size_t)r->n_stop_ids * sizeof *q->stop_ids);
    q->n_stop = r->n_stop;
    q->stop = xcalloc((size_t)r->n_stop, sizeof *q->stop);
    for (int64_t i = 0; i < r->n_stop; i++) q->stop[i] = xstrdup(r->stop[i]);
    q->r.prompt = q->r.stop_ids = q->r.begun = NULL;
    q->r.begun_logp = q->r.begun_logp_kept = NULL;
    q->r.stop = NULL;
    return q;
}

static void mark_seen(struct sample *s, int32_t id) {
    if (s->seen) s->seen[id / 8] |= (uint8_t)(1u << (id % 8));
}

/* The tokens that r has begun with become those of s. */
static int take_begun(struct sample *s, const struct engine_request *r) {
    const size_t n = (size_t)r->n_begun;
    if (n == 0) return 0;
    s->cap_logp = r->n_begun;
    s->logp = xmalloc(n * sizeof *s->logp);
    s->logp_kept = xmalloc(n * sizeof *s->logp_kept);
    memcpy(s->tokens + s->n_tokens, r->begun, n * sizeof *s->tokens);
    memcpy(s->logp, r->begun_logp, n * sizeof *s->logp);
    memcpy(s->logp_kept, r->begun_logp_kept, n * sizeof *s->logp_kept);
    s->n_tokens += r->n_begun;
    for (int64_t i = 0; s->text && i < r->n_begun; i++) {
        TRY(tokenizer_stream_push(s->text, r->begun[i], &s->decoded));
        if (i + 1 == r->segment) s->segment_text = s->decoded.n;
    }
    return 0;
}

/* Those that were preempted stay in front. */
static void queue(struct engine *e, struct sample *s) {
    struct sample *after = e->waiting.tail;
    while (e->cfg.longest_first && after && after->n_preempted == 0 && engine__left(after) < engine__left(s)) after = after->prev;
    if (after) list_insert_after(&e->waiting, after, s);
    else list_push_front(&e->waiting, s);
    if (e->waiting.head == s) e->no_room = false;
}

int engine_submit(struct engine *e, const struct engine_request *r, int64_t *id) {
    TRY(check_request(e, r));
    struct request *q = request_copy(r, e->n_requests++);
    for (int64_t i = 0; i < r->n; i++) {
        struct sample *s = xcalloc(1, sizeof *s);
        int rc = 0;
        s->req = q;
        s->index = r->first_index + i;
        s->state = -1;
        s->cap_tokens = r->n_prompt + r->n_begun + 16;
        s->tokens = xmalloc((size_t)s->cap_tokens * sizeof *s->tokens);
        memcpy(s->tokens, q->prompt, (size_t)q->n_prompt * sizeof *s->tokens);
        s->n_tokens = q->n_prompt;
        if (r->n_stop > 0) rc = tokenizer_stream_create(&s->text, e->cfg.tok, true);
        if (rc == 0) rc = take_begun(s, r);
        if (rc < 0) {
            sample_free(e, s);
            return err_pass(rc, __FILE__, __LINE__);
        }
        if (r->repetition_penalty != 1.0f) {
            s->seen = xcalloc((size_t)(e->model.vocab + 7) / 8, 1);
            for (int64_t t = 0; t < s->n_tokens; t++) mark_seen(s, s->tokens[t]);
        }
        queue(e, s);
    }
    if (id) *id = q->id;
    return 0;
}

/* ---- planning ---- */

static void add_block(struct sample *s, int32_t block) {
    xgrow((void **)&s->blocks, &s->cap_blocks, s->n_blocks + 1, sizeof *s->blocks);
    s->blocks[s->n_blocks++] = block;
}

void engine__share_block(struct engine *e, struct sample *s, int32_t block) {
    kv_ref(&e->pool, block);
    add_block(s, block);
}

bool engine__grow_blocks(struct engine *e, struct sample *s, int64_t upto) {
    while (s->n_blocks < engine__blocks_for(upto)) {
        const int32_t block = kv_alloc(&e->pool);
        if (block < 0) return false;
        add_block(s, block);
    }
    return true;
}

/* After the full blocks, the one that holds most of the tokens that follow; up to `most` tokens are computed then. */
static void take_partial(struct engine *e, struct sample *s, int64_t most) {
    const int64_t at = s->n_blocks * KV_BLOCK_LEN;
    for (int64_t n = most - at < KV_BLOCK_LEN ? most - at : KV_BLOCK_LEN - 1; n > 0; n--) {
        const int32_t block = kv_take(&e->pool, kv_key_next(s->key, s->tokens + at, n));
        if (block < 0) continue;
        add_block(s, block);
        s->n_computed = at + n;
        return;
    }
}

/* Takes published blocks that hold this sample's first tokens; always
 * leaves at least one row to compute. */
static void adopt_cached(struct engine *e, struct sample *s) {
    if (e->cfg.no_prefix_cache) return;
    const int64_t most = (s->n_tokens - 1) / KV_BLOCK_LEN;
    for (int64_t i = s->n_blocks; i < most; i++) {
        const struct kv_key key = kv_key_next(s->key, s->tokens + i * KV_BLOCK_LEN, KV_BLOCK_LEN);
        const int32_t block = kv_find(&e->pool, key);
        if (block < 0) break;
        add_block(s, block);
        s->key = key;
        s->n_keyed = s->n_blocks;
        s->n_computed = s->n_blocks * KV_BLOCK_LEN;
    }
    take_partial(e, s, s->n_tokens - 1);
}

void engine__publish_full(struct engine *e, struct sample *s, int64_t upto) {
    if (e->cfg.no_prefix_cache) return;
    for (; (s->n_keyed + 1) * KV_BLOCK_LEN <= upto; s->n_keyed++) {
        s->key = kv_key_next(s->key, s->tokens + s->n_keyed * KV_BLOCK_LEN, KV_BLOCK_LEN);
        kv_publish(&e->pool, s->blocks[s->n_keyed], s->key);
    }
}

/* All that is computed, the block that is partly filled included: for requests with the same tokens. s computes no more. */
static void publish_all(struct engine *e, struct sample *s) {
    engine__publish_full(e, s, s->n_computed);
    const int64_t n = s->n_computed - s->n_keyed * KV_BLOCK_LEN;
    if (!e->cfg.no_prefix_cache && n > 0)
        kv_publish(&e->pool, s->blocks[s->n_keyed], kv_key_next(s->key, s->tokens + s->n_keyed * KV_BLOCK_LEN, n));
}

void engine__release_blocks(struct engine *e, struct sample *s) {
    publish_all(e, s);
    engine__drop_blocks(e, s);
}

struct sample_param engine__rule(const struct engine *e, const struct engine_request *r) {
    const float scale = e->model.logit_scale;
    return (struct sample_param){
        .inv_temp = (r->temperature > 0 ? 1.0f / r->temperature : 1.0f) * (scale > 0 ? scale : 1.0f),
        .top_p = r->top_p,
        .min_p = r->min_p,
        .repetition_penalty = r->repetition_penalty,
        .top_k = r->top_k,
        .greedy = r->temperature == 0,
    };
}

static struct sample_param next_param(const struct engine *e, const struct sample *s) {
    const struct engine_request *r = &s->req->r;
    struct sample_param p = engine__rule(e, r);
    p.u = rng_token(r->seed, r->uid, (uint32_t)s->index, (uint32_t)(s->n_tokens - s->req->n_prompt));
    return p;
}

/* Adds `take` rows of s to the plan. Pre: its blocks are allocated. */
static void plan_rows(struct engine *e, struct engine_plan *p, struct sample *s, int64_t take) {
    const int64_t lo = s->n_computed, hi = lo + take;
    for (int64_t t = lo; t < hi; t++) {
        e->ids[p->n_rows] = s->tokens[t];
        e->pos[p->n_rows] = (int32_t)t;
        e->slots[p->n_rows] = s->blocks[t / KV_BLOCK_LEN] * KV_BLOCK_LEN + (int32_t)(t % KV_BLOCK_LEN);
        p->n_rows++;
    }
    e->q_start[p->n_seqs + 1] = (int32_t)p->n_rows;
    e->pos0[p->n_seqs] = (int32_t)lo;
    e->planned[p->n_seqs++] = s;
    s->n_planned = take;
    if (take > p->max_q) p->max_q = take;
    if (hi > p->max_kv) p->max_kv = hi;
    if (hi > s->req->planned) s->req->planned = hi;
    if (hi == s->n_tokens) {
        e->out_row[p->n_out] = (int32_t)p->n_rows - 1;
        e->param[p->n_out++] = next_param(e, s);
    }
    engine__publish_full(e, s, hi);
}

static int64_t pending(const struct sample *s) { return s->n_tokens - s->n_computed; }

static void plan_decoding(struct engine *e, struct engine_plan *p) {
    for (struct sample *s = e->running.head; s; s = s->next) {
        if (pending(s) != 1) continue;
        if (!engine__make_room(e, s)) return; /* s was the youngest: none comes after it */
        plan_rows(e, p, s, 1);
    }
}

static void plan_prompts(struct engine *e, struct engine_plan *p) {
    for (struct sample *s = e->running.head; s; s = s->next) {
        if (s->n_planned > 0 || pending(s) <= 1 || s->follows) continue;
        int64_t take = e->cfg.max_rows - p->n_rows;
        if (take <= 0) return;
        if (take > pending(s)) take = pending(s);
        take = engine__until_shared(s, take);
        if (!engine__grow_blocks(e, s, s->n_computed + take)) take = s->n_blocks * KV_BLOCK_LEN - s->n_computed;
        if (take > 0) plan_rows(e, p, s, take);
    }
}

/* A prompt is computed once: its samples wait for the one in front. */
static bool sibling_leads(const struct engine *e, const struct sample *s) {
    if (e->cfg.no_prefix_cache || s->req->r.n == 1 || s->req->planned == 0) return false;
    return s->req->planned < (s->req->n_prompt - 1) / KV_BLOCK_LEN * KV_BLOCK_LEN;
}

static void admit(struct engine *e, struct engine_plan *p) {
    while (e->waiting.head && e->running.n < e->cfg.max_seqs && p->n_rows < e->cfg.max_rows) {
        struct sample *s = e->waiting.head;
        if (sibling_leads(e, s)) return;
        adopt_cached(e, s);
        const int64_t room = e->cfg.max_rows - p->n_rows;
        int64_t take = pending(s) < room ? pending(s) : room;
        /* leave every running sample its next block, or it would preempt this one at once */
        const int64_t reserve = e->running.n;
        if (engine__blocks_for(s->n_tokens) - s->n_blocks + reserve + e->promised > e->pool.n_free && e->running.n > 0) {
            engine__release_blocks(e, s);
            e->no_room = true;
            return;
        }
        engine__lead_or_follow(e, s);
        take = s->follows ? 0 : engine__until_shared(s, take);
        if (!engine__grow_blocks(e, s, s->n_computed + take)) { /* impossible: the cache holds one sample (engine_submit) */
            engine__release_blocks(e, s);
            return;
        }
        list_remove(&e->waiting, s);
        list_push_back(&e->running, s);
        if (e->n_free_states > 0) s->state = e->free_states[--e->n_free_states];
        if (s->start == 0) {
            s->start = clock_now();
            s->n_cached = s->n_computed;
        }
        e->stats.cached_rows += s->n_computed;
        e->burst_steps = e->cfg.first_burst;
        if (take > 0) plan_rows(e, p, s, take);
    }
}

static void plan_step(struct engine *e, struct engine_plan *p) {
    for (struct sample *s = e->running.head; s; s = s->next) s->n_planned = 0;
    e->q_start[0] = 0;
    for (;;) {
        plan_decoding(e, p);
        plan_prompts(e, p);
        admit(e, p);
        if (p->n_rows > 0 || e->running.n == 0) return;
        engine__preempt(e, e->running.tail); /* prompts hold all blocks and none can continue */
    }
}

/* The block tables of the planned samples, a row of max_blocks each, and the slots of their states. */
void engine__fill_tables(struct engine *e, int64_t n_seqs, int64_t max_blocks) {
    xgrow((void **)&e->block_table, &e->cap_block_table, n_seqs * max_blocks, sizeof *e->block_table);
    for (int64_t i = 0; i < n_seqs; i++) {
        const struct sample *s = e->planned[i];
        for (int64_t k = 0; k < max_blocks; k++) e->block_table[i * max_blocks + k] = k < s->n_blocks ? s->blocks[k] : 0;
        e->states[i] = s->state;
    }
}

/* Whose most probable tokens are wanted. */
static void plan_tops(struct engine *e, struct engine_plan *p) {
    int64_t n = 0;
    for (int64_t i = 0; i < p->n_seqs; i++) n = e->planned[i]->req->r.n_top > n ? e->planned[i]->req->r.n_top : n;
    if (n == 0) return;
    const size_t seqs = (size_t)e->cfg.max_seqs, all = seqs * ENGINE_MAX_TOP;
    if (!e->n_top) {
        e->n_top = xmalloc(seqs * sizeof *e->n_top);
        e->top_id = xmalloc(all * sizeof *e->top_id);
        e->top_logp = xmalloc(all * sizeof *e->top_logp);
    }
    for (int64_t i = 0, k = 0; i < p->n_seqs; i++) {
        const struct sample *s = e->planned[i];
        if (s->n_computed + s->n_planned == s->n_tokens) e->n_top[k++] = (int32_t)s->req->r.n_top;
    }
    p->max_top = n;
    p->n_top = e->n_top;
    p->top_id = e->top_id;
    p->top_logp = e->top_logp;
}

/* Block tables and penalty sets of the planned samples. */
static void plan_tables(struct engine *e, struct engine_plan *p) {
    p->max_blocks = engine__blocks_for(p->max_kv);
    engine__fill_tables(e, p->n_seqs, p->max_blocks);
    const size_t set = (size_t)(e->model.vocab + 7) / 8;
    bool penalty = false;
    for (int64_t i = 0; i < p->n_seqs; i++) penalty |= e->planned[i]->seen != NULL;
    if (!penalty) return;
    if (!e->seen) e->seen = xmalloc(set * (size_t)e->cfg.max_seqs);
    for (int64_t i = 0, k = 0; i < p->n_seqs; i++) {
        const struct sample *s = e->planned[i];
        if (s->n_computed + s->n_planned != s->n_tokens) continue;
        if (s->seen) memcpy(e->seen + set * (size_t)k, s->seen, set);
        else memset(e->seen + set * (size_t)k, 0, set);
        k++;
    }
    p->seen = e->seen;
}

/* ---- results ---- */

static bool is_stop_id(const struct request *q, int32_t id) {
    if (q->r.ignore_eos) return false;
    for (int64_t i = 0; i < q->n_stop_ids; i++)
        if (q->stop_ids[i] == id) return true;
    return false;
}

/* Feeds the new token to the sample's text; -1: no stop string in it, else the
 * byte where the earliest one begins. */
static int find_stop(struct sample *s, int32_t id, int64_t *at) {
    const struct request *q = s->req;
    size_t longest = 0;
    *at = -1;
    const size_t old = s->decoded.n;
    TRY(tokenizer_stream_push(s->text, id, &s->decoded));
    for (int64_t i = 0; i < q->n_stop; i++)
        if (strlen(q->stop[i]) > longest) longest = strlen(q->stop[i]);
    size_t from = old > longest ? old - longest : 0; /* a match must end in the new text, and lie in the segment */
    if (from < s->segment_text) from = s->segment_text;
    for (int64_t i = 0; i < q->n_stop; i++) {
        const char *hit =
            s->decoded.n > from ? memmem(s->decoded.p + from, s->decoded.n - from, q->stop[i], strlen(q->stop[i])) : NULL;
        if (hit && (*at < 0 || hit - s->decoded.p < *at)) *at = hit - s->decoded.p;
    }
    return 0;
}

/* s as those outside see it. */
static struct engine_sample view_of(const struct sample *s, enum engine_finish why, int64_t text_bytes) {
    const struct request *q = s->req;
    return (struct engine_sample){
        .user = q->r.user,
        .request = q->id,
        .index = s->index,
        .prompt = q->prompt,
        .n_prompt = q->n_prompt,
        .ids = s->tokens + q->n_prompt,
        .n = s->n_tokens - q->n_prompt,
        .logp = s->logp,
        .logp_kept = s->logp_kept,
        .n_top = q->r.n_top,
        .top_id = s->top_id,
        .top_logp = s->top_logp,
        .n_cached = s->n_cached < q->n_prompt ? s->n_cached : q->n_prompt,
        .text_bytes = text_bytes,
        .finish = why,
        .n_preempted = s->n_preempted,
        .n_verified = s->n_verified,
        .n_drafted = s->n_drafted,
        .n_accepted = s->n_accepted,
        .seconds = s->start == 0 ? 0 : clock_now() - s->start,
    };
}

int engine__progress(struct engine *e, const struct sample *s) {
    if (!e->cfg.progress) return 0;
    const struct engine_sample r = view_of(s, ENGINE_INTERRUPTED, -1);
    return e->cfg.progress(e->cfg.done_arg, &r);
}

/* Passes s, which is in `list`, to `done` and ends it: 1. */
static int hand_out(struct engine *e, struct list *list, struct sample *s, enum engine_finish why, int64_t text_bytes) {
    const struct engine_sample r = view_of(s, why, text_bytes);
    const int rc = e->cfg.done ? e->cfg.done(e->cfg.done_arg, &r) : 0;
    list_remove(list, s);
    sample_free(e, s);
    e->no_room = false;
    TRY(rc);
    return 1;
}

static int finish(struct engine *e, struct sample *s, enum engine_finish why, int64_t text_bytes) {
    publish_all(e, s);
    e->stats.finished++;
    return hand_out(e, &e->running, s, why, text_bytes);
}

int engine_interrupt(struct engine *e) {
    struct list *const lists[] = {&e->running, &e->waiting};
    for (int k = 0; k < 2; k++)
        while (lists[k]->head) TRY(hand_out(e, lists[k], lists[k]->head, ENGINE_INTERRUPTED, -1));
    return 0;
}

/* Room for the response's k-th token. */
static void reserve(struct sample *s, int64_t k) {
    int64_t cap = s->cap_logp;
    xgrow((void **)&s->tokens, &s->cap_tokens, s->n_tokens + 1, sizeof *s->tokens);
    xgrow((void **)&s->logp, &s->cap_logp, k + 1, sizeof *s->logp);
    xgrow((void **)&s->logp_kept, &cap, k + 1, sizeof *s->logp_kept);
}

/* The most probable tokens of row k of the plan, before s takes its token. */
static void take_top(const struct engine *e, const struct engine_plan *p, struct sample *s, int64_t k) {
    const int64_t n = s->req->r.n_top, have = (s->n_tokens - s->req->n_prompt) * n;
    if (n == 0) return;
    xgrow((void **)&s->top_id, &s->cap_top_id, have + n, sizeof *s->top_id);
    xgrow((void **)&s->top_logp, &s->cap_top_logp, have + n, sizeof *s->top_logp);
    memcpy(s->top_id + have, e->top_id + k * p->max_top, (size_t)n * sizeof *s->top_id);
    memcpy(s->top_logp + have, e->top_logp + k * p->max_top, (size_t)n * sizeof *s->top_logp);
}

int engine__accept(struct engine *e, struct sample *s, int32_t id, float logp, float logp_kept) {
    struct request *q = s->req;
    if (id < 0 || id >= e->model.vocab || !isfinite(logp))
        FAIL(ERR_NUMERIC, "generation: the model gives a log-prob of %g at response token %lld; its weights are not usable",
             (double)logp, (long long)(s->n_tokens - q->n_prompt));
    const int64_t k = s->n_tokens - q->n_prompt;
    if (s->n_tokens == s->cap_tokens || k == s->cap_logp) reserve(s, k);
    s->tokens[s->n_tokens++] = id;
    s->n_draft = 0;
    s->logp[k] = logp;
    s->logp_kept[k] = logp_kept;
    mark_seen(s, id);
    e->stats.sampled++;
    int64_t stop_at = -1;
    if (q->n_stop > 0) TRY(find_stop(s, id, &stop_at));
    if (is_stop_id(q, id) || stop_at >= 0) return finish(e, s, ENGINE_STOP, stop_at);
    if (k + 1 >= q->max_tokens) return finish(e, s, ENGINE_LENGTH, -1);
    if (k + 1 >= engine__most_tokens(q)) return finish(e, s, ENGINE_INTERRUPTED, -1);
    return 0;
}

int engine_step(struct engine *e) {
    if (e->waiting.n + e->running.n == 0) return 0;
    const struct engine_stats before = e->stats;
    const int64_t running = e->running.n;
    const double start = clock_now();
    int done = engine__verify(e);
    TRY(done);
    const bool drafted = done;
    if (!done) done = engine__burst(e);
    TRY(done);
    if (done) {
        engine__draft_timed(e, &(struct draft_time){drafted, e->stats.steps - before.steps, running, clock_now() - start,
                                                    (double)(e->stats.sampled - before.sampled)});
        return e->waiting.n + e->running.n > 0;
    }
    struct engine_plan p = {0};
    plan_step(e, &p);
    CHECK(p.n_rows > 0);
    plan_tables(e, &p);
    plan_tops(e, &p);
    p.ids = e->ids;
    p.pos = e->pos;
    p.slots = e->slots;
    p.q_start = e->q_start;
    p.pos0 = e->pos0;
    p.block_table = e->block_table;
    p.state = e->states;
    p.out_row = e->out_row;
    p.param = e->param;
    engine__draft_plan(e, &p);
    TRY(e->model.step(e->model.ctx, &p, e->out_id, e->out_logp, e->out_logp_kept));
    e->stats.steps++;
    e->stats.rows += p.n_rows;
    const int64_t used = e->pool.n_blocks - e->pool.n_free;
    if (used > e->stats.kv_blocks_peak) e->stats.kv_blocks_peak = used;
    for (int64_t i = 0, k = 0; i < p.n_seqs; i++) {
        struct sample *s = e->planned[i];
        s->n_computed += s->n_planned;
        s->n_planned = 0;
        engine__share_state(e, s);
        if (s->n_computed != s->n_tokens) continue;
        take_top(e, &p, s, k);
        const int ended = engine__accept(e, s, e->out_id[k], e->out_logp[k], e->out_logp_kept[k]);
        TRY(ended);
        if (!ended && p.next) engine__draft_take(e, s, k);
        if (!ended) TRY(engine__progress(e, s));
        k++;
    }
    TRY(engine__copy_states(e));
    if (p.n_rows == running && p.n_out == running)
        engine__draft_timed(
            e, &(struct draft_time){.steps = 1, .running = running, .seconds = clock_now() - start, .tokens = (double)running});
    return e->waiting.n + e->running.n > 0;
}

int engine_run(struct engine *e) {
    int more;
    do {
        more = engine_step(e);
        TRY(more);
    } while (more > 0);
    return 0;
}

struct engine_stats engine_stats(const struct engine *e) {
    struct engine_stats s = e->stats;
    s.waiting = e->waiting.n;
    s.running = e->running.n;
    s.n_kv_blocks = e->pool.n_blocks;
    s.kv_blocks_used = e->pool.n_blocks - e->pool.n_free;
    return s;
}
