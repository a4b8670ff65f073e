/* kv_cache.c - the pool of KV blocks: reference counts, a free list in order of release (LRU eviction), and
 * an index of blocks by content (prefix caching).  A full block may have several owners. One that is partly filled is
 * findable while it has none, and whoever takes it fills it up.  Knows nothing of samples or devices.
 *
 * Invariant: a block is in the free list exactly when refs == 0; published blocks
 * keep their content until kv_alloc allocates them again. */
#include "engine/engine_int.h"

#include "base/buf.h"
#include "base/err.h"

#include <stdlib.h>
#include <string.h>
#include <xxhash.h>

struct kv_key kv_key_next(struct kv_key prev, const int32_t *tokens, int64_t n) {
    struct {
        struct kv_key prev;
        int32_t tokens[KV_BLOCK_LEN];
    } of;
    CHECK(n <= KV_BLOCK_LEN);
    const size_t bytes = (size_t)n * sizeof *tokens;
    of.prev = prev;
    memcpy(of.tokens, tokens, bytes);
    const XXH128_hash_t h = XXH3_128bits(&of, sizeof prev + bytes);
    return (struct kv_key){h.low64, h.high64};
}

static void free_push(struct kv_pool *p, int32_t i) {
    struct kv_block *g = &p->blocks[i];
    g->prev = p->free_tail;
    g->next = -1;
    if (p->free_tail >= 0) p->blocks[p->free_tail].next = i;
    else p->free_head = i;
    p->free_tail = i;
    p->n_free++;
}

static void free_remove(struct kv_pool *p, int32_t i) {
    struct kv_block *g = &p->blocks[i];
    if (g->prev >= 0) p->blocks[g->prev].next = g->next;
    else p->free_head = g->next;
    if (g->next >= 0) p->blocks[g->next].prev = g->prev;
    else p->free_tail = g->prev;
    p->n_free--;
}

static int32_t *bucket_of(const struct kv_pool *p, struct kv_key key) { return &p->buckets[key.lo & (uint64_t)(p->n_buckets - 1)]; }

static void unpublish(struct kv_pool *p, int32_t i) {
    int32_t *link = bucket_of(p, p->blocks[i].key);
    while (*link != i) link = &p->blocks[*link].chain;
    *link = p->blocks[i].chain;
    p->blocks[i].published = false;
}

void kv_pool_init(struct kv_pool *p, int32_t n_blocks) {
    *p = (struct kv_pool){.n_blocks = n_blocks, .free_head = -1, .free_tail = -1, .n_buckets = 64};
    while (p->n_buckets < n_blocks) p->n_buckets *= 2;
    p->blocks = xcalloc((size_t)n_blocks, sizeof *p->blocks);
    p->buckets = xmalloc((size_t)p->n_buckets * sizeof *p->buckets);
    for (int32_t i = 0; i < p->n_buckets; i++) p->buckets[i] = -1;
    for (int32_t i = 0; i < n_blocks; i++) free_push(p, i);
}

void kv_pool_free(struct kv_pool *p) {
    free(p->blocks);
    free(p->buckets);
    *p = (struct kv_pool){0};
}

int32_t kv_alloc(struct kv_pool *p) {
    const int32_t i = p->free_head;
    if (i < 0) return -1;
    free_remove(p, i);
    if (p->blocks[i].published) unpublish(p, i);
    p->blocks[i].refs = 1;
    return i;
}

static int32_t lookup(const struct kv_pool *p, struct kv_key key) {
    int32_t i = *bucket_of(p, key);
    while (i >= 0 && (p->blocks[i].key.lo != key.lo || p->blocks[i].key.hi != key.hi)) i = p->blocks[i].chain;
    return i;
}

int32_t kv_find(struct kv_pool *p, struct kv_key key) {
    const int32_t i = lookup(p, key);
    if (i < 0) return -1;
    if (p->blocks[i].refs++ == 0) free_remove(p, i);
    return i;
}

int32_t kv_take(struct kv_pool *p, struct kv_key key) {
    const int32_t i = lookup(p, key);
    if (i < 0 || p->blocks[i].refs > 0) return -1;
    free_remove(p, i);
    unpublish(p, i);
    p->blocks[i].refs = 1;
    return i;
}

void kv_ref(struct kv_pool *p, int32_t block) {
    CHECK(block >= 0 && block < p->n_blocks && p->blocks[block].refs > 0);
    p->blocks[block].refs++;
}

void kv_unref(struct kv_pool *p, int32_t block) {
    CHECK(block >= 0 && block < p->n_blocks && p->blocks[block].refs > 0);
    if (--p->blocks[block].refs == 0) free_push(p, block);
}

void kv_publish(struct kv_pool *p, int32_t block, struct kv_key key) {
    struct kv_block *g = &p->blocks[block];
    CHECK(g->refs > 0);
    if (g->published || lookup(p, key) >= 0) return;
    int32_t *head = bucket_of(p, key);
    g->key = key;
    g->chain = *head;
    g->published = true;
    *head = block;
}
