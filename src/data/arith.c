/* arith.c - seeded arithmetic word problems in GSM8K's answer format, small
 * enough for a model of a million parameters: one or two steps of addition,
 * subtraction and multiplication, a rationale that shows each step, "#### N".
 * RL rows have verl's columns and GSM8K's data_source, so its grader scores them.
 * Invariant: the files are a function of (seed, level, counts) alone. */
#include "data/data_int.h"

#include "base/file.h"
#include "base/map.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

/* Placeholders: $N and $M two names, $o things, $a $b $c numbers, $p the first
 * result, $r the last. */
struct shape {
    char op1, op2; /* + - * ; op2 == 0: one step */
    const char *question, *answer;
};
static const struct shape one_step[] = {
    {'+', 0, "$N has $a $o. $M gives $N $b more $o. How many $o does $N have now?", "$N has $a + $b = $r $o now."},
    {'+', 0, "There are $a $o on the table and $b $o in a bag. How many $o are there?", "There are $a + $b = $r $o."},
    {'+', 0, "$N buys $a $o and $M buys $b $o. How many $o do they buy?", "They buy $a + $b = $r $o."},
    {'-', 0, "$N has $a $o. $N gives $b $o to $M. How many $o are left?", "There are $a - $b = $r $o left."},
    {'-', 0, "There are $a $o in a box. $N takes $b $o. How many $o are left?", "There are $a - $b = $r $o left."},
    {'-', 0, "$N has $a $o and $M has $b $o. How many more $o does $N have?", "$N has $a - $b = $r more $o."},
    {'*', 0, "$N has $a bags with $b $o in each bag. How many $o does $N have?", "$N has $a * $b = $r $o."},
    {'*', 0, "$N buys $a boxes with $b $o in each box. How many $o are there?", "There are $a * $b = $r $o."},
};
static const struct shape two_steps[] = {
    {'+', '-', "$N has $a $o and finds $b more. Then $N gives $c $o to $M. How many $o are left?",
     "$N has $a + $b = $p $o.\nThere are $p - $c = $r $o left."},
    {'+', '+', "$N has $a $o, $M has $b $o and there are $c $o in a box. How many $o are there?",
     "$N and $M have $a + $b = $p $o.\nThere are $p + $c = $r $o."},
    {'-', '+', "$N has $a $o and gives $b $o to $M. Then $N buys $c more. How many $o does $N have now?",
     "There are $a - $b = $p $o left.\n$N has $p + $c = $r $o now."},
    {'*', '+', "$N has $a bags with $b $o in each bag and buys $c more. How many $o does $N have now?",
     "$N has $a * $b = $p $o.\n$N has $p + $c = $r $o now."},
    {'*', '-', "$N buys $a boxes with $b $o in each box. $N gives $c $o to $M. How many $o are left?",
     "There are $a * $b = $p $o.\nThere are $p - $c = $r $o left."},
};
static const char *const names[] = {"Tom", "Mia", "Sam", "Ann", "Ben", "Eva", "Leo", "Zoe", "Max", "Ida", "Tim", "Lea"};
static const char *const things[] = {"apples", "books", "coins", "pens", "cards", "eggs", "shells", "stones", "cups", "toys"};
#define COUNT(a) (sizeof(a) / sizeof(a)[0])

/* Sums stay below this at each level, factors below the next; index is the level. */
static const int64_t sum_limit[] = {0, 20, 20, 100}, factor_limit[] = {0, 10, 10, 13};

struct values {
    const char *n, *m, *o;
    int64_t a, b, c, p, r;
};

static int64_t between(struct rng *r, int64_t lo, int64_t hi) { return lo + (int64_t)rng_below(r, (uint64_t)(hi - lo + 1)); }

/* b for `x op b`, at least 2, and the result at least 1. */
static int64_t second(struct rng *r, char op, int64_t x, int level) {
    if (op == '*') return between(r, 2, factor_limit[level] - 1);
    if (op == '-') return between(r, 2, x - 1);
    return between(r, 2, sum_limit[level] / 2 - 1);
}
static int64_t apply(char op, int64_t x, int64_t y) { return op == '+' ? x + y : op == '-' ? x - y : x * y; }

static struct values draw(struct rng *r, const struct shape *s, int level) {
    struct values v = {0};
    const uint64_t n = rng_below(r, COUNT(names)), m = (n + 1 + rng_below(r, COUNT(names) - 1)) % COUNT(names);
    v.n = names[n];
    v.m = names[m];
    v.o = things[rng_below(r, COUNT(things))];
    if (s->op1 == '*') v.a = between(r, 2, factor_limit[level] - 1);
    else if (s->op1 == '-') v.a = between(r, s->op2 ? 5 : 4, sum_limit[level] - 1);
    else v.a = between(r, 2, sum_limit[level] / 2 - 1);
    v.b = second(r, s->op1, v.a, level);
    v.p = apply(s->op1, v.a, v.b);
    v.r = v.p;
    if (s->op2) {
        v.c = second(r, s->op2, v.p, level);
        v.r = apply(s->op2, v.p, v.c);
    }
    return v;
}

static void expand(struct buf *b, const char *text, const struct values *v) {
    for (; *text; text++) {
        if (*text != '$') {
            buf_addc(b, *text);
            continue;
        }
        switch (*++text) {
        case 'N': buf_adds(b, v->n); break;
        case 'M': buf_adds(b, v->m); break;
        case 'o': buf_adds(b, v->o); break;
        case 'a': buf_addf(b, "%lld", (long long)v->a); break;
        case 'b': buf_addf(b, "%lld", (long long)v->b); break;
        case 'c': buf_addf(b, "%lld", (long long)v->c); break;
        case 'p': buf_addf(b, "%lld", (long long)v->p); break;
        case 'r': buf_addf(b, "%lld", (long long)v->r); break;
        default: CHECK(!"placeholder");
        }
    }
}

void data__arith_problem(struct rng *r, int level, struct buf *question, struct buf *answer) {
    CHECK(level >= 1 && level <= 3);
    const bool two = level == 3 || (level == 2 && rng_below(r, 2) == 1);
    const struct shape *s = two ? &two_steps[rng_below(r, COUNT(two_steps))] : &one_step[rng_below(r, COUNT(one_step))];
    const struct values v = draw(r, s, level);
    buf_reset(question);
    buf_reset(answer);
    expand(question, s->question, &v);
    expand(answer, s->answer, &v);
    buf_addf(answer, "\n#### %lld", (long long)v.r);
}

/* --- files --- */

enum { MAX_ROWS = 100000 }; /* in all */

struct maker {
    const struct data_arith_args *a;
    struct rng rng;
    struct map seen; /* every question so far */
    struct buf q, ans;
};

/* A problem whose question has not been used.  The sparsest level has over half a
 * million, so with MAX_ROWS taken a thousand tries do not fail. */
static void fresh(struct maker *m) {
    for (int tries = 0; tries < 1000; tries++) {
        data__arith_problem(&m->rng, m->a->level, &m->q, &m->ans);
        if (map_get(&m->seen, m->q.p, m->q.n, NULL)) continue;
        map_set(&m->seen, m->q.p, m->q.n, 1);
        return;
    }
    CHECK(!"MAX_ROWS is too large");
}

static json_t *rl_row(const struct maker *m, const char *split, int64_t index) {
    return json_pack("{s:s, s:[{s:s, s:s}], s:s, s:{s:s, s:s}, s:{s:s, s:I, s:s, s:s}}", "data_source", "openai/gsm8k", "prompt",
                     "role", "user", "content", m->q.p, "ability", "math", "reward_model", "style", "rule", "ground_truth",
                     strrchr(m->ans.p, ' ') + 1, "extra_info", "split", split, "index", (json_int_t)index, "answer", m->ans.p,
                     "question", m->q.p);
}
/* marked: the answer ends with its "#### N"; otherwise with the rationale. */
static json_t *sft_row(const struct maker *m, bool marked) {
    const char *end = strstr(m->ans.p, "\n####");
    const int n = marked || !end ? (int)m->ans.n : (int)(end - m->ans.p);
    return json_pack("{s:s, s:s#, s:[{s:s, s:s}, {s:s, s:s#}]}", "prompt", m->q.p, "response", m->ans.p, n, "messages", "role",
                     "user", "content", m->q.p, "role", "assistant", "content", m->ans.p, n);
}

static int write_set(const struct data_arith_args *a, const char *name, const json_t *rows) {
    for (int k = 0; k < 2; k++) {
        if (!(k == 0 ? a->jsonl : a->parquet)) continue;
        char *file = xasprintf("%s.%s", name, k == 0 ? "jsonl" : "parquet"), *path = file_join(a->out_dir, file);
        const int rc = data_write_rows(path, rows, NULL);
        free(file);
        free(path);
        TRY(rc);
    }
    return 0;
}

int data_make_arith(const struct data_arith_args *a) {
    struct maker m = {.a = a, .rng = {.seed = a->seed, .stream = RNG_DATA}};
    json_t *train = json_array(), *test = json_array(), *sft_train = json_array(), *sft_test = json_array();
    int rc = 0;
    if (a->level < 1 || a->level > 3) FAILG(out, ERR_INVAL, "--level %d: the levels are 1, 2 and 3", a->level);
    if (a->n_train < 1 || a->n_test < 1 || a->n_sft < 1) FAILG(out, ERR_INVAL, "the numbers of rows must be at least 1");
    if (a->n_train > MAX_ROWS || a->n_test > MAX_ROWS || a->n_sft > MAX_ROWS || a->n_train + a->n_test + a->n_sft > MAX_ROWS)
        FAILG(out, ERR_INVAL, "more than %d rows in all: there are not enough different problems; ask for fewer", MAX_ROWS);
    if (!(a->sft_marked >= 0 && a->sft_marked <= 1))
        FAILG(out, ERR_INVAL, "--sft-marked %g: a share between 0 and 1", a->sft_marked);
    if (!a->jsonl && !a->parquet) FAILG(out, ERR_INVAL, "no file format chosen");
    for (int64_t i = 0; i < a->n_test; i++) { /* first, so that a larger train set keeps the test set */
        fresh(&m);
        json_array_append_new(test, rl_row(&m, "test", i));
        json_array_append_new(sft_test, sft_row(&m, true));
    }
    for (int64_t i = 0; i < a->n_train; i++) {
        fresh(&m);
        json_array_append_new(train, rl_row(&m, "train", i));
    }
    for (int64_t i = 0; i < a->n_sft; i++) {
        fresh(&m);
        const double spread = (double)i * 0.6180339887498949; /* even shares in every stretch of rows */
        json_array_append_new(sft_train, sft_row(&m, spread - floor(spread) < a->sft_marked));
    }
    TRYG(file_mkdirs(a->out_dir), out);
    TRYG(write_set(a, "train", train), out);
    TRYG(write_set(a, "test", test), out);
    TRYG(write_set(a, "sft_train", sft_train), out);
    TRYG(write_set(a, "sft_test", sft_test), out);
out:
    json_decref(train);
    json_decref(test);
    json_decref(sft_train);
    json_decref(sft_test);
    map_free(&m.seen);
    buf_free(&m.q);
    buf_free(&m.ans);
    return rc;
}
