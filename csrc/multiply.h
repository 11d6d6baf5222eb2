// x *= factor, element by element.
#pragma once

#include "states.h"

namespace octavo {

struct MultiplyArgs {
  Rows x;       // [rows, size]
  Rows factor;  // likewise, of x's type
  int64_t rows;
  int64_t size;

  static constexpr auto kRows = &MultiplyArgs::rows;
  static MultiplyArgs of(const Tensor& x, const Tensor& factor) {
    const int64_t rows = x.size(0), size = x.size(1);
    if (factor.dtype != x.dtype) throw std::invalid_argument("x and factor have different dtypes");
    return {Rows::of(x, rows, size, "x"), Rows::of(factor, rows, size, "factor"), rows, size};
  }
};

}  // namespace octavo

#if defined(OCTAVO_ISA)

namespace octavo::OCTAVO_ISA {

inline void multiply(ThreadPool& pool, const MultiplyArgs& args) {
  with_float_type(args.x.dtype, [&](auto type) {
    using T = decltype(type);
    parallel_ranges(pool, args.rows, divide_up(kLeastElements, args.size), [&](int64_t first, int64_t last) {
      for (int64_t row = first; row < last; ++row) {
        T* x = args.x.row<T>(row);
        const T* factor = args.factor.row<T>(row);
        for (int64_t i = 0; i < args.size; i += kLanes) {
          const int64_t count = args.size - i;
          store_first(x + i, load_first(x + i, count) * load_first(factor + i, count), count);
        }
      }
    });
  });
}

}  // namespace octavo::OCTAVO_ISA

#endif  // OCTAVO_ISA
