/* resume.h - where a run resumes from, and on which device: shared by ppo and
 * sft. */
#ifndef VERLC_RUN_RESUME_H
#define VERLC_RUN_RESUME_H

#include "device/device.h"

#include <jansson.h>
#include <stdint.h>

struct resume {
    char *dir;       /* checkpoint directory, NULL: from scratch */
    int64_t step;    /* -1: from scratch */
    json_t *trainer; /* its trainer.json */
    json_t *models;  /* of this run's model directories: {key: fingerprint}; NULL until resume_tell */
    json_t *changes; /* lines of what has changed since (resume_changes.h); NULL: none */
};
struct resume_args {
    const char *mode; /* trainer.resume_mode: auto, disable, resume_path */
    const char *path; /* trainer.resume_from_path, may be NULL */
    const char *root; /* trainer.default_local_dir */
};
/* ERR_INVAL: mode or path. ERR_UNSUPPORTED: the checkpoint is another program's; says the way out. */
int resume_find(struct resume *r, const struct resume_args *a);
/* ERR_INPUT: root has another program's checkpoint where one of the steps after r up to total_steps would be saved. One of
 * another step is noted. */
int resume_check_room(const struct resume *r, const char *root, int64_t total_steps);
void resume_free(struct resume *r);
/* Warns where a number that decides bits differs between the checkpoint's trainer.json and this run's key; without one it
 * was 1. where: for messages. */
int resume_compare(const json_t *trainer, const char *field, const char *key, int64_t now, const char *where);

/* Opens the device of a run: trainer.device as dev_open_named has it, NULL: auto; one line says which.
 * A GPU that is named but missing becomes the CPU, with a note. A resumed run on the CPU takes the
 * instruction set it began with, since bits are equal only within one; a run that goes on with
 * another, or on another device, is warned. */
int resume_open_device(struct dev *d, const struct resume *r, const char *device, int threads);

#endif
