// Vector construction, bit casts, arrays. The front end writes `float4(...)` as `metal::__make<float4>(...)`.
namespace metal {
template <class V, class A>
METAL_FUNC void __append(__private V& result, __private int& filled, A value) {
  typedef make_scalar_t<V> element;
  if constexpr (__vector<A>::size == 1) {
    result[filled++] = static_cast<element>(value);
  } else {
    for (int i = 0; i < __vector<A>::size; i++) result[filled++] = static_cast<element>(value[i]);
  }
}

template <class V, class... A>
METAL_FUNC V __make(A... values) {
  constexpr int size = __vector<V>::size, given = (0 + ... + __vector<A>::size);
  if constexpr (size == 1) {
    return V(values...);
  } else if constexpr (sizeof...(A) == 0) {
    return V(0);
  } else if constexpr (given == 1) {
    return V(static_cast<make_scalar_t<V>>(values)...);
  } else {
    static_assert(given == size, "wrong number of elements in a vector constructor");
    V result;
    int filled = 0;
    (__append(result, filled, values), ...);
    return result;
  }
}

template <class T, class U>
METAL_FUNC T __as_type(U value) {
  static_assert(sizeof(T) == sizeof(U), "as_type between types of different size");
  return __builtin_bit_cast(T, value);
}

template <class T, size_t N>
struct array {
  T __elements[N];
  T operator[](size_t i) const { return __elements[i]; }
  __private T& operator[](size_t i) __private { return __elements[i]; }
  constexpr size_t size() const { return N; }
};
}  // namespace metal
#define as_type metal::__as_type
