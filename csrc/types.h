// Element types that Python passes by number.
#pragma once

#include <cstdint>

namespace octavo {

// From kQ8_0 to kMXFP4: weights in the blocks of GGUF files (block_formats.h).
enum class DType : int {
  kFloat32 = 0,
  kBFloat16 = 1,
  kFloat16 = 2,
  kInt8 = 3,
  kInt4 = 4,
  kQ8_0 = 5,
  kQ4_0 = 6,
  kQ4_1 = 7,
  kQ5_0 = 8,
  kQ5_1 = 9,
  kQ4_K = 10,
  kQ5_K = 11,
  kQ6_K = 12,
  kMXFP4 = 13,
  kInt32 = 14,  // this and the next: of a Tensor only
  kInt64 = 15,
};

// For storage only: arithmetic is in float32 lanes.
struct bf16 {
  uint16_t bits;
};

struct f16 {
  uint16_t bits;
};

}  // namespace octavo
