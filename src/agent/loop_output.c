/* loop_output.c - see loop_output.h. A run of the policy's tokens may be made of several turns, of which each begins where the one
 * before it ends: an answer that was asked for in pieces.
 * Invariant: every token of the policy has the log-prob of the turn that it was found in. */
#include "agent/loop_output.h"

#include "base/buf.h"
#include "base/err.h"
#include "data/data.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

void drawn_turn_free(struct drawn_turn *t) {
    free(t->prompt);
    free(t->ids);
    free(t->logp);
    free(t->kept);
    free(t->versions);
    *t = (struct drawn_turn){0};
}

void loop_output_free(struct loop_output *o) {
    free(o->prompt);
    free(o->ids);
    free(o->logp);
    free(o->kept);
    free(o->versions);
    free(o->segments);
    json_decref(o->extra_fields);
    json_decref(o->calls);
    *o = (struct loop_output){0};
}

void loop_output_spread_versions(struct loop_output *o) {
    int64_t first = 0;
    while (first < o->n && o->versions[first] < 0) first++;
    for (int64_t i = 0; i < o->n; i++)
        if (o->versions[i] < 0) o->versions[i] = i > 0 ? o->versions[i - 1] : first < o->n ? o->versions[first] : 0;
}

/* An array of ids, at most `most` of them. */
static int ids_of(const json_t *o, const char *key, int64_t most, int32_t **ids, int64_t *n) {
    const json_t *a = json_object_get(o, key);
    if (!json_is_array(a)) FAIL(ERR_FORMAT, "AgentLoopOutput.%s is no list", key);
    const int64_t all = (int64_t)json_array_size(a);
    *n = all < most ? all : most;
    *ids = xmalloc((size_t)*n * sizeof **ids + 1);
    for (int64_t i = 0; i < *n; i++) {
        const json_t *v = json_array_get(a, (size_t)i);
        if (!json_is_integer(v) || json_integer_value(v) < 0 || json_integer_value(v) > INT32_MAX)
            FAIL(ERR_FORMAT, "AgentLoopOutput.%s: element %lld is no token id", key, (long long)i);
        (*ids)[i] = (int32_t)json_integer_value(v);
    }
    return 0;
}

/* ---- where the policy's tokens come from ---- */

/* Whether a turn was drawn after the output's prompt and its first `at` response ids. */
static bool continues(const struct loop_output *o, const struct drawn_turn *t, int64_t at) {
    return t->n_prompt == o->n_prompt + at && memcmp(t->prompt, o->prompt, (size_t)o->n_prompt * sizeof *t->prompt) == 0 &&
           memcmp(t->prompt + o->n_prompt, o->ids, (size_t)at * sizeof *t->prompt) == 0;
}

/* Log-probs of the policy's tokens [at, end), which begin at a turn after *next. */
static int find_drawn(struct loop_output *o, int64_t at, int64_t end, const struct drawn_turn *turns, int64_t n_turns,
                      int64_t *next) {
    while (at < end) {
        int64_t k = *next;
        while (k < n_turns && !continues(o, &turns[k], at)) k++;
        if (k == n_turns)
            FAIL(ERR_FORMAT,
                 "AgentLoopOutput.response_mask is 1 at token %lld, and the model has drawn nothing after the tokens before it",
                 (long long)at);
        const struct drawn_turn *t = &turns[k];
        const int64_t n = t->n < end - at ? t->n : end - at;
        for (int64_t i = 0; i < n; i++)
            if (t->ids[i] != o->ids[at + i])
                FAIL(ERR_FORMAT, "AgentLoopOutput.response_mask is 1 at token %lld, which is %d where the model drew %d",
                     (long long)(at + i), o->ids[at + i], t->ids[i]);
        if (n == 0) FAIL(ERR_FORMAT, "a turn of the model has no token");
        memcpy(o->logp + at, t->logp, (size_t)n * sizeof *o->logp);
        memcpy(o->kept + at, t->kept, (size_t)n * sizeof *o->kept);
        memcpy(o->versions + at, t->versions, (size_t)n * sizeof *o->versions);
        at += n;
        *next = k + 1;
    }
    return 0;
}

static void add_segment(struct loop_output *o, int64_t n, bool policy) {
    o->segments = xrealloc(o->segments, (size_t)(o->n_segments + 1) * 2 * sizeof *o->segments);
    o->segments[2 * o->n_segments] = (int32_t)n;
    o->segments[2 * o->n_segments++ + 1] = policy ? SEGMENT_POLICY : SEGMENT_ENVIRONMENT;
}

static int find_segments(struct loop_output *o, const int32_t *mask, const struct drawn_turn *turns, int64_t n_turns) {
    int64_t next = 0, end;
    for (int64_t at = 0; at < o->n; at = end) {
        for (end = at; end < o->n && mask[end] == mask[at]; end++) {
        }
        if (mask[at] != 0 && mask[at] != 1) FAIL(ERR_FORMAT, "AgentLoopOutput.response_mask has something else than 0 and 1");
        if (mask[at] == 1) TRY(find_drawn(o, at, end, turns, n_turns, &next));
        add_segment(o, end - at, mask[at] == 1);
    }
    if (o->n == 0) add_segment(o, 0, true);
    return 0;
}

/* ---- the rest ---- */

static int read_numbers(struct loop_output *out, const json_t *o) {
    const json_t *score = json_object_get(o, "reward_score"), *fields = json_object_get(o, "extra_fields");
    const json_t *turns = json_object_get(o, "num_turns"), *metrics = json_object_get(o, "metrics");
    out->has_reward = json_is_number(score);
    out->reward = json_number_value(score);
    if (score && !json_is_null(score) && (!out->has_reward || !isfinite(out->reward)))
        FAIL(ERR_FORMAT, "AgentLoopOutput.reward_score is no finite number");
    out->num_turns = json_is_integer(turns) ? json_integer_value(turns) : 0;
    out->tool_seconds = json_number_value(json_object_get(metrics, "tool_calls"));
    out->extra_fields = json_is_object(fields) ? json_deep_copy(fields) : json_object();
    return 0;
}

int loop_output_read(struct loop_output *out, const json_t *o, const struct drawn_turn *turns, int64_t n_turns,
                     const struct loop_limits *limits) {
    int32_t *mask = NULL;
    int64_t n_mask;
    int rc;
    *out = (struct loop_output){0};
    TRYG(ids_of(o, "prompt_ids", INT64_MAX, &out->prompt, &out->n_prompt), out);
    if (out->n_prompt == 0 || out->n_prompt > limits->prompt_length) {
        rc = ERR_FORMAT;
        err_set(rc, __FILE__, __LINE__, "AgentLoopOutput.prompt_ids has %lld tokens; 1 to data.max_prompt_length=%lld are expected",
                (long long)out->n_prompt, (long long)limits->prompt_length);
        goto out;
    }
    TRYG(ids_of(o, "response_ids", limits->response_length, &out->ids, &out->n), out);
    TRYG(ids_of(o, "response_mask", limits->response_length, &mask, &n_mask), out);
    if (n_mask != out->n) {
        rc = ERR_FORMAT;
        err_set(rc, __FILE__, __LINE__, "AgentLoopOutput has %lld response_ids and a mask of %lld", (long long)out->n,
                (long long)n_mask);
        goto out;
    }
    out->logp = xcalloc((size_t)out->n + 1, sizeof *out->logp);
    out->kept = xcalloc((size_t)out->n + 1, sizeof *out->kept);
    out->versions = xmalloc((size_t)out->n * sizeof *out->versions + 1);
    for (int64_t i = 0; i < out->n; i++) out->versions[i] = -1;
    TRYG(find_segments(out, mask, turns, n_turns), out);
    loop_output_spread_versions(out);
    rc = read_numbers(out, o);
out:
    free(mask);
    if (rc < 0) loop_output_free(out);
    return rc;
}
