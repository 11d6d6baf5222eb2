// Loops over the threads of a pool, for kernels.
#pragma once

#include <type_traits>

#include "arguments.h"
#include "thread_pool.h"
#include "vec.h"

namespace octavo::OCTAVO_ISA {

constexpr int64_t kLeastElements = 8192;  // per piece of work: with fewer, a thread costs more time than it saves

// Calls body(index, following, thread) for 0 <= index < count, in any order and on any thread; following: see ThreadPool::run.
template <class F>
OCTAVO_INLINE void run_parallel(ThreadPool& pool, int64_t count, bool claims_ahead, const F& body) {
  auto call = [](void* context, int64_t index, int64_t following, int thread) {
    (*static_cast<const F*>(context))(index, following, thread);
  };
  pool.run(count, call, const_cast<void*>(static_cast<const void*>(&body)), claims_ahead);
}

// The same for tasks that take equally long and read much memory, which they can prefetch for the following task.
template <class F>
OCTAVO_INLINE void parallel_ahead(ThreadPool& pool, int64_t count, const F& body) {
  run_parallel(pool, count, true, body);
}

// Calls body(index, thread) for 0 <= index < count, in any order and on any thread.
template <class F>
OCTAVO_INLINE void parallel(ThreadPool& pool, int64_t count, const F& body) {
  run_parallel(pool, count, false, [&](int64_t index, int64_t, int thread) { body(index, thread); });
}

// Calls body(first, last), or body(first, last, thread), over pieces of [0, count). The pieces are so many that threads of unequal
// speed end together, but none is smaller than `least`.
template <class F>
OCTAVO_INLINE void parallel_ranges(ThreadPool& pool, int64_t count, int64_t least, F&& body) {
  const int64_t wanted = divide_up(count, 4 * static_cast<int64_t>(pool.num_threads()));
  const int64_t size = larger(larger(wanted, least), int64_t{1});
  parallel(pool, divide_up(count, size), [&](int64_t piece, int thread) {
    const int64_t first = piece * size, last = smaller(count, first + size);
    if constexpr (std::is_invocable_v<F, int64_t, int64_t, int>) {
      body(first, last, thread);
    } else {
      body(first, last);
    }
  });
}

}  // namespace octavo::OCTAVO_ISA
