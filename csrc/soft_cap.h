// x = cap * tanh(x / cap).
#pragma once

#include "arguments.h"

namespace octavo {

struct SoftCapArgs {
  float* x;
  int64_t count;
  float cap;

  static SoftCapArgs of(const Tensor& x, double cap) {
    x.expect_contiguous(DType::kFloat32, "x");
    return {at<float>(x.address), x.count(), static_cast<float>(cap)};
  }
};

}  // namespace octavo

#if defined(OCTAVO_ISA)

#include "math.h"
#include "parallel.h"

namespace octavo::OCTAVO_ISA {

inline void soft_cap(ThreadPool& pool, const SoftCapArgs& args) {
  parallel_ranges(pool, divide_up(args.count, kLanes), kLeastElements / kLanes, [&](int64_t first, int64_t last) {
    for (int64_t i = first * kLanes; i < last * kLanes; i += kLanes) {
      store_first(args.x + i, soft_cap(load_first(args.x + i, args.count - i), splat(args.cap)), args.count - i);
    }
  });
}

}  // namespace octavo::OCTAVO_ISA

#endif  // OCTAVO_ISA
