// Weights into panels, and rows back out of them.
#pragma once

#include "linear.h"

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

inline void pack_weight(ThreadPool& pool, const void* weight, DType dtype, int64_t n, int64_t k, int64_t stride,
                        void* packed) {
  if (dtype == DType::kFloat32) {
    pack_weight_of(pool, static_cast<const float*>(weight), n, k, stride, static_cast<float*>(packed));
  } else if (dtype == DType::kBFloat16) {
    pack_weight_of(pool, static_cast<const bf16*>(weight), n, k, stride, static_cast<bf16*>(packed));
  } else {
    pack_weight_of(pool, static_cast<const f16*>(weight), n, k, stride, static_cast<f16*>(packed));
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

inline void embedding(ThreadPool& pool, const int64_t* ids, int64_t count, const void* packed, DType weight_dtype,
                      int64_t k, void* out, DType out_dtype) {
  if (weight_dtype == DType::kFloat32) {
    embedding_into(pool, ids, count, static_cast<const float*>(packed), k, out, out_dtype);
  } else if (weight_dtype == DType::kBFloat16) {
    embedding_into(pool, ids, count, static_cast<const bf16*>(packed), k, out, out_dtype);
  } else {
    embedding_into(pool, ids, count, static_cast<const f16*>(packed), k, out, out_dtype);
  }
}

}  // namespace octavo::OCTAVO_ISA
