// x = max(x, 0)^2.
#pragma once

#include "arguments.h"

namespace octavo {

struct ReluSquaredArgs {
  void* x;      // [rows, size], contiguous
  DType dtype;  // float32 or bfloat16
  int64_t rows;
  int64_t size;

  static constexpr auto kRows = &ReluSquaredArgs::rows;
  static ReluSquaredArgs of(const Tensor& x) {
    x.expect_contiguous(x.dtype == DType::kBFloat16 ? x.dtype : DType::kFloat32, "x");
    if (x.shape.size() != 2) throw std::invalid_argument("x is not [rows, size]");
    return {at<void>(x.address), x.dtype, x.shape[0], x.shape[1]};
  }
};

}  // namespace octavo

#if defined(OCTAVO_ISA)

#include "parallel.h"

namespace octavo::OCTAVO_ISA {

template <class T>
void relu_squared_of(ThreadPool& pool, const ReluSquaredArgs& args) {
  parallel_ranges(pool, args.rows, divide_up(kLeastElements, args.size), [&](int64_t first, int64_t last) {
    const int64_t end = last * args.size;
    T* x = static_cast<T*>(args.x);
    for (int64_t i = first * args.size; i < end; i += kLanes) {
      const Vec positive = max(splat(0.0f), load_first(x + i, end - i));  // NaN if x is
      store_first(x + i, positive * positive, end - i);
    }
  });
}

inline void relu_squared(ThreadPool& pool, const ReluSquaredArgs& args) {
  if (args.dtype == DType::kFloat32) {
    relu_squared_of<float>(pool, args);
  } else {
    relu_squared_of<bf16>(pool, args);
  }
}

}  // namespace octavo::OCTAVO_ISA

#endif  // OCTAVO_ISA
