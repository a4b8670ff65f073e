/* base64.h - bytes as text and back (RFC 4648, with padding): how arrays are stored in JSON, so that no number changes. */
#ifndef VERLC_BASE_BASE64_H
#define VERLC_BASE_BASE64_H

#include <stdbool.h>
#include <stddef.h>

char *base64_text(const void *data, size_t n); /* caller frees */
/* The text's len characters stand for exactly n bytes, which go to out; else false, and out is undefined. */
bool base64_read(void *out, size_t n, const char *text, size_t len);

#endif
