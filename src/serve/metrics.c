/* metrics.c - what the server has done, in Prometheus' text format.
 *
 * Invariant: counters only rise; names keep their meaning. */
#include "serve/serve_int.h"

#include "base/encoding/number.h"

enum { ROUTES = 4, RESULTS = 6 };

void serve__count(struct serve *s, const struct serve_dialect *d, int status) {
    const int route = d == &serve_chat ? 0 : d == &serve_completions ? 1 : d == &serve_messages ? 2 : 3;
    const int result = status == 0 ? 5 : status < 400 ? 0 : status == 400 ? 1 : status == 429 ? 3 : status < 500 ? 2 : 4;
    s->metrics.requests[route][result]++;
}

struct serve_counts serve_counts(const struct serve *s) {
    struct serve_counts c = {.open = s->n_calls, .tokens = s->metrics.tokens};
    for (int r = 0; r < ROUTES; r++)
        for (int i = 0; i < RESULTS; i++) {
            c.requests += s->metrics.requests[r][i];
            if (i >= 1 && i <= 4) c.refused += s->metrics.requests[r][i];
        }
    return c;
}

static void head(struct buf *out, const char *name, const char *type, const char *help) {
    buf_addf(out, "# HELP verlc_%s %s\n# TYPE verlc_%s %s\n", name, help, name, type);
}

static void one(struct buf *out, const char *name, const char *type, const char *help, int64_t value) {
    head(out, name, type, help);
    buf_addf(out, "verlc_%s %lld\n", name, (long long)value);
}

static void requests(const struct serve *s, struct buf *out) {
    static const char *const names[ROUTES] = {"chat", "completions", "messages", "other"};
    static const char *const results[RESULTS] = {"ok", "invalid", "refused", "full", "error", "left"};
    head(out, "requests_total", "counter", "requests that have ended; left: by the client");
    for (int r = 0; r < ROUTES; r++)
        for (int i = 0; i < RESULTS; i++)
            buf_addf(out, "verlc_requests_total{route=\"%s\",result=\"%s\"} %lld\n", names[r], results[i],
                     (long long)s->metrics.requests[r][i]);
}

static void first_token(const struct serve_metrics *m, struct buf *out) {
    static const char *const bounds[] = {"0.005", "0.01", "0.02", "0.04", "0.06", "0.1", "0.2", "0.5", "1", "2", "5", "+Inf"};
    char sum[NUMBER_TEXT];
    int64_t n = 0;
    head(out, "time_to_first_token_seconds", "histogram", "from a request to its first token, of each sample");
    for (int i = 0; i < 12; i++) {
        n += m->first_token[i];
        buf_addf(out, "verlc_time_to_first_token_seconds_bucket{le=\"%s\"} %lld\n", bounds[i], (long long)n);
    }
    number_text(m->first_token_sum, sum);
    buf_addf(out, "verlc_time_to_first_token_seconds_sum %s\nverlc_time_to_first_token_seconds_count %lld\n", sum,
             (long long)m->n_first_token);
}

void serve__metrics_text(const struct serve *s, struct buf *out) {
    struct engine_stats e = {0};
    s->a.backend.stats(s->a.backend.ctx, &e);
    requests(s, out);
    one(out, "requests_open", "gauge", "requests that are not answered yet", s->n_calls);
    one(out, "samples_running", "gauge", "samples that the engine draws", e.running);
    one(out, "samples_waiting", "gauge", "samples that wait for the engine", e.waiting);
    one(out, "prompt_tokens_total", "counter", "tokens of prompts", s->metrics.prompt_tokens);
    one(out, "prompt_cached_tokens_total", "counter", "of these, found in the prefix cache", s->metrics.cached_tokens);
    one(out, "generation_tokens_total", "counter", "tokens drawn", s->metrics.tokens);
    one(out, "preemptions_total", "counter", "samples that gave their KV blocks to older ones", e.preempted);
    one(out, "kv_blocks_used", "gauge", "KV blocks of running samples", e.kv_blocks_used);
    one(out, "kv_blocks", "gauge", "KV blocks that there are", e.n_kv_blocks);
    first_token(&s->metrics, out);
}
