// Mixtures of experts: which experts compute a token, their rows in order, and the sum of what they return.
//
// A row's result depends on that row alone. Ties go to the lowest expert, and outputs are added in one binary tree over expert
// ids, made by halving [0, experts): so a part of the experts whose ids are a subtree can be added elsewhere.
#pragma once

#include "arguments.h"

namespace octavo {

constexpr int64_t kMostChosen = 64;  // experts of a token

enum class Scoring : int { kSoftmax, kSigmoid, kSoftmaxOfChosen };  // the numbers of octavo.kernels.operations.choose_experts

struct ChooseExpertsArgs {
  const float* logits;   // [rows, experts]
  const float* bias;     // [experts], added to the scores for the choice alone, or null
  const float* factors;  // [experts], multiply the weights after scale, or null
  int32_t* ids;          // [rows, chosen], ascending
  float* weights;        // [rows, chosen]
  int64_t rows;
  int64_t experts;
  int64_t chosen;
  Scoring scoring;
  int64_t groups;         // of neighbouring experts
  int64_t chosen_groups;  // others are not chosen from
  bool by_best;           // a group's score is that of its best expert, not the sum of its two best
  float least_sum;        // added to the sum by which weights are divided; negative: they are not divided
  float scale;            // of the weights

  static constexpr auto kRows = &ChooseExpertsArgs::rows;
  static ChooseExpertsArgs of(const Tensor& logits, const Tensor& bias, const Tensor& factors, const Tensor& ids,
                              const Tensor& weights, int scoring, int64_t groups, int64_t chosen_groups, bool by_best,
                              double least_sum, double scale) {
    logits.expect_contiguous(DType::kFloat32, "logits");
    bias.expect_contiguous(DType::kFloat32, "bias");
    factors.expect_contiguous(DType::kFloat32, "factors");
    ids.expect_contiguous(DType::kInt32, "ids");
    weights.expect_contiguous(DType::kFloat32, "weights");
    if (logits.shape.size() != 2 || ids.shape.size() != 2 || ids.shape != weights.shape || ids.shape[0] != logits.shape[0]) {
      throw std::invalid_argument("logits are not [rows, experts], or ids and weights not [rows, chosen]");
    }
    const int64_t experts = logits.shape[1], chosen = ids.shape[1];
    for (const Tensor* each : {&bias, &factors}) {
      if (each->count() != 0 && each->count() != experts) throw std::invalid_argument("the bias or the factors are not [experts]");
    }
    const bool fits = groups >= 1 && experts % groups == 0 && chosen_groups >= 1 && chosen_groups <= groups;
    if (!fits || chosen < 1 || chosen > experts / groups * chosen_groups) {
      throw std::invalid_argument("there are fewer experts in the chosen groups than are chosen");
    }
    return {at<float>(logits.address), bias.count() == 0 ? nullptr : at<float>(bias.address),
            factors.count() == 0 ? nullptr : at<float>(factors.address), at<int32_t>(ids.address), at<float>(weights.address),
            logits.shape[0], experts, chosen, Scoring(scoring), groups, chosen_groups, by_best,
            static_cast<float>(least_sum), static_cast<float>(scale)};
  }
};

struct SortByExpertArgs {
  const int32_t* ids;  // [rows, chosen]
  int64_t* sources;    // [rows * chosen]: the row that is computed at each place
  int32_t* places;     // [rows, chosen]: where each choice is computed
  int32_t* starts;     // [experts + 1]: each expert's first place, then their number
  int64_t rows;
  int64_t chosen;
  int64_t experts;

  static constexpr auto kRows = &SortByExpertArgs::rows;
  static SortByExpertArgs of(const Tensor& ids, const Tensor& sources, const Tensor& places, const Tensor& starts) {
    ids.expect_contiguous(DType::kInt32, "ids");
    sources.expect_contiguous(DType::kInt64, "sources");
    places.expect_contiguous(DType::kInt32, "places");
    starts.expect_contiguous(DType::kInt32, "starts");
    if (ids.shape.size() != 2 || places.shape != ids.shape || sources.count() != ids.count() || starts.count() < 2) {
      throw std::invalid_argument("ids, sources, places and starts do not fit together");
    }
    return {at<int32_t>(ids.address), at<int64_t>(sources.address), at<int32_t>(places.address), at<int32_t>(starts.address),
            ids.shape[0], ids.shape[1], starts.count() - 1};
  }
};

struct AddExpertsArgs {
  const float* outputs;   // [rows * chosen, size]
  const int32_t* ids;     // [rows, chosen], ascending
  const int32_t* places;  // [rows, chosen]: rows of outputs
  const float* weights;   // [rows, chosen]
  const float* shared;    // [rows, size] of the shared expert, which is added last, or null
  const float* gate;      // [rows]: the shared expert's output is multiplied by its sigmoid; or null
  void* out;              // [rows, size]
  DType dtype;            // of out
  int64_t rows;
  int64_t size;
  int64_t chosen;
  int64_t experts;

  static constexpr auto kRows = &AddExpertsArgs::rows;
  static AddExpertsArgs of(const Tensor& outputs, const Tensor& ids, const Tensor& places, const Tensor& weights,
                           const Tensor& shared, const Tensor& gate, const Tensor& out, int64_t experts) {
    for (const Tensor* each : {&outputs, &weights, &shared, &gate}) each->expect_contiguous(DType::kFloat32, "a float");
    ids.expect_contiguous(DType::kInt32, "ids");
    places.expect_contiguous(DType::kInt32, "places");
    out.expect_contiguous(out.dtype, "out");
    const bool fits = ids.shape.size() == 2 && places.shape == ids.shape && weights.shape == ids.shape &&
                      out.shape.size() == 2 && out.shape[0] == ids.shape[0] && outputs.count() == ids.count() * out.shape[1];
    if (!fits || ids.shape[1] > kMostChosen || (shared.count() != 0 && shared.shape != out.shape) ||
        (gate.count() != 0 && (gate.count() != out.shape[0] || shared.count() == 0))) {
      throw std::invalid_argument("the outputs of experts do not fit to the rows");
    }
    return {at<float>(outputs.address), at<int32_t>(ids.address), at<int32_t>(places.address), at<float>(weights.address),
            shared.count() == 0 ? nullptr : at<float>(shared.address), gate.count() == 0 ? nullptr : at<float>(gate.address),
            at<void>(out.address), out.dtype, out.shape[0], out.shape[1], ids.shape[1], experts};
  }
};

}  // namespace octavo

#if defined(OCTAVO_ISA)

#include <limits>

#include "math.h"
#include "parallel.h"

namespace octavo::OCTAVO_ISA {

// The index of the largest value that is left, the lowest of equal ones; at least one is. NaN is never larger.
inline int64_t largest_left(const float* values, const bool* is_left, int64_t count) {
  int64_t best = -1;
  for (int64_t i = 0; i < count; ++i) {
    if (is_left[i] && (best < 0 || values[i] > values[best])) best = i;
  }
  return best;
}

inline float sum_in_order(const float* x, int64_t count) {
  float sum = 0.0f;
  for (int64_t i = 0; i < count; ++i) sum += x[i];
  return sum;
}

inline void divide_by(float* x, int64_t count, float divisor) {
  for (int64_t i = 0; i < count; ++i) x[i] /= divisor;
}

// Makes exp(x - the largest) of x, and returns their sum.
inline float exponentials(float* x, int64_t count) {
  float largest = x[0];
  for (int64_t i = 1; i < count; ++i) largest = larger(largest, x[i]);
  for (int64_t i = 0; i < count; i += kLanes) {
    store_first(x + i, exp(load_first(x + i, count - i) - splat(largest)), count - i);
  }
  return sum_in_order(x, count);
}

OCTAVO_INLINE Vec sigmoid(Vec x) {
  const Vec one = splat(1.0f);
  return one / (one + exp(splat(0.0f) - x));
}

// The score of a group: that of its best expert, or the sum of its two best.
inline float group_score(const float* values, int64_t size, bool by_best) {
  float best = values[0], second = -std::numeric_limits<float>::infinity();
  for (int64_t i = 1; i < size; ++i) {
    second = larger(second, smaller(best, values[i]));
    best = larger(best, values[i]);
  }
  return by_best || size == 1 ? best : best + second;
}

// The memory of one thread.
struct ChoiceMemory {
  float* scores;        // [experts]
  float* choice;        // [experts]: scores with the bias
  float* group_scores;  // [groups]
  bool* is_left;        // [experts]: may be chosen
  bool* is_chosen;      // [experts]
  bool* is_group_left;  // [groups]

  static size_t bytes(const ChooseExpertsArgs& args) {
    return static_cast<size_t>(2 * args.experts + args.groups) * (sizeof(float) + sizeof(bool));
  }
  ChoiceMemory(void* memory, const ChooseExpertsArgs& args)
      : scores(static_cast<float*>(memory)),
        choice(scores + args.experts),
        group_scores(choice + args.experts),
        is_left(reinterpret_cast<bool*>(group_scores + args.groups)),
        is_chosen(is_left + args.experts),
        is_group_left(is_chosen + args.experts) {}
};

inline void leave_chosen_groups(const ChooseExpertsArgs& args, const ChoiceMemory& of) {
  const int64_t size = args.experts / args.groups;
  for (int64_t group = 0; group < args.groups; ++group) {
    of.group_scores[group] = group_score(of.choice + group * size, size, args.by_best);
    of.is_group_left[group] = true;
  }
  std::memset(of.is_left, 0, static_cast<size_t>(args.experts));
  for (int64_t i = 0; i < args.chosen_groups; ++i) {
    const int64_t best = largest_left(of.group_scores, of.is_group_left, args.groups);
    of.is_group_left[best] = false;
    std::memset(of.is_left + best * size, 1, static_cast<size_t>(size));
  }
}

inline void choose_for_row(const ChooseExpertsArgs& args, int64_t row, const ChoiceMemory& of) {
  const int64_t experts = args.experts, chosen = args.chosen;
  std::memcpy(of.scores, args.logits + row * experts, static_cast<size_t>(experts) * sizeof(float));
  if (args.scoring == Scoring::kSoftmax) {
    divide_by(of.scores, experts, exponentials(of.scores, experts));
  } else if (args.scoring == Scoring::kSigmoid) {
    for (int64_t i = 0; i < experts; i += kLanes) {
      store_first(of.scores + i, sigmoid(load_first(of.scores + i, experts - i)), experts - i);
    }
  }
  for (int64_t i = 0; i < experts; ++i) of.choice[i] = args.bias == nullptr ? of.scores[i] : of.scores[i] + args.bias[i];
  std::memset(of.is_left, 1, static_cast<size_t>(experts));
  std::memset(of.is_chosen, 0, static_cast<size_t>(experts));
  if (args.groups > 1) leave_chosen_groups(args, of);
  for (int64_t i = 0; i < chosen; ++i) {
    const int64_t best = largest_left(of.choice, of.is_left, experts);
    of.is_left[best] = false;
    of.is_chosen[best] = true;
  }
  int32_t* ids = args.ids + row * chosen;
  float* weights = args.weights + row * chosen;
  for (int64_t i = 0, found = 0; i < experts; ++i) {
    if (!of.is_chosen[i]) continue;
    ids[found] = static_cast<int32_t>(i);
    weights[found++] = of.scores[i];
  }
  if (args.scoring == Scoring::kSoftmaxOfChosen) {
    divide_by(weights, chosen, exponentials(weights, chosen));
  } else if (args.least_sum >= 0.0f) {
    divide_by(weights, chosen, sum_in_order(weights, chosen) + args.least_sum);
  }
  for (int64_t i = 0; i < chosen; ++i) weights[i] *= args.scale;
  if (args.factors != nullptr) {
    for (int64_t i = 0; i < chosen; ++i) weights[i] *= args.factors[ids[i]];
  }
}

// Grouped choice: DeepSeek-AI, "DeepSeek-V2" (2024), 2.2.2, and "DeepSeek-V3 Technical Report" (2024), 2.1.2.
inline void choose_experts(ThreadPool& pool, const ChooseExpertsArgs& args) {
  pool.reserve_local(ChoiceMemory::bytes(args));
  const int64_t least = divide_up(kLeastElements, args.experts * args.chosen);
  parallel_ranges(pool, args.rows, least, [&](int64_t first, int64_t last, int thread) {
    const ChoiceMemory of(pool.local(thread), args);
    for (int64_t row = first; row < last; ++row) choose_for_row(args, row, of);
  });
}

// A counting sort, stable, so that the rows of an expert are in the order of the batch.
inline void sort_by_expert(ThreadPool&, const SortByExpertArgs& args) {
  const int64_t count = args.rows * args.chosen;
  std::memset(args.starts, 0, static_cast<size_t>(args.experts + 1) * sizeof(int32_t));
  for (int64_t i = 0; i < count; ++i) ++args.starts[args.ids[i] + 1];
  for (int64_t i = 0; i < args.experts; ++i) args.starts[i + 1] += args.starts[i];
  for (int64_t i = 0; i < count; ++i) {
    const int32_t place = args.starts[args.ids[i]]++;
    args.places[i] = place;
    args.sources[place] = i / args.chosen;
  }
  for (int64_t i = args.experts; i > 0; --i) args.starts[i] = args.starts[i - 1];
  args.starts[0] = 0;
}

// Lists the additions of the tree over [low, high) for ids[first, last): into[i] += from[i]. The sum is at ids[first].
inline void list_additions(const int32_t* ids, int64_t first, int64_t last, int64_t low, int64_t high, int64_t (*additions)[2],
                           int64_t& count) {
  if (last - first < 2) return;
  const int64_t middle = low + (high - low) / 2;
  int64_t split = first;
  while (split < last && ids[split] < middle) ++split;
  list_additions(ids, first, split, low, middle, additions, count);
  list_additions(ids, split, last, middle, high, additions, count);
  if (first < split && split < last) {
    additions[count][0] = first;
    additions[count++][1] = split;
  }
}

// The weighted sum of a row's experts in [low, high), which must be a node of the tree.
class ExpertSum {
 public:
  ExpertSum(const AddExpertsArgs& args, int64_t row, int64_t low, int64_t high)
      : args_(args), begin_(row * args.chosen) {
    const int32_t* ids = args.ids + begin_;
    while (first_ < args.chosen && ids[first_] < low) ++first_;
    last_ = first_;
    while (last_ < args.chosen && ids[last_] < high) ++last_;
    list_additions(ids, first_, last_, low, high, additions_, count_);
  }

  bool is_empty() const { return first_ == last_; }

  // Of the columns from `column` on. The sum must not be empty.
  OCTAVO_INLINE Vec at(int64_t column) const {
    Vec values[kMostChosen];
    for (int64_t j = first_; j < last_; ++j) {
      const float* output = args_.outputs + args_.places[begin_ + j] * args_.size;
      values[j] = load_first(output + column, args_.size - column) * splat(args_.weights[begin_ + j]);
    }
    for (int64_t j = 0; j < count_; ++j) {
      values[additions_[j][0]] = values[additions_[j][0]] + values[additions_[j][1]];
    }
    return values[first_];
  }

 private:
  const AddExpertsArgs& args_;
  const int64_t begin_;  // of the row's choices
  int64_t first_ = 0, last_ = 0, count_ = 0;
  int64_t additions_[kMostChosen][2];
};

// The factor of the shared expert's output for a row. gate: [rows], or null.
OCTAVO_INLINE Vec shared_factor(const float* gate, int64_t row) {
  return gate == nullptr ? splat(1.0f) : sigmoid(splat(gate[row]));
}

template <class T>
void add_experts_of(ThreadPool& pool, const AddExpertsArgs& args) {
  const int64_t least = divide_up(kLeastElements, args.size * args.chosen);
  parallel_ranges(pool, args.rows, least, [&](int64_t first, int64_t last) {
    for (int64_t row = first; row < last; ++row) {
      const ExpertSum sum(args, row, 0, args.experts);
      const Vec factor = shared_factor(args.gate, row);
      T* out = static_cast<T*>(args.out) + row * args.size;
      for (int64_t i = 0; i < args.size; i += kLanes) {
        Vec total = sum.at(i);
        if (args.shared != nullptr) total = total + load_first(args.shared + row * args.size + i, args.size - i) * factor;
        store_first(out + i, total, args.size - i);
      }
    }
  });
}

inline void add_experts(ThreadPool& pool, const AddExpertsArgs& args) {
  if (args.dtype == DType::kFloat32) {
    add_experts_of<float>(pool, args);
  } else {
    add_experts_of<bf16>(pool, args);
  }
}

}  // namespace octavo::OCTAVO_ISA

#endif  // OCTAVO_ISA
