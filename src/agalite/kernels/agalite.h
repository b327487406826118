/* AGaLiTe's attention (Algorithm 4): ops/agalite_native.py.
 *
 * The running sums k~ (Rk, K) and v~ (R, V) of a lane stay in the first cache for the whole sequence.
 * For the gradient they are kept every `chunk` steps; each chunk's trajectory is rebuilt from there.
 * A few neighbouring lanes are taken at a time, because what they read and write lies side by side.
 */

#define agalite_job NAME(agalite_job)
#define agalite_sums NAME(agalite_sums)

typedef struct {
  REAL *keys, *values; /* (Rk, K') and (R, V') */
} agalite_sums;

typedef struct {
  columns x;
  const REAL *osc, *numerator, *denominator; /* (T, L, Rk), (R), (Rk) */
  REAL epsilon;
  int64_t key_vectors, value_vectors, chunk, group;
  REAL *keys, *values;             /* first sums: (L, Rk, E, W), (L, R, V) */
  REAL *out, *scores;              /* (T, L, V), (T, L, Rk) */
  REAL *last_keys, *last_values;
  REAL *chunk_keys, *chunk_values; /* at the start of each chunk: (N, L, ...); may be NULL */
  const REAL *dlast_keys, *dlast_values, *dout;
  REAL *dcolumns, *dkeys, *dvalues;
  int failed;
} agalite_job;

/* Lines 7-12: the sums after a step; `to` may be `from`. */
static inline void NAME(agalite_advance)(const agalite_job *job, agalite_sums from, agalite_sums to,
                                         gates g, const REAL *v, const REAL *beta, REAL keep,
                                         const REAL *osc) {
  const int64_t K = NAME(key_row)(&job->x), V = NAME(padded)(job->x.values);
  for (int64_t r = 0; r < job->key_vectors; r++)
    for (int64_t i = 0; i < K / LANES; i++)
      AT(to.keys + r * K, i) =
          AT(g.decay, i) * AT(from.keys + r * K, i) + AT(g.write, i) * osc[r];
  for (int64_t i = 0; i < V / LANES; i++) {
    const vec decay = keep - AT(beta, i) * keep, write = AT(beta, i) * AT(v, i);
    for (int64_t r = 0; r < job->value_vectors; r++)
      AT(to.values + r * V, i) = decay * AT(from.values + r * V, i) + write * osc[r];
  }
}

/* Lines 14-16: how much of each v~ is in the output, from the scores k~ . q. Returns line 15's b. */
static inline REAL NAME(agalite_mixture)(const agalite_job *job, const REAL *scores, REAL *mixture) {
  REAL bottom = job->epsilon;
  for (int64_t r = 0; r < job->key_vectors; r++) bottom += job->denominator[r] * scores[r];
  for (int64_t r = 0; r < job->value_vectors; r++)
    mixture[r] = job->numerator[r] * scores[r] / bottom;
  return bottom;
}

/* What a step reads off the sums: scores (Rk), out (V'). `mixture`: room for R. */
static inline void NAME(agalite_read)(const agalite_job *job, agalite_sums sums, const REAL *q,
                                      REAL *scores, REAL *mixture, REAL *out) {
  const int64_t K = NAME(key_row)(&job->x), V = NAME(padded)(job->x.values);
  for (int64_t r = 0; r < job->key_vectors; r++)
    scores[r] = NAME(dot)(sums.keys + r * K, q, K / LANES);
  NAME(agalite_mixture)(job, scores, mixture);
  for (int64_t i = 0; i < V / LANES; i++) {
    vec a = {0};
    for (int64_t r = 0; r < job->value_vectors; r++) a += AT(sums.values + r * V, i) * mixture[r];
    AT(out, i) = a;
  }
}

#define SUMS(at) ((agalite_sums){at, (at) + Rk * K})
#define GATES(at) ((gates){at, (at) + K, (at) + 2 * K})

static void NAME(agalite_forward_lanes)(void *job_, int64_t group) {
  agalite_job *job = job_;
  const columns *x = &job->x;
  const int64_t L = x->lanes, E = x->narrow, W = x->wide, K = NAME(key_row)(x);
  const int64_t Rk = job->key_vectors, R = job->value_vectors;
  const int64_t width = x->values, V = NAME(padded)(width), factors = NAME(factors_room)(x);
  const int64_t begin = group * job->group, end = begin + job->group < L ? begin + job->group : L;
  const int64_t sums = Rk * K + R * V;
  REAL *room =
      team_room(ROOM_OF_PIECE, ((end - begin) * sums + 3 * K + factors + 3 * V + Rk + R) * sizeof(REAL));
  if (!room) {
    job->failed = 1;
    return;
  }
#define LANE(lane) SUMS(room + ((lane) - begin) * sums)
  REAL *expanded = room + (end - begin) * sums, *wide = expanded + 3 * K, *v = wide + factors;
  REAL *beta = v + V, *out = beta + V, *scores = out + V, *mixture = scores + Rk;
  const gates g = GATES(expanded);
  for (int64_t lane = begin; lane < end; lane++) {
    NAME(pack)(LANE(lane).keys, job->keys + lane * Rk * E * W, Rk * E, W);
    NAME(pack)(LANE(lane).values, job->values + lane * R * width, R, width);
  }
  for (int64_t t = 0; t < x->steps; t++)
    for (int64_t lane = begin; lane < end; lane++) {
      const int64_t at = t * L + lane;
      const agalite_sums here = LANE(lane);
      if (job->chunk_keys && t % job->chunk == 0) {
        const int64_t n = t / job->chunk * L + lane;
        NAME(unpack)(job->chunk_keys + n * Rk * E * W, here.keys, Rk * E, W);
        NAME(unpack)(job->chunk_values + n * R * width, here.values, R, width);
      }
      NAME(expand)(x, t, lane, g, wide);
      NAME(read_values)(x, t, lane, v, beta);
      NAME(agalite_advance)(job, here, here, g, v, beta, x->keep[at], job->osc + at * Rk);
      NAME(agalite_read)(job, here, g.q, scores, mixture, out);
      NAME(store_row)(job->out + at * width, out, width);
      NAME(store_row)(job->scores + at * Rk, scores, Rk);
    }
  for (int64_t lane = begin; lane < end; lane++) {
    NAME(unpack)(job->last_keys + lane * Rk * E * W, LANE(lane).keys, Rk * E, W);
    NAME(unpack)(job->last_values + lane * R * width, LANE(lane).values, R, width);
  }
#undef LANE
}

static void NAME(agalite_backward_lanes)(void *job_, int64_t group) {
  agalite_job *job = job_;
  const columns *x = &job->x;
  const int64_t L = x->lanes, E = x->narrow, W = x->wide, K = NAME(key_row)(x);
  const int64_t Rk = job->key_vectors, R = job->value_vectors, chunk = job->chunk;
  const int64_t width = x->values, V = NAME(padded)(width), factors = NAME(factors_room)(x);
  const int64_t begin = group * job->group, end = begin + job->group < L ? begin + job->group : L;
  const int64_t sums = Rk * K + R * V;
  const int64_t step_room = 3 * K + 2 * V + factors, lane_room = (chunk + 2) * sums + chunk * step_room;
  REAL *room = team_room(
      ROOM_OF_PIECE, ((end - begin) * lane_room + 3 * K + factors + 3 * V + 3 * Rk) * sizeof(REAL));
  if (!room) {
    job->failed = 1;
    return;
  }
  /* Of each lane: the adjoint, the sums before each step and after the last, and of each
   * step what was expanded, v, beta and the factors. */
#define LANE(lane) (room + ((lane) - begin) * lane_room)
#define PATH(lane, i) SUMS(LANE(lane) + (1 + (i)) * sums)
#define EXPANDED(lane, i) (LANE(lane) + (chunk + 2) * sums + (i) * step_room)
  REAL *gradients = room + (end - begin) * lane_room, *dfactors = gradients + 3 * K;
  REAL *dv = dfactors + factors, *dbeta = dv + V, *dout = dbeta + V;
  REAL *mixture = dout + V, *dmixture = mixture + Rk, *dscores = dmixture + Rk;
  const gates d = GATES(gradients);
  for (int64_t lane = begin; lane < end; lane++) {
    NAME(pack)(LANE(lane), job->dlast_keys + lane * Rk * E * W, Rk * E, W);
    NAME(pack)(LANE(lane) + Rk * K, job->dlast_values + lane * R * width, R, width);
  }
  for (int64_t n = (x->steps - 1) / chunk; n >= 0; n--) {
    const int64_t first = n * chunk, last = first + chunk < x->steps ? first + chunk : x->steps;
    for (int64_t lane = begin; lane < end; lane++) {
      const agalite_sums start = PATH(lane, 0);
      NAME(pack)(start.keys, job->chunk_keys + (n * L + lane) * Rk * E * W, Rk * E, W);
      NAME(pack)(start.values, job->chunk_values + (n * L + lane) * R * width, R, width);
    }
    for (int64_t t = first; t < last; t++)
      for (int64_t lane = begin; lane < end; lane++) {
        const int64_t at = t * L + lane, i = t - first;
        REAL *expanded = EXPANDED(lane, i), *v = expanded + 3 * K, *beta = v + V;
        NAME(expand)(x, t, lane, GATES(expanded), beta + V);
        NAME(read_values)(x, t, lane, v, beta);
        NAME(agalite_advance)(job, PATH(lane, i), PATH(lane, i + 1), GATES(expanded), v, beta,
                              x->keep[at], job->osc + at * Rk);
      }
    for (int64_t t = last - 1; t >= first; t--)
      for (int64_t lane = begin; lane < end; lane++) {
        const int64_t at = t * L + lane, i = t - first;
        const agalite_sums before = PATH(lane, i), now = PATH(lane, i + 1);
        const agalite_sums adjoint = SUMS(LANE(lane));
        REAL *expanded = EXPANDED(lane, i), *v = expanded + 3 * K, *beta = v + V;
        const gates g = GATES(expanded);
        const REAL *osc = job->osc + at * Rk, keep = x->keep[at];
        NAME(copy_row)(dout, job->dout + at * width, width);
        /* mixture = numerator score / bottom, bottom = denominator . scores + epsilon */
        const REAL bottom = NAME(agalite_mixture)(job, job->scores + at * Rk, mixture);
        REAL along = 0;
        for (int64_t r = 0; r < R; r++) {
          dmixture[r] = NAME(dot)(dout, now.values + r * V, V / LANES);
          along += dmixture[r] * mixture[r];
        }
        for (int64_t r = 0; r < Rk; r++) {
          const REAL top = r < R ? job->numerator[r] * dmixture[r] : 0;
          dscores[r] = (top - job->denominator[r] * along) / bottom;
        }
        for (int64_t j = 0; j < K / LANES; j++) {
          vec dq = {0}, dwrite = {0}, ddecay = {0};
          for (int64_t r = 0; r < Rk; r++) {
            const vec a = AT(adjoint.keys + r * K, j) + AT(g.q, j) * dscores[r];
            dq += AT(now.keys + r * K, j) * dscores[r];
            dwrite += a * osc[r];
            ddecay += a * AT(before.keys + r * K, j);
            AT(adjoint.keys + r * K, j) = a * AT(g.decay, j);
          }
          AT(d.q, j) = dq;
          AT(d.write, j) = dwrite;
          AT(d.decay, j) = ddecay;
        }
        NAME(expand_gradient)(x, t, lane, d, job->dcolumns, beta + V, dfactors);

        for (int64_t j = 0; j < V / LANES; j++) {
          vec dwrite = {0}, ddecay = {0};
          const vec decay = keep - AT(beta, j) * keep;
          for (int64_t r = 0; r < R; r++) {
            const vec a = AT(adjoint.values + r * V, j) + AT(dout, j) * mixture[r];
            dwrite += a * osc[r];
            ddecay += a * AT(before.values + r * V, j);
            AT(adjoint.values + r * V, j) = a * decay;
          }
          AT(dv, j) = dwrite * AT(beta, j);
          AT(dbeta, j) = dwrite * AT(v, j) - ddecay * keep;
        }
        NAME(values_gradient)(x, t, lane, dv, dbeta, beta, job->dcolumns);
      }
  }
  for (int64_t lane = begin; lane < end; lane++) {
    NAME(unpack)(job->dkeys + lane * Rk * E * W, LANE(lane), Rk * E, W);
    NAME(unpack)(job->dvalues + lane * R * width, LANE(lane) + Rk * K, R, width);
  }
#undef LANE
#undef PATH
#undef EXPANDED
}

#undef SUMS
#undef GATES

/* Arguments 0 .. 6 of both handlers: columns, keep, osc, numerator, denominator, and two arrays of the
 * running sums' shapes, at the beginning or at the chunks' beginnings. */
static agalite_job NAME(agalite_read_frame)(const XLA_FFI_CallFrame *frame) {
  const XLA_FFI_Buffer *values = argument(frame, 6);
  return (agalite_job){
      .x = NAME(read_columns)(frame, values->dims[values->rank - 1]),
      .osc = argument(frame, 2)->data,
      .numerator = argument(frame, 3)->data,
      .denominator = argument(frame, 4)->data,
      .epsilon = number(frame, "epsilon"),
      .key_vectors = argument(frame, 4)->dims[0],
      .value_vectors = argument(frame, 3)->dims[0],
      .chunk = whole(frame, "chunk"),
      .group = whole(frame, "group"),
  };
}

static XLA_FFI_Error *NAME(agalite_forward)(XLA_FFI_CallFrame *frame) {
  agalite_job job = NAME(agalite_read_frame)(frame);
  job.keys = argument(frame, 5)->data;
  job.values = argument(frame, 6)->data;
  job.last_keys = result(frame, 0)->data;
  job.last_values = result(frame, 1)->data;
  job.out = result(frame, 2)->data;
  job.scores = result(frame, 3)->data;
  if (frame->rets.size > 4) {
    job.chunk_keys = result(frame, 4)->data;
    job.chunk_values = result(frame, 5)->data;
  }
  pool_run(frame, NAME(agalite_forward_lanes), &job, (job.x.lanes + job.group - 1) / job.group);
  return job.failed ? failure(frame, "agalite_forward: no memory left") : NULL;
}

static XLA_FFI_Error *NAME(agalite_backward)(XLA_FFI_CallFrame *frame) {
  agalite_job job = NAME(agalite_read_frame)(frame);
  job.chunk_keys = argument(frame, 5)->data;
  job.chunk_values = argument(frame, 6)->data;
  job.scores = argument(frame, 7)->data;
  job.dlast_keys = argument(frame, 8)->data;
  job.dlast_values = argument(frame, 9)->data;
  job.dout = argument(frame, 10)->data;
  job.dcolumns = result(frame, 0)->data;
  job.dkeys = result(frame, 1)->data;
  job.dvalues = result(frame, 2)->data;
  pool_run(frame, NAME(agalite_backward_lanes), &job, (job.x.lanes + job.group - 1) / job.group);
  return job.failed ? failure(frame, "agalite_backward: no memory left") : NULL;
}
