// Matrix products of int4 weights (a scale for each group of consecutive k of a column, and perhaps a zero point) and activations
// that the product quantizes. A group's scale is a whole multiple of the unit of its column. So the sum over all k is an exact sum
// of integers, and the result is one expression for any order and any number of rows:
//
//   out = float(sum of x (w - zero) multiple) * (scale of the row * unit of the column) + bias, each operation rounded once
//
// Values w are 0 .. 15; without zero points all of them are 8.
#pragma once

#include "linear_bf16.h"
#include "linear_int8.h"

#if defined(OCTAVO_ISA_VNNI) && defined(__GNUC__) && !defined(__clang__)  // else GCC copies a tile's sums in its inner loop
#pragma GCC push_options
#pragma GCC optimize("no-tree-coalesce-vars")
#endif

namespace octavo::OCTAVO_ISA {

// Sizes that fit the registers: rows of a tile, accumulators of a tile, and accumulators if rows are few enough to take several
// panels together (with AVX2 never: a vector is two registers there). Whether a section is unrolled. Whether a single row
// multiplies both halves of a vector when it is read; then the registers suffice for one panel only.
#if defined(OCTAVO_ISA_VNNI)
constexpr int kNibbleRows = 12, kMostNibbleSums = 24, kNibbleSums = 8;
constexpr bool kUnrollsSections = false, kTakesBothHalves = false;
#elif defined(OCTAVO_ISA_AVX512)
constexpr int kNibbleRows = 6, kMostNibbleSums = 12, kNibbleSums = 8;
constexpr bool kUnrollsSections = false, kTakesBothHalves = false;
#elif defined(OCTAVO_ISA_AVX2)
constexpr int kNibbleRows = 4, kMostNibbleSums = 4, kNibbleSums = 2;
constexpr bool kUnrollsSections = true, kTakesBothHalves = true;
#else
constexpr int kNibbleRows = 2, kMostNibbleSums = 1, kNibbleSums = 2;
constexpr bool kUnrollsSections = false, kTakesBothHalves = false;
#endif

constexpr int64_t kNibbleDepth = 8;                  // k of one line of a column: two words of four
constexpr int64_t kNibbleBytes = 4 * kPanelColumns;  // eight k of one panel
constexpr int64_t kWordsBytes = 2 * kPanelColumns;   // a 16-bit number of each column
constexpr int32_t kNibbleCenter = 8;                 // is subtracted from values before they are multiplied
constexpr int64_t kMostByte = 127;                   // of activations
constexpr int64_t kMostWord = 32639;                 // of (value - zero point) * multiple (quantization.py)
constexpr int64_t kSectionDepth = 32;                // k whose products with centered values have sums of signed 16 bits
constexpr int64_t kSectionsTogether = 16;            // sections whose sums times multiples have sums of signed 32 bits
static_assert(kSectionDepth * kMostByte * kNibbleCenter < 1 << 15);
static_assert(kSectionDepth / 2 * kMostByte * 15 < 1 << 15);  // if each half of a lane has its own sum
static_assert(kSectionsTogether * kSectionDepth * kMostByte * kMostWord < int64_t{1} << 31);

// A packed int4 weight consists of panels, then the units of the columns. A panel consists of groups. A group holds the multiples,
// (zero point - 8) * multiple if there are zero points, and the values: byte j of a column's word holds k + j in its lower half and
// k + 4 + j in its upper half.
struct NibbleWeight {
  static constexpr int kRows = kNibbleRows;

  const uint8_t* panels;
  int64_t depth;  // k, padded
  int64_t group;  // k of a group, the last one perhaps fewer
  int64_t groups;
  int64_t head_bytes;  // of a group, before its values
  int64_t panel_bytes;
  bool has_zeros;
  const float* units;

  NibbleWeight(const void* packed, const Int4Format& format, int64_t n, int64_t k)
      : panels(static_cast<const uint8_t*>(packed)),
        depth(divide_up(k, kNibbleDepth) * kNibbleDepth),
        group(divide_up(format.group_size, kSectionDepth) * kSectionDepth),
        groups(divide_up(k, group)),
        head_bytes(format.has_zeros ? 2 * kWordsBytes : kWordsBytes),
        panel_bytes(groups * head_bytes + depth / kNibbleDepth * kNibbleBytes),
        has_zeros(format.has_zeros),
        units(reinterpret_cast<const float*>(panels + divide_up(n, kPanelColumns) * panel_bytes)) {}
  explicit NibbleWeight(const LinearArgs& args) : NibbleWeight(args.weight, args.int4, args.n, args.k) {}

  static constexpr int group_panels(int rows) { return panels_at_once(rows, kNibbleSums); }
  int64_t panel_steps(int rows, int64_t /*tiles*/) const {
    return depth / kNibbleDepth * (kPanelVecs / vecs_at_once(rows, kMostNibbleSums));
  }
  ByteLayout layout() const { return {depth / 4, 0, kSectionDepth, divide_up(depth, kSectionDepth), -kNibbleCenter, false}; }

  template <int M>
  static void multiply(const LinearArgs& args, const NibbleWeight& weight, const ByteTile& tile, int64_t first,
                       int64_t count, Place out, Ahead ahead);
};

// The initial value of a row's sums of a section. If each half of a lane has a sum, only the lower half gets it.
OCTAVO_INLINE IVec first_sum(int32_t row_sum) {
  const IVec sum = splat_int(static_cast<uint32_t>(row_sum));
  return kSumsNibblesInHalves ? sum & splat_int(0xFFFF) : sum;
}

// The factors of the sums of sixteen columns, from 16-bit numbers; in both halves of a lane if each has a sum.
OCTAVO_INLINE IVec load_factors(const uint8_t* words) {
  const IVec factors = load_words(words);
  return kSumsNibblesInHalves ? factors | shift_left<16>(factors) : factors;
}

// Four bits of each byte, from bit kShift on.
template <int kShift>
OCTAVO_INLINE IVec nibbles(IVec bytes) {
  return (kShift == 0 ? bytes : shift_right<kShift>(bytes)) & splat_int(0x0F0F0F0Fu);
}

// Four k of a row, repeated in every lane.
OCTAVO_INLINE IVec load_four(const uint8_t* x) {
  uint32_t word;
  std::memcpy(&word, x, 4);
  return splat_int(word);
}

// Multiplies the values at bit kShift of V vectors of P panels by four k of M rows.
template <int M, int P, int V, int kShift>
OCTAVO_INLINE void multiply_half(const uint8_t* w, int64_t panel_bytes, const uint8_t* x, IVec (&sums)[P][M][V]) {
  IVec columns[P][V];
  OCTAVO_UNROLL
  for (int p = 0; p < P; ++p) {
    OCTAVO_UNROLL
    for (int v = 0; v < V; ++v) columns[p][v] = nibbles<kShift>(load_int(w + p * panel_bytes + v * 4 * kLanes));
  }
  OCTAVO_UNROLL
  for (int m = 0; m < M; ++m) {
    const IVec four = load_four(x + m * 4);
    OCTAVO_UNROLL
    for (int p = 0; p < P; ++p) {
      OCTAVO_UNROLL
      for (int v = 0; v < V; ++v) sums[p][m][v] = add_nibble_products(sums[p][m][v], columns[p][v], four);
    }
  }
}

// Multiplies all values of V vectors of P panels by eight k of M rows.
template <int M, int P, int V>
OCTAVO_INLINE void multiply_line(const uint8_t* w, int64_t panel_bytes, const uint8_t* x, IVec (&sums)[P][M][V]) {
  if constexpr (M == 1 && kTakesBothHalves) {
    const IVec lower = load_four(x), upper = load_four(x + 4);
    OCTAVO_UNROLL
    for (int p = 0; p < P; ++p) {
      OCTAVO_UNROLL
      for (int v = 0; v < V; ++v) {
        const IVec bytes = load_int(w + p * panel_bytes + v * 4 * kLanes);
        const IVec sum = add_nibble_products(sums[p][0][v], nibbles<0>(bytes), lower);
        sums[p][0][v] = add_nibble_products(sum, nibbles<4>(bytes), upper);
      }
    }
  } else {
    multiply_half<M, P, V, 0>(w, panel_bytes, x, sums);
    multiply_half<M, P, V, 4>(w, panel_bytes, x + M * 4, sums);
  }
}

// N vectors of exact sums of whole numbers beyond 32 bits. A sum below 2^31 is collected, and then moved to two parts that float32
// holds exactly.
template <int N>
class LongSums {
 public:
  OCTAVO_INLINE IVec added(int i) const { return load_int(added_[i]); }
  OCTAVO_INLINE void set_added(int i, IVec sum) { store_int(added_[i], sum); }

  void move() {
    for (int i = 0; i < N; ++i) {
      const Parts parts = parts_of(i);
      store_int(upper_[i], parts.upper);
      store_int(lower_[i], parts.lower);
      store_int(added_[i], splat_int(0));
    }
    has_moved_ = true;
  }

  // The whole sum, rounded once.
  OCTAVO_INLINE Vec total(int i) const {
    const Parts parts = parts_of(i);
    return to_float(parts.upper) * splat(65536.0f) + to_float(parts.lower);
  }

 private:
  struct Parts {
    IVec upper, lower;
  };
  OCTAVO_INLINE Parts parts_of(int i) const {
    const IVec sum = load_int(added_[i]), upper = shift_right_signed<16>(sum), lower = sum & splat_int(0xFFFFu);
    if (!has_moved_) return {upper, lower};
    return {load_int(upper_[i]) + upper, load_int(lower_[i]) + lower};
  }

  alignas(64) int32_t added_[N][kLanes] = {};
  alignas(64) int32_t upper_[N][kLanes], lower_[N][kLanes];  // undefined until the first move
  bool has_moved_ = false;
};

// kFewRowsAskAhead for int4. Zen 4 and 5 differ here: without it one reads int4 2 % slower, the other a few percent faster.
#if defined(OCTAVO_ISA_AVX2)
constexpr bool kFewNibbleRowsAskAhead = false;
#else
constexpr bool kFewNibbleRowsAskAhead = true;
#endif

// Multiplies V vectors of columns, from vector `vec` on, of P panels from `w` on, by the M rows of a tile, and adds to the totals
// [P][M][V]. The totals are in memory, because the sums of a section need the registers.
template <int M, int P, int V>
OCTAVO_INLINE void multiply_nibbles(const NibbleWeight& weight, const ByteTile& tile, const uint8_t* w, int vec,
                                    Ahead& ahead, LongSums<P * M * V>& totals) {
  // With more rows, arithmetic takes longer than memory, and registers are scarce.
  constexpr bool kAsksAhead = P > 1 && kFewNibbleRowsAskAhead;
  const uint8_t *x = tile.bytes, *head = w;
  const int32_t* row_sums = tile.sums;
  int64_t next_group = 0, next_move = kSectionsTogether * kSectionDepth;
  for (int64_t k = 0; k < weight.depth; k += kSectionDepth, row_sums += M) {
    if (k == next_group) {
      head = w;
      w += weight.head_bytes;
      next_group += weight.group;
      OCTAVO_UNROLL
      for (int p = 0; p < P; ++p) prefetch_l2(head + p * weight.panel_bytes + kPrefetchBytes);
    }
    IVec sums[P][M][V];
    OCTAVO_UNROLL
    for (int p = 0; p < P; ++p) {
      OCTAVO_UNROLL
      for (int v = 0; v < V; ++v) {
        OCTAVO_UNROLL
        for (int m = 0; m < M; ++m) sums[p][m][v] = first_sum(row_sums[m]);
      }
    }
    const auto take_line = [&]() __attribute__((always_inline)) {
      OCTAVO_UNROLL
      for (int p = 0; p < P; ++p) {
        OCTAVO_UNROLL
        for (int64_t byte = 0; byte < kNibbleBytes; byte += 64) {
          prefetch_l2(w + p * weight.panel_bytes + kPrefetchBytes + byte);
        }
        if (kAsksAhead) ahead.ask(p);
      }
      multiply_line<M, P, V>(w + vec * 4 * kLanes, weight.panel_bytes, x, sums);
      if (kAsksAhead) ahead.step();
      x += M * 8;
      w += kNibbleBytes;
    };
    if (kUnrollsSections && weight.depth - k >= kSectionDepth) {
      OCTAVO_UNROLL
      for (int64_t line = 0; line < kSectionDepth; line += kNibbleDepth) take_line();
    } else {
      const uint8_t* end = w + smaller(weight.depth - k, kSectionDepth) / kNibbleDepth * kNibbleBytes;
      do {  // runs at least once, so that GCC keeps one copy of the sums
        take_line();
      } while (w != end);
    }
    asm volatile("" : : "r"(&totals) : "memory");  // else GCC keeps the totals in registers, and spills the sums in the loop
    OCTAVO_UNROLL
    for (int p = 0; p < P; ++p) {
      OCTAVO_UNROLL
      for (int v = 0; v < V; ++v) {
        const uint8_t* words = head + p * weight.panel_bytes + (vec + v) * 2 * kLanes;
        const IVec multiple = load_factors(words);
        OCTAVO_UNROLL
        for (int m = 0; m < M; ++m) {
          const int i = (p * M + m) * V + v;
          totals.set_added(i, add_word_products(totals.added(i), sums[p][m][v], multiple));
        }
        if (!weight.has_zeros) continue;
        const IVec zero = load_words(words + kWordsBytes);
        for (int m = 0; m < M; ++m) {
          const int i = (p * M + m) * V + v;
          const IVec row_sum = splat_int(static_cast<uint32_t>(row_sums[m] / kNibbleCenter));  // the negative sum of the row
          totals.set_added(i, add_word_products(totals.added(i), row_sum, zero));
        }
      }
    }
    if (k + kSectionDepth != next_move) continue;
    totals.move();
    next_move += kSectionsTogether * kSectionDepth;
  }
}

// Scales the totals of `rows` rows and V vectors of columns, adds the bias and writes them.
template <int V, class Out, class Total>
OCTAVO_INLINE void write_totals_as(const LinearArgs& args, const NibbleWeight& weight, const float* row_scales, int64_t rows,
                                   int64_t first_column, const Total& total, Place out) {
  const int64_t count = args.n - first_column;
  if (count <= 0) return;
  Vec bias[V], unit[V];
  OCTAVO_UNROLL
  for (int v = 0; v < V; ++v) {
    bias[v] = args.bias == nullptr ? splat(0.0f) : load(args.bias + first_column + v * kLanes);
    unit[v] = load(weight.units + first_column + v * kLanes);
  }
  for (int64_t m = 0; m < rows; ++m, out.data += out.row_bytes) {
    Vec value[V];
    OCTAVO_UNROLL
    for (int v = 0; v < V; ++v) {
      value[v] = total(m, v) * (splat(row_scales[m]) * unit[v]);
      if (args.bias != nullptr) value[v] = value[v] + bias[v];
    }
    store_columns(reinterpret_cast<Out*>(out.data), value, count);
  }
}

// total(m, v): the sum of row m and vector v in float32.
template <int V, class Total>
OCTAVO_INLINE void write_totals(const LinearArgs& args, const NibbleWeight& weight, const float* row_scales, int64_t rows,
                                int64_t first_column, const Total& total, Place out) {
  if (args.out_dtype == DType::kFloat32) {
    write_totals_as<V, float>(args, weight, row_scales, rows, first_column, total, out);
  } else {
    write_totals_as<V, bf16>(args, weight, row_scales, rows, first_column, total, out);
  }
}

// Multiplies P panels from `panel` on by the M rows of a tile.
template <int M, int P>
void multiply_nibble_panels(const LinearArgs& args, const NibbleWeight& weight, const ByteTile& tile, int64_t panel,
                            Place out, Ahead ahead) {
  constexpr int V = vecs_at_once(M, kMostNibbleSums);
  ahead.ask_rows(P);
  for (int vec = 0; vec < kPanelVecs; vec += V) {
    LongSums<P * M * V> totals;
    multiply_nibbles<M, P, V>(weight, tile, weight.panels + panel * weight.panel_bytes, vec, ahead, totals);
    for (int p = 0; p < P; ++p) {
      const int64_t column = (panel + p) * kPanelColumns + vec * kLanes;
      const auto total = [&](int64_t m, int v) { return totals.total((p * M + static_cast<int>(m)) * V + v); };
      Place place = right_of(args, out, p);
      place.data += bytes_of_result(args, vec * kLanes);
      write_totals<V>(args, weight, tile.scales, M, column, total, place);
    }
  }
}

template <int M>
void NibbleWeight::multiply(const LinearArgs& args, const NibbleWeight& weight, const ByteTile& tile, int64_t first,
                            int64_t count, Place out, Ahead ahead) {
  for_each_panel<group_panels(M)>(args, count, out, ahead, [&](auto at_once, int64_t panel, Place place, const Ahead& next) {
    multiply_nibble_panels<M, at_once>(args, weight, tile, first + panel, place, next);
  });
}

}  // namespace octavo::OCTAVO_ISA

#if defined(OCTAVO_ISA_VNNI) && defined(__GNUC__) && !defined(__clang__)
#pragma GCC pop_options
#endif
