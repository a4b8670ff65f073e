/* expert_parallel.c - experts split over the ranks of a group that has the layers' matrices split (tensor_parallel.h).
 *
 * A rank has a run of whole experts. All ranks have all rows and route all of them, so each knows the load of every expert; of the
 * slots, which are sorted by expert, a rank computes the run of its own experts, and the outputs are gathered: as many rows as
 * there are slots, whatever the load. Nothing is added on the way. Each rank then adds a token's experts in their order of choice.
 * Invariant: the gathered outputs are those of one rank, row by row. */
#include "base/err.h"
#include "model/lora/lora_int.h"
#include "model/model_int.h"

/* ---- weights ---- */

void model__ep_layout(struct model *whole, const struct model_group *g, int rank, int size, struct model *m, struct arena *a) {
    struct model_group part = model__ep_part(m ? &m->groups[g - whole->groups] : g, rank, size);
    const int64_t rows = g->n / g->count;
    if (whole->quant) {
        if (part.count > 0) model__quant_place(m ? m : whole, &part, a);
    } else {
        void *const at = arena_take(a, (size_t)part.count * dev_weight_bytes(whole->dev, whole->act, rows, g->k));
        part.mat = (struct weight){.data = at, .dt = whole->act, .n = rows, .k = g->k};
    }
    if (m) m->groups[g - whole->groups] = part;
}

struct lora_group model__ep_lora(const struct model *whole, const struct lora_group *all, int rank, int size) {
    const struct model_range own = model__ep_experts(all->count, rank, size);
    struct lora_group g = *all;
    g.count = own.hi - own.lo;
    g.a.data = (char *)all->a.data + (size_t)own.lo * dev_weight_bytes(whole->dev, whole->act, all->a.n, all->a.k);
    g.b.data = (char *)all->b.data + (size_t)own.lo * dev_weight_bytes(whole->dev, whole->act, all->b.n, all->b.k);
    return g;
}

/* Experts are packed, or quantised, one by one. */
int model__ep_take(struct model *m, const struct model_group *from, const struct model_group *to) {
    const struct model *const whole = model__tp_whole(m);
    for (int64_t p = to->first_param; m->quant && p < to->first_param + to->n_params; p++) {
        const struct quant_part *const x = &whole->quant->parts[p], *const y = &m->quant->parts[p];
        TRY(dev_copy(m->dev, y->code.data, x->code.data, (size_t)y->code.dim[0]));
        TRY(dev_copy(m->dev, y->scale.data, x->scale.data, (size_t)y->scale.dim[0] * sizeof(float)));
    }
    if (m->quant || to->count == 0) return 0;
    const size_t bytes = dev_weight_bytes(m->dev, m->act, from->mat.n, from->k);
    const int64_t first = (to->first_param - from->first_param) / (from->n_params / from->count);
    return dev_copy(m->dev, to->mat.data, (const char *)from->mat.data + (size_t)first * bytes, (size_t)to->count * bytes);
}

/* ---- a pass ---- */

int model__ep_begin(struct model *m, struct tensor offset, struct model_ep *p) {
    int size;
    const int rank = model__tp_rank(m, &size);
    const int64_t n = offset.dim[0] - 1;
    const struct model_range own = model__ep_experts(n, rank, size);
    int32_t at[DEV_MAX_EXPERTS + 1];
    CHECK(n <= DEV_MAX_EXPERTS);
    TRY(dev_copy_out(m->dev, at, offset.data, (size_t)(n + 1) * sizeof *at));
    for (int r = 0; r <= size; r++) p->cut[r] = at[r < size ? model__ep_experts(n, r, size).lo : n];
    p->rows = (struct model_range){p->cut[rank], p->cut[rank + 1]};
    p->offset = tensor_1d((int32_t *)offset.data + own.lo, DT_I32, own.hi - own.lo + 1);
    return dev_clip_offsets(m->dev, offset, offset, p->rows.lo, p->rows.hi - p->rows.lo);
}

struct tensor model__ep_outputs(const struct model *m, struct model_range rows) {
    return model__tp_rows(m, rows, m->cfg.hidden);
}

int model__ep_gather(struct model *m, const struct model_ep *p) { return model__tp_gather_rows(m, p->cut, m->cfg.hidden); }
