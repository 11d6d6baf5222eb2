#include "thread_pool.h"

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstdlib>
#include <new>
#include <stdexcept>
#include <thread>
#include <utility>
#include <vector>

#include "pause.h"

#if defined(__unix__) || defined(__APPLE__)
#include <pthread.h>
#define OCTAVO_HAS_FORK 1
#endif
#if defined(__linux__)
#include <sched.h>
#endif

namespace octavo {
namespace {

constexpr auto kSpinTime = std::chrono::microseconds(50);
constexpr int kPausesPerClockRead = 16;

// Pins a thread to one CPU. If the system refuses, nothing changes.
void pin(std::thread& thread, int cpu) {
#if defined(__linux__)
  cpu_set_t set;
  CPU_ZERO(&set);
  if (cpu < 0 || cpu >= CPU_SETSIZE) return;
  CPU_SET(static_cast<size_t>(cpu), &set);
  pthread_setaffinity_np(thread.native_handle(), sizeof(set), &set);
#else
  (void)thread, (void)cpu;
#endif
}

// Counts the forks that led to this process. Threads and locks that were made under another count do not exist in it.
std::atomic<int> fork_generation{0};

void watch_forks() {
#ifdef OCTAVO_HAS_FORK
  static const int registered =
      pthread_atfork(nullptr, nullptr, [] { fork_generation.fetch_add(1, std::memory_order_relaxed); });
  (void)registered;
#endif
}

struct FreeAligned {
  void operator()(void* p) const { std::free(p); }
};

class Buffer {
 public:
  void* reserve(size_t bytes) {
    if (bytes > size_) {
      const size_t rounded = (bytes + 4095) / 4096 * 4096;
      memory_.reset();
      size_ = 0;
      memory_.reset(std::aligned_alloc(64, rounded));
      if (!memory_) throw std::bad_alloc();
      size_ = rounded;
    }
    return memory_.get();
  }
  void* get() const { return memory_.get(); }

 private:
  std::unique_ptr<void, FreeAligned> memory_;
  size_t size_ = 0;
};

}  // namespace

struct ThreadPool::State {
  State(int count, const std::vector<int>& cpus) { start_workers(count, cpus); }

  // Starts all threads except the caller's. Throws `std::system_error` if the system refuses one; then no worker runs.
  void start_workers(int count, const std::vector<int>& cpus) {
    num_threads.store(count);
    local = std::vector<Buffer>(static_cast<size_t>(count));
    alone.resize(static_cast<size_t>(count));
    stopping.store(false);
    const bool is_pinned = cpus.size() == static_cast<size_t>(count);
    try {
      for (int i = 1; i < count; ++i) {
        workers.emplace_back([this, i, last = jobs.load()] { work(i, last); });
        if (is_pinned) pin(workers.back(), cpus[static_cast<size_t>(i)]);
      }
    } catch (...) {
      end_workers();
      num_threads.store(1);  // so that another call with this count tries again
      throw;
    }
  }

  ~State() { end_workers(); }

  void end_workers() {
    {
      std::lock_guard<std::mutex> lock(sleep_mutex);
      stopping.store(true);
    }
    wake.notify_all();
    for (auto& worker : workers) worker.join();
    workers.clear();
  }

  void work(int thread, uint64_t seen) {
    while (wait_for_job(seen)) {
      // Both counters are sequentially consistent: either `run` sees this worker inside and waits for it, or the worker sees
      // that the job is closed and does not touch it. So a short job never waits for a sleeping worker.
      inside.fetch_add(1);
      if (open.load()) take_indices(thread);
      inside.fetch_sub(1);
    }
  }

  bool wait_for_job(uint64_t& seen) {
    const auto spin_end = std::chrono::steady_clock::now() + kSpinTime;
    do {
      for (int i = 0; i < kPausesPerClockRead; ++i) {
        if (jobs.load(std::memory_order_acquire) != seen || stopping.load(std::memory_order_relaxed)) {
          seen = jobs.load(std::memory_order_acquire);
          return !stopping.load();
        }
        pause_briefly();
      }
    } while (std::chrono::steady_clock::now() < spin_end);
    std::unique_lock<std::mutex> lock(sleep_mutex);
    sleepers.fetch_add(1);
    wake.wait(lock, [&] { return jobs.load() != seen || stopping.load(); });
    sleepers.fetch_sub(1);
    seen = jobs.load();
    return !stopping.load();
  }

  void take_indices(int thread) {
    const int64_t first_unclaimed = claims_ahead ? count - num_threads.load(std::memory_order_relaxed) : 0;
    for (int64_t i = next.fetch_add(1); i < count;) {
      const bool claims = i < first_unclaimed;
      const int64_t following = claims ? next.fetch_add(1) : count;
      body(context, i, following < count ? following : count, thread);
      i = claims ? following : next.fetch_add(1);
    }
  }

  void run(int64_t job_count, Body job_body, void* job_context, bool job_claims_ahead) {
    if (job_count <= 1 || workers.empty()) {
      for (int64_t i = 0; i < job_count; ++i) job_body(job_context, i, i + 1, 0);
      return;
    }
    count = job_count;
    body = job_body;
    context = job_context;
    claims_ahead = job_claims_ahead;
    next.store(0);
    open.store(true);
    jobs.fetch_add(1);
    if (sleepers.load() > 0) {
      { std::lock_guard<std::mutex> lock(sleep_mutex); }  // a worker that is about to sleep waits already, or sees the new job
      wake.notify_all();
    }
    take_indices(0);
    open.store(false);
    for (int spins = 0; inside.load() > 0; ++spins) {
      if (spins < 2000) {
        pause_briefly();
      } else {
        std::this_thread::yield();
      }
    }
  }

  std::atomic<int> num_threads{1};  // changes only while `session_mutex` is held
  const int generation = fork_generation.load(std::memory_order_relaxed);
  std::mutex session_mutex;
  std::vector<std::thread> workers;

  // The job: written only while `open` is false and no worker is inside.
  int64_t count = 0;
  Body body = nullptr;
  void* context = nullptr;
  bool claims_ahead = false;

  alignas(64) std::atomic<int64_t> next{0};
  alignas(64) std::atomic<uint64_t> jobs{0};
  alignas(64) std::atomic<int> inside{0};
  std::atomic<bool> open{false};
  std::atomic<bool> stopping{false};
  std::atomic<int> sleepers{0};
  std::mutex sleep_mutex;
  std::condition_variable wake;

  Buffer shared;
  std::vector<Buffer> local;
  std::vector<std::unique_ptr<ThreadPool>> alone;  // each is made by its thread
};

namespace {

int checked_size(int num_threads) {
  if (num_threads < 1) throw std::invalid_argument("num_threads must be at least 1");
  return num_threads;
}

}  // namespace

ThreadPool::ThreadPool(int num_threads, std::vector<int> cpus) : cpus_(std::move(cpus)), state_(nullptr) {
  watch_forks();
  state_ = new State(checked_size(num_threads), cpus_);
}

ThreadPool::~ThreadPool() {
  State* state = state_.load();
  if (state->generation == fork_generation.load()) delete state;  // else its threads live in the parent
}

// The state of this process. A parent's state is not touched or freed: its threads do not exist here, its locks may be held.
ThreadPool::State& ThreadPool::current_state() {
  State* state = state_.load();
  while (state->generation != fork_generation.load(std::memory_order_relaxed)) {
    auto own = std::make_unique<State>(state->num_threads.load(), cpus_);
    if (state_.compare_exchange_strong(state, own.get())) return *own.release();  // else another thread was first
  }
  return *state;
}

int ThreadPool::num_threads() const { return state_.load()->num_threads.load(std::memory_order_relaxed); }

void ThreadPool::set_num_threads(int num_threads) {
  checked_size(num_threads);
  State& state = current_state();
  std::lock_guard<std::mutex> lock(state.session_mutex);
  if (num_threads == state.num_threads.load()) return;
  state.end_workers();
  state.start_workers(num_threads, cpus_);
}

void ThreadPool::shutdown() {
  State& state = current_state();
  std::lock_guard<std::mutex> lock(state.session_mutex);
  state.end_workers();
}

void ThreadPool::run(int64_t count, Body body, void* context, bool claims_ahead) {
  state_.load()->run(count, body, context, claims_ahead);
}

void* ThreadPool::shared(size_t bytes) { return state_.load()->shared.reserve(bytes); }

void ThreadPool::reserve_local(size_t bytes) {
  for (auto& buffer : state_.load()->local) buffer.reserve(bytes);
}

void* ThreadPool::local(int thread) { return state_.load()->local[static_cast<size_t>(thread)].get(); }

ThreadPool& ThreadPool::alone(int thread) {
  std::unique_ptr<ThreadPool>& pool = state_.load()->alone[static_cast<size_t>(thread)];
  if (!pool) pool = std::make_unique<ThreadPool>(1);
  return *pool;
}

ThreadPool::Session::Session(ThreadPool& pool) : lock_(pool.current_state().session_mutex) {}

}  // namespace octavo
