/* AGaLiTe's traces (ops/traces.py): the derivative S of the running sums by the rows of the projection.
 *
 * An element obeys h_t = (1 - g_t) h_{t-1} + c_t g_t u_t, and its S the same decay: S_t = (1 - g_t) S_{t-1} +
 * d_t x_t. A piece of work is a lane. For a block of its elements the derivatives d_t, times the decay from t to
 * the end, are written into panels (T, BLOCK) that stay in cache; a product with x (T, D) sums them into S.
 *
 * Of each lane S is (D, Rk, E, W) for k~, by p1, k, p3 and gamma, and (D, R, V) for v~, by v and beta.
 */

#define trace_job NAME(trace_job)
enum { TRACE_P1, TRACE_K, TRACE_P3, TRACE_GAMMA, KEY_TRACES, TRACE_V = KEY_TRACES, TRACE_BETA, TRACES };
/* The product keeps ROWS x VECTORS sums in registers. */
#define TRACE_ROWS 8
#define TRACE_VECTORS 2
#define BLOCK (TRACE_VECTORS * LANES)
/* Smaller products of decays count as zero: below are denormal numbers, which are slow. */
#define VANISHED 1e-30

typedef struct {
  columns x;
  const REAL *osc, *inputs, *keys, *values; /* (T, L, Rk), (T, B, D), (L, Rk, E, W), (L, R, V) */
  int64_t key_vectors, value_vectors, batch, width;
  const REAL *weight[TRACES], *bias[TRACES];
  REAL *new_weight[TRACES], *new_bias[TRACES];
  const REAL *dkeys, *dvalues; /* of the gradient */
  REAL *rows[TRACES];
  int failed;
} trace_job;

static inline int64_t NAME(blocks)(int64_t n) { return (n + BLOCK - 1) / BLOCK * BLOCK; }

static inline void NAME(fill_row)(REAL *to, const REAL *from, int64_t n) {
  NAME(copy_row)(to, from, n);
  for (int64_t i = NAME(padded)(n); i < NAME(blocks)(n); i++) to[i] = 0;
}

/* to (D, stride), `count` columns: total * from + x^T panel, over steps first .. steps-1 of panel (T, BLOCK).
 * packed: x as (D / ROWS, T, ROWS). */
static void NAME(trace_product)(const REAL *panel, const REAL *packed, int64_t first, int64_t steps,
                                int64_t width, const REAL *total, const REAL *from, REAL *to,
                                int64_t stride, int64_t count) {
  for (int64_t d = 0; d < width; d += TRACE_ROWS) {
    vec sums[TRACE_ROWS][TRACE_VECTORS] = {{{0}}};
    const REAL *x = packed + d * steps;
    for (int64_t t = first; t < steps; t++) {
      const vec a = AT(panel + t * BLOCK, 0), b = AT(panel + t * BLOCK, 1);
      UNROLLED for (int i = 0; i < TRACE_ROWS; i++) {
        const REAL x_i = x[t * TRACE_ROWS + i];
        sums[i][0] += a * x_i;
        sums[i][1] += b * x_i;
      }
    }
    const int64_t rows = width - d < TRACE_ROWS ? width - d : TRACE_ROWS;
    for (int64_t i = 0; i < rows; i++) {
      const REAL *old = from + (d + i) * stride;
      REAL *new = to + (d + i) * stride;
      if (count == BLOCK) {
        AT(new, 0) = AT(total, 0) * AT(old, 0) + sums[i][0];
        AT(new, 1) = AT(total, 1) * AT(old, 1) + sums[i][1];
      } else {
        const REAL *sum = (const REAL *)sums[i];
        for (int64_t n = 0; n < count; n++) new[n] = total[n] * old[n] + sum[n];
      }
    }
  }
}

static inline int NAME(vanished)(vec later) {
  const bits small = (later < (REAL)VANISHED);
  for (int64_t i = 0; i < LANES; i++)
    if (!small[i]) return 0;
  return 1;
}

static inline vec NAME(without_tiny)(vec later) { return (vec)((bits)later & ~(bits)(later < (REAL)VANISHED)); }

/* Bias and weight of `kinds` traces of one block, whose panels are filled from step `first` on. */
static void NAME(trace_block)(const trace_job *job, const REAL *panels, const REAL *packed, int64_t first,
                              const REAL *total, int kind, int kinds, int64_t lane, int64_t elements,
                              int64_t at, int64_t count) {
  const int64_t T = job->x.steps, D = job->width;
  for (int n = 0; n < kinds; n++) {
    const REAL *panel = panels + n * T * BLOCK;
    vec sums[TRACE_VECTORS] = {{0}};
    for (int64_t t = first; t < T; t++)
      for (int j = 0; j < TRACE_VECTORS; j++) sums[j] += AT(panel + t * BLOCK, j);
    const REAL *old = job->bias[kind + n] + lane * elements + at, *sum = (const REAL *)sums;
    REAL *new = job->new_bias[kind + n] + lane * elements + at;
    for (int64_t i = 0; i < count; i++) new[i] = total[i] * old[i] + sum[i];
    const int64_t place = lane * D * elements + at;
    NAME(trace_product)(panel, packed, first, T, D, total, job->weight[kind + n] + place,
                        job->new_weight[kind + n] + place, elements, count);
  }
}

static void NAME(trace_lane)(void *job_, int64_t lane) {
  trace_job *job = job_;
  const columns *x = &job->x;
  const int64_t T = x->steps, L = x->lanes, E = x->narrow, W = x->wide, V = x->values, D = job->width;
  const int64_t Rk = job->key_vectors, R = job->value_vectors, B = job->batch, b = lane / (L / B);
  const int64_t W_ = NAME(blocks)(W), V_ = NAME(blocks)(V), E_ = NAME(padded)(E);
  const int64_t D_ = (D + TRACE_ROWS - 1) / TRACE_ROWS * TRACE_ROWS;
  const int64_t row = 2 * (W_ + E_ + V_);
  REAL *room = team_room(ROOM_OF_PIECE,
                         (T * (row + D_ + (1 + KEY_TRACES) * BLOCK) + 2 * BLOCK) * sizeof(REAL));
  if (!room) {
    job->failed = 1;
    return;
  }
  /* Of each step: k, gamma, p1, p3, v and beta, activated. */
  REAL *steps = room, *packed = steps + T * row, *change = packed + T * D_;
  REAL *panels = change + T * BLOCK, *total = panels + T * KEY_TRACES * BLOCK, *start = total + BLOCK;
  int64_t in_column[FACTORS], unused[FACTORS];
  NAME(places)(x, in_column, unused);
  for (int64_t t = 0; t < T; t++) {
    const REAL *column = NAME(column)(x, t, lane);
    REAL *k = steps + t * row, *gamma = k + W_, *p1 = gamma + W_, *p3 = p1 + E_, *v = p3 + E_, *beta = v + V_;
    NAME(fill_row)(k, column + in_column[WIDE_K], W);
    NAME(fill_row)(gamma, column + in_column[WIDE_GAMMA], W);
    NAME(copy_row)(p1, column + in_column[NARROW_K], E);
    NAME(copy_row)(p3, column + in_column[NARROW_GAMMA], E);
    NAME(fill_row)(v, column + 2 * W, V);
    NAME(fill_row)(beta, column + 2 * W + V, V);
    if (x->activate) {
      for (int64_t i = 0; i < W_ / LANES; i++) {
        AT(k, i) = NAME(relu)(AT(k, i));
        AT(gamma, i) = NAME(sigmoid)(AT(gamma, i));
      }
      for (int64_t i = 0; i < E_ / LANES; i++) {
        AT(p1, i) = NAME(relu)(AT(p1, i));
        AT(p3, i) = NAME(sigmoid)(AT(p3, i));
      }
      for (int64_t i = 0; i < V_ / LANES; i++) AT(beta, i) = NAME(sigmoid)(AT(beta, i));
    }
    const REAL *input = job->inputs + (t * B + b) * D;
    for (int64_t d = 0; d < D_; d++)
      packed[(d / TRACE_ROWS * T + t) * TRACE_ROWS + d % TRACE_ROWS] = d < D ? input[d] : 0;
  }
  const vec zero = {0}, one = zero + 1;
  for (int64_t r = 0; r < Rk; r++)
    for (int64_t e = 0; e < E; e++)
      for (int64_t w = 0; w < W; w += BLOCK) {
        const int64_t count = W - w < BLOCK ? W - w : BLOCK, at = (r * E + e) * W + w;
        memset(start, 0, BLOCK * sizeof(REAL));
        memcpy(start, job->keys + lane * Rk * E * W + at, count * sizeof(REAL));
        vec h[TRACE_VECTORS] = {AT(start, 0), AT(start, 1)}, later[TRACE_VECTORS] = {one, one};
        for (int64_t t = 0; t < T; t++) {
          const REAL *k = steps + t * row + w, *gamma = k + W_, *p1 = k - w + 2 * W_, *p3 = p1 + E_;
          const REAL keep = x->keep[t * L + lane], c = job->osc[(t * L + lane) * Rk + r];
          for (int j = 0; j < TRACE_VECTORS; j++) {
            /* A select: an infinite state is forgotten too. */
            const vec before = keep == 0 ? zero : h[j];
            const vec difference = AT(k, j) * (p1[e] * c) - before;
            AT(change + t * BLOCK, j) = difference;
            h[j] = before + AT(gamma, j) * p3[e] * difference;
          }
        }
        int64_t first = T;
        for (int64_t t = T - 1; t >= 0; t--) {
          const REAL *k = steps + t * row + w, *gamma = k + W_, *p1 = k - w + 2 * W_, *p3 = p1 + E_;
          const REAL keep = x->keep[t * L + lane], c = job->osc[(t * L + lane) * Rk + r];
          const REAL open = p1[e] > 0 ? c : 0, slope = p3[e] - p3[e] * p3[e], write = c * p1[e];
          for (int j = 0; j < TRACE_VECTORS; j++) {
            const vec k_ = AT(k, j), gamma_ = AT(gamma, j), g = gamma_ * p3[e], decayed = later[j] * g;
            const vec changed = later[j] * AT(change + t * BLOCK, j);
            REAL *to = panels + t * BLOCK;
            AT(to + TRACE_P1 * T * BLOCK, j) = decayed * k_ * open;
            AT(to + TRACE_K * T * BLOCK, j) = NAME(where_positive)(k_, decayed * write);
            AT(to + TRACE_P3 * T * BLOCK, j) = changed * gamma_ * slope;
            AT(to + TRACE_GAMMA * T * BLOCK, j) = changed * (gamma_ - gamma_ * gamma_) * p3[e];
            const vec earlier = later[j] - decayed;
            later[j] = NAME(without_tiny)(keep == 0 ? zero : earlier);
          }
          first = t;
          if (NAME(vanished)(later[0]) && NAME(vanished)(later[1])) break;
        }
        AT(total, 0) = later[0];
        AT(total, 1) = later[1];
        NAME(trace_block)(job, panels, packed, first, total, TRACE_P1, KEY_TRACES, lane, Rk * E * W, at, count);
      }
  for (int64_t r = 0; r < R; r++)
    for (int64_t w = 0; w < V; w += BLOCK) {
      const int64_t count = V - w < BLOCK ? V - w : BLOCK, at = r * V + w;
      memset(start, 0, BLOCK * sizeof(REAL));
      memcpy(start, job->values + lane * R * V + at, count * sizeof(REAL));
      vec h[TRACE_VECTORS] = {AT(start, 0), AT(start, 1)}, later[TRACE_VECTORS] = {one, one};
      for (int64_t t = 0; t < T; t++) {
        const REAL *v = steps + t * row + 2 * (W_ + E_) + w, *beta = v + V_;
        const REAL keep = x->keep[t * L + lane], c = job->osc[(t * L + lane) * Rk + r];
        for (int j = 0; j < TRACE_VECTORS; j++) {
          const vec before = keep == 0 ? zero : h[j], difference = AT(v, j) * c - before;
          AT(change + t * BLOCK, j) = difference;
          h[j] = before + AT(beta, j) * difference;
        }
      }
      int64_t first = T;
      for (int64_t t = T - 1; t >= 0; t--) {
        const REAL *beta = steps + t * row + 2 * (W_ + E_) + V_ + w;
        const REAL keep = x->keep[t * L + lane], c = job->osc[(t * L + lane) * Rk + r];
        for (int j = 0; j < TRACE_VECTORS; j++) {
          const vec beta_ = AT(beta, j), decayed = later[j] * beta_;
          AT(panels + t * BLOCK, j) = decayed * c;
          AT(panels + (T + t) * BLOCK, j) = decayed * AT(change + t * BLOCK, j) * (1 - beta_);
          const vec earlier = later[j] - decayed;
          later[j] = NAME(without_tiny)(keep == 0 ? zero : earlier);
        }
        first = t;
        if (NAME(vanished)(later[0]) && NAME(vanished)(later[1])) break;
      }
      AT(total, 0) = later[0];
      AT(total, 1) = later[1];
      NAME(trace_block)(job, panels, packed, first, total, TRACE_V, 2, lane, R * V, at, count);
    }
}

/* Arguments: columns, keep, osc, inputs, keys, values, six weights and six biases. Results: the new ones. */
static XLA_FFI_Error *NAME(agalite_trace)(XLA_FFI_CallFrame *frame) {
  const XLA_FFI_Buffer *inputs = argument(frame, 3), *values = argument(frame, 5);
  trace_job job = {.x = NAME(read_columns)(frame, values->dims[2]),
                   .osc = argument(frame, 2)->data,
                   .inputs = inputs->data,
                   .keys = argument(frame, 4)->data,
                   .values = values->data,
                   .key_vectors = argument(frame, 4)->dims[1],
                   .value_vectors = values->dims[1],
                   .batch = inputs->dims[1],
                   .width = inputs->dims[2]};
  for (int n = 0; n < TRACES; n++) {
    job.weight[n] = argument(frame, 6 + n)->data;
    job.bias[n] = argument(frame, 6 + TRACES + n)->data;
    job.new_weight[n] = result(frame, n)->data;
    job.new_bias[n] = result(frame, TRACES + n)->data;
  }
  pool_run(frame, NAME(trace_lane), &job, job.x.lanes);
  return job.failed ? failure(frame, "agalite_trace: no memory left") : NULL;
}

/* --- the gradient of the rows ----------------------------------------------------------------- */

/* Of a lane: every row gets the sum of lambda S over the elements that it writes. */
static void NAME(trace_gradient_lane)(void *job_, int64_t lane) {
  const trace_job *job = job_;
  const int64_t E = job->x.narrow, W = job->x.wide, V = job->x.values, D = job->width;
  const int64_t Rk = job->key_vectors, R = job->value_vectors;
  const REAL *dkeys = job->dkeys + lane * Rk * E * W, *dvalues = job->dvalues + lane * R * V;
  for (int n = 0; n < KEY_TRACES; n++) {
    const int narrow = n == TRACE_P1 || n == TRACE_P3;
    for (int64_t d = 0; d < D; d++) {
      const REAL *s = job->weight[n] + (lane * D + d) * Rk * E * W;
      REAL *to = job->rows[n] + (lane * D + d) * (narrow ? E : W);
      for (int64_t i = 0; i < (narrow ? E : W); i++) to[i] = 0;
      for (int64_t i = 0; i < Rk * E; i++) {
        const REAL *a = dkeys + i * W, *b = s + i * W;
        if (narrow) {
          vec sum = {0};
          for (int64_t w = 0; w < W / LANES; w++) sum += AT(a, w) * AT(b, w);
          REAL all = NAME(sum_of)(sum);
          for (int64_t w = W / LANES * LANES; w < W; w++) all += a[w] * b[w];
          to[i % E] += all;
        } else {
          for (int64_t w = 0; w < W / LANES; w++) AT(to, w) += AT(a, w) * AT(b, w);
          for (int64_t w = W / LANES * LANES; w < W; w++) to[w] += a[w] * b[w];
        }
      }
    }
  }
  for (int n = TRACE_V; n < TRACES; n++)
    for (int64_t d = 0; d < D; d++) {
      const REAL *s = job->weight[n] + (lane * D + d) * R * V;
      REAL *to = job->rows[n] + (lane * D + d) * V;
      for (int64_t v = 0; v < V; v++) {
        REAL sum = 0;
        for (int64_t r = 0; r < R; r++) sum += dvalues[r * V + v] * s[r * V + v];
        to[v] = sum;
      }
    }
}

/* Arguments: the gradients of keys (L, Rk, E, W) and values (L, R, V), and six weights (L, D, ...). Results:
 * the gradients of the rows, (L, D, E), (L, D, W), (L, D, E), (L, D, W), (L, D, V), (L, D, V). */
static XLA_FFI_Error *NAME(agalite_trace_gradient)(XLA_FFI_CallFrame *frame) {
  const XLA_FFI_Buffer *keys = argument(frame, 0), *values = argument(frame, 1);
  trace_job job = {.x = {.lanes = keys->dims[0], .narrow = keys->dims[2], .wide = keys->dims[3],
                         .values = values->dims[2]},
                   .dkeys = keys->data,
                   .dvalues = values->data,
                   .key_vectors = keys->dims[1],
                   .value_vectors = values->dims[1],
                   .width = argument(frame, 2)->dims[1]};
  for (int n = 0; n < TRACES; n++) {
    job.weight[n] = argument(frame, 2 + n)->data;
    job.rows[n] = result(frame, n)->data;
  }
  pool_run(frame, NAME(trace_gradient_lane), &job, job.x.lanes);
  return NULL;
}

#undef BLOCK
