// Ops that a region's recipe computes: the way from a kernel to engine/low_bit.py, and what that keeps of weights.
//
// Owns nothing. Locks: none; the GIL is taken to call Python, which may run anything, and end the region.

#pragma once

#include <ATen/core/Tensor.h>
#include <ATen/core/ivalue.h>

#include <optional>
#include <type_traits>
#include <utility>
#include <vector>

#include "casting.h"
#include "store.h"

namespace {  // all is one unit, binding.cpp

// Set by bind(); it lives as long as the process.
PyObject* perform_low_bit = nullptr;

// Return an argument for Python, or nothing where no kernel for low bit takes the like.
Object for_python(const c10::IValue& value) {
  if (value.isTensor()) {
    return python_tensor(value.toTensor());
  }
  if (value.isNone()) {
    return Object::of(Py_None);
  }
  if (value.isBool()) {
    return Object::of(value.toBool() ? Py_True : Py_False);
  }
  if (value.isInt()) {
    return Object::made(PyLong_FromLongLong(value.toInt()));
  }
  if (value.isDouble()) {
    return Object::made(PyFloat_FromDouble(value.toDouble()));
  }
  if (value.isString()) {
    return Object::made(PyUnicode_FromString(value.toStringRef().c_str()));
  }
  if (value.isIntList()) {
    const auto items = value.toIntVector();
    Object list = Object::made(PyList_New(static_cast<Py_ssize_t>(items.size())));
    for (size_t i = 0; i < items.size(); ++i) {
      PyList_SetItem(list.get(), static_cast<Py_ssize_t>(i), Object::made(PyLong_FromLongLong(items[i])).release());
    }
    return list;
  }
  return Object();
}

// Whether kernels for low bit may be given arguments without a look at each in Python: tensors of the device and nothing
// else, in dtypes that weights have too, of which autograd has nothing to record. See _Plan.declines in low_bit.py.
bool are_plain(c10::ArrayRef<c10::IValue> arguments, DeviceType device) {
  static constexpr c10::DispatchKeySet kSpecial{
      DispatchKey::Python, DispatchKey::FuncTorchGradWrapper, DispatchKey::FuncTorchBatched, DispatchKey::Functionalize};
  const Differentiation autograd;
  return caching_is_safe() && std::all_of(arguments.begin(), arguments.end(), [&](const c10::IValue& argument) {
    if (!argument.isTensor() || !argument.toTensor().defined()) {
      return true;
    }
    const Tensor& tensor = argument.toTensor();
    const ScalarType dtype = tensor.scalar_type();
    return tensor.device().type() == device && tensor.layout() == at::kStrided && !tensor.is_nested() &&
        (dtype == at::kFloat || dtype == at::kBFloat16 || dtype == at::kHalf) && !tensor.key_set().has_any(kSpecial) &&
        !autograd.has(tensor);
  });
}

// Have an op computed by the recipe of this thread's region; an undefined tensor where it is to run in the fast dtype.
C10_NOINLINE Tensor low_bit(int64_t op, DeviceType device, c10::ArrayRef<c10::IValue> arguments) {
  const Gil gil;
  constexpr size_t kBefore = 3;
  const Object given = Object::made(PyTuple_New(static_cast<Py_ssize_t>(arguments.size() + kBefore)));
  PyTuple_SetItem(given.get(), 0, Object::made(PyLong_FromLongLong(op)).release());
  const std::string name = c10::DeviceTypeName(device, /*lower_case=*/true);
  PyTuple_SetItem(given.get(), 1, Object::made(PyUnicode_FromString(name.c_str())).release());
  PyTuple_SetItem(given.get(), 2, Py_NewRef(are_plain(arguments, device) ? Py_True : Py_False));
  for (size_t i = 0; i < arguments.size(); ++i) {
    Object argument = for_python(arguments[i]);
    if (!argument) {
      return Tensor();
    }
    PyTuple_SetItem(given.get(), static_cast<Py_ssize_t>(i + kBefore), argument.release());
  }
  const Object result = Object::made(PyObject_CallObject(perform_low_bit, given.get()));
  return result.is_none() ? Tensor() : tensor_of(result.get());
}

// Whether the arguments of an op are such as kernels for low bit take.
template <class Signature>
constexpr bool is_for_low_bit = false;

template <class... Args>
constexpr bool is_for_low_bit<Tensor(const Tensor&, const Tensor&, Args...)> =
    (std::is_constructible_v<c10::IValue, const std::decay_t<Args>&> && ...);

// packing_of(store, weight, kind, prepare): what a weight or a view of one is packed into, kept in a store or made; see StateMachine in
// engine/state.py. A number, which is a place in NOT_PACKED there, where nothing can be kept: then nothing is made.
PyObject* packing_of(PyObject*, PyObject* given) {
  enum : long { kWatched, kNoWeight, kNothingKept, kWrittenUnseen, kNoRoom, kViewsAreFull };
  PyObject *of_store, *of_weight, *prepare;
  int kind;
  parse(given, "OOiO", &of_store, &of_weight, &kind, &prepare);
  const std::shared_ptr<Store> store = Holder<Store>::of(of_store);
  const Tensor packable = tensor_of(of_weight);
  if (!caching_is_safe()) {
    return PyLong_FromLong(kWatched);
  }
  const Tensor* const viewed = weight_of(packable, /*to_pack=*/true);
  if (viewed == nullptr) {
    return PyLong_FromLong(kNoWeight);
  }
  const Tensor weight = *viewed;
  const Source source = viewed == &packable ? Source(weight) : Source(packable, weight);
  if (!at::autocast::is_autocast_cache_enabled()) {
    return PyLong_FromLong(kNothingKept);
  }
  std::optional<std::vector<Tensor>> packed;
  {
    const WithoutGil others_may_run;
    packed = store->find_packing(source, kind);
  }
  if (packed) {
    if (packed->empty()) {
      return Py_NewRef(Py_None);
    }
    Object parts = Object::made(PyTuple_New(static_cast<Py_ssize_t>(packed->size())));
    for (size_t i = 0; i < packed->size(); ++i) {
      PyTuple_SetItem(parts.get(), static_cast<Py_ssize_t>(i), python_tensor((*packed)[i]).release());
    }
    return parts.release();
  }
  InFlight::storages().forget_ended();  // a collective that has ended holds the memory of its weights until then
  const uint64_t writes = Writes::log().count();
  Content content(packable);
  if (!may_be_stored(weight, content)) {
    return PyLong_FromLong(kWrittenUnseen);
  }
  bool views_fit, has_room;
  {
    const WithoutGil others_may_run;
    views_fit = store->views_fit_with_packing(source, kind);
    has_room = views_fit && store->has_room_for_packing(source, kind);
  }
  if (!has_room) {
    return PyLong_FromLong(views_fit ? kNoRoom : kViewsAreFull);
  }
  Object made;
  {
    const OnlyReads reading(weight);
    made = call(prepare, "(O)", of_weight);
  }
  std::vector<Tensor> parts;
  if (!made.is_none()) {
    parts = each_of(made.get(), &tensor_of);
  }
  {
    const WithoutGil others_may_run;
    store->keep_packing(source, kind, std::move(content), std::move(parts), writes);
  }
  return made.release();
}

}  // namespace
