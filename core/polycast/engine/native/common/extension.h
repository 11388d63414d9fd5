// Building blocks of a Python module in C++: functions that translate exceptions, and classes that hold a C++ object.

#pragma once

#include "python.h"

namespace {

// Wrap a function so that its C++ exceptions become Python errors.
template <auto function, class... Args>
PyObject* translating(Args... arguments) {
  try {
    return function(arguments...);
  } catch (const std::exception&) {
    torch::translate_exception_to_python(std::current_exception());
    return nullptr;
  }
}

template <auto function>
constexpr PyCFunction raising = &translating<function, PyObject*, PyObject*>;

template <auto function, class... Names>
constexpr auto raising_fast = &translating<function, PyObject*, PyObject* const*, Py_ssize_t, Names...>;

// Cast a METH_FASTCALL function for a PyMethodDef; with METH_KEYWORDS, it gets the names of keyword arguments too.
template <class... Names>
PyCFunction fast(PyObject* (*function)(PyObject*, PyObject* const*, Py_ssize_t, Names...)) {
  return reinterpret_cast<PyCFunction>(reinterpret_cast<void (*)()>(function));
}

// PyArg_ParseTuple that throws.
template <class... Args>
void parse(PyObject* arguments, const char* format, Args... args) {
  if (!PyArg_ParseTuple(arguments, format, args...)) {
    throw_python_error();
  }
}

// Return an item of a dict.
PyObject* item_of(PyObject* dict, const char* name) {
  PyObject* const found = PyDict_GetItemString(dict, name);
  TORCH_CHECK(found != nullptr, "bind() lacks ", name);
  return found;
}

// Throw if Python's numbers of a kind are not `first` and those that follow.
template <size_t size>
void check_numbers(PyObject* numbers, const char* kind, const std::array<const char*, size>& names, long first = 0) {
  PyObject* const given = item_of(numbers, kind);
  bool are_same = PyDict_Size(given) == static_cast<Py_ssize_t>(size);
  for (size_t i = 0; are_same && i < size; ++i) {
    PyObject* const number = PyDict_GetItemString(given, names[i]);
    are_same = number != nullptr && PyLong_AsLong(number) == first + static_cast<long>(i);
  }
  TORCH_CHECK(are_same, "Python and C++ number the ", kind, " differently");
}

// A Python object that owns a share of a C++ object.
template <class Value>
struct Holder {
  PyObject_HEAD
  std::shared_ptr<Value> value;

  // Set once by add_class().
  static inline PyTypeObject* type = nullptr;

  static const std::shared_ptr<Value>& unwrap(PyObject* object) {
    TORCH_CHECK_TYPE(PyObject_TypeCheck(object, type), "got an object of another class");
    return reinterpret_cast<Holder*>(object)->value;
  }

  static PyObject* wrap(std::shared_ptr<Value> value) {
    PyObject* const object = PyType_GenericAlloc(type, 0);
    if (object != nullptr) {
      new (&reinterpret_cast<Holder*>(object)->value) std::shared_ptr<Value>(std::move(value));
    }
    return object;
  }

  static void free(PyObject* object) {
    std::destroy_at(&reinterpret_cast<Holder*>(object)->value);
    PyObject_Free(object);
    Py_DECREF(type);
  }
};

// Make a Python function of one without arguments and results, and a method of one of a C++ object that a Holder holds.
template <auto function>
PyObject* run(PyObject*, PyObject*) {
  function();
  return Py_NewRef(Py_None);
}

template <class Value>
Value class_of_method(void (Value::*)());

template <auto method>
PyObject* run_method(PyObject* self, PyObject*) {
  (*Holder<decltype(class_of_method(method))>::unwrap(self).*method)();
  return Py_NewRef(Py_None);
}

// Py_TPFLAGS_DISALLOW_INSTANTIATION, which the limited API does not name: only C++ makes instances, also not copies. Without it, Python
// would make them by object.__new__, with memory that no constructor has seen.
constexpr unsigned long kOnlyMadeHere = 1UL << 7;

// Add the class to a module; return whether that succeeded, with a Python error set if not. Without `make`, Python makes no instances.
template <class Value, auto make = nullptr>
bool add_class(PyObject* module, const char* name, PyMethodDef* methods) {
  if (Holder<Value>::type == nullptr) {
    std::vector<PyType_Slot> slots{
        {Py_tp_dealloc, reinterpret_cast<void*>(&Holder<Value>::free)}, {Py_tp_methods, methods}, {0, nullptr}};
    if constexpr (make != nullptr) {
      slots.insert(slots.begin(), {Py_tp_new, reinterpret_cast<void*>(&translating<make, PyTypeObject*, PyObject*, PyObject*>)});
    }
    PyType_Spec spec{
        name, sizeof(Holder<Value>), 0, static_cast<unsigned int>(Py_TPFLAGS_DEFAULT | (make == nullptr ? kOnlyMadeHere : 0)), slots.data()};
    Holder<Value>::type = reinterpret_cast<PyTypeObject*>(PyType_FromSpec(&spec));
    if (Holder<Value>::type == nullptr) {
      return false;
    }
  }
  const char* const own = std::strrchr(name, '.') + 1;
  return PyModule_AddObjectRef(module, own, reinterpret_cast<PyObject*>(Holder<Value>::type)) == 0;
}

}  // namespace
