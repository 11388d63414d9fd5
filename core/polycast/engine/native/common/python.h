// Python objects through the limited API, so that one build serves every Python from 3.10 on.
//
// torch's own headers for this include pybind11, which is tied to one Python version and slow to parse. So torch's functions
// are declared here, and its structs come from excerpts of the installed headers (see toolchain/compiler.py).

#pragma once

#include <Python.h>
#include <torch/csrc/Dtype.h>
#include <torch/csrc/DynamicTypes.h>

#include <exception>

#include "tensors.h"

namespace {

// Holds the GIL.
class Gil {
 public:
  Gil() : state_(PyGILState_Ensure()) {}
  Gil(const Gil&) = delete;
  ~Gil() { PyGILState_Release(state_); }

 private:
  const PyGILState_STATE state_;
};

// Releases the GIL, which the calling thread must hold.
class WithoutGil {
 public:
  WithoutGil() : state_(PyEval_SaveThread()) {}
  WithoutGil(const WithoutGil&) = delete;
  ~WithoutGil() { PyEval_RestoreThread(state_); }

 private:
  PyThreadState* const state_;
};

// Saves the pending Python error, and restores it on destruction. The GIL must be held.
class ErrorScope {
 public:
  ErrorScope() { PyErr_Fetch(&type_, &value_, &traceback_); }
  ErrorScope(const ErrorScope&) = delete;
  ~ErrorScope() { PyErr_Restore(type_, value_, traceback_); }

 private:
  PyObject *type_, *value_, *traceback_;
};

}  // namespace

// torch's C++ exception for a Python error, and the names that its excerpt uses.
#define PyBytes_AS_STRING PyBytes_AsString
namespace pybind11 {
using gil_scoped_acquire = Gil;
}
#include "excerpt_python_error.h"
#include "excerpt_THPVariable.h"
#undef PyBytes_AS_STRING

extern PyObject* THPVariableClass;
extern PyObject* ParameterClass;
PyObject* THPVariable_Wrap(const at::TensorBase& tensor);

namespace torch {
void translate_exception_to_python(const std::exception_ptr& exception);
}

namespace {

// Throw the pending Python error as a C++ exception.
[[noreturn]] C10_NOINLINE void throw_python_error() {
  python_error error;
  error.persist();
  throw error;
}

// A strong reference. All but empty ones need the GIL.
class Object {
 public:
  Object() = default;
  Object(const Object& other) : object_(other.object_) { Py_XINCREF(object_); }
  Object(Object&& other) noexcept : object_(std::exchange(other.object_, nullptr)) {}
  Object& operator=(Object other) noexcept {
    std::swap(object_, other.object_);
    return *this;
  }
  ~Object() { Py_XDECREF(object_); }

  // Take over a new reference that Python has returned; throw if it is null.
  static Object steal(PyObject* object) {
    if (object == nullptr) {
      throw_python_error();
    }
    return Object(object);
  }

  static Object borrow(PyObject* object) { return Object(Py_XNewRef(object)); }

  PyObject* get() const { return object_; }
  PyObject* release() { return std::exchange(object_, nullptr); }
  explicit operator bool() const { return object_ != nullptr; }
  bool is_none() const { return object_ == Py_None; }

 private:
  explicit Object(PyObject* object) : object_(object) {}

  PyObject* object_ = nullptr;
};

// Call a function with the arguments that Py_BuildValue makes of a parenthesized format.
template <class... Args>
Object call(PyObject* function, const char* format, Args... args) {
  const Object arguments = Object::steal(Py_BuildValue(format, args...));
  return Object::steal(PyObject_CallObject(function, arguments.get()));
}

Object call(PyObject* function) { return Object::steal(PyObject_CallNoArgs(function)); }

bool is_true(const Object& object) {
  const int result = PyObject_IsTrue(object.get());
  if (result < 0) {
    throw_python_error();
  }
  return result != 0;
}

std::string string_of(PyObject* object) {
  Py_ssize_t size;
  const char* const text = PyUnicode_AsUTF8AndSize(object, &size);
  if (text == nullptr) {
    throw_python_error();
  }
  return {text, static_cast<size_t>(size)};
}

// Convert each item of an iterable.
template <class Convert>
auto convert_items(PyObject* iterable, Convert convert) {
  std::vector<std::decay_t<decltype(convert(iterable))>> found;
  const Object iterator = Object::steal(PyObject_GetIter(iterable));
  while (PyObject* const next = PyIter_Next(iterator.get())) {
    found.push_back(convert(Object::steal(next).get()));
  }
  if (PyErr_Occurred() != nullptr) {
    throw_python_error();
  }
  return found;
}

const Tensor& tensor_of(PyObject* object) {
  const int is_tensor = PyObject_IsInstance(object, THPVariableClass);
  if (is_tensor < 0) {
    throw_python_error();
  }
  TORCH_CHECK_TYPE(is_tensor, "expected a tensor");
  return reinterpret_cast<const THPVariable*>(object)->cdata;
}

Object python_tensor(const Tensor& tensor) { return Object::steal(THPVariable_Wrap(tensor)); }

// Return a tuple of what the items are converted to; nothing if one is converted to nothing.
template <class Items, class Convert>
Object python_tuple(const Items& items, const Convert& convert) {
  Object tuple = Object::steal(PyTuple_New(static_cast<Py_ssize_t>(items.size())));
  for (size_t i = 0; i < items.size(); ++i) {
    Object item = convert(items[i]);
    if (!item) {
      return {};
    }
    PyTuple_SetItem(tuple.get(), static_cast<Py_ssize_t>(i), item.release());
  }
  return tuple;
}

Object python_tensors(at::ArrayRef<Tensor> tensors) { return python_tuple(tensors, &python_tensor); }

Object python_numbers(at::IntArrayRef numbers) {
  return python_tuple(numbers, [](int64_t number) { return Object::steal(PyLong_FromLongLong(number)); });
}

ScalarType dtype_of(PyObject* dtype) { return reinterpret_cast<const THPDtype*>(dtype)->scalar_type; }

// Return the torch.dtype, or None for Undefined. Borrowed.
PyObject* python_dtype(ScalarType dtype) {
  return dtype == ScalarType::Undefined ? Py_None : reinterpret_cast<PyObject*>(torch::getTHPDtype(dtype));
}

// Store a strong reference in a global, and drop the former one.
void set_reference(PyObject*& variable, PyObject* object) {
  PyObject* const former = std::exchange(variable, Py_NewRef(object));
  Py_XDECREF(former);
}

// Return the device type that a string names. The GIL must be held.
DeviceType device_of(PyObject* name) {
  static auto* const known = new std::unordered_map<std::string, DeviceType>();
  static PyObject* last = nullptr;  // most callers pass the same string object again
  static DeviceType type;
  if (name == last) {
    return type;
  }
  std::string text = string_of(name);
  auto found = known->find(text);
  if (found == known->end()) {
    const auto parsed = c10::Device(text).type();
    found = known->emplace(std::move(text), parsed).first;
  }
  type = found->second;
  set_reference(last, name);
  return type;
}

}  // namespace
