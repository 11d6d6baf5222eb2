// The types of kernel arguments, and their form in Python: addresses (tensor.data_ptr()), shapes and strides.
//
// Strides count elements. Pointers to bfloat16 or float16 data come with a DType. The comment of each field gives its shape.
#pragma once

#include <cstdint>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include "types.h"

namespace octavo {

using Address = uintptr_t;
using Strides = std::pair<int64_t, int64_t>;

template <class T>
T* at(Address address) {
  return reinterpret_cast<T*>(address);
}

// A tensor argument of an operation (octavo.kernels.operation.Operation).
struct Tensor {
  Address address;
  DType dtype;
  std::vector<int64_t> shape;
  std::vector<int64_t> strides;

  int64_t count() const {
    int64_t product = 1;
    for (const int64_t size : shape) product *= size;
    return product;
  }

  // Throws std::invalid_argument unless the tensor has this dtype, and elements without gaps.
  void expect_contiguous(DType wanted, const char* name) const {
    if (dtype != wanted) throw std::invalid_argument(std::string(name) + " has another dtype than the kernel expects");
    int64_t stride = 1;
    for (size_t i = shape.size(); i-- > 0;) {
      if (shape[i] != 1 && strides[i] != stride) throw std::invalid_argument(std::string(name) + " is not contiguous");
      stride *= shape[i];
    }
  }
};

constexpr int kPanelColumns = 32;  // columns in a panel of a packed weight

// Packed weight: [ceil(n / 32)] panels, zero padded. The layout of a panel:
//
// float32, float16   [k][32]
// bfloat16           [ceil(k / 2)][32][2]
// int8               [ceil(k / 4)][32][4] of a rotated weight (rotation.h). After all panels follow float32 scales and int32 sums
//                    of the columns, [ceil(n / 32) * 32] each
// int4               groups of k, each with int16 multiples [32] and perhaps zero points, then [ceil(k / 8)][32][4] bytes of two
//                    values. After all panels follow float32 units of the columns (linear_int4.h)
// blocks of GGUF     groups of 32 k with their scales (block_formats.h); rows must consist of whole blocks
struct Int4Format {
  int64_t group_size;  // k that share a scale: a multiple of 32, or all of them
  bool has_zeros;      // each group has a zero point; else all are 8
};

enum class Activation : int { kSilu, kGeluTanh, kClampedSilu };  // the numbers of octavo.kernels.cpu.ACTIVATION_NUMBERS

// The arrays of one KV group of octavo.kernels.interface.AttentionBatch.
struct BatchArgs {
  const int64_t* positions;
  const int64_t* slot_mapping;
  const int32_t* query_start;
  const int32_t* block_tables;
  int64_t block_table_stride;
  int64_t num_seqs;
};

// A step: its tokens, and the rows whose hidden states are returned (octavo.kernels.interface.OutputRows).
struct StepArgs {
  const int64_t* token_ids;  // [num_tokens], inside the vocabulary
  int64_t num_tokens;
  std::vector<BatchArgs> groups;  // of all rows, one for each KV group
  const int64_t* output_rows;     // [num_outputs]
  int64_t num_outputs;
  std::vector<BatchArgs> output_groups;  // of the output rows
};

}  // namespace octavo
