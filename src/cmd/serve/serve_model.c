/* serve_model.c - see serve_model.h. */
#include "cmd/serve/serve_model.h"

#include "base/err.h"
#include "comm/comm.h"
#include "model/lora/lora.h"

enum { MAX_BURST = 8 };

static int64_t least(int64_t a, int64_t b) { return a < b ? a : b; }

int serve_model_length(const struct serve_model_args *a, const struct model_config *c, int64_t *max_len) {
    *max_len = a->max_len > 0 ? a->max_len : c->max_pos;
    if (*max_len > c->max_pos)
        FAIL(ERR_INVAL, "--max-model-len %lld: the model has %lld positions", (long long)*max_len, (long long)c->max_pos);
    return 0;
}

/* The decoder for what the weights leave of the memory. c: the shape that this rank computes. */
static struct decoder_args size_decoder(const struct serve_model *m, const struct serve_model_args *a, const struct model_config *c,
                                        size_t weights, int ranks) {
    struct dev *const dev = (struct dev *)(uintptr_t)&m->dev;
    const int64_t rows = a->max_rows > a->max_seqs ? a->max_rows : a->max_seqs;
    const struct decoder_args limits = {
        .max_seqs = a->max_seqs, .max_rows = rows, .max_len = m->max_len, .max_draft = a->together > 1 ? 0 : a->max_draft};
    const struct decoder_args least_kv = decoder_size(dev, c, a->act, &limits, 0);
    const size_t other = weights + decoder_bytes(c, a->act, &least_kv);
    const double part = dev_has_own_memory(dev) ? 1 : ranks; /* of a GPU that they share each has its part */
    const size_t share = (size_t)(a->memory * (double)dev->mem_total / part);
    struct decoder_args d = decoder_size(dev, c, a->act, &limits, share > other ? share - other : 0);
    d.max_burst = least(d.max_burst, MAX_BURST); /* a request that comes within a burst waits for its end */
    return d;
}

static int open_whole(struct serve_model *m, const struct serve_model_args *a, int ranks, struct decoder_args *d) {
    const struct model_open_args o = {
        .dir = a->dir, .act = a->act, .flags = MODEL_INFER, .max_len = m->max_len, .mtp = a->max_draft > 0};
    TRY(model_open(&m->model, &m->dev, &o));
    if (a->adapter) TRY(model_lora_load(m->model, a->adapter));
    m->weights = model_open_bytes(&m->model->cfg, &m->dev, &o);
    *d = size_decoder(m, a, &m->model->cfg, m->weights, ranks);
    d->model = m->model;
    return 0;
}

static int open_split(struct serve_model *m, const struct serve_model_args *a, struct comm *comm, struct decoder_args *d) {
    const struct split_model_args o = {
        .dev = &m->dev, .dir = a->dir, .adapter = a->adapter, .act = a->act, .max_len = m->max_len, .size = (int)a->together};
    const int64_t rows = a->max_rows > a->max_seqs ? a->max_rows : a->max_seqs;
    const struct decoder_args limits = {.max_seqs = a->max_seqs, .max_rows = rows, .max_len = m->max_len};
    TRY(split_model_open(&m->split, &o));
    const struct model_config *const whole = &m->split.whole->cfg, part = model_tp_config(whole, -1, o.size);
    const struct decoder_args any = decoder_size(&m->dev, &part, a->act, &limits, 0);
    TRY(split_model_bytes(&o, whole, decoder_most_rows(&any), &m->weights));
    *d = size_decoder(m, a, &part, m->weights, comm_local_size(comm));
    TRY(split_model_agree_blocks(comm, &d->n_kv_blocks));
    TRY(split_model_split(&m->split, comm, decoder_most_rows(d)));
    d->model = m->split.part;
    return 0;
}

int serve_model_open(struct serve_model *m, const struct serve_model_args *a, struct comm *comm) {
    struct model_config c;
    struct decoder_args d;
    TRY(model_config_load(&c, a->dir));
    const int rc = serve_model_length(a, &c, &m->max_len);
    model_config_free(&c);
    TRY(rc);
    TRY(a->together > 1 ? open_split(m, a, comm, &d) : open_whole(m, a, comm ? comm_local_size(comm) : 1, &d));
    TRY(decoder_open(&m->decoder, &d));
    m->max_len = least(m->max_len, d.n_kv_blocks * KV_BLOCK_LEN);
    m->kv = decoder_kv_bytes(&d.model->cfg, a->act, &d);
    return 0;
}

void serve_model_close(struct serve_model *m) {
    split_model_leave(&m->split);
    decoder_close(m->decoder);
    split_model_close(&m->split);
    model_close(m->model);
    dev_close(&m->dev);
}
