/* bind.h - turns rows of conf/keys into bindings of their keys to members of CONF_STRUCT, which the includer defines:
 *
 *   #define CONF_STRUCT struct supervised_config
 *   #include "conf/bind.h"
 *   static const struct conf_binding bindings[] = {
 *   #include "conf/keys/sft.def"
 *   };
 *
 * One source file has one such struct. What a member takes follows from its own type, so that row and member agree or do
 * not compile. ppo.def says what the letters mean. */
#ifndef VERLC_CONF_BIND_H
#define VERLC_CONF_BIND_H

#include "conf/conf.h"
#include "conf/keys/enums.def"

#include <stddef.h>

#define CONF_INTO(member) \
    _Generic(((CONF_STRUCT *)0)->member, \
        bool: INTO_BOOL,              \
        int: INTO_INT,                \
        unsigned: INTO_INT,           \
        int64_t: INTO_I64,            \
        float: INTO_F32,              \
        double: INTO_F64,             \
        const char *: INTO_STR,       \
        const json_t *: INTO_JSON)

#define AT(member) .into = CONF_INTO(member), .at = offsetof(CONF_STRUCT, member)
#define PATH(member) .into = _Generic(((CONF_STRUCT *)0)->member, const char * : INTO_PATH), .at = offsetof(CONF_STRUCT, member)
#define PATHS(member, count) .into = INTO_PATHS, .at = offsetof(CONF_STRUCT, member), .count_at = offsetof(CONF_STRUCT, count)
#define OR(member) .into = INTO_OR, .at = offsetof(CONF_STRUCT, member)
#define MOST(member) .into = INTO_MOST, .at = offsetof(CONF_STRUCT, member)
#define BYTES(member) .into = INTO_BYTES, .at = offsetof(CONF_STRUCT, member)
#define STRS(member, count) .into = INTO_STRS, .at = offsetof(CONF_STRUCT, member), .count_at = offsetof(CONF_STRUCT, count)
#define F64S(member, count)                                                                           \
    .into = INTO_F64S, .at = offsetof(CONF_STRUCT, member), .count_at = offsetof(CONF_STRUCT, count), \
    .max = sizeof((CONF_STRUCT *)0)->member / sizeof(double)
#define VIA(key) .into = INTO_NOTHING

#define SCHEMA(name, base, inherited)
#define U(path, type, def, text, binding) {.key = path, binding},
#define C(path, list, more, def, text, member) {.key = path, AT(member), .words = CONF_WORDS(list)},
#define B(path, binding) {.key = path, binding},
#define BC(path, list, member) {.key = path, AT(member), .words = CONF_WORDS(list)},
#define N(path, type, def, text)
#define R(path, type, def, text)
#define M(path, type, def, now)
#define D(path, def)

#include "conf/keys/shared_groups.def"

#endif
