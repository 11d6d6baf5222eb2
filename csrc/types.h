// Element types that Python passes by number.
#pragma once

#include <cstdint>

namespace octavo {

enum class DType : int { kFloat32 = 0, kBFloat16 = 1, kFloat16 = 2, kInt8 = 3, kInt4 = 4 };

// Storage only: arithmetic happens in float32 lanes.
struct bf16 {
  uint16_t bits;
};

struct f16 {
  uint16_t bits;
};

}  // namespace octavo
