/* sft.c - supervised fine-tuning: verl's sft_trainer (engine keys) and fsdp_sft_trainer (the older keys, which conf moves to the
 * new ones), as keys, data and a loss of the supervised learner. */
#include "sft/sft.h"
#include "sft/sft_loss.h"

#include "base/err.h"

#include <stdlib.h>
#include <string.h>

/* ---- keys ---- */

static int read_columns(struct supervised_config *k) {
    const struct supervised_columns *r = &k->columns;
    struct sft_dataset_args *t = &k->data.train;
    if (r->multiturn || !r->prompt_key) {
        t->messages_key = r->messages_key;
        t->tools_key = r->tools_key;
        t->enable_thinking_key = r->enable_thinking_key;
        t->ignore_input_ids_mismatch = r->ignore_input_ids_mismatch;
        return 0;
    }
    if (!r->response_key) FAIL(ERR_INVAL, "data.response_key is not set; data.prompt_key=%s needs it", r->prompt_key);
    t->prompt_key = r->prompt_key;
    t->response_key = r->response_key;
    t->prompt_dict_keys = r->prompt_dict_keys;
    t->n_prompt_dict_keys = r->n_prompt_dict_keys;
    t->response_dict_keys = r->response_dict_keys;
    t->n_response_dict_keys = r->n_response_dict_keys;
    return 0;
}

/* ---- data ---- */

struct datasets {
    struct sft_dataset *train, *val;
};

static struct supervised_rows rows_of(const struct sft_dataset *d) {
    struct packed_seq *seqs = xcalloc((size_t)d->n, sizeof *seqs);
    for (int64_t i = 0; i < d->n; i++)
        seqs[i] = (struct packed_seq){.ids = d->samples[i].ids, .n = d->samples[i].n, .mask = d->samples[i].loss_mask};
    return (struct supervised_rows){.seqs = seqs, .n = d->n, .keys = d->keys};
}

static int open_data(struct supervised_data *d, const struct supervised_config *k) {
    struct datasets *const own = d->own = xcalloc(1, sizeof *own);
    struct sft_dataset_args a = k->data.train;
    a.tok = d->tok;
    a.chat = d->chat;
    a.max_length = k->data.max_length;
    a.seed = k->trainer.seed;
    a.shuffle = true;
    a.what = "data.train_files";
    a.sampler = &k->data.sampler;
    TRY(sft_dataset_open(&own->train, &a));
    d->train = rows_of(own->train);
    if (k->data.val.n_files == 0) return 0;
    a.files = k->data.val.files;
    a.n_files = k->data.val.n_files;
    a.max_samples = k->data.val.max_samples;
    a.what = "data.val_files";
    a.sampler = NULL;
    TRY(sft_dataset_open(&own->val, &a));
    d->val = rows_of(own->val);
    return 0;
}

static void close_data(struct supervised_data *d) {
    struct datasets *const own = d->own;
    free((void *)(uintptr_t)d->train.seqs);
    free((void *)(uintptr_t)d->val.seqs);
    if (!own) return;
    sft_dataset_close(own->train);
    sft_dataset_close(own->val);
    free(own);
}

/* ---- the program ---- */

static int open_rank(struct comm *comm, const struct comm_call *call, struct ctl_result *out) {
    return supervised_open_rank(&sft_program, comm, call, out);
}
const struct worker_process_service sft_services[] = {{"sft_device", open_rank}, {NULL, NULL}};

const struct supervised_program sft_program = {
    .name = "sft",
    .open = "sft_device",
    .services = sft_services,
    .read = read_columns,
    .open_data = open_data,
    .close_data = close_data,
    .loss = sft_loss,
    .stats = (const struct supervised_stat[]){{"train/loss", REDUCE_SUM}, {NULL}},
    .validate = sft_loss_validate,
};

int sft_train(const struct conf *c) { return supervised_train(&sft_program, c); }

int sft_plan(const struct conf *c, const struct train_plan_args *a, struct run_plan *out) {
    return supervised_plan(&sft_program, c, a, out);
}

int sft_probe(const struct conf *c, bool whole, struct time_probe *out) { return supervised_probe(&sft_program, c, whole, out); }

int sft_choices(const struct conf *c, bool own_memory, struct buf *out) {
    return supervised_choices(&sft_program, c, own_memory, out);
}
