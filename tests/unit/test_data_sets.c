/* RL and SFT datasets: against verl's own classes (tests/fixtures/data/sets.json, made
 * by tools/oracle_data.py), and under bad input. */
#include "conf/conf.h"
#include "conf/keys/enums.def"
#include "base/buf.h"
#include "base/file.h"
#include "base/json.h"
#include "data/data.h"
#include "text/text.h"

#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

#define DATA FIXTURES "/data"
static const char *const prompts[] = {DATA "/prompts.parquet"}, *const chats[] = {DATA "/chats.parquet"};
static const char *const tokenizers[] = {"tok_plain", "tok_system"};

struct model {
    struct tokenizer *tok;
    struct chat_template *chat;
    json_t *want; /* its part of sets.json */
};
static char dir[64];
static json_t *sets;

static int setup(void **state) {
    (void)state;
    snprintf(dir, sizeof dir, "/tmp/verlc_sets_XXXXXX");
    return mkdtemp(dir) && json_load(&sets, DATA "/sets.json", 0) == 0 ? 0 : -1;
}
static int teardown(void **state) {
    (void)state;
    json_decref(sets);
    return file_remove_tree(dir);
}
static void model_open(struct model *m, int i) {
    char *path = xasprintf("%s/%s", DATA, tokenizers[i]);
    assert_int_equal(tokenizer_open(&m->tok, path), 0);
    assert_int_equal(chat_template_create(&m->chat, m->tok), 0);
    m->want = json_object_get(sets, tokenizers[i]);
    free(path);
}
static void model_close(struct model *m) {
    chat_template_destroy(m->chat);
    tokenizer_close(m->tok);
}

static void assert_ids(const int32_t *ids, int64_t n, const json_t *want) {
    assert_int_equal(n, json_array_size(want));
    for (int64_t i = 0; i < n; i++) assert_int_equal(ids[i], json_integer_value(json_array_get(want, (size_t)i)));
}

static struct rl_dataset_args rl_args(const struct model *m) {
    return (struct rl_dataset_args){
        .files = prompts, .n_files = 1, .tok = m->tok, .chat = m->chat, .max_prompt_length = 4096, .what = "data.train_files"};
}

static void rl_matches_verl(void **state) {
    (void)state;
    for (int i = 0; i < 2; i++) {
        struct model m;
        struct rl_dataset *d = NULL;
        model_open(&m, i);
        const json_t *rl = json_object_get(m.want, "rl"), *ids = json_object_get(rl, "prompts");
        struct rl_dataset_args a = rl_args(&m);
        if (rl_dataset_open(&d, &a) < 0) print_message("%s\n", err_msg());
        assert_int_equal(d->n, 4);
        for (int k = 0; k < 4; k++) {
            assert_ids(d->prompts[k].ids, d->prompts[k].n_ids, json_array_get(ids, (size_t)k));
            assert_int_equal(d->prompts[k].uid, k);
        }
        rl_dataset_close(d);
        a.filter_overlong_prompts = true;
        a.max_prompt_length = json_integer_value(json_object_get(rl, "limit"));
        assert_int_equal(rl_dataset_open(&d, &a), 0);
        assert_int_equal(d->n, 3);
        assert_int_equal(d->n_filtered, 1);
        for (int k = 0; k < 3; k++)
            assert_int_equal(d->prompts[k].uid, json_integer_value(json_array_get(json_object_get(rl, "kept"), (size_t)k)));
        rl_dataset_close(d);
        model_close(&m);
    }
}

static void rl_batches_have_the_rows_beside_their_own_columns(void **state) {
    (void)state;
    struct model m;
    struct rl_dataset *d = NULL;
    struct batch b;
    struct batch_col *c;
    const int64_t idx[] = {3, 1}, wrong[] = {4};
    model_open(&m, 0);
    struct rl_dataset_args a = rl_args(&m);
    assert_int_equal(rl_dataset_open(&d, &a), 0);
    assert_int_equal(rl_dataset_batch(d, idx, 2, &b), 0);
    assert_int_equal(batch_get(&b, "prompts", BATCH_I32, &c), 0);
    assert_ids(c->i32 + c->off[1], batch_len(c, 1), json_array_get(json_object_get(json_object_get(m.want, "rl"), "prompts"), 1));
    assert_int_equal(batch_get(&b, "uid", BATCH_I64, &c), 0);
    assert_int_equal(c->i64[0], 3);
    assert_int_equal(batch_get(&b, "data_source", BATCH_STR, &c), 0);
    assert_string_equal(c->str[0], "openai/gsm8k");
    assert_int_equal(batch_get(&b, "row", BATCH_JSON, &c), 0);
    assert_string_equal(json_string_value(json_object_get(json_object_get(c->json[0], "reward_model"), "ground_truth")), "1");
    assert_int_equal(json_integer_value(json_object_get(json_object_get(c->json[0], "extra_info"), "index")), 3);
    assert_non_null(json_object_get(c->json[0], "ability"));
    assert_int_equal(batch_get(&b, "raw_prompt", BATCH_JSON, &c), 0);
    assert_string_equal(json_string_value(json_object_get(json_array_get(c->json[0], 0), "content")), "\xe6\x97\xa5\xe6\x9c\xac");
    assert_int_equal(b.n_cols, 5); /* and no other: the data's names are within the rows */
    batch_free(&b);
    assert_int_equal(rl_dataset_batch(d, wrong, 1, &b), ERR_INTERNAL);
    rl_dataset_close(d);
    model_close(&m);
}

static void rl_limits_and_caps(void **state) {
    (void)state;
    struct model m;
    struct rl_dataset *d = NULL, *e = NULL;
    model_open(&m, 0);
    struct rl_dataset_args a = rl_args(&m);
    const json_t *long_ids = json_array_get(json_object_get(json_object_get(m.want, "rl"), "prompts"), 2);
    const int64_t n = (int64_t)json_array_size(long_ids), max = 20;
    a.max_prompt_length = max;
    assert_int_equal(rl_dataset_open(&d, &a), ERR_INPUT);
    assert_non_null(strstr(err_msg(), "prompts.parquet row 3: "));
    assert_non_null(strstr(err_msg(), "the limit is 20"));
    for (int t = DATA_TRUNC_LEFT; t <= DATA_TRUNC_MIDDLE; t++) {
        a.truncation = (enum data_truncation)t;
        assert_int_equal(rl_dataset_open(&d, &a), 0);
        assert_int_equal(d->prompts[2].n_ids, max);
        const int64_t head = t == DATA_TRUNC_LEFT ? 0 : t == DATA_TRUNC_RIGHT ? max : max / 2;
        for (int64_t i = 0; i < max; i++)
            assert_int_equal(d->prompts[2].ids[i],
                             json_integer_value(json_array_get(long_ids, (size_t)(i < head ? i : n - max + i))));
        rl_dataset_close(d);
    }
    a.filter_overlong_prompts = true;
    a.max_prompt_length = 2;
    assert_int_equal(rl_dataset_open(&d, &a), ERR_INPUT);
    assert_non_null(strstr(err_msg(), "all 4 prompts are longer than data.max_prompt_length=2 tokens (the shortest has"));
    /* caps: the head, or a subset fixed by the seed */
    a = rl_args(&m);
    a.max_samples = 2;
    assert_int_equal(rl_dataset_open(&d, &a), 0);
    assert_int_equal(d->n, 2);
    assert_int_equal(d->prompts[1].uid, 1);
    rl_dataset_close(d);
    a.shuffle = true;
    a.seed = 3;
    assert_int_equal(rl_dataset_open(&d, &a), 0);
    assert_int_equal(rl_dataset_open(&e, &a), 0);
    for (int i = 0; i < 2; i++) assert_int_equal(d->prompts[i].uid, e->prompts[i].uid);
    assert_int_not_equal(d->prompts[0].uid, d->prompts[1].uid);
    rl_dataset_close(d);
    rl_dataset_close(e);
    model_close(&m);
}

/* data.apply_chat_template_kwargs reach the template; what only concerns Python's return does not. */
static void rl_template_kwargs(void **state) {
    (void)state;
    struct model m;
    struct rl_dataset *d = NULL;
    struct buf text = {0};
    model_open(&m, 0);
    json_t *kw = json_pack("{s:s, s:b, s:s}", "chat_template", "{{ flavour }}: {{ messages[0]['content'] }}", "tokenize", 1,
                           "flavour", "plain");
    struct rl_dataset_args a = rl_args(&m);
    a.chat_kwargs = kw;
    if (rl_dataset_open(&d, &a) < 0) print_message("%s\n", err_msg());
    assert_int_equal(tokenizer_decode(m.tok, d->prompts[0].ids, d->prompts[0].n_ids, false, &text), 0);
    assert_string_equal(text.p, "plain: Hi");
    rl_dataset_close(d);
    json_decref(kw);
    buf_free(&text);
    model_close(&m);
}

/* One row of JSONL; the message must name the file and hold `text`. */
static void rl_refuses(struct model *m, const char *row, int code, const char *text) {
    char *path = file_join(dir, "rows.jsonl");
    const char *const files[] = {prompts[0], path};
    struct rl_dataset *d = NULL;
    struct rl_dataset_args a = rl_args(m);
    assert_int_equal(file_write_atomic(path, row, strlen(row)), 0);
    a.files = files;
    a.n_files = 2;
    const int rc = rl_dataset_open(&d, &a);
    if (rc != code || !strstr(err_msg(), text)) print_message("%s\n%d %s\n", row, rc, err_msg());
    assert_int_equal(rc, code);
    assert_non_null(strstr(err_msg(), text));
    assert_non_null(strstr(err_msg(), "data.train_files"));
    free(path);
}

static void rl_bad_rows(void **state) {
    (void)state;
    struct model m;
    model_open(&m, 0);
#define REST "\"data_source\": \"x\", \"reward_model\": {\"ground_truth\": \"1\"}"
    rl_refuses(&m, "{" REST "}\n", ERR_INPUT, "rows.jsonl:1: there is no column 'prompt'");
    rl_refuses(&m, "{\"prompt\": [{\"role\": \"user\", \"content\": \"a\"}], \"data_source\": \"x\"}\n", ERR_INPUT,
               "no column 'reward_model'");
    rl_refuses(&m, "{\"prompt\": \"2+2?\", \"answer\": \"4\"}\n", ERR_INPUT,
               "rows.jsonl:1: there are no columns 'data_source', 'reward_model'; it has: prompt, answer; a row is {");
    rl_refuses(&m, "{\"prompt\": 7, " REST "}\n", ERR_INPUT, "row 1: column 'prompt' is neither text nor a list of messages");
    rl_refuses(&m, "{\"prompt\": [], " REST "}\n", ERR_INPUT, "nor a list of messages");
    rl_refuses(&m, "{\"prompt\": [{\"content\": \"a\"}], " REST "}\n", ERR_INPUT, "message 1 of column 'prompt' has no role");
    rl_refuses(&m, "{\"prompt\": [{\"role\": \"user\"}], " REST "}\n", ERR_FORMAT, "rows.jsonl row 1");
    rl_refuses(&m, "{\"prompt\": [{\"role\": \"user\", \"content\": \"a\"}], \"images\": [1], " REST "}\n", ERR_UNSUPPORTED,
               "unsupported");
    rl_refuses(&m,
               "{\"prompt\": [{\"role\": \"user\", \"content\": \"a\"}], \"data_source\": 3, "
               "\"reward_model\": {}}\n",
               ERR_INPUT, "column 'data_source' is not text");
    rl_refuses(&m, "{\"prompt\": [{\"role\"\n", ERR_FORMAT, "rows.jsonl:1: not JSON");
    struct rl_dataset *d = NULL;
    struct rl_dataset_args a = rl_args(&m);
    a.n_files = 0;
    assert_int_equal(rl_dataset_open(&d, &a), ERR_INVAL);
    a = rl_args(&m);
    a.prompt_key = "question";
    assert_int_equal(rl_dataset_open(&d, &a), ERR_INPUT);
    assert_non_null(strstr(err_msg(), "prompts.parquet: there is no column 'question'; it has: data_source, prompt"));
    model_close(&m);
}

/* A scorer of the user's own needs the prompt alone; a text is one message of the user. */
static void rl_rows_of_an_own_scorer(void **state) {
    (void)state;
    static const char rows[] = "{\"prompt\": \"Hi\", \"answer\": \"4\"}\n"
                               "{\"prompt\": [{\"role\": \"user\", \"content\": \"Hi\"}], \"data_source\": \"mine\"}\n";
    char *path = file_join(dir, "own.jsonl");
    const char *const files[] = {path};
    struct model m;
    struct rl_dataset *d = NULL;
    struct batch b;
    struct batch_col *c;
    model_open(&m, 0);
    struct rl_dataset_args a = rl_args(&m);
    assert_int_equal(file_write_atomic(path, rows, strlen(rows)), 0);
    a.files = files;
    a.own_scorer = true;
    if (rl_dataset_open(&d, &a) < 0) fail_msg("%s", err_msg());
    assert_int_equal(d->n, 2);
    assert_int_equal(d->prompts[0].n_ids, d->prompts[1].n_ids);
    assert_memory_equal(d->prompts[0].ids, d->prompts[1].ids, (size_t)d->prompts[0].n_ids * sizeof(int32_t));
    assert_int_equal(rl_dataset_batch(d, (const int64_t[]){0, 1}, 2, &b), 0);
    assert_int_equal(batch_get(&b, "data_source", BATCH_STR, &c), 0);
    assert_string_equal(c->str[0], "custom");
    assert_string_equal(c->str[1], "mine");
    assert_int_equal(batch_get(&b, "raw_prompt", BATCH_JSON, &c), 0);
    assert_true(json_equal(c->json[0], c->json[1]));
    batch_free(&b);
    rl_dataset_close(d);
    model_close(&m);
    free(path);
}

/* --- SFT --- */

static struct sft_dataset_args sft_args(const struct model *m) {
    return (struct sft_dataset_args){.files = chats,
                                     .n_files = 1,
                                     .messages_key = "messages",
                                     .tok = m->tok,
                                     .chat = m->chat,
                                     .max_length = 512,
                                     .what = "data.train_files"};
}

static void assert_sample(const struct sft_sample *s, const json_t *want) {
    assert_ids(s->ids, s->n, json_object_get(want, "ids"));
    for (int64_t t = 1; t < s->n; t++) /* verl may mark token 0, which nothing predicts */
        assert_int_equal(s->loss_mask[t], json_integer_value(json_array_get(json_object_get(want, "loss_mask"), (size_t)t)));
    assert_int_equal(s->loss_mask[0], 0);
}

static void sft_matches_verl(void **state) {
    (void)state;
    for (int i = 0; i < 2; i++) {
        struct model m;
        json_t *cases, *k;
        size_t at;
        model_open(&m, i);
        cases = json_object_get(m.want, "sft");
        assert_int_equal(json_array_size(cases), 3);
        json_array_foreach(cases, at, k) {
            struct sft_dataset *d = NULL;
            struct sft_dataset_args a = sft_args(&m);
            const json_t *rows = json_object_get(k, "rows");
            a.max_length = json_integer_value(json_object_get(k, "max_length"));
            const struct conf_word *w = CONF_WORDS(SFT_TRUNCATIONS);
            while (strcmp(w->word, json_string_value(json_object_get(k, "truncation"))) != 0) w++;
            a.truncation = (enum data_truncation)w->value;
            if (sft_dataset_open(&d, &a) < 0) print_message("%s\n", err_msg());
            assert_int_equal(d->n, 3);
            for (int64_t r = 0; r < d->n; r++) assert_sample(&d->samples[r], json_array_get(rows, (size_t)r));
            sft_dataset_close(d);
        }
        model_close(&m);
    }
}

static void sft_pairs(void **state) {
    (void)state;
    static const char row[] = "{\"prompt\": \"Tom has 3 apples. How many apples are there?\", \"response\": \"There are 3 "
                              "apples.\\n#### 3\","
                              " \"extra_info\": {\"q\": {\"text\": \"Tom has 3 apples. How many apples are there?\"}, \"a\": "
                              "\"There are 3 apples.\\n#### 3\"},"
                              " \"chat\": [{\"role\": \"user\", \"content\": \"Tom has 3 apples. How many apples are there?\"}]}\n";
    char *path = file_join(dir, "pairs.jsonl");
    const char *const files[] = {path}, *const q[] = {"q", "text"}, *const ans[] = {"a"}, *const bad[] = {"z"};
    assert_int_equal(file_write_atomic(path, row, strlen(row)), 0);
    for (int i = 0; i < 2; i++) {
        struct model m;
        struct sft_dataset *d = NULL;
        model_open(&m, i);
        const json_t *want = json_array_get(json_object_get(m.want, "pair"), 0);
        struct sft_dataset_args a = sft_args(&m);
        a.files = files;
        a.messages_key = NULL;
        if (sft_dataset_open(&d, &a) < 0) print_message("%s\n", err_msg());
        assert_sample(&d->samples[0], want);
        sft_dataset_close(d);
        a.prompt_key = a.response_key = "extra_info";
        a.prompt_dict_keys = q;
        a.n_prompt_dict_keys = 2;
        a.response_dict_keys = ans;
        a.n_response_dict_keys = 1;
        assert_int_equal(sft_dataset_open(&d, &a), 0);
        assert_sample(&d->samples[0], want);
        sft_dataset_close(d);
        a.response_dict_keys = bad;
        assert_int_equal(sft_dataset_open(&d, &a), ERR_INPUT);
        assert_non_null(strstr(err_msg(), "pairs.jsonl row 1: column 'extra_info' has no member 'z'"));
        a.response_dict_keys = ans;
        a.prompt_key = "chat"; /* a list of messages stands for itself */
        a.n_prompt_dict_keys = 0;
        assert_int_equal(sft_dataset_open(&d, &a), 0);
        assert_sample(&d->samples[0], want);
        sft_dataset_close(d);
        model_close(&m);
    }
    free(path);
}

/* TRL's prompt and completion and ShareGPT's turns give the tokens and the mask of messages. */
static void sft_forms_of_rows(void **state) {
    (void)state;
#define Q "\"What is 1?\""
#define A "\"It is 1.\""
#define USER "{\"role\": \"user\", \"content\": " Q "}"
#define ASSISTANT "{\"role\": \"assistant\", \"content\": " A "}"
    static const char rows[] =
        "{\"messages\": [" USER ", " ASSISTANT "]}\n{\"prompt\": " Q ", \"completion\": " A "}\n"
        "{\"prompt\": [" USER "], \"completion\": [" ASSISTANT "]}\n{\"prompt\": " Q ", \"response\": " A "}\n"
        "{\"conversations\": [{\"from\": \"human\", \"value\": " Q "}, {\"from\": \"gpt\", \"value\": " A "}]}\n";
    static const struct {
        const char *row, *text;
    } bad[] = {
        {"{\"text\": \"x\", \"n\": 1}",
         "forms.jsonl row 1: there is no column 'messages'; it has: text, n; a row has messages, or"},
        {"{\"conversations\": [{\"from\": \"bard\", \"value\": \"x\"}]}", "turn 1 of column 'conversations' is from 'bard'"}};
    char *path = file_join(dir, "forms.jsonl");
    const char *const files[] = {path};
    struct model m;
    struct sft_dataset *d = NULL;
    model_open(&m, 0);
    struct sft_dataset_args a = sft_args(&m);
    a.files = files;
    assert_int_equal(file_write_atomic(path, rows, strlen(rows)), 0);
    if (sft_dataset_open(&d, &a) < 0) fail_msg("%s", err_msg());
    assert_int_equal(d->n, 5);
    for (int64_t i = 1; i < d->n; i++) {
        assert_int_equal(d->samples[i].n, d->samples[0].n);
        assert_memory_equal(d->samples[i].ids, d->samples[0].ids, (size_t)d->samples[0].n * sizeof(int32_t));
        assert_memory_equal(d->samples[i].loss_mask, d->samples[0].loss_mask, (size_t)d->samples[0].n);
    }
    sft_dataset_close(d);
    for (int i = 0; i < 2; i++) {
        assert_int_equal(file_write_atomic(path, bad[i].row, strlen(bad[i].row)), 0);
        assert_int_equal(sft_dataset_open(&d, &a), ERR_INPUT);
        if (!strstr(err_msg(), bad[i].text)) fail_msg("%s", err_msg());
    }
    model_close(&m);
    free(path);
}

static void sft_refusals(void **state) {
    (void)state;
    struct model m;
    struct sft_dataset *d = NULL;
    model_open(&m, 0);
    struct sft_dataset_args a = sft_args(&m);
    a.max_length = 32;
    assert_int_equal(sft_dataset_open(&d, &a), ERR_INPUT);
    assert_non_null(strstr(err_msg(), "chats.parquet row 2"));
    a.max_length = 4;
    a.truncation = DATA_TRUNC_RIGHT; /* headers only */
    assert_int_equal(sft_dataset_open(&d, &a), ERR_INPUT);
    assert_non_null(strstr(err_msg(), "no row has a token to learn within data.max_length=4"));
    a.truncation = DATA_TRUNC_MIDDLE;
    assert_int_equal(sft_dataset_open(&d, &a), ERR_INVAL);
    a = sft_args(&m);
    a.messages_key = "conversations";
    assert_int_equal(sft_dataset_open(&d, &a), ERR_INPUT);
    assert_non_null(strstr(err_msg(), "no column 'conversations'; it has: messages"));
    /* a template that renders the last turn differently from the others */
    json_t *kw = json_pack("{s:s}", "chat_template",
                           "{% for m in messages %}<|im_start|>{{ m.role }}\n{% if loop.last %}!{% endif "
                           "%}{{ m.content }}<|im_end|>\n{% endfor %}"
                           "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}");
    a = sft_args(&m);
    a.chat_kwargs = kw;
    assert_int_equal(sft_dataset_open(&d, &a), ERR_INPUT);
    assert_non_null(strstr(err_msg(), "data.ignore_input_ids_mismatch=True"));
    a.ignore_input_ids_mismatch = true;
    assert_int_equal(sft_dataset_open(&d, &a), 0);
    sft_dataset_close(d);
    json_decref(kw);
    model_close(&m);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(rl_matches_verl),    cmocka_unit_test(rl_batches_have_the_rows_beside_their_own_columns),
        cmocka_unit_test(rl_limits_and_caps), cmocka_unit_test(rl_template_kwargs),
        cmocka_unit_test(rl_bad_rows),        cmocka_unit_test(rl_rows_of_an_own_scorer),
        cmocka_unit_test(sft_matches_verl),   cmocka_unit_test(sft_pairs),
        cmocka_unit_test(sft_refusals),       cmocka_unit_test(sft_forms_of_rows),
    };
    return cmocka_run_group_tests(tests, setup, teardown);
}
