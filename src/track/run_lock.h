/* run_lock.h - one run per directory: a lock on DIR/run.lock that ends with its process, however it ends.
 *
 * The lock is flock(2) on the open file. The file names the holder (pid, host, start, command), for the message of the
 * run that is refused; the text decides nothing, and the file stays when the lock is released. It is taken before anything
 * else in the directory is touched. Readers of a run directory need no lock: what they read is published by rename.
 *
 * What holds where:
 *   local file systems, containers that share one: always
 *   NFS: Linux makes it a lock at the server, so it holds between machines; after a machine has died the server releases it when
 *     its lease ends (about 90 s), NFSv3 when the machine is back. Mounted with nolock or local_lock=flock it holds within
 *     each machine alone.
 *   Lustre: between machines with the mount option flock, within one with localflock
 *   a file system that has no locks: a warning, and the run goes on without
 *
 * Invariant: of two processes that see the same lock file, one has the lock. */
#ifndef VERLC_TRACK_RUN_LOCK_H
#define VERLC_TRACK_RUN_LOCK_H

#include <stdint.h>

struct run_lock;
/* Makes dir, which a key names, and takes its lock. ERR_IO: it cannot be written, or another run has it; names the holder. */
int run_lock_take(struct run_lock **out, const char *key, const char *dir);
/* Whether the directory is still the one that was locked: one that was removed since is made and locked again. ERR_IO:
 * another run has begun in it. */
int run_lock_hold(struct run_lock *l);
void run_lock_release(struct run_lock *l); /* NULL ok */

/* State of a directory's lock, for readers. */
enum run_holder_state {
    RUN_FREE, /* not held; the last holder released it */
    RUN_HELD, /* a process has it */
    RUN_LEFT, /* not held, and not released: its process was killed */
};
struct run_holder {
    enum run_holder_state state;
    int64_t pid; /* of the holder, or of the one that was killed */
    char host[65], started[33], command[201];
};
void run_lock_look(struct run_holder *out, const char *dir);

#endif
