/* program_journal.h - what the journal of a run (agent/tool_journal.h) has of episodes that are programs: that one was started, and
 * what became of it.
 *
 * After kill -9 an episode that was over is taken from there, tokens and reward; one that ran is known to have been started.
 * Invariant: a record is taken only for the same episode with the same command, prompt and sampling. */
#ifndef VERLC_PPO_STAGES_PROGRAM_JOURNAL_H
#define VERLC_PPO_STAGES_PROGRAM_JOURNAL_H

#include "agent/tool_journal.h"

#include <stdbool.h>
#include <stdint.h>

struct generation_state;
struct program_journal { /* borrowed */
    const struct generation_state *g;
    struct tool_journal **journal;
    const char *command;
};
/* Of sample i: whether it was over, into its user_episode then; else how often it was started in runs that were killed since the
 * last checkpoint. ERR_IO. */
int program_journal_find(const struct program_journal *j, int64_t i, bool *over, int64_t *n_starts);
/* Start number n of sample i; its end, of its user_episode. On disk after tool_journal_sync. ERR_IO. */
int program_journal_start(const struct program_journal *j, int64_t i, int64_t n);
int program_journal_end(const struct program_journal *j, int64_t i);
/* What has become of the episode of s (s->user), for a checkpoint too: a loop's or a program's. New reference. */
struct generation_sample;
json_t *program_journal_episode(const struct generation_sample *s);
/* s, which has no output yet, gets it. False: the record is damaged; s has none then. */
bool program_journal_restore(const struct generation_state *g, const json_t *v, struct generation_sample *s);

#endif
