// The tile registers of AMX: eight of them, each 16 rows of 64 bytes. One instruction multiplies two tiles and adds the
// product to a third one: 16 x 16 sums of 32 products of bfloat16, or of 64 products of int8.
//
// In assembly, because GCC's intrinsics do not declare the memory that they read and write.
#pragma once

#include "vec.h"

namespace octavo::OCTAVO_ISA {

constexpr int kTileHeight = 16;       // rows of a tile
constexpr int64_t kTileStep = 64;     // bytes of a row: the k that one instruction multiplies
constexpr int64_t kTileBytes = kTileHeight * kTileStep;

// The shapes of a thread's tiles. They must be set before a tile is used, which clears all tiles. They are released at the end:
// otherwise the system would save the tiles at every switch of threads.
class Tiles {
 public:
  Tiles() = default;
  Tiles(const Tiles&) = delete;
  Tiles& operator=(const Tiles&) = delete;
  ~Tiles() {
    if (heights_ != 0) asm volatile("tilerelease" ::: "memory");
  }

  // heights, widths: the number of rows of each tile and the bytes of a row, one byte per tile, the first tile's lowest.
  OCTAVO_INLINE void hold(uint64_t heights, uint64_t widths = kWhole) {
    if (heights == heights_ && widths == widths_) return;
    heights_ = heights;
    widths_ = widths;
    Config config;
    for (int i = 0; i < kCount; ++i) {
      config.heights[i] = static_cast<uint8_t>(heights >> 8 * i);
      config.row_bytes[i] = config.heights[i] == 0 ? 0 : static_cast<uint8_t>(widths >> 8 * i);
    }
    asm volatile("ldtilecfg %0" : : "m"(config) : "memory");
  }

 private:
  static constexpr int kCount = 8;
  static constexpr uint64_t kWhole = 0x4040'4040'4040'4040u;
  static_assert(kTileStep == 0x40);
  struct alignas(64) Config {
    uint8_t palette = 1;
    uint8_t start_row = 0;
    uint8_t reserved[14] = {};
    uint16_t row_bytes[16] = {};
    uint8_t heights[16] = {};
  };
  static_assert(sizeof(Config) == 64);

  uint64_t heights_ = 0, widths_ = 0;
};

template <int kTile>
OCTAVO_INLINE void clear_tile() {
  asm volatile("tilezero %%tmm%c0" : : "i"(kTile));
}

// stride: bytes from one row to the next.
template <int kTile>
OCTAVO_INLINE void load_tile(const void* p, int64_t stride) {
  asm volatile("tileloadd (%0,%1,1), %%tmm%c2" : : "r"(p), "r"(stride), "i"(kTile) : "memory");
}

template <int kTile>
OCTAVO_INLINE void store_tile(void* p, int64_t stride) {
  asm volatile("tilestored %%tmm%c2, (%0,%1,1)" : : "r"(p), "r"(stride), "i"(kTile) : "memory");
}

// Tile kSums += rows of tile kRows times columns of tile kColumns, pairs of bfloat16. Each sum is a float32 to which two chains of
// multiply-adds are added, one of even k and one of odd k, each rounded to nearest; subnormal numbers count as zero.
template <int kSums, int kRows, int kColumns>
OCTAVO_INLINE void add_pair_tiles() {
  asm volatile("tdpbf16ps %%tmm%c0, %%tmm%c1, %%tmm%c2" : : "i"(kColumns), "i"(kRows), "i"(kSums));
}

// The same with signed bytes, four in a lane: sums are integers.
template <int kSums, int kRows, int kColumns>
OCTAVO_INLINE void add_byte_tiles() {
  asm volatile("tdpbssd %%tmm%c0, %%tmm%c1, %%tmm%c2" : : "i"(kColumns), "i"(kRows), "i"(kSums));
}

}  // namespace octavo::OCTAVO_ISA
