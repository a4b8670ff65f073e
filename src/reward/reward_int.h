/* reward_int.h - native graders, calls of compute_score, and Python's text operations that the graders share. */
#ifndef VERLC_REWARD_INT_H
#define VERLC_REWARD_INT_H

#include "reward/reward.h"

#include "base/buf.h"

/* --- result.c; takes message --- */
struct reward_result reward__failure(enum reward_status status, char *message);

/* --- custom_reward_function.c --- */
struct reward__calls;
int reward__calls_create(struct reward__calls **out, const struct reward_args *a); /* ERR_INPUT: no such file */
/* Calls of another module that answers as verlc_helpers/reward.py does; timeout_s 0: the default. */
struct helper_args;
struct helper_pool_args;
int reward__calls_open(struct reward__calls **out, const struct helper_args *h, const struct helper_pool_args *pool,
                       double timeout_s);
void reward__calls_destroy(struct reward__calls *c); /* NULL ok */
void reward__calls_cancel(struct reward__calls *c);  /* forgets them all */
int reward__calls_flush(struct reward__calls *c);    /* as reward_flush */
int reward__call_send(struct reward__calls *c, const struct reward_request *q, int64_t tag);
struct reward__called {
    int64_t tag, response_len; /* as they were sent */
    struct reward_result result;
};
int reward__call_take(struct reward__calls *c, double wait_s, struct reward__called *out); /* 1: one has finished */
int64_t reward__calls_pending(const struct reward__calls *c);                              /* samples */

/* --- grade_code.c --- */
int reward__code_check(const struct reward_args *a, const char *data_source); /* ERR_UNSUPPORTED: there is no sandbox */
int reward__code_create(struct reward__calls **out, const struct reward_args *a);

/* --- rate_limit.c --- */
struct reward__bucket {
    double rate, cost; /* a second, of which it holds at most as much; of one request.  rate 0: no limit */
    double level, at;
    bool started;
};
enum { REWARD__N_BUCKETS = 2 };
struct reward__rate {
    struct reward__bucket bucket[REWARD__N_BUCKETS];
    int passed; /* buckets that the next request has passed */
    double not_before;
};
/* Seconds until the next request may be sent, at time now; 0: it may. */
double reward__rate_wait(struct reward__rate *r, double now);
void reward__rate_sent(struct reward__rate *r);

/* --- concurrency.c --- */
struct helper_pool_args reward__pool_size(const struct reward_args *a, bool is_async); /* processes, and calls of each */
struct reward__sample {
    int64_t tag, response_len;
};
struct reward__held { /* a call that waits; owned by the list */
    json_t *call;
    struct reward__sample sample;
};
struct reward__limit {     /* over all processes; its calls are held[head .. n) */
    int64_t max_in_flight; /* 0: no limit */
    struct reward__rate rate;
    struct reward__held *held;
    int64_t head, n, cap;
};
void reward__limit_open(struct reward__limit *l, const struct reward_args *a);
void reward__limit_hold(struct reward__limit *l, json_t *call, struct reward__sample s); /* takes call */
/* True: *next is taken out and to be sent at once, in_flight others being under way. False: *wait_s until it may be, INFINITY where
 * that waits for a call to end, or nothing is held. */
bool reward__limit_next(struct reward__limit *l, int64_t in_flight, double now, struct reward__held *next, double *wait_s);
void reward__limit_drop(struct reward__limit *l); /* forgets what it holds */

/* --- one answer under way (grading.c) --- */
/* A grader is a function of the text and of what the helper has answered so far: where it needs another answer, it sends a request,
 * and is called again from the start with that one too. */
struct reward__grading {
    const char *text; /* the response, without NUL (reward__text) */
    size_t n;
    const char *truth;     /* of graders of a string */
    const json_t *targets; /* of those of ground_truth["target"] */
    const json_t *answers; /* to the questions, in their order; an array or NULL */
    size_t at;             /* the next of them */
    json_t *question;      /* set: has to be answered first, and the result is none; owned by the caller */
};
/* The answer to the next question, which is taken; NULL: there is none yet. */
const json_t *reward__ask(struct reward__grading *g, json_t *question);
/* A copy whose NULs are a character that no text has; caller frees. */
char *reward__text_of(const char *s, size_t n);
char *reward__text(const json_t *string);
json_t *reward__answer_of(const char *text); /* back, for the result; NULL: null */

struct reward__grader {
    const char *name;                                         /* of verl's module, with the variant */
    struct reward_result (*grade)(struct reward__grading *g); /* NULL: code, which grade_code.c scores */
    const char *packages;                                     /* what pip installs for its questions; NULL: it has none */
    bool targets;                                             /* ground_truth is {"target": string or list} */
};
/* grade.c: the grader of that name, or of the data source; NULL: none, *why says it (caller frees). */
const struct reward__grader *reward__route(const char *name, const char *data_source, char **why);
const struct reward__grader *reward__all_graders(size_t *n);
/* NULL, or what is wrong with the ground truth (caller frees). */
char *reward__check_truth(const struct reward__grader *g, const char *data_source, const json_t *truth);

/* --- the processor time that one answer may take (python_str.c), of this thread: the functions of Python's re and str below
 * count what they do, and once it is over do nothing more, so that the grader comes to its end; its result is none then --- */
void reward__budget_begin(double seconds);
bool reward__budget_end(void);    /* false: it was used up; there is no limit any more */
bool reward__spend(size_t bytes); /* before work on so many: false: there is no time left */
void reward__exhaust(void);       /* as if it were */

/* --- graders, after verl/utils/reward_score; texts without NUL --- */
double reward__gsm8k(const char *s, size_t n, const char *truth, bool flexible);
double reward__math(const char *s, size_t n, const char *truth);
/* 1 or -1; *pred (caller frees) is the answer that was compared, NULL: a strict box that is not there. */
double reward__math_dapo(const char *s, size_t n, const char *truth, bool strict_box_verify, char **pred);
enum reward__dialect { REWARD__PRIME_MATH, REWARD__MATHRULER };
/* PRM800K's grade_answer (grade_sympy.c); may send a request. */
bool reward__grade_answer(struct reward__grading *g, const char *given, const char *truth, enum reward__dialect d);
double reward__prime_math(struct reward__grading *g);
double reward__geo3k(struct reward__grading *g);
bool reward__geo3k_form(const char *s);
char *reward__minerva_normal(const char *answer); /* caller frees, as below */
char *reward__qa_normal(const char *answer);
double reward__choice(const char *s, size_t n, const char *letter);
double reward__search_r1(const char *s, const json_t *targets, bool substring);

/* --- grade_helper.c: native graders, and the helper that answers their questions --- */
struct reward__graders;
int reward__graders_create(struct reward__graders **out, const struct reward_args *a); /* ERR_INVAL: no such grader */
void reward__graders_destroy(struct reward__graders *s);                               /* NULL ok */
void reward__graders_cancel(struct reward__graders *s);                                /* forgets them all */
/* 1: *now is the result; 0: it comes from reward__graders_take. */
int reward__graders_start(struct reward__graders *s, const struct reward_request *q, int64_t tag, struct reward_result *now);
int reward__graders_take(struct reward__graders *s, double wait_s, struct reward__called *out); /* as reward__call_take */
int64_t reward__graders_pending(const struct reward__graders *s);
/* Whether a row is for grade_code.c; name: the row's own grader, or NULL. */
bool reward__graders_is_code(const struct reward__graders *s, const char *name, const char *data_source);
int reward__graders_check(struct reward__graders *s, const char *const *sources, int64_t n); /* reward_check_sources */

/* --- MATH's normal form (grade_math.c), of several graders; false where Python's raises. any_percent: mathruler's, which drops
 * every percent sign --- */
bool reward__strip_string(char **s, bool any_percent);

/* --- Python's re (python_re.c); patterns are string literals --- */
#define PY_SPACE "[\\s\\x1c-\\x1f]"
void reward__sub(char **s, const char *pattern, const char *by);         /* by: as PCRE2 writes it */
char *reward__first_group(const char *s, size_t n, const char *pattern); /* group 1 of the first match, caller frees; NULL: none */
char *reward__last_group(const char *s, size_t n, const char *pattern);
bool reward__search(const char *s, const char *pattern);

/* --- Python's str (python_str.c), on NUL-terminated UTF-8; char **s is an owned string that is changed --- */
/* The last n_chars code points of s[0 .. n) (Python s[-n_chars:]). */
const char *reward__tail(const char *s, size_t n, int64_t n_chars, size_t *n_tail);
/* Bytes of the code point at p (at least 1, at most `left`). */
size_t reward__char_bytes(const char *p, size_t left);
size_t reward__char(const char *p);   /* of the code point at p of a text that ends with NUL, 1 there; in a time of its own bytes */
void reward__set(char **s, char *to); /* frees *s, takes `to` */
void reward__replace(char **s, const char *from, const char *to);
/* The last place of needle in s, NULL if none (rfind). */
const char *reward__rfind(const char *s, const char *needle);
/* From `open` on, up to and with the brace that closes the first one; NULL if it never does. */
char *reward__balanced(const char *open);
/* Bytes of the character at p if it is a decimal (\d, isdecimal); 0: it is not. */
size_t reward__decimal(const char *p);
bool reward__is_word(const char *p); /* \w at p */
bool reward__isdigit(const char *s);
/* How many different letters (isalpha) there are in s, at most `limit` (<= 8). */
int reward__letters(const char *s, int limit);
void reward__strip(char **s);
char *reward__words(const char *s); /* " ".join(s.split()) */
char *reward__lower(const char *s);
bool reward__float(const char *s, double *x); /* float(s); false where it raises */

#endif
