// The latents and queries of multi-head latent attention (DeepSeek-AI, "DeepSeek-V2", 2024, section 2.1).
#pragma once

#include "arguments.h"

namespace octavo {

constexpr int64_t kMostLatentValues = 576;  // of a row of the cache

struct LatentArgs {
  const void* q;       // [tokens, heads, rotary_dim]: the part of a query that is rotated
  int64_t q_strides[2];
  const void* latent;  // [tokens, rank + rotary_dim]: a latent that is not normalized, and a key that is not rotated
  int64_t latent_stride;
  const void* weight;  // [rank], of the norm
  DType weight_dtype;
  float eps;
  const float* cos_sin;  // [max_positions, rotary_dim]: cosines, then sines
  bool interleaved;      // see RopeArgs
  const int64_t* positions;
  const int64_t* slot_mapping;
  void* cache;  // [num_blocks, 1, block_size, rank + rotary_dim]: the normalized latent and the rotated key; see kv_rows.h
  DType kv_dtype;  // that of q, or int8
  int64_t block_stride;
  int64_t block_size;
  void* queries;  // [tokens, heads, rank + rotary_dim]: only the rotated parts are written
  int64_t queries_strides[2];
  DType dtype;  // of q, latent and queries
  int64_t tokens;
  int64_t heads;
  int64_t rank;
  int64_t rotary_dim;

  static constexpr auto kRows = &LatentArgs::tokens;
  static LatentArgs of(const Tensor& q, const Tensor& latent, const Tensor& weight, double eps, const Tensor& cos_sin,
                       bool interleaved, const Tensor& positions, const Tensor& slot_mapping, const Tensor& cache,
                       const Tensor& queries) {
    weight.expect_contiguous(weight.dtype, "weight");
    cos_sin.expect_contiguous(DType::kFloat32, "cos_sin");
    positions.expect_contiguous(DType::kInt64, "positions");
    slot_mapping.expect_contiguous(DType::kInt64, "slot_mapping");
    const bool has_ranks = q.shape.size() == 3 && latent.shape.size() == 2 && weight.shape.size() == 1 &&
                           cos_sin.shape.size() == 2 && cache.shape.size() == 4 && queries.shape.size() == 3;
    if (!has_ranks) throw std::invalid_argument("q, latent, weight, cos_sin, cache or queries has another rank");
    const int64_t tokens = q.shape[0], heads = q.shape[1], rotary_dim = q.shape[2], rank = weight.shape[0];
    const int64_t width = rank + rotary_dim;
    const bool fits = latent.shape == std::vector<int64_t>{tokens, width} && cos_sin.shape[1] == rotary_dim &&
                      queries.shape == std::vector<int64_t>{tokens, heads, width} && cache.shape[1] == 1 &&
                      cache.shape[3] == width && width <= kMostLatentValues && positions.count() == tokens && slot_mapping.count() == tokens;
    const bool has_rows = q.strides[2] == 1 && latent.strides[1] == 1 && queries.strides[2] == 1 &&
                          cache.strides[3] == 1 && cache.strides[2] == width;
    const bool is_one_type = q.dtype == latent.dtype && q.dtype == queries.dtype &&
                             (cache.dtype == q.dtype || cache.dtype == DType::kInt8);
    if (!fits || !has_rows || !is_one_type) throw std::invalid_argument("latents, queries and the cache do not fit together");
    return {at<void>(q.address), {q.strides[0], q.strides[1]}, at<void>(latent.address), latent.strides[0],
            at<void>(weight.address), weight.dtype, static_cast<float>(eps), at<float>(cos_sin.address), interleaved,
            at<int64_t>(positions.address), at<int64_t>(slot_mapping.address), at<void>(cache.address), cache.dtype,
            cache.strides[0], cache.shape[2], at<void>(queries.address), {queries.strides[0], queries.strides[1]}, q.dtype, tokens, heads,
            rank, rotary_dim};
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

#include "elementwise.h"

namespace octavo::OCTAVO_ISA {

template <class T>
OCTAVO_INLINE void rotate(bool interleaved, const T* x, const float* cos_sin, int64_t rotary_dim, T* out) {
  if (interleaved) {
    rotate_pairs(x, cos_sin, rotary_dim, out);
  } else {
    rotate_halves(x, cos_sin, rotary_dim, out);
  }
}

// A latent that is not finite becomes zeros, and its rotated key NaN: so rows that see the position become NaN, and rows that do
// not see it may multiply its latent by a weight of zero.
template <class T, class C, class W>
void rope_and_write_latents_of(ThreadPool& pool, const LatentArgs& args) {
  const int64_t strides[2] = {args.block_stride, 0};
  const int64_t width = args.rank + args.rotary_dim, per_token = width + args.heads * args.rotary_dim;
  parallel_ranges(pool, args.tokens, divide_up(kLeastElements, per_token), [&](int64_t first, int64_t last) {
    for (int64_t token = first; token < last; ++token) {
      const float* cos_sin = args.cos_sin + args.positions[token] * args.rotary_dim;
      const T* q = static_cast<const T*>(args.q) + token * args.q_strides[0];
      T* queries = static_cast<T*>(args.queries) + token * args.queries_strides[0] + args.rank;
      for (int64_t head = 0; head < args.heads; ++head) {
        rotate(args.interleaved, q + head * args.q_strides[1], cos_sin, args.rotary_dim,
               queries + head * args.queries_strides[1]);
      }
      const int64_t slot = args.slot_mapping[token];
      T row[kMostHeadDim];
      T* key = row + args.rank;
      const T* latent = static_cast<const T*>(args.latent) + token * args.latent_stride;
      norm_row<T, W>(latent, nullptr, static_cast<const W*>(args.weight), row, args.rank, args.eps, 1.0f);
      rotate(args.interleaved, latent + args.rank, cos_sin, args.rotary_dim, key);
      if (!is_finite(row, args.rank)) {
        std::memset(static_cast<void*>(row), 0, static_cast<size_t>(args.rank) * sizeof(T));
        for (int64_t d = 0; d < args.rotary_dim; d += kLanes) store_first(key + d, splat(kNaN), args.rotary_dim - d);
      }
      write_row(KVBlock<C>(args.cache, strides, slot / args.block_size, 0, args.block_size, width), slot % args.block_size, row);
    }
  });
}

inline void rope_and_write_latents(ThreadPool& pool, const LatentArgs& args) {
  with_kv_types(args.dtype, args.kv_dtype, [&](auto value, auto stored) {
    if (args.weight_dtype == DType::kFloat32) {
      rope_and_write_latents_of<decltype(value), decltype(stored), float>(pool, args);
    } else {
      rope_and_write_latents_of<decltype(value), decltype(stored), bf16>(pool, args);
    }
  });
}

}  // namespace octavo::OCTAVO_ISA

#endif  // OCTAVO_ISA
