// Names of the Metal compiler's own builtins that MLX's bf16_math.h and complex.h call.
#define MSL_BUILTIN1(name) \
  METAL_FUNC float __metal_##name(float x, int = 0) { return metal::name(x); }
MSL_BUILTIN1(fabs) MSL_BUILTIN1(acos) MSL_BUILTIN1(acosh) MSL_BUILTIN1(asin) MSL_BUILTIN1(asinh) MSL_BUILTIN1(atan)
MSL_BUILTIN1(atanh) MSL_BUILTIN1(ceil) MSL_BUILTIN1(cos) MSL_BUILTIN1(cosh) MSL_BUILTIN1(cospi) MSL_BUILTIN1(exp)
MSL_BUILTIN1(exp2) MSL_BUILTIN1(exp10) MSL_BUILTIN1(floor) MSL_BUILTIN1(fract) MSL_BUILTIN1(log) MSL_BUILTIN1(log2)
MSL_BUILTIN1(log10) MSL_BUILTIN1(rint) MSL_BUILTIN1(round) MSL_BUILTIN1(rsqrt) MSL_BUILTIN1(sin) MSL_BUILTIN1(sinh)
MSL_BUILTIN1(sinpi) MSL_BUILTIN1(sqrt) MSL_BUILTIN1(tan) MSL_BUILTIN1(tanh) MSL_BUILTIN1(tanpi) MSL_BUILTIN1(trunc)

#define MSL_BUILTIN2(name) \
  METAL_FUNC float __metal_##name(float x, float y, int = 0) { return metal::name(x, y); }
MSL_BUILTIN2(atan2) MSL_BUILTIN2(fmod) MSL_BUILTIN2(fmax) MSL_BUILTIN2(fmin) MSL_BUILTIN2(pow) MSL_BUILTIN2(powr)
MSL_BUILTIN2(nextafter) MSL_BUILTIN2(divide) MSL_BUILTIN2(fdim) MSL_BUILTIN2(copysign)

#define MSL_BUILTIN3(name) \
  METAL_FUNC float __metal_##name(float x, float y, float z, int = 0) { return metal::name(x, y, z); }
MSL_BUILTIN3(fma) MSL_BUILTIN3(fmax3) MSL_BUILTIN3(fmin3) MSL_BUILTIN3(fmedian3)

METAL_FUNC float __metal_ldexp(float x, int exponent, int = 0) { return metal::ldexp(x, exponent); }
METAL_FUNC float __metal_frexp(float x, __private int* exponent) {
  int found;
  const float mantissa = metal::frexp(x, found);
  *exponent = found;
  return mantissa;
}
METAL_FUNC ushort __metal_get_simdgroup_size(ushort) { return 32; }
METAL_FUNC ushort __metal_get_thread_index_in_simdgroup(ushort) { return ushort(__msl_lane()); }

#define MSL_BUILTIN_SHUFFLE(name) \
  template <class T> \
  METAL_FUNC T __metal_##name(T value, ushort operand, MSL_SITE) { return metal::name(value, operand, site); }
MSL_BUILTIN_SHUFFLE(simd_broadcast) MSL_BUILTIN_SHUFFLE(simd_shuffle) MSL_BUILTIN_SHUFFLE(simd_shuffle_xor)
MSL_BUILTIN_SHUFFLE(simd_shuffle_up) MSL_BUILTIN_SHUFFLE(simd_shuffle_down)
MSL_BUILTIN_SHUFFLE(simd_shuffle_rotate_up) MSL_BUILTIN_SHUFFLE(simd_shuffle_rotate_down)

#define MSL_BUILTIN_FILL(name) \
  template <class T> \
  METAL_FUNC T __metal_##name(T value, T fill, ushort delta, ushort modulo, MSL_SITE) { \
    return metal::name(value, fill, delta, modulo, site); \
  }
MSL_BUILTIN_FILL(simd_shuffle_and_fill_up) MSL_BUILTIN_FILL(simd_shuffle_and_fill_down)

#define MSL_BUILTIN_REDUCE(name) \
  template <class T> \
  METAL_FUNC T __metal_##name(T value, MSL_SITE) { return metal::name(value, site); }
MSL_BUILTIN_REDUCE(simd_sum) MSL_BUILTIN_REDUCE(simd_product) MSL_BUILTIN_REDUCE(simd_max) MSL_BUILTIN_REDUCE(simd_min)
MSL_BUILTIN_REDUCE(simd_prefix_inclusive_sum) MSL_BUILTIN_REDUCE(simd_prefix_exclusive_sum)
MSL_BUILTIN_REDUCE(simd_prefix_inclusive_product) MSL_BUILTIN_REDUCE(simd_prefix_exclusive_product)
METAL_FUNC float __metal_simd_xor(float value, MSL_SITE) {
  return __builtin_bit_cast(float, metal::simd_xor(__builtin_bit_cast(uint, value), site));
}
