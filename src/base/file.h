/* file.h - whole files in, whole files out.
 * Invariant: file_write_atomic leaves either the old file or the new one, file_replace_dir either the old directory or
 * the new one. Two processes that write the same path never share a temporary name. */
#ifndef VERLC_BASE_FILE_H
#define VERLC_BASE_FILE_H

#include "base/buf.h"

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

/* Opens a file for reading, a descriptor. ERR_INPUT: it cannot be opened, or it is no regular file; a FIFO or a device could
 * keep its reader for ever. What the shell passes (/dev/stdin, /dev/fd/N of <(...)) may be a pipe. */
int file_open_read(const char *path);
int file_check(const char *path); /* ERR_INPUT as file_open_read, for a file that another program will read */
/* Appends the file to b. ERR_INPUT if it cannot be read or is over max_bytes (0: no limit). */
int file_read(struct buf *b, const char *path, size_t max_bytes);
/* tmp file in the same directory, fsync, rename, fsync directory. ERR_IO. */
int file_write_atomic(const char *path, const void *p, size_t n);
/* The same with these permissions (of 0777; the umask takes its own away), which file_write_atomic has as 0644. */
int file_write_atomic_mode(const char *path, const void *p, size_t n, unsigned mode);
/* A new file in a directory that nobody reads yet (one of file_temp_path): its bytes are on disk at the return, its name when the
 * directory is fsynced, which whoever publishes the directory does once for all files. ERR_IO. */
int file_write_new(const char *path, const void *p, size_t n);
int file_mkdirs(const char *path);      /* mkdir -p; ERR_IO */
int file_fsync_dir(const char *dir);    /* ERR_IO */
int file_remove_tree(const char *path); /* rm -rf; a missing path is fine; ERR_IO */

/* PATH.PID-RANDOM.tmp: a name next to path that no other process has; a long last part is cut. Caller frees. */
char *file_temp_path(const char *path);
bool file_is_temp_name(const char *name); /* whether the last part of a path is one of these */
/* Removes the files and directories of such names in dir (not below). For whoever knows that nobody else writes there. ERR_IO. */
int file_remove_temps(const char *dir);
/* The directory tmp takes dir's place in one operation (renameat2, RENAME_EXCHANGE), whether there is a dir or not; what was
 * there is removed. tmp is to be fsynced. On a file system without the exchange (NFS) the old one is DIR.old.tmp for a
 * moment, from where file_recover_dir brings it back. ERR_IO: tmp is the caller's to remove. */
int file_replace_dir(const char *tmp, const char *dir);
int file_recover_dir(const char *dir); /* DIR.old.tmp, if any, becomes DIR where there is no DIR; ERR_IO */

bool file_exists(const char *path);
bool file_is_dir(const char *path);
int64_t file_size(const char *path);                /* -1 if missing */
char *file_join(const char *dir, const char *name); /* caller frees */
char *file_expand(const char *path);                /* ~ and ~user as Python's os.path.expanduser has them; caller frees */
char *file_program_dir(void);                       /* where the running program's file lies; caller frees; NULL with errno */

/* A file of a model directory: *path = dir/name, NULL where there is none; caller frees. ERR_INPUT: it is not a regular
 * file, or a link that leads out of dir. dir itself may be a link. In a snapshot of the hub cache
 * (models--A--B/snapshots/REV) links to models--A--B/blobs are as the hub makes them. */
int file_in_dir(char **path, const char *dir, const char *name);

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

#ifdef __cplusplus
}
#endif
#endif
