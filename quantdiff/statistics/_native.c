/* Streaming statistics of attention logits and of plain tensors on a CPU.
 *
 * Plain C called through ctypes: it needs no Python or torch headers, so it builds wherever there
 * is a C compiler; without one, the torch path of streaming.py is used instead.
 */

#include <pthread.h>
#include <stdatomic.h>

#include "_native.h"

#define F2(name, isa) name##_##isa
#define F1(name, isa) F2(name, isa)
#define F(name) F1(name, ISA)

#if defined(__x86_64__) && defined(__GNUC__) && !defined(__clang__)
#define DISPATCH 1
#pragma GCC push_options
#pragma GCC target("avx512f,avx512vl,avx512bw,avx512dq,fma,prefer-vector-width=512")
#define ISA avx512
#define VL 16
#define MR 12
#include "_native_kernels.h"
#undef ISA
#undef VL
#undef MR
#pragma GCC pop_options
#pragma GCC push_options
#pragma GCC target("avx2,fma")
#define ISA avx2
#define VL 8
#define MR 6
#include "_native_kernels.h"
#undef ISA
#undef VL
#undef MR
#pragma GCC pop_options
#endif

#define ISA generic
#define VL 4
#define MR 6
#include "_native_kernels.h"
#undef ISA
#undef VL
#undef MR

typedef struct {
  void (*logits)(const job_t *, scratch_t *, int, int, int, int, partial_t *);
  void (*values)(const job_t *, scratch_t *, int, int, partial_t *);
  int keys, rows; /* of a tile */
} kernels_t;

/* The widest variant of at most `lanes` lanes that this machine supports. */
static kernels_t choose(int lanes) {
#ifdef DISPATCH
  if (lanes >= 16 && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512vl") &&
      __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512dq"))
    return (kernels_t){logits_avx512, values_avx512, 32, 12};
  if (lanes >= 8 && __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma"))
    return (kernels_t){logits_avx2, values_avx2, 16, 6};
#else
  (void)lanes;
#endif
  return (kernels_t){logits_generic, values_generic, 8, 6};
}

typedef struct {
  job_t *job;
  kernels_t kernels;
  partial_t *partial; /* (tasks, heads per task) */
  int tasks, rows, blocks, heads; /* rows per task, row blocks per sequence, heads per task */
  atomic_int next, failed, threads; /* next task, out of memory, threads that have started */
  pthread_mutex_t flush;
} run_t;

/* Move a thread's counts to the call's histogram. Only bins up to the largest magnitude can be
   in use. */
static void flush_histogram(run_t *run, uint32_t *histogram, int head, const partial_t *p) {
  job_t *job = run->job;
  float most = fmaxf(fabsf(p->min), fabsf(p->max));
  uint32_t bits;
  memcpy(&bits, &most, sizeof bits);
  int last = p->bad ? SIGN_BIN - 1 : (int)(bits >> 16), low = SIGN_BIN, high = -1;
  int64_t *to = job->histogram + (int64_t)head * BINS;
  pthread_mutex_lock(&run->flush);
  for (int sign = 0; sign < BINS; sign += SIGN_BIN)
    for (int i = 0; i <= last; i++)
      if (histogram[sign + i]) {
        to[sign + i] += histogram[sign + i];
        if (i < low) low = i;
        if (i > high) high = i;
      }
  int32_t *bins = job->bins + 2 * head;
  if (low < bins[0]) bins[0] = low;
  if (high > bins[1]) bins[1] = high;
  pthread_mutex_unlock(&run->flush);
  memset(histogram, 0, (size_t)(last + 1) * sizeof *histogram);
  memset(histogram + SIGN_BIN, 0, (size_t)(last + 1) * sizeof *histogram);
}

static void work(void *argument) {
  run_t *run = argument;
  job_t *job = run->job;
  int thread = atomic_fetch_add(&run->threads, 1);
  if (thread >= job->threads) return;
  int heads = run->heads, strips = (run->rows + run->kernels.rows - 1) / run->kernels.rows;
  size_t panel = sizeof(float) * (size_t)run->kernels.keys * job->D;
  size_t rows = job->k ? sizeof(float) * (size_t)strips * run->kernels.rows * heads * job->D : 64;
  size_t tile = sizeof(float) * (size_t)run->kernels.keys * run->kernels.rows;
  scratch_t s = {0};
  int ok = !posix_memalign((void **)&s.panel, 64, panel + 64) &&
           !posix_memalign((void **)&s.rows, 64, rows) && !posix_memalign((void **)&s.tile, 64, tile);
  s.histogram = calloc((size_t)heads * BINS, sizeof *s.histogram);
  s.heap = job->top + (int64_t)thread * job->rank;
  if (!ok || !s.histogram) atomic_store(&run->failed, 1);
  uint32_t *base = s.histogram;
  while (!atomic_load(&run->failed)) {
    int task = atomic_fetch_add(&run->next, 1);
    if (task >= run->tasks) break;
    /* If causal, later rows see more keys: long tasks go first, so that threads end together. */
    int block = run->blocks - 1 - task % run->blocks, group = task / run->blocks;
    int row0 = block * run->rows, row1 = row0 + run->rows < job->N ? row0 + run->rows : job->N;
    partial_t *p = run->partial + (int64_t)task * heads;
    for (int h = 0; h < heads; h++) {
      memset(&p[h], 0, sizeof p[h]);
      p[h].min = INFINITY;
      p[h].max = -INFINITY;
    }
    if (job->k)
      run->kernels.logits(job, &s, group / job->G, group % job->G, row0, row1, p);
    else
      run->kernels.values(job, &s, row0, row1, p);
    if (job->full)
      for (int h = 0; h < heads; h++)
        if (p[h].count)
          flush_histogram(run, base + (size_t)h * BINS, (job->k ? group % job->G : 0) * heads + h,
                          &p[h]);
  }
  job->top_count[thread] = s.heap_count;
  free(s.panel);
  free(s.rows);
  free(s.tile);
  free(base);
}

static void *work_alone(void *argument) {
  work(argument);
  return NULL;
}

/* Run one call; returns 0, or 1 if memory ran out. The caller has checked the shapes. */
int quantdiff_run(job_t *job) {
  run_t run = {.job = job, .kernels = choose(job->lanes)};
  run.heads = job->k ? job->H / job->G : 1;
  /* Packing a key panel pays off over a task's rows of all heads: take enough of them. */
  run.rows = 512 / run.heads;
  if (run.rows < 96) run.rows = 96;
  if (run.rows > job->N) run.rows = job->N;
  run.blocks = (job->N + run.rows - 1) / run.rows;
  run.tasks = run.blocks * (job->k ? job->B * job->G : 1);
  run.partial = calloc((size_t)run.tasks * run.heads, sizeof *run.partial);
  pthread_t *threads = calloc(job->threads, sizeof *threads);
  int failed = !run.partial || !threads;
  if (!failed) {
    pthread_mutex_init(&run.flush, NULL);
    int wanted = job->threads < run.tasks ? job->threads : run.tasks, started = 0;
    if (job->team && wanted > 1) {
      job->team(work, &run, wanted, 0);
    } else {
      for (int t = 1; t < wanted; t++)
        started += !pthread_create(&threads[started], NULL, work_alone, &run);
      work(&run);
      for (int t = 0; t < started; t++) pthread_join(threads[t], NULL);
    }
    pthread_mutex_destroy(&run.flush);
    failed = atomic_load(&run.failed);
  }
  for (int task = 0; !failed && task < run.tasks; task++)
    for (int h = 0; h < run.heads; h++) {
      int group = task / run.blocks;
      partial_t *p = run.partial + (int64_t)task * run.heads + h;
      partial_t *to = job->out + (job->k ? (int64_t)(group / job->G) * job->H +
                                               (int64_t)(group % job->G) * run.heads + h
                                         : 0);
      to->count += p->count;
      for (int i = 0; i < 4; i++) to->moment[i] += p->moment[i];
      if (p->min < to->min) to->min = p->min;
      if (p->max > to->max) to->max = p->max;
      to->bad |= p->bad;
    }
  free(run.partial);
  free(threads);
  return failed;
}

/* Sizes of the shared structs: they reveal a library whose sources do not match native.py. */
int quantdiff_layout(void) { return (int)(sizeof(job_t) * 1000000 + sizeof(partial_t) * 1000 + sizeof(item_t)); }
