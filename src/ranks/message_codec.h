/* message_codec.h - what goes between the controller and its workers: columns, metrics, sequences, requests, samples.
 *
 * A message is a JSON object and byte arrays (comm/comm.h). Both sides are of one build, so structs are sent as they lie in
 * memory; sizes are checked all the same.
 * Invariant: what is read has the bits of what was written, NaN included. */
#ifndef VERLC_RANKS_MESSAGE_CODEC_H
#define VERLC_RANKS_MESSAGE_CODEC_H

#include "base/buf.h"
#include "comm/comm.h"
#include "data/data.h"
#include "engine/engine.h"
#include "track/track.h"
#include "train/micro_batch.h"

/* ---- arrays ---- */
struct message { /* a zeroed one is empty */
    json_t *head;
    struct comm_bytes *arrays;
    int n, cap;
    bool borrows; /* the arrays are somebody else's */
};
/* An empty one with a head. */
struct message message_new(bool borrows);
void message_free(struct message *m);
/* p (n bytes): borrowed, or copied. */
void message_add(struct message *m, const void *p, size_t n);

struct message_reader { /* over what was received; borrowed */
    const json_t *head;
    const struct comm_bytes *arrays;
    int n, at;
    const char *who; /* the sender, for messages */
};
/* The next array, of exactly n bytes; n SIZE_MAX: of any number. ERR_FORMAT. */
int message_next(struct message_reader *r, size_t n, struct comm_bytes *out);
/* The next array as n elements of `size` bytes. */
int message_items(struct message_reader *r, size_t size, int64_t *n, void **out);

/* ---- batches ---- */
/* The columns of these names that b has, numbers alone; names end with NULL. */
void message_columns(struct message *m, const struct batch *b, const char *const *names);
/* They replace b's of the same names. b is empty, or has as many rows. */
int message_read_columns(struct message_reader *r, struct batch *b);
void message_metrics(struct message *m, const struct metrics *x);
int message_read_metrics(struct message_reader *r, struct metrics *x);
/* words: of a token's recorded choices of experts, where sequences have them. */
void message_seqs(struct message *m, const struct packed_seq *seqs, int64_t n, int64_t words);
/* *seqs: the caller frees; ids, masks and choices are r's. */
int message_read_seqs(struct message_reader *r, struct packed_seq **seqs, int64_t *n);

/* ---- generation ---- */
/* Requests without stop strings; user is a number. */
struct request_list {
    struct request_item *items;
    int32_t *ids;       /* of each the prompt, its stop ids, what it has begun with */
    float *logp, *kept; /* of the latter */
    struct buf stop;    /* stop strings, a NUL behind each */
    int64_t n, cap, n_ids, cap_ids, n_begun, cap_begun;
};
void request_list_add(struct request_list *l, const struct engine_request *q);
void request_list_clear(struct request_list *l); /* and frees */
void message_requests(struct message *m, const struct request_list *l);
/* fn gets each of them; its arrays are r's. */
int message_read_requests(struct message_reader *r, int (*fn)(void *arg, struct engine_request *q), void *arg);

struct sample_list {
    struct sample_item *items;
    int32_t *ids;
    float *logp, *kept;
    int64_t n, cap, n_ids, cap_ids;
};
void sample_list_add(struct sample_list *l, const struct engine_sample *s);
void sample_list_clear(struct sample_list *l);
void message_samples(struct message *m, const struct sample_list *l);
int64_t message_n_samples(const struct message_reader *r); /* of those that come next */
/* Without prompt and request. */
int message_read_samples(struct message_reader *r, int (*fn)(void *arg, const struct engine_sample *s), void *arg);

#endif
