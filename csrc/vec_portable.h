// Vec in the generic vectors of GCC and Clang: SSE2, NEON or scalar code, depending on the target.
#pragma once

#include <cmath>

namespace octavo::OCTAVO_ISA {

typedef float float16lanes __attribute__((vector_size(64)));
typedef uint32_t uint16lanes __attribute__((vector_size(64)));
typedef int32_t int16lanes __attribute__((vector_size(64)));

struct Vec {
  float16lanes v;
};

struct IVec {
  uint16lanes v;
};

struct Mask {  // all bits of a lane set, or none
  int16lanes v;
};

OCTAVO_INLINE Vec splat(float x) { return {x - float16lanes{}}; }  // a sum would make 0.0 of -0.0
OCTAVO_INLINE IVec splat_int(uint32_t x) { return {uint16lanes{} + x}; }
OCTAVO_INLINE IVec lane_numbers() { return {uint16lanes{0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15}}; }

OCTAVO_INLINE Vec operator+(Vec a, Vec b) { return {a.v + b.v}; }
OCTAVO_INLINE Vec operator-(Vec a, Vec b) { return {a.v - b.v}; }
OCTAVO_INLINE Vec operator*(Vec a, Vec b) { return {a.v * b.v}; }
OCTAVO_INLINE Vec operator/(Vec a, Vec b) { return {a.v / b.v}; }
// Fused if the target has one instruction for it (ARM); otherwise a product and a sum, each rounded.
OCTAVO_INLINE Vec fma(Vec a, Vec b, Vec c) {
#ifdef __FP_FAST_FMAF
  Vec r;
  for (int i = 0; i < 16; ++i) r.v[i] = __builtin_fmaf(a.v[i], b.v[i], c.v[i]);
  return r;
#else
  return {a.v * b.v + c.v};
#endif
}
OCTAVO_INLINE Vec max(Vec a, Vec b) { return {a.v > b.v ? a.v : b.v}; }  // b if either is NaN
OCTAVO_INLINE Vec min(Vec a, Vec b) { return {a.v < b.v ? a.v : b.v}; }

OCTAVO_INLINE IVec operator+(IVec a, IVec b) { return {a.v + b.v}; }
OCTAVO_INLINE IVec operator-(IVec a, IVec b) { return {a.v - b.v}; }
OCTAVO_INLINE IVec operator^(IVec a, IVec b) { return {a.v ^ b.v}; }
OCTAVO_INLINE IVec operator&(IVec a, IVec b) { return {a.v & b.v}; }
OCTAVO_INLINE IVec operator|(IVec a, IVec b) { return {a.v | b.v}; }
template <int kBits>
OCTAVO_INLINE IVec shift_left(IVec a) {
  return {a.v << kBits};
}
template <int kBits>
OCTAVO_INLINE IVec shift_right(IVec a) {  // shifts in zeros
  return {a.v >> kBits};
}
template <int kBits>
OCTAVO_INLINE IVec shift_right_signed(IVec a) {
  return {reinterpret_cast<uint16lanes>(reinterpret_cast<int16lanes>(a.v) >> kBits)};
}
// The 64-bit product of each lane and m, as its upper and lower halves.
OCTAVO_INLINE void multiply_wide(IVec a, uint32_t m, IVec& high, IVec& low) {
  for (int i = 0; i < 16; ++i) {
    const uint64_t product = static_cast<uint64_t>(a.v[i]) * m;
    high.v[i] = static_cast<uint32_t>(product >> 32);
    low.v[i] = static_cast<uint32_t>(product);
  }
}

OCTAVO_INLINE IVec max_signed(IVec a, IVec b) {
  const int16lanes x = reinterpret_cast<int16lanes>(a.v), y = reinterpret_cast<int16lanes>(b.v);
  return {x > y ? a.v : b.v};
}

// Byte kByte of each lane, its sign extended.
template <int kByte>
OCTAVO_INLINE int16lanes signed_byte(IVec a) {
  return reinterpret_cast<int16lanes>(shift_right_signed<24>(shift_left<24 - 8 * kByte>(a)).v);
}
// Each 32-bit lane: sum + the four products of its bytes; w is signed, x is signed with kByteOffset added to it.
constexpr int kByteOffset = 0;
OCTAVO_INLINE IVec add_byte_products(IVec sum, IVec x, IVec w) {
  const int16lanes products = signed_byte<0>(x) * signed_byte<0>(w) + signed_byte<1>(x) * signed_byte<1>(w) +
                              signed_byte<2>(x) * signed_byte<2>(w) + signed_byte<3>(x) * signed_byte<3>(w);
  return {sum.v + reinterpret_cast<uint16lanes>(products)};
}
// The same; w is 0 .. 15, x is signed.
constexpr bool kSumsNibblesInHalves = false;
OCTAVO_INLINE IVec add_nibble_products(IVec sum, IVec w, IVec x) { return add_byte_products(sum, x, w); }
// The same; w is 0 .. 127.
OCTAVO_INLINE IVec add_unsigned_products(IVec sum, IVec w, IVec x) { return add_byte_products(sum, x, w); }
// The four words, repeated in every 128 bits.
OCTAVO_INLINE IVec repeat_four(uint32_t a, uint32_t b, uint32_t c, uint32_t d) {
  return {uint16lanes{a, b, c, d, a, b, c, d, a, b, c, d, a, b, c, d}};
}
// Each byte, an index 0 .. 15, is replaced by that byte of its 128 bits of the table.
OCTAVO_INLINE IVec look_up_bytes(IVec table, IVec bytes) {
  uint8_t from[64], at[64];
  std::memcpy(from, &table.v, sizeof(from));
  std::memcpy(at, &bytes.v, sizeof(at));
  for (int i = 0; i < 64; ++i) at[i] = from[i / 16 * 16 + at[i]];
  IVec r;
  std::memcpy(&r.v, at, sizeof(r.v));
  return r;
}
// Half kHalf of each lane, its sign extended.
template <int kHalf>
OCTAVO_INLINE int16lanes signed_word(IVec a) {
  return reinterpret_cast<int16lanes>(shift_right_signed<16>(shift_left<16 - 16 * kHalf>(a)).v);
}
// Each 32-bit lane: sum + the two products of its halves, which are signed.
OCTAVO_INLINE IVec add_word_products(IVec sum, IVec a, IVec b) {
  const int16lanes products = signed_word<0>(a) * signed_word<0>(b) + signed_word<1>(a) * signed_word<1>(b);
  return {sum.v + reinterpret_cast<uint16lanes>(products)};
}
// Sixteen 16-bit numbers, one per lane; the upper halves are zero.
OCTAVO_INLINE IVec load_words(const void* p) {
  uint16_t words[16];
  std::memcpy(words, p, sizeof(words));
  IVec r;
  for (int i = 0; i < 16; ++i) r.v[i] = words[i];
  return r;
}
// Stores the lowest byte of each lane.
OCTAVO_INLINE void store_bytes(void* p, IVec a) {
  auto* bytes = static_cast<uint8_t*>(p);
  for (int i = 0; i < 16; ++i) bytes[i] = static_cast<uint8_t>(a.v[i]);
}

// The lanes of four vectors, each -128 .. 127, as bytes in order.
OCTAVO_INLINE IVec pack_bytes(const IVec (&a)[4]) {
  uint8_t bytes[4 * 16];
  for (int i = 0; i < 4; ++i) store_bytes(bytes + i * 16, a[i]);
  IVec r;
  std::memcpy(&r.v, bytes, sizeof(r.v));
  return r;
}

OCTAVO_INLINE IVec as_int(Vec a) { return {reinterpret_cast<uint16lanes>(a.v)}; }
OCTAVO_INLINE Vec as_float(IVec a) { return {reinterpret_cast<float16lanes>(a.v)}; }
OCTAVO_INLINE Vec to_float(IVec a) {  // lanes are signed
  return {__builtin_convertvector(reinterpret_cast<int16lanes>(a.v), float16lanes)};
}
OCTAVO_INLINE IVec to_int(Vec a) {  // to nearest even; NaN and numbers beyond int give the smallest int
  IVec r;
  for (int i = 0; i < 16; ++i) {
    const float x = a.v[i];
    r.v[i] = std::fabs(x) < 2147483648.0f ? static_cast<uint32_t>(std::lrintf(x)) : 0x80000000u;
  }
  return r;
}
OCTAVO_INLINE IVec load_int(const void* p) {
  IVec r;
  std::memcpy(&r.v, p, sizeof(r.v));
  return r;
}
OCTAVO_INLINE void store_int(void* p, IVec a) { std::memcpy(p, &a.v, sizeof(a.v)); }

// a * 2^n, rounded once. n may exceed the exponents of float32, so there are two factors; the first product is exact.
OCTAVO_INLINE Vec times_power_of_two(Vec a, IVec n) {
  const IVec half = shift_right_signed<1>(n), bias = splat_int(127);
  return a * as_float(shift_left<23>(half + bias)) * as_float(shift_left<23>(n - half + bias));
}

OCTAVO_INLINE Mask less(Vec a, Vec b) { return {a.v < b.v}; }
OCTAVO_INLINE Mask less_equal(Vec a, Vec b) { return {a.v <= b.v}; }
OCTAVO_INLINE Mask equal(Vec a, Vec b) { return {a.v == b.v}; }
OCTAVO_INLINE Mask is_nan(Vec a) { return {a.v != a.v}; }
OCTAVO_INLINE Mask is_negative(IVec a) { return {reinterpret_cast<int16lanes>(a.v) < 0}; }  // the sign bit is set
OCTAVO_INLINE Mask both(Mask a, Mask b) { return {a.v & b.v}; }
OCTAVO_INLINE Mask either(Mask a, Mask b) { return {a.v | b.v}; }
OCTAVO_INLINE unsigned bits(Mask a) {
  unsigned r = 0;
  for (int i = 0; i < 16; ++i) r |= (a.v[i] ? 1u : 0u) << i;
  return r;
}
OCTAVO_INLINE Vec select(Mask m, Vec a, Vec b) { return {m.v ? a.v : b.v}; }
OCTAVO_INLINE IVec select(Mask m, IVec a, IVec b) { return {m.v ? a.v : b.v}; }

OCTAVO_INLINE Vec load(const float* p) {
  Vec r;
  std::memcpy(&r.v, p, sizeof(r.v));
  return r;
}
OCTAVO_INLINE Vec load(const bf16* p) {
  IVec r;
  for (int i = 0; i < 16; ++i) r.v[i] = static_cast<uint32_t>(p[i].bits) << 16;
  return as_float(r);
}
// float16 by arithmetic: the exponent is rebased by a product, which also normalizes subnormal numbers.
OCTAVO_INLINE Vec load(const f16* p) {
  IVec raw;
  for (int i = 0; i < 16; ++i) raw.v[i] = p[i].bits;
  const IVec magnitude = shift_left<13>(raw & splat_int(0x7FFF));
  const Vec finite = as_float(magnitude) * splat(0x1p112f);
  const Vec special = as_float(magnitude | splat_int(0x7F800000));  // inf and NaN
  const Vec unsigned_value = select(less_equal(splat(65536.0f), finite), special, finite);
  return as_float(as_int(unsigned_value) | shift_left<16>(raw & splat_int(0x8000)));
}
OCTAVO_INLINE Vec load(const int8_t* p) {
  Vec r;
  for (int i = 0; i < 16; ++i) r.v[i] = static_cast<float>(p[i]);
  return r;
}

OCTAVO_INLINE void store(float* p, Vec a) { std::memcpy(p, &a.v, sizeof(a.v)); }
OCTAVO_INLINE void store(bf16* p, Vec a) {  // to nearest even; a NaN stays a quiet NaN
  const IVec raw = as_int(a);
  const IVec rounded = raw + (shift_right<16>(raw) & splat_int(1)) + splat_int(0x7FFF);
  const IVec result = shift_right<16>(select(is_nan(a), raw | splat_int(0x00400000), rounded));
  for (int i = 0; i < 16; ++i) p[i].bits = static_cast<uint16_t>(result.v[i]);
}
// Rounds to nearest even at float16's last place; subnormal results by adding 0.5, whose last place in float32 is 2^-24.
OCTAVO_INLINE void store(f16* p, Vec a) {
  const IVec raw = as_int(a);
  for (int i = 0; i < 16; ++i) {
    const uint32_t magnitude = raw.v[i] & 0x7FFFFFFF;
    uint32_t half;
    if (magnitude > 0x7F800000) {
      half = 0x7E00;
    } else if (magnitude >= 0x477FF000) {  // rounds to 65536 or more
      half = 0x7C00;
    } else if (magnitude < 0x38800000) {
      float x;
      std::memcpy(&x, &magnitude, 4);
      x += 0.5f;
      std::memcpy(&half, &x, 4);
      half -= 0x3F000000;
    } else {
      half = (magnitude - 0x38000000 + 0xFFF + ((magnitude >> 13) & 1)) >> 13;
    }
    p[i].bits = static_cast<uint16_t>(half | (raw.v[i] >> 16 & 0x8000));
  }
}

// Lane i is a[i ^ kApart]; kApart is 1, 2, 4 or 8.
template <int kApart>
OCTAVO_INLINE Vec exchange_lanes(Vec a) {
  Vec r;
  for (int i = 0; i < 16; ++i) r.v[i] = a.v[i ^ kApart];
  return r;
}

OCTAVO_INLINE float sum_lanes(Vec a) {
  for (int width = 8; width > 0; width /= 2) {
    for (int i = 0; i < width; ++i) a.v[i] += a.v[i + width];
  }
  return a.v[0];
}
OCTAVO_INLINE float max_lanes(Vec a) {
  float r = a.v[0];
  for (int i = 1; i < 16; ++i) r = r < a.v[i] ? a.v[i] : r;
  return r;
}

OCTAVO_INLINE void transpose(Vec (&r)[16]) {
  for (int i = 0; i < 16; ++i) {
    for (int j = 0; j < i; ++j) {
      const float t = r[i].v[j];
      r[i].v[j] = r[j].v[i];
      r[j].v[i] = t;
    }
  }
}

}  // namespace octavo::OCTAVO_ISA
