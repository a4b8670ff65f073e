/* episode_metrics.c - how conversations with tools go: shares that early warnings read, from the column BATCH_EPISODE.
 * Invariant: every number is from 0 to 1; of nothing there is no metric. */
#include "ppo/stages/stages.h"

#include <string.h>

static bool text_is(const json_t *o, const char *key, const char *text) {
    const char *s = json_string_value(json_object_get(o, key));
    return s && strcmp(s, text) == 0;
}

static void set_share(struct metrics *m, int64_t n, int64_t of, const char *name) {
    if (of > 0) metrics_set(m, (double)n / (double)of, "agent_loop/%s/mean", name);
}

void ppo_episode_metrics(struct metrics *m, const struct batch *b) {
    const struct batch_col *c = batch_find(b, BATCH_EPISODE);
    int64_t episodes = 0, calls = 0, failed = 0, truncated = 0, malformed = 0, at_limit = 0, refused = 0, ended_badly = 0,
            restarted = 0;
    for (int64_t i = 0; c && i < b->n_rows; i++) {
        const json_t *e = c->json[i], *call;
        size_t k;
        if (!json_is_object(e)) continue;
        episodes++;
        malformed += json_integer_value(json_object_get(e, "malformed"));
        at_limit += text_is(e, "end", "max_assistant_turns") || text_is(e, "end", "max_user_turns");
        refused += text_is(e, "end", "refused");
        ended_badly += text_is(e, "end", "error") || text_is(e, "end", "timeout");
        restarted += json_object_get(e, "restarted") != NULL;
        json_array_foreach(json_object_get(e, "calls"), k, call) {
            calls++;
            failed += !text_is(call, "status", "ok");
            truncated += json_is_true(json_object_get(call, "truncated"));
        }
    }
    set_share(m, failed, calls, "tool_errors");
    set_share(m, truncated, calls, "truncated_results");
    set_share(m, malformed, calls + malformed, "malformed_calls");
    set_share(m, at_limit, episodes, "turns_at_limit");
    set_share(m, refused, episodes, "refused");
    set_share(m, ended_badly, episodes, "failed");
    if (restarted > 0) metrics_set_i64(m, restarted, "agent_loop/restarted");
}
