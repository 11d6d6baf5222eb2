// Weights into panels, and rows back out of them.
#pragma once

#include "linear_int8.h"

namespace octavo::OCTAVO_ISA {

// Where element (column, k) of a panel stands.
template <class W>
OCTAVO_INLINE int64_t panel_offset(int64_t column, int64_t k) {
  constexpr int64_t kDepth = Panel<W>::kDepth;
  return k / kDepth * (kDepth * kPanelColumns) + column * kDepth + k % kDepth;
}

template <class W>
void pack_weight_of(ThreadPool& pool, const W* weight, int64_t n, int64_t k, int64_t stride, W* packed) {
  parallel(pool, divide_up(n, kPanelColumns), [&](int64_t panel, int) {
    W* out = packed + panel * panel_size<W>(k);
    std::memset(static_cast<void*>(out), 0, static_cast<size_t>(panel_size<W>(k)) * sizeof(W));
    const int64_t columns = smaller(int64_t{kPanelColumns}, n - panel * kPanelColumns);
    for (int64_t first = 0; first < k; first += 64) {  // a cache line or more of every column at a time
      const int64_t last = smaller(k, first + 64);
      for (int64_t column = 0; column < columns; ++column) {
        const W* row = weight + (panel * kPanelColumns + column) * stride;
        for (int64_t i = first; i < last; ++i) out[panel_offset<W>(column, i)] = row[i];
      }
    }
  });
}

inline void pack_int8_weight(ThreadPool& pool, const int8_t* weight, int64_t n, int64_t k, int64_t stride,
                             const float* scales, int8_t* packed) {
  const int64_t panels = divide_up(n, kPanelColumns), size = byte_groups(k) * kGroupBytes;
  auto* packed_scales = reinterpret_cast<float*>(packed + panels * size);
  auto* packed_sums = reinterpret_cast<int32_t*>(packed_scales + panels * kPanelColumns);
  parallel(pool, panels, [&](int64_t panel, int) {
    int8_t* out = packed + panel * size;
    std::memset(out, 0, static_cast<size_t>(size));
    for (int64_t column = 0; column < kPanelColumns; ++column) {
      const int64_t row = panel * kPanelColumns + column;
      int32_t sum = 0;
      for (int64_t i = 0; row < n && i < k; ++i) {
        out[i / 4 * kGroupBytes + column * 4 + i % 4] = weight[row * stride + i];
        sum += weight[row * stride + i];
      }
      packed_scales[row] = row < n ? scales[row] : 0.0f;
      packed_sums[row] = sum;
    }
  });
}

// scales: of the rows of an int8 weight; null for the others.
inline void pack_weight(ThreadPool& pool, const void* weight, DType dtype, int64_t n, int64_t k, int64_t stride,
                        const float* scales, void* packed) {
  switch (dtype) {
    case DType::kFloat32:
      return pack_weight_of(pool, static_cast<const float*>(weight), n, k, stride, static_cast<float*>(packed));
    case DType::kBFloat16:
      return pack_weight_of(pool, static_cast<const bf16*>(weight), n, k, stride, static_cast<bf16*>(packed));
    case DType::kFloat16:
      return pack_weight_of(pool, static_cast<const f16*>(weight), n, k, stride, static_cast<f16*>(packed));
    case DType::kInt8:
      return pack_int8_weight(pool, static_cast<const int8_t*>(weight), n, k, stride, scales,
                              static_cast<int8_t*>(packed));
  }
}

template <class W, class Out>
void embedding_of(ThreadPool& pool, const int64_t* ids, int64_t count, const W* packed, int64_t k, Out* out) {
  parallel_ranges(pool, count, 4, [&](int64_t first, int64_t last) {
    for (int64_t row = first; row < last; ++row) {
      const W* panel = packed + ids[row] / kPanelColumns * panel_size<W>(k);
      for (int64_t i = 0; i < k; i += kLanes) {
        W values[kLanes] = {};
        const int64_t lanes = smaller(int64_t{kLanes}, k - i);
        for (int64_t j = 0; j < lanes; ++j) values[j] = panel[panel_offset<W>(ids[row] % kPanelColumns, i + j)];
        store_first(out + row * k + i, load(values), lanes);
      }
    }
  });
}

template <class W>
void embedding_into(ThreadPool& pool, const int64_t* ids, int64_t count, const W* packed, int64_t k, void* out,
                    DType out_dtype) {
  if (out_dtype == DType::kFloat32) {
    embedding_of(pool, ids, count, packed, k, static_cast<float*>(out));
  } else {
    embedding_of(pool, ids, count, packed, k, static_cast<bf16*>(out));
  }
}

// Rows of an int8 weight: float(value) * scale, rounded to the type of the output.
template <class Out>
void int8_embedding_of(ThreadPool& pool, const int64_t* ids, int64_t count, const ByteWeight& weight, int64_t k,
                       Out* out) {
  parallel_ranges(pool, count, 4, [&](int64_t first, int64_t last) {
    for (int64_t row = first; row < last; ++row) {
      const int8_t* panel = weight.panels + ids[row] / kPanelColumns * weight.panel_bytes;
      const int8_t* column = panel + ids[row] % kPanelColumns * 4;
      const Vec scale = splat(weight.scales[ids[row]]);
      for (int64_t i = 0; i < k; i += kLanes) {
        float values[kLanes] = {};
        const int64_t lanes = smaller(int64_t{kLanes}, k - i);
        for (int64_t j = 0; j < lanes; ++j) values[j] = column[(i + j) / 4 * kGroupBytes + (i + j) % 4];
        store_first(out + row * k + i, load(values) * scale, lanes);
      }
    }
  });
}

inline void embedding(ThreadPool& pool, const int64_t* ids, int64_t count, const void* packed, DType weight_dtype,
                      int64_t n, int64_t k, void* out, DType out_dtype) {
  switch (weight_dtype) {
    case DType::kFloat32:
      return embedding_into(pool, ids, count, static_cast<const float*>(packed), k, out, out_dtype);
    case DType::kBFloat16:
      return embedding_into(pool, ids, count, static_cast<const bf16*>(packed), k, out, out_dtype);
    case DType::kFloat16:
      return embedding_into(pool, ids, count, static_cast<const f16*>(packed), k, out, out_dtype);
    case DType::kInt8:
      if (out_dtype == DType::kFloat32) {
        return int8_embedding_of(pool, ids, count, ByteWeight(packed, n, k), k, static_cast<float*>(out));
      }
      return int8_embedding_of(pool, ids, count, ByteWeight(packed, n, k), k, static_cast<bf16*>(out));
  }
}

}  // namespace octavo::OCTAVO_ISA
