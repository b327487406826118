/* Rows that are mostly zeros times a weight: y (N, out) = x (N, in) W, W (in, out), and the gradient of W.
 *
 * One-hot observations (Craftax has 8268 numbers, about 300 of which are not zero) read only the rows of
 * W that count. Both loops go over blocks of inputs whose part of W stays in the second cache. Rows that
 * turn out to be dense are multiplied as a convolution of one pixel.
 */

#define sparse_job NAME(sparse_job)

/* Of the numbers that are looked at, so many may be other than zero. */
#define SPARSE_MOST 0.125
#define SPARSE_VECTORS 8

typedef struct {
  const REAL *x, *w, *d;
  REAL *out;
  int64_t rows, inputs, outputs, wide; /* wide: outputs in whole vectors */
  int64_t block, row_block;
  atomic_int failed;
} sparse_job;

/* Where numbers of x[begin .. end) are not zero. Returns how many. */
static int64_t NAME(sparse_find)(const REAL *x, int64_t begin, int64_t end, int32_t *found) {
  int64_t count = 0, i = begin;
#if REAL_BITS == 32 && defined(__AVX512F__)
  for (; i + 16 <= end; i += 16) {
    const __m512 block = _mm512_loadu_ps(x + i);
    unsigned mask = _mm512_cmp_ps_mask(block, _mm512_setzero_ps(), _CMP_NEQ_UQ);
    for (; mask; mask &= mask - 1) found[count++] = (int32_t)i + __builtin_ctz(mask);
  }
#else
  for (; i + 16 <= end; i += 16) {
    INTEGER any = 0;
    for (int j = 0; j < 16; j++) any |= x[i + j] != 0;
    if (!any) continue;
    for (int j = 0; j < 16; j++)
      if (x[i + j] != 0) found[count++] = (int32_t)(i + j);
  }
#endif
  for (; i < end; i++)
    if (x[i] != 0) found[count++] = (int32_t)i;
  return count;
}

static int NAME(sparse_is)(const sparse_job *job) {
  const int64_t step = job->rows / 16 + 1;
  int64_t seen = 0, other = 0;
  for (int64_t row = 0; row < job->rows; row += step, seen += job->inputs)
    for (int64_t i = 0; i < job->inputs; i++) other += job->x[row * job->inputs + i] != 0;
  return other <= SPARSE_MOST * seen;
}

static inline __attribute__((always_inline)) void NAME(sparse_add_tile)(
    const REAL *x, const int32_t *found, int64_t count, const REAL *w, int64_t outputs, REAL *y,
    const int vectors) {
  vec sums[SPARSE_VECTORS];
  UNROLLED for (int v = 0; v < vectors; v++) sums[v] = AT(y, v);
  for (int64_t n = 0; n < count; n++) {
    const REAL *row = w + found[n] * outputs, number = x[found[n]];
    UNROLLED for (int v = 0; v < vectors; v++) sums[v] += AT(row, v) * number;
  }
  UNROLLED for (int v = 0; v < vectors; v++) AT(y, v) = sums[v];
}

/* y += x[found] W[found]. */
static void NAME(sparse_add)(const REAL *x, const int32_t *found, int64_t count, const REAL *w,
                             int64_t outputs, REAL *y) {
  int64_t o = 0;
  for (; o + SPARSE_VECTORS * LANES <= outputs; o += SPARSE_VECTORS * LANES)
    NAME(sparse_add_tile)(x, found, count, w + o, outputs, y + o, SPARSE_VECTORS);
  for (; o + LANES <= outputs; o += LANES)
    NAME(sparse_add_tile)(x, found, count, w + o, outputs, y + o, 1);
  for (; o < outputs; o++)
    for (int64_t n = 0; n < count; n++) y[o] += w[found[n] * outputs + o] * x[found[n]];
}

static void NAME(sparse_forward_piece)(void *job_, int64_t index) {
  sparse_job *job = job_;
  const int64_t begin = index * job->row_block;
  const int64_t end = begin + job->row_block < job->rows ? begin + job->row_block : job->rows;
  int32_t *found = team_room(ROOM_OF_PIECE, job->block * sizeof(int32_t));
  if (!found) {
    atomic_store(&job->failed, 1);
    return;
  }
  memset(job->out + begin * job->outputs, 0, (end - begin) * job->outputs * sizeof(REAL));
  for (int64_t from = 0; from < job->inputs; from += job->block) {
    const int64_t to = from + job->block < job->inputs ? from + job->block : job->inputs;
    for (int64_t row = begin; row < end; row++) {
      const REAL *x = job->x + row * job->inputs;
      const int64_t count = NAME(sparse_find)(x, from, to, found);
      NAME(sparse_add)(x, found, count, job->w, job->outputs, job->out + row * job->outputs);
    }
  }
}

/* A block of inputs, for all rows: sums are made in the order of the rows on any number of threads. */
static void NAME(sparse_weights_piece)(void *job_, int64_t index) {
  sparse_job *job = job_;
  const int64_t from = index * job->block, outputs = job->outputs;
  const int64_t to = from + job->block < job->inputs ? from + job->block : job->inputs;
  int32_t *found = team_room(ROOM_OF_PIECE, job->block * sizeof(int32_t));
  if (!found) {
    atomic_store(&job->failed, 1);
    return;
  }
  memset(job->out + from * outputs, 0, (to - from) * outputs * sizeof(REAL));
  for (int64_t row = 0; row < job->rows; row++) {
    const REAL *x = job->x + row * job->inputs, *d = job->d + row * outputs;
    const int64_t count = NAME(sparse_find)(x, from, to, found);
    for (int64_t n = 0; n < count; n++) {
      REAL *restrict w = job->out + found[n] * outputs;
      const REAL number = x[found[n]];
      for (int64_t o = 0; o < outputs; o++) w[o] += d[o] * number;
    }
  }
}

/* Inputs whose part of the weight takes half a megabyte. */
static int64_t NAME(sparse_block)(int64_t inputs, int64_t outputs) {
  int64_t block = 524288 / ((outputs < 1 ? 1 : outputs) * (int64_t)sizeof(REAL));
  if (block > inputs) block = inputs;
  return block < 1 ? 1 : block;
}

static XLA_FFI_Error *NAME(sparse_failed)(const XLA_FFI_CallFrame *frame) {
  return failure(frame, "agalite_sparse: no memory left");
}

/* Arguments: x (N, in), w (in, out). Result: (N, out). */
static XLA_FFI_Error *NAME(sparse_forward)(XLA_FFI_CallFrame *frame) {
  const XLA_FFI_Buffer *x = argument(frame, 0), *w = argument(frame, 1);
  sparse_job job = {.x = x->data, .w = w->data, .out = result(frame, 0)->data,
                    .rows = x->dims[0], .inputs = x->dims[1], .outputs = w->dims[1]};
  const int64_t threads = whole(frame, "threads");
  if (NAME(sparse_is)(&job)) {
    job.block = NAME(sparse_block)(job.inputs, job.outputs);
    job.row_block = (job.rows + 2 * threads - 1) / (2 * threads);
    if (job.row_block < 1) job.row_block = 1;
    pool_run(frame, NAME(sparse_forward_piece), &job,
             (job.rows + job.row_block - 1) / job.row_block);
    return job.failed ? NAME(sparse_failed)(frame) : NULL;
  }
  const int64_t shape[] = {job.rows, 1, 1, job.inputs};
  conv_job dense = {.c = NAME(conv_one_pixel)(shape, job.outputs), .images = job.x, .out = job.out};
  dense.weights = job.w;
  if (dense.c.wide != job.outputs) {
    REAL *packed = team_room(ROOM_OF_CALLER, job.inputs * dense.c.wide * sizeof(REAL));
    if (!packed) return NAME(sparse_failed)(frame);
    for (int64_t i = 0; i < job.inputs; i++)
      NAME(copy_row)(packed + i * dense.c.wide, job.w + i * job.outputs, job.outputs);
    dense.weights = packed;
  }
  dense.group = NAME(conv_group_size)(&dense.c, threads);
  pool_run(frame, NAME(conv_forward_piece), &dense, (job.rows + dense.group - 1) / dense.group);
  return dense.failed ? NAME(sparse_failed)(frame) : NULL;
}

/* Arguments: x (N, in), d (N, out). Result: (in, out). */
static XLA_FFI_Error *NAME(sparse_weights)(XLA_FFI_CallFrame *frame) {
  const XLA_FFI_Buffer *x = argument(frame, 0), *d = argument(frame, 1);
  sparse_job job = {.x = x->data, .d = d->data, .out = result(frame, 0)->data,
                    .rows = x->dims[0], .inputs = x->dims[1], .outputs = d->dims[1]};
  if (NAME(sparse_is)(&job)) {
    job.block = NAME(sparse_block)(job.inputs, job.outputs);
    pool_run(frame, NAME(sparse_weights_piece), &job, (job.inputs + job.block - 1) / job.block);
    return job.failed ? NAME(sparse_failed)(frame) : NULL;
  }
  const int64_t shape[] = {job.rows, 1, 1, job.inputs};
  conv_job dense = {.c = NAME(conv_one_pixel)(shape, job.outputs), .images = job.x, .d = job.d};
  XLA_FFI_Error *error = NAME(conv_sum_weights)(frame, &dense);
  if (error) return error;
  for (int64_t i = 0; i < job.inputs; i++)
    NAME(store_row)(job.out + i * job.outputs, dense.out + i * dense.c.wide, job.outputs);
  return NULL;
}

#undef SPARSE_MOST
#undef SPARSE_VECTORS
