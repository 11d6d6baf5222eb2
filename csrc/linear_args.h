// The arguments of a matrix product.
#pragma once

#include "arguments.h"

namespace octavo {

struct LinearArgs {
  const void* x;  // [rows, k], float32 or bfloat16
  DType x_dtype;
  int64_t x_stride;
  int64_t rows;
  const void* weight;
  DType weight_dtype;
  int64_t n;
  int64_t k;
  const float* bias;  // [ceil(n / 32) * 32] or null
  void* out;          // [rows, out_features], float32 or bfloat16
  int64_t out_stride;
  DType out_dtype;
  bool gated;  // the first half of n are gates, the second half is `up`, and the result is that of `gate`; see fuses_gate
  Activation activation;  // of these gates
  Int4Format int4;        // of an int4 weight
  const int32_t* order;   // [k]: the column of x for each k of an int4 weight; null if the order is the same
  int64_t first_panel;    // the product computes only this panel of the weight
  int64_t num_panels;     // and those after it; a gated product computes all panels

  int64_t out_features() const { return gated ? n / 2 : n; }
  int64_t end_panel() const { return first_panel + num_panels; }

  static constexpr auto kRows = &LinearArgs::rows;
  static LinearArgs of(Address x, int x_dtype, int64_t x_stride, int64_t rows, Address weight, int weight_dtype, int64_t n,
                       int64_t k, Address bias, Address out, int64_t out_stride, int out_dtype, bool gated, int activation,
                       int64_t group_size, bool has_zeros, Address order) {
    return {at<void>(x), DType(x_dtype), x_stride, rows, at<void>(weight), DType(weight_dtype), n, k, at<float>(bias),
            at<void>(out), out_stride, DType(out_dtype), gated, Activation(activation), {group_size, has_zeros},
            at<int32_t>(order), 0, (n + kPanelColumns - 1) / kPanelColumns};
  }

  // A kernel that does not fuse gates would write all n features to memory for half of them.
  template <class Table>
  void check(const Table& table) const {
    if (gated && !table.fuses_gate(x_dtype, weight_dtype, n)) {
      throw std::invalid_argument("this product is not gated by its kernel");
    }
  }
};

}  // namespace octavo
