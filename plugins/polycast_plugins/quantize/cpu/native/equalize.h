// Multiplication of rows by the factors of an equalization.
#pragma once

#include <vector>

#include "quantize.h"
#include "vectors_avx2.h"

namespace polycast_cpu {

template <typename T>
void scale_row_plain(const T* row, const float* factors, int64_t terms, float* out) {
  for (int64_t k = 0; k < terms; ++k) {
    out[k] = static_cast<float>(row[k]) * factors[k];
  }
}

#if defined(__x86_64__)

template <typename T>
[[gnu::target("avx512f,avx512bw,avx512vl")]] void scale_row_avx512(const T* row, const float* factors, int64_t terms,
                                                                   float* out) {
  for (int64_t k = 0; k < terms; k += 16) {
    const __mmask16 mask = first16(terms - k);
    _mm512_mask_storeu_ps(out + k, mask, _mm512_mul_ps(load16(row + k, mask), load16(factors + k, mask)));
  }
}

template <typename T>
[[gnu::target("avx2,f16c")]] void scale_row_avx2(const T* row, const float* factors, int64_t terms, float* out) {
  int64_t k = 0;
  for (; k + 8 <= terms; k += 8) {
    store8(out + k, _mm256_mul_ps(load8(row + k), load8(factors + k)));
  }
  scale_row_plain(row + k, factors + k, terms - k, out + k);
}

#endif

// Multiply the terms of a row by factors.
template <typename T>
void scale_row(Isa isa, const T* row, const float* factors, int64_t terms, float* out) {
#if defined(__x86_64__)
  if (has_avx512(isa)) {
    return scale_row_avx512(row, factors, terms, out);
  }
  if (has_avx2(isa)) {
    return scale_row_avx2(row, factors, terms, out);
  }
#endif
  scale_row_plain(row, factors, terms, out);
}

// Multiplies rows by factors, one for each term, before a function reads them; by none if `factors` is null.
class Equalizer {
 public:
  Equalizer(Isa isa, const float* factors, int64_t terms)
      : isa_(isa), factors_(factors), scaled_(factors == nullptr ? 0 : terms) {}

  template <typename T, typename Function>
  auto with_row(const T* row, const Function& function) {
    if (factors_ == nullptr) {
      return function(row);
    }
    scale_row(isa_, row, factors_, static_cast<int64_t>(scaled_.size()), scaled_.data());
    return function(static_cast<const float*>(scaled_.data()));
  }

 private:
  const Isa isa_;
  const float* const factors_;
  std::vector<float> scaled_;
};

}  // namespace polycast_cpu
