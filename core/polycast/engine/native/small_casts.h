// Conversions between float32 and bfloat16 of few numbers, for which torch's dispatcher takes many times as long as its kernel.
//
// In the core and not in the backend of the CPU because an op of the backend would be called by that dispatcher.

#pragma once

#include <ATen/EmptyTensor.h>

#include "cpu_cast.h"

namespace {

#if defined(__x86_64__)

// Return whether an op on a tensor would go straight to the kernel of the CPU: autograd is off too, and nothing intercepts it.
bool is_only_on_cpu(const Tensor& tensor) {
  static constexpr c10::DispatchKeySet kTransparent{
      DispatchKey::BackendSelect, DispatchKey::ADInplaceOrView, DispatchKey::AutocastCPU};
  const auto& local = c10::impl::tls_local_dispatch_key_set();
  const auto keys = ((tensor.key_set() | local.included_) - local.excluded_) - kTransparent;
  return keys == c10::DispatchKeySet(DispatchKey::CPU);
}

[[gnu::target("avx2")]] void widen(const uint16_t* halves, uint32_t* bits, int64_t count) {
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

// Return a conversion, bit for bit equal to torch's; the tensor itself if it has the dtype.
Tensor converted(const Tensor& tensor, ScalarType dtype) {
  constexpr int64_t kFew = 32768;  // more are converted by several threads
  const ScalarType from = tensor.scalar_type();
  if (from == dtype) {
    return tensor;
  }
  const bool widens = from == at::kBFloat16 && dtype == at::kFloat, narrows = from == at::kFloat && dtype == at::kBFloat16;
  if (!(widens || narrows) || !is_only_on_cpu(tensor) || tensor.numel() > kFew || !tensor.is_contiguous() ||
      !has_instructions()) {
    return tensor.to(dtype);
  }
  RECORD_FUNCTION("aten::to", (std::array<c10::IValue, 1>{tensor}));
  Tensor result(at::detail::empty_cpu(tensor.sizes(), dtype));
  const int64_t count = tensor.numel();
  if (narrows) {
    const auto* const numbers = static_cast<const float*>(tensor.const_data_ptr());
    cast_part<at::kBFloat16, false>(numbers, static_cast<uint16_t*>(result.mutable_data_ptr()), count, nullptr);
    return result;
  }
  widen(static_cast<const uint16_t*>(tensor.const_data_ptr()), static_cast<uint32_t*>(result.mutable_data_ptr()), count);
  return result;
}

#else

Tensor converted(const Tensor& tensor, ScalarType dtype) { return tensor.scalar_type() == dtype ? tensor : tensor.to(dtype); }

#endif

}  // namespace
