/* weight_sync.c - see weight_sync.h. */
#include "ranks/weight_sync.h"

#include "device/collective/collective.h"
#include "model/lora/lora.h"
#include "model/parallel/tensor_parallel.h"

#include "base/buf.h"
#include "base/err.h"
#include "base/hash.h"

#include <stdlib.h>

enum { ALIGN = 256 };

struct weight_sync {
    struct weight_sync_args a;
    struct collective *group;
    char *p; /* what is sent; by spans: room for one */
    size_t bytes;
    int64_t n;         /* spans; 0: all goes at once */
    size_t *at;        /* (size + 1), of each span: the share of each rank */
    struct tensor sum; /* (1) i64, device */
};

size_t weight_sync_room(const struct model_stream_shape *s) { return model_span_most(s); }

static int open_room(struct weight_sync *w) {
    void *p = NULL;
    w->n = model_spans(w->a.model);
    for (int64_t i = 0; i < w->n; i++) {
        const size_t n = model_span_bytes(w->a.model, i);
        w->bytes = n > w->bytes ? n : w->bytes;
    }
    TRY(dev_alloc(w->a.dev, w->bytes, &p));
    w->p = p;
    return 0;
}

/* Of all spans, as the trainers' weights are cut. */
static int cut_spans(struct weight_sync *w, int size) {
    for (int64_t i = 0; i < w->n; i++) {
        size_t *const at = w->at + i * (size + 1);
        if (comm_rank(w->a.comm) < w->a.trainers) model_span_cut(w->a.model, i, w->a.trainers, at);
        for (int r = w->a.trainers; r <= size; r++) at[r] = model_span_bytes(w->a.model, i);
    }
    return comm_broadcast(w->a.comm, 0, w->at, (size_t)(w->n * (size + 1)) * sizeof *w->at);
}

static int open_weights(struct weight_sync *w) {
    const int size = comm_size(w->a.comm), trainers = w->a.trainers;
    void *sum = NULL;
    TRY(collective_open(&w->group, w->a.dev, w->a.comm));
    TRY(collective_share(w->group, w->p, w->bytes));
    TRY(dev_alloc(w->a.dev, sizeof(uint64_t), &sum));
    w->sum = tensor_1d(sum, DT_I64, 1);
    w->at = xcalloc((size_t)((w->n > 0 ? w->n : 1) * (size + 1)), sizeof *w->at);
    if (w->n > 0) return cut_spans(w, size);
    for (int r = 1; r <= size; r++) {
        const size_t share = w->bytes / (size_t)trainers / ALIGN * ALIGN;
        w->at[r] = r >= trainers ? w->bytes : (size_t)r * share;
    }
    return 0;
}

int weight_sync_open(struct weight_sync **out, const struct weight_sync_args *a) {
    struct weight_sync *w = xcalloc(1, sizeof *w);
    int rc = 0;
    CHECK(a->trainers >= 1 && a->trainers <= comm_size(a->comm));
    w->a = *a;
    if (a->spans && !a->model->lora) {
        rc = open_room(w);
    } else {
        void *p;
        model_trained_weights(a->model, &p, &w->bytes);
        w->p = p;
    }
    if (rc == 0) rc = open_weights(w);
    if (rc < 0) weight_sync_close(w);
    else *out = w;
    return rc;
}

void weight_sync_close(struct weight_sync *w) {
    if (!w) return;
    collective_close(w->group);
    if (w->sum.data) dev_free(w->a.dev, w->sum.data, sizeof(uint64_t));
    if (w->n > 0 && w->p) dev_free(w->a.dev, w->p, w->bytes);
    free(w->at);
    free(w);
}

static int checksum(struct weight_sync *w, size_t bytes, uint64_t *sum) {
    TRY(dev_checksum(w->a.dev, w->sum, tensor_1d(w->p, DT_U8, (int64_t)bytes)));
    return dev_copy_out(w->a.dev, sum, w->sum.data, sizeof *sum);
}

/* Span i comes to the room of all ranks; those that generate keep their rows of it. */
static int send_span(struct weight_sync *w, int64_t i, uint64_t *sum) {
    struct model *const m = w->a.model;
    const int rank = comm_rank(w->a.comm), size = comm_size(w->a.comm), trainers = w->a.trainers;
    uint64_t both[2] = {*sum, 0};
    if (rank < trainers) TRY(model_span_give(m, i, rank, trainers, w->p));
    TRY(collective_all_gather(w->group, w->p, w->at + i * (size + 1), 1));
    TRY(checksum(w, model_span_bytes(m, i), &both[1]));
    *sum = hash64(both, sizeof both);
    return w->a.part ? model_tp_take_span(w->a.part, i, w->p) : 0;
}

int weight_sync_send(struct weight_sync *w, uint64_t *sum) {
    *sum = 0;
    for (int64_t i = 0; i < w->n; i++) TRY(send_span(w, i, sum));
    if (w->n > 0) return 0;
    TRY(collective_all_gather(w->group, w->p, w->at, 1));
    if (w->a.part) TRY(model_tp_take_adapter(w->a.part));
    return checksum(w, w->bytes, sum);
}
