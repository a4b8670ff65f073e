/* lm_head_kernels_tmpl.h - softmax statistics of a run of logits, the
 * gradient of the logits, and the scans of the sampler; compiled by each
 * kernels_ISA.c, after norm_rope_kernels_tmpl.h.
 * Invariant: head_sum is the only place where probabilities are summed for a
 * log-prob, so training and sampling agree in every bit. */

static float kern_max(const float *x, int64_t n) {
    vec m[4] = {vset1(-INFINITY), vset1(-INFINITY), vset1(-INFINITY), vset1(-INFINITY)};
    int64_t i = 0;
    for (; i + 4 * VEC <= n; i += 4 * VEC) VEC_UNROLL for (int j = 0; j < 4; j++) m[j] = vmax(vload(x + i + j * VEC), m[j]);
    for (; i < n; i += VEC) m[0] = vmax(vkeep(vload_n(x + i, LANES(n, i)), 0, LANES(n, i), -INFINITY), m[0]);
    return vmax_lanes(vmax(vmax(m[0], m[1]), vmax(m[2], m[3])));
}

/* e^t of a difference of logits; t is held above the point where e^t is 0, so that 0 * t is 0. */
VEC_FN void head_take(struct row_sum *s, struct row_sum *st, struct row_sum *sq, int j, vec t, bool moments) {
    const vec e = vexp(t);
    s->s[j] = vadd(s->s[j], e);
    if (!moments) return;
    st->s[j] = vfma(e, vmax(vset1(-104), t), st->s[j]);
    sq->s[j] = vfma(e, e, sq->s[j]);
}
VEC_FN void head_sum(struct cpu_head_sum *out, const float *raw, int64_t n, float inv_temp, bool moments) {
    const float max = kern_max(raw, n) * inv_temp;
    const vec by = vset1(inv_temp), top = vset1(max);
    struct row_sum s = row_sum_zero(), st = s, sq = s;
    int64_t i = 0;
    for (; i + 4 * VEC <= n; i += 4 * VEC)
        VEC_UNROLL for (int j = 0; j < 4; j++) head_take(&s, &st, &sq, j, vsub(vmul(vload(raw + i + j * VEC), by), top), moments);
    for (int j = 0; i < n; i += VEC, j++) {
        const vec t = vsub(vmul(vload_n(raw + i, LANES(n, i)), by), top);
        head_take(&s, &st, &sq, j, vkeep(t, 0, LANES(n, i), -INFINITY), moments);
    }
    *out = (struct cpu_head_sum){max, row_sum_total(&s), row_sum_total(&st), row_sum_total(&sq)};
}
static void kern_head_sum(struct cpu_head_sum *out, const float *raw, int64_t n, float inv_temp, bool moments) {
    if (moments) head_sum(out, raw, n, inv_temp, true);
    else head_sum(out, raw, n, inv_temp, false);
}

static void kern_softcap(float *x, int64_t n, float cap) {
    for (int64_t i = 0; i < n; i += VEC) {
        const vec t = soft_tanh(vmul(vload_n(x + i, LANES(n, i)), vset1(1 / cap)));
        vstore_n(x + i, vmul(t, vset1(cap)), LANES(n, i));
    }
}

/* Times the softcap's slope where it gives raw. */
VEC_FN vec head_slope(vec g, vec raw, const struct cpu_head_dz *a) {
    if (a->softcap <= 0) return g;
    const vec t = vmul(raw, vset1(1 / a->softcap));
    return vmul(g, vsub(vset1(1), vmul(t, t)));
}
/* The gradient without the own terms of target and list, which head_grad adds to single entries. */
VEC_FN vec head_grad_at(vec raw, const struct cpu_head_dz *a) {
    const vec log_p = vsub(vmul(raw, vset1(a->inv_temp)), vset1(a->lse)), p = vexp(log_p);
    vec g = vset1(-a->dsum);
    if (a->dentropy != 0) /* a zero times an infinite log-prob stays out */
        g = vsub(g, vmul(vset1(a->dentropy), vadd(vmax(vset1(-104), log_p), vset1(a->entropy))));
    return vmul(vmul(p, g), vset1(a->inv_temp));
}
VEC_FN void head_grad(void *dz, const float *raw, int64_t n, const struct cpu_head_dz *a, enum dtype dt) {
    if (a->softcap <= 0)
        for (int64_t i = 0; i < n; i += VEC) vstore_act_n(dz, dt, i, head_grad_at(vload_n(raw + i, LANES(n, i)), a), LANES(n, i));
    for (int64_t i = 0; i < n && a->softcap > 0; i += VEC) {
        const vec z = vload_n(raw + i, LANES(n, i));
        vstore_act_n(dz, dt, i, head_slope(head_grad_at(z, a), z, a), LANES(n, i));
    }
    if (a->target >= 0) {
        const vec z = vload_n(raw + a->target, 1), g = vadd(head_grad_at(z, a), vset1(a->dlogp * a->inv_temp));
        vstore_act_n(dz, dt, a->target, head_slope(g, z, a), 1);
    }
    for (int64_t k = 0; k < a->n_list; k++) {
        const int64_t i = a->list[k] - a->first;
        if (i < 0 || i >= n) continue;
        const float own = i == a->target ? a->dlist[k] + a->dlogp : a->dlist[k];
        const vec z = vload_n(raw + i, 1);
        vstore_act_n(dz, dt, i, head_slope(vadd(head_grad_at(z, a), vset1(own * a->inv_temp)), z, a), 1);
    }
}
static void kern_head_dz(void *dz, enum dtype dt, const float *raw, int64_t n, const struct cpu_head_dz *a) {
    FOR_ACT(dt, head_grad, dz, raw, n, a);
}

static void kern_head_exp(float *e, const float *raw, int64_t n, float inv_temp, float max) {
    for (int64_t i = 0; i < n; i += VEC) {
        const vec z = vmul(vload_n(raw + i, LANES(n, i)), vset1(inv_temp));
        vstore_n(e + i, vexp(vsub(z, vset1(max))), LANES(n, i));
    }
}

static float kern_mass(const float *x, int64_t n, float max, float least) {
    vec s = vset1(0);
    for (int64_t i = 0; i < n; i += VEC) {
        const vec v = vkeep(vload_n(x + i, LANES(n, i)), 0, LANES(n, i), -INFINITY);
        s = vadd(s, vmask(vexp(vsub(v, vset1(max))), vge_bits(v, vset1(least))));
    }
    return vsum(s);
}

static void kern_scale(float *dst, const float *src, int64_t n, float by) {
    for (int64_t i = 0; i < n; i += VEC) vstore_n(dst + i, vmul(vload_n(src + i, LANES(n, i)), vset1(by)), LANES(n, i));
}

static int64_t kern_at_least(int32_t *idx, const float *x, int64_t n, float least) {
    int64_t found = 0;
    for (int64_t i = 0; i < n; i += VEC) {
        unsigned bits = vge_bits(vload_n(x + i, LANES(n, i)), vset1(least));
        if (LANES(n, i) < VEC) bits &= (1u << LANES(n, i)) - 1u;
        for (; bits; bits &= bits - 1) idx[found++] = (int32_t)(i + __builtin_ctz(bits));
    }
    return found;
}
