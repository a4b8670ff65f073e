/* options.c - the option parser of the JSONL tools: names, types, --help from one table; and what several of them take. */
#include "cmd/cmd.h"

#include "base/buf.h"
#include "base/err.h"
#include "conf/conf.h"
#include "conf/words.def"

#include <errno.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

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
    char *end = NULL;
    errno = 0;
    switch (o->type) {
    case CMD_STR: *(const char **)o->out = v; return 0;
    case CMD_I64: {
        const long long n = strtoll(v, &end, 10);
        if (errno || end == v || *end) FAIL(ERR_INVAL, "%s: '%s' is not a whole number", o->name, v);
        *(int64_t *)o->out = n;
        return 0;
    }
    case CMD_F64: {
        const double f = strtod(v, &end);
        if (errno || end == v || *end || !isfinite(f)) FAIL(ERR_INVAL, "%s: '%s' is not a number", o->name, v);
        *(double *)o->out = f;
        return 0;
    }
    case CMD_FLAG: break;
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

int cmd_parse(const struct cmd_spec *s, int argc, char **argv) {
    if (s->n_operands) *s->n_operands = 0;
    for (int i = 1; i < argc; i++) {
        const char *a = argv[i];
        if (strcmp(a, "--help") == 0 || strcmp(a, "-h") == 0) {
            print_help(s);
            return 1;
        }
        if (a[0] != '-' || a[1] != '-') {
            if (!s->operands || *s->n_operands >= s->max_operands)
                FAIL(ERR_INVAL, "unexpected argument '%s'; usage: %s", a, s->usage);
            s->operands[(*s->n_operands)++] = a;
            continue;
        }
        const char *eq = strchr(a, '=');
        const size_t n = eq ? (size_t)(eq - a) : strlen(a);
        const struct cmd_opt *o = NULL;
        for (int k = 0; k < s->n_opts && !o; k++)
            if (strlen(s->opts[k].name) == n && memcmp(s->opts[k].name, a, n) == 0) o = &s->opts[k];
        if (!o) return unknown(s, a);
        if (o->type == CMD_FLAG && !eq) {
            *(bool *)o->out = true;
            continue;
        }
        if (!eq && i + 1 >= argc) FAIL(ERR_INVAL, "%s needs a value %s", o->name, o->arg);
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
    if (seqs < 1 || prompt < 1 || len < 1)
        FAIL(ERR_INVAL, "--batch %lld, --prompt %lld, --len %lld: expected at least 1 of each", (long long)seqs, (long long)prompt,
             (long long)len);
    if (seqs > MOST || prompt > MOST || len > MOST || seqs > MOST / (prompt + len))
        FAIL(ERR_INVAL, "--batch %lld, --prompt %lld, --len %lld: at most %d tokens in all", (long long)seqs, (long long)prompt,
             (long long)len, MOST);
    return 0;
}
