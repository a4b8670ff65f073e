/* generator.c - see generator.h. */
#include "generate/generator.h"

#include "ranks/worker_calls.h"

#include "base/err.h"
#include "base/json.h"
#include "model/lora/lora.h"

static const double MOST = 0.95; /* of the memory, for weights and decoder */

static int64_t least(int64_t a, int64_t b) { return a < b ? a : b; }

struct split_model_args generator_split(const struct generate_config *k, struct dev *dev, int64_t max_len, int64_t together) {
    return (struct split_model_args){
        .dev = dev, .dir = k->model.dir, .adapter = k->adapter, .act = k->model.act, .max_len = max_len, .size = (int)together};
}

int generator_decoder(struct decoder_args *out, const struct generate_config *k, struct dev *dev, const struct model_config *c,
                      struct generator_size s, size_t *weights) {
    const int64_t max_len = s.longest + k->response_length, most = k->rollout.max_num_seqs;
    const int64_t seqs = s.prompts > 0 ? least(most, s.prompts * k->rollout.train.n) : most;
    const int64_t rows = least(k->rollout.max_num_batched_tokens > seqs ? k->rollout.max_num_batched_tokens : seqs, seqs * max_len);
    const double there = (double)dev->mem_total / (dev_has_own_memory(dev) ? 1 : s.local_ranks);
    const struct decoder_args limits = {.max_seqs = seqs, .max_rows = rows, .max_len = max_len};
    const int64_t together = s.together;
    const struct model_config part = model_tp_config(c, -1, (int)together);
    const struct model_open_args whole = {.dir = k->model.dir, .act = k->model.act, .flags = MODEL_INFER, .max_len = max_len};
    const struct split_model_args split = generator_split(k, dev, max_len, together);
    *out = decoder_size(dev, &part, k->model.act, &limits, 0);
    *weights = model_open_bytes(c, dev, &whole);
    if (together > 1) TRY(split_model_bytes(&split, c, decoder_most_rows(out), weights));
    const double left = MOST * there - (double)*weights, asked = k->rollout.memory_fraction * there,
                 room = left < asked ? left : asked;
    *out = decoder_size(dev, &part, k->model.act, &limits, room > 0 ? (size_t)room : 0);
    return 0;
}

static int open_model_of(struct generator *g, struct generator_size *s) {
    const struct generate_config *const k = g->k;
    struct comm *const c = g->base.comm;
    const struct model_open_args o = {
        .dir = k->model.dir, .act = k->model.act, .flags = MODEL_INFER, .max_len = s->longest + k->response_length};
    struct model_config shape;
    TRY(model_config_load(&shape, k->model.dir));
    const int64_t together = g->base.tensor_parallel =
        split_model_together(&shape, k->rollout.tensor_parallel, c ? comm_size(c) : 1, s->local_ranks, &g->alone);
    model_config_free(&shape);
    if (together == 1) {
        TRY(model_open(&g->base.generator.model, &g->base.dev, &o));
        return k->adapter ? model_lora_load(g->base.generator.model, k->adapter) : 0;
    }
    const struct split_model_args a = generator_split(k, &g->base.dev, o.max_len, together);
    s->prompts *= together;
    TRY(split_model_open(&g->split, &a));
    g->base.generator.model = g->split.whole;
    return 0;
}

/* Each rank's part, and the decoder's that a describes. */
static int split(struct generator *g, struct decoder_args *a) {
    TRY(split_model_agree_blocks(g->base.comm, &a->n_kv_blocks));
    TRY(split_model_split(&g->split, g->base.comm, decoder_most_rows(a)));
    g->base.generator.split = a->model = g->split.part;
    g->base.generator.reports = comm_rank(g->split.together) == 0;
    return 0;
}

int generator_open(struct generator *g, struct generator_size s) {
    TRY(tokenizer_open(&g->tok, g->k->model.tokenizer_dir));
    g->base.generator.tok = g->tok;
    g->base.generator.longest_first = true; /* of turns that wait for a place those that may draw most yet */
    TRY(open_model_of(g, &s));
    struct model *const m = g->base.generator.model;
    const int64_t together = g->base.tensor_parallel;
    struct decoder_args a;
    size_t weights;
    s.together = together;
    TRY(generator_decoder(&a, g->k, &g->base.dev, &m->cfg, s, &weights));
    a.model = m;
    if (together > 1) TRY(split(g, &a));
    return decoder_open(&g->base.generator.decoder, &a);
}

void generator_close(struct generator *g) {
    split_model_leave(&g->split);
    engine_destroy(g->base.generator.engine);
    decoder_close(g->base.generator.decoder);
    if (!g->split.whole) model_close(g->base.generator.model);
    split_model_close(&g->split);
    tokenizer_close(g->tok);
    dev_close(&g->base.dev);
}

/* ---- a rank ---- */

static struct {
    struct generate_config k;
    struct generator g;
} self;

static void close_all(void) {
    generator_close(&self.g);
    generate_config_free(&self.k);
}

static int open_device(struct comm *comm, const struct comm_call *call, struct ctl_result *out) {
    rank_self()->close = close_all;
    self.g.k = &self.k;
    TRY(rank_open_config(comm, call));
    TRY(generate_config_read(&self.k, rank_self()->conf));
    TRY(rank_open_device(call, &self.g.base.dev, self.k.trainer.run.device, self.k.trainer.run.threads));
    worker_open_local(&self.g.base, comm);
    rank_self()->worker = &self.g.base;
    out->value = json_object();
    rank_describe(out->value, &self.g.base.dev);
    return 0;
}

static int open_model(struct comm *comm, const struct comm_call *call, struct ctl_result *out) {
    struct generator_size s = {.local_ranks = comm_local_size(comm)};
    TRY(json_i64(call->args, "longest", &s.longest, call->name));
    TRY(json_i64(call->args, "prompts", &s.prompts, call->name));
    TRY(generator_open(&self.g, s));
    out->value = json_pack("{s:I, s:s?}", "tensor_parallel", (json_int_t)self.g.base.tensor_parallel, "alone", self.g.alone);
    return 0;
}

const struct worker_process_service generator_services[] = {
    {"generator_device", open_device}, {"generator_model", open_model}, {NULL, NULL}};
