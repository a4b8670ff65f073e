/* reward_model.c - see reward_model.h. */
#include "reward_model/reward_model.h"

#include "base/buf.h"
#include "base/err.h"
#include "model/files/load.h"
#include "model/parallel/tensor_parallel.h"
#include "reward_model/scoring_ranks.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

struct waiting { /* one sample in flight */
    int64_t tag;
    json_t *messages; /* prompt and answer; NULL when ids is set */
    struct text_ids ids;
    struct reward_result result; /* with message: why it has no score */
};

struct reward_model {
    struct reward_model_args a;
    struct model *model;        /* of which passes are made */
    struct model *own;          /* the same, where this rank has it whole */
    struct scoring_ranks group; /* else */
    struct model_acts *acts;
    struct pack pack;
    void *block;
    size_t block_bytes;
    struct tokenizer *tok;
    struct chat_template *chat;
    struct judge *judge;          /* or this, and none of the above */
    char *policy_eos;             /* its text, which is cut out of answers; NULL: none */
    struct waiting *queue, *done; /* in order of submission */
    int64_t n_queue, cap_queue, n_done, at_done, cap_done;
};

/* ---- opening ---- */

static size_t block_bytes(const struct model_config *c, const struct reward_model_args *a) {
    struct pack p = {.max_rows = a->max_rows, .max_seqs = a->max_seqs};
    struct arena m = {0};
    micro_batch_layout(&p, &m);
    arena_take(&m, model_acts_bytes(c, a->act, a->max_rows, MODEL_KEEP_NONE));
    return m.used;
}

static struct model_open_args open_args(const struct reward_model_args *a) {
    return (struct model_open_args){.dir = a->dir, .act = a->act, .flags = MODEL_INFER, .max_len = a->max_len};
}

static struct split_model_args split_args(const struct reward_model_args *a) {
    return (struct split_model_args){
        .dev = a->dev, .dir = a->dir, .act = a->act, .max_len = a->max_len, .size = a->together, .reward = true};
}

size_t reward_model_bytes(const struct model_config *c, const struct reward_model_args *a) {
    const struct model_open_args open = open_args(a);
    const struct split_model_args split = split_args(a);
    size_t weights;
    if (judge_is_wanted(&a->judge)) return judge_bytes(c, &a->judge);
    if (a->together <= 1) return model_open_bytes(c, a->dev, &open) + block_bytes(c, a);
    const struct model_config part = model_tp_config(c, -1, a->together);
    CHECK(split_model_bytes(&split, c, a->max_rows, &weights) == 0); /* without an adapter it reads no file */
    const size_t block = block_bytes(&part, a), room = model_file_room(c, a->dev, a->act);
    return weights + (room > block ? room : block); /* one before the other */
}

/* Every token of the policy has the same id here. */
static int same_tokenizer(const struct reward_model *r) {
    const int64_t n = tokenizer_vocab_size(r->a.policy_tok);
    for (int64_t i = 0; i < n; i++) {
        const char *want = tokenizer_token(r->a.policy_tok, (int32_t)i), *have = tokenizer_token(r->tok, (int32_t)i);
        if (want && (!have || strcmp(want, have) != 0))
            FAIL(ERR_INPUT,
                 "%s has another tokenizer than the policy (token %lld is %s there); reward.reward_model.template=own "
                 "renders the conversation again for it",
                 r->a.dir, (long long)i, have ? have : "absent");
    }
    return 0;
}

static int open_text(struct reward_model *r) {
    TRY(tokenizer_open(&r->tok, r->a.dir));
    if (tokenizer_vocab_size(r->tok) > r->model->cfg.vocab)
        FAIL(ERR_INPUT, "%s: its tokenizer has %lld tokens, its config.json a vocab_size of %lld", r->a.dir,
             (long long)tokenizer_vocab_size(r->tok), (long long)r->model->cfg.vocab);
    if (r->a.policy_tokens) return same_tokenizer(r);
    const int rc = chat_template_create(&r->chat, r->tok);
    if (rc < 0) return err_wrap(rc, "the reward model's chat template");
    const int32_t eos = tokenizer_eos(r->a.policy_tok);
    if (eos >= 0) r->policy_eos = xstrdup(tokenizer_token(r->a.policy_tok, eos));
    return 0;
}

static int open_all(struct reward_model *r) {
    const struct reward_model_args *a = &r->a;
    const struct model_open_args open = open_args(a);
    const struct split_model_args split = split_args(a);
    if (judge_is_wanted(&a->judge)) return judge_create(&r->judge, &a->judge);
    if (a->together > 1) TRY(scoring_ranks_open(&r->group, a->comm, &split, a->max_rows));
    else TRY(model_open_reward(&r->own, a->dev, &open));
    r->model = r->own ? r->own : r->group.split.part;
    if (!r->group.follows) TRY(open_text(r));
    r->pack = (struct pack){.dev = a->dev, .max_rows = a->max_rows, .max_seqs = a->max_seqs};
    r->block_bytes = block_bytes(&r->model->cfg, a);
    TRY(dev_alloc(a->dev, r->block_bytes, &r->block));
    TRY(dev_zero(a->dev, r->block, r->block_bytes));
    struct arena m = {.base = r->block, .cap = r->block_bytes};
    micro_batch_layout(&r->pack, &m);
    void *acts = arena_take(&m, model_acts_bytes(&r->model->cfg, a->act, a->max_rows, MODEL_KEEP_NONE));
    TRY(model_acts_create(&r->acts, r->model, a->max_rows, MODEL_KEEP_NONE, acts));
    micro_batch_alloc_host(&r->pack);
    return 0;
}

int reward_model_create(struct reward_model **out, const struct reward_model_args *a) {
    struct reward_model *r = xcalloc(1, sizeof *r);
    r->a = *a;
    const int rc = open_all(r);
    if (rc < 0) reward_model_destroy(r);
    else *out = r;
    return rc;
}

static void waiting_free(struct waiting *w) {
    json_decref(w->messages);
    text_ids_free(&w->ids);
    reward_result_free(&w->result);
}

void reward_model_drop(struct reward_model *r) {
    if (r->judge) judge_drop(r->judge);
    for (int64_t i = 0; i < r->n_queue; i++) waiting_free(&r->queue[i]);
    for (int64_t i = r->at_done; i < r->n_done; i++) waiting_free(&r->done[i]);
    r->n_queue = r->n_done = r->at_done = 0;
}

void reward_model_destroy(struct reward_model *r) {
    if (!r) return;
    reward_model_drop(r);
    scoring_ranks_leave(&r->group);
    judge_destroy(r->judge);
    model_acts_destroy(r->acts);
    if (r->block) dev_free(r->a.dev, r->block, r->block_bytes);
    micro_batch_free_host(&r->pack);
    chat_template_destroy(r->chat);
    tokenizer_close(r->tok);
    scoring_ranks_close(&r->group);
    model_close(r->own);
    free(r->policy_eos);
    free(r->queue);
    free(r->done);
    free(r);
}

/* ---- submitting ---- */

/* The answer's text, special tokens kept and the end token cut out wherever it occurs: what verl renders. */
static int answer_text(const struct reward_model *r, const struct reward_model_sample *s, json_t **out) {
    struct buf raw = {0}, text = {0};
    const size_t n = r->policy_eos ? strlen(r->policy_eos) : 0;
    int rc = tokenizer_decode(r->a.policy_tok, s->response, s->n_response, false, &raw);
    const char *p = raw.p ? raw.p : "", *end = p + raw.n;
    while (rc == 0 && p < end) {
        const char *at = n ? memmem(p, (size_t)(end - p), r->policy_eos, n) : NULL;
        rc = buf_add(&text, p, (size_t)((at ? at : end) - p));
        p = at ? at + n : end;
    }
    if (rc == 0) {
        *out = json_stringn(text.p ? text.p : "", text.n);
        CHECK(*out != NULL); /* the decoder gives UTF-8 */
    }
    buf_free(&raw);
    buf_free(&text);
    return rc;
}

int reward_model_submit(struct reward_model *r, const struct reward_model_sample *s, int64_t tag) {
    struct waiting w = {.tag = tag};
    if (r->judge) return judge_submit(r->judge, &s->judge, tag);
    if (r->a.policy_tokens) {
        text_ids_add(&w.ids, s->prompt, s->n_prompt);
        text_ids_add(&w.ids, s->response, s->n_response);
    } else {
        json_t *answer = NULL;
        TRY(answer_text(r, s, &answer));
        w.messages = json_deep_copy(s->messages);
        if (!json_is_array(w.messages)) {
            json_decref(w.messages);
            json_decref(answer);
            FAIL(ERR_INPUT, "a prompt is not a list of messages, so a reward model's chat template cannot render it");
        }
        json_array_append_new(w.messages, json_pack("{s:s, s:o}", "role", "assistant", "content", answer));
    }
    xgrow((void **)&r->queue, &r->cap_queue, r->n_queue + 1, sizeof *r->queue);
    r->queue[r->n_queue++] = w;
    return 0;
}

/* ---- scoring ---- */

static void give_up(struct waiting *w, enum reward_status status, char *why) {
    w->result = (struct reward_result){.status = status, .extra = json_object(), .message = why};
}

/* Ids of the first n waiting samples; one that its template refuses has a result instead. */
static int render(struct reward_model *r, int64_t n) {
    if (r->a.policy_tokens) return 0;
    for (int64_t i = 0; i < n; i++) {
        struct waiting *w = &r->queue[i];
        json_t *request = json_pack("{s:O, s:b}", "messages", w->messages, "add_generation_prompt", 0);
        const int rc = chat_template_encode(r->chat, request, NULL, &w->ids);
        json_decref(request);
        if (rc == ERR_FORMAT) give_up(w, REWARD_CRASH, xasprintf("the reward model's chat template: %s", err_msg()));
        else TRY(rc);
    }
    return 0;
}

/* The samples of one micro-batch as packed sequences whose one target follows the row that is read. w NULL: on a rank that
 * follows. */
static int forward(struct reward_model *r, struct waiting *const *w, const struct packed_seq *seqs, int64_t n) {
    struct model_batch b;
    struct pack_micro m;
    for (int64_t lo = 0; lo < n; lo = m.hi) {
        TRY(micro_batch_next(&r->pack, seqs, n, lo, r->a.cut, &m));
        TRY(micro_batch_fill(&r->pack, seqs, &m, &b));
        TRY(model_forward(r->model, &b, r->acts));
        const int64_t k = m.hi - m.lo;
        int32_t *row = xmalloc((size_t)k * sizeof *row);
        float *value = xmalloc((size_t)k * sizeof *value);
        for (int64_t i = 0; i < k; i++) {
            const struct packed_seq *s = &seqs[m.lo + i];
            row[i] = r->pack.q_start[i] + (int32_t)model_reward_row(&r->model->cfg, s->ids, s->n);
        }
        int rc = model_value(r->model, r->acts, row, k, value);
        if (rc == 0) rc = model_tp_on_time(r->model);
        scoring_ranks_drew(&r->group, value, (size_t)k * sizeof *value);
        for (int64_t i = 0; w && i < k && rc == 0; i++) {
            if (isfinite(value[i]))
                w[m.lo + i]->result =
                    (struct reward_result){.status = REWARD_SCORE, .score = (double)value[i], .extra = json_object()};
            else give_up(w[m.lo + i], REWARD_CRASH, xstrdup("the reward model's score is not finite"));
        }
        free(row);
        free(value);
        TRY(rc);
    }
    return 0;
}

/* The other ranks of the group compute the same. */
static int order_scores(struct reward_model *r, const struct packed_seq *seqs, int64_t n) {
    if (!scoring_ranks_is_split(&r->group)) return 0;
    struct message m = message_new(false);
    message_seqs(&m, seqs, n, 0);
    const int rc = scoring_ranks_order(&r->group, ORDER_SCORE, &m);
    message_free(&m);
    return rc;
}

int reward_model_pause(struct reward_model *r) {
    return r->judge ? judge_pause(r->judge) : scoring_ranks_order(&r->group, ORDER_END, NULL);
}

int reward_model_follow(struct reward_model *r) {
    if (r->judge) return judge_follow(r->judge);
    for (;;) {
        enum scoring_order order;
        struct message_reader in;
        struct packed_seq *seqs;
        int64_t n;
        TRY(scoring_ranks_next(&r->group, &order, &in));
        if (order == ORDER_END) return 0;
        TRY(message_read_seqs(&in, &seqs, &n));
        const int rc = forward(r, NULL, seqs, n);
        free(seqs);
        TRY(rc);
    }
}

static int score(struct reward_model *r, int64_t n) {
    struct packed_seq *seqs = xcalloc((size_t)n, sizeof *seqs);
    struct waiting **w = xcalloc((size_t)n, sizeof *w);
    int64_t k = 0;
    int rc = render(r, n);
    for (int64_t i = 0; i < n && rc == 0; i++) {
        struct waiting *one = &r->queue[i];
        if (one->result.extra) continue;
        if (one->ids.n == 0) give_up(one, REWARD_CRASH, xstrdup("the reward model's chat template gives an empty conversation"));
        else if (one->ids.n > r->a.max_len)
            give_up(one, REWARD_MISSING,
                    xasprintf("a conversation of %lld tokens is longer than "
                              "reward.reward_model.max_length=%lld",
                              (long long)one->ids.n, (long long)r->a.max_len));
        if (one->result.extra) continue;
        seqs[k] = (struct packed_seq){.ids = one->ids.p, .n = one->ids.n, .first = one->ids.n};
        w[k++] = one;
    }
    if (rc == 0) rc = order_scores(r, seqs, k);
    if (rc == 0) rc = forward(r, w, seqs, k);
    free(seqs);
    free(w);
    return rc;
}

int reward_model_step(struct reward_model *r, bool flush) {
    if (r->judge) return judge_step(r->judge);
    const int64_t most = r->a.cut.max_seqs > 0 ? r->a.cut.max_seqs : r->a.max_rows / r->a.max_len;
    const int64_t enough = most < 1 ? 1 : most < r->a.max_seqs ? most : r->a.max_seqs;
    if (r->n_queue == 0 || (!flush && r->n_queue < enough)) return 0;
    const int64_t n = r->n_queue < enough ? r->n_queue : enough;
    TRY(score(r, n));
    if (r->at_done == r->n_done) r->at_done = r->n_done = 0;
    xgrow((void **)&r->done, &r->cap_done, r->n_done + n, sizeof *r->done);
    memcpy(r->done + r->n_done, r->queue, (size_t)n * sizeof *r->done);
    r->n_done += n;
    r->n_queue -= n;
    memmove(r->queue, r->queue + n, (size_t)r->n_queue * sizeof *r->queue);
    return 1;
}

int reward_model_poll(struct reward_model *r, int64_t *tag, struct reward_result *out) {
    if (r->judge) return judge_poll(r->judge, tag, out);
    if (r->at_done == r->n_done) return 0;
    struct waiting *w = &r->done[r->at_done++];
    *tag = w->tag;
    *out = w->result;
    w->result = (struct reward_result){0};
    waiting_free(w);
    return 1;
}

int64_t reward_model_pending(const struct reward_model *r) {
    return r->judge ? judge_pending(r->judge) : r->n_queue + r->n_done - r->at_done;
}
