// Matrix products of int8 weights (one scale per output column) and activations that the product quantizes (one scale per row).
// Both are rotated before they are rounded (rotation.h). Sums of integers are exact, so the result is one expression for any order
// and any number of rows:
//
//   out = float(sum of x w) * (scale of the row * scale of the column) + bias, each operation rounded once
#pragma once

#include "quantized_rows.h"

namespace octavo::OCTAVO_ISA {

// Sizes that fit the registers: rows of a tile, accumulators of a tile, and accumulators if rows are few enough to take several
// panels together.
#if defined(OCTAVO_ISA_AVX512)
constexpr int kByteRows = 14, kMostByteSums = 28, kByteSums = 16;
#else
constexpr int kByteRows = 4, kMostByteSums = 4, kByteSums = 6;
#endif

constexpr int64_t kGroupBytes = 4 * kPanelColumns;  // four k of one panel

// With so few tiles, a panel is read as soon as it arrives from memory, so the tiles prefetch during the whole product.
constexpr int64_t kFewTiles = 12;

OCTAVO_INLINE int64_t byte_groups(int64_t k) { return divide_up(k, 4); }

// A packed int8 weight: panels, then scales and sums of the columns.
struct ByteWeight {
  static constexpr int kRows = kByteRows;

  const int8_t* panels;
  const float* scales;
  const int32_t* sums;
  int64_t panel_bytes;

  ByteWeight(const void* packed, int64_t n, int64_t k)
      : panels(static_cast<const int8_t*>(packed)), panel_bytes(byte_groups(k) * kGroupBytes) {
    const int64_t count = divide_up(n, kPanelColumns);
    scales = reinterpret_cast<const float*>(panels + count * panel_bytes);
    sums = reinterpret_cast<const int32_t*>(scales + count * kPanelColumns);
  }
  explicit ByteWeight(const LinearArgs& args) : ByteWeight(args.weight, args.n, args.k) {}

  static constexpr int group_panels(int rows) { return panels_at_once(rows, kByteSums); }
  // With many tiles, each prefetches its share at first, and then only computes.
  int64_t panel_steps(int rows, int64_t tiles) const {
    if (tiles <= kFewTiles) return panel_bytes / kGroupBytes * (kPanelVecs / vecs_at_once(rows, kMostByteSums));
    return divide_up(panel_bytes, tiles * Ahead::kAskedBytes);
  }
  ByteLayout layout() const { return {panel_bytes / kGroupBytes, kByteOffset, 0, 0, 0, true}; }

  template <int M>
  static void multiply(const LinearArgs& args, const ByteWeight& weight, const ByteTile& tile, int64_t first,
                       int64_t count, Place out, Ahead ahead);
};

template <int V, class Out>
OCTAVO_INLINE void store_columns(Out* out, const Vec (&value)[V], int64_t count) {
  if (count >= V * kLanes) {
    static_assert(V <= 2);
    V == 2 ? store_two(out, value[0], value[V - 1]) : store(out, value[0]);
  } else {
    for (int v = 0; v < V; ++v) store_first(out + v * kLanes, value[v], larger(int64_t{0}, count - v * kLanes));
  }
}

// Writes `rows` x 32 columns: scales the sums and adds the bias. kOffset: the number that was added to every byte of the rows.
template <int kOffset, class Out, bool kHasBias>
void write_byte_sums_as(const LinearArgs& args, const ByteWeight& weight, const float* row_scales, int64_t rows,
                        int64_t first_column, const int32_t* sums, Place out) {
  Vec scale[kPanelVecs], bias[kPanelVecs];
  IVec offset[kPanelVecs];
  OCTAVO_UNROLL
  for (int v = 0; v < kPanelVecs; ++v) {
    const int64_t column = first_column + v * kLanes;
    scale[v] = load(weight.scales + column);
    static_assert(kOffset == 0 || kOffset == 128);
    offset[v] = kOffset == 0 ? splat_int(0) : shift_left<7>(load_int(weight.sums + column));
    bias[v] = kHasBias ? load(args.bias + column) : splat(0.0f);
  }
  const int64_t count = args.n - first_column;
  for (int64_t m = 0; m < rows; ++m, out.data += out.row_bytes) {
    Vec value[kPanelVecs];
    OCTAVO_UNROLL
    for (int v = 0; v < kPanelVecs; ++v) {
      const IVec sum = load_int(sums + m * kPanelColumns + v * kLanes) - offset[v];
      value[v] = to_float(sum) * (splat(row_scales[m]) * scale[v]);
      if (kHasBias) value[v] = value[v] + bias[v];
    }
    store_columns(reinterpret_cast<Out*>(out.data), value, count);
  }
}

template <int kOffset>
void write_byte_sums(const LinearArgs& args, const ByteWeight& weight, const float* row_scales, int64_t rows,
                     int64_t first_column, const int32_t* sums, Place out) {
  const bool is_wide = args.out_dtype == DType::kFloat32, has_bias = args.bias != nullptr;
  const auto write = is_wide ? has_bias ? write_byte_sums_as<kOffset, float, true> : write_byte_sums_as<kOffset, float, false>
                     : has_bias ? write_byte_sums_as<kOffset, bf16, true>
                                : write_byte_sums_as<kOffset, bf16, false>;
  write(args, weight, row_scales, rows, first_column, sums, out);
}

// Multiplies V vectors of columns, from vector `vec` on, of P panels from `w` on, by the M rows of a tile.
template <int M, int P, int V>
OCTAVO_INLINE void sum_bytes(const ByteWeight& weight, const ByteTile& tile, const int8_t* w, int vec, Ahead& ahead,
                             int32_t (&out)[P][M][kPanelColumns]) {
  constexpr bool kAsksAhead = P == 1 || kFewRowsAskAhead;
  constexpr int64_t kNear = P == 1 ? kPrefetchBytes : kStreamPrefetchBytes;
  IVec sums[P][M][V];
  OCTAVO_UNROLL
  for (int p = 0; p < P; ++p) {
    OCTAVO_UNROLL
    for (int m = 0; m < M; ++m) {
      OCTAVO_UNROLL
      for (int v = 0; v < V; ++v) sums[p][m][v] = splat_int(0);
    }
  }
  const uint8_t* x = tile.bytes;
  const int8_t* group = w + vec * 4 * kLanes;
  const auto add_group = [&](auto asks) __attribute__((always_inline)) {
    IVec columns[P][V];
    OCTAVO_UNROLL
    for (int p = 0; p < P; ++p) {
      const int8_t* line = group + p * weight.panel_bytes;
      if (asks) {
        OCTAVO_UNROLL
        for (int v = 0; v < V; ++v) prefetch_l2(line + kNear + v * 64);
        if (kAsksAhead) ahead.ask(p);
      }
      OCTAVO_UNROLL
      for (int v = 0; v < V; ++v) columns[p][v] = load_int(line + v * 4 * kLanes);
    }
    OCTAVO_UNROLL
    for (int m = 0; m < M; ++m) {
      uint32_t word;
      std::memcpy(&word, x + m * 4, 4);
      const IVec four = splat_int(word);
      OCTAVO_UNROLL
      for (int p = 0; p < P; ++p) {
        OCTAVO_UNROLL
        for (int v = 0; v < V; ++v) sums[p][m][v] = add_byte_products(sums[p][m][v], four, columns[p][v]);
      }
    }
    if (asks && kAsksAhead) ahead.step();
    x += M * 4;
    group += kGroupBytes;
  };
  const int8_t* const end = group + weight.panel_bytes;
  const int8_t* const asked = group + ahead.take_steps(weight.panel_bytes / kGroupBytes) * kGroupBytes;
  const int64_t apart = (end - asked) / (kGroupBytes * 2 * M) * kGroupBytes;  // between prefetches of results' rows
  if (apart == 0) ahead.ask_rows(P);
  while (group != asked) add_group(std::true_type());
  while (ahead.rows() > 0) {
    ahead.ask_row(P);
    for (const int8_t* next = group + apart; group != next;) add_group(std::false_type());
  }
  while (group != end) add_group(std::false_type());
  OCTAVO_UNROLL
  for (int p = 0; p < P; ++p) {
    OCTAVO_UNROLL
    for (int m = 0; m < M; ++m) {
      OCTAVO_UNROLL
      for (int v = 0; v < V; ++v) store_int(&out[p][m][(vec + v) * kLanes], sums[p][m][v]);
    }
  }
}

// Multiplies P panels from `panel` on by the M rows of a tile.
template <int M, int P>
void multiply_bytes(const LinearArgs& args, const ByteWeight& weight, const ByteTile& tile, int64_t panel, Place out,
                    Ahead ahead) {
  constexpr int V = vecs_at_once(M, kMostByteSums);
  const int8_t* w = weight.panels + panel * weight.panel_bytes;
  alignas(64) int32_t sums[P][M][kPanelColumns];
  for (int vec = 0; vec < kPanelVecs; vec += V) sum_bytes<M, P, V>(weight, tile, w, vec, ahead, sums);
  for (int p = 0; p < P; ++p) {
    const int64_t column = (panel + p) * kPanelColumns;
    write_byte_sums<kByteOffset>(args, weight, tile.scales, M, column, sums[p][0], right_of(args, out, p));
  }
}

template <int M>
void ByteWeight::multiply(const LinearArgs& args, const ByteWeight& weight, const ByteTile& tile, int64_t first,
                          int64_t count, Place out, Ahead ahead) {
  for_each_panel<group_panels(M)>(args, count, out, ahead, [&](auto at_once, int64_t panel, Place place, const Ahead& next) {
    multiply_bytes<M, at_once>(args, weight, tile, first + panel, place, next);
  });
}

}  // namespace octavo::OCTAVO_ISA
