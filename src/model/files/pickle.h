/* pickle.h - reads the pickles that torch.save writes into values that cannot do anything. */
#ifndef VERLC_MODEL_PICKLE_H
#define VERLC_MODEL_PICKLE_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

enum pickle_kind {
    PICKLE_NONE,
    PICKLE_INT,   /* bool too */
    PICKLE_STR,   /* UTF-8 as it stands in the input, not NUL-terminated */
    PICKLE_TUPLE, /* items */
    PICKLE_LIST,  /* items */
    PICKLE_DICT,  /* items: key, value, key, value, ... */
    PICKLE_NAME,  /* a class or function of the allow-list; it is never imported */
    PICKLE_CALL,  /* items: what would be called, the tuple of its arguments; state: of the object that it would make */
    PICKLE_REF,   /* items: the persistent id, a storage of torch's file */
    PICKLE_OTHER, /* a float or a large integer: no part of a tensor */
};
struct pickle_value {
    enum pickle_kind kind;
    int64_t i;     /* PICKLE_INT */
    const char *s; /* PICKLE_STR: borrowed from the input; PICKLE_NAME: "module.name" */
    size_t n;      /* bytes of s */
    int role;      /* PICKLE_NAME: pickle_name.role */
    struct pickle_value **items;
    int64_t n_items, cap;
    struct pickle_value *state; /* PICKLE_CALL: NULL where there is none */
};
/* Values may contain themselves: no walk without a limit on its depth. */

struct pickle_name {
    const char *name; /* "collections.OrderedDict" */
    int role;         /* of the caller's; PICKLE_ROLE_DICT makes its call a dictionary */
};
enum { PICKLE_ROLE_DICT = 1 };

struct pickle;
/* Reads n bytes, borrowed until pickle_free. names: the allow-list. The work and the memory are linear in n.
 * ERR_INPUT: a name that is not on the list, named with path; ERR_FORMAT: not a pickle, or an operation that torch.save does
 * not write. */
int pickle_read(struct pickle **out, const void *p, size_t n, const struct pickle_name *names, int n_names, const char *path);
const struct pickle_value *pickle_root(const struct pickle *p);
void pickle_free(struct pickle *p); /* NULL ok */

/* The value of a string key in a dictionary, the last one given; NULL: v is none, or it has no such key. */
const struct pickle_value *pickle_get(const struct pickle_value *v, const char *key);
/* Item i of a container; NULL: v is NULL, or it has no such item. */
const struct pickle_value *pickle_item(const struct pickle_value *v, int64_t i);
int pickle_role(const struct pickle_value *v);                                     /* of a name; 0: it is none */
bool pickle_is_call(const struct pickle_value *v, int role);                       /* of a name of that role */
const struct pickle_value *pickle_arg(const struct pickle_value *call, int64_t i); /* NULL: it has no such argument */
bool pickle_is_int(const struct pickle_value *v);
bool pickle_is_sequence(const struct pickle_value *v); /* a tuple or a list */
/* A sequence of numbers >= 0, or the call of the role size (torch.Size) with one. Its length; -1: not that, or longer than cap. */
int pickle_sizes(const struct pickle_value *v, int size, int64_t *to, int cap);
/* Fit for a message of one line: no blank, no control character, not empty. */
bool pickle_is_graphic(const char *s, size_t n);

#endif
