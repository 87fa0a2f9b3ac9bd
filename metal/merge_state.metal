// Merge of partial attention states by log-sum-exp: the second pass of split-K decoding, and the join of
// a shared prefix with a private tail (FlashInfer's merge_state, arXiv 2501.01005).
//
// P partials, N rows (heads x queries), D head dim. One thread per output element.
#include <metal_stdlib>
using namespace metal;

template <typename T>
[[kernel]] void merge_state(
    const device float* maxima [[buffer(0)]],   // [P, N] largest score of each part, scaled
    const device float* sums [[buffer(1)]],     // [P, N] sum of exp(score - maximum); 0 marks an empty part
    const device float* outputs [[buffer(2)]],  // [P, N, D] sum of exp(score - maximum) * value, not normalized
    const constant int& num_parts [[buffer(3)]],
    device T* merged [[buffer(4)]],             // [N, D]
    uint3 thread_position_in_grid [[thread_position_in_grid]],
    uint3 threads_per_grid [[threads_per_grid]]) {
  const uint column = thread_position_in_grid.x;
  const uint row = thread_position_in_grid.y;
  const uint head_dim = threads_per_grid.x;
  const uint num_rows = threads_per_grid.y;

  float maximum = -3.0e38f;  // finite: infinity minus infinity would be NaN
  for (int part = 0; part < num_parts; part++) {
    if (sums[part * num_rows + row] > 0.0f) {
      maximum = max(maximum, maxima[part * num_rows + row]);
    }
  }
  float total = 0.0f;
  float sum = 0.0f;
  for (int part = 0; part < num_parts; part++) {
    const size_t index = size_t(part) * num_rows + row;
    if (sums[index] > 0.0f) {
      const float weight = exp(maxima[index] - maximum);
      total += weight * sums[index];
      sum += weight * outputs[index * head_dim + column];
    }
  }
  merged[size_t(row) * head_dim + column] = T(total > 0.0f ? sum / total : 0.0f);
}
