/* gpu_size.c - what --gpu says: a card's name, a number of GB, or a size with its unit.
 *
 * The table has the memory that a CUDA program finds on a card, rounded down to 0.1 GiB: less than the name of the card says, by
 * what the driver and ECC keep. Opens no device.
 * Invariant: a name that two cards have is refused, never guessed. */
#include "cmd/cmd.h"

#include "base/buf.h"
#include "base/err.h"
#include "conf/conf.h"

#include <ctype.h>
#include <stdbool.h>
#include <stdlib.h>
#include <string.h>

static const struct {
    const char *name;   /* as it is listed; NULL: another spelling of the one before */
    const char *letter; /* its small letters and digits, as reduce() makes them */
    double gib;
} cards[] = {
    {"B200", "b200", 178.3},
    {"H200", "h200", 139.7},
    {NULL, "h200141", 139.7},
    {"H100", "h100", 79.1},
    {NULL, "h10080", 79.1},
    {"H100-NVL", "h100nvl", 93.0},
    {NULL, "h10094", 93.0},
    {"H800", "h800", 79.1},
    {NULL, "h80080", 79.1},
    {"H20", "h20", 95.0},
    {NULL, "h2096", 95.0},
    {"GH200", "gh200", 94.5},
    {"A100-80GB", "a10080", 79.1},
    {"A100-40GB", "a10040", 39.3},
    {"A800", "a800", 79.1},
    {NULL, "a80080", 79.1},
    {"A40", "a40", 44.3},
    {"A30", "a30", 23.4},
    {"A10", "a10", 22.0},
    {NULL, "a10g", 22.0},
    {"L40S", "l40s", 44.3},
    {"L40", "l40", 44.3},
    {"L4", "l4", 22.0},
    {"T4", "t4", 14.5},
    {"V100-32GB", "v10032", 31.7},
    {"V100-16GB", "v10016", 15.7},
    {"A6000", "a6000", 47.4},
    {"6000-Ada", "6000ada", 47.4},
    {"PRO-6000", "pro6000", 94.9},
    {NULL, "pro6000blackwell", 94.9},
    {"5090", "5090", 31.3},
    {"5080", "5080", 15.4},
    {"4090", "4090", 23.5},
    {"4080", "4080", 15.5},
    {"3090", "3090", 23.5},
    {"3090-Ti", "3090ti", 23.5},
    {"3080-12GB", "308012", 11.6},
    {"3080-10GB", "308010", 9.6},
};
enum { N_CARDS = sizeof cards / sizeof *cards };
static const double MOST_GB = 1024; /* a bare number above it is a mistake: bytes, or a card that is not listed */

static bool says_nothing(const char *word, size_t n) {
    static const char *const words[] = {"nvidia", "geforce", "tesla", "quadro", "rtx",  "pcie",  "sxm", "sxm2",
                                        "sxm4",   "sxm5",    "hbm2",  "hbm2e",  "hbm3", "hbm3e", "gb",  "generation"};
    for (size_t i = 0; i < sizeof words / sizeof *words; i++)
        if (strlen(words[i]) == n && memcmp(words[i], word, n) == 0) return true;
    return false;
}

/* The letters and digits of a name, without the words that say nothing of its memory; caller frees. */
static char *reduce(const char *name) {
    struct buf b = {0};
    for (const char *p = name; *p;) {
        const size_t from = b.n;
        for (; isalnum((unsigned char)*p); p++) buf_addc(&b, (char)tolower((unsigned char)*p));
        if (b.n > from && says_nothing(b.p + from, b.n - from)) b.n = from;
        while (*p && !isalnum((unsigned char)*p)) p++;
    }
    if (b.n > 2 && memcmp(b.p + b.n - 2, "gb", 2) == 0) b.n -= 2;
    const size_t front = b.n > 3 && memcmp(b.p, "rtx", 3) == 0 ? 3 : 0; /* RTX4090 */
    char *s = xstrndup(b.n ? b.p + front : "", b.n - front);
    buf_free(&b);
    return s;
}

static int unknown(const char *option, const char *value, const char *reduced) {
    struct buf names = {0}, several = {0};
    for (size_t i = 0; i < N_CARDS; i++) {
        if (!cards[i].name) continue;
        buf_addf(&names, "%s%s", names.n ? ", " : "", cards[i].name);
        if (*reduced && !isdigit((unsigned char)*reduced) && strncmp(cards[i].letter, reduced, strlen(reduced)) == 0)
            buf_addf(&several, "%s%s", several.n ? " or " : "", cards[i].name);
    }
    const int rc = several.n ? err_set(ERR_INVAL, __FILE__, __LINE__, "%s %s: which one? %s", option, value, several.p)
                             : err_set(ERR_INVAL, __FILE__, __LINE__,
                                       "%s %s: neither a size, as in 24, 24GB or 80GiB, nor one of %s", option, value, names.p);
    buf_free(&names);
    buf_free(&several);
    return rc;
}

int cmd_gpu_bytes(const char *option, const char *value, int64_t *bytes) {
    char *end, *name = reduce(value);
    int rc = 0;
    for (size_t i = 0; i < N_CARDS; i++)
        if (strcmp(cards[i].letter, name) == 0) {
            *bytes = (int64_t)(cards[i].gib * 0x1p30);
            goto out;
        }
    const bool number = isdigit((unsigned char)value[0]) || value[0] == '.';
    const double gb = number ? strtod(value, &end) : 0;
    if (number && *end == '\0' && gb <= MOST_GB) *bytes = (int64_t)(gb * 1e9);
    else if (!number || *end == '\0' || conf_bytes(option, value, bytes) < 0) TRYG(unknown(option, value, name), out);
    if (*bytes <= 0) FAILG(out, ERR_INVAL, "%s %s: its memory must be above 0", option, value);
out:
    free(name);
    return rc;
}
