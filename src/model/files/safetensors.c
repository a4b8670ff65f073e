/* safetensors.c - safetensors files: a checked reader over a mapping, a writer.
 *
 * Format: u64 little-endian header length, a JSON object {name: {dtype, shape,
 * data_offsets}}, the data.  Values are not looked at here.
 * Invariant: after safetensors_open every tensor lies inside the mapping, its bytes are
 * exactly its shape times its dtype, and the tensors tile the data without
 * hole or overlap (the rule of the safetensors library). */
#include "model/files/safetensors.h"

#include "base/buf.h"
#include "base/err.h"
#include "base/file.h"
#include "base/json.h"
#include "base/map.h"

#include <stdlib.h>
#include <string.h>

enum { LEN_BYTES = 8, MAX_HEADER = 100000000 /* the safetensors library's limit */ };

struct safetensors_file {
    struct file_map map;
    struct safetensors_tensor *tensors; /* in data order */
    int64_t n;
    struct map by_name;
    json_t *metadata; /* NULL: none */
};

static const struct {
    const char *name;
    enum dtype dt;
} st_dtypes[] = {
    {"F32", DT_F32}, {"BF16", DT_BF16}, {"F16", DT_F16}, {"F64", DT_F64},
    {"I32", DT_I32}, {"I64", DT_I64},   {"U8", DT_U8},   {"F8_E4M3", DT_E4M3},
};
enum { N_ST_DTYPES = sizeof st_dtypes / sizeof st_dtypes[0] };

static const char *st_dtype_name(enum dtype dt) {
    for (int i = 0; i < N_ST_DTYPES; i++)
        if (st_dtypes[i].dt == dt) return st_dtypes[i].name;
    return NULL;
}

/* ---- reading ---- */

static int parse_dtype(struct safetensors_tensor *t, const json_t *o, const char *path) {
    const char *name = json_string_value(json_object_get(o, "dtype"));
    if (!name) FAIL(ERR_FORMAT, "%s: tensor %s: no \"dtype\"", path, t->name);
    for (int i = 0; i < N_ST_DTYPES; i++) {
        if (strcmp(name, st_dtypes[i].name) != 0) continue;
        t->dt = st_dtypes[i].dt;
        return 0;
    }
    FAIL(ERR_UNSUPPORTED, "%s: tensor %s: unsupported dtype %s", path, t->name, name);
}

/* Shape and the bytes that it requires. */
static int parse_shape(struct safetensors_tensor *t, const json_t *o, const char *path) {
    const json_t *shape = json_object_get(o, "shape");
    if (!json_is_array(shape)) FAIL(ERR_FORMAT, "%s: tensor %s: no \"shape\"", path, t->name);
    if (json_array_size(shape) > sizeof t->dim / sizeof t->dim[0])
        FAIL(ERR_UNSUPPORTED, "%s: tensor %s: unsupported rank %zu", path, t->name, json_array_size(shape));
    t->nd = (int)json_array_size(shape);
    t->bytes = dtype_size(t->dt);
    for (int i = 0; i < t->nd; i++) {
        const json_t *d = json_array_get(shape, (size_t)i);
        t->dim[i] = json_is_integer(d) ? (int64_t)json_integer_value(d) : -1;
        if (t->dim[i] < 0) FAIL(ERR_FORMAT, "%s: tensor %s: shape is not a list of sizes", path, t->name);
        if (__builtin_mul_overflow(t->bytes, (size_t)t->dim[i], &t->bytes))
            FAIL(ERR_FORMAT, "%s: tensor %s: shape is too large", path, t->name);
    }
    return 0;
}

static int parse_range(struct safetensors_tensor *t, const json_t *o, const uint8_t *data, size_t data_bytes, const char *path) {
    const json_t *r = json_object_get(o, "data_offsets");
    const json_t *b = json_array_get(r, 0), *e = json_array_get(r, 1);
    if (json_array_size(r) != 2 || !json_is_integer(b) || !json_is_integer(e))
        FAIL(ERR_FORMAT, "%s: tensor %s: \"data_offsets\" is not [begin, end]", path, t->name);
    const int64_t lo = json_integer_value(b), hi = json_integer_value(e);
    if (lo < 0 || hi < lo || (uint64_t)hi > data_bytes)
        FAIL(ERR_FORMAT, "%s: tensor %s: bytes [%lld, %lld) are outside the %zu bytes of data; is the file truncated?", path,
             t->name, (long long)lo, (long long)hi, data_bytes);
    if ((size_t)(hi - lo) != t->bytes)
        FAIL(ERR_FORMAT, "%s: tensor %s: %lld bytes of data for a shape of %zu bytes", path, t->name, (long long)(hi - lo),
             t->bytes);
    t->data = data + lo;
    return 0;
}

static int by_data(const void *a, const void *b) {
    const struct safetensors_tensor *x = a, *y = b;
    if (x->data != y->data) return x->data < y->data ? -1 : 1;
    return x->bytes < y->bytes ? -1 : x->bytes > y->bytes; /* an empty tensor before the one it touches */
}

static int check_tiling(const struct safetensors_file *f, const uint8_t *data, size_t data_bytes, const char *path) {
    const uint8_t *at = data;
    for (int64_t i = 0; i < f->n; i++) {
        const struct safetensors_tensor *t = &f->tensors[i];
        if (t->data < at) FAIL(ERR_FORMAT, "%s: tensor %s overlaps tensor %s", path, t->name, f->tensors[i - 1].name);
        if (t->data > at) FAIL(ERR_FORMAT, "%s: %zu unused bytes before tensor %s", path, (size_t)(t->data - at), t->name);
        at += t->bytes;
    }
    if (at != data + data_bytes) FAIL(ERR_FORMAT, "%s: %zu bytes after the last tensor", path, (size_t)(data + data_bytes - at));
    return 0;
}

static int parse_tensors(struct safetensors_file *f, const json_t *header, const uint8_t *data, size_t data_bytes,
                         const char *path) {
    const char *name;
    json_t *o; /* jansson's iteration wants it mutable */
    f->tensors = xcalloc(json_object_size(header), sizeof *f->tensors);
    json_object_foreach((json_t *)(uintptr_t)header, name, o) {
        if (strcmp(name, "__metadata__") == 0) {
            f->metadata = json_incref(o);
            continue;
        }
        struct safetensors_tensor *t = &f->tensors[f->n++];
        t->name = xstrdup(name);
        if (!json_is_object(o)) FAIL(ERR_FORMAT, "%s: tensor %s is not described by an object", path, name);
        TRY(parse_dtype(t, o, path));
        TRY(parse_shape(t, o, path));
        TRY(parse_range(t, o, data, data_bytes, path));
    }
    qsort(f->tensors, (size_t)f->n, sizeof *f->tensors, by_data);
    for (int64_t i = 0; i < f->n; i++) map_set(&f->by_name, f->tensors[i].name, strlen(f->tensors[i].name), i);
    return check_tiling(f, data, data_bytes, path);
}

int safetensors_open(struct safetensors_file **out, const char *path) {
    int rc = 0;
    json_t *header = NULL;
    struct safetensors_file *f = xcalloc(1, sizeof *f);
    TRYG(file_map_open(&f->map, path), fail);
    uint64_t len = 0;
    if (f->map.n < LEN_BYTES) FAILG(fail, ERR_FORMAT, "%s: %zu bytes are no safetensors file", path, f->map.n);
    for (int i = 0; i < LEN_BYTES; i++) len |= (uint64_t)f->map.p[i] << (8 * i);
    if (len > MAX_HEADER)
        FAILG(fail, ERR_FORMAT, "%s: header of %llu bytes is over the limit of %d; not a safetensors file?", path,
              (unsigned long long)len, MAX_HEADER);
    if (len > f->map.n - LEN_BYTES)
        FAILG(fail, ERR_FORMAT, "%s: header of %llu bytes in a file of %zu; is the file truncated?", path, (unsigned long long)len,
              f->map.n);
    TRYG(json_parse(&header, (const char *)f->map.p + LEN_BYTES, (size_t)len, path), fail);
    if (!json_is_object(header)) FAILG(fail, ERR_FORMAT, "%s: the header is not a JSON object", path);
    const size_t start = LEN_BYTES + (size_t)len;
    TRYG(parse_tensors(f, header, f->map.p + start, f->map.n - start, path), fail);
    json_decref(header);
    *out = f;
    return 0;
fail:
    json_decref(header);
    safetensors_close(f);
    return rc;
}

void safetensors_close(struct safetensors_file *f) {
    if (!f) return;
    for (int64_t i = 0; i < f->n; i++) free(f->tensors[i].name);
    free(f->tensors);
    map_free(&f->by_name);
    json_decref(f->metadata);
    file_unmap(&f->map);
    free(f);
}

int64_t safetensors_count(const struct safetensors_file *f) { return f->n; }

const struct safetensors_tensor *safetensors_at(const struct safetensors_file *f, int64_t i) {
    CHECK(i >= 0 && i < f->n);
    return &f->tensors[i];
}

const struct safetensors_tensor *safetensors_find(const struct safetensors_file *f, const char *name) {
    int64_t i;
    return map_gets(&f->by_name, name, &i) ? &f->tensors[i] : NULL;
}
const char *safetensors_metadata(const struct safetensors_file *f, const char *key) {
    return json_string_value(json_object_get(f->metadata, key));
}

/* ---- writing ---- */

static size_t tensor_bytes(const struct safetensors_write_tensor *t) {
    size_t n = dtype_size(t->dt);
    for (int i = 0; i < t->nd; i++) n *= (size_t)t->dim[i];
    return n;
}

/* Length, JSON, spaces up to a multiple of 8 so that the data is aligned. */
static int build_header(struct buf *b, const struct safetensors_write_tensor *t, int64_t n, const json_t *metadata) {
    int rc = 0;
    json_t *root = json_object();
    size_t at = 0;
    if (metadata) json_object_set(root, "__metadata__", (json_t *)(uintptr_t)metadata); /* only its count changes */
    for (int64_t i = 0; i < n; i++) {
        const size_t bytes = tensor_bytes(&t[i]);
        json_t *shape = json_array();
        for (int k = 0; k < t[i].nd; k++) json_array_append_new(shape, json_integer(t[i].dim[k]));
        json_object_set_new(root, t[i].name,
                            json_pack("{s:s, s:o, s:[I, I]}", "dtype", st_dtype_name(t[i].dt), "shape", shape, "data_offsets",
                                      (json_int_t)at, (json_int_t)(at + bytes)));
        at += bytes;
    }
    CHECK((int64_t)json_object_size(root) == n + (metadata != NULL)); /* names are distinct */
    const uint8_t zero[LEN_BYTES] = {0};
    TRYG(buf_add(b, zero, LEN_BYTES), out);
    TRYG(json_dump_line(b, root), out);
    while (b->n % 8 != 0) TRYG(buf_addc(b, ' '), out);
    const uint64_t len = b->n - LEN_BYTES;
    for (int i = 0; i < LEN_BYTES; i++) b->p[i] = (char)(len >> (8 * i) & 0xff);
out:
    json_decref(root);
    return rc;
}

size_t safetensors_header_bytes(const struct safetensors_write_tensor *t, int64_t n, const json_t *metadata) {
    struct buf b = {0};
    CHECK(build_header(&b, t, n, metadata) == 0);
    const size_t bytes = b.n;
    buf_free(&b);
    return bytes;
}

/* A file as file_writer reads it: header, then tensors. */
struct image {
    struct buf header;
    const struct safetensors_write_tensor *t;
    size_t *at; /* (n + 1): where each begins in the file, and the file's end */
    int64_t n;
};

/* The tensor with a byte of the file, not of its header. */
static int64_t tensor_of(const struct image *m, size_t at) {
    int64_t lo = 0, hi = m->n;
    while (hi - lo > 1) {
        const int64_t mid = lo + (hi - lo) / 2;
        if (m->at[mid] <= at) lo = mid;
        else hi = mid;
    }
    return lo;
}

static int check(const struct safetensors_write_tensor *t, size_t off, const void *p, size_t n) {
    return t->check ? t->check(t->arg, off, p, n) : 0;
}

static int read_elements(const struct safetensors_write_tensor *t, size_t off, char *dst, size_t n) {
    if (t->data) memcpy(dst, (const char *)t->data + off, n);
    else TRY(t->read(t->arg, off, dst, n));
    return check(t, off, dst, n);
}

/* Some of n bytes of a tensor from off on: whole elements, or the requested part of one. */
static int read_tensor(const struct safetensors_write_tensor *t, size_t off, char *dst, size_t n, size_t *got) {
    const size_t size = dtype_size(t->dt), skip = off % size;
    char element[8];
    *got = n - n % size;
    if (skip == 0 && *got > 0) return read_elements(t, off, dst, *got);
    *got = n < size - skip ? n : size - skip;
    TRY(read_elements(t, off - skip, element, size));
    memcpy(dst, element + skip, *got);
    return 0;
}

/* Whole elements of tensor i alone, which are in memory. */
static bool lends(const struct image *m, int64_t i, size_t at, size_t end) {
    if (i >= m->n || !m->t[i].data || at < m->at[i] || end > m->at[i + 1]) return false;
    return (at - m->at[i]) % dtype_size(m->t[i].dt) == 0 && (end - at) % dtype_size(m->t[i].dt) == 0;
}

static int read_image(void *arg, size_t at, size_t n, char *dst, const char **p) {
    const struct image *m = arg;
    const size_t end = at + n;
    int64_t i = tensor_of(m, at);
    if (lends(m, i, at, end)) {
        *p = (const char *)m->t[i].data + (at - m->at[i]);
        return check(&m->t[i], at - m->at[i], *p, n);
    }
    if (at < m->header.n) {
        const size_t k = m->header.n - at < n ? m->header.n - at : n;
        memcpy(dst, m->header.p + at, k);
        at += k;
        dst += k;
    }
    for (size_t got; at < end; at += got, dst += got) {
        while (m->at[i + 1] <= at) i++;
        const size_t left = (end < m->at[i + 1] ? end : m->at[i + 1]) - at;
        TRY(read_tensor(&m->t[i], at - m->at[i], dst, left, &got));
    }
    return 0;
}

static int write_file(struct file_writer *w, const char *path, const struct safetensors_write_tensor *t, int64_t n,
                      const json_t *metadata) {
    struct image m = {.t = t, .n = n, .at = xcalloc((size_t)n + 1, sizeof *m.at)};
    struct file_source s = {.read = read_image, .arg = &m, .any_thread = true};
    int rc = build_header(&m.header, t, n, metadata);
    m.at[0] = m.header.n;
    for (int64_t i = 0; i < n; i++) {
        m.at[i + 1] = m.at[i] + tensor_bytes(&t[i]);
        s.any_thread = s.any_thread && (t[i].data || t[i].any_thread);
    }
    if (rc == 0) rc = file_writer_add(w, path, m.at[n], &s);
    buf_free(&m.header);
    free(m.at);
    return rc;
}

int safetensors_write(struct file_writer *w, const char *path, const struct safetensors_write_tensor *t, int64_t n,
                      const json_t *metadata) {
    struct file_writer *own = NULL;
    if (!w) file_writer_open(&own);
    int rc = write_file(w ? w : own, path, t, n, metadata);
    if (rc == 0 && own) rc = file_writer_finish(own);
    file_writer_close(own);
    return rc < 0 ? err_pass(rc, __FILE__, __LINE__) : 0;
}
