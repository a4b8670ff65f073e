/* model_memory.c - see model_memory.h. */
#include "plan/model_memory.h"

#include "model/optim/optimizer.h"
#include "plan/memory_limit.h"
#include "train/gradient_all_reduce.h"

#include "base/err.h"

int model_memory(struct model_memory *o, const struct model_memory_args *a) {
    const struct optim_config *const optim = a->optim;
    const bool adapter = a->lora->on, several = a->ranks > 1, chunks = a->grad_chunk > 1;
    struct optim_plan l; /* of all ranks together */
    TRY(optim_plan(&l, a->config, a->dev, a->open->act, adapter ? &a->lora->cfg : NULL, optim));
    struct all_reduce_memory r = {
        .master = l.master, .sums = l.master, .moments = l.moments, .chunk = chunks ? l.master : 0, .host = l.host};
    const struct rank_memory_args args = {.config = a->config,
                                          .dev = a->dev,
                                          .open = a->open,
                                          .lora = adapter ? &a->lora->cfg : NULL,
                                          .optim = optim,
                                          .max_rows = a->max_rows,
                                          .chunks = chunks,
                                          .times = several ? model_parts_times((int)a->parts, (int)a->ranks) : 1,
                                          .ranks = (int)a->ranks,
                                          .local = (int)a->local};
    if (several) TRY(all_reduce_memory(&r, &args));
    const size_t master = train_pages(r.master), copy = train_pages(l.master) + train_pages(l.moments) + l.host;
    *o = (struct model_memory){.weights = train_pages(model_open_bytes(a->config, a->dev, a->open)),
                               .adapter = train_pages(l.adapter),
                               .master = optim->host_master ? 0 : master,
                               .grads = train_pages(r.sums),
                               .chunk = several ? 0 : train_pages(r.chunk),
                               .shared_chunk = several ? train_pages(r.chunk) : 0,
                               .moments = train_pages(r.moments),
                               .exchange = train_pages(r.exchange),
                               .host = r.host + (optim->host_master ? master : 0),
                               .copy = several ? train_pages(copy / (size_t)(a->local > 1 ? a->local : 1)) : copy,
                               .n_train = adapter ? l.n_train : 0,
                               .uneven = several ? (double)r.master * (double)a->ranks / (double)l.master - 1 : 0};
    return 0;
}

struct dev_sizes model_dev_sizes(const struct model_config *c, enum dtype act, int64_t rows, int64_t train_rows, int64_t decode) {
    struct dev_sizes s = {.act = act, .rows = rows, .train_rows = train_rows, .decode = decode};
    model_dev_sizes_widen(&s, c);
    return s;
}

void model_dev_sizes_widen(struct dev_sizes *s, const struct model_config *c) {
    const int64_t conv = model_dim(c, MODEL_DELTA_QKV), in = c->delta.v_heads ? model_dim(c, MODEL_DELTA_IN) : 0;
    const int64_t all = model_dim(c, MODEL_QKV) + (c->features & MODEL_OUTPUT_GATE ? model_dim(c, MODEL_Q) : 0);
    const int64_t qkv = in > all ? in : all;
    if (conv > s->conv) s->conv = conv;
    if (c->delta.v_heads > s->delta_heads) s->delta_heads = c->delta.v_heads;
    if (c->hidden > s->hidden) s->hidden = c->hidden;
    /* a row is as many of the experts' as it has choices */
    const int64_t widest = c->hidden > c->expert_ffn ? c->hidden : c->expert_ffn, experts = c->n_choices * widest;
    if (c->ffn > s->ffn) s->ffn = c->ffn;
    if (experts > s->ffn) s->ffn = experts;
    if (qkv > s->qkv) s->qkv = qkv;
    if (c->vocab > s->vocab) s->vocab = c->vocab;
    if (c->n_q_heads * c->head_dim > s->n_q_heads * s->head_dim) {
        s->n_q_heads = c->n_q_heads;
        s->head_dim = c->head_dim;
    }
}
