// __enter__ and __exit__ of the class of regions: what its methods in Python do, which are there for any engine.
//
// Python looks for signals between the steps of a function in Python: what a handler raises there, a timeout say, would come after
// a region was entered and before the block begins, or after the block and before it is left. Inside these methods it does
// not look, save where they call Python.
//
// Owns references to what they call, for as long as the process lives. Locks: none; called with the GIL held.

#pragma once

#include <torch/csrc/Exceptions.h>
#include <torch/csrc/utils/pybind.h>

#include <optional>

#include "regions.h"

namespace {  // all is one unit, binding.cpp

// Set by region_methods().
PyObject* fully_installed = nullptr;  // see engine/installation.py
PyObject* complete_entry = nullptr;
PyObject* complete_exit = nullptr;

// __enter__(self)
PyObject* enter_block(PyObject* self, PyObject*) {
  HANDLE_TH_ERRORS
  static PyObject* const settings_name = PyUnicode_InternFromString("_settings");
  static PyObject* const fast_path_name = PyUnicode_InternFromString("_fast_path");
  const auto settings = py::reinterpret_steal<py::object>(PyObject_GetAttr(self, settings_name));
  const auto fast_path = py::reinterpret_steal<py::object>(PyObject_GetAttr(self, fast_path_name));
  if (!settings || !fast_path) {
    return nullptr;
  }
  PyObject* const recorded = enter_region(self, settings.ptr()) ? Py_True : Py_False;
  const int installed = PySet_Contains(fully_installed, fast_path.ptr());
  if (recorded == Py_True || installed != 1) {
    PyObject* const arguments[] = {self, recorded};
    const auto completed = py::reinterpret_steal<py::object>(
        installed < 0 ? nullptr : PyObject_Vectorcall(complete_entry, arguments, 2, nullptr));
    if (!completed) {
      const py::error_scope raised;
      leave_region(self);
      return nullptr;
    }
  }
  return Py_NewRef(self);
  END_HANDLE_TH_ERRORS
}

// __exit__(self, *exc_info)
PyObject* exit_block(PyObject* self, PyObject* const*, Py_ssize_t) {
  HANDLE_TH_ERRORS
  const std::optional<bool> recorded = leave_region(self);
  if (recorded != false) {
    PyObject* const arguments[] = {self, recorded ? Py_True : Py_None};
    const auto completed = py::reinterpret_steal<py::object>(PyObject_Vectorcall(complete_exit, arguments, 2, nullptr));
    if (!completed) {
      return nullptr;
    }
  }
  Py_RETURN_NONE;
  END_HANDLE_TH_ERRORS
}

// region_methods(cls, fully_installed, complete_entry, complete_exit) -> (__enter__, __exit__) for a class of regions
py::tuple region_methods(const py::object& cls, py::object installed, py::object entry, py::object exit) {
  static PyMethodDef enter_method{
      "__enter__", &enter_block, METH_NOARGS, "Enter the region on this thread, and return it."};
  static PyMethodDef exit_method{
      "__exit__",
      reinterpret_cast<PyCFunction>(reinterpret_cast<void (*)()>(&exit_block)),
      METH_FASTCALL,
      "Leave the region, which this thread has entered."};
  Py_XSETREF(fully_installed, installed.release().ptr());
  Py_XSETREF(complete_entry, entry.release().ptr());
  Py_XSETREF(complete_exit, exit.release().ptr());
  auto* const type = reinterpret_cast<PyTypeObject*>(cls.ptr());
  return py::make_tuple(
      py::reinterpret_steal<py::object>(PyDescr_NewMethod(type, &enter_method)),
      py::reinterpret_steal<py::object>(PyDescr_NewMethod(type, &exit_method)));
}

}  // namespace
