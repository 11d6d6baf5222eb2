// Packs weights in the blocks of GGUF files (ggml-common.h of llama.cpp) into panels (block_formats.h), and unpacks rows.
#pragma once

#include "linear_int4_tiles.h"
#include "packing_args.h"

namespace octavo::OCTAVO_ISA {

// A group of a row in a file, in the form of panels: pairs of words of four k each, and their bits above the lowest four.
struct FileGroup {
  const uint8_t* block;  // the beginning of its block
  uint64_t pairs[4];
  uint32_t more[2] = {0, 0};

  FileGroup(DType kind, const uint8_t* row, int64_t group) {
    const int64_t part = group % kSuperGroups, i = group / kSuperGroups;
    switch (kind) {
      case DType::kQ8_0:
        block = row + group * 34;
        std::memcpy(pairs, block + 2, sizeof(pairs));
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
  static constexpr uint64_t kLowerHalves = 0x0F0F0F0F0F0F0F0Full;

  // Sixteen bytes: the lower halves, then the upper halves. fifth: the offset of the fifth bits of all 32 values, or 0.
  void read_small(const uint8_t* at, int64_t nibbles, int64_t fifth) {
    block = at;
    uint64_t bytes[2];
    std::memcpy(bytes, at + nibbles, sizeof(bytes));
    for (int half = 0; half < 2; ++half) {
      pairs[half] = bytes[half] & kLowerHalves;
      pairs[2 + half] = bytes[half] >> 4 & kLowerHalves;
    }
    if (fifth == 0) return;
    uint32_t bits;
    std::memcpy(&bits, at + fifth, sizeof(bits));
    // four bits become the lowest bits of four bytes: each is shifted by seven more than the one before
    for (int word = 0; word < 8; ++word) more[0] |= ((bits >> 4 * word & 15) * 0x00204081u & 0x01010101u) << word;
  }

  void read_nibbles(const uint8_t* bytes, int shift) {
    std::memcpy(pairs, bytes, sizeof(pairs));
    for (uint64_t& pair : pairs) pair = pair >> shift & kLowerHalves;
  }

  // 32 bytes: the lower halves are one group, the upper halves the next. fifth: the offset of the bits of all groups, or 0.
  void read_super(const uint8_t* at, int64_t nibbles, int64_t fifth, int64_t part) {
    block = at;
    read_nibbles(at + nibbles + part / 2 * kBlockGroup, part % 2 == 0 ? 0 : 4);
    if (fifth == 0) return;
    for (int word = 0; word < 8; ++word) more[0] |= (four_bytes(at + fifth + 4 * word) >> part & 0x01010101u) << word;
  }

  // Two halves of four groups: 64 bytes of lower bits, then 32 bytes of upper bits.
  void read_sixes(const uint8_t* at, int64_t part) {
    block = at;
    const int64_t half = part / 4, quarter = part % 4;
    read_nibbles(at + half * 64 + quarter % 2 * kBlockGroup, quarter < 2 ? 0 : 4);
    const uint8_t* upper = at + 128 + half * kBlockGroup;
    for (int word = 0; word < 8; ++word) {
      more[word / 4] |= (four_bytes(upper + 4 * word) >> 2 * quarter & 0x03030303u) << 2 * (word % 4);
    }
  }

  static uint32_t four_bytes(const uint8_t* at) {
    uint32_t word;
    std::memcpy(&word, at, sizeof(word));
    return word;
  }
};

// The scale, or the minimum, of 6 bits of one of the eight groups of Q4_K and Q5_K. bytes: the twelve bytes of both.
inline uint8_t six_bits(const uint8_t* bytes, int64_t part, bool is_minimum) {
  const int64_t i = part % 4;
  const uint8_t own = bytes[i + (is_minimum ? 4 : 0)];
  if (part < 4) return own & 63;
  const uint8_t rest = bytes[8 + i];
  return static_cast<uint8_t>((is_minimum ? rest >> 4 : rest & 15) | (own >> 2 & 48));
}

// Copies the scales of a column's group; with the first of eight groups also the scales of all eight. super, head: of the panel.
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

// Copies the values of a column's group. out: the column's first word.
inline void copy_group(BlockValues how, const FileGroup& from, uint8_t* out) {
  const auto put = [&](int64_t line, uint32_t word) { std::memcpy(out + line * kNibbleBytes, &word, sizeof(word)); };
  for (int64_t i = 0; i < 4; ++i) {
    const auto lower = static_cast<uint32_t>(from.pairs[i]), upper = static_cast<uint32_t>(from.pairs[i] >> 32);
    if (how == BlockValues::kBytes) {
      put(2 * i, lower);
      put(2 * i + 1, upper);
    } else {
      put(i, lower | upper << 4);
    }
  }
  if (how == BlockValues::kFiveBits || how == BlockValues::kSixBits) put(4, from.more[0]);
  if (how == BlockValues::kSixBits) put(5, from.more[1]);
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
        copy_group(format.values, from, out + format.head_bytes() + column * 4);
      }
      out += format.group_bytes();
    }
  });
}

// Unpacks a row of a weight in blocks: (values times scales, plus minima) times a factor, rounded to the type of the output.
template <DType kKind, class Out>
void block_row(const BlockPanels& weight, int64_t row, Vec factor, Out* out) {
  constexpr BlockFormat kFormat = format_of(kKind);
  const int64_t column = row % kPanelColumns;
  UnpackedPiece piece;
  for (int64_t first = 0; first < weight.groups; first += kPieceGroups) {
    const int64_t groups = smaller(kPieceGroups, weight.groups - first);
    unpack_blocks<kKind>(weight.panel(row / kPanelColumns) + weight.offset(first), groups, piece);
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
      for_kind(args.weight_dtype, [&](auto kind) { block_row<kind>(weight, args.row_of(row), splat(args.scale), out); });
    }
  });
}

}  // namespace octavo::OCTAVO_ISA
