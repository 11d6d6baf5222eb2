// A forward pass as a recorded list of kernel calls. Later steps run the list for other tokens without returning to Python between
// two calls, which would take longer than a small kernel.
//
// A step changes the number of rows and the arrays of its batch. All other addresses (weights, KV cache, buffers between
// kernels) are the same. After the first call that takes output rows, calls are of the output rows alone; the recorded step must
// return all of its rows.
//
// The arguments of a recorded kernel say what changes:
//   kRows          the member that counts rows: a multiple of the step's tokens. Without it a call has one row for each token.
//   reads, read    whether the arrays are those of a step and a KV group; replace them by the arrays of another step
//   kTakesOutputs  true if the kernel takes the output rows out of all rows
//   kNeedsAllRows  true if the kernel must not follow a call that takes output rows
//   check          throws if the arguments of a step must not reach the kernel
#pragma once

#include <chrono>
#include <memory>
#include <type_traits>
#include <utility>

#include "kernels.h"

namespace octavo {

template <class Args, class = void>
struct HasRows : std::false_type {};
template <class Args>
struct HasRows<Args, std::void_t<decltype(Args::kRows)>> : std::true_type {};

template <class Args, class = void>
struct ReadsStep : std::false_type {};
template <class Args>
struct ReadsStep<Args, std::void_t<decltype(&Args::read)>> : std::true_type {};

template <class Args, class = void>
struct TakesOutputs : std::false_type {};
template <class Args>
struct TakesOutputs<Args, std::void_t<decltype(Args::kTakesOutputs)>> : std::true_type {};

template <class Args, class = void>
struct NeedsAllRows : std::false_type {};
template <class Args>
struct NeedsAllRows<Args, std::void_t<decltype(Args::kNeedsAllRows)>> : std::true_type {};

template <class Args, class = void>
struct IsChecked : std::false_type {};
template <class Args>
struct IsChecked<Args, std::void_t<decltype(std::declval<const Args&>().check(std::declval<const KernelTable&>()))>>
    : std::true_type {};

template <class Args>
constexpr bool kIsRecorded = HasRows<Args>::value || ReadsStep<Args>::value;

template <class Args>
void check(const KernelTable& table, const Args& args) {
  if constexpr (IsChecked<Args>::value) args.check(table);
}

class Program {
 public:
  // recorded: the step that the calls were made in.
  Program(const KernelTable& table, StepArgs recorded) : table_(table), recorded_(std::move(recorded)) {
    if (recorded_.num_outputs != recorded_.num_tokens) throw std::invalid_argument("a step of all rows is recorded");
    if (recorded_.groups.empty()) throw std::invalid_argument("a step has at least one KV group");
    check_groups(recorded_);
  }
  Program(Program&&) = default;

  template <class Args>
  void add(Kernel<Args> KernelTable::*kernel, const Args& args) {
    if constexpr (TakesOutputs<Args>::value) of_outputs_ = true;
    if constexpr (NeedsAllRows<Args>::value) {
      if (of_outputs_) throw std::invalid_argument("a call that needs all rows of the step would get output rows");
    }
    int64_t rows = recorded_.num_tokens;
    if constexpr (HasRows<Args>::value) rows = args.*Args::kRows;
    if (rows % recorded_.num_tokens != 0) throw std::invalid_argument("a call's rows are no multiple of the tokens");
    calls_.push_back(std::make_unique<CallOf<Args>>(table_.*kernel, args));
    calls_.back()->rows_per_token = rows / recorded_.num_tokens;
    calls_.back()->of_outputs = of_outputs_;
    calls_.back()->group = group_of(args);
  }

  // nanoseconds [calls]: the time of each call is added to it; may be null.
  void run(ThreadPool& pool, const StepArgs& step, int64_t* nanoseconds) {
    using Clock = std::chrono::steady_clock;
    check_groups(step);
    for (const std::unique_ptr<Call>& call : calls_) {
      const Clock::time_point begin = nanoseconds == nullptr ? Clock::time_point() : Clock::now();
      const int64_t rows = call->rows_per_token * (call->of_outputs ? step.num_outputs : step.num_tokens);
      const BatchArgs& batch = (call->of_outputs ? step.output_groups : step.groups)[call->group];
      if (rows > 0) call->run(table_, pool, rows, step, batch);
      if (nanoseconds != nullptr) *nanoseconds++ += std::chrono::nanoseconds(Clock::now() - begin).count();
    }
  }

 private:
  struct Call {
    int64_t rows_per_token = 1;
    bool of_outputs = false;
    size_t group = 0;  // the KV group whose arrays are read

    virtual ~Call() = default;
    virtual void run(const KernelTable& table, ThreadPool& pool, int64_t rows, const StepArgs& step,
                     const BatchArgs& batch) = 0;
  };

  template <class Args>
  struct CallOf final : Call {
    const Kernel<Args> kernel;
    Args args;

    CallOf(Kernel<Args> kernel_, const Args& args_) : kernel(kernel_), args(args_) {}

    void run(const KernelTable& table, ThreadPool& pool, [[maybe_unused]] int64_t rows,
             [[maybe_unused]] const StepArgs& step, [[maybe_unused]] const BatchArgs& batch) override {
      if constexpr (HasRows<Args>::value) args.*Args::kRows = rows;
      if constexpr (ReadsStep<Args>::value) args.read(step, batch);
      check(table, args);
      kernel(pool, args);
    }
  };

  // The first KV group whose arrays a call reads; 0 if it reads none.
  template <class Args>
  size_t group_of([[maybe_unused]] const Args& args) const {
    if constexpr (ReadsStep<Args>::value) {
      const std::vector<BatchArgs>& groups = of_outputs_ ? recorded_.output_groups : recorded_.groups;
      for (size_t group = 0; group < groups.size(); ++group) {
        if (args.reads(recorded_, groups[group])) return group;
      }
      throw std::invalid_argument("a call reads an array that is not the batch's");
    }
    return 0;
  }

  void check_groups(const StepArgs& step) const {
    if (step.groups.size() != recorded_.groups.size() || step.output_groups.size() != recorded_.groups.size()) {
      throw std::invalid_argument("a step has another number of KV groups than the recorded one");
    }
  }

  const KernelTable& table_;
  StepArgs recorded_;
  bool of_outputs_ = false;  // whether the next added calls are of the output rows
  std::vector<std::unique_ptr<Call>> calls_;
};

}  // namespace octavo
