// One part of the context against many rows of queries: pass 1 of split-K decoding over a packed prefix
// (Flash-Decoding; FlashInfer's cascade, arXiv 2501.01005). Each packed tile of keys and values is read from
// device memory once for all rows of a threadgroup: the query heads of one KV head, of every session.
//
// B batch, Hk KV heads, M rows per KV head, T tokens, D head dim, S splits of the tokens. A threadgroup takes
// one split of one KV head and ROWS rows; pass 2 is merge_state. BITS 16 means "not packed": elements of type T.
//
// Loops over rows are unrolled, since sums that are indexed at run time would lie in memory instead of registers.
#include <metal_stdlib>
using namespace metal;

constant constexpr int TILE = 32;  // tokens at a time: one for each lane
constant constexpr float LOWEST = -3.0e38f;  // finite: infinity minus infinity would be NaN

// The bit of its word where code `i` of a packed row begins. Keys are masked there, not moved: the query is divided by
// that power of two, once. A code that lies across two words is moved to bit 0.
template <int BITS>
inline int bit_of(int i) {
  const int bit = i * BITS & 31;
  return bit + BITS > 32 ? 0 : bit;
}

template <int BITS>
inline float masked(const threadgroup uint* row, int i) {
  constexpr uint mask = (1u << BITS) - 1;
  const int word = i * BITS >> 5;
  const int bit = i * BITS & 31;
  if (32 % BITS != 0 && bit + BITS > 32) {
    return float((row[word] >> bit | row[word + 1] << (32 - bit)) & mask);
  }
  return float(row[word] & mask << bit);
}

// Four codes of BITS bits each, from bit `bit` of the word on; they may lie across two words.
template <int BITS>
inline float4 unpack4(const threadgroup uint* word, int bit) {
  uint bits = word[0] >> bit;
  if (32 % (4 * BITS) != 0 && bit + 4 * BITS > 32) {
    bits |= word[1] << (32 - bit);
  }
  constexpr uint mask = (1u << BITS) - 1;
  return float4(
      float(bits & mask), float((bits >> BITS) & mask), float((bits >> (2 * BITS)) & mask),
      float((bits >> (3 * BITS)) & mask));
}

// Where the rows of a head begin, the step from token to token, and that within a row.
inline long3 layout_of(const constant int64_t* strides, int batch, int head) {
  return long3(batch * strides[0] + head * strides[1], strides[2], strides[3]);
}

// Rows of WIDTH elements of a tile into threadgroup memory, STRIDE apart. Each thread keeps to one column, so that its
// addresses go up by constant steps; offsets within a tile fit 32 bits.
template <int WIDTH, int STRIDE, int THREADS, typename To, typename From>
inline void copy_rows(threadgroup To* to, From from, long3 layout, int tile, int tokens, uint tid) {
  constexpr int COLUMNS = WIDTH > 64 ? 128 : WIDTH > 32 ? 64 : WIDTH > 16 ? 32 : WIDTH > 8 ? 16 : WIDTH > 4 ? 8 : 4;
  constexpr int STEP = THREADS / COLUMNS;
  const int column = tid % COLUMNS;
  const int first = tid / COLUMNS;
  if (column < WIDTH && first < STEP) {
    to += first * STRIDE + column;
    const int step = STEP * int(layout.y);
    from += layout.x + tile * layout.y + (first * int(layout.y) + column * int(layout.z));
    if (tokens == TILE && TILE % STEP == 0) {
#pragma unroll
      for (int token = 0; token < TILE; token += STEP) {
        to[token * STRIDE] = To(*from);
        from += step;
      }
    } else {
      for (int token = first; token < tokens; token += STEP) {
        *to = To(*from);
        to += STEP * STRIDE;
        from += step;
      }
    }
  }
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
  constexpr int KEY_BITS = IS_K_PACKED ? K_BITS : 8;
  constexpr int VALUE_BITS = IS_V_PACKED ? V_BITS : 8;
  constexpr int K_WORDS = IS_K_PACKED ? K_DIM * K_BITS / 32 : 0;
  constexpr int V_WORDS = IS_V_PACKED ? V_DIM * V_BITS / 32 : 0;
  constexpr int K_GROUPS = K_DIM / K_GROUP;
  constexpr int V_GROUPS = V_DIM / V_GROUP;
  constexpr int RUN = KEY_BITS == 8 ? 8 : 32 / (KEY_BITS & -KEY_BITS);  // channels that begin and end with a word
  // Odd, so that lanes that read one word each of 32 rows meet 32 different banks.
  constexpr int K_ROW = K_WORDS | 1;
  constexpr int V_ROW = V_WORDS | 1;
  constexpr int STAGE_ROW = K_ROW > V_ROW ? K_ROW : V_ROW;
  constexpr int STAGE_GROUPS = K_GROUPS > V_GROUPS ? K_GROUPS : V_GROUPS;
  constexpr int CHUNKS = V_DIM / 4;  // four columns of the values: a thread's share
  constexpr int BLOCK_ROWS = ROWS / BLOCKS;
  constexpr int SLOTS = THREADS / CHUNKS / BLOCKS;  // tokens that are taken at a time
  constexpr int OWN_ROWS = (ROWS + SIMDGROUPS - 1) / SIMDGROUPS;  // whose softmax a simdgroup keeps
  constexpr int TURNS = (UNITS + SIMDGROUPS - 1) / SIMDGROUPS;  // of a simdgroup, each with a unit of the keys
  // Rows four at a time: one load gives four scores of a token.
  constexpr int QUADS = (ROWS + 3) / 4;
  constexpr int BLOCK_QUADS = (BLOCK_ROWS + 3) / 4;
  constexpr int SCORE_QUADS = QUADS | 1;
  // Where scores are few, each simdgroup has its own place for its part of their sums; else they take turns in one.
  constexpr int WRITERS = SIMDGROUPS < UNITS ? SIMDGROUPS : UNITS;
  constexpr int PARTS = WRITERS * TILE * SCORE_QUADS * 16 <= 4096 ? WRITERS : 1;

  threadgroup float4 query_tile[ROWS * K_DIM / 4];  // in half, what is divided by 2^28 would be lost
  threadgroup float4 query_sums[UNITS * QUADS];
  threadgroup float4 scores[PARTS * TILE * SCORE_QUADS];
  threadgroup float4 rescale[QUADS];
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

  const long3 key_layout = layout_of(keys_strides, batch, kv_head);
  const long3 key_scale_layout = layout_of(key_scales_strides, batch, kv_head);
  const long3 key_bias_layout = layout_of(key_biases_strides, batch, kv_head);
  const long3 value_layout = layout_of(values_strides, batch, kv_head);
  const long3 value_scale_layout = layout_of(value_scales_strides, batch, kv_head);
  const long3 value_bias_layout = layout_of(value_biases_strides, batch, kv_head);

  for (int i = tid; i < QUADS * 4 * K_DIM; i += THREADS) {
    const int row = i / K_DIM;
    const int channel = i % K_DIM;
    const bool is_there = row < rows_here && channel < K_WIDTH;
    const float query =
        is_there ? float(queries[(size_t(head) * num_rows + first_row + row) * K_WIDTH + channel]) : 0.0f;
    const int bit = IS_K_PACKED ? bit_of<KEY_BITS>(channel) : 0;
    if (row < ROWS) {
      ((threadgroup float*)query_tile)[i] = query * as_type<float>(uint(127 - bit) << 23);  // / 2^bit
    }
    const float sum = simd_sum(query);  // a simdgroup has one unit of one row
    if (lane == 0) {
      ((threadgroup float*)query_sums)[channel / 32 * QUADS * 4 + row] = sum;
    }
  }
  // Tokens behind the last are computed like the rest and given no weight: what they are made of must be finite.
  for (int i = tid; i < TILE * STAGE_ROW + 1; i += THREADS) {
    stage[i] = 0;
  }
  for (int i = tid; i < TILE * STAGE_GROUPS; i += THREADS) {
    stage_scales[i] = 0.0f;
    stage_biases[i] = 0.0f;
  }
  if (tid < QUADS) {
    rescale[tid] = float4(1.0f);
  }

  float own_max[OWN_ROWS];
  float own_sum[OWN_ROWS];
  int own_begin[OWN_ROWS];  // of what the row sees here, and how many tokens that is
  uint own_count[OWN_ROWS];
#pragma unroll
  for (int i = 0; i < OWN_ROWS; i++) {
    const int row = simdgroup + i * SIMDGROUPS;
    const size_t at = 2 * (size_t(batch) * num_rows + first_row + min(row, rows_here - 1));
    own_max[i] = LOWEST;
    own_sum[i] = 0.0f;
    own_begin[i] = spans[at];
    own_count[i] = row < rows_here ? max(0, min(spans[at + 1], end) - own_begin[i]) : 0;
  }
  const int chunk = tid % CHUNKS;
  const int block = tid / CHUNKS % BLOCKS;
  const int slot = tid / CHUNKS / BLOCKS;
  float4 totals[BLOCK_ROWS];
#pragma unroll
  for (int i = 0; i < BLOCK_ROWS; i++) {
    totals[i] = float4(0.0f);
  }
  threadgroup_barrier(mem_flags::mem_threadgroup);

  for (int tile = begin; tile < end; tile += TILE) {
    const int tokens_here = min(TILE, end - tile);

    // --- scores: a token for each lane, its channels among the simdgroups
    if (IS_K_PACKED) {
      copy_rows<K_WORDS, K_ROW, THREADS>(stage, keys, key_layout, tile, tokens_here, tid);
      copy_rows<K_GROUPS, K_GROUPS, THREADS>(stage_scales, key_scales, key_scale_layout, tile, tokens_here, tid);
      copy_rows<K_GROUPS, K_GROUPS, THREADS>(stage_biases, key_biases, key_bias_layout, tile, tokens_here, tid);
      threadgroup_barrier(mem_flags::mem_threadgroup);
    }
    float4 products[QUADS];
#pragma unroll
    for (int quad = 0; quad < QUADS; quad++) {
      products[quad] = float4(0.0f);
    }
    for (int turn = 0; turn < TURNS; turn++) {
      const int unit = simdgroup + turn * SIMDGROUPS;
      if (unit < UNITS && IS_K_PACKED) {
        // scale * (query . codes) + bias * sum(query): two operations for 32 channels instead of one for each.
        float raw[QUADS * 4];
#pragma unroll
        for (int row = 0; row < QUADS * 4; row++) {
          raw[row] = 0.0f;
        }
        const threadgroup uint* codes = stage + lane * K_ROW + unit * KEY_BITS;
        const threadgroup float4* query = query_tile + unit * 8;
#pragma unroll 1
        for (int run = 0; run < 32 / RUN; run++) {
#pragma unroll
          for (int channel = 0; channel < RUN; channel += 4) {
            const float4 key = float4(
                masked<KEY_BITS>(codes, channel), masked<KEY_BITS>(codes, channel + 1),
                masked<KEY_BITS>(codes, channel + 2), masked<KEY_BITS>(codes, channel + 3));
#pragma unroll
            for (int row = 0; row < ROWS; row++) {
              const float4 four = query[row * (K_DIM / 4)];
              raw[row] = fma(four.w, key.w, fma(four.z, key.z, fma(four.y, key.y, fma(four.x, key.x, raw[row]))));
            }
            query++;
          }
          codes += RUN * KEY_BITS / 32;
        }
        const int at = lane * K_GROUPS + unit * 32 / K_GROUP;
#pragma unroll
        for (int quad = 0; quad < QUADS; quad++) {
          const float4 four = float4(raw[quad * 4], raw[quad * 4 + 1], raw[quad * 4 + 2], raw[quad * 4 + 3]);
          products[quad] = fma(stage_scales[at], four, fma(stage_biases[at], query_sums[unit * QUADS + quad], products[quad]));
        }
      }
      if (unit < UNITS && !IS_K_PACKED && lane < tokens_here) {
        const long at = key_layout.x + (tile + lane) * key_layout.y;
        for (int channel = unit * 32; channel < min(unit * 32 + 32, K_WIDTH); channel++) {
          const float key = float(keys[at + channel * key_layout.z]);
#pragma unroll
          for (int row = 0; row < ROWS; row++) {
            products[row / 4][row % 4] += ((const threadgroup float*)query_tile)[row * K_DIM + channel] * key;
          }
        }
      }
    }
    for (int turn = 0; turn < WRITERS / PARTS; turn++) {
      if (simdgroup / PARTS == turn) {
#pragma unroll
        for (int quad = 0; quad < QUADS; quad++) {
          const int at = (simdgroup % PARTS * TILE + lane) * SCORE_QUADS + quad;
          scores[at] = products[quad] + (turn > 0 ? scores[at] : float4(0.0f));
        }
      }
      threadgroup_barrier(mem_flags::mem_threadgroup);
    }

    // --- online softmax: a row for each simdgroup; the values come in meanwhile
#pragma unroll
    for (int i = 0; i < OWN_ROWS; i++) {
      const int row = simdgroup + i * SIMDGROUPS;
      if (row < ROWS) {
        threadgroup float* own = (threadgroup float*)scores + lane * SCORE_QUADS * 4 + row;
        const bool is_seen = uint(tile + lane - own_begin[i]) < own_count[i];
        float score = *own;
        for (int part = 1; part < PARTS; part++) {
          score += own[part * TILE * SCORE_QUADS * 4];
        }
        if (soft_cap > 0.0f) {
          score = soft_cap * precise::tanh(score / soft_cap);
        }
        score = is_seen ? score : LOWEST;
        const float maximum = max(own_max[i], simd_max(score));
        const float weight = is_seen ? exp(score - maximum) : 0.0f;
        const float factor = exp(own_max[i] - maximum);
        own_sum[i] = own_sum[i] * factor + simd_sum(weight);
        own_max[i] = maximum;
        *own = weight;
        if (lane == 0) {
          ((threadgroup float*)rescale)[row] = factor;
        }
      }
    }
    if (IS_V_PACKED) {
      copy_rows<V_WORDS, V_ROW, THREADS>(stage, values, value_layout, tile, tokens_here, tid);
      copy_rows<V_GROUPS, V_GROUPS, THREADS>(stage_scales, value_scales, value_scale_layout, tile, tokens_here, tid);
      copy_rows<V_GROUPS, V_GROUPS, THREADS>(stage_biases, value_biases, value_bias_layout, tile, tokens_here, tid);
    }
    threadgroup_barrier(mem_flags::mem_threadgroup);

    // --- outputs: four columns for each thread, tokens and blocks of rows among the threads
    if (slot < SLOTS) {
#pragma unroll
      for (int quad = 0; quad < BLOCK_QUADS; quad++) {
        const float4 factors = rescale[block * BLOCK_QUADS + quad];
#pragma unroll
        for (int i = 0; i < min(4, BLOCK_ROWS - quad * 4); i++) {
          totals[quad * 4 + i] *= factors[i];
        }
      }
      const threadgroup uint* codes = stage + slot * V_ROW + (chunk * 4 * VALUE_BITS >> 5);
      const threadgroup float* scale = stage_scales + slot * V_GROUPS + chunk * 4 / V_GROUP;
      const threadgroup float* bias = stage_biases + slot * V_GROUPS + chunk * 4 / V_GROUP;
      const threadgroup float4* weights = scores + slot * SCORE_QUADS + block * BLOCK_QUADS;
      const int tokens_computed = IS_V_PACKED ? TILE : tokens_here;  // what is not packed is not there any more
#pragma unroll 4
      for (int token = 0; token < TILE; token += SLOTS) {
        if ((TILE % SLOTS != 0 || !IS_V_PACKED) && slot + token >= tokens_computed) {
          break;
        }
        float4 value;
        if (IS_V_PACKED) {
          value = *scale * unpack4<VALUE_BITS>(codes, chunk * 4 * VALUE_BITS & 31) + *bias;
        } else {
          const long at = value_layout.x + (tile + slot + token) * value_layout.y;
          for (int i = 0; i < 4; i++) {
            const int column = chunk * 4 + i;
            value[i] = column < V_WIDTH ? float(values[at + column * value_layout.z]) : 0.0f;
          }
        }
#pragma unroll
        for (int quad = 0; quad < BLOCK_QUADS; quad++) {
#pragma unroll
          for (int i = 0; i < min(4, BLOCK_ROWS - quad * 4); i++) {
            totals[quad * 4 + i] += weights[quad][i] * value;
          }
        }
        codes += SLOTS * V_ROW;
        scale += SLOTS * V_GROUPS;
        bias += SLOTS * V_GROUPS;
        weights += SLOTS * SCORE_QUADS;
      }
    }
    threadgroup_barrier(mem_flags::mem_threadgroup);
  }

  const size_t first_at =
      (size_t(threadgroup_position_in_grid.x) * threadgroups_per_grid.y + head) * num_rows + first_row;
#pragma unroll
  for (int i = 0; i < OWN_ROWS; i++) {
    const int row = simdgroup + i * SIMDGROUPS;
    if (lane == 0 && row < rows_here) {
      maxima[first_at + row] = own_max[i];
      sums[first_at + row] = own_sum[i];
    }
  }
#pragma unroll
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
