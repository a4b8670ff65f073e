/* ckpt_int.h - private to ckpt: names that scripts written for verl look for inside a part's directory. */
#ifndef VERLC_CKPT_INT_H
#define VERLC_CKPT_INT_H

#include "ckpt/ckpt.h"

/* Makes dir/PART/huggingface/ of what is in dir/PART, which is on disk: its model, configuration and tokenizer by hard links, which
 * take no room. Of an adapter: the base model's configuration and the tokenizer, and lora_adapter/ beside it. Where the file system
 * has no hard links small files are copied and weights left out. ERR_IO. */
int ckpt__add_verl_names(const char *dir, const struct ckpt_part *part);
/* The file of a part that rel, below its huggingface/ or lora_adapter/, is another name of; caller frees. NULL: it is none, or a
 * copy. */
char *ckpt__linked_file(const char *dir, const char *rel);

#endif
