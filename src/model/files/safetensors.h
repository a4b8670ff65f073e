/* safetensors.h - reads and writes safetensors files. */
#ifndef VERLC_MODEL_SAFETENSORS_H
#define VERLC_MODEL_SAFETENSORS_H

#include "base/file_writer.h"
#include "device/device.h"

#include <jansson.h>
#include <stdbool.h>
#include <stdint.h>

struct safetensors_tensor {
    char *name;
    enum dtype dt;
    int nd;
    int64_t dim[8];
    const uint8_t *data; /* into the mapping */
    size_t bytes;
};
struct safetensors_file;                                               /* one mapped file */
int safetensors_open(struct safetensors_file **out, const char *path); /* validates header and every range; ERR_INPUT, ERR_FORMAT */
void safetensors_close(struct safetensors_file *f);
int64_t safetensors_count(const struct safetensors_file *f);
const struct safetensors_tensor *safetensors_at(const struct safetensors_file *f, int64_t i);
const struct safetensors_tensor *safetensors_find(const struct safetensors_file *f, const char *name); /* NULL if absent */
const char *safetensors_metadata(const struct safetensors_file *f, const char *key); /* a string of __metadata__, or NULL */
/* Writer: header from the declared tensors, then data in that order. */
struct safetensors_write_tensor {
    const char *name;
    enum dtype dt;
    int nd;
    int64_t dim[8];
    /* Whole elements, n bytes of this tensor from its byte off on, into dst. */
    int (*read)(void *arg, size_t off, void *dst, size_t n);
    const void *data; /* instead of read: all of them, in memory that stays as it is until the file is on disk */
    int (*check)(void *arg, size_t off, const void *p, size_t n); /* of what was read, or is in data; NULL: none */
    void *arg;
    bool any_thread; /* read may be called by several threads at once, in any order. check is, of data. */
};
/* Bytes in front of the tensors' data. */
size_t safetensors_header_bytes(const struct safetensors_write_tensor *t, int64_t n, const json_t *metadata);
/* Writes path (not atomic itself: ckpt publishes whole directories). metadata may be NULL. w: on disk once file_writer_finish
 * says so; NULL: on return. ERR_IO, or what a read says. */
int safetensors_write(struct file_writer *w, const char *path, const struct safetensors_write_tensor *t, int64_t n,
                      const json_t *metadata);

#endif
