// "octavo noise v1": Gumbel noise as a pure function of (seed, position, sample index, token id).
//
// src/octavo/kernels/noise.py defines it and gives the same bits in torch. It uses only operations that IEEE 754 rounds one by one
// (add, multiply, divide, conversion from integer) and integer operations, in the order written there: no fused multiply-add, no
// library function.
#pragma once

#include "math.h"

namespace octavo::OCTAVO_ISA {

constexpr int kNoiseBlock = 64;          // token ids that one evaluation serves: four words in each of sixteen lanes
constexpr float kNoiseBound = 23.0f;     // above the largest value, 22.874...

struct NoiseKey {
  uint32_t key[2];
  uint32_t position;
  uint32_t sample_index;

  NoiseKey(int64_t seed, int32_t position_, int32_t sample_index_)
      : key{static_cast<uint32_t>(static_cast<uint64_t>(seed)), static_cast<uint32_t>(static_cast<uint64_t>(seed) >> 32)},
        position(static_cast<uint32_t>(position_)),
        sample_index(static_cast<uint32_t>(sample_index_)) {}
};

// Philox4x32-10: Salmon et al., "Parallel Random Numbers: As Easy as 1, 2, 3" (2011).
OCTAVO_INLINE void philox(const NoiseKey& key, IVec first_word, IVec (&word)[4]) {
  word[0] = first_word;
  word[1] = splat_int(key.position);
  word[2] = splat_int(key.sample_index);
  word[3] = splat_int(0);
  uint32_t k0 = key.key[0], k1 = key.key[1];
  for (int round = 0; round < 10; ++round) {
    IVec high0, low0, high1, low1;
    multiply_wide(word[0], 0xD2511F53u, high0, low0);
    multiply_wide(word[2], 0xCD9E8D57u, high1, low1);
    word[0] = high1 ^ word[1] ^ splat_int(k0);
    word[2] = high0 ^ word[3] ^ splat_int(k1);
    word[1] = low1;
    word[3] = low0;
    k0 += 0x9E3779B9u;
    k1 += 0xBB67AE85u;
  }
}

// The functions below compute the four words of a call together, so that their chains of operations overlap.

// Splits a positive normal v into m 2^e with m in [sqrt(1/2), sqrt(2)).
OCTAVO_INLINE void split_exponent(Vec v, Vec& m, Vec& e) {
  const IVec raw = as_int(v);
  const IVec exponent = shift_right_signed<23>(raw - splat_int(0x3F3504F3u));
  m = as_float(raw - shift_left<23>(exponent));
  e = to_float(exponent);
}

OCTAVO_INLINE Vec scaled_logarithm(Vec e, Vec atanh_part) {
  return e * splat(6.9313812256e-01f) + (atanh_part + e * splat(9.0580006145e-06f));
}

OCTAVO_INLINE void gumbel(const IVec (&word)[4], Vec (&noise)[4]) {
  const Vec one = splat(1.0f), zero = splat(0.0f);
  Vec part[4], m[4], e[4];
  OCTAVO_UNROLL
  for (int i = 0; i < 4; ++i) {
    const Mask upper = is_negative(word[i]);  // word >= 2^31
    const IVec distance = select(upper, word[i] ^ splat_int(0xFFFFFFFFu), word[i]);
    const Vec t = (to_float(distance) + splat(0.5f)) * splat(0x1p-32f);  // distance to the nearer end of (0, 1)
    split_exponent(t, m[i], e[i]);
    part[i] = select(upper, m[i] - one, t) / select(upper, m[i] + one, splat(2.0f) - t);
  }
  twice_atanh(part);
  OCTAVO_UNROLL
  for (int i = 0; i < 4; ++i) {
    const Vec exponential = select(is_negative(word[i]), zero - scaled_logarithm(e[i], part[i]), part[i]);
    split_exponent(exponential, m[i], e[i]);
    part[i] = (m[i] - one) / (m[i] + one);
  }
  twice_atanh(part);
  OCTAVO_UNROLL
  for (int i = 0; i < 4; ++i) noise[i] = zero - scaled_logarithm(e[i], part[i]);
}

// Noise of token ids block * 64 .. block * 64 + 63.
OCTAVO_INLINE void noise_block(const NoiseKey& key, int64_t block, Vec (&noise)[4]) {
  IVec word[4];
  philox(key, splat_int(static_cast<uint32_t>(block * kLanes)) + lane_numbers(), word);
  gumbel(word, noise);
}

inline void gumbel_noise(int64_t seed, int32_t position, int32_t sample_index, int64_t first, int64_t count, float* out) {
  const NoiseKey key(seed, position, sample_index);
  for (int64_t block = first / kNoiseBlock; block * kNoiseBlock < first + count; ++block) {
    Vec noise[4];
    noise_block(key, block, noise);
    float values[kNoiseBlock];
    for (int i = 0; i < 4; ++i) store(values + i * kLanes, noise[i]);
    const int64_t begin = larger(first, block * kNoiseBlock), end = smaller(first + count, (block + 1) * kNoiseBlock);
    for (int64_t id = begin; id < end; ++id) out[id - first] = values[id - block * kNoiseBlock];
  }
}

}  // namespace octavo::OCTAVO_ISA
