// Runs the thread pool and every kernel on odd shapes, for tools/sanitize.py: built with a sanitizer, it detects races,
// accesses past the end of memory, and undefined behaviour. Results must have the same bits on one thread and on several.
//
// Usage: sanitize INSTRUCTION_SET ROUNDS. Writes one line with a hash of all results; exits with 1 if any two differ.
#include <atomic>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <string>
#include <thread>
#include <vector>

#include "kernels.h"
#include "xxh64.h"

#if defined(OCTAVO_HAS_AMX)
#include <sys/syscall.h>
#include <unistd.h>
#endif

namespace octavo {
namespace {

constexpr int kThreads = 3;

int num_failures = 0;

void expect(bool holds, const std::string& what) {
  if (holds) return;
  std::fprintf(stderr, "%s\n", what.c_str());
  ++num_failures;
}

// Memory of exactly the given size, aligned as the kernels require: a sanitizer detects an access of one byte more.
class Memory {
 public:
  explicit Memory(int64_t bytes) : size_(static_cast<size_t>(bytes)) {
    if (posix_memalign(&data_, 64, size_ == 0 ? 1 : size_) != 0) std::abort();
  }
  Memory(Memory&& other) noexcept : data_(other.data_), size_(other.size_) { other.data_ = nullptr; }
  Memory& operator=(Memory&& other) noexcept {
    std::swap(data_, other.data_);
    std::swap(size_, other.size_);
    return *this;
  }
  Memory(const Memory&) = delete;
  ~Memory() { std::free(data_); }

  template <class T = void>
  T* as() const {
    return static_cast<T*>(data_);
  }
  int64_t bytes() const { return static_cast<int64_t>(size_); }

 private:
  void* data_ = nullptr;
  size_t size_;
};

class Random {
 public:
  explicit Random(uint64_t seed) : state_(seed * 0x9E3779B97F4A7C15u + 1) {}

  uint64_t next() {
    state_ ^= state_ << 13;
    state_ ^= state_ >> 7;
    state_ ^= state_ << 17;
    return state_;
  }
  int64_t below(int64_t count) { return static_cast<int64_t>(next() % static_cast<uint64_t>(count)); }
  float real() { return static_cast<float>(below(2001) - 1000) / 1000.0f; }

  Memory bytes(int64_t count, uint8_t mask = 255) {
    Memory memory(count);
    for (int64_t i = 0; i < count; ++i) memory.as<uint8_t>()[i] = static_cast<uint8_t>(next()) & mask;
    return memory;
  }
  Memory floats(int64_t count) {
    Memory memory(count * 4);
    for (int64_t i = 0; i < count; ++i) memory.as<float>()[i] = real();
    return memory;
  }
  // Random numbers of type float32, bfloat16 or float16.
  Memory reals(DType type, int64_t count) {
    if (type == DType::kFloat32) return floats(count);
    Memory memory(count * 2);
    for (int64_t i = 0; i < count; ++i) {
      const float value = real();
      uint32_t bits;
      std::memcpy(&bits, &value, 4);
      const uint32_t half = bits == 0 ? 0 : (bits >> 16 & 0x8000) | (((bits >> 23 & 255) - 112) << 10) | (bits >> 13 & 1023);
      memory.as<uint16_t>()[i] = static_cast<uint16_t>(type == DType::kBFloat16 ? bits >> 16 : half);
    }
    return memory;
  }

 private:
  uint64_t state_;
};

struct Blocks {
  int64_t values, bytes, packed_bytes;
};

// Properties of the kinds of blocks, from kQ8_0 on (octavo.kernels.block_weight.BlockKind).
constexpr Blocks kBlocks[] = {{32, 34, 34},    {32, 18, 18},    {32, 20, 20},    {32, 22, 22}, {32, 24, 24},
                              {256, 144, 148}, {256, 176, 180}, {256, 210, 210}, {32, 17, 17}};

int64_t size_of(DType type) { return type == DType::kFloat32 ? 4 : type == DType::kInt8 ? 1 : 2; }
int64_t up(int64_t a, int64_t b) { return (a + b - 1) / b; }

// A pool of one thread, a pool of several threads, and a hash of all results.
class Run {
 public:
  Run(const KernelTable& table, Random& random) : table(table), random(random) {}

  // Calls make(pool, out) with both pools, and expects the same bytes.
  template <class F>
  void same(const std::string& what, int64_t out_bytes, const F& make) {
    const Memory one(out_bytes), many(out_bytes);
    std::memset(one.as(), 0, static_cast<size_t>(out_bytes));
    std::memset(many.as(), 0, static_cast<size_t>(out_bytes));
    {
      ThreadPool::Session session(alone_);
      make(alone_, one);
    }
    {
      ThreadPool::Session session(pool_);
      make(pool_, many);
    }
    expect(std::memcmp(one.as(), many.as(), static_cast<size_t>(out_bytes)) == 0, what + " depends on the threads");
    hash_ = Xxh64::of(one.as<uint8_t>(), out_bytes, hash_);
  }
  uint64_t hash() const { return hash_; }

  const KernelTable& table;
  Random& random;

 private:
  ThreadPool alone_{1}, pool_{kThreads};
  uint64_t hash_ = 0;
};

// A packed weight with all inputs of its product.
struct Weight {
  DType type;
  int64_t n, k;
  Int4Format int4;
  Memory packed;
};

Weight pack(Run& run, DType type, int64_t n, int64_t k, int64_t group_size, bool has_zeros) {
  Random& random = run.random;
  const int64_t columns = up(n, kPanelColumns) * kPanelColumns;
  PackArgs args{nullptr, type, n, k, k, nullptr, nullptr, nullptr, {0, false}, nullptr};
  int64_t bytes = 0;
  Memory source(0), scales = random.floats(n), multiples(0), offsets(0);
  if (type >= DType::kQ8_0) {
    const Blocks& blocks = kBlocks[static_cast<int>(type) - static_cast<int>(DType::kQ8_0)];
    args.stride = k / blocks.values * blocks.bytes;
    source = Memory(random.bytes(n * args.stride, 0x3B));  // half precision scales below 2
    bytes = columns * k / blocks.values * blocks.packed_bytes;
  } else if (type == DType::kInt4) {
    const int64_t groups = up(k, group_size);
    source = Memory(random.bytes(n * k, 15));
    multiples = Memory(n * groups * 2);
    offsets = Memory(has_zeros ? n * groups * 2 : 0);
    for (int64_t i = 0; i < n * groups; ++i) multiples.as<int16_t>()[i] = static_cast<int16_t>(random.below(128));
    for (int64_t i = 0; has_zeros && i < n * groups; ++i) {
      offsets.as<int16_t>()[i] = static_cast<int16_t>((random.below(16) - 8) * multiples.as<int16_t>()[i]);
    }
    args.multiples = multiples.as<int16_t>();
    args.offsets = has_zeros ? offsets.as<int16_t>() : nullptr;
    args.int4 = {group_size, has_zeros};
    args.scales = scales.as<float>();
    bytes = columns * (up(k, 8) * 4 + groups * (has_zeros ? 4 : 2) + 4);
  } else if (type == DType::kInt8) {
    source = Memory(random.bytes(n * k, 0x7E));
    args.scales = scales.as<float>();
    bytes = columns * (up(k, 4) * 4 + 8);
  } else {
    source = Memory(random.reals(type, n * k));
    const int64_t together = type == DType::kBFloat16 ? 2 : 1;
    bytes = columns * up(k, together) * together * size_of(type);
  }
  args.weight = source.as();
  Weight weight{type, n, k, args.int4, Memory(bytes)};
  run.same("pack_weight", bytes, [&](ThreadPool& pool, const Memory& out) {
    args.packed = out.as();
    run.table.pack_weight(pool, args);
    std::memcpy(weight.packed.as(), out.as(), static_cast<size_t>(bytes));
  });
  return weight;
}

void multiply(Run& run, const Weight& weight, DType x_dtype, int64_t rows, bool wide, bool gated) {
  Random& random = run.random;
  const int64_t n = weight.n, k = weight.k, stride = k + random.below(2) * 9, columns = up(n, kPanelColumns) * kPanelColumns;
  const bool is_ordered = weight.type == DType::kInt4 && random.below(2) == 0;
  const Memory x = random.reals(x_dtype, (rows - 1) * stride + k), bias = random.floats(columns);
  const Memory order(k * 4);
  for (int64_t i = 0; i < k; ++i) order.as<int32_t>()[i] = static_cast<int32_t>(k - 1 - i);
  const DType out_dtype = x_dtype == DType::kFloat32 || wide ? DType::kFloat32 : DType::kBFloat16;
  const int64_t features = gated ? n / 2 : n;
  LinearArgs args{x.as(),      x_dtype, stride, rows, weight.packed.as(), weight.type, n, k,
                  gated || random.below(2) == 0 ? nullptr : bias.as<float>(),
                  nullptr,     features, out_dtype, gated, Activation::kSilu, weight.int4,
                  is_ordered ? order.as<int32_t>() : nullptr, 0, up(n, kPanelColumns)};
  run.same("linear of type " + std::to_string(static_cast<int>(weight.type)), rows * features * size_of(out_dtype),
           [&](ThreadPool& pool, const Memory& out) {
             args.out = out.as();
             run.table.linear(pool, args);
           });
}

void embed(Run& run, const Weight& weight, DType out_dtype) {
  Random& random = run.random;
  const int64_t count = 1 + random.below(9);
  const Memory ids(count * 8);
  for (int64_t i = 0; i < count; ++i) ids.as<int64_t>()[i] = random.below(weight.n);
  EmbeddingArgs args{ids.as<int64_t>(), count, weight.packed.as(), weight.type, 0, weight.n, weight.n, weight.k, nullptr,
                     out_dtype, 1.5f, weight.int4};
  run.same("embedding", count * weight.k * size_of(out_dtype), [&](ThreadPool& pool, const Memory& out) {
    args.out = out.as();
    run.table.embedding(pool, args);
  });
}

// Exchanges of a single rank, whose areas have room for a few rows only.
void exchanges(Run& run) {
  Random& random = run.random;
  const int64_t rows = 1 + random.below(20), width = 8 * (1 + random.below(40)), stride = width + 8 * random.below(3);
  const Memory x = random.reals(DType::kFloat32, rows * stride / 4), ids(rows * 8);
  for (int64_t i = 0; i < rows; ++i) ids.as<int64_t>()[i] = random.below(100);
  const int64_t bytes = kRanksHeaderBytes + 2 * 64 * up(3 * width, 64);
  const int64_t columns[] = {0, width}, all_ids[] = {0, 100};
  run.same("gather", rows * width, [&](ThreadPool& pool, const Memory& out) {
    const Memory shared(bytes);
    std::memset(shared.as(), 0, bytes);
    Ranks ranks(reinterpret_cast<Address>(shared.as()), bytes, 0, 1, 1000);
    run.table.gather(pool, {&ranks, x.as(), stride, rows, columns, out.as()});
    run.table.gather(pool, {&ranks, x.as(), stride, rows, columns, nullptr});
    run.table.share_rows(pool, {&ranks, ids.as<int64_t>(), rows, all_ids, out.as(), width});
  });
}

void products(Run& run) {
  constexpr DType kFloats[] = {DType::kFloat32, DType::kBFloat16};
  constexpr int64_t kRows[] = {1, 2, 5, 17, 33, 70};
  for (int type = 0; type <= static_cast<int>(DType::kMXFP4); ++type) {
    const DType kind = static_cast<DType>(type);
    const int64_t n = 1 + run.random.below(3) * 32 + run.random.below(40);
    int64_t k = 1 + run.random.below(300);
    if (kind >= DType::kQ8_0) k = 256 * (1 + run.random.below(2));
    if (kind == DType::kInt4 && run.random.below(2) == 0) k = up(k, 32) * 32;
    const int64_t group_size = k % 32 == 0 && run.random.below(2) == 0 ? 32 : k;
    const Weight weight = pack(run, kind, n, k, group_size, run.random.below(2) == 0);
    const Weight halves = pack(run, kind, 128, k, group_size, false);
    for (const DType x_dtype : kFloats) {
      if (kind == DType::kBFloat16 && x_dtype == DType::kFloat32) continue;
      if ((kind == DType::kFloat32 || kind == DType::kFloat16) && x_dtype == DType::kBFloat16) continue;
      embed(run, weight, x_dtype);
      for (const int64_t rows : kRows) {
        multiply(run, weight, x_dtype, rows, run.random.below(2) == 0, false);
        if (run.table.fuses_gate(x_dtype, kind, 128)) multiply(run, halves, x_dtype, rows, false, true);
      }
    }
  }
}

void round_weights(Run& run) {
  for (const DType type : {DType::kFloat32, DType::kBFloat16, DType::kFloat16}) {
    for (const int64_t group_size : {int64_t{0}, int64_t{32}}) {
      const int64_t n = 1 + run.random.below(40), k = group_size == 0 ? 1 + run.random.below(300) : 32 * (1 + run.random.below(9));
      const int64_t groups = group_size == 0 ? 1 : k / group_size, stride = k + 3, scale_bytes = group_size == 0 ? 4 : 2;
      const Memory weight = run.random.reals(type, (n - 1) * stride + k);
      const int64_t values = up(n * k, 64) * 64, scales = up(n * groups * scale_bytes, 64) * 64;
      run.same("round_weight", values + scales + n * groups * 2, [&](ThreadPool& pool, const Memory& out) {
        auto* at = out.as<char>();
        run.table.round_weight(pool, {weight.as(), type, n, k, stride, group_size, at, at + values,
                                      group_size == 0 ? nullptr : at + values + scales});
      });
    }
  }
}

void elementwise(Run& run) {
  Random& random = run.random;
  for (const DType type : {DType::kFloat32, DType::kBFloat16}) {
    const int64_t rows = 1 + random.below(60), size = 1 + random.below(200), item = size_of(type);
    const Memory x = random.reals(type, rows * size), weight = random.reals(type, size), before = random.reals(type, rows * size);
    const int64_t bytes = rows * size * item;
    run.same("rms_norm", 2 * bytes, [&](ThreadPool& pool, const Memory& out) {
      auto* residual = out.as<char>() + bytes;
      std::memcpy(residual, before.as(), static_cast<size_t>(bytes));
      run.table.rms_norm(pool, {x.as(), residual, weight.as(), type, out.as(), type, rows, size, 1e-6f, 0.5f, 1, size});
    });
    run.same("add", bytes, [&](ThreadPool& pool, const Memory& out) {
      std::memcpy(out.as(), before.as(), static_cast<size_t>(bytes));
      run.table.add(pool, {x.as(), out.as(), type, rows, size, 0.5f});
    });
    run.same("relu_squared", bytes, [&](ThreadPool& pool, const Memory& out) {
      std::memcpy(out.as(), x.as(), static_cast<size_t>(bytes));
      run.table.relu_squared(pool, {out.as(), type, rows, size});
    });
    const Memory gate_up = random.reals(type, rows * 2 * size);
    for (const Activation activation : {Activation::kSilu, Activation::kGeluTanh}) {
      run.same("gate", bytes, [&](ThreadPool& pool, const Memory& out) {
        run.table.gate(pool, {gate_up.as(), out.as(), size, type, rows, size, activation, nullptr, 0});
      });
    }
    const auto begin = static_cast<int32_t>(random.below(rows)), end = begin + static_cast<int32_t>(random.below(rows - begin + 1));
    const int32_t starts[] = {begin, begin, end};
    const Memory of_groups = random.reals(type, end * 2 * size);
    run.same("gate of groups", end * size * item, [&](ThreadPool& pool, const Memory& out) {
      run.table.gate(pool, {of_groups.as(), out.as(), size, type, rows, size, Activation::kSilu, starts, 2});
    });
    const int64_t count = 1 + random.below(rows);
    const Memory taken(count * 8);
    for (int64_t i = 0; i < count; ++i) taken.as<int64_t>()[i] = random.below(rows);
    run.same("take_rows", count * size * item, [&](ThreadPool& pool, const Memory& out) {
      run.table.take_rows(pool, {x.as(), size * item, taken.as<int64_t>(), count, size * item, out.as()});
    });
    run.same("copy_rows and sigmoid_gate", rows * size * item, [&](ThreadPool& pool, const Memory& out) {
      const TokenHeads source{x.as(), size}, target{out.as(), size};
      run.table.copy_rows(pool, {source, target, type, rows, size});
      run.table.sigmoid_gate(pool, {target, source, type, rows, size});
    });
  }
  const int64_t count = 1 + random.below(5000);
  const Memory logits = random.floats(count);
  run.same("soft_cap and divide", count * 4, [&](ThreadPool& pool, const Memory& out) {
    std::memcpy(out.as(), logits.as(), static_cast<size_t>(count * 4));
    run.table.soft_cap(pool, {out.as<float>(), count, 2.0f});
    run.table.divide(pool, {out.as<float>(), count, 3.0f});
  });
  run.same("gumbel_noise", count * 4, [&](ThreadPool&, const Memory& out) {
    run.table.gumbel_noise(5, 6, 7, 3, count, out.as<float>());
  });
}

constexpr int64_t kBlockSize = 16, kMostBlocks = 80;

// New tokens of some sequences with a paged cache.
struct Sequences {
  explicit Sequences(Random& random)
      : count(1 + random.below(4)), query_start((count + 1) * 4), tables(count * kMostBlocks * 4) {
    query_start.as<int32_t>()[0] = 0;
    for (int64_t sequence = 0; sequence < count; ++sequence) {
      const int64_t known = random.below(3) == 0 ? 1030 : random.below(70), tokens = 1 + random.below(30);
      int32_t* table = tables.as<int32_t>() + sequence * kMostBlocks;
      for (int64_t i = 0; i < kMostBlocks; ++i) table[i] = i < up(known + tokens, kBlockSize) ? num_blocks++ : -1;
      for (int64_t position = known; position < known + tokens; ++position) {
        positions.push_back(position);
        slots.push_back(table[position / kBlockSize] * kBlockSize + position % kBlockSize);
      }
      query_start.as<int32_t>()[sequence + 1] = static_cast<int32_t>(positions.size());
    }
  }

  int64_t count;
  Memory query_start, tables;
  std::vector<int64_t> positions, slots;
  int32_t num_blocks = 0;
};

// Queries are rotated, keys and values written, then attention runs.
void attend(Run& run, DType type, DType kv_dtype, int64_t dim, bool interleaved) {
  Random& random = run.random;
  constexpr int64_t kKvHeads = 2, kHeads = 6;
  const Sequences sequences(random);
  const int64_t size = (kHeads + 2 * kKvHeads) * dim;
  const auto tokens = static_cast<int64_t>(sequences.positions.size());
  const bool is_rounded = kv_dtype == DType::kInt8;
  const int64_t head_size = kBlockSize * (is_rounded ? dim + 4 : dim), block_size = kKvHeads * head_size;
  const int64_t cache_bytes = sequences.num_blocks * block_size * size_of(kv_dtype);
  Memory keys = is_rounded ? random.bytes(cache_bytes, 0x3B) : random.reals(kv_dtype, cache_bytes / size_of(kv_dtype));
  Memory values = is_rounded ? random.bytes(cache_bytes, 0x3B) : random.reals(kv_dtype, cache_bytes / size_of(kv_dtype));
  const Memory qkv = random.reals(type, tokens * size), cos_sin = random.floats(1100 * dim), sinks = random.floats(kHeads);
  const int64_t q_bytes = tokens * size * size_of(type), out_bytes = tokens * kHeads * dim * size_of(type);
  const auto head = [&](char* q, int64_t index) { return q + index * dim * size_of(type); };
  for (const int64_t window : {int64_t{0}, int64_t{37}}) {
    run.same("attention", out_bytes + q_bytes, [&](ThreadPool& pool, const Memory& out) {
      char* q = out.as<char>() + out_bytes;
      std::memcpy(q, qkv.as(), static_cast<size_t>(q_bytes));
      const int64_t strides[] = {size, dim}, cache_strides[] = {block_size, head_size};
      RopeArgs rope{q, head(q, kHeads), head(q, kHeads + kKvHeads), {strides[0], strides[1]}, {strides[0], strides[1]},
                    {strides[0], strides[1]}, cos_sin.as<float>(), nullptr, sequences.positions.data(),
                    sequences.slots.data(), keys.as(),
                    values.as(), {cache_strides[0], cache_strides[1]}, {cache_strides[0], cache_strides[1]}, kv_dtype, type,
                    tokens, kHeads, kKvHeads, dim, dim / 2, interleaved, kBlockSize};
      run.table.rope_and_write_kv(pool, rope);
      AttentionArgs attention{q, {strides[0], strides[1]}, keys.as(), values.as(), {cache_strides[0], cache_strides[1]},
                              {cache_strides[0], cache_strides[1]}, kv_dtype, out.as(), kHeads * dim, type,
                              sequences.query_start.as<int32_t>(), sequences.tables.as<int32_t>(), kMostBlocks,
                              sequences.positions.data(), sequences.count,
                              kHeads, kKvHeads, dim, dim, kBlockSize, 0.25f, window, window == 0 ? 0.0f : 5.0f,
                              window == 0 ? sinks.as<float>() : nullptr};
      run.table.paged_attention(pool, attention);
    });
  }
}

void attention(Run& run) {
  for (const int64_t dim : {int64_t{16}, int64_t{40}, int64_t{64}, int64_t{128}}) {
    attend(run, DType::kFloat32, DType::kFloat32, dim, false);
    attend(run, DType::kBFloat16, DType::kBFloat16, dim, true);
    attend(run, DType::kBFloat16, DType::kInt8, dim, false);
    attend(run, DType::kFloat32, DType::kInt8, dim, true);
  }
}

// Multi-head latent attention: latents are normalized and written, queries rotated; values are the first part of a key.
void attend_latents(Run& run, DType type, DType kv_dtype, int64_t heads, int64_t rank, bool interleaved) {
  Random& random = run.random;
  constexpr int64_t kRotary = 16;
  const Sequences sequences(random);
  const auto tokens = static_cast<int64_t>(sequences.positions.size());
  const bool is_rounded = kv_dtype == DType::kInt8;
  const int64_t width = rank + kRotary, block_size = kBlockSize * (is_rounded ? width + 4 : width);
  const int64_t cache_bytes = sequences.num_blocks * block_size * size_of(kv_dtype);
  const Memory before = is_rounded ? random.bytes(cache_bytes, 0x3B) : random.reals(kv_dtype, cache_bytes / size_of(kv_dtype));
  const Memory q = random.reals(type, tokens * heads * kRotary), latents = random.reals(type, tokens * width);
  const Memory absorbed = random.reals(type, tokens * heads * width), weight = random.reals(type, rank);
  const Memory cos_sin = random.floats(1100 * kRotary);
  const int64_t query_bytes = absorbed.bytes(), out_bytes = tokens * heads * rank * size_of(type);
  run.same("latents", out_bytes + query_bytes + cache_bytes, [&](ThreadPool& pool, const Memory& out) {
    char* queries = out.as<char>() + out_bytes;
    char* cache = queries + query_bytes;
    std::memcpy(queries, absorbed.as(), static_cast<size_t>(query_bytes));
    std::memcpy(cache, before.as(), static_cast<size_t>(cache_bytes));
    run.table.rope_and_write_latents(
        pool, {q.as(), {heads * kRotary, kRotary}, latents.as(), width, weight.as(), type, 1e-6f, cos_sin.as<float>(),
               interleaved, sequences.positions.data(), sequences.slots.data(), cache, kv_dtype, block_size, kBlockSize, queries,
               {heads * width, width}, type, tokens, heads, rank, kRotary});
    run.table.paged_attention(
        pool, {queries, {heads * width, width}, cache, cache, {block_size, block_size}, {block_size, block_size}, kv_dtype,
               out.as(), heads * rank, type, sequences.query_start.as<int32_t>(), sequences.tables.as<int32_t>(), kMostBlocks,
               sequences.positions.data(), sequences.count, heads, 1, width, rank, kBlockSize, 0.25f, 0, 0.0f, nullptr});
  });
}

void latents(Run& run) {
  for (const int64_t rank : {int64_t{48}, int64_t{512}}) {
    attend_latents(run, DType::kFloat32, DType::kFloat32, 5, rank, false);
    attend_latents(run, DType::kBFloat16, DType::kBFloat16, 20, rank, true);
    attend_latents(run, DType::kBFloat16, DType::kInt8, 20, rank, false);
  }
}

// Sequences with recurrent states. A sequence may have no rows, read zeros, drop its state, or replay kept rows; half of them save a
// state, and half of the rows are kept.
struct StateRows {
  explicit StateRows(Random& random) : count(1 + random.below(4)), slots(3 * count), start({0}) {
    for (int64_t i = 0; i < count; ++i) {
      const int64_t replayed = random.below(kMostReplayed + 1), tokens = random.below(4) == 0 ? random.below(150) : random.below(9);
      const int64_t all = replayed + tokens, first = start.back(), slot = 3 * i;
      for (int64_t row = 0; row < replayed; ++row) add(sources, -1 - (kMostReplayed * i + row));
      for (int64_t row = 0; row < tokens; ++row) {
        if (random.below(2) == 0) {
          add(keep_from, rows);
          add(keep_to, kept_rows() + rows);
        }
        add(sources, rows++);
      }
      add(start, first + all);
      add(read, random.below(3) == 0 ? -1 : slot);
      add(write, random.below(3) == 0 ? -1 : slot + random.below(2));
      add(write_rows, random.below(2) == 0 ? all : random.below(all + 1));
      if (all == 0 || random.below(2) == 0) continue;
      add(saved, first + random.below(all));
      add(saved_slots, slot + 2);
    }
  }
  static void add(std::vector<int32_t>& numbers, int64_t number) { numbers.push_back(static_cast<int32_t>(number)); }
  static int64_t size(const std::vector<int32_t>& numbers) { return static_cast<int64_t>(numbers.size()); }
  int64_t kept_rows() const { return kMostReplayed * count; }
  StateBatchArgs batch() const {
    StateBatchArgs args;
    args.query_start = start.data();
    args.num_seqs = count;
    args.sources = sources.data();
    args.num_state_rows = size(sources);
    args.read_slots = read.data();
    args.write_slots = write.data();
    args.write_rows = write_rows.data();
    args.saved_rows = saved.data();
    args.saved_slots = saved_slots.data();
    args.num_saved = size(saved);
    args.keep_from = keep_from.data();
    args.keep_to = keep_to.data();
    args.num_keep = size(keep_from);
    return args;
  }

  static constexpr int64_t kMostReplayed = 3;
  int64_t count, slots, rows = 0;
  std::vector<int32_t> start, sources, read, write, write_rows, saved, saved_slots, keep_from, keep_to;
};

// Computes rows into the first bytes of `out`, and advances a copy of the states, which follows.
template <class F>
void advance(Run& run, const std::string& what, const Memory& states, int64_t bytes, const F& make) {
  const int64_t rounded = up(bytes, 64) * 64;
  run.same(what, rounded + states.bytes(), [&](ThreadPool& pool, const Memory& out) {
    char* state = out.as<char>() + rounded;
    std::memcpy(state, states.as(), static_cast<size_t>(states.bytes()));
    make(pool, out.as(), state);
  });
}

void advance_states(Run& run, DType type) {
  Random& random = run.random;
  const StateRows of(random);
  const int64_t rows = of.rows, kept = of.kept_rows(), item = size_of(type), gap = random.below(9);
  const int64_t groups = 1 + random.below(2), heads = groups * (1 + random.below(3)), depth = 1 + random.below(70), tiles = 1 + random.below(5);
  const int64_t width = heads * tiles * kStateColumns, size = width + 2 * groups * depth, channels = 1 + random.below(700), taps = 2 + random.below(7);
  const auto made = [&](const Memory& memory, int64_t stride) { return Rows{memory.as(), type, stride}; };
  const auto apart = [&](int64_t n, int64_t columns) { return random.reals(type, n == 0 ? 0 : (n - 1) * (columns + gap) + columns); };
  const Memory x = apart(rows, size), steps = random.reals(type, rows * heads), kept_x = apart(kept, size), kept_steps = random.reals(type, kept * heads);
  const SourceRows all{made(x, size + gap), made(kept_x, size + gap)}, rates{made(steps, heads), made(kept_steps, heads)};
  const Memory of_heads = random.floats(heads), states = random.floats(of.slots * width * depth);
  const auto* numbers = of_heads.as<float>();
  const auto matrices = [&](char* state) {
    return MatrixStates{reinterpret_cast<float*>(state), width * depth, of.slots, heads, tiles, depth};
  };
  advance(run, "gated_delta", states, rows * width * item, [&](ThreadPool& pool, void* out, char* state) {
    run.table.gated_delta(pool, {{of.batch()}, all, rates, rates, numbers, numbers, matrices(state), groups, taps % 2 == 0, {out, type, width}, rows, kept});
  });
  advance(run, "mamba2", states, rows * width * item, [&](ThreadPool& pool, void* out, char* state) {
    run.table.mamba2(pool, {{of.batch()}, all, rates, numbers, numbers, numbers, 0.1f, 2.0f, matrices(state), groups, {out, type, width}, rows, kept});
  });
  const Memory inputs = apart(rows, channels), kept_inputs = apart(kept, channels), weight = random.floats(taps * channels), bias = random.floats(channels);
  const Memory old = random.reals(type, of.slots * (taps - 1) * channels);
  advance(run, "short_conv", old, rows * channels * item, [&](ThreadPool& pool, void* out, char* state) {
    run.table.short_conv(pool, {{of.batch()}, {made(inputs, channels + gap), made(kept_inputs, channels + gap)}, weight.as<float>(), taps % 2 == 0 ? nullptr : bias.as<float>(),
                                {state, type, (taps - 1) * channels}, of.slots, groups == 1, {out, type, channels}, rows, kept, channels, taps});
  });
  const int64_t together = size + channels;
  run.same("keep_rows", (kept + rows) * together * item, [&](ThreadPool& pool, const Memory& out) {
    std::memset(out.as(), 0, static_cast<size_t>(out.bytes()));
    run.table.keep_rows(pool, {{of.batch()}, {made(x, size + gap), {nullptr, type, 0}, made(inputs, channels + gap)}, {size, 0, channels},
                               {out.as(), type, together}, rows, kept + rows});
  });
  const Memory factors = random.reals(type, rows * channels);
  run.same("multiply", rows * channels * item, [&](ThreadPool& pool, const Memory& out) {
    std::memcpy(out.as(), factors.as(), static_cast<size_t>(rows * channels * item));
    run.table.multiply(pool, {{out.as(), type, channels}, made(inputs, channels + gap), rows, channels});
  });
  const Memory gates = random.reals(type, rows * width), weights = random.reals(type, width / heads);
  run.same("gated_norm", rows * width * item, [&](ThreadPool& pool, const Memory& out) {
    run.table.gated_norm(pool, {made(x, size + gap), made(gates, width), weights.as(), type, 0, 1e-6f, width / heads, groups == 1,
                                {out.as(), type, width}, rows, width});
  });
}

void recurrent(Run& run) {
  for (const DType type : {DType::kFloat32, DType::kBFloat16, DType::kFloat16}) advance_states(run, type);
}

// Packed weights of one shape, as grouped_linear.h reads them.
struct Weights {
  Weights(Run& run, DType type, int64_t count, int64_t n, int64_t k, bool has_biases)
      : count(count), n(n), k(k), biases(run.random.floats(up(n, kPanelColumns) * kPanelColumns)), fields(count * WeightTable::kFields * 8) {
    for (int64_t i = 0; i < count; ++i) {
      weights.push_back(pack(run, type, n, k, k, false));
      const Weight& each = weights.back();
      const int64_t of_weight[] = {reinterpret_cast<int64_t>(each.packed.as()), has_biases ? reinterpret_cast<int64_t>(biases.as()) : 0,
                                   0, static_cast<int64_t>(type), each.int4.group_size, each.int4.has_zeros};
      std::memcpy(fields.as<int64_t>() + i * WeightTable::kFields, of_weight, sizeof(of_weight));
    }
  }
  WeightTable table() const { return {fields.as<int64_t>(), count}; }

  int64_t count, n, k;
  Memory biases, fields;
  std::vector<Weight> weights;
};

LinearArgs product_of(const Weights& weights, const Memory& x, DType type, int64_t x_stride, void* out, int64_t out_stride, DType out_dtype) {
  LinearArgs product{};
  product.x = x.as();
  product.x_dtype = type;
  product.x_stride = x_stride;
  product.n = weights.n;
  product.k = weights.k;
  product.out = out;
  product.out_stride = out_stride;
  product.out_dtype = out_dtype;
  return product;
}

// A mixture of experts: the choice of experts, their rows in order, their products, and the sum of the outputs.
void mix(Run& run, DType weight_type, DType type, int64_t k) {
  Random& random = run.random;
  const int64_t groups = 1 + random.below(2), experts = groups * (1 + random.below(5)), size = 1 + random.below(130);
  const int64_t chosen = 1 + random.below(experts / groups), rows = 1 + random.below(300), count = rows * chosen;
  const Memory logits = random.floats(rows * experts), bias = random.floats(experts);
  const Memory expert_factors = random.floats(experts);
  const Memory ids(count * 4), factors(count * 4), sources(count * 8), places(count * 4), starts((experts + 1) * 4);
  const auto scoring = Scoring(random.below(3));
  run.same("choose_experts", count * 8, [&](ThreadPool& pool, const Memory& out) {
    auto* out_ids = out.as<int32_t>();
    auto* out_factors = reinterpret_cast<float*>(out_ids + count);
    run.table.choose_experts(pool, {logits.as<float>(), groups == 1 ? nullptr : bias.as<float>(),
                                    chosen % 2 ? nullptr : expert_factors.as<float>(), out_ids, out_factors, rows, experts,
                                    chosen, scoring, groups, 1, scoring == Scoring::kSoftmax, 1e-20f, 1.5f});
    std::memcpy(ids.as(), out_ids, static_cast<size_t>(count * 4));
    std::memcpy(factors.as(), out_factors, static_cast<size_t>(count * 4));
  });
  run.same("sort_by_expert", 0, [&](ThreadPool& pool, const Memory&) {
    run.table.sort_by_expert(pool, {ids.as<int32_t>(), sources.as<int64_t>(), places.as<int32_t>(), starts.as<int32_t>(), rows, chosen, experts});
  });
  const Weights weights(run, weight_type, experts, size, k, random.below(2) == 0);
  const Memory x = random.reals(type, rows * k), shared = random.floats(rows * size), gate = random.floats(rows);
  const Memory outputs(count * size * 4);
  run.same("grouped_linear", count * size * 4, [&](ThreadPool& pool, const Memory& out) {
    run.table.grouped_linear(pool, {product_of(weights, x, type, k, out.as(), size, DType::kFloat32), sources.as<int64_t>(),
                                    starts.as<int32_t>(), weights.table(), count});
    std::memcpy(outputs.as(), out.as(), static_cast<size_t>(count * size * 4));
  });
  run.same("add_experts", rows * size * size_of(type), [&](ThreadPool& pool, const Memory& out) {
    run.table.add_experts(pool, {outputs.as<float>(), ids.as<int32_t>(), places.as<int32_t>(), factors.as<float>(), shared.as<float>(),
                                 gate.as<float>(), out.as(), type, rows, size, chosen, experts});
  });
  const int64_t bytes = kRanksHeaderBytes + 2 * 64 * up(3 * size * 4, 64), columns[] = {0, size}, all_experts[] = {0, experts};
  run.same("add_rank_experts", rows * size * size_of(type), [&](ThreadPool& pool, const Memory& out) {
    const Memory area(bytes);
    std::memset(area.as(), 0, bytes);
    Ranks ranks(reinterpret_cast<Address>(area.as()), bytes, 0, 1, 1000);  // few rows at a time
    const AddExpertsArgs own{outputs.as<float>(), ids.as<int32_t>(), places.as<int32_t>(), factors.as<float>(), nullptr,
                             nullptr, nullptr, type, rows, size, chosen, experts};
    run.table.add_rank_experts(pool, {own, &ranks, all_experts, columns, shared.as<float>(), gate.as<float>(), out.as(), type, rows});
  });
  const Memory heads = random.reals(type, rows * experts * k);
  run.same("head_linear", rows * experts * size * size_of(type), [&](ThreadPool& pool, const Memory& out) {
    run.table.head_linear(pool, {product_of(weights, heads, type, experts * k, out.as(), experts * size, type), k, size, weights.table(), rows});
  });
}

void mixtures(Run& run) {
  mix(run, DType::kFloat32, DType::kFloat32, 1 + run.random.below(200));
  mix(run, DType::kBFloat16, DType::kBFloat16, 1 + run.random.below(200));
  mix(run, DType::kInt8, DType::kBFloat16, 1 + run.random.below(200));
  mix(run, DType::kInt4, DType::kBFloat16, 32 * (1 + run.random.below(6)));
  for (int type = static_cast<int>(DType::kQ8_0); type <= static_cast<int>(DType::kMXFP4); ++type) {
    mix(run, static_cast<DType>(type), DType::kBFloat16, 256);
  }
}

void sampling(Run& run) {
  Random& random = run.random;
  const int64_t rows = 1 + random.below(7), vocab = 1 + random.below(9000), k = 1 + random.below(vocab < 50 ? vocab : 50);
  const Memory logits = random.floats(rows * vocab), temperature(rows * 4), top_k(rows * 4), top_p(rows * 4), min_p(rows * 4),
               seed(rows * 8), index(rows * 4), position(rows * 4);
  for (int64_t row = 0; row < rows; ++row) {
    temperature.as<float>()[row] = static_cast<float>(random.below(3)) * 0.7f;
    top_k.as<int32_t>()[row] = random.below(2) == 0 ? static_cast<int32_t>(vocab) : static_cast<int32_t>(1 + random.below(vocab));
    top_p.as<float>()[row] = random.below(2) == 0 ? 1.0f : 0.7f;
    min_p.as<float>()[row] = random.below(2) == 0 ? 0.0f : 0.1f;
    seed.as<int64_t>()[row] = static_cast<int64_t>(random.next() >> 1);
    index.as<int32_t>()[row] = position.as<int32_t>()[row] = static_cast<int32_t>(row);
  }
  run.same("sample", rows * 8, [&](ThreadPool& pool, const Memory& out) {
    run.table.sample(pool, {logits.as<float>(), rows, vocab, temperature.as<float>(), top_k.as<int32_t>(), top_p.as<float>(),
                            min_p.as<float>(), seed.as<int64_t>(), index.as<int32_t>(), position.as<int32_t>(), out.as<int64_t>()});
  });
  const int64_t rank_bytes = kRanksHeaderBytes + 2 * 64 * up(48, 64);  // few rows at a time
  run.same("sample_columns", rows * 8, [&](ThreadPool& pool, const Memory& out) {
    Memory shared(rank_bytes), all(rows * 4), full(rows * 4);
    std::memset(shared.as(), 0, rank_bytes);
    std::memset(all.as(), 0, rows * 4);
    for (int64_t row = 0; row < rows; ++row) full.as<float>()[row] = 1.0f;
    Ranks ranks(reinterpret_cast<Address>(shared.as()), rank_bytes, 0, 1, 1000);
    run.table.sample_columns(pool, {&ranks, {logits.as<float>(), rows, vocab, temperature.as<float>(), all.as<int32_t>(), full.as<float>(), all.as<float>(),
                                             seed.as<int64_t>(), index.as<int32_t>(), position.as<int32_t>(), out.as<int64_t>()}, 0});
  });
  run.same("top_tokens", rows * k * 16, [&](ThreadPool& pool, const Memory& out) {
    run.table.top_tokens(pool, {logits.as<float>(), rows, vocab, k, out.as<float>(), reinterpret_cast<int64_t*>(out.as<char>() + rows * k * 8)});
  });
}

// Callers on several threads share a pool while its size changes; each index of a job is computed exactly once.
void share_pool(int rounds) {
  ThreadPool pool(kThreads);
  std::atomic<bool> is_over{false};
  const auto call = [&](int64_t seed) {
    for (int round = 0; round < rounds; ++round) {
      ThreadPool::Session session(pool);
      const int64_t count = (seed + round) % 40;
      std::vector<int> counts(static_cast<size_t>(count));  // no atomics: each index has one writer
      pool.reserve_local(64);
      std::memset(pool.shared(256), round, 256);
      pool.run(
          count, [](void* context, int64_t index, int64_t, int) { ++static_cast<int*>(context)[index]; }, counts.data(),
          round % 2 == 0);
      for (const int each : counts) expect(each == 1, "an index was not computed once");
    }
  };
  std::vector<std::thread> callers;
  for (int i = 0; i < 2; ++i) callers.emplace_back(call, 7 * i);
  std::thread resizer([&] {
    for (int i = 0; !is_over.load(); ++i) {
      pool.set_num_threads(1 + i % 4);
      expect(pool.num_threads() >= 1, "a pool has no threads");
      std::this_thread::yield();
    }
  });
  for (auto& caller : callers) caller.join();
  is_over.store(true);
  resizer.join();
  pool.shutdown();
  call(3);  // only on the caller's thread
}

const KernelTable* table_of(const std::string& isa) {
  if (isa == "portable") return &kPortableKernels;
#if defined(__x86_64__)
#if defined(OCTAVO_HAS_AMX)
  if (isa == "amx") return syscall(SYS_arch_prctl, 0x1023, 18) == 0 ? &kAmxKernels : nullptr;
#endif
  if (isa == "avx512_bf16") return &kAvx512Bf16Kernels;
  if (isa == "avx512_vnni") return &kAvx512VnniKernels;
  if (isa == "avx512") return &kAvx512Kernels;
  if (isa == "avx2") return &kAvx2Kernels;
#endif
  return nullptr;
}

}  // namespace
}  // namespace octavo

int main(int argc, char** argv) {
  using namespace octavo;
  if (argc != 3) return 2;
  const int rounds = std::atoi(argv[2]);
  share_pool(100 * rounds);
  uint64_t hash = 0;
  if (const std::string isa = argv[1]; isa != "none") {
    const KernelTable* table = table_of(isa);
    if (table == nullptr) return 2;
    for (int round = 0; round < rounds; ++round) {
      Random random(static_cast<uint64_t>(round) + 1);
      Run run(*table, random);
      products(run);
      exchanges(run);
      round_weights(run);
      elementwise(run);
      attention(run);
      latents(run);
      recurrent(run);
      mixtures(run);
      sampling(run);
      hash = Xxh64::of(reinterpret_cast<const uint8_t*>(&hash), sizeof(hash), run.hash());
    }
  }
  std::printf("%s %016llx\n", argv[1], static_cast<unsigned long long>(hash));
  return num_failures == 0 ? 0 : 1;
}
