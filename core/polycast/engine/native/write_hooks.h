// Write hooks: kernels in front of ops that write tensors without changing their versions (fused optimizers, collectives), or that
// make aliases with versions of their own.

#pragma once

#include <ATen/ops/_batch_norm_with_update_ops.h>
#include <ATen/ops/_native_batch_norm_legit_ops.h>
#include <ATen/ops/alias.h>
#include <ATen/ops/native_batch_norm_ops.h>
#include <c10/util/ScopeExit.h>

#include "invalidation.h"
#include "version_stamp.h"

namespace {

using Touched = c10::SmallVector<Tensor, 4>;

void collect_tensors(const Tensor& tensor, Touched& found) {
  if (tensor.defined() && tensor.has_storage()) {
    found.push_back(tensor);
  }
}

void collect_tensors(const c10::IValue& value, Touched& found) {
  if (value.isTensor()) {
    collect_tensors(value.toTensor(), found);
  } else if (value.isList()) {
    for (const c10::IValue& item : value.toListRef()) {
      collect_tensors(item, found);
    }
  }
}

constexpr c10::DispatchKeySet kBelowVersions(c10::DispatchKeySet::FULL_AFTER, DispatchKey::ADInplaceOrView);

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
    only<PendingCollectives>().drop_finished();
    for (const size_t position : positions_) {
      c10::IValue& argument = (*stack)[stack->size() - size_ + position];
      if (access_ == Access::kExposes && is_composite_ && argument.isTensor()) {
        argument = at::alias(argument.toTensor());  // a sparse tensor would hold the weight itself, and not show in its holders
      }
      collect_tensors(argument, tensors);
    }
    try {
      if (original_) {
        original_->callBoxed(handle, keys, stack);
      } else {
        handle.redispatchBoxed(keys & kBelowVersions, stack);
      }
    } catch (...) {  // it may have written some of them
      note(tensors);
      throw;
    }
    if (access_ == Access::kMayWrite) {
      note_pending(handle, *stack, tensors);
    }
    note(tensors);
  }

 private:
  void note(const Touched& tensors) {
    if (access_ == Access::kExposes) {
      for (const Tensor& tensor : tensors) {
        only<UnreliableCounters>().add(tensor);
      }
    }
    note_written(tensors);
  }

  // Note the storages that a collective may write until it is over.
  static void note_pending(const c10::OperatorHandle& handle, const torch::jit::Stack& stack, const Touched& tensors) {
    Storages written;
    std::for_each(tensors.begin(), tensors.end(), [&](const Tensor& tensor) { written.insert(storage_of(tensor)); });
    for (auto result = stack.end() - handle.schema().returns().size(); result != stack.end(); ++result) {
      if (result->isObject()) {
        only<PendingCollectives>().add(PendingCollectives::Work(result->toObject()->getSlot(0).toCapsule()), written);
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
template <class Op, class Signature = typename Op::schema>
struct StatisticsHook;

template <class Op, class Result, class Statistics, class... Others>
struct StatisticsHook<Op, Result(const Tensor&, const std::optional<Tensor>&, const std::optional<Tensor>&, Statistics, Statistics, Others...)> {
  static Result call(
      c10::DispatchKeySet keys, const Tensor& input, const std::optional<Tensor>& weight, const std::optional<Tensor>& bias, Statistics mean,
      Statistics variance, Others... others) {
    const auto note = c10::make_scope_exit([&] {  // it may raise after it has written
      if (trains(others...)) {
        note_one(mean);
        note_one(variance);
      }
    });
    return Op::redispatch(keys & kBelowVersions, input, weight, bias, mean, variance, others...);
  }

 private:
  static bool trains(bool training, double, double) { return training; }
  static bool trains(double, double) { return true; }

  static void note_one(const std::optional<Tensor>& tensor) { tensor ? note_one(*tensor) : void(); }
  static void note_one(const Tensor& tensor) { tensor.defined() && tensor.has_storage() ? note_written(tensor) : void(); }
};

// Return the hook if an op is one of some that write statistics.
template <class... Ops>
std::optional<c10::KernelFunction> statistics_hook(const std::string& name) {
  std::optional<c10::KernelFunction> hook;
  ((name == Ops::name ? void(hook = c10::KernelFunction::makeFromUnboxedFunction(TORCH_FN(StatisticsHook<Ops>::call))) : void()), ...);
  return hook;
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
          statistics_hook<at::_ops::native_batch_norm, at::_ops::_native_batch_norm_legit, at::_ops::_batch_norm_with_update>(name)
              .value_or(c10::KernelFunction::makeFromBoxedFunctor(
                  std::make_unique<WriteHook>(handle->schema(), access, is_composite, std::move(original)))),
          std::nullopt, nullptr, "polycast"));
    }
  }

  std::vector<c10::RegistrationHandleRAII> registered_;
};

}  // namespace
