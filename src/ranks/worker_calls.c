/* worker_calls.c - see worker_calls.h. */
#include "ranks/worker_calls.h"

#include "ranks/rank_group.h"

#include "base/buf.h"
#include "base/clock.h"
#include "base/err.h"
#include "base/hash.h"
#include "base/json.h"
#include "base/log.h"
#include "ranks/launcher.h"

#include <signal.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

/* A slice of generation: the samples that finish in it are reported together; it is longer where none finishes. */
#define GENERATE_S 0.05
#define LONGEST_S 0.5
enum { MOST_SERVICES = 64, STEPS = 32 }; /* of a slice of ranks that generate together: they end it at the same step */

extern char **environ;

static struct rank self;

struct rank *rank_self(void) {
    return &self;
}

static struct message_reader reader_of(const struct comm_call *call) {
    return (struct message_reader){.head = call->args, .arrays = call->arrays, .n = call->n_arrays, .who = "the controller"};
}

static void answer(struct ctl_result *out, struct message *m) {
    *out = (struct ctl_result){m->head, m->arrays, m->n};
    *m = (struct message){0};
}

/* ---- opening ---- */

static int load_config(const struct comm_call *call) {
    const char *schema, *cwd, *yaml;
    const json_t *list = json_object_get(call->args, "argv");
    const size_t n = json_array_size(list);
    struct buf own = {0};
    TRY(json_str(call->args, "schema", &schema, call->name));
    TRY(json_str(call->args, "cwd", &cwd, call->name));
    TRY(json_str(call->args, "yaml", &yaml, call->name));
    if (chdir(cwd) != 0) FAIL(ERR_INPUT, "the controller's directory %s is not there: ranks need the same file system", cwd);
    char **argv = xcalloc(n + 1, sizeof *argv);
    for (size_t i = 0; i < n; i++) argv[i] = (char *)(uintptr_t)json_string_value(json_array_get(list, i));
    int rc = conf_load(&self.conf, schema, (int)n, argv);
    free(argv);
    TRY(rc);
    TRY(conf_yaml(self.conf, &own));
    const bool same = strcmp(own.p, yaml) == 0;
    buf_free(&own);
    if (!same)
        FAIL(ERR_INPUT, "the configuration is another one than the controller's: a file or a variable of the environment differs");
    return 0;
}

int rank_open_config(struct comm *comm, const struct comm_call *call) {
    log_set_level(LOG_WARN); /* the controller logs what is to be logged once */
    self.comm = self.pool = comm;
    return load_config(call);
}

int rank_open_pool(int first, int n) { return n < comm_size(self.comm) ? comm_part(&self.pool, self.comm, first, n) : 0; }

static void report_progress(void *comm, const char *name, int64_t done, int64_t total) {
    comm_stage(comm, "%s", name);
    comm_progress(comm, done, total);
    if (self.passing && comm_stop_asked(comm)) phase_ask_stop(comm_stop_asked(comm));
}

/* Of the device's trace. */
static void phase(void *arg, const char *name) {
    (void)arg;
    if (self.worker) dev_trace_phase(&self.worker->dev, name);
}

int rank_open_run(const struct run_config *k) {
    self.run = (struct run){.k = *k, .bad = &self.bad, .from = {.step = -1}};
    TRY(phases_create(&self.run.stages, k->deadline_s));
    const int stops[] = {SIGINT, SIGTERM, SIGHUP}; /* the controller decides */
    for (size_t i = 0; i < sizeof stops / sizeof *stops; i++) signal(stops[i], SIG_IGN);
    phases_report(self.run.stages, report_progress, self.comm);
    phases_follow(self.run.stages, phase, NULL);
    return 0;
}

/* A launcher may show each rank its own GPU alone; else they are assigned by rank within a host, with trainer.ranks round-robin. */
int rank_gpu(const struct comm *comm, int *gpu) {
    const int there = dev_cuda_count(), local = comm_local_rank(comm);
    struct launch l;
    TRY(launch_read(&l, environ));
    if (l.by && strcmp(l.by, "verlc") == 0) {
        *gpu = there > 0 ? local % there : 0;
        return 0;
    }
    if (there > 1 && local >= there)
        FAIL(ERR_INPUT, "%s: it is one of %d ranks on this host, which sees %d GPUs; start as many ranks a host as it has GPUs",
             comm_who(comm, comm_rank(comm)), comm_local_size(comm), there);
    *gpu = there > 1 ? local : 0;
    return 0;
}

/* Ranks that have one device plan with equal parts of its memory. */
static int share_device(struct dev *dev) {
    const int size = comm_size(self.comm);
    char(*ids)[sizeof dev->id] = xcalloc((size_t)size, sizeof *ids);
    size_t *at = xcalloc((size_t)size + 1, sizeof *at), n = 0;
    for (int r = 0; r <= size; r++) at[r] = (size_t)r * sizeof *ids;
    memcpy(ids[comm_rank(self.comm)], dev->id, sizeof dev->id);
    const int rc = comm_all_gather(self.comm, ids, at);
    for (int r = 0; rc >= 0 && r < size; r++) n += comm_same_host(self.comm, r) && memcmp(ids[r], dev->id, sizeof dev->id) == 0;
    if (rc >= 0 && dev->id[0] && n > 1) {
        dev->mem_total /= n;
        dev->shared = true;
    }
    free(at);
    free(ids);
    return rc;
}

int rank_open_device(const struct comm_call *call, struct dev *dev, const char *device, int threads) {
    char name[32], why[256];
    const char *isa = NULL;
    int rc;
    const bool any = !device || strcmp(device, "auto") == 0 || strcmp(device, "cuda") == 0;
    TRY(json_str_opt(call->args, "isa", &isa, call->name));
    struct resume from = {.step = -1, .trainer = isa ? json_pack("{s:s}", "isa", isa) : NULL};
    int gpu = 0;
    const bool cuda = any && dev_cuda_present(why, sizeof why);
    if (cuda) TRYG(rank_gpu(self.comm, &gpu), out);
    snprintf(name, sizeof name, "cuda:%d", gpu);
    if (cuda) device = name;
    TRYG(resume_open_device(dev, &from, device, threads), out);
    rc = share_device(dev);
out:
    json_decref(from.trainer);
    return rc;
}

void rank_describe(json_t *result, const struct dev *dev) {
    json_object_set_new(result, "isa", json_string(dev->isa));
    json_object_set_new(result, "device", json_string(dev->describe));
    json_object_set_new(result, "own_memory", json_boolean(dev_has_own_memory(dev)));
}

/* ---- traces ---- */

int rank_trace_start(struct comm *comm, struct dev *dev) {
    const double own = clock_now();
    double zero = own;
    TRY(comm_broadcast(comm, 0, &zero, sizeof zero));
    dev_trace_start_rank(dev, comm_rank(comm), comm_rank(comm) == 0 || comm_same_host(comm, 0) ? zero : own);
    return 0;
}

int rank_trace_stop(const struct comm *comm, struct dev *dev, const char *path) {
    const size_t n = strlen(path), end = n > 5 && strcmp(path + n - 5, ".json") == 0 ? n - 5 : n;
    char *own = comm_rank(comm) == 0 ? xstrdup(path) : xasprintf("%.*s_rank_%d.json", (int)end, path, comm_rank(comm));
    const int rc = dev_trace_stop(dev, own, NULL);
    free(own);
    return rc;
}

static int trace(struct comm *comm, const struct comm_call *call, struct ctl_result *out) {
    const char *path = NULL;
    (void)out;
    TRY(json_str_opt(call->args, "path", &path, call->name));
    return path ? rank_trace_stop(comm, &self.worker->dev, path) : rank_trace_start(comm, &self.worker->dev);
}

/* ---- generation ---- */

static int keep_sample(void *arg, const struct engine_sample *s) {
    const uint64_t all[] = {self.drawn, (uint64_t)s->index, hash64(s->ids, (size_t)s->n * sizeof *s->ids),
                            hash64(s->logp, (size_t)s->n * sizeof *s->logp)};
    (void)arg;
    self.drawn = hash64(all, sizeof all);
    sample_list_add(&self.samples, s);
    return 0;
}

static int generate_begin(struct comm *comm, const struct comm_call *call, struct ctl_result *out) {
    (void)comm, (void)call, (void)out;
    self.drawn = 0;
    return self.worker->ops->generate_begin(self.worker, &(struct worker_generation){.done = keep_sample});
}

static int add(void *worker, struct engine_request *q) { return self.worker->ops->generate_add(worker, q); }

static int64_t steps_made(struct worker *w) { return w->ops->generate_stats(w).steps; }

static int generate(struct comm *comm, const struct comm_call *call, struct ctl_result *out) {
    struct message_reader in = reader_of(call);
    struct worker *const w = self.worker;
    const bool together = w->generator.split != NULL;
    const int64_t first = together ? steps_made(w) : 0;
    const double start = clock_now();
    bool interrupt;
    int more;
    TRY(json_bool(call->args, "interrupt", &interrupt, call->name));
    TRY(message_read_requests(&in, add, w));
    if (interrupt) TRY(w->ops->generate_interrupt(w));
    do TRY(more = w->ops->generate_step(w, false));
    while (more && (together ? self.samples.n == 0 && steps_made(w) < first + STEPS
                             : !comm_stop_asked(comm) && clock_now() < start + (self.samples.n > 0 ? GENERATE_S : LONGEST_S)));
    const struct engine_stats stats = w->ops->generate_stats(w);
    struct message m = message_new(false);
    message_add(&m, &stats, sizeof stats);
    if (together) json_object_set_new(m.head, "hash", json_sprintf("%016llx", (unsigned long long)self.drawn));
    if (together && !w->generator.reports) sample_list_clear(&self.samples);
    message_samples(&m, &self.samples);
    sample_list_clear(&self.samples);
    answer(out, &m);
    return 0;
}

static int generate_end(struct comm *comm, const struct comm_call *call, struct ctl_result *out) {
    (void)comm, (void)call, (void)out;
    self.worker->ops->generate_end(self.worker);
    sample_list_clear(&self.samples);
    return 0;
}

/* ---- passes and updates ---- */

static int forward(struct comm *comm, const struct comm_call *call, struct ctl_result *out) {
    struct message_reader in = reader_of(call);
    const struct progress at = run_progress(&self.run);
    struct packed_seq *seqs = NULL;
    int64_t n, targets = 0, rows = 0, k, role, words;
    const char *phase;
    bool logp, squares, value, may_stop, answers = true;
    (void)comm;
    TRY(json_bool(call->args, "may_stop", &may_stop, call->name));
    TRY(json_bool(call->args, "logp", &logp, call->name));
    TRY(json_bool(call->args, "sum_pi_sq", &squares, call->name));
    TRY(json_bool(call->args, "value", &value, call->name));
    TRY(json_i64(call->args, "list", &k, call->name));
    words = 0; /* of a pass of idle ranks there is none */
    TRY(json_i64_opt(call->args, "routes", &words, call->name));
    if (json_object_get(call->args, "answers")) TRY(json_bool(call->args, "answers", &answers, call->name));
    TRY(json_str(call->args, "phase", &phase, call->name));
    TRY(json_i64(call->args, "role", &role, call->name));
    if (role < 0 || role >= WORKER_ROLES || !self.worker->has[role])
        FAIL(ERR_INTERNAL, "there is no model of role %lld", (long long)role);
    TRY(message_read_seqs(&in, &seqs, &n));
    for (int64_t i = 0; i < n; i++) {
        targets += packed_seq_targets(&seqs[i]);
        rows += seqs[i].n;
    }
    const struct {
        bool wanted;
        size_t n;
    } arrays[] = {{logp, (size_t)targets * 4},        {squares, (size_t)targets * 4},     {value, (size_t)targets * 4},
                  {k > 0, (size_t)(targets * k) * 4}, {k > 0, (size_t)(targets * k) * 4}, {words > 0, (size_t)(rows * words) * 4}};
    void *to[6] = {0};
    for (int i = 0; i < 6; i++)
        if (arrays[i].wanted) to[i] = xmalloc(arrays[i].n + 1);
    const struct token_lists lists = {.top_id = to[3], .top_logp = to[4]};
    phase_begin(self.run.stages, call->name);
    phase_hold_stop(!may_stop);
    self.passing = true;
    int rc = self.worker->ops->forward(
        self.worker,
        &(struct worker_pass){
            .role = (int)role,
            .phase = phase,
            .at = &at,
            .seqs = seqs,
            .n = n,
            .k = k,
            .words = words,
            .out = {.logp = to[0], .sum_pi_sq = to[1], .value = to[2], .list = k > 0 ? &lists : NULL, .routes = to[5]}});
    self.passing = false;
    phase_end(self.run.stages);
    const bool stopped = rc == ERR_SIGNAL; /* no error of this rank: the controller has given the pass up */
    if (stopped) rc = 0;
    struct message m = message_new(false);
    for (int i = 0; i < 6; i++) {
        if (rc == 0 && !stopped && to[i]) message_add(&m, to[i], answers ? arrays[i].n : 0);
        free(to[i]);
    }
    if (rc == 0) answer(out, &m);
    message_free(&m);
    free(seqs);
    return rc;
}

static void update_begin(int64_t step, const char *stage, bool may_stop) {
    struct run *const r = &self.run;
    metrics_reset(&r->metrics);
    r->step = step;
    r->step_bad = false;
    r->optim_done = r->checkpoints.steps(r->checkpoints.ctx);
    phase_hold_stop(!may_stop);
    self.bad.met = false;
    buf_reset(&self.bad.dump);
    phase_begin(r->stages, stage);
}

/* Of one rank and moment. */
static bool is_time(const char *name) { return strncmp(name, "perf/", 5) == 0 || strcmp(name, "train/mfu") == 0; }

/* A fingerprint of what every rank must have computed alike: all but times. */
static json_t *fingerprint(const struct metrics *m, const struct batch *b, const char *const *columns) {
    char hex[33];
    struct buf all = {0};
    int rc = 0;
    for (int64_t i = 0; i < m->n && rc == 0; i++) {
        if (is_time(m->items[i].name)) continue;
        rc = buf_adds(&all, m->items[i].name);
        if (rc == 0) rc = buf_add(&all, &m->items[i].value, sizeof m->items[i].value);
    }
    struct message added = message_new(true);
    message_columns(&added, b, columns);
    for (int i = 0; i < added.n && rc == 0; i++) rc = buf_add(&all, added.arrays[i].p, added.arrays[i].n);
    message_free(&added);
    CHECK(rc >= 0);
    hash_hex(all.p, all.n, hex);
    buf_free(&all);
    return json_string(hex);
}

static json_int_t steps_done(void) { return (json_int_t)self.run.checkpoints.steps(self.run.checkpoints.ctx); }

static int update_end(struct ctl_result *out, int rc, const struct batch *b, const char *const *columns) {
    static const char *const none[] = {NULL};
    const bool stopped = rc == ERR_SIGNAL; /* all ranks have agreed on it */
    phase_end(self.run.stages);
    if (rc < 0 && !stopped) return err_pass(rc, __FILE__, __LINE__);
    struct message m = message_new(false);
    json_object_set_new(m.head, "steps", json_integer(steps_done()));
    json_object_set_new(m.head, "stopped", json_boolean(stopped));
    json_object_set_new(m.head, "hash", fingerprint(&self.run.metrics, b, columns));
    message_metrics(&m, &self.run.metrics);
    message_columns(&m, b, comm_rank(self.pool) == 0 ? columns : none);
    if (self.bad.met) {
        json_object_set_new(m.head, "bad", json_pack("{s:s}", "tensor", self.bad.what.bad_tensor));
        message_add(&m, self.bad.dump.p, self.bad.dump.n);
    }
    answer(out, &m);
    return 0;
}

static const struct worker_update *find_update(const char *name) {
    const struct worker_update *const *u = self.updates;
    while (u && *u && strcmp((*u)->name, name) != 0) u++;
    return u ? *u : NULL;
}

static int update(struct comm *comm, const struct comm_call *call, struct ctl_result *out) {
    struct message_reader in = reader_of(call);
    struct batch b = {0};
    const char *name;
    int64_t step;
    bool may_stop;
    int rc;
    (void)comm;
    TRY(json_str(call->args, "update", &name, call->name));
    TRY(json_i64(call->args, "step", &step, call->name));
    TRY(json_bool(call->args, "may_stop", &may_stop, call->name));
    const struct worker_update *const u = find_update(name);
    if (!u || !self.worker->has[u->role]) FAIL(ERR_INTERNAL, "there is no model for %s", name);
    rc = message_read_columns(&in, &b);
    if (rc == 0) {
        update_begin(step, name, may_stop);
        rc = update_end(out, u->run(self.worker, &self.run, &b), &b, u->writes);
    }
    batch_free(&b);
    return rc;
}

static int ready(struct comm *comm, const struct comm_call *call, struct ctl_result *out) {
    (void)comm, (void)call, (void)out;
    return self.worker->ops->ready(self.worker, &self.run);
}

static int memory(struct comm *comm, const struct comm_call *call, struct ctl_result *out) {
    const char *prefix;
    (void)comm;
    TRY(json_str(call->args, "prefix", &prefix, call->name));
    metrics_reset(&self.run.metrics);
    TRY(self.worker->ops->memory(self.worker, &self.run, prefix));
    struct message m = message_new(false);
    message_metrics(&m, &self.run.metrics);
    answer(out, &m);
    return 0;
}

/* ---- checkpoints ---- */

static int load(struct comm *comm, const struct comm_call *call, struct ctl_result *out) {
    const char *dir;
    (void)comm;
    TRY(json_str(call->args, "dir", &dir, call->name));
    TRY(self.run.checkpoints.load(self.run.checkpoints.ctx, dir));
    out->value = json_pack("{s:I}", "steps", steps_done());
    return 0;
}

/* Strings and JSON are the call's. */
static int save_args(const struct comm_call *call, struct ckpt_save_args *a) {
    *a = (struct ckpt_save_args){.trainer = json_object_get(call->args, "trainer")};
    TRY(json_str(call->args, "root", &a->root, call->name));
    TRY(json_i64(call->args, "step", &a->step, call->name));
    TRY(json_str(call->args, "config_yaml", &a->config_yaml, call->name));
    TRY(json_i64(call->args, "keep", &a->keep, call->name));
    TRY(json_bool(call->args, "parts_only", &a->parts_only, call->name));
    TRY(json_bool(call->args, "joins", &a->joins, call->name));
    TRY(json_bool(call->args, "hf_model", &a->hf_model, call->name));
    return json_i64(call->args, "best", &a->best, call->name);
}

static int save(struct comm *comm, const struct comm_call *call, struct ctl_result *out) {
    struct ckpt_save_args a;
    (void)comm, (void)out;
    TRY(save_args(call, &a));
    return self.run.checkpoints.save(self.run.checkpoints.ctx, &a);
}

static int open_copy(struct comm *comm, const struct comm_call *call, struct ctl_result *out) {
    (void)comm, (void)call, (void)out;
    return self.run.checkpoints.open_copy(self.run.checkpoints.ctx);
}

/* root and the configuration must last until the checkpoint is written. */
static int copy(struct comm *comm, const struct comm_call *call, struct ctl_result *out) {
    struct ckpt_save_args a;
    (void)comm, (void)out;
    TRY(save_args(call, &a));
    json_decref(self.saving);
    self.saving = json_incref((json_t *)(uintptr_t)call->args);
    return self.run.checkpoints.copy(self.run.checkpoints.ctx, &a);
}

static int begin_write(struct comm *comm, const struct comm_call *call, struct ctl_result *out) {
    (void)comm, (void)call, (void)out;
    if (comm_rank(self.pool) != 0) return 0;
    return self.run.checkpoints.write(self.run.checkpoints.ctx, NULL, NULL);
}

static int take(struct comm *comm, const struct comm_call *call, struct ctl_result *out) {
    int64_t step = -1;
    (void)comm, (void)call;
    if (comm_rank(self.pool) != 0) return 0;
    const int got = self.run.checkpoints.take(self.run.checkpoints.ctx, 0, &step);
    TRY(got);
    out->value = json_pack("{s:b, s:I}", "done", got > 0, "step", (json_int_t)step);
    return 0;
}

static int export_policy(struct comm *comm, const struct comm_call *call, struct ctl_result *out) {
    const char *dir;
    (void)comm, (void)out;
    TRY(json_str(call->args, "dir", &dir, call->name));
    return self.worker->ops->export_policy(self.worker, dir);
}

static const struct worker_process_service shared[] = {{"generate_begin", generate_begin},
                                                       {"generate", generate},
                                                       {"generate_end", generate_end},
                                                       {"forward", forward},
                                                       {"update", update},
                                                       {"trace", trace},
                                                       {"ready", ready},
                                                       {"memory", memory},
                                                       {"load", load},
                                                       {"save", save},
                                                       {"open_copy", open_copy},
                                                       {"copy", copy},
                                                       {"write", begin_write},
                                                       {"take", take},
                                                       {"export_policy", export_policy},
                                                       {NULL, NULL}};

/* All of rank_self. */
static void close_all(void) {
    if (self.run.checkpoints.close) self.run.checkpoints.close(self.run.checkpoints.ctx);
    if (self.close) self.close();
    if (self.pool != self.comm) comm_close(self.pool);
    phases_destroy(self.run.stages);
    metrics_free(&self.run.metrics);
    sample_list_clear(&self.samples);
    buf_free(&self.bad.dump);
    json_decref(self.saving);
    conf_free(self.conf);
}

/* Appends to all[], of which n are used, and which ends with a name NULL. */
static size_t add_services(struct worker_process_service *all, size_t most, size_t n, const struct worker_process_service *table) {
    for (; table->name; table++) {
        CHECK(n + 1 < most);
        all[n++] = *table;
    }
    return n;
}

int rank_serve(const struct launch *l, const char *dir, const char *controller,
               const struct worker_process_service *const *tables) {
    const struct workers_args a = {.dir = dir, .controller = controller, .start_s = RANK_START_S};
    struct worker_process_service all[MOST_SERVICES] = {0};
    size_t n = add_services(all, MOST_SERVICES, 0, shared);
    for (; *tables; tables++) n = add_services(all, MOST_SERVICES, n, *tables);
    const int rc = worker_process_serve(&a, l, all);
    close_all();
    return rc < 0 ? err_pass(rc, __FILE__, __LINE__) : 0;
}
