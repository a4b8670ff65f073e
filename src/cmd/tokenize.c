/* tokenize.c - `verlc tokenize`: JSONL of texts, messages or ids in; ids or text out.
 *
 * Reads standard input line by line and answers in order; needs no weights.  --bench
 * measures opening, encoding and decoding of a file instead. */
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

struct job {
    struct tokenizer *tok;
    struct chat_template *chat; /* --chat */
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

static int answer_decode(struct job *j, const json_t *in, json_t *out, const char *where) {
    const json_t *ids = json_object_get(in, "ids");
    bool skip = false;
    if (!json_is_array(ids)) FAIL(ERR_FORMAT, "%s: \"ids\" (a list of token ids) is missing", where);
    TRY(json_bool_opt(in, "skip_special_tokens", &skip, where));
    for (size_t i = 0; i < json_array_size(ids); i++) {
        const json_t *v = json_array_get(ids, i);
        const json_int_t id = json_integer_value(v);
        if (!json_is_integer(v) || id < 0 || id > INT32_MAX)
            FAIL(ERR_FORMAT, "%s: \"ids\": element %zu is not a token id", where, i);
        const int32_t id32 = (int32_t)id;
        text_ids_add(&j->ids, &id32, 1);
    }
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

int cmd_tokenize(int argc, char **argv) {
    const char *model = NULL, *bench_file = NULL;
    bool chat = false, decode = false;
    const struct cmd_opt opts[] = {
        {"--model", CMD_STR, &model, "DIR", "model directory or hub id, or a tokenizer.json"},
        {"--chat", CMD_FLAG, &chat, NULL, "lines are {\"messages\", \"add_generation_prompt\"}"},
        {"--decode", CMD_FLAG, &decode, NULL, "lines are {\"ids\", \"skip_special_tokens\"}"},
        {"--bench", CMD_STR, &bench_file, "FILE", "measure on the lines of FILE instead"},
    };
    const struct cmd_spec spec = CMD_SPEC(opts, "verlc tokenize --model DIR [--chat|--decode] < in.jsonl",
                                          "Reads one JSON object a line and writes one a line, in order:\n"
                                          "{\"text\", \"add_special_tokens\": true} -> {\"ids\"};\n"
                                          "--chat: {\"messages\", \"add_generation_prompt\"} -> {\"text\", \"ids\"};\n"
                                          "--decode: {\"ids\", \"skip_special_tokens\": false} -> {\"text\"}.");
    int rc = cmd_parse(&spec, argc, argv);
    if (rc != 0) return rc > 0 ? 0 : rc;
    if (!model) FAIL(ERR_INVAL, "--model is missing; usage: %s", spec.usage);
    if (chat && decode) FAIL(ERR_INVAL, "--chat and --decode exclude each other");
    struct job j = {.decode = decode};
    const struct watch t0 = watch_now();
    char *dir = NULL;
    if (!file_exists(model) && data_hub_id(model)) TRY(run_model_dir(model, false, &dir));
    rc = tokenizer_open(&j.tok, dir ? dir : model);
    free(dir);
    TRY(rc);
    if (bench_file) {
        rc = bench(j.tok, t0, bench_file);
    } else {
        rc = chat ? chat_template_create(&j.chat, j.tok) : 0;
        if (rc == 0) cmd_reads_stdin("requests, a JSON object a line, such as {\"text\": \"2 + 3 =\"}");
        if (rc == 0) rc = file_each_line("-", on_line, &j);
    }
    chat_template_destroy(j.chat);
    tokenizer_close(j.tok);
    text_ids_free(&j.ids);
    buf_free(&j.text);
    buf_free(&j.line);
    return rc;
}
