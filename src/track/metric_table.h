/* metric_table.h - every metric that a run can report: what it is, how to read it.  The rows are metric_table.def. */
#ifndef VERLC_TRACK_METRIC_TABLE_H
#define VERLC_TRACK_METRIC_TABLE_H

#include <stddef.h>

struct metric_row {
    const char *section; /* a heading: then the other members are NULL */
    const char *pattern; /* `*` stands for any text */
    const char *text;    /* what it is */
    const char *reading; /* how to read it; "" where that says it all */
};
/* The row that applies to a metric's name, or whose pattern it is; NULL: none. */
const struct metric_row *metric_row_of(const char *name);
/* All rows, in the order of the table. */
const struct metric_row *metric_rows(size_t *n);

#endif
