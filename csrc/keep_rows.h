// Copies of inputs of rows, which a later step may replay (octavo.kernels.state_batch).
#pragma once

#include "states.h"

namespace octavo {

struct KeepRowsArgs : StatefulArgs {
  static constexpr int kParts = 3;
  Rows parts[kParts];      // [rows, widths[i]]
  int64_t widths[kParts];  // may be 0
  Rows kept;               // [kept_rows, sum of the widths], of the same type
  int64_t rows;
  int64_t kept_rows;

  static constexpr auto kRows = &KeepRowsArgs::rows;
  static KeepRowsArgs of(const Tensor& x, const Tensor& mixed, const Tensor& rates, const Tensor& kept,
                         const StateBatchArgs& batch) {
    const int64_t rows = x.size(0), width = x.size(1) + mixed.size(1) + rates.size(1);
    const auto part = [&](const Tensor& tensor, const char* name) {
      if (tensor.dtype != kept.dtype) throw std::invalid_argument(std::string(name) + " has another dtype than the kept rows");
      return Rows::of(tensor, rows, tensor.size(1), name);
    };
    return {{batch}, {part(x, "x"), part(mixed, "mixed"), part(rates, "rates")}, {x.size(1), mixed.size(1), rates.size(1)},
            Rows::of(kept, kept.size(0), width, "kept"), rows, kept.size(0)};
  }

  template <class Table>
  void check(const Table&) const {
    batch.check_kept(rows, kept_rows);
  }
};

}  // namespace octavo

#if defined(OCTAVO_ISA)

namespace octavo::OCTAVO_ISA {

inline void keep_rows(ThreadPool& pool, const KeepRowsArgs& args) {
  with_float_type(args.kept.dtype, [&](auto type) {
    using T = decltype(type);
    const int64_t width = args.widths[0] + args.widths[1] + args.widths[2];
    parallel_ranges(pool, args.batch.num_keep, divide_up(kLeastElements, width + 1), [&](int64_t first, int64_t last) {
      for (int64_t i = first; i < last; ++i) {
        T* kept = args.kept.row<T>(args.batch.keep_to[i]);
        for (int part = 0; part < KeepRowsArgs::kParts; ++part) {
          kept = std::copy_n(args.parts[part].row<T>(args.batch.keep_from[i]), args.widths[part], kept);
        }
      }
    });
  });
}

}  // namespace octavo::OCTAVO_ISA

#endif  // OCTAVO_ISA
