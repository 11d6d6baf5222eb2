// A tile of keys and values in bfloat16, for queries in bfloat16 and processors that multiply pairs of bfloat16: twice as many
// products a second as in float32, with half as much memory.
//
// A score is a chain of pair products over head_dim, times one factor. A sum of values is a chain over pairs of positions 2 i and
// 2 i + 1 of the tile; for it the softmax weights are rounded to bfloat16. If a row sees only one position of a pair, the value
// and the weight of the other are replaced by zero.
#pragma once

#include <type_traits>
#include <utility>

#include "attention_tile.h"
#include "math.h"

namespace octavo::OCTAVO_ISA {

#if defined(OCTAVO_ISA_BF16)

constexpr int64_t kTilePairs = kTilePositions / 2;

// sums[m][32 columns] += sum over i < pairs of a[m * a_stride + i] * panel[i][32 columns] for M rows. With factors (one for each
// column) the sums start at zero and are multiplied by the factors at the end.
template <int M>
void multiply_pair_panel(const uint32_t* a, int64_t a_stride, const uint32_t* panel, int64_t pairs, float* sums,
                         int64_t stride, const float* factors) {
  constexpr int V = kPanelColumns / kLanes;
  const bool fresh = factors != nullptr;
  Vec sum[M][V];
  OCTAVO_UNROLL
  for (int m = 0; m < M; ++m) {
    OCTAVO_UNROLL
    for (int v = 0; v < V; ++v) sum[m][v] = fresh ? splat(0.0f) : load(sums + m * stride + v * kLanes);
  }
  for (int64_t i = 0; i < pairs; ++i, panel += kPanelColumns) {
    IVec columns[V];
    OCTAVO_UNROLL
    for (int v = 0; v < V; ++v) columns[v] = load_int(panel + v * kLanes);
    OCTAVO_UNROLL
    for (int m = 0; m < M; ++m) {
      const IVec two = splat_int(a[m * a_stride + i]);
      OCTAVO_UNROLL
      for (int v = 0; v < V; ++v) sum[m][v] = add_pair_products(sum[m][v], two, columns[v]);
    }
  }
  OCTAVO_UNROLL
  for (int v = 0; v < V; ++v) {
    const Vec factor = fresh ? load(factors + v * kLanes) : splat(1.0f);
    OCTAVO_UNROLL
    for (int m = 0; m < M; ++m) store(sums + m * stride + v * kLanes, fresh ? sum[m][v] * factor : sum[m][v]);
  }
}

// multiply_pair_panel for 1 .. kTileRows rows.
struct PairPanelFunctions {
  decltype(&multiply_pair_panel<1>) of_rows[kTileRows + 1];
  constexpr PairPanelFunctions() : PairPanelFunctions(std::make_integer_sequence<int, kTileRows>()) {}
  template <int... I>
  constexpr explicit PairPanelFunctions(std::integer_sequence<int, I...>)
      : of_rows{nullptr, multiply_pair_panel<I + 1>...} {}
};

constexpr PairPanelFunctions kMultiplyPairs;

// The scale of a row of KV, by which values from read_unscaled must be multiplied.
OCTAVO_INLINE float factor(const KVRow<bf16>&) { return 1.0f; }
OCTAVO_INLINE float factor(const KVRow<int8_t>& row) {
  float scale;
  std::memcpy(&scale, row.scale, sizeof(scale));
  return scale;
}

// Returns the first n values from d on, up to kLanes, without the scale.
template <class C>
OCTAVO_INLINE Vec read_unscaled(const KVRow<C>& row, int64_t d, int64_t n) {
  return n > 0 ? load_first(row.values + d, n) : splat(0.0f);
}

// Returns the first n values from d on, up to 2 * kLanes, as pairs of bfloat16, without the scale.
OCTAVO_INLINE IVec read_pairs(const KVRow<bf16>& row, int64_t d, int64_t n) {
  if (n >= 2 * kLanes) return load_int(row.values + d);
  return round_pairs(read_unscaled(row, d, n), read_unscaled(row, d + kLanes, n - kLanes));
}
OCTAVO_INLINE IVec read_pairs(const KVRow<int8_t>& row, int64_t d, int64_t n) {
  return round_pairs(read_unscaled(row, d, n), read_unscaled(row, d + kLanes, n - kLanes));
}

// KV of type C: bfloat16 or int8. The integers of int8 are exact in bfloat16; their scales are factors of the scores and of the
// weights.
template <class C>
class PairKV {
 public:
  static constexpr int kRows = kTileRows;
  static constexpr int64_t kMostTiles = 1;
  static constexpr int64_t kTogether = 2;

  // tiles: for how many tiles there is memory; see select.
  static int64_t size(const AttentionShape& s, int64_t tiles = kMostTiles) {
    return tiles * tile_size(s) + s.max_rows * s.padded_dim / 2;
  }

  PairKV(const AttentionShape& s, float* memory, int64_t tiles = kMostTiles)
      : s_(s), words_(s.padded_dim / 2), memory_(memory), queries_(reinterpret_cast<uint32_t*>(memory + tiles * tile_size(s))) {
    select(0);
  }

  static constexpr int64_t tiles_together() { return 1; }

  // The following calls work on tile t.
  OCTAVO_INLINE void select(int64_t t) {
    keys_ = reinterpret_cast<uint32_t*>(memory_ + t * tile_size(s_));
    values_ = keys_ + kTilePositions * words_;
    key_factors_ = reinterpret_cast<float*>(values_ + kTilePositions * s_.padded_values / 2);
    value_factors_ = key_factors_ + kTilePositions;
  }

  void pack_queries(const AttentionArgs& args, const AttentionTask& task) {
    scale_ = args.scale;
    const auto row_bytes = static_cast<size_t>(s_.dim) * sizeof(bf16);
    for (int64_t row = 0; row < task.tokens * s_.group; ++row) {
      uint32_t* out = queries_ + row * words_;
      std::memset(out, 0, static_cast<size_t>(words_) * sizeof(uint32_t));
      std::memcpy(out, query_row<bf16>(args, s_, task, row), row_bytes);
    }
  }

  // Gathers the tile, and prefetches the rows of the next one.
  void gather(const TileRows<C>& rows, const TileRows<C>& next) {
    RowsAhead<C> ahead(next, s_.dim);
    gather_keys(rows, ahead);
    gather_values(rows, ahead);
  }

  // Scores of `rows` rows from `row` on: [rows][kTilePositions].
  void score(int64_t row, int64_t rows, float* scores) const {
    for (int64_t p = 0; p < kTilePositions; p += kPanelColumns) {
      kMultiplyPairs.of_rows[rows](queries_ + row * words_, words_, keys_ + p * words_, divide_up(s_.dim, 2), scores + p,
                                   kTilePositions, key_factors_ + p);
    }
  }

  // Returns vector i of a row's scores.
  OCTAVO_INLINE Vec finish_score(float* scores, int i) const { return load(scores + i * kLanes); }

  template <class Score>
  static OCTAVO_INLINE Score scaled(Score score) {
    return score;
  }
  static OCTAVO_INLINE Vec distance(Vec score, Vec maximum) { return score - maximum; }

  // Add the values of the whole tile, or the values that rows see, to the sums. weights: as stored by `store_weights`.
  void add_all(const float* weights, int64_t rows, float* sums) const { add(weights, rows, 0, kTilePositions, sums); }
  void add_rows(const float* weights, int64_t rows, const SeenRange* seen, float* sums) const {
    add_seen_values(*this, weights, rows, seen, sums, s_.sums_size);
  }

  static OCTAVO_INLINE void exponentiate(Vec (&x)[kTileVectors]) { coarse_exp(x); }

  // Stores the weights of a row in the layout of `add`: as pairs, in the first half of the row's memory.
  void store_weights(float* place, Vec (&weights)[kTileVectors]) const {
    OCTAVO_UNROLL
    for (int i = 0; i < kTileVectors; i += 2) {
      if constexpr (std::is_same_v<C, int8_t>) {
        weights[i] = weights[i] * load(value_factors_ + i * kLanes);
        weights[i + 1] = weights[i + 1] * load(value_factors_ + (i + 1) * kLanes);
      }
      store_int(place + i / 2 * kLanes, round_pairs(weights[i], weights[i + 1]));
    }
  }

  // sums += weights[begin .. end] x values, for `rows` rows. A range that begins or ends within a pair is allowed for one row only.
  void add(const float* weights, int64_t rows, int64_t begin, int64_t end, float* sums) const {
    if (begin >= end) return;
    const auto* words = reinterpret_cast<const uint32_t*>(weights);
    const int64_t first = divide_up(begin, 2), last = end / 2;
    if (begin % 2 != 0) add_half(words[begin / 2], begin / 2, kUpperHalf, sums);
    if (first < last) {
      for (int64_t d = 0; d < s_.padded_values; d += kPanelColumns) {
        kMultiplyPairs.of_rows[rows](words + first, kTilePositions, values_ + d * kTilePairs + first * kPanelColumns,
                                     last - first, sums + d, s_.sums_size, nullptr);
      }
    }
    if (end % 2 != 0) add_half(words[end / 2], end / 2, kLowerHalf, sums);
  }

 protected:
  static constexpr uint32_t kLowerHalf = 0x0000FFFFu, kUpperHalf = 0xFFFF0000u;

  // Words of a tile: keys, values and the factors of both.
  static int64_t tile_size(const AttentionShape& s) {
    return kTilePositions * (s.padded_dim + s.padded_values) / 2 + 2 * kTilePositions;
  }

  void add_half(uint32_t weights, int64_t pair, uint32_t half, float* sums) const {
    for (int64_t d = 0; d < s_.padded_values; d += kLanes) {
      const uint32_t* word = values_ + (d / kPanelColumns * kTilePairs + pair) * kPanelColumns + d % kPanelColumns;
      store(sums + d, add_pair_products(load(sums + d), splat_int(weights & half), load_int(word) & splat_int(half)));
    }
  }

  // Transposes keys to panels [2][pairs of dims][32 positions]; absent keys are zero.
  void gather_keys(const TileRows<C>& rows, RowsAhead<C>& ahead) {
    const KVRow<C> nothing = KVRow<C>::zeros();
    for (int64_t first = 0; first < kTilePositions; first += kLanes) {
      KVRow<C> source[kLanes];
      for (int i = 0; i < kLanes; ++i) {
        ahead.ask(1);
        source[i] = rows.keys[first + i].values == nullptr ? nothing : rows.keys[first + i];
        key_factors_[first + i] = factor(source[i]) * scale_;
      }
      uint32_t* panel = keys_ + first / kPanelColumns * kPanelColumns * words_ + first % kPanelColumns;
      for (int64_t word = 0; word < words_; word += kLanes) {
        Vec square[kLanes];
        OCTAVO_UNROLL
        for (int i = 0; i < kLanes; ++i) square[i] = as_float(read_pairs(source[i], 2 * word, s_.dim - 2 * word));
        transpose(square);
        OCTAVO_UNROLL
        for (int i = 0; i < kLanes; ++i) store_int(panel + (word + i) * kPanelColumns, as_int(square[i]));
      }
    }
  }

  // Copies values to panels [value_dim / 32][pairs of positions][32]; absent values are zero.
  void gather_values(const TileRows<C>& rows, RowsAhead<C>& ahead) {
    for (int64_t pair = 0; pair < kTilePairs; ++pair) {
      ahead.ask(2);
      gather_pair(rows, pair);
    }
  }
  OCTAVO_INLINE void gather_pair(const TileRows<C>& rows, int64_t pair) {
    const KVRow<C> nothing = KVRow<C>::zeros();
    const int64_t i = 2 * pair;
    const KVRow<C> even = rows.values[i].values == nullptr ? nothing : rows.values[i];
    const KVRow<C> odd = rows.values[i + 1].values == nullptr ? nothing : rows.values[i + 1];
    value_factors_[i] = factor(even);
    value_factors_[i + 1] = factor(odd);
    uint32_t* out = values_ + pair * kPanelColumns;
    for (int64_t d = 0; d < s_.padded_values; d += kPanelColumns, out += kPanelColumns * kTilePairs) {
      IVec left, right;
      interleave_words(read_pairs(even, d, s_.value_dim - d), read_pairs(odd, d, s_.value_dim - d), left, right);
      store_int(out, left);
      store_int(out + kLanes, right);
    }
  }

  const AttentionShape& s_;
  const int64_t words_;       // of a row
  float* const memory_;       // [tiles][tile_size]
  uint32_t* const queries_;   // [max_rows][words_]
  uint32_t* keys_;            // of the selected tile: [2 panels][words_][32 positions]
  uint32_t* values_;          // likewise: [padded_values / 32][kTilePairs][32]
  float* key_factors_;        // likewise
  float* value_factors_;
  float scale_ = 1.0f;
};

#endif

}  // namespace octavo::OCTAVO_ISA
