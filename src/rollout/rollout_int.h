/* rollout_int.h - the page pool and the engine's state, private to roll. */
#ifndef VERLC_ROLL_INT_H
#define VERLC_ROLL_INT_H

#include "rollout/rollout.h"

#include "base/buf.h"

/* Identity of a full page: XXH3-128 of the key of the page before it and its own tokens. */
struct kv_key {
    uint64_t lo, hi;
};
struct kv_key kv_key_next(struct kv_key prev, const int32_t *tokens, int64_t n);

struct kv_page {
    int32_t refs;
    bool published; /* findable under `key` */
    struct kv_key key;
    int32_t prev, next; /* in the free list (refs == 0), least recently freed first */
    int32_t chain;      /* next page in the hash bucket */
};
struct kv_pool {
    struct kv_page *pages;
    int32_t n_pages, n_free;
    int32_t free_head, free_tail; /* -1: empty */
    int32_t *buckets;
    int32_t n_buckets; /* power of two */
};
void kv_pool_init(struct kv_pool *p, int32_t n_pages);
void kv_pool_free(struct kv_pool *p);
int32_t kv_alloc(struct kv_pool *p);                                 /* refs 1; -1 when none is free */
int32_t kv_find(struct kv_pool *p, struct kv_key key);               /* refs + 1; -1 if not there */
void kv_unref(struct kv_pool *p, int32_t page);                      /* a published page stays findable until reused */
void kv_publish(struct kv_pool *p, int32_t page, struct kv_key key); /* no-op if the key is there already */
void kv_forget(struct kv_pool *p);                                   /* unpublishes all */

/* ---- the engine (scheduler.c, decode_burst.c) ---- */
struct request {
    int64_t id, n_prompt, max_tokens, n_open; /* n_open: samples not finished */
    int32_t *prompt, *stop_ids;
    int64_t n_stop_ids, n_stop;
    char **stop;
    struct rollout_request r; /* scalars only; its pointers are the owned ones above */
    int64_t planned;          /* prompt tokens planned by the sample in front */
};

struct sample {
    struct request *req;
    struct sample *prev, *next; /* in the waiting or running list */
    int64_t index;
    int32_t *tokens; /* prompt and response */
    int64_t n_tokens, cap_tokens;
    int64_t n_computed; /* tokens whose keys are in pages */
    int64_t n_planned;  /* rows of this sample in the current plan */
    int32_t *pages;
    int64_t n_pages, cap_pages;
    struct kv_key key;       /* of the last published page */
    int64_t n_keyed;         /* pages whose key is part of `key` */
    float *logp, *logp_kept; /* (response) */
    int64_t cap_logp;
    uint8_t *seen;                 /* bit set over the vocabulary, with a repetition penalty only */
    struct tokenizer_stream *text; /* decoded response, with stop strings only */
    struct buf decoded;
    int64_t n_preempted;
    double start;
};

struct list {
    struct sample *head, *tail;
    int64_t n;
};

struct burst_arrays { /* of decode_burst.c, sized at the first burst */
    struct decode_row *rows;
    int32_t *stop;
    int64_t cap_stop;
};

struct rollout_engine {
    struct rollout_model model;
    struct rollout_config cfg;
    struct kv_pool pool;
    struct list waiting, running;
    int64_t n_requests;
    struct rollout_stats stats;
    /* the plan's arrays, sized once */
    int32_t *ids, *pos, *slots, *q_start, *pos0, *pages, *out_row, *out_id;
    int64_t cap_page_row;
    struct sample_param *param;
    uint8_t *seen;
    float *out_logp, *out_logp_kept;
    struct sample **planned; /* (max_seqs) */
    struct burst_arrays burst;
    bool no_room; /* the sample at the head of the queue waits for pages */
};

bool rollout__grow_pages(struct rollout_engine *e, struct sample *s, int64_t upto);
void rollout__fill_tables(struct rollout_engine *e, int64_t n_seqs, int64_t max_pages);
struct sample_param rollout__rule(const struct rollout_request *r);
void rollout__publish_full(struct rollout_engine *e, struct sample *s, int64_t upto);
/* Takes the next token of s; 1: that ended it, and s is gone. */
int rollout__accept(struct rollout_engine *e, struct sample *s, int32_t id, float logp, float logp_kept);
static inline int64_t rollout__pages_for(int64_t tokens) { return (tokens + ROLLOUT_PAGE_LEN - 1) / ROLLOUT_PAGE_LEN; }

/* Many steps of decoding at once, when nothing else is to be done: 1 done, 0 not now. */
int rollout__burst(struct rollout_engine *e);

#endif
