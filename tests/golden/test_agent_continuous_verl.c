/* test_agent_continuous_verl.c - first prompts and appended messages beside verl 0.9.1's builders.
 *
 * cases.jsonl and the model directories beside it are made by tools/oracle_continuous.py; VERLC_CONTINUOUS_FIXTURES names others,
 * which may be many. */
#include "agent/continuous_tokens/continuous_tokens.h"
#include "base/clock.h"
#include "base/err.h"
#include "base/file.h"
#include "base/json.h"

#include <setjmp.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

enum { SHOWN = 20, ROUNDS = 8 }; /* rounds: what comes often is found to be a frame, which has to give the same */

struct counts {
    const char *dir;
    int64_t n_models, n_cases, n_refused, n_differ;
};

static struct text_ids ids_of(const json_t *list) {
    struct text_ids ids = {0};
    for (size_t i = 0; i < json_array_size(list); i++) {
        const int32_t id = (int32_t)json_integer_value(json_array_get(list, i));
        text_ids_add(&ids, &id, 1);
    }
    return ids;
}

static bool same_ids(const json_t *want, const struct text_ids *got) {
    struct text_ids w = ids_of(want);
    const bool same = w.n == got->n && (w.n == 0 || memcmp(w.p, got->p, (size_t)w.n * sizeof *w.p) == 0);
    text_ids_free(&w);
    return same;
}

static void show(struct counts *n, const json_t *row, const json_t *c, int rc, const struct tokenizer *tok, int64_t removed,
                 const struct text_ids *got) {
    struct buf b = {0};
    if (n->n_differ++ >= SHOWN) return;
    buf_addf(&b, "%s %s: ", json_string_value(json_object_get(row, "model")),
             json_string_value(json_object_get(row, "model_type")));
    json_dump_line(&b, c);
    if (rc < 0) buf_addf(&b, "\n  got %d: %s", rc, err_msg());
    else {
        buf_addf(&b, "\n  got -%lld \"", (long long)removed);
        tokenizer_decode(tok, got->p, got->n, false, &b);
        buf_adds(&b, "\"\n  want \"");
        const json_t *want = json_object_get(c, "want");
        struct text_ids w = ids_of(json_object_get(want, json_object_get(want, "ids") ? "ids" : "added"));
        tokenizer_decode(tok, w.p, w.n, false, &b);
        buf_adds(&b, "\"");
        text_ids_free(&w);
    }
    fprintf(stderr, "%s\n", b.p);
    buf_free(&b);
}

static void check_case(struct continuous_tokens *t, const struct tokenizer *tok, const json_t *row, const json_t *c,
                       struct counts *n) {
    const json_t *messages = json_object_get(c, "messages"), *tools = json_object_get(c, "tools"),
                 *want = json_object_get(c, "want");
    const json_t *refused = json_object_get(want, "refused");
    struct continuous_junction j = {0};
    struct text_ids ids = ids_of(json_object_get(c, "stream"));
    int rc;
    bool same;
    if (json_is_null(tools)) tools = NULL;
    if (strcmp(json_string_value(json_object_get(c, "op")), "begin") == 0) {
        rc = continuous_tokens_begin(t, messages, tools, &j.added);
        same = same_ids(json_object_get(want, "ids"), &j.added);
    } else {
        rc = continuous_tokens_append(t, messages, json_integer_value(json_object_get(c, "n_old")), tools, &ids, &j);
        same = j.n_removed == json_integer_value(json_object_get(want, "removed")) &&
               same_ids(json_object_get(want, "added"), &j.added);
    }
    n->n_cases++;
    n->n_refused += refused != NULL;
    if (refused ? rc != ERR_INPUT && rc != ERR_FORMAT : rc != 0 || !same) show(n, row, c, rc, tok, j.n_removed, &j.added);
    text_ids_free(&ids);
    text_ids_free(&j.added);
}

static int check_model(void *arg, char *line, size_t n_line, int64_t no) {
    struct counts *n = arg;
    struct continuous_tokens *t = NULL;
    struct tokenizer *tok;
    json_t *row, *c;
    size_t i;
    (void)no;
    TRY(json_parse(&row, line, n_line, "cases.jsonl"));
    char *path = file_join(n->dir, json_string_value(json_object_get(row, "model")));
    if (tokenizer_open(&tok, path) < 0) fail_msg("%s", err_msg());
    const int rc =
        continuous_tokens_create(&t, tok, json_string_value(json_object_get(row, "model_type")), json_object_get(row, "kwargs"));
    n->n_models++;
    if (strcmp(json_string_value(json_object_get(row, "op")), "create") == 0) {
        n->n_refused++;
        if (rc == 0) show(n, row, row, rc, tok, 0, &(struct text_ids){0});
    } else if (rc < 0) {
        show(n, row, row, rc, tok, 0, &(struct text_ids){0});
    } else {
        const char *rounds = getenv("VERLC_CONTINUOUS_ROUNDS");
        for (int k = rounds ? atoi(rounds) : ROUNDS; k > 0; k--)
            json_array_foreach(json_object_get(row, "cases"), i, c) check_case(t, tok, row, c, n);
    }
    continuous_tokens_destroy(t);
    tokenizer_close(tok);
    free(path);
    json_decref(row);
    return 0;
}

static void as_verl(void **state) {
    (void)state;
    const char *other = getenv("VERLC_CONTINUOUS_FIXTURES");
    struct counts n = {.dir = other ? other : FIXTURES "/agent/continuous"};
    char *path = file_join(n.dir, "cases.jsonl");
    if (file_each_line(path, check_model, &n) < 0) fail_msg("%s", err_msg());
    free(path);
    print_message("%lld models, %lld conversations, %lld of them refused; %lld differ\n", (long long)n.n_models,
                  (long long)n.n_cases, (long long)n.n_refused, (long long)n.n_differ);
    assert_true(n.n_cases > 0);
    assert_int_equal(n.n_differ, 0);
}

int main(void) {
    const struct CMUnitTest tests[] = {cmocka_unit_test(as_verl)};
    return cmocka_run_group_tests(tests, NULL, NULL);
}
