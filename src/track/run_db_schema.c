/* run_db_schema.c - the tables of run.db. Format 2; of format 1 the columns that it lacks are added when its run is resumed.
 *
 *   meta(key, value)                 format, version (of verlc), project, experiment, config (JSON), total_steps, started (wall
 *                                    clock of the run's first start), headline (JSON list of metrics), plan (JSON, below),
 *                                    set (JSON list: the keys that the user set), special_tokens (JSON: id to name);
 *                                    of a run that has ended also ended (wall clock) and exit ("done", "failed: ...",
 *                                    "killed: ..."): one that was killed with SIGKILL has neither
 *   metrics(step, name, value)       one row a metric; NULL: not a number
 *   samples(id, step, validation, uid, sample, data_source, prompt, response, ground_truth, score, advantage, reward_status,
 *           finish, prompt_ids, ids, logp, extra, entropy, ref_logp, advantages, reward_message, token_bytes,
 *           versions, prompt_number, place, prompt_bytes, segments, episode, routed_experts)
 *           texts are UTF-8 and may hold NUL; prompt_ids, ids: little-endian int32; extra: JSON; score, advantage NULL: none
 *           logp, entropy, ref_logp, advantages: little-endian float32, one a response token; NULL: not computed in this run
 *           advantage: of the first token; advantages NULL: of every token
 *           token_bytes: little-endian uint16, bytes of response that came with each token: 0 for a special token or a part of a
 *           character, whose bytes come with its last part; their sum is response's length; prompt_bytes: the same of prompt
 *           segments: little-endian int32 pairs, tokens and kind (0: the policy wrote them, 1: an environment, whose tokens have
 *           logp 0 and are not trained) of each segment of the response, in order; NULL: one segment of the policy
 *           episode: JSON of a conversation of several turns: {turns, end, reason, malformed, dropped, calls: [{segment, name,
 *           arguments, result, status, seconds, reward, truncated}]}; NULL in runs without such
 *           routed_experts: the choices that its update replayed (router_replay.mode): of each token of prompt and response, layer
 *           by layer, a byte each (of more than 255 experts two, little-endian), filled up to 4 bytes a token; all ones: none;
 *           NULL: nothing is replayed
 *           reward_message: why there is no score, NULL where there is one
 *           rows of a step without metrics are of a step that is being made
 *   histograms(step, validation, name, lo, hi, counts)
 *           "score" and "response_length" of the step's samples; counts: little-endian int32, as many bins of equal width
 *           from lo to hi, the last one with hi; samples without a score are in none
 *   status(key, value)               what the run does: step, phase (a name of timing_s/..., "" between them), done, total (of the
 *                                    phase, total 0: not reported), tok_s (0: not reported), phase_since and wall (wall clock: of
 *                                    the phase's start, of this record), pid, host; at most once a second
 *   events(id, step, wall, kind, message)  what happened, in order: "warning", "checkpoint", "reward_error", "resume",
 *                                    "changed" (docs/checkpoints.md)
 *
 *   plan: {"total": bytes, "limit": bytes, "parts": [{"name", "bytes", "note", "block"}]}; parts with block true take turns
 *   in one block, of the size of the largest; an update's have "gradients", bytes of its own */
#include "track/run_db_schema.h"

#include "base/err.h"

#include <stdbool.h>
#include <stdio.h>

const char run_db_schema[] =
    "CREATE TABLE IF NOT EXISTS meta(key TEXT PRIMARY KEY, value TEXT);"
    "CREATE TABLE IF NOT EXISTS metrics(step INTEGER, name TEXT, value REAL, PRIMARY KEY(step, name)) WITHOUT ROWID;"
    "CREATE TABLE IF NOT EXISTS samples(id INTEGER PRIMARY KEY, step INTEGER, validation INTEGER, uid INTEGER, sample INTEGER,"
    " data_source TEXT, prompt TEXT, response TEXT, ground_truth TEXT, score REAL, advantage REAL, reward_status TEXT,"
    " finish TEXT, prompt_ids BLOB, ids BLOB, logp BLOB, extra TEXT);"
    "CREATE TABLE IF NOT EXISTS histograms(step INTEGER, validation INTEGER, name TEXT, lo REAL, hi REAL, counts BLOB,"
    " PRIMARY KEY(step, validation, name)) WITHOUT ROWID;"
    "CREATE TABLE IF NOT EXISTS status(key TEXT PRIMARY KEY, value) WITHOUT ROWID;"
    "CREATE TABLE IF NOT EXISTS events(id INTEGER PRIMARY KEY, step INTEGER, wall REAL, kind TEXT, message TEXT);"
    "DROP INDEX IF EXISTS samples_step;"
    "CREATE INDEX IF NOT EXISTS samples_place ON samples(step, validation, uid, sample);";
static const char *const added[][2] = {/* columns of samples that format 1 lacks */
                                       {"entropy", "BLOB"},          {"ref_logp", "BLOB"},    {"advantages", "BLOB"},
                                       {"reward_message", "TEXT"},   {"token_bytes", "BLOB"}, {"versions", "BLOB"},
                                       {"prompt_number", "INTEGER"}, {"place", "INTEGER"},    {"prompt_bytes", "BLOB"},
                                       {"segments", "BLOB"},         {"episode", "TEXT"},     {"routed_experts", "BLOB"}};

int run_db_add_columns(sqlite3 *db, const char *path) {
    sqlite3_stmt *st = NULL;
    int code = sqlite3_prepare_v2(db, "SELECT 1 FROM pragma_table_info('samples') WHERE name = ?", -1, &st, NULL);
    for (size_t i = 0; i < sizeof added / sizeof *added && code == SQLITE_OK; i++) {
        char sql[96];
        sqlite3_bind_text(st, 1, added[i][0], -1, SQLITE_STATIC);
        const bool there = sqlite3_step(st) == SQLITE_ROW;
        sqlite3_reset(st);
        snprintf(sql, sizeof sql, "ALTER TABLE samples ADD COLUMN %s %s", added[i][0], added[i][1]);
        if (!there) code = sqlite3_exec(db, sql, NULL, NULL, NULL);
    }
    const int rc = code == SQLITE_OK ? 0 : err_set(ERR_IO, __FILE__, __LINE__, "%s: %s", path, sqlite3_errmsg(db));
    sqlite3_finalize(st);
    return rc;
}
