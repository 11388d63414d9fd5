// The kernels at a device's Autocast key: one for each op, and the library that puts them there.
//
// Owns the kernels, which live as long as their registration in the dispatcher. A kernel is immutable once it is made. Locks.
// None on the path of an op; making and removing a library takes the dispatcher's own.

#pragma once

#include <ATen/core/dispatch/Dispatcher.h>
#include <c10/core/impl/LocalDispatchKeySet.h>
#include <torch/csrc/autograd/variable.h>

#include <algorithm>
#include <array>
#include <iterator>
#include <memory>
#include <optional>
#include <string>
#include <type_traits>
#include <unordered_map>
#include <utility>
#include <vector>

#include "autocast.h"
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
};

// How the arguments are cast that are to be.
struct Conversion {
  ScalarType dtype;  // Undefined: nothing is cast
  DeviceType device;
  bool has_plain_keys;  // the arguments together: see Kernel::has_plain_keys()
  const DeviceRegion& region;
  const Object& is_capturing;

  C10_ALWAYS_INLINE bool changes(const Tensor& tensor) const {
    return dtype != ScalarType::Undefined && to_be_cast(tensor, dtype, device);
  }

  Tensor cast(const Tensor& tensor) const {
    return ::cast(tensor, CastTo{dtype, device, has_plain_keys}, region, is_capturing);
  }
};

// What an argument of a known signature is, where it has tensors or tells the dtype of the result.
enum class Kind : uint8_t { kTensor, kOptional, kTensors, kTensorRefs, kOptionals, kDtype, kOther };

template <class Arg>
constexpr Kind kind_of = Kind::kOther;
template <>
constexpr Kind kind_of<const Tensor&> = Kind::kTensor;
template <>
constexpr Kind kind_of<const std::optional<Tensor>&> = Kind::kOptional;
template <>
constexpr Kind kind_of<at::TensorList> = Kind::kTensors;
template <>
constexpr Kind kind_of<const at::ITensorListRef&> = Kind::kTensorRefs;
template <>
constexpr Kind kind_of<const c10::List<std::optional<Tensor>>&> = Kind::kOptionals;
template <>
constexpr Kind kind_of<std::optional<ScalarType>> = Kind::kDtype;

// The arguments of a call that are of some kind, by their addresses. What is cast is given the address of its cast.
struct Arguments {
  const Kind* kinds;
  const void** addresses;
  size_t count;
  bool begin_with_tensor;

  template <class Value>
  const Value& at(size_t i) const {
    return *static_cast<const Value*>(addresses[i]);
  }

  // Call a function with each tensor, until it says that it has seen enough.
  template <class Function>
  C10_ALWAYS_INLINE bool any_tensor(const Function& function) const {
    for (size_t i = 0; i < count; ++i) {
      bool found = false;
      switch (kinds[i]) {
        case Kind::kTensor:
          found = function(at<Tensor>(i));
          break;
        case Kind::kOptional:
          found = at<std::optional<Tensor>>(i) && function(*at<std::optional<Tensor>>(i));
          break;
        case Kind::kTensors:
          found = std::any_of(at<at::TensorList>(i).begin(), at<at::TensorList>(i).end(), function);
          break;
        case Kind::kTensorRefs:
          found = std::any_of(at<at::ITensorListRef>(i).begin(), at<at::ITensorListRef>(i).end(), function);
          break;
        default:
          break;
      }
      if (found) {
        return true;
      }
    }
    return false;
  }
};

// The casts that a call is given.
class Casts {
 public:
  static constexpr size_t kMost = 12;

  Casts() = default;
  Casts(const Casts&) = delete;
  ~Casts() {
    while (count_ != 0) {
      std::destroy_at(&casts_[--count_].tensor);
    }
  }

  void make(const Arguments& arguments, const Conversion& conversion) {
    for (size_t i = 0; i < arguments.count; ++i) {
      const void*& address = arguments.addresses[i];
      switch (arguments.kinds[i]) {
        case Kind::kTensor:
          if (const auto& tensor = arguments.at<Tensor>(i); conversion.changes(tensor)) {
            address = &*add(conversion.cast(tensor));
          }
          break;
        case Kind::kOptional:
          if (const auto& tensor = arguments.at<std::optional<Tensor>>(i); tensor && conversion.changes(*tensor)) {
            address = &add(conversion.cast(*tensor));
          }
          break;
        case Kind::kTensors:
          address = &add(arguments.at<at::TensorList>(i), conversion).list;
          break;
        case Kind::kTensorRefs:
          address = &add(arguments.at<at::ITensorListRef>(i), conversion).refs;
          break;
        default:
          break;
      }
    }
  }

 private:
  union Cast {
    Cast() {}
    ~Cast() {}
    std::optional<Tensor> tensor;
  };

  struct List {
    std::vector<Tensor> tensors;
    at::TensorList list;
    at::ITensorListRef refs;
    std::unique_ptr<List> before;
  };

  std::optional<Tensor>& add(Tensor cast) { return *std::construct_at(&casts_[count_++].tensor, std::move(cast)); }

  template <class Tensors>
  const List& add(const Tensors& tensors, const Conversion& conversion) {
    auto list = std::make_unique<List>();
    for (const Tensor& tensor : tensors) {
      list->tensors.push_back(conversion.changes(tensor) ? conversion.cast(tensor) : tensor);
    }
    list->list = list->tensors;
    list->refs = list->list;
    list->before = std::move(lists_);
    lists_ = std::move(list);
    return *lists_;
  }

  size_t count_ = 0;
  std::unique_ptr<List> lists_;
  std::array<Cast, kMost> casts_;  // as many as are counted
};

// An argument as it is on a stack.
using Box = c10::IValue (*)(const void* address);

template <class Arg>
c10::IValue boxed(const void* address) {
  return *static_cast<const Arg*>(address);
}

class Kernel final : public c10::OperatorKernel {
 public:
  Kernel(Op op, const c10::OperatorHandle& handle, DeviceType device, DispatchKey key, Object is_capturing, void (*redispatch)() = nullptr)
      : op_(std::move(op)),
        device_(device),
        keys_(key),
        below_(c10::DispatchKeySet::FULL_AFTER, key),
        device_keys_(key_below(key)),
        skipped_(keys_ | kNothingToDo),
        passes_autograd_by_(can_pass_autograd_by(op_, handle)),
        is_capturing_(std::move(is_capturing)),
        redispatch_(redispatch) {
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
      const Gil gil;
      is_capturing_ = Object();
    }
  }

  // Whether the region's recipe is for the op.
  C10_ALWAYS_INLINE bool has_recipe() const {
    const Overlay* const overlay = region_of(device_).overlay;
    return C10_UNLIKELY(overlay != nullptr) && overlay->over(op_.policy, op_.number) == Policy::kLowBit;
  }

  // Have the op computed by it; an undefined tensor where it is to run in the fast dtype.
  Tensor low_bit(c10::ArrayRef<c10::IValue> arguments) const {
    const c10::impl::ExcludeDispatchKeyGuard no_autocast(keys_);
    return ::low_bit(op_.number, device_, arguments);
  }

  // The same where the signature is known: `boxes` are for the arguments at the addresses.
  C10_NOINLINE Tensor low_bit(const Box* boxes, const void* const* addresses, size_t count) const {
    c10::SmallVector<c10::IValue, 8> arguments;
    for (size_t i = 0; i < count; ++i) {
      arguments.push_back(boxes[i](addresses[i]));
    }
    return low_bit(arguments);
  }

  // torch's function that goes on with the op, where its signature is known.
  auto redispatch() const { return redispatch_; }

  // The kernel of an op of any signature.
  void operator()(const c10::OperatorHandle& handle, c10::DispatchKeySet keys, torch::jit::Stack* stack) const {
    if (C10_UNLIKELY(has_recipe())) {
      if (Tensor result = low_bit(c10::ArrayRef<c10::IValue>(&argument(stack, 0), arity_)); result.defined()) {
        stack->erase(stack->end() - static_cast<int64_t>(arity_), stack->end());
        stack->emplace_back(std::move(result));
        return;
      }
    }
    const DeviceRegion& region = region_of(device_);
    const Policy policy = this->policy(region);
    if (policy == Policy::kNone) {
      handle.redispatchBoxed(keys & below_, stack);
      return;
    }
    const c10::impl::ExcludeDispatchKeyGuard no_autocast(keys_);
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

 private:
  friend class Passage;

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
      case Policy::kLowBit:
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

  C10_ALWAYS_INLINE Policy policy(const DeviceRegion& region) const {
    const Overlay* const overlay = region.overlay;
    return C10_UNLIKELY(overlay != nullptr) ? overlay->over(op_.policy, op_.number) : op_.policy;
  }

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
          casts.push_back(tensor && conversion.changes(*tensor) ? conversion.cast(*tensor) : tensor);
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
          if (tensor) {
            promotion.look(*tensor);
          }
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
  Object is_capturing_;  // empty where the backend never captures
  void (*const redispatch_)();
  size_t arity_ = 0;
  std::vector<size_t> tensors_;
  std::optional<size_t> optional_dtype_;
};

// From a kernel of a known signature to what is below in the dispatcher: while this is there, autocast is off, the casts live, and
// where autograd, which alone is between here and the device's kernel, has nothing to do, it is passed by.
class Passage {
 public:
  C10_NOINLINE Passage(const Kernel& kernel, c10::DispatchKeySet keys, const Arguments& arguments) : keys_(keys & kernel.below_) {
    const DeviceRegion& region = region_of(kernel.device_);
    const Policy policy = kernel.policy(region);
    if (policy == Policy::kNone) {
      return;
    }
    no_autocast_.emplace(kernel.keys_);
    const Conversion conversion{
        kernel.dtype_for(policy, [&](Promotion& promotion) {
          arguments.any_tensor([&](const Tensor& tensor) {
            promotion.look(tensor);
            return false;
          });
        }),
        kernel.device_, kernel.has_plain_keys(keys), region, kernel.is_capturing_};
    if (conversion.dtype != ScalarType::Undefined) {
      casts_.make(arguments, conversion);
    } else if (
        policy == Policy::kFp32SetOptDtype && arguments.begin_with_tensor && is_eligible(arguments.at<Tensor>(0), kernel.device_)) {
      set_dtype(arguments);
    }
    if (C10_UNLIKELY((keys_ | kernel.keys_) != keys)) {
      keys_ = keys - kernel.keys_;  // what is above, such as a Python dispatcher, sees each call
    } else if (conversion.has_plain_keys && kernel.passes_autograd_by_ && has_nothing_to_record(arguments)) {
      below_autograd_.emplace();  // what the op is made of, too
      keys_ = kernel.device_keys_;
    }
  }
  Passage(const Passage&) = delete;
  C10_NOINLINE ~Passage() {}

  // The keys that the op goes on with.
  c10::DispatchKeySet keys() const { return keys_; }

 private:
  static bool has_nothing_to_record(const Arguments& arguments) {
    const Differentiation differentiation;
    return std::find(arguments.kinds, arguments.kinds + arguments.count, Kind::kOptionals) == arguments.kinds + arguments.count &&
        !arguments.any_tensor([&](const Tensor& tensor) { return differentiation.has(tensor); });
  }

  // The kernel's own copy of an argument that the caller left out.
  static void set_dtype(const Arguments& arguments) {
    for (size_t i = 0; i < arguments.count; ++i) {
      if (arguments.kinds[i] == Kind::kDtype && !arguments.at<std::optional<ScalarType>>(i)) {
        static constexpr std::optional<ScalarType> kFloat = at::kFloat;
        arguments.addresses[i] = &kFloat;
      }
    }
  }

  c10::DispatchKeySet keys_;
  std::optional<c10::impl::ExcludeDispatchKeyGuard> no_autocast_;
  Casts casts_;
  std::optional<at::AutoDispatchBelowADInplaceOrView> below_autograd_;
};

// Stands for the kernel of an op of a known signature, which is a Kernel.
template <class Signature>
struct Unboxed;

template <class Result, class... Args>
struct Unboxed<Result(Args...)> : c10::OperatorKernel {
  Result operator()(c10::DispatchKeySet keys, Args... args);
};

// Where the arguments of a signature that are of some kind have their addresses.
template <class... Args>
struct Places {
  static constexpr size_t count = (size_t{0} + ... + (kind_of<Args> != Kind::kOther));
  static_assert(count <= Casts::kMost);

  std::array<Kind, sizeof...(Args)> kinds{kind_of<Args>...};  // of those that are of some, in front
  std::array<uint8_t, sizeof...(Args)> of_argument{};
  bool begin_with_tensor = kinds[0] == Kind::kTensor;

  constexpr Places() {
    uint8_t found = 0;
    for (size_t i = 0; i < kinds.size(); ++i) {
      of_argument[i] = found;
      if (kinds[i] != Kind::kOther) {
        kinds[found++] = kinds[i];
      }
    }
  }
};

// An argument, or its cast. One of no kind is passed on as it came.
template <class Arg>
C10_ALWAYS_INLINE decltype(auto) used(std::remove_reference_t<Arg>& arg, const void* address) {
  if constexpr (kind_of<Arg> == Kind::kOther) {
    return std::forward<Arg>(arg);
  } else {
    return *static_cast<const std::remove_cvref_t<Arg>*>(address);
  }
}

}  // namespace

// What the dispatcher calls with arguments.
template <class Result, class... Args>
struct c10::impl::wrap_kernel_functor_unboxed_<Unboxed<Result(Args...)>, Result(c10::DispatchKeySet, Args...)> final {
  static Result call(c10::OperatorKernel* functor, c10::DispatchKeySet keys, Args... args) {
    return run(static_cast<const Kernel&>(*functor), keys, std::index_sequence_for<Args...>(), args...);
  }

 private:
  template <size_t... I>
  C10_ALWAYS_INLINE static Result run(
      const Kernel& kernel, c10::DispatchKeySet keys, std::index_sequence<I...>, std::remove_reference_t<Args>&... args) {
    if constexpr (is_for_low_bit<Result(Args...)>) {
      if (C10_UNLIKELY(kernel.has_recipe())) {
        static constexpr std::array<Box, sizeof...(Args)> kBoxes{&boxed<std::decay_t<Args>>...};
        const std::array<const void*, sizeof...(Args)> given{std::addressof(args)...};
        if (Tensor result = kernel.low_bit(kBoxes.data(), given.data(), given.size()); result.defined()) {
          return result;
        }
      }
    }
    static constexpr Places<Args...> kPlaces;
    std::array<const void*, kPlaces.count + 1> addresses;
    ((kind_of<Args> != Kind::kOther ? void(addresses[kPlaces.of_argument[I]] = std::addressof(args)) : void()), ...);
    const Passage passage(
        kernel, keys, {kPlaces.kinds.data(), addresses.data(), kPlaces.count, kPlaces.begin_with_tensor});
    const auto redispatch = reinterpret_cast<Result (*)(c10::DispatchKeySet, Args...)>(kernel.redispatch());
    return redispatch(passage.keys(), used<Args>(args, addresses[kPlaces.of_argument[I]])...);
  }
};

// What it calls with a stack: torch's would take the arguments off it, and put them on another below.
template <class Signature>
struct c10::impl::make_boxed_from_unboxed_functor<Unboxed<Signature>, false> final {
  static void call(c10::OperatorKernel* functor, const c10::OperatorHandle& handle, c10::DispatchKeySet keys, Stack* stack) {
    (*static_cast<const Kernel*>(functor))(handle, keys, stack);
  }
};

namespace {

// An op whose kernel is called without a stack.
struct Entrance {
  const char *name, *overload_name;
  c10::KernelFunction (*function)(std::unique_ptr<c10::OperatorKernel>);
  void (*redispatch)();  // of its signature
};

template <class Signature>
c10::KernelFunction unboxed(std::unique_ptr<c10::OperatorKernel> kernel) {
  return c10::KernelFunction::makeFromUnboxedFunctor<false, Unboxed<Signature>>(std::move(kernel));
}

// What there is of an op: of one that this torch does not have, nothing.
template <class Op>
struct Known {
  static constexpr const char *name = "", *overload_name = "";
  static constexpr c10::KernelFunction (*function)(std::unique_ptr<c10::OperatorKernel>) = nullptr;
  static constexpr void (*redispatch)() = nullptr;
};

template <class Op>
  requires requires { typename Op::schema; }
struct Known<Op> : Op {
  static constexpr auto function = &unboxed<typename Op::schema>;
};

template <class Ops>
struct Entrances;

template <class... Ops>
struct Entrances<OpList<Ops...>> {
  // Initialized where it is, and by no code: a function for so many would be the largest of all.
  static inline const Entrance all[] = {
      {Known<Ops>::name, Known<Ops>::overload_name, Known<Ops>::function, reinterpret_cast<void (*)()>(Known<Ops>::redispatch)}...};
};

// The entrance of an op, or null.
const Entrance* find_entrance(const c10::OperatorHandle& handle) {
  const auto& op = handle.operator_name();
  const auto& all = Entrances<at::_ops::UnboxedOps>::all;
  const auto found = std::find_if(std::begin(all), std::end(all), [&](const Entrance& entrance) {
    return op.name == entrance.name && op.overload_name == entrance.overload_name;
  });
  return found == std::end(all) ? nullptr : &*found;
}

// torch warns, once in a process, that a kernel is overridden: that is what is meant here.
struct NoWarnings : c10::WarningHandler {
  void process(const c10::Warning&) override {}
};

// The kernels at one device's key; they are gone, and those before them back, when this is.
class Library {
 public:
  Library(const std::string& device_type, const std::string& key)
      : device_(c10::Device(device_type).type()), key_(c10::parseDispatchKey(key)) {}

  void impl(const std::string& name, Op op, const char* with_dtype, Object is_capturing) {
    const auto handle = find(name);
    if (with_dtype != nullptr) {
      op.with_dtype = find(with_dtype);
    }
    const Entrance* const entrance = with_dtype == nullptr ? find_entrance(handle) : nullptr;
    auto kernel = std::make_unique<Kernel>(
        std::move(op), handle, device_, key_, std::move(is_capturing), entrance == nullptr ? nullptr : entrance->redispatch);
    NoWarnings no_warnings;
    const c10::WarningUtils::WarningHandlerGuard guard(&no_warnings);
    put(handle.operator_name(), key_,
        entrance == nullptr ? c10::KernelFunction::makeFromBoxedFunctor(std::move(kernel)) : entrance->function(std::move(kernel)));
  }

  // The kernels of polycast::kept_cast.
  void kept_cast(Object is_capturing) {
    const DispatchKey device = key_below(key_);
    // Some devices' keys have no name that can be parsed.
    const auto autograd =
        c10::toRuntimePerBackendFunctionalityKey(DispatchKey::AutogradFunctionality, c10::toBackendComponent(device));
    put({kKeptCast, ""}, device,
        c10::KernelFunction::makeFromUnboxedFunctor<false, KeptCastKernel>(
            std::make_unique<KeptCastKernel>(device_, std::move(is_capturing))));
    put({kKeptCast, ""}, autograd,
        c10::KernelFunction::makeFromUnboxedFunctor<false, KeptCastAutograd>(std::make_unique<KeptCastAutograd>()));
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

  // No signature is given, against which torch would check the others: these are torch's own.
  void put(const c10::OperatorName& op, DispatchKey key, c10::KernelFunction kernel) {
    registered_.push_back(
        c10::Dispatcher::singleton().registerImpl(op, key, std::move(kernel), std::nullopt, nullptr, "polycast"));
  }

  const DeviceType device_;
  const DispatchKey key_;
  std::vector<c10::RegistrationHandleRAII> registered_;
};

}  // namespace
