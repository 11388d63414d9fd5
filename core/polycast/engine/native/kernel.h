// The kernel of an op at the Autocast key: chooses a dtype, casts the inputs to it, and redispatches. Immutable.

#pragma once

#include "arguments.h"
#include "autocast.h"
#include "boxed_arguments.h"
#include "matching.h"
#include "one_query.h"
#include "recipe_call.h"
#include "regions.h"

namespace {

// Dispatch keys below Autocast that can be skipped for a functional op which autograd does not record: their kernels only redispatch.
constexpr c10::DispatchKeySet kSkippableKeys{
    DispatchKey::BackendSelect,
    DispatchKey::ADInplaceOrView,
    DispatchKey::AutogradFunctionality,
    DispatchKey::AutogradOther};

struct Op {
  int64_t number;
  Policy policy;
  std::string refusal;  // the error of a BANNED op
  std::vector<size_t> written;  // positions of the tensors that it writes, though its schema does not say so
  int writing_flag;             // position of the flag without which it does not; -1: it always does
  bool is_composed;             // one of COMPOSED_OPS in policy/schemas.py
  MatchedOperands operands;     // for MATCH
  MissingKernels missing;
  std::optional<c10::OperatorHandle> with_dtype;  // for FP32_APPEND_DTYPE, the overload with a dtype
};

class Kernel final : public c10::OperatorKernel {
 public:
  Kernel(Op op, const c10::OperatorHandle& handle, DeviceType device, DispatchKey key, IsCapturing is_capturing, void (*redispatch)() = nullptr)
      : op_(std::move(op)),
        handle_(handle),
        device_(device),
        keys_(key),
        below_(c10::DispatchKeySet::FULL_AFTER, key),
        device_keys_(key_below(key)),
        skipped_(keys_ | kSkippableKeys),
        is_composed_(op_.policy == Policy::kNone && op_.is_composed),
        policy_for_recipes_(op_.policy == Policy::kNone || op_.policy == Policy::kMatch ? Policy::kLowerPrecisionFp : op_.policy),
        skips_autograd_(can_skip_autograd(op_, handle)),
        multiplies_batches_(handle.operator_name() == c10::OperatorName("aten::linear", "") ||
                            handle.operator_name() == c10::OperatorName("aten::matmul", "")),
        matching_(op_.operands, op_.missing.of_op, handle.schema()),
        is_capturing_(std::move(is_capturing)),
        redispatch_(redispatch) {
    const auto& arguments = handle.schema().arguments();
    arity_ = arguments.size();
    for (size_t i = 0; i < arguments.size(); ++i) {
      const std::string type = arguments[i].real_type()->str();
      if (type.find("Tensor") != std::string::npos) {
        const bool is_written = matching_.arguments[tensors_.size()].is_written;
        writes_ |= is_written;
        is_first_.push_back(!is_written && std::find(op_.written.begin(), op_.written.end(), i) == op_.written.end());
        tensors_.push_back(i);
      } else if (type == "ScalarType?") {
        optional_dtype_ = i;
      }
    }
  }

  // Return whether the region's recipe is for the op.
  C10_ALWAYS_INLINE bool has_recipe(const DeviceRegion& region) const {
    const Override* const override = region.override;
    return C10_UNLIKELY(override != nullptr) && override->over(policy_for_recipes_, op_.number) == Policy::kRecipe;
  }

  // Return whether the first argument should be made contiguous: otherwise torch may copy the matrix for each batch.
  bool should_make_contiguous(c10::DispatchKeySet keys, const Tensor& first, const Tensor& matrix) const {
    return multiplies_batches_ && has_only_autograd(keys) && first.dim() > 2 && matrix.dim() <= 2 && !first.is_contiguous();
  }

  Tensor contiguous(const Tensor& tensor) const {
    NoAutocast no_autocast(device_, keys_);
    return tensor.contiguous();
  }

  // Compute the op by the recipe, or as it is once Python has left the region; return no results if the recipe declines it.
  C10_NOINLINE Results call_recipe(c10::DispatchKeySet keys, torch::jit::Stack arguments) const {
    const uint64_t changes = region_changes;
    Results results = [&] {
      const NoAutocast no_autocast(device_, keys_);
      return ::call_recipe({handle_, op_.number, device_, has_only_autograd(keys), is_capturing_}, arguments);
    }();
    if (C10_UNLIKELY(changes != region_changes) && results.empty() && !at::autocast::is_autocast_enabled(device_)) {
      const NoAutocast no_autocast(device_, keys_);
      results = std::move(arguments);
      handle_.redispatchBoxed(keys & below_, &results);
      TORCH_INTERNAL_ASSERT(!results.empty());
    }
    return results;
  }

  // Cast the inputs of a call whose tensors `each_tensor` gives to a function, with the numbers of their arguments.
  template <class EachTensor, class MakeCasts>
  void cast_inputs(Policy policy, const CastSpec& spec, const EachTensor& each_tensor, const MakeCasts& make_casts) const {
    if (C10_LIKELY(!writes_ && policy != Policy::kLowerFirst)) {
      return make_casts(spec);
    }
    const CastSpec of_others{ScalarType::Undefined, device_, spec.has_only_autograd, spec.region, is_capturing_};
    size_t only = policy == Policy::kLowerFirst ? tensors_.size() : SelectedCasts::kAll;
    if (policy == Policy::kLowerFirst) {
      each_tensor([&](size_t i, const Tensor& tensor) { only = is_first_[i] && is_eligible(tensor, device_) ? std::min(only, i) : only; });
    }
    make_casts(SelectedCasts{spec, of_others, matching_, only});
  }

  // The boxed entry point.
  void operator()(const c10::OperatorHandle& handle, c10::DispatchKeySet keys, torch::jit::Stack* stack) const {
    const DeviceRegion& region = region_of(device_);
    if (C10_UNLIKELY(has_recipe(region))) {
      if (c10::IValue& first = argument(stack, 0);
          multiplies_batches_ && should_make_contiguous(keys, first.toTensor(), argument(stack, 1).toTensor())) {
        first = contiguous(first.toTensor());
      }
      if (Results results = call_recipe(keys, torch::jit::Stack(stack->end() - static_cast<int64_t>(arity_), stack->end())); !results.empty()) {
        stack->erase(stack->end() - static_cast<int64_t>(arity_), stack->end());
        stack->insert(stack->end(), std::make_move_iterator(results.begin()), std::make_move_iterator(results.end()));
        return;
      }
    }
    Policy policy = this->policy(region);  // Python may have left the region
    if (policy == Policy::kNone && is_composed_ && argument(stack, 0).toTensor().is_nested()) {
      policy = Policy::kLowerPrecisionFp;  // for nested tensors it calls ops without the dispatcher, so autocast would miss their inputs
    }
    if (policy == Policy::kNone) {
      // Skip autograd's kernel where casts of weights may be cached: the ops that this one calls would run below autograd, where a view of
      // a weight has no base, so that autocast could not find the weight's cast.
      const bool skips_autograd = is_composed_ && has_only_autograd(keys) && !needs_autograd(stack) && may_find_casts(region, stack);
      handle.redispatchBoxed(skips_autograd ? device_keys_ : keys & below_, stack);
      if (skips_autograd && stack->back().toTensor().is_view()) {
        stack->back() = stack->back().toTensor().variable_data();  // as autograd's kernel, return no view
      }
      return;
    }
    if (policy == Policy::kMatch) {
      Dtypes dtypes;
      boxed_arguments(stack).each_tensor([&](size_t, size_t, bool, const Tensor& tensor) { dtypes.add(tensor); });
      if (!matching_.may_refuse(dtypes)) {
        return handle.redispatchBoxed(keys & below_, stack);
      }
      const Written written = match(stack);
      handle.redispatchBoxed(keys & below_, stack);
      return write_back(written);
    }
    NoAutocast no_autocast(device_, keys_);
    const ScalarType target = dtype_for(policy, keys, [&](const auto& add) {
      boxed_arguments(stack).each_tensor([&](size_t, size_t, bool, const Tensor& tensor) { add(tensor); });
    });
    const CastSpec spec{target, device_, has_only_autograd(keys), region, is_capturing_};
    Written written;
    if (spec.dtype != ScalarType::Undefined) {
      if (C10_UNLIKELY(!op_.written.empty() && policy != Policy::kLowerFirst)) {
        written = cast_written(spec, stack);
      }
      const BoxedArguments arguments = boxed_arguments(stack);
      cast_inputs(policy, spec,
          [&](const auto& add) { arguments.each_tensor([&](size_t i, size_t, bool, const Tensor& tensor) { add(i, tensor); }); },
          [&](const auto& all) { arguments.cast_all(all); });
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
    if (region.override == nullptr || !is_traced() || needs_autograd(stack) || !attend_by_rows(handle, stack)) {
      handle.callBoxed(stack);
    }
    write_back(written);
  }

 private:
  friend class PreparedCall;
  template <class, class>
  friend struct c10::impl::wrap_kernel_functor_unboxed_;

  // The tensors that a call writes though its op's schema does not say so, and their casts.
  using Written = std::vector<std::pair<Tensor, Tensor>>;

  // Return whether autograd can be skipped where it has nothing to record. Not for ops that may return views of their inputs,
  // which autograd marks as such: by their schemas, or because they are composite (of these, those with LOWER_PRECISION_FP and no lists return none).
  static bool can_skip_autograd(const Op& op, const c10::OperatorHandle& handle) {
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

  // Return whether only autograd is between the Autocast key and the device's kernel.
  C10_ALWAYS_INLINE bool has_only_autograd(c10::DispatchKeySet keys) const { return keys - skipped_ == device_keys_; }

  // Return the dtype to cast the inputs to, or Undefined.
  template <class AddInputs>
  C10_ALWAYS_INLINE ScalarType dtype_for(Policy policy, c10::DispatchKeySet keys, const AddInputs& add_inputs) const {
    switch (policy) {
      case Policy::kLowerPrecisionFp:
      case Policy::kRecipe:
      case Policy::kLowerFirst:
        return fast_dtype(keys, add_inputs);
      case Policy::kFp32:
        return at::kFloat;
      case Policy::kPromote: {
        Dtypes dtypes;
        add_inputs([&](const Tensor& tensor) { is_eligible(tensor, device_) ? dtypes.add(tensor) : void(); });
        return dtypes.has_several() ? at::kFloat : ScalarType::Undefined;
      }
      case Policy::kBanned:
        refuse();
      default:
        return ScalarType::Undefined;
    }
  }

  // Return the region's fast dtype, or float32 if the device has no kernel for it.
  template <class AddInputs>
  C10_ALWAYS_INLINE ScalarType fast_dtype(c10::DispatchKeySet keys, const AddInputs& add_inputs) const {
    const ScalarType dtype = at::autocast::get_autocast_dtype(device_);
    bool is_missing = op_.missing.of_op.has(dtype);
    if (!has_only_autograd(keys)) {  // else all tensors are strided
      add_inputs([&](const Tensor& tensor) { is_missing |= tensor.defined() && op_.missing.has(tensor.layout(), dtype); });
    }
    return C10_UNLIKELY(is_missing) ? at::kFloat : dtype;
  }

  [[noreturn]] C10_NOINLINE void refuse() const { TORCH_CHECK(false, op_.refusal); }

  C10_ALWAYS_INLINE Policy policy(const DeviceRegion& region) const {
    const Override* const override = region.override;
    return C10_UNLIKELY(override != nullptr) ? override->over(op_.policy, op_.number) : op_.policy;
  }

  c10::IValue& argument(torch::jit::Stack* stack, size_t position) const {
    return (*stack)[stack->size() - arity_ + position];
  }

  BoxedArguments boxed_arguments(torch::jit::Stack* stack) const { return {stack->data() + (stack->size() - arity_), tensors_}; }

  // Return whether the ops that an encoder layer calls may find casts: of a recipe or a WeightCache, or of a weight that the region uses
  // again. The layer uses the weight of its first norm, which is not cast, as often as the others.
  bool may_find_casts(const DeviceRegion& region, torch::jit::Stack* stack) const {
    static constexpr size_t kNormWeight = 10;
    const c10::IValue& weight = argument(stack, kNormWeight);
    return region.override != nullptr || region.store != nullptr ||
        (region.casts != nullptr && weight.isTensor() && region.casts->note_uncast(weight.toTensor()));
  }

  bool needs_autograd(torch::jit::Stack* stack) const {
    const Differentiation autograd;
    return std::any_of(tensors_.begin(), tensors_.end(), [&](size_t position) {
      const c10::IValue& value = argument(stack, position);
      return value.isTensor() && autograd.has(value.toTensor());
    });
  }

  bool first_is_eligible(torch::jit::Stack* stack) const {
    const c10::IValue& first = argument(stack, 0);
    return first.isTensor() && is_eligible(first.toTensor(), device_);
  }

  // Cast the operands whose dtypes torch would refuse.
  C10_NOINLINE Written match(torch::jit::Stack* stack) const {
    Match match(matching_, device_);
    boxed_arguments(stack).each_tensor([&](const auto&... tensor) { match.add(tensor...); });
    if (!match.decide() || !matches_here(op_.number, device_)) {
      return {};
    }
    const NoAutocast no_autocast(device_, keys_);
    Written written = cast_written({at::kFloat, device_, false, region_of(device_), is_capturing_}, stack);
    boxed_arguments(stack).cast_all(match);
    return written;
  }

  // Cast the tensors that the op writes though its schema does not say so; they get the values of the casts afterwards.
  Written cast_written(const CastSpec& spec, torch::jit::Stack* stack) const {
    Written written;
    if (op_.writing_flag < 0 || argument(stack, static_cast<size_t>(op_.writing_flag)).toBool()) {
      for (const size_t position : op_.written) {
        c10::IValue& value = argument(stack, position);
        if (value.isTensor() && spec.applies_to(value.toTensor())) {
          const Tensor tensor = value.toTensor();
          const auto same = std::find_if(written.begin(), written.end(), [&](const auto& each) { return each.first.is_same(tensor); });
          if (same != written.end()) {
            value = same->second;
          } else {
            value = tensor.to(spec.dtype);
            written.emplace_back(tensor, value.toTensor());
          }
        }
      }
    }
    return written;
  }

  // Give tensors the values of their casts, as the op would have: it writes without a new version. What intercepts ops has to see it.
  static void write_back(const Written& written) {
    for (const auto& [tensor, cast] : written) {
      const at::NoGradGuard no_grad;
      std::optional<at::AutoDispatchBelowADInplaceOrView> below_versions;
      if (caching_is_safe()) {
        below_versions.emplace();
      }
      tensor.copy_(cast);
      if (tensor.has_storage()) {
        invalidate({storage_of(tensor)});
      }
    }
  }

  const Op op_;
  const c10::OperatorHandle handle_;
  const DeviceType device_;
  const c10::DispatchKeySet keys_;   // the Autocast key
  const c10::DispatchKeySet below_;  // all below it, and PythonDispatcher
  const c10::DispatchKeySet device_keys_, skipped_;
  const bool is_composed_;  // and not cast itself
  const Policy policy_for_recipes_;
  const bool skips_autograd_;
  const bool multiplies_batches_;  // by one matrix
  const Matching matching_;
  const IsCapturing is_capturing_;
  void (*const redispatch_)();
  size_t arity_ = 0;
  std::vector<size_t> tensors_;
  std::vector<bool> is_first_;  // whether each of these may be the one that LOWER_FIRST casts
  bool writes_ = false;         // to some of them, as the schema declares
  std::optional<size_t> optional_dtype_;
};

}  // namespace
