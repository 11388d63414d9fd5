// Attention by one query for each head where heads share keys, as a decoder computes it for each token. Keys and values are read once, in
// their own dtypes; products, softmax and sums are in float32, and the result is rounded once.
#pragma once

#include <ATen/Context.h>
#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <memory>
#include <optional>

#include "parts.h"
#include "simd.h"
#include "tensors.h"

namespace polycast_cpu {

// The queries that share a load of the keys, and the keys whose products are in the cache together.
constexpr int64_t kQueries = 4, kKeys = 64;
// Vectors of so many elements.
constexpr int64_t kDense = 8;
// The fewest queries that share keys. For fewer, torch's kernel is as good.
constexpr int64_t kFewest = 3;

constexpr int64_t padded_to_fours(int64_t queries) {
  return (queries + kQueries - 1) / kQueries * kQueries;
}

// The keys or values of some heads: [keys, width], in rows of dense elements.
template <typename T>
struct Rows {
  const T* values;
  int64_t stride;

  const T* row(int64_t number) const { return values + number * stride; }
};

// Queries that share keys, of a width, scaled: [queries, width], padded with zeros to a multiple of kQueries.
struct SharedQueries {
  const float* values;
  int64_t count, width;
};

#if defined(__x86_64__)

// exp(x) for x <= 0, to 2 units in the last place; of nan nan. Less than exp(-87) becomes 0.
[[gnu::target("avx2,fma,f16c")]] inline __m128 exp_of_negative(__m128 x) {
  const __m128 is_larger = _mm_cmpnlt_ps(x, _mm_set1_ps(-87.0f));  // as is nan
  x = _mm_max_ps(_mm_set1_ps(-87.0f), x);                          // of nan the second
  const __m128 power = _mm_round_ps(_mm_mul_ps(x, _mm_set1_ps(1.44269504f)), _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
  const __m128 rest = _mm_fnmadd_ps(power, _mm_set1_ps(-2.12194440e-4f), _mm_fnmadd_ps(power, _mm_set1_ps(0.693359375f), x));
  __m128 sum = _mm_set1_ps(1.9875691500e-4f);
  for (const float coefficient : {1.3981999507e-3f, 8.3334519073e-3f, 4.1665795894e-2f, 1.6666665459e-1f, 5.0000001201e-1f}) {
    sum = _mm_fmadd_ps(sum, rest, _mm_set1_ps(coefficient));
  }
  sum = _mm_add_ps(_mm_fmadd_ps(sum, _mm_mul_ps(rest, rest), rest), _mm_set1_ps(1));
  const __m128i exponent = _mm_slli_epi32(_mm_add_epi32(_mm_cvtps_epi32(power), _mm_set1_epi32(127)), 23);
  return _mm_and_ps(_mm_mul_ps(sum, _mm_castsi128_ps(exponent)), is_larger);
}

// Write the products of a key and of four queries, which are `width` apart.
template <typename T>
[[gnu::target("avx2,fma,f16c")]] inline __m128 products_of_key(const float* queries, int64_t width, const T* key) {
  __m256 sums[kQueries] = {};
  for (int64_t k = 0; k < width; k += kDense) {
    const __m256 values = load8(key + k);
#pragma GCC unroll 4
    for (int query = 0; query < kQueries; ++query) {
      sums[query] = _mm256_fmadd_ps(values, load8(queries + query * width + k), sums[query]);
    }
  }
  const __m256 of_all = _mm256_hadd_ps(_mm256_hadd_ps(sums[0], sums[1]), _mm256_hadd_ps(sums[2], sums[3]));
  return _mm_add_ps(_mm256_castps256_ps128(of_all), _mm256_extractf128_ps(of_all, 1));
}

// Add values, weighted by probabilities for four queries, to sums, which are `width` apart.
template <typename T>
[[gnu::target("avx2,fma,f16c")]] inline void add_weighted(const float (*probabilities)[kQueries], const Rows<T>& values, int64_t count,
                                                          int64_t width, float* sums) {
  for (int64_t k = 0; k < width; k += kDense) {
    __m256 of_query[kQueries];
#pragma GCC unroll 4
    for (int query = 0; query < kQueries; ++query) {
      of_query[query] = load8(sums + query * width + k);
    }
    for (int64_t key = 0; key < count; ++key) {
      const __m256 value = load8(values.row(key) + k);
#pragma GCC unroll 4
      for (int query = 0; query < kQueries; ++query) {
        of_query[query] = _mm256_fmadd_ps(_mm256_broadcast_ss(&probabilities[key][query]), value, of_query[query]);
      }
    }
#pragma GCC unroll 4
    for (int query = 0; query < kQueries; ++query) {
      store8(sums + query * width + k, of_query[query]);
    }
  }
}

// Write the attention of queries that share keys and values.
template <typename Key, typename Value, typename Out>
[[gnu::target("avx2,fma,f16c")]] void attend_shared(const SharedQueries& queries, const Rows<Key>& keys, const Rows<Value>& values,
                                                    int64_t count, int64_t width, Out* out) {
  alignas(64) float products[kKeys][kQueries];
  const int64_t fours = padded_to_fours(queries.count) / kQueries;
  const auto sums = std::make_unique<float[]>(fours * kQueries * width);
  const auto states = std::make_unique<float[][2][kQueries]>(fours);  // the largest product so far, and the sum of probabilities
  for (int64_t four = 0; four < fours; ++four) {
    std::fill_n(states[four][0], kQueries, std::numeric_limits<float>::lowest());  // the difference of infinities would be nan
  }
  for (int64_t first = 0; first < count; first += kKeys) {
    const int64_t now = std::min(kKeys, count - first);
    for (int64_t four = 0; four < fours; ++four) {
      const float* const query = queries.values + four * kQueries * queries.width;
      float* const of_four = sums.get() + four * kQueries * width;
      const __m128 before = _mm_loadu_ps(states[four][0]);
      __m128 largest = before;
      for (int64_t key = 0; key < now; ++key) {
        const __m128 product = products_of_key(query, queries.width, keys.row(first + key));
        largest = _mm_max_ps(largest, product);
        _mm_store_ps(products[key], product);
      }
      const __m128 factor = exp_of_negative(_mm_sub_ps(before, largest));
      __m128 sum = _mm_mul_ps(_mm_loadu_ps(states[four][1]), factor);
      for (int64_t key = 0; key < now; ++key) {
        const __m128 probability = exp_of_negative(_mm_sub_ps(_mm_load_ps(products[key]), largest));
        sum = _mm_add_ps(sum, probability);
        _mm_store_ps(products[key], probability);
      }
      _mm_storeu_ps(states[four][0], largest);
      _mm_storeu_ps(states[four][1], sum);
      for (int64_t number = 0; first > 0 && number < kQueries; ++number) {
        alignas(16) float factors[kQueries];
        _mm_store_ps(factors, factor);
        for (int64_t k = 0; k < width; k += kDense) {
          float* const at = of_four + number * width + k;
          store8(at, _mm256_mul_ps(load8(at), _mm256_set1_ps(factors[number])));
        }
      }
      add_weighted(products, Rows<Value>{values.row(first), values.stride}, now, width, of_four);
    }
  }
  for (int64_t number = 0; number < queries.count; ++number) {
    const __m256 of_query = _mm256_set1_ps(states[number / kQueries][1][number % kQueries]);
    const __m256 sum = _mm256_max_ps(_mm256_set1_ps(std::numeric_limits<float>::min()), of_query);  // of 0, so that the result is 0
    for (int64_t k = 0; k < width; k += kDense) {
      store8(out + number * width + k, _mm256_div_ps(load8(sums.get() + number * width + k), sum));
    }
  }
}

// Call a function with a typed pointer to elements that are float32 or of type T.
template <typename T, typename Function>
void with_float_or(const at::Tensor& tensor, const Function& function) {
  tensor.scalar_type() == at::kFloat ? function(tensor.const_data_ptr<float>()) : function(tensor.const_data_ptr<T>());
}

// Attention by queries, [shared heads, queries padded to fours, width], which are scaled.
template <typename Out>
void attend(const float* queries, int64_t group, const at::Tensor& key, const at::Tensor& value, Out* out) {
  const int64_t shared = key.size(1), count = key.size(2), width = key.size(3), width_of_values = value.size(3);
  const int64_t rows = padded_to_fours(group);
  with_float_or<Out>(key, [&](const auto* keys) {
    with_float_or<Out>(value, [&](const auto* values) {
      for_each_part(key.size(0) * shared, grain(count * (width + width_of_values)), [&](int64_t begin, int64_t end) {
        for (int64_t part = begin; part < end; ++part) {
          const int64_t batch = part / shared, head = part % shared;
          attend_shared(SharedQueries{queries + part * rows * width, group, width},
                        Rows{keys + batch * key.stride(0) + head * key.stride(1), key.stride(2)},
                        Rows{values + batch * value.stride(0) + head * value.stride(1), value.stride(2)}, count,
                        width_of_values, out + part * group * width_of_values);
        }
      });
    });
  });
}

#endif

// Return whether attend_one_query() takes a tensor: of rows of whole vectors, in float32 or the fast dtype.
inline bool has_vectors(const at::Tensor& tensor, at::ScalarType fast) {
  return tensor.dim() == 4 && (tensor.scalar_type() == at::kFloat || tensor.scalar_type() == fast) && tensor.stride(3) == 1 &&
         tensor.size(3) % kDense == 0;
}

// Return the attention of queries [B, H, 1, K] by keys [B, S, L, K] and values [B, S, L, V], in the fast dtype; an undefined tensor where
// torch's kernel is as good, where it has to say what is wrong, and on processors without AVX2.
inline at::Tensor attend_one_query(const at::Tensor& query, const at::Tensor& key, const at::Tensor& value,
                                   const std::optional<at::Tensor>& mask, double dropout, bool is_causal,
                                   std::optional<double> scale, bool shares_keys, at::ScalarType fast) {
#if defined(__x86_64__)
  if (mask || dropout != 0 || is_causal || !shares_keys || !at::globalContext().userEnabledFlashSDP() ||
      best_simd() == Simd::plain || (fast != at::kBFloat16 && fast != at::kHalf) || !has_vectors(query, fast) ||
      !has_vectors(key, fast) || !has_vectors(value, fast)) {
    return {};
  }
  const int64_t batches = query.size(0), heads = query.size(1), shared = key.size(1), width = query.size(3);
  const bool fits = query.size(2) == 1 && key.size(0) == batches && key.size(3) == width && heads % std::max<int64_t>(1, shared) == 0 &&
                    key.sizes().slice(0, 3) == value.sizes().slice(0, 3);
  if (!fits || query.numel() == 0 || key.numel() == 0 || heads < kFewest * shared) {
    return {};
  }
  const int64_t group = heads / shared, rows = padded_to_fours(group);
  const double factor = scale.value_or(1 / std::sqrt(static_cast<double>(width)));
  const auto scaled = std::make_unique<float[]>(batches * shared * rows * width);
  with_elements(query, [&](const auto* elements) {
    for (int64_t head = 0; head < batches * heads; ++head) {
      const auto* const from = elements + head / heads * query.stride(0) + head % heads * query.stride(1);
      std::transform(from, from + width, scaled.get() + (head / group * rows + head % group) * width,
                     [&](float each) { return static_cast<float>(each * factor); });
    }
  });
  at::Tensor out = at::empty({batches, heads, 1, value.size(3)}, query.options().dtype(fast));
  fast == at::kHalf ? attend(scaled.get(), group, key, value, out.data_ptr<at::Half>())
                    : attend(scaled.get(), group, key, value, out.data_ptr<at::BFloat16>());
  return out;
#else
  return {};
#endif
}

}  // namespace polycast_cpu
