// Ops that a region's recipe computes: the call from a kernel to low_bit/compute.py, and prepacked weights.
//
// Calling Python takes the GIL and may run anything, which may end the region.

#pragma once

#include <ATen/core/Tensor.h>
#include <ATen/core/ivalue.h>

#include <array>
#include <optional>
#include <type_traits>
#include <utility>
#include <vector>

#include "casting.h"
#include "user_store.h"

namespace {

// Set by bind().
PyObject* perform_low_bit = nullptr;

// Convert an argument to Python; return nothing for types that no low-bit kernel takes.
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

// Return whether the arguments need no check in Python: plain tensors of the device in floating-point dtypes of weights, which
// autograd does not record. See Plan.declines() in low_bit/plan.py.
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

// Compute an op by the recipe of this thread's region; return an undefined tensor if it falls back to the fast dtype.
C10_NOINLINE Tensor low_bit(int64_t op, DeviceType device, c10::ArrayRef<c10::IValue> arguments) {
  const Gil gil;
  constexpr size_t kBefore = 3;  // op, device, plain
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
  const Object performed = Object::made(PyObject_CallObject(perform_low_bit, given.get()));
  PyObject *result, *action;
  parse(performed.get(), "OO", &result, &action);
  return result == Py_None ? Tensor() : tensor_of(result);
}

// Whether low-bit kernels take the arguments of a signature.
template <class Signature>
constexpr bool is_for_low_bit = false;

template <class... Args>
constexpr bool is_for_low_bit<Tensor(const Tensor&, const Tensor&, Args...)> =
    (std::is_constructible_v<c10::IValue, const std::decay_t<Args>&> && ...);

// The reasons of engine/state.py's NOT_PREPACKED, in its order, which bind() checks.
enum class NotPrepacked : long { kIntercepted, kNoWeight, kNotCached, kWrittenUnseen, kNoRoom, kViewsAreFull };
constexpr std::array<const char*, 6> kNotPrepackedNames = {
    "INTERCEPTED", "NO_WEIGHT", "NOT_CACHED", "WRITTEN_UNSEEN", "NO_ROOM", "VIEWS_ARE_FULL"};

PyObject* python_reason(NotPrepacked reason) { return PyLong_FromLong(static_cast<long>(reason)); }

// prepacked(store, weight, kind, prepack) -> the prepacked weight, from a store or new; a NotPrepacked if it could not be cached,
// in which case it is not made. See StateMachine in engine/state.py.
PyObject* prepacked(PyObject*, PyObject* arguments) {
  PyObject *store_object, *weight_object, *prepack;
  int kind;
  parse(arguments, "OOiO", &store_object, &weight_object, &kind, &prepack);
  const std::shared_ptr<UserStore> store = Holder<UserStore>::of(store_object);
  const Tensor tensor = tensor_of(weight_object);
  if (!caching_is_safe()) {
    return python_reason(NotPrepacked::kIntercepted);
  }
  const Tensor* const found_weight = weight_of(tensor, /*to_prepack=*/true);
  if (found_weight == nullptr) {
    return python_reason(NotPrepacked::kNoWeight);
  }
  const Tensor weight = *found_weight;
  const Source source = found_weight == &tensor ? Source(weight) : Source(tensor, weight);
  if (!at::autocast::is_autocast_cache_enabled()) {
    return python_reason(NotPrepacked::kNotCached);
  }
  std::optional<Tensors> cached;
  {
    const WithoutGil others_may_run;
    cached = store->find_prepacked(source, kind);
  }
  if (cached) {
    if (cached->empty()) {
      return Py_NewRef(Py_None);
    }
    Object parts = Object::made(PyTuple_New(static_cast<Py_ssize_t>(cached->size())));
    for (size_t i = 0; i < cached->size(); ++i) {
      PyTuple_SetItem(parts.get(), static_cast<Py_ssize_t>(i), python_tensor((*cached)[i]).release());
    }
    return parts.release();
  }
  PendingCollectives::instance().drop_finished();  // a finished one holds the memory of its weights until then
  const uint64_t position = InvalidationLog::instance().length();
  VersionStamp stamp(tensor);
  if (!user_store_allows(weight, stamp)) {
    return python_reason(NotPrepacked::kWrittenUnseen);
  }
  bool views_fit, has_room;
  {
    const WithoutGil others_may_run;
    views_fit = store->views_fit_prepacked(source, kind);
    has_room = views_fit && store->has_room_for_prepacked(source, kind);
  }
  if (!has_room) {
    return python_reason(views_fit ? NotPrepacked::kNoRoom : NotPrepacked::kViewsAreFull);
  }
  Object made;
  {
    const PrepackGuard reading(weight);
    made = call(prepack, "(O)", weight_object);
  }
  Tensors parts;
  if (!made.is_none()) {
    for (const Tensor& part : each_of(made.get(), &tensor_of)) {
      parts.push_back(part);
    }
  }
  {
    const WithoutGil others_may_run;
    store->insert_prepacked(source, kind, std::move(stamp), std::move(parts), position);
  }
  return made.release();
}

}  // namespace
