/* test_device_delta_net.c - the ops with a state: causal convolution and gated delta rule. On every backend, in f32 and bf16,
 * the bits of a row are those of the whole sequences packed without a state, whatever
 *  - rows follow it in the sequence (NaN here);
 *  - sequences are packed with it, in which order;
 *  - pieces a sequence comes in, from the state: chunks of a prefill, one row at a time (decode), next to others that are
 *    elsewhere in their chunks;
 *  - was in the state's slot before the sequence, or is in other slots;
 *  - rows came after it and were taken back, in the open chunk;
 *  - the kernel in front of the delta rule's has made later than this began (kernels as threads). */
#include "ops/ops_table.h"

static struct backends two, one; /* threads */

static const struct op_shape shapes[] = {
    {.rows = 236, .hk = 1, .hq = 2, .dim = 32, .k = 16, .lens = {1, 64, 130, 3, 38}},
    {.rows = 138, .hk = 2, .hq = 2, .dim = 128, .k = 128, .lens = {133, 5}},
};
enum { SLOTS = 9, TAKEN_BACK = 8, BETWEEN = 8 };

/* One network: the convolution's result is the delta rule's qkv. */
struct net {
    struct run r; /* inputs of delta_setup; qkv is what the convolution takes */
    struct slot w;
    int64_t cols, n, start[COUNT(shapes[0].lens) + 1];
    struct tensor conv_state;
    struct delta_state state;
    float *out; /* (rows, Hv Dv): the results so far */
    void (*in_front)(void *of, bool ended);
    int64_t early; /* copies that did not wait for it */
};
/* What a kernel in front of the delta rule's makes. */
struct made {
    void *at[2], *copy[2];
    size_t bytes[2];
};

static void net_open(struct net *t, const struct op_shape *s, enum dtype act, struct dev *d) {
    static const struct op_def op = {.name = "delta", .setup = delta_setup};
    *t = (struct net){.cols = 2 * s->hk * s->dim + s->hq * s->k};
    run_init(&t->r, &op, s, act, d);
    int n = 0;
    t->w = *slot_new(&t->w, &n, "conv w", shape_2d(act, t->cols, DEV_CONV_TAPS), false);
    slot_fill(&t->w, 0.5f, 0);
    for (; t->n < COUNT(s->lens) && s->lens[t->n]; t->n++) t->start[t->n + 1] = t->start[t->n] + s->lens[t->n];
    t->out = xcalloc((size_t)(s->rows * s->hq * s->k), sizeof *t->out);
}
static void net_close(struct net *t) {
    run_free(&t->r);
    free(t->w.f);
    free(t->out);
}
/* Slots full of NaN, from which up to `back` rows can be taken. */
static void net_state(struct net *t, int64_t back) {
    const struct op_shape *s = t->r.s;
    const struct tensor conv = {NULL, t->r.act, 3, {SLOTS, DEV_CONV_TAPS - 1 + back, t->cols, 1}};
    const struct tensor g = {NULL, DT_F32, 3, {SLOTS, s->hq, DEV_DELTA_CHUNK, 1}};
    const struct tensor r = {NULL, DT_F32, 3, {SLOTS, s->hk, DEV_DELTA_CHUNK, 1}};
    t->conv_state = dev_new(&t->r, conv, false);
    t->state = (struct delta_state){
        dev_new(&t->r, shape_4d(DT_F32, SLOTS, s->hq, s->dim, s->k), false),
        dev_new(&t->r, shape_4d(t->r.act, SLOTS, s->hk, DEV_DELTA_CHUNK, s->dim), false), dev_new(&t->r, r, false),
        dev_new(&t->r, shape_4d(DT_F32, SLOTS, s->hq, DEV_DELTA_CHUNK, s->k), false), dev_new(&t->r, g, false)};
}

/* Some rows of a sequence of the shape. */
struct piece {
    int64_t seq, from, n, slot; /* slot: -1 without a state */
};
/* The rows of the pieces of both inputs, packed on the device: those of the convolution, BETWEEN columns of NaN, b and a; rows of a
 * sequence from bad[seq] on are NaN. */
static struct tensor piece_rows(struct net *t, const struct piece *p, int64_t n, const int64_t *bad) {
    const struct slot *s = t->r.in;
    const int64_t x = t->cols, ba = s[1].dim[1], c = x + BETWEEN + ba;
    int64_t rows = 0, at = 0;
    for (int64_t i = 0; i < n; i++) rows += p[i].n;
    float *f = xcalloc((size_t)(rows * c), sizeof *f);
    for (int64_t i = 0; i < n; i++)
        for (int64_t r = p[i].from; r < p[i].from + p[i].n; r++, at++)
            for (int64_t k = 0; k < c; k++) {
                const int64_t row = t->start[p[i].seq] + r;
                const float v = k < x ? s[0].f[row * x + k] : k < x + BETWEEN ? NAN : s[1].f[row * ba + k - x - BETWEEN];
                f[at * c + k] = bad && r >= bad[p[i].seq] ? NAN : v;
            }
    const struct tensor out = up_values(&t->r, shape_2d(t->r.act, rows, c), false, f, NULL);
    free(f);
    return out;
}
/* Of tests/ops/cuda_threads, where that is linked. */
__attribute__((weak)) void threads_in_front(void (*hook)(void *of, bool ended), void *of);
__attribute__((weak)) int64_t threads_early_copies(void);
/* dev_delta_fwd behind a kernel that makes its heads and gates. */
static int delta_behind(struct net *t, const struct delta_args *a) {
    struct made x = {.at = {a->qkv.data, a->ba.data}};
    for (int i = 0; i < 2; i++) {
        x.bytes[i] = (size_t)tensor_count(i ? a->ba : a->qkv) * dtype_size(t->r.act);
        x.copy[i] = xmalloc(x.bytes[i]);
        memcpy(x.copy[i], x.at[i], x.bytes[i]);
    }
    threads_in_front(t->in_front, &x);
    const int rc = dev_delta_fwd(t->r.d, a);
    t->early = threads_early_copies();
    threads_in_front(NULL, NULL);
    free(x.copy[0]);
    free(x.copy[1]);
    return rc;
}
/* Runs the pieces in one call of each op and puts their rows into t->out. */
static int net_run(struct net *t, const struct piece *p, int64_t n, const int64_t *bad) {
    const struct op_shape *s = t->r.s;
    const int64_t width = s->hq * s->k;
    int32_t start[16] = {0}, pos0[16], slot[16];
    struct row_seqs q = {.n = n};
    for (int64_t i = 0; i < n; i++) {
        start[i + 1] = (int32_t)(start[i] + p[i].n);
        pos0[i] = (int32_t)p[i].from;
        slot[i] = (int32_t)p[i].slot;
        if (p[i].n > q.max_rows) q.max_rows = p[i].n;
    }
    q.start = up_i32(&t->r, shape_1d(DT_I32, n + 1), start);
    q.pos0 = up_i32(&t->r, shape_1d(DT_I32, n), pos0);
    if (p[0].slot >= 0) q.slot = up_i32(&t->r, shape_1d(DT_I32, n), slot);
    struct causal_conv_args conv = {.seqs = q, .x = piece_rows(t, p, n, bad), .w = up(&t->r, &t->w)};
    conv.y = dev_new(&t->r, shape_2d(t->r.act, start[n], t->cols), false);
    struct delta_args a = {.n_k_heads = s->hk,
                           .n_v_heads = s->hq,
                           .k_dim = s->dim,
                           .v_dim = s->k,
                           .seqs = q,
                           .qkv = conv.y,
                           .ba = conv.x,
                           .ba_at = t->cols + BETWEEN,
                           .a_log = up(&t->r, &t->r.in[2]),
                           .dt_bias = up(&t->r, &t->r.in[3]),
                           .out = dev_new(&t->r, shape_2d(t->r.act, start[n], width), false)};
    if (p[0].slot >= 0) conv.state = t->conv_state, a.state = t->state;
    TRY(dev_causal_conv_fwd(t->r.d, &conv));
    TRY(t->in_front ? delta_behind(t, &a) : dev_delta_fwd(t->r.d, &a));
    float *f = down_values(&t->r, a.out);
    for (int64_t i = 0; i < n; i++)
        memcpy(t->out + (t->start[p[i].seq] + p[i].from) * width, f + start[i] * width, (size_t)(p[i].n * width) * sizeof *f);
    free(f);
    return 0;
}
/* All sequences, whole, without a state. */
static int net_whole(struct net *t) {
    struct piece p[COUNT(shapes[0].lens)];
    for (int64_t i = 0; i < t->n; i++) p[i] = (struct piece){i, 0, t->start[i + 1] - t->start[i], -1};
    const int rc = net_run(t, p, t->n, NULL);
    run_free_blocks(&t->r);
    return rc;
}

/* Rows [lo, hi) of a sequence have the bits of `want`, and are not all alike. */
static void same_rows(const struct net *t, const float *want, int64_t seq, int64_t lo, int64_t hi, const char *what) {
    const int64_t width = t->r.s->hq * t->r.s->k, from = (t->start[seq] + lo) * width;
    const int64_t count = (hi - lo) * width, at = first_diff(t->out + from, want + from, count);
    if (at >= 0)
        fail_msg("%s %s: sequence %lld, row %lld, column %lld: %.9g, alone %.9g", what, dtype_name(t->r.act), (long long)seq,
                 (long long)(lo + at / width), (long long)(at % width), (double)t->out[from + at], (double)want[from + at]);
    assert_true(count == 0 || (isfinite(want[from]) && want[from] != want[from + 1]));
}

/* Rows [0, n), or all, n < 0. */
static void same(const struct net *t, const float *want, int64_t seq, int64_t n, const char *what) {
    same_rows(t, want, seq, 0, n < 0 ? t->start[seq + 1] - t->start[seq] : n, what);
}

static void check_rows(struct net *t, const float *want, const char *backend) {
    struct piece p[COUNT(shapes[0].lens)];
    int64_t bad[COUNT(shapes[0].lens)];
    for (int64_t i = 0; i < t->n; i++) { /* later rows are NaN, and sequences stand in another order */
        const int64_t len = t->start[i + 1] - t->start[i];
        bad[i] = len * 2 / 3;
        p[t->n - 1 - i] = (struct piece){i, 0, len, -1};
    }
    assert_int_equal(net_run(t, p, t->n, bad), 0);
    for (int64_t i = 0; i < t->n; i++) same(t, want, i, bad[i], backend);
    for (int64_t i = 0; i < t->n; i++) { /* alone */
        assert_int_equal(net_run(t, &(struct piece){i, 0, t->start[i + 1] - t->start[i], -1}, 1, NULL), 0);
        same(t, want, i, -1, backend);
        run_free_blocks(&t->r);
    }
}

/* Sequences that come in pieces of the sizes in `step`, each from its own place in that list. `again`: after all, the first one
 * once more, in a slot that another one had. */
static void check_pieces(struct net *t, const float *want, const char *backend, const int64_t *step, int64_t n_steps) {
    int64_t done[COUNT(shapes[0].lens)] = {0}, turn = 0;
    net_state(t, 0);
    const int keep = t->r.n_block;
    for (bool any = true; any; turn++) {
        struct piece p[COUNT(shapes[0].lens)];
        int64_t n = 0;
        for (int64_t i = 0; i < t->n; i++) {
            const int64_t left = t->start[i + 1] - t->start[i] - done[i], size = step[(turn + i) % n_steps];
            if (left > 0) p[n++] = (struct piece){i, done[i], size < left ? size : left, (i * 2 + 1) % SLOTS};
        }
        any = n > 0;
        if (!any) break;
        assert_int_equal(net_run(t, p, n, NULL), 0);
        for (int64_t i = 0; i < n; i++) done[p[i].seq] += p[i].n;
        while (t->r.n_block > keep) {
            t->r.n_block--;
            dev_free(t->r.d, t->r.block[t->r.n_block].p, t->r.block[t->r.n_block].bytes);
        }
    }
    for (int64_t i = 0; i < t->n; i++) same(t, want, i, -1, backend);
    const int64_t len = t->start[1];
    assert_int_equal(net_run(t, &(struct piece){0, 0, len, (t->n > 1 ? 3 : 1) % SLOTS}, 1, NULL), 0);
    same(t, want, 0, -1, backend);
    run_free_blocks(&t->r);
}

/* Of `n` rows from `from` on, how many can be taken back: none of a chunk that they make whole, but for the first row. */
static int64_t rows_back(int64_t from, int64_t n) {
    const int64_t whole = (from + n) / DEV_DELTA_CHUNK * DEV_DELTA_CHUNK, keep = whole > from ? whole - from : 1;
    return n - keep;
}

/* Pieces whose last rows are NaN, and are taken back. */
static void check_taken_back(struct net *t, const float *want, const char *backend) {
    static const int64_t step[] = {4, 1, 9, 2, 3};
    int64_t done[COUNT(shapes[0].lens)] = {0}, turn = 0, back_rows = 0;
    net_state(t, TAKEN_BACK);
    const int keep = t->r.n_block;
    for (bool any = true; any; turn++) {
        struct piece p[COUNT(shapes[0].lens)];
        int64_t bad[COUNT(shapes[0].lens)], n = 0;
        for (int64_t i = 0; i < t->n; i++) {
            const int64_t left = t->start[i + 1] - t->start[i] - done[i], size = step[(turn + i) % COUNT(step)];
            if (left <= 0) continue;
            p[n] = (struct piece){i, done[i], size < left ? size : left, (i * 2 + 1) % SLOTS};
            const int64_t back = rows_back(p[n].from, p[n].n) * (turn % 3) / 2;
            bad[i] = done[i] += p[n++].n - back;
            back_rows += back;
        }
        any = n > 0;
        if (!any) break;
        assert_int_equal(net_run(t, p, n, bad), 0);
        for (int64_t i = 0; i < n; i++) same_rows(t, want, p[i].seq, p[i].from, bad[p[i].seq], backend);
        while (t->r.n_block > keep) {
            t->r.n_block--;
            dev_free(t->r.d, t->r.block[t->r.n_block].p, t->r.block[t->r.n_block].bytes);
        }
    }
    assert_true(back_rows > turn);
    run_free_blocks(&t->r);
}

static void check_backend(struct backends *b, int i, const struct op_shape *s, enum dtype act) {
    static const int64_t one_row[] = {1}, mixed[] = {1, 3, 17, 64, 5, 1, 1, 90}, chunk[] = {64}, odd[] = {33, 1};
    const int64_t width = s->hq * s->k;
    struct net t;
    net_open(&t, s, act, &b->dev[i]);
    if (net_whole(&t) < 0) fail_msg("%s: %s", b->name[i], err_msg());
    float *want = xmalloc((size_t)(s->rows * width) * sizeof *want);
    memcpy(want, t.out, (size_t)(s->rows * width) * sizeof *want);
    check_rows(&t, want, b->name[i]);
    check_pieces(&t, want, b->name[i], mixed, COUNT(mixed));
    check_pieces(&t, want, b->name[i], chunk, COUNT(chunk));
    check_pieces(&t, want, b->name[i], odd, COUNT(odd));
    check_pieces(&t, want, b->name[i], one_row, COUNT(one_row));
    check_taken_back(&t, want, b->name[i]);
    free(want);
    net_close(&t);
}

static void test_bits(void **state) {
    (void)state;
    for (int i = 0; i < two.n; i++)
        for (int64_t s = 0; s < COUNT(shapes); s++) {
            if (i == 0 && s == 1) continue; /* ref takes seconds at this size, and goes row by row anyhow */
            check_backend(&two, i, &shapes[s], DT_F32);
            check_backend(&two, i, &shapes[s], DT_BF16);
        }
}

/* ---- rows that the kernel in front makes ---- */

static void kernel_in_front(void *of, bool ended) {
    const struct made *const x = of;
    for (int i = 0; i < 2; i++)
        if (ended) memcpy(x->at[i], x->copy[i], x->bytes[i]);
        else memset(x->at[i], 0xff, x->bytes[i]);
}
/* Rows after 75 of a sequence whose heads and gates are NaN until the kernel in front has ended have their bits; what is read
 * before that are states of the first row alone: of one row as much as of three. */
static void test_in_front(void **state) {
    (void)state;
    if (!threads_in_front) return;
    for (int i = 1; i < two.n; i++) {
        struct net t;
        int64_t copies[2];
        net_open(&t, &shapes[0], DT_BF16, &two.dev[i]);
        assert_int_equal(net_whole(&t), 0);
        float *const want = xmalloc((size_t)(shapes[0].rows * shapes[0].hq * shapes[0].k) * sizeof *want);
        memcpy(want, t.out, (size_t)(shapes[0].rows * shapes[0].hq * shapes[0].k) * sizeof *want);
        net_state(&t, 3);
        assert_int_equal(net_run(&t, &(struct piece){2, 0, 75, 1}, 1, NULL), 0);
        for (int k = 0; k < 2; k++) {
            t.in_front = kernel_in_front;
            assert_int_equal(net_run(&t, &(struct piece){2, 75, k ? 3 : 1, 1}, 1, NULL), 0);
            copies[k] = t.early;
            t.in_front = NULL;
            same_rows(&t, want, 2, 75, k ? 78 : 76, two.name[i]);
        }
        assert_int_equal(copies[0], copies[1]);
        assert_true(copies[0] > 0);
        free(want);
        net_close(&t);
    }
}

static void test_threads(void **state) {
    (void)state;
    for (int i = 1; i < two.n; i++) {
        struct net a, b;
        net_open(&a, &shapes[0], DT_F32, &two.dev[i]);
        net_open(&b, &shapes[0], DT_F32, &one.dev[i]);
        assert_int_equal(net_whole(&a), 0);
        assert_int_equal(net_whole(&b), 0);
        for (int64_t s = 0; s < a.n; s++) same(&a, b.out, s, -1, two.name[i]);
        net_close(&a);
        net_close(&b);
    }
}

/* What does not fit is refused by name. */
static void test_misfits(void **state) {
    static float f[4096];
    static int32_t ids[4];
    struct dev *d = &two.dev[0];
    const struct tensor i1 = tensor_1d(ids, DT_I32, 1), i2 = tensor_1d(ids, DT_I32, 2), x = tensor_2d(f, DT_F32, 2, 48);
    const struct row_seqs q = {.n = 1, .start = i2, .pos0 = i1}, slots = {.n = 1, .start = i2, .pos0 = i1, .slot = i1};
    struct causal_conv_args conv = {.seqs = q, .x = x, .w = tensor_2d(f, DT_F32, 48, 4), .y = x};
    struct delta_args a = {.n_k_heads = 1, .n_v_heads = 1, .k_dim = 16, .v_dim = 16, .seqs = slots, .qkv = x};
    a.ba = tensor_2d(f, DT_F32, 2, 2);
    a.a_log = a.dt_bias = tensor_1d(f, DT_F32, 1);
    a.out = tensor_2d(f, DT_F32, 2, 16);
    (void)state;
#define REFUSED(call, text)              \
    assert_int_equal((call), ERR_INVAL); \
    assert_non_null(strstr(err_msg(), text))
    REFUSED(dev_causal_conv_fwd(d, &conv), "y is x");
    conv.w = tensor_2d(f, DT_F32, 48, 3);
    REFUSED(dev_causal_conv_fwd(d, &conv), "w is f32");
    conv.w = tensor_2d(f, DT_F32, 48, 4), conv.x_at = 1;
    REFUSED(dev_causal_conv_fwd(d, &conv), "48 columns of x from 1 on; it has 48");
    REFUSED(dev_delta_fwd(d, &a), "slots without a state");
    a.k_dim = 24;
    REFUSED(dev_delta_fwd(d, &a), "multiples of 16 up to 128");
    a.k_dim = 16, a.seqs = q;
    REFUSED(dev_delta_bwd(d, &a, &(struct delta_bwd_args){0}), "states is");
    a.ba_at = 1;
    REFUSED(dev_delta_bwd(d, &a, &(struct delta_bwd_args){0}), "2 columns of ba from 1 on; it has 2");
    const struct gated_norm_args norm = {.x = tensor_2d(f, DT_F32, 3, 16), .z = x, .w = tensor_1d(f, DT_F32, 16)};
    REFUSED(dev_gated_norm_fwd(d, &norm), "3 rows of x, 2 of z");
    REFUSED(dev_output_gate_fwd(d, x, x, a.out), "gate is f32");
#undef REFUSED
}

int main(void) {
    const struct CMUnitTest tests[] = {cmocka_unit_test(test_bits), cmocka_unit_test(test_in_front), cmocka_unit_test(test_threads),
                                       cmocka_unit_test(test_misfits)};
    backends_open(&two, 2);
    backends_open(&one, 1);
    const int failed = cmocka_run_group_tests_name("ops: convolution and delta rule from a state", tests, NULL, NULL);
    backends_close(&two);
    backends_close(&one);
    return failed;
}
