// Ops that a region's recipe computes: the way from a kernel to engine/low_bit.py, and what that keeps of weights.
//
// Owns nothing. Locks: none; the GIL is taken to call Python, which may run anything, and end the region.

#pragma once

#include <ATen/ATen.h>
#include <torch/csrc/autograd/python_variable.h>
#include <torch/csrc/utils/pybind.h>

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
py::object for_python(const c10::IValue& value) {
  if (value.isTensor()) {
    return py::reinterpret_steal<py::object>(THPVariable_Wrap(value.toTensor()));
  }
  if (value.isNone()) {
    return py::none();
  }
  if (value.isBool()) {
    return py::bool_(value.toBool());
  }
  if (value.isInt()) {
    return py::int_(value.toInt());
  }
  if (value.isDouble()) {
    return py::float_(value.toDouble());
  }
  if (value.isString()) {
    return py::str(value.toStringRef());
  }
  if (value.isIntList()) {
    py::list items;
    for (const int64_t item : value.toIntVector()) {
      items.append(item);
    }
    return items;
  }
  return py::object();
}

// Have an op computed by the recipe of this thread's region; an undefined tensor where it is to run in the fast dtype.
C10_NOINLINE Tensor low_bit(int64_t op, DeviceType device, c10::ArrayRef<c10::IValue> arguments) {
  const py::gil_scoped_acquire gil;
  py::tuple given(arguments.size() + 2);
  given[0] = py::int_(op);
  given[1] = py::str(c10::DeviceTypeName(device, /*lower_case=*/true));
  for (size_t i = 0; i < arguments.size(); ++i) {
    py::object argument = for_python(arguments[i]);
    if (!argument) {
      return Tensor();
    }
    given[i + 2] = std::move(argument);
  }
  const auto result = py::reinterpret_steal<py::object>(PyObject_CallObject(perform_low_bit, given.ptr()));
  if (!result) {
    throw py::error_already_set();
  }
  return result.is_none() ? Tensor() : result.cast<Tensor>();
}

// Whether the arguments of an op are such as kernels for low bit take.
template <class Signature>
constexpr bool is_for_low_bit = false;

template <class... Args>
constexpr bool is_for_low_bit<Tensor(const Tensor&, const Tensor&, Args...)> =
    (std::is_constructible_v<c10::IValue, const std::decay_t<Args>&> && ...);

// Return what a weight is packed into, kept in a store or made; see StateMachine in engine/state.py.
py::object packing_of(const std::shared_ptr<Store>& store, const Tensor& weight, int kind, const py::object& prepare) {
  enum : long { kWatched, kNoWeight, kNothingKept };  // by number, for Python
  if (!caching_is_safe()) {
    return py::int_(static_cast<long>(kWatched));
  }
  if (!is_weight(weight, /*to_pack=*/true) || is_rewritten(weight)) {
    return py::int_(static_cast<long>(kNoWeight));
  }
  if (!at::autocast::is_autocast_cache_enabled()) {
    return py::int_(static_cast<long>(kNothingKept));
  }
  std::optional<std::vector<Tensor>> packed;
  {
    const py::gil_scoped_release no_gil;
    packed = store->find_packing(weight, kind);
  }
  if (packed) {
    if (packed->empty()) {
      return py::none();
    }
    py::tuple parts(packed->size());
    for (size_t i = 0; i < packed->size(); ++i) {
      parts[i] = py::reinterpret_steal<py::object>(THPVariable_Wrap((*packed)[i]));
    }
    return parts;
  }
  const uint64_t writes = Writes::log().count();
  Content content(weight);
  py::object made = prepare(weight);
  auto parts = made.is_none() ? std::vector<Tensor>() : made.cast<std::vector<Tensor>>();
  {
    const py::gil_scoped_release no_gil;
    store->keep_packing(weight, kind, std::move(content), std::move(parts), writes);
  }
  return made;
}

}  // namespace
