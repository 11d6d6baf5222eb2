// Vec on AVX2 with FMA and F16C: two ymm registers.
#pragma once

#include <immintrin.h>

namespace octavo::OCTAVO_ISA {

struct Vec {
  __m256 lo, hi;
};

struct IVec {
  __m256i lo, hi;
};

struct Mask {  // all bits of a lane set, or none
  __m256i lo, hi;
};

OCTAVO_INLINE Vec splat(float x) { return {_mm256_set1_ps(x), _mm256_set1_ps(x)}; }
OCTAVO_INLINE IVec splat_int(uint32_t x) {
  const __m256i v = _mm256_set1_epi32(static_cast<int>(x));
  return {v, v};
}
OCTAVO_INLINE IVec lane_numbers() {
  return {_mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7), _mm256_setr_epi32(8, 9, 10, 11, 12, 13, 14, 15)};
}

OCTAVO_INLINE Vec operator+(Vec a, Vec b) { return {_mm256_add_ps(a.lo, b.lo), _mm256_add_ps(a.hi, b.hi)}; }
OCTAVO_INLINE Vec operator-(Vec a, Vec b) { return {_mm256_sub_ps(a.lo, b.lo), _mm256_sub_ps(a.hi, b.hi)}; }
OCTAVO_INLINE Vec operator*(Vec a, Vec b) { return {_mm256_mul_ps(a.lo, b.lo), _mm256_mul_ps(a.hi, b.hi)}; }
OCTAVO_INLINE Vec operator/(Vec a, Vec b) { return {_mm256_div_ps(a.lo, b.lo), _mm256_div_ps(a.hi, b.hi)}; }
OCTAVO_INLINE Vec fma(Vec a, Vec b, Vec c) {
  return {_mm256_fmadd_ps(a.lo, b.lo, c.lo), _mm256_fmadd_ps(a.hi, b.hi, c.hi)};
}
// If either is NaN the result is b, so a NaN in b survives.
OCTAVO_INLINE Vec max(Vec a, Vec b) { return {_mm256_max_ps(a.lo, b.lo), _mm256_max_ps(a.hi, b.hi)}; }
OCTAVO_INLINE Vec min(Vec a, Vec b) { return {_mm256_min_ps(a.lo, b.lo), _mm256_min_ps(a.hi, b.hi)}; }

OCTAVO_INLINE IVec operator+(IVec a, IVec b) { return {_mm256_add_epi32(a.lo, b.lo), _mm256_add_epi32(a.hi, b.hi)}; }
OCTAVO_INLINE IVec operator-(IVec a, IVec b) { return {_mm256_sub_epi32(a.lo, b.lo), _mm256_sub_epi32(a.hi, b.hi)}; }
OCTAVO_INLINE IVec operator^(IVec a, IVec b) { return {_mm256_xor_si256(a.lo, b.lo), _mm256_xor_si256(a.hi, b.hi)}; }
OCTAVO_INLINE IVec operator&(IVec a, IVec b) { return {_mm256_and_si256(a.lo, b.lo), _mm256_and_si256(a.hi, b.hi)}; }
OCTAVO_INLINE IVec operator|(IVec a, IVec b) { return {_mm256_or_si256(a.lo, b.lo), _mm256_or_si256(a.hi, b.hi)}; }
template <int kBits>
OCTAVO_INLINE IVec shift_left(IVec a) {
  return {_mm256_slli_epi32(a.lo, kBits), _mm256_slli_epi32(a.hi, kBits)};
}
template <int kBits>
OCTAVO_INLINE IVec shift_right(IVec a) {  // shifts in zeros
  return {_mm256_srli_epi32(a.lo, kBits), _mm256_srli_epi32(a.hi, kBits)};
}
template <int kBits>
OCTAVO_INLINE IVec shift_right_signed(IVec a) {
  return {_mm256_srai_epi32(a.lo, kBits), _mm256_srai_epi32(a.hi, kBits)};
}
OCTAVO_INLINE void multiply_wide_half(__m256i a, __m256i factor, __m256i& high, __m256i& low) {
  const __m256i even = _mm256_mul_epu32(a, factor);
  const __m256i odd = _mm256_mul_epu32(_mm256_srli_epi64(a, 32), factor);
  low = _mm256_blend_epi32(even, _mm256_slli_epi64(odd, 32), 0xAA);
  high = _mm256_blend_epi32(_mm256_srli_epi64(even, 32), odd, 0xAA);
}
// The 64-bit product of each lane and m, as its upper and lower halves.
OCTAVO_INLINE void multiply_wide(IVec a, uint32_t m, IVec& high, IVec& low) {
  const __m256i factor = _mm256_set1_epi32(static_cast<int>(m));
  multiply_wide_half(a.lo, factor, high.lo, low.lo);
  multiply_wide_half(a.hi, factor, high.hi, low.hi);
}

OCTAVO_INLINE IVec max_signed(IVec a, IVec b) {
  return {_mm256_max_epi32(a.lo, b.lo), _mm256_max_epi32(a.hi, b.hi)};
}

// Each 32-bit lane: sum + the four products of its bytes; w is signed, x is signed with kByteOffset added to it.
constexpr int kByteOffset = 0;
OCTAVO_INLINE __m256i add_byte_products(__m256i sum, __m256i x, __m256i w) {
  // |w| times x with w's sign: no pair overflows 16 bits
  const __m256i pairs = _mm256_maddubs_epi16(_mm256_abs_epi8(w), _mm256_sign_epi8(x, w));
  return _mm256_add_epi32(sum, _mm256_madd_epi16(pairs, _mm256_set1_epi16(1)));
}
OCTAVO_INLINE IVec add_byte_products(IVec sum, IVec x, IVec w) {
  return {add_byte_products(sum.lo, x.lo, w.lo), add_byte_products(sum.hi, x.hi, w.hi)};
}
// Each half of a lane: sum + the two products of its bytes, in 16 bits; w is 0 .. 15, x is signed.
constexpr bool kSumsNibblesInHalves = true;
OCTAVO_INLINE __m256i add_nibble_products(__m256i sum, __m256i w, __m256i x) {
  sum = _mm256_add_epi16(sum, _mm256_maddubs_epi16(w, x));
  asm("" : "+x"(sum));  // else GCC adds products before it adds them to the sum, which needs too many registers
  return sum;
}
OCTAVO_INLINE IVec add_nibble_products(IVec sum, IVec w, IVec x) {
  return {add_nibble_products(sum.lo, w.lo, x.lo), add_nibble_products(sum.hi, w.hi, x.hi)};
}
// Each 32-bit lane: sum + the four products of its bytes; w is 0 .. 127, x is signed.
OCTAVO_INLINE __m256i add_unsigned_products(__m256i sum, __m256i w, __m256i x) {
  return _mm256_add_epi32(sum, _mm256_madd_epi16(_mm256_maddubs_epi16(w, x), _mm256_set1_epi16(1)));
}
OCTAVO_INLINE IVec add_unsigned_products(IVec sum, IVec w, IVec x) {
  return {add_unsigned_products(sum.lo, w.lo, x.lo), add_unsigned_products(sum.hi, w.hi, x.hi)};
}
// The four words, repeated in every 128 bits.
OCTAVO_INLINE IVec repeat_four(uint32_t a, uint32_t b, uint32_t c, uint32_t d) {
  const __m128i four = _mm_setr_epi32(static_cast<int>(a), static_cast<int>(b), static_cast<int>(c), static_cast<int>(d));
  return {_mm256_broadcastsi128_si256(four), _mm256_broadcastsi128_si256(four)};
}
// Each byte, an index 0 .. 15, is replaced by that byte of its 128 bits of the table.
OCTAVO_INLINE IVec look_up_bytes(IVec table, IVec bytes) {
  return {_mm256_shuffle_epi8(table.lo, bytes.lo), _mm256_shuffle_epi8(table.hi, bytes.hi)};
}
// Each 32-bit lane: sum + the two products of its halves, which are signed.
OCTAVO_INLINE IVec add_word_products(IVec sum, IVec a, IVec b) {
  return {_mm256_add_epi32(sum.lo, _mm256_madd_epi16(a.lo, b.lo)), _mm256_add_epi32(sum.hi, _mm256_madd_epi16(a.hi, b.hi))};
}
// Sixteen 16-bit numbers, one per lane; the upper halves are zero.
OCTAVO_INLINE IVec load_words(const void* p) {
  const auto* q = static_cast<const __m128i*>(p);
  return {_mm256_cvtepu16_epi32(_mm_loadu_si128(q)), _mm256_cvtepu16_epi32(_mm_loadu_si128(q + 1))};
}
// Stores the lowest byte of each lane.
OCTAVO_INLINE void store_bytes(void* p, IVec a) {
  const __m256i lowest = _mm256_setr_epi8(0, 4, 8, 12, -1, -1, -1, -1, -1, -1, -1, -1, -1, -1, -1, -1,  //
                                          0, 4, 8, 12, -1, -1, -1, -1, -1, -1, -1, -1, -1, -1, -1, -1);
  const __m256i lo = _mm256_shuffle_epi8(a.lo, lowest), hi = _mm256_shuffle_epi8(a.hi, lowest);
  const int words[4] = {_mm256_extract_epi32(lo, 0), _mm256_extract_epi32(lo, 4), _mm256_extract_epi32(hi, 0),
                        _mm256_extract_epi32(hi, 4)};
  std::memcpy(p, words, sizeof(words));
}

// The lanes of four vectors, each -128 .. 127, as bytes in order.
OCTAVO_INLINE __m256i pack_bytes(IVec a, IVec b) {
  const __m256i bytes = _mm256_packs_epi16(_mm256_packs_epi32(a.lo, a.hi), _mm256_packs_epi32(b.lo, b.hi));
  // packing takes four lanes of each half at a time
  return _mm256_permutevar8x32_epi32(bytes, _mm256_setr_epi32(0, 4, 1, 5, 2, 6, 3, 7));
}
OCTAVO_INLINE IVec pack_bytes(const IVec (&a)[4]) { return {pack_bytes(a[0], a[1]), pack_bytes(a[2], a[3])}; }

OCTAVO_INLINE IVec as_int(Vec a) { return {_mm256_castps_si256(a.lo), _mm256_castps_si256(a.hi)}; }
OCTAVO_INLINE Vec as_float(IVec a) { return {_mm256_castsi256_ps(a.lo), _mm256_castsi256_ps(a.hi)}; }
OCTAVO_INLINE Vec to_float(IVec a) { return {_mm256_cvtepi32_ps(a.lo), _mm256_cvtepi32_ps(a.hi)}; }  // lanes are signed
OCTAVO_INLINE IVec to_int(Vec a) { return {_mm256_cvtps_epi32(a.lo), _mm256_cvtps_epi32(a.hi)}; }    // to nearest even
OCTAVO_INLINE IVec load_int(const void* p) {
  const auto* q = static_cast<const __m256i*>(p);
  return {_mm256_loadu_si256(q), _mm256_loadu_si256(q + 1)};
}
OCTAVO_INLINE void store_int(void* p, IVec a) {
  auto* q = static_cast<__m256i*>(p);
  _mm256_storeu_si256(q, a.lo);
  _mm256_storeu_si256(q + 1, a.hi);
}

// a * 2^n, rounded once. n may exceed the exponents of float32, so there are two factors; the first product is exact.
OCTAVO_INLINE Vec times_power_of_two(Vec a, IVec n) {
  const IVec half = shift_right_signed<1>(n), bias = splat_int(127);
  return a * as_float(shift_left<23>(half + bias)) * as_float(shift_left<23>(n - half + bias));
}

template <int kCompare>
OCTAVO_INLINE Mask compare(Vec a, Vec b) {
  return {_mm256_castps_si256(_mm256_cmp_ps(a.lo, b.lo, kCompare)),
          _mm256_castps_si256(_mm256_cmp_ps(a.hi, b.hi, kCompare))};
}
OCTAVO_INLINE Mask less(Vec a, Vec b) { return compare<_CMP_LT_OQ>(a, b); }
OCTAVO_INLINE Mask less_equal(Vec a, Vec b) { return compare<_CMP_LE_OQ>(a, b); }
OCTAVO_INLINE Mask equal(Vec a, Vec b) { return compare<_CMP_EQ_OQ>(a, b); }
OCTAVO_INLINE Mask is_nan(Vec a) { return compare<_CMP_UNORD_Q>(a, a); }
OCTAVO_INLINE Mask is_negative(IVec a) {  // the sign bit is set
  return {_mm256_srai_epi32(a.lo, 31), _mm256_srai_epi32(a.hi, 31)};
}
OCTAVO_INLINE Mask both(Mask a, Mask b) { return {_mm256_and_si256(a.lo, b.lo), _mm256_and_si256(a.hi, b.hi)}; }
OCTAVO_INLINE Mask either(Mask a, Mask b) { return {_mm256_or_si256(a.lo, b.lo), _mm256_or_si256(a.hi, b.hi)}; }
OCTAVO_INLINE unsigned bits(Mask a) {
  const int lo = _mm256_movemask_ps(_mm256_castsi256_ps(a.lo)), hi = _mm256_movemask_ps(_mm256_castsi256_ps(a.hi));
  return static_cast<unsigned>(lo) | static_cast<unsigned>(hi) << 8;
}
OCTAVO_INLINE IVec select(Mask m, IVec a, IVec b) {  // m ? a : b
  return {_mm256_blendv_epi8(b.lo, a.lo, m.lo), _mm256_blendv_epi8(b.hi, a.hi, m.hi)};
}
OCTAVO_INLINE Vec select(Mask m, Vec a, Vec b) { return as_float(select(m, as_int(a), as_int(b))); }

OCTAVO_INLINE Vec load(const float* p) { return {_mm256_loadu_ps(p), _mm256_loadu_ps(p + 8)}; }
OCTAVO_INLINE __m256 widen_bf16(const bf16* p) {
  const __m128i raw = _mm_loadu_si128(reinterpret_cast<const __m128i*>(p));
  return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(raw), 16));
}
OCTAVO_INLINE Vec load(const bf16* p) { return {widen_bf16(p), widen_bf16(p + 8)}; }
OCTAVO_INLINE Vec load(const f16* p) {
  const auto* q = reinterpret_cast<const __m128i*>(p);
  return {_mm256_cvtph_ps(_mm_loadu_si128(q)), _mm256_cvtph_ps(_mm_loadu_si128(q + 1))};
}
OCTAVO_INLINE Vec load(const int8_t* p) {
  const __m128i bytes = _mm_loadu_si128(reinterpret_cast<const __m128i*>(p));
  return {_mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(bytes)),
          _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_srli_si128(bytes, 8)))};
}

OCTAVO_INLINE void store(float* p, Vec a) {
  _mm256_storeu_ps(p, a.lo);
  _mm256_storeu_ps(p + 8, a.hi);
}
OCTAVO_INLINE __m256i round_to_bf16(__m256i raw) {
  const __m256i lowest_kept = _mm256_and_si256(_mm256_srli_epi32(raw, 16), _mm256_set1_epi32(1));
  return _mm256_add_epi32(raw, _mm256_add_epi32(lowest_kept, _mm256_set1_epi32(0x7FFF)));
}
OCTAVO_INLINE void store(bf16* p, Vec a) {  // to nearest even; a NaN stays a quiet NaN
  const IVec raw = as_int(a);
  const IVec rounded = {round_to_bf16(raw.lo), round_to_bf16(raw.hi)};
  const IVec result = shift_right<16>(select(is_nan(a), raw | splat_int(0x00400000), rounded));
  const __m256i packed = _mm256_packus_epi32(result.lo, result.hi);  // quarters come out as lo, hi, lo, hi
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), _mm256_permute4x64_epi64(packed, 0xD8));
}
OCTAVO_INLINE void store(f16* p, Vec a) {
  auto* q = reinterpret_cast<__m128i*>(p);
  _mm_storeu_si128(q, _mm256_cvtps_ph(a.lo, _MM_FROUND_TO_NEAREST_INT));
  _mm_storeu_si128(q + 1, _mm256_cvtps_ph(a.hi, _MM_FROUND_TO_NEAREST_INT));
}

// Lane i is a[i ^ kApart]; kApart is 1, 2, 4 or 8.
template <int kApart>
OCTAVO_INLINE Vec exchange_lanes(Vec a) {
  if constexpr (kApart == 8) {
    return {a.hi, a.lo};
  } else if constexpr (kApart == 4) {
    return {_mm256_permute2f128_ps(a.lo, a.lo, 1), _mm256_permute2f128_ps(a.hi, a.hi, 1)};
  } else {
    constexpr int kOrder = kApart == 1 ? 0xB1 : 0x4E;  // 1 0 3 2 or 2 3 0 1
    return {_mm256_permute_ps(a.lo, kOrder), _mm256_permute_ps(a.hi, kOrder)};
  }
}

OCTAVO_INLINE float sum_lanes(Vec a) {
  const __m256 eight = _mm256_add_ps(a.lo, a.hi);
  const __m128 four = _mm_add_ps(_mm256_castps256_ps128(eight), _mm256_extractf128_ps(eight, 1));
  const __m128 two = _mm_add_ps(four, _mm_movehl_ps(four, four));
  return _mm_cvtss_f32(_mm_add_ss(two, _mm_movehdup_ps(two)));
}
OCTAVO_INLINE float max_lanes(Vec a) {
  const __m256 eight = _mm256_max_ps(a.lo, a.hi);
  const __m128 four = _mm_max_ps(_mm256_castps256_ps128(eight), _mm256_extractf128_ps(eight, 1));
  const __m128 two = _mm_max_ps(four, _mm_movehl_ps(four, four));
  return _mm_cvtss_f32(_mm_max_ss(two, _mm_movehdup_ps(two)));
}

OCTAVO_INLINE void transpose_8x8(__m256 (&r)[8]) {
  __m256 t[8], u[8];
  OCTAVO_UNROLL
  for (int i = 0; i < 8; i += 2) {
    t[i] = _mm256_unpacklo_ps(r[i], r[i + 1]);
    t[i + 1] = _mm256_unpackhi_ps(r[i], r[i + 1]);
  }
  OCTAVO_UNROLL
  for (int i = 0; i < 8; i += 4) {
    u[i] = _mm256_shuffle_ps(t[i], t[i + 2], 0x44);
    u[i + 1] = _mm256_shuffle_ps(t[i], t[i + 2], 0xEE);
    u[i + 2] = _mm256_shuffle_ps(t[i + 1], t[i + 3], 0x44);
    u[i + 3] = _mm256_shuffle_ps(t[i + 1], t[i + 3], 0xEE);
  }
  OCTAVO_UNROLL
  for (int c = 0; c < 4; ++c) {
    r[c] = _mm256_permute2f128_ps(u[c], u[4 + c], 0x20);
    r[4 + c] = _mm256_permute2f128_ps(u[c], u[4 + c], 0x31);
  }
}

OCTAVO_INLINE void transpose(Vec (&r)[16]) {
  __m256 a[8], b[8], c[8], d[8];
  for (int i = 0; i < 8; ++i) {
    a[i] = r[i].lo, b[i] = r[i].hi, c[i] = r[8 + i].lo, d[i] = r[8 + i].hi;
  }
  transpose_8x8(a);
  transpose_8x8(b);
  transpose_8x8(c);
  transpose_8x8(d);
  for (int i = 0; i < 8; ++i) {
    r[i] = {a[i], c[i]};
    r[8 + i] = {b[i], d[i]};
  }
}

}  // namespace octavo::OCTAVO_ISA
