/* test_model_invariants.c - the invariants of DESIGN.md as far as the model
 * decides them: log-probs are equal bit for bit between generation and
 * training and in any batch; gradients do not depend on micro-batches. */
#include "model_case.h"

#include "base/rng.h"

enum { N_SEQS = 6, MAX_LEN = 128, BLOCK_LEN = 16 };
static const int64_t LENS[N_SEQS] = {5, 64, 1 + BLOCK_LEN, 97, 2, 65}; /* around KV blocks of 16 and key tiles of 64 */
static const char *const CASES[] = {"qwen2",     "qwen3",       "llama",    "mistral", "qwen2_window", "phi4_mini",  "glm4",
                                    "gemma2",    "gemma3_text", "exaone4",  "granite", "ministral3",   "olmo3",      "hunyuan",
                                    "qwen3_moe", "qwen2_moe",   "glm4_moe", "gpt_oss", "deepseek_v3",  "minimax_m2", "hy_v3"};
static const struct {
    const char *backend;
    enum dtype act;
} SETUPS[] = {{"ref", DT_F32}, {"ref", DT_BF16}, {"cpu", DT_F32}, {"cpu", DT_BF16}, {"cuda", DT_F32}, {"cuda", DT_BF16}};
#define EACH(i, list) for (size_t i = 0; i < sizeof(list) / sizeof((list)[0]); i++)

/* A model with N_SEQS random sequences and a random temperature for each. */
struct rig {
    struct dev dev;
    struct model *m;
    int32_t ids[N_SEQS][MAX_LEN];
    float inv_temp[N_SEQS];
    struct rng rng;
};

static void rig_open_dir(struct rig *r, const char *dir, const char *backend, enum dtype act, int threads, int flags) {
    *r = (struct rig){.rng = {.seed = 5, .stream = RNG_TEST}};
    case_dev(&r->dev, backend, threads);
    OK(model_open(&r->m, &r->dev, &(struct model_open_args){.dir = dir, .act = act, .flags = flags, .max_len = MAX_LEN}));
    for (int i = 0; i < N_SEQS; i++) {
        r->inv_temp[i] = 0.5f + (float)rng_unit(&r->rng);
        for (int64_t t = 0; t < LENS[i]; t++) r->ids[i][t] = (int32_t)rng_below(&r->rng, (uint64_t)r->m->cfg.vocab);
    }
}
static void rig_open(struct rig *r, const char *name, const char *backend, enum dtype act, int threads, int flags) {
    char *dir = case_path(name, "");
    rig_open_dir(r, dir, backend, act, threads, flags);
    free(dir);
}
static void rig_close(struct rig *r) {
    model_close(r->m);
    assert_int_equal(r->dev.allocated, 0);
    dev_close(&r->dev);
}

/* Results by sequence and position: [t] is that of token t + 1. */
struct result {
    float logp[N_SEQS][MAX_LEN], entropy[N_SEQS][MAX_LEN];
};
static void assert_same_bits(const struct result *a, const struct result *b, const char *what) {
    for (int i = 0; i < N_SEQS; i++) {
        const size_t n = (size_t)(LENS[i] - 1) * sizeof(float);
        if (memcmp(a->logp[i], b->logp[i], n) != 0 || memcmp(a->entropy[i], b->entropy[i], n) != 0)
            fail_msg("%s: sequence %d differs", what, i);
    }
}

/* Rows and targets of a packed batch of the given sequences. */
struct targets {
    struct model_logp_args l;
    int32_t row[N_SEQS * MAX_LEN], target[N_SEQS * MAX_LEN];
    float inv_temp[N_SEQS * MAX_LEN], logp[N_SEQS * MAX_LEN], entropy[N_SEQS * MAX_LEN];
};
static void set_targets(const struct rig *r, struct targets *t, const int *which, int n) {
    int64_t k = 0, row = 0;
    for (int i = 0; i < n; i++, row++) {
        for (int64_t p = 1; p < LENS[which[i]]; p++, k++) {
            t->row[k] = (int32_t)row++;
            t->target[k] = r->ids[which[i]][p];
            t->inv_temp[k] = r->inv_temp[which[i]];
        }
    }
    t->l = (struct model_logp_args){
        .n = k, .row = t->row, .target = t->target, .inv_temp = t->inv_temp, .logp = t->logp, .entropy = t->entropy};
}
static void pack(struct rig *r, struct model_batch *b, const int *which, int n) {
    struct case_seq s[N_SEQS];
    for (int i = 0; i < n; i++) s[i] = (struct case_seq){r->ids[which[i]], LENS[which[i]]};
    case_pack(&r->dev, b, s, n);
}

/* One packed forward of sequences which[0 .. n) with buffers for max_rows. */
static void packed(struct rig *r, struct result *out, const int *which, int n, struct model_keep keep, int64_t max_rows) {
    struct model_batch b;
    struct model_acts *a;
    struct targets *t = xcalloc(1, sizeof *t);
    pack(r, &b, which, n);
    set_targets(r, t, which, n);
    OK(model_acts_create(&a, r->m, max_rows, keep, NULL));
    OK(model_forward(r->m, &b, a));
    OK(model_logp(r->m, a, &t->l));
    for (int64_t i = 0, k = 0; i < n; k += LENS[which[i]] - 1, i++) {
        const size_t bytes = (size_t)(LENS[which[i]] - 1) * sizeof(float);
        memcpy(out->logp[which[i]], t->logp + k, bytes);
        memcpy(out->entropy[which[i]], t->entropy + k, bytes);
    }
    model_acts_destroy(a);
    case_unpack(&r->dev, &b);
    free(t);
}
static void all_packed(struct rig *r, struct result *out, struct model_keep keep) {
    static const int order[N_SEQS] = {0, 1, 2, 3, 4, 5};
    int64_t rows = 0;
    for (int i = 0; i < N_SEQS; i++) rows += LENS[i];
    packed(r, out, order, N_SEQS, keep, rows);
}

/* ---- generation: paged keys, all sequences advancing together by random steps ---- */

enum { BLOCKS_PER_SEQ = MAX_LEN / BLOCK_LEN, N_PAGES = N_SEQS * BLOCKS_PER_SEQ };

static void paged(struct rig *r, struct result *out, int64_t max_step) {
    struct dev *d = &r->dev;
    const struct model_config *c = &r->m->cfg;
    const size_t bytes = (size_t)(N_PAGES * c->n_kv_heads * BLOCK_LEN * c->head_dim) * dtype_size(r->m->act);
    struct kv *layers = xcalloc((size_t)c->n_layers, sizeof *layers);
    const struct model_kv kv = {.layers = layers};
    for (int64_t l = 0; l < c->n_layers; l++) {
        const struct tensor t = {NULL, r->m->act, 4, {N_PAGES, c->n_kv_heads, BLOCK_LEN, c->head_dim}};
        layers[l] = (struct kv){t, t};
        layers[l].k.data = case_alloc(d, bytes);
        layers[l].v.data = case_alloc(d, bytes);
        OK(dev_zero(d, layers[l].k.data, bytes));
        OK(dev_zero(d, layers[l].v.data, bytes));
    }
    int64_t shuffled[N_PAGES], done[N_SEQS] = {0};
    for (int64_t i = 0; i < N_PAGES; i++) shuffled[i] = i;
    rng_shuffle(&r->rng, shuffled, N_PAGES);
    struct model_acts *a;
    OK(model_acts_create(&a, r->m, N_SEQS * MAX_LEN, MODEL_KEEP_NONE, NULL));
    struct targets *t = xcalloc(1, sizeof *t);
    for (;;) {
        int32_t ids[N_SEQS * MAX_LEN], pos[N_SEQS * MAX_LEN], slots[N_SEQS * MAX_LEN];
        int32_t q_start[N_SEQS + 1] = {0}, pos0[N_SEQS], block_table[N_SEQS * BLOCKS_PER_SEQ];
        int64_t rows = 0, n = 0, k = 0, max_q = 0, max_kv = 0;
        float *dst[N_SEQS * MAX_LEN][2];
        for (int i = 0; i < N_SEQS; i++) {
            int64_t step = 1 + (int64_t)rng_below(&r->rng, (uint64_t)max_step);
            if (step > LENS[i] - done[i]) step = LENS[i] - done[i];
            if (step == 0 || rng_below(&r->rng, 4) == 0) continue; /* some wait */
            for (int64_t p = 0; p < BLOCKS_PER_SEQ; p++)
                block_table[n * BLOCKS_PER_SEQ + p] = (int32_t)shuffled[i * BLOCKS_PER_SEQ + p];
            pos0[n] = (int32_t)done[i];
            for (int64_t s = 0; s < step; s++, rows++) {
                const int64_t p = done[i] + s;
                ids[rows] = r->ids[i][p];
                pos[rows] = (int32_t)p;
                slots[rows] = (int32_t)(shuffled[i * BLOCKS_PER_SEQ + p / BLOCK_LEN] * BLOCK_LEN + p % BLOCK_LEN);
                if (p + 1 >= LENS[i]) continue;
                t->row[k] = (int32_t)rows;
                t->target[k] = r->ids[i][p + 1];
                t->inv_temp[k] = r->inv_temp[i];
                dst[k][0] = &out->logp[i][p];
                dst[k++][1] = &out->entropy[i][p];
            }
            done[i] += step;
            q_start[++n] = (int32_t)rows;
            if (step > max_q) max_q = step;
            if (done[i] > max_kv) max_kv = done[i];
        }
        if (rows == 0) {
            bool all = true;
            for (int i = 0; i < N_SEQS; i++) all = all && done[i] == LENS[i];
            if (all) break;
            continue;
        }
        struct model_batch b = {
            .n_rows = rows,
            .ids = case_ints(d, ids, rows),
            .pos = case_ints(d, pos, rows),
            .slots = case_ints(d, slots, rows),
            .seqs = {.n = n,
                     .max_q = max_q,
                     .max_kv = max_kv,
                     .q_start = case_ints(d, q_start, n + 1),
                     .pos0 = case_ints(d, pos0, n),
                     .block_table = case_ints(d, block_table, n * BLOCKS_PER_SEQ)},
            .kv = &kv,
        };
        b.seqs.block_table.nd = 2;
        b.seqs.block_table.dim[0] = n;
        b.seqs.block_table.dim[1] = BLOCKS_PER_SEQ;
        t->l = (struct model_logp_args){
            .n = k, .row = t->row, .target = t->target, .inv_temp = t->inv_temp, .logp = t->logp, .entropy = t->entropy};
        OK(model_forward(r->m, &b, a));
        OK(model_logp(r->m, a, &t->l));
        for (int64_t i = 0; i < k; i++) {
            *dst[i][0] = t->logp[i];
            *dst[i][1] = t->entropy[i];
        }
        case_unpack(d, &b);
    }
    free(t);
    model_acts_destroy(a);
    for (int64_t l = 0; l < c->n_layers; l++) {
        dev_free(d, layers[l].k.data, bytes);
        dev_free(d, layers[l].v.data, bytes);
    }
    free(layers);
}

static void inv01_rollout_equals_train(void **state) {
    (void)state;
    struct result *train = xcalloc(1, sizeof *train), *roll = xcalloc(1, sizeof *roll);
    EACH(s, SETUPS) EACH(i, CASES) {
        if (!case_has(SETUPS[s].backend)) continue;
        struct rig r;
        rig_open(&r, CASES[i], SETUPS[s].backend, SETUPS[s].act, 2, MODEL_INFER);
        all_packed(&r, train, MODEL_KEEP_ALL);
        static const int64_t steps[] = {1, 7, 40, MAX_LEN}; /* decode, chunked prefill, whole prompts */
        EACH(k, steps) {
            memset(roll, 0, sizeof *roll);
            paged(&r, roll, steps[k]);
            assert_same_bits(roll, train, CASES[i]);
        }
        rig_close(&r);
    }
    free(train);
    free(roll);
}

static void inv02_batch_invariant(void **state) {
    (void)state;
    static const int reversed[N_SEQS] = {5, 4, 3, 2, 1, 0};
    struct result *want = xcalloc(1, sizeof *want), *got = xcalloc(1, sizeof *got);
    EACH(s, SETUPS) EACH(i, CASES) {
        if (!case_has(SETUPS[s].backend)) continue;
        struct rig r;
        rig_open(&r, CASES[i], SETUPS[s].backend, SETUPS[s].act, 1, MODEL_INFER);
        all_packed(&r, want, MODEL_KEEP_ALL);
        const struct model_keep keeps[] = {MODEL_KEEP_NONE, MODEL_KEEP_LAYER};
        EACH(k, keeps) {
            memset(got, 0, sizeof *got);
            all_packed(&r, got, keeps[k]);
            assert_same_bits(got, want, "keep mode");
        }
        memset(got, 0, sizeof *got);
        packed(&r, got, reversed, N_SEQS, MODEL_KEEP_NONE, 1000);
        assert_same_bits(got, want, "reversed, larger buffers");
        memset(got, 0, sizeof *got);
        for (int k = 0; k < N_SEQS; k++) packed(&r, got, &k, 1, MODEL_KEEP_NONE, LENS[k]);
        assert_same_bits(got, want, "one by one");
        rig_close(&r);
        for (int threads = 2; threads <= 5 && strcmp(SETUPS[s].backend, "cpu") == 0; threads += 3) {
            memset(got, 0, sizeof *got);
            rig_open(&r, CASES[i], SETUPS[s].backend, SETUPS[s].act, threads, MODEL_INFER);
            all_packed(&r, got, MODEL_KEEP_NONE);
            assert_same_bits(got, want, "threads");
            rig_close(&r);
        }
    }
    free(want);
    free(got);
}

/* ---- gradients ---- */

/* The buckets of one micro-batch kept by themselves, as a rank would send them; the embedding's rows as the distinct ids and
 * the sum of each one's rows. */
struct kept {
    struct dev *dev;
    float *flat;                 /* (n_elems) */
    struct model_range *buckets; /* as they should come */
    int64_t n_buckets, next, covered;
    int32_t ids[N_SEQS * MAX_LEN];
    int64_t n_ids;
    float *rows; /* (n_ids, h) */
    size_t row_bytes;
};
static int kept_begin(void *ctx, struct model_range bucket, float **at) {
    struct kept *k = ctx;
    assert_true(k->next < k->n_buckets && memcmp(&bucket, &k->buckets[k->next++], sizeof bucket) == 0);
    *at = k->flat + bucket.lo;
    k->covered += bucket.hi - bucket.lo;
    return 0;
}
static int kept_rows(void *ctx, struct model_range table, struct tensor ids, struct tensor dx) {
    struct kept *k = ctx;
    const int64_t n = ids.dim[0], h = dx.dim[1];
    int32_t all[N_SEQS * MAX_LEN], place[N_SEQS * MAX_LEN];
    assert_memory_equal(&table, &k->buckets[k->next == k->n_buckets ? 0 : k->next], sizeof table); /* the head's, or the last */
    assert_true(k->next + 1 >= k->n_buckets);
    TRY(dev_copy_out(k->dev, all, ids.data, (size_t)n * 4));
    for (int64_t t = 0; t < n; t++) {
        int64_t i = 0;
        while (i < k->n_ids && k->ids[i] != all[t]) i++;
        if (i == k->n_ids) k->ids[k->n_ids++] = all[t];
        place[t] = (int32_t)i;
    }
    k->row_bytes = (size_t)(k->n_ids * h) * 4;
    k->rows = case_alloc(k->dev, k->row_bytes);
    void *d_place = case_alloc(k->dev, (size_t)n * 4);
    TRY(dev_copy_in(k->dev, d_place, place, (size_t)n * 4));
    TRY(dev_zero(k->dev, k->rows, k->row_bytes));
    TRY(dev_embed_bwd(k->dev, tensor_2d(k->rows, DT_F32, k->n_ids, h), tensor_1d(d_place, DT_I32, n), dx));
    dev_free(k->dev, d_place, (size_t)n * 4);
    return 0;
}

/* g = the left fold of n micro-batches' parts; the embedding's rows follow the bucket of their micro-batch. */
static void fold_kept(struct rig *r, float *g, struct kept *k, int n) {
    const struct model *m = r->m;
    const int64_t h = m->cfg.hidden, table = m->cfg.vocab * h, rest = m->n_elems - table;
    const bool tied = m->g_head == m->g_embed;
    struct tensor x[N_SEQS];
    for (int i = 0; i < n; i++) {
        assert_int_equal(k[i].covered, tied ? m->n_elems : rest);
        x[i] = tensor_1d(k[i].flat + table, DT_F32, rest);
    }
    assert_int_equal(m->g_embed->offset, 0);
    OK(dev_fold(&r->dev, tensor_1d(g + table, DT_F32, rest), x, n, false));
    if (!tied) OK(dev_zero(&r->dev, g, (size_t)table * 4));
    for (int i = 0; i < n; i++) {
        void *ids = case_alloc(&r->dev, (size_t)k[i].n_ids * 4);
        const struct tensor part = tensor_1d(k[i].flat, DT_F32, table);
        OK(dev_copy_in(&r->dev, ids, k[i].ids, (size_t)k[i].n_ids * 4));
        if (tied) OK(dev_fold(&r->dev, tensor_1d(g, DT_F32, table), &part, 1, i > 0));
        OK(dev_scatter_rows_add(&r->dev, tensor_2d(g, DT_F32, m->cfg.vocab, h), tensor_2d(k[i].rows, DT_F32, k[i].n_ids, h),
                                tensor_1d(ids, DT_I32, k[i].n_ids)));
        dev_free(&r->dev, ids, (size_t)k[i].n_ids * 4);
        dev_free(&r->dev, k[i].rows, k[i].row_bytes);
        dev_free(&r->dev, k[i].flat, (size_t)m->n_elems * 4);
        free(k[i].buckets);
    }
}

/* In place, or each micro-batch by itself and folded afterwards. */
static float *gradient(struct rig *r, int micro, struct model_keep keep, bool folded) {
    const size_t bytes = (size_t)r->m->n_elems * sizeof(float);
    float *g = case_garbage(&r->dev, bytes), *out = xmalloc(bytes);
    struct targets *t = xcalloc(1, sizeof *t);
    struct model_acts *a;
    struct kept *parts = xcalloc(N_SEQS, sizeof *parts);
    int n_parts = 0;
    OK(model_acts_create(&a, r->m, N_SEQS * MAX_LEN, keep, NULL));
    for (int lo = 0; lo < N_SEQS; lo += micro) {
        int which[N_SEQS];
        float dlogp[N_SEQS * MAX_LEN], dentropy[N_SEQS * MAX_LEN];
        struct model_batch b;
        const int n = lo + micro < N_SEQS ? micro : N_SEQS - lo;
        for (int i = 0; i < n; i++) which[i] = lo + i;
        pack(r, &b, which, n);
        set_targets(r, t, which, n);
        for (int64_t i = 0, k = 0; i < n; i++) {
            struct rng w = {.seed = (uint64_t)which[i], .stream = RNG_TEST};
            for (int64_t p = 1; p < LENS[which[i]]; p++, k++) {
                dlogp[k] = rng_normal(&w);
                dentropy[k] = 0.1f * rng_normal(&w);
            }
        }
        OK(model_forward(r->m, &b, a));
        t->l.train = true;
        OK(model_logp(r->m, a, &t->l));
        struct model_grad_sink sink = {.flat = g, .add = lo > 0};
        if (folded) {
            struct kept *k = &parts[n_parts++];
            *k = (struct kept){.dev = &r->dev, .flat = case_garbage(&r->dev, bytes)};
            k->n_buckets = model_buckets(r->m, r->m->shard, &k->buckets);
            sink = (struct model_grad_sink){.ctx = k, .begin = kept_begin, .rows = kept_rows};
        }
        OK(model_backward(
            r->m, a,
            &(struct model_backward_args){.batch = &b, .logp = &t->l, .dlogp = dlogp, .dentropy = dentropy, .sink = &sink}));
        case_unpack(&r->dev, &b);
    }
    if (folded) fold_kept(r, g, parts, n_parts);
    OK(dev_copy_out(&r->dev, out, g, bytes));
    free(parts);
    dev_free(&r->dev, g, bytes);
    model_acts_destroy(a);
    free(t);
    return out;
}

/* What several ranks do gives the bits of one: every micro-batch's part made elsewhere, then added in order. */
static void inv11_folded_micro_batches(void **state) {
    (void)state;
    EACH(s, SETUPS) {
        if (!case_has(SETUPS[s].backend)) continue;
        EACH(i, CASES) {
            struct rig r;
            rig_open(&r, CASES[i], SETUPS[s].backend, SETUPS[s].act, 2, MODEL_INFER);
            for (int micro = 1; micro < N_SEQS; micro += 2) {
                float *want = gradient(&r, micro, MODEL_KEEP_ALL, false), *got = gradient(&r, micro, MODEL_KEEP_ALL, true);
                if (memcmp(got, want, (size_t)r.m->n_elems * sizeof *got) != 0)
                    fail_msg("%s %s %s: micro-batches of %d, folded, differ from those in place", CASES[i], SETUPS[s].backend,
                             dtype_name(SETUPS[s].act), micro);
                free(want);
                free(got);
            }
            rig_close(&r);
        }
    }
}

/* The compute copy in the order of the flat arrays; caller frees. */
static char *compute_copy(const struct model *m) {
    const size_t unit = dtype_size(m->act), bytes = (size_t)m->n_elems * unit;
    char *out = xmalloc(bytes), *flat = case_alloc(m->dev, bytes);
    for (int64_t i = 0; i < m->n_groups; i++) {
        const struct model_group *g = &m->groups[i];
        char *at = flat + (size_t)g->offset * unit;
        struct weight w = g->mat;
        for (int64_t e = 0; g->k && e < g->count; e++) {
            OK(dev_weight_unpack(m->dev, tensor_2d(at + (size_t)(e * w.n * w.k) * unit, m->act, w.n, w.k), w));
            w.data = (char *)w.data + dev_weight_bytes(m->dev, m->act, w.n, w.k);
        }
        if (!g->k) OK(dev_copy(m->dev, at, g->vec.data, (size_t)g->n * unit));
    }
    OK(dev_copy_out(m->dev, out, flat, bytes));
    dev_free(m->dev, flat, bytes);
    return out;
}

/* What ranks keep is the whole once, in any number of shards; the compute copy is everywhere the same. */
static void inv11_shards(void **state) {
    (void)state;
    EACH(s, SETUPS) EACH(i, CASES) {
        if (!case_has(SETUPS[s].backend)) continue;
        struct rig r;
        char *dir = case_path(CASES[i], "");
        rig_open_dir(&r, dir, SETUPS[s].backend, SETUPS[s].act, 1, MODEL_TRAIN);
        float *want = xmalloc((size_t)r.m->n_elems * 4);
        char *const weights = compute_copy(r.m);
        OK(dev_copy_out(&r.dev, want, r.m->master, (size_t)r.m->n_elems * 4));
        for (int size = 2; size <= 3; size++) {
            int64_t covered = 0;
            for (int rank = 0; rank < size; rank++) {
                struct model *m;
                OK(model_open(&m, &r.dev,
                              &(struct model_open_args){.dir = dir,
                                                        .act = SETUPS[s].act,
                                                        .flags = MODEL_TRAIN,
                                                        .max_len = MAX_LEN,
                                                        .shard = {.rank = rank, .size = size, .whole_matrices = size == 3}}));
                float *got = xmalloc((size_t)m->n_master * 4 + 4);
                OK(dev_copy_out(&r.dev, got, m->master, (size_t)m->n_master * 4));
                char *const got_weights = compute_copy(m);
                assert_memory_equal(got_weights, weights, (size_t)m->n_elems * dtype_size(m->act));
                free(got_weights);
                int64_t at = 0;
                for (int64_t k = 0; k < m->n_own; k++) {
                    assert_true(k == 0 || m->own[k].lo >= m->own[k - 1].hi);
                    assert_memory_equal(got + at, want + m->own[k].lo, (size_t)(m->own[k].hi - m->own[k].lo) * 4);
                    at += m->own[k].hi - m->own[k].lo;
                }
                assert_int_equal(at, m->n_master);
                assert_true(m->n_master < r.m->n_elems);
                covered += at;
                free(got);
                model_close(m);
            }
            assert_int_equal(covered, r.m->n_elems);
        }
        free(want);
        free(weights);
        free(dir);
        rig_close(&r);
    }
}

static void inv03_micro_batches(void **state) {
    (void)state;
    EACH(s, SETUPS) {
        if (SETUPS[s].act != DT_F32 || !case_has(SETUPS[s].backend)) continue; /* the bar is that of fp32 sums */
        EACH(i, CASES) {
            struct rig r;
            rig_open(&r, CASES[i], SETUPS[s].backend, DT_F32, 2, MODEL_INFER);
            float *all = gradient(&r, N_SEQS, MODEL_KEEP_ALL, false);
            double worst = 0, whole = 0;
            const char *where = "";
            for (int micro = 1; micro <= 3; micro += 2) {
                float *g = gradient(&r, micro, MODEL_KEEP_LAYER, false);
                for (int64_t p = 0; p < r.m->n_params; p++) {
                    const struct model_param *q = &r.m->params[p];
                    const double e = sqrt(case_nmse(g + q->offset, all + q->offset, q->rows * q->cols));
                    if (e > worst) where = q->name;
                    worst = worse_of(worst, e);
                }
                whole = worse_of(whole, sqrt(case_nmse(g, all, r.m->n_elems)));
                free(g);
            }
            print_message("%-12s %s: micro-batches of 1 and 3 against all: %.1e relative, %.1e in %s\n", CASES[i],
                          SETUPS[s].backend, whole, worst, where);
            assert_true(whole <= 1e-6);
            /* sums that cancel (a key bias moves all scores of a row nearly alike) lose a digit more */
            assert_true(worst <= 1e-5);
            free(all);
            rig_close(&r);
        }
    }
}

/* A golden case's shape with so many layers, in random weights. Caller frees the path and removes *top, which holds it. */
static char *deep_model(const char *name, int64_t layers, char **top) {
    char *path = case_path(name, "config.json");
    json_t *config = json_load_file(path, 0, NULL);
    assert_non_null(config);
    json_object_set_new(config, "num_hidden_layers", json_integer(layers));
    json_object_del(config, "layer_types");
    *top = case_temp_dir();
    char *dir = file_join(*top, "model");
    OK(model_init_dir(config, dir, 7, DT_F32));
    json_decref(config);
    free(path);
    return dir;
}

enum { DEEP = 6 };
/* Nothing recomputed, the MLP or all of some layers, everything, logits of no, some or all tokens: the gradients' bits are the
 * same. */
static void any_keep_gives_the_same_bits(void **state) {
    (void)state;
    static const int64_t counts[][3] = {{0, 0},        {0, 1},        {0, 3},  {0, DEEP - 1},     {1, 0},           {2, 2},
                                        {1, DEEP - 2}, {DEEP - 1, 0}, {0, 99}, {DEEP - 1, 0, 99}, {0, 0, INT64_MAX}};
    static const char *const shapes[] = {"qwen2", "qwen3"};
    EACH(i, shapes) {
        char *top, *dir = deep_model(shapes[i], DEEP, &top);
        EACH(s, SETUPS) {
            if (!case_has(SETUPS[s].backend)) continue;
            struct rig r;
            rig_open_dir(&r, dir, SETUPS[s].backend, SETUPS[s].act, 2, MODEL_INFER);
            float *want = gradient(&r, 4, MODEL_KEEP_ALL, false);
            double size = 0;
            for (int64_t k = 0; k < r.m->n_elems; k++) size += fabs((double)want[k]);
            assert_true(size > 1); /* something was computed */
            EACH(k, counts) {
                const struct model_keep keep = {
                    .train = true, .all = counts[k][0], .attention = counts[k][1], .logits = counts[k][2]};
                float *got = gradient(&r, 4, keep, false);
                if (memcmp(got, want, (size_t)r.m->n_elems * sizeof(float)) != 0)
                    fail_msg("%s %s: %lld layers kept, of %lld the attention, %lld logits: other bits", shapes[i],
                             SETUPS[s].backend, (long long)counts[k][0], (long long)counts[k][1], (long long)counts[k][2]);
                free(got);
            }
            free(want);
            rig_close(&r);
        }
        case_drop_dir(top);
        free(dir);
    }
}

/* The most that fits: never over the room, nothing more would go in, from nothing to all of the layers. */
static void keep_fits_its_room(void **state) {
    (void)state;
    enum { ROWS = 100, STEPS = 40 };
    char *top, *dir = deep_model("qwen3", DEEP, &top);
    struct model_config c;
    OK(model_config_load(&c, dir));
    const size_t least = model_acts_bytes(&c, DT_BF16, ROWS, MODEL_KEEP_LAYER);
    const size_t most = model_acts_bytes(&c, DT_BF16, ROWS, MODEL_KEEP_ALL);
    const size_t attention = model_acts_bytes(&c, DT_BF16, ROWS, MODEL_KEEP_ATTENTION);
    assert_true(least < attention && attention < most);
    int64_t before = 0, all = 0, mixed = 0;
    for (size_t i = 0; i <= STEPS; i++) {
        const size_t extra = (most - least) * i / STEPS;
        const struct model_keep k = model_keep_fit(&c, DT_BF16, ROWS, MODEL_KEEP_NONE, extra);
        const struct model_keep one_more = {.train = true, .all = k.all, .attention = k.attention + 1},
                                better = {.train = true, .all = k.all + 1, .attention = k.attention - 1};
        const int64_t layers = k.all + k.attention;
        assert_true(k.train && k.all >= 0 && k.attention >= 0 && layers < DEEP && layers >= before);
        assert_true(model_acts_bytes(&c, DT_BF16, ROWS, k) <= least + extra);
        if (layers < DEEP - 1) assert_true(model_acts_bytes(&c, DT_BF16, ROWS, one_more) > least + extra);
        if (k.attention > 0) assert_true(model_acts_bytes(&c, DT_BF16, ROWS, better) > least + extra);
        mixed += k.all > 0 && k.attention > 0;
        before = layers;
        all = k.all;
    }
    assert_true(all == DEEP - 1 && mixed > 0);
    assert_int_equal(model_keep_fit(&c, DT_BF16, ROWS, MODEL_KEEP_NONE, 0).attention, 0);
    model_config_free(&c);
    case_drop_dir(top);
    free(dir);
}

static void recompute_gives_the_same_bits(void **state) {
    (void)state;
    EACH(s, SETUPS) EACH(i, CASES) {
        if (!case_has(SETUPS[s].backend)) continue;
        struct rig r;
        rig_open(&r, CASES[i], SETUPS[s].backend, SETUPS[s].act, 2, MODEL_INFER);
        float *kept = gradient(&r, 4, MODEL_KEEP_ALL, false), *again = gradient(&r, 4, MODEL_KEEP_LAYER, false);
        assert_memory_equal(kept, again, (size_t)r.m->n_elems * sizeof(float));
        double size = 0;
        for (int64_t k = 0; k < r.m->n_elems; k++) size += fabs((double)kept[k]);
        assert_true(size > 1); /* something was computed */
        free(kept);
        free(again);
        rig_close(&r);
    }
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(inv01_rollout_equals_train),
        cmocka_unit_test(inv02_batch_invariant),
        cmocka_unit_test(inv03_micro_batches),
        cmocka_unit_test(inv11_folded_micro_batches),
        cmocka_unit_test(inv11_shards),
        cmocka_unit_test(recompute_gives_the_same_bits),
        cmocka_unit_test(any_keep_gives_the_same_bits),
        cmocka_unit_test(keep_fits_its_room),
    };
    return cmocka_run_group_tests_name("model invariants", tests, NULL, NULL);
}
