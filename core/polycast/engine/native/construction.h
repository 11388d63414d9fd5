// __init__ of the class of regions, in C.
//
// Python resolves the arguments to the settings of the region, and says what they depend on. While that is unchanged, the same
// arguments get the same settings without Python, except for the backend, which is asked each time whether it still supports them.

#pragma once

#include <ATen/Parallel.h>

#include "extension.h"
#include "regions.h"

namespace {

// Set by region_methods().
PyObject* init_in_python = nullptr;  // raises for arguments that do not fit its signature
PyObject* resolve_in_python = nullptr;
PyObject* availability_class = nullptr;

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

// An item of a dict; empty if the dict does not have it.
struct DictItem {
  Object dict, key, value;

  bool is_unchanged() const { return PyDict_GetItem(dict.get(), key.get()) == value.get(); }
};

// Clear what a backend has raised; Python will ask it again, and say so. Throw an interrupt.
void clear_ordinary_error() {
  if (PyErr_ExceptionMatches(PyExc_Exception) == 0 && PyErr_ExceptionMatches(PyExc_SystemExit) == 0) {
    throw_python_error();
  }
  PyErr_Clear();
}

// A question to the backend that it answered with an Availability(True).
struct BackendQuestion {
  Object method, argument;  // None: it has no argument
  mutable Object affirmed;  // the last such answer: many backends return the same object again

  // Ask it again; any Python may run.
  bool is_affirmed_by(const Object& backend) const {
    static PyObject* const available = PyUnicode_InternFromString("available");
    static PyObject* const reason = PyUnicode_InternFromString("reason");
    PyObject* const given = PyObject_CallMethodObjArgs(
        backend.get(), method.get(), argument.is_none() ? nullptr : argument.get(), nullptr);
    if (given == nullptr) {
      clear_ordinary_error();
      return false;
    }
    Object answer = Object::steal(given);
    if (given == affirmed.get()) {
      return true;
    }
    const bool is_affirmed = Py_TYPE(given) == reinterpret_cast<PyTypeObject*>(availability_class) &&
        Object::steal(PyObject_GetAttr(given, available)).get() == Py_True &&
        !is_true(Object::steal(PyObject_GetAttr(given, reason)));  // which may be a warning
    if (is_affirmed) {
      affirmed = std::move(answer);
    }
    return is_affirmed;
  }
};

// The settings for some arguments.
class ResolvedArguments {
 public:
  // Take what Python has resolved. The result does not refer to the cache among the arguments, which it would keep alive.
  ResolvedArguments(const RegionArguments& arguments, int threads, PyObject* settings, PyObject* dependencies)
      : device_type_(Object::borrow(arguments.device_type)),
        dtype_(Object::borrow(arguments.dtype)),
        enabled_(Object::borrow(arguments.enabled)),
        cache_enabled_(Object::borrow(arguments.cache_enabled)),
        cache_class_(Object::borrow(class_of(arguments.cache))),
        recipe_(Object::borrow(arguments.recipe)),
        threads_(threads),
        settings_(with_cache(settings, Py_None)),
        device_(device_of(PyTuple_GetItem(settings, Setting::kDeviceType))),
        fast_dtype_(dtype_of(PyTuple_GetItem(settings, Setting::kDtype))) {
    PyObject *backend, *default_dtype, *questions, *items;
    int is_inherited;
    parse(dependencies, "OOpOO", &backend, &default_dtype, &is_inherited, &questions, &items);
    backend_ = Object::borrow(backend);
    default_dtype_ = Object::borrow(default_dtype);
    is_inherited_ = is_inherited != 0;
    questions_ = convert_items(questions, [](PyObject* question) {
      PyObject *method, *argument;
      parse(question, "OO", &method, &argument);
      return BackendQuestion{Object::borrow(method), Object::borrow(argument), Object()};
    });
    items_ = convert_items(items, [](PyObject* item) {
      PyObject *dict, *key, *value;
      parse(item, "O!OO", &PyDict_Type, &dict, &key, &value);
      return DictItem{Object::borrow(dict), Object::borrow(key), value == Py_None ? Object() : Object::borrow(value)};
    });
  }

  // Return whether these are the settings for some arguments, if the backend agrees.
  bool serves(const RegionArguments& given) const {
    return is_same(given.recipe, recipe_) && given.dtype == dtype_.get() && given.enabled == enabled_.get() &&
        given.cache_enabled == cache_enabled_.get() && class_of(given.cache) == cache_class_.get() &&
        is_same(given.device_type, device_type_) && (given.dtype != Py_None || is_dtype_of_thread()) &&
        (given.recipe == Py_None || at::get_num_threads() == threads_) &&
        std::all_of(items_.begin(), items_.end(), [](const DictItem& item) { return item.is_unchanged(); });
  }

  // Ask the backend; any Python may run.
  bool are_affirmed() const {
    static PyObject* const name = PyUnicode_InternFromString("default_dtype");
    PyObject* const given = PyObject_GetAttr(backend_.get(), name);
    if (given == nullptr) {
      clear_ordinary_error();
      return false;
    }
    return Object::steal(given).get() == default_dtype_.get() &&
        std::all_of(questions_.begin(), questions_.end(), [&](const auto& question) { return question.is_affirmed_by(backend_); });
  }

  Object settings(PyObject* cache) const { return cache == Py_None ? settings_ : with_cache(settings_.get(), cache); }

 private:
  static PyObject* class_of(PyObject* cache) { return reinterpret_cast<PyObject*>(Py_TYPE(cache)); }

  // Return whether two arguments are one object, or equal strings.
  static bool is_same(PyObject* given, const Object& known) {
    return given == known.get() ||
        (PyUnicode_CheckExact(given) && PyUnicode_CheckExact(known.get()) && PyUnicode_Compare(given, known.get()) == 0);
  }

  static Object with_cache(PyObject* settings, PyObject* cache) {
    const Py_ssize_t size = PyTuple_Size(settings);
    Object copy = Object::steal(PyType_GenericAlloc(Py_TYPE(settings), size));
    for (Py_ssize_t i = 0; i < size; ++i) {
      PyTuple_SetItem(copy.get(), i, Py_NewRef(i == Setting::kCache ? cache : PyTuple_GetItem(settings, i)));
    }
    return copy;
  }

  // Return whether regions without a dtype get this one on this thread; see current_dtype() in engine/state.py.
  bool is_dtype_of_thread() const {
    return at::autocast::get_autocast_dtype(device_) == fast_dtype_ &&
        (!is_inherited_ || region_of(device_).innermost != nullptr);
  }

  Object device_type_, dtype_, enabled_, cache_enabled_, cache_class_, recipe_;
  int threads_;
  Object settings_;
  DeviceType device_;
  ScalarType fast_dtype_;
  Object backend_, default_dtype_;
  bool is_inherited_;
  std::vector<BackendQuestion> questions_;
  std::vector<DictItem> items_;
};

// The settings of the last calls. With the GIL held.
class ResolvedCalls {
 public:
  static ResolvedCalls& instance() {
    static auto* const calls = new ResolvedCalls();
    return *calls;
  }

  // Return the settings for some arguments, or null. Python may run, and remove them here.
  std::shared_ptr<const ResolvedArguments> find(const RegionArguments& arguments) {
    if (arguments.policy != Py_None) {
      return nullptr;
    }
    for (const auto& each : calls_) {
      if (each != nullptr && each->serves(arguments)) {
        std::shared_ptr<const ResolvedArguments> found = each;
        if (found->are_affirmed()) {
          return found;
        }
        if (const auto again = std::find(calls_.begin(), calls_.end(), found); again != calls_.end()) {
          again->reset();
        }
        return nullptr;
      }
    }
    return nullptr;
  }

  void keep(std::shared_ptr<const ResolvedArguments> call) {
    const auto unused = std::find(calls_.begin(), calls_.end(), nullptr);
    if (unused != calls_.end()) {
      *unused = std::move(call);
      return;
    }
    std::swap(call, calls_[oldest_]);  // the former one dies on return, when Python may run
    oldest_ = (oldest_ + 1) % calls_.size();
  }

  void forget() { const auto forgotten = std::exchange(calls_, {}); }

 private:
  std::array<std::shared_ptr<const ResolvedArguments>, 16> calls_;
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
  if (const auto found = ResolvedCalls::instance().find(*given)) {
    set_settings(self, found->settings(given->cache).get());
    return Py_NewRef(Py_None);
  }
  const int threads = at::get_num_threads();
  const Object resolved = Object::steal(PyObject_CallFunctionObjArgs(
      resolve_in_python, given->device_type, given->dtype, given->enabled, given->cache_enabled, given->cache, given->policy,
      given->recipe, nullptr));
  PyObject *settings, *dependencies;
  parse(resolved.get(), "OO", &settings, &dependencies);
  set_settings(self, settings);
  if (dependencies != Py_None) {
    ResolvedCalls::instance().keep(std::make_shared<const ResolvedArguments>(*given, threads, settings, dependencies));
  }
  return Py_NewRef(Py_None);
}

}  // namespace
