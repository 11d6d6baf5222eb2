// Products by tiles of more rows than fit the first-level cache. k is cut into slices, and a task multiplies a block of rows by a
// group of panels, one slice after another:
//
//   - the slice of a panel stays in the first-level cache while all rows of the block are multiplied by it;
//   - the sums of the task and a slice of its rows stay in the second-level cache, while all panels of the group pass;
//   - the next slice of a panel, and a part of the next slice of the rows, are prefetched at each step.
//
// So a weight comes from memory once for up to 512 rows. The sums are stored between two slices, which does not change them.
#pragma once

#include <unistd.h>

#include "linear_tiles.h"

namespace octavo::OCTAVO_ISA {

#if defined(OCTAVO_ISA_AMX)

constexpr int64_t kSliceSteps = 8;          // at most: the slices of a panel and of a pair of tiles, and their sums, fit L1
constexpr int64_t kMostBlockPairs = 16;     // pairs of tiles of a task
constexpr int64_t kMostGroupPanels = 8;     // panels of a task
constexpr int64_t kPackedBytes = 16 << 20;  // of rows that are packed at a time
constexpr int64_t kMostAskedLines = 8;      // of the rows' next slice, at a step

inline int64_t second_level_cache_bytes() {
  static const int64_t bytes = larger(static_cast<int64_t>(sysconf(_SC_LEVEL2_CACHE_SIZE)), int64_t{1} << 20);
  return bytes;
}

// The time that a task takes for a slice: for each pair of tiles times each panel, and, because their slices come from outside of
// the second-level cache, for each pair and each panel alone. Only the ratios matter; they were measured.
struct TaskCosts {
  static constexpr double kBoth = 2.0, kPair = 1.0, kPanel = 1.5;
};

// How a product is divided into tasks: blocks of rows times groups of panels. All blocks are multiplied by a group of panels
// before the next group.
class TileTasks {
 public:
  // panels: of the result, each of `together` panels for tiles.
  TileTasks(int64_t pairs, int64_t panels, int64_t together, int64_t steps, int64_t threads) {
    double least = 0.0;
    for (int64_t blocks = divide_up(pairs, kMostBlockPairs); blocks <= pairs; ++blocks) {
      const int64_t block = divide_up(pairs, blocks);
      if (divide_up(pairs, block) != blocks) continue;
      for (int64_t group = 1; group <= kMostGroupPanels / together; ++group) {
        const int64_t tasks = blocks * divide_up(panels, group);
        const double cost = cost_of_task(block, group * together) * (static_cast<double>(divide_up(tasks, threads)) + 0.5);
        if (least != 0.0 && cost >= least) continue;
        least = cost;
        pairs_ = block;
        group_ = group * together;
        blocks_ = blocks;
      }
    }
    groups_ = divide_up(panels * together, group_);
    are_near_ = 4 * pairs_ * steps * kPairStepBytes <= second_level_cache_bytes();
  }

  int64_t count() const { return blocks_ * groups_; }
  int64_t pairs() const { return pairs_; }    // of a block
  int64_t panels() const { return group_; }   // of a group
  int64_t first_pair(int64_t task) const { return task % blocks_ * pairs_; }
  int64_t first_panel(int64_t task) const { return task / blocks_ * group_; }
  // Whether all slices of a block of rows stay in the second-level cache.
  bool are_near() const { return are_near_; }

 private:
  static double cost_of_task(int64_t pairs, int64_t panels) {
    const auto rows = static_cast<double>(pairs), columns = static_cast<double>(panels);
    return rows * columns * TaskCosts::kBoth + rows * TaskCosts::kPair + columns * TaskCosts::kPanel;
  }

  int64_t pairs_ = 1, group_ = 1, blocks_ = 1, groups_ = 1;
  bool are_near_ = false;
};

// A task of TileTasks.
struct SlicesOfTask {
  int64_t first_pair, pairs;
  int64_t first_panel, panels;
  int64_t next_panel;  // of the thread's next task; or of this one
};

// Calls multiply(args) for a limited number of rows at a time. So packed rows, of `row_bytes` each, take little memory, but the
// weight is still read for many rows together.
template <class F>
void for_each_pass(const LinearArgs& args, int64_t row_bytes, F&& multiply) {
  constexpr int64_t kBlock = kMostBlockPairs * kTogether;
  const int64_t most = larger(kBlock, kPackedBytes / row_bytes / kBlock * kBlock);
  for (int64_t first = 0; first < args.rows; first += most) {
    LinearArgs some = args;
    some.x = static_cast<const char*>(args.x) + first * args.x_stride * (args.x_dtype == DType::kFloat32 ? 4 : 2);
    some.out = place_of(args, first, 0).data;
    some.rows = smaller(most, args.rows - first);
    multiply(some);
  }
}

// Memory that will be read.
struct Upcoming {
  const char* data;
  int64_t bytes;
};

// The columns of a weight whose panels are multiplied in place. The panels of a gated product are counted in the order of
// multiplication.
template <class Product>
class ColumnsInPlace {
 public:
  using Multiplied = Product;
  static constexpr int64_t kPlanes = 1;

  ColumnsInPlace(const LinearArgs& args, const Product& product)
      : args_(args), product_(product), order_(args), tail_(divide_up(args.k, Product::kDepth) % kStepWords) {}

  static int64_t unpacked_bytes(int64_t) { return 0; }
  static int64_t together(const LinearArgs& args) { return PanelOrder(args).together(); }

  const char* slice(int64_t i, int64_t first_step, int64_t, char*) const { return panel(i) + first_step * kStepBytes; }
  // The last step of a slice if it is filled up with zeros, else null.
  const char* tail(int64_t i, int64_t first_step, int64_t steps, bool is_last) {
    return is_last ? tail_.of(panel(i) + (first_step + steps - 1) * kStepBytes) : nullptr;
  }
  Upcoming upcoming(int64_t i, int64_t first_step, int64_t steps) const {
    return {panel(i) + first_step * kStepBytes, steps * kStepBytes};
  }
  Place result(int64_t row, int64_t i) const { return place_of(args_, row, order_.result(i) * kPanelColumns); }
  // Writes rows of panel i; for a gated product of panels i - 1 and i. before: the sums of panel i - 1.
  void write(const float* scales, int64_t row, int64_t rows, int64_t i, const typename Product::Sum* before,
             const typename Product::Sum* sums) const {
    const Place out = result(row, i);
    if (!args_.gated) return product_.write(args_, sums, scales, rows, order_.panel(i), out);
    alignas(64) bf16 gates[kTogether][kPanelColumns], ups[kTogether][kPanelColumns];
    product_.write(args_, before, scales, rows, order_.panel(i - 1), {reinterpret_cast<char*>(gates), sizeof(gates[0])});
    product_.write(args_, sums, scales, rows, order_.panel(i), {reinterpret_cast<char*>(ups), sizeof(ups[0])});
    for (int64_t r = 0; r < rows; ++r) {
      gate_vectors<kPanelVecs>(args_.activation, gates[r], ups[r], reinterpret_cast<bf16*>(out.data + r * out.row_bytes));
    }
  }

 private:
  const char* panel(int64_t i) const { return product_.panels + order_.panel(i) * product_.panel_bytes; }

  const LinearArgs& args_;
  const Product& product_;
  const PanelOrder order_;
  TailOfPanel tail_;
};

// A Columns has these members, in which `i` counts panels of kPanelColumns columns for tiles, of which together(args) become a
// panel of the result:
//   Multiplied                              the product of their tiles
//   kPlanes                                 panels for tiles of a panel of the weight
//   unpacked_bytes(steps)                   memory for a slice of `steps` steps of as many panels
//   slice(i, first_step, steps, unpacked)   the address of a slice; it may be in the memory `unpacked`, valid for as many panels
//   tail(i, first_step, steps, is_last)     see ColumnsInPlace
//   upcoming(i, first_step, steps)          what `slice` will read
//   result(row, i)                          the place of the result
//   write(scales, row, rows, i, before, sums)

// Results of up to 32 rows, which are computed from the sums of a task, a few rows at each step of the next tiles: the units that
// multiply tiles do not wait for them.
template <class Columns>
class PendingRows {
 public:
  using Sum = typename Columns::Multiplied::Sum;

  PendingRows(const LinearArgs& args, const Columns& columns) : args_(args), columns_(columns) {}
  PendingRows(const PendingRows&) = delete;
  PendingRows& operator=(const PendingRows&) = delete;

  // See ColumnsInPlace::write. steps: the number of steps until the next `begin`.
  void begin(const float* scales, int64_t row, int64_t rows, int64_t i, const Sum* before, const Sum* sums, int64_t steps) {
    finish();
    scales_ = scales;
    row_ = row;
    rows_ = rows;
    i_ = i;
    before_ = before;
    sums_ = sums;
    rows_of_step_ = divide_up(rows, steps);
  }
  OCTAVO_INLINE void step() {
    if (rows_ > 0) write(smaller(rows_, rows_of_step_));
  }
  void finish() { write(rows_); }

 private:
  __attribute__((noinline)) void write(int64_t rows) {
    if (rows == 0) return;
    prefetch_output(args_, columns_.result(row_ + kTogether, i_), rows, 1);  // of the next pair of tiles
    columns_.write(scales_, row_, rows, i_, before_, sums_);
    if (scales_ != nullptr) scales_ += rows;
    if (before_ != nullptr) before_ += rows * kPanelColumns;
    sums_ += rows * kPanelColumns;
    row_ += rows;
    rows_ -= rows;
  }

  const LinearArgs& args_;
  const Columns& columns_;
  const float* scales_ = nullptr;
  const Sum *before_ = nullptr, *sums_ = nullptr;
  int64_t row_ = 0, rows_ = 0, i_ = 0, rows_of_step_ = 0;
};

// Work between the steps of a product.
template <class Columns>
struct BesideSlices {
  const char *columns, *rows;  // lines to prefetch: of the next slices
  int64_t column_lines, row_lines;
  PendingRows<Columns>& pending;

  OCTAVO_INLINE void step() {
    for (int64_t i = 0; i < column_lines; ++i, columns += 64) prefetch_l2(columns);
    for (int64_t i = 0; i < row_lines; ++i, rows += 64) prefetch_l2(rows);
    pending.step();
  }
  void skip(int64_t steps) {
    columns += steps * column_lines * 64;
    rows += steps * row_lines * 64;
  }
};

// asks_rows: whether to prefetch the next slice of the rows. sums: [panels][pairs][32][32].
template <class Columns>
void multiply_slices(const LinearArgs& args, Columns& columns, const SlicedRows& rows, const SlicesOfTask& task, bool asks_rows,
                     char* unpacked, typename Columns::Multiplied::Sum* sums) {
  using Product = typename Columns::Multiplied;
  using Beside = BesideSlices<Columns>;
  constexpr int64_t kSums = kTogether * kPanelColumns;
  const int64_t together = Columns::together(args);
  PendingRows<Columns> pending(args, columns);
  Tiles tiles;
  for (int64_t slice = 0; slice < rows.slices; ++slice) {
    const int64_t first_step = rows.first_step(slice), steps = rows.steps_of(slice);
    const bool is_last = slice + 1 == rows.slices, asks = asks_rows && !is_last;
    const RowsOfTiles of_slice = rows.tiles(slice);
    Beside beside{nullptr, asks ? rows.at(slice + 1, task.first_pair) : nullptr, 0,
                  asks ? smaller(kMostAskedLines, divide_up(kPairStepBytes / 64, task.panels)) : 0, pending};
    for (int64_t p = 0; p < task.panels; ++p) {
      const int64_t i = task.first_panel + p;
      const char* w = columns.slice(i, first_step, steps, unpacked);
      const char* tail = columns.tail(i, first_step, steps, is_last);
      const Upcoming next = p + 1 < task.panels ? columns.upcoming(i + 1, first_step, steps)
                            : is_last           ? columns.upcoming(task.next_panel, 0, rows.steps_of(0))
                                                : columns.upcoming(task.first_panel, first_step + steps, rows.steps_of(slice + 1));
      beside.columns = next.data;
      beside.column_lines = divide_up(next.bytes, 64 * steps * task.pairs);
      for (int64_t pair = 0; pair < task.pairs; ++pair) {
        const int64_t row = (task.first_pair + pair) * kTogether, height = smaller(kTogether, args.rows - row);
        const int64_t upper = smaller(height, int64_t{kTileHeight});
        auto* out = sums + (p * task.pairs + pair) * kSums;
        tiles.hold(heights_of_pair(upper, height - upper));
        const auto multiply = height > kTileHeight ? multiply_steps<Product, 2, Beside> : multiply_steps<Product, 1, Beside>;
        multiply(of_slice, of_slice.data + (task.first_pair + pair) * of_slice.pair_bytes, w, steps, tail, slice == 0, beside, out,
                 kPanelColumns);
        beside.skip(steps);
        if (is_last && i % together == together - 1) {
          pending.begin(of_slice.scales_from(row), row, height, i, together == 1 ? nullptr : out - task.pairs * kSums, out, steps);
        }
      }
    }
  }
  pending.finish();
}

// Whether rows are packed. For a narrow weight packing costs more than tiles of distant rows.
template <class Product>
bool packs_slices(const LinearArgs& args, int64_t steps) {
  if constexpr (Product::kAlwaysPacks) {
    return true;
  } else {
    return Product::packs(args) || steps > kShortSteps || args.n > 2 * args.k;
  }
}

template <class Columns, class Product>
void linear_of_slices(ThreadPool& pool, const LinearArgs& args, const Product& product) {
  using Multiplied = typename Columns::Multiplied;
  const int64_t steps = divide_up(divide_up(args.k, Multiplied::kDepth), kStepWords);
  const int64_t slices = divide_up(steps, kSliceSteps);
  const RowsOfTiles standing = Multiplied::as_they_stand(args);
  const bool are_packed = packs_slices<Multiplied>(args, steps);
  const SlicedRows rows = are_packed ? pack_rows_as_tiles<Multiplied>(pool, args, steps, slices)
                                     : SlicedRows{nullptr, nullptr, divide_up(args.rows, kTogether), steps, slices, &standing};
  const int64_t together = Columns::together(args), unpacked_bytes = Columns::unpacked_bytes(smaller(steps, kSliceSteps));
  const int64_t first_panel = args.first_panel * Columns::kPlanes, panels = args.num_panels * Columns::kPlanes;
  const TileTasks tasks(rows.pairs, panels / together, together, steps, pool.num_threads());
  const int64_t sums_bytes = tasks.pairs() * tasks.panels() * kTogether * kPanelColumns * 4;
  pool.reserve_local(static_cast<size_t>(unpacked_bytes + sums_bytes));
  parallel_ahead(pool, tasks.count(), [&](int64_t task, int64_t following, int thread) {
    const int64_t pair = tasks.first_pair(task), panel = tasks.first_panel(task);
    const int64_t next = tasks.first_panel(following < tasks.count() ? following : task);
    const SlicesOfTask some{pair, smaller(tasks.pairs(), rows.pairs - pair), first_panel + panel,
                            smaller(tasks.panels(), panels - panel), first_panel + next};
    char* unpacked = static_cast<char*>(pool.local(thread));
    Columns columns(args, product);
    multiply_slices(args, columns, rows, some, are_packed && !tasks.are_near(), unpacked,
                    reinterpret_cast<typename Multiplied::Sum*>(unpacked + unpacked_bytes));
  });
}

template <class Product>
void linear_of_tiles(ThreadPool& pool, const LinearArgs& args) {
  if (args.rows == 0) return;
  const Product product(args);
  const int64_t steps = divide_up(args.k, Product::kDepth * kStepWords);
  const int64_t few = steps <= kShortSteps ? kFewShortPairs : kFewPairs;
  if (args.rows <= few * kTogether) return linear_of_few_tiles(pool, args, product);
  for_each_pass(args, steps * kTileStep, [&](const LinearArgs& some) { linear_of_slices<ColumnsInPlace<Product>>(pool, some, product); });
}

#endif

}  // namespace octavo::OCTAVO_ISA
