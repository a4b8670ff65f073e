/* engine_int.h - private to engine: the pool of KV blocks and the engine's state. */
#ifndef VERLC_ENGINE_ENGINE_INT_H
#define VERLC_ENGINE_ENGINE_INT_H

#include "engine/engine.h"

#include "base/buf.h"

/* Identity of a block: XXH3-128 of the key of the block before it and its own tokens, KV_BLOCK_LEN or, partly filled, fewer. */
struct kv_key {
    uint64_t lo, hi;
};
struct kv_key kv_key_next(struct kv_key prev, const int32_t *tokens, int64_t n);

struct kv_block {
    int32_t refs;
    bool published; /* findable under `key` */
    struct kv_key key;
    int32_t prev, next; /* in the free list (refs == 0), least recently freed first */
    int32_t chain;      /* next block in the hash bucket */
};
struct kv_pool {
    struct kv_block *blocks;
    int32_t n_blocks, n_free;
    int32_t free_head, free_tail; /* -1: empty */
    int32_t *buckets;
    int32_t n_buckets; /* power of two */
};
void kv_pool_init(struct kv_pool *p, int32_t n_blocks);
void kv_pool_free(struct kv_pool *p);
int32_t kv_alloc(struct kv_pool *p);                                  /* refs 1; -1 when none is free */
int32_t kv_find(struct kv_pool *p, struct kv_key key);                /* refs + 1; -1: not found */
int32_t kv_take(struct kv_pool *p, struct kv_key key);                /* one without owner: refs 1, no longer findable; -1: none */
void kv_ref(struct kv_pool *p, int32_t block);                        /* refs + 1 of one that has an owner */
void kv_unref(struct kv_pool *p, int32_t block);                      /* a published block stays findable until reused */
void kv_publish(struct kv_pool *p, int32_t block, struct kv_key key); /* no-op if the key is published already */

/* ---- the engine (scheduler.c, decode_burst.c) ---- */
struct request {
    int64_t id, n_prompt, max_tokens, n_open; /* n_open: samples not finished */
    int32_t *prompt, *stop_ids;
    int64_t n_stop_ids, n_stop;
    char **stop;
    struct engine_request r; /* scalars only; its pointers are the owned ones above */
    int64_t planned;         /* prompt tokens planned by the sample in front */
    struct sample *leader;   /* of a model with states: computes what the others wait for; NULL: none */
};

struct sample {
    struct request *req;
    struct sample *prev, *next; /* in the waiting or running list */
    int64_t index;
    int32_t *tokens; /* prompt and response */
    int64_t n_tokens, cap_tokens;
    int64_t n_computed; /* tokens that are in the KV cache */
    int64_t n_planned;  /* rows of this sample in the current plan */
    int32_t *blocks;
    int64_t n_blocks, cap_blocks;
    int32_t state;           /* slot of its state; -1: none */
    bool follows;            /* it waits for the request's leader, */
    int64_t promised;        /* and will take so many blocks then */
    struct kv_key key;       /* of the last published block */
    int64_t n_keyed;         /* blocks whose key is part of `key` */
    float *logp, *logp_kept; /* (response) */
    int64_t cap_logp;
    int32_t *top_id; /* (response, n_top of the request), with the most probable tokens only */
    float *top_logp;
    int64_t cap_top_id, cap_top_logp, n_cached;
    uint8_t *seen;                 /* bit set over the vocabulary, with a repetition penalty only */
    struct tokenizer_stream *text; /* decoded response, with stop strings only */
    struct buf decoded;
    size_t segment_text;             /* bytes of `decoded` before the segment that is drawn */
    int32_t draft[ENGINE_MAX_DRAFT]; /* of the tokens after the last one */
    int64_t n_draft;
    int64_t n_preempted, n_verified, n_drafted, n_accepted;
    double start;
};

struct list {
    struct sample *head, *tail;
    int64_t n;
};

static inline void list_push_back(struct list *l, struct sample *s) {
    s->prev = l->tail;
    s->next = NULL;
    if (l->tail) l->tail->next = s;
    else l->head = s;
    l->tail = s;
    l->n++;
}
static inline void list_push_front(struct list *l, struct sample *s) {
    s->next = l->head;
    s->prev = NULL;
    if (l->head) l->head->prev = s;
    else l->tail = s;
    l->head = s;
    l->n++;
}
static inline void list_insert_after(struct list *l, struct sample *at, struct sample *s) {
    s->prev = at;
    s->next = at->next;
    if (at->next) at->next->prev = s;
    else l->tail = s;
    at->next = s;
    l->n++;
}
static inline void list_remove(struct list *l, struct sample *s) {
    if (s->prev) s->prev->next = s->next;
    else l->head = s->next;
    if (s->next) s->next->prev = s->prev;
    else l->tail = s->prev;
    l->n--;
}

struct burst_arrays { /* of decode_burst.c, sized at the first burst */
    struct decode_row *rows;
    int32_t *stop;
    int64_t cap_stop;
};

/* Of speculative.c: whether tokens are drafted, and how it is found out. */
struct drafting {
    bool on;
    enum { DRAFT_FIXED, DRAFT_TRIAL, DRAFT_PLAIN_TRIAL, DRAFT_CHOSEN } state;
    struct draft_trial {
        int64_t calls, steps;   /* the first ones do not count */
        double seconds, tokens; /* tokens of a sample */
    } trial[2];                 /* without and with drafts */
    int64_t chosen_at, since;   /* samples that ran then, steps since */
    int64_t left;               /* verifying steps before a waiting sample is admitted */
    /* a plan's arrays, of max_seqs samples; and (max_rows) */
    struct decode_row *rows;
    int64_t *n_draft, *n_blocks;
    int32_t *ids, *id, *draft, *next;
    float *logp, *logp_kept;
};

struct engine {
    struct engine_model model;
    struct engine_config cfg;
    struct kv_pool pool;
    struct list waiting, running;
    int64_t n_requests;
    struct engine_stats stats;
    /* the plan's arrays, sized once */
    int32_t *ids, *pos, *slots, *q_start, *pos0, *block_table, *out_row, *out_id;
    int64_t cap_block_table;
    struct sample_param *param;
    uint8_t *seen;
    float *out_logp, *out_logp_kept;
    int32_t *n_top, *top_id; /* (max_seqs), (max_seqs, ENGINE_MAX_TOP); NULL: no sample has wanted any */
    float *top_logp;
    struct sample **planned;       /* (max_seqs) */
    int32_t *states, *free_states; /* (max_seqs): of the planned samples; slots that no sample has, the last one next */
    int64_t n_free_states;
    int64_t promised; /* KV blocks, to samples that follow */
    bool shares_states;
    int32_t *copy_from, *copy_to; /* (max_seqs): states to copy after this step */
    int64_t n_copies;
    struct burst_arrays burst;
    struct drafting drafting;
    bool no_room;        /* the sample at the head of the queue waits for blocks */
    int64_t burst_steps; /* of the next burst, with cfg.first_burst */
};

/* Blocks for tokens [0, upto); false when none is free (then unchanged beyond what was got). */
bool engine__grow_blocks(struct engine *e, struct sample *s, int64_t upto);
void engine__drop_blocks(struct engine *e, struct sample *s); /* all; s counts as not computed then */
/* Drops them so that a request with the same tokens finds all that is computed, the block that is partly filled included. */
void engine__release_blocks(struct engine *e, struct sample *s);
/* Room for the next token of s, by preemption where no block is free; false: s itself was preempted. */
bool engine__make_room(struct engine *e, struct sample *s);
void engine__preempt(struct engine *e, struct sample *s); /* running -> head of the queue */
void engine__fill_tables(struct engine *e, int64_t n_seqs, int64_t max_blocks);
struct sample_param engine__rule(const struct engine *e, const struct engine_request *r);
void engine__publish_full(struct engine *e, struct sample *s, int64_t upto);
/* Takes the next token of s; 1: that ended it, and s was freed. */
int engine__accept(struct engine *e, struct sample *s, int32_t id, float logp, float logp_kept);
/* Tells of a sample that has drawn tokens and goes on. */
int engine__progress(struct engine *e, const struct sample *s);
/* Tokens of the response at which a sample of q ends or is interrupted. */
static inline int64_t engine__most_tokens(const struct request *q) {
    return q->r.pause_at > 0 && q->r.pause_at < q->max_tokens ? q->r.pause_at : q->max_tokens;
}
/* Tokens that it may draw yet. */
static inline int64_t engine__left(const struct sample *s) {
    return engine__most_tokens(s->req) - (s->n_tokens - s->req->n_prompt);
}
static inline int64_t engine__blocks_for(int64_t tokens) { return (tokens + KV_BLOCK_LEN - 1) / KV_BLOCK_LEN; }

/* ---- state_sharing.c ---- */
/* s is admitted: the first of its request leads, where others are next in the queue, those follow. */
void engine__lead_or_follow(struct engine *e, struct sample *s);
void engine__stop_leading(struct engine *e, struct sample *s); /* nobody waits for s any more */
void engine__stop_following(struct engine *e, struct sample *s);
/* Rows that s may compute in one step, of `take`. */
int64_t engine__until_shared(const struct sample *s, int64_t take);
/* After a step: where s has computed what its followers wait for, they have it when the states are copied. */
void engine__share_state(struct engine *e, struct sample *s);
int engine__copy_states(struct engine *e);
void engine__share_block(struct engine *e, struct sample *s, int32_t block); /* the next block of s is one that others have */

/* A multi-step decode burst, when all running samples decode: 1 done, 0 not now. */
int engine__burst(struct engine *e);
/* All running samples decode, by nothing but their rules. */
bool engine__all_decode(const struct engine *e);
/* And no waiting one can be admitted. */
bool engine__only_decode(const struct engine *e);
/* Steps that the next burst may have. */
int64_t engine__burst_limit(struct engine *e);
/* It is sampled by a struct decode_row alone. */
static inline bool engine__plain_rule(const struct sample *s) { return !s->seen && s->req->r.n_top == 0; }
struct decode_row engine__decode_row(const struct engine *e, const struct sample *s);

/* ---- drafts (speculative.c) ---- */
void engine__draft_create(struct engine *e);
void engine__draft_free(struct engine *e);
/* A verifying step: 1 done, 0 not now. */
int engine__verify(struct engine *e);
/* A step's drafts: before, and of its sample that has the k-th draw, after it has taken that. */
void engine__draft_plan(struct engine *e, struct engine_plan *p);
void engine__draft_take(const struct engine *e, struct sample *s, int64_t k);
/* After steps in which samples only decoded: what they took. */
struct draft_time {
    bool drafted;
    int64_t steps, running;
    double seconds, tokens;
};
void engine__draft_timed(struct engine *e, const struct draft_time *t);

#endif
