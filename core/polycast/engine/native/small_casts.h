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

// Return a conversion, bit for bit equal to torch's.
Tensor converted(const Tensor& tensor, ScalarType dtype) {
  constexpr int64_t kFew = 8192;
  const ScalarType from = tensor.scalar_type();
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
  const auto* const halves = static_cast<const uint16_t*>(tensor.const_data_ptr());
  auto* const bits = static_cast<uint32_t*>(result.mutable_data_ptr());
  for (int64_t i = 0; i < count; ++i) {
    bits[i] = static_cast<uint32_t>(halves[i]) << 16;
  }
  return result;
}

#else

Tensor converted(const Tensor& tensor, ScalarType dtype) { return tensor.to(dtype); }

#endif

}  // namespace
