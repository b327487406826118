/* Long jobs: pieces shared with XLA's own threads, so that there are never more than it has.
 *
 * An additional thread beside XLA's would make three for two cores, and whoever waits for a piece
 * waits for the system to give that thread its core back.
 */
#ifndef AGALITE_POOL_H
#define AGALITE_POOL_H

#include "frame.h"
#include "team.h"

typedef struct {
  Piece *piece;
  void *job;
  int64_t count;
  atomic_llong next, done;
  atomic_int holders; /* tasks XLA may still start after the job is over hold it too */
} pool_job;

static void pool_release(pool_job *shared) {
  if (atomic_fetch_sub(&shared->holders, 1) == 1) free(shared);
}

static void pool_work(pool_job *shared) {
  for (;;) {
    int64_t i = atomic_fetch_add(&shared->next, 1);
    if (i >= shared->count) return;
    shared->piece(shared->job, i);
    atomic_fetch_add(&shared->done, 1);
  }
}

static void pool_task(void *shared) {
  pool_work(shared);
  pool_release(shared);
}

/* Calls piece(job, i) for every i in 0 .. count-1, on as many threads as the call may use. */
static void pool_run(const XLA_FFI_CallFrame *frame, Piece *piece, void *job, int64_t count) {
  int64_t threads = whole(frame, "threads"), wanted = (threads < count ? threads : count) - 1;
  pool_job *shared = wanted > 0 ? malloc(sizeof *shared) : NULL;
  if (!shared) {
    for (int64_t i = 0; i < count; i++) piece(job, i);
    return;
  }
  *shared = (pool_job){.piece = piece, .job = job, .count = count};
  atomic_store(&shared->holders, 1);
  for (int64_t i = 0; i < wanted; i++) {
    XLA_FFI_ThreadPool_Schedule_Args args = {
        .struct_size = XLA_FFI_ThreadPool_Schedule_Args_STRUCT_SIZE,
        .ctx = frame->ctx,
        .task = pool_task,
        .data = shared};
    atomic_fetch_add(&shared->holders, 1);
    XLA_FFI_Error *error = frame->api->XLA_FFI_ThreadPool_Schedule(&args);
    if (error) { /* there is no pool: the caller does it all */
      XLA_FFI_Error_Destroy_Args destroy = {
          .struct_size = XLA_FFI_Error_Destroy_Args_STRUCT_SIZE, .error = error};
      frame->api->XLA_FFI_Error_Destroy(&destroy);
      pool_release(shared);
      break;
    }
  }
  pool_work(shared);
  for (unsigned spins = 1; atomic_load(&shared->done) < count; spins++) {
    relax();
    if (spins % 64 == 0) sched_yield();
  }
  pool_release(shared);
}

#endif
