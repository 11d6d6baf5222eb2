// The gated delta rule (Yang et al., "Gated Delta Networks", arXiv 2412.06464), row by row.
#pragma once

#include "states.h"

namespace octavo {

struct GatedDeltaArgs : StatefulArgs {
  SourceRows qkv;        // [rows, 2 * key_heads * depth + heads * columns]: queries, keys, values
  SourceRows a;          // [rows, heads]
  SourceRows b;          // [rows, heads]
  const float* decay;    // [heads]
  const float* dt_bias;  // [heads]
  MatrixStates states;
  int64_t key_heads;
  bool is_tiled;  // value head h has key head h % key_heads, not h / (heads / key_heads)
  Rows out;       // [rows, heads * columns], of qkv's type
  int64_t rows;
  int64_t kept;

  static constexpr auto kRows = &GatedDeltaArgs::rows;
  static GatedDeltaArgs of(const Tensor& qkv, const Tensor& a, const Tensor& b, const Tensor& kept_qkv, const Tensor& kept_a,
                           const Tensor& kept_b, const Tensor& decay, const Tensor& dt_bias, const Tensor& state,
                           const StateBatchArgs& batch, int64_t key_heads, bool is_tiled, const Tensor& out) {
    const int64_t rows = qkv.size(0), kept = kept_qkv.size(0), heads = a.size(1);
    const MatrixStates states = MatrixStates::of(state, heads);
    decay.expect_contiguous(DType::kFloat32, "decay");
    dt_bias.expect_contiguous(DType::kFloat32, "dt_bias");
    if (key_heads < 1 || heads % key_heads != 0 || decay.count() != heads || dt_bias.count() != heads || out.dtype != qkv.dtype) {
      throw std::invalid_argument("heads, decay, dt_bias, qkv and out do not fit together");
    }
    const int64_t width = heads * states.columns();
    return {{batch}, SourceRows::of(qkv, rows, kept_qkv, kept, 2 * key_heads * states.depth + width, "qkv"),
            SourceRows::of(a, rows, kept_a, kept, heads, "a"), SourceRows::of(b, rows, kept_b, kept, heads, "b"),
            at<float>(decay.address), at<float>(dt_bias.address), states, key_heads, is_tiled, Rows::of(out, rows, width, "out"),
            rows, kept};
  }

  template <class Table>
  void check(const Table&) const {
    batch.check(rows, kept, states.slots);
  }
};

}  // namespace octavo

#if defined(OCTAVO_ISA)

#include <cmath>

namespace octavo::OCTAVO_ISA {

#if defined(OCTAVO_ISA_AVX512)
constexpr int kDeltaTiles = 2;  // of one pass: their sums fit into registers
#else
constexpr int kDeltaTiles = 1;
#endif
constexpr float kLeastSquares = 1e-6f;  // added to the sum of squares of a query or key

// x * scale / |x|. Lane i sums the squares of elements i, i + 16, ... in order.
template <class T>
OCTAVO_INLINE void normalize(const T* x, int64_t size, float scale, float* out) {
  Vec squares = splat(0.0f);
  for (int64_t i = 0; i < size; i += kLanes) {
    const Vec value = load_first(x + i, size - i);
    squares = fma(value, value, squares);
  }
  const Vec factor = splat(scale / std::sqrt(sum_lanes(squares) + kLeastSquares));
  for (int64_t i = 0; i < size; i += kLanes) store(out + i, load_first(x + i, size - i) * factor);
}

template <class T>
void prepare_delta(const GatedDeltaArgs& args, int64_t head, int64_t first, int64_t last, const HeadRows& rows) {
  const int64_t depth = args.states.depth;
  const int64_t key_head = args.is_tiled ? head % args.key_heads : head / (args.states.heads / args.key_heads);
  const float scale = 1.0f / std::sqrt(static_cast<float>(depth));
  for (int64_t row = first; row < last; ++row) {
    const T* query = args.qkv.row<T>(args.batch.sources[row]) + key_head * depth;
    normalize(query, depth, scale, rows.queries + (row - first) * rows.stride);
    normalize(query + args.key_heads * depth, depth, 1.0f, rows.keys + (row - first) * rows.stride);
  }
  read_column(args.a, head, args.batch.sources + first, last - first, rows.decays);
  read_column(args.b, head, args.batch.sources + first, last - first, rows.factors);
  for (int64_t i = 0; i < last - first; i += kLanes) {
    Vec step[1] = {load(rows.decays + i) + splat(args.dt_bias[head])}, beta[1] = {load(rows.factors + i)};
    softplus(step);
    sigmoid(beta);
    store(rows.decays + i, exp(step[0] * splat(args.decay[head])));
    store(rows.factors + i, beta[0]);
  }
}

// sums = S^T key.
template <int N>
OCTAVO_INLINE void multiply_state(const float* state, int64_t depth, const float* key, Vec (&sums)[N]) {
  for (int v = 0; v < N; ++v) sums[v] = splat(0.0f);
  for (int64_t first = 0; first < depth; first += kSumLength) {
    Vec part[N];
    for (int v = 0; v < N; ++v) part[v] = splat(0.0f);
    const int64_t last = smaller(first + kSumLength, depth);
    for (int64_t i = first; i < last; ++i) {
      const Vec k = splat(key[i]);
      OCTAVO_UNROLL
      for (int v = 0; v < N; ++v) part[v] = fma(load(state + (v * depth + i) * kLanes), k, part[v]);
    }
    for (int v = 0; v < N; ++v) sums[v] = sums[v] + part[v];
  }
}

// S = decay * S + key change^T, out = S^T query, and sums = S^T next_key for the next row: one pass over S, which is read from
// `state` and, if kWrites, written to `target`. The pass prefetches as much memory at `following`.
template <bool kWrites, int N>
OCTAVO_INLINE void update_state(const float* state, float* target, int64_t depth, const float* key, const float* query, const float* next_key,
                                const float* following, Vec decay, const Vec (&change)[N], Vec (&out)[N], Vec (&sums)[N]) {
  for (int v = 0; v < N; ++v) out[v] = sums[v] = splat(0.0f);
  for (int64_t first = 0; first < depth; first += kSumLength) {
    Vec out_part[N], sums_part[N];
    for (int v = 0; v < N; ++v) out_part[v] = sums_part[v] = splat(0.0f);
    const int64_t last = smaller(first + kSumLength, depth);
    for (int64_t i = first; i < last; ++i) {
      const Vec k = splat(key[i]), q = splat(query[i]), next = splat(next_key[i]);
      OCTAVO_UNROLL
      for (int v = 0; v < N; ++v) {
        const int64_t at = (v * depth + i) * kLanes;
        __builtin_prefetch(following + at);
        const Vec value = fma(k, change[v], load(state + at) * decay);
        if constexpr (kWrites) store(target + at, value);
        out_part[v] = fma(value, q, out_part[v]);
        sums_part[v] = fma(value, next, sums_part[v]);
      }
    }
    for (int v = 0; v < N; ++v) {
      out[v] = out[v] + out_part[v];
      sums[v] = sums[v] + sums_part[v];
    }
  }
}

template <class T, int N>
void advance_delta(const GatedDeltaArgs& args, const HeadRows& rows, StateTiles& tiles, int64_t first, int64_t last) {
  const int64_t depth = args.states.depth, column = tiles.head * args.states.columns() + tiles.first * kLanes;
  const int64_t values_at = 2 * args.key_heads * depth + column;
  Vec sums[N];
  multiply_state(tiles.values, depth, rows.keys, sums);
  for (int64_t row = first; row < last; ++row) {
    const int64_t i = row - first;
    const int64_t source = args.batch.sources[row];
    const T* values = args.qkv.row<T>(source) + values_at;
    const Vec decay = splat(rows.decays[i]), beta = splat(rows.factors[i]);
    Vec change[N], result[N];
    for (int v = 0; v < N; ++v) change[v] = (load(values + v * kLanes) - decay * sums[v]) * beta;
    const bool is_last = row + 1 == last;
    const float* key = rows.keys + i * rows.stride;
    const float* next_key = is_last ? key : key + rows.stride;
    const float* following = is_last ? tiles.following : tiles.values;
    tiles.update(row, [&](auto writes, const float* state, float* target) {
      update_state<decltype(writes)::value>(state, target, depth, key, rows.queries + i * rows.stride, next_key, following, decay,
                                            change, result, sums);
    });
    if (source >= 0) {
      T* out = args.out.row<T>(source) + column;
      for (int v = 0; v < N; ++v) store(out + v * kLanes, result[v]);
    }
  }
}

inline void gated_delta(ThreadPool& pool, const GatedDeltaArgs& args) {
  with_float_type(args.qkv.step.dtype, [&](auto type) {
    using T = decltype(type);
    advance_states<kDeltaTiles>(
        pool, args.batch, args.states,
        [&](int64_t head, int64_t first, int64_t last, const HeadRows& rows) {
          prepare_delta<T>(args, head, first, last, rows);
        },
        [&](auto count, StateTiles& tiles, int64_t first, int64_t last, const HeadRows& rows) {
          advance_delta<T, decltype(count)::value>(args, rows, tiles, first, last);
        });
  });
}

}  // namespace octavo::OCTAVO_ISA

#endif  // OCTAVO_ISA
