// The gate of attention's output: copies of heads, and x *= sigmoid(gate).
#pragma once

#include "arguments.h"

namespace octavo {

// Tokens of heads [tokens, heads, head_dim]: a token's heads are contiguous, and tokens may have any stride.
struct TokenHeads {
  void* data;
  DType dtype;
  int64_t tokens;
  int64_t size;    // elements of a token
  int64_t stride;  // elements between tokens

  static TokenHeads of(const Tensor& tensor, const char* name) {
    const bool fits = tensor.shape.size() == 3 && (tensor.shape[2] == 1 || tensor.strides[2] == 1) &&
                      (tensor.shape[1] == 1 || tensor.strides[1] == tensor.shape[2]);
    const bool is_float = tensor.dtype == DType::kFloat32 || tensor.dtype == DType::kBFloat16;
    if (!fits || !is_float) throw std::invalid_argument(std::string(name) + " is not [tokens, heads, head_dim] of float32 or bfloat16");
    return {at<void>(tensor.address), tensor.dtype, tensor.shape[0], tensor.shape[1] * tensor.shape[2], tensor.strides[0]};
  }

  void expect_like(const TokenHeads& other) const {
    if (dtype != other.dtype || tokens != other.tokens || size != other.size) {
      throw std::invalid_argument("the tensors have different shapes or dtypes");
    }
  }
};

struct CopyRowsArgs {
  TokenHeads x;
  TokenHeads out;
  int64_t rows;

  static constexpr auto kRows = &CopyRowsArgs::rows;
  static CopyRowsArgs of(const Tensor& x, const Tensor& out) {
    const CopyRowsArgs args{TokenHeads::of(x, "x"), TokenHeads::of(out, "out"), x.shape.empty() ? 0 : x.shape[0]};
    args.x.expect_like(args.out);
    return args;
  }
};

struct SigmoidGateArgs {
  TokenHeads x;
  TokenHeads gate;
  int64_t rows;

  static constexpr auto kRows = &SigmoidGateArgs::rows;
  static SigmoidGateArgs of(const Tensor& x, const Tensor& gate) {
    const SigmoidGateArgs args{TokenHeads::of(x, "x"), TokenHeads::of(gate, "gate"), x.shape.empty() ? 0 : x.shape[0]};
    args.x.expect_like(args.gate);
    return args;
  }
};

}  // namespace octavo

#if defined(OCTAVO_ISA)

#include <cstring>

#include "math.h"
#include "parallel.h"

namespace octavo::OCTAVO_ISA {

inline void copy_rows(ThreadPool& pool, const CopyRowsArgs& args) {
  const int64_t item = args.x.dtype == DType::kFloat32 ? 4 : 2;
  parallel_ranges(pool, args.rows, divide_up(kLeastElements, args.x.size), [&](int64_t first, int64_t last) {
    for (int64_t row = first; row < last; ++row) {
      std::memcpy(static_cast<uint8_t*>(args.out.data) + row * args.out.stride * item,
                  static_cast<const uint8_t*>(args.x.data) + row * args.x.stride * item, args.x.size * item);
    }
  });
}

template <class T>
void sigmoid_gate_of(ThreadPool& pool, const SigmoidGateArgs& args) {
  parallel_ranges(pool, args.rows, divide_up(kLeastElements, args.x.size), [&](int64_t first, int64_t last) {
    const Vec one = splat(1.0f);
    for (int64_t row = first; row < last; ++row) {
      T* x = static_cast<T*>(args.x.data) + row * args.x.stride;
      const T* gate = static_cast<const T*>(args.gate.data) + row * args.gate.stride;
      for (int64_t i = 0; i < args.x.size; i += kLanes) {
        const int64_t count = args.x.size - i;
        const Vec factor = one / (one + exp(splat(0.0f) - load_first(gate + i, count)));
        store_first(x + i, load_first(x + i, count) * factor, count);
      }
    }
  });
}

inline void sigmoid_gate(ThreadPool& pool, const SigmoidGateArgs& args) {
  if (args.x.dtype == DType::kFloat32) {
    sigmoid_gate_of<float>(pool, args);
  } else {
    sigmoid_gate_of<bf16>(pool, args);
  }
}

}  // namespace octavo::OCTAVO_ISA

#endif  // OCTAVO_ISA
