// __init__ of the class of regions, in C.
//
// Python resolves the arguments to the settings of the region, which equal arguments get without Python until the generation
// advances; see common/generation.py.

#pragma once

#include <ATen/Parallel.h>

#include "extension.h"
#include "regions.h"

namespace {

// Set by region_methods().
PyObject* init_in_python = nullptr;  // raises for arguments that do not fit its signature
PyObject* resolve_in_python = nullptr;
PyObject* generation_names = nullptr;

// The arguments, borrowed; those that are not given have their defaults.
struct RegionArguments {
  static constexpr size_t kPositional = 4, kCount = 7;

  PyObject* device_type = nullptr;
  PyObject* dtype = Py_None;
  PyObject* enabled = Py_True;
  PyObject* cache_enabled = Py_None;
  PyObject* cache = Py_None;
  PyObject* policy = Py_None;
  PyObject* recipe = Py_None;

  // Return the arguments of a call with the METH_FASTCALL | METH_KEYWORDS convention; nothing if they do not fit.
  static std::optional<RegionArguments> of(PyObject* const* values, Py_ssize_t count, PyObject* names) {
    using Slot = PyObject* RegionArguments::*;
    static constexpr std::array<Slot, kCount> kSlots = {
        &RegionArguments::device_type, &RegionArguments::dtype, &RegionArguments::enabled, &RegionArguments::cache_enabled,
        &RegionArguments::cache, &RegionArguments::policy, &RegionArguments::recipe};
    static const auto* const known = new std::array<PyObject*, kCount>{
        PyUnicode_InternFromString("device_type"), PyUnicode_InternFromString("dtype"), PyUnicode_InternFromString("enabled"),
        PyUnicode_InternFromString("cache_enabled"), PyUnicode_InternFromString("cache"), PyUnicode_InternFromString("policy"),
        PyUnicode_InternFromString("recipe")};
    const Py_ssize_t named = names == nullptr ? 0 : PyTuple_Size(names);
    if (count > static_cast<Py_ssize_t>(kPositional)) {
      return std::nullopt;
    }
    RegionArguments found;
    for (Py_ssize_t i = 0; i < count; ++i) {
      found.*kSlots[static_cast<size_t>(i)] = values[i];
    }
    for (Py_ssize_t i = 0; i < named; ++i) {
      PyObject* const name = PyTuple_GetItem(names, i);
      const auto place = std::find(known->begin(), known->end(), name);  // Python interns the names of keywords
      if (place == known->end() || place - known->begin() < count) {
        return std::nullopt;
      }
      found.*kSlots[static_cast<size_t>(place - known->begin())] = values[count + i];
    }
    return found.device_type == nullptr ? std::nullopt : std::optional(found);
  }
};

// The settings for some arguments.
class ResolvedArguments {
 public:
  // Take what Python has resolved. The result does not refer to the cache among the arguments, which it would keep alive.
  ResolvedArguments(const RegionArguments& arguments, int threads, PyObject* settings)
      : device_type_(Object::borrow(arguments.device_type)),
        dtype_(Object::borrow(arguments.dtype)),
        enabled_(Object::borrow(arguments.enabled)),
        cache_enabled_(Object::borrow(arguments.cache_enabled)),
        cache_class_(Object::borrow(class_of(arguments.cache))),
        recipe_(Object::borrow(arguments.recipe)),
        threads_(threads),
        settings_(with_cache(settings, Py_None)),
        device_(device_of(PyTuple_GetItem(settings, Setting::kDeviceType))),
        fast_dtype_(dtype_of(PyTuple_GetItem(settings, Setting::kDtype))),
        is_nested_(region_of(device_).innermost != nullptr) {}

  // Return whether these are the settings for some arguments. No Python runs.
  bool serves(const RegionArguments& given) const {
    return is_same(given.recipe, recipe_) && given.dtype == dtype_.get() && given.enabled == enabled_.get() &&
        given.cache_enabled == cache_enabled_.get() && class_of(given.cache) == cache_class_.get() &&
        is_same(given.device_type, device_type_) && (given.dtype != Py_None || is_dtype_of_thread()) &&
        (given.recipe == Py_None || at::get_num_threads() == threads_);
  }

  const Object& settings() const { return settings_; }

  // Return settings with a cache.
  static Object with_cache(PyObject* settings, PyObject* cache) {
    const Py_ssize_t size = PyTuple_Size(settings);
    Object copy = Object::steal(PyType_GenericAlloc(Py_TYPE(settings), size));
    for (Py_ssize_t i = 0; i < size; ++i) {
      PyTuple_SetItem(copy.get(), i, Py_NewRef(i == Setting::kCache ? cache : PyTuple_GetItem(settings, i)));
    }
    return copy;
  }

 private:
  static PyObject* class_of(PyObject* cache) { return reinterpret_cast<PyObject*>(Py_TYPE(cache)); }

  // Return whether two arguments are one object, or equal strings.
  static bool is_same(PyObject* given, const Object& known) {
    return given == known.get() ||
        (PyUnicode_CheckExact(given) && PyUnicode_CheckExact(known.get()) && PyUnicode_Compare(given, known.get()) == 0);
  }

  // Return whether regions without a dtype get this one on this thread; see current_dtype() in engine/state.py.
  bool is_dtype_of_thread() const {
    return at::autocast::get_autocast_dtype(device_) == fast_dtype_ && (!is_nested_ || region_of(device_).innermost != nullptr);
  }

  Object device_type_, dtype_, enabled_, cache_enabled_, cache_class_, recipe_;
  int threads_;
  Object settings_;
  DeviceType device_;
  ScalarType fast_dtype_;
  bool is_nested_;
};

// The settings of the last calls in this generation. With the GIL held.
class ResolvedCalls {
 public:
  // Return the number of the generation, which is borrowed.
  static PyObject* generation() {
    static PyObject* const name = PyUnicode_InternFromString("number");
    return PyDict_GetItem(generation_names, name);
  }

  // Return the settings for some arguments, apart from the cache; empty if they are not known.
  Object find(const RegionArguments& arguments) const {
    if (arguments.policy == Py_None && generation_.get() == generation()) {
      for (const ResolvedArguments& each : calls_) {
        if (each.serves(arguments)) {
          return each.settings();
        }
      }
    }
    return Object();
  }

  // Keep what was resolved since a generation was the current one.
  void keep(const Object& generation, ResolvedArguments call) {
    std::vector<ResolvedArguments> former;  // Python may run when they die, on return
    if (generation.get() != ResolvedCalls::generation()) {
      return;
    }
    if (generation_.get() != generation.get()) {
      generation_ = generation;
      calls_.swap(former);
    }
    if (calls_.size() < kMaxCalls) {
      calls_.push_back(std::move(call));
    } else {
      std::swap(call, calls_[oldest_]);
      oldest_ = (oldest_ + 1) % kMaxCalls;
    }
  }

 private:
  static constexpr size_t kMaxCalls = 16;

  Object generation_;
  std::vector<ResolvedArguments> calls_;
  size_t oldest_ = 0;
};

// Set the settings of a region.
void set_settings(PyObject* region, PyObject* settings) {
  static PyObject* const name = PyUnicode_InternFromString("_settings");
  if (PyObject_SetAttr(region, name, settings) != 0) {
    throw_python_error();
  }
}

// Call the __init__ in Python with the arguments of a call.
Object call_init_in_python(PyObject* self, PyObject* const* values, Py_ssize_t count, PyObject* names) {
  const Object positional = Object::steal(PyTuple_New(count + 1)), named = Object::steal(PyDict_New());
  PyTuple_SetItem(positional.get(), 0, Py_NewRef(self));
  for (Py_ssize_t i = 0; i < count; ++i) {
    PyTuple_SetItem(positional.get(), i + 1, Py_NewRef(values[i]));
  }
  for (Py_ssize_t i = 0; names != nullptr && i < PyTuple_Size(names); ++i) {
    PyDict_SetItem(named.get(), PyTuple_GetItem(names, i), values[count + i]);
  }
  return Object::steal(PyObject_Call(init_in_python, positional.get(), named.get()));
}

// __init__(self, device_type, dtype=None, enabled=True, cache_enabled=None, *, cache=None, policy=None, recipe=None)
PyObject* init_region(PyObject* self, PyObject* const* values, Py_ssize_t count, PyObject* names) {
  const auto given = RegionArguments::of(values, count, names);
  if (!given) {
    return call_init_in_python(self, values, count, names).release();
  }
  if (Object found = only<ResolvedCalls>().find(*given)) {
    if (given->cache != Py_None) {
      found = ResolvedArguments::with_cache(found.get(), given->cache);
    }
    set_settings(self, found.get());
    return Py_NewRef(Py_None);
  }
  const Object generation = Object::borrow(ResolvedCalls::generation());
  const int threads = at::get_num_threads();
  const Object resolved = Object::steal(PyObject_CallFunctionObjArgs(
      resolve_in_python, given->device_type, given->dtype, given->enabled, given->cache_enabled, given->cache, given->policy,
      given->recipe, nullptr));
  PyObject* settings;
  int is_lasting;
  parse(resolved.get(), "Op", &settings, &is_lasting);
  set_settings(self, settings);
  if (is_lasting != 0) {
    only<ResolvedCalls>().keep(generation, ResolvedArguments(*given, threads, settings));
  }
  return Py_NewRef(Py_None);
}

}  // namespace
