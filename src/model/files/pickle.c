/* pickle.c - a pickle as data: the stack machine of Python's pickle, protocols 2 to 5, without the calls.
 *
 * Where Python would import a name this looks it up in the caller's allow-list,
 * and where Python would call something this notes what would be called with
 * what.  It knows the operations that torch.save writes and refuses the others.
 * Invariant: no byte of the input leads to a call, an import or a file; every
 * operation makes at most one value, and nothing is as large as a number in the
 * input says. */
#include "model/files/pickle.h"

#include "base/buf.h"
#include "base/err.h"

#include <stdlib.h>
#include <string.h>

enum { MAX_VALUES = 16 << 20, BLOCK = 1024, MAX_NAME = 256 };

struct block {
    struct block *next;
    int64_t n;
    struct pickle_value values[BLOCK];
};
struct pickle {
    struct block *blocks; /* the newest first */
    int64_t n_values;
    const struct pickle_value *root;
};

struct reader {
    struct pickle *out;
    const uint8_t *p, *end;
    const uint8_t *start;
    const struct pickle_name *names;
    int n_names;
    const char *path;
    struct pickle_value **stack, **memo;
    int64_t n, cap, n_memo, cap_memo;
    int64_t *marks; /* stack heights */
    int64_t n_marks, cap_marks;
};

static struct pickle_value NONE_VALUE = {.kind = PICKLE_NONE}, EMPTY_TUPLE = {.kind = PICKLE_TUPLE};

#define BAD(r, ...)                                                                                                            \
    return (err_wrap(err_set(ERR_FORMAT, __FILE__, __LINE__, __VA_ARGS__),                                                     \
                     "%s: not what torch.save writes (byte %lld of its pickle)", (r)->path, (long long)((r)->p - (r)->start)), \
            ERR_FORMAT)

static int new_value(struct reader *r, enum pickle_kind kind, struct pickle_value **out) {
    struct pickle *p = r->out;
    if (p->n_values++ >= MAX_VALUES) BAD(r, "more than %d values", MAX_VALUES);
    if (!p->blocks || p->blocks->n == BLOCK) {
        struct block *b = xcalloc(1, sizeof *b);
        b->next = p->blocks;
        p->blocks = b;
    }
    *out = &p->blocks->values[p->blocks->n++];
    (*out)->kind = kind;
    return 0;
}

static void push(struct reader *r, struct pickle_value *v) {
    xgrow((void **)&r->stack, &r->cap, r->n + 1, sizeof *r->stack);
    r->stack[r->n++] = v;
}

/* Values above the last mark that may be popped. */
static int64_t height(const struct reader *r) { return r->n - (r->n_marks ? r->marks[r->n_marks - 1] : 0); }

static int need_values(const struct reader *r, int64_t n) {
    if (height(r) < n) BAD(r, "an operation on %lld values where there are %lld", (long long)n, (long long)height(r));
    return 0;
}

static int pop_mark(struct reader *r, int64_t *from) {
    if (r->n_marks == 0) BAD(r, "no mark");
    *from = r->marks[--r->n_marks];
    return 0;
}

static void add_item(struct pickle_value *v, struct pickle_value *item) {
    xgrow((void **)&v->items, &v->cap, v->n_items + 1, sizeof *v->items);
    v->items[v->n_items++] = item;
}

/* ---- bytes ---- */

static int take(struct reader *r, size_t n, const uint8_t **p) {
    if ((size_t)(r->end - r->p) < n) BAD(r, "it ends in the middle; is the file truncated?");
    *p = r->p;
    r->p += n;
    return 0;
}

static int number(struct reader *r, int bytes, uint64_t *v) {
    const uint8_t *p;
    TRY(take(r, (size_t)bytes, &p));
    *v = 0;
    for (int i = 0; i < bytes; i++) *v |= (uint64_t)p[i] << (8 * i);
    return 0;
}

static int push_int(struct reader *r, int64_t i) {
    struct pickle_value *v;
    TRY(new_value(r, PICKLE_INT, &v));
    v->i = i;
    push(r, v);
    return 0;
}

/* A two's complement number of so many bytes; beyond 64 bits its value is not kept. */
static int push_long(struct reader *r) {
    uint64_t n, u = 0;
    const uint8_t *p;
    struct pickle_value *v;
    TRY(number(r, 1, &n));
    TRY(take(r, (size_t)n, &p));
    TRY(new_value(r, n <= 8 ? PICKLE_INT : PICKLE_OTHER, &v));
    for (uint64_t i = 0; i < 8 && n <= 8; i++) u |= (uint64_t)(i < n ? p[i] : n > 0 && p[n - 1] >> 7 ? 0xff : 0) << (8 * i);
    v->i = (int64_t)u;
    push(r, v);
    return 0;
}

static int push_str(struct reader *r, int length_bytes) {
    uint64_t n;
    const uint8_t *p;
    struct pickle_value *v;
    TRY(number(r, length_bytes, &n));
    TRY(take(r, (size_t)n, &p));
    TRY(new_value(r, PICKLE_STR, &v));
    v->s = (const char *)p;
    v->n = (size_t)n;
    push(r, v);
    return 0;
}

static int push_float(struct reader *r) {
    const uint8_t *p;
    struct pickle_value *v;
    TRY(take(r, 8, &p));
    TRY(new_value(r, PICKLE_OTHER, &v));
    push(r, v);
    return 0;
}

/* ---- names ---- */

/* For a message: what is not printable ASCII becomes '?'. */
static void printable(char *to, size_t cap, const char *s, size_t n) {
    size_t i = 0;
    for (; i < n && i + 1 < cap; i++) to[i] = s[i] > ' ' && s[i] < 127 ? s[i] : '?';
    to[i] = '\0';
}

static int push_name(struct reader *r, const char *module, size_t n_module, const char *name, size_t n_name) {
    struct pickle_value *v;
    for (int i = 0; i < r->n_names; i++) {
        const char *full = r->names[i].name;
        if (strlen(full) != n_module + 1 + n_name || full[n_module] != '.' || memcmp(full, module, n_module) != 0 ||
            memcmp(full + n_module + 1, name, n_name) != 0)
            continue;
        TRY(new_value(r, PICKLE_NAME, &v));
        v->s = full;
        v->n = strlen(full);
        v->role = r->names[i].role;
        push(r, v);
        return 0;
    }
    char m[MAX_NAME], t[MAX_NAME];
    printable(m, sizeof m, module, n_module);
    printable(t, sizeof t, name, n_name);
    FAIL(ERR_INPUT,
         "%s: its pickle names %s.%s, which is no part of a tensor; the file is refused and nothing in it was run. "
         "Do not load it with torch.load either unless you trust where it comes from",
         r->path, m, t);
}

/* Up to the end of its line. */
static int line(struct reader *r, const char **s, size_t *n) {
    const uint8_t *end = memchr(r->p, '\n', (size_t)(r->end - r->p));
    if (!end) BAD(r, "a name without end");
    *s = (const char *)r->p;
    *n = (size_t)(end - r->p);
    r->p = end + 1;
    return 0;
}

static int push_global(struct reader *r) {
    const char *module, *name;
    size_t n_module, n_name;
    TRY(line(r, &module, &n_module));
    TRY(line(r, &name, &n_name));
    return push_name(r, module, n_module, name, n_name);
}

static int stack_global(struct reader *r) {
    TRY(need_values(r, 2));
    const struct pickle_value *m = r->stack[r->n - 2], *t = r->stack[r->n - 1];
    if (m->kind != PICKLE_STR || t->kind != PICKLE_STR) BAD(r, "a name that is no string");
    r->n -= 2;
    return push_name(r, m->s, m->n, t->s, t->n);
}

/* ---- containers ---- */

static int make_tuple(struct reader *r, int64_t from) {
    struct pickle_value *v = &EMPTY_TUPLE;
    if (r->n > from) {
        TRY(new_value(r, PICKLE_TUPLE, &v));
        v->n_items = v->cap = r->n - from;
        v->items = xmalloc((size_t)v->n_items * sizeof *v->items);
        memcpy(v->items, r->stack + from, (size_t)v->n_items * sizeof *v->items);
        r->n = from;
    }
    push(r, v);
    return 0;
}

static int tuple_of(struct reader *r, int64_t n) {
    TRY(need_values(r, n));
    return make_tuple(r, r->n - n);
}

static int new_container(struct reader *r, enum pickle_kind kind) {
    struct pickle_value *v;
    TRY(new_value(r, kind, &v));
    push(r, v);
    return 0;
}

/* Values from `from` on into the container below them. */
static int fill(struct reader *r, enum pickle_kind kind, int64_t from) {
    const int64_t floor = r->n_marks ? r->marks[r->n_marks - 1] : 0;
    if (from <= floor || r->stack[from - 1]->kind != kind) BAD(r, "values for a container that is not there");
    if (kind == PICKLE_DICT && (r->n - from) % 2 != 0) BAD(r, "a key without its value");
    for (int64_t i = from; i < r->n; i++) add_item(r->stack[from - 1], r->stack[i]);
    r->n = from;
    return 0;
}

static int fill_marked(struct reader *r, enum pickle_kind kind) {
    int64_t from;
    TRY(pop_mark(r, &from));
    return fill(r, kind, from);
}

static int fill_one(struct reader *r, enum pickle_kind kind, int64_t n) {
    TRY(need_values(r, n));
    return fill(r, kind, r->n - n);
}

/* ---- what Python would call ---- */

static int note_call(struct reader *r) {
    struct pickle_value *v;
    TRY(need_values(r, 2));
    struct pickle_value *what = r->stack[r->n - 2], *args = r->stack[r->n - 1];
    if (what->kind != PICKLE_NAME || args->kind != PICKLE_TUPLE) BAD(r, "a call of what is no name, or without arguments");
    r->n -= 2;
    if (what->role == PICKLE_ROLE_DICT) {
        if (args->n_items != 0) BAD(r, "%s with arguments", what->s);
        return new_container(r, PICKLE_DICT);
    }
    TRY(new_value(r, PICKLE_CALL, &v));
    add_item(v, what);
    add_item(v, args);
    push(r, v);
    return 0;
}

/* The attributes of a dictionary (a state_dict's _metadata) are of no use here. */
static int note_state(struct reader *r) {
    TRY(need_values(r, 2));
    struct pickle_value *v = r->stack[r->n - 2];
    if (v->kind != PICKLE_CALL && v->kind != PICKLE_DICT) BAD(r, "a state for what is no object");
    if (v->kind == PICKLE_CALL) v->state = r->stack[r->n - 1];
    r->n--;
    return 0;
}

static int note_ref(struct reader *r) {
    struct pickle_value *v;
    TRY(need_values(r, 1));
    TRY(new_value(r, PICKLE_REF, &v));
    add_item(v, r->stack[r->n - 1]);
    r->stack[r->n - 1] = v;
    return 0;
}

/* ---- the memo: entries in order, as picklers write them ---- */

static int memo_put(struct reader *r, uint64_t at) {
    TRY(need_values(r, 1));
    if (at > (uint64_t)r->n_memo) BAD(r, "memo entry %llu after %lld", (unsigned long long)at, (long long)r->n_memo);
    if (at == (uint64_t)r->n_memo) xgrow((void **)&r->memo, &r->cap_memo, ++r->n_memo, sizeof *r->memo);
    r->memo[at] = r->stack[r->n - 1];
    return 0;
}

static int memo_get(struct reader *r, uint64_t at) {
    if (at >= (uint64_t)r->n_memo) BAD(r, "no memo entry %llu", (unsigned long long)at);
    push(r, r->memo[at]);
    return 0;
}

/* ---- operations ---- */

static void push_mark(struct reader *r) {
    xgrow((void **)&r->marks, &r->cap_marks, r->n_marks + 1, sizeof *r->marks);
    r->marks[r->n_marks++] = r->n;
}

/* One operation other than STOP. */
static int step(struct reader *r, uint8_t op) {
    uint64_t u = 0;
    int64_t from;
    switch (op) {
    case 0x80: /* PROTO */
        TRY(number(r, 1, &u));
        if (u < 2 || u > 5) BAD(r, "protocol %llu", (unsigned long long)u);
        return 0;
    case 0x95: return number(r, 8, &u); /* FRAME: a length that is not needed */
    case '(': push_mark(r); return 0;
    case 'N': push(r, &NONE_VALUE); return 0;
    case 0x88: return push_int(r, 1); /* NEWTRUE */
    case 0x89: return push_int(r, 0); /* NEWFALSE */
    case 'K': /* BININT1 */ TRY(number(r, 1, &u)); return push_int(r, (int64_t)u);
    case 'M': /* BININT2 */ TRY(number(r, 2, &u)); return push_int(r, (int64_t)u);
    case 'J': /* BININT */ TRY(number(r, 4, &u)); return push_int(r, (int32_t)(uint32_t)u);
    case 0x8a: return push_long(r);   /* LONG1 */
    case 'G': return push_float(r);   /* BINFLOAT */
    case 'X': return push_str(r, 4);  /* BINUNICODE */
    case 0x8c: return push_str(r, 1); /* SHORT_BINUNICODE */
    case 'c': return push_global(r);  /* GLOBAL */
    case 'i': /* INST: a name and its call, which torch.save does not write; the name says more */ TRY(push_global(r)); break;
    case 0x93: return stack_global(r);    /* STACK_GLOBAL */
    case ')': return make_tuple(r, r->n); /* EMPTY_TUPLE */
    case 't': /* TUPLE */ TRY(pop_mark(r, &from)); return make_tuple(r, from);
    case 0x85: return tuple_of(r, 1);
    case 0x86: return tuple_of(r, 2);
    case 0x87: return tuple_of(r, 3);
    case ']': return new_container(r, PICKLE_LIST);
    case '}': return new_container(r, PICKLE_DICT);
    case 'a': return fill_one(r, PICKLE_LIST, 1);
    case 'e': return fill_marked(r, PICKLE_LIST);
    case 's': return fill_one(r, PICKLE_DICT, 2);
    case 'u': return fill_marked(r, PICKLE_DICT);
    case 'R': return note_call(r);  /* REDUCE */
    case 0x81: return note_call(r); /* NEWOBJ */
    case 'b': return note_state(r); /* BUILD */
    case 'Q': return note_ref(r);   /* BINPERSID */
    case 'q': /* BINPUT */ TRY(number(r, 1, &u)); return memo_put(r, u);
    case 'r': /* LONG_BINPUT */ TRY(number(r, 4, &u)); return memo_put(r, u);
    case 0x94: return memo_put(r, (uint64_t)r->n_memo); /* MEMOIZE */
    case 'h': /* BINGET */ TRY(number(r, 1, &u)); return memo_get(r, u);
    case 'j': /* LONG_BINGET */ TRY(number(r, 4, &u)); return memo_get(r, u);
    default: break;
    }
    BAD(r, "operation 0x%02x", op);
}

static int run(struct reader *r) {
    for (;;) {
        const uint8_t *op;
        TRY(take(r, 1, &op));
        if (*op == '.') break;
        TRY(step(r, *op));
    }
    if (r->n != 1 || r->n_marks != 0) BAD(r, "%lld values at its end", (long long)r->n);
    r->out->root = r->stack[0];
    return 0;
}

/* ---- public ---- */

int pickle_read(struct pickle **out, const void *p, size_t n, const struct pickle_name *names, int n_names, const char *path) {
    struct pickle *pickle = xcalloc(1, sizeof *pickle);
    const uint8_t *bytes = p;
    struct reader r = {
        .out = pickle, .p = bytes, .start = bytes, .end = bytes + n, .names = names, .n_names = n_names, .path = path};
    const int rc = run(&r);
    free(r.stack);
    free(r.memo);
    free(r.marks);
    if (rc == 0) *out = pickle;
    else pickle_free(pickle);
    return rc;
}

const struct pickle_value *pickle_root(const struct pickle *p) { return p->root; }

void pickle_free(struct pickle *p) {
    if (!p) return;
    for (struct block *b = p->blocks, *next; b; b = next) {
        next = b->next;
        for (int64_t i = 0; i < b->n; i++) free(b->values[i].items);
        free(b);
    }
    free(p);
}

const struct pickle_value *pickle_get(const struct pickle_value *v, const char *key) {
    const size_t n = strlen(key);
    if (!v || v->kind != PICKLE_DICT) return NULL;
    for (int64_t i = v->n_items - 2; i >= 0; i -= 2)
        if (v->items[i]->kind == PICKLE_STR && v->items[i]->n == n && memcmp(v->items[i]->s, key, n) == 0) return v->items[i + 1];
    return NULL;
}

const struct pickle_value *pickle_item(const struct pickle_value *v, int64_t i) { return v && i < v->n_items ? v->items[i] : NULL; }

int pickle_role(const struct pickle_value *v) { return v && v->kind == PICKLE_NAME ? v->role : 0; }

bool pickle_is_call(const struct pickle_value *v, int role) {
    return v && v->kind == PICKLE_CALL && pickle_role(v->items[0]) == role;
}

const struct pickle_value *pickle_arg(const struct pickle_value *call, int64_t i) { return pickle_item(call->items[1], i); }

bool pickle_is_int(const struct pickle_value *v) { return v && v->kind == PICKLE_INT; }

bool pickle_is_sequence(const struct pickle_value *v) { return v && (v->kind == PICKLE_TUPLE || v->kind == PICKLE_LIST); }

int pickle_sizes(const struct pickle_value *v, int size, int64_t *to, int cap) {
    if (pickle_is_call(v, size)) v = pickle_arg(v, 0);
    if (!pickle_is_sequence(v) || v->n_items > cap) return -1;
    for (int64_t i = 0; i < v->n_items; i++) {
        if (!pickle_is_int(v->items[i]) || v->items[i]->i < 0) return -1;
        to[i] = v->items[i]->i;
    }
    return (int)v->n_items;
}

bool pickle_is_graphic(const char *s, size_t n) {
    for (size_t i = 0; i < n; i++)
        if ((unsigned char)s[i] <= ' ' || s[i] == 127) return false;
    return n > 0;
}
