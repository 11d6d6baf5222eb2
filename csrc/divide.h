// x /= divisor.
#pragma once

#include "arguments.h"

namespace octavo {

struct DivideArgs {
  float* x;
  int64_t count;
  float divisor;

  static DivideArgs of(const Tensor& x, double divisor) {
    x.expect_contiguous(DType::kFloat32, "x");
    return {at<float>(x.address), x.count(), static_cast<float>(divisor)};
  }
};

}  // namespace octavo

#if defined(OCTAVO_ISA)

#include "parallel.h"

namespace octavo::OCTAVO_ISA {

inline void divide(ThreadPool& pool, const DivideArgs& args) {
  parallel_ranges(pool, divide_up(args.count, kLanes), kLeastElements / kLanes, [&](int64_t first, int64_t last) {
    for (int64_t i = first * kLanes; i < last * kLanes; i += kLanes) {
      store_first(args.x + i, load_first(args.x + i, args.count - i) / splat(args.divisor), args.count - i);
    }
  });
}

}  // namespace octavo::OCTAVO_ISA

#endif  // OCTAVO_ISA
