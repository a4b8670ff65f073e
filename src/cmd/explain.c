/* explain.c - verlc explain: what a metric, a configuration key or an early warning is and how to read it; all metrics, for a
 * terminal or as the page docs/metrics.md; all warnings as docs/warnings.md.  The texts stand in track/metric_table.def,
 * conf/keys and run/early_warning_rules.def. */
#include "cmd/cmd.h"
#include "cmd/explain.h"

#include "base/buf.h"
#include "base/err.h"
#include "conf/conf.h"
#include "run/early_warnings.h"
#include "run/unusual_settings.h"
#include "track/metric_table.h"

#include <stdio.h>
#include <string.h>

enum { WIDTH = 100, MAX_NAMES = 512 };

void explain_wrapped(const char *text, int at, int indent) {
    int column = at;
    bool first = true;
    for (const char *p = text; *p;) {
        const size_t n = strcspn(p, " ");
        if (!first && column + 1 + (int)n > WIDTH) column = printf("\n%*s", indent, "") - 1;
        else if (!first) column += printf(" ");
        column += printf("%.*s", (int)n, p);
        first = false;
        p += n + (p[n] == ' ');
    }
    printf("\n");
}

static void print_part(const char *label, const char *text) {
    if (!*text) return;
    const int at = printf("    %s", label);
    explain_wrapped(text, at, 4);
}

static void print_row(const char *name, const struct metric_row *row) {
    printf("%s\n", name);
    print_part("", row->text);
    print_part("", row->reading);
}

/* What a run is warned of by this metric, and what helps then. */
static void print_watched(const char *name) {
    size_t n;
    const struct early_warning *w = early_warning_rows(&n);
    for (size_t i = 0; i < n; i++) {
        const size_t len = strlen(w[i].metric);
        if (strncmp(name, w[i].metric, len) != 0 || (name[len] && name[len] != '/')) continue;
        struct buf b = {0};
        buf_addf(&b, "%s (%s), where ", w[i].name, w[i].what);
        early_warning_when(&w[i], &b);
        print_part("Warning ", b.p);
        print_part("What helps: ", w[i].helps);
        buf_free(&b);
    }
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
    print_part("", w->what);
    print_part("", when.p);
    print_part("", w->reason);
    print_part("What helps: ", w->helps);
    buf_free(&when);
}

static void print_unusual(void) {
    size_t n;
    const struct unusual_setting *rows = unusual_setting_rows(&n);
    printf("\n## Unusual values\n\n"
           "`unusual_setting`: a number that is allowed and hardly meant, said once at the start of a run, where it was set. The "
           "source is\n"
           "src/run/unusual_settings.def.\n\n"
           "| key | usual | outside |\n|---|---|---|\n");
    for (size_t k = 0; k < n; k++) {
        struct buf range = {0};
        unusual_setting_range(&rows[k], &range);
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
        "off. Made by `verlc explain --warnings`; the source is src/run/early_warning_rules.def.\n\n"
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

/* Metrics with the word in their name: lines of them. */
static int64_t metrics_like(const char *word) {
    size_t n;
    int64_t found = 0;
    const struct metric_row *rows = metric_rows(&n);
    for (size_t k = 0; k < n; k++) {
        if (!rows[k].pattern || !strstr(rows[k].pattern, word)) continue;
        if (found++ == 0) printf("%s: metrics with it in their name\n", word);
        printf("  %s\n      ", rows[k].pattern);
        explain_wrapped(rows[k].text, 6, 6);
    }
    return found;
}

/* A metric, an early warning, a key, else what may be meant. */
static int explain(const char *name) {
    const struct early_warning *w = early_warning_of(name);
    const struct metric_row *row = w ? NULL : metric_row_of(name);
    if (w) print_warning(w);
    if (strcmp(name, "unusual_setting") == 0) print_unusual();
    if (w || strcmp(name, "unusual_setting") == 0) return 0;
    if (row) {
        print_row(name, row);
        print_watched(name);
        return 0;
    }
    int64_t found = explain_key(name);
    TRY((int)found);
    if (found == 0 && *name) TRY((int)(found = explain_keys_like(name)));
    if (found != 1 && *name && !strpbrk(name, "./")) found += metrics_like(name);
    if (found > 0) return 0;
    const char *near = conf_key_near("ppo_trainer", name);
    FAIL(ERR_INVAL,
         "%s is no metric, no early warning and no key%s%s%s; 'verlc explain' lists the metrics, 'verlc ppo --help' the keys", name,
         near ? "; did you mean " : "", near ? near : "", near ? "?" : "");
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
