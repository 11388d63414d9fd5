// The kernels at a device's Autocast key: one for each op, and the library that puts them there.
//
// Owns the kernels, which live as long as their registration in the dispatcher. A kernel is immutable once it is made. Locks.
// None on the path of an op; making and removing a library takes the dispatcher's own.

#pragma once

#include <ATen/ATen.h>
#include <ATen/autocast_mode.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <c10/core/impl/LocalDispatchKeySet.h>
#include <torch/csrc/autograd/variable.h>
#include <torch/csrc/utils/pybind.h>

#include <cstring>
#include <memory>
#include <optional>
#include <string>
#include <type_traits>
#include <unordered_map>
#include <utility>
#include <vector>

#include "casting.h"
#include "kept_cast.h"
#include "low_bit.h"
#include "regions.h"
#include "signatures.h"

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
  Policy policy;
  std::string refusal;  // what a BANNED op says
  std::optional<c10::OperatorHandle> with_dtype;  // the overload that takes a dtype more, where there is one
};

C10_ALWAYS_INLINE bool to_be_cast(const Tensor& tensor, ScalarType dtype, DeviceType device) {
  return tensor.scalar_type() != dtype && is_eligible(tensor, device);
}

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

  void look(at::TensorList tensors) {
    for (const Tensor& tensor : tensors) {
      look(tensor);
    }
  }

  void look(const at::ITensorListRef& tensors) {
    for (const Tensor& tensor : tensors) {
      look(tensor);
    }
  }

  template <class Other>
  void look(const Other&) {}
};

// Whether an argument is a list of tensors that may be missing, in which Differentiation does not look.
template <class Arg>
constexpr bool is_opaque = std::is_same_v<std::decay_t<Arg>, c10::List<std::optional<Tensor>>>;

// Casts the arguments that are to be. What comes back has the cast, or refers to the argument: an argument that stays what it
// is has its references counted by nobody.
struct Conversion {
  ScalarType dtype;  // Undefined: nothing is cast
  DeviceType device;
  bool has_plain_keys;  // the arguments together: see Kernel::has_plain_keys()
  const DeviceRegion& region;
  const py::object& is_capturing;

  C10_ALWAYS_INLINE bool changes(const Tensor& tensor) const {
    return dtype != ScalarType::Undefined && to_be_cast(tensor, dtype, device);
  }

  Tensor cast(const Tensor& tensor) const {
    return ::cast(tensor, CastTo{dtype, device, has_plain_keys}, region, is_capturing);
  }

  template <class Argument>
  class Converted {
   public:
    C10_ALWAYS_INLINE Converted(const Argument& argument, const Conversion& conversion) : used_(&argument) {
      if constexpr (std::is_same_v<Argument, Tensor>) {
        if (conversion.changes(argument)) {
          cast_ = conversion.cast(argument);
          used_ = &cast_;
        }
      } else if (argument && conversion.changes(*argument)) {
        cast_ = conversion.cast(*argument);
        used_ = &cast_;
      }
    }
    Converted(const Converted&) = delete;

    C10_ALWAYS_INLINE const Argument& operator*() const { return *used_; }

   private:
    const Argument* used_;
    Argument cast_;
  };

  C10_ALWAYS_INLINE Converted<Tensor> operator()(const Tensor& tensor) const { return {tensor, *this}; }

  C10_ALWAYS_INLINE Converted<std::optional<Tensor>> operator()(const std::optional<Tensor>& tensor) const {
    return {tensor, *this};
  }

  template <class List>
  class ConvertedList {
   public:
    ConvertedList(List list, const Conversion& conversion) : list_(list) {
      if (conversion.dtype != ScalarType::Undefined) {
        for (const Tensor& tensor : list) {
          casts_.push_back(conversion.changes(tensor) ? conversion.cast(tensor) : tensor);
        }
      }
    }

    List operator*() const { return casts_.empty() ? list_ : List(casts_); }

   private:
    List list_;
    std::vector<Tensor> casts_;
  };

  ConvertedList<at::TensorList> operator()(at::TensorList tensors) const { return {tensors, *this}; }

  ConvertedList<at::ITensorListRef> operator()(const at::ITensorListRef& tensors) const { return {tensors, *this}; }

  template <class Other>
  C10_ALWAYS_INLINE const Other* operator()(const Other& other) const {
    return &other;
  }
};

class Kernel final : public c10::OperatorKernel {
 public:
  Kernel(Op op, const c10::OperatorHandle& handle, DeviceType device, DispatchKey key, py::object is_capturing)
      : op_(std::move(op)),
        device_(device),
        keys_(key),
        below_(c10::DispatchKeySet::FULL_AFTER, key),
        device_keys_(c10::parseDispatchKey(std::string(c10::toString(key)).substr(std::strlen("Autocast")))),
        skipped_(keys_ | kNothingToDo),
        passes_autograd_by_(can_pass_autograd_by(op_, handle)),
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
  void operator()(const c10::OperatorHandle& handle, c10::DispatchKeySet keys, torch::jit::Stack* stack) const {
    const DeviceRegion& region = region_of(device_);
    Policy policy = this->policy(region);
    if (policy == Policy::kNone) {
      handle.redispatchBoxed(keys & below_, stack);
      return;
    }
    const c10::impl::ExcludeDispatchKeyGuard no_autocast(keys_);
    if (policy == Policy::kLowBit) {
      if (Tensor result = low_bit(op_.number, device_, c10::ArrayRef<c10::IValue>(&argument(stack, 0), arity_)); result.defined()) {
        torch::jit::drop(*stack, arity_);
        stack->emplace_back(std::move(result));
        return;
      }
      policy = Policy::kLowerPrecisionFp;
    }
    const Conversion conversion{
        dtype_for(policy, [&](Promotion& promotion) { look(promotion, stack); }), device_, has_plain_keys(keys), region,
        is_capturing_};
    if (conversion.dtype != ScalarType::Undefined) {
      cast_all(conversion, stack);
    } else if (policy == Policy::kFp32SetOptDtype && first_is_eligible(stack)) {
      c10::IValue& dtype = argument(stack, *optional_dtype_);
      if (dtype.isNone()) {
        dtype = c10::IValue(static_cast<int64_t>(at::kFloat));
      }
    } else if (policy == Policy::kFp32AppendDtype) {
      const auto dtype = first_is_eligible(stack) ? at::kFloat : argument(stack, 0).toTensor().scalar_type();
      stack->emplace_back(static_cast<int64_t>(dtype));
      op_.with_dtype->callBoxed(stack);
      return;
    }
    handle.callBoxed(stack);
  }

  // The kernel of an op of a known signature that has no overload with a dtype more, without the way over a stack.
  template <class Result, class... Args>
  C10_ALWAYS_INLINE Result
  call(const Functions<Result(Args...)>& op, c10::DispatchKeySet keys, Args... args) const {
    const DeviceRegion& region = region_of(device_);
    Policy policy = this->policy(region);
    std::optional<c10::impl::ExcludeDispatchKeyGuard> no_autocast;
    if (C10_LIKELY(policy != Policy::kNone)) {
      no_autocast.emplace(keys_);
    }
    if (C10_UNLIKELY(policy == Policy::kLowBit)) {
      if constexpr (is_for_low_bit<Result(Args...)>) {
        if (Tensor result = low_bit(op_.number, device_, {c10::IValue(args)...}); result.defined()) {
          return result;
        }
      }
      policy = Policy::kLowerPrecisionFp;
    }
    const Conversion converted{
        dtype_for(policy, [&](Promotion& promotion) { (promotion.look(args), ...); }), device_,
        policy != Policy::kNone && has_plain_keys(keys), region, is_capturing_};
    if constexpr ((std::is_same_v<Args, std::optional<ScalarType>> || ...)) {
      if (policy == Policy::kFp32SetOptDtype && first_is_eligible(args...)) {
        (set_to_float32(args), ...);
      }
    }
    return below(policy, converted.has_plain_keys, op, keys, *converted(args)...);
  }

 private:
  // Whether autograd need not be asked where it has nothing to record. It is what makes views of what an op returns on its
  // inputs' memory. That schemas tell, save of ops that are made of others alone: of these the products of tensors go on at once.
  static bool can_pass_autograd_by(const Op& op, const c10::OperatorHandle& handle) {
    const auto& arguments = handle.schema().arguments();
    const bool returns_views = std::any_of(
        arguments.begin(), arguments.end(), [](const auto& argument) { return argument.alias_info() != nullptr; });
    const bool takes_lists = std::any_of(arguments.begin(), arguments.end(), [](const auto& argument) {
      return argument.real_type()->str().find("Tensor[]") != std::string::npos;
    });
    return !returns_views &&
        (!handle.hasKernelForDispatchKey(DispatchKey::CompositeImplicitAutograd) ||
         (op.policy == Policy::kLowerPrecisionFp && !takes_lists));
  }

  // Whether nothing but autograd is between here and the device's kernel.
  C10_ALWAYS_INLINE bool has_plain_keys(c10::DispatchKeySet keys) const { return keys - skipped_ == device_keys_; }

  // The dtype that the inputs are cast to, or Undefined.
  template <class Look>
  C10_ALWAYS_INLINE ScalarType dtype_for(Policy policy, const Look& look) const {
    switch (policy) {
      case Policy::kLowerPrecisionFp:
        return at::autocast::get_autocast_dtype(device_);
      case Policy::kFp32:
        return at::kFloat;
      case Policy::kPromote: {
        Promotion promotion{device_};
        look(promotion);
        return promotion.different ? at::kFloat : ScalarType::Undefined;
      }
      case Policy::kBanned:
        refuse();
      default:
        return ScalarType::Undefined;
    }
  }

  [[noreturn]] C10_NOINLINE void refuse() const { TORCH_CHECK(false, op_.refusal); }

  // Go on to what is below in the dispatcher: the device's kernel at once where autograd, which alone is between, has nothing
  // to do.
  template <class Result, class... Args>
  C10_ALWAYS_INLINE Result below(
      Policy policy,
      bool has_plain_keys,
      const Functions<Result(Args...)>& op,
      c10::DispatchKeySet keys,
      std::type_identity_t<Args>... args) const {
    c10::DispatchKeySet lower = keys & below_;
    // What is above, such as a Python dispatcher, sees each call.
    if (C10_UNLIKELY(policy != Policy::kNone && (lower | keys_) != keys)) {
      return op.call(std::forward<Args>(args)...);
    }
    std::optional<at::AutoDispatchBelowADInplaceOrView> also_inside;  // what the op is made of
    if constexpr (!(is_opaque<Args> || ...)) {
      if (has_plain_keys && passes_autograd_by_) {
        const Differentiation differentiation;
        if (!(differentiation.has(args) || ...)) {
          also_inside.emplace();
          lower = device_keys_;
        }
      }
    }
    return op.redispatch(lower, std::forward<Args>(args)...);
  }

  C10_ALWAYS_INLINE Policy policy(const DeviceRegion& region) const {
    const Overlay* const overlay = region.overlay;
    return C10_UNLIKELY(overlay != nullptr) ? overlay->over(op_.policy, op_.number) : op_.policy;
  }

  template <class... Others>
  bool first_is_eligible(const Tensor& first, const Others&...) const {
    return is_eligible(first, device_);
  }

  template <class... Args>
  bool first_is_eligible(const Args&...) const {
    return false;
  }

  static void set_to_float32(std::optional<ScalarType>& dtype) {
    if (!dtype) {
      dtype = at::kFloat;
    }
  }

  template <class Other>
  static void set_to_float32(const Other&) {}

  c10::IValue& argument(torch::jit::Stack* stack, size_t position) const {
    return (*stack)[stack->size() - arity_ + position];
  }

  bool first_is_eligible(torch::jit::Stack* stack) const {
    const c10::IValue& first = argument(stack, 0);
    return first.isTensor() && is_eligible(first.toTensor(), device_);
  }

  void cast_all(const Conversion& conversion, torch::jit::Stack* stack) const {
    for (const size_t position : tensors_) {
      c10::IValue& value = argument(stack, position);
      if (value.isTensor()) {
        const Tensor& tensor = value.toTensor();
        if (conversion.changes(tensor)) {
          value = conversion.cast(tensor);
        }
      } else if (value.isTensorList()) {
        c10::List<Tensor> casts;
        for (const Tensor& tensor : value.toTensorVector()) {
          casts.push_back(conversion.changes(tensor) ? conversion.cast(tensor) : tensor);
        }
        value = std::move(casts);
      } else if (value.isOptionalTensorList()) {
        c10::List<std::optional<Tensor>> casts;
        for (const std::optional<Tensor>& tensor : value.toOptionalTensorVector()) {
          casts.push_back(*conversion(tensor));
        }
        value = std::move(casts);
      }
    }
  }

  void look(Promotion& promotion, torch::jit::Stack* stack) const {
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
  }

  const Op op_;
  const DeviceType device_;
  const c10::DispatchKeySet keys_;  // the one that this is at
  const c10::DispatchKeySet below_;  // what is autocast as ever where there is no kernel here
  const c10::DispatchKeySet device_keys_, skipped_;
  const bool passes_autograd_by_;
  py::object is_capturing_;  // empty where the backend never captures
  size_t arity_ = 0;
  std::vector<size_t> tensors_;
  std::optional<size_t> optional_dtype_;
};

// A kernel of a known signature, as the dispatcher has them.
template <class Signature>
class Unboxed;

template <class Result, class... Args>
class Unboxed<Result(Args...)> final : public c10::OperatorKernel {
 public:
  Unboxed(const Functions<Result(Args...)>& op, std::unique_ptr<Kernel> kernel) : op_(op), kernel_(std::move(kernel)) {}

  Result operator()(c10::DispatchKeySet keys, Args... args) {
    return kernel_->template call<Result, Args...>(op_, keys, std::forward<Args>(args)...);
  }

  const Kernel& boxed() const { return *kernel_; }

 private:
  const Functions<Result(Args...)> op_;
  const std::unique_ptr<Kernel> kernel_;
};

}  // namespace

// What the dispatcher calls with a stack: torch's would take the arguments off it, and put them on another below.
template <class Signature>
struct c10::impl::make_boxed_from_unboxed_functor<Unboxed<Signature>, false> final {
  static void call(c10::OperatorKernel* functor, const c10::OperatorHandle& handle, c10::DispatchKeySet keys, Stack* stack) {
    static_cast<Unboxed<Signature>*>(functor)->boxed()(handle, keys, stack);
  }
};

namespace {

// How a kernel enters the dispatcher.
struct Entrance {
  c10::KernelFunction (*function)(const void* functions, std::unique_ptr<Kernel>);
  const void* functions;  // the op's, of its signature
  std::optional<c10::impl::CppSignature> signature;
};

template <class Signature>
c10::KernelFunction unboxed(const void* functions, std::unique_ptr<Kernel> kernel) {
  return c10::KernelFunction::makeFromUnboxedFunctor<false, Unboxed<Signature>>(
      std::make_unique<Unboxed<Signature>>(*static_cast<const Functions<Signature>*>(functions), std::move(kernel)));
}

c10::KernelFunction boxed(const void*, std::unique_ptr<Kernel> kernel) {
  return c10::KernelFunction::makeFromBoxedFunctor(std::move(kernel));
}

class Entrances {
 public:
  static const Entrance& of(const c10::OperatorHandle& handle) {
    static const Entrances entrances{at::_ops::UnboxedOps{}};
    static const Entrance any{&boxed, nullptr, std::nullopt};
    const auto found = entrances.by_name_.find(c10::toString(handle.operator_name()));
    return found == entrances.by_name_.end() ? any : found->second;
  }

 private:
  template <class... Ops>
  explicit Entrances(OpList<Ops...>) {
    (add<Ops>(), ...);
  }

  template <class Op>
  void add() {
    if constexpr (requires { typename Op::schema; }) {
      add(Op::name, Op::overload_name, entrance<typename Op::schema>(&functions_of<Op>));
    }
  }

  template <class Signature>
  static Entrance entrance(const void* functions) {
    return {&unboxed<Signature>, functions, c10::impl::CppSignature::make<Signature>()};
  }

  void add(const char* name, const char* overload_name, Entrance entrance) {
    by_name_.emplace(c10::toString(c10::OperatorName(name, overload_name)), std::move(entrance));
  }

  std::unordered_map<std::string, Entrance> by_name_;
};

// torch warns, once in a process, that a kernel is overridden: that is what is meant here.
struct NoWarnings : c10::WarningHandler {
  void process(const c10::Warning&) override {}
};

// The kernels at one device's key; they are gone, and those before them back, when this is.
class Library {
 public:
  Library(const std::string& device_type, const std::string& key)
      : device_(c10::Device(device_type).type()), key_(c10::parseDispatchKey(key)) {}

  void impl(
      const std::string& name,
      int64_t number,
      int policy,
      std::string refusal,
      const std::optional<std::string>& with_dtype,
      py::object is_capturing) {
    if (is_capturing.is_none()) {
      is_capturing = py::object();
    }
    const auto handle = find(name);
    Op op{number, static_cast<Policy>(policy), std::move(refusal), std::nullopt};
    if (with_dtype) {
      op.with_dtype = find(*with_dtype);
    }
    const Entrance& entrance = Entrances::of(handle);
    const bool through_stack = with_dtype || !entrance.signature;
    auto kernel = std::make_unique<Kernel>(std::move(op), handle, device_, key_, std::move(is_capturing));
    NoWarnings no_warnings;
    const c10::WarningUtils::WarningHandlerGuard guard(&no_warnings);
    registered_.push_back(c10::Dispatcher::singleton().registerImpl(
        handle.operator_name(),
        key_,
        through_stack ? boxed(nullptr, std::move(kernel)) : entrance.function(entrance.functions, std::move(kernel)),
        through_stack ? std::nullopt : entrance.signature,
        nullptr,
        "polycast"));
  }

  // The kernels of polycast::kept_cast.
  void kept_cast(py::object is_capturing) {
    using Signature = Tensor(const Tensor&, ScalarType, int64_t);
    if (is_capturing.is_none()) {
      is_capturing = py::object();
    }
    const auto device = c10::parseDispatchKey(std::string(c10::toString(key_)).substr(std::strlen("Autocast")));
    // Some devices' keys have no name that can be parsed.
    const auto autograd =
        c10::toRuntimePerBackendFunctionalityKey(DispatchKey::AutogradFunctionality, c10::toBackendComponent(device));
    const auto put = [](DispatchKey key, c10::KernelFunction kernel) {
      return c10::Dispatcher::singleton().registerImpl(
          {kKeptCast, ""}, key, std::move(kernel), c10::impl::CppSignature::make<Signature>(), nullptr, "polycast");
    };
    registered_.push_back(put(
        device, c10::KernelFunction::makeFromUnboxedFunctor<false, KeptCastKernel>(
                    std::make_unique<KeptCastKernel>(device_, std::move(is_capturing)))));
    registered_.push_back(put(
        autograd, c10::KernelFunction::makeFromUnboxedFunctor<false, KeptCastAutograd>(std::make_unique<KeptCastAutograd>())));
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
  static c10::OperatorHandle find(const std::string& name) {
    const auto dot = name.find('.');
    return c10::Dispatcher::singleton().findSchemaOrThrow(
        name.substr(0, dot).c_str(), dot == std::string::npos ? "" : name.substr(dot + 1).c_str());
  }

  const DeviceType device_;
  const DispatchKey key_;
  std::vector<c10::RegistrationHandleRAII> registered_;
};

}  // namespace
