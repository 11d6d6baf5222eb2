// The table of one instruction set. One translation unit for each instruction set includes this file.
#pragma once

#include "kernels.h"
#include "limits.h"

namespace octavo::OCTAVO_ISA {

#define OCTAVO_ENTRY(name, Args) name,
constexpr KernelTable kTable{
    OCTAVO_KERNELS(OCTAVO_ENTRY) fuses_gate, spin_fma, spin_bytes, spin_pairs, read_memory, gumbel_noise,
};
#undef OCTAVO_ENTRY

}  // namespace octavo::OCTAVO_ISA
