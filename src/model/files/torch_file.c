/* torch_file.c - the zip file that torch.save writes: its directory, its pickle
 * as values that cannot act (pickle.h), its storages as they lie in the mapping.
 *
 * torch stores without compression, so a storage is a range of the file.  DTensors
 * of FSDP1 and FSDP2 are understood (one mesh dimension, or replicas of one); of
 * other parallelisms' nothing is.  Checksums of zip entries are not computed.
 * Invariant: after torch_file_open every element of every tensor lies inside the
 * mapping, and a tensor has no more elements than its storage. */
#include "model/files/torch_file.h"

#include "base/buf.h"
#include "base/err.h"
#include "base/file.h"
#include "base/map.h"
#include "base/encoding/utf8.h"
#include "model/files/pickle.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>

enum { MAX_ENTRIES = 1 << 20, MAX_PICKLE = 128 << 20, END_BYTES = 22, ENTRY_BYTES = 46, LOCAL_BYTES = 30, END64_BYTES = 56 };

struct entry {
    const char *name; /* behind the archive's own name: "data/0"; not NUL-terminated */
    size_t n_name;
    const uint8_t *data;
    size_t bytes;
};
struct torch_file {
    struct file_map map;
    struct entry *entries;
    int64_t n_entries;
    struct map by_entry; /* name -> entry */
    struct torch_tensor *tensors;
    int64_t n, cap;
    struct map by_name;
    int64_t shards, replicas; /* of the mesh; 0: none seen */
    int mesh_dims;
    const struct pickle_value *mesh; /* the one that was read last: all tensors share it */
    const char *path;
};

/* ---- the zip directory ---- */

static uint64_t le(const uint8_t *p, int bytes) {
    uint64_t v = 0;
    for (int i = 0; i < bytes; i++) v |= (uint64_t)p[i] << (8 * i);
    return v;
}

struct directory {
    uint64_t n, bytes, at;
};

/* The end record of the directory is the last thing in the file: torch writes no comment. */
static int find_directory(const struct torch_file *f, struct directory *d) {
    const uint8_t *p = f->map.p;
    const size_t n = f->map.n;
    if (n < END_BYTES || memcmp(p, "PK\3\4", 4) != 0)
        FAIL(ERR_FORMAT, "%s: not a zip file, which torch.save has written since torch 1.6", f->path);
    const uint8_t *end = p + n - END_BYTES;
    if (memcmp(end, "PK\5\6", 4) != 0 || le(end + 20, 2) != 0)
        FAIL(ERR_FORMAT, "%s: no zip directory at its end; is the file truncated?", f->path);
    *d = (struct directory){.n = le(end + 10, 2), .bytes = le(end + 12, 4), .at = le(end + 16, 4)};
    if (n >= END_BYTES + 20 && memcmp(end - 20, "PK\6\7", 4) == 0) { /* zip64: a locator before it */
        const uint64_t at = le(end - 12, 8);
        if (at > n - END_BYTES - 20 || n - END_BYTES - 20 - at < END64_BYTES || memcmp(p + at, "PK\6\6", 4) != 0)
            FAIL(ERR_FORMAT, "%s: no zip64 directory where its locator says", f->path);
        *d = (struct directory){.n = le(p + at + 32, 8), .bytes = le(p + at + 40, 8), .at = le(p + at + 48, 8)};
    }
    if (d->n > MAX_ENTRIES || d->at > n || d->bytes > n - d->at || d->bytes / ENTRY_BYTES < d->n)
        FAIL(ERR_FORMAT, "%s: a zip directory of %llu entries and %llu bytes at %llu does not fit into the file", f->path,
             (unsigned long long)d->n, (unsigned long long)d->bytes, (unsigned long long)d->at);
    return 0;
}

struct raw_entry { /* of the directory */
    const char *name;
    size_t n_name;
    uint64_t stored, size, at; /* bytes in the file, after unpacking; of the local header */
};

/* Sizes beyond 32 bits are in an extra field, in this order and only where the short field is full. */
static int read_zip64(const struct torch_file *f, struct raw_entry *e, const uint8_t *extra, size_t n) {
    uint64_t *const wide[] = {&e->size, &e->stored, &e->at};
    while (n >= 4) {
        const uint64_t id = le(extra, 2), len = le(extra + 2, 2);
        if (len > n - 4) break;
        const uint8_t *p = extra + 4, *end = p + len;
        for (int i = 0; id == 1 && i < 3; i++) {
            if (*wide[i] != UINT32_MAX) continue;
            if (end - p < 8) FAIL(ERR_FORMAT, "%s: a zip64 field is too short", f->path);
            *wide[i] = le(p, 8);
            p += 8;
        }
        extra += 4 + len;
        n -= (size_t)(4 + len);
    }
    return 0;
}

static bool safe_name(const char *s, size_t n) {
    if (s[0] == '/' || memchr(s, '\\', n)) return false;
    for (size_t i = 0; i + 1 < n; i++)
        if (s[i] == '.' && s[i + 1] == '.' && (i == 0 || s[i - 1] == '/') && (i + 2 == n || s[i + 2] == '/')) return false;
    return true;
}

/* Its data lies between its local header and the directory. */
static int add_entry(struct torch_file *f, const struct raw_entry *e, uint64_t directory_at) {
    const char *slash = memchr(e->name, '/', e->n_name);
    if (!safe_name(e->name, e->n_name) || !slash)
        FAIL(ERR_FORMAT, "%s: zip entry '%.*s': not a name that torch.save writes", f->path,
             (int)(e->n_name < 200 ? e->n_name : 200), e->name);
    const int n = (int)(e->n_name < 200 ? e->n_name : 200);
    if (e->stored != e->size)
        FAIL(ERR_FORMAT, "%s: zip entry %.*s is compressed, as torch.save does not write it", f->path, n, e->name);
    if (e->at > directory_at || directory_at - e->at < LOCAL_BYTES || memcmp(f->map.p + e->at, "PK\3\4", 4) != 0)
        FAIL(ERR_FORMAT, "%s: zip entry %.*s is not where the directory says", f->path, n, e->name);
    const uint8_t *local = f->map.p + e->at;
    const uint64_t names = le(local + 26, 2), extra = le(local + 28, 2), room = directory_at - e->at - LOCAL_BYTES;
    if (le(local + 8, 2) != 0)
        FAIL(ERR_FORMAT, "%s: zip entry %.*s is compressed, as torch.save does not write it", f->path, n, e->name);
    if (names != e->n_name || names + extra > room || e->size > room - names - extra ||
        memcmp(local + LOCAL_BYTES, e->name, e->n_name) != 0)
        FAIL(ERR_FORMAT, "%s: zip entry %.*s does not fit into the file, or its two headers differ", f->path, n, e->name);
    struct entry *to = &f->entries[f->n_entries];
    *to = (struct entry){.name = slash + 1,
                         .n_name = e->n_name - (size_t)(slash + 1 - e->name),
                         .data = local + LOCAL_BYTES + names + extra,
                         .bytes = (size_t)e->size};
    if (map_get(&f->by_entry, to->name, to->n_name, NULL)) FAIL(ERR_FORMAT, "%s: two zip entries %.*s", f->path, n, e->name);
    map_set(&f->by_entry, to->name, to->n_name, f->n_entries++);
    return 0;
}

static int by_place(const void *a, const void *b) {
    const struct entry *x = a, *y = b;
    if (x->data != y->data) return x->data < y->data ? -1 : 1;
    return x->bytes < y->bytes ? -1 : x->bytes > y->bytes;
}

static int check_overlap(const struct torch_file *f) {
    struct entry *e = xmalloc((size_t)(f->n_entries + 1) * sizeof *e);
    int rc = 0;
    memcpy(e, f->entries, (size_t)f->n_entries * sizeof *e);
    qsort(e, (size_t)f->n_entries, sizeof *e, by_place);
    for (int64_t i = 1; i < f->n_entries && rc == 0; i++)
        if (e[i - 1].bytes > (size_t)(e[i].data - e[i - 1].data))
            rc = err_set(ERR_FORMAT, __FILE__, __LINE__, "%s: zip entries overlap", f->path);
    free(e);
    return rc;
}

static int read_directory(struct torch_file *f) {
    struct directory d;
    const char *first = NULL;
    TRY(find_directory(f, &d));
    const uint8_t *p = f->map.p + d.at, *end = p + d.bytes;
    f->entries = xcalloc((size_t)d.n + 1, sizeof *f->entries);
    for (uint64_t i = 0; i < d.n; i++) {
        if (end - p < ENTRY_BYTES || memcmp(p, "PK\1\2", 4) != 0)
            FAIL(ERR_FORMAT, "%s: zip directory entry %llu is damaged", f->path, (unsigned long long)i);
        const uint64_t flags = le(p + 8, 2), method = le(p + 10, 2), name = le(p + 28, 2), extra = le(p + 30, 2),
                       comment = le(p + 32, 2);
        struct raw_entry e = {.name = (const char *)p + ENTRY_BYTES,
                              .n_name = name,
                              .stored = le(p + 20, 4),
                              .size = le(p + 24, 4),
                              .at = le(p + 42, 4)};
        if ((uint64_t)(end - p) - ENTRY_BYTES < name + extra + comment)
            FAIL(ERR_FORMAT, "%s: zip directory entry %llu is damaged", f->path, (unsigned long long)i);
        TRY(read_zip64(f, &e, p + ENTRY_BYTES + name, extra));
        if (!pickle_is_graphic(e.name, e.n_name)) FAIL(ERR_FORMAT, "%s: a zip entry without a readable name", f->path);
        if (flags & 1) FAIL(ERR_FORMAT, "%s: zip entry %llu is encrypted", f->path, (unsigned long long)i);
        if (method != 0)
            FAIL(ERR_FORMAT, "%s: zip entry %.*s is compressed, as torch.save does not write it", f->path,
                 (int)(name < 200 ? name : 200), e.name);
        TRY(add_entry(f, &e, d.at));
        const char *slash = memchr(e.name, '/', e.n_name);
        if (!first) first = e.name;
        else if (memcmp(first, e.name, (size_t)(slash + 1 - e.name)) != 0)
            FAIL(ERR_FORMAT, "%s: zip entries in two folders", f->path);
        p += ENTRY_BYTES + name + extra + comment;
    }
    return check_overlap(f);
}

static const struct entry *find_entry(const struct torch_file *f, const char *name, size_t n) {
    int64_t i;
    return map_get(&f->by_entry, name, n, &i) ? &f->entries[i] : NULL;
}

/* ---- names that a state_dict of tensors needs ---- */

enum role {
    ROLE_ORDERED_DICT = PICKLE_ROLE_DICT,
    ROLE_TENSOR,    /* _rebuild_tensor_v2(storage, offset, size, stride, ...) */
    ROLE_PARAMETER, /* _rebuild_parameter(tensor, ...) */
    ROLE_FROM_TYPE, /* _rebuild_from_type_v2(function, class, arguments, state) */
    ROLE_WRAPPER,   /* _rebuild_wrapper_subclass: a DTensor's shell */
    ROLE_PLAIN,     /* a class of plain tensors */
    ROLE_DTENSOR,
    ROLE_SIZE,
    ROLE_SPEC,
    ROLE_META,
    ROLE_MESH,
    ROLE_SHARD,
    ROLE_REPLICATE,
    ROLE_OTHER_PLACEMENT,
    ROLE_IGNORED,             /* a part of a tensor that its bytes do not depend on */
    ROLE_STORAGE_UNSUPPORTED, /* a dtype that no weight has */
    ROLE_STORAGE = 64,        /* + enum dtype */
};

#define DIST "torch.distributed."
static const struct pickle_name NAMES[] = {
    {"collections.OrderedDict", ROLE_ORDERED_DICT},
    {"torch._utils._rebuild_tensor_v2", ROLE_TENSOR},
    {"torch._utils._rebuild_parameter", ROLE_PARAMETER},
    {"torch._tensor._rebuild_from_type_v2", ROLE_FROM_TYPE},
    {"torch._utils._rebuild_wrapper_subclass", ROLE_WRAPPER},
    {"torch.Tensor", ROLE_PLAIN},
    {"torch.nn.parameter.Parameter", ROLE_PLAIN},
    {"torch.nn.parameter.Buffer", ROLE_PLAIN},
    {"torch.Size", ROLE_SIZE},
    {"torch.FloatStorage", ROLE_STORAGE + DT_F32},
    {"torch.BFloat16Storage", ROLE_STORAGE + DT_BF16},
    {"torch.HalfStorage", ROLE_STORAGE + DT_F16},
    {"torch.DoubleStorage", ROLE_STORAGE + DT_F64},
    {"torch.IntStorage", ROLE_STORAGE + DT_I32},
    {"torch.LongStorage", ROLE_STORAGE + DT_I64},
    {"torch.ByteStorage", ROLE_STORAGE + DT_U8},
    {"torch.BoolStorage", ROLE_STORAGE_UNSUPPORTED},
    {"torch.CharStorage", ROLE_STORAGE_UNSUPPORTED},
    {"torch.ShortStorage", ROLE_STORAGE_UNSUPPORTED},
    {"torch.serialization._get_layout", ROLE_IGNORED},
    {"torch.device", ROLE_IGNORED},
    {"torch.float32", ROLE_IGNORED},
    {"torch.bfloat16", ROLE_IGNORED},
    {"torch.float16", ROLE_IGNORED},
    {"torch.float64", ROLE_IGNORED},
    {"torch.int64", ROLE_IGNORED},
    {"torch.int32", ROLE_IGNORED},
    {"torch.uint8", ROLE_IGNORED},
    {DIST "tensor.DTensor", ROLE_DTENSOR},
    {DIST "tensor._api.DTensor", ROLE_DTENSOR},
    {DIST "_tensor.api.DTensor", ROLE_DTENSOR},
    {DIST "tensor._dtensor_spec.DTensorSpec", ROLE_SPEC},
    {DIST "_tensor._dtensor_spec.DTensorSpec", ROLE_SPEC},
    {DIST "_tensor.placement_types.DTensorSpec", ROLE_SPEC},
    {DIST "tensor._dtensor_spec.TensorMeta", ROLE_META},
    {DIST "_tensor._dtensor_spec.TensorMeta", ROLE_META},
    {DIST "_tensor.placement_types.TensorMeta", ROLE_META},
    {DIST "tensor._dtensor_spec.ShardOrderEntry", ROLE_IGNORED},
    {DIST "device_mesh.DeviceMesh", ROLE_MESH},
    {DIST "_tensor.device_mesh.DeviceMesh", ROLE_MESH},
    {DIST "_mesh_layout._MeshLayout", ROLE_IGNORED},
    {DIST "_mesh_layout._FlatLayout", ROLE_IGNORED},
    {DIST "tensor.placement_types.Shard", ROLE_SHARD},
    {DIST "_tensor.placement_types.Shard", ROLE_SHARD},
    {DIST "tensor.placement_types.Replicate", ROLE_REPLICATE},
    {DIST "_tensor.placement_types.Replicate", ROLE_REPLICATE},
    {DIST "tensor.placement_types.Partial", ROLE_OTHER_PLACEMENT},
    {DIST "tensor.placement_types._StridedShard", ROLE_OTHER_PLACEMENT},
    {DIST "_tensor.placement_types._Partial", ROLE_OTHER_PLACEMENT},
    {DIST "_tensor.placement_types.Partial", ROLE_OTHER_PLACEMENT},
    {DIST "_tensor.placement_types._StridedShard", ROLE_OTHER_PLACEMENT},
};

/* ---- values as tensors ---- */

static int sizes(const struct pickle_value *v, int64_t *to) { return pickle_sizes(v, ROLE_SIZE, to, TORCH_MAX_DIMS); }

#define BAD(f, name, ...) \
    return (err_wrap(err_set(ERR_FORMAT, __FILE__, __LINE__, __VA_ARGS__), "%s: tensor %s", (f)->path, name), ERR_FORMAT)

struct storage {
    const uint8_t *p;
    int64_t n; /* elements */
    enum dtype dt;
};

/* ("storage", class, key, device, elements) */
static int find_storage(const struct torch_file *f, const char *name, const struct pickle_value *ref, struct storage *s) {
    char key[64];
    const struct pickle_value *id = ref && ref->kind == PICKLE_REF ? ref->items[0] : NULL;
    const struct pickle_value *k = pickle_item(id, 2), *n = pickle_item(id, 4);
    const int role = pickle_role(pickle_item(id, 1));
    if (role == ROLE_STORAGE_UNSUPPORTED)
        FAIL(ERR_UNSUPPORTED, "%s: tensor %s: unsupported dtype (%s)", f->path, name, pickle_item(id, 1)->s);
    if (!pickle_is_sequence(id) || role < ROLE_STORAGE || !k || k->kind != PICKLE_STR || k->n > 32 ||
        !pickle_is_graphic(k->s, k->n) || !pickle_is_int(n) || n->i < 0)
        BAD(f, name, "its storage is not described as torch.save does it");
    snprintf(key, sizeof key, "data/%.*s", (int)k->n, k->s);
    const struct entry *e = find_entry(f, key, strlen(key));
    if (!e) BAD(f, name, "the file has no storage %s", key);
    s->dt = (enum dtype)(role - ROLE_STORAGE);
    s->p = e->data;
    s->n = n->i;
    if ((uint64_t)s->n > e->bytes / dtype_size(s->dt) || (size_t)s->n * dtype_size(s->dt) != e->bytes)
        BAD(f, name, "storage %s has %zu bytes, its %lld elements of %s need another number", key, e->bytes, (long long)s->n,
            dtype_name(s->dt));
    return 0;
}

/* Sizes, strides and offset inside the storage; no element twice. */
static int place(const struct torch_file *f, struct torch_tensor *t, const struct storage *s, int64_t offset) {
    int64_t count = 1, last = offset, step = 1;
    bool bad = offset < 0 || offset > s->n;
    for (int i = 0; i < t->nd; i++)
        if (t->dim[i] == 0) count = 0;
    for (int i = 0; i < t->nd && count > 0 && !bad; i++) {
        int64_t reach;
        bad = __builtin_mul_overflow(count, t->dim[i], &count) || __builtin_mul_overflow(t->dim[i] - 1, t->stride[i], &reach) ||
              __builtin_add_overflow(last, reach, &last);
    }
    bad = bad || count > s->n || (count > 0 && last >= s->n);
    if (bad) BAD(f, t->name, "its sizes, strides and offset reach outside its storage of %lld elements", (long long)s->n);
    t->contiguous = true;
    for (int i = t->nd; i-- > 0; step *= t->dim[i])
        if (t->dim[i] > 1 && t->stride[i] != step) t->contiguous = false;
    t->dt = s->dt;
    t->data = count > 0 ? s->p + (size_t)offset * dtype_size(s->dt) : NULL;
    return 0;
}

/* A plain tensor: _rebuild_tensor_v2, alone or inside _rebuild_parameter. */
static int read_plain(const struct torch_file *f, struct torch_tensor *t, const struct pickle_value *v) {
    struct storage s;
    if (pickle_is_call(v, ROLE_PARAMETER)) v = pickle_arg(v, 0);
    if (!pickle_is_call(v, ROLE_TENSOR) || !pickle_is_int(pickle_arg(v, 1)))
        FAIL(ERR_FORMAT, "%s: %s is not a tensor", f->path, t->name);
    TRY(find_storage(f, t->name, pickle_arg(v, 0), &s));
    t->nd = sizes(pickle_arg(v, 2), t->dim);
    if (t->nd < 0 || sizes(pickle_arg(v, 3), t->stride) != t->nd)
        BAD(f, t->name, "its sizes and strides are not two equally long lists of at most %d numbers >= 0", TORCH_MAX_DIMS);
    return place(f, t, &s, pickle_arg(v, 1)->i);
}

/* ---- DTensors ---- */

/* A mesh dimension's size in _MeshLayout: a number or (nested) numbers that multiply; torch nests once. */
static int64_t layout_size(const struct pickle_value *v) {
    int64_t n = 1;
    if (pickle_is_int(v)) return v->i;
    for (int64_t i = 0; pickle_is_sequence(v) && i < v->n_items; i++)
        if (!pickle_is_int(v->items[i]) || __builtin_mul_overflow(n, v->items[i]->i, &n)) return -1;
    return pickle_is_sequence(v) ? n : -1;
}

/* Sizes of the mesh's dimensions: torch to 2.9 keeps the tensor `mesh`, later ones a layout. *nd = -1: neither. */
static int mesh_sizes(const struct torch_file *f, const struct pickle_value *mesh, int64_t *to, int *nd) {
    const struct pickle_value *state = mesh->state, *tensor = pickle_get(state, "mesh"), *layout = pickle_get(state, "_layout");
    *nd = -1;
    if (tensor) {
        char name[] = "of the device mesh";
        struct torch_tensor t = {.name = name};
        TRY(read_plain(f, &t, tensor));
        memcpy(to, t.dim, sizeof t.dim);
        *nd = t.nd;
        return 0;
    }
    layout = layout && layout->kind == PICKLE_CALL ? layout->state : NULL;
    const struct pickle_value *axes = pickle_get(layout, "axes"), *shape = pickle_get(layout, "shape");
    if (pickle_is_int(shape)) {
        to[0] = shape->i;
        *nd = 1;
    }
    const struct pickle_value *list = axes ? axes : shape;
    if (!pickle_is_sequence(list) || list->n_items > TORCH_MAX_DIMS) return 0;
    for (int64_t i = 0; i < list->n_items; i++) {
        const struct pickle_value *axis = list->items[i];
        to[i] = layout_size(axes ? pickle_get(axis->kind == PICKLE_CALL ? axis->state : NULL, "shape") : axis);
    }
    *nd = (int)list->n_items;
    return 0;
}

/* ("fsdp",), or ("ddp", "fsdp") with replicas: the last dimension shards. */
static int read_mesh(struct torch_file *f, const char *name, const struct pickle_value *mesh) {
    int64_t size[TORCH_MAX_DIMS];
    if (mesh == f->mesh) return 0;
    if (!pickle_is_call(mesh, ROLE_MESH)) BAD(f, name, "a DTensor without a device mesh");
    int nd;
    TRY(mesh_sizes(f, mesh, size, &nd));
    if (nd < 0) FAIL(ERR_UNSUPPORTED, "%s: tensor %s: unsupported device mesh, its size cannot be read", f->path, name);
    const struct pickle_value *names = pickle_get(mesh->state, "_mesh_dim_names");
    if (!names) names = pickle_get(mesh->state, "mesh_dim_names");
    for (int i = 0; i < nd; i++) {
        const struct pickle_value *s = pickle_item(names, i);
        const char *want = i == nd - 1 ? "fsdp" : "ddp";
        const bool named = pickle_is_sequence(names) && s && s->kind == PICKLE_STR && pickle_is_graphic(s->s, s->n);
        if (nd > 2 || (named && (s->n != strlen(want) || memcmp(s->s, want, s->n) != 0)))
            FAIL(ERR_UNSUPPORTED,
                 "%s: tensor %s: unsupported device mesh of %d dimensions%s%.*s; (fsdp) and (ddp, fsdp) are read, tensor parallel "
                 "shards are not",
                 f->path, name, nd, named ? ", one named " : "", named ? (int)(s->n < 40 ? s->n : 40) : 0, named ? s->s : "");
    }
    const int64_t shards = nd ? size[nd - 1] : 0, replicas = nd == 2 ? size[0] : 1;
    if (shards < 1 || replicas < 1 || (f->shards && (f->shards != shards || f->replicas != replicas || f->mesh_dims != nd)))
        BAD(f, name, "a device mesh of %lld x %lld ranks, other tensors have another", (long long)replicas, (long long)shards);
    f->shards = shards;
    f->replicas = replicas;
    f->mesh_dims = nd;
    f->mesh = mesh;
    return 0;
}

/* The last placement says how it is sharded, those before it that the replicas are equal. */
static int read_placements(const struct torch_file *f, struct torch_tensor *t, const struct pickle_value *placements) {
    const int64_t n = pickle_is_sequence(placements) ? placements->n_items : 0;
    if (n != f->mesh_dims) BAD(f, t->name, "%lld placements on its device mesh", (long long)n);
    for (int64_t i = 0; i < n; i++) {
        const struct pickle_value *p = placements->items[i];
        const bool shard = pickle_is_call(p, ROLE_SHARD), last = i == n - 1;
        if (!pickle_is_call(p, ROLE_REPLICATE) && !(last && shard)) {
            const char *name = p->kind == PICKLE_CALL && p->items[0]->kind == PICKLE_NAME ? p->items[0]->s : "what is no placement";
            FAIL(ERR_UNSUPPORTED, "%s: tensor %s: unsupported placement %s; Shard and Replicate are read, replicas before shards",
                 f->path, t->name, name);
        }
        t->shard_dim = -1;
        if (!shard) continue;
        const struct pickle_value *dim = p->state ? pickle_get(p->state, "dim") : pickle_arg(p, 0);
        const int64_t d = pickle_is_int(dim) ? (dim->i < 0 ? dim->i + t->full_nd : dim->i) : -1;
        if (d < 0 || d >= t->full_nd) BAD(f, t->name, "sharded along a dimension that it does not have");
        t->shard_dim = (int)d;
    }
    return 0;
}

/* The whole part that a tensor's spec says of it, and the rank's own part. */
static int read_dtensor(struct torch_file *f, struct torch_tensor *t, const struct pickle_value *state) {
    const struct pickle_value *local = pickle_get(state, "_local_tensor"), *spec = pickle_get(state, "_spec");
    for (int64_t i = 0; pickle_is_sequence(state) && i < state->n_items; i++) { /* (attributes, slots) */
        if (!local) local = pickle_get(state->items[i], "_local_tensor");
        if (!spec) spec = pickle_get(state->items[i], "_spec");
    }
    if (!local || !pickle_is_call(spec, ROLE_SPEC)) BAD(f, t->name, "a DTensor without its local tensor and its spec");
    TRY(read_mesh(f, t->name, pickle_get(spec->state, "mesh")));
    const struct pickle_value *meta = pickle_get(spec->state, "tensor_meta");
    t->full_nd = pickle_is_call(meta, ROLE_META) ? sizes(pickle_arg(meta, 0), t->full_dim) : -1;
    if (t->full_nd < 0) BAD(f, t->name, "a DTensor that does not say its size");
    t->dtensor = true;
    TRY(read_placements(f, t, pickle_get(spec->state, "placements")));
    TRY(read_plain(f, t, local));
    bool fits = t->nd == t->full_nd;
    for (int i = 0; i < t->nd && fits; i++) fits = i == t->shard_dim ? t->dim[i] <= t->full_dim[i] : t->dim[i] == t->full_dim[i];
    if (!fits) BAD(f, t->name, "its local part does not fit into the whole tensor");
    return 0;
}

static int read_tensor(struct torch_file *f, struct torch_tensor *t, const struct pickle_value *v) {
    t->shard_dim = -1;
    if (pickle_is_call(v, ROLE_PARAMETER) && pickle_is_call(pickle_arg(v, 0), ROLE_FROM_TYPE)) v = pickle_arg(v, 0);
    if (!pickle_is_call(v, ROLE_FROM_TYPE)) return read_plain(f, t, v);
    if (pickle_role(pickle_arg(v, 0)) == ROLE_WRAPPER && pickle_role(pickle_arg(v, 1)) == ROLE_DTENSOR)
        return read_dtensor(f, t, pickle_arg(v, 3));
    if (pickle_role(pickle_arg(v, 0)) != ROLE_TENSOR || pickle_role(pickle_arg(v, 1)) != ROLE_PLAIN || !pickle_arg(v, 2) ||
        pickle_arg(v, 2)->kind != PICKLE_TUPLE)
        FAIL(ERR_FORMAT, "%s: %s is neither a tensor nor a DTensor", f->path, t->name);
    /* as the call of the function with those arguments */
    struct pickle_value *items[] = {v->items[1]->items[0], v->items[1]->items[2]};
    const struct pickle_value call = {.kind = PICKLE_CALL, .items = items, .n_items = 2};
    return read_plain(f, t, &call);
}

/* A name that a safetensors file can have. */
static int check_name(const struct torch_file *f, const char *s, size_t n) {
    static const char taken[] = "__metadata__"; /* what the header of such a file has in addition to its tensors */
    if (n == strlen(taken) && memcmp(s, taken, n) == 0) FAIL(ERR_FORMAT, "%s: a tensor may not have the name %s", f->path, taken);
    for (size_t i = 0; i < n;) {
        const int step = utf8_step(s + i, n - i);
        if (step <= 0) FAIL(ERR_FORMAT, "%s: the name of a tensor is not UTF-8", f->path);
        i += (size_t)step;
    }
    return 0;
}

static int read_tensors(struct torch_file *f, const struct pickle_value *root) {
    if (root->kind != PICKLE_DICT) FAIL(ERR_FORMAT, "%s: not a state_dict", f->path);
    for (int64_t i = 0; i < root->n_items; i += 2) {
        const struct pickle_value *key = root->items[i];
        if (key->kind != PICKLE_STR || key->n > 1024 || !pickle_is_graphic(key->s, key->n))
            FAIL(ERR_FORMAT, "%s: a state_dict with a key that is not the name of a tensor", f->path);
        TRY(check_name(f, key->s, key->n));
        xgrow((void **)&f->tensors, &f->cap, f->n + 1, sizeof *f->tensors);
        struct torch_tensor *t = &f->tensors[f->n];
        *t = (struct torch_tensor){.name = xstrndup(key->s, key->n)};
        if (map_gets(&f->by_name, t->name, NULL)) {
            free(t->name);
            FAIL(ERR_FORMAT, "%s: two tensors of one name", f->path);
        }
        map_set(&f->by_name, t->name, key->n, f->n++);
        TRY(read_tensor(f, t, root->items[i + 1]));
    }
    return 0;
}

/* ---- public ---- */

static int map_regular(struct torch_file *f) {
    struct stat st;
    if (stat(f->path, &st) == 0 && !S_ISREG(st.st_mode)) FAIL(ERR_INPUT, "%s: not a regular file", f->path);
    return file_map_open(&f->map, f->path);
}

/* The archive in f->map as values. The pickle borrows from the map. */
static int read_archive(struct torch_file *f, struct pickle **pickle) {
    TRY(read_directory(f));
    const struct entry *e = find_entry(f, "data.pkl", 8), *order = find_entry(f, "byteorder", 9);
    if (!e || e->bytes > MAX_PICKLE)
        FAIL(ERR_FORMAT, "%s: %s", f->path, e ? "its data.pkl is too large" : "no data.pkl in it; is it a file of torch.save?");
    if (order && (order->bytes != 6 || memcmp(order->data, "little", 6) != 0))
        FAIL(ERR_UNSUPPORTED, "%s: unsupported byte order", f->path);
    return pickle_read(pickle, e->data, e->bytes, NAMES, sizeof NAMES / sizeof NAMES[0], f->path);
}

int torch_file_open(struct torch_file **out, const char *path) {
    int rc = 0;
    struct pickle *pickle = NULL;
    struct torch_file *f = xcalloc(1, sizeof *f);
    f->path = path;
    TRYG(map_regular(f), out);
    TRYG(read_archive(f, &pickle), out);
    TRYG(read_tensors(f, pickle_root(pickle)), out);
    f->path = NULL; /* the caller's */
    f->mesh = NULL; /* the pickle's */
out:
    pickle_free(pickle);
    if (rc == 0) *out = f;
    else torch_file_close(f);
    return rc;
}

int torch_tensor_open(struct torch_tensor *t, const void *p, size_t n, const char *name, const char *path) {
    struct torch_file f = {.map = {.p = p, .n = n}, .path = path};
    struct pickle *pickle = NULL;
    char *copy = xstrdup(name);
    *t = (struct torch_tensor){.name = copy, .shard_dim = -1};
    int rc = read_archive(&f, &pickle);
    if (rc == 0) rc = read_plain(&f, t, pickle_root(pickle));
    t->name = NULL;
    free(copy);
    pickle_free(pickle);
    free(f.entries);
    map_free(&f.by_entry);
    return rc;
}

void torch_file_close(struct torch_file *f) {
    if (!f) return;
    for (int64_t i = 0; i < f->n; i++) free(f->tensors[i].name);
    free(f->tensors);
    free(f->entries);
    map_free(&f->by_entry);
    map_free(&f->by_name);
    file_unmap(&f->map);
    free(f);
}

int64_t torch_file_count(const struct torch_file *f) { return f->n; }

const struct torch_tensor *torch_file_at(const struct torch_file *f, int64_t i) {
    CHECK(i >= 0 && i < f->n);
    return &f->tensors[i];
}

const struct torch_tensor *torch_file_find(const struct torch_file *f, const char *name) {
    int64_t i;
    return map_gets(&f->by_name, name, &i) ? &f->tensors[i] : NULL;
}

int64_t torch_file_shards(const struct torch_file *f) { return f->shards; }

int64_t torch_file_replicas(const struct torch_file *f) { return f->replicas; }

void torch_tensor_read(const struct torch_tensor *t, int64_t first, int64_t n, void *dst) {
    const size_t size = dtype_size(t->dt);
    if (t->contiguous) {
        if (n > 0) memcpy(dst, t->data + (size_t)first * size, (size_t)n * size);
        return;
    }
    for (int64_t k = 0; k < n; k++) {
        int64_t rest = first + k, at = 0;
        for (int i = t->nd; i-- > 0; rest /= t->dim[i]) at += rest % t->dim[i] * t->stride[i];
        memcpy((char *)dst + (size_t)k * size, t->data + (size_t)at * size, size);
    }
}
