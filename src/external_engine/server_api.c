/* server_api.c - see server_api.h. */
#include "external_engine/server_api.h"

#include "base/buf.h"
#include "base/err.h"
#include "base/json.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

#define MOST_LOGP 1e-2 /* a log-prob that a server has rounded may lie this far above 0 */
enum { SAID_BYTES = 200 };

static const struct {
    const char *name, *owner, *generate;
} kinds[SERVER_KINDS] = {
    {"vllm", "vllm", "/v1/completions"}, {"sglang", "sglang", "/generate"}, {"trtllm", "tensorrt_llm", "/v1/completions"}};

const char *server_kind_name(enum server_kind k) { return kinds[k].name; }
const char *server_generate_path(enum server_kind k) { return kinds[k].generate; }

int server_kind_find(const char *name, enum server_kind *kind) {
    for (int k = 0; k < SERVER_KINDS; k++) {
        if (strcmp(kinds[k].name, name) != 0) continue;
        *kind = (enum server_kind)k;
        return 0;
    }
    FAIL(ERR_INVAL, "'%s' is no kind of server; use vllm, sglang or trtllm", name);
}

/* ---- who it is ---- */

int server_read_identity(struct server_identity *out, const char *text, size_t n) {
    json_t *v;
    *out = (struct server_identity){0};
    TRY(json_parse(&v, text, n, "/v1/models"));
    const json_t *card = json_array_get(json_object_get(v, "data"), 0);
    const char *id = json_string_value(json_object_get(card, "id")), *owner = json_string_value(json_object_get(card, "owned_by"));
    const json_int_t len = json_integer_value(json_object_get(card, "max_model_len"));
    for (int k = 0; owner && k < SERVER_KINDS; k++)
        if (strcmp(kinds[k].owner, owner) == 0) *out = (struct server_identity){.known = true, .kind = (enum server_kind)k};
    out->max_len = len > 0 ? len : 0;
    if (id) out->model = xstrdup(id);
    json_decref(v);
    if (!out->model) FAIL(ERR_FORMAT, "/v1/models: data[0].id is missing: it is no server of an OpenAI-compatible interface");
    return 0;
}

/* ---- requests ---- */

static json_t *prompt_ids(const struct engine_request *q) {
    json_t *a = json_i32_array(q->prompt, q->n_prompt);
    for (int64_t i = 0; i < q->n_begun; i++) json_array_append_new(a, json_integer(q->begun[i]));
    return a;
}

/* Every value is given: a server's defaults may be those of the model's generation_config.json. */
static json_t *sglang_body(const struct engine_request *q, json_t *stop, json_int_t seed) {
    return json_pack("{s:o, s:{s:I, s:f, s:f, s:i, s:f, s:f, s:o, s:b, s:b, s:I}, s:b, s:i, s:b}", "input_ids", prompt_ids(q),
                     "sampling_params", "max_new_tokens", (json_int_t)(q->max_tokens - q->n_begun), "temperature",
                     (double)q->temperature, "top_p", (double)q->top_p, "top_k", q->top_k > 0 ? q->top_k : -1, "min_p",
                     (double)q->min_p, "repetition_penalty", (double)q->repetition_penalty, "stop_token_ids", stop, "ignore_eos",
                     (int)q->ignore_eos, "no_stop_trim", 1, "sampling_seed", seed, "return_logprob", 1, "logprob_start_len", -1,
                     "stream", 0);
}

static json_t *completions_body(enum server_kind k, const char *model, const struct engine_request *q, json_t *stop,
                                json_int_t seed) {
    json_t *body =
        json_pack("{s:s, s:o, s:I, s:f, s:f, s:i, s:f, s:f, s:o, s:b, s:I, s:i, s:i, s:b}", "model", model, "prompt", prompt_ids(q),
                  "max_tokens", (json_int_t)(q->max_tokens - q->n_begun), "temperature", (double)q->temperature, "top_p",
                  (double)q->top_p, "top_k", q->top_k > 0 ? q->top_k : 0, "min_p", (double)q->min_p, "repetition_penalty",
                  (double)q->repetition_penalty, "stop_token_ids", stop, "ignore_eos", (int)q->ignore_eos, "seed", seed, "n", 1,
                  "logprobs", k == SERVER_VLLM ? 0 : 1, "stream", 0);
    CHECK(body != NULL);
    /* Without text TensorRT-LLM gives the ids; vLLM has a key for them. */
    if (k == SERVER_VLLM) json_object_set_new(body, "return_token_ids", json_true());
    else json_object_set_new(body, "detokenize", json_false());
    return body;
}

int server_check_request(const struct engine_request *q) {
    if (q->n_stop > 0) FAIL(ERR_INVAL, "stop strings are not asked of an external engine (rollout.engine_url); stop_token_ids are");
    if (q->n_top > 0) FAIL(ERR_INVAL, "the most probable tokens are not asked of an external engine (rollout.engine_url)");
    if (q->pause_at > 0) FAIL(ERR_INVAL, "a response is not interrupted in an external engine (rollout.engine_url)");
    if (q->n_prompt < 1 || q->n < 1 || q->n_begun < 0 || q->n_begun >= q->max_tokens)
        FAIL(ERR_INVAL, "a request needs a prompt, a sample and a token to draw");
    return 0;
}

json_t *server_generate_body(enum server_kind k, const char *model, const struct engine_request *q, struct server_stop stop,
                             int64_t seed) {
    json_t *ids = q->ignore_eos ? json_array() : json_i32_array(stop.id, stop.n);
    json_t *body =
        k == SERVER_SGLANG ? sglang_body(q, ids, (json_int_t)seed) : completions_body(k, model, q, ids, (json_int_t)seed);
    CHECK(body != NULL);
    return body;
}

/* ---- answers ---- */

/* The parts of an answer that every server has under names of its own. */
struct answer {
    const json_t *ids, *logps; /* of completions: two lists; of SGLang: ids may be NULL */
    const char *finish;
    bool pairs; /* logps: [log-prob, id, text] of each token */
};

static int find_completion(const json_t *v, struct answer *a) {
    const json_t *choice = json_array_get(json_object_get(v, "choices"), 0);
    a->ids = json_object_get(choice, "token_ids");
    a->logps = json_object_get(json_object_get(choice, "logprobs"), "token_logprobs");
    a->finish = json_string_value(json_object_get(choice, "finish_reason"));
    if (!json_is_array(a->ids)) FAIL(ERR_FORMAT, "choices[0].token_ids is missing: the server is too old to give token ids");
    if (!json_is_array(a->logps)) FAIL(ERR_FORMAT, "choices[0].logprobs.token_logprobs is missing");
    if (json_array_size(a->ids) != json_array_size(a->logps))
        FAIL(ERR_FORMAT, "%zu token ids with %zu log-probs", json_array_size(a->ids), json_array_size(a->logps));
    return 0;
}

static int find_generated(const json_t *v, struct answer *a) {
    const json_t *info = json_object_get(v, "meta_info"), *finish = json_object_get(info, "finish_reason"),
                 *ids = json_object_get(v, "output_ids");
    a->pairs = true;
    a->ids = json_is_array(ids) ? ids : NULL;
    a->logps = json_object_get(info, "output_token_logprobs");
    a->finish = json_string_value(json_object_get(finish, "type"));
    if (!json_is_array(a->logps)) FAIL(ERR_FORMAT, "meta_info.output_token_logprobs is missing");
    if (a->ids && json_array_size(a->ids) != json_array_size(a->logps))
        FAIL(ERR_FORMAT, "%zu output_ids with %zu log-probs", json_array_size(a->ids), json_array_size(a->logps));
    return 0;
}

static int read_token(const struct answer *a, size_t t, int64_t vocab, int32_t *id, float *logp) {
    const json_t *entry = json_array_get(a->logps, t), *x = a->pairs ? json_array_get(entry, 0) : entry;
    const json_t *of = a->pairs ? json_array_get(entry, 1) : json_array_get(a->ids, t);
    const json_int_t token = json_integer_value(of);
    const double p = json_number_value(x);
    if (!json_is_integer(of) || token < 0 || token >= vocab)
        FAIL(ERR_FORMAT, "token %zu is no id of the model, which has %lld", t, (long long)vocab);
    if (a->pairs && a->ids && json_integer_value(json_array_get(a->ids, t)) != token)
        FAIL(ERR_FORMAT, "token %zu is another one in output_ids than in output_token_logprobs", t);
    if (!json_is_number(x) || !isfinite((float)p) || p > MOST_LOGP) FAIL(ERR_FORMAT, "token %zu has no log-prob", t);
    *id = (int32_t)token;
    *logp = p > 0 ? 0 : (float)p;
    return 0;
}

static bool is_stop(const struct server_limits *l, int32_t id) {
    for (int64_t i = 0; i < l->stop.n; i++)
        if (l->stop.id[i] == id) return true;
    return false;
}

static int read_answer(struct server_sample *out, const struct answer *a, const struct server_limits *l) {
    const size_t n = json_array_size(a->logps);
    out->stopped = a->finish && strcmp(a->finish, "stop") == 0;
    const bool length = a->finish && strcmp(a->finish, "length") == 0;
    if (!out->stopped && !length)
        FAIL(ERR_FORMAT, "the response ended by '%.40s'; stop or length is wanted", a->finish ? a->finish : "null");
    if (n == 0) FAIL(ERR_FORMAT, "the response has no token");
    if ((int64_t)n > l->max_tokens || (length && (int64_t)n < l->max_tokens))
        FAIL(ERR_FORMAT, "the response has %zu tokens and ended by '%s'; %lld were asked for", n, a->finish,
             (long long)l->max_tokens);
    out->ids = xmalloc(n * sizeof *out->ids);
    out->logp = xmalloc(n * sizeof *out->logp);
    for (size_t t = 0; t < n; t++) {
        TRY(read_token(a, t, l->vocab, &out->ids[t], &out->logp[t]));
        if (t + 1 < n && is_stop(l, out->ids[t])) FAIL(ERR_FORMAT, "the response goes on after the end token %d", out->ids[t]);
    }
    out->n = (int64_t)n;
    return 0;
}

int server_read_sample(struct server_sample *out, enum server_kind k, const char *text, size_t n, const struct server_limits *l) {
    struct answer a = {0};
    json_t *v = NULL;
    *out = (struct server_sample){0};
    int rc = json_parse(&v, text, n, "the answer");
    if (rc == 0) rc = k == SERVER_SGLANG ? find_generated(v, &a) : find_completion(v, &a);
    if (rc == 0) rc = read_answer(out, &a, l);
    json_decref(v);
    if (rc == 0) return 0;
    server_sample_free(out);
    return err_pass(rc, __FILE__, __LINE__);
}

void server_sample_free(struct server_sample *s) {
    free(s->ids);
    free(s->logp);
    *s = (struct server_sample){0};
}

/* ---- new weights ---- */

int server_update_call(enum server_kind k, int i, const char *dir, const char **path, json_t **body) {
    *path = NULL;
    *body = NULL;
    if (k == SERVER_TRTLLM)
        FAIL(ERR_UNSUPPORTED,
             "TensorRT-LLM's /update_weights takes handles of CUDA memory in its own process' machine, and no files: "
             "give rollout.engine_update_command, a command that has the server read $VERLC_WEIGHTS");
    if (k == SERVER_SGLANG && i == 0) {
        *path = "/update_weights_from_disk";
        *body = json_pack("{s:s, s:b}", "model_path", dir, "flush_cache", 1);
    }
    if (k == SERVER_VLLM && i == 0) {
        *path = "/collective_rpc";
        *body = json_pack("{s:s, s:{s:s}}", "method", "reload_weights", "kwargs", "weights_path", dir);
    }
    if (k == SERVER_VLLM && i == 1) { /* blocks of the old weights */
        *path = "/reset_prefix_cache";
        *body = json_object();
    }
    return 0;
}

int server_read_update(enum server_kind k, const char *text, size_t n) {
    json_t *v = NULL;
    const int rc = n > 0 ? json_parse(&v, text, n, "the answer") : 0;
    const json_t *success = json_object_get(v, "success");
    const bool done = k == SERVER_SGLANG ? json_is_true(success) : !json_is_false(success); /* older vLLM: the status alone */
    char *said = xstrndup(text, n < SAID_BYTES ? n : SAID_BYTES);
    json_decref(v);
    if (rc == 0 && !done) err_set(ERR_FORMAT, __FILE__, __LINE__, "it does not have the new weights: %s", said);
    free(said);
    return done ? rc : ERR_FORMAT;
}
