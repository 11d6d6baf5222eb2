// A forward pass as the list of kernel calls that it made once: run again for other tokens without returning to Python
// between two of them, which costs more than a small kernel does. What a step changes is the number of rows and the arrays
// of its batch; all other addresses (weights, KV cache, buffers between kernels) stay.
#pragma once

#include <chrono>
#include <stdexcept>
#include <utility>
#include <variant>
#include <vector>

#include "kernels.h"

namespace octavo {

// The arrays of a step's batch (octavo.kernels.interface.AttentionBatch).
struct StepArgs {
  const int64_t* token_ids;  // [num_tokens], inside the vocabulary
  int64_t num_tokens;
  const int64_t* positions;
  const int64_t* slot_mapping;
  const int32_t* query_start;
  const int32_t* block_tables;
  int64_t block_table_stride;
  int64_t num_seqs;
};

class Program {
 public:
  // recorded: the batch that the calls were made with, so that its arrays are known again.
  Program(const KernelTable& table, const StepArgs& recorded) : table_(table), recorded_(recorded) {}

  template <class Args>
  void add(const Args& args) {
    const int64_t rows = rows_of(args);
    if (rows % recorded_.num_tokens != 0) throw std::invalid_argument("a call's rows are no multiple of the tokens");
    check_batch(args);
    calls_.push_back({args, rows / recorded_.num_tokens});
  }

  int64_t vocab_size() const { return vocab_size_; }

  // nanoseconds [calls]: what each call takes is added to it, if it is given.
  void run(ThreadPool& pool, const StepArgs& step, int64_t* nanoseconds) {
    using Clock = std::chrono::steady_clock;
    for (Call& call : calls_) {
      const Clock::time_point begin = nanoseconds == nullptr ? Clock::time_point() : Clock::now();
      const int64_t rows = call.rows_per_token * step.num_tokens;
      std::visit([&](auto& args) { execute(pool, args, rows, step); }, call.args);
      if (nanoseconds != nullptr) *nanoseconds++ += std::chrono::nanoseconds(Clock::now() - begin).count();
    }
  }

 private:
  struct Call {
    std::variant<EmbeddingArgs, LinearArgs, NormArgs, GateArgs, RopeArgs, AttentionArgs> args;
    int64_t rows_per_token;
  };

  static int64_t rows_of(const EmbeddingArgs& args) { return args.count; }
  static int64_t rows_of(const LinearArgs& args) { return args.rows; }
  static int64_t rows_of(const NormArgs& args) { return args.rows; }
  static int64_t rows_of(const GateArgs& args) { return args.rows; }
  static int64_t rows_of(const RopeArgs& args) { return args.tokens; }
  int64_t rows_of(const AttentionArgs&) const { return recorded_.num_tokens; }

  static void expect(bool is_known) {
    if (!is_known) throw std::invalid_argument("a call reads an array that is not the batch's");
  }
  void check_batch(const EmbeddingArgs& args) {
    expect(args.ids == recorded_.token_ids);
    vocab_size_ = args.n;
  }
  void check_batch(const RopeArgs& args) const {
    expect(args.positions == recorded_.positions && args.slot_mapping == recorded_.slot_mapping);
  }
  void check_batch(const AttentionArgs& args) const {
    expect(args.positions == recorded_.positions && args.query_start == recorded_.query_start &&
           args.block_tables == recorded_.block_tables);
  }
  void check_batch(const LinearArgs&) const {}
  void check_batch(const NormArgs&) const {}
  void check_batch(const GateArgs&) const {}

  void execute(ThreadPool& pool, EmbeddingArgs& args, int64_t rows, const StepArgs& step) const {
    args.ids = step.token_ids;
    args.count = rows;
    table_.embedding(pool, args);
  }
  void execute(ThreadPool& pool, LinearArgs& args, int64_t rows, const StepArgs&) const {
    args.rows = rows;
    table_.linear(pool, args);
  }
  void execute(ThreadPool& pool, NormArgs& args, int64_t rows, const StepArgs&) const {
    args.rows = rows;
    table_.rms_norm(pool, args);
  }
  void execute(ThreadPool& pool, GateArgs& args, int64_t rows, const StepArgs&) const {
    args.rows = rows;
    table_.silu_and_mul(pool, args);
  }
  void execute(ThreadPool& pool, RopeArgs& args, int64_t rows, const StepArgs& step) const {
    args.tokens = rows;
    args.positions = step.positions;
    args.slot_mapping = step.slot_mapping;
    table_.rope_and_write_kv(pool, args);
  }
  void execute(ThreadPool& pool, AttentionArgs& args, int64_t, const StepArgs& step) const {
    args.query_start = step.query_start;
    args.block_tables = step.block_tables;
    args.block_table_stride = step.block_table_stride;
    args.positions = step.positions;
    args.num_seqs = step.num_seqs;
    table_.paged_attention(pool, args);
  }

  const KernelTable& table_;
  StepArgs recorded_;
  int64_t vocab_size_ = 0;
  std::vector<Call> calls_;
};

}  // namespace octavo
