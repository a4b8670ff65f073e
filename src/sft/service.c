/* service.c - see service.h. The calls are those of sft.c. */
#include "sft/service.h"

#include "ranks/worker_calls.h"
#include "sft/worker.h"

#include "base/err.h"
#include "base/json.h"

#include <stdlib.h>

static struct {
    struct sft_config k;
    struct sft_worker w;
} self;

/* ---- callbacks of the shared calls ---- */

static int forward(const json_t *args, const struct packed_seq *seqs, int64_t n, struct forward_out out) {
    const struct progress at = run_progress(&rank_self()->run);
    (void)args;
    return sft_worker_forward(&self.w, &at, seqs, n, out.logp);
}

static void close_all(void) {
    sft_worker_close(&self.w);
    sft_config_free(&self.k);
}

/* ---- its own ---- */

static int open_device(struct comm *comm, const struct comm_call *call, struct ctl_result *out) {
    rank_self()->program = (struct rank_program){.dev = &self.w.dev, .forward = forward, .close = close_all};
    TRY(rank_open_config(comm, call));
    TRY(sft_config_read(&self.k, rank_self()->conf));
    TRY(rank_open_run(&self.k.run));
    TRY(rank_open_device(call, &self.w.dev, self.k.run.device, self.k.run.threads));
    self.w.k = &self.k;
    self.w.comm = comm;
    self.k.n_ranks = comm_size(comm);
    self.k.n_local = comm_local_size(comm);
    out->value = json_object();
    rank_describe(out->value, &self.w.dev);
    return 0;
}

static int open_model(struct comm *comm, const struct comm_call *call, struct ctl_result *out) {
    const struct sft_planned *p = &self.w.planned;
    int64_t total_steps, longest;
    (void)comm;
    TRY(json_i64(call->args, "total_steps", &total_steps, call->name));
    TRY(json_i64(call->args, "longest", &longest, call->name));
    train_optim_steps(&self.k.optim, total_steps, self.k.warmup_ratio);
    TRY(sft_worker_open(&self.w, longest));
    sft_worker_checkpoints(&self.w, &rank_self()->run.checkpoints);
    out->value = json_pack("{s:O, s:s, s:b}", "plan", p->json, "text", p->text, "async_save", p->async_save);
    return 0;
}

static int update(struct comm *comm, const struct comm_call *call, struct ctl_result *out) {
    static const char *const none[] = {NULL};
    struct message_reader in = rank_reader(call);
    struct packed_seq *seqs = NULL;
    struct sft_rows rows = {0};
    struct batch b = {0};
    int64_t step;
    int rc = 0;
    (void)comm;
    TRY(json_i64(call->args, "step", &step, call->name));
    TRY(message_read_seqs(&in, &seqs, &rows.n));
    struct comm_bytes row;
    TRYG(message_next(&in, (size_t)rows.n * sizeof *rows.row, &row), out);
    rows.seqs = seqs;
    rows.row = row.p;
    rank_update_begin(step, "train", true);
    rc = rank_update_end(out, sft_worker_update(&self.w, &rank_self()->run, &rows), &b, none);
out:
    free(seqs);
    return rc;
}

const struct ctl_service sft_services[] = {
    {"sft_device", open_device}, {"sft_model", open_model}, {"sft_update", update}, {NULL, NULL}};
