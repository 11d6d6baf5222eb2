// Computes softmax weights from the scores of a tile, with the running maximum of each row, and rescales the row's sums.
#pragma once

#include "attention_tile.h"
#include "math.h"

namespace octavo::OCTAVO_ISA {

constexpr float kMinusInfinity = -__builtin_inff();
// A row's maximum may be this much below its largest score: sums are rescaled only if a score exceeds the maximum by more. So
// no weight is larger than e^8, and sums are seldom rescaled (as in FlashAttention-4).
constexpr float kLeastRise = 8.0f;

// Which lanes of the tile's vectors a row sees.
OCTAVO_INLINE void seen_lanes(const SeenRange& range, Mask (&seen)[kTileVectors]) {
  const Vec begin = splat(static_cast<float>(range.begin)), end = splat(static_cast<float>(range.end));
  OCTAVO_UNROLL
  for (int i = 0; i < kTileVectors; ++i) {
    const Vec position = to_float(lane_numbers()) + splat(static_cast<float>(i * kLanes));
    seen[i] = both(less_equal(begin, position), less(position, end));
  }
}

// Returns the running maximum after the scores that a row sees; scores that it does not see become -inf.
template <bool kAll, class Tile>
OCTAVO_INLINE float mask_and_find_maximum(const Tile& tile, const SeenRange& range, float* scores, float maximum) {
  Vec score[kTileVectors];
  OCTAVO_UNROLL
  for (int i = 0; i < kTileVectors; ++i) score[i] = tile.finish_score(scores, i);
  if (!kAll && !range.whole()) {
    Mask seen[kTileVectors];
    seen_lanes(range, seen);
    OCTAVO_UNROLL
    for (int i = 0; i < kTileVectors; ++i) {
      score[i] = select(seen[i], score[i], splat(kMinusInfinity));
      store(scores + i * kLanes, score[i]);
    }
  }
  const Vec largest = max(max(score[0], score[1]), max(score[2], score[3]));
  const float limit = maximum + kLeastRise;
  if (bits(less(splat(limit), tile.scaled(largest))) == 0) return maximum;  // nearly always
  const float found = tile.scaled(max_lanes(largest));
  return found > limit ? found : maximum;
}

// Turns scores into the softmax weights of a tile, e^(score - maximum), and returns their sums, lane by lane. e^-inf is 0.
template <class Tile>
OCTAVO_INLINE Vec weigh(const Tile& tile, float* scores, float maximum) {
  Vec weight[kTileVectors];
  OCTAVO_UNROLL
  for (int i = 0; i < kTileVectors; ++i) weight[i] = tile.distance(load(scores + i * kLanes), splat(maximum));
  Tile::exponentiate(weight);
  const Vec sum = (weight[0] + weight[1]) + (weight[2] + weight[3]);
  tile.store_weights(scores, weight);
  return sum;
}

// Rescales the sums of rows whose maximum has risen, and stores the new maximum. before, maximum: [rows], padded to whole vectors.
inline void rescale_rows(const AttentionShape& s, int64_t rows, const float* before, const float* maximum, float* sums) {
  for (int64_t first = 0; first < rows; first += kLanes) {
    float factor[kLanes];
    store(factor, exp(load(before + first) - load(maximum + first)));
    for (int64_t r = first; r < smaller(rows, first + kLanes); ++r) {
      if (maximum[r] == before[r]) continue;
      float* row = sums + r * s.sums_size;
      for (int64_t d = 0; d < s.num_sums; d += kLanes) store(row + d, load(row + d) * splat(factor[r - first]));
      row[s.num_sums] = maximum[r];
    }
  }
}

// Turns scores of up to Tile::kRows rows into weights, and rescales the sums to the running maximum. Calls before_rescaling() first
// if any sums are rescaled. Each stage is a short loop, so that the rows' chains overlap. kAll: every row sees the whole tile, and
// `seen` is not read.
template <bool kAll, class Tile, class F>
void weigh_rows(const AttentionShape& s, const Tile& tile, int64_t rows, const SeenRange* seen, float* scores, float* sums,
                const F& before_rescaling) {
  const int64_t stride = s.sums_size;
  constexpr int kPlaces = (Tile::kRows + kLanes - 1) / kLanes * kLanes;
  float before[kPlaces] = {}, maximum[kPlaces] = {};
  bool rises = false;
  for (int64_t r = 0; r < rows; ++r) {
    if (!kAll && seen[r].empty()) continue;
    before[r] = sums[r * stride + s.num_sums];
    maximum[r] = mask_and_find_maximum<kAll>(tile, seen[kAll ? 0 : r], scores + r * kTilePositions, before[r]);
    rises = rises || maximum[r] != before[r];
  }
  if (rises) {
    before_rescaling();
    rescale_rows(s, rows, before, maximum, sums);
  }
  for (int64_t r = 0; r < rows; ++r) {
    if (!kAll && seen[r].empty()) continue;
    float* sum = sums + r * stride + s.padded_values;
    store(sum, load(sum) + weigh(tile, scores + r * kTilePositions, maximum[r]));
  }
}

// A tile that applies the soft cap to its scores in finish_score.
template <class Tile>
class CappedScores {
 public:
  static constexpr int kRows = Tile::kRows;

  CappedScores(const Tile& tile, float cap) : tile_(tile), cap_(cap) {}

  OCTAVO_INLINE Vec finish_score(float* scores, int i) const {
    const Vec score = soft_cap(tile_.scaled(tile_.finish_score(scores, i)), splat(cap_));
    store(scores + i * kLanes, score);
    return score;
  }
  template <class Score>
  static OCTAVO_INLINE Score scaled(Score score) {
    return score;
  }
  static OCTAVO_INLINE Vec distance(Vec score, Vec maximum) { return score - maximum; }
  static OCTAVO_INLINE void exponentiate(Vec (&x)[kTileVectors]) { Tile::exponentiate(x); }
  OCTAVO_INLINE void store_weights(float* place, Vec (&weights)[kTileVectors]) const { tile_.store_weights(place, weights); }

 private:
  const Tile& tile_;
  const float cap_;
};

// weigh_rows, with the soft cap of the model if it has one.
template <bool kAll, class Tile, class F>
void weigh_scores(const AttentionArgs& args, const AttentionShape& s, const Tile& tile, int64_t rows, const SeenRange* seen,
                  float* scores, float* sums, const F& before_rescaling) {
  if (args.softcap > 0.0f) {
    weigh_rows<kAll>(s, CappedScores<Tile>(tile, args.softcap), rows, seen, scores, sums, before_rescaling);
  } else {
    weigh_rows<kAll>(s, tile, rows, seen, scores, sums, before_rescaling);
  }
}

}  // namespace octavo::OCTAVO_ISA
