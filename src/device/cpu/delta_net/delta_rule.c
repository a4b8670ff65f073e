/* delta_rule.c - the gated delta rule over packed sequences, from the start or from a state, and its backward.
 *
 * A part is one key head of one sequence, with its value heads: it goes through the chunks in order, forward, or from the last
 * one back.  Where there is a state, its slot holds the open chunk's rows, and the kernel works there, but for keys.
 * Why the chunk form: 16 heads of 128, 1024 tokens, one core with AVX-512 take 22 ms by chunks and 27 ms by the plain
 * recurrence with blocks of S in the L1 cache; and a decoding step need not write S.
 *
 * Invariant: rows go through the same kernel, chunk by chunk from the sequence's first token, whether they come alone or with
 * others, so their bits are the same. */
#include "device/cpu/cpu_int.h"
#include "device/cpu/kernels.h"

#include "base/arena.h"

#include <math.h>
#include <string.h>

enum { CHUNK = DEV_DELTA_CHUNK };

struct job {
    const struct delta_args *a;
    const struct delta_bwd_args *b; /* NULL: forward */
    const struct cpu *cpu;
    const struct cpu_kern *kern;
    float *sums; /* backward: (sequences, 2, Hv): of da_log, of ddt_bias */
};

/* A thread's memory. Rows are CHUNK rows of a head. */
struct mem {
    float *kt, *q, *k, *v, *e, *o, *u, *t; /* kt: (Dk, CHUNK) */
    float *kk, *qk, *a, *p;                /* (CHUNK, CHUNK) */
    float *beta, *g, *rq, *rk;             /* (CHUNK) */
    float *w, *s;                          /* (Dk, CHUNK); states of the value heads, where they have no other place */
    float *dq, *dk, *dbeta, *dg;           /* backward */
    float *start, *after, *pairs;
    float *x, *rs, *os, *st, *et;
};
static size_t layout(struct mem *m, const struct delta_args *a, bool backward, void *base) {
    struct arena r = {.base = base, .cap = CPU_THREAD_BYTES};
    const size_t f = sizeof(float), row = CHUNK * f, dk = (size_t)a->k_dim, dv = (size_t)a->v_dim;
    const size_t group = (size_t)(a->n_v_heads / a->n_k_heads);
    float **const by_k[] = {&m->kt, &m->q, &m->k, &m->w, &m->dq, &m->dk};
    float **const by_v[] = {&m->v, &m->e, &m->o, &m->u, &m->x, &m->rs, &m->os, &m->et};
    float **const square[] = {&m->kk, &m->qk, &m->a, &m->p},
                  **const line[] = {&m->beta, &m->g, &m->rq, &m->rk, &m->dbeta, &m->dg, &m->start, &m->after};
    for (int i = 0; i < (backward ? 6 : 4); i++) *by_k[i] = arena_take(&r, row * dk);
    for (int i = 0; i < (backward ? 8 : 4); i++) *by_v[i] = arena_take(&r, row * dv);
    for (int i = 0; i < 4; i++) *square[i] = arena_take(&r, row * CHUNK);
    for (int i = 0; i < 8; i++) *line[i] = arena_take(&r, row);
    m->t = arena_take(&r, 16 * dv * f);
    if (backward) m->st = arena_take(&r, dk * dv * f), m->pairs = arena_take(&r, 2 * row * CHUNK);
    else m->s = arena_take(&r, group * dk * dv * f);
    return r.used;
}

struct part {
    const struct job *j;
    const struct delta_args *a;
    int64_t seq, head, group;          /* head: of keys; its value heads are [head * group, (head + 1) * group) */
    int64_t row0, n_rows, pos0, entry; /* entry + c: of the sequence's chunk c in states */
    int64_t slot;                      /* -1: none */
    struct mem m;
};
static struct part part_of(const struct job *j, int64_t part, int thread) {
    const struct delta_args *a = j->a;
    const struct row_seqs *s = &a->seqs;
    const int32_t *start = s->start.data;
    struct part p = {.j = j, .a = a, .seq = part / a->n_k_heads, .head = part % a->n_k_heads};
    p.group = a->n_v_heads / a->n_k_heads;
    p.row0 = start[p.seq];
    p.n_rows = start[p.seq + 1] - p.row0;
    p.pos0 = ((const int32_t *)s->pos0.data)[p.seq];
    p.slot = s->slot.data ? ((const int32_t *)s->slot.data)[p.seq] : -1;
    p.entry = p.row0 / CHUNK - 1;
    CHECK(p.n_rows >= 0 && p.pos0 >= 0 && (p.slot >= 0 ? p.slot < a->state.s.dim[0] : p.pos0 == 0));
    layout(&p.m, a, j->b != NULL, cpu_thread_mem(j->cpu, thread));
    return p;
}

static char *elem(struct tensor t, int64_t i) { return (char *)t.data + (size_t)i * dtype_size(t.dt); }
static float *f32(struct tensor t, int64_t i) { return (float *)t.data + i; }
/* The part's query, key (0, 1) or its value head n in row t of qkv. */
static int64_t qk_elem(const struct part *p, int64_t t, int which) {
    return t * p->a->qkv.dim[1] + (which * p->a->n_k_heads + p->head) * p->a->k_dim;
}
static int64_t v_elem(const struct part *p, int64_t t, int64_t n) {
    return t * p->a->qkv.dim[1] + 2 * p->a->n_k_heads * p->a->k_dim + n * p->a->v_dim;
}
static float *states_of(const struct part *p, int64_t chunk, int64_t n) {
    return f32(p->a->states, ((p->entry + chunk) * p->a->n_v_heads + n) * p->a->k_dim * p->a->v_dim);
}
static float act_at(struct tensor t, int64_t i) {
    return t.dt == DT_BF16 ? bf16_to_f32(((const uint16_t *)t.data)[i]) : ((const float *)t.data)[i];
}

/* ---- gates ---- */

static float sigmoid(float x) { return 1.0f / (1.0f + expf(-x)); }
static float softplus(float x) { return x > 20 ? x : log1pf(expf(x)); }

/* Where b, or a, of value head n is in row t. */
static int64_t gate_elem(const struct delta_args *a, int64_t t, bool is_a, int64_t n) {
    return t * a->ba.dim[1] + a->ba_at + (is_a ? a->n_v_heads : 0) + n;
}
/* beta of value head n in row t. */
static float beta_of(const struct delta_args *a, int64_t t, int64_t n) {
    const float b = sigmoid(act_at(a->ba, gate_elem(a, t, false, n)));
    return a->ba.dt == DT_BF16 ? bf16_to_f32(f32_to_bf16(b)) : b;
}
/* What softplus takes, in row t. */
static float gate_input(const struct delta_args *a, int64_t t, int64_t n) {
    return act_at(a->ba, gate_elem(a, t, true, n)) + act_at(a->dt_bias, n);
}
/* beta of n_rows rows from row t on, and G of the chunk's rows [n0, n0 + n_rows). */
static void gates(const struct part *p, int64_t n, int64_t t, int64_t n0, int64_t n_rows, float *g) {
    const float decay = -expf(act_at(p->a->a_log, n));
    for (int64_t r = 0; r < n_rows; r++) {
        p->m.beta[r] = beta_of(p->a, t + r, n);
        const float by = decay * softplus(gate_input(p->a, t + r, n));
        g[n0 + r] = n0 + r ? g[n0 + r - 1] + by : by;
    }
}

/* ---- forward ---- */

/* Queries and keys of rows [t, t + rows), which are the chunk's from n0 on: q, kt. */
static void load_qk(const struct part *p, int64_t t, int64_t n0, int64_t rows) {
    const struct mem *m = &p->m;
    const struct cpu_kern *k = p->j->kern;
    const int64_t dk = p->a->k_dim;
    const enum dtype dt = p->a->qkv.dt;
    for (int64_t r = 0; r < rows; r++) {
        m->rq[r] = k->l2_fwd(m->q + r * dk, elem(p->a->qkv, qk_elem(p, t + r, 0)), dt, dk, 1.0f / sqrtf((float)dk));
        m->rk[r] = k->l2_fwd(m->k + r * dk, elem(p->a->qkv, qk_elem(p, t + r, 1)), dt, dk, 1);
    }
    if (rows == CHUNK) k->delta_keys(m->kt, m->k, dk);
    else
        for (int64_t r = 0; r < rows; r++)
            for (int64_t d = 0; d < dk; d++) m->kt[d * CHUNK + n0 + r] = m->k[r * dk + d];
}

/* Rows [n0, n1) of chunk number `chunk` of the sequence, the first in row t of the batch. */
struct rows {
    int64_t chunk, n0, n1, t;
};
/* Value head n of them. */
static void forward_head(const struct part *p, int64_t n, const struct rows *x) {
    const int64_t chunk = x->chunk, n0 = x->n0, n1 = x->n1, t = x->t;
    const struct delta_args *a = p->a;
    const struct mem *m = &p->m;
    const struct cpu_kern *k = p->j->kern;
    const int64_t rows = n1 - n0, dk = a->k_dim, dv = a->v_dim, at = p->slot * a->n_v_heads + n;
    float *const g = p->slot >= 0 ? f32(a->state.g, at * CHUNK) : m->g, *const e =
                                                                            p->slot >= 0 ? f32(a->state.e, at * CHUNK * dv) : m->e;
    float *s = p->slot >= 0 ? f32(a->state.s, at * dk * dv) : m->s + n % p->group * dk * dv, *next = s;
    if (a->states.data) s = chunk ? states_of(p, chunk, n) : NULL, next = states_of(p, chunk + 1, n);
    gates(p, n, t, n0, rows, g);
    for (int64_t r = 0; r < rows; r++) k->widen(m->v + r * dv, elem(a->qkv, v_elem(p, t + r, n)), a->qkv.dt, 1, dv);
    const struct cpu_delta f = {n0,    n1,    dk,   dv,   m->kt, m->q, m->v, m->beta, g, chunk ? s : NULL,
                                m->kk, m->qk, m->a, m->p, e,     m->o, m->u, m->t};
    k->delta_fwd(&f);
    for (int64_t r = 0; r < rows; r++) {
        const int64_t out = ((t + r) * a->n_v_heads + n) * dv;
        k->narrow(elem(a->out, out), a->out.dt, m->o + r * dv, dv);
        if (a->e.data) memcpy(f32(a->e, out), e + (n0 + r) * dv, (size_t)dv * sizeof *e);
    }
    if (n1 == CHUNK && (p->slot >= 0 || t + rows < p->row0 + p->n_rows)) k->delta_state(&f, next, m->w);
}

/* Keys of the open chunk, from the slot, and rows [n0, n0 + rows) of them, the first in row t of the batch, to it. */
static void open_keys(const struct part *p, int64_t rows) {
    const struct tensor k = p->a->state.k;
    const int64_t at = (p->slot * p->a->n_k_heads + p->head) * CHUNK;
    const struct cpu_open_keys o = {rows, p->a->k_dim, elem(k, at * p->a->k_dim), f32(p->a->state.r, at)};
    p->j->kern->delta_open_keys(p->m.kt, &o, k.dt);
}
static void put_open_keys(const struct part *p, int64_t t, int64_t n0, int64_t rows) {
    const struct tensor k = p->a->state.k;
    const int64_t dk = p->a->k_dim, at = (p->slot * p->a->n_k_heads + p->head) * CHUNK + n0;
    for (int64_t r = 0; r < rows; r++)
        memcpy(elem(k, (at + r) * dk), elem(p->a->qkv, qk_elem(p, t + r, 1)), (size_t)dk * dtype_size(k.dt));
    memcpy(f32(p->a->state.r, at), p->m.rk, (size_t)rows * sizeof(float));
}

static void forward_part(void *arg, int64_t part, int thread) {
    const struct part p = part_of(arg, part, thread);
    const struct delta_args *a = p.a;
    if (p.pos0 % CHUNK) open_keys(&p, p.pos0 % CHUNK);
    for (int64_t r = 0, rows; r < p.n_rows; r += rows) {
        const int64_t n0 = (p.pos0 + r) % CHUNK, left = p.n_rows - r, t = p.row0 + r;
        rows = CHUNK - n0 < left ? CHUNK - n0 : left;
        load_qk(&p, t, n0, rows);
        if (p.slot >= 0 && n0 + rows < CHUNK) put_open_keys(&p, t, n0, rows);
        p.j->kern->delta_dots(
            &(struct cpu_delta){.n0 = n0, .n1 = n0 + rows, .dk = a->k_dim, .kt = p.m.kt, .q = p.m.q, .kk = p.m.kk, .qk = p.m.qk});
        for (int64_t n = p.head * p.group; n < (p.head + 1) * p.group; n++)
            forward_head(&p, n, &(struct rows){(p.pos0 + r) / CHUNK, n0, n0 + rows, t});
    }
}

/* Whether a thread's memory holds a part. */
static int check_memory(const struct delta_args *a, bool backward) {
    struct mem m;
    if (layout(&m, a, backward, NULL) > CPU_THREAD_BYTES)
        FAIL(ERR_UNSUPPORTED, "cpu delta rule: %lld value heads of a key head do not fit the working memory of a thread",
             (long long)(a->n_v_heads / a->n_k_heads));
    return 0;
}

int cpu_delta_fwd(struct dev *d, const struct delta_args *a) {
    struct job j = {.a = a, .cpu = cpu_of(d), .kern = cpu_kern_of(cpu_of(d))};
    TRY(check_memory(a, false));
    pool_run(j.cpu->pool, a->seqs.n * a->n_k_heads, forward_part, &j);
    return 0;
}

/* ---- backward ---- */

/* Value head n of a chunk of `rows` rows, the first in row t: dq, dk of p->m +=, the others to their places. */
static void backward_head(const struct part *p, int64_t n, int64_t chunk, bool last, int64_t t, int64_t rows) {
    const struct delta_args *a = p->a;
    const struct delta_bwd_args *b = p->j->b;
    const struct mem *m = &p->m;
    const struct cpu_kern *k = p->j->kern;
    const int64_t dk = a->k_dim, dv = a->v_dim, hv = a->n_v_heads;
    float *const da_log = p->j->sums + p->seq * 2 * hv + n, *const ddt_bias = da_log + hv;
    gates(p, n, t, 0, rows, m->g);
    for (int64_t r = 0; r < rows; r++) {
        const int64_t at = ((t + r) * hv + n) * dv;
        k->widen(m->o + r * dv, elem(b->dout, at), b->dout.dt, 1, dv);
        memcpy(m->e + r * dv, f32(a->e, at), (size_t)dv * sizeof *m->e);
    }
    float *const s = chunk ? states_of(p, chunk, n) : NULL;
    const struct cpu_delta f = {.n1 = rows,
                                .dk = dk,
                                .dv = dv,
                                .kt = m->kt,
                                .q = m->q,
                                .beta = m->beta,
                                .g = m->g,
                                .s = s,
                                .kk = m->kk,
                                .qk = m->qk,
                                .a = m->a,
                                .p = m->p,
                                .e = m->e,
                                .t = m->t};
    k->delta_bwd(&(struct cpu_delta_grad){.f = &f,
                                          .k = m->k,
                                          .dout = m->o,
                                          .ds = last ? NULL : states_of(p, chunk + 1, n),
                                          .ds0 = s,
                                          .dq = m->dq,
                                          .dk = m->dk,
                                          .dv = m->v,
                                          .dbeta_beta = m->dbeta,
                                          .dg = m->dg,
                                          .start = m->start,
                                          .after = m->after,
                                          .pairs = m->pairs,
                                          .de = m->u,
                                          .x = m->x,
                                          .rs = m->rs,
                                          .os = m->os,
                                          .st = m->st,
                                          .et = m->et});
    const float decay = -expf(act_at(a->a_log, n));
    for (int64_t r = rows - 1; r >= 0; r--) { /* from the sequence's last row on */
        const float input = gate_input(a, t + r, n);
        float out[2] = {m->dbeta[r] * (1.0f - m->beta[r]), m->dg[r] * decay * sigmoid(input)};
        k->narrow(elem(b->dba, gate_elem(a, t + r, false, n)), b->dba.dt, out, 1);
        k->narrow(elem(b->dba, gate_elem(a, t + r, true, n)), b->dba.dt, out + 1, 1);
        k->narrow(elem(b->dqkv, v_elem(p, t + r, n)), b->dqkv.dt, m->v + r * dv, dv);
        *da_log += m->dg[r] * (decay * softplus(input));
        *ddt_bias += out[1];
    }
}

static void backward_part(void *arg, int64_t part, int thread) {
    const struct part p = part_of(arg, part, thread);
    const struct delta_args *a = p.a;
    const struct delta_bwd_args *b = p.j->b;
    const struct mem *m = &p.m;
    const struct cpu_kern *k = p.j->kern;
    const int64_t dk = a->k_dim, chunks = (p.n_rows + CHUNK - 1) / CHUNK;
    for (int64_t n = p.head * p.group; n < (p.head + 1) * p.group; n++)
        p.j->sums[p.seq * 2 * a->n_v_heads + n] = p.j->sums[(p.seq * 2 + 1) * a->n_v_heads + n] = 0;
    for (int64_t chunk = chunks - 1; chunk >= 0; chunk--) {
        const int64_t t = p.row0 + chunk * CHUNK, left = p.n_rows - chunk * CHUNK, rows = left < CHUNK ? left : CHUNK;
        load_qk(&p, t, 0, rows);
        k->delta_dots(&(struct cpu_delta){.n1 = rows, .dk = dk, .kt = m->kt, .q = m->q, .kk = m->kk, .qk = m->qk});
        memset(m->dq, 0, (size_t)(rows * dk) * sizeof *m->dq);
        memset(m->dk, 0, (size_t)(rows * dk) * sizeof *m->dk);
        for (int64_t n = p.head * p.group; n < (p.head + 1) * p.group; n++)
            backward_head(&p, n, chunk, chunk == chunks - 1, t, rows);
        for (int64_t r = 0; r < rows; r++) {
            const float by = 1.0f / sqrtf((float)dk);
            const struct cpu_l2 q = {m->q + r * dk, dk, m->rq[r], by}, key = {m->k + r * dk, dk, m->rk[r], 1};
            k->l2_bwd(elem(b->dqkv, qk_elem(&p, t + r, 0)), b->dqkv.dt, m->dq + r * dk, &q);
            k->l2_bwd(elem(b->dqkv, qk_elem(&p, t + r, 1)), b->dqkv.dt, m->dk + r * dk, &key);
        }
    }
}

int cpu_delta_bwd(struct dev *d, const struct delta_args *a, const struct delta_bwd_args *b) {
    struct job j = {.a = a, .b = b, .cpu = cpu_of(d), .kern = cpu_kern_of(cpu_of(d))};
    const int64_t hv = a->n_v_heads;
    void *p;
    TRY(check_memory(a, true));
    TRY(cpu_scratch(cpu_of(d), CPU_SCRATCH_ROW, (size_t)(a->seqs.n * 2 * hv) * sizeof *j.sums, &p));
    j.sums = p;
    pool_run(j.cpu->pool, a->seqs.n * a->n_k_heads, backward_part, &j);
    for (int64_t i = 1; i < a->seqs.n; i++) j.kern->add(j.sums, j.sums + i * 2 * hv, 2 * hv);
    j.kern->add(b->da_log.data, j.sums, hv);
    j.kern->add(b->ddt_bias.data, j.sums + hv, hv);
    return 0;
}
