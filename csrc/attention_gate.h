// The gate of attention's output: copies of heads, and x *= sigmoid(gate).
#pragma once

#include "arguments.h"

namespace octavo {

// Tokens of heads [tokens, heads, head_dim]: a token's heads are contiguous, and tokens may have any stride.
struct TokenHeads {
  void* data;
  int64_t stride;  // elements between tokens

  static TokenHeads of(const Tensor& tensor, const char* name) {
    const bool fits = tensor.shape.size() == 3 && (tensor.shape[2] == 1 || tensor.strides[2] == 1) &&
                      (tensor.shape[1] == 1 || tensor.strides[1] == tensor.shape[2]);
    const bool is_float = tensor.dtype == DType::kFloat32 || tensor.dtype == DType::kBFloat16;
    if (!fits || !is_float) throw std::invalid_argument(std::string(name) + " is not [tokens, heads, head_dim] of float32 or bfloat16");
    return {at<void>(tensor.address), tensor.strides[0]};
  }
};

// Of copy_rows, x and out; of sigmoid_gate, x and gate.
struct TwoHeadsArgs {
  TokenHeads x;
  TokenHeads other;
  DType dtype;  // of both
  int64_t rows;
  int64_t size;  // elements of a token

  static constexpr auto kRows = &TwoHeadsArgs::rows;
  static TwoHeadsArgs of(const Tensor& x, const Tensor& other) {
    const TokenHeads first = TokenHeads::of(x, "x"), second = TokenHeads::of(other, "the other tensor");
    if (x.dtype != other.dtype || x.shape != other.shape) {
      throw std::invalid_argument("the tensors have different shapes or dtypes");
    }
    return {first, second, x.dtype, x.shape[0], x.shape[1] * x.shape[2]};
  }
};

}  // namespace octavo

#if defined(OCTAVO_ISA)

#include <cstring>

#include "math.h"
#include "parallel.h"

namespace octavo::OCTAVO_ISA {

inline void copy_rows(ThreadPool& pool, const TwoHeadsArgs& args) {
  const int64_t item = args.dtype == DType::kFloat32 ? 4 : 2;
  parallel_ranges(pool, args.rows, divide_up(kLeastElements, args.size), [&](int64_t first, int64_t last) {
    for (int64_t row = first; row < last; ++row) {
      std::memcpy(static_cast<uint8_t*>(args.other.data) + row * args.other.stride * item,
                  static_cast<const uint8_t*>(args.x.data) + row * args.x.stride * item, args.size * item);
    }
  });
}

template <class T>
void sigmoid_gate_of(ThreadPool& pool, const TwoHeadsArgs& args) {
  parallel_ranges(pool, args.rows, divide_up(kLeastElements, args.size), [&](int64_t first, int64_t last) {
    const Vec one = splat(1.0f);
    for (int64_t row = first; row < last; ++row) {
      T* x = static_cast<T*>(args.x.data) + row * args.x.stride;
      const T* gate = static_cast<const T*>(args.other.data) + row * args.other.stride;
      for (int64_t i = 0; i < args.size; i += kLanes) {
        const int64_t count = args.size - i;
        const Vec factor = one / (one + exp(splat(0.0f) - load_first(gate + i, count)));
        store_first(x + i, load_first(x + i, count) * factor, count);
      }
    }
  });
}

inline void sigmoid_gate(ThreadPool& pool, const TwoHeadsArgs& args) {
  if (args.dtype == DType::kFloat32) {
    sigmoid_gate_of<float>(pool, args);
  } else {
    sigmoid_gate_of<bf16>(pool, args);
  }
}

}  // namespace octavo::OCTAVO_ISA

#endif  // OCTAVO_ISA
