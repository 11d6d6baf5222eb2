// Matrix products. Every output is a sum of chains of fused multiply-adds. Each chain takes kChainDepth k, ascending; chains are
// added in order, then the bias, then the result is rounded once. This is the same for any number of rows, so a row's result
// cannot depend on other rows. One chain over all k would round k times at the size of the whole sum: with 4,864 k its error in
// float32 is 5 times that of libraries, which also sum in several parts.
//
// Few rows read the packed weight straight from memory (bound by its bandwidth); many rows follow Goto and van de Geijn,
// "Anatomy of High-Performance Matrix Multiplication" (2008).
#pragma once

#include <utility>

#include "linear_args.h"
#include "parallel.h"

namespace octavo::OCTAVO_ISA {

// --- the packed weight: reads one or two consecutive k of 16 columns -----------------------------------------------------

template <class W>
struct Panel;  // kDepth: how many k one read yields; kStep: elements from one read to the next

template <>
struct Panel<float> {
  static constexpr int kDepth = 1, kStep = kPanelColumns;
  static OCTAVO_INLINE void read(const float* p, int group, Vec (&out)[1]) { out[0] = load(p + group * kLanes); }
};

template <>
struct Panel<f16> {
  static constexpr int kDepth = 1, kStep = kPanelColumns;
  static OCTAVO_INLINE void read(const f16* p, int group, Vec (&out)[1]) { out[0] = load(p + group * kLanes); }
};

template <>
struct Panel<bf16> {  // a 32-bit lane holds k (lower half) and k + 1 (upper half): no shuffle is needed
  static constexpr int kDepth = 2, kStep = 2 * kPanelColumns;
  static OCTAVO_INLINE void read(const bf16* p, int group, Vec (&out)[2]) {
    const IVec raw = load_int(p + group * 2 * kLanes);
    out[0] = as_float(shift_left<16>(raw));
    out[1] = as_float(raw & splat_int(0xFFFF0000u));
  }
};

template <class W>
OCTAVO_INLINE int64_t padded_depth(int64_t k) {
  return divide_up(k, Panel<W>::kDepth) * Panel<W>::kDepth;
}

template <class W>
OCTAVO_INLINE int64_t panel_size(int64_t k) {
  return padded_depth<W>(k) * kPanelColumns;
}

constexpr int64_t kPrefetchBytes = 3072;  // distance of prefetches, per stream: covers about the latency of memory

// --- the micro-kernel ---------------------------------------------------------------------------------------------------

// What a chain does with the sums in its output: replaces them, begins with them, or is added to them at its end.
enum class Chain { kFresh, kContinued, kAdded };

constexpr int64_t kChainDepth = 64;

// A chain over k of a[k * kStrideK + m * kStrideM] * w[k][column] into c[m][column] for M rows and P panels of V * 16 columns.
// float32 panels come from a cache; meanwhile k lines from `ahead` on are prefetched from memory. 16-bit panels come from memory
// and are prefetched themselves.
template <int M, int P, int V, int kStrideK, int kStrideM, class W>
OCTAVO_INLINE void multiply_tile(const float* a, const W* w, int64_t panel_stride, int64_t k, float* c,
                                 int64_t c_stride, Chain chain, const char* ahead) {
  constexpr int kDepth = Panel<W>::kDepth, kAhead = kPrefetchBytes / sizeof(W);
  Vec sum[M][P * V];
  OCTAVO_UNROLL
  for (int m = 0; m < M; ++m) {
    OCTAVO_UNROLL
    for (int j = 0; j < P * V; ++j) {
      sum[m][j] = chain == Chain::kContinued ? load(c + m * c_stride + j * kLanes) : splat(0.0f);
    }
  }
  for (int64_t i = 0; i < k; i += kDepth) {
    Vec columns[P * V][kDepth];
    OCTAVO_UNROLL
    for (int p = 0; p < P; ++p) {
      const W* row = w + p * panel_stride;
      if (sizeof(W) == 2) {
        OCTAVO_UNROLL
        for (int line = 0; line < kDepth; ++line) prefetch_l2(row + kAhead + line * 32);
      }
      OCTAVO_UNROLL
      for (int j = 0; j < V; ++j) Panel<W>::read(row, j, columns[p * V + j]);
    }
    if (sizeof(W) == 4) __builtin_prefetch(ahead + i * 64);
    w += Panel<W>::kStep;
    OCTAVO_UNROLL
    for (int d = 0; d < kDepth; ++d) {
      OCTAVO_UNROLL
      for (int m = 0; m < M; ++m) {
        const Vec value = splat(a[d * kStrideK + m * kStrideM]);
        OCTAVO_UNROLL
        for (int j = 0; j < P * V; ++j) sum[m][j] = fma(value, columns[j][d], sum[m][j]);
      }
    }
    a += kDepth * kStrideK;
  }
  OCTAVO_UNROLL
  for (int m = 0; m < M; ++m) {
    OCTAVO_UNROLL
    for (int j = 0; j < P * V; ++j) {
      float* place = c + m * c_stride + j * kLanes;
      store(place, chain == Chain::kAdded ? load(place) + sum[m][j] : sum[m][j]);
    }
  }
}

// Sizes that fit the registers: rows and 16-column groups of a tile of one panel; rows and panels of a tile of the blocked
// product, which loads fewer values for as many multiply-adds; rows that read the weight directly, and the accumulators of rows
// that are few enough to take several panels together.
#if defined(OCTAVO_ISA_AVX512)
constexpr int kTileRows = 14, kTileGroups = 2, kBlockTileRows = 6, kBlockTilePanels = 2, kDirectRows = 12, kDirectSums = 16;
#elif defined(OCTAVO_ISA_AVX2)
constexpr int kTileRows = 6, kTileGroups = 1, kBlockTileRows = 6, kBlockTilePanels = 1, kDirectRows = 3, kDirectSums = 6;
#else
constexpr int kTileRows = 3, kTileGroups = 1, kBlockTileRows = 3, kBlockTilePanels = 1, kDirectRows = 2, kDirectSums = 4;
#endif

// Multiplies one panel of 32 columns by M packed rows: a is [k][M] if kStrideK is 0, else strided.
template <int M, int kStrideK, int kStrideM>
void multiply_panel(const float* a, const float* w, int64_t k, float* c, int64_t c_stride, Chain chain,
                    const void* ahead) {
  constexpr int kK = kStrideK == 0 ? M : kStrideK;
  for (int column = 0; column < kPanelColumns; column += kTileGroups * kLanes) {
    multiply_tile<M, 1, kTileGroups, kK, kStrideM>(a, w + column, 0, k, c + column, c_stride, chain,
                                                    static_cast<const char*>(ahead));
  }
}

using PanelFunction = decltype(&multiply_panel<1, 0, 1>);

// multiply_panel for 1 .. kTileRows rows.
template <int kStrideK, int kStrideM>
struct PanelFunctions {
  PanelFunction of_rows[kTileRows + 1];
  constexpr PanelFunctions() : PanelFunctions(std::make_integer_sequence<int, kTileRows>()) {}
  template <int... I>
  constexpr explicit PanelFunctions(std::integer_sequence<int, I...>)
      : of_rows{nullptr, multiply_panel<I + 1, kStrideK, kStrideM>...} {}
};

constexpr PanelFunctions<0, 1> kMultiplyPacked;
constexpr PanelFunctions<1, kChainDepth> kMultiplySlices;

// Multiplies kBlockTilePanels panels, `panel_stride` apart, by M rows of a slice.
template <int M>
void multiply_block_tile(const float* a, const float* w, int64_t panel_stride, int64_t k, float* c, int64_t c_stride,
                         Chain chain, const void* ahead) {
  if constexpr (kBlockTilePanels == 1) {
    multiply_panel<M, 1, kChainDepth>(a, w, k, c, c_stride, chain, ahead);
  } else {
    multiply_tile<M, kBlockTilePanels, kPanelColumns / kLanes, 1, kChainDepth>(a, w, panel_stride, k, c, c_stride, chain,
                                                                               static_cast<const char*>(ahead));
  }
}

// multiply_block_tile for 1 .. kBlockTileRows rows.
struct BlockTileFunctions {
  decltype(&multiply_block_tile<1>) of_rows[kBlockTileRows + 1];
  constexpr BlockTileFunctions() : BlockTileFunctions(std::make_integer_sequence<int, kBlockTileRows>()) {}
  template <int... I>
  constexpr explicit BlockTileFunctions(std::integer_sequence<int, I...>) : of_rows{nullptr, multiply_block_tile<I + 1>...} {}
};

constexpr BlockTileFunctions kMultiplyBlockTile;

// --- activations and results ----------------------------------------------------------------------------------------------

// Writes the first `count` lanes of each of m rows as [lanes][m], without interpreting their bits, and nothing after them.
// `rows` is overwritten.
inline void turn_rows(Vec (&rows)[kLanes], int64_t m, int64_t count, float* out) {
  constexpr int64_t kFew = 4;  // rows whose lanes are moved one by one
  count = smaller(count, int64_t{kLanes});
  if (m == 1) {
    store_first(out, rows[0], count);
  } else if (m <= kFew) {
    float lanes[kFew][kLanes];
    for (int64_t r = 0; r < m; ++r) store(lanes[r], rows[r]);
    for (int64_t i = 0; i < count; ++i, out += m) {
      for (int64_t r = 0; r < m; ++r) std::memcpy(out + r, &lanes[r][i], sizeof(float));
    }
  } else {
    for (int64_t r = m; r < kLanes; ++r) rows[r] = splat(0.0f);
    transpose(rows);
    for (int64_t i = 0; i < count; ++i, out += m) {  // the next lanes overwrite the surplus
      store_first(out, rows[i], (count - i) * m >= kLanes ? int64_t{kLanes} : m);
    }
  }
}

// Packs rows first .. first + m of x, at most 16, as float32 [depth][m]; k past the row is zero.
template <class X>
void pack_rows(const LinearArgs& args, int64_t first, int64_t m, int64_t depth, float* packed) {
  const X* x = static_cast<const X*>(args.x) + first * args.x_stride;
  for (int64_t i = 0; i < depth; i += kLanes) {
    Vec block[kLanes];
    for (int64_t r = 0; r < m; ++r) block[r] = load_first(x + r * args.x_stride + i, larger(int64_t{0}, args.k - i));
    turn_rows(block, m, depth - i, packed + i * m);
  }
}

OCTAVO_INLINE void pack_rows(const LinearArgs& args, int64_t first, int64_t m, int64_t depth, float* packed) {
  if (args.x_dtype == DType::kFloat32) {
    pack_rows<float>(args, first, m, depth, packed);
  } else {
    pack_rows<bf16>(args, first, m, depth, packed);
  }
}

// The place of some rows and columns in a result: the address of the first, and the bytes from one row to the next.
struct Place {
  char* data;
  int64_t row_bytes;
};

OCTAVO_INLINE int64_t bytes_of_result(const LinearArgs& args, int64_t columns) {
  return columns * (args.out_dtype == DType::kFloat32 ? 4 : 2);
}

OCTAVO_INLINE Place place_of(const LinearArgs& args, int64_t row, int64_t column) {
  const int64_t row_bytes = bytes_of_result(args, args.out_stride);
  return {static_cast<char*>(args.out) + row * row_bytes + bytes_of_result(args, column), row_bytes};
}

// The same rows of the panel that is `panels` further to the right.
OCTAVO_INLINE Place right_of(const LinearArgs& args, Place place, int64_t panels) {
  return {place.data + bytes_of_result(args, panels * kPanelColumns), place.row_bytes};
}

// Prefetches the memory of `rows` x `panels` panels of the output, which is about to be written.
OCTAVO_INLINE void prefetch_output(const LinearArgs& args, Place out, int64_t rows, int64_t panels) {
  for (int64_t m = 0; m < rows; ++m, out.data += out.row_bytes) {
    for (int64_t i = 0; i < bytes_of_result(args, panels * kPanelColumns); i += 64) __builtin_prefetch(out.data + i, 1);
  }
}

// Adds the bias, rounds and writes `rows` x `columns` sums to the result's columns from `first_column` on.
template <class Out>
void write_sums(const LinearArgs& args, const float* sums, int64_t stride, int64_t rows, int64_t first_column,
                int64_t columns, Place out) {
  columns = smaller(columns, args.n - first_column);
  for (int64_t r = 0; r < rows; ++r, out.data += out.row_bytes) {
    for (int64_t j = 0; j < columns; j += kLanes) {
      Vec value = load(sums + r * stride + j);
      if (args.bias != nullptr) value = value + load(args.bias + first_column + j);
      store_first(reinterpret_cast<Out*>(out.data) + j, value, columns - j);
    }
  }
}

OCTAVO_INLINE void write_sums(const LinearArgs& args, const float* sums, int64_t stride, int64_t rows, int64_t first_column,
                              int64_t columns, Place out) {
  if (args.out_dtype == DType::kFloat32) {
    write_sums<float>(args, sums, stride, rows, first_column, columns, out);
  } else {
    write_sums<bf16>(args, sums, stride, rows, first_column, columns, out);
  }
}

// --- few rows: several panels together, straight from memory --------------------------------------------------------------

// Multiplies P panels from `panel` on by M rows from `row` on; a: these rows, [depth][M].
template <int M, int P, class W>
void multiply_direct(const LinearArgs& args, const float* a, int64_t row, int64_t panel) {
  const int64_t size = panel_size<W>(args.k), depth = padded_depth<W>(args.k);
  const W* w = static_cast<const W*>(args.weight) + panel * size;
  float sums[M * P * kPanelColumns];
  constexpr int kGroups = kPanelColumns / kLanes;
  const char* ahead = reinterpret_cast<const char*>(w) + kPrefetchBytes;
  for (int64_t k = 0; k < depth; k += kChainDepth) {
    multiply_tile<M, P, kGroups, M, 1>(a + k * M, w + k * kPanelColumns, size, smaller(kChainDepth, depth - k), sums,
                                       P * kPanelColumns, k == 0 ? Chain::kFresh : Chain::kAdded, ahead + k * 64);
  }
  const int64_t column = panel * kPanelColumns;
  write_sums(args, sums, P * kPanelColumns, M, column, P * kPanelColumns, place_of(args, row, column));
}

// multiply_direct of one panel for 1 .. kDirectRows rows.
template <class W>
struct DirectFunctions {
  decltype(&multiply_direct<1, 1, W>) of_rows[kDirectRows + 1];
  constexpr DirectFunctions() : DirectFunctions(std::make_integer_sequence<int, kDirectRows>()) {}
  template <int... I>
  constexpr explicit DirectFunctions(std::integer_sequence<int, I...>)
      : of_rows{nullptr, multiply_direct<I + 1, 1, W>...} {}
};

template <int M, class W>
void linear_direct(ThreadPool& pool, const LinearArgs& args) {
  // Enough chains to hide the latency of a multiply-add, but so few that they stay in registers.
  constexpr int kPanels = kDirectSums / (M * kPanelColumns / kLanes);
  constexpr int P = kPanels < 1 ? 1 : kPanels > 4 ? 4 : kPanels;
  const int64_t depth = padded_depth<W>(args.k);
  float* a = static_cast<float*>(pool.shared(static_cast<size_t>(depth * M) * sizeof(float)));
  pack_rows(args, 0, M, depth, a);
  parallel(pool, divide_up(args.num_panels, int64_t{P}), [&](int64_t task, int) {
    const int64_t first = args.first_panel + task * P;
    if (first + P <= args.end_panel()) {
      multiply_direct<M, P, W>(args, a, 0, first);
    } else {
      for (int64_t panel = first; panel < args.end_panel(); ++panel) multiply_direct<M, 1, W>(args, a, 0, panel);
    }
  });
}

// Up to 2 * kDirectRows rows, in two halves: the second half finds the panel in the cache.
template <class W>
void linear_direct_twice(ThreadPool& pool, const LinearArgs& args) {
  static constexpr DirectFunctions<W> kMultiply;
  const int64_t depth = padded_depth<W>(args.k), half = divide_up(args.rows, 2), rest = args.rows - half;
  float* a = static_cast<float*>(pool.shared(static_cast<size_t>(depth * args.rows) * sizeof(float)));
  pack_rows(args, 0, half, depth, a);
  pack_rows(args, half, rest, depth, a + half * depth);
  parallel(pool, args.num_panels, [&](int64_t task, int) {
    const int64_t panel = args.first_panel + task;
    kMultiply.of_rows[half](args, a, 0, panel);
    kMultiply.of_rows[rest](args, a + half * depth, half, panel);
  });
}

template <int M, class W>
void linear_few(ThreadPool& pool, const LinearArgs& args) {
  if constexpr (M > 0) {
    if (args.rows == M) {
      linear_direct<M, W>(pool, args);
    } else {
      linear_few<M - 1, W>(pool, args);
    }
  }
}

// --- many rows: blocks that stay in cache ---------------------------------------------------------------------------------

constexpr int64_t kBlockRows = 24 * kTileRows;  // rows of one block: kChainDepth of them stay in L2
constexpr int64_t kMaxGroupPanels = 4;          // panels of one task
static_assert(kMaxGroupPanels % kBlockTilePanels == 0);

// Unpacks `depth` k of one panel as float32 [depth][32].
template <class W>
OCTAVO_INLINE void unpack_panel(const W* w, int64_t depth, float* out) {
  constexpr int kDepth = Panel<W>::kDepth;
  for (int64_t i = 0; i < depth; i += kDepth) {
    for (int group = 0; group < kPanelColumns / kLanes; ++group) {
      Vec values[kDepth];
      Panel<W>::read(w, group, values);
      for (int d = 0; d < kDepth; ++d) store(out + d * kPanelColumns + group * kLanes, values[d]);
    }
    w += Panel<W>::kStep;
    out += kDepth * kPanelColumns;
  }
}

struct RowBlock {
  const float* slices;  // [ceil(depth / kChainDepth)][rows][kChainDepth]
  int64_t first;
  int64_t rows;
  int64_t tile_rows;
  int64_t depth;
};

// Widens rows first .. last of a block to float32 in its slices. Values after the last k are zero up to `depth`.
template <class X>
void widen_rows(const LinearArgs& args, const RowBlock& block, int64_t first, int64_t last, float* slices) {
  for (int64_t row = first; row < last; ++row) {
    const X* x = static_cast<const X*>(args.x) + (block.first + row) * args.x_stride;
    for (int64_t k = 0; k < block.depth; k += kChainDepth) {
      float* out = slices + (k / kChainDepth * block.rows + row) * kChainDepth;
      for (int64_t i = k; i < smaller(k + kChainDepth, block.depth); i += kLanes, out += kLanes) {
        store(out, load_first(x + i, larger(int64_t{0}, args.k - i)));
      }
    }
  }
}

// Multiplies panels first .. first + count by all rows of a block: one chain of several panels, which stay in L1, for one tile of
// rows after the other.
template <class W>
void multiply_group(const LinearArgs& args, const RowBlock& block, int64_t first, int64_t count, float* scratch) {
  constexpr bool kUnpacks = !std::is_same_v<W, float>;
  float* unpacked = scratch;
  float* sums = scratch + kBlockTilePanels * kChainDepth * kPanelColumns;
  const int64_t stride = count * kPanelColumns;
  const int64_t size = panel_size<W>(args.k), unpacked_size = kUnpacks ? kChainDepth * kPanelColumns : size;
  const W* weight = static_cast<const W*>(args.weight) + first * size;
  for (int64_t k = 0; k < block.depth; k += kChainDepth) {
    const int64_t depth = smaller(kChainDepth, block.depth - k);
    for (int64_t panel = 0; panel < count; panel += kBlockTilePanels) {
      const W* source = weight + panel * size + k * kPanelColumns;
      const W* next = panel + kBlockTilePanels < count ? source + kBlockTilePanels * size : weight + (k + depth) * kPanelColumns;
      const int64_t here = smaller(int64_t{kBlockTilePanels}, count - panel);  // the last panel may be alone
      if (kUnpacks) {
        for (int64_t p = 0; p < here; ++p) unpack_panel<W>(source + p * size, depth, unpacked + p * unpacked_size);
      }
      const float* w = kUnpacks ? unpacked : reinterpret_cast<const float*>(source);
      for (int64_t row = 0, tile = 0; row < block.rows; row += block.tile_rows, ++tile) {
        const int64_t rows = smaller(block.tile_rows, block.rows - row);
        const float* a = block.slices + (k / kChainDepth * block.rows + row) * kChainDepth;
        const void* ahead = tile < kBlockTilePanels ? static_cast<const void*>(next + tile * size) : a;
        float* out = sums + row * stride + panel * kPanelColumns;
        const Chain chain = k == 0 ? Chain::kFresh : Chain::kAdded;
        if (here == kBlockTilePanels) {
          kMultiplyBlockTile.of_rows[rows](a, w, unpacked_size, depth, out, stride, chain, ahead);
        } else {
          kMultiplySlices.of_rows[rows](a, w, depth, out, stride, chain, ahead);
        }
      }
    }
  }
  const int64_t column = first * kPanelColumns;
  write_sums(args, sums, stride, block.rows, column, stride, place_of(args, block.first, column));
}

// The most panels per task with which every thread has several tasks, and equally many if the tasks are few.
inline int64_t panels_of_a_task(int64_t panels, int64_t threads, int64_t most) {
  int64_t group = most;
  while (group > 1) {
    const int64_t tasks = divide_up(panels, group);
    if (tasks >= 16 * threads || (tasks >= 4 * threads && panels % (group * threads) == 0)) break;
    --group;
  }
  return group;
}

template <class W>
void linear_many(ThreadPool& pool, const LinearArgs& args) {
  const int64_t depth = padded_depth<W>(args.k), panels = args.num_panels;
  const int64_t most_rows = smaller(args.rows, kBlockRows);
  const int64_t tile_panels = divide_up(panels, int64_t{kBlockTilePanels});
  const int64_t group = kBlockTilePanels * panels_of_a_task(tile_panels, pool.num_threads(), kMaxGroupPanels / kBlockTilePanels);
  const int64_t row_size = divide_up(depth, kChainDepth) * kChainDepth;
  auto* slices = static_cast<float*>(pool.shared(static_cast<size_t>(most_rows * row_size) * sizeof(float)));
  pool.reserve_local(static_cast<size_t>(kPanelColumns * (kBlockTilePanels * kChainDepth + most_rows * group)) * sizeof(float));
  for (int64_t first = 0; first < args.rows; first += kBlockRows) {
    const int64_t rows = smaller(kBlockRows, args.rows - first);
    const int64_t tile_rows = divide_up(rows, divide_up(rows, int64_t{kBlockTileRows}));  // tiles of nearly equal height
    const RowBlock block{slices, first, rows, tile_rows, depth};
    const auto widen = args.x_dtype == DType::kFloat32 ? widen_rows<float> : widen_rows<bf16>;
    parallel_ranges(pool, rows, kTileRows, [&](int64_t begin, int64_t end) { widen(args, block, begin, end, slices); });
    parallel(pool, divide_up(panels, group), [&](int64_t task, int thread) {
      const int64_t panel = args.first_panel + task * group;
      multiply_group<W>(args, block, panel, smaller(group, args.end_panel() - panel), static_cast<float*>(pool.local(thread)));
    });
  }
}

template <class W>
void linear_of(ThreadPool& pool, const LinearArgs& args) {
  if (args.rows > 2 * kDirectRows) {
    linear_many<W>(pool, args);
  } else if (args.rows > kDirectRows) {
    linear_direct_twice<W>(pool, args);
  } else {
    linear_few<kDirectRows, W>(pool, args);
  }
}

}  // namespace octavo::OCTAVO_ISA
