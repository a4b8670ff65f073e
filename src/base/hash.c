/* hash.c - XXH3 from libxxhash. */
#include "base/hash.h"

#include "base/err.h"
#include "base/file.h"

#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/random.h>
#include <xxhash.h>

uint64_t hash64(const void *p, size_t n) { return XXH3_64bits(p, n); }

static void hex128(XXH128_hash_t h, char out[33]) {
    snprintf(out, 33, "%016llx%016llx", (unsigned long long)h.high64, (unsigned long long)h.low64);
}

void hash_hex(const void *p, size_t n, char out[33]) { hex128(XXH3_128bits(p, n), out); }

int random_hex(char *out, size_t n) {
    for (size_t i = 0; i < n; i++) {
        unsigned char byte;
        if (getrandom(&byte, 1, 0) != 1) FAIL(ERR_IO, "the system gives no random numbers: %s", strerror(errno));
        snprintf(out + 2 * i, 3, "%02x", byte);
    }
    return 0;
}

/* struct hash_stream is XXH3_state_t under another name. */
struct hash_stream *hash_stream_new(void) {
    XXH3_state_t *st = XXH3_createState();
    CHECK(st != NULL);
    XXH3_128bits_reset(st);
    return (struct hash_stream *)st;
}

void hash_stream_add(struct hash_stream *h, const void *p, size_t n) { XXH3_128bits_update((XXH3_state_t *)h, p, n); }

void hash_stream_end(struct hash_stream *h, char out[33]) {
    hex128(XXH3_128bits_digest((XXH3_state_t *)h), out);
    hash_stream_free(h);
}

void hash_stream_free(struct hash_stream *h) { XXH3_freeState((XXH3_state_t *)h); }

int hash_file_hex(const char *path, char out[33]) {
    enum { CHUNK = 1 << 20 };
    int rc = 0;
    const int fd = file_open_read(path);
    TRY(fd);
    FILE *f = fdopen(fd, "rb");
    CHECK(f != NULL);
    struct hash_stream *h = hash_stream_new();
    char *chunk = malloc(CHUNK);
    CHECK(chunk != NULL);
    for (size_t n; (n = fread(chunk, 1, CHUNK, f)) > 0;) hash_stream_add(h, chunk, n);
    if (ferror(f)) rc = err_set(ERR_INPUT, __FILE__, __LINE__, "%s: %s", path, strerror(errno));
    hash_stream_end(h, out);
    free(chunk);
    fclose(f);
    return rc;
}
