// A small pool of threads for kernels that last from microseconds to seconds.
//
// One kernel runs in a pool at a time. An atomic counter assigns indices to threads, so the assignment is not fixed; kernels
// must not let it change a result. Waiting workers spin for some tens of microseconds, the gap between two kernels of one step,
// and then sleep. After fork() a child starts its own workers at first use.
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
  // cpus: one for each usable core. If there are as many threads, all except the caller's are pinned, each to one of them. Fewer
  // threads are not pinned, because other processes may compute on the same machine.
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

  // Calls body(context, i, following, thread) for 0 <= i < count. The caller is thread 0; the call returns when all are done.
  // following: with claims_ahead the index that this thread computes next, so that the body can prefetch its memory. It is
  // `count` if the next index is not known yet, as for the last indices, which the first idle thread takes.
  // May be called only while a Session is held.
  void run(int64_t count, Body body, void* context, bool claims_ahead);

  // Memory for one kernel, 64-byte aligned, of undefined content: one buffer for all threads (`shared`), and one per thread
  // (`local`). Each is valid until the next call that reserves the same buffer. May be called only while a Session is held;
  // `local` memory must be reserved before `run`.
  void* shared(size_t bytes);
  void reserve_local(size_t bytes);
  void* local(int thread);

  // The pool on which a thread calls a kernel inside `run`. It has only that thread, and memory of its own.
  ThreadPool& alone(int thread);

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
