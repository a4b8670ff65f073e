/* output.c - standard output of the tools, a line at a time and checked.
 *
 * Invariant: a tool never goes on after a line was lost, and never exits 0 then: a full disk, a file size limit
 * and a reader that has exited (`| head -1`) end it with ERR_IO. */
#include "cmd/cmd.h"

#include "base/err.h"

#include <errno.h>
#include <stdio.h>
#include <string.h>

static bool reader_closed;

static int written(bool ok) {
    if (ok && !ferror(stdout)) return 0;
    reader_closed = errno == EPIPE;
    FAIL(ERR_IO, "cannot write the results to standard output: %s", strerror(errno));
}

int cmd_print_line(const char *line, size_t n) { return written(fwrite(line, 1, n, stdout) == n && fputc('\n', stdout) == '\n'); }

int cmd_flush(void) { return written(fflush(stdout) == 0); }

bool cmd_reader_closed(void) { return reader_closed; }
