// A small pool of threads for kernels that last from microseconds to seconds.
//
// One kernel runs in a pool at a time. Indices are handed out by an atomic counter, so which thread computes what is not
// fixed; kernels are written so that this never reaches a result. Waiting workers spin for some tens of microseconds, the
// gap between two kernels of one step, and then sleep. After fork() a child starts its own workers at first use.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <mutex>
#include <vector>

namespace octavo {

class ThreadPool {
 public:
  // cpus: one for each core that may be used. If there are as many threads, all but the caller's are pinned to theirs;
  // fewer are left to the system, as others may compute beside them.
  explicit ThreadPool(int num_threads, std::vector<int> cpus = {});
  ~ThreadPool();
  ThreadPool(const ThreadPool&) = delete;
  ThreadPool& operator=(const ThreadPool&) = delete;

  int num_threads() const;

  // Ends the workers and starts as many as are needed; waits for a kernel in flight.
  void set_num_threads(int num_threads);

  // Ends the workers. A later kernel runs on its caller's thread alone.
  void shutdown();

  using Body = void (*)(void* context, int64_t index, int64_t following, int thread);

  // Calls body(context, i, following, thread) for 0 <= i < count; the caller is thread 0 and returns when all are done.
  // following: with claims_ahead the index that this thread takes next, so that it can ask for its memory; count, where it
  // does not know that yet, as for the last indices, which go to the thread that is free.
  // Only while a Session is held.
  void run(int64_t count, Body body, void* context, bool claims_ahead);

  // Memory for one kernel, 64-byte aligned, undefined content, kept until the next call for the same owner.
  // Only while a Session is held; `local` memory must be reserved before `run`.
  void* shared(size_t bytes);
  void reserve_local(size_t bytes);
  void* local(int thread);

  // Holds the pool for one kernel.
  class Session {
   public:
    explicit Session(ThreadPool& pool);

   private:
    std::unique_lock<std::mutex> lock_;
  };

 private:
  struct State;
  State& current_state();

  const std::vector<int> cpus_;
  std::atomic<State*> state_;
};

}  // namespace octavo
