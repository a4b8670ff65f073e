/* norm_rope_kernels_tmpl.h - RMSNorm, RoPE and SwiGLU on one row or one head,
 * forward and backward; compiled by each kernels_ISA.c.
 * Invariant: sums over a row go in the lane order of row_sum, whatever the
 * caller does with other rows. */

/* Calls `body(args, dtype)` with the dtype as a constant, so that it is decided once per call. */
#define FOR_ACT(dt, body, ...)                           \
    do {                                                 \
        if ((dt) == DT_BF16) body(__VA_ARGS__, DT_BF16); \
        else body(__VA_ARGS__, DT_F32);                  \
    } while (0)
#define LANES(n, i) ((n) - (i) < VEC ? (n) - (i) : (int64_t)VEC)

/* Four running sums take the vectors of a row in turn and are added pairwise at the end. */
struct row_sum {
    vec s[4];
};
VEC_FN struct row_sum row_sum_zero(void) { return (struct row_sum){{vset1(0), vset1(0), vset1(0), vset1(0)}}; }
VEC_FN float row_sum_total(const struct row_sum *r) { return vsum(vadd(vadd(r->s[0], r->s[1]), vadd(r->s[2], r->s[3]))); }

/* ---- RMSNorm ---- */

VEC_FN vec norm_weight(vec w, enum norm_kind kind) { return kind == NORM_ONE_PLUS ? vadd(w, vset1(1)) : w; }
VEC_FN void rmsnorm_scale(const struct cpu_norm *a, float rstd, enum norm_kind kind, enum dtype act) {
    const vec rs = vset1(rstd);
    for (int64_t i = 0; i < a->n; i += VEC) {
        const int64_t k = LANES(a->n, i);
        const vec x = vmul(vload_n(a->x + i, k), rs), v = kind == NORM_CAST_SCALE && !a->from ? vround_act(x, act) : x;
        const vec y = vmul(v, norm_weight(vload_act_n(a->w, act, i, k), kind));
        if (a->from) vstore_n((float *)a->y + i, vadd(vload_n(a->from + i, k), y), k);
        else vstore_act_n(a->y, act, i, y, k);
    }
}
static float kern_rmsnorm_fwd(const struct cpu_norm *a) {
    struct row_sum sq = row_sum_zero();
    for (int64_t i = 0; i < a->n; i += VEC) {
        const vec v = vload_n(a->x + i, LANES(a->n, i));
        vec *s = &sq.s[i / VEC % 4];
        *s = vfma(v, v, *s);
    }
    const float rstd = 1.0f / sqrtf(row_sum_total(&sq) / (float)a->n + a->eps);
    if (a->kind == NORM_CAST_SCALE) FOR_ACT(a->act, rmsnorm_scale, a, rstd, NORM_CAST_SCALE);
    else FOR_ACT(a->act, rmsnorm_scale, a, rstd, a->kind);
    return rstd;
}

/* g = dy w, n = x rstd: dx += rstd (g - n mean(g n)), dw += dy n. */
VEC_FN void rmsnorm_grad(const struct cpu_norm_grad *g, enum norm_kind kind, enum dtype w_dt) {
    float *const dx = g->dx, *const dw = g->dw;
    const void *const dy = g->dy, *const w = g->w;
    const float *const x = g->x;
    const enum dtype dy_dt = g->dy_dt;
    const int64_t n = g->n;
    const vec rs = vset1(g->rstd);
    struct row_sum gn = row_sum_zero();
    for (int64_t i = 0; i < n; i += VEC) {
        const int64_t k = LANES(n, i);
        const vec d = vload_act_n(dy, dy_dt, i, k), v = vmul(vload_n(x + i, k), rs);
        vec *s = &gn.s[i / VEC % 4];
        *s = vfma(vmul(d, norm_weight(vload_act_n(w, w_dt, i, k), kind)), v, *s);
        vstore_n(dw + i, vfma(d, v, vload_n(dw + i, k)), k);
    }
    const vec mean = vset1(row_sum_total(&gn) / (float)n);
    for (int64_t i = 0; i < n; i += VEC) {
        const int64_t k = LANES(n, i);
        const vec dn = vmul(vload_act_n(dy, dy_dt, i, k), norm_weight(vload_act_n(w, w_dt, i, k), kind));
        const vec v = vmul(vload_n(x + i, k), rs);
        vstore_n(dx + i, vfma(rs, vsub(dn, vmul(v, mean)), vload_n(dx + i, k)), k);
    }
}
static void kern_rmsnorm_bwd(const struct cpu_norm_grad *g) {
    if (g->kind == NORM_CAST_SCALE) FOR_ACT(g->w_dt, rmsnorm_grad, g, NORM_CAST_SCALE);
    else FOR_ACT(g->w_dt, rmsnorm_grad, g, g->kind);
}

/* ---- heads: RMSNorm and RoPE ---- */

VEC_FN float head_rstd(const void *x, int64_t dim, float eps, enum dtype act) {
    vec s = vset1(0);
    for (int64_t i = 0; i < dim; i += VEC) {
        const vec v = vload_act_n(x, act, i, LANES(dim, i));
        s = vfma(v, v, s);
    }
    return 1.0f / sqrtf(vsum(s) / (float)dim + eps);
}
/* k entries of the head from i on, after the norm when there is one. */
struct head_norm {
    const struct cpu_head_rot *h;
    float rstd;
};
VEC_FN vec head_load(const void *x, struct head_norm n, int64_t i, int64_t k, enum norm_kind kind, enum dtype act) {
    const struct cpu_head_rot *const h = n.h;
    const vec v = vload_act_n(x, act, i, k);
    if (h->norm == NULL) return v;
    const vec x1 = vmul(v, vset1(n.rstd)), y = kind == NORM_CAST_SCALE ? vround_act(x1, act) : x1;
    return vround_act(vmul(y, norm_weight(vload_act_n(h->norm, act, i, k), kind)), act);
}
VEC_FN void rot_head(void *y, const void *x, const struct cpu_head_rot *h, enum norm_kind kind, enum dtype act) {
    const int64_t half = h->dim / 2;
    const struct head_norm n = {h, h->norm ? head_rstd(x, h->dim, h->eps, act) : 1};
    for (int64_t i = 0; i < half; i += VEC) {
        const int64_t k = LANES(half, i);
        const vec c = vload_n(h->cos + i, k), s = vload_n(h->sin + i, k);
        const vec a = head_load(x, n, i, k, kind, act), b = head_load(x, n, half + i, k, kind, act);
        vstore_act_n(y, act, i, vsub(vmul(a, c), vmul(b, s)), k);
        vstore_act_n(y, act, half + i, vadd(vmul(b, c), vmul(a, s)), k);
    }
}
static void kern_rot_fwd(void *y, const void *x, const struct cpu_head_rot *h) {
    if (h->kind == NORM_CAST_SCALE) FOR_ACT(h->act, rot_head, y, x, h, NORM_CAST_SCALE);
    else FOR_ACT(h->act, rot_head, y, x, h, h->kind);
}

/* Rotates dy back into tmp, then undoes the norm as rmsnorm_grad does. */
VEC_FN void rot_head_grad(void *dx, const void *dy, const void *x, const struct cpu_head_rot *h, enum norm_kind kind,
                          enum dtype act) {
    const int64_t dim = h->dim, half = dim / 2;
    const enum dtype dy_dt = h->dy_dt;
    float *const dnorm = h->dnorm, *const tmp = h->tmp;
    for (int64_t i = 0; i < half; i += VEC) {
        const int64_t k = LANES(half, i);
        const vec c = vload_n(h->cos + i, k), s = vload_n(h->sin + i, k);
        const vec a = vload_act_n(dy, dy_dt, i, k), b = vload_act_n(dy, dy_dt, half + i, k);
        vstore_n(tmp + i, vadd(vmul(a, c), vmul(b, s)), k);
        vstore_n(tmp + half + i, vsub(vmul(b, c), vmul(a, s)), k);
    }
    if (h->norm == NULL) {
        for (int64_t i = 0; i < dim; i += VEC) vstore_act_n(dx, act, i, vload_n(tmp + i, LANES(dim, i)), LANES(dim, i));
        return;
    }
    const float rstd = head_rstd(x, dim, h->eps, act);
    const vec rs = vset1(rstd);
    vec gn = vset1(0);
    for (int64_t i = 0; i < dim; i += VEC) {
        const int64_t k = LANES(dim, i);
        const vec d = vload_n(tmp + i, k), v = vmul(vload_act_n(x, act, i, k), rs);
        gn = vfma(vmul(d, norm_weight(vload_act_n(h->norm, act, i, k), kind)), v, gn);
        vstore_n(dnorm + i, vfma(d, v, vload_n(dnorm + i, k)), k);
    }
    const vec mean = vset1(vsum(gn) / (float)dim);
    for (int64_t i = 0; i < dim; i += VEC) {
        const int64_t k = LANES(dim, i);
        const vec g = vmul(vload_n(tmp + i, k), norm_weight(vload_act_n(h->norm, act, i, k), kind));
        const vec v = vmul(vload_act_n(x, act, i, k), rs);
        vstore_act_n(dx, act, i, vmul(rs, vsub(g, vmul(v, mean))), k);
    }
}
static void kern_rot_bwd(void *dx, const void *dy, const void *x, const struct cpu_head_rot *h) {
    if (h->kind == NORM_CAST_SCALE) FOR_ACT(h->act, rot_head_grad, dx, dy, x, h, NORM_CAST_SCALE);
    else FOR_ACT(h->act, rot_head_grad, dx, dy, x, h, h->kind);
}

/* ---- SwiGLU and GeGLU: act(g) u, act(g) = g s; s is sigmoid(g), or sigmoid(2v) with v = sqrt(2/pi) (g + 0.044715 g^3) ---- */

#define GELU_K 1.5957691216057308f /* 2 sqrt(2/pi) */
VEC_FN vec sigmoid(vec x) { return vdiv(vset1(1), vadd(vset1(1), vexp(vsub(vset1(0), x)))); }
VEC_FN vec glu_sigmoid(vec g, bool gelu) {
    return sigmoid(gelu ? vmul(vmul(vset1(GELU_K), g), vfma(vmul(vset1(0.044715f), g), g, vset1(1))) : g);
}
/* silu'(g) = s + g s (1 - s), gelu'(g) = s + g s (1 - s) 2v'. */
VEC_FN vec glu_slope(vec g, vec sig, bool gelu) {
    const vec rest = vsub(vset1(1), sig);
    if (!gelu) return vmul(sig, vfma(g, rest, vset1(1)));
    const vec dv = vmul(vset1(GELU_K), vfma(vmul(vset1(3 * 0.044715f), g), g, vset1(1)));
    return vmul(sig, vfma(vmul(g, rest), dv, vset1(1)));
}

VEC_FN void glu_row(void *y, const void *gate, const void *up, int64_t n, bool gelu, enum dtype dt) {
    for (int64_t i = 0; i < n; i += VEC) {
        const int64_t k = LANES(n, i);
        const vec g = vload_act_n(gate, dt, i, k), u = vload_act_n(up, dt, i, k);
        vstore_act_n(y, dt, i, vmul(vmul(g, glu_sigmoid(g, gelu)), u), k);
    }
}
static void kern_swiglu_fwd(void *y, const void *gate, const void *up, enum dtype dt, int64_t n) {
    FOR_ACT(dt, glu_row, y, gate, up, n, false);
}
static void kern_geglu_fwd(void *y, const void *gate, const void *up, enum dtype dt, int64_t n) {
    FOR_ACT(dt, glu_row, y, gate, up, n, true);
}

VEC_FN void glu_grad(const struct cpu_swiglu_grad *s, bool gelu, enum dtype dt) {
    void *const dgate = s->dgate, *const dup = s->dup;
    const void *const dy = s->dy, *const gate = s->gate, *const up = s->up;
    const int64_t n = s->n;
    for (int64_t i = 0; i < n; i += VEC) {
        const int64_t k = LANES(n, i);
        const vec g = vload_act_n(gate, dt, i, k), u = vload_act_n(up, dt, i, k);
        const vec d = vload_act_n(dy, dt, i, k), sig = glu_sigmoid(g, gelu);
        vstore_act_n(dgate, dt, i, vmul(vmul(d, u), glu_slope(g, sig, gelu)), k);
        vstore_act_n(dup, dt, i, vmul(vmul(d, g), sig), k);
    }
}
static void kern_swiglu_bwd(const struct cpu_swiglu_grad *g, enum dtype dt) { FOR_ACT(dt, glu_grad, g, false); }
static void kern_geglu_bwd(const struct cpu_swiglu_grad *g, enum dtype dt) { FOR_ACT(dt, glu_grad, g, true); }

/* ---- plain rows ---- */

VEC_FN void narrow_row(void *dst, const float *src, int64_t n, enum dtype dt) {
    for (int64_t i = 0; i < n; i += VEC) vstore_act_n(dst, dt, i, vload_n(src + i, LANES(n, i)), LANES(n, i));
}
static void kern_narrow(void *dst, enum dtype dt, const float *src, int64_t n) { FOR_ACT(dt, narrow_row, dst, src, n); }
static void kern_add(float *dst, const float *src, int64_t n) {
    for (int64_t i = 0; i < n; i += VEC) {
        const int64_t k = LANES(n, i);
        vstore_n(dst + i, vadd(vload_n(dst + i, k), vload_n(src + i, k)), k);
    }
}
