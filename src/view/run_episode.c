/* run_episode.c - see run_episode.h. */
#include "view/run_episode.h"

#include <math.h>
#include <string.h>

static int64_t count_of(const json_t *o, const char *key) {
    const json_int_t n = json_integer_value(json_object_get(o, key));
    return n > 0 ? n : 0;
}

static struct track_text text_of(const json_t *o, const char *key) {
    const json_t *v = json_object_get(o, key);
    return json_is_string(v) ? (struct track_text){json_string_value(v), json_string_length(v)} : (struct track_text){"", 0};
}

static double number_of(const json_t *o, const char *key) {
    const json_t *v = json_object_get(o, key);
    return json_is_number(v) ? json_number_value(v) : NAN;
}

static bool is(struct track_text t, const char *s) { return t.n == strlen(s) && memcmp(t.p, s, t.n) == 0; }

bool run_episode_call(const json_t *episode, int64_t i, struct run_call *out) {
    const json_t *calls = json_object_get(episode, "calls");
    if (i < 0 || (uint64_t)i >= json_array_size(calls)) return false;
    const json_t *c = json_array_get(calls, (size_t)i), *segment = json_object_get(c, "segment");
    *out = (struct run_call){.segment = json_is_integer(segment) ? json_integer_value(segment) : -1,
                             .name = text_of(c, "name"),
                             .arguments = text_of(c, "arguments"),
                             .result = text_of(c, "result"),
                             .status = text_of(c, "status"),
                             .seconds = number_of(c, "seconds"),
                             .reward = number_of(c, "reward"),
                             .truncated = json_is_true(json_object_get(c, "truncated"))};
    return true;
}

struct run_episode run_episode_of(const json_t *episode) {
    struct run_call c;
    struct run_episode e = {.turns = count_of(episode, "turns"),
                            .malformed = count_of(episode, "malformed"),
                            .dropped = count_of(episode, "dropped"),
                            .output = count_of(episode, "output"),
                            .outputs = count_of(episode, "outputs"),
                            .end = text_of(episode, "end").p,
                            .reason = json_string_value(json_object_get(episode, "reason"))};
    for (; run_episode_call(episode, e.calls, &c); e.calls++) e.failed += !is(c.status, "ok");
    return e;
}

json_t *run_episode_tools(const json_t *episode) {
    json_t *seen = json_object(), *list = json_array();
    struct run_call c;
    for (int64_t i = 0; run_episode_call(episode, i, &c); i++) {
        if (json_object_getn(seen, c.name.p, c.name.n)) continue;
        json_object_setn_new(seen, c.name.p, c.name.n, json_true());
        json_array_append_new(list, json_stringn(c.name.p, c.name.n));
    }
    json_decref(seen);
    return list;
}

bool run_episode_fits(const json_t *episode, const struct run_episode_filter *f) {
    if (!f->tool && !f->failed && f->min_turns <= 0 && f->max_turns <= 0) return true;
    if (!episode) return false;
    const struct run_episode e = run_episode_of(episode);
    struct run_call c;
    bool called = !f->tool;
    for (int64_t i = 0; !called && run_episode_call(episode, i, &c); i++) called = is(c.name, f->tool);
    return called && (!f->failed || e.failed + e.malformed > 0) && e.turns >= f->min_turns &&
           (f->max_turns <= 0 || e.turns <= f->max_turns);
}
