// Hooks on methods of tensors that expose their memory to writes which change no version (data, numpy(), untyped_storage(),
// data_ptr()), or that write so themselves (apply_(), map_(), map2_()). They drop the cached casts of weights on that memory; see
// VersionStamp for later casts.
//
// A hook replaces the C function in torch's own definition of the method. So it also runs where the method was looked up before the hook
// was installed: `to_array = torch.Tensor.numpy`.

#pragma once

#include "invalidation.h"
#include "version_stamp.h"

namespace {

// Return the tensor of an object, whose type the descriptor has checked.
const Tensor& tensor_in(PyObject* object) { return reinterpret_cast<const THPVariable*>(object)->cdata; }

// Invalidate a tensor's memory after torch's method, which may have written part of it before it raised; pass its result on.
PyObject* invalidated(PyObject* self, PyObject* result) {
  try {
    const ErrorScope pending;
    invalidate_alias(tensor_in(self));
    return result;
  } catch (const std::exception&) {
    Py_XDECREF(result);
    torch::translate_exception_to_python(std::current_exception());
    return nullptr;
  }
}

// Tensor.data
struct DataHook {
  static inline PyTypeObject* const kind = &PyGetSetDescr_Type;
  static inline PyGetSetDef* definition = nullptr;  // torch's, while the hook is installed
  static inline getter torchs_get = nullptr;
  static inline setter torchs_set = nullptr;

  static PyObject* get(PyObject* self, void* closure) { return invalidated(self, torchs_get(self, closure)); }

  // Tensors that share the version counter stay on the former memory.
  static int set(PyObject* self, PyObject* value, void* closure) {
    const int status = torchs_set(self, value, closure);
    if (const Tensor& tensor = tensor_in(self); status == 0 && counter_of(tensor).use_count() > 1) {
      only<UnreliableCounters>().add(tensor);
    }
    return status;
  }

  static void install() {
    torchs_get = std::exchange(definition->get, &get);
    torchs_set = std::exchange(definition->set, &set);
  }

  static void remove() {
    if (definition->get == &get && definition->set == &set) {
      definition->get = torchs_get;
      definition->set = torchs_set;
    }
  }
};

// A method of tensors, told apart by `number`. Some make the tensor's version counter unreliable.
template <int number, bool makes_unreliable = false>
struct MethodHook {
  static inline PyTypeObject* const kind = &PyMethodDescr_Type;
  static inline PyMethodDef* definition = nullptr;  // torch's, while the hook is installed
  static inline PyCFunction original = nullptr;

  static PyObject* call(PyObject* self, PyObject* argument) { return finish(self, original(self, argument)); }

  static PyObject* call_with_keywords(PyObject* self, PyObject* arguments, PyObject* named) {
    const auto function = reinterpret_cast<PyCFunctionWithKeywords>(reinterpret_cast<void (*)()>(original));
    return finish(self, function(self, arguments, named));
  }

  static PyObject* finish(PyObject* self, PyObject* result) {
    if (makes_unreliable && result != nullptr) {
      only<UnreliableCounters>().add(tensor_in(self));
    }
    return invalidated(self, result);
  }

  static PyCFunction hook() {
    const auto with_keywords = reinterpret_cast<PyCFunction>(reinterpret_cast<void (*)()>(&call_with_keywords));
    return (definition->ml_flags & METH_KEYWORDS) != 0 ? with_keywords : &call;
  }

  static void install() { original = std::exchange(definition->ml_meth, hook()); }

  static void remove() {
    if (definition->ml_meth == hook()) {
      definition->ml_meth = original;
    }
  }
};

// Installs the hooks, and removes them on destruction, except those over which another has been installed. The GIL must be held.
class AliasHooks {
 public:
  AliasHooks() {
    add<DataHook>("data");
    add<MethodHook<0, true>>("numpy");
    add<MethodHook<1>>("untyped_storage");
    add<MethodHook<2>>("data_ptr");
    add<MethodHook<3>>("apply_");
    add<MethodHook<4>>("map_");
    add<MethodHook<5>>("map2_");
  }
  AliasHooks(const AliasHooks&) = delete;

  ~AliasHooks() {
    for (const auto remove : installed_) {
      remove();
    }
  }

 private:
  // The layout of descriptors in every Python that the limited API serves.
  struct Descriptor {
    PyObject head;
    PyTypeObject* owner;
    PyObject *name, *qualified_name;
    void* definition;
  };

  // Does nothing if this torch has another kind of attribute.
  template <class Hook>
  void add(const char* name) {
    const Object base = Object::steal(PyObject_GetAttrString(THPVariableClass, "__base__"));
    const Object found = Object::steal(PyObject_GetAttrString(base.get(), name));
    const auto* const descriptor = reinterpret_cast<const Descriptor*>(found.get());
    if (Py_TYPE(found.get()) != Hook::kind || descriptor->owner != reinterpret_cast<PyTypeObject*>(base.get())) {
      return;
    }
    Hook::definition = static_cast<decltype(Hook::definition)>(descriptor->definition);
    if constexpr (std::is_same_v<decltype(Hook::definition), PyMethodDef*>) {
      if ((Hook::definition->ml_flags & METH_FASTCALL) != 0) {
        return;
      }
    }
    Hook::install();
    installed_.push_back(&Hook::remove);
  }

  std::vector<void (*)()> installed_;
};

}  // namespace
