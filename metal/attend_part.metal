// One part of the context against many rows of queries: pass 1 of split-K decoding over a packed prefix
// (Flash-Decoding; FlashInfer's cascade, arXiv 2501.01005). Each packed tile of keys and values is read from
// device memory once for all rows of a threadgroup: the query heads of one KV head, of every session.
//
// B batch, Hk KV heads, M rows per KV head, T tokens, D head dim, S splits of the tokens. A threadgroup takes
// one split of one KV head and ROWS rows; pass 2 is merge_state. BITS 16 means "not packed": elements of type T.
#include <metal_stdlib>
using namespace metal;

constant constexpr int TILE = 32;  // tokens at a time: one for each lane
constant constexpr float LOWEST = -3.0e38f;  // finite: infinity minus infinity would be NaN

// Four codes of BITS bits each, from bit `offset` of a packed row on; they may lie across two words.
template <int BITS>
inline float4 unpack4(const threadgroup uint* row, int offset) {
  const int shift = offset & 31;
  uint bits = row[offset >> 5] >> shift;
  if (32 % (4 * BITS) != 0 && shift + 4 * BITS > 32) {
    bits |= row[(offset >> 5) + 1] << (32 - shift);
  }
  constexpr uint mask = (1u << BITS) - 1;
  return float4(
      float(bits & mask), float((bits >> BITS) & mask), float((bits >> (2 * BITS)) & mask),
      float((bits >> (3 * BITS)) & mask));
}

template <
    typename T,
    int ROWS,        // rows of a threadgroup
    int BLOCKS,      // in so many blocks they take the values: ROWS / BLOCKS rows for each thread
    int SIMDGROUPS,
    int K_BITS,
    int K_GROUP,     // values for each scale
    int K_DIM,       // packed, a multiple of 32
    int K_WIDTH,     // of the queries
    int V_BITS,
    int V_GROUP,
    int V_DIM,
    int V_WIDTH      // of the outputs
    >
[[kernel]] void attend_part(
    const device T* queries [[buffer(0)]],        // [B, Hk, M, K_WIDTH], scaled
    const device uint* keys [[buffer(1)]],        // [B, Hk, T, K_DIM * K_BITS / 32], or T and K_WIDTH
    const device T* key_scales [[buffer(2)]],     // [B, Hk, T, K_DIM / K_GROUP]
    const device T* key_biases [[buffer(3)]],
    const device uint* values [[buffer(4)]],      // as the keys
    const device T* value_scales [[buffer(5)]],
    const device T* value_biases [[buffer(6)]],
    const device int* spans [[buffer(7)]],        // [B, M, 2] first token that a row sees, and the first that it does not
    const constant int& num_tokens [[buffer(8)]], // of the part, that any row sees
    const constant int& num_rows [[buffer(9)]],   // M
    const constant float& soft_cap [[buffer(10)]],  // scores become cap * tanh(score / cap); 0: they stay
    const constant int* keys_shape [[buffer(11)]],
    const constant int64_t* keys_strides [[buffer(12)]],
    const constant int64_t* key_scales_strides [[buffer(13)]],
    const constant int64_t* key_biases_strides [[buffer(14)]],
    const constant int64_t* values_strides [[buffer(15)]],
    const constant int64_t* value_scales_strides [[buffer(16)]],
    const constant int64_t* value_biases_strides [[buffer(17)]],
    device float* maxima [[buffer(18)]],          // [S, B, Hk, M] largest score; meaningless where the sum is 0
    device float* sums [[buffer(19)]],            // [S, B, Hk, M] of exp(score - maximum)
    device float* outputs [[buffer(20)]],         // [S, B, Hk, M, V_WIDTH] of exp(score - maximum) * value
    uint3 threadgroup_position_in_grid [[threadgroup_position_in_grid]],
    uint3 threadgroups_per_grid [[threadgroups_per_grid]],
    uint thread_index_in_threadgroup [[thread_index_in_threadgroup]],
    uint simdgroup_index_in_threadgroup [[simdgroup_index_in_threadgroup]],
    uint thread_index_in_simdgroup [[thread_index_in_simdgroup]]) {
  constexpr int THREADS = 32 * SIMDGROUPS;
  constexpr int UNITS = K_DIM / 32;  // 32 channels of the keys: a simdgroup's share
  constexpr bool IS_K_PACKED = K_BITS != 16;
  constexpr bool IS_V_PACKED = V_BITS != 16;
  constexpr int K_WORDS = IS_K_PACKED ? K_DIM * K_BITS / 32 : 0;
  constexpr int V_WORDS = IS_V_PACKED ? V_DIM * V_BITS / 32 : 0;
  constexpr int K_GROUPS = K_DIM / K_GROUP;
  constexpr int V_GROUPS = V_DIM / V_GROUP;
  // Odd, so that lanes that read one word each of 32 rows meet 32 different banks.
  constexpr int K_ROW = K_WORDS | 1;
  constexpr int V_ROW = V_WORDS | 1;
  constexpr int STAGE_ROW = K_ROW > V_ROW ? K_ROW : V_ROW;
  constexpr int STAGE_GROUPS = K_GROUPS > V_GROUPS ? K_GROUPS : V_GROUPS;
  constexpr int CHUNKS = V_DIM / 4;  // four columns of the values: a thread's share
  constexpr int BLOCK_ROWS = ROWS / BLOCKS;
  constexpr int SLOTS = THREADS / CHUNKS / BLOCKS;  // tokens that are taken at a time
  constexpr int OWN_ROWS = (ROWS + SIMDGROUPS - 1) / SIMDGROUPS;  // whose softmax a simdgroup keeps

  threadgroup T query_tile[ROWS * K_DIM];
  threadgroup float query_sums[ROWS * UNITS];
  threadgroup float scores[ROWS * TILE];
  threadgroup float rescale[ROWS];
  threadgroup uint stage[TILE * STAGE_ROW + 1];
  threadgroup float stage_scales[TILE * STAGE_GROUPS];
  threadgroup float stage_biases[TILE * STAGE_GROUPS];
  threadgroup float4 slot_outputs[THREADS];

  const int tid = thread_index_in_threadgroup;
  const int simdgroup = simdgroup_index_in_threadgroup;
  const int lane = thread_index_in_simdgroup;
  const int head = threadgroup_position_in_grid.y;  // of B * Hk
  const int batch = head / keys_shape[1];
  const int kv_head = head % keys_shape[1];
  const int first_row = threadgroup_position_in_grid.z * ROWS;
  const int rows_here = min(ROWS, num_rows - first_row);

  const int num_splits = threadgroups_per_grid.x;
  const int num_tiles = (num_tokens + TILE - 1) / TILE;
  const int tiles_per_split = (num_tiles + num_splits - 1) / num_splits;
  const int begin = int(threadgroup_position_in_grid.x) * tiles_per_split * TILE;
  const int end = min(num_tokens, begin + tiles_per_split * TILE);

  const size_t keys_at = batch * keys_strides[0] + kv_head * keys_strides[1];
  const size_t key_scales_at = batch * key_scales_strides[0] + kv_head * key_scales_strides[1];
  const size_t key_biases_at = batch * key_biases_strides[0] + kv_head * key_biases_strides[1];
  const size_t values_at = batch * values_strides[0] + kv_head * values_strides[1];
  const size_t value_scales_at = batch * value_scales_strides[0] + kv_head * value_scales_strides[1];
  const size_t value_biases_at = batch * value_biases_strides[0] + kv_head * value_biases_strides[1];

  for (int i = tid; i < ROWS * K_DIM; i += THREADS) {
    const int row = i / K_DIM;
    const int channel = i % K_DIM;
    const bool is_there = row < rows_here && channel < K_WIDTH;
    query_tile[i] = is_there ? queries[(size_t(head) * num_rows + first_row + row) * K_WIDTH + channel] : T(0);
  }
  for (int i = tid; i < TILE * STAGE_ROW + 1; i += THREADS) {
    stage[i] = 0;  // the words between the rows are read, and their bits dropped
  }
  threadgroup_barrier(mem_flags::mem_threadgroup);
  if (IS_K_PACKED) {
    for (int i = tid; i < ROWS * UNITS; i += THREADS) {
      float sum = 0.0f;
      for (int channel = 0; channel < 32; channel++) {
        sum += float(query_tile[i / UNITS * K_DIM + i % UNITS * 32 + channel]);
      }
      query_sums[i] = sum;
    }
  }

  float own_max[OWN_ROWS];
  float own_sum[OWN_ROWS];
  for (int i = 0; i < OWN_ROWS; i++) {
    own_max[i] = LOWEST;
    own_sum[i] = 0.0f;
  }
  const int chunk = tid % CHUNKS;
  const int block = tid / CHUNKS % BLOCKS;
  const int slot = tid / CHUNKS / BLOCKS;
  float4 totals[BLOCK_ROWS];
  for (int i = 0; i < BLOCK_ROWS; i++) {
    totals[i] = float4(0.0f);
  }

  for (int tile = begin; tile < end; tile += TILE) {
    const int tokens_here = min(TILE, end - tile);

    // --- scores: a token for each lane, its channels among the simdgroups
    if (IS_K_PACKED) {
      for (int i = tid; i < tokens_here * K_WORDS; i += THREADS) {
        const int token = i / max(K_WORDS, 1);
        const int word = i % max(K_WORDS, 1);
        stage[token * K_ROW + word] = uint(keys[keys_at + (tile + token) * keys_strides[2] + word * keys_strides[3]]);
      }
      for (int i = tid; i < tokens_here * K_GROUPS; i += THREADS) {
        const int token = i / K_GROUPS;
        const int group = i % K_GROUPS;
        stage_scales[i] = float(
            key_scales[key_scales_at + (tile + token) * key_scales_strides[2] + group * key_scales_strides[3]]);
        stage_biases[i] = float(
            key_biases[key_biases_at + (tile + token) * key_biases_strides[2] + group * key_biases_strides[3]]);
      }
      threadgroup_barrier(mem_flags::mem_threadgroup);
    }
    float products[ROWS];
    for (int row = 0; row < ROWS; row++) {
      products[row] = 0.0f;
    }
    if (lane < tokens_here) {
      for (int unit = simdgroup; unit < UNITS; unit += SIMDGROUPS) {
        if (IS_K_PACKED) {
          // scale * (query . codes) + bias * sum(query): two operations for 32 channels instead of one for each.
          float raw[ROWS];
          for (int row = 0; row < ROWS; row++) {
            raw[row] = 0.0f;
          }
          for (int channel = unit * 32; channel < unit * 32 + 32; channel += 4) {
            const float4 codes = unpack4<IS_K_PACKED ? K_BITS : 8>(stage + lane * K_ROW, channel * K_BITS);
            for (int row = 0; row < ROWS; row++) {
              const vec<T, 4> query = *(const threadgroup vec<T, 4>*)(query_tile + row * K_DIM + channel);
              raw[row] += dot(float4(float(query.x), float(query.y), float(query.z), float(query.w)), codes);
            }
          }
          const int at = lane * K_GROUPS + unit * 32 / K_GROUP;
          for (int row = 0; row < ROWS; row++) {
            products[row] += stage_scales[at] * raw[row] + stage_biases[at] * query_sums[row * UNITS + unit];
          }
        } else {
          const size_t at = keys_at + (tile + lane) * keys_strides[2];
          for (int channel = unit * 32; channel < min(unit * 32 + 32, K_WIDTH); channel++) {
            const float key = float(keys[at + channel * keys_strides[3]]);
            for (int row = 0; row < ROWS; row++) {
              products[row] += float(query_tile[row * K_DIM + channel]) * key;
            }
          }
        }
      }
    }
    for (int turn = 0; turn < min(SIMDGROUPS, UNITS); turn++) {
      if (simdgroup == turn) {
        for (int row = 0; row < ROWS; row++) {
          scores[row * TILE + lane] = products[row] + (turn > 0 ? scores[row * TILE + lane] : 0.0f);
        }
      }
      threadgroup_barrier(mem_flags::mem_threadgroup);
    }

    // --- online softmax: a row for each simdgroup; the values come in meanwhile
    for (int i = 0; i < OWN_ROWS; i++) {
      const int row = simdgroup + i * SIMDGROUPS;
      if (row < ROWS) {
        const size_t at = 2 * (size_t(batch) * num_rows + first_row + min(row, rows_here - 1));
        const bool is_seen = row < rows_here && tile + lane >= spans[at] && tile + lane < min(spans[at + 1], end);
        float score = scores[row * TILE + lane];
        if (soft_cap > 0.0f) {
          score = soft_cap * precise::tanh(score / soft_cap);
        }
        score = is_seen ? score : LOWEST;
        const float maximum = max(own_max[i], simd_max(score));
        const float weight = is_seen ? exp(score - maximum) : 0.0f;
        const float factor = exp(own_max[i] - maximum);
        own_sum[i] = own_sum[i] * factor + simd_sum(weight);
        own_max[i] = maximum;
        scores[row * TILE + lane] = weight;
        if (lane == 0) {
          rescale[row] = factor;
        }
      }
    }
    if (IS_V_PACKED) {
      for (int i = tid; i < tokens_here * V_WORDS; i += THREADS) {
        const int token = i / max(V_WORDS, 1);
        const int word = i % max(V_WORDS, 1);
        stage[token * V_ROW + word] =
            uint(values[values_at + (tile + token) * values_strides[2] + word * values_strides[3]]);
      }
      for (int i = tid; i < tokens_here * V_GROUPS; i += THREADS) {
        const int token = i / V_GROUPS;
        const int group = i % V_GROUPS;
        stage_scales[i] = float(
            value_scales[value_scales_at + (tile + token) * value_scales_strides[2] + group * value_scales_strides[3]]);
        stage_biases[i] = float(
            value_biases[value_biases_at + (tile + token) * value_biases_strides[2] + group * value_biases_strides[3]]);
      }
    }
    threadgroup_barrier(mem_flags::mem_threadgroup);

    // --- outputs: four columns for each thread, tokens and blocks of rows among the threads
    if (slot < SLOTS) {
      for (int i = 0; i < BLOCK_ROWS; i++) {
        totals[i] *= rescale[block * BLOCK_ROWS + i];
      }
      for (int token = slot; token < tokens_here; token += SLOTS) {
        float4 value;
        if (IS_V_PACKED) {
          const int at = token * V_GROUPS + chunk * 4 / V_GROUP;
          const float4 codes = unpack4<IS_V_PACKED ? V_BITS : 8>(stage + token * V_ROW, chunk * 4 * V_BITS);
          value = stage_scales[at] * codes + stage_biases[at];
        } else {
          const size_t at = values_at + (tile + token) * values_strides[2];
          for (int i = 0; i < 4; i++) {
            const int column = chunk * 4 + i;
            value[i] = column < V_WIDTH ? float(values[at + column * values_strides[3]]) : 0.0f;
          }
        }
        for (int i = 0; i < BLOCK_ROWS; i++) {
          totals[i] += scores[(block * BLOCK_ROWS + i) * TILE + token] * value;
        }
      }
    }
    threadgroup_barrier(mem_flags::mem_threadgroup);
  }

  const size_t first_at =
      (size_t(threadgroup_position_in_grid.x) * threadgroups_per_grid.y + head) * num_rows + first_row;
  for (int i = 0; i < OWN_ROWS; i++) {
    const int row = simdgroup + i * SIMDGROUPS;
    if (lane == 0 && row < rows_here) {
      maxima[first_at + row] = own_max[i];
      sums[first_at + row] = own_sum[i];
    }
  }
  for (int i = 0; i < BLOCK_ROWS; i++) {
    slot_outputs[tid] = totals[i];
    threadgroup_barrier(mem_flags::mem_threadgroup);
    const int row = block * BLOCK_ROWS + i;
    if (slot == 0 && row < rows_here) {
      float4 sum = totals[i];
      for (int other = 1; other < SLOTS; other++) {
        sum += slot_outputs[tid + other * CHUNKS * BLOCKS];
      }
      for (int j = 0; j < 4; j++) {
        if (chunk * 4 + j < V_WIDTH) {
          outputs[(first_at + row) * V_WIDTH + chunk * 4 + j] = sum[j];
        }
      }
    }
    threadgroup_barrier(mem_flags::mem_threadgroup);
  }
}
