// The product of int4 weights (linear_int4.h) by tiles, for more rows than one tile has. A panel's values are unpacked to bytes
// for a block of rows; the sums of a group are integers, so every result has the bits of the other product, which serves fewer
// rows.
#pragma once

#include "linear_tiles.h"

namespace octavo::OCTAVO_ISA {

#if defined(OCTAVO_ISA_AMX)

constexpr uint64_t kHalfWidths = 0x4040'2020'4040'4040u;   // of tiles of rows that a step has half of
constexpr uint64_t kHalfHeights = 0x0808'0000'0000'0000u;  // of the tiles of columns then

// A packed int4 weight whose groups are multiplied by tiles, and the rows it meets.
class NibbleTiles {
 public:
  explicit NibbleTiles(const LinearArgs& args)
      : weight_(args),
        step_(weight_.group % kTileStep == 0 ? kTileStep : kTileStep / 2),
        row_bytes_(divide_up(weight_.depth, kTileStep) * kTileStep) {}

  int64_t panel_bytes() const { return weight_.panel_bytes; }
  const char* panel(int64_t i) const { return reinterpret_cast<const char*>(weight_.panels + i * weight_.panel_bytes); }
  int64_t row_bytes() const { return row_bytes_; }  // of a row as packed
  int64_t groups() const { return weight_.groups; }
  int64_t unpacked_bytes() const { return row_bytes_ * kPanelColumns; }

  // Quantizes a row into its place among pairs of tiles. sums: of its groups, one each kTogether.
  template <class X>
  void pack_row(const X* x, int64_t k, char* out, float* scale, int32_t* sums) const {
    const RowScale found = row_scale(x, k);
    *scale = found.scale;
    const Vec inverse = splat(found.inverse);
    IVec sum = splat_int(0);
    for (int64_t i = 0; i < row_bytes_; i += kLanes) {
      const IVec values = to_int(load_first(x + i, larger(int64_t{0}, k - i)) * inverse);
      store_bytes(out + i / kTileStep * 2 * kTileBytes + i % kTileStep, values);
      sum = sum + values;
      const int64_t next = i + kLanes;
      if (next % weight_.group == 0 || next == row_bytes_) {
        if (i / weight_.group < weight_.groups) sums[i / weight_.group * kTogether] = sum_of_lanes(sum);
        sum = splat_int(0);
      }
    }
  }

  // The values of a panel as [words][32] of four bytes. Where all zero points are 8, they are taken off.
  void unpack(int64_t panel, uint8_t* out) const {
    const uint8_t* w = weight_.panels + panel * weight_.panel_bytes;
    for (int64_t k = 0; k < weight_.depth; k += weight_.group) {
      w += weight_.head_bytes;
      const int64_t last = smaller(weight_.depth, k + weight_.group);
      for (int64_t i = k; i < last; i += kNibbleDepth, w += kNibbleBytes, out += 2 * kNibbleBytes) {
        OCTAVO_UNROLL
        for (int64_t byte = 0; byte < kNibbleBytes; byte += 64) {
          const IVec raw = load_int(w + byte), ones = splat_int(0x0F0F0F0Fu);
          store_int(out + byte, value_of(raw & ones));
          store_int(out + kNibbleBytes + byte, value_of(shift_right<4>(raw) & ones));
        }
      }
    }
  }

  // A pair of tiles of `rows` rows from x on times a panel: the totals [32][32]. sums: of the rows' groups, as pack_row left
  // them.
  void multiply(const char* x, int64_t rows, int64_t panel, const uint8_t* unpacked, const int32_t* sums, Tiles& tiles,
                Ahead ahead, int64_t lines, float* totals) const {
    const int64_t upper = smaller(rows, int64_t{kTileHeight});
    const uint64_t heights = heights_of_pair(upper, rows - upper);
    if (step_ == kTileStep) {
      tiles.hold(heights);
    } else {
      tiles.hold((heights & 0x0000'FFFF'FFFF'FFFFu) | kHalfHeights, kHalfWidths);
    }
    std::memset(totals, 0, static_cast<size_t>(rows * kPanelColumns) * sizeof(float));
    alignas(64) int32_t group_sums[2][kTogether * kPanelColumns];
    const auto multiply_one = rows > kTileHeight ? &NibbleTiles::multiply_group<2> : &NibbleTiles::multiply_group<1>;
    const uint8_t* head = weight_.panels + panel * weight_.panel_bytes;
    for (int64_t group = 0; group <= weight_.groups; ++group) {  // a group's sums are added while the next one is multiplied
      if (group < weight_.groups) (this->*multiply_one)(x, group, unpacked, group_sums[group % 2]);
      ahead.ask_lines(lines);
      if (group == 0) continue;
      add_group(head, rows, group_sums[(group - 1) % 2], sums + (group - 1) * kTogether, totals);
      head += weight_.head_bytes + weight_.group / kNibbleDepth * kNibbleBytes;
    }
  }

 private:
  OCTAVO_INLINE IVec value_of(IVec bytes) const { return weight_.has_zeros ? bytes : subtract_bytes(bytes, 8); }

  template <int kTiles>
  void multiply_group(const char* x, int64_t group, const uint8_t* unpacked, int32_t* sums) const {
    constexpr int64_t kLower = kTileHeight * kPanelColumns;
    clear_tile<0>();
    clear_tile<1>();
    if (kTiles == 2) clear_tile<2>();
    if (kTiles == 2) clear_tile<3>();
    const int64_t first = group * weight_.group, last = smaller(row_bytes_, first + weight_.group);
    for (int64_t k = first; k < last; k += step_) {
      const char* rows = x + k / kTileStep * 2 * kTileBytes + k % kTileStep;
      const uint8_t* columns = unpacked + k * kPanelColumns;
      load_tile<6>(columns, kLineBytes);
      load_tile<4>(rows, kTileStep);
      add_byte_tiles<0, 4, 6>();
      load_tile<7>(columns + kTileStep, kLineBytes);
      add_byte_tiles<1, 4, 7>();
      if (kTiles == 2) {
        load_tile<5>(rows + kTileBytes, kTileStep);
        add_byte_tiles<2, 5, 6>();
        add_byte_tiles<3, 5, 7>();
      }
    }
    store_tile<0>(sums, kLineBytes);
    store_tile<1>(sums + kTileHeight, kLineBytes);
    if (kTiles == 2) store_tile<2>(sums + kLower, kLineBytes);
    if (kTiles == 2) store_tile<3>(sums + kLower + kTileHeight, kLineBytes);
  }

  OCTAVO_INLINE void add_group(const uint8_t* head, int64_t rows, const int32_t* sums, const int32_t* row_sums,
                               float* totals) const {
    Vec scale[kPanelVecs];
    IVec zero[kPanelVecs];
    OCTAVO_UNROLL
    for (int v = 0; v < kPanelVecs; ++v) {
      scale[v] = weight_.load_scales(head, v * kLanes);
      zero[v] = weight_.has_zeros ? weight_.load_zeros(head, v * kLanes) : splat_int(0);
    }
    for (int64_t i = 0; i < rows; ++i, sums += kPanelColumns, totals += kPanelColumns) {
      OCTAVO_UNROLL
      for (int v = 0; v < kPanelVecs; ++v) {
        IVec sum = load_int(sums + v * kLanes);
        if (weight_.has_zeros) sum = sum - zero[v] * splat_int(static_cast<uint32_t>(row_sums[i]));
        store(totals + v * kLanes, load(totals + v * kLanes) + to_float(sum) * scale[v]);
      }
    }
  }

  const NibbleWeight weight_;
  const int64_t step_;  // bytes of a row that are multiplied at once: no more than a group has
  const int64_t row_bytes_;
};

// Tasks are panels times blocks of rows.
inline void multiply_rows_of_nibble_tiles(ThreadPool& pool, const LinearArgs& args, const NibbleTiles& product) {
  const int64_t pairs = divide_up(args.rows, kTogether), blocks = divide_up(pairs, kBlockPairs);
  const int64_t block_rows = divide_up(pairs, blocks) * kTogether, panels = divide_up(args.n, kPanelColumns);
  const int64_t pair_bytes = kTogether * product.row_bytes(), packed_bytes = pairs * pair_bytes;
  const int64_t scale_bytes = pairs * kTogether * 4;
  char* packed = static_cast<char*>(pool.shared(static_cast<size_t>(packed_bytes + scale_bytes * (1 + product.groups()))));
  auto* scales = reinterpret_cast<float*>(packed + packed_bytes);
  auto* sums = reinterpret_cast<int32_t*>(packed + packed_bytes + scale_bytes);  // [pairs][groups][kTogether]
  parallel_ranges(pool, args.rows, 1, [&](int64_t begin, int64_t end) {
    for (int64_t row = begin; row < end; ++row) {
      const int64_t pair = row / kTogether, place = row % kTogether;
      char* out = packed + pair * pair_bytes + place / kTileHeight * kTileBytes + place % kTileHeight * kTileStep;
      int32_t* row_sums = sums + pair * product.groups() * kTogether + place;
      if (args.x_dtype == DType::kFloat32) {
        product.pack_row(static_cast<const float*>(args.x) + row * args.x_stride, args.k, out, scales + row, row_sums);
      } else {
        product.pack_row(static_cast<const bf16*>(args.x) + row * args.x_stride, args.k, out, scales + row, row_sums);
      }
    }
  });
  pool.reserve_local(static_cast<size_t>(product.unpacked_bytes()));
  const int64_t tasks = panels * blocks;
  parallel_ahead(pool, tasks, [&](int64_t task, int64_t following, int thread) {
    const int64_t panel = task / blocks, first = task % blocks * block_rows;
    const int64_t count = smaller(block_rows, args.rows - first), tall = divide_up(count, kTogether);
    const char* next = following < tasks ? product.panel(following / blocks) : nullptr;
    const int64_t lines = divide_up(product.panel_bytes() / 64, tall * product.groups());
    auto* unpacked = static_cast<uint8_t*>(pool.local(thread));
    product.unpack(panel, unpacked);
    alignas(64) float totals[kTogether * kPanelColumns];
    Tiles tiles;
    for (int64_t i = 0; i < tall; ++i) {
      const int64_t row = first + i * kTogether, height = smaller(kTogether, args.rows - row), pair = row / kTogether;
      prefetch_output(args, row, height, panel * kPanelColumns);
      product.multiply(packed + pair * pair_bytes, height, panel, unpacked, sums + pair * product.groups() * kTogether, tiles,
                       Ahead(next, product.panel(panel), product.panel_bytes(), 1, i, tall), lines, totals);
      write_totals<kPanelVecs>(args, ByteTile{nullptr, scales + row, nullptr, row}, height, panel * kPanelColumns, totals);
    }
  });
}

inline void linear_of_nibble_tiles(ThreadPool& pool, const LinearArgs& args) {
  const NibbleTiles product(args);
  for_each_pass(args, product.row_bytes(), [&](const LinearArgs& some) { multiply_rows_of_nibble_tiles(pool, some, product); });
}

#endif

// Sums of integers are the same by tiles and without, so of the two products the faster one serves; everything else has one
// product for any number of rows.
#if defined(OCTAVO_ISA_AMX)
constexpr int64_t kFewByteRows = 2, kFewNibbleRows = kTileHeight;
#endif

inline void linear(ThreadPool& pool, const LinearArgs& args) {
  switch (args.weight_dtype) {
    case DType::kFloat32: return linear_of<float>(pool, args);
    case DType::kBFloat16:
#if defined(OCTAVO_ISA_AMX)
      if (args.x_dtype == DType::kBFloat16) return linear_of_tiles<PairTiles>(pool, args);
#elif defined(OCTAVO_ISA_BF16)
      if (args.x_dtype == DType::kBFloat16) return linear_of_pairs(pool, args);
#endif
      return linear_of<bf16>(pool, args);
    case DType::kFloat16: return linear_of<f16>(pool, args);
    case DType::kInt8:
#if defined(OCTAVO_ISA_AMX)
      if (args.rows > kFewByteRows) return linear_of_tiles<ByteTiles>(pool, args);
#endif
      return linear_of_integers<ByteWeight>(pool, args);
    case DType::kInt4:
#if defined(OCTAVO_ISA_AMX)
      if (args.rows > kFewNibbleRows) return linear_of_nibble_tiles(pool, args);
#endif
      return linear_of_integers<NibbleWeight>(pool, args);
  }
}

}  // namespace octavo::OCTAVO_ISA
