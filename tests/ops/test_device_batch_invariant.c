/* test_device_batch_invariant.c - ops are batch-invariant (invariant 2): a row's bits are the same alone, in calls of any
 * size, at any place in a buffer, and under any number of threads.  Also invariant 1 in the small: raw logits and the
 * sampler's log-prob carry the bits of the LM head's. */
#include "ops/ops_table.h"

static struct backends two, one; /* threads */

/* Rows [lo, lo + n) of `full` as inputs of a run of their own. */
static void slice_init(struct run *r, const struct run *full, int64_t lo, int64_t n, int64_t pad) {
    *r = (struct run){.d = full->d, .act = full->act, .s = full->s, .rows = n, .pad = pad, .slice = true};
    struct slot *to[] = {r->in, r->gout};
    const struct slot *from[] = {full->in, full->gout};
    const int count[] = {r->n_in = full->n_in, r->n_gout = full->n_gout};
    for (int k = 0; k < 2; k++)
        for (int i = 0; i < count[k]; i++) {
            struct slot *s = &to[k][i];
            *s = from[k][i];
            if (!s->per_row) continue;
            const int64_t row = slot_count(s) / s->dim[0];
            if (s->f) s->f += lo * row;
            if (s->i) s->i += lo * row;
            s->dim[0] = n;
        }
}

static void same_rows(const char *backend, const struct op_def *op, const struct slot *part, const struct slot *full, int64_t lo) {
    if (!full->per_row) return;
    const int64_t row = slot_count(full) / full->dim[0], n = slot_count(part);
    const int64_t at = first_diff(part->f, full->f + lo * row, n);
    if (at >= 0)
        fail_msg("%s %s %s: row %lld of %lld differs in %s when computed in a call of %lld rows: %.9g, %.9g", backend, op->name,
                 dtype_name(full->dt), (long long)(lo + at / row), (long long)full->dim[0], full->name, (long long)part->dim[0],
                 (double)part->f[at], (double)full->f[lo * row + at]);
}

/* Cuts the rows into calls of `step` rows, each placed `pad` rows into its buffers, and makes `most` of these calls, the first
 * and the last among them. */
static void check_split(const char *backend, const struct op_def *op, const struct run *full, int64_t step, int64_t pad,
                        int64_t most) {
    const int64_t n_parts = (full->rows + step - 1) / step;
    for (int64_t i = 0; i < n_parts && i < most; i++) {
        struct run part;
        const int64_t which = n_parts <= most ? i : i * (n_parts - 1) / (most - 1);
        const int64_t lo = which * step, n = lo + step < full->rows ? step : full->rows - lo;
        slice_init(&part, full, lo, n, pad);
        if (run_exec(&part, op) < 0) fail_msg("%s %s: %s", backend, op->name, err_msg());
        for (int k = 0; k < full->n_out; k++) same_rows(backend, op, &part.out[k], &full->out[k], lo);
        for (int k = 0; k < full->n_gin; k++) same_rows(backend, op, &part.gin[k], &full->gin[k], lo);
        run_free(&part);
    }
}

/* Calls of several sizes. ref has one loop over rows, and no kernels that a size chooses: one row and many show it. */
static void check_splits(const struct op_def *op, int backend, const struct run *full) {
    static const int64_t step[] = {1, 31, 5, 16};
    const bool few = SANITIZED || backend == 0;
    for (int64_t k = 0; k < cases_of(few ? 2 : COUNT(step), 2); k++)
        check_split(two.name[backend], op, full, step[k], k, few ? 2 : 4);
}

static bool check_rows(const struct op_def *op, int backend, enum dtype act) {
    for (int64_t i = 0; i < cases_of(op->n_shapes, 1); i++) {
        struct run full;
        run_init(&full, op, &op->shapes[i], act, &two.dev[backend]);
        int rc = run_exec(&full, op);
        if (rc == ERR_UNSUPPORTED && op->bwd && full.n_out) { /* no backward yet: the forward still counts */
            struct op_def fwd = *op;
            fwd.bwd = NULL;
            if (run_exec(&full, &fwd) == 0) check_splits(&fwd, backend, &full);
        } else if (rc == 0) {
            check_splits(op, backend, &full);
        } else if (rc != ERR_UNSUPPORTED) {
            fail_msg("%s %s: %s", two.name[backend], op->name, err_msg());
        }
        run_free(&full);
        if (rc < 0) return false;
    }
    return true;
}

static void test_rows(void **state) {
    const struct op_def *op = *state;
    if (!op->row_op) return;
    for (int b = 0; b < two.n; b++)
        if (!check_rows(op, b, DT_F32) || !check_rows(op, b, DT_BF16)) report_skip(two.name[b], op->name);
}

/* Every result of forward and backward, weight gradients too, with 1 thread and with 2. */
static bool check_threads(const struct op_def *op, int backend, enum dtype act) {
    for (int64_t i = 0; i < cases_of(op->n_shapes, 1); i++) {
        struct run a, b;
        run_init(&a, op, &op->shapes[i], act, &one.dev[backend]);
        run_init(&b, op, &op->shapes[i], act, &two.dev[backend]);
        const int rc = run_exec(&a, op);
        if (rc < 0 && rc != ERR_UNSUPPORTED) fail_msg("%s %s: %s", one.name[backend], op->name, err_msg());
        assert_int_equal(run_exec(&b, op), rc);
        for (int k = 0; k < a.n_out; k++)
            if (first_diff(a.out[k].f, b.out[k].f, slot_count(&a.out[k])) >= 0)
                fail_msg("%s %s: %s depends on the number of threads", one.name[backend], op->name, a.out[k].name);
        for (int k = 0; k < a.n_gin; k++)
            if (first_diff(a.gin[k].f, b.gin[k].f, slot_count(&a.gin[k])) >= 0)
                fail_msg("%s %s: gradient of %s depends on the number of threads", one.name[backend], op->name, a.gin[k].name);
        run_free(&a);
        run_free(&b);
        if (rc < 0) return false;
    }
    return true;
}

static void test_threads(void **state) {
    const struct op_def *op = *state;
    for (int b = 1; b < one.n && !SANITIZED; b++) {                     /* ref has no threads */
        if (test_short() && strcmp(one.name[b], "cuda") == 0) continue; /* the same kernels twice */
        if (!check_threads(op, b, DT_F32) || !check_threads(op, b, DT_BF16)) report_skip(one.name[b], op->name);
    }
}

/* ---- logits and sampler against the LM head ---- */

/* Samples rows of raw logits at each row's temperature, then scores the ids with lmhead_fwd. */
static int check_sampled(struct run *r) {
    struct lmhead_args a;
    TRY(lmhead_args(r, &a));
    const struct tensor z = dev_new(r, shape_2d(DT_F32, r->rows, r->s->n), true);
    struct sample_param *param = xcalloc((size_t)r->rows, sizeof *param);
    struct rng g = {.seed = 3, .stream = RNG_TEST};
    for (int64_t i = 0; i < r->rows; i++)
        param[i] = (struct sample_param){.inv_temp = r->in[2].f[i],
                                         .top_p = i % 3 ? 0.9f : 1,
                                         .min_p = 0,
                                         .repetition_penalty = 1,
                                         .u = (float)rng_unit(&g) * 0.999f,
                                         .top_k = i % 2 ? 40 : 0};
    struct sample_args s = {.logits = z,
                            .param = param,
                            .id = dev_new(r, shape_1d(DT_I32, r->rows), true),
                            .logp = dev_new(r, shape_1d(DT_F32, r->rows), true)};
    int rc = dev_logits(r->d, z, a.x, a.w);
    if (rc == 0) rc = dev_sample(r->d, &s);
    free(param);
    TRY(rc);
    a.target = s.id;
    TRY(dev_lmhead_fwd(r->d, &a));
    float *sampled = down_values(r, s.logp), *scored = down_values(r, a.logp);
    const int64_t at = first_diff(sampled, scored, r->rows);
    if (at >= 0)
        fail_msg("row %lld: the sampler's log-prob %.9g is not the LM head's %.9g", (long long)at, (double)sampled[at],
                 (double)scored[at]);
    for (int64_t i = 0; i < r->rows; i++) assert_true(isfinite(sampled[i]) && sampled[i] <= 1e-6f);
    free(sampled);
    free(scored);
    return 0;
}

/* The most probable entries: largest first, equal ones by id, none missing (against all raw logits), and their
 * log-probs the bits of a list of the same ids. */
static int check_top(struct run *r) {
    struct lmhead_args a;
    TRY(lmhead_args(r, &a));
    const int64_t k = r->s->window, vocab = r->s->n;
    const struct tensor z = dev_new(r, shape_2d(DT_F32, r->rows, vocab), true);
    int32_t *id = xmalloc((size_t)(r->rows * k) * sizeof *id);
    TRY(dev_logits(r->d, z, a.x, a.w));
    float *raw = down_values(r, z), *top = down_values(r, a.top_logp);
    TRY(dev_copy_out(r->d, id, a.top_id.data, (size_t)(r->rows * k) * sizeof *id));
    a.list_id = a.top_id;
    a.top_id = a.top_logp = TENSOR_NONE;
    TRY(dev_lmhead_fwd(r->d, &a));
    float *listed = down_values(r, a.list_logp);
    assert_true(first_diff(top, listed, r->rows * k) < 0);
    int32_t *first = xmalloc((size_t)r->rows * sizeof *first);
    for (int64_t row = 0; row < r->rows; row++) first[row] = id[row * k];
    TRY(dev_copy_in(r->d, a.target.data, first, (size_t)r->rows * sizeof *first));
    TRY(dev_lmhead_fwd(r->d, &a));
    float *alone = down_values(r, a.logp); /* as targets the bits are the same */
    for (int64_t row = 0; row < r->rows; row++) assert_memory_equal(&alone[row], &listed[row * k], sizeof *alone);
    free(first);
    free(alone);
    for (int64_t row = 0; row < r->rows; row++) {
        const float *x = raw + row * vocab;
        const int32_t *ids = id + row * k;
        int64_t above = 0; /* entries that rank before the last of the list */
        for (int64_t i = 1; i < k; i++)
            assert_true(x[ids[i - 1]] > x[ids[i]] || (x[ids[i - 1]] == x[ids[i]] && ids[i - 1] < ids[i]));
        for (int64_t j = 0; j < vocab; j++) above += x[j] > x[ids[k - 1]] || (x[j] == x[ids[k - 1]] && j < ids[k - 1]);
        assert_int_equal(above, k - 1);
    }
    free(raw);
    free(top);
    free(listed);
    free(id);
    return 0;
}

static void test_top(void **state) {
    (void)state;
    static const enum dtype act[] = {DT_F32, DT_BF16}; /* bf16 logits of few hidden units: equal ones are common */
    static const struct op_def op = {"lmhead lists", lists_setup, lists_fwd, NULL, SHAPES(shapes_lists), true};
    for (int b = 0; b < two.n; b++)
        for (int64_t k = 0; k < COUNT(act); k++)
            for (int64_t i = 0; i < cases_of(op.n_shapes, 3); i++) {
                struct run r;
                run_init(&r, &op, &op.shapes[i], act[k], &two.dev[b]);
                const int rc = check_top(&r);
                run_free(&r);
                if (rc == ERR_UNSUPPORTED) report_skip(two.name[b], "the most probable entries");
                else if (rc < 0) fail_msg("%s: %s", two.name[b], err_msg());
            }
}

static void test_sampled_logp(void **state) {
    (void)state;
    static const enum dtype act[] = {DT_F32, DT_BF16};
    static const struct op_def op = {"lmhead", lmhead_setup, lmhead_fwd, NULL, SHAPES(shapes_head), true};
    for (int b = 0; b < two.n; b++)
        for (int64_t k = 0; k < COUNT(act); k++) {
            int rc = 0;
            for (int64_t i = 0; i < cases_of(op.n_shapes, 1) && rc == 0; i++) {
                struct run r;
                run_init(&r, &op, &op.shapes[i], act[k], &two.dev[b]);
                rc = check_sampled(&r);
                run_free(&r);
            }
            if (rc == ERR_UNSUPPORTED) report_skip(two.name[b], "sampled log-prob");
            else if (rc < 0) fail_msg("%s: %s", two.name[b], err_msg());
            else print_message("%s %s: sampled log-probs equal the LM head's\n", two.name[b], dtype_name(act[k]));
        }
}

/* Some chunks of a vocabulary and some tiles of rows. The short one has one chunk, so that fewer GEMMs are autotuned,
 * each over dozens of the library's algorithms; all our small-M kernels take its k. */
static const struct op_shape *gpu_head(void) {
    static const struct op_shape full = {.rows = 300, .n = 2 * DEV_VOCAB_CHUNK + 384, .k = 896};
    static const struct op_shape few = {.rows = 150, .n = 520, .k = 128};
    return test_short() ? &few : &full;
}

/* A GPU runs the GEMMs of a decoding step by other kernels than those of a training step:
 * rows are drawn in calls of every size and scored together. */
static int check_batch(struct run *r) {
    const int64_t calls[] = {r->rows, 3, 80, 1};
    struct lmhead_args a;
    TRY(lmhead_args(r, &a));
    const struct tensor z = dev_new(r, shape_2d(DT_F32, r->rows, r->s->n), true);
    struct sample_param *param = xcalloc((size_t)r->rows, sizeof *param);
    struct rng g = {.seed = 5, .stream = RNG_TEST};
    struct sample_args s = {
        .param = param, .id = dev_new(r, shape_1d(DT_I32, r->rows), true), .logp = dev_new(r, shape_1d(DT_F32, r->rows), true)};
    const struct tensor id = s.id, logp = s.logp;
    int rc = 0;
    for (int64_t k = 0; k < cases_of(COUNT(calls), 2) && rc == 0; k++) {
        const int64_t n = calls[k];
        for (int64_t i = 0; i < n; i++)
            param[i] = (struct sample_param){.inv_temp = r->in[2].f[i],
                                             .top_p = i % 5 == 4 ? 0.9f : 1,
                                             .repetition_penalty = 1,
                                             .u = (float)rng_unit(&g) * 0.999f,
                                             .top_k = i % 7 == 3 ? 40 : 0};
        s.logits = tensor_rows(z, 0, n);
        s.id = tensor_rows(id, 0, n);
        s.logp = tensor_rows(logp, 0, n);
        rc = dev_logits(r->d, s.logits, tensor_rows(a.x, 0, n), a.w);
        if (rc == 0) rc = dev_sample(r->d, &s);
        a.target = id;
        if (rc == 0) rc = dev_lmhead_fwd(r->d, &a);
        if (rc < 0) break;
        float *sampled = down_values(r, s.logp), *scored = down_values(r, a.logp);
        const int64_t at = first_diff(sampled, scored, n);
        if (at >= 0)
            fail_msg("row %lld drawn in a call of %lld: log-prob %.9g, scored among %lld %.9g", (long long)at, (long long)n,
                     (double)sampled[at], (long long)r->rows, (double)scored[at]);
        for (int64_t i = 0; i < n; i++) assert_true(isfinite(sampled[i]) && sampled[i] <= 1e-6f);
        free(sampled);
        free(scored);
    }
    free(param);
    return rc;
}

static void test_sampled_batch_invariant(void **state) {
    (void)state;
    static const enum dtype act[] = {DT_F32, DT_BF16};
    const struct op_shape *shape = gpu_head();
    const struct op_def op = {"lmhead", lmhead_setup, lmhead_fwd, NULL, shape, 1, true};
    int ran = 0;
    for (int b = 0; b < two.n; b++)
        for (int64_t k = 0; strcmp(two.name[b], "cuda") == 0 && k < COUNT(act); k++) {
            struct run r;
            run_init(&r, &op, shape, act[k], &two.dev[b]);
            const int rc = check_batch(&r);
            run_free(&r);
            if (rc == ERR_UNSUPPORTED) report_skip(two.name[b], "sampled log-prob");
            else if (rc < 0) fail_msg("%s: %s", two.name[b], err_msg());
            ran++;
        }
    if (!ran) print_message("skip: no GPU\n");
}

/* ---- a decoding step against its parts ---- */

enum { STEP_BLOCKS = 3, STEP_BLOCK_LEN = 16, STEP_AT = 1, STEP_MAX = 3 };

/* What a step has to do, row by row: filled by the parts, then held against the op. */
struct step {
    struct decode_row *rows;
    int32_t *stop, *block_table, *ids, *pos, *slots, *drawn; /* stop (n, 2) */
    float *logp, *kept;
};

static void step_init(struct step *e, const struct run *r, int64_t n) {
    struct rng g = {.seed = 6, .stream = RNG_TEST};
    *e = (struct step){xcalloc((size_t)n, sizeof *e->rows),
                       xcalloc((size_t)n * 2, 4),
                       xcalloc((size_t)n * STEP_BLOCKS, 4),
                       xcalloc((size_t)n, 4),
                       xcalloc((size_t)n, 4),
                       xcalloc((size_t)n, 4),
                       xcalloc((size_t)n, 4),
                       xcalloc((size_t)n, 4),
                       xcalloc((size_t)n, 4)};
    for (int64_t i = 0; i < n; i++) {
        e->rows[i] = (struct decode_row){.rule = {.inv_temp = r->in[2].f[i],
                                                  .top_p = i % 5 == 4 ? 0.9f : 1,
                                                  .repetition_penalty = 1,
                                                  .top_k = i % 7 == 3 ? 40 : 0,
                                                  .greedy = i % 11 == 6},
                                         .sample = (uint32_t)(i % 3),
                                         .at = (uint32_t)(i * 5),
                                         .seed = 17,
                                         .uid = (uint64_t)i / 3,
                                         .left = (int32_t)(i % 6 == 5 ? 0 : i % 4 + 1)};
        for (int64_t k = 0; k < STEP_BLOCKS; k++) e->block_table[i * STEP_BLOCKS + k] = (int32_t)(i * STEP_BLOCKS + k);
        e->pos[i] = (int32_t)(rng_unit(&g) * (STEP_BLOCKS * STEP_BLOCK_LEN - 1)); /* the next has a KV block */
        e->ids[i] = -5, e->slots[i] = -7, e->drawn[i] = -1;                       /* of a row that idles: stays       */
        e->logp[i] = e->kept[i] = NAN;
    }
}
static void step_free(struct step *e) {
    void *const all[] = {e->rows, e->stop, e->block_table, e->ids, e->pos, e->slots, e->drawn, e->logp, e->kept};
    for (size_t i = 0; i < sizeof all / sizeof *all; i++) free(all[i]);
}

/* The draws by dev_logits and dev_sample, then the books by hand; each ninth row's draw ends it. */
static int step_by_parts(struct run *r, const struct lmhead_args *a, struct tensor z, struct step *e, int64_t n) {
    struct sample_param *param = xcalloc((size_t)n, sizeof *param);
    for (int64_t i = 0; i < n; i++) {
        const struct decode_row *w = &e->rows[i];
        param[i] = w->rule;
        param[i].u = rng_token(w->seed, w->uid, w->sample, w->at);
    }
    const struct sample_args s = {.logits = z,
                                  .param = param,
                                  .id = dev_new(r, shape_1d(DT_I32, n), false),
                                  .logp = dev_new(r, shape_1d(DT_F32, n), false),
                                  .logp_kept = dev_new(r, shape_1d(DT_F32, n), false)};
    int rc = dev_logits(r->d, z, tensor_rows(a->x, 0, n), a->w);
    if (rc == 0) rc = dev_sample(r->d, &s);
    free(param);
    TRY(rc);
    float *id = down_values(r, s.id), *logp = down_values(r, s.logp), *kept = down_values(r, s.logp_kept);
    for (int64_t i = 0; i < n; i++) {
        struct decode_row *w = &e->rows[i];
        e->stop[2 * i] = -1, e->stop[2 * i + 1] = i % 9 == 2 ? (int32_t)id[i] : -1;
        if (w->left == 0) continue;
        e->drawn[i] = (int32_t)id[i], e->logp[i] = logp[i], e->kept[i] = kept[i];
        w->at++;
        w->left = i % 9 == 2 ? 0 : w->left - 1;
        if (w->left == 0) continue;
        e->ids[i] = e->drawn[i];
        e->pos[i]++;
        e->slots[i] = e->block_table[i * STEP_BLOCKS + e->pos[i] / STEP_BLOCK_LEN] * STEP_BLOCK_LEN + e->pos[i] % STEP_BLOCK_LEN;
    }
    free(id);
    free(logp);
    free(kept);
    return 0;
}

/* Integers come back as floats: all of these are small. */
static void same_numbers(struct run *r, struct tensor got, int64_t from, const int32_t *want, int64_t n, const char *what) {
    float *v = down_values(r, got);
    for (int64_t i = 0; i < n; i++)
        if ((int32_t)v[from + i] != want[i])
            fail_msg("%s of row %lld of %lld: %d, not %d", what, (long long)i, (long long)n, (int)v[from + i], want[i]);
    free(v);
}
static void same_bits(struct run *r, struct tensor got, const float *want, int64_t n, const char *what) {
    float *v = down_values(r, got);
    for (int64_t i = 0; i < n; i++) /* a row that idled: what was there, NaN */
        if (isnan(want[i]) ? !isnan(v[STEP_AT * n + i]) : memcmp(&v[STEP_AT * n + i], &want[i], 4) != 0)
            fail_msg("%s of row %lld of %lld: %.9g, by its parts %.9g", what, (long long)i, (long long)n,
                     (double)v[STEP_AT * n + i], (double)want[i]);
    for (int64_t i = 0; i < n; i++) assert_true(isnan(v[i]) && isnan(v[(STEP_MAX - 1) * n + i])); /* other steps' results */
    free(v);
}

/* given: the step finds its logits there. */
static int check_step(struct run *r, int64_t n, bool given) {
    struct lmhead_args a;
    struct step e;
    int32_t at = STEP_AT;
    TRY(lmhead_args(r, &a));
    const struct tensor z = dev_new(r, shape_2d(DT_F32, n, r->s->n), false);
    step_init(&e, r, n);
    const struct tensor rows = dev_new(r, shape_2d(DT_U8, n, (int64_t)sizeof *e.rows), false);
    run_copy_in(r, rows.data, e.rows, (size_t)n * sizeof *e.rows);
    struct decode_args d = {.x = tensor_rows(a.x, 0, n),
                            .w = a.w,
                            .rows = rows,
                            .block_len = STEP_BLOCK_LEN,
                            .ids = up_i32(r, shape_1d(DT_I32, n), e.ids),
                            .pos = up_i32(r, shape_1d(DT_I32, n), e.pos),
                            .slots = up_i32(r, shape_1d(DT_I32, n), e.slots),
                            .block_table = up_i32(r, shape_2d(DT_I32, n, STEP_BLOCKS), e.block_table),
                            .step = up_i32(r, shape_1d(DT_I32, 1), &at),
                            .logits = dev_new(r, shape_2d(DT_F32, n, r->s->n), false),
                            .id = dev_new(r, shape_2d(DT_I32, STEP_MAX, n), false),
                            .logp = dev_new(r, shape_2d(DT_F32, STEP_MAX, n), false),
                            .logp_kept = dev_new(r, shape_2d(DT_F32, STEP_MAX, n), false)};
    int rc = step_by_parts(r, &a, z, &e, n);
    if (rc == 0) {
        d.stop = up_i32(r, shape_2d(DT_I32, n, 2), e.stop);
        if (given) d.logits = z, d.x = TENSOR_NONE, d.w = (struct weight){0};
        rc = dev_decode_next(r->d, &d);
    }
    if (rc == 0) {
        at++;
        float *got = down_values(r, d.logits), *want = down_values(r, z);
        assert_true(first_diff(got, want, n * r->s->n) < 0);
        free(got);
        free(want);
        same_bits(r, d.logp, e.logp, n, "log-prob");
        same_bits(r, d.logp_kept, e.kept, n, "log-prob among the kept");
        same_numbers(r, d.id, STEP_AT * n, e.drawn, n, "id");
        same_numbers(r, d.ids, 0, e.ids, n, "next id");
        same_numbers(r, d.pos, 0, e.pos, n, "position");
        same_numbers(r, d.slots, 0, e.slots, n, "slot");
        same_numbers(r, d.step, 0, &at, 1, "step");
        struct decode_row *moved = xcalloc((size_t)n, sizeof *moved);
        rc = dev_copy_out(r->d, moved, rows.data, (size_t)n * sizeof *moved);
        if (rc == 0) assert_memory_equal(moved, e.rows, (size_t)n * sizeof *moved);
        free(moved);
    }
    step_free(&e);
    return rc;
}

/* On a GPU the fused head kernel serves steps of many rows, cuBLASLt those of few. */
static void test_decode_step(void **state) {
    (void)state;
    static const enum dtype act[] = {DT_F32, DT_BF16};
    const int64_t calls[] = {gpu_head()->rows, 80, 129, 1};
    static const struct op_shape small = {.rows = 300, .n = 500, .k = 40};
    const struct op_def op = {"lmhead", lmhead_setup, lmhead_fwd, NULL, gpu_head(), 1, true};
    for (int b = 0; b < two.n; b++)
        for (int64_t k = 0; k < COUNT(act); k++)
            for (int64_t i = 0; i < cases_of(2 * COUNT(calls), 4); i++) {
                struct run r;
                run_init(&r, &op, strcmp(two.name[b], "cuda") == 0 ? gpu_head() : &small, act[k], &two.dev[b]);
                const int rc = check_step(&r, calls[i / 2], i % 2);
                run_free(&r);
                if (rc == ERR_UNSUPPORTED) report_skip(two.name[b], "decoding step");
                else if (rc < 0) fail_msg("%s: %s", two.name[b], err_msg());
            }
}

/* ---- some rows of a head against all of it ---- */

/* Of the entries from each chunk on, and of one chunk: as ranks have them (model/parallel/tensor_parallel.h). */
static int check_head_rows(struct run *r) {
    struct lmhead_args a;
    const int64_t n = r->s->n, rows = r->s->rows;
    TRY(lmhead_args(r, &a));
    const struct tensor all = dev_new(r, shape_2d(DT_F32, rows, n), false);
    TRY(dev_logits(r->d, all, a.x, a.w));
    float *const want = down_values(r, all);
    for (int64_t i = 0, lo = 0; lo < n; lo += i++ % 2 * DEV_VOCAB_CHUNK) {
        const int64_t cols = i % 2 && n - lo > DEV_VOCAB_CHUNK ? DEV_VOCAB_CHUNK : n - lo;
        struct weight part = a.w;
        if (lo > 0) part.data = (char *)part.data + dev_weight_bytes(r->d, part.dt, lo, part.k);
        part.n = cols;
        part.of = n;
        const struct tensor some = dev_new(r, shape_2d(DT_F32, rows, cols), false);
        const int rc = dev_logits(r->d, some, a.x, part);
        float *const got = rc < 0 ? NULL : down_values(r, some);
        for (int64_t k = 0; got && k < rows; k++)
            if (first_diff(got + k * cols, want + k * n + lo, cols) >= 0)
                fail_msg("logits [%lld, %lld) of row %lld are others alone", (long long)lo, (long long)(lo + cols), (long long)k);
        free(got);
        if (rc < 0) free(want);
        TRY(rc);
    }
    free(want);
    return 0;
}

static void test_head_rows(void **state) {
    (void)state;
    static const enum dtype act[] = {DT_F32, DT_BF16};
    static const struct op_shape small = {.rows = 3, .n = 9001, .k = 40};
    const struct op_def op = {"lmhead", lmhead_setup, lmhead_fwd, NULL, gpu_head(), 1, true};
    for (int b = 0; b < two.n; b++)
        for (int64_t k = 0; k < COUNT(act); k++) {
            struct run r;
            run_init(&r, &op, strcmp(two.name[b], "cuda") == 0 ? gpu_head() : &small, act[k], &two.dev[b]);
            const int rc = check_head_rows(&r);
            run_free(&r);
            if (rc == ERR_UNSUPPORTED) report_skip(two.name[b], "rows of a head");
            else if (rc < 0) fail_msg("%s: %s", two.name[b], err_msg());
        }
}

int main(void) {
    struct CMUnitTest tests[2 * N_OPS + 5];
    static char names[2 * N_OPS][40];
    backends_open(&two, 2);
    backends_open(&one, 1);
    for (int64_t i = 0; i < 2 * N_OPS; i++) {
        const struct op_def *op = &ops_table[i / 2];
        snprintf(names[i], sizeof names[i], "%s: %s", op->name, i % 2 ? "threads" : "rows");
        tests[i] = (struct CMUnitTest){names[i], i % 2 ? test_threads : test_rows, NULL, NULL, (void *)(uintptr_t)op};
    }
    tests[2 * N_OPS] = (struct CMUnitTest){"inv01_sampled_logp", test_sampled_logp, NULL, NULL, NULL};
    tests[2 * N_OPS + 1] = (struct CMUnitTest){"inv01_sampled_batch_invariant", test_sampled_batch_invariant, NULL, NULL, NULL};
    tests[2 * N_OPS + 2] = (struct CMUnitTest){"the most probable entries", test_top, NULL, NULL, NULL};
    tests[2 * N_OPS + 3] = (struct CMUnitTest){"inv01_decode_step", test_decode_step, NULL, NULL, NULL};
    tests[2 * N_OPS + 4] = (struct CMUnitTest){"inv01_head_rows", test_head_rows, NULL, NULL, NULL};
    const int failed = cmocka_run_group_tests_name("ops: rows and threads", tests, NULL, NULL);
    backends_close(&two);
    backends_close(&one);
    return failed;
}
