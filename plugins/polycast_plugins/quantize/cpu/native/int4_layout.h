// Memory layout of weights in 4 bits.
#pragma once

#include <algorithm>
#include <bit>
#include <cstdint>
#include <cstring>

#include "layout.h"

namespace polycast_cpu {

// Divide terms into chunks, which have a scale, and those into groups, which have a multiplier of it. The last ones may be shorter.
// Terms are stored eight at a time.
struct Groups {
  int64_t terms, group, chunk;

  static constexpr int64_t kEight = 8;
  // The terms of a chunk of small groups. Sums of a chunk are integers.
  static constexpr int64_t kChunk = 256;

  Groups(int64_t terms, int64_t group_size)
      : terms(terms),
        group(std::min(group_size, std::max(kEight, padded(terms)))),
        chunk(std::max<int64_t>(1, kChunk / group) * group) {}

  static constexpr int64_t eights(int64_t terms) { return (terms + kEight - 1) / kEight; }
  static constexpr int64_t padded(int64_t terms) { return eights(terms) * kEight; }

  int64_t chunks() const { return (terms + chunk - 1) / chunk; }
  int64_t terms_of_chunk(int64_t number) const { return std::min(chunk, terms - number * chunk); }
  int64_t groups_in_chunk() const { return chunk / group; }
  int64_t groups_of(int64_t some_terms) const { return (some_terms + group - 1) / group; }
};

// A weight of N columns and K terms. A value is the product of a level, -8 to 7, its group's multiplier, at most 15 in magnitude,
// and its chunk's scale. The product of level and multiplier fits a signed byte.
//
// Each block of 64 columns stores for each chunk a bfloat16 scale for each column; then for each group a signed byte for each column,
// its multiplier; and for each eight terms four bytes for each column, with the terms 0 to 3 in their low halves and 4 to 7 in the
// high ones, as a level plus 8: what vpdpbusd takes as unsigned.
struct Int4Weight {
  const uint8_t* values;
  int64_t columns, terms;
  Groups groups;

  static constexpr int kZero = 8;
  static constexpr int kMaxMultiplier = 15;
  static constexpr int64_t kScaleBytes = kBlock * 2, kMultiplierBytes = kBlock, kStepBytes = kBlock * 4;

  static int64_t group_bytes(int64_t terms) { return kMultiplierBytes + Groups::eights(terms) * kStepBytes; }

  static int64_t chunk_bytes(const Groups& groups, int64_t terms) {
    return kScaleBytes + groups.groups_of(terms) * kMultiplierBytes + Groups::eights(terms) * kStepBytes;
  }

  static int64_t block_bytes(const Groups& groups) {
    const int64_t last = groups.chunks() - 1;
    return last * chunk_bytes(groups, groups.chunk) + chunk_bytes(groups, groups.terms_of_chunk(last));
  }

  // Set the level plus 8 of a term of a group, which was 0 before.
  static void set_level(uint8_t* group, int64_t lane, int64_t term, int level) {
    group[kMultiplierBytes + term / 8 * kStepBytes + 4 * lane + term % 4] |=
        static_cast<uint8_t>(term % 8 < 4 ? level : level << 4);
  }

  const uint8_t* block(int64_t number) const { return values + number * block_bytes(groups); }

  float value(int64_t column, int64_t term) const {
    const uint8_t* const chunk = block(column / kBlock) + term / groups.chunk * chunk_bytes(groups, groups.chunk);
    const int64_t of_chunk = term % groups.chunk, place = of_chunk % groups.group, lane = column % kBlock;
    const uint8_t* const group = chunk + kScaleBytes + of_chunk / groups.group * group_bytes(groups.group);
    const uint8_t byte = group[kMultiplierBytes + place / 8 * kStepBytes + lane * 4 + place % 4];
    const int level = (place % 8 < 4 ? byte & 15 : byte >> 4) - kZero;
    return scale(chunk, lane) * static_cast<float>(level * static_cast<int8_t>(group[lane]));
  }

  static float scale(const uint8_t* chunk, int64_t lane) {
    uint16_t bits;
    std::memcpy(&bits, chunk + 2 * lane, sizeof bits);
    return std::bit_cast<float>(static_cast<uint32_t>(bits) << 16);
  }
};

}  // namespace polycast_cpu
