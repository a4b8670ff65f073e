/* host_decode.h - decode_next for the backends whose memory is the host's. */
#ifndef VERLC_DEV_HOST_DECODE_H
#define VERLC_DEV_HOST_DECODE_H

#include "dev/dev.h"

int host_decode_next(struct dev *d, const struct decode_args *a);

#endif
