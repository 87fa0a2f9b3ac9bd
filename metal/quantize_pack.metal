// Quantize rows of keys or values and pack their codes: one simdgroup for each group of channels. Before that, where
// the template says so, each head's mean is taken off and the row is rotated by a Walsh-Hadamard matrix.
//
// The rule is that of mx.quantize on a CPU: the largest magnitude of a group is met exactly. (MLX's own Metal kernel
// starts its maximum at 0, which widens the range of groups that are negative throughout.)
//
// B batch, Hk KV heads, T tokens, D head dim, P padded dim, G group size.
#include <metal_stdlib>
using namespace metal;

template <typename T, int BITS, int GROUP, int DIM, int GROUPS, bool IS_CENTRED, bool IS_ROTATED>
[[kernel]] void quantize_pack(
    const device T* rows [[buffer(0)]],          // [B, Hk, T, D]
    const constant int* rows_shape [[buffer(1)]],
    const constant int64_t* rows_strides [[buffer(2)]],
    const device float* centre [[buffer(3)]],    // [Hk, D]; not looked at unless IS_CENTRED
    device uint* packed [[buffer(4)]],           // [B, Hk, T, P * BITS / 32], P = GROUPS * GROUP
    device T* scales [[buffer(5)]],              // [B, Hk, T, GROUPS]
    device T* biases [[buffer(6)]],
    uint3 threadgroup_position_in_grid [[threadgroup_position_in_grid]],
    uint simdgroup_index_in_threadgroup [[simdgroup_index_in_threadgroup]],
    uint thread_index_in_simdgroup [[thread_index_in_simdgroup]]) {
  constexpr int OWN = GROUP / 32;  // channels of a lane
  constexpr int WORDS = GROUP * BITS / 32;
  constexpr float LAST_CODE = float((1 << BITS) - 1);
  constexpr int BLOCKS = (DIM + 31) / 32;  // of 32 channels
  threadgroup uint codes[GROUPS * GROUP];
  threadgroup float exchange[IS_ROTATED ? BLOCKS * 32 : 1];

  const int group = simdgroup_index_in_threadgroup;
  const int lane = thread_index_in_simdgroup;
  const size_t row = threadgroup_position_in_grid.x;  // of B * Hk * T
  const size_t token = row % rows_shape[2];
  const size_t head = row / rows_shape[2];
  const size_t kv_head = head % rows_shape[1];
  const size_t at = head / rows_shape[1] * rows_strides[0] + kv_head * rows_strides[1] + token * rows_strides[2];

  float values[OWN];
  for (int i = 0; i < OWN; i++) {
    const int channel = min(group * GROUP + i * 32 + lane, DIM - 1);  // padded by the edge channel
    values[i] = float(rows[at + channel * rows_strides[3]]);
    if (IS_CENTRED) {
      values[i] -= float(centre[kv_head * DIM + channel]);
    }
  }

  if (IS_ROTATED) {
    // Butterflies of growing stride: a sum has the same terms in the same order as in mx.hadamard_transform on a CPU.
    // Strides below 32 lie across the lanes; for the others every lane takes its channel of all blocks.
    for (int i = 0; i < OWN; i++) {
      for (int stride = 1; stride < min(DIM, 32); stride *= 2) {
        const float other = simd_shuffle_xor(values[i], ushort(stride));
        values[i] = (lane & stride) != 0 ? other - values[i] : values[i] + other;
      }
      const int channel = group * GROUP + i * 32 + lane;
      if (channel < BLOCKS * 32) {
        exchange[channel] = values[i];
      }
    }
    threadgroup_barrier(mem_flags::mem_threadgroup);
    float column[BLOCKS];
    for (int block = 0; block < BLOCKS; block++) {
      column[block] = exchange[block * 32 + lane];
    }
    for (int stride = 1; stride < BLOCKS; stride *= 2) {
      for (int block = 0; block < BLOCKS; block++) {
        if ((block & stride) == 0 && block + stride < BLOCKS) {
          const float sum = column[block] + column[block + stride];
          column[block + stride] = column[block] - column[block + stride];
          column[block] = sum;
        }
      }
    }
    float root = 1.0f;  // of 1 / DIM, correctly rounded
    for (int n = DIM; n > 1; n /= 4) {
      root *= n == 2 ? 0.70710678f : 0.5f;
    }
    for (int block = 0; block < BLOCKS; block++) {
      if (block / OWN == group) {  // rather than an index known at run time only, which would take registers to memory
        values[block % OWN] = column[block] * root;
      }
    }
    const float last = simd_shuffle(values[(DIM - 1) % GROUP / 32], ushort((DIM - 1) % 32));
    for (int i = 0; i < OWN; i++) {
      values[i] = group * GROUP + i * 32 + lane < DIM ? values[i] : last;
    }
  }

  float smallest = INFINITY;
  float largest = -INFINITY;
  for (int i = 0; i < OWN; i++) {
    smallest = min(smallest, values[i]);
    largest = max(largest, values[i]);
  }
  smallest = simd_min(smallest);
  largest = simd_max(largest);

  const bool is_negative = abs(smallest) > abs(largest);
  const float edge = is_negative ? smallest : largest;
  float scale = max((largest - smallest) / LAST_CODE, 1e-7f);
  scale = is_negative ? scale : -scale;
  const float steps = rint(edge / scale);
  float bias = 0.0f;
  if (steps != 0.0f) {
    scale = edge / steps;
    bias = edge;
  }
  for (int i = 0; i < OWN; i++) {
    codes[group * GROUP + i * 32 + lane] = uint(clamp(rint((values[i] - bias) / scale), 0.0f, LAST_CODE));
  }
  simdgroup_barrier(mem_flags::mem_threadgroup);
  for (int word = lane; word < WORDS; word += 32) {
    uint bits = 0;
    for (int code = word * 32 / BITS; code * BITS < word * 32 + 32; code++) {
      const int shift = code * BITS - word * 32;  // a code may begin in the word before, or end in the next
      const uint value = codes[group * GROUP + code];
      bits |= shift < 0 ? value >> -shift : value << shift;
    }
    packed[(row * GROUPS + group) * WORDS + word] = bits;
  }
  if (lane == 0) {
    scales[row * GROUPS + group] = T(scale);
    biases[row * GROUPS + group] = T(bias);
  }
}
