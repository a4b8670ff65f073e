/* sampler.c - draws a token from each row of logits.
 *
 * Without truncation a row is read twice: once for the softmax statistics of
 * its chunks, which also give the log-prob, and once inside the chunk where the
 * draw falls.  With truncation, a bound that surely lies below the cut is found
 * first, so that only the few entries above it are sorted.
 *
 * Invariant: logp comes from cpu_head_merge over the raw logits, whatever the
 * rule; penalty and truncation change the draw and logp_kept alone. */
#include "device/cpu/lm_head.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

enum { CHUNK = DEV_VOCAB_CHUNK, RUN = 64 /* entries whose largest one bounds top-k */ };

struct entry {
    uint32_t key; /* what it is sorted by, ascending */
    int32_t id;
};

/* Working memory of one thread, for rows of `vocab` entries. */
struct mem {
    struct cpu_head_sum *sums; /* (chunks) */
    float *weight;             /* (CHUNK) */
    int32_t *idx;              /* (CHUNK) */
    /* when the row has a penalty or is truncated */
    float *z;                   /* (vocab) */
    struct entry *list, *other; /* (vocab); other also holds the list's weights */
};

struct job {
    const struct sample_args *a;
    const struct cpu *cpu;
    const struct cpu_kern *k;
    char *big; /* n_threads x big_bytes, or NULL when no row needs it */
    size_t big_bytes;
};

static bool truncates(const struct sample_param *p, int64_t vocab) {
    return !p->greedy && ((p->top_k > 0 && p->top_k < vocab) || p->top_p < 1 || p->min_p > 0);
}
static bool penalised(const struct sample_args *a, const struct sample_param *p) {
    return a->seen.data && p->repetition_penalty != 1;
}

/* ---- statistics ---- */

/* Of one whole row; the chunks' own go to `sums`. */
static struct cpu_head_state row_state(const struct job *j, const float *raw, int64_t vocab, float inv_temp,
                                       struct cpu_head_sum *sums) {
    struct cpu_head_state s = {0};
    for (int64_t i = 0; i < cpu_head_chunks(vocab); i++) {
        j->k->head_sum(&sums[i], raw + i * CHUNK, cpu_head_chunk_len(vocab, i), inv_temp, false);
        cpu_head_merge(&s, &sums[i]);
    }
    return s;
}

/* ---- without truncation ---- */

struct run { /* of a row's logits */
    const float *raw;
    int64_t n;
    float inv_temp; /* 1: they are scaled */
    float max;
};

/* The first entry of the run whose running sum passes `target` (in units of exp(max)). */
static int64_t draw_in_chunk(const struct job *j, const struct run *r, double target, float *weight) {
    j->k->head_exp(weight, r->raw, r->n, r->inv_temp, r->max);
    double sum = 0;
    int64_t last = 0;
    for (int64_t i = 0; i < r->n; i++) {
        sum += (double)weight[i];
        if (sum > target) return i;
        if (weight[i] > 0) last = i;
    }
    return last; /* the sum in another order was a little larger */
}

/* From the whole row, whose statistics s and m->sums are. */
static int64_t draw_all(const struct job *j, const struct run *row, float u, const struct cpu_head_state *s, const struct mem *m) {
    const int64_t vocab = row->n;
    const double target = (double)u * s->sum;
    double before = 0, scale = 1;
    int64_t chunk = 0;
    for (int64_t i = 0; i < cpu_head_chunks(vocab); i++) {
        const double e = exp((double)m->sums[i].max - s->max), w = e * (double)m->sums[i].sum;
        if (!(w > 0)) continue;
        chunk = i;
        scale = e;
        if (before + w > target || i == cpu_head_chunks(vocab) - 1) break;
        before += w;
    }
    const struct run in = {row->raw + chunk * CHUNK, cpu_head_chunk_len(vocab, chunk), row->inv_temp, m->sums[chunk].max};
    return chunk * CHUNK + draw_in_chunk(j, &in, (target - before) / scale, m->weight);
}

/* Index of the largest, the lowest of equal ones; NaN ranks below all. */
static int64_t largest(const struct job *j, const float *x, int64_t n, int32_t *idx) {
    const float max = j->k->max(x, n);
    for (int64_t i = 0; i < n; i += CHUNK)
        if (j->k->at_least(idx, x + i, n - i < CHUNK ? n - i : CHUNK, max) > 0) return i + idx[0];
    return 0;
}

/* ---- sorting ---- */

/* A key whose ascending order is z's descending order. */
static uint32_t key_of(float z) {
    uint32_t u;
    const float v = z + 0.0f; /* -0 ranks as 0 */
    memcpy(&u, &v, sizeof u);
    return u & 0x80000000u ? u : ~(u | 0x80000000u);
}
static float z_of(uint32_t key) {
    const uint32_t u = key & 0x80000000u ? key : ~key & 0x7fffffffu;
    float z;
    memcpy(&z, &u, sizeof z);
    return z;
}

/* Stable radix sort by key, 11 bits at a time; the result is in *list. */
static void sort_entries(struct entry **list, struct entry **other, int64_t n) {
    enum { BITS = 11, BINS = 1 << BITS, PASSES = 3 };
    int32_t count[PASSES][BINS] = {{0}};
    for (int64_t i = 0; i < n; i++)
        for (int p = 0; p < PASSES; p++) count[p][(*list)[i].key >> (p * BITS) & (BINS - 1)]++;
    for (int p = 0; p < PASSES; p++) {
        int32_t *at = count[p], sum = 0;
        for (int b = 0; b < BINS; b++) {
            const int32_t c = at[b];
            at[b] = sum;
            sum += c;
        }
        for (int64_t i = 0; i < n; i++) (*other)[at[(*list)[i].key >> (p * BITS) & (BINS - 1)]++] = (*list)[i];
        struct entry *t = *list;
        *list = *other;
        *other = t;
    }
}

/* ---- with truncation ---- */

/* m->list gets the entries of z (n) that are at least `least`, in id order. */
static int64_t collect(const struct job *j, const float *z, int64_t n, float least, const struct mem *m) {
    int64_t found = 0;
    for (int64_t i = 0; i < n; i += CHUNK) {
        const int64_t k = j->k->at_least(m->idx, z + i, n - i < CHUNK ? n - i : CHUNK, least);
        for (int64_t x = 0; x < k; x++) m->list[found++] = (struct entry){key_of(z[i + m->idx[x]]), (int32_t)i + m->idx[x]};
    }
    return found;
}

/* A value that at least k entries reach: the k-th largest of the maxima of runs. */
static float bound_top_k(const struct job *j, const float *z, int64_t n, int64_t k, struct mem *m) {
    const int64_t runs = (n + RUN - 1) / RUN;
    if (k > runs) return -INFINITY;
    for (int64_t i = 0; i < runs; i++)
        m->list[i] = (struct entry){key_of(j->k->max(z + i * RUN, n - i * RUN < RUN ? n - i * RUN : RUN)), 0};
    sort_entries(&m->list, &m->other, runs);
    return z_of(m->list[k - 1].key);
}

/* Sum of e^(z - max) over the z >= least. */
static double mass(const struct job *j, const float *z, int64_t n, float max, float least) {
    double sum = 0;
    for (int64_t i = 0; i < n; i += CHUNK) sum += (double)j->k->mass(z + i, n - i < CHUNK ? n - i : CHUNK, max, least);
    return sum;
}

/* Entries that surely hold all that the rule keeps, in id order. *total: what top-p takes its part
 * of, 0 when top-k comes first (then it is the sum of what that keeps). */
static int64_t candidates(const struct job *j, const struct run *row, const struct sample_param *p, struct mem *m, double *total) {
    const float *const z = row->raw, max = row->max;
    const int64_t n = row->n;
    *total = 0;
    if (p->top_k > 0 && p->top_k < n) return collect(j, z, n, bound_top_k(j, z, n, p->top_k, m), m);
    if (p->top_p < 1) {
        *total = mass(j, z, n, max, -INFINITY);
        for (float depth = 2; depth <= 32; depth *= 2)
            if (mass(j, z, n, max, max - depth) >= (double)p->top_p * *total) return collect(j, z, n, max - depth, m);
        return collect(j, z, n, -INFINITY, m);
    }
    return collect(j, z, n, max + logf(p->min_p) - 1e-3f, m); /* the margin covers logf's rounding */
}

/* w (n) = e^(z - max) of the list. */
static void list_weights(const struct job *j, const struct mem *m, int64_t n, float max, float *w) {
    for (int64_t i = 0; i < n; i++) w[i] = z_of(m->list[i].key);
    j->k->head_exp(w, w, n, 1, max);
}

/* How many of the n entries of m->list, largest first, the rule keeps: at least one. */
static int64_t truncate_list(const struct job *j, const struct mem *m, int64_t n, float max, const struct sample_param *p,
                             double total) {
    float *w = (float *)(void *)m->other;
    if (p->top_k > 0 && p->top_k < n) n = p->top_k;
    list_weights(j, m, n, max, w);
    if (p->top_p < 1) {
        if (total == 0)
            for (int64_t i = 0; i < n; i++) total += (double)w[i];
        double sum = 0;
        int64_t kept = 0;
        while (kept < n && sum < (double)p->top_p * total) sum += (double)w[kept++];
        n = kept > 0 ? kept : 1;
    }
    while (n > 1 && w[n - 1] < p->min_p) n--;
    return n;
}

/* The first n of the sorted m->list, in id order again: entries above the last one's value, and the
 * first `ties` of those equal to it. */
static void keep_list(const struct job *j, const float *z, int64_t vocab, int64_t n, struct mem *m) {
    const uint32_t cut = m->list[n - 1].key;
    int64_t ties = 0, kept = 0;
    while (ties < n && m->list[n - 1 - ties].key == cut) ties++;
    const int64_t found = collect(j, z, vocab, z_of(cut), m);
    for (int64_t i = 0; i < found; i++)
        if (m->list[i].key != cut || ties-- > 0) m->list[kept++] = m->list[i];
    CHECK(kept == n);
}

/* Inverse CDF over the n entries of m->list, whose ids ascend. */
static int64_t draw_list(const struct job *j, const struct mem *m, int64_t n, float max, float u, float *logp) {
    float *w = (float *)(void *)m->other;
    double total = 0, sum = 0;
    list_weights(j, m, n, max, w);
    for (int64_t i = 0; i < n; i++) total += (double)w[i];
    int64_t pick = 0;
    for (; pick < n - 1; pick++)
        if ((sum += (double)w[pick]) > (double)u * total) break;
    *logp = (float)((double)z_of(m->list[pick].key) - (double)max - log(total));
    return m->list[pick].id;
}

/* z: scaled logits. */
static int64_t draw_truncated(const struct job *j, const float *z, int64_t n, const struct sample_param *p, struct mem *m,
                              float *logp) {
    double total;
    const float max = j->k->max(z, n);
    int64_t found = candidates(j, &(struct run){z, n, 1, max}, p, m, &total);
    if (found == 0) { /* NaN throughout: any id, and a log-prob that tells */
        *logp = NAN;
        return 0;
    }
    sort_entries(&m->list, &m->other, found);
    found = truncate_list(j, m, found, max, p, total);
    keep_list(j, z, n, found, m);
    return draw_list(j, m, found, max, p->u, logp);
}

/* ---- the op ---- */

static void apply_penalty(float *z, const float *raw, int64_t n, const uint8_t *seen, float penalty) {
    memcpy(z, raw, (size_t)n * sizeof *z);
    for (int64_t b = 0; b < (n + 7) / 8; b++)
        for (unsigned bits = seen[b]; bits; bits &= bits - 1) {
            const int64_t i = b * 8 + __builtin_ctz(bits);
            if (i < n) z[i] = z[i] > 0 ? z[i] / penalty : z[i] * penalty;
        }
}

static struct mem mem_of(const struct job *j, int thread, int64_t vocab) {
    struct mem m;
    m.weight = cpu_thread_mem(j->cpu, thread);
    m.idx = (int32_t *)(m.weight + CHUNK);
    m.sums = (void *)(m.idx + CHUNK);
    m.list = (void *)(j->big ? j->big + (size_t)thread * j->big_bytes : NULL);
    m.other = m.list ? m.list + vocab : NULL;
    m.z = m.list ? (float *)(m.other + vocab) : NULL;
    return m;
}

static void sample_part(void *arg, int64_t row, int thread) {
    const struct job *j = arg;
    const struct sample_args *a = j->a;
    const struct sample_param *p = &a->param[row];
    const int64_t vocab = a->logits.dim[1];
    struct mem m = mem_of(j, thread, vocab);
    const float *raw = (const float *)a->logits.data + row * vocab, *z = raw;
    const float inv_temp = p->inv_temp;
    struct cpu_head_state s = row_state(j, raw, vocab, inv_temp, m.sums);
    const bool penalty = penalised(a, p);
    if (penalty) {
        apply_penalty(m.z, raw, vocab, (const uint8_t *)a->seen.data + row * a->seen.dim[1], p->repetition_penalty);
        z = m.z;
    }
    float kept = 0;
    int64_t id;
    const struct cpu_head_state full = s;
    if (p->greedy) {
        id = largest(j, z, vocab, m.idx);
    } else if (truncates(p, vocab)) {
        j->k->scale(m.z, z, vocab, inv_temp);
        id = draw_truncated(j, m.z, vocab, p, &m, &kept);
    } else {
        if (penalty) s = row_state(j, z, vocab, inv_temp, m.sums);
        id = draw_all(j, &(struct run){.raw = z, .n = vocab, .inv_temp = inv_temp}, p->u, &s, &m);
        kept = cpu_head_logp(&s, z[id], inv_temp);
    }
    ((int32_t *)a->id.data)[row] = (int32_t)id;
    ((float *)a->logp.data)[row] = cpu_head_logp(&full, raw[id], inv_temp);
    if (a->logp_kept.data) ((float *)a->logp_kept.data)[row] = kept;
}

int cpu_sample(struct dev *d, const struct sample_args *a) {
    struct cpu *c = cpu_of(d);
    struct job j = {.a = a, .cpu = c, .k = cpu_kern_of(c)};
    const int64_t rows = a->logits.dim[0], vocab = a->logits.dim[1];
    bool big = false;
    for (int64_t r = 0; r < rows; r++) big |= penalised(a, &a->param[r]) || truncates(&a->param[r], vocab);
    CHECK((size_t)cpu_head_chunks(vocab) * sizeof(struct cpu_head_sum) + 2 * CHUNK * sizeof(float) <= CPU_THREAD_BYTES);
    if (big) {
        j.big_bytes = (size_t)vocab * (2 * sizeof(struct entry) + sizeof(float));
        j.big_bytes = (j.big_bytes + 255) & ~(size_t)255;
        void *p;
        TRY(cpu_scratch(c, CPU_SCRATCH_HEAD, j.big_bytes * (size_t)c->n_threads, &p));
        j.big = p;
    }
    pool_run(c->pool, rows, sample_part, &j);
    return 0;
}
