/* lm_head.c - the checked calls of the LM head and of the sampler, as device.c's.
 * Invariant: a backend entry runs only with tensors that fit each other. */
#include "device/checks_int.h"
#include "device/device_int.h"

#include <math.h>

/* What lmhead_fwd and lmhead_bwd have in common. */
static int check_lmhead(const char *op, const struct lmhead_args *a) {
    TRY(want2(op, "x", a->x, ACT, ANY, ANY));
    const int64_t n = a->x.dim[0];
    TRY(want_weight(op, a->w, set_of(a->x.dt), ANY, a->x.dim[1]));
    TRY(want1(op, "inv_temp", a->inv_temp, F32, n));
    TRY(want1(op, "target", a->target, I32, n));
    if (a->lse.data) TRY(want1(op, "lse", a->lse, F32, n));
    if (a->list_id.data) {
        TRY(want2(op, "list_id", a->list_id, I32, n, ANY));
        if (a->list_id.dim[1] > a->w.n)
            FAIL(ERR_INVAL, "dev op %s: a list of %lld entries of a vocabulary of %lld", op, (long long)a->list_id.dim[1],
                 (long long)a->w.n);
    }
    if (a->kept.data) {
        TRY(want2(op, "kept", a->kept, F32, ANY, dev_kept_cols(a->w.n)));
        if (a->kept.dim[0] % DEV_KEPT_ROWS || a->kept_at < 0 || a->list_id.data || a->top_id.data)
            FAIL(ERR_INVAL, "dev op %s: kept logits of %lld rows, from row %lld on, or with lists", op, (long long)a->kept.dim[0],
                 (long long)a->kept_at);
    }
    return a->entropy.data ? want1(op, "entropy", a->entropy, F32, n) : 0;
}

bool dev_keeps_logits(struct dev *d, struct weight w) { return d->ops->keeps_logits && d->ops->keeps_logits(d, w); }

int dev_lmhead_fwd(struct dev *d, const struct lmhead_args *a) {
    TRY(check_lmhead("lmhead_fwd", a));
    if (a->kept.data && a->kept_at % DEV_KEPT_ROWS)
        FAIL(ERR_INVAL, "dev op lmhead_fwd: kept logits from row %lld on", (long long)a->kept_at);
    TRY(want1("lmhead_fwd", "logp", a->logp, F32, a->x.dim[0]));
    if (a->sum_pi_sq.data) TRY(want1("lmhead_fwd", "sum_pi_sq", a->sum_pi_sq, F32, a->x.dim[0]));
    if (a->list_id.data) TRY(want2("lmhead_fwd", "list_logp", a->list_logp, F32, a->x.dim[0], a->list_id.dim[1]));
    if (a->top_id.data) {
        TRY(want2("lmhead_fwd", "top_id", a->top_id, I32, a->x.dim[0], ANY));
        TRY(want2("lmhead_fwd", "top_logp", a->top_logp, F32, a->x.dim[0], a->top_id.dim[1]));
        if (a->top_id.dim[1] > a->w.n)
            FAIL(ERR_INVAL, "dev op lmhead_fwd: top-k of %lld from a vocabulary of %lld", (long long)a->top_id.dim[1],
                 (long long)a->w.n);
    }
    HAVE(lmhead_fwd);
    return a->x.dim[0] ? TRACED(lmhead_fwd, (d, a), a->x.dim[0], a->w.n, a->w.k) : 0;
}

int dev_logits(struct dev *d, struct tensor out, struct tensor x, struct weight w) {
    TRY(want2("logits", "x", x, ACT, ANY, ANY));
    TRY(want_weight("logits", w, set_of(x.dt), ANY, x.dim[1]));
    TRY(want2("logits", "out", out, F32, x.dim[0], w.n));
    HAVE(logits);
    return x.dim[0] ? TRACED(logits, (d, out, x, w), x.dim[0], w.n, w.k) : 0;
}

/* Comparisons are written so that NaN fails. */
static bool sample_param_ok(const struct sample_param *p) {
    return p->inv_temp > 0 && isfinite(p->inv_temp) && p->top_p > 0 && p->top_p <= 1 && p->min_p >= 0 && p->min_p <= 1 &&
           p->repetition_penalty > 0 && isfinite(p->repetition_penalty) && p->u >= 0 && p->u < 1;
}

int dev_sample(struct dev *d, const struct sample_args *a) {
    TRY(want2("sample", "logits", a->logits, F32, ANY, ANY));
    const int64_t n = a->logits.dim[0], vocab = a->logits.dim[1];
    if (n > 0 && vocab <= 0) FAIL(ERR_INVAL, "dev op sample: the vocabulary is empty");
    if (n > 0 && a->param == NULL) FAIL(ERR_INVAL, "dev op sample: param is not given");
    for (int64_t i = 0; i < n; i++)
        if (!sample_param_ok(&a->param[i]))
            FAIL(ERR_INVAL,
                 "dev op sample: row %lld: inv_temp %g, top_p %g, min_p %g, repetition_penalty "
                 "%g or u %g is out of range",
                 (long long)i, (double)a->param[i].inv_temp, (double)a->param[i].top_p, (double)a->param[i].min_p,
                 (double)a->param[i].repetition_penalty, (double)a->param[i].u);
    if (a->seen.data) TRY(want2("sample", "seen", a->seen, U8, n, (vocab + 7) / 8));
    TRY(want1("sample", "id", a->id, I32, n));
    TRY(want1("sample", "logp", a->logp, F32, n));
    if (a->logp_kept.data) TRY(want1("sample", "logp_kept", a->logp_kept, F32, n));
    HAVE(sample);
    return n ? TRACED(sample, (d, a), n, vocab, 0) : 0;
}

int dev_decode_next(struct dev *d, const struct decode_args *a) {
    const bool given = a->x.nd == 0;
    const int64_t n = a->logits.dim[0];
    if (!given) TRY(want2("decode_next", "x", a->x, ACT, n, ANY));
    if (!given) TRY(want_weight("decode_next", a->w, set_of(a->x.dt), ANY, a->x.dim[1]));
    TRY(want2("decode_next", "logits", a->logits, F32, n, given ? ANY : a->w.n));
    TRY(want2("decode_next", "rows", a->rows, U8, n, (int64_t)sizeof(struct decode_row)));
    if (a->stop.data) TRY(want2("decode_next", "stop", a->stop, I32, n, ANY));
    TRY(want2("decode_next", "block_table", a->block_table, I32, n, ANY));
    if (a->block_len <= 0) FAIL(ERR_INVAL, "dev op decode_next: KV blocks of %lld tokens", (long long)a->block_len);
    const struct tensor in[] = {a->ids, a->pos, a->slots};
    for (int i = 0; i < 3; i++) TRY(want1("decode_next", "ids, pos or slots", in[i], I32, n));
    TRY(want1("decode_next", "step", a->step, I32, 1));
    TRY(want2("decode_next", "id", a->id, I32, ANY, n));
    TRY(want_like("decode_next", "logp", a->logp, F32, a->id));
    TRY(want_like("decode_next", "logp_kept", a->logp_kept, F32, a->id));
    HAVE(decode_next);
    return n ? TRACED(decode_next, (d, a), n, a->logits.dim[1], given ? 0 : a->w.k) : 0;
}

int dev_lmhead_bwd(struct dev *d, const struct lmhead_args *a, const struct lmhead_bwd_args *g) {
    TRY(check_lmhead("lmhead_bwd", a));
    const int64_t n = a->x.dim[0];
    TRY(want1("lmhead_bwd", "lse", a->lse, F32, n));
    TRY(want1("lmhead_bwd", "dlogp", g->dlogp, F32, n));
    if (g->dentropy.data) {
        TRY(want1("lmhead_bwd", "dentropy", g->dentropy, F32, n));
        TRY(want1("lmhead_bwd", "entropy", a->entropy, F32, n));
    }
    if (a->dlist.data) {
        if (!a->list_id.data) FAIL(ERR_INVAL, "dev op lmhead_bwd: dlist without list_id");
        TRY(want2("lmhead_bwd", "dlist", a->dlist, F32, n, a->list_id.dim[1]));
    }
    TRY(want_like("lmhead_bwd", "dx", g->dx, set_of(a->x.dt), a->x));
    if (g->dw.data) TRY(want2("lmhead_bwd", "dw", g->dw, F32, a->w.n, a->w.k));
    HAVE(lmhead_bwd);
    return n ? TRACED(lmhead_bwd, (d, a, g), a->x.dim[0], a->w.n, a->w.k) : dev__no_rows(d, g->dw, TENSOR_NONE, g->add);
}
