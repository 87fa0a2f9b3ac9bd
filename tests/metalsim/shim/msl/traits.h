// Type traits and numeric limits.
namespace metal {
using ::uchar;
using ::uint;
using ::ulong;
using ::ushort;

template <class T, T v>
struct integral_constant {
  static constexpr __constant T value = v;
  typedef T value_type;
  typedef integral_constant type;
  constexpr operator T() const { return v; }
};
template <bool B>
using bool_constant = integral_constant<bool, B>;
typedef bool_constant<true> true_type;
typedef bool_constant<false> false_type;

template <bool B, class T = void>
struct enable_if {};
template <class T>
struct enable_if<true, T> {
  typedef T type;
};
template <bool B, class T = void>
using enable_if_t = typename enable_if<B, T>::type;

template <bool B, class T, class U>
struct conditional {
  typedef T type;
};
template <class T, class U>
struct conditional<false, T, U> {
  typedef U type;
};
template <bool B, class T, class U>
using conditional_t = typename conditional<B, T, U>::type;

template <class T, class U>
struct is_same : false_type {};
template <class T>
struct is_same<T, T> : true_type {};
template <class T, class U>
constexpr __constant bool is_same_v = is_same<T, U>::value;

#define MSL_REMOVE(name, pattern) \
  template <class T> \
  struct name { \
    typedef T type; \
  }; \
  template <class T> \
  struct name<pattern> { \
    typedef T type; \
  }; \
  template <class T> \
  using name##_t = typename name<T>::type;
MSL_REMOVE(remove_const, const T)
MSL_REMOVE(remove_volatile, volatile T)
MSL_REMOVE(remove_pointer, T*)

template <class T>
struct remove_reference {
  typedef T type;
};
template <class T>
struct remove_reference<T&> {
  typedef T type;
};
template <class T>
struct remove_reference<T&&> {
  typedef T type;
};
template <class T>
using remove_reference_t = typename remove_reference<T>::type;

template <class T>
struct remove_addrspace {
  typedef T type;
};
#define MSL_REMOVE_SPACE(space) \
  template <class T> \
  struct remove_addrspace<space T> { \
    typedef T type; \
  }; \
  template <class T> \
  struct remove_addrspace<const space T> { \
    typedef const T type; \
  };
MSL_REMOVE_SPACE(__global) MSL_REMOVE_SPACE(__local) MSL_REMOVE_SPACE(__constant) MSL_REMOVE_SPACE(__private)
template <class T>
using remove_addrspace_t = typename remove_addrspace<T>::type;

template <class T>
struct remove_cv {
  typedef remove_volatile_t<remove_const_t<remove_addrspace_t<T>>> type;
};
template <class T>
using remove_cv_t = typename remove_cv<T>::type;

template <class T>
struct __is_integer : false_type {};
template <class T>
struct __is_float : false_type {};
#define MSL_IS(trait, T) \
  template <> \
  struct trait<T> : true_type {};
MSL_IS(__is_integer, bool) MSL_IS(__is_integer, char) MSL_IS(__is_integer, signed char) MSL_IS(__is_integer, uchar)
MSL_IS(__is_integer, short) MSL_IS(__is_integer, ushort) MSL_IS(__is_integer, int) MSL_IS(__is_integer, uint)
MSL_IS(__is_integer, long) MSL_IS(__is_integer, ulong)
MSL_IS(__is_float, float) MSL_IS(__is_float, half) MSL_IS(__is_float, bfloat)

template <class T>
struct is_integral : __is_integer<remove_cv_t<T>> {};
template <class T>
constexpr __constant bool is_integral_v = is_integral<T>::value;
template <class T>
struct is_floating_point : __is_float<remove_cv_t<T>> {};
template <class T>
constexpr __constant bool is_floating_point_v = is_floating_point<T>::value;
template <class T>
struct is_arithmetic : bool_constant<is_integral_v<T> || is_floating_point_v<T>> {};
template <class T>
constexpr __constant bool is_arithmetic_v = is_arithmetic<T>::value;

template <class T, bool = is_arithmetic_v<T>>
struct is_signed : bool_constant<(T(-1) < T(0))> {};
template <class T>
struct is_signed<T, false> : false_type {};
template <class T>
constexpr __constant bool is_signed_v = is_signed<T>::value;
template <class T>
struct is_unsigned : bool_constant<is_integral_v<T> && !is_signed_v<T>> {};
template <class T>
constexpr __constant bool is_unsigned_v = is_unsigned<T>::value;

template <class From, class To>
struct is_convertible : bool_constant<__is_convertible(From, To)> {};
template <class From, class To>
constexpr __constant bool is_convertible_v = is_convertible<From, To>::value;

template <class...>
struct _disjunction : false_type {};
template <class A, class... B>
struct _disjunction<A, B...> : conditional_t<A::value, true_type, _disjunction<B...>> {};
template <class...>
struct _conjunction : true_type {};
template <class A, class... B>
struct _conjunction<A, B...> : conditional_t<A::value, _conjunction<B...>, false_type> {};

// Elements of a vector type; a scalar is its own single element.
template <class T>
struct __vector {
  typedef T element;
  static constexpr __constant int size = 1;
};
#define MSL_VECTOR_TRAIT(N) \
  template <class T> \
  struct __vector<T __attribute__((ext_vector_type(N)))> { \
    typedef T element; \
    static constexpr __constant int size = N; \
  };
MSL_VECTOR_TRAIT(2) MSL_VECTOR_TRAIT(3) MSL_VECTOR_TRAIT(4)
template <class T>
using make_scalar_t = typename __vector<T>::element;

template <class T>
struct numeric_limits {
  static constexpr __constant int digits = sizeof(T) * 8 - is_signed_v<T>;
  static constexpr T max() { return is_signed_v<T> ? T((ulong(1) << (sizeof(T) * 8 - 1)) - 1) : T(~T(0)); }
  static constexpr T min() { return is_signed_v<T> ? T(ulong(1) << (sizeof(T) * 8 - 1)) : T(0); }
  static constexpr T lowest() { return min(); }
  static constexpr T infinity() { return T(0); }
  static constexpr T quiet_NaN() { return T(0); }
};
#define MSL_FLOAT_LIMITS(T, bits, largest, smallest, step) \
  template <> \
  struct numeric_limits<T> { \
    static constexpr __constant int digits = bits; \
    static constexpr T max() { return T(largest); } \
    static constexpr T min() { return T(smallest); } \
    static constexpr T lowest() { return T(-(largest)); } \
    static constexpr T epsilon() { return T(step); } \
    static constexpr T infinity() { return T(__builtin_inff()); } \
    static constexpr T quiet_NaN() { return T(__builtin_nanf("")); } \
  };
MSL_FLOAT_LIMITS(float, 24, 3.402823466e+38f, 1.175494351e-38f, 1.192092896e-07f)
MSL_FLOAT_LIMITS(half, 11, 65504.0f, 6.103515625e-05f, 0.0009765625f)
MSL_FLOAT_LIMITS(bfloat, 8, 3.38953139e+38f, 1.175494351e-38f, 0.0078125f)
}  // namespace metal
