/* user_episode.h - what an episode that is not drawn in one go has given: by a loop of the user (user_loop.h) or a program
 * (program_loop.h). It may be several samples, of which the last one is scored.
 * Invariant: the tokens of a sample are those of its last output. */
#ifndef VERLC_PPO_STAGES_USER_EPISODE_H
#define VERLC_PPO_STAGES_USER_EPISODE_H

#include "agent/loop_output.h"

struct generation_state;
struct generation_sample;

/* Of a sample: what its loop returned, or what became of its program. */
struct user_episode {
    struct loop_output out; /* of one that has not failed; of a program also where it has */
    char *failure;          /* NULL: it has not; owned */
    bool timed_out, program;
    /* a program's; owned, NULL: none */
    char *solution;              /* for the reward function, in place of the response's text */
    json_t *reward_extra;        /* what came with its reward */
    json_t *record;              /* goes into the record of the episode */
    int64_t n_other_temperature; /* tokens that were drawn at another temperature than the run's */
    /* Earlier outputs of the episode, in order: samples with an output each, and without one before them. Owned. The score of the
     * last is theirs (BATCH_SESSION). */
    struct generation_sample *before;
    int64_t n_before;
    /* Of one that new weights have interrupted: the id of its session, which stays open; owned, NULL: it is no such. */
    char *held;
    int32_t oldest;   /* the version of its first token; -1: it has none */
    int64_t n_starts; /* of its program, the one that runs included */
};
/* Another output, after those that there are: the sample's tokens become those of an earlier one. o is taken over. */
void user_episode_add(const struct generation_state *g, struct generation_sample *s, struct loop_output *o);
void user_episode_forget(struct generation_sample *s); /* all outputs and their tokens go */
void user_episode_free(struct user_episode *e);        /* NULL ok */
/* The sample's tokens are those of an output. */
void user_episode_take_output(const struct generation_state *g, struct generation_sample *s, const struct loop_output *o);

#endif
