/* Definitions shared by the instruction-set variants of the streaming kernels. */

#ifndef QUANTDIFF_NATIVE_H
#define QUANTDIFF_NATIVE_H

#include <float.h>
#include <math.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#define BINS 65536     /* the sixteen leading bits of an fp32: sign, exponent, 7 bits of mantissa */
#define SIGN_BIN 32768 /* bins from here on hold the negative values */

/* The bit pattern of a float, read from memory in which floats were stored. */
typedef uint32_t __attribute__((may_alias)) bits_t;

/* A large magnitude and its position. */
typedef struct {
  float value;
  int32_t head, batch, row, column;
} item_t;

/* Moments are taken of x * weight - pivot, so that fourth powers stay within fp32; the weight is a
   power of two, which keeps the difference exact. */
typedef struct {
  float weight, pivot;
} unit_t;

/* Results of one task (some rows of one head), merged in task order, so that the result does not
   depend on which thread was faster. */
typedef struct {
  int64_t count;
  double moment[4]; /* sums of (x * weight - pivot)^1..4 */
  float min, max;
  int32_t bad; /* a NaN or an infinity was seen */
} partial_t;

/* One call; the layout is mirrored field by field in native.py. */
typedef struct {
  const float *q, *k;             /* (B, H, N, D), (B, G, M, D): the last dimension contiguous */
  int64_t q_stride[3], k_stride[3]; /* of b, h, n, in floats */
  int32_t B, H, G, N, M, D;
  float scale;
  const int32_t *start, *stop; /* (B, N): the keys that may be attended, start <= key < stop */
  const uint8_t *mask;         /* 1 where attended, or NULL; the last dimension contiguous */
  int64_t mask_stride[3];      /* of b, h, n, in bytes */
  const unit_t *unit;          /* (B, H) */
  int32_t full;                /* compute moments and histogram too */
  int32_t rank;                /* how many of the largest magnitudes are kept */
  float threshold;             /* smaller magnitudes are not kept among them */
  int32_t threads;
  int32_t lanes; /* fp32 lanes of the widest vectors that may be used */
  partial_t *out;     /* (B, H) */
  int64_t *histogram; /* (H, BINS), added to */
  int32_t *bins;      /* (H, 2): the lowest and highest magnitude bin in use */
  /* libgomp's entry point to the team of threads that torch computes with, or NULL: threads of our
     own would contend with that team, which spins for a while after each operation. */
  void (*team)(void (*)(void *), void *, unsigned, unsigned);
  item_t *top;        /* (threads, rank) */
  int32_t *top_count; /* (threads,) */
} job_t;

/* A thread's own memory. */
typedef struct {
  float *panel, *rows, *tile;
  uint32_t *histogram; /* (heads per task, BINS) */
  uint32_t *counts;    /* of the current head */
  item_t *heap;
  int32_t heap_count;
} scratch_t;

/* Whether a is dropped before b: smaller, or equal but later in (head, batch, row, column). */
static inline int worse(const item_t *a, const item_t *b) {
  float x = fabsf(a->value), y = fabsf(b->value);
  if (x != y) return x < y;
  if (a->head != b->head) return a->head > b->head;
  if (a->batch != b->batch) return a->batch > b->batch;
  if (a->row != b->row) return a->row > b->row;
  return a->column > b->column;
}

static inline void sift_down(item_t *heap, int32_t n, int32_t i) {
  for (;;) {
    int32_t child = 2 * i + 1;
    if (child >= n) return;
    if (child + 1 < n && worse(&heap[child + 1], &heap[child])) child++;
    if (!worse(&heap[child], &heap[i])) return;
    item_t swap = heap[i];
    heap[i] = heap[child];
    heap[child] = swap;
    i = child;
  }
}

static inline void offer(scratch_t *s, int32_t rank, item_t item) {
  if (s->heap_count < rank) {
    int32_t i = s->heap_count++;
    while (i > 0 && worse(&item, &s->heap[(i - 1) / 2])) {
      s->heap[i] = s->heap[(i - 1) / 2];
      i = (i - 1) / 2;
    }
    s->heap[i] = item;
  } else if (worse(&s->heap[0], &item)) {
    s->heap[0] = item;
    sift_down(s->heap, rank, 0);
  }
}

/* The magnitude below which an element need not be offered. */
static inline float admission(const job_t *job, const scratch_t *s) {
  if (s->heap_count < job->rank) return job->threshold;
  float least = fabsf(s->heap[0].value);
  return least > job->threshold ? least : job->threshold;
}

#endif
