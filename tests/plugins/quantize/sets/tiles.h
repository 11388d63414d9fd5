// AMX's tiles in plain C++, for processors without them, by the definitions in Intel's manual. Each has 16 rows of 64 bytes. To be
// included first.
#pragma once

#if defined(__x86_64__)

#include <immintrin.h>

#include <cstdint>
#include <cstring>

namespace stand_in {

using Tile = uint8_t[16][64];
inline Tile tiles[8];

inline void zero(int to) {
  std::memset(tiles[to], 0, sizeof(Tile));
}

inline void load(int to, const void* from, int64_t stride) {
  for (int row = 0; row < 16; ++row) {
    std::memcpy(tiles[to][row], static_cast<const uint8_t*>(from) + row * stride, 64);
  }
}

inline void store(int from, void* to, int64_t stride) {
  for (int row = 0; row < 16; ++row) {
    std::memcpy(static_cast<uint8_t*>(to) + row * stride, tiles[from][row], 64);
  }
}

// Add the products of unsigned bytes [16, 64] by signed ones, whose rows have four terms of each of 16 columns.
inline void add_products(int to, int left, int right) {
  for (int row = 0; row < 16; ++row) {
    for (int column = 0; column < 16; ++column) {
      int32_t sum;
      std::memcpy(&sum, tiles[to][row] + 4 * column, sizeof sum);
      for (int k = 0; k < 64; ++k) {
        sum += tiles[left][row][k] * static_cast<int8_t>(tiles[right][k / 4][4 * column + k % 4]);
      }
      std::memcpy(tiles[to][row] + 4 * column, &sum, sizeof sum);
    }
  }
}

}  // namespace stand_in

#undef _tile_zero
#undef _tile_loadd
#undef _tile_stored
#undef _tile_dpbusd
#define _tile_zero(to) stand_in::zero(to)
#define _tile_loadd(to, from, stride) stand_in::load(to, from, stride)
#define _tile_stored(from, to, stride) stand_in::store(from, to, stride)
#define _tile_dpbusd(to, left, right) stand_in::add_products(to, left, right)

#endif
