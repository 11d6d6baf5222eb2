// The types of kernel arguments, and their form in Python: addresses (tensor.data_ptr()), shapes and strides.
//
// Strides count elements. Pointers to bfloat16 or float16 data come with a DType. The comment of each field gives its shape.
#pragma once

#include <cstdint>
#include <stdexcept>
#include <string>
#include <tuple>
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

  // The size of a dimension; 0 if the tensor has fewer dimensions.
  int64_t size(size_t dimension) const { return dimension < shape.size() ? shape[dimension] : 0; }

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

// A matrix with contiguous rows.
struct Rows {
  void* data;
  DType dtype;
  int64_t stride;  // from row to row

  // Throws std::invalid_argument unless the tensor is [rows, columns] of a float type, and each row is contiguous.
  static Rows of(const Tensor& tensor, int64_t rows, int64_t columns, const char* name) {
    const bool fits = tensor.shape == std::vector<int64_t>{rows, columns} && (columns == 1 || tensor.strides[1] == 1);
    const bool is_float = tensor.dtype == DType::kFloat32 || tensor.dtype == DType::kBFloat16 || tensor.dtype == DType::kFloat16;
    if (!fits || !is_float) throw std::invalid_argument(std::string(name) + " has another shape or dtype than the kernel expects");
    return {at<void>(tensor.address), tensor.dtype, tensor.strides[0]};
  }

  template <class T>
  T* row(int64_t index) const {
    return static_cast<T*>(data) + index * stride;
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

// The arrays of octavo.kernels.state_batch.StateBatch; all null if a step has no states.
struct StateBatchArgs {
  const int32_t* query_start = nullptr;  // [num_seqs + 1], of state rows
  int64_t num_seqs = 0;
  const int32_t* sources = nullptr;  // [num_state_rows]: rows of the step, or -1 - k for kept row k
  int64_t num_state_rows = 0;
  const int32_t* read_slots = nullptr;   // [num_seqs]; -1: the state before the first state row is zero
  const int32_t* write_slots = nullptr;  // [num_seqs]; -1: the state is dropped
  const int32_t* write_rows = nullptr;   // [num_seqs]: number of state rows that the written state includes
  const int32_t* saved_rows = nullptr;   // [num_saved], state rows, ascending
  const int32_t* saved_slots = nullptr;  // [num_saved]
  int64_t num_saved = 0;
  const int32_t* keep_from = nullptr;  // [num_keep], rows of the step
  const int32_t* keep_to = nullptr;    // [num_keep], kept rows
  int64_t num_keep = 0;

  bool operator==(const StateBatchArgs& other) const {
    const auto parts = [](const StateBatchArgs& batch) {
      return std::tie(batch.query_start, batch.num_seqs, batch.sources, batch.num_state_rows, batch.read_slots, batch.write_slots,
                      batch.write_rows, batch.saved_rows, batch.saved_slots, batch.num_saved, batch.keep_from, batch.keep_to,
                      batch.num_keep);
    };
    return parts(*this) == parts(other);
  }

  // Throw std::out_of_range unless all rows and slots exist. num_rows: of the step. num_kept: kept rows.
  void check(int64_t num_rows, int64_t num_kept, int64_t num_slots) const {
    check_kept(num_rows, num_kept);
    bool holds = query_start[0] == 0 && query_start[num_seqs] == num_state_rows;
    for (int64_t i = 0; holds && i < num_seqs; ++i) {
      holds = query_start[i] <= query_start[i + 1] && read_slots[i] >= -1 && read_slots[i] < num_slots &&
              write_slots[i] >= -1 && write_slots[i] < num_slots && write_rows[i] >= 0 &&
              write_rows[i] <= query_start[i + 1] - query_start[i];
    }
    for (int64_t i = 0; holds && i < num_state_rows; ++i) holds = sources[i] >= -num_kept && sources[i] < num_rows;
    for (int64_t i = 0; holds && i < num_saved; ++i) {
      holds = saved_rows[i] >= (i == 0 ? 0 : saved_rows[i - 1]) && saved_rows[i] < num_state_rows && saved_slots[i] >= 0 &&
              saved_slots[i] < num_slots;
    }
    expect(holds);
  }
  void check_kept(int64_t num_rows, int64_t num_kept) const {
    bool holds = query_start != nullptr;
    for (int64_t i = 0; holds && i < num_keep; ++i) {
      holds = keep_from[i] >= 0 && keep_from[i] < num_rows && keep_to[i] >= 0 && keep_to[i] < num_kept;
    }
    expect(holds);
  }

 private:
  static void expect(bool holds) {
    if (!holds) throw std::out_of_range("a state batch has rows or slots that do not exist, or rows that do not ascend");
  }
};

// A step: its tokens, and the rows whose hidden states are returned (octavo.kernels.interface.OutputRows).
struct StepArgs {
  const int64_t* token_ids;  // [num_tokens], inside the vocabulary
  int64_t num_tokens;
  std::vector<BatchArgs> groups;  // of all rows, one for each KV group
  const int64_t* output_rows;     // [num_outputs]
  int64_t num_outputs;
  std::vector<BatchArgs> output_groups;  // of the output rows
  StateBatchArgs states;                 // of all rows
};

}  // namespace octavo
