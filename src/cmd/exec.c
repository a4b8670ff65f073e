/* exec.c - `verlc exec COMMAND...`: a launcher of verl as it stands, with a stand-in `verl` package first on PYTHONPATH.
 * Sets the environment of that one command and becomes it; what the stand-in does is python/verlc_standin's.
 * Invariant: nothing outside the command's own environment is changed. */
#include "base/buf.h"
#include "base/err.h"
#include "base/file.h"
#include "cmd/cmd.h"
#include "helper/helper.h"

#include <errno.h>
#include <jansson.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

static void print_help(void) {
    puts("usage: verlc exec [--plan] [--set KEY=VALUE]... COMMAND...\n\n"
         "Runs a launcher written for verl as it stands: bash run.sh, python3 -m verl.trainer.main_ppo, torchrun, uv run,\n"
         "ray job submit. Where it starts one of verl's programs, verlc runs. A verl that is installed is not touched.\n\n"
         "options:\n"
         "  --plan            print the command line of each program of verl and its memory plan; nothing trains\n"
         "  --set KEY=VALUE   an override put behind those of every program of verl; may be given several times");
}

/* dir in front of the value that the variable has. */
static void extend(const char *name, const char *dir) {
    const char *old = getenv(name);
    char *v = xasprintf("%s%s%s", dir, old && *old ? ":" : "", old ? old : "");
    setenv(name, v, 1);
    free(v);
}

/* What the entry points of the stand-in read (python/verlc_standin/verlc_entry.py). */
static int set_environment(bool plan, const json_t *overrides) {
    char *dir = NULL;
    TRY(helper_find_dir("verlc_standin.sitecustomize", &dir));
    char *exe = realpath("/proc/self/exe", NULL);
    if (!exe) {
        free(dir);
        FAIL(ERR_IO, "/proc/self/exe: %s", strerror(errno));
    }
    char *standin = file_join(dir, "verlc_standin"), *bin = file_join(standin, "bin");
    char *sets = json_dumps(overrides, JSON_COMPACT);
    setenv("VERLC", exe, 1);
    setenv("VERLC_EXEC_SET", sets, 1);
    if (plan) setenv("VERLC_EXEC_PLAN", "1", 1);
    else unsetenv("VERLC_EXEC_PLAN");
    extend("PYTHONPATH", standin);
    extend("PATH", bin);
    free(exe);
    free(sets);
    free(bin);
    free(standin);
    free(dir);
    return 0;
}

int cmd_exec(int argc, char **argv) {
    json_t *overrides = json_array();
    bool plan = false;
    int k = 1;
    int rc = 0;
    for (; k < argc && argv[k][0] == '-'; k++) {
        const char *set = strncmp(argv[k], "--set=", 6) == 0 ? argv[k] + 6 : NULL;
        if (strcmp(argv[k], "--help") == 0 || strcmp(argv[k], "-h") == 0) {
            print_help();
            json_decref(overrides);
            return 0;
        }
        if (strcmp(argv[k], "--") == 0) {
            k++;
            break;
        }
        if (strcmp(argv[k], "--plan") == 0) {
            plan = true;
            continue;
        }
        if (strcmp(argv[k], "--set") == 0 && k + 1 < argc) set = argv[++k];
        if (!set) FAILG(out, ERR_INVAL, "verlc exec: unknown option %s; there are --plan and --set KEY=VALUE", argv[k]);
        if (json_array_append_new(overrides, json_string(set)) < 0) FAILG(out, ERR_INVAL, "--set %s: not UTF-8", set);
    }
    if (k >= argc) FAILG(out, ERR_INVAL, "verlc exec: no command; usage: verlc exec [--plan] [--set KEY=VALUE]... COMMAND...");
    TRYG(set_environment(plan, overrides), out);
    signal(SIGPIPE, SIG_DFL); /* main ignores them, and an ignored signal stays ignored */
    signal(SIGXFSZ, SIG_DFL);
    fflush(NULL);
    execvp(argv[k], argv + k);
    rc = err_set(ERR_INVAL, __FILE__, __LINE__, "verlc exec: %s: %s", argv[k], strerror(errno));
out:
    json_decref(overrides);
    return rc;
}
