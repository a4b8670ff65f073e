/* hash.h - checksums of files and keys (XXH3). Not cryptographic. */
#ifndef VERLC_BASE_HASH_H
#define VERLC_BASE_HASH_H

#include <stddef.h>
#include <stdint.h>

uint64_t hash64(const void *p, size_t n);
/* XXH3-128 of a whole file as 32 hex digits; ERR_INPUT if it cannot be read. */
int hash_file_hex(const char *path, char out[33]);
/* The same of bytes as they come. */
struct hash_stream;
struct hash_stream *hash_stream_new(void);
void hash_stream_add(struct hash_stream *h, const void *p, size_t n);
void hash_stream_end(struct hash_stream *h, char out[33]); /* frees it */
void hash_stream_free(struct hash_stream *h);              /* NULL ok */
void hash_hex(const void *p, size_t n, char out[33]);
/* n bytes of the system's random numbers, fit for a key, as hex digits; out has room for 2 n + 1. ERR_IO: there are none. */
int random_hex(char *out, size_t n);

#endif
