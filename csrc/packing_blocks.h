// Weights in the blocks of GGUF files (ggml-common.h of llama.cpp) into panels (block_formats.h), and rows back out of them.
#pragma once

#include "linear_int4_tiles.h"

namespace octavo::OCTAVO_ISA {

// Values of 0 .. 15 of a column's group, eight of each word: k and k + 4 share a byte.
inline void copy_nibbles(const uint8_t* values, int64_t count, uint8_t* out) {
  for (int64_t i = 0; i < count; i += kNibbleDepth) {
    uint32_t halves[2] = {0, 0};
    std::memcpy(halves, values + i, static_cast<size_t>(smaller(kNibbleDepth, count - i)));
    const uint32_t word = halves[0] | halves[1] << 4;
    std::memcpy(out + i / kNibbleDepth * kNibbleBytes, &word, 4);
  }
}

// A group of a row in a file: its values as they stand there, and where its block begins.
struct FileGroup {
  uint8_t values[kBlockGroup];
  const uint8_t* block;

  FileGroup(DType kind, const uint8_t* row, int64_t group) {
    const int64_t part = group % kSuperGroups, i = group / kSuperGroups;
    switch (kind) {
      case DType::kQ8_0:
        block = row + group * 34;
        std::memcpy(values, block + 2, sizeof(values));
        break;
      case DType::kQ4_0: read_small(row + group * 18, 2, 0); break;
      case DType::kQ4_1: read_small(row + group * 20, 4, 0); break;
      case DType::kQ5_0: read_small(row + group * 22, 6, 2); break;
      case DType::kQ5_1: read_small(row + group * 24, 8, 4); break;
      case DType::kQ4_K: read_super(row + i * 144, 16, 0, part); break;
      case DType::kQ5_K: read_super(row + i * 176, 48, 16, part); break;
      case DType::kQ6_K: read_sixes(row + i * 210, part); break;
      default: read_small(row + group * 17, 1, 0);  // MXFP4
    }
  }

 private:
  // Sixteen bytes: lower halves, then upper ones. fifth: where the fifth bits of all 32 stand, or 0.
  void read_small(const uint8_t* at, int64_t nibbles, int64_t fifth) {
    block = at;
    uint32_t more = 0;
    if (fifth != 0) std::memcpy(&more, at + fifth, 4);
    for (int64_t j = 0; j < kBlockGroup; ++j) {
      const uint8_t two = at[nibbles + j % 16];
      values[j] = static_cast<uint8_t>((j < 16 ? two & 15 : two >> 4) | (more >> j & 1) << 4);
    }
  }

  // 32 bytes: the lower halves are a group, the upper ones the next. fifth: where the bits of all groups stand, or 0.
  void read_super(const uint8_t* at, int64_t nibbles, int64_t fifth, int64_t part) {
    block = at;
    const uint8_t* pairs = at + nibbles + part / 2 * kBlockGroup;
    for (int64_t j = 0; j < kBlockGroup; ++j) {
      const int more = fifth == 0 ? 0 : at[fifth + j] >> part & 1;
      values[j] = static_cast<uint8_t>((part % 2 == 0 ? pairs[j] & 15 : pairs[j] >> 4) | more << 4);
    }
  }

  // Two halves of four groups: 64 bytes of lower bits, then 32 bytes of upper ones.
  void read_sixes(const uint8_t* at, int64_t part) {
    block = at;
    const int64_t half = part / 4, quarter = part % 4;
    const uint8_t* lower = at + half * 64 + quarter % 2 * kBlockGroup;
    const uint8_t* upper = at + 128 + half * kBlockGroup;
    for (int64_t j = 0; j < kBlockGroup; ++j) {
      const int four = quarter < 2 ? lower[j] & 15 : lower[j] >> 4;
      values[j] = static_cast<uint8_t>(four | (upper[j] >> 2 * quarter & 3) << 4);
    }
  }
};

// The scale or minimum of 6 bits of one of the eight groups of Q4_K and Q5_K, at `bytes`: of scales, or of minima.
inline uint8_t six_bits(const uint8_t* bytes, int64_t part, bool is_minimum) {
  const int64_t i = part % 4;
  const uint8_t own = bytes[i + (is_minimum ? 4 : 0)];
  if (part < 4) return own & 63;
  const uint8_t rest = bytes[8 + i];
  return static_cast<uint8_t>((is_minimum ? rest >> 4 : rest & 15) | (own >> 2 & 48));
}

// The scales of a group, and of eight of them with the first one, of a column. super, head: of the panel's group.
inline void copy_scales(DType kind, const FileGroup& from, int64_t group, int64_t column, uint8_t* super, uint8_t* head) {
  const int64_t part = group % kSuperGroups;
  switch (kind) {
    case DType::kMXFP4: head[column] = from.block[0] ^ 0x80; return;  // signed
    case DType::kQ4_K:
    case DType::kQ5_K:
      head[column] = six_bits(from.block + 4, part, false);
      head[kPanelColumns + column] = static_cast<uint8_t>(-six_bits(from.block + 4, part, true));
      break;
    case DType::kQ6_K:
      head[column] = from.block[192 + 2 * part];
      head[kPanelColumns + column] = from.block[192 + 2 * part + 1];
      if (part == 0) std::memcpy(super + 2 * column, from.block + 208, 2);
      return;
    default: super = head; break;
  }
  if (super != head && part != 0) return;
  std::memcpy(super + 2 * column, from.block, 2);
  if (format_of(kind).has_minima) std::memcpy(super + kWordsBytes + 2 * column, from.block + 2, 2);
}

// The values of a group of a column. out: from the column's first word on.
inline void copy_group(BlockValues how, const uint8_t* values, uint8_t* out) {
  if (how == BlockValues::kBytes) {
    for (int64_t word = 0; word < kGroupWords; ++word) std::memcpy(out + word * kNibbleBytes, values + word * 4, 4);
    return;
  }
  uint8_t four[kBlockGroup], more[2][4] = {};
  for (int64_t i = 0; i < kBlockGroup; ++i) {
    const int64_t word = i / 4;
    four[i] = values[i] & 15;
    if (how == BlockValues::kSixBits) {
      more[word / 4][i % 4] |= static_cast<uint8_t>(values[i] >> 4 << 2 * (word % 4));
    } else {
      more[0][i % 4] |= static_cast<uint8_t>(values[i] >> 4 << word);
    }
  }
  copy_nibbles(four, kBlockGroup, out);
  uint8_t* behind = out + kBlockGroup / kNibbleDepth * kNibbleBytes;
  if (how == BlockValues::kFiveBits || how == BlockValues::kSixBits) std::memcpy(behind, more[0], 4);
  if (how == BlockValues::kSixBits) std::memcpy(behind + kNibbleBytes, more[1], 4);
}

inline void pack_block_weight(ThreadPool& pool, const PackArgs& args) {
  const BlockPanels layout(args.packed, args.dtype, args.k);
  const BlockFormat& format = layout.format;
  const auto* weight = static_cast<const uint8_t*>(args.weight);
  parallel(pool, divide_up(args.n, kPanelColumns), [&](int64_t panel, int) {
    uint8_t *out = static_cast<uint8_t*>(args.packed) + panel * layout.panel_bytes, *super = out;
    std::memset(out, 0, static_cast<size_t>(layout.panel_bytes));
    for (int64_t group = 0; group < layout.groups; ++group) {
      if (group % kSuperGroups == 0) {
        super = out;
        out += format.super_bytes();
      }
      for (int64_t column = 0; column < smaller(int64_t{kPanelColumns}, args.n - panel * kPanelColumns); ++column) {
        const FileGroup from(args.dtype, weight + (panel * kPanelColumns + column) * args.stride, group);
        copy_scales(args.dtype, from, group, column, super, out);
        copy_group(format.values, from.values, out + format.head_bytes() + column * 4);
      }
      out += format.group_bytes();
    }
  });
}

// Rows of a weight of blocks: values times scales, and minima added, times a factor, rounded to the type of the output.
template <DType kKind, class Out>
void block_row(const BlockPanels& weight, int64_t row, Vec factor, Out* out) {
  constexpr BlockFormat kFormat = format_of(kKind);
  const int64_t column = row % kPanelColumns;
  UnpackedPiece piece;
  for (int64_t first = 0; first < weight.groups; first += kPieceGroups) {
    const int64_t groups = smaller(kPieceGroups, weight.groups - first);
    unpack_blocks<kKind>(weight.panel(row / kPanelColumns) + weight.offset(first), groups, 0, piece);
    for (int64_t i = 0; i < groups * kBlockGroup; i += kLanes, out += kLanes) {
      float values[kLanes];
      for (int64_t j = 0; j < kLanes; ++j) {
        const uint8_t byte = piece.values[(i + j) / 4][column * 4 + j % 4];
        values[j] = static_cast<float>(is_signed(kFormat) ? static_cast<int8_t>(byte) : byte - kFormat.center);
      }
      Vec value = load(values) * splat(piece.scales[i / kFormat.scale_group][column]);
      if (kFormat.has_minima) value = value + splat(piece.minima[i / kBlockGroup][column]);
      store(out, value * factor);
    }
  }
}

template <class Out>
void block_embedding_of(ThreadPool& pool, const EmbeddingArgs& args) {
  const BlockPanels weight(args.packed, args.weight_dtype, args.k);
  parallel_ranges(pool, args.count, 1, [&](int64_t first, int64_t last) {
    for (int64_t row = first; row < last; ++row) {
      Out* out = static_cast<Out*>(args.out) + row * args.k;
      for_kind(args.weight_dtype, [&](auto kind) { block_row<kind>(weight, args.ids[row], splat(args.scale), out); });
    }
  });
}

}  // namespace octavo::OCTAVO_ISA
