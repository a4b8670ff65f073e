/* episode_record.h - what a file of responses has of an episode, next to its text: written by generate, read by eval.
 *
 * An object: the record that training keeps (BATCH_EPISODE: turns, end, reason, calls, ...), and
 *   "messages": what followed the prompt; "extra_info": what the reward function finds of the episode in its extra_info;
 *   "failure": why it has no score; "score", "score_info": that its loop or its program gave; "outputs": samples that it gave,
 *   where these are several, of which the last one is here; with data.episode_tokens "ids" and "mask" (1: the model drew it).
 * Parquet, whose columns have one type, has it as JSON text. Invariant: what was written is read as it was. */
#ifndef VERLC_GENERATE_EPISODE_RECORD_H
#define VERLC_GENERATE_EPISODE_RECORD_H

#include <jansson.h>
#include <stdbool.h>
#include <stdint.h>

struct generation_state;
struct generation_sample;

/* ---- of a sample that is over ---- */
json_t *episode_text(const struct generation_sample *s); /* as a reward function gets it */
json_t *episode_record(const struct generation_state *g, int64_t i, bool tokens);
void episode_records_as_text(json_t **records, int64_t n); /* each becomes its JSON text */

/* ---- from a file ---- */
struct episode {              /* strings and JSON are the record's */
    const char *failure;      /* NULL: it has not failed */
    const json_t *extra_info; /* an object */
    const json_t *score_info; /* an object; NULL: none */
    int64_t num_turns;
    bool has_score;
    double score;
};
/* Rows' records as objects, new reference: a list of n, each an object or the text of one. ERR_INPUT, ERR_FORMAT: what it is
 * instead. */
int episode_records_read(json_t **out, const json_t *list, int64_t n);
int episode_read(struct episode *e, const json_t *record); /* ERR_INPUT */

#endif
