// int8 products of float activations with weights that were quantized before: the ops of this library.
//
// A product is two passes over the activations' rows, one for their largest magnitudes and one that quantizes, then the
// product in integers, block by block, each finished into the output while it is in the cache.

#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/zeros.h>
#include <torch/library.h>

#include <atomic>
#include <limits>
#include <tuple>
#include <vector>

#include "finish.h"
#include "isa.h"
#include "layout.h"
#include "parallel.h"
#include "product.h"
#include "quantize.h"

namespace polycast_cpu {
namespace {

// So many bytes of a weight, or elements of activations, are worth a thread.
constexpr int64_t kGrain = 1 << 16;
// The product of so many rows goes over the weight at once; more would not stay in the cache beside it.
constexpr int64_t kRowsAtOnce = 256;
// For so few rows tiles are mostly empty.
constexpr int64_t kFewRows = 4;

constexpr int64_t grain(int64_t cost) {
  return std::max<int64_t>(1, kGrain / std::max<int64_t>(1, cost));
}

// Calls with a pointer to the tensor's elements, which are float32, bfloat16 or float16.
template <typename Function>
void with_elements(const at::Tensor& tensor, const Function& function) {
  switch (tensor.scalar_type()) {
    case at::kFloat:
      return function(tensor.data_ptr<float>());
    case at::kBFloat16:
      return function(tensor.data_ptr<at::BFloat16>());
    case at::kHalf:
      return function(tensor.data_ptr<at::Half>());
    default:
      TORCH_CHECK(false, "expected float32, bfloat16 or float16, got ", tensor.scalar_type());
  }
}

// Return a matrix with these rows whose elements lie one after the other.
at::Tensor with_dense_rows(const at::Tensor& matrix) {
  return matrix.stride(1) == 1 || matrix.size(1) == 1 ? matrix : matrix.contiguous();
}

// ---- weights

template <typename T>
bool pack(Isa isa, const T* rows, int64_t stride, int64_t columns, int64_t terms, int8_t* values, float* scales,
          int32_t* offsets) {
  const int64_t size = blocks(terms) * kBlock * kBlock;
  std::atomic<bool> possible = true;
  for_each_part(blocks(columns), grain(size), [&](int64_t begin, int64_t end) {
    std::vector<uint8_t> quantized(terms);
    for (int64_t column = begin * kBlock; column < std::min(columns, end * kBlock); ++column) {
      const T* row = rows + column * stride;
      const uint32_t magnitude = largest_magnitude(isa, row, terms);
      if (magnitude > std::bit_cast<uint32_t>(kLargestWeight)) {
        possible = false;
        return;
      }
      scales[column] = scale_of(magnitude);
      quantize_row(isa, row, terms, 1 / scales[column], quantized.data());
      int8_t* block = values + column / kBlock * size + column % kBlock * 4;
      int32_t sum = 0;
      for (int64_t k = 0; k < terms; ++k) {
        const int value = quantized[k] - kZeroPoint;
        block[k / 4 * 4 * kBlock + k % 4] = static_cast<int8_t>(value);
        sum += value;
      }
      offsets[column] = kZeroPoint * sum;
    }
  });
  return possible;
}

// Return the values, scales and offsets of a weight [N, K]; nothing if it cannot be quantized.
std::vector<at::Tensor> int8_pack(const at::Tensor& weight, int64_t isa) {
  TORCH_CHECK(weight.dim() == 2, "expected a matrix, got ", weight.dim(), " dimensions");
  const at::Tensor rows = with_dense_rows(weight);
  const int64_t columns = rows.size(0), terms = rows.size(1);
  at::Tensor values = at::zeros({blocks(columns), blocks(terms) * kBlock / 4, kBlock, 4}, at::kChar);
  at::Tensor scales = at::empty({columns}, at::kFloat), offsets = at::empty({columns}, at::kInt);
  bool possible = false;
  with_elements(rows, [&](const auto* elements) {
    possible = pack(static_cast<Isa>(isa), elements, rows.stride(0), columns, terms, values.data_ptr<int8_t>(),
                    scales.data_ptr<float>(), offsets.data_ptr<int32_t>());
  });
  return possible ? std::vector<at::Tensor>{values, scales, offsets} : std::vector<at::Tensor>{};
}

// ---- activations

// Quantizes rows and returns those that have inf or nan in them, which count as zeros.
template <typename T>
std::vector<int64_t> quantize(Isa isa, const T* rows, int64_t row_step, int64_t count, int64_t terms, bool by_row,
                              uint8_t* out, float* scales) {
  const int64_t stride = row_stride(terms);
  std::atomic<bool> all_finite = true;
  std::vector<uint32_t> magnitudes(by_row ? 0 : count);
  const auto quantize_one = [&](int64_t row) {
    if (scales[row] == 0) {
      std::fill_n(out + row * stride, terms, kZeroPoint);
      all_finite = false;
    } else {
      quantize_row(isa, rows + row * row_step, terms, 1 / scales[row], out + row * stride);
    }
  };
  for_each_part(count, grain(terms), [&](int64_t begin, int64_t end) {
    for (int64_t row = begin; row < end; ++row) {
      const uint32_t magnitude = largest_magnitude(isa, rows + row * row_step, terms);
      scales[row] = is_finite(magnitude) ? scale_of(magnitude) : 0;
      if (by_row) {
        quantize_one(row);
      }
    }
  });
  if (!by_row) {
    const float scale = *std::max_element(scales, scales + count);
    for_each_part(count, grain(terms), [&](int64_t begin, int64_t end) {
      for (int64_t row = begin; row < end; ++row) {
        scales[row] = scales[row] == 0 ? 0 : scale;
        quantize_one(row);
      }
    });
  }
  std::vector<int64_t> others;
  for (int64_t row = 0; row < count && !all_finite; ++row) {
    if (scales[row] == 0) {
      others.push_back(row);
    }
  }
  return others;
}

// ---- products

void multiply(Isa isa, const Activations& x, int64_t row, int64_t count, const Weight& weight, int64_t block,
              int32_t (*sums)[kBlock]) {
  const uint8_t* rows = x.values + row * x.stride;
#if defined(__x86_64__)
  if (isa == Isa::amx) {
    return multiply_amx(rows, x.stride, count, weight.block(block), weight.terms, sums);
  }
  if (isa == Isa::vnni) {
    return multiply_vnni(rows, x.stride, count, weight.block(block), weight.terms, sums);
  }
#endif
  multiply_plain(rows, x.stride, count, weight.block(block), weight.terms, sums);
}

template <typename T>
void multiply_blocks(Isa isa, const Activations& x, const Weight& weight, const float* bias, int64_t bias_step,
                     int64_t begin, int64_t end, T* out) {
  alignas(64) int32_t sums[kMostRows][kBlock];
  const int64_t in_a_row = blocks(weight.columns);
  for (int64_t task = begin; task < end; ++task) {
    const int64_t block = task % in_a_row, column = block * kBlock;
    const int64_t first = task / in_a_row * kRowsAtOnce, last = std::min(x.rows, first + kRowsAtOnce);
    for (int64_t row = first; row < last; row += kMostRows) {
      const int64_t count = std::min(kMostRows, last - row);
      multiply(isa, x, row, count, weight, block, sums);
      for (int64_t i = 0; i < count; ++i) {
        finish_row(isa, sums[i], weight.offsets + column, weight.scales + column, x.scales[row + i],
                   bias == nullptr ? nullptr : bias + (row + i) * bias_step + column,
                   std::min(kBlock, weight.columns - column), out + (row + i) * weight.columns + column);
      }
    }
  }
}

template <typename T>
void product(Isa isa, const Activations& x, const Weight& weight, const float* bias, int64_t bias_step, T* out) {
  const int64_t turns = (x.rows + kRowsAtOnce - 1) / kRowsAtOnce;
  if (isa == Isa::amx && x.rows <= kFewRows) {
    isa = Isa::vnni;
  }
  for_each_part(turns * blocks(weight.columns), grain(blocks(weight.terms) * kBlock * kBlock),
                [&](int64_t begin, int64_t end) {
#if defined(__x86_64__)
                  if (isa == Isa::amx) {
                    const Tiles tiles;
                    return multiply_blocks(isa, x, weight, bias, bias_step, begin, end, out);
                  }
#endif
                  multiply_blocks(isa, x, weight, bias, bias_step, begin, end, out);
                });
}

// A row with inf or nan: what these come to with the weight; the numbers beside them make no difference.
template <typename T, typename Out>
void product_of_nonfinite(const T* row, const Weight& weight, float alpha, const float* bias, Out* out) {
  std::vector<int64_t> places;
  for (int64_t k = 0; k < weight.terms; ++k) {
    if (!std::isfinite(static_cast<float>(row[k]))) {
      places.push_back(k);
    }
  }
  for (int64_t n = 0; n < weight.columns; ++n) {
    const int8_t* column = weight.block(n / kBlock) + n % kBlock * 4;
    float sum = 0;
    for (int64_t k : places) {
      sum += static_cast<float>(row[k]) * static_cast<float>(column[k / 4 * 4 * kBlock + k % 4]);
      if (std::isnan(sum)) {
        break;
      }
    }
    out[n] = static_cast<Out>(bias == nullptr ? alpha * sum : alpha * sum + bias[n]);
  }
}

// Return alpha * x @ weight.T + bias, for any number of dimensions of x.
at::Tensor int8_linear(const at::Tensor& x, const at::Tensor& values, const at::Tensor& scales,
                       const at::Tensor& offsets, const std::optional<at::Tensor>& bias, double alpha, bool by_row,
                       at::ScalarType dtype, int64_t isa_number) {
  const auto isa = static_cast<Isa>(isa_number);
  const int64_t terms = x.size(-1), columns = scales.size(0);
  TORCH_CHECK(values.dim() == 4 && values.size(1) * 4 == blocks(terms) * kBlock, "x has ", terms,
              " features, which the weight does not have");
  std::vector<int64_t> shape = x.sizes().vec();
  shape.back() = columns;
  at::Tensor out = at::empty(shape, x.options().dtype(dtype));
  if (out.numel() == 0) {
    return out;
  }
  const at::Tensor matrix = with_dense_rows(x.dim() == 2 ? x : x.reshape({-1, terms}));
  const int64_t rows = matrix.size(0), stride = row_stride(terms);
  const Weight weight{values.const_data_ptr<int8_t>(), scales.const_data_ptr<float>(),
                      offsets.const_data_ptr<int32_t>(), columns, terms};

  at::Tensor added;
  if (bias.has_value()) {
    added = bias->to(at::kFloat).expand({rows, columns});
    added = added.stride(1) == 1 ? added : added.contiguous();
  }
  const float* const bias_values = bias.has_value() ? added.const_data_ptr<float>() : nullptr;
  const int64_t bias_step = bias.has_value() ? added.stride(0) : 0;

  const int64_t tiled_rows = (rows + kMostRows - 1) / kMostRows * kMostRows;
  const at::Tensor quantized = at::empty({tiled_rows * stride}, at::kByte);
  const at::Tensor row_scales = at::empty({rows}, at::kFloat);
  float* const scale = row_scales.data_ptr<float>();
  with_elements(matrix, [&](const auto* elements) {
    const std::vector<int64_t> others = quantize(isa, elements, matrix.stride(0), rows, terms, by_row,
                                                 quantized.data_ptr<uint8_t>(), scale);
    for (int64_t row = 0; alpha != 1 && row < rows; ++row) {
      scale[row] *= static_cast<float>(alpha);
    }
    with_elements(out, [&](auto* result) {
      const Activations activations{quantized.data_ptr<uint8_t>(), scale, rows, stride};
      product(isa, activations, weight, bias_values, bias_step, result);
      for (int64_t row : others) {
        product_of_nonfinite(elements + row * matrix.stride(0), weight, static_cast<float>(alpha),
                             bias_values == nullptr ? nullptr : bias_values + row * bias_step, result + row * columns);
      }
    });
  });
  return out;
}

}  // namespace

TORCH_LIBRARY(polycast_cpu, library) {
  library.def("best_isa() -> int", [] { return static_cast<int64_t>(best_isa()); });
  library.def("int8_pack(Tensor weight, int isa) -> Tensor[]");
  library.def(
      "int8_linear(Tensor x, Tensor values, Tensor scales, Tensor offsets, Tensor? bias, float alpha, bool by_row, "
      "ScalarType dtype, int isa) -> Tensor");
}

TORCH_LIBRARY_IMPL(polycast_cpu, CPU, library) {
  library.impl("int8_pack", int8_pack);
  library.impl("int8_linear", int8_linear);
}

}  // namespace polycast_cpu
