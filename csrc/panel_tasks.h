// The tasks of a product whose tiles have as many rows as there are registers for. A task multiplies a few panels of the weight by
// every tile of a block of rows.
//
// A gated product (LinearArgs::gated) takes panels of gates and the matching panels of `up` in one task, and writes only
// activation(gate) * up. It is computed from both, rounded as the product rounds them, while they are in a cache: the bits are
// those of elementwise.h.
#pragma once

#include <type_traits>

#include "linear.h"
#include "math.h"

namespace octavo::OCTAVO_ISA {

// The memory that a tile of rows prefetches while it is multiplied: the panels that its thread takes next, so that they come from
// the thread's cache even if a tile is short, and the memory of its results. Each of several tiles prefetches its share of every
// panel.
class Ahead {
 public:
  static constexpr int64_t kAskedBytes = 128;  // that a step prefetches, at most

  // next: the first of the next panels, of `bytes` each, or null; a tile prefetches `steps` times. here: the first of the present
  // panels, which is prefetched if there is no next.
  Ahead(const void* next, const void* here, int64_t bytes, int64_t steps, int64_t tile, int64_t tiles)
      : line_(static_cast<const char*>(next == nullptr ? here : next) + (next == nullptr ? 0 : bytes / tiles * tile)),
        step_(next == nullptr ? 0 : divide_up(bytes, steps * tiles)),
        panel_(next == nullptr ? 0 : bytes),
        steps_(steps) {}

  // The memory from `line` on, for `ask_lines`.
  explicit Ahead(const char* line) : line_(line), step_(0), panel_(0), steps_(0) {}

  // Adds `rows` rows of results, of `bytes` per panel, from `out` on.
  void set_results(Place out, int64_t rows, int64_t bytes) {
    results_ = out;
    rows_ = rows;
    row_bytes_ = bytes;
  }

  // The same for the panels from the i-th of the next task on.
  Ahead from(int64_t i) const {
    Ahead other = *this;
    other.line_ += i * panel_;
    other.results_.data += i * row_bytes_;
    return other;
  }

  // Prefetches a step of panel p.
  OCTAVO_INLINE void ask(int p) const {
    prefetch_l2(line_ + p * panel_);
    prefetch_l2(line_ + p * panel_ + 64);
  }
  OCTAVO_INLINE void step() { line_ += step_; }

  // Returns how many of the next `count` steps must prefetch, which are the first ones, and marks them as taken.
  int64_t take_steps(int64_t count) {
    const int64_t taken = smaller(count, steps_);
    steps_ -= taken;
    return taken;
  }

  // Prefetches the next row of results, of `panels` panels.
  OCTAVO_INLINE void ask_row(int panels) {
    for (int64_t i = 0; i < panels * row_bytes_; i += 64) prefetch_l2(results_.data + i);
    results_.data += results_.row_bytes;
    --rows_;
  }
  int64_t rows() const { return rows_; }
  void ask_rows(int panels) {
    while (rows_ > 0) ask_row(panels);
  }

  // Prefetches the next `count` lines of one panel.
  OCTAVO_INLINE void ask_lines(int64_t count) {
    for (int64_t i = 0; i < count; ++i, line_ += 64) prefetch_l2(line_);
  }

 private:
  const char* line_;
  int64_t step_;
  int64_t panel_;
  int64_t steps_;
  Place results_{nullptr, 0};
  int64_t rows_ = 0;
  int64_t row_bytes_ = 0;
};

// The distance of prefetches from reads in a stream from memory, and whether few rows, which take several panels together, also
// prefetch the panels after these. With bf16 instructions but no tiles (Zen 4 and 5) memory is fastest for streams that prefetch
// little more than they read; AVX2 reads faster without prefetching the following panels.
#if defined(OCTAVO_ISA_BF16) && !defined(OCTAVO_ISA_AMX)
constexpr int64_t kStreamPrefetchBytes = kPrefetchBytes / 2;
constexpr bool kFewRowsAskAhead = false;
#elif defined(OCTAVO_ISA_AVX2)
constexpr int64_t kStreamPrefetchBytes = kPrefetchBytes;
constexpr bool kFewRowsAskAhead = false;
#else
constexpr int64_t kStreamPrefetchBytes = kPrefetchBytes;
constexpr bool kFewRowsAskAhead = true;
#endif

constexpr int kPanelVecs = kPanelColumns / kLanes;

// How many vectors of a panel `rows` rows take together.
constexpr int vecs_at_once(int rows, int most_sums) { return rows * kPanelVecs <= most_sums ? kPanelVecs : 1; }

// How many panels `rows` rows take together: as many streams from memory as there are registers for.
constexpr int panels_at_once(int rows, int most_sums) {
  const int count = most_sums / (rows * kPanelVecs);
  return count < 1 ? 1 : count > 4 ? 4 : count;
}

// Calls multiply(at_once, panel, out, ahead) for `count` panels, kMost at a time, or fewer for the last ones. at_once, a constant,
// is their number; `panel` is the first of them.
template <int kMost, class Multiply>
void for_each_panel(const LinearArgs& args, int64_t count, Place out, const Ahead& ahead, const Multiply& multiply) {
  int64_t panel = 0;
  const auto take = [&](auto at_once) {
    for (; panel + at_once <= count; panel += at_once) multiply(at_once, panel, right_of(args, out, panel), ahead.from(panel));
  };
  take(std::integral_constant<int, kMost>());
  if constexpr (kMost > 2) take(std::integral_constant<int, 2>());
  if constexpr (kMost > 1) take(std::integral_constant<int, 1>());
}

// The rows of a block for a product of `rows` rows: at most `most`, in whole tiles of `tallest` rows, because a lower tile takes
// as long.
inline int64_t rows_of_a_block(int64_t rows, int64_t most, int64_t tallest) {
  if (rows <= most) return rows;
  return divide_up(divide_up(rows, divide_up(rows, most)), tallest) * tallest;
}

// Rows that are multiplied by a panel while they stay in a cache: as few tiles as possible, of nearly equal height.
struct BlockOfRows {
  int64_t first;  // of the result
  int64_t rows;
  int64_t tile_rows;

  BlockOfRows(int64_t first, int64_t rows, int64_t tallest)
      : first(first), rows(rows), tile_rows(divide_up(rows, divide_up(rows, tallest))) {}

  int64_t tiles() const { return divide_up(rows, tile_rows); }
  int64_t rows_of(int64_t tile) const { return smaller(tile_rows, rows - tile * tile_rows); }
};

// The panels of a packed weight, of `bytes` each. A tile prefetches memory `steps` times while it is multiplied by a panel.
struct PanelMemory {
  const char* data;
  int64_t bytes;
  int64_t steps;

  const char* at(int64_t panel) const { return data + panel * bytes; }
};

// The gates of a block of rows, and the `up` values of one of its tiles, in the memory of a thread. All tiles are multiplied by a
// panel before the next panel, so that it stays in L1.
class GatedPanels {
 public:
  static int64_t size(const BlockOfRows& block, int64_t columns) {
    return (block.rows + block.tile_rows) * columns * static_cast<int64_t>(sizeof(bf16));
  }

  GatedPanels(void* memory, const BlockOfRows& block, int64_t columns, Activation activation)
      : block_(block), columns_(columns), activation_(activation), gates_(static_cast<bf16*>(memory)), ups_(gates_ + block.rows * columns) {}

  Place gates(int64_t tile) const { return {reinterpret_cast<char*>(gates_of(tile)), row_bytes()}; }
  Place ups() const { return {reinterpret_cast<char*>(ups_), row_bytes()}; }

  // Writes activation(gate) * up of a tile.
  void write(int64_t tile, Place out) const {
    const bf16 *gate = gates_of(tile), *up = ups_;
    for (int64_t row = 0; row < block_.rows_of(tile); ++row, out.data += out.row_bytes) {
      auto* result = reinterpret_cast<bf16*>(out.data);
      for (int64_t i = 0; i < columns_; i += kPanelColumns, gate += kPanelColumns, up += kPanelColumns) {
        gate_vectors<kPanelVecs>(activation_, gate, up, result + i);
      }
    }
  }

 private:
  bf16* gates_of(int64_t tile) const { return gates_ + tile * block_.tile_rows * columns_; }
  int64_t row_bytes() const { return columns_ * static_cast<int64_t>(sizeof(bf16)); }

  const BlockOfRows block_;
  const int64_t columns_;  // a multiple of a panel's
  const Activation activation_;
  bf16* const gates_;
  bf16* const ups_;
};

// Calls multiply(tile, first, count, out, ahead) for every tile of a block of rows and all panels of a weight: it multiplies
// panels first .. first + count and writes to `out`. at_once: how many panels a tile takes together.
template <class Multiply>
void multiply_block(ThreadPool& pool, const LinearArgs& args, const BlockOfRows& block, const PanelMemory& weight,
                    int64_t at_once, const Multiply& multiply) {
  const int64_t panels = args.gated ? args.num_panels / 2 : args.num_panels, tiles = block.tiles();
  const int64_t group = tiles == 1 ? panels_of_a_task(panels, pool.num_threads(), at_once) : 1;
  const int64_t tasks = divide_up(panels, group);
  if (args.gated) pool.reserve_local(static_cast<size_t>(GatedPanels::size(block, group * kPanelColumns)));
  parallel_ahead(pool, tasks, [&](int64_t task, int64_t following, int thread) {
    const int64_t first = args.first_panel + task * group, count = smaller(group, panels - task * group);
    const auto out_of = [&](int64_t tile) {
      return place_of(args, block.first + tile * block.tile_rows, first * kPanelColumns);
    };
    // shift: distance of the weight's panels from the result's
    const auto multiply_tile_of = [&](int64_t tile, int64_t shift, bool makes_results, Place place) {
      const char* next = following < tasks ? weight.at(args.first_panel + following * group + shift) : nullptr;
      Ahead ahead(next, weight.at(first + shift), weight.bytes, weight.steps, tile, tiles);
      if (makes_results) ahead.set_results(out_of(tile), block.rows_of(tile), bytes_of_result(args, kPanelColumns));
      multiply(tile, first + shift, count, place, ahead);
    };
    if (!args.gated) {
      for (int64_t tile = 0; tile < tiles; ++tile) multiply_tile_of(tile, 0, true, out_of(tile));
      return;
    }
    const GatedPanels gated(pool.local(thread), block, count * kPanelColumns, args.activation);
    for (int64_t tile = 0; tile < tiles; ++tile) multiply_tile_of(tile, 0, false, gated.gates(tile));
    for (int64_t tile = 0; tile < tiles; ++tile) {
      multiply_tile_of(tile, panels, true, gated.ups());
      gated.write(tile, out_of(tile));
    }
  });
}

}  // namespace octavo::OCTAVO_ISA
