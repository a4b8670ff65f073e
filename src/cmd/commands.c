/* commands.c - the table of commands: found by name, listed by `verlc --help`, explained by `verlc help`; and what a word that
 * names none may have meant. Prints to stdout and returns errors; main.c exits. */
#include "cmd/cmd.h"

#include "base/buf.h"
#include "base/err.h"
#include "base/file.h"

#include <stdlib.h>
#include <string.h>

static const struct command commands[] = {
#define X(name, help) {#name, help, cmd_##name},
    CMD_MAP(X)
#undef X
};
enum { N_COMMANDS = sizeof commands / sizeof commands[0] };

const struct command *command_find(const char *name) {
    for (int i = 0; i < N_COMMANDS; i++)
        if (strcmp(name, commands[i].name) == 0) return &commands[i];
    return NULL;
}

const struct command *command_list(int *n) {
    *n = N_COMMANDS;
    return commands;
}

void command_print_all(FILE *f) {
    fprintf(f,
            "verlc %s - reinforcement-learning post-training of language models\n\n"
            "usage: verlc COMMAND ...\n\n",
            VERLC_VERSION);
    for (int i = 0; i < N_COMMANDS; i++) fprintf(f, "  %-12s %s\n", commands[i].name, commands[i].help);
    fprintf(f, "\n'verlc help COMMAND' explains a command, 'verlc help KEY' a key. README.md has a first run.\n");
}

/* ---- a word that is no command ---- */

/* What people type for something that has another name here. */
static const struct {
    const char *words, *say;
} others[] = {
    {"train trainer run start grpo dapo rl rlhf finetune",
     "'verlc ppo KEY=VALUE...' trains with PPO, GRPO and the like, 'verlc sft' on examples"},
    {"main_ppo verl.trainer.main_ppo", "it is 'verlc ppo'"},
    {"sft_trainer fsdp_sft_trainer", "it is 'verlc sft'"},
    {"resume continue restart", "the command that started a run goes on with it (docs/checkpoints.md)"},
    {"convert save", "'verlc model export' and 'verlc model merge' write models"},
    {"merge", "'verlc model merge' merges adapters and shards, 'verlc model_merger' takes verl's arguments"},
    {"init info export", "it is a part of 'verlc model'"},
    {"gsm8k arith dataset prepare preprocess", "'verlc data gsm8k' and 'verlc data arith' make datasets"},
    {"infer inference chat sample rollout", "'verlc generate --model DIR' samples from a model"},
    {"evaluate test validate", "'verlc eval' scores responses in a file, 'verlc selftest' tests this machine"},
    {"download pull", "a model path that is a hub id is downloaded when a run starts"},
    {"dashboard ui web tensorboard", "'verlc view RUN' shows a run in the browser"},
    {"log logs metrics samples", "'verlc show RUN' has a run's metrics and samples, 'verlc explain METRIC' what a metric is"},
    {"memory estimate probe", "'verlc plan KEY=VALUE...' says what a run takes"},
    {"gpu gpus device devices check doctor",
     "'verlc selftest' tries the device, 'verlc bench' measures it, 'verlc netcheck' the links"},
    {"config keys", "'verlc ppo --help' lists the keys, 'verlc ppo KEY=VALUE... --cfg job' prints the configuration"},
    {"bash sh python python3 torchrun uv ray", "'verlc exec' runs a launcher written for verl"},
};

static const char *other_word(const char *word) {
    const size_t n = strlen(word);
    for (size_t i = 0; i < sizeof others / sizeof *others; i++)
        for (const char *p = others[i].words; *p; p += strspn(p, " ")) {
            const size_t len = strcspn(p, " ");
            if (len == n && memcmp(p, word, n) == 0) return others[i].say;
            p += len;
        }
    return NULL;
}

/* The command that a slip of a letter or two has missed; NULL: none. */
static const char *near_command(const char *word) {
    struct buf names = {0};
    for (int i = 0; i < N_COMMANDS; i++) buf_addf(&names, "%s ", commands[i].name);
    char *near = strpbrk(word, "./") ? NULL : str_near(names.p, word);
    const char *name = near ? command_find(near)->name : NULL;
    free(near);
    buf_free(&names);
    return name;
}

/* ERR_INVAL. */
static int unknown_command(const char *word) {
    const char *say = other_word(word);
    if (say) FAIL(ERR_INVAL, "there is no command '%s': %s; 'verlc --help' lists the commands", word, say);
    if (strchr(word, '='))
        FAIL(ERR_INVAL, "%s is a key without a command: write 'verlc ppo %s ...', or sft, plan, generate, eval in its place", word,
             word);
    const size_t n = strlen(word);
    if (n > 3 && strcmp(word + n - 3, ".sh") == 0)
        FAIL(ERR_INVAL, "there is no command '%s'; 'verlc exec bash %s' runs a script written for verl", word, word);
    const char *near = near_command(word);
    FAIL(ERR_INVAL, "there is no command '%s'%s%s%s 'verlc --help' lists the commands", word, near ? "; did you mean '" : ";",
         near ? near : "", near ? "'?" : "");
}

/* ---- verlc help ---- */

/* `verlc help CMD REST...`: CMD's own --help. Where REST is a prefix of keys it stands behind --help, a part's name before it. */
static int help_of(const struct command *c, int argc, char **argv) {
    static char flag[] = "--help";
    const bool keys =
        strcmp(c->name, "ppo") == 0 || strcmp(c->name, "sft") == 0 || strcmp(c->name, "plan") == 0 || strcmp(c->name, "eval") == 0;
    char **args = xcalloc((size_t)argc + 2, sizeof *args);
    int n = 0;
    args[n++] = argv[0];
    if (keys) args[n++] = flag;
    for (int i = 1; i < argc; i++) args[n++] = argv[i];
    if (!keys) args[n++] = flag;
    const int rc = c->run(n, args);
    free(args);
    return rc;
}

static int help(int argc, char **argv) {
    if (argc < 2) {
        command_print_all(stdout);
        return 0;
    }
    const struct command *c = command_find(argv[1]);
    if (c) return help_of(c, argc - 1, argv + 1);
    if (other_word(argv[1]) || near_command(argv[1])) return unknown_command(argv[1]);
    return cmd_explain(argc, argv); /* a key, a metric, a warning */
}

int command_run(int argc, char **argv) {
    static const char *const helps[] = {"--help", "-h", "-help", "help"}, *const versions[] = {"--version", "-v", "-V", "version"};
    for (int i = 0; i < 4; i++) {
        if (strcmp(argv[1], helps[i]) == 0) return help(argc - 1, argv + 1);
        if (strcmp(argv[1], versions[i]) != 0) continue;
        printf("verlc %s\n", VERLC_VERSION);
        return 0;
    }
    if (strcmp(argv[1], "__complete") == 0) return cmd_complete(argc - 1, argv + 1);
    const struct command *c = command_find(argv[1]);
    if (!c) return unknown_command(argv[1]);
    if (c->run != cmd_exec) cmd_exec_tell();
    return c->run(argc - 1, argv + 1);
}
