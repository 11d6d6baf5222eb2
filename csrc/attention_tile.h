// What attention works on: rows of queries, and where the keys and values of a tile stand.
#pragma once

#include "kv_rows.h"
#include "linear.h"

namespace octavo::OCTAVO_ISA {

constexpr int64_t kTilePositions = 64;
constexpr int kTileVectors = kTilePositions / kLanes;
constexpr int64_t kChunkRows = 168;  // query rows that share a tile once it is gathered

// Consecutive rows of one sequence under one KV head. A row is a (token, query head of the group), token-major.
struct AttentionTask {
  int64_t sequence;
  int64_t kv_head;
  int64_t first_token;
  int64_t tokens;
  int64_t first_partition;
  int64_t partitions;
  float* partial;  // where to leave unmerged results, or null: [partitions][rows][padded_dim + 2]
};

struct AttentionShape {
  int64_t group;       // query heads per KV head
  int64_t dim;         // head_dim
  int64_t padded_dim;  // a multiple of the panel
  int64_t max_rows;    // of one task

  explicit AttentionShape(const AttentionArgs& args)
      : group(args.num_heads / args.num_kv_heads),
        dim(args.head_dim),
        padded_dim(divide_up(args.head_dim, kPanelColumns) * kPanelColumns),
        max_rows(larger(int64_t{1}, kChunkRows / group) * group) {}
};

// The query of a task's row.
template <class T>
OCTAVO_INLINE const T* query_row(const AttentionArgs& args, const AttentionShape& s, const AttentionTask& task, int64_t row) {
  const int64_t head = task.kv_head * s.group + row % s.group;
  return static_cast<const T*>(args.q) + (task.first_token + row / s.group) * args.q_strides[0] + head * args.q_strides[1];
}

// Where the keys and values of one tile stand in the paged cache of Cs; nowhere outside of first .. last.
template <class C>
struct TileRows {
  KVRow<C> keys[kTilePositions];
  KVRow<C> values[kTilePositions];

  TileRows(const AttentionArgs& args, const AttentionTask& task, int64_t tile, int64_t first, int64_t last) {
    first = larger(first, tile);
    last = smaller(last, tile + kTilePositions);
    if (first >= last) return;
    const int32_t* table = args.block_tables + task.sequence * args.block_table_stride;
    int64_t entry = first / args.block_size, offset = first % args.block_size;
    for (int64_t position = first; position < last; ++entry, offset = 0) {
      const int64_t block = table[entry];
      const KVBlock<C> key(args.k_cache, args.k_cache_strides, block, task.kv_head, args.block_size, args.head_dim);
      const KVBlock<C> value(args.v_cache, args.v_cache_strides, block, task.kv_head, args.block_size, args.head_dim);
      for (; offset < args.block_size && position < last; ++offset, ++position) {
        keys[position - tile] = key.row(offset);
        values[position - tile] = value.row(offset);
      }
    }
  }
};

template <class C>
OCTAVO_INLINE void prefetch_row(const KVRow<C>& row, int64_t dim) {
  if (row.values == nullptr) return;
  for (int64_t i = 0; i < dim; i += 64 / static_cast<int64_t>(sizeof(C))) __builtin_prefetch(row.values + i);
}

}  // namespace octavo::OCTAVO_ISA
