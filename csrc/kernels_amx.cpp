#define OCTAVO_ISA amx
#define OCTAVO_ISA_AVX512
#define OCTAVO_ISA_VNNI
#define OCTAVO_ISA_BF16
#define OCTAVO_ISA_AMX
#include "kernel_table.h"

namespace octavo {
const KernelTable kAmxKernels = amx::kTable;
}
