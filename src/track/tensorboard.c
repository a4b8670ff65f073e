/* tensorboard.c - scalars, and validation samples as text, in TensorBoard's event files: TFRecord
 * framing (length, masked CRC-32C, data, masked CRC-32C) around tensorflow.Event
 * protocol buffers.  Written here because the official writer would bring
 * Python into every run; the real reader is the oracle. */
#include "track/track_int.h"

#include "base/buf.h"
#include "base/clock.h"
#include "base/err.h"
#include "base/file.h"

#include <errno.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

static uint32_t crc32c(const void *data, size_t n) { /* Castagnoli, reflected */
    const uint8_t *p = data;
    uint32_t c = ~0u;
    while (n--) {
        c ^= *p++;
        for (int k = 0; k < 8; k++) c = (c >> 1) ^ (0x82f63b78u & (0u - (c & 1u)));
    }
    return ~c;
}
static uint32_t masked(uint32_t c) { return ((c >> 15) | (c << 17)) + 0xa282ead8u; }

/* ---- protocol buffer fields ---- */
static void varint(struct buf *b, uint64_t v) {
    while (v >= 0x80) {
        buf_addc(b, (char)(v | 0x80));
        v >>= 7;
    }
    buf_addc(b, (char)v);
}
static void field(struct buf *b, int no, int wire) { varint(b, (uint64_t)(no << 3 | wire)); }
static void field_bytes(struct buf *b, int no, const void *p, size_t n) {
    field(b, no, 2);
    varint(b, n);
    buf_add(b, p, n);
}
static void field_double(struct buf *b, int no, double v) {
    field(b, no, 1);
    buf_add(b, &v, 8);
}
static void field_float(struct buf *b, int no, float v) {
    field(b, no, 5);
    buf_add(b, &v, 4);
}

struct tb_ctx {
    FILE *f;
    char *path;
};

static int write_event(struct tb_ctx *c, const struct buf *event) {
    const uint64_t n = event->n;
    const uint32_t head = masked(crc32c(&n, 8)), body = masked(crc32c(event->p, event->n));
    if (fwrite(&n, 8, 1, c->f) != 1 || fwrite(&head, 4, 1, c->f) != 1 || fwrite(event->p, event->n, 1, c->f) != 1 ||
        fwrite(&body, 4, 1, c->f) != 1)
        FAIL(ERR_IO, "%s: %s", c->path, strerror(errno));
    return 0;
}

static void tb_close(void *v) {
    struct tb_ctx *c = v;
    if (c->f) fclose(c->f);
    free(c->path);
    free(c);
}

static int write_start(struct tb_ctx *c, int64_t resume_step) {
    struct buf e = {0}, session = {0};
    field_double(&e, 1, clock_wall());
    field_bytes(&e, 3, "brain.Event:2", 13);
    int rc = write_event(c, &e);
    if (rc == 0 && resume_step > 0) { /* SessionLog START: readers drop what is newer */
        buf_reset(&e);
        field(&session, 1, 0);
        varint(&session, 1);
        field_double(&e, 1, clock_wall());
        field(&e, 2, 0);
        varint(&e, (uint64_t)resume_step + 1);
        field_bytes(&e, 7, session.p, session.n);
        rc = write_event(c, &e);
    }
    buf_free(&e);
    buf_free(&session);
    return rc;
}

static int tb_open(void **ctx, const char *name, const struct track_args *a) {
    (void)name;
    struct tb_ctx *c = xcalloc(1, sizeof *c);
    const char *env = getenv("TENSORBOARD_DIR");
    char *dir = env && *env ? file_expand(env) : file_join(a->run_dir, "tensorboard");
    char host[64] = "localhost";
    gethostname(host, sizeof host - 1);
    int rc = file_mkdirs(dir);
    c->path = xasprintf("%s/events.out.tfevents.%010lld.%s.%lld", dir, (long long)clock_wall(), host, (long long)getpid());
    free(dir);
    if (rc == 0 && !(c->f = fopen(c->path, "wb"))) rc = err_set(ERR_IO, __FILE__, __LINE__, "%s: %s", c->path, strerror(errno));
    if (rc == 0) rc = write_start(c, a->resume_step);
    if (rc < 0) tb_close(c);
    else *ctx = c;
    return rc;
}

static int tb_log(void *v, int64_t step, const struct metrics *m, double wall) {
    struct buf summary = {0}, value = {0}, event = {0};
    for (int64_t i = 0; i < m->n; i++) {
        buf_reset(&value);
        field_bytes(&value, 1, m->items[i].name, strlen(m->items[i].name));
        field_float(&value, 2, (float)m->items[i].value);
        field_bytes(&summary, 1, value.p, value.n);
    }
    field_double(&event, 1, wall);
    field(&event, 2, 0);
    varint(&event, (uint64_t)step);
    field_bytes(&event, 5, summary.p ? summary.p : "", summary.n);
    const int rc = write_event(v, &event);
    buf_free(&summary);
    buf_free(&value);
    buf_free(&event);
    return rc;
}

/* verl's Markdown of the samples; a "text" summary is a string tensor with the plugin's name next to it. */
static int tb_generations(void *v, int64_t step, const json_t *rows, double wall) {
    static const char tag[] = "val/generations/text_summary";
    struct buf text = {0}, tensor = {0}, meta = {0}, plugin = {0}, shape = {0}, dim = {0}, value = {0}, summary = {0}, event = {0};
    buf_addf(&text, "**Generation Results - Step %lld**\n\n", (long long)step);
    for (size_t i = 0; i < json_array_size(rows); i++) {
        const json_t *row = json_array_get(rows, i), *score = json_array_get(row, 2);
        buf_addf(&text, "### Sample %zu\n", i + 1);
        for (size_t k = 0; k < 2; k++) {
            const json_t *s = json_array_get(row, k);
            buf_adds(&text, k == 0 ? "**Input:** " : "**Output:** ");
            buf_add(&text, json_string_value(s), json_string_length(s));
            buf_adds(&text, "\n\n");
        }
        if (json_is_number(score)) buf_addf(&text, "**Score:** %.6g\n\n---\n\n", json_number_value(score));
        else buf_adds(&text, "**Score:** none\n\n---\n\n");
    }
    field(&dim, 1, 0); /* TensorShapeProto.Dim.size */
    varint(&dim, 1);
    field_bytes(&shape, 2, dim.p, dim.n);
    field(&tensor, 1, 0); /* TensorProto: dtype DT_STRING, tensor_shape, string_val */
    varint(&tensor, 7);
    field_bytes(&tensor, 2, shape.p, shape.n);
    field_bytes(&tensor, 8, text.p, text.n);
    field_bytes(&plugin, 1, "text", 4);
    field_bytes(&meta, 1, plugin.p, plugin.n);
    field_bytes(&value, 1, tag, strlen(tag));
    field_bytes(&value, 8, tensor.p, tensor.n);
    field_bytes(&value, 9, meta.p, meta.n);
    field_bytes(&summary, 1, value.p, value.n);
    field_double(&event, 1, wall);
    field(&event, 2, 0);
    varint(&event, (uint64_t)step);
    field_bytes(&event, 5, summary.p, summary.n);
    const int rc = write_event(v, &event);
    struct buf *const all[] = {&text, &tensor, &meta, &plugin, &shape, &dim, &value, &summary, &event};
    for (size_t i = 0; i < sizeof all / sizeof *all; i++) buf_free(all[i]);
    return rc;
}

static int tb_flush(void *v) {
    struct tb_ctx *c = v;
    if (fflush(c->f) != 0) FAIL(ERR_IO, "%s: %s", c->path, strerror(errno));
    return 0;
}

const struct tracker track_tensorboard = {
    .name = "tensorboard", .open = tb_open, .log = tb_log, .generations = tb_generations, .flush = tb_flush, .close = tb_close};
