// Python by its limited API, so that one build serves every Python from 3.10 on; and what torch's headers say of Python's tensors.
//
// torch's own headers for this include pybind11, which is of one Python and takes long to parse. So functions of torch's are declared
// here, and structs are what excerpts.py has cut out of the headers that are compiled for.
//
// Owns nothing but what its objects refer to. Locks: the GIL, where a name says so.

#pragma once

#include <Python.h>
#include <torch/csrc/Dtype.h>
#include <torch/csrc/DynamicTypes.h>

#include <ATen/core/Tensor.h>

#include <cstring>
#include <exception>
#include <memory>
#include <string>
#include <unordered_map>
#include <utility>
#include <vector>

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

// Has let go of the GIL, which the thread holds before and after.
class WithoutGil {
 public:
  WithoutGil() : state_(PyEval_SaveThread()) {}
  WithoutGil(const WithoutGil&) = delete;
  ~WithoutGil() { PyEval_RestoreThread(state_); }

 private:
  PyThreadState* const state_;
};

// The error that Python has set is put aside until this is gone. Called with the GIL held.
class ErrorAside {
 public:
  ErrorAside() { PyErr_Fetch(&type_, &value_, &traceback_); }
  ErrorAside(const ErrorAside&) = delete;
  ~ErrorAside() { PyErr_Restore(type_, value_, traceback_); }

 private:
  PyObject *type_, *value_, *traceback_;
};

}  // namespace

// What torch throws where Python has raised, and what the excerpt of it names.
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

// Raise what Python has raised, from here on in C++.
[[noreturn]] C10_NOINLINE void raise() {
  python_error error;
  error.persist();
  throw error;
}

// A reference to an object. Called with the GIL held, save where it is empty.
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

  // What a function of Python's has returned: a new reference, or null where it has raised.
  static Object made(PyObject* object) {
    if (object == nullptr) {
      raise();
    }
    return Object(object);
  }

  static Object of(PyObject* object) { return Object(Py_XNewRef(object)); }

  PyObject* get() const { return object_; }
  PyObject* release() { return std::exchange(object_, nullptr); }
  explicit operator bool() const { return object_ != nullptr; }
  bool is_none() const { return object_ == Py_None; }

 private:
  explicit Object(PyObject* object) : object_(object) {}

  PyObject* object_ = nullptr;
};

// Call a function, with arguments as Py_BuildValue reads them, in brackets.
template <class... Args>
Object call(PyObject* function, const char* format, Args... args) {
  const Object arguments = Object::made(Py_BuildValue(format, args...));
  return Object::made(PyObject_CallObject(function, arguments.get()));
}

Object call(PyObject* function) { return Object::made(PyObject_CallNoArgs(function)); }

bool is_true(const Object& object) {
  const int result = PyObject_IsTrue(object.get());
  if (result < 0) {
    raise();
  }
  return result != 0;
}

std::string string_of(PyObject* object) {
  Py_ssize_t size;
  const char* const text = PyUnicode_AsUTF8AndSize(object, &size);
  if (text == nullptr) {
    raise();
  }
  return {text, static_cast<size_t>(size)};
}

// What each object of an iterable is.
template <class Convert>
auto each_of(PyObject* iterable, Convert convert) {
  std::vector<std::decay_t<decltype(convert(iterable))>> found;
  const Object iterator = Object::made(PyObject_GetIter(iterable));
  while (PyObject* const next = PyIter_Next(iterator.get())) {
    found.push_back(convert(Object::made(next).get()));
  }
  if (PyErr_Occurred() != nullptr) {
    raise();
  }
  return found;
}

const Tensor& tensor_of(PyObject* object) {
  const int is_tensor = PyObject_IsInstance(object, THPVariableClass);
  if (is_tensor < 0) {
    raise();
  }
  TORCH_CHECK_TYPE(is_tensor, "expected a tensor");
  return reinterpret_cast<const THPVariable*>(object)->cdata;
}

Object python_tensor(const Tensor& tensor) { return Object::made(THPVariable_Wrap(tensor)); }

ScalarType dtype_of(PyObject* dtype) { return reinterpret_cast<const THPDtype*>(dtype)->scalar_type; }

// A torch.dtype, or None.
PyObject* python_dtype(ScalarType dtype) {
  return dtype == ScalarType::Undefined ? Py_None : reinterpret_cast<PyObject*>(torch::getTHPDtype(dtype));
}

// A function of ours for Python: what it throws is raised there. It returns a new reference.
template <auto function>
PyObject* raising(PyObject* self, PyObject* argument) {
  try {
    return function(self, argument);
  } catch (const std::exception&) {
    torch::translate_exception_to_python(std::current_exception());
    return nullptr;
  }
}

template <auto function>
PyObject* raising_fast(PyObject* self, PyObject* const* arguments, Py_ssize_t count) {
  try {
    return function(self, arguments, count);
  } catch (const std::exception&) {
    torch::translate_exception_to_python(std::current_exception());
    return nullptr;
  }
}

// As a PyMethodDef holds it.
PyCFunction fast(PyObject* (*function)(PyObject*, PyObject* const*, Py_ssize_t)) {
  return reinterpret_cast<PyCFunction>(reinterpret_cast<void (*)()>(function));
}

// Have a variable refer to an object for as long as the process lives, or until it is given another.
void keep(PyObject*& variable, PyObject* object) {
  PyObject* const former = std::exchange(variable, Py_NewRef(object));
  Py_XDECREF(former);
}

// The device type that a string names. Called with the GIL held.
DeviceType device_of(PyObject* name) {
  static auto* const known = new std::unordered_map<std::string, DeviceType>();
  static PyObject* last = nullptr;  // the string asked for last, held; most ask for one and the same again
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
  keep(last, name);
  return type;
}

// Read the arguments of a call, as PyArg_ParseTuple does.
template <class... Args>
void parse(PyObject* arguments, const char* format, Args... args) {
  if (!PyArg_ParseTuple(arguments, format, args...)) {
    raise();
  }
}

// An object in Python that holds one in C++.
template <class Value>
struct Holder {
  PyObject_HEAD
  std::shared_ptr<Value> value;

  // The class; the same for as long as the process lives. Set by add_class().
  static inline PyTypeObject* type = nullptr;

  static const std::shared_ptr<Value>& of(PyObject* object) {
    TORCH_CHECK_TYPE(PyObject_TypeCheck(object, type), "an object of another class was given");
    return reinterpret_cast<Holder*>(object)->value;
  }

  static PyObject* make(std::shared_ptr<Value> value) {
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

// Add the class of such objects to a module; say whether that was done.
template <class Value, auto make>
bool add_class(PyObject* module, const char* name, PyMethodDef* methods) {
  if (Holder<Value>::type == nullptr) {
    static constexpr auto create = [](PyTypeObject* type, PyObject* arguments, PyObject* named) -> PyObject* {
      try {
        return make(type, arguments, named);
      } catch (const std::exception&) {
        torch::translate_exception_to_python(std::current_exception());
        return nullptr;
      }
    };
    PyType_Slot slots[] = {
        {Py_tp_new, reinterpret_cast<void*>(static_cast<newfunc>(create))},
        {Py_tp_dealloc, reinterpret_cast<void*>(&Holder<Value>::free)},
        {Py_tp_methods, methods},
        {0, nullptr}};
    PyType_Spec spec{name, sizeof(Holder<Value>), 0, Py_TPFLAGS_DEFAULT, slots};
    Holder<Value>::type = reinterpret_cast<PyTypeObject*>(PyType_FromSpec(&spec));
    if (Holder<Value>::type == nullptr) {
      return false;
    }
  }
  const char* const own = std::strrchr(name, '.') + 1;
  return PyModule_AddObjectRef(module, own, reinterpret_cast<PyObject*>(Holder<Value>::type)) == 0;
}

}  // namespace
