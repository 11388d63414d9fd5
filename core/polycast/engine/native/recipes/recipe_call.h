// Ops that a region's recipe computes: by the action that Python has decided for similar calls, or by Python, in
// recipes/plan.py. The rest of the engine includes this header alone of recipes/.
//
// Calling Python takes the GIL and may run anything, which may end the region.

#pragma once

#include "actions.h"

namespace {

// Set by bind_recipes().
PyObject* perform_recipe = nullptr;

// Convert an argument to Python; return nothing for types that no recipe takes.
Object for_python(const c10::IValue& value) {
  if (value.isTensor()) {
    return python_tensor(value.toTensor());
  }
  if (value.isNone() || value.isBool()) {
    return Object::borrow(value.isNone() ? Py_None : value.toBool() ? Py_True : Py_False);
  }
  if (value.isInt()) {
    return Object::steal(PyLong_FromLongLong(value.toInt()));
  }
  if (value.isDouble()) {
    return Object::steal(PyFloat_FromDouble(value.toDouble()));
  }
  if (value.isString()) {
    return Object::steal(PyUnicode_FromString(value.toStringRef().c_str()));
  }
  if (value.isIntList()) {
    return Object::steal(PySequence_List(python_numbers(value.toDimVector()).get()));
  }
  return Object();
}

// Return whether the arguments need no check in Python: strided tensors of the device in float32, bfloat16 or float16, of no subclass or transform, which
// autograd does not record. See Plan.unsupported_tensor() in recipes/plan.py.
bool need_no_check(c10::ArrayRef<c10::IValue> arguments, DeviceType device) {
  static constexpr c10::DispatchKeySet kSpecial{
      DispatchKey::Python, DispatchKey::FuncTorchGradWrapper, DispatchKey::FuncTorchBatched, DispatchKey::Functionalize};
  const Differentiation autograd;
  return caching_is_safe() && std::all_of(arguments.begin(), arguments.end(), [&](const c10::IValue& argument) {
    if (!argument.isTensor() || !argument.toTensor().defined()) {
      return true;
    }
    const Tensor& tensor = argument.toTensor();
    return tensor.device().type() == device && tensor.layout() == at::kStrided && !tensor.is_nested() &&
        is_fast_or_float32(tensor.scalar_type()) && !tensor.key_set().has_any(kSpecial) &&
        !autograd.has(tensor);
  });
}

// torch's number of the backward in which this thread recomputes a forward, such as for a checkpoint: -1 outside of any backward,
// kNotRecomputing if it does not recompute one. While it does, Python decides each call.
constexpr int kNotRecomputing = -2;
thread_local int recomputing_backward = kNotRecomputing;

// Return whether an autograd.Function runs, forward or backward (see engine/inference.py); nothing if only Python knows.
std::optional<bool> runs_in_function() {
  const auto& autograd = c10::AutogradState::get_tls_state();
  if (!autograd.get_fw_grad_mode()) {
    return !autograd.get_inference_mode();
  }
  const int backward = torch::autograd::get_current_graph_task_id();
  return backward == recomputing_backward ? std::nullopt : std::optional(backward != -1);
}

// Convert the results that Python returns: a tensor, a tuple of tensors and None for undefined ones, or None if the recipe declines it.
Results results_of(PyObject* given) {
  if (given == Py_None) {
    return {};
  }
  if (!PyTuple_Check(given)) {
    return {tensor_of(given)};
  }
  Results results;
  for (Py_ssize_t i = 0; i < PyTuple_Size(given); ++i) {
    PyObject* const item = PyTuple_GetItem(given, i);
    results.emplace_back(item == Py_None ? Tensor() : tensor_of(item));
  }
  return results;
}

// Ask Python to compute a call. If `metadata` is not null, keep what it decides for calls with the same. Return no results if the recipe
// declines the call.
C10_NOINLINE Results ask_python(const RecipeCall& call, c10::ArrayRef<c10::IValue> arguments, const CallMetadata* metadata) {
  const uint64_t epoch = Decisions::epoch();
  const Gil gil;
  const Object given = python_tuple(arguments, &for_python);
  if (!given) {
    return {};
  }
  const std::string device = c10::DeviceTypeName(call.device, /*lower_case=*/true);
  PyObject* const checked = need_no_check(arguments, call.device) ? Py_True : Py_False;
  const Object performed =
      ::call(perform_recipe, "(LsOO)", static_cast<long long>(call.op), device.c_str(), checked, given.get());
  PyObject *result, *action;
  parse(performed.get(), "OO", &result, &action);
  if (metadata != nullptr && action != Py_None) {
    if (auto kept = action_of(action, arguments); kept != nullptr) {
      Decisions::of_thread().keep(*metadata, std::move(kept), epoch);
    }
  }
  return results_of(result);
}

template <class Arg>
C10_NOINLINE void push_boxed(torch::jit::Stack& stack, const Arg& argument) {
  stack.emplace_back(argument);
}

// Reserve room for so many values that an OPERATOR action appends to the arguments.
constexpr size_t kMaxAppended = 12;

// Box arguments, with room for what is appended.
template <class... Args>
torch::jit::Stack boxed(const Args&... arguments) {
  torch::jit::Stack stack;
  stack.reserve(sizeof...(arguments) + kMaxAppended);
  (push_boxed(stack, arguments), ...);
  return stack;
}

// Compute an op by the recipe of this thread's region; return no results, and leave the arguments as they are, if the recipe declines it.
C10_NOINLINE Results call_recipe(const RecipeCall& call, torch::jit::Stack& arguments) {
  const std::optional<bool> in_function = runs_in_function();
  if (!in_function || !call.has_only_autograd || !caching_is_safe() || observed_op != nullptr) {  // recomputing, intercepted or observed: keep no action
    return ask_python(call, arguments, nullptr);
  }
  CallMetadata metadata(region_of(call.device), call.device, call.op, *in_function);
  if (!std::all_of(arguments.begin(), arguments.end(), [&](const c10::IValue& each) { return metadata.add(each); }) ||
      ((metadata.records || !metadata.has_fast_or_float32) && torch::autograd::ForwardADLevel::try_get_by_idx(0) != nullptr)) {
    return ask_python(call, arguments, nullptr);
  }
  metadata.finish();
  const auto action = Decisions::of_thread().find(metadata);
  if (action != nullptr && action->kind == Action::Kind::kDeclined) {
    return {};
  }
  if (action != nullptr) {
    if (std::optional<Results> results = compute(*action, call, arguments, metadata.records)) {
      return *std::move(results);
    }
  }
  return ask_python(call, arguments, &metadata);
}

// set_recomputing(backward)
PyObject* set_recomputing(PyObject*, PyObject* backward) {
  recomputing_backward = backward == Py_None ? kNotRecomputing : static_cast<int>(PyLong_AsLong(backward));
  return Py_NewRef(Py_None);
}

// Forget what was decided for calls, on all threads.
void forget_actions() { Decisions::forget_all(); }

// Check that Python numbers what recipes use as C++ does, and set the function that performs a call.
void bind_recipes(PyObject* numbers, PyObject* perform) {
  check_numbers(numbers, "not_prepacked", kNotPrepackedNames);
  check_numbers(numbers, "actions", Action::kKindNames);
  check_numbers(numbers, "prepack_ids", Action::kPrepackNames, Action::kAsItIs);
  set_reference(perform_recipe, perform);
}

// Whether recipes take the arguments of a signature: of ops with a weight, and of elementwise functions.
template <class Signature>
constexpr bool takes_recipe = false;

template <>
constexpr bool takes_recipe<Tensor(const Tensor&)> = true;

template <>
constexpr bool takes_recipe<Tensor(const Tensor&, c10::string_view)> = true;

template <class... Args>
constexpr bool takes_recipe<Tensor(const Tensor&, const Tensor&, Args...)> =
    (std::is_constructible_v<c10::IValue, const std::decay_t<Args>&> && ...);

template <class... Tensors, class... Args>
constexpr bool takes_recipe<std::tuple<Tensors...>(const Tensor&, const Tensor&, Args...)> =
    takes_recipe<Tensor(const Tensor&, const Tensor&, Args...)> && (std::is_same_v<Tensors, Tensor> && ...);

// Return the results of a call as its signature does.
template <class Result>
Result from_results(Results results) {
  if constexpr (std::is_same_v<Result, Tensor>) {
    return std::move(results.front()).toTensor();
  } else {
    return [&]<size_t... I>(std::index_sequence<I...>) {
      return Result(std::move(results[I]).toTensor()...);
    }(std::make_index_sequence<std::tuple_size_v<Result>>());
  }
}

}  // namespace
