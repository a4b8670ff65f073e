/* episode.c - what an episode of an agent program becomes when it is over: its conversations as samples, its record, its line in
 * the journal.
 *
 * Invariant: an episode ends once, with its samples or with the reason that it has no score. */
#include "ppo/stages/program/program_loop_int.h"

#include "base/clock.h"
#include "base/err.h"
#include "base/json.h"

#include <stdlib.h>
#include <string.h>

/* The calls of a sample's turns. */
static void add_calls(struct loop_output *o, const struct program_session *s, const struct token_tree_sample *t) {
    o->calls = json_array();
    for (int64_t k = 0; k < t->n_turns; k++) {
        json_t *call;
        size_t i;
        json_array_foreach(json_array_get(s->calls, (size_t)t->tags[k]), i, call) {
            json_t *one = json_deep_copy(call);
            o->tool_seconds += json_number_value(json_object_get(one, "seconds"));
            if (!json_object_get(one, "seconds")) json_object_set_new(one, "seconds", json_real(0));
            json_object_set_new(one, "segment", json_integer((json_int_t)t->turn_segments[k]));
            json_array_append_new(o->calls, one);
        }
    }
}

static void fill_output(struct loop_output *o, const struct token_tree_sample *t) {
    *o = (struct loop_output){.prompt = xcopy(t->prompt.p, t->prompt.n, sizeof *o->prompt),
                              .ids = xcopy(t->response.p, t->response.n, sizeof *o->ids),
                              .logp = xcopy(t->logp, t->response.n, sizeof *o->logp),
                              .kept = xcopy(t->kept, t->response.n, sizeof *o->kept),
                              .versions = xcopy(t->version, t->response.n, sizeof *o->versions),
                              .n_prompt = t->prompt.n,
                              .n = t->response.n,
                              .segments = xmalloc((size_t)t->n_segments * 2 * sizeof *o->segments + 1),
                              .n_segments = t->n_segments,
                              .num_turns = 2 * t->n_turns,
                              .extra_fields = json_object()};
    loop_output_spread_versions(o);
    for (int64_t k = 0; k < t->n_segments; k++) {
        o->segments[2 * k] = (int32_t)t->segments[k].n;
        o->segments[2 * k + 1] = (int32_t)t->segments[k].kind;
    }
}

/* The session's part of the record of its episode; of[n]: its samples. */
static json_t *record_of(const struct program_session *s, bool failed, const struct token_tree_sample *of, int64_t n) {
    const struct token_tree_counts c = token_tree_counts(s->tree);
    json_t *o = json_pack("{s:O, s:I}", "turn_log", s->log, "requests", (json_int_t)c.n_requests), *starts = json_object();
    for (int64_t i = 0; i < n; i++) {
        const char *name = token_tree_start_name(of[i].start);
        json_object_set_new(starts, name, json_integer(json_integer_value(json_object_get(starts, name)) + 1));
    }
    json_object_set_new(o, "samples", starts);
    if (n > PROGRAM_MAX_SAMPLES) json_object_set_new(o, "samples_left_out", json_integer(n - PROGRAM_MAX_SAMPLES));
    if (s->cut && !failed) json_object_set_new(o, "end", json_string(s->cut));
    if (s->n_malformed > 0) json_object_set_new(o, "malformed", json_integer(s->n_malformed));
    if (c.n_rolled_back > 0) json_object_set_new(o, "rolled_back_tokens", json_integer(c.n_rolled_back));
    if (s->n_restarts > 0) json_object_set_new(o, "restarted", json_integer(s->n_restarts));
    return o;
}

static void take_sample(struct generation_state *g, struct program_session *s, struct user_episode *x) {
    struct token_tree_sample *all;
    const int64_t n = token_tree_samples(s->tree, &all);
    for (int64_t i = 0; i < n; i++) {
        struct loop_output o;
        if (n > PROGRAM_MAX_SAMPLES && i >= PROGRAM_MAX_SAMPLES - 1 && i < n - 1) continue;
        fill_output(&o, &all[i]);
        add_calls(&o, s, &all[i]);
        user_episode_add(g, &g->samples[s->sample], &o);
    }
    if (n == 0 && !x->failure) x->failure = xstrdup("it ended without a turn of the model");
    x->record = record_of(s, x->failure != NULL, all, n);
    token_tree_samples_free(all, n);
    if (n == 0) user_episode_take_output(g, &g->samples[s->sample], &x->out);
}

struct program_journal program_journal_of(const struct program_loops *p) {
    return (struct program_journal){.g = p->g, .journal = p->a.journal, .command = p->a.k->command};
}

/* The sample is there, or it has failed. */
void program_episode_close(struct program_loops *p, struct program_session *s) {
    if (s->listener) http_server_remove_listener(p->http, s->listener);
    s->listener = NULL;
    struct generation_sample *const sample = &p->g->samples[s->sample];
    sample->finish = s->cut && strcmp(s->cut, "length") == 0 ? ENGINE_LENGTH : ENGINE_STOP;
    sample->ended = clock_wall();
    token_tree_destroy(s->tree);
    s->tree = NULL;
    p->n_running -= s->state == RUNNING;
    p->n_waiting--;
    s->state = OVER;
    phase_beat(p->g->s->run->stages);
    generation_ended(p->g, s->sample);
}

/* The program is over; failure (taken over): why it has no score, or NULL. */
int program_episode_end(struct program_loops *p, struct program_session *s, char *failure, bool timed_out) {
    struct generation_sample *const sample = &p->g->samples[s->sample];
    struct user_episode *const x = sample->user;
    const struct program_journal journal = program_journal_of(p);
    x->failure = failure;
    x->timed_out = timed_out;
    x->n_other_temperature = s->n_other_temperature;
    take_sample(p->g, s, x);
    x->out.has_reward = s->has_reward;
    x->out.reward = s->reward;
    x->reward_extra = s->extra;
    x->solution = s->said;
    s->extra = NULL;
    s->said = NULL;
    sample->seconds += s->drawing;
    sample->n_preempted += s->n_preempted;
    program_episode_close(p, s);
    return program_journal_end(&journal, s->sample);
}
