// Exchanges between the processes that compute one model together, its ranks. They share memory, and exchange in the same order.
//
// Exchanges are numbered from 1. In exchange n a rank waits until all ranks have announced n - 1, writes its part into area n % 2,
// announces n, and, if it needs the result, waits until all ranks have announced n and reads their parts. The area is free again for
// exchange n + 2, because each rank announces n + 1 after it has read the parts of exchange n.
//
// Each rank also announces the size of the result. If sizes differ, the ranks compute different steps, and all of them fail.
#pragma once

#include <atomic>
#include <chrono>
#include <cstdint>
#include <cstring>
#include <stdexcept>
#include <string>
#include <thread>

#include "arguments.h"
#include "pause.h"

namespace octavo {

constexpr int kMaxRanks = 64;
constexpr int64_t kRanksHeaderBytes = (kMaxRanks + 1) * 64;

class Ranks {
 public:
  // memory: shared by the ranks, zero at first: a header, and two areas. timeout_ms: how long to wait for the slowest rank.
  Ranks(Address memory, int64_t bytes, int rank, int count, int64_t timeout_ms)
      : lines_(at<Line>(memory)),
        areas_(at<uint8_t>(memory) + kRanksHeaderBytes),
        area_bytes_((bytes - kRanksHeaderBytes) / 2 / 64 * 64),
        rank_(rank),
        count_(count),
        timeout_(timeout_ms) {
    if (count < 1 || count > kMaxRanks || rank < 0 || rank >= count || area_bytes_ < 64) {
      throw std::invalid_argument("there are 1 to " + std::to_string(kMaxRanks) + " ranks, and their areas are not empty");
    }
  }

  int rank() const { return rank_; }
  int count() const { return count_; }
  int64_t area_bytes() const { return area_bytes_; }
  Address address() const { return reinterpret_cast<Address>(this); }

  // Begins the next exchange; returns its area. bytes: of the whole result. Throws as `wait`.
  uint8_t* begin(int64_t bytes) {
    wait();
    bytes_ = bytes;
    return areas_ + (++number_ % 2) * area_bytes_;
  }

  void announce() {
    lines_[rank_].bytes[number_ % 2] = bytes_;
    lines_[rank_].number.store(number_, std::memory_order_release);
  }

  // Waits for the parts of all ranks in the newest exchange. Throws std::runtime_error if a rank fails or takes too long.
  void wait() {
    for (int other = 0; other < count_; ++other) {
      wait_for(other);
      if (number_ == 0 || lines_[other].bytes[number_ % 2] == bytes_) continue;
      fail(other);
      throw std::runtime_error("rank " + std::to_string(other) + " computes another step than rank " +
                               std::to_string(rank_));
    }
  }

  // Makes all ranks fail in their next exchange. Only the first call has an effect.
  void fail(int rank) {
    uint64_t none = 0;
    failed().compare_exchange_strong(none, 1 + static_cast<uint64_t>(rank), std::memory_order_acq_rel);
  }

  // The rank that failed first; -1: none.
  int failed_rank() const { return static_cast<int>(failed().load(std::memory_order_acquire)) - 1; }

 private:
  using Clock = std::chrono::steady_clock;
  struct alignas(64) Line {
    std::atomic<uint64_t> number;  // of the newest exchange in which the part is written
    int64_t bytes[2];              // of the results of the exchanges with an even and an odd number
  };
  static constexpr int kSpins = 4096, kYields = 1 << 14;
  static constexpr std::chrono::milliseconds kLongestTurn{100};

  std::atomic<uint64_t>& failed() const { return lines_[kMaxRanks].number; }

  void wait_for(int other) {
    Clock::time_point last{};
    Clock::duration waited{};  // without the time in which this process was stopped
    for (int turns = 0; lines_[other].number.load(std::memory_order_acquire) < number_; ++turns) {
      if (failed_rank() >= 0) throw std::runtime_error("rank " + std::to_string(failed_rank()) + " failed");
      if (turns < kSpins) {
        pause_briefly();
        continue;
      }
      const Clock::time_point now = Clock::now();
      if (turns > kSpins) waited += now - last < kLongestTurn ? now - last : kLongestTurn;
      last = now;
      if (waited > timeout_) {
        fail(other);
        throw std::runtime_error("rank " + std::to_string(other) + " has not answered for " +
                                 std::to_string(timeout_.count()) + " ms");
      }
      if (turns < kSpins + kYields) {
        std::this_thread::yield();
      } else {
        std::this_thread::sleep_for(std::chrono::microseconds(100));
        turns = kSpins + kYields - 1;
      }
    }
  }

  Line* const lines_;
  uint8_t* const areas_;
  const int64_t area_bytes_;
  const int rank_;
  const int count_;
  const std::chrono::milliseconds timeout_;
  uint64_t number_ = 0;
  int64_t bytes_ = 0;  // of the result of this exchange
};

// Puts the columns of all ranks side by side.
struct GatherArgs {
  Ranks* ranks;
  const void* x;           // [rows, the columns of this rank]
  int64_t x_stride;        // bytes between rows
  int64_t rows;
  const int64_t* borders;  // [ranks + 1], in bytes: the first column of each rank, then the width
  void* out;               // [rows, width], contiguous; null: this rank needs no result

  static constexpr auto kRows = &GatherArgs::rows;
  static GatherArgs of(Address ranks, Address x, int64_t x_stride, int64_t rows, Address borders, Address out) {
    return {at<Ranks>(ranks), at<void>(x), x_stride, rows, at<int64_t>(borders), at<void>(out)};
  }
};

// Replaces the rows of x that other ranks own. Each rank owns the rows of a range of ids.
struct ShareRowsArgs {
  Ranks* ranks;
  const int64_t* ids;      // [count], below borders[ranks]
  int64_t count;
  const int64_t* borders;  // [ranks + 1]: the first id of each rank, then the number of ids
  void* x;                 // [count, row_bytes], contiguous; the own rows are filled
  int64_t row_bytes;

  static constexpr auto kRows = &ShareRowsArgs::count;
  static ShareRowsArgs of(Address ranks, Address ids, int64_t count, Address borders, Address x, int64_t row_bytes) {
    return {at<Ranks>(ranks), at<int64_t>(ids), count, at<int64_t>(borders), at<void>(x), row_bytes};
  }

  bool reads(const StepArgs& step, const BatchArgs&) const { return ids == step.token_ids; }
  void read(const StepArgs& step, const BatchArgs&) { ids = step.token_ids; }
};

}  // namespace octavo

#if defined(OCTAVO_ISA)

#include "parallel.h"

namespace octavo::OCTAVO_ISA {

constexpr int64_t kCopyBytes = 1 << 16;  // per piece of work

inline void gather(ThreadPool& pool, const GatherArgs& args) {
  Ranks& ranks = *args.ranks;
  const int64_t width = args.borders[ranks.count()];
  const int64_t first = args.borders[ranks.rank()], own = args.borders[ranks.rank() + 1] - first;
  const int64_t at_once = ranks.area_bytes() / width;
  if (at_once < 1) throw std::invalid_argument("a row is larger than the memory that ranks share");
  for (int64_t row = 0; row < args.rows; row += at_once) {
    const int64_t rows = smaller(at_once, args.rows - row);
    const int64_t least = kCopyBytes / width + 1;
    const uint8_t* x = static_cast<const uint8_t*>(args.x) + row * args.x_stride;
    uint8_t* area = ranks.begin(rows * width);  // the parts one after the other, each [rows, its columns]
    parallel_ranges(pool, rows, least, [&](int64_t begin, int64_t end) {
      for (int64_t i = begin; i < end; ++i) std::memcpy(area + rows * first + i * own, x + i * args.x_stride, own);
    });
    ranks.announce();
    if (args.out == nullptr) continue;
    ranks.wait();
    uint8_t* out = static_cast<uint8_t*>(args.out) + row * width;
    parallel_ranges(pool, rows, least, [&](int64_t begin, int64_t end) {
      for (int other = 0; other < ranks.count(); ++other) {
        const int64_t column = args.borders[other], columns = args.borders[other + 1] - column;
        for (int64_t i = begin; i < end; ++i) {
          std::memcpy(out + i * width + column, area + rows * column + i * columns, columns);
        }
      }
    });
  }
}

inline void share_rows(ThreadPool& pool, const ShareRowsArgs& args) {
  Ranks& ranks = *args.ranks;
  const int64_t at_once = ranks.area_bytes() / args.row_bytes;
  if (at_once < 1) throw std::invalid_argument("a row is larger than the memory that ranks share");
  const int64_t first = args.borders[ranks.rank()], last = args.borders[ranks.rank() + 1];
  for (int64_t row = 0; row < args.count; row += at_once) {
    const int64_t rows = smaller(at_once, args.count - row);
    const int64_t least = kCopyBytes / args.row_bytes + 1;
    const int64_t* ids = args.ids + row;
    uint8_t* x = static_cast<uint8_t*>(args.x) + row * args.row_bytes;
    uint8_t* area = ranks.begin(rows * args.row_bytes);
    const auto copy = [&](bool owned, uint8_t* to, const uint8_t* from) {
      parallel_ranges(pool, rows, least, [&](int64_t begin, int64_t end) {
        for (int64_t i = begin; i < end; ++i) {
          if ((ids[i] >= first && ids[i] < last) != owned) continue;
          std::memcpy(to + i * args.row_bytes, from + i * args.row_bytes, args.row_bytes);
        }
      });
    };
    copy(true, area, x);
    ranks.announce();
    ranks.wait();
    copy(false, x, area);
  }
}

}  // namespace octavo::OCTAVO_ISA

#endif  // OCTAVO_ISA
