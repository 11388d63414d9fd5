// Properties of any tensor, and the names of torch that all files use.

#pragma once

#include <ATen/core/Tensor.h>

namespace {

using c10::DeviceType;
using c10::DispatchKey;
using c10::StorageImpl;
using c10::TensorImpl;
using at::ScalarType;
using at::Tensor;

const StorageImpl* storage_of(const Tensor& tensor) {
  return tensor.unsafeGetTensorImpl()->unsafe_storage().unsafeGetStorageImpl();
}

// Return a storage's weak reference count, in which all strong references together count as one.
size_t count_weak_references(const StorageImpl* storage) {
  auto borrowed = c10::intrusive_ptr<StorageImpl>::reclaim(const_cast<StorageImpl*>(storage));
  const size_t count = borrowed.weak_use_count();
  borrowed.release();
  return count;
}

// Subclasses that override sizes, device or layout in Python would see them read. Access to a protected member of torch.
struct Overridden : c10::TensorImpl {
  static bool sizes_of(const c10::TensorImpl& impl) {
    return impl.has_symbolic_sizes_strides() ||
        (impl.key_set().has(DispatchKey::Python) && (impl.*&Overridden::matches_policy)(SizesStridesPolicy::CustomSizes));
  }
};

bool has_known_sizes(const Tensor& tensor) { return !Overridden::sizes_of(*tensor.unsafeGetTensorImpl()); }

}  // namespace
