/* generation.h - the state of a generation under way, which rollout.c drives, reward.c scores and dynamic_sampling.c
 * extends. */
#ifndef VERLC_PPO_STAGES_GENERATION_H
#define VERLC_PPO_STAGES_GENERATION_H

#include "agent/tools.h"
#include "ppo/stages/agent_loop.h"
#include "ppo/stages/stages.h"
#include "ppo/stages/user_loop.h"

struct generation_sample {
    int32_t *ids;
    float *logp, *sampling_logp; /* sampling_logp NULL: not requested */
    uint16_t *token_bytes;       /* (n): of text */
    int32_t *versions;           /* (n): of the weights that drew each token; NULL: the current ones */
    struct buf text;
    int64_t n, n_preempted;
    enum engine_finish finish;
    double seconds, ended;     /* ended: wall clock */
    double requested, scoring; /* clock_now at the request of its score; seconds until it arrived */
    struct reward_result reward;
    bool scored;
    struct tool_agent *agent;  /* its conversation of several turns; NULL: it has one */
    struct user_episode *user; /* made by a loop of the user; NULL: it is not */
    float *precomputed[2];     /* (n) results of gen.generation's passes by idle ranks; NULL: none */
    /* with gen.partial */
    bool over, earlier; /* it has ended; it had ended before this generation */
    /* Of an episode that is open between two generations: the calls that are out (each call of its turn, or its interaction; -1:
     * none), and what a checkpoint has of it until it is begun again. Owned, NULL: none. */
    int64_t *tickets;
    json_t *agent_state;
    int64_t pause_at; /* tokens at which it is interrupted; 0: it is not; where it has them already nothing is drawn */
};

/* One prompt and its samples. */
struct generation_group {
    const struct batch *prompts; /* has its row */
    struct batch *owned;         /* that batch, when it is this prompt alone */
    int64_t row, data_row;       /* in prompts; in the training data (filter_groups) */
    uint64_t seed;
    int64_t n_scored;
    bool useless;           /* filter_groups: replaced */
    int64_t n_over, number; /* gen.partial: finished samples; its place in the order of the data */
};

/* A call of a tool that has not answered, or with call -1 an interaction. */
struct agent_wait {
    int64_t ticket, sample, call;
};
struct agent_answer {
    struct agent_wait wait;
    struct tool_result result;
    int64_t record; /* of the journal, which is to be on disk before it is used; 0: none */
};

struct generation_state {
    const struct stage *s;
    struct {
        double rate, length; /* sums over what the engine has ended: verl's compute_spec_decode_metrics */
        int64_t n;
    } drafts;
    const struct generation *in;
    const struct ppo_sampling *sp;
    struct generation_group *groups;
    int64_t n_groups, cap_groups;
    struct generation_sample *samples;     /* (n_groups * per), group by group; the greedy baseline last */
    int64_t cap_samples, n, per;           /* samples of a prompt without and with the baseline */
    int64_t *ended, n_ended, cap_ended;    /* finished samples that are not decoded yet */
    int64_t *turned, n_turned, cap_turned; /* samples whose turn has ended, and the calls that are out (agent_loop.c) */
    struct agent_wait *waits;
    int64_t n_waits, cap_waits;
    struct agent_answer *answers; /* that are to be used in the next step */
    int64_t n_answers, cap_answers;
    int64_t n_again, n_again_differ; /* conversations that were rendered again, and are other tokens then (rendered_again.c) */
    bool idle;                       /* the engine had nothing to do when it was asked last */
    int64_t n_done, tokens;
    int64_t n_useless, useless_run; /* prompts replaced; in a row */
    double start, shown;            /* shown: the last report of progress */
    double drawing;                 /* seconds in which the engine had something to draw */
    struct worker_generation generation;
    int64_t n_precomputed; /* sequences of its passes so far */
    bool validation, baseline, filter;
    bool overlapped; /* with other stages, which report progress and check for signals */
    /* Partial rollouts: samples may be incomplete before and after, each token with its version (fully_async.c). */
    bool partial, interrupted;
    int64_t enough;        /* after so many finished groups the others are interrupted; 0: none is */
    int64_t *over, n_over; /* finished groups, in this order; room for all */
};

/* ---- generation.c ---- */
/* The randomness of the epoch that the run's sampler is in: a row that is seen again draws other samples. */
uint64_t generation_epoch_seed(const struct stage *s);
/* All samples of group k but the baseline: the first turn, prompt and sampling rule borrowed. */
int generation_group_request(const struct generation_state *g, int64_t k, struct engine_request *q);
void generation_for_baseline(struct engine_request *q);
int generation_request(const struct generation_state *g, int64_t i, struct engine_request *q); /* sample i of it alone */
void generation_ended(struct generation_state *g, int64_t i);                                  /* sample i has its last token */
/* verl's request_id: one of all that the tools know of; the same in a run that was resumed. Caller frees. */
char *generation_episode_name(const struct generation_state *g, int64_t i);
/* With gen.partial: of sample `index` of the prompt at this place in the order of the data. */
char *generation_open_name(int64_t number, int64_t index);
/* The journal of the run's directory; its steps that are saved are forgotten. *journal NULL: it is opened. */
struct tool_journal;
int generation_open_journal(const struct generation_state *g, struct tool_journal **journal);

/* ---- rollout.c ---- */
/* A generation by parts: begin, groups with their samples (ownership is taken; NULL: none is begun), run, batches of groups that
 * have ended (rows of their samples, in the order of kept); what the caller keeps of g->samples it zeroes there; end. */
int generation_begin(struct generation_state *g); /* the current weights are sent to the ranks that generate */
int generation_add_group(struct generation_state *g, const struct generation_group *group, const struct generation_sample *samples);
int generation_step(struct generation_state *g, bool wait); /* 1: there is more to do. wait: briefly, where nothing is done now */
int generation_interrupt(struct generation_state *g);       /* with gen.partial: nothing is drawn any more */
int generation_run(struct generation_state *g);             /* all of it */
int generation_collect(struct generation_state *g, const int64_t *kept, int64_t n, struct batch *out);
void generation_end(struct generation_state *g, int rc);
/* The text of a sample that has ended, and the bytes of its tokens. */
int generation_decode(const struct generation *in, struct generation_sample *s);
/* The next prompt of the training data joins the running engine. */
int generation_add_next_prompt(struct generation_state *g);
/* Sample i has its score, or why it has none; takes ownership of r. */
int generation_take_score(struct generation_state *g, int64_t i, const struct reward_result *r);
void generation_drop_sample(struct generation_sample *s);

/* ---- rendered_again.c ---- */
/* The conversation of sample i is over: counts it in g->n_again, and where it differs; most are not looked at. */
struct continuous_tokens;
int rendered_again_look(struct generation_state *g, int64_t i, struct continuous_tokens *join, enum ppo_sanity mode);
void rendered_again_warn(const struct generation_state *g, bool *warned); /* once in a run */

/* ---- reward.c ---- */
int ppo_reward_submit(struct generation_state *g, int64_t i); /* a finished sample */
/* Passes the scores that are ready to generation_take_score. more: samples are still generated; else with wait it waits briefly. */
int ppo_reward_take(struct generation_state *g, bool more, bool wait);
int64_t ppo_reward_pending(const struct generation_state *g); /* samples whose score is pending */
void ppo_reward_report_errors(const struct generation_state *g);
void ppo_reward_drop(struct generation_state *g); /* forgets them */

/* ---- dynamic_sampling.c ---- */
/* Group k has its last score. */
int dynamic_sampling_close(struct generation_state *g, int64_t k);

#endif
