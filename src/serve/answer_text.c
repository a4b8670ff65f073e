/* answer_text.c - the text of an answer as its ids come, and how much of it may be given out already.
 *
 * Held back are a text that may become a stop string, and with tools all from where a call may begin and the blanks before it.
 * Invariant: what is given out is whole characters, a prefix of the answer's text, and is never taken back. */
#include "serve/serve_int.h"

#include "base/err.h"

#include <string.h>

int serve__text_open(struct answer_text *t, const struct tokenizer *tok) {
    t->limit = SIZE_MAX;
    return tokenizer_stream_create(&t->stream, tok, true);
}

void serve__text_close(struct answer_text *t) {
    tokenizer_stream_destroy(t->stream);
    buf_free(&t->visible);
}

/* Bytes at the end of the text that may be the beginning of `whole`. */
static size_t begun(const struct buf *text, const char *whole) {
    size_t n = strlen(whole);
    n = n > 0 ? n - 1 : 0;
    if (n > text->n) n = text->n;
    for (; n > 0; n--)
        if (memcmp(text->p + text->n - n, whole, n) == 0) return n;
    return 0;
}

size_t serve__text_ready(const struct answer_text *t, const struct answer_holds *h) {
    size_t held = 0;
    for (int64_t i = 0; i < h->n_stop; i++) {
        const size_t n = begun(&t->visible, h->stop[i]);
        held = n > held ? n : held;
    }
    for (int i = 0; h->markers && h->markers[i]; i++) {
        const size_t n = begun(&t->visible, h->markers[i]);
        held = n > held ? n : held;
    }
    size_t ready = t->visible.n - held;
    if (ready > t->limit) ready = t->limit;
    while (h->markers && ready > t->sent && strchr(" \n\r\t", t->visible.p[ready - 1])) ready--;
    return ready > t->sent ? ready : t->sent;
}

static void find_marker(struct answer_text *t, const struct answer_holds *h) {
    size_t longest = 1;
    for (int i = 0; h->markers[i]; i++) {
        const size_t n = strlen(h->markers[i]);
        if (n == 0) t->limit = 0;
        if (n == 0 || t->visible.n < n) continue;
        longest = n > longest ? n : longest;
        const char *hit = memmem(t->visible.p + t->searched, t->visible.n - t->searched, h->markers[i], n);
        if (hit && (size_t)(hit - t->visible.p) < t->limit) t->limit = (size_t)(hit - t->visible.p);
    }
    if (t->visible.n >= longest) t->searched = t->visible.n - longest + 1;
}

int serve__text_push(struct answer_text *t, int32_t id, const struct answer_holds *h) {
    if (h->markers && t->limit == SIZE_MAX)
        for (int i = 0; h->markers[i]; i++)
            if (h->marker_ids[i] == id) t->limit = serve__text_ready(t, h);
    TRY(tokenizer_stream_push(t->stream, id, &t->visible));
    if (h->markers && t->limit == SIZE_MAX) find_marker(t, h);
    return 0;
}

int serve__text_finish(struct answer_text *t) { return tokenizer_stream_finish(t->stream, &t->visible); }
