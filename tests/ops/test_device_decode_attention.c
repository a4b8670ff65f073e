/* test_device_decode_attention.c - dev_qkv_attn_fwd is bitwise dev_qkv_fwd and dev_attn_fwd: in the output and in
 * the whole KV cache, also where nobody may write.  Batches are decoding steps: one new row of each sequence,
 * some without one, some at their first key, neighbours that share KV blocks; and the same where each has its own
 * copy of these, which changes no bit of the output.
 * Agreement of the two ops with ref is test_device_ops'. */
#include "ops/ops_test.h"

static struct backends all;

enum { BLOCK_LEN = 16, MAX_SEQS = 170, TABLE_BLOCKS = 48, ROPE = TABLE_BLOCKS * BLOCK_LEN, NO_ROW = -1 };
enum {
    SHARED_BLOCKS = 32,
    FAMILY = 5,
    OTHERS = 10
}; /* the first sequences share so many KV blocks; then OTHERS of chosen lengths */
static const int32_t chosen[OTHERS] = {0, 15, 16, 63, 64, 129, NO_ROW, 199, 383, 384};

struct batch {
    int64_t n, hq, hk, dim, window; /* n: sequences */
    bool q_norm, k_norm, lse;
};
/* More sequences than a GPU takes blocks at a time, so that a block has several of them, or several units of them, or waits for its
 * turn; groups of 1 to 18 heads. */
static const struct batch batches[] = {
    {150, 14, 2, 64, 0, false, false, false}, {40, 16, 8, 128, 0, true, true, false},  {150, 56, 8, 64, 0, false, false, true},
    {150, 16, 8, 128, 0, true, true, true},   {170, 128, 8, 64, 0, true, true, false}, {15, 14, 2, 64, 0, true, true, true},
    {40, 8, 8, 64, 0, false, true, true},     {15, 16, 1, 128, 0, true, false, true},  {40, 16, 8, 128, 70, true, true, true},
    {15, 2, 1, 64, 100, false, false, true},  {15, 18, 1, 32, 0, true, true, true},    {15, 2, 2, 80, 0, false, false, true},
    {15, 2, 1, 18, 40, true, true, true},     {40, 15, 5, 128, 0, false, false, true}, {40, 8, 2, 256, 0, true, true, true},
    {150, 32, 8, 256, 0, true, true, true},   {15, 16, 1, 256, 70, false, true, true},
};
static const struct batch slow[] = {
    {12, 8, 2, 256, 0, true, true, true}, {9, 2, 1, 256, 70, false, true, true}, {12, 4, 2, 128, 0, true, false, true}};
static bool slowly; /* the device is one of test_device_ops_threads' kind, a CPU that runs a GPU's kernels in bf16 */
/* Minutes under a sanitizer, and to a CPU nothing new. */
static bool for_gpus(const struct batch *b) { return b->n * b->hq > 2200; }

struct scene {
    const struct batch *b;
    enum dtype act;
    int64_t rows, n_kv_blocks;
    int32_t pos0[MAX_SEQS], q_start[MAX_SEQS + 1], block_table[MAX_SEQS][TABLE_BLOCKS], pos[MAX_SEQS], slots[MAX_SEQS];
    float *k, *v, *rope; /* the KV cache (n_kv_blocks, hk, BLOCK_LEN, dim): NaN where there is no key yet */
};

/* Position of sequence i's new row. */
static int32_t position(int64_t i) {
    if (i < FAMILY) return SHARED_BLOCKS * BLOCK_LEN + (int32_t)(i * 37);
    return i < FAMILY + OTHERS ? chosen[i - FAMILY] : (int32_t)(i * 37 % 150);
}

static bool shares(int64_t i, int64_t p) { return i > 0 && i < FAMILY && p < SHARED_BLOCKS; }

static float *old_keys(const struct scene *s, uint64_t seed) {
    enum { DRAWN = 1021 };
    const int64_t hk = s->b->hk, dim = s->b->dim, count = s->n_kv_blocks * hk * BLOCK_LEN * dim;
    const float *drawn = normals(seed, DRAWN * dim);
    float *f = xmalloc((size_t)count * sizeof *f);
    memset(f, 0xff, (size_t)count * sizeof *f);
    for (int64_t i = 0; i < s->b->n; i++)
        for (int64_t j = 0; j < s->pos0[i]; j++)
            for (int64_t h = 0; h < hk; h++) {
                const int64_t at = ((s->block_table[i][j / BLOCK_LEN] * hk + h) * BLOCK_LEN + j % BLOCK_LEN) * dim;
                const int64_t of = ((shares(i, j / BLOCK_LEN) ? 0 : i) * ROPE + j) * hk + h;
                for (int64_t c = 0; c < dim; c++) f[at + c] = drawn[of % DRAWN * dim + c] * 1.5f;
            }
    return f;
}

static void scene_init(struct scene *s, const struct batch *b, enum dtype act, bool share) {
    struct rng rng = {.seed = 9, .stream = RNG_TEST};
    int64_t next = 0;
    *s = (struct scene){.b = b, .act = act};
    for (int64_t i = 0; i < b->n; i++) {
        const int32_t at = position(i);
        s->pos0[i] = at == NO_ROW ? 20 : at;
        s->q_start[i + 1] = s->q_start[i] + (at != NO_ROW);
        for (int64_t p = 0; p * BLOCK_LEN <= s->pos0[i]; p++)
            s->block_table[i][p] = share && shares(i, p) ? s->block_table[0][p] : (int32_t)next++;
    }
    s->rows = s->q_start[b->n];
    s->n_kv_blocks = next + 2;
    int64_t *order = xcalloc((size_t)s->n_kv_blocks, sizeof *order);
    for (int64_t i = 0; i < s->n_kv_blocks; i++) order[i] = i;
    rng_shuffle(&rng, order, s->n_kv_blocks);
    for (int64_t i = 0; i < b->n; i++) {
        for (int64_t p = 0; p * BLOCK_LEN <= s->pos0[i]; p++) s->block_table[i][p] = (int32_t)order[s->block_table[i][p]];
        const int32_t at = s->pos0[i], row = s->q_start[i];
        if (row == s->q_start[i + 1]) continue;
        s->pos[row] = at;
        s->slots[row] = s->block_table[i][at / BLOCK_LEN] * BLOCK_LEN + at % BLOCK_LEN;
    }
    free(order);
    s->k = old_keys(s, 2);
    s->v = old_keys(s, 3);
    s->rope = xcalloc((size_t)(ROPE * b->dim), sizeof *s->rope);
    for (int64_t p = 0; p < ROPE; p++)
        for (int64_t i = 0; i < b->dim / 2; i++) {
            const double angle = (double)p * pow(10000, -2.0 * (double)i / (double)b->dim);
            s->rope[p * b->dim + 2 * i] = (float)cos(angle);
            s->rope[p * b->dim + 2 * i + 1] = (float)sin(angle);
        }
}
static void scene_free(struct scene *s) {
    free(s->k);
    free(s->v);
    free(s->rope);
}

enum { OUT, LSE, KEYS, VALUES, N_RESULTS };
static const char *const result_name[N_RESULTS] = {"out", "lse", "keys", "values"};
struct results {
    float *f[N_RESULTS];
    int64_t n[N_RESULTS];
};

static struct tensor up_drawn(struct run *r, struct tensor shape, uint64_t seed, float scale, float mean) {
    const int64_t n = tensor_count(shape);
    const float *drawn = normals(seed, n);
    float *f = xcalloc((size_t)n, sizeof *f);
    for (int64_t i = 0; i < n; i++) f[i] = drawn[i] * scale + mean;
    const struct tensor t = up_values(r, shape, false, f, NULL);
    free(f);
    return t;
}

/* fused: by the one op; else by the two. */
static int attend(struct dev *d, const struct scene *s, bool fused, struct results *to) {
    const struct batch *b = s->b;
    struct run r = {.d = d, .act = s->act};
    const struct tensor cache = shape_4d(s->act, s->n_kv_blocks, b->hk, BLOCK_LEN, b->dim);
    struct tensor rope = {NULL, DT_F32, 3, {ROPE, b->dim / 2, 2, 1}};
    rope = up_values(&r, rope, false, s->rope, NULL);
    struct qkv_args q = {.n_q_heads = b->hq, .n_kv_heads = b->hk, .head_dim = b->dim, .eps = 1e-6f, .rope = rope};
    q.qkv = up_drawn(&r, shape_2d(s->act, s->rows, (b->hq + 2 * b->hk) * b->dim), 1, 1.5f, 0);
    if (b->q_norm) q.q_norm = up_drawn(&r, shape_1d(s->act, b->dim), 4, 0.2f, 1);
    if (b->k_norm) q.k_norm = up_drawn(&r, shape_1d(s->act, b->dim), 5, 0.2f, 1);
    q.pos = up_i32(&r, shape_1d(DT_I32, s->rows), s->pos);
    q.slots = up_i32(&r, shape_1d(DT_I32, s->rows), s->slots);
    q.q = dev_new(&r, shape_2d(s->act, s->rows, b->hq * b->dim), false);
    q.kv = (struct kv){up_values(&r, cache, false, s->k, NULL), up_values(&r, cache, false, s->v, NULL)};
    struct attn_args a = {.n_q_heads = b->hq,
                          .n_kv_heads = b->hk,
                          .head_dim = b->dim,
                          .window = b->window,
                          .scale = 1.0f / sqrtf((float)b->dim),
                          .q = q.q,
                          .kv = q.kv,
                          .seqs = {.n = b->n, .max_q = 1, .max_kv = ROPE}};
    a.seqs.q_start = up_i32(&r, shape_1d(DT_I32, b->n + 1), s->q_start);
    a.seqs.pos0 = up_i32(&r, shape_1d(DT_I32, b->n), s->pos0);
    a.seqs.block_table = up_i32(&r, shape_2d(DT_I32, b->n, TABLE_BLOCKS), s->block_table[0]);
    a.out = dev_new(&r, q.q, false);
    if (b->lse) a.lse = dev_new(&r, shape_2d(DT_F32, s->rows, b->hq), false);
    int rc = fused ? dev_qkv_attn_fwd(d, &q, &a) : dev_qkv_fwd(d, &q);
    if (rc == 0 && !fused) rc = dev_attn_fwd(d, &a);
    const struct tensor got[N_RESULTS] = {a.out, a.lse, q.kv.k, q.kv.v};
    *to = (struct results){0};
    for (int i = 0; i < N_RESULTS && rc == 0; i++)
        if (got[i].data) to->f[i] = down_values(&r, got[i]), to->n[i] = tensor_count(got[i]);
    run_free_blocks(&r);
    return rc;
}
static void results_free(struct results *x) {
    for (int i = 0; i < N_RESULTS; i++) free(x->f[i]);
}

/* False: the backend lacks an op. */
static bool check(int backend, const struct batch *b, enum dtype act) {
    struct scene s, own;
    struct results two, one, alone;
    struct dev *d = &all.dev[backend];
    const char *name = all.name[backend];
    scene_init(&s, b, act, true);
    const int rc = attend(d, &s, false, &two);
    if (rc < 0 && rc != ERR_UNSUPPORTED) fail_msg("%s: %s", name, err_msg());
    if (rc == 0) {
        scene_init(&own, b, act, false);
        if (attend(d, &s, true, &one) < 0 || attend(d, &own, false, &alone) < 0) fail_msg("%s: %s", name, err_msg());
        scene_free(&own);
        for (int64_t i = 0; i < two.n[OUT]; i++)
            if (!isfinite(two.f[OUT][i])) fail_msg("%s: result %lld of the two ops is not finite", name, (long long)i);
        for (int i = 0; i < N_RESULTS; i++) {
            const int64_t at = two.f[i] ? first_diff(one.f[i], two.f[i], two.n[i]) : -1;
            if (at >= 0)
                fail_msg("%s %s, %lld sequences, %lld/%lld heads of %lld, window %lld: element %lld of %s differs: %.9g, %.9g",
                         name, dtype_name(act), (long long)b->n, (long long)b->hq, (long long)b->hk, (long long)b->dim,
                         (long long)b->window, (long long)at, result_name[i], (double)one.f[i][at], (double)two.f[i][at]);
        }
        for (int i = OUT; i <= LSE; i++)
            if (two.f[i] && first_diff(alone.f[i], two.f[i], two.n[i]) >= 0)
                fail_msg("%s %s, %lld sequences, %lld/%lld heads of %lld: %s differs where KV blocks are shared", name,
                         dtype_name(act), (long long)b->n, (long long)b->hq, (long long)b->hk, (long long)b->dim, result_name[i]);
        results_free(&one);
        results_free(&alone);
    }
    results_free(&two);
    scene_free(&s);
    return rc == 0;
}

static void test_one_is_two(void **state) {
    (void)state;
    const struct batch *const of = slowly ? slow : batches;
    for (int i = slowly; i < all.n; i++) {
        const bool gpu = strcmp(all.name[i], "cuda") == 0;
        bool have = true;
        int n = 0;
        for (int64_t k = 0; k < cases_of(slowly ? COUNT(slow) : COUNT(batches), 4) && have; k++)
            if (gpu || !for_gpus(&of[k])) have = (slowly || check(i, &of[k], DT_F32)) && check(i, &of[k], DT_BF16), n++;
        if (!have) report_skip(all.name[i], "attention of new rows");
        else print_message("%-15s %d batches x %sbf16: 0 differing bits\n", all.name[i], n, slowly ? "" : "f32, ");
    }
}

int main(int argc, char **argv) {
    const struct CMUnitTest tests[] = {{"qkv_attn_is_qkv_then_attn", test_one_is_two, NULL, NULL, NULL}};
    slowly = argc > 1 && strcmp(argv[1], "slow") == 0;
    backends_open(&all, 2);
    const int failed = cmocka_run_group_tests_name("ops: attention of new rows", tests, NULL, NULL);
    backends_close(&all);
    return failed;
}
