// Recurrent states (octavo.kernels.state_batch): their memory, and their division into tasks.
//
// A state is a matrix for each head. Its columns evolve alone: a task owns columns of one sequence, and passes over the sequence's
// rows in order. So bits depend neither on tasks nor on how a sequence is divided into steps.
#pragma once

#include "arguments.h"

namespace octavo {

constexpr int64_t kStateColumns = 16;  // neighbours in memory: octavo.kernels.state_batch.STATE_COLUMNS

// Rows of the step, and kept rows of the same width and type.
struct SourceRows {
  Rows step;
  Rows kept;

  static SourceRows of(const Tensor& step, int64_t rows, const Tensor& kept, int64_t kept_rows, int64_t columns,
                       const char* name) {
    if (step.dtype != kept.dtype) throw std::invalid_argument(std::string("kept rows have another dtype than ") + name);
    return {Rows::of(step, rows, columns, name), Rows::of(kept, kept_rows, columns, name)};
  }

  // source: as in StateBatchArgs::sources.
  template <class T>
  const T* row(int64_t source) const {
    return source >= 0 ? step.row<T>(source) : kept.row<T>(-1 - source);
  }
};

// A part of the arguments of kernels that advance states.
struct StatefulArgs {
  StateBatchArgs batch;

  static constexpr bool kNeedsAllRows = true;
  bool reads(const StepArgs& step, const BatchArgs&) const { return batch == step.states; }
  void read(const StepArgs& step, const BatchArgs&) { batch = step.states; }
};

// float32 [slots, heads, tiles, depth, 16]: tile t has columns 16 t .. 16 t + 15. A slot is contiguous.
struct MatrixStates {
  float* data;
  int64_t slot_stride;
  int64_t slots;
  int64_t heads;
  int64_t tiles;
  int64_t depth;

  static MatrixStates of(const Tensor& state, int64_t heads) {
    bool fits = state.shape.size() == 5 && state.dtype == DType::kFloat32 && state.shape[1] == heads &&
                state.shape[4] == kStateColumns && state.count() > 0;
    int64_t stride = 1;
    for (size_t i = 5; fits && i-- > 1;) {
      fits = state.shape[i] == 1 || state.strides[i] == stride;
      stride *= state.shape[i];
    }
    if (!fits) throw std::invalid_argument("the state is not float32 [slots, heads, columns / 16, depth, 16]");
    return {at<float>(state.address), state.strides[0], state.shape[0], heads, state.shape[2], state.shape[3]};
  }

  int64_t columns() const { return tiles * kStateColumns; }
  int64_t tile_size() const { return depth * kStateColumns; }
  int64_t head_size() const { return tiles * tile_size(); }
  float* head(int64_t slot, int64_t index) const { return data + slot * slot_stride + index * head_size(); }
};

}  // namespace octavo

#if defined(OCTAVO_ISA)

#include <algorithm>

#include "math.h"
#include "parallel.h"

namespace octavo::OCTAVO_ISA {

constexpr int64_t kStateRows = 64;  // a task prepares the inputs of so many rows, then passes over its columns
constexpr int64_t kSumLength = 32;  // a sum over depth adds this many products in order, then such sums in order

template <class F>
void with_float_type(DType dtype, F&& f) {
  if (dtype == DType::kFloat32) {
    f(float{});
  } else if (dtype == DType::kBFloat16) {
    f(bf16{});
  } else {
    f(f16{});
  }
}

OCTAVO_INLINE void read_one(const float* p, float* out) { *out = *p; }
OCTAVO_INLINE void read_one(const bf16* p, float* out) {
  const uint32_t raw = static_cast<uint32_t>(p->bits) << 16;
  std::memcpy(out, &raw, sizeof(raw));
}
OCTAVO_INLINE void read_one(const f16* p, float* out) { store_first(out, load_first(p, 1), 1); }

// Writes a column of `count` rows to `out`.
inline void read_column(const SourceRows& rows, int64_t column, const int32_t* sources, int64_t count, float* out) {
  with_float_type(rows.step.dtype, [&](auto type) {
    for (int64_t i = 0; i < count; ++i) read_one(rows.row<decltype(type)>(sources[i]) + column, out + i);
  });
}

// Inputs of at most kStateRows rows of one head, in a thread's memory.
struct HeadRows {
  int64_t stride;  // of keys and queries
  float* keys;     // [rows, stride]: S changes by a product of a key and a vector of columns
  float* queries;  // [rows, stride]: S is multiplied by a query
  float* decays;   // [rows]
  float* factors;  // [rows]: sigmoid(b) of the gated delta rule, dt of Mamba-2

  static int64_t stride_of(int64_t depth) { return divide_up(depth, kLanes) * kLanes; }
  static int64_t size(int64_t depth) { return kStateRows * (2 * stride_of(depth) + 2); }
  HeadRows(float* memory, int64_t depth)
      : stride(stride_of(depth)),
        keys(memory),
        queries(keys + kStateRows * stride),
        decays(queries + kStateRows * stride),
        factors(decays + kStateRows) {}
};

// Tiles of one head while a task advances them. A row reads `values` and writes the next state to target(row), which may be the
// same memory. The state before the first row is read in its slot; states that are not in the written one are in `scratch`.
struct StateTiles {
  const StateBatchArgs& batch;
  const MatrixStates& states;
  int64_t head;
  int64_t first;  // the first tile
  int64_t count;
  int64_t uncertain;    // the first state row that is not in the written state
  int64_t stop;         // the end of the sequence's state rows
  float* written;       // [count, depth, 16] in the written slot
  float* scratch;       // [count, depth, 16]
  const float* values = nullptr;     // the state before the next row
  const float* following = nullptr;  // usually the next tiles that are read
  int64_t next_saved = 0;

  int64_t size() const { return count * states.tile_size(); }
  float* in_slot(int64_t slot) const { return states.head(slot, head) + first * states.tile_size(); }
  float* target(int64_t row) const { return row < uncertain ? written : scratch; }
  bool is_saved(int64_t row) const { return next_saved < batch.num_saved && batch.saved_rows[next_saved] == row; }

  // Prepares for state rows from `row` on; is_first: of the sequence.
  void begin(int64_t row, bool is_first, int64_t read_slot) {
    next_saved = std::lower_bound(batch.saved_rows, batch.saved_rows + batch.num_saved, row) - batch.saved_rows;
    values = !is_first ? target(row - 1) : read_slot < 0 ? scratch : in_slot(read_slot);
    following = values + size();
    if (is_first && read_slot < 0) std::memset(scratch, 0, static_cast<size_t>(size()) * sizeof(float));
  }
  // Calls advance(writes, values, target) for a row. writes: std::true_type, or std::false_type if no row needs the next state.
  // Copies the next state to the slots that save it.
  template <class F>
  OCTAVO_INLINE void update(int64_t row, const F& advance) {
    if (row + 1 == stop && row >= uncertain && !is_saved(row)) {
      advance(std::false_type(), values, nullptr);
      return;
    }
    float* next = target(row);
    advance(std::true_type(), values, next);
    values = next;
    for (; is_saved(row); ++next_saved) {
      std::memcpy(in_slot(batch.saved_slots[next_saved]), values, static_cast<size_t>(size()) * sizeof(float));
    }
  }
};

// Copies tiles of a head from one slot to another; read_slot -1: zeros.
inline void copy_tiles(const MatrixStates& states, int64_t head, int64_t first, int64_t last, int64_t read_slot, int64_t write_slot) {
  const auto bytes = static_cast<size_t>((last - first) * states.tile_size()) * sizeof(float);
  float* to = states.head(write_slot, head) + first * states.tile_size();
  if (read_slot < 0) {
    std::memset(to, 0, bytes);
  } else if (read_slot != write_slot) {
    std::memcpy(to, states.head(read_slot, head) + first * states.tile_size(), bytes);
  }
}

// Advances the states of all sequences. prepare(head, first, last, rows) writes the inputs of state rows first .. last - 1 to `rows`.
// advance(count, tiles, first, last, rows) passes over them with `count` tiles: an integral constant, kTiles or 1.
template <int kTiles, class Prepare, class Advance>
void advance_states(ThreadPool& pool, const StateBatchArgs& batch, const MatrixStates& states, const Prepare& prepare,
                    const Advance& advance) {
  const int64_t groups = divide_up(states.tiles, kTiles), heads = batch.num_seqs * states.heads;
  if (heads == 0) return;
  const int64_t parts = smaller(groups, divide_up(4 * pool.num_threads(), heads));  // of a head's columns
  const int64_t memory_size = HeadRows::size(states.depth);
  pool.reserve_local(static_cast<size_t>(memory_size + states.head_size()) * sizeof(float));
  parallel(pool, heads * parts, [&](int64_t index, int thread) {
    const int64_t part = index % parts, head = index / parts % states.heads, sequence = index / parts / states.heads;
    const int64_t begin = groups * part / parts * kTiles, end = smaller(groups * (part + 1) / parts * kTiles, states.tiles);
    const int64_t start = batch.query_start[sequence], stop = batch.query_start[sequence + 1];
    auto* memory = static_cast<float*>(pool.local(thread));
    const HeadRows rows(memory, states.depth);
    const int64_t read_slot = batch.read_slots[sequence], write_slot = batch.write_slots[sequence];
    const int64_t written = write_slot < 0 ? 0 : batch.write_rows[sequence];
    if (write_slot >= 0 && written == 0) copy_tiles(states, head, begin, end, read_slot, write_slot);
    float* scratch = memory + memory_size;
    float* slot = written == 0 ? scratch : states.head(write_slot, head);
    for (int64_t first = start; first < stop; first += kStateRows) {
      const int64_t last = smaller(first + kStateRows, stop);
      prepare(head, first, last, rows);
      for (int64_t tile = begin; tile < end;) {
        const int64_t count = tile + kTiles <= end ? kTiles : 1, at = tile * states.tile_size();
        StateTiles tiles{batch, states, head, tile, count, start + written, stop, slot + at, scratch + at};
        tiles.begin(first, first == start, read_slot);
        if (count == kTiles) {
          advance(std::integral_constant<int, kTiles>(), tiles, first, last, rows);
        } else {
          advance(std::integral_constant<int, 1>(), tiles, first, last, rows);
        }
        tile += count;
      }
    }
  });
}

}  // namespace octavo::OCTAVO_ISA

#endif  // OCTAVO_ISA
