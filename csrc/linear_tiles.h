// Matrix products by tiles (AMX): bfloat16 weights with bfloat16 activations, and int8 weights with activations that the product
// quantizes. Both packed weights are [words][32] of 32 bits, with two or four k in a word, so sixteen lines of a panel are two
// tiles in place.
//
// Every sum takes its steps of sixteen words in ascending order for any number of rows, so a row's result cannot depend on other
// rows. Sums of bfloat16 differ in their last bits from those of other instruction sets. Sums of int8 are integers and do not
// differ; results are computed from them by the expression of linear_int8.h.
//
// A gated product multiplies a panel of gates and the matching panel of `up` in the same task, and writes only
// activation(gate) * up. It is computed from both, rounded as the product rounds them, while they are in the first-level cache:
// the bits are those of elementwise.h.
#pragma once

#include "linear_int4.h"
#if defined(OCTAVO_ISA_AMX)
#include "tiles.h"
#endif

namespace octavo::OCTAVO_ISA {

// Whether linear computes gated products of these types: only if gates and `up` are in separate panels.
inline bool fuses_gate(DType x_dtype, DType weight_dtype, int64_t n) {
#if defined(OCTAVO_ISA_BF16)
  constexpr bool kFusesPairs = true;
#else
  constexpr bool kFusesPairs = false;
#endif
#if defined(OCTAVO_ISA_AMX)
  constexpr bool kFusesNibbles = false;
#else
  constexpr bool kFusesNibbles = true;
#endif
  const bool fuses = weight_dtype == DType::kBFloat16 ? kFusesPairs
                     : weight_dtype == DType::kInt4   ? kFusesNibbles
                                                      : weight_dtype == DType::kInt8;
  return fuses && x_dtype == DType::kBFloat16 && n % (2 * kPanelColumns) == 0;
}

#if defined(OCTAVO_ISA_AMX)

constexpr int64_t kStepWords = kTileStep / 4;
constexpr int64_t kLineBytes = 4 * kPanelColumns;          // a word of every column of a panel
constexpr int64_t kStepBytes = kStepWords * kLineBytes;    // of a panel
constexpr int64_t kTogether = 2 * kTileHeight;             // rows that are multiplied together, as a pair of tiles
constexpr int64_t kPairStepBytes = 2 * kTileBytes;         // of a pair of tiles
constexpr int64_t kFewPairs = 3;                           // up to so many pairs all k of a panel are multiplied at once,
constexpr int64_t kFewShortPairs = 6, kShortSteps = 28;    // or up to so many if k has at most so many steps
constexpr int64_t kFewRowsPanels = 4;                      // panels of a task with so few rows: several streams from memory
constexpr int64_t kStreamAhead = 4096;                     // distance of prefetches from reads, in bytes
constexpr int64_t kLongPanel = 256 << 10;                  // longer panels do not stay in L2, so each prefetches itself

// Rows as pairs of tiles, and the distances to the next pair, to the other tile of a pair, to the next row and to the next step.
struct RowsOfTiles {
  const char* data;
  int64_t pair_bytes;
  int64_t tile_bytes;
  int64_t row_bytes;
  int64_t step_bytes;
  const float* scales = nullptr;  // of the rows; null if they have none

  const float* scales_from(int64_t row) const { return scales == nullptr ? nullptr : scales + row; }
};

// Rows in slices of k, of nearly equal length. Packed: [slices][pairs of tiles][steps of the slice][2 tiles][16 rows][64 bytes],
// in which the memory of rows after the last one has any content.
struct SlicedRows {
  char* data;
  float* scales;  // [rows]; or null
  int64_t pairs, steps, slices;
  const RowsOfTiles* in_place = nullptr;  // rows that are not packed

  int64_t first_step(int64_t slice) const { return slice * steps / slices; }
  int64_t steps_of(int64_t slice) const { return first_step(slice + 1) - first_step(slice); }
  char* at(int64_t slice, int64_t pair) const {
    return data + (first_step(slice) * pairs + pair * steps_of(slice)) * kPairStepBytes;
  }
  RowsOfTiles tiles(int64_t slice) const {
    if (in_place != nullptr) {
      RowsOfTiles rest = *in_place;
      rest.data += first_step(slice) * kTileStep;
      return rest;
    }
    return {at(slice, 0), steps_of(slice) * kPairStepBytes, kTileBytes, kTileStep, kPairStepBytes, scales};
  }
  // Calls pack(step, out) for each step of a row; out: 64 bytes.
  template <class F>
  void for_each_step(int64_t row, const F& pack) const {
    int64_t step = 0;
    for (int64_t slice = 0; slice < slices; ++slice) {
      char* out = at(slice, row / kTogether) + row / kTileHeight % 2 * kTileBytes + row % kTileHeight * kTileStep;
      for (const int64_t end = first_step(slice + 1); step < end; ++step, out += kPairStepBytes) pack(step, out);
    }
  }
};

// bfloat16, two to a word.
struct PairTiles {
  using Sum = float;
  static constexpr int64_t kDepth = 2;
  static constexpr bool kAlwaysPacks = false;

  const char* panels;
  int64_t panel_bytes;

  explicit PairTiles(const LinearArgs& args)
      : panels(static_cast<const char*>(args.weight)), panel_bytes(divide_up(args.k, kDepth) * kLineBytes) {}

  template <int kSums, int kRows, int kColumns>
  static OCTAVO_INLINE void add() {
    add_pair_tiles<kSums, kRows, kColumns>();
  }

  // Whether rows must be packed. Rows that fill whole tiles in place are multiplied in place.
  static bool packs(const LinearArgs& args) {
    const auto address = reinterpret_cast<uintptr_t>(args.x);
    return args.k % (kDepth * kStepWords) != 0 || (address | static_cast<uintptr_t>(2 * args.x_stride)) % 64 != 0;
  }
  static RowsOfTiles as_they_stand(const LinearArgs& args) {
    const int64_t row_bytes = 2 * args.x_stride;
    return {static_cast<const char*>(args.x), kTogether * row_bytes, kTileHeight * row_bytes, row_bytes, kTileStep};
  }
  static void pack_row(const LinearArgs& args, int64_t row, const SlicedRows& rows, void*) {
    const bf16* x = static_cast<const bf16*>(args.x) + row * args.x_stride;
    rows.for_each_step(row, [&](int64_t step, char* out) {
      const int64_t first = step * kDepth * kStepWords, count = args.k - first;
      if (count >= kDepth * kStepWords) {
        store_int(out, load_int(x + first));
      } else {
        std::memset(out, 0, kTileStep);
        std::memcpy(out, x + first, static_cast<size_t>(count) * sizeof(bf16));
      }
    });
  }
  void write(const LinearArgs& args, const float* sums, const float*, int64_t rows, int64_t panel, Place out) const {
    const int64_t column = panel * kPanelColumns, columns = smaller(int64_t{kPanelColumns}, args.n - column);
    const bool is_wide = args.out_dtype == DType::kFloat32, has_bias = args.bias != nullptr;
    const Vec left = has_bias ? load(args.bias + column) : splat(0.0f);
    const Vec right = has_bias ? load(args.bias + column + kLanes) : splat(0.0f);
    for (int64_t row = 0; row < rows; ++row, out.data += out.row_bytes, sums += kPanelColumns) {
      const Vec a = load(sums), b = load(sums + kLanes);
      const Vec value[] = {has_bias ? a + left : a, has_bias ? b + right : b};
      const IVec rounded = round_pairs(value[0], value[1]);
      if (is_wide) {
        store_columns(reinterpret_cast<float*>(out.data), value, columns);
      } else if (columns == kPanelColumns) {
        store_int(out.data, rounded);
      } else {
        bf16 some[kPanelColumns];
        store_int(some, rounded);
        std::memcpy(out.data, some, static_cast<size_t>(columns) * sizeof(bf16));
      }
    }
  }
};

// Signed bytes, four to a word.
struct ByteTiles {
  using Sum = int32_t;
  static constexpr int64_t kDepth = 4;
  static constexpr bool kAlwaysPacks = true;

  ByteWeight weight;
  const char* panels;
  int64_t panel_bytes;

  explicit ByteTiles(const LinearArgs& args)
      : weight(args), panels(reinterpret_cast<const char*>(weight.panels)), panel_bytes(weight.panel_bytes) {}

  template <int kSums, int kRows, int kColumns>
  static OCTAVO_INLINE void add() {
    add_byte_tiles<kSums, kRows, kColumns>();
  }

  static bool packs(const LinearArgs&) { return true; }
  static RowsOfTiles as_they_stand(const LinearArgs&) { return {}; }
  // made: memory for a row.
  template <class X>
  static void pack_row_of(const LinearArgs& args, int64_t row, const SlicedRows& rows, float* made) {
    const X* x = static_cast<const X*>(args.x) + row * args.x_stride;
    const bool is_rotated = args.weight_dtype == DType::kInt8;
    if (!makes_rows(args, is_rotated)) return round_row(x, args.k, row, rows);
    make_row(args, is_rotated, x, made);
    round_row(static_cast<const float*>(made), args.k, row, rows);
  }
  template <class X>
  static void round_row(const X* x, int64_t k, int64_t row, const SlicedRows& rows) {
    const RowScale found = row_scale(x, k);
    rows.scales[row] = found.scale;
    const Vec inverse = splat(found.inverse);
    rows.for_each_step(row, [&](int64_t step, char* out) {
      OCTAVO_UNROLL
      for (int64_t i = 0; i < kTileStep; i += kLanes) {
        const int64_t first = step * kTileStep + i;
        store_bytes(out + i, to_int(load_first(x + first, larger(int64_t{0}, k - first)) * inverse));
      }
    });
  }
  static void pack_row(const LinearArgs& args, int64_t row, const SlicedRows& rows, void* room) {
    float* made = static_cast<float*>(room);
    if (args.x_dtype == DType::kFloat32) {
      pack_row_of<float>(args, row, rows, made);
    } else {
      pack_row_of<bf16>(args, row, rows, made);
    }
  }
  void write(const LinearArgs& args, const int32_t* sums, const float* scales, int64_t rows, int64_t panel, Place out) const {
    write_byte_sums<0>(args, weight, scales, rows, panel * kPanelColumns, sums, out);
  }
};

// The panels of a weight in the order of multiplication: each panel of gates is followed by the matching panel of `up`.
class PanelOrder {
 public:
  explicit PanelOrder(const LinearArgs& args) : gated_(args.gated), half_(args.n / (2 * kPanelColumns)) {}

  int64_t together() const { return gated_ ? 2 : 1; }  // panels of the weight for one panel of the result
  int64_t panel(int64_t i) const { return gated_ ? i / 2 + i % 2 * half_ : i; }
  int64_t result(int64_t i) const { return gated_ ? i / 2 : i; }

 private:
  const bool gated_;
  const int64_t half_;
};

// The second half of a gated product: activation(gate) * up of at most 32 rows and columns, a few rows at each step of the next
// tiles. Computing all rows between two products would cost as much as writing both panels and reading them again.
class Gates {
 public:
  explicit Gates(Activation activation) : activation_(activation) {}
  Gates(const Gates&) = delete;
  Gates& operator=(const Gates&) = delete;

  // The place for the next gates (half 0) or `up` (half 1).
  Place place(int64_t half) { return {reinterpret_cast<char*>(values_[next_][half]), sizeof(values_[0][0][0])}; }

  // Begins to turn the values there into `rows` rows at `out`.
  void begin(Place out, int64_t rows) {
    finish();
    out_ = out;
    rows_ = rows;
    next_ = 1 - next_;
  }
  OCTAVO_INLINE void step() {
    if (rows_ > 0) gate_rows(smaller(rows_, kRowsOfStep));
  }
  void finish() {
    gate_rows(rows_);
    done_ = 0;
  }

 private:
  static constexpr int64_t kRowsOfStep = 2;

  __attribute__((noinline)) void gate_rows(int64_t count) {
    auto& [gate, up] = values_[1 - next_];
    for (const int64_t end = done_ + count; done_ < end; ++done_, out_.data += out_.row_bytes) {
      gate_vectors<kPanelVecs>(activation_, gate[done_], up[done_], reinterpret_cast<bf16*>(out_.data));
    }
    rows_ -= count;
  }

  alignas(64) bf16 values_[2][2][kTogether][kPanelColumns];
  const Activation activation_;
  Place out_{};
  int64_t rows_ = 0, done_ = 0;
  int next_ = 0;
};

// Work between the steps of a product: each step prefetches `lines` lines of the memory ahead.
struct Asking {
  Ahead ahead;
  int64_t lines;

  OCTAVO_INLINE void step() { ahead.ask_lines(lines); }
};

// The same, and each step computes some rows of gates.
struct AskingAndGating {
  Asking asking;
  Gates& gates;

  OCTAVO_INLINE void step() {
    asking.step();
    gates.step();
  }
};

// Multiplies up to 16 rows (kTiles = 1) or 32 rows from `x` on by some steps of a panel. tail: the last step's columns, zero
// padded, if the panel ends in the middle of a tile; else null. sums: rows of 32, `stride` apart; they start at zero if `fresh`.
// beside.step() is called at each step.
template <class Product, int kTiles, class Beside>
void multiply_steps(const RowsOfTiles& rows, const char* x, const char* w, int64_t steps, const char* tail, bool fresh,
                    const Beside& asked, typename Product::Sum* sums, int64_t stride) {
  Beside beside = asked;  // by reference: a copy made for the call would wait until the sums stored before are in the cache
  auto* lower = sums + kTileHeight * stride;
  const int64_t sum_bytes = stride * 4;
  const int64_t row_bytes = rows.row_bytes, tile_bytes = rows.tile_bytes, step_bytes = rows.step_bytes;
  if (fresh) {
    clear_tile<0>();
    clear_tile<1>();
    if (kTiles == 2) clear_tile<2>();
    if (kTiles == 2) clear_tile<3>();
  } else {
    load_tile<0>(sums, sum_bytes);
    load_tile<1>(sums + kTileHeight, sum_bytes);
    if (kTiles == 2) load_tile<2>(lower, sum_bytes);
    if (kTiles == 2) load_tile<3>(lower + kTileHeight, sum_bytes);
  }
  for (int64_t step = 0; step < steps; ++step) {
    const char* columns = step + 1 == steps && tail != nullptr ? tail : w;
    load_tile<6>(columns, kLineBytes);
    load_tile<4>(x, row_bytes);
    Product::template add<0, 4, 6>();
    load_tile<7>(columns + kTileStep, kLineBytes);
    Product::template add<1, 4, 7>();
    if (kTiles == 2) {
      load_tile<5>(x + tile_bytes, row_bytes);
      Product::template add<2, 5, 6>();
      Product::template add<3, 5, 7>();
    }
    beside.step();
    x += step_bytes;
    w += kStepBytes;
  }
  store_tile<0>(sums, sum_bytes);
  store_tile<1>(sums + kTileHeight, sum_bytes);
  if (kTiles == 2) store_tile<2>(lower, sum_bytes);
  if (kTiles == 2) store_tile<3>(lower + kTileHeight, sum_bytes);
}

// Multiplies up to 16 rows by two panels: two streams from memory. sums: [2][32][32].
template <class Product>
void multiply_two_panels(const RowsOfTiles& rows, const char* w, const char* other, int64_t steps, Gates& gates,
                         typename Product::Sum* sums) {
  const int64_t row_bytes = rows.row_bytes;
  const char* x = rows.data;
  clear_tile<0>();
  clear_tile<1>();
  clear_tile<2>();
  clear_tile<3>();
  for (int64_t step = 0; step < steps; ++step) {
    load_tile<4>(x, row_bytes);
    load_tile<5>(w, kLineBytes);
    Product::template add<0, 4, 5>();
    load_tile<6>(w + kTileStep, kLineBytes);
    Product::template add<1, 4, 6>();
    load_tile<7>(other, kLineBytes);
    Product::template add<2, 4, 7>();
    load_tile<5>(other + kTileStep, kLineBytes);
    Product::template add<3, 4, 5>();
    for (int64_t i = kStreamAhead; i < kStreamAhead + kStepBytes; i += 64) {
      __builtin_prefetch(w + i);
      __builtin_prefetch(other + i);
    }
    gates.step();
    x += rows.step_bytes;
    w += kStepBytes;
    other += kStepBytes;
  }
  store_tile<0>(sums, kLineBytes);
  store_tile<1>(sums + kTileHeight, kLineBytes);
  store_tile<2>(sums + kTogether * kPanelColumns, kLineBytes);
  store_tile<3>(sums + kTogether * kPanelColumns + kTileHeight, kLineBytes);
}

// The height of each tile: the sums of `upper` and of `lower` rows, these rows, and two tiles of columns.
constexpr uint64_t heights_of_pair(int64_t upper, int64_t lower) {
  const auto high = static_cast<uint64_t>(upper), low = static_cast<uint64_t>(lower);
  return high * 0x0000'0001'0000'0101u | low * 0x0000'0100'0101'0000u | uint64_t{kTileHeight} * 0x0101'0000'0000'0000u;
}

// The height of each tile for multiply_two_panels.
constexpr uint64_t heights_of_few(int64_t rows) {
  return static_cast<uint64_t>(rows) * 0x0000'0001'0101'0101u | uint64_t{kTileHeight} * 0x0101'0100'0000'0000u;
}

// Writes the sums of up to 32 rows, from `row` on, and of panel i: to the result, or to the memory of gates.
template <class Product>
void write_tiles(const LinearArgs& args, const Product& product, const float* scales, int64_t row, int64_t rows, int64_t i,
                 const typename Product::Sum* sums, Gates& gates) {
  const PanelOrder order(args);
  const Place out = place_of(args, row, order.result(i) * kPanelColumns);
  product.write(args, sums, scales, rows, order.panel(i), args.gated ? gates.place(i % 2) : out);
  if (args.gated && i % 2 == 1) gates.begin(out, rows);
}

// The last step of a panel that ends in the middle of a tile, filled up with zeros.
class TailOfPanel {
 public:
  // rest: words in the last step; 0 if it is whole.
  explicit TailOfPanel(int64_t rest) : rest_(rest) {}

  // last: the last step. Returns null if it is whole.
  const char* of(const char* last) {
    if (rest_ == 0) return nullptr;
    std::memset(columns_, 0, sizeof(columns_));
    std::memcpy(columns_, last, static_cast<size_t>(rest_ * kLineBytes));
    return columns_;
  }

 private:
  const int64_t rest_;
  alignas(64) char columns_[kStepBytes];
};

// --- few rows: all k of a panel are multiplied at once --------------------------------------------------------------------

// Multiplies panels first .. first + count, in their order, by all rows. next: the first panel of the following task, or -1. Its
// panels are prefetched unless they are long; the first rows of a long panel prefetch the panel itself. sums: [2][32][32].
template <class Product>
void multiply_few_rows_of_tiles(const LinearArgs& args, const Product& product, const RowsOfTiles& rows, int64_t first,
                                int64_t count, int64_t next, typename Product::Sum* sums) {
  const int64_t words = divide_up(args.k, Product::kDepth), steps = divide_up(words, kStepWords);
  const int64_t pairs = divide_up(args.rows, kTogether), rest = words % kStepWords;
  const bool is_long = product.panel_bytes > kLongPanel;
  const int64_t share = divide_up(product.panel_bytes / 64, steps * pairs);
  const PanelOrder order(args);
  const auto panel_at = [&](int64_t i) { return product.panels + order.panel(i) * product.panel_bytes; };
  TailOfPanel tail(rest);
  Gates gates(args.activation);
  Tiles tiles;
  int64_t done = 0;
  if (args.rows <= kTileHeight && rest == 0) {
    tiles.hold(heights_of_few(args.rows));
    for (; done + 2 <= count; done += 2) {
      multiply_two_panels<Product>(rows, panel_at(first + done), panel_at(first + done + 1), steps, gates, sums);
      write_tiles(args, product, rows.scales, 0, args.rows, first + done, sums, gates);
      write_tiles(args, product, rows.scales, 0, args.rows, first + done + 1, sums + kTogether * kPanelColumns, gates);
    }
  }
  for (int64_t i = 0; i < pairs; ++i) {
    const int64_t row = i * kTogether, height = smaller(kTogether, args.rows - row);
    const int64_t upper = smaller(height, int64_t{kTileHeight});
    tiles.hold(heights_of_pair(upper, height - upper));
    for (int64_t p = done; p < count; ++p) {
      const char* panel = panel_at(first + p);
      prefetch_output(args, place_of(args, row, order.result(first + p) * kPanelColumns), height, 1);
      const Ahead ahead = is_long ? Ahead(panel + kStreamAhead)
                                  : Ahead(next < 0 ? nullptr : panel_at(next + p), panel, product.panel_bytes, 1, i, pairs);
      const int64_t lines = !is_long ? share : i == 0 ? kStepBytes / 64 : 0;
      const auto multiply =
          height > kTileHeight ? multiply_steps<Product, 2, AskingAndGating> : multiply_steps<Product, 1, AskingAndGating>;
      const AskingAndGating beside{{ahead, lines}, gates};
      multiply(rows, rows.data + i * rows.pair_bytes, panel, steps, tail.of(panel + (steps - 1) * kStepBytes), true, beside, sums,
               kPanelColumns);
      write_tiles(args, product, rows.scales_from(row), row, height, first + p, sums, gates);
    }
  }
  gates.finish();
}

// Copies all rows into pairs of tiles.
template <class Product>
SlicedRows pack_rows_as_tiles(ThreadPool& pool, const LinearArgs& args, int64_t steps, int64_t slices) {
  const int64_t pairs = divide_up(args.rows, kTogether), size = pairs * steps * kPairStepBytes;
  char* packed = static_cast<char*>(pool.shared(static_cast<size_t>(size + 4 * args.rows)));
  const SlicedRows rows{packed, reinterpret_cast<float*>(packed + size), pairs, steps, slices};
  pool.reserve_local(static_cast<size_t>(whole_vectors(args.k)) * sizeof(float));
  parallel_ranges(pool, args.rows, 1, [&](int64_t begin, int64_t end, int thread) {
    for (int64_t row = begin; row < end; ++row) Product::pack_row(args, row, rows, pool.local(thread));
  });
  return rows;
}

// Tasks are groups of panels.
template <class Product>
void linear_of_few_tiles(ThreadPool& pool, const LinearArgs& args, const Product& product) {
  const int64_t steps = divide_up(divide_up(args.k, Product::kDepth), kStepWords), panels = args.num_panels;
  const RowsOfTiles rows = product.packs(args) ? pack_rows_as_tiles<Product>(pool, args, steps, 1).tiles(0)
                                               : product.as_they_stand(args);
  const int64_t together = PanelOrder(args).together();
  const int64_t group = together * panels_of_a_task(panels / together, pool.num_threads(), kFewRowsPanels / together);
  const int64_t tasks = divide_up(panels, group);
  pool.reserve_local(2 * kTogether * kPanelColumns * sizeof(float));
  parallel_ahead(pool, tasks, [&](int64_t task, int64_t following, int thread) {
    const int64_t panel = args.first_panel + task * group;
    const int64_t next = following < tasks ? args.first_panel + following * group : -1;
    multiply_few_rows_of_tiles(args, product, rows, panel, smaller(group, args.end_panel() - panel), next,
                               static_cast<typename Product::Sum*>(pool.local(thread)));
  });
}

#endif

}  // namespace octavo::OCTAVO_ISA
