/* utf8.h - where the characters of UTF-8 end. */
#ifndef VERLC_BASE_UTF8_H
#define VERLC_BASE_UTF8_H

#include <stddef.h>

/* Bytes of the well-formed character at p, or minus the bytes of the ill-formed part ("maximal subpart", Unicode 3.9); n > 0. */
int utf8_step(const char *p, size_t n);
/* The most bytes of s, up to n, that end with a whole character. */
size_t utf8_cut(const char *s, size_t n);

#endif
