/* generator.c - see generator.h. */
#include "generate/generator.h"

#include "ranks/worker_calls.h"

#include "base/buf.h"
#include "base/err.h"
#include "base/json.h"
#include "model/files/load.h"
#include "model/lora/lora.h"
#include "model/parallel/tensor_parallel.h"
#include "model/parallel/weight_streaming.h"

#include <stdlib.h>
#include <string.h>

static int64_t least(int64_t a, int64_t b) { return a < b ? a : b; }

struct decoder_args generator_decoder(const struct generate_config *k, struct dev *dev, const struct model_config *c,
                                      struct generator_size s) {
    const int64_t max_len = s.longest + k->response_length, most = k->rollout.max_num_seqs;
    const int64_t seqs = s.prompts > 0 ? least(most, s.prompts * k->rollout.train.n) : most;
    const int64_t rows = least(k->rollout.max_num_batched_tokens > seqs ? k->rollout.max_num_batched_tokens : seqs, seqs * max_len);
    const double share = dev_has_own_memory(dev) ? 1 : s.local_ranks;
    const struct decoder_args limits = {.max_seqs = seqs, .max_rows = rows, .max_len = max_len};
    return decoder_size(dev, c, k->model.act, &limits, (size_t)(k->rollout.memory_fraction * (double)dev->mem_total / share));
}

/* ---- ranks that generate together ---- */

int64_t generator_together(const struct generate_config *k, const struct model_config *c, int64_t ranks, int64_t local,
                           const char **why) {
    const int64_t n = k->rollout.tensor_parallel;
    *why = NULL;
    if (n <= 1) return 1;
    *why = ranks == 1       ? "there is one rank"
           : ranks % n != 0 ? "it does not divide the ranks"
           : local % n != 0 ? "it does not divide the ranks of a host"
                            : model_tp_unable(c, QUANT_NONE, (int)n);
    return *why ? 1 : n;
}

static size_t room_bytes(const struct generate_config *k, struct dev *dev, const struct model_config *c) {
    const struct model_stream_shape s = {c, dev, k->model.act, QUANT_NONE, MODEL_STREAM_RANKS};
    return model_stream_bytes(&s);
}

int generator_split_bytes(const struct generate_config *k, struct dev *dev, const struct model_config *c, int64_t together,
                          const struct decoder_args *a, size_t *bytes) {
    struct lora_config lora;
    struct model_tp_shape shape = {
        .config = c, .dev = dev, .act = k->model.act, .size = (int)together, .max_rows = decoder_most_rows(a)};
    if (k->adapter) TRY(lora_config_load(&lora, k->adapter));
    if (k->adapter) shape.lora = &lora;
    const int rc = model_tp_bytes(&shape, bytes);
    if (k->adapter) lora_config_free(&lora);
    *bytes += room_bytes(k, dev, c);
    return rc;
}

/* All have as many KV blocks as the one with the fewest: they schedule alike. */
static int agree_blocks(struct comm *c, int64_t *n) {
    const int size = comm_size(c);
    int64_t *all = xcalloc((size_t)size, sizeof *all);
    size_t *at = xcalloc((size_t)size + 1, sizeof *at);
    for (int r = 0; r <= size; r++) at[r] = (size_t)r * sizeof *all;
    all[comm_rank(c)] = *n;
    const int rc = comm_all_gather(c, all, at);
    for (int r = 0; r < size && rc == 0; r++) *n = all[r] < *n ? all[r] : *n;
    free(at);
    free(all);
    return rc;
}

/* The model of the decoder that a describes: this rank's part. */
static int open_split(struct generator *g, int64_t together, struct decoder_args *a) {
    struct model *const m = g->base.generator.model;
    struct dev *const dev = &g->base.dev;
    const int rank = comm_rank(g->base.comm), n = (int)together;
    const size_t room = room_bytes(g->k, dev, &m->cfg);
    TRY(agree_blocks(g->base.comm, &a->n_kv_blocks));
    TRY(generator_split_bytes(g->k, dev, &m->cfg, together, a, &g->block_bytes));
    TRY(dev_alloc(dev, g->block_bytes, &g->block));
    TRY(collective_open(&g->devices, dev, g->base.comm));
    TRY(collective_share(g->devices, g->block, room));
    model_stream_bind(m, g->block, g->devices);
    TRY(comm_part(&g->together, g->base.comm, rank - rank % n, n));
    TRY(collective_open(&g->splits, dev, g->together));
    TRY(model_tp_open(&g->split, m, g->splits, decoder_most_rows(a), (char *)g->block + room));
    g->base.generator.split = a->model = g->split;
    g->base.generator.reports = comm_rank(g->together) == 0;
    return 0;
}

static int open_model_of(struct generator *g, struct generator_size *s) {
    const struct generate_config *const k = g->k;
    struct comm *const c = g->base.comm;
    struct model_open_args o = {
        .dir = k->model.dir, .act = k->model.act, .flags = MODEL_INFER, .max_len = s->longest + k->response_length};
    struct model_config shape;
    TRY(model_config_load(&shape, k->model.dir));
    g->base.tensor_parallel = generator_together(k, &shape, c ? comm_size(c) : 1, s->local_ranks, &g->alone);
    model_config_free(&shape);
    if (g->base.tensor_parallel > 1) {
        o.flags = model_stream_flags(MODEL_STREAM_RANKS);
        o.shard = (struct model_shard){.rank = comm_rank(c), .size = comm_size(c)};
        s->prompts *= g->base.tensor_parallel;
    }
    TRY(model_open(&g->base.generator.model, &g->base.dev, &o));
    return k->adapter ? model_lora_load(g->base.generator.model, k->adapter) : 0;
}

int generator_open(struct generator *g, struct generator_size s) {
    TRY(tokenizer_open(&g->tok, g->k->model.tokenizer_dir));
    g->base.generator.tok = g->tok;
    g->base.generator.longest_first = true; /* of turns that wait for a place those that may draw most yet */
    TRY(open_model_of(g, &s));
    struct model *const m = g->base.generator.model;
    const int64_t together = g->base.tensor_parallel;
    const struct model_config part = model_tp_config(&m->cfg, -1, (int)together);
    struct decoder_args a = generator_decoder(g->k, &g->base.dev, &part, s);
    a.model = m;
    if (together > 1) TRY(open_split(g, together, &a));
    return decoder_open(&g->base.generator.decoder, &a);
}

void generator_close(struct generator *g) {
    collective_close(g->splits);
    collective_close(g->devices);
    engine_destroy(g->base.generator.engine);
    decoder_close(g->base.generator.decoder);
    model_tp_close(g->split);
    comm_close(g->together);
    model_close(g->base.generator.model);
    dev_free(&g->base.dev, g->block, g->block_bytes);
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
