// Whether tensors are finite, asked of them without anybody seeing it.
//
// Owns nothing. Locks: none. A device is waited for.

#pragma once

#include <ATen/EmptyTensor.h>
#include <ATen/SparseCsrTensorImpl.h>
#include <ATen/SparseTensorImpl.h>
#include <ATen/core/Tensor.h>
#include <ATen/core/ivalue.h>
#include <ATen/record_function.h>
#include <c10/core/impl/LocalDispatchKeySet.h>

#include <algorithm>
#include <cmath>
#include <utility>

#include "python.h"
#include "streams.h"
#include "tensors.h"

namespace {

// Whether a tensor has another in it, on which ops run.
bool is_wrapper(const Tensor& tensor) {
  constexpr c10::DispatchKeySet kWrappers{
      DispatchKey::Python, DispatchKey::Functionalize, DispatchKey::FuncTorchBatched, DispatchKey::FuncTorchGradWrapper,
      DispatchKey::BatchedNestedTensor};
  return tensor.key_set().has_any(kWrappers);
}

bool is_sparse(const Tensor& tensor) {
  constexpr c10::DispatchKeySet kSparse{DispatchKey::Sparse, DispatchKey::SparseCsr};
  return tensor.key_set().has_any(kSparse) && !is_wrapper(tensor);
}

Tensor values_of_sparse(const Tensor& tensor) {
  const c10::TensorImpl* const impl = tensor.unsafeGetTensorImpl();
  return tensor.key_set().has(DispatchKey::Sparse) ? static_cast<const at::SparseTensorImpl*>(impl)->values()
                                                   : static_cast<const at::SparseCsrTensorImpl*>(impl)->values();
}

// The bytes of a tensor's values; 0 where only Python could tell.
uint64_t bytes_of(const Tensor& tensor) {
  if (is_sparse(tensor)) {
    const Tensor values = values_of_sparse(tensor);
    return values.numel() * values.itemsize();
  }
  return has_known_sizes(tensor) ? tensor.numel() * tensor.itemsize() : 0;
}

// Whether the values are in memory that is there: not so where it was given up (as FSDP does), or never made.
bool is_in_memory(const Tensor& tensor) {
  constexpr c10::DispatchKeySet kElsewhere{DispatchKey::ZeroTensor, DispatchKey::NestedTensor};
  return !is_wrapper(tensor) && tensor.has_storage() && !tensor.is_meta() && !tensor.key_set().has_any(kElsewhere) &&
      at::detail::computeStorageNbytes(tensor.sizes(), tensor.strides(), tensor.itemsize(), tensor.storage_offset()) <=
      tensor.storage().nbytes();
}

// How the words of a dtype say that a value is not finite: those bits of the mask are set, and no others of it.
template <class Word>
struct NotFinite {
  Word mask, bits;
};

// The loop is over blocks of a known size, so that a compiler makes vectors of it at any level.
template <class Word>
[[gnu::optimize("O3")]] bool all_finite(const Word* words, size_t count, NotFinite<Word> not_finite) {
  constexpr size_t kBlock = 1024;
  size_t i = 0;
  for (; i + kBlock <= count; i += kBlock) {
    Word found = 0;
    for (size_t j = 0; j < kBlock; ++j) {
      found |= static_cast<Word>((words[i + j] & not_finite.mask) == not_finite.bits);
    }
    if (found != 0) {
      return false;
    }
  }
  for (; i < count; ++i) {
    if ((words[i] & not_finite.mask) == not_finite.bits) {
      return false;
    }
  }
  return true;
}

// The same of memory with steps between its values, dimension by dimension. What is expanded is looked at once.
template <class Word>
bool all_finite(const Word* words, c10::IntArrayRef sizes, c10::IntArrayRef strides, size_t each, NotFinite<Word> not_finite) {
  if (sizes.empty()) {
    return all_finite(words, each, not_finite);
  }
  const int64_t size = strides[0] == 0 ? std::min<int64_t>(sizes[0], 1) : sizes[0];
  if (sizes.size() == 1 && strides[0] == 1) {
    return all_finite(words, size * each, not_finite);
  }
  for (int64_t i = 0; i < size; ++i) {
    if (!all_finite(words + i * strides[0] * static_cast<int64_t>(each), sizes.slice(1), strides.slice(1), each, not_finite)) {
      return false;
    }
  }
  return true;
}

// `each`: how many words a value has.
template <class Word>
bool all_finite(const Tensor& tensor, size_t each, NotFinite<Word> not_finite) {
  const auto* const words = static_cast<const Word*>(tensor.const_data_ptr());
  if (tensor.is_non_overlapping_and_dense()) {
    return all_finite(words, tensor.numel() * each, not_finite);
  }
  return all_finite(words, tensor.sizes(), tensor.strides(), each, not_finite);
}

bool is_finite_in_memory(const Tensor& tensor) {
  constexpr NotFinite<uint16_t> kOfHalf{0x7c00u, 0x7c00u};
  constexpr NotFinite<uint32_t> kOfFloat{0x7f800000u, 0x7f800000u};
  constexpr NotFinite<uint64_t> kOfDouble{0x7ff0000000000000ull, 0x7ff0000000000000ull};
  switch (tensor.scalar_type()) {
    case at::kFloat:
    case at::kComplexFloat:
      return all_finite(tensor, 1 + tensor.is_complex(), kOfFloat);
    case at::kDouble:
    case at::kComplexDouble:
      return all_finite(tensor, 1 + tensor.is_complex(), kOfDouble);
    case at::kHalf:
    case at::kComplexHalf:
      return all_finite(tensor, 1 + tensor.is_complex(), kOfHalf);
    case at::kBFloat16:
      return all_finite<uint16_t>(tensor, 1, {0x7f80u, 0x7f80u});
    case at::kFloat8_e5m2:
      return all_finite<uint8_t>(tensor, 1, {0x7cu, 0x7cu});
    case at::kFloat8_e4m3fn:
      return all_finite<uint8_t>(tensor, 1, {0x7fu, 0x7fu});
    case at::kFloat8_e5m2fnuz:
    case at::kFloat8_e4m3fnuz:
      return all_finite<uint8_t>(tensor, 1, {0xffu, 0x80u});
    case at::kFloat8_e8m0fnu:
      return all_finite<uint8_t>(tensor, 1, {0xffu, 0xffu});
    default:
      return true;
  }
}

// Ops that are called here are the observer's own: no mode and no transform sees them.
struct Unobserved {
  at::RecordFunctionGuard no_events{false};
  c10::impl::ExcludeDispatchKeyGuard of_those{
      c10::autocast_dispatch_keyset |
      c10::DispatchKeySet{
          DispatchKey::Python, DispatchKey::PythonTLSSnapshot, DispatchKey::PreDispatch, DispatchKey::Functionalize,
          DispatchKey::FuncTorchDynamicLayerFrontMode, DispatchKey::FuncTorchDynamicLayerBackMode, DispatchKey::FuncTorchVmapMode}};
  at::AutoDispatchBelowADInplaceOrView below_autograd;
};

// Of what cannot be asked it is taken to be: what torch.func transforms, say, whose wrappers have no header that stands alone.
bool is_finite(const Tensor& tensor) {
  if (!tensor.is_floating_point() && !tensor.is_complex()) {
    return true;
  }
  if (is_sparse(tensor)) {
    return is_finite(values_of_sparse(tensor));
  }
  if (!is_in_memory(tensor) || tensor.numel() == 0) {
    return true;
  }
  try {
    if (tensor.is_cpu()) {
      return is_finite_in_memory(tensor);
    }
    if (captures(tensor, Object())) {
      return true;  // nothing can be asked of what is only recorded
    }
    const Unobserved unobserved;
    return tensor.isfinite().all().item<bool>();
  } catch (const c10::Error&) {  // the device has no such op
    return true;
  }
}

// Whether inf, and whether nan, is in a tensor that is not finite.
std::pair<bool, bool> inf_and_nan(const Tensor& tensor) {
  if (is_sparse(tensor)) {
    return inf_and_nan(values_of_sparse(tensor));
  }
  const Unobserved unobserved;
  try {
    const Tensor known = c10::elementSize(tensor.scalar_type()) == 1 ? tensor.to(at::kFloat) : tensor;
    return {known.isinf().any().item<bool>(), known.isnan().any().item<bool>()};
  } catch (const c10::Error&) {  // the device has no such op
    return {true, true};
  }
}

bool is_finite_number(const c10::IValue& value) {
  if (value.isComplexDouble()) {
    const auto number = value.toComplexDouble();
    return std::isfinite(number.real()) && std::isfinite(number.imag());
  }
  return !value.isDouble() || std::isfinite(value.toDouble());
}

}  // namespace
