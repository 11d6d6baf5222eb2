// Causal depthwise convolutions over the rows of sequences. The state of a sequence is its last inputs.
#pragma once

#include "states.h"

namespace octavo {

constexpr int64_t kMostTaps = 8;

struct ShortConvArgs : StatefulArgs {
  SourceRows x;         // [rows, channels]
  const float* weight;  // [taps, channels]
  const float* bias;    // [channels], or null
  Rows state;           // [slots, taps - 1, channels], of x's type: a slot is contiguous
  int64_t slots;
  bool has_silu;
  Rows out;  // [rows, channels], of x's type
  int64_t rows;
  int64_t kept;
  int64_t channels;
  int64_t taps;

  static constexpr auto kRows = &ShortConvArgs::rows;
  static ShortConvArgs of(const Tensor& x, const Tensor& kept_x, const Tensor& weight, const Tensor& bias, const Tensor& state,
                          const StateBatchArgs& batch, bool has_silu, const Tensor& out) {
    const int64_t rows = x.size(0), kept = kept_x.size(0), channels = x.size(1), taps = weight.size(0), slots = state.size(0);
    weight.expect_contiguous(DType::kFloat32, "weight");
    bias.expect_contiguous(DType::kFloat32, "bias");
    const bool has_state = state.shape == std::vector<int64_t>{slots, taps - 1, channels} && slots > 0 && channels > 0 &&
                           (channels == 1 || state.strides[2] == 1) && (taps == 2 || state.strides[1] == channels);
    const bool fits = weight.shape == std::vector<int64_t>{taps, channels} && taps >= 2 && taps <= kMostTaps &&
                      (bias.count() == 0 || bias.count() == channels);
    if (!fits || !has_state || state.dtype != x.dtype || out.dtype != x.dtype) {
      throw std::invalid_argument("x, weight, bias, state and out do not fit together");
    }
    return {{batch}, SourceRows::of(x, rows, kept_x, kept, channels, "x"), at<float>(weight.address),
            bias.count() == 0 ? nullptr : at<float>(bias.address), {at<void>(state.address), state.dtype, state.strides[0]}, slots,
            has_silu, Rows::of(out, rows, channels, "out"), rows, kept, channels, taps};
  }

  template <class Table>
  void check(const Table&) const {
    batch.check(rows, kept, slots);
  }
};

}  // namespace octavo

#if defined(OCTAVO_ISA)

namespace octavo::OCTAVO_ISA {

constexpr int64_t kLeastConvChannels = 64, kMostConvChannels = 1024;  // of a task
constexpr int64_t kConvTogether = 4;                                 // vectors: their chains of operations overlap

// Convolves N vectors of channels. taps: the addresses of the inputs of each tap, the oldest first.
template <int N, class T>
OCTAVO_INLINE void convolve(const ShortConvArgs& args, const T* const* taps, int64_t channel, int64_t offset, T* out) {
  Vec sum[N];
  OCTAVO_UNROLL
  for (int v = 0; v < N; ++v) sum[v] = load(taps[0] + offset + v * kLanes) * load(args.weight + channel + v * kLanes);
  for (int64_t tap = 1; tap < args.taps; ++tap) {
    const float* weight = args.weight + tap * args.channels + channel;
    OCTAVO_UNROLL
    for (int v = 0; v < N; ++v) sum[v] = fma(load(taps[tap] + offset + v * kLanes), load(weight + v * kLanes), sum[v]);
  }
  if (args.bias != nullptr) {
    OCTAVO_UNROLL
    for (int v = 0; v < N; ++v) sum[v] = sum[v] + load(args.bias + channel + v * kLanes);
  }
  if (args.has_silu) silu(sum);
  OCTAVO_UNROLL
  for (int v = 0; v < N; ++v) store(out + offset + v * kLanes, sum[v]);
}

// The same for fewer channels than a vector has.
template <class T>
void convolve_rest(const ShortConvArgs& args, const T* const* taps, int64_t channel, int64_t offset, int64_t count, T* out) {
  Vec sum[1] = {load_first(taps[0] + offset, count) * load_first(args.weight + channel, count)};
  for (int64_t tap = 1; tap < args.taps; ++tap) {
    sum[0] = fma(load_first(taps[tap] + offset, count), load_first(args.weight + tap * args.channels + channel, count), sum[0]);
  }
  if (args.bias != nullptr) sum[0] = sum[0] + load_first(args.bias + channel, count);
  if (args.has_silu) silu(sum);
  store_first(out + offset, sum[0], count);
}

// Some channels of one sequence.
template <class T>
struct ConvTask {
  const ShortConvArgs& args;
  int64_t sequence;
  int64_t channel;  // the first one
  int64_t count;    // of channels
  T* old;            // [taps - 1, count]: the state before the first state row

  T* in_slot(int64_t slot, int64_t index) const { return args.state.row<T>(slot) + index * args.channels + channel; }
  size_t bytes() const { return static_cast<size_t>(count) * sizeof(T); }

  // The inputs of a state row, which may be one before the sequence's first.
  const T* inputs(int64_t row) const {
    const int64_t start = args.batch.query_start[sequence];
    return row >= start ? args.x.template row<T>(args.batch.sources[row]) + channel : old + (args.taps - 1 + row - start) * count;
  }

  // Writes the state after a state row, which may be the one before the sequence's first.
  void write_state(int64_t row, int64_t slot) const {
    for (int64_t i = 0; i < args.taps - 1; ++i) {
      std::memcpy(static_cast<void*>(in_slot(slot, i)), inputs(row - (args.taps - 2) + i), bytes());
    }
  }

  void compute_row(int64_t row) const {
    const int64_t source = args.batch.sources[row];
    if (source < 0) return;
    const T* taps[kMostTaps];
    for (int64_t tap = 0; tap < args.taps; ++tap) taps[tap] = inputs(row - (args.taps - 1) + tap);
    T* out = args.out.row<T>(source) + channel;
    int64_t i = 0;
    for (; i + kConvTogether * kLanes <= count; i += kConvTogether * kLanes) {
      convolve<kConvTogether>(args, taps, channel + i, i, out);
    }
    for (; i + kLanes <= count; i += kLanes) convolve<1>(args, taps, channel + i, i, out);
    if (i < count) convolve_rest(args, taps, channel + i, i, count - i, out);
  }

  void run() const {
    const StateBatchArgs& batch = args.batch;
    const int64_t start = batch.query_start[sequence], stop = batch.query_start[sequence + 1];
    const int64_t read_slot = batch.read_slots[sequence], write_slot = batch.write_slots[sequence];
    for (int64_t i = 0; i < args.taps - 1; ++i) {
      auto* memory = static_cast<void*>(old + i * count);
      if (read_slot < 0) {
        std::memset(memory, 0, bytes());
      } else {
        std::memcpy(memory, in_slot(read_slot, i), bytes());
      }
    }
    for (int64_t row = start; row < stop; ++row) compute_row(row);
    const int32_t* saved = std::lower_bound(batch.saved_rows, batch.saved_rows + batch.num_saved, start);
    for (int64_t i = saved - batch.saved_rows; i < batch.num_saved && batch.saved_rows[i] < stop; ++i) {
      write_state(batch.saved_rows[i], batch.saved_slots[i]);
    }
    if (write_slot >= 0) write_state(start + batch.write_rows[sequence] - 1, write_slot);
  }
};

inline void short_conv(ThreadPool& pool, const ShortConvArgs& args) {
  const int64_t wanted = divide_up(args.channels, 4 * pool.num_threads() * kLeastConvChannels) * kLeastConvChannels;
  const int64_t size = smaller(wanted, kMostConvChannels);
  with_float_type(args.x.step.dtype, [&](auto type) {
    using T = decltype(type);
    parallel(pool, divide_up(args.channels, size), [&](int64_t index, int) {
      const int64_t channel = index * size, count = smaller(size, args.channels - channel);
      T old[(kMostTaps - 1) * kMostConvChannels];
      for (int64_t sequence = 0; sequence < args.batch.num_seqs; ++sequence) {
        ConvTask<T>{args, sequence, channel, count, old}.run();
      }
    });
  });
}

}  // namespace octavo::OCTAVO_ISA

#endif  // OCTAVO_ISA
