/* dcp.c - torch.distributed.checkpoint's format: a pickle of the class Metadata, which says of each tensor its shape and the boxes
 * that it was cut into, and of each box the bytes of a file where torch.save wrote it.
 *
 * Nothing is joined in memory: a range of a tensor is copied out of the mappings of the files, box by box.  What is no tensor
 * (BytesStorageMetadata) is left.  Chunks that a writer compressed are refused.
 * Invariant: after dcp_open the chunks of every tensor cover each of its elements exactly once. */
#include "model/files/dcp.h"

#include "base/buf.h"
#include "base/err.h"
#include "base/file.h"
#include "base/map.h"
#include "model/files/pickle.h"

#include <stdlib.h>
#include <string.h>

enum { MAX_METADATA = 256 << 20, MAX_NAME = 1024, MAX_FILES = 1 << 14, MAX_CHUNKS = 1 << 14 /* of a tensor */ };

struct stored { /* where a chunk is */
    int64_t file, at, bytes;
    bool used, twice;
};
struct dcp_file {
    char *path;
    struct file_map map;
};
struct dcp {
    struct dcp_file *files;
    int64_t n_files, cap_files;
    struct dcp_tensor *tensors;
    int64_t n, cap, n_left;
};

struct reader { /* while .metadata is read */
    struct dcp *d;
    const char *dir;
    char *path; /* of .metadata */
    const struct pickle_value *storage;
    struct map names;  /* tensor -> its index, -1: left */
    struct map files;  /* relative path -> file */
    struct map stored; /* name, NUL, offsets -> entry */
    struct stored *entries;
    int64_t n, cap;
};

/* ---- names that the class Metadata needs ---- */

enum role {
    ROLE_IGNORED = PICKLE_ROLE_DICT + 1, /* what tensors do not depend on */
    ROLE_SIZE,
    ROLE_METADATA,
    ROLE_TENSOR,
    ROLE_BYTES,
    ROLE_PROPERTIES,
    ROLE_CHUNK,
    ROLE_INDEX,
    ROLE_STORAGE,
    ROLE_DTYPE_UNSUPPORTED, /* that no weight has */
    ROLE_DTYPE = 64,        /* + enum dtype */
};

#define META "torch.distributed.checkpoint.metadata."
#define SHARD "torch.distributed._shard."
static const struct pickle_name NAMES[] = {
    {"collections.OrderedDict", PICKLE_ROLE_DICT},
    {"torch.Size", ROLE_SIZE},
    {META "Metadata", ROLE_METADATA},
    {META "TensorStorageMetadata", ROLE_TENSOR},
    {META "BytesStorageMetadata", ROLE_BYTES},
    {META "TensorProperties", ROLE_PROPERTIES},
    {SHARD "sharded_tensor.metadata.TensorProperties", ROLE_PROPERTIES},
    {META "ChunkStorageMetadata", ROLE_CHUNK},
    {META "MetadataIndex", ROLE_INDEX},
    {"torch.distributed.checkpoint.filesystem._StorageInfo", ROLE_STORAGE},
    {META "_MEM_FORMAT_ENCODING", ROLE_IGNORED},
    {SHARD "sharded_tensor.metadata.MEM_FORMAT_ENCODING", ROLE_IGNORED},
    {META "StorageMeta", ROLE_IGNORED},
    {"torch.distributed.checkpoint.filesystem._StoragePrefix", ROLE_IGNORED},
    {"torch.distributed.checkpoint.planner.SavePlan", ROLE_IGNORED},
    {"torch.distributed.checkpoint.planner.WriteItem", ROLE_IGNORED},
    {"torch.distributed.checkpoint.planner.WriteItemType", ROLE_IGNORED},
    {"torch.distributed.checkpoint.planner.TensorWriteData", ROLE_IGNORED},
    {"megatron.core.dist_checkpointing.strategies.torch.MCoreMetadata", ROLE_METADATA},
    {"megatron.core.dist_checkpointing.strategies.torch.MCoreSavePlan", ROLE_IGNORED},
    {"pathlib.PosixPath", ROLE_IGNORED},
    {"pathlib._local.PosixPath", ROLE_IGNORED},
    {"torch.serialization._get_layout", ROLE_IGNORED},
    {"torch.device", ROLE_IGNORED},
    {"torch.float32", ROLE_DTYPE + DT_F32},
    {"torch.bfloat16", ROLE_DTYPE + DT_BF16},
    {"torch.float16", ROLE_DTYPE + DT_F16},
    {"torch.float64", ROLE_DTYPE + DT_F64},
    {"torch.int64", ROLE_DTYPE + DT_I64},
    {"torch.int32", ROLE_DTYPE + DT_I32},
    {"torch.uint8", ROLE_DTYPE + DT_U8},
    {"torch.int16", ROLE_DTYPE_UNSUPPORTED},
    {"torch.int8", ROLE_DTYPE_UNSUPPORTED},
    {"torch.bool", ROLE_DTYPE_UNSUPPORTED},
    {"torch.float8_e4m3fn", ROLE_DTYPE_UNSUPPORTED},
    {"torch.float8_e5m2", ROLE_DTYPE_UNSUPPORTED},
};

#define BAD(r, ...)                                                                                                            \
    return (err_wrap(err_set(ERR_FORMAT, __FILE__, __LINE__, __VA_ARGS__), "%s: not what torch.distributed.checkpoint writes", \
                     (r)->path),                                                                                               \
            ERR_FORMAT)

/* The attribute of an object of that class. */
static const struct pickle_value *attribute(const struct pickle_value *v, int role, const char *name) {
    return pickle_is_call(v, role) ? pickle_get(v->state, name) : NULL;
}

static bool is_name(const struct pickle_value *v) {
    return v && v->kind == PICKLE_STR && v->n <= MAX_NAME && pickle_is_graphic(v->s, v->n);
}

/* ---- where the chunks are ---- */

/* (name, offsets) of a chunk as one string of bytes. */
static void chunk_key(struct buf *b, const char *name, size_t n_name, const int64_t *at, int nd) {
    b->n = 0;
    buf_add(b, name, n_name);
    buf_addc(b, '\0');
    buf_add(b, at, (size_t)nd * sizeof *at);
}

/* A file next to .metadata. */
static int open_file(struct reader *r, const struct pickle_value *name, int64_t *index) {
    struct dcp *d = r->d;
    char *path = NULL;
    if (!is_name(name) || name->n > 255 || name->s[0] == '.' || memchr(name->s, '/', name->n))
        BAD(r, "a chunk in what is no file next to it");
    if (map_get(&r->files, name->s, name->n, index)) return 0;
    if (d->n_files >= MAX_FILES) BAD(r, "more than %d files", MAX_FILES);
    char *file = xstrndup(name->s, name->n);
    const int rc = file_in_dir(&path, r->dir, file);
    if (rc == 0 && !path)
        err_set(ERR_INPUT, __FILE__, __LINE__,
                "%s/%s is missing: the files of all ranks belong together; where several machines wrote them, copy all into one "
                "directory",
                r->dir, file);
    free(file);
    if (!path) return rc < 0 ? err_pass(rc, __FILE__, __LINE__) : ERR_INPUT;
    xgrow((void **)&d->files, &d->cap_files, d->n_files + 1, sizeof *d->files);
    d->files[d->n_files] = (struct dcp_file){.path = path};
    *index = d->n_files++;
    map_set(&r->files, name->s, name->n, *index);
    return file_map_open(&d->files[*index].map, path);
}

/* An entry of storage_data: MetadataIndex(fqn, offset, index) -> _StorageInfo(relative_path, offset, length). */
static int read_stored(struct reader *r, const struct pickle_value *key, const struct pickle_value *info) {
    const struct pickle_value *name = attribute(key, ROLE_INDEX, "fqn"), *offset = attribute(key, ROLE_INDEX, "offset");
    const struct pickle_value *at = attribute(info, ROLE_STORAGE, "offset"), *bytes = attribute(info, ROLE_STORAGE, "length");
    const struct pickle_value *changed = attribute(info, ROLE_STORAGE, "transform_descriptors");
    int64_t i, pos[TORCH_MAX_DIMS];
    if (!name || name->kind != PICKLE_STR) BAD(r, "an entry of its storage without a name");
    if (!map_get(&r->names, name->s, name->n, &i) || i < 0) return 0;
    const int nd = pickle_sizes(offset, ROLE_SIZE, pos, TORCH_MAX_DIMS), n = (int)name->n;
    if (nd < 0 || !pickle_is_int(at) || !pickle_is_int(bytes) || at->i < 0 || bytes->i < 0)
        BAD(r, "tensor %.*s: a chunk whose place is not described", n, name->s);
    if (changed && changed->kind != PICKLE_NONE && changed->n_items != 0)
        FAIL(ERR_UNSUPPORTED, "%s: tensor %.*s: unsupported chunks that were transformed (compressed) as they were written",
             r->path, n, name->s);
    xgrow((void **)&r->entries, &r->cap, r->n + 1, sizeof *r->entries);
    struct stored *s = &r->entries[r->n];
    *s = (struct stored){.at = at->i, .bytes = bytes->i};
    TRY(open_file(r, attribute(info, ROLE_STORAGE, "relative_path"), &s->file));
    const struct dcp_file *f = &r->d->files[s->file];
    if ((uint64_t)s->at > f->map.n || (uint64_t)s->bytes > f->map.n - (uint64_t)s->at)
        FAIL(ERR_FORMAT, "%s: tensor %.*s: a chunk of %lld bytes at %lld reaches outside the file's %zu bytes; is it truncated?",
             f->path, n, name->s, (long long)s->bytes, (long long)s->at, f->map.n);
    struct buf b = {0};
    chunk_key(&b, name->s, name->n, pos, nd);
    if (map_get(&r->stored, b.p, b.n, &i)) r->entries[i].twice = true; /* empty chunks may be at one place: find_chunk */
    else map_set(&r->stored, b.p, b.n, r->n++);
    buf_free(&b);
    return 0;
}

static int by_place(const void *a, const void *b) {
    const struct stored *x = a, *y = b;
    if (x->file != y->file) return x->file < y->file ? -1 : 1;
    if (x->at != y->at) return x->at < y->at ? -1 : 1;
    return x->bytes < y->bytes ? -1 : x->bytes > y->bytes;
}

/* No two chunks in the same bytes. */
static int check_bytes(const struct reader *r) {
    struct stored *sorted = xmalloc((size_t)(r->n + 1) * sizeof *sorted);
    int rc = 0;
    if (r->n > 0) memcpy(sorted, r->entries, (size_t)r->n * sizeof *sorted);
    qsort(sorted, (size_t)r->n, sizeof *sorted, by_place);
    for (int64_t i = 1; i < r->n && rc == 0; i++) {
        const struct stored *a = &sorted[i - 1], *b = &sorted[i];
        if (a->file == b->file && a->bytes > b->at - a->at)
            rc = err_set(ERR_FORMAT, __FILE__, __LINE__, "%s: two chunks overlap at byte %lld", r->d->files[a->file].path,
                         (long long)b->at);
    }
    free(sorted);
    return rc;
}

/* ---- tensors ---- */

/* Its dtype: the first of a tuple, which the class makes of its members. */
static int read_dtype(const struct reader *r, struct dcp_tensor *t, const struct pickle_value *properties) {
    const struct pickle_value *state = pickle_is_call(properties, ROLE_PROPERTIES) ? properties->state : NULL;
    const struct pickle_value *v = state && state->kind == PICKLE_DICT ? pickle_get(state, "dtype") : pickle_item(state, 0);
    const int role = pickle_role(v);
    if (role == ROLE_DTYPE_UNSUPPORTED) FAIL(ERR_UNSUPPORTED, "%s: tensor %s: unsupported dtype %s", r->path, t->name, v->s);
    if (role < ROLE_DTYPE) BAD(r, "tensor %s: no dtype", t->name);
    t->dt = (enum dtype)(role - ROLE_DTYPE);
    return 0;
}

/* *c is filled where the chunk has elements: *empty. */
static int find_chunk(struct reader *r, struct dcp_tensor *t, struct dcp_chunk *c, const struct pickle_value *v, bool *empty) {
    const struct pickle_value *at = attribute(v, ROLE_CHUNK, "offsets"), *dim = attribute(v, ROLE_CHUNK, "sizes");
    int64_t i;
    bool inside = pickle_sizes(at, ROLE_SIZE, c->at, TORCH_MAX_DIMS) == t->nd &&
                  pickle_sizes(dim, ROLE_SIZE, c->dim, TORCH_MAX_DIMS) == t->nd;
    *empty = false;
    for (int k = 0; inside && k < t->nd; k++) {
        inside = c->at[k] <= t->dim[k] && c->dim[k] <= t->dim[k] - c->at[k];
        *empty |= c->dim[k] == 0;
    }
    if (!inside) BAD(r, "tensor %s: a chunk that is not inside it", t->name);
    if (*empty) return 0;
    struct buf key = {0};
    chunk_key(&key, t->name, strlen(t->name), c->at, t->nd);
    const bool found = map_get(&r->stored, key.p, key.n, &i);
    buf_free(&key);
    if (!found) BAD(r, "tensor %s: a chunk that no file has", t->name);
    struct stored *s = &r->entries[i];
    if (s->used || s->twice) BAD(r, "tensor %s: two chunks at the same place", t->name);
    s->used = true;
    const struct dcp_file *f = &r->d->files[s->file];
    TRY(torch_tensor_open(&c->data, f->map.p + s->at, (size_t)s->bytes, t->name, f->path));
    bool same = c->data.dt == t->dt && c->data.nd == t->nd;
    for (int k = 0; same && k < t->nd; k++) same = c->data.dim[k] == c->dim[k];
    if (!same)
        FAIL(ERR_FORMAT, "%s: tensor %s: a chunk at byte %lld has another dtype or shape than .metadata says", f->path, t->name,
             (long long)s->at);
    return 0;
}

static int by_offsets(const void *a, const void *b) {
    const struct dcp_chunk *x = a, *y = b;
    for (int k = 0; k < TORCH_MAX_DIMS; k++)
        if (x->at[k] != y->at[k]) return x->at[k] < y->at[k] ? -1 : 1;
    return 0;
}

static bool overlap(const struct dcp_chunk *a, const struct dcp_chunk *b, int nd) {
    for (int k = 0; k < nd; k++)
        if (a->at[k] >= b->at[k] + b->dim[k] || b->at[k] >= a->at[k] + a->dim[k]) return false;
    return true;
}

/* Boxes inside the tensor that do not overlap and have as many elements as it cover it. In the order of their first dimension
 * only those that begin before a box ends there can overlap it. */
static int check_tiling(const struct reader *r, struct dcp_tensor *t) {
    int64_t sum = 0;
    qsort(t->chunks, (size_t)t->n_chunks, sizeof *t->chunks, by_offsets);
    for (int64_t i = 0; i < t->n_chunks; i++) {
        const struct dcp_chunk *c = &t->chunks[i];
        int64_t n = 1;
        for (int k = 0; k < t->nd; k++) n *= c->dim[k]; /* <= count: inside it */
        if (n > t->count - sum) BAD(r, "tensor %s: overlapping chunks", t->name);
        sum += n;
        for (int64_t j = i + 1; j < t->n_chunks && t->chunks[j].at[0] < c->at[0] + c->dim[0]; j++)
            if (overlap(c, &t->chunks[j], t->nd)) BAD(r, "tensor %s: overlapping chunks", t->name);
    }
    if (sum != t->count) BAD(r, "tensor %s: its chunks have %lld elements of %lld", t->name, (long long)sum, (long long)t->count);
    return 0;
}

/* Its shape alone; the chunks are found when all files are known. */
static int read_tensor(struct reader *r, struct dcp_tensor *t, const struct pickle_value *v) {
    TRY(read_dtype(r, t, attribute(v, ROLE_TENSOR, "properties")));
    t->nd = pickle_sizes(attribute(v, ROLE_TENSOR, "size"), ROLE_SIZE, t->dim, TORCH_MAX_DIMS);
    bool bad = t->nd < 1;
    t->count = 1;
    for (int k = 0; k < t->nd && !bad; k++) bad = t->dim[k] == 0 || __builtin_mul_overflow(t->count, t->dim[k], &t->count);
    if (bad || t->count > INT64_MAX / 8) BAD(r, "tensor %s: not a shape of a weight", t->name);
    return 0;
}

static int read_chunks(struct reader *r, struct dcp_tensor *t, const struct pickle_value *v) {
    const struct pickle_value *chunks = attribute(v, ROLE_TENSOR, "chunks");
    if (!pickle_is_sequence(chunks) || chunks->n_items > MAX_CHUNKS)
        BAD(r, "tensor %s: no list of at most %d chunks", t->name, MAX_CHUNKS);
    t->chunks = xcalloc((size_t)chunks->n_items + 1, sizeof *t->chunks);
    for (int64_t i = 0; i < chunks->n_items; i++) {
        bool empty;
        t->chunks[t->n_chunks] = (struct dcp_chunk){0};
        TRY(find_chunk(r, t, &t->chunks[t->n_chunks], chunks->items[i], &empty));
        t->n_chunks += !empty;
    }
    return check_tiling(r, t);
}

/* ---- .metadata ---- */

static int read_name(struct reader *r, const struct pickle_value *key, const struct pickle_value *v, dcp_choice *choose,
                     void *arg) {
    struct dcp *d = r->d;
    if (!key || key->kind != PICKLE_STR) BAD(r, "a key that is no name");
    if (map_get(&r->names, key->s, key->n, NULL)) BAD(r, "two entries of one name");
    char *name = xstrndup(key->s, key->n);
    const bool tensor = pickle_is_call(v, ROLE_TENSOR);
    const int wanted = tensor && is_name(key) ? choose(arg, name) : 0; /* names of Megatron's optimizer may have blanks */
    map_set(&r->names, key->s, key->n, wanted > 0 ? d->n : -1);
    if (wanted <= 0) {
        free(name);
        if (!tensor && !pickle_is_call(v, ROLE_BYTES)) BAD(r, "an entry that is neither a tensor nor an object");
        d->n_left += tensor;
        return wanted;
    }
    xgrow((void **)&d->tensors, &d->cap, d->n + 1, sizeof *d->tensors);
    d->tensors[d->n] = (struct dcp_tensor){.name = name};
    return read_tensor(r, &d->tensors[d->n++], v);
}

static int read_all(struct reader *r, const struct pickle_value *root, dcp_choice *choose, void *arg) {
    const struct pickle_value *tensors = attribute(root, ROLE_METADATA, "state_dict_metadata");
    const struct pickle_value *storage = attribute(root, ROLE_METADATA, "storage_data");
    if (!tensors || tensors->kind != PICKLE_DICT || !storage || storage->kind != PICKLE_DICT)
        BAD(r, "no object Metadata with the tensors and where they are");
    for (int64_t i = 0; i < tensors->n_items; i += 2) TRY(read_name(r, tensors->items[i], tensors->items[i + 1], choose, arg));
    for (int64_t i = 0; i < storage->n_items; i += 2) TRY(read_stored(r, storage->items[i], storage->items[i + 1]));
    TRY(check_bytes(r));
    for (int64_t i = 0; i < tensors->n_items; i += 2) {
        int64_t at;
        if (map_get(&r->names, tensors->items[i]->s, tensors->items[i]->n, &at) && at >= 0)
            TRY(read_chunks(r, &r->d->tensors[at], tensors->items[i + 1]));
    }
    return 0;
}

/* ---- public ---- */

bool dcp_is_dir(const char *dir) {
    char *path = file_join(dir, ".metadata");
    const bool yes = file_exists(path);
    free(path);
    return yes;
}

int dcp_open(struct dcp **out, const char *dir, dcp_choice *choose, void *arg) {
    struct reader r = {.d = xcalloc(1, sizeof *r.d), .dir = dir};
    struct buf text = {0};
    struct pickle *pickle = NULL;
    int rc = 0;
    TRYG(file_in_dir(&r.path, dir, ".metadata"), out);
    if (!r.path) FAILG(out, ERR_INPUT, "%s: no .metadata, which torch.distributed.checkpoint writes last", dir);
    TRYG(file_read(&text, r.path, MAX_METADATA), out);
    TRYG(pickle_read(&pickle, text.p, text.n, NAMES, sizeof NAMES / sizeof NAMES[0], r.path), out);
    TRYG(read_all(&r, pickle_root(pickle), choose, arg), out);
out:
    pickle_free(pickle);
    buf_free(&text);
    map_free(&r.names);
    map_free(&r.files);
    map_free(&r.stored);
    free(r.entries);
    free(r.path);
    if (rc == 0) *out = r.d;
    else dcp_close(r.d);
    return rc;
}

void dcp_close(struct dcp *d) {
    if (!d) return;
    for (int64_t i = 0; i < d->n; i++) {
        free(d->tensors[i].name);
        free(d->tensors[i].chunks);
    }
    for (int64_t i = 0; i < d->n_files; i++) {
        file_unmap(&d->files[i].map);
        free(d->files[i].path);
    }
    free(d->tensors);
    free(d->files);
    free(d);
}

int64_t dcp_count(const struct dcp *d) { return d->n; }

const struct dcp_tensor *dcp_at(const struct dcp *d, int64_t i) {
    CHECK(i >= 0 && i < d->n);
    return &d->tensors[i];
}

int64_t dcp_files(const struct dcp *d) { return d->n_files; }

int64_t dcp_left(const struct dcp *d) { return d->n_left; }

static bool holds(const struct dcp_chunk *c, const int64_t *pos, int nd) {
    for (int k = 0; k < nd; k++)
        if (pos[k] < c->at[k] || pos[k] - c->at[k] >= c->dim[k]) return false;
    return true;
}

/* The chunk that holds pos; near: where the search begins, since the next row is often in one close by. */
static int64_t chunk_of(const struct dcp_tensor *t, const int64_t *pos, int64_t near) {
    for (int64_t d = 0; d < t->n_chunks; d++) {
        if (near + d < t->n_chunks && holds(&t->chunks[near + d], pos, t->nd)) return near + d;
        if (near >= d && holds(&t->chunks[near - d], pos, t->nd)) return near - d;
    }
    CHECK(false); /* they tile it */
    return 0;
}

/* Elements that follow one another in the chunk and in the tensor from pos on; *local: the chunk's first of them. */
static int64_t run_of(const struct dcp_tensor *t, const struct dcp_chunk *c, const int64_t *pos, int64_t *local) {
    int64_t step = 1, block = 1;
    bool whole = true; /* the chunk has all of the dimensions behind this one */
    *local = 0;
    for (int k = t->nd; k-- > 0; step *= c->dim[k]) {
        *local += (pos[k] - c->at[k]) * step;
        if (whole) block *= c->dim[k];
        whole = whole && c->dim[k] == t->dim[k];
    }
    return block - *local % block;
}

void dcp_read(const struct dcp_tensor *t, int64_t first, int64_t n, void *dst) {
    for (int64_t chunk = 0; n > 0;) {
        int64_t pos[TORCH_MAX_DIMS], rest = first, local;
        for (int k = t->nd; k-- > 0; rest /= t->dim[k]) pos[k] = rest % t->dim[k];
        chunk = chunk_of(t, pos, chunk);
        const struct dcp_chunk *c = &t->chunks[chunk];
        int64_t k = run_of(t, c, pos, &local);
        if (k > n) k = n;
        torch_tensor_read(&c->data, local, k, dst);
        dst = (char *)dst + (size_t)k * dtype_size(t->dt);
        first += k;
        n -= k;
    }
}
