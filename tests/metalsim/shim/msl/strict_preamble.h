// In place of MLX's preamble in the strict pass: that one is not valid without generic pointers.
#include <metal_stdlib>
using namespace metal;
typedef bfloat bfloat16_t;
typedef half float16_t;

template <typename U>
struct Limits {
  static constexpr constant U max = numeric_limits<U>::max();
  static constexpr constant U min = numeric_limits<U>::lowest();
  static constexpr constant U finite_max = numeric_limits<U>::max();
  static constexpr constant U finite_min = numeric_limits<U>::lowest();
};
