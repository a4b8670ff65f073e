/* episodes.h - generation whose rows have several turns: the agent loops of a ppo run (ppo/stages/agent_loop.h), without its steps
 * and its scores.
 *
 * Samples are those of a validation of the same weights, rows and seed. What is written of one is episode_record.h's.
 * Invariant: an episode that fails costs its own sample alone. */
#ifndef VERLC_GENERATE_EPISODES_H
#define VERLC_GENERATE_EPISODES_H

#include "generate/generate_config.h"
#include "ranks/worker.h"
#include "text/text.h"

struct episodes;
struct episodes_args { /* borrowed, until close */
    const struct generate_config *k;
    const struct tokenizer *tok;
    struct worker *worker; /* opened before the first draw */
};
/* Tools, loops and programs are opened by the first row that needs them. */
int episodes_open(struct episodes **out, const struct episodes_args *a);
void episodes_close(struct episodes *e); /* NULL ok */
/* A row of the data: the tools that its prompt is rendered with, new reference; NULL: none. e NULL: none of any. ERR_INPUT: it
 * names a loop that there is not. */
int episodes_row(struct episodes *e, const json_t *row, json_t **tools);
void episodes_check(const struct episodes *e); /* after the last row: warnings about keys that none of them uses. NULL ok */
bool episodes_any(const struct episodes *e);   /* whether a row has several turns. NULL: no */

/* Rows [lo, hi) of the data, which are drawn together. */
struct episodes_rows {
    const json_t *rows;             /* all */
    const struct text_ids *prompts; /* all */
    int64_t lo, hi;
};
/* texts and records: (hi - lo, n samples) of each row, new references; NULL where an error came before. tokens: adds those that
 * were drawn. ERR_SIGNAL: a stop was asked for. */
int episodes_draw(struct episodes *e, const struct episodes_rows *r, json_t **texts, json_t **records, int64_t *tokens);
/* How many of all episodes so far have failed, as a warning. NULL ok */
void episodes_report(const struct episodes *e);

#endif
