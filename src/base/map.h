/* map.h - byte string -> int64, open addressing, insertion order kept. */
#ifndef VERLC_BASE_MAP_H
#define VERLC_BASE_MAP_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

struct map_entry {
    char *key; /* owned, NUL-terminated copy */
    size_t n;
    int64_t value;
};
struct map {
    struct map_entry *entries; /* in insertion order */
    int64_t n, cap;
    int32_t *slots; /* index into entries + 1; 0 = empty */
    int64_t n_slots;
};

void map_free(struct map *m); /* a zeroed struct is a valid empty map */
void map_set(struct map *m, const char *key, size_t n, int64_t value);
bool map_get(const struct map *m, const char *key, size_t n, int64_t *value); /* value may be NULL */
static inline bool map_gets(const struct map *m, const char *key, int64_t *value) {
    return map_get(m, key, __builtin_strlen(key), value);
}

#endif
