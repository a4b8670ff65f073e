/* hash.c - XXH3 from libxxhash. */
#include "base/hash.h"

#include "base/err.h"
#include "base/file.h"

#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <xxhash.h>

uint64_t hash64(const void *p, size_t n) { return XXH3_64bits(p, n); }

static void hex128(XXH128_hash_t h, char out[33]) {
    snprintf(out, 33, "%016llx%016llx", (unsigned long long)h.high64, (unsigned long long)h.low64);
}

void hash_hex(const void *p, size_t n, char out[33]) { hex128(XXH3_128bits(p, n), out); }

int hash_file_hex(const char *path, char out[33]) {
    enum { CHUNK = 1 << 20 };
    int rc = 0;
    const int fd = file_open_read(path);
    TRY(fd);
    FILE *f = fdopen(fd, "rb");
    CHECK(f != NULL);
    XXH3_state_t *st = XXH3_createState();
    char *chunk = malloc(CHUNK);
    CHECK(st != NULL && chunk != NULL);
    XXH3_128bits_reset(st);
    for (size_t n; (n = fread(chunk, 1, CHUNK, f)) > 0;) XXH3_128bits_update(st, chunk, n);
    if (ferror(f)) rc = err_set(ERR_INPUT, __FILE__, __LINE__, "%s: %s", path, strerror(errno));
    else hex128(XXH3_128bits_digest(st), out);
    XXH3_freeState(st);
    free(chunk);
    fclose(f);
    return rc;
}
