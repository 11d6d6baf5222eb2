// Activations for products of integers: rows of signed bytes with one float32 scale each, which the product computes.
//
// For an int8 weight, rows are rotated first (rotation.h). For an int4 weight, columns may have to be put into the weight's order.
// A row's scale is its largest magnitude / 127, and its values are rounded to the nearest multiple, ties to even. A row with a NaN
// or an infinity gets the scale NaN, so its products are NaN.
#pragma once

#include <cmath>

#include "panel_tasks.h"
#include "rotation.h"

namespace octavo::OCTAVO_ISA {

constexpr float kNaN = __builtin_nanf("");
constexpr float kLeastMagnitude = 1e-30f;     // a row whose values are all smaller is zero
constexpr int64_t kBlockBytes = 1024 * 1024;  // of rows that are multiplied together: they stay in L2 or L3

// The layout of rows that a product needs.
struct ByteLayout {
  int64_t words;   // of four k each, in a row; bytes after the last k are zero
  uint32_t offset; // added to every byte: 0 or 128
  int64_t group;   // consecutive k whose bytes are summed up, without the offset; a multiple of kLanes, or 0: no sums
  int64_t groups;  // sums of a row
  int32_t factor;  // of the sums
  bool rotated;    // rows are rotated before they are rounded
};

// A tile of rows in the layout of a product.
struct ByteTile {
  uint8_t* bytes;  // [words][rows][4]
  float* scales;   // [rows]
  int32_t* sums;   // [groups][rows]
  int64_t first;   // row of x
};

// The largest magnitude of a row; infinite or NaN if any of its values is. As integers, magnitudes compare like floats, and NaN
// is the largest.
template <class X>
float largest_magnitude(const X* row, int64_t k) {
  IVec largest = splat_int(0);
  for (int64_t i = 0; i < k; i += kLanes) {
    largest = max_signed(largest, as_int(load_first(row + i, k - i)) & splat_int(0x7FFFFFFFu));
  }
  uint32_t lanes[kLanes], most = 0;
  store_int(lanes, largest);
  for (const uint32_t lane : lanes) most = larger(most, lane);
  float result;
  std::memcpy(&result, &most, sizeof(result));
  return result;
}

template <class X>
bool is_finite(const X* row, int64_t k) {
  return std::isfinite(largest_magnitude(row, k));
}

// A row's values are approximately its integers times `scale`; `inverse` is 0 if all integers become zero.
struct RowScale {
  float scale;
  float inverse;
  bool is_finite;
};

template <class X>
RowScale row_scale(const X* row, int64_t k) {
  const float magnitude = largest_magnitude(row, k);
  if (!std::isfinite(magnitude)) return {kNaN, 0.0f, false};
  return {magnitude / 127.0f, magnitude >= kLeastMagnitude ? 127.0f / magnitude : 0.0f, true};
}

OCTAVO_INLINE int32_t sum_of_lanes(IVec a) {
  int32_t lanes[kLanes], sum = 0;
  store_int(lanes, a);
  for (const int32_t lane : lanes) sum += lane;
  return sum;
}

// The sums of a row's groups, whose values are added kLanes at a time.
class GroupSums {
 public:
  GroupSums() = default;
  // place: the row's first sum; `stride`: the distance to the next one.
  GroupSums(const ByteLayout& layout, int32_t* place, int64_t stride)
      : place_(place), stride_(stride), group_(layout.group), left_(layout.group), factor_(layout.factor) {}

  // is_last: no values follow.
  OCTAVO_INLINE void add(IVec values, bool is_last) {
    sum_ = sum_ + values;
    left_ -= kLanes;
    if (left_ > 0 && !is_last) return;
    *place_ = sum_of_lanes(sum_) * factor_;
    place_ += stride_;
    left_ = group_;
    sum_ = splat_int(0);
  }

 private:
  IVec sum_ = splat_int(0);
  int32_t* place_ = nullptr;
  int64_t stride_ = 0, group_ = 0, left_ = 0;
  int32_t factor_ = 0;
};

// Rounds `m` rows of k values, `stride` apart, to bytes by their inverse scales. Transposes sixteen words of all rows at a time.
template <class X>
void round_rows(const X* rows, int64_t stride, int64_t k, const ByteLayout& layout, const float* inverse, int64_t m,
                const ByteTile& tile) {
  constexpr int64_t kTogether = 4 * kLanes;
  const int64_t values = layout.words * 4;
  GroupSums sums[kLanes];
  for (int64_t r = 0; r < m; ++r) sums[r] = GroupSums(layout, tile.sums + r, m);
  const IVec offset = splat_int(layout.offset * 0x01010101u);
  for (int64_t i = 0; i < values; i += kTogether) {
    Vec words[kLanes];
    for (int64_t r = 0; r < m; ++r) {
      const X* row = rows + r * stride;
      IVec parts[4];
      OCTAVO_UNROLL
      for (int j = 0; j < 4; ++j) {
        const int64_t first = i + j * kLanes;
        parts[j] = to_int(load_first(row + first, larger(int64_t{0}, k - first)) * splat(inverse[r]));
        if (layout.group != 0 && first < values) sums[r].add(parts[j], first + kLanes >= values);
      }
      words[r] = as_float(pack_bytes(parts) ^ offset);  // adds 128 or 0 to a byte of -127 .. 127
    }
    turn_rows(words, m, layout.words - i / 4, reinterpret_cast<float*>(tile.bytes + i * m));
  }
}

// Copies the columns of a row in the order of a weight, as float32; out: whole vectors.
template <class X>
void take_columns(const X* row, const int32_t* order, int64_t k, float* out) {
  for (int64_t i = 0; i < k; i += kLanes) {
    X some[kLanes] = {};
    for (int64_t j = 0; j < smaller(int64_t{kLanes}, k - i); ++j) some[j] = row[order[i + j]];
    store(out + i, load(some));
  }
}

// Whether rows are rewritten before they are rounded: rotated, or in another order of columns.
inline bool makes_rows(const LinearArgs& args, bool rotated) { return rotated || args.order != nullptr; }

template <class X>
void make_row(const LinearArgs& args, bool rotated, const X* row, float* out) {
  if (rotated) {
    rotate_row(row, args.k, out);
  } else {
    take_columns(row, args.order, args.k, out);
  }
}

// Quantizes `m` rows, at most sixteen, from row tile.first on. made: memory for m rows of whole vectors if rows are rewritten.
template <class X>
void quantize_rows_of(const LinearArgs& args, const ByteLayout& layout, int64_t m, const ByteTile& tile, float* made) {
  const X* const rows = static_cast<const X*>(args.x) + tile.first * args.x_stride;
  const int64_t made_stride = whole_vectors(args.k);
  const bool are_made = makes_rows(args, layout.rotated);
  float inverse[kLanes];
  for (int64_t r = 0; r < m; ++r) {
    const X* row = rows + r * args.x_stride;
    if (are_made) make_row(args, layout.rotated, row, made + r * made_stride);
    const RowScale found = are_made ? row_scale(made + r * made_stride, args.k) : row_scale(row, args.k);
    tile.scales[r] = found.scale;
    inverse[r] = found.inverse;
  }
  if (are_made) {
    round_rows(made, made_stride, args.k, layout, inverse, m, tile);
  } else {
    round_rows(rows, args.x_stride, args.k, layout, inverse, m, tile);
  }
}

inline void quantize_rows(const LinearArgs& args, const ByteLayout& layout, int64_t m, const ByteTile& tile, float* made) {
  if (args.x_dtype == DType::kFloat32) {
    quantize_rows_of<float>(args, layout, m, tile, made);
  } else {
    quantize_rows_of<bf16>(args, layout, m, tile, made);
  }
}

// Weight::multiply<M> for 1 .. Weight::kRows rows.
template <class Weight>
struct TileFunctions {
  using Function = void (*)(const LinearArgs&, const Weight&, const ByteTile&, int64_t first, int64_t count, Place, Ahead);
  Function of_rows[Weight::kRows + 1];
  constexpr TileFunctions() : TileFunctions(std::make_integer_sequence<int, Weight::kRows>()) {}
  template <int... I>
  constexpr explicit TileFunctions(std::integer_sequence<int, I...>)
      : of_rows{nullptr, Weight::template multiply<I + 1>...} {}
};

// The product with a weight of integers, in blocks of rows that stay in cache, each of tiles of nearly equal height.
//
// A Weight has these members:
//   kRows                      rows of the tallest tile
//   group_panels(rows)         panels that a tile of `rows` rows takes together
//   layout()                   the layout of rows that it needs
//   panels, panel_bytes        its memory
//   panel_steps(rows, tiles)   how often each of `tiles` tiles of `rows` rows prefetches memory ahead
//   multiply<M>(args, weight, tile, first, count, out, ahead)
//                              multiplies panels first .. first + count by a tile of M rows and writes to `out`
template <class Weight>
void linear_of_integers(ThreadPool& pool, const LinearArgs& args) {
  if (args.rows == 0) return;
  static constexpr TileFunctions<Weight> kMultiply;
  const Weight weight(args);
  const ByteLayout layout = weight.layout();
  const int64_t row_bytes = layout.words * 4;
  const int64_t most_rows = larger(int64_t{1}, kBlockBytes / row_bytes / Weight::kRows) * Weight::kRows;
  const int64_t block_rows = rows_of_a_block(args.rows, most_rows, Weight::kRows);
  const int64_t bytes_size = divide_up(block_rows * row_bytes, 64) * 64;
  auto* bytes = static_cast<uint8_t*>(
      pool.shared(static_cast<size_t>(bytes_size + block_rows * 4 * (1 + layout.groups))));
  auto* scales = reinterpret_cast<float*>(bytes + bytes_size);
  auto* sums = reinterpret_cast<int32_t*>(scales + block_rows);
  for (int64_t first = 0; first < args.rows; first += block_rows) {
    const BlockOfRows block(first, smaller(block_rows, args.rows - first), Weight::kRows);
    const PanelMemory panels{reinterpret_cast<const char*>(weight.panels), weight.panel_bytes,
                             weight.panel_steps(static_cast<int>(block.tile_rows), block.tiles())};
    const auto tile_at = [&](int64_t tile) {
      const int64_t row = tile * block.tile_rows;
      return ByteTile{bytes + row * row_bytes, scales + row, sums + row * layout.groups, first + row};
    };
    if (makes_rows(args, layout.rotated)) {
      pool.reserve_local(static_cast<size_t>(block.tile_rows * whole_vectors(args.k)) * sizeof(float));
    }
    parallel(pool, block.tiles(), [&](int64_t tile, int thread) {
      quantize_rows(args, layout, block.rows_of(tile), tile_at(tile), static_cast<float*>(pool.local(thread)));
    });
    multiply_block(pool, args, block, panels, Weight::group_panels(static_cast<int>(block.tile_rows)),
                   [&](int64_t tile, int64_t panel, int64_t count, Place out, const Ahead& ahead) {
                     kMultiply.of_rows[block.rows_of(tile)](args, weight, tile_at(tile), panel, count, out, ahead);
                   });
  }
}

}  // namespace octavo::OCTAVO_ISA
