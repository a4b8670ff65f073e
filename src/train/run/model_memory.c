/* model_memory.c - see model_memory.h. */
#include "train/run/model_memory.h"

#include "model/lora/lora.h"
#include "model/optim/optimizer.h"
#include "train/run/memory_limit.h"

#include "base/err.h"

int model_memory(struct model_memory *o, const struct model_config *c, struct dev *dev, const struct model_open_args *open,
                 const struct train_lora *lora, const struct optim_config *optim) {
    struct lora_plan l = {.master = (size_t)model_config_params(c) * 4};
    if (lora->on) TRY(model_lora_plan(&l, c, dev, open->act, &lora->cfg, optim));
    else l.moments = optim_bytes(c, dev, open->act, optim, &l.host);
    const size_t master = train_pages(l.master);
    *o = (struct model_memory){.weights = train_pages(model_open_bytes(c, dev, open)),
                               .adapter = train_pages(l.weights),
                               .master = optim->host_master ? 0 : master,
                               .grads = master,
                               .moments = train_pages(l.moments),
                               .host = l.host + (optim->host_master ? master : 0),
                               .copy = master + train_pages(l.moments) + l.host,
                               .n_train = lora->on ? l.n_train : 0};
    return 0;
}

struct dev_sizes model_dev_sizes(const struct model_config *c, enum dtype act, int64_t rows, int64_t train_rows, int64_t decode) {
    struct dev_sizes s = {.act = act, .rows = rows, .train_rows = train_rows, .decode = decode};
    model_dev_sizes_widen(&s, c);
    return s;
}

void model_dev_sizes_widen(struct dev_sizes *s, const struct model_config *c) {
    const int64_t qkv = (c->n_q_heads + 2 * c->n_kv_heads) * c->head_dim;
    if (c->hidden > s->hidden) s->hidden = c->hidden;
    if (c->ffn > s->ffn) s->ffn = c->ffn;
    if (qkv > s->qkv) s->qkv = qkv;
    if (c->vocab > s->vocab) s->vocab = c->vocab;
    if (c->n_q_heads * c->head_dim > s->n_q_heads * s->head_dim) {
        s->n_q_heads = c->n_q_heads;
        s->head_dim = c->head_dim;
    }
}
