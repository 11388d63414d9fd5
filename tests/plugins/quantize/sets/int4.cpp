// Compare products by weights in 4 bits with their definition, for random sizes and values, on each instruction set. Needs no torch:
// it is compiled for other processors and run in an emulator.
#include "tiles.h"

#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <random>
#include <vector>

#include "int4_rows.h"

using namespace polycast_cpu;

namespace {

std::mt19937 engine(0);

int64_t pick(int64_t first, int64_t last) {
  return std::uniform_int_distribution<int64_t>(first, last)(engine);
}

float random_float() {
  return std::ldexp(static_cast<float>(pick(-1000, 1000)), static_cast<int>(pick(-20, 20)));
}

// Random levels, multipliers and scales of 64 columns, the values [terms, 64] that they stand for, and random activations.
struct Problem {
  const int64_t rows = pick(0, 1) != 0 ? pick(1, 6) : pick(1, 70);
  const int64_t terms = pick(0, 9) == 0 ? pick(1, 6000) : pick(1, 300);
  const Groups groups{terms, 16 * std::vector<int64_t>{1, 2, 2, 3, 4, 8, 16, 32}[pick(0, 7)]};
  std::vector<float> x = std::vector<float>(rows * terms);
  std::vector<int> values = std::vector<int>(terms * kBlock);
  std::vector<float> scales = std::vector<float>(groups.chunks() * kBlock);
  std::vector<uint8_t> packed;

  Problem() {
    const bool extreme = pick(0, 3) == 0;  // the largest sums
    for (float& each : x) {
      each = extreme ? std::copysign(1.0f, random_float()) : random_float();
    }
    for (int64_t begin = 0; begin < terms; begin += groups.chunk) {
      add_chunk(begin, std::min(groups.chunk, terms - begin), extreme);
    }
  }

  void add_chunk(int64_t begin, int64_t count, bool extreme) {
    for (int64_t column = 0; column < kBlock; ++column) {
      float& scale = scales[begin / groups.chunk * kBlock + column];
      scale = std::ldexp(static_cast<float>(pick(128, 255)), static_cast<int>(pick(-30, 0)));  // of 8 bits
      packed.push_back(std::bit_cast<uint32_t>(scale) >> 16 & 255);
      packed.push_back(std::bit_cast<uint32_t>(scale) >> 24);
    }
    for (int64_t first = begin; first < begin + count; first += groups.group) {
      add_group(first, std::min(groups.group, begin + count - first), extreme);
    }
  }

  void add_group(int64_t begin, int64_t count, bool extreme) {
    const int64_t bytes = packed.size();
    packed.resize(bytes + kBlock + (count + 7) / 8 * 4 * kBlock);
    for (int64_t column = 0; column < kBlock; ++column) {
      const int multiplier = static_cast<int>((extreme ? 15 : pick(1, 15)) * (pick(0, 1) != 0 ? 1 : -1));
      packed[bytes + column] = static_cast<uint8_t>(multiplier);
      for (int64_t k = 0; k < count; ++k) {
        const int level = static_cast<int>(extreme ? -8 : pick(-8, 7));
        values[(begin + k) * kBlock + column] = level * multiplier;
        uint8_t& byte = packed[bytes + kBlock + k / 8 * 4 * kBlock + 4 * column + k % 4];
        byte |= static_cast<uint8_t>((level + 8) << (k % 8 < 4 ? 0 : 4));
      }
    }
  }

  // The sums of a row, as the definition says.
  void expected(int64_t row, float (&totals)[kBlock]) const {
    std::fill_n(totals, kBlock, 0.0f);
    for (int64_t begin = 0; begin < terms; begin += groups.chunk) {
      const int64_t end = std::min(terms, begin + groups.chunk);
      float largest = 0x1p-110f;
      for (int64_t k = begin; k < end; ++k) {
        largest = std::max(largest, std::abs(x[row * terms + k]));
      }
      const float scale = largest / 127, inverse = 1 / scale;
      int64_t sums[kBlock] = {};
      for (int64_t k = begin; k < end; ++k) {
        const auto level = static_cast<int64_t>(std::nearbyint(x[row * terms + k] * inverse));
        for (int64_t column = 0; column < kBlock; ++column) {
          sums[column] += level * values[k * kBlock + column];
        }
      }
      for (int64_t column = 0; column < kBlock; ++column) {
        const float of_column = static_cast<float>(sums[column]) * scales[begin / groups.chunk * kBlock + column];
        totals[column] = std::fma(of_column, scale, totals[column]);
      }
    }
  }
};

void compute(Isa isa, const Problem& of, FloatSums totals) {
  const Scratch scratch(ChunkedActivations::bytes(of.rows, of.groups));
  const ChunkedActivations x(scratch, of.rows, of.groups);
  quantize_chunks(isa, of.x.data(), of.terms, of.groups, nullptr, x);
  const Int4Weight weight{of.packed.data(), kBlock, of.terms, of.groups};
  if (is_direct(isa, of.rows, of.groups)) {
    make_signed(of.groups, x);
    multiply_directly(isa, x, 0, of.rows, weight, 0, totals);
  } else {
    multiply_unpacked(isa, x, 0, of.rows, weight, 0, totals);
  }
}

void check(const char* name, Isa isa) {
  for (int turn = 0; turn < 100; ++turn) {
    const Problem of;
    alignas(64) float actual[70][kBlock] = {}, expected[kBlock];
    compute(isa, of, actual);
    for (int64_t row = 0; row < of.rows; ++row) {
      of.expected(row, expected);
      for (int64_t column = 0; column < kBlock; ++column) {
        if (actual[row][column] != expected[column]) {
          std::printf("%s: %ld rows, %ld terms in groups of %ld: row %ld, column %ld is %g, not %g\n", name, long(of.rows),
                      long(of.terms), long(of.groups.group), long(row), long(column), actual[row][column],
                      expected[column]);
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
  check("avx2", Isa::avx2);
  check("avx_vnni", Isa::avx_vnni);
  check("vnni", Isa::vnni);
  check("amx", Isa::amx);
#elif defined(__aarch64__)
  check("dotprod", Isa::dotprod);
  check("i8mm", Isa::i8mm);
#endif
}
