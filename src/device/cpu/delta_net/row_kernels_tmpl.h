/* row_kernels_tmpl.h - causal convolution, gated norm and output gate on one row, forward and backward; compiled by
 * each kernels_ISA.c.
 * Invariant: elementwise in the columns, or sums in the lane order of row_sum. */

VEC_FN vec conv_sum(const void *const x[DEV_CONV_TAPS], const float *w, int64_t ldw, int64_t i, int64_t k, enum dtype dt) {
    vec s = vset1(0);
    VEC_UNROLL for (int t = 0; t < DEV_CONV_TAPS; t++) s = vfma(vload_n(w + t * ldw + i, k), vload_act_n(x[t], dt, i, k), s);
    return vround_act(s, dt);
}
VEC_FN vec silu_slope(vec x) {
    const vec s = sigmoid(x);
    return vmul(s, vfma(x, vsub(vset1(1), s), vset1(1)));
}

VEC_FN void conv_row(void *y, const struct cpu_conv *p, enum dtype dt) {
    for (int64_t i = 0; i < p->n; i += VEC) {
        const int64_t k = LANES(p->n, i);
        const vec u = conv_sum(p->x, p->w, p->ldw, i, k, dt);
        vstore_act_n(y, dt, i, vmul(u, sigmoid(u)), k);
    }
}
static void kern_conv_fwd(void *y, const struct cpu_conv *p, enum dtype dt) { FOR_ACT(dt, conv_row, y, p); }

VEC_FN void conv_du_row(float *du, float *dw, const void *dy, const struct cpu_conv *p, enum dtype dt) {
    for (int64_t i = 0; i < p->n; i += VEC) {
        const int64_t k = LANES(p->n, i);
        const vec d = vmul(vload_act_n(dy, dt, i, k), silu_slope(conv_sum(p->x, p->w, p->ldw, i, k, dt)));
        vstore_n(du + i, d, k);
        for (int t = 0; t < DEV_CONV_TAPS && dw; t++) {
            float *const to = dw + t * p->n + i;
            vstore_n(to, vfma(d, vload_act_n(p->x[t], dt, i, k), vload_n(to, k)), k);
        }
    }
}
static void kern_conv_du(float *du, float *dw, const void *dy, const struct cpu_conv *p, enum dtype dt) {
    FOR_ACT(dt, conv_du_row, du, dw, dy, p);
}
VEC_FN void conv_dx_row(void *dx, const float *const du[DEV_CONV_TAPS], const struct cpu_conv *p, enum dtype dt) {
    for (int64_t i = 0; i < p->n; i += VEC) {
        const int64_t k = LANES(p->n, i);
        vec s = vset1(0);
        VEC_UNROLL for (int t = 0; t < DEV_CONV_TAPS; t++) s = vfma(vload_n(p->w + t * p->ldw + i, k), vload_n(du[t] + i, k), s);
        vstore_act_n(dx, dt, i, s, k);
    }
}
static void kern_conv_dx(void *dx, const float *const du[DEV_CONV_TAPS], const struct cpu_conv *p, enum dtype dt) {
    FOR_ACT(dt, conv_dx_row, dx, du, p);
}

VEC_FN float gated_norm_row(void *y, const struct cpu_gated_norm *p, enum dtype dt) {
    struct row_sum sq = row_sum_zero();
    for (int64_t i = 0; i < p->n; i += VEC) {
        const vec v = vload_act_n(p->x, dt, i, LANES(p->n, i));
        vec *s = &sq.s[i / VEC % 4];
        *s = vfma(v, v, *s);
    }
    const float rstd = 1.0f / sqrtf(row_sum_total(&sq) / (float)p->n + p->eps);
    for (int64_t i = 0; i < p->n; i += VEC) {
        const int64_t k = LANES(p->n, i);
        const vec v = vround_act(vmul(vload_act_n(p->x, dt, i, k), vset1(rstd)), dt), z = vload_act_n(p->z, dt, i, k);
        const vec u = vround_act(vmul(v, vload_act_n(p->w, dt, i, k)), dt);
        vstore_act_n(y, dt, i, vmul(u, vmul(z, sigmoid(z))), k);
    }
    return rstd;
}
static float kern_gated_norm_fwd(void *y, const struct cpu_gated_norm *p, enum dtype dt) {
    return dt == DT_BF16 ? gated_norm_row(y, p, DT_BF16) : gated_norm_row(y, p, DT_F32);
}
/* n = x rstd, g = dy silu(z): dx = rstd (g w - n mean(g w n)), dz = dy n w silu'(z), dw += g n. */
VEC_FN void gated_norm_grad(const struct cpu_gated_norm *p, enum dtype dt) {
    struct row_sum sum = row_sum_zero();
    for (int64_t i = 0; i < p->n; i += VEC) {
        const int64_t k = LANES(p->n, i);
        const vec z = vload_act_n(p->z, dt, i, k), dy = vload_act_n(p->dy, dt, i, k), w = vload_act_n(p->w, dt, i, k);
        const vec v = vmul(vload_act_n(p->x, dt, i, k), vset1(p->rstd)), g = vmul(dy, vmul(z, sigmoid(z)));
        vec *s = &sum.s[i / VEC % 4];
        *s = vfma(vmul(g, w), v, *s);
        vstore_n(p->dw + i, vfma(g, v, vload_n(p->dw + i, k)), k);
        vstore_act_n(p->dz, dt, i, vmul(vmul(dy, vmul(v, w)), silu_slope(z)), k);
    }
    const vec mean = vset1(row_sum_total(&sum) / (float)p->n);
    for (int64_t i = 0; i < p->n; i += VEC) {
        const int64_t k = LANES(p->n, i);
        const vec z = vload_act_n(p->z, dt, i, k), v = vmul(vload_act_n(p->x, dt, i, k), vset1(p->rstd));
        const vec g = vmul(vmul(vload_act_n(p->dy, dt, i, k), vmul(z, sigmoid(z))), vload_act_n(p->w, dt, i, k));
        vstore_act_n(p->dx, dt, i, vmul(vset1(p->rstd), vsub(g, vmul(v, mean))), k);
    }
}
static void kern_gated_norm_bwd(const struct cpu_gated_norm *p, enum dtype dt) { FOR_ACT(dt, gated_norm_grad, p); }

VEC_FN void output_gate_row(void *y, const void *x, const void *gate, int64_t n, enum dtype dt) {
    for (int64_t i = 0; i < n; i += VEC) {
        const int64_t k = LANES(n, i);
        vstore_act_n(y, dt, i, vmul(vload_act_n(x, dt, i, k), vround_act(sigmoid(vload_act_n(gate, dt, i, k)), dt)), k);
    }
}
static void kern_output_gate_fwd(void *y, const void *x, const void *gate, enum dtype dt, int64_t n) {
    FOR_ACT(dt, output_gate_row, y, x, gate, n);
}
VEC_FN void output_gate_grad(const struct cpu_output_gate *p, enum dtype dt) {
    for (int64_t i = 0; i < p->n; i += VEC) {
        const int64_t k = LANES(p->n, i);
        const vec s = sigmoid(vload_act_n(p->gate, dt, i, k)), d = vmul(vload_act_n(p->dy, dt, i, k), s);
        const vec dgate = vmul(vmul(d, vload_act_n(p->x, dt, i, k)), vsub(vset1(1), s));
        vstore_act_n(p->dx, dt, i, d, k);
        vstore_act_n(p->dgate, dt, i, dgate, k);
    }
}
static void kern_output_gate_bwd(const struct cpu_output_gate *p, enum dtype dt) { FOR_ACT(dt, output_gate_grad, p); }
