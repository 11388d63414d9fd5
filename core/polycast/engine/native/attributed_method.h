// A method descriptor that has attributes, such as annotations, which those of Python in C have not.
//
// It is called as fast: by the vectorcall convention, which all supported Pythons have and the limited API names from 3.12 on.

#pragma once

#include <structmember.h>

#include "extension.h"

namespace {

using Vectorcall = PyObject* (*)(PyObject* callable, PyObject* const* values, size_t flags_and_count, PyObject* names);

// Wraps a descriptor of Python, which binds the method and raises for other instances. `function` has the METH_FASTCALL | METH_KEYWORDS
// convention.
template <auto function>
struct AttributedMethod {
  PyObject_HEAD
  Vectorcall vectorcall;
  PyObject* attributes;
  PyObject* descriptor;
  PyTypeObject* owner;

  static PyObject* make(PyTypeObject* owner, PyMethodDef* definition) {
    static PyTypeObject* const type = make_type();
    const Object descriptor = Object::steal(PyDescr_NewMethod(owner, definition));
    PyObject* const object = type == nullptr ? nullptr : PyType_GenericAlloc(type, 0);
    if (object == nullptr) {
      throw_python_error();
    }
    auto& method = *reinterpret_cast<AttributedMethod*>(object);
    method.vectorcall = &call_fast;
    method.descriptor = Py_NewRef(descriptor.get());
    method.owner = owner;  // borrowed: the class holds the method
    return object;
  }

 private:
  static AttributedMethod& of(PyObject* self) { return *reinterpret_cast<AttributedMethod*>(self); }

  static PyObject* call(PyObject* self, PyObject* arguments, PyObject* named) {
    return PyObject_Call(of(self).descriptor, arguments, named);
  }

  static PyObject* call_fast(PyObject* self, PyObject* const* values, size_t flags_and_count, PyObject* names) {
    constexpr size_t kFlag = size_t{1} << (8 * sizeof(size_t) - 1);  // PY_VECTORCALL_ARGUMENTS_OFFSET
    const auto count = static_cast<Py_ssize_t>(flags_and_count & ~kFlag);
    if (C10_LIKELY(count > 0 && PyObject_TypeCheck(values[0], of(self).owner))) {
      return raising_fast<function, PyObject*>(values[0], values + 1, count - 1, names);
    }
    try {
      const Object positional = Object::steal(PyTuple_New(count)), named = Object::steal(PyDict_New());
      for (Py_ssize_t i = 0; i < count; ++i) {
        PyTuple_SetItem(positional.get(), i, Py_NewRef(values[i]));
      }
      for (Py_ssize_t i = 0; names != nullptr && i < PyTuple_Size(names); ++i) {
        PyDict_SetItem(named.get(), PyTuple_GetItem(names, i), values[count + i]);
      }
      return call(self, positional.get(), named.get());
    } catch (const std::exception&) {
      torch::translate_exception_to_python(std::current_exception());
      return nullptr;
    }
  }

  static PyObject* bind(PyObject* self, PyObject* instance, PyObject* type) {
    if (instance == nullptr) {
      return Py_NewRef(self);
    }
    PyObject* const descriptor = of(self).descriptor;
    static const auto get = reinterpret_cast<descrgetfunc>(PyType_GetSlot(Py_TYPE(descriptor), Py_tp_descr_get));
    return get(descriptor, instance, type);
  }

  static PyTypeObject* make_type() {
    static PyMemberDef members[] = {
        {const_cast<char*>("__vectorcalloffset__"), T_PYSSIZET, offsetof(AttributedMethod, vectorcall), READONLY, nullptr},
        {const_cast<char*>("__dictoffset__"), T_PYSSIZET, offsetof(AttributedMethod, attributes), READONLY, nullptr},
        {nullptr, 0, 0, 0, nullptr}};
    static PyGetSetDef properties[] = {
        {"__dict__", &PyObject_GenericGetDict, &PyObject_GenericSetDict, nullptr, nullptr},
        {nullptr, nullptr, nullptr, nullptr, nullptr}};
    PyType_Slot slots[] = {
        {Py_tp_call, reinterpret_cast<void*>(static_cast<ternaryfunc>(&call))},
        {Py_tp_descr_get, reinterpret_cast<void*>(static_cast<descrgetfunc>(&bind))},
        {Py_tp_members, members},
        {Py_tp_getset, properties},
        {0, nullptr}};
    constexpr unsigned long kHaveVectorcall = 1UL << 11, kMethodDescriptor = 1UL << 17;
    PyType_Spec spec{
        "polycast.method", sizeof(AttributedMethod), 0, Py_TPFLAGS_DEFAULT | kHaveVectorcall | kMethodDescriptor, slots};
    return reinterpret_cast<PyTypeObject*>(PyType_FromSpec(&spec));
  }
};

}  // namespace
