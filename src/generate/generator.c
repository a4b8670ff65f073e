/* generator.c - see generator.h. */
#include "generate/generator.h"

#include "ranks/worker_calls.h"

#include "base/err.h"
#include "base/json.h"
#include "model/files/load.h"
#include "model/lora/lora.h"

#include <string.h>

static int64_t least(int64_t a, int64_t b) { return a < b ? a : b; }

struct rollout_decoder_args generator_decoder(const struct generate_config *k, struct dev *dev, const struct model_config *c,
                                              struct generator_size s) {
    const int64_t max_len = s.longest + k->response_length, most = k->max_num_seqs;
    const int64_t seqs = s.prompts > 0 ? least(most, s.prompts * k->n_samples) : most;
    const int64_t rows = least(k->max_num_batched_tokens > seqs ? k->max_num_batched_tokens : seqs, seqs * max_len);
    const double share = dev_has_own_memory(dev) ? 1 : s.local_ranks;
    const struct rollout_decoder_args limits = {.max_seqs = seqs, .max_rows = rows, .max_len = max_len};
    return rollout_decoder_size(dev, c, k->act, &limits, (size_t)(k->memory_fraction * (double)dev->mem_total / share));
}

int generator_open(struct generator *g, struct generator_size s) {
    const struct generate_config *const k = g->k;
    const struct model_open_args o = {
        .dir = k->model_dir, .act = k->act, .flags = MODEL_INFER, .max_len = s.longest + k->response_length};
    TRY(tokenizer_open(&g->tok, k->tokenizer_dir));
    TRY(model_open(&g->model, &g->dev, &o));
    if (k->adapter) TRY(model_lora_load(g->model, k->adapter));
    struct rollout_decoder_args a = generator_decoder(k, &g->dev, &g->model->cfg, s);
    a.model = g->model;
    return rollout_decoder_open(&g->decoder, &a);
}

void generator_close(struct generator *g) {
    generator_end(g);
    rollout_decoder_close(g->decoder);
    model_close(g->model);
    tokenizer_close(g->tok);
    dev_close(&g->dev);
}

int generator_begin(struct generator *g, const struct rollout_config *c) {
    struct rollout_config own = *c;
    own.tok = g->tok;
    return rollout_decoder_engine(&g->engine, g->decoder, &own);
}

int generator_add(struct generator *g, const struct rollout_request *q) {
    const struct rollout_stop_ids stop = rollout_stop_ids(&g->model->cfg, g->tok);
    struct rollout_request own = *q;
    own.stop_ids = stop.id;
    own.n_stop_ids = stop.n;
    return rollout_submit(g->engine, &own, NULL);
}

int generator_step(struct generator *g) { return rollout_step(g->engine); }

void generator_end(struct generator *g) {
    rollout_destroy(g->engine);
    g->engine = NULL;
}

/* ---- a rank ---- */

static struct {
    struct generate_config k;
    struct generator g;
} self;

static int begin(const struct rollout_config *c) { return generator_begin(&self.g, c); }

static int add(void *arg, struct rollout_request *q) {
    (void)arg;
    return generator_add(&self.g, q);
}

static int step(void) { return generator_step(&self.g); }
static struct rollout_stats stats(void) { return rollout_stats(self.g.engine); }
static void end(void) { generator_end(&self.g); }

static void close_all(void) {
    generator_close(&self.g);
    generate_config_free(&self.k);
}

static int open_device(struct comm *comm, const struct comm_call *call, struct ctl_result *out) {
    rank_self()->program = (struct rank_program){.dev = &self.g.dev,
                                                 .generate_begin = begin,
                                                 .generate_add = add,
                                                 .generate_step = step,
                                                 .generate_stats = stats,
                                                 .generate_end = end,
                                                 .close = close_all};
    self.g.k = &self.k;
    TRY(rank_open_config(comm, call));
    TRY(generate_config_read(&self.k, rank_self()->conf));
    TRY(rank_open_device(call, &self.g.dev, self.k.device, self.k.threads));
    out->value = json_object();
    rank_describe(out->value, &self.g.dev);
    return 0;
}

static int open_model(struct comm *comm, const struct comm_call *call, struct ctl_result *out) {
    struct generator_size s = {.local_ranks = comm_local_size(comm)};
    (void)out;
    TRY(json_i64(call->args, "longest", &s.longest, call->name));
    TRY(json_i64(call->args, "prompts", &s.prompts, call->name));
    return generator_open(&self.g, s);
}

const struct ctl_service generator_services[] = {{"generator_device", open_device}, {"generator_model", open_model}, {NULL, NULL}};
