#define OCTAVO_ISA portable
#include "kernel_table.h"

namespace octavo {
const KernelTable kPortableKernels = portable::kTable;
}
