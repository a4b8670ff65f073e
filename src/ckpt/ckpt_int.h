/* ckpt_int.h - private to ckpt: directories that scripts written for verl look for inside a part's. */
#ifndef VERLC_CKPT_INT_H
#define VERLC_CKPT_INT_H

#include "ckpt/ckpt.h"

/* Makes dir/PART/huggingface/: copies of the configuration and the tokenizer (of an adapter: of its base model); with hf_model
 * the weights too, by hard links where the file system has them. Of an adapter also dir/PART/lora_adapter/, by hard links. What
 * dir/PART has is on disk. ERR_IO. */
int ckpt__add_verl_names(const char *dir, const struct ckpt_part *part, bool hf_model);
/* Whether a path below a checkpoint is one of these: the manifest does not list it, and whoever writes there harms no resume. */
bool ckpt__is_verl_name(const char *rel);

#endif
