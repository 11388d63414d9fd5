// Compare the integer products of instruction sets with those of plain C++, for random sizes. Needs no torch: it is compiled for
// other processors and run in an emulator.
#include "tiles.h"

#include <cstdio>
#include <cstdlib>
#include <random>
#include <vector>

#include "multiply.h"
#include "multiply_avx2.h"
#include "multiply_neon.h"

using namespace polycast_cpu;

namespace {

std::mt19937 engine(0);

int64_t pick(int64_t first, int64_t last) {
  return std::uniform_int_distribution<int64_t>(first, last)(engine);
}

// Levels from -127 to 127, or only the ends, whose sums are the largest.
int level(bool extreme) {
  return extreme ? (pick(0, 1) != 0 ? 127 : -127) : static_cast<int>(pick(-127, 127));
}

struct Problem {
  int64_t rows = pick(1, kMaxRows), terms = pick(0, 3) == 0 ? pick(1, 3000) : pick(1, 300), columns = pick(1, kBlock);
  int64_t stride = row_stride(terms);
  std::vector<uint8_t> x = std::vector<uint8_t>(tiled(rows) * stride);
  std::vector<int8_t> block = std::vector<int8_t>(blocks(terms) * kBlock * kBlock);
  std::vector<int32_t> offsets = std::vector<int32_t>(columns);

  Problem() {
    const bool extreme = pick(0, 1) != 0;
    for (uint8_t& value : x) {
      value = static_cast<uint8_t>(pick(0, 255));  // also in the padding
    }
    for (int64_t row = 0; row < rows; ++row) {
      for (int64_t k = 0; k < terms; ++k) {
        x[row * stride + k] = static_cast<uint8_t>(level(extreme) + kZeroPoint);
      }
    }
    for (int64_t column = 0; column < columns; ++column) {
      for (int64_t k = 0; k < terms; ++k) {
        const int value = level(extreme);
        block[(k / 4 * kBlock + column) * 4 + k % 4] = static_cast<int8_t>(value);
        offsets[column] += kZeroPoint * value;
      }
    }
  }
};

template <typename Multiply>
void check(const char* name, const Multiply& multiply) {
  for (int turn = 0; turn < 300; ++turn) {
    const Problem of;
    static int32_t expected[kMaxRows][kBlock], actual[kMaxRows][kBlock];
    multiply_plain(of.x.data(), of.stride, of.rows, of.block.data(), of.terms, expected);
    multiply(of, actual);
    for (int64_t row = 0; row < of.rows; ++row) {
      for (int64_t column = 0; column < of.columns; ++column) {
        if (actual[row][column] != expected[row][column]) {
          std::printf("%s: %ld rows, %ld terms: row %ld, column %ld is %d, not %d\n", name, long(of.rows), long(of.terms),
                      long(row), long(column), actual[row][column], expected[row][column]);
          std::exit(1);
        }
      }
    }
  }
  std::printf("%s\n", name);
}

}  // namespace

int main() {
#if defined(__x86_64__)
  check("avx2", [](const Problem& of, auto* sums) {
    multiply_avx2(of.x.data(), of.stride, of.rows, of.block.data(), of.terms, of.offsets.data(), of.columns, sums);
  });
  check("avx_vnni", [](const Problem& of, auto* sums) {
    multiply_avx_vnni(of.x.data(), of.stride, of.rows, of.block.data(), of.terms, sums);
  });
  check("vnni", [](const Problem& of, auto* sums) {
    multiply_vnni(of.x.data(), of.stride, of.rows, of.block.data(), of.terms, kStreamed, sums);
  });
  check("amx", [](const Problem& of, auto* sums) {
    multiply_amx(of.x.data(), of.stride, of.rows, of.block.data(), of.terms, sums);
  });
#elif defined(__aarch64__)
  check("dotprod", [](const Problem& of, auto* sums) {
    multiply_dotprod(of.x.data(), of.stride, of.rows, of.block.data(), of.terms, of.offsets.data(), of.columns, sums);
  });
  check("i8mm", [](const Problem& of, auto* sums) {
    multiply_i8mm(of.x.data(), of.stride, of.rows, of.block.data(), of.terms, of.offsets.data(), of.columns, sums);
  });
#endif
}
