/* Rounding of attention logits to their grids on a CPU, one row at a time.
 *
 * A row is read twice while it is in the first-level cache, whereas separate operations would each
 * read and write the whole block. The values equal those of grid.py to the bit: steps in double and
 * then fp32, a true division, rounding half to even, clamping in floating point.
 */

#include <float.h>
#include <math.h>
#include <stdatomic.h>
#include <stdint.h>
#include <string.h>

#if defined(__x86_64__) && defined(__GNUC__) && !defined(__clang__) && defined(__gnu_linux__)
#define VARIANTS __attribute__((target_clones("avx512f", "avx2", "default")))
#else
#define VARIANTS
#endif

/* One call; the layout is mirrored field by field in native.py. */
typedef struct {
  float *x;                    /* (H, n, m), contiguous; rounded in place */
  int32_t heads, rows, keys;
  const int32_t *start, *stop; /* (n,): row i counts keys start <= key < stop; others become -inf */
  int32_t own;                 /* each row's grid is its own; else step and zero hold it */
  int32_t symmetric, clips;
  float low, high;             /* the ends of the grid, integers */
  const float *step, *zero;    /* (H,) */
  int64_t *clipped;            /* (threads, H), added to */
  int32_t *bad;                /* set where a row's own range, or what may clip, is not finite */
  int32_t threads;
  void (*team)(void (*)(void *), void *, unsigned, unsigned);
} round_t;

typedef uint32_t __attribute__((may_alias)) bits_t;
typedef int32_t __attribute__((may_alias)) signed_t;

/* Bit patterns of floats without their sign are ordered by magnitude, with NaN above all. */
VARIANTS static uint32_t largest(const float *x, int n) {
  const bits_t *p = (const bits_t *)x;
  uint32_t most = 0;
  for (int i = 0; i < n; i++) {
    uint32_t magnitude = p[i] & 0x7fffffffu;
    most = magnitude > most ? magnitude : most;
  }
  return most;
}

/* The same with the sign: negative patterns are flipped, so that integers are in order. */
VARIANTS static void ends(const float *x, int n, int32_t *least, int32_t *most) {
  const signed_t *p = (const signed_t *)x;
  int32_t low = 0, high = 0; /* the range holds zero */
  for (int i = 0; i < n; i++) {
    int32_t key = p[i] ^ ((p[i] >> 31) & 0x7fffffff);
    low = key < low ? key : low;
    high = key > high ? key : high;
  }
  *least = low;
  *most = high;
}

VARIANTS static void round_symmetric(float *x, int n, float step) {
  for (int i = 0; i < n; i++) x[i] = rintf(x[i] / step) * step;
}

VARIANTS static int64_t round_clipped(float *x, int n, float step, float zero, float low,
                                      float high) {
  int32_t outside = 0;
  for (int i = 0; i < n; i++) {
    float y = rintf(x[i] / step) + zero;
    outside += (y < low) | (y > high);
    y = y < low ? low : y;
    y = y > high ? high : y;
    x[i] = (y - zero) * step;
  }
  return outside;
}

static float from_key(int32_t key) {
  int32_t pattern = key ^ ((key >> 31) & 0x7fffffff);
  float value;
  memcpy(&value, &pattern, sizeof value);
  return value;
}

/* As fp32, never 0: 1 for a range of zeros, the smallest normal for one that underflows. */
static float step_of(double exact) {
  if (exact == 0) return 1;
  float step = (float)exact;
  return step < FLT_MIN ? FLT_MIN : step;
}

/* A row's own grid; 0 if its range is not finite. */
static int own_grid(const round_t *job, const float *x, int n, float *step, float *zero) {
  if (job->symmetric) {
    uint32_t pattern = largest(x, n);
    float most;
    memcpy(&most, &pattern, sizeof most);
    *step = step_of((double)most / job->high);
    *zero = 0;
    return pattern < 0x7f800000u;
  }
  int32_t low, high;
  ends(x, n, &low, &high);
  double least = from_key(low), most = from_key(high);
  *step = step_of((most - least) / job->high);
  double shift = rint(-least / (double)*step);
  *zero = (float)(shift < 0 ? 0 : shift > job->high ? job->high : shift);
  return isfinite(least) && isfinite(most);
}

static void round_row(const round_t *job, int head, int row, int64_t *clipped) {
  float *x = job->x + ((int64_t)head * job->rows + row) * job->keys;
  int start = job->start[row], stop = job->stop[row];
  if (stop > job->keys) stop = job->keys;
  if (start < 0) start = 0;
  if (stop < start) stop = start;
  int n = stop - start;
  for (int i = 0; i < start && i < job->keys; i++) x[i] = -INFINITY;
  for (int i = stop; i < job->keys; i++) x[i] = -INFINITY;
  if (!n) return;
  float step, zero;
  if (job->own) {
    if (!own_grid(job, x + start, n, &step, &zero)) *job->bad = 1;
  } else {
    /* Clamping would make an infinite value finite. */
    if (job->clips && largest(x + start, n) >= 0x7f800000u) *job->bad = 1;
    step = job->step[head];
    zero = job->zero[head];
  }
  if (job->symmetric && !job->clips)
    round_symmetric(x + start, n, step);
  else
    clipped[head] += round_clipped(x + start, n, step, zero, job->low, job->high);
}

typedef struct {
  const round_t *job;
  atomic_int next; /* share */
} team_t;

/* One share per requested thread; OpenMP may start fewer, which then take what is left. */
static void work(void *argument) {
  team_t *team = argument;
  const round_t *job = team->job;
  int64_t rows = (int64_t)job->heads * job->rows;
  for (;;) {
    int share = atomic_fetch_add(&team->next, 1);
    if (share >= job->threads) return;
    int64_t first = rows * share / job->threads, last = rows * (share + 1) / job->threads;
    for (int64_t i = first; i < last; i++)
      round_row(job, (int)(i / job->rows), (int)(i % job->rows),
                job->clipped + (int64_t)share * job->heads);
  }
}

/* Round one block. The caller has checked shapes. */
void quantdiff_round(round_t *job) {
  team_t team = {.job = job};
  if (job->team && job->threads > 1) {
    job->team(work, &team, job->threads, 0);
  } else {
    round_t alone = *job;
    alone.threads = 1;
    team.job = &alone;
    work(&team);
  }
}

int quantdiff_round_layout(void) { return (int)sizeof(round_t); }
