// One token per row: argmax of the logits, or of logits / temperature + noise over the tokens that the filters keep.
#pragma once

#include "arguments.h"
#include "ranks.h"

namespace octavo {

struct SampleArgs {
  const float* logits;  // [rows, vocab], contiguous
  int64_t rows;
  int64_t vocab;
  const float* temperature;
  const int32_t* top_k;
  const float* top_p;
  const float* min_p;
  const int64_t* seed;
  const int32_t* sample_index;
  const int32_t* position;
  int64_t* out;  // [rows]

  static SampleArgs of(Address logits, int64_t rows, int64_t vocab, Address temperature, Address top_k, Address top_p,
                       Address min_p, Address seed, Address sample_index, Address position, Address out) {
    return {at<float>(logits), rows, vocab, at<float>(temperature), at<int32_t>(top_k), at<float>(top_p), at<float>(min_p),
            at<int64_t>(seed), at<int32_t>(sample_index), at<int32_t>(position), at<int64_t>(out)};
  }
};

// Chooses among the columns of all ranks. No row may have a filter.
struct SampleColumnsArgs {
  Ranks* ranks;
  SampleArgs own;  // the columns of this rank; out: null if this rank needs no result
  int64_t first;   // the token of its first column, a multiple of 64

  static SampleColumnsArgs of(Address ranks, Address logits, int64_t rows, int64_t columns, int64_t first, Address temperature,
                              Address top_k, Address top_p, Address min_p, Address seed, Address sample_index,
                              Address position, Address out) {
    return {at<Ranks>(ranks),
            SampleArgs::of(logits, rows, columns, temperature, top_k, top_p, min_p, seed, sample_index, position, out), first};
  }
};

struct TopTokensArgs {
  const float* values;  // [rows, vocab], contiguous
  int64_t rows;
  int64_t vocab;
  int64_t k;
  float* out_values;  // [rows, k]
  int64_t* out_ids;   // [rows, k]

  static TopTokensArgs of(Address values, int64_t rows, int64_t vocab, int64_t k, Address out_values, Address out_ids) {
    return {at<float>(values), rows, vocab, k, at<float>(out_values), at<int64_t>(out_ids)};
  }
};

}  // namespace octavo

#if defined(OCTAVO_ISA)

#include "noise.h"
#include "parallel.h"
#include "selection.h"

namespace octavo::OCTAVO_ISA {

constexpr int64_t kPieceTokens = 512 * kNoiseBlock;  // tokens of a row without filters that one thread takes at a time

// The best of some tokens; id is -1 if all are -inf. An argmax is exact for any split of its range.
struct Best {
  float key = -__builtin_inff();
  int64_t id = -1;
  bool nan = false;

  OCTAVO_INLINE void take(const Best& other) {
    if (other.key > key || (other.key == key && other.id >= 0 && (id < 0 || other.id < id))) {
      key = other.key;
      id = other.id;
    }
    nan = nan || other.nan;
  }
};

struct LaneBest {
  Vec key = splat(-__builtin_inff());
  IVec id = splat_int(0xFFFFFFFFu);

  OCTAVO_INLINE void take(Vec other, IVec other_id) {
    const Mask better = less(key, other);  // ids ascend within a lane, so on a tie the lower id stays
    key = select(better, other, key);
    id = select(better, other_id, id);
  }
  OCTAVO_INLINE Best best() const {
    float keys[kLanes];
    int32_t ids[kLanes];
    store(keys, key);
    store_int(ids, id);
    Best result;
    for (int i = 0; i < kLanes; ++i) {
      Best lane;
      lane.key = keys[i];
      lane.id = ids[i];
      result.take(lane);
    }
    return result;
  }
};

// Loads up to 16 logits; lanes past the end are -inf.
OCTAVO_INLINE Vec load_logits(const float* logits, int64_t count) {
  if (count >= kLanes) return load(logits);
  float values[kLanes];
  for (int i = 0; i < kLanes; ++i) values[i] = i < count ? logits[i] : -__builtin_inff();
  return load(values);
}

// The largest of tokens first .. last, and whether one is NaN.
inline Best largest_logit(const float* logits, int64_t first, int64_t last) {
  LaneBest best;
  Mask nan = less(splat(0.0f), splat(0.0f));
  for (int64_t i = first; i < last; i += kLanes) {
    const Vec value = load_logits(logits + i, last - i);
    nan = either(nan, is_nan(value));
    best.take(value, splat_int(static_cast<uint32_t>(i)) + lane_numbers());
  }
  Best result = best.best();
  result.nan = bits(nan) != 0;
  return result;
}

// argmax(logits / temperature + noise) of tokens first .. last that `cut` keeps. `first` is a multiple of 64; `best` is a token
// of the range with its key. Blocks are skipped if the cut drops them, or if even the largest noise could not make them win.
inline Best largest_key(const float* logits, int64_t first, int64_t last, float temperature, const NoiseKey& key,
                        const Cut& cut, const Best& best) {
  const Vec divisor = splat(temperature), nothing = splat(-__builtin_inff());
  LaneBest lanes;
  Vec bound = splat(best.key);
  for (int64_t i = first; i < last; i += kNoiseBlock) {
    Vec value[4];
    Mask hopeful = less(divisor, divisor);
    for (int j = 0; j < 4; ++j) {
      const int64_t at = i + j * kLanes;
      value[j] = at < last ? load_logits(logits + at, last - at) / divisor : nothing;
      const Mask near = less_equal(bound, value[j] + splat(kNoiseBound));
      hopeful = either(hopeful, both(near, less_equal(splat(cut.value), value[j])));
    }
    if (bits(hopeful) == 0) continue;
    Vec noise[4];
    noise_block(key, i / kNoiseBlock, noise);
    for (int j = 0; j < 4; ++j) {
      const IVec ids = splat_int(static_cast<uint32_t>(i + j * kLanes)) + lane_numbers();
      lanes.take(select(kept(cut, value[j], ids), value[j] + noise[j], nothing), ids);
    }
    bound = max(bound, splat(max_lanes(lanes.key)));
  }
  return lanes.best();
}

struct RowParameters {
  const float* logits;  // of token 0
  float temperature;
  Filters filters;
  NoiseKey key;

  RowParameters(const SampleArgs& args, int64_t row, int64_t first_token = 0)
      : logits(args.logits + (row * args.vocab - first_token)),
        temperature(args.temperature[row]),
        filters{args.top_k[row], args.top_p[row], args.min_p[row]},
        key(args.seed[row], args.position[row], args.sample_index[row]) {}

  bool greedy() const { return temperature == 0.0f; }
  bool filtered() const {
    return !greedy() && (filters.top_k > 0 || filters.top_p < 1.0f || filters.min_p > 0.0f);
  }
};

inline Best sample_piece(const RowParameters& row, int64_t first, int64_t last, const Cut& cut) {
  const Best largest = largest_logit(row.logits, first, last);
  if (row.greedy() || largest.nan || largest.id < 0) return largest;
  Best start;  // the largest logit is a good first guess, and every filter keeps it
  float noise;
  gumbel_noise(static_cast<int64_t>(static_cast<uint64_t>(row.key.key[1]) << 32 | row.key.key[0]),
               static_cast<int32_t>(row.key.position), static_cast<int32_t>(row.key.sample_index), largest.id, 1, &noise);
  start.key = largest.key / row.temperature + noise;
  start.id = largest.id;
  return largest_key(row.logits, first, last, row.temperature, row.key, cut, start);
}

// Copies a row, divided by the temperature, to the memory of the filters. NaN becomes -inf.
inline void scale_row(const float* logits, int64_t vocab, float temperature, float* values) {
  for (int64_t i = 0; i < vocab; i += kLanes) {
    const Vec value = load_logits(logits + i, vocab - i) / splat(temperature);
    store(values + i, select(is_nan(value), splat(-__builtin_inff()), value));
  }
}

inline Best sample_filtered(const RowParameters& row, int64_t vocab, void* scratch) {
  const Best largest = largest_logit(row.logits, 0, vocab);
  if (largest.nan || largest.id < 0) return largest;
  const SelectionMemory memory(vocab, scratch);
  scale_row(row.logits, vocab, row.temperature, memory.values);
  const Selection selection(memory, vocab, largest.key / row.temperature, row.temperature);
  return sample_piece(row, 0, vocab, find_cut(selection, row.filters));
}

// The best token of each row, in memory that the next job overwrites. first: the token of the first column; above 0 no row has
// a filter.
inline const Best* best_of_rows(ThreadPool& pool, const SampleArgs& args, int64_t first) {
  bool any_filtered = false;
  for (int64_t row = 0; row < args.rows; ++row) any_filtered = any_filtered || RowParameters(args, row).filtered();
  if (any_filtered) pool.reserve_local(SelectionMemory::bytes(args.vocab));
  const int64_t pieces = divide_up(args.vocab, kPieceTokens);
  auto* best = static_cast<Best*>(pool.shared(static_cast<size_t>(args.rows * pieces) * sizeof(Best)));
  parallel(pool, args.rows * pieces, [&](int64_t task, int thread) {
    const RowParameters row(args, task / pieces, first);
    const int64_t piece = task % pieces;
    if (!row.filtered()) {
      const int64_t last = smaller(args.vocab, (piece + 1) * kPieceTokens);
      best[task] = sample_piece(row, first + piece * kPieceTokens, first + last, kKeepAll);
    } else {  // filters need the whole row
      best[task] = piece == 0 ? sample_filtered(row, args.vocab, pool.local(thread)) : Best();
    }
  });
  for (int64_t row = 0; row < args.rows; ++row) {
    Best result;
    for (int64_t piece = 0; piece < pieces; ++piece) result.take(best[row * pieces + piece]);
    best[row] = result;
  }
  return best;
}

inline int64_t chosen(const Best& best) { return best.nan ? -1 : best.id; }

inline void sample(ThreadPool& pool, const SampleArgs& args) {
  const Best* best = best_of_rows(pool, args, 0);
  for (int64_t row = 0; row < args.rows; ++row) args.out[row] = chosen(best[row]);
}

inline void sample_columns(ThreadPool& pool, const SampleColumnsArgs& args) {
  Ranks& ranks = *args.ranks;
  const Best* own = best_of_rows(pool, args.own, args.first);
  const int64_t row_bytes = ranks.count() * static_cast<int64_t>(sizeof(Best)), at_once = ranks.area_bytes() / row_bytes;
  if (at_once < 1) throw std::invalid_argument("a row is larger than the memory that ranks share");
  for (int64_t row = 0; row < args.own.rows; row += at_once) {
    const int64_t rows = smaller(at_once, args.own.rows - row);
    auto* area = reinterpret_cast<Best*>(ranks.begin(rows * row_bytes));
    std::copy(own + row, own + row + rows, area + ranks.rank() * rows);
    ranks.announce();
    if (args.own.out == nullptr) continue;
    ranks.wait();
    for (int64_t i = 0; i < rows; ++i) {
      Best result;
      for (int rank = 0; rank < ranks.count(); ++rank) result.take(area[rank * rows + i]);
      args.own.out[row + i] = chosen(result);
    }
  }
}

inline void top_tokens_of_row(const float* values, int64_t vocab, int64_t k, void* scratch, float* out_values,
                              int64_t* out_ids) {
  const SelectionMemory memory(vocab, scratch);
  scale_row(values, vocab, 1.0f, memory.values);
  const Selection row(memory, vocab, largest_logit(memory.values, 0, vocab).key, 1.0f);
  const Cut cut = top_k_cut(row, k);
  Token* tokens = memory.tokens;
  int64_t count = 0;
  for (int64_t i = 0; i < vocab; i += kLanes) {
    unsigned here = bits(kept(cut, row.values_at(i), row.ids_at(i)));
    for (; here != 0; here &= here - 1) {
      const int64_t id = i + __builtin_ctz(here);
      if (id < vocab) tokens[count++] = {memory.values[id], static_cast<int32_t>(id)};
    }
  }
  std::sort(tokens, tokens + count, [](const Token& a, const Token& b) { return a.before(b); });
  for (int64_t i = 0; i < k; ++i) {
    out_values[i] = tokens[i].value;
    out_ids[i] = tokens[i].id;
  }
}

inline void top_tokens(ThreadPool& pool, const TopTokensArgs& args) {
  pool.reserve_local(SelectionMemory::bytes(args.vocab));
  parallel(pool, args.rows, [&](int64_t row, int thread) {
    top_tokens_of_row(args.values + row * args.vocab, args.vocab, args.k, pool.local(thread), args.out_values + row * args.k,
                      args.out_ids + row * args.k);
  });
}

}  // namespace octavo::OCTAVO_ISA

#endif  // OCTAVO_ISA
