/* fuzz_torch.c - hostile files of torch.save: the first byte says whether the rest is the whole zip file, or the pickle of
 * one with four storages.  Every element of what torch_file_open accepts is read, so that a tensor outside its storage is
 * found. */
#include "fuzz.h"

#include "base/buf.h"
#include "model/files/torch_file.h"

#include <sys/mman.h>

static void put(struct buf *b, uint64_t v, int bytes) {
    for (int i = 0; i < bytes; i++) buf_addc(b, (char)(v >> (8 * i)));
}

/* A stored entry, and its line of the directory. */
static void zip_add(struct buf *zip, struct buf *dir, const char *name, const void *p, size_t n) {
    const uint64_t at = zip->n;
    buf_add(zip, "PK\3\4\0\0\0\0\0\0", 10);
    put(zip, 0, 8);
    put(zip, n, 4);
    put(zip, n, 4);
    put(zip, strlen(name), 2);
    put(zip, 0, 2);
    buf_adds(zip, name);
    buf_add(zip, p, n);
    buf_add(dir, "PK\1\2\0\0\0\0\0\0\0\0", 12);
    put(dir, 0, 8);
    put(dir, n, 4);
    put(dir, n, 4);
    put(dir, strlen(name), 2);
    put(dir, 0, 8);
    put(dir, 0, 4);
    put(dir, at, 4);
    buf_adds(dir, name);
}

static void zip_pickle(struct buf *zip, const uint8_t *p, size_t n) {
    static const char storage[48];
    struct buf dir = {0};
    zip_add(zip, &dir, "a/data.pkl", p, n);
    for (int i = 0; i < 4; i++) {
        char name[16];
        snprintf(name, sizeof name, "a/data/%d", i);
        zip_add(zip, &dir, name, storage, i == 3 ? 4 : 12 * (size_t)(i + 1));
    }
    const uint64_t at = zip->n;
    buf_add(zip, dir.p, dir.n);
    buf_add(zip, "PK\5\6\0\0\0\0", 8);
    put(zip, 5, 2);
    put(zip, 5, 2);
    put(zip, dir.n, 4);
    put(zip, at, 4);
    put(zip, 0, 2);
    buf_free(&dir);
}

static void read_all(const struct torch_file *f) {
    uint32_t sum = 0;
    for (int64_t i = 0; i < torch_file_count(f); i++) {
        const struct torch_tensor *t = torch_file_at(f, i);
        uint64_t element;
        int64_t n = 1;
        for (int k = 0; k < t->nd; k++) n *= t->dim[k];
        CHECK(torch_file_find(f, t->name) == t && t->shard_dim < t->nd);
        for (int64_t k = 0; k < n; k++) {
            torch_tensor_read(t, k, 1, &element);
            sum += (uint32_t)element;
        }
    }
    __asm__ volatile("" : : "r"(sum)); /* the reads must happen */
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t n) {
    char path[64];
    struct buf zip = {0};
    struct torch_file *f;
    if (n == 0) return 0;
    fuzz_quiet();
    if (data[0] % 2) zip_pickle(&zip, data + 1, n - 1);
    else buf_add(&zip, data + 1, n - 1);
    const int fd = memfd_create("fuzz", 0);
    CHECK(fd >= 0 && write(fd, zip.p, zip.n) == (ssize_t)zip.n);
    snprintf(path, sizeof path, "/proc/self/fd/%d", fd);
    const int rc = torch_file_open(&f, path);
    fuzz_check_rc(rc);
    if (rc == 0) {
        read_all(f);
        torch_file_close(f);
    }
    close(fd);
    buf_free(&zip);
    return 0;
}
