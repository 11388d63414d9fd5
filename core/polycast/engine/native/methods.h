// __enter__ and __exit__ of the class of regions, in C.
//
// Python runs signal handlers between the instructions of a function in Python. An exception that one raises, such as a timeout,
// could then come after a region was entered and before the block begins. In these methods none runs, except in Python that they
// call.

#pragma once

#include "extension.h"
#include "regions.h"

namespace {

// Set by region_methods().
PyObject* ready = nullptr;  // see engine/state.py
PyObject* complete_entry = nullptr;
PyObject* complete_exit = nullptr;

// __enter__(self)
PyObject* enter_block(PyObject* self, PyObject*) {
  static PyObject* const settings_name = PyUnicode_InternFromString("_settings");
  static PyObject* const key_name = PyUnicode_InternFromString("_ready_key");
  const Object settings = Object::steal(PyObject_GetAttr(self, settings_name));
  const Object key = Object::steal(PyObject_GetAttr(self, key_name));
  PyObject* const recorded = enter_region(self, settings.get()) ? Py_True : Py_False;
  const int is_ready = PySet_Contains(ready, key.get());
  if (recorded == Py_True || is_ready != 1) {
    PyObject* const completed =
        is_ready < 0 ? nullptr : PyObject_CallFunctionObjArgs(complete_entry, self, recorded, nullptr);
    if (completed == nullptr) {
      const ErrorScope raised;
      leave_region(self);
      return nullptr;
    }
    Py_DECREF(completed);
  }
  return Py_NewRef(self);
}

// __exit__(self, *exc_info)
PyObject* exit_block(PyObject* self, PyObject* const*, Py_ssize_t) {
  const std::optional<bool> recorded = leave_region(self);
  if (recorded != false) {
    Object::steal(PyObject_CallFunctionObjArgs(complete_exit, self, recorded ? Py_True : Py_None, nullptr));
  }
  return Py_NewRef(Py_None);
}

// region_methods(cls, ready, complete_entry, complete_exit) -> (__enter__, __exit__)
PyObject* region_methods(PyObject*, PyObject* arguments) {
  static PyMethodDef enter_method{
      "__enter__", &raising<&enter_block>, METH_NOARGS, "Enter the region on this thread; return it."};
  static PyMethodDef exit_method{
      "__exit__", fast(&raising_fast<&exit_block>), METH_FASTCALL, "Leave the region on this thread."};
  PyObject *type, *ready_set, *entry, *exit;
  parse(arguments, "OOOO", &type, &ready_set, &entry, &exit);
  set_reference(ready, ready_set);
  set_reference(complete_entry, entry);
  set_reference(complete_exit, exit);
  return Py_BuildValue(
      "(NN)", PyDescr_NewMethod(reinterpret_cast<PyTypeObject*>(type), &enter_method),
      PyDescr_NewMethod(reinterpret_cast<PyTypeObject*>(type), &exit_method));
}

}  // namespace
