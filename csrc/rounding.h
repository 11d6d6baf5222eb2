// Rounding of weights to integers: the same bits as octavo.kernels.quantization, which defines them, in torch.
#pragma once

#include <cfloat>

#include "arguments.h"

namespace octavo {

struct RoundArgs {
  const void* weight;  // [n, k]
  DType dtype;         // float32, bfloat16 or float16
  int64_t n;
  int64_t k;
  int64_t stride;
  int64_t group_size;  // int4: k that share a scale; 0: int8, rotated
  void* values;        // int8 or uint8 [n, k], contiguous
  void* scales;        // int8: float32 [n]; int4: bfloat16 [n, groups]
  void* zeros;         // int4: float16 [n, groups] of zero points, or null: all of them are 8

  static RoundArgs of(Address weight, int dtype, int64_t n, int64_t k, int64_t stride, int64_t group_size, Address values,
                      Address scales, Address zeros) {
    return {at<void>(weight), DType(dtype), n, k, stride, group_size, at<void>(values), at<void>(scales), at<void>(zeros)};
  }
};

}  // namespace octavo

#if defined(OCTAVO_ISA)

#include "quantized_rows.h"

namespace octavo::OCTAVO_ISA {

constexpr int64_t kLeastRounded = 1 << 16;  // values of a task, at least
constexpr float kNibbleZero = 8.0f, kMostNibble = 15.0f;
constexpr float kClippings[] = {1.0, 0.92, 0.84, 0.76};                   // factors to try of a group's least and largest value
constexpr float kScales[] = {-1.0 / 8, -0.92 / 8, -0.84 / 8, -0.76 / 8};  // scales to try, as factors of a group's extreme

OCTAVO_INLINE void store_first_bytes(void* p, IVec values, int64_t count) {
  if (count >= kLanes) return store_bytes(p, values);
  uint8_t buffer[kLanes];
  store_bytes(buffer, values);
  std::memcpy(p, buffer, static_cast<size_t>(count));
}

// `rotated`: memory for the row.
template <class T>
void round_to_bytes(const T* row, int64_t k, float* rotated, int8_t* out, float* scale) {
  rotate_row(row, k, rotated);
  const Vec share = splat(1.0f / static_cast<float>(rotation_block(k)));  // rotated twice, a row is multiplied by the block
  for (int64_t i = 0; i < k; i += kLanes) store(rotated + i, load(rotated + i) * share);
  const RowScale found = row_scale(static_cast<const float*>(rotated), k);
  *scale = found.scale;
  if (!found.is_finite) {
    std::memset(out, 0, static_cast<size_t>(k));
    return;
  }
  for (int64_t i = 0; i < k; i += kLanes) {
    store_first_bytes(out + i, to_int(load(rotated + i) * splat(found.inverse)), k - i);
  }
}

// Loads values of a group: NaN becomes zero, an infinity the largest finite number of its sign.
template <class T>
OCTAVO_INLINE Vec load_finite(const T* p, int64_t count) {
  const Vec value = load_first(p, count);
  const Vec finite = min(splat(FLT_MAX), max(splat(-FLT_MAX), value));
  return select(is_nan(value), splat(0.0f), finite);
}

OCTAVO_INLINE Vec magnitude_of(Vec a) { return as_float(as_int(a) & splat_int(0x7FFFFFFFu)); }

// The first value of the largest magnitude in a group, which is padded with zeros to whole vectors.
inline float extreme_of(const float* group, int64_t padded) {
  Vec most = splat(0.0f);
  for (int64_t i = 0; i < padded; i += kLanes) most = max(most, magnitude_of(load(group + i)));
  const Vec largest = splat(max_lanes(most));
  for (int64_t i = 0; i < padded; i += kLanes) {
    const unsigned found = bits(equal(magnitude_of(load(group + i)), largest));
    if (found != 0) return group[i + __builtin_ctz(found)];
  }
  return 0.0f;  // never
}

// A group's scale and zero point as they are stored, and in float32 for rounding.
struct NibbleScale {
  bf16 stored;
  f16 stored_zero{0};
  float scale;
  float inverse;
  float zero = kNibbleZero;

  explicit NibbleScale(float wanted) {
    bf16 lanes[kLanes];
    store(lanes, splat(wanted));
    stored = lanes[0];
    float wide[kLanes];
    store(wide, load(lanes));
    scale = wide[0];
    inverse = std::fabs(scale) >= kLeastMagnitude ? 1.0f / scale : 0.0f;
  }

  // With a zero point that maps `least`, which must not be above 0, to 0.
  NibbleScale(float wanted, float least) : NibbleScale(wanted) {
    f16 lanes[kLanes];
    store(lanes, min(splat(kMostNibble), max(splat(0.0f), splat(-least * inverse))));
    stored_zero = lanes[0];
    float wide[kLanes];
    store(wide, load(lanes));
    zero = wide[0];
  }

  OCTAVO_INLINE Vec round(Vec value) const {
    const Vec nearest = to_float(to_int(value * splat(inverse) + splat(zero - kNibbleZero))) + splat(kNibbleZero);
    return min(splat(kMostNibble), max(splat(0.0f), nearest));
  }

  // The squared error of the first `count` values of a group.
  float error(const float* group, int64_t count) const {
    Vec squares = splat(0.0f);
    for (int64_t i = 0; i < count; i += kLanes) {
      const Vec value = load(group + i);
      Vec difference = (round(value) - splat(zero)) * splat(scale) - value;
      if (count - i < kLanes) {
        float lanes[kLanes];
        store(lanes, difference);
        difference = load_first(static_cast<const float*>(lanes), count - i);
      }
      squares = squares + difference * difference;
    }
    return sum_lanes(squares);
  }
};

// The best of four scales: the first with the least squared error. scale_of(i): the i-th scale.
template <class ScaleOf>
NibbleScale best_scale(const float* group, int64_t count, const ScaleOf& scale_of) {
  NibbleScale best = scale_of(0);
  float least = best.error(group, count);
  for (int tried = 1; tried < 4; ++tried) {
    const NibbleScale other = scale_of(tried);
    const float error = other.error(group, count);
    if (error < least) best = other, least = error;
  }
  return best;
}

// A scale with which the value of largest magnitude is eight steps below zero, that is, is stored as 0.
inline NibbleScale scale_to_extreme(const float* group, int64_t count) {
  const float extreme = extreme_of(group, whole_vectors(count));
  return best_scale(group, count, [&](int tried) { return NibbleScale(extreme * kScales[tried]); });
}

// A scale and a zero point with 15 steps from the least value of a group, or 0, to the largest, or 0.
inline NibbleScale scale_between(const float* group, int64_t count) {
  Vec lowest = splat(0.0f), highest = splat(0.0f);
  for (int64_t i = 0; i < count; i += kLanes) {
    lowest = min(lowest, load(group + i));
    highest = max(highest, load(group + i));
  }
  const float low = -max_lanes(splat(0.0f) - lowest), high = max_lanes(highest);
  return best_scale(group, count, [&](int tried) {
    const float least = low * kClippings[tried];
    return NibbleScale((high * kClippings[tried] - least) / kMostNibble, least);
  });
}

// `group`: memory for `count` values, rounded up to whole vectors. zero: output of the zero point, or null.
template <class T>
void round_to_nibbles(const T* values, int64_t count, float* group, uint8_t* out, bf16* scale, f16* zero) {
  for (int64_t i = 0; i < count; i += kLanes) store(group + i, load_finite(values + i, count - i));
  const NibbleScale best = zero == nullptr ? scale_to_extreme(group, count) : scale_between(group, count);
  for (int64_t i = 0; i < count; i += kLanes) {
    store_first_bytes(out + i, to_int(best.round(load(group + i))), count - i);
  }
  *scale = best.stored;
  if (zero != nullptr) *zero = best.stored_zero;
}

template <class T>
void round_weight_of(ThreadPool& pool, const RoundArgs& args) {
  const int64_t k = args.k, size = args.group_size, groups = size == 0 ? 1 : divide_up(k, size);
  const int64_t rows = larger(int64_t{1}, kLeastRounded / larger(k, int64_t{1}));
  pool.reserve_local(static_cast<size_t>(whole_vectors(size == 0 ? k : smaller(size, k))) * sizeof(float));
  parallel(pool, divide_up(args.n, rows), [&](int64_t piece, int thread) {
    auto* room = static_cast<float*>(pool.local(thread));
    for (int64_t n = piece * rows; n < smaller(args.n, (piece + 1) * rows); ++n) {
      const T* row = static_cast<const T*>(args.weight) + n * args.stride;
      auto* out = static_cast<uint8_t*>(args.values) + n * k;
      if (size == 0) {
        round_to_bytes(row, k, room, reinterpret_cast<int8_t*>(out), static_cast<float*>(args.scales) + n);
        continue;
      }
      for (int64_t g = 0; g < groups; ++g) {
        const int64_t at = g * size;
        round_to_nibbles(row + at, smaller(size, k - at), room, out + at, static_cast<bf16*>(args.scales) + n * groups + g,
                         args.zeros == nullptr ? nullptr : static_cast<f16*>(args.zeros) + n * groups + g);
      }
    }
  });
}

inline void round_weight(ThreadPool& pool, const RoundArgs& args) {
  switch (args.dtype) {
    case DType::kFloat32: return round_weight_of<float>(pool, args);
    case DType::kBFloat16: return round_weight_of<bf16>(pool, args);
    case DType::kFloat16: return round_weight_of<f16>(pool, args);
    default: return;  // rounded already
  }
}

}  // namespace octavo::OCTAVO_ISA

#endif  // OCTAVO_ISA
