/* rollout.h - generation: continuous batching over a paged KV cache.
 *
 * A request is a prompt with n samples.  The engine keeps a set of running samples and, step by step, gives
 * the model the rows that each still lacks: many for a prompt (chunked prefill), one for a sample that
 * decodes, many again for one that was preempted.  There is one path for all three.  Prefix caching: a full KV block is looked up
 * by the tokens that it holds, so the n samples of a prompt share its blocks, prompts share a common system turn, and a preempted
 * sample often finds its own.  The last block of a sample that has ended, which is partly filled, is found by one whose tokens
 * continue it, so a conversation computes no token twice while memory lasts.
 *
 * Invariant: what a sample contains is a function of (weights, prompt, sampling rule, seed, uid, sample
 * index) alone - not of cache size, batch limits, order, batch composition, sharing, preemption or interruption. Where the weights
 * change between interruption and continuation, each token is a function of those that drew it.
 *
 * Scheduler and block pool hold no device code: they talk to struct engine_model, which the real decoder
 * (decoder_model) and the tests' fake implement. */
#ifndef VERLC_ENGINE_H
#define VERLC_ENGINE_H

#include "model/parameters.h"
#include "text/text.h"

#include <stdbool.h>
#include <stdint.h>

#define KV_BLOCK_LEN 16 /* tokens of a block; a quarter of DEV_KEY_TILE */

/* ---- what the engine requires of a model ---- */
/* One step: n_rows packed rows of n_seqs sequences, and the rows to sample. */
struct engine_plan {
    int64_t n_rows, n_seqs, max_blocks; /* max_blocks: row length of `block_table` */
    int64_t max_q, max_kv;              /* longest run of rows, longest sequence */
    const int32_t *ids, *pos, *slots;   /* (n_rows) */
    const int32_t *q_start;             /* (n_seqs + 1) */
    const int32_t *pos0;                /* (n_seqs) */
    const int32_t *block_table;         /* (n_seqs, max_blocks) */
    const int32_t *state;               /* (n_seqs): the slot of its state, of a model with states */
    int64_t n_out;                      /* rows to sample from */
    const int32_t *out_row;             /* (n_out) */
    const struct sample_param *param;   /* (n_out) */
    const uint8_t *seen;                /* (n_out, ceil(V/8)) or NULL: no repetition penalty */
    /* The most probable tokens, where a sample wants them: n_top[k] of row k, written to top_id and top_logp (n_out, max_top) with
     * their log-probs of the full softmax, largest first, equal ones by id. NULL: no sample does. */
    int64_t max_top;
    const int32_t *n_top;
    int32_t *top_id;
    float *top_logp;
    /* Drafts (speculative.c); next NULL: none. The token after each row, -1: that drawn from it; how a draft of the token
     * after that is drawn from each row to sample, and where it goes: (n_rows), (n_out) each. */
    const int32_t *next;
    const struct decode_row *draft_rule;
    int32_t *draft;
};
/* A decoding step of samples that only decode, with tokens drafted for them: of each sample its last token and its drafts, as
 * rows. A row's draw is as in a step without; one is right where the drafts before it are what was drawn. */
struct engine_verify {
    int64_t n_seqs, max_blocks, most; /* most: the model's max_draft */
    const int32_t *ids;               /* (n_seqs, most + 1) */
    const int32_t *pos;               /* (n_seqs), of the last token */
    const int64_t *n_draft;           /* (n_seqs) */
    const int64_t *n_blocks;          /* (n_seqs) */
    const int32_t *block_table;       /* (n_seqs, max_blocks) */
    const int32_t *state;             /* (n_seqs), as above */
    const struct decode_row *rows;    /* (n_seqs): of the next token */
    int32_t *id;                      /* (n_seqs, most + 1): results */
    float *logp, *logp_kept;
    int32_t *draft; /* (n_seqs, most): after the last row that is right */
};
/* How many drafts of sample i are what was drawn. */
static inline int64_t engine_accepted(const struct engine_verify *v, int64_t i) {
    int64_t j = 0;
    while (j < v->n_draft[i] && v->id[i * (v->most + 1) + j] == v->ids[i * (v->most + 1) + j + 1]) j++;
    return j;
}
/* A multi-step decode burst: many steps of samples that only decode, without the host between them. Each has one token
 * that is not in the KV cache; its blocks have room for every step that it may take. */
struct engine_burst {
    int64_t n_seqs, steps, max_blocks;
    const int32_t *ids, *pos;      /* (n_seqs): that token and its position */
    const int32_t *block_table;    /* (n_seqs, max_blocks) */
    const int32_t *state;          /* (n_seqs), as above */
    const struct decode_row *rows; /* (n_seqs); left <= steps */
    int64_t max_stop;
    const int32_t *stop; /* (n_seqs, max_stop), -1 fills up */
};
/* What some of its steps gave, (steps, stride) on the host; what follows a row's end is undefined. */
struct engine_results {
    int64_t steps, stride;
    const int32_t *id;
    const float *logp, *logp_kept;
};
struct engine_model {
    void *ctx;
    int64_t n_kv_blocks, vocab;
    float logit_scale; /* what its logits are multiplied by; 0: 1 */
    /* id, logp, logp_kept: (n_out) host. Waits for the result. */
    int (*step)(void *ctx, const struct engine_plan *p, int32_t *id, float *logp, float *logp_kept);
    int64_t max_burst;                                     /* most steps of one burst; below 2: decoding goes step by step */
    int (*burst)(void *ctx, const struct engine_burst *b); /* starts it; all its results are fetched before the next one */
    /* Waits for one or more steps after the first `have`; later ones may still run. *out is the model's, until the next burst. */
    int (*burst_results)(void *ctx, int64_t have, struct engine_results *out);
    /* Slots of states that sequences have as well as KV blocks (gated delta nets): as many samples run at once. 0: it has none. A
     * sequence is computed from its first token on, or from where another sample of its prompt is. Drafts that are not accepted
     * are taken back: none is a chunk's last row. */
    int64_t n_states;
    int (*copy_states)(void *ctx, int64_t n, const int32_t *from, const int32_t *to); /* as dev_copy_rows */
    int64_t max_draft, draft_seqs; /* most drafts of a sample, at most ENGINE_MAX_DRAFT, and samples of such a step; 0: none */
    int (*verify)(void *ctx, const struct engine_verify *v); /* waits for the result */
};
enum { ENGINE_MAX_DRAFT = 8 };

/* The decoder as an engine_model: owns the KV cache and the activations. */
struct decoder;
struct decoder_args {
    struct model *model; /* borrowed until decoder_close */
    int64_t n_kv_blocks; /* of KV_BLOCK_LEN tokens */
    int64_t n_states;    /* samples with a state at a time, of a model with gated delta nets; 0: as many as the KV blocks are
                            enough for at half their length */
    int64_t max_rows;    /* rows of one step */
    int64_t max_seqs;    /* running samples */
    int64_t max_len;     /* longest prompt + response */
    int64_t max_burst;   /* steps of a burst; 0: one */
    int64_t max_draft;   /* tokens that the model's MTP layer drafts at a time; 0: none */
    void *block;         /* decoder_bytes of device memory shared with another phase; NULL: own */
};
size_t decoder_bytes(const struct model_config *c, enum dtype act, const struct decoder_args *a);
/* KV blocks that `room` bytes hold, with the states of the samples that they are for; at most `most`. */
int64_t decoder_kv_blocks_fit(const struct model_config *c, enum dtype act, const struct decoder_args *a, int64_t most,
                              size_t room);
/* Samples that may have a state at a time; 0: the model has none. */
int64_t decoder_states(const struct model_config *c, const struct decoder_args *a);
size_t decoder_kv_bytes(const struct model_config *c, enum dtype act, const struct decoder_args *a); /* of both */
/* The same limits (max_rows, max_seqs, max_len) with the device's burst, and KV blocks for all samples at full length, or as many
 * as `room` bytes hold: preemption makes do with less, down to those of one sample. model and block stay as they are. */
struct decoder_args decoder_size(const struct dev *d, const struct model_config *c, enum dtype act,
                                 const struct decoder_args *limits, size_t room);
int64_t decoder_most_rows(const struct decoder_args *a);   /* of a step, padding included */
int64_t decoder_verify_rows(const struct decoder_args *a); /* of a step that verifies drafts, likewise; 0: there is none */
int decoder_open(struct decoder **out, const struct decoder_args *a);
void decoder_close(struct decoder *d); /* NULL ok */
struct engine_model decoder_model(struct decoder *d);
/* For measuring: n more steps of the last burst's rows, whose samples have all ended, so nothing is drawn; queued, with graphs of
 * their own (decode_graphs_free). ERR_INVAL: there was no burst. */
struct decode_graphs;
int decoder_repeat(struct decoder *d, struct decode_graphs *graphs, int64_t n);

/* ---- requests and results ---- */
struct engine_request {
    const int32_t *prompt;                  /* copied */
    int64_t n_prompt;                       /* >= 1 */
    int64_t n;                              /* samples, >= 1 */
    int64_t max_tokens;                     /* of the response, >= 1 */
    float temperature;                      /* 0: greedy */
    float top_p, min_p, repetition_penalty; /* 1, 0, 1: off */
    int32_t top_k;                          /* <= 0: off */
    uint64_t seed, uid;                     /* address of the randomness: base/rng.h */
    int64_t first_index;                    /* index of the first sample */
    /* A response that continues (n is 1): its tokens so far and their log-probs, copied. After an interruption these are the
     * policy's; after a stop the tokens of an environment follow, with log-probs 0, and the policy's next segment is drawn. K and V
     * are those of blocks that prefix caching still has; the others are recomputed, by the current weights. The next token is drawn
     * with the random number of its position in the response. */
    const int32_t *begun;
    const float *begun_logp, *begun_logp_kept;
    int64_t n_begun;  /* < max_tokens, which counts all segments */
    int64_t segment;  /* <= n_begun: where the segment begins that is drawn; stop strings are looked for from there on */
    int64_t pause_at; /* the sample is interrupted at so many tokens, those begun included; 0: it is not */
    bool ignore_eos;
    const int32_t *stop_ids; /* end tokens (copied); the response includes the one hit */
    int64_t n_stop_ids;
    const char *const *stop; /* stop strings (copied); need engine_config.tok */
    int64_t n_stop;
    /* So many most probable tokens come with each one drawn, at most ENGINE_MAX_TOP and the vocabulary; not with `begun`. While a
     * sample that wants them runs there are no bursts. */
    int64_t n_top;
    void *user; /* passed through to its samples */
};
enum { ENGINE_MAX_TOP = 20 };

/* The tokens that end a response: the model's, and the tokenizer's (NULL: none). */
struct engine_stop_ids {
    int32_t id[17];
    int64_t n;
};
struct engine_stop_ids engine_stop_ids(const struct model_config *c, const struct tokenizer *tok);

enum engine_finish { ENGINE_STOP, ENGINE_LENGTH, ENGINE_INTERRUPTED };
const char *engine_finish_name(enum engine_finish f); /* "stop", "length", "interrupted" */

struct engine_sample { /* lives until the callback returns */
    void *user;
    int64_t request;             /* id given by engine_submit */
    int64_t index;               /* 0 .. n-1 */
    const int32_t *prompt, *ids; /* ids: response, end token included */
    int64_t n_prompt, n;
    const float *logp;      /* (n) full softmax at the request's temperature */
    const float *logp_kept; /* (n) after penalty and truncation */
    int64_t n_top;          /* of the request */
    const int32_t *top_id;  /* (n, n_top) */
    const float *top_logp;
    int64_t n_cached;   /* tokens of the prompt that prefix caching had when it was first scheduled */
    int64_t text_bytes; /* with a stop string hit: bytes of the decoded response before it; else -1 */
    enum engine_finish finish;
    int64_t n_preempted;
    int64_t n_verified, n_drafted, n_accepted; /* steps with drafts, drafts, and those that were drawn */
    double seconds;                            /* from first scheduling to the end; 0: it was not scheduled */
};

/* Whether tokens are drafted, where the model can: while it pays, by measurement; always. What is drawn is the same. */
enum engine_draft { ENGINE_DRAFT_MEASURED, ENGINE_DRAFT_ALWAYS, ENGINE_DRAFT_NEVER };

struct engine_config {
    int64_t max_rows; /* forwards at most so many rows a step (max_num_batched_tokens) */
    int64_t max_seqs; /* and so many samples (max_num_seqs) */
    bool no_prefix_cache;
    /* Steps of the first burst after a sample was admitted; each later one has twice as many. More may come soon, and wait for the
     * end of a burst. Not where many samples run. 0: all bursts are as long as they can be. */
    int64_t first_burst;
    /* Of the samples that wait, those that may draw most tokens yet are admitted first, equal ones in their order; else the
     * oldest. It shortens the tail of a batch; where requests come without end, short ones may wait for ever. */
    bool longest_first;
    enum engine_draft draft;
    const struct tokenizer *tok; /* for stop strings; borrowed; may be NULL */
    /* Called as each sample ends, from within engine_step. An error ends the step. */
    int (*done)(void *arg, const struct engine_sample *s);
    void *done_arg;
    /* Called with the same argument for each sample that has drawn tokens and goes on, after a step or a part of a burst, with all
     * its tokens so far; finish and text_bytes say nothing yet. NULL: nobody waits for them. An error ends the step. */
    int (*progress)(void *arg, const struct engine_sample *s);
    /* Called after each part of a burst whose results were reported, while the device goes on; NULL: not wanted. */
    int (*part)(void *arg);
};

struct engine_stats {
    int64_t waiting, running, finished;  /* samples */
    int64_t rows, sampled, steps;        /* rows forwarded, tokens sampled, model steps */
    int64_t bursts;                      /* multi-step decode bursts */
    int64_t verified, drafted, accepted; /* as of samples, of all */
    int64_t cached_rows;                 /* rows found in cached blocks instead */
    int64_t preempted;
    int64_t kv_blocks_used, kv_blocks_peak, n_kv_blocks;
};

struct engine;
int engine_create(struct engine **out, const struct engine_model *m, const struct engine_config *c);
/* On a decoder; its limits are those of c, where that has none. */
int decoder_engine(struct engine **out, struct decoder *d, const struct engine_config *c);
void engine_destroy(struct engine *e); /* NULL ok; open samples are dropped */
/* ERR_INVAL: values out of range. ERR_NOMEM: one sample alone would not fit in the KV cache
 * (says how many blocks it needs). *id counts submitted requests from 0. */
int engine_submit(struct engine *e, const struct engine_request *r, int64_t *id);
/* One model step. 1: work remains; 0: everything submitted is done. */
int engine_step(struct engine *e);
/* Steps until all is done. */
int engine_run(struct engine *e);
/* Passes every running and waiting sample to `done` as ENGINE_INTERRUPTED, with its tokens so far, none or more. A request with
 * `begun` continues it, in this engine or another. */
int engine_interrupt(struct engine *e);
/* Drops the waiting and running samples of a request; not to be called by `done` or `progress`. */
void engine_cancel(struct engine *e, int64_t id);
/* Drops every waiting and running sample. */
void engine_cancel_all(struct engine *e);
struct engine_stats engine_stats(const struct engine *e);

#endif
