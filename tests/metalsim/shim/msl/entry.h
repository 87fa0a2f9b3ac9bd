// What the generated entry point (frontend.py) is made of, and small remains of the library.
namespace metal {
// Type of parameter `index` of a function type.
template <int index, class F>
struct __parameter;
template <class First, class... Rest>
struct __parameter<0, void(First, Rest...)> {
  typedef First type;
};
template <int index, class First, class... Rest>
struct __parameter<index, void(First, Rest...)> {
  typedef typename __parameter<index - 1, void(Rest...)>::type type;
};

template <class T>
struct __bound_buffer {
  static METAL_FUNC T get(ulong address) { return (T)address; }
};
template <class T>
struct __bound_buffer<T&> {
  static METAL_FUNC T& get(ulong address) { return *(T*)address; }
};

template <class T>
METAL_FUNC MSL_UNCHECKED T __built_in(const __private uint* values) {
  if constexpr (__vector<T>::size == 1) {
    return T(values[0]);
  } else {
    T result;
    for (int i = 0; i < __vector<T>::size; i++) result[i] = make_scalar_t<T>(values[i]);
    return result;
  }
}
template <class T>
METAL_FUNC MSL_UNCHECKED T __built_in(const __private uint& value) {
  return T(value);
}

template <class T>
using uniform = T;
template <class T>
METAL_FUNC T make_uniform(T value) {
  return value;
}
struct os_log {
  int unused;
  constexpr os_log(const __constant char*, const __constant char*) __constant : unused(0) {}
  template <class... A>
  void log_debug(const __constant char*, A...) const __constant {}
  template <class... A>
  void log_info(const __constant char*, A...) const __constant {}
};
}  // namespace metal
