/* rng.h - randomness as a pure function of its address.
 *
 * Philox4x32-10 (Salmon et al., SC 2011): four 32-bit words from a 128-bit
 * counter and a 64-bit key.  Sampling of tokens uses rng_token, addressed by
 * (seed, uid, sample, position), so the same run draws the same tokens
 * whatever the batch, the order or the number of ranks (invariant 4).
 * Shuffles and initial weights use a stream: an explicit counter that can be
 * saved and restored. */
#ifndef VERLC_BASE_RNG_H
#define VERLC_BASE_RNG_H

#include <stdint.h>

void philox4x32(uint32_t out[4], const uint32_t ctr[4], const uint32_t key[2]);

/* Uniform in [0, 1), 24 bits.  uid: dataset row in training, 0 in generate. */
float rng_token(uint64_t seed, uint64_t uid, uint32_t sample, uint32_t pos);

struct rng {
    uint64_t seed;
    uint64_t stream; /* what it is for: keeps shuffles and init independent */
    uint64_t n;      /* draws made so far: the whole state */
};
enum rng_stream { RNG_SHUFFLE = 1, RNG_INIT = 2, RNG_DATA = 3, RNG_TEST = 4, RNG_MINIBATCH = 5, RNG_RESAMPLE = 6, RNG_TRACE = 7 };

uint32_t rng_u32(struct rng *r);
uint64_t rng_below(struct rng *r, uint64_t n);            /* uniform in [0, n), no modulo bias; n > 0 */
double rng_unit(struct rng *r);                           /* uniform in [0, 1), 53 bits (two draws) */
float rng_normal(struct rng *r);                          /* standard normal, Box-Muller (two draws) */
void rng_shuffle(struct rng *r, int64_t *idx, int64_t n); /* Fisher-Yates */

#endif
