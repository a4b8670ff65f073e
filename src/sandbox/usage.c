/* usage.c - what the processes of a sandbox use, read from /proc.
 *
 * No control group is needed, which a container rarely may write. In return a limit is a look every few milliseconds: between
 * two of them the processes may pass it, each up to its own RLIMIT_AS.
 * Invariant: memory that processes share after a fork counts once in each: never too little. */
#include "sandbox/sandbox_int.h"

#include <dirent.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/statvfs.h>
#include <unistd.h>

enum { MAX_SEEN = 4096 }; /* processes; a bomb that is larger is over every limit by then */

struct seen {
    pid_t pids[MAX_SEEN];
    int n;
};

static size_t read_text(const char *path, char *text, size_t size) {
    const int fd = open(path, O_RDONLY | O_CLOEXEC);
    const ssize_t n = fd < 0 ? 0 : read(fd, text, size - 1);
    if (fd >= 0) close(fd);
    text[n > 0 ? n : 0] = '\0';
    return n > 0 ? (size_t)n : 0;
}

static void add_children(pid_t pid, const char *thread, struct seen *s) {
    char path[96], list[1 << 16];
    snprintf(path, sizeof path, "/proc/%d/task/%.20s/children", (int)pid, thread);
    read_text(path, list, sizeof list);
    for (char *p = list, *end; s->n < MAX_SEEN; p = end) {
        const long child = strtol(p, &end, 10);
        if (end == p) break;
        s->pids[s->n++] = (pid_t)child;
    }
}

static int64_t kib_of(const char *status, const char *name) {
    const char *at = strstr(status, name);
    return at ? strtoll(at + strlen(name), NULL, 10) : 0;
}

static void add_process(pid_t pid, struct seen *s, struct sandbox__usage *u) {
    char path[64], status[4096];
    snprintf(path, sizeof path, "/proc/%d/status", (int)pid);
    if (read_text(path, status, sizeof status) == 0) return;
    u->bytes += 1024 * (kib_of(status, "\nRssAnon:") + kib_of(status, "\nRssShmem:"));
    u->n_processes++;
    snprintf(path, sizeof path, "/proc/%d/task", (int)pid);
    DIR *const tasks = opendir(path);
    int n_tasks = 0;
    for (struct dirent *d; tasks && (d = readdir(tasks));) {
        if (d->d_name[0] == '.') continue;
        add_children(pid, d->d_name, s);
        n_tasks++;
    }
    if (tasks) closedir(tasks);
    if (n_tasks > 1) u->n_processes += n_tasks - 1;
}

void sandbox__usage(pid_t root, int64_t disk_bytes, struct sandbox__usage *u) {
    struct seen *s = malloc(sizeof *s);
    char path[64];
    struct statvfs fs;
    *u = (struct sandbox__usage){0};
    if (!s) return;
    s->n = 1;
    s->pids[0] = root;
    for (int i = 0; i < s->n; i++) add_process(s->pids[i], s, u);
    free(s);
    snprintf(path, sizeof path, "/proc/%d/root" SANDBOX_DIR, (int)root);
    if (statvfs(path, &fs) != 0 || (int64_t)fs.f_blocks != disk_bytes / (int64_t)fs.f_frsize) return; /* not mounted yet */
    u->bytes += (int64_t)(fs.f_blocks - fs.f_bfree) * (int64_t)fs.f_frsize;
    u->n_inodes = (int64_t)(fs.f_files - fs.f_ffree);
}
