/* What a layer's projection gives every head at every step, and what Algorithms 3 and 4 make of it
 * before the memory is updated (lines 4-8 and 2-6): ops/projected.py.
 *
 * columns (T, L, N), N = 3 W + 2 V + 3 E: q (W), k (W), v (V), beta (V), gamma (W), and the narrow
 * factors of k, q and gamma (E each). Keys, queries and gamma are outer products, narrow (x) wide, of
 * width K = E W. `activate`: q and k are yet to go through relu, beta and gamma through sigmoid.
 *
 * Widths with a prime are filled up to whole vectors: K' = E W'.
 */

#define columns NAME(columns)
#define gates NAME(gates)

typedef struct {
  const REAL *data, *keep; /* (T, L, N), (T, L) */
  int64_t steps, lanes, narrow, wide, values;
  int activate;
} columns;

/* Of a step: decay = keep (1 - gamma), write = gamma k, and q, (K') each. */
typedef struct {
  REAL *decay, *write, *q;
} gates;

static inline int64_t NAME(key_row)(const columns *x) { return x->narrow * NAME(padded)(x->wide); }

/* All that is read and activated at a step: three rows of W' and three of E'. */
static inline int64_t NAME(factors_room)(const columns *x) {
  return 3 * (NAME(padded)(x->wide) + NAME(padded)(x->narrow));
}

static inline const REAL *NAME(column)(const columns *x, int64_t t, int64_t lane) {
  return x->data + (t * x->lanes + lane) * (3 * x->wide + 2 * x->values + 3 * x->narrow);
}

/* Where the factors begin: in a column, and in rows filled up to whole vectors. */
static inline void NAME(places)(const columns *x, int64_t in_column[FACTORS], int64_t in_room[FACTORS]) {
  const int64_t W = x->wide, V = x->values, E = x->narrow;
  const int64_t W_ = NAME(padded)(W), E_ = NAME(padded)(E), narrow = 3 * W + 2 * V;
  const int64_t c[FACTORS] = {0, W, 2 * W + 2 * V, narrow + E, narrow, narrow + 2 * E};
  const int64_t r[FACTORS] = {0, W_, 2 * W_, 3 * W_, 3 * W_ + E_, 3 * W_ + 2 * E_};
  memcpy(in_column, c, sizeof c);
  memcpy(in_room, r, sizeof r);
}

static inline void NAME(read_factors)(const columns *x, int64_t t, int64_t lane, REAL *room) {
  int64_t in_column[FACTORS], in_room[FACTORS];
  NAME(places)(x, in_column, in_room);
  const REAL *column = NAME(column)(x, t, lane);
  for (int f = 0; f < FACTORS; f++) {
    const int64_t width = f < NARROW_Q ? x->wide : x->narrow;
    REAL *row = room + in_room[f];
    NAME(copy_row)(row, column + in_column[f], width);
    if (!x->activate) continue;
    if (IS_GAMMA(f))
      for (int64_t i = 0; i < NAME(padded)(width) / LANES; i++) AT(row, i) = NAME(sigmoid)(AT(row, i));
    else
      for (int64_t i = 0; i < NAME(padded)(width) / LANES; i++) AT(row, i) = NAME(relu)(AT(row, i));
  }
}

/* Multiplies out step t of a lane. `room`, factors_room, keeps the factors. Past the end of a row `decay` is anything;
 * what it multiplies is zero there. */
static inline void NAME(expand)(const columns *x, int64_t t, int64_t lane, gates to, REAL *room) {
  int64_t in_column[FACTORS], at[FACTORS];
  NAME(places)(x, in_column, at);
  NAME(read_factors)(x, t, lane, room);
  const int64_t W = NAME(padded)(x->wide);
  const REAL keep = x->keep[t * x->lanes + lane];
  for (int64_t e = 0; e < x->narrow; e++) {
    const REAL qe = room[at[NARROW_Q] + e], ke = room[at[NARROW_K] + e];
    const REAL ge = room[at[NARROW_GAMMA] + e];
    for (int64_t i = 0; i < W / LANES; i++) {
      const vec g = AT(room + at[WIDE_GAMMA], i) * ge;
      AT(to.decay + e * W, i) = keep - g * keep;
      AT(to.write + e * W, i) = g * (AT(room + at[WIDE_K], i) * ke);
      AT(to.q + e * W, i) = AT(room + at[WIDE_Q], i) * qe;
    }
  }
}

/* v and beta of a step, (V') each. */
static inline void NAME(read_values)(const columns *x, int64_t t, int64_t lane, REAL *v, REAL *beta) {
  const REAL *column = NAME(column)(x, t, lane) + 2 * x->wide;
  NAME(copy_row)(v, column, x->values);
  NAME(copy_row)(beta, column + x->values, x->values);
  if (x->activate)
    for (int64_t i = 0; i < NAME(padded)(x->values) / LANES; i++)
      AT(beta, i) = NAME(sigmoid)(AT(beta, i));
}

/* The other way: from the gradients of v and beta to those of the columns. `beta`: as read. */
static inline void NAME(values_gradient)(const columns *x, int64_t t, int64_t lane, const REAL *dv,
                                         REAL *dbeta, const REAL *beta, REAL *dcolumns) {
  if (x->activate)
    for (int64_t i = 0; i < NAME(padded)(x->values) / LANES; i++)
      AT(dbeta, i) *= AT(beta, i) - AT(beta, i) * AT(beta, i);
  REAL *to = dcolumns + (NAME(column)(x, t, lane) - x->data) + 2 * x->wide;
  NAME(store_row)(to, dv, x->values);
  NAME(store_row)(to + x->values, dbeta, x->values);
}

/* From the gradients of what `expand` made to those of the columns. `room`: the factors that it left;
 * `droom`: as much again. */
static void NAME(expand_gradient)(const columns *x, int64_t t, int64_t lane, gates d, REAL *dcolumns,
                                  const REAL *room, REAL *droom) {
  int64_t in_column[FACTORS], at[FACTORS];
  NAME(places)(x, in_column, at);
  const int64_t W = NAME(padded)(x->wide), size = NAME(factors_room)(x);
  const REAL *q = room + at[WIDE_Q], *k = room + at[WIDE_K], *gamma = room + at[WIDE_GAMMA];
  REAL *dq = droom + at[WIDE_Q], *dk = droom + at[WIDE_K];
  REAL *dgamma = droom + at[WIDE_GAMMA];
  memset(droom, 0, size * sizeof(REAL));
  const REAL keep = x->keep[t * x->lanes + lane];
  for (int64_t e = 0; e < x->narrow; e++) {
    const REAL qe = room[at[NARROW_Q] + e], ke = room[at[NARROW_K] + e];
    const REAL ge = room[at[NARROW_GAMMA] + e];
    vec dqe = {0}, dke = {0}, dge = {0};
    for (int64_t i = 0; i < W / LANES; i++) {
      const vec dwrite = AT(d.write + e * W, i), dq_ = AT(d.q + e * W, i);
      /* write = gamma k, decay = keep (1 - gamma) */
      const vec dk_ = dwrite * (AT(gamma, i) * ge);
      const vec dgamma_ = dwrite * (AT(k, i) * ke) - AT(d.decay + e * W, i) * keep;
      dqe += dq_ * AT(q, i);
      dke += dk_ * AT(k, i);
      dge += dgamma_ * AT(gamma, i);
      AT(dq, i) += dq_ * qe;
      AT(dk, i) += dk_ * ke;
      AT(dgamma, i) += dgamma_ * ge;
    }
    droom[at[NARROW_Q] + e] = NAME(sum_of)(dqe);
    droom[at[NARROW_K] + e] = NAME(sum_of)(dke);
    droom[at[NARROW_GAMMA] + e] = NAME(sum_of)(dge);
  }
  REAL *to = dcolumns + (NAME(column)(x, t, lane) - x->data);
  for (int f = 0; f < FACTORS; f++) {
    const int64_t width = f < NARROW_Q ? x->wide : x->narrow;
    const REAL *y = room + at[f];
    REAL *dy = droom + at[f];
    for (int64_t i = 0; x->activate && i < NAME(padded)(width) / LANES; i++) {
      if (IS_GAMMA(f))
        AT(dy, i) *= AT(y, i) - AT(y, i) * AT(y, i);
      else
        AT(dy, i) = NAME(where_positive)(AT(y, i), AT(dy, i));
    }
    NAME(store_row)(to + in_column[f], dy, width);
  }
}

/* A state's rows (rows, width), each filled up to whole vectors; and back. */
static inline void NAME(pack)(REAL *to, const REAL *from, int64_t rows, int64_t width) {
  for (int64_t i = 0; i < rows; i++)
    NAME(copy_row)(to + i * NAME(padded)(width), from + i * width, width);
}

static inline void NAME(unpack)(REAL *to, const REAL *from, int64_t rows, int64_t width) {
  for (int64_t i = 0; i < rows; i++)
    NAME(store_row)(to + i * width, from + i * NAME(padded)(width), width);
}

/* Arguments 0 and 1 of the attentions' handlers: columns and keep. `values`: V. */
static columns NAME(read_columns)(const XLA_FFI_CallFrame *frame, int64_t values) {
  const XLA_FFI_Buffer *x = argument(frame, 0);
  const int64_t narrow = whole(frame, "narrow");
  return (columns){.data = x->data,
                   .keep = argument(frame, 1)->data,
                   .steps = x->dims[0],
                   .lanes = x->dims[1],
                   .narrow = narrow,
                   .wide = (x->dims[2] - 2 * values - 3 * narrow) / 3,
                   .values = values,
                   .activate = (int)whole(frame, "activate")};
}
