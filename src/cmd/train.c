/* train.c - verlc ppo, sft, eval and generate with keys: verl's command lines.
 * Resolves and checks the configuration; the programs are in train. */
#include "cmd/cmd.h"

#include "base/err.h"
#include "base/file.h"
#include "base/log.h"
#include "conf/conf.h"
#include "generate/eval.h"
#include "generate/generate.h"
#include "ppo/ppo.h"
#include "ranks/launcher.h"
#include "ranks/start_workers.h"
#include "run/phase_watchdog.h"
#include "sft/sft.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

extern char **environ;

int cmd_ended(int rc) {
    if (rc != ERR_SIGNAL) return rc;
    log_error("%s", err_msg());
    return 128 + phase_stop_signal();
}

/* A bare command is a question, not a run. model_key NULL: it needs none. */
static int want_keys(const char *name, int argc, const char *model_key) {
    if (argc > 1) return 0;
    if (!model_key)
        FAIL(ERR_INVAL, "verlc %s: no keys given; it needs at least data.path=FILE; 'verlc %s --help' lists them all", name, name);
    FAIL(ERR_INVAL, "verlc %s: no keys given; it needs at least %s=DIR and data.train_files=FILE; 'verlc %s --help' lists them all",
         name, model_key, name);
}

int cmd_want_model(const struct conf *c, const char *command, const char *key) {
    const json_t *v;
    if (conf_is_set(c, key) || conf_is_set(c, "model.partial_pretrain") || conf_is_null(c, key) || conf_json(c, key, &v) < 0)
        return 0;
    char *dir = file_expand(json_is_string(v) ? json_string_value(v) : "");
    const bool there = file_is_dir(dir); /* verl's default */
    free(dir);
    if (!there) FAIL(ERR_INVAL, "not set: %s=DIR (or a hub id); 'verlc %s --help' lists the keys", key, command);
    return 0;
}

int cmd_load(struct conf **c, const char *schema, int argc, char **argv) {
    TRY(conf_load(c, schema, argc, argv));
    const int answered = conf_answer(*c, stdout);
    TRY(answered);
    if (answered) return 1;
    TRY(conf_check(*c));
    struct launch l;
    TRY(launch_read(&l, environ));
    if (!workers_started_this(&l)) conf_notes(*c); /* the controller says them */
    return 0;
}

/* A trainer's command: its configuration, then the program. */
static int train(const char *name, const char *model_key, const char *schema, int (*program)(const struct conf *c), int argc,
                 char **argv) {
    struct conf *c = NULL;
    TRY(want_keys(name, argc, model_key));
    int rc = cmd_load(&c, schema, argc - 1, argv + 1);
    if (rc == 0 && strcmp(name, "sft") == 0) rc = cmd_want_model(c, name, model_key);
    if (rc == 0) rc = program(c);
    conf_free(c);
    if (rc < 0) err_pass(rc, __FILE__, __LINE__);
    return rc > 0 ? 0 : cmd_ended(rc);
}

int cmd_ppo(int argc, char **argv) { return train("ppo", "actor_rollout_ref.model.path", "ppo_trainer", ppo_train, argc, argv); }

const char *cmd_sft_schema(int argc, char **argv) {
    for (int i = 1; i < argc; i++) {
        if (strncmp(argv[i], "model.partial_pretrain=", 23) == 0 || strncmp(argv[i], "data.prompt_key=", 16) == 0 ||
            strncmp(argv[i], "data.response_key=", 18) == 0 || strcmp(argv[i], "--config-name=sft_trainer") == 0)
            return "sft_trainer";
    }
    return "sft_trainer_engine";
}

int cmd_sft(int argc, char **argv) { return train("sft", "model.path", cmd_sft_schema(argc, argv), sft_train, argc, argv); }

int cmd_eval(int argc, char **argv) {
    struct conf *c = NULL;
    struct buf text = {0};
    TRY(want_keys("eval", argc, NULL));
    int rc = cmd_load(&c, "evaluation", argc - 1, argv + 1);
    if (rc == 0) rc = eval_run(c, &text);
    if (rc == 0 && text.p) fputs(text.p, stdout);
    buf_free(&text);
    conf_free(c);
    return rc < 0 ? err_pass(rc, __FILE__, __LINE__) : 0;
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

int cmd_generation_schema(int argc, char **argv, const char **schema) {
    /* keys that only one of verl's two programs reads: main_generation, and main_generation_server of verl 0.9.1 */
    static const char *const older[] = {"model.", "rollout.", "data.path=", "data.n_samples=", "data.batch_size=", NULL};
    static const char *const server[] = {"actor_rollout_ref.", "data.train_files=", NULL};
    const char *a = first_of(argc, argv, older), *b = first_of(argc, argv, server);
    if (a && b)
        FAIL(ERR_INVAL,
             "%s and %s are keys of two programs; take those of main_generation (model.path, data.path, data.n_samples, rollout.*) "
             "or those of main_generation_server (actor_rollout_ref.model.path, data.train_files, actor_rollout_ref.rollout.*)",
             a, b);
    *schema = b ? "generation_server" : "generation";
    return 0;
}

int cmd_generate_rows(int argc, char **argv) {
    const char *schema;
    struct conf *c = NULL;
    TRY(cmd_generation_schema(argc, argv, &schema));
    int rc = cmd_load(&c, schema, argc - 1, argv + 1);
    if (rc == 0) rc = generate_run(c);
    conf_free(c);
    if (rc < 0) err_pass(rc, __FILE__, __LINE__);
    return rc > 0 ? 0 : cmd_ended(rc);
}
