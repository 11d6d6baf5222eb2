// The filters min_p, then top_k, then top_p, without sorting a whole vocabulary.
//
// Tokens are ordered by value descending, then id ascending. Each filter keeps a prefix of that order, and the last token of the
// prefix, a Cut, describes it. Values are counted in buckets of descending value; only the tokens of the bucket in which a prefix
// ends are sorted.
#pragma once

#include <algorithm>
#include <cfloat>
#include <climits>
#include <cmath>

#include "vec.h"

namespace octavo::OCTAVO_ISA {

constexpr int kBuckets = 2048;
constexpr float kBucketedLogits = 40.0f;  // below the maximum by more than this (before the temperature): last bucket

struct Token {
  float value;
  int32_t id;
  OCTAVO_INLINE bool before(const Token& other) const {
    return value > other.value || (value == other.value && id < other.id);
  }
};

using Cut = Token;  // the last token that is kept

constexpr Cut kKeepAll{-__builtin_inff(), INT_MAX};

OCTAVO_INLINE Mask kept(const Cut& cut, Vec values, IVec ids) {
  const Vec limit = splat(cut.value);
  const Mask early = is_negative(ids - splat_int(static_cast<uint32_t>(cut.id) + 1u));
  return either(less(limit, values), both(equal(limit, values), cut.id == INT_MAX ? equal(values, values) : early));
}

struct SelectionMemory {
  float* values;     // [vocab rounded up to 16]: scaled, free of NaN, -inf past the end
  Token* tokens;     // [vocab]
  int32_t* counts;   // [4][kBuckets]
  double* weights;   // [kBuckets]

  SelectionMemory(int64_t vocab, void* memory) {
    weights = static_cast<double*>(memory);
    counts = reinterpret_cast<int32_t*>(weights + kBuckets);
    values = reinterpret_cast<float*>(counts + 4 * kBuckets);
    tokens = reinterpret_cast<Token*>(values + padded(vocab));
  }
  static OCTAVO_INLINE int64_t padded(int64_t vocab) { return divide_up(vocab, kLanes) * kLanes; }
  static OCTAVO_INLINE size_t bytes(int64_t vocab) {
    return kBuckets * sizeof(double) + 4 * kBuckets * sizeof(int32_t) +
           static_cast<size_t>(padded(vocab)) * (sizeof(float) + sizeof(Token));
  }
};

// One row of scaled values and its distribution over the buckets.
struct Selection {
  SelectionMemory memory;
  int64_t vocab;
  float maximum;  // finite
  float scale;    // buckets per unit of value

  Selection(const SelectionMemory& memory_, int64_t vocab_, float maximum_, float temperature)
      : memory(memory_),
        vocab(vocab_),
        maximum(larger(-FLT_MAX, smaller(FLT_MAX, maximum_))),
        scale(larger(FLT_MIN, smaller(FLT_MAX, temperature * (kBuckets / kBucketedLogits)))) {}

  OCTAVO_INLINE IVec buckets(Vec values) const {
    const Vec depth = (splat(maximum) - values) * splat(scale);
    return to_int(min(splat(kBuckets - 1.0f), max(splat(0.0f), depth)));
  }
  OCTAVO_INLINE Vec values_at(int64_t i) const { return load(memory.values + i); }
  OCTAVO_INLINE IVec ids_at(int64_t i) const { return splat_int(static_cast<uint32_t>(i)) + lane_numbers(); }
};

// e^x for x <= 0 within about an ulp, by plain operations, which the compiler vectorizes.
OCTAVO_INLINE double exp_double(double x) {
  x = x < -700.0 ? -700.0 : (x > 0.0 ? 0.0 : x);
  const double shifted = x * 1.4426950408889634 + 0x1.8p52;  // the integer is in the low bits
  const double n = shifted - 0x1.8p52;
  const double r = (x - n * 6.93147180369123816490e-01) - n * 1.90821492927058770002e-10;
  double p = 1.0 / 6227020800.0;
  p = p * r + 1.0 / 479001600.0;
  p = p * r + 1.0 / 39916800.0;
  p = p * r + 1.0 / 3628800.0;
  p = p * r + 1.0 / 362880.0;
  p = p * r + 1.0 / 40320.0;
  p = p * r + 1.0 / 5040.0;
  p = p * r + 1.0 / 720.0;
  p = p * r + 1.0 / 120.0;
  p = p * r + 1.0 / 24.0;
  p = p * r + 1.0 / 6.0;
  p = p * r + 0.5;
  p = p * r + 1.0;
  p = p * r + 1.0;
  uint64_t power, bits;
  std::memcpy(&power, &shifted, 8);
  std::memcpy(&bits, &p, 8);
  bits += power << 52;
  std::memcpy(&p, &bits, 8);
  return p;
}

OCTAVO_INLINE void token_weights(const float* values, float maximum, double (&weights)[kLanes]) {
  for (int i = 0; i < kLanes; ++i) weights[i] = exp_double(static_cast<double>(values[i]) - static_cast<double>(maximum));
}

// Sorts the tokens of one bucket that a cut keeps, and returns their number.
inline int64_t sorted_bucket(const Selection& row, int bucket, const Cut& cut) {
  Token* tokens = row.memory.tokens;
  int64_t count = 0;
  for (int64_t i = 0; i < row.vocab; i += kLanes) {
    const Vec values = row.values_at(i);
    int32_t number[kLanes];
    const IVec difference = row.buckets(values) ^ splat_int(static_cast<uint32_t>(bucket));
    unsigned here = bits(kept(cut, values, row.ids_at(i)));
    if (row.vocab - i < kLanes) here &= (1u << (row.vocab - i)) - 1;
    if (here == 0) continue;
    store_int(number, difference);
    for (; here != 0; here &= here - 1) {
      const int lane = __builtin_ctz(here);
      if (number[lane] == 0) tokens[count++] = {row.memory.values[i + lane], static_cast<int32_t>(i + lane)};
    }
  }
  std::sort(tokens, tokens + count, [](const Token& a, const Token& b) { return a.before(b); });
  return count;
}

// Keeps the k first tokens; 0 < k.
inline Cut top_k_cut(const Selection& row, int64_t k) {
  if (k >= row.vocab) return kKeepAll;
  int32_t* counts = row.memory.counts;  // four tables, so that a run of one bucket's values does not wait for its own increments
  std::memset(counts, 0, 4 * kBuckets * sizeof(int32_t));
  for (int64_t i = 0; i < row.vocab; i += kLanes) {
    int32_t number[kLanes];
    store_int(number, row.buckets(row.values_at(i)));
    const int64_t lanes = smaller(int64_t{kLanes}, row.vocab - i);
    for (int64_t lane = 0; lane < lanes; ++lane) ++counts[lane % 4 * kBuckets + number[lane]];
  }
  int64_t before = 0;
  for (int bucket = 0; bucket < kBuckets; ++bucket) {
    int64_t here = 0;
    for (int table = 0; table < 4; ++table) here += counts[table * kBuckets + bucket];
    if (before + here >= k) {
      sorted_bucket(row, bucket, kKeepAll);
      return row.memory.tokens[k - before - 1];
    }
    before += here;
  }
  return kKeepAll;
}

// Of the tokens that `cut` keeps, keeps the shortest prefix whose probability reaches top_p, the crossing token included.
// Sums are float64, bucket by bucket, tokens of the deciding bucket one by one in order.
inline Cut top_p_cut(const Selection& row, double top_p, const Cut& cut) {
  double* weights = row.memory.weights;
  std::memset(weights, 0, kBuckets * sizeof(double));
  for (int64_t i = 0; i < row.vocab; i += kLanes) {
    const Vec values = row.values_at(i);
    unsigned here = bits(kept(cut, values, row.ids_at(i)));
    if (here == 0) continue;
    int32_t number[kLanes];
    double weight[kLanes];
    store_int(number, row.buckets(values));
    token_weights(row.memory.values + i, row.maximum, weight);
    for (; here != 0; here &= here - 1) {
      const int lane = __builtin_ctz(here);
      if (i + lane < row.vocab) weights[number[lane]] += weight[lane];
    }
  }
  double total = 0.0;
  for (int bucket = 0; bucket < kBuckets; ++bucket) total += weights[bucket];
  const double target = top_p * total;
  double before = 0.0;
  for (int bucket = 0; bucket < kBuckets; ++bucket) {
    if (before + weights[bucket] < target) {
      before += weights[bucket];
      continue;
    }
    const int64_t count = sorted_bucket(row, bucket, cut);
    for (int64_t i = 0; i < count; ++i) {
      before += exp_double(static_cast<double>(row.memory.tokens[i].value) - static_cast<double>(row.maximum));
      if (before >= target) return row.memory.tokens[i];
    }
    if (count > 0) return row.memory.tokens[count - 1];  // by rounding, the sum in sorted order did not reach the target
  }
  return cut;
}

struct Filters {
  int64_t top_k;
  float top_p;
  float min_p;
};

inline Cut find_cut(const Selection& row, const Filters& filters) {
  Cut cut = kKeepAll;
  if (filters.min_p > 0.0f) {
    cut.value = row.maximum + static_cast<float>(std::log(static_cast<double>(filters.min_p)));
  }
  if (filters.top_k > 0) {
    const Cut other = top_k_cut(row, filters.top_k);
    if (other.before(cut)) cut = other;
  }
  if (filters.top_p < 1.0f) cut = top_p_cut(row, static_cast<double>(filters.top_p), cut);
  return cut;
}

}  // namespace octavo::OCTAVO_ISA
