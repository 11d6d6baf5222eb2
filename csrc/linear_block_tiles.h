// The product of weights in the blocks of GGUF files (linear_blocks.h) by tiles, for more rows than a few. The tiles multiply the
// integers of a group; its terms are computed from the sums and added in float32, as linear_blocks.h defines them. So every result
// has the bits of the product without tiles.
//
// One instruction multiplies only the k that share a scale, and each of its 256 sums needs four or six operations of float32. These
// bound the product, with the loads and stores of tiles: the tiles themselves are idle most of the time. With scales for 16 k
// (Q6_K) a product without tiles is faster.
#pragma once

#include "linear_blocks.h"
#include "linear_tiles.h"

namespace octavo::OCTAVO_ISA {

#if defined(OCTAVO_ISA_AMX)

constexpr int64_t kFewestBlockTileRows = 48;     // fewer rows are faster without tiles, which take as long for 1 row as for 16
constexpr int64_t kNearBlockBytes = 768 * 1024;  // of rows that stay in the second-level cache while all panels pass
constexpr int64_t kGroupTileBytes = kTileHeight * kBlockGroup;  // of a tile of rows in a group

// Rounded rows in tiles of 16. The rows after the last one are zero.
struct BlockTileRows {
  char* bytes;    // [tiles][groups][16 rows][32 k]
  float* scales;  // [tiles][groups][16 rows]
  float* sums;    // [tiles][groups][16 rows]: of the bytes; only if the format has minima
  int64_t groups;

  static int64_t size(int64_t tiles, int64_t groups, bool has_minima) {
    return tiles * groups * kTileHeight * (kBlockGroup + (has_minima ? 8 : 4));
  }
  BlockTileRows(void* memory, int64_t tiles, int64_t groups)
      : bytes(static_cast<char*>(memory)),
        scales(reinterpret_cast<float*>(bytes + tiles * groups * kGroupTileBytes)),
        sums(scales + tiles * groups * kTileHeight),
        groups(groups) {}

  template <class X>
  void round(const LinearArgs& args, bool has_minima, int64_t tile, int64_t first_row) const {
    const int64_t rows = smaller(int64_t{kTileHeight}, args.rows - first_row);
    for (int64_t r = 0; r < kTileHeight; ++r) {
      const bool is_there = r < rows;
      const X* x = static_cast<const X*>(args.x) + (is_there ? first_row + r : 0) * args.x_stride;
      for (int64_t group = 0; group < groups; ++group) {
        const int64_t place = tile * groups + group;
        char* out = bytes + place * kGroupTileBytes + r * kBlockGroup;
        float* scale = scales + place * kTileHeight + r;
        IVec whole[2] = {splat_int(0), splat_int(0)};
        *scale = 0.0f;
        if (is_there) round_group(x + group * kBlockGroup, scale, whole);
        store_bytes(out, whole[0]);
        store_bytes(out + kLanes, whole[1]);
        if (has_minima) sums[place * kTileHeight + r] = static_cast<float>(sum_of_lanes(whole[0] + whole[1]));
      }
    }
  }
};

// Makes the values of a piece signed: the tiles' instruction multiplies signed bytes.
inline void take_center_off(const BlockFormat& format, int64_t groups, UnpackedPiece& piece) {
  if (format.center == 0) return;
  const auto center = static_cast<char>(format.center);
  for (int64_t word = 0; word < groups * kGroupWords; ++word) {
    for (int64_t i = 0; i < kNibbleBytes; i += 64) {
      uint8_t* some = piece.values[word] + i;
      store_int(some, {_mm512_sub_epi8(load_int(some).v, _mm512_set1_epi8(center))});
    }
  }
}

// The groups of a piece times a tile of rows, for sixteen columns.
template <bool kHasMinima>
class BlockTileSums {
 public:
  // The shapes of the tiles: two of sums, then two of rows, then two of columns.
  static void hold(Tiles& tiles) {
    constexpr uint64_t kWords = kGroupWords, kWidth = kBlockGroup, kSumWidth = kTileStep;
    tiles.hold(kTileHeight * 0x0101'0101u | kWords * 0x0101'0000'0000u,
               kSumWidth * 0x0101u | kWidth * 0x0101'0000u | kSumWidth * 0x0101'0000'0000u);
  }

  BlockTileSums(const UnpackedPiece& piece, const BlockTileRows& rows, int64_t tile, int64_t first_group, int vec)
      : piece_(piece),
        vec_(vec),
        x_(rows.bytes + (tile * rows.groups + first_group) * kGroupTileBytes),
        row_scales_(rows.scales + (tile * rows.groups + first_group) * kTileHeight),
        row_sums_(rows.sums + (tile * rows.groups + first_group) * kTileHeight) {}

  // totals: [16][32] from the columns on; the terms of `groups` groups are added.
  void add(int64_t groups, float* totals) {
    Vec sums[kTileHeight];
    OCTAVO_UNROLL
    for (int r = 0; r < kTileHeight; ++r) sums[r] = load(totals + r * kPanelColumns);
    multiply<0>(0);
    for (int64_t group = 0; group < groups; group += 2) {
      step<0>(group, groups, sums);
      if (group + 1 < groups) step<1>(group + 1, groups, sums);
    }
    add_terms(products_[(groups - 1) % 2], groups - 1, sums);
    OCTAVO_UNROLL
    for (int r = 0; r < kTileHeight; ++r) store(totals + r * kPanelColumns, sums[r]);
  }

 private:
  // Multiplies a group into tile kBuffer.
  template <int kBuffer>
  OCTAVO_INLINE void multiply(int64_t group) const {
    clear_tile<kBuffer>();
    load_tile<2 + kBuffer>(x_ + group * kGroupTileBytes, kBlockGroup);
    load_tile<4 + kBuffer>(piece_.values[group * kGroupWords] + vec_ * 4 * kLanes, kNibbleBytes);
    add_byte_tiles<kBuffer, 2 + kBuffer, 4 + kBuffer>();
  }
  // Begins the next group, stores the sums of this one, and adds the terms of the one before.
  template <int kBuffer>
  OCTAVO_INLINE void step(int64_t group, int64_t groups, Vec (&sums)[kTileHeight]) {
    if (group + 1 < groups) multiply<1 - kBuffer>(group + 1);
    store_tile<kBuffer>(products_[kBuffer], kTileStep);
    if (group > 0) add_terms(products_[1 - kBuffer], group - 1, sums);
  }
  OCTAVO_INLINE void add_terms(const int32_t (&products)[kTileHeight][kLanes], int64_t group, Vec (&sums)[kTileHeight]) const {
    const Vec scale = load(piece_.scales[group] + vec_ * kLanes);
    Vec minimum = splat(0.0f);
    if constexpr (kHasMinima) minimum = load(piece_.minima[group] + vec_ * kLanes);
    const float *row_scale = row_scales_ + group * kTileHeight, *row_sum = row_sums_ + group * kTileHeight;
    OCTAVO_UNROLL
    for (int r = 0; r < kTileHeight; ++r) {
      Vec value = to_float(load_int(products[r])) * scale;
      if constexpr (kHasMinima) value = value + splat(row_sum[r]) * minimum;
      sums[r] = sums[r] + value * splat(row_scale[r]);
    }
  }

  const UnpackedPiece& piece_;
  const int vec_;
  const char* const x_;
  const float *const row_scales_, *const row_sums_;
  alignas(64) int32_t products_[2][kTileHeight][kLanes];
};

// Whether the tiles are faster.
inline bool multiplies_block_tiles(const LinearArgs& args) {
  return args.rows >= kFewestBlockTileRows && format_of(args.weight_dtype).scale_group == kBlockGroup;
}

// Multiplies a block of `count` rows, from row `first` of x on, by all panels.
template <DType kKind>
void multiply_block_tiles(ThreadPool& pool, const LinearArgs& args, const BlockPanels& weight, const BlockTileRows& rows,
                          int64_t first, int64_t count) {
  constexpr BlockFormat kFormat = format_of(kKind);
  using Sums = BlockTileSums<kFormat.has_minima>;
  const int64_t panels = args.num_panels, tiles = divide_up(count, int64_t{kTileHeight});
  const auto totals_size = static_cast<size_t>(tiles * kTileHeight * kPanelColumns) * sizeof(float);
  pool.reserve_local(sizeof(UnpackedPiece) + totals_size);
  parallel_ahead(pool, panels, [&](int64_t task, int64_t following, int thread) {
    const int64_t panel = args.first_panel + task;
    auto& piece = *static_cast<UnpackedPiece*>(pool.local(thread));
    auto* totals = reinterpret_cast<float*>(&piece + 1);
    std::memset(totals, 0, totals_size);
    const int64_t to_next = (smaller(following, panels - 1) - task) * weight.panel_bytes;  // at most the last panel
    Tiles held;
    Sums::hold(held);
    for (int64_t group = 0; group < weight.groups; group += kPieceGroups) {
      const int64_t groups = smaller(kPieceGroups, weight.groups - group);
      const uint8_t* w = weight.panel(panel) + weight.offset(group);
      unpack_blocks<kKind>(w, groups, piece);
      take_center_off(kFormat, groups, piece);
      const int64_t lines = divide_up(groups * kFormat.group_bytes() + kFormat.super_bytes(), 64 * tiles);
      const uint8_t* next = w + to_next;
      for (int64_t tile = 0; tile < tiles; ++tile) {
        for (int64_t i = 0; i < lines; ++i, next += 64) prefetch_l2(next);
        for (int vec = 0; vec < kPanelVecs; ++vec) {
          Sums(piece, rows, tile, group, vec).add(groups, totals + tile * kTileHeight * kPanelColumns + vec * kLanes);
        }
      }
    }
    Place out = place_of(args, first, panel * kPanelColumns);
    for (int64_t row = 0; row < count; ++row, out.data += out.row_bytes, totals += kPanelColumns) {
      Vec sums[kPanelVecs];
      OCTAVO_UNROLL
      for (int v = 0; v < kPanelVecs; ++v) sums[v] = load(totals + v * kLanes);
      write_block_sums(args, sums, panel * kPanelColumns, out.data);
    }
  });
}

inline void linear_of_block_tiles(ThreadPool& pool, const LinearArgs& args) {
  const BlockPanels weight(args.weight, args.weight_dtype, args.k);
  const bool has_minima = weight.format.has_minima;
  const int64_t most_tiles = larger(int64_t{1}, kNearBlockBytes / (larger(args.k, int64_t{1}) * kTileHeight));
  const int64_t all_tiles = divide_up(args.rows, int64_t{kTileHeight});
  const int64_t block_tiles = divide_up(all_tiles, divide_up(all_tiles, most_tiles));
  void* memory = pool.shared(static_cast<size_t>(BlockTileRows::size(block_tiles, weight.groups, has_minima)));
  const BlockTileRows rows(memory, block_tiles, weight.groups);
  for (int64_t first = 0; first < args.rows; first += block_tiles * kTileHeight) {
    const int64_t count = smaller(block_tiles * kTileHeight, args.rows - first);
    parallel(pool, divide_up(count, int64_t{kTileHeight}), [&](int64_t tile, int) {
      if (args.x_dtype == DType::kFloat32) {
        rows.round<float>(args, has_minima, tile, first + tile * kTileHeight);
      } else {
        rows.round<bf16>(args, has_minima, tile, first + tile * kTileHeight);
      }
    });
    for_kind(args.weight_dtype, [&](auto kind) {
      if constexpr (format_of(kind).scale_group == kBlockGroup) multiply_block_tiles<kind>(pool, args, weight, rows, first, count);
    });
  }
}

#endif

}  // namespace octavo::OCTAVO_ISA
