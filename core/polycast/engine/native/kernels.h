// The kernels at a device's Autocast key: one for each op, and the library that puts them there.
//
// Owns the kernels, which live as long as their registration in the dispatcher. A kernel is immutable once it is made, but
// for the overload that it looks for at its first call (a once_flag). Locks. None on the path of an op; making and removing a
// library takes the dispatcher's own.

#pragma once

#include <ATen/ATen.h>
#include <ATen/autocast_mode.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <c10/core/impl/LocalDispatchKeySet.h>
#include <torch/csrc/autograd/variable.h>
#include <torch/csrc/utils/pybind.h>
#include <torch/library.h>

#include <cstring>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <type_traits>
#include <utility>
#include <vector>

#include "casting.h"
#include "regions.h"

namespace {  // all is one unit, binding.cpp

// What is between the Autocast keys and a device's own, and does nothing for an op without side effects whose inputs are not
// differentiated.
constexpr c10::DispatchKeySet kNothingToDo{
    DispatchKey::BackendSelect,
    DispatchKey::ADInplaceOrView,
    DispatchKey::AutogradFunctionality,
    DispatchKey::AutogradOther};

struct Op {
  int64_t number;
  std::string name;
  Policy policy;
  std::string refusal;  // what a BANNED op says
};

class Kernel final : public c10::OperatorKernel {
 public:
  Kernel(Op op, const c10::OperatorHandle& handle, DeviceType device, DispatchKey key, py::object is_capturing)
      : op_(std::move(op)),
        device_(device),
        key_(key),
        device_keys_(c10::parseDispatchKey(std::string(c10::toString(key)).substr(std::strlen("Autocast")))),
        skipped_(c10::DispatchKeySet(key) | kNothingToDo),
        is_capturing_(std::move(is_capturing)) {
    const auto& arguments = handle.schema().arguments();
    arity_ = arguments.size();
    for (size_t i = 0; i < arguments.size(); ++i) {
      const std::string type = arguments[i].real_type()->str();
      if (type.find("Tensor") != std::string::npos) {
        tensors_.push_back(i);
      } else if (type == "ScalarType?") {
        optional_dtype_ = i;
      }
    }
  }

  ~Kernel() override {
    if (is_capturing_) {
      py::gil_scoped_acquire gil;
      is_capturing_ = py::object();
    }
  }

  // The kernel of an op of any signature.
  void operator()(const c10::OperatorHandle& handle, c10::DispatchKeySet keys, torch::jit::Stack* stack) {
    const Policy applied = policy();
    if (applied == Policy::kNone) {  // as if there were no kernel here: what the op is made of is autocast as ever
      handle.redispatchBoxed(keys & c10::DispatchKeySet(c10::DispatchKeySet::FULL_AFTER, key_), stack);
      return;
    }
    const c10::impl::ExcludeDispatchKeyGuard no_autocast(key_);
    switch (applied) {
      case Policy::kLowerPrecisionFp:
        cast_all(stack, at::autocast::get_autocast_dtype(device_));
        break;
      case Policy::kFp32:
        cast_all(stack, at::kFloat);
        break;
      case Policy::kFp32SetOptDtype:
        if (first_is_eligible(stack)) {
          c10::IValue& dtype = argument(stack, *optional_dtype_);
          if (dtype.isNone()) {
            dtype = c10::IValue(static_cast<int64_t>(at::kFloat));
          }
        }
        break;
      case Policy::kFp32AppendDtype: {
        const auto dtype = first_is_eligible(stack) ? at::kFloat : argument(stack, 0).toTensor().scalar_type();
        stack->emplace_back(static_cast<int64_t>(dtype));
        with_dtype(handle).callBoxed(stack);
        return;
      }
      case Policy::kPromote:
        if (mixed(stack)) {
          cast_all(stack, at::kFloat);
        }
        break;
      case Policy::kBanned:
        TORCH_CHECK(false, op_.refusal);
      case Policy::kPassthrough:
      case Policy::kNone:
        break;
    }
    handle.callBoxed(stack);
  }

  // The kernel of an op whose arguments are tensors and scalars, without the way over a stack.
  template <class... Args>
  Tensor call(const c10::TypedOperatorHandle<Tensor(Args...)>& handle, c10::DispatchKeySet keys, Args... args) const {
    const c10::impl::ExcludeDispatchKeyGuard no_autocast(key_);
    ScalarType dtype = at::kFloat;
    switch (policy()) {
      case Policy::kLowerPrecisionFp:
        dtype = at::autocast::get_autocast_dtype(device_);
        break;
      case Policy::kFp32:
        break;
      case Policy::kPromote: {
        Promotion promotion{device_};
        (promotion.look(args), ...);
        if (!promotion.different) {
          return below(handle, keys, args...);
        }
        break;
      }
      case Policy::kBanned:
        TORCH_CHECK(false, op_.refusal);
      default:  // those that set a dtype need an argument that these ops do not have
        return below(handle, keys, args...);
    }
    return below(handle, keys, *converted(args, dtype)...);
  }

 private:
  // Call the op again. Where there is nothing for autograd to do, and nothing but autograd is between here and the
  // device's kernel, this goes there at once.
  template <class... Args>
  Tensor below(
      const c10::TypedOperatorHandle<Tensor(Args...)>& handle,
      c10::DispatchKeySet keys,
      std::type_identity_t<Args>... args) const {
    if (keys - skipped_ == device_keys_) {
      const bool grad = at::GradMode::is_enabled();
      if (!(is_differentiated(args, grad) || ...)) {
        const at::AutoDispatchBelowADInplaceOrView also_inside;  // what the op is made of
        return handle.redispatch(device_keys_, args...);
      }
    }
    return handle.call(args...);
  }

  // Whether autograd has to see a tensor: for a gradient, where these are recorded, or a tangent.
  static bool is_differentiated(const Tensor& tensor, bool grad) {
    const auto* const meta = torch::autograd::impl::get_autograd_meta(tensor);
    return meta != nullptr && ((grad && tensor.requires_grad()) || meta->fw_grad_ != nullptr);
  }

  static bool is_differentiated(const std::optional<Tensor>& tensor, bool grad) {
    return tensor && is_differentiated(*tensor, grad);
  }

  static bool is_differentiated(const at::Scalar&, bool) { return false; }

  // Gathers whether the eligible inputs have different dtypes.
  struct Promotion {
    DeviceType device;
    std::optional<ScalarType> seen = std::nullopt;
    bool different = false;

    void look(const Tensor& tensor) {
      if (is_eligible(tensor, device)) {
        different = different || (seen && *seen != tensor.scalar_type());
        seen = tensor.scalar_type();
      }
    }

    void look(const std::optional<Tensor>& tensor) {
      if (tensor) {
        look(*tensor);
      }
    }

    void look(const at::Scalar&) {}
  };

  c10::MaybeOwned<Tensor> converted(const Tensor& tensor, ScalarType dtype) const {
    using Maybe = c10::MaybeOwned<Tensor>;
    return to_be_cast(tensor, dtype) ? Maybe::owned(cast(tensor, dtype, device_, is_capturing_))
                                     : Maybe::borrowed(tensor);
  }

  std::optional<std::optional<Tensor>> converted(const std::optional<Tensor>& tensor, ScalarType dtype) const {
    return tensor ? std::optional<Tensor>(*converted(*tensor, dtype)) : tensor;
  }

  const at::Scalar* converted(const at::Scalar& scalar, ScalarType) const { return &scalar; }

  static bool appends_dtype(const std::vector<c10::Argument>& arguments, const c10::OperatorHandle& candidate) {
    const auto& others = candidate.schema().arguments();
    if (others.size() != arguments.size() + 1 || others.back().real_type()->str() != "ScalarType" ||
        candidate.schema().is_mutable()) {
      return false;
    }
    for (size_t i = 0; i < arguments.size(); ++i) {
      if (others[i].name() != arguments[i].name()) {
        return false;
      }
    }
    return true;
  }

  // The overload that takes a dtype more, looked for when it is first called for: the search goes over all ops.
  const c10::OperatorHandle& with_dtype(const c10::OperatorHandle& handle) {
    std::call_once(searched_, [&] {
      for (const auto& other : c10::Dispatcher::singleton().getAllOpNames()) {
        if (other.name == handle.schema().name()) {
          auto candidate = c10::Dispatcher::singleton().findSchema(other);
          if (candidate && appends_dtype(handle.schema().arguments(), *candidate)) {
            with_dtype_ = candidate;
          }
        }
      }
    });
    return *with_dtype_;
  }

  Policy policy() const {
    const Overlay* const overlay = region_of(device_).overlay;
    return C10_UNLIKELY(overlay != nullptr) ? overlay->over(op_.policy, op_.number) : op_.policy;
  }

  c10::IValue& argument(torch::jit::Stack* stack, size_t position) const {
    return (*stack)[stack->size() - arity_ + position];
  }

  bool first_is_eligible(torch::jit::Stack* stack) const {
    const c10::IValue& first = argument(stack, 0);
    return first.isTensor() && is_eligible(first.toTensor(), device_);
  }

  bool to_be_cast(const Tensor& tensor, ScalarType dtype) const {
    return tensor.defined() && tensor.scalar_type() != dtype && is_eligible(tensor, device_);
  }

  void cast_all(torch::jit::Stack* stack, ScalarType dtype) const {
    for (const size_t position : tensors_) {
      c10::IValue& value = argument(stack, position);
      if (value.isTensor()) {
        const Tensor& tensor = value.toTensor();
        if (to_be_cast(tensor, dtype)) {
          value = cast(tensor, dtype, device_, is_capturing_);
        }
      } else if (value.isTensorList()) {
        c10::List<Tensor> casts;
        for (const Tensor& tensor : value.toTensorVector()) {
          casts.push_back(to_be_cast(tensor, dtype) ? cast(tensor, dtype, device_, is_capturing_) : tensor);
        }
        value = std::move(casts);
      } else if (value.isOptionalTensorList()) {
        c10::List<std::optional<Tensor>> casts;
        for (const std::optional<Tensor>& tensor : value.toOptionalTensorVector()) {
          const bool change = tensor && to_be_cast(*tensor, dtype);
          casts.push_back(change ? std::optional<Tensor>(cast(*tensor, dtype, device_, is_capturing_)) : tensor);
        }
        value = std::move(casts);
      }
    }
  }

  // Whether the eligible inputs have different dtypes.
  bool mixed(torch::jit::Stack* stack) const {
    Promotion promotion{device_};
    for (const size_t position : tensors_) {
      const c10::IValue& value = argument(stack, position);
      if (value.isTensor()) {
        promotion.look(value.toTensor());
      } else if (value.isTensorList()) {
        for (const Tensor& tensor : value.toTensorVector()) {
          promotion.look(tensor);
        }
      } else if (value.isOptionalTensorList()) {
        for (const std::optional<Tensor>& tensor : value.toOptionalTensorVector()) {
          promotion.look(tensor);
        }
      }
    }
    return promotion.different;
  }

  const Op op_;
  const DeviceType device_;
  const DispatchKey key_;
  const c10::DispatchKeySet device_keys_, skipped_;
  py::object is_capturing_;  // empty where the backend never captures
  size_t arity_ = 0;
  std::vector<size_t> tensors_;
  std::optional<size_t> optional_dtype_;
  std::once_flag searched_;
  std::optional<c10::OperatorHandle> with_dtype_;
};

// torch warns, once in a process, that a kernel is overridden: that is what is meant here.
struct NoWarnings : c10::WarningHandler {
  void process(const c10::Warning&) override {}
};

// The kernels at one device's key; they are gone, and those before them back, when this is.
class Library {
 public:
  Library(std::string space, const std::string& device_type, const std::string& key)
      : device_(c10::Device(device_type).type()),
        key_(c10::parseDispatchKey(key)),
        library_(std::in_place, torch::Library::IMPL, std::move(space), std::optional(key_), __FILE__, __LINE__) {}

  void impl(const std::string& name, int64_t number, int policy, std::string refusal, py::object is_capturing) {
    if (is_capturing.is_none()) {
      is_capturing = py::object();
    }
    const auto dot = name.find('.');
    const auto handle = c10::Dispatcher::singleton().findSchemaOrThrow(
        name.substr(0, dot).c_str(), dot == std::string::npos ? "" : name.substr(dot + 1).c_str());
    Op op{number, name, static_cast<Policy>(policy), std::move(refusal)};
    NoWarnings no_warnings;
    const c10::WarningUtils::WarningHandlerGuard guard(&no_warnings);
    auto kernel = std::make_unique<Kernel>(std::move(op), handle, device_, key_, std::move(is_capturing));
    const bool in_table = static_cast<Policy>(policy) != Policy::kNone;
    library_->impl(
        name.c_str(),
        in_table ? function(handle, std::move(kernel)) : torch::CppFunction::makeFromBoxedFunctor(std::move(kernel)));
  }

  void fallthrough() { library_->fallback(torch::CppFunction::makeFallthrough()); }

  void remove() { library_.reset(); }

 private:
  // The matrix products have few signatures; torch's own ops of these go without a stack. What another's kernels are
  // declared with is not known, and has to be the same to the letter.
  static torch::CppFunction function(const c10::OperatorHandle& handle, std::unique_ptr<Kernel> kernel) {
    std::string signature;
    for (const auto& argument : handle.schema().arguments()) {
      signature += argument.real_type()->str() + " ";
    }
    for (const auto& value : handle.schema().returns()) {
      signature += "-> " + value.real_type()->str();
    }
    if (handle.schema().getNamespace() == std::string_view("aten") && !handle.schema().is_mutable()) {
      if (signature == "Tensor Tensor -> Tensor") {
        return unboxed<const Tensor&, const Tensor&>(handle, std::move(kernel));
      }
      if (signature == "Tensor Tensor Tensor? -> Tensor") {
        return unboxed<const Tensor&, const Tensor&, const std::optional<Tensor>&>(handle, std::move(kernel));
      }
      if (signature == "Tensor Tensor Tensor Scalar Scalar -> Tensor") {
        using Scalar = const at::Scalar&;
        return unboxed<const Tensor&, const Tensor&, const Tensor&, Scalar, Scalar>(handle, std::move(kernel));
      }
    }
    return torch::CppFunction::makeFromBoxedFunctor(std::move(kernel));
  }

  template <class... Args>
  static torch::CppFunction unboxed(const c10::OperatorHandle& handle, std::unique_ptr<Kernel> kernel) {
    return torch::CppFunction(
        [op = handle.typed<Tensor(Args...)>(), kernel = std::shared_ptr<Kernel>(std::move(kernel))](
            c10::DispatchKeySet keys, Args... args) -> Tensor { return kernel->template call<Args...>(op, keys, args...); });
  }

  const DeviceType device_;
  const DispatchKey key_;
  std::optional<torch::Library> library_;
};

}  // namespace
