// Run actions: compute a call without Python as a recipe has computed an earlier one.
//
// No Python runs and no GIL is taken, except where casting a weight takes it (see casting.h) or a cached one is stale.

#pragma once

#include "casting.h"
#include "conversions.h"
#include "decisions.h"
#include "extension.h"
#include "prepacked.h"
#include "user_store.h"

namespace {

// A call of an op in a region with a recipe, with autocast off for the device.
struct RecipeCall {
  const c10::OperatorHandle& handle;
  int64_t op;  // its number
  DeviceType device;
  bool has_only_autograd;  // see Kernel::has_only_autograd()
  const IsCapturing& is_capturing;
};

// The results of a call; none if the recipe declines it.
using Results = torch::jit::Stack;

// Convert a constant of a kernel from Python; return nothing for other types.
std::optional<c10::IValue> constant_of(PyObject* object) {
  if (object == Py_None || PyBool_Check(object)) {
    return object == Py_None ? c10::IValue() : c10::IValue(object == Py_True);
  }
  if (PyLong_Check(object)) {
    const int64_t number = PyLong_AsLongLong(object);
    if (PyErr_Occurred() != nullptr) {
      throw_python_error();
    }
    return c10::IValue(number);
  }
  if (PyFloat_Check(object)) {
    return c10::IValue(PyFloat_AsDouble(object));
  }
  if (PyUnicode_Check(object)) {
    return c10::IValue(string_of(object));
  }
  if (Py_TYPE(object) == Py_TYPE(python_dtype(at::kFloat))) {
    return c10::IValue(dtype_of(object));
  }
  return std::nullopt;
}

// For example, the missing bias of a recurrent cell.
bool is_undefined(const c10::IValue& value) { return value.isTensor() && !value.toTensor().defined(); }

// Forgets what has been decided when an operator is removed, as actions hold operators.
class OperatorRemovals final : public c10::OpRegistrationListener {
 public:
  // Listen until the process ends.
  static void listen() {
    [[maybe_unused]] static const auto* const registration = new c10::RegistrationHandleRAII(
        c10::Dispatcher::singleton().addRegistrationListener(std::make_unique<OperatorRemovals>()));
  }

  void onOperatorRegistered(const c10::OperatorHandle&) override {}
  void onOperatorDeregistered(const c10::OperatorHandle&) override { Decisions::forget_all(); }
};

// Look up an action's operator; return false if its schema does not fit the arguments.
bool add_operator(Action& action, const char* name, const char* overload, c10::ArrayRef<c10::IValue> arguments) {
  OperatorRemovals::listen();
  action.op = c10::Dispatcher::singleton().findSchema({name, overload});
  if (!action.op) {
    return false;
  }
  const auto& parameters = action.op->schema().arguments();
  const size_t others = arguments.size() + 1 + action.constants.size();
  if (parameters.size() < others || action.op->schema().returns().size() != 1) {
    return false;
  }
  action.parts = parameters.size() - others;
  const auto fits = [&](const c10::IValue& value, size_t position) {
    const c10::Type& type = *parameters[position].type();
    if (value.isInt() && type.kind() == c10::TypeKind::FloatType) {
      action.floats.push_back(position);
      return true;
    }
    return is_undefined(value) ? type.kind() == c10::TypeKind::OptionalType : value.type()->isSubtypeOf(type);
  };
  size_t position = 0;
  for (const c10::IValue& argument : arguments) {
    if (!fits(argument, position++)) {
      return false;
    }
  }
  position += action.parts + 1;
  return std::all_of(action.constants.begin(), action.constants.end(), [&](const auto& each) { return fits(each, position++); });
}

// Convert an action of _perform_recipe in engine.py; return null if it cannot be kept. The GIL must be held.
std::shared_ptr<const Action> action_of(PyObject* given, c10::ArrayRef<c10::IValue> arguments) {
  auto action = std::make_shared<Action>();
  int kind;
  Py_ssize_t weight;
  const char *name, *overload;
  PyObject *constants, *store;
  parse(given, "inissOO", &kind, &weight, &action->prepack_id, &name, &overload, &constants, &store);
  action->kind = static_cast<Action::Kind>(kind);
  action->weight = static_cast<size_t>(weight);
  for (std::optional<c10::IValue>& constant : convert_items(constants, &constant_of)) {
    if (!constant) {
      return nullptr;
    }
    action->constants.push_back(*std::move(constant));
  }
  if (action->kind != Action::Kind::kOperator) {
    return action;
  }
  if (store != Py_None) {
    action->process_store = Holder<UserStore>::unwrap(store);
  }
  return add_operator(*action, name, overload, arguments) ? action : nullptr;
}

// Return the prepacked weight or the cast that an operator takes; nothing if a prepacked weight is not cached.
std::optional<Tensors> find_parts(const Action& action, const RecipeCall& call, const Tensor& tensor) {
  const DeviceRegion& region = region_of(call.device);
  if (action.prepack_id == Action::kAsItIs) {
    return Tensors{tensor};
  }
  if (action.prepack_id == Action::kCachedCast) {
    const CastSpec spec{at::autocast::get_autocast_dtype(call.device), call.device, call.has_only_autograd, region, call.is_capturing};
    return Tensors{spec.applies_to(tensor) ? cast(tensor, spec) : tensor};
  }
  const std::shared_ptr<UserStore> store = region.store == nullptr ? action.process_store.lock() : region.store->shared_from_this();
  NotPrepacked reason;
  const Tensor* const weight = store == nullptr ? nullptr : weight_to_prepack(tensor, reason);
  if (weight == nullptr) {
    return std::nullopt;
  }
  return store->find_prepacked(Source(tensor, *weight), action.prepack_id);
}

// Compute a call that the recipe does not decline, and that autograd records or not, as Python has decided. Return nothing if Python has to be
// asked.
std::optional<Results> compute(const Action& action, const RecipeCall& call, torch::jit::Stack& arguments, bool records) {
  const ScalarType fast = at::autocast::get_autocast_dtype(call.device);
  if (action.kind == Action::Kind::kOperator) {
    std::optional<Tensors> parts;
    if (action.parts != 0) {
      parts = find_parts(action, call, arguments[action.weight].toTensor());
      if (!parts || parts->size() != action.parts) {
        return std::nullopt;
      }
    }
    std::replace_if(arguments.begin(), arguments.end(), &is_undefined, c10::IValue());
    if (parts) {
      arguments.insert(arguments.end(), parts->begin(), parts->end());
    }
    arguments.emplace_back(fast);
    arguments.insert(arguments.end(), action.constants.begin(), action.constants.end());
    for (const size_t position : action.floats) {
      arguments[position] = static_cast<double>(arguments[position].toInt());
    }
  }
  std::optional<at::AutoDispatchBelowADInplaceOrView> below_autograd;
  if (!records) {
    below_autograd.emplace();
  }
  if (action.kind == Action::Kind::kFloat32) {
    for (c10::IValue& argument : arguments) {
      if (argument.isTensor() && is_eligible(argument.toTensor(), call.device)) {
        argument = polycast::converted(argument.toTensor(), at::kFloat);
      }
    }
  }
  (action.op ? *action.op : call.handle).callBoxed(arguments);
  for (c10::IValue& result : arguments) {
    const Tensor& tensor = result.toTensor();
    if (tensor.defined() && tensor.is_floating_point() && tensor.scalar_type() != fast) {
      result = polycast::converted(tensor, fast);
    }
  }
  return std::move(arguments);
}

}  // namespace
