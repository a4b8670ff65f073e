/* async_schedule.h - what run.db has of an asynchronous schedule: which version of the weights drew which token, and which step
 * trained which sample in which place. Reads; run_db.c writes it. */
#ifndef VERLC_TRACK_ASYNC_SCHEDULE_H
#define VERLC_TRACK_ASYNC_SCHEDULE_H

#include <stdint.h>

struct track_schedule_row { /* a sample of training */
    int64_t number, sample; /* of its prompt in the order of the data; of the prompt */
    int64_t step, place;    /* that trained it; its prompt's in the step */
    int64_t n_runs;         /* 0: an episode without a token, which has failed */
    int32_t *runs;          /* (n_runs, 2): tokens, version */
};
struct track_schedule {
    struct track_schedule_row *rows; /* (n), by number, then sample */
    int64_t n;
};
/* path: a run.db, or the directory of its run. ERR_INPUT: there is none, or no such record in it; ERR_FORMAT: it is damaged. */
int track_schedule_read(struct track_schedule *out, const char *path);
void track_schedule_free(struct track_schedule *s);
const struct track_schedule_row *track_schedule_find(const struct track_schedule *s, int64_t number,
                                                     int64_t sample); /* NULL: none */

#endif
