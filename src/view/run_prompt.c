/* run_prompt.c - the last message of the user in a prompt that a chat template has made.
 *
 * A prompt's text is without special tokens, so a template's roles are words in it: "user\nHow many ...\nassistant\n". Where the
 * tokens are known, a role stands where a special token was; else it is a line of its own.
 * Invariant: what is found lies within the prompt. */
#include "view/run_reader.h"

#include <stdio.h>
#include <string.h>

static bool starts(struct track_text t, size_t at, const char *word) {
    const size_t n = strlen(word);
    return t.n - at >= n && memcmp(t.p + at, word, n) == 0;
}

/* Where a role's message begins after its name at `at`; 0: that is no such name. */
static size_t after_role(struct track_text t, size_t at, const char *role) {
    if (!starts(t, at, role)) return 0;
    at += strlen(role);
    if (at < t.n && t.p[at] == ':') at++;
    else if (at >= t.n || t.p[at] != '\n') return 0;
    return at;
}

/* Special tokens that stand for a role by themselves. */
static bool is_user_token(const char *name) {
    static const char *const names[] = {"<|user|>", "[INST]", "<\xEF\xBD\x9CUser\xEF\xBD\x9C>", "<|USER|>", "<|User|>", "<user>"};
    for (size_t i = 0; i < sizeof names / sizeof *names; i++)
        if (strcmp(name, names[i]) == 0) return true;
    return false;
}

struct span {
    size_t from, to;
    bool found;
};

/* By the special tokens, which have no text. */
static struct span by_tokens(const struct run_sample *s, const json_t *special) {
    struct span m = {0};
    for (int64_t i = 0; special && s->prompt_ids && s->prompt_ends && i < s->n_prompt; i++) {
        const size_t at = (size_t)(i ? s->prompt_ends[i - 1] : 0);
        char key[16];
        if ((size_t)s->prompt_ends[i] > at) continue;
        snprintf(key, sizeof key, "%d", (int)s->prompt_ids[i]);
        const char *name = json_string_value(json_object_get(special, key));
        if (!name) continue; /* a part of a character */
        if (m.found && m.to > at && m.from < at) m.to = at;
        const size_t from = after_role(s->prompt, at, "user");
        if (from || is_user_token(name)) m = (struct span){from ? from : at, s->prompt.n, true};
    }
    return m;
}

/* By the words of templates that are known: the role is a line. */
static struct span by_lines(struct track_text t) {
    static const char *const marks[] = {"<|user|>", "[INST]", "<\xEF\xBD\x9CUser\xEF\xBD\x9C>"};
    static const char *const ends[] = {"\nassistant\n", "\nmodel\n", "[/INST]", "<|assistant|>", "\nAssistant:"};
    struct span m = {0, t.n, false};
    for (size_t at = 0; at < t.n; at++) {
        size_t from = 0;
        if (at == 0 || t.p[at - 1] == '\n') {
            from = after_role(t, at, "user");
            if (!from && starts(t, at, "User:")) from = at + 5;
            if (!from && starts(t, at, "Human:")) from = at + 6;
        }
        for (size_t i = 0; !from && i < sizeof marks / sizeof *marks; i++)
            if (starts(t, at, marks[i])) from = at + strlen(marks[i]);
        if (from) m = (struct span){from, t.n, true};
        for (size_t i = 0; m.found && m.to == t.n && at > m.from && i < sizeof ends / sizeof *ends; i++)
            if (starts(t, at, ends[i])) m.to = at;
    }
    return m;
}

static bool is_space(char c) { return c == ' ' || c == '\n' || c == '\t' || c == '\r'; }

struct track_text run_user_message(const struct run_sample *s, const json_t *special) {
    struct span m = by_tokens(s, special);
    if (!m.found) m = by_lines(s->prompt);
    if (!m.found) m = (struct span){0, s->prompt.n, true};
    while (m.from < m.to && is_space(s->prompt.p[m.from])) m.from++;
    while (m.to > m.from && is_space(s->prompt.p[m.to - 1])) m.to--;
    if (m.from == m.to) return s->prompt; /* an empty message says nothing */
    return (struct track_text){s->prompt.p + m.from, m.to - m.from};
}
