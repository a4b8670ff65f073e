/* optimizer_offload.c - AdamW and its relatives on a master and moments in host memory: piece by piece on the device, where
 * the copies of the next piece in and of the one before out overlap with the compute of one.
 *
 * Which of master and moments are in host memory is the optimizer's configuration; what is on the device
 * is used where it is.
 * Invariant: a piece is computed by the same call as the whole, so the bits are those without offload;
 * piece i lives in buffer i % 2, which is its copy stream too. */
#include "model/optim/optimizer_int.h"

#include "base/arena.h"
#include "base/err.h"

/* Elements: 16 MiB of each array, so that a transfer is long and a buffer small; of a small model an eighth. */
enum { MOST = 1 << 22, LEAST = 1 << 14, SHARE = 8, ARRAYS = 4 };

static int64_t piece_length(const struct optim *o) {
    int64_t longest = 0;
    for (int64_t i = 0; i < o->n_runs; i++)
        if (optim__adaptive(o->runs[i].rule) && o->runs[i].n > longest) longest = o->runs[i].n;
    const int64_t n = longest / SHARE / 64 * 64; /* pieces begin where vectors do */
    return n < LEAST ? LEAST : n < MOST ? n : MOST;
}
static int64_t piece_of(const struct optim_run *r, int64_t lo, int64_t length) { return r->n - lo < length ? r->n - lo : length; }

void optim__pieces_layout(struct optim *o, struct arena *a) {
    const int64_t longest = piece_length(o);
    bool any = false;
    for (int64_t i = 0; i < o->n_runs; i++) any |= optim__adaptive(o->runs[i].rule);
    if (!any) return;
    for (int b = 0; b < 2; b++)
        for (int k = 0; k < ARRAYS; k++)
            if (k == 0 ? o->host_master : o->host_state && (k < 3 || o->third))
                o->s.piece[b][k] = arena_take(a, (size_t)longest * 4);
}

/* Where master, m, v and x of the piece at `lo` are; NULL: not kept. */
static void places(const struct optim *o, const struct optim_run *r, const struct optim_run_args *a, int64_t lo,
                   float *at[ARRAYS]) {
    at[0] = a->m->master + r->at + lo;
    at[1] = r->m_at < 0 ? NULL : o->m + r->m_at + lo;
    at[2] = r->v_at < 0 ? NULL : o->v + r->v_at + lo;
    at[3] = r->x_at < 0 ? NULL : o->x + r->x_at + lo;
}

static int bring(struct optim *o, const struct optim_run *r, const struct optim_run_args *a, int64_t i) {
    const int64_t length = piece_length(o), lo = i * length;
    float *rest[ARRAYS], **here = o->s.piece[i % 2];
    places(o, r, a, lo, rest);
    for (int k = 0; k < ARRAYS; k++)
        if (here[k] && rest[k]) TRY(dev_fetch(a->m->dev, (int)(i % 2), here[k], rest[k], (size_t)piece_of(r, lo, length) * 4));
    return 0;
}

static int step_piece(struct optim *o, const struct optim_run *r, const struct optim_run_args *a, int64_t i) {
    struct dev *d = a->m->dev;
    const int64_t lo = i * piece_length(o), n = piece_of(r, lo, piece_length(o));
    const size_t bytes = (size_t)n * 4;
    float *rest[ARRAYS], *at[ARRAYS], **here = o->s.piece[i % 2], *grads = a->grads + r->at + lo;
    places(o, r, a, lo, rest);
    for (int k = 0; k < ARRAYS; k++) at[k] = here[k] && rest[k] ? here[k] : rest[k];
    TRY(dev_copy_stream_wait(d, (int)(i % 2)));
    TRY(optim__adaptive_step(a, r->rule, at, grads, n));
    if (o->host_master) TRY(dev_copy(d, grads, at[0], bytes));
    for (int k = 0; k < ARRAYS; k++)
        if (here[k] && rest[k]) TRY(dev_evict(d, (int)(i % 2), rest[k], here[k], bytes));
    return 0;
}

int optim__pieces(struct optim *o, const struct optim_run *r, const struct optim_run_args *a) {
    const int64_t length = piece_length(o), n = (r->n + length - 1) / length;
    TRY(bring(o, r, a, 0));
    for (int64_t i = 0; i < n; i++) {
        if (i + 1 < n) TRY(bring(o, r, a, i + 1));
        TRY(step_piece(o, r, a, i));
    }
    for (int i = 0; i < 2; i++) TRY(dev_copy_stream_wait(a->m->dev, i));
    return 0;
}
