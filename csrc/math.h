// Elementary functions over lanes: the same bits on every instruction set that has a fused multiply-add.
#pragma once

#include "vec.h"

namespace octavo::OCTAVO_ISA {

// e^x within about one unit in the last place; 0 and inf where float32 has no better, NaN for NaN, exactly 1 at 0.
// Reduction by ln 2 in two parts, then the polynomial of Cephes' expf (Moshier).
OCTAVO_INLINE Vec exp(Vec x) {
  x = min(splat(90.0f), max(splat(-105.0f), x));
  const IVec n = to_int(x * splat(1.44269504088896341f));
  const Vec nf = to_float(n);
  Vec r = fma(nf, splat(-0.693359375f), x);
  r = fma(nf, splat(2.12194440e-4f), r);
  Vec p = splat(1.9875691500e-4f);
  p = fma(p, r, splat(1.3981999507e-3f));
  p = fma(p, r, splat(8.3334519073e-3f));
  p = fma(p, r, splat(4.1665795894e-2f));
  p = fma(p, r, splat(1.6666665459e-1f));
  p = fma(p, r, splat(5.0000001201e-1f));
  p = fma(p, r * r, r) + splat(1.0f);
  // 2^n in two factors: n reaches from -152 to 130, beyond the exponents of float32.
  const IVec half = shift_right_signed<1>(n);
  const Vec first = as_float(shift_left<23>(half + splat_int(127)));
  const Vec second = as_float(shift_left<23>(n - half + splat_int(127)));
  return p * first * second;
}

}  // namespace octavo::OCTAVO_ISA
