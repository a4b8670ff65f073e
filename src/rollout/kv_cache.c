/* kv_cache.c - the page pool: reference counts, a free list in order of release,
 * and an index of full pages by content.  Knows nothing of samples or devices.
 *
 * Invariant: a page is in the free list exactly when refs == 0; published pages
 * keep their content until kv_alloc hands them out again. */
#include "rollout/rollout_int.h"

#include "base/buf.h"
#include "base/err.h"

#include <stdlib.h>
#include <string.h>
#include <xxhash.h>

struct kv_key kv_key_next(struct kv_key prev, const int32_t *tokens, int64_t n) {
    struct {
        struct kv_key prev;
        int32_t tokens[ROLLOUT_PAGE_LEN];
    } of;
    CHECK(n <= ROLLOUT_PAGE_LEN);
    const size_t bytes = (size_t)n * sizeof *tokens;
    of.prev = prev;
    memcpy(of.tokens, tokens, bytes);
    const XXH128_hash_t h = XXH3_128bits(&of, sizeof prev + bytes);
    return (struct kv_key){h.low64, h.high64};
}

static void free_push(struct kv_pool *p, int32_t i) {
    struct kv_page *g = &p->pages[i];
    g->prev = p->free_tail;
    g->next = -1;
    if (p->free_tail >= 0) p->pages[p->free_tail].next = i;
    else p->free_head = i;
    p->free_tail = i;
    p->n_free++;
}

static void free_remove(struct kv_pool *p, int32_t i) {
    struct kv_page *g = &p->pages[i];
    if (g->prev >= 0) p->pages[g->prev].next = g->next;
    else p->free_head = g->next;
    if (g->next >= 0) p->pages[g->next].prev = g->prev;
    else p->free_tail = g->prev;
    p->n_free--;
}

static int32_t *bucket_of(const struct kv_pool *p, struct kv_key key) { return &p->buckets[key.lo & (uint64_t)(p->n_buckets - 1)]; }

static void unpublish(struct kv_pool *p, int32_t i) {
    int32_t *link = bucket_of(p, p->pages[i].key);
    while (*link != i) link = &p->pages[*link].chain;
    *link = p->pages[i].chain;
    p->pages[i].published = false;
}

void kv_pool_init(struct kv_pool *p, int32_t n_pages) {
    *p = (struct kv_pool){.n_pages = n_pages, .free_head = -1, .free_tail = -1, .n_buckets = 64};
    while (p->n_buckets < n_pages) p->n_buckets *= 2;
    p->pages = xcalloc((size_t)n_pages, sizeof *p->pages);
    p->buckets = xmalloc((size_t)p->n_buckets * sizeof *p->buckets);
    for (int32_t i = 0; i < p->n_buckets; i++) p->buckets[i] = -1;
    for (int32_t i = 0; i < n_pages; i++) free_push(p, i);
}

void kv_pool_free(struct kv_pool *p) {
    free(p->pages);
    free(p->buckets);
    *p = (struct kv_pool){0};
}

int32_t kv_alloc(struct kv_pool *p) {
    const int32_t i = p->free_head;
    if (i < 0) return -1;
    free_remove(p, i);
    if (p->pages[i].published) unpublish(p, i);
    p->pages[i].refs = 1;
    return i;
}

static int32_t lookup(const struct kv_pool *p, struct kv_key key) {
    int32_t i = *bucket_of(p, key);
    while (i >= 0 && (p->pages[i].key.lo != key.lo || p->pages[i].key.hi != key.hi)) i = p->pages[i].chain;
    return i;
}

int32_t kv_find(struct kv_pool *p, struct kv_key key) {
    const int32_t i = lookup(p, key);
    if (i < 0) return -1;
    if (p->pages[i].refs++ == 0) free_remove(p, i);
    return i;
}

void kv_unref(struct kv_pool *p, int32_t page) {
    CHECK(page >= 0 && page < p->n_pages && p->pages[page].refs > 0);
    if (--p->pages[page].refs == 0) free_push(p, page);
}

void kv_publish(struct kv_pool *p, int32_t page, struct kv_key key) {
    struct kv_page *g = &p->pages[page];
    CHECK(g->refs > 0);
    if (g->published || lookup(p, key) >= 0) return;
    int32_t *head = bucket_of(p, key);
    g->key = key;
    g->chain = *head;
    g->published = true;
    *head = page;
}

void kv_forget(struct kv_pool *p) {
    for (int32_t i = 0; i < p->n_pages; i++)
        if (p->pages[i].published) unpublish(p, i);
}
