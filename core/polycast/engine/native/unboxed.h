// Unboxed entry points: kernels that the dispatcher calls with arguments in place of a stack. Only the layout of the arguments
// depends on the signature; all else is shared.

#pragma once

#include "arguments.h"
#include "kernel.h"
#include "one_query.h"
#include "signatures.h"

namespace {

// A call whose arguments are cast, and the keys to redispatch it with. While it lives, autocast is off, the casts are alive, and
// autograd is skipped if it has nothing to record.
class PreparedCall {
 public:
  C10_NOINLINE PreparedCall(const Kernel& kernel, c10::DispatchKeySet keys, const Arguments& arguments) : keys_(keys & kernel.below_) {
    const DeviceRegion& region = region_of(kernel.device_);
    const Policy policy = kernel.policy(region);
    if (policy == Policy::kMatch) {
      match(kernel, arguments);
    }
    if (policy == Policy::kMatch || policy == Policy::kNone) {
      return;
    }
    no_autocast_.emplace(kernel.device_, kernel.keys_);
    const CastSpec spec{
        kernel.dtype_for(policy, keys, [&](const auto& add) {
          arguments.any_tensor([&](const Tensor& tensor) {
            add(tensor);
            return false;
          });
        }),
        kernel.device_, kernel.has_only_autograd(keys), region, kernel.is_capturing_};
    if (spec.dtype != ScalarType::Undefined) {
      kernel.cast_inputs(
          policy, spec,
          [&](const auto& add) { each_tensor(arguments, [&](size_t i, size_t, bool, const Tensor& tensor) { add(i, tensor); }); },
          [&](const auto& all) { casts_.make(arguments, all); });
    } else if (
        policy == Policy::kFp32SetOptDtype && arguments.kinds[0] == ArgumentKind::kTensor && is_eligible(arguments.at<Tensor>(0), kernel.device_)) {
      set_dtype(arguments);
    }
    if (C10_UNLIKELY((keys_ | kernel.keys_) != keys)) {
      keys_ = keys - kernel.keys_;  // keep keys above, such as a Python dispatcher
    } else if (spec.has_only_autograd && kernel.skips_autograd_ && has_nothing_to_record(arguments)) {
      below_autograd_.emplace();  // also for the ops that a composite calls
      keys_ = kernel.device_keys_;
    }
  }
  PreparedCall(const PreparedCall&) = delete;
  C10_NOINLINE ~PreparedCall() {}

  // The keys to redispatch with.
  c10::DispatchKeySet keys() const { return keys_; }
  bool skips_autograd() const { return below_autograd_.has_value(); }

  // Return whether all that is to be done is to cast to the fast dtype: nothing is recorded or intercepted.
  static bool is_only_cast(const Kernel& kernel, c10::DispatchKeySet keys, const Arguments& arguments) {
    const Policy policy = kernel.policy(region_of(kernel.device_));
    return (policy == Policy::kLowerPrecisionFp || policy == Policy::kRecipe) && kernel.has_only_autograd(keys) && has_nothing_to_record(arguments);
  }

 private:
  static bool has_nothing_to_record(const Arguments& arguments) {
    const Differentiation differentiation;
    const ArgumentKind* const end = arguments.kinds + arguments.count;
    return std::find(arguments.kinds, end, ArgumentKind::kOptionals) == end &&
        !arguments.any_tensor([&](const Tensor& tensor) { return differentiation.has(tensor); });
  }

  // As BoxedArguments::each_tensor().
  template <class Function>
  static void each_tensor(const Arguments& arguments, const Function& function) {
    for (size_t i = 0; i < arguments.count; ++i) {
      const bool is_list = arguments.kinds[i] == ArgumentKind::kTensors || arguments.kinds[i] == ArgumentKind::kTensorRefs;
      size_t item = 0;
      Arguments{arguments.kinds + i, arguments.addresses + i, 1}.any_tensor([&](const Tensor& tensor) {
        function(i, item++, is_list, tensor);
        return false;
      });
      if (arguments.kinds[i] == ArgumentKind::kOptionals) {
        for (const std::optional<Tensor> tensor : arguments.at<c10::List<std::optional<Tensor>>>(i)) {
          function(i, item++, true, tensor.value_or(Tensor()));
        }
      }
    }
  }

  // Cast the operands whose dtypes torch would refuse.
  C10_NOINLINE void match(const Kernel& kernel, const Arguments& arguments) {
    Match match(kernel.matching_, kernel.device_);
    each_tensor(arguments, [&](const auto&... tensor) { match.add(tensor...); });
    if (match.decide() && matches_here(kernel.op_.number, kernel.device_)) {
      const NoAutocast no_autocast(kernel.device_, kernel.keys_);
      casts_.make(arguments, match);
    }
  }

  // Set the dtype where the caller left it out.
  static void set_dtype(const Arguments& arguments) {
    for (size_t i = 0; i < arguments.count; ++i) {
      if (arguments.kinds[i] == ArgumentKind::kDtype && !arguments.at<std::optional<ScalarType>>(i)) {
        static constexpr std::optional<ScalarType> kFloat = at::kFloat;
        arguments.addresses[i] = &kFloat;
      }
    }
  }

  c10::DispatchKeySet keys_;
  std::optional<NoAutocast> no_autocast_;
  Casts casts_;
  std::optional<at::AutoDispatchBelowADInplaceOrView> below_autograd_;
};

// The type under which a Kernel is registered for a signature.
template <class Signature>
struct Unboxed;

template <class Result, class... Args>
struct Unboxed<Result(Args...)> : c10::OperatorKernel {
  Result operator()(c10::DispatchKeySet keys, Args... args);
};

// For a signature, where in Arguments the address of each argument lies.
template <class... Args>
struct ArgumentLayout {
  static constexpr size_t count = (size_t{0} + ... + (kind_of<Args> != ArgumentKind::kOther));
  static_assert(count <= Casts::kMax);

  std::array<ArgumentKind, sizeof...(Args)> kinds{kind_of<Args>...};  // the first `count` are those of the addresses
  std::array<uint8_t, sizeof...(Args)> of_argument{};

  constexpr ArgumentLayout() {
    const auto of_all = kinds;
    uint8_t found = 0;
    for (const bool are_dtypes : {false, true}) {
      for (size_t i = 0; i < of_all.size(); ++i) {
        if (of_all[i] != ArgumentKind::kOther && (of_all[i] == ArgumentKind::kDtype) == are_dtypes) {
          of_argument[i] = found;
          kinds[found++] = of_all[i];
        }
      }
    }
  }
};

template <class...>
constexpr bool begins_with_tensors = false;

template <class... Args>
constexpr bool begins_with_tensors<const Tensor&, const Tensor&, Args...> = true;

// Whether an op of a signature may write tensors that its schema does not declare as written: running statistics. Such a call is boxed to cast them.
template <class Signature>
constexpr bool takes_statistics = false;

template <class Result, class... Args>
constexpr bool takes_statistics<Result(
    const Tensor&, const std::optional<Tensor>&, const std::optional<Tensor>&, const std::optional<Tensor>&, const std::optional<Tensor>&, bool, Args...)> =
    true;

// Return an argument or its cast.
template <class Arg>
C10_ALWAYS_INLINE decltype(auto) used(std::remove_reference_t<Arg>& arg, const void* address) {
  if constexpr (kind_of<Arg> == ArgumentKind::kOther || kind_of<Arg> == ArgumentKind::kWritten) {
    return std::forward<Arg>(arg);
  } else {
    return *static_cast<const std::remove_cvref_t<Arg>*>(address);
  }
}

}  // namespace

// Specializations of torch's templates: the unboxed call.
template <class Result, class... Args>
struct c10::impl::wrap_kernel_functor_unboxed_<Unboxed<Result(Args...)>, Result(c10::DispatchKeySet, Args...)> final {
  static Result call(c10::OperatorKernel* functor, c10::DispatchKeySet keys, Args... args) {
    const auto& kernel = static_cast<const Kernel&>(*functor);
    if (passes_on(kernel, args...)) {
      return redispatch(kernel)(keys & kernel.below_, std::forward<Args>(args)...);
    }
    return run(kernel, keys, std::index_sequence_for<Args...>(), std::forward<Args>(args)...);
  }

 private:
  // Out of line, since most calls have no recipe.
  C10_NOINLINE static std::optional<Result> compute_by_recipe(
      const Kernel& kernel, c10::DispatchKeySet keys, const std::remove_reference_t<Args>&... args) {
    Results results = kernel.call_recipe(keys, boxed(args...));
    return results.empty() ? std::nullopt : std::optional(from_results<Result>(std::move(results)));
  }

  // Return whether a call is to be passed on as it is: no recipe computes it, and its policy casts none of the arguments.
  C10_ALWAYS_INLINE static bool passes_on(const Kernel& kernel, const std::remove_reference_t<Args>&... args) {
    const DeviceRegion& region = region_of(kernel.device_);
    const Policy policy = kernel.policy(region);
    if ((policy != Policy::kMatch && policy != Policy::kNone) || kernel.has_recipe(region)) {
      return false;
    }
    Dtypes dtypes;
    (dtypes.add(args), ...);
    return policy == Policy::kNone || !kernel.matching_.may_refuse(dtypes);
  }

  static auto redispatch(const Kernel& kernel) { return reinterpret_cast<Result (*)(c10::DispatchKeySet, Args...)>(kernel.redispatch_); }

  // Out of line, so that a call that is passed on needs no stack.
  template <size_t... I>
  C10_NOINLINE static Result run(const Kernel& kernel, c10::DispatchKeySet keys, std::index_sequence<I...>, Args... args) {
    if constexpr (takes_statistics<Result(Args...)>) {
      if (!kernel.op_.written.empty()) {
        torch::jit::Stack stack = boxed(args...);
        kernel(kernel.handle_, keys, &stack);
        return from_results<Result>(std::move(stack));
      }
    }
    static constexpr ArgumentLayout<Args...> kLayout;
    std::array<const void*, kLayout.count + 1> addresses;
    ((kind_of<Args> != ArgumentKind::kOther ? void(addresses[kLayout.of_argument[I]] = std::addressof(args)) : void()), ...);
    const Arguments arguments{kLayout.kinds.data(), addresses.data(), kLayout.count};
    if constexpr (takes_recipe<Result(Args...)>) {
      if (C10_UNLIKELY(kernel.has_recipe(region_of(kernel.device_)))) {
        if constexpr (begins_with_tensors<Args...>) {
          const auto given_tensors = std::tie(args...);
          if (const Tensor& first = std::get<0>(given_tensors); kernel.should_make_contiguous(keys, first, std::get<1>(given_tensors))) {
            const Tensor contiguous = kernel.contiguous(first);
            return [&](const Tensor&, auto&... others) {
              return run(kernel, keys, std::index_sequence<I...>(), contiguous, others...);
            }(args...);
          }
        }
        if (std::optional<Result> result = compute_by_recipe(kernel, keys, args...)) {
          return *std::move(result);
        }
      }
    }
    static constexpr bool is_attention = std::is_same_v<Result(Args...), at::_ops::scaled_dot_product_attention::schema>;
    [[maybe_unused]] const bool is_ours = region_of(kernel.device_).innermost != nullptr;  // torch's regions keep torch's bits
    if constexpr (is_attention) {
      const bool may_differ = is_ours && PreparedCall::is_only_cast(kernel, keys, arguments);
      if (Tensor result = may_differ ? attention_of_extension(args...) : Tensor(); result.defined()) {
        return result;
      }
    }
    const PreparedCall prepared(kernel, keys, arguments);
    if constexpr (is_attention) {
      if (const Tensor& query = *static_cast<const Tensor*>(addresses[0]); is_ours && prepared.skips_autograd()) {
        if (const Tensor rows = rows_of_query(used<Args>(args, addresses[kLayout.of_argument[I]])...); rows.defined()) {
          addresses[0] = &rows;
          return of_one_query(query, redispatch(kernel)(prepared.keys(), used<Args>(args, addresses[kLayout.of_argument[I]])...));
        }
      }
    }
    return redispatch(kernel)(prepared.keys(), used<Args>(args, addresses[kLayout.of_argument[I]])...);
  }
};

// The boxed call: torch's would unbox the arguments here and box them again below.
template <class Signature>
struct c10::impl::make_boxed_from_unboxed_functor<Unboxed<Signature>, false> final {
  static void call(c10::OperatorKernel* functor, const c10::OperatorHandle& handle, c10::DispatchKeySet keys, Stack* stack) {
    (*static_cast<const Kernel*>(functor))(handle, keys, stack);
  }
};

namespace {

// An op with an unboxed entry point.
struct UnboxedEntry {
  const char *name, *overload_name;
  c10::KernelFunction (*function)(std::unique_ptr<c10::OperatorKernel>);
  void (*redispatch)();  // of its signature
  bool takes_statistics;
};

template <class Signature>
c10::KernelFunction unboxed(std::unique_ptr<c10::OperatorKernel> kernel) {
  return c10::KernelFunction::makeFromUnboxedFunctor<false, Unboxed<Signature>>(std::move(kernel));
}

// Op traits; empty if this torch lacks the op.
template <class Op>
struct Known {
  static constexpr const char *name = "", *overload_name = "";
  static constexpr c10::KernelFunction (*function)(std::unique_ptr<c10::OperatorKernel>) = nullptr;
  static constexpr void (*redispatch)() = nullptr;
  using schema = void();
};

template <class Op>
  requires requires { typename Op::schema; }
struct Known<Op> : Op {
  static constexpr auto function = &unboxed<typename Op::schema>;
};

template <class Ops>
struct UnboxedEntries;

template <class... Ops>
struct UnboxedEntries<OpList<Ops...>> {
  // Initialized statically: a function that does it would be the largest of all.
  static inline const UnboxedEntry all[] = {
      {Known<Ops>::name, Known<Ops>::overload_name, Known<Ops>::function, reinterpret_cast<void (*)()>(Known<Ops>::redispatch),
       takes_statistics<typename Known<Ops>::schema>}...};
};

// Return the unboxed entry point of an op, or null.
const UnboxedEntry* find_unboxed_entry(const c10::OperatorHandle& handle) {
  const auto& op = handle.operator_name();
  const auto& all = UnboxedEntries<at::_ops::UnboxedOps>::all;
  const auto found = std::find_if(std::begin(all), std::end(all), [&](const UnboxedEntry& entry) {
    return op.name == entry.name && op.overload_name == entry.overload_name;
  });
  return found == std::end(all) ? nullptr : &*found;
}

}  // namespace
