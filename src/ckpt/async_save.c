/* async_save.c - see async_save.h. The copies of model and optimizer are views: the structs with the pointers to what changes
 * replaced, on a device that is host memory. */
#include "ckpt/async_save.h"

#include "base/buf.h"
#include "base/clock.h"
#include "base/err.h"
#include "base/file_writer.h"
#include "base/thread_pool.h"
#include "ckpt/rank_copy.h"

#include <pthread.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

enum { MAX_PARTS = 2 };

/* One part in host memory, on rank 0. */
struct copy {
    struct optim *from;
    struct ckpt_part view;
    struct model model; /* the view's; all but master and dev are the model's own, and do not change */
    struct optim optim;
};

struct ckpt_async {
    struct comm *comm; /* NULL: one rank */
    struct dev host;
    struct rank_copy *memory; /* of each part master, then the optimizer's arrays, as long as a whole model's */
    struct copy copy[MAX_PARTS];
    int n_parts;
    struct ckpt_part views[MAX_PARTS];
    struct ckpt_save_args args; /* parts: views; trainer: owned */
    void (*before)(void *arg);
    void *before_arg;
    enum { IDLE, COPIED, WRITING } state; /* WRITING until it is taken; on other ranks than 0 IDLE */
    pthread_t thread;
    bool joinable;
    pthread_mutex_t lock;
    pthread_cond_t changed;
    bool done;
    int rc;
    struct err_saved why;
};

/* ---- the parts, and where they are in the memory ---- */

/* master and the optimizer's arrays of a whole model, and where each begins. */
struct layout {
    struct optim_array whole[OPTIM_MAX_ARRAYS + 1];
    size_t at[OPTIM_MAX_ARRAYS + 1];
    int n;
};

/* What this rank copies, and how large the memory is. */
struct copy_plan {
    size_t bytes;
    struct rank_copy_piece *pieces;
    int64_t n, cap;
};

/* A part's layout behind plan->bytes, as its file has it, and what this rank copies to it, added to the plan. */
static void lay_out(const struct ckpt_async *s, const struct ckpt_part *p, struct layout *l, struct copy_plan *plan) {
    struct optim_piece *own;
    int64_t n_own;
    const bool here = p->model->own || !s->comm || comm_rank(s->comm) == 0; /* what is not sharded over the ranks is rank 0's */
    l->n = optim_pieces(p->optim, p->model, l->whole, &own, &n_own);
    plan->bytes += (ckpt_optim_begin(p, l->whole, l->n) - plan->bytes) % FILE_WRITER_BLOCK;
    for (int i = 0; i < l->n; i++) {
        const size_t size = dtype_size(l->whole[i].dt);
        l->at[i] = (plan->bytes + size - 1) / size * size;
        plan->bytes = l->at[i] + (size_t)l->whole[i].n * size;
    }
    for (int64_t i = 0; here && i < n_own; i++) {
        const struct optim_array *a = &l->whole[own[i].array];
        const size_t size = dtype_size(a->dt);
        xgrow((void **)&plan->pieces, &plan->cap, plan->n + 1, sizeof *plan->pieces);
        plan->pieces[plan->n++] = (struct rank_copy_piece){(const char *)a->data + (size_t)own[i].own * size,
                                                           l->at[own[i].array] + (size_t)own[i].at * size, (size_t)own[i].n * size};
    }
    free(own);
}

/* The compute copy stays on the device, which the writing thread must not read. */
static void hide_weights(struct model *m) {
    m->embed = m->head = (struct weight){0};
    m->final_norm = m->query_scale = m->flat = (struct tensor){0};
    memset(m->rope, 0, sizeof m->rope);
    m->weights = NULL;
}

/* The whole model and optimizer as if they were in host memory. */
static void make_view(struct ckpt_async *s, struct copy *c, const struct ckpt_part *p, const struct layout *l) {
    char *const memory = rank_copy_memory(s->memory);
    c->from = p->optim;
    c->model = *p->model;
    c->optim = *p->optim;
    c->model.master = (float *)(void *)(memory + l->at[0]);
    c->model.own = NULL;
    c->model.n_own = 0;
    c->model.n_master = c->model.n_train;
    for (int i = 1; i < l->n; i++) optim_set_array(&c->optim, &l->whole[i], memory + l->at[i]);
    c->model.dev = &s->host;
    hide_weights(&c->model);
    c->view = *p;
    c->view.model = &c->model;
    c->view.optim = &c->optim;
    s->views[c - s->copy] = c->view;
}

static int open_memory(struct ckpt_async *s, const struct ckpt_part *parts) {
    struct layout l[MAX_PARTS];
    struct copy_plan plan = {0};
    for (int i = 0; i < s->n_parts; i++) lay_out(s, &parts[i], &l[i], &plan);
    const int rc = rank_copy_open(&s->memory, parts[0].model->dev, s->comm, plan.bytes, plan.pieces, plan.n);
    free(plan.pieces);
    TRY(rc);
    for (int i = 0; i < s->n_parts && rank_copy_memory(s->memory); i++) make_view(s, &s->copy[i], &parts[i], &l[i]);
    return 0;
}

int ckpt_async_open(struct ckpt_async **out, const struct ckpt_part *parts, int n_parts, struct comm *c) {
    struct ckpt_async *s = xcalloc(1, sizeof *s);
    int rc = 0;
    CHECK(n_parts >= 1 && n_parts <= MAX_PARTS);
    s->comm = c && comm_size(c) > 1 ? c : NULL;
    s->n_parts = n_parts;
    pthread_mutex_init(&s->lock, NULL);
    pthread_condattr_t clock;
    pthread_condattr_init(&clock);
    pthread_condattr_setclock(&clock, CLOCK_MONOTONIC);
    pthread_cond_init(&s->changed, &clock);
    pthread_condattr_destroy(&clock);
    TRYG(dev_open_ref(&s->host), out);
    rc = open_memory(s, parts);
out:
    if (rc < 0) ckpt_async_close(s);
    else *out = s;
    return rc;
}

static void join(struct ckpt_async *s) {
    if (s->joinable) pthread_join(s->thread, NULL);
    s->joinable = false;
}

void ckpt_async_close(struct ckpt_async *s) {
    if (!s) return;
    join(s);
    rank_copy_close(s->memory);
    json_decref((json_t *)(uintptr_t)s->args.trainer);
    dev_close(&s->host);
    pthread_cond_destroy(&s->changed);
    pthread_mutex_destroy(&s->lock);
    free(s);
}

int ckpt_async_copy(struct ckpt_async *s, const struct ckpt_save_args *a) {
    CHECK(s->state == IDLE && a->n_parts == s->n_parts);
    TRY(rank_copy_run(s->memory));
    if (!rank_copy_memory(s->memory)) return 0;
    for (int i = 0; i < s->n_parts; i++) s->copy[i].optim.step = s->copy[i].from->step;
    json_decref((json_t *)(uintptr_t)s->args.trainer);
    s->args = *a;
    s->args.parts = s->views;
    s->args.trainer = json_deep_copy(a->trainer);
    s->state = COPIED;
    s->done = false;
    return 0;
}

int ckpt_async_save(struct ckpt_async *s, const struct ckpt_save_args *a) {
    TRY(ckpt_async_copy(s, a));
    if (s->state != COPIED) return 0;
    s->state = IDLE;
    return ckpt_save(&s->args);
}

static void *write_copy(void *arg) {
    struct ckpt_async *s = arg;
    pool_set_fp_mode(); /* conversions round as on the main thread */
    if (s->before) s->before(s->before_arg);
    const int rc = ckpt_save(&s->args);
    pthread_mutex_lock(&s->lock);
    if (rc < 0) err_save(&s->why);
    s->rc = rc;
    s->done = true;
    pthread_cond_signal(&s->changed);
    pthread_mutex_unlock(&s->lock);
    return NULL;
}

void ckpt_async_write(struct ckpt_async *s, void (*before)(void *arg), void *arg) {
    CHECK(s->state == COPIED);
    s->state = WRITING;
    s->before = before;
    s->before_arg = arg;
    s->joinable = pthread_create(&s->thread, NULL, write_copy, s) == 0;
    if (!s->joinable) write_copy(s); /* no thread is to be had: here and now */
}

int ckpt_async_take(struct ckpt_async *s, double wait_s, int64_t *step) {
    if (s->state != WRITING) return 0;
    struct timespec until;
    clock_gettime(CLOCK_MONOTONIC, &until);
    const double end = (double)until.tv_sec + (double)until.tv_nsec * 1e-9 + wait_s;
    until.tv_sec = (time_t)end;
    until.tv_nsec = (long)((end - (double)until.tv_sec) * 1e9);
    pthread_mutex_lock(&s->lock);
    while (!s->done && pthread_cond_timedwait(&s->changed, &s->lock, &until) == 0) {
    }
    const bool done = s->done;
    pthread_mutex_unlock(&s->lock);
    if (!done) return 0;
    join(s);
    s->state = IDLE;
    *step = s->args.step;
    if (s->rc < 0) err_restore(&s->why);
    return s->rc < 0 ? s->rc : 1;
}
