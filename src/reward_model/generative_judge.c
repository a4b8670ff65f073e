/* generative_judge.c - see generative_judge.h. */
#include "reward_model/generative_judge.h"

#include "base/encoding/utf8.h"
#include "base/err.h"
#include "base/json.h"
#include "model/files/load.h"
#include "reward_model/scoring_ranks.h"

#define PCRE2_CODE_UNIT_WIDTH 8
#include <math.h>
#include <pcre2.h>
#include <stdlib.h>
#include <string.h>

enum { SAID = 120 }; /* bytes of an answer in a message */

struct judged {
    int64_t tag;
    struct reward_result result;
};

struct judge {
    struct judge_args a;
    struct model *model;        /* of which passes are made */
    struct model *own;          /* the same, where this rank has it whole */
    struct scoring_ranks group; /* else */
    struct request_list asked;  /* what the other ranks of the group do not have yet */
    struct tokenizer *tok;
    struct chat_template *chat;
    struct decoder *decoder;
    struct engine *engine;
    void *block; /* the decoder's */
    size_t block_bytes;
    pcre2_code *regex;
    pcre2_match_data *match;
    struct judged *done; /* finished, in order */
    int64_t n_done, at_done, cap_done, n_running;
};

/* ---- opening ---- */

static struct decoder_args decoder_args(const struct judge_args *a, const struct model_config *c) {
    const struct decoder_args limits = {
        .max_seqs = a->max_seqs, .max_rows = a->max_rows, .max_len = a->prompt_length + a->response_length};
    return decoder_size(a->dev, c, a->act, &limits, SIZE_MAX);
}

static struct model_open_args open_args(const struct judge_args *a) {
    return (struct model_open_args){
        .dir = a->dir, .act = a->act, .flags = MODEL_INFER, .max_len = a->prompt_length + a->response_length};
}

static struct split_model_args split_args(const struct judge_args *a) {
    const struct model_open_args o = open_args(a);
    return (struct split_model_args){.dev = a->dev, .dir = o.dir, .act = o.act, .max_len = o.max_len, .size = a->together};
}

size_t judge_bytes(const struct model_config *c, const struct judge_args *a) {
    const struct model_open_args open = open_args(a);
    const struct split_model_args split = split_args(a);
    const struct model_config part = model_tp_config(c, -1, a->together > 1 ? a->together : 1);
    const struct decoder_args d = decoder_args(a, &part);
    size_t weights;
    if (a->together <= 1) weights = model_open_bytes(c, a->dev, &open);
    else CHECK(split_model_bytes(&split, c, decoder_most_rows(&d), &weights) == 0); /* without an adapter it reads no file */
    const size_t block = decoder_bytes(&part, a->act, &d), room = a->together > 1 ? model_file_room(c, a->dev, a->act) : 0;
    return weights + (room > block ? room : block); /* one before the other */
}

static void add_done(struct judge *j, int64_t tag, struct reward_result r) {
    if (j->at_done == j->n_done) j->at_done = j->n_done = 0;
    xgrow((void **)&j->done, &j->cap_done, j->n_done + 1, sizeof *j->done);
    j->done[j->n_done++] = (struct judged){tag, r};
}

static struct reward_result failure(enum reward_status status, char *why) {
    return (struct reward_result){.status = status, .extra = json_object(), .message = why};
}

/* The last number that the expression finds. */
static bool find_score(const struct judge *j, const char *text, size_t n, double *score) {
    const PCRE2_SIZE *at = pcre2_get_ovector_pointer(j->match);
    bool found = false;
    /* where the matcher reaches its limits there is no match */
    for (size_t from = 0; from <= n && pcre2_match(j->regex, (PCRE2_SPTR)text, n, from, 0, j->match, NULL) > 0;) {
        const int group = pcre2_get_ovector_count(j->match) > 1 && at[2] != PCRE2_UNSET ? 2 : 0;
        char *number = xstrndup(text + at[group], at[group + 1] - at[group]), *end;
        const double v = strtod(number, &end);
        if (end != number && isfinite(v)) {
            *score = v;
            found = true;
        }
        free(number);
        from = at[1];
        if (at[1] == at[0]) /* an empty match: on to the next character */
            do from++;
            while (from < n && ((unsigned char)text[from] & 0xC0) == 0x80);
    }
    return found;
}

static int on_answer(void *arg, const struct engine_sample *s) {
    struct judge *j = arg;
    struct buf text = {0};
    scoring_ranks_drew(&j->group, s->ids, (size_t)s->n * sizeof *s->ids);
    scoring_ranks_drew(&j->group, s->logp, (size_t)s->n * sizeof *s->logp);
    if (j->group.follows) {
        j->n_running--;
        return 0;
    }
    const int rc = tokenizer_decode(j->tok, s->ids, s->n, true, &text);
    const char *answer = text.p ? text.p : "";
    if (rc == 0 && j->a.serve) {
        const struct judge_answer a = {.text = answer, .n_text = text.n, .n_prompt = s->n_prompt, .n = s->n, .finish = s->finish};
        j->n_running--;
        j->a.answered(j->a.arg, (int64_t)(intptr_t)s->user, &a);
    } else if (rc == 0) {
        struct reward_result r = {.status = REWARD_SCORE};
        if (!find_score(j, answer, text.n, &r.score))
            r = failure(REWARD_UNPARSED, xasprintf("the judge's answer has no match of reward.reward_model.score_regex: %.*s",
                                                   (int)utf8_cut(answer, SAID), answer));
        if (!r.extra) r.extra = json_object();
        json_object_set_new(r.extra, "judgement", json_stringn(answer, text.n));
        reward_check_score(&r);
        add_done(j, (int64_t)(intptr_t)s->user, r);
        j->n_running--;
    }
    buf_free(&text);
    return rc;
}

/* Python's re is the nearest of PCRE2: characters are Unicode's, '.' stops at \n only. */
static int compile_regex(struct judge *j) {
    PCRE2_UCHAR why[128];
    PCRE2_SIZE at;
    int code;
    pcre2_compile_context *ctx = pcre2_compile_context_create(NULL);
    CHECK(ctx != NULL);
    pcre2_set_newline(ctx, PCRE2_NEWLINE_LF);
    j->regex = pcre2_compile((PCRE2_SPTR)j->a.score_regex, PCRE2_ZERO_TERMINATED, PCRE2_UTF | PCRE2_UCP, &code, &at, ctx);
    pcre2_compile_context_free(ctx);
    if (!j->regex) {
        pcre2_get_error_message(code, why, sizeof why);
        FAIL(ERR_INVAL, "reward.reward_model.score_regex=%s: %s at character %zu", j->a.score_regex, (const char *)why, at);
    }
    j->match = pcre2_match_data_create_from_pattern(j->regex, NULL);
    CHECK(j->match != NULL);
    return 0;
}

static int check_args(struct judge *j) {
    if (!strstr(j->a.prompt_template, "{response}"))
        FAIL(ERR_INVAL, "reward.reward_model.prompt_template has no {response}: the judge would not see the response");
    return compile_regex(j);
}

static int open_part(struct judge *j) {
    const struct split_model_args split = split_args(&j->a);
    struct model_config c;
    TRY(model_config_load(&c, j->a.dir));
    const struct model_config part = model_tp_config(&c, -1, split.size);
    const struct decoder_args d = decoder_args(&j->a, &part);
    const int rc = scoring_ranks_open(&j->group, j->a.comm, &split, decoder_most_rows(&d));
    model_config_free(&c);
    TRY(rc);
    j->model = j->group.split.part;
    return 0;
}

static int open_all(struct judge *j) {
    const struct model_open_args open = open_args(&j->a);
    if (!j->a.serve) TRY(check_args(j));
    if (j->a.together > 1) TRY(open_part(j));
    else TRY(model_open(&j->own, j->a.dev, &open));
    if (j->own) j->model = j->own;
    TRY(tokenizer_open(&j->tok, j->a.dir));
    const int rc = j->group.follows ? 0 : chat_template_create(&j->chat, j->tok);
    if (rc < 0) return err_wrap(rc, "the judge's chat template");
    struct decoder_args d = decoder_args(&j->a, &j->model->cfg);
    d.model = j->model;
    j->block_bytes = decoder_bytes(&j->model->cfg, j->a.act, &d);
    TRY(dev_alloc(j->a.dev, j->block_bytes, &j->block));
    TRY(dev_zero(j->a.dev, j->block, j->block_bytes)); /* commits the memory now rather than in mid-run */
    d.block = j->block;
    TRY(decoder_open(&j->decoder, &d));
    const struct engine_config c = {.tok = j->tok, .done = on_answer, .done_arg = j};
    return decoder_engine(&j->engine, j->decoder, &c);
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
    engine_cancel_all(j->engine);
    request_list_clear(&j->asked);
    for (int64_t i = j->at_done; i < j->n_done; i++) reward_result_free(&j->done[i].result);
    j->n_done = j->at_done = j->n_running = 0;
}

void judge_destroy(struct judge *j) {
    if (!j) return;
    scoring_ranks_leave(&j->group);
    if (j->engine) judge_drop(j);
    engine_destroy(j->engine);
    decoder_close(j->decoder);
    if (j->block) dev_free(j->a.dev, j->block, j->block_bytes);
    chat_template_destroy(j->chat);
    tokenizer_close(j->tok);
    scoring_ranks_close(&j->group);
    model_close(j->own);
    pcre2_match_data_free(j->match);
    pcre2_code_free(j->regex);
    free(j->done);
    free(j);
}

/* ---- requests ---- */

/* A text as it is, another value as its JSON, NULL as nothing. */
static struct buf text_of(const json_t *v) {
    struct buf b = {0};
    if (json_is_string(v)) buf_add(&b, json_string_value(v), json_string_length(v));
    else if (v) CHECK(json_dump_line(&b, v) == 0); /* it was read from JSON */
    return b;
}

/* The template with its three names filled in; what is filled in is not expanded again. */
static struct buf fill(const char *template, const struct judge_sample *s) {
    const size_t n = json_array_size(s->messages);
    const json_t *question = n ? json_object_get(json_array_get(s->messages, n - 1), "content") : NULL;
    const char *const names[] = {"{question}", "{response}", "{ground_truth}"};
    struct buf own[] = {json_is_string(question) ? text_of(question) : (struct buf){0}, text_of(s->ground_truth)}, out = {0};
    const struct buf values[] = {own[0], {.p = (char *)(uintptr_t)s->response, .n = s->n_response}, own[1]};
    for (const char *p = template; *p;) {
        int k = 0;
        while (k < 3 && strncmp(p, names[k], strlen(names[k])) != 0) k++;
        if (k < 3) {
            buf_add(&out, values[k].p, values[k].n);
            p += strlen(names[k]);
        } else {
            buf_addc(&out, *p++);
        }
    }
    buf_free(&own[0]);
    buf_free(&own[1]);
    return out;
}

static int submit_ids(struct judge *j, const struct text_ids *ids, const struct judge_question *s, int64_t tag) {
    const struct engine_stop_ids stop = engine_stop_ids(&j->model->cfg, j->tok);
    const struct engine_request q = {.prompt = ids->p,
                                     .n_prompt = ids->n,
                                     .n = 1,
                                     .max_tokens = s->max_tokens,
                                     .temperature = s->temperature,
                                     .top_p = s->top_p,
                                     .repetition_penalty = 1,
                                     .top_k = s->top_k,
                                     .seed = s->seed,
                                     .uid = s->uid,
                                     .stop_ids = stop.id,
                                     .n_stop_ids = stop.n,
                                     .user = (void *)(intptr_t)tag};
    TRY(engine_submit(j->engine, &q, NULL));
    if (scoring_ranks_is_split(&j->group)) request_list_add(&j->asked, &q);
    j->n_running++;
    return 0;
}

int judge_submit(struct judge *j, const struct judge_sample *s, int64_t tag) {
    struct text_ids ids = {0};
    struct buf text = fill(j->a.prompt_template, s);
    json_t *request =
        json_pack("{s:[{s:s, s:s%}], s:b}", "messages", "role", "user", "content", text.p, text.n, "add_generation_prompt", 1);
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
        const struct judge_question q = {.max_tokens = j->a.response_length,
                                         .temperature = j->a.temperature,
                                         .top_p = j->a.top_p,
                                         .top_k = j->a.top_k,
                                         .seed = s->seed,
                                         .uid = s->uid};
        rc = submit_ids(j, &ids, &q, tag);
    }
    json_decref(request);
    text_ids_free(&ids);
    buf_free(&text);
    return rc;
}

static int submit_conversation(struct judge *j, const struct text_ids *ids, struct judge_question q, int64_t tag) {
    const int64_t most = j->a.prompt_length + j->a.response_length, left = most - ids->n;
    if (ids->n == 0) FAIL(ERR_INVAL, "the conversation has no tokens");
    if (left < 1 || q.max_tokens > left)
        FAIL(ERR_INVAL,
             "a conversation of %lld tokens and an answer of %lld are over the %lld of "
             "reward.reward_model.rollout.prompt_length + response_length",
             (long long)ids->n, (long long)(q.max_tokens > 0 ? q.max_tokens : 1), (long long)most);
    if (q.max_tokens == 0) q.max_tokens = left;
    return submit_ids(j, ids, &q, tag);
}

int judge_ask(struct judge *j, const struct judge_question *q, int64_t tag) {
    struct text_ids ids = {0};
    json_t *request = json_pack("{s:O, s:b}", "messages", (json_t *)(uintptr_t)q->messages, "add_generation_prompt", 1);
    CHECK(request != NULL);
    int rc = chat_template_encode(j->chat, request, NULL, &ids);
    if (rc == 0) rc = submit_conversation(j, &ids, *q, tag);
    json_decref(request);
    text_ids_free(&ids);
    return rc;
}

/* ---- steps ---- */

int judge_step(struct judge *j) {
    if (j->n_running == 0) return 0;
    if (scoring_ranks_is_split(&j->group)) {
        struct message m = message_new(true);
        message_requests(&m, &j->asked);
        const int rc = scoring_ranks_order(&j->group, ORDER_STEP, &m);
        message_free(&m);
        request_list_clear(&j->asked);
        TRY(rc);
    }
    return engine_step(j->engine);
}

int judge_pause(struct judge *j) { return scoring_ranks_order(&j->group, ORDER_END, NULL); }
bool judge_follows(const struct judge *j) { return j->group.follows; }

static int add_asked(void *arg, struct engine_request *q) {
    struct judge *j = arg;
    TRY(engine_submit(j->engine, q, NULL));
    j->n_running++;
    return 0;
}

int judge_follow(struct judge *j) {
    for (;;) {
        enum scoring_order order;
        struct message_reader in;
        TRY(scoring_ranks_next(&j->group, &order, &in));
        if (order == ORDER_END) return 0;
        TRY(message_read_requests(&in, add_asked, j));
        TRY(engine_step(j->engine));
    }
}

int judge_poll(struct judge *j, int64_t *tag, struct reward_result *out) {
    if (j->at_done == j->n_done) return 0;
    *tag = j->done[j->at_done].tag;
    *out = j->done[j->at_done++].result;
    return 1;
}

int64_t judge_pending(const struct judge *j) { return j->n_running + j->n_done - j->at_done; }
