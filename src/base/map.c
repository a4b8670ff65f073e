/* map.c - see map.h. No deletion: nothing in the program needs it. */
#include "base/map.h"

#include "base/buf.h"
#include "base/err.h"
#include "base/hash.h"

#include <stdlib.h>
#include <string.h>

void map_free(struct map *m) {
    for (int64_t i = 0; i < m->n; i++) free(m->entries[i].key);
    free(m->entries);
    free(m->slots);
    *m = (struct map){0};
}

static int64_t map_slot(const struct map *m, const char *key, size_t n) {
    int64_t i = (int64_t)(hash64(key, n) & (uint64_t)(m->n_slots - 1));
    for (; m->slots[i] != 0; i = (i + 1) & (m->n_slots - 1)) {
        const struct map_entry *e = &m->entries[m->slots[i] - 1];
        if (e->n == n && memcmp(e->key, key, n) == 0) break;
    }
    return i;
}

static void map_rehash(struct map *m, int64_t n_slots) {
    free(m->slots);
    m->slots = xcalloc((size_t)n_slots, sizeof *m->slots);
    m->n_slots = n_slots;
    for (int64_t i = 0; i < m->n; i++) m->slots[map_slot(m, m->entries[i].key, m->entries[i].n)] = (int32_t)(i + 1);
}

void map_set(struct map *m, const char *key, size_t n, int64_t value) {
    if (2 * (m->n + 1) > m->n_slots) map_rehash(m, m->n_slots ? 2 * m->n_slots : 64);
    const int64_t s = map_slot(m, key, n);
    if (m->slots[s] != 0) {
        m->entries[m->slots[s] - 1].value = value;
        return;
    }
    CHECK(m->n < INT32_MAX);
    xgrow((void **)&m->entries, &m->cap, m->n + 1, sizeof *m->entries);
    m->entries[m->n] = (struct map_entry){xstrndup(key, n), n, value};
    m->slots[s] = (int32_t)++m->n;
}

bool map_get(const struct map *m, const char *key, size_t n, int64_t *value) {
    if (m->n_slots == 0) return false;
    const int64_t s = map_slot(m, key, n);
    if (m->slots[s] == 0) return false;
    if (value) *value = m->entries[m->slots[s] - 1].value;
    return true;
}
