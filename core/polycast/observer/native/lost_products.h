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

// Which values of each line are not zero, a bit for each; found when a line is first asked for.
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

// Count the zeros of the product of two matrices, given the rows of the first one, the columns of the second one, and the rows of the
// product.
uint64_t count_lost_of(const Lines& rows, const Lines& columns, const Lines& values) {
  constexpr int64_t kFirst = 8;  // where something was lost, most often the first products were
  NonzeroBits of_rows(rows), of_columns(columns);
  const int64_t first = std::min(kFirst, rows.length);
  const auto is_lost = [&](int64_t row, int64_t column) {
    for (int64_t i = 0; i < first; ++i) {
      if (!rows.is_zero(row, i) && !columns.is_zero(column, i)) {
        return true;
      }
    }
    const uint64_t* const left = of_rows.of(row);
    const uint64_t* const right = left == nullptr ? nullptr : of_columns.of(column);
    if (right != nullptr) {
      for (int64_t word = 0; word < of_rows.words(); ++word) {
        if ((left[word] & right[word]) != 0) {
          return true;
        }
      }
    }
    return false;
  };
  uint64_t count = 0;
  for (int64_t row = 0; row < rows.count; ++row) {
    for (int64_t column = 0; column < columns.count; ++column) {
      count += values.is_zero(row, column) && is_lost(row, column);
    }
  }
  return count;
}

// Count the zeros of a product of matrices of 16-bit numbers in host memory, or of two batches of them.
uint64_t count_lost_products(const Tensor& left, const Tensor& right, const Tensor& values) {
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
    count += count_lost_of(rows, columns, results);
  }
  return count;
}

}  // namespace
