/* test_model_delta_net.c - the ops of a gated delta net layer, put together, against Hugging Face transformers' layer of
 * Qwen3.5 in fp32: output and every gradient, on every backend; packed and token by token from the state.
 * The fixture comes from tools/oracle_delta_net.py. */
#include "model_case.h"

/* transformers' own two forms (chunks, token by token) are 1.3e-6 of the largest output away from each other on the fixture, by the
 * rounding of f32 sums; so are we from either. A wrong term is 1e-2 and more. */
static const double MAX_REL = 1e-5, MAX_NMSE = 1e-9;
enum { HIDDEN = 32, HK = 2, HV = 4, DK = 16, DV = 32, QKV = 2 * HK * DK + HV * DV, VALUE = HV * DV, MAX_ROWS = 160 };
#define EPS 1e-6f

static const char *const BACKENDS[] = {"ref", "cpu", "cuda"};
static const char *const PROJECTIONS[] = {"in_proj_qkv", "in_proj_z", "in_proj_b", "in_proj_a", "out_proj"};
enum { W_QKV, W_Z, W_B, W_A, W_OUT, N_PROJECTIONS };

struct layer {
    struct dev dev;
    struct safetensors_file *golden;
    struct weight w[N_PROJECTIONS];
    struct tensor conv, a_log, dt_bias, norm; /* parameters */
    struct tensor qkv, u, z, b, a, ba, o, n, y, rstd, states, e;
    struct tensor all[64];
    int n_all;
};

static struct tensor keep(struct layer *l, struct tensor t) {
    assert_true(l->n_all < 64);
    return l->all[l->n_all++] = t;
}
static struct tensor rows_of(struct layer *l, int64_t n, int64_t cols) {
    const size_t bytes = (size_t)(n * cols) * sizeof(float);
    return keep(l, tensor_2d(case_garbage(&l->dev, bytes), DT_F32, n, cols));
}
/* A tensor of the fixture as (n, cols) on the device. */
static struct tensor golden_of(struct layer *l, const char *name, int64_t cols) {
    int64_t n;
    const float *f = case_data(l->golden, name, DT_F32, &n);
    struct tensor t = rows_of(l, n / cols, cols);
    OK(dev_copy_in(&l->dev, t.data, f, (size_t)n * sizeof *f));
    return t;
}
static struct tensor flat(struct tensor t) { return tensor_1d(t.data, t.dt, tensor_count(t)); }
static struct tensor zeros(struct layer *l, int64_t n, int64_t cols) {
    struct tensor t = rows_of(l, n, cols);
    OK(dev_zero(&l->dev, t.data, (size_t)(n * cols) * sizeof(float)));
    return t;
}

static void layer_open(struct layer *l, const char *backend) {
    *l = (struct layer){0};
    case_dev(&l->dev, backend, 2);
    OK(safetensors_open(&l->golden, FIXTURES "/delta_net/layer.safetensors"));
    for (int i = 0; i < N_PROJECTIONS; i++) {
        char name[64];
        snprintf(name, sizeof name, "w.%s.weight", PROJECTIONS[i]);
        const struct tensor w = golden_of(l, name, i == W_OUT ? VALUE : HIDDEN);
        const size_t bytes = dev_weight_bytes(&l->dev, DT_F32, w.dim[0], w.dim[1]);
        l->w[i] = (struct weight){.data = case_alloc(&l->dev, bytes), .dt = DT_F32, .n = w.dim[0], .k = w.dim[1]};
        OK(dev_weight_pack(&l->dev, l->w[i], w));
    }
    l->conv = golden_of(l, "w.conv1d.weight", DEV_CONV_TAPS);
    l->a_log = flat(golden_of(l, "w.A_log", 1));
    l->dt_bias = flat(golden_of(l, "w.dt_bias", 1));
    l->norm = flat(golden_of(l, "w.norm.weight", DV));
}
static void layer_close(struct layer *l) {
    for (int i = 0; i < N_PROJECTIONS; i++)
        dev_free(&l->dev, l->w[i].data, dev_weight_bytes(&l->dev, DT_F32, l->w[i].n, l->w[i].k));
    for (int i = 0; i < l->n_all; i++) case_free(&l->dev, l->all[i]);
    safetensors_close(l->golden);
    dev_close(&l->dev);
}
static void drop_to(struct layer *l, int n) {
    while (l->n_all > n) case_free(&l->dev, l->all[--l->n_all]);
}

static float *host_of(struct layer *l, struct tensor t) {
    float *f = xmalloc((size_t)tensor_count(t) * sizeof *f);
    OK(dev_copy_out(&l->dev, f, t.data, (size_t)tensor_count(t) * sizeof *f));
    return f;
}
/* t is the fixture's, or rows [0, rows of t) of it from `from` on. */
static void check(struct layer *l, struct tensor t, const char *name, int64_t from, const char *backend) {
    int64_t n;
    const float *want = case_data(l->golden, name, DT_F32, &n);
    float *got = host_of(l, t);
    const int64_t count = tensor_count(t), lo = from * (t.nd > 1 ? t.dim[1] : 1);
    double top = 0, off = 0, err = 0, sum = 0;
    assert_true(lo + count <= n);
    for (int64_t i = 0; i < n; i++) top = fmax(top, fabs((double)want[i]));
    for (int64_t i = 0; i < count; i++) {
        const double d = (double)got[i] - want[lo + i];
        if (!(fabs(d) <= MAX_REL * top))
            fail_msg("%s: %s[%lld] is %.9g, transformers has %.9g", backend, name, (long long)(lo + i), (double)got[i],
                     (double)want[lo + i]);
        off = fmax(off, fabs(d) / top);
        err += d * d;
        sum += (double)want[lo + i] * want[lo + i];
    }
    assert_true(err <= MAX_NMSE * sum || count < 100); /* of a few numbers the largest is as good */
    if (count > 1000) print_message("%-5s %-12s largest difference %.1e of the largest\n", backend, name, off);
    free(got);
}

/* b and a of each row in one tensor. */
static void join_ba(struct layer *l) {
    float *b = host_of(l, l->b), *a = host_of(l, l->a);
    const int64_t rows = l->b.dim[0];
    float *ba = xmalloc((size_t)(rows * 2 * HV) * sizeof *ba);
    for (int64_t t = 0; t < rows; t++)
        for (int64_t h = 0; h < HV; h++) {
            ba[t * 2 * HV + h] = b[t * HV + h];
            ba[t * 2 * HV + HV + h] = a[t * HV + h];
        }
    OK(dev_copy_in(&l->dev, l->ba.data, ba, (size_t)(rows * 2 * HV) * sizeof *ba));
    free(b);
    free(a);
    free(ba);
}

/* The layer on x; seqs and a state, or NULL, as the ops have them. */
static void forward(struct layer *l, struct tensor x, struct causal_conv_args *conv, struct delta_args *delta,
                    struct gated_norm_args *norm, bool for_backward) {
    struct dev *d = &l->dev;
    const int64_t rows = x.dim[0];
    l->qkv = rows_of(l, rows, QKV), l->u = rows_of(l, rows, QKV), l->z = rows_of(l, rows, VALUE);
    l->b = rows_of(l, rows, HV), l->a = rows_of(l, rows, HV), l->ba = rows_of(l, rows, 2 * HV);
    l->o = rows_of(l, rows, VALUE), l->n = rows_of(l, rows, VALUE), l->y = rows_of(l, rows, HIDDEN);
    l->rstd = flat(rows_of(l, rows * HV, 1));
    OK(dev_matmul_fwd(d, l->qkv, x, l->w[W_QKV], TENSOR_NONE, false));
    OK(dev_matmul_fwd(d, l->z, x, l->w[W_Z], TENSOR_NONE, false));
    OK(dev_matmul_fwd(d, l->b, x, l->w[W_B], TENSOR_NONE, false));
    OK(dev_matmul_fwd(d, l->a, x, l->w[W_A], TENSOR_NONE, false));
    join_ba(l);
    conv->x = l->qkv, conv->w = l->conv, conv->y = l->u;
    OK(dev_causal_conv_fwd(d, conv));
    delta->n_k_heads = HK, delta->n_v_heads = HV, delta->k_dim = DK, delta->v_dim = DV;
    delta->seqs = conv->seqs, delta->qkv = l->u, delta->ba = l->ba, delta->a_log = l->a_log, delta->dt_bias = l->dt_bias;
    delta->out = l->o;
    if (for_backward) {
        delta->states = rows_of(l, rows / DEV_DELTA_CHUNK + 1, HV * DK * DV);
        delta->states = (struct tensor){delta->states.data, DT_F32, 4, {rows / DEV_DELTA_CHUNK + 1, HV, DK, DV}};
        delta->e = rows_of(l, rows, VALUE);
    }
    OK(dev_delta_fwd(d, delta));
    norm->x = tensor_2d(l->o.data, DT_F32, rows * HV, DV), norm->z = tensor_2d(l->z.data, DT_F32, rows * HV, DV);
    norm->y = tensor_2d(l->n.data, DT_F32, rows * HV, DV);
    norm->w = l->norm, norm->rstd = l->rstd, norm->eps = EPS;
    OK(dev_gated_norm_fwd(d, norm));
    OK(dev_matmul_fwd(d, l->y, l->n, l->w[W_OUT], TENSOR_NONE, false));
}

/* A projection's backward: dx (f32) += dy . W, and the gradient of W, which is compared. */
static void projection_back(struct layer *l, int i, struct tensor dx, struct tensor dy, struct tensor x, const char *backend) {
    char name[64];
    const struct tensor dw = zeros(l, dy.dim[1], x.dim[1]);
    OK(dev_matmul_dx(&l->dev, dx, dy, l->w[i], true));
    OK(dev_matmul_dw(&l->dev, dw, TENSOR_NONE, dy, x, true));
    snprintf(name, sizeof name, "grad.%s.weight", PROJECTIONS[i]);
    check(l, dw, name, 0, backend);
}
static struct tensor columns(struct layer *l, struct tensor t, int64_t lo, int64_t n) {
    float *f = host_of(l, t), *part = xmalloc((size_t)(t.dim[0] * n) * sizeof *part);
    const struct tensor out = rows_of(l, t.dim[0], n);
    for (int64_t r = 0; r < t.dim[0]; r++) memcpy(part + r * n, f + r * t.dim[1] + lo, (size_t)n * sizeof *part);
    OK(dev_copy_in(&l->dev, out.data, part, (size_t)(t.dim[0] * n) * sizeof *part));
    free(f);
    free(part);
    return out;
}

static void check_packed(struct layer *l, const char *backend) {
    struct dev *d = &l->dev;
    int64_t n;
    const int32_t *start = case_data(l->golden, "q_start", DT_I32, &n), zero[2] = {0};
    const struct tensor x = golden_of(l, "x", HIDDEN), dy = golden_of(l, "dy", HIDDEN);
    struct causal_conv_args conv = {.seqs = {.n = n - 1, .max_rows = start[2] - start[1]}};
    struct delta_args delta = {0};
    struct gated_norm_args norm = {0};
    conv.seqs.start = keep(l, case_ints(d, start, n));
    conv.seqs.pos0 = keep(l, case_ints(d, zero, n - 1));
    forward(l, x, &conv, &delta, &norm, true);
    check(l, l->y, "y", 0, backend);

    const int64_t rows = x.dim[0];
    const struct tensor dn = zeros(l, rows, VALUE), dx = zeros(l, rows, HIDDEN), dz = rows_of(l, rows, VALUE);
    const struct tensor dout = rows_of(l, rows, VALUE), dnorm = flat(zeros(l, DV, 1)), dconv = zeros(l, QKV, DEV_CONV_TAPS);
    const struct tensor du = rows_of(l, rows, QKV), dba = rows_of(l, rows, 2 * HV), dqkv = rows_of(l, rows, QKV);
    const struct tensor gates[] = {flat(zeros(l, HV, 1)), flat(zeros(l, HV, 1))};
    projection_back(l, W_OUT, dn, dy, l->n, backend);
    const struct gated_norm_bwd_args gn = {tensor_2d(dn.data, DT_F32, rows * HV, DV), tensor_2d(dout.data, DT_F32, rows * HV, DV),
                                           tensor_2d(dz.data, DT_F32, rows * HV, DV), dnorm};
    OK(dev_gated_norm_bwd(d, &norm, &gn));
    check(l, dnorm, "grad.norm.weight", 0, backend);
    const struct delta_bwd_args gd = {dout, du, dba, gates[0], gates[1]};
    OK(dev_delta_bwd(d, &delta, &gd));
    check(l, gates[0], "grad.A_log", 0, backend);
    check(l, gates[1], "grad.dt_bias", 0, backend);
    const struct causal_conv_bwd_args gc = {du, dqkv, dconv};
    OK(dev_causal_conv_bwd(d, &conv, &gc));
    check(l, dconv, "grad.conv1d.weight", 0, backend);
    projection_back(l, W_QKV, dx, dqkv, x, backend);
    projection_back(l, W_Z, dx, dz, x, backend);
    projection_back(l, W_B, dx, columns(l, dba, 0, HV), x, backend);
    projection_back(l, W_A, dx, columns(l, dba, HV, HV), x, backend);
    check(l, dx, "dx", 0, backend);
}

/* The longer sequence, a token at a time, against transformers' own recurrence. */
static void check_steps(struct layer *l, const char *backend) {
    struct dev *d = &l->dev;
    const int32_t *start = case_data(l->golden, "q_start", DT_I32, NULL), one[2] = {0, 1}, zero = 0;
    const struct tensor x = golden_of(l, "x", HIDDEN);
    const struct tensor conv_state = rows_of(l, DEV_CONV_TAPS - 1, QKV), s = rows_of(l, HV * DK, DV);
    const struct tensor k = rows_of(l, HK * DEV_DELTA_CHUNK, DK), r = rows_of(l, HK, DEV_DELTA_CHUNK),
                        e = rows_of(l, HV * DEV_DELTA_CHUNK, DV), g = rows_of(l, HV, DEV_DELTA_CHUNK);
    const int base = l->n_all;
    for (int32_t t = 0; t < start[2] - start[1]; t++) {
        struct causal_conv_args conv = {.seqs = {.n = 1, .max_rows = 1}};
        struct delta_args delta = {0};
        struct gated_norm_args norm = {0};
        conv.seqs.start = keep(l, case_ints(d, one, 2));
        conv.seqs.pos0 = keep(l, case_ints(d, &t, 1));
        conv.seqs.slot = keep(l, case_ints(d, &zero, 1));
        conv.state = (struct tensor){conv_state.data, DT_F32, 3, {1, DEV_CONV_TAPS - 1, QKV, 1}};
        delta.state.s = (struct tensor){s.data, DT_F32, 4, {1, HV, DK, DV}};
        delta.state.k = (struct tensor){k.data, DT_F32, 4, {1, HK, DEV_DELTA_CHUNK, DK}};
        delta.state.r = (struct tensor){r.data, DT_F32, 3, {1, HK, DEV_DELTA_CHUNK, 1}};
        delta.state.e = (struct tensor){e.data, DT_F32, 4, {1, HV, DEV_DELTA_CHUNK, DV}};
        delta.state.g = (struct tensor){g.data, DT_F32, 3, {1, HV, DEV_DELTA_CHUNK, 1}};
        forward(l, tensor_rows(x, start[1] + t, 1), &conv, &delta, &norm, false);
        check(l, l->y, "y.recurrent", start[1] + t, backend);
        drop_to(l, base);
    }
}

static void test_layer(void **state) {
    (void)state;
    for (size_t i = 0; i < sizeof BACKENDS / sizeof BACKENDS[0]; i++) {
        struct layer l;
        if (!case_has(BACKENDS[i])) continue;
        layer_open(&l, BACKENDS[i]);
        const int base = l.n_all;
        check_packed(&l, BACKENDS[i]);
        drop_to(&l, base);
        check_steps(&l, BACKENDS[i]);
        layer_close(&l);
    }
}

int main(void) {
    const struct CMUnitTest tests[] = {cmocka_unit_test(test_layer)};
    return cmocka_run_group_tests_name("golden: a gated delta net layer", tests, NULL, NULL);
}
