/* run_notes.h - what people say of a run: notes and tags, in notes.json next to its run.db.
 *
 * {"tags": ["baseline"], "notes": [{"wall": 1765432100.5, "text": "lr too high"}]}. verlc note writes it; the run never does,
 * and run.db is not touched. */
#ifndef VERLC_VIEW_RUN_NOTES_H
#define VERLC_VIEW_RUN_NOTES_H

#include "base/buf.h"

#include <jansson.h>
#include <stdint.h>

enum { RUN_NOTE_BYTES = 4000, RUN_TAG_BYTES = 60 };

/* What the run in dir has, a new reference with both lists; empty ones where there is no file. ERR_FORMAT: it is something
 * else; *out is NULL then. */
int run_notes_read(json_t **out, const char *dir);

struct run_notes_change {
    const char *text;  /* a new note, NULL: none */
    const char *tags;  /* new tags, separated by commas, NULL: none; one that is there stays */
    const char *untag; /* tags to remove, separated by commas */
    int64_t remove;    /* number of the note to take away, from 1; 0: none */
};
/* ERR_INVAL: too long, an empty tag, a tag or note that is not there; ERR_FORMAT, ERR_IO. Nothing is changed then. */
int run_notes_change(const char *dir, const struct run_notes_change *c);

#endif
