/* fuzz_conf.c - the configuration under arbitrary input: the first byte picks an
 * override, a value, a YAML text, or an interpolation.  What is accepted must
 * print as YAML and read back the same.  libFuzzer's entry; without libFuzzer
 * (-DFUZZ_REPLAY) a main that replays files, or mutates them for N rounds:
 *   fuzz_conf FILE...          fuzz_conf --rounds N FILE...
 * Build: cc -DFUZZ_REPLAY -fsanitize=address,undefined -iquote src tests/fuzz/fuzz_conf.c libverlc_base.a ... */
#include "base/conf_int.h"
#include "base/err.h"
#include "base/file.h"
#include "base/hash.h"

#include <stdlib.h>
#include <string.h>

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t n);

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

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t n) {
    if (n < 1) return 0;
    char *text = xstrndup((const char *)data + 1, n - 1); /* may hold zero bytes, like a file */
    struct conf_node *v = NULL, *root = conf__node_new(CONF_DICT);
    struct conf *c = NULL;
    switch (data[0] % 4) {
    case 0:
        if (conf_load(&c, "evaluation", 1, &text) == 0) round_trip(c->raw);
        conf_free(c);
        break;
    case 1:
        if (conf__parse_value(&v, text, "fuzz") == 0) conf__node_put(root, "v", v);
        break;
    case 2:
        if (conf__yaml_parse(&v, text, n - 1, "fuzz") == 0) conf__node_put(root, "v", v);
        break;
    default:
        conf__node_put(root, "b", conf__node_str("text", 4));
        conf__node_put(root, "v", conf__node_str(text, strlen(text)));
    }
    round_trip(root);
    conf__node_free(root);
    free(text);
    return 0;
}

#ifdef FUZZ_REPLAY
/* One random change: a byte flipped, inserted, dropped, or a token put in. */
static void mutate(struct buf *b, const struct buf *seed, uint64_t round) {
    static const char *const tokens[] = {"${", "}", "[", "]", "{", "}", "'", "\"", "\\", ",", ":", "=", "???", "oc.select:", "oc.env:X,",
                                         "null", "1e-6", ".", "<<", "&a", "*a", "\n  ", "- ", "b", "+", "~"};
    buf_reset(b);
    buf_add(b, seed->p, seed->n);
    for (uint64_t k = 0; k < 1 + round % 5; k++) {
        const uint64_t r = hash64((uint64_t[]){round, k}, 16);
        const size_t at = b->n ? (size_t)(r >> 8) % b->n : 0;
        const char *t = tokens[(r >> 40) % (sizeof tokens / sizeof tokens[0])];
        struct buf tail = {0};
        buf_add(&tail, b->p + at, b->n - at);
        b->n = at;
        if (r % 3 == 0) buf_adds(b, t);
        else if (r % 3 == 1) buf_addc(b, (char)(r >> 32));
        buf_add(b, tail.p + (r % 3 == 2 && tail.n), tail.n - (r % 3 == 2 && tail.n));
        buf_free(&tail);
    }
}

int main(int argc, char **argv) {
    const bool rounds = argc > 2 && strcmp(argv[1], "--rounds") == 0;
    const uint64_t n = rounds ? strtoull(argv[2], NULL, 10) : 0;
    for (int k = rounds ? 3 : 1; k < argc; k++) {
        struct buf seed = {0}, b = {0};
        if (file_read(&seed, argv[k], 1 << 20) < 0) {
            fprintf(stderr, "%s\n", err_msg());
            return 3;
        }
        LLVMFuzzerTestOneInput((const uint8_t *)seed.p, seed.n);
        for (uint64_t j = 0; j < n; j++) {
            mutate(&b, &seed, j);
            LLVMFuzzerTestOneInput((const uint8_t *)b.p, b.n);
        }
        buf_free(&seed);
        buf_free(&b);
    }
    return 0;
}
#endif
