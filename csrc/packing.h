// Packs weights into panels, and unpacks rows.
#pragma once

#include "packing_args.h"

#if defined(OCTAVO_ISA)

#include "packing_blocks.h"

namespace octavo::OCTAVO_ISA {

// The index of element (column, k) in a panel.
template <class W>
OCTAVO_INLINE int64_t panel_offset(int64_t column, int64_t k) {
  constexpr int64_t kDepth = Panel<W>::kDepth;
  return k / kDepth * (kDepth * kPanelColumns) + column * kDepth + k % kDepth;
}

// Packs whole words of all columns of a panel, transposing 16 x 16 at a time. Returns how many k are packed.
template <class W>
int64_t pack_words(const W* weight, int64_t stride, int64_t k, W* out) {
  constexpr int64_t kDepth = Panel<W>::kDepth, kTogether = kDepth * kLanes;
  int64_t first = 0;
  if (kDepth * sizeof(W) != 4) return first;
  for (; first + kTogether <= k; first += kTogether) {
    for (int64_t column = 0; column < kPanelColumns; column += kLanes) {
      Vec words[kLanes];
      OCTAVO_UNROLL
      for (int i = 0; i < kLanes; ++i) words[i] = as_float(load_int(weight + (column + i) * stride + first));
      transpose(words);
      OCTAVO_UNROLL
      for (int i = 0; i < kLanes; ++i) store_int(out + panel_offset<W>(column, first + i * kDepth), as_int(words[i]));
    }
  }
  return first;
}

template <class W>
void pack_weight_of(ThreadPool& pool, const PackArgs& args) {
  const auto* weight = static_cast<const W*>(args.weight);
  const int64_t k = args.k;
  parallel(pool, divide_up(args.n, kPanelColumns), [&](int64_t panel, int) {
    W* out = static_cast<W*>(args.packed) + panel * panel_size<W>(k);
    const W* rows = weight + panel * kPanelColumns * args.stride;
    const int64_t columns = smaller(int64_t{kPanelColumns}, args.n - panel * kPanelColumns);
    const int64_t packed = columns == kPanelColumns ? pack_words(rows, args.stride, k, out) : 0;
    W* rest = out + packed * kPanelColumns;
    std::memset(static_cast<void*>(rest), 0, static_cast<size_t>(out + panel_size<W>(k) - rest) * sizeof(W));
    for (int64_t first = packed; first < k; first += 64) {  // a cache line or more of every column at a time
      const int64_t last = smaller(k, first + 64);
      for (int64_t column = 0; column < columns; ++column) {
        const W* row = rows + column * args.stride;
        for (int64_t i = first; i < last; ++i) out[panel_offset<W>(column, i)] = row[i];
      }
    }
  });
}

// Copies a column's bytes into words of four, and returns their sum.
inline int32_t copy_words(const int8_t* values, int64_t k, int8_t* out) {
  int32_t sum = 0;
  for (int64_t i = 0; i + 4 <= k; i += 4) std::memcpy(out + i / 4 * kGroupBytes, values + i, 4);
  std::memcpy(out + k / 4 * kGroupBytes, values + k / 4 * 4, static_cast<size_t>(k % 4));
  for (int64_t i = 0; i < k; ++i) sum += values[i];
  return sum;
}

// Copies the values 0 .. 15 of a column's group into words of eight: k and k + 4 share a byte.
inline void copy_nibbles(const uint8_t* values, int64_t count, uint8_t* out) {
  for (int64_t i = 0; i < count; i += kNibbleDepth) {
    uint32_t halves[2] = {0, 0};
    std::memcpy(halves, values + i, static_cast<size_t>(smaller(kNibbleDepth, count - i)));
    const uint32_t word = halves[0] | halves[1] << 4;
    std::memcpy(out + i / kNibbleDepth * kNibbleBytes, &word, 4);
  }
}

inline void pack_int8_weight(ThreadPool& pool, const PackArgs& args) {
  const int64_t n = args.n, panels = divide_up(n, kPanelColumns), size = byte_groups(args.k) * kGroupBytes;
  const auto* weight = static_cast<const int8_t*>(args.weight);
  auto* packed = static_cast<int8_t*>(args.packed);
  auto* packed_scales = reinterpret_cast<float*>(packed + panels * size);
  auto* packed_sums = reinterpret_cast<int32_t*>(packed_scales + panels * kPanelColumns);
  parallel(pool, panels, [&](int64_t panel, int) {
    int8_t* out = packed + panel * size;
    std::memset(out, 0, static_cast<size_t>(size));
    for (int64_t column = 0; column < kPanelColumns; ++column) {
      const int64_t row = panel * kPanelColumns + column;
      packed_scales[row] = row < n ? args.scales[row] : 0.0f;
      packed_sums[row] = row < n ? copy_words(weight + row * args.stride, args.k, out + column * 4) : 0;
    }
  });
}

inline void pack_int4_weight(ThreadPool& pool, const PackArgs& args) {
  const NibbleWeight layout(args.packed, args.int4, args.n, args.k);
  const auto* weight = static_cast<const uint8_t*>(args.weight);
  const int64_t panels = divide_up(args.n, kPanelColumns);
  auto* units = reinterpret_cast<float*>(static_cast<uint8_t*>(args.packed) + panels * layout.panel_bytes);
  parallel(pool, panels, [&](int64_t panel, int) {
    uint8_t* out = static_cast<uint8_t*>(args.packed) + panel * layout.panel_bytes;
    std::memset(out, 0, static_cast<size_t>(layout.panel_bytes));
    for (int64_t row = panel * kPanelColumns; row < (panel + 1) * kPanelColumns; ++row) {
      units[row] = row < args.n ? args.scales[row] : 0.0f;
    }
    for (int64_t group = 0; group < layout.groups; ++group) {
      const int64_t first = group * layout.group, last = smaller(args.k, first + layout.group);
      for (int64_t column = 0; column < smaller(int64_t{kPanelColumns}, args.n - panel * kPanelColumns); ++column) {
        const int64_t row = panel * kPanelColumns + column;
        const int16_t multiple = args.multiples[row * layout.groups + group];
        std::memcpy(out + column * 2, &multiple, 2);
        if (layout.has_zeros) {
          std::memcpy(out + kWordsBytes + column * 2, args.offsets + row * layout.groups + group, 2);
        }
        copy_nibbles(weight + row * args.stride + first, last - first, out + layout.head_bytes + column * 4);
      }
      out += layout.head_bytes + layout.group / kNibbleDepth * kNibbleBytes;
    }
  });
}

inline void pack_weight(ThreadPool& pool, const PackArgs& args) {
  switch (args.dtype) {
    case DType::kFloat32: return pack_weight_of<float>(pool, args);
    case DType::kBFloat16: return pack_weight_of<bf16>(pool, args);
    case DType::kFloat16: return pack_weight_of<f16>(pool, args);
    case DType::kInt8: return pack_int8_weight(pool, args);
    case DType::kInt4: return pack_int4_weight(pool, args);
    default: return pack_block_weight(pool, args);
  }
}

template <class W, class Out>
void embedding_of(ThreadPool& pool, const EmbeddingArgs& args) {
  const W* packed = static_cast<const W*>(args.packed);
  const int64_t k = args.k;
  const Vec scale = splat(args.scale);
  parallel_ranges(pool, args.count, 4, [&](int64_t first, int64_t last) {
    for (int64_t row = first; row < last; ++row) {
      const W* panel = packed + args.row_of(row) / kPanelColumns * panel_size<W>(k);
      const int64_t column = args.row_of(row) % kPanelColumns;
      Out* out = static_cast<Out*>(args.out) + row * k;
      for (int64_t i = 0; i < k; i += kLanes) {
        W values[kLanes] = {};
        const int64_t lanes = smaller(int64_t{kLanes}, k - i);
        for (int64_t j = 0; j < lanes; ++j) values[j] = panel[panel_offset<W>(column, i + j)];
        store_first(out + i, load(values) * scale, lanes);
      }
    }
  });
}

// Rows of an int8 weight: the values, rotated back, times the scale, rounded to the type of the output.
template <class Out>
void int8_embedding_of(ThreadPool& pool, const EmbeddingArgs& args) {
  const ByteWeight weight(args.packed, args.n, args.k);
  const int64_t k = args.k, room = whole_vectors(k);
  const Vec factor = splat(args.scale);
  pool.reserve_local(static_cast<size_t>(2 * room) * sizeof(float));
  parallel_ranges(pool, args.count, 4, [&](int64_t first, int64_t last, int thread) {
    auto *values = static_cast<float*>(pool.local(thread)), *rotated = values + room;
    for (int64_t row = first; row < last; ++row) {
      const int8_t* panel = weight.panels + args.row_of(row) / kPanelColumns * weight.panel_bytes;
      const int8_t* column = panel + args.row_of(row) % kPanelColumns * 4;
      const Vec scale = splat(weight.scales[args.row_of(row)]);
      Out* out = static_cast<Out*>(args.out) + row * k;
      for (int64_t i = 0; i < k; ++i) values[i] = column[i / 4 * kGroupBytes + i % 4];
      rotate_row(static_cast<const float*>(values), k, rotated);
      for (int64_t i = 0; i < k; i += kLanes) store_first(out + i, load(rotated + i) * scale * factor, k - i);
    }
  });
}

// Value k of a column whose first word of eight is at `words`, in the layout of copy_nibbles.
OCTAVO_INLINE int32_t nibble_at(const uint8_t* words, int64_t k) {
  const uint8_t two = words[k / kNibbleDepth * kNibbleBytes + k % 4];
  return k % kNibbleDepth < 4 ? two & 15 : two >> 4;
}

// Rows of an int4 weight: float((value - zero) * multiple) * unit, rounded to the type of the output.
template <class Out>
void int4_embedding_of(ThreadPool& pool, const EmbeddingArgs& args) {
  const NibbleWeight weight(args.packed, args.int4, args.n, args.k);
  const int64_t k = args.k;
  const Vec factor = splat(args.scale);
  parallel_ranges(pool, args.count, 4, [&](int64_t first, int64_t last) {
    for (int64_t row = first; row < last; ++row) {
      const uint8_t* group = weight.panels + args.row_of(row) / kPanelColumns * weight.panel_bytes;
      const int64_t column = args.row_of(row) % kPanelColumns;
      const Vec unit = splat(weight.units[args.row_of(row)]);
      Out* out = static_cast<Out*>(args.out) + row * k;
      for (int64_t start = 0; start < k; start += weight.group) {
        int16_t multiple, zero = 0;  // zero: (zero point - center) * multiple
        std::memcpy(&multiple, group + column * 2, 2);
        if (weight.has_zeros) std::memcpy(&zero, group + kWordsBytes + column * 2, 2);
        const uint8_t* words = group + weight.head_bytes + column * 4;
        const int64_t count = smaller(weight.group, k - start);
        for (int64_t i = 0; i < count; i += kLanes) {
          float values[kLanes] = {};
          const int64_t lanes = smaller(int64_t{kLanes}, count - i);
          for (int64_t j = 0; j < lanes; ++j) {
            values[j] = static_cast<float>((nibble_at(words, i + j) - kNibbleCenter) * multiple - zero);
          }
          store_first(out + start + i, load(values) * unit * factor, lanes);
        }
        group += weight.head_bytes + weight.group / kNibbleDepth * kNibbleBytes;
      }
    }
  });
}

template <class Out>
void embedding_into(ThreadPool& pool, const EmbeddingArgs& args) {
  switch (args.weight_dtype) {
    case DType::kFloat32: return embedding_of<float, Out>(pool, args);
    case DType::kBFloat16: return embedding_of<bf16, Out>(pool, args);
    case DType::kFloat16: return embedding_of<f16, Out>(pool, args);
    case DType::kInt8: return int8_embedding_of<Out>(pool, args);
    case DType::kInt4: return int4_embedding_of<Out>(pool, args);
    default: return block_embedding_of<Out>(pool, args);
  }
}

inline void embedding(ThreadPool& pool, const EmbeddingArgs& args) {
  if (args.out_dtype == DType::kFloat32) {
    embedding_into<float>(pool, args);
  } else {
    embedding_into<bf16>(pool, args);
  }
}

}  // namespace octavo::OCTAVO_ISA

#endif  // OCTAVO_ISA
