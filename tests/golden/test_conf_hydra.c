/* test_conf_hydra.c - the composed configuration against real Hydra and
 * OmegaConf on verl 0.9.1's files (tests/fixtures/conf, made by tools/oracle_conf.py):
 * every key, value, value type and the order of keys; refusals; YAML's words.
 * Each composed tree also survives being printed as YAML and read again. */
#include "conf/conf_int.h"
#include "base/err.h"
#include "base/file.h"
#include "base/json.h"
#include "base/encoding/number.h"

#include <math.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

#define DIR FIXTURES "/conf"

/* A value as the fixtures write it: inf and nan as {"float": "inf"}, groups in lists as {"dict": {...}}. */
static json_t *encode(const struct conf_node *v) {
    json_t *out;
    char f[32];
    switch (v->kind) {
    case CONF_STR: return json_string(v->s);
    case CONF_FLOAT:
        if (isfinite(v->f)) return json_real(v->f);
        number_text(v->f, f);
        return json_pack("{s:s}", "float", f);
    case CONF_LIST:
        out = json_array();
        for (int64_t k = 0; k < v->n; k++) json_array_append_new(out, encode(v->items[k].v));
        return out;
    case CONF_DICT:
        out = json_object();
        for (int64_t k = 0; k < v->n; k++) json_object_set_new(out, v->items[k].key, encode(v->items[k].v));
        return json_pack("{s:o}", "dict", out);
    case CONF_NULL:
    case CONF_BOOL:
    case CONF_INT:
    default: return conf__node_json(v);
    }
}

static void flatten(const struct conf_node *v, const char *path, json_t *out) {
    if (v->kind != CONF_DICT || v->n == 0) {
        json_object_set_new(out, path, encode(v));
        return;
    }
    for (int64_t k = 0; k < v->n; k++) {
        char *sub = xasprintf("%s%s%s", path, *path ? "." : "", v->items[k].key);
        flatten(v->items[k].v, sub, out);
        free(sub);
    }
}

static json_t *load_json(const char *name) {
    char *path = file_join(DIR, name);
    json_t *v = NULL;
    const int rc = json_load(&v, path, 0);
    if (rc < 0) fail_msg("%s", err_msg());
    free(path);
    return v;
}

/* Keys of verlc alone, and the one default that differs: the device is what the machine has. */
static bool is_own(const struct conf *c, const char *path) {
    const struct conf_key *row = conf__table_row(&c->table, path);
    return (row && strncmp(row->text, "verlc:", 6) == 0) || strcmp(path, "trainer.device") == 0;
}

/* Every key of `want` with its value in `got`, and in `got` nothing else but keys of `more` (may be NULL). */
static void compare(const char *name, const struct conf *c, json_t *got, json_t *want, const json_t *more) {
    const char *key;
    json_t *v;
    json_object_foreach(want, key, v) {
        const json_t *mine = json_object_get(got, key);
        if (is_own(c, key) || (mine && json_equal(v, mine))) continue;
        char *a = json_dumps(v, JSON_ENCODE_ANY), *b = mine ? json_dumps(mine, JSON_ENCODE_ANY) : NULL;
        fail_msg("case '%s': %s: Hydra has %s, here %s", name, key, a, b ? b : "it is absent");
    }
    json_object_foreach(got, key, v) {
        if (!json_object_get(want, key) && !is_own(c, key) && !json_object_get(more, key))
            fail_msg("case '%s': %s is not in Hydra's tree", name, key);
    }
}

static void check_round_trip(const char *name, const struct conf *c, const struct conf_node *resolved) {
    struct buf b = {0};
    struct conf_node *raw = NULL, *back = NULL;
    assert_int_equal(conf_yaml(c, &b), 0);
    if (conf__yaml_parse(&raw, b.p, b.n, name) < 0 || conf__resolve(&back, raw) < 0) fail_msg("%s\n%s", err_msg(), b.p);
    if (!conf__node_equal(resolved, back)) fail_msg("case '%s' reads back otherwise from\n%s", name, b.p);
    conf__node_free(raw);
    conf__node_free(back);
    buf_free(&b);
}

static int load_case(struct conf **c, const json_t *args, const char *schema) {
    char *argv[64];
    int argc = 0;
    size_t k;
    json_t *a;
    json_array_foreach(args, k, a) {
        if (strcmp(json_string_value(a), "--config-name") == 0) argv[argc++] = (char *)"--config-path=" DIR;
        argv[argc++] = (char *)json_string_value(a);
        assert_in_range(argc, 0, 62);
    }
    return conf_load(c, schema, argc, argv);
}

static json_t *expected(const json_t *base, const json_t *one) {
    json_t *want = json_copy((json_t *)base), *v;
    size_t k;
    json_array_foreach(json_object_get(one, "gone"), k, v) json_object_del(want, json_string_value(v));
    json_object_update(want, json_object_get(one, "changed"));
    return want;
}

static void test_cases(void **state) {
    (void)state;
    json_t *doc = load_json("hydra.json"), *one, *v;
    const char *key;
    size_t k, refused = 0, accepted = 0;
    json_object_foreach(json_object_get(doc, "env"), key, v) setenv(key, json_string_value(v), 1);
    json_array_foreach(json_object_get(doc, "cases"), k, one) {
        const char *name = json_string_value(json_object_get(one, "name"));
        const char *schema = json_string_value(json_object_get(one, "schema"));
        struct conf *c = NULL;
        const int rc = load_case(&c, json_object_get(one, "args"), schema);
        if (json_object_get(one, "error")) {
            if (rc != ERR_INVAL) fail_msg("case '%s': Hydra refuses it, here the code is %d", name, rc);
            assert_true(strlen(err_msg()) > 10);
            assert_null(strchr(err_msg(), '\n') && !strstr(name, "\n") ? err_msg() : NULL); /* one line */
            refused++;
            continue;
        }
        if (rc != 0) fail_msg("case '%s': %s", name, err_msg());
        struct conf_node *resolved = NULL;
        assert_int_equal(conf__resolve(&resolved, c->raw), 0);
        json_t *got = json_object(), *want = expected(json_object_get(json_object_get(doc, "base"), schema), one);
        flatten(resolved, "", got);
        const bool over = strcmp(schema, "ppo_megatron_trainer") == 0; /* here it has all of ppo_trainer's keys too */
        compare(name, c, got, want, over ? json_object_get(json_object_get(doc, "base"), "ppo_trainer") : NULL);
        check_round_trip(name, c, resolved);
        json_decref(got);
        json_decref(want);
        conf__node_free(resolved);
        conf_free(c);
        accepted++;
    }
    json_decref(doc);
    assert_true(accepted > 150 && refused >= 40); /* the fixture is the whole one */
}

static void test_key_order(void **state) {
    (void)state;
    json_t *doc = load_json("hydra.json"), *want;
    const char *schema;
    json_object_foreach(json_object_get(doc, "base"), schema, want) {
        if (strcmp(schema, "ppo_megatron_trainer") == 0) continue; /* here over ppo_trainer, in another order */
        struct conf *c = NULL;
        struct conf_node *resolved = NULL;
        assert_int_equal(conf_load(&c, schema, 0, NULL), 0);
        assert_int_equal(conf__resolve(&resolved, c->raw), 0);
        json_t *got = json_object();
        flatten(resolved, "", got);
        conf__node_free(resolved);
        void *mine = json_object_iter(got);
        const char *key;
        json_t *v;
        json_object_foreach(want, key, v) {
            (void)v;
            while (mine && is_own(c, json_object_iter_key(mine)) && strcmp(json_object_iter_key(mine), key) != 0)
                mine = json_object_iter_next(got, mine);
            assert_non_null(mine);
            assert_string_equal(json_object_iter_key(mine), key);
            mine = json_object_iter_next(got, mine);
        }
        json_decref(got);
        conf_free(c);
    }
    json_decref(doc);
}

static void test_yaml_words(void **state) {
    (void)state;
    struct buf b = {0};
    struct conf_node *v = NULL;
    json_t *want = load_json("scalars.json"), *got = json_object();
    struct conf c = {0};
    assert_int_equal(file_read(&b, DIR "/scalars.yaml", 0), 0);
    if (conf__yaml_parse(&v, b.p, b.n, "scalars.yaml") < 0) fail_msg("%s", err_msg());
    flatten(v, "", got);
    compare("scalars.yaml", &c, got, want, NULL);
    struct buf again = {0};
    struct conf_node *back = NULL;
    assert_int_equal(conf__yaml_print(&again, v), 0);
    assert_int_equal(conf__yaml_parse(&back, again.p, again.n, "again"), 0);
    assert_true(conf__node_equal(v, back));
    conf__node_free(back);
    conf__node_free(v);
    buf_free(&again);
    buf_free(&b);
    json_decref(want);
    json_decref(got);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_cases),
        cmocka_unit_test(test_key_order),
        cmocka_unit_test(test_yaml_words),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
