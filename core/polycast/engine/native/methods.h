// The methods of the class of regions, in C.
//
// Python runs signal handlers between the instructions of a function in Python. An exception that one raises, such as a timeout,
// could then come after a region was entered and before the block begins. In these methods none runs, except in Python that they
// call.

#pragma once

#include <structmember.h>

#include "construction.h"
#include "extension.h"
#include "regions.h"

extern "C" PyObject* PyVectorcall_Call(PyObject* callable, PyObject* arguments, PyObject* named);

namespace {

// Set by region_methods().
PyObject* ready = nullptr;  // see engine/state.py
PyObject* ready_with_cache = nullptr;
PyObject* complete_entry = nullptr;
PyObject* complete_exit = nullptr;

// Return Settings.ready_key.
Object ready_key(PyObject* settings) {
  static PyObject* const key_name = PyUnicode_InternFromString("ready_key");
  TORCH_CHECK(PyTuple_Check(settings) && PyTuple_Size(settings) == kSettings,
              "the region's attribute _settings was replaced: a subclass of autocast needs another name for its own");
  PyObject* const device_type = PyTuple_GetItem(settings, Setting::kDeviceType);
  PyObject* const override = PyTuple_GetItem(settings, Setting::kOverride);
  if (override != Py_None) {
    return Object::steal(PyObject_GetAttr(override, key_name));
  }
  if (PyTuple_GetItem(settings, Setting::kCache) == Py_None) {
    return Object::borrow(device_type);
  }
  PyObject* const key = PyDict_GetItem(ready_with_cache, device_type);
  return Object::borrow(key == nullptr ? Py_None : key);
}

// __enter__(self)
PyObject* enter_block(PyObject* self, PyObject*) {
  static PyObject* const settings_name = PyUnicode_InternFromString("_settings");
  const Object settings = Object::steal(PyObject_GetAttr(self, settings_name));
  const Object key = ready_key(settings.get());
  PyObject* const in_function_mode = enter_region(self, settings.get()) ? Py_True : Py_False;
  const int is_ready = PySet_Contains(ready, key.get());
  if (in_function_mode == Py_True || is_ready != 1) {
    PyObject* const completed =
        is_ready < 0 ? nullptr : PyObject_CallFunctionObjArgs(complete_entry, self, in_function_mode, nullptr);
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
  const std::optional<bool> in_function_mode = leave_region(self);
  if (in_function_mode != false) {
    Object::steal(PyObject_CallFunctionObjArgs(complete_exit, self, in_function_mode ? Py_True : Py_None, nullptr));
  }
  return Py_NewRef(Py_None);
}

// A descriptor of `__init__`: the method in C for instances, and the one in Python for the class, which knows its signature.
//
// Python calls it with the instance as the first argument, without making a bound method. The limited API of 3.10 names neither the flags
// nor the functions for that, which every Python that it serves has.
struct InitDescriptor {
  using Call = PyObject* (*)(PyObject*, PyObject* const*, size_t, PyObject*);
  static constexpr unsigned long kHasVectorcall = 1UL << 11, kIsMethod = 1UL << 17;
  static constexpr size_t kOffsetBit = ~(~size_t{0} >> 1);

  PyObject_HEAD
  PyMethodDef* method;
  Call vectorcall;

  static PyObject* get(PyObject* self, PyObject* instance, PyObject*) {
    return instance == nullptr || instance == Py_None ? Py_NewRef(init_in_python)
                                                      : PyCFunction_NewEx(reinterpret_cast<InitDescriptor*>(self)->method, instance, nullptr);
  }

  static PyObject* call(PyObject*, PyObject* const* arguments, size_t count_and_bit, PyObject* names) {
    const auto count = static_cast<Py_ssize_t>(count_and_bit & ~kOffsetBit);
    return count == 0 ? PyObject_CallNoArgs(init_in_python)  // raises
                      : raising_fast<&init_region, PyObject*>(arguments[0], arguments + 1, count - 1, names);
  }

  static PyObject* make(PyMethodDef* method) {
    static PyMemberDef members[] = {
        {"__vectorcalloffset__", T_PYSSIZET, offsetof(InitDescriptor, vectorcall), READONLY, nullptr}, {nullptr, 0, 0, 0, nullptr}};
    static PyType_Slot slots[] = {
        {Py_tp_descr_get, reinterpret_cast<void*>(&get)},
        {Py_tp_call, reinterpret_cast<void*>(&PyVectorcall_Call)},
        {Py_tp_members, members},
        {0, nullptr}};
    static PyType_Spec spec{
        "polycast.InitDescriptor", sizeof(InitDescriptor), 0,
        Py_TPFLAGS_DEFAULT | kHasVectorcall | kIsMethod | kOnlyMadeHere, slots};
    static PyObject* const type = PyType_FromSpec(&spec);
    const Object made = Object::steal(type == nullptr ? nullptr : PyType_GenericAlloc(reinterpret_cast<PyTypeObject*>(type), 0));
    reinterpret_cast<InitDescriptor*>(made.get())->method = method;
    reinterpret_cast<InitDescriptor*>(made.get())->vectorcall = &call;
    return Py_NewRef(made.get());
  }
};

// region_methods(cls, ready, ready_with_cache, init, resolve, generation, complete_entry, complete_exit) -> (__init__, __enter__, __exit__)
PyObject* region_methods(PyObject*, PyObject* arguments) {
  static PyMethodDef init_method{
      "__init__", fast(raising_fast<&init_region, PyObject*>), METH_FASTCALL | METH_KEYWORDS, "Construct a region."};
  static PyMethodDef enter_method{
      "__enter__", raising<&enter_block>, METH_NOARGS, "__enter__($self)\n--\n\nEnter the region on this thread; return it."};
  static PyMethodDef exit_method{
      "__exit__", fast(raising_fast<&exit_block>), METH_FASTCALL,
      "__exit__($self, *exc_info)\n--\n\nLeave the region on this thread."};
  PyObject *cls, *ready_set, *with_cache, *init, *resolve, *generation, *entry, *exit;
  parse(arguments, "OOO!OOO!OO", &cls, &ready_set, &PyDict_Type, &with_cache, &init, &resolve, &PyDict_Type, &generation, &entry, &exit);
  set_reference(ready, ready_set);
  set_reference(ready_with_cache, with_cache);
  set_reference(init_in_python, init);
  set_reference(resolve_in_python, resolve);
  set_reference(generation_names, generation);
  set_reference(complete_entry, entry);
  set_reference(complete_exit, exit);
  auto* const type = reinterpret_cast<PyTypeObject*>(cls);
  return Py_BuildValue(
      "(NNN)", InitDescriptor::make(&init_method), PyDescr_NewMethod(type, &enter_method),
      PyDescr_NewMethod(type, &exit_method));
}

}  // namespace
