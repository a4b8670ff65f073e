/* attention.c - causal attention over a paged KV cache or packed rows, and its backward.
 *
 * Work is cut into parts of one sequence, one KV head and (forward) one
 * block of tokens; all query heads that share the KV head go together,
 * so K and V are read once.  A part walks the tiles of DEV_KEY_TILE
 * keys in position order: it widens a tile to f32, keys transposed, and hands
 * it to the kernel with all of its query rows.
 *
 * Invariant: a query row meets the same tiles in the same order through the
 * same kernel whether it comes alone (decode) or with others (prefill,
 * training), from a paged KV cache or from packed rows, so its bits are the same. */
#include "device/cpu/cpu_int.h"
#include "device/cpu/kernels.h"

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

/* A sequence of the op. */
struct seq {
    int64_t i, row0, n_rows, pos0;
};
static struct seq seq_at(const struct attn_args *a, int64_t i) {
    const int32_t *start = a->seqs.q_start.data, *pos0 = a->seqs.pos0.data;
    return (struct seq){i, start[i], start[i + 1] - start[i], pos0[i]};
}

/* ---- working memory of a thread ---- */

struct mem {
    int32_t *pos;                  /* (rows) */
    float *q, *acc, *max, *sum;    /* of the rows; in backward acc is dq, max is lse, sum is delta */
    float *kt, *v;                 /* of the tile; v in forward only */
    char *tmp, *tmp_v;             /* GROUP keys, GROUP values */
    float *dout, *p, *ds, *k, *vt; /* backward */
    float *dk, *dv;                /* of a tile that is not in one piece */
};
static size_t layout(struct mem *m, const struct job *j, bool backward, void *base) {
    const size_t rows = (size_t)(j->tokens * j->group), f = sizeof(float);
    const size_t block = rows * (size_t)j->dim_up * f, tile = TILE * (size_t)j->dim_up * f;
    struct arena a = {.base = base, .cap = CPU_THREAD_BYTES};
    m->pos = arena_take(&a, rows * sizeof *m->pos);
    m->q = arena_take(&a, block);
    m->acc = arena_take(&a, block);
    m->max = arena_take(&a, rows * f);
    m->sum = arena_take(&a, rows * f);
    m->kt = arena_take(&a, tile);
    m->tmp = arena_take(&a, GROUP * (size_t)j->dim * f);
    m->tmp_v = arena_take(&a, GROUP * (size_t)j->dim * f);
    if (!backward) {
        m->v = arena_take(&a, tile);
        return a.used;
    }
    m->dout = arena_take(&a, block);
    m->p = arena_take(&a, rows * TILE * f);
    m->ds = arena_take(&a, rows * TILE * f);
    m->k = arena_take(&a, tile);
    m->vt = arena_take(&a, tile);
    m->dk = arena_take(&a, tile);
    m->dv = arena_take(&a, tile);
    return a.used;
}

static int job_init(struct job *j, struct dev *d, const struct attn_args *a, bool backward) {
    struct cpu *c = cpu_of(d);
    *j = (struct job){.a = a, .cpu = c, .kern = cpu_kern_of(c), .dim = a->head_dim};
    j->group = a->n_q_heads / a->n_kv_heads;
    j->dim_up = (j->dim + 15) & ~(int64_t)15;
    j->tokens = BLOCK_ROWS / j->group > 0 ? BLOCK_ROWS / j->group : 1;
    struct mem m;
    while (j->tokens > 1 && layout(&m, j, backward, NULL) > CPU_THREAD_BYTES) j->tokens /= 2;
    if (layout(&m, j, backward, NULL) > CPU_THREAD_BYTES)
        FAIL(ERR_UNSUPPORTED,
             "cpu attention: %lld query heads of %lld elements a KV head do not fit "
             "the working memory of a thread",
             (long long)j->group, (long long)j->dim);
    void *p;
    TRY(cpu_scratch(c, CPU_SCRATCH_ATTN, (size_t)(2 * a->seqs.n + 1) * sizeof(int64_t), &p));
    j->first_part = p;
    j->order = j->first_part + a->seqs.n + 1;
    return 0;
}

/* ---- a part: one KV head of one sequence, and the tile it is at ---- */

struct part {
    const struct job *j;
    struct seq s;
    int64_t head;
    struct mem m;
    struct cpu_attn_tile t;
    int64_t kv_row[TILE / GROUP]; /* see key_run: of each group's first key; -1: not in one piece */
};

static struct part part_of(const struct job *j, int64_t seq, int64_t head, int thread, bool backward) {
    struct part p = {.j = j, .s = seq_at(j->a, seq), .head = head};
    struct mem *m = &p.m;
    layout(m, j, backward, cpu_thread_mem(j->cpu, thread));
    p.t = (struct cpu_attn_tile){
        .group = j->group,
        .dim = j->dim,
        .window = j->a->window,
        .scale = j->a->scale,
        .softcap = j->a->softcap,
        .pos = m->pos,
        .q = m->q,
        .kt = m->kt,
        .v = m->v,
        .acc = m->acc,
        .max = m->max,
        .sum = m->sum,
        .k = m->k,
        .vt = m->vt,
        .dout = m->dout,
        .lse = m->max,
        .delta = m->sum,
        .p = m->p,
        .ds = m->ds,
        .dq = m->acc,
    };
    return p;
}

/* Up to n keys from key j on that lie together: returns their number, and the row of the first one
 * in the part's head of the KV cache seen as (n_kv_blocks * H * block_len, D). */
static int64_t key_run(const struct part *p, int64_t j, int64_t n, int64_t *row) {
    const struct attn_seqs *q = &p->j->a->seqs;
    const struct tensor k = p->j->a->kv.k;
    const int64_t len = k.dim[2];
    int64_t kv_block, at;
    if (q->block_table.data) {
        kv_block = j / len;
        at = j - kv_block * len;
        CHECK(kv_block < q->block_table.dim[1]);
        kv_block = ((const int32_t *)q->block_table.data)[p->s.i * q->block_table.dim[1] + kv_block];
    } else {
        const int64_t slot = ((const int32_t *)q->kv_start.data)[p->s.i] + j;
        kv_block = slot < len ? 0 : slot / len;
        at = slot - kv_block * len;
    }
    CHECK(kv_block >= 0 && kv_block < k.dim[0] && at >= 0);
    *row = (kv_block * k.dim[1] + p->head) * len + at;
    return len - at < n ? len - at : n;
}

static int64_t group_len(const struct part *p, int64_t g) {
    const int64_t left = p->t.n_keys - g * GROUP;
    return left < GROUP ? left : GROUP;
}
/* Goes to the tile of keys [key0, min(key0 + TILE, end)). */
static void find_tile(struct part *p, int64_t key0, int64_t end) {
    p->t.key0 = key0;
    p->t.n_keys = end - key0 < TILE ? end - key0 : TILE;
    for (int64_t g = 0; g * GROUP < p->t.n_keys; g++)
        if (key_run(p, key0 + g * GROUP, group_len(p, g), &p->kv_row[g]) < group_len(p, g)) p->kv_row[g] = -1;
}

static char *row_ptr(const struct part *p, struct tensor t, int64_t row) {
    return (char *)t.data + row * p->j->dim * (t.dt == DT_BF16 ? 2 : 4);
}
/* The keys of group g of t (keys or values), one after another: in place where they lie so, else
 * copied to tmp. full: GROUP rows are wanted, zeros after the last. */
static const char *group_rows(const struct part *p, struct tensor t, int64_t g, bool full, char *tmp) {
    const int64_t n = group_len(p, g);
    if (p->kv_row[g] >= 0 && (n == GROUP || !full)) return row_ptr(p, t, p->kv_row[g]);
    const size_t bytes = (size_t)p->j->dim * dtype_size(t.dt);
    for (int64_t k = 0, run, row; k < n; k += run) {
        run = key_run(p, p->t.key0 + g * GROUP + k, n - k, &row);
        memcpy(tmp + (size_t)k * bytes, row_ptr(p, t, row), (size_t)run * bytes);
    }
    memset(tmp + (size_t)n * bytes, 0, (size_t)(GROUP - n) * bytes);
    return tmp;
}

/* kt (D, TILE) = the tile of t, transposed; zeros after its last key. */
static void pack_tile(const struct part *p, struct tensor t, float *kt) {
    for (int64_t g = 0; g < TILE / GROUP; g++) {
        if (g * GROUP < p->t.n_keys) p->j->kern->pack_kt(kt + g * GROUP, group_rows(p, t, g, true, p->m.tmp), t.dt, p->j->dim);
        else
            for (int64_t d = 0; d < p->j->dim; d++) memset(kt + d * TILE + g * GROUP, 0, GROUP * sizeof *kt);
    }
}
/* out (n_keys, Dp) = the tile of t. */
static void widen_tile(const struct part *p, struct tensor t, float *out) {
    for (int64_t g = 0; g * GROUP < p->t.n_keys; g++)
        p->j->kern->widen(out + g * GROUP * p->j->dim_up, group_rows(p, t, g, false, p->m.tmp), t.dt, group_len(p, g), p->j->dim);
}

/* ---- a block of query rows ---- */

/* First byte of the part's heads in row `row` of t (T, Hq * D). */
static char *heads_ptr(const struct part *p, struct tensor t, int64_t row) {
    const struct job *j = p->j;
    return (char *)t.data + (size_t)((row * j->a->n_q_heads + p->head * j->group) * j->dim) * dtype_size(t.dt);
}
/* out (n_tokens * group, Dp) f32 = those heads of rows [row, row + n_tokens). */
static void widen_heads(const struct part *p, struct tensor t, int64_t row, int64_t n_tokens, float *out) {
    for (int64_t k = 0; k < n_tokens; k++)
        p->j->kern->widen(out + k * p->j->group * p->j->dim_up, heads_ptr(p, t, row + k), t.dt, p->j->group, p->j->dim);
}
/* The part's element of a (T, Hq) tensor for block row r, when the block starts at row `row`. */
static float *per_head(const struct part *p, struct tensor t, int64_t row, int64_t r) {
    const int64_t group = p->j->group;
    return (float *)t.data + (row + r / group) * p->j->a->n_q_heads + p->head * group + r % group;
}

/* Rows [row, row + n_tokens) of the batch become the part's block, acc zero. Returns the end of the
 * keys that it sees, and the first tile. */
static int64_t start_block(struct part *p, int64_t row, int64_t n_tokens, int64_t *first) {
    const struct job *j = p->j;
    const int64_t p0 = p->s.pos0 + row - p->s.row0, w = j->a->window;
    p->t.rows = n_tokens * j->group;
    for (int64_t r = 0; r < p->t.rows; r++) p->m.pos[r] = (int32_t)(p0 + r / j->group);
    widen_heads(p, j->a->q, row, n_tokens, p->m.q);
    memset(p->m.acc, 0, (size_t)(p->t.rows * j->dim_up) * sizeof *p->m.acc);
    *first = (w > 0 && p0 >= w ? p0 - w + 1 : 0) / TILE * TILE;
    return p0 + n_tokens;
}
/* Rows of acc times by[r] (NULL: 1) to out. */
static void store_block(const struct part *p, struct tensor out, int64_t row, const float *by) {
    const struct job *j = p->j;
    for (int64_t r = 0; r < p->t.rows; r++) {
        char *to = heads_ptr(p, out, row + r / j->group) + (size_t)(r % j->group * j->dim) * dtype_size(out.dt);
        j->kern->attn_out(to, out.dt, p->m.acc + r * j->dim_up, by ? by[r] : 1, j->dim);
    }
}

/* ---- forward ---- */

/* Decode: one token with few heads; the kernel reads the KV cache in place. */
static bool is_decode(const struct part *p, int64_t n_tokens) {
    return n_tokens == 1 && p->t.rows <= CPU_ATTN_DECODE_ROWS && p->j->dim % 32 == 0 && p->j->a->kv.k.dt == DT_BF16;
}
/* Points at the tile's K and V, and, for prefetching, at those of the next tile. */
static void point_tile(struct part *p, int64_t end) {
    for (int64_t g = 0; g * GROUP < p->t.n_keys; g++) {
        p->t.k_rows[g] = (const void *)group_rows(p, p->j->a->kv.k, g, true, p->m.tmp);
        p->t.v_rows[g] = (const void *)group_rows(p, p->j->a->kv.v, g, false, p->m.tmp_v);
        p->t.k_next[g] = p->t.k_rows[g];
        p->t.v_next[g] = p->t.v_rows[g];
        const int64_t key = p->t.key0 + TILE + g * GROUP;
        int64_t row;
        if (key >= end) continue;
        key_run(p, key, 1, &row);
        p->t.k_next[g] = (const void *)row_ptr(p, p->j->a->kv.k, row);
        p->t.v_next[g] = (const void *)row_ptr(p, p->j->a->kv.v, row);
    }
}

static void forward_block(struct part *p, int64_t row, int64_t n_tokens) {
    const struct attn_args *a = p->j->a;
    struct mem *m = &p->m;
    int64_t key0;
    const int64_t end = start_block(p, row, n_tokens, &key0);
    for (int64_t r = 0; r < p->t.rows; r++) {
        m->max[r] = -FLT_MAX; /* finite: a tile in which a row sees nothing leaves the row as it is */
        m->sum[r] = 0;
    }
    const bool decode = is_decode(p, n_tokens);
    for (; key0 < end; key0 += TILE) {
        find_tile(p, key0, end);
        if (decode) {
            point_tile(p, end);
            p->j->kern->attn_decode(&p->t);
            continue;
        }
        pack_tile(p, a->kv.k, m->kt);
        widen_tile(p, a->kv.v, m->v);
        p->j->kern->attn_fwd(&p->t);
    }
    for (int64_t r = 0; r < p->t.rows; r++) {
        if (a->lse.data) *per_head(p, a->lse, row, r) = m->max[r] * LN2 + logf(m->sum[r]);
        m->sum[r] = 1.0f / m->sum[r];
    }
    store_block(p, a->out, row, m->sum);
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

static int64_t n_blocks(const struct job *j, int64_t rows) { return (rows + j->tokens - 1) / j->tokens; }

static void forward_part(void *arg, int64_t part, int thread) {
    const struct job *j = arg;
    const int64_t seq = find_seq(j, part), local = part - j->first_part[seq], n_heads = j->a->n_kv_heads;
    struct part p = part_of(j, seq, local % n_heads, thread, false);
    const int64_t block = n_blocks(j, p.s.n_rows) - 1 - local / n_heads; /* the longest first */
    const int64_t row = block * j->tokens, left = p.s.n_rows - row;
    forward_block(&p, p.s.row0 + row, left < j->tokens ? left : j->tokens);
}

int cpu_attn_fwd(struct dev *d, const struct attn_args *a) {
    struct job j;
    TRY(job_init(&j, d, a, false));
    j.first_part[0] = 0;
    for (int64_t i = 0; i < a->seqs.n; i++)
        j.first_part[i + 1] = j.first_part[i] + n_blocks(&j, seq_at(a, i).n_rows) * a->n_kv_heads;
    pool_run(j.cpu->pool, j.first_part[a->seqs.n], forward_part, &j);
    return 0;
}

/* ---- backward ---- */

/* The tile's rows of dk or dv, t: in place, or in `tmp` when they are not in one piece. */
static float *tile_grads(const struct part *p, struct tensor t, float *tmp) {
    int64_t row, run = key_run(p, p->t.key0, p->t.n_keys, &row);
    if (run == p->t.n_keys) return (float *)t.data + row * p->j->dim;
    for (int64_t k = 0; k < p->t.n_keys; k += run) {
        run = key_run(p, p->t.key0 + k, p->t.n_keys - k, &row);
        memcpy(tmp + k * p->j->dim, (float *)t.data + row * p->j->dim, (size_t)(run * p->j->dim) * sizeof *tmp);
    }
    return tmp;
}
/* Puts them back when they were in tmp. */
static void put_grads(const struct part *p, struct tensor t, const float *grads, const float *tmp) {
    if (grads != tmp) return;
    for (int64_t k = 0, run, row; k < p->t.n_keys; k += run) {
        run = key_run(p, p->t.key0 + k, p->t.n_keys - k, &row);
        memcpy((float *)t.data + row * p->j->dim, tmp + k * p->j->dim, (size_t)(run * p->j->dim) * sizeof *tmp);
    }
}
static void zero_grads(const struct part *p) {
    for (int64_t key = 0, end = p->s.pos0 + p->s.n_rows, run, row; key < end; key += run) {
        run = key_run(p, key, end - key, &row);
        memset((float *)p->j->dk.data + row * p->j->dim, 0, (size_t)(run * p->j->dim) * sizeof(float));
        memset((float *)p->j->dv.data + row * p->j->dim, 0, (size_t)(run * p->j->dim) * sizeof(float));
    }
}

/* dq of a block; adds the block's share of dk and dv, rows ascending. */
static void backward_block(struct part *p, int64_t row, int64_t n_tokens) {
    const struct job *j = p->j;
    struct mem *m = &p->m;
    widen_heads(p, j->dout, row, n_tokens, m->dout);
    widen_heads(p, j->a->out, row, n_tokens, m->q); /* for a moment: start_block loads q */
    j->kern->row_dots(m->sum, m->dout, m->q, n_tokens * j->group, j->dim);
    int64_t key0;
    const int64_t end = start_block(p, row, n_tokens, &key0);
    for (int64_t r = 0; r < p->t.rows; r++) m->max[r] = *per_head(p, j->a->lse, row, r) * LOG2E;
    for (; key0 < end; key0 += TILE) {
        find_tile(p, key0, end);
        pack_tile(p, j->a->kv.k, m->kt);
        pack_tile(p, j->a->kv.v, m->vt);
        widen_tile(p, j->a->kv.k, m->k);
        p->t.dk = tile_grads(p, j->dk, m->dk);
        p->t.dv = tile_grads(p, j->dv, m->dv);
        j->kern->attn_bwd(&p->t);
        put_grads(p, j->dk, p->t.dk, m->dk);
        put_grads(p, j->dv, p->t.dv, m->dv);
    }
    store_block(p, j->dq, row, NULL);
}

static void backward_part(void *arg, int64_t part, int thread) {
    const struct job *j = arg;
    struct part p = part_of(j, j->order[part / j->a->n_kv_heads], part % j->a->n_kv_heads, thread, true);
    zero_grads(&p);
    for (int64_t row = 0; row < p.s.n_rows; row += j->tokens) {
        const int64_t left = p.s.n_rows - row;
        backward_block(&p, p.s.row0 + row, left < j->tokens ? left : j->tokens);
    }
}

/* Sequences by length, longest first, so that threads finish together. */
static int by_length(const void *va, const void *vb, void *arg) {
    const int32_t *start = arg;
    const int64_t a = *(const int64_t *)va, b = *(const int64_t *)vb;
    const int32_t na = start[a + 1] - start[a], nb = start[b + 1] - start[b];
    return na != nb ? (na < nb) - (na > nb) : (a > b) - (a < b);
}

int cpu_attn_bwd(struct dev *d, const struct attn_args *a, struct tensor dout, struct tensor dq, struct tensor dk,
                 struct tensor dv) {
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
