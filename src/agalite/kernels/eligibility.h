/* Eligibility traces (ops/eligibility.py): one pass over z (B, P) for its decay, its gradients and its norms,
 * and one that moves the weights along it. All gradients, or weights, are arrays of their own: nothing is joined
 * to a vector first. The first `first` of them make up group 0, the others group 1, which begins at `second`.
 */

/* Sums of one environment and one group. */
typedef struct {
  REAL square, length;
} NAME(norms);

/* z = decay z + g over n numbers. absolute: `length` is the sum of |z|, not of its squares. */
static void NAME(accumulate)(REAL *z, const REAL *old, const REAL *g, int64_t n, REAL decay, int absolute,
                             NAME(norms) *sums) {
  vec square[2] = {{0}}, length[2] = {{0}};
  int64_t i = 0;
  for (; i + 2 * LANES <= n; i += 2 * LANES)
    UNROLLED for (int j = 0; j < 2; j++) {
      const vec g_ = AT(g + i, j);
      vec z_ = g_;
      if (decay != 0) z_ += decay * AT(old + i, j); /* an infinite trace is forgotten too */
      AT(z + i, j) = z_;
      square[j] += g_ * g_;
      length[j] += absolute ? 2 * NAME(relu)(z_) - z_ : z_ * z_;
    }
  sums->square += NAME(sum_of)(square[0] + square[1]);
  sums->length += NAME(sum_of)(length[0] + length[1]);
  for (; i < n; i++) {
    const REAL z_ = decay == 0 ? g[i] : decay * old[i] + g[i];
    z[i] = z_;
    sums->square += g[i] * g[i];
    sums->length += absolute ? (z_ < 0 ? -z_ : z_) : z_ * z_;
  }
}

/* Arguments: z (B, P), decay (B), and gradients (B, ...). Results: z, and (B, 2) the sums of the squares of g and
 * those of the squares of z, or of its absolute values. */
static XLA_FFI_Error *NAME(eligibility)(XLA_FFI_CallFrame *frame) {
  const XLA_FFI_Buffer *z = argument(frame, 0);
  const int64_t envs = z->dims[0], size = z->dims[1], arrays = frame->args.size - 2;
  const int64_t first = whole(frame, "first"), second = whole(frame, "second");
  const int absolute = whole(frame, "absolute") != 0;
  const REAL *decay = argument(frame, 1)->data;
  REAL *squares = result(frame, 1)->data, *lengths = result(frame, 2)->data;
  for (int64_t b = 0; b < envs; b++) {
    const REAL *old = (const REAL *)z->data + b * size;
    REAL *new = (REAL *)result(frame, 0)->data + b * size;
    NAME(norms) sums[2] = {{0}};
    int64_t at = 0;
    for (int64_t n = 0; n <= arrays; n++) {
      const int64_t begin = n == first ? second : n == arrays ? size : at;
      for (; at < begin; at++) new[at] = 0; /* what fills a group up */
      if (n == arrays) break;
      const XLA_FFI_Buffer *g = argument(frame, 2 + n);
      int64_t count = 1;
      for (int64_t i = 1; i < g->rank; i++) count *= g->dims[i];
      NAME(accumulate)(new + at, old + at, (const REAL *)g->data + b * count, count, decay[b], absolute,
                       &sums[n >= first]);
      at += count;
    }
    for (int group = 0; group < 2; group++) {
      squares[2 * b + group] = sums[group].square;
      lengths[2 * b + group] = sums[group].length;
    }
  }
  return NULL;
}

/* Arguments: z (B, P), scales (B, 2), and weights. Results: weights + sum over b of scale z. */
static XLA_FFI_Error *NAME(eligibility_update)(XLA_FFI_CallFrame *frame) {
  const XLA_FFI_Buffer *z = argument(frame, 0);
  const int64_t envs = z->dims[0], size = z->dims[1], arrays = frame->args.size - 2;
  const int64_t first = whole(frame, "first"), second = whole(frame, "second");
  const REAL *scales = argument(frame, 1)->data;
  int64_t at = 0;
  for (int64_t n = 0; n < arrays; n++) {
    const XLA_FFI_Buffer *w = argument(frame, 2 + n);
    if (n == first) at = second;
    int64_t count = 1;
    for (int64_t i = 0; i < w->rank; i++) count *= w->dims[i];
    const REAL *from = w->data;
    REAL *to = result(frame, n)->data;
    for (int64_t b = 0; b < envs; b++, from = to) {
      const REAL scale = scales[2 * b + (n >= first)], *z_ = (const REAL *)z->data + b * size + at;
      int64_t i = 0;
      for (; i + LANES <= count; i += LANES) AT(to + i, 0) = AT(from + i, 0) + scale * AT(z_ + i, 0);
      for (; i < count; i++) to[i] = from[i] + scale * z_[i];
    }
    at += count;
  }
  return NULL;
}
