/* grade_gsm8k.c - GSM8K's final answer, as verl/utils/reward_score/gsm8k.py finds
 * it: in the last 300 code points, strictly after "#### ", or flexibly the last
 * number.  Answers are compared as strings: "72." is not "72". */
#include "reward/reward_int.h"

#include <stdbool.h>
#include <stdlib.h>
#include <string.h>

#define WINDOW_CHARS 300

static bool is_number_char(char c) { return (c >= '0' && c <= '9') || c == '.' || c == ','; }

/* Length of -?[0-9.,]+ at p, 0 if there is none. */
static size_t number_at(const char *p, const char *end) {
    const char *q = p + (p < end && *p == '-'), *digits = q;
    while (q < end && is_number_char(*q)) q++;
    return q == digits ? 0 : (size_t)(q - p);
}

static char *extract_strict(const char *s, const char *end) {
    static const char mark[] = "#### ";
    const size_t n_mark = sizeof mark - 1;
    const char *answer = NULL;
    size_t n_answer = 0;
    for (const char *p = s; (size_t)(end - p) > n_mark; p++) {
        if (memcmp(p, mark, n_mark) != 0) continue;
        const size_t n = number_at(p + n_mark, end);
        if (n == 0) continue;
        answer = p + n_mark; /* the last one counts */
        n_answer = n;
    }
    if (!answer) return NULL;
    char *out = xstrndup(answer, n_answer);
    reward__replace(&out, ",", "");
    return out;
}

/* The last number that is not a lone "."; where all are, the first of them. */
static char *extract_flexible(const char *s, const char *end) {
    const char *first = NULL, *last = NULL;
    size_t n_last = 0;
    for (const char *p = s; p < end;) {
        const size_t n = number_at(p, end);
        if (n > 0 && !first) first = p;
        if (n > 0 && !(n == 1 && *p == '.')) {
            last = p;
            n_last = n;
        }
        p += n ? n : 1;
    }
    if (last) return xstrndup(last, n_last);
    return first ? xstrdup(".") : NULL;
}

double reward__gsm8k(const char *s, size_t n, const char *truth, bool flexible) {
    size_t n_tail;
    const char *tail = reward__tail(s, n, WINDOW_CHARS, &n_tail), *end = tail + n_tail;
    char *answer = flexible ? extract_flexible(tail, end) : extract_strict(tail, end);
    const bool right = answer && strcmp(answer, truth) == 0;
    free(answer);
    return right;
}
