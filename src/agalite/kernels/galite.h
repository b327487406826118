/* GaLiTe's attention (Algorithm 3), a lane at a time: ops/galite_native.py.
 *
 * The recurrence of C acts on each of its numbers alone. So a few rows of C at a time go through a
 * whole chunk of steps: they stay in registers and in the first cache, where all of C would not. For
 * the gradient C is kept every `chunk` steps; the trajectory of those few rows is rebuilt from there.
 */

#define galite_job NAME(galite_job)

typedef struct {
  columns x;
  REAL epsilon;
  int64_t chunk;
  const REAL *C, *s;                    /* at the beginning: (L, V, K), (L, K) */
  REAL *last_C, *last_s, *out, *bottom; /* ..., (T, L, V), (T, L): line 11 divides by it */
  REAL *chunk_C, *chunk_s;              /* at the start of each chunk: (N, L, ...); may be NULL */
  const REAL *dlast_C, *dlast_s, *dout;
  REAL *dcolumns, *dC, *ds;
  int failed;
} galite_job;

#define FORWARD_ROWS 8
#define BACKWARD_ROWS 4

/* `rows` rows of C (rows, K') through `steps` steps of (decay, write, q), 3 K' each. `gate` and
 * `value`, V' from step to step: 1 - beta and beta v of these rows. Writes C q to `top` (V' from step
 * to step) if asked, and the rows before each step and after the last to `path` (steps + 1, rows, K')
 * if asked. */
static inline __attribute__((always_inline)) void NAME(galite_rows)(
    REAL *restrict C, const REAL *restrict expanded, const REAL *gate, const REAL *value,
    int64_t steps, int64_t K, int64_t V, const int rows, REAL *top, REAL *restrict path) {
  if (path) memcpy(path, C, rows * K * sizeof(REAL));
  for (int64_t t = 0; t < steps; t++) {
    const REAL *decay = expanded + 3 * t * K, *write = decay + K, *q = write + K;
    const REAL *from = path ? path + t * rows * K : C;
    REAL *to = path ? path + (t + 1) * rows * K : C;
    vec keep[FORWARD_ROWS], add[FORWARD_ROWS], sums[FORWARD_ROWS];
    UNROLLED for (int r = 0; r < rows; r++) {
      keep[r] = (vec){0} + gate[t * V + r];
      add[r] = (vec){0} + value[t * V + r];
      sums[r] = (vec){0};
    }
    for (int64_t i = 0; i < K / LANES; i++) {
      const vec d = AT(decay, i), w = AT(write, i), qi = AT(q, i);
      UNROLLED for (int r = 0; r < rows; r++) {
        /* line 9: ((1 - beta) (x) (1 - gamma)) * C + (beta * v) (x) (gamma * k) */
        const vec c = (AT(from + r * K, i) * d) * keep[r] + w * add[r];
        AT(to + r * K, i) = c;
        if (top) sums[r] += c * qi;
      }
    }
    if (top) UNROLLED for (int r = 0; r < rows; r++) top[t * V + r] = NAME(sum_of)(sums[r]);
  }
}

/* Backwards: `adjoint` (rows, K') is the gradient of the rows after the last step, and becomes that of
 * the rows before the first. `dtop` is the gradient of C q. Adds to `d`, (steps, 3 K'), the gradients
 * of decay, write and q; writes those of `gate` and `value` to `dgate` and `dvalue`. */
static inline __attribute__((always_inline)) void NAME(galite_rows_backward)(
    REAL *restrict adjoint, const REAL *restrict path, const REAL *restrict expanded,
    const REAL *gate, const REAL *value, const REAL *dtop, int64_t steps, int64_t K, int64_t V,
    const int rows, REAL *restrict d, REAL *dgate, REAL *dvalue) {
  for (int64_t t = steps - 1; t >= 0; t--) {
    const REAL *decay = expanded + 3 * t * K, *write = decay + K, *q = write + K;
    REAL *ddecay = d + 3 * t * K, *dwrite = ddecay + K, *dq = dwrite + K;
    const REAL *before = path + t * rows * K, *after = before + rows * K;
    vec keep[BACKWARD_ROWS], add[BACKWARD_ROWS], read[BACKWARD_ROWS];
    vec dkeep[BACKWARD_ROWS], dadd[BACKWARD_ROWS];
    UNROLLED for (int r = 0; r < rows; r++) {
      keep[r] = (vec){0} + gate[t * V + r];
      add[r] = (vec){0} + value[t * V + r];
      read[r] = (vec){0} + dtop[t * V + r];
      dkeep[r] = dadd[r] = (vec){0};
    }
    for (int64_t i = 0; i < K / LANES; i++) {
      const vec di = AT(decay, i), wi = AT(write, i), qi = AT(q, i);
      vec dd = AT(ddecay, i), dw = AT(dwrite, i), dqi = AT(dq, i);
      UNROLLED for (int r = 0; r < rows; r++) {
        const vec a = AT(adjoint + r * K, i) + qi * read[r];
        dqi += AT(after + r * K, i) * read[r];
        dw += a * add[r];
        dadd[r] += a * wi;
        const vec through = a * AT(before + r * K, i), left = a * di;
        dd += through * keep[r];
        dkeep[r] += through * di;
        AT(adjoint + r * K, i) = left * keep[r];
      }
      AT(ddecay, i) = dd;
      AT(dwrite, i) = dw;
      AT(dq, i) = dqi;
    }
    UNROLLED for (int r = 0; r < rows; r++) {
      dgate[t * V + r] = NAME(sum_of)(dkeep[r]);
      dvalue[t * V + r] = NAME(sum_of)(dadd[r]);
    }
  }
}

/* A chunk's steps, ready for all rows: (steps, 3 K') multiplied out, and 1 - beta and beta v. The
 * factors of the next step are left `next` further on. */
static void NAME(galite_expand)(const galite_job *job, int64_t first, int64_t steps, int64_t lane,
                                REAL *expanded, REAL *gate, REAL *value, REAL *factors,
                                int64_t next) {
  const int64_t K = NAME(key_row)(&job->x), V = NAME(padded)(job->x.values);
  for (int64_t t = 0; t < steps; t++) {
    REAL *here = expanded + 3 * t * K, *beta = gate + t * V, *v = value + t * V;
    NAME(expand)(&job->x, first + t, lane, (gates){here, here + K, here + 2 * K},
                 factors + t * next);
    NAME(read_values)(&job->x, first + t, lane, v, beta);
    for (int64_t i = 0; i < V / LANES; i++) {
      AT(v, i) *= AT(beta, i);
      AT(beta, i) = 1 - AT(beta, i);
    }
  }
}

static void NAME(galite_forward_lane)(void *job_, int64_t lane) {
  galite_job *job = job_;
  const columns *x = &job->x;
  const int64_t L = x->lanes, E = x->narrow, W = x->wide, K = NAME(key_row)(x);
  const int64_t width = x->values, V = NAME(padded)(width), chunk = job->chunk;
  REAL *room = team_room(
      ROOM_OF_PIECE, ((width + 1 + 3 * chunk) * K + 3 * chunk * V + NAME(factors_room)(x)) * sizeof(REAL));
  if (!room) {
    job->failed = 1;
    return;
  }
  REAL *C = room, *s = C + width * K, *expanded = s + K, *gate = expanded + 3 * chunk * K;
  REAL *value = gate + chunk * V, *top = value + chunk * V, *factors = top + chunk * V;
  NAME(pack)(C, job->C + lane * width * E * W, width * E, W);
  NAME(pack)(s, job->s + lane * E * W, E, W);
  for (int64_t first = 0; first < x->steps; first += chunk) {
    const int64_t steps = first + chunk < x->steps ? chunk : x->steps - first;
    if (job->chunk_C) {
      const int64_t n = first / chunk * L + lane;
      NAME(unpack)(job->chunk_C + n * width * E * W, C, width * E, W);
      NAME(unpack)(job->chunk_s + n * E * W, s, E, W);
    }
    NAME(galite_expand)(job, first, steps, lane, expanded, gate, value, factors, 0);
    int64_t row = 0;
    for (; row + FORWARD_ROWS <= width; row += FORWARD_ROWS)
      NAME(galite_rows)(C + row * K, expanded, gate + row, value + row, steps, K, V, FORWARD_ROWS,
                        top + row, NULL);
    for (; row < width; row++)
      NAME(galite_rows)(C + row * K, expanded, gate + row, value + row, steps, K, V, 1, top + row, NULL);
    for (int64_t t = 0; t < steps; t++) {
      const int64_t at = (first + t) * L + lane;
      const REAL *decay = expanded + 3 * t * K, *write = decay + K, *q = write + K;
      for (int64_t i = 0; i < K / LANES; i++) /* line 10 */
        AT(s, i) = AT(decay, i) * AT(s, i) + AT(write, i);
      const REAL bottom = job->bottom[at] = NAME(dot)(s, q, K / LANES) + job->epsilon;
      for (int64_t i = 0; i < width; i++) /* line 11 */
        job->out[at * width + i] = top[t * V + i] / bottom;
    }
  }
  NAME(unpack)(job->last_C + lane * width * E * W, C, width * E, W);
  NAME(unpack)(job->last_s + lane * E * W, s, E, W);
}

static void NAME(galite_backward_lane)(void *job_, int64_t lane) {
  galite_job *job = job_;
  const columns *x = &job->x;
  const int64_t L = x->lanes, E = x->narrow, W = x->wide, K = NAME(key_row)(x);
  const int64_t width = x->values, V = NAME(padded)(width), chunk = job->chunk;
  const int64_t path_rows = (chunk + 1) * BACKWARD_ROWS;
  const int64_t next = NAME(factors_room)(x);
  const int64_t keys = width + 1 + 6 * chunk + path_rows + chunk + 1 + BACKWARD_ROWS;
  REAL *room = team_room(
      ROOM_OF_PIECE, (keys * K + 5 * chunk * V + 2 * V + (chunk + 1) * next) * sizeof(REAL));
  if (!room) {
    job->failed = 1;
    return;
  }
  REAL *adjoint = room, *adjoint_s = adjoint + width * K, *expanded = adjoint_s + K;
  REAL *d = expanded + 3 * chunk * K, *path = d + 3 * chunk * K, *path_s = path + path_rows * K;
  REAL *rows_of_C = path_s + (chunk + 1) * K, *gate = rows_of_C + BACKWARD_ROWS * K;
  REAL *value = gate + chunk * V, *dgate = value + chunk * V, *dvalue = dgate + chunk * V;
  REAL *dtop = dvalue + chunk * V, *v = dtop + chunk * V, *beta = v + V, *factors = beta + V;
  NAME(pack)(adjoint, job->dlast_C + lane * width * E * W, width * E, W);
  NAME(pack)(adjoint_s, job->dlast_s + lane * E * W, E, W);
  for (int64_t n = (x->steps - 1) / chunk; n >= 0; n--) {
    const int64_t first = n * chunk, steps = first + chunk < x->steps ? chunk : x->steps - first;
    const REAL *C = job->chunk_C + (n * L + lane) * width * E * W;
    NAME(galite_expand)(job, first, steps, lane, expanded, gate, value, factors, next);

    NAME(pack)(path_s, job->chunk_s + (n * L + lane) * E * W, E, W);
    for (int64_t t = 0; t < steps; t++) {
      const REAL *decay = expanded + 3 * t * K, *write = decay + K;
      for (int64_t i = 0; i < K / LANES; i++)
        AT(path_s + (t + 1) * K, i) = AT(decay, i) * AT(path_s + t * K, i) + AT(write, i);
    }
    for (int64_t t = steps - 1; t >= 0; t--) { /* s comes first: it begins the sums of `d` */
      const int64_t at = (first + t) * L + lane;
      const REAL *decay = expanded + 3 * t * K, *q = decay + 2 * K, bottom = job->bottom[at];
      REAL along = 0;
      for (int64_t i = 0; i < width; i++) {
        dtop[t * V + i] = job->dout[at * width + i] / bottom;
        along += dtop[t * V + i] * job->out[at * width + i];
      }
      for (int64_t i = 0; i < K / LANES; i++) {
        const vec a = AT(adjoint_s, i) - AT(q, i) * along;
        AT(d + 3 * t * K, i) = a * AT(path_s + t * K, i);
        AT(d + (3 * t + 1) * K, i) = a;
        AT(d + (3 * t + 2) * K, i) = -AT(path_s + (t + 1) * K, i) * along;
        AT(adjoint_s, i) = a * AT(decay, i);
      }
    }
#define THROUGH(rows)                                                                              \
  NAME(pack)(rows_of_C, C + row * E * W, (rows) * E, W);                                           \
  NAME(galite_rows)(rows_of_C, expanded, gate + row, value + row, steps, K, V, rows, NULL, path);  \
  NAME(galite_rows_backward)(adjoint + row * K, path, expanded, gate + row, value + row, dtop + row, \
                             steps, K, V, rows, d, dgate + row, dvalue + row)
    int64_t row = 0;
    for (; row + BACKWARD_ROWS <= width; row += BACKWARD_ROWS) { THROUGH(BACKWARD_ROWS); }
    for (; row < width; row++) { THROUGH(1); }
#undef THROUGH
    for (int64_t t = 0; t < steps; t++) {
      REAL *here = d + 3 * t * K, *dbeta = dgate + t * V, *dv = dvalue + t * V;
      NAME(expand_gradient)(x, first + t, lane, (gates){here, here + K, here + 2 * K}, job->dcolumns,
                            factors + t * next, factors + chunk * next);
      NAME(read_values)(x, first + t, lane, v, beta);
      for (int64_t i = 0; i < V / LANES; i++) { /* gate = 1 - beta, value = beta v */
        AT(dbeta, i) = AT(dv, i) * AT(v, i) - AT(dbeta, i);
        AT(dv, i) *= AT(beta, i);
      }
      NAME(values_gradient)(x, first + t, lane, dv, dbeta, beta, job->dcolumns);
    }
  }
  NAME(unpack)(job->dC + lane * width * E * W, adjoint, width * E, W);
  NAME(unpack)(job->ds + lane * E * W, adjoint_s, E, W);
}

/* Arguments 0 .. 3 of both handlers: columns, keep, and C and s at the beginning, or at the chunks'. */
static galite_job NAME(galite_read_frame)(const XLA_FFI_CallFrame *frame) {
  const XLA_FFI_Buffer *C = argument(frame, 2);
  return (galite_job){.x = NAME(read_columns)(frame, C->dims[C->rank - 2]),
                      .epsilon = number(frame, "epsilon"),
                      .chunk = whole(frame, "chunk")};
}

static XLA_FFI_Error *NAME(galite_forward)(XLA_FFI_CallFrame *frame) {
  galite_job job = NAME(galite_read_frame)(frame);
  job.C = argument(frame, 2)->data;
  job.s = argument(frame, 3)->data;
  job.last_C = result(frame, 0)->data;
  job.last_s = result(frame, 1)->data;
  job.out = result(frame, 2)->data;
  job.bottom = result(frame, 3)->data;
  if (frame->rets.size > 4) {
    job.chunk_C = result(frame, 4)->data;
    job.chunk_s = result(frame, 5)->data;
  }
  pool_run(frame, NAME(galite_forward_lane), &job, job.x.lanes);
  return job.failed ? failure(frame, "galite_forward: no memory left") : NULL;
}

static XLA_FFI_Error *NAME(galite_backward)(XLA_FFI_CallFrame *frame) {
  galite_job job = NAME(galite_read_frame)(frame);
  job.chunk_C = argument(frame, 2)->data;
  job.chunk_s = argument(frame, 3)->data;
  job.out = argument(frame, 4)->data;
  job.bottom = argument(frame, 5)->data;
  job.dlast_C = argument(frame, 6)->data;
  job.dlast_s = argument(frame, 7)->data;
  job.dout = argument(frame, 8)->data;
  job.dcolumns = result(frame, 0)->data;
  job.dC = result(frame, 1)->data;
  job.ds = result(frame, 2)->data;
  pool_run(frame, NAME(galite_backward_lane), &job, job.x.lanes);
  return job.failed ? failure(frame, "galite_backward: no memory left") : NULL;
}
