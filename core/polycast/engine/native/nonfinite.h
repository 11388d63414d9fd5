// Whether tensors are finite, asked of them without anybody seeing it.
//
// Owns nothing. Locks: none. A device is waited for.

#pragma once

#include <ATen/ATen.h>
#include <ATen/core/ivalue.h>
#include <ATen/record_function.h>
#include <c10/core/impl/LocalDispatchKeySet.h>

#include <algorithm>
#include <cmath>

#include "weights.h"

namespace {

using c10::DispatchKey;

bool is_real(const Tensor& tensor) {
  return tensor.has_storage() && tensor.layout() == at::kStrided && !tensor.is_meta() &&
      !tensor.unsafeGetTensorImpl()->key_set().has(DispatchKey::Python);
}

// The loop is over blocks of a known size, so that a compiler makes vectors of it at any level.
template <class Word, Word exponent>
[[gnu::optimize("O3")]] bool all_finite(const void* data, size_t count) {
  const auto* const words = static_cast<const Word*>(data);
  constexpr size_t kBlock = 1024;
  size_t i = 0;
  for (; i + kBlock <= count; i += kBlock) {
    Word found = 0;
    for (size_t j = 0; j < kBlock; ++j) {
      found |= static_cast<Word>((words[i + j] & exponent) == exponent);
    }
    if (found != 0) {
      return false;
    }
  }
  for (; i < count; ++i) {
    if ((words[i] & exponent) == exponent) {
      return false;
    }
  }
  return true;
}

// Ops that are called here are the observer's own.
struct Unobserved {
  at::RecordFunctionGuard no_events{false};
  c10::impl::ExcludeDispatchKeyGuard no_autocast{c10::autocast_dispatch_keyset};
  at::AutoDispatchBelowADInplaceOrView below_autograd;
};

bool is_finite(const Tensor& tensor) {
  if (!tensor.is_floating_point() || !is_real(tensor) || tensor.numel() == 0) {
    return true;
  }
  try {
    if (tensor.is_cpu()) {
      const size_t count = tensor.numel();
      Tensor dense = tensor;
      if (!tensor.is_non_overlapping_and_dense()) {
        const Unobserved unobserved;
        dense = tensor.contiguous();
      }
      const void* const data = dense.const_data_ptr();
      switch (tensor.scalar_type()) {
        case at::kFloat:
          return all_finite<uint32_t, 0x7f800000u>(data, count);
        case at::kBFloat16:
          return all_finite<uint16_t, 0x7f80u>(data, count);
        case at::kHalf:
          return all_finite<uint16_t, 0x7c00u>(data, count);
        case at::kDouble:
          return all_finite<uint64_t, 0x7ff0000000000000ull>(data, count);
        default:
          return true;
      }
    }
    if (captures(tensor, py::object())) {
      return true;  // nothing can be asked of what is only recorded
    }
    const Unobserved unobserved;
    return at::isfinite(tensor).all().item<bool>();
  } catch (const c10::Error&) {  // the device has no such op
    return true;
  }
}

bool is_finite_number(const c10::IValue& value) { return !value.isDouble() || std::isfinite(value.toDouble()); }

}  // namespace
