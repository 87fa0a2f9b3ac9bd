// What Apple's compiler leaves to the GPU, under the names that AIR has for it (see air.py): arithmetic as the shim
// does it, and exchange between lanes through the engine. AIR has no line numbers, so sites are 0 here. Integers
// narrower than 32 bits arrive without a promise about the upper ones.
#include <cmath>
#include <cstring>

#include "engine.h"

using msl::Exchange;

extern "C" {
uint32_t __msl_lane();
void __msl_fail(const char* message, uint32_t site);
Exchange* __msl_simd_post(const void* value, uint32_t size, uint32_t site, uint32_t operation, int* last);
void __msl_simd_release();
void __msl_simd_barrier(uint32_t flags, uint32_t site);
void __msl_threadgroup_barrier(uint32_t flags, uint32_t site);
}

namespace {

enum Operation : uint32_t { kSum = 1, kMaximum, kMinimum, kShuffle, kMatrix };

void require_all_lanes(const Exchange* exchange) {
  if (exchange->mask != 0xffffffffu) __msl_fail("a lane that is not active, or does not exist, is read", 0);
}

template <class T>
const T* exchanged(T value, uint32_t operation) {
  int last = 0;
  Exchange* exchange = __msl_simd_post(&value, sizeof value, 0, operation, &last);
  if (last) __msl_simd_release();
  require_all_lanes(exchange);
  return reinterpret_cast<const T*>(exchange->slots);
}

// The shim's order: a butterfly.
template <class F>
float reduced(float value, uint32_t operation, F combine) {
  int last = 0;
  Exchange* exchange = __msl_simd_post(&value, sizeof value, 0, operation, &last);
  if (last) {
    require_all_lanes(exchange);
    float* values = reinterpret_cast<float*>(exchange->slots);
    for (int width = 16; width; width /= 2) {
      for (int i = 0; i < width; i++) values[i] = combine(values[i], values[i + width]);
    }
    memcpy(exchange->result, values, sizeof *values);
    __msl_simd_release();
  }
  memcpy(&value, exchange->result, sizeof value);
  return value;
}

float maximum(float a, float b) { return __builtin_elementwise_max(a, b); }
float minimum(float a, float b) { return __builtin_elementwise_min(a, b); }

uint32_t lane_of(uint32_t row, uint32_t column) {
  return (row & 4) * 4 + (column & 4) * 2 + (row & 3) * 2 + (column & 3) / 2;
}

}  // namespace

#define AIR(type, function, name, ...) \
  extern "C" type function(__VA_ARGS__) __asm__("air." name); \
  type function(__VA_ARGS__)

AIR(void, air_barrier, "wg.barrier", uint32_t flags, uint32_t) { __msl_threadgroup_barrier(flags, 0); }
AIR(void, air_simd_barrier, "simdgroup.barrier", uint32_t flags, uint32_t) { __msl_simd_barrier(flags, 0); }
AIR(uint32_t, air_predicate, "normalize_function_constant_predicate.i8", uint32_t x) { return x & 0xff; }

AIR(float, air_fmax, "fmax.f32", float a, float b) { return maximum(a, b); }
AIR(float, air_fmin, "fmin.f32", float a, float b) { return minimum(a, b); }
AIR(float, air_fabs, "fabs.f32", float x) { return __builtin_elementwise_abs(x); }
AIR(float, air_round, "round.f32", float x) { return __builtin_elementwise_round(x); }
AIR(float, air_exp, "fast_exp.f32", float x) { return expf(x); }
AIR(int32_t, air_min, "min.s.i32", int32_t a, int32_t b) { return a < b ? a : b; }

AIR(float, air_f32_of_i32, "convert.f.f32.s.i32", int32_t x) { return x; }
AIR(float, air_f32_of_u32, "convert.f.f32.u.i32", uint32_t x) { return x; }
AIR(_Float16, air_f16_of_i32, "convert.f.f16.s.i32", int32_t x) { return x; }
AIR(__bf16, air_bf16_of_i32, "convert.f.bf16.s.i32", int32_t x) { return x; }
AIR(uint32_t, air_u8_of_f32, "convert.u.i8.f.f32", float x) { return static_cast<uint8_t>(x); }

AIR(float, air_sum, "simd_sum.f32", float x) { return reduced(x, kSum, [](float a, float b) { return a + b; }); }
AIR(float, air_simd_max, "simd_max.f32", float x) { return reduced(x, kMaximum, maximum); }
AIR(float, air_simd_min, "simd_min.f32", float x) { return reduced(x, kMinimum, minimum); }
AIR(uint32_t, air_shuffle_down, "simd_shuffle_down.u.i8", uint32_t x, uint32_t delta) {
  const uint8_t own = static_cast<uint8_t>(x);
  const uint8_t* values = exchanged(own, kShuffle);
  const uint32_t source = __msl_lane() + static_cast<uint16_t>(delta);
  return source < msl::kSimdWidth ? values[source] : own;
}

// left, right, sum: of each, the first two of 64 values are this lane's, as in the shim's matrix.h.
AIR(void, air_multiply_accumulate, "multiply_accumulate", float (*matrices)[64]) {
  struct Factors { float left[2], right[2]; };
  const Factors mine = {{matrices[0][0], matrices[0][1]}, {matrices[1][0], matrices[1][1]}};
  const Factors* all = exchanged(mine, kMatrix);
  const uint32_t lane = __msl_lane(), row = (lane / 4 & 4) + lane / 2 % 4, column = (lane / 4 & 2) * 2 + lane % 2 * 2;
  for (uint32_t k = 0; k < 8; k++) {
    const float factor = all[lane_of(row, k)].left[k & 1];
    for (int i = 0; i < 2; i++) matrices[2][i] += factor * all[lane_of(k, column)].right[i];
  }
}
