/* memory_rows.h - a memory plan as rows: a table for people, and the same as JSON for run.db and programs (run_db_schema.c has
 * its form); and the refusal of a run that does not fit, by the nearest change of keys that does. The same in every program.
 *
 * Knows no sizes: a program plans them.
 * Invariant: text and JSON have the same rows. */
#ifndef VERLC_PLAN_MEMORY_ROWS_H
#define VERLC_PLAN_MEMORY_ROWS_H

#include "plan/model_memory.h"

#include "base/buf.h"

#include <jansson.h>

struct memory_rows {
    struct buf *text; /* borrowed; NULL: JSON alone */
    bool narrow;      /* names of at most 22 characters, sizes in GiB */
    json_t *json;     /* total, limit, parts; the caller's */
};
void memory_rows_open(struct memory_rows *r, size_t total, size_t limit); /* makes json */
/* A part of the total; a name that is indented is of the block that phases use in turn. */
void memory_row(const struct memory_rows *r, const char *name, size_t bytes, const char *note);
/* The same of an update in the block: activations, and gradients of so many bytes. */
void memory_row_update(const struct memory_rows *r, const char *name, size_t bytes, size_t grads, const char *note);
/* The logits that an update keeps of n outputs; no row where n is 0. */
void memory_row_logits(const struct memory_rows *r, const char *name, const struct model_config *c, int64_t n);
/* A line of the text alone. */
void memory_row_text(const struct memory_rows *r, const char *name, size_t bytes, const char *note);

struct memory_training {
    const struct model_memory *model;
    const char *master, *state; /* notes: of the fp32 master, of the optimizer's state */
    int64_t grad_chunk;
    bool own_grads, several; /* gradients have memory of their own; ranks share the update */
};
/* What a model that is trained has in addition to its weights, but activations. */
void memory_rows_training(const struct memory_rows *r, const struct memory_training *t);

/* "the run needs 3.20 GiB, the limit is 2.00 GiB", and others: whatever limits it. Returns text. */
const char *memory_need(char text[160], size_t total, size_t limit, const char *others);
/* ERR_NOMEM: it fits by a change of these keys, as printf writes them, which leaves the result as it is. */
int memory_refuse(const char *need, const char *keys, ...) __attribute__((format(printf, 2, 3)));

#endif
