// Floating-point functions. Concrete overloads rather than templates, so that a call with mixed types is as
// ambiguous here as it is in Metal. bfloat has none of its own: MLX's preamble adds them.

extern "C" {
float expf(float); float exp2f(float); float logf(float); float log2f(float); float log10f(float);
float sinf(float); float cosf(float); float tanf(float); float asinf(float); float acosf(float); float atanf(float);
float sinhf(float); float coshf(float); float tanhf(float); float asinhf(float); float acoshf(float);
float atanhf(float); float powf(float, float); float atan2f(float, float); float fmodf(float, float);
float nextafterf(float, float);
}

namespace metal {
// One element of each function, in float.
struct __scalar {
#define MSL_ONE(name, expression) \
  static METAL_FUNC float name(float x) { return expression; }
  MSL_ONE(exp, expf(x)) MSL_ONE(exp2, exp2f(x)) MSL_ONE(exp10, powf(10.0f, x))
  MSL_ONE(log, logf(x)) MSL_ONE(log2, log2f(x)) MSL_ONE(log10, log10f(x))
  MSL_ONE(sin, sinf(x)) MSL_ONE(cos, cosf(x)) MSL_ONE(tan, tanf(x))
  MSL_ONE(asin, asinf(x)) MSL_ONE(acos, acosf(x)) MSL_ONE(atan, atanf(x))
  MSL_ONE(sinh, sinhf(x)) MSL_ONE(cosh, coshf(x)) MSL_ONE(tanh, tanhf(x))
  MSL_ONE(asinh, asinhf(x)) MSL_ONE(acosh, acoshf(x)) MSL_ONE(atanh, atanhf(x))
  MSL_ONE(sinpi, sinf(M_PI_F * x)) MSL_ONE(cospi, cosf(M_PI_F * x)) MSL_ONE(tanpi, tanf(M_PI_F * x))
  MSL_ONE(sqrt, __builtin_elementwise_sqrt(x)) MSL_ONE(rsqrt, 1.0f / __builtin_elementwise_sqrt(x))
  MSL_ONE(floor, __builtin_elementwise_floor(x)) MSL_ONE(ceil, __builtin_elementwise_ceil(x))
  MSL_ONE(trunc, __builtin_elementwise_trunc(x)) MSL_ONE(rint, __builtin_elementwise_rint(x))
  MSL_ONE(round, __builtin_elementwise_round(x)) MSL_ONE(fabs, __builtin_elementwise_abs(x))
  MSL_ONE(fract, x - __builtin_elementwise_floor(x)) MSL_ONE(sign, x > 0.0f ? 1.0f : x < 0.0f ? -1.0f : 0.0f)
  MSL_ONE(saturate, x < 0.0f ? 0.0f : x > 1.0f ? 1.0f : x)
#define MSL_TWO(name, expression) \
  static METAL_FUNC float name(float x, float y) { return expression; }
  MSL_TWO(pow, powf(x, y)) MSL_TWO(powr, powf(x, y)) MSL_TWO(atan2, atan2f(x, y)) MSL_TWO(fmod, fmodf(x, y))
  MSL_TWO(nextafter, nextafterf(x, y)) MSL_TWO(copysign, __builtin_elementwise_copysign(x, y))
  MSL_TWO(divide, x / y) MSL_TWO(step, y < x ? 0.0f : 1.0f) MSL_TWO(fdim, x > y ? x - y : 0.0f)
};

template <class V, class F>
METAL_FUNC V __map(V x, F function) {
  if constexpr (__vector<V>::size == 1) {
    return V(function(float(x)));
  } else {
    V result;
    for (int i = 0; i < __vector<V>::size; i++) result[i] = make_scalar_t<V>(function(float(x[i])));
    return result;
  }
}
template <class V, class F>
METAL_FUNC V __map(V x, V y, F function) {
  if constexpr (__vector<V>::size == 1) {
    return V(function(float(x), float(y)));
  } else {
    V result;
    for (int i = 0; i < __vector<V>::size; i++) result[i] = make_scalar_t<V>(function(float(x[i]), float(y[i])));
    return result;
  }
}

METAL_FUNC float __exact(float value) { return value; }
// With MSL_FAST_ULP=n the functions of metal::fast are off by up to n units in the last place, always the same way
// for the same value: how far a kernel's result depends on their accuracy.
METAL_FUNC float __inexact(float value) {
#ifdef MSL_FAST_ULP
  const uint bits = __builtin_bit_cast(uint, value);
  const bool is_special = (bits & 0x7f800000u) == 0x7f800000u || (bits & 0x7fffffffu) < 0x01000000u;
  const uint hash = (bits * 2654435761u) ^ ((bits * 2654435761u) >> 15);
  if (!is_special) return __builtin_bit_cast(float, bits + hash % (2 * MSL_FAST_ULP + 1) - MSL_FAST_ULP);
#endif
  return value;
}

#define MSL_FLOATS(X, ...) \
  X(float, __VA_ARGS__) X(float2, __VA_ARGS__) X(float3, __VA_ARGS__) X(float4, __VA_ARGS__) \
  X(half, __VA_ARGS__) X(half2, __VA_ARGS__) X(half3, __VA_ARGS__) X(half4, __VA_ARGS__)
#define MSL_DEFINE1(T, name, finish) \
  METAL_FUNC T name(T x) { return __map(x, [](float v) { return finish(__scalar::name(v)); }); }
#define MSL_DEFINE2(T, name, finish) \
  METAL_FUNC T name(T x, T y) { return __map(x, y, [](float v, float w) { return finish(__scalar::name(v, w)); }); }
#define MSL_EACH1(name, finish) MSL_FLOATS(MSL_DEFINE1, name, finish)
#define MSL_EACH2(name, finish) MSL_FLOATS(MSL_DEFINE2, name, finish)
#define MSL_APPROXIMATE(finish) \
  MSL_EACH1(exp, finish) MSL_EACH1(exp2, finish) MSL_EACH1(exp10, finish) MSL_EACH1(log, finish) \
  MSL_EACH1(log2, finish) MSL_EACH1(log10, finish) MSL_EACH1(sin, finish) MSL_EACH1(cos, finish) \
  MSL_EACH1(tan, finish) MSL_EACH1(asin, finish) MSL_EACH1(acos, finish) MSL_EACH1(atan, finish) \
  MSL_EACH1(sinh, finish) MSL_EACH1(cosh, finish) MSL_EACH1(tanh, finish) MSL_EACH1(asinh, finish) \
  MSL_EACH1(acosh, finish) MSL_EACH1(atanh, finish) MSL_EACH1(sinpi, finish) MSL_EACH1(cospi, finish) \
  MSL_EACH1(tanpi, finish) MSL_EACH1(sqrt, finish) MSL_EACH1(rsqrt, finish) MSL_EACH2(pow, finish) \
  MSL_EACH2(powr, finish) MSL_EACH2(atan2, finish)
#define MSL_EXACT \
  MSL_EACH1(floor, __exact) MSL_EACH1(ceil, __exact) MSL_EACH1(trunc, __exact) MSL_EACH1(rint, __exact) \
  MSL_EACH1(round, __exact) MSL_EACH1(fabs, __exact) MSL_EACH1(fract, __exact) MSL_EACH1(sign, __exact) \
  MSL_EACH1(saturate, __exact) MSL_EACH2(fmod, __exact) MSL_EACH2(copysign, __exact) \
  MSL_EACH2(nextafter, __exact) MSL_EACH2(divide, __exact) MSL_EACH2(step, __exact) MSL_EACH2(fdim, __exact)

MSL_APPROXIMATE(__exact)
MSL_EXACT
namespace precise { MSL_APPROXIMATE(__exact) MSL_EXACT }
namespace fast { MSL_APPROXIMATE(__inexact) MSL_EXACT }

#define MSL_COMPARE(T, ...) \
  METAL_FUNC T max(T x, T y) { return __builtin_elementwise_max(x, y); } \
  METAL_FUNC T min(T x, T y) { return __builtin_elementwise_min(x, y); } \
  METAL_FUNC T fmax(T x, T y) { return __builtin_elementwise_max(x, y); } \
  METAL_FUNC T fmin(T x, T y) { return __builtin_elementwise_min(x, y); } \
  METAL_FUNC T max3(T x, T y, T z) { return max(max(x, y), z); } \
  METAL_FUNC T min3(T x, T y, T z) { return min(min(x, y), z); } \
  METAL_FUNC T fmax3(T x, T y, T z) { return max(max(x, y), z); } \
  METAL_FUNC T fmin3(T x, T y, T z) { return min(min(x, y), z); } \
  METAL_FUNC T median3(T x, T y, T z) { return max(min(x, y), min(max(x, y), z)); } \
  METAL_FUNC T fmedian3(T x, T y, T z) { return median3(x, y, z); } \
  METAL_FUNC T clamp(T x, T low, T high) { return min(max(x, low), high); } \
  METAL_FUNC T abs(T x) { return __builtin_elementwise_abs(x); } \
  METAL_FUNC T fma(T x, T y, T z) { return __builtin_elementwise_fma(x, y, z); } \
  METAL_FUNC T mix(T x, T y, T a) { return x + (y - x) * a; } \
  METAL_FUNC T smoothstep(T low, T high, T x) { \
    const T t = clamp((x - low) / (high - low), T(0), T(1)); \
    return t * t * (T(3) - T(2) * t); \
  }
MSL_FLOATS(MSL_COMPARE, )
#define MSL_SAME(space) \
  namespace space { \
  using metal::abs; using metal::clamp; using metal::fma; using metal::fmax; \
  using metal::fmin; using metal::max; using metal::min; \
  }
MSL_SAME(fast) MSL_SAME(precise)

#define MSL_CLASSIFY(T) \
  METAL_FUNC bool isnan(T x) { return x != x; } \
  METAL_FUNC bool isinf(T x) { return __builtin_elementwise_abs(float(x)) == __builtin_inff(); } \
  METAL_FUNC bool isfinite(T x) { return __builtin_elementwise_abs(float(x)) < __builtin_inff(); } \
  METAL_FUNC bool isnormal(T x) { return __builtin_isnormal(float(x)); } \
  METAL_FUNC bool signbit(T x) { return __builtin_signbit(float(x)); }
MSL_CLASSIFY(float) MSL_CLASSIFY(half) MSL_CLASSIFY(bfloat)

#define MSL_SINCOS(T) \
  METAL_FUNC T sincos(T x, __private T& cosine) { \
    cosine = cos(x); \
    return sin(x); \
  }
MSL_SINCOS(float) MSL_SINCOS(float2) MSL_SINCOS(half)
METAL_FUNC float ldexp(float x, int exponent) { return __builtin_ldexpf(x, exponent); }
METAL_FUNC half ldexp(half x, int exponent) { return half(__builtin_ldexpf(float(x), exponent)); }
METAL_FUNC float frexp(float x, __private int& exponent) {
  exponent = 0;
  if (x == 0 || isnan(x) || isinf(x)) return x;
  for (; fabs(x) >= 1.0f; exponent++) x *= 0.5f;
  for (; fabs(x) < 0.5f; exponent--) x *= 2.0f;
  return x;
}
METAL_FUNC int ilogb(float x) {
  int exponent;
  frexp(x, exponent);
  return exponent - 1;
}
METAL_FUNC float modf(float x, __private float& whole) {
  whole = trunc(x);
  return x - whole;
}

#define MSL_GEOMETRY(T, N) \
  METAL_FUNC T dot(T##N a, T##N b) { \
    T sum = a[0] * b[0]; \
    for (int i = 1; i < N; i++) sum += a[i] * b[i]; \
    return sum; \
  } \
  METAL_FUNC T length(T##N a) { return sqrt(dot(a, a)); } \
  METAL_FUNC T distance(T##N a, T##N b) { return length(a - b); } \
  METAL_FUNC T##N normalize(T##N a) { return a * rsqrt(dot(a, a)); }
MSL_GEOMETRY(float, 2) MSL_GEOMETRY(float, 3) MSL_GEOMETRY(float, 4)
MSL_GEOMETRY(half, 2) MSL_GEOMETRY(half, 3) MSL_GEOMETRY(half, 4)

template <class T>
METAL_FUNC T select(T a, T b, bool choose_b) {
  return choose_b ? b : a;
}
METAL_FUNC bool any(bool value) { return value; }
METAL_FUNC bool all(bool value) { return value; }
#define MSL_BOOLS(N) \
  template <class T> \
  METAL_FUNC vec<T, N> select(vec<T, N> a, vec<T, N> b, bool##N choose_b) { \
    vec<T, N> result; \
    for (int i = 0; i < N; i++) result[i] = choose_b[i] ? b[i] : a[i]; \
    return result; \
  } \
  METAL_FUNC bool any(bool##N values) { \
    bool result = false; \
    for (int i = 0; i < N; i++) result = result || values[i]; \
    return result; \
  } \
  METAL_FUNC bool all(bool##N values) { \
    bool result = true; \
    for (int i = 0; i < N; i++) result = result && values[i]; \
    return result; \
  }
MSL_BOOLS(2) MSL_BOOLS(3) MSL_BOOLS(4)

METAL_FUNC float4 unpack_unorm4x8_to_float(uint packed) {
  float4 result;
  for (int i = 0; i < 4; i++) result[i] = float((packed >> (8 * i)) & 255u) / 255.0f;
  return result;
}
}  // namespace metal
