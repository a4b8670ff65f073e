/* moe_gates.c - the CPU backend's ops that some families' experts have besides router, GEMMs and combination.
 *
 * Invariant: a token's results are made by one thread in one order. */
#include "device/cpu/moe/token_rows.h"

#include <math.h>

enum { LANES = 16 /* sums of a dot product side by side, added in their order */ };

static float sigmoid(float x) { return 1 / (1 + expf(-x)); }

/* ---- the gate of a shared expert ---- */

struct row_gate_job {
    const struct row_gate_args *a;
    struct tensor dout, dy, dgate;
};

static void row_gate_fwd_part(void *arg, int64_t part, int thread) {
    const struct row_gate_args *const a = ((const struct row_gate_job *)arg)->a;
    const int64_t h = a->y.dim[1], end = part_end(a->y.dim[0], part);
    (void)thread;
    for (int64_t t = part * ROWS; t < end; t++) {
        const float s = sigmoid(value_at(a->gate, t)), *const from = (const float *)a->from.data + t * h;
        float *const out = (float *)a->out.data + t * h;
        for (int64_t c = 0; c < h; c++) out[c] = from[c] + s * value_at(a->y, t * h + c);
    }
}

int cpu_row_gate_fwd(struct dev *d, const struct row_gate_args *a) {
    struct row_gate_job j = {.a = a};
    pool_run(cpu_of(d)->pool, parts_of(a->y.dim[0]), row_gate_fwd_part, &j);
    return 0;
}

static void row_gate_bwd_part(void *arg, int64_t part, int thread) {
    const struct row_gate_job *const j = arg;
    const int64_t h = j->a->y.dim[1], end = part_end(j->a->y.dim[0], part);
    (void)thread;
    for (int64_t t = part * ROWS; t < end; t++) {
        const float s = sigmoid(value_at(j->a->gate, t));
        float lane[LANES] = {0}, dot = 0;
        for (int64_t c = 0; c < h; c++) {
            const float g = value_at(j->dout, t * h + c);
            lane[c % LANES] += g * value_at(j->a->y, t * h + c);
            put(j->dy, t * h + c, s * g);
        }
        for (int l = 0; l < LANES; l++) dot += lane[l];
        put(j->dgate, t, s * (1 - s) * dot);
    }
}

int cpu_row_gate_bwd(struct dev *d, const struct row_gate_args *a, struct tensor dout, struct tensor dy, struct tensor dgate) {
    struct row_gate_job j = {a, dout, dy, dgate};
    pool_run(cpu_of(d)->pool, parts_of(a->y.dim[0]), row_gate_bwd_part, &j);
    return 0;
}

/* ---- biases of experts: a part is some of an expert's columns ---- */

enum { COLS = 64 };

struct expert_bias_job {
    struct tensor y, bias, offset;
    bool add;
};

static int64_t column_parts(const struct expert_bias_job *j) { return (j->y.dim[1] + COLS - 1) / COLS; }

/* The expert of a part, its rows and columns. */
struct bias_part {
    int64_t e, lo, hi, c, n;
};
static struct bias_part bias_part_of(const struct expert_bias_job *j, int64_t part) {
    const int32_t *const at = j->offset.data;
    const int64_t e = part / column_parts(j), c = part % column_parts(j) * COLS, left = j->y.dim[1] - c;
    CHECK(at[e] >= 0 && at[e] <= at[e + 1] && at[e + 1] <= j->y.dim[0]);
    return (struct bias_part){e, at[e], at[e + 1], c, left < COLS ? left : COLS};
}

static void expert_bias_fwd_part(void *arg, int64_t part, int thread) {
    const struct expert_bias_job *const j = arg;
    const struct bias_part p = bias_part_of(j, part);
    const int64_t n = j->y.dim[1];
    (void)thread;
    for (int64_t r = p.lo; r < p.hi; r++)
        for (int64_t c = p.c; c < p.c + p.n; c++) put(j->y, r * n + c, value_at(j->y, r * n + c) + value_at(j->bias, p.e * n + c));
}

int cpu_expert_bias_fwd(struct dev *d, struct tensor y, struct tensor bias, struct tensor offset) {
    struct expert_bias_job j = {y, bias, offset, false};
    pool_run(cpu_of(d)->pool, (offset.dim[0] - 1) * column_parts(&j), expert_bias_fwd_part, &j);
    return 0;
}

/* y: dy, bias: its gradient. */
static void expert_bias_bwd_part(void *arg, int64_t part, int thread) {
    const struct expert_bias_job *const j = arg;
    const struct bias_part p = bias_part_of(j, part);
    const int64_t n = j->y.dim[1];
    float sum[COLS] = {0}, *const db = (float *)j->bias.data + p.e * n + p.c;
    (void)thread;
    for (int64_t r = p.lo; r < p.hi; r++)
        for (int64_t c = 0; c < p.n; c++) sum[c] += value_at(j->y, r * n + p.c + c);
    for (int64_t c = 0; c < p.n; c++) db[c] = j->add ? db[c] + sum[c] : sum[c];
}

int cpu_expert_bias_bwd(struct dev *d, struct tensor db, struct tensor dy, struct tensor offset, bool add) {
    struct expert_bias_job j = {dy, db, offset, add};
    pool_run(cpu_of(d)->pool, (offset.dim[0] - 1) * column_parts(&j), expert_bias_bwd_part, &j);
    return 0;
}

/* ---- SwiGLU with limits ---- */

struct clamped_job {
    const struct clamped_swiglu_args *a;
    struct tensor dgate_up, dy;
};

static void clamped_fwd_part(void *arg, int64_t part, int thread) {
    const struct clamped_swiglu_args *const a = ((const struct clamped_job *)arg)->a;
    const int64_t f = a->y.dim[1], end = part_end(a->y.dim[0], part);
    (void)thread;
    for (int64_t t = part * ROWS; t < end; t++)
        for (int64_t c = 0; c < f; c++) {
            const float gate = value_at(a->gate_up, t * 2 * f + c), up = value_at(a->gate_up, (t * 2 + 1) * f + c);
            const float g = fminf(gate, a->limit), u = fmaxf(fminf(up, a->limit), -a->limit);
            put(a->y, t * f + c, (u + 1) * (g * sigmoid(a->alpha * g)));
        }
}

int cpu_clamped_swiglu_fwd(struct dev *d, const struct clamped_swiglu_args *a) {
    struct clamped_job j = {.a = a};
    pool_run(cpu_of(d)->pool, parts_of(a->y.dim[0]), clamped_fwd_part, &j);
    return 0;
}

static void clamped_bwd_part(void *arg, int64_t part, int thread) {
    const struct clamped_job *const j = arg;
    const struct clamped_swiglu_args *const a = j->a;
    const int64_t f = j->dy.dim[1], end = part_end(j->dy.dim[0], part);
    (void)thread;
    for (int64_t t = part * ROWS; t < end; t++)
        for (int64_t c = 0; c < f; c++) {
            const int64_t at = t * 2 * f + c;
            const float gate = value_at(a->gate_up, at), up = value_at(a->gate_up, at + f), dy = value_at(j->dy, t * f + c);
            const float g = fminf(gate, a->limit), u = fmaxf(fminf(up, a->limit), -a->limit), s = sigmoid(a->alpha * g);
            put(j->dgate_up, at, gate <= a->limit ? dy * (u + 1) * (s * (1 + a->alpha * g * (1 - s))) : 0);
            put(j->dgate_up, at + f, fabsf(up) <= a->limit ? dy * (g * s) : 0);
        }
}

int cpu_clamped_swiglu_bwd(struct dev *d, const struct clamped_swiglu_args *a, struct tensor dgate_up, struct tensor dy) {
    struct clamped_job j = {a, dgate_up, dy};
    pool_run(cpu_of(d)->pool, parts_of(dy.dim[0]), clamped_bwd_part, &j);
    return 0;
}

/* ---- sinks of attention: forward by rows, backward by heads ---- */

struct sink_job {
    const struct attn_sink_args *a;
    struct tensor dout, dsink;
};

static void sink_fwd_part(void *arg, int64_t part, int thread) {
    const struct attn_sink_args *const a = ((const struct sink_job *)arg)->a;
    const int64_t heads = a->lse.dim[1], dim = a->out.dim[1] / heads, end = part_end(a->lse.dim[0], part);
    (void)thread;
    for (int64_t i = part * ROWS * heads; i < end * heads; i++) {
        float *const lse = (float *)a->lse.data + i;
        const float sink = value_at(a->sink, i % heads), keep = sigmoid(*lse - sink);
        for (int64_t c = i * dim; c < (i + 1) * dim; c++) put(a->out, c, keep * value_at(a->out, c));
        *lse = fmaxf(*lse, sink) + log1pf(expf(-fabsf(*lse - sink)));
    }
}

int cpu_attn_sink_fwd(struct dev *d, const struct attn_sink_args *a) {
    struct sink_job j = {.a = a};
    pool_run(cpu_of(d)->pool, parts_of(a->lse.dim[0]), sink_fwd_part, &j);
    return 0;
}

static void sink_bwd_part(void *arg, int64_t h, int thread) {
    const struct sink_job *const j = arg;
    const struct attn_sink_args *const a = j->a;
    const int64_t heads = a->lse.dim[1], dim = a->out.dim[1] / heads;
    const float sink = value_at(a->sink, h);
    float sum = 0;
    (void)thread;
    for (int64_t i = h; i < tensor_count(a->lse); i += heads) {
        float dot = 0;
        for (int64_t c = i * dim; c < (i + 1) * dim; c++) dot += value_at(j->dout, c) * value_at(a->out, c);
        sum += expf(sink - ((const float *)a->lse.data)[i]) * dot;
    }
    ((float *)j->dsink.data)[h] -= sum;
}

int cpu_attn_sink_bwd(struct dev *d, const struct attn_sink_args *a, struct tensor dout, struct tensor dsink) {
    struct sink_job j = {a, dout, dsink};
    pool_run(cpu_of(d)->pool, a->lse.dim[1], sink_bwd_part, &j);
    return 0;
}
