// Matrix products of weights in the blocks of GGUF files (block_formats.h) and activations that are rounded to bytes on the way,
// with a scale for each 32 consecutive k of a row. Sums of integers are exact, and what they make is added in float32 in the order
// of k, so a result does not depend on the number of rows or the instruction set:
//
//   out = sum, k ascending, of (float(sum of x w) * scale [+ float(sum of x) * minimum]) * (scale of the row's group)  [+ bias]
//
// for every k that share a scale of the weight, each operation rounded once. A single row reads the panels as they stand in
// memory. For more rows a panel is unpacked once, into bytes and float32 scales in a cache, whatever its kind.
#pragma once

#include "block_formats.h"

#if defined(OCTAVO_ISA_VNNI) && defined(__GNUC__) && !defined(__clang__)  // else GCC copies a tile's sums in its inner loop
#pragma GCC push_options
#pragma GCC optimize("no-tree-coalesce-vars")
#endif

namespace octavo::OCTAVO_ISA {

// Some rows as a product reads them: bytes, the scales of their groups, and the sums of what shares a scale of the weight, times
// a factor.
struct BlockTile {
  uint8_t* bytes;  // [words][rows][4]
  float* scales;   // [groups][rows]
  int32_t* sums;   // [scales of a column][rows]
};

// `m` rows from `first` on, at most sixteen.
template <class X>
void round_block_rows(const LinearArgs& args, const BlockFormat& format, int64_t first, int64_t m, const BlockTile& tile) {
  constexpr int64_t kTogether = 2 * kBlockGroup, kParts = kTogether / kLanes;
  const X* const rows = static_cast<const X*>(args.x) + first * args.x_stride;
  const int32_t factor = format.has_minima ? 1 : is_signed(format) ? 0 : -format.center;
  int32_t* sums = tile.sums;
  for (int64_t i = 0; i < args.k; i += kTogether) {
    const int64_t groups = smaller(args.k - i, kTogether) / kBlockGroup;
    Vec words[kLanes];
    for (int64_t r = 0; r < m; ++r) {
      const X* row = rows + r * args.x_stride + i;
      IVec parts[kParts] = {splat_int(0), splat_int(0), splat_int(0), splat_int(0)};
      for (int64_t g = 0; g < groups; ++g) {
        const RowScale found = row_scale(row + g * kBlockGroup, kBlockGroup);
        tile.scales[(i / kBlockGroup + g) * m + r] = found.scale;
        IVec* part = parts + g * kBlockGroup / kLanes;
        for (int64_t j = 0; j < 2; ++j) part[j] = to_int(load(row + g * kBlockGroup + j * kLanes) * splat(found.inverse));
        if (format.scale_group == kBlockGroup) {
          sums[g * m + r] = sum_of_lanes(part[0] + part[1]) * factor;
        } else {
          for (int64_t j = 0; j < 2; ++j) sums[(2 * g + j) * m + r] = sum_of_lanes(part[j]) * factor;
        }
      }
      words[r] = as_float(pack_bytes(parts));
    }
    sums += groups * format.scales_of_group() * m;
    turn_rows(words, m, groups * kGroupWords, reinterpret_cast<float*>(tile.bytes + i * m));
  }
}

// --- one row ------------------------------------------------------------------------------------------------------------

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

// The sums of a vector of columns over a group of one row, as floats, added to the total. head, super: see BlockHead.
template <DType kKind>
OCTAVO_INLINE void add_group(const uint8_t* super, const uint8_t* head, const uint8_t* values, const IVec (&x)[kGroupWords],
                             const int32_t* row_sums, Vec row_scale, Vec& total) {
  constexpr BlockFormat kFormat = format_of(kKind);
  constexpr int kLastLine = static_cast<int>(kFormat.scale_group / kNibbleDepth) - 1;  // of those that share a scale
  constexpr bool kIsSigned = is_signed(kFormat);
  const GroupValues<kFormat.values> group(values);
  const auto first_sum_of = [&](int part) {
    return kFormat.has_minima ? splat_int(0) : splat_int(static_cast<uint32_t>(row_sums[part]));
  };
  IVec sum = first_sum_of(0);
  for_each_line([&](auto line) __attribute__((always_inline)) {
    constexpr int kLine = line, kPart = kLine / (kLastLine + 1);
    IVec lower, upper;
    group.template line<kLine>(lower, upper);
    sum = add_block_products<kIsSigned>(sum, lower, x[2 * kLine]);
    sum = add_block_products<kIsSigned>(sum, upper, x[2 * kLine + 1]);
    if constexpr (kLine % (kLastLine + 1) == kLastLine) {
      Vec value = to_float(sum) * BlockHead<kKind>::scale(super, head, kPart);
      if constexpr (kFormat.has_minima) {
        value = value + to_float(splat_int(static_cast<uint32_t>(row_sums[0]))) * BlockHead<kKind>::minimum(super, head);
      }
      total = total + value * row_scale;
      if (kLine != 3) sum = first_sum_of(kPart + 1);
    }
  });
}

// P panels from `panel` on for one row.
template <DType kKind, int P>
void multiply_row(const LinearArgs& args, const BlockPanels& weight, const BlockTile& row, int64_t panel, Place out,
                  Ahead ahead) {
  constexpr BlockFormat kFormat = format_of(kKind);
  constexpr int64_t kBytes = kFormat.group_bytes();
  const uint8_t *w = weight.panel(panel), *super = w;
  const int32_t* row_sums = row.sums;
  Vec totals[P][kPanelVecs];
  OCTAVO_UNROLL
  for (int p = 0; p < P; ++p) {
    OCTAVO_UNROLL
    for (int v = 0; v < kPanelVecs; ++v) totals[p][v] = splat(0.0f);
  }
  ahead.ask_rows(P);
  for (int64_t group = 0; group < weight.groups; ++group) {
    if (kFormat.super_bytes() != 0 && group % kSuperGroups == 0) {
      super = w;
      w += kFormat.super_bytes();
    }
    IVec x[kGroupWords];
    OCTAVO_UNROLL
    for (int64_t word = 0; word < kGroupWords; ++word) x[word] = load_four(row.bytes + group * kBlockGroup + word * 4);
    const Vec row_scale = splat(row.scales[group]);
    OCTAVO_UNROLL
    for (int p = 0; p < P; ++p) {
      const int64_t other = p * weight.panel_bytes;
      OCTAVO_UNROLL
      for (int64_t byte = 0; byte < kBytes; byte += 64) prefetch_l2(w + other + kPrefetchBytes + byte);
      OCTAVO_UNROLL
      for (int v = 0; v < kPanelVecs; ++v) {
        add_group<kKind>(super + other + v * kHalfColumns, w + other + v * kFormat.head_step(),
                         w + other + kFormat.head_bytes() + v * 4 * kLanes, x, row_sums, row_scale, totals[p][v]);
      }
    }
    OCTAVO_UNROLL
    for (int64_t asked = 0; asked < kBytes; asked += Ahead::kAskedBytes) {
      OCTAVO_UNROLL
      for (int p = 0; p < P; ++p) ahead.ask(p);
      ahead.step();
    }
    w += kBytes;
    row_sums += kFormat.scales_of_group();
  }
  OCTAVO_UNROLL
  for (int p = 0; p < P; ++p) {
    write_block_sums(args, totals[p], (panel + p) * kPanelColumns, right_of(args, out, p).data);
  }
}

// Panels at once: as many streams from memory as there are registers for.
constexpr int kRowPanels = panels_at_once(1, kNibbleSums);

template <DType kKind>
void linear_of_block_row(ThreadPool& pool, const LinearArgs& args, const BlockPanels& weight, const BlockTile& row) {
  constexpr int64_t kAsks = (format_of(kKind).group_bytes() + Ahead::kAskedBytes - 1) / Ahead::kAskedBytes;  // of a group
  const PanelMemory panels{reinterpret_cast<const char*>(weight.data), weight.panel_bytes, weight.groups * kAsks};
  multiply_block(pool, args, BlockOfRows(0, 1, 1), panels, kRowPanels,
                 [&](int64_t, int64_t first, int64_t count, Place out, const Ahead& ahead) {
                   for_each_panel<kRowPanels>(args, count, out, ahead,
                                              [&](auto at_once, int64_t panel, Place place, const Ahead& next) {
                                                multiply_row<kKind, at_once>(args, weight, row, first + panel, place, next);
                                              });
                 });
}

// --- more rows ----------------------------------------------------------------------------------------------------------

// A panel in the memory of a thread: values as `GroupValues` gives them, scales and minima in float32.
struct UnpackedPanel {
  uint8_t* values;  // [words][32][4]
  float* scales;    // [scales of a column][32]
  float* minima;    // [groups][32], or nothing

  static int64_t size(const BlockPanels& weight) {
    const int64_t numbers = weight.format.numbers() * static_cast<int64_t>(sizeof(float));
    return weight.groups * kPanelColumns * (kBlockGroup + numbers);
  }
  UnpackedPanel(void* memory, const BlockPanels& weight)
      : values(static_cast<uint8_t*>(memory)),
        scales(reinterpret_cast<float*>(values + weight.groups * kBlockGroup * kPanelColumns)),
        minima(scales + weight.groups * weight.format.scales_of_group() * kPanelColumns) {}
};

// Unpacks a panel. Where there is a `next` one it is asked for meanwhile.
template <DType kKind>
void unpack_blocks(const BlockPanels& weight, const uint8_t* w, const uint8_t* next, const UnpackedPanel& out) {
  constexpr BlockFormat kFormat = format_of(kKind);
  constexpr int64_t kBytes = kFormat.group_bytes(), kParts = kFormat.scales_of_group();
  const uint8_t* super = w;
  uint8_t* values = out.values;
  float *scales = out.scales, *minima = out.minima;
  const int64_t to_next = next == nullptr ? 0 : next - w;
  for (int64_t group = 0; group < weight.groups; ++group) {
    if (kFormat.super_bytes() != 0 && group % kSuperGroups == 0) {
      super = w;
      w += kFormat.super_bytes();
    }
    OCTAVO_UNROLL
    for (int64_t byte = 0; byte < kBytes; byte += 64) prefetch_l2(w + to_next + byte);
    OCTAVO_UNROLL
    for (int v = 0; v < kPanelVecs; ++v) {
      const uint8_t *vec_super = super + v * kHalfColumns, *head = w + v * kFormat.head_step();
      const GroupValues<kFormat.values> from(w + kFormat.head_bytes() + v * 4 * kLanes);
      for_each_line([&](auto line) __attribute__((always_inline)) {
        IVec lower, upper;
        from.template line<line>(lower, upper);
        store_int(values + 2 * line * kNibbleBytes + v * 4 * kLanes, lower);
        store_int(values + (2 * line + 1) * kNibbleBytes + v * 4 * kLanes, upper);
      });
      OCTAVO_UNROLL
      for (int64_t part = 0; part < kParts; ++part) {
        store(scales + part * kPanelColumns + v * kLanes, BlockHead<kKind>::scale(vec_super, head, part));
      }
      if constexpr (kFormat.has_minima) store(minima + v * kLanes, BlockHead<kKind>::minimum(vec_super, head));
    }
    w += kBytes;
    values += kBlockGroup * kPanelColumns;
    scales += kParts * kPanelColumns;
    minima += kFormat.has_minima ? kPanelColumns : 0;
  }
}

// What an unpacked panel is multiplied by: all that decides it of a format.
enum class BlockForm { kPlain, kSigned, kHalves, kMinima };

constexpr BlockForm form_of(const BlockFormat& format) {
  return format.has_minima                   ? BlockForm::kMinima
         : format.scale_group != kBlockGroup ? BlockForm::kHalves
         : is_signed(format)                 ? BlockForm::kSigned
                                             : BlockForm::kPlain;
}

// V vectors of columns, from vector `vec` on, of an unpacked panel, for the M rows of a tile.
template <BlockForm kForm, int M, int V>
OCTAVO_INLINE void sum_blocks(const UnpackedPanel& panel, const BlockTile& tile, int64_t groups, int vec,
                              float (&totals)[M][kPanelColumns]) {
  constexpr int64_t kParts = kForm == BlockForm::kHalves ? 2 : 1, kWords = kGroupWords / kParts;
  const uint8_t *x = tile.bytes, *w = panel.values + vec * 4 * kLanes;
  const float *scales = panel.scales + vec * kLanes, *minima = panel.minima + vec * kLanes, *row_scales = tile.scales;
  const int32_t* row_sums = tile.sums;
  OCTAVO_UNROLL
  for (int m = 0; m < M; ++m) {
    OCTAVO_UNROLL
    for (int v = 0; v < V; ++v) store(&totals[m][(vec + v) * kLanes], splat(0.0f));
  }
  for (int64_t part = 0; part < groups * kParts; ++part) {
    IVec sums[M][V];
    OCTAVO_UNROLL
    for (int m = 0; m < M; ++m) {
      OCTAVO_UNROLL
      for (int v = 0; v < V; ++v) {
        sums[m][v] = kForm == BlockForm::kMinima ? splat_int(0) : splat_int(static_cast<uint32_t>(row_sums[m]));
      }
    }
    const uint8_t* end = w + kWords * kNibbleBytes;
    do {
      IVec columns[V];
      OCTAVO_UNROLL
      for (int v = 0; v < V; ++v) columns[v] = load_int(w + v * 4 * kLanes);
      OCTAVO_UNROLL
      for (int m = 0; m < M; ++m) {
        const IVec four = load_four(x + m * 4);
        OCTAVO_UNROLL
        for (int v = 0; v < V; ++v) {
          sums[m][v] = add_block_products<kForm == BlockForm::kSigned>(sums[m][v], columns[v], four);
        }
      }
      x += M * 4;
      w += kNibbleBytes;
    } while (w != end);
    asm volatile("" : : "r"(&totals) : "memory");  // or GCC keeps the totals in registers, and spills the sums in the loop
    OCTAVO_UNROLL
    for (int v = 0; v < V; ++v) {
      const Vec scale = load(scales + v * kLanes);
      const Vec minimum = kForm == BlockForm::kMinima ? load(minima + v * kLanes) : splat(0.0f);
      OCTAVO_UNROLL
      for (int m = 0; m < M; ++m) {
        Vec value = to_float(sums[m][v]) * scale;
        if (kForm == BlockForm::kMinima) {
          value = value + to_float(splat_int(static_cast<uint32_t>(row_sums[m]))) * minimum;
        }
        float* total = &totals[m][(vec + v) * kLanes];
        store(total, load(total) + value * splat(row_scales[m]));
      }
    }
    scales += kPanelColumns;
    minima += kForm == BlockForm::kMinima ? kPanelColumns : 0;
    row_sums += M;
    if (kForm != BlockForm::kHalves || part % 2 == 1) row_scales += M;
  }
}

// An unpacked panel times the M rows of a tile, written to `out`.
template <BlockForm kForm, int M>
void multiply_blocks(const LinearArgs& args, const UnpackedPanel& panel, const BlockTile& tile, int64_t first_column, Place out) {
  constexpr int V = vecs_at_once(M, kMostNibbleSums);
  alignas(64) float totals[M][kPanelColumns];
  prefetch_output(args, out, M, 1);
  for (int vec = 0; vec < kPanelVecs; vec += V) sum_blocks<kForm, M, V>(panel, tile, args.k / kBlockGroup, vec, totals);
  for (int m = 0; m < M; ++m, out.data += out.row_bytes) {
    Vec sums[kPanelVecs];
    OCTAVO_UNROLL
    for (int v = 0; v < kPanelVecs; ++v) sums[v] = load(&totals[m][v * kLanes]);
    write_block_sums(args, sums, first_column, out.data);
  }
}

// multiply_blocks of a form for 1 .. kNibbleRows rows.
template <BlockForm kForm>
struct BlockFunctions {
  decltype(&multiply_blocks<kForm, 1>) of_rows[kNibbleRows + 1];
  constexpr BlockFunctions() : BlockFunctions(std::make_integer_sequence<int, kNibbleRows>()) {}
  template <int... I>
  constexpr explicit BlockFunctions(std::integer_sequence<int, I...>) : of_rows{nullptr, multiply_blocks<kForm, I + 1>...} {}
};

// A block of rows times all panels. tile_at(i): its i-th tile.
template <DType kKind, class TileAt>
void multiply_block_rows(ThreadPool& pool, const LinearArgs& args, const BlockPanels& weight, const BlockOfRows& block,
                         const TileAt& tile_at) {
  static constexpr BlockFunctions<form_of(format_of(kKind))> kMultiply;
  const int64_t panels = divide_up(args.n, kPanelColumns);
  pool.reserve_local(static_cast<size_t>(UnpackedPanel::size(weight)));
  parallel_ahead(pool, panels, [&](int64_t panel, int64_t following, int thread) {
    const UnpackedPanel unpacked(pool.local(thread), weight);
    unpack_blocks<kKind>(weight, weight.panel(panel), following < panels ? weight.panel(following) : nullptr, unpacked);
    for (int64_t tile = 0; tile < block.tiles(); ++tile) {
      const Place out = place_of(args, block.first + tile * block.tile_rows, panel * kPanelColumns);
      kMultiply.of_rows[block.rows_of(tile)](args, unpacked, tile_at(tile), panel * kPanelColumns, out);
    }
  });
}

inline void linear_of_blocks(ThreadPool& pool, const LinearArgs& args) {
  if (args.rows == 0) return;
  const BlockPanels weight(args.weight, args.weight_dtype, args.k);
  const int64_t numbers = weight.groups * (1 + weight.format.scales_of_group());  // scales and sums of a row
  const int64_t most_rows = larger(int64_t{1}, kBlockBytes / larger(args.k, int64_t{1}) / kNibbleRows) * kNibbleRows;
  const int64_t block_rows = rows_of_a_block(args.rows, most_rows, kNibbleRows);
  auto* bytes = static_cast<uint8_t*>(pool.shared(static_cast<size_t>(block_rows * (args.k + numbers * 4))));
  auto* scales = reinterpret_cast<float*>(bytes + block_rows * args.k);
  auto* sums = reinterpret_cast<int32_t*>(scales + block_rows * weight.groups);
  const auto round = args.x_dtype == DType::kFloat32 ? round_block_rows<float> : round_block_rows<bf16>;
  for (int64_t first = 0; first < args.rows; first += block_rows) {
    const BlockOfRows block(first, smaller(block_rows, args.rows - first), kNibbleRows);
    const auto tile_at = [&](int64_t tile) {
      const int64_t row = tile * block.tile_rows;
      return BlockTile{bytes + row * args.k, scales + row * weight.groups,
                       sums + row * weight.groups * weight.format.scales_of_group()};
    };
    parallel(pool, block.tiles(), [&](int64_t tile, int) {
      round(args, weight.format, first + tile * block.tile_rows, block.rows_of(tile), tile_at(tile));
    });
    for_kind(args.weight_dtype, [&](auto kind) {
      if (args.rows == 1) {
        linear_of_block_row<kind>(pool, args, weight, tile_at(0));
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
