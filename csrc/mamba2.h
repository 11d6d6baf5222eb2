// The state space model of Mamba-2 (Dao and Gu, "Transformers are SSMs", arXiv 2405.21060), row by row.
#pragma once

#include "states.h"

namespace octavo {

struct Mamba2Args : StatefulArgs {
  SourceRows xbc;        // [rows, heads * columns + 2 * groups * depth]: x, B, C
  SourceRows dt;         // [rows, heads]
  const float* dt_bias;  // [heads]
  const float* decay;    // [heads]
  const float* skip;     // [heads]
  float dt_min;
  float dt_max;
  MatrixStates states;
  int64_t groups;  // of heads with the same B and C
  Rows out;        // [rows, heads * columns], of xbc's type
  int64_t rows;
  int64_t kept;

  static constexpr auto kRows = &Mamba2Args::rows;
  static Mamba2Args of(const Tensor& xbc, const Tensor& dt, const Tensor& kept_xbc, const Tensor& kept_dt, const Tensor& dt_bias,
                       const Tensor& decay, const Tensor& skip, double dt_min, double dt_max, const Tensor& state,
                       const StateBatchArgs& batch, int64_t groups, const Tensor& out) {
    const int64_t rows = xbc.size(0), kept = kept_xbc.size(0), heads = dt.size(1);
    const MatrixStates states = MatrixStates::of(state, heads);
    for (const Tensor* each : {&dt_bias, &decay, &skip}) each->expect_contiguous(DType::kFloat32, "dt_bias, decay or skip");
    const bool has_heads = dt_bias.count() == heads && decay.count() == heads && skip.count() == heads;
    if (groups < 1 || heads % groups != 0 || !has_heads || out.dtype != xbc.dtype) {
      throw std::invalid_argument("heads, groups, dt_bias, decay, skip, xbc and out do not fit together");
    }
    const int64_t width = heads * states.columns();
    return {{batch}, SourceRows::of(xbc, rows, kept_xbc, kept, width + 2 * groups * states.depth, "xbc"),
            SourceRows::of(dt, rows, kept_dt, kept, heads, "dt"), at<float>(dt_bias.address), at<float>(decay.address),
            at<float>(skip.address), static_cast<float>(dt_min), static_cast<float>(dt_max), states, groups,
            Rows::of(out, rows, width, "out"), rows, kept};
  }

  template <class Table>
  void check(const Table&) const {
    batch.check(rows, kept, states.slots);
  }
};

}  // namespace octavo

#if defined(OCTAVO_ISA)

namespace octavo::OCTAVO_ISA {

#if defined(OCTAVO_ISA_AVX512)
constexpr int kMambaTiles = 4;  // of one pass: their sums fit into registers
#else
constexpr int kMambaTiles = 2;
#endif

template <class T>
void prepare_mamba(const Mamba2Args& args, int64_t head, int64_t first, int64_t last, const HeadRows& rows) {
  const int64_t depth = args.states.depth, group = head / (args.states.heads / args.groups);
  for (int64_t row = first; row < last; ++row) {
    const T* key = args.xbc.row<T>(args.batch.sources[row]) + args.states.heads * args.states.columns() + group * depth;
    const T* query = key + args.groups * depth;
    const int64_t at = (row - first) * rows.stride;
    for (int64_t i = 0; i < depth; i += kLanes) {
      store(rows.keys + at + i, load_first(key + i, depth - i));
      store(rows.queries + at + i, load_first(query + i, depth - i));
    }
  }
  read_column(args.dt, head, args.batch.sources + first, last - first, rows.factors);
  for (int64_t i = 0; i < last - first; i += kLanes) {
    Vec step[1] = {load(rows.factors + i) + splat(args.dt_bias[head])};
    softplus(step);
    step[0] = max(splat(args.dt_min), min(splat(args.dt_max), step[0]));
    store(rows.factors + i, step[0]);
    store(rows.decays + i, exp(step[0] * splat(args.decay[head])));
  }
}

// S = decay * S + key change^T and out = S^T query: one pass over S, which is read from `state` and, if kWrites, written to
// `target`. The pass prefetches as much memory at `following`.
template <bool kWrites, int N>
OCTAVO_INLINE void update_columns(const float* state, float* target, int64_t depth, const float* key, const float* query,
                                  const float* following, Vec decay, const Vec (&change)[N], Vec (&out)[N]) {
  for (int v = 0; v < N; ++v) out[v] = splat(0.0f);
  for (int64_t first = 0; first < depth; first += kSumLength) {
    Vec part[N];
    for (int v = 0; v < N; ++v) part[v] = splat(0.0f);
    const int64_t last = smaller(first + kSumLength, depth);
    for (int64_t i = first; i < last; ++i) {
      const Vec k = splat(key[i]), q = splat(query[i]);
      OCTAVO_UNROLL
      for (int v = 0; v < N; ++v) {
        const int64_t at = (v * depth + i) * kLanes;
        __builtin_prefetch(following + at);
        const Vec value = fma(k, change[v], load(state + at) * decay);
        if constexpr (kWrites) store(target + at, value);
        part[v] = fma(value, q, part[v]);
      }
    }
    for (int v = 0; v < N; ++v) out[v] = out[v] + part[v];
  }
}

template <class T, int N>
void advance_mamba(const Mamba2Args& args, const HeadRows& rows, StateTiles& tiles, int64_t first, int64_t last) {
  const int64_t depth = args.states.depth, column = tiles.head * args.states.columns() + tiles.first * kLanes;
  const Vec skip = splat(args.skip[tiles.head]);
  for (int64_t row = first; row < last; ++row) {
    const int64_t i = row - first;
    const int64_t source = args.batch.sources[row];
    const T* x = args.xbc.row<T>(source) + column;
    Vec change[N], result[N];
    for (int v = 0; v < N; ++v) change[v] = load(x + v * kLanes) * splat(rows.factors[i]);
    const float* following = row + 1 == last ? tiles.following : tiles.values;
    tiles.update(row, [&](auto writes, const float* state, float* target) {
      update_columns<decltype(writes)::value>(state, target, depth, rows.keys + i * rows.stride, rows.queries + i * rows.stride,
                                              following, splat(rows.decays[i]), change, result);
    });
    if (source >= 0) {
      T* out = args.out.row<T>(source) + column;
      for (int v = 0; v < N; ++v) store(out + v * kLanes, fma(load(x + v * kLanes), skip, result[v]));
    }
  }
}

inline void mamba2(ThreadPool& pool, const Mamba2Args& args) {
  with_float_type(args.xbc.step.dtype, [&](auto type) {
    using T = decltype(type);
    advance_states<kMambaTiles>(
        pool, args.batch, args.states,
        [&](int64_t head, int64_t first, int64_t last, const HeadRows& rows) {
          prepare_mamba<T>(args, head, first, last, rows);
        },
        [&](auto count, StateTiles& tiles, int64_t first, int64_t last, const HeadRows& rows) {
          advance_mamba<T, decltype(count)::value>(args, rows, tiles, first, last);
        });
  });
}

}  // namespace octavo::OCTAVO_ISA

#endif  // OCTAVO_ISA
