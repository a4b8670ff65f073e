/* grade_short.c - short answers compared as text: Search-R1's exact match, after
 * verl/utils/reward_score/search_r1_like_qa_em.py; the letter of a multiple choice question, after gpqa.py of verl's recipe
 * r1; and the form that Geometry3K's grader pays for.
 * Invariant: no text makes one of them fail. */
#include "reward/reward_int.h"

#include <ctype.h>
#include <stdlib.h>
#include <string.h>

/* ---- Search-R1 ---- */

/* Bytes of an article at p, behind a character that ends a word; 0: none. */
static size_t article(const char *p) {
    static const char *const articles[] = {"a", "an", "the"};
    for (size_t i = 0; i < sizeof articles / sizeof *articles; i++) {
        const size_t n = strlen(articles[i]);
        if (strncmp(p, articles[i], n) == 0 && !reward__is_word(p + n)) return n;
    }
    return 0;
}

/* Lower case, without ASCII punctuation and articles, one space between words. */
char *reward__qa_normal(const char *answer) {
    char *low = reward__lower(answer), *to = low;
    for (const char *p = low; *p; p++)
        if (!ispunct((unsigned char)*p) || (unsigned char)*p >= 128) *to++ = *p;
    *to = '\0';
    struct buf out = {0};
    bool in_word = false;
    for (const char *p = low; *p;) {
        const size_t skip = in_word ? 0 : article(p), n = skip ? skip : reward__char(p);
        in_word = reward__is_word(p);
        if (skip) buf_addc(&out, ' ');
        else buf_add(&out, p, n);
        p += n;
    }
    free(low);
    char *text = buf_take(&out), *words = reward__words(text);
    free(text);
    return words;
}

/* The text of the last <answer>...</answer>; NULL: there is none. */
static char *last_answer(const char *s) {
    static const char open[] = "<answer>", close[] = "</answer>";
    char *last = NULL;
    for (const char *p = s, *end; (p = strstr(p, open)) && (end = strstr(p + strlen(open), close)); p = end + strlen(close)) {
        const char *from = p + strlen(open);
        reward__set(&last, xstrndup(from, (size_t)(end - from)));
    }
    if (last) reward__strip(&last);
    return last;
}

static int64_t count(const char *s, const char *what) {
    int64_t n = 0;
    for (; (s = strstr(s, what)); s += strlen(what)) n++;
    return n;
}

double reward__search_r1(const char *s, const json_t *targets, bool substring) {
    enum { MANY_TAGS = 10 };
    char *answer = last_answer(s), *given = answer ? reward__qa_normal(answer) : NULL;
    bool right = false;
    for (size_t i = 0; given && !right && i < (json_is_string(targets) ? 1 : json_array_size(targets)); i++) {
        char *text = reward__text(json_is_string(targets) ? targets : json_array_get(targets, i)),
             *target = reward__qa_normal(text);
        right = substring ? strstr(given, target) != NULL : strcmp(given, target) == 0;
        free(text);
        free(target);
    }
    free(answer);
    free(given);
    const bool many = !substring && (count(s, "<answer>") > MANY_TAGS || count(s, "</answer>") > MANY_TAGS);
    return right ? (many ? 0.25 : 1) : 0;
}

/* ---- multiple choice ---- */

double reward__choice(const char *s, size_t n, const char *letter) {
    char *given = reward__first_group(s, n, "(?i)Answer[ \\t]*:[ \\t]*\\$?([A-D])\\$?");
    const bool right = given && strcmp(given, letter) == 0;
    free(given);
    return right;
}

/* ---- Geometry3K ---- */

bool reward__geo3k_form(const char *s) {
    static const char think[] = "<think>", end[] = "</think>", box[] = "\\boxed{";
    const char *p = strncmp(s, think, strlen(think)) == 0 ? strstr(s + strlen(think), end) : NULL;
    p = p ? strstr(p + strlen(end), box) : NULL;
    return p && strchr(p + strlen(box), '}');
}
