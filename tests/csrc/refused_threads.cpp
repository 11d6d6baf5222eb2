// Sets the number of threads of a pool while the system refuses threads, and again when it allows them.
#include <dlfcn.h>
#include <pthread.h>

#include <atomic>
#include <cerrno>
#include <cstdio>
#include <system_error>

#include "thread_pool.h"

static std::atomic<int> num_given{1000};

// Replaces the C library's function.
extern "C" int pthread_create(pthread_t* thread, const pthread_attr_t* attributes, void* (*start)(void*), void* argument) {
  using Create = int (*)(pthread_t*, const pthread_attr_t*, void* (*)(void*), void*);
  if (num_given.fetch_sub(1) <= 0) return EAGAIN;
  return reinterpret_cast<Create>(dlsym(RTLD_NEXT, "pthread_create"))(thread, attributes, start, argument);
}

// Prints for each step: the outcome, the number of threads, and how many threads the pool requested.
int main() {
  octavo::ThreadPool pool(2);
  for (const int given : {0, 1, 1000}) {
    num_given.store(given);
    try {
      pool.set_num_threads(4);
      std::printf("set ");
    } catch (const std::system_error&) {
      std::printf("refused ");
    }
    std::printf("%d, %d asked for\n", pool.num_threads(), given - num_given.load());
  }
}
