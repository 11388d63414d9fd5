// Convert between float32 and the fast dtypes on the CPU: bit for bit as torch does, and faster. For small tensors this skips torch's
// dispatcher, which takes many times as long as the kernel.

#pragma once

#include <ATen/EmptyTensor.h>
#include <ATen/core/Tensor.h>
#include <ATen/record_function.h>
#include <c10/core/impl/LocalDispatchKeySet.h>

#include <array>
#include <cstdint>
#include <cstring>

#include "parallel.h"

#if defined(__x86_64__)
#include <cpuid.h>
#endif

namespace polycast {

constexpr int64_t kGrain = 32768;  // numbers for each thread at least, as in torch

// Casts floats to bfloat16 or float16.
using CastFloats = void (*)(const float* from, uint16_t* to, int64_t count);

#if defined(__x86_64__)

using EightFloats = float __attribute__((vector_size(32)));
using EightWords = uint32_t __attribute__((vector_size(32)));
using EightHalves = uint16_t __attribute__((vector_size(16)));

template <at::ScalarType dtype>
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

// A weight that is used once comes from memory, and hardware prefetchers do not cross pages. So the loop goes over two parts of the
// floats at the same time, and prefetches a page ahead in each. With four parts, writing to as many pages takes longer than that saves.
template <at::ScalarType dtype>
[[gnu::target("avx2,f16c")]] void cast_floats(const float* from, uint16_t* to, int64_t count) {
  constexpr int64_t kStreams = 2, kAhead = 1024, kCacheLine = 16;  // in floats
  const int64_t of_each = count / kStreams / kCacheLine * kCacheLine;
  for (int64_t i = 0; i < of_each; i += kCacheLine) {
    for (int64_t stream = 0; stream < kStreams; ++stream) {
      const int64_t at = stream * of_each + i;
      __builtin_prefetch(from + at + kAhead);
      cast_eight<dtype>(from + at, to + at);
      cast_eight<dtype>(from + at + 8, to + at + 8);
    }
  }
  int64_t at = kStreams * of_each;
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

[[gnu::target("avx2")]] inline void widen(const uint16_t* halves, uint32_t* bits, int64_t count) {
  int64_t i = 0;
  for (; i + 8 <= count; i += 8) {
    EightHalves eight;
    std::memcpy(&eight, halves + i, sizeof(eight));
    const EightWords wide = __builtin_convertvector(eight, EightWords) << 16;
    std::memcpy(bits + i, &wide, sizeof(wide));
  }
  for (; i < count; ++i) {
    bits[i] = static_cast<uint32_t>(halves[i]) << 16;
  }
}

inline bool has_avx2_and_f16c() {
  static const bool there = [] {
    __builtin_cpu_init();
    unsigned features[4] = {};  // __builtin_cpu_supports("f16c") is unknown to Clang 17 and GCC 10
    __get_cpuid(1, &features[0], &features[1], &features[2], &features[3]);
    return __builtin_cpu_supports("avx2") && (features[2] & bit_F16C) != 0;
  }();
  return there;
}

// Return the function that casts floats to a dtype; null: there is none.
inline CastFloats cast_floats_to(at::ScalarType dtype) {
  return dtype == at::kBFloat16 ? &cast_floats<at::kBFloat16> : dtype == at::kHalf ? &cast_floats<at::kHalf> : nullptr;
}

// Return whether these functions can replace torch's kernel: an op on the tensor would go straight to the CPU's, as autograd is off and
// nothing else intercepts it, and its memory is dense, and there.
inline bool is_convertible(const at::Tensor& tensor) {
  using c10::DispatchKey;
  static constexpr c10::DispatchKeySet kTransparent{
      DispatchKey::BackendSelect, DispatchKey::ADInplaceOrView, DispatchKey::AutocastCPU};
  const auto& local = c10::impl::tls_local_dispatch_key_set();
  const auto keys = ((tensor.key_set() | local.included_) - local.excluded_) - kTransparent;
  return keys == c10::DispatchKeySet(DispatchKey::CPU) && tensor.is_non_overlapping_and_dense() && has_avx2_and_f16c() &&
      (tensor.storage_offset() + tensor.numel()) * tensor.itemsize() <= tensor.storage().nbytes() &&
      (tensor.numel() <= kGrain || has_threads());
}

// Convert to a dtype. Return the tensor itself if it has the dtype.
inline at::Tensor converted(const at::Tensor& tensor, at::ScalarType dtype) {
  const at::ScalarType from = tensor.scalar_type();
  if (from == dtype) {
    return tensor;
  }
  const bool widens = from == at::kBFloat16 && dtype == at::kFloat, narrows = from == at::kFloat && dtype == at::kBFloat16;
  if (!(widens || narrows) || !is_convertible(tensor)) {
    return tensor.to(dtype);
  }
  RECORD_FUNCTION("aten::to", (std::array<c10::IValue, 1>{tensor}));
  at::Tensor result(at::detail::empty_strided_cpu(tensor.sizes(), tensor.strides(), dtype));
  const void* const given = tensor.const_data_ptr();
  void* const found = result.mutable_data_ptr();
  for_each_part(tensor.numel(), kGrain, [&](int64_t begin, int64_t end) {
    if (narrows) {
      cast_floats<at::kBFloat16>(static_cast<const float*>(given) + begin, static_cast<uint16_t*>(found) + begin, end - begin);
    } else {
      widen(static_cast<const uint16_t*>(given) + begin, static_cast<uint32_t*>(found) + begin, end - begin);
    }
  });
  return result;
}

#else

inline CastFloats cast_floats_to(at::ScalarType) { return nullptr; }
inline bool is_convertible(const at::Tensor&) { return false; }
inline at::Tensor converted(const at::Tensor& tensor, at::ScalarType dtype) {
  return tensor.scalar_type() == dtype ? tensor : tensor.to(dtype);
}

#endif

}  // namespace polycast
