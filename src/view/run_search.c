/* run_search.c - a regular expression in prompts and responses, line by line, the newest step first.
 *
 * Samples are read one at a time, so a search of millions of them neither holds the database nor needs their memory.
 * Invariant: a text is UTF-8 when it is matched. */
#include "view/run_reader_int.h"

#include "base/buf.h"
#include "base/clock.h"
#include "base/err.h"
#include "text/text.h"

#define PCRE2_CODE_UNIT_WIDTH 8
#include <pcre2.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>

enum { MAX_STEP_SAMPLES = 1000000, MATCH_LIMIT = 10000000, JIT_STACK = 1 << 20 };

struct run_search {
    struct run_reader *r; /* borrowed */
    struct run_search_args a;
    pcre2_code *code;
    pcre2_match_data *match;
    pcre2_match_context *limits;
    pcre2_jit_stack *stack;
    int64_t step;                 /* of the ids; the next one is smaller */
    int64_t *ids, n_ids, at, cap; /* of the step's samples; at: the next one */
    int64_t done, total;          /* samples */
    struct buf text[2];           /* prompt and response of the sample at hand */
    struct run_match sample;      /* what its matches have in common */
    int field;                    /* of text, 2: through */
    size_t from;                  /* byte of the next line */
    int64_t line_no;              /* lines before it */
};

/* ---- the pattern ---- */

static int compile(struct run_search *s, const struct run_search_args *a) {
    int code;
    PCRE2_SIZE at;
    PCRE2_UCHAR why[256];
    const uint32_t options = PCRE2_UTF | PCRE2_UCP | PCRE2_NEVER_BACKSLASH_C | (a->ignore_case ? PCRE2_CASELESS : 0);
    s->code = pcre2_compile((PCRE2_SPTR)a->pattern, PCRE2_ZERO_TERMINATED, options, &code, &at, NULL);
    if (!s->code) {
        pcre2_get_error_message(code, why, sizeof why);
        FAIL(ERR_INVAL, "pattern '%s': %s at byte %zu", a->pattern, (char *)why, (size_t)at);
    }
    pcre2_jit_compile(s->code, PCRE2_JIT_COMPLETE); /* without it the interpreter matches */
    s->match = pcre2_match_data_create_from_pattern(s->code, NULL);
    s->limits = pcre2_match_context_create(NULL);
    s->stack = pcre2_jit_stack_create(32 << 10, JIT_STACK, NULL);
    CHECK(s->match && s->limits);
    pcre2_set_match_limit(s->limits, MATCH_LIMIT);
    if (s->stack) pcre2_jit_stack_assign(s->limits, NULL, s->stack);
    return 0;
}

/* 1: a match from a byte of the line on; 0: none; ERR_INVAL: a line takes too long. */
static int find(struct run_search *s, const char *line, size_t n, size_t from, size_t *lo, size_t *hi) {
    const int rc = pcre2_match(s->code, (PCRE2_SPTR)line, n, from, PCRE2_NO_UTF_CHECK, s->match, s->limits);
    if (rc == PCRE2_ERROR_NOMATCH) return 0;
    if (rc < 0) {
        PCRE2_UCHAR why[256];
        pcre2_get_error_message(rc, why, sizeof why);
        FAIL(ERR_INVAL, "the pattern takes too long on a line of %zu bytes (%s); make it simpler", n, (char *)why);
    }
    const PCRE2_SIZE *span = pcre2_get_ovector_pointer(s->match);
    *lo = span[0];
    *hi = span[1] > span[0] ? span[1] : span[0]; /* \K may put the end before the start */
    return 1;
}

bool run_search_in_line(struct run_search *s, struct track_text line, size_t from, size_t *lo, size_t *hi) {
    return from <= line.n && find(s, line.p, line.n, from, lo, hi) == 1;
}

/* ---- samples ---- */

/* Whole numbers of a query, into the list. */
static int read_ids(struct run_search *s) {
    sqlite3_stmt *st;
    int rc;
    s->n_ids = s->at = 0;
    TRY(reader__query(s->r, &st, "SELECT id FROM samples WHERE step = ? ORDER BY validation, uid, sample LIMIT ?"));
    sqlite3_bind_int64(st, 1, s->step);
    sqlite3_bind_int64(st, 2, MAX_STEP_SAMPLES);
    while ((rc = reader__row(s->r, st)) == 1) {
        xgrow((void **)&s->ids, &s->cap, s->n_ids + 1, sizeof *s->ids);
        s->ids[s->n_ids++] = reader__i64(st, 0);
    }
    sqlite3_finalize(st);
    return rc;
}

/* 1: the samples of the next older step; 0: there is none. */
static int next_step(struct run_search *s) {
    sqlite3_stmt *st;
    if (s->a.step >= 0) {
        if (s->step == s->a.step) return 0;
        s->step = s->a.step;
        TRY(read_ids(s));
        return 1;
    }
    TRY(reader__query(s->r, &st, "SELECT MAX(step) FROM samples WHERE step < ?"));
    sqlite3_bind_int64(st, 1, s->step);
    const int rc = reader__row(s->r, st);
    const bool there = rc == 1 && sqlite3_column_type(st, 0) == SQLITE_INTEGER;
    if (there) s->step = sqlite3_column_int64(st, 0);
    sqlite3_finalize(st);
    TRY(rc);
    if (!there) return 0;
    TRY(read_ids(s));
    return 1;
}

static void take_text(struct buf *b, sqlite3_stmt *st, int column) {
    struct reader__texts keep = {0};
    const struct track_text t = reader__text(st, column, &keep);
    buf_reset(b);
    buf_add(b, t.p, t.n);
    reader__texts_free(&keep);
}

static int read_sample(struct run_search *s, int64_t id) {
    sqlite3_stmt *st;
    s->done++;
    TRY(reader__query(s->r, &st,
                      "SELECT uid, sample, validation, score, prompt, response FROM samples"
                      " WHERE id = ?1 AND (?2 IS NULL OR score BETWEEN ?2 AND ?3)"));
    sqlite3_bind_int64(st, 1, id);
    if (s->a.ranged) sqlite3_bind_double(st, 2, s->a.min);
    if (s->a.ranged) sqlite3_bind_double(st, 3, s->a.max);
    const int rc = reader__row(s->r, st);
    if (rc == 1) {
        s->sample = (struct run_match){.id = id,
                                       .step = s->step,
                                       .uid = reader__i64(st, 0),
                                       .index = reader__i64(st, 1),
                                       .validation = reader__i64(st, 2) != 0,
                                       .score = reader__f64(st, 3)};
        take_text(&s->text[0], st, 4);
        take_text(&s->text[1], st, 5);
        s->field = s->a.prompts ? 0 : 1;
        s->from = 0;
        s->line_no = 0;
    }
    sqlite3_finalize(st);
    return rc < 0 ? rc : 0;
}

/* 1: the next line that matches, of the sample at hand; 0: it has no more. */
static int next_line(struct run_search *s, struct run_match *m) {
    for (; s->field < 2; s->field++, s->from = 0, s->line_no = 0) {
        const struct buf *b = &s->text[s->field];
        while (s->from < b->n && !(s->field == 1 && !s->a.responses)) {
            const char *line = b->p + s->from, *end = memchr(line, '\n', b->n - s->from);
            const size_t n = end ? (size_t)(end - line) : b->n - s->from;
            size_t lo, hi;
            s->from += n + 1;
            s->line_no++;
            const int rc = find(s, line, n, 0, &lo, &hi);
            TRY(rc);
            if (rc == 0) continue;
            *m = s->sample;
            m->in_response = s->field == 1;
            m->line = (struct track_text){line, n};
            m->line_no = s->line_no;
            m->lo = lo;
            m->hi = hi;
            return 1;
        }
    }
    return 0;
}

int run_search_next(struct run_search *s, double seconds, struct run_match *m) {
    const double end = clock_now() + seconds;
    bool looked = false; /* each call does something */
    for (;;) {
        int rc = next_line(s, m);
        TRY(rc);
        if (rc == 1) return RUN_SEARCH_MATCH;
        if (looked && clock_now() > end) return RUN_SEARCH_MORE;
        while (s->at == s->n_ids) {
            TRY(rc = next_step(s));
            if (rc == 0) return RUN_SEARCH_END;
        }
        TRY(read_sample(s, s->ids[s->at++]));
        looked = true;
    }
}

void run_search_skip_sample(struct run_search *s) { s->field = 2; }

void run_search_progress(const struct run_search *s, int64_t *samples_done, int64_t *samples_total) {
    *samples_done = s->done;
    *samples_total = s->total < s->done ? s->done : s->total;
}

/* ---- one search ---- */

static int count(struct run_search *s) {
    sqlite3_stmt *st;
    TRY(reader__query(s->r, &st, "SELECT COUNT(*) FROM samples WHERE ?1 < 0 OR step = ?1"));
    sqlite3_bind_int64(st, 1, s->a.step);
    const int rc = reader__row(s->r, st);
    if (rc == 1) s->total = reader__i64(st, 0);
    sqlite3_finalize(st);
    return rc < 0 ? rc : 0;
}

int run_search_create(struct run_search **out, struct run_reader *r, const struct run_search_args *a) {
    struct run_search *s = xcalloc(1, sizeof *s);
    s->r = r;
    s->a = *a;
    s->a.pattern = NULL; /* the caller's */
    s->step = INT64_MAX;
    s->field = 2;
    int rc = compile(s, a);
    if (rc == 0) rc = count(s);
    if (rc < 0) run_search_destroy(s);
    else *out = s;
    return rc;
}

void run_search_destroy(struct run_search *s) {
    if (!s) return;
    pcre2_code_free(s->code);
    pcre2_match_data_free(s->match);
    pcre2_match_context_free(s->limits);
    pcre2_jit_stack_free(s->stack);
    free(s->ids);
    for (int i = 0; i < 2; i++) buf_free(&s->text[i]);
    free(s);
}
