// Matrix products of int4 weights (a scale for each group of consecutive k of a column, and perhaps a zero point) and
// activations that are quantized on the way. Sums within a group are sums of integers and exact; groups are added in
// float32, k ascending, so the result is one expression, whatever the number of rows:
//
//   total = sum over groups of float(sum of x (w - zero)) * scale;  out = total * (scale of the row) + bias
//
// each operation rounded once. Values w are 0 .. 15; without zero points all of them are 8.
#pragma once

#include "linear_bf16.h"
#include "linear_int8.h"

namespace octavo::OCTAVO_ISA {

// What fits the registers: rows of a tile, vectors of columns at once, and accumulators when rows are few enough to take
// several panels at once.
#if defined(OCTAVO_ISA_VNNI)
constexpr int kNibbleRows = 12, kNibbleVecs = 2, kNibbleSums = 8;
#elif defined(OCTAVO_ISA_AVX512)
constexpr int kNibbleRows = 6, kNibbleVecs = 2, kNibbleSums = 8;
#else
constexpr int kNibbleRows = 2, kNibbleVecs = 1, kNibbleSums = 2;
#endif

constexpr int64_t kNibbleDepth = 8;                      // k of one line of a column: two words of four
constexpr int64_t kNibbleBytes = 4 * kPanelColumns;      // eight k of one panel
constexpr int64_t kZeroBytes = 2 * kPanelColumns;        // zero points of a group

// A packed int4 weight: panels; in each its groups; in each of these the scales, the zero points as bfloat16 if there are
// any, and the values: byte j of a column's word holds k + j in its lower half and k + 4 + j in its upper one.
struct NibbleWeight {
  static constexpr int kRows = kNibbleRows;

  const uint8_t* panels;
  int64_t depth;  // k, padded
  int64_t group;  // k of a group, the last one perhaps fewer
  int64_t groups;
  DType scale_dtype;
  int64_t scale_bytes;  // of a group
  int64_t head_bytes;   // of a group: what stands before its values
  int64_t panel_bytes;
  bool has_zeros;

  NibbleWeight(const void* packed, const Int4Format& format, int64_t k)
      : panels(static_cast<const uint8_t*>(packed)),
        depth(divide_up(k, kNibbleDepth) * kNibbleDepth),
        group(divide_up(format.group_size, 2 * kLanes) * 2 * kLanes),
        groups(divide_up(k, group)),
        scale_dtype(format.scale_dtype),
        scale_bytes((scale_dtype == DType::kFloat32 ? 4 : 2) * kPanelColumns),
        head_bytes(scale_bytes + (format.has_zeros ? kZeroBytes : 0)),
        panel_bytes(groups * head_bytes + depth / kNibbleDepth * kNibbleBytes),
        has_zeros(format.has_zeros) {}
  explicit NibbleWeight(const LinearArgs& args) : NibbleWeight(args.weight, args.int4, args.k) {}

  static constexpr int group_panels(int rows) { return panels_at_once(rows, kPanelVecs, kNibbleSums); }
  int64_t panel_steps() const { return depth / kNibbleDepth * (kPanelVecs / kNibbleVecs); }
  ByteLayout layout() const { return {depth / 4, 0, group, groups, has_zeros ? -1 : -8}; }

  // The scales of the columns from `column` on; head: of a group.
  OCTAVO_INLINE Vec load_scales(const uint8_t* head, int column) const {
    switch (scale_dtype) {
      case DType::kBFloat16: return load(reinterpret_cast<const bf16*>(head) + column);
      case DType::kFloat16: return load(reinterpret_cast<const f16*>(head) + column);
      default: return load(reinterpret_cast<const float*>(head) + column);
    }
  }

  OCTAVO_INLINE IVec load_zeros(const uint8_t* head, int column) const {
    return to_int(load(reinterpret_cast<const bf16*>(head + scale_bytes) + column));
  }

  template <int M>
  static void multiply(const LinearArgs& args, const NibbleWeight& weight, const ByteTile& tile, int64_t first,
                       int64_t count, Ahead ahead);
};

// The halves from bit kShift on of V vectors of P panels, times four k of M rows.
template <int M, int P, int V, int kShift>
OCTAVO_INLINE void multiply_half(const uint8_t* w, int64_t panel_bytes, const uint8_t* x, IVec (&sums)[P][M][V]) {
  IVec columns[P][V];
  OCTAVO_UNROLL
  for (int p = 0; p < P; ++p) {
    OCTAVO_UNROLL
    for (int v = 0; v < V; ++v) {
      const IVec raw = load_int(w + p * panel_bytes + v * 4 * kLanes);
      columns[p][v] = (kShift == 0 ? raw : shift_right<kShift>(raw)) & splat_int(0x0F0F0F0Fu);
    }
  }
  OCTAVO_UNROLL
  for (int m = 0; m < M; ++m) {
    uint32_t word;
    std::memcpy(&word, x + m * 4, 4);
    const IVec four = splat_int(word);
    OCTAVO_UNROLL
    for (int p = 0; p < P; ++p) {
      OCTAVO_UNROLL
      for (int v = 0; v < V; ++v) sums[p][m][v] = add_nibble_products(sums[p][m][v], columns[p][v], four);
    }
  }
}

// V vectors of columns, from vector `vec` on, of P panels from `w` on, for the M rows of a tile: adds to the totals
// [P][M][V * kLanes]. They live in memory, because registers are for the sums of a group.
template <int M, int P, int V>
OCTAVO_INLINE void multiply_nibbles(const NibbleWeight& weight, const ByteTile& tile, const uint8_t* w, int vec,
                                    Ahead& ahead, float* totals) {
  constexpr bool kAsksAhead = P > 1;  // with more rows arithmetic takes longer than memory, and registers are short
  const uint8_t* x = tile.bytes;
  const int32_t* row_sums = tile.sums;
  for (int64_t k = 0; k < weight.depth; k += weight.group) {
    const uint8_t* head = w;
    w += weight.head_bytes;
    IVec sums[P][M][V];
    OCTAVO_UNROLL
    for (int p = 0; p < P; ++p) {
      __builtin_prefetch(head + p * weight.panel_bytes + kPrefetchBytes);
      OCTAVO_UNROLL
      for (int v = 0; v < V; ++v) {
        const IVec zero = weight.has_zeros ? weight.load_zeros(head + p * weight.panel_bytes, (vec + v) * kLanes)
                                           : splat_int(1);
        OCTAVO_UNROLL
        for (int m = 0; m < M; ++m) {
          const IVec row_sum = splat_int(static_cast<uint32_t>(row_sums[m]));
          sums[p][m][v] = weight.has_zeros ? zero * row_sum : row_sum;
        }
      }
    }
    const uint8_t* end = w + smaller(weight.depth - k, weight.group) / kNibbleDepth * kNibbleBytes;
    do {  // at least once: then GCC keeps one copy of the sums
      OCTAVO_UNROLL
      for (int p = 0; p < P; ++p) {
        OCTAVO_UNROLL
        for (int64_t byte = 0; byte < kNibbleBytes; byte += 64) {
          __builtin_prefetch(w + p * weight.panel_bytes + kPrefetchBytes + byte);
        }
        if (kAsksAhead) ahead.ask(p);
      }
      multiply_half<M, P, V, 0>(w + vec * 4 * kLanes, weight.panel_bytes, x, sums);
      multiply_half<M, P, V, 4>(w + vec * 4 * kLanes, weight.panel_bytes, x + M * 4, sums);
      if (kAsksAhead) ahead.step();
      x += M * 8;
      w += kNibbleBytes;
    } while (w != end);
    asm volatile("" : : "r"(totals) : "memory");  // or GCC keeps the totals in registers, and spills the sums in the loop
    OCTAVO_UNROLL
    for (int p = 0; p < P; ++p) {
      OCTAVO_UNROLL
      for (int v = 0; v < V; ++v) {
        const Vec scale = weight.load_scales(head + p * weight.panel_bytes, (vec + v) * kLanes);
        OCTAVO_UNROLL
        for (int m = 0; m < M; ++m) {
          float* total = totals + ((p * M + m) * V + v) * kLanes;
          store(total, load(total) + to_float(sums[p][m][v]) * scale);
        }
      }
    }
    row_sums += M;
  }
}

// Writes V vectors of columns: scales the totals of some rows and adds the bias.
template <int V, class Out>
OCTAVO_INLINE void write_totals_as(const LinearArgs& args, const ByteTile& tile, int64_t rows, int64_t first_column,
                                   const float* totals) {
  const int64_t count = args.n - first_column;
  if (count <= 0) return;
  Vec bias[V];
  for (int v = 0; v < V; ++v) bias[v] = args.bias == nullptr ? splat(0.0f) : load(args.bias + first_column + v * kLanes);
  Out* out = static_cast<Out*>(args.out) + tile.first * args.n + first_column;
  for (int64_t m = 0; m < rows; ++m, out += args.n) {
    Vec value[V];
    OCTAVO_UNROLL
    for (int v = 0; v < V; ++v) {
      value[v] = load(totals + (m * V + v) * kLanes) * splat(tile.scales[m]);
      if (args.bias != nullptr) value[v] = value[v] + bias[v];
    }
    store_columns(out, value, count);
  }
}

template <int V>
OCTAVO_INLINE void write_totals(const LinearArgs& args, const ByteTile& tile, int64_t rows, int64_t first_column,
                                const float* totals) {
  if (args.out_dtype == DType::kFloat32) {
    write_totals_as<V, float>(args, tile, rows, first_column, totals);
  } else {
    write_totals_as<V, bf16>(args, tile, rows, first_column, totals);
  }
}

// P panels from `panel` on for the M rows of a tile.
template <int M, int P>
void multiply_nibble_panels(const LinearArgs& args, const NibbleWeight& weight, const ByteTile& tile, int64_t panel,
                            Ahead ahead) {
  constexpr int V = kNibbleVecs;
  for (int p = 0; p < P; ++p) prefetch_output(args, tile.first, M, (panel + p) * kPanelColumns);
  for (int vec = 0; vec < kPanelVecs; vec += V) {
    alignas(64) float totals[P * M * V * kLanes] = {};
    multiply_nibbles<M, P, V>(weight, tile, weight.panels + panel * weight.panel_bytes, vec, ahead, totals);
    for (int p = 0; p < P; ++p) {
      write_totals<V>(args, tile, M, (panel + p) * kPanelColumns + vec * kLanes, totals + p * M * V * kLanes);
    }
  }
}

template <int M>
void NibbleWeight::multiply(const LinearArgs& args, const NibbleWeight& weight, const ByteTile& tile, int64_t first,
                            int64_t count, Ahead ahead) {
  constexpr int P = group_panels(M);
  int64_t panel = first;
  for (; panel + P <= first + count; panel += P) multiply_nibble_panels<M, P>(args, weight, tile, panel, ahead.from(panel - first));
  for (; P > 2 && panel + 2 <= first + count; panel += 2) {
    multiply_nibble_panels<M, P < 2 ? P : 2>(args, weight, tile, panel, ahead.from(panel - first));
  }
  for (; panel < first + count; ++panel) multiply_nibble_panels<M, 1>(args, weight, tile, panel, ahead.from(panel - first));
}

}  // namespace octavo::OCTAVO_ISA
