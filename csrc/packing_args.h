// The arguments of kernels that pack a weight, and of kernels that unpack rows of it.
#pragma once

#include "arguments.h"

namespace octavo {

// A weight before it is packed.
struct PackArgs {
  const void* weight;  // [n, k]; int4: one value of 0 .. 15 per byte; blocks: [n, bytes of a row], `stride` apart
  DType dtype;
  int64_t n;
  int64_t k;
  int64_t stride;
  const float* scales;       // int8: [n]; int4: the units of the columns' scales [n]
  const int16_t* multiples;  // int4: [n, groups], in units; (value - zero point) * multiple is at most 32,639
  const int16_t* offsets;    // int4: (zero point - 8) * multiple [n, groups], or null
  Int4Format int4;
  void* packed;

  static PackArgs of(Address weight, int dtype, int64_t n, int64_t k, int64_t stride, Address scales, Address multiples,
                     Address offsets, int64_t group_size, Address packed) {
    return {at<void>(weight), DType(dtype), n, k, stride, at<float>(scales), at<int16_t>(multiples), at<int16_t>(offsets),
            {group_size, offsets != 0}, at<void>(packed)};
  }
};

struct EmbeddingArgs {
  const int64_t* ids;  // [count], inside the vocabulary
  int64_t count;
  const void* packed;  // [n, k]
  DType weight_dtype;
  int64_t first;  // id of the first row of `packed`; the result has undefined rows for ids that `packed` lacks
  int64_t n;
  int64_t num_ids;  // of the vocabulary
  int64_t k;
  void* out;  // [count, k], contiguous
  DType out_dtype;
  float scale;      // multiplies every value before it is rounded
  Int4Format int4;  // of an int4 weight

  static constexpr auto kRows = &EmbeddingArgs::count;
  static EmbeddingArgs of(Address ids, int64_t count, Address packed, int weight_dtype, int64_t first, int64_t n,
                          int64_t num_ids, int64_t k, Address out, int out_dtype, double scale, int64_t group_size,
                          bool has_zeros) {
    return {at<int64_t>(ids), count, at<void>(packed), DType(weight_dtype), first, n, num_ids, k, at<void>(out),
            DType(out_dtype), static_cast<float>(scale), {group_size, has_zeros}};
  }

  // The row of `packed` for ids[i]; any row if `packed` lacks this id.
  int64_t row_of(int64_t i) const {
    const int64_t row = ids[i] - first;
    return row < 0 ? 0 : row < n ? row : n - 1;
  }

  template <class Table>
  void check(const Table&) const {
    for (int64_t i = 0; i < count; ++i) {
      if (ids[i] >= 0 && ids[i] < num_ids) continue;
      throw std::out_of_range("token id " + std::to_string(ids[i]) + " is outside the vocabulary of " +
                              std::to_string(num_ids));
    }
  }
  bool reads(const StepArgs& step, const BatchArgs&) const { return ids == step.token_ids; }
  void read(const StepArgs& step, const BatchArgs&) { ids = step.token_ids; }
};

}  // namespace octavo
