/* eval.h - verl's main_eval. */
#ifndef VERLC_GENERATE_EVAL_H
#define VERLC_GENERATE_EVAL_H

#include "base/buf.h"
#include "conf/conf.h"

/* The scores of the responses in data.path, one JSON object, appended to out. */
int eval_run(const struct conf *c, struct buf *out);

#endif
