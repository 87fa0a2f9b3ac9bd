// Atomics. Lanes change only inside simdgroup operations and barriers, so plain accesses are atomic; the race
// checker is told about them.
namespace metal {
enum memory_order {
  memory_order_relaxed, memory_order_acquire, memory_order_release, memory_order_acq_rel, memory_order_seq_cst
};
enum thread_scope {
  thread_scope_thread, thread_scope_simdgroup, thread_scope_threadgroup, thread_scope_device, thread_scope_system
};

template <class T>
struct atomic {
  T __value;
};
typedef atomic<int> __msl_atomic_int;
typedef atomic<uint> __msl_atomic_uint;
typedef atomic<float> __msl_atomic_float;
typedef atomic<bool> __msl_atomic_bool;
typedef atomic<ulong> __msl_atomic_ulong;

#define MSL_ATOMIC_FUNC template <class T> MSL_UNCHECKED_FUNC
#define MSL_FETCH(space, name, expression) \
  MSL_ATOMIC_FUNC T atomic_##name##_explicit(volatile space atomic<T>* object, T value, memory_order, MSL_SITE) { \
    __msl_atomic((size_t)object, sizeof(T), true, true, site); \
    const T old = object->__value; \
    object->__value = expression; \
    return old; \
  }
#define MSL_ATOMICS(space) \
  MSL_ATOMIC_FUNC T atomic_load_explicit(const volatile space atomic<T>* object, memory_order, MSL_SITE) { \
    __msl_atomic((size_t)object, sizeof(T), true, false, site); \
    return object->__value; \
  } \
  MSL_ATOMIC_FUNC void atomic_store_explicit(volatile space atomic<T>* object, T value, memory_order, MSL_SITE) { \
    __msl_atomic((size_t)object, sizeof(T), false, true, site); \
    object->__value = value; \
  } \
  MSL_ATOMIC_FUNC bool atomic_compare_exchange_weak_explicit( \
      volatile space atomic<T>* object, __private T* expected, T value, memory_order, memory_order, MSL_SITE) { \
    __msl_atomic((size_t)object, sizeof(T), true, true, site); \
    const T old = object->__value; \
    if (old == *expected) { \
      object->__value = value; \
      return true; \
    } \
    *expected = old; \
    return false; \
  } \
  MSL_FETCH(space, exchange, value) \
  MSL_FETCH(space, fetch_add, old + value) MSL_FETCH(space, fetch_sub, old - value) \
  MSL_FETCH(space, fetch_max, old > value ? old : value) MSL_FETCH(space, fetch_min, old < value ? old : value) \
  MSL_FETCH(space, fetch_and, old & value) MSL_FETCH(space, fetch_or, old | value) \
  MSL_FETCH(space, fetch_xor, old ^ value)
MSL_ATOMICS(__global) MSL_ATOMICS(__local)
METAL_FUNC void atomic_thread_fence(mem_flags, memory_order, thread_scope = thread_scope_device) {}
}  // namespace metal
#define atomic_int __msl_atomic_int
#define atomic_uint __msl_atomic_uint
#define atomic_float __msl_atomic_float
#define atomic_bool __msl_atomic_bool
#define atomic_ulong __msl_atomic_ulong
