// What attention works on: rows of queries, and where the keys and values of a tile stand.
#pragma once

#include "attention_args.h"
#include "kv_rows.h"
#include "linear.h"

namespace octavo::OCTAVO_ISA {

constexpr int64_t kTilePositions = 64;
constexpr int kTileVectors = kTilePositions / kLanes;
// Query rows that share a tile once it is gathered: more where there are enough for a few such chunks for every thread.
#if defined(OCTAVO_ISA_AMX)
constexpr int64_t kLeastChunkRows = 224, kChunkRows = 448;
#else
constexpr int64_t kLeastChunkRows = 168, kChunkRows = 168;
#endif
constexpr int64_t kFewChunksPerThread = 4;

// Consecutive rows under one KV head, of one sequence or of several that share the positions the task goes through. A row is
// a (token, query head of the group), token-major.
struct AttentionTask {
  int64_t sequence;  // whose blocks are read
  int64_t kv_head;
  int64_t first_token;
  int64_t tokens;
  int64_t begin, end;  // positions: the rows have been through those before `begin`, and stop before `end`
  int64_t first_partition;
  int64_t partitions;
  float* partial;         // where to leave unmerged results, or null: [partitions][rows][sums_size]
  float *totals, *sums;   // of the rows at `begin`, to be gone on with, [rows][sums_size] each: null where that is 0
};

struct AttentionShape {
  int64_t group;       // query heads per KV head
  int64_t dim;         // head_dim
  int64_t padded_dim;  // a multiple of the panel
  int64_t num_sums;    // of a row: padded_dim sums of values, then those of its weights, lane by lane
  int64_t sums_size;   // the same and a vector that begins with the maximum of its scores
  int64_t max_rows;    // of one task

  AttentionShape(const AttentionArgs& args, int64_t threads)
      : group(args.num_heads / args.num_kv_heads),
        dim(args.head_dim),
        padded_dim(divide_up(args.head_dim, kPanelColumns) * kPanelColumns),
        num_sums(padded_dim + kLanes),
        sums_size(num_sums + kLanes),
        max_rows(larger(int64_t{1}, chunk_rows(args, threads) / group) * group) {}

  static int64_t chunk_rows(const AttentionArgs& args, int64_t threads) {
    const int64_t share = args.query_start[args.num_seqs] * args.num_heads / (kFewChunksPerThread * threads);
    return smaller(kChunkRows, larger(kLeastChunkRows, share));
  }
};

// The query of a task's row.
template <class T>
OCTAVO_INLINE const T* query_row(const AttentionArgs& args, const AttentionShape& s, const AttentionTask& task, int64_t row) {
  const int64_t head = task.kv_head * s.group + row % s.group;
  return static_cast<const T*>(args.q) + (task.first_token + row / s.group) * args.q_strides[0] + head * args.q_strides[1];
}

struct SeenRange {  // positions of a tile that a row sees
  int64_t begin, end;
  bool empty() const { return begin >= end; }
  bool whole() const { return end - begin == kTilePositions; }
};

// Where the keys and values of one tile stand in the paged cache of Cs; nowhere outside of first .. last.
template <class C>
struct TileRows {
  KVRow<C> keys[kTilePositions];
  KVRow<C> values[kTilePositions];

  TileRows() = default;  // of nothing
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

// Adds the values that rows see to their sums: those that all of them see for all together, the others row by row, so that
// none multiplies what it may not see. Tile::kTogether positions are added at a time.
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

// Asks for a row: L1 would have no room for a tile beside the present one.
template <class C>
OCTAVO_INLINE void prefetch_row(const KVRow<C>& row, int64_t dim) {
  if (row.values == nullptr) return;
  for (int64_t i = 0; i < dim; i += 64 / static_cast<int64_t>(sizeof(C))) prefetch_l2(row.values + i);
}

// The rows of the next tile, asked for some at a time beside the work on the present one.
template <class C>
class RowsAhead {
 public:
  RowsAhead() = default;
  RowsAhead(const TileRows<C>& rows, int64_t dim) : rows_(&rows), dim_(dim) {}

  // Asks for the first of every sixteen. In blocks of sixteen the others stand behind it: the processor, which sees where this
  // leads, asks for them by itself, and more of them at once than anybody could by name.
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
