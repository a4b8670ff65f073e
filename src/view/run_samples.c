/* run_samples.c - samples of run.db and their groups.
 *
 * Invariant: the arrays of a sample have as many numbers as it has tokens, or are NULL. */
#include "view/run_reader_int.h"

#include "base/buf.h"
#include "base/err.h"
#include "base/json.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

enum { MAX_SAMPLES = 100000 };

/* ---- samples ---- */

/* Columns of the query, in its order. */
enum {
    ID,
    STEP,
    VALIDATION,
    UID,
    SAMPLE,
    DATA_SOURCE,
    SCORE,
    ADVANTAGE,
    STATUS,
    FINISH,
    N_PROMPT,
    N_RESPONSE,
    MESSAGE,
    EPISODE,
    PROMPT,
    RESPONSE,
    TRUTH,
    PROMPT_IDS,
    IDS,
    LOGP,
    EXTRA,
    ENTROPY,
    REF_LOGP,
    ADVANTAGES,
    TOKEN_BYTES,
    VERSIONS,
    PROMPT_BYTES,
    SEGMENTS
};

static char *query_text(const struct run_reader *r, const struct run_sample_query *q) {
    static const char *const names[] = {"entropy", "ref_logp", "advantages", "token_bytes", "versions", "prompt_bytes", "segments"};
    static const int has[] = {COLUMN_ENTROPY,  COLUMN_REF_LOGP,     COLUMN_ADVANTAGES, COLUMN_TOKEN_BYTES,
                              COLUMN_VERSIONS, COLUMN_PROMPT_BYTES, COLUMN_SEGMENTS};
    struct buf b = {0};
    buf_addf(&b,
             "SELECT id, step, validation, uid, sample, data_source, score, advantage, reward_status, finish,"
             " length(prompt_ids), length(ids), %s, %s",
             r->has[COLUMN_REWARD_MESSAGE] ? "reward_message" : "NULL", r->has[COLUMN_EPISODE] ? "episode" : "NULL");
    if (q->whole) buf_adds(&b, ", prompt, response, ground_truth, prompt_ids, ids, logp, extra");
    for (size_t i = 0; i < sizeof has / sizeof *has && q->whole; i++) buf_addf(&b, ", %s", r->has[has[i]] ? names[i] : "NULL");
    buf_adds(&b, " FROM samples WHERE ");
    if (q->id) buf_adds(&b, "id = ?1");
    else {
        buf_adds(&b, "step = ?1 AND validation = ?2");
        if (q->uid >= 0) buf_adds(&b, " AND uid = ?3");
        if (q->index >= 0) buf_adds(&b, " AND sample = ?4");
    }
    buf_adds(&b, " ORDER BY uid, sample, id LIMIT ?5 OFFSET ?6");
    return buf_take(&b);
}

/* The bytes of a column, where there are this many; else NULL. Caller frees. */
static void *blob(sqlite3_stmt *st, int column, int64_t bytes) {
    if (sqlite3_column_type(st, column) != SQLITE_BLOB || sqlite3_column_bytes(st, column) != bytes || bytes == 0) return NULL;
    const void *from = sqlite3_column_blob(st, column);
    return from ? memcpy(xmalloc((size_t)bytes), from, (size_t)bytes) : NULL;
}

/* Where each token's text ends, from its length; NULL unless they add up to its bytes. */
static int64_t *token_ends(sqlite3_stmt *st, int column, int64_t n, size_t n_text) {
    uint16_t *len = blob(st, column, n * 2);
    if (!len) return NULL;
    int64_t *ends = xmalloc((size_t)n * sizeof *ends), at = 0;
    for (int64_t i = 0; i < n; i++) ends[i] = at += len[i];
    free(len);
    if (at == (int64_t)n_text) return ends;
    free(ends);
    return NULL;
}

/* The pairs of a column, where there are some; else NULL. Caller frees. */
static int32_t *pairs(sqlite3_stmt *st, int column, int64_t *n) {
    *n = sqlite3_column_type(st, column) == SQLITE_BLOB ? sqlite3_column_bytes(st, column) / 8 : 0;
    int32_t *v = blob(st, column, *n * 8);
    if (!v) *n = 0;
    return v;
}

/* Segments that do not make up the response are none. */
static void take_segments(struct run_sample *s, sqlite3_stmt *st) {
    int32_t *v = pairs(st, SEGMENTS, &s->n_segments);
    int64_t left = s->n;
    for (int64_t k = 0; k < s->n_segments && left >= 0; k++) left = v[2 * k] < 0 ? -1 : left - v[2 * k];
    s->segments = v;
    if (left == 0) return;
    free(v);
    s->segments = NULL;
    s->n_segments = 0;
}

/* A column's JSON object; another value is none. */
static json_t *object(sqlite3_stmt *st, int column, struct reader__texts *keep) {
    json_t *v = NULL;
    if (!reader__is_text(st, column)) return NULL;
    const struct track_text text = reader__text(st, column, keep);
    if (json_parse(&v, text.p, text.n, "run.db") < 0) return NULL;
    if (json_is_object(v)) return v;
    json_decref(v);
    return NULL;
}

static void take_whole(struct run_sample *s, sqlite3_stmt *st, struct reader__texts *keep) {
    s->prompt = reader__text(st, PROMPT, keep);
    s->response = reader__text(st, RESPONSE, keep);
    s->ground_truth = reader__text(st, TRUTH, keep);
    s->prompt_ids = blob(st, PROMPT_IDS, s->n_prompt * 4);
    s->ids = blob(st, IDS, s->n * 4);
    s->logp = blob(st, LOGP, s->n * 4);
    s->entropy = blob(st, ENTROPY, s->n * 4);
    s->ref_logp = blob(st, REF_LOGP, s->n * 4);
    s->advantages = blob(st, ADVANTAGES, s->n * 4);
    s->ends = token_ends(st, TOKEN_BYTES, s->n, s->response.n);
    s->prompt_ends = token_ends(st, PROMPT_BYTES, s->n_prompt, s->prompt.n);
    s->runs = pairs(st, VERSIONS, &s->n_runs);
    take_segments(s, st);
    s->extra = object(st, EXTRA, keep);
}

const char *run_segment_name(const struct run_sample *s, int64_t k) { return s->segments[2 * k + 1] ? "environment" : "policy"; }

json_t *run_segments_json(const struct run_sample *s) {
    json_t *list = json_array();
    for (int64_t k = 0; k < s->n_segments; k++)
        json_array_append_new(list, json_pack("[i, s]", s->segments[2 * k], run_segment_name(s, k)));
    return list;
}

static void free_whole(struct run_sample *s) {
    const void *const arrays[] = {s->prompt_ids, s->ids,  s->logp,        s->entropy, s->ref_logp,
                                  s->advantages, s->ends, s->prompt_ends, s->runs,    s->segments};
    for (size_t i = 0; i < sizeof arrays / sizeof *arrays; i++) free((void *)(uintptr_t)arrays[i]);
    json_decref(s->extra);
    json_decref(s->episode);
}

static int take(sqlite3_stmt *st, const struct run_sample_query *q, int (*each)(void *arg, const struct run_sample *s), void *arg) {
    struct reader__texts keep = {0};
    struct run_sample s = {.id = reader__i64(st, ID),
                           .step = reader__i64(st, STEP),
                           .validation = reader__i64(st, VALIDATION) != 0,
                           .uid = reader__i64(st, UID),
                           .index = reader__i64(st, SAMPLE),
                           .data_source = reader__text(st, DATA_SOURCE, &keep).p,
                           .score = reader__f64(st, SCORE),
                           .advantage = reader__f64(st, ADVANTAGE),
                           .reward_status = reader__text(st, STATUS, &keep).p,
                           .finish = reader__text(st, FINISH, &keep).p,
                           .reward_message = reader__is_text(st, MESSAGE) ? reader__text(st, MESSAGE, &keep).p : NULL,
                           .n_prompt = reader__i64(st, N_PROMPT) / 4,
                           .n = reader__i64(st, N_RESPONSE) / 4};
    s.episode = object(st, EPISODE, &keep);
    if (q->whole) take_whole(&s, st, &keep);
    const int rc = each(arg, &s);
    free_whole(&s);
    reader__texts_free(&keep);
    return rc;
}

int run_reader_samples(struct run_reader *r, const struct run_sample_query *q, int (*each)(void *arg, const struct run_sample *s),
                       void *arg) {
    sqlite3_stmt *st;
    char *sql = query_text(r, q);
    int rc = reader__query(r, &st, sql);
    free(sql);
    if (rc < 0) return rc;
    sqlite3_bind_int64(st, 1, q->id ? q->id : q->step);
    if (!q->id) sqlite3_bind_int(st, 2, q->validation);
    if (!q->id && q->uid >= 0) sqlite3_bind_int64(st, 3, q->uid);
    if (!q->id && q->index >= 0) sqlite3_bind_int64(st, 4, q->index);
    sqlite3_bind_int64(st, 5, q->limit > 0 && q->limit < MAX_SAMPLES ? q->limit : MAX_SAMPLES);
    sqlite3_bind_int64(st, 6, q->offset > 0 ? q->offset : 0);
    while ((rc = reader__row(r, st)) == 1)
        if ((rc = take(st, q, each, arg)) < 0) break;
    sqlite3_finalize(st);
    return rc;
}
