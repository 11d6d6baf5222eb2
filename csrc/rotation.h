// Rotation of rows by a Walsh-Hadamard transform before they are rounded to bytes: see octavo.kernels.rotation. The order of
// additions is the same, so the bits are, too.
#pragma once

#include "vec.h"

namespace octavo::OCTAVO_ISA {

constexpr int64_t kMostRotated = 256;

OCTAVO_INLINE int64_t whole_vectors(int64_t values) { return divide_up(values, kLanes) * kLanes; }

// How many k are rotated together: the largest power of two that divides k, up to the limit.
OCTAVO_INLINE int64_t rotation_block(int64_t k) { return smaller(k & -k, kMostRotated); }

// One step within a vector: lane i is a[i] + a[i + kApart], or a[i - kApart] - a[i]. The product is exact.
template <int kApart>
OCTAVO_INLINE Vec add_lanes(Vec a) {
  const IVec is_second = lane_numbers() & splat_int(kApart);
  const Vec sign = as_float(splat_int(0x3F800000u) | shift_left<31 - __builtin_ctz(kApart)>(is_second));  // 1 or -1
  return fma(a, sign, exchange_lanes<kApart>(a));
}

// Rotates the blocks of one row. `out` must have memory for whole vectors; values after the last k are zero.
template <int kBlock, class X>
void rotate_blocks(const X* row, int64_t k, float* out) {
  constexpr int kVecs = kBlock > kLanes ? kBlock / kLanes : 1;
  for (int64_t i = 0; i < k; i += kVecs * kLanes) {
    Vec a[kVecs];
    OCTAVO_UNROLL
    for (int v = 0; v < kVecs; ++v) {
      a[v] = kBlock >= kLanes ? load(row + i + v * kLanes) : load_first(row + i, k - i);
      if constexpr (kBlock > 1) a[v] = add_lanes<1>(a[v]);
      if constexpr (kBlock > 2) a[v] = add_lanes<2>(a[v]);
      if constexpr (kBlock > 4) a[v] = add_lanes<4>(a[v]);
      if constexpr (kBlock > 8) a[v] = add_lanes<8>(a[v]);
    }
    OCTAVO_UNROLL
    for (int apart = 1; apart < kVecs; apart *= 2) {
      OCTAVO_UNROLL
      for (int v = 0; v < kVecs; ++v) {
        if ((v & apart) != 0) continue;
        const Vec first = a[v], second = a[v + apart];
        a[v] = first + second;
        a[v + apart] = first - second;
      }
    }
    OCTAVO_UNROLL
    for (int v = 0; v < kVecs; ++v) store(out + i + v * kLanes, a[v]);
  }
}

// Rotates a row of k values, in blocks of rotation_block(k), to float32.
template <class X>
void rotate_row(const X* row, int64_t k, float* out) {
  switch (rotation_block(k)) {
    case 256: return rotate_blocks<256>(row, k, out);
    case 128: return rotate_blocks<128>(row, k, out);
    case 64: return rotate_blocks<64>(row, k, out);
    case 32: return rotate_blocks<32>(row, k, out);
    case 16: return rotate_blocks<16>(row, k, out);
    case 8: return rotate_blocks<8>(row, k, out);
    case 4: return rotate_blocks<4>(row, k, out);
    case 2: return rotate_blocks<2>(row, k, out);
    default: return rotate_blocks<1>(row, k, out);
  }
}

}  // namespace octavo::OCTAVO_ISA
