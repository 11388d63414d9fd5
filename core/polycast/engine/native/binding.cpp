// The native engine's Python module: the semantics of the reference engine at the speed of torch's own kernels.
//
// Compiled as one unit with the files it includes: parsing torch's headers is most of the build, and is done once so. From
// the bottom: store.h, tally.h, regions.h, methods.h, observe.h, reading.h, casting.h, kernels.h. Each says what it owns and which
// lock it takes.

#include "python.h"

#ifndef _WIN32
#include <pthread.h>
#endif

#include <algorithm>
#include <memory>
#include <mutex>
#include <string>
#include <utility>
#include <vector>

#include "kernels.h"
#include "methods.h"
#include "observe.h"
#include "reading.h"
#include "regions.h"
#include "store.h"

namespace {

std::unique_ptr<Announcers> announcers;

// Locks are taken before a fork and given back after it, on both sides, in the order in which they nest.
std::vector<std::mutex*> held_over_fork;

void give_locks_back() {
  while (!held_over_fork.empty()) {
    std::mutex* const held = held_over_fork.back();
    held_over_fork.pop_back();  // before the last one is given back, for it guards this list
    held->unlock();
  }
}

void hold_locks_over_forks() {
#ifndef _WIN32
  static std::once_flag once;
  std::call_once(once, [] {
    pthread_atfork(
        [] {
          const auto take = [](std::mutex& mutex) {
            mutex.lock();
            held_over_fork.push_back(&mutex);
          };
          take(AllStores::list().mutex);
          for (Store* const store : AllStores::list().stores) {
            take(store->mutex());
          }
          take(SharedCasts::index().mutex());
          take(InFlight::storages().mutex());
          take(Writes::log().mutex());
          take(LeftBehind::things().mutex());
          take(OpInfos::all().mutex());
          take(Recorders::running().mutex);
          for (const auto& recorder : Recorders::running().recorders) {
            take(recorder->mutex);
            take(recorder->of_ended_threads.mutex);
            for (const auto& [number, table] : recorder->tables) {
              take(table->mutex);
            }
          }
        },
        &give_locks_back,
        &give_locks_back);
  });
#endif
}

// overlay(policies): a mapping of the numbers of ops to those of policies
PyObject* make_overlay(PyTypeObject*, PyObject* arguments, PyObject*) {
  PyObject* policies;
  parse(arguments, "O!", &PyDict_Type, &policies);
  auto overlay = std::make_shared<Overlay>();
  PyObject *number, *policy;
  for (Py_ssize_t position = 0; PyDict_Next(policies, &position, &number, &policy) != 0;) {
    overlay->set(PyLong_AsLongLong(number), static_cast<Policy>(PyLong_AsLong(policy)));
  }
  return Holder<const Overlay>::make(std::move(overlay));
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

// kept_cast(is_capturing)
PyObject* library_kept_cast(PyObject* self, PyObject* is_capturing) {
  Holder<Library>::of(self)->kept_cast(asking(is_capturing));
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

// Recorder(all_threads, timing, nonfinite, stacks)
PyObject* make_recorder(PyTypeObject*, PyObject* arguments, PyObject*) {
  int all_threads, timing, nonfinite, stacks;
  parse(arguments, "ppip", &all_threads, &timing, &nonfinite, &stacks);
  return Holder<Recorder>::make(std::make_shared<Recorder>(all_threads != 0, timing != 0, nonfinite, stacks != 0));
}

PyObject* recorder_start(PyObject* self, PyObject*) {
  start_recorder(Holder<Recorder>::of(self));
  return Py_NewRef(Py_None);
}

PyObject* recorder_stop(PyObject* self, PyObject*) {
  stop_recorder(Holder<Recorder>::of(self));
  return Py_NewRef(Py_None);
}

PyObject* recorder_read(PyObject* self, PyObject*) { return Reading::of(*Holder<Recorder>::of(self)); }

PyObject* recorder_nonfinite_count(PyObject* self, PyObject*) {
  return PyLong_FromUnsignedLongLong(Holder<Recorder>::of(self)->nonfinite_seen());
}

// add_module(address, number)
PyObject* recorder_add_module(PyObject* self, PyObject* arguments) {
  unsigned long long address;
  int number;
  parse(arguments, "Ki", &address, &number);
  Holder<Recorder>::of(self)->add_module(address, number);
  return Py_NewRef(Py_None);
}

// forget_module(address)
PyObject* recorder_forget_module(PyObject* self, PyObject* address) {
  Holder<Recorder>::of(self)->forget_module(PyLong_AsUnsignedLongLong(address));
  return Py_NewRef(Py_None);
}

// add_parameter(parameter, module)
PyObject* recorder_add_parameter(PyObject* self, PyObject* arguments) {
  PyObject* parameter;
  int module;
  parse(arguments, "Oi", &parameter, &module);
  Holder<Recorder>::of(self)->add_parameter(tensor_of(parameter), module);
  return Py_NewRef(Py_None);
}

// watch_writes(ops, collectives)
PyObject* watch_writes(PyObject*, PyObject* arguments) {
  PyObject *ops, *collectives;
  parse(arguments, "OO", &ops, &collectives);
  announcers = std::make_unique<Announcers>(each_of(ops, &string_of), each_of(collectives, &string_of));
  return Py_NewRef(Py_None);
}

PyObject* unwatch_writes(PyObject*, PyObject*) {
  announcers.reset();
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

// bind(policies, overlay, store, rewritten, error, text, stack, place, of_traced, by_identity, low_bit): what is called in Python
PyObject* bind(PyObject*, PyObject* arguments) {
  PyObject *policies, *overlay, *store, *rewritten, *error, *stack, *place, *of_traced, *by_identity, *low_bit;
  const char* text;
  parse(
      arguments, "OOOOOsOOOOO", &policies, &overlay, &store, &rewritten, &error, &text, &stack, &place, &of_traced, &by_identity,
      &low_bit);
  const auto names = each_of(policies, &string_of);
  TORCH_CHECK(std::equal(names.begin(), names.end(), kPolicyNames.begin(), kPolicyNames.end()));
  keep(native_overlay, overlay);
  keep(native_store, store);
  keep(storages_are_rewritten, rewritten);
  keep(stale_weight_error, error);
  keep(stack_now, stack);
  keep(place_now, place);
  keep(kept_cast_of_traced, of_traced);
  keep(store_by_identity, by_identity);
  keep(perform_low_bit, low_bit);
  stale_weight_message = text;
  hold_locks_over_forks();
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
    {"enter_module", &raising<&pass_module<true>>, METH_O, "A module begins to compute."},
    {"leave_module", &raising<&pass_module<false>>, METH_O, "A module has computed."},
    {"note_compiling", &raising<&note_compiling>, METH_O, "A compiler begins, or is done."},
    {"note_overlay", &raising<&note_overlay>, METH_O, "An op runs under an overlay."},
    {"note_cast", &raising<&note_cast>, METH_VARARGS, "A tensor was cast."},
    {"note_entry", &raising<&note_python_entry>, METH_VARARGS, "A region was entered."},
    {"note_exit", &raising<&note_python_exit>, METH_O, "A region was left."},
    {"watch_writes", &raising<&watch_writes>, METH_VARARGS, "See writes that count no version."},
    {"unwatch_writes", &raising<&unwatch_writes>, METH_NOARGS, "See them no more."},
    {"note_writes", &raising<&note_writes>, METH_O, "Tensors were written."},
    {"packing_of", &raising<&packing_of>, METH_VARARGS, "Return what a weight is packed into."},
    {"bind", &raising<&bind>, METH_VARARGS, "Take what is called in Python."},
    {nullptr, nullptr, 0, nullptr}};

PyMethodDef store_methods[] = {
    {"clear", &raising<&clear_store>, METH_NOARGS, "Drop every cast."},
    {"statistics", &raising<&store_statistics>, METH_NOARGS, "Return what it holds and did."},
    {nullptr, nullptr, 0, nullptr}};

PyMethodDef library_methods[] = {
    {"impl", &raising<&library_impl>, METH_VARARGS, "Put the kernel of an op in place."},
    {"kept_cast", &raising<&library_kept_cast>, METH_O, "Put those of polycast::kept_cast in place."},
    {"fallthrough", &raising<&library_fallthrough>, METH_NOARGS, "Let other ops through."},
    {"remove", &raising<&library_remove>, METH_NOARGS, "Take the kernels out."},
    {nullptr, nullptr, 0, nullptr}};

PyMethodDef recorder_methods[] = {
    {"start", &raising<&recorder_start>, METH_NOARGS, "Count from now on."},
    {"stop", &raising<&recorder_stop>, METH_NOARGS, "Count no more."},
    {"read", &raising<&recorder_read>, METH_NOARGS, "Return what was counted."},
    {"nonfinite_count", &raising<&recorder_nonfinite_count>, METH_NOARGS, "Return how many ops made inf or nan."},
    {"add_module", &raising<&recorder_add_module>, METH_VARARGS, "Know a module."},
    {"forget_module", &raising<&recorder_forget_module>, METH_O, "Know it no more."},
    {"add_parameter", &raising<&recorder_add_parameter>, METH_VARARGS, "Know a parameter's module."},
    {nullptr, nullptr, 0, nullptr}};

PyMethodDef no_methods[] = {{nullptr, nullptr, 0, nullptr}};

PyModuleDef definition = {PyModuleDef_HEAD_INIT, "polycast_native", "The native engine.", -1, functions};

}  // namespace

PyMODINIT_FUNC PyInit_polycast_native() {
  PyObject* const module = PyModule_Create(&definition);
  if (module == nullptr || !add_class<const Overlay, &make_overlay>(module, "polycast_native.Overlay", no_methods) ||
      !add_class<Store, &make_store>(module, "polycast_native.Store", store_methods) ||
      !add_class<Library, &make_library>(module, "polycast_native.Library", library_methods) ||
      !add_class<Recorder, &make_recorder>(module, "polycast_native.Recorder", recorder_methods)) {
    Py_XDECREF(module);
    return nullptr;
  }
  return module;
}
