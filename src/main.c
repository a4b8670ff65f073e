/* main.c - picks the command, prints its error, exits. The only place with exit. */
#include "base/buf.h"
#include "base/err.h"
#include "base/log.h"
#include "base/process.h"
#include "cmd/cmd.h"

#include <stdio.h>
#include <string.h>

static const struct {
    const char *name, *help;
    int (*run)(int argc, char **argv);
} commands[] = {
#define X(name, help) {#name, help, cmd_##name},
    CMD_MAP(X)
#undef X
};
enum { N_COMMANDS = sizeof commands / sizeof commands[0] };

static void print_help(FILE *f) {
    fprintf(f,
            "verlc %s - reinforcement-learning post-training of language models\n\n"
            "usage: verlc COMMAND ...\n\n",
            VERLC_VERSION);
    for (int i = 0; i < N_COMMANDS; i++) fprintf(f, "  %-12s %s\n", commands[i].name, commands[i].help);
    fprintf(f, "\n'verlc COMMAND --help' explains a command. README.md has a first run.\n");
}

/* A negative error code, or the exit status. */
static int run(int argc, char **argv) {
    if (argc < 2) {
        print_help(stderr);
        return err_exit_status(ERR_INVAL);
    }
    if (strcmp(argv[1], "--help") == 0 || strcmp(argv[1], "-h") == 0 || strcmp(argv[1], "help") == 0) {
        print_help(stdout);
        return 0;
    }
    if (strcmp(argv[1], "--version") == 0) {
        printf("verlc %s\n", VERLC_VERSION);
        return 0;
    }
    for (int i = 0; i < N_COMMANDS; i++) {
        if (strcmp(argv[1], commands[i].name) != 0) continue;
        if (commands[i].run != cmd_exec) cmd_exec_tell();
        return commands[i].run(argc - 1, argv + 1);
    }
    int best = 0;
    for (int i = 1; i < N_COMMANDS; i++)
        if (str_distance(argv[1], commands[i].name) < str_distance(argv[1], commands[best].name)) best = i;
    log_error("unknown command '%s'; did you mean '%s'? 'verlc --help' lists them", argv[1], commands[best].name);
    return err_exit_status(ERR_INVAL);
}

int main(int argc, char **argv) {
    process_prepare();
    int rc = run(argc, argv);
    if (rc >= 0 && cmd_flush() < 0) rc = ERR_IO;
    if (rc >= 0) return rc;
    if (cmd_reader_gone()) return err_exit_status(rc); /* `| head` has seen enough */
    log_error("%s", err_msg());
    log_debug("%s: %s", err_name(rc), err_trace());
    return err_exit_status(rc);
}
