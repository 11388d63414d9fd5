// Checks tensors for inf and nan, unseen by modes and transforms. Synchronizes with the device.
//
// Locks: none. The GIL is taken, with no lock held, to ask whether an accelerator captures a graph, and to handle what an op raises.

#pragma once

#include <ATen/EmptyTensor.h>
#include <ATen/SparseCsrTensorImpl.h>
#include <ATen/SparseTensorImpl.h>

#include <cmath>

#include "calls_to_python.h"
#include "python.h"
#include "streams.h"
#include "tensors.h"

namespace {

// Return whether a tensor wraps another one, on which ops run.
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

// Return the bytes of a tensor's values; 0 if only Python could tell.
uint64_t bytes_of(const Tensor& tensor) {
  if (is_sparse(tensor)) {
    const Tensor values = values_of_sparse(tensor);
    return values.numel() * values.itemsize();
  }
  return has_known_sizes(tensor) ? tensor.numel() * tensor.itemsize() : 0;
}

// Return whether the memory of the values is there. FSDP frees it, for instance.
bool is_in_memory(const Tensor& tensor) {
  constexpr c10::DispatchKeySet kElsewhere{DispatchKey::ZeroTensor, DispatchKey::NestedTensor};
  return !is_wrapper(tensor) && tensor.has_storage() && !tensor.is_meta() && !tensor.key_set().has_any(kElsewhere) &&
      at::detail::computeStorageNbytes(tensor.sizes(), tensor.strides(), tensor.itemsize(), tensor.storage_offset()) <=
      tensor.storage().nbytes();
}

// A value of a dtype is not finite if, of the bits of the mask, exactly these are set.
template <class Word>
struct NotFinite {
  Word mask, bits;
};

// Blocks of a fixed size let the compiler vectorize the loop.
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

// The same for strided memory, dimension by dimension. Expanded dimensions are read once.
template <class Word>
bool all_finite(
    const Word* words, c10::IntArrayRef sizes, c10::IntArrayRef strides, size_t words_per_value, NotFinite<Word> not_finite) {
  if (sizes.empty()) {
    return all_finite(words, words_per_value, not_finite);
  }
  const int64_t size = strides[0] == 0 ? std::min<int64_t>(sizes[0], 1) : sizes[0];
  if (sizes.size() == 1 && strides[0] == 1) {
    return all_finite(words, size * words_per_value, not_finite);
  }
  for (int64_t i = 0; i < size; ++i) {
    const Word* const slice = words + i * strides[0] * static_cast<int64_t>(words_per_value);
    if (!all_finite(slice, sizes.slice(1), strides.slice(1), words_per_value, not_finite)) {
      return false;
    }
  }
  return true;
}

template <class Word>
bool all_finite(const Tensor& tensor, size_t words_per_value, NotFinite<Word> not_finite) {
  const auto* const words = static_cast<const Word*>(tensor.const_data_ptr());
  if (tensor.is_non_overlapping_and_dense()) {
    return all_finite(words, tensor.numel() * words_per_value, not_finite);
  }
  return all_finite(words, tensor.sizes(), tensor.strides(), words_per_value, not_finite);
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

// Hides the observer's own ops from modes and transforms.
struct Unobserved {
  at::RecordFunctionGuard no_events{false};
  c10::impl::ExcludeDispatchKeyGuard of_those{
      c10::autocast_dispatch_keyset |
      c10::DispatchKeySet{
          DispatchKey::Python, DispatchKey::PythonTLSSnapshot, DispatchKey::PreDispatch, DispatchKey::Functionalize,
          DispatchKey::FuncTorchDynamicLayerFrontMode, DispatchKey::FuncTorchDynamicLayerBackMode, DispatchKey::FuncTorchVmapMode}};
  at::AutoDispatchBelowADInplaceOrView below_autograd;
};

// Set by bind().
PyObject* backend_captures = nullptr;

// Return whether a tensor's device captures a graph, or may do so: the tensor has no values yet.
bool is_captured(const Tensor& tensor) {
  {
    const at::RecordFunctionGuard no_events{false};  // of ops that the backend runs
    const Gil gil;
    const std::string device = c10::DeviceTypeName(tensor.device().type(), /*lower_case=*/true);
    const Object arguments = Object::steal(Py_BuildValue("(s)", device.c_str()));
    const Object answer = call_from_callback(backend_captures, arguments.get());
    if (!answer || is_true(answer)) {
      return true;
    }
  }
  return captures(tensor, Object());
}

// Tensors that cannot be checked count as finite, such as the wrappers of torch.func.
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
  bool finite = true;
  run_ops([&] {
    if (tensor.is_cpu()) {
      finite = is_finite_in_memory(tensor);
    } else if (!is_captured(tensor)) {
      const Unobserved unobserved;
      finite = tensor.isfinite().all().item<bool>();
    }
  });
  return finite;
}

// Return whether a tensor that is not finite contains inf, and whether it contains nan.
std::pair<bool, bool> inf_and_nan(const Tensor& tensor) {
  if (is_sparse(tensor)) {
    return inf_and_nan(values_of_sparse(tensor));
  }
  const Unobserved unobserved;
  std::pair<bool, bool> found{true, true};
  run_ops([&] {
    const Tensor known = c10::elementSize(tensor.scalar_type()) == 1 ? tensor.to(at::kFloat) : tensor;
    found = {known.isinf().any().item<bool>(), known.isnan().any().item<bool>()};
  });
  return found;
}

bool is_finite_number(const c10::IValue& value) {
  if (value.isComplexDouble()) {
    const auto number = value.toComplexDouble();
    return std::isfinite(number.real()) && std::isfinite(number.imag());
  }
  return !value.isDouble() || std::isfinite(value.toDouble());
}

}  // namespace
