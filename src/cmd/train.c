/* train.c - verlc ppo, sft and plan: verl's command lines.
 * Resolves and checks the configuration; the programs are in train. */
#include "cmd/cmd.h"

#include "conf/conf.h"
#include "base/err.h"
#include "base/log.h"
#include "train/run/phases.h"
#include "train/train.h"

#include <stdio.h>
#include <string.h>

/* ERR_SIGNAL becomes 128 + signal, as the shell counts. */
static int ended(int rc) {
    if (rc != ERR_SIGNAL) return rc;
    log_error("%s", err_msg());
    return 128 + stage_stop_signal();
}

/* A bare command is a question, not a run. */
static int want_keys(const char *name, int argc, const char *model_key) {
    if (argc > 1) return 0;
    FAIL(ERR_INVAL, "verlc %s: no keys given; it needs at least %s=DIR and data.train_files=FILE; 'verlc %s --help' lists them all",
         name, model_key, name);
}

int cmd_ppo(int argc, char **argv) {
    struct conf *c = NULL;
    int rc = want_keys("ppo", argc, "actor_rollout_ref.model.path");
    if (rc == 0) rc = conf_load(&c, "ppo_trainer", argc - 1, argv + 1);
    if (rc == 0 && (rc = conf_answer(c, stdout)) != 0) {
        conf_free(c);
        return rc < 0 ? rc : 0;
    }
    if (rc == 0) rc = conf_check(c);
    if (rc == 0) conf_notes(c);
    if (rc == 0) rc = train_ppo(c);
    conf_free(c);
    return ended(rc);
}

/* The engine's keys, unless --config-name says sft_trainer or a legacy key is used. */
static const char *sft_schema(int argc, char **argv) {
    for (int i = 1; i < argc; i++) {
        if (strncmp(argv[i], "model.partial_pretrain=", 23) == 0 || strncmp(argv[i], "data.prompt_key=", 16) == 0 ||
            strncmp(argv[i], "data.response_key=", 18) == 0 || strcmp(argv[i], "--config-name=sft_trainer") == 0)
            return "sft_trainer";
    }
    return "sft_trainer_engine";
}

int cmd_sft(int argc, char **argv) {
    struct conf *c = NULL;
    int rc = want_keys("sft", argc, "model.path");
    if (rc == 0) rc = conf_load(&c, sft_schema(argc, argv), argc - 1, argv + 1);
    if (rc == 0 && (rc = conf_answer(c, stdout)) != 0) {
        conf_free(c);
        return rc < 0 ? rc : 0;
    }
    if (rc == 0) rc = conf_check(c);
    if (rc == 0) conf_notes(c);
    if (rc == 0) rc = train_sft(c);
    conf_free(c);
    return ended(rc);
}

/* --gpu SIZE or --gpu=SIZE in front of the keys. Returns how many arguments it took. */
static int plan_gpu(int argc, char **argv, int64_t *gpu) {
    const bool apart = argc > 1 && strcmp(argv[1], "--gpu") == 0, joined = argc > 1 && strncmp(argv[1], "--gpu=", 6) == 0;
    if (!apart && !joined) return 0;
    if (apart && argc < 3) FAIL(ERR_INVAL, "--gpu: expected its memory, as in --gpu 141GB");
    TRY(conf_bytes("--gpu", joined ? argv[1] + 6 : argv[2], gpu));
    if (*gpu <= 0) FAIL(ERR_INVAL, "--gpu: its memory must be above 0");
    return apart ? 2 : 1;
}

int cmd_plan(int argc, char **argv) {
    struct conf *c = NULL;
    struct buf text = {0};
    bool fits = false;
    int64_t gpu = 0;
    const int taken = plan_gpu(argc, argv, &gpu);
    TRY(taken);
    if (argc > 1 + taken && strcmp(argv[1 + taken], "--help") == 0)
        puts("usage: verlc plan [--gpu SIZE] KEY=VALUE...\n\n"
             "Prints the memory that `verlc ppo` with these keys takes, and whether it fits; nothing runs.\n"
             "--gpu SIZE   plans for a GPU with so much memory, as in --gpu 141GB, that need not be there\n");
    int rc = conf_load(&c, "ppo_trainer", argc - 1 - taken, argv + 1 + taken);
    if (rc == 0 && (rc = conf_answer(c, stdout)) != 0) {
        conf_free(c);
        return rc < 0 ? rc : 0;
    }
    if (rc == 0) rc = conf_check(c);
    if (rc == 0) rc = train_plan_ppo(c, gpu, &text, &fits);
    if (rc == 0) fputs(text.p, stdout);
    buf_free(&text);
    conf_free(c);
    if (rc == 0 && !fits) return err_exit_status(ERR_NOMEM);
    return rc;
}

/* A command that reads a schema and has nothing to validate beyond the table. */
static int load_checked(struct conf **c, const char *schema, int argc, char **argv) {
    int rc = conf_load(c, schema, argc - 1, argv + 1);
    if (rc == 0 && (rc = conf_answer(*c, stdout)) != 0) return rc;
    if (rc == 0) rc = conf_check(*c);
    if (rc == 0) conf_notes(*c);
    return rc;
}

int cmd_eval(int argc, char **argv) {
    struct conf *c = NULL;
    struct buf text = {0};
    int rc = load_checked(&c, "evaluation", argc, argv);
    if (rc == 0) {
        rc = train_eval(c, &text);
        if (rc == 0) fputs(text.p, stdout);
    } else if (rc > 0) {
        rc = 0;
    }
    buf_free(&text);
    conf_free(c);
    return rc;
}

/* The first argument that is a key of one of these groups; NULL: none. */
static const char *first_of(int argc, char **argv, const char *const *groups) {
    for (int i = 1; i < argc; i++) {
        const char *key = argv[i] + strspn(argv[i], "+~");
        for (const char *const *g = groups; *g; g++)
            if (strncmp(key, *g, strlen(*g)) == 0) return argv[i];
    }
    return NULL;
}

int cmd_generate_rows(int argc, char **argv) {
    /* keys that only one of verl's two programs reads: main_generation, and main_generation_server of verl 0.9.1 */
    static const char *const older[] = {"model.", "rollout.", "data.path=", "data.n_samples=", "data.batch_size=", NULL};
    static const char *const server[] = {"actor_rollout_ref.", "data.train_files=", NULL};
    const char *a = first_of(argc, argv, older), *b = first_of(argc, argv, server);
    struct conf *c = NULL;
    if (a && b)
        FAIL(ERR_INVAL,
             "%s and %s are keys of two programs; take those of main_generation (model.path, data.path, data.n_samples, rollout.*) "
             "or those of main_generation_server (actor_rollout_ref.model.path, data.train_files, actor_rollout_ref.rollout.*)",
             a, b);
    int rc = load_checked(&c, b ? "generation_server" : "generation", argc, argv);
    if (rc == 0) rc = train_generate(c);
    else if (rc > 0) rc = 0;
    conf_free(c);
    return rc;
}
