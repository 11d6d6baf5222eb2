// Elementary functions over lanes: the same bits on every instruction set that has a fused multiply-add.
#pragma once

#include "arguments.h"
#include "vec.h"

namespace octavo::OCTAVO_ISA {

// e^x is 0 for x below this. The limit is just above the least normal number. Intel's processors handle underflow in microcode:
// each vector with a subnormal result would cost 200 cycles, and every masked score would be one.
constexpr float kLeastExponent = -87.33f;

// e^x within about one unit in the last place, for N vectors together, so that their chains overlap. 0 below kLeastExponent,
// inf on overflow of float32, NaN for NaN, exactly 1 at 0.
// Reduction by ln 2 in two parts, then the polynomial of Cephes' expf (Moshier).
template <int N>
OCTAVO_INLINE void exp(Vec (&x)[N]) {
  constexpr float kTerms[] = {1.3981999507e-3f, 8.3334519073e-3f, 4.1665795894e-2f, 1.6666665459e-1f, 5.0000001201e-1f};
  Mask vanishes[N];
  IVec n[N];
  Vec r[N], p[N];
  OCTAVO_UNROLL
  for (int i = 0; i < N; ++i) {
    vanishes[i] = less(x[i], splat(kLeastExponent));
    x[i] = min(splat(90.0f), max(splat(kLeastExponent), x[i]));
    n[i] = to_int(x[i] * splat(1.44269504088896341f));
  }
  OCTAVO_UNROLL
  for (int i = 0; i < N; ++i) r[i] = fma(to_float(n[i]), splat(-0.693359375f), x[i]);
  OCTAVO_UNROLL
  for (int i = 0; i < N; ++i) {
    r[i] = fma(to_float(n[i]), splat(2.12194440e-4f), r[i]);
    p[i] = splat(1.9875691500e-4f);
  }
  OCTAVO_UNROLL
  for (int term = 0; term < 5; ++term) {
    OCTAVO_UNROLL
    for (int i = 0; i < N; ++i) p[i] = fma(p[i], r[i], splat(kTerms[term]));
  }
  OCTAVO_UNROLL
  for (int i = 0; i < N; ++i) {
    const Vec power = times_power_of_two(fma(p[i], r[i] * r[i], r[i]) + splat(1.0f), n[i]);
    x[i] = select(vanishes[i], splat(0.0f), power);
  }
}

#if defined(OCTAVO_ISA_AVX512)
// e^x with a relative error below 2^-17, for N vectors together: enough for results that are rounded to bfloat16. It is 2^n times
// 2^r, a polynomial in r of least relative error; exactly 1 at 0, and 0 below kLeastExponent.
template <int N>
OCTAVO_INLINE void coarse_exp(Vec (&x)[N]) {
  constexpr float kTerms[] = {5.5906426e-2f, 2.4024099e-1f, 6.9312418e-1f, 1.0f};
  Mask remains[N];
  Vec r[N], p[N];
  OCTAVO_UNROLL
  for (int i = 0; i < N; ++i) {
    remains[i] = not_less(x[i], splat(kLeastExponent));
    x[i] = x[i] * splat(1.44269504088896341f);
    r[i] = fraction(x[i]);
    p[i] = splat(9.582853e-3f);
  }
  OCTAVO_UNROLL
  for (const float term : kTerms) {
    OCTAVO_UNROLL
    for (int i = 0; i < N; ++i) p[i] = fma(p[i], r[i], splat(term));
  }
  OCTAVO_UNROLL
  for (int i = 0; i < N; ++i) x[i] = times_power_of_two(remains[i], p[i], x[i] - r[i]);
}
#endif

constexpr float kGateLimit = 7.0f, kGateSlope = 1.702f;  // of kClampedSilu, as octavo.kernels.interface has them

// activation(gate) * up for N vectors together, so that their chains overlap. All activations are x times a sigmoid:
// silu(x) = x * sigmoid(x), and the tanh approximation of gelu (Hendrycks and Gimpel 2016) is x * (1 + tanh(y)) / 2 =
// x * sigmoid(2 * y), with y = sqrt(2 / pi) * (x + 0.044715 * x^3). The clamped silu of gpt-oss (OpenAI 2025) bounds x from above
// and `up` on both sides, is x * sigmoid(1.702 * x), and multiplies it by up + 1. NaN stays NaN.
template <int N, class T>
OCTAVO_INLINE void gate_vectors(Activation activation, const T* gate, const T* up, T* out) {
  const Vec one = splat(1.0f), zero = splat(0.0f);
  Vec x[N], power[N];
  OCTAVO_UNROLL
  for (int i = 0; i < N; ++i) x[i] = load(gate + i * kLanes);
  const bool is_clamped = activation == Activation::kClampedSilu;
  if (activation == Activation::kSilu) {
    OCTAVO_UNROLL
    for (int i = 0; i < N; ++i) power[i] = zero - x[i];
  } else if (is_clamped) {
    OCTAVO_UNROLL
    for (int i = 0; i < N; ++i) {
      x[i] = min(splat(kGateLimit), x[i]);
      power[i] = x[i] * splat(-kGateSlope);
    }
  } else {
    OCTAVO_UNROLL
    for (int i = 0; i < N; ++i) {
      power[i] = x[i] * fma(x[i] * x[i], splat(0.044715f), one) * splat(-1.5957691216057308f);
    }
  }
  exp(power);
  OCTAVO_UNROLL
  for (int i = 0; i < N; ++i) {
    Vec factor = load(up + i * kLanes);
    if (is_clamped) factor = max(splat(-kGateLimit), min(splat(kGateLimit), factor)) + one;
    store(out + i * kLanes, x[i] / (one + power[i]) * factor);
  }
}

// Replaces s by 2 atanh(s), for |s| <= 1/3. Every operation rounds, so that the bits are the same on every device.
template <int N>
OCTAVO_INLINE void twice_atanh(Vec (&s)[N]) {
  constexpr float kTerms[] = {1.0f / 13.0f, 1.0f / 11.0f, 1.0f / 9.0f, 1.0f / 7.0f, 1.0f / 5.0f, 1.0f / 3.0f};
  Vec z[N], q[N];
  OCTAVO_UNROLL
  for (int i = 0; i < N; ++i) {
    z[i] = s[i] * s[i];
    q[i] = splat(1.0f / 15.0f);
  }
  OCTAVO_UNROLL
  for (int term = 0; term < 6; ++term) {
    OCTAVO_UNROLL
    for (int i = 0; i < N; ++i) q[i] = q[i] * z[i] + splat(kTerms[term]);
  }
  OCTAVO_UNROLL
  for (int i = 0; i < N; ++i) {
    const Vec twice = s[i] + s[i];
    s[i] = twice + twice * (z[i] * q[i]);
  }
}

// 1 / (1 + e^-x).
template <int N>
OCTAVO_INLINE void sigmoid(Vec (&x)[N]) {
  OCTAVO_UNROLL
  for (int i = 0; i < N; ++i) x[i] = splat(0.0f) - x[i];
  exp(x);
  OCTAVO_UNROLL
  for (int i = 0; i < N; ++i) x[i] = splat(1.0f) / (splat(1.0f) + x[i]);
}

// x / (1 + e^-x).
template <int N>
OCTAVO_INLINE void silu(Vec (&x)[N]) {
  Vec power[N];
  OCTAVO_UNROLL
  for (int i = 0; i < N; ++i) power[i] = splat(0.0f) - x[i];
  exp(power);
  OCTAVO_UNROLL
  for (int i = 0; i < N; ++i) x[i] = x[i] / (splat(1.0f) + power[i]);
}

// ln(1 + e^x) = max(x, 0) + ln(1 + y), with y = e^-|x| and ln(1 + y) = 2 atanh(y / (2 + y)).
template <int N>
OCTAVO_INLINE void softplus(Vec (&x)[N]) {
  Vec rest[N];
  OCTAVO_UNROLL
  for (int i = 0; i < N; ++i) rest[i] = min(x[i], splat(0.0f) - x[i]);
  exp(rest);
  OCTAVO_UNROLL
  for (int i = 0; i < N; ++i) rest[i] = rest[i] / (splat(2.0f) + rest[i]);
  twice_atanh(rest);
  OCTAVO_UNROLL
  for (int i = 0; i < N; ++i) x[i] = max(splat(0.0f), x[i]) + rest[i];
}

OCTAVO_INLINE Vec exp(Vec x) {
  Vec one[1] = {x};
  exp(one);
  return one[0];
}

// tanh(x) within two units in the last place: near 0 the polynomial of Cephes' tanhf (Moshier), as 1 - 2 / (e^2x + 1) would
// cancel there.
OCTAVO_INLINE Vec tanh(Vec x) {
  constexpr float kTerms[] = {2.06390887954e-2f, -5.37397155531e-2f, 1.33314422036e-1f, -3.33332819422e-1f};
  const Vec square = x * x;
  Vec p = splat(-5.70498872745e-3f);
  OCTAVO_UNROLL
  for (const float term : kTerms) p = fma(p, square, splat(term));
  const Vec near = fma(p * square, x, x);
  const Vec size = max(x, splat(0.0f) - x);
  const Vec far = splat(1.0f) - splat(2.0f) / (exp(size + size) + splat(1.0f));
  const Vec signed_far = select(less(x, splat(0.0f)), splat(0.0f) - far, far);
  return select(less(square, splat(0.625f * 0.625f)), near, signed_far);
}

// cap * tanh(x / cap): nearly x if x is small, and never beyond the cap (Gemma Team 2024).
OCTAVO_INLINE Vec soft_cap(Vec x, Vec cap) { return tanh(x / cap) * cap; }

}  // namespace octavo::OCTAVO_ISA
