/* sampler.cuh - the arithmetic of the sampler's cut: keys, masses, and the interval
 * of keys that is narrowed.  Plain functions of their arguments, so they also compile for
 * the host.
 *
 * Invariant: an interval [lo, hi) always holds the key looked for: the entries at or above
 * lo measure at least the target, those at or above hi less. */
#ifndef VERLC_DEV_CUDA_SAMPLER_CUH
#define VERLC_DEV_CUDA_SAMPLER_CUH

#include <stdint.h>
#include <string.h>

#ifdef __CUDACC__
#define SAMPLE_FN static __host__ __device__ __forceinline__
#else
#define SAMPLE_FN static inline
#endif

enum { N_CUTS = 7, LIST_ROOM = 8192 };

typedef unsigned long long mass_t; /* a sum of probabilities, in units; also a count */

/* Keys at or above `key` but for those equal to it after the first `ties` of them are meant. */
struct cut {
    uint32_t key;
    mass_t ties;
};

/* ---- keys: ascending in z; -0 is 0; NaN is 0, below all ---- */

SAMPLE_FN uint32_t key_of(float z) {
    uint32_t u;
    if (z != z) return 0;
    if (z == 0) z = 0;
    memcpy(&u, &z, sizeof u);
    return u & 0x80000000u ? ~u : u | 0x80000000u;
}
SAMPLE_FN float z_of(uint32_t key) {
    const uint32_t u = key & 0x80000000u ? key ^ 0x80000000u : ~key;
    float z;
    memcpy(&z, &u, sizeof z);
    return z;
}
/* Whether a group may hold keys at or above lo; its maximum does not tell of NaN, which no key above 0 is. */
SAMPLE_FN bool group_reaches(float max, uint32_t lo) { return lo == 0 || key_of(max) >= lo; }

/* ---- masses ---- */

/* The largest entry's mass in a sum of n: a power of 2 such that the sum stays below 2^62. */
SAMPLE_FN float mass_unit(int64_t n) {
    float unit = 4611686018427387904.0f; /* 2^62 */
    for (; n > 0; n /= 2) unit *= 0.5f;
    return unit;
}
/* The least sum that is top_p of the whole. */
SAMPLE_FN mass_t mass_part(mass_t total, float top_p) {
    const double part = (double)top_p * (double)total;
    mass_t m = (mass_t)part;
    if ((double)m < part) m++;
    return m > 0 ? m : 1;
}
/* Of n ties, `before` of them elsewhere: how many may still be kept of `most`. */
SAMPLE_FN mass_t kept_ties(mass_t n, mass_t before, mass_t most) {
    const mass_t left = n > before ? n - before : 0;
    return left < most ? left : most;
}

/* ---- the interval ---- */

struct interval {
    uint32_t lo, hi;
    mass_t above; /* measure of the keys at or above hi */
};

/* Seven keys in [lo, hi]. First at lo + 1 and at depths below the largest, since that is how logits are
 * spread; then at even distances in z; and, where z does not divide any more, in keys, which ends. */
SAMPLE_FN void interval_cuts(uint32_t (&cut)[N_CUTS], const struct interval *v, int round, float max) {
    const float depth[N_CUTS] = {0, 32, 8, 4, 2, 1, 0}; /* at 32 all masses but 1e-14 of the largest are in */
    const float z = z_of(v->lo), width = z_of(v->hi) - z;
    const uint32_t keys = v->hi - v->lo;
#ifdef __CUDA_ARCH__
#pragma unroll
#endif
    for (int i = 0; i < N_CUTS; i++) {
        uint32_t k;
        if (round == 0) k = i == 0 ? v->lo + 1 : key_of(max - depth[i]);
        else if (round < 4) k = key_of(z + width * ((float)(i + 1) / 8));
        else k = v->lo + (uint32_t)((uint64_t)keys * (uint64_t)(i + 1) / 8);
        if (round >= 4 && keys < 8) k = v->lo + 1 + (uint32_t)i; /* one by one */
        cut[i] = k < v->lo ? v->lo : k > v->hi ? v->hi : k;
    }
}

/* total[i]: measure of the keys in [cut[i], hi). */
SAMPLE_FN void interval_narrow(struct interval *v, const uint32_t (&cut)[N_CUTS], const mass_t (&total)[N_CUTS], mass_t target) {
    const struct interval old = *v;
#ifdef __CUDA_ARCH__
#pragma unroll
#endif
    for (int i = 0; i < N_CUTS; i++) {
        const mass_t m = old.above + total[i];
        if (m >= target) v->lo = cut[i] > v->lo ? cut[i] : v->lo;
        else if (cut[i] < v->hi) v->hi = cut[i], v->above = m;
    }
}

/* Of an interval of one key, whose entries measure `each`. */
SAMPLE_FN struct cut interval_cut(const struct interval *v, mass_t target, mass_t each) {
    struct cut c = {v->lo, 1};
    if (each > 0 && target > v->above) c.ties = (target - v->above + each - 1) / each;
    return c;
}

#endif
