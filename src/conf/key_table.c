/* key_table.c - the rows of conf/keys: lookup, the little language of their
 * types, "did you mean", config groups. Knows no values but defaults.
 * Type language: alternatives between |: bool int float str list dict any null,
 * 'word'; int and float with an interval ([0,1], (0,2^24), (0,inf]); list[TYPE].
 * An int satisfies float; any scalar but null satisfies str. */
#include "conf/conf_int.h"

#include "base/buf.h"
#include "base/err.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

/* ppo.def says what the letters mean. The bindings of rows are the programs' own (bind.h). */
static const struct conf_key rows[] = {
#define ABSENT NULL
#define ABSENT_IS(v) NULL, .other = v
#define NULL_IS(v) v, .other = v
#define FIRST_WORD(word, value) "'" word "'"
#define NEXT_WORD(word, value) "|'" word "'"
#define ROW(PATH, TYPE, STATUS, TEXT, ...) \
    {.path = PATH, .type = TYPE, .status = STATUS, .text = TEXT, .own = true, .def = __VA_ARGS__},
#define SCHEMA(name, base, inherited) {.type = name, .def = base, .text = inherited},
#define U(path, type, def, text, binding) ROW(path, type, CONF_USED, text, def)
#define C(path, list, more, def, text, member) ROW(path, list(FIRST_WORD, NEXT_WORD) more, CONF_USED, text, def)
#define N(path, type, def, text) ROW(path, type, CONF_NOTED, text, def)
#define R(path, type, def, text) ROW(path, type, CONF_REJECTED, text, def)
#define M(path, type, def, now) ROW(path, type, CONF_MOVED, now, def)
#define D(path, def) ROW(path, NULL, CONF_AS_BASE, NULL, def)
#define B(path, binding) ROW(path, NULL, CONF_AS_BASE, NULL, NULL)
#define BC(path, list, member) ROW(path, NULL, CONF_AS_BASE, NULL, NULL)
#include "conf/keys/enums.def"
#include "conf/keys/shared_groups.def"
#include "conf/keys/ppo.def"
#include "conf/keys/megatron.def"
#include "conf/keys/veomni.def"
#include "conf/keys/async.def"
#include "conf/keys/sft.def"
#include "conf/keys/generate.def"
#include "conf/keys/eval.def"
};
enum { N_ROWS = sizeof rows / sizeof rows[0] };

static const char *const schemas[] = {"ppo_trainer",
                                      "ppo_megatron_trainer",
                                      "ppo_veomni_trainer",
                                      "sft_trainer_engine",
                                      "sft_megatron_trainer",
                                      "sft_veomni_trainer",
                                      "sft_automodel_trainer",
                                      "sft_trainer",
                                      "generation",
                                      "generation_server",
                                      "evaluation",
                                      "one_step_off_ppo_trainer",
                                      "one_step_off_ppo_megatron_trainer",
                                      "fully_async_ppo_trainer",
                                      "fully_async_ppo_megatron_trainer",
                                      NULL};

const char *const *conf_schemas(void) { return schemas; }

const char *conf__engine_schema(const char *program, const char *engine) {
    char *name = xasprintf("%s_%s_trainer", program, engine);
    int k = 0;
    while (schemas[k] && strcmp(schemas[k], name) != 0) k++;
    free(name);
    return schemas[k];
}

static void add_row(struct conf_table *t, const struct conf_key *row) {
    int64_t k;
    const bool known = map_gets(&t->index, row->path, &k);
    if (row->status == CONF_AS_BASE) {
        CHECK(known); /* tested */
        if (row->def) t->rows[k].def = row->def;
        t->rows[k].own = true;
    } else if (known) {
        t->rows[k] = *row;
    } else {
        xgrow((void **)&t->rows, &t->cap, t->n + 1, sizeof *t->rows);
        map_set(&t->index, row->path, strlen(row->path), t->n);
        t->rows[t->n++] = *row;
    }
}

/* The rows of the base schema first, then the schema's own. Where the schema says so, what its base has and it has not
 * is accepted and noted. */
static void add_schema(struct conf_table *t, const char *schema) {
    int64_t k = 0;
    while (k < N_ROWS && (rows[k].path || strcmp(rows[k].type, schema) != 0)) k++;
    CHECK(k < N_ROWS); /* conf_schemas and the tables agree */
    const struct conf_key *head = &rows[k];
    if (head->def) add_schema(t, head->def);
    for (int64_t j = 0; j < t->n && head->text; j++) t->rows[j].own = false;
    for (k++; k < N_ROWS && rows[k].path; k++) add_row(t, &rows[k]);
    for (int64_t j = 0; j < t->n && head->text; j++) {
        struct conf_key *row = &t->rows[j];
        if (row->own || row->status == CONF_MOVED) continue;
        row->status = CONF_NOTED;
        row->text = head->text;
    }
}

int conf__table_open(struct conf_table *t, const char *schema) {
    *t = (struct conf_table){0};
    for (int k = 0; schemas[k]; k++)
        if (strcmp(schemas[k], schema) == 0) t->schema = schemas[k];
    if (!t->schema)
        FAIL(ERR_INVAL,
             "no configuration is named '%s'; there are ppo_trainer, ppo_megatron_trainer, ppo_veomni_trainer, "
             "one_step_off_ppo_trainer, fully_async_ppo_trainer, "
             "sft_trainer_engine, sft_trainer, generation, evaluation, and files under --config-path",
             schema);
    add_schema(t, t->schema);
    return 0;
}

void conf__table_free(struct conf_table *t) {
    free(t->rows);
    map_free(&t->index);
    *t = (struct conf_table){0};
}

static const struct conf_key *row_of(const struct conf_table *t, const char *path, size_t n) {
    int64_t k;
    return map_get(&t->index, path, n, &k) ? &t->rows[k] : NULL;
}

const struct conf_key *conf__table_row(const struct conf_table *t, const char *path) { return row_of(t, path, strlen(path)); }

const struct conf_key *conf__table_owner(const struct conf_table *t, const char *path) {
    size_t n = strlen(path);
    const struct conf_key *row = row_of(t, path, n);
    while (!row) { /* up to a row that is an open dict or a list */
        while (n > 0 && path[n - 1] != '.') n--;
        if (n == 0) return NULL;
        row = row_of(t, path, --n);
        if (row && !strstr(row->type, "dict") && !strstr(row->type, "list") && !strstr(row->type, "any")) return NULL;
    }
    return row;
}

bool conf__table_is_group(const struct conf_table *t, const char *path) {
    const size_t n = strlen(path);
    for (int64_t k = 0; k < t->n; k++)
        if (strncmp(t->rows[k].path, path, n) == 0 && t->rows[k].path[n] == '.') return true;
    return false;
}

/* ---- the nearest key ---- */

static const char *leaf_of(const char *path) {
    const char *dot = strrchr(path, '.');
    return dot ? dot + 1 : path;
}

static const struct alias {
    const char *name, *ppo, *sft;
} aliases[] = {
#define ALIAS(name, ppo, sft) {name, ppo, sft},
#include "conf/keys/aliases.def"
};

/* What another trainer's name is here; NULL: none. */
static const char *alias_of(const struct conf_table *t, const char *name) {
    const bool sft = strncmp(t->schema, "sft", 3) == 0;
    for (size_t k = 0; k < sizeof aliases / sizeof aliases[0]; k++) {
        const char *key = sft ? aliases[k].sft : aliases[k].ppo;
        if (key && strcmp(aliases[k].name, name) == 0 && conf__table_row(t, key)) return key;
    }
    return NULL;
}

const char *conf__table_alias(const struct conf_table *t, int i, const char *key) {
    if (i >= (int)(sizeof aliases / sizeof aliases[0])) return NULL;
    const char *of = strncmp(t->schema, "sft", 3) == 0 ? aliases[i].sft : aliases[i].ppo;
    return of && strcmp(of, key) == 0 ? aliases[i].name : "";
}

const char *conf__table_near(const struct conf_table *t, const char *path) {
    const size_t n = strlen(path), leaf = strlen(leaf_of(path));
    const char *best = alias_of(t, leaf_of(path));
    if (best) return best;
    int best_cost = 4 + 4 * (int)(leaf < 128 ? leaf : 128) / 3; /* in quarters of an edit */
    for (int64_t k = 0; k < t->n; k++) {
        const char *row = t->rows[k].path;
        const size_t m = strlen(row);
        int cost = 4 * str_distance(path, row);
        if (m > n && row[m - n - 1] == '.' && strcmp(row + m - n, path) == 0) cost = 1; /* a forgotten prefix */
        else if (strcmp(leaf_of(path), leaf_of(row)) == 0) cost = cost / 4;             /* the right word in the wrong place */
        if (t->rows[k].def == NULL) cost++;
        if (cost < best_cost) {
            best = row;
            best_cost = cost;
        }
    }
    return best;
}

/* ---- types ---- */

struct interval { /* lo <= x <= hi, each maybe strict; long double holds every int64 */
    long double lo, hi;
    bool lo_open, hi_open;
};

/* "1e-6", "2^24", "-2^63", "inf". */
static long double bound(const char *p, char **end) {
    const bool negative = *p == '-';
    long double x = strtold(p + negative, end);
    if (**end == '^') x = powl(x, strtold(*end + 1, end));
    return negative ? -x : x;
}

/* "[0,1]", "(0,inf)" or nothing at p. false: not that. */
static bool parse_interval(const char *p, size_t n, struct interval *b) {
    char *end;
    if (n == 0) return true;
    if (*p != '[' && *p != '(') return false;
    b->lo_open = *p == '(';
    b->lo = bound(p + 1, &end);
    if (*end != ',') return false;
    b->hi = bound(end + 1, &end);
    b->hi_open = *end == ')';
    return end + 1 == p + n;
}

static bool inside(long double x, const struct interval *b) { /* nan never is */
    return (b->lo_open ? x > b->lo : x >= b->lo) && (b->hi_open ? x < b->hi : x <= b->hi);
}

static bool starts(const char *t, size_t n, const char *word) {
    const size_t m = strlen(word);
    return n >= m && memcmp(t, word, m) == 0;
}

static bool word_is(const char *t, size_t n, const char *word) { return n == strlen(word) && starts(t, n, word); }

/* One alternative t[0..n) against v; v NULL only checks whether the text is a type. */
static bool one_type(const char *t, size_t n, const struct conf_node *v) {
    struct interval whole = {-0x1p53L, 0x1p53L, false, false}, real = {-INFINITY, INFINITY, true, true};
    if (word_is(t, n, "any")) return true;
    if (word_is(t, n, "null")) return !v || v->kind == CONF_NULL;
    if (word_is(t, n, "bool")) return !v || v->kind == CONF_BOOL;
    if (word_is(t, n, "dict")) return !v || v->kind == CONF_DICT;
    if (word_is(t, n, "list")) return !v || v->kind == CONF_LIST;
    if (word_is(t, n, "str")) return !v || (v->kind != CONF_NULL && v->kind != CONF_LIST && v->kind != CONF_DICT);
    if (n > 2 && t[0] == '\'' && t[n - 1] == '\'')
        return !v || (v->kind == CONF_STR && strlen(v->s) == n - 2 && memcmp(v->s, t + 1, n - 2) == 0);
    if (starts(t, n, "int") && parse_interval(t + 3, n - 3, &whole)) return !v || (v->kind == CONF_INT && inside(v->i, &whole));
    if (starts(t, n, "float") && parse_interval(t + 5, n - 5, &real)) {
        real.lo = (double)real.lo; /* 1e-6 as a value is */
        real.hi = (double)real.hi;
        return !v || (v->kind == CONF_INT && inside(v->i, &real)) || (v->kind == CONF_FLOAT && inside(v->f, &real));
    }
    if (starts(t, n, "list[") && t[n - 1] == ']') {
        if (!v) return one_type(t + 5, n - 6, NULL);
        for (int64_t k = 0; k < v->n; k++)
            if (!one_type(t + 5, n - 6, v->items[k].v)) return false;
        return v->kind == CONF_LIST;
    }
    return false;
}

static bool each_type(const char *type, const struct conf_node *v, bool all) {
    for (const char *p = type;;) {
        const size_t n = strcspn(p, "|");
        const bool ok = one_type(p, n, v);
        if (ok != all) return ok;
        if (p[n] == '\0') return all;
        p += n + 1;
    }
}

bool conf__type_ok(const char *type, const struct conf_node *v) { return each_type(type, v, false); }
bool conf__type_valid(const char *type) { return each_type(type, NULL, true); }

/* The values that one column gives: the default, or what null means. */
static int column(struct conf_node **out, const struct conf_table *t, bool others) {
    struct conf_node *root = conf__node_new(CONF_DICT);
    for (int64_t k = 0; k < t->n; k++) {
        const char *text = others ? t->rows[k].other : t->rows[k].def;
        struct conf_node *v = NULL;
        if (!text) continue;
        int rc = conf__parse_value(&v, text, t->rows[k].path);
        if (rc == 0) rc = conf__node_set(root, t->rows[k].path, v);
        if (rc < 0) {
            conf__node_free(root);
            return rc;
        }
    }
    if (others) conf__node_finish(root);
    *out = root;
    return 0;
}

int conf__table_defaults(struct conf_node **out, const struct conf_table *t) { return column(out, t, false); }
int conf__table_others(struct conf_node **out, const struct conf_table *t) { return column(out, t, true); }

/* ---- config groups ---- */

/* group, the option that verlc is; everything else is refused. */
static const struct {
    const char *schemas, *group, *option;
} groups[] = {
    {"ppo", "model_engine", "dp"},
    {"ppo", "actor@actor_rollout_ref.actor", "dp_actor"},
    {"ppo", "data@data", "legacy_data"},
    {"ppo", "ref@actor_rollout_ref.ref", "dp_ref"},
    {"ppo", "rollout@actor_rollout_ref.rollout", "rollout"},
    {"ppo", "model@actor_rollout_ref.model", "hf_model"},
    {"ppo", "critic@critic", "dp_critic"},
    {"ppo", "model@critic.model", "hf_model"},
    {"ppo", "reward@reward", "reward"},
    {"ppo", "reward_manager@reward_manager", "reward_manager"},
    {"ppo", "reward_model@reward_model", "dp_reward_loop"},
    {"ppo", "algorithm@algorithm.rollout_correction", "rollout_correction"},
    {"ppo", "distillation@distillation", "distillation"},
    {"ppo", "transfer_queue@transfer_queue", "transfer_queue"},
    {"ppo", "optim@actor_rollout_ref.actor.optim", "fsdp"},
    {"ppo", "optim@critic.optim", "fsdp"},
    {"ppo", "engine@actor_rollout_ref.actor.fsdp_config", "fsdp"},
    {"ppo", "engine@actor_rollout_ref.ref.fsdp_config", "fsdp"},
    {"ppo", "engine@critic.fsdp", "fsdp"},
    {"sft", "model@model", "hf_model"},
    {"sft", "engine@engine", "fsdp"},
    {"sft", "optim@optim", "fsdp"},
    {"sft", "profiler@profiler", "profiler"},
};
enum { N_GROUPS = sizeof groups / sizeof groups[0] };

/* The row of a group; "engine" also finds "engine@engine". */
static int group_row(const struct conf_table *t, const char *group) {
    const bool sft = strncmp(t->schema, "sft", 3) == 0, eval = strcmp(t->schema, "evaluation") == 0;
    const size_t n = strlen(group);
    for (int k = 0; k < N_GROUPS && !eval; k++) {
        if ((strcmp(groups[k].schemas, "sft") == 0) != sft) continue;
        const char *at = strchr(groups[k].group, '@');
        if (strcmp(groups[k].group, group) == 0) return k;
        if (at && !strchr(group, '@') && strcmp(at + 1, group) == 0 && n == (size_t)(at - groups[k].group) &&
            memcmp(groups[k].group, group, n) == 0)
            return k;
    }
    return -1;
}

bool conf__group_known(const struct conf_table *t, const char *group) { return group_row(t, group) >= 0; }

int conf__group_check(const struct conf_table *t, const char *group, const char *option) {
    const int k = group_row(t, group);
    if (k < 0) {
        FAIL(ERR_INVAL,
             "%s=%s: there is no config group %s; groups of this configuration are picked with "
             "model_engine=dp or set key by key",
             group, option, group);
    }
    if (strcmp(groups[k].option, option) == 0) return 0;
    static const char *const engines[] = {"megatron", "veomni", "automodel"};
    for (size_t j = 0; j < sizeof engines / sizeof engines[0]; j++) {
        if (strncmp(option, engines[j], strlen(engines[j])) != 0) continue;
        if (strstr(t->schema, engines[j])) return 0;
        FAIL(ERR_INVAL, "%s=%s: verlc has one engine of its own; %s=%s takes all keys of that one, else drop this override (%s)",
             group, option, strncmp(t->schema, "sft", 3) == 0 ? "engine" : "model_engine", engines[j], groups[k].option);
    }
    FAIL(ERR_INVAL, "%s=%s: verlc has one engine of its own, which takes %s=%s; drop this override", group, option, group,
         groups[k].option);
}
