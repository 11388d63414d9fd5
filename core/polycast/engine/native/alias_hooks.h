// Hooks on methods that expose a tensor's memory to writes which change no version: Tensor.data, numpy(), untyped_storage(),
// data_ptr() and set_(). They drop the cached casts of weights on that memory; see VersionStamp for later casts.
//
// torch defines the methods in torch._C.TensorBase, which cannot be changed. So its subclass torch.Tensor gets descriptors of the
// same types and names that call torch's. Dynamo's function for Tensor.data in graphs is replaced too.

#pragma once

#include "python.h"

#include <cstddef>
#include <exception>

#include "invalidation.h"
#include "version_stamp.h"

namespace {

// Return the tensor of an object, whose type the descriptor has checked.
const Tensor& tensor_in(PyObject* object) { return reinterpret_cast<const THPVariable*>(object)->cdata; }

// Invalidate a tensor's memory after torch's method; pass the method's result on.
PyObject* invalidated(PyObject* self, PyObject* result) {
  if (result == nullptr) {
    return nullptr;
  }
  try {
    invalidate_alias(tensor_in(self));
    return result;
  } catch (const std::exception&) {
    Py_DECREF(result);
    torch::translate_exception_to_python(std::current_exception());
    return nullptr;
  }
}

// Tensor.data. `descriptor` is torch's, as in other hooks.
struct DataHook {
  static inline PyObject* descriptor = nullptr;
  static inline descrgetfunc torchs_get = nullptr;
  static inline descrsetfunc torchs_set = nullptr;
  static inline PyGetSetDef definition{};

  static PyObject* get(PyObject* self, void*) {
    return invalidated(self, torchs_get(descriptor, self, reinterpret_cast<PyObject*>(Py_TYPE(self))));
  }

  // Tensors that share the version counter stay on the former memory.
  static int set(PyObject* self, PyObject* value, void*) {
    const int status = torchs_set(descriptor, self, value);
    if (const Tensor& tensor = tensor_in(self); status == 0 && counter_of(tensor).use_count() > 1) {
      UnreliableCounters::instance().add(tensor);
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
    return Object::steal(PyDescr_NewGetSet(owner, &definition));
  }
};

// A method of tensors, told apart by `number`. Some make the tensor's version counter unreliable.
template <int number, bool makes_unreliable>
struct MethodHook {
  static inline PyObject* descriptor = nullptr;
  static inline PyCFunction original = nullptr;
  static inline PyMethodDef definition{};

  static PyObject* call(PyObject* self, PyObject* arguments) { return finish(self, original(self, arguments)); }

  static PyObject* call_with_keywords(PyObject* self, PyObject* arguments, PyObject* named) {
    const auto function = reinterpret_cast<PyCFunctionWithKeywords>(reinterpret_cast<void (*)()>(original));
    return finish(self, function(self, arguments, named));
  }

  static PyObject* finish(PyObject* self, PyObject* result) {
    if (makes_unreliable && result != nullptr) {
      UnreliableCounters::instance().add(tensor_in(self));
    }
    return invalidated(self, result);
  }

  // torch's C function is read from a bound method, of a tensor without memory.
  static Object make(PyTypeObject* owner, const char* name, const char* doc) {
    const Tensor empty(c10::make_intrusive<TensorImpl>(
        c10::DispatchKeySet(DispatchKey::CPU), caffe2::TypeMeta::Make<float>(), c10::Device(DeviceType::CPU)));
    const Object object = python_tensor(empty);
    const Object bound = Object::steal(PyObject_CallMethod(descriptor, "__get__", "O", object.get()));
    const int flags = PyCFunction_Check(bound.get()) ? PyCFunction_GetFlags(bound.get()) : -1;
    const auto with_keywords = reinterpret_cast<PyCFunction>(reinterpret_cast<void (*)()>(&call_with_keywords));
    if (flags != METH_NOARGS && flags != (METH_VARARGS | METH_KEYWORDS)) {
      return Object();
    }
    original = PyCFunction_GetFunction(bound.get());
    definition = {name, flags == METH_NOARGS ? &call : with_keywords, flags, doc};
    return Object::steal(PyDescr_NewMethod(owner, &definition));
  }
};

// torch._C._autograd._get_data_attr. In C too: torch saves graphs only with functions that it trusts.
struct GraphDataHook {
  static constexpr const char* name = "_get_data_attr";

  static PyObject* call(PyObject*, PyObject* tensor) { return PyObject_GetAttrString(tensor, "data"); }

  static Object make(PyObject* module) {
    static PyMethodDef definition{name, &call, METH_O, nullptr};
    const Object of_module = Object::steal(PyObject_GetAttrString(module, "__name__"));
    return Object::steal(PyCFunction_NewEx(&definition, nullptr, of_module.get()));
  }
};

// Installs the hooks, and removes them on destruction.
class AliasHooks {
 public:
  AliasHooks() {
    try {
      add<DataHook>("data");
      add<MethodHook<0, true>>("numpy");
      add<MethodHook<1, false>>("untyped_storage");
      add<MethodHook<2, false>>("data_ptr");
      add<MethodHook<3, true>>("set_");
      const Object module = Object::steal(PyImport_ImportModule("torch._C._autograd"));
      if (Object former = find(module.get(), GraphDataHook::name)) {
        install(module, GraphDataHook::name, GraphDataHook::make(module.get()), std::move(former));
      }
    } catch (...) {
      remove();
      throw;
    }
  }
  AliasHooks(const AliasHooks&) = delete;

  ~AliasHooks() { remove(); }

 private:
  // A hook that others have replaced stays.
  void remove() {
    const ErrorScope pending;
    for (const auto& [owner, name, hook, former] : hooks_) {
      if (find(owner.get(), name).get() != hook.get()) {
        continue;
      }
      if ((former ? PyObject_SetAttrString(owner.get(), name, former.get()) : PyObject_DelAttrString(owner.get(), name)) != 0) {
        PyErr_WriteUnraisable(owner.get());
      }
    }
  }

  struct InstalledHook {
    Object owner;
    const char* name;
    Object hook;
    Object former;  // or nothing
  };

  // Return what a class or module itself has by a name, or nothing.
  static Object find(PyObject* owner, const char* name) {
    const Object attributes = Object::steal(PyObject_GetAttrString(owner, "__dict__"));
    Object found = Object::steal(PyObject_CallMethod(attributes.get(), "get", "s", name));
    return found.is_none() ? Object() : found;
  }

  void install(const Object& owner, const char* name, Object hook, Object former) {
    if (PyObject_SetAttrString(owner.get(), name, hook.get()) != 0) {
      throw_python_error();
    }
    hooks_.push_back({owner, name, std::move(hook), std::move(former)});
  }

  // Does nothing if another library has patched the attribute of torch.Tensor, or this torch has another kind of attribute.
  template <class Hook>
  void add(const char* name) {
    static std::string doc;  // lives as long as the descriptor
    const Object base = Object::steal(PyObject_GetAttrString(THPVariableClass, "__base__"));
    const Object original = find(base.get(), name);
    if (!original || find(THPVariableClass, name)) {
      return;
    }
    set_reference(Hook::descriptor, original.get());
    const Object text = Object::steal(PyObject_GetAttrString(original.get(), "__doc__"));
    if (doc.empty() && !text.is_none()) {
      doc = string_of(text.get());
    }
    Object hook = Hook::make(reinterpret_cast<PyTypeObject*>(base.get()), name, doc.empty() ? nullptr : doc.c_str());
    if (hook) {
      install(Object::borrow(THPVariableClass), name, std::move(hook), Object());
    }
  }

  std::vector<InstalledHook> hooks_;
};

}  // namespace
