/* hash.h - checksums of files and keys (XXH3). Not cryptographic. */
#ifndef VERLC_BASE_HASH_H
#define VERLC_BASE_HASH_H

#include <stddef.h>
#include <stdint.h>

uint64_t hash64(const void *p, size_t n);
/* XXH3-128 of a whole file as 32 hex digits; ERR_INPUT if it cannot be read. */
int hash_file_hex(const char *path, char out[33]);
void hash_hex(const void *p, size_t n, char out[33]);

#endif
