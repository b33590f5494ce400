/* Scores and sums on lone slash lines, for some rows of queries; lone.py compiles and calls it.

   Query number r has position start + r and meets one key on each line, the one `offsets[line]` before it. Lines are
   sorted, so neighbouring ones read nearly the same keys: lines are the outer loop, in groups, and rows the inner one. */

#include <math.h>
#include <stdint.h>

#ifndef WIDTH
#define WIDTH 64 /* of queries and keys */
#endif
#ifndef VALUES
#define VALUES 64 /* width of values */
#endif
#define GROUP 8

static float dot(const float *a, const float *b) {
  float lane[16] = {0}, half[8], quarter[4];
  for (int i = 0; i + 16 <= WIDTH; i += 16)
    for (int l = 0; l < 16; l++) lane[l] += a[i + l] * b[i + l];
  for (int l = 0; l < WIDTH % 16; l++) lane[l] += a[WIDTH / 16 * 16 + l] * b[WIDTH / 16 * 16 + l];
  for (int l = 0; l < 8; l++) half[l] = lane[l] + lane[l + 8];
  for (int l = 0; l < 4; l++) quarter[l] = half[l] + half[l + 4];
  return (quarter[0] + quarter[2]) + (quarter[1] + quarter[3]);
}

/* scores[r, line] = query[r] . key[start + r - offset]; minus infinity where there is no such key, or it is not `open`. */
void lone_scores(const float *restrict query, const float *restrict key, const uint8_t *restrict open,
                 const int64_t *restrict offsets, int64_t lines, int64_t start, int64_t rows, float *restrict scores,
                 int64_t stride) {
  for (int64_t first = 0; first < lines; first += GROUP) {
    int64_t until = lines < first + GROUP ? lines : first + GROUP;
    for (int64_t r = 0; r < rows; r++)
      for (int64_t line = first; line < until; line++) {
        int64_t at = start + r - offsets[line], safe = at < 0 ? 0 : at;
        float score = dot(query + r * WIDTH, key + safe * WIDTH);
        scores[r * stride + line] = at >= 0 && open[safe] ? score : -INFINITY;
      }
  }
}

/* out[r] += sum over lines of probs[r, line] * value[start + r - offset]. */
void lone_sums(const float *restrict probs, const float *restrict value, const int64_t *restrict offsets, int64_t lines,
               int64_t start, int64_t rows, float *restrict out, int64_t stride) {
  for (int64_t first = 0; first < lines; first += GROUP) {
    int64_t until = lines < first + GROUP ? lines : first + GROUP;
    for (int64_t r = 0; r < rows; r++) {
      float sum[VALUES];
      for (int i = 0; i < VALUES; i++) sum[i] = out[r * VALUES + i];
      for (int64_t line = first; line < until; line++) {
        int64_t at = start + r - offsets[line];
        if (at < 0) continue;
        float weight = probs[r * stride + line];
        const float *row = value + at * VALUES;
        for (int i = 0; i < VALUES; i++) sum[i] += weight * row[i];
      }
      for (int i = 0; i < VALUES; i++) out[r * VALUES + i] = sum[i];
    }
  }
}
