/* shared_memory.c - the arrays of a call or reply between processes of one host: written once to memory without a name (memfd),
 * which the other side opens as /proc/PID/fd/N and maps. ZeroMQ with encryption moves less than 1 GB/s there, and once for each
 * rank.
 * Where a process may not look into the other one's /proc (another container), the bytes travel as elsewhere.
 * Invariant: such memory is sealed: it is complete, and neither shrinks nor changes, so that a mapping never faults. */
#include "comm/comm_int.h"

#include "base/clock.h"
#include "base/err.h"
#include "base/hash.h"

#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

enum { ALIGN = 64, SEALS = F_SEAL_SHRINK | F_SEAL_GROW | F_SEAL_WRITE | F_SEAL_SEAL };

static size_t padded(size_t n) { return (n + ALIGN - 1) / ALIGN * ALIGN; }

static size_t sum(const struct comm_bytes *arrays, int n) {
    size_t bytes = 0;
    for (int i = 0; i < n; i++) bytes += padded(arrays[i].n);
    return bytes;
}

static int write_all(int fd, const void *p, size_t n, size_t offset) {
    for (size_t done = 0; done < n;) {
        const ssize_t k = pwrite(fd, (const uint8_t *)p + done, n - done, (off_t)(offset + done));
        if (k < 0 && errno == EINTR) continue;
        if (k <= 0) FAIL(ERR_NOMEM, "no memory for arrays of %zu bytes: %s", n, strerror(errno));
        done += (size_t)k;
    }
    return 0;
}

/* The kernel refuses to seal pages that it holds itself (EBUSY), as reclaim and compaction do for a moment. */
static int seal(int fd) {
    enum { SEAL_S = 10, NAP_US = 1000 };
    const double deadline = clock_awake() + SEAL_S;
    while (fcntl(fd, F_ADD_SEALS, SEALS) != 0) {
        if (errno != EBUSY || clock_awake() > deadline) FAIL(ERR_NOMEM, "shared memory cannot be sealed: %s", strerror(errno));
        usleep(NAP_US);
    }
    return 0;
}

int comm__share(const struct comm_bytes *arrays, int n, int *fd) {
    size_t at = 0;
    *fd = memfd_create("verlc-arrays", MFD_CLOEXEC | MFD_ALLOW_SEALING);
    int rc = *fd < 0 ? err_set(ERR_NOMEM, __FILE__, __LINE__, "no memory that processes can share: %s", strerror(errno)) : 0;
    if (rc >= 0 && ftruncate(*fd, (off_t)sum(arrays, n)) != 0)
        rc = err_set(ERR_NOMEM, __FILE__, __LINE__, "no memory for arrays of %zu bytes: %s", sum(arrays, n), strerror(errno));
    for (int i = 0; rc >= 0 && i < n; at += padded(arrays[i++].n)) rc = write_all(*fd, arrays[i].p, arrays[i].n, at);
    if (rc >= 0) rc = seal(*fd);
    if (rc >= 0) return 0;
    if (*fd >= 0) close(*fd);
    *fd = -1;
    return rc;
}

bool comm__worth_sharing(const struct comm_bytes *arrays, int n) { return sum(arrays, n) >= COMM_FRAME; }

/* -1: it cannot be opened, or is no sealed memory of at least so many bytes. */
static int open_shared(int pid, int fd, size_t bytes) {
    char path[64];
    struct stat st;
    snprintf(path, sizeof path, "/proc/%d/fd/%d", pid, fd);
    const int own = open(path, O_RDONLY | O_CLOEXEC | O_NONBLOCK);
    if (own >= 0 && (fcntl(own, F_GET_SEALS) & SEALS) == SEALS && fstat(own, &st) == 0 && (size_t)st.st_size >= bytes) return own;
    if (own >= 0) close(own);
    return -1;
}

int comm__map(struct comm_bytes *arrays, int n, int pid, int fd, struct comm_bytes *map, const char *who) {
    const size_t bytes = sum(arrays, n);
    if (bytes == 0) return 0;
    const int own = open_shared(pid, fd, bytes);
    if (own < 0) FAIL(ERR_IO, "%s: its arrays in shared memory (/proc/%d/fd/%d) are not there", who, pid, fd);
    void *p = mmap(NULL, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE, own, 0);
    close(own);
    if (p == MAP_FAILED) FAIL(ERR_NOMEM, "%s: arrays of %zu bytes cannot be mapped: %s", who, bytes, strerror(errno));
    *map = (struct comm_bytes){p, bytes};
    for (int i = 0; i < n; p = (uint8_t *)p + padded(arrays[i++].n)) arrays[i].p = p;
    return 0;
}

/* ---- whether the other side can ---- */

int comm__probe_new(struct comm__probe *p) {
    TRY(random_hex(p->token, (sizeof p->token - 1) / 2));
    return comm__probe_copy(p);
}

int comm__probe_copy(struct comm__probe *p) { return comm__share(&(struct comm_bytes){p->token, sizeof p->token}, 1, &p->fd); }

bool comm__probe_seen(const struct comm__probe *p, int pid, int fd) {
    char there[sizeof p->token] = "";
    const int own = open_shared(pid, fd, sizeof there);
    const bool same = own >= 0 && pread(own, there, sizeof there, 0) == sizeof there && memcmp(there, p->token, sizeof there) == 0;
    if (own >= 0) close(own);
    return same;
}
