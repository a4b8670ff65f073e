/* test_device_grad.c - backward against central differences of forward, in f32, on
 * every backend: along single elements and along random directions of every
 * differentiable input.
 *
 * The loss is sum dy * y over the results that have a gradient.  A difference
 * is taken at two step sizes; their extrapolation removes the quadratic error
 * and their distance shows when a step was badly chosen. */
#include "ops/ops_table.h"

static struct backends backends;

static const struct op_shape small_rows[] = {{.rows = 3, .n = 10}, {.rows = 17, .n = 33}};
static const struct op_shape small_table[] = {{.rows = 7, .n = 9, .k = 5}};
static const struct op_shape small_matmul[] = {{.rows = 5, .n = 7, .k = 6, .flags = S_BIAS},
                                               {.rows = 17, .n = 33, .k = 20, .flags = S_BIAS | S_ADD}};
static const struct op_shape small_norm[] = {{.rows = 1, .n = 1},
                                             {.rows = 7, .n = 17},
                                             {.rows = 7, .n = 17, .k = NORM_SCALE_CAST},
                                             {.rows = 7, .n = 17, .k = NORM_ONE_PLUS}};
static const struct op_shape small_qk_norm[] = {{.rows = 3, .n = 8, .k = 4}, {.rows = 7, .n = 34, .k = 6, .hq = NORM_ONE_PLUS}};
static const struct op_shape small_rope_norm[] = {{.rows = 3, .hq = 1, .hk = 1, .dim = 8},
                                                  {.rows = 7, .hq = 3, .hk = 1, .dim = 18}};
static const struct op_shape small_qkv[] = {{.rows = 4, .hq = 2, .hk = 1, .dim = 16},
                                            {.rows = 9, .hq = 4, .hk = 2, .dim = 32, .flags = S_NORM},
                                            {.rows = 4, .hq = 2, .hk = 1, .dim = 16, .flags = S_PARTIAL | S_PAIRS},
                                            {.rows = 4, .hq = 2, .hk = 1, .dim = 16, .flags = S_PARTIAL | S_NORM},
                                            {.rows = 4, .hq = 2, .hk = 1, .dim = 16, .flags = S_NORM | S_ONE_PLUS},
                                            {.rows = 4, .hq = 2, .hk = 1, .dim = 16, .flags = S_PARTIAL | S_NORM | S_ONE_PLUS},
                                            {.rows = 9, .hq = 1, .hk = 1, .dim = 12, .flags = S_PAIRS | S_NORM}};
static const struct op_shape small_attn[] = {{.rows = 5, .hq = 1, .hk = 1, .dim = 16, .lens = {5}},
                                             {.rows = 80, .hq = 2, .hk = 1, .dim = 16, .lens = {70, 10}},
                                             {.rows = 75, .hq = 7, .hk = 1, .dim = 16, .window = 9, .lens = {66, 9}},
                                             {.rows = 75, .hq = 2, .hk = 1, .dim = 16, .lens = {66, 9}, .flags = S_SOFTCAP}};
static const struct op_shape small_conv[] = {{.rows = 3, .n = 5, .lens = {3}}, {.rows = 20, .n = 17, .lens = {1, 12, 7}}};
static const struct op_shape small_delta[] = {{.rows = 5, .hk = 1, .hq = 1, .dim = 16, .k = 16, .lens = {5}},
                                              {.rows = 80, .hk = 1, .hq = 2, .dim = 16, .k = 16, .lens = {70, 10}}};
static const struct op_shape small_split[] = {{.rows = 3, .hq = 2, .dim = 3, .k = 4}};
static const struct op_shape small_head[] = {{.rows = 3, .n = 11, .k = 8, .flags = S_ENTROPY},
                                             {.rows = 5, .n = 300, .k = 16},
                                             {.rows = 2, .n = 4100, .k = 8, .flags = S_ENTROPY},
                                             {.rows = 3, .n = 11, .k = 8, .flags = S_ENTROPY | S_SOFTCAP}};
static const struct op_shape small_lists[] = {{.rows = 3, .n = 11, .k = 8, .window = 4, .flags = S_ENTROPY},
                                              {.rows = 2, .n = 300, .k = 16, .window = 7},
                                              {.rows = 2, .n = 30, .k = 8, .window = 7, .flags = S_ENTROPY | S_SOFTCAP}};
static const struct op_shape small_route[] = {
    {.rows = 3, .hq = 4, .hk = 2, .flags = S_NORM}, {.rows = 5, .hq = 6, .hk = 3}, {.rows = 4, .hq = 40, .hk = 8, .flags = S_NORM}};
static const struct op_shape small_losses[] = {
    {.rows = 3, .hq = 4, .hk = 2}, {.rows = 5, .hq = 6, .hk = 3, .flags = S_SOFTCAP}, {.rows = 4, .hq = 40, .hk = 8}};
static const struct op_shape small_experts[] = {{.rows = 9, .n = 7, .k = 6, .hq = 5, .hk = 2},
                                                {.rows = 20, .n = 8, .k = 16, .hq = 4, .hk = 3, .flags = S_ADD}};

/* Logits that are far enough from each other that no step changes their order. */
static void route_apart_setup(struct run *r) {
    route_setup(r);
    for (int64_t t = 0, n = r->s->hq; t < r->rows; t++)
        for (int64_t e = 0; e < n; e++) r->in[0].f[t * n + e] = 0.3f * (float)((e * 7 + t * 3) % n);
}

static const struct op_shape small_expert_bias[] = {{.rows = 7, .n = 5, .hq = 3}};
static const struct op_shape small_sink[] = {{.rows = 5, .hq = 3, .dim = 8}, {.rows = 20, .hq = 2, .dim = 16}};
static const struct op_shape small_mla[] = {{.rows = 5, .hq = 3, .n = 6, .k = 4, .dim = 9},
                                            {.rows = 3, .hq = 2, .n = 3, .k = 6, .dim = 8, .flags = S_PAIRS}};
static const struct op_shape small_heads[] = {{.rows = 5, .hq = 3, .n = 6, .k = 4, .dim = 5},
                                              {.rows = 3, .hq = 2, .n = 4, .k = 32, .dim = 8}};
static const struct op_shape small_score_route[] = {
    {.rows = 3, .hq = 8, .hk = 3, .n = 4, .k = 2, .flags = S_NORM | S_SOFTCAP | S_ADD},
    {.rows = 4, .hq = 6, .hk = 2, .flags = S_SOFTCAP | S_ADD},
    {.rows = 4, .hq = 12, .hk = 3, .n = 4, .k = 2},
    {.rows = 4, .hq = 12, .hk = 3, .n = 4, .k = 2, .flags = S_NORM}};
/* Values that no step takes over a limit. */
static void clamped_apart_setup(struct run *r) {
    clamped_setup(r);
    for (int64_t i = 0; i < slot_count(&r->in[0]); i++)
        if (fabsf(fabsf(r->in[0].f[i]) - 2.5f) < 0.3f) r->in[0].f[i] *= 0.5f;
}
static void score_apart_setup(struct run *r) {
    route_apart_setup(r);
    add_in(r, "bias", shape_1d(DT_F32, r->s->hq), false, 0.0f, 0);
}

static const struct op_def grad_table[] = {
    {"embed", embed_setup, embed_fwd, embed_bwd, SHAPES(small_table), true},
    {"gather", gather_setup, gather_fwd, gather_bwd, SHAPES(small_table), true},
    {"rmsnorm", rmsnorm_setup, rmsnorm_fwd, rmsnorm_bwd, SHAPES(small_norm), true},
    {"qk_norm", qk_norm_setup, qk_norm_fwd, qk_norm_bwd, SHAPES(small_qk_norm), true},
    {"rope_norm", rope_norm_setup, rope_norm_fwd, rope_norm_bwd, SHAPES(small_rope_norm), true},
    {"matmul", matmul_setup, matmul_fwd, matmul_bwd, SHAPES(small_matmul), true},
    {"swiglu", swiglu_setup, swiglu_fwd, swiglu_bwd, SHAPES(small_rows), true},
    {"geglu", swiglu_setup, geglu_fwd, geglu_bwd, SHAPES(small_rows), true},
    {"qkv", qkv_setup, qkv_fwd, qkv_bwd, SHAPES(small_qkv), true},
    {"attn", attn_setup, attn_fwd, attn_bwd, SHAPES(small_attn), false},
    {"conv", conv_setup, conv_fwd, conv_bwd, SHAPES(small_conv), false},
    {"delta", delta_setup, delta_fwd, delta_bwd, SHAPES(small_delta), false},
    {"gated norm", gated_norm_setup, gated_norm_fwd, gated_norm_bwd, SHAPES(small_rows), true},
    {"output gate", gate_setup, gate_fwd, gate_bwd, SHAPES(small_rows), true},
    {"gate split", split_setup, split_fwd, split_bwd, SHAPES(small_split), true},
    {"lmhead", lmhead_setup, lmhead_fwd, lmhead_bwd, SHAPES(small_head), true},
    {"lmhead lists", lists_setup, lists_fwd, lmhead_bwd, SHAPES(small_lists), true},
    {"route", route_apart_setup, route_fwd, route_bwd, SHAPES(small_route), true},
    {"score route", score_apart_setup, score_route_fwd, score_route_bwd, SHAPES(small_score_route), true},
    {"balance", balance_setup, balance_fwd, balance_bwd, SHAPES(small_route), true},
    {"router losses", router_losses_setup, router_losses_fwd, router_losses_bwd, SHAPES(small_losses), true},
    {"experts", experts_setup, experts_fwd, experts_bwd, SHAPES(small_experts), true},
    {"expert bias", expert_bias_setup, expert_bias_fwd, expert_bias_bwd, SHAPES(small_expert_bias), false},
    {"clamped swiglu", clamped_apart_setup, clamped_fwd, clamped_bwd, SHAPES(small_rows), true},
    {"sink", sink_setup, sink_fwd, sink_bwd, SHAPES(small_sink), true},
    {"mla", mla_setup, mla_fwd, mla_bwd, SHAPES(small_mla), true},
    {"heads", heads_setup, heads_fwd, heads_bwd, SHAPES(small_heads), true},
    {"row gate", row_gate_setup, row_gate_fwd, row_gate_bwd, SHAPES(small_rows), true},
};

/* Loss with input `in` moved by eps * dir. move (count) receives the move that f32 kept; size gets
 * the root of the sum of the squared terms. */
static double loss_at(struct run *r, const struct op_def *op, int in, const float *dir, double eps, double *move, double *size) {
    struct slot *s = &r->in[in];
    const int64_t n = slot_count(s);
    float *saved = s->f, *moved = xcalloc((size_t)n, sizeof *moved);
    for (int64_t i = 0; i < n; i++) {
        moved[i] = (float)(saved[i] + eps * dir[i]);
        move[i] = (double)moved[i] - saved[i];
    }
    s->f = moved;
    run_free_results(r);
    if (op->fwd(r) < 0) fail_msg("%s: %s", op->name, err_msg());
    run_free_blocks(r);
    s->f = saved;
    free(moved);
    double loss = 0, sq = 0;
    for (int k = 0; k < r->n_gout; k++)
        for (int64_t i = 0; i < slot_count(&r->gout[k]); i++) {
            const double term = (double)r->gout[k].f[i] * r->out[k].f[i];
            loss += term;
            sq += term * term;
        }
    *size = sqrt(sq);
    return loss;
}

/* Error of the difference quotient against grad . dir, both along the moves really made, beyond
 * what f32 rounding of the results explains; relative to the size that grad . dir has when its
 * terms do not cancel. */
static double quotient_error(struct run *r, const struct op_def *op, int in, const float *dir, const float *grad, double eps) {
    const int64_t n = slot_count(&r->in[in]);
    double *up_by = xcalloc((size_t)n, sizeof *up_by), *down_by = xcalloc((size_t)n, sizeof *down_by);
    double err[2], size = 0, noise = 0;
    for (int k = 0; k < 2; k++, eps /= 2) {
        double loss_size, sq = 0, want = 0;
        const double up_loss = loss_at(r, op, in, dir, eps, up_by, &loss_size);
        const double diff = up_loss - loss_at(r, op, in, dir, -eps, down_by, &loss_size);
        for (int64_t i = 0; i < n; i++) {
            const double term = grad[i] * (up_by[i] - down_by[i]);
            want += term;
            sq += term * term;
        }
        err[k] = (diff - want) / (2 * eps);
        size = sqrt(sq) / (2 * eps);
        /* each result errs by 2^-24 in storing and about as much again in f32 sums */
        noise = 2 * 0x1p-24 * loss_size / eps;
    }
    free(up_by);
    free(down_by);
    const double e = fabs((4 * err[1] - err[0]) / 3) - noise;
    return e <= 0 ? 0 : e / (size > 0 ? size : 1e-300);
}

static double check_input(struct run *r, const struct op_def *op, int in, const float *grad) {
    enum { ELEMENTS = 6, DIRECTIONS = 3 };
    const int64_t n = slot_count(&r->in[in]);
    struct rng g = {.seed = 5, .stream = RNG_TEST};
    float *dir = xcalloc((size_t)n, sizeof *dir);
    double worst = 0;
    for (int k = 0; k < ELEMENTS + DIRECTIONS; k++) {
        const bool one = k < ELEMENTS;
        for (int64_t i = 0; i < n; i++) dir[i] = one ? 0 : rng_normal(&g);
        if (one) dir[rng_below(&g, (uint64_t)n)] = 1;
        /* Steps that move the loss by far more than f32 rounding of the results does, and by little
         * enough that the fourth-order error vanishes; a direction moves every element. */
        const double e = quotient_error(r, op, in, dir, grad, one ? 0.03 : 0.02);
        if (e > worst) worst = e;
    }
    free(dir);
    return worst;
}

static bool check_grad(const struct op_def *op, int backend) {
    double worst = 0;
    for (int64_t i = 0; i < op->n_shapes; i++) {
        struct run r, grad;
        run_init(&r, op, &op->shapes[i], DT_F32, &backends.dev[backend]);
        run_init(&grad, op, &op->shapes[i], DT_F32, &backends.dev[backend]);
        const int rc = run_exec(&grad, op);
        if (rc < 0 && rc != ERR_UNSUPPORTED) fail_msg("%s %s: %s", backends.name[backend], op->name, err_msg());
        for (int k = 0; k < grad.n_gin && rc == 0; k++) {
            const double e = check_input(&r, op, grad.gin[k].in, grad.gin[k].f);
            /* a wrong factor or term shows at 1e-2 and more; fourth-order errors stay below this */
            if (!(e <= 5e-4))
                fail_msg("%s %s: gradient of %s is off by %.3g relative to finite differences", backends.name[backend], op->name,
                         grad.gin[k].name, e);
            if (e > worst) worst = e;
        }
        run_free(&r);
        run_free(&grad);
        if (rc < 0) return false;
    }
    print_message("%-15s %-8s worst relative error beyond f32 rounding %.2g\n", backends.name[backend], op->name, worst);
    return true;
}

static void test_grad(void **state) {
    const struct op_def *op = *state;
    for (int b = 0; b < backends.n; b++)
        if (!check_grad(op, b)) report_skip(backends.name[b], op->name);
}

int main(void) {
    struct CMUnitTest tests[COUNT(grad_table)];
    backends_open(&backends, 2);
    for (int64_t i = 0; i < COUNT(grad_table); i++)
        tests[i] = (struct CMUnitTest){grad_table[i].name, test_grad, NULL, NULL, (void *)(uintptr_t)&grad_table[i]};
    const int failed = cmocka_run_group_tests_name("ops: backward against finite differences", tests, NULL, NULL);
    backends_close(&backends);
    return failed;
}
