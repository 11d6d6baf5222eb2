// A tile of keys and values in float32, gathered from KV of any type.
#pragma once

#include "attention_tile.h"
#include "math.h"

namespace octavo::OCTAVO_ISA {

constexpr PanelFunctions<1, static_cast<int>(kTilePositions)> kMultiplyWeights;
constexpr int64_t kScoreDepth = 128;  // longest chain of a score: scores of wider heads are sums of several chains

// Queries of type T, KV of type C. A score is a chain of multiply-adds over head_dim, or the sum of several chains of
// kScoreDepth. A sum of values is a chain over positions.
template <class T, class C>
class FloatKV {
 public:
  static constexpr int kRows = kTileRows;  // rows that are computed together
  static constexpr int64_t kMostTiles = 1;
  static constexpr int64_t kTogether = 1;  // positions of a step of the sum of values

  static int64_t size(const AttentionShape& s) {
    return kTilePositions * (s.padded_dim + s.padded_values) + s.max_rows * s.padded_dim;
  }

  FloatKV(const AttentionShape& s, float* memory)
      : s_(s),
        keys_(memory),
        values_(keys_ + kTilePositions * s.padded_dim),
        queries_(values_ + kTilePositions * s.padded_values) {}

  void pack_queries(const AttentionArgs& args, const AttentionTask& task) {
    const int64_t rows = task.tokens * s_.group;
    const Vec scale = splat(args.scale);
    for (int64_t row = 0; row < rows; ++row) {
      const int64_t block = row / kTileRows * kTileRows, width = smaller(int64_t{kTileRows}, rows - block);
      const T* q = query_row<T>(args, s_, task, row);
      float* out = queries_ + block * s_.dim + (row - block);
      for (int64_t i = 0; i < s_.dim; i += kLanes) {
        float values[kLanes];
        store(values, load_first(q + i, s_.dim - i) * scale);
        const int64_t lanes = smaller(int64_t{kLanes}, s_.dim - i);
        for (int64_t j = 0; j < lanes; ++j) out[(i + j) * width] = values[j];
      }
    }
  }

  static constexpr int64_t tiles_together() { return 1; }
  static void select(int64_t) {}

  // Gathers the tile, and prefetches the rows of the next one.
  void gather(const TileRows<C>& rows, const TileRows<C>& next) {
    gather_keys(rows, next);
    gather_values(rows, next);
  }

  // Scores of `rows` rows from `row` on: [rows][kTilePositions].
  void score(int64_t row, int64_t rows, float* scores) const {
    const auto multiply = kMultiplyPacked.of_rows[rows];
    for (int64_t p = 0; p < kTilePositions; p += kPanelColumns) {
      const float* queries = queries_ + row * s_.dim;
      const float* keys = keys_ + p * s_.padded_dim;
      float* out = scores + p;
      multiply(queries, keys, smaller(kScoreDepth, s_.dim), out, kTilePositions, Chain::kFresh, scores);
      for (int64_t d = kScoreDepth; d < s_.dim; d += kScoreDepth) {
        float more[kTileRows * kPanelColumns];
        multiply(queries + d * rows, keys + d * kPanelColumns, smaller(kScoreDepth, s_.dim - d), more, kPanelColumns,
                 Chain::kFresh, scores);
        for (int64_t r = 0; r < rows; ++r) {
          for (int64_t i = 0; i < kPanelColumns; i += kLanes) {
            float* sum = out + r * kTilePositions + i;
            store(sum, load(sum) + load(more + r * kPanelColumns + i));
          }
        }
      }
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

  static OCTAVO_INLINE void exponentiate(Vec (&x)[kTileVectors]) { exp(x); }

  // Stores the weights of a row in the layout of `add`.
  void store_weights(float* place, Vec (&weights)[kTileVectors]) const {
    OCTAVO_UNROLL
    for (int i = 0; i < kTileVectors; ++i) store(place + i * kLanes, weights[i]);
  }

  // sums += weights[begin .. end] x values, for `rows` rows.
  void add(const float* weights, int64_t rows, int64_t begin, int64_t end, float* sums) const {
    if (begin >= end) return;
    const int64_t stride = s_.sums_size;
    for (int64_t d = 0; d < s_.padded_values; d += kPanelColumns) {
      kMultiplyWeights.of_rows[rows](weights + begin, values_ + d * kTilePositions + begin * kPanelColumns, end - begin,
                                     sums + d, stride, Chain::kContinued, weights);
    }
  }

 private:
  // Transposes keys to [2][dim][32 positions]; absent keys are zero.
  void gather_keys(const TileRows<C>& rows, const TileRows<C>& next) {
    const KVRow<C> nothing = KVRow<C>::zeros();
    for (int64_t first = 0; first < kTilePositions; first += kLanes) {
      KVRow<C> source[kLanes];
      for (int i = 0; i < kLanes; ++i) {
        prefetch_row(next.keys[first + i], s_.dim);
        source[i] = rows.keys[first + i].values == nullptr ? nothing : rows.keys[first + i];
      }
      float* panel = keys_ + first / kPanelColumns * kPanelColumns * s_.padded_dim + first % kPanelColumns;
      for (int64_t d = 0; d < s_.dim; d += kLanes) {
        Vec square[kLanes];
        if (s_.dim - d >= kLanes) {
          OCTAVO_UNROLL
          for (int i = 0; i < kLanes; ++i) square[i] = source[i].read(d);
        } else {
          for (int i = 0; i < kLanes; ++i) square[i] = source[i].read_first(d, s_.dim - d);
        }
        transpose(square);
        OCTAVO_UNROLL
        for (int i = 0; i < kLanes; ++i) store(panel + (d + i) * kPanelColumns, square[i]);
      }
    }
  }

  // Copies values to panels [value_dim / 32][64 positions][32]. Absent values are not written and never multiplied.
  void gather_values(const TileRows<C>& rows, const TileRows<C>& next) {
    for (int64_t i = 0; i < kTilePositions; ++i) {
      prefetch_row(next.values[i], s_.value_dim);
      if (rows.values[i].values == nullptr) continue;
      float* out = values_ + i * kPanelColumns;
      for (int64_t d = 0; d < s_.padded_values; d += kLanes) {
        const Vec value = d < s_.value_dim ? rows.values[i].read_first(d, s_.value_dim - d) : splat(0.0f);
        store(out + d / kPanelColumns * kPanelColumns * kTilePositions + d % kPanelColumns, value);
      }
    }
  }

  const AttentionShape& s_;
  float* const keys_;     // [2 panels][padded to 16 dims][32 positions]
  float* const values_;   // [padded_values / 32][64][32]
  float* const queries_;  // per kTileRows rows: [dim][rows], scaled
};

}  // namespace octavo::OCTAVO_ISA
