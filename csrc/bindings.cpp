// octavo._kernels: the kernels for Python. Tensors come as addresses (tensor.data_ptr()), shapes and strides, so that a call
// costs about two microseconds and this library needs no torch. Callers have checked types and shapes.
#if defined(__x86_64__)
#include <cpuid.h>
#endif

#include <nanobind/nanobind.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include <cerrno>
#include <stdexcept>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#if defined(__linux__)
#include <sched.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <unistd.h>
#endif

#include "kernels.h"
#include "program.h"
#include "rejection.h"
#include "xxh64.h"

namespace nb = nanobind;

namespace octavo {
namespace {

using Address = uintptr_t;
using Strides = std::pair<int64_t, int64_t>;

template <class T>
T* at(Address address) {
  return reinterpret_cast<T*>(address);
}

// The permission to use AMX, for which Linux must be asked once in a process. It counts for all threads.
struct TilePermission {
  bool has_tiles = false;  // the processor multiplies tiles of bfloat16 and int8, and the kernels for them were compiled
  int error = 0;           // errno of the refusal; 0: granted
};

const TilePermission& tile_permission() {
  static const TilePermission permission = [] {
    TilePermission found;
#if defined(OCTAVO_HAS_AMX) && defined(__linux__)
    constexpr unsigned kBfloat16 = 1u << 22, kTiles = 1u << 24, kInt8 = 1u << 25, kAll = kBfloat16 | kTiles | kInt8;
    constexpr int kRequestPermission = 0x1023, kTileData = 18;  // ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA
    unsigned eax = 0, ebx = 0, ecx = 0, edx = 0;
    found.has_tiles = __get_cpuid_count(7, 0, &eax, &ebx, &ecx, &edx) != 0 && (edx & kAll) == kAll;
    if (found.has_tiles && syscall(SYS_arch_prctl, kRequestPermission, kTileData) != 0) found.error = errno;
#endif
    return found;
  }();
  return permission;
}

#if defined(__x86_64__)
bool multiplies_tiles() { return tile_permission().has_tiles && tile_permission().error == 0; }
#endif

int tiles_refused() { return tile_permission().error; }

std::vector<std::string> instruction_sets() {
  std::vector<std::string> names;
#if defined(__x86_64__)
  __builtin_cpu_init();
  const bool avx2 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __builtin_cpu_supports("f16c");
  if (avx2 && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
      __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq")) {
    if (__builtin_cpu_supports("avx512vnni")) {
      if (__builtin_cpu_supports("avx512bf16")) {
        if (multiplies_tiles()) names.emplace_back("amx");
        names.emplace_back("avx512_bf16");
      }
      names.emplace_back("avx512_vnni");
    }
    names.emplace_back("avx512");
  }
  if (avx2) names.emplace_back("avx2");
#endif
  names.emplace_back("portable");
  return names;
}

const KernelTable& table_of(const std::string& isa) {
  for (const std::string& name : instruction_sets()) {
    if (name != isa) continue;
#if defined(__x86_64__)
#if defined(OCTAVO_HAS_AMX)
    if (name == "amx") return kAmxKernels;
#endif
    if (name == "avx512_bf16") return kAvx512Bf16Kernels;
    if (name == "avx512_vnni") return kAvx512VnniKernels;
    if (name == "avx512") return kAvx512Kernels;
    if (name == "avx2") return kAvx2Kernels;
#endif
    return kPortableKernels;
  }
  throw std::invalid_argument("no kernels for instruction set '" + isa + "' on this processor");
}

void check_ids(const int64_t* ids, int64_t count, int64_t n) {
  for (int64_t i = 0; i < count; ++i) {
    if (ids[i] < 0 || ids[i] >= n) {
      throw std::out_of_range("token id " + std::to_string(ids[i]) + " is outside the vocabulary of " +
                              std::to_string(n));
    }
  }
}

void rejection_sample(Address target, Address draft_ids, Address cu_num_logits, int64_t num_requests, int64_t num_steps,
                      Address sampled, Address num_sampled) {
  if (!accept_drafts(at<int64_t>(target), at<int64_t>(draft_ids), at<int32_t>(cu_num_logits), num_requests, num_steps,
                     at<int64_t>(sampled), at<int32_t>(num_sampled))) {
    throw std::out_of_range("a request has no row of logits, or more than " + std::to_string(num_steps) + " drafts");
  }
}

void check_rows(const StepArgs& step) {
  bool is_known = step.num_outputs <= step.num_tokens;
  for (int64_t i = 0; is_known && i < step.num_outputs; ++i) {
    is_known = step.output_rows[i] >= 0 && step.output_rows[i] < step.num_tokens;
  }
  if (!is_known) throw std::out_of_range("output rows are no rows of the step");
}

// Others would write all n features where half of them have room.
void check_gated(const KernelTable& table, const LinearArgs& args) {
  if (args.gated && !table.fuses_gate(args.x_dtype, args.weight_dtype, args.n)) {
    throw std::invalid_argument("this product is not gated by its kernel");
  }
}

// --- arguments as Python gives them: the same for a call that is made and for one that is recorded -----------------------

LinearArgs linear_args(Address x, int x_dtype, int64_t x_stride, int64_t rows, Address weight, int weight_dtype,
                       int64_t n, int64_t k, Address bias, Address out, int64_t out_stride, int out_dtype, bool gated,
                       int activation, int64_t group_size, bool has_zeros, Address order) {
  return {at<void>(x),
          DType(x_dtype),
          x_stride,
          rows,
          at<void>(weight),
          DType(weight_dtype),
          n,
          k,
          at<float>(bias),
          at<void>(out),
          out_stride,
          DType(out_dtype),
          gated,
          Activation(activation),
          {group_size, has_zeros},
          at<int32_t>(order)};
}

EmbeddingArgs embedding_args(Address ids, int64_t count, Address packed, int weight_dtype, int64_t n, int64_t k,
                             Address out, int out_dtype, double scale, int64_t group_size, bool has_zeros) {
  return {at<int64_t>(ids), count,         at<void>(packed),  DType(weight_dtype),       n,
          k,                at<void>(out), DType(out_dtype), static_cast<float>(scale), {group_size, has_zeros}};
}

NormArgs norm_args(Address x, Address residual, Address weight, int weight_dtype, Address out, int dtype, int64_t rows,
                   int64_t size, double eps, double scale, int64_t together, int64_t x_stride) {
  return {at<void>(x),  at<void>(residual), at<void>(weight), DType(weight_dtype), at<void>(out), DType(dtype), rows,
          size, static_cast<float>(eps), static_cast<float>(scale), together, x_stride};
}

TakeArgs take_args(Address x, int64_t x_stride, Address rows, int64_t count, int64_t row_bytes, Address out) {
  return {at<void>(x), x_stride, at<int64_t>(rows), count, row_bytes, at<void>(out)};
}

GateArgs gate_args(Address gate_up, Address out, int64_t out_stride, int dtype, int64_t rows, int64_t size,
                   int activation) {
  return {at<void>(gate_up), at<void>(out), out_stride, DType(dtype), rows, size, Activation(activation)};
}

AddArgs add_args(Address x, Address sum, int dtype, int64_t rows, int64_t size, double scale) {
  return {at<void>(x), at<void>(sum), DType(dtype), rows, size, static_cast<float>(scale)};
}

RopeArgs rope_args(Address q, Strides q_strides, Address k, Strides k_strides, Address v, Strides v_strides,
                   Address cos_sin, Address query_scale, Address positions, Address slot_mapping, Address k_cache,
                   Strides k_cache_strides, Address v_cache, Strides v_cache_strides, int kv_dtype, int dtype,
                   int64_t tokens, int64_t num_heads, int64_t num_kv_heads, int64_t head_dim, int64_t rotary_dim,
                   bool interleaved, int64_t block_size) {
  return {at<void>(q),
          at<void>(k),
          at<void>(v),
          {q_strides.first, q_strides.second},
          {k_strides.first, k_strides.second},
          {v_strides.first, v_strides.second},
          at<float>(cos_sin),
          at<float>(query_scale),
          at<int64_t>(positions),
          at<int64_t>(slot_mapping),
          at<void>(k_cache),
          at<void>(v_cache),
          {k_cache_strides.first, k_cache_strides.second},
          {v_cache_strides.first, v_cache_strides.second},
          DType(kv_dtype),
          DType(dtype),
          tokens,
          num_heads,
          num_kv_heads,
          head_dim,
          rotary_dim,
          interleaved,
          block_size};
}

AttentionArgs attention_args(Address q, Strides q_strides, Address k_cache, Strides k_cache_strides, Address v_cache,
                             Strides v_cache_strides, int kv_dtype, Address out, int64_t out_stride, int dtype,
                             Address query_start, Address block_tables, int64_t block_table_stride, Address positions,
                             int64_t num_seqs, int64_t num_heads, int64_t num_kv_heads, int64_t head_dim,
                             int64_t block_size, double scale, int64_t window, double softcap) {
  return {at<void>(q),
          {q_strides.first, q_strides.second},
          at<void>(k_cache),
          at<void>(v_cache),
          {k_cache_strides.first, k_cache_strides.second},
          {v_cache_strides.first, v_cache_strides.second},
          DType(kv_dtype),
          at<void>(out),
          out_stride,
          DType(dtype),
          at<int32_t>(query_start),
          at<int32_t>(block_tables),
          block_table_stride,
          at<int64_t>(positions),
          num_seqs,
          num_heads,
          num_kv_heads,
          head_dim,
          block_size,
          static_cast<float>(scale),
          window,
          static_cast<float>(softcap)};
}

// positions, slot_mapping, query_start, block_tables, their stride, num_seqs.
using Batch = std::tuple<Address, Address, Address, Address, int64_t, int64_t>;

BatchArgs batch_args(const Batch& batch) {
  const auto& [positions, slot_mapping, query_start, block_tables, block_table_stride, num_seqs] = batch;
  return {at<int64_t>(positions),    at<int64_t>(slot_mapping), at<int32_t>(query_start),
          at<int32_t>(block_tables), block_table_stride,        num_seqs};
}

// Of layers without a window, and of those with one.
using Rows = std::pair<Batch, Batch>;

RowsArgs rows_args(const Rows& rows) { return {batch_args(rows.first), batch_args(rows.second)}; }

StepArgs step_args(Address token_ids, int64_t num_tokens, const Rows& rows, Address output_rows, int64_t num_outputs,
                   const Rows& outputs) {
  return {at<int64_t>(token_ids), num_tokens, rows_args(rows), at<int64_t>(output_rows), num_outputs,
          rows_args(outputs)};
}

// The kernels of one instruction set and the threads they run on.
class KernelSet {
 public:
  KernelSet(const std::string& isa, int num_threads, std::vector<int> cpus)
      : table_(table_of(isa)), pool_(num_threads, std::move(cpus)) {}

  int num_threads() const { return pool_.num_threads(); }
  void set_num_threads(int num_threads) { pool_.set_num_threads(num_threads); }
  void shutdown() { pool_.shutdown(); }

  void round_weight(Address weight, int dtype, int64_t n, int64_t k, int64_t stride, int64_t group_size, Address values,
                    Address scales, Address zeros) {
    ThreadPool::Session session(pool_);
    table_.round_weight(pool_, {at<void>(weight), DType(dtype), n, k, stride, group_size, at<void>(values),
                                at<void>(scales), at<void>(zeros)});
  }

  void pack_weight(Address weight, int dtype, int64_t n, int64_t k, int64_t stride, Address scales, Address multiples,
                   Address offsets, int64_t group_size, Address packed) {
    ThreadPool::Session session(pool_);
    table_.pack_weight(pool_, {at<void>(weight), DType(dtype), n, k, stride, at<float>(scales), at<int16_t>(multiples),
                               at<int16_t>(offsets), {group_size, offsets != 0}, at<void>(packed)});
  }

  void linear(const LinearArgs& args) {
    check_gated(table_, args);
    ThreadPool::Session session(pool_);
    table_.linear(pool_, args);
  }

  bool fuses_gate(int x_dtype, int weight_dtype, int64_t n) const {
    return table_.fuses_gate(DType(x_dtype), DType(weight_dtype), n);
  }

  void embedding(const EmbeddingArgs& args) {
    check_ids(args.ids, args.count, args.n);
    ThreadPool::Session session(pool_);
    table_.embedding(pool_, args);
  }

  void take_rows(const TakeArgs& args) {
    ThreadPool::Session session(pool_);
    table_.take_rows(pool_, args);
  }

  void rms_norm(const NormArgs& args) {
    ThreadPool::Session session(pool_);
    table_.rms_norm(pool_, args);
  }

  void gate(const GateArgs& args) {
    ThreadPool::Session session(pool_);
    table_.gate(pool_, args);
  }

  void add(const AddArgs& args) {
    ThreadPool::Session session(pool_);
    table_.add(pool_, args);
  }

  void soft_cap(Address x, int64_t count, double cap) {
    ThreadPool::Session session(pool_);
    table_.soft_cap(pool_, at<float>(x), count, static_cast<float>(cap));
  }

  void divide(Address x, int64_t count, double divisor) {
    ThreadPool::Session session(pool_);
    table_.divide(pool_, at<float>(x), count, static_cast<float>(divisor));
  }

  void rope_and_write_kv(const RopeArgs& args) {
    ThreadPool::Session session(pool_);
    table_.rope_and_write_kv(pool_, args);
  }

  void paged_attention(const AttentionArgs& args) {
    ThreadPool::Session session(pool_);
    table_.paged_attention(pool_, args);
  }

  // A program without calls yet, for the batch that they will be made with.
  Program begin_program(const StepArgs& recorded) { return {table_, recorded}; }

  void run(Program& program, const StepArgs& step, int64_t* nanoseconds) {
    check_ids(step.token_ids, step.num_tokens, program.vocab_size());
    check_rows(step);
    ThreadPool::Session session(pool_);
    program.run(pool_, step, nanoseconds);
  }

  void sample(Address logits, int64_t rows, int64_t vocab, Address temperature, Address top_k, Address top_p,
              Address min_p, Address seed, Address sample_index, Address position, Address out) {
    ThreadPool::Session session(pool_);
    table_.sample(pool_, {at<float>(logits), rows, vocab, at<float>(temperature), at<int32_t>(top_k), at<float>(top_p),
                          at<float>(min_p), at<int64_t>(seed), at<int32_t>(sample_index), at<int32_t>(position),
                          at<int64_t>(out)});
  }

  void top_tokens(Address values, int64_t rows, int64_t vocab, int64_t k, Address out_values, Address out_ids) {
    ThreadPool::Session session(pool_);
    table_.top_tokens(pool_, at<float>(values), rows, vocab, k, at<float>(out_values), at<int64_t>(out_ids));
  }

  int64_t spin_fma(int64_t rounds) {
    ThreadPool::Session session(pool_);
    return table_.spin_fma(pool_, rounds);
  }

  int64_t spin_bytes(int64_t rounds) {
    ThreadPool::Session session(pool_);
    return table_.spin_bytes(pool_, rounds);
  }

  int64_t spin_pairs(int64_t rounds) {
    ThreadPool::Session session(pool_);
    return table_.spin_pairs(pool_, rounds);
  }

  int64_t read_memory(Address data, int64_t bytes) {
    ThreadPool::Session session(pool_);
    return table_.read_memory(pool_, at<void>(data), bytes);
  }

  void gumbel_noise(int64_t seed, int32_t position, int32_t sample_index, int64_t first, int64_t count, Address out) {
    table_.gumbel_noise(seed, position, sample_index, first, count, at<float>(out));
  }

 private:
  const KernelTable& table_;
  ThreadPool pool_;
};

// Has the system give the pages of some memory, in time that nobody else has use for (where it has such a thing), until
// *stop is not zero. A byte of each page is written as it is, at once: others may write meanwhile.
void touch_pages(Address address, int64_t bytes, Address stop) {
#if defined(__linux__)
  const sched_param none{};
  sched_setscheduler(0, SCHED_IDLE, &none);  // of this thread; where that is refused, it is one like others
#endif
  constexpr int64_t kPage = 4096;
  for (int64_t i = 0; i < bytes && __atomic_load_n(at<uint8_t>(stop), __ATOMIC_RELAXED) == 0; i += kPage) {
    uint8_t* byte = at<uint8_t>(address) + i;
    uint8_t value = __atomic_load_n(byte, __ATOMIC_RELAXED);
    while (!__atomic_compare_exchange_n(byte, &value, value, false, __ATOMIC_RELAXED, __ATOMIC_RELAXED)) {
    }
  }
#if defined(__linux__)
  sched_setscheduler(0, SCHED_OTHER, &none);  // before it waits for Python's lock, and others for it
#endif
}

// Asks for huge pages before a large weight is written: fewer page walks while it streams.
void advise_huge_pages(Address address, int64_t bytes) {
#if defined(__linux__)
  constexpr Address kHugePage = Address{1} << 21;
  const Address first = (address + kHugePage - 1) / kHugePage * kHugePage;
  const Address last = (address + static_cast<Address>(bytes)) / kHugePage * kHugePage;
  if (first < last) madvise(at<void>(first), last - first, MADV_HUGEPAGE);  // advice: nothing depends on its success
#else
  (void)address, (void)bytes;
#endif
}

uint64_t xxh64(Address address, int64_t bytes, uint64_t seed) { return Xxh64::of(at<uint8_t>(address), bytes, seed); }

// A method that makes a call at once, and one that adds it to a program, of the function that reads its arguments.
template <auto kArgs, class Args, class... Values>
auto call_of(void (KernelSet::*method)(const Args&), Args (*)(Values...)) {
  return [method](KernelSet& set, Values... values) { (set.*method)(kArgs(values...)); };
}

template <auto kArgs, class Args>
auto calling(void (KernelSet::*method)(const Args&)) {
  return call_of<kArgs>(method, kArgs);
}

template <auto kArgs, class Args, class... Values>
auto addition_of(Args (*)(Values...)) {
  return [](Program& program, Values... values) { program.add(kArgs(values...)); };
}

template <auto kArgs>
auto adding() {
  return addition_of<kArgs>(kArgs);
}

Program begin_program(KernelSet& set, Address token_ids, int64_t num_tokens, const Rows& rows, Address output_rows,
                      int64_t num_outputs, const Rows& outputs) {
  return set.begin_program(step_args(token_ids, num_tokens, rows, output_rows, num_outputs, outputs));
}

void run_program(KernelSet& set, Program& program, Address token_ids, int64_t num_tokens, const Rows& rows,
                 Address output_rows, int64_t num_outputs, const Rows& outputs, Address nanoseconds) {
  const StepArgs step = step_args(token_ids, num_tokens, rows, output_rows, num_outputs, outputs);
  set.run(program, step, at<int64_t>(nanoseconds));
}

}  // namespace
}  // namespace octavo

NB_MODULE(_kernels, m) {
  using namespace octavo;
  m.doc() = "Compiled CPU kernels of octavo.";
  using Released = nb::call_guard<nb::gil_scoped_release>;
  m.def("instruction_sets", &octavo::instruction_sets, "What this processor can run, best first.");
  m.def("tiles_refused", &octavo::tiles_refused,
        "The errno with which the system refused AMX to this process; 0: it did not, or the processor has none.");
  m.def("advise_huge_pages", &octavo::advise_huge_pages);
  m.def("xxh64", &octavo::xxh64, Released());
  m.def("rejection_sample", &octavo::rejection_sample, nb::call_guard<nb::gil_scoped_release>());
  m.def("touch_pages", &octavo::touch_pages, nb::call_guard<nb::gil_scoped_release>());
  nb::class_<Program>(m, "Program")
      .def("linear", adding<linear_args>())
      .def("embedding", adding<embedding_args>())
      .def("take_rows", adding<take_args>())
      .def("rms_norm", adding<norm_args>())
      .def("gate", adding<gate_args>())
      .def("add", adding<add_args>())
      .def("rope_and_write_kv", adding<rope_args>())
      .def("paged_attention", adding<attention_args>());
  nb::class_<KernelSet>(m, "KernelSet")
      .def(nb::init<const std::string&, int, std::vector<int>>())
      .def_prop_ro("num_threads", &KernelSet::num_threads)
      .def("set_num_threads", &KernelSet::set_num_threads, Released())
      .def("shutdown", &KernelSet::shutdown, Released())
      .def("round_weight", &KernelSet::round_weight, Released())
      .def("pack_weight", &KernelSet::pack_weight, Released())
      .def("linear", calling<linear_args>(&KernelSet::linear), Released())
      .def("fuses_gate", &KernelSet::fuses_gate)
      .def("embedding", calling<embedding_args>(&KernelSet::embedding), Released())
      .def("take_rows", calling<take_args>(&KernelSet::take_rows), Released())
      .def("rms_norm", calling<norm_args>(&KernelSet::rms_norm), Released())
      .def("gate", calling<gate_args>(&KernelSet::gate), Released())
      .def("add", calling<add_args>(&KernelSet::add), Released())
      .def("soft_cap", &KernelSet::soft_cap, Released())
      .def("divide", &KernelSet::divide, Released())
      .def("rope_and_write_kv", calling<rope_args>(&KernelSet::rope_and_write_kv), Released())
      .def("paged_attention", calling<attention_args>(&KernelSet::paged_attention), Released())
      .def("begin_program", &begin_program, nb::keep_alive<0, 1>())
      .def("run", &run_program, Released())
      .def("sample", &KernelSet::sample, Released())
      .def("top_tokens", &KernelSet::top_tokens, Released())
      .def("spin_fma", &KernelSet::spin_fma, Released())
      .def("spin_bytes", &KernelSet::spin_bytes, Released())
      .def("spin_pairs", &KernelSet::spin_pairs, Released())
      .def("read_memory", &KernelSet::read_memory, Released())
      .def("gumbel_noise", &KernelSet::gumbel_noise, Released());
}
