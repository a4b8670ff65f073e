/* test_ppo_rollout.c - generation against training, on the real engine, the
 * real decoder and the trainer's model.
 *
 * inv01: the log-probs that rollout returns are those of the training forward
 * pass, bit for bit: every instruction set of this machine, fp32 and bf16, one
 * and two threads, any limits of the engine, preemption, shared prefixes,
 * chunked prefill.  inv02: a sequence's log-probs are batch-invariant.
 * inv06: once opened, generation and training take no device memory. */
#include "model_case.h"

#include "base/rng.h"
#include "engine/engine.h"
#include "model/master_weights.h"
#include "train/trained_model.h"

enum { N_PROMPTS = 5, N = 3, N_SAMPLES = N_PROMPTS * N, MAX_TOKENS = 40, MAX_LEN = 97 + MAX_TOKENS, VOCAB = 4200, EOS = 2 };
static const int64_t PROMPT_LENS[N_PROMPTS] = {1, 17, 33, 64, 97};
#define TEMPERATURE 0.7f

#define EACH(i, array) for (size_t i = 0; i < sizeof(array) / sizeof *(array); i++)

/* ---- a model whose vocabulary is more than one chunk of the head ---- */

static const char *const CONFIGS[] = {
    "{\"model_type\": \"qwen2\", \"architectures\": [\"Qwen2ForCausalLM\"], \"hidden_size\": 64, \"intermediate_size\": 96,"
    " \"num_hidden_layers\": 2, \"num_attention_heads\": 4, \"num_key_value_heads\": 2, \"vocab_size\": 4200,"
    " \"max_position_embeddings\": 256, \"rms_norm_eps\": 1e-6, \"hidden_act\": \"silu\", \"initializer_range\": 0.15,"
    " \"eos_token_id\": 2, \"tie_word_embeddings\": true, \"rope_theta\": 1e4, \"torch_dtype\": \"float32\"}",
    /* keys outside the window are in KV blocks that are still held */
    "{\"model_type\": \"mistral\", \"architectures\": [\"MistralForCausalLM\"], \"hidden_size\": 48, \"intermediate_size\": 80,"
    " \"num_hidden_layers\": 2, \"num_attention_heads\": 3, \"num_key_value_heads\": 1, \"head_dim\": 16, \"vocab_size\": 4200,"
    " \"max_position_embeddings\": 256, \"rms_norm_eps\": 1e-6, \"hidden_act\": \"silu\", \"initializer_range\": 0.15,"
    " \"eos_token_id\": 2, \"tie_word_embeddings\": false, \"rope_theta\": 1e4, \"sliding_window\": 21,"
    " \"torch_dtype\": \"float32\"}",
    /* gated delta nets, whose chunks of 64 tokens end within prompts and responses, and gated attention */
    "{\"model_type\": \"qwen3_5_text\", \"architectures\": [\"Qwen3_5ForCausalLM\"], \"hidden_size\": 48,"
    " \"intermediate_size\": 64, \"num_hidden_layers\": 3, \"full_attention_interval\": 3, \"num_attention_heads\": 3,"
    " \"num_key_value_heads\": 1, \"head_dim\": 16, \"linear_num_key_heads\": 1, \"linear_num_value_heads\": 2,"
    " \"linear_key_head_dim\": 32, \"linear_value_head_dim\": 16, \"vocab_size\": 4200, \"max_position_embeddings\": 256,"
    " \"initializer_range\": 0.15, \"eos_token_id\": 2, \"tie_word_embeddings\": true, \"rope_theta\": 1e4}",
    /* with experts, and q, k, v and z of a key head together */
    "{\"model_type\": \"qwen3_next\", \"architectures\": [\"Qwen3NextForCausalLM\"], \"hidden_size\": 48,"
    " \"intermediate_size\": 64, \"num_hidden_layers\": 2, \"full_attention_interval\": 2, \"num_attention_heads\": 3,"
    " \"num_key_value_heads\": 1, \"head_dim\": 16, \"linear_num_key_heads\": 2, \"linear_num_value_heads\": 4,"
    " \"linear_key_head_dim\": 32, \"linear_value_head_dim\": 16, \"num_experts\": 6, \"num_experts_per_tok\": 2,"
    " \"moe_intermediate_size\": 32, \"shared_expert_intermediate_size\": 24, \"vocab_size\": 4200,"
    " \"max_position_embeddings\": 256, \"initializer_range\": 0.15, \"eos_token_id\": 2, \"rope_theta\": 1e4}",
    /* latent attention, whose KV cache has the latent alone */
    "{\"model_type\": \"deepseek_v3\", \"architectures\": [\"DeepseekV3ForCausalLM\"], \"hidden_size\": 48,"
    " \"intermediate_size\": 64, \"num_hidden_layers\": 2, \"num_attention_heads\": 3, \"num_key_value_heads\": 3,"
    " \"q_lora_rank\": 24, \"kv_lora_rank\": 16, \"qk_nope_head_dim\": 16, \"qk_rope_head_dim\": 8, \"v_head_dim\": 24,"
    " \"n_routed_experts\": 6, \"num_experts_per_tok\": 2, \"moe_intermediate_size\": 32, \"n_shared_experts\": 1,"
    " \"n_group\": 1, \"topk_group\": 1, \"norm_topk_prob\": true, \"first_k_dense_replace\": 1, \"vocab_size\": 4200,"
    " \"max_position_embeddings\": 256, \"initializer_range\": 0.15, \"eos_token_id\": 2, \"rope_theta\": 1e4}",
};

struct rig {
    struct dev dev;
    struct model *m;
    const char *dir, *backend;
    int threads;
    bool adapter;
    enum quant_kind quant; /* of the base */
    int32_t prompts[N_PROMPTS][128];
};

static char *make_model(const char *config) {
    json_t *c = json_loads(config, 0, NULL);
    assert_non_null(c);
    char *dir = case_temp_dir(), *model = file_join(dir, "m");
    OK(model_init_dir(c, model, 3, DT_F32));
    json_decref(c);
    free(model);
    return dir;
}

static void fill_prompts(struct rig *r) {
    struct rng rng = {.seed = 9, .stream = RNG_TEST};
    for (int i = 0; i < N_PROMPTS; i++)
        for (int64_t t = 0; t < PROMPT_LENS[i]; t++) /* the longer ones begin alike, for two full KV blocks */
            r->prompts[i][t] = t < 2 * KV_BLOCK_LEN && i >= 2 ? (int32_t)(10 + t) : 3 + (int32_t)rng_below(&rng, VOCAB - 3);
}

/* An adapter in mid-training on every linear layer: an odd rank, B not zero. */
static void put_adapter(struct model *m) {
    struct lora_config l = {.rank = 5, .alpha = 8, .targets = json_string("all-linear")};
    struct rng rng = {.seed = 8, .stream = RNG_TEST};
    OK(model_lora_create(m, &l, 1));
    lora_config_free(&l);
    float *w = xmalloc((size_t)m->n_train * sizeof *w);
    for (int64_t i = 0; i < m->n_train; i++) w[i] = 0.15f * rng_normal(&rng);
    OK(dev_copy_in(m->dev, m->master, w, (size_t)m->n_train * sizeof *w));
    OK(model_refresh(m));
    free(w);
}

static void rig_open(struct rig *r, const char *dir, enum dtype act, int flags) {
    r->dir = dir;
    char *model = file_join(dir, "m");
    if (r->adapter) flags = MODEL_INFER;
    OK(model_open(&r->m, &r->dev,
                  &(struct model_open_args){.dir = model, .act = act, .flags = flags, .max_len = MAX_LEN, .quant = r->quant}));
    free(model);
    if (r->adapter) put_adapter(r->m);
    fill_prompts(r);
}

/* ---- rollout ---- */

struct samples {
    int64_t n[N_SAMPLES], preempted, cached, bursts;
    int32_t ids[N_SAMPLES][MAX_TOKENS];
    float logp[N_SAMPLES][MAX_TOKENS], logp_kept[N_SAMPLES][MAX_TOKENS];
    bool ended[N_SAMPLES];
};

static int take(void *arg, const struct engine_sample *s) {
    struct samples *o = arg;
    const int64_t i = (int64_t)(intptr_t)s->user * N + s->index;
    assert_false(o->ended[i]); /* each sample ends once */
    o->ended[i] = s->finish != ENGINE_INTERRUPTED;
    o->n[i] = s->n;
    memcpy(o->logp_kept[i], s->logp_kept, (size_t)s->n * 4);
    memcpy(o->ids[i], s->ids, (size_t)s->n * 4);
    memcpy(o->logp[i], s->logp, (size_t)s->n * 4);
    return 0;
}

struct limits {
    const char *what;
    int64_t n_kv_blocks, max_rows, max_seqs;
    bool no_prefix_cache, reversed;
    int64_t max_burst, steps; /* steps: an engine makes so many and is interrupted, another one goes on; 0: all */
};
static const struct limits LIMITS[] = {
    {"roomy", 400, 2048, 64, false, false, 1, 0},
    {"7 rows a step: prompts in chunks", 400, 7, 7, false, false, 1, 0},
    {"12 KV blocks: preemption", 12, 40, 15, false, false, 1, 0},
    {"12 KV blocks, nothing shared, backwards", 12, 40, 15, true, true, 1, 0},
    {"one sample at a time", 9, 512, 1, false, true, 1, 0},
    {"bursts of 5 steps", 400, 2048, 64, false, false, 5, 0},
    {"bursts of 16 steps, 12 KV blocks", 12, 40, 15, false, false, 16, 0},
    {"interrupted every 9 steps", 400, 2048, 64, false, false, 1, 9},
    {"12 KV blocks, bursts of 5 steps, interrupted", 12, 40, 15, false, false, 5, 4},
};

static struct engine_request request_of(struct rig *r, int i) {
    static const int32_t eos[] = {EOS};
    return (struct engine_request){.prompt = r->prompts[i],
                                   .n_prompt = PROMPT_LENS[i],
                                   .n = N,
                                   .max_tokens = MAX_TOKENS - 7 * i,
                                   .temperature = TEMPERATURE,
                                   .top_p = i == 1 ? 0.9f : 1,
                                   .top_k = i == 2 ? 20 : 0,
                                   .repetition_penalty = i == 3 ? 1.2f : 1,
                                   .seed = 5,
                                   .uid = (uint64_t)i,
                                   .stop_ids = eos,
                                   .n_stop_ids = 1,
                                   .user = (void *)(intptr_t)i};
}

/* Sample k = i * N + ... of prompt i goes on after the tokens that it had. */
static struct engine_request rest_of(struct rig *r, int64_t k, const struct samples *had) {
    struct engine_request one = request_of(r, (int)(k / N));
    one.n = 1;
    one.first_index = k % N;
    one.n_begun = had->n[k];
    one.begun = had->ids[k];
    one.begun_logp = had->logp[k];
    one.begun_logp_kept = had->logp_kept[k];
    return one;
}

/* Submits the samples of prompt i that have not ended; those that have begun go on. */
static void submit(struct rig *r, struct engine *e, int i, const struct samples *had) {
    const struct engine_request q = request_of(r, i);
    if (!had) OK(engine_submit(e, &q, NULL));
    for (int k = i * N; had && k < (i + 1) * N; k++) {
        if (had->ended[k]) continue;
        const struct engine_request one = rest_of(r, k, had);
        OK(engine_submit(e, &one, NULL));
    }
}

static void generate_on(struct rig *r, struct decoder *d, const struct limits *l, struct samples *out) {
    struct engine *e;
    memset(out, 0, sizeof *out);
    const struct engine_model rm = decoder_model(d);
    const struct engine_config cfg = {
        .max_rows = l->max_rows, .max_seqs = l->max_seqs, .no_prefix_cache = l->no_prefix_cache, .done = take, .done_arg = out};
    for (int turn = 0, more = 1; more; turn++) {
        OK(engine_create(&e, &rm, &cfg));
        for (int k = 0; k < N_PROMPTS; k++) submit(r, e, l->reversed ? N_PROMPTS - 1 - k : k, turn > 0 ? out : NULL);
        if (l->steps == 0) OK(engine_run(e));
        for (int64_t t = 0; t < l->steps; t++) assert_true((more = engine_step(e)) >= 0);
        if (l->steps == 0) more = 0;
        OK(engine_interrupt(e));
        if (more) engine_destroy(e);
    }
    const struct engine_stats st = engine_stats(e);
    if (l->steps == 0) assert_int_equal(st.finished, N_SAMPLES);
    for (int i = 0; i < N_SAMPLES; i++) assert_true(out->ended[i]);
    out->preempted = st.preempted;
    out->cached = st.cached_rows;
    out->bursts = st.bursts;
    engine_destroy(e);
}

static void generate(struct rig *r, const struct limits *l, struct samples *out) {
    struct decoder *d;
    const struct decoder_args a = {.model = r->m,
                                   .n_kv_blocks = l->n_kv_blocks,
                                   .n_states = l->max_seqs,
                                   .max_rows = l->max_rows,
                                   .max_seqs = l->max_seqs,
                                   .max_len = MAX_LEN,
                                   .max_burst = l->max_burst};
    OK(decoder_open(&d, &a));
    generate_on(r, d, l, out);
    decoder_close(d);
}

/* ---- training forward ---- */

struct packed {
    struct packed_seq seqs[N_SAMPLES];
    int32_t ids[N_SAMPLES][MAX_LEN];
    int64_t n, n_targets;
};

/* Prompt and response of each sample, in the order given (NULL: 0, 1, ...). */
static void pack(const struct rig *r, const struct samples *s, const int64_t *order, struct packed *p) {
    *p = (struct packed){.n = N_SAMPLES};
    for (int64_t k = 0; k < N_SAMPLES; k++) {
        const int64_t i = order ? order[k] : k, np = PROMPT_LENS[i / N];
        memcpy(p->ids[k], r->prompts[i / N], (size_t)np * 4);
        memcpy(p->ids[k] + np, s->ids[i], (size_t)s->n[i] * 4);
        p->seqs[k] = (struct packed_seq){.ids = p->ids[k], .n = np + s->n[i], .first = np};
        p->n_targets += s->n[i];
    }
}

/* Differing values between rollout's log-probs and those in packed order. */
static int64_t differing(const struct samples *s, const int64_t *order, const float *logp) {
    int64_t bad = 0;
    for (int64_t k = 0; k < N_SAMPLES; k++) {
        const int64_t i = order ? order[k] : k;
        for (int64_t t = 0; t < s->n[i]; t++) bad += memcmp(&s->logp[i][t], logp++, sizeof *logp) != 0;
    }
    return bad;
}

static void sane(const struct samples *s) {
    int64_t tokens = 0, short_ones = 0;
    double low = 0;
    for (int64_t i = 0; i < N_SAMPLES; i++) {
        tokens += s->n[i];
        short_ones += s->n[i] > 0 && s->ids[i][s->n[i] - 1] == EOS;
        for (int64_t t = 0; t < s->n[i]; t++) {
            assert_true(isfinite(s->logp[i][t]) && s->logp[i][t] <= 0);
            low = fmin(low, (double)s->logp[i][t]);
        }
    }
    assert_true(tokens >= 10 * N_SAMPLES - 10 * short_ones && low < -1);
}

/* All cuts, both orders: every log-prob has rollout's bits. */
static void same_as_training(struct rig *r, const struct samples *s, const char *what) {
    static const struct micro_batch_limits cuts[] = {{.max_seqs = N_SAMPLES}, {.max_seqs = 1}, {.max_seqs = 4}, {.max_rows = 200}};
    int64_t order[N_SAMPLES];
    struct rng rng = {.seed = 4, .stream = RNG_TEST};
    struct packed *p = xmalloc(sizeof *p);
    float *logp = xmalloc(sizeof(float) * N_SAMPLES * MAX_TOKENS);
    struct trained_model *a;
    const struct trained_model_args args = {.dev = &r->dev, .model = r->m, .max_rows = N_SAMPLES * MAX_LEN, .max_seqs = N_SAMPLES};
    OK(trained_model_create(&a, &args));
    for (int64_t i = 0; i < N_SAMPLES; i++) order[i] = i;
    EACH(c, cuts) {
        pack(r, s, order, p);
        OK(trained_model_forward(a, p->seqs, p->n, cuts[c], TEMPERATURE, (struct forward_out){.logp = logp}));
        const int64_t bad = differing(s, order, logp);
        if (bad) fail_msg("%s, cut %zu: %lld of %lld log-probs differ", what, c, (long long)bad, (long long)p->n_targets);
        rng_shuffle(&rng, order, N_SAMPLES);
    }
    /* the comparison is one that fails: a temperature one step away */
    OK(trained_model_forward(a, p->seqs, p->n, cuts[0], nextafterf(TEMPERATURE, 1), (struct forward_out){.logp = logp}));
    pack(r, s, order, p);
    assert_true(differing(s, NULL, logp) > p->n_targets / 4);
    trained_model_destroy(a);
    free(logp);
    free(p);
}

/* ---- the backends of this machine ---- */

static const char *const BACKENDS[] = {"ref", "c", "avx2", "avx512", "avx512bf16", "amx", "cuda"};

static bool open_backend(struct dev *d, const char *name, int threads) {
    *d = (struct dev){0};
    if (strcmp(name, "ref") == 0) return dev_open_ref(d) == 0;
    if (strcmp(name, "cuda") == 0) return case_has(name) && dev_open_cuda(d, 0) == 0;
    return dev_open_cpu(d, threads, name) == 0;
}

static void rig_close(struct rig *r) {
    model_close(r->m);
    assert_int_equal(r->dev.allocated, 0);
    dev_close(&r->dev);
}

static void each_backend(void (*check)(struct rig *r, const char *what)) {
    static const enum dtype acts[] = {DT_F32, DT_BF16};
    static const struct {
        const char *what;
        int config;
        bool adapter;
        enum quant_kind quant;
    } models[] = {{"qwen3_next", 3, false, QUANT_NONE},
                  {"qwen2", 0, false, QUANT_NONE},
                  {"mistral", 1, false, QUANT_NONE},
                  {"mistral with an adapter", 1, true, QUANT_NONE},
                  {"qwen2 in NF4 with an adapter", 0, true, QUANT_NF4},
                  {"mistral in INT8 with an adapter", 1, true, QUANT_INT8},
                  {"deepseek_v3 in NF4 with an adapter", 4, true, QUANT_NF4},
                  {"qwen3_5", 2, false, QUANT_NONE},
                  {"qwen3_5 in NF4 with an adapter", 2, true, QUANT_NF4}};
    int64_t n = 0;
    EACH(c, models) {
        char *dir = make_model(CONFIGS[models[c].config]);
        EACH(b, BACKENDS) EACH(t, acts) {
            char what[96];
            struct rig r = {
                .backend = BACKENDS[b], .threads = t == 0 ? 2 : 1, .adapter = models[c].adapter, .quant = models[c].quant};
            if (r.quant && (b < 2 || acts[t] == DT_F32)) continue; /* slow there; test_model_quant.c has ref and f32 */
            if (!open_backend(&r.dev, BACKENDS[b], r.threads)) continue;
            snprintf(what, sizeof what, "%s %s %s", models[c].what, BACKENDS[b], dtype_name(acts[t]));
            rig_open(&r, dir, acts[t], MODEL_INFER);
            check(&r, what);
            rig_close(&r);
            n++;
        }
        case_drop_dir(dir);
    }
    assert_true(n >= 12); /* ref and c are everywhere */
}

static void assert_same(const struct samples *got, const struct samples *want, const char *what, const char *how) {
    for (int64_t i = 0; i < N_SAMPLES; i++)
        if (got->n[i] != want->n[i] || memcmp(got->ids[i], want->ids[i], (size_t)want->n[i] * 4) != 0 ||
            memcmp(got->logp[i], want->logp[i], (size_t)want->n[i] * 4) != 0)
            fail_msg("%s, %s: sample %lld is not that of a roomy engine", what, how, (long long)i);
}

static void rollout_check(struct rig *r, const char *what) {
    struct samples *first = xmalloc(sizeof *first), *s = xmalloc(sizeof *s);
    int64_t preempted = 0, cached = 0;
    generate(r, &LIMITS[0], first);
    sane(first);
    assert_true(first->cached > 0);
    same_as_training(r, first, what);
    const bool is_ref = strcmp(r->backend, "ref") == 0; /* it has no threads */
    for (size_t l = 1; l < sizeof LIMITS / sizeof *LIMITS; l++) {
        generate(r, &LIMITS[l], s);
        assert_same(s, first, what, LIMITS[l].what);
        if (LIMITS[l].no_prefix_cache) assert_int_equal(s->cached, 0);
        assert_true((s->bursts > 0) == (LIMITS[l].max_burst > 1));
        preempted += s->preempted;
        cached += s->cached;
    }
    assert_true(preempted > 0 && cached > 0);
    if (!is_ref) {
        struct rig other = {.adapter = r->adapter, .quant = r->quant};
        assert_true(open_backend(&other.dev, r->backend, 3 - r->threads)); /* 1 and 2 threads */
        rig_open(&other, r->dir, r->m->act, MODEL_INFER);
        generate(&other, &LIMITS[0], s);
        assert_same(s, first, what, "other number of threads");
        rig_close(&other);
    }
    print_message("%-36s 0 bits differ; %lld preemptions, %lld rows shared\n", what, (long long)preempted, (long long)cached);
    free(first);
    free(s);
}

static void inv01_rollout_equals_train(void **state) {
    (void)state;
    each_backend(rollout_check);
}

/* ---- several segments ---- */

enum { TURNS = 3, GIVEN = 5 };                               /* GIVEN: tokens that an environment writes after a turn */
static const int64_t TURN_ENDS[TURNS] = {9, 23, MAX_TOKENS}; /* of the response */

/* Each sample has TURNS segments of the policy, which an end token may cut short, and in between GIVEN tokens of an environment:
 * those have log-probs that nobody computes. env says which they are. */
static void generate_turns(struct rig *r, const struct limits *l, struct samples *s, uint8_t env[N_SAMPLES][MAX_TOKENS]) {
    struct decoder *d;
    struct engine *e;
    const struct decoder_args a = {.model = r->m,
                                   .n_kv_blocks = l->n_kv_blocks,
                                   .n_states = l->max_seqs,
                                   .max_rows = l->max_rows,
                                   .max_seqs = l->max_seqs,
                                   .max_len = MAX_LEN,
                                   .max_burst = l->max_burst};
    const struct engine_config cfg = {
        .max_rows = l->max_rows, .max_seqs = l->max_seqs, .no_prefix_cache = l->no_prefix_cache, .done = take, .done_arg = s};
    memset(s, 0, sizeof *s);
    memset(env, 0, sizeof(uint8_t[N_SAMPLES][MAX_TOKENS]));
    OK(decoder_open(&d, &a));
    OK(decoder_engine(&e, d, &cfg));
    for (int turn = 0; turn < TURNS; turn++) {
        for (int64_t k = 0; k < N_SAMPLES; k++) {
            for (int t = 0; turn > 0 && t < GIVEN; t++, s->n[k]++) {
                env[k][s->n[k]] = 1;
                s->ids[k][s->n[k]] = (int32_t)(20 + 7 * k + t);
                s->logp[k][s->n[k]] = s->logp_kept[k][s->n[k]] = 0;
            }
            struct engine_request q = rest_of(r, k, s);
            q.max_tokens = TURN_ENDS[turn];
            q.segment = q.n_begun;
            s->ended[k] = false;
            OK(engine_submit(e, &q, NULL));
        }
        const int64_t cached = engine_stats(e).cached_rows;
        OK(engine_run(e));
        if (turn > 0 && !l->no_prefix_cache && l->n_kv_blocks > 100) /* of every earlier turn the full blocks were kept */
            for (int64_t k = 0, kept = 0; k < N_SAMPLES; k++) {
                kept += (PROMPT_LENS[k / N] + TURN_ENDS[turn - 1] - 1) / KV_BLOCK_LEN * KV_BLOCK_LEN;
                if (k == N_SAMPLES - 1) assert_true(engine_stats(e).cached_rows - cached >= kept - N_SAMPLES * KV_BLOCK_LEN);
            }
    }
    s->preempted = engine_stats(e).preempted;
    engine_destroy(e);
    decoder_close(d);
}

static void segments_check(struct rig *r, const char *what) {
    uint8_t env[N_SAMPLES][MAX_TOKENS], again[N_SAMPLES][MAX_TOKENS];
    struct samples *first = xmalloc(sizeof *first), *s = xmalloc(sizeof *s);
    struct packed *p = xmalloc(sizeof *p);
    float *logp = xmalloc(sizeof(float) * N_SAMPLES * MAX_TOKENS);
    struct trained_model *a;
    const struct trained_model_args args = {.dev = &r->dev, .model = r->m, .max_rows = N_SAMPLES * MAX_LEN, .max_seqs = N_SAMPLES};
    int64_t at = 0, drawn = 0, preempted = 0;
    generate_turns(r, &LIMITS[0], first, env);
    pack(r, first, NULL, p);
    OK(trained_model_create(&a, &args));
    OK(trained_model_forward(a, p->seqs, p->n, (struct micro_batch_limits){.max_seqs = 4}, TEMPERATURE,
                             (struct forward_out){.logp = logp}));
    for (int64_t k = 0; k < N_SAMPLES; k++)
        for (int64_t t = 0; t < first->n[k]; t++, at++) {
            drawn += !env[k][t];
            if (env[k][t] ? first->logp[k][t] != 0 : memcmp(&first->logp[k][t], &logp[at], sizeof *logp) != 0)
                fail_msg("%s: the log-prob of token %lld of sample %lld, in several segments, is %.9g; one forward pass has %.9g",
                         what, (long long)t, (long long)k, (double)first->logp[k][t], (double)logp[at]);
        }
    assert_int_equal(at, p->n_targets);
    assert_int_equal(at - drawn, N_SAMPLES * (TURNS - 1) * GIVEN);
    for (size_t l = 1; l < sizeof LIMITS / sizeof *LIMITS; l++) {
        if (LIMITS[l].steps > 0) continue;
        generate_turns(r, &LIMITS[l], s, again);
        assert_same(s, first, what, LIMITS[l].what);
        assert_memory_equal(env, again, sizeof env);
        preempted += s->preempted;
    }
    assert_true(preempted > 0);
    trained_model_destroy(a);
    free(logp);
    free(p);
    free(first);
    free(s);
}

static void inv01_segments(void **state) {
    (void)state;
    char *dir = make_model(CONFIGS[0]);
    static const enum dtype acts[] = {DT_F32, DT_BF16};
    EACH(t, acts) {
        struct rig r = {.backend = "cpu", .threads = 1};
        OK(dev_open_cpu(&r.dev, 1, NULL));
        rig_open(&r, dir, acts[t], MODEL_INFER);
        segments_check(&r, dtype_name(acts[t]));
        rig_close(&r);
    }
    case_drop_dir(dir);
}

/* Log-probs, entropies and squares of one sequence: alone, and among all others. */
static void batch_invariant_check(struct rig *r, const char *what) {
    struct samples *s = xmalloc(sizeof *s);
    struct packed *p = xmalloc(sizeof *p);
    enum { SIZE = N_SAMPLES * MAX_TOKENS };
    float *all = xmalloc(6 * SIZE * sizeof(float)), *one = all + 3 * SIZE;
    generate(r, &LIMITS[0], s);
    pack(r, s, NULL, p);
    struct trained_model *a;
    const struct trained_model_args args = {.dev = &r->dev, .model = r->m, .max_rows = N_SAMPLES * MAX_LEN, .max_seqs = N_SAMPLES};
    OK(trained_model_create(&a, &args));
    const struct micro_batch_limits cut = {.max_seqs = N_SAMPLES};
    OK(trained_model_forward(a, p->seqs, p->n, cut, TEMPERATURE,
                             (struct forward_out){.logp = all, .entropy = all + SIZE, .sum_pi_sq = all + 2 * SIZE}));
    int64_t at = 0;
    for (int64_t i = 0; i < p->n; i++) {
        OK(trained_model_forward(a, &p->seqs[i], 1, cut, TEMPERATURE,
                                 (struct forward_out){.logp = one, .entropy = one + SIZE, .sum_pi_sq = one + 2 * SIZE}));
        const int64_t n = packed_seq_targets(&p->seqs[i]);
        for (int k = 0; k < 3; k++)
            if (memcmp(all + k * SIZE + at, one + k * SIZE, (size_t)n * 4) != 0)
                fail_msg("%s: output %d of sequence %lld depends on its batch", what, k, (long long)i);
        at += n;
    }
    assert_int_equal(at, p->n_targets);
    trained_model_destroy(a);
    free(all);
    free(p);
    free(s);
}

static void inv02_row_independence(void **state) {
    (void)state;
    each_backend(batch_invariant_check);
}

/* ---- memory ---- */

static struct {
    int (*real)(struct dev *d, size_t bytes, void **out);
    int64_t n;
} counted;

static int counting_alloc(struct dev *d, size_t bytes, void **out) {
    counted.n++;
    return counted.real(d, bytes, out);
}

static int push_up(void *arg, const struct micro_loss *m) {
    (void)arg;
    for (int64_t t = 0; t < m->t1 - m->t0; t++) m->dout[t] = -1.0f / (float)(N_SAMPLES * MAX_TOKENS);
    return 0;
}

/* As the trainer has it: decoder and trained model in one block, used in turn. */
static void no_allocation_after_open(int config, bool adapter) {
    char *dir = make_model(CONFIGS[config]);
    struct rig r = {.adapter = adapter};
    struct decoder *d;
    struct trained_model *a;
    void *block;
    OK(dev_open_cpu(&r.dev, 2, NULL));
    struct dev_ops ops = *r.dev.ops;
    counted.real = ops.alloc;
    counted.n = 0;
    ops.alloc = counting_alloc;
    const struct dev_ops *own = r.dev.ops;
    r.dev.ops = &ops;
    rig_open(&r, dir, DT_BF16, MODEL_TRAIN);
    struct decoder_args ra = {.model = r.m, .n_kv_blocks = 60, .max_rows = 128, .max_seqs = 8, .max_len = MAX_LEN};
    struct trained_model_args aa = {
        .dev = &r.dev, .model = r.m, .train = true, .keep = MODEL_KEEP_LAYER, .max_rows = 4 * MAX_LEN, .max_seqs = 4};
    const size_t rollout_bytes = decoder_bytes(&r.m->cfg, DT_BF16, &ra),
                 actor_bytes = trained_model_block_bytes(&r.m->cfg, DT_BF16, &aa);
    const size_t bytes = rollout_bytes > actor_bytes ? rollout_bytes : actor_bytes;
    OK(dev_alloc(&r.dev, bytes, &block));
    ra.block = aa.block = block;
    OK(decoder_open(&d, &ra));
    OK(trained_model_create(&a, &aa));
    const int64_t opened = counted.n;
    const size_t allocated = r.dev.allocated, peak = r.dev.peak;
    assert_true(opened >= 5);
    struct samples *s = xmalloc(sizeof *s);
    struct packed *p = xmalloc(sizeof *p);
    const struct limits l = {.max_rows = 128, .max_seqs = 8};
    const struct optim_config optim = {.beta1 = 0.9, .beta2 = 0.999, .eps = 1e-8, .clip = 1, .schedule = "constant"};
    float before = 0;
    for (int step = 0; step < 3; step++) {
        struct step_result res;
        generate_on(&r, d, &l, s);
        assert_true(s->logp[0][0] != before); /* the policy moved between the steps */
        before = s->logp[0][0];
        pack(&r, s, NULL, p);
        const struct mini_batch m = {.seqs = p->seqs, .n = p->n, .cut = {.max_seqs = 4}, .temperature = 1, .loss = push_up};
        OK(trained_model_step(a, &m, &optim, 1e-2, &res));
        assert_true(res.optim.grad_norm > 0 && isfinite(res.optim.grad_norm));
        assert_int_equal(counted.n, opened);
        assert_int_equal(r.dev.allocated, allocated);
    }
    assert_int_equal(r.dev.peak, peak);
    trained_model_destroy(a);
    decoder_close(d);
    dev_free(&r.dev, block, bytes);
    model_close(r.m);
    assert_int_equal(r.dev.allocated, 0);
    r.dev.ops = own;
    dev_close(&r.dev);
    case_drop_dir(dir);
    free(p);
    free(s);
}

static void inv06_no_allocation_after_open(void **state) {
    (void)state;
    no_allocation_after_open(0, false);
    no_allocation_after_open(0, true);
    no_allocation_after_open(2, false);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(inv01_rollout_equals_train),
        cmocka_unit_test(inv01_segments),
        cmocka_unit_test(inv02_row_independence),
        cmocka_unit_test(inv06_no_allocation_after_open),
    };
    return cmocka_run_group_tests_name("rollout and training", tests, NULL, NULL);
}
