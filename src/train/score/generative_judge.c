/* generative_judge.c - see generative_judge.h. */
#include "train/score/generative_judge.h"

#include "base/buf.h"
#include "base/err.h"
#include "model/files/load.h"

#include <math.h>
#include <regex.h>
#include <stdlib.h>
#include <string.h>

struct opinion {
    int64_t tag;
    struct reward_result result;
};

struct judge {
    struct judge_args a;
    struct model *model;
    struct tokenizer *tok;
    struct chat_template *chat;
    struct rollout_decoder *decoder;
    struct rollout_engine *engine;
    void *block; /* the decoder's */
    size_t block_bytes;
    regex_t regex;
    bool has_regex;
    struct opinion *done; /* finished, in order */
    int64_t n_done, at_done, cap_done, n_running;
};

/* ---- opening ---- */

static struct rollout_decoder_args decoder_args(const struct judge_args *a, struct model *m) {
    const int64_t max_len = a->prompt_length + a->response_length;
    return (struct rollout_decoder_args){.model = m,
                                         .n_pages = a->max_seqs * ((max_len + ROLLOUT_PAGE_LEN - 1) / ROLLOUT_PAGE_LEN),
                                         .max_rows = a->max_rows,
                                         .max_seqs = a->max_seqs,
                                         .max_len = max_len,
                                         .max_burst = rollout_device_burst(a->dev)};
}

static struct model_open_args open_args(const struct judge_args *a) {
    return (struct model_open_args){
        .dir = a->dir, .act = a->act, .flags = MODEL_INFER, .max_len = a->prompt_length + a->response_length};
}

size_t judge_bytes(const struct model_config *c, const struct judge_args *a) {
    const struct model_open_args open = open_args(a);
    const struct rollout_decoder_args d = decoder_args(a, NULL);
    return model_open_bytes(c, a->dev, &open) + rollout_decoder_bytes(c, a->act, &d);
}

static void add_done(struct judge *j, int64_t tag, struct reward_result r) {
    if (j->at_done == j->n_done) j->at_done = j->n_done = 0;
    xgrow((void **)&j->done, &j->cap_done, j->n_done + 1, sizeof *j->done);
    j->done[j->n_done++] = (struct opinion){tag, r};
}

static struct reward_result failure(enum reward_status status, char *why) {
    return (struct reward_result){.status = status, .extra = json_object(), .message = why};
}

/* The last number that the expression finds. */
static bool find_score(const struct judge *j, const char *text, double *score) {
    regmatch_t m[2];
    bool found = false;
    for (const char *p = text; regexec(&j->regex, p, 2, m, p == text ? 0 : REG_NOTBOL) == 0;) {
        const regmatch_t *g = m[1].rm_so >= 0 ? &m[1] : &m[0];
        char *end, *number = xasprintf("%.*s", (int)(g->rm_eo - g->rm_so), p + g->rm_so);
        const double v = strtod(number, &end);
        if (end != number && isfinite(v)) {
            *score = v;
            found = true;
        }
        free(number);
        if (p[m[0].rm_eo] == '\0') break;
        p += m[0].rm_eo > 0 ? m[0].rm_eo : 1;
    }
    return found;
}

static int on_answer(void *arg, const struct rollout_sample *s) {
    struct judge *j = arg;
    struct buf raw = {0}, text = {0};
    int rc = tokenizer_decode(j->tok, s->ids, s->n, true, &raw);
    if (rc == 0) rc = text_utf8_repair(&text, raw.p ? raw.p : "", raw.n);
    buf_free(&raw);
    char *answer = buf_take(&text);
    if (rc == 0) {
        struct reward_result r = {.status = REWARD_SCORE};
        if (!find_score(j, answer, &r.score))
            r = failure(REWARD_UNPARSED,
                        xasprintf("the judge's answer has no match of reward.reward_model.score_regex: %.120s", answer));
        if (!r.extra) r.extra = json_object();
        json_object_set_new(r.extra, "judgement", json_string(answer));
        add_done(j, (int64_t)(intptr_t)s->user, r);
        j->n_running--;
    }
    free(answer);
    return rc;
}

static int check_args(struct judge *j) {
    char why[128];
    if (!strstr(j->a.prompt_template, "{response}"))
        FAIL(ERR_INVAL, "reward.reward_model.prompt_template has no {response}: the judge would not see what it judges");
    const int rc = regcomp(&j->regex, j->a.score_regex, REG_EXTENDED);
    if (rc == 0) {
        j->has_regex = true;
        return 0;
    }
    regerror(rc, &j->regex, why, sizeof why);
    FAIL(ERR_INVAL, "reward.reward_model.score_regex=%s: %s", j->a.score_regex, why);
}

static int open_all(struct judge *j) {
    const struct model_open_args open = open_args(&j->a);
    TRY(check_args(j));
    TRY(model_open(&j->model, j->a.dev, &open));
    TRY(tokenizer_open(&j->tok, j->a.dir));
    const int rc = chat_template_create(&j->chat, j->tok);
    if (rc < 0) return err_wrap(rc, "the judge's chat template");
    struct rollout_decoder_args d = decoder_args(&j->a, j->model);
    j->block_bytes = rollout_decoder_bytes(&j->model->cfg, j->a.act, &d);
    TRY(dev_alloc(j->a.dev, j->block_bytes, &j->block));
    TRY(dev_zero(j->a.dev, j->block, j->block_bytes)); /* the memory is really there, now rather than in mid-run */
    d.block = j->block;
    TRY(rollout_decoder_open(&j->decoder, &d));
    const struct rollout_model m = rollout_decoder_model(j->decoder);
    const struct rollout_config c = {
        .max_rows = j->a.max_rows, .max_seqs = j->a.max_seqs, .tok = j->tok, .done = on_answer, .done_arg = j};
    return rollout_create(&j->engine, &m, &c);
}

int judge_create(struct judge **out, const struct judge_args *a) {
    struct judge *j = xcalloc(1, sizeof *j);
    j->a = *a;
    const int rc = open_all(j);
    if (rc < 0) judge_destroy(j);
    else *out = j;
    return rc;
}

void judge_drop(struct judge *j) {
    rollout_cancel_all(j->engine);
    for (int64_t i = j->at_done; i < j->n_done; i++) reward_result_free(&j->done[i].result);
    j->n_done = j->at_done = j->n_running = 0;
}

void judge_destroy(struct judge *j) {
    if (!j) return;
    if (j->engine) judge_drop(j);
    rollout_destroy(j->engine);
    rollout_decoder_close(j->decoder);
    if (j->block) dev_free(j->a.dev, j->block, j->block_bytes);
    chat_template_destroy(j->chat);
    tokenizer_close(j->tok);
    model_close(j->model);
    if (j->has_regex) regfree(&j->regex);
    free(j->done);
    free(j);
}

/* ---- asking ---- */

/* The content of the last message, or "". */
static const char *question(const json_t *messages) {
    const size_t n = json_array_size(messages);
    const char *s = n ? json_string_value(json_object_get(json_array_get(messages, n - 1), "content")) : NULL;
    return s ? s : "";
}

/* The template with its three names filled in; what is filled in is not looked at again. */
static char *fill(const char *template, const struct judge_sample *s) {
    char *truth = json_is_string(s->ground_truth) ? xstrdup(json_string_value(s->ground_truth))
                  : s->ground_truth               ? json_dumps(s->ground_truth, JSON_ENCODE_ANY)
                                                  : NULL;
    const char *const names[] = {"{question}", "{response}", "{ground_truth}"};
    const char *const values[] = {question(s->messages), s->response, truth ? truth : ""};
    struct buf out = {0};
    for (const char *p = template; *p;) {
        int k = 0;
        while (k < 3 && strncmp(p, names[k], strlen(names[k])) != 0) k++;
        if (k < 3) {
            buf_adds(&out, values[k]);
            p += strlen(names[k]);
        } else {
            buf_addc(&out, *p++);
        }
    }
    free(truth);
    return buf_take(&out);
}

static int submit_ids(struct judge *j, const struct text_ids *ids, const struct judge_sample *s, int64_t tag) {
    int32_t stop[17];
    int64_t n_stop = 0;
    for (int i = 0; i < j->model->cfg.n_eos; i++) stop[n_stop++] = (int32_t)j->model->cfg.eos[i];
    if (tokenizer_eos(j->tok) >= 0) stop[n_stop++] = tokenizer_eos(j->tok);
    const struct rollout_request q = {.prompt = ids->p,
                                      .n_prompt = ids->n,
                                      .n = 1,
                                      .max_tokens = j->a.response_length,
                                      .temperature = j->a.temperature,
                                      .top_p = j->a.top_p,
                                      .repetition_penalty = 1,
                                      .top_k = j->a.top_k,
                                      .seed = s->seed,
                                      .uid = s->uid,
                                      .stop_ids = stop,
                                      .n_stop_ids = n_stop,
                                      .user = (void *)(intptr_t)tag};
    TRY(rollout_submit(j->engine, &q, NULL));
    j->n_running++;
    return 0;
}

int judge_submit(struct judge *j, const struct judge_sample *s, int64_t tag) {
    struct text_ids ids = {0};
    char *text = fill(j->a.prompt_template, s);
    json_t *request = json_pack("{s:[{s:s, s:s}], s:b}", "messages", "role", "user", "content", text, "add_generation_prompt", 1);
    CHECK(request != NULL); /* texts are UTF-8 */
    int rc = chat_template_encode(j->chat, request, NULL, &ids);
    if (rc == ERR_FORMAT) {
        add_done(j, tag, failure(REWARD_CRASH, xasprintf("the judge's chat template: %s", err_msg())));
        rc = 0;
    } else if (rc == 0 && (ids.n == 0 || ids.n > j->a.prompt_length)) {
        add_done(j, tag,
                 failure(REWARD_MISSING, xasprintf("the judge's prompt has %lld tokens, "
                                                   "reward.reward_model.rollout.prompt_length is %lld",
                                                   (long long)ids.n, (long long)j->a.prompt_length)));
    } else if (rc == 0) {
        rc = submit_ids(j, &ids, s, tag);
    }
    json_decref(request);
    text_ids_free(&ids);
    free(text);
    return rc;
}

int judge_step(struct judge *j) { return j->n_running > 0 ? rollout_step(j->engine) : 0; }

int judge_poll(struct judge *j, int64_t *tag, struct reward_result *out) {
    if (j->at_done == j->n_done) return 0;
    *tag = j->done[j->at_done].tag;
    *out = j->done[j->at_done++].result;
    return 1;
}

int64_t judge_pending(const struct judge *j) { return j->n_running + j->n_done - j->at_done; }
