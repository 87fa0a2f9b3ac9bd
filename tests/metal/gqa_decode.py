"""A readable decode kernel over a 4-bit cache: what the engine is tested on, and its faults are planted in.

Grouped-query attention of one query token. One threadgroup per key/value head; its simdgroups take tokens in turn
and keep an online softmax each, whose states the threadgroup joins at the end.
"""

from __future__ import annotations

from typing import Any

import mlx.core as mx

GROUP_SIZE, BITS = 64, 4
SIMDGROUPS = 4

INPUTS = ["queries", "keys", "key_scales", "key_biases", "values", "value_scales", "value_biases", "scale"]

# Template: T, D head dim, G query heads per key/value head, S simdgroups.
SOURCE = """
  constexpr int PER_LANE = D / 32;   // elements of a row that a lane holds
  constexpr int WORDS = D / 8;       // packed words of a row
  constexpr int GROUPS = D / 64;     // quantization groups of a row
  const uint lane = thread_index_in_simdgroup;
  const uint simdgroup = simdgroup_index_in_threadgroup;
  const uint head = threadgroup_position_in_grid.y;
  const int num_tokens = keys_shape[2];

  threadgroup float shared_max[S * G];
  threadgroup float shared_sum[S * G];
  threadgroup float shared_out[S * D];

  float query[G][PER_LANE];
  float partial[G][PER_LANE];
  float maximum[G];
  float total[G];
  for (int g = 0; g < G; g++) {
    const device T* row = queries + (head * G + g) * D + lane * PER_LANE;
    for (int i = 0; i < PER_LANE; i++) {
      query[g][i] = scale * float(row[i]);
      partial[g][i] = 0.0f;
    }
    maximum[g] = -INFINITY;
    total[g] = 0.0f;
  }

  const uint word = lane * PER_LANE / 8;
  const uint shift = (lane * PER_LANE % 8) * 4;
  const uint group = lane * PER_LANE / 64;
  for (int token = simdgroup; token < num_tokens; token += S) {
    const size_t row = size_t(head) * num_tokens + token;
    const uint key_codes = keys[row * WORDS + word] >> shift;
    const uint value_codes = values[row * WORDS + word] >> shift;
    const float key_scale = float(key_scales[row * GROUPS + group]);
    const float key_bias = float(key_biases[row * GROUPS + group]);
    const float value_scale = float(value_scales[row * GROUPS + group]);
    const float value_bias = float(value_biases[row * GROUPS + group]);
    for (int g = 0; g < G; g++) {
      float score = 0.0f;
      for (int i = 0; i < PER_LANE; i++) {
        score += query[g][i] * (key_scale * float((key_codes >> (4 * i)) & 15u) + key_bias);
      }
      score = simd_sum(score);
      const float new_maximum = max(maximum[g], score);
      const float rescale = fast::exp(maximum[g] - new_maximum);
      const float weight = fast::exp(score - new_maximum);
      maximum[g] = new_maximum;
      total[g] = total[g] * rescale + weight;
      for (int i = 0; i < PER_LANE; i++) {
        const float value = value_scale * float((value_codes >> (4 * i)) & 15u) + value_bias;
        partial[g][i] = partial[g][i] * rescale + weight * value;
      }
    }
  }

  if (lane == 0) {
    for (int g = 0; g < G; g++) {
      shared_max[g * S + simdgroup] = maximum[g];
      shared_sum[g * S + simdgroup] = total[g];
    }
  }
  threadgroup_barrier(mem_flags::mem_threadgroup);  // publish the states

  for (int g = 0; g < G; g++) {
    const float other = lane < S ? shared_max[g * S + lane] : -INFINITY;
    const float overall = simd_max(other);
    const float factor = other == -INFINITY ? 0.0f : fast::exp(other - overall);
    const float sum = simd_sum(lane < S ? shared_sum[g * S + lane] * factor : 0.0f);
    const float own_factor = simd_shuffle(factor, ushort(simdgroup));
    for (int i = 0; i < PER_LANE; i++) {
      shared_out[simdgroup * D + lane * PER_LANE + i] = partial[g][i] * own_factor;
    }
    threadgroup_barrier(mem_flags::mem_threadgroup);  // publish the partial outputs
    for (int d = thread_index_in_threadgroup; d < D; d += S * 32) {
      float element = 0.0f;
      for (int s = 0; s < S; s++) {
        element += shared_out[s * D + d];
      }
      out[(head * G + g) * D + d] = T(element / sum);
    }
    threadgroup_barrier(mem_flags::mem_threadgroup);  // before the next head reuses them
  }
"""


def quantized(heads: int, tokens: int, head_dim: int, dtype: mx.Dtype) -> tuple[mx.array, ...]:
    """(codes, scales, biases) of random keys or values [1, heads, tokens, head_dim]."""
    rows = mx.random.normal((1, heads, tokens, head_dim)).astype(dtype)
    return tuple(mx.quantize(rows, group_size=GROUP_SIZE, bits=BITS))


def example(heads: int, groups: int, tokens: int, head_dim: int, dtype: mx.Dtype) -> list[mx.array]:
    """Inputs of the kernel; `groups` query heads per key/value head."""
    mx.random.seed(heads * 1000 + tokens)
    queries = mx.random.normal((1, heads * groups, 1, head_dim)).astype(dtype)
    keys, values = (quantized(heads, tokens, head_dim, dtype) for _ in range(2))
    return [queries, *keys, *values, mx.array(head_dim**-0.5)]


def reference(inputs: list[mx.array]) -> mx.array:
    """float32 attention over the dequantized cache."""
    queries, scale = inputs[0].astype(mx.float32), inputs[-1].item()
    keys, values = (
        mx.dequantize(codes, scales.astype(mx.float32), biases.astype(mx.float32), group_size=GROUP_SIZE, bits=BITS)
        for codes, scales, biases in (inputs[1:4], inputs[4:7])
    )
    return mx.fast.scaled_dot_product_attention(queries, keys, values, scale=scale)


def decode(inputs: list[mx.array], source: str = SOURCE, header: str = "") -> mx.array:
    """The kernel's output [1, heads x groups, 1, head_dim]; `source` may hold a planted fault."""
    queries, keys = inputs[:2]
    heads, head_dim = keys.shape[1], queries.shape[-1]
    kernel: Any = mx.fast.metal_kernel("gqa_decode", INPUTS, ["out"], source, header)
    groups = queries.shape[1] // heads
    (out,) = kernel(
        inputs=inputs,
        template=[("T", queries.dtype), ("D", head_dim), ("G", groups), ("S", SIMDGROUPS)],
        grid=(32 * SIMDGROUPS, heads, 1),
        threadgroup=(32 * SIMDGROUPS, 1, 1),
        output_shapes=[queries.shape],
        output_dtypes=[queries.dtype],
    )
    return out
