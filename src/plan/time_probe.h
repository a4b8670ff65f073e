/* time_probe.h - the time of a run before it starts: a few real steps, a validation pass and a checkpoint are measured (the
 * probe); the time of the whole run, and what a change of a key costs, follow from them.
 *
 * Measuring knows the run alone; what a step is comes as struct probe_calls. The arithmetic is pure: no clock, no device.
 * Invariant: the first step (page faults, autotuning, CUDA graphs, cold caches) is in no mean. */
#ifndef VERLC_PLAN_TIME_PROBE_H
#define VERLC_PLAN_TIME_PROBE_H

#include "run/run.h"
#include "train/activation_recompute.h"
#include "train/micro_batch.h"

#include "base/buf.h"
#include "base/log.h"

enum { PROBE_STEPS = 3, PROBE_MAX_PHASES = 24 };

/* Times are seconds. */
struct time_probe {
    char device[192];
    json_t *memory; /* the memory plan, as run.db has it; NULL: none; owned */
    /* measured; the last phase is what belongs to none */
    struct probe_phase {
        char name[48];
        double step[PROBE_STEPS], full; /* full: of the step at full length */
    } phase[PROBE_MAX_PHASES];
    int n_phases, n_steps;
    double step[PROBE_STEPS];
    double start;                /* from opening to the first step */
    enum log_level level;        /* before the opening */
    double full;                 /* a step whose responses all have the full length; < 0: not measured */
    double validation;           /* a pass over `validated` rows; < 0: not measured */
    double checkpoint;           /* until one is on disk; < 0: not measured */
    double checkpoint_waits;     /* the part that the run waits for, where writing overlaps with the next steps */
    int64_t validated, val_rows; /* samples of the pass, and of all validation data */
    int64_t checkpoint_bytes;
    /* of the samples, means over the steps but the first */
    double tokens, prompt, length, longest, clipped; /* tokens of a step; of a prompt; of a response; share at the limit */
    double half;                                     /* mean length of responses that end at half the limit; 0: no responses */
    /* of the run, as its keys say */
    int64_t total_steps, done_steps; /* done: of the checkpoint that it goes on from */
    int64_t save_freq, test_freq, keep_ckpts;
    int64_t policy_from; /* first step that updates the policy; steps before it train the critic alone */
    int64_t limit, n;    /* data.max_response_length, rollout.n; 0: no responses */
    bool validates, val_first, early_stopping, own_memory; /* own_memory: the device has memory of its own */
};

void time_probe_free(struct time_probe *p); /* a zeroed one is fine */

/* What a trainer's step is. Calls get ctx. */
struct probe_calls {
    void *ctx;
    bool (*begin)(void *ctx);
    int (*step)(void *ctx, struct time_probe *p);     /* to its end; fills tokens ... half of that step */
    void (*full_length)(void *ctx);                   /* responses have the full length from now on; NULL: there are none */
    int (*validate)(void *ctx, struct time_probe *p); /* a pass; fills validated, val_rows */
};
/* Around the opening of the run: its time, and none of its lines, for the memory plan has been printed. */
struct time_probe probe_opening(void);
void probe_opened(struct time_probe *p);
/* Before the first step: reads from r what the run would do, and switches off what a probe does not: checkpoints, validations,
 * early stopping. total_steps, done_steps, frequencies and validates of p are filled. device: what the run is on. */
void probe_prepare(struct time_probe *p, struct run *r, const char *device, bool own_memory);
/* PROBE_STEPS steps with a line each to log_info, then with `whole` a step at full length, a validation pass and a
 * checkpoint. */
int probe_measure(struct time_probe *p, struct run *r, const struct probe_calls *calls, bool whole);
/* Changes of an update's keys whose time a probe cannot know but by trying, as overrides, one a line, appended. */
struct probe_keys {
    const char *samples, *tokens; /* keys of the cut */
    struct micro_batch_limits cut;
    int64_t most; /* samples of an optimizer step */
    enum train_recompute recompute;
    const char *offload; /* the key of the optimizer's; NULL: the device has no memory of its own */
    bool offloads;
};
void probe_choices(const struct probe_keys *k, struct buf *out);

/* ---- what follows ---- */
struct time_plan {
    double step;                                           /* mean of the steps but the first */
    double least, most;                                    /* of them */
    int64_t steps, critic_steps, validations, checkpoints; /* that are left; critic_steps: of steps, without the policy's update */
    double train, validate, save, total;                   /* s: of all steps, passes, checkpoints; with the start */
    double full;                                           /* total with every response at full length; < 0: not known */
};
/* A change of a key that was measured by a probe of its own. error: why it could not be; NULL: it could. */
struct probe_choice {
    const char *change;
    const struct time_probe *probe;
    const char *error;
};
/* The table. */
void time_plan_print(const struct time_probe *p, const struct probe_choice *c, int n, struct buf *out);
/* The same as an object; the caller owns it. */
json_t *time_plan_json(const struct time_probe *p, const struct probe_choice *c, int n);

#endif
