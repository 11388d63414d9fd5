// Hooks on what gives out the memory of a tensor to be written without a version: Tensor.data, numpy(), untyped_storage(),
// data_ptr() and set_(). What is kept of weights on that memory is dropped as it is given out; what is made of them while it is
// held is not kept, see Content.
//
// torch has these in a class that cannot be changed, torch._C.TensorBase. torch.Tensor, which inherits from it, is given
// descriptors of the same types, names and owner, which call torch's. In place of the function that Dynamo writes into graphs for
// Tensor.data there is another.
//
// Owns what it has put into torch. Locks: those of announce(), with the GIL held.

#pragma once

#include "python.h"

#include <array>
#include <cstddef>
#include <exception>
#include <string>
#include <utility>
#include <vector>

#include "writes.h"

namespace {  // all is one unit, binding.cpp

// Return the tensor of an object whose type a descriptor has checked.
const Tensor& tensor_in(PyObject* object) { return reinterpret_cast<const THPVariable*>(object)->cdata; }

// Drop what is kept of a tensor's memory, which was given out; return what torch has returned, or null where that has raised.
PyObject* announced(PyObject* self, PyObject* result) {
  if (result == nullptr) {
    return nullptr;
  }
  try {
    announce_alias(tensor_in(self));
    return result;
  } catch (const std::exception&) {
    Py_DECREF(result);
    torch::translate_exception_to_python(std::current_exception());
    return nullptr;
  }
}

// Tensor.data. What torch has by that name is in `descriptor`, as in other hooks.
struct DataHook {
  static inline PyObject* descriptor = nullptr;
  static inline descrgetfunc torchs_get = nullptr;
  static inline descrsetfunc torchs_set = nullptr;
  static inline PyGetSetDef definition{};

  static PyObject* get(PyObject* self, void*) {
    return announced(self, torchs_get(descriptor, self, reinterpret_cast<PyObject*>(Py_TYPE(self))));
  }

  // The tensors that share the counter are on the former memory.
  static int set(PyObject* self, PyObject* value, void*) {
    const int status = torchs_set(descriptor, self, value);
    if (const Tensor& tensor = tensor_in(self); status == 0 && counter_of(tensor).use_count() > 1) {
      PartialCounters::set().add(tensor);
    }
    return status;
  }

  static Object make(PyTypeObject* owner, const char* name, const char* doc) {
    torchs_get = reinterpret_cast<descrgetfunc>(PyType_GetSlot(Py_TYPE(descriptor), Py_tp_descr_get));
    torchs_set = reinterpret_cast<descrsetfunc>(PyType_GetSlot(Py_TYPE(descriptor), Py_tp_descr_set));
    if (torchs_get == nullptr || torchs_set == nullptr) {
      return Object();
    }
    definition = {name, &get, &set, doc, nullptr};
    return Object::made(PyDescr_NewGetSet(owner, &definition));
  }
};

// A method of tensors: the one of this number. After some the tensor's version counter does not tell all.
template <int number, bool makes_partial>
struct MethodHook {
  static inline PyObject* descriptor = nullptr;
  static inline PyCFunction torchs = nullptr;
  static inline PyMethodDef definition{};

  static PyObject* call(PyObject* self, PyObject* arguments) { return noted(self, torchs(self, arguments)); }

  static PyObject* call_with_keywords(PyObject* self, PyObject* arguments, PyObject* named) {
    const auto function = reinterpret_cast<PyCFunctionWithKeywords>(reinterpret_cast<void (*)()>(torchs));
    return noted(self, function(self, arguments, named));
  }

  static PyObject* noted(PyObject* self, PyObject* result) {
    if (makes_partial && result != nullptr) {
      PartialCounters::set().add(tensor_in(self));
    }
    return announced(self, result);
  }

  // The function of a method is read from one that is bound to a tensor, which need have no memory.
  static Object make(PyTypeObject* owner, const char* name, const char* doc) {
    const Tensor empty(c10::make_intrusive<TensorImpl>(
        c10::DispatchKeySet(DispatchKey::CPU), caffe2::TypeMeta::Make<float>(), c10::Device(DeviceType::CPU)));
    const Object object = python_tensor(empty);
    const Object bound = Object::made(PyObject_CallMethod(descriptor, "__get__", "O", object.get()));
    const int flags = PyCFunction_Check(bound.get()) ? PyCFunction_GetFlags(bound.get()) : -1;
    const auto with_keywords = reinterpret_cast<PyCFunction>(reinterpret_cast<void (*)()>(&call_with_keywords));
    if (flags != METH_NOARGS && flags != (METH_VARARGS | METH_KEYWORDS)) {
      return Object();
    }
    torchs = PyCFunction_GetFunction(bound.get());
    definition = {name, flags == METH_NOARGS ? &call : with_keywords, flags, doc};
    return Object::made(PyDescr_NewMethod(owner, &definition));
  }
};

// torch._C._autograd._get_data_attr. It is a function in C too, for only of these torch trusts that a graph with one may be saved.
struct GraphDataHook {
  static constexpr const char* name = "_get_data_attr";

  static PyObject* call(PyObject*, PyObject* tensor) { return PyObject_GetAttrString(tensor, "data"); }

  static Object make(PyObject* module) {
    static PyMethodDef definition{name, &call, METH_O, nullptr};
    const Object of_module = Object::made(PyObject_GetAttrString(module, "__name__"));
    return Object::made(PyCFunction_NewEx(&definition, nullptr, of_module.get()));
  }
};

// The hooks, in torch until this is gone.
class AliasHooks {
 public:
  AliasHooks() {
    try {
      add<DataHook>("data");
      add<MethodHook<0, true>>("numpy");
      add<MethodHook<1, false>>("untyped_storage");
      add<MethodHook<2, false>>("data_ptr");
      add<MethodHook<3, true>>("set_");
      const Object module = Object::made(PyImport_ImportModule("torch._C._autograd"));
      if (Object torchs = find(module.get(), GraphDataHook::name)) {
        put(module, GraphDataHook::name, GraphDataHook::make(module.get()), std::move(torchs));
      }
    } catch (...) {
      remove();
      throw;
    }
  }
  AliasHooks(const AliasHooks&) = delete;

  ~AliasHooks() { remove(); }

 private:
  // What somebody has put in place of a hook is left there.
  void remove() {
    const ErrorAside former;
    for (const auto& [owner, name, hook, torchs] : hooks_) {
      if (find(owner.get(), name).get() != hook.get()) {
        continue;
      }
      if ((torchs ? PyObject_SetAttrString(owner.get(), name, torchs.get()) : PyObject_DelAttrString(owner.get(), name)) != 0) {
        PyErr_WriteUnraisable(owner.get());
      }
    }
  }

  struct Hook {
    Object owner;
    const char* name;
    Object hook;
    Object former;  // or nothing
  };

  // Return what a class or module itself has by a name, or nothing.
  static Object find(PyObject* owner, const char* name) {
    const Object attributes = Object::made(PyObject_GetAttrString(owner, "__dict__"));
    Object found = Object::made(PyObject_CallMethod(attributes.get(), "get", "s", name));
    return found.is_none() ? Object() : found;
  }

  void put(const Object& owner, const char* name, Object hook, Object former) {
    if (PyObject_SetAttrString(owner.get(), name, hook.get()) != 0) {
      raise();
    }
    hooks_.push_back({owner, name, std::move(hook), std::move(former)});
  }

  // Nothing is done where somebody else has put something into torch.Tensor, or this torch has another kind of thing.
  template <class Hook>
  void add(const char* name) {
    static std::string doc;  // for as long as anybody has the descriptor
    const Object base = Object::made(PyObject_GetAttrString(THPVariableClass, "__base__"));
    const Object torchs = find(base.get(), name);
    if (!torchs || find(THPVariableClass, name)) {
      return;
    }
    keep(Hook::descriptor, torchs.get());
    const Object text = Object::made(PyObject_GetAttrString(torchs.get(), "__doc__"));
    if (doc.empty() && !text.is_none()) {
      doc = string_of(text.get());
    }
    Object hook = Hook::make(reinterpret_cast<PyTypeObject*>(base.get()), name, doc.empty() ? nullptr : doc.c_str());
    if (hook) {
      put(Object::of(THPVariableClass), name, std::move(hook), Object());
    }
  }

  std::vector<Hook> hooks_;
};

}  // namespace
