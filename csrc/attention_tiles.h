// The same tile of keys and values as in attention_pairs.h, multiplied by tile registers (AMX), 32 rows of queries at a time.
//
// A step of the sum of values takes 32 positions for all rows: what a row may not see has the weight zero, which adds nothing
// to a sum but perhaps the sign of a zero, and what is no number is not multiplied with it (see add_rows). So a row has the
// same bits beside any others.
//
// Few rows, those of a decoded token, do not gather keys: 16 positions are the rows of a tile as they stand in a block of the
// cache, the queries its columns. The products of a score and their order are the same, and so are its bits.
#pragma once

#include "attention_pairs.h"
#if defined(OCTAVO_ISA_AMX)
#include "linear_tiles.h"
#endif

namespace octavo::OCTAVO_ISA {

#if defined(OCTAVO_ISA_AMX)

template <class C>
class TileKV : public PairKV<C> {
  using Base = PairKV<C>;
  using Base::key_factors_;
  using Base::keys_;
  using Base::kLowerHalf;
  using Base::kUpperHalf;
  using Base::queries_;
  using Base::s_;
  using Base::scale_;
  using Base::value_factors_;
  using Base::values_;
  using Base::words_;

 public:
  static constexpr int kRows = kTogether;

  static int64_t size(const AttentionShape& s) {
    return divide_up(Base::size(s), kLanes) * kLanes + kTilePositions * s.padded_dim / 2;
  }

  TileKV(const AttentionShape& s, float* memory)
      : Base(s, memory), seen_values_(reinterpret_cast<uint32_t*>(memory + divide_up(Base::size(s), kLanes) * kLanes)) {}

  void pack_queries(const AttentionArgs& args, const AttentionTask& task) {
    rows_ = task.tokens * s_.group;
    if (rows_ > kTileHeight) {
      Base::pack_queries(args, task);
    } else {
      scale_ = args.scale;
      reads_in_place_ = std::is_same_v<C, bf16> && args.block_size % kTileHeight == 0 && s_.dim == s_.padded_dim;
      pack_few_queries(args, task);
    }
  }

  void gather(const TileRows<C>& rows, const TileRows<C>& next) {
    if (rows_ > kTileHeight) {
      Base::gather(rows, next);
    } else {
      find_keys(rows, next);
      Base::gather_values(rows, next);
    }
    is_tested_ = false;
  }

  void score(int64_t row, int64_t rows, float* scores) {
    if (rows_ <= kTileHeight) {
      score_few(scores);
      return;
    }
    for (int64_t p = 0; p < kTilePositions; p += kPanelColumns) {
      multiply(queries_ + row * words_, words_, rows, keys_ + p * words_, words_ / kStepWords, true, scores + p, kTilePositions);
    }
  }

  OCTAVO_INLINE Vec finish_score(float* scores, int i) const {
    const Vec score = load(scores + i * kLanes) * load(key_factors_ + i * kLanes);
    store(scores + i * kLanes, score);
    return score;
  }

  // All rows at once, if each sees some of the tile, and the whole of it where not all values are finite. Otherwise rows that
  // see the same positions, the heads of a token; values that are not finite are then kept from those that see but a part.
  void add_rows(float* weights, int64_t rows, const SeenRange* seen, float* sums) {
    bool all_see_some = true, all_see_all = true;
    for (int64_t r = 0; r < rows; ++r) {
      all_see_some = all_see_some && !seen[r].empty();
      all_see_all = all_see_all && seen[r].whole();
    }
    if (all_see_all || (all_see_some && are_finite())) {
      add_values(weights, rows, values_, sums);
      return;
    }
    for (int64_t first = 0, count = 0; first < rows; first += count) {
      const SeenRange range = seen[first];
      count = 1;
      while (first + count < rows && seen[first + count].begin == range.begin && seen[first + count].end == range.end) ++count;
      if (range.empty()) continue;
      const bool hides = !range.whole() && !are_finite();
      if (hides) hide(range, weights + first * kTilePositions, count);
      add_values(weights + first * kTilePositions, count, hides ? seen_values_ : values_, sums + first * s_.sums_size);
    }
  }

 private:
  static constexpr uint64_t kWholeTiles = uint64_t{kTileHeight} * 0x0101'0101'0101'0101u;

  // sums += rows of words from x on, `stride` words from one to the next, times a panel of 32 columns.
  void multiply(const void* x, int64_t stride, int64_t rows, const uint32_t* panel, int64_t steps, bool fresh, float* sums,
                int64_t sums_stride) {
    const int64_t upper = smaller(rows, int64_t{kTileHeight});
    const RowsOfTiles tiles{nullptr, 0, 4 * stride * kTileHeight, 4 * stride, kTileStep};
    tiles_.hold(heights_of_pair(upper, rows - upper));
    const auto multiply = rows > kTileHeight ? multiply_steps<PairTiles, 2, Asking> : multiply_steps<PairTiles, 1, Asking>;
    multiply(tiles, static_cast<const char*>(x), reinterpret_cast<const char*>(panel), steps, nullptr, fresh,
             {Ahead(nullptr), 0}, sums, sums_stride);
  }

  void add_values(const float* weights, int64_t rows, const uint32_t* values, float* sums) {
    for (int64_t d = 0; d < s_.padded_dim; d += kPanelColumns) {
      multiply(weights, kTilePositions, rows, values + d * kTilePairs, kTilePairs / kStepWords, false, sums + d, s_.sums_size);
    }
  }

  // As [words_][16 rows]; absent ones are zero.
  void pack_few_queries(const AttentionArgs& args, const AttentionTask& task) {
    KVRow<bf16> source[kLanes];
    for (int64_t row = 0; row < kLanes; ++row) {
      source[row] = row < rows_ ? KVRow<bf16>{query_row<bf16>(args, s_, task, row)} : KVRow<bf16>::zeros();
    }
    for (int64_t word = 0; word < words_; word += kLanes) {
      Vec square[kLanes];
      for (int i = 0; i < kLanes; ++i) square[i] = as_float(read_pairs(source[i], 2 * word, s_.dim - 2 * word));
      transpose(square);
      for (int i = 0; i < kLanes; ++i) store_int(queries_ + (word + i) * kLanes, as_int(square[i]));
    }
  }

  // Squares of 16 positions: where they stand, if all of them are there, else copied. Absent ones are zero.
  void find_keys(const TileRows<C>& rows, const TileRows<C>& next) {
    const KVRow<C> nothing = KVRow<C>::zeros();
    for (int64_t first = 0; first < kTilePositions; first += kTileHeight) {
      const KVRow<C>* source = rows.keys + first;
      for (int64_t i = 0; i < kTileHeight; ++i) prefetch_row(next.keys[first + i], s_.dim);
      for (int64_t i = 0; i < kTileHeight; ++i) {
        key_factors_[first + i] = factor(source[i].values == nullptr ? nothing : source[i]) * scale_;
      }
      const void*& square = squares_[first / kTileHeight];
      const bool is_there = source[0].values != nullptr && source[kTileHeight - 1].values != nullptr;
      square = reads_in_place_ && is_there ? static_cast<const void*>(source[0].values) : keys_ + first * words_;
      if (reads_in_place_ && is_there) continue;
      for (int64_t i = 0; i < kTileHeight; ++i) {
        const KVRow<C>& row = source[i].values == nullptr ? nothing : source[i];
        for (int64_t word = 0; word < words_; word += kLanes) {
          store_int(keys_ + (first + i) * words_ + word, read_pairs(row, 2 * word, s_.dim - 2 * word));
        }
      }
    }
  }

  void score_few(float* scores) {
    alignas(64) float sums[kTilePositions][kLanes];
    tiles_.hold(kWholeTiles);
    clear_tile<0>();
    clear_tile<1>();
    clear_tile<2>();
    clear_tile<3>();
    for (int64_t word = 0; word < words_; word += kStepWords) {
      load_tile<4>(queries_ + word * kLanes, kTileStep);
      add_square<0>(word);
      add_square<1>(word);
      add_square<2>(word);
      add_square<3>(word);
    }
    store_tile<0>(sums[0], kTileStep);
    store_tile<1>(sums[kTileHeight], kTileStep);
    store_tile<2>(sums[2 * kTileHeight], kTileStep);
    store_tile<3>(sums[3 * kTileHeight], kTileStep);
    for (int64_t p = 0; p < kTilePositions; p += kLanes) {
      Vec square[kLanes];
      OCTAVO_UNROLL
      for (int i = 0; i < kLanes; ++i) square[i] = load(sums[p + i]);
      transpose(square);
      for (int64_t r = 0; r < rows_; ++r) store(scores + r * kTilePositions + p, square[r]);
    }
  }
  template <int kSquare>
  OCTAVO_INLINE void add_square(int64_t word) {
    load_tile<5>(static_cast<const uint32_t*>(squares_[kSquare]) + word, 4 * words_);
    add_pair_tiles<kSquare, 5, 4>();
  }

  // Whether no value of the tile is infinite or no number, nor the scale of one. Found out where a row sees but a part.
  bool are_finite() {
    if (!is_tested_) are_finite_ = find_out_if_finite();
    is_tested_ = true;
    return are_finite_;
  }
  bool find_out_if_finite() const {
    IVec upper = splat_int(0), lower = splat_int(0);
    for (int64_t i = 0; i < kTilePairs * s_.padded_dim; i += kLanes) {
      const IVec pair = load_int(values_ + i);
      upper = max_signed(upper, pair & splat_int(0x7F800000u));
      lower = max_signed(lower, pair & splat_int(0x00007F80u));
    }
    for (int64_t i = 0; i < kTilePositions; i += kLanes) {
      upper = max_signed(upper, as_int(load(value_factors_ + i)) & splat_int(0x7F800000u));
    }
    uint32_t uppers[kLanes], lowers[kLanes];
    store_int(uppers, upper);
    store_int(lowers, lower);
    bool finite = true;
    for (int i = 0; i < kLanes; ++i) finite = finite && uppers[i] != 0x7F800000u && lowers[i] != 0x00007F80u;
    return finite;
  }

  // Leaves nothing but zeros outside of a range: of the weights, where they stand, and of the values, in a copy.
  void hide(const SeenRange& range, float* weights, int64_t rows) {
    for (int64_t pair = 0; pair < kTilePairs; ++pair) {
      const uint32_t mask = (is_in(range, 2 * pair) ? kLowerHalf : 0u) | (is_in(range, 2 * pair + 1) ? kUpperHalf : 0u);
      for (int64_t r = 0; r < rows; ++r) reinterpret_cast<uint32_t*>(weights + r * kTilePositions)[pair] &= mask;
      for (int64_t d = 0; d < s_.padded_dim; d += kLanes) {
        const int64_t place = (d / kPanelColumns * kTilePairs + pair) * kPanelColumns + d % kPanelColumns;
        store_int(seen_values_ + place, load_int(values_ + place) & splat_int(mask));
      }
    }
  }
  static bool is_in(const SeenRange& range, int64_t position) { return position >= range.begin && position < range.end; }

  uint32_t* const seen_values_;  // [padded_dim / 32][kTilePairs][32]
  int64_t rows_ = 0;  // of the task
  bool reads_in_place_ = false;
  const void* squares_[kTilePositions / kTileHeight];
  bool is_tested_ = false, are_finite_ = true;
  Tiles tiles_;
};

#endif

}  // namespace octavo::OCTAVO_ISA
