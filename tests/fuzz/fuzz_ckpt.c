/* fuzz_ckpt.c - a checkpoint directory whose manifest.json, trainer.json or tracker file
 * holds arbitrary bytes; the first byte picks which.  A checkpoint that is accepted names
 * only files of its own directory. */
#include "fuzz.h"

#include "ckpt/ckpt.h"

static void put(const char *name, const void *p, size_t n) { free(fuzz_file(name, p, n)); }

static void open_all(void) {
    fuzz_quiet();
    static const char *const dirs[] = {"global_step_7/actor", "global_step_7/optim"};
    static const char *const files[] = {"actor/config.json",
                                        "actor/model.safetensors",
                                        "actor/model.safetensors.index.json",
                                        "actor/optim.safetensors",
                                        "optim/actor.safetensors",
                                        "trainer.json",
                                        "config.yaml"};
    for (size_t i = 0; i < sizeof dirs / sizeof *dirs; i++) {
        char *dir = file_join(fuzz_dir(), dirs[i]);
        CHECK(file_mkdirs(dir) == 0);
        free(dir);
    }
    for (size_t i = 0; i < sizeof files / sizeof *files; i++) {
        char *name = file_join("global_step_7", files[i]);
        put(name, "{}", 2);
        free(name);
    }
}

static void find(const char *root) {
    int64_t step;
    char *dir;
    fuzz_check_rc(ckpt_find(root, &step, &dir));
    CHECK((step == 7) == (dir != NULL) && (step == 7 || step == -1));
    free(dir);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t n) {
    static const char *const names[] = {"global_step_7/manifest.json", "global_step_7/trainer.json",
                                        "latest_checkpointed_iteration.txt"};
    static bool opened;
    if (n == 0) return 0;
    if (!opened) open_all();
    opened = true;
    const unsigned which = data[0] % 3;
    if (which != 1) put(names[1], "{}", 2);
    put(names[which], data + 1, n - 1);
    char *dir = file_join(fuzz_dir(), "global_step_7");
    json_t *trainer = NULL;
    const int rc = ckpt_verify(dir);
    fuzz_check_rc(rc);
    if (which == 1) fuzz_check_rc(ckpt_read_trainer(dir, &trainer));
    find(fuzz_dir());
    json_decref(trainer);
    free(dir);
    return 0;
}
