// Write hooks: kernels in front of ops that write tensors without changing their versions (fused optimizers, collectives).

#pragma once

#include "invalidation.h"

namespace {

void collect_storages(const c10::IValue& value, Storages& found) {
  if (value.isTensor()) {
    const Tensor& tensor = value.toTensor();
    if (tensor.defined() && tensor.has_storage()) {
      found.insert(storage_of(tensor));
    }
  } else if (value.isList()) {
    for (const c10::IValue& item : value.toListRef()) {
      collect_storages(item, found);
    }
  }
}

// Runs at the key where torch counts versions. A collective's schema does not tell which arguments it writes, and it may
// write after it has returned.
class WriteHook final : public c10::OperatorKernel {
 public:
  explicit WriteHook(bool is_collective) : is_collective_(is_collective) {}

  void operator()(const c10::OperatorHandle& handle, c10::DispatchKeySet keys, torch::jit::Stack* stack) {
    const auto& arguments = handle.schema().arguments();
    Storages written;
    PendingCollectives::instance().drop_finished();
    for (size_t i = 0; i < arguments.size(); ++i) {
      const auto* const alias = arguments[i].alias_info();
      if (is_collective_ || (alias != nullptr && alias->isWrite())) {
        collect_storages((*stack)[stack->size() - arguments.size() + i], written);
      }
    }
    CapturedWrites::note(written);
    try {
      handle.redispatchBoxed(keys & c10::DispatchKeySet(c10::DispatchKeySet::FULL_AFTER, DispatchKey::ADInplaceOrView), stack);
    } catch (...) {  // it may have written some of them
      invalidate(written);
      throw;
    }
    if (is_collective_) {
      for (auto result = stack->end() - handle.schema().returns().size(); result != stack->end(); ++result) {
        if (result->isObject()) {
          PendingCollectives::instance().add(
              PendingCollectives::Work(result->toObject()->getSlot(0).toCapsule()), written);
        }
      }
    }
    invalidate(written);
  }

 private:
  using DispatchKey = c10::DispatchKey;
  const bool is_collective_;
};

// The registrations of the hooks.
class WriteHooks {
 public:
  WriteHooks(const std::vector<std::string>& ops, const std::vector<std::string>& collectives) {
    add(ops, false);
    add(collectives, true);
  }

 private:
  void add(const std::vector<std::string>& names, bool is_collective) {
    for (const std::string& name : names) {
      const auto handle = c10::Dispatcher::singleton().findSchema(operator_name_of(name));
      if (!handle || handle->hasKernelForDispatchKey(c10::DispatchKey::ADInplaceOrView)) {
        continue;  // this torch lacks the op, or its kernel counts versions
      }
      registered_.push_back(c10::Dispatcher::singleton().registerImpl(
          handle->operator_name(),
          c10::DispatchKey::ADInplaceOrView,
          c10::KernelFunction::makeFromBoxedFunctor(std::make_unique<WriteHook>(is_collective)),
          std::nullopt,
          nullptr,
          "polycast"));
    }
  }

  std::vector<c10::RegistrationHandleRAII> registered_;
};

}  // namespace
