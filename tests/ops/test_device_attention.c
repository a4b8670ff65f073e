/* test_device_attention.c - attention does not see where keys are stored or how the
 * queries arrive: packed training rows, a paged KV cache in any order, prefill at once or
 * in chunks, and decode steps of several sequences together give equal bits.
 * Agreement with ref and gradients are test_device_ops' and test_device_grad's. */
#include "ops/ops_test.h"

static struct backends two, one; /* threads */

enum { N_SEQS = 5, BLOCK_LEN = 16, MAX_CALL = 512 };
static const int64_t seq_len[N_SEQS] = {1, 17, 64, 130, 200};

struct geometry {
    int64_t hq, hk, dim, window;
    bool latent; /* values are the keys */
    float softcap;
};
static const struct geometry geometries[] = {
    {1, 1, 16, 0, false, 0},   {2, 1, 32, 0, false, 0},      {14, 2, 64, 0, false, 0},   {2, 2, 80, 0, false, 0},
    {2, 1, 128, 0, false, 0},  {2, 1, 64, 1, false, 0},      {4, 2, 64, 50, false, 0},   {7, 1, 32, 64, false, 0},
    {2, 1, 64, 100, false, 0}, {8, 2, 128, 70, false, 0},    {2, 2, 128, 0, false, 0},   {18, 1, 32, 0, false, 0},
    {4, 2, 96, 64, false, 0},  {2, 1, 192, 0, false, 0},     {2, 1, 256, 100, false, 0}, {2, 1, 18, 40, false, 0},
    {8, 2, 256, 0, false, 0},  {4, 2, 256, 70, false, 1.5f},
};
static const struct geometry latent[] = {
    {3, 1, 576, 0, true, 0}, {5, 1, 264, 50, true, 0}, {17, 1, 264, 50, true, 0}, {2, 1, 64, 0, true, 0}};
static const struct geometry slow[] = {{14, 2, 64, 0, false, 0}, {2, 1, 256, 100, false, 0}, {8, 2, 256, 0, false, 0}};
static bool slowly; /* the device is one of test_device_ops_threads' kind, a CPU that runs a GPU's kernels in bf16 */
/* Whether that GPU is a Hopper; another has less shared memory and fewer kernels, for which fewer geometries do. */
static bool hopper(void) {
    const char *const kib = getenv("SMEM_KIB");
    return !kib || atoi(kib) >= 227;
}

/* Rows [lo, hi) of sequence seq, which see keys [0, hi). */
struct piece {
    int64_t seq, lo, hi;
};

/* K and V of all sequences, once packed and once in shuffled KV blocks, and their queries. */
struct scene {
    const struct geometry *g;
    enum dtype act;
    int64_t start[N_SEQS + 1];       /* first packed row of each sequence */
    int32_t block_table[N_SEQS][16]; /* KV block of each 16 keys */
    int64_t n_kv_blocks;
    float *q, *k, *v; /* (rows, Hq*D), (rows, Hk*D) twice */
    bool shared_new_keys;
    struct kv packed, paged; /* on the device, while all_rows runs */
};

static float *wide_normals(int64_t n, uint64_t seed) {
    const float *drawn = normals(seed, n);
    float *f = xcalloc((size_t)n, sizeof *f);
    for (int64_t i = 0; i < n; i++) f[i] = drawn[i] * 1.5f;
    return f;
}

static void scene_init(struct scene *s, const struct geometry *g, enum dtype act) {
    struct rng rng = {.seed = 9, .stream = RNG_TEST};
    *s = (struct scene){.g = g, .act = act, .n_kv_blocks = 3}; /* 3 that nobody owns */
    for (int i = 0; i < N_SEQS; i++) {
        s->start[i + 1] = s->start[i] + seq_len[i];
        s->n_kv_blocks += (seq_len[i] + BLOCK_LEN - 1) / BLOCK_LEN;
    }
    int64_t *order = xcalloc((size_t)s->n_kv_blocks, sizeof *order), next = 0;
    for (int64_t i = 0; i < s->n_kv_blocks; i++) order[i] = i;
    rng_shuffle(&rng, order, s->n_kv_blocks);
    for (int i = 0; i < N_SEQS; i++)
        for (int64_t p = 0; p * BLOCK_LEN < seq_len[i]; p++) s->block_table[i][p] = (int32_t)order[next++];
    free(order);
    const int64_t rows = s->start[N_SEQS];
    s->q = wide_normals(rows * g->hq * g->dim, 1);
    s->k = wide_normals(rows * g->hk * g->dim, 2);
    s->v = wide_normals(rows * g->hk * g->dim, 3);
}
static void scene_free(struct scene *s) {
    free(s->q);
    free(s->k);
    free(s->v);
}

/* Rows (Hk*D each) into (n_kv_blocks, Hk, block_len, D); what no key owns stays NaN. */
static struct tensor up_keys(struct run *r, const struct scene *s, const float *rows, bool paged) {
    const int64_t hk = s->g->hk, dim = s->g->dim, total = s->start[N_SEQS];
    const struct tensor shape = shape_4d(s->act, paged ? s->n_kv_blocks : 1, hk, paged ? BLOCK_LEN : total, dim);
    const int64_t len = shape.dim[2];
    float *f = xcalloc((size_t)tensor_count(shape), sizeof *f);
    for (int64_t i = 0; i < tensor_count(shape); i++) f[i] = NAN;
    for (int i = 0; i < N_SEQS; i++)
        for (int64_t j = 0; j < seq_len[i]; j++) {
            const int64_t kv_block = paged ? s->block_table[i][j / BLOCK_LEN] : 0, at = paged ? j % BLOCK_LEN : s->start[i] + j;
            for (int64_t h = 0; h < hk; h++)
                memcpy(f + ((kv_block * hk + h) * len + at) * dim, rows + ((s->start[i] + j) * hk + h) * dim,
                       (size_t)dim * sizeof *f);
        }
    const struct tensor t = up_values(r, shape, false, f, NULL);
    free(f);
    return t;
}

/* One attention call over these pieces; the results go to their packed rows of out and lse. */
static int attend(struct dev *d, const struct scene *s, bool paged, const struct piece *piece, int64_t n, float *out, float *lse) {
    const struct geometry *g = s->g;
    const int64_t width = g->hq * g->dim;
    struct run r = {.d = d, .act = s->act};
    int32_t q_start[MAX_CALL + 1] = {0}, pos0[MAX_CALL], kv_start[MAX_CALL], block_table[MAX_CALL][16];
    struct attn_args a = {.n_q_heads = g->hq,
                          .n_kv_heads = g->hk,
                          .head_dim = g->dim,
                          .window = g->window,
                          .softcap = g->softcap,
                          .scale = 1.0f / sqrtf((float)g->dim),
                          .seqs.n = n};
    CHECK(n <= MAX_CALL);
    for (int64_t i = 0; i < n; i++) {
        const struct piece *p = &piece[i];
        q_start[i + 1] = q_start[i] + (int32_t)(p->hi - p->lo);
        pos0[i] = (int32_t)p->lo;
        kv_start[i] = (int32_t)s->start[p->seq];
        memcpy(block_table[i], s->block_table[p->seq], sizeof block_table[i]);
        if (p->hi - p->lo > a.seqs.max_q) a.seqs.max_q = p->hi - p->lo;
        if (p->hi > a.seqs.max_kv) a.seqs.max_kv = p->hi;
    }
    const int64_t rows = q_start[n];
    float *q = xcalloc((size_t)(rows * width), sizeof *q);
    for (int64_t i = 0; i < n; i++)
        memcpy(q + q_start[i] * width, s->q + (s->start[piece[i].seq] + piece[i].lo) * width,
               (size_t)((piece[i].hi - piece[i].lo) * width) * sizeof *q);
    a.q = up_values(&r, shape_2d(s->act, rows, width), false, q, NULL);
    free(q);
    a.kv = paged ? s->paged : s->packed;
    a.seqs.shared_new_keys = s->shared_new_keys;
    a.out = dev_new(&r, shape_2d(s->act, rows, width), false);
    a.lse = dev_new(&r, shape_2d(DT_F32, rows, g->hq), false);
    a.seqs.q_start = up_i32(&r, shape_1d(DT_I32, n + 1), q_start);
    a.seqs.pos0 = up_i32(&r, shape_1d(DT_I32, n), pos0);
    if (paged) a.seqs.block_table = up_i32(&r, shape_2d(DT_I32, n, 16), block_table[0]);
    else a.seqs.kv_start = up_i32(&r, shape_1d(DT_I32, n), kv_start);
    const int rc = dev_attn_fwd(d, &a);
    if (rc == 0) {
        float *o = down_values(&r, a.out), *l = down_values(&r, a.lse);
        for (int64_t i = 0; i < n; i++) {
            const int64_t to = s->start[piece[i].seq] + piece[i].lo, m = piece[i].hi - piece[i].lo;
            memcpy(out + to * width, o + q_start[i] * width, (size_t)(m * width) * sizeof *o);
            memcpy(lse + to * g->hq, l + q_start[i] * g->hq, (size_t)(m * g->hq) * sizeof *l);
        }
        free(o);
        free(l);
    }
    run_free_blocks(&r);
    return rc;
}

/* ---- ways to compute all rows; each call of a way fills some of them ---- */

static int packed(struct dev *d, const struct scene *s, float *out, float *lse) {
    struct piece p[N_SEQS];
    for (int i = 0; i < N_SEQS; i++) p[i] = (struct piece){i, 0, seq_len[i]};
    return attend(d, s, false, p, N_SEQS, out, lse);
}
static int paged_reversed(struct dev *d, const struct scene *s, float *out, float *lse) {
    struct piece p[N_SEQS];
    for (int i = 0; i < N_SEQS; i++) p[i] = (struct piece){N_SEQS - 1 - i, 0, seq_len[N_SEQS - 1 - i]};
    return attend(d, s, true, p, N_SEQS, out, lse);
}
static int alone(struct dev *d, const struct scene *s, float *out, float *lse) {
    for (int i = 0; i < 2 * N_SEQS; i++) /* packed first, then over it from a paged KV cache */
        TRY(attend(d, s, i >= N_SEQS, &(struct piece){i % N_SEQS, 0, seq_len[i % N_SEQS]}, 1, out, lse));
    return 0;
}
/* Prefill in chunks, the sequences side by side. */
static int chunks_of(struct dev *d, const struct scene *s, int64_t size, float *out, float *lse) {
    for (int64_t lo = 0; lo < 200; lo += size) {
        struct piece p[N_SEQS];
        int64_t n = 0;
        for (int i = 0; i < N_SEQS; i++)
            if (lo < seq_len[i]) p[n++] = (struct piece){i, lo, lo + size < seq_len[i] ? lo + size : seq_len[i]};
        TRY(attend(d, s, true, p, n, out, lse));
    }
    return 0;
}
static int chunks_16(struct dev *d, const struct scene *s, float *out, float *lse) { return chunks_of(d, s, 16, out, lse); }
static int chunks_7(struct dev *d, const struct scene *s, float *out, float *lse) { return chunks_of(d, s, 7, out, lse); }
static int chunks_64(struct dev *d, const struct scene *s, float *out, float *lse) { return chunks_of(d, s, 64, out, lse); }
static int chunks_100(struct dev *d, const struct scene *s, float *out, float *lse) { return chunks_of(d, s, 100, out, lse); }
static int chunks_45(struct dev *d, const struct scene *s, float *out, float *lse) { return chunks_of(d, s, 45, out, lse); }
/* One row of each sequence per call, as in decoding. */
static int decode(struct dev *d, const struct scene *s, float *out, float *lse) { return chunks_of(d, s, 1, out, lse); }
/* Every row of every sequence as a sequence of its own, in one call: many blocks, of unlike lengths. */
static int decode_all(struct dev *d, const struct scene *s, float *out, float *lse) {
    struct piece p[MAX_CALL];
    int64_t n = 0;
    if (slowly) TRY(packed(d, s, out, lse)); /* then over it one row of some, at the edges of tiles too */
    for (int i = 0; i < N_SEQS; i++)
        for (int64_t t = 0; t < seq_len[i]; t++)
            if (!slowly || t % 15 == 0 || t + 1 == seq_len[i] || t % 64 == 63) p[n++] = (struct piece){i, t, t + 1};
    return attend(d, s, true, p, n, out, lse);
}
/* Decode rows of short sequences in one call with prefill chunks of long ones. */
static int mixed(struct dev *d, const struct scene *s, float *out, float *lse) {
    TRY(attend(d, s, true, (struct piece[]){{4, 0, 100}, {0, 0, 1}, {1, 0, 16}}, 3, out, lse));
    TRY(attend(d, s, true, (struct piece[]){{1, 16, 17}, {4, 100, 199}, {2, 0, 63}, {3, 0, 129}}, 4, out, lse));
    return attend(d, s, true, (struct piece[]){{3, 129, 130}, {2, 63, 64}, {4, 199, 200}}, 3, out, lse);
}

struct way {
    const char *name;
    int (*run)(struct dev *d, const struct scene *s, float *out, float *lse);
};
enum { FEW_WAYS = 4 }; /* the first ones: of ref, under a sanitizer, and where a CPU runs a GPU's kernels */
static const struct way ways[] = {
    {"paged", paged_reversed},
    {"chunks of 7", chunks_7},
    {"decode all at once", decode_all},
    {"mixed", mixed},
    {"alone", alone},
    {"chunks of 16", chunks_16},
    {"chunks of 45", chunks_45},
    {"chunks of 64", chunks_64},
    {"chunks of 100", chunks_100},
    {"decode", decode},
    {"1 thread", packed}, /* on `one` */
};

/* All rows computed by `run` into a fresh (out, lse) pair, NaN where it leaves a row out. */
static int all_rows(int (*run)(struct dev *, const struct scene *, float *, float *), struct dev *d, const struct scene *s,
                    float **out, float **lse) {
    const int64_t rows = s->start[N_SEQS], n_out = rows * s->g->hq * s->g->dim, n_lse = rows * s->g->hq;
    *out = xmalloc((size_t)n_out * sizeof **out);
    *lse = xmalloc((size_t)n_lse * sizeof **lse);
    memset(*out, 0xff, (size_t)n_out * sizeof **out);
    memset(*lse, 0xff, (size_t)n_lse * sizeof **lse);
    struct run keys = {.d = d, .act = s->act};
    struct scene on = *s;
    on.packed.k = on.packed.v = up_keys(&keys, s, s->k, false);
    on.paged.k = on.paged.v = up_keys(&keys, s, s->k, true);
    if (!s->g->latent) {
        on.packed.v = up_keys(&keys, s, s->v, false);
        on.paged.v = up_keys(&keys, s, s->v, true);
    }
    const int rc = run(d, &on, *out, *lse);
    run_free_blocks(&keys);
    return rc;
}

static void same(const char *backend, const struct scene *s, const char *what, const float *got, const float *want, int64_t width) {
    const int64_t n = s->start[N_SEQS] * width, at = first_diff(got, want, n);
    for (int64_t i = 0; i < n; i++)
        if (!isfinite(want[i])) fail_msg("%s: a result of packed rows is not finite", backend);
    if (at >= 0)
        fail_msg("%s %s, %lld/%lld heads of %lld, window %lld, %s: packed row %lld differs: %.9g, %.9g", backend,
                 dtype_name(s->act), (long long)s->g->hq, (long long)s->g->hk, (long long)s->g->dim, (long long)s->g->window, what,
                 (long long)(at / width), (double)got[at], (double)want[at]);
}

/* ref has one loop over rows, and no kernels that a call's shape chooses. */
static int64_t ways_of(int backend) { return SANITIZED || backend == 0 || slowly ? FEW_WAYS : COUNT(ways); }

/* False: no attention on this backend. */
static bool check_ways(int backend, const struct geometry *g, enum dtype act) {
    struct scene s;
    float *want, *want_lse, *got, *lse;
    scene_init(&s, g, act);
    const char *name = two.name[backend];
    const int rc = all_rows(packed, &two.dev[backend], &s, &want, &want_lse);
    if (rc < 0 && rc != ERR_UNSUPPORTED) fail_msg("%s: %s", name, err_msg());
    for (int64_t k = 0; k < ways_of(backend) && rc == 0; k++) {
        const struct way w = ways[k];
        struct dev *d = w.run == packed ? &one.dev[backend] : &two.dev[backend];
        if (all_rows(w.run, d, &s, &got, &lse) < 0) fail_msg("%s %s: %s", name, w.name, err_msg());
        same(name, &s, w.name, got, want, g->hq * g->dim);
        same(name, &s, w.name, lse, want_lse, g->hq);
        free(got);
        free(lse);
    }
    free(want);
    free(want_lse);
    scene_free(&s);
    return rc == 0;
}

static void test_ways(void **state) {
    (void)state;
    const struct geometry *const of = slowly ? slow : geometries;
    const int64_t n = slowly ? (hopper() ? COUNT(slow) : COUNT(slow) - 1) : COUNT(geometries);
    for (int b = slowly; b < two.n; b++) {
        bool have = true;
        for (int64_t i = 0; i < cases_of(n, 2) && have; i++)
            have = (slowly || check_ways(b, &of[i], DT_F32)) && check_ways(b, &of[i], DT_BF16);
        if (!have) report_skip(two.name[b], "attention");
        else
            print_message("%-15s %lld geometries x %sbf16 x %lld ways: 0 differing bits\n", two.name[b], (long long)n,
                          slowly ? "" : "f32, ", (long long)ways_of(b));
    }
}

static void test_latent(void **state) {
    (void)state;
    for (int b = slowly; b < two.n; b++) {
        bool have = true;
        for (int64_t i = slowly && !hopper(); i < (slowly ? 2 : COUNT(latent)) && have; i++)
            have = (slowly || check_ways(b, &latent[i], DT_F32)) && check_ways(b, &latent[i], DT_BF16);
        if (!have) report_skip(two.name[b], "latent attention");
        else print_message("%-15s values that are the keys: 0 differing bits\n", two.name[b]);
    }
}

/* ---- keys that the kernel in front makes ---- */

/* Of tests/ops/cuda_threads, where that is linked. */
__attribute__((weak)) void threads_in_front(void (*hook)(void *of, bool ended), void *of);
__attribute__((weak)) int64_t threads_early_copies(void);

enum { MAX_NEW = 4 };
/* The key and value of each new row, in the paged KV cache: NaN until the kernel in front has ended. */
struct new_keys {
    int64_t n, bytes;
    char *at[MAX_NEW * 8], *made; /* of each row, KV head, K and V */
};
static void kernel_in_front(void *of, bool ended) {
    struct new_keys *const x = of;
    for (int64_t i = 0; i < x->n; i++)
        if (ended) memcpy(x->at[i], x->made + i * x->bytes, (size_t)x->bytes);
        else memset(x->at[i], 0xff, (size_t)x->bytes);
}
static void new_keys_init(struct new_keys *x, const struct scene *s, const struct piece *row, int64_t n) {
    const struct geometry *const g = s->g;
    *x = (struct new_keys){.bytes = g->dim * (int64_t)dtype_size(s->act)};
    for (int64_t i = 0; i < n; i++)
        for (int64_t h = 0; h < g->hk; h++)
            for (int v = 0; v < (g->latent ? 1 : 2); v++) {
                const int64_t kv_block = s->block_table[row[i].seq][row[i].lo / BLOCK_LEN];
                const int64_t at = (kv_block * g->hk + h) * BLOCK_LEN + row[i].lo % BLOCK_LEN;
                x->at[x->n++] = (char *)(v ? s->paged.v.data : s->paged.k.data) + at * x->bytes;
            }
    x->made = xmalloc((size_t)(x->n * x->bytes));
    for (int64_t i = 0; i < x->n; i++) memcpy(x->made + i * x->bytes, x->at[i], (size_t)x->bytes);
}

/* These rows in one call, each a sequence, have the bits that each has alone when all keys are there; no key is read early where
 * rows see each other's, else some are. */
static void check_new_keys(struct dev *d, struct scene *s, const struct piece *row, int64_t n, bool shared) {
    const struct geometry *const g = s->g;
    const int64_t rows = s->start[N_SEQS], width = g->hq * g->dim;
    float *const want = xcalloc((size_t)(2 * rows * (width + g->hq)), sizeof *want), *const got = want + rows * (width + g->hq);
    struct new_keys keys;
    s->shared_new_keys = shared;
    for (int64_t i = 0; i < n; i++) assert_int_equal(attend(d, s, true, &row[i], 1, want, want + rows * width), 0);
    new_keys_init(&keys, s, row, n);
    threads_in_front(kernel_in_front, &keys);
    assert_int_equal(attend(d, s, true, row, n, got, got + rows * width), 0);
    const int64_t early = threads_early_copies();
    threads_in_front(NULL, NULL);
    free(keys.made);
    if (memcmp(want, got, (size_t)(rows * (width + g->hq)) * sizeof *want))
        fail_msg("heads of %lld, %s: a key was read before it was there", (long long)g->dim, shared ? "drafts" : "decoding");
    if (shared ? early > 0 : early == 0 && hopper())
        fail_msg("heads of %lld, %s: %lld copies before the kernel in front has ended", (long long)g->dim,
                 shared ? "drafts" : "decoding", (long long)early);
    free(want);
}

static void test_new_keys(void **state) {
    (void)state;
    static const struct geometry of[] = {
        {14, 2, 64, 0, false, 0}, {8, 2, 128, 0, false, 0}, {8, 2, 256, 0, false, 0}, {3, 1, 576, 0, true, 0}};
    static const struct piece drafts[] = {{3, 62, 63}, {3, 63, 64}, {3, 64, 65}, {3, 65, 66}};
    static const struct piece decoding[] = {{4, 199, 200}, {3, 129, 130}, {2, 63, 64}};
    for (int i = 0; i < COUNT(of); i++) {
        struct scene s;
        scene_init(&s, &of[i], DT_BF16);
        struct run keys = {.d = &two.dev[1], .act = s.act};
        s.paged.k = s.paged.v = up_keys(&keys, &s, s.k, true);
        if (!of[i].latent) s.paged.v = up_keys(&keys, &s, s.v, true);
        check_new_keys(keys.d, &s, drafts, COUNT(drafts), true);
        check_new_keys(keys.d, &s, decoding, COUNT(decoding), false);
        run_free_blocks(&keys);
        scene_free(&s);
    }
}

/* ref itself against the textbook: softmax over the visible keys in one go, in double. */
static void test_textbook(void **state) {
    (void)state;
    struct scene s;
    float *out, *lse;
    const struct geometry g = {4, 2, 64, 50, false, 0};
    scene_init(&s, &g, DT_F32);
    assert_int_equal(all_rows(packed, &two.dev[0], &s, &out, &lse), 0);
    for (int64_t i = 0, row = 0; i < N_SEQS; i++)
        for (int64_t p = 0; p < seq_len[i]; p++, row++)
            for (int64_t h = 0; h < g.hq; h++) {
                double sum = 0, acc[64] = {0};
                for (int64_t j = 0; j <= p; j++) {
                    if (p - j >= g.window) continue;
                    const int64_t kv = ((s.start[i] + j) * g.hk + h / 2) * g.dim;
                    double score = 0;
                    for (int64_t c = 0; c < g.dim; c++) score += (double)s.q[(row * g.hq + h) * g.dim + c] * s.k[kv + c];
                    const double e = exp(score / 8);
                    sum += e;
                    for (int64_t c = 0; c < g.dim; c++) acc[c] += e * s.v[kv + c];
                }
                /* f32 results of sums in double: one rounding of each */
                assert_true(fabs(lse[row * g.hq + h] - log(sum)) <= 1e-6 * (1 + fabs(log(sum))));
                for (int64_t c = 0; c < g.dim; c++) assert_true(fabs(out[(row * g.hq + h) * g.dim + c] - acc[c] / sum) <= 1e-6);
            }
    free(out);
    free(lse);
    scene_free(&s);
}

int main(int argc, char **argv) {
    const struct CMUnitTest tests[] = {
        {"new_keys_of_the_kernel_in_front", test_new_keys, NULL, NULL, NULL},
        {"inv02_latent_attention_placement", test_latent, NULL, NULL, NULL},
        {"inv02_attention_placement", test_ways, NULL, NULL, NULL},
        cmocka_unit_test(test_textbook),
    };
    slowly = argc > 1 && strcmp(argv[1], "slow") == 0;
    backends_open(&two, 2);
    backends_open(&one, 1);
    const int failed = _cmocka_run_group_tests("ops: attention placement", slowly ? tests : tests + 1, 3, NULL, NULL);
    backends_close(&two);
    backends_close(&one);
    return failed;
}
