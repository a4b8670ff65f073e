/* remote_checkpoints.h - copies of a run's checkpoints in another store (trainer.default_hdfs_dir), made by a helper and overlapped
 * with the next steps; a resume from the store's newest where this machine has none that is newer.
 *
 * Knows of a checkpoint what ckpt.h says. The order of what is written there, and the clients, are python/verlc_helpers/
 * remote_store.py's.
 * Invariants: no step waits for a copy, whatever becomes of it; at most one is under way and one waits, a newer one in its place;
 * what comes from there is verified before it has its name. */
#ifndef VERLC_RUN_REMOTE_CHECKPOINTS_H
#define VERLC_RUN_REMOTE_CHECKPOINTS_H

#include "run/phase_watchdog.h"
#include "run/resume.h"

struct remote;
/* url: hdfs://, s3://, gs:// or another scheme of fsspec, file://, or a directory; root: the run's own, whose lock the caller has.
 * Both and s are borrowed. ERR_INVAL: url is root. */
int remote_open(struct remote **out, const char *url, const char *root, struct phases *s);
/* Removes what a killed run left under root of copies. */
int remote_remove_left(const char *root);
/* With mode auto: where the store has a newer checkpoint than from, it is fetched, verified and put under root, and *from found
 * again. One that is damaged is named in a warning, and the one before it tried. With mode disable: the store forgets which is its
 * newest, and keeps all. The store has to answer, since a run must not start from scratch by mistake. ERR_HELPER: a client or
 * package is missing; ERR_IO: no answer, no room; ERR_UNSUPPORTED: the newest there is another program's. */
int remote_resume(struct remote *r, struct resume *from, const struct resume_args *a);
/* The checkpoint of this step, published under root, is to be copied. r NULL ok, here and below. */
void remote_put(struct remote *r, int64_t step);
/* The checkpoint that a run goes on from, unless the store has it. */
void remote_put_missing(struct remote *r, int64_t step);
/* Takes the result of a copy that has ended; a failure is logged once, and tried again later. The step that was copied, or -1. */
int64_t remote_poll(struct remote *r);
/* Waits for the last copy, a few tries and the time that its size allows; a signal that comes meanwhile ends that. */
void remote_close(struct remote *r);

#endif
