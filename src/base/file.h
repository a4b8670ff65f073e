/* file.h - whole files in, whole files out.
 * Invariant: file_write_atomic leaves either the old file or the new one. */
#ifndef VERLC_BASE_FILE_H
#define VERLC_BASE_FILE_H

#include "base/buf.h"

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

/* Appends the file to b. ERR_INPUT if it cannot be read or is over max_bytes (0: no limit). */
int file_read(struct buf *b, const char *path, size_t max_bytes);
/* tmp file in the same directory, fsync, rename, fsync directory. ERR_IO. */
int file_write_atomic(const char *path, const void *p, size_t n);
int file_mkdirs(const char *path);      /* mkdir -p; ERR_IO */
int file_fsync_dir(const char *dir);    /* ERR_IO */
int file_remove_tree(const char *path); /* rm -rf; a missing path is fine; ERR_IO */
bool file_exists(const char *path);
bool file_is_dir(const char *path);
int64_t file_size(const char *path);                /* -1 if missing */
char *file_join(const char *dir, const char *name); /* caller frees */
char *file_expand(const char *path);                /* leading ~ -> $HOME; caller frees */

/* Read-only mapping. p == NULL for an empty file. Unmap with file_unmap. */
struct file_map {
    const uint8_t *p;
    size_t n;
};
int file_map_open(struct file_map *m, const char *path); /* ERR_INPUT */
void file_unmap(struct file_map *m);

/* Calls fn for each line (without its newline); fn gets the 1-based number.
 * A line over 64 MiB is ERR_FORMAT. path "-" is standard input. */
int file_each_line(const char *path, int (*fn)(void *arg, char *line, size_t n, int64_t no), void *arg);

#endif
