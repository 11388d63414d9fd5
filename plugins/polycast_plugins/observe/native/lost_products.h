// Counts the zeros of a matmul that underflowed: those to which a product of two values that are not zero was added.
//
// Locks: none.

#pragma once

#include <vector>

#include "tensors.h"

namespace {

// The values of a matrix of 16-bit numbers, line by line: along its rows, or its columns.
struct Lines {
  const uint16_t* data;
  int64_t count, to_next, length, stride;

  bool is_zero(int64_t line, int64_t at) const {
    constexpr uint16_t kMagnitude = 0x7fff;
    return (data[line * to_next + at * stride] & kMagnitude) == 0;
  }
};

// The nonzero values of each line, a bit for each; computed when a line is first requested.
class NonzeroBits {
 public:
  explicit NonzeroBits(const Lines& lines)
      : lines_(lines), words_((lines.length + 63) / 64), states_(lines.count), bits_(lines.count * words_) {}

  // Return the bits of a line, or null if all are zero.
  const uint64_t* of(int64_t line) {
    uint64_t* const bits = bits_.data() + line * words_;
    State& state = states_[line];
    if (state == State::kUnknown) {
      uint64_t any = 0;
      for (int64_t i = 0; i < lines_.length; ++i) {
        bits[i / 64] |= static_cast<uint64_t>(!lines_.is_zero(line, i)) << (i % 64);
      }
      for (int64_t word = 0; word < words_; ++word) {
        any |= bits[word];
      }
      state = any == 0 ? State::kZero : State::kNonzero;
    }
    return state == State::kZero ? nullptr : bits;
  }

  int64_t words() const { return words_; }

 private:
  enum class State : int8_t { kUnknown, kZero, kNonzero };

  const Lines& lines_;
  const int64_t words_;
  std::vector<State> states_;
  std::vector<uint64_t> bits_;
};

// The zeros of a product that underflowed, given the rows of the first matrix and the columns of the second.
class LostProducts {
 public:
  LostProducts(const Lines& rows, const Lines& columns)
      : rows_(rows), columns_(columns), of_rows_(rows), of_columns_(columns), first_(std::min<int64_t>(8, rows.length)) {}

  bool contains(int64_t row, int64_t column) {
    for (int64_t i = 0; i < first_; ++i) {  // where something was lost, most often the first products were
      if (!rows_.is_zero(row, i) && !columns_.is_zero(column, i)) {
        return true;
      }
    }
    const uint64_t* const left = of_rows_.of(row);
    const uint64_t* const right = left == nullptr ? nullptr : of_columns_.of(column);
    if (right != nullptr) {
      for (int64_t word = 0; word < of_rows_.words(); ++word) {
        if ((left[word] & right[word]) != 0) {
          return true;
        }
      }
    }
    return false;
  }

 private:
  const Lines &rows_, &columns_;
  NonzeroBits of_rows_, of_columns_;
  const int64_t first_;
};

constexpr int64_t kBlock = 256;

// Return whether there is a zero in a block of numbers. Its fixed size lets the compiler vectorize the loop.
[[gnu::optimize("O3")]] bool has_zero(const uint16_t* block) {
  uint16_t found = 0;
  for (int64_t i = 0; i < kBlock; ++i) {
    found |= static_cast<uint16_t>((block[i] & 0x7fff) == 0);
  }
  return found != 0;
}

// Count the lost ones among the zeros in the rows of a product. `zeros` is how many there are, less those that are found.
uint64_t count_lost_of(const Lines& rows, const Lines& columns, const Lines& values, uint64_t& zeros) {
  LostProducts lost(rows, columns);
  uint64_t count = 0;
  for (int64_t row = 0; row < values.count && zeros != 0; ++row) {
    for (int64_t begin = 0; begin < values.length && zeros != 0; begin += kBlock) {
      const int64_t end = std::min(begin + kBlock, values.length);
      if (values.stride == 1 && end - begin == kBlock && !has_zero(values.data + row * values.to_next + begin)) {
        continue;
      }
      for (int64_t column = begin; column < end; ++column) {
        if (values.is_zero(row, column)) {
          --zeros;
          count += lost.contains(row, column);
        }
      }
    }
  }
  return count;
}

// Count the lost ones among the zeros of a product of matrices of 16-bit numbers in host memory, or of two batches of them.
uint64_t count_lost_products(const Tensor& left, const Tensor& right, const Tensor& values, uint64_t zeros) {
  const bool is_batch = left.dim() == 3;
  const int64_t row = left.dim() - 2, column = left.dim() - 1;
  const auto matrix = [is_batch](const Tensor& of, int64_t number) {
    return static_cast<const uint16_t*>(of.const_data_ptr()) + (is_batch ? number * of.stride(0) : 0);
  };
  uint64_t count = 0;
  for (int64_t i = 0; i < (is_batch ? left.size(0) : 1); ++i) {
    const Lines rows{matrix(left, i), left.size(row), left.stride(row), left.size(column), left.stride(column)};
    const Lines columns{matrix(right, i), right.size(column), right.stride(column), right.size(row), right.stride(row)};
    const Lines results{matrix(values, i), values.size(row), values.stride(row), values.size(column), values.stride(column)};
    count += count_lost_of(rows, columns, results, zeros);
  }
  return count;
}

}  // namespace
