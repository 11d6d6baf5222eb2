// Products with several weights: of groups of rows (the experts of a mixture), or of the heads of all rows.
//
// A task multiplies some rows by some panels of one weight, on one thread, with the kernels of linear.h. So weights do not wait for
// each other, and the bits are those of a product with that weight alone.
#pragma once

#include "linear_args.h"

namespace octavo {

// Packed weights of one shape: int64 [count, kFields].
struct WeightTable {
  static constexpr int64_t kFields = 6;  // addresses of weight, bias and order; dtype, group_size and has_zeros

  const int64_t* fields;
  int64_t count;

  static WeightTable of(const Tensor& weights, int64_t count) {
    weights.expect_contiguous(DType::kInt64, "weights");
    if (count < 1 || weights.count() != count * kFields) throw std::invalid_argument("the weights are not of these groups");
    return {at<int64_t>(weights.address), count};
  }

  void put_into(LinearArgs& product, int64_t index) const {
    const int64_t* of_weight = fields + index * kFields;
    product.weight = at<void>(static_cast<Address>(of_weight[0]));
    product.bias = at<float>(static_cast<Address>(of_weight[1]));
    product.order = at<int32_t>(static_cast<Address>(of_weight[2]));
    product.weight_dtype = DType(of_weight[3]);
    product.int4 = {of_weight[4], of_weight[5] != 0};
  }
};

struct GroupedLinearArgs {
  LinearArgs product;      // of the rows of all groups, without a weight
  const int64_t* sources;  // [rows]: the row of x that is multiplied at each place; null if x has the rows in this order
  const int32_t* starts;   // [groups + 1]: each group's first place, then their number
  WeightTable weights;
  int64_t rows;

  std::pair<int64_t, int64_t> rows_of(int64_t group) const { return {starts[group], starts[group + 1]}; }

  static constexpr auto kRows = &GroupedLinearArgs::rows;
  static GroupedLinearArgs of(const Tensor& x, int64_t n, Address out, int64_t out_stride, int out_dtype, const Tensor& sources,
                              const Tensor& starts, const Tensor& weights) {
    sources.expect_contiguous(DType::kInt64, "sources");
    starts.expect_contiguous(DType::kInt32, "starts");
    if (x.shape.size() != 2 || x.strides[1] != 1) throw std::invalid_argument("x is not rows without gaps");
    LinearArgs product{};
    product.x = at<void>(x.address);
    product.x_dtype = x.dtype;
    product.x_stride = x.strides[0];
    product.n = n;
    product.k = x.shape[1];
    product.out = at<void>(out);
    product.out_stride = out_stride;
    product.out_dtype = DType(out_dtype);
    const bool is_sorted = sources.count() == 0;
    return {product, is_sorted ? nullptr : at<int64_t>(sources.address), at<int32_t>(starts.address),
            WeightTable::of(weights, starts.count() - 1), is_sorted ? x.shape[0] : sources.count()};
  }
};

// out[row, head] = x[row, head] times the head's weight.
struct HeadLinearArgs {
  LinearArgs product;  // of the first head, without a weight
  int64_t x_head_stride;
  int64_t out_head_stride;
  WeightTable weights;
  int64_t rows;

  std::pair<int64_t, int64_t> rows_of(int64_t) const { return {0, rows}; }

  static constexpr auto kRows = &HeadLinearArgs::rows;
  static HeadLinearArgs of(const Tensor& x, const Tensor& out, const Tensor& weights) {
    if (x.shape.size() != 3 || out.shape.size() != 3 || x.strides[2] != 1 || out.strides[2] != 1 ||
        x.shape[0] != out.shape[0] || x.shape[1] != out.shape[1]) {
      throw std::invalid_argument("x and out are not heads without gaps, of as many rows");
    }
    LinearArgs product{};
    product.x = at<void>(x.address);
    product.x_dtype = x.dtype;
    product.x_stride = x.strides[0];
    product.n = out.shape[2];
    product.k = x.shape[2];
    product.out = at<void>(out.address);
    product.out_stride = out.strides[0];
    product.out_dtype = out.dtype;
    return {product, x.strides[1], out.strides[1], WeightTable::of(weights, x.shape[1]), x.shape[0]};
  }
};

}  // namespace octavo

#if defined(OCTAVO_ISA)

#include <atomic>
#include <exception>

#include "linear_int4_tiles.h"  // linear, over all of its parts

namespace octavo::OCTAVO_ISA {

constexpr int64_t kTaskRows = 256;        // at most: their activations stay in L2, and the weight is read once for so many
constexpr int64_t kTasksPerThread = 4;    // with fewer, weights are cut
constexpr int64_t kLeastTaskPanels = 8;   // of a part of a weight: its rows are rounded again for each part

struct GroupTask {
  int64_t group;  // or head
  int64_t first;  // row
  int64_t rows;
  int64_t first_panel;
  int64_t num_panels;
};

// Calls visit(group, first, rows) for each group's pieces of at most kTaskRows rows. Groups without rows have none.
template <class Args, class Visit>
void for_each_piece(const Args& args, const Visit& visit) {
  for (int64_t group = 0; group < args.weights.count; ++group) {
    const auto [begin, end] = args.rows_of(group);
    for (int64_t first = begin; first < end; first += kTaskRows) visit(group, first, smaller(kTaskRows, end - first));
  }
}

// Lists the tasks in the pool's shared memory.
template <class Args>
std::pair<const GroupTask*, int64_t> list_tasks(ThreadPool& pool, const Args& args) {
  int64_t pieces = 0, count = 0;
  for_each_piece(args, [&](int64_t, int64_t, int64_t) { ++pieces; });
  const int64_t panels = divide_up(args.product.n, kPanelColumns), threads = pool.num_threads();
  const int64_t wanted = threads == 1 ? 1 : divide_up(kTasksPerThread * threads, larger(pieces, int64_t{1}));
  const int64_t parts = smaller(wanted, larger(panels / kLeastTaskPanels, int64_t{1}));
  auto* tasks = static_cast<GroupTask*>(pool.shared(static_cast<size_t>(pieces * parts) * sizeof(GroupTask)));
  for_each_piece(args, [&](int64_t group, int64_t first, int64_t rows) {
    for (int64_t part = 0; part < parts; ++part) {
      const int64_t panel = panels * part / parts;
      tasks[count++] = {group, first, rows, panel, panels * (part + 1) / parts - panel};
    }
  });
  return {tasks, count};
}

inline int64_t bytes_of(DType dtype) { return dtype == DType::kFloat32 ? 4 : 2; }

// The product of a task's rows of x, without their addresses.
template <class Args>
LinearArgs product_of(const Args& args, const GroupTask& task) {
  LinearArgs product = args.product;
  args.weights.put_into(product, task.group);
  product.rows = task.rows;
  product.first_panel = task.first_panel;
  product.num_panels = task.num_panels;
  return product;
}

// Computes all tasks. to_product(task, thread): the task's product.
template <class Args, class ToProduct>
void run_tasks(ThreadPool& pool, const Args& args, const ToProduct& to_product) {
  const auto [tasks, count] = list_tasks(pool, args);
  std::atomic<bool> has_failed{false};
  std::exception_ptr error;  // a thread of the pool must not throw
  parallel(pool, count, [&, tasks = tasks](int64_t i, int thread) {
    try {
      linear(pool.alone(thread), to_product(tasks[i], thread));
    } catch (...) {
      if (!has_failed.exchange(true)) error = std::current_exception();
    }
  });
  if (error) std::rethrow_exception(error);
}

// Weights of groups without rows are not read. Rows that are not in order are copied to the memory of the thread.
inline void grouped_linear(ThreadPool& pool, const GroupedLinearArgs& args) {
  const LinearArgs& all = args.product;
  const int64_t row_bytes = all.k * bytes_of(all.x_dtype), x_bytes = all.x_stride * bytes_of(all.x_dtype);
  const char* x = static_cast<const char*>(all.x);
  if (args.sources != nullptr) pool.reserve_local(static_cast<size_t>(kTaskRows * row_bytes));
  run_tasks(pool, args, [&](const GroupTask& task, int thread) {
    LinearArgs product = product_of(args, task);
    product.out = static_cast<char*>(all.out) + task.first * all.out_stride * bytes_of(all.out_dtype);
    if (args.sources == nullptr) {
      product.x = x + task.first * x_bytes;
      return product;
    }
    char* rows = static_cast<char*>(pool.local(thread));
    for (int64_t i = 0; i < task.rows; ++i) {
      std::memcpy(rows + i * row_bytes, x + args.sources[task.first + i] * x_bytes, static_cast<size_t>(row_bytes));
    }
    product.x = rows;
    product.x_stride = all.k;
    return product;
  });
}

inline void head_linear(ThreadPool& pool, const HeadLinearArgs& args) {
  const LinearArgs& all = args.product;
  run_tasks(pool, args, [&](const GroupTask& task, int) {
    LinearArgs product = product_of(args, task);
    const int64_t x_at = task.first * all.x_stride + task.group * args.x_head_stride;
    const int64_t out_at = task.first * all.out_stride + task.group * args.out_head_stride;
    product.x = static_cast<const char*>(all.x) + x_at * bytes_of(all.x_dtype);
    product.out = static_cast<char*>(all.out) + out_at * bytes_of(all.out_dtype);
    return product;
  });
}

}  // namespace octavo::OCTAVO_ISA

#endif  // OCTAVO_ISA
