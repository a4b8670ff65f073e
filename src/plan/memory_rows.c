/* memory_rows.c - see memory_rows.h. */
#include "plan/memory_rows.h"

#include "base/err.h"

#include <stdarg.h>
#include <stdio.h>
#include <string.h>

static const char *size_text(char text[32], size_t bytes, int width) {
    const bool small = bytes < (size_t)1 << 30;
    snprintf(text, 32, "%*.*f %s", width, small ? 1 : 2, (double)bytes / (small ? 0x1p20 : 0x1p30), small ? "MiB" : "GiB");
    return text;
}

void memory_row_text(const struct memory_rows *r, const char *name, size_t bytes, const char *note) {
    char size[32];
    if (!r->text) return;
    if (r->narrow) buf_addf(r->text, "  %-22s %9.2f GiB%s%s\n", name, (double)bytes / 0x1p30, *note ? "  " : "", note);
    else buf_addf(r->text, "  %-34s %s  %s\n", name, size_text(size, bytes, 9), note);
}

void memory_rows_open(struct memory_rows *r, size_t total, size_t limit) {
    r->json = json_pack("{s:I, s:I, s:[]}", "total", (json_int_t)total, "limit", (json_int_t)limit, "parts");
}

void memory_row(const struct memory_rows *r, const char *name, size_t bytes, const char *note) {
    memory_row_text(r, name, bytes, note);
    json_array_append_new(json_object_get(r->json, "parts"),
                          json_pack("{s:s, s:I, s:s, s:b}", "name", name + strspn(name, " "), "bytes", (json_int_t)bytes, "note",
                                    note, "block", *name == ' '));
}

void memory_row_update(const struct memory_rows *r, const char *name, size_t bytes, size_t grads, const char *note) {
    const json_t *parts = json_object_get(r->json, "parts");
    char text[256], size[32];
    snprintf(text, sizeof text, "gradients (fp32): %s; %s", size_text(size, grads, 0), note);
    memory_row(r, name, bytes, text);
    json_object_set_new(json_array_get(parts, json_array_size(parts) - 1), "gradients", json_integer((json_int_t)grads));
}

void memory_row_logits(const struct memory_rows *r, const char *name, const struct model_config *c, int64_t n) {
    char note[96];
    snprintf(note, sizeof note, "fp32, of %lld tokens; backward reads them", (long long)n);
    if (n > 0) memory_row(r, name, model_kept_bytes(c, n), note);
}

void memory_rows_training(const struct memory_rows *r, const struct memory_training *t) {
    const struct model_memory *const m = t->model;
    const size_t chunk = m->shared_chunk + (t->own_grads ? m->chunk : 0);
    char note[64];
    memory_row(r, "fp32 master", m->master, t->master);
    if (t->own_grads) memory_row(r, "gradients", m->grads, t->several ? "fp32, a shard" : "fp32");
    snprintf(note, sizeof note, "fp32, of %lld micro-batches", (long long)t->grad_chunk);
    if (chunk) memory_row(r, "gradients of a chunk", chunk, note);
    memory_row(r, "optimizer state", m->moments, t->state);
    if (m->exchange) memory_row(r, "exchange", m->exchange, "gradients and weights in transfer between ranks");
}

const char *memory_need(char text[160], size_t total, size_t limit, const char *others) {
    snprintf(text, 160, "the run needs %.2f GiB, the limit is %.2f GiB%s", (double)total / 0x1p30, (double)limit / 0x1p30, others);
    return text;
}

int memory_refuse(const char *need, const char *keys, ...) {
    char text[512];
    va_list ap;
    va_start(ap, keys);
    vsnprintf(text, sizeof text, keys, ap);
    va_end(ap);
    FAIL(ERR_NOMEM, "%s; %s fits (the result is the same)", need, text);
}
