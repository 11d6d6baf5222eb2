// Matrix products of bfloat16 weights and bfloat16 activations by the processor's instruction for pairs: each lane of a sum takes
// the two products of k and k + 1 in one step, twice as many per second as in float32.
//
// Every output is a sum of chains of such steps. Each chain takes kPairChainDepth k, ascending; chains are added in order, then the
// bias, then the result is rounded once. This is the same for any number of rows. The instruction has its own rounding between the
// two products (and treats subnormal numbers as zero). So results differ in their last bits from those of other instruction sets,
// as do results of oneDNN, which uses it, too.
#pragma once

#include "quantized_rows.h"

namespace octavo::OCTAVO_ISA {

#if defined(OCTAVO_ISA_BF16)

constexpr int kPairRows = 14, kPairSums = 16;   // rows of a tile; accumulators of few rows, which take several panels together
constexpr int64_t kPairBytes = 4 * kPanelColumns;  // two k of one panel
// The end of a chain moves a tile's sums to memory and back, which takes a twentieth of the time of a chain of 64 k. With 256 k,
// the error of results in float32 is at most 1.11 times that of plain torch (k of 64 to 8,192).
constexpr int64_t kPairChainDepth = 256;

// A tile of rows as the product reads them: in place, or packed as [pairs of k][rows].
struct PairTile {
  const char* pairs;   // the first one
  int64_t row_bytes;   // from a row to the next
  int64_t pair_bytes;  // from a pair to the next
};

// Packs `m` rows from row `first` on as [pairs of k][m]; k past the row is zero.
inline void pack_pairs(const LinearArgs& args, int64_t m, int64_t first, uint32_t* words) {
  const int64_t pairs = divide_up(args.k, 2);
  const bf16* x = static_cast<const bf16*>(args.x) + first * args.x_stride;
  for (int64_t i = 0; i < pairs; i += kLanes) {
    const int64_t values = smaller(int64_t{2 * kLanes}, args.k - 2 * i);
    Vec block[kLanes];
    for (int64_t r = 0; r < m; ++r) {
      const bf16* row = x + r * args.x_stride + 2 * i;
      if (values == 2 * kLanes) {
        block[r] = as_float(load_int(row));
      } else {
        bf16 buffer[2 * kLanes] = {};
        std::memcpy(buffer, row, static_cast<size_t>(values) * sizeof(bf16));
        block[r] = as_float(load_int(buffer));
      }
    }
    turn_rows(block, m, pairs - i, reinterpret_cast<float*>(words + i * m));
  }
}

// Multiplies P panels from `panel` on by the M rows of a tile.
template <int M, int P>
void multiply_pairs(const LinearArgs& args, const PairTile& tile, int64_t panel, Place out, Ahead ahead) {
  constexpr int V = kPanelColumns / kLanes;
  constexpr bool kAsksAhead = P == 1 || kFewRowsAskAhead;
  constexpr int64_t kChainBytes = kPairChainDepth / 2 * kPairBytes;
  alignas(64) float totals[P][M][kPanelColumns];
  const int64_t bytes = divide_up(args.k, 2) * kPairBytes;
  const char* w = static_cast<const char*>(args.weight) + panel * bytes;
  const char* x = tile.pairs;
  ahead.ask_rows(P);
  for (int64_t chain = 0; chain < bytes; chain += kChainBytes) {
    Vec sums[P][M][V];
    OCTAVO_UNROLL
    for (int p = 0; p < P; ++p) {
      OCTAVO_UNROLL
      for (int m = 0; m < M; ++m) {
        OCTAVO_UNROLL
        for (int v = 0; v < V; ++v) sums[p][m][v] = splat(0.0f);
      }
    }
    for (int64_t offset = chain; offset < smaller(chain + kChainBytes, bytes); offset += kPairBytes) {
      IVec columns[P][V];
      OCTAVO_UNROLL
      for (int p = 0; p < P; ++p) {
        const char* line = w + p * bytes + offset;
        OCTAVO_UNROLL
        for (int v = 0; v < V; ++v) prefetch_l2(line + kStreamPrefetchBytes + v * 64);
        if (kAsksAhead) ahead.ask(p);
        OCTAVO_UNROLL
        for (int v = 0; v < V; ++v) columns[p][v] = load_int(line + v * 64);
      }
      OCTAVO_UNROLL
      for (int m = 0; m < M; ++m) {
        uint32_t pair;
        std::memcpy(&pair, x + m * tile.row_bytes, sizeof(pair));
        const IVec two = splat_int(pair);
        OCTAVO_UNROLL
        for (int p = 0; p < P; ++p) {
          OCTAVO_UNROLL
          for (int v = 0; v < V; ++v) sums[p][m][v] = add_pair_products(sums[p][m][v], two, columns[p][v]);
        }
      }
      if (kAsksAhead) ahead.step();
      x += tile.pair_bytes;
    }
    OCTAVO_UNROLL
    for (int p = 0; p < P; ++p) {
      OCTAVO_UNROLL
      for (int m = 0; m < M; ++m) {
        OCTAVO_UNROLL
        for (int v = 0; v < V; ++v) {
          float* place = &totals[p][m][v * kLanes];
          store(place, chain == 0 ? sums[p][m][v] : load(place) + sums[p][m][v]);
        }
      }
    }
  }
  for (int p = 0; p < P; ++p) {
    write_sums(args, totals[p][0], kPanelColumns, M, (panel + p) * kPanelColumns, kPanelColumns, right_of(args, out, p));
  }
}

// Multiplies `count` panels from `first` on by a tile of M rows, as many together as there are registers for.
template <int M>
void multiply_pair_panels(const LinearArgs& args, const PairTile& tile, int64_t first, int64_t count, Place out,
                          Ahead ahead) {
  constexpr int kAtOnce = panels_at_once(M, kPairSums);
  for_each_panel<kAtOnce>(args, count, out, ahead, [&](auto at_once, int64_t panel, Place place, const Ahead& next) {
    multiply_pairs<M, at_once>(args, tile, first + panel, place, next);
  });
}

// multiply_pair_panels for 1 .. kPairRows rows.
struct PairFunctions {
  decltype(&multiply_pair_panels<1>) of_rows[kPairRows + 1];
  constexpr PairFunctions() : PairFunctions(std::make_integer_sequence<int, kPairRows>()) {}
  template <int... I>
  constexpr explicit PairFunctions(std::integer_sequence<int, I...>)
      : of_rows{nullptr, multiply_pair_panels<I + 1>...} {}
};

constexpr int64_t kFewPanels = 64;  // with so few panels, packing rows does not pay

// The product in blocks of rows that stay in cache, each of tiles of nearly equal height. Rows are packed if several tiles are
// multiplied by many panels, or if k is odd.
inline void linear_of_pairs(ThreadPool& pool, const LinearArgs& args) {
  if (args.rows == 0) return;
  static constexpr PairFunctions kMultiply;
  const int64_t pairs = divide_up(args.k, 2), panels = args.num_panels;
  const int64_t most_rows = larger(int64_t{1}, kBlockBytes / (4 * pairs) / kPairRows) * kPairRows;
  const int64_t block_rows = rows_of_a_block(args.rows, most_rows, kPairRows);
  const bool packs = args.k % 2 != 0 || (block_rows > kPairRows && panels > kFewPanels);
  const PanelMemory weight{static_cast<const char*>(args.weight), pairs * kPairBytes, pairs};
  auto* words = static_cast<uint32_t*>(pool.shared(packs ? static_cast<size_t>(block_rows * pairs) * sizeof(uint32_t) : 1));
  for (int64_t first = 0; first < args.rows; first += block_rows) {
    const BlockOfRows block(first, smaller(block_rows, args.rows - first), kPairRows);
    if (packs) {
      parallel(pool, block.tiles(), [&](int64_t tile, int) {
        const int64_t row = tile * block.tile_rows;
        pack_pairs(args, block.rows_of(tile), first + row, words + row * pairs);
      });
    }
    const auto tile_at = [&](int64_t tile) {
      const int64_t row = tile * block.tile_rows;
      if (packs) return PairTile{reinterpret_cast<const char*>(words + row * pairs), 4, 4 * block.rows_of(tile)};
      const bf16* x = static_cast<const bf16*>(args.x) + (first + row) * args.x_stride;
      return PairTile{reinterpret_cast<const char*>(x), 2 * args.x_stride, 4};
    };
    multiply_block(pool, args, block, weight, panels_at_once(static_cast<int>(block.tile_rows), kPairSums),
                   [&](int64_t tile, int64_t panel, int64_t count, Place out, const Ahead& ahead) {
                     kMultiply.of_rows[block.rows_of(tile)](args, tile_at(tile), panel, count, out, ahead);
                   });
  }
}

#endif

}  // namespace octavo::OCTAVO_ISA
