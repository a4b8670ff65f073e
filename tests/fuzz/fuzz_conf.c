/* fuzz_conf.c - the configuration under arbitrary input: the first byte picks an
 * override, a value, a YAML text, a primary config file (defaults, packages), or an interpolation.  What is accepted must
 * print as YAML and read back the same. */
#include "fuzz.h"

#include "conf/conf_int.h"
#include "base/hash.h"

/* Resolves v and sends it through YAML and back. */
static void round_trip(const struct conf_node *v) {
    struct conf_node *resolved = NULL, *raw = NULL, *back = NULL;
    struct buf b = {0};
    if (conf__resolve(&resolved, v) < 0) return;
    if (conf__yaml_print(&b, resolved) == 0) { /* not for texts that are not UTF-8 */
        CHECK(conf__yaml_parse(&raw, b.p, b.n, "again") == 0);
        CHECK(conf__resolve(&back, raw) == 0);
        CHECK(conf__node_equal(resolved, back));
    }
    conf__node_free(resolved);
    conf__node_free(raw);
    conf__node_free(back);
    buf_free(&b);
}

/* The bytes as a user's primary config. */
static void compose(const uint8_t *text, size_t n) {
    char *path = fuzz_file("fuzz.yaml", text, n), *dir = xasprintf("--config-path=%s", fuzz_dir());
    char *argv[] = {dir, (char *)(uintptr_t) "--config-name=fuzz"};
    struct conf *c = NULL;
    const int rc = conf_load(&c, "evaluation", 2, argv);
    fuzz_check_rc(rc);
    if (rc == 0) round_trip(c->raw);
    conf_free(c);
    free(dir);
    free(path);
}

static void check_line(void *arg, const struct conf_change *change) {
    (void)arg;
    CHECK(change->key[0] && !strpbrk(change->was, "\n\r") && !strpbrk(change->now, "\n\r"));
}

/* The bytes as the config.yaml of a checkpoint. */
static void compare(const char *text, size_t n) {
    static struct conf *c; /* one for all inputs */
    char *argv[] = {"data.max_response_length=7", "+reward.source_weights.a=1"};
    if (!c) CHECK(conf_load(&c, "ppo_trainer", 2, argv) == 0);
    fuzz_check_rc(conf_changes(c, text, n, "config.yaml", check_line, NULL));
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t n) {
    if (n < 1) return 0;
    fuzz_quiet();
    char *text = xstrndup((const char *)data + 1, n - 1); /* may hold zero bytes, like a file */
    struct conf_node *v = NULL, *root = conf__node_new(CONF_DICT);
    struct conf *c = NULL;
    switch (data[0] % 5) {
    case 0:
        if (conf_load(&c, "evaluation", 1, &text) == 0) round_trip(c->raw);
        conf_free(c);
        break;
    case 1:
        if (conf__parse_value(&v, text, "fuzz") == 0) conf__node_put(root, "v", v);
        break;
    case 2:
        if (conf__yaml_parse(&v, text, n - 1, "fuzz") == 0) conf__node_put(root, "v", v);
        compare(text, n - 1);
        break;
    case 3: compose(data + 1, n - 1); break;
    default: conf__node_put(root, "b", conf__node_str("text", 4)); conf__node_put(root, "v", conf__node_str(text, strlen(text)));
    }
    round_trip(root);
    conf__node_free(root);
    free(text);
    return 0;
}
