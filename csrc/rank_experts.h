// The sum of experts of which each rank has some: those of a node of the tree of experts.h. Each rank adds the outputs of its own
// experts. The ranks exchange these sums, and each adds them for its columns in the upper part of the tree. So the bits are those of
// add_experts.
#pragma once

#include "experts.h"
#include "ranks.h"

namespace octavo {

struct AddRankExpertsArgs {
  AddExpertsArgs own;  // without shared, gate and out; of other ranks' experts, rows of `outputs` are not read
  Ranks* ranks;
  const int64_t* experts;  // [ranks + 1]: each rank's first expert, then their number. Ranks have nodes of one height
  const int64_t* columns;  // [ranks + 1]: each rank's first column of the result, then own.size
  const float* shared;     // [rows, the columns of this rank], as in AddExpertsArgs
  const float* gate;       // [rows], as in AddExpertsArgs
  void* out;               // [rows, the columns of this rank]
  DType dtype;             // of out
  int64_t rows;

  static constexpr auto kRows = &AddRankExpertsArgs::rows;
  static AddRankExpertsArgs of(const Tensor& outputs, const Tensor& ids, const Tensor& places, const Tensor& weights, Address ranks,
                               Address experts, Address columns, const Tensor& shared, const Tensor& gate, const Tensor& out) {
    for (const Tensor* each : {&outputs, &weights, &shared, &gate}) each->expect_contiguous(DType::kFloat32, "a float");
    ids.expect_contiguous(DType::kInt32, "ids");
    places.expect_contiguous(DType::kInt32, "places");
    out.expect_contiguous(out.dtype, "out");
    const Ranks& all = *at<Ranks>(ranks);
    const int64_t size = at<int64_t>(columns)[all.count()];
    const int64_t own_columns = at<int64_t>(columns)[all.rank() + 1] - at<int64_t>(columns)[all.rank()];
    const bool fits = ids.shape.size() == 2 && places.shape == ids.shape && weights.shape == ids.shape &&
                      out.shape.size() == 2 && out.shape[0] == ids.shape[0] && out.shape[1] == own_columns &&
                      outputs.count() == ids.count() * size;
    if (!fits || ids.shape[1] > kMostChosen || (shared.count() != 0 && shared.shape != out.shape) ||
        (gate.count() != 0 && (gate.count() != out.shape[0] || shared.count() == 0))) {
      throw std::invalid_argument("the outputs of experts do not fit to the rows");
    }
    AddExpertsArgs own{};
    own.outputs = at<float>(outputs.address);
    own.ids = at<int32_t>(ids.address);
    own.places = at<int32_t>(places.address);
    own.weights = at<float>(weights.address);
    own.size = size;
    own.chosen = ids.shape[1];
    return {own, at<Ranks>(ranks), at<int64_t>(experts), at<int64_t>(columns),
            shared.count() == 0 ? nullptr : at<float>(shared.address), gate.count() == 0 ? nullptr : at<float>(gate.address),
            at<void>(out.address), out.dtype, out.shape[0]};
  }
};

}  // namespace octavo

#if defined(OCTAVO_ISA)

namespace octavo::OCTAVO_ISA {

// Lists the ranks that have experts of a row, in ascending order; returns their number.
inline int64_t ranks_of_row(const AddRankExpertsArgs& args, int64_t row, int32_t (&found)[kMaxRanks]) {
  const int32_t* ids = args.own.ids + row * args.own.chosen;
  int64_t count = 0;
  int32_t rank = 0;
  for (int64_t i = 0; i < args.own.chosen; ++i) {
    while (ids[i] >= args.experts[rank + 1]) ++rank;
    if (count == 0 || found[count - 1] != rank) found[count++] = rank;
  }
  return count;
}

// Adds the sums of all ranks for rows `begin` to `end`, counted from row `first`. sums: [ranks, rows, size].
template <class T>
void add_sums_of_ranks(const AddRankExpertsArgs& args, const float* sums, int64_t rows, int64_t first, int64_t begin, int64_t end) {
  const int64_t size = args.own.size, column = args.columns[args.ranks->rank()];
  const int64_t columns = args.columns[args.ranks->rank() + 1] - column;
  int32_t ranks[kMaxRanks];
  int64_t additions[kMaxRanks][2];
  Vec values[kMaxRanks];
  for (int64_t i = begin; i < end; ++i) {
    const int64_t row = first + i, num_ranks = ranks_of_row(args, row, ranks);
    int64_t count = 0;
    list_additions(ranks, 0, num_ranks, 0, args.ranks->count(), additions, count);
    const Vec factor = shared_factor(args.gate, row);
    T* out = static_cast<T*>(args.out) + row * columns;
    for (int64_t j = 0; j < columns; j += kLanes) {
      for (int64_t k = 0; k < num_ranks; ++k) {
        values[k] = load_first(sums + (ranks[k] * rows + i) * size + column + j, columns - j);
      }
      for (int64_t k = 0; k < count; ++k) values[additions[k][0]] = values[additions[k][0]] + values[additions[k][1]];
      if (args.shared != nullptr) values[0] = values[0] + load_first(args.shared + row * columns + j, columns - j) * factor;
      store_first(out + j, values[0], columns - j);
    }
  }
}

inline void add_rank_experts(ThreadPool& pool, const AddRankExpertsArgs& args) {
  Ranks& ranks = *args.ranks;
  const int64_t size = args.own.size, row_bytes = ranks.count() * size * static_cast<int64_t>(sizeof(float));
  const int64_t at_once = ranks.area_bytes() / row_bytes;
  if (at_once < 1) throw std::invalid_argument("a row is larger than the memory that ranks share");
  const int64_t low = args.experts[ranks.rank()], high = args.experts[ranks.rank() + 1];
  const int64_t least = divide_up(kLeastElements, size * args.own.chosen);
  const auto add = args.dtype == DType::kFloat32 ? add_sums_of_ranks<float> : add_sums_of_ranks<bf16>;
  for (int64_t first = 0; first < args.rows; first += at_once) {
    const int64_t rows = smaller(at_once, args.rows - first);
    auto* sums = reinterpret_cast<float*>(ranks.begin(rows * row_bytes));
    float* own = sums + ranks.rank() * rows * size;
    parallel_ranges(pool, rows, least, [&](int64_t begin, int64_t end) {
      for (int64_t i = begin; i < end; ++i) {
        const ExpertSum sum(args.own, first + i, low, high);
        if (sum.is_empty()) continue;
        for (int64_t j = 0; j < size; j += kLanes) store_first(own + i * size + j, sum.at(j), size - j);
      }
    });
    ranks.announce();
    ranks.wait();
    parallel_ranges(pool, rows, least, [&](int64_t begin, int64_t end) { add(args, sums, rows, first, begin, end); });
  }
}

}  // namespace octavo::OCTAVO_ISA

#endif  // OCTAVO_ISA
