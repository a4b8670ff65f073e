/* program_journal.c - see program_journal.h. Arrays are base64 of their bytes, so that no bit changes. */
#include "ppo/stages/program_journal.h"
#include "ppo/stages/generation.h"

#include "base/encoding/base64.h"
#include "base/buf.h"
#include "base/err.h"
#include "base/hash.h"
#include "base/json.h"

#include <stdlib.h>
#include <string.h>

enum { START = -2, END = -3 }; /* calls of a journal's key */

/* ---- keys ---- */

/* What a record depends on besides its episode's name; caller frees. */
static int question_of(const struct program_journal *j, int64_t i, char **out) {
    struct engine_request q;
    char prompt[33], version[16] = "";
    TRY(generation_request(j->g, i, &q));
    hash_hex(q.prompt, (size_t)q.n_prompt * sizeof *q.prompt, prompt);
    if (j->g->partial) snprintf(version, sizeof version, " v%d", (int)ppo_version(j->g->s)); /* one step may begin it, or another */
    *out = xasprintf("%s\n%s%s %llu %.9g %.9g %.9g %d %.9g %lld %lld", j->command, prompt, version, (unsigned long long)q.seed,
                     (double)q.temperature, (double)q.top_p, (double)q.min_p, (int)q.top_k, (double)q.repetition_penalty,
                     (long long)j->g->in->rows->max_prompt_length, (long long)j->g->in->rows->max_response_length);
    return 0;
}

struct key {
    char *episode, *question;
    struct tool_journal_key k;
};
static int key_of(const struct program_journal *j, int64_t i, struct key *out) {
    TRY(question_of(j, i, &out->question));
    out->episode = generation_episode_name(j->g, i);
    out->k = (struct tool_journal_key){.step = j->g->s->run->step,
                                       .episode = out->episode,
                                       .name = "program",
                                       .question = out->question,
                                       .n = strlen(out->question)};
    return 0;
}
static void key_free(struct key *k) {
    free(k->episode);
    free(k->question);
}

/* ---- an episode as JSON ---- */

static void put(json_t *o, const char *name, const void *p, int64_t n, size_t size) {
    char *text = base64_text(p ? p : "", (size_t)n * size);
    json_object_set_new(o, name, json_string(text));
    free(text);
}

static json_t *output_json(const struct loop_output *o) {
    json_t *v = json_pack("{s:I, s:I, s:I, s:I}", "n_prompt", (json_int_t)o->n_prompt, "n", (json_int_t)o->n, "n_segments",
                          (json_int_t)o->n_segments, "num_turns", (json_int_t)o->num_turns);
    put(v, "prompt", o->prompt, o->n_prompt, sizeof *o->prompt);
    put(v, "ids", o->ids, o->n, sizeof *o->ids);
    put(v, "logp", o->logp, o->n, sizeof *o->logp);
    put(v, "kept", o->kept, o->n, sizeof *o->kept);
    if (o->versions) put(v, "versions", o->versions, o->n, sizeof *o->versions);
    put(v, "segments", o->segments, 2 * o->n_segments, sizeof *o->segments);
    if (o->calls) json_object_set(v, "calls", o->calls);
    json_object_set_new(v, "tool_seconds", json_real(o->tool_seconds));
    return v;
}

json_t *program_journal_episode(const struct generation_sample *s) {
    const struct user_episode *x = s->user;
    json_t *outputs = json_array();
    for (int64_t i = 0; i < x->n_before; i++) json_array_append_new(outputs, output_json(&x->before[i].user->out));
    if (x->out.n_prompt > 0) json_array_append_new(outputs, output_json(&x->out));
    json_t *v = json_pack("{s:o, s:I, s:I, s:f, s:b, s:b}", "outputs", outputs, "num_preempted", (json_int_t)s->n_preempted,
                          "other_temperature", (json_int_t)x->n_other_temperature, "seconds", s->seconds, "timed_out", x->timed_out,
                          "has_reward", x->out.has_reward);
    CHECK(v != NULL);
    if (x->out.has_reward) put(v, "reward", &x->out.reward, 1, sizeof x->out.reward);
    if (x->failure) json_object_set_new(v, "failure", json_string(x->failure));
    if (x->solution) json_object_set_new(v, "solution", json_string(x->solution));
    if (x->reward_extra) json_object_set(v, "reward_extra", x->reward_extra);
    if (x->record) json_object_set(v, "record", x->record);
    return v;
}

static int64_t count(const json_t *v, const char *name, int64_t most) {
    const json_int_t n = json_integer_value(json_object_get(v, name));
    return n >= 0 && n <= most ? n : -1;
}

/* n values of an array; NULL: they are not there. */
static void *take(const json_t *v, const char *name, int64_t n, size_t size) {
    const json_t *text = json_object_get(v, name);
    void *p = xmalloc((size_t)n * size + 1);
    if (json_is_string(text) && base64_read(p, (size_t)n * size, json_string_value(text), json_string_length(text))) return p;
    free(p);
    return NULL;
}

static char *text_of(const json_t *v, const char *name) {
    const char *text = json_string_value(json_object_get(v, name));
    return text ? xstrdup(text) : NULL;
}

/* Segments cover the tokens. */
static bool covers(const struct loop_output *o) {
    int64_t n = 0;
    for (int64_t k = 0; k < o->n_segments; k++) {
        const int32_t len = o->segments[2 * k], kind = o->segments[2 * k + 1];
        if (len < 1 || (kind != SEGMENT_POLICY && kind != SEGMENT_ENVIRONMENT)) return false;
        n += len;
    }
    return n == o->n;
}

/* False: the record is damaged; *o is empty then. */
static bool read_output(const json_t *v, const struct ppo_data_config *rows, struct loop_output *o) {
    const json_t *calls = json_object_get(v, "calls");
    *o = (struct loop_output){.calls = json_is_array(calls) ? json_incref((json_t *)(uintptr_t)calls) : NULL,
                              .tool_seconds = json_number_value(json_object_get(v, "tool_seconds")),
                              .n_prompt = count(v, "n_prompt", rows->max_prompt_length),
                              .n = count(v, "n", rows->max_response_length),
                              .n_segments = count(v, "n_segments", rows->max_response_length),
                              .num_turns = count(v, "num_turns", INT32_MAX),
                              .extra_fields = json_object()};
    const bool counts = o->n_prompt >= 0 && o->n >= 0 && o->n_segments >= 0 && o->num_turns >= 0;
    if (counts && (o->prompt = take(v, "prompt", o->n_prompt, sizeof *o->prompt)) &&
        (o->ids = take(v, "ids", o->n, sizeof *o->ids)) && (o->logp = take(v, "logp", o->n, sizeof *o->logp)) &&
        (o->kept = take(v, "kept", o->n, sizeof *o->kept)) &&
        (o->segments = take(v, "segments", 2 * o->n_segments, sizeof *o->segments)) && covers(o)) {
        o->versions = take(v, "versions", o->n, sizeof *o->versions);
        return true;
    }
    loop_output_free(o);
    return false;
}

/* False: the record is damaged; the sample has what was read before that. */
static bool read_outputs(const struct generation_state *g, const json_t *v, struct generation_sample *s) {
    const json_t *outputs = json_object_get(v, "outputs"), *one;
    size_t i;
    json_array_foreach(outputs, i, one) {
        struct loop_output o;
        if (!read_output(one, g->in->rows, &o)) return false;
        user_episode_add(g, s, &o);
    }
    return json_is_array(outputs);
}

bool program_journal_restore(const struct generation_state *g, const json_t *v, struct generation_sample *s) {
    struct user_episode *x = s->user;
    const bool has_reward = json_is_true(json_object_get(v, "has_reward"));
    double *reward = has_reward ? take(v, "reward", 1, sizeof *reward) : NULL;
    if ((has_reward && !reward) || !read_outputs(g, v, s)) {
        free(reward);
        user_episode_forget(s);
        return false;
    }
    x->out.has_reward = has_reward;
    x->out.reward = reward ? *reward : 0;
    free(reward);
    x->timed_out = json_is_true(json_object_get(v, "timed_out"));
    x->n_other_temperature = json_integer_value(json_object_get(v, "other_temperature"));
    x->failure = text_of(v, "failure");
    x->solution = text_of(v, "solution");
    x->reward_extra = json_incref(json_object_get(v, "reward_extra"));
    x->record = json_incref(json_object_get(v, "record"));
    s->seconds = json_number_value(json_object_get(v, "seconds"));
    s->n_preempted = json_integer_value(json_object_get(v, "num_preempted"));
    return true;
}

/* ---- records ---- */

static bool find(const struct program_journal *j, struct key *k, int64_t call, int64_t turn, struct tool_result *r) {
    k->k.call = call;
    k->k.turn = turn;
    return tool_journal_find(*j->journal, &k->k, r);
}

int program_journal_find(const struct program_journal *j, int64_t i, bool *over, int64_t *n_starts) {
    struct tool_result r;
    struct key k;
    *over = false;
    *n_starts = 0;
    if (j->g->s->run->probing) return 0;
    TRY(generation_open_journal(j->g, j->journal));
    TRY(key_of(j, i, &k));
    if (find(j, &k, END, 0, &r)) {
        *over = r.set && program_journal_restore(j->g, r.set, &j->g->samples[i]);
        tool_result_free(&r);
    }
    for (; !*over && find(j, &k, START, *n_starts, &r); ++*n_starts) tool_result_free(&r);
    key_free(&k);
    return 0;
}

static int add(const struct program_journal *j, int64_t i, int64_t call, int64_t turn, json_t *what) {
    struct key k = {0};
    char text[] = "";
    int rc = key_of(j, i, &k);
    k.k.call = call;
    k.k.turn = turn;
    if (rc == 0) rc = tool_journal_add(*j->journal, &k.k, &(struct tool_result){.text = text, .set = what});
    key_free(&k);
    return rc < 0 ? err_pass(rc, __FILE__, __LINE__) : 0;
}

int program_journal_start(const struct program_journal *j, int64_t i, int64_t n) {
    return j->g->s->run->probing ? 0 : add(j, i, START, n, NULL);
}

int program_journal_end(const struct program_journal *j, int64_t i) {
    if (j->g->s->run->probing) return 0;
    json_t *v = program_journal_episode(&j->g->samples[i]);
    const int rc = add(j, i, END, 0, v);
    json_decref(v);
    return rc;
}
