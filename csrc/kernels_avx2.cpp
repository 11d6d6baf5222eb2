#define OCTAVO_ISA avx2
#define OCTAVO_ISA_AVX2
#include "kernel_table.h"

namespace octavo {
const KernelTable kAvx2Kernels = avx2::kTable;
}
