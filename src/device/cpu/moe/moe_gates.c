/* moe_gates.c - the CPU backend's ops that some families' experts have besides router, GEMMs and combination.
 *
 * Invariant: a token's results are made by one thread in one order. */
#include "device/cpu/cpu_int.h"

#include <math.h>

enum { ROWS = 16 /* tokens of a part */, LANES = 16 /* sums of a dot product side by side, added in their order */ };

static float value_at(struct tensor t, int64_t i) {
    return t.dt == DT_BF16 ? bf16_to_f32(((const uint16_t *)t.data)[i]) : ((const float *)t.data)[i];
}
static void put(struct tensor t, int64_t i, float v) {
    if (t.dt == DT_BF16) ((uint16_t *)t.data)[i] = f32_to_bf16(v);
    else ((float *)t.data)[i] = v;
}
static int64_t parts_of(int64_t rows) { return (rows + ROWS - 1) / ROWS; }
static int64_t part_end(int64_t rows, int64_t part) { return (part + 1) * ROWS < rows ? (part + 1) * ROWS : rows; }
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
