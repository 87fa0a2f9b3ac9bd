// simdgroup_matrix: 8 x 8, two neighbouring elements of one row per lane, in the layout that MLX relies on.
namespace metal {
METAL_FUNC uint __matrix_row(uint lane) { return ((lane / 4) & 4) + (lane / 2) % 4; }
METAL_FUNC uint __matrix_column(uint lane) { return ((lane / 4) & 2) * 2 + (lane % 2) * 2; }
METAL_FUNC uint __matrix_lane(uint row, uint column) {
  return (row & 4) * 4 + (column & 4) * 2 + (row & 3) * 2 + (column & 3) / 2;
}

template <class T, int Rows, int Columns>
struct simdgroup_matrix {
  static_assert(Rows == 8 && Columns == 8, "simdgroup matrices are 8 x 8");
  vec<T, 2> __elements;
  simdgroup_matrix() = default;
  explicit simdgroup_matrix(T diagonal) {
    const uint row = __matrix_row(__msl_lane()), column = __matrix_column(__msl_lane());
    __elements[0] = row == column ? diagonal : T(0);
    __elements[1] = row == column + 1 ? diagonal : T(0);
  }
  METAL_FUNC __private vec<T, 2>& thread_elements() __private { return __elements; }
  METAL_FUNC const __private vec<T, 2>& thread_elements() const __private { return __elements; }
};
typedef simdgroup_matrix<float, 8, 8> simdgroup_float8x8;
typedef simdgroup_matrix<half, 8, 8> simdgroup_half8x8;
typedef simdgroup_matrix<bfloat, 8, 8> simdgroup_bfloat8x8;

template <class T, int Rows = 8, int Columns = 8>
METAL_FUNC simdgroup_matrix<T, Rows, Columns> make_filled_simdgroup_matrix(T value) {
  simdgroup_matrix<T, Rows, Columns> result;
  result.__elements = value;
  return result;
}

METAL_FUNC ulong __matrix_index(uint i, ulong stride, ulong2 origin, bool transposed) {
  const ulong row = __matrix_row(__msl_lane()), column = __matrix_column(__msl_lane()) + i;
  return transposed ? (origin[1] + column) * stride + origin[0] + row : (origin[1] + row) * stride + origin[0] + column;
}
#define MSL_MATRIX_MEMORY(space) \
  template <class T> \
  METAL_FUNC void simdgroup_load(__private simdgroup_matrix<T, 8, 8>& matrix, const space T* from, ulong stride = 8, \
                                 ulong2 origin = 0, bool transposed = false, MSL_SITE) { \
    __exchange(uchar(0), site, __matrix); \
    for (uint i = 0; i < 2; i++) matrix.__elements[i] = from[__matrix_index(i, stride, origin, transposed)]; \
  } \
  template <class T> \
  METAL_FUNC void simdgroup_store(simdgroup_matrix<T, 8, 8> matrix, space T* to, ulong stride = 8, \
                                  ulong2 origin = 0, bool transposed = false, MSL_SITE) { \
    __exchange(uchar(0), site, __matrix); \
    for (uint i = 0; i < 2; i++) to[__matrix_index(i, stride, origin, transposed)] = matrix.__elements[i]; \
  }
MSL_MATRIX_MEMORY(__global) MSL_MATRIX_MEMORY(__local)

template <class T, class U>
struct __factors {
  vec<T, 2> left;
  vec<U, 2> right;
};

template <class D, class A, class B, class C>
METAL_FUNC MSL_UNCHECKED void simdgroup_multiply_accumulate(
    __private simdgroup_matrix<D, 8, 8>& result, simdgroup_matrix<A, 8, 8> left, simdgroup_matrix<B, 8, 8> right,
    simdgroup_matrix<C, 8, 8> addend, MSL_SITE) {
  __factors<A, B> mine;
  mine.left = left.__elements;
  mine.right = right.__elements;
  const __private __msl_exchange* exchange = __exchange(mine, site, __matrix);
  if (exchange->mask != 0xffffffffu) __msl_fail("a matrix operation needs all 32 lanes", site);
  const __private __factors<A, B>* all = (const __private __factors<A, B>*)exchange->slots;
  const uint row = __matrix_row(__msl_lane()), column = __matrix_column(__msl_lane());
  float sum[2] = {float(addend.__elements[0]), float(addend.__elements[1])};
  for (uint k = 0; k < 8; k++) {
    const float factor = float(all[__matrix_lane(row, k)].left[k & 1]);
    for (uint i = 0; i < 2; i++) sum[i] += factor * float(all[__matrix_lane(k, column)].right[i]);
  }
  for (uint i = 0; i < 2; i++) result.__elements[i] = D(sum[i]);
}
template <class D, class A, class B>
METAL_FUNC void simdgroup_multiply(__private simdgroup_matrix<D, 8, 8>& result, simdgroup_matrix<A, 8, 8> left,
                                   simdgroup_matrix<B, 8, 8> right, MSL_SITE) {
  simdgroup_multiply_accumulate(result, left, right, make_filled_simdgroup_matrix<D>(D(0)), site);
}
}  // namespace metal
