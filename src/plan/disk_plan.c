/* disk_plan.c - see disk_plan.h. */
#include "plan/disk_plan.h"

#include "base/err.h"
#include "base/file.h"

#include <errno.h>
#include <stdlib.h>
#include <string.h>
#include <sys/statvfs.h>

enum {
    FIRST = 128 << 10,   /* an empty run.db, lock, logs */
    HEADERS = 64 << 10,  /* of a part's safetensors, its JSON files, the manifest */
    RECORD = 12 << 10,   /* a step's metrics in run.db, metrics.jsonl and TensorBoard */
    SPILL = 6 << 10,     /* in a client's file */
    TOKEN_PROMPT = 8,    /* of a prompt: its id and text */
    TOKEN_RESPONSE = 26, /* of a response: id, log-prob, entropy, reference's log-prob, advantage, its bytes, text */
    SAMPLE = 512         /* the rest of its row */
};

/* ---- one checkpoint ---- */

/* No product wraps: what would pass 2^60 bytes is 2^60, more than any disk has. */
static size_t bytes_of(double x) { return x < 0x1p60 ? (size_t)x : (size_t)1 << 60; }

/* Bytes of the optimizer's arrays for each element, the most that some tensor has. */
static double state_bytes(const struct optim_config *o) {
    switch (o->kind) {
    case OPTIM_ADAMW8: return 2.1;
    case OPTIM_SGD: return o->momentum > 0 ? 4 : 0;
    case OPTIM_RMSPROP: return 4 + 4 * o->centered + (o->momentum > 0 ? 4 : 0);
    case OPTIM_ADAMW:
    case OPTIM_ADAM: return 8 + 4 * o->amsgrad;
    case OPTIM_RADAM:
    case OPTIM_MUON: return 8;
    }
    return 8;
}

static size_t tokenizer_bytes(const char *dir) {
    static const char *const names[] = {"tokenizer.json",  "tokenizer_config.json",   "vocab.json",       "merges.txt",
                                        "tokenizer.model", "special_tokens_map.json", "added_tokens.json"};
    size_t sum = 0;
    for (size_t i = 0; dir && i < sizeof names / sizeof *names; i++) {
        char *path = file_join(dir, names[i]);
        const int64_t n = file_size(path);
        sum += n > 0 ? (size_t)n : 0;
        free(path);
    }
    return sum;
}

/* Its model directory with huggingface/ (configuration and tokenizer again), and in addition master and state. */
static int part_bytes(const struct disk_model *m, size_t *out) {
    double trained = (double)model_config_params(m->config), exported = trained * (double)dtype_size(m->config->dtype);
    if (m->lora->on) {
        struct model *shape;
        TRY(model_shape(&shape, m->config, NULL, DT_F32, QUANT_NONE, &m->lora->cfg));
        trained = (double)shape->n_train;
        exported = 2 * trained * 4; /* lora_adapter/ is a copy of the adapter */
        model_shape_free(shape);
    }
    *out += HEADERS + 2 * tokenizer_bytes(m->dir) + bytes_of(exported + trained * (4 + state_bytes(m->optim)));
    return 0;
}

/* ---- how many ---- */

static int64_t saves_of(const struct run_config *k, int64_t from, int64_t steps) {
    if (k->val_only || steps <= from) return 0;
    if (k->save_freq > 0) return steps / k->save_freq - from / k->save_freq + (steps % k->save_freq != 0);
    return (k->save_freq < 0) + (k->early_stop.enable ? 1 : 0);
}

/* More directories than now at a time: the new one is whole before an old one is removed, and the best one stays in addition. */
static int64_t most_of(const struct run_config *k, int64_t there, int64_t saves) {
    if (saves == 0) return 0;
    const int64_t keep = k->keep_ckpts > 0 ? k->keep_ckpts : INT64_MAX - 2;
    const int64_t best = k->early_stop.enable ? 1 : 0, all = there + saves, held = all < keep + 1 ? all : keep + 1;
    const int64_t more = held + (all > held ? best : 0) - there;
    return more > 1 ? more : 1;
}

/* Free bytes of the file system that dir is in, or will be. */
static bool free_bytes(const char *dir, size_t *out) {
    char *at = xstrdup(dir[0] ? dir : ".");
    struct statvfs v;
    int rc = statvfs(at, &v);
    while (rc < 0 && errno == ENOENT) {
        char *slash = strrchr(at, '/');
        if (slash) slash[slash == at] = '\0';
        else strcpy(at, at[0] == '.' && !at[1] ? "/" : ".");
        rc = statvfs(at, &v);
    }
    free(at);
    if (rc == 0) *out = (size_t)v.f_bavail * v.f_frsize;
    return rc == 0;
}

struct disk_plan {
    size_t checkpoint;   /* bytes of one */
    int64_t saves, most; /* to be made; more than now at a time, while one is written */
    size_t logs;         /* of the run, in run.db and other records */
    size_t sent;         /* weights for servers: those that they have, and those that are being written */
    size_t needed;       /* more than now; with steps 0: of one checkpoint and one step */
    size_t there;        /* free in the directory, or in its nearest parent that exists */
    bool known;          /* there is known */
};

static int make(struct disk_plan *p, const struct disk_plan_args *a) {
    const struct run_config *k = a->run;
    int64_t there = 0;
    *p = (struct disk_plan){0};
    for (int i = 0; i < a->n_models; i++)
        if (a->models[i].config->json) TRY(part_bytes(&a->models[i], &p->checkpoint));
    if (a->from > 0) TRY(ckpt_count(k->default_local_dir, a->from, &there));
    const int64_t steps = a->steps > a->from ? a->steps - a->from : a->steps > 0 ? 0 : 1, every = k->test_freq;
    const double sample = SAMPLE + (double)a->prompt_tokens * TOKEN_PROMPT + (double)a->new_tokens * TOKEN_RESPONSE;
    const double step = RECORD + SPILL * (double)a->n_clients + (double)a->samples * sample;
    const double validation = (double)a->val_samples * sample;
    p->saves = a->steps > 0 ? saves_of(k, a->from, a->steps) : k->save_freq != 0 && !k->val_only;
    p->most = most_of(k, there, p->saves);
    p->logs = bytes_of(FIRST + step * (double)steps + validation * (double)(every > 0 ? steps / every + 1 : 1));
    if (a->sends)
        p->sent = bytes_of(2 * (double)model_config_params(a->models[0].config) * (double)dtype_size(a->models[0].config->dtype));
    p->needed = bytes_of((double)p->checkpoint * (double)p->most + (double)p->logs + (double)p->sent);
    p->known = free_bytes(k->default_local_dir, &p->there);
    return 0;
}

/* ---- in words ---- */

/* "1.2 GB", with two digits that matter. */
static const char *size_text(size_t n, char out[32]) {
    static const char *const units[] = {"bytes", "kB", "MB", "GB", "TB", "PB"};
    double x = (double)n;
    int u = 0;
    for (; x >= 1000 && u < 5; u++) x /= 1000;
    snprintf(out, 32, u > 0 && x < 10 ? "%.1f %s" : "%.0f %s", x, units[u]);
    return out;
}

static void parts_text(const struct disk_plan *p, const struct disk_plan_args *a, struct buf *b) {
    char one[32], logs[32], sent[32], keep[32] = "null", freq[32] = "after_each_epoch";
    if (a->run->save_freq >= -1) snprintf(freq, sizeof freq, "%lld", (long long)a->run->save_freq);
    if (a->run->keep_ckpts > 0) snprintf(keep, sizeof keep, "%lld", (long long)a->run->keep_ckpts);
    buf_addf(b, "%lld %s of %s (trainer.save_freq=%s, %s=%s)", (long long)p->most,
             p->most == 1 ? "checkpoint" : "checkpoints at a time", size_text(p->checkpoint, one), freq, a->keep_key, keep);
    if (p->sent > 0) buf_addf(b, ", weights for servers, two at a time, of %s together", size_text(p->sent, sent));
    buf_addf(b, ", run.db and logs up to %s", size_text(p->logs, logs));
}

int disk_plan_check(struct disk_plan_args *a, struct run *r) {
    char one[32], there[32], needed[32], least[32];
    const char *const dir = r->k.default_local_dir;
    struct disk_plan plan, *const p = &plan;
    a->run = &r->k;
    a->from = r->from.step > 0 ? r->from.step : 0;
    a->steps = r->total_steps;
    for (int i = 0; i < TRACK_N_CLIENTS; i++) a->n_clients += r->loggers.client[i];
    TRY(make(p, a));
    if (!p->known || p->needed <= p->there) return 0;
    size_text(p->there, there);
    if (p->saves > 0 && p->checkpoint > p->there)
        FAIL(ERR_IO,
             "trainer.default_local_dir=%s: a checkpoint takes %s, and the disk has %s free; free some, take another "
             "trainer.default_local_dir, or trainer.save_freq=0, which saves none",
             dir, size_text(p->checkpoint, one), there);
    struct buf line = {0};
    buf_addf(&line, "disk: %s has %s free, and this run may write %s: ", dir, there, size_text(p->needed, needed));
    parts_text(p, a, &line);
    if (p->most > 2) /* one that stays, and the next, which is whole before the first one is removed */
        buf_addf(&line, "; with %s=1 it is %s", a->keep_key,
                 size_text(bytes_of(2 * (double)p->checkpoint + (double)p->logs + (double)p->sent), least));
    run_warn_early(r, line.p);
    buf_free(&line);
    return 0;
}

json_t *disk_plan_print(const struct disk_plan_args *a, struct buf *out) {
    char there[32] = "?", needed[32];
    struct disk_plan plan, *const p = &plan;
    if (make(p, a) < 0) return NULL;
    buf_addf(out, "  disk: %s%s: ", size_text(p->needed, needed), a->steps > 0 ? "" : " for one step");
    parts_text(p, a, out);
    buf_addf(out, "; %s free in %s\n", p->known ? size_text(p->there, there) : there, a->run->default_local_dir);
    return json_pack("{s:I, s:I, s:I, s:I, s:I, s:I, s:o, s:b}", "checkpoint", (json_int_t)p->checkpoint, "saves",
                     (json_int_t)p->saves, "at_a_time", (json_int_t)p->most, "logs", (json_int_t)p->logs, "sent",
                     (json_int_t)p->sent, "needed", (json_int_t)p->needed, "free",
                     p->known ? json_integer((json_int_t)p->there) : json_null(), "fits", !p->known || p->needed <= p->there);
}
