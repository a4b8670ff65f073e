/* file.c - see file.h. */
#include "base/file.h"

#include "base/err.h"
#include "base/log.h"

#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <pwd.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/random.h>
#include <sys/stat.h>
#include <unistd.h>

static bool of_shell(const char *path) {
    return strcmp(path, "/dev/stdin") == 0 || strncmp(path, "/dev/fd/", 8) == 0 || strncmp(path, "/proc/self/fd/", 14) == 0;
}

int file_open_read(const char *path) {
    struct stat st;
    const int fd = open(path, O_RDONLY | O_CLOEXEC | O_NONBLOCK | O_NOCTTY); /* O_NONBLOCK: a FIFO does not wait for its writer */
    if (fd < 0) FAIL(ERR_INPUT, "%s: %s", path, strerror(errno));
    const int bad = fstat(fd, &st) < 0 ? errno : 0;
    if (!bad && (S_ISREG(st.st_mode) || (of_shell(path) && !S_ISDIR(st.st_mode)))) {
        fcntl(fd, F_SETFL, fcntl(fd, F_GETFL) & ~O_NONBLOCK);
        return fd;
    }
    close(fd);
    if (bad) FAIL(ERR_INPUT, "%s: %s", path, strerror(bad));
    FAIL(ERR_INPUT, "%s: is %s; give a regular file", path,
         S_ISDIR(st.st_mode)    ? "a directory"
         : S_ISFIFO(st.st_mode) ? "a FIFO"
                                : "a device");
}

int file_check(const char *path) {
    const int fd = file_open_read(path);
    TRY(fd);
    close(fd);
    return 0;
}

int file_read(struct buf *b, const char *path, size_t max_bytes) {
    int rc = 0;
    const int fd = file_open_read(path);
    TRY(fd);
    const size_t start = b->n;
    char chunk[1 << 16];
    for (;;) {
        const ssize_t n = read(fd, chunk, sizeof chunk);
        if (n < 0 && errno == EINTR) continue;
        if (n < 0) FAILG(out, ERR_INPUT, "%s: %s", path, strerror(errno));
        if (n == 0) break;
        if (max_bytes && b->n - start + (size_t)n > max_bytes)
            FAILG(out, ERR_INPUT, "%s: larger than the %zu bytes allowed", path, max_bytes);
        TRYG(buf_add(b, chunk, (size_t)n), out);
    }
    if (b->p == NULL) TRYG(buf_add(b, "", 0), out);
out:
    close(fd);
    return rc;
}

static int write_all(int fd, const char *p, size_t n) {
    while (n > 0) {
        const ssize_t w = write(fd, p, n > (1u << 30) ? (1u << 30) : n);
        if (w < 0 && errno == EINTR) continue;
        if (w < 0) return -1;
        p += w;
        n -= (size_t)w;
    }
    return 0;
}

static char *dir_of(const char *path) {
    const char *s = strrchr(path, '/');
    if (!s) return xstrdup(".");
    return s == path ? xstrdup("/") : xstrndup(path, (size_t)(s - path));
}

int file_fsync_dir(const char *dir) {
    const int fd = open(dir, O_RDONLY | O_DIRECTORY | O_CLOEXEC);
    if (fd < 0) FAIL(ERR_IO, "%s: %s", dir, strerror(errno));
    const int bad = fsync(fd), e = errno;
    close(fd);
    if (bad && e != EINVAL) FAIL(ERR_IO, "%s: fsync: %s", dir, strerror(e));
    return 0;
}

/* ---- temporary names ---- */

char *file_temp_path(const char *path) {
    enum { LONGEST = 200 }; /* of the last part, so that the whole stays below NAME_MAX */
    uint64_t random = 0;
    size_t n = strlen(path);
    while (n > 1 && path[n - 1] == '/') n--;
    size_t at = n;
    while (at > 0 && path[at - 1] != '/') at--;
    if (n - at > LONGEST) n = at + LONGEST;
    CHECK(getrandom(&random, sizeof random, 0) == sizeof random);
    return xasprintf("%.*s.%ld-%016llx.tmp", (int)n, path, (long)getpid(), (unsigned long long)random);
}

bool file_is_temp_name(const char *name) {
    static const char digits[] = "0123456789", hex[] = "0123456789abcdef";
    const char *dash = strrchr(name, '-'), *pid = dash;
    if (!dash || strspn(dash + 1, hex) != 16 || strcmp(dash + 17, ".tmp") != 0) return false;
    while (pid > name && strchr(digits, pid[-1])) pid--;
    return pid < dash && pid > name + 1 && pid[-1] == '.';
}

int file_remove_temps(const char *dir) {
    int rc = 0;
    DIR *d = opendir(dir);
    if (!d && errno == ENOENT) return 0;
    if (!d) FAIL(ERR_IO, "%s: %s", dir, strerror(errno));
    for (struct dirent *e; rc == 0 && (e = readdir(d));) {
        if (!file_is_temp_name(e->d_name)) continue;
        char *path = file_join(dir, e->d_name);
        rc = file_remove_tree(path);
        free(path);
    }
    closedir(d);
    return rc;
}

/* ---- whole files and directories ---- */

int file_write_new(const char *path, const void *p, size_t n) {
    const int fd = open(path, O_WRONLY | O_CREAT | O_EXCL | O_CLOEXEC, 0644);
    if (fd < 0) FAIL(ERR_IO, "%s: %s", path, strerror(errno));
    const int bad = write_all(fd, p, n) < 0 || fsync(fd) < 0 ? errno : 0;
    close(fd);
    if (bad) unlink(path);
    if (bad) FAIL(ERR_IO, "%s: %s", path, strerror(bad));
    return 0;
}

int file_write_atomic_mode(const char *path, const void *p, size_t n, unsigned mode) {
    int rc = 0;
    char *tmp = file_temp_path(path), *dir = dir_of(path);
    const int fd = open(tmp, O_WRONLY | O_CREAT | O_EXCL | O_CLOEXEC, mode & 0777);
    if (fd < 0) FAILG(out, ERR_IO, "%s: %s", path, strerror(errno));
    if (write_all(fd, p, n) < 0 || fsync(fd) < 0) {
        rc = err_set(ERR_IO, __FILE__, __LINE__, "%s: %s", path, strerror(errno));
        close(fd);
        unlink(tmp);
        goto out;
    }
    close(fd);
    if (rename(tmp, path) < 0) {
        rc = err_set(ERR_IO, __FILE__, __LINE__, "%s: %s", path, strerror(errno));
        unlink(tmp);
        goto out;
    }
    TRYG(file_fsync_dir(dir), out);
out:
    free(tmp);
    free(dir);
    return rc;
}

int file_write_atomic(const char *path, const void *p, size_t n) { return file_write_atomic_mode(path, p, n, 0644); }

static char *old_path(const char *dir) { return xasprintf("%s.old.tmp", dir); }

static void remove_replaced(const char *old) {
    if (file_remove_tree(old) < 0) log_warn("what was replaced is not removed: %s", err_msg());
}

/* Without the exchange. */
static int replace_in_two(const char *tmp, const char *dir) {
    int rc = 0;
    char *old = old_path(dir);
    TRYG(file_remove_tree(old), out);
    if (rename(dir, old) < 0) FAILG(out, ERR_IO, "%s: %s", dir, strerror(errno));
    if (rename(tmp, dir) < 0) {
        rc = err_set(ERR_IO, __FILE__, __LINE__, "%s: %s", dir, strerror(errno));
        (void)!rename(old, dir);
    } else remove_replaced(old);
out:
    free(old);
    return rc;
}

int file_replace_dir(const char *tmp, const char *dir) {
    int rc = 0;
    char *parent = dir_of(dir);
    if (rename(tmp, dir) == 0) goto done; /* there is none, or an empty one */
    if (errno != ENOTEMPTY && errno != EEXIST && errno != ENOTDIR) FAILG(out, ERR_IO, "%s: %s", dir, strerror(errno));
    if (renameat2(AT_FDCWD, tmp, AT_FDCWD, dir, RENAME_EXCHANGE) == 0) {
        rc = file_fsync_dir(parent);
        if (rc == 0) remove_replaced(tmp);
        goto out;
    }
    if (errno != EINVAL && errno != ENOSYS && errno != EOPNOTSUPP) FAILG(out, ERR_IO, "%s: %s", dir, strerror(errno));
    TRYG(replace_in_two(tmp, dir), out);
done:
    rc = file_fsync_dir(parent);
out:
    free(parent);
    return rc;
}

int file_recover_dir(const char *dir) {
    int rc = 0;
    char *old = old_path(dir);
    if (!file_exists(dir) && rename(old, dir) < 0 && errno != ENOENT && errno != ENOTDIR)
        rc = err_set(ERR_IO, __FILE__, __LINE__, "%s: %s", old, strerror(errno));
    free(old);
    return rc;
}

int file_mkdirs(const char *path) {
    int rc = 0;
    if (path[0] == '\0') FAIL(ERR_IO, "the name of the directory to make is empty");
    char *p = xstrdup(path);
    for (char *s = p + 1;; s++) {
        if (*s != '/' && *s != '\0') continue;
        const char c = *s;
        *s = '\0';
        if (mkdir(p, 0755) < 0 && errno != EEXIST) FAILG(out, ERR_IO, "%s: %s", p, strerror(errno));
        *s = c;
        if (c == '\0') break;
    }
    if (!file_is_dir(path)) FAILG(out, ERR_IO, "%s: not a directory", path);
out:
    free(p);
    return rc;
}

int file_remove_tree(const char *path) {
    struct stat st;
    if (lstat(path, &st) < 0) {
        if (errno == ENOENT) return 0;
        FAIL(ERR_IO, "%s: %s", path, strerror(errno));
    }
    if (S_ISDIR(st.st_mode)) {
        DIR *d = opendir(path);
        if (!d) FAIL(ERR_IO, "%s: %s", path, strerror(errno));
        for (struct dirent *e; (e = readdir(d));) {
            if (strcmp(e->d_name, ".") == 0 || strcmp(e->d_name, "..") == 0) continue;
            char *sub = file_join(path, e->d_name);
            const int rc = file_remove_tree(sub);
            free(sub);
            if (rc < 0) {
                closedir(d);
                return rc;
            }
        }
        closedir(d);
        if (rmdir(path) < 0) FAIL(ERR_IO, "%s: %s", path, strerror(errno));
    } else if (unlink(path) < 0 && errno != ENOENT) {
        FAIL(ERR_IO, "%s: %s", path, strerror(errno));
    }
    return 0;
}

bool file_exists(const char *path) { return access(path, F_OK) == 0; }
bool file_is_dir(const char *path) {
    struct stat st;
    return stat(path, &st) == 0 && S_ISDIR(st.st_mode);
}
int64_t file_size(const char *path) {
    struct stat st;
    return stat(path, &st) == 0 ? (int64_t)st.st_size : -1;
}
char *file_join(const char *dir, const char *name) {
    const size_t n = strlen(dir);
    return xasprintf("%s%s%s", dir, n && dir[n - 1] == '/' ? "" : "/", name);
}
char *file_expand(const char *path) {
    if (path[0] != '~') return xstrdup(path);
    const size_t n = strcspn(path + 1, "/");
    char *name = xstrndup(path + 1, n);
    const char *home = n == 0 ? getenv("HOME") : NULL;
    const struct passwd *user = home ? NULL : n == 0 ? getpwuid(getuid()) : getpwnam(name);
    if (user) home = user->pw_dir;
    free(name);
    if (!home) return xstrdup(path); /* there is no such user */
    size_t end = strlen(home);
    while (end > 0 && home[end - 1] == '/') end--;
    char *whole = xasprintf("%.*s%s", (int)end, home, path + 1 + n);
    if (whole[0]) return whole;
    free(whole);
    return xstrdup("/");
}

char *file_program_dir(void) {
    char path[PATH_MAX];
    const ssize_t n = readlink("/proc/self/exe", path, sizeof path - 1);
    if (n <= 0) return NULL;
    path[n] = '\0';
    char *slash = strrchr(path, '/');
    if (slash) *slash = '\0';
    return xstrdup(path);
}

/* ---- files of a model directory ---- */

static bool starts_with(const char *s, const char *start) { return strncmp(s, start, strlen(start)) == 0; }

/* Whether file is CACHE/models--A--B/blobs/HASH and dir CACHE/models--A--B/snapshots/REV, or below it. */
static bool in_blobs(const char *file, const char *dir) {
    static const char snapshots[] = "/snapshots/";
    for (const char *s = dir; (s = strstr(s, snapshots)); s++) {
        const char *name = s;
        while (name > dir && name[-1] != '/') name--;
        if (!starts_with(name, "models--")) continue;
        char *blobs = xasprintf("%.*s/blobs/", (int)(s - dir), dir);
        const bool in = starts_with(file, blobs) && !strchr(file + strlen(blobs), '/');
        free(blobs);
        if (in) return true;
    }
    return false;
}

static int check_in_dir(const char *path, const char *dir) {
    int rc = 0;
    struct stat st;
    char *at = realpath(dir, NULL), *file = realpath(path, NULL), *root = xasprintf("%s/", at && strcmp(at, "/") ? at : "");
    if (!at) FAILG(out, ERR_INPUT, "%s: %s", dir, strerror(errno));
    if (!file) FAILG(out, ERR_INPUT, "%s: a link whose target cannot be read: %s", path, strerror(errno));
    if (!starts_with(file, root) && !in_blobs(file, at))
        FAILG(out, ERR_INPUT,
              "%s: a link to %s, out of the model directory; put a copy of the file there (a link to the whole directory is fine)",
              path, file);
    if (stat(file, &st) < 0) FAILG(out, ERR_INPUT, "%s: %s", path, strerror(errno));
    if (!S_ISREG(st.st_mode)) FAILG(out, ERR_INPUT, "%s: not a regular file", path);
out:
    free(at);
    free(file);
    free(root);
    return rc;
}

int file_in_dir(char **path, const char *dir, const char *name) {
    struct stat st;
    *path = file_join(dir, name);
    int rc = 0;
    if (lstat(*path, &st) == 0) rc = check_in_dir(*path, dir);
    else if (errno != ENOENT && errno != ENOTDIR) rc = err_set(ERR_INPUT, __FILE__, __LINE__, "%s: %s", *path, strerror(errno));
    else {
        free(*path);
        *path = NULL;
        return 0;
    }
    if (rc < 0) {
        free(*path);
        *path = NULL;
    }
    return rc;
}

int file_map_open(struct file_map *m, const char *path) {
    struct stat st;
    const int fd = file_open_read(path);
    TRY(fd);
    if (fstat(fd, &st) < 0 || !S_ISREG(st.st_mode)) {
        close(fd);
        FAIL(ERR_INPUT, "%s: a pipe cannot be mapped; give a regular file", path);
    }
    void *p = NULL;
    if (st.st_size > 0) {
        p = mmap(NULL, (size_t)st.st_size, PROT_READ, MAP_PRIVATE, fd, 0);
        if (p == MAP_FAILED) {
            const int e = errno;
            close(fd);
            FAIL(ERR_INPUT, "%s: cannot map: %s", path, strerror(e));
        }
    }
    close(fd);
    *m = (struct file_map){p, (size_t)st.st_size};
    return 0;
}
void file_unmap(struct file_map *m) {
    if (m->p) munmap((void *)(uintptr_t)m->p, m->n);
    *m = (struct file_map){0};
}

int file_each_line(const char *path, int (*fn)(void *, char *, size_t, int64_t), void *arg) {
    enum { MAX_LINE = 64 << 20 };
    int rc = 0;
    const bool in = strcmp(path, "-") == 0;
    const int fd = in ? STDIN_FILENO : file_open_read(path);
    TRY(fd);
    FILE *f = in ? stdin : fdopen(fd, "rb");
    CHECK(f != NULL);
    char *line = NULL;
    size_t cap = 0;
    for (int64_t no = 1;; no++) {
        ssize_t n = getline(&line, &cap, f);
        if (n < 0) break;
        if (n > MAX_LINE) FAILG(out, ERR_FORMAT, "%s:%lld: line longer than 64 MiB", in ? "stdin" : path, (long long)no);
        if (n > 0 && line[n - 1] == '\n') line[--n] = '\0';
        TRYG(fn(arg, line, (size_t)n, no), out);
    }
    if (ferror(f)) FAILG(out, ERR_INPUT, "%s: %s", in ? "stdin" : path, strerror(errno));
out:
    free(line);
    if (!in) fclose(f);
    return rc;
}
