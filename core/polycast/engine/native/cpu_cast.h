// A cast of float32 weights on x86, bit for bit equal to torch's kernel and faster.
//
// A weight that is used once comes from memory, and hardware prefetchers do not cross pages. So the loop goes over four parts of
// the weight at the same time, and prefetches in each.
//
// This is a kernel of the CPU in the core. As an op of the CPU's backend it would be a second library that every user has to compile,
// and a dispatcher call for each cast.

#pragma once

#include "magnitudes.h"
#include "observed.h"
#include "parallel.h"

#if defined(__x86_64__)
#include <cpuid.h>
#endif

namespace {

#if defined(__x86_64__)

using EightFloats = float __attribute__((vector_size(32)));
using EightWords = uint32_t __attribute__((vector_size(32)));
using EightHalves = uint16_t __attribute__((vector_size(16)));

constexpr int64_t kCacheLine = 16;  // in floats
constexpr int64_t kGrain = 32768;  // numbers for each thread at least, as in torch

template <ScalarType dtype>
[[gnu::target("avx2,f16c"), gnu::always_inline]] inline void cast_eight(const float* from, uint16_t* to) {
  EightFloats numbers;
  std::memcpy(&numbers, from, sizeof(numbers));
  if constexpr (dtype == at::kHalf) {
    const auto halves = __builtin_ia32_vcvtps2ph256(numbers, 0);  // round to nearest
    std::memcpy(to, &halves, sizeof(halves));
  } else {
    const auto bits = reinterpret_cast<EightWords>(numbers);
    const auto is_number = reinterpret_cast<EightWords>(numbers == numbers);
    const EightWords rounded = (bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16;  // to the nearest, ties to even
    const auto halves = __builtin_convertvector((rounded & is_number) | (~is_number & 0xffffu), EightHalves);
    std::memcpy(to, &halves, sizeof(halves));
  }
}

// The smallest and the largest magnitude of floats.
struct Extremes {
  using EightIntegers = int32_t __attribute__((vector_size(32)));

  EightIntegers smallest = EightIntegers{} + kWithoutSign<int32_t>, largest{};

  [[gnu::target("avx2"), gnu::always_inline]] inline void add(const float* from) {
    EightIntegers values;
    std::memcpy(&values, from, sizeof(values));
    values &= kWithoutSign<int32_t>;
    smallest = values < smallest ? values : smallest;
    largest = values > largest ? values : largest;
  }

  // Return whether all are inside of the bounds, and note the largest one.
  [[gnu::target("avx2"), gnu::always_inline]] inline bool are_inside(const Bounds& bounds, Magnitudes& counts) const {
    int32_t least = kWithoutSign<int32_t>, most = 0;
    for (int lane = 0; lane < 8; ++lane) {
      least = std::min<int32_t>(least, smallest[lane]);
      most = std::max<int32_t>(most, largest[lane]);
    }
    if (least < bounds.underflow || most >= bounds.overflow) {
      return false;
    }
    counts.largest = std::max(counts.largest, most);
    return true;
  }
};

// `counts` is null, or where to count what underflows and overflows: a block that contains any is read again, from the cache.
template <ScalarType dtype, bool is_counted>
[[gnu::target("avx2,f16c")]] void cast_part(const float* from, uint16_t* to, int64_t count, Magnitudes* counts) {
  constexpr int64_t kStreams = 4, kAhead = 256;
  const int64_t of_each = count / kStreams / kCacheLine * kCacheLine, block = is_counted ? 1024 : of_each;
  const auto count_again = [&](int64_t begin, int64_t some) {
    count_some(reinterpret_cast<const int32_t*>(from + begin), some, *bounds_of(at::kFloat, dtype), *counts);
  };
  for (int64_t begin = 0; begin < of_each; begin += block) {
    const int64_t end = std::min(begin + block, of_each);
    Extremes extremes;
    for (int64_t i = begin; i < end; i += kCacheLine) {
      for (int64_t stream = 0; stream < kStreams; ++stream) {
        const int64_t at = stream * of_each + i;
        __builtin_prefetch(from + at + kAhead);
        cast_eight<dtype>(from + at, to + at);
        cast_eight<dtype>(from + at + 8, to + at + 8);
        if constexpr (is_counted) {
          extremes.add(from + at);
          extremes.add(from + at + 8);
        }
      }
    }
    if (is_counted && !extremes.are_inside(*bounds_of(at::kFloat, dtype), *counts)) {
      for (int64_t stream = 0; stream < kStreams; ++stream) {
        count_again(stream * of_each + begin, end - begin);
      }
    }
  }
  int64_t at = kStreams * of_each;
  if (is_counted) {
    count_again(at, count - at);
  }
  for (; at + 8 <= count; at += 8) {
    cast_eight<dtype>(from + at, to + at);
  }
  if (at < count) {
    float last[8] = {};
    uint16_t casts[8];
    std::memcpy(last, from + at, (count - at) * sizeof(float));
    cast_eight<dtype>(last, casts);
    std::memcpy(to + at, casts, (count - at) * sizeof(uint16_t));
  }
}

bool has_avx2_and_f16c() {
  static const bool there = [] {
    __builtin_cpu_init();
    unsigned features[4] = {};  // __builtin_cpu_supports("f16c") is unknown to Clang 17 and GCC 10
    __get_cpuid(1, &features[0], &features[1], &features[2], &features[3]);
    return __builtin_cpu_supports("avx2") && (features[2] & bit_F16C) != 0;
  }();
  return there;
}

// Return whether the loop can replace torch's kernel: nothing else intercepts the op, and the layout is dense.
bool can_cast_on_cpu(const Tensor& weight, ScalarType dtype) {
  static constexpr c10::DispatchKeySet kTransparent{
      DispatchKey::BackendSelect, DispatchKey::ADInplaceOrView, DispatchKey::AutogradFunctionality, DispatchKey::AutocastCPU};
  const auto& local = c10::impl::tls_local_dispatch_key_set();
  const auto keys = ((weight.key_set() | local.included_) - local.excluded_) - kTransparent;
  const size_t bytes = (weight.storage_offset() + weight.numel()) * sizeof(float);
  return keys == c10::DispatchKeySet(DispatchKey::CPU) && weight.scalar_type() == at::kFloat &&
      (dtype == at::kBFloat16 || dtype == at::kHalf) && weight.is_non_overlapping_and_dense() &&
      weight.storage().nbytes() >= bytes && has_avx2_and_f16c() && polycast::has_threads();
}

template <ScalarType dtype>
void cast_floats(const float* from, uint16_t* to, int64_t count, CountedCast* counted) {
  if (counted == nullptr) {
    polycast::for_each_part(
        count, kGrain, [&](int64_t begin, int64_t end) { cast_part<dtype, false>(from + begin, to + begin, end - begin, nullptr); });
    return;
  }
  std::mutex mutex;
  polycast::for_each_part(count, kGrain, [&](int64_t begin, int64_t end) {
    Magnitudes part;
    cast_part<dtype, true>(from + begin, to + begin, end - begin, &part);
    const std::lock_guard<std::mutex> lock(mutex);
    counted->magnitudes.add(part);
  });
  counted->count += count;
}

// Fill a cast of the same layout. Profilers see it under the name of torch's kernel.
void cast_on_cpu(const Tensor& weight, const Tensor& cast) {
  RECORD_FUNCTION("aten::copy_", (std::array<c10::IValue, 2>{cast, weight}));
  const auto* const from = static_cast<const float*>(weight.const_data_ptr());
  auto* const to = static_cast<uint16_t*>(cast.mutable_data_ptr());
  CountedCast* const counted = observed_op == nullptr ? nullptr : observed_op->cast;
  (cast.scalar_type() == at::kHalf ? &cast_floats<at::kHalf> : &cast_floats<at::kBFloat16>)(from, to, weight.numel(), counted);
}

#else

bool can_cast_on_cpu(const Tensor&, ScalarType) { return false; }
void cast_on_cpu(const Tensor&, const Tensor&) {}

#endif

}  // namespace
