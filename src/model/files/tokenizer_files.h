/* tokenizer_files.h - the files of a tokenizer, held in memory: what they were when a run began is what each of its
 * checkpoints gets, whatever becomes of their directory. */
#ifndef VERLC_MODEL_TOKENIZER_FILES_H
#define VERLC_MODEL_TOKENIZER_FILES_H

struct tokenizer_files;
/* Reads those that are in dir; *out is NULL where there are none. ERR_INPUT: one is a link out of dir (file_in_dir). */
int tokenizer_files_read(struct tokenizer_files **out, const char *dir);
/* Writes them to dir, with the permissions that they had, less the umask's. ERR_IO. */
int tokenizer_files_write(const struct tokenizer_files *f, const char *dir);
void tokenizer_files_free(struct tokenizer_files *f); /* NULL ok */

#endif
