// RMS norms over groups of features, with a gate.
#pragma once

#include <cmath>

#include "states.h"

namespace octavo {

struct GatedNormArgs {
  Rows x;              // [rows, size]
  Rows gate;           // [rows, size], of x's type
  const void* weight;  // [size] or [group_size], of x's type or float32
  DType weight_dtype;
  int64_t weight_stride;  // from a group's weights to the next group's
  float eps;
  int64_t group_size;
  bool gate_first;
  Rows out;  // [rows, size], of x's type
  int64_t rows;
  int64_t size;

  static constexpr auto kRows = &GatedNormArgs::rows;
  static GatedNormArgs of(const Tensor& x, const Tensor& gate, const Tensor& weight, double eps, int64_t group_size,
                          bool gate_first, const Tensor& out) {
    const int64_t rows = x.size(0), size = x.size(1);
    weight.expect_contiguous(weight.dtype == x.dtype ? x.dtype : DType::kFloat32, "weight");
    const bool is_shared = weight.count() == group_size;
    if (group_size < 1 || size % group_size != 0 || (!is_shared && weight.count() != size)) {
      throw std::invalid_argument("x is not of whole groups, or the weight is not of one group or all");
    }
    if (gate.dtype != x.dtype || out.dtype != x.dtype) throw std::invalid_argument("x, gate and out have different dtypes");
    return {Rows::of(x, rows, size, "x"), Rows::of(gate, rows, size, "gate"), at<void>(weight.address), weight.dtype,
            is_shared ? 0 : group_size, static_cast<float>(eps), group_size, gate_first, Rows::of(out, rows, size, "out"), rows,
            size};
  }
};

}  // namespace octavo

#if defined(OCTAVO_ISA)

namespace octavo::OCTAVO_ISA {

// The first n elements of x * silu(gate).
template <class T>
OCTAVO_INLINE Vec gated(Vec x, const T* gate, int64_t n) {
  Vec factor[1] = {load_first(gate, n)};
  silu(factor);
  return x * factor[0];
}

// Lane i sums the squares of elements i, i + 16, ... in order, as norm_row does. memory: [size].
template <class T, class W>
void gated_norm_row(const T* x, const T* gate, const W* weight, T* out, int64_t size, float eps, bool gate_first,
                    float* memory) {
  Vec squares = splat(0.0f);
  for (int64_t i = 0; i < size; i += kLanes) {
    Vec value = load_first(x + i, size - i);
    if (gate_first) {
      value = gated(value, gate + i, size - i);
      store_first(memory + i, value, size - i);
    }
    squares = fma(value, value, squares);
  }
  const Vec scale = splat(1.0f / std::sqrt(sum_lanes(squares) / static_cast<float>(size) + eps));
  for (int64_t i = 0; i < size; i += kLanes) {
    const Vec value = gate_first ? load_first(memory + i, size - i) : load_first(x + i, size - i);
    const Vec normed = value * scale * load_first(weight + i, size - i);
    store_first(out + i, gate_first ? normed : gated(normed, gate + i, size - i), size - i);
  }
}

template <class T, class W>
void gated_norm_of(ThreadPool& pool, const GatedNormArgs& args) {
  const int64_t groups = args.size / args.group_size;
  pool.reserve_local(static_cast<size_t>(args.group_size) * sizeof(float));
  parallel_ranges(pool, args.rows * groups, divide_up(kLeastElements, args.group_size), [&](int64_t first, int64_t last, int thread) {
    for (int64_t index = first; index < last; ++index) {
      const int64_t row = index / groups, group = index % groups, at = group * args.group_size;
      gated_norm_row(args.x.row<T>(row) + at, args.gate.row<T>(row) + at,
                     static_cast<const W*>(args.weight) + group * args.weight_stride, args.out.row<T>(row) + at,
                     args.group_size, args.eps, args.gate_first, static_cast<float*>(pool.local(thread)));
    }
  });
}

inline void gated_norm(ThreadPool& pool, const GatedNormArgs& args) {
  with_float_type(args.x.dtype, [&](auto type) {
    if (args.weight_dtype == DType::kFloat32) {
      gated_norm_of<decltype(type), float>(pool, args);
    } else {
      gated_norm_of<decltype(type), decltype(type)>(pool, args);
    }
  });
}

}  // namespace octavo::OCTAVO_ISA

#endif  // OCTAVO_ISA
