/* worst.h - the largest error so far, for tests that keep one.  fmax passes over a NaN, so that an answer of
 * NaN would be a pass; here it stays until the end, where no bound holds for it. */
#ifndef VERLC_TEST_WORST_H
#define VERLC_TEST_WORST_H

static inline double worse_of(double worst, double e) { return worst != worst || e <= worst ? worst : e; }

#endif
