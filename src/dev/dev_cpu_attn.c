/* dev_cpu_attn.c - causal attention over pages or packed rows, and its backward.
 *
 * Work is cut into parts of one sequence, one key/value head and (forward) one
 * block of tokens; all query heads that share the key/value head go together,
 * so keys and values are read once.  A part walks the tiles of DEV_KEY_TILE
 * keys in position order: it widens a tile to f32, keys transposed, and hands
 * it to the kernel with all of its query rows.
 *
 * Invariant: a query row meets the same tiles in the same order through the
 * same kernel whether it comes alone (decode) or with others (prefill,
 * training), from pages or from packed rows, so its bits are the same. */
#include "dev/dev_cpu_int.h"
#include "dev/dev_cpu_kern.h"

#include "base/arena.h"

#include <float.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>

enum {
    TILE = DEV_KEY_TILE,
    GROUP = 16,       /* keys that are packed at once */
    BLOCK_ROWS = 128, /* query rows (tokens x heads of a group) that share a packed tile */
};
#define LN2 0.693147180559945309f
#define LOG2E 1.44269504088896341f

/* One op. Sequence i owns parts [first_part[i], first_part[i + 1]). */
struct job {
    const struct attn_args *a;
    const struct cpu *cpu;
    const struct cpu_kern *kern;
    int64_t group, dim, dim_up, tokens; /* heads per kv head; D; D padded; tokens of a block */
    int64_t *first_part, *order;        /* order: sequences, longest first (backward) */
    struct tensor dout, dq, dk, dv;
};

/* ---- where things are ---- */

struct seq {
    int64_t i, row0, n_rows, pos0;
};
static struct seq seq_at(const struct attn_args *a, int64_t i) {
    const int32_t *start = a->seqs.q_start.data, *pos0 = a->seqs.pos0.data;
    return (struct seq){i, start[i], start[i + 1] - start[i], pos0[i]};
}

/* Up to n keys from key j on that lie together: returns their number and the first one's slot. */
static int64_t key_run(const struct attn_args *a, int64_t i, int64_t j, int64_t n, int64_t *slot) {
    const struct attn_seqs *s = &a->seqs;
    const int64_t len = a->kv.k.dim[2];
    if (s->pages.data) {
        CHECK(j / len < s->pages.dim[1]);
        *slot = ((const int32_t *)s->pages.data)[i * s->pages.dim[1] + j / len] * len + j % len;
    } else {
        *slot = ((const int32_t *)s->kv_start.data)[i] + j;
    }
    CHECK(*slot >= 0 && *slot / len < a->kv.k.dim[0]);
    const int64_t left = len - *slot % len;
    return left < n ? left : n;
}
/* First byte of (slot, head) in t, which is shaped as kv.k. */
static char *slot_ptr(struct tensor t, int64_t slot, int64_t head) {
    const int64_t len = t.dim[2], row = (slot / len * t.dim[1] + head) * len + slot % len;
    return (char *)t.data + (size_t)(row * t.dim[3]) * dtype_size(t.dt);
}

/* n <= GROUP keys from j on of t, one after another: in place where they lie so, else copied to
 * tmp. full: GROUP rows are wanted, zeros after the last. */
static const char *key_rows(const struct job *job, int64_t i, int64_t head, struct tensor t, int64_t j,
                            int64_t n, bool full, char *tmp) {
    const size_t row = (size_t)job->dim * dtype_size(t.dt);
    int64_t slot, run = key_run(job->a, i, j, n, &slot);
    if (run == n && (n == GROUP || !full)) return slot_ptr(t, slot, head);
    for (int64_t at = 0;;) {
        memcpy(tmp + (size_t)at * row, slot_ptr(t, slot, head), (size_t)run * row);
        at += run;
        if (at == n) break;
        run = key_run(job->a, i, j + at, n - at, &slot);
    }
    memset(tmp + (size_t)n * row, 0, (size_t)(GROUP - n) * row);
    return tmp;
}

static void pack_keys_t(const struct job *job, int64_t i, int64_t head, struct tensor t, int64_t key0,
                        int64_t n, float *kt, char *tmp) {
    for (int64_t g = 0; g < TILE; g += GROUP) {
        if (g >= n) { /* whole groups after the last key */
            for (int64_t d = 0; d < job->dim; d++) memset(kt + d * TILE + g, 0, GROUP * sizeof *kt);
            continue;
        }
        const int64_t k = n - g < GROUP ? n - g : GROUP;
        job->kern->pack_kt(kt + g, key_rows(job, i, head, t, key0 + g, k, true, tmp), t.dt, job->dim);
    }
}
static void widen_keys(const struct job *job, int64_t i, int64_t head, struct tensor t, int64_t key0,
                       int64_t n, float *out, char *tmp) {
    for (int64_t g = 0; g < n; g += GROUP) {
        const int64_t k = n - g < GROUP ? n - g : GROUP;
        job->kern->widen(out + g * job->dim_up, key_rows(job, i, head, t, key0 + g, k, false, tmp),
                         t.dt, k, job->dim, job->dim);
    }
}

/* First byte of the heads of group `head` in row `row` of t (T, Hq * D). */
static char *head_ptr(const struct job *job, struct tensor t, int64_t row, int64_t head) {
    return (char *)t.data + (size_t)(row * t.dim[1] + head * job->group * job->dim) * dtype_size(t.dt);
}
/* out (n_tokens * group, Dp) f32 = those heads of rows [row, row + n_tokens). */
static void widen_heads(const struct job *job, struct tensor t, int64_t row, int64_t n_tokens,
                        int64_t head, float *out) {
    for (int64_t k = 0; k < n_tokens; k++)
        job->kern->widen(out + k * job->group * job->dim_up, head_ptr(job, t, row + k, head), t.dt,
                         job->group, job->dim, job->dim);
}

/* ---- working memory of a thread ---- */

struct mem {
    struct cpu_attn_tile t;
    float *q, *kt, *v, *acc, *max, *sum;             /* both ways; backward: acc is dq */
    float *k, *vt, *dout, *lse, *delta, *p, *ds;     /* backward */
    float *dk, *dv;                                  /* a tile whose slots do not lie together */
    char *tmp;                                       /* GROUP rows */
};
static size_t layout(struct mem *m, const struct job *j, int64_t tokens, bool backward, void *base) {
    const size_t rows = (size_t)(tokens * j->group), f = sizeof(float);
    const size_t block = rows * (size_t)j->dim_up * f, tile = TILE * (size_t)j->dim_up * f;
    struct arena a = {.base = base, .cap = CPU_THREAD_BYTES};
    m->q = arena_take(&a, block);
    m->acc = arena_take(&a, block);
    m->kt = arena_take(&a, tile);
    m->max = arena_take(&a, rows * f);
    m->sum = arena_take(&a, rows * f);
    m->tmp = arena_take(&a, GROUP * (size_t)j->dim * f);
    if (!backward) {
        m->v = arena_take(&a, tile);
        return a.used;
    }
    m->dout = arena_take(&a, block);
    m->k = arena_take(&a, tile);
    m->vt = arena_take(&a, tile);
    m->dk = arena_take(&a, tile);
    m->dv = arena_take(&a, tile);
    m->lse = m->max;
    m->delta = m->sum;
    m->p = arena_take(&a, rows * TILE * f);
    m->ds = arena_take(&a, rows * TILE * f);
    return a.used;
}

static int job_init(struct job *j, struct dev *d, const struct attn_args *a, bool backward) {
    struct cpu *c = cpu_of(d);
    *j = (struct job){.a = a, .cpu = c, .kern = cpu_kern_of(c), .dim = a->head_dim};
    j->group = a->n_q_heads / a->n_kv_heads;
    j->dim_up = (j->dim + 15) & ~(int64_t)15;
    j->tokens = BLOCK_ROWS / j->group > 0 ? BLOCK_ROWS / j->group : 1;
    struct mem m;
    while (j->tokens > 1 && layout(&m, j, j->tokens, backward, NULL) > CPU_THREAD_BYTES) j->tokens /= 2;
    if (layout(&m, j, j->tokens, backward, NULL) > CPU_THREAD_BYTES)
        FAIL(ERR_UNSUPPORTED, "cpu attention: %lld heads of %lld numbers on one key/value head do not fit "
             "the working memory of a thread", (long long)j->group, (long long)j->dim);
    void *p;
    TRY(cpu_scratch(c, CPU_SLOT_ATTN, (size_t)(2 * a->seqs.n + 1) * sizeof(int64_t), &p));
    j->first_part = p;
    j->order = j->first_part + a->seqs.n + 1;
    return 0;
}

static struct mem mem_of(const struct job *j, int thread, bool backward) {
    struct mem m = {0};
    layout(&m, j, j->tokens, backward, cpu_thread_mem(j->cpu, thread));
    return m;
}

/* ---- forward ---- */

static struct cpu_attn_tile tile_of(const struct job *j, const struct mem *m, int64_t rows, int64_t p0) {
    return (struct cpu_attn_tile){
        .rows = rows, .group = j->group, .dim = j->dim, .p0 = p0, .window = j->a->window,
        .scale = j->a->scale, .q = m->q, .kt = m->kt, .v = m->v, .acc = m->acc, .max = m->max,
        .sum = m->sum, .k = m->k, .vt = m->vt, .dout = m->dout, .lse = m->lse, .delta = m->delta,
        .p = m->p, .ds = m->ds, .dq = m->acc,
    };
}

static int64_t first_tile(const struct job *j, int64_t p0) { /* that the row at p0 sees */
    const int64_t w = j->a->window, key = w > 0 && p0 >= w ? p0 - w + 1 : 0;
    return key / TILE * TILE;
}

static void forward_block(const struct job *j, const struct seq *s, int64_t head, int64_t row,
                          int64_t n_tokens, struct mem *m) {
    const int64_t rows = n_tokens * j->group, p0 = s->pos0 + row - s->row0, end = p0 + n_tokens;
    struct cpu_attn_tile t = tile_of(j, m, rows, p0);
    widen_heads(j, j->a->q, row, n_tokens, head, m->q);
    memset(m->acc, 0, (size_t)(rows * j->dim_up) * sizeof *m->acc);
    for (int64_t r = 0; r < rows; r++) {
        m->max[r] = -FLT_MAX; /* finite, so that a tile in which a row sees nothing leaves it as it is */
        m->sum[r] = 0;
    }
    for (t.key0 = first_tile(j, p0); t.key0 < end; t.key0 += TILE) {
        t.n_keys = end - t.key0 < TILE ? end - t.key0 : TILE;
        pack_keys_t(j, s->i, head, j->a->kv.k, t.key0, t.n_keys, m->kt, m->tmp);
        widen_keys(j, s->i, head, j->a->kv.v, t.key0, t.n_keys, m->v, m->tmp);
        j->kern->attn_fwd(&t);
    }
    const struct attn_args *a = j->a;
    for (int64_t r = 0; r < rows; r++) {
        const int64_t at = row + r / j->group, h = r % j->group;
        char *out = head_ptr(j, a->out, at, head) + (size_t)(h * j->dim) * dtype_size(a->out.dt);
        j->kern->attn_out(out, a->out.dt, m->acc + r * j->dim_up, 1.0f / m->sum[r], j->dim);
        if (a->lse.data)
            ((float *)a->lse.data)[at * a->n_q_heads + head * j->group + h] =
                m->max[r] * LN2 + logf(m->sum[r]);
    }
}

/* The sequence that owns a part. */
static int64_t find_seq(const struct job *j, int64_t part) {
    int64_t lo = 0, hi = j->a->seqs.n;
    while (hi - lo > 1) {
        const int64_t mid = (lo + hi) / 2;
        if (j->first_part[mid] <= part) lo = mid;
        else hi = mid;
    }
    return lo;
}

static void forward_part(void *arg, int64_t part, int thread) {
    const struct job *j = arg;
    const struct seq s = seq_at(j->a, find_seq(j, part));
    struct mem m = mem_of(j, thread, false);
    const int64_t local = part - j->first_part[s.i], n_heads = j->a->n_kv_heads;
    const int64_t blocks = (s.n_rows + j->tokens - 1) / j->tokens;
    const int64_t block = blocks - 1 - local / n_heads; /* the longest first */
    const int64_t row = block * j->tokens, left = s.n_rows - row;
    forward_block(j, &s, local % n_heads, s.row0 + row, left < j->tokens ? left : j->tokens, &m);
}

int cpu_attn_fwd(struct dev *d, const struct attn_args *a) {
    struct job j;
    TRY(job_init(&j, d, a, false));
    j.first_part[0] = 0;
    for (int64_t i = 0; i < a->seqs.n; i++) {
        const int64_t blocks = (seq_at(a, i).n_rows + j.tokens - 1) / j.tokens;
        j.first_part[i + 1] = j.first_part[i] + blocks * a->n_kv_heads;
    }
    pool_run(j.cpu->pool, j.first_part[a->seqs.n], forward_part, &j);
    return 0;
}

/* ---- backward ---- */

/* The part's rows of dk or dv for a tile: in place, or `tmp` when its slots do not lie together
 * (then filled from there if load, written back if not). */
static float *grad_rows(const struct job *j, const struct seq *s, int64_t head, struct tensor t,
                        int64_t key0, int64_t n, float *tmp, bool load) {
    int64_t slot, run = key_run(j->a, s->i, key0, n, &slot);
    if (run == n) return (float *)(void *)slot_ptr(t, slot, head);
    for (int64_t at = 0; at < n; at += run) {
        run = key_run(j->a, s->i, key0 + at, n - at, &slot);
        float *mine = tmp + at * j->dim, *theirs = (float *)(void *)slot_ptr(t, slot, head);
        memcpy(load ? mine : theirs, load ? theirs : mine, (size_t)(run * j->dim) * sizeof *mine);
    }
    return tmp;
}

static void zero_grads(const struct job *j, const struct seq *s, int64_t head) {
    for (int64_t key = 0, run; key < s->n_rows; key += run) {
        int64_t slot;
        run = key_run(j->a, s->i, key, s->n_rows - key, &slot);
        memset(slot_ptr(j->dk, slot, head), 0, (size_t)(run * j->dim) * sizeof(float));
        memset(slot_ptr(j->dv, slot, head), 0, (size_t)(run * j->dim) * sizeof(float));
    }
}

/* lse in units of log 2 and delta = dout . out of each row. Leaves acc as it likes. */
static void row_constants(const struct job *j, int64_t row, int64_t n_tokens, int64_t head, struct mem *m) {
    widen_heads(j, j->a->out, row, n_tokens, head, m->acc);
    for (int64_t r = 0; r < n_tokens * j->group; r++) {
        const int64_t at = (row + r / j->group) * j->a->n_q_heads + head * j->group + r % j->group;
        m->lse[r] = ((const float *)j->a->lse.data)[at] * LOG2E;
    }
    j->kern->row_dots(m->delta, m->dout, m->acc, n_tokens * j->group, j->dim);
}

/* dq of a block of rows; adds the block's part of dk and dv, rows ascending. */
static void backward_block(const struct job *j, const struct seq *s, int64_t head, int64_t row,
                           int64_t n_tokens, struct mem *m) {
    const int64_t rows = n_tokens * j->group, p0 = row - s->row0, end = p0 + n_tokens;
    struct cpu_attn_tile t = tile_of(j, m, rows, p0);
    widen_heads(j, j->a->q, row, n_tokens, head, m->q);
    widen_heads(j, j->dout, row, n_tokens, head, m->dout);
    row_constants(j, row, n_tokens, head, m);
    memset(m->acc, 0, (size_t)(rows * j->dim_up) * sizeof *m->acc);
    for (t.key0 = first_tile(j, p0); t.key0 < end; t.key0 += TILE) {
        t.n_keys = end - t.key0 < TILE ? end - t.key0 : TILE;
        pack_keys_t(j, s->i, head, j->a->kv.k, t.key0, t.n_keys, m->kt, m->tmp);
        pack_keys_t(j, s->i, head, j->a->kv.v, t.key0, t.n_keys, m->vt, m->tmp);
        widen_keys(j, s->i, head, j->a->kv.k, t.key0, t.n_keys, m->k, m->tmp);
        t.dk = grad_rows(j, s, head, j->dk, t.key0, t.n_keys, m->dk, true);
        t.dv = grad_rows(j, s, head, j->dv, t.key0, t.n_keys, m->dv, true);
        j->kern->attn_bwd(&t);
        if (t.dk == m->dk) grad_rows(j, s, head, j->dk, t.key0, t.n_keys, m->dk, false);
        if (t.dv == m->dv) grad_rows(j, s, head, j->dv, t.key0, t.n_keys, m->dv, false);
    }
    for (int64_t r = 0; r < rows; r++) {
        char *out = head_ptr(j, j->dq, row + r / j->group, head);
        out += (size_t)(r % j->group * j->dim) * dtype_size(j->dq.dt);
        j->kern->attn_out(out, j->dq.dt, m->acc + r * j->dim_up, 1, j->dim);
    }
}

static void backward_part(void *arg, int64_t part, int thread) {
    const struct job *j = arg;
    const struct seq s = seq_at(j->a, j->order[part / j->a->n_kv_heads]);
    const int64_t head = part % j->a->n_kv_heads;
    struct mem m = mem_of(j, thread, true);
    zero_grads(j, &s, head);
    for (int64_t row = 0; row < s.n_rows; row += j->tokens) {
        const int64_t left = s.n_rows - row;
        backward_block(j, &s, head, s.row0 + row, left < j->tokens ? left : j->tokens, &m);
    }
}

/* Sequences by length, longest first, so that threads finish together. */
static int by_length(const void *va, const void *vb, void *arg) {
    const int32_t *start = arg;
    const int64_t a = *(const int64_t *)va, b = *(const int64_t *)vb;
    const int32_t na = start[a + 1] - start[a], nb = start[b + 1] - start[b];
    return na != nb ? (na < nb) - (na > nb) : (a > b) - (a < b);
}

int cpu_attn_bwd(struct dev *d, const struct attn_args *a, struct tensor dout, struct tensor dq,
                 struct tensor dk, struct tensor dv) {
    struct job j;
    TRY(job_init(&j, d, a, true));
    j.dout = dout;
    j.dq = dq;
    j.dk = dk;
    j.dv = dv;
    for (int64_t i = 0; i < a->seqs.n; i++) j.order[i] = i;
    qsort_r(j.order, (size_t)a->seqs.n, sizeof *j.order, by_length, a->seqs.q_start.data);
    pool_run(j.cpu->pool, a->seqs.n * a->n_kv_heads, backward_part, &j);
    return 0;
}
