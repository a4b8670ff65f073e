/* sft_loss.c - see sft_loss.h. */
#include "sft/sft_loss.h"

int sft_loss(const struct supervised_batch *b, const struct micro_loss *m, double *stats) {
    const double scale = b->targets ? 1.0 / (double)b->targets : 0;
    double sum = 0;
    for (int64_t t = 0; t < m->t1 - m->t0; t++) {
        sum -= (double)m->out[t];
        m->dout[t] = (float)-scale;
    }
    stats[0] = sum * scale;
    return 0;
}

void sft_loss_validate(const struct supervised_rows *val, const float *logp, struct metrics *out) {
    int64_t targets = 0;
    double sum = 0;
    for (int64_t i = 0; i < val->n; i++) targets += packed_seq_targets(&val->seqs[i]);
    for (int64_t t = 0; t < targets; t++) sum -= (double)logp[t];
    metrics_set(out, targets ? sum / (double)targets : 0, "val/loss");
}
