/* fuzz.h - what the fuzz targets share.  A target is one libFuzzer entry point; with
 * clang it is linked to libFuzzer, else to fuzz_main.c.
 * Invariant: whatever the input, a target returns, and every refusal has a message of one line. */
#ifndef VERLC_FUZZ_H
#define VERLC_FUZZ_H

#include "base/err.h"
#include "base/file.h"
#include "base/log.h"

#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t n);

/* rc is no error, or its message is one line that is not empty. */
static inline void fuzz_check_rc(int rc) { CHECK(rc >= 0 || (err_msg()[0] != '\0' && strchr(err_msg(), '\n') == NULL)); }

/* Warnings about hostile input are expected. */
static inline void fuzz_quiet(void) { log_set_level(LOG_OFF); }

static inline const char *fuzz__dir(bool remove) {
    static char dir[64];
    if (remove && dir[0]) (void)!file_remove_tree(dir);
    return dir[0] ? dir : strcpy(dir, "/tmp/verlc_fuzz_XXXXXX");
}
static inline void fuzz__remove_dir(void) { fuzz__dir(true); }

/* A directory of this process, removed at its end. */
static inline const char *fuzz_dir(void) {
    static const char *dir;
    if (dir) return dir;
    dir = mkdtemp((char *)(uintptr_t)fuzz__dir(false));
    CHECK(dir != NULL);
    atexit(fuzz__remove_dir);
    return dir;
}

/* Writes the bytes as DIR/name; caller frees the path. */
static inline char *fuzz_file(const char *name, const uint8_t *data, size_t n) {
    char *path = file_join(fuzz_dir(), name);
    unlink(path); /* a file system may flush one that is written over */
    FILE *f = fopen(path, "wb");
    CHECK(f != NULL && fwrite(data, 1, n, f) == n && fclose(f) == 0);
    return path;
}

#endif
