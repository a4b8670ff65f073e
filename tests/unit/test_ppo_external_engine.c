/* test_ppo_external_engine.c - requests of an external engine have the shapes that servers take, and an answer becomes a
 * sample whole or is refused. */
#include "external_engine/server_api.h"

#include "base/err.h"

#include <setjmp.h>
#include <stdarg.h>
#include <stdlib.h>
#include <string.h>
#include <cmocka.h>

static const int32_t prompt[] = {5, 6, 7}, begun[] = {8, 9}, stop[] = {2};
static const float logp[] = {-1, -2};
static const struct server_limits limits = {100, 3, {stop, 1}};

static struct engine_request request(void) {
    return (struct engine_request){.prompt = prompt,
                                   .n_prompt = 3,
                                   .n = 1,
                                   .max_tokens = 12,
                                   .temperature = 0.5f,
                                   .top_p = 1,
                                   .repetition_penalty = 1,
                                   .begun = begun,
                                   .begun_logp = logp,
                                   .n_begun = 2};
}

static void requests(void **state) {
    (void)state;
    const struct engine_request q = request();
    for (int k = 0; k < SERVER_KINDS; k++) {
        json_t *b = server_generate_body((enum server_kind)k, "policy", &q, limits.stop, 77);
        const bool sglang = k == SERVER_SGLANG;
        const json_t *s = sglang ? json_object_get(b, "sampling_params") : b,
                     *ids = json_object_get(b, sglang ? "input_ids" : "prompt");
        assert_int_equal(json_array_size(ids), 5); /* the tokens begun are context */
        assert_int_equal(json_integer_value(json_array_get(ids, 4)), 9);
        assert_int_equal(json_integer_value(json_object_get(s, sglang ? "max_new_tokens" : "max_tokens")), 10);
        assert_int_equal(json_integer_value(json_object_get(s, sglang ? "sampling_seed" : "seed")), 77);
        assert_int_equal(json_integer_value(json_array_get(json_object_get(s, "stop_token_ids"), 0)), 2);
        assert_true(json_real_value(json_object_get(s, "temperature")) == 0.5);
        assert_true(json_is_true(json_object_get(b, "return_token_ids")) == (k == SERVER_VLLM));
        json_decref(b);
    }
    struct engine_request other = request();
    const char *words[] = {"x"};
    other.stop = words;
    other.n_stop = 1;
    assert_int_equal(server_check_request(&other), ERR_INVAL);
    other = request();
    other.n_top = 1;
    assert_int_equal(server_check_request(&other), ERR_INVAL);
    assert_int_equal(server_check_request(&q), 0);
}

#define CHOICE(ids, logps, finish) \
    "{\"choices\": [{\"token_ids\": " ids ", \"logprobs\": {\"token_logprobs\": " logps "}, \"finish_reason\": " finish "}]}"
#define META(pairs, finish) "{\"meta_info\": {\"finish_reason\": {\"type\": " finish "}, \"output_token_logprobs\": " pairs "}}"

static const struct {
    enum server_kind kind;
    const char *text, *error; /* error NULL: a sample */
    int64_t n;
    bool stopped;
} answers[] = {
    {SERVER_VLLM, CHOICE("[4, 2]", "[-1.5, 0]", "\"stop\""), NULL, 2, true},
    {SERVER_TRTLLM, CHOICE("[4, 5, 6]", "[-1.5, -0.25, 1e-6]", "\"length\""), NULL, 3, false},
    {SERVER_SGLANG, META("[[-1.5, 4, null], [-2, 2, \"a\"]]", "\"stop\""), NULL, 2, true},
    {SERVER_VLLM, CHOICE("[4]", "[-1.5, 0]", "\"stop\""), "1 token ids with 2 log-probs", 0, false},
    {SERVER_VLLM, CHOICE("[4, 100]", "[-1.5, 0]", "\"stop\""), "token 1 is no id", 0, false},
    {SERVER_VLLM, CHOICE("[4, -1]", "[-1.5, 0]", "\"stop\""), "token 1 is no id", 0, false},
    {SERVER_VLLM, CHOICE("[4, 5.0]", "[-1.5, 0]", "\"stop\""), "token 1 is no id", 0, false},
    {SERVER_VLLM, CHOICE("[4, 5]", "[null, 0]", "\"stop\""), "token 0 has no log-prob", 0, false},
    {SERVER_VLLM, CHOICE("[4, 5]", "[-1, 0.5]", "\"stop\""), "token 1 has no log-prob", 0, false},
    {SERVER_VLLM, CHOICE("[4, 5]", "[-1, -1e300]", "\"stop\""), "token 1 has no log-prob", 0, false},
    {SERVER_VLLM, CHOICE("[4, 5]", "[-1, NaN]", "\"stop\""), "the answer", 0, false},
    {SERVER_VLLM, CHOICE("[4, 5]", "[-1, -1]", "\"length\""), "2 tokens and ended by 'length'; 3 were", 0, false},
    {SERVER_VLLM, CHOICE("[4, 5, 6, 7]", "[-1, -1, -1, -1]", "\"stop\""), "4 tokens", 0, false},
    {SERVER_VLLM, CHOICE("[2, 5]", "[-1, -1]", "\"stop\""), "after the end token 2", 0, false},
    {SERVER_VLLM, CHOICE("[]", "[]", "\"stop\""), "no token", 0, false},
    {SERVER_VLLM, CHOICE("[4]", "[-1]", "\"abort\""), "ended by 'abort'", 0, false},
    {SERVER_VLLM, CHOICE("[4]", "[-1]", "null"), "ended by 'null'", 0, false},
    {SERVER_VLLM, CHOICE("null", "[-1]", "\"stop\""), "token_ids is missing", 0, false},
    {SERVER_SGLANG, META("[[-1.5, 4], [-2]]", "\"stop\""), "token 1 is no id", 0, false},
    {SERVER_SGLANG, META("[4, 5]", "\"stop\""), "token 0 is no id", 0, false},
    {SERVER_SGLANG, META("[[-1, 4]]", "\"abort\""), "ended by 'abort'", 0, false},
    {SERVER_SGLANG,
     "{\"output_ids\": [5], "
     "\"meta_info\": {\"finish_reason\": {\"type\": \"stop\"}, \"output_token_logprobs\": [[-1, 4]]}}",
     "another one in output_ids", 0, false},
    {SERVER_SGLANG, "[]", "output_token_logprobs is missing", 0, false},
    {SERVER_VLLM, "<html>", "the answer", 0, false},
    {SERVER_VLLM, "", "the answer", 0, false},
};

static void samples(void **state) {
    (void)state;
    for (size_t i = 0; i < sizeof answers / sizeof *answers; i++) {
        struct server_sample s;
        const int rc = server_read_sample(&s, answers[i].kind, answers[i].text, strlen(answers[i].text), &limits);
        if (answers[i].error) {
            if (rc != ERR_FORMAT || !strstr(err_msg(), answers[i].error)) fail_msg("%s: %d %s", answers[i].text, rc, err_msg());
            assert_null(s.ids);
            continue;
        }
        if (rc < 0) fail_msg("%s: %s", answers[i].text, err_msg());
        assert_int_equal(s.n, answers[i].n);
        assert_int_equal(s.stopped, answers[i].stopped);
        assert_int_equal(s.ids[0], 4);
        assert_true(s.logp[0] == -1.5f && s.logp[s.n - 1] <= 0); /* what rounding puts above 0 is 0 */
        server_sample_free(&s);
    }
}

static void identities(void **state) {
    (void)state;
    static const char *const owners[] = {"vllm", "sglang", "tensorrt_llm"};
    char text[200];
    struct server_identity id;
    for (int k = 0; k < SERVER_KINDS; k++) {
        enum server_kind found;
        snprintf(text, sizeof text, "{\"data\": [{\"id\": \"m\", \"owned_by\": \"%s\", \"max_model_len\": 64}]}", owners[k]);
        assert_int_equal(server_read_identity(&id, text, strlen(text)), 0);
        assert_true(id.known && id.kind == (enum server_kind)k && id.max_len == 64 && strcmp(id.model, "m") == 0);
        free(id.model);
        assert_int_equal(server_kind_find(server_kind_name((enum server_kind)k), &found), 0);
        assert_int_equal(found, k);
    }
    assert_int_equal(server_read_identity(&id, "{\"data\": []}", 12), ERR_FORMAT);
}

static void updates(void **state) {
    (void)state;
    const char *path;
    json_t *body;
    assert_int_equal(server_update_call(SERVER_VLLM, 0, "/w", &path, &body), 0);
    assert_string_equal(path, "/collective_rpc");
    assert_string_equal(json_string_value(json_object_get(json_object_get(body, "kwargs"), "weights_path")), "/w");
    json_decref(body);
    assert_int_equal(server_update_call(SERVER_VLLM, 1, "/w", &path, &body), 0);
    assert_string_equal(path, "/reset_prefix_cache");
    json_decref(body);
    assert_int_equal(server_update_call(SERVER_VLLM, 2, "/w", &path, &body), 0);
    assert_null(path);
    assert_int_equal(server_update_call(SERVER_SGLANG, 0, "/w", &path, &body), 0);
    assert_string_equal(json_string_value(json_object_get(body, "model_path")), "/w");
    json_decref(body);
    assert_int_equal(server_update_call(SERVER_TRTLLM, 0, "/w", &path, &body), ERR_UNSUPPORTED);
    assert_int_equal(server_read_update(SERVER_SGLANG, "{\"success\": true}", 17), 0);
    assert_int_equal(server_read_update(SERVER_SGLANG, "{}", 2), ERR_FORMAT);
    assert_int_equal(server_read_update(SERVER_VLLM, "{\"success\": false}", 18), ERR_FORMAT);
    assert_int_equal(server_read_update(SERVER_VLLM, "", 0), 0);
}

int main(void) {
    const struct CMUnitTest tests[] = {cmocka_unit_test(requests), cmocka_unit_test(samples), cmocka_unit_test(identities),
                                       cmocka_unit_test(updates)};
    return cmocka_run_group_tests(tests, NULL, NULL);
}
