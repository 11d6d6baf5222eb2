// Attention over paged KV for a ragged batch.
//
// The KV of a sequence is cut by absolute position into tiles of 64 and partitions of 1024 positions. Within a partition a
// row goes through its tiles in order with an online softmax (Milakov and Gimelshein 2018; Dao et al. 2022); partitions are
// merged in order. Scores sum over head_dim in order, values over positions in order, in float32 (attention_float.h), in pairs
// of bfloat16 (attention_pairs.h) or in tiles of pairs (attention_tiles.h). So a row's result depends only on its own position
// and KV: not on its chunk, on other rows, on the block size, or on the threads.
//
// Sequences that begin with the same blocks go through these together (attention_prefix.h): the blocks are read once for all, and
// each row then continues alone from its state. That state has the same bits as if the row had been alone from the beginning.
#pragma once

#include <type_traits>

#include "attention_args.h"

#if defined(OCTAVO_ISA)

#include "attention_float.h"
#include "attention_pairs.h"
#include "attention_prefix.h"
#include "attention_tiles.h"
#include "attention_weights.h"
#include "math.h"

namespace octavo::OCTAVO_ISA {

template <class Tile>
struct AttentionScratch {
  static constexpr int64_t kScoreRows = Tile::kMostTiles == 1 ? int64_t{Tile::kRows} : Tile::kMostTiles * kChunkRows;

  Tile tile;
  float* scores;  // [kScoreRows][64]: scores, then weights
  float* sums;    // [max_rows][sums_size]: this partition
  float* totals;  // likewise, all partitions so far

  AttentionScratch(const AttentionShape& s, float* memory) : tile(s, memory) {
    scores = memory + Tile::size(s);
    sums = scores + kScoreRows * kTilePositions;
    totals = sums + s.max_rows * s.sums_size;
  }

  static int64_t size(const AttentionShape& s) {
    return Tile::size(s) + kScoreRows * kTilePositions + s.max_rows * 2 * s.sums_size;
  }
};

OCTAVO_INLINE int64_t first_seen(const AttentionArgs& args, int64_t position) {
  return args.window > 0 ? larger(int64_t{0}, position - args.window + 1) : 0;
}

OCTAVO_INLINE SeenRange seen_of_tile(const AttentionArgs& args, int64_t position, int64_t tile) {
  const int64_t begin = smaller(kTilePositions, larger(int64_t{0}, first_seen(args, position) - tile));
  return {begin, larger(begin, smaller(kTilePositions, position + 1 - tile))};
}

// Adds the tile at position `first` to the sums of up to Tile::kRows rows from `row` on. Rows that see none of it do not change.
template <class Tile>
void attend_rows(const AttentionArgs& args, const AttentionShape& s, const AttentionTask& task,
                 AttentionScratch<Tile>& memory, int64_t row, int64_t rows, int64_t first) {
  float *scores = memory.scores, *sums = memory.sums + row * s.sums_size;
  const int64_t* positions = args.positions + task.first_token;
  // If the first and the last row see the whole tile, all rows between do: rows of several sequences see all that these share.
  if (seen_of_tile(args, positions[row / s.group], first).whole() &&
      seen_of_tile(args, positions[(row + rows - 1) / s.group], first).whole()) {
    const SeenRange whole{0, kTilePositions};
    memory.tile.score(row, rows, scores);
    weigh_scores<true>(args, s, memory.tile, rows, &whole, scores, sums, [] {});
    memory.tile.add_all(scores, rows, sums);
    return;
  }
  SeenRange seen[Tile::kRows];
  bool any = false;
  int64_t token = row / s.group, head = row % s.group;
  for (int64_t r = 0; r < rows; ++r) {
    const bool is_first_head = r == 0 || head == 0;  // all heads of a token see the same positions
    seen[r] = is_first_head ? seen_of_tile(args, positions[token], first) : seen[r - 1];
    if (++head == s.group) head = 0, ++token;
    any = any || !seen[r].empty();
  }
  if (!any) return;
  memory.tile.score(row, rows, scores);
  weigh_scores<false>(args, s, memory.tile, rows, seen, scores, sums, [] {});
  memory.tile.add_rows(scores, rows, seen, sums);
}

// Adds the gathered tiles first .. last - 1 to the sums of `rows` rows from `begin` on, at most kChunkRows, which see these tiles
// whole. Values of consecutive tiles are added together, unless a row's sums are rescaled between them. Each row is computed as in
// attend_rows.
template <class Tile>
void attend_whole_tiles(const AttentionArgs& args, const AttentionShape& s, AttentionScratch<Tile>& memory, int64_t begin,
                        int64_t rows, int64_t first, int64_t last) {
  constexpr int64_t kStride = kChunkRows * kTilePositions;  // from a tile's scores to the next one's
  static_assert(kChunkRows % Tile::kRows == 0);
  Tile& tile = memory.tile;
  int64_t first_missing[kChunkRows / Tile::kRows];  // for each part: the first tile whose values are not added yet
  const int64_t parts = divide_up(rows, int64_t{Tile::kRows});
  const auto rows_of = [&](int64_t part) { return smaller(int64_t{Tile::kRows}, rows - part * Tile::kRows); };
  const auto scores_of = [&](int64_t part) { return memory.scores + part * Tile::kRows * kTilePositions; };
  const auto sums_of = [&](int64_t part) { return memory.sums + (begin + part * Tile::kRows) * s.sums_size; };
  const auto add_values = [&](int64_t part, int64_t end) {
    if (first_missing[part] == end) return;
    tile.add_tiles(scores_of(part), kStride, first_missing[part], end, rows_of(part), sums_of(part));
    first_missing[part] = end;
  };
  for (int64_t part = 0; part < parts; ++part) {
    first_missing[part] = first;
    for (int64_t t = first; t < last; ++t) {
      tile.select(t);
      tile.score(begin + part * Tile::kRows, rows_of(part), scores_of(part) + t * kStride);
    }
  }
  const SeenRange whole{0, kTilePositions};
  for (int64_t part = 0; part < parts; ++part) {
    for (int64_t t = first; t < last; ++t) {
      tile.select(t);
      weigh_scores<true>(args, s, tile, rows_of(part), &whole, scores_of(part) + t * kStride, sums_of(part), [&] {
        add_values(part, t);
        tile.select(t);
      });
    }
  }
  for (int64_t part = 0; part < parts; ++part) add_values(part, last);
}

// Adds the gathered tiles, the first of which is at position `first`, to the sums of all rows of a task.
template <class Tile>
void attend_tiles(const AttentionArgs& args, const AttentionShape& s, const AttentionTask& task, AttentionScratch<Tile>& memory,
                  int64_t first, int64_t tiles) {
  const int64_t rows = task.tokens * s.group;
  const int64_t *positions = args.positions + task.first_token, *last_position = positions + task.tokens - 1;
  const auto all_see = [&](int64_t t) {
    const int64_t tile = first + t * kTilePositions;
    return seen_of_tile(args, *positions, tile).whole() && seen_of_tile(args, *last_position, tile).whole();
  };
  for (int64_t t = 0, next; t < tiles; t = next) {
    next = t + 1;
    if constexpr (Tile::kMostTiles > 1) {
      if (memory.tile.tiles_together() > 1 && all_see(t)) {
        while (next < tiles && all_see(next)) ++next;
        for (int64_t row = 0; row < rows; row += kChunkRows) {
          attend_whole_tiles(args, s, memory, row, smaller(kChunkRows, rows - row), t, next);
        }
        continue;
      }
    }
    memory.tile.select(t);
    for (int64_t row = 0; row < rows; row += Tile::kRows) {
      attend_rows(args, s, task, memory, row, smaller(int64_t{Tile::kRows}, rows - row), first + t * kTilePositions);
    }
  }
}

inline void clear_sums(const AttentionShape& s, int64_t rows, float* sums) {
  for (int64_t r = 0; r < rows; ++r) {
    float* row = sums + r * s.sums_size;
    std::memset(row, 0, static_cast<size_t>(s.num_sums) * sizeof(float));
    row[s.num_sums] = kMinusInfinity;
  }
}

// Merges a partition's sums into the totals of the partitions before it. A row that saw no position has the maximum -inf and sums
// of zero; a row that saw only scores of NaN has that maximum, too.
inline void merge_sums(const AttentionShape& s, int64_t rows, const float* sums, float* totals) {
  const int64_t stride = s.sums_size;
  for (int64_t r = 0; r < rows; ++r, sums += stride, totals += stride) {
    const float maximum = larger(totals[s.num_sums], sums[s.num_sums]);
    const float origin = maximum == kMinusInfinity ? 0.0f : maximum;
    const Vec keep = exp(splat(totals[s.num_sums] - origin)), add = exp(splat(sums[s.num_sums] - origin));
    for (int64_t d = 0; d < s.num_sums; d += kLanes) {
      store(totals + d, fma(load(sums + d), add, load(totals + d) * keep));
    }
    totals[s.num_sums] = maximum;
  }
}

// Divides totals by weights and writes them. A sink adds to the weight as a last partition would (Xiao et al. 2024, "Efficient
// Streaming Language Models with Attention Sinks"). Zeros become positive: a zero's sign may come from a product with weight zero
// (attention_tiles.h).
template <class T>
void write_rows(const AttentionArgs& args, const AttentionShape& s, const AttentionTask& task, const float* totals) {
  for (int64_t row = 0; row < task.tokens * s.group; ++row, totals += s.sums_size) {
    const int64_t head = task.head_group * s.group + row % s.group;
    T* out = static_cast<T*>(args.out) + (task.first_token + row / s.group) * args.out_stride + head * s.value_dim;
    Vec weight = splat(sum_lanes(load(totals + s.padded_values))), keep = splat(1.0f);
    if (args.sinks != nullptr) {
      const float sink = args.sinks[head], maximum = larger(totals[s.num_sums], sink);
      keep = exp(splat(totals[s.num_sums] - maximum));
      weight = fma(weight, keep, exp(splat(sink - maximum)));
    }
    for (int64_t d = 0; d < s.value_dim; d += kLanes) {
      store_first(out + d, load(totals + d) * keep / weight + splat(0.0f), s.value_dim - d);
    }
  }
}

struct Positions {
  int64_t first, last;  // `last` is exclusive
};

// The positions of a partition that any of a task's rows sees.
OCTAVO_INLINE Positions seen_of_partition(const AttentionArgs& args, const AttentionTask& task, int64_t partition) {
  const int64_t start = partition * kPartitionPositions, end = smaller(start + kPartitionPositions, task.end);
  return {larger(larger(start, task.begin), first_seen(args, args.positions[task.first_token])),
          smaller(end, args.positions[task.first_token + task.tokens - 1] + 1)};
}

template <class C>
TileRows<C> first_tile_of(const AttentionArgs& args, const AttentionTask& task, int64_t partition) {
  const auto [first, last] = seen_of_partition(args, task, partition);
  return TileRows<C>(args, task, first / kTilePositions * kTilePositions, first, last);
}

// The tile to prefetch during the last tile of a partition: the first of the task's next partition, or of the following task.
template <class C>
TileRows<C> tile_behind(const AttentionArgs& args, const AttentionTask& task, int64_t partition,
                        const AttentionTask* following) {
  if (partition + 1 < task.first_partition + task.partitions && task.partial == nullptr) {
    return first_tile_of<C>(args, task, partition + 1);
  }
  return following == nullptr ? TileRows<C>() : first_tile_of<C>(args, *following, following->first_partition);
}

template <class C, class Tile>
void attend_partition(const AttentionArgs& args, const AttentionShape& s, const AttentionTask& task,
                      const AttentionTask* following, AttentionScratch<Tile>& memory, int64_t partition) {
  const auto [first, last] = seen_of_partition(args, task, partition);
  const int64_t most = memory.tile.tiles_together();
  int64_t tile = first / kTilePositions * kTilePositions;
  TileRows<C> here(args, task, tile, first, last);
  while (tile < last) {
    const int64_t tiles = smaller(most, divide_up(last - tile, kTilePositions));
    const int64_t group = tile;
    for (int64_t t = 0; t < tiles; ++t) {
      tile += kTilePositions;
      const TileRows<C> next = tile < last ? TileRows<C>(args, task, tile, first, last)
                                           : tile_behind<C>(args, task, partition, following);
      memory.tile.select(t);
      memory.tile.gather(here, next);
      here = next;
    }
    attend_tiles(args, s, task, memory, group, tiles);
  }
}

// Computes a task. following: the task that this thread computes next, or null.
template <class T, class C, class Tile>
void attend_task(const AttentionArgs& args, const AttentionShape& s, const AttentionTask& task,
                 const AttentionTask* following, float* scratch) {
  AttentionScratch<Tile> memory(s, scratch);
  const int64_t rows = task.tokens * s.group;
  memory.tile.pack_queries(args, task);
  float* totals = task.totals == nullptr ? memory.totals : task.totals;
  if (task.totals == nullptr) clear_sums(s, rows, totals);
  float* const own_sums = memory.sums;
  for (int64_t i = 0; i < task.partitions; ++i) {
    const int64_t partition = task.first_partition + i;
    const bool is_begun = task.begin > partition * kPartitionPositions;
    const bool is_first = i == 0 && totals == memory.totals && task.partial == nullptr;  // its sums are the totals
    memory.sums = is_begun ? task.sums : is_first ? totals : own_sums;
    if (!is_begun && !is_first) clear_sums(s, rows, memory.sums);
    attend_partition<C>(args, s, task, following, memory, partition);
    if (is_first) continue;
    if (task.partial != nullptr) {
      std::memcpy(task.partial, memory.sums, static_cast<size_t>(rows * s.sums_size) * sizeof(float));
      return;
    }
    merge_sums(s, rows, memory.sums, totals);
  }
  write_rows<T>(args, s, task, totals);
}

// Computes the rows of several sequences over their shared prefix. The state of whole partitions goes to the task's totals, the
// state of the last, unfinished partition to its sums.
template <class C, class Tile>
void attend_prefix(const AttentionArgs& args, const AttentionShape& s, const AttentionTask& task,
                   const AttentionTask* following, float* scratch) {
  AttentionScratch<Tile> memory(s, scratch);
  const int64_t rows = task.tokens * s.group;
  memory.tile.pack_queries(args, task);
  clear_sums(s, rows, task.totals);
  memory.sums = task.sums;
  for (int64_t partition = 0; partition < task.partitions; ++partition) {
    clear_sums(s, rows, memory.sums);
    attend_partition<C>(args, s, task, following, memory, partition);
    if ((partition + 1) * kPartitionPositions <= task.end) merge_sums(s, rows, memory.sums, task.totals);
  }
}

// --- the plan: the tasks ---------------------------------------------------------------------------------------------------

// Calls visit(task) for each chunk of query tokens; later chunks of a sequence, which take longer, come first. Chunks of
// sequences with a shared prefix begin after it.
template <class F>
void for_each_chunk(const AttentionArgs& args, const AttentionShape& s, const SharedPrefixes& prefixes, F&& visit) {
  const int64_t chunk = s.max_rows / s.group;
  auto prefix = prefixes.begin();
  for (int64_t sequence = 0; sequence < args.num_seqs; ++sequence) {
    while (prefix != prefixes.end() && prefix->first_sequence + prefix->sequences <= sequence) ++prefix;
    const bool shares = prefix != prefixes.end() && prefix->first_sequence <= sequence;
    const int64_t begin = args.query_start[sequence], end = args.query_start[sequence + 1];
    for (int64_t i = divide_up(end - begin, chunk) - 1; i >= 0; --i) {
      const int64_t first = begin + i * chunk, tokens = smaller(chunk, end - first);
      const int64_t last_position = args.positions[first + tokens - 1];
      for (int64_t group = 0; group < s.head_groups; ++group) {
        AttentionTask task{sequence, group, group / s.parts, first, tokens, 0, last_position + 1, 0, 0, nullptr, nullptr,
                           nullptr};
        if (shares) prefix->go_on_with(s, task);
        task.first_partition = larger(task.begin, first_seen(args, args.positions[first])) / kPartitionPositions;
        task.partitions = last_position / kPartitionPositions - task.first_partition + 1;
        visit(task);
      }
    }
  }
}

// Queries of type T, KV of type C. With few chunks per thread, each chunk is cut into its partitions, so that one long sequence
// keeps every thread busy. The sums are the same, but they are merged later.
template <class T, class C, class Tile>
void paged_attention_of(ThreadPool& pool, const AttentionArgs& args) {
  const AttentionShape s(args, pool.num_threads());
  SharedPrefixes prefixes = find_shared_prefixes(args, s, pool.num_threads());
  int64_t chunks = 0, partitions = 0, partial_size = 0;
  for_each_chunk(args, s, prefixes, [&](const AttentionTask& task) {
    chunks += 1;
    partitions += task.partitions;
    partial_size += task.partitions * task.tokens * s.group * s.sums_size;
  });
  const bool split = pool.num_threads() > 1 && partitions > chunks && chunks < kFewChunksPerThread * pool.num_threads();
  const int64_t count = split ? partitions : chunks;
  const int64_t num_prefix_tasks = static_cast<int64_t>(prefixes.size()) * s.head_groups;
  int64_t begun_size = 0;
  for (const SharedPrefix& prefix : prefixes) begun_size += prefix.size(s) * s.head_groups;
  const size_t plan_bytes = divide_up(static_cast<size_t>(num_prefix_tasks + count) * sizeof(AttentionTask), size_t{64}) * 64;
  void* memory = pool.shared(plan_bytes + static_cast<size_t>(begun_size + (split ? partial_size : 0)) * sizeof(float));
  auto* prefix_tasks = static_cast<AttentionTask*>(memory);
  auto* tasks = prefix_tasks + num_prefix_tasks;
  auto* begun = reinterpret_cast<float*>(static_cast<char*>(memory) + plan_bytes);
  auto* partial = begun + begun_size;
  int64_t next = 0;
  for (SharedPrefix& prefix : prefixes) {
    prefix.begun = begun;
    begun += prefix.size(s) * s.head_groups;
    for (int64_t group = 0; group < s.head_groups; ++group) prefix_tasks[next++] = prefix.task(s, group);
  }
  next = 0;
  for_each_chunk(args, s, prefixes, [&](AttentionTask task) {
    const int64_t pieces = split ? task.partitions : 1;
    for (int64_t i = 0; i < pieces; ++i) {
      tasks[next] = task;
      if (split) {
        tasks[next].first_partition = task.first_partition + i;
        tasks[next].partial = partial;
        partial += task.tokens * s.group * s.sums_size;
      }
      ++next;
    }
  });
  pool.reserve_local(static_cast<size_t>(AttentionScratch<Tile>::size(s)) * sizeof(float));
  if (num_prefix_tasks > 0) {
    parallel_ahead(pool, num_prefix_tasks, [&](int64_t i, int64_t following, int thread) {
      const AttentionTask* next = following < num_prefix_tasks ? prefix_tasks + following : nullptr;
      attend_prefix<C, Tile>(args, s, prefix_tasks[i], next, static_cast<float*>(pool.local(thread)));
    });
  }
  parallel_ahead(pool, count, [&](int64_t i, int64_t following, int thread) {
    const AttentionTask* next = following < count ? tasks + following : nullptr;
    attend_task<T, C, Tile>(args, s, tasks[i], next, static_cast<float*>(pool.local(thread)));
  });
  if (!split) return;
  for (int64_t i = 0; i < count; i += tasks[i].partitions) {
    const int64_t rows = tasks[i].tokens * s.group;
    float* totals = tasks[i].totals == nullptr ? tasks[i].partial : tasks[i].totals;
    for (int64_t j = tasks[i].totals == nullptr ? 1 : 0; j < tasks[i].partitions; ++j) {
      merge_sums(s, rows, tasks[i + j].partial, totals);
    }
    write_rows<T>(args, s, tasks[i], totals);
  }
}

inline void paged_attention(ThreadPool& pool, const AttentionArgs& args) {
  with_kv_types(args.dtype, args.kv_dtype, [&](auto value, auto stored) {
    using T = decltype(value);
    using C = decltype(stored);
#if defined(OCTAVO_ISA_AMX)
    using Tile = std::conditional_t<std::is_same_v<T, bf16>, TileKV<C>, FloatKV<T, C>>;
#elif defined(OCTAVO_ISA_BF16)
    using Tile = std::conditional_t<std::is_same_v<T, bf16>, PairKV<C>, FloatKV<T, C>>;
#else
    using Tile = FloatKV<T, C>;
#endif
    paged_attention_of<T, C, Tile>(pool, args);
  });
}

}  // namespace octavo::OCTAVO_ISA

#endif  // OCTAVO_ISA
