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

  int64_t out_features() const { return gated ? n / 2 : n; }

  static constexpr auto kRows = &LinearArgs::rows;
  static LinearArgs of(Address x, int x_dtype, int64_t x_stride, int64_t rows, Address weight, int weight_dtype, int64_t n,
                       int64_t k, Address bias, Address out, int64_t out_stride, int out_dtype, bool gated, int activation,
                       int64_t group_size, bool has_zeros, Address order) {
    return {at<void>(x), DType(x_dtype), x_stride, rows, at<void>(weight), DType(weight_dtype), n, k, at<float>(bias),
            at<void>(out), out_stride, DType(out_dtype), gated, Activation(activation), {group_size, has_zeros},
            at<int32_t>(order)};
  }

  // A kernel that does not fuse gates would write all n features to memory for half of them.
  template <class Table>
  void check(const Table& table) const {
    if (gated && !table.fuses_gate(x_dtype, weight_dtype, n)) {
      throw std::invalid_argument("this product is not gated by its kernel");
    }
  }
};

// A product of each group of rows with a weight of its own. All weights have one shape.
struct GroupedLinearArgs {
  static constexpr int64_t kFields = 6;  // of a weight: addresses of weight, bias and order; dtype, group_size and has_zeros

  LinearArgs product;      // of the rows of all groups; each group has its own weight
  const int32_t* starts;   // [groups + 1]: each group's first row, then their number
  const int64_t* weights;  // [groups, kFields]
  int64_t groups;
  int64_t rows;

  static constexpr auto kRows = &GroupedLinearArgs::rows;
  static GroupedLinearArgs of(Address x, int x_dtype, int64_t x_stride, int64_t rows, int64_t n, int64_t k, Address out,
                              int64_t out_stride, int out_dtype, const Tensor& starts, const Tensor& weights) {
    starts.expect_contiguous(DType::kInt32, "starts");
    weights.expect_contiguous(DType::kInt64, "weights");
    const int64_t groups = starts.count() - 1;
    if (groups < 1 || weights.count() != groups * kFields) throw std::invalid_argument("the weights are not of these groups");
    LinearArgs product{};
    product.x = at<void>(x);
    product.x_dtype = DType(x_dtype);
    product.x_stride = x_stride;
    product.n = n;
    product.k = k;
    product.out = at<void>(out);
    product.out_stride = out_stride;
    product.out_dtype = DType(out_dtype);
    return {product, at<int32_t>(starts.address), at<int64_t>(weights.address), groups, rows};
  }

  // The product of a group's rows, which may be none.
  LinearArgs of_group(int64_t group) const {
    const auto bytes = [](DType dtype) { return dtype == DType::kFloat32 ? int64_t{4} : int64_t{2}; };
    const int64_t* weight = weights + group * kFields;
    LinearArgs args = product;
    const int64_t first = starts[group];
    args.rows = starts[group + 1] - first;
    args.x = static_cast<const char*>(product.x) + first * product.x_stride * bytes(product.x_dtype);
    args.out = static_cast<char*>(product.out) + first * product.out_stride * bytes(product.out_dtype);
    args.weight = at<void>(static_cast<Address>(weight[0]));
    args.bias = at<float>(static_cast<Address>(weight[1]));
    args.order = at<int32_t>(static_cast<Address>(weight[2]));
    args.weight_dtype = DType(weight[3]);
    args.int4 = {weight[4], weight[5] != 0};
    return args;
  }
};

}  // namespace octavo
