#define OCTAVO_ISA avx512_bf16
#define OCTAVO_ISA_AVX512
#define OCTAVO_ISA_VNNI
#define OCTAVO_ISA_BF16
#include "kernel_table.h"

namespace octavo {
const KernelTable kAvx512Bf16Kernels = avx512_bf16::kTable;
}
