// sum += x * scale.
#pragma once

#include "arguments.h"

namespace octavo {

struct AddArgs {
  const void* x;  // [rows, size], contiguous
  void* sum;      // likewise
  DType dtype;    // of both, float32 or bfloat16
  int64_t rows;
  int64_t size;
  float scale;

  static constexpr auto kRows = &AddArgs::rows;
  static AddArgs of(const Tensor& x, const Tensor& sum, double scale) {
    x.expect_contiguous(sum.dtype, "x");
    sum.expect_contiguous(x.dtype, "sum");
    if (x.shape != sum.shape || x.shape.size() != 2) throw std::invalid_argument("x and sum are not [rows, size] alike");
    return {at<void>(x.address), at<void>(sum.address), x.dtype, x.shape[0], x.shape[1], static_cast<float>(scale)};
  }
};

}  // namespace octavo

#if defined(OCTAVO_ISA)

#include "parallel.h"

namespace octavo::OCTAVO_ISA {

template <class T>
void add_of(ThreadPool& pool, const AddArgs& args) {
  parallel_ranges(pool, args.rows, divide_up(kLeastElements, args.size), [&](int64_t first, int64_t last) {
    const int64_t begin = first * args.size, end = last * args.size;
    const T* x = static_cast<const T*>(args.x);
    T* sum = static_cast<T*>(args.sum);
    const Vec scale = splat(args.scale);
    for (int64_t i = begin; i < end; i += kLanes) {
      store_first(sum + i, load_first(x + i, end - i) * scale + load_first(sum + i, end - i), end - i);
    }
  });
}

inline void add(ThreadPool& pool, const AddArgs& args) {
  if (args.dtype == DType::kFloat32) {
    add_of<float>(pool, args);
  } else {
    add_of<bf16>(pool, args);
  }
}

}  // namespace octavo::OCTAVO_ISA

#endif  // OCTAVO_ISA
