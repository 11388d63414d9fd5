// Write hooks: kernels in front of ops that write tensors without changing their versions (fused optimizers, collectives), or that
// make aliases with versions of their own.

#pragma once

#include <ATen/ops/alias.h>
#include <ATen/ops/native_batch_norm_ops.h>
#include <c10/util/ScopeExit.h>

#include "invalidation.h"
#include "version_stamp.h"

namespace {

using Touched = c10::SmallVector<Tensor, 4>;

void collect_tensors(const c10::IValue& value, Touched& found) {
  if (value.isTensor()) {
    if (const Tensor& tensor = value.toTensor(); tensor.defined() && tensor.has_storage()) {
      found.push_back(tensor);
    }
  } else if (value.isList()) {
    for (const c10::IValue& item : value.toListRef()) {
      collect_tensors(item, found);
    }
  }
}

void collect_storages(const c10::IValue& value, Storages& found) {
  Touched tensors;
  collect_tensors(value, tensors);
  for (const Tensor& tensor : tensors) {
    found.insert(storage_of(tensor));
  }
}

// The effects of an op on its arguments that their versions do not tell. A collective may write any of them after it has returned.
enum class Access : uint8_t { kWrites, kMayWrite, kExposes };

// Runs at the key where torch counts versions, or in place of the kernel of a composite op.
class WriteHook final : public c10::OperatorKernel {
 public:
  WriteHook(const c10::FunctionSchema& schema, Access access, bool is_composite, std::optional<c10::SafeKernelFunction> original)
      : access_(access), is_composite_(is_composite), size_(schema.arguments().size()), original_(std::move(original)) {
    for (size_t i = 0; i < size_; ++i) {
      const c10::Argument& argument = schema.arguments()[i];
      const bool is_written = argument.alias_info() != nullptr && argument.alias_info()->isWrite();
      // Statistics of batch norms: the schemas do not say that they are written.
      if (access != Access::kWrites || is_written || argument.name().rfind("running_", 0) == 0) {
        positions_.push_back(i);
      }
    }
  }

  void operator()(const c10::OperatorHandle& handle, c10::DispatchKeySet keys, torch::jit::Stack* stack) {
    Touched tensors;
    PendingCollectives::instance().drop_finished();
    for (const size_t position : positions_) {
      c10::IValue& argument = (*stack)[stack->size() - size_ + position];
      if (access_ == Access::kExposes && is_composite_ && argument.isTensor()) {
        argument = at::alias(argument.toTensor());  // a sparse tensor would hold the weight itself, and not show in its holders
      }
      collect_tensors(argument, tensors);
    }
    if (C10_UNLIKELY(CapturedWrites::are_noted())) {
      for (const Tensor& tensor : tensors) {
        CapturedWrites::note({storage_of(tensor)});
      }
    }
    try {
      if (original_) {
        original_->callBoxed(handle, keys, stack);
      } else {
        handle.redispatchBoxed(keys & c10::DispatchKeySet(c10::DispatchKeySet::FULL_AFTER, DispatchKey::ADInplaceOrView), stack);
      }
    } catch (...) {  // it may have written some of them
      note(tensors);
      throw;
    }
    if (access_ == Access::kMayWrite) {
      note_pending(handle, *stack, storages_of(tensors));
    }
    note(tensors);
  }

 private:
  void note(const Touched& tensors) {
    if (access_ == Access::kExposes) {
      for (const Tensor& tensor : tensors) {
        UnreliableCounters::instance().add(tensor);
      }
    }
    invalidate(storages_of(tensors));
  }

  // Return the storages of tensors: of those that may have casts, except of a collective, which is not over.
  Storages storages_of(const Touched& tensors) const {
    Storages found;
    for (const Tensor& tensor : tensors) {
      if (access_ == Access::kMayWrite || may_be_cached(storage_of(tensor))) {
        found.insert(storage_of(tensor));
      }
    }
    return found;
  }

  static void note_pending(const c10::OperatorHandle& handle, const torch::jit::Stack& stack, const Storages& written) {
    for (auto result = stack.end() - handle.schema().returns().size(); result != stack.end(); ++result) {
      if (result->isObject()) {
        PendingCollectives::instance().add(PendingCollectives::Work(result->toObject()->getSlot(0).toCapsule()), written);
      }
    }
  }

  const Access access_;
  const bool is_composite_;
  const size_t size_;  // the number of arguments
  std::vector<size_t> positions_;
  const std::optional<c10::SafeKernelFunction> original_;
};

// The same for the statistics that a batch norm writes in training, without boxes: models call it often.
std::tuple<Tensor, Tensor, Tensor> hook_batch_norm(
    c10::DispatchKeySet keys, const Tensor& input, const std::optional<Tensor>& weight, const std::optional<Tensor>& bias,
    const std::optional<Tensor>& mean, const std::optional<Tensor>& variance, bool training, double momentum, double eps) {
  const auto compute = [&] {
    const auto below = keys & c10::DispatchKeySet(c10::DispatchKeySet::FULL_AFTER, DispatchKey::ADInplaceOrView);
    return at::_ops::native_batch_norm::redispatch(below, input, weight, bias, mean, variance, training, momentum, eps);
  };
  if (!training) {
    return compute();
  }
  Touched tensors;
  for (const std::optional<Tensor>& each : {mean, variance}) {
    if (each && each->defined() && each->has_storage()) {
      tensors.push_back(*each);
    }
  }
  if (C10_UNLIKELY(CapturedWrites::are_noted())) {
    for (const Tensor& tensor : tensors) {
      CapturedWrites::note({storage_of(tensor)});
    }
  }
  const auto note = c10::make_scope_exit([&] {  // it may raise after it has written
    for (const Tensor& tensor : tensors) {
      if (may_be_cached(storage_of(tensor))) {
        invalidate({storage_of(tensor)});
      }
    }
  });
  return compute();
}

// The registrations of the hooks.
class WriteHooks {
 public:
  WriteHooks(
      const std::vector<std::string>& writing, const std::vector<std::string>& collectives, const std::vector<std::string>& exposing) {
    add(writing, Access::kWrites);
    add(collectives, Access::kMayWrite);
    add(exposing, Access::kExposes);
  }

 private:
  void add(const std::vector<std::string>& names, Access access) {
    NoWarnings no_warnings;
    const c10::WarningUtils::WarningHandlerGuard guard(&no_warnings);
    for (const std::string& name : names) {
      const auto handle = c10::Dispatcher::singleton().findSchema(operator_name_of(name));
      if (!handle) {
        continue;  // this torch lacks the op
      }
      const bool is_composite = handle->hasKernelForDispatchKey(DispatchKey::CompositeImplicitAutograd);
      const DispatchKey key = is_composite ? DispatchKey::CompositeImplicitAutograd : DispatchKey::ADInplaceOrView;
      std::optional<c10::SafeKernelFunction> original;
      if (handle->hasKernelForDispatchKey(key)) {
        if (!is_composite && access != Access::kExposes) {
          continue;  // its kernel counts versions
        }
        original = handle->getComputedKernelForDispatchKey(is_composite ? DispatchKey::CPU : key);
      }
      registered_.push_back(c10::Dispatcher::singleton().registerImpl(
          handle->operator_name(), key,
          name == "aten::native_batch_norm"
              ? c10::KernelFunction::makeFromUnboxedFunction(TORCH_FN(hook_batch_norm))
              : c10::KernelFunction::makeFromBoxedFunctor(
                    std::make_unique<WriteHook>(handle->schema(), access, is_composite, std::move(original))),
          std::nullopt, nullptr, "polycast"));
    }
  }

  std::vector<c10::RegistrationHandleRAII> registered_;
};

}  // namespace
