/* options.c - the option parser of the JSONL tools: names, types, --help from one table; and what several of them take. */
#include "cmd/cmd.h"

#include "base/buf.h"
#include "base/err.h"
#include "base/log.h"
#include "conf/conf.h"
#include "conf/keys/enums.def"

#include <stdio.h>
#include <string.h>
#include <unistd.h>

static void print_help(const struct cmd_spec *s) {
    printf("usage: %s\n", s->usage);
    if (s->about) printf("\n%s\n", s->about);
    printf("\noptions:\n");
    for (int i = 0; i < s->n_opts; i++) {
        char left[64];
        snprintf(left, sizeof left, "%s%s%s", s->opts[i].name, s->opts[i].arg ? " " : "", s->opts[i].arg ? s->opts[i].arg : "");
        printf("  %-26s %s\n", left, s->opts[i].help);
    }
    printf("  %-26s %s\n", "--help", "this text");
}

static int set_value(const struct cmd_opt *o, const char *v) {
    switch (o->type) {
    case CMD_IS_STR: *(const char **)o->out = v; return 0;
    case CMD_IS_I64: return conf_whole(o->name, o->range, v, o->out);
    case CMD_IS_F64: return conf_real(o->name, o->range, v, o->out);
    case CMD_IS_FLAG: break;
    }
    FAIL(ERR_INVAL, "%s takes no value", o->name);
}

static int unknown(const struct cmd_spec *s, const char *name) {
    const char *best = NULL;
    int d = 4; /* further than this is no suggestion */
    for (int i = 0; i < s->n_opts; i++) {
        const int e = str_distance(name, s->opts[i].name);
        if (e < d) {
            d = e;
            best = s->opts[i].name;
        }
    }
    if (best) FAIL(ERR_INVAL, "unknown option %s; did you mean %s? (--help lists them)", name, best);
    FAIL(ERR_INVAL, "unknown option %s (--help lists them)", name);
}

/* ERR_INVAL: an argument that the command does not take. Commands that take a model by its option are meant most often. */
static int unexpected(const struct cmd_spec *s, const char *a) {
    if (!strchr(a, '=') && !s->operands)
        for (int k = 0; k < s->n_opts; k++)
            if (strcmp(s->opts[k].name, "--model") == 0)
                FAIL(ERR_INVAL, "unexpected argument '%s'; did you mean --model %s? usage: %s", a, a, s->usage);
    if (s->operands && s->max_operands > 1)
        FAIL(ERR_INVAL, "'%s' is one argument too many, at most %d; usage: %s", a, s->max_operands, s->usage);
    FAIL(ERR_INVAL, "unexpected argument '%s'; usage: %s", a, s->usage);
}

void cmd_reads_stdin(const char *what) {
    if (isatty(STDIN_FILENO)) log_note("reads %s, from this terminal; Ctrl-D ends them, Ctrl-C the command", what);
}

int cmd_parse(const struct cmd_spec *s, int argc, char **argv) {
    if (s->n_operands) *s->n_operands = 0;
    for (int i = 1; i < argc; i++) {
        const char *a = argv[i];
        if (strcmp(a, "--help") == 0 || strcmp(a, "-h") == 0) {
            print_help(s);
            return 1;
        }
        if (a[0] != '-' || a[1] != '-') {
            if (!s->operands || *s->n_operands >= s->max_operands) return unexpected(s, a);
            s->operands[(*s->n_operands)++] = a;
            continue;
        }
        const char *eq = strchr(a, '=');
        const size_t n = eq ? (size_t)(eq - a) : strlen(a);
        const struct cmd_opt *o = NULL;
        for (int k = 0; k < s->n_opts && !o; k++)
            if (strlen(s->opts[k].name) == n && memcmp(s->opts[k].name, a, n) == 0) o = &s->opts[k];
        if (!o) return unknown(s, a);
        if (o->type == CMD_IS_FLAG && !eq) {
            *(bool *)o->out = true;
            continue;
        }
        if (!eq && i + 1 >= argc) FAIL(ERR_INVAL, "%s needs a value: %s %s; usage: %s", o->name, o->name, o->arg, s->usage);
        TRY(set_value(o, eq ? eq + 1 : argv[++i]));
    }
    return 0;
}

int cmd_compute_dtype(const char *name, enum dtype *dt) {
    int value = DT_BF16;
    TRY(conf_word("--dtype", name, CONF_WORDS(DTYPES), &value));
    *dt = (enum dtype)value;
    return 0;
}

int cmd_batch_size(int64_t seqs, int64_t prompt, int64_t len) {
    enum { MOST = 1 << 28 };
    if (seqs > MOST / (prompt + len))
        FAIL(ERR_INVAL, "--batch %lld, --prompt %lld, --len %lld: at most %d tokens in all", (long long)seqs, (long long)prompt,
             (long long)len, MOST);
    return 0;
}
