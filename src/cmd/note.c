/* note.c - verlc note: what people say of a run, in notes.json next to its run.db. */
#include "cmd/cmd.h"

#include "base/buf.h"
#include "base/err.h"
#include "base/json.h"
#include "view/run_notes.h"
#include "view/run_reader.h"
#include "view/terminal.h"

#include <stdlib.h>
#include <time.h>

static int print_line(struct buf *b) {
    const int rc = cmd_print_line(b->p, b->n);
    buf_reset(b);
    return rc;
}

/* Tags in one line, then a line a note: its number, when, and what. */
static int print(const json_t *o) {
    const json_t *tags = json_object_get(o, "tags"), *notes = json_object_get(o, "notes");
    struct buf b = {0};
    int rc = 0;
    buf_adds(&b, json_array_size(tags) ? "tags:" : "no tags");
    for (size_t i = 0; i < json_array_size(tags); i++) {
        const json_t *tag = json_array_get(tags, i);
        buf_adds(&b, i ? ", " : " ");
        term_text(&b, json_string_value(tag), json_string_length(tag), false);
    }
    rc = print_line(&b);
    for (size_t i = 0; i < json_array_size(notes) && rc == 0; i++) {
        const json_t *note = json_array_get(notes, i), *text = json_object_get(note, "text");
        const double wall = json_number_value(json_object_get(note, "wall"));
        const time_t at = wall > 0 && wall < 1e11 ? (time_t)wall : 0;
        struct tm day;
        char when[32] = "";
        if (localtime_r(&at, &day)) strftime(when, sizeof when, "%Y-%m-%d %H:%M", &day);
        buf_addf(&b, "%zu  %s  ", i + 1, when);
        term_text(&b, json_string_value(text), json_string_length(text), false);
        rc = print_line(&b);
    }
    buf_free(&b);
    return rc;
}

static int print_json(const json_t *o) {
    struct buf b = {0};
    int rc = json_dump_line(&b, o);
    if (rc == 0) rc = print_line(&b);
    buf_free(&b);
    return rc;
}

/* The directory of a run: of its run.db where RUN is that. */
static int run_dir(const char *run, char **dir) {
    struct run_reader *r;
    TRY(run_reader_open(&r, run));
    *dir = xstrdup(run_reader_dir(r));
    run_reader_close(r);
    return 0;
}

int cmd_note(int argc, char **argv) {
    const char *operands[2] = {0};
    int n = 0;
    bool json = false;
    struct run_notes_change c = {0};
    const struct cmd_opt opts[] = {
        {"--tag", CMD_STR, &c.tags, "TAG[,TAG]", "give it tags"},
        {"--untag", CMD_STR, &c.untag, "TAG[,TAG]", "take tags away"},
        {"--remove", CMD_I64("int[1,1000]"), &c.remove, "N", "take note N away, by the number that is printed"},
        {"--json", CMD_FLAG, &json, NULL, "print them as one line of JSON"}};
    struct cmd_spec spec =
        CMD_SPEC(opts, "verlc note RUN [TEXT] [--tag TAG]",
                 "Adds a note or tags to a run, and prints those that it has. They are in RUN/notes.json; verlc\n"
                 "view shows them and finds runs by them. The run itself may go on meanwhile.");
    spec.operands = operands;
    spec.max_operands = 2;
    spec.n_operands = &n;
    const int answered = cmd_parse(&spec, argc, argv);
    TRY(answered);
    if (answered) return 0;
    if (n == 0) FAIL(ERR_INVAL, "verlc note: which run? verlc note RUN \"what there is to say\" --tag baseline");
    char *dir = NULL;
    json_t *o = NULL;
    c.text = n > 1 ? operands[1] : NULL;
    int rc = run_dir(operands[0], &dir);
    if (rc == 0 && (c.text || c.tags || c.untag || c.remove)) rc = run_notes_change(dir, &c);
    if (rc == 0) rc = run_notes_read(&o, dir);
    if (rc == 0) rc = json ? print_json(o) : print(o);
    json_decref(o);
    free(dir);
    return rc;
}
