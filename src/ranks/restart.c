/* restart.c - see restart.h. */
#include "ranks/restart.h"

#include "base/buf.h"
#include "base/clock.h"
#include "base/err.h"
#include "base/file.h"
#include "base/log.h"
#include "ckpt/ckpt.h"
#include "device/device.h"
#include "ranks/launcher.h"
#include "ranks/rank_count.h"
#include "ranks/start_workers.h"

#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#define RESTART_ENV "VERLC_RESTART" /* "DONE BEGAN SUSPECT STEP": struct restart's */
enum { MOST_GPUS = 1024 };

extern char **environ;

void restart_begin(struct restart *r) {
    const char *env = getenv(RESTART_ENV);
    long long done = 0, step = -1;
    *r = (struct restart){.began = clock_wall(), .suspect = -1};
    if (env && sscanf(env, "%lld %lf %d %lld", &done, &r->began, &r->suspect, &step) == 4) r->done = done;
    r->suspect_step = step;
    unsetenv(RESTART_ENV); /* processes that the run starts do not inherit it */
}

/* The newest checkpoint that these runs have saved; NULL: none. */
static char *find_own(const struct restart *r, int64_t *step) {
    char *dir = NULL;
    struct stat st = {0};
    if (!r->k->run.default_local_dir || ckpt_find(r->k->run.default_local_dir, step, &dir) < 0 || *step < 0) return NULL;
    char *manifest = file_join(dir, "manifest.json");
    const bool own = stat(manifest, &st) == 0 && (double)st.st_mtim.tv_sec + 1 >= r->began;
    free(manifest);
    if (own) return dir;
    free(dir);
    return NULL;
}

/* CUDA_VISIBLE_DEVICES without its n-th GPU of `count`. */
static void hide_gpu(int n, int count) {
    const char *now = getenv("CUDA_VISIBLE_DEVICES");
    struct buf left = {0};
    char *copy = xstrdup(now ? now : ""), *at = copy;
    for (int i = 0; i < count && i < MOST_GPUS; i++) {
        const char *one = now ? strsep(&at, ",") : NULL;
        if (i == n || (now && !one)) continue;
        if (one) buf_addf(&left, "%s%s", left.n ? "," : "", one);
        else buf_addf(&left, "%s%d", left.n ? "," : "", i);
    }
    setenv("CUDA_VISIBLE_DEVICES", left.p ? left.p : "", 1);
    free(copy);
    buf_free(&left);
}

static void add(char ***argv, size_t *n, char *word) {
    *argv = xrealloc(*argv, (*n + 2) * sizeof **argv);
    (*argv)[(*n)++] = word;
    (*argv)[*n] = NULL;
}

static bool is_key(const char *word, const char *key) {
    word += strspn(word, "+");
    return strncmp(word, key, strlen(key)) == 0 && word[strlen(key)] == '=';
}

/* This process' arguments, less those that an earlier restart has added. */
static int own_arguments(char ***argv, size_t *n, bool resumes, bool fewer) {
    struct buf line = {0};
    TRY(file_read(&line, "/proc/self/cmdline", (size_t)64 << 20));
    for (size_t i = 0; i < line.n; i += strlen(line.p + i) + 1) {
        const char *word = line.p + i;
        const bool replaced = is_key(word, "trainer.resume_mode") || is_key(word, "trainer.resume_from_path");
        if ((resumes && replaced) || (fewer && is_key(word, "trainer.ranks"))) continue;
        add(argv, n, xstrdup(word));
    }
    buf_free(&line);
    return 0;
}

/* why: the failure's message, which the calls before would have overwritten. Does not return where it works. */
static int become(const struct restart *r, const char *why, int suspect, bool leave_out, const char *from, int64_t step) {
    const char *const device = r->k->run.device;
    char **argv = NULL, *env = xasprintf("%lld %.6f %d %lld", (long long)r->done + 1, r->began, leave_out ? -1 : suspect,
                                         (long long)(from ? step : -1));
    size_t n = 0;
    const int gpus = rank_count_on_cpu(device) ? 0 : dev_cuda_count();
    const bool by_ranks = gpus == 0 || r->k->devices.ranks > 0,
               own_gpu = r->ranks.n <= gpus && !(device && strncmp(device, "cuda:", 5) == 0);
    char where[64] = "the beginning";
    TRY(own_arguments(&argv, &n, from != NULL, leave_out && by_ranks));
    if (from) add(&argv, &n, xstrdup("trainer.resume_mode=resume_path"));
    if (from) add(&argv, &n, xasprintf("trainer.resume_from_path=%s", from));
    if (from) snprintf(where, sizeof where, "step %lld", (long long)step);
    if (leave_out && by_ranks) add(&argv, &n, xasprintf("trainer.ranks=%lld", (long long)(r->ranks.n - r->pool_ranks - 1)));
    if (leave_out && own_gpu) hide_gpu(suspect, gpus);
    log_warn("%s; restart %lld of %lld (trainer.max_restarts), from %s on %lld ranks", why, (long long)r->done + 1,
             (long long)r->k->devices.max_restarts, where, (long long)r->ranks.n - leave_out);
    setenv(RESTART_ENV, env, 1);
    fflush(NULL);
    execve("/proc/self/exe", argv, environ);
    FAIL(ERR_IO, "the program cannot be started again: %s", strerror(errno));
}

int restart_run(const struct restart *r, int rc, bool stopped) {
    struct launch l;
    struct err_saved why;
    int64_t step = -1;
    const bool lost = rc == ERR_RANK || rc == ERR_TIMEOUT || rc == ERR_DEVICE;
    err_save(&why);
    if (!lost || r->ranks.n < 2 || r->done >= r->k->devices.max_restarts || stopped || launch_read(&l, environ) < 0) {
        err_restore(&why);
        return rc;
    }
    char *from = find_own(r, &step);
    const int suspect = workers_failed_rank();
    err_restore(&why);
    if (l.size > 1) {
        free(from);
        return err_append(rc, "; %s started the ranks and starts them again, not trainer.max_restarts", l.by);
    }
    const bool leave_out = r->ranks.n_ray_nodes == 0 && r->ranks.n - r->pool_ranks > 1 && suspect >= 0 && suspect == r->suspect &&
                           (from ? step : -1) == r->suspect_step;
    const int failed = become(r, why.msg, suspect, leave_out, from, step);
    free(from);
    return failed;
}
