// Products of few rows by a weight in bfloat16, float16 or float32, as it lies in memory: it is read once, converted to float32 in
// registers, multiplied and summed in float32, and the result is rounded once.
//
// A row has the same bits alone and among others.
#pragma once

#include <algorithm>
#include <optional>

#include "dots.h"
#include "parts.h"
#include "scaled_rows.h"
#include "scratch.h"
#include "tensors.h"

namespace polycast_cpu {

// Threads get multiples of so many columns: a cache line of the weight and of the result.
constexpr int64_t kColumnUnit = 32;

// Bytes by which the prefetch of a weight precedes its use.
constexpr int64_t kAhead = 2048;
// Larger weights come from memory.
constexpr int64_t kCached = int64_t{1} << 19;

// Rows of activations in float32. The stride of several is not a multiple of 4096 bytes, which would map them to the same set of the
// L1 cache.
struct FloatRows {
  const float* values;
  int64_t rows, stride, terms;

  const float* row(int64_t number) const { return values + number * stride; }
};

// A weight with strides between columns (output features) and between terms, of which one is 1.
template <typename T>
struct FastWeight {
  const T* values;
  int64_t columns, column_stride, term_stride;
};

// Scales the sums of a product by alpha, adds the bias and rounds to the output's dtype.
struct Epilogue {
  float alpha;
  const Bias& bias;

  template <typename T>
  void operator()(Simd simd, const float* sums, int64_t row, int64_t column, int64_t count, int64_t columns,
                  T* out) const {
    const float* const added = bias.row(row);
    apply_epilogue(simd, sums, alpha, added == nullptr ? nullptr : added + column, count, out + row * columns + column);
  }
};

// The most terms of a row in float32 that stay in the L1 cache while a weight streams through it.
constexpr int64_t kCachedTerms = 4096;

// Return DotArguments::ahead for a weight with dense columns that is read from memory.
template <typename T>
int64_t elements_ahead(const FastWeight<T>& weight, int64_t terms) {
  if (!prefetcher_crosses_pages()) {
    return kAhead / static_cast<int64_t>(sizeof(T));
  }
  return weight.column_stride == terms ? kNextColumns : 0;
}

// For rows [first, last) and columns [begin, end) of a weight whose columns are dense.
template <typename T, typename Out>
void multiply_columns(Simd simd, const FloatRows& x, int64_t first, int64_t last, const FastWeight<T>& weight,
                      const Epilogue& epilogue, int64_t begin, int64_t end, Out* out) {
  alignas(64) float sums[kRowsPerRead][kDots];
  const bool is_read = weight.columns * x.terms * static_cast<int64_t>(sizeof(T)) > kCached;
  // One row reads column by column, which is a stream. Several, or a long one, would be read again for each column. With AVX2, a column
  // alone waits for its additions.
  const bool one_row = last - first == 1 && x.terms <= kCachedTerms;
  const bool in_memory_order = is_read && one_row && prefetcher_crosses_pages() && simd != Simd::avx2;
  const int64_t ahead = is_read && !in_memory_order ? elements_ahead(weight, x.terms) : 0;
  for (int64_t block = begin; block < end; block += kDots) {
    const int64_t count = std::min(kDots, end - block);
    for (int64_t n = 0, columns; n < count; n += columns) {
      // Rows that share the columns which the first ones take.
      columns = dots_for<T>(simd, last - first, count - n, in_memory_order).columns;
      for (int64_t row = first, rows; row < last; row += rows) {
        for (int64_t column = n; column < n + columns;) {
          const Dots<T> dots = dots_for<T>(simd, last - row, n + columns - column, in_memory_order);
          rows = dots.rows;
          const DotArguments<T> of{weight.values + (block + column) * weight.column_stride, weight.column_stride,
                                   x.row(row), x.stride, x.terms, row == first ? ahead : 0};
          dots.function(of, reinterpret_cast<float(*)[kDots]>(&sums[row - first][column]));
          column += dots.columns;
        }
      }
    }
    for (int64_t row = first; row < last; ++row) {
      epilogue(simd, sums[row - first], row, block, count, weight.columns, out);
    }
  }
}

// For a weight whose terms are dense: rows of all columns.
template <typename T, typename Out>
void multiply_terms(Simd simd, const FloatRows& x, int64_t first, int64_t last, const FastWeight<T>& weight,
                    const Epilogue& epilogue, int64_t begin, int64_t end, Out* out) {
  float(*const sums)[kSumStride] = sums_of_thread();
  const bool in_memory_order = prefetcher_crosses_pages();
  const int64_t most = in_memory_order ? kTileInMemoryOrder : last - first == 1 ? kTile : kTileOfSeveral;
  const int64_t most_terms = in_memory_order ? kTermsInMemoryOrder : kTerms;
  const int64_t ahead = in_memory_order ? kTermsInMemoryOrder : kTermsAhead;
  for (int64_t tile = begin; tile < end; tile += most) {
    const int64_t width = std::min(most, end - tile);
    for (int64_t row = first; row < last; ++row) {
      std::fill_n(sums[row - first], (width + 15) / 16 * 16, 0.0f);
    }
    for (int64_t k = 0; k < x.terms;) {
      const int64_t left = x.terms - k, now = left >= most_terms ? most_terms : left >= kTerms ? kTerms : 1;
      const T* const rows_of_weight = weight.values + k * weight.term_stride + tile;
      const bool has_later = k + ahead + now <= x.terms;
      const T* const later = has_later ? rows_of_weight + ahead * weight.term_stride : rows_of_weight;
      for (int64_t row = first; row < last; row += kScaledRows) {
        const ScaledArguments<T> of{
            rows_of_weight, row == first ? later : rows_of_weight, weight.term_stride, x.row(row) + k, x.stride, width};
        const int64_t rows = std::min(kScaledRows, last - row);
        const auto add = now == 1        ? add_scaled<1, T>
                         : now == kTerms ? add_scaled<kTerms, T>
                                         : add_scaled<kTermsInMemoryOrder, T>;
        add(simd, rows, of, sums + row - first);
      }
      k += now;
    }
    for (int64_t row = first; row < last; ++row) {
      epilogue(simd, sums[row - first], row, tile, width, weight.columns, out);
    }
  }
}

template <typename T, typename Out>
void multiply_few(Simd simd, const FloatRows& x, const FastWeight<T>& weight, const Epilogue& epilogue, Out* out) {
  const bool dots = weight.term_stride == 1 || x.terms == 1;
  const int64_t units = (weight.columns + kColumnUnit - 1) / kColumnUnit;
  for_each_part(units, grain(x.terms * kColumnUnit * sizeof(T)), [&](int64_t first_unit, int64_t last_unit) {
    const int64_t begin = first_unit * kColumnUnit, end = std::min(weight.columns, last_unit * kColumnUnit);
    for (int64_t row = 0; row < x.rows; row += kRowsPerRead) {
      const int64_t last = std::min(x.rows, row + kRowsPerRead);
      dots ? multiply_columns(simd, x, row, last, weight, epilogue, begin, end, out)
           : multiply_terms(simd, x, row, last, weight, epilogue, begin, end, out);
    }
  });
}

// Convert a matrix of any strides to float32 with dense rows, a stride apart.
template <typename T>
void to_float(const at::Tensor& matrix, const T* elements, float* out, int64_t stride) {
  const int64_t rows = matrix.size(0), terms = matrix.size(1), down = matrix.stride(0), right = matrix.stride(1);
  for (int64_t row = 0; row < rows; ++row, out += stride) {
    const T* const from = elements + row * down;
    if (right == 1) {
      for (int64_t k = 0; k < terms; ++k) {
        out[k] = static_cast<float>(from[k]);
      }
    } else {
      for (int64_t k = 0; k < terms; ++k) {
        out[k] = static_cast<float>(from[k * right]);
      }
    }
  }
}

// Return alpha * x @ weight.T + bias in the fast dtype, for any number of dimensions of x, given the weight, [N, K], in float32, or
// its cast to the fast dtype.
inline at::Tensor few_rows(const at::Tensor& x, const at::Tensor& cast, const std::optional<at::Tensor>& bias,
                           double alpha, at::ScalarType dtype, int64_t simd_number) {
  const bool is_wide = cast.scalar_type() == at::kFloat;
  TORCH_CHECK(cast.dim() == 2 && (cast.scalar_type() == dtype || is_wide) && dtype != at::kFloat,
              "expected a matrix in float32 or in the fast dtype, ", dtype, "; got ", cast.dim(), " dimensions in ",
              cast.scalar_type());
  const auto simd = static_cast<Simd>(simd_number);
  at::Tensor out = empty_product(x, cast.size(0), dtype);
  const int64_t terms = x.size(-1), columns = cast.size(0);
  TORCH_CHECK(terms == cast.size(1), "the activations have ", terms, " terms, the weight ", cast.size(1));
  if (out.numel() == 0) {
    return out;
  }
  const int64_t rows = out.numel() / columns;
  const at::Tensor matrix = x.dim() == 2 ? x : x.reshape({rows, terms});
  const Bias added(bias, rows, columns);
  const bool as_is = matrix.scalar_type() == at::kFloat && matrix.stride(1) == 1 && rows == 1;
  const int64_t stride = (terms + 15) / 16 * 16 + 16;
  const Scratch scratch(as_is ? 0 : rows * stride * sizeof(float));
  FloatRows floats{scratch.at<float>(0), rows, stride, terms};
  with_elements(matrix, [&](const auto* elements) {
    if constexpr (std::is_same_v<decltype(elements), const float*>) {
      if (as_is) {
        floats.values = elements;
        return;
      }
    }
    to_float(matrix, elements, scratch.at<float>(0), stride);
  });
  const bool dense = terms == 1 || columns == 1 || cast.stride(0) == 1 || cast.stride(1) == 1;
  const at::Tensor weight = dense ? cast : cast.contiguous();
  const Epilogue epilogue{static_cast<float>(alpha), added};
  const auto multiply = [&]<typename T, typename Out>(const T* values, Out* result) {
    multiply_few<T>(simd, floats, {values, columns, weight.stride(0), weight.stride(1)}, epilogue, result);
  };
  const auto multiply_into = [&]<typename Out>(Out* result) {
    is_wide ? multiply(weight.const_data_ptr<float>(), result) : multiply(weight.const_data_ptr<Out>(), result);
  };
  dtype == at::kBFloat16 ? multiply_into(out.data_ptr<at::BFloat16>()) : multiply_into(out.data_ptr<at::Half>());
  return out;
}

// The ops that stand for linear, matmul, mm and addmm read not the weight itself but `cast`, which may be the same tensor.

inline at::Tensor few_rows_linear(const at::Tensor& x, const at::Tensor&, const std::optional<at::Tensor>& bias,
                                  const at::Tensor& cast, at::ScalarType dtype, int64_t simd) {
  return few_rows(x, cast, bias, 1, dtype, simd);
}

inline at::Tensor few_rows_matmul(const at::Tensor& x, const at::Tensor&, const at::Tensor& cast,
                                  at::ScalarType dtype, int64_t simd) {
  return few_rows(x, cast.t(), std::nullopt, 1, dtype, simd);
}

inline at::Tensor few_rows_addmm(const at::Tensor& bias, const at::Tensor& x, const at::Tensor&,
                                 const at::Scalar& beta, const at::Scalar& alpha, const at::Tensor& cast,
                                 at::ScalarType dtype, int64_t simd) {
  return few_rows(x, cast.t(), times_beta(bias, beta), alpha.toDouble(), dtype, simd);
}

}  // namespace polycast_cpu
