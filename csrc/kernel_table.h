// The table of one instruction set. Included by one translation unit each.
#pragma once

#include "attention.h"
#include "elementwise.h"
#include "limits.h"
#include "packing.h"
#include "rounding.h"
#include "sampling.h"

namespace octavo::OCTAVO_ISA {

constexpr KernelTable kTable{
    round_weight, pack_weight, linear,     fuses_gate, embedding,         take_rows,
    rms_norm,     gate,        add,        soft_cap,   divide,            rope_and_write_kv,
    paged_attention, sample,   top_tokens, spin_fma,   spin_bytes,        spin_pairs,
    read_memory,  gumbel_noise,
};

}  // namespace octavo::OCTAVO_ISA
