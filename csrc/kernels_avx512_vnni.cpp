#define OCTAVO_ISA avx512_vnni
#define OCTAVO_ISA_AVX512
#define OCTAVO_ISA_VNNI
#include "kernel_table.h"

namespace octavo {
const KernelTable kAvx512VnniKernels = avx512_vnni::kTable;
}
