/* selftest.c - `verlc selftest`: does this device compute what `ref` computes?
 *
 * Three questions, each a few lines of a table: every op of the device against `ref` on odd
 * and usual shapes in both dtypes, and batch invariance, bit for bit (selftest_ops.c);
 * and the log-probs of a rollout against those of the training forward pass of the same tokens, bit for bit, on small
 * models or on the user's (selftest_rollout.c).
 * Invariant: a line says ok only after a comparison that ran; what a device lacks is a line
 * of its own, and no success. */
#include "cmd/cmd.h"

#include "base/err.h"
#include "cmd/selftest/selftest.h"

#include <stdio.h>
#include <string.h>

void selftest_line(struct selftest *t, const char *what, bool ok, const char *detail) {
    printf("%-40s %-9s %s\n", what, ok ? "ok" : "DIFFERENT", detail);
    fflush(stdout);
    if (!ok) t->failed++;
    t->lines++;
}

int cmd_selftest(int argc, char **argv) {
    const char *device = NULL, *model = NULL, *dtype = NULL;
    int64_t threads = 0;
    const struct rollout_size usual = {.seqs = 80, .n = 5, .prompt = 256, .new = 128};
    struct rollout_size size = usual;
    struct dev dev, ref;
    enum dtype act;
    const struct cmd_opt opts[] = {{"--device", CMD_STR, &device, "NAME", CMD_DEVICE_HELP},
                                   {"--threads", CMD_I64(CMD_THREADS), &threads, "N", "CPU threads (all)"},
                                   {"--model", CMD_STR, &model, "DIR", "rollout against training alone, on this model"},
                                   {"--dtype", CMD_STR, &dtype, "bf16|fp32", "its compute dtype (bf16)"},
                                   {"--batch", CMD_I64(CMD_COUNT), &size.seqs, "N", "samples (80)"},
                                   {"--n", CMD_I64(CMD_COUNT), &size.n, "N", "samples of a prompt (5)"},
                                   {"--prompt", CMD_I64(CMD_COUNT), &size.prompt, "N", "tokens of the longest prompt (256)"},
                                   {"--len", CMD_I64(CMD_COUNT), &size.new, "N", "tokens sampled (128)"}};
    const struct cmd_spec spec = CMD_SPEC(opts, "verlc selftest [--device NAME] [--model DIR [options]]",
                                          "Compares every op of a device with the reference backend, checks that ops are\n"
                                          "batch-invariant, and compares the log-probs of a rollout with those of training;\n"
                                          "with --model the last alone, on that model. Exit status 1: something differs.");
    int rc = cmd_parse(&spec, argc, argv);
    if (rc != 0) return rc < 0 ? rc : 0;
    if (!model && (dtype || memcmp(&size, &usual, sizeof size) != 0))
        FAIL(ERR_INVAL, "--dtype, --batch, --n, --prompt and --len say how a model is run: name it with --model DIR");
    TRY(cmd_compute_dtype(dtype ? dtype : "bf16", &act));
    TRY(cmd_batch_size(size.seqs, size.prompt, size.new));
    if (size.seqs % size.n != 0)
        FAIL(ERR_INVAL, "--batch %lld must be a multiple of --n %lld", (long long)size.seqs, (long long)size.n);
    TRY(dev_open_named(&dev, device, (int)threads, NULL));
    rc = dev_open_ref(&ref);
    struct selftest t = {.dev = &dev, .ref = &ref};
    printf("%s\n", dev.describe);
    if (model) {
        if (rc == 0) rc = selftest_model(&t, model, act, &size);
    } else {
        if (rc == 0) rc = selftest_ops(&t);
        if (rc == 0) rc = selftest_rollout(&t);
    }
    if (rc == 0) printf("%d comparisons, %d different, %d not on this device\n", t.lines, t.failed, t.missing);
    dev_close(&ref);
    dev_close(&dev);
    if (rc < 0) return rc;
    return t.failed ? 1 : 0;
}
