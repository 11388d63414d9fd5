// Operators that replace the ops of a recipe in compiled code, on all devices. See recipes/operators.py.

#pragma once

#include "kernel.h"

namespace {

// Computes the op as eager code does if this thread's region has the recipe and the dtype: without Python if an action is kept for such a call.
// Otherwise calls the operator's Python function: also for a view of a weight, for a call that names a cache, since its region is in the compiled
// code, for ops that are intercepted, and within an autograd.Function or a backward.
class RecipeOp final : public c10::OperatorKernel {
 public:
  // number: the op's number in the engine. compute: the Python function, which is never released: torch destroys kernels as the process exits.
  RecipeOp(c10::OperatorName op, int64_t number, PyObject* compute)
      : op_(std::move(op)), number_(number), compute_(Py_NewRef(compute)), is_capturing_(Object::borrow(Py_True)) {}

  void operator()(const c10::OperatorHandle& handle, c10::DispatchKeySet keys, torch::jit::Stack* stack) const {
    const auto first = stack->end() - static_cast<int64_t>(handle.schema().arguments().size());
    torch::jit::Stack arguments;
    arguments.reserve(handle.schema().arguments().size() + kMaxAppended);
    arguments.assign(std::make_move_iterator(first), std::make_move_iterator(stack->end()));
    stack->erase(first, stack->end());
    const DispatchKey key = (keys - kSkippableKeys).highestPriorityTypeId();
    const bool has_only_autograd = c10::toFunctionalityKey(key) == DispatchKey::Dense && keys - kSkippableKeys == c10::DispatchKeySet(key);
    const bool in_region = has_only_autograd && is_of_region(c10::dispatchKeyToDeviceType(key), arguments);
    Results results = in_region ? compute(handle, key, arguments) : in_python(arguments);
    stack->insert(stack->end(), std::make_move_iterator(results.begin()), std::make_move_iterator(results.end()));
  }

 private:
  // The arguments after those of the op, in the order of the schema, and their number.
  enum Added : size_t { kRecipe, kCache, kDtype, kView, kAdded };

  static const c10::IValue& added(const torch::jit::Stack& arguments, Added position) { return arguments[arguments.size() - kAdded + position]; }

  static bool is_of_region(DeviceType device, const torch::jit::Stack& arguments) {
    const Override* const override = region_of(device).override;
    return override != nullptr && override->recipe == added(arguments, kRecipe).toStringView() && added(arguments, kCache).toInt() == 0 &&
        added(arguments, kDtype).toScalarType() == at::autocast::get_autocast_dtype(device) && added(arguments, kView).toListRef().empty() &&
        caching_is_safe() && runs_in_function() == false;
  }

  Results compute(const c10::OperatorHandle& handle, DispatchKey key, torch::jit::Stack& arguments) const {
    const DeviceType device = c10::dispatchKeyToDeviceType(key);
    const ScalarType dtype = added(arguments, kDtype).toScalarType();
    const c10::DispatchKeySet keys = c10::getAutocastRelatedKeySetFromBackend(c10::toBackendComponent(key));
    arguments.resize(arguments.size() - kAdded);
    const c10::OperatorHandle op = find_op(op_);  // at each call: a library may define the op again
    TORCH_CHECK(op.schema().arguments().size() == arguments.size() && op.schema().returns().size() == handle.schema().returns().size(), op_,
                " was defined again with other arguments or results since this code was compiled: call torch.compiler.reset(), and compile it again");
    {
      const NoAutocast no_autocast(device, keys);
      const at::NoGradGuard no_history;
      if (Results results = call_recipe({op, number_, device, /*has_only_autograd=*/true, is_capturing_}, arguments); !results.empty()) {
        return results;
      }
    }
    const NoAutocast no_autocast(device, keys);  // also if Python has entered a region
    for (c10::IValue& argument : arguments) {
      if (argument.isTensor() && argument.toTensor().defined() && is_fast_or_float32(argument.toTensor().scalar_type())) {
        argument = argument.toTensor().to(dtype);
      }
    }
    op.callBoxed(arguments);
    return std::move(arguments);
  }

  Results in_python(const torch::jit::Stack& arguments) const {
    const Gil gil;
    const Object given = python_tuple(arguments, [&](const c10::IValue& argument) {
      const bool is_dtype = &argument == &added(arguments, kDtype);
      return is_dtype ? Object::borrow(python_dtype(argument.toScalarType())) : for_python(argument);
    });
    TORCH_CHECK_TYPE(given, op_, " has an argument of a type that no recipe takes");
    return results_of(Object::steal(PyObject_CallObject(compute_, given.get())).get());
  }

  const c10::OperatorName op_;
  const int64_t number_;
  PyObject* const compute_;
  const IsCapturing is_capturing_;  // always true, so that no action uses a cached cast here
};

// register_recipe_op(name, op, number, compute): until the process ends; does nothing for a name that it knows
PyObject* register_recipe_op(PyObject*, PyObject* arguments) {
  const char *name, *op;
  long long number;
  PyObject* compute;
  parse(arguments, "ssLO", &name, &op, &number, &compute);
  static auto* const registrations = new std::unordered_map<std::string, c10::RegistrationHandleRAII>();
  if (registrations->count(name) != 0) {
    return Py_NewRef(Py_None);
  }
  auto kernel = std::make_unique<RecipeOp>(operator_name_of(op), number, compute);
  const NoWarnings no_warnings;  // it takes the place of the operator in Python
  registrations->emplace(name, c10::Dispatcher::singleton().registerImpl(
      operator_name_of(name), DispatchKey::CompositeExplicitAutograd, c10::KernelFunction::makeFromBoxedFunctor(std::move(kernel)),
      std::nullopt, nullptr, "polycast"));
  return Py_NewRef(Py_None);
}

}  // namespace
