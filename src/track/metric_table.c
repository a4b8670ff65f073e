/* metric_table.c - see metric_table.h.  Invariant: of two patterns that match a name the first applies. */
#include "track/metric_table.h"

#include <fnmatch.h>
#include <string.h>

static const struct metric_row rows[] = {
#define SECTION(title) {.section = title},
#define METRIC(pattern, text, reading) {NULL, pattern, text, reading},
#include "track/metric_table.def"
};
enum { N_ROWS = sizeof rows / sizeof rows[0] };

const struct metric_row *metric_rows(size_t *n) {
    *n = N_ROWS;
    return rows;
}

const struct metric_row *metric_row_of(const char *name) {
    for (int k = 0; k < N_ROWS; k++)
        if (rows[k].pattern && (strcmp(rows[k].pattern, name) == 0 || fnmatch(rows[k].pattern, name, FNM_NOESCAPE) == 0))
            return &rows[k];
    return NULL;
}
