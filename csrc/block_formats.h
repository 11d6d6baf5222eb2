// Weights in the blocks of GGUF files (octavo.kernels.block_weight): their layout in panels, and how kernels read them.
//
// A group is 32 consecutive k. It has one scale, or one scale for each 16 k. A packed weight consists of panels, a panel of
// groups. A group is a head (scales and perhaps minima of the columns), then the values. If the file has blocks of 256, each
// eight groups are preceded by another head.
#pragma once

#include "linear_int4.h"

namespace octavo::OCTAVO_ISA {

// The layout of a group's values: four bits each as in an int4 weight, four bits as an index of a table, four bits with one or
// two further bits after all of them, or bytes.
enum class BlockValues { kNibbles, kTable, kFiveBits, kSixBits, kBytes };

// The format of the scales: float16; integers of 8 bits, which are multiplied by a float16 of eight groups; or a power of two.
enum class BlockScales { kHalf, kScaled, kExponent };

constexpr int64_t kBlockGroup = 32;   // k that share a scale of the rows
constexpr int64_t kSuperGroups = 8;   // groups of a block of 256
constexpr int64_t kGroupWords = kBlockGroup / 4;
constexpr int64_t kHalfColumns = 2 * kLanes;  // bytes of a vector of columns in float16
constexpr int32_t kTableCenter = 12;  // is added to the values of MXFP4, whose magnitudes are at most 12
constexpr int32_t kByteCenter = kByteOffset;  // is added to bytes if the instruction needs unsigned ones

struct BlockFormat {
  BlockValues values;
  BlockScales scales;
  bool has_minima;
  int64_t scale_group;  // k that share a scale: 32 or 16
  int32_t center;       // has been added to the values

  constexpr int64_t value_bytes() const {
    switch (values) {
      case BlockValues::kFiveBits: return 5 * kBlockGroup * kPanelColumns / 8;
      case BlockValues::kSixBits: return 6 * kBlockGroup * kPanelColumns / 8;
      case BlockValues::kBytes: return kBlockGroup * kPanelColumns;
      default: return kBlockGroup * kPanelColumns / 2;
    }
  }
  constexpr int64_t numbers() const { return kBlockGroup / scale_group + (has_minima ? 1 : 0); }  // in a head, per column
  constexpr int64_t head_bytes() const { return (scales == BlockScales::kHalf ? 2 : 1) * numbers() * kPanelColumns; }
  constexpr int64_t group_bytes() const { return head_bytes() + value_bytes(); }
  constexpr int64_t super_bytes() const {
    return scales == BlockScales::kScaled ? (has_minima ? 4 : 2) * kPanelColumns : 0;
  }
  // Bytes from a vector of columns to the next in a head.
  constexpr int64_t head_step() const { return scales == BlockScales::kHalf ? kHalfColumns : kLanes; }
  constexpr int64_t scales_of_group() const { return kBlockGroup / scale_group; }
};

constexpr BlockFormat format_of(DType kind) {
  switch (kind) {
    case DType::kQ8_0: return {BlockValues::kBytes, BlockScales::kHalf, false, 32, kByteCenter};
    case DType::kQ4_0: return {BlockValues::kNibbles, BlockScales::kHalf, false, 32, 8};
    case DType::kQ4_1: return {BlockValues::kNibbles, BlockScales::kHalf, true, 32, 0};
    case DType::kQ5_0: return {BlockValues::kFiveBits, BlockScales::kHalf, false, 32, 16};
    case DType::kQ5_1: return {BlockValues::kFiveBits, BlockScales::kHalf, true, 32, 0};
    case DType::kQ4_K: return {BlockValues::kNibbles, BlockScales::kScaled, true, 32, 0};
    case DType::kQ5_K: return {BlockValues::kFiveBits, BlockScales::kScaled, true, 32, 0};
    case DType::kQ6_K: return {BlockValues::kSixBits, BlockScales::kScaled, false, 16, 32};
    default: return {BlockValues::kTable, BlockScales::kExponent, false, 32, kTableCenter};  // MXFP4
  }
}

// Calls f with the kind as a constant.
template <class F>
void for_kind(DType kind, const F& f) {
  switch (kind) {
    case DType::kQ8_0: return f(std::integral_constant<DType, DType::kQ8_0>());
    case DType::kQ4_0: return f(std::integral_constant<DType, DType::kQ4_0>());
    case DType::kQ4_1: return f(std::integral_constant<DType, DType::kQ4_1>());
    case DType::kQ5_0: return f(std::integral_constant<DType, DType::kQ5_0>());
    case DType::kQ5_1: return f(std::integral_constant<DType, DType::kQ5_1>());
    case DType::kQ4_K: return f(std::integral_constant<DType, DType::kQ4_K>());
    case DType::kQ5_K: return f(std::integral_constant<DType, DType::kQ5_K>());
    case DType::kQ6_K: return f(std::integral_constant<DType, DType::kQ6_K>());
    default: return f(std::integral_constant<DType, DType::kMXFP4>());
  }
}

struct BlockPanels {
  const uint8_t* data;
  BlockFormat format;
  int64_t groups;
  int64_t panel_bytes;

  BlockPanels(const void* packed, DType kind, int64_t k)
      : data(static_cast<const uint8_t*>(packed)), format(format_of(kind)), groups(k / kBlockGroup) {
    panel_bytes = offset(groups);
  }

  const uint8_t* panel(int64_t i) const { return data + i * panel_bytes; }
  // The offset of a group in a panel. The group must be the first of eight.
  int64_t offset(int64_t group) const {
    return group / kSuperGroups * format.super_bytes() + group * format.group_bytes();
  }
};

// Scales and minima of a vector of columns. head: of a group; super: of eight groups; both at the vector's first column.
template <DType kKind>
struct BlockHead {
  static constexpr BlockFormat kFormat = format_of(kKind);

  // The scale of the group; of its half number `part` if it has two scales.
  static OCTAVO_INLINE Vec scale(const uint8_t* super, const uint8_t* head, int64_t part) {
    if constexpr (kFormat.scales == BlockScales::kHalf) {
      return load(reinterpret_cast<const f16*>(head));
    } else {
      const Vec whole = load(reinterpret_cast<const int8_t*>(head) + part * kPanelColumns);
      if constexpr (kFormat.scales == BlockScales::kExponent) return times_power_of_two(splat(1.0f), to_int(whole));
      return load(reinterpret_cast<const f16*>(super)) * whole;
    }
  }
  static OCTAVO_INLINE Vec minimum(const uint8_t* super, const uint8_t* head) {
    if constexpr (kFormat.scales == BlockScales::kHalf) {
      return load(reinterpret_cast<const f16*>(head) + kPanelColumns);
    } else {
      const Vec whole = load(reinterpret_cast<const int8_t*>(head) + kPanelColumns);
      return load(reinterpret_cast<const f16*>(super) + kPanelColumns) * whole;
    }
  }
};

// The values of a vector of columns of a group, word by word: four k of each column, as unsigned bytes with the center added, or
// as signed bytes if the format is bytes without a center.
template <BlockValues kValues>
class GroupValues {
 public:
  // values: of the group, at the vector's first column.
  explicit OCTAVO_INLINE GroupValues(const uint8_t* values) : values_(values) {
    if constexpr (kValues == BlockValues::kFiveBits || kValues == BlockValues::kSixBits) {
      more_[0] = load_int(values + kBlockGroup / kNibbleDepth * kNibbleBytes);
    }
    if constexpr (kValues == BlockValues::kSixBits) {
      more_[1] = load_int(values + (kBlockGroup / kNibbleDepth + 1) * kNibbleBytes);
    }
  }

  // Reads words 2 * kLine and 2 * kLine + 1.
  template <int kLine>
  OCTAVO_INLINE void line(IVec& lower, IVec& upper) const {
    if constexpr (kValues == BlockValues::kBytes) {
      const IVec center = splat_int(kByteCenter * 0x01010101u);
      lower = load_int(values_ + 2 * kLine * kNibbleBytes) ^ center;
      upper = load_int(values_ + (2 * kLine + 1) * kNibbleBytes) ^ center;
      return;
    }
    const IVec raw = load_int(values_ + kLine * kNibbleBytes);
    lower = nibbles<0>(raw);
    upper = nibbles<4>(raw);
    if constexpr (kValues == BlockValues::kTable) {
      // 0, 1, 2, 3, 4, 6, 8, 12 and their negatives, each with the center added
      const IVec table = repeat_four(0x0F0E0D0Cu, 0x18141210u, 0x090A0B0Cu, 0x00040608u);
      lower = look_up_bytes(table, lower);
      upper = look_up_bytes(table, upper);
    } else if constexpr (kValues == BlockValues::kFiveBits) {
      lower = lower | bits_at<4 - 2 * kLine>(more_[0], 0x10101010u);
      upper = upper | bits_at<3 - 2 * kLine>(more_[0], 0x10101010u);
    } else if constexpr (kValues == BlockValues::kSixBits) {
      constexpr int kWord = 2 * kLine % 4;  // its number among the four words that share a vector of further bits
      lower = lower | bits_at<4 - 2 * kWord>(more_[kLine / 2], 0x30303030u);
      upper = upper | bits_at<2 - 2 * kWord>(more_[kLine / 2], 0x30303030u);
    }
  }

 private:
  template <int kShift>
  static OCTAVO_INLINE IVec bits_at(IVec more, uint32_t mask) {
    if constexpr (kShift >= 0) {
      return shift_left<kShift>(more) & splat_int(mask);
    } else {
      return shift_right<-kShift>(more) & splat_int(mask);
    }
  }

  const uint8_t* const values_;
  IVec more_[2];  // the fifth and sixth bits
};

// Each 32-bit lane: sum + the four products of its bytes; w is from `GroupValues`, x is signed.
template <bool kIsSigned>
OCTAVO_INLINE IVec add_block_products(IVec sum, IVec w, IVec x) {
  if constexpr (kIsSigned) {
    return add_byte_products(sum, x, w);
  } else {
    return add_unsigned_products(sum, w, x);
  }
}

constexpr bool is_signed(const BlockFormat& format) { return format.values == BlockValues::kBytes && kByteCenter == 0; }

// The number of words whose products fit a sum of 16 bits, as in add_nibble_products: half of a lane takes two products of each
// word. 0 if sums of 32 bits are better from the first word on.
constexpr int words_in_halves(const BlockFormat& format) {
  if (!kSumsNibblesInHalves) return 0;
  switch (format.values) {
    case BlockValues::kNibbles: return 8;
    case BlockValues::kTable:
    case BlockValues::kFiveBits: return 4;
    default: return 0;  // two words of six bits would fit, which saves nothing
  }
}
static_assert(8 * 2 * kMostByte * 15 < 1 << 15 && 4 * 2 * kMostByte * 31 < 1 << 15);

// Each lane: sum + both halves of `halves`, which are signed.
OCTAVO_INLINE IVec add_halves(IVec sum, IVec halves) { return add_word_products(sum, halves, splat_int(0x0001'0001u)); }

// Calls f(line) for the four pairs of words of a group; line is a constant.
template <class F>
OCTAVO_INLINE void for_each_line(const F& f) {
  f(std::integral_constant<int, 0>());
  f(std::integral_constant<int, 1>());
  f(std::integral_constant<int, 2>());
  f(std::integral_constant<int, 3>());
}

}  // namespace octavo::OCTAVO_ISA
