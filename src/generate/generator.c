/* generator.c - see generator.h. */
#include "generate/generator.h"

#include "ranks/worker_calls.h"

#include "base/err.h"
#include "base/json.h"
#include "model/files/load.h"
#include "model/lora/lora.h"

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

int generator_open(struct generator *g, struct generator_size s) {
    const struct generate_config *const k = g->k;
    const struct model_open_args o = {
        .dir = k->model.dir, .act = k->model.act, .flags = MODEL_INFER, .max_len = s.longest + k->response_length};
    TRY(tokenizer_open(&g->tok, k->model.tokenizer_dir));
    g->base.generator.tok = g->tok;
    g->base.generator.longest_first = true; /* of turns that wait for a place those that may draw most yet */
    TRY(model_open(&g->base.generator.model, &g->base.dev, &o));
    struct model *const m = g->base.generator.model;
    if (k->adapter) TRY(model_lora_load(m, k->adapter));
    struct decoder_args a = generator_decoder(k, &g->base.dev, &m->cfg, s);
    a.model = m;
    return decoder_open(&g->base.generator.decoder, &a);
}

void generator_close(struct generator *g) {
    engine_destroy(g->base.generator.engine);
    decoder_close(g->base.generator.decoder);
    model_close(g->base.generator.model);
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
    (void)out;
    TRY(json_i64(call->args, "longest", &s.longest, call->name));
    TRY(json_i64(call->args, "prompts", &s.prompts, call->name));
    return generator_open(&self.g, s);
}

const struct worker_process_service generator_services[] = {
    {"generator_device", open_device}, {"generator_model", open_model}, {NULL, NULL}};
