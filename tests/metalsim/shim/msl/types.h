// Language words, scalar and vector types, and what the engine exports.
#define __METAL__ 1
#define __METAL_VERSION__ 320
#define __METAL_FAST_MATH__ 1
#define __METAL_PRECISE_MATH__ 0
#define __METAL_MAYBE_FAST_MATH__ 0
#define device __global
#define threadgroup __local
#define thread __private
// `constant` and `kernel` are words of OpenCL already.
#define METAL_FUNC inline __attribute__((always_inline))

typedef unsigned char uchar;
typedef unsigned short ushort;
typedef unsigned int uint;
typedef unsigned long ulong;
typedef signed char int8_t;
typedef unsigned char uint8_t;
typedef short int16_t;
typedef unsigned short uint16_t;
typedef int int32_t;
typedef unsigned int uint32_t;
typedef long int64_t;
typedef unsigned long uint64_t;
typedef __SIZE_TYPE__ size_t;
typedef __PTRDIFF_TYPE__ ptrdiff_t;
typedef __UINTPTR_TYPE__ uintptr_t;
typedef __bf16 bfloat;

#define INFINITY __builtin_inff()
#define HUGE_VALF __builtin_inff()
#define NAN __builtin_nanf("")
#define MAXFLOAT 3.402823466e+38f
#define FLT_MAX 3.402823466e+38f
#define FLT_MIN 1.175494351e-38f
#define FLT_EPSILON 1.192092896e-07f
#define HALF_MAX 65504.0h
#define INT_MAX 2147483647
#define INT_MIN (-2147483647 - 1)
#define UINT_MAX 4294967295u
#define UCHAR_MAX 255
#define M_PI_F 3.14159265358979323846f
#define M_PI_H 3.14159265h
#define M_E_F 2.71828182845904523536f
#define M_LOG2E_F 1.44269504088896340736f
#define M_LN2_F 0.693147180559945309417f
#define M_SQRT2_F 1.41421356237309504880f

namespace metal {
template <class T, int N>
using vec = T __attribute__((ext_vector_type(N)));

template <class T, int N>
struct packed_vec {
  T elements[N];
  T operator[](int i) const { return elements[i]; }
};
}  // namespace metal

#define MSL_VECTOR_TYPES(T) \
  typedef metal::vec<T, 2> T##2; \
  typedef metal::vec<T, 3> T##3; \
  typedef metal::vec<T, 4> T##4;
MSL_VECTOR_TYPES(char) MSL_VECTOR_TYPES(uchar) MSL_VECTOR_TYPES(short) MSL_VECTOR_TYPES(ushort)
MSL_VECTOR_TYPES(int) MSL_VECTOR_TYPES(uint) MSL_VECTOR_TYPES(long) MSL_VECTOR_TYPES(ulong)
MSL_VECTOR_TYPES(float) MSL_VECTOR_TYPES(half) MSL_VECTOR_TYPES(bfloat)

// OpenCL mode has no vectors of bool: comparisons give vectors of 0 and -1.
typedef int2 bool2;
typedef int3 bool3;
typedef int4 bool4;

#define MSL_PACKED_TYPES(T) \
  typedef metal::packed_vec<T, 2> packed_##T##2; \
  typedef metal::packed_vec<T, 3> packed_##T##3; \
  typedef metal::packed_vec<T, 4> packed_##T##4;
MSL_PACKED_TYPES(float) MSL_PACKED_TYPES(half) MSL_PACKED_TYPES(uchar) MSL_PACKED_TYPES(uint) MSL_PACKED_TYPES(int)

// ---------------------------------------------------------------- the engine's side (engine.h)

struct __msl_context {
  uint thread_position_in_grid[3], thread_position_in_threadgroup[3], threadgroup_position_in_grid[3];
  uint threadgroups_per_grid[3], threads_per_grid[3], threads_per_threadgroup[3];
  uint dispatch_threads_per_threadgroup[3], grid_size[3], grid_origin[3];
  uint thread_index_in_threadgroup, thread_index_in_simdgroup, simdgroup_index_in_threadgroup;
  uint simdgroups_per_threadgroup, dispatch_simdgroups_per_threadgroup;
  uint thread_execution_width, threads_per_simdgroup;
  uint thread_index_in_quadgroup, quadgroup_index_in_threadgroup, quadgroups_per_threadgroup;
  uint dispatch_quadgroups_per_threadgroup;
};

struct __msl_exchange {
  uint mask, padding[15];
  char result[64], slots[32 * 64];
};

extern "C" {
__private __msl_exchange* __msl_simd_post(const __private void* value, uint size, uint site, uint operation,
                                          __private int* last);
void __msl_simd_release();
void __msl_simd_barrier(uint flags, uint site);
void __msl_threadgroup_barrier(uint flags, uint site);
__local void* __msl_threadgroup_variable(uint id, size_t size, size_t align, const __constant char* name, uint site);
uint __msl_lane();
void __msl_atomic(size_t address, uint size, bool is_read, bool is_write, uint site);
void __msl_fail(const __constant char* message, uint site);
}

// The line of the call: how the engine knows that two lanes are at the same operation.
#define MSL_SITE uint site = __builtin_LINE()
#define MSL_UNCHECKED __attribute__((no_sanitize("thread")))
// Inlining would bring the checks back.
#define MSL_UNCHECKED_FUNC inline __attribute__((noinline, no_sanitize("thread")))
