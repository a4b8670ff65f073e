/* tool_journal.h - what tools and interactions said, on disk before it is used: a run that was killed and goes on from its last
 * checkpoint draws the same turns again, and finds what they were answered here instead of calling a tool twice.
 *
 * One file of JSON lines for each step, DIR/STEP.jsonl. It holds results alone: the state that a tool keeps in its process is
 * not restored, extra_fields are.
 * Invariant: a result is found only for the same call of the same episode, with the same arguments. */
#ifndef VERLC_AGENT_TOOL_JOURNAL_H
#define VERLC_AGENT_TOOL_JOURNAL_H

#include "agent/tools.h"

struct tool_journal;
/* Reads what DIR has of step `saved` (its validation may be made again) and later ones; older steps' files are removed. A line
 * that was half written is no record. fresh: removes all. ERR_IO. */
int tool_journal_open(struct tool_journal **out, const char *dir, int64_t saved, bool fresh);
void tool_journal_close(struct tool_journal *j); /* NULL ok */

struct tool_journal_key { /* borrowed */
    int64_t step;
    const char *episode;  /* its name */
    int64_t turn, call;   /* call -1: an interaction's message */
    const char *name;     /* of the tool or the interaction */
    const char *question; /* its arguments, or the message that it answers; n bytes */
    size_t n;
};
/* Whether there is a record; *out is the caller's to free, its ticket is -1. */
bool tool_journal_find(const struct tool_journal *j, const struct tool_journal_key *k, struct tool_result *out);
/* Appends a record. ERR_IO: the file cannot be written. */
int tool_journal_add(struct tool_journal *j, const struct tool_journal_key *k, const struct tool_result *r);
int64_t tool_journal_added(const struct tool_journal *j); /* records so far: the number of the last one */
/* What was added is on disk when it returns. ERR_IO. */
int tool_journal_sync(struct tool_journal *j);
/* Has a thread write what was added to the disk; *synced: that many records are there. wait: until there are more, or all. ERR_IO:
 * the disk has refused them. */
int tool_journal_flush(struct tool_journal *j, bool wait, int64_t *synced);
/* A checkpoint of step `saved` is there: nobody asks for earlier steps again. ERR_IO. */
int tool_journal_forget(struct tool_journal *j, int64_t saved);
int tool_journal_clear(struct tool_journal *j); /* the run has ended as it should: removes all. ERR_IO */

#endif
