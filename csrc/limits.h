// Loops for the upper limits of this processor: they only multiply in registers, or only read memory. Callers measure the time.
#pragma once

#include "linear_tiles.h"

namespace octavo::OCTAVO_ISA {

// Independent sums: enough to hide the latency of one, but so few that they fit the registers.
#if defined(OCTAVO_ISA_AVX512)
constexpr int kChains = 12;
#elif defined(OCTAVO_ISA_AVX2)
constexpr int kChains = 5;
#else
constexpr int kChains = 2;
#endif
constexpr int64_t kPieces = 8;        // per thread, so that threads of unequal speed end together
constexpr int64_t kReadStreams = 4;   // per thread
constexpr int64_t kReadAhead = 2048;  // distance of each stream's prefetches, in bytes

#if defined(OCTAVO_ISA_AMX)
// Computes `rounds` times four products of tiles, of pairs of bfloat16 or of bytes, in each of kPieces pieces per thread. Returns
// the number of multiplications and additions. depth: the products of a sum in one tile.
template <class Product>
int64_t spin_tiles(ThreadPool& pool, int64_t rounds, int64_t depth) {
  parallel(pool, kPieces * pool.num_threads(), [&](int64_t, int) {
    Tiles tiles;
    tiles.hold(heights_of_pair(kTileHeight, kTileHeight));
    for (int64_t round = 0; round < rounds; ++round) {
      Product::template add<0, 4, 6>();
      Product::template add<1, 4, 7>();
      Product::template add<2, 5, 6>();
      Product::template add<3, 5, 7>();
    }
  });
  return kPieces * pool.num_threads() * rounds * 4 * kTileHeight * kTileHeight * depth * 2;
}
#endif

// Computes `rounds` times kChains multiply-adds of 16 float32 lanes, in each of kPieces pieces per thread. Returns the number of
// multiplications and additions.
inline int64_t spin_fma(ThreadPool& pool, int64_t rounds) {
  pool.reserve_local(sizeof(float) * kLanes);
  parallel(pool, kPieces * pool.num_threads(), [&](int64_t, int thread) {
    auto* out = static_cast<float*>(pool.local(thread));
    const Vec factor = splat(static_cast<float>(rounds) * 1e-30f), term = splat(1.0f);
    Vec sums[kChains];
    OCTAVO_UNROLL
    for (int i = 0; i < kChains; ++i) {  // all lanes differ: a compiler would keep only one of two equal registers
      sums[i] = to_float(lane_numbers()) + splat(static_cast<float>(i));
    }
    for (int64_t round = 0; round < rounds; ++round) {
      OCTAVO_UNROLL
      for (int i = 0; i < kChains; ++i) sums[i] = fma(sums[i], factor, term);
    }
    OCTAVO_UNROLL
    for (int i = 1; i < kChains; ++i) sums[0] = sums[0] + sums[i];
    store(out, sums[0]);
  });
  return kPieces * pool.num_threads() * rounds * kChains * kLanes * 2;
}

// The same with byte products, four in a lane.
inline int64_t spin_bytes(ThreadPool& pool, int64_t rounds) {
#if defined(OCTAVO_ISA_AMX)
  return spin_tiles<ByteTiles>(pool, rounds / 4, 4 * kStepWords);
#else
#if defined(OCTAVO_ISA_VNNI)
  constexpr int kFactors = 1;
#else
  constexpr int kFactors = kChains;  // if products are not part of the sum's instruction, a compiler computes equal ones once
#endif
  pool.reserve_local(sizeof(uint32_t) * (kFactors + 1) * kLanes);
  parallel(pool, kPieces * pool.num_threads(), [&](int64_t, int thread) {
    auto* out = static_cast<uint32_t*>(pool.local(thread));
    for (int i = 0; i <= kFactors; ++i) {
      store_int(out + i * kLanes, splat_int((static_cast<uint32_t>(rounds) + static_cast<uint32_t>(i)) & 0x7F7F7F7Fu));
    }
    const IVec w = splat_int(0x01020304u);
    IVec sums[kChains];
    OCTAVO_UNROLL
    for (int i = 0; i < kChains; ++i) sums[i] = splat_int(static_cast<uint32_t>(i));
    for (int64_t round = 0; round < rounds; ++round) {
      const uint32_t* x = out + round % 2 * kLanes;  // a compiler would move a product of constants out of the loop
      OCTAVO_UNROLL
      for (int i = 0; i < kChains; ++i) sums[i] = add_byte_products(sums[i], load_int(x + i % kFactors * kLanes), w);
    }
    OCTAVO_UNROLL
    for (int i = 1; i < kChains; ++i) sums[0] = sums[0] + sums[i];
    store_int(out, sums[0]);
  });
  return kPieces * pool.num_threads() * rounds * kChains * kLanes * 8;
#endif
}

// The same with products of bfloat16, two in a lane, if the processor has an instruction for them; else with products of float32.
inline int64_t spin_pairs(ThreadPool& pool, int64_t rounds) {
#if defined(OCTAVO_ISA_AMX)
  return spin_tiles<PairTiles>(pool, rounds / 4, 2 * kStepWords);
#elif defined(OCTAVO_ISA_BF16)
  pool.reserve_local(sizeof(uint32_t) * 2 * kLanes);
  parallel(pool, kPieces * pool.num_threads(), [&](int64_t, int thread) {
    auto* out = static_cast<uint32_t*>(pool.local(thread));
    store_int(out, splat_int(0x3F803F80u));  // ones
    store_int(out + kLanes, splat_int(0x3F003F00u));
    const IVec w = splat_int(static_cast<uint32_t>(rounds) & 0x3F803F80u);
    Vec sums[kChains];
    OCTAVO_UNROLL
    for (int i = 0; i < kChains; ++i) sums[i] = splat(static_cast<float>(i));
    for (int64_t round = 0; round < rounds; ++round) {
      const IVec x = load_int(out + round % 2 * kLanes);
      OCTAVO_UNROLL
      for (int i = 0; i < kChains; ++i) sums[i] = add_pair_products(sums[i], x, w);
    }
    OCTAVO_UNROLL
    for (int i = 1; i < kChains; ++i) sums[0] = sums[0] + sums[i];
    store(reinterpret_cast<float*>(out), sums[0]);
  });
  return kPieces * pool.num_threads() * rounds * kChains * kLanes * 4;
#else
  return spin_fma(pool, rounds);
#endif
}

// Reads about `bytes` bytes from p on, in several streams per thread. Returns the number of bytes.
inline int64_t read_memory(ThreadPool& pool, const void* p, int64_t bytes) {
  const int64_t stream = bytes / (kPieces * pool.num_threads() * kReadStreams) / 64 * 64, piece = stream * kReadStreams;
  pool.reserve_local(sizeof(float) * kLanes);
  parallel(pool, kPieces * pool.num_threads(), [&](int64_t index, int thread) {
    const char* first = static_cast<const char*>(p) + index * piece;
    IVec sums[kReadStreams];
    for (auto& sum : sums) sum = splat_int(0);
    for (int64_t i = 0; i < stream; i += 64) {
      OCTAVO_UNROLL
      for (int s = 0; s < kReadStreams; ++s) {
        prefetch_l2(first + s * stream + i + kReadAhead);
        sums[s] = sums[s] ^ load_int(first + s * stream + i);
      }
    }
    for (int s = 1; s < kReadStreams; ++s) sums[0] = sums[0] ^ sums[s];
    store_int(pool.local(thread), sums[0]);
  });
  return piece * kPieces * pool.num_threads();
}

}  // namespace octavo::OCTAVO_ISA
