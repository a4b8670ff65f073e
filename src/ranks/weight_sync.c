/* weight_sync.c - see weight_sync.h. */
#include "ranks/weight_sync.h"

#include "device/collective/collective.h"
#include "model/lora/lora.h"

#include "base/buf.h"
#include "base/err.h"

#include <stdlib.h>

enum { ALIGN = 256 };

struct weight_sync {
    struct dev *dev;
    struct collective *group;
    char *p; /* what is sent */
    size_t bytes;
    size_t *at;        /* (size + 1): the share of each rank */
    struct tensor sum; /* (1) i64, device */
};

static int open_weights(struct weight_sync *w, struct comm *c, int trainers) {
    void *sum = NULL;
    TRY(collective_open(&w->group, w->dev, c));
    TRY(collective_share(w->group, w->p, w->bytes));
    TRY(dev_alloc(w->dev, sizeof(uint64_t), &sum));
    w->sum = tensor_1d(sum, DT_I64, 1);
    const int size = comm_size(c);
    w->at = xcalloc((size_t)size + 1, sizeof *w->at);
    for (int r = 1; r <= size; r++) {
        const size_t share = w->bytes / (size_t)trainers / ALIGN * ALIGN;
        w->at[r] = r >= trainers ? w->bytes : (size_t)r * share;
    }
    return 0;
}

int weight_sync_open(struct weight_sync **out, struct dev *d, struct comm *c, struct model *m, int trainers) {
    struct weight_sync *w = xcalloc(1, sizeof *w);
    CHECK(trainers >= 1 && trainers <= comm_size(c));
    w->dev = d;
    void *p;
    model_trained_weights(m, &p, &w->bytes);
    w->p = p;
    const int rc = open_weights(w, c, trainers);
    if (rc < 0) weight_sync_close(w);
    else *out = w;
    return rc;
}

void weight_sync_close(struct weight_sync *w) {
    if (!w) return;
    collective_close(w->group);
    if (w->sum.data) dev_free(w->dev, w->sum.data, sizeof(uint64_t));
    free(w->at);
    free(w);
}

int weight_sync_send(struct weight_sync *w, uint64_t *sum) {
    TRY(collective_all_gather(w->group, w->p, w->at, 1));
    TRY(dev_checksum(w->dev, w->sum, tensor_1d(w->p, DT_U8, (int64_t)w->bytes)));
    return dev_copy_out(w->dev, sum, w->sum.data, sizeof *sum);
}
