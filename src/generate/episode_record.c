/* episode_record.c - see episode_record.h. */
#include "generate/episode_record.h"

#include "ppo/stages/generation.h"

#include "base/buf.h"
#include "base/err.h"
#include "base/json.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

enum { MAX_COUNT = 1 << 30 };

/* ---- of a sample that is over ---- */

json_t *episode_text(const struct generation_sample *s) {
    const char *said = s->user ? s->user->solution : NULL; /* a program's last turn */
    return said ? json_string(said) : json_stringn(s->text.n > 0 ? s->text.p : "", s->text.n);
}

/* Tokens as a message of `role`. */
static void add_message(const struct generation_state *g, json_t *messages, const char *role, const int32_t *ids, int64_t n) {
    struct buf text = {0};
    if (tokenizer_decode(g->in->tok, ids, n, true, &text) < 0) buf_reset(&text);
    json_t *content = json_stringn(text.n > 0 ? text.p : "", text.n);
    json_array_append_new(messages, json_pack("{s:s, s:o}", "role", role, "content", content ? content : json_string("")));
    buf_free(&text);
}

/* Of a conversation with tools its messages whose tokens the response has; a last turn that a limit ended was not parsed, and is
 * its text. */
static json_t *messages_of_agent(const struct generation_state *g, int64_t i) {
    const struct generation_sample *s = &g->samples[i];
    const struct generation_group *group = &g->groups[i / g->per];
    const size_t n_prompt = json_array_size(batch_find(group->prompts, "raw_prompt")->json[group->row]);
    int64_t n_segments, n_turns = 0, at = 0;
    const int32_t *segments = tool_agent_segments(s->agent, &n_segments);
    json_t *out = tool_agent_plain_messages(s->agent, g->in->tok, (int64_t)n_prompt);
    for (size_t k = 0; k < json_array_size(out); k++)
        n_turns -= strcmp(json_string_value(json_object_get(json_array_get(out, k), "role")), "assistant") == 0;
    for (int64_t k = 0; k < n_segments; k++) {
        n_turns += segments[2 * k + 1] == SEGMENT_POLICY;
        if (k + 1 < n_segments) at += segments[2 * k];
    }
    if (n_turns > 0) add_message(g, out, "assistant", s->ids + at, s->n - at);
    return out;
}

static json_t *messages_of(const struct generation_state *g, int64_t i) {
    const struct generation_sample *s = &g->samples[i];
    int32_t one[2];
    int64_t n, at = 0;
    if (s->agent) return messages_of_agent(g, i);
    json_t *out = json_array();
    const int32_t *segments = agent_loop_segments(s, one, &n);
    for (int64_t k = 0; k < n; at += segments[2 * k++])
        add_message(g, out, segments[2 * k + 1] == SEGMENT_POLICY ? "assistant" : "environment", s->ids + at, segments[2 * k]);
    return out;
}

static void add_tokens(const struct generation_sample *s, json_t *record) {
    json_t *mask = json_array();
    int32_t one[2];
    int64_t n;
    const int32_t *segments = agent_loop_segments(s, one, &n);
    for (int64_t k = 0; k < n; k++)
        for (int32_t t = 0; t < segments[2 * k]; t++)
            json_array_append_new(mask, json_integer(segments[2 * k + 1] == SEGMENT_POLICY));
    json_object_set_new(record, "ids", json_i32_array(s->ids, s->n));
    json_object_set_new(record, "mask", mask);
}

json_t *episode_record(const struct generation_state *g, int64_t i, bool tokens) {
    const struct generation_sample *s = &g->samples[i];
    json_t *record = agent_loop_episode(s), *extra = json_object();
    char *failure = agent_loop_failure(s);
    agent_loop_extra_info(s, extra);
    json_object_set_new(extra, "num_turns", json_integer((json_int_t)agent_loop_num_turns(s)));
    json_object_set_new(record, "messages", messages_of(g, i));
    json_object_set_new(record, "extra_info", extra);
    json_t *why = failure ? json_string(failure) : NULL;
    if (failure) json_object_set_new(record, "failure", why ? why : json_string("for a reason that is not UTF-8"));
    free(failure);
    if (s->user && s->user->out.has_reward) json_object_set_new(record, "score", json_real(s->user->out.reward));
    if (s->user && s->user->reward_extra) json_object_set(record, "score_info", s->user->reward_extra);
    if (s->user && s->user->n_before > 0) json_object_set_new(record, "outputs", json_integer((json_int_t)s->user->n_before + 1));
    if (tokens) add_tokens(s, record);
    return record;
}

void episode_records_as_text(json_t **records, int64_t n) {
    for (int64_t i = 0; i < n; i++) {
        struct buf text = {0};
        if (json_dump_line(&text, records[i]) < 0) buf_reset(&text);
        json_decref(records[i]);
        records[i] = json_stringn(text.n > 0 ? text.p : "", text.n);
        buf_free(&text);
    }
}

/* ---- from a file ---- */

int episode_records_read(json_t **out, const json_t *list, int64_t n) {
    if (!json_is_array(list) || (int64_t)json_array_size(list) != n)
        FAIL(ERR_INPUT, "no list of %lld episodes, as many as there are responses", (long long)n);
    json_t *all = json_array();
    int rc = 0;
    for (size_t i = 0; i < (size_t)n && rc == 0; i++) {
        json_t *v = json_array_get(list, i), *parsed = NULL;
        if (json_is_string(v)) rc = json_parse(&parsed, json_string_value(v), json_string_length(v), "episode");
        else parsed = json_incref(v);
        struct episode e;
        if (rc == 0) rc = episode_read(&e, parsed);
        if (rc < 0) err_wrap(rc, "episode %zu", i + 1);
        json_array_append_new(all, parsed ? parsed : json_null());
    }
    if (rc == 0) *out = all;
    else json_decref(all);
    return rc;
}

static bool is_count(const json_t *v) {
    return json_is_integer(v) && json_integer_value(v) >= 0 && json_integer_value(v) <= MAX_COUNT;
}

int episode_read(struct episode *e, const json_t *record) {
    const json_t *failure = json_object_get(record, "failure"), *extra = json_object_get(record, "extra_info"),
                 *score = json_object_get(record, "score"), *info = json_object_get(record, "score_info"),
                 *turns = json_object_get(record, "turns"), *malformed = json_object_get(record, "malformed");
    if (!json_is_object(record)) FAIL(ERR_INPUT, "not an object, nor the JSON text of one");
    if (!is_count(turns)) FAIL(ERR_INPUT, "'turns' is no whole number from 0 to %d", MAX_COUNT);
    if (malformed && !is_count(malformed)) FAIL(ERR_INPUT, "'malformed' is no whole number from 0 to %d", MAX_COUNT);
    if (!json_is_object(extra)) FAIL(ERR_INPUT, "'extra_info' is no object");
    if (failure && !json_is_string(failure)) FAIL(ERR_INPUT, "'failure' is not text");
    if (score && !json_is_number(score)) FAIL(ERR_INPUT, "'score' is no number");
    if (info && !json_is_object(info)) FAIL(ERR_INPUT, "'score_info' is no object");
    *e = (struct episode){.failure = json_string_value(failure),
                          .extra_info = extra,
                          .score_info = info,
                          .num_turns = json_integer_value(turns),
                          .has_score = score != NULL,
                          .score = json_number_value(score)};
    return 0;
}
