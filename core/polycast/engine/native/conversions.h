// Convert activations between float32 and bfloat16. For small tensors this skips torch's dispatcher, which takes many times as long as
// the kernel; for large ones this kernel is faster.
//
// It is in the core because an op of the CPU's backend would go through that dispatcher.

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

// Convert to a dtype, with the same bits as torch. Return the tensor itself if it has the dtype.
Tensor converted(const Tensor& tensor, ScalarType dtype) {
  const ScalarType from = tensor.scalar_type();
  if (from == dtype) {
    return tensor;
  }
  const bool widens = from == at::kBFloat16 && dtype == at::kFloat, narrows = from == at::kFloat && dtype == at::kBFloat16;
  if (!(widens || narrows) || !is_only_on_cpu(tensor) || !tensor.is_non_overlapping_and_dense() || !has_avx2_and_f16c()) {
    return tensor.to(dtype);
  }
  const int64_t count = tensor.numel();
  if (count > kGrain && !polycast::has_threads()) {
    return tensor.to(dtype);
  }
  RECORD_FUNCTION("aten::to", (std::array<c10::IValue, 1>{tensor}));
  Tensor result(at::detail::empty_strided_cpu(tensor.sizes(), tensor.strides(), dtype));
  if (narrows) {
    cast_floats<at::kBFloat16>(
        static_cast<const float*>(tensor.const_data_ptr()), static_cast<uint16_t*>(result.mutable_data_ptr()), count, nullptr);
    return result;
  }
  const auto* const halves = static_cast<const uint16_t*>(tensor.const_data_ptr());
  auto* const bits = static_cast<uint32_t*>(result.mutable_data_ptr());
  polycast::for_each_part(
      count, kGrain, [&](int64_t begin, int64_t end) { widen(halves + begin, bits + begin, end - begin); });
  return result;
}

#else

Tensor converted(const Tensor& tensor, ScalarType dtype) { return tensor.scalar_type() == dtype ? tensor : tensor.to(dtype); }

#endif

}  // namespace
