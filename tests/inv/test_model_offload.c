/* test_model_offload.c - what is in host memory changes no bit: forward passes of weights
 * that come layer by layer, optimizer steps on a master and moments that come piece by piece.
 * On the CPU the transfers are copies, on a GPU they run beside the queue. */
#include "model_case.h"

#include "base/rng.h"
#include "model/lora/lora_int.h"
#include "model/master_weights.h"
#include "model/parallel/weight_streaming.h"

static const char *const BACKENDS[] = {"ref", "cpu", "cuda"};
#define EACH(i, list) for (size_t i = 0; i < sizeof(list) / sizeof((list)[0]); i++)

/* A model directory with random weights; the caller removes it. */
static void new_dir(char dir[64], int layers, int vocab, bool tied) {
    json_t *config = json_pack("{s:[s],s:s,s:i,s:i,s:i,s:i,s:i,s:i,s:i,s:i,s:f,s:f,s:b,s:f,s:s,s:i}", "architectures",
                               "Qwen2ForCausalLM", "model_type", "qwen2", "hidden_size", 64, "intermediate_size", 72,
                               "num_hidden_layers", layers, "num_attention_heads", 4, "num_key_value_heads", 2, "head_dim", 16,
                               "vocab_size", vocab, "max_position_embeddings", 64, "rms_norm_eps", 1e-6, "rope_theta", 10000.0,
                               "tie_word_embeddings", tied, "initializer_range", 0.2, "torch_dtype", "float32", "eos_token_id", 1);
    assert_non_null(config);
    strcpy(dir, "/tmp/verlc_offload_XXXXXX");
    assert_non_null(mkdtemp(dir));
    OK(model_init_dir(config, dir, 1, DT_F32));
    json_decref(config);
}

/* ---- weights layer by layer ---- */

enum { N = 40, PASSES = 3 };

static void logps(struct model *m, float out[N - 1]) {
    int32_t ids[N], row[N - 1];
    float inv_temp[N - 1];
    struct rng g = {.seed = 8, .stream = RNG_TEST};
    for (int i = 0; i < N; i++) ids[i] = (int32_t)rng_below(&g, (uint64_t)m->cfg.vocab);
    for (int i = 0; i < N - 1; i++) {
        row[i] = i;
        inv_temp[i] = 1;
    }
    const struct case_seq s = {ids, N};
    struct model_batch b;
    struct model_acts *a;
    case_pack(m->dev, &b, &s, 1);
    OK(model_acts_create(&a, m, N, MODEL_KEEP_NONE, NULL));
    OK(model_forward(m, &b, a));
    OK(model_logp(m, a, &(struct model_logp_args){.n = N - 1, .row = row, .target = ids + 1, .inv_temp = inv_temp, .logp = out}));
    model_acts_destroy(a);
    case_unpack(m->dev, &b);
}

static void streamed(const char *dir, const char *backend, enum dtype act) {
    struct dev dev;
    struct model *kept, *far;
    float want[N - 1], got[N - 1];
    struct model_open_args a = {.dir = dir, .act = act, .max_len = N};
    case_dev(&dev, backend, 2);
    OK(model_open(&kept, &dev, &a));
    a.flags = MODEL_HOST_WEIGHTS;
    OK(model_open(&far, &dev, &a));
    logps(kept, want);
    const struct model_stream_shape shape = {&kept->cfg, &dev, act, QUANT_NONE, MODEL_STREAM_HOST, false, 0};
    const size_t bytes = model_stream_bytes(&shape);
    void *block = case_alloc(&dev, bytes);
    assert_true(kept->cfg.n_layers < 3 || bytes < kept->weights_bytes);
    model_stream_bind(far, block, NULL, 0);
    for (int pass = 0; pass < PASSES; pass++) {
        OK(dev_zero(&dev, block, bytes)); /* another phase's */
        model_stream_begin(far);
        for (int i = 0; i < 2; i++) {
            memset(got, 0, sizeof got);
            logps(far, got);
            if (memcmp(got, want, sizeof got) != 0)
                fail_msg("%s, pass %d: weights from host memory change log-probs", backend, pass);
        }
    }
    model_close(far);
    model_close(kept);
    dev_free(&dev, block, bytes);
    assert_int_equal(dev.allocated + dev.host_allocated, 0);
    dev_close(&dev);
}

static void streamed_weights_give_the_same_bits(void **state) {
    (void)state;
    static const struct {
        int layers;
        bool tied;
    } shapes[] = {{1, true}, {2, false}, {5, true}, {6, false}};
    EACH(s, shapes) {
        char dir[64];
        new_dir(dir, shapes[s].layers, 300, shapes[s].tied);
        EACH(b, BACKENDS)
        for (int act = 0; act < 2; act++)
            if (case_has(BACKENDS[b])) streamed(dir, BACKENDS[b], act ? DT_BF16 : DT_F32);
        OK(file_remove_tree(dir));
    }
}

/* ---- optimizer steps ---- */

/* What a run of steps leaves: bytes of each array. */
enum { MASTER, WEIGHTS, STATE, N_RESULTS = STATE + OPTIM_MAX_ARRAYS };
struct trained {
    void *data[N_RESULTS]; /* owned */
    size_t bytes[N_RESULTS];
};
enum { STEPS = 3 };

static void take(struct trained *t, int i, struct dev *d, const void *data, size_t bytes) {
    t->data[i] = xmalloc(bytes);
    t->bytes[i] = bytes;
    OK(dev_copy_out(d, t->data[i], data, bytes));
}
static void trained_free(struct trained *t) {
    for (int i = 0; i < N_RESULTS; i++) free(t->data[i]);
}

static void open_trained(struct model **m, struct dev *dev, const char *dir, enum dtype act, const struct optim_config *c,
                         bool adapter) {
    const int flags = (c->host_master ? MODEL_HOST_MASTER : 0) | (adapter ? MODEL_INFER : MODEL_TRAIN);
    OK(model_open(m, dev, &(struct model_open_args){.dir = dir, .act = act, .max_len = 8, .flags = flags}));
    if (adapter) {
        struct lora_config l = {.rank = 4, .alpha = 8, .targets = json_string("all-linear")};
        OK(model_lora_create(*m, &l, 3));
        lora_config_free(&l);
        OK(dev_zero(dev, (*m)->lora->block, (*m)->lora->block_bytes));
    } else {
        OK(dev_zero(dev, (*m)->weights, (*m)->weights_bytes)); /* what lies between the groups is compared too */
    }
    OK(model_refresh(*m));
}

static void train(struct trained *t, const char *dir, const char *backend, enum dtype act, const struct optim_config *c,
                  bool adapter) {
    struct dev dev;
    struct model *m;
    struct optim *o;
    struct optim_result r;
    struct rng rng = {.seed = 4, .stream = RNG_TEST};
    case_dev(&dev, backend, 2);
    open_trained(&m, &dev, dir, act, c, adapter);
    const size_t bytes = (size_t)m->n_train * 4;
    float *host = xmalloc(bytes), *g = case_alloc(&dev, bytes);
    OK(optim_create(&o, m, c));
    for (int s = 0; s < STEPS; s++) {
        for (int64_t i = 0; i < m->n_train; i++) host[i] = (float)rng_unit(&rng) - 0.5f;
        OK(dev_copy_in(&dev, g, host, bytes));
        OK(optim_step(o, m, g, c, c->lr, &r));
        assert_true(isfinite(r.grad_norm));
    }
    *t = (struct trained){0};
    take(t, MASTER, &dev, m->master, bytes);
    const struct weight b = adapter ? m->lora->groups[0].b : (struct weight){0};
    if (adapter) take(t, WEIGHTS, &dev, b.data, dev_weight_bytes(&dev, act, b.n, b.k));
    else take(t, WEIGHTS, &dev, m->weights, m->weights_bytes);
    struct optim_array arrays[OPTIM_MAX_ARRAYS]; /* as a checkpoint reads them */
    for (int i = 0, n = optim_arrays(o, arrays); i < n; i++)
        take(t, STATE + i, &dev, arrays[i].data, (size_t)arrays[i].n * dtype_size(arrays[i].dt));
    optim_destroy(o, m);
    dev_free(&dev, g, bytes);
    free(host);
    model_close(m);
    assert_int_equal(dev.allocated + dev.host_allocated, 0);
    dev_close(&dev);
}

static void compare(const char *dir, const char *backend, enum dtype act, struct optim_config c, bool adapter) {
    struct trained want, got;
    train(&want, dir, backend, act, &c, adapter);
    for (int far = 1; far < 4; far++) { /* the master, the state, both */
        c.host_master = far & 1;
        c.host_state = far & 2;
        train(&got, dir, backend, act, &c, adapter);
        for (int i = 0; i < N_RESULTS; i++)
            if (got.bytes[i] != want.bytes[i] || (want.bytes[i] && memcmp(got.data[i], want.data[i], want.bytes[i]) != 0))
                fail_msg("%s on %s: offload %d changes array %d", optim_kind_name(c.kind), backend, far, i);
        trained_free(&got);
    }
    trained_free(&want);
}

static const struct optim_config OPTIMS[] = {
    {.kind = OPTIM_ADAMW, .lr = 1e-2, .beta1 = 0.9, .beta2 = 0.99, .eps = 1e-8, .weight_decay = 0.1, .clip = 1},
    {.kind = OPTIM_ADAMW8, .lr = 1e-2, .beta1 = 0.9, .beta2 = 0.99, .eps = 1e-8, .weight_decay = 0.1, .clip = 1},
    {.kind = OPTIM_ADAM, .lr = 1e-2, .beta1 = 0.9, .beta2 = 0.99, .eps = 1e-8, .weight_decay = 0.1, .clip = 1, .amsgrad = true},
    {.kind = OPTIM_RADAM, .lr = 1e-2, .beta1 = 0.9, .beta2 = 0.9, .eps = 1e-8, .weight_decay = 0.1, .clip = 1, .maximize = true},
    {.kind = OPTIM_RMSPROP, .lr = 1e-3, .alpha = 0.9, .eps = 1e-8, .weight_decay = 0.1, .clip = 1, .centered = true},
    {.kind = OPTIM_SGD, .lr = 1e-2, .momentum = 0.9, .nesterov = true, .weight_decay = 0.1, .clip = 1},
    {.kind = OPTIM_MUON,
     .lr = 1e-2,
     .beta1 = 0.9,
     .beta2 = 0.99,
     .eps = 1e-8,
     .momentum = 0.9,
     .nesterov = true,
     .ns_steps = 5,
     .weight_decay = 0.1,
     .clip = 1},
};

static void every_optimizer_gives_the_same_bits(void **state) {
    (void)state;
    char dir[64];
    new_dir(dir, 2, 80, false);
    EACH(b, BACKENDS)
    EACH(o, OPTIMS)
    for (int act = 0; act < 2; act++)
        if (case_has(BACKENDS[b])) compare(dir, BACKENDS[b], act ? DT_BF16 : DT_F32, OPTIMS[o], false);
    OK(file_remove_tree(dir));
}

/* More elements than two pieces hold, so that buffers are used again while transfers run. */
static void many_pieces_give_the_same_bits(void **state) {
    (void)state;
    char dir[64];
    new_dir(dir, 1, 120000, false); /* 15.4 M elements: nine pieces, the last one short */
    EACH(b, BACKENDS)
    if (strcmp(BACKENDS[b], "ref") != 0 && case_has(BACKENDS[b])) compare(dir, BACKENDS[b], DT_BF16, OPTIMS[0], false);
    OK(file_remove_tree(dir));
}

static void an_adapter_gives_the_same_bits(void **state) {
    (void)state;
    char dir[64];
    new_dir(dir, 2, 80, true);
    EACH(b, BACKENDS) if (case_has(BACKENDS[b])) compare(dir, BACKENDS[b], DT_BF16, OPTIMS[0], true);
    OK(file_remove_tree(dir));
}

/* The plan's figures are what is taken, on the device and on the host. */
static void state_is_where_it_was_planned(void **state) {
    (void)state;
    char dir[64];
    new_dir(dir, 2, 80, false);
    EACH(b, BACKENDS) EACH(k, OPTIMS) {
        struct dev dev;
        struct model *m;
        struct optim *o;
        struct optim_plan p;
        if (!case_has(BACKENDS[b])) continue;
        case_dev(&dev, BACKENDS[b], 1);
        struct optim_config c = OPTIMS[k];
        c.host_state = c.host_master = true;
        OK(model_open(
            &m, &dev,
            &(struct model_open_args){.dir = dir, .act = DT_BF16, .max_len = 8, .flags = MODEL_TRAIN | MODEL_HOST_MASTER}));
        const size_t device_before = dev.allocated, host_before = dev.host_allocated;
        OK(optim_create(&o, m, &c));
        OK(optim_plan(&p, &m->cfg, &dev, DT_BF16, NULL, &c));
        assert_true(p.host > 0);
        assert_int_equal(o->block_bytes, p.moments);
        assert_int_equal(o->host_bytes, p.host);
        assert_int_equal(dev.allocated + dev.host_allocated - device_before - host_before, p.moments + p.host);
        if (dev_has_own_memory(&dev)) assert_int_equal(dev.host_allocated - host_before, p.host);
        optim_destroy(o, m);
        model_close(m);
        dev_close(&dev);
    }
    OK(file_remove_tree(dir));
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(streamed_weights_give_the_same_bits), cmocka_unit_test(every_optimizer_gives_the_same_bits),
        cmocka_unit_test(many_pieces_give_the_same_bits),      cmocka_unit_test(an_adapter_gives_the_same_bits),
        cmocka_unit_test(state_is_where_it_was_planned),
    };
    return cmocka_run_group_tests_name("offload to host memory", tests, NULL, NULL);
}
