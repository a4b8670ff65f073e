/* run_episode.h - the record of a conversation with tools (data/data.h BATCH_EPISODE) as run.db has it. The file may come from
 * anybody: what has another type than it should have is absent. */
#ifndef VERLC_VIEW_RUN_EPISODE_H
#define VERLC_VIEW_RUN_EPISODE_H

#include "view/run_reader.h"

/* Of an episode; NULL: all 0. failed: calls with another status than ok. */
struct run_episode {
    int64_t turns, calls, failed, malformed, dropped;
    int64_t output, outputs;  /* which of how many samples of its episode; 0, 0: the only one */
    const char *end, *reason; /* "", NULL: absent; borrowed */
};
struct run_episode run_episode_of(const json_t *episode);

/* One call of a tool. Texts are borrowed, may hold NUL; absent ones are empty. */
struct run_call {
    int64_t segment; /* of the response: which called; -1: not known */
    struct track_text name, arguments, result, status;
    double seconds, reward; /* NaN: not known, none */
    bool truncated;
};
bool run_episode_call(const json_t *episode, int64_t i, struct run_call *out); /* false: there are no more */
json_t *run_episode_tools(const json_t *episode); /* the tools that it called, each once; new reference */

struct run_episode_filter {       /* zeroed: every sample fits; else only samples with a record */
    const char *tool;             /* it called this one; NULL: any or none */
    bool failed;                  /* with a call that failed, or a malformed one */
    int64_t min_turns, max_turns; /* 0: no limit */
};
bool run_episode_fits(const json_t *episode, const struct run_episode_filter *f);

#endif
