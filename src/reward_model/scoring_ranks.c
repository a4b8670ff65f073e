/* scoring_ranks.c - see scoring_ranks.h. */
#include "reward_model/scoring_ranks.h"

#include "base/buf.h"
#include "base/err.h"
#include "base/hash.h"
#include "comm/comm.h"

#include <stdlib.h>

enum { MOST_ARRAYS = 8 };

struct order_head { /* before the arrays */
    int64_t order, n, bytes[MOST_ARRAYS];
    uint64_t drawn;
};

int scoring_ranks_open(struct scoring_ranks *g, struct comm *comm, const struct split_model_args *a, int64_t max_rows) {
    TRY(split_model_open(&g->split, a));
    TRY(split_model_split(&g->split, comm, max_rows));
    g->follows = comm_rank(g->split.together) > 0;
    return 0;
}

void scoring_ranks_leave(struct scoring_ranks *g) { split_model_leave(&g->split); }

void scoring_ranks_close(struct scoring_ranks *g) {
    split_model_close(&g->split);
    message_free(&g->order);
}

void scoring_ranks_drew(struct scoring_ranks *g, const void *p, size_t n) {
    const uint64_t both[] = {g->drawn, hash64(p, n)};
    g->drawn = hash64(both, sizeof both);
}

int scoring_ranks_order(struct scoring_ranks *g, enum scoring_order order, const struct message *m) {
    struct order_head h = {.order = order, .n = m ? m->n : 0, .drawn = g->drawn};
    if (!scoring_ranks_is_split(g)) return 0;
    CHECK(!g->follows && h.n <= MOST_ARRAYS);
    for (int64_t i = 0; i < h.n; i++) h.bytes[i] = (int64_t)m->arrays[i].n;
    TRY(comm_broadcast(g->split.together, 0, &h, sizeof h));
    for (int64_t i = 0; i < h.n; i++)
        if (h.bytes[i] > 0) TRY(comm_broadcast(g->split.together, 0, m->arrays[i].p, (size_t)h.bytes[i]));
    return 0;
}

int scoring_ranks_next(struct scoring_ranks *g, enum scoring_order *order, struct message_reader *in) {
    struct comm *const c = g->split.together;
    const char *const who = comm_who(c, 0);
    struct order_head h;
    message_free(&g->order);
    g->order = message_new(false);
    TRY(comm_broadcast(c, 0, &h, sizeof h));
    if (h.order < 0 || h.order >= ORDERS || h.n < 0 || h.n > MOST_ARRAYS)
        FAIL(ERR_FORMAT, "%s: an order of kind %lld", who, (long long)h.order);
    if (h.drawn != g->drawn) FAIL(ERR_INPUT, "%s: it has computed another result than the ranks that have the model with it", who);
    for (int64_t i = 0; i < h.n; i++) {
        void *const p = xmalloc((size_t)h.bytes[i] + 1);
        const int rc = h.bytes[i] > 0 ? comm_broadcast(c, 0, p, (size_t)h.bytes[i]) : 0;
        if (rc == 0) message_add(&g->order, p, (size_t)h.bytes[i]);
        free(p);
        TRY(rc);
    }
    *order = (enum scoring_order)h.order;
    *in = (struct message_reader){.head = g->order.head, .arrays = g->order.arrays, .n = g->order.n, .who = who};
    return 0;
}
