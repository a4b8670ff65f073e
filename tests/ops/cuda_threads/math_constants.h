/* math_constants.h - CUDA's names of some floats. */
#ifndef VERLC_TESTS_CUDA_THREADS_MATH_CONSTANTS_H
#define VERLC_TESTS_CUDA_THREADS_MATH_CONSTANTS_H

#define CUDART_INF_F ((float)INFINITY)
#define CUDART_NAN_F ((float)NAN)

#endif
