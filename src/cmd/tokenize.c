/* tokenize.c - `verlc tokenize`: JSONL of texts, messages or ids in; ids or text out.
 *
 * Reads standard input line by line and answers in order; needs no weights.  --bench
 * measures opening, encoding and decoding of a file instead. */
#include "agent/continuous_tokens/continuous_tokens.h"
#include "agent/tool_parser/tool_parser.h"
#include "base/clock.h"
#include "base/err.h"
#include "base/file.h"
#include "base/json.h"
#include "cmd/cmd.h"
#include "data/data.h"
#include "run/directories.h"
#include "text/text.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

enum { CONFIG_BYTES = 1 << 24 };

struct job {
    struct tokenizer *tok;
    struct chat_template *chat;           /* --chat */
    struct continuous_tokens *continuous; /* --continuous */
    const struct tool_parser *parser;     /* --tool-calls */
    bool decode;
    struct text_ids ids;
    struct buf text, line;
};

static int print_line(struct job *j, const json_t *answer) {
    buf_reset(&j->line);
    TRY(json_dump_line(&j->line, answer));
    TRY(cmd_print_line(j->line.p, j->line.n));
    return cmd_flush(); /* a caller that writes line by line waits for it */
}

static int answer_text(struct job *j, const json_t *in, json_t *out, const char *where) {
    const char *text;
    bool special = true;
    TRY(json_str(in, "text", &text, where));
    TRY(json_bool_opt(in, "add_special_tokens", &special, where));
    TRY(tokenizer_encode(j->tok, text, json_string_length(json_object_get(in, "text")), special, &j->ids));
    json_object_set_new(out, "ids", json_i32_array(j->ids.p, j->ids.n));
    return 0;
}

static int answer_chat(struct job *j, const json_t *in, json_t *out, const char *where) {
    bool prompt = false;
    if (!json_is_array(json_object_get(in, "messages"))) FAIL(ERR_FORMAT, "%s: \"messages\" (a list) is missing", where);
    TRY(json_bool_opt(in, "add_generation_prompt", &prompt, where));
    const int rc = chat_template_encode(j->chat, in, &j->text, &j->ids);
    if (rc < 0) return err_wrap(rc, "%s", where);
    json_object_set_new(out, "text", json_stringn(j->text.p ? j->text.p : "", j->text.n));
    json_object_set_new(out, "ids", json_i32_array(j->ids.p, j->ids.n));
    return 0;
}

/* The ids in a line, appended to j->ids. */
static int read_ids(struct job *j, const json_t *ids, const char *where) {
    if (!json_is_array(ids)) FAIL(ERR_FORMAT, "%s: \"ids\" (a list of token ids) is missing", where);
    for (size_t i = 0; i < json_array_size(ids); i++) {
        const json_t *v = json_array_get(ids, i);
        const json_int_t id = json_integer_value(v);
        if (!json_is_integer(v) || id < 0 || id > INT32_MAX)
            FAIL(ERR_FORMAT, "%s: \"ids\": element %zu is not a token id", where, i);
        const int32_t id32 = (int32_t)id;
        text_ids_add(&j->ids, &id32, 1);
    }
    return 0;
}

/* A refusal is an answer: it is of one conversation. */
static int refusal(json_t *out, int rc) {
    if (rc != ERR_INPUT && rc != ERR_FORMAT && rc != ERR_UNSUPPORTED) return rc;
    json_object_set_new(out, "error", json_string(err_msg()));
    return 0;
}

static int answer_continuous(struct job *j, const json_t *in, json_t *out, const char *where) {
    const json_t *messages = json_object_get(in, "messages"), *tools = json_object_get(in, "tools");
    struct continuous_junction added = {0};
    int64_t n_old = 0;
    if (!json_is_array(messages)) FAIL(ERR_FORMAT, "%s: \"messages\" (a list) is missing", where);
    TRY(json_i64_opt(in, "n_old", &n_old, where));
    if (n_old < 0 || n_old > (int64_t)json_array_size(messages))
        FAIL(ERR_FORMAT, "%s: \"n_old\" is not a number of messages", where);
    tools = json_array_size(tools) > 0 ? tools : NULL;
    if (n_old == 0) {
        const int rc = continuous_tokens_begin(j->continuous, messages, tools, &j->ids);
        if (rc < 0) return refusal(out, rc);
        json_object_set_new(out, "ids", json_i32_array(j->ids.p, j->ids.n));
        return 0;
    }
    TRY(read_ids(j, json_object_get(in, "ids"), where));
    const int rc = continuous_tokens_append(j->continuous, messages, n_old, tools, &j->ids, &added);
    if (rc < 0) return refusal(out, rc);
    json_object_set_new(out, "n_removed", json_integer(added.n_removed));
    json_object_set_new(out, "ids", json_i32_array(added.added.p, added.added.n));
    text_ids_free(&added.added);
    return 0;
}

static json_t *call_json(const struct tool_call *c) {
    return json_pack("{s:s?, s:s, s:s}", "id", c->id, "name", c->name, "arguments", c->arguments);
}

static json_t *stop_ids_json(const struct job *j) {
    json_t *ids = json_array();
    for (const char *const *name = tool_parser_stop_tokens(j->parser); *name; name++) {
        const int32_t id = tokenizer_id(j->tok, *name);
        if (id >= 0) json_array_append_new(ids, json_integer(id));
    }
    return ids;
}

static int answer_calls(struct job *j, const json_t *in, json_t *out, const char *where) {
    struct tool_turn turn = {0};
    TRY(read_ids(j, json_object_get(in, "ids"), where));
    TRY(tool_parser_text(j->parser, j->tok, j->ids.p, j->ids.n, &j->text));
    TRY(tool_parser_parse(j->parser, j->text.p ? j->text.p : "", j->text.n, json_object_get(in, "tools"), &turn));
    json_t *calls = json_array();
    for (int64_t i = 0; i < turn.n_calls; i++) json_array_append_new(calls, call_json(&turn.calls[i]));
    json_object_set_new(out, "content", json_stringn(turn.content.p ? turn.content.p : "", turn.content.n));
    json_object_set_new(out, "calls", calls);
    json_object_set_new(out, "stop_token_ids", stop_ids_json(j));
    tool_turn_free(&turn);
    return 0;
}

static int answer_decode(struct job *j, const json_t *in, json_t *out, const char *where) {
    bool skip = false;
    TRY(read_ids(j, json_object_get(in, "ids"), where));
    TRY(json_bool_opt(in, "skip_special_tokens", &skip, where));
    TRY(tokenizer_decode(j->tok, j->ids.p, j->ids.n, skip, &j->text));
    json_object_set_new(out, "text", json_stringn(j->text.p ? j->text.p : "", j->text.n));
    return 0;
}

static int on_line(void *arg, char *line, size_t n, int64_t no) {
    struct job *j = arg;
    char where[48];
    json_t *in, *out;
    int rc;
    snprintf(where, sizeof where, "stdin:%lld", (long long)no);
    if (n == 0) return 0;
    TRY(json_parse(&in, line, n, where));
    out = json_object();
    j->ids.n = 0;
    buf_reset(&j->text);
    if (!json_is_object(in)) rc = err_set(ERR_FORMAT, __FILE__, __LINE__, "%s: not a JSON object", where);
    else if (j->chat) rc = answer_chat(j, in, out, where);
    else if (j->continuous) rc = answer_continuous(j, in, out, where);
    else if (j->parser) rc = answer_calls(j, in, out, where);
    else if (j->decode) rc = answer_decode(j, in, out, where);
    else rc = answer_text(j, in, out, where);
    if (rc == 0) rc = print_line(j, out);
    json_decref(in);
    json_decref(out);
    return rc;
}

/* ---- --bench ------------------------------------------------------------------ */

struct corpus {
    struct buf text;
    int64_t *end; /* of each line in text */
    int64_t n, cap;
};

static int on_corpus_line(void *arg, char *line, size_t n, int64_t no) {
    struct corpus *c = arg;
    (void)no;
    TRY(buf_add(&c->text, line, n));
    xgrow((void **)&c->end, &c->cap, c->n + 1, sizeof *c->end);
    c->end[c->n++] = (int64_t)c->text.n;
    return 0;
}

/* Wall and processor seconds: on a busy machine only the latter says what the code does. */
struct watch {
    double wall, cpu;
};
static struct watch watch_now(void) {
    struct timespec t;
    clock_gettime(CLOCK_PROCESS_CPUTIME_ID, &t);
    return (struct watch){clock_now(), (double)t.tv_sec + 1e-9 * (double)t.tv_nsec};
}
static void print_rate(const char *what, struct watch t0, int64_t n_tokens) {
    const struct watch t1 = watch_now();
    const double wall = t1.wall - t0.wall, cpu = t1.cpu - t0.cpu;
    printf("%-8s %.3f s (%.3f s of processor)", what, wall, cpu);
    if (n_tokens) printf(": %.2f M tokens/s (%.2f)", (double)n_tokens / wall / 1e6, (double)n_tokens / cpu / 1e6);
    printf("\n");
}

/* One pass over the lines; the first one also fills the word cache. */
static int bench_pass(const struct tokenizer *tok, const struct corpus *c, struct text_ids *ids) {
    ids->n = 0;
    for (int64_t i = 0; i < c->n; i++) {
        const int64_t lo = i ? c->end[i - 1] : 0;
        TRY(tokenizer_encode(tok, c->text.p + lo, (size_t)(c->end[i] - lo), false, ids));
    }
    return 0;
}

static int bench(const struct tokenizer *tok, struct watch opened, const char *path) {
    struct corpus c = {0};
    struct text_ids ids = {0};
    struct buf out = {0};
    int rc;
    print_rate("open", opened, 0);
    TRYG(file_each_line(path, on_corpus_line, &c), done);
    if (c.text.n == 0) FAILG(done, ERR_INPUT, "%s: no text to measure with", path);
    for (int pass = 0; pass < 3; pass++) {
        const struct watch t0 = watch_now();
        TRYG(bench_pass(tok, &c, &ids), done);
        print_rate("encode", t0, ids.n);
    }
    const struct watch t0 = watch_now();
    TRYG(tokenizer_decode(tok, ids.p, ids.n, false, &out), done);
    print_rate("decode", t0, ids.n);
    printf("%lld lines, %zu bytes, %lld tokens; one thread\n", (long long)c.n, c.text.n, (long long)ids.n);
done:
    free(c.end);
    buf_free(&c.text);
    buf_free(&out);
    text_ids_free(&ids);
    return rc;
}

/* What --continuous needs of the model: its family, and variables of the template. */
static int open_continuous(struct job *j, const char *dir, const char *kwargs_text) {
    json_t *config = NULL, *kwargs = NULL;
    char *path = file_join(dir, "config.json");
    int rc = json_load(&config, path, CONFIG_BYTES);
    if (rc == 0 && kwargs_text) rc = json_parse(&kwargs, kwargs_text, strlen(kwargs_text), "--template-kwargs");
    const char *type = json_string_value(json_object_get(config, "model_type"));
    if (rc == 0) rc = continuous_tokens_create(&j->continuous, j->tok, type ? type : "", kwargs);
    json_decref(config);
    json_decref(kwargs);
    free(path);
    return rc < 0 ? err_pass(rc, __FILE__, __LINE__) : 0;
}

static int answer_lines(struct job *j, bool chat) {
    if (chat) TRY(chat_template_create(&j->chat, j->tok));
    cmd_reads_stdin("requests, a JSON object a line, such as {\"text\": \"2 + 3 =\"}");
    return file_each_line("-", on_line, j);
}

int cmd_tokenize(int argc, char **argv) {
    const char *model = NULL, *bench_file = NULL, *kwargs = NULL, *format = NULL;
    bool chat = false, decode = false, continuous = false;
    const struct cmd_opt opts[] = {
        {"--model", CMD_STR, &model, "DIR", "model directory or hub id, or a tokenizer.json"},
        {"--chat", CMD_FLAG, &chat, NULL, "lines are {\"messages\", \"add_generation_prompt\"}"},
        {"--decode", CMD_FLAG, &decode, NULL, "lines are {\"ids\", \"skip_special_tokens\"}"},
        {"--continuous", CMD_FLAG, &continuous, NULL, "lines are {\"messages\", \"n_old\", \"ids\", \"tools\"}"},
        {"--tool-calls", CMD_STR, &format, "FORMAT", "lines are {\"ids\", \"tools\"} of a turn; multi_turn.format"},
        {"--template-kwargs", CMD_STR, &kwargs, "JSON", "with --continuous: variables of the chat template"},
        {"--bench", CMD_STR, &bench_file, "FILE", "measure on the lines of FILE instead"},
    };
    const struct cmd_spec spec =
        CMD_SPEC(opts, "verlc tokenize --model DIR [--chat|--decode|--continuous|--tool-calls FORMAT] < in.jsonl",
                 "Reads one JSON object a line and writes one a line, in order:\n"
                 "{\"text\", \"add_special_tokens\": true} -> {\"ids\"};\n"
                 "--chat: {\"messages\", \"add_generation_prompt\"} -> {\"text\", \"ids\"};\n"
                 "--decode: {\"ids\", \"skip_special_tokens\": false} -> {\"text\"};\n"
                 "--continuous: {\"messages\", \"tools\"} -> {\"ids\"} of the first prompt, and with\n"
                 "\"n_old\" and \"ids\" of the stream so far -> {\"n_removed\", \"ids\"} that the messages after\n"
                 "the first n_old append (docs/agents.md);\n"
                 "--tool-calls: {\"ids\", \"tools\"} -> {\"content\", \"calls\", \"stop_token_ids\"}.");
    int rc = cmd_parse(&spec, argc, argv);
    if (rc != 0) return rc > 0 ? 0 : rc;
    if (!model) FAIL(ERR_INVAL, "--model is missing; usage: %s", spec.usage);
    if (chat + decode + continuous + (format != NULL) > 1)
        FAIL(ERR_INVAL, "--chat, --decode, --continuous and --tool-calls exclude each other");
    struct job j = {.decode = decode, .parser = format ? tool_parser_find(format) : NULL};
    if (format && !j.parser) FAIL(ERR_INVAL, "--tool-calls %s: the formats are %s", format, tool_parser_names());
    const struct watch t0 = watch_now();
    char *dir = NULL;
    if (!file_exists(model) && data_hub_id(model)) TRY(run_model_dir(model, false, &dir));
    rc = tokenizer_open(&j.tok, dir ? dir : model);
    if (rc == 0 && continuous) rc = open_continuous(&j, dir ? dir : model, kwargs);
    free(dir);
    if (rc == 0) rc = bench_file ? bench(j.tok, t0, bench_file) : answer_lines(&j, chat);
    continuous_tokens_destroy(j.continuous);
    chat_template_destroy(j.chat);
    tokenizer_close(j.tok);
    text_ids_free(&j.ids);
    buf_free(&j.text);
    buf_free(&j.line);
    return rc;
}
