// The product of int4 weights (linear_int4.h) by tiles, for more rows than one tile has. (weight - zero point) * multiple has 16
// bits, so a panel is unpacked as two planes of bytes, lower and upper, for a block of rows. The sums of both planes are integers,
// and so is their total. So every result has the bits of the product without tiles, which serves fewer rows.
#pragma once

#include "linear_args.h"

#if defined(OCTAVO_ISA)

#include "linear_block_tiles.h"
#include "tile_slices.h"

namespace octavo::OCTAVO_ISA {

#if defined(OCTAVO_ISA_AMX)

// A packed int4 weight as bytes for tiles: lines of four k of sixteen columns; each line has the lower bytes of the columns, then
// the upper bytes. So a panel has two slices, and the 32 sums of a row times a slice are 16 of lower and 16 of upper bytes.
class NibbleTiles {
 public:
  static constexpr int kSlices = kPanelVecs;

  explicit NibbleTiles(const LinearArgs& args) : weight_(args) {}

  // The memory of some steps of a panel.
  Upcoming memory(int64_t panel, int64_t first_step, int64_t steps) const {
    const int64_t group_bytes = weight_.head_bytes + weight_.group / kNibbleDepth * kNibbleBytes;
    const int64_t first = first_step * kTileStep / weight_.group * group_bytes;
    const int64_t end = smaller(divide_up((first_step + steps) * kTileStep, weight_.group) * group_bytes, weight_.panel_bytes);
    return {reinterpret_cast<const char*>(weight_.panels + panel * weight_.panel_bytes + first), larger(int64_t{0}, end - first)};
  }

  // Unpacks some steps of a panel: [kSlices][steps] of kStepBytes. Bytes after the last k are zero.
  void unpack(int64_t panel, int64_t first_step, int64_t steps, char* out) const {
    const uint8_t* w = weight_.panels + panel * weight_.panel_bytes;
    const int64_t group_bytes = weight_.head_bytes + weight_.group / kNibbleDepth * kNibbleBytes;
    const int64_t slice_bytes = steps * kStepBytes;
    for (int64_t k = first_step * kTileStep; k < (first_step + steps) * kTileStep; k += kSectionDepth) {
      const uint8_t* head = w + k / weight_.group * group_bytes;
      const uint8_t* values = head + weight_.head_bytes + k % weight_.group / kNibbleDepth * kNibbleBytes;
      const int64_t lines = larger(int64_t{0}, smaller(weight_.depth - k, kSectionDepth)) / kNibbleDepth;
      OCTAVO_UNROLL
      for (int slice = 0; slice < kSlices; ++slice) {
        char* section = out + slice * slice_bytes;
        if (lines < kSectionDepth / kNibbleDepth) std::memset(section, 0, kSectionDepth / 4 * kLineBytes);
        if (lines > 0) unpack_section(head, values, lines, slice, section);
      }
      out += kSectionDepth / 4 * kLineBytes;
    }
  }

  // Writes rows of a panel. sums: in the order of unpacked columns, with `slice_sums` from one slice to the next.
  void write(const LinearArgs& args, const int32_t* sums, int64_t slice_sums, const float* scales, int64_t first_row,
             int64_t rows, int64_t panel) const {
    const int64_t column = panel * kPanelColumns;
    const auto total = [&](int64_t m, int slice) {
      const int32_t* both = sums + slice * slice_sums + m * kPanelColumns;
      return total_of(load_int(both), load_int(both + kLanes));
    };
    write_totals<kSlices>(args, weight_, scales, rows, column, total, place_of(args, first_row, column));
  }

 private:
  // Unpacks (value - zero point) * multiple as lower and upper bytes, both signed: upper * 256 + lower. Computed modulo 2^16:
  // intermediate products may wrap around.
  OCTAVO_INLINE void unpack_section(const uint8_t* head, const uint8_t* values, int64_t lines, int slice, char* out) const {
    const auto in_both_halves = [&](const uint8_t* words) {
      const IVec word = load_words(words + slice * 2 * kLanes);
      return word | shift_left<16>(word);
    };
    const IVec multiple = in_both_halves(head), none = splat_int(0), rounding = splat_int(0x0080'0080u);
    const IVec center = multiply_words(multiple, splat_int(0xFFF8'FFF8u));  // minus the center, times the multiple
    const IVec zero = weight_.has_zeros ? multiply_words(in_both_halves(head + kWordsBytes), splat_int(0xFFFF'FFFFu)) : none;
    const IVec term = add_words(add_words(center, zero), rounding);
    const auto product = [&](IVec raw) {
      return add_words(multiply_words(raw & splat_int(0x000F'000Fu), multiple), term);
    };
    const auto store_word = [&](IVec even, IVec odd, char* line) {
      const IVec lower = select_bits(0x00FF'00FFu, even, shift_left<8>(odd)) ^ splat_int(0x8080'8080u);
      store_int(line, lower);
      store_int(line + kTileStep, select_bits(0x00FF'00FFu, shift_right<8>(even), odd));
    };
    for (int64_t i = 0; i < lines; ++i, out += 2 * kLineBytes) {
      const IVec raw = load_int(values + i * kNibbleBytes + slice * 4 * kLanes);
      store_word(product(raw), product(shift_right<8>(raw)), out);
      store_word(product(shift_right<4>(raw)), product(shift_right<12>(raw)), out + kLineBytes);
    }
  }

  // lower + 256 * upper, rounded once: the sum of two parts that float32 holds exactly.
  static OCTAVO_INLINE Vec total_of(IVec lower, IVec upper) {
    const IVec most = upper + shift_right_signed<8>(lower);
    const IVec rest = shift_left<8>(most & splat_int(0xFFFu)) | (lower & splat_int(0xFFu));
    return to_float(shift_right_signed<12>(most)) * splat(1048576.0f) + to_float(rest);
  }

  const NibbleWeight weight_;
};

// The columns of an int4 weight: the panels for tiles are its slices, kSlices of a panel.
class ColumnsOfNibbles {
 public:
  using Multiplied = ByteTiles;
  static constexpr int64_t kPlanes = NibbleTiles::kSlices;

  ColumnsOfNibbles(const LinearArgs& args, const NibbleTiles& weight) : args_(args), weight_(weight) {}

  static int64_t unpacked_bytes(int64_t steps) { return kPlanes * steps * kStepBytes; }
  static int64_t together(const LinearArgs&) { return kPlanes; }

  const char* slice(int64_t i, int64_t first_step, int64_t steps, char* unpacked) const {
    if (i % kPlanes == 0) weight_.unpack(i / kPlanes, first_step, steps, unpacked);
    return unpacked + i % kPlanes * steps * kStepBytes;
  }
  static const char* tail(int64_t, int64_t, int64_t, bool) { return nullptr; }
  Upcoming upcoming(int64_t i, int64_t first_step, int64_t steps) const {
    if (i % kPlanes != 0) return {nullptr, 0};
    return weight_.memory(i / kPlanes, first_step, steps);
  }
  Place result(int64_t row, int64_t i) const { return place_of(args_, row, i / kPlanes * kPanelColumns); }
  void write(const float* scales, int64_t row, int64_t rows, int64_t i, const int32_t* before, const int32_t* sums) const {
    weight_.write(args_, before, sums - before, scales, row, rows, i / kPlanes);
  }

 private:
  const LinearArgs& args_;
  const NibbleTiles& weight_;
};

inline void linear_of_nibble_tiles(ThreadPool& pool, const LinearArgs& args) {
  const NibbleTiles product(args);
  for_each_pass(args, divide_up(args.k, kTileStep) * kTileStep, [&](const LinearArgs& some) {
    linear_of_slices<ColumnsOfNibbles>(pool, some, product);
  });
}

#endif

// Sums of integers are the same with and without tiles, so the faster of the two products serves. All other types have one product
// for any number of rows.
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
    default:
#if defined(OCTAVO_ISA_AMX)
      if (multiplies_block_tiles(args)) return linear_of_block_tiles(pool, args);
#endif
      return linear_of_blocks(pool, args);
  }
}

}  // namespace octavo::OCTAVO_ISA

#endif  // OCTAVO_ISA
