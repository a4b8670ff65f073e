/* plan.c - verlc plan: the memory of a run, and with --probe its time: a few real steps of it in a scratch directory.
 * Without --probe nothing runs.
 * Invariant: the run's own directory, trackers and checkpoints are read at most; what a probe writes is removed afterwards. */
#include "cmd/cmd.h"

#include "base/err.h"
#include "base/file.h"
#include "base/json.h"
#include "base/log.h"
#include "ckpt/ckpt.h"
#include "conf/conf.h"
#include "generate/generate.h"
#include "plan/time_probe.h"
#include "ppo/plan/probed_steps.h"
#include "ppo/ppo.h"
#include "sft/sft.h"

#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

enum { MAX_TRIES = 32, MAX_OVERRIDES = 16 };

static const struct program {
    const char *name;
    int (*memory)(const struct conf *c, const struct train_plan_args *a, struct run_plan *out);
    int (*probe)(const struct conf *c, bool whole, struct time_probe *out); /* NULL: there are no steps */
    int (*choices)(const struct conf *c, bool own_memory, struct buf *out);
} programs[] = {
    {"ppo", ppo_plan, ppo_probe, ppo_choices}, {"sft", sft_plan, sft_probe, sft_choices}, {"generate", generate_plan, NULL, NULL}};
enum { N_PROGRAMS = sizeof programs / sizeof *programs };

struct plan {
    const struct program *program;
    const char *schema;
    int argc; /* of the keys */
    char **argv;
    struct train_plan_args of;
    bool probe, choices, json;
    const char *tries[MAX_TRIES]; /* overrides whose time is measured as well */
    int n_tries;
};

static void print_help(void) {
    puts("usage: verlc plan [options] [ppo|sft|generate] KEY=VALUE...\n\n"
         "Prints the memory that `verlc ppo` (or sft, generate) with these keys takes, and whether it fits; nothing runs.\n"
         "With --probe also the time: three real steps, a step at full response length, a validation pass and a checkpoint are\n"
         "measured in a directory of their own, which is removed.\n\n"
         "options:\n"
         "  --gpu NAME|SIZE   plans for such a GPU, which need not be there: H100, A100-40GB, 4090, 24 (GB), 141GB\n"
         "  --gpus N          plans for N of them: one of N ranks, and how they share the work\n"
         "  --host SIZE       with so much host memory for the GPUs of a host (this machine's)\n"
         "  --probe           seconds of each phase, hours to the end, what a change of a key costs\n"
         "  --choices         with --probe: measures changes of the micro-batch, recompute, offload, n and the response length\n"
         "  --try KEY=VALUE   with --probe: measures this change; may be given several times\n"
         "  --json            one JSON object instead of the table\n");
}

/* The value of option `name` at argv[*i], joined or as the next argument; *i moves past it. NULL: another option. */
static int value_of(const char *name, int argc, char **argv, int *i, const char **value) {
    const size_t n = strlen(name);
    *value = NULL;
    if (strncmp(argv[*i], name, n) != 0) return 0;
    if (argv[*i][n] == '=') *value = argv[*i] + n + 1;
    else if (argv[*i][n] == '\0' && *i + 1 < argc) *value = argv[++*i];
    else if (argv[*i][n] == '\0') FAIL(ERR_INVAL, "%s needs a value; 'verlc plan --help' has an example", name);
    return *value ? 1 : 0;
}

static int take_option(struct plan *p, int argc, char **argv, int *i) {
    const char *value;
    if (strcmp(argv[*i], "--probe") == 0) return p->probe = true;
    if (strcmp(argv[*i], "--choices") == 0) return p->choices = true;
    if (strcmp(argv[*i], "--json") == 0) return p->json = true;
    TRY(value_of("--gpus", argc, argv, i, &value));
    if (value) return conf_whole("--gpus", "int[1,1024]", value, &p->of.gpus) < 0 ? ERR_INVAL : 1;
    TRY(value_of("--gpu", argc, argv, i, &value));
    if (value) return cmd_gpu_bytes("--gpu", value, &p->of.gpu) < 0 ? ERR_INVAL : 1;
    TRY(value_of("--host", argc, argv, i, &value));
    if (value) {
        TRY(conf_bytes("--host", value, &p->of.host));
        if (p->of.host <= 0) FAIL(ERR_INVAL, "--host: its memory must be above 0");
        return 1;
    }
    TRY(value_of("--try", argc, argv, i, &value));
    if (!value) return 0;
    if (!strchr(value, '=')) FAIL(ERR_INVAL, "--try %s: expected KEY=VALUE", value);
    if (p->n_tries == MAX_TRIES) FAIL(ERR_INVAL, "--try: at most %d changes", MAX_TRIES);
    p->tries[p->n_tries++] = value;
    return 1;
}

/* The options in front, the program's name, and its keys. 1: --help. */
static int read_arguments(struct plan *p, int argc, char **argv) {
    int i = 1, took = 1;
    for (; i < argc && took; i += took != 0) {
        if (strcmp(argv[i], "--help") == 0) {
            print_help();
            break;
        }
        TRY(took = take_option(p, argc, argv, &i));
        if (!took) break;
    }
    if (!p->probe && (p->choices || p->n_tries)) FAIL(ERR_INVAL, "--choices and --try go with --probe");
    if (p->probe && (p->of.gpu > 0 || p->of.gpus > 0 || p->of.host > 0))
        FAIL(ERR_INVAL, "--gpu, --gpus and --host plan for what need not be there, --probe measures what is; take one of them");
    p->program = &programs[0];
    bool named = false;
    for (int k = 0; k < N_PROGRAMS && i < argc && !named; k++)
        if (strcmp(argv[i], programs[k].name) == 0) {
            p->program = &programs[k];
            named = true;
        }
    p->argc = argc - i - named;
    p->argv = argv + i + named;
    p->schema = "ppo_trainer";
    if (strcmp(p->program->name, "sft") == 0) p->schema = cmd_sft_schema(argc, argv);
    if (strcmp(p->program->name, "generate") == 0) TRY(cmd_generation_schema(argc, argv, &p->schema));
    if (p->probe && !p->program->probe)
        FAIL(ERR_INVAL, "verlc plan --probe: %s makes no steps; it measures ppo and sft", p->program->name);
    return 0;
}

/* ---- the probe's directory ---- */

static const char *text_at(const struct conf *c, const char *key) {
    const json_t *v;
    return !conf_is_null(c, key) && conf_json(c, key, &v) == 0 ? json_string_value(v) : NULL;
}

/* A new directory where the run's would be, as far as that is there: on its disk. Caller frees and removes. */
static int make_scratch(const struct conf *c, char **dir) {
    char *at = file_expand(text_at(c, "trainer.default_local_dir"));
    if (at[0] != '/') {
        char here[4096];
        if (!getcwd(here, sizeof here)) {
            free(at);
            FAIL(ERR_IO, "the current directory: %s", strerror(errno));
        }
        char *whole = file_join(here, at);
        free(at);
        at = whole;
    }
    char *slash;
    do {
        slash = strrchr(at, '/');
        slash[slash == at] = '\0'; /* the parent: a run that is started meanwhile finds nothing in its directory */
    } while (!file_is_dir(at) && slash != at);
    *dir = file_join(at, ".verlc-probe-XXXXXX");
    free(at);
    if (mkdtemp(*dir)) return 0;
    const int e = errno;
    const int rc = err_set(ERR_IO, __FILE__, __LINE__,
                           "%s: the probe's directory, next to trainer.default_local_dir, cannot be made: %s", *dir, strerror(e));
    free(*dir);
    *dir = NULL;
    return rc;
}

/* "KEY='VALUE'" in Hydra's grammar; caller frees. */
static char *quoted(const char *key, const char *value) {
    struct buf b = {0};
    buf_addf(&b, "%s='", key);
    for (const char *p = value; *p; p++) {
        if (*p == '\'' || (p[0] == '$' && p[1] == '{')) buf_addc(&b, '\\');
        buf_addc(&b, *p);
    }
    buf_addc(&b, '\'');
    return buf_take(&b);
}

/* What a probe changes of the run's keys: where it writes, and its trackers. dumps stay, in its own directory, since they
 * take time. Returns how many; the caller frees each. */
static int own_overrides(const struct conf *c, const char *scratch, bool ppo, char *out[MAX_OVERRIDES]) {
    static const char *const dumps[] = {"trainer.rollout_data_dir", "trainer.validation_data_dir"};
    const char *mode = text_at(c, "trainer.resume_mode");
    int n = 0;
    int64_t step = -1;
    char *from = NULL;
    out[n++] = quoted("trainer.default_local_dir", scratch);
    out[n++] = xstrdup("trainer.logger=[]");
    out[n++] = xstrdup("trainer.default_hdfs_dir=null");
    for (int i = 0; ppo && i < 2; i++) {
        if (!text_at(c, dumps[i])) continue;
        char *dir = file_join(scratch, i ? "validation" : "rollout");
        out[n++] = quoted(dumps[i], dir);
        free(dir);
    }
    if (ppo && text_at(c, "actor_rollout_ref.rollout.trace.backend"))
        out[n++] = xstrdup("actor_rollout_ref.rollout.trace.backend=null");
    if (!mode || strcmp(mode, "auto") != 0) return n;
    char *root = file_expand(text_at(c, "trainer.default_local_dir"));
    if (ckpt_find(root, &step, &from) == 0 && from) {
        out[n++] = xstrdup("trainer.resume_mode=resume_path");
        out[n++] = quoted("trainer.resume_from_path", from);
    }
    free(root);
    free(from);
    return n;
}

/* One probe with the run's keys, with `change` in addition where it is not NULL. */
static int probe(const struct plan *p, const struct conf *run, const char *change, struct time_probe *out) {
    char *own[MAX_OVERRIDES], *scratch = NULL;
    struct conf *c = NULL;
    TRY(make_scratch(run, &scratch));
    const int n_own = own_overrides(run, scratch, strcmp(p->program->name, "ppo") == 0, own);
    char **args = xcalloc((size_t)(p->argc + n_own) + 1, sizeof *args);
    int n = 0;
    for (int i = 0; i < p->argc; i++) args[n++] = p->argv[i];
    if (change) args[n++] = (char *)(uintptr_t)change;
    for (int i = 0; i < n_own; i++) args[n++] = own[i];
    int rc = conf_load(&c, p->schema, n, args);
    if (rc == 0) rc = conf_check(c);
    if (rc == 0) rc = p->program->probe(c, change == NULL, out);
    struct err_saved why;
    if (rc < 0) err_save(&why);
    conf_free(c);
    if (file_remove_tree(scratch) < 0) log_warn("the probe's directory was not removed: %s", err_msg());
    if (rc < 0) err_restore(&why);
    for (int i = 0; i < n_own; i++) free(own[i]);
    free(args);
    free(scratch);
    return rc < 0 ? err_pass(rc, __FILE__, __LINE__) : 0;
}

/* ---- the table ---- */

struct tried {
    struct probe_choice choice[MAX_TRIES];
    struct time_probe probe[MAX_TRIES];
    char *text[MAX_TRIES], *error[MAX_TRIES];
    int n;
};

static int try_one(struct tried *t, const struct plan *p, const struct conf *run, const char *change, size_t len) {
    if (t->n == MAX_TRIES) return 0;
    const int i = t->n++;
    t->text[i] = xasprintf("%.*s", (int)len, change);
    log_info("probe: with %s", t->text[i]);
    const int rc = probe(p, run, t->text[i], &t->probe[i]);
    if (rc == ERR_SIGNAL) return rc;
    if (rc < 0) t->error[i] = xstrdup(err_msg());
    t->choice[i] = (struct probe_choice){t->text[i], &t->probe[i], t->error[i]};
    return 0;
}

static int try_all(struct tried *t, const struct plan *p, const struct conf *run, bool own_memory) {
    struct buf list = {0};
    int rc = 0;
    for (int i = 0; i < p->n_tries && rc == 0; i++) rc = try_one(t, p, run, p->tries[i], strlen(p->tries[i]));
    if (rc == 0 && p->choices) rc = p->program->choices(run, own_memory, &list);
    for (const char *s = list.p; rc == 0 && s && *s; s += strcspn(s, "\n") + 1) rc = try_one(t, p, run, s, strcspn(s, "\n"));
    buf_free(&list);
    return rc;
}

static void tried_free(struct tried *t) {
    for (int i = 0; i < t->n; i++) {
        time_probe_free(&t->probe[i]);
        free(t->text[i]);
        free(t->error[i]);
    }
    free(t);
}

/* ERR_INVAL: a change of --try is not one, before anything is measured. */
static int check_tries(const struct plan *p) {
    char **args = xcalloc((size_t)p->argc + 2, sizeof *args);
    int rc = 0;
    memcpy(args, p->argv, (size_t)p->argc * sizeof *args);
    for (int i = 0; i < p->n_tries && rc == 0; i++) {
        struct conf *c = NULL;
        args[p->argc] = (char *)(uintptr_t)p->tries[i];
        rc = conf_load(&c, p->schema, p->argc + 1, args);
        if (rc == 0) rc = conf_check(c);
        if (rc < 0) rc = err_wrap(rc, "--try %s", p->tries[i]);
        conf_free(c);
    }
    free(args);
    return rc;
}

static int print_json(const json_t *j) {
    struct buf line = {0};
    int rc = json_dump_line(&line, j);
    if (rc == 0) rc = cmd_print_line(line.p, line.n);
    buf_free(&line);
    return rc;
}

static int print_time(const struct plan *p, const struct conf *run) {
    struct time_probe base = {0};
    struct tried *t = xcalloc(1, sizeof *t);
    struct buf text = {0};
    int rc = check_tries(p);
    if (rc == 0) rc = probe(p, run, NULL, &base);
    if (rc == 0) rc = try_all(t, p, run, base.own_memory);
    if (rc == 0 && p->json) {
        json_t *out = time_plan_json(&base, t->choice, t->n);
        rc = print_json(out);
        json_decref(out);
    } else if (rc == 0) {
        time_plan_print(&base, t->choice, t->n, &text);
        fputs(text.p, stdout);
        if (!p->choices && p->n_tries == 0)
            puts("  micro-batch, recompute, offload: --choices measures them, --try KEY=VALUE any change");
    }
    buf_free(&text);
    time_probe_free(&base);
    tried_free(t);
    return rc < 0 ? err_pass(rc, __FILE__, __LINE__) : 0;
}

int cmd_plan(int argc, char **argv) {
    struct plan p = {0};
    struct conf *c = NULL;
    struct run_plan memory = {0};
    TRY(read_arguments(&p, argc, argv));
    int rc = cmd_load(&c, p.schema, p.argc, p.argv);
    const bool answered = rc > 0;
    if (rc == 0 && strcmp(p.program->name, "ppo") != 0)
        rc = cmd_want_model(c, "plan", strcmp(p.schema, "generation_server") == 0 ? "actor_rollout_ref.model.path" : "model.path");
    if (rc == 0) rc = p.program->memory(c, &p.of, &memory);
    if (rc == 0 && p.json && !p.probe) rc = print_json(memory.json);
    else if (rc == 0 && !(p.json && memory.fits)) fputs(memory.text.p, stdout);
    if (rc == 0 && !memory.fits) rc = err_exit_status(ERR_NOMEM);
    else if (rc == 0 && p.probe) rc = print_time(&p, c);
    if (answered) rc = 0;
    run_plan_free(&memory);
    conf_free(c);
    if (rc == ERR_SIGNAL) return cmd_ended(rc);
    return rc < 0 ? err_pass(rc, __FILE__, __LINE__) : rc;
}
