/* Rows whose first numbers are 0 or 1 and kept as bits, times a weight: y (N, out) = [bits, rest] W, W (in, out),
 * and the gradient of W. Bits (N, words) of 32; the rest (N, R) are the last R of a row's numbers.
 *
 * A Craftax observation takes 1.2 kB so, where its 8268 floats take 33: what is read is the weight. As in sparse.h,
 * both loops go over blocks of inputs whose part of W stays in the second cache.
 */

#define bits_job NAME(bits_job)

typedef struct {
  const uint32_t *bits;
  const REAL *rest, *w, *d;
  REAL *out;
  int64_t rows, words, others, inputs, outputs;
  int64_t block, row_block; /* block: in words */
  atomic_int failed;
} bits_job;

/* Which of the numbers in words [begin .. end) are 1. Returns how many. */
static int64_t NAME(bits_find)(const uint32_t *bits, int64_t begin, int64_t end, int32_t *found) {
  int64_t count = 0;
  for (int64_t i = begin; i < end; i++)
    for (uint32_t word = bits[i]; word; word &= word - 1)
      found[count++] = (int32_t)(32 * i) + __builtin_ctz(word);
  return count;
}

static inline __attribute__((always_inline)) void NAME(bits_add_tile)(
    const int32_t *found, int64_t count, const REAL *w, int64_t outputs, REAL *y, const int vectors) {
  vec sums[8];
  UNROLLED for (int v = 0; v < vectors; v++) sums[v] = AT(y, v);
  for (int64_t n = 0; n < count; n++) {
    const REAL *row = w + found[n] * outputs;
    UNROLLED for (int v = 0; v < vectors; v++) sums[v] += AT(row, v);
  }
  UNROLLED for (int v = 0; v < vectors; v++) AT(y, v) = sums[v];
}

/* y += the sum of W[found]. */
static void NAME(bits_add)(const int32_t *found, int64_t count, const REAL *w, int64_t outputs,
                           REAL *y) {
  int64_t o = 0;
  for (; o + 8 * LANES <= outputs; o += 8 * LANES)
    NAME(bits_add_tile)(found, count, w + o, outputs, y + o, 8);
  for (; o + LANES <= outputs; o += LANES)
    NAME(bits_add_tile)(found, count, w + o, outputs, y + o, 1);
  for (; o < outputs; o++)
    for (int64_t n = 0; n < count; n++) y[o] += w[found[n] * outputs + o];
}

static void NAME(bits_forward_piece)(void *job_, int64_t index) {
  bits_job *job = job_;
  const int64_t outputs = job->outputs, begin = index * job->row_block;
  const int64_t end = begin + job->row_block < job->rows ? begin + job->row_block : job->rows;
  int32_t *found = team_room(ROOM_OF_PIECE, (32 * job->block + job->others) * sizeof(int32_t));
  if (!found) {
    atomic_store(&job->failed, 1);
    return;
  }
  memset(job->out + begin * outputs, 0, (end - begin) * outputs * sizeof(REAL));
  for (int64_t from = 0; from < job->words; from += job->block) {
    const int64_t to = from + job->block < job->words ? from + job->block : job->words;
    for (int64_t row = begin; row < end; row++) {
      const int64_t count = NAME(bits_find)(job->bits + row * job->words, from, to, found);
      NAME(bits_add)(found, count, job->w, outputs, job->out + row * outputs);
    }
  }
  const REAL *last = job->w + (job->inputs - job->others) * outputs;
  for (int64_t row = begin; row < end; row++) {
    const REAL *rest = job->rest + row * job->others;
    const int64_t count = NAME(sparse_find)(rest, 0, job->others, found);
    NAME(sparse_add)(rest, found, count, last, outputs, job->out + row * outputs);
  }
}

/* A block of words for all rows, or the rest: sums are made in the order of the rows on any number of threads. */
static void NAME(bits_weights_piece)(void *job_, int64_t index) {
  bits_job *job = job_;
  const int64_t outputs = job->outputs, binary = job->inputs - job->others;
  const int64_t from = index * job->block;
  if (from >= job->words) {
    REAL *last = job->out + binary * outputs;
    memset(last, 0, job->others * outputs * sizeof(REAL));
    for (int64_t row = 0; row < job->rows; row++)
      for (int64_t i = 0; i < job->others; i++) {
        const REAL number = job->rest[row * job->others + i], *d = job->d + row * outputs;
        if (number != 0)
          for (int64_t o = 0; o < outputs; o++) last[i * outputs + o] += d[o] * number;
      }
    return;
  }
  const int64_t to = from + job->block < job->words ? from + job->block : job->words;
  const int64_t end = 32 * to < binary ? 32 * to : binary;
  int32_t *found = team_room(ROOM_OF_PIECE, 32 * job->block * sizeof(int32_t));
  if (!found) {
    atomic_store(&job->failed, 1);
    return;
  }
  memset(job->out + 32 * from * outputs, 0, (end - 32 * from) * outputs * sizeof(REAL));
  for (int64_t row = 0; row < job->rows; row++) {
    const REAL *d = job->d + row * outputs;
    const int64_t count = NAME(bits_find)(job->bits + row * job->words, from, to, found);
    for (int64_t n = 0; n < count; n++) {
      REAL *restrict w = job->out + found[n] * outputs;
      for (int64_t o = 0; o < outputs; o++) w[o] += d[o];
    }
  }
}

static bits_job NAME(bits_make)(const XLA_FFI_Buffer *rest, const XLA_FFI_Buffer *bits,
                                int64_t inputs, int64_t outputs) {
  bits_job job = {.bits = bits->data, .rest = rest->data, .rows = bits->dims[0],
                  .words = bits->dims[1], .others = rest->dims[1], .inputs = inputs,
                  .outputs = outputs};
  job.block = NAME(sparse_block)(inputs, outputs) / 32;
  if (job.block < 1) job.block = 1;
  return job;
}

/* Arguments: rest (N, R), bits (N, words), w (in, out). Result: (N, out). */
static XLA_FFI_Error *NAME(bits_forward)(XLA_FFI_CallFrame *frame) {
  const XLA_FFI_Buffer *w = argument(frame, 2);
  bits_job job = NAME(bits_make)(argument(frame, 0), argument(frame, 1), w->dims[0], w->dims[1]);
  const int64_t threads = whole(frame, "threads");
  job.w = w->data;
  job.out = result(frame, 0)->data;
  job.row_block = (job.rows + 2 * threads - 1) / (2 * threads);
  if (job.row_block < 1) job.row_block = 1;
  pool_run(frame, NAME(bits_forward_piece), &job, (job.rows + job.row_block - 1) / job.row_block);
  return job.failed ? NAME(sparse_failed)(frame) : NULL;
}

/* Arguments: d (N, out), bits (N, words), rest (N, R). Result: (in, out). */
static XLA_FFI_Error *NAME(bits_weights)(XLA_FFI_CallFrame *frame) {
  const XLA_FFI_Buffer *d = argument(frame, 0), *out = result(frame, 0);
  bits_job job = NAME(bits_make)(argument(frame, 2), argument(frame, 1), out->dims[0], d->dims[1]);
  job.d = d->data;
  job.out = out->data;
  pool_run(frame, NAME(bits_weights_piece), &job, (job.words + job.block - 1) / job.block + 1);
  return job.failed ? NAME(sparse_failed)(frame) : NULL;
}
