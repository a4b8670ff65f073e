/* size.h - products and sums that form sizes and never wrap: what would pass SIZE_MOST is SIZE_MOST, more bytes than any
 * memory has. So no size that a plan is given is smaller than the true one, and the plan refuses what is too large.
 * Numbers are not negative. A sum of a few sizes fits in size_t. */
#ifndef VERLC_BASE_SIZE_H
#define VERLC_BASE_SIZE_H

#include <stddef.h>
#include <stdint.h>

#define SIZE_MOST ((int64_t)1 << 60)

static inline int64_t size_mul(int64_t a, int64_t b) {
    int64_t x;
    return __builtin_mul_overflow(a, b, &x) || x > SIZE_MOST ? SIZE_MOST : x;
}

static inline int64_t size_add(int64_t a, int64_t b) {
    int64_t x;
    return __builtin_add_overflow(a, b, &x) || x > SIZE_MOST ? SIZE_MOST : x;
}

static inline size_t size_product(const int64_t *v, size_t n) {
    int64_t x = 1;
    for (size_t i = 0; i < n; i++) x = size_mul(x, v[i]);
    return (size_t)x;
}
/* Bytes of an array: SIZE_OF(rows, columns, 4). */
#define SIZE_OF(...) size_product((const int64_t[]){__VA_ARGS__}, sizeof((const int64_t[]){__VA_ARGS__}) / sizeof(int64_t))

#endif
