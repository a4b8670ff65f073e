/* file_writer.h - large files, read from where their bytes are, hashed and written by threads.
 *
 * A file is a function of a range of its bytes. Memory that has them is written from there: no byte is copied where it lies as in
 * the file, to a block. Writes go past the page cache where the file system lets them (O_DIRECT), so that fsync finds little left
 * to do; writes and fsync of a file overlap the reads of the next.
 * Invariant: once file_writer_finish returns 0 all bytes of all files are on disk, and each hash is that of its file's bytes. */
#ifndef VERLC_BASE_FILE_WRITER_H
#define VERLC_BASE_FILE_WRITER_H

#include <stdbool.h>
#include <stddef.h>

/* The alignment that O_DIRECT requires of addresses and offsets. */
enum { FILE_WRITER_BLOCK = 4096 };

struct file_source {
    /* n bytes from byte `at` on: filled into dst, or *p is set to memory that has them until file_writer_finish or close. */
    int (*read)(void *arg, size_t at, size_t n, char *dst, const char **p);
    void *arg;
    bool any_thread; /* threads may read concurrently, in any order; else the caller's reads, in order */
};

struct file_writer;
void file_writer_open(struct file_writer **out);
void file_writer_close(struct file_writer *w); /* NULL ok; without finish: what is not written yet is dropped */
/* A new file of so many bytes; one that is there is overwritten. On return all of it is read. ERR_IO, here and below: of any of
 * the files, with its name; or what a read says. */
int file_writer_add(struct file_writer *w, const char *path, size_t bytes, const struct file_source *s);
int file_writer_finish(struct file_writer *w); /* waits for all files */
/* Of a file that was added, by its path: XXH3-128 in hex; NULL: no such file. Borrowed. */
const char *file_writer_hash(const struct file_writer *w, const char *path);

#endif
