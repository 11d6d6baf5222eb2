// What Python may call: one table of functions per instruction set, all with plain pointers and sizes.
//
// Strides count elements. Pointers of bfloat16 or float16 data come with a DType. Shapes stand beside each field.
#pragma once

#include <cstdint>

#include "thread_pool.h"
#include "types.h"

namespace octavo {

constexpr int kPanelColumns = 32;  // columns of a packed weight that stand together

// Packed weight: [ceil(n / 32)] panels, zero padded. float32 and float16: [k][32]; bfloat16: [ceil(k / 2)][32][2]; int8:
// [ceil(k / 4)][32][4] of a rotated weight (rotation.h), and behind all panels float32 scales and int32 sums of the columns,
// [ceil(n / 32) * 32] each. int4: groups of k, each with int16 multiples [32] and perhaps zero points, then
// [ceil(k / 8)][32][4] bytes of two values, and behind all panels float32 units of the columns (linear_int4.h). Blocks of GGUF
// files, whose rows are whole blocks: groups of 32 k with their scales (block_formats.h).
struct Int4Format {
  int64_t group_size;  // k that share a scale: a multiple of 32, or all of them
  bool has_zeros;      // zero points of each group, else all are 8
};

enum class Activation : int { kSilu, kGeluTanh };  // as octavo.kernels.cpu.ACTIVATION_NUMBERS has them

struct LinearArgs {
  const void* x;  // [rows, k], float32 or bfloat16
  DType x_dtype;
  int64_t x_stride;
  int64_t rows;
  const void* weight;
  DType weight_dtype;
  int64_t n;
  int64_t k;
  const float* bias;  // [ceil(n / 32) * 32] or null
  void* out;          // [rows, out_features], float32 or bfloat16
  int64_t out_stride;
  DType out_dtype;
  bool gated;  // the first half of n are gates of the second one, and the result is that of `gate`; see fuses_gate
  Activation activation;  // of these gates
  Int4Format int4;        // of an int4 weight
  const int32_t* order;   // [k]: which column of x each k of an int4 weight meets, or null: they stand in one order

  int64_t out_features() const { return gated ? n / 2 : n; }
};

struct EmbeddingArgs {
  const int64_t* ids;  // [count], inside the vocabulary
  int64_t count;
  const void* packed;  // [n, k]
  DType weight_dtype;
  int64_t n;
  int64_t k;
  void* out;  // [count, k], contiguous
  DType out_dtype;
  float scale;      // every value is multiplied by it before it is rounded
  Int4Format int4;  // of a weight of that type
};

// A weight that is rounded to integers.
struct RoundArgs {
  const void* weight;  // [n, k]
  DType dtype;         // float32, bfloat16 or float16
  int64_t n;
  int64_t k;
  int64_t stride;
  int64_t group_size;  // int4: k that share a scale; 0: int8, rotated
  void* values;        // int8 or uint8 [n, k], contiguous
  void* scales;        // int8: float32 [n]; int4: bfloat16 [n, groups]
  void* zeros;         // int4: float16 [n, groups] of zero points, or null: all of them are 8
};

// A weight before it is packed.
struct PackArgs {
  const void* weight;  // [n, k]; int4: one value of 0 .. 15 a byte; blocks: [n, bytes of a row], `stride` apart
  DType dtype;
  int64_t n;
  int64_t k;
  int64_t stride;
  const float* scales;       // int8: [n]; int4: the units of the columns' scales [n]
  const int16_t* multiples;  // int4: of these units [n, groups]; times a value less its zero point, at most 32,639
  const int16_t* offsets;    // int4: (zero point - 8) times the multiple [n, groups] or null
  Int4Format int4;
  void* packed;
};

struct NormArgs {
  const void* x;   // [rows / together, together, size], the last two dimensions contiguous
  void* residual;  // [rows, size], contiguous, or null: x * scale is added to it, and the sum is normalized
  const void* weight;
  DType weight_dtype;
  void* out;
  DType dtype;  // of x, residual and out
  int64_t rows;
  int64_t size;
  float eps;
  float scale;       // of x where it is added
  int64_t together;  // rows of x that stand together: the heads of a token
  int64_t x_stride;  // from one such group to the next
};

struct GateArgs {
  const void* gate_up;  // [rows, 2 * size], contiguous
  void* out;            // [rows, size]
  int64_t out_stride;
  DType dtype;  // of both
  int64_t rows;
  int64_t size;
  Activation activation;
};

// sum += x * scale, rounded to their type.
struct AddArgs {
  const void* x;  // [rows, size], contiguous
  void* sum;      // likewise
  DType dtype;    // of both
  int64_t rows;
  int64_t size;
  float scale;
};

// Rows that are copied out of others.
struct TakeArgs {
  const void* x;
  int64_t x_stride;  // bytes between rows
  const int64_t* rows;  // [count], of x
  int64_t count;
  int64_t row_bytes;
  void* out;  // [count, row_bytes], contiguous
};

struct RopeArgs {
  void* q;        // [tokens, num_heads, head_dim]
  const void* k;  // [tokens, num_kv_heads, head_dim]
  const void* v;
  int64_t q_strides[2];  // of tokens and of heads
  int64_t k_strides[2];
  int64_t v_strides[2];
  const float* cos_sin;      // [max_positions, rotary_dim]: cosines, then sines
  const float* query_scale;  // [max_positions] of rotated queries, or null
  const int64_t* positions;
  const int64_t* slot_mapping;
  void* k_cache;  // [num_blocks, num_kv_heads, block_size, head_dim]; see kv_rows.h
  void* v_cache;
  int64_t k_cache_strides[2];  // of blocks and of heads
  int64_t v_cache_strides[2];
  DType kv_dtype;  // that of q, k and v, or int8
  DType dtype;
  int64_t tokens;
  int64_t num_heads;
  int64_t num_kv_heads;
  int64_t head_dim;
  int64_t rotary_dim;  // the first dimensions of a head, which turn; the others stay
  bool interleaved;    // each even one turns with the next, not each of the first half with one of the second
  int64_t block_size;
};

struct AttentionArgs {
  const void* q;  // [tokens, num_heads, head_dim]
  int64_t q_strides[2];
  void* k_cache;  // as in RopeArgs; only read
  void* v_cache;
  int64_t k_cache_strides[2];
  int64_t v_cache_strides[2];
  DType kv_dtype;
  void* out;  // [tokens, num_heads * head_dim]
  int64_t out_stride;
  DType dtype;
  const int32_t* query_start;   // [num_seqs + 1]
  const int32_t* block_tables;  // [num_seqs, block_table_stride]
  int64_t block_table_stride;
  const int64_t* positions;  // [tokens]
  int64_t num_seqs;
  int64_t num_heads;
  int64_t num_kv_heads;
  int64_t head_dim;
  int64_t block_size;
  float scale;
  int64_t window;  // 0: unlimited
  float softcap;   // of scores, or 0: none; see soft_cap
};

struct SampleArgs {
  const float* logits;  // [rows, vocab], contiguous
  int64_t rows;
  int64_t vocab;
  const float* temperature;
  const int32_t* top_k;
  const float* top_p;
  const float* min_p;
  const int64_t* seed;
  const int32_t* sample_index;
  const int32_t* position;
  int64_t* out;  // [rows]
};

struct KernelTable {
  void (*round_weight)(ThreadPool&, const RoundArgs&);
  void (*pack_weight)(ThreadPool&, const PackArgs&);
  void (*linear)(ThreadPool&, const LinearArgs&);
  bool (*fuses_gate)(DType x_dtype, DType weight_dtype, int64_t n);  // whether linear takes `gated` products of these
  void (*embedding)(ThreadPool&, const EmbeddingArgs&);
  void (*take_rows)(ThreadPool&, const TakeArgs&);
  void (*rms_norm)(ThreadPool&, const NormArgs&);
  void (*gate)(ThreadPool&, const GateArgs&);
  void (*add)(ThreadPool&, const AddArgs&);
  void (*soft_cap)(ThreadPool&, float* x, int64_t count, float cap);
  void (*divide)(ThreadPool&, float* x, int64_t count, float divisor);
  void (*rope_and_write_kv)(ThreadPool&, const RopeArgs&);
  void (*paged_attention)(ThreadPool&, const AttentionArgs&);
  void (*sample)(ThreadPool&, const SampleArgs&);
  void (*top_tokens)(ThreadPool&, const float* values, int64_t rows, int64_t vocab, int64_t k, float* out_values,
                     int64_t* out_ids);
  int64_t (*spin_fma)(ThreadPool&, int64_t rounds);
  int64_t (*spin_bytes)(ThreadPool&, int64_t rounds);
  int64_t (*spin_pairs)(ThreadPool&, int64_t rounds);
  int64_t (*read_memory)(ThreadPool&, const void* p, int64_t bytes);
  void (*gumbel_noise)(int64_t seed, int32_t position, int32_t sample_index, int64_t first, int64_t count, float* out);
};

#if defined(__x86_64__)
extern const KernelTable kAmxKernels;
extern const KernelTable kAvx512Bf16Kernels;
extern const KernelTable kAvx512VnniKernels;
extern const KernelTable kAvx512Kernels;
extern const KernelTable kAvx2Kernels;
#endif
extern const KernelTable kPortableKernels;

}  // namespace octavo
