#define OCTAVO_ISA avx512
#define OCTAVO_ISA_AVX512
#include "kernel_table.h"

namespace octavo {
const KernelTable kAvx512Kernels = avx512::kTable;
}
