/* draft_decoder.h - the device's part of speculative decoding: drafts by the model's MTP layer, and their verification; private to
 * engine. */
#ifndef VERLC_ENGINE_DRAFT_DECODER_H
#define VERLC_ENGINE_DRAFT_DECODER_H

#include "base/arena.h"
#include "engine/decode_graph.h"
#include "engine/engine.h"
#include "model/forward.h"

enum { DRAFT_SEQS = 128 }; /* samples of a verifying step at most: with more of them a step is bound by arithmetic */

struct draft_decoder {
    struct model *model; /* NULL: nothing is drafted */
    struct model_acts *acts;
    const struct model_kv *kv;
    int64_t most;                                      /* tokens drafted at a time; 0: none */
    int64_t seqs, rows, max_rows, max_blocks, max_len; /* samples of a step, padded; rows of one; rows of any step */
    int64_t dummy, dummy_state;                        /* block, and slot of a state, of padding rows; -1: there are no states */
    void *hidden, *logits;                             /* (rows) of the decoder's, shared */
    /* device; n is seqs, R is rows */
    struct draft_in {
        int32_t *ids, *pos, *slots, *select, *step; /* (R) each, (4) */
        int32_t *start, *pos0, *state;              /* (R + 1), (R) each: sequences of layers with states */
        struct decode_row *rule, *draft_rule;       /* (R) */
    } in, host_in;                                  /* one block, which is copied as a whole; host memory */
    struct draft_out {
        int32_t *id, *draft;     /* (R) */
        float *logp, *logp_kept; /* (R) */
        float *unread;           /* (2, R): log-probs of drafts */
    } out, host_out;
    size_t in_bytes, out_bytes;
    int32_t *next, *table, *iota; /* (max_rows), (R, max_blocks), (R + 1) */
    void *state, *chained;        /* (R, h), (n, h) act: after the MTP layer; of a chain */
    int32_t *host_table, *host_iota, *host_next;
    int32_t first[DRAFT_SEQS]; /* row of a verifying step that is a sample's first */
    bool sent;                 /* iota, and the order of the MTP layer's rows; nobody else had the memory since */
    struct decode_graphs verify, chain;
};

/* Of a decoder's limits: 0 rows where nothing is drafted. */
void draft_limits(struct draft_decoder *t, const struct decoder_args *a);
/* Measures, then binds: base/arena.h. */
void draft_layout(struct draft_decoder *t, struct arena *m, const struct model_config *c, enum dtype act);
void draft_open(struct draft_decoder *t, struct model *m, struct model_acts *acts, const struct model_kv *kv);
void draft_close(struct draft_decoder *t);
/* Before an engine: the MTP layer's K and V are 0 where none are written yet. */
int draft_begin(struct draft_decoder *t);
/* After the step of p on b: the MTP layer's K and V of its rows, and a draft for each row that was sampled, as id. */
int draft_step(struct draft_decoder *t, const struct engine_plan *p, const struct model_batch *b, const int32_t *id);
int draft_verify(struct draft_decoder *t, const struct engine_verify *v);

#endif
