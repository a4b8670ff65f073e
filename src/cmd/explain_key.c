/* explain_key.c - what `verlc explain` says of a configuration key: meaning, type, default, values, programs, other names, when to
 * change it, related keys; and which keys a part of a name may mean. Knows no values of a run. */
#include "cmd/cmd.h"
#include "cmd/explain.h"

#include "base/buf.h"
#include "base/err.h"
#include "base/map.h"
#include "conf/conf.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <strings.h>

enum { LABEL = 12, MAX_LISTED = 40, ENDS = 0, BEGINS, HAS };

/* The programs whose keys are distinguished; the first that has a key explains it. */
static const struct program {
    const char *schema, *name;
} programs[] = {{"ppo_trainer", "ppo"},
                {"sft_trainer_engine", "sft"},
                {"sft_trainer", "sft with its older keys"},
                {"generation", "generate"},
                {"generation_server", "generate with ppo's keys"},
                {"evaluation", "eval"},
                {"one_step_off_ppo_trainer", "ppo one step off"},
                {"fully_async_ppo_trainer", "ppo fully asynchronous"},
                {"ppo_megatron_trainer", "ppo with model_engine=megatron"},
                {"ppo_veomni_trainer", "ppo with model_engine=veomni"},
                {"sft_megatron_trainer", "sft with engine=megatron"},
                {"sft_veomni_trainer", "sft with engine=veomni"},
                {"sft_automodel_trainer", "sft with engine=automodel"}};
enum { N_PROGRAMS = sizeof programs / sizeof programs[0], N_MAIN = 8 };

/* ---- one key ---- */

struct wanted {
    const char *key;
    struct conf_key_info k;
};
static int is_it(void *arg, const struct conf_key_info *k) {
    struct wanted *w = arg;
    if (strcmp(w->key, k->key) != 0) return 0;
    w->k = *k;
    return 1;
}
static bool find(const char *schema, const char *key, struct conf_key_info *out) {
    struct wanted w = {.key = key};
    const bool there = conf_keys(schema, is_it, &w) > 0;
    *out = w.k;
    return there;
}

static void label(const char *name) { printf("    %-*s", LABEL, name); }

static void part(const char *name, const char *text) {
    if (!text || !*text) return;
    label(name);
    explain_wrapped(text, 4 + LABEL, 4 + LABEL);
}

static void print_default(const struct conf_key_info *k) {
    struct buf b = {0};
    if (k->how == CONF_KEY_OLDER) return;
    if (!k->def) buf_adds(&b, "not set");
    else if (strcmp(k->def, "???") == 0) buf_adds(&b, "none: it has to be set");
    else buf_adds(&b, k->def);
    if (k->null_is && (!k->def || strcmp(k->def, k->null_is) != 0)) buf_addf(&b, ", which is %s", k->null_is);
    else if (k->null_is) buf_adds(&b, ", and null is the same");
    part("default", b.p);
    buf_free(&b);
}

static void print_values(const struct conf_key_info *k) {
    struct buf b = {0};
    if (k->values) conf_key_values(k, &b);
    for (char *p = b.p; p && *p; p++)
        if (*p == '\n') *p = p[1] ? ' ' : '\0';
    part("values", b.p);
    buf_free(&b);
}

/* Who uses it, and who takes it only. */
static void print_programs(const char *key) {
    struct buf acts = {0}, noted = {0};
    for (int i = 0; i < N_MAIN; i++) {
        struct conf_key_info k;
        if (!find(programs[i].schema, key, &k) || k.how == CONF_KEY_OLDER) continue;
        struct buf *b = k.how == CONF_KEY_ACTS ? &acts : &noted;
        buf_addf(b, "%s%s", b->n ? ", " : "", programs[i].name);
    }
    part("used by", acts.p);
    part("accepted by", noted.n ? noted.p : NULL);
    buf_free(&acts);
    buf_free(&noted);
}

static int print_names(const char *schema, const struct conf_key_info *k) {
    struct buf older = {0}, elsewhere = {0}, followers = {0}, verl = {0};
    const int rc = conf_key_relations(schema, k->key, &older, &elsewhere, &followers);
    if (rc == 0) {
        buf_adds(&verl, k->own ? "no such key: it is verlc's" : "the same name");
        if (older.n) buf_addf(&verl, "; older: %s", older.p);
        part("in verl", verl.p);
        part("other names", elsewhere.p);
        part("default of", followers.p);
    }
    buf_free(&older);
    buf_free(&elsewhere);
    buf_free(&followers);
    buf_free(&verl);
    return rc;
}

static int print_key(const char *schema, const struct conf_key_info *k) {
    struct buf type = {0};
    printf("%s (key)\n    ", k->key);
    if (k->how == CONF_KEY_OLDER) {
        printf("older name of %s; 'verlc explain %s' says more\n", k->text, k->text);
        return 0;
    }
    if (k->how == CONF_KEY_NOTED) printf("accepted, without effect: ");
    if (k->how == CONF_KEY_FIXED) printf("no value but its default is taken: ");
    explain_wrapped(k->text, 4 + (k->how == CONF_KEY_NOTED ? 26 : k->how == CONF_KEY_FIXED ? 36 : 0), 4);
    conf_type_words(k->type, &type);
    if (strcmp(type.p, k->type) != 0 && strpbrk(k->type, "[(")) buf_addf(&type, "; %s", k->type);
    part("type", type.p);
    buf_free(&type);
    print_values(k);
    print_default(k);
    print_programs(k->key);
    TRY(print_names(schema, k));
    part("change it", k->advice);
    part("related", k->related);
    return 0;
}

/* The first program in which it acts, else the first that takes it; NULL: none. */
static const char *schema_with(const char *key, struct conf_key_info *k) {
    const char *first = NULL;
    for (int i = 0; i < N_PROGRAMS; i++) {
        if (!find(programs[i].schema, key, k)) continue;
        if (k->how == CONF_KEY_ACTS) return programs[i].schema;
        if (!first) first = programs[i].schema;
    }
    if (first) find(first, key, k);
    return first;
}

int explain_key(const char *key) {
    struct conf_key_info k, whole;
    const char *schema = schema_with(key, &k);
    if (!schema) return 0;
    char *path = xasprintf("actor_rollout_ref.%s", key); /* "rollout.n" is an old key of verl's generation, but hardly meant so */
    int rc = 0;
    if (k.how != CONF_KEY_ACTS && find("ppo_trainer", path, &whole) && whole.how == CONF_KEY_ACTS) {
        rc = print_key("ppo_trainer", &whole);
        putchar('\n');
    }
    free(path);
    if (rc == 0) rc = print_key(schema, &k);
    return rc < 0 ? rc : 1;
}

/* ---- a part of a name ---- */

struct matches {
    const char *word;
    int how; /* ENDS, BEGINS or HAS */
    char *found[MAX_LISTED];
    const char *text[MAX_LISTED];
    struct map seen; /* by both programs */
    int64_t n;
};

/* HAS: a word of the last part begins so. */
static bool matches(const struct matches *m, const char *key) {
    const size_t n = strlen(m->word), len = strlen(key);
    if (m->how == ENDS) return len > n && key[len - n - 1] == '.' && strcmp(key + len - n, m->word) == 0;
    if (m->how == BEGINS) return strncmp(key, m->word, n) == 0;
    const char *dot = strrchr(key, '.'), *leaf = dot ? dot + 1 : key;
    for (const char *p = leaf; (p = strstr(p, m->word)); p++)
        if (p == leaf || p[-1] == '_') return true;
    return false;
}

static int take(void *arg, const struct conf_key_info *k) {
    struct matches *m = arg;
    if (k->how != CONF_KEY_ACTS || !matches(m, k->key)) return 0;
    if (map_gets(&m->seen, k->key, NULL)) return 0;
    map_set(&m->seen, k->key, strlen(k->key), 0);
    if (m->n < MAX_LISTED) {
        m->found[m->n] = xstrdup(k->key);
        m->text[m->n] = k->text;
    }
    m->n++;
    return 0;
}

static int find_all(struct matches *m, int how) {
    static const char *const schemas[] = {"ppo_trainer", "sft_trainer_engine"};
    m->how = how;
    for (int i = 0; i < 2; i++) TRY(conf_keys(schemas[i], take, m));
    return 0;
}

/* ---- a value ---- */

static int has_value(void *arg, const struct conf_key_info *k) {
    struct wanted *w = arg;
    struct buf values = {0};
    if (k->how == CONF_KEY_ACTS && !w->k.key) conf_key_values(k, &values);
    for (const char *p = values.p ? values.p : ""; *p; p += strcspn(p, "\n") + 1)
        if (strcspn(p, "\n") == strlen(w->key) && strncasecmp(p, w->key, strlen(w->key)) == 0) w->k = *k;
    buf_free(&values);
    return 0;
}

/* The first key of ppo that takes the word. */
static int64_t explain_value(const char *word) {
    struct wanted w = {.key = word};
    TRY(conf_keys("ppo_trainer", has_value, &w));
    if (!w.k.key || strcasecmp(word, "true") == 0 || strcasecmp(word, "false") == 0) return 0;
    printf("%s is a value of %s\n\n", word, w.k.key);
    return explain_key(w.k.key);
}

int64_t explain_keys_like(const char *word) {
    struct matches m = {.word = word};
    TRY(find_all(&m, ENDS));
    if (m.n == 0) TRY(find_all(&m, BEGINS));
    if (m.n == 0) {
        const int64_t value = explain_value(word);
        if (value != 0) return value;
    }
    if (m.n == 0 && strlen(word) > 1) TRY(find_all(&m, HAS));
    const int64_t n = m.n < MAX_LISTED ? m.n : MAX_LISTED;
    const int rc = m.n == 1 ? explain_key(m.found[0]) : 0;
    if (m.n > 1) printf("%s: %lld keys; 'verlc explain KEY' says more of one\n", word, (long long)m.n);
    for (int64_t i = 0; i < n && m.n > 1; i++) {
        printf("  %s\n      ", m.found[i]);
        explain_wrapped(m.text[i], 6, 6);
    }
    if (m.n > n) printf("  ... and %lld more: verlc ppo --help %s\n", (long long)(m.n - n), m.how == BEGINS ? word : "all");
    for (int64_t i = 0; i < n; i++) free(m.found[i]);
    map_free(&m.seen);
    return rc < 0 ? rc : m.n;
}
