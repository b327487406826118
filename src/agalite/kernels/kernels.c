/* agalite's kernels for CPUs, called by XLA: see __init__.py for what they are for. */

#include <math.h>
#if defined(__AVX512F__)
#include <immintrin.h>
#endif

#include "frame.h"
#include "pool.h"
#include "team.h"

#if defined(__AVX512F__)
#define VECTOR_BYTES 64
#elif defined(__AVX__)
#define VECTOR_BYTES 32
#else
#define VECTOR_BYTES 16
#endif

/* Before loops over a few rows whose sums must stay in registers. */
#define UNROLLED _Pragma("GCC unroll 16")

/* The factors of q, k and gamma in columns.h. */
enum { WIDE_Q, WIDE_K, WIDE_GAMMA, NARROW_Q, NARROW_K, NARROW_GAMMA, FACTORS };
#define IS_GAMMA(factor) ((factor) == WIDE_GAMMA || (factor) == NARROW_GAMMA)

/* build.py makes a library for each type. */
#if REAL_BITS == 32
#define REAL float
#define INTEGER int32_t
#define NAME(x) x##_f32
#define REAL_TYPE XLA_FFI_DataType_F32
#else
#define REAL double
#define INTEGER int64_t
#define NAME(x) x##_f64
#define REAL_TYPE XLA_FFI_DataType_F64
#endif
#include "all.h"

HANDLER(product)
HANDLER(agalite_forward)
HANDLER(agalite_backward)
HANDLER(agalite_trace)
HANDLER(agalite_trace_gradient)
HANDLER(eligibility)
HANDLER(eligibility_update)
HANDLER(galite_forward)
HANDLER(galite_backward)
HANDLER(stack)
HANDLER(convolution_forward)
HANDLER(convolution_images)
HANDLER(convolution_weights)
HANDLER(sparse_forward)
HANDLER(sparse_weights)
HANDLER(bits_forward)
HANDLER(bits_weights)
