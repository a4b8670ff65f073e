/* file_writer.h - large files, written by threads while their bytes are made, and hashed on the way.
 *
 * One thread gives the bytes in order. Others write them to their places, past the page cache where the file system lets them
 * (O_DIRECT), so that fsync finds little left to do; the fsync of a file runs beside the bytes of the next.
 * Invariant: once file_writer_finish returns 0 all bytes of all files are on disk, and each hash is that of its file's bytes. */
#ifndef VERLC_BASE_FILE_WRITER_H
#define VERLC_BASE_FILE_WRITER_H

#include <stddef.h>

struct file_writer;
void file_writer_open(struct file_writer **out);
void file_writer_close(struct file_writer *w); /* NULL ok; without finish: what is not written yet is dropped */
/* A new file of so many bytes; one that is there is overwritten. ERR_IO, here and below: of any of the files, with its name. */
int file_writer_begin(struct file_writer *w, const char *path, size_t bytes);
/* Where its next bytes go: *n > 0 of them may be filled at *p, before file_writer_add takes the first n. */
int file_writer_room(struct file_writer *w, void **p, size_t *n);
void file_writer_add(struct file_writer *w, size_t n);
int file_writer_put(struct file_writer *w, const void *p, size_t n); /* room, a copy, add */
int file_writer_end(struct file_writer *w);                          /* all its bytes are given */
int file_writer_finish(struct file_writer *w);                       /* waits for all files */
/* Of a file that is ended, by the path it was begun with: XXH3-128 in hex; NULL: no such file. Borrowed. */
const char *file_writer_hash(const struct file_writer *w, const char *path);

#endif
