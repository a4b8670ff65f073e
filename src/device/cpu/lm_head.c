/* lm_head.c - the LM head with log-softmax, and raw logits.
 *
 * Logits exist for one chunk of the vocabulary and one block of rows at a time;
 * the chunks are the outer loop, so that a chunk of the weight is read from
 * memory once and from cache for the following blocks.  GEMMs are gemm.c's.
 * Kept logits are a chunk of all their rows after the other.
 * Invariant: a row's chunks are merged in order, so blocks and threads do not
 * show in its bits. */
#include "device/cpu/lm_head.h"

#include <math.h>
#include <string.h>

enum {
    CALL_ROWS = 1024, /* rows of a forward at a time: bounds its statistics */
    ROWS = 512,       /* rows of a block: 8 MiB of logits */
    PART_ROWS = 4,    /* rows of a part in the passes over logits */
};

/* Of a backward: logits and their gradient of one block, dx of all rows, a chunk of dw where there is more than one block. */
struct head_bwd_bytes {
    size_t logits, dz, dx, dw;
};
static struct head_bwd_bytes bwd_bytes(int64_t rows, int64_t h, int64_t vocab, enum dtype act) {
    const int64_t block = rows < ROWS ? rows : ROWS, cols = vocab < DEV_VOCAB_CHUNK ? vocab : DEV_VOCAB_CHUNK;
    return (struct head_bwd_bytes){.logits = (size_t)(block * DEV_VOCAB_CHUNK) * sizeof(float),
                                   .dz = ((size_t)(block * cols) * dtype_size(act) + 63) & ~(size_t)63, /* floats follow */
                                   .dx = (size_t)(rows * h) * sizeof(float),
                                   .dw = rows > ROWS ? (size_t)(cols * h) * sizeof(float) : 0};
}

/* Of a small vocabulary's logits the columns that are there, as no other is touched. */
size_t cpu_lmhead_scratch_bytes(const struct dev_sizes *s) {
    const int64_t call = s->rows < CALL_ROWS ? s->rows : CALL_ROWS, block = call < ROWS ? call : ROWS;
    const size_t logits = (size_t)(block * (s->vocab < DEV_VOCAB_CHUNK ? s->vocab : DEV_VOCAB_CHUNK)) * sizeof(float);
    const struct head_bwd_bytes b = bwd_bytes(s->train_rows, s->hidden, s->vocab, s->act);
    const size_t bwd = b.dz + b.dx + b.dw, fwd = (size_t)call * (sizeof(struct cpu_head_state) + sizeof(float));
    return logits + (bwd > fwd ? bwd : fwd);
}

/* ---- statistics ---- */

void cpu_head_merge(struct cpu_head_state *s, const struct cpu_head_sum *chunk) {
    if (s->sum == 0) {
        *s = (struct cpu_head_state){(double)chunk->max, (double)chunk->sum, (double)chunk->sum_t, (double)chunk->sum_sq};
        return;
    }
    const double max = s->max > (double)chunk->max ? s->max : (double)chunk->max;
    const double a = s->max - max, b = (double)chunk->max - max; /* one of them is 0 */
    const double ea = exp(a), eb = exp(b);
    /* sum e^a e (t + a): a -inf times 0 cannot arise, since max of a chunk is finite or all is NaN */
    s->sum_t = ea * (s->sum_t + a * s->sum) + eb * ((double)chunk->sum_t + b * (double)chunk->sum);
    s->sum_sq = ea * ea * s->sum_sq + eb * eb * (double)chunk->sum_sq;
    s->sum = ea * s->sum + eb * (double)chunk->sum;
    s->max = max;
}

static double lse_of(const struct cpu_head_state *s) { return s->max + log(s->sum); }

float cpu_head_logp(const struct cpu_head_state *s, float raw, float inv_temp) {
    const float z = raw * inv_temp;
    return (float)((double)z - lse_of(s));
}

/* ---- one pass over the head ---- */

struct head_job {
    const struct lmhead_args *a;
    const struct cpu_kern *k;
    float *logits;                    /* (rows of a block, DEV_VOCAB_CHUNK) */
    int64_t row0, n_rows, chunk, len; /* the block and the chunk of now */
    float *kept;                      /* (n_kept, len): those of the block's first rows; the others are in logits */
    int64_t n_kept;
    /* forward */
    struct cpu_head_state *state; /* (R) */
    float *raw_target;            /* (R) */
    bool moments;
    /* backward */
    const float *dlogp, *dentropy;
    char *dz;  /* (rows of a block, len) act */
    float *dx; /* (R, h) */
};

static int64_t min64(int64_t a, int64_t b) { return a < b ? a : b; }

struct cap_job {
    const struct cpu_kern *k;
    struct tensor z;
    int64_t len;
    float cap;
};
static void cap_part(void *arg, int64_t row, int thread) {
    const struct cap_job *j = arg;
    (void)thread;
    j->k->softcap((float *)j->z.data + row * j->z.dim[1], j->len, j->cap);
}
/* The first len logits of each row under the head's softcap. */
static void cap_logits(struct cpu *c, struct tensor z, int64_t len, float cap) {
    struct cap_job j = {cpu_kern_of(c), z, len, cap};
    if (cap > 0) pool_run(c->pool, z.dim[0], cap_part, &j);
}

/* The block from row0 on, of at most so many rows. */
static void block_begin(struct head_job *j, int64_t most) {
    const struct lmhead_args *const a = j->a;
    j->n_rows = min64(most, a->x.dim[0] - j->row0);
    j->n_kept = dev_kept_rows(a, j->row0, j->n_rows);
    if (j->n_kept == 0) return;
    j->kept = (float *)a->kept.data + j->chunk * DEV_VOCAB_CHUNK * a->kept.dim[0] + (a->kept_at + j->row0) * j->len;
}
static float *logits_of(const struct head_job *j, int64_t i) {
    return i < j->n_kept ? j->kept + i * j->len : j->logits + i * DEV_VOCAB_CHUNK;
}

/* Logits of rows [lo, hi) of the job's block and chunk, all of which are kept or none. */
static int rows_logits(struct cpu *c, const struct head_job *j, int64_t lo, int64_t hi) {
    const int64_t n0 = j->chunk * DEV_VOCAB_CHUNK;
    if (lo == hi) return 0;
    const struct tensor y = tensor_2d(logits_of(j, lo), DT_F32, hi - lo, lo < j->n_kept ? j->len : DEV_VOCAB_CHUNK);
    TRY(cpu_matmul_cols(c, y, tensor_rows(j->a->x, j->row0 + lo, hi - lo), &j->a->w, n0, n0 + j->len));
    cap_logits(c, y, j->len, j->a->w.softcap);
    return 0;
}

/* ---- lists and top-k ----
 * top_id and top_logp hold the row's largest raw logits so far, largest first, list_logp the raw logits of the
 * listed entries; finish_row makes log-probs of them. */

struct head_lists {
    int64_t n_top, n_list;
    int32_t *top_id;
    float *top;
    const int32_t *list_id;
    float *list;
};
static struct head_lists lists_of(const struct lmhead_args *a, int64_t row) {
    struct head_lists l = {0};
    if (a->top_id.data) {
        l.n_top = a->top_id.dim[1];
        l.top_id = (int32_t *)a->top_id.data + row * l.n_top;
        l.top = (float *)a->top_logp.data + row * l.n_top;
    }
    if (a->list_id.data) {
        l.n_list = a->list_id.dim[1];
        l.list_id = (const int32_t *)a->list_id.data + row * l.n_list;
        l.list = (float *)a->list_logp.data + row * l.n_list;
    }
    return l;
}

/* Entry id goes behind all that are as large; ids come in ascending order. */
static void top_insert(const struct head_lists *l, int32_t id, float raw) {
    int64_t at = l->n_top;
    while (at > 0 && (l->top_id[at - 1] < 0 || raw > l->top[at - 1])) at--;
    if (at == l->n_top) return;
    memmove(l->top_id + at + 1, l->top_id + at, (size_t)(l->n_top - 1 - at) * sizeof *l->top_id);
    memmove(l->top + at + 1, l->top + at, (size_t)(l->n_top - 1 - at) * sizeof *l->top);
    l->top_id[at] = id;
    l->top[at] = raw;
}

/* Entries [first, first + n) of a row. */
static void lists_take(const struct cpu_kern *k, const struct head_lists *l, const float *raw, int64_t first, int64_t n) {
    int32_t idx[DEV_VOCAB_CHUNK];
    for (int64_t i = 0; i < l->n_list; i++)
        if (l->list_id[i] >= first && l->list_id[i] < first + n) l->list[i] = raw[l->list_id[i] - first];
    if (l->n_top == 0) return;
    const float least = l->top_id[l->n_top - 1] < 0 ? -INFINITY : l->top[l->n_top - 1];
    const int64_t found = k->at_least(idx, raw, n, least); /* NaN is not */
    for (int64_t i = 0; i < found; i++) top_insert(l, (int32_t)first + idx[i], raw[idx[i]]);
}

static void lists_finish(const struct head_lists *l, const struct cpu_head_state *s, float inv_temp) {
    for (int64_t i = 0; i < l->n_list; i++) l->list[i] = cpu_head_logp(s, l->list[i], inv_temp);
    for (int64_t i = 0; i < l->n_top; i++) {
        l->top[i] = l->top_id[i] < 0 ? NAN : cpu_head_logp(s, l->top[i], inv_temp);
        if (l->top_id[i] < 0) l->top_id[i] = 0;
    }
}

static void forward_part(void *arg, int64_t part, int thread) {
    const struct head_job *j = arg;
    (void)thread;
    for (int64_t i = part * PART_ROWS; i < min64((part + 1) * PART_ROWS, j->n_rows); i++) {
        const int64_t row = j->row0 + i;
        const float *raw = logits_of(j, i);
        struct cpu_head_sum sum;
        j->k->head_sum(&sum, raw, j->len, ((const float *)j->a->inv_temp.data)[row], j->moments);
        cpu_head_merge(&j->state[row], &sum);
        const int64_t t = ((const int32_t *)j->a->target.data)[row] - j->chunk * DEV_VOCAB_CHUNK;
        if (t >= 0 && t < j->len) j->raw_target[row] = raw[t];
        if (!j->a->top_id.data && !j->a->list_id.data) continue;
        const struct head_lists l = lists_of(j->a, row);
        for (int64_t q = 0; q < l.n_top && j->chunk == 0; q++) l.top_id[q] = -1;
        lists_take(j->k, &l, raw, j->chunk * DEV_VOCAB_CHUNK, j->len);
    }
}

/* The outputs of row i from its statistics. */
static void finish_row(const struct head_job *j, int64_t i) {
    const struct lmhead_args *a = j->a;
    const struct cpu_head_state *s = &j->state[i];
    const float inv_temp = ((const float *)a->inv_temp.data)[i];
    ((float *)a->logp.data)[i] = cpu_head_logp(s, j->raw_target[i], inv_temp);
    if (a->lse.data) ((float *)a->lse.data)[i] = (float)lse_of(s);
    if (a->entropy.data) ((float *)a->entropy.data)[i] = (float)(log(s->sum) - s->sum_t / s->sum);
    if (a->sum_pi_sq.data) ((float *)a->sum_pi_sq.data)[i] = (float)(s->sum_sq / (s->sum * s->sum));
    const struct head_lists l = lists_of(a, i);
    lists_finish(&l, s, inv_temp);
}

static struct tensor opt_rows(struct tensor t, int64_t lo, int64_t n) { return t.data ? tensor_rows(t, lo, n) : t; }

/* Rows [lo, lo + n) of the arguments. */
static struct lmhead_args rows_of(const struct lmhead_args *a, int64_t lo, int64_t n) {
    struct lmhead_args r = *a;
    struct tensor *const all[] = {&r.x,         &r.inv_temp, &r.target,   &r.logp,    &r.entropy,   &r.lse,
                                  &r.sum_pi_sq, &r.top_id,   &r.top_logp, &r.list_id, &r.list_logp, &r.dlist};
    for (size_t i = 0; i < sizeof all / sizeof *all; i++) *all[i] = opt_rows(*all[i], lo, n);
    r.kept_at += lo;
    return r;
}

static int forward_rows(struct dev *d, const struct lmhead_args *a) {
    struct cpu *c = cpu_of(d);
    const int64_t rows = a->x.dim[0], block = min64(rows, ROWS);
    struct head_job j = {.a = a, .k = cpu_kern_of(c), .moments = a->entropy.data || a->sum_pi_sq.data};
    const size_t logits = (size_t)(block * DEV_VOCAB_CHUNK) * sizeof *j.logits;
    const size_t state = (size_t)rows * sizeof *j.state;
    void *p;
    TRY(cpu_scratch(c, CPU_SCRATCH_HEAD, logits + state + (size_t)rows * sizeof *j.raw_target, &p));
    j.logits = p;
    j.state = (void *)((char *)p + logits);
    j.raw_target = (void *)((char *)p + logits + state);
    memset(j.state, 0, state);
    for (int64_t i = 0; i < rows; i++) {
        const int32_t t = ((const int32_t *)a->target.data)[i];
        CHECK(t >= 0 && t < a->w.n);
    }
    for (int64_t i = 0, n = a->list_id.data ? tensor_count(a->list_id) : 0; i < n; i++) {
        const int32_t t = ((const int32_t *)a->list_id.data)[i];
        CHECK(t >= 0 && t < a->w.n);
    }
    for (j.chunk = 0; j.chunk < cpu_head_chunks(a->w.n); j.chunk++) {
        j.len = cpu_head_chunk_len(a->w.n, j.chunk);
        for (j.row0 = 0; j.row0 < rows; j.row0 += block) {
            block_begin(&j, block);
            TRY(rows_logits(c, &j, 0, j.n_kept));
            TRY(rows_logits(c, &j, j.n_kept, j.n_rows));
            pool_run(c->pool, (j.n_rows + PART_ROWS - 1) / PART_ROWS, forward_part, &j);
        }
    }
    for (int64_t i = 0; i < rows; i++) finish_row(&j, i);
    return 0;
}

int cpu_lmhead_fwd(struct dev *d, const struct lmhead_args *a) {
    for (int64_t lo = 0, rows = a->x.dim[0]; lo < rows; lo += CALL_ROWS) {
        const struct lmhead_args part = rows_of(a, lo, min64(CALL_ROWS, rows - lo));
        TRY(forward_rows(d, &part));
    }
    return 0;
}

int cpu_logits(struct dev *d, struct tensor out, struct tensor x, struct weight w) {
    TRY(cpu_matmul_cols(cpu_of(d), out, x, &w, 0, w.n));
    cap_logits(cpu_of(d), out, w.n, w.softcap);
    return 0;
}

/* ---- backward ---- */

static void backward_part(void *arg, int64_t part, int thread) {
    const struct head_job *j = arg;
    const struct lmhead_args *a = j->a;
    (void)thread;
    for (int64_t i = part * PART_ROWS; i < min64((part + 1) * PART_ROWS, j->n_rows); i++) {
        const int64_t row = j->row0 + i, t = ((const int32_t *)a->target.data)[row] - j->chunk * DEV_VOCAB_CHUNK;
        const int64_t n_list = a->dlist.data ? a->dlist.dim[1] : 0;
        const float *dlist = n_list ? (const float *)a->dlist.data + row * n_list : NULL;
        double dsum = (double)j->dlogp[row];
        for (int64_t q = 0; q < n_list; q++) dsum += (double)dlist[q];
        const struct cpu_head_dz g = {
            .inv_temp = ((const float *)a->inv_temp.data)[row],
            .lse = ((const float *)a->lse.data)[row],
            .dlogp = j->dlogp[row],
            .dentropy = j->dentropy ? j->dentropy[row] : 0,
            .entropy = j->dentropy ? ((const float *)a->entropy.data)[row] : 0,
            .softcap = a->w.softcap,
            .dsum = (float)dsum,
            .target = t >= 0 && t < j->len ? t : -1,
            .list = n_list ? (const int32_t *)a->list_id.data + row * n_list : NULL,
            .dlist = dlist,
            .n_list = n_list,
            .first = j->chunk * DEV_VOCAB_CHUNK,
        };
        j->k->head_dz(j->dz + (size_t)(i * j->len) * dtype_size(a->x.dt), a->x.dt, logits_of(j, i), j->len, &g);
    }
}

struct narrow_job {
    const struct cpu_kern *k;
    struct tensor dst; /* (R, h) */
    const float *src;
};
static void narrow_part(void *arg, int64_t part, int thread) {
    const struct narrow_job *j = arg;
    const int64_t h = j->dst.dim[1], lo = part * PART_ROWS, n = min64(PART_ROWS, j->dst.dim[0] - lo);
    (void)thread;
    j->k->narrow((char *)j->dst.data + (size_t)(lo * h) * dtype_size(j->dst.dt), j->dst.dt, j->src + lo * h, n * h);
}

/* The gradient of a chunk of the head's weight from the block's dz: the first block's rows write it, the others add, and where
 * it adds to what is there, `sums` takes it first. */
static int chunk_dw(struct dev *d, const struct head_job *j, const struct lmhead_bwd_args *g, struct tensor dz, float *sums) {
    const bool first = j->row0 == 0, last = j->row0 + j->n_rows == j->a->x.dim[0];
    const struct tensor dw = tensor_rows(g->dw, j->chunk * DEV_VOCAB_CHUNK, j->len);
    const struct tensor to = sums ? tensor_2d(sums, DT_F32, dw.dim[0], dw.dim[1]) : dw;
    TRY(cpu_matmul_dw(d, to, TENSOR_NONE, dz, tensor_rows(j->a->x, j->row0, j->n_rows), sums ? !first : g->add || !first));
    return sums && last ? cpu_axpby(d, dw, 1, to, 1) : 0;
}

int cpu_lmhead_bwd(struct dev *d, const struct lmhead_args *a, const struct lmhead_bwd_args *g) {
    struct cpu *c = cpu_of(d);
    const int64_t rows = a->x.dim[0], h = a->x.dim[1], block = min64(rows, ROWS);
    struct head_job j = {.a = a, .k = cpu_kern_of(c), .dlogp = g->dlogp.data, .dentropy = g->dentropy.data};
    const struct head_bwd_bytes size = bwd_bytes(rows, h, a->w.n, a->x.dt);
    void *p;
    TRY(cpu_scratch(c, CPU_SCRATCH_HEAD, size.logits + size.dz + size.dx + size.dw, &p));
    j.logits = p;
    j.dz = (char *)p + size.logits;
    j.dx = (void *)(j.dz + size.dz);
    float *const sums = g->dw.data && g->add && size.dw ? (void *)((char *)j.dx + size.dx) : NULL;
    memset(j.dx, 0, size.dx);
    for (j.chunk = 0; j.chunk < cpu_head_chunks(a->w.n); j.chunk++) {
        const int64_t n0 = j.chunk * DEV_VOCAB_CHUNK;
        j.len = cpu_head_chunk_len(a->w.n, j.chunk);
        for (j.row0 = 0; j.row0 < rows; j.row0 += block) {
            block_begin(&j, block);
            TRY(rows_logits(c, &j, j.n_kept, j.n_rows));
            pool_run(c->pool, (j.n_rows + PART_ROWS - 1) / PART_ROWS, backward_part, &j);
            const struct tensor dz = tensor_2d(j.dz, a->x.dt, j.n_rows, j.len);
            TRY(cpu_matmul_dx_cols(c, j.dx + j.row0 * h, dz, &a->w, n0, n0 + j.len));
            if (g->dw.data) TRY(chunk_dw(d, &j, g, dz, sums));
        }
    }
    struct narrow_job out = {j.k, g->dx, j.dx};
    pool_run(c->pool, (rows + PART_ROWS - 1) / PART_ROWS, narrow_part, &out);
    return 0;
}
