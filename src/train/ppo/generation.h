/* generation.h - the state of a generation under way, which rollout.c drives, reward.c scores and dynamic_sampling.c
 * extends.  Private to train. */
#ifndef VERLC_TRAIN_PPO_GENERATION_H
#define VERLC_TRAIN_PPO_GENERATION_H

#include "train/ppo/stages.h"

struct gen_sample {
    int32_t *ids;
    float *logp, *sampling_logp; /* sampling_logp NULL: not asked for */
    uint16_t *token_bytes;       /* (n): of text */
    struct buf text;
    int64_t n, n_preempted;
    enum rollout_finish finish;
    double seconds, ended; /* ended: wall clock */
    struct reward_result reward;
    bool scored;
};

/* One prompt and its samples. */
struct gen_group {
    const struct batch *prompts; /* its row is there */
    struct batch *owned;         /* that batch, when it is this prompt alone */
    int64_t row, data_row;       /* in prompts; in the training data (filter_groups) */
    uint64_t seed;
    int64_t n_scored;
    bool useless; /* filter_groups: replaced */
};

struct gen {
    const struct stage *s;
    const struct generation *in;
    const struct ppo_sampling *sp;
    struct gen_group *groups;
    int64_t n_groups, cap_groups;
    struct gen_sample *samples;  /* (n_groups * per), group by group; the greedy baseline last */
    int64_t cap_samples, n, per; /* samples of a prompt without and with the baseline */
    int64_t n_done, tokens;
    int64_t n_useless, useless_run; /* prompts replaced; in a row */
    double start;
    bool validation, baseline, filter;
};

/* ---- rollout.c ---- */
/* The next prompt of the training data joins the running engine. */
int gen_add_next_prompt(struct gen *g);
/* Sample i has its score, or why it has none; takes r over. */
int gen_take_score(struct gen *g, int64_t i, const struct reward_result *r);
void gen_drop_sample(struct gen_sample *s);

/* ---- reward.c ---- */
int score_submit(struct gen *g, int64_t i); /* a finished sample */
/* What the scorers have by now, to gen_take_score. more: samples are still being generated; without, it waits a little. */
int score_take(struct gen *g, bool more);
int64_t score_pending(const struct gen *g); /* samples whose score is not there yet */
void score_report_errors(const struct gen *g);
void score_drop(struct gen *g); /* forgets them */

/* ---- dynamic_sampling.c ---- */
/* Group k has its last score. */
int dynamic_sampling_close(struct gen *g, int64_t k);

#endif
