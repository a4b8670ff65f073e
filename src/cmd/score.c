/* score.c - verlc score: log-probs and entropies of given token ids.
 *
 * All requests are read first: the longest one fixes the buffers (and the
 * frequencies of dynamic rope scaling); then they are packed into batches.
 * Invariant: an answer does not depend on the other lines. */
#include "cmd/cmd.h"

#include "base/buf.h"
#include "base/err.h"
#include "base/file.h"
#include "base/json.h"
#include "base/encoding/number.h"
#include "model/files/load.h"
#include "model/forward.h"
#include "model/lora/lora.h"
#include "run/directories.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { BATCH_ROWS = 4096 };

struct request {
    int32_t *ids;
    int64_t n, start; /* response_start */
};
struct score {
    struct request *rq;
    int64_t n, cap, longest, vocab;
};

/* ---- input ---- */

static int read_request(void *arg, char *line, size_t n, int64_t no) {
    struct score *s = arg;
    char where[48];
    json_t *o = NULL;
    struct request r = {0};
    int rc = 0;
    snprintf(where, sizeof where, "stdin:%lld", (long long)no);
    TRYG(json_parse(&o, line, n, where), out);
    if (!json_is_object(o)) FAILG(out, ERR_FORMAT, "%s: not a JSON object", where);
    const json_t *ids = json_object_get(o, "ids");
    if (!json_is_array(ids)) FAILG(out, ERR_FORMAT, "%s: \"ids\" is not a list of token ids", where);
    r.n = (int64_t)json_array_size(ids);
    r.ids = xmalloc((size_t)r.n * sizeof *r.ids);
    for (int64_t i = 0; i < r.n; i++) {
        const json_t *v = json_array_get(ids, (size_t)i);
        const int64_t id = json_is_integer(v) ? (int64_t)json_integer_value(v) : -1;
        if (id < 0 || id >= s->vocab)
            FAILG(out, ERR_FORMAT, "%s: ids[%lld] is not a token id of this model (0 .. %lld)", where, (long long)i,
                  (long long)s->vocab - 1);
        r.ids[i] = (int32_t)id;
    }
    TRYG(json_i64(o, "response_start", &r.start, where), out);
    if (r.start < 1 || r.start > r.n)
        FAILG(out, ERR_FORMAT, "%s: \"response_start\" is %lld, expected 1 .. %lld (the number of ids)", where, (long long)r.start,
              (long long)r.n);
    xgrow((void **)&s->rq, &s->cap, s->n + 1, sizeof *s->rq);
    s->rq[s->n++] = r;
    if (r.n > s->longest) s->longest = r.n;
    r.ids = NULL;
out:
    free(r.ids);
    json_decref(o);
    return rc;
}

/* ---- a batch ---- */

struct scorer {
    const char *adapter; /* NULL: none */
    struct model *m;
    struct model_acts *acts;
    int64_t max_rows;
    float inv_temp;
    int32_t *dev_ints; /* ids, pos, slots (max_rows each), q_start, pos0, kv_start (max_rows + 1 each) */
    size_t dev_bytes;
    int32_t *host, *row, *target;
    float *temp, *logp, *entropy;
};

static int scorer_open(struct scorer *s, struct dev *dev, const struct model_open_args *a, int64_t max_rows, double temperature) {
    TRY(model_open(&s->m, dev, a));
    if (s->adapter) TRY(model_lora_load(s->m, s->adapter));
    void *p = NULL;
    const size_t rows = (size_t)max_rows;
    s->max_rows = max_rows;
    s->inv_temp = (float)(1.0 / temperature);
    s->dev_bytes = (6 * rows + 3) * sizeof(int32_t);
    TRY(dev_alloc(dev, s->dev_bytes, &p));
    s->dev_ints = p;
    s->host = xcalloc(6 * rows + 3, sizeof(int32_t));
    s->row = xmalloc(rows * sizeof(int32_t));
    s->target = xmalloc(rows * sizeof(int32_t));
    s->temp = xmalloc(rows * sizeof(float));
    s->logp = xmalloc(rows * sizeof(float));
    s->entropy = xmalloc(rows * sizeof(float));
    return model_acts_create(&s->acts, s->m, max_rows, MODEL_KEEP_NONE, NULL);
}

static void scorer_close(struct scorer *s) {
    if (!s->m) return;
    model_acts_destroy(s->acts);
    dev_free(s->m->dev, s->dev_ints, s->dev_ints ? s->dev_bytes : 0);
    model_close(s->m);
    free(s->host);
    free(s->row);
    free(s->target);
    free(s->temp);
    free(s->logp);
    free(s->entropy);
}

static int score_batch(struct scorer *s, const struct request *rq, int64_t n) {
    const int64_t cap = s->max_rows;
    int32_t *ids = s->host, *pos = ids + cap, *slots = pos + cap, *q_start = slots + cap;
    int64_t r = 0, k = 0, longest = 0;
    for (int64_t i = 0; i < n; i++) {
        q_start[i] = (int32_t)r;
        if (rq[i].n > longest) longest = rq[i].n;
        for (int64_t t = 0; t < rq[i].n; t++, r++) {
            ids[r] = rq[i].ids[t];
            pos[r] = (int32_t)t;
            slots[r] = (int32_t)r;
            if (t < rq[i].start) continue;
            s->row[k] = (int32_t)(r - 1);
            s->target[k] = rq[i].ids[t];
            s->temp[k++] = s->inv_temp;
        }
    }
    q_start[n] = (int32_t)r;
    memcpy(q_start + 2 * (cap + 1), q_start, (size_t)n * sizeof *q_start); /* keys lie where the rows do; pos0 is 0 */
    TRY(dev_copy_in(s->m->dev, s->dev_ints, s->host, s->dev_bytes));
    int32_t *d = s->dev_ints, *d_q = d + 3 * cap;
    const struct model_batch b = {
        .n_rows = r,
        .ids = tensor_1d(d, DT_I32, r),
        .pos = tensor_1d(d + cap, DT_I32, r),
        .slots = tensor_1d(d + 2 * cap, DT_I32, r),
        .seqs = {.n = n,
                 .max_q = longest,
                 .max_kv = longest,
                 .q_start = tensor_1d(d_q, DT_I32, n + 1),
                 .pos0 = tensor_1d(d_q + cap + 1, DT_I32, n),
                 .kv_start = tensor_1d(d_q + 2 * (cap + 1), DT_I32, n)},
    };
    const struct model_logp_args l = {
        .n = k, .row = s->row, .target = s->target, .inv_temp = s->temp, .logp = s->logp, .entropy = s->entropy};
    TRY(model_forward(s->m, &b, s->acts));
    return model_logp(s->m, s->acts, &l);
}

/* ---- output ---- */

static int print_answer(const float *logp, const float *entropy, int64_t n, int64_t no) {
    struct buf b = {0};
    int rc = 0;
    json_t *lp = json_array(), *en = json_array();
    for (int64_t i = 0; i < n; i++) {
        if (!isfinite(logp[i]) || !isfinite(entropy[i]))
            FAILG(out, ERR_NUMERIC, "request %lld: log-prob %lld is not finite", (long long)no + 1, (long long)i);
        json_array_append_new(lp, json_real(number_of_f32(logp[i])));
        json_array_append_new(en, json_real(number_of_f32(entropy[i])));
    }
    json_t *o = json_pack("{s:O, s:O}", "logp", lp, "entropy", en);
    rc = json_dump_line(&b, o);
    json_decref(o);
    if (rc == 0) rc = cmd_print_line(b.p, b.n);
out:
    json_decref(lp);
    json_decref(en);
    buf_free(&b);
    return rc;
}

static int score_all(struct scorer *c, const struct score *s) {
    for (int64_t lo = 0, hi; lo < s->n; lo = hi) {
        int64_t rows = 0, at = 0;
        for (hi = lo; hi < s->n && rows + s->rq[hi].n <= c->max_rows; hi++) rows += s->rq[hi].n;
        TRY(score_batch(c, s->rq + lo, hi - lo));
        for (int64_t i = lo; i < hi; i++) {
            const int64_t n = s->rq[i].n - s->rq[i].start;
            TRY(print_answer(c->logp + at, c->entropy + at, n, i));
            at += n;
        }
    }
    return 0;
}

/* ---- the command ---- */

int cmd_score(int argc, char **argv) {
    const char *model = NULL, *adapter = NULL, *dtype = "fp32", *device = "auto";
    double temperature = 1;
    int64_t threads = 0;
    const struct cmd_opt opts[] = {
        {"--model", CMD_STR, &model, "DIR", "Hugging Face model directory"},
        {"--adapter", CMD_STR, &adapter, "DIR", "peft adapter to put on it"},
        {"--temperature", CMD_F64("float[1e-6,1e6]"), &temperature, "T", "logits are divided by it (1)"},
        {"--dtype", CMD_STR, &dtype, "fp32|bf16", "compute dtype (fp32)"},
        {"--device", CMD_STR, &device, "NAME", CMD_DEVICE_HELP},
        {"--threads", CMD_I64(CMD_THREADS), &threads, "N", "threads (all)"},
    };
    const struct cmd_spec spec =
        CMD_SPEC(opts, "verlc score --model DIR [options] < requests.jsonl",
                 "{\"ids\": [...], \"response_start\": N} -> {\"logp\": [...], \"entropy\": [...]}, a line each.\n"
                 "logp[k] belongs to ids[response_start + k].");
    enum dtype act;
    struct model_config c = {0};
    struct dev dev = {0};
    struct score s = {0};
    struct scorer scorer = {0};
    char *dir = NULL;
    int rc = cmd_parse(&spec, argc, argv);
    if (rc != 0) return rc < 0 ? rc : 0;
    if (!model) FAIL(ERR_INVAL, "--model is missing; usage: %s", spec.usage);
    TRY(cmd_compute_dtype(dtype, &act));
    TRYG(run_model_dir(model, true, &dir), out);
    TRYG(model_config_load(&c, dir), out);
    s.vocab = c.vocab;
    cmd_reads_stdin("requests, a JSON object a line, such as {\"ids\": [5, 9, 7], \"response_start\": 1}");
    TRYG(file_each_line("-", read_request, &s), out);
    if (s.n == 0) goto out;
    TRYG(dev_open_named(&dev, device, (int)threads, NULL), out);
    const struct model_open_args a = {.dir = dir, .act = act, .flags = MODEL_INFER, .max_len = s.longest};
    scorer.adapter = adapter;
    TRYG(scorer_open(&scorer, &dev, &a, s.longest > BATCH_ROWS ? s.longest : BATCH_ROWS, temperature), out);
    TRYG(score_all(&scorer, &s), out);
out:
    scorer_close(&scorer);
    dev_close(&dev);
    for (int64_t i = 0; i < s.n; i++) free(s.rq[i].ids);
    free(s.rq);
    free(dir);
    model_config_free(&c);
    return rc;
}
