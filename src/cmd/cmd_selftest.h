/* cmd_selftest.h - what the files of `verlc selftest` share. */
#ifndef VERLC_CMD_SELFTEST_H
#define VERLC_CMD_SELFTEST_H

#include "dev/dev.h"

struct selftest {
    struct dev *dev, *ref;
    int lines, failed, missing; /* comparisons made, that found a difference, ops that the device lacks */
};
/* One line of the table. */
void selftest_line(struct selftest *t, const char *what, bool ok, const char *detail);
/* Every op against ref, and its rows alone against rows in company. An error of the device ends it. */
int selftest_ops(struct selftest *t);

#endif
