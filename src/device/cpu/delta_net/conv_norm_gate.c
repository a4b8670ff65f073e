/* conv_norm_gate.c - the row ops of a gated delta net layer: causal convolution, gated norm, and the output gate of
 * gated attention; each with its backward.
 *
 * Gradients of weights sum over rows: each block of BLOCK rows adds up its own sum, the blocks' sums are added in order, and
 * their sum to the gradient.
 * Invariant: BLOCK does not depend on the number of threads, so neither do bits. */
#include "device/cpu/cpu_int.h"
#include "device/cpu/kernels.h"

#include <string.h>

enum {
    BLOCK = 64, /* rows of one partial sum */
    COLS = 512, /* columns of a part of the convolution */
    TAPS = DEV_CONV_TAPS,
    PART_ELEMS = 8192, /* about this many elements make a part of an op without sums */
};

static int64_t n_blocks(int64_t n, int64_t per) { return (n + per - 1) / per; }
static int64_t part_end(int64_t lo, int64_t per, int64_t n) { return lo + per < n ? lo + per : n; }
static char *at(struct tensor t, int64_t i) { return (char *)t.data + (size_t)i * dtype_size(t.dt); }
static int64_t rows_per_part(int64_t c) { return c < PART_ELEMS ? PART_ELEMS / c : 1; }

static void add_partials(const struct cpu_kern *k, float *sums, int64_t n, int64_t stride, int64_t c) {
    for (int64_t i = 1; i < n; i++) k->add(sums, sums + i * stride, c);
}

/* ---- causal convolution ---- */

struct conv_job {
    const struct causal_conv_args *a;
    const struct causal_conv_bwd_args *b;
    const struct cpu *cpu;
    const struct cpu_kern *k;
    int64_t col_parts, cols;
    float *w;    /* (TAPS, c): the weights by tap */
    float *sums; /* backward: (row blocks, TAPS, c) */
    char *zeros; /* a row of them */
};
/* A sequence, and a part's columns [col, col + n). */
struct conv_seq {
    int64_t row0, n_rows, pos0, slot, col, n;
};
static struct conv_seq conv_seq_at(const struct conv_job *j, int64_t i, int64_t col) {
    const struct row_seqs *s = &j->a->seqs;
    const int32_t *start = s->start.data;
    struct conv_seq q = {start[i], start[i + 1] - start[i], ((const int32_t *)s->pos0.data)[i], -1, col, 0};
    if (s->slot.data) q.slot = ((const int32_t *)s->slot.data)[i];
    q.n = part_end(col, COLS, j->cols) - col;
    CHECK(q.n_rows >= 0 && q.pos0 >= 0 && (q.slot >= 0 ? q.slot < j->a->state.dim[0] : q.pos0 == 0));
    return q;
}
/* The part's columns of row r's place in the state. */
static char *conv_place(const struct conv_job *j, const struct conv_seq *s, int64_t r) {
    const int64_t rows = j->a->state.dim[1];
    return at(j->a->state, (s->slot * rows + (s->pos0 + r) % rows) * j->cols + s->col);
}
/* Where those of the sequence's row r in the batch begin, in x and dx. */
static int64_t conv_x(const struct conv_job *j, const struct conv_seq *s, int64_t r) {
    return (s->row0 + r) * j->a->x.dim[1] + j->a->x_at + s->col;
}
/* The part's columns of the sequence's input row r, which may be before its first one in the batch. */
static const void *conv_input(const struct conv_job *j, const struct conv_seq *s, int64_t r) {
    if (r >= 0) return at(j->a->x, conv_x(j, s, r));
    return s->pos0 + r < 0 ? j->zeros : conv_place(j, s, r);
}
static struct cpu_conv conv_at(const struct conv_job *j, const struct conv_seq *s, int64_t r) {
    struct cpu_conv p = {.w = j->w + s->col, .ldw = j->cols, .n = s->n};
    for (int t = 0; t < TAPS; t++) p.x[t] = conv_input(j, s, r - (TAPS - 1) + t);
    return p;
}
/* The sequences with rows in [lo, hi): calls body on each with its own rows there. */
static void conv_rows(const struct conv_job *j, int64_t lo, int64_t hi, int64_t col, int thread,
                      void (*body)(const struct conv_job *j, const struct conv_seq *s, int64_t lo, int64_t hi, int thread)) {
    for (int64_t i = 0; i < j->a->seqs.n; i++) {
        const struct conv_seq s = conv_seq_at(j, i, col);
        const int64_t from = lo > s.row0 ? lo - s.row0 : 0, to = hi - s.row0 < s.n_rows ? hi - s.row0 : s.n_rows;
        if (from < to) body(j, &s, from, to, thread);
    }
}

static void conv_forward_rows(const struct conv_job *j, const struct conv_seq *s, int64_t lo, int64_t hi, int thread) {
    (void)thread;
    for (int64_t r = lo; r < hi; r++) {
        const struct cpu_conv p = conv_at(j, s, r);
        j->k->conv_fwd(at(j->a->y, (s->row0 + r) * j->cols + s->col), &p, j->a->x.dt);
    }
}
static void conv_fwd_part(void *arg, int64_t part, int thread) {
    const struct conv_job *j = arg;
    const int64_t lo = part / j->col_parts * BLOCK, hi = part_end(lo, BLOCK, j->a->x.dim[0]);
    conv_rows(j, lo, hi, part % j->col_parts * COLS, thread, conv_forward_rows);
}
/* After all rows: the last inputs of sequence `part`. */
static void conv_state_part(void *arg, int64_t part, int thread) {
    const struct conv_job *j = arg;
    const int64_t rows = j->a->state.dim[1];
    (void)thread;
    for (int64_t col = 0; col < j->cols; col += COLS) {
        const struct conv_seq s = conv_seq_at(j, part, col);
        for (int64_t r = s.n_rows < rows ? 0 : s.n_rows - rows; r < s.n_rows; r++)
            memcpy(conv_place(j, &s, r), conv_input(j, &s, r), (size_t)s.n * dtype_size(j->a->x.dt));
    }
}

static int conv_open(struct conv_job *j, struct dev *d, const struct causal_conv_args *a, int64_t sums) {
    struct cpu *c = cpu_of(d);
    *j = (struct conv_job){.a = a, .cpu = c, .k = cpu_kern_of(c), .cols = a->w.dim[0], .col_parts = n_blocks(a->w.dim[0], COLS)};
    void *p;
    TRY(cpu_scratch(c, CPU_SCRATCH_ROW, (size_t)((TAPS + sums) * j->cols + COLS) * sizeof *j->w, &p));
    j->w = p;
    j->sums = j->w + TAPS * j->cols;
    j->zeros = (char *)(j->sums + sums * j->cols);
    memset(j->zeros, 0, COLS * sizeof(float));
    for (int64_t i = 0; i < TAPS * j->cols; i++)
        j->w[i % TAPS * j->cols + i / TAPS] =
            a->w.dt == DT_BF16 ? bf16_to_f32(((const uint16_t *)a->w.data)[i]) : ((const float *)a->w.data)[i];
    return 0;
}

int cpu_causal_conv_fwd(struct dev *d, const struct causal_conv_args *a) {
    struct conv_job j;
    TRY(conv_open(&j, d, a, 0));
    pool_run(cpu_of(d)->pool, n_blocks(a->x.dim[0], BLOCK) * j.col_parts, conv_fwd_part, &j);
    if (a->state.data) pool_run(cpu_of(d)->pool, a->seqs.n, conv_state_part, &j);
    return 0;
}

static void conv_backward_rows(const struct conv_job *j, const struct conv_seq *s, int64_t lo, int64_t hi, int thread) {
    const enum dtype dt = j->a->x.dt;
    float *const du = cpu_thread_mem(j->cpu, thread), *const none = du + (BLOCK + TAPS) * COLS;
    float *const dw = none + COLS, *const sums = j->sums + (s->row0 + lo) / BLOCK * TAPS * j->cols + s->col;
    const int64_t end = hi + TAPS - 1 < s->n_rows ? hi + TAPS - 1 : s->n_rows; /* rows that read those of the part */
    memset(none, 0, COLS * sizeof *none);
    memset(dw, 0, TAPS * COLS * sizeof *dw);
    for (int64_t r = lo; r < end; r++) {
        const struct cpu_conv p = conv_at(j, s, r);
        j->k->conv_du(du + (r - lo) * COLS, r < hi ? dw : NULL, at(j->b->dy, (s->row0 + r) * j->cols + s->col), &p, dt);
    }
    for (int64_t r = lo; r < hi; r++) {
        const struct cpu_conv p = conv_at(j, s, r);
        const float *by_tap[TAPS];
        for (int64_t t = 0; t < TAPS; t++) {
            const int64_t to = r + TAPS - 1 - t;
            by_tap[t] = to < end ? du + (to - lo) * COLS : none;
        }
        j->k->conv_dx(at(j->b->dx, conv_x(j, s, r)), by_tap, &p, dt);
    }
    for (int64_t t = 0; t < TAPS; t++) j->k->add(sums + t * j->cols, dw + t * s->n, s->n);
}
static void conv_bwd_part(void *arg, int64_t part, int thread) {
    const struct conv_job *j = arg;
    const int64_t block = part / j->col_parts, lo = block * BLOCK, hi = part_end(lo, BLOCK, j->a->x.dim[0]);
    const int64_t col = part % j->col_parts * COLS, n = part_end(col, COLS, j->cols) - col;
    for (int64_t t = 0; t < TAPS; t++) memset(j->sums + (block * TAPS + t) * j->cols + col, 0, (size_t)n * sizeof *j->sums);
    conv_rows(j, lo, hi, col, thread, conv_backward_rows);
}

int cpu_causal_conv_bwd(struct dev *d, const struct causal_conv_args *a, const struct causal_conv_bwd_args *b) {
    struct conv_job j;
    const int64_t blocks = n_blocks(a->x.dim[0], BLOCK);
    TRY(conv_open(&j, d, a, blocks * TAPS));
    j.b = b;
    pool_run(cpu_of(d)->pool, blocks * j.col_parts, conv_bwd_part, &j);
    add_partials(j.k, j.sums, blocks, TAPS * j.cols, TAPS * j.cols);
    for (int64_t i = 0; i < TAPS * j.cols; i++) ((float *)b->dw.data)[i] += j.sums[i % TAPS * j.cols + i / TAPS];
    return 0;
}

/* ---- gated norm ---- */

struct norm_job {
    const struct cpu_kern *k;
    const struct gated_norm_args *a;
    const struct gated_norm_bwd_args *b;
    int64_t per;
    float *sums; /* (blocks, c) */
};
/* Where head row t is in z and dz. */
static int64_t norm_z(const struct gated_norm_args *a, int64_t t) {
    const int64_t heads = a->x.dim[0] / a->z.dim[0];
    return t / heads * a->z.dim[1] + a->z_at + t % heads * a->x.dim[1];
}
static struct cpu_gated_norm norm_row(const struct gated_norm_args *a, int64_t t) {
    const int64_t c = a->x.dim[1];
    return (struct cpu_gated_norm){.x = at(a->x, t * c), .z = at(a->z, norm_z(a, t)), .w = a->w.data, .n = c, .eps = a->eps};
}
static void norm_fwd_part(void *arg, int64_t part, int thread) {
    const struct norm_job *j = arg;
    (void)thread;
    for (int64_t t = part * j->per; t < part_end(part * j->per, j->per, j->a->x.dim[0]); t++) {
        const struct cpu_gated_norm p = norm_row(j->a, t);
        const float rs = j->k->gated_norm_fwd(at(j->a->y, t * p.n), &p, j->a->x.dt);
        if (j->a->rstd.data) ((float *)j->a->rstd.data)[t] = rs;
    }
}
int cpu_gated_norm_fwd(struct dev *d, const struct gated_norm_args *a) {
    struct norm_job j = {.k = cpu_kern_of(cpu_of(d)), .a = a, .per = rows_per_part(a->x.dim[1])};
    pool_run(cpu_of(d)->pool, n_blocks(a->x.dim[0], j.per), norm_fwd_part, &j);
    return 0;
}

static void norm_bwd_part(void *arg, int64_t part, int thread) {
    const struct norm_job *j = arg;
    const int64_t c = j->a->x.dim[1];
    (void)thread;
    memset(j->sums + part * c, 0, (size_t)c * sizeof *j->sums);
    for (int64_t t = part * BLOCK; t < part_end(part * BLOCK, BLOCK, j->a->x.dim[0]); t++) {
        struct cpu_gated_norm p = norm_row(j->a, t);
        p.rstd = ((const float *)j->a->rstd.data)[t];
        p.dy = at(j->b->dy, t * c), p.dx = at(j->b->dx, t * c), p.dz = at(j->b->dz, norm_z(j->a, t));
        p.dw = j->sums + part * c;
        j->k->gated_norm_bwd(&p, j->a->x.dt);
    }
}
int cpu_gated_norm_bwd(struct dev *d, const struct gated_norm_args *a, const struct gated_norm_bwd_args *b) {
    struct norm_job j = {.k = cpu_kern_of(cpu_of(d)), .a = a, .b = b};
    const int64_t blocks = n_blocks(a->x.dim[0], BLOCK), c = a->x.dim[1];
    void *p;
    TRY(cpu_scratch(cpu_of(d), CPU_SCRATCH_ROW, (size_t)(blocks * c) * sizeof *j.sums, &p));
    j.sums = p;
    pool_run(cpu_of(d)->pool, blocks, norm_bwd_part, &j);
    add_partials(j.k, j.sums, blocks, c, c);
    j.k->add(b->dw.data, j.sums, c);
    return 0;
}

/* ---- output gate ---- */

struct gate_job {
    const struct cpu_kern *k;
    struct tensor y, x, gate;
    const struct output_gate_bwd_args *b;
};
static void gate_fwd_part(void *arg, int64_t part, int thread) {
    const struct gate_job *j = arg;
    const int64_t lo = part * PART_ELEMS;
    (void)thread;
    j->k->output_gate_fwd(at(j->y, lo), at(j->x, lo), at(j->gate, lo), j->x.dt, part_end(lo, PART_ELEMS, tensor_count(j->x)) - lo);
}
int cpu_output_gate_fwd(struct dev *d, struct tensor y, struct tensor x, struct tensor gate) {
    struct gate_job j = {.k = cpu_kern_of(cpu_of(d)), .y = y, .x = x, .gate = gate};
    pool_run(cpu_of(d)->pool, n_blocks(tensor_count(x), PART_ELEMS), gate_fwd_part, &j);
    return 0;
}
static void gate_bwd_part(void *arg, int64_t part, int thread) {
    const struct gate_job *j = arg;
    const struct output_gate_bwd_args *b = j->b;
    const int64_t lo = part * PART_ELEMS;
    (void)thread;
    const struct cpu_output_gate p = {.dy = at(b->dy, lo),
                                      .x = at(b->x, lo),
                                      .gate = at(b->gate, lo),
                                      .dx = at(b->dx, lo),
                                      .dgate = at(b->dgate, lo),
                                      .n = part_end(lo, PART_ELEMS, tensor_count(b->dy)) - lo};
    j->k->output_gate_bwd(&p, b->dy.dt);
}
int cpu_output_gate_bwd(struct dev *d, const struct output_gate_bwd_args *a) {
    struct gate_job j = {.k = cpu_kern_of(cpu_of(d)), .b = a};
    pool_run(cpu_of(d)->pool, n_blocks(tensor_count(a->dy), PART_ELEMS), gate_bwd_part, &j);
    return 0;
}

/* ---- queries and gates ---- */

struct split_job {
    const struct gate_split_args *a;
    bool join;
};
/* A row's parts of all heads, and the columns behind them. */
static void split_row(const struct split_job *j, char *joint, char *rest, char *gate) {
    const struct gate_split_args *const a = j->a;
    const size_t size = dtype_size(a->joint.dt);
    size_t head = 0, at = 0;
    for (int64_t p = 0; p < a->n_parts; p++) head += (size_t)a->width[p] * size;
    for (int64_t p = 0; p < a->n_parts; p++) {
        const size_t bytes = (size_t)a->width[p] * size;
        char **const part = gate && p == a->n_parts - 1 ? &gate : &rest;
        for (int64_t h = 0; h < a->n_heads; h++, *part += bytes) {
            char *const in = joint + (size_t)h * head + at;
            memcpy(j->join ? in : *part, j->join ? *part : in, bytes);
        }
        at += bytes;
    }
    char *const end = joint + (size_t)a->n_heads * head;
    const size_t others = (size_t)(a->joint.dim[1] - a->at) * size - (size_t)a->n_heads * head;
    memcpy(j->join ? end : rest, j->join ? rest : end, others);
}
static void split_part(void *arg, int64_t part, int thread) {
    const struct split_job *j = arg;
    const struct gate_split_args *a = j->a;
    const int64_t cols = a->joint.dim[1], per = rows_per_part(cols), lo = part * per;
    (void)thread;
    for (int64_t t = lo; t < part_end(lo, per, a->joint.dim[0]); t++)
        split_row(j, at(a->joint, t * cols + a->at), at(a->rest, t * a->rest.dim[1] + a->at),
                  a->gate.data ? at(a->gate, t * a->gate.dim[1]) : NULL);
}
static int split_any(struct dev *d, const struct gate_split_args *a, bool join) {
    struct split_job j = {a, join};
    pool_run(cpu_of(d)->pool, n_blocks(a->joint.dim[0], rows_per_part(a->joint.dim[1])), split_part, &j);
    return 0;
}
int cpu_gate_split(struct dev *d, const struct gate_split_args *a) { return split_any(d, a, false); }
int cpu_gate_join(struct dev *d, const struct gate_split_args *a) { return split_any(d, a, true); }
