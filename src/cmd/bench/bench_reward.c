/* bench_reward.c - `verlc bench reward`: how fast responses are scored, by a native grader or a user's function.
 *
 * Responses of one size and source, all submitted at once, as at the end of a rollout. What starting the Python
 * processes takes is not in the figure: each has answered before the clock starts. */
#include "cmd/bench/bench.h"

#include "base/buf.h"
#include "base/clock.h"
#include "base/err.h"
#include "cmd/cmd.h"
#include "reward/reward.h"

#include <stdio.h>
#include <stdlib.h>

struct reward_bench {
    struct reward_args args;
    const char *data_source;
    int64_t samples, bytes, workers, count[REWARD_N_STATUS];
    double sum;                   /* of the scores */
    char *first[REWARD_N_STATUS]; /* message of the first such result */
};

static const char sentence[] = "First we add the 12 apples of Monday to the 7 of Tuesday, so 12 + 7 = 19.\n";

/* Response i: some bytes of text that differ from sample to sample, and an answer line. */
static void write_response(const struct reward_bench *b, int64_t i, struct buf *text) {
    buf_reset(text);
    buf_addf(text, "Sample %lld. ", (long long)i);
    while ((int64_t)text->n < b->bytes) buf_adds(text, sentence);
    buf_addf(text, "#### %lld", (long long)(i % 2));
}

static int submit(const struct reward_bench *b, struct reward *r, int64_t n) {
    struct buf text = {0};
    json_t *truth = json_string("0"), *extra = json_pack("{s:s, s:i, s:s}", "split", "train", "index", 7, "question", sentence);
    int rc = 0;
    for (int64_t i = 0; i < n && rc == 0; i++) {
        write_response(b, i, &text);
        const struct reward_request q = {
            .data_source = b->data_source, .solution = text.p, .n_solution = text.n, .ground_truth = truth, .extra_info = extra};
        rc = reward_submit(r, &q, i);
    }
    json_decref(truth);
    json_decref(extra);
    buf_free(&text);
    return rc;
}

static int collect(struct reward_bench *b, struct reward *r, bool count) {
    while (reward_pending(r) > 0) {
        int64_t tag;
        struct reward_result out;
        const int rc = reward_poll(r, 1, &tag, &out);
        TRY(rc);
        if (rc == 0) continue;
        if (count) b->sum += out.score; /* 0 where there is none */
        if (count && b->count[out.status]++ == 0 && out.message) b->first[out.status] = xstrdup(out.message);
        reward_result_free(&out);
    }
    return 0;
}

static int measure(struct reward_bench *b, struct reward *r) {
    TRY(submit(b, r, b->workers));
    TRY(collect(b, r, false));
    const double t = clock_now();
    TRY(submit(b, r, b->samples));
    TRY(collect(b, r, true));
    const double s = clock_now() - t;
    json_t *line = json_pack("{s:s, s:I, s:I, s:I, s:f, s:f, s:f}", "subject", "reward", "samples", (json_int_t)b->samples, "bytes",
                             (json_int_t)b->bytes, "workers", (json_int_t)b->workers, "seconds", s, "ms_per_sample",
                             s * 1e3 / (double)b->samples, "sum", b->sum);
    for (int i = 0; i < REWARD_N_STATUS; i++) {
        const char *name = reward_status_name((enum reward_status)i);
        json_object_set_new(line, name, json_integer(b->count[i]));
        if (b->first[i]) json_object_set_new(line, "message", json_string(b->first[i]));
    }
    char *text = json_dumps(line, JSON_COMPACT | JSON_REAL_PRECISION(9));
    puts(text);
    free(text);
    json_decref(line);
    return 0;
}

int bench_reward(int argc, char **argv) {
    struct reward_bench b = {.data_source = "openai/gsm8k", .samples = 2000, .bytes = 2048, .workers = 1};
    const struct cmd_opt opts[] = {
        {"--path", CMD_STR, &b.args.path, "FILE", "Python file with a scorer; without: the native grader of --data-source"},
        {"--name", CMD_STR, &b.args.name, "NAME", "its function (compute_score)"},
        {"--python", CMD_STR, &b.args.python, "PYTHON", "what runs it"},
        {"--data-source", CMD_STR, &b.data_source, "NAME", "of all responses (openai/gsm8k)"},
        {"--samples", CMD_I64(CMD_COUNT), &b.samples, "N", "responses (2000)"},
        {"--bytes", CMD_I64("int[1,2^24]"), &b.bytes, "N", "of each response (2048)"},
        {"--workers", CMD_I64("int[1,256]"), &b.workers, "N", "helper processes (1)"},
        {"--max-concurrent", CMD_I64("int[1,2^16]"), &b.args.max_concurrent, "N", "calls of an async def in flight in each (256)"},
        {"--timeout", CMD_F64("float(0,1e6]"), &b.args.timeout_s, "SECONDS", "of one call (300)"},
    };
    const struct cmd_spec spec = CMD_SPEC(opts, "verlc bench reward [--path FILE] [options]",
                                          "Scores responses and prints milliseconds a sample, and how many ended how.");
    int rc = cmd_parse(&spec, argc, argv);
    if (rc != 0) return rc < 0 ? rc : 0;
    struct reward *r = NULL;
    b.args.n_workers = (int)b.workers;
    rc = reward_create(&r, &b.args);
    if (rc == 0) rc = measure(&b, r);
    reward_destroy(r);
    for (int i = 0; i < REWARD_N_STATUS; i++) free(b.first[i]);
    return rc;
}
