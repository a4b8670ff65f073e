/* normals.h - standard normal test data, made once a seed.
 *
 * The same inputs are asked for in many shapes, dtypes and backends; making them again each time took four fifths of
 * the ops tests under the sanitizers. */
#ifndef VERLC_TESTS_NORMALS_H
#define VERLC_TESTS_NORMALS_H

#include "base/err.h"
#include "base/rng.h"

#include <stdint.h>
#include <stdlib.h>
#include <string.h>

enum { NORMALS_SEEDS = 64 };

/* The first n draws of the stream of `seed`, valid until the next call. More than NORMALS_SEEDS seeds: the oldest goes. */
static inline const float *normals(uint64_t seed, int64_t n) {
    static struct {
        struct rng g; /* after the last draw kept */
        int64_t n;
        float *v;
    } kept[NORMALS_SEEDS];
    static int next;
    int k = 0;
    while (k < NORMALS_SEEDS && !(kept[k].v && kept[k].g.seed == seed)) k++;
    if (k == NORMALS_SEEDS) {
        k = next++ % NORMALS_SEEDS;
        kept[k].g = (struct rng){.seed = seed, .stream = RNG_TEST};
        kept[k].n = 0;
    }
    if (!kept[k].v || n > kept[k].n) {
        kept[k].v = realloc(kept[k].v, (size_t)(n > 0 ? n : 1) * sizeof *kept[k].v);
        CHECK(kept[k].v != NULL);
        for (; kept[k].n < n; kept[k].n++) kept[k].v[kept[k].n] = rng_normal(&kept[k].g);
    }
    return kept[k].v;
}

#endif
