/* server_api.h - what is said to a server of vLLM, SGLang or TensorRT-LLM, and what it answers: JSON both ways, without a
 * connection.
 *
 * Shapes are those of vLLM 0.33 (entrypoints/openai/completion/protocol.py, entrypoints/serve/dev/rpc), SGLang 0.5.23
 * (srt/managers/io_struct.py, srt/entrypoints/http_server.py) and TensorRT-LLM (tensorrt_llm/serve/openai_protocol.py).
 * Tokens go as ids in both directions, never as text.
 * Invariant: an answer becomes a sample whole, with a token id of the model and a finite log-prob at each place, or is refused. */
#ifndef VERLC_EXTERNAL_ENGINE_SERVER_API_H
#define VERLC_EXTERNAL_ENGINE_SERVER_API_H

#include "engine/engine.h"

#include <jansson.h>

enum server_kind { SERVER_VLLM, SERVER_SGLANG, SERVER_TRTLLM, SERVER_KINDS };
const char *server_kind_name(enum server_kind k);               /* "vllm", "sglang", "trtllm" */
int server_kind_find(const char *name, enum server_kind *kind); /* ERR_INVAL: none of these */

/* ---- who it is: GET /v1/models ---- */
struct server_identity {
    bool known; /* owned_by is one of the kinds */
    enum server_kind kind;
    char *model;     /* owned; the name that requests give */
    int64_t max_len; /* prompt and response; 0: it does not say */
};
int server_read_identity(struct server_identity *out, const char *text, size_t n); /* ERR_FORMAT */

/* ---- generation ---- */
const char *server_generate_path(enum server_kind k);
/* ERR_INVAL: what servers are not asked for: stop strings, most probable tokens, a pause. */
int server_check_request(const struct engine_request *q);
/* A request for one sample of q, its tokens begun included in the prompt. stop: all ids that end it. The caller owns it. */
struct server_stop {
    const int32_t *id;
    int64_t n;
};
json_t *server_generate_body(enum server_kind k, const char *model, const struct engine_request *q, struct server_stop stop,
                             int64_t seed);
struct server_limits {
    int64_t vocab, max_tokens; /* ids are below vocab; at most so many tokens, and exactly so many where it ends for length */
    struct server_stop stop;
};
struct server_sample { /* owned */
    int32_t *ids;
    float *logp;
    int64_t n;
    bool stopped; /* by a token; else it has max_tokens */
};
/* ERR_FORMAT says what is wrong with the answer. */
int server_read_sample(struct server_sample *out, enum server_kind k, const char *text, size_t n, const struct server_limits *l);
void server_sample_free(struct server_sample *s);

/* ---- new weights ---- */
/* Call `i` of those that have the server read the weights in dir, in their order; *path NULL: there is no further one.
 * ERR_UNSUPPORTED: it cannot. The caller owns *body. */
int server_update_call(enum server_kind k, int i, const char *dir, const char **path, json_t **body);
/* Its answer to one of them. ERR_FORMAT: the weights are not there. */
int server_read_update(enum server_kind k, const char *text, size_t n);

#endif
