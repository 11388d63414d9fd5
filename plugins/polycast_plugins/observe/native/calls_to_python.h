// Calls Python from torch's callbacks, which must not raise, and runs torch's ops there, whose kernels may be in Python.
//
// Locks: none.

#pragma once

#include <exception>

#include "python.h"

namespace {

// Raise the pending Python error when torch has returned.
void raise_later() {
  const auto raise_it = [](void* value) {
    PyErr_SetObject(reinterpret_cast<PyObject*>(Py_TYPE(static_cast<PyObject*>(value))), static_cast<PyObject*>(value));
    Py_DECREF(static_cast<PyObject*>(value));
    return -1;
  };
  PyObject *type, *raised, *traceback;
  PyErr_Fetch(&type, &raised, &traceback);
  PyErr_NormalizeException(&type, &raised, &traceback);
  if (traceback != nullptr) {
    PyException_SetTraceback(raised, traceback);
  }
  Py_XDECREF(type);
  Py_XDECREF(traceback);
  if (Py_AddPendingCall(raise_it, raised) != 0) {
    Py_DECREF(raised);
  }
}

// Call a function with the GIL held. What it raises, or a signal handler in the meantime, is raised when torch has returned; the
// result is empty then.
Object call_from_callback(PyObject* function, PyObject* arguments) {
  const ErrorScope of_the_op;  // which may have raised
  if (PyObject* const result = PyObject_CallObject(function, arguments)) {
    return Object::steal(result);
  }
  raise_later();
  return Object();
}

// Run torch's ops; return false if they were not run to their end. What a kernel in Python raises is dropped if it is an Exception;
// anything else, such as an interrupt, is raised when torch has returned. Not after the observed op has raised, since its Python error
// may be pending.
template <class Ops>
bool run_ops(const Ops& ops) {
  if (std::uncaught_exceptions() != 0) {
    return false;
  }
  try {
    ops();
    return true;
  } catch (...) {
    const Gil gil;
    torch::translate_exception_to_python(std::current_exception());
    if (PyErr_ExceptionMatches(PyExc_Exception) != 0) {
      PyErr_Clear();
    } else if (PyErr_Occurred() != nullptr) {
      raise_later();
    }
    return false;
  }
}

}  // namespace
