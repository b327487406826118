/* Vectors of REAL, as wide as the processor's, and what is done with them. */

#define vec NAME(vec)
#define quad NAME(quad)
/* Not aligned, and of any type: rows of XLA's arrays begin where they begin. */
typedef REAL vec __attribute__((vector_size(VECTOR_BYTES), aligned(sizeof(REAL)), may_alias));
typedef REAL quad __attribute__((vector_size(16)));
#define LANES ((int64_t)(VECTOR_BYTES / sizeof(REAL)))
#define AT(pointer, i) (((vec *)(pointer))[i])

/* Rows are filled up with zeros to whole vectors, so that no loop needs a tail. */
static inline int64_t NAME(padded)(int64_t n) { return (n + LANES - 1) / LANES * LANES; }

/* Short rows are copied here and not by memcpy: calling it takes longer than copying them. */
static inline void NAME(store_row)(REAL *restrict to, const REAL *restrict from, int64_t n) {
  const int64_t vectors = n / LANES;
  for (int64_t i = 0; i < vectors; i++) AT(to, i) = AT(from, i);
  for (int64_t i = vectors * LANES; i < n; i++) to[i] = from[i];
}

static inline void NAME(copy_row)(REAL *restrict to, const REAL *restrict from, int64_t n) {
  NAME(store_row)(to, from, n);
  for (int64_t i = n; i < NAME(padded)(n); i++) to[i] = 0;
}

static inline REAL NAME(sum_of)(vec a) {
  union {
    vec whole;
    quad parts[VECTOR_BYTES / sizeof(quad)];
  } u = {.whole = a};
  quad sum = u.parts[0];
  UNROLLED for (unsigned i = 1; i < VECTOR_BYTES / sizeof(quad); i++) sum += u.parts[i];
  REAL total = sum[0];
  UNROLLED for (unsigned i = 1; i < sizeof(quad) / sizeof(REAL); i++) total += sum[i];
  return total;
}

/* a . b of `vectors` vectors. */
static inline REAL NAME(dot)(const REAL *a, const REAL *b, int64_t vectors) {
  vec sum = {0};
  for (int64_t i = 0; i < vectors; i++) sum += AT(a, i) * AT(b, i);
  return NAME(sum_of)(sum);
}

/* --- activations ------------------------------------------------------------------------------ */

#define bits NAME(bits)
typedef INTEGER bits __attribute__((vector_size(VECTOR_BYTES), aligned(sizeof(REAL)), may_alias));

/* d where y > 0, and 0 elsewhere; not a number stays what it is. */
static inline vec NAME(where_positive)(vec y, vec d) { return (vec)((bits)d & ~(bits)(y <= 0)); }

static inline vec NAME(relu)(vec x) { return NAME(where_positive)(x, x); }

static inline vec NAME(exponential)(vec x) {
#if REAL_BITS == 32
  /* 2^n e^f with |f| <= log(2) / 2; outside of [-87, 88] a float has no room for the result. */
  const vec low = (vec){0} - 87.0f, high = (vec){0} + 88.0f;
  const bits small = x < low, large = x > high;
  x = (vec)(((bits)x & ~(small | large)) | ((bits)low & small) | ((bits)high & large));
  const REAL rounding = 12582912.0f; /* 1.5 * 2^23: adding it rounds to a whole number */
  const vec shifted = x * 1.44269504f + rounding, n = shifted - rounding;
  const vec f = (x - n * 0.693359375f) + n * 2.12194440e-4f;
  vec p = f * 1.9875691500e-4f + 1.3981999507e-3f;
  p = p * f + 8.3334519073e-3f;
  p = p * f + 4.1665795894e-2f;
  p = p * f + 1.6666665459e-1f;
  p = p * f + 5.0000001201e-1f;
  p = p * f * f + f + 1.0f;
  const vec rounding_ = (vec){0} + rounding;
  return (vec)((bits)p + (((bits)shifted - (bits)rounding_) << 23));
#else
  for (int64_t i = 0; i < LANES; i++) x[i] = exp(x[i]);
  return x;
#endif
}

static inline vec NAME(sigmoid)(vec x) { return 1 / (1 + NAME(exponential)(-x)); }

static inline vec NAME(tanh_)(vec x) { return 1 - 2 / (1 + NAME(exponential)(x + x)); }

/* --- sums of neighbours ----------------------------------------------------------------------- */

/* (a0 + a1, a2 + a3, ..., b0 + b1, ...) */
#if defined(__has_builtin)
#if __has_builtin(__builtin_shufflevector)
#define PAIRS
static inline vec NAME(pairs)(vec a, vec b) {
#if VECTOR_BYTES * 8 / REAL_BITS == 16
  return __builtin_shufflevector(a, b, 0, 2, 4, 6, 8, 10, 12, 14, 16, 18, 20, 22, 24, 26, 28, 30) +
         __builtin_shufflevector(a, b, 1, 3, 5, 7, 9, 11, 13, 15, 17, 19, 21, 23, 25, 27, 29, 31);
#elif VECTOR_BYTES * 8 / REAL_BITS == 8
  return __builtin_shufflevector(a, b, 0, 2, 4, 6, 8, 10, 12, 14) +
         __builtin_shufflevector(a, b, 1, 3, 5, 7, 9, 11, 13, 15);
#elif VECTOR_BYTES * 8 / REAL_BITS == 4
  return __builtin_shufflevector(a, b, 0, 2, 4, 6) + __builtin_shufflevector(a, b, 1, 3, 5, 7);
#else
  return __builtin_shufflevector(a, b, 0, 2) + __builtin_shufflevector(a, b, 1, 3);
#endif
}
#endif
#endif
