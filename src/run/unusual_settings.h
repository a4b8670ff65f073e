/* unusual_settings.h - numbers of a configuration that are hardly intended (unusual_settings.def): one line each at the start of a
 * run. */
#ifndef VERLC_RUN_UNUSUAL_SETTINGS_H
#define VERLC_RUN_UNUSUAL_SETTINGS_H

#include "base/buf.h"
#include "conf/conf.h"

struct unusual_setting { /* a row of unusual_settings.def, which says what the members are */
    const char *key;
    double least, most, off;
    const char *text;
};
const struct unusual_setting *unusual_setting_rows(size_t *n); /* all rows; *n: how many */
/* "0 to 1", "at least 0.001", appended. */
void unusual_setting_range(const struct unusual_setting *u, struct buf *out);
/* Calls say with a line for each number that the user has set and that is outside its row. */
void unusual_settings_find(const struct conf *c, void (*say)(void *arg, const char *line), void *arg);

#endif
