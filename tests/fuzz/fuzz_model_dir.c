/* fuzz_model_dir.c - one file of a model's, an adapter's or a checkpoint's directory with arbitrary bytes, the others as they
 * should be; the first byte picks it.  What opens has finite weights of the shapes that its configuration says. */
#include "fuzz.h"

#include "base/buf.h"
#include "ckpt/ckpt.h"
#include "device/device.h"
#include "model/files/load.h"
#include "model/lora/lora.h"
#include "model/optim/optimizer.h"

#define MODEL FIXTURES "/model/llama_bias/"
#define ADAPTER FIXTURES "/model/lora_bias/"

static const struct {
    const char *name, *fixture; /* NULL: not there */
} files[] = {{"config.json", MODEL "config.json"},
             {"model.safetensors", MODEL "model.safetensors"},
             {"model.safetensors.index.json", NULL},
             {"generation_config.json", NULL},
             {"adapter/adapter_config.json", ADAPTER "adapter_config.json"},
             {"adapter/adapter_model.safetensors", ADAPTER "adapter_model.safetensors"},
             {"global_step_1/optim/actor.safetensors", NULL}};
enum { N_FILES = sizeof files / sizeof *files, OPTIM = N_FILES - 1 };

static struct dev dev;
static struct model *trained; /* what a checkpoint is loaded into */
static struct optim *optim;

static void put(int i) {
    struct buf b = {0};
    if (!files[i].fixture) return;
    CHECK(file_read(&b, files[i].fixture, 0) == 0);
    free(fuzz_file(files[i].name, (const uint8_t *)b.p, b.n));
    buf_free(&b);
}

static struct model_open_args args(int flags) {
    return (struct model_open_args){.dir = fuzz_dir(), .act = DT_F32, .flags = flags, .max_len = 16};
}

static void close_all(void) {
    optim_destroy(optim, trained);
    model_close(trained);
    dev_close(&dev);
}

static void open_all(void) {
    static const char *const dirs[] = {"adapter", "global_step_1/optim", "global_step_1/actor"};
    for (size_t i = 0; i < sizeof dirs / sizeof *dirs; i++) {
        char *dir = file_join(fuzz_dir(), dirs[i]);
        CHECK(file_mkdirs(dir) == 0);
        free(dir);
    }
    fuzz_quiet();
    for (int i = 0; i < N_FILES; i++) put(i);
    char *weights = file_join(fuzz_dir(), "global_step_1/actor/model.safetensors"), *from = file_join(fuzz_dir(), files[1].name);
    CHECK(link(from, weights) == 0);
    free(weights);
    free(from);
    struct model_open_args a = args(MODEL_TRAIN);
    const struct optim_config c = {.kind = OPTIM_ADAMW, .beta1 = 0.9, .beta2 = 0.99, .eps = 1e-8, .schedule = "constant"};
    CHECK(dev_open_ref(&dev) == 0 && model_open(&trained, &dev, &a) == 0 && optim_create(&optim, trained, &c) == 0);
    atexit(close_all);
}

static void open_model(void) {
    struct model *m = NULL;
    const struct model_open_args a = args(MODEL_INFER);
    char *dir = file_join(fuzz_dir(), "adapter");
    int rc = model_open(&m, &dev, &a);
    fuzz_check_rc(rc);
    if (rc == 0) fuzz_check_rc(model_lora_load(m, dir));
    if (rc == 0) model_close(m);
    rc = model_open_reward(&m, &dev, &a);
    fuzz_check_rc(rc);
    if (rc == 0) model_close(m);
    free(dir);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t n) {
    static bool opened;
    if (n == 0) return 0;
    if (!opened) open_all();
    opened = true;
    const int i = data[0] % N_FILES;
    char *path = fuzz_file(files[i].name, data + 1, n - 1), *dir = file_join(fuzz_dir(), "global_step_1");
    if (i == OPTIM) fuzz_check_rc(ckpt_load_part(dir, &(struct ckpt_part){.name = "actor", .model = trained, .optim = optim}));
    else open_model();
    unlink(path);
    put(i);
    free(path);
    free(dir);
    return 0;
}
