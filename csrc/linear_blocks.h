// Matrix products of weights in the blocks of GGUF files (block_formats.h) and activations that the product rounds to bytes, with
// a scale for each 32 consecutive k of a row. Sums of integers are exact, and the terms computed from them are added in float32 in
// the order of k. So a result does not depend on the number of rows or the instruction set:
//
//   out = sum, k ascending, of (float(sum of x w) * scale [+ float(sum of x) * minimum]) * (scale of the row's group)  [+ bias]
//
// with a term for all k that share a scale of the weight, each operation rounded once. Few rows read the panels in place. For
// more rows each piece of a panel, of any kind, is unpacked once, into bytes and float32 scales in a cache.
#pragma once

#include "block_formats.h"

#if defined(OCTAVO_ISA_VNNI) && defined(__GNUC__) && !defined(__clang__)  // else GCC copies a tile's sums in its inner loop
#pragma GCC push_options
#pragma GCC optimize("no-tree-coalesce-vars")
#endif

namespace octavo::OCTAVO_ISA {

// A tile of rows in the layout of the product: bytes, the scales of their groups, and for each scale of the weight the sum of the
// row's bytes, times a factor.
struct BlockTile {
  uint8_t* bytes;  // [words][rows][4]
  float* scales;   // [groups][rows]
  int32_t* sums;   // [scales of a column][rows]
};

// Reduces all lanes by f; the result is in every lane.
template <class F>
OCTAVO_INLINE IVec over_lanes(IVec a, const F& f) {
  a = f(a, as_int(exchange_lanes<8>(as_float(a))));
  a = f(a, as_int(exchange_lanes<4>(as_float(a))));
  a = f(a, as_int(exchange_lanes<2>(as_float(a))));
  return f(a, as_int(exchange_lanes<1>(as_float(a))));
}

OCTAVO_INLINE void store_lane(void* p, IVec a) {
  uint32_t lanes[kLanes];
  store_int(lanes, a);
  std::memcpy(p, lanes, sizeof(lanes[0]));
}

// Rounds a group of a row to two vectors of whole numbers, and stores its scale. As in row_scale, the scale is NaN if a value is
// NaN or infinite.
template <class X>
OCTAVO_INLINE void round_group(const X* row, float* scale, IVec (&whole)[2]) {
  const Vec values[2] = {load(row), load(row + kLanes)};
  const auto magnitude = [](Vec a) { return as_int(a) & splat_int(0x7FFFFFFFu); };
  const auto largest = [](IVec a, IVec b) { return max_signed(a, b); };
  const Vec most = as_float(over_lanes(max_signed(magnitude(values[0]), magnitude(values[1])), largest));
  const Mask is_finite = less(most, splat(__builtin_inff()));
  store_lane(scale, as_int(select(is_finite, most / splat(127.0f), splat(__builtin_nanf("")))));
  const Mask is_some = both(is_finite, less_equal(splat(kLeastMagnitude), most));
  const Vec inverse = select(is_some, splat(127.0f) / most, splat(0.0f));
  whole[0] = to_int(values[0] * inverse);
  whole[1] = to_int(values[1] * inverse);
}

// Rounds `m` rows, at most sixteen, from `first` on.
template <class X>
void round_block_rows(const LinearArgs& args, const BlockFormat& format, int64_t first, int64_t m, const BlockTile& tile) {
  constexpr int64_t kTogether = 2 * kBlockGroup;
  const X* const rows = static_cast<const X*>(args.x) + first * args.x_stride;
  const bool has_halves = format.scale_group != kBlockGroup;
  const int32_t factor = format.has_minima ? 1 : is_signed(format) ? 0 : -format.center;
  const auto add = [](IVec a, IVec b) { return a + b; };
  const auto store_sum = [&](int32_t* sum, IVec whole) {
    store_lane(sum, over_lanes(whole, add));
    *sum *= factor;
  };
  int32_t* sums = tile.sums;
  for (int64_t i = 0; i < args.k; i += kTogether) {
    const int64_t groups = smaller(args.k - i, kTogether) / kBlockGroup;
    Vec words[kLanes];
    for (int64_t r = 0; r < m; ++r) {
      const X* row = rows + r * args.x_stride + i;
      IVec parts[2][2] = {{splat_int(0), splat_int(0)}, {splat_int(0), splat_int(0)}};
      for (int64_t g = 0; g < groups; ++g) {
        round_group(row + g * kBlockGroup, tile.scales + (i / kBlockGroup + g) * m + r, parts[g]);
        if (has_halves) {
          store_sum(sums + 2 * g * m + r, parts[g][0]);
          store_sum(sums + (2 * g + 1) * m + r, parts[g][1]);
        } else {
          store_sum(sums + g * m + r, parts[g][0] + parts[g][1]);
        }
      }
      words[r] = as_float(pack_bytes({parts[0][0], parts[0][1], parts[1][0], parts[1][1]}));
    }
    sums += groups * format.scales_of_group() * m;
    turn_rows(words, m, groups * kGroupWords, reinterpret_cast<float*>(tile.bytes + i * m));
  }
}

// --- few rows -----------------------------------------------------------------------------------------------------------

// The most rows that read the panels in place. AVX2 has too few registers for the totals of more than one row. More than five rows
// are faster if the panels are unpacked once.
#if defined(OCTAVO_ISA_AVX512)
constexpr int kRowsInPlace = 5;
#else
constexpr int kRowsInPlace = 1;
#endif

template <class Out>
OCTAVO_INLINE void write_block_sums(const LinearArgs& args, Vec (&sums)[kPanelVecs], int64_t first_column, char* out) {
  OCTAVO_UNROLL
  for (int v = 0; v < kPanelVecs; ++v) {
    if (args.bias != nullptr) sums[v] = sums[v] + load(args.bias + first_column + v * kLanes);
  }
  store_columns(reinterpret_cast<Out*>(out), sums, args.n - first_column);
}

OCTAVO_INLINE void write_block_sums(const LinearArgs& args, Vec (&sums)[kPanelVecs], int64_t first_column, char* out) {
  if (args.out_dtype == DType::kFloat32) {
    write_block_sums<float>(args, sums, first_column, out);
  } else {
    write_block_sums<bf16>(args, sums, first_column, out);
  }
}

// The words of M rows in one group: from memory, or in registers if there is one row.
template <int M>
struct GroupRows {
  const uint8_t* bytes;  // [words][M][4]
  const float* scales;   // [M]

  GroupRows(const BlockTile& tile, int64_t group) : bytes(tile.bytes + group * kBlockGroup * M), scales(tile.scales + group * M) {}
  OCTAVO_INLINE IVec word(int64_t i, int m) const { return load_four(bytes + (i * M + m) * 4); }
  OCTAVO_INLINE Vec scale(int m) const { return splat(scales[m]); }
};

template <>
struct GroupRows<1> {
  IVec words[kGroupWords];
  Vec group_scale;

  OCTAVO_INLINE GroupRows(const BlockTile& tile, int64_t group) : group_scale(splat(tile.scales[group])) {
    OCTAVO_UNROLL
    for (int64_t word = 0; word < kGroupWords; ++word) words[word] = load_four(tile.bytes + group * kBlockGroup + word * 4);
  }
  OCTAVO_INLINE IVec word(int64_t i, int) const { return words[i]; }
  OCTAVO_INLINE Vec scale(int) const { return group_scale; }
};

// Adds the terms of M rows' group for a vector of columns to the totals. head, super: see BlockHead. row_sums: [scales][M].
// Calls ask(line) before each line is multiplied, to prefetch memory.
template <DType kKind, int M, class Ask>
OCTAVO_INLINE void add_group(const uint8_t* super, const uint8_t* head, const uint8_t* values, const GroupRows<M>& rows,
                             const int32_t* row_sums, Vec (&totals)[M], const Ask& ask) {
  constexpr BlockFormat kFormat = format_of(kKind);
  constexpr int kLastLine = static_cast<int>(kFormat.scale_group / kNibbleDepth) - 1;  // of those that share a scale
  constexpr bool kIsSigned = is_signed(kFormat);
  constexpr int kHalfLines = words_in_halves(kFormat) / 2;
  static_assert(kHalfLines == 0 || M == 1);
  const GroupValues<kFormat.values> group(values);
  IVec sums[M], halves = splat_int(0);
  const auto begin_part = [&](int part) __attribute__((always_inline)) {
    OCTAVO_UNROLL
    for (int m = 0; m < M; ++m) {
      sums[m] = kFormat.has_minima ? splat_int(0) : splat_int(static_cast<uint32_t>(row_sums[part * M + m]));
    }
  };
  begin_part(0);
  for_each_line([&](auto line) __attribute__((always_inline)) {
    constexpr int kLine = line, kPart = kLine / (kLastLine + 1);
    ask(kLine);
    IVec lower, upper;
    group.template line<kLine>(lower, upper);
    if constexpr (kHalfLines != 0) {
      halves = add_nibble_products(add_nibble_products(halves, lower, rows.word(2 * kLine, 0)), upper, rows.word(2 * kLine + 1, 0));
      if constexpr (kLine % kHalfLines == kHalfLines - 1) {
        sums[0] = add_halves(sums[0], halves);
        halves = splat_int(0);
      }
    } else {
      OCTAVO_UNROLL
      for (int m = 0; m < M; ++m) sums[m] = add_block_products<kIsSigned>(sums[m], lower, rows.word(2 * kLine, m));
      OCTAVO_UNROLL
      for (int m = 0; m < M; ++m) sums[m] = add_block_products<kIsSigned>(sums[m], upper, rows.word(2 * kLine + 1, m));
    }
    if constexpr (kLine % (kLastLine + 1) == kLastLine) {
      const Vec scale = BlockHead<kKind>::scale(super, head, kPart);
      Vec minimum = splat(0.0f);
      if constexpr (kFormat.has_minima) minimum = BlockHead<kKind>::minimum(super, head);
      OCTAVO_UNROLL
      for (int m = 0; m < M; ++m) {
        Vec value = to_float(sums[m]) * scale;
        if constexpr (kFormat.has_minima) value = value + to_float(splat_int(static_cast<uint32_t>(row_sums[m]))) * minimum;
        totals[m] = totals[m] + value * rows.scale(m);
      }
      if (kLine != 3) begin_part(kPart + 1);
    }
  });
}

// Multiplies P panels from `panel` on by a tile of M rows.
template <DType kKind, int P, int M>
void multiply_few(const LinearArgs& args, const BlockPanels& weight, const BlockTile& tile, int64_t panel, Place out, Ahead ahead) {
  constexpr BlockFormat kFormat = format_of(kKind);
  constexpr int64_t kBytes = kFormat.group_bytes();
  const uint8_t *w = weight.panel(panel), *super = w;
  const int32_t* row_sums = tile.sums;
  Vec totals[P][kPanelVecs][M];
  OCTAVO_UNROLL
  for (int p = 0; p < P; ++p) {
    OCTAVO_UNROLL
    for (int v = 0; v < kPanelVecs; ++v) {
      OCTAVO_UNROLL
      for (int m = 0; m < M; ++m) totals[p][v][m] = splat(0.0f);
    }
  }
  ahead.ask_rows(P);
  for (int64_t group = 0; group < weight.groups; ++group) {
    if (kFormat.super_bytes() != 0 && group % kSuperGroups == 0) {
      super = w;
      w += kFormat.super_bytes();
    }
    const GroupRows<M> rows(tile, group);
    OCTAVO_UNROLL
    for (int p = 0; p < P; ++p) {
      const int64_t other = p * weight.panel_bytes;
      OCTAVO_UNROLL
      for (int v = 0; v < kPanelVecs; ++v) {
        const auto ask = [&](int line) __attribute__((always_inline)) {
          OCTAVO_UNROLL
          for (int64_t byte = (v * 4 + line) * 64; byte < kBytes; byte += kPanelVecs * 4 * 64) {
            prefetch_l2(w + other + kStreamPrefetchBytes + byte);
          }
        };
        add_group<kKind>(super + other + v * kHalfColumns, w + other + v * kFormat.head_step(),
                         w + other + kFormat.head_bytes() + v * 4 * kLanes, rows, row_sums, totals[p][v], ask);
      }
    }
    if constexpr (P == 1 || kFewRowsAskAhead) {
      OCTAVO_UNROLL
      for (int64_t asked = 0; asked < kBytes; asked += Ahead::kAskedBytes) {
        OCTAVO_UNROLL
        for (int p = 0; p < P; ++p) ahead.ask(p);
        ahead.step();
      }
    }
    w += kBytes;
    row_sums += kFormat.scales_of_group() * M;
  }
  OCTAVO_UNROLL
  for (int p = 0; p < P; ++p) {
    const Place place = right_of(args, out, p);
    OCTAVO_UNROLL
    for (int m = 0; m < M; ++m) {
      Vec sums[kPanelVecs];
      OCTAVO_UNROLL
      for (int v = 0; v < kPanelVecs; ++v) sums[v] = totals[p][v][m];
      write_block_sums(args, sums, (panel + p) * kPanelColumns, place.data + m * place.row_bytes);
    }
  }
}

// Multiplies one tile of M rows by all panels.
template <DType kKind, int M>
void linear_of_few_rows(ThreadPool& pool, const LinearArgs& args, const BlockPanels& weight, const BlockTile& tile) {
  constexpr int64_t kAsks = (format_of(kKind).group_bytes() + Ahead::kAskedBytes - 1) / Ahead::kAskedBytes;  // of a group
  constexpr int kAtOnce = M == 1 ? panels_at_once(1, kNibbleSums) : 1;  // streams from memory
  const PanelMemory panels{reinterpret_cast<const char*>(weight.data), weight.panel_bytes, weight.groups * kAsks};
  multiply_block(pool, args, BlockOfRows(0, M, M), panels, kAtOnce,
                 [&](int64_t, int64_t first, int64_t count, Place out, const Ahead& ahead) {
                   for_each_panel<kAtOnce>(args, count, out, ahead,
                                           [&](auto at_once, int64_t panel, Place place, const Ahead& next) {
                                             multiply_few<kKind, at_once, M>(args, weight, tile, first + panel, place, next);
                                           });
                 });
}

// linear_of_few_rows for 1 .. kRowsInPlace rows.
template <DType kKind>
struct FewRowsFunctions {
  decltype(&linear_of_few_rows<kKind, 1>) of_rows[kRowsInPlace + 1];
  constexpr FewRowsFunctions() : FewRowsFunctions(std::make_integer_sequence<int, kRowsInPlace>()) {}
  template <int... I>
  constexpr explicit FewRowsFunctions(std::integer_sequence<int, I...>) : of_rows{nullptr, linear_of_few_rows<kKind, I + 1>...} {}
};

// --- more rows ----------------------------------------------------------------------------------------------------------

// Rows of a tile, and accumulators: with VNNI, the sums of half of the rows are added up while the other half is multiplied.
#if defined(OCTAVO_ISA_VNNI)
constexpr int kPieceRows = 8, kMostPieceSums = 16;
#else
constexpr int kPieceRows = kNibbleRows, kMostPieceSums = kMostNibbleSums;
#endif

constexpr int64_t kPieceGroups = kSuperGroups;  // groups of a panel that are unpacked at a time, which stay in L1
constexpr int64_t kPieceScales = 2 * kPieceGroups;  // of a column, at most

// An unpacked piece of a panel: values from `GroupValues`, scales and minima in float32.
struct UnpackedPiece {
  alignas(64) uint8_t values[kPieceGroups * kGroupWords][kNibbleBytes];
  alignas(64) float scales[kPieceScales][kPanelColumns];
  alignas(64) float minima[kPieceGroups][kPanelColumns];
};

// Unpacks `groups` groups from `w` on, which must be the first of eight.
template <DType kKind>
void unpack_blocks(const uint8_t* w, int64_t groups, UnpackedPiece& out) {
  constexpr BlockFormat kFormat = format_of(kKind);
  constexpr int64_t kBytes = kFormat.group_bytes(), kParts = kFormat.scales_of_group();
  const uint8_t* super = w;
  w += kFormat.super_bytes();
  for (int64_t group = 0; group < groups; ++group, w += kBytes) {
    OCTAVO_UNROLL
    for (int v = 0; v < kPanelVecs; ++v) {
      const uint8_t *vec_super = super + v * kHalfColumns, *head = w + v * kFormat.head_step();
      const GroupValues<kFormat.values> from(w + kFormat.head_bytes() + v * 4 * kLanes);
      for_each_line([&](auto line) __attribute__((always_inline)) {
        IVec lower, upper;
        from.template line<line>(lower, upper);
        store_int(out.values[group * kGroupWords + 2 * line] + v * 4 * kLanes, lower);
        store_int(out.values[group * kGroupWords + 2 * line + 1] + v * 4 * kLanes, upper);
      });
      OCTAVO_UNROLL
      for (int64_t part = 0; part < kParts; ++part) {
        store(out.scales[group * kParts + part] + v * kLanes, BlockHead<kKind>::scale(vec_super, head, part));
      }
      if constexpr (kFormat.has_minima) store(out.minima[group] + v * kLanes, BlockHead<kKind>::minimum(vec_super, head));
    }
  }
}

// Memory to prefetch while a piece is multiplied, a part of it with each group or half of a group.
struct Prefetched {
  const uint8_t* next;
  int64_t bytes;  // of a part

  OCTAVO_INLINE void ask() {
    for (int64_t byte = 0; byte < bytes; byte += 64) prefetch_l2(next + byte);
    next += bytes;
  }
};

// The kernel for an unpacked panel; this and words_in_halves are all that the kernel depends on in a format.
enum class BlockForm { kPlain, kSigned, kHalves, kMinima };

constexpr BlockForm form_of(const BlockFormat& format) {
  return format.has_minima                   ? BlockForm::kMinima
         : format.scale_group != kBlockGroup ? BlockForm::kHalves
         : is_signed(format)                 ? BlockForm::kSigned
                                             : BlockForm::kPlain;
}

// Adds the products of V vectors of an unpacked word with four k of M rows: add(sum, columns, four k).
template <int M, int V, class Add>
OCTAVO_INLINE void add_word(const uint8_t* w, const uint8_t* x, IVec (&sums)[M][V], const Add& add) {
  IVec columns[V];
  OCTAVO_UNROLL
  for (int v = 0; v < V; ++v) columns[v] = load_int(w + v * 4 * kLanes);
  OCTAVO_UNROLL
  for (int m = 0; m < M; ++m) {
    const IVec four = load_four(x + m * 4);
    OCTAVO_UNROLL
    for (int v = 0; v < V; ++v) sums[m][v] = add(sums[m][v], columns[v], four);
  }
}

// The groups, or halves of groups, of a piece and a tile that share a scale, and the place in them of a kernel.
template <BlockForm kForm, int M>
struct PlaceInPiece {
  static constexpr int64_t kParts = kForm == BlockForm::kHalves ? 2 : 1;
  static constexpr int kWords = kGroupWords / kParts;

  const UnpackedPiece* piece;
  const uint8_t *w, *x;
  const float* row_scales;
  const int32_t* row_sums;
  int64_t part = 0;

  PlaceInPiece(const UnpackedPiece& piece, const BlockTile& tile, int64_t first, int vec)
      : piece(&piece),
        w(piece.values[0] + vec * 4 * kLanes),
        x(tile.bytes + first * kBlockGroup * M),
        row_scales(tile.scales + first * M),
        row_sums(tile.sums + first * kParts * M) {}

  OCTAVO_INLINE void next() {
    ++part;
    w += kWords * kNibbleBytes;
    x += kWords * M * 4;
    row_sums += M;
    if (kForm != BlockForm::kHalves || part % 2 == 0) row_scales += M;
  }
  OCTAVO_INLINE IVec first_sum(int m) const {
    return kForm == BlockForm::kMinima ? splat_int(0) : splat_int(static_cast<uint32_t>(row_sums[m]));
  }
  // For vector v of the columns.
  OCTAVO_INLINE Vec scale(int v) const { return load(piece->scales[part] + v * kLanes); }
  OCTAVO_INLINE Vec minimum(int v) const {
    return kForm == BlockForm::kMinima ? load(piece->minima[part] + v * kLanes) : splat(0.0f);
  }
  // Adds the term of row m.
  OCTAVO_INLINE void add(IVec sums, Vec scale, Vec minimum, int m, int v, float* totals) const {
    float* total = totals + m * kPanelColumns + v * kLanes;
    Vec value = to_float(sums) * scale;
    if (kForm == BlockForm::kMinima) value = value + to_float(splat_int(static_cast<uint32_t>(row_sums[m]))) * minimum;
    store(total, load(total) + value * splat(row_scales[m]));
  }
};

#if defined(OCTAVO_ISA_VNNI)
// The sums of rows kRow .. kRow + H of a tile of M rows, for V vectors of columns.
template <BlockForm kForm, int M, int V, int kRow, int H>
struct SumsOfRows {
  using At = PlaceInPiece<kForm, M>;

  IVec sums[H][V];

  // Computes the sums, and calls between(word) after each word of four k.
  template <class Between>
  OCTAVO_INLINE void compute(const At& at, const Between& between) {
    OCTAVO_UNROLL
    for (int m = 0; m < H; ++m) {
      OCTAVO_UNROLL
      for (int v = 0; v < V; ++v) sums[m][v] = at.first_sum(kRow + m);
    }
    OCTAVO_UNROLL
    for (int word = 0; word < At::kWords; ++word) {
      add_word(at.w + word * kNibbleBytes, at.x + (word * M + kRow) * 4, sums, add_block_products<kForm == BlockForm::kSigned>);
      between(word);
    }
  }

  // Adds the terms of some rows to the totals; for all words together, those of all rows.
  OCTAVO_INLINE void add_terms(const At& at, int word, int vec, float* totals) const {
    OCTAVO_UNROLL
    for (int m = 0; m < H; ++m) {
      if (m * At::kWords / H != word) continue;
      OCTAVO_UNROLL
      for (int v = 0; v < V; ++v) {
        at.add(sums[m][v], at.scale(vec + v), at.minimum(vec + v), kRow + m, vec + v, totals);
      }
    }
  }
};

// Multiplies V vectors of columns, from vector `vec` on, of the `groups` groups of a piece by the M rows of a tile, from its group
// `first` on, and adds to the totals [M][32]. While the sums of half of the rows are computed, the terms of the other half are
// added to the totals.
template <BlockForm kForm, int kInHalves, int M, int V>
OCTAVO_INLINE void sum_blocks(const UnpackedPiece& piece, const BlockTile& tile, int64_t first, int64_t groups, int vec,
                              Prefetched prefetched, float* totals) {
  static_assert(kInHalves == 0);
  constexpr int kHalf = (M + 1) / 2;
  PlaceInPiece<kForm, M> at(piece, tile, first, vec), before = at;
  SumsOfRows<kForm, M, V, 0, kHalf> one;
  SumsOfRows<kForm, M, V, kHalf, (M > 1 ? M - kHalf : 1)> other;
  const auto compute_other = [&]() __attribute__((always_inline)) {
    const auto add_one = [&](int word) __attribute__((always_inline)) { one.add_terms(at, word, vec, totals); };
    if constexpr (M > 1) {
      other.compute(at, add_one);
    } else {
      add_one(0);
    }
    prefetched.ask();
    before = at;
    at.next();
  };
  one.compute(at, [](int) {});
  compute_other();
  for (int64_t part = 1; part < groups * at.kParts; ++part) {
    one.compute(at, [&](int word) __attribute__((always_inline)) {
      if constexpr (M > 1) other.add_terms(before, word, vec, totals);
    });
    compute_other();
  }
  if constexpr (M > 1) {
    OCTAVO_UNROLL
    for (int word = 0; word < at.kWords; ++word) other.add_terms(before, word, vec, totals);
  }
}
#else
// Multiplies V vectors of columns, from vector `vec` on, of the `groups` groups of a piece by the M rows of a tile, from its group
// `first` on, and adds to the totals [M][32]. kInHalves: words_in_halves.
template <BlockForm kForm, int kInHalves, int M, int V>
OCTAVO_INLINE void sum_blocks(const UnpackedPiece& piece, const BlockTile& tile, int64_t first, int64_t groups, int vec,
                              Prefetched prefetched, float* totals) {
  for (PlaceInPiece<kForm, M> at(piece, tile, first, vec); at.part < groups * at.kParts; at.next()) {
    prefetched.ask();
    IVec sums[M][V];
    OCTAVO_UNROLL
    for (int m = 0; m < M; ++m) {
      OCTAVO_UNROLL
      for (int v = 0; v < V; ++v) sums[m][v] = at.first_sum(m);
    }
    const uint8_t *w = at.w, *x = at.x, *const end = w + at.kWords * kNibbleBytes;
    do {
      if constexpr (kInHalves != 0) {
        IVec halves[M][V] = {};
        OCTAVO_UNROLL
        for (int word = 0; word < kInHalves; ++word, x += M * 4, w += kNibbleBytes) {
          add_word(w, x, halves, [](IVec sum, IVec columns, IVec four) { return add_nibble_products(sum, columns, four); });
        }
        OCTAVO_UNROLL
        for (int m = 0; m < M; ++m) {
          OCTAVO_UNROLL
          for (int v = 0; v < V; ++v) sums[m][v] = add_halves(sums[m][v], halves[m][v]);
        }
      } else {
        add_word(w, x, sums, add_block_products<kForm == BlockForm::kSigned>);
        x += M * 4;
        w += kNibbleBytes;
      }
    } while (w != end);
    asm volatile("" : : "r"(totals) : "memory");  // else GCC keeps the totals in registers, and spills the sums in the loop
    OCTAVO_UNROLL
    for (int v = 0; v < V; ++v) {
      const Vec scale = at.scale(vec + v), minimum = at.minimum(vec + v);
      OCTAVO_UNROLL
      for (int m = 0; m < M; ++m) at.add(sums[m][v], scale, minimum, m, vec + v, totals);
    }
  }
}
#endif

template <BlockForm kForm, int kInHalves, int M>
void multiply_piece(const UnpackedPiece& piece, const BlockTile& tile, int64_t first, int64_t groups, Prefetched prefetched,
                    float* totals) {
  constexpr int V = vecs_at_once(M, kMostPieceSums);
  for (int vec = 0; vec < kPanelVecs; vec += V) {
    sum_blocks<kForm, kInHalves, M, V>(piece, tile, first, groups, vec, prefetched, totals);
    prefetched.bytes = 0;
  }
}

// multiply_piece of a form for 1 .. kPieceRows rows.
template <BlockForm kForm, int kInHalves>
struct BlockFunctions {
  decltype(&multiply_piece<kForm, kInHalves, 1>) of_rows[kPieceRows + 1];
  constexpr BlockFunctions() : BlockFunctions(std::make_integer_sequence<int, kPieceRows>()) {}
  template <int... I>
  constexpr explicit BlockFunctions(std::integer_sequence<int, I...>) : of_rows{nullptr, multiply_piece<kForm, kInHalves, I + 1>...} {}
};

// Multiplies a block of rows by all panels. tile_at(i): its i-th tile.
template <DType kKind, class TileAt>
void multiply_block_rows(ThreadPool& pool, const LinearArgs& args, const BlockPanels& weight, const BlockOfRows& block,
                         const TileAt& tile_at) {
  constexpr BlockFormat kFormat = format_of(kKind);
  static constexpr BlockFunctions<form_of(kFormat), words_in_halves(kFormat)> kMultiply;
  const int64_t panels = args.num_panels;
  const auto totals_size = static_cast<size_t>(block.rows * kPanelColumns) * sizeof(float);
  pool.reserve_local(sizeof(UnpackedPiece) + totals_size);
  parallel_ahead(pool, panels, [&](int64_t task, int64_t following, int thread) {
    const int64_t panel = args.first_panel + task;
    auto& piece = *static_cast<UnpackedPiece*>(pool.local(thread));
    auto* totals = reinterpret_cast<float*>(&piece + 1);
    std::memset(totals, 0, totals_size);
    const int64_t to_next = (smaller(following, panels - 1) - task) * weight.panel_bytes;  // at most the last panel
    for (int64_t first = 0; first < weight.groups; first += kPieceGroups) {
      const int64_t groups = smaller(kPieceGroups, weight.groups - first);
      const uint8_t* w = weight.panel(panel) + weight.offset(first);
      unpack_blocks<kKind>(w, groups, piece);
      Prefetched prefetched{w + to_next, divide_up(kFormat.group_bytes() + kFormat.super_bytes() / kSuperGroups,
                                                   kFormat.scales_of_group() * 64) * 64};
      for (int64_t tile = 0; tile < block.tiles(); ++tile) {
        float* out = totals + tile * block.tile_rows * kPanelColumns;
        kMultiply.of_rows[block.rows_of(tile)](piece, tile_at(tile), first, groups, prefetched, out);
        prefetched.bytes = 0;
      }
    }
    Place out = place_of(args, block.first, panel * kPanelColumns);
    for (int64_t row = 0; row < block.rows; ++row, out.data += out.row_bytes, totals += kPanelColumns) {
      Vec sums[kPanelVecs];
      OCTAVO_UNROLL
      for (int v = 0; v < kPanelVecs; ++v) sums[v] = load(totals + v * kLanes);
      write_block_sums(args, sums, panel * kPanelColumns, out.data);
    }
  });
}

inline void linear_of_blocks(ThreadPool& pool, const LinearArgs& args) {
  if (args.rows == 0) return;
  const BlockPanels weight(args.weight, args.weight_dtype, args.k);
  const int64_t numbers = weight.groups * (1 + weight.format.scales_of_group());  // scales and sums of a row
  const int64_t most_rows = larger(int64_t{1}, kBlockBytes / larger(args.k, int64_t{1}) / kPieceRows) * kPieceRows;
  const bool are_few = args.rows <= smaller(most_rows, int64_t{kRowsInPlace});
  const int64_t tallest = are_few ? args.rows : kPieceRows, block_rows = rows_of_a_block(args.rows, most_rows, kPieceRows);
  auto* bytes = static_cast<uint8_t*>(pool.shared(static_cast<size_t>(block_rows * (args.k + numbers * 4))));
  auto* scales = reinterpret_cast<float*>(bytes + block_rows * args.k);
  auto* sums = reinterpret_cast<int32_t*>(scales + block_rows * weight.groups);
  const auto round = args.x_dtype == DType::kFloat32 ? round_block_rows<float> : round_block_rows<bf16>;
  for (int64_t first = 0; first < args.rows; first += block_rows) {
    const BlockOfRows block(first, smaller(block_rows, args.rows - first), tallest);
    const auto tile_at = [&](int64_t tile) {
      const int64_t row = tile * block.tile_rows;
      return BlockTile{bytes + row * args.k, scales + row * weight.groups,
                       sums + row * weight.groups * weight.format.scales_of_group()};
    };
    parallel(pool, block.tiles(), [&](int64_t tile, int) {
      round(args, weight.format, first + tile * block.tile_rows, block.rows_of(tile), tile_at(tile));
    });
    for_kind(args.weight_dtype, [&](auto kind) {
      static constexpr FewRowsFunctions<kind> kOfFewRows;
      if (are_few) {
        kOfFewRows.of_rows[args.rows](pool, args, weight, tile_at(0));
      } else {
        multiply_block_rows<kind>(pool, args, weight, block, tile_at);
      }
    });
  }
}

}  // namespace octavo::OCTAVO_ISA

#if defined(OCTAVO_ISA_VNNI) && defined(__GNUC__) && !defined(__clang__)
#pragma GCC pop_options
#endif
