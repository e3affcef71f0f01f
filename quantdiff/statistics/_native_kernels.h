/* The kernels, once per instruction set: VL lanes of fp32, tiles of MR rows by 2 VL keys.
 *
 * A tile of q.k is computed in registers, as a chain of fused multiply-adds over the head width, so
 * that a logit's value does not depend on where its tile lies; its statistics are taken while the
 * tile is in the first-level cache. Included by _native.c with F(name), VL, MR defined.
 */

#define NR (2 * VL)
#define FV F(vector)
typedef float FV __attribute__((vector_size(VL * 4), aligned(VL * 4)));

typedef struct {
  FV min, max, m1, m2, m3, m4, bad;
} F(lanes);

/* x in every lane. Subtracting 0 is free, whereas adding it would have to respect -0. */
static inline FV F(all)(float x) { return x - (FV){0}; }

static inline void F(clear)(F(lanes) * a) {
  memset(a, 0, sizeof *a);
  for (int i = 0; i < VL; i++) {
    a->min[i] = INFINITY;
    a->max[i] = -INFINITY;
  }
}

static inline FV F(least)(FV a, FV b) {
  FV r;
  for (int i = 0; i < VL; i++) r[i] = a[i] < b[i] ? a[i] : b[i];
  return r;
}

static inline FV F(most)(FV a, FV b) {
  FV r;
  for (int i = 0; i < VL; i++) r[i] = a[i] > b[i] ? a[i] : b[i];
  return r;
}

static inline void F(take)(F(lanes) * a, FV x, FV weight, FV pivot, int full) {
  a->min = F(least)(x, a->min);
  a->max = F(most)(x, a->max);
  a->bad += x * 0.0f; /* stays 0 unless x is NaN or infinite */
  if (full) {
    FV t = x * weight - pivot, t2 = t * t;
    a->m1 += t;
    a->m2 += t2;
    a->m3 += t2 * t;
    a->m4 += t2 * t2;
  }
}

/* Add the lanes to a task's result in fp64 and reset them. */
static inline void F(flush)(F(lanes) * a, partial_t *p, int full) {
  for (int i = 0; i < VL; i++) {
    if (a->min[i] < p->min) p->min = a->min[i];
    if (a->max[i] > p->max) p->max = a->max[i];
    if (!(a->bad[i] == 0.0f)) p->bad = 1;
  }
  if (full) {
    double m1 = 0, m2 = 0, m3 = 0, m4 = 0;
    for (int i = 0; i < VL; i++) {
      m1 += a->m1[i];
      m2 += a->m2[i];
      m3 += a->m3[i];
      m4 += a->m4[i];
    }
    p->moment[0] += m1;
    p->moment[1] += m2;
    p->moment[2] += m3;
    p->moment[3] += m4;
  }
  F(clear)(a);
}

static inline void F(count)(uint32_t *histogram, const float *x, int n) {
  const bits_t *bits = (const bits_t *)x;
  for (int i = 0; i < n; i++) histogram[bits[i] >> 16]++;
}

static void F(offer_run)(const job_t *job, scratch_t *s, const float *x, int n, item_t at) {
  float least = admission(job, s);
  for (int i = 0; i < n; i++)
    if (fabsf(x[i]) >= least) {
      item_t item = at;
      item.value = x[i];
      item.column = at.column + i;
      offer(s, job->rank, item);
      least = admission(job, s);
    }
}

/* A run of n values in one row: the general path, for edges and for plain tensors. */
static void F(run)(const job_t *job, scratch_t *s, partial_t *p, unit_t u, const float *x, int n,
                   item_t at) {
  F(lanes) a;
  F(clear)(&a);
  FV w = F(all)(u.weight), c = F(all)(u.pivot);
  float least = job->rank ? admission(job, s) : INFINITY;
  int i = 0, full = job->full, any = 0;
  for (; i + VL <= n; i += VL) {
    FV v;
    memcpy(&v, x + i, sizeof v);
    F(take)(&a, v, w, c, full);
  }
  for (int j = 0; j < VL; j++) any |= (a.max[j] >= least) | (a.min[j] <= -least);
  F(flush)(&a, p, full);
  for (; i < n; i++) {
    float v = x[i];
    double t = (double)v * u.weight - u.pivot, t2 = t * t;
    if (v < p->min) p->min = v;
    if (v > p->max) p->max = v;
    if (!isfinite(v)) p->bad = 1;
    any |= fabsf(v) >= least;
    p->moment[0] += t;
    p->moment[1] += t2;
    p->moment[2] += t2 * t;
    p->moment[3] += t2 * t2;
  }
  p->count += n;
  if (full) F(count)(s->counts, x, n);
  if (any) F(offer_run)(job, s, x, n, at);
}

/* q.k for MR packed rows and NR packed keys, scaled, into tile (MR, NR). */
static void F(product)(const float *restrict rows, const float *restrict panel, int D, float scale,
                       float *restrict tile) {
  FV acc[MR][2];
#pragma GCC unroll 16
  for (int r = 0; r < MR; r++) acc[r][0] = acc[r][1] = (FV){0};
  for (int d = 0; d < D; d++) {
    FV b0 = *(const FV *)(panel + (size_t)d * NR);
    FV b1 = *(const FV *)(panel + (size_t)d * NR + VL);
#pragma GCC unroll 16
    for (int r = 0; r < MR; r++) {
      FV x = F(all)(rows[(size_t)d * MR + r]);
      acc[r][0] += b0 * x;
      acc[r][1] += b1 * x;
    }
  }
#pragma GCC unroll 16
  for (int r = 0; r < MR; r++) {
    *(FV *)(tile + r * NR) = acc[r][0] * scale;
    *(FV *)(tile + r * NR + VL) = acc[r][1] * scale;
  }
}

/* A tile in which every entry counts. */
static void F(whole_tile)(const job_t *job, scratch_t *s, partial_t *p, unit_t u, item_t at) {
  F(lanes) a;
  F(clear)(&a);
  FV w = F(all)(u.weight), c = F(all)(u.pivot);
  if (job->full) {
    for (int i = 0; i < MR * 2; i++) F(take)(&a, *(const FV *)(s->tile + i * VL), w, c, 1);
    F(count)(s->counts, s->tile, MR * NR);
  } else {
    for (int i = 0; i < MR * 2; i++) F(take)(&a, *(const FV *)(s->tile + i * VL), w, c, 0);
  }
  if (job->rank) {
    float least = admission(job, s);
    int any = 0;
    for (int i = 0; i < VL; i++) any |= (a.max[i] >= least) | (a.min[i] <= -least);
    if (any)
      for (int r = 0; r < MR; r++) {
        item_t row = at;
        row.row += r;
        F(offer_run)(job, s, s->tile + r * NR, NR, row);
      }
  }
  F(flush)(&a, p, job->full);
  p->count += MR * NR;
}

/* One row of a tile where only keys [first, last) may be attended, minus those the mask hides. */
static void F(part_row)(const job_t *job, scratch_t *s, partial_t *p, unit_t u, const float *x,
                        int first, int last, int key0, item_t at) {
  const uint8_t *mask = NULL;
  if (job->mask)
    mask = job->mask + at.batch * job->mask_stride[0] + at.head * job->mask_stride[1] +
           at.row * job->mask_stride[2] + key0;
  for (int j = first; j < last;) {
    if (mask && !mask[j]) {
      j++;
      continue;
    }
    int end = last;
    if (mask)
      for (end = j + 1; end < last && mask[end]; end++) {}
    item_t run = at;
    run.column = key0 + j;
    F(run)(job, s, p, u, x + j, end - j, run);
    j = end;
  }
}

/* Rows [row0, row1) of every query head that shares key head g, in sequence b. */
static void F(logits)(const job_t *job, scratch_t *s, int b, int g, int row0, int row1,
                      partial_t *partial) {
  int D = job->D, repeat = job->H / job->G;
  int strips = (row1 - row0 + MR - 1) / MR;
  const int32_t *start = job->start + (int64_t)b * job->N, *stop = job->stop + (int64_t)b * job->N;
  int lowest = job->M, highest = 0;
  for (int i = row0; i < row1; i++)
    if (stop[i] > start[i]) {
      if (start[i] < lowest) lowest = start[i];
      if (stop[i] > highest) highest = stop[i];
    }
  if (highest <= lowest) return;

  float *rows = s->rows;
  for (int h = 0; h < repeat; h++)
    for (int t = 0; t < strips; t++)
      for (int r = 0; r < MR; r++) {
        int i = row0 + t * MR + r;
        float *to = rows + ((size_t)h * strips + t) * MR * D + r;
        if (i >= row1) {
          for (int d = 0; d < D; d++) to[(size_t)d * MR] = 0.0f;
          continue;
        }
        const float *from = job->q + b * job->q_stride[0] +
                            (int64_t)(g * repeat + h) * job->q_stride[1] + i * job->q_stride[2];
        for (int d = 0; d < D; d++) to[(size_t)d * MR] = from[d];
      }

  for (int key0 = lowest / NR * NR; key0 < highest; key0 += NR) {
    const float *keys = job->k + b * job->k_stride[0] + (int64_t)g * job->k_stride[1];
    for (int j = 0; j < NR; j++) {
      float *to = s->panel + j;
      if (key0 + j >= job->M) {
        for (int d = 0; d < D; d++) to[(size_t)d * NR] = 0.0f;
        continue;
      }
      const float *from = keys + (int64_t)(key0 + j) * job->k_stride[2];
      for (int d = 0; d < D; d++) to[(size_t)d * NR] = from[d];
    }
    for (int t = 0; t < strips; t++) {
      int i0 = row0 + t * MR, n = row1 - i0 < MR ? row1 - i0 : MR;
      int whole = n == MR && !job->mask, any = 0;
      for (int r = 0; r < n; r++) {
        whole &= start[i0 + r] <= key0 && stop[i0 + r] >= key0 + NR;
        any |= start[i0 + r] < key0 + NR && stop[i0 + r] > key0 && stop[i0 + r] > start[i0 + r];
      }
      if (!any) continue;
      for (int h = 0; h < repeat; h++) {
        int head = g * repeat + h;
        unit_t u = job->unit[(int64_t)b * job->H + head];
        F(product)(rows + ((size_t)h * strips + t) * MR * D, s->panel, D, job->scale, s->tile);
        item_t at = {0.0f, head, b, i0, key0};
        partial_t *p = partial + h;
        s->counts = s->histogram + (size_t)h * BINS;
        if (whole) {
          F(whole_tile)(job, s, p, u, at);
          continue;
        }
        for (int r = 0; r < n; r++) {
          int first = start[i0 + r] - key0, last = stop[i0 + r] - key0;
          at.row = i0 + r;
          F(part_row)(job, s, p, u, s->tile + r * NR, first < 0 ? 0 : first,
                      last > NR ? NR : last, key0, at);
        }
      }
    }
  }
}

/* Rows [row0, row1) of a plain (N, D) tensor; a row counts if stop > start. */
static void F(values)(const job_t *job, scratch_t *s, int row0, int row1, partial_t *p) {
  s->counts = s->histogram;
  for (int i = row0; i < row1; i++) {
    if (job->stop[i] <= job->start[i]) continue;
    item_t at = {0.0f, 0, 0, i, 0};
    F(run)(job, s, p, job->unit[0], job->q + i * job->q_stride[2], job->D, at);
  }
}

#undef NR
#undef FV
