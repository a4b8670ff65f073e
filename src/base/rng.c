/* rng.c - Philox4x32-10 and the draws built on it. */
#include "base/rng.h"

#include <math.h>

void philox4x32(uint32_t out[4], const uint32_t ctr[4], const uint32_t key[2]) {
    uint32_t c0 = ctr[0], c1 = ctr[1], c2 = ctr[2], c3 = ctr[3], k0 = key[0], k1 = key[1];
    for (int r = 0; r < 10; r++) {
        const uint64_t p0 = (uint64_t)0xD2511F53u * c0, p1 = (uint64_t)0xCD9E8D57u * c2;
        c0 = (uint32_t)(p1 >> 32) ^ c1 ^ k0;
        c1 = (uint32_t)p1;
        c2 = (uint32_t)(p0 >> 32) ^ c3 ^ k1;
        c3 = (uint32_t)p0;
        k0 += 0x9E3779B9u;
        k1 += 0xBB67AE85u;
    }
    out[0] = c0;
    out[1] = c1;
    out[2] = c2;
    out[3] = c3;
}

float rng_token(uint64_t seed, uint64_t uid, uint32_t sample, uint32_t pos) {
    const uint32_t ctr[4] = {(uint32_t)uid, (uint32_t)(uid >> 32), sample, pos};
    const uint32_t key[2] = {(uint32_t)seed, (uint32_t)(seed >> 32)};
    uint32_t out[4];
    philox4x32(out, ctr, key);
    return (float)(out[0] >> 8) * 0x1p-24f;
}

/* The four words of which draw n is one. */
static void block_of(const struct rng *r, uint32_t out[4]) {
    const uint64_t block = r->n / 4;
    const uint32_t ctr[4] = {(uint32_t)block, (uint32_t)(block >> 32), (uint32_t)r->stream, (uint32_t)(r->stream >> 32)};
    const uint32_t key[2] = {(uint32_t)r->seed ^ 0x5bd1e995u, (uint32_t)(r->seed >> 32)};
    philox4x32(out, ctr, key);
}

uint32_t rng_u32(struct rng *r) {
    uint32_t out[4];
    block_of(r, out);
    return out[r->n++ % 4];
}

/* The next two draws, which mostly are of one block. */
static void two(struct rng *r, uint32_t out[2]) {
    uint32_t block[4];
    block_of(r, block);
    out[0] = block[r->n++ % 4];
    if (r->n % 4 == 0) block_of(r, block);
    out[1] = block[r->n++ % 4];
}

uint64_t rng_below(struct rng *r, uint64_t n) {
    const uint64_t limit = UINT64_MAX - UINT64_MAX % n; /* largest multiple of n */
    uint32_t w[2];
    uint64_t v;
    do {
        two(r, w);
        v = (uint64_t)w[0] << 32 | w[1];
    } while (v >= limit);
    return v % n;
}

double rng_unit(struct rng *r) {
    uint32_t w[2];
    two(r, w);
    return (double)(((uint64_t)w[0] << 32 | w[1]) >> 11) * 0x1p-53;
}

float rng_normal(struct rng *r) {
    uint32_t w[2];
    two(r, w);
    const double u = ((double)w[0] + 0.5) * 0x1p-32, v = (double)w[1] * 0x1p-32;
    return (float)(sqrt(-2.0 * log(u)) * cos(6.283185307179586 * v));
}

void rng_shuffle(struct rng *r, int64_t *idx, int64_t n) {
    for (int64_t i = n - 1; i > 0; i--) {
        const int64_t j = (int64_t)rng_below(r, (uint64_t)i + 1), t = idx[i];
        idx[i] = idx[j];
        idx[j] = t;
    }
}
