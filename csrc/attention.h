// Attention over paged KV for a ragged batch.
//
// The KV of a sequence is cut by absolute position into tiles of 64 and partitions of 1024 positions. Within a partition a
// row goes through its tiles in order with an online softmax (Milakov and Gimelshein 2018; Dao et al. 2022); partitions are
// merged in order. Scores sum over head_dim in order, values over positions in order. So a row's result is fixed by its own
// position and KV: not by the chunk it stands in, its neighbours, the block size, or which thread did what.
#pragma once

#include "kv_rows.h"
#include "linear.h"
#include "math.h"

namespace octavo::OCTAVO_ISA {

constexpr int64_t kTilePositions = 64;
constexpr int64_t kPartitionPositions = 1024;
constexpr int64_t kChunkRows = 168;  // query rows that share a tile once it is gathered
constexpr float kMinusInfinity = -__builtin_inff();

constexpr PanelFunctions<1, static_cast<int>(kTilePositions)> kMultiplyWeights;

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

// A thread's working memory.
struct AttentionScratch {
  float* keys;     // [2 panels][padded to 16 dims][32 positions]
  float* values;   // [padded_dim / 32][64][32]
  float* queries;  // per 14 rows: [dim][rows], scaled
  float* scores;   // [max_rows][64]: scores, then weights
  float* sums;     // [max_rows][padded_dim + 2]: this partition; the last two are the maximum and the sum of weights
  float* totals;   // likewise, all partitions so far

  AttentionScratch(const AttentionShape& s, float* memory) {
    keys = memory;
    values = keys + kTilePositions * s.padded_dim;
    queries = values + kTilePositions * s.padded_dim;
    scores = queries + s.max_rows * s.padded_dim;
    sums = scores + s.max_rows * kTilePositions;
    totals = sums + s.max_rows * (s.padded_dim + 2);
  }

  static int64_t size(const AttentionShape& s) {
    return 2 * kTilePositions * s.padded_dim + s.max_rows * (s.padded_dim + kTilePositions + 2 * (s.padded_dim + 2));
  }
};

// First and one past the last position that a token at `position` sees.
OCTAVO_INLINE int64_t first_seen(const AttentionArgs& args, int64_t position) {
  return args.window > 0 ? larger(int64_t{0}, position - args.window + 1) : 0;
}

template <class T>
void pack_queries(const AttentionArgs& args, const AttentionShape& s, const AttentionTask& task, float* packed) {
  const int64_t rows = task.tokens * s.group;
  const Vec scale = splat(args.scale);
  for (int64_t row = 0; row < rows; ++row) {
    const int64_t block = row / kTileRows * kTileRows, width = smaller(int64_t{kTileRows}, rows - block);
    const int64_t head = task.kv_head * s.group + row % s.group;
    const T* q = static_cast<const T*>(args.q) + (task.first_token + row / s.group) * args.q_strides[0] +
                 head * args.q_strides[1];
    float* out = packed + block * s.dim + (row - block);
    for (int64_t i = 0; i < s.dim; i += kLanes) {
      float values[kLanes];
      store(values, load_first(q + i, s.dim - i) * scale);
      const int64_t lanes = smaller(int64_t{kLanes}, s.dim - i);
      for (int64_t j = 0; j < lanes; ++j) out[(i + j) * width] = values[j];
    }
  }
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

// Keys of a tile, transposed to [2][dim][32 positions]; absent ones are zero. Asks for those of the next tile meanwhile.
template <class C>
void gather_keys(const AttentionShape& s, const TileRows<C>& rows, const TileRows<C>& next, float* keys) {
  const KVRow<C> nothing = KVRow<C>::zeros();
  for (int64_t first = 0; first < kTilePositions; first += kLanes) {
    KVRow<C> source[kLanes];
    for (int i = 0; i < kLanes; ++i) {
      prefetch_row(next.keys[first + i], s.dim);
      source[i] = rows.keys[first + i].values == nullptr ? nothing : rows.keys[first + i];
    }
    float* panel = keys + first / kPanelColumns * kPanelColumns * s.padded_dim + first % kPanelColumns;
    for (int64_t d = 0; d < s.dim; d += kLanes) {
      Vec square[kLanes];
      if (s.dim - d >= kLanes) {
        OCTAVO_UNROLL
        for (int i = 0; i < kLanes; ++i) square[i] = source[i].read(d);
      } else {
        for (int i = 0; i < kLanes; ++i) square[i] = source[i].read_first(d, s.dim - d);
      }
      transpose(square);
      OCTAVO_UNROLL
      for (int i = 0; i < kLanes; ++i) store(panel + (d + i) * kPanelColumns, square[i]);
    }
  }
}

// Values of a tile as panels [dim / 32][64 positions][32]; absent ones are left as they are and never multiplied.
template <class C>
void gather_values(const AttentionShape& s, const TileRows<C>& rows, const TileRows<C>& next, float* values) {
  for (int64_t i = 0; i < kTilePositions; ++i) {
    prefetch_row(next.values[i], s.dim);
    if (rows.values[i].values == nullptr) continue;
    float* out = values + i * kPanelColumns;
    for (int64_t d = 0; d < s.padded_dim; d += kLanes) {
      const Vec value = d < s.dim ? rows.values[i].read_first(d, s.dim - d) : splat(0.0f);
      store(out + d / kPanelColumns * kPanelColumns * kTilePositions + d % kPanelColumns, value);
    }
  }
}

struct SeenRange {  // positions of a tile that a row sees
  int64_t begin, end;
  bool empty() const { return begin >= end; }
};

OCTAVO_INLINE SeenRange seen_of_tile(const AttentionArgs& args, int64_t position, int64_t tile) {
  const int64_t begin = smaller(kTilePositions, larger(int64_t{0}, first_seen(args, position) - tile));
  return {begin, larger(begin, smaller(kTilePositions, position + 1 - tile))};
}

constexpr int kTileVectors = kTilePositions / kLanes;

// Which lanes of the tile's vectors a row sees.
OCTAVO_INLINE void seen_lanes(const SeenRange& range, Mask (&seen)[kTileVectors]) {
  const Vec begin = splat(static_cast<float>(range.begin)), end = splat(static_cast<float>(range.end));
  OCTAVO_UNROLL
  for (int i = 0; i < kTileVectors; ++i) {
    const Vec position = to_float(lane_numbers()) + splat(static_cast<float>(i * kLanes));
    seen[i] = both(less_equal(begin, position), less(position, end));
  }
}

// The largest of the running maximum and the scores that a row sees; the others become -inf.
OCTAVO_INLINE float mask_and_find_maximum(const SeenRange& range, float* scores, float maximum) {
  Vec score[kTileVectors];
  OCTAVO_UNROLL
  for (int i = 0; i < kTileVectors; ++i) score[i] = load(scores + i * kLanes);
  if (range.end - range.begin < kTilePositions) {
    Mask seen[kTileVectors];
    seen_lanes(range, seen);
    OCTAVO_UNROLL
    for (int i = 0; i < kTileVectors; ++i) {
      score[i] = select(seen[i], score[i], splat(kMinusInfinity));
      store(scores + i * kLanes, score[i]);
    }
  }
  const Vec largest = max(max(score[0], score[1]), max(score[2], score[3]));
  return larger(maximum, max_lanes(largest));
}

// Turns scores into softmax weights, e^(score - maximum), and returns their sum. e^-inf is 0.
OCTAVO_INLINE float weigh(float* scores, float maximum) {
  Vec weight[kTileVectors];
  OCTAVO_UNROLL
  for (int i = 0; i < kTileVectors; ++i) weight[i] = load(scores + i * kLanes) - splat(maximum);
  exp(weight);
  OCTAVO_UNROLL
  for (int i = 0; i < kTileVectors; ++i) store(scores + i * kLanes, weight[i]);
  return sum_lanes((weight[0] + weight[1]) + (weight[2] + weight[3]));
}

// Scores of up to kTileRows rows become weights, and the sums follow the running maximum. One short loop per stage, so
// that the rows' chains overlap.
inline void weigh_rows(const AttentionShape& s, int64_t rows, const SeenRange* seen, float* scores, float* sums) {
  const int64_t stride = s.padded_dim + 2;
  float before[kLanes] = {}, maximum[kLanes] = {}, factor[kLanes];
  for (int64_t r = 0; r < rows; ++r) {
    if (seen[r].empty()) continue;
    before[r] = sums[r * stride + s.padded_dim];
    maximum[r] = mask_and_find_maximum(seen[r], scores + r * kTilePositions, before[r]);
  }
  store(factor, exp(load(before) - load(maximum)));
  for (int64_t r = 0; r < rows; ++r) {
    if (maximum[r] == before[r]) continue;
    float* row = sums + r * stride;
    for (int64_t d = 0; d < s.padded_dim; d += kLanes) store(row + d, load(row + d) * splat(factor[r]));
    row[s.padded_dim] = maximum[r];
    row[s.padded_dim + 1] *= factor[r];
  }
  for (int64_t r = 0; r < rows; ++r) {
    if (seen[r].empty()) continue;
    sums[r * stride + s.padded_dim + 1] += weigh(scores + r * kTilePositions, maximum[r]);
  }
}

// sums += weights[begin .. end] x values for `rows` rows.
inline void add_values(const AttentionShape& s, const AttentionScratch& memory, int64_t row, int64_t rows, int64_t begin,
                       int64_t end) {
  if (begin >= end) return;
  const int64_t stride = s.padded_dim + 2;
  for (int64_t d = 0; d < s.padded_dim; d += kPanelColumns) {
    kMultiplyWeights.of_rows[rows](memory.scores + row * kTilePositions + begin,
                                   memory.values + d * kTilePositions + begin * kPanelColumns, end - begin,
                                   memory.sums + row * stride + d, stride, false, memory.scores);
  }
}

constexpr int64_t kScoreDepth = 128;  // longest chain of a score: those of wider heads are sums of several

// Scores of one tile for `rows` rows: queries x keys.
inline void score_rows(const AttentionShape& s, const AttentionScratch& memory, int64_t row, int64_t rows) {
  const auto multiply = kMultiplyPacked.of_rows[rows];
  for (int64_t p = 0; p < kTilePositions; p += kPanelColumns) {
    const float* queries = memory.queries + row * s.dim;
    const float* keys = memory.keys + p * s.padded_dim;
    float* scores = memory.scores + row * kTilePositions + p;
    multiply(queries, keys, smaller(kScoreDepth, s.dim), scores, kTilePositions, true, memory.scores);
    for (int64_t d = kScoreDepth; d < s.dim; d += kScoreDepth) {
      float more[kTileRows * kPanelColumns];
      multiply(queries + d * rows, keys + d * kPanelColumns, smaller(kScoreDepth, s.dim - d), more, kPanelColumns, true,
               memory.scores);
      for (int64_t r = 0; r < rows; ++r) {
        for (int64_t i = 0; i < kPanelColumns; i += kLanes) {
          float* score = scores + r * kTilePositions + i;
          store(score, load(score) + load(more + r * kPanelColumns + i));
        }
      }
    }
  }
}

// Takes one tile into the sums of up to kTileRows rows from `row` on. Rows that see none of it are left as they are;
// positions that only some of the rows see are added row by row, so that none multiplies what it may not see.
inline void attend_rows(const AttentionArgs& args, const AttentionShape& s, const AttentionTask& task,
                        const AttentionScratch& memory, int64_t row, int64_t rows, int64_t tile) {
  SeenRange seen[kTileRows], common{0, kTilePositions};
  bool any = false;
  int64_t token = row / s.group, head = row % s.group;
  for (int64_t r = 0; r < rows; ++r) {
    const bool is_first_head = r == 0 || head == 0;  // the other heads of a token see what it sees
    seen[r] = is_first_head ? seen_of_tile(args, args.positions[task.first_token + token], tile) : seen[r - 1];
    if (++head == s.group) head = 0, ++token;
    common = {larger(common.begin, seen[r].begin), smaller(common.end, seen[r].end)};
    any = any || !seen[r].empty();
  }
  if (!any) return;
  score_rows(s, memory, row, rows);
  weigh_rows(s, rows, seen, memory.scores + row * kTilePositions, memory.sums + row * (s.padded_dim + 2));
  common.end = larger(common.begin, common.end);
  for (int64_t r = 0; r < rows; ++r) {
    add_values(s, memory, row + r, 1, seen[r].begin, smaller(common.begin, seen[r].end));
  }
  add_values(s, memory, row, rows, common.begin, common.end);
  for (int64_t r = 0; r < rows; ++r) {
    add_values(s, memory, row + r, 1, larger(common.end, seen[r].begin), seen[r].end);
  }
}

inline void clear_sums(const AttentionShape& s, int64_t rows, float* sums) {
  for (int64_t r = 0; r < rows; ++r) {
    float* row = sums + r * (s.padded_dim + 2);
    std::memset(row, 0, static_cast<size_t>(s.padded_dim) * sizeof(float));
    row[s.padded_dim] = kMinusInfinity;
    row[s.padded_dim + 1] = 0.0f;
  }
}

// Adds a partition's sums to the totals of the partitions before it. Rows that saw nothing are empty (maximum -inf).
inline void merge_sums(const AttentionShape& s, int64_t rows, const float* sums, float* totals) {
  const int64_t stride = s.padded_dim + 2;
  for (int64_t r = 0; r < rows; ++r, sums += stride, totals += stride) {
    if (sums[s.padded_dim] == kMinusInfinity) continue;
    if (totals[s.padded_dim] == kMinusInfinity) {
      std::memcpy(totals, sums, static_cast<size_t>(stride) * sizeof(float));
      continue;
    }
    const float maximum = larger(totals[s.padded_dim], sums[s.padded_dim]);
    const Vec keep = exp(splat(totals[s.padded_dim] - maximum)), add = exp(splat(sums[s.padded_dim] - maximum));
    for (int64_t d = 0; d < s.padded_dim; d += kLanes) {
      store(totals + d, fma(load(sums + d), add, load(totals + d) * keep));
    }
    float weight[kLanes];
    store(weight, fma(splat(sums[s.padded_dim + 1]), add, splat(totals[s.padded_dim + 1]) * keep));
    totals[s.padded_dim] = maximum;
    totals[s.padded_dim + 1] = weight[0];
  }
}

template <class T>
void write_rows(const AttentionArgs& args, const AttentionShape& s, const AttentionTask& task, const float* totals) {
  for (int64_t row = 0; row < task.tokens * s.group; ++row, totals += s.padded_dim + 2) {
    const int64_t head = task.kv_head * s.group + row % s.group;
    T* out = static_cast<T*>(args.out) + ((task.first_token + row / s.group) * args.num_heads + head) * s.dim;
    const Vec weight = splat(totals[s.padded_dim + 1]);
    for (int64_t d = 0; d < s.dim; d += kLanes) store_first(out + d, load(totals + d) / weight, s.dim - d);
  }
}

template <class C>
void attend_partition(const AttentionArgs& args, const AttentionShape& s, const AttentionTask& task,
                      const AttentionScratch& memory, int64_t partition) {
  const int64_t rows = task.tokens * s.group;
  const int64_t start = partition * kPartitionPositions;
  const int64_t first = larger(start, first_seen(args, args.positions[task.first_token]));
  const int64_t last =
      smaller(start + kPartitionPositions, args.positions[task.first_token + task.tokens - 1] + 1);
  const int64_t first_tile = first / kTilePositions * kTilePositions;
  TileRows<C> here(args, task, first_tile, first, last);
  for (int64_t tile = first_tile; tile < last; tile += kTilePositions) {
    const TileRows<C> next(args, task, tile + kTilePositions, first, last);
    gather_keys(s, here, next, memory.keys);
    gather_values(s, here, next, memory.values);
    for (int64_t row = 0; row < rows; row += kTileRows) {
      attend_rows(args, s, task, memory, row, smaller(int64_t{kTileRows}, rows - row), tile);
    }
    here = next;
  }
}

template <class T, class C>
void attend_task(const AttentionArgs& args, const AttentionShape& s, const AttentionTask& task, float* scratch) {
  const AttentionScratch memory(s, scratch);
  const int64_t rows = task.tokens * s.group;
  pack_queries<T>(args, s, task, memory.queries);
  clear_sums(s, rows, memory.totals);
  for (int64_t partition = 0; partition < task.partitions; ++partition) {
    clear_sums(s, rows, memory.sums);
    attend_partition<C>(args, s, task, memory, task.first_partition + partition);
    if (task.partial != nullptr) {
      std::memcpy(task.partial, memory.sums, static_cast<size_t>(rows * (s.padded_dim + 2)) * sizeof(float));
      return;
    }
    merge_sums(s, rows, memory.sums, memory.totals);
  }
  write_rows<T>(args, s, task, memory.totals);
}

// --- the plan: who computes what -----------------------------------------------------------------------------------------

// Calls visit(task) for each chunk of query tokens; later chunks of a sequence, the longer ones, first.
template <class F>
void for_each_chunk(const AttentionArgs& args, const AttentionShape& s, F&& visit) {
  const int64_t chunk = s.max_rows / s.group;
  for (int64_t sequence = 0; sequence < args.num_seqs; ++sequence) {
    const int64_t begin = args.query_start[sequence], end = args.query_start[sequence + 1];
    for (int64_t i = divide_up(end - begin, chunk) - 1; i >= 0; --i) {
      const int64_t first = begin + i * chunk, tokens = smaller(chunk, end - first);
      const int64_t first_partition = first_seen(args, args.positions[first]) / kPartitionPositions;
      const int64_t last_partition = args.positions[first + tokens - 1] / kPartitionPositions;
      for (int64_t head = 0; head < args.num_kv_heads; ++head) {
        visit(AttentionTask{sequence, head, first, tokens, first_partition, last_partition - first_partition + 1, nullptr});
      }
    }
  }
}

// Fewer chunks than this per thread, and those with several partitions are cut into them, so that one long sequence keeps
// every thread busy. The sums are the same, only merged later.
constexpr int64_t kFewChunksPerThread = 4;

template <class T, class C>
void paged_attention_of(ThreadPool& pool, const AttentionArgs& args) {
  const AttentionShape s(args);
  int64_t chunks = 0, partitions = 0, partial_size = 0;
  for_each_chunk(args, s, [&](const AttentionTask& task) {
    chunks += 1;
    partitions += task.partitions;
    partial_size += task.partitions * task.tokens * s.group * (s.padded_dim + 2);
  });
  const bool split = pool.num_threads() > 1 && partitions > chunks && chunks < kFewChunksPerThread * pool.num_threads();
  const int64_t count = split ? partitions : chunks;
  const size_t plan_bytes = static_cast<size_t>(count) * sizeof(AttentionTask);
  void* memory = pool.shared(plan_bytes + (split ? static_cast<size_t>(partial_size) * sizeof(float) : 0));
  auto* tasks = static_cast<AttentionTask*>(memory);
  auto* partial = reinterpret_cast<float*>(static_cast<char*>(memory) + plan_bytes);
  int64_t next = 0;
  for_each_chunk(args, s, [&](AttentionTask task) {
    const int64_t pieces = split ? task.partitions : 1;
    for (int64_t i = 0; i < pieces; ++i) {
      tasks[next] = task;
      if (split) {
        tasks[next].first_partition = task.first_partition + i;
        tasks[next].partial = partial;
        partial += task.tokens * s.group * (s.padded_dim + 2);
      }
      ++next;
    }
  });
  pool.reserve_local(static_cast<size_t>(AttentionScratch::size(s)) * sizeof(float));
  parallel(pool, count, [&](int64_t i, int thread) {
    attend_task<T, C>(args, s, tasks[i], static_cast<float*>(pool.local(thread)));
  });
  if (!split) return;
  for (int64_t i = 0; i < count; i += tasks[i].partitions) {
    const int64_t rows = tasks[i].tokens * s.group;
    float* totals = tasks[i].partial;
    for (int64_t j = 1; j < tasks[i].partitions; ++j) merge_sums(s, rows, tasks[i + j].partial, totals);
    write_rows<T>(args, s, tasks[i], totals);
  }
}

inline void paged_attention(ThreadPool& pool, const AttentionArgs& args) {
  with_kv_types(args.dtype, args.kv_dtype, [&](auto value, auto stored) {
    paged_attention_of<decltype(value), decltype(stored)>(pool, args);
  });
}

}  // namespace octavo::OCTAVO_ISA
