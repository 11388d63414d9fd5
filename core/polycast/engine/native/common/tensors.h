// The headers, names and small functions that many files use, and properties of any tensor.
//
// The engine and its observer are one translation unit each, so a header that several of their files use is included here.

#pragma once

#include <ATen/core/Tensor.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/core/ivalue.h>
#include <ATen/record_function.h>
#include <c10/core/impl/LocalDispatchKeySet.h>
#include <c10/core/impl/TorchDispatchModeTLS.h>
#include <c10/util/Exception.h>
#include <c10/util/SmallVector.h>
#include <c10/util/flat_hash_map.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <chrono>
#include <cstdint>
#include <cstring>
#include <functional>
#include <iterator>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <type_traits>
#include <unordered_map>
#include <utility>
#include <vector>

namespace {

using c10::DeviceType;
using c10::DispatchKey;
using c10::StorageImpl;
using c10::TensorImpl;
using at::ScalarType;
using at::Tensor;

// Split the name of an op in the dispatcher, such as "aten::norm.Scalar".
c10::OperatorName operator_name_of(const std::string& name) {
  const auto dot = name.find('.');
  return {name.substr(0, dot), dot == std::string::npos ? "" : name.substr(dot + 1)};
}

// Return an op; throw if there is none.
c10::OperatorHandle find_op(const c10::OperatorName& op) {
  return c10::Dispatcher::singleton().findSchemaOrThrow(op.name.c_str(), op.overload_name.c_str());
}

// Return the process's only object of a type, which is never destroyed: torch may be gone before, or other threads still run.
template <class Value>
Value& only() {
  static auto* const object = new Value();
  return *object;
}

// Return a hash with one more number mixed in.
uint64_t mixed(uint64_t hash, int64_t number) {
  hash = (hash ^ static_cast<uint64_t>(number)) * 0x9E3779B97F4A7C15ull;
  return hash ^ (hash >> 29);
}

// Ignores warnings while it lives: torch warns once per process that a kernel is overridden, which is intended here.
struct NoWarnings : c10::WarningHandler {
  void process(const c10::Warning&) override {}
  const c10::WarningUtils::WarningHandlerGuard guard{this};
};

const StorageImpl* storage_of(const Tensor& tensor) {
  return tensor.unsafeGetTensorImpl()->unsafe_storage().unsafeGetStorageImpl();
}

// Return a weak reference to a storage that is alive.
c10::weak_intrusive_ptr<StorageImpl> weak_reference(const StorageImpl* storage) {
  auto borrowed = c10::intrusive_ptr<StorageImpl>::reclaim(const_cast<StorageImpl*>(storage));
  c10::weak_intrusive_ptr<StorageImpl> reference(borrowed);
  borrowed.release();
  return reference;
}

// Return a storage's weak reference count, in which all strong references together count as one.
size_t count_weak_references(const StorageImpl* storage) {
  auto borrowed = c10::intrusive_ptr<StorageImpl>::reclaim(const_cast<StorageImpl*>(storage));
  const size_t count = borrowed.weak_use_count();
  borrowed.release();
  return count;
}

// Whether reading the sizes of a tensor would run Python: a subclass overrides them, or they are symbolic. Derives from TensorImpl to
// reach a protected member.
struct Overridden : c10::TensorImpl {
  static bool sizes_of(const c10::TensorImpl& impl) {
    return impl.has_symbolic_sizes_strides() ||
        (impl.key_set().has(DispatchKey::Python) && (impl.*&Overridden::matches_policy)(SizesStridesPolicy::CustomSizes));
  }
};

// Return whether torch's own dispatch modes trace ops, which do not run.
bool is_traced() {
  using Mode = c10::impl::TorchDispatchModeKey;
  using Modes = c10::impl::TorchDispatchModeTLS;
  return Modes::any_modes_set() &&
      (Modes::get_mode(Mode::FAKE) || Modes::get_mode(Mode::PROXY) || Modes::get_mode(Mode::FUNCTIONAL));
}

bool has_known_sizes(const Tensor& tensor) { return !Overridden::sizes_of(*tensor.unsafeGetTensorImpl()); }

}  // namespace
