/* fuzz_model.c - hostile safetensors files and config.json texts; the first byte picks
 * the parser.  What safetensors_open accepts is read to its last byte, so that a range outside
 * the mapping is found. */
#include "fuzz.h"

#include "base/buf.h"
#include "base/json.h"
#include "model/files/files_int.h"

#include <string.h>
#include <sys/mman.h>

static const struct safetensors_tensor *find_in(void *file, const char *name) { return safetensors_find(file, name); }

/* A tensor as a matrix of rows of 32 that bitsandbytes has saved, if its description says so: all of its scales. */
static void fuzz_nf4(struct safetensors_file *f, const struct safetensors_tensor *t) {
    struct model_param p = {.nd = 2, .rows = (int64_t)(t->bytes / 16), .cols = 32};
    const struct bnb_args a = {.find = find_in, .arg = f, .param = &p, .path = "fuzz"};
    struct bnb_weight b;
    const int64_t n = model__quant_scales(QUANT_NF4, p.rows, p.cols);
    if (p.rows == 0 || strlen(t->name) >= sizeof p.name) return;
    memcpy(p.name, t->name, strlen(t->name) + 1);
    if (model__bnb_find(&b, &a) < 0) return;
    float *scale = xmalloc((size_t)n * sizeof *scale);
    model__bnb_scales(&b, n, scale);
    free(scale);
}

static void fuzz_safetensors(const uint8_t *p, size_t n) {
    char path[64];
    const int fd = memfd_create("fuzz", 0);
    CHECK(fd >= 0 && write(fd, p, n) == (ssize_t)n);
    snprintf(path, sizeof path, "/proc/self/fd/%d", fd);
    struct safetensors_file *f;
    if (safetensors_open(&f, path) == 0) {
        uint32_t sum = 0;
        for (int64_t i = 0; i < safetensors_count(f); i++) {
            const struct safetensors_tensor *t = safetensors_at(f, i);
            for (size_t k = 0; k < t->bytes; k++) sum += t->data[k];
            CHECK(safetensors_find(f, t->name) != NULL);
            fuzz_nf4(f, t);
        }
        __asm__ volatile("" : : "r"(sum)); /* the reads must happen */
        safetensors_close(f);
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
        for (int which = 0; which < MODEL_ROPE_TABLES; which++) {
            if (!model_has_rope(&c, (enum model_rope_table)which)) continue;
            model_rope_table(&c, (enum model_rope_table)which, 2, 2, table); /* (2, head_dim / 2, 2), head_dim <= 4096 */
            for (int64_t i = 0; i < 2 * c.head_dim; i++) CHECK(table[i] - table[i] == 0.0f);
        }
        model_config_free(&c);
    }
    json_decref(o);
}

int LLVMFuzzerTestOneInput(const uint8_t *p, size_t n) {
    if (n == 0) return 0;
    fuzz_quiet();
    if (p[0] & 1) fuzz_safetensors(p + 1, n - 1);
    else fuzz_config(p + 1, n - 1);
    return 0;
}
