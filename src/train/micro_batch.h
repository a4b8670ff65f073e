/* micro_batch.h - sequences side by side without padding, cut into micro-batches: what
 * the actor and the critic share.
 *
 * Invariant: which micro-batch a sequence is in changes nothing for it; the cut
 * only bounds rows and samples. */
#ifndef VERLC_TRAIN_MICRO_BATCH_H
#define VERLC_TRAIN_MICRO_BATCH_H

#include "model/forward.h"

#include <stdint.h>

/* Targets of a sequence are the tokens t >= first, or those with mask[t] != 0
 * (t >= 1) when mask is given.  The output for a target is read from the row
 * before it: log p(ids[t] | ids[<t]), or the value of the state ids[<t]. */
struct packed_seq {
    const int32_t *ids;
    int64_t n;
    int64_t first;
    const uint8_t *mask;   /* (n) or NULL */
    const int32_t *routes; /* (n, router_replay_words) or NULL: recorded choices of routers */
};
int64_t packed_seq_targets(const struct packed_seq *s);

/* How a batch is cut, as it is written: by tokens where dynamic, else by samples of a device or of all devices. */
struct micro_batch_keys {
    bool dynamic;
    int64_t tokens, each, all;
};
/* The same as it is done. Exactly one limit is > 0. */
struct micro_batch_limits {
    int64_t max_seqs; /* ppo_micro_batch_size_per_gpu: samples */
    int64_t max_rows; /* ppo_max_token_len_per_gpu with use_dynamic_bsz: tokens */
    int64_t *ends;    /* where each micro-batch ends (micro_batch_order); NULL: as many sequences as the limit takes */
};
/* ERR_INVAL, by the key of the number of samples: more rows than an int32 numbers. */
int micro_batch_rows_check(const char *key, int64_t seqs, int64_t longest, int64_t rows);
/* The next smaller limit on a short way to the least, which is one sequence, or the rows of the longest. False: no smaller. */
bool micro_batch_limits_lower(struct micro_batch_limits *l, int64_t longest);
/* Puts order[n] so that micro-batches of balanced work follow one another, the largest first (algo/micro_batch_balance.h), and
 * sets cut->ends. len[i]: tokens of the sequence order[i]; one that alone is over max_rows raises it. ends is the caller's to
 * free. */
int micro_batch_order(struct micro_batch_limits *cut, const int64_t *len, int64_t *order, int64_t n);

/* Arrays of one micro-batch of at most max_rows rows and max_seqs sequences. */
struct pack {
    struct dev *dev;
    int64_t max_rows, max_seqs;
    int32_t *d_ids, *d_pos, *d_slots, *d_q_start, *d_pos0, *d_kv_start; /* device */
    int32_t *ids, *pos, *q_start, *zeros;                               /* host */
    int32_t *row, *target; /* host, (n_targets): the row that each target is read from, and its token */
    /* recorded choices of routers: (layers, max_rows, k) on device and host; cfg NULL: there is no room for them */
    const struct model_config *routed;
    int32_t *d_routes, *routes;
    bool keep_routes; /* the passes to come keep what routers choose */
    /* Of each part of this rank's rows the sequences, where attention asks for them (model_batch.part_seqs): of so many parts at
     * most, 0: none. */
    int most_parts;
    int32_t *d_parts; /* device */
    struct attn_seqs part_seqs[MODEL_MOST_PARTS];
};
/* Claims the device arrays: measure, then bind (base/arena.h). */
void micro_batch_layout(struct pack *p, struct arena *a);
void micro_batch_alloc_host(struct pack *p);
void micro_batch_free_host(struct pack *p);

/* Sequences [lo, hi), their rows and targets, and its place in a list: its number, and the targets before its own. */
struct pack_micro {
    int64_t lo, hi, n_rows, n_targets;
    int64_t index, t0;
};
/* The next micro-batch from lo on; at least one sequence. ERR_INVAL: one alone is longer than max_rows. */
int micro_batch_next(const struct pack *p, const struct packed_seq *seqs, int64_t n, int64_t lo, struct micro_batch_limits cut,
                     struct pack_micro *m);
/* All of them, in order; caller frees. */
int micro_batch_list(const struct pack *p, const struct packed_seq *seqs, int64_t n, struct micro_batch_limits cut,
                     struct pack_micro **list, int64_t *n_list);
/* The choices of this micro-batch's routers after a pass that kept them (model_batch.routes_kept): words (n_rows, ...). */
int micro_batch_routes(struct pack *p, const struct pack_micro *m, int32_t *words);
/* Puts it on the device, recorded choices too; b borrows p. Fills row and target. */
int micro_batch_fill(struct pack *p, const struct packed_seq *seqs, const struct pack_micro *m, struct model_batch *b);

struct pack_targets {
    int64_t lo, hi; /* of a micro-batch's own */
};
/* Those that are read from the rows of part i, after micro_batch_fill. */
struct pack_targets micro_batch_targets(const struct pack *p, const struct pack_micro *m, const struct model_parts *cut, int i);
/* b->part_seqs: of parts whose first row is `first` of the micro-batch; after micro_batch_fill. */
int micro_batch_part_seqs(struct pack *p, const struct model_parts *parts, int64_t first, struct model_batch *b);
/* As micro_batch_targets; leaves the part's rows in b, and in row those of its targets among them. */
struct pack_targets micro_batch_part(struct pack *p, const struct pack_micro *m, const struct model_parts *cut, int i,
                                     struct model_batch *b);

#endif
