/* Few rows times a weight: y (B, out) = x (B, in) W^T, W (out, in), on all threads.
 *
 * One row is bound by reading W. It is read in the order in which it lies, in two places at once:
 * neighbouring rows read side by side make the processor's prefetching lose its way (three times as
 * slow), one place alone does not keep the memory busy (two thirds as fast).
 */

#define product_job NAME(product_job)

typedef struct {
  const REAL *w, *x; /* x: (B', in'), filled up with zeros, if B > 1 */
  REAL *y;
  int64_t rows, outputs, inputs;
  int64_t threads;
} product_job;

/* The rest of a row that does not fill a vector. */
static inline REAL NAME(product_tail)(const REAL *w, const REAL *x, int64_t inputs) {
  REAL y = 0;
  for (int64_t i = inputs / LANES * LANES; i < inputs; i++) y += w[i] * x[i];
  return y;
}

static void NAME(product_one_row)(const product_job *job, int64_t output, int64_t end) {
  const int64_t inputs = job->inputs, vectors = inputs / LANES, half = (end - output) / 2;
  const REAL *restrict x = job->x;
  for (int64_t n = 0; n < half; n++) {
    const REAL *a = job->w + (output + n) * inputs, *b = a + half * inputs;
    vec sum_a = {0}, sum_b = {0};
    for (int64_t i = 0; i < vectors; i++) {
      sum_a += AT(a, i) * AT(x, i);
      sum_b += AT(b, i) * AT(x, i);
    }
    job->y[output + n] = NAME(sum_of)(sum_a) + NAME(product_tail)(a, x, inputs);
    job->y[output + half + n] = NAME(sum_of)(sum_b) + NAME(product_tail)(b, x, inputs);
  }
  for (output += 2 * half; output < end; output++) {
    const REAL *w = job->w + output * inputs;
    job->y[output] = NAME(dot)(w, x, vectors) + NAME(product_tail)(w, x, inputs);
  }
}

/* TILE_ROWS rows and TILE_OUTPUTS outputs at a time are as many sums as a vector has lanes. */
#define TILE_ROWS (LANES < 8 ? (int)LANES : 8)
#define TILE_OUTPUTS ((int)LANES / TILE_ROWS)

/* The sums of LANES vectors, in one vector. */
static inline __attribute__((always_inline)) vec NAME(sums_of)(vec *a) {
#ifdef PAIRS
  UNROLLED for (int n = (int)LANES / 2; n; n /= 2)
    UNROLLED for (int i = 0; i < n; i++) a[i] = NAME(pairs)(a[2 * i], a[2 * i + 1]);
  return a[0];
#else
  vec total = {0};
  for (int i = 0; i < (int)LANES; i++) total[i] = NAME(sum_of)(a[i]);
  return total;
#endif
}

/* TILE_ROWS rows, whose numbers stay in the first cache, times some outputs. */
static void NAME(product_tile)(const product_job *job, int64_t row, int64_t output, int64_t end) {
  const int64_t inputs = job->inputs, width = NAME(padded)(inputs), full = inputs / LANES;
  const REAL *x = job->x + row * width;
  for (; output < end; output += TILE_OUTPUTS) {
    const REAL *w[8];
    /* Past the last output the last one is computed again. */
    UNROLLED for (int o = 0; o < TILE_OUTPUTS; o++)
      w[o] = job->w + (output + o < job->outputs ? output + o : job->outputs - 1) * inputs;
    vec sums[VECTOR_BYTES / sizeof(REAL)] = {0};
    for (int64_t i = 0; i < width / LANES; i++)
      UNROLLED for (int o = 0; o < TILE_OUTPUTS; o++) {
        vec weight = {0};
        if (i < full)
          weight = AT(w[o], i);
        else
          for (int64_t j = 0; j < inputs - full * LANES; j++) weight[j] = w[o][full * LANES + j];
        UNROLLED for (int r = 0; r < TILE_ROWS; r++)
          sums[o * TILE_ROWS + r] += weight * AT(x + r * width, i);
      }
    const vec total = NAME(sums_of)(sums);
    for (int o = 0; o < TILE_OUTPUTS && output + o < end; o++)
      for (int r = 0; r < TILE_ROWS && row + r < job->rows; r++)
        job->y[(row + r) * job->outputs + output + o] = total[o * TILE_ROWS + r];
  }
}

/* As many outputs at a time as have their weights in the second cache, for all rows. */
static void NAME(product_rows)(const product_job *job, int64_t output, int64_t end) {
  int64_t block = 131072 / (job->inputs * (int64_t)sizeof(REAL)) / TILE_OUTPUTS * TILE_OUTPUTS;
  if (block < TILE_OUTPUTS) block = TILE_OUTPUTS;
  for (; output < end; output += block)
    for (int64_t row = 0; row < job->rows; row += TILE_ROWS)
      NAME(product_tile)(job, row, output, output + block < end ? output + block : end);
}

/* One large piece for each thread, three quarters in all, and what is left in small ones for whoever is
 * done first: long pieces are read at full speed, and nobody waits long for the last. */
static int64_t NAME(product_pieces)(const product_job *job) { return 3 * job->threads; }

/* Where a piece begins; the last one ends where one more would begin. */
static inline int64_t NAME(product_begin)(const product_job *job, int64_t index) {
  const int64_t tiles = (job->outputs + TILE_OUTPUTS - 1) / TILE_OUTPUTS, threads = job->threads;
  const int64_t large = 3 * tiles / (4 * threads), small = tiles - large * threads;
  const int64_t tile = index <= threads ? index * large
                                        : large * threads + small * (index - threads) / (2 * threads);
  return tile * TILE_OUTPUTS < job->outputs ? tile * TILE_OUTPUTS : job->outputs;
}

static void NAME(product_piece)(const product_job *job, int64_t index) {
  const int64_t output = NAME(product_begin)(job, index), end = NAME(product_begin)(job, index + 1);
  if (job->rows == 1)
    NAME(product_one_row)(job, output, end);
  else
    NAME(product_rows)(job, output, end);
}

/* Room for the rows of x as the job wants them. */
static inline int64_t NAME(product_room)(int64_t rows, int64_t inputs) {
  return (rows + TILE_ROWS - 1) / TILE_ROWS * TILE_ROWS * NAME(padded)(inputs);
}

/* `room`: product_room. */
static product_job NAME(product_of)(const REAL *x, const REAL *w, REAL *y, int64_t rows,
                                    int64_t outputs, int64_t inputs, int64_t threads,
                                    REAL *room) {
  product_job job = {.w = w, .x = x, .y = y, .rows = rows,
                     .outputs = outputs, .inputs = inputs, .threads = threads};
  if (rows > 1) {
    const int64_t width = NAME(padded)(inputs);
    for (int64_t r = 0; r < rows; r++) NAME(copy_row)(room + r * width, x + r * inputs, inputs);
    memset(room + rows * width, 0,
           (NAME(product_room)(rows, inputs) - rows * width) * sizeof(REAL));
    job.x = room;
  }
  return job;
}

static void NAME(product_piece_of)(void *job, int64_t index) { NAME(product_piece)(job, index); }

/* Arguments: x (B, in), w (out, in). Result: (B, out). */
static XLA_FFI_Error *NAME(product)(XLA_FFI_CallFrame *frame) {
  const XLA_FFI_Buffer *x = argument(frame, 0), *w = argument(frame, 1);
  const int64_t rows = x->dims[0], outputs = w->dims[0], inputs = w->dims[1];
  REAL *room = team_room(ROOM_OF_CALLER, NAME(product_room)(rows, inputs) * sizeof(REAL));
  if (!room) return failure(frame, "agalite_product: no memory left");
  const int64_t threads = whole(frame, "threads");
  product_job job = NAME(product_of)(x->data, w->data, result(frame, 0)->data, rows, outputs, inputs,
                                     threads, room);
  team_run(NAME(product_piece_of), &job, NAME(product_pieces)(&job), threads);
  return NULL;
}
