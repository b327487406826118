/* A few threads that share the pieces of one job.
 *
 * A step of a model is a chain of products of some forty microseconds, each of which waits for the
 * one before it. Waking a sleeping thread takes about as long as such a product, so a helper that
 * has finished goes on looking for the next job for a moment (SPIN_NS) before it sleeps. Nobody waits
 * for a helper to wake up: pieces are handed out one by one, and the caller works from the start.
 */
#ifndef AGALITE_TEAM_H
#define AGALITE_TEAM_H

#include <pthread.h>
#include <sched.h>
#include <stdatomic.h>
#include <stdint.h>
#include <stdlib.h>
#include <time.h>

#define MOST_HELPERS 15
#define SPIN_NS 100000

typedef void Piece(void *job, int64_t index);

static struct {
  pthread_mutex_t busy;           /* held by whoever has the team */
  pthread_mutex_t lock;           /* guards sleeping and wake */
  pthread_cond_t wake;
  int helpers;                    /* started so far; only touched by the holder of `busy` */
  atomic_int sleeping;
  atomic_int inside;              /* helpers that may be looking at the job below */
  atomic_int open;                /* how many helpers the present job wants; 0: there is no job */
  atomic_llong turn;              /* the number of the present job */
  atomic_llong next;
  int64_t count;
  Piece *piece;
  void *job;
} team = {.busy = PTHREAD_MUTEX_INITIALIZER,
          .lock = PTHREAD_MUTEX_INITIALIZER,
          .wake = PTHREAD_COND_INITIALIZER};

static inline void relax(void) {
#if defined(__x86_64__) || defined(__i386__)
  __builtin_ia32_pause();
#elif defined(__aarch64__)
  __asm__ volatile("yield");
#endif
}

static inline int64_t now_ns(void) {
  struct timespec t;
  clock_gettime(CLOCK_MONOTONIC, &t);
  return (int64_t)t.tv_sec * 1000000000 + t.tv_nsec;
}

static void team_work(void) {
  for (;;) {
    int64_t i = atomic_fetch_add(&team.next, 1);
    if (i >= team.count) return;
    team.piece(team.job, i);
  }
}

static void *team_helper(void *number_) {
  int number = (int)(intptr_t)number_;
  int64_t done = 0, idle_since = now_ns();
  for (unsigned spins = 1;; spins++) {
    if (atomic_load(&team.open) > number && atomic_load(&team.turn) != done) {
      /* Enter first, look again after: whoever closes the job looks at `inside` after closing. */
      atomic_fetch_add(&team.inside, 1);
      if (atomic_load(&team.open) > number) {
        done = atomic_load(&team.turn);
        team_work();
      }
      atomic_fetch_sub(&team.inside, 1);
      idle_since = now_ns();
      continue;
    }
    relax();
    if (spins % 64 == 0 && now_ns() - idle_since > SPIN_NS) {
      pthread_mutex_lock(&team.lock);
      atomic_fetch_add(&team.sleeping, 1);
      while (atomic_load(&team.open) <= number) pthread_cond_wait(&team.wake, &team.lock);
      atomic_fetch_sub(&team.sleeping, 1);
      pthread_mutex_unlock(&team.lock);
      idle_since = now_ns();
    }
  }
  return NULL;
}

/* Calls piece(job, i) for every i in 0 .. count-1, on up to `threads` threads, and returns when all
 * are done. If another caller has the team, this one works alone. */
static void team_run(Piece *piece, void *job, int64_t count, int64_t threads) {
  int64_t wanted = (threads < count ? threads : count) - 1;
  if (wanted > MOST_HELPERS) wanted = MOST_HELPERS;
  if (wanted < 1 || pthread_mutex_trylock(&team.busy)) {
    for (int64_t i = 0; i < count; i++) piece(job, i);
    return;
  }
  while (team.helpers < wanted) {
    pthread_t thread;
    if (pthread_create(&thread, NULL, team_helper, (void *)(intptr_t)team.helpers)) break;
    pthread_detach(thread);
    team.helpers++;
  }
  team.piece = piece;
  team.job = job;
  team.count = count;
  atomic_store(&team.next, 0);
  atomic_fetch_add(&team.turn, 1);
  atomic_store(&team.open, (int)wanted);
  if (atomic_load(&team.sleeping)) {
    pthread_mutex_lock(&team.lock);
    pthread_cond_broadcast(&team.wake);
    pthread_mutex_unlock(&team.lock);
  }
  team_work();
  atomic_store(&team.open, 0);
  for (unsigned spins = 1; atomic_load(&team.inside); spins++) {
    relax();
    if (spins % 4096 == 0) sched_yield(); /* a helper that lost its core has to get it back */
  }
  pthread_mutex_unlock(&team.busy);
}

/* Room to work in, the thread's own and kept for the next time; NULL if there is none. A piece of work
 * has one room; whoever runs pieces on its own thread and keeps numbers meanwhile takes the other. */
enum { ROOM_OF_PIECE, ROOM_OF_CALLER, ROOMS };

static void *team_room(int which, size_t bytes) {
  static _Thread_local struct {
    void *start;
    size_t size;
  } rooms[ROOMS];
  if (bytes > rooms[which].size) {
    free(rooms[which].start);
    rooms[which].size = (bytes + 4095) / 4096 * 4096;
    rooms[which].start = aligned_alloc(4096, rooms[which].size);
    if (!rooms[which].start) rooms[which].size = 0;
  }
  return rooms[which].start;
}

#endif
