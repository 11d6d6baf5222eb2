// Sequences that begin with the same blocks of the cache: a common system prompt, several answers to one question, turns of
// one conversation. Their rows read these blocks together, once, instead of once for each sequence.
//
// Grouping depends on the block tables alone and does not change a bit of a result: a row goes through the same tiles in the same
// order. Compare cascade inference (Ye et al. 2024), Hydragen (Juravsky et al. 2024) and ChunkAttention (Ye et al. 2024): they
// merge two results, but here a row continues from its state after the prefix.
#pragma once

#include <vector>

#include "attention_tile.h"

namespace octavo::OCTAVO_ISA {

constexpr int64_t kPartitionPositions = 1024;
constexpr int64_t kLeastSharedPositions = 128;  // fewer do not pay for the extra tasks
constexpr int64_t kMostSharingTokens = 8;       // of a sequence: the tokens of longer chunks already share their reads
constexpr int64_t kManyTasksPerThread = 4;      // with so many tasks the threads need not have equally many

// Consecutive sequences, and the number of their first positions that are in the same blocks: whole tiles that all rows see.
struct SharedPrefix {
  int64_t first_sequence, sequences;
  int64_t first_token, tokens;
  int64_t positions;
  float* begun;  // state after the prefix: for each head group the totals of all rows, then their sums; see AttentionTask

  int64_t rows_size(const AttentionShape& s) const { return tokens * s.group * s.sums_size; }
  int64_t size(const AttentionShape& s) const { return 2 * rows_size(s); }

  // The task that computes the rows' state after the prefix.
  AttentionTask task(const AttentionShape& s, int64_t head_group) const {
    float* totals = begun + head_group * size(s);
    const int64_t partitions = divide_up(positions, kPartitionPositions);
    return {first_sequence, head_group, head_group / s.parts, first_token, tokens, 0, positions, 0, partitions, nullptr, totals,
            totals + rows_size(s)};
  }

  // Makes a task of one of the sequences begin after the prefix.
  void go_on_with(const AttentionShape& s, AttentionTask& task) const {
    task.begin = positions;
    if (begun == nullptr) return;  // memory is not allocated yet
    task.totals = begun + task.head_group * size(s) + (task.first_token - first_token) * s.group * s.sums_size;
    task.sums = task.totals + rows_size(s);
  }
};

using SharedPrefixes = std::vector<SharedPrefix>;

// How many of the first `most` positions of two sequences are in the same blocks, in whole tiles.
inline int64_t shared_positions(const AttentionArgs& args, int64_t sequence, int64_t other, int64_t most) {
  const int32_t* left = args.block_tables + sequence * args.block_table_stride;
  const int32_t* right = args.block_tables + other * args.block_table_stride;
  const int64_t blocks = most / args.block_size;
  int64_t same = 0;
  while (same < blocks && left[same] == right[same]) ++same;
  return same * args.block_size / kTilePositions * kTilePositions;
}

// The most tokens of one prefix: limited by the rows of a task, and so that all threads have equal work.
inline int64_t most_tokens_of_prefix(const AttentionShape& s, int64_t tokens, int64_t threads) {
  int64_t pieces = divide_up(tokens, s.max_rows / s.group);
  const auto is_even = [&] {
    const int64_t tasks = pieces * s.head_groups;
    return tasks % threads == 0 || tasks >= kManyTasksPerThread * threads;
  };
  while (!is_even()) ++pieces;
  return divide_up(tokens, pieces);
}

// Prefixes of consecutive sequences, in order. A sequence joins a prefix if that saves more positions than it costs.
inline SharedPrefixes find_shared_prefixes(const AttentionArgs& args, const AttentionShape& s, int64_t threads) {
  SharedPrefixes found;
  if (args.window > 0) return found;  // rows of different sequences begin to see at different positions
  const auto tokens_of = [&](int64_t sequence) -> int64_t {
    return args.query_start[sequence + 1] - args.query_start[sequence];
  };
  const auto first_position = [&](int64_t sequence) { return args.positions[args.query_start[sequence]]; };
  const auto may_share = [&](int64_t sequence) {
    return tokens_of(sequence) > 0 && tokens_of(sequence) <= kMostSharingTokens &&
           first_position(sequence) >= kLeastSharedPositions;
  };
  int64_t tokens = 0;
  for (int64_t i = 0; i < args.num_seqs; ++i) tokens += may_share(i) ? tokens_of(i) : 0;
  if (tokens < 2) return found;
  const int64_t most_tokens = most_tokens_of_prefix(s, tokens, threads);
  for (int64_t first = 0, next = 1; first < args.num_seqs; first = next, ++next) {
    if (!may_share(first)) continue;
    SharedPrefix prefix{first, 1, args.query_start[first], tokens_of(first), first_position(first), nullptr};
    for (; next < args.num_seqs && may_share(next) && prefix.tokens + tokens_of(next) <= most_tokens; ++next) {
      const int64_t positions =
          shared_positions(args, first, next, smaller(prefix.positions, first_position(next)));
      const bool saves_more = prefix.sequences * positions > (prefix.sequences - 1) * prefix.positions;
      if (positions < kLeastSharedPositions || !saves_more) break;
      prefix.positions = positions;
      prefix.sequences += 1;
      prefix.tokens += tokens_of(next);
    }
    if (prefix.sequences > 1) found.push_back(prefix);
  }
  return found;
}

}  // namespace octavo::OCTAVO_ISA
