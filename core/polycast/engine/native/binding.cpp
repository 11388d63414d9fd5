// The native engine's Python module: the semantics of the reference engine at the speed of torch's own kernels.
//
// Compiled as one unit with the files it includes: parsing torch's headers is most of the build, and is done once so. From
// the bottom: store.h, frames.h, regions.h, methods.h, casting.h, arguments.h, kernel.h, unboxed.h, library.h. Each says what it owns and which
// lock it takes.

#include "python.h"

#include <algorithm>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "alias_hooks.h"
#include "forks.h"
#include "library.h"
#include "methods.h"
#include "observed.h"
#include "regions.h"
#include "store.h"

namespace {

std::unique_ptr<Announcers> announcers;
AliasHooks* alias_hooks = nullptr;  // which needs Python to be destroyed: not as the process ends

void take_locks() {
  const auto take = &AtForkLock::take;
  take(AllStores::list().mutex);
  for (Store* const store : AllStores::list().stores) {
    take(store->mutex());
  }
  take(SharedCasts::index().mutex());
  take(InFlight::storages().mutex());
  take(PartialCounters::set().mutex());
  take(Writes::log().mutex());
  take(LeftBehind::things().mutex());
}

// override(policies): a mapping of the numbers of ops to those of policies
PyObject* make_override(PyTypeObject*, PyObject* arguments, PyObject*) {
  PyObject* policies;
  parse(arguments, "O!", &PyDict_Type, &policies);
  auto override = std::make_shared<Override>();
  PyObject *number, *policy;
  for (Py_ssize_t position = 0; PyDict_Next(policies, &position, &number, &policy) != 0;) {
    override->set(PyLong_AsLongLong(number), static_cast<Policy>(PyLong_AsLong(policy)));
  }
  return Holder<const Override>::make(std::move(override));
}

// Store(max_bytes, verify)
PyObject* make_store(PyTypeObject*, PyObject* arguments, PyObject*) {
  PyObject* max_bytes;
  int verify;
  parse(arguments, "Op", &max_bytes, &verify);
  std::optional<size_t> most;
  if (max_bytes != Py_None) {
    most = PyLong_AsSize_t(max_bytes);
    if (PyErr_Occurred() != nullptr) {
      raise();
    }
  }
  return Holder<Store>::make(std::make_shared<Store>(most, verify != 0));
}

// clear()
PyObject* clear_store(PyObject* self, PyObject*) {
  {
    const std::shared_ptr<Store> store = Holder<Store>::of(self);
    const WithoutGil others_may_run;
    store->clear();
  }
  return Py_NewRef(Py_None);
}

// statistics() -> what WeightCacheStats has
PyObject* store_statistics(PyObject* self, PyObject*) {
  const Statistics now = Holder<Store>::of(self)->statistics();
  return Py_BuildValue(
      "(nnKKKnn)", now.casts, now.cast_bytes, now.hits, now.misses, now.evictions, now.packings, now.packed_bytes);
}

// Library(device_type, key)
PyObject* make_library(PyTypeObject*, PyObject* arguments, PyObject*) {
  const char *device_type, *key;
  parse(arguments, "ss", &device_type, &key);
  return Holder<Library>::make(std::make_shared<Library>(device_type, key));
}

// None, or what asks whether the device captures.
Object asking(PyObject* is_capturing) { return is_capturing == Py_None ? Object() : Object::of(is_capturing); }

// impl(name, number, policy, refusal, with_dtype, is_capturing)
PyObject* library_impl(PyObject* self, PyObject* arguments) {
  const char *name, *refusal, *with_dtype;
  long long number;
  int policy;
  PyObject* is_capturing;
  parse(arguments, "sLiszO", &name, &number, &policy, &refusal, &with_dtype, &is_capturing);
  Holder<Library>::of(self)->impl(
      name, Op{number, static_cast<Policy>(policy), refusal, std::nullopt}, with_dtype, asking(is_capturing));
  return Py_NewRef(Py_None);
}

// cached_cast(is_capturing)
PyObject* library_cached_cast(PyObject* self, PyObject* is_capturing) {
  Holder<Library>::of(self)->cached_cast(asking(is_capturing));
  return Py_NewRef(Py_None);
}

PyObject* library_fallthrough(PyObject* self, PyObject*) {
  Holder<Library>::of(self)->fallthrough();
  return Py_NewRef(Py_None);
}

PyObject* library_remove(PyObject* self, PyObject*) {
  Holder<Library>::of(self)->remove();
  return Py_NewRef(Py_None);
}

// observing() -> what an observer is bound to
PyObject* observing(PyObject*, PyObject*) {
  static Engine engine{
      [] { return &observed_op; },
      [](DeviceType device) { return static_cast<const void*>(region_of(device).override); },
      &hold_override,
      [](std::shared_ptr<void> thing) { LeftBehind::things().leave(std::move(thing)); },
      [] { LeftBehind::things().free(); },
      [] { return Writes::log().count(); },
      [](const Observer& told) { observer.store(&told); }};
  return PyCapsule_New(&engine, kObserving, nullptr);
}

// watch_writes(ops, collectives)
PyObject* watch_writes(PyObject*, PyObject* arguments) {
  PyObject *ops, *collectives;
  parse(arguments, "OO", &ops, &collectives);
  announcers = std::make_unique<Announcers>(each_of(ops, &string_of), each_of(collectives, &string_of));
  delete std::exchange(alias_hooks, nullptr);
  alias_hooks = new AliasHooks();
  return Py_NewRef(Py_None);
}

PyObject* unwatch_writes(PyObject*, PyObject*) {
  announcers.reset();
  delete std::exchange(alias_hooks, nullptr);
  return Py_NewRef(Py_None);
}

// note_writes(tensors)
PyObject* note_writes(PyObject*, PyObject* tensors) {
  Storages written;
  for (const Tensor& tensor : each_of(tensors, &tensor_of)) {
    if (tensor.has_storage()) {
      written.insert(storage_of(tensor));
    }
  }
  announce(written);
  return Py_NewRef(Py_None);
}

// forget(tensors): let go of what the stores refer to of tensors.
PyObject* forget(PyObject*, PyObject* tensors) {
  const std::vector<Tensor> forgotten = each_of(tensors, &tensor_of);
  for (const auto& store : all_stores()) {
    for (const Tensor& tensor : forgotten) {
      store->forget(tensor.unsafeGetTensorImpl());
    }
  }
  return Py_NewRef(Py_None);
}

// bind(policies, override, store, rewritten, error, text, of_traced, by_identity, low_bit, part): what is called in
// Python, and a part of a storage
PyObject* bind(PyObject*, PyObject* arguments) {
  PyObject *policies, *override, *store, *rewritten, *error, *of_traced, *by_identity, *low_bit, *part;
  const char* text;
  parse(
      arguments, "OOOOOsOOOO", &policies, &override, &store, &rewritten, &error, &text, &of_traced, &by_identity, &low_bit, &part);
  const auto names = each_of(policies, &string_of);
  TORCH_CHECK(std::equal(names.begin(), names.end(), kPolicyNames.begin(), kPolicyNames.end()));
  keep(native_override, override);
  keep(native_store, store);
  keep(storages_are_rewritten, rewritten);
  keep(stale_weight_error, error);
  keep(cached_cast_of_traced, of_traced);
  keep(store_by_identity, by_identity);
  keep(perform_low_bit, low_bit);
  stale_weight_message = text;
  frees_part_of_storage = torch::createStorage(part).data_ptr().get_deleter();
  AtForkLock::have(&take_locks);
  return Py_NewRef(Py_None);
}

PyMethodDef functions[] = {
    {"enter", fast(&raising_fast<&enter>), METH_FASTCALL, "Enter a region on this thread."},
    {"leave", fast(&raising_fast<&leave>), METH_FASTCALL, "Leave the innermost region that an owner entered on this thread."},
    {"excluded_keys", &raising<&excluded_keys>, METH_NOARGS, "Return the dispatch keys that this thread excludes."},
    {"dtype", &raising<&dtype>, METH_O, "Return the fast dtype of a device on this thread."},
    {"last", &raising<&last>, METH_NOARGS, "Return the region that was entered last."},
    {"innermost", &raising<&innermost>, METH_O, "Return the innermost region for a device."},
    {"nesting", &raising<&nesting>, METH_O, "Return how many regions for a device the thread is in."},
    {"open_regions", &raising<&open_regions>, METH_O, "Return how many all threads are in."},
    {"clear_own_casts", &raising<&clear_own_casts>, METH_O, "Drop the casts of the thread's regions, or of all."},
    {"region_methods", &raising<&region_methods>, METH_VARARGS, "Return __enter__ and __exit__."},
    {"watch_writes", &raising<&watch_writes>, METH_VARARGS, "See writes that count no version."},
    {"unwatch_writes", &raising<&unwatch_writes>, METH_NOARGS, "See them no more."},
    {"note_writes", &raising<&note_writes>, METH_O, "Tensors were written."},
    {"forget", &raising<&forget>, METH_O, "Let go of what the stores refer to of tensors."},
    {"packing_of", &raising<&packing_of>, METH_VARARGS, "Return what a weight is packed into."},
    {"observing", &raising<&observing>, METH_NOARGS, "Return what an observer is bound to."},
    {"bind", &raising<&bind>, METH_VARARGS, "Take what is called in Python."},
    {nullptr, nullptr, 0, nullptr}};

PyMethodDef store_methods[] = {
    {"clear", &raising<&clear_store>, METH_NOARGS, "Drop every cast."},
    {"statistics", &raising<&store_statistics>, METH_NOARGS, "Return what it holds and did."},
    {nullptr, nullptr, 0, nullptr}};

PyMethodDef library_methods[] = {
    {"impl", &raising<&library_impl>, METH_VARARGS, "Put the kernel of an op in place."},
    {"cached_cast", &raising<&library_cached_cast>, METH_O, "Put those of polycast::cached_cast in place."},
    {"fallthrough", &raising<&library_fallthrough>, METH_NOARGS, "Let other ops through."},
    {"remove", &raising<&library_remove>, METH_NOARGS, "Take the kernels out."},
    {nullptr, nullptr, 0, nullptr}};

PyMethodDef no_methods[] = {{nullptr, nullptr, 0, nullptr}};

PyModuleDef definition = {PyModuleDef_HEAD_INIT, "polycast_native", "The native engine.", -1, functions};

}  // namespace

PyMODINIT_FUNC PyInit_polycast_native() {
  PyObject* const module = PyModule_Create(&definition);
  if (module == nullptr || !add_class<const Override, &make_override>(module, "polycast_native.Override", no_methods) ||
      !add_class<Store, &make_store>(module, "polycast_native.Store", store_methods) ||
      !add_class<Library, &make_library>(module, "polycast_native.Library", library_methods)) {
    Py_XDECREF(module);
    return nullptr;
  }
  return module;
}
