// Copies, norms, gates, rotary embedding: one pass over each row, sums in a fixed order of lanes.
#pragma once

#include <cmath>

#include "arguments.h"

namespace octavo {

// The arguments of take_rows: rows that are copied out of x.
struct TakeArgs {
  const void* x;
  int64_t x_stride;  // bytes between rows
  const int64_t* rows;  // [count], of x
  int64_t count;
  int64_t row_bytes;
  void* out;  // [count, row_bytes], contiguous

  static constexpr auto kRows = &TakeArgs::count;
  static constexpr bool kTakesOutputs = true;  // later calls of a recorded step are of the rows that it takes
  static TakeArgs of(Address x, int64_t x_stride, Address rows, int64_t count, int64_t row_bytes, Address out) {
    return {at<void>(x), x_stride, at<int64_t>(rows), count, row_bytes, at<void>(out)};
  }

  bool reads(const StepArgs& step, const BatchArgs&) const { return rows == step.output_rows; }
  void read(const StepArgs& step, const BatchArgs&) { rows = step.output_rows; }
};

struct NormArgs {
  const void* x;   // [rows / together, together, size], the last two dimensions contiguous
  void* residual;  // [rows, size], contiguous, or null: x * scale is added to it, and the sum is normalized
  const void* weight;
  DType weight_dtype;
  void* out;
  DType dtype;  // of x, residual and out
  int64_t rows;
  int64_t size;
  float eps;
  float scale;       // of x, if it is added to residual
  int64_t together;  // rows of x that are contiguous: the heads of a token
  int64_t x_stride;  // from one such group to the next

  static constexpr auto kRows = &NormArgs::rows;
  static NormArgs of(Address x, Address residual, Address weight, int weight_dtype, Address out, int dtype, int64_t rows,
                     int64_t size, double eps, double scale, int64_t together, int64_t x_stride) {
    return {at<void>(x), at<void>(residual), at<void>(weight), DType(weight_dtype), at<void>(out), DType(dtype), rows, size,
            static_cast<float>(eps), static_cast<float>(scale), together, x_stride};
  }
};

struct GateArgs {
  const void* gate_up;  // [rows, 2 * size], contiguous
  void* out;            // [rows, size]
  int64_t out_stride;
  DType dtype;  // of both
  int64_t rows;
  int64_t size;
  Activation activation;
  const int32_t* starts;  // [groups + 1]: each group's first row, then the end of the last group; null: all rows are computed
  int64_t groups;

  // The rows that are computed. Other rows are not read or written.
  std::pair<int64_t, int64_t> rows_of_groups() const {
    return starts == nullptr ? std::pair{int64_t{0}, rows} : std::pair<int64_t, int64_t>{starts[0], starts[groups]};
  }

  static constexpr auto kRows = &GateArgs::rows;
  static GateArgs of(Address gate_up, Address out, int64_t out_stride, int dtype, int64_t rows, int64_t size, int activation,
                     const Tensor& starts) {
    starts.expect_contiguous(DType::kInt32, "starts");
    return {at<void>(gate_up), at<void>(out), out_stride, DType(dtype), rows, size, Activation(activation),
            starts.count() == 0 ? nullptr : at<int32_t>(starts.address), starts.count() - 1};
  }
};

struct RopeArgs {
  void* q;        // [tokens, num_heads, head_dim]
  const void* k;  // [tokens, num_kv_heads, head_dim]
  const void* v;
  int64_t q_strides[2];  // of tokens and of heads
  int64_t k_strides[2];
  int64_t v_strides[2];
  const float* cos_sin;      // [max_positions, rotary_dim]: cosines, then sines
  const float* query_scale;  // [max_positions]: factors of rotated queries, or null
  const int64_t* positions;
  const int64_t* slot_mapping;
  void* k_cache;  // [num_blocks, num_kv_heads, block_size, head_dim]; see kv_rows.h
  void* v_cache;
  int64_t k_cache_strides[2];  // of blocks and of heads
  int64_t v_cache_strides[2];
  DType kv_dtype;  // that of q, k and v, or int8
  DType dtype;
  int64_t tokens;
  int64_t num_heads;
  int64_t num_kv_heads;
  int64_t head_dim;
  int64_t rotary_dim;  // the number of first dimensions of a head that are rotated
  bool interleaved;    // pairs are dimensions 2 i and 2 i + 1, not one of the first half and one of the second half
  int64_t block_size;

  static constexpr auto kRows = &RopeArgs::tokens;
  static RopeArgs of(Address q, Strides q_strides, Address k, Strides k_strides, Address v, Strides v_strides,
                     Address cos_sin, Address query_scale, Address positions, Address slot_mapping, Address k_cache,
                     Strides k_cache_strides, Address v_cache, Strides v_cache_strides, int kv_dtype, int dtype,
                     int64_t tokens, int64_t num_heads, int64_t num_kv_heads, int64_t head_dim, int64_t rotary_dim,
                     bool interleaved, int64_t block_size) {
    return {at<void>(q), at<void>(k), at<void>(v), {q_strides.first, q_strides.second}, {k_strides.first, k_strides.second},
            {v_strides.first, v_strides.second}, at<float>(cos_sin), at<float>(query_scale), at<int64_t>(positions),
            at<int64_t>(slot_mapping), at<void>(k_cache), at<void>(v_cache),
            {k_cache_strides.first, k_cache_strides.second}, {v_cache_strides.first, v_cache_strides.second},
            DType(kv_dtype), DType(dtype), tokens, num_heads, num_kv_heads, head_dim, rotary_dim, interleaved, block_size};
  }

  bool reads(const StepArgs&, const BatchArgs& batch) const {
    return positions == batch.positions && slot_mapping == batch.slot_mapping;
  }
  void read(const StepArgs&, const BatchArgs& batch) {
    positions = batch.positions;
    slot_mapping = batch.slot_mapping;
  }
};

}  // namespace octavo

#if defined(OCTAVO_ISA)

#include "kv_rows.h"
#include "math.h"

namespace octavo::OCTAVO_ISA {

inline void take_rows(ThreadPool& pool, const TakeArgs& args) {
  parallel_ranges(pool, args.count, divide_up(4 * kLeastElements, args.row_bytes), [&](int64_t first, int64_t last) {
    for (int64_t i = first; i < last; ++i) {
      std::memcpy(static_cast<char*>(args.out) + i * args.row_bytes,
                  static_cast<const char*>(args.x) + args.rows[i] * args.x_stride, static_cast<size_t>(args.row_bytes));
    }
  });
}

// Zhang and Sennrich, "Root Mean Square Layer Normalization" (2019). Lane i sums elements i, i + 16, ... in order.
template <class T, class W>
void norm_row(const T* x, T* residual, const W* weight, T* out, int64_t size, float eps, float factor) {
  Vec squares = splat(0.0f);
  for (int64_t i = 0; i < size; i += kLanes) {
    Vec value = load_first(x + i, size - i);
    if (residual != nullptr) {
      store_first(residual + i, value * splat(factor) + load_first(residual + i, size - i), size - i);
      value = load_first(residual + i, size - i);  // as rounded
    }
    squares = fma(value, value, squares);
  }
  const Vec scale = splat(1.0f / std::sqrt(sum_lanes(squares) / static_cast<float>(size) + eps));
  const T* source = residual != nullptr ? residual : x;
  for (int64_t i = 0; i < size; i += kLanes) {
    const Vec value = load_first(source + i, size - i) * scale;
    store_first(out + i, value * load_first(weight + i, size - i), size - i);
  }
}

template <class T, class W>
void rms_norm_of(ThreadPool& pool, const NormArgs& args) {
  parallel_ranges(pool, args.rows, divide_up(kLeastElements, args.size), [&](int64_t first, int64_t last) {
    for (int64_t row = first; row < last; ++row) {
      const int64_t at = row * args.size;
      T* residual = args.residual == nullptr ? nullptr : static_cast<T*>(args.residual) + at;
      const int64_t x_at = row / args.together * args.x_stride + row % args.together * args.size;
      norm_row(static_cast<const T*>(args.x) + x_at, residual, static_cast<const W*>(args.weight),
               static_cast<T*>(args.out) + at, args.size, args.eps, args.scale);
    }
  });
}

inline void rms_norm(ThreadPool& pool, const NormArgs& args) {
  const bool wide = args.dtype == DType::kFloat32, wide_weight = args.weight_dtype == DType::kFloat32;
  if (wide && wide_weight) {
    rms_norm_of<float, float>(pool, args);
  } else if (wide) {
    rms_norm_of<float, bf16>(pool, args);
  } else if (wide_weight) {
    rms_norm_of<bf16, float>(pool, args);
  } else {
    rms_norm_of<bf16, bf16>(pool, args);
  }
}

template <class T>
void gate_of(ThreadPool& pool, const GateArgs& args) {
  constexpr int kTogether = 4;
  const int64_t size = args.size;
  const Activation activation = args.activation;
  const auto [begin, end] = args.rows_of_groups();
  parallel_ranges(pool, end - begin, divide_up(kLeastElements, size), [&, begin = begin](int64_t first, int64_t last) {
    for (int64_t row = begin + first; row < begin + last; ++row) {
      const T* gate = static_cast<const T*>(args.gate_up) + row * 2 * size;
      const T* up = gate + size;
      T* out = static_cast<T*>(args.out) + row * args.out_stride;
      int64_t i = 0;
      for (; i + kTogether * kLanes <= size; i += kTogether * kLanes) {
        gate_vectors<kTogether>(activation, gate + i, up + i, out + i);
      }
      for (; i + kLanes <= size; i += kLanes) gate_vectors<1>(activation, gate + i, up + i, out + i);
      if (i == size) continue;
      T rest[3][kLanes] = {};
      std::memcpy(static_cast<void*>(rest[0]), gate + i, static_cast<size_t>(size - i) * sizeof(T));
      std::memcpy(static_cast<void*>(rest[1]), up + i, static_cast<size_t>(size - i) * sizeof(T));
      gate_vectors<1>(activation, rest[0], rest[1], rest[2]);
      std::memcpy(static_cast<void*>(out + i), rest[2], static_cast<size_t>(size - i) * sizeof(T));
    }
  });
}

inline void gate(ThreadPool& pool, const GateArgs& args) {
  if (args.dtype == DType::kFloat32) {
    gate_of<float>(pool, args);
  } else {
    gate_of<bf16>(pool, args);
  }
}

// Su et al., "RoFormer" (2021): rotates dimension i with dimension i + rotary_dim / 2. `out` may be `x`.
template <class T>
OCTAVO_INLINE void rotate_halves(const T* x, const float* cos_sin, int64_t rotary_dim, T* out) {
  const int64_t half = rotary_dim / 2;
  for (int64_t i = 0; i < half; i += kLanes) {
    const int64_t n = half - i;
    const Vec cosine = load_first(cos_sin + i, n), sine = load_first(cos_sin + half + i, n);
    const Vec a = load_first(x + i, n), b = load_first(x + half + i, n);
    store_first(out + i, a * cosine - b * sine, n);
    store_first(out + half + i, b * cosine + a * sine, n);
  }
}

// Rotates dimension 2 i with dimension 2 i + 1, by the same sums as rotate_halves. `out` may be `x`.
template <class T>
OCTAVO_INLINE void rotate_pairs(const T* x, const float* cos_sin, int64_t rotary_dim, T* out) {
  const int64_t half = rotary_dim / 2;
  for (int64_t i = 0; i < half; i += kLanes) {
    const int64_t n = smaller(half - i, int64_t{kLanes});
    float pairs[2 * kLanes] = {}, first[kLanes], second[kLanes];
    for (int64_t j = 0; j < 2 * n; j += kLanes) store(pairs + j, load_first(x + 2 * i + j, 2 * n - j));
    for (int64_t j = 0; j < kLanes; ++j) {
      first[j] = pairs[2 * j];
      second[j] = pairs[2 * j + 1];
    }
    const Vec cosine = load_first(cos_sin + i, n), sine = load_first(cos_sin + half + i, n);
    const Vec a = load(first), b = load(second);
    store(first, a * cosine - b * sine);
    store(second, b * cosine + a * sine);
    for (int64_t j = 0; j < kLanes; ++j) {
      pairs[2 * j] = first[j];
      pairs[2 * j + 1] = second[j];
    }
    for (int64_t j = 0; j < 2 * n; j += kLanes) store_first(out + 2 * i + j, load(pairs + j), 2 * n - j);
  }
}

template <class T>
OCTAVO_INLINE void rotate_head(const RopeArgs& args, const T* x, const float* cos_sin, T* out) {
  if (args.interleaved) {
    rotate_pairs(x, cos_sin, args.rotary_dim, out);
  } else {
    rotate_halves(x, cos_sin, args.rotary_dim, out);
  }
}

// Computes a token's q, k and v. The cache has elements of type C. A row of v that is not finite becomes zeros, and its key NaN:
// so rows that see the position become NaN, and rows that do not see it may multiply its values by a weight of zero.
template <class T, class C>
void rope_and_write_token(const RopeArgs& args, int64_t token) {
  const int64_t position = args.positions[token];
  const float* cos_sin = args.cos_sin + position * args.rotary_dim;
  for (int64_t head = 0; head < args.num_heads; ++head) {
    T* q = static_cast<T*>(args.q) + token * args.q_strides[0] + head * args.q_strides[1];
    rotate_head(args, q, cos_sin, q);
    if (args.query_scale == nullptr) continue;
    const Vec scale = splat(args.query_scale[position]);
    for (int64_t d = 0; d < args.head_dim; d += kLanes) {
      store_first(q + d, load_first(q + d, args.head_dim - d) * scale, args.head_dim - d);
    }
  }
  const int64_t block = args.slot_mapping[token] / args.block_size, offset = args.slot_mapping[token] % args.block_size;
  const T* k = static_cast<const T*>(args.k) + token * args.k_strides[0];
  const T* v = static_cast<const T*>(args.v) + token * args.v_strides[0];
  for (int64_t head = 0; head < args.num_kv_heads; ++head) {
    const KVBlock<C> keys(args.k_cache, args.k_cache_strides, block, head, args.block_size, args.head_dim);
    const KVBlock<C> values(args.v_cache, args.v_cache_strides, block, head, args.block_size, args.head_dim);
    T rotated[kMostHeadDim];
    const T* key = k + head * args.k_strides[1];
    rotate_head(args, key, cos_sin, rotated);
    std::memcpy(static_cast<void*>(rotated + args.rotary_dim), key + args.rotary_dim,
                static_cast<size_t>(args.head_dim - args.rotary_dim) * sizeof(T));
    const T* value = v + head * args.v_strides[1];
    if (!is_finite(value, args.head_dim)) {
      for (int64_t d = 0; d < args.head_dim; d += kLanes) store_first(rotated + d, splat(kNaN), args.head_dim - d);
      value = KVRow<T>::zeros().values;
    }
    write_row(keys, offset, rotated);
    write_row(values, offset, value);
  }
}

template <class T, class C>
void rope_and_write_kv_of(ThreadPool& pool, const RopeArgs& args) {
  const int64_t per_token = (args.num_heads + 2 * args.num_kv_heads) * args.head_dim;
  parallel_ranges(pool, args.tokens, divide_up(kLeastElements, per_token), [&](int64_t first, int64_t last) {
    for (int64_t token = first; token < last; ++token) rope_and_write_token<T, C>(args, token);
  });
}

inline void rope_and_write_kv(ThreadPool& pool, const RopeArgs& args) {
  with_kv_types(args.dtype, args.kv_dtype, [&](auto value, auto stored) {
    rope_and_write_kv_of<decltype(value), decltype(stored)>(pool, args);
  });
}

}  // namespace octavo::OCTAVO_ISA

#endif  // OCTAVO_ISA
