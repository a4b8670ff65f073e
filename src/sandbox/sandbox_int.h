/* sandbox_int.h - private to src/sandbox. */
#ifndef VERLC_SANDBOX_INT_H
#define VERLC_SANDBOX_INT_H

#include "sandbox/sandbox.h"

#include <sys/types.h>

/* A descriptor (close-on-exec) of the filter as BPF, for bwrap to read; the caller closes it. */
int sandbox__seccomp(bool network, int *fd);

/* What this executable does in the sandbox, before main, where its first argument is SANDBOX_LISTEN, the second a port and the
 * third a descriptor: it listens on 127.0.0.1 at that port, sends the socket over the descriptor, and becomes the program that
 * follows. */
#define SANDBOX_LISTEN "--listen-in-sandbox"
/* The socket that has come over fd; -1: none yet. */
int sandbox__listener(int fd);

/* What `root` (a process id) and all processes below it use now, and the files of its tmpfs, which is known by its size, a
 * multiple of the page's. A process that ends meanwhile counts nothing. */
struct sandbox__usage {
    int64_t bytes;       /* resident: anonymous and shared memory of each process, and the tmpfs */
    int64_t n_processes; /* with threads */
    int64_t n_inodes;
};
void sandbox__usage(pid_t root, int64_t disk_bytes, struct sandbox__usage *u);

#endif
