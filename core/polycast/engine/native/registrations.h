// The registrations of the kernels at one device's Autocast key. The dispatcher takes its own locks.

#pragma once

#include "cached_cast_op.h"
#include "kernel.h"
#include "unboxed.h"

namespace {

// Destroying it removes the kernels, and uncovers the former ones.
class KernelRegistrations {
 public:
  KernelRegistrations(const std::string& device_type, const std::string& key)
      : device_(c10::Device(device_type).type()), key_(c10::parseDispatchKey(key)) {
    forget_actions();  // the backend may be another one
  }

  void impl(const std::string& name, Op op, const char* with_dtype, IsCapturing is_capturing) {
    const auto handle = find_op(operator_name_of(name));
    if (with_dtype != nullptr) {
      op.with_dtype = find_op(operator_name_of(with_dtype));
    }
    const UnboxedEntry* entry = with_dtype == nullptr ? find_unboxed_entry(handle) : nullptr;
    if (entry != nullptr && !op.written.empty() && !entry->takes_statistics) {
      entry = nullptr;  // it would write to casts
    }
    auto kernel = std::make_unique<Kernel>(
        std::move(op), handle, device_, key_, std::move(is_capturing), entry == nullptr ? nullptr : entry->redispatch);
    NoWarnings no_warnings;
    register_kernel(handle.operator_name(), key_,
        entry == nullptr ? c10::KernelFunction::makeFromBoxedFunctor(std::move(kernel)) : entry->function(std::move(kernel)));
  }

  void cached_cast(IsCapturing is_capturing) {
    const DispatchKey device = key_below(key_);
    // Not by name: parseDispatchKey() does not know all of them.
    const auto autograd =
        c10::toRuntimePerBackendFunctionalityKey(DispatchKey::AutogradFunctionality, c10::toBackendComponent(device));
    register_kernel({kCachedCast, ""}, device,
        c10::KernelFunction::makeFromUnboxedFunctor<false, CachedCastKernel>(
            std::make_unique<CachedCastKernel>(device_, std::move(is_capturing))));
    register_kernel({kCachedCast, ""}, autograd,
        c10::KernelFunction::makeFromUnboxedFunctor<false, CachedCastAutograd>(std::make_unique<CachedCastAutograd>()));
  }

  void fallthrough() {
    registered_.push_back(
        c10::Dispatcher::singleton().registerFallback(key_, c10::KernelFunction::makeFallthrough(), "polycast"));
  }

  void remove() {
    while (!registered_.empty()) {
      registered_.pop_back();
    }
  }

 private:
  // Without a C++ signature, against which torch would check that of other kernels.
  void register_kernel(const c10::OperatorName& op, DispatchKey key, c10::KernelFunction kernel) {
    registered_.push_back(
        c10::Dispatcher::singleton().registerImpl(op, key, std::move(kernel), std::nullopt, nullptr, "polycast"));
  }

  const DeviceType device_;
  const DispatchKey key_;
  std::vector<c10::RegistrationHandleRAII> registered_;
};

}  // namespace
