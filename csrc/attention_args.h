// The arguments of attention over paged KV.
#pragma once

#include "arguments.h"

namespace octavo {

struct AttentionArgs {
  const void* q;  // [tokens, num_heads, head_dim]
  int64_t q_strides[2];
  void* k_cache;  // as in RopeArgs (elementwise.h); only read
  void* v_cache;
  int64_t k_cache_strides[2];
  int64_t v_cache_strides[2];
  DType kv_dtype;
  void* out;  // [tokens, num_heads * value_dim]
  int64_t out_stride;
  DType dtype;
  const int32_t* query_start;   // [num_seqs + 1]
  const int32_t* block_tables;  // [num_seqs, block_table_stride]
  int64_t block_table_stride;
  const int64_t* positions;  // [tokens]
  int64_t num_seqs;
  int64_t num_heads;
  int64_t num_kv_heads;
  int64_t head_dim;
  int64_t value_dim;  // at most head_dim: of a row of the value cache, only so many first values are read
  int64_t block_size;
  float scale;
  int64_t window;  // 0: unlimited
  float softcap;   // of scores, or 0: none; see soft_cap
  const float* sinks;  // [num_heads]: the score of a position without a value that every row sees, or null

  static AttentionArgs of(Address q, Strides q_strides, Address k_cache, Strides k_cache_strides, Address v_cache,
                          Strides v_cache_strides, int kv_dtype, Address out, int64_t out_stride, int dtype,
                          Address query_start, Address block_tables, int64_t block_table_stride, Address positions,
                          int64_t num_seqs, int64_t num_heads, int64_t num_kv_heads, int64_t head_dim, int64_t value_dim,
                          int64_t block_size, double scale, int64_t window, double softcap, Address sinks) {
    return {at<void>(q), {q_strides.first, q_strides.second}, at<void>(k_cache), at<void>(v_cache),
            {k_cache_strides.first, k_cache_strides.second}, {v_cache_strides.first, v_cache_strides.second},
            DType(kv_dtype), at<void>(out), out_stride, DType(dtype), at<int32_t>(query_start), at<int32_t>(block_tables),
            block_table_stride, at<int64_t>(positions), num_seqs, num_heads, num_kv_heads, head_dim, value_dim,
            block_size, static_cast<float>(scale), window, static_cast<float>(softcap), at<float>(sinks)};
  }

  bool reads(const StepArgs&, const BatchArgs& batch) const {
    return positions == batch.positions && query_start == batch.query_start && block_tables == batch.block_tables;
  }
  void read(const StepArgs&, const BatchArgs& batch) {
    query_start = batch.query_start;
    block_tables = batch.block_tables;
    block_table_stride = batch.block_table_stride;
    positions = batch.positions;
    num_seqs = batch.num_seqs;
  }
};

}  // namespace octavo
