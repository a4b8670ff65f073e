/* explain.h - the parts of verlc explain: explain.c finds what a name is, explain_key.c knows keys. Both print to stdout. */
#ifndef VERLC_CMD_EXPLAIN_H
#define VERLC_CMD_EXPLAIN_H

#include <stdint.h>

/* Text from column `at` on, wrapped to lines that begin with `indent` spaces; ends its line. */
void explain_wrapped(const char *text, int at, int indent);
/* 1: it is a key of a program, and is explained. 0: it is none. */
int explain_key(const char *key);
/* Keys whose name ends so, begins so, or has the word in its last part, the first of these that there are, else the key that
 * takes the word as its value; a single one is explained, several are listed. How many; 0: none. */
int64_t explain_keys_like(const char *word);

#endif
