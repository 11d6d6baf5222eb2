// Vec on AVX-512 F, BW, VL and DQ, with VNNI if OCTAVO_ISA_VNNI is defined, and BF16 if OCTAVO_ISA_BF16 is.
#pragma once

#include <immintrin.h>

namespace octavo::OCTAVO_ISA {

struct Vec {
  __m512 v;
};

struct IVec {
  __m512i v;
};

using Mask = __mmask16;

OCTAVO_INLINE Vec splat(float x) { return {_mm512_set1_ps(x)}; }
OCTAVO_INLINE IVec splat_int(uint32_t x) { return {_mm512_set1_epi32(static_cast<int>(x))}; }
OCTAVO_INLINE IVec lane_numbers() {
  return {_mm512_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15)};
}

OCTAVO_INLINE Vec operator+(Vec a, Vec b) { return {_mm512_add_ps(a.v, b.v)}; }
OCTAVO_INLINE Vec operator-(Vec a, Vec b) { return {_mm512_sub_ps(a.v, b.v)}; }
OCTAVO_INLINE Vec operator*(Vec a, Vec b) { return {_mm512_mul_ps(a.v, b.v)}; }
OCTAVO_INLINE Vec operator/(Vec a, Vec b) { return {_mm512_div_ps(a.v, b.v)}; }
OCTAVO_INLINE Vec fma(Vec a, Vec b, Vec c) { return {_mm512_fmadd_ps(a.v, b.v, c.v)}; }
// If either is NaN the result is b, so a NaN in b survives.
OCTAVO_INLINE Vec max(Vec a, Vec b) { return {_mm512_max_ps(a.v, b.v)}; }
OCTAVO_INLINE Vec min(Vec a, Vec b) { return {_mm512_min_ps(a.v, b.v)}; }

OCTAVO_INLINE IVec operator+(IVec a, IVec b) { return {_mm512_add_epi32(a.v, b.v)}; }
OCTAVO_INLINE IVec operator-(IVec a, IVec b) { return {_mm512_sub_epi32(a.v, b.v)}; }
OCTAVO_INLINE IVec operator^(IVec a, IVec b) { return {_mm512_xor_si512(a.v, b.v)}; }
OCTAVO_INLINE IVec operator&(IVec a, IVec b) { return {_mm512_and_si512(a.v, b.v)}; }
OCTAVO_INLINE IVec operator|(IVec a, IVec b) { return {_mm512_or_si512(a.v, b.v)}; }
template <int kBits>
OCTAVO_INLINE IVec shift_left(IVec a) {
  return {_mm512_slli_epi32(a.v, kBits)};
}
template <int kBits>
OCTAVO_INLINE IVec shift_right(IVec a) {  // shifts in zeros
  return {_mm512_srli_epi32(a.v, kBits)};
}
template <int kBits>
OCTAVO_INLINE IVec shift_right_signed(IVec a) {
  return {_mm512_srai_epi32(a.v, kBits)};
}
// The 64-bit product of each lane and m, as its upper and lower halves.
OCTAVO_INLINE void multiply_wide(IVec a, uint32_t m, IVec& high, IVec& low) {
  const __m512i factor = _mm512_set1_epi32(static_cast<int>(m));
  const __m512i even = _mm512_mul_epu32(a.v, factor);
  const __m512i odd = _mm512_mul_epu32(_mm512_srli_epi64(a.v, 32), factor);
  low = {_mm512_mask_mov_epi32(even, 0xAAAA, _mm512_slli_epi64(odd, 32))};
  high = {_mm512_mask_mov_epi32(_mm512_srli_epi64(even, 32), 0xAAAA, odd)};
}

OCTAVO_INLINE IVec max_signed(IVec a, IVec b) { return {_mm512_max_epi32(a.v, b.v)}; }

// Each 32-bit lane: sum + the four products of its bytes; w is signed, x is signed with kByteOffset added to it.
#if defined(OCTAVO_ISA_VNNI)
constexpr int kByteOffset = 128;
OCTAVO_INLINE IVec add_byte_products(IVec sum, IVec x, IVec w) { return {_mm512_dpbusd_epi32(sum.v, x.v, w.v)}; }
#else
constexpr int kByteOffset = 0;
OCTAVO_INLINE IVec add_byte_products(IVec sum, IVec x, IVec w) {  // |w| times x with w's sign; no pair overflows 16 bits
  const __m512i zero = _mm512_setzero_si512();
  const __m512i signed_x = _mm512_mask_sub_epi8(x.v, _mm512_movepi8_mask(w.v), zero, x.v);
  const __m512i pairs = _mm512_maddubs_epi16(_mm512_abs_epi8(w.v), signed_x);
  return {_mm512_add_epi32(sum.v, _mm512_madd_epi16(pairs, _mm512_set1_epi16(1)))};
}
#endif
// Each 32-bit lane: sum + the four products of its bytes; w is 0 .. 15, x is signed.
constexpr bool kSumsNibblesInHalves = false;
OCTAVO_INLINE IVec add_nibble_products(IVec sum, IVec w, IVec x) {
#if defined(OCTAVO_ISA_VNNI)
  return {_mm512_dpbusd_epi32(sum.v, w.v, x.v)};
#else
  return {_mm512_add_epi32(sum.v, _mm512_madd_epi16(_mm512_maddubs_epi16(w.v, x.v), _mm512_set1_epi16(1)))};
#endif
}
// The same; w is unsigned with VNNI, and 0 .. 127 without.
OCTAVO_INLINE IVec add_unsigned_products(IVec sum, IVec w, IVec x) { return add_nibble_products(sum, w, x); }
// The four words, repeated in every 128 bits.
OCTAVO_INLINE IVec repeat_four(uint32_t a, uint32_t b, uint32_t c, uint32_t d) {
  return {_mm512_set4_epi32(static_cast<int>(d), static_cast<int>(c), static_cast<int>(b), static_cast<int>(a))};
}
// Each byte, an index 0 .. 15, is replaced by that byte of its 128 bits of the table.
OCTAVO_INLINE IVec look_up_bytes(IVec table, IVec bytes) { return {_mm512_shuffle_epi8(table.v, bytes.v)}; }
#if defined(OCTAVO_ISA_BF16)
// Each lane: sum + the two products of its bfloat16.
OCTAVO_INLINE Vec add_pair_products(Vec sum, IVec x, IVec w) {
  return {_mm512_dpbf16_ps(sum.v, (__m512bh)x.v, (__m512bh)w.v)};
}
// The lanes of low, then of high, rounded to bfloat16; lanes 2 i and 2 i + 1 become the halves of lane i. Subnormal numbers
// become zero.
OCTAVO_INLINE IVec round_pairs(Vec low, Vec high) { return {(__m512i)_mm512_cvtne2ps_pbh(high.v, low.v)}; }
#endif
// Each 32-bit lane: sum + the two products of its halves, which are signed.
OCTAVO_INLINE IVec add_word_products(IVec sum, IVec a, IVec b) {
#if defined(OCTAVO_ISA_VNNI)
  return {_mm512_dpwssd_epi32(sum.v, a.v, b.v)};
#else
  return {_mm512_add_epi32(sum.v, _mm512_madd_epi16(a.v, b.v))};
#endif
}
// Sixteen 16-bit numbers, one per lane; the upper halves are zero.
OCTAVO_INLINE IVec load_words(const void* p) {
  return {_mm512_cvtepu16_epi32(_mm256_loadu_si256(static_cast<const __m256i*>(p)))};
}
// Operations on the halves of each lane separately, modulo 2^16.
OCTAVO_INLINE IVec add_words(IVec a, IVec b) { return {_mm512_add_epi16(a.v, b.v)}; }
OCTAVO_INLINE IVec multiply_words(IVec a, IVec b) { return {_mm512_mullo_epi16(a.v, b.v)}; }
// Interleaves the 32 words of a with those of b: `first` has the first sixteen of each, `second` the last sixteen.
OCTAVO_INLINE void interleave_words(IVec a, IVec b, IVec& first, IVec& second) {
  const __m512i order = _mm512_setr_epi64(0, 4, 1, 5, 2, 6, 3, 7);  // unpacking works within every 128 bits
  const __m512i x = _mm512_permutexvar_epi64(order, a.v), y = _mm512_permutexvar_epi64(order, b.v);
  first = {_mm512_unpacklo_epi16(x, y)};
  second = {_mm512_unpackhi_epi16(x, y)};
}
// The bits of a where `mask` has ones, else those of b.
OCTAVO_INLINE IVec select_bits(uint32_t mask, IVec a, IVec b) {
  return {_mm512_ternarylogic_epi32(splat_int(mask).v, a.v, b.v, 0xCA)};
}
// Stores the lowest byte of each lane.
OCTAVO_INLINE void store_bytes(void* p, IVec a) {
  _mm_storeu_si128(static_cast<__m128i*>(p), _mm512_cvtepi32_epi8(a.v));
}

// The lanes of four vectors, each -128 .. 127, as bytes in order.
OCTAVO_INLINE IVec pack_bytes(const IVec (&a)[4]) {
  const __m512i bytes = _mm512_packs_epi16(_mm512_packs_epi32(a[0].v, a[1].v), _mm512_packs_epi32(a[2].v, a[3].v));
  // packing takes four lanes of each vector at a time
  return {_mm512_permutexvar_epi32(_mm512_setr_epi32(0, 4, 8, 12, 1, 5, 9, 13, 2, 6, 10, 14, 3, 7, 11, 15), bytes)};
}

OCTAVO_INLINE IVec as_int(Vec a) { return {_mm512_castps_si512(a.v)}; }
OCTAVO_INLINE Vec as_float(IVec a) { return {_mm512_castsi512_ps(a.v)}; }
OCTAVO_INLINE Vec to_float(IVec a) { return {_mm512_cvtepi32_ps(a.v)}; }  // lanes are signed
OCTAVO_INLINE IVec to_int(Vec a) { return {_mm512_cvtps_epi32(a.v)}; }    // rounds to nearest even
OCTAVO_INLINE IVec load_int(const void* p) { return {_mm512_loadu_si512(p)}; }
OCTAVO_INLINE void store_int(void* p, IVec a) { _mm512_storeu_si512(p, a.v); }

// a * 2^n, rounded once; n may exceed the exponents of float32.
OCTAVO_INLINE Vec times_power_of_two(Vec a, IVec n) { return {_mm512_scalef_ps(a.v, _mm512_cvtepi32_ps(n.v))}; }

// a - the nearest whole number; 0 for an infinity.
OCTAVO_INLINE Vec fraction(Vec a) { return {_mm512_reduce_ps(a.v, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC)}; }
// a * 2^n for whole numbers n, which may be -inf; 0 in lanes outside of m, where nothing is computed.
OCTAVO_INLINE Vec times_power_of_two(Mask m, Vec a, Vec n) { return {_mm512_maskz_scalef_ps(m, a.v, n.v)}; }

OCTAVO_INLINE Mask less(Vec a, Vec b) { return _mm512_cmp_ps_mask(a.v, b.v, _CMP_LT_OQ); }
OCTAVO_INLINE Mask not_less(Vec a, Vec b) { return _mm512_cmp_ps_mask(a.v, b.v, _CMP_NLT_UQ); }  // true if one is NaN
OCTAVO_INLINE Mask less_equal(Vec a, Vec b) { return _mm512_cmp_ps_mask(a.v, b.v, _CMP_LE_OQ); }
OCTAVO_INLINE Mask equal(Vec a, Vec b) { return _mm512_cmp_ps_mask(a.v, b.v, _CMP_EQ_OQ); }
OCTAVO_INLINE Mask is_nan(Vec a) { return _mm512_cmp_ps_mask(a.v, a.v, _CMP_UNORD_Q); }
OCTAVO_INLINE Mask is_negative(IVec a) { return _mm512_movepi32_mask(a.v); }  // the sign bit is set
OCTAVO_INLINE Mask both(Mask a, Mask b) { return static_cast<Mask>(a & b); }
OCTAVO_INLINE Mask either(Mask a, Mask b) { return static_cast<Mask>(a | b); }
OCTAVO_INLINE unsigned bits(Mask a) { return a; }
OCTAVO_INLINE Vec select(Mask m, Vec a, Vec b) { return {_mm512_mask_blend_ps(m, b.v, a.v)}; }  // m ? a : b
OCTAVO_INLINE IVec select(Mask m, IVec a, IVec b) { return {_mm512_mask_blend_epi32(m, b.v, a.v)}; }

OCTAVO_INLINE Vec load(const float* p) { return {_mm512_loadu_ps(p)}; }
OCTAVO_INLINE Vec load(const bf16* p) {
  const __m256i raw = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p));
  return {_mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(raw), 16))};
}
OCTAVO_INLINE Vec load(const f16* p) {
  return {_mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)))};
}
OCTAVO_INLINE Vec load(const int8_t* p) {
  return {_mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p))))};
}

OCTAVO_INLINE void store(float* p, Vec a) { _mm512_storeu_ps(p, a.v); }
// Each lane rounded to bfloat16, in its upper half: to nearest even; a NaN stays a quiet NaN.
OCTAVO_INLINE IVec round_to_bf16(Vec a) {
  const __m512i raw = _mm512_castps_si512(a.v);
  const __m512i more = _mm512_add_epi32(raw, _mm512_set1_epi32(0x7FFF));
  const Mask is_odd = _mm512_test_epi32_mask(raw, _mm512_set1_epi32(0x10000));
  const __m512i rounded = _mm512_mask_add_epi32(more, is_odd, more, _mm512_set1_epi32(1));
  return {_mm512_mask_or_epi32(rounded, is_nan(a), raw, _mm512_set1_epi32(0x00400000))};
}
OCTAVO_INLINE void store(bf16* p, Vec a) {
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), _mm512_cvtepi32_epi16(_mm512_srli_epi32(round_to_bf16(a).v, 16)));
}
OCTAVO_INLINE void store_two(bf16* p, Vec a, Vec b) {
  const __m512i upper_halves = _mm512_set_epi16(63, 61, 59, 57, 55, 53, 51, 49, 47, 45, 43, 41, 39, 37, 35, 33, 31, 29, 27, 25,
                                                23, 21, 19, 17, 15, 13, 11, 9, 7, 5, 3, 1);
  _mm512_storeu_si512(p, _mm512_permutex2var_epi16(round_to_bf16(a).v, upper_halves, round_to_bf16(b).v));
}
OCTAVO_INLINE void store(f16* p, Vec a) {
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), _mm512_cvtps_ph(a.v, _MM_FROUND_TO_NEAREST_INT));
}

// Lane i is a[i ^ kApart]; kApart is 1, 2, 4 or 8.
template <int kApart>
OCTAVO_INLINE Vec exchange_lanes(Vec a) {
  constexpr int kOrder = kApart % 3 == 1 ? 0xB1 : 0x4E;  // 1 0 3 2 or 2 3 0 1, of lanes or of four lanes each
  if constexpr (kApart < 4) {
    return {_mm512_permute_ps(a.v, kOrder)};
  } else {
    return {_mm512_shuffle_f32x4(a.v, a.v, kOrder)};
  }
}

OCTAVO_INLINE float sum_lanes(Vec a) {
  const __m256 eight = _mm256_add_ps(_mm512_castps512_ps256(a.v), _mm512_extractf32x8_ps(a.v, 1));
  const __m128 four = _mm_add_ps(_mm256_castps256_ps128(eight), _mm256_extractf128_ps(eight, 1));
  const __m128 two = _mm_add_ps(four, _mm_movehl_ps(four, four));
  return _mm_cvtss_f32(_mm_add_ss(two, _mm_movehdup_ps(two)));
}
OCTAVO_INLINE float max_lanes(Vec a) { return _mm512_reduce_max_ps(a.v); }

OCTAVO_INLINE void transpose(Vec (&r)[16]) {
  __m512 t[16];
  OCTAVO_UNROLL
  for (int i = 0; i < 16; i += 2) {
    t[i] = _mm512_unpacklo_ps(r[i].v, r[i + 1].v);
    t[i + 1] = _mm512_unpackhi_ps(r[i].v, r[i + 1].v);
  }
  __m512d u[16];
  OCTAVO_UNROLL
  for (int i = 0; i < 16; i += 4) {
    OCTAVO_UNROLL
    for (int j = 0; j < 2; ++j) {
      const __m512d a = _mm512_castps_pd(t[i + j]), b = _mm512_castps_pd(t[i + j + 2]);
      u[i + 2 * j] = _mm512_unpacklo_pd(a, b);
      u[i + 2 * j + 1] = _mm512_unpackhi_pd(a, b);
    }
  }
  // u[4 g + c] holds, in each quarter q, column 4 q + c of rows 4 g .. 4 g + 3.
  OCTAVO_UNROLL
  for (int c = 0; c < 4; ++c) {
    const __m512 g0 = _mm512_castpd_ps(u[c]), g1 = _mm512_castpd_ps(u[4 + c]);
    const __m512 g2 = _mm512_castpd_ps(u[8 + c]), g3 = _mm512_castpd_ps(u[12 + c]);
    const __m512 a = _mm512_shuffle_f32x4(g0, g1, 0x88), b = _mm512_shuffle_f32x4(g2, g3, 0x88);
    const __m512 d = _mm512_shuffle_f32x4(g0, g1, 0xDD), e = _mm512_shuffle_f32x4(g2, g3, 0xDD);
    r[c].v = _mm512_shuffle_f32x4(a, b, 0x88);
    r[8 + c].v = _mm512_shuffle_f32x4(a, b, 0xDD);
    r[4 + c].v = _mm512_shuffle_f32x4(d, e, 0x88);
    r[12 + c].v = _mm512_shuffle_f32x4(d, e, 0xDD);
  }
}

}  // namespace octavo::OCTAVO_ISA
