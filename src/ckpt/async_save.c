/* async_save.c - see async_save.h. The copies of model and optimizer are views: the structs with the pointers to what changes
 * replaced, on a device that is host memory. */
#include "ckpt/async_save.h"

#include "base/buf.h"
#include "base/clock.h"
#include "base/err.h"
#include "base/thread_pool.h"

#include <pthread.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

enum { MAX_PARTS = 2, COPY_STREAM = 0 };

/* One part in host memory. */
struct copy {
    struct ckpt_part from, view;
    struct model model; /* the view's; all but master and dev are the model's own, and do not change */
    struct optim optim;
    void *block; /* master, then the optimizer's arrays */
    size_t bytes;
};

struct ckpt_async {
    struct dev *dev; /* of the models */
    struct dev host;
    struct copy copy[MAX_PARTS];
    int n_parts;
    struct ckpt_part views[MAX_PARTS];
    struct ckpt_save_args args; /* parts: views; trainer: owned */
    void (*before)(void *arg);
    void *before_arg;
    enum { IDLE, COPIED, WRITING } state; /* WRITING until it is taken */
    pthread_t thread;
    bool joinable;
    pthread_mutex_t lock;
    pthread_cond_t changed;
    bool done;
    int rc;
    struct err_saved why;
};

/* master and the optimizer's arrays of a part; how many. */
static int arrays_of(const struct ckpt_part *p, struct optim_array out[OPTIM_MAX_ARRAYS + 1]) {
    out[0] = (struct optim_array){"master", DT_F32, p->model->n_train, p->model->master};
    return 1 + optim_arrays(p->optim, out + 1);
}

static size_t array_bytes(const struct optim_array *a) { return (size_t)a->n * dtype_size(a->dt); }
static size_t room_of(const struct optim_array *a) { return (array_bytes(a) + 63) & ~(size_t)63; } /* in the block */

/* The pointer of o that has the array `data`. */
static void **place_of(struct optim *o, const void *data) {
    void **const at[] = {(void **)&o->m,      (void **)&o->v,       (void **)&o->m_code,
                         (void **)&o->v_code, (void **)&o->m_scale, (void **)&o->v_scale};
    for (size_t i = 0; i < sizeof at / sizeof *at; i++)
        if (*at[i] == data) return at[i];
    CHECK(!"an array of the optimizer without a member");
    return NULL;
}

/* The compute copy stays on the device, where the writing thread must not look. */
static void hide_weights(struct model *m) {
    m->embed = m->head = (struct weight){0};
    m->final_norm = m->rope = m->flat = (struct tensor){0};
    m->weights = NULL;
}

static int open_copy(struct ckpt_async *s, struct copy *c, const struct ckpt_part *p) {
    struct optim_array a[OPTIM_MAX_ARRAYS + 1];
    c->from = *p;
    c->model = *p->model;
    c->optim = *p->optim;
    const int n = arrays_of(p, a);
    for (int i = 0; i < n; i++) c->bytes += room_of(&a[i]);
    TRY(dev_host_alloc(s->dev, c->bytes, &c->block));
    char *at = c->block;
    for (int i = 0; i < n; i++) {
        if (i == 0) c->model.master = (float *)(void *)at;
        else *place_of(&c->optim, a[i].data) = at;
        at += room_of(&a[i]);
    }
    c->model.dev = &s->host;
    hide_weights(&c->model);
    c->view = *p;
    c->view.model = &c->model;
    c->view.optim = &c->optim;
    return 0;
}

int ckpt_async_open(struct ckpt_async **out, const struct ckpt_part *parts, int n_parts) {
    struct ckpt_async *s = xcalloc(1, sizeof *s);
    int rc = 0;
    CHECK(n_parts >= 1 && n_parts <= MAX_PARTS);
    s->dev = parts[0].model->dev;
    pthread_mutex_init(&s->lock, NULL);
    pthread_condattr_t clock;
    pthread_condattr_init(&clock);
    pthread_condattr_setclock(&clock, CLOCK_MONOTONIC);
    pthread_cond_init(&s->changed, &clock);
    pthread_condattr_destroy(&clock);
    TRYG(dev_open_ref(&s->host), out);
    for (; s->n_parts < n_parts; s->n_parts++) TRYG(open_copy(s, &s->copy[s->n_parts], &parts[s->n_parts]), out);
    for (int i = 0; i < n_parts; i++) s->views[i] = s->copy[i].view;
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
    for (int i = 0; i < MAX_PARTS; i++) dev_host_free(s->dev, s->copy[i].block, s->copy[i].bytes);
    json_decref((json_t *)(uintptr_t)s->args.trainer);
    dev_close(&s->host);
    pthread_cond_destroy(&s->changed);
    pthread_mutex_destroy(&s->lock);
    free(s);
}

static int copy_part(struct ckpt_async *s, struct copy *c) {
    struct optim_array from[OPTIM_MAX_ARRAYS + 1];
    const int n = arrays_of(&c->from, from);
    char *at = c->block;
    for (int i = 0; i < n; at += room_of(&from[i++])) TRY(dev_evict(s->dev, COPY_STREAM, at, from[i].data, array_bytes(&from[i])));
    c->optim.step = c->from.optim->step;
    return 0;
}

int ckpt_async_copy(struct ckpt_async *s, const struct ckpt_save_args *a) {
    CHECK(s->state == IDLE && a->n_parts == s->n_parts);
    for (int i = 0; i < s->n_parts; i++) TRY(copy_part(s, &s->copy[i]));
    TRY(dev_copy_stream_sync(s->dev, COPY_STREAM));
    json_decref((json_t *)(uintptr_t)s->args.trainer);
    s->args = *a;
    s->args.parts = s->views;
    s->args.trainer = json_deep_copy(a->trainer);
    s->state = COPIED;
    s->done = false;
    return 0;
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

bool ckpt_async_copied(const struct ckpt_async *s) { return s->state == COPIED; }
bool ckpt_async_busy(const struct ckpt_async *s) { return s->state == WRITING; }
