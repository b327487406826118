/* One step of all layers of AGaLiTe for B streams (ops/agalite/native.py, step_layers). Every layer is
 *
 *     h <- gate(h, relu(attention(norm(h))));  h <- gate(h, mlp(norm(h)))
 *
 * Between the products of a step there is so little to do that XLA takes longer to start its kernels
 * than they take. Here the threads stay together from one product to the next, and the weights lie in
 * one array in the order in which they are read.
 */

#define stack_job NAME(stack_job)
#define stack_gate NAME(stack_gate)

typedef struct {
  const REAL *from_y, *from_x, *candidate, *bias;
} stack_gate;

typedef struct {
  int64_t streams, width, threads;
  product_job products[2]; /* what the threads are at */
  int count;
} stack_job;

static void NAME(stack_piece)(void *job_, int64_t index) {
  stack_job *job = job_;
  for (int i = 0; i < job->count; i++) {
    const int64_t pieces = NAME(product_pieces)(&job->products[i]);
    if (index < pieces) {
      NAME(product_piece)(&job->products[i], index);
      return;
    }
    index -= pieces;
  }
}

/* One product, or two that do not wait for each other. */
static void NAME(stack_multiply)(stack_job *job, int count) {
  int64_t pieces = 0;
  for (int i = 0; i < count; i++) pieces += NAME(product_pieces)(&job->products[i]);
  job->count = count;
  team_run(NAME(stack_piece), job, pieces, job->threads);
}

/* Layer normalisation of rows (B, D). */
static void NAME(stack_norm)(const REAL *x, const REAL *scale, const REAL *bias, REAL *y, int64_t rows,
                             int64_t width) {
  const int64_t vectors = width / LANES;
  for (int64_t r = 0; r < rows; r++, x += width, y += width) {
    vec sums = {0}, squares = {0};
    for (int64_t i = 0; i < vectors; i++) sums += AT(x, i);
    REAL mean = NAME(sum_of)(sums);
    for (int64_t i = vectors * LANES; i < width; i++) mean += x[i];
    mean /= width;
    for (int64_t i = 0; i < vectors; i++) squares += (AT(x, i) - mean) * (AT(x, i) - mean);
    REAL variance = NAME(sum_of)(squares);
    for (int64_t i = vectors * LANES; i < width; i++) variance += (x[i] - mean) * (x[i] - mean);
    const REAL precision = 1 / (REAL)sqrt(variance / width + (REAL)1e-5);
    for (int64_t i = 0; i < width; i++) y[i] = (x[i] - mean) * precision * scale[i] + bias[i];
  }
}

/* relu(x + bias), in place. */
static void NAME(stack_relu)(REAL *x, const REAL *bias, int64_t rows, int64_t width) {
  for (int64_t r = 0; r < rows; r++, x += width)
    for (int64_t i = 0; i < width; i++) {
      const REAL y = x[i] + bias[i];
      x[i] = y <= 0 ? 0 : y; /* not a number stays what it is */
    }
}

/* GTrXL's gate (memory/layers.py) of x and y (B, D), into `to`; `from_x` (B, 2 D) has been computed
 * before. Room: 5 B D, and product_room. */
static void NAME(stack_gate_run)(stack_job *job, const stack_gate *gate, const REAL *x, const REAL *y,
                                 const REAL *from_x, REAL *to, REAL *room) {
  const int64_t B = job->streams, D = job->width;
  REAL *from_y = room, *gated = from_y + 3 * B * D, *candidate = gated + B * D;
  REAL *copy = candidate + B * D;
  job->products[0] = NAME(product_of)(y, gate->from_y, from_y, B, 3 * D, D, job->threads, copy);
  NAME(stack_multiply)(job, 1);
  const int64_t vectors = D / LANES;
  for (int64_t b = 0; b < B; b++) {
    const REAL *yr = from_y + 3 * b * D, *xr = from_x + 2 * b * D;
    for (int64_t i = 0; i < vectors; i++)
      AT(gated + b * D, i) = NAME(sigmoid)(AT(yr, i) + AT(xr, i)) * AT(x + b * D, i);
    for (int64_t i = vectors * LANES; i < D; i++) {
      const vec r = NAME(sigmoid)((vec){0} + (yr[i] + xr[i]));
      gated[b * D + i] = r[0] * x[b * D + i];
    }
  }
  job->products[0] = NAME(product_of)(gated, gate->candidate, candidate, B, D, D, job->threads, copy);
  NAME(stack_multiply)(job, 1);
  for (int64_t b = 0; b < B; b++) {
    const REAL *yz = from_y + (3 * b + 1) * D, *yh = yz + D, *xz = from_x + (2 * b + 1) * D;
    const REAL *h = candidate + b * D, *old = x + b * D;
    for (int64_t i = 0; i < vectors; i++) {
      const vec z = NAME(sigmoid)(AT(yz, i) + AT(xz, i) - AT(gate->bias, i));
      AT(to + b * D, i) = AT(old, i) + z * (NAME(tanh_)(AT(yh, i) + AT(h, i)) - AT(old, i));
    }
    for (int64_t i = vectors * LANES; i < D; i++) {
      const vec z = NAME(sigmoid)((vec){0} + (yz[i] + xz[i] - gate->bias[i]));
      const vec new = NAME(tanh_)((vec){0} + (yh[i] + h[i]));
      to[b * D + i] = old[i] + z[0] * (new[0] - old[i]);
    }
  }
}

/* The next `count` weights. */
static inline const REAL *NAME(next_weights)(const REAL **at, int64_t count) {
  const REAL *here = *at;
  *at += count;
  return here;
}

/* Arguments: h (B, D); all weights, layer by layer, as they are read below; keys (B, Y, H, Rk, K) and
 * values (B, Y, H, R, V) of Y layers; oscillators (B, Rk), keep (B); numerator, denominator.
 * Results: h, keys, values. Attributes: narrow (E), hidden (of the MLP), epsilon. */
static XLA_FFI_Error *NAME(stack)(XLA_FFI_CallFrame *frame) {
  const XLA_FFI_Buffer *h_ = argument(frame, 0), *keys_ = argument(frame, 2);
  const int64_t B = h_->dims[0], D = h_->dims[1], Y = keys_->dims[1], H = keys_->dims[2];
  const int64_t Rk = keys_->dims[3], K = keys_->dims[4], E = whole(frame, "narrow"), W = K / E;
  const int64_t R = argument(frame, 3)->dims[3], V = argument(frame, 3)->dims[4];
  const int64_t F = whole(frame, "hidden"), N = 3 * W + 2 * V + 3 * E, T = whole(frame, "threads");
  const REAL *weights = argument(frame, 1)->data, *keys = keys_->data;
  const REAL *values = argument(frame, 3)->data, *osc = argument(frame, 4)->data;
  const REAL *keep = argument(frame, 5)->data;
  REAL *h = result(frame, 0)->data, *new_keys = result(frame, 1)->data;
  REAL *new_values = result(frame, 2)->data;
  const int64_t all_keys = H * Rk * K, all_values = H * R * V; /* of a layer of a stream */

  const int64_t widest = D > H * V ? (D > F ? D : F) : (H * V > F ? H * V : F);
  const int64_t copies = NAME(product_room)(B, widest);
  REAL *room = team_room(ROOM_OF_CALLER,
                         (B * (2 * D + H * (N + V + 2 * Rk + 1) + F + 2 * D + all_keys + all_values +
                               5 * D) +
                          2 * copies) *
                             sizeof(REAL));
  if (!room) return failure(frame, "agalite_stack: no memory left");
  REAL *normed = room, *middle = normed + B * D, *projected = middle + B * D;
  REAL *attended = projected + B * H * N, *lane_osc = attended + B * H * V;
  REAL *scores = lane_osc + B * H * Rk, *lane_keep = scores + B * H * Rk;
  REAL *hidden = lane_keep + B * H, *from_x = hidden + B * F, *lane_keys = from_x + 2 * B * D;
  REAL *lane_values = lane_keys + B * all_keys, *copy = lane_values + B * all_values;
  REAL *copy_x = copy + copies, *rest = copy_x; /* from_x is done before the gate needs room */

  for (int64_t lane = 0; lane < B * H; lane++) {
    lane_keep[lane] = keep[lane / H];
    memcpy(lane_osc + lane * Rk, osc + lane / H * Rk, Rk * sizeof(REAL));
  }
  agalite_job attention = {
      .x = {.data = projected, .keep = lane_keep, .steps = 1, .lanes = B * H, .narrow = E, .wide = W,
            .values = V, .activate = 1},
      .osc = lane_osc, .numerator = argument(frame, 6)->data,
      .denominator = argument(frame, 7)->data, .epsilon = number(frame, "epsilon"),
      .key_vectors = Rk, .value_vectors = R, .chunk = 1, .group = (B * H + T - 1) / T,
      .keys = lane_keys, .values = lane_values, .out = attended, .scores = scores,
      .last_keys = lane_keys, .last_values = lane_values};
  stack_job job = {.streams = B, .width = D, .threads = T};
  memcpy(h, h_->data, B * D * sizeof(REAL));
  for (int64_t layer = 0; layer < Y; layer++) {
#define NEXT(count) NAME(next_weights)(&weights, count)
    stack_gate gate;
    const REAL *scale = NEXT(D), *bias = NEXT(D), *weight = NEXT(H * N * D);
    const REAL *project_bias = NEXT(H * N);
    gate.from_x = NEXT(2 * D * D);
    NAME(stack_norm)(h, scale, bias, normed, B, D);
    job.products[0] = NAME(product_of)(normed, weight, projected, B, H * N, D, T, copy);
    job.products[1] = NAME(product_of)(h, gate.from_x, from_x, B, 2 * D, D, T, copy_x);
    NAME(stack_multiply)(&job, 2);

    for (int64_t b = 0; b < B; b++) {
      for (int64_t i = 0; i < H * N; i++) projected[b * H * N + i] += project_bias[i];
      const int64_t at = b * Y + layer;
      if (keep[b] == 0) { /* not even an infinite state survives a reset */
        memset(lane_keys + b * all_keys, 0, all_keys * sizeof(REAL));
        memset(lane_values + b * all_values, 0, all_values * sizeof(REAL));
      } else {
        memcpy(lane_keys + b * all_keys, keys + at * all_keys, all_keys * sizeof(REAL));
        memcpy(lane_values + b * all_values, values + at * all_values, all_values * sizeof(REAL));
      }
    }
    team_run(NAME(agalite_forward_lanes), &attention,
             (B * H + attention.group - 1) / attention.group, T);
    if (attention.failed) return failure(frame, "agalite_stack: no memory left");
    for (int64_t b = 0; b < B; b++) {
      const int64_t at = b * Y + layer;
      memcpy(new_keys + at * all_keys, lane_keys + b * all_keys, all_keys * sizeof(REAL));
      memcpy(new_values + at * all_values, lane_values + b * all_values, all_values * sizeof(REAL));
    }

    weight = NEXT(D * H * V);
    bias = NEXT(D);
    job.products[0] = NAME(product_of)(attended, weight, normed, B, D, H * V, T, copy);
    NAME(stack_multiply)(&job, 1);
    NAME(stack_relu)(normed, bias, B, D);
    gate.from_y = NEXT(3 * D * D);
    gate.candidate = NEXT(D * D);
    gate.bias = NEXT(D);
    NAME(stack_gate_run)(&job, &gate, h, normed, from_x, middle, rest);

    scale = NEXT(D);
    bias = NEXT(D);
    weight = NEXT(F * D);
    const REAL *into_bias = NEXT(F);
    gate.from_x = NEXT(2 * D * D);
    NAME(stack_norm)(middle, scale, bias, normed, B, D);
    job.products[0] = NAME(product_of)(normed, weight, hidden, B, F, D, T, copy);
    job.products[1] = NAME(product_of)(middle, gate.from_x, from_x, B, 2 * D, D, T, copy_x);
    NAME(stack_multiply)(&job, 2);
    NAME(stack_relu)(hidden, into_bias, B, F);
    weight = NEXT(D * F);
    bias = NEXT(D);
    job.products[0] = NAME(product_of)(hidden, weight, normed, B, D, F, T, copy);
    NAME(stack_multiply)(&job, 1);
    NAME(stack_relu)(normed, bias, B, D);
    gate.from_y = NEXT(3 * D * D);
    gate.candidate = NEXT(D * D);
    gate.bias = NEXT(D);
    NAME(stack_gate_run)(&job, &gate, middle, normed, from_x, h, rest);
#undef NEXT
  }
  return NULL;
}
