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
static struct decoder_args size_decoder(const struct dev *dev, const struct serve_model_args *a, const struct model_config *c,
                                        const struct serve_model_size *s, int ranks) {
    const int64_t rows = a->max_rows > a->max_seqs ? a->max_rows : a->max_seqs;
    const struct decoder_args limits = {
        .max_seqs = a->max_seqs, .max_rows = rows, .max_len = s->max_len, .max_draft = a->together > 1 ? 0 : a->max_draft};
    const struct decoder_args least_kv = decoder_size(dev, c, a->act, &limits, 0);
    const size_t other = s->weights + decoder_bytes(c, a->act, &least_kv);
    const double part = dev_has_own_memory(dev) ? 1 : ranks; /* of a GPU that they share each has its part */
    const size_t share = (size_t)(a->memory * (double)dev->mem_total / part);
    struct decoder_args d = decoder_size(dev, c, a->act, &limits, share > other ? share - other : 0);
    d.max_burst = least(d.max_burst, MAX_BURST); /* a request that comes within a burst waits for its end */
    return d;
}

static struct model_open_args whole_args(const struct serve_model_args *a, int64_t max_len) {
    return (struct model_open_args){
        .dir = a->dir, .act = a->act, .flags = MODEL_INFER, .max_len = max_len, .mtp = a->max_draft > 0};
}
static struct split_model_args split_args(const struct serve_model_args *a, struct dev *dev, int64_t max_len) {
    return (struct split_model_args){
        .dev = dev, .dir = a->dir, .adapter = a->adapter, .act = a->act, .max_len = max_len, .size = (int)a->together};
}

/* Of a rank with the largest part. whole: the model's configuration. */
static int size_all(struct dev *dev, const struct serve_model_args *a, const struct model_config *whole, int ranks,
                    struct serve_model_size *s) {
    const struct model_open_args open = whole_args(a, s->max_len);
    const struct split_model_args split = split_args(a, dev, s->max_len);
    const int64_t rows = a->max_rows > a->max_seqs ? a->max_rows : a->max_seqs;
    const struct decoder_args limits = {.max_seqs = a->max_seqs, .max_rows = rows, .max_len = s->max_len};
    const struct model_config part = a->together > 1 ? model_tp_config(whole, -1, split.size) : *whole;
    const struct decoder_args any = decoder_size(dev, &part, a->act, &limits, 0);
    if (a->together > 1) TRY(split_model_bytes(&split, whole, decoder_most_rows(&any), &s->weights));
    else s->weights = model_open_bytes(whole, dev, &open);
    s->decoder = size_decoder(dev, a, &part, s, ranks);
    s->kv = decoder_kv_bytes(&part, a->act, &s->decoder);
    s->passes = decoder_bytes(&part, a->act, &s->decoder) - s->kv;
    return 0;
}

int serve_model_size(struct serve_model_size *s, struct dev *dev, const struct serve_model_args *a, const struct model_config *c,
                     int ranks) {
    const char *const why = a->together > 1 ? model_tp_unable(c, QUANT_NONE, (int)a->together) : NULL;
    if (why) FAIL(ERR_UNSUPPORTED, "unsupported --tensor-parallel-size %lld of this model: %s", (long long)a->together, why);
    TRY(serve_model_length(a, c, &s->max_len));
    return size_all(dev, a, c, ranks, s);
}

static int open_whole(struct serve_model *m, const struct serve_model_args *a, int ranks, struct serve_model_size *s) {
    const struct model_open_args o = whole_args(a, s->max_len);
    TRY(model_open(&m->model, &m->dev, &o));
    if (a->adapter) TRY(model_lora_load(m->model, a->adapter));
    TRY(size_all(&m->dev, a, &m->model->cfg, ranks, s));
    s->decoder.model = m->model;
    return 0;
}

static int open_split(struct serve_model *m, const struct serve_model_args *a, struct comm *comm, struct serve_model_size *s) {
    const struct split_model_args o = split_args(a, &m->dev, s->max_len);
    TRY(split_model_open(&m->split, &o));
    TRY(size_all(&m->dev, a, &m->split.whole->cfg, comm_local_size(comm), s));
    TRY(split_model_agree_blocks(comm, &s->decoder.n_kv_blocks));
    TRY(split_model_split(&m->split, comm, decoder_most_rows(&s->decoder)));
    s->decoder.model = m->split.part;
    return 0;
}

int serve_model_open(struct serve_model *m, const struct serve_model_args *a, struct comm *comm) {
    struct model_config c;
    struct serve_model_size s;
    TRY(model_config_load(&c, a->dir));
    const int rc = serve_model_length(a, &c, &s.max_len);
    model_config_free(&c);
    TRY(rc);
    TRY(a->together > 1 ? open_split(m, a, comm, &s) : open_whole(m, a, comm ? comm_local_size(comm) : 1, &s));
    TRY(decoder_open(&m->decoder, &s.decoder));
    m->max_len = least(s.max_len, s.decoder.n_kv_blocks * KV_BLOCK_LEN);
    m->weights = s.weights;
    m->kv = decoder_kv_bytes(&s.decoder.model->cfg, a->act, &s.decoder);
    return 0;
}

void serve_model_close(struct serve_model *m) {
    split_model_leave(&m->split);
    decoder_close(m->decoder);
    split_model_close(&m->split);
    model_close(m->model);
    dev_close(&m->dev);
}
