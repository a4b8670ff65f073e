/* host_decode.h - decode_next for the backends whose memory is the host's. */
#ifndef VERLC_DEVICE_HOST_DECODE_H
#define VERLC_DEVICE_HOST_DECODE_H

#include "device/device.h"

int host_decode_next(struct dev *d, const struct decode_args *a);

#endif
