// The tile of keys and values of attention_pairs.h, multiplied by tile registers (AMX), 32 rows of queries at a time.
//
// A step of the sum of values takes 32 positions for all rows. A position that a row does not see has the weight zero, which
// changes at most the sign of a zero sum. Values that are not finite are never multiplied by it (see add_rows). So a row has the
// same bits with any other rows.
//
// Many rows go through kMostTiles tiles of keys and values in three phases: the scores of all rows, their weights, their sums of
// values (attend_whole_tiles). Vectors are slower while the processor's unit for tiles is switched on. It is switched off after
// about 850 cycles without use, and needs about 700 cycles to start again. So the phases must be long.
//
// Few rows, as those of a decoded token, do not gather keys: 16 positions in a block of the cache are the rows of one tile in
// place, and queries are the columns of another tile. The products of a score and their order are the same, so its bits are, too.
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
  static constexpr int64_t kMostTiles = 2;

  static int64_t size(const AttentionShape& s) { return Base::size(s, kMostTiles) + kTilePositions * s.padded_values / 2; }

  TileKV(const AttentionShape& s, float* memory)
      : Base(s, memory, kMostTiles), seen_values_(reinterpret_cast<uint32_t*>(memory + Base::size(s, kMostTiles))) {}

  // How many tiles are gathered before their scores are computed.
  int64_t tiles_together() const { return are_few() ? 1 : kMostTiles; }

  OCTAVO_INLINE void select(int64_t t) {
    Base::select(t);
    is_tested_ = false;
  }

  void pack_queries(const AttentionArgs& args, const AttentionTask& task) {
    rows_ = task.tokens * s_.group;
    if (are_few()) {
      scale_ = args.scale;
      reads_in_place_ = std::is_same_v<C, bf16> && args.block_size % kTileHeight == 0 && s_.dim == s_.padded_dim;
      pairs_of_step_ = divide_up(kTilePairs, kSquares * (words_ / kStepWords));
      pack_few_queries(args, task);
    } else {
      Base::pack_queries(args, task);
    }
  }

  void gather(const TileRows<C>& rows, const TileRows<C>& next) {
    if (are_few()) {
      ahead_ = RowsAhead<C>(next, s_.dim);
      ahead_.begin();
      find_keys(rows);
      multiply_keys_and_gather_values(rows);
    } else {
      Base::gather(rows, next);
    }
    is_tested_ = false;
  }

  void score(int64_t row, int64_t rows, float* scores) {
    if (are_few()) {
      transpose_scores(scores);
      return;
    }
    for (int64_t p = 0; p < kTilePositions; p += kPanelColumns) {
      multiply({queries_ + row * words_, words_, keys_ + p * words_, words_ / kStepWords}, rows, true, scores + p, kTilePositions);
    }
  }
  bool are_few() const { return rows_ <= kTileHeight; }

  // Scores of int8 keys have a factor for each key; scores of bfloat16 keys have one factor in all, which is applied later.
  OCTAVO_INLINE Vec finish_score(float* scores, int i) const {
    Vec score = load(scores + i * kLanes);
    if constexpr (std::is_same_v<C, int8_t>) {
      score = score * load(key_factors_ + i * kLanes);
      store(scores + i * kLanes, score);
    }
    return score;
  }
  OCTAVO_INLINE float scaled(float score) const { return std::is_same_v<C, int8_t> ? score : score * scale_; }
  OCTAVO_INLINE Vec scaled(Vec scores) const { return std::is_same_v<C, int8_t> ? scores : scores * splat(scale_); }
  OCTAVO_INLINE Vec distance(Vec score, Vec maximum) const {
    return std::is_same_v<C, int8_t> ? score - maximum : fma(score, splat(scale_), splat(0.0f) - maximum);
  }

  void add_all(float* weights, int64_t rows, float* sums) { add_values(weights, rows, values_, sums); }

  // The same for the tiles first .. last - 1. weights: those of tile t begin at t * stride.
  void add_tiles(const float* weights, int64_t stride, int64_t first, int64_t last, int64_t rows, float* sums) {
    select(first);
    add_values(weights + first * stride, rows, values_, sums, last - first, stride);
  }

  // Adds the values for all rows together if every row sees a part of the tile, or, with values that are not finite, all of it.
  // Otherwise rows that see the same positions (the heads of a token) are computed together; values that are not finite are
  // replaced by zeros for rows that do not see the whole tile.
  void add_rows(float* weights, int64_t rows, const SeenRange* seen, float* sums) {
    bool all_see_some = true, all_see_all = true;
    for (int64_t r = 0; r < rows; ++r) {
      all_see_some = all_see_some && !seen[r].empty();
      all_see_all = all_see_all && seen[r].whole();
    }
    if (all_see_all || (all_see_some && are_finite())) {
      add_all(weights, rows, sums);
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
  static constexpr int64_t kSquares = kTilePositions / kTileHeight;  // of 16 positions times 16 rows
  // For few rows: rows of the next tile that are prefetched with each pair of values, each square of scores, and all sums.
  static constexpr int64_t kAskedOfPair = 3, kAskedOfSquare = 4, kAskedOfSums = 16;
  static_assert(kTilePairs * kAskedOfPair + kSquares * kAskedOfSquare + kAskedOfSums == 2 * kTilePositions);

  // Rows of pairs and a panel of 32 columns, of one or several tiles of positions.
  struct Factors {
    const void* rows;
    int64_t row_words;  // from one row to the next
    const uint32_t* panel;
    int64_t steps;      // of kStepWords words, in each tile
    int64_t tiles = 1, next_rows = 0, next_panel = 0;  // words from one tile's rows, or panel, to those of the next tile
  };

  // sums += rows times panel; or = if fresh.
  OCTAVO_INLINE void multiply(const Factors& factors, int64_t rows, bool fresh, float* sums, int64_t sums_stride) {
    const int64_t upper = smaller(rows, int64_t{kTileHeight});
    tiles_.hold(heights_of_pair(upper, rows > kTileHeight ? rows - upper : kTileHeight));
    if (rows > kTileHeight) {
      multiply_tiles<2>(factors, fresh, sums, 4 * sums_stride);
    } else {
      multiply_tiles<1>(factors, fresh, sums, 4 * sums_stride);
    }
  }
  template <int kHeight>
  static OCTAVO_INLINE void multiply_tiles(const Factors& factors, bool fresh, float* sums, int64_t sum_bytes) {
    const int64_t row_bytes = 4 * factors.row_words;
    float* lower = sums + kTileHeight * (sum_bytes / 4);
    if (fresh) {
      clear_tile<0>();
      clear_tile<1>();
      if (kHeight == 2) clear_tile<2>();
      if (kHeight == 2) clear_tile<3>();
    } else {
      load_tile<0>(sums, sum_bytes);
      load_tile<1>(sums + kTileHeight, sum_bytes);
      if (kHeight == 2) load_tile<2>(lower, sum_bytes);
      if (kHeight == 2) load_tile<3>(lower + kTileHeight, sum_bytes);
    }
    for (int64_t t = 0; t < factors.tiles; ++t) {
      const auto* x = static_cast<const char*>(factors.rows) + 4 * t * factors.next_rows;
      const auto* w = reinterpret_cast<const char*>(factors.panel + t * factors.next_panel);
      for (int64_t step = 0; step < factors.steps; ++step, x += kTileStep, w += 2 * kTileBytes) {
        load_tile<6>(w, 2 * kTileStep);
        load_tile<4>(x, row_bytes);
        add_pair_tiles<0, 4, 6>();
        load_tile<7>(w + kTileStep, 2 * kTileStep);
        add_pair_tiles<1, 4, 7>();
        if (kHeight == 2) {
          load_tile<5>(x + kTileHeight * row_bytes, row_bytes);
          add_pair_tiles<2, 5, 6>();
          add_pair_tiles<3, 5, 7>();
        }
      }
    }
    store_tile<0>(sums, sum_bytes);
    store_tile<1>(sums + kTileHeight, sum_bytes);
    if (kHeight == 2) store_tile<2>(lower, sum_bytes);
    if (kHeight == 2) store_tile<3>(lower + kTileHeight, sum_bytes);
  }

  // tiles, stride: for several tiles, see add_tiles.
  OCTAVO_INLINE void add_values(const float* weights, int64_t rows, const uint32_t* values, float* sums, int64_t tiles = 1,
                                int64_t stride = 0) {
    for (int64_t d = 0; d < s_.padded_values; d += kPanelColumns) {
      if (are_few()) ahead_.ask(divide_up(kAskedOfSums * kPanelColumns, s_.padded_values));
      const Factors factors{weights, kTilePositions, values + d * kTilePairs, kTilePairs / kStepWords,
                            tiles, stride, Base::tile_size(s_)};
      multiply(factors, rows, false, sums + d, s_.sums_size);
    }
  }

  // Stores queries as [words_][16 rows] in the memory of many rows; absent rows are zero.
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

  // Sixteen keys are multiplied in place if all of them are present; otherwise they are copied, because the memory of absent
  // keys may hold anything. Absent keys are zero in the copy.
  void find_keys(const TileRows<C>& rows) {
    const KVRow<C> nothing = KVRow<C>::zeros();
    for (int64_t first = 0; first < kTilePositions; first += kTileHeight) {
      KVRow<C> source[kTileHeight];
      bool is_whole = true;
      for (int i = 0; i < kTileHeight; ++i) {
        const bool is_there = rows.keys[first + i].values != nullptr;
        source[i] = is_there ? rows.keys[first + i] : nothing;
        is_whole = is_whole && is_there;
        key_factors_[first + i] = factor(source[i]) * scale_;
      }
      const void*& square = squares_[first / kTileHeight];
      square = source[0].values;
      if (reads_in_place_ && is_whole) continue;
      uint32_t* copy = keys_ + first * words_;
      square = copy;
      for (int64_t i = 0; i < kTileHeight; ++i, copy += words_) {
        for (int64_t word = 0; word < words_; word += kLanes) {
          store_int(copy + word, read_pairs(source[i], 2 * word, s_.dim - 2 * word));
        }
      }
    }
  }

  // Computes scores as [positions][16 rows]. Gathers pairs of values between the products, which wait for each other.
  void multiply_keys_and_gather_values(const TileRows<C>& rows) {
    int64_t pair = 0;
    tiles_.hold(heights_of_pair(rows_, kTileHeight));  // the same shapes as for the sums of values
    for (int64_t square = 0; square < kSquares; square += 2) {
      const auto *left = static_cast<const char*>(squares_[square]), *right = static_cast<const char*>(squares_[square + 1]);
      clear_tile<2>();
      clear_tile<3>();
      for (int64_t word = 0; word < words_; word += kStepWords, left += kTileStep, right += kTileStep) {
        load_tile<6>(queries_ + word * kLanes, kTileStep);
        load_tile<5>(left, 4 * words_);
        add_pair_tiles<2, 5, 6>();
        gather_pairs_of_step(rows, pair);
        load_tile<7>(right, 4 * words_);
        add_pair_tiles<3, 7, 6>();
        gather_pairs_of_step(rows, pair);
      }
      store_tile<2>(few_scores_[square * kTileHeight], kTileStep);
      store_tile<3>(few_scores_[(square + 1) * kTileHeight], kTileStep);
    }
  }
  OCTAVO_INLINE void gather_pairs_of_step(const TileRows<C>& rows, int64_t& pair) {
    for (const int64_t end = smaller(pair + pairs_of_step_, kTilePairs); pair < end; ++pair) {
      ahead_.ask(kAskedOfPair);
      Base::gather_pair(rows, pair);
    }
  }

  void transpose_scores(float* scores) {
    for (int64_t p = 0; p < kTilePositions; p += kLanes) {
      ahead_.ask(kAskedOfSquare);
      Vec square[kLanes];
      OCTAVO_UNROLL
      for (int i = 0; i < kLanes; ++i) square[i] = load(few_scores_[p + i]);
      transpose(square);
      for (int64_t r = 0; r < rows_; ++r) store(scores + r * kTilePositions + p, square[r]);
    }
  }

  // Whether all values of the tile and their scales are finite. Tested only if a row does not see the whole tile.
  bool are_finite() {
    if (!is_tested_) are_finite_ = find_out_if_finite();
    is_tested_ = true;
    return are_finite_;
  }
  bool find_out_if_finite() const {
    IVec upper = splat_int(0), lower = splat_int(0);
    for (int64_t i = 0; i < kTilePairs * s_.padded_values; i += kLanes) {
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

  // Replaces positions outside of a range by zeros: weights in place, values in a copy.
  void hide(const SeenRange& range, float* weights, int64_t rows) {
    for (int64_t pair = 0; pair < kTilePairs; ++pair) {
      const uint32_t mask = (is_in(range, 2 * pair) ? kLowerHalf : 0u) | (is_in(range, 2 * pair + 1) ? kUpperHalf : 0u);
      for (int64_t r = 0; r < rows; ++r) reinterpret_cast<uint32_t*>(weights + r * kTilePositions)[pair] &= mask;
      for (int64_t d = 0; d < s_.padded_values; d += kLanes) {
        const int64_t place = (d / kPanelColumns * kTilePairs + pair) * kPanelColumns + d % kPanelColumns;
        store_int(seen_values_ + place, load_int(values_ + place) & splat_int(mask));
      }
    }
  }
  static bool is_in(const SeenRange& range, int64_t position) { return position >= range.begin && position < range.end; }

  uint32_t* const seen_values_;  // [padded_values / 32][kTilePairs][32]
  bool is_tested_ = false, are_finite_ = true;
  Tiles tiles_;

  int64_t rows_ = 0;  // of the task; the members below are for few rows
  bool reads_in_place_ = false;
  int64_t pairs_of_step_ = 0;
  RowsAhead<C> ahead_;
  const void* squares_[kSquares];  // of keys: 16 rows of words_
  alignas(64) float few_scores_[kTilePositions][kLanes];
};

#endif

}  // namespace octavo::OCTAVO_ISA
