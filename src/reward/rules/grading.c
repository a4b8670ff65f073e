/* grading.c - what all graders of one answer need: its text as a C string and back, and its questions to the helper.
 *
 * Knows no grader.
 * Invariant: a text comes back with the bytes that it had. */
#include "reward/reward_int.h"

#include <stdlib.h>
#include <string.h>

/* The graders work on C strings.  A NUL in a text is this for them, a character that no text has, and comes back as
 * a NUL in what they say. */
static const struct {
    const char *p;
    size_t n;
} nul = {"", 1}, stand_in = {"\xF4\x8F\xBF\xBF", 4}; /* U+10FFFF */

static struct buf swap_nul(const char *s, size_t n, bool back) {
    const char *from = back ? stand_in.p : nul.p, *to = back ? nul.p : stand_in.p, *hit;
    const size_t n_from = back ? stand_in.n : nul.n, n_to = back ? nul.n : stand_in.n;
    struct buf out = {0};
    for (; (hit = memmem(s, n, from, n_from)); n -= (size_t)(hit - s) + n_from, s = hit + n_from) {
        buf_add(&out, s, (size_t)(hit - s));
        buf_add(&out, to, n_to);
    }
    buf_add(&out, s, n);
    return out;
}

char *reward__text_of(const char *s, size_t n) {
    if (n == 0 || !memchr(s, 0, n)) return xstrndup(n ? s : "", n);
    struct buf b = swap_nul(s, n, false);
    return buf_take(&b);
}

char *reward__text(const json_t *string) { return reward__text_of(json_string_value(string), json_string_length(string)); }

json_t *reward__answer_of(const char *text) {
    if (!text) return json_null();
    if (!strstr(text, stand_in.p)) return json_string(text);
    struct buf b = swap_nul(text, strlen(text), true);
    json_t *answer = json_stringn(b.p, b.n);
    buf_free(&b);
    return answer;
}

const json_t *reward__ask(struct reward__grading *g, json_t *question) {
    const json_t *answer = g->question ? NULL : json_array_get(g->answers, g->at++);
    if (answer || g->question) json_decref(question);
    else g->question = question ? question : json_null();
    return answer;
}
