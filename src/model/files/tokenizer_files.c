/* tokenizer_files.c - see tokenizer_files.h. */
#include "model/files/tokenizer_files.h"

#include "base/buf.h"
#include "base/err.h"
#include "base/file.h"

#include <errno.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>

static const char *const names[] = {
    "tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json",  "vocab.json",
    "merges.txt",     "tokenizer.model",       "chat_template.jinja",     "chat_template.json",
};
enum { N_NAMES = sizeof names / sizeof names[0], MAX_BYTES = 1 << 30 };

struct tokenizer_files {
    struct buf bytes[N_NAMES];
    unsigned mode[N_NAMES];
    bool there[N_NAMES];
};

static int read_one(struct tokenizer_files *f, int i, const char *dir) {
    struct stat st;
    char *path;
    int rc = 0;
    TRY(file_in_dir(&path, dir, names[i]));
    if (!path) return 0;
    if (stat(path, &st) < 0) FAILG(out, ERR_INPUT, "%s: %s", path, strerror(errno));
    TRYG(file_read(&f->bytes[i], path, MAX_BYTES), out);
    f->mode[i] = st.st_mode & 0777;
    f->there[i] = true;
out:
    free(path);
    return rc;
}

int tokenizer_files_read(struct tokenizer_files **out, const char *dir) {
    struct tokenizer_files *f = xcalloc(1, sizeof *f);
    int rc = 0, n = 0;
    for (int i = 0; i < N_NAMES; i++) {
        TRYG(read_one(f, i, dir), fail);
        n += f->there[i];
    }
    *out = n > 0 ? f : NULL;
    if (n > 0) return 0;
fail:
    tokenizer_files_free(f);
    return rc;
}

int tokenizer_files_write(const struct tokenizer_files *f, const char *dir) {
    for (int i = 0; i < N_NAMES; i++) {
        if (!f->there[i]) continue;
        char *path = file_join(dir, names[i]);
        const int rc = file_write_atomic_mode(path, f->bytes[i].p, f->bytes[i].n, f->mode[i]);
        free(path);
        TRY(rc);
    }
    return 0;
}

void tokenizer_files_free(struct tokenizer_files *f) {
    if (!f) return;
    for (int i = 0; i < N_NAMES; i++) buf_free(&f->bytes[i]);
    free(f);
}
