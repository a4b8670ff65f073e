/* number.c - see number.h.
 * Invariant: what number_text writes, strtod reads back as the same double. A text of 15 digits (of a float: 6) is read back
 * unchanged, so what fits into it has no shorter one but for trailing zeros; below the normal numbers that does not hold. */
#include "base/encoding/number.h"

#include <float.h>
#include <math.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

/* By their bits: threads take denormal numbers for 0. */
static bool reads(const char *text, double v) {
    const double back = strtod(text, NULL);
    return memcmp(&back, &v, sizeof v) == 0;
}
static bool reads_f32(const char *text, float v) {
    const float back = strtof(text, NULL);
    return memcmp(&back, &v, sizeof v) == 0;
}

void number_text(double v, char out[NUMBER_TEXT]) {
    char e[NUMBER_TEXT];
    if (!isfinite(v)) {
        strcpy(out, isnan(v) ? "nan" : v > 0 ? "inf" : "-inf");
        return;
    }
    int digits = fabs(v) < DBL_MIN ? 1 : DBL_DIG;
    while (snprintf(e, sizeof e, "%.*e", digits - 1, v), digits < DBL_DECIMAL_DIG && !reads(e, v)) digits++;
    char *const mark = strchr(e, 'e'), *end = mark;
    const int x = atoi(mark + 1);
    while (digits > 1 && end[-1] == '0') end--, digits--;
    if (end[-1] == '.') end--;
    const int decimals = digits - 1 - x;
    if (x >= -4 && x < 16) snprintf(out, NUMBER_TEXT, "%.*f", decimals > 1 ? decimals : 1, v);
    else snprintf(out, NUMBER_TEXT, "%.*s%s", (int)(end - e), e, mark);
}

double number_of_f32(float v) {
    char e[NUMBER_TEXT];
    if (!isfinite(v)) return (double)v;
    int digits = fabsf(v) < FLT_MIN ? 1 : FLT_DIG;
    while (snprintf(e, sizeof e, "%.*e", digits - 1, (double)v), digits < FLT_DECIMAL_DIG && !reads_f32(e, v)) digits++;
    return strtod(e, NULL);
}
