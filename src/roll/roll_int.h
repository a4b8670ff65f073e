/* roll_int.h - the page pool, private to roll. */
#ifndef VERLC_ROLL_INT_H
#define VERLC_ROLL_INT_H

#include "roll/roll.h"

/* Identity of a full page: XXH3-128 of the key of the page before it and its own tokens. */
struct kv_key {
    uint64_t lo, hi;
};
struct kv_key kv_key_next(struct kv_key prev, const int32_t *tokens, int64_t n);

struct kv_page {
    int32_t refs;
    bool published;         /* findable under `key` */
    struct kv_key key;
    int32_t prev, next;     /* in the free list (refs == 0), least recently freed first */
    int32_t chain;          /* next page in the hash bucket */
};
struct kv_pool {
    struct kv_page *pages;
    int32_t n_pages, n_free;
    int32_t free_head, free_tail; /* -1: empty */
    int32_t *buckets;
    int32_t n_buckets;      /* power of two */
};
void kv_pool_init(struct kv_pool *p, int32_t n_pages);
void kv_pool_free(struct kv_pool *p);
int32_t kv_alloc(struct kv_pool *p);                      /* refs 1; -1 when none is free */
int32_t kv_find(struct kv_pool *p, struct kv_key key);    /* refs + 1; -1 if not there */
void kv_unref(struct kv_pool *p, int32_t page);           /* a published page stays findable until reused */
void kv_publish(struct kv_pool *p, int32_t page, struct kv_key key); /* no-op if the key is there already */
void kv_forget(struct kv_pool *p);                        /* unpublishes all */

#endif
