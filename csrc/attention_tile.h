// The data of attention: rows of queries, and the addresses of the keys and values of a tile.
#pragma once

#include "attention_args.h"
#include "kv_rows.h"
#include "linear.h"

namespace octavo::OCTAVO_ISA {

constexpr int64_t kTilePositions = 64;
constexpr int kTileVectors = kTilePositions / kLanes;
// Query rows that share a gathered tile, least and most: as many as give every thread about kFewChunksPerThread chunks.
#if defined(OCTAVO_ISA_AMX)
constexpr int64_t kLeastChunkRows = 224, kChunkRows = 448;
#else
constexpr int64_t kLeastChunkRows = 168, kChunkRows = 168;
#endif
constexpr int64_t kFewChunksPerThread = 4;
constexpr int64_t kLeastHeadsOfPart = 8;

// Consecutive rows of one head group, of one sequence or of several sequences that share the positions of the task. A row is a
// (token, query head of the group), token-major.
struct AttentionTask {
  int64_t sequence;  // the one that has the blocks
  int64_t head_group;
  int64_t kv_head;
  int64_t first_token;
  int64_t tokens;
  int64_t begin, end;  // positions of the task, `end` exclusive; the rows have already read those before `begin`
  int64_t first_partition;
  int64_t partitions;
  float* partial;         // output of unmerged results, or null: [partitions][rows][sums_size]
  float *totals, *sums;   // state of the rows at `begin`, [rows][sums_size] each, or null if `begin` is 0
};

struct AttentionShape {
  int64_t parts;       // head groups per KV head
  int64_t head_groups;
  int64_t group;       // query heads of a head group: consecutive heads of one KV head
  int64_t dim;         // head_dim
  int64_t padded_dim;  // a multiple of the panel
  int64_t value_dim;
  int64_t padded_values;  // value_dim, likewise
  int64_t num_sums;    // of a row: padded_values sums of values, then the sums of its weights, lane by lane
  int64_t sums_size;   // num_sums and a vector whose first lane is the maximum of the row's scores
  int64_t max_rows;    // of one task

  AttentionShape(const AttentionArgs& args, int64_t threads)
      : parts(parts_of_kv_head(args, threads)),
        head_groups(args.num_kv_heads * parts),
        group(args.num_heads / head_groups),
        dim(args.head_dim),
        padded_dim(divide_up(args.head_dim, kPanelColumns) * kPanelColumns),
        value_dim(args.value_dim),
        padded_values(divide_up(args.value_dim, kPanelColumns) * kPanelColumns),
        num_sums(padded_values + kLanes),
        sums_size(num_sums + kLanes),
        max_rows(larger(int64_t{1}, chunk_rows(args, threads) / group) * group) {}

  // Query heads of one KV head are divided among tasks if a step has fewer tasks than threads. Each task gathers the keys and values
  // again, so it needs several heads that share them.
  static int64_t parts_of_kv_head(const AttentionArgs& args, int64_t threads) {
    const int64_t heads = args.num_heads / args.num_kv_heads;
    if (args.num_seqs * args.num_kv_heads >= threads || heads < 2 * kLeastHeadsOfPart) return 1;
    const int64_t chunk = larger(int64_t{1}, chunk_rows(args, threads) / heads);
    int64_t tasks = 0, parts = 1;
    for (int64_t i = 0; i < args.num_seqs; ++i) {
      tasks += divide_up(args.query_start[i + 1] - args.query_start[i], chunk) * args.num_kv_heads;
    }
    for (int64_t i = 2; tasks * parts < threads && heads / i >= kLeastHeadsOfPart; ++i) {
      if (heads % i == 0) parts = i;
    }
    return parts;
  }

  static int64_t chunk_rows(const AttentionArgs& args, int64_t threads) {
    const int64_t share = args.query_start[args.num_seqs] * args.num_heads / (kFewChunksPerThread * threads);
    return smaller(kChunkRows, larger(kLeastChunkRows, share));
  }
};

template <class T>
OCTAVO_INLINE const T* query_row(const AttentionArgs& args, const AttentionShape& s, const AttentionTask& task, int64_t row) {
  const int64_t head = task.head_group * s.group + row % s.group;
  return static_cast<const T*>(args.q) + (task.first_token + row / s.group) * args.q_strides[0] + head * args.q_strides[1];
}

struct SeenRange {  // positions of a tile that a row sees
  int64_t begin, end;
  bool empty() const { return begin >= end; }
  bool whole() const { return end - begin == kTilePositions; }
};

// The keys and values of one tile in the paged cache of elements C; null pointers outside of first .. last.
template <class C>
struct TileRows {
  KVRow<C> keys[kTilePositions];
  KVRow<C> values[kTilePositions];

  TileRows() = default;  // an empty tile
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

// Adds the values that rows see to their sums. Positions that all rows see are added for all rows together; all other positions
// are added row by row, so that no row multiplies a value that it does not see. Tile::kTogether positions are added at a time.
template <class Tile>
void add_seen_values(const Tile& tile, const float* weights, int64_t rows, const SeenRange* seen, float* sums,
                     int64_t sums_size) {
  SeenRange common{0, kTilePositions};
  for (int64_t r = 0; r < rows; ++r) common = {larger(common.begin, seen[r].begin), smaller(common.end, seen[r].end)};
  common = {divide_up(common.begin, Tile::kTogether) * Tile::kTogether, common.end / Tile::kTogether * Tile::kTogether};
  common.end = larger(common.begin, common.end);
  for (int64_t r = 0; r < rows; ++r) {
    tile.add(weights + r * kTilePositions, 1, seen[r].begin, smaller(common.begin, seen[r].end), sums + r * sums_size);
  }
  tile.add(weights, rows, common.begin, common.end, sums);
  for (int64_t r = 0; r < rows; ++r) {
    tile.add(weights + r * kTilePositions, 1, larger(common.end, seen[r].begin), seen[r].end, sums + r * sums_size);
  }
}

// Prefetches a row into L2: L1 has no room for the next tile in addition to the present one.
template <class C>
OCTAVO_INLINE void prefetch_row(const KVRow<C>& row, int64_t dim) {
  if (row.values == nullptr) return;
  for (int64_t i = 0; i < dim; i += 64 / static_cast<int64_t>(sizeof(C))) prefetch_l2(row.values + i);
}

// The rows of the next tile, prefetched a few at a time during the work on the present tile.
template <class C>
class RowsAhead {
 public:
  RowsAhead() = default;
  RowsAhead(const TileRows<C>& rows, int64_t dim) : rows_(&rows), dim_(dim) {}

  // Prefetches the first of every sixteen rows. In blocks of sixteen tokens the other rows follow it in memory. The processor's
  // own prefetcher recognizes the stream and loads them, more of them at a time than explicit prefetches could.
  OCTAVO_INLINE void begin() const {
    for (int64_t i = 0; i < kTilePositions; i += kBegun) {
      prefetch_row(rows_->keys[i], dim_);
      prefetch_row(rows_->values[i], dim_);
    }
  }

  OCTAVO_INLINE void ask(int64_t count) {
    for (const int64_t end = smaller(next_ + count, 2 * kTilePositions); next_ < end; ++next_) {
      prefetch_row(next_ < kTilePositions ? rows_->keys[next_] : rows_->values[next_ - kTilePositions], dim_);
    }
  }

 private:
  static constexpr int64_t kBegun = 16;

  const TileRows<C>* rows_ = nullptr;
  int64_t dim_ = 0, next_ = 0;
};

}  // namespace octavo::OCTAVO_ISA
