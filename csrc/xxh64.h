// XXH64 of bytes, by the specification of xxHash: a checksum at the speed of memory. It has no secret, so it detects only accidents.
#pragma once

#include <cstdint>
#include <cstring>

namespace octavo {

class Xxh64 {
 public:
  static uint64_t of(const uint8_t* at, int64_t bytes, uint64_t seed) {
    const uint8_t* const end = at + bytes;
    uint64_t hash = seed + kPrime5;
    if (bytes >= kStripe) hash = stripes(at, end, seed);
    hash += static_cast<uint64_t>(bytes);
    for (; end - at >= 8; at += 8) hash = rotate(hash ^ round(0, read<uint64_t>(at)), 27) * kPrime1 + kPrime4;
    for (; end - at >= 4; at += 4) hash = rotate(hash ^ (read<uint32_t>(at) * kPrime1), 23) * kPrime2 + kPrime3;
    for (; at < end; ++at) hash = rotate(hash ^ (*at * kPrime5), 11) * kPrime1;
    hash = (hash ^ hash >> 33) * kPrime2;
    hash = (hash ^ hash >> 29) * kPrime3;
    return hash ^ hash >> 32;
  }

 private:
  static constexpr uint64_t kPrime1 = 0x9E3779B185EBCA87, kPrime2 = 0xC2B2AE3D27D4EB4F, kPrime3 = 0x165667B19E3779F9,
                            kPrime4 = 0x85EBCA77C2B2AE63, kPrime5 = 0x27D4EB2F165667C5;
  static constexpr int64_t kStripe = 32;

  // Hashes whole stripes, and advances `at` past them.
  static uint64_t stripes(const uint8_t*& at, const uint8_t* end, uint64_t seed) {
    uint64_t lanes[4] = {seed + kPrime1 + kPrime2, seed + kPrime2, seed, seed - kPrime1};
    for (; end - at >= kStripe; at += kStripe) {
      for (int i = 0; i < 4; ++i) lanes[i] = round(lanes[i], read<uint64_t>(at + 8 * i));
    }
    uint64_t hash = rotate(lanes[0], 1) + rotate(lanes[1], 7) + rotate(lanes[2], 12) + rotate(lanes[3], 18);
    for (const uint64_t lane : lanes) hash = (hash ^ round(0, lane)) * kPrime1 + kPrime4;
    return hash;
  }

  static uint64_t round(uint64_t sum, uint64_t word) { return rotate(sum + word * kPrime2, 31) * kPrime1; }
  static uint64_t rotate(uint64_t value, int by) { return value << by | value >> (64 - by); }

  template <class Word>
  static Word read(const uint8_t* at) {  // assumes a little-endian machine, as packed weights do
    Word word;
    std::memcpy(&word, at, sizeof(word));
    return word;
  }
};

}  // namespace octavo
