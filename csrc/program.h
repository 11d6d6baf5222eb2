// A forward pass as the list of kernel calls that it made once: run again for other tokens without returning to Python
// between two of them, which costs more than a small kernel does. What a step changes is the number of rows and the arrays
// of its batch; all other addresses (weights, KV cache, buffers between kernels) stay. From the first rows that are taken
// out of others on, calls are of the output rows alone; the step that is recorded must want all of its rows.
#pragma once

#include <chrono>
#include <stdexcept>
#include <type_traits>
#include <utility>
#include <variant>
#include <vector>

#include "kernels.h"

namespace octavo {

// The arrays of octavo.kernels.interface.AttentionBatch.
struct BatchArgs {
  const int64_t* positions;
  const int64_t* slot_mapping;
  const int32_t* query_start;
  const int32_t* block_tables;
  int64_t block_table_stride;
  int64_t num_seqs;
};

// Rows as layers without a window find them in the cache, and as layers with one do.
struct RowsArgs {
  BatchArgs plain, windowed;  // alike where the same tables are of both
};

// A step: its tokens, and those rows of them of which hidden states are wanted (octavo.kernels.interface.OutputRows).
struct StepArgs {
  const int64_t* token_ids;  // [num_tokens], inside the vocabulary
  int64_t num_tokens;
  RowsArgs rows;
  const int64_t* output_rows;  // [num_outputs]
  int64_t num_outputs;
  RowsArgs outputs;
};

class Program {
 public:
  // recorded: the batch that the calls were made with, so that its arrays are known again.
  Program(const KernelTable& table, const StepArgs& recorded) : table_(table), recorded_(recorded) {
    if (recorded.num_outputs != recorded.num_tokens) throw std::invalid_argument("a step of all rows is recorded");
  }

  template <class Args>
  void add(const Args& args) {
    if constexpr (std::is_same_v<Args, TakeArgs>) of_outputs_ = true;
    const int64_t rows = rows_of(args);
    if (rows % recorded_.num_tokens != 0) throw std::invalid_argument("a call's rows are no multiple of the tokens");
    const bool of_windows = check_batch(args);
    calls_.push_back({args, rows / recorded_.num_tokens, of_outputs_, of_windows});
  }

  int64_t vocab_size() const { return vocab_size_; }

  // nanoseconds [calls]: what each call takes is added to it, if it is given.
  void run(ThreadPool& pool, const StepArgs& step, int64_t* nanoseconds) {
    using Clock = std::chrono::steady_clock;
    for (Call& call : calls_) {
      const Clock::time_point begin = nanoseconds == nullptr ? Clock::time_point() : Clock::now();
      const int64_t rows = call.rows_per_token * (call.of_outputs ? step.num_outputs : step.num_tokens);
      const RowsArgs& of_call = call.of_outputs ? step.outputs : step.rows;
      const BatchArgs& batch = call.of_windows ? of_call.windowed : of_call.plain;
      if (rows > 0) std::visit([&](auto& args) { execute(pool, args, rows, step, batch); }, call.args);
      if (nanoseconds != nullptr) *nanoseconds++ += std::chrono::nanoseconds(Clock::now() - begin).count();
    }
  }

 private:
  struct Call {
    std::variant<EmbeddingArgs, TakeArgs, LinearArgs, NormArgs, GateArgs, AddArgs, RopeArgs, AttentionArgs> args;
    int64_t rows_per_token;
    bool of_outputs;
    bool of_windows;
  };

  static int64_t rows_of(const EmbeddingArgs& args) { return args.count; }
  static int64_t rows_of(const TakeArgs& args) { return args.count; }
  static int64_t rows_of(const LinearArgs& args) { return args.rows; }
  static int64_t rows_of(const NormArgs& args) { return args.rows; }
  static int64_t rows_of(const GateArgs& args) { return args.rows; }
  static int64_t rows_of(const AddArgs& args) { return args.rows; }
  static int64_t rows_of(const RopeArgs& args) { return args.tokens; }
  int64_t rows_of(const AttentionArgs&) const { return recorded_.num_tokens; }

  static void expect(bool is_known) {
    if (!is_known) throw std::invalid_argument("a call reads an array that is not the batch's");
  }
  // Each tells whether the call is of a layer whose keys and values stand apart because it has a window.
  bool check_batch(const EmbeddingArgs& args) {
    expect(args.ids == recorded_.token_ids);
    vocab_size_ = args.n;
    return false;
  }
  bool check_batch(const TakeArgs& args) const {
    expect(args.rows == recorded_.output_rows);
    return false;
  }
  bool check_batch(const RopeArgs& args) const {
    return is_of_windows([&](const BatchArgs& batch) {
      return args.positions == batch.positions && args.slot_mapping == batch.slot_mapping;
    });
  }
  bool check_batch(const AttentionArgs& args) const {
    return is_of_windows([&](const BatchArgs& batch) {
      return args.positions == batch.positions && args.query_start == batch.query_start &&
             args.block_tables == batch.block_tables;
    });
  }
  bool check_batch(const LinearArgs&) const { return false; }
  bool check_batch(const NormArgs&) const { return false; }
  bool check_batch(const GateArgs&) const { return false; }
  bool check_batch(const AddArgs&) const { return false; }

  template <class F>
  bool is_of_windows(F&& reads) const {
    const RowsArgs& rows = of_outputs_ ? recorded_.outputs : recorded_.rows;
    if (reads(rows.plain)) return false;
    expect(reads(rows.windowed));
    return true;
  }

  void execute(ThreadPool& pool, EmbeddingArgs& args, int64_t rows, const StepArgs& step, const BatchArgs&) const {
    args.ids = step.token_ids;
    args.count = rows;
    table_.embedding(pool, args);
  }
  void execute(ThreadPool& pool, TakeArgs& args, int64_t rows, const StepArgs& step, const BatchArgs&) const {
    args.rows = step.output_rows;
    args.count = rows;
    table_.take_rows(pool, args);
  }
  void execute(ThreadPool& pool, LinearArgs& args, int64_t rows, const StepArgs&, const BatchArgs&) const {
    args.rows = rows;
    table_.linear(pool, args);
  }
  void execute(ThreadPool& pool, NormArgs& args, int64_t rows, const StepArgs&, const BatchArgs&) const {
    args.rows = rows;
    table_.rms_norm(pool, args);
  }
  void execute(ThreadPool& pool, GateArgs& args, int64_t rows, const StepArgs&, const BatchArgs&) const {
    args.rows = rows;
    table_.gate(pool, args);
  }
  void execute(ThreadPool& pool, AddArgs& args, int64_t rows, const StepArgs&, const BatchArgs&) const {
    args.rows = rows;
    table_.add(pool, args);
  }
  void execute(ThreadPool& pool, RopeArgs& args, int64_t rows, const StepArgs&, const BatchArgs& batch) const {
    args.tokens = rows;
    args.positions = batch.positions;
    args.slot_mapping = batch.slot_mapping;
    table_.rope_and_write_kv(pool, args);
  }
  void execute(ThreadPool& pool, AttentionArgs& args, int64_t, const StepArgs&, const BatchArgs& batch) const {
    args.query_start = batch.query_start;
    args.block_tables = batch.block_tables;
    args.block_table_stride = batch.block_table_stride;
    args.positions = batch.positions;
    args.num_seqs = batch.num_seqs;
    table_.paged_attention(pool, args);
  }

  const KernelTable& table_;
  StepArgs recorded_;
  int64_t vocab_size_ = 0;
  bool of_outputs_ = false;  // what is added now
  std::vector<Call> calls_;
};

}  // namespace octavo
