// Barriers and simdgroup operations. An operation puts the lane's value into an exchange buffer and waits until
// every lane of the simdgroup has done so.
namespace metal {
enum class mem_flags : uint {
  mem_none = 0,
  mem_device = 1,
  mem_threadgroup = 2,
  mem_texture = 4,
  mem_threadgroup_imageblock = 8,
  mem_object_data = 16,
};
METAL_FUNC constexpr mem_flags operator|(mem_flags a, mem_flags b) { return mem_flags(uint(a) | uint(b)); }
METAL_FUNC constexpr mem_flags operator&(mem_flags a, mem_flags b) { return mem_flags(uint(a) & uint(b)); }
METAL_FUNC void threadgroup_barrier(mem_flags flags, MSL_SITE) { __msl_threadgroup_barrier(uint(flags), site); }
METAL_FUNC void simdgroup_barrier(mem_flags flags, MSL_SITE) { __msl_simd_barrier(uint(flags), site); }

// Two operations of one source line are told apart by these.
enum __operation : uint { __shuffle = 1, __sum, __product, __maximum, __minimum, __and, __or, __xor, __vote, __prefix,
                          __matrix, __quad };

template <class T>
using __if_simd = enable_if_t<is_arithmetic_v<make_scalar_t<T>>>;

template <class T>
METAL_FUNC MSL_UNCHECKED __private __msl_exchange* __exchange(T value, uint site, uint operation) {
  static_assert(sizeof(T) <= 64, "");
  T posted = value;  // the store has its line here, and is not counted as the kernel's
  int last = 0;
  __private __msl_exchange* exchange = __msl_simd_post(&posted, sizeof(T), site, operation, &last);
  if (last) __msl_simd_release();
  return exchange;
}

METAL_FUNC MSL_UNCHECKED bool __is_active(const __private __msl_exchange* exchange, uint lane) {
  return lane < 32 && ((exchange->mask >> lane) & 1);
}

template <class T>
METAL_FUNC MSL_UNCHECKED T __slot(const __private __msl_exchange* exchange, uint lane, uint site) {
  if (!__is_active(exchange, lane)) __msl_fail("a lane that is not active, or does not exist, is read", site);
  return ((const __private T*)exchange->slots)[lane & 31];
}

// ---------------------------------------------------------------- reductions

// In the order of a butterfly; lanes one after the other where some are missing.
template <class T, class F>
METAL_FUNC MSL_UNCHECKED T __combine(const __private T* values, uint mask, const __private F& combine) {
  T partial[32];
  if (mask == 0xffffffffu) {
    for (int i = 0; i < 16; i++) partial[i] = combine(values[i], values[i + 16]);
    for (int width = 8; width; width /= 2) {
      for (int i = 0; i < width; i++) partial[i] = combine(partial[i], partial[i + width]);
    }
    return partial[0];
  }
  const int first = __builtin_ctz(mask);
  partial[0] = values[first];
  for (int i = first + 1; i < 32; i++) {
    if ((mask >> i) & 1) partial[0] = combine(partial[0], values[i]);
  }
  return partial[0];
}

template <class T, class F>
METAL_FUNC MSL_UNCHECKED T __reduce(T value, uint site, uint operation, F combine) {
  T posted = value;  // the store has its line here, and is not counted as the kernel's
  int last = 0;
  __private __msl_exchange* exchange = __msl_simd_post(&posted, sizeof(T), site, operation, &last);
  if (last) {
    *(__private T*)exchange->result = __combine((const __private T*)exchange->slots, exchange->mask, combine);
    __msl_simd_release();
  }
  return *(const __private T*)exchange->result;
}

#define MSL_REDUCE(name, operation, expression) \
  template <class T, class = __if_simd<T>> \
  METAL_FUNC MSL_UNCHECKED T name(T value, MSL_SITE) { \
    return __reduce(value, site, operation, [](T a, T b) { return T(expression); }); \
  }
MSL_REDUCE(simd_sum, __sum, a + b)
MSL_REDUCE(simd_product, __product, a * b)
MSL_REDUCE(simd_max, __maximum, max(a, b))
MSL_REDUCE(simd_min, __minimum, min(a, b))
MSL_REDUCE(simd_and, __and, a & b)
MSL_REDUCE(simd_or, __or, a | b)
MSL_REDUCE(simd_xor, __xor, a ^ b)

// Over the lanes below this one, and this one itself if `inclusive`.
template <class T, class F>
METAL_FUNC MSL_UNCHECKED T __scan(T value, T start, bool inclusive, uint site, F combine) {
  const __private __msl_exchange* exchange = __exchange(value, site, __prefix);
  const uint end = __msl_lane() + inclusive;
  for (uint i = 0; i < end; i++) {
    if (__is_active(exchange, i)) start = combine(start, __slot<T>(exchange, i, site));
  }
  return start;
}
#define MSL_SCAN(name, start, inclusive, expression) \
  template <class T, class = __if_simd<T>> \
  METAL_FUNC T name(T value, MSL_SITE) { \
    return __scan(value, T(start), inclusive, site, [](T a, T b) { return T(expression); }); \
  }
MSL_SCAN(simd_prefix_inclusive_sum, 0, true, a + b)
MSL_SCAN(simd_prefix_exclusive_sum, 0, false, a + b)
MSL_SCAN(simd_prefix_inclusive_product, 1, true, a * b)
MSL_SCAN(simd_prefix_exclusive_product, 1, false, a * b)

// ---------------------------------------------------------------- shuffles

// A lane gets the value of lane `source`, an expression in `lane`, its own number, and the operand.
#define MSL_SHUFFLE(name, operand, operation, source) \
  template <class T, class = __if_simd<T>> \
  METAL_FUNC T name(T value, ushort operand, MSL_SITE) { \
    const __private __msl_exchange* exchange = __exchange(value, site, operation); \
    const uint lane = __msl_lane(); \
    (void)lane; \
    return __slot<T>(exchange, source, site); \
  }
MSL_SHUFFLE(simd_shuffle, from, __shuffle, from)
MSL_SHUFFLE(simd_broadcast, from, __shuffle, from)
MSL_SHUFFLE(simd_shuffle_xor, mask, __shuffle, lane ^ mask)
MSL_SHUFFLE(simd_shuffle_rotate_down, delta, __shuffle, (lane + delta) & 31)
MSL_SHUFFLE(simd_shuffle_rotate_up, delta, __shuffle, (lane - delta) & 31)
MSL_SHUFFLE(quad_shuffle, from, __quad, (lane & ~3u) + from)
MSL_SHUFFLE(quad_broadcast, from, __quad, (lane & ~3u) + from)
MSL_SHUFFLE(quad_shuffle_xor, mask, __quad, lane ^ (mask & 3))

// A lane whose source would lie outside keeps its own value.
#define MSL_SHIFT(name, operation, source, inside) \
  template <class T, class = __if_simd<T>> \
  METAL_FUNC T name(T value, ushort delta, MSL_SITE) { \
    const __private __msl_exchange* exchange = __exchange(value, site, operation); \
    const uint lane = __msl_lane(); \
    return (inside) && __is_active(exchange, source) ? __slot<T>(exchange, source, site) : value; \
  }
MSL_SHIFT(simd_shuffle_down, __shuffle, lane + delta, lane + delta < 32)
MSL_SHIFT(simd_shuffle_up, __shuffle, lane - delta, lane >= delta)
MSL_SHIFT(quad_shuffle_down, __quad, lane + delta, (lane & 3) + delta < 4)
MSL_SHIFT(quad_shuffle_up, __quad, lane - delta, (lane & 3) >= delta)

// Lanes whose source would lie outside a block of `modulo` lanes take `fill` from its other end.
template <class T, class = __if_simd<T>>
METAL_FUNC T simd_shuffle_and_fill_down(T value, T fill, ushort delta, ushort modulo = 32, MSL_SITE) {
  const uint lane = __msl_lane(), end = lane / modulo * modulo + modulo, source = lane + delta;
  const __private __msl_exchange* exchange = __exchange(value, site, __shuffle);
  const T inside = source < end ? __slot<T>(exchange, source, site) : value;
  exchange = __exchange(fill, site, __shuffle);
  return source < end ? inside : __slot<T>(exchange, source - modulo, site);
}
template <class T, class = __if_simd<T>>
METAL_FUNC T simd_shuffle_and_fill_up(T value, T fill, ushort delta, ushort modulo = 32, MSL_SITE) {
  const uint lane = __msl_lane(), begin = lane / modulo * modulo;
  const bool is_inside = lane >= begin + delta;
  const __private __msl_exchange* exchange = __exchange(value, site, __shuffle);
  const T inside = is_inside ? __slot<T>(exchange, lane - delta, site) : value;
  exchange = __exchange(fill, site, __shuffle);
  return is_inside ? inside : __slot<T>(exchange, lane + modulo - delta, site);
}

template <class T, class = __if_simd<T>>
METAL_FUNC MSL_UNCHECKED T simd_broadcast_first(T value, MSL_SITE) {
  const __private __msl_exchange* exchange = __exchange(value, site, __shuffle);
  return __slot<T>(exchange, __builtin_ctz(exchange->mask), site);
}

#define MSL_QUAD_REDUCE(name, expression) \
  template <class T, class = __if_simd<T>> \
  METAL_FUNC T name(T value, MSL_SITE) { \
    const __private __msl_exchange* exchange = __exchange(value, site, __quad); \
    const uint first = __msl_lane() & ~3u; \
    const auto combine = [](T a, T b) { return T(expression); }; \
    const T even = combine(__slot<T>(exchange, first, site), __slot<T>(exchange, first + 2, site)); \
    const T odd = combine(__slot<T>(exchange, first + 1, site), __slot<T>(exchange, first + 3, site)); \
    return combine(even, odd); \
  }
MSL_QUAD_REDUCE(quad_sum, a + b)
MSL_QUAD_REDUCE(quad_max, max(a, b))
MSL_QUAD_REDUCE(quad_min, min(a, b))

// ---------------------------------------------------------------- votes

METAL_FUNC MSL_UNCHECKED ulong __ballot(bool vote, uint site) {
  const uchar value = vote;
  const __private __msl_exchange* exchange = __exchange(value, site, __vote);
  ulong result = 0;
  for (uint i = 0; i < 32; i++) {
    if (__is_active(exchange, i)) result |= ulong(exchange->slots[i] & 1) << i;
  }
  return result;
}
struct simd_vote {
  ulong votes;
  explicit operator ulong() const { return votes; }
  bool all() const { return votes == 0xffffffffu; }
  bool any() const { return votes != 0; }
};
METAL_FUNC simd_vote simd_ballot(bool vote, MSL_SITE) { return simd_vote{__ballot(vote, site)}; }
METAL_FUNC bool simd_any(bool vote, MSL_SITE) { return __ballot(vote, site) != 0; }
METAL_FUNC bool simd_all(bool vote, MSL_SITE) { return __ballot(!vote, site) == 0; }
METAL_FUNC ulong simd_active_threads_mask(MSL_SITE) { return __ballot(true, site); }
METAL_FUNC bool simd_is_first(MSL_SITE) { return __msl_lane() == uint(__builtin_ctzl(__ballot(true, site))); }
}  // namespace metal
