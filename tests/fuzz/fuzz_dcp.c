/* fuzz_dcp.c - hostile checkpoints of torch.distributed.checkpoint: 4 bytes say how long .metadata is, which follows; the rest is
 * the one file of chunks.  Every element of what dcp_open accepts is read, at once and one by one, and so is every weight of
 * what megatron_open makes of it, for a model whose config.json is one of those here: with the highest bit that with experts, with
 * the next one too that with latent attention. */
#include "fuzz.h"

#include "base/buf.h"
#include "model/files/megatron.h"

#define SIZES                                                                                                      \
    "\"hidden_size\": 4, \"intermediate_size\": 6, "                                                               \
    "\"num_attention_heads\": 2, \"num_key_value_heads\": 1, \"head_dim\": 2, \"vocab_size\": 5, "                 \
    "\"max_position_embeddings\": 64, \"rms_norm_eps\": 1e-6, \"rope_theta\": 10000.0, \"hidden_act\": \"silu\", " \
    "\"tie_word_embeddings\": false, \"torch_dtype\": \"float32\""
static const char dense[] =
    "{\"architectures\": [\"Qwen2ForCausalLM\"], \"model_type\": \"qwen2\", " SIZES ", \"num_hidden_layers\": 2}";
static const char experts[] = "{\"architectures\": [\"Qwen3MoeForCausalLM\"], \"model_type\": \"qwen3_moe\", " SIZES
                              ", \"num_hidden_layers\": 2, \"num_experts\": 2, \"num_experts_per_tok\": 1, "
                              "\"moe_intermediate_size\": 3, \"mlp_only_layers\": [0], \"decoder_sparse_step\": 1}";
static const char latent[] = "{\"architectures\": [\"DeepseekV3ForCausalLM\"], \"model_type\": \"deepseek_v3\", " SIZES
                             ", \"num_hidden_layers\": 1, \"q_lora_rank\": null, \"kv_lora_rank\": 2, \"qk_nope_head_dim\": 2, "
                             "\"qk_rope_head_dim\": 2, \"v_head_dim\": 3, \"n_routed_experts\": 2, \"num_experts_per_tok\": 1, "
                             "\"n_shared_experts\": 1, \"moe_intermediate_size\": 3, \"n_group\": 1, \"topk_group\": 1, "
                             "\"first_k_dense_replace\": 0}";
static const char *const configs[] = {dense, dense, experts, latent};

static int every(void *arg, const char *name) {
    (void)arg;
    return strlen(name) % 16 != 15;
}

static void read_tensor(const struct dcp_tensor *t) {
    const size_t size = dtype_size(t->dt), n = (size_t)t->count * size;
    uint8_t *all = xmalloc(n), one[8];
    CHECK(t->n_chunks > 0 && t->nd > 0);
    dcp_read(t, 0, t->count, all);
    for (int64_t i = 0; i < t->count; i++) {
        dcp_read(t, i, 1, one);
        CHECK(memcmp(one, all + (size_t)i * size, size) == 0);
    }
    free(all);
}

static void read_weight(const struct megatron_tensor *t) {
    uint8_t *all = xmalloc((size_t)t->count * dtype_size(t->dt));
    CHECK(t->count == t->dim[0] * (t->nd == 2 ? t->dim[1] : 1));
    megatron_read(t, 0, t->count, all);
    free(all);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t n) {
    struct dcp *d;
    struct megatron *m;
    uint32_t n_metadata;
    if (n < sizeof n_metadata) return 0;
    fuzz_quiet();
    memcpy(&n_metadata, data, sizeof n_metadata);
    const char *const config = configs[n_metadata >> 30];
    n_metadata &= INT32_MAX >> 1;
    data += sizeof n_metadata;
    n -= sizeof n_metadata;
    if (n_metadata > n) n_metadata = (uint32_t)n;
    char *dir = file_join(fuzz_dir(), "dist_ckpt");
    CHECK(file_mkdirs(dir) == 0);
    free(fuzz_file("config.json", (const uint8_t *)config, strlen(config)));
    free(fuzz_file("dist_ckpt/.metadata", data, n_metadata));
    free(fuzz_file("dist_ckpt/__0_0.distcp", data + n_metadata, n - n_metadata));
    int rc = dcp_open(&d, dir, every, NULL);
    fuzz_check_rc(rc);
    if (rc == 0) {
        for (int64_t i = 0; i < dcp_count(d); i++) read_tensor(dcp_at(d, i));
        dcp_close(d);
    }
    rc = megatron_open(&m, &(struct megatron_args){.dir = fuzz_dir(), .config_dir = fuzz_dir()});
    fuzz_check_rc(rc);
    if (rc == 0) {
        for (int64_t i = 0; i < megatron_count(m); i++) read_weight(megatron_at(m, i));
        megatron_close(m);
    }
    free(dir);
    return 0;
}
