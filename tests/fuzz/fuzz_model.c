/* fuzz_model.c - hostile safetensors files and config.json texts.
 *
 * libFuzzer's entry point.  The first byte picks the parser.  What st_open
 * accepts is read to its last byte, so that a range outside the mapping is
 * found by the sanitizer.
 * Build: clang -fsanitize=fuzzer,address,undefined; without libFuzzer,
 * -DFUZZ_MAIN gives a program that mutates the files named on its command line. */
#include "base/buf.h"
#include "base/err.h"
#include "base/file.h"
#include "base/json.h"
#include "base/rng.h"
#include "model/model.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

int LLVMFuzzerTestOneInput(const uint8_t *p, size_t n);

static void fuzz_safetensors(const uint8_t *p, size_t n) {
    char path[64];
    const int fd = memfd_create("fuzz", 0);
    CHECK(fd >= 0 && write(fd, p, n) == (ssize_t)n);
    snprintf(path, sizeof path, "/proc/self/fd/%d", fd);
    struct st_file *f;
    if (st_open(&f, path) == 0) {
        uint32_t sum = 0;
        for (int64_t i = 0; i < st_count(f); i++) {
            const struct st_tensor *t = st_at(f, i);
            for (size_t k = 0; k < t->bytes; k++) sum += t->data[k];
            CHECK(st_find(f, t->name) != NULL);
        }
        __asm__ volatile("" : : "r"(sum)); /* the reads must happen */
        st_close(f);
    } else {
        CHECK(err_msg()[0] != '\0');
    }
    close(fd);
}

static void fuzz_config(const uint8_t *p, size_t n) {
    json_t *o;
    struct model_config c;
    if (json_parse(&o, (const char *)p, n, "fuzz") < 0) return;
    if (model_config_from_json(&c, o, "fuzz") == 0) {
        float table[2 * 4096];
        CHECK(model_config_params(&c) > 0 && c.n_q_heads % c.n_kv_heads == 0);
        model_rope_table(&c, 2, 2, table); /* (2, head_dim / 2, 2), head_dim <= 4096 */
        for (int64_t i = 0; i < 2 * c.head_dim; i++) CHECK(table[i] - table[i] == 0.0f);
        model_config_free(&c);
    }
    json_decref(o);
}

int LLVMFuzzerTestOneInput(const uint8_t *p, size_t n) {
    if (n == 0) return 0;
    if (p[0] & 1) fuzz_safetensors(p + 1, n - 1);
    else fuzz_config(p + 1, n - 1);
    return 0;
}

#ifdef FUZZ_MAIN
/* Overwrites, deletes and repeats a few bytes, mostly near the front where the header is. */
static void mutate(struct buf *b, struct rng *r) {
    for (uint64_t k = 1 + rng_below(r, 8); k > 0 && b->n > 1; k--) {
        const size_t span = rng_below(r, 4) ? (b->n < 4096 ? b->n : 4096) : b->n;
        const size_t at = (size_t)rng_below(r, span);
        static const char tokens[] = "0123456789-{}[]\",:.eE";
        switch (rng_below(r, 4)) {
        case 0: b->p[at] = (char)rng_below(r, 256); break;
        case 1: b->p[at] = tokens[rng_below(r, sizeof tokens - 1)]; break;
        case 2: b->n = at + 1; break;
        default: memmove(b->p + at, b->p + (size_t)rng_below(r, span), b->n - (at > span ? at : span)); break;
        }
    }
}

int main(int argc, char **argv) {
    struct rng r = {.seed = 1, .stream = RNG_TEST};
    const long rounds = argc > 1 ? atol(argv[1]) : 0;
    for (int i = 2; i < argc; i++) {
        struct buf file = {0};
        if (file_read(&file, argv[i], 0) < 0) return fprintf(stderr, "%s\n", err_msg()), 1;
        const char kind = strstr(argv[i], ".json") ? 0 : 1;
        for (long k = 0; k < rounds; k++) {
            struct buf b = {0};
            buf_addc(&b, kind);
            buf_add(&b, file.p, file.n);
            if (k > 0) {
                struct buf body = {.p = b.p + 1, .n = b.n - 1, .cap = b.cap - 1};
                mutate(&body, &r);
                b.n = body.n + 1;
            }
            uint8_t *exact = malloc(b.n); /* no slack behind the input */
            CHECK(exact != NULL);
            memcpy(exact, b.p, b.n);
            LLVMFuzzerTestOneInput(exact, b.n);
            free(exact);
            buf_free(&b);
        }
        buf_free(&file);
        printf("%s: %ld rounds\n", argv[i], rounds);
    }
    return 0;
}
#endif
