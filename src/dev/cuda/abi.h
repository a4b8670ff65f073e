/* abi.h - what the program and libverlc_cuda.so agree on, and how they notice
 * that they do not: both are built from the same dev.h, and each compares what its
 * compiler made of it.  Raise CUDA_ABI_VERSION when a meaning changes and no size does. */
#ifndef VERLC_DEV_CUDA_ABI_H
#define VERLC_DEV_CUDA_ABI_H

#include "dev/dev.h"
#include "dev/peers.h"
#include "dev/transport.h"

#ifdef __cplusplus
extern "C" {
#endif

enum { CUDA_ABI_VERSION = 2 };

struct cuda_abi {
    unsigned version, dev, dev_ops, tensor, qkv, attn, lmhead, sample, decode, adamw, peers, nccl, bucket; /* sizes */
};
#define CUDA_ABI_HERE                                                                                                           \
    {                                                                                                                           \
        CUDA_ABI_VERSION, (unsigned)sizeof(struct dev), (unsigned)sizeof(struct dev_ops), (unsigned)sizeof(struct tensor),      \
            (unsigned)sizeof(struct qkv_args), (unsigned)sizeof(struct attn_args), (unsigned)sizeof(struct lmhead_args),        \
            (unsigned)sizeof(struct sample_args) + (unsigned)sizeof(struct sample_param),                                       \
            (unsigned)sizeof(struct decode_args) + (unsigned)sizeof(struct decode_row), (unsigned)sizeof(struct adamw_args),    \
            (unsigned)sizeof(struct dev_peer_ops) + (unsigned)sizeof(struct dev_peer_memory),                                   \
            (unsigned)sizeof(struct dev_nccl_ops) + (unsigned)sizeof(struct dev_nccl_args), (unsigned)sizeof(struct dev_bucket) \
    }

/* The three symbols that the program looks up in the library. */
extern const struct cuda_abi verlc_cuda_abi;
/* How many GPUs the driver shows, at least 1; ERR_DEVICE: none, or the driver is too old. */
int verlc_cuda_count(int *count);
/* pre: index in [0, count). */
int verlc_cuda_open(struct dev *d, int index);

#ifdef __cplusplus
}
#endif
#endif
