/* nccl.cu - an NCCL whose ranks are threads: calls return at once, as of a communicator that does not block, and what a group was
 * told is done on its stream when the other ranks come to theirs. It ends the program where it is used as NCCL forbids. */
#include "device/cuda/collective/nccl_open.cuh"
#include "device/cuda/context.cuh"

#include <atomic>
#include <deque>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

struct sent {
    const void *p;
    size_t n;
    std::atomic<bool> taken;
};
struct world {
    std::mutex lock;
    std::map<std::pair<int, int>, std::deque<std::shared_ptr<sent>>> under_way; /* from, to */
    std::atomic<int> joined{0};
};
struct ncclComm {
    world *w;
    int rank, size;
    bool busy; /* its last group has not been asked for */
    std::atomic<bool> aborted;
};
struct told {
    bool send, done;
    void *p;
    size_t n;
    int peer;
};
struct told_group {
    ncclComm *comm;
    cudaStream_t stream;
    std::vector<told> ops;
    std::vector<std::shared_ptr<sent>> out;
    bool begun;
};
static thread_local std::shared_ptr<told_group> group; /* NULL: none is open */

static int get_version(int *version) { return *version = 22809, NCCL_OK; }
static int get_id(struct nccl_id *id) {
    static std::atomic<int> count;
    *id = {};
    snprintf(id->bytes, sizeof id->bytes, "%d", count++);
    return NCCL_OK;
}
static int init(nccl_comm *c, int size, struct nccl_id id, int rank, struct nccl_config *config) {
    static std::mutex lock;
    static std::map<std::string, world *> worlds;
    CHECK(config->magic == 0xcafebeef && config->blocking == 0 && config->size == 44);
    const std::lock_guard<std::mutex> own(lock);
    world *&w = worlds[id.bytes];
    if (!w) w = new world();
    w->joined++;
    *c = new ncclComm();
    (*c)->w = w;
    (*c)->rank = rank;
    (*c)->size = size;
    return NCCL_IN_PROGRESS;
}
static int async_error(nccl_comm c, int *state) {
    *state = c->busy || c->w->joined < c->size ? NCCL_IN_PROGRESS : NCCL_OK;
    c->busy = false;
    return NCCL_OK;
}
static int abort_comm(nccl_comm c) {
    CHECK(!group || group->ops.empty());
    c->aborted = true;
    return NCCL_OK;
}
static const char *no_text(nccl_comm) { return ""; }
static const char *error_text(int) { return "?"; }
static int group_start(void) {
    CHECK(!group);
    group = std::make_shared<told_group>();
    return NCCL_OK;
}
static int tell(bool send, void *p, size_t n, int peer, nccl_comm c, cudaStream_t s) {
    CHECK(c && group && !c->busy && n > 0 && peer != c->rank); /* no c: an aborted one */
    group->comm = c;
    group->stream = s;
    group->ops.push_back({send, false, p, n, peer});
    return NCCL_IN_PROGRESS;
}
static int send_to(const void *p, size_t n, int, int to, nccl_comm c, cudaStream_t s) { return tell(true, (void *)p, n, to, c, s); }
static int recv_from(void *p, size_t n, int, int from, nccl_comm c, cudaStream_t s) { return tell(false, p, n, from, c, s); }

/* Takes what has come for this op; of one peer in the order in which it was sent. */
static void take(told_group *g, told *op) {
    std::deque<std::shared_ptr<sent>> &from = g->comm->w->under_way[{op->peer, g->comm->rank}];
    if (from.empty()) return;
    CHECK(from.front()->n == op->n); /* both ends say the same */
    memcpy(op->p, from.front()->p, op->n);
    from.front()->taken = true;
    from.pop_front();
    op->done = true;
}
static bool go_on(told_group *g) {
    const std::lock_guard<std::mutex> own(g->comm->w->lock);
    std::map<int, bool> waits;
    bool done = true;
    if (g->comm->aborted) return true;
    for (told &op : g->ops) {
        if (op.send && !g->begun) {
            g->out.push_back(std::make_shared<sent>());
            g->out.back()->p = op.p;
            g->out.back()->n = op.n;
            g->comm->w->under_way[{g->comm->rank, op.peer}].push_back(g->out.back());
        }
        if (op.send || op.done) continue;
        if (!waits[op.peer]) take(g, &op);
        waits[op.peer] |= !op.done;
        done = done && op.done;
    }
    g->begun = true;
    for (const auto &one : g->out) done = done && one->taken;
    return done;
}
static int group_end(void) {
    const std::shared_ptr<told_group> g = group;
    CHECK(g);
    group.reset();
    if (g->ops.empty()) return NCCL_OK;
    g->comm->busy = true;
    streams_push(g->stream, [g] { return go_on(g.get()); });
    return NCCL_IN_PROGRESS;
}

int cuda_nccl_open(const struct cuda_nccl **out) {
    static const struct cuda_nccl table = {get_version, get_id,      init,      async_error, abort_comm, no_text,
                                           error_text,  group_start, group_end, send_to,     recv_from,  22809};
    *out = &table;
    return 0;
}
