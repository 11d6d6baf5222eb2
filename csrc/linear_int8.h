// Matrix products of int8 weights (one scale per output column) and activations that are quantized on the way (one scale
// per row). Sums of integers are exact, so the result is one expression, whatever the order or the number of rows:
//
//   out = float(sum of x w) * (scale of the row * scale of the column) + bias, each operation rounded once
//
// A row's scale is its largest magnitude / 127, and its values are rounded to the nearest even multiple. A row with a value
// that is no number, or infinite, comes out as NaN.
#pragma once

#include "linear.h"

namespace octavo::OCTAVO_ISA {

// What fits the registers: rows of a tile, and accumulators when rows are few enough to take several panels at once.
#if defined(OCTAVO_ISA_AVX512)
constexpr int kByteRows = 14, kByteSums = 16;
#elif defined(OCTAVO_ISA_AVX2)
constexpr int kByteRows = 2, kByteSums = 4;
#else
constexpr int kByteRows = 2, kByteSums = 4;
#endif

constexpr int kPanelVecs = kPanelColumns / kLanes;
constexpr int64_t kGroupBytes = 4 * kPanelColumns;  // four k of one panel
constexpr int64_t kBlockBytes = 512 * 1024;         // quantized rows that are multiplied together: they stay in L2

OCTAVO_INLINE int64_t byte_groups(int64_t k) { return divide_up(k, 4); }

// A packed int8 weight: panels, then scales and sums of the columns.
struct ByteWeight {
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
};

// --- activations ----------------------------------------------------------------------------------------------------------

constexpr uint32_t kInfinityBits = 0x7F800000u;
constexpr float kLeastMagnitude = 1e-30f;  // a row whose values are all smaller is zero

// The largest magnitude of a row; infinite or NaN if any of its values is. As integers, magnitudes compare like floats, and
// what is no number is the largest.
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

// Rows first .. first + m of x as bytes [ceil(k / 4)][m][4], and their scales.
template <class X>
void quantize_rows_of(const LinearArgs& args, int64_t first, int64_t m, uint8_t* bytes, float* scales) {
  const int64_t groups = byte_groups(args.k);
  for (int64_t r = 0; r < m; ++r) {
    const X* row = static_cast<const X*>(args.x) + (first + r) * args.x_stride;
    const float magnitude = largest_magnitude(row, args.k);
    uint32_t magnitude_bits;
    std::memcpy(&magnitude_bits, &magnitude, sizeof(magnitude_bits));
    const bool is_finite = magnitude_bits < kInfinityBits;
    scales[r] = is_finite ? magnitude / 127.0f : __builtin_nanf("");
    const Vec inverse = splat(is_finite && magnitude >= kLeastMagnitude ? 127.0f / magnitude : 0.0f);
    for (int64_t i = 0; i < args.k; i += kLanes) {
      uint32_t words[kLanes / 4];
      store_bytes(words, to_int(load_first(row + i, args.k - i) * inverse) + splat_int(kByteOffset));
      const int64_t count = smaller(int64_t{kLanes / 4}, groups - i / 4);
      for (int64_t j = 0; j < count; ++j) std::memcpy(bytes + ((i / 4 + j) * m + r) * 4, &words[j], 4);
    }
  }
}

inline void quantize_rows(const LinearArgs& args, int64_t first, int64_t m, uint8_t* bytes, float* scales) {
  if (args.x_dtype == DType::kFloat32) {
    quantize_rows_of<float>(args, first, m, bytes, scales);
  } else {
    quantize_rows_of<bf16>(args, first, m, bytes, scales);
  }
}

// --- the product ----------------------------------------------------------------------------------------------------------

struct ByteTile {
  const uint8_t* bytes;  // [groups][rows][4]
  const float* scales;
  int64_t first;  // row of the output
};

// Writes `rows` x 32 columns: scales the sums and adds the bias.
template <class Out>
void write_byte_sums(const LinearArgs& args, const ByteWeight& weight, const ByteTile& tile, int64_t rows,
                     int64_t first_column, const int32_t* sums) {
  for (int v = 0; v < kPanelVecs; ++v) {
    const int64_t column = first_column + v * kLanes, count = args.n - column;
    if (count <= 0) break;
    const Vec scale = load(weight.scales + column);
    IVec offset = load_int(weight.sums + column);
    static_assert(kByteOffset == 0 || kByteOffset == 128);
    offset = kByteOffset == 0 ? splat_int(0) : shift_left<7>(offset);
    const Vec bias = args.bias == nullptr ? splat(0.0f) : load(args.bias + column);
    for (int64_t m = 0; m < rows; ++m) {
      const IVec sum = load_int(sums + m * kPanelColumns + v * kLanes) - offset;
      Vec value = to_float(sum) * (splat(tile.scales[m]) * scale);
      if (args.bias != nullptr) value = value + bias;
      store_first(static_cast<Out*>(args.out) + (tile.first + m) * args.n + column, value, count);
    }
  }
}

// P panels from `panel` on for the M rows of a tile.
template <int M, int P>
void multiply_bytes(const LinearArgs& args, const ByteWeight& weight, const ByteTile& tile, int64_t panel) {
  IVec sums[P][M][kPanelVecs];
  OCTAVO_UNROLL
  for (int p = 0; p < P; ++p) {
    OCTAVO_UNROLL
    for (int m = 0; m < M; ++m) {
      OCTAVO_UNROLL
      for (int v = 0; v < kPanelVecs; ++v) sums[p][m][v] = splat_int(0);
    }
  }
  const int8_t* w = weight.panels + panel * weight.panel_bytes;
  const uint8_t* x = tile.bytes;
  for (int64_t offset = 0; offset < weight.panel_bytes; offset += kGroupBytes) {
    IVec columns[P][kPanelVecs];
    OCTAVO_UNROLL
    for (int p = 0; p < P; ++p) {
      const int8_t* group = w + p * weight.panel_bytes + offset;
      OCTAVO_UNROLL
      for (int line = 0; line < kPanelVecs; ++line) __builtin_prefetch(group + kPrefetchBytes + line * 64);
      OCTAVO_UNROLL
      for (int v = 0; v < kPanelVecs; ++v) columns[p][v] = load_int(group + v * 4 * kLanes);
    }
    OCTAVO_UNROLL
    for (int m = 0; m < M; ++m) {
      uint32_t word;
      std::memcpy(&word, x + m * 4, 4);
      const IVec four = splat_int(word);
      OCTAVO_UNROLL
      for (int p = 0; p < P; ++p) {
        OCTAVO_UNROLL
        for (int v = 0; v < kPanelVecs; ++v) sums[p][m][v] = add_byte_products(sums[p][m][v], four, columns[p][v]);
      }
    }
    x += M * 4;
  }
  alignas(64) int32_t stored[P][M][kPanelColumns];
  OCTAVO_UNROLL
  for (int p = 0; p < P; ++p) {
    OCTAVO_UNROLL
    for (int m = 0; m < M; ++m) {
      OCTAVO_UNROLL
      for (int v = 0; v < kPanelVecs; ++v) store_int(&stored[p][m][v * kLanes], sums[p][m][v]);
    }
  }
  for (int p = 0; p < P; ++p) {
    const int64_t column = (panel + p) * kPanelColumns;
    if (args.out_dtype == DType::kFloat32) {
      write_byte_sums<float>(args, weight, tile, M, column, stored[p][0]);
    } else {
      write_byte_sums<bf16>(args, weight, tile, M, column, stored[p][0]);
    }
  }
}

// How many panels M rows take at once: as many streams from memory as there are registers for.
constexpr int panels_at_once(int m) {
  const int count = kByteSums / (m * kPanelVecs);
  return count < 1 ? 1 : count > 4 ? 4 : count;
}

// Panels first .. first + count for a tile of M rows.
template <int M>
void multiply_byte_tile(const LinearArgs& args, const ByteWeight& weight, const ByteTile& tile, int64_t first,
                        int64_t count) {
  constexpr int P = panels_at_once(M);
  int64_t panel = first;
  for (; panel + P <= first + count; panel += P) multiply_bytes<M, P>(args, weight, tile, panel);
  for (; panel < first + count; ++panel) multiply_bytes<M, 1>(args, weight, tile, panel);
}

// multiply_byte_tile for 1 .. kByteRows rows.
struct ByteTileFunctions {
  decltype(&multiply_byte_tile<1>) of_rows[kByteRows + 1];
  constexpr ByteTileFunctions() : ByteTileFunctions(std::make_integer_sequence<int, kByteRows>()) {}
  template <int... I>
  constexpr explicit ByteTileFunctions(std::integer_sequence<int, I...>)
      : of_rows{nullptr, multiply_byte_tile<I + 1>...} {}
};

constexpr ByteTileFunctions kMultiplyBytes;

inline void linear_int8(ThreadPool& pool, const LinearArgs& args) {
  if (args.rows == 0) return;
  const ByteWeight weight(args.weight, args.n, args.k);
  const int64_t row_bytes = byte_groups(args.k) * 4, panels = divide_up(args.n, kPanelColumns);
  // Blocks that stay in cache, each of tiles of nearly equal height.
  const int64_t most_rows = larger(int64_t{kByteRows}, kBlockBytes / row_bytes / kByteRows * kByteRows);
  const int64_t blocks = divide_up(args.rows, most_rows), block_rows = divide_up(args.rows, blocks);
  const int64_t tiles = divide_up(block_rows, kByteRows), tile_rows = divide_up(block_rows, tiles);
  const int64_t group = tiles == 1 ? panels_at_once(static_cast<int>(tile_rows)) : 1;
  const int64_t bytes_size = divide_up(block_rows * row_bytes, 64) * 64;
  auto* bytes = static_cast<uint8_t*>(pool.shared(static_cast<size_t>(bytes_size + block_rows * 4)));
  auto* scales = reinterpret_cast<float*>(bytes + bytes_size);
  for (int64_t first = 0; first < args.rows; first += block_rows) {
    const int64_t rows = smaller(block_rows, args.rows - first), count = divide_up(rows, tile_rows);
    parallel(pool, count, [&](int64_t tile, int) {
      const int64_t row = tile * tile_rows;
      quantize_rows(args, first + row, smaller(tile_rows, rows - row), bytes + row * row_bytes, scales + row);
    });
    parallel(pool, divide_up(panels, group), [&](int64_t task, int) {
      const int64_t panel = task * group;
      for (int64_t row = 0; row < rows; row += tile_rows) {
        kMultiplyBytes.of_rows[smaller(tile_rows, rows - row)](args, weight,
                                                               {bytes + row * row_bytes, scales + row, first + row},
                                                               panel, smaller(group, panels - panel));
      }
    });
  }
}

inline void linear(ThreadPool& pool, const LinearArgs& args) {
  switch (args.weight_dtype) {
    case DType::kFloat32: return linear_of<float>(pool, args);
    case DType::kBFloat16: return linear_of<bf16>(pool, args);
    case DType::kFloat16: return linear_of<f16>(pool, args);
    case DType::kInt8: return linear_int8(pool, args);
  }
}

}  // namespace octavo::OCTAVO_ISA
