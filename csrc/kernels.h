// The list of the kernels that Python may call, and the type of their table, of which each instruction set has one.
//
// The file of a kernel holds its arguments, and under OCTAVO_ISA its code. To add a kernel, include its file here and add a line to
// the list. The kernel is then in the table of each instruction set and a method of octavo._kernels.KernelSet. If its arguments
// have kRows or `read`, it can be part of recorded steps (program.h).
#pragma once

#include "add.h"
#include "attention.h"
#include "attention_gate.h"
#include "divide.h"
#include "elementwise.h"
#include "experts.h"
#include "gated_delta.h"
#include "gated_norm.h"
#include "grouped_linear.h"
#include "keep_rows.h"
#include "latent.h"
#include "linear_int4_tiles.h"  // linear, over all of its parts
#include "mamba2.h"
#include "multiply.h"
#include "packing.h"
#include "rank_experts.h"
#include "ranks.h"
#include "relu_squared.h"
#include "rounding.h"
#include "sampling.h"
#include "short_conv.h"
#include "soft_cap.h"
#include "thread_pool.h"

// KERNEL(name of the function, type of its arguments)
#define OCTAVO_KERNELS(KERNEL)              \
  KERNEL(round_weight, RoundArgs)           \
  KERNEL(pack_weight, PackArgs)             \
  KERNEL(linear, LinearArgs)                \
  KERNEL(grouped_linear, GroupedLinearArgs) \
  KERNEL(head_linear, HeadLinearArgs)       \
  KERNEL(choose_experts, ChooseExpertsArgs) \
  KERNEL(sort_by_expert, SortByExpertArgs)  \
  KERNEL(add_experts, AddExpertsArgs)       \
  KERNEL(embedding, EmbeddingArgs)          \
  KERNEL(take_rows, TakeArgs)               \
  KERNEL(gather, GatherArgs)                \
  KERNEL(share_rows, ShareRowsArgs)         \
  KERNEL(add_rank_experts, AddRankExpertsArgs) \
  KERNEL(rms_norm, NormArgs)                \
  KERNEL(gate, GateArgs)                    \
  KERNEL(add, AddArgs)                      \
  KERNEL(soft_cap, SoftCapArgs)             \
  KERNEL(copy_rows, TwoHeadsArgs)           \
  KERNEL(sigmoid_gate, TwoHeadsArgs)        \
  KERNEL(divide, DivideArgs)                \
  KERNEL(multiply, MultiplyArgs)            \
  KERNEL(relu_squared, ReluSquaredArgs)     \
  KERNEL(rope_and_write_kv, RopeArgs)       \
  KERNEL(rope_and_write_latents, LatentArgs) \
  KERNEL(paged_attention, AttentionArgs)    \
  KERNEL(short_conv, ShortConvArgs)         \
  KERNEL(gated_delta, GatedDeltaArgs)       \
  KERNEL(mamba2, Mamba2Args)                \
  KERNEL(keep_rows, KeepRowsArgs)           \
  KERNEL(gated_norm, GatedNormArgs)         \
  KERNEL(sample, SampleArgs)                \
  KERNEL(sample_columns, SampleColumnsArgs) \
  KERNEL(top_tokens, TopTokensArgs)

namespace octavo {

template <class Args>
using Kernel = void (*)(ThreadPool&, const Args&);

struct KernelTable {
#define OCTAVO_FIELD(name, Args) Kernel<Args> name;
  OCTAVO_KERNELS(OCTAVO_FIELD)
#undef OCTAVO_FIELD
  bool (*fuses_gate)(DType x_dtype, DType weight_dtype, int64_t n);  // whether linear computes `gated` products of these types
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
