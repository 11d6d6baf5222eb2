// octavo._kernels: the kernels for Python. Tensors are passed as addresses (tensor.data_ptr()), shapes and strides, so that a call
// costs about two microseconds and this library needs no torch. Callers must check types and shapes, except those of `Tensor`.
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

// A `Tensor` is passed as (address, number of its dtype, shape, strides).
template <>
struct nanobind::detail::type_caster<octavo::Tensor> {
  using Parts = std::tuple<octavo::Address, int, std::vector<int64_t>, std::vector<int64_t>>;
  NB_TYPE_CASTER(octavo::Tensor, make_caster<Parts>::Name)

  bool from_python(handle source, uint8_t flags, cleanup_list* cleanup) noexcept {
    make_caster<Parts> parts;
    if (!parts.from_python(source, flags, cleanup)) return false;
    auto [address, dtype, shape, strides] = parts.operator cast_t<Parts>();
    value = {address, octavo::DType(dtype), std::move(shape), std::move(strides)};
    return true;
  }
};

// A `StateBatchArgs` is passed as the tuple of its members.
template <>
struct nanobind::detail::type_caster<octavo::StateBatchArgs> {
  using Address = octavo::Address;
  using Parts = std::tuple<Address, int64_t, Address, int64_t, Address, Address, Address, Address, Address, int64_t, Address,
                           Address, int64_t>;
  NB_TYPE_CASTER(octavo::StateBatchArgs, make_caster<Parts>::Name)

  bool from_python(handle source, uint8_t flags, cleanup_list* cleanup) noexcept {
    make_caster<Parts> parts;
    if (!parts.from_python(source, flags, cleanup)) return false;
    const auto [query_start, num_seqs, sources, num_state_rows, read_slots, write_slots, write_rows, saved_rows, saved_slots,
                num_saved, keep_from, keep_to, num_keep] = parts.operator cast_t<Parts>();
    const auto array = [](Address address) { return octavo::at<int32_t>(address); };
    value.query_start = array(query_start);
    value.num_seqs = num_seqs;
    value.sources = array(sources);
    value.num_state_rows = num_state_rows;
    value.read_slots = array(read_slots);
    value.write_slots = array(write_slots);
    value.write_rows = array(write_rows);
    value.saved_rows = array(saved_rows);
    value.saved_slots = array(saved_slots);
    value.num_saved = num_saved;
    value.keep_from = array(keep_from);
    value.keep_to = array(keep_to);
    value.num_keep = num_keep;
    return true;
  }
};

namespace octavo {
namespace {

// The permission to use AMX, which a process must request from Linux once. It holds for all threads.
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

// positions, slot_mapping, query_start, block_tables, their stride, num_seqs.
using Batch = std::tuple<Address, Address, Address, Address, int64_t, int64_t>;

BatchArgs batch_args(const Batch& batch) {
  const auto& [positions, slot_mapping, query_start, block_tables, block_table_stride, num_seqs] = batch;
  return {at<int64_t>(positions),    at<int64_t>(slot_mapping), at<int32_t>(query_start),
          at<int32_t>(block_tables), block_table_stride,        num_seqs};
}

// One for each KV group.
using Batches = std::vector<Batch>;

std::vector<BatchArgs> batches_args(const Batches& batches) {
  std::vector<BatchArgs> args;
  for (const Batch& batch : batches) args.push_back(batch_args(batch));
  return args;
}

StepArgs step_args(Address token_ids, int64_t num_tokens, const Batches& groups, Address output_rows, int64_t num_outputs,
                   const Batches& output_groups, const StateBatchArgs& states) {
  return {at<int64_t>(token_ids), num_tokens, batches_args(groups), at<int64_t>(output_rows), num_outputs,
          batches_args(output_groups), states};
}

// The kernels of one instruction set and the threads they run on.
class KernelSet {
 public:
  KernelSet(const std::string& isa, int num_threads, std::vector<int> cpus)
      : table_(table_of(isa)), pool_(num_threads, std::move(cpus)) {}

  int num_threads() const { return pool_.num_threads(); }
  void set_num_threads(int num_threads) { pool_.set_num_threads(num_threads); }
  void shutdown() { pool_.shutdown(); }

  template <class Args>
  void call(Kernel<Args> KernelTable::*kernel, const Args& args) {
    check(table_, args);
    ThreadPool::Session session(pool_);
    (table_.*kernel)(pool_, args);
  }

  bool fuses_gate(int x_dtype, int weight_dtype, int64_t n) const {
    return table_.fuses_gate(DType(x_dtype), DType(weight_dtype), n);
  }

  const KernelTable& table() const { return table_; }

  void run(Program& program, const StepArgs& step, int64_t* nanoseconds) {
    check_rows(step);
    ThreadPool::Session session(pool_);
    program.run(pool_, step, nanoseconds);
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

// Makes the system back memory with pages, at idle priority if the system has one, until *stop is not zero. It writes a byte of
// each page with its own value, in one atomic operation, because other threads may write meanwhile.
void touch_pages(Address address, int64_t bytes, Address stop) {
#if defined(__linux__)
  const sched_param none{};
  sched_setscheduler(0, SCHED_IDLE, &none);  // of this thread; if that is refused, it runs at normal priority
#endif
  constexpr int64_t kPage = 4096;
  for (int64_t i = 0; i < bytes && __atomic_load_n(at<uint8_t>(stop), __ATOMIC_RELAXED) == 0; i += kPage) {
    uint8_t* byte = at<uint8_t>(address) + i;
    uint8_t value = __atomic_load_n(byte, __ATOMIC_RELAXED);
    while (!__atomic_compare_exchange_n(byte, &value, value, false, __ATOMIC_RELAXED, __ATOMIC_RELAXED)) {
    }
  }
#if defined(__linux__)
  sched_setscheduler(0, SCHED_OTHER, &none);  // before it takes Python's lock, for which other threads wait
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

// Defines a method of KernelSet that runs a kernel, and, if the kernel can be recorded, a method of Program that adds a call.
template <class Args, class... Values>
void define(nb::class_<KernelSet>& set, nb::class_<Program>& program, const char* name, Kernel<Args> KernelTable::*kernel,
            Args (*of)(Values...)) {
  set.def(
      name, [kernel, of](KernelSet& kernels, Values... values) { kernels.call(kernel, of(values...)); },
      nb::call_guard<nb::gil_scoped_release>());
  if constexpr (kIsRecorded<Args>) {
    program.def(name, [kernel, of](Program& calls, Values... values) { calls.add(kernel, of(values...)); });
  }
}

Program begin_program(KernelSet& set, Address token_ids, int64_t num_tokens, const Batches& groups, Address output_rows,
                      int64_t num_outputs, const Batches& output_groups, const StateBatchArgs& states) {
  return {set.table(), step_args(token_ids, num_tokens, groups, output_rows, num_outputs, output_groups, states)};
}

void run_program(KernelSet& set, Program& program, Address token_ids, int64_t num_tokens, const Batches& groups,
                 Address output_rows, int64_t num_outputs, const Batches& output_groups, const StateBatchArgs& states,
                 Address nanoseconds) {
  const StepArgs step = step_args(token_ids, num_tokens, groups, output_rows, num_outputs, output_groups, states);
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
  nb::class_<Ranks>(m, "Ranks")
      .def(nb::init<Address, int64_t, int, int, int64_t>())
      .def_prop_ro("address", &Ranks::address)
      .def_prop_ro("failed_rank", &Ranks::failed_rank)
      .def("fail", &Ranks::fail);
  m.attr("ranks_header_bytes") = kRanksHeaderBytes;
  nb::class_<Program> program(m, "Program");
  nb::class_<KernelSet> set(m, "KernelSet");
#define OCTAVO_METHOD(name, Args) define(set, program, #name, &KernelTable::name, &Args::of);
  OCTAVO_KERNELS(OCTAVO_METHOD)
#undef OCTAVO_METHOD
  set.def(nb::init<const std::string&, int, std::vector<int>>())
      .def_prop_ro("num_threads", &KernelSet::num_threads)
      .def("set_num_threads", &KernelSet::set_num_threads, Released())
      .def("shutdown", &KernelSet::shutdown, Released())
      .def("fuses_gate", &KernelSet::fuses_gate)
      .def("begin_program", &begin_program, nb::keep_alive<0, 1>())
      .def("run", &run_program, Released())
      .def("spin_fma", &KernelSet::spin_fma, Released())
      .def("spin_bytes", &KernelSet::spin_bytes, Released())
      .def("spin_pairs", &KernelSet::spin_pairs, Released())
      .def("read_memory", &KernelSet::read_memory, Released())
      .def("gumbel_noise", &KernelSet::gumbel_noise, Released());
}
