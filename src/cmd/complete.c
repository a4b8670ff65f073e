/* complete.c - `verlc __complete WORD...`: what may stand for the last word, a line each; the shells' part is in share/. Commands,
 * options (of the command's own --help), keys group by group, values of an enumeration, metrics of a run. Where a file name is
 * due it says nothing: the shell knows those.
 * Invariant: never an error and nothing but candidates; each begins with the last word. */
#include "cmd/cmd.h"

#include "base/buf.h"
#include "base/log.h"
#include "base/map.h"
#include "conf/conf.h"
#include "run/early_warnings.h"
#include "track/metric_table.h"
#include "view/run_reader.h"

#include <ctype.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

struct completion {
    const char *word; /* the last one, not yet whole */
    struct map printed;
};

/* n bytes of text, once, where it begins with the word. */
static void offer(struct completion *c, const char *text, size_t n, const char *tail) {
    char *s = xasprintf("%.*s%s", (int)n, text, tail);
    if (strncmp(s, c->word, strlen(c->word)) == 0 && !map_gets(&c->printed, s, NULL)) {
        map_set(&c->printed, s, strlen(s), 0);
        puts(s);
    }
    free(s);
}
static void offer_word(struct completion *c, const char *text) { offer(c, text, strlen(text), ""); }

/* Words between spaces. */
static void offer_words(struct completion *c, const char *words) {
    for (const char *p = words; *p; p += strspn(p, " ")) {
        const size_t n = strcspn(p, " ");
        offer(c, p, n, "");
        p += n;
    }
}

static void offer_commands(struct completion *c) {
    int n;
    const struct command *list = command_list(&n);
    for (int i = 0; i < n; i++) offer_word(c, list[i].name);
}

/* ---- options: the words that stand first in the lines of the command's --help ---- */

static void help_text(const struct command *c, const char *part, struct buf *out) {
    char help[] = "--help", *args[] = {(char *)(uintptr_t)c->name, help, NULL, NULL};
    if (part) {
        args[1] = (char *)(uintptr_t)part;
        args[2] = help;
    }
    fflush(stdout);
    const int file = memfd_create("help", MFD_CLOEXEC), before = dup(STDOUT_FILENO);
    if (file < 0 || before < 0) return;
    dup2(file, STDOUT_FILENO);
    (void)c->run(part ? 3 : 2, args);
    fflush(stdout);
    dup2(before, STDOUT_FILENO);
    close(before);
    const off_t n = lseek(file, 0, SEEK_END);
    char *text = xcalloc((size_t)n + 1, 1);
    if (pread(file, text, (size_t)n, 0) == n) buf_add(out, text, (size_t)n);
    free(text);
    close(file);
}

static void offer_options(struct completion *c, const struct command *command, const char *part) {
    struct buf text = {0};
    help_text(command, part, &text);
    for (const char *p = text.p ? text.p : ""; *p; p += strcspn(p, "\n"), p += *p == '\n') {
        size_t n = 2;
        if (strncmp(p, "  --", 4) != 0) continue;
        while (isalnum((unsigned char)p[n]) || p[n] == '-') n++;
        offer(c, p + 2, n - 2, "");
    }
    buf_free(&text);
}

/* ---- keys ---- */

struct keys {
    struct completion *c;
    const char *key; /* the word's part that is a key: behind + or ~ */
    const char *tail;
    bool acting;
    int64_t n;
};

/* The key up to its next dot, so that a list shows groups first. */
static int offer_key(void *arg, const struct conf_key_info *k) {
    struct keys *q = arg;
    const size_t n = strlen(q->key), lead = (size_t)(q->key - q->c->word);
    if (strncmp(k->key, q->key, n) != 0 || (k->how == CONF_KEY_ACTS) != q->acting) return 0;
    const size_t more = strcspn(k->key + n, ".");
    const bool group = k->key[n + more] == '.';
    char *text = xasprintf("%.*s%.*s", (int)lead, q->c->word, (int)(n + more), k->key);
    offer(q->c, text, strlen(text), group ? "." : q->tail);
    free(text);
    q->n++;
    return 0;
}

/* Keys that act; where none is meant, those that are accepted only. */
static void offer_keys(struct completion *c, const char *schema, const char *tail) {
    struct keys q = {c, c->word + strspn(c->word, "+~"), tail, true, 0};
    (void)conf_keys(schema, offer_key, &q);
    if (q.n > 0 || !strchr(q.key, '.')) return;
    q.acting = false;
    (void)conf_keys(schema, offer_key, &q);
}

struct value {
    const char *key;
    size_t n;
    struct buf words;
};
static int take_values(void *arg, const struct conf_key_info *k) {
    struct value *v = arg;
    if (strlen(k->key) != v->n || memcmp(k->key, v->key, v->n) != 0) return 0;
    conf_key_values(k, &v->words);
    return 1;
}

static void offer_values(struct completion *c, const char *schema, const char *eq) {
    struct value v = {.key = c->word + strspn(c->word, "+~")};
    v.n = (size_t)(eq - v.key);
    (void)conf_keys(schema, take_values, &v);
    for (const char *p = v.words.p ? v.words.p : ""; *p; p += strcspn(p, "\n") + 1) {
        char *text = xasprintf("%.*s%.*s", (int)(eq + 1 - c->word), c->word, (int)strcspn(p, "\n"), p);
        offer_word(c, text);
        free(text);
    }
    buf_free(&v.words);
}

/* The schema of the keys on this command line; NULL: the command takes none. */
static const char *schema_of(const char *command, int argc, char **argv) {
    const char *schema = "ppo_trainer";
    if (strcmp(command, "plan") == 0) {
        command = "ppo";
        for (int i = 1; i < argc; i++)
            if (strcmp(argv[i], "sft") == 0 || strcmp(argv[i], "generate") == 0) command = argv[i];
    }
    if (strcmp(command, "sft") == 0) return cmd_sft_schema(argc, argv);
    if (strcmp(command, "eval") == 0) return "evaluation";
    if (strcmp(command, "generate") == 0) return cmd_generation_schema(argc, argv, &schema) < 0 ? "generation" : schema;
    if (strcmp(command, "ppo") != 0) return NULL;
    for (int i = 1; i < argc; i++)
        for (const char *const *s = conf_schemas(); *s; s++)
            if (strncmp(argv[i], "--config-name=", 14) == 0 && strcmp(argv[i] + 14, *s) == 0) schema = *s;
    return schema;
}

/* ---- metrics ---- */

static void offer_metric_rows(struct completion *c) {
    size_t n;
    const struct metric_row *rows = metric_rows(&n);
    for (size_t i = 0; i < n; i++)
        if (rows[i].pattern && rows[i].pattern[0] != '*') offer(c, rows[i].pattern, strcspn(rows[i].pattern, "*"), "");
}

/* A run.db may come from anybody: nothing that a shell or a terminal would take for more than a name. */
static bool is_plain(const char *name) {
    for (const char *p = name; *p; p++)
        if ((unsigned char)*p <= ' ' || *p == 0x7f || strchr("$`'\"\\;&|<>(){}*?!~#[]", *p)) return false;
    return true;
}

/* Those of the runs on the command line; without one all that there may be. */
static void offer_metrics(struct completion *c, int argc, char **argv) {
    bool run = false;
    for (int i = 1; i < argc - 1; i++) {
        struct run_reader *r;
        struct run_names names;
        if (argv[i][0] == '-' || run_reader_open(&r, argv[i]) < 0) continue;
        if (run_reader_metric_names(r, &names) == 0) {
            for (int64_t k = 0; k < names.n; k++)
                if (is_plain(names.v[k])) offer_word(c, names.v[k]);
            run_names_free(&names);
            run = true;
        }
        run_reader_close(r);
    }
    if (!run) offer_metric_rows(c);
}

static void offer_explained(struct completion *c) {
    size_t n;
    const struct early_warning *w = early_warning_rows(&n);
    offer_metric_rows(c);
    for (size_t i = 0; i < n; i++) offer_word(c, w[i].name);
    offer_keys(c, "ppo_trainer", "");
    offer_keys(c, "sft_trainer_engine", "");
}

/* ---- the word ---- */

/* Values of the option before the word; false: it has none that are known. */
static bool offer_option_value(struct completion *c, const char *option, int argc, char **argv) {
    static const struct {
        const char *option, *words;
    } known[] = {{"--color", "auto always never"},
                 {"--color-by", "logp entropy advantage kl"},
                 {"--device", "auto cpu cuda ref"},
                 {"--dtype", "bf16 fp32"},
                 {"--cfg", "job"},
                 {"--preset", "tiny"},
                 {"--backend", "fsdp megatron"}};
    if (strcmp(option, "--metric") == 0) offer_metrics(c, argc, argv);
    if (strcmp(option, "--metric") == 0) return true;
    for (const char *const *s = conf_schemas(); strcmp(option, "--config-name") == 0 && *s; s++) offer_word(c, *s);
    if (strcmp(option, "--config-name") == 0) return true;
    for (size_t i = 0; i < sizeof known / sizeof *known; i++)
        if (strcmp(option, known[i].option) == 0) {
            offer_words(c, known[i].words);
            return true;
        }
    return false;
}

/* The parts of a command that come before its options. */
static const char *parts_of(const char *command) {
    static const char *const parts[][2] = {
        {"model", "init info export merge"},
        {"data", "gsm8k arith"},
        {"model_merger", "merge test"},
        {"trackers", "sync"},
        {"bench", "gemm attention grouped delta read train logprob generate decode update step checkpoint grade reward"}};
    for (size_t i = 0; i < sizeof parts / sizeof *parts; i++)
        if (strcmp(command, parts[i][0]) == 0) return parts[i][1];
    return NULL;
}

/* argv[0] is the command's name, the last word is c->word. */
static void offer_arguments(struct completion *c, int argc, char **argv) {
    const struct command *command = command_find(argv[0]);
    const char *before = argv[argc - 2], *eq = strchr(c->word, '=');
    if (!command || strcmp(command->name, "worker") == 0 || strcmp(command->name, "exec") == 0) return;
    const char *parts = parts_of(command->name), *schema = schema_of(command->name, argc, argv);
    if (argc > 2 && before[0] == '-' && offer_option_value(c, before, argc, argv)) return;
    if (c->word[0] == '-') {
        if (schema && strcmp(command->name, "generate") != 0) offer_words(c, "--help --cfg --config-path --config-name");
        if (strcmp(command->name, "ppo") != 0 && strcmp(command->name, "sft") != 0)
            offer_options(c, command, parts && argc > 2 && argv[1][0] != '-' ? argv[1] : NULL);
        return;
    }
    if (parts && argc == 2) offer_words(c, parts);
    if (strcmp(command->name, "explain") == 0) offer_explained(c);
    if (!schema) return;
    if (eq) {
        offer_values(c, schema, eq);
        return;
    }
    if (strcmp(command->name, "plan") == 0 && argc == 2) offer_words(c, "ppo sft generate");
    offer_keys(c, schema, strcmp(before, "--help") == 0 || strcmp(before, "-h") == 0 ? "" : "=");
}

int cmd_complete(int argc, char **argv) {
    struct completion c = {.word = argv[argc - 1]};
    log_set_level(LOG_OFF);
    argc--;
    argv++;
    const bool help = argc > 1 && strcmp(argv[0], "help") == 0;
    if (argc == 1 || (help && argc == 2)) {
        offer_commands(&c);
        if (help) offer_explained(&c);
        else if (argc == 1) offer_words(&c, "help --help --version");
    } else if (argc > 1) {
        offer_arguments(&c, argc - help, argv + help);
    }
    map_free(&c.printed);
    return 0;
}
