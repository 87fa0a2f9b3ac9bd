// Integer functions. `long long` has 128 bits in OpenCL, hence the builtins of `long`.
namespace metal {
// The value's bits in an unsigned long, without sign extension.
template <class T>
METAL_FUNC ulong __bits(T x) {
  return sizeof(T) == 8 ? ulong(x) : ulong(x) & ((1ul << (8 * (sizeof(T) & 7))) - 1);
}

#define MSL_INTEGERS(X) X(char) X(uchar) X(short) X(ushort) X(int) X(uint) X(long) X(ulong)
#define MSL_INTEGER_FUNCTIONS(T) \
  METAL_FUNC T max(T x, T y) { return x > y ? x : y; } \
  METAL_FUNC T min(T x, T y) { return x < y ? x : y; } \
  METAL_FUNC T max3(T x, T y, T z) { return max(max(x, y), z); } \
  METAL_FUNC T min3(T x, T y, T z) { return min(min(x, y), z); } \
  METAL_FUNC T clamp(T x, T low, T high) { return min(max(x, low), high); } \
  METAL_FUNC T abs(T x) { return x < T(0) ? T(-x) : x; } \
  METAL_FUNC T popcount(T x) { return T(__builtin_popcountl(__bits(x))); } \
  METAL_FUNC T clz(T x) { \
    return T(x ? __builtin_clzl(__bits(x)) - (64 - 8 * int(sizeof(T))) : 8 * int(sizeof(T))); \
  } \
  METAL_FUNC T ctz(T x) { return T(x ? __builtin_ctzl(__bits(x)) : 8 * int(sizeof(T))); } \
  METAL_FUNC T extract_bits(T x, uint offset, uint bits) { \
    return bits == 0 ? T(0) : T(T(x << (sizeof(T) * 8 - offset - bits)) >> (sizeof(T) * 8 - bits)); \
  } \
  METAL_FUNC T insert_bits(T x, T inserted, uint offset, uint bits) { \
    const ulong mask = ((bits >= 64 ? 0ul : 1ul << bits) - 1) << offset; \
    return T((ulong(x) & ~mask) | ((ulong(inserted) << offset) & mask)); \
  } \
  METAL_FUNC T rotate(T x, T by) { \
    const ulong width = sizeof(T) * 8, shift = ulong(by) & (width - 1), bits = __bits(x); \
    return shift ? T((bits << shift) | (bits >> (width - shift))) : x; \
  } \
  METAL_FUNC T reverse_bits(T x) { \
    ulong result = 0, bits = __bits(x); \
    for (uint i = 0; i < sizeof(T) * 8; i++, bits >>= 1) result = (result << 1) | (bits & 1); \
    return T(result); \
  }
MSL_INTEGERS(MSL_INTEGER_FUNCTIONS)

#define MSL_INTEGER_VECTOR(T) \
  METAL_FUNC T max(T x, T y) { return __builtin_elementwise_max(x, y); } \
  METAL_FUNC T min(T x, T y) { return __builtin_elementwise_min(x, y); } \
  METAL_FUNC T clamp(T x, T low, T high) { return min(max(x, low), high); }
#define MSL_INTEGER_VECTORS(T) MSL_INTEGER_VECTOR(T##2) MSL_INTEGER_VECTOR(T##3) MSL_INTEGER_VECTOR(T##4)
MSL_INTEGERS(MSL_INTEGER_VECTORS)

METAL_FUNC int mulhi(int x, int y) { return int((long(x) * long(y)) >> 32); }
METAL_FUNC uint mulhi(uint x, uint y) { return uint((ulong(x) * ulong(y)) >> 32); }
METAL_FUNC int mul24(int x, int y) { return x * y; }
METAL_FUNC uint mul24(uint x, uint y) { return x * y; }
METAL_FUNC int mad24(int x, int y, int z) { return x * y + z; }
METAL_FUNC uint mad24(uint x, uint y, uint z) { return x * y + z; }
}  // namespace metal
