/* explain.c - verlc explain: what a metric, a configuration key or an early warning is and how to read it; all metrics, for a
 * terminal or as the page docs/metrics.md; all warnings as docs/warnings.md.  The texts stand in track/metric_table.def,
 * conf/keys_*.def and train/run/early_warnings.def. */
#include "cmd/cmd.h"

#include "base/buf.h"
#include "base/err.h"
#include "conf/conf.h"
#include "track/metric_table.h"
#include "train/run/early_warnings.h"
#include "train/run/unusual_values.h"

#include <stdio.h>
#include <string.h>

enum { WIDTH = 100, MAX_NAMES = 512 };

/* Text after a label of four characters, wrapped. */
static void print_wrapped(const char *text) {
    int column = printf("    ");
    for (const char *p = text; *p;) {
        const int n = (int)strcspn(p, " ");
        if (column > 4 && column + n > WIDTH) column = printf("\n    ") - 1;
        column += printf("%.*s%s", n, p, p[n] ? " " : "");
        p += n + (p[n] == ' ');
    }
    printf("\n");
}

static void print_row(const char *name, const struct metric_row *row) {
    printf("%s\n", name);
    print_wrapped(row->text);
    if (row->reading[0]) print_wrapped(row->reading);
}

static void print_markdown(void) {
    size_t n;
    const struct metric_row *rows = metric_rows(&n);
    printf("# Metrics\n\n"
           "What each metric is and how to read it: the text of `verlc explain METRIC`. Made by `verlc explain --markdown`;\n"
           "the source is src/track/metric_table.def. `*` stands for any text, such as mean, max or min. Definitions are\n"
           "verl 0.9.1's unless the text says verlc.\n");
    for (size_t k = 0; k < n; k++) {
        if (rows[k].section) printf("\n## %s\n\n| metric | what it is | how to read it |\n|---|---|---|\n", rows[k].section);
        else {
            printf("| `%s` | ", rows[k].pattern);
            for (const char *p = rows[k].text; *p; p++) printf(*p == '|' ? "\\%c" : "%c", *p);
            printf(" | %s |\n", rows[k].reading);
        }
    }
}

static void print_all(void) {
    size_t n;
    const struct metric_row *rows = metric_rows(&n);
    for (size_t k = 0; k < n; k++) {
        if (rows[k].section) printf("%s%s\n\n", k ? "\n" : "", rows[k].section);
        else print_row(rows[k].pattern, &rows[k]);
    }
}

static void print_warning(const struct early_warning *w) {
    struct buf when = {0};
    buf_addf(&when, "When: ");
    early_warning_when(w, &when);
    printf("%s (early warning)\n", w->name);
    print_wrapped(w->what);
    print_wrapped(when.p);
    print_wrapped(w->reason);
    print_wrapped(w->helps);
    buf_free(&when);
}

static void print_unusual(void) {
    size_t n;
    const struct unusual_value *rows = unusual_value_rows(&n);
    printf("\n## Unusual values\n\n"
           "`unusual_value`: a number that is allowed and hardly meant, said once at the start of a run, where it was set. The "
           "source is\n"
           "src/train/run/unusual_values.def.\n\n"
           "| key | usual | outside |\n|---|---|---|\n");
    for (size_t k = 0; k < n; k++) {
        struct buf range = {0};
        unusual_value_range(&rows[k], &range);
        printf("| `%s` | %s | %s |\n", rows[k].key, range.p, rows[k].text);
        buf_free(&range);
    }
}

static void print_warnings(void) {
    size_t n;
    const struct early_warning *rows = early_warning_rows(&n);
    printf(
        "# Early warnings\n\n"
        "What a run is watched for. A line when a condition begins, in the log and in run.db's `events` (kind `warning`); again\n"
        "only after it has been away for %d steps. A resumed run begins a new history. `trainer.early_warnings=False` turns them\n"
        "off. Made by `verlc explain --warnings`; the source is src/train/run/early_warnings.def.\n\n"
        "| warning | when | what it means | why this limit | what usually helps |\n|---|---|---|---|---|\n",
        EARLY_OVER_STEPS);
    for (size_t k = 0; k < n; k++) {
        struct buf when = {0};
        early_warning_when(&rows[k], &when);
        printf("| `%s` | %s | %s | %s | %s |\n", rows[k].name, when.p, rows[k].what, rows[k].reason, rows[k].helps);
        buf_free(&when);
    }
    print_unusual();
}

/* A metric, an early warning, else a key of ppo or of sft. */
static int explain(const char *name) {
    const struct early_warning *w = early_warning_of(name);
    const struct metric_row *row = w ? NULL : metric_row_of(name);
    if (w) print_warning(w);
    if (strcmp(name, "unusual_value") == 0) print_unusual();
    if (w || strcmp(name, "unusual_value") == 0) return 0;
    if (row) {
        print_row(name, row);
        return 0;
    }
    if (*name && (conf_help(stdout, "ppo_trainer", name) == 0 || conf_help(stdout, "sft_trainer_engine", name) == 0)) return 0;
    FAIL(ERR_INVAL, "%s is no metric, no early warning and no key; 'verlc explain' lists the metrics, 'verlc ppo --help' the keys",
         name);
}

int cmd_explain(int argc, char **argv) {
    const char *names[MAX_NAMES];
    int n = 0;
    bool markdown = false, warnings = false;
    const struct cmd_opt opts[] = {{"--markdown", CMD_FLAG, &markdown, NULL, "all metrics as the page docs/metrics.md"},
                                   {"--warnings", CMD_FLAG, &warnings, NULL, "the early warnings as the page docs/warnings.md"}};
    struct cmd_spec spec = CMD_SPEC(opts, "verlc explain [METRIC, KEY or WARNING ...]",
                                    "What a metric, a key or an early warning is and how to read it; without a name, all metrics.");
    spec.operands = names;
    spec.max_operands = MAX_NAMES;
    spec.n_operands = &n;
    const int answered = cmd_parse(&spec, argc, argv);
    TRY(answered);
    if (answered) return 0;
    if (warnings) print_warnings();
    else if (markdown) print_markdown();
    else if (n == 0) print_all();
    for (int k = 0; k < n; k++) TRY(explain(names[k]));
    return cmd_flush();
}
