// Sixteen float32 lanes under one name: one zmm register, two ymm registers, or a generic vector of the compiler. Kernels are
// written once against this and compiled in one namespace per instruction set (OCTAVO_ISA). So the linker cannot choose a function
// that was compiled for a newer processor for an older one.
//
// Types:  Vec (16 float32), IVec (16 uint32), Mask (16 booleans).
// Every operation rounds once, as IEEE 754 says. fma(a, b, c) is the only fused operation; the compiler fuses none on its own
// (-ffp-contract=off). Sums over lanes always run in the order of sum_lanes: i + 8, then + 4, + 2, + 1.
#pragma once

#include <cstdint>
#include <cstring>

#include "types.h"

#ifndef OCTAVO_ISA
#error "define OCTAVO_ISA (amx, avx512_bf16, avx512_vnni, avx512, avx2 or portable) before including a kernel header"
#endif

#define OCTAVO_INLINE inline __attribute__((always_inline))
#define OCTAVO_UNROLL _Pragma("GCC unroll 32")

#if defined(OCTAVO_ISA_AVX512)
#include "vec_avx512.h"
#elif defined(OCTAVO_ISA_AVX2)
#include "vec_avx2.h"
#else
#include "vec_portable.h"
#endif

namespace octavo::OCTAVO_ISA {

constexpr int kLanes = 16;

// The first n (0..16) elements at p; the other lanes are zero and their memory is not touched.
template <class T>
OCTAVO_INLINE Vec load_first(const T* p, int64_t n) {
  if (n >= kLanes) return load(p);
  T buffer[kLanes];
  std::memset(static_cast<void*>(buffer), 0, sizeof(buffer));
  std::memcpy(static_cast<void*>(buffer), p, static_cast<size_t>(n) * sizeof(T));
  return load(buffer);
}

template <class T>
OCTAVO_INLINE void store_first(T* p, Vec v, int64_t n) {
  if (n >= kLanes) {
    store(p, v);
    return;
  }
  T buffer[kLanes];
  store(buffer, v);
  std::memcpy(static_cast<void*>(p), buffer, static_cast<size_t>(n) * sizeof(T));
}

template <class T>
OCTAVO_INLINE void store_two(T* p, Vec a, Vec b) {
  store(p, a);
  store(p + kLanes, b);
}

template <class T>
OCTAVO_INLINE T smaller(T a, T b) {
  return b < a ? b : a;
}

template <class T>
OCTAVO_INLINE T larger(T a, T b) {
  return a < b ? b : a;
}

OCTAVO_INLINE int64_t divide_up(int64_t a, int64_t b) { return (a + b - 1) / b; }

// Prefetches the memory at p into L2, which takes more outstanding loads than L1.
OCTAVO_INLINE void prefetch_l2(const void* p) { __builtin_prefetch(p, 0, 2); }

}  // namespace octavo::OCTAVO_ISA
