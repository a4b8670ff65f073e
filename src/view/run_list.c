/* run_list.c - the runs in a directory tree. */
#include "view/run_reader.h"

#include "base/buf.h"
#include "base/err.h"
#include "base/file.h"

#include <dirent.h>
#include <errno.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>

enum { MAX_DEPTH = 8, MAX_RUNS = 1000, MAX_LOOKED = 20000 };

struct search {
    struct run_list *out;
    int looked; /* directories */
};

static double changed(const char *path, const char *suffix) {
    struct stat st;
    char *name = xasprintf("%s%s", path, suffix);
    const bool there = stat(name, &st) == 0;
    free(name);
    return there ? (double)st.st_mtim.tv_sec + 1e-9 * (double)st.st_mtim.tv_nsec : 0;
}

static bool add_run(struct run_list *out, const char *dir) {
    struct stat st;
    char *path = file_join(dir, "run.db");
    const bool is_run = stat(path, &st) == 0 && S_ISREG(st.st_mode);
    if (is_run) {
        const double db = changed(path, ""), wal = changed(path, "-wal");
        xgrow((void **)&out->v, &out->cap, out->n + 1, sizeof *out->v);
        out->v[out->n++] = (struct run_place){xstrdup(dir), wal > db ? wal : db};
    }
    free(path);
    return is_run;
}

/* Links are not followed: they may lead around in a circle. */
static void look(struct search *s, const char *dir, int depth) {
    if (s->out->n >= MAX_RUNS || s->looked++ >= MAX_LOOKED || add_run(s->out, dir) || depth == MAX_DEPTH) return;
    DIR *d = opendir(dir);
    if (!d) return;
    for (struct dirent *e; (e = readdir(d));) {
        if (e->d_name[0] == '.' || strncmp(e->d_name, "global_step_", 12) == 0) continue;
        struct stat st;
        char *path = strcmp(dir, ".") == 0 ? xstrdup(e->d_name) : file_join(dir, e->d_name);
        if (lstat(path, &st) == 0 && S_ISDIR(st.st_mode)) look(s, path, depth + 1);
        free(path);
    }
    closedir(d);
}

static int later(const void *a, const void *b) {
    const struct run_place *x = a, *y = b;
    return x->modified != y->modified ? (x->modified < y->modified ? 1 : -1) : strcmp(x->dir, y->dir);
}

int run_list_find(struct run_list *out, const char *root) {
    struct search s = {.out = out};
    *out = (struct run_list){0};
    if (!file_is_dir(root)) FAIL(ERR_INPUT, "%s: %s", root, file_exists(root) ? "not a directory" : "no such directory");
    look(&s, root, 0);
    if (out->n > 0) qsort(out->v, (size_t)out->n, sizeof *out->v, later);
    return 0;
}

void run_list_free(struct run_list *p) {
    for (int64_t i = 0; i < p->n; i++) free(p->v[i].dir);
    free(p->v);
    *p = (struct run_list){0};
}
