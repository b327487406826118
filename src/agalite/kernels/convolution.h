/* A convolution of images and its two gradients.
 *
 * Arrays: images (N, X, Y, C), weights (O, K) with K = kernel * kernel * C, outputs (N, x, y, O). Under
 * one output position lie `kernel` runs of kernel * C numbers, one on each line of the image. So images
 * are never copied into patches; bytes and images with padding are copied once. Every loop keeps a tile of sums in
 * registers: some rows (output positions, or weights) times a few vectors.
 */

#define conv NAME(conv)
#define conv_job NAME(conv_job)
#define conv_group NAME(conv_group)

/* Vectors of a tile, and its rows: as many sums as there are registers for. */
#if VECTOR_BYTES == 64
#define CONV_VECTORS 4
#else
#define CONV_VECTORS 2
#endif
#define CONV_ROWS(vectors) ((vectors) == 1 ? 8 : 6)
#define CONV_MOST_ROWS 8
/* Sums over images are made in as many parts, whatever the number of threads: then the result does
 * not depend on it. */
#define CONV_PARTS 8

typedef struct {
  int64_t images, lines, columns, channels, kernel, stride, before; /* before: padding */
  int64_t all_lines, all_columns;                                   /* with padding */
  int64_t out_lines, out_columns, outputs, wide;                    /* wide: outputs in whole vectors */
  int64_t run, wide_run;                                            /* numbers below the kernel on a line */
  int64_t positions, size, all_size;   /* outputs of an image, numbers in it, and with padding */
  REAL scale;
} conv;

typedef struct {
  conv c;
  const void *images;
  int bytes; /* images are uint8 */
  const REAL *weights; /* packed */
  const REAL *d;
  REAL *out;
  int64_t group, parts;
  atomic_int failed;
} conv_job;

/* `c` with the sizes that follow from the others; `padding`: zeros around an axis. */
static conv NAME(conv_with_sizes)(conv c, int64_t padding) {
  c.all_lines = c.lines + padding;
  c.all_columns = c.columns + padding;
  c.out_lines = (c.all_lines - c.kernel) / c.stride + 1;
  c.out_columns = (c.all_columns - c.kernel) / c.stride + 1;
  c.wide = NAME(padded)(c.outputs);
  c.run = c.kernel * c.channels;
  c.wide_run = NAME(padded)(c.run);
  c.positions = c.out_lines * c.out_columns;
  c.size = c.lines * c.columns * c.channels;
  c.all_size = c.all_lines * c.all_columns * c.channels;
  return c;
}

static conv NAME(conv_of)(const XLA_FFI_CallFrame *frame, const int64_t *images, int64_t outputs) {
  const conv c = {.images = images[0], .lines = images[1], .columns = images[2],
                  .channels = images[3], .outputs = outputs, .kernel = whole(frame, "kernel"),
                  .stride = whole(frame, "stride"), .before = whole(frame, "before"),
                  .scale = (REAL)number(frame, "scale")};
  return NAME(conv_with_sizes)(c, whole(frame, "padding"));
}

/* A matrix product: images (N, 1, 1, C). */
static conv NAME(conv_one_pixel)(const int64_t *images, int64_t outputs) {
  const conv c = {.images = images[0], .lines = 1, .columns = 1, .channels = images[3],
                  .outputs = outputs, .kernel = 1, .stride = 1, .scale = 1};
  return NAME(conv_with_sizes)(c, 0);
}

/* Where the weight of a kernel's line, column and channel is in a row of K. */
static inline int64_t NAME(conv_at)(const conv *c, int64_t line, int64_t column) {
  const int64_t s = c->stride, size = c->kernel / s;
  return ((((line / s) * size + column / s) * s + line % s) * s + column % s) * c->channels;
}

/* Weights as (K, wide), K in the order of an image's numbers. */
static void NAME(conv_pack_outputs)(const conv *c, const REAL *w, REAL *to) {
  const int64_t inputs = c->kernel * c->run;
  for (int64_t line = 0; line < c->kernel; line++)
    for (int64_t column = 0; column < c->kernel; column++) {
      const REAL *from = w + NAME(conv_at)(c, line, column);
      for (int64_t channel = 0; channel < c->channels; channel++, to += c->wide) {
        for (int64_t o = 0; o < c->outputs; o++) to[o] = from[o * inputs + channel];
        for (int64_t o = c->outputs; o < c->wide; o++) to[o] = 0;
      }
    }
}

/* Weights as (kernel, O, wide_run). */
static void NAME(conv_pack_runs)(const conv *c, const REAL *w, REAL *to) {
  const int64_t inputs = c->kernel * c->run;
  for (int64_t line = 0; line < c->kernel; line++)
    for (int64_t o = 0; o < c->outputs; o++, to += c->wide_run) {
      for (int64_t column = 0; column < c->kernel; column++)
        memcpy(to + column * c->channels, w + o * inputs + NAME(conv_at)(c, line, column),
               c->channels * sizeof(REAL));
      for (int64_t i = c->run; i < c->wide_run; i++) to[i] = 0;
    }
}

/* Some images as REAL with their padding, and where each output position begins in them. */
typedef struct {
  const REAL *images;
  int32_t *starts;
  int64_t rows;
} conv_group;

static inline int NAME(conv_in_place)(const conv_job *job) {
  return !job->bytes && job->c.all_size == job->c.size && job->c.scale == 1;
}

static inline size_t NAME(conv_room)(const conv_job *job, int images) {
  const conv *c = &job->c;
  return job->group * c->positions * sizeof(int32_t) + 64 +
         (images ? job->group * c->all_size + LANES : 0) * sizeof(REAL);
}

static int32_t *NAME(conv_starts)(const conv *c, int64_t images, int32_t *starts) {
  int32_t *start = starts;
  for (int64_t n = 0; n < images; n++)
    for (int64_t i = 0; i < c->out_lines; i++)
      for (int64_t j = 0; j < c->out_columns; j++)
        *start++ = (int32_t)(n * c->all_size +
                             (i * c->all_columns + j) * c->stride * c->channels);
  return start;
}

static void NAME(conv_read_line)(const conv_job *job, int64_t from, REAL *restrict to, int64_t n) {
  const REAL scale = job->c.scale;
  if (job->bytes) {
    const uint8_t *restrict x = (const uint8_t *)job->images + from;
    for (int64_t i = 0; i < n; i++) to[i] = (REAL)x[i] * scale;
  } else {
    const REAL *restrict x = (const REAL *)job->images + from;
    for (int64_t i = 0; i < n; i++) to[i] = x[i] * scale;
  }
}

/* `room`: conv_room. */
static conv_group NAME(conv_read)(const conv_job *job, int64_t first, int64_t images, char *room) {
  const conv *c = &job->c;
  conv_group group = {.starts = (int32_t *)room, .rows = images * c->positions};
  NAME(conv_starts)(c, images, group.starts);
  if (NAME(conv_in_place)(job)) {
    group.images = (const REAL *)job->images + first * c->size;
    return group;
  }
  REAL *to = (REAL *)(room + (job->group * c->positions * sizeof(int32_t) + 63) / 64 * 64);
  group.images = to;
  if (c->all_size == c->size) {
    NAME(conv_read_line)(job, first * c->size, to, images * c->size);
    return group;
  }
  const int64_t line = c->columns * c->channels, all_line = c->all_columns * c->channels;
  const int64_t left = c->before * c->channels, right = all_line - line - left;
  for (int64_t n = 0; n < images; n++)
    for (int64_t i = 0; i < c->all_lines; i++, to += all_line) {
      const int64_t at = i - c->before;
      if (at < 0 || at >= c->lines) {
        memset(to, 0, all_line * sizeof(REAL));
        continue;
      }
      memset(to, 0, left * sizeof(REAL));
      NAME(conv_read_line)(job, (first + n) * c->size + at * line, to + left, line);
      memset(to + left + line, 0, right * sizeof(REAL));
    }
  return group;
}

/* `fixed` is a constant wherever this is called, so that every tile has loops of its own. */
#define CONV_INLINE static inline __attribute__((always_inline))
#define CONV_EACH_VECTORS(vectors, call)      \
  do {                                        \
    if ((vectors) >= CONV_VECTORS) {          \
      call(CONV_VECTORS);                     \
    } else if (CONV_VECTORS > 2 && (vectors) == 3) { \
      call(3);                                \
    } else if ((vectors) == 2) {              \
      call(2);                                \
    } else {                                  \
      call(1);                                \
    }                                         \
  } while (0)

static inline int64_t NAME(conv_tile)(int64_t vectors) {
  return vectors < CONV_VECTORS ? vectors : CONV_VECTORS;
}

/* --- outputs ---------------------------------------------------------------------------------- */

CONV_INLINE void NAME(conv_forward_tile)(const conv *c, const conv_group *g, const REAL *weights,
                                         int64_t row, int64_t vector, REAL *out, const int vectors) {
  const int rows = CONV_ROWS(vectors);
  const REAL *x[CONV_MOST_ROWS];
  UNROLLED for (int r = 0; r < rows; r++)
    x[r] = g->images + g->starts[row + r < g->rows ? row + r : g->rows - 1];
  vec sums[CONV_MOST_ROWS][CONV_VECTORS] = {{{0}}};
  const int64_t wide = c->wide, run = c->run, skip = c->all_columns * c->channels - run;
  const REAL *w = weights + vector * LANES;
  for (int64_t line = 0; line < c->kernel; line++) {
    for (int64_t i = 0; i < run; i++, w += wide) {
      vec weight[CONV_VECTORS];
      UNROLLED for (int v = 0; v < vectors; v++) weight[v] = AT(w, v);
      UNROLLED for (int r = 0; r < rows; r++)
        UNROLLED for (int v = 0; v < vectors; v++) sums[r][v] += weight[v] * x[r][i];
    }
    UNROLLED for (int r = 0; r < rows; r++) x[r] += run + skip;
  }
  for (int r = 0; r < rows && row + r < g->rows; r++) {
    REAL *y = out + (row + r) * c->outputs + vector * LANES;
    for (int v = 0; v < vectors; v++) {
      const int64_t left = c->outputs - (vector + v) * LANES;
      if (left >= LANES)
        AT(y, v) = sums[r][v];
      else
        for (int64_t i = 0; i < left; i++) y[v * LANES + i] = sums[r][v][i];
    }
  }
}

static void NAME(conv_forward_piece)(void *job_, int64_t index) {
  conv_job *job = job_;
  const conv *c = &job->c;
  const int64_t first = index * job->group;
  const int64_t images = first + job->group < c->images ? job->group : c->images - first;
  char *room = team_room(ROOM_OF_PIECE, NAME(conv_room)(job, !NAME(conv_in_place)(job)));
  if (!room) {
    atomic_store(&job->failed, 1);
    return;
  }
  const conv_group g = NAME(conv_read)(job, first, images, room);
  REAL *out = job->out + first * c->positions * c->outputs;
  const int64_t all = c->wide / LANES;
  for (int64_t vector = 0, next; vector < all; vector = next) {
    next = vector + NAME(conv_tile)(all - vector);
#define CONV_CALL(n)                                                     \
  for (int64_t row = 0; row < g.rows; row += CONV_ROWS(n))               \
  NAME(conv_forward_tile)(c, &g, job->weights, row, vector, out, n)
    CONV_EACH_VECTORS(next - vector, CONV_CALL);
#undef CONV_CALL
  }
}

/* --- gradient of the images ------------------------------------------------------------------- */

/* left: numbers of the run from the tile's first on. */
CONV_INLINE void NAME(conv_images_tile)(const conv *c, const conv_group *g, const REAL *d,
                                        const REAL *weights, int64_t row, int64_t at, int64_t left,
                                        REAL *out, const int vectors) {
  const int rows = CONV_ROWS(vectors);
  const REAL *x[CONV_MOST_ROWS];
  UNROLLED for (int r = 0; r < rows; r++)
    x[r] = d + (row + r < g->rows ? row + r : g->rows - 1) * c->outputs;
  vec sums[CONV_MOST_ROWS][CONV_VECTORS] = {{{0}}};
  const REAL *w = weights;
  for (int64_t o = 0; o < c->outputs; o++, w += c->wide_run) {
    vec weight[CONV_VECTORS];
    UNROLLED for (int v = 0; v < vectors; v++) weight[v] = AT(w, v);
    UNROLLED for (int r = 0; r < rows; r++)
      UNROLLED for (int v = 0; v < vectors; v++) sums[r][v] += weight[v] * x[r][o];
  }
  UNROLLED for (int r = 0; r < rows; r++) {
    if (row + r >= g->rows) break;
    REAL *to = out + g->starts[row + r] + at;
    UNROLLED for (int v = 0; v < vectors; v++) {
      if (left >= (v + 1) * LANES)
        AT(to, v) += sums[r][v];
      else
        for (int64_t i = v * LANES; i < left; i++) to[i] += sums[r][v][i - v * LANES];
    }
  }
}

static void NAME(conv_images_piece)(void *job_, int64_t index) {
  conv_job *job = job_;
  const conv *c = &job->c;
  const int64_t first = index * job->group;
  const int64_t images = first + job->group < c->images ? job->group : c->images - first;
  const int direct = c->all_size == c->size;
  char *room = team_room(ROOM_OF_PIECE, NAME(conv_room)(job, !direct));
  if (!room) {
    atomic_store(&job->failed, 1);
    return;
  }
  conv_group g = {.starts = (int32_t *)room, .rows = images * c->positions};
  NAME(conv_starts)(c, images, g.starts);
  const REAL *d = job->d + first * c->positions * c->outputs;
  REAL *final = job->out + first * c->size, *out = final;
  if (!direct)
    out = (REAL *)(room + (job->group * c->positions * sizeof(int32_t) + 63) / 64 * 64);
  memset(out, 0, images * c->all_size * sizeof(REAL));
  const int64_t all = c->wide_run / LANES;
  for (int64_t line = 0; line < c->kernel; line++)
    for (int64_t vector = 0, next; vector < all; vector = next) {
      next = vector + NAME(conv_tile)(all - vector);
      const REAL *w = job->weights + line * c->outputs * c->wide_run + vector * LANES;
      const int64_t at = line * c->all_columns * c->channels + vector * LANES;
#define CONV_CALL(n)                                       \
  for (int64_t row = 0; row < g.rows; row += CONV_ROWS(n)) \
  NAME(conv_images_tile)(c, &g, d, w, row, at, c->run - vector * LANES, out, n)
      CONV_EACH_VECTORS(next - vector, CONV_CALL);
#undef CONV_CALL
    }
  if (direct) return;
  const int64_t line = c->columns * c->channels, all_line = c->all_columns * c->channels;
  for (int64_t n = 0; n < images; n++)
    for (int64_t i = 0; i < c->lines; i++)
      memcpy(final + n * c->size + i * line,
             out + n * c->all_size + (i + c->before) * all_line + c->before * c->channels,
             line * sizeof(REAL));
}

/* --- gradient of the weights ------------------------------------------------------------------ */

CONV_INLINE void NAME(conv_weights_tile)(const conv_group *g, const REAL *d, int64_t width,
                                         const REAL *images, REAL *out, int64_t wide,
                                         const int rows, const int vectors) {
  vec sums[CONV_MOST_ROWS][CONV_VECTORS] = {{{0}}};
  for (int64_t row = 0; row < g->rows; row++, d += width) {
    const REAL *x = images + g->starts[row];
    vec y[CONV_VECTORS];
    UNROLLED for (int v = 0; v < vectors; v++) y[v] = AT(d, v);
    UNROLLED for (int r = 0; r < rows; r++)
      UNROLLED for (int v = 0; v < vectors; v++) sums[r][v] += y[v] * x[r];
  }
  UNROLLED for (int r = 0; r < rows; r++)
    UNROLLED for (int v = 0; v < vectors; v++) AT(out + r * wide, v) += sums[r][v];
}

/* Part `index` of all images; job->out: (parts, K, wide). */
static void NAME(conv_weights_piece)(void *job_, int64_t index) {
  conv_job *job = job_;
  const conv *c = &job->c;
  const int64_t begin = c->images * index / job->parts, end = c->images * (index + 1) / job->parts;
  const size_t images_room = (NAME(conv_room)(job, !NAME(conv_in_place)(job)) + 63) / 64 * 64;
  const int copy = c->outputs != c->wide; /* so that rows of d are whole vectors */
  const size_t d_room = copy ? job->group * c->positions * c->wide * sizeof(REAL) : 0;
  char *room = team_room(ROOM_OF_PIECE, images_room + d_room);
  if (!room) {
    atomic_store(&job->failed, 1);
    return;
  }
  REAL *out = job->out + index * c->kernel * c->run * c->wide;
  memset(out, 0, c->kernel * c->run * c->wide * sizeof(REAL));
  const int64_t all = c->wide / LANES;
  for (int64_t first = begin; first < end; first += job->group) {
    const int64_t images = first + job->group < end ? job->group : end - first;
    const conv_group g = NAME(conv_read)(job, first, images, room);
    const REAL *d = job->d + first * c->positions * c->outputs;
    if (copy) {
      REAL *to = (REAL *)(room + images_room);
      for (int64_t row = 0; row < g.rows; row++)
        NAME(copy_row)(to + row * c->wide, d + row * c->outputs, c->outputs);
      d = to;
    }
    for (int64_t vector = 0, next; vector < all; vector = next) {
      next = vector + NAME(conv_tile)(all - vector);
      for (int64_t line = 0; line < c->kernel; line++) {
        const REAL *x = g.images + line * c->all_columns * c->channels;
        REAL *to = out + line * c->run * c->wide + vector * LANES;
        int64_t i = 0;
#define CONV_CALL(n)                                                                              \
  for (; i + CONV_ROWS(n) <= c->run; i += CONV_ROWS(n))                                           \
    NAME(conv_weights_tile)                                                                       \
  (&g, d + vector * LANES, c->wide, x + i, to + i * c->wide, c->wide, CONV_ROWS(n), n);           \
  for (; i < c->run; i++)                                                                         \
  NAME(conv_weights_tile)(&g, d + vector * LANES, c->wide, x + i, to + i * c->wide, c->wide, 1, n)
        CONV_EACH_VECTORS(next - vector, CONV_CALL);
#undef CONV_CALL
      }
    }
  }
}

/* --- handlers --------------------------------------------------------------------------------- */

/* Images at a time: two hundred positions, which fill tiles, and no more than `starts` can count. */
static int64_t NAME(conv_group_size)(const conv *c, int64_t threads) {
  int64_t group = (200 + c->positions - 1) / c->positions;
  if (group > INT32_MAX / c->all_size) group = INT32_MAX / c->all_size;
  const int64_t share = (c->images + threads - 1) / threads;
  return group < share ? group : share < 1 ? 1 : share;
}

/* Arguments: weights (O, K), images (N, X, Y, C), uint8 or as the weights. Result: (N, x, y, O). */
static XLA_FFI_Error *NAME(convolution_forward)(XLA_FFI_CallFrame *frame) {
  const XLA_FFI_Buffer *w = argument(frame, 0), *x = argument(frame, 1);
  const int64_t threads = whole(frame, "threads");
  conv_job job = {.c = NAME(conv_of)(frame, x->dims, w->dims[0]), .images = x->data,
                  .bytes = x->dtype == XLA_FFI_DataType_U8, .out = result(frame, 0)->data};
  const conv *c = &job.c;
  REAL *packed = team_room(ROOM_OF_CALLER, c->kernel * c->run * c->wide * sizeof(REAL));
  if (!packed) return failure(frame, "agalite_convolution_forward: no memory left");
  NAME(conv_pack_outputs)(c, w->data, packed);
  job.weights = packed;
  job.group = NAME(conv_group_size)(c, threads);
  pool_run(frame, NAME(conv_forward_piece), &job, (c->images + job.group - 1) / job.group);
  return job.failed ? failure(frame, "agalite_convolution_forward: no memory left") : NULL;
}

/* Arguments: weights (O, K), d (N, x, y, O). Result: (N, X, Y, C). */
static XLA_FFI_Error *NAME(convolution_images)(XLA_FFI_CallFrame *frame) {
  const XLA_FFI_Buffer *w = argument(frame, 0), *d = argument(frame, 1);
  const int64_t threads = whole(frame, "threads");
  conv_job job = {.c = NAME(conv_of)(frame, result(frame, 0)->dims, w->dims[0]), .d = d->data,
                  .out = result(frame, 0)->data};
  const conv *c = &job.c;
  REAL *packed = team_room(ROOM_OF_CALLER, c->kernel * c->outputs * c->wide_run * sizeof(REAL));
  if (!packed) return failure(frame, "agalite_convolution_images: no memory left");
  NAME(conv_pack_runs)(c, w->data, packed);
  if (c->scale != 1)
    for (int64_t i = 0; i < c->kernel * c->outputs * c->wide_run; i++) packed[i] *= c->scale;
  job.weights = packed;
  job.group = NAME(conv_group_size)(c, threads);
  pool_run(frame, NAME(conv_images_piece), &job, (c->images + job.group - 1) / job.group);
  return job.failed ? failure(frame, "agalite_convolution_images: no memory left") : NULL;
}

/* The gradient of the weights (K, wide) in job->out, which is the caller's room. */
static XLA_FFI_Error *NAME(conv_sum_weights)(const XLA_FFI_CallFrame *frame, conv_job *job) {
  const conv *c = &job->c;
  const int64_t size = c->kernel * c->run * c->wide;
  job->parts = c->images < CONV_PARTS ? (c->images ? c->images : 1) : CONV_PARTS;
  job->group = NAME(conv_group_size)(c, job->parts);
  job->out = team_room(ROOM_OF_CALLER, job->parts * size * sizeof(REAL));
  if (!job->out) return failure(frame, "agalite_convolution_weights: no memory left");
  pool_run(frame, NAME(conv_weights_piece), job, job->parts);
  if (job->failed) return failure(frame, "agalite_convolution_weights: no memory left");
  for (int64_t part = 1; part < job->parts; part++)
    for (int64_t i = 0; i < size / LANES; i++) AT(job->out, i) += AT(job->out + part * size, i);
  return NULL;
}

/* Arguments: d (N, x, y, O), images (N, X, Y, C), uint8 or as d. Result: (O, K). */
static XLA_FFI_Error *NAME(convolution_weights)(XLA_FFI_CallFrame *frame) {
  const XLA_FFI_Buffer *d = argument(frame, 0), *x = argument(frame, 1);
  conv_job job = {.c = NAME(conv_of)(frame, x->dims, d->dims[3]), .images = x->data, .d = d->data,
                  .bytes = x->dtype == XLA_FFI_DataType_U8};
  XLA_FFI_Error *error = NAME(conv_sum_weights)(frame, &job);
  if (error) return error;
  const conv *c = &job.c;
  const int64_t inputs = c->kernel * c->run;
  REAL *to = result(frame, 0)->data;
  for (int64_t line = 0; line < c->kernel; line++)
    for (int64_t column = 0; column < c->kernel; column++) {
      const REAL *from = job.out + (line * c->kernel + column) * c->channels * c->wide;
      REAL *at = to + NAME(conv_at)(c, line, column);
      for (int64_t channel = 0; channel < c->channels; channel++)
        for (int64_t o = 0; o < c->outputs; o++)
          at[o * inputs + channel] = from[channel * c->wide + o];
    }
  return NULL;
}

#undef CONV_INLINE
#undef CONV_EACH_VECTORS
#undef CONV_VECTORS
#undef CONV_ROWS
#undef CONV_MOST_ROWS
#undef CONV_PARTS
