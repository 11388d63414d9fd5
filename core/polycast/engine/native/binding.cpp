// The Python module of the native engine: the semantics of the reference engine at the speed of torch's own kernels.
//
// One translation unit with all headers, in anonymous namespaces: parsing torch's headers is most of the build. From the bottom:
// version_stamp.h, invalidation.h, admission.h; user_store.h and region_store.h; frames.h, regions.h, construction.h, methods.h;
// casting.h, matching.h, arguments.h, recipes/, kernel.h, unboxed.h, registrations.h, recipe_op.h.

#include "extension.h"

#include "alias_hooks.h"
#include "construction.h"
#include "forks.h"
#include "methods.h"
#include "observed.h"
#include "recipe_op.h"
#include "recorded_writes.h"
#include "regions.h"
#include "registrations.h"
#include "stored_entries.h"
#include "user_store.h"

namespace {

std::unique_ptr<WriteHooks> write_hooks;
AliasHooks* alias_hooks = nullptr;  // never destroyed at exit: torch may be gone

void acquire_locks() {
  const auto acquire = &AtForkLock::acquire;
  acquire(only<AllStores>().mutex);
  for (UserStore* const store : only<AllStores>().stores) {
    acquire(store->mutex());
  }
  acquire(only<SharedCasts>().mutex());
  acquire(only<PendingCollectives>().mutex());
  acquire(only<UnreliableCounters>().mutex());
  acquire(CapturedWrites::mutex());
  acquire(only<InvalidationLog>().mutex());
  acquire(only<DeferredDestruction>().mutex());
}

// Override({op number: policy number}, recipe)
PyObject* make_override(PyTypeObject*, PyObject* arguments, PyObject*) {
  PyObject* policies;
  const char* recipe;
  parse(arguments, "O!s", &PyDict_Type, &policies, &recipe);
  auto override = std::make_shared<Override>(recipe);
  PyObject *number, *policy;
  for (Py_ssize_t position = 0; PyDict_Next(policies, &position, &number, &policy) != 0;) {
    override->set(PyLong_AsLongLong(number), static_cast<Policy>(PyLong_AsLong(policy)));
  }
  return Holder<const Override>::wrap(std::move(override));
}

// UserStore(max_bytes, verify)
PyObject* make_store(PyTypeObject*, PyObject* arguments, PyObject*) {
  PyObject* max_bytes;
  int verify;
  parse(arguments, "Op", &max_bytes, &verify);
  std::optional<size_t> limit;
  if (max_bytes != Py_None) {
    limit = PyLong_AsSize_t(max_bytes);
    if (PyErr_Occurred() != nullptr) {
      throw_python_error();
    }
  }
  return Holder<UserStore>::wrap(std::make_shared<UserStore>(limit, verify != 0));
}

// clear()
PyObject* clear_store(PyObject* self, PyObject*) {
  {
    const std::shared_ptr<UserStore> store = Holder<UserStore>::unwrap(self);
    const WithoutGil others_may_run;
    store->clear();
  }
  return Py_NewRef(Py_None);
}

// statistics() -> the fields of WeightCacheStats
PyObject* store_statistics(PyObject* self, PyObject*) {
  const Statistics now = Holder<UserStore>::unwrap(self)->statistics();
  return Py_BuildValue(
      "(nnKKKnn)", now.casts, now.cast_bytes, now.hits, now.misses, now.evictions, now.prepacked, now.prepacked_bytes);
}

// KernelRegistrations(device_type, key)
PyObject* make_registrations(PyTypeObject*, PyObject* arguments, PyObject*) {
  const char *device_type, *key;
  parse(arguments, "ss", &device_type, &key);
  return Holder<KernelRegistrations>::wrap(std::make_shared<KernelRegistrations>(device_type, key));
}

IsCapturing capturing(PyObject* function) { return IsCapturing(function == Py_None ? Object() : Object::borrow(function)); }

// The items of a row of matching.py: (names, scalars, mixtures, fills_masks, takes_empty)
MatchedOperands operands_of(PyObject* row) {
  PyObject *names, *scalars, *mixtures;
  int fills_masks, takes_empty;
  parse(row, "OOOpp", &names, &scalars, &mixtures, &fills_masks, &takes_empty);
  return {convert_items(names, &string_of), convert_items(scalars, &string_of), convert_items(mixtures, &string_of), fills_masks != 0, takes_empty != 0};
}

Dtypes dtypes_of(PyObject* given) {
  Dtypes dtypes;
  for (const ScalarType dtype : convert_items(given, &dtype_of)) {
    dtypes.add(dtype);
  }
  return dtypes;
}

// (dtypes, ((layout, dtypes), ...))
MissingKernels missing_kernels_of(PyObject* given) {
  PyObject *of_op, *of_layouts;
  parse(given, "OO", &of_op, &of_layouts);
  return {dtypes_of(of_op), convert_items(of_layouts, [](PyObject* item) {
    PyObject *layout, *dtypes;
    parse(item, "OO", &layout, &dtypes);
    return std::pair(reinterpret_cast<THPLayout*>(layout)->layout, dtypes_of(dtypes));
  })};
}

// impl(name, number, policy, refusal, with_dtype, written, writing_flag, is_composed, operands, missing, is_capturing)
PyObject* registrations_impl(PyObject* self, PyObject* arguments) {
  const char *name, *refusal, *with_dtype;
  long long number;
  int policy, writing_flag, is_composed;
  PyObject *written, *operands, *missing, *is_capturing;
  parse(
      arguments, "sLiszO!ipO!O!O", &name, &number, &policy, &refusal, &with_dtype, &PyTuple_Type, &written, &writing_flag, &is_composed,
      &PyTuple_Type, &operands, &PyTuple_Type, &missing, &is_capturing);
  Op op{
      number, static_cast<Policy>(policy), refusal, convert_items(written, &PyLong_AsSize_t), writing_flag, is_composed != 0,
      operands_of(operands), missing_kernels_of(missing), std::nullopt};
  Holder<KernelRegistrations>::unwrap(self)->impl(name, std::move(op), with_dtype, capturing(is_capturing));
  return Py_NewRef(Py_None);
}

// cached_cast(is_capturing)
PyObject* registrations_cached_cast(PyObject* self, PyObject* is_capturing) {
  Holder<KernelRegistrations>::unwrap(self)->cached_cast(capturing(is_capturing));
  return Py_NewRef(Py_None);
}

// observing() -> a capsule with the Engine that an observer is bound to
PyObject* observing(PyObject*, PyObject*) {
  static Engine engine{
      [] { return &observed_op; },
      [](DeviceType device) { return static_cast<const void*>(region_of(device).override); },
      &hold_override,
      [](std::shared_ptr<void> object) { only<DeferredDestruction>().add(std::move(object)); },
      [] { only<DeferredDestruction>().run(); },
      [] { return only<InvalidationLog>().length(); },
      [](const Observer& given) { observer.store(&given); }};
  return PyCapsule_New(&engine, kObserving, nullptr);
}

// watch_writes(writing, collectives, exposing): names of ops
PyObject* watch_writes(PyObject*, PyObject* arguments) {
  PyObject *writing, *collectives, *exposing;
  parse(arguments, "OOO", &writing, &collectives, &exposing);
  write_hooks = std::make_unique<WriteHooks>(
      convert_items(writing, &string_of), convert_items(collectives, &string_of), convert_items(exposing, &string_of));
  delete std::exchange(alias_hooks, nullptr);
  alias_hooks = new AliasHooks();
  return Py_NewRef(Py_None);
}

void unwatch_writes() {
  write_hooks.reset();
  delete std::exchange(alias_hooks, nullptr);
}

// note_writes(tensors); of None, any tensor
PyObject* note_writes(PyObject*, PyObject* tensors) {
  Storages written;
  if (tensors == Py_None) {
    const WithoutGil others_may_run;
    only<InvalidationLog>().add_all();
    for (const auto& store : all_stores()) {
      store->clear();
    }
    return Py_NewRef(Py_None);
  }
  for (const Tensor& tensor : convert_items(tensors, &tensor_of)) {
    if (tensor.has_storage()) {
      written.insert(storage_of(tensor));
    }
  }
  CapturedWrites::note(written);
  invalidate(written);
  return Py_NewRef(Py_None);
}

// read(tensor, function): call a function that only reads the memory of a tensor, and return its result.
PyObject* read(PyObject*, PyObject* arguments) {
  PyObject *tensor, *function;
  parse(arguments, "OO", &tensor, &function);
  const Tensor held = tensor_of(tensor);
  const ReadGuard reading(held);
  return PyObject_CallNoArgs(function);
}

// begin_capture() -> a GraphCapture
PyObject* begin_capture(PyObject*, PyObject*) { return Holder<GraphCapture>::wrap(std::make_shared<GraphCapture>()); }

// forget(tensors): drop the entries of weights, and the weakrefs to them.
PyObject* forget(PyObject*, PyObject* tensors) {
  const std::vector<Tensor> forgotten = convert_items(tensors, &tensor_of);
  for (const auto& store : all_stores()) {
    for (const Tensor& tensor : forgotten) {
      store->forget(tensor.unsafeGetTensorImpl());
    }
  }
  return Py_NewRef(Py_None);
}

// bind(given): the numbers that Python has for names which C++ numbers too, by kind of name, and by name the functions that the engine
// calls, a part of a storage, and a class of torch's
PyObject* bind(PyObject*, PyObject* given) {
  const auto item = [given](const char* name) { return item_of(given, name); };
  PyObject* const numbers = item("numbers");
  check_numbers(numbers, "policies", kPolicyNames, static_cast<long>(Policy::kNone));
  check_numbers(numbers, "settings", kSettingNames);
  bind_recipes(numbers, item("perform_recipe"));
  set_reference(note_match, item("note_match"));
  set_reference(is_exporting, item("is_exporting"));
  set_reference(native_override, item("native_override"));
  set_reference(native_store, item("native_store"));
  set_reference(storages_are_rewritten, item("storages_are_rewritten"));
  set_reference(stale_weight_error, item("stale_weight_error"));
  set_reference(cached_cast_of_traced, item("cast_of_traced"));
  set_reference(store_by_identity, item("store_by_identity"));
  stale_weight_message = string_of(item("stale_weight_message"));
  PyObject* const part = item("storage_part");
  storage_part_deleter = torch::createStorage(part).data_ptr().get_deleter();
  const Object offset = Object::steal(PyObject_GetAttrString(reinterpret_cast<PyObject*>(Py_TYPE(part)), "__weakrefoffset__"));
  weak_references_of_storage = PyLong_AsSsize_t(offset.get());
  weak_id_ref = reinterpret_cast<PyTypeObject*>(Py_NewRef(item("weak_id_ref")));
  AtForkLock::install(&acquire_locks);
  return Py_NewRef(Py_None);
}

PyMethodDef functions[] = {
    {"enter", fast(raising_fast<&enter>), METH_FASTCALL, "Enter a region on this thread."},
    {"leave", fast(raising_fast<&leave>), METH_FASTCALL, "Leave the innermost region that an owner entered on this thread."},
    {"acquire_for_fork", raising<&acquire_for_fork>, METH_O, "Keep other threads from clearing torch's cache; return False if one does and this may not block."},
    {"release_after_fork", raising<&run<&TorchsCache::release_after_fork>>, METH_NOARGS, "Let them clear it again."},
    {"forget_other_threads", raising<&run<&TorchsCache::forget_other_threads>>, METH_NOARGS, "In a forked child, forget the other threads that forked or cleared it."},
    {"excluded_keys", raising<&excluded_keys>, METH_NOARGS, "Return the raw bits of the dispatch keys that this thread excludes."},
    {"dtype", raising<&dtype>, METH_O, "Return the fast dtype of a device on this thread."},
    {"last", raising<&last>, METH_NOARGS, "Return (owner, settings) of the region that this thread entered last; None if it is in none."},
    {"innermost", raising<&innermost>, METH_O, "Return (override, cache) of this thread's innermost region for a device, with None for each that it lacks."},
    {"nesting", raising<&nesting>, METH_O, "Return the number of this thread's regions for a device."},
    {"open_regions", raising<&open_regions>, METH_O, "Return the number of regions for a device on all threads."},
    {"runs_kernel", raising<&runs_kernel>, METH_O, "Return whether a kernel of a device runs on this thread."},
    {"clear_own_casts", raising<&clear_own_casts>, METH_O, "Drop the casts of this thread's regions, or of all threads'."},
    {"region_methods", raising<&region_methods>, METH_VARARGS, "Return __init__, __enter__ and __exit__."},
    {"watch_writes", raising<&watch_writes>, METH_VARARGS, "Install the hooks that see writes without a version."},
    {"unwatch_writes", raising<&run<&unwatch_writes>>, METH_NOARGS, "Remove these hooks."},
    {"note_writes", raising<&note_writes>, METH_O, "Drop what is cached of tensors that were written; None: of all."},
    {"enter_mode", raising<&run<&ModesOfThread::enter>>, METH_NOARGS, "Watch the writes of this thread's dispatch modes from now on."},
    {"leave_mode", raising<&run<&ModesOfThread::leave>>, METH_NOARGS, "Note that this thread has left a dispatch mode."},
    {"begin_capture", raising<&begin_capture>, METH_NOARGS, "Note what is written while a graph is captured."},
    {"read", raising<&read>, METH_VARARGS, "Call a function that only reads the memory of a tensor."},
    {"forget", raising<&forget>, METH_O, "Drop the entries of weights and the references to them."},
    {"prepacked", raising<&prepacked>, METH_VARARGS, "Return a prepacked weight, None if it cannot be prepacked, or the number of the reason why it cannot be cached."},
    {"register_recipe_op", raising<&register_recipe_op>, METH_VARARGS, "Register the kernel of an operator in compiled code."},
    {"forget_actions", raising<&run<&forget_actions>>, METH_NOARGS, "Drop the actions that are kept for calls by a recipe, on all threads."},
    {"set_recomputing", raising<&set_recomputing>, METH_O, "Set the backward that recomputes a forward on this thread."},
    {"observing", raising<&observing>, METH_NOARGS, "Return what an observer is bound to."},
    {"bind", raising<&bind>, METH_O, "Check that Python numbers names as C++ does, and set the functions that the engine calls."},
    {nullptr, nullptr, 0, nullptr}};

PyMethodDef store_methods[] = {
    {"clear", raising<&clear_store>, METH_NOARGS, "Drop all entries: casts and prepacked weights."},
    {"statistics", raising<&store_statistics>, METH_NOARGS, "Return its statistics."},
    {"entries", raising<&store_entries>, METH_NOARGS, "Return its valid entries."},
    {"adopt", raising<&store_adopt>, METH_VARARGS, "Add an entry that was made earlier."},
    {nullptr, nullptr, 0, nullptr}};

PyMethodDef capture_methods[] = {
    {"end", raising<&run_method<&GraphCapture::end>>, METH_NOARGS, "Note that the capture has ended."},
    {"note_replay", raising<&run_method<&GraphCapture::note_replay>>, METH_NOARGS, "Drop what is cached of the weights that a replay writes."},
    {nullptr, nullptr, 0, nullptr}};

PyMethodDef registrations_methods[] = {
    {"impl", raising<&registrations_impl>, METH_VARARGS, "Install the kernel of an op."},
    {"cached_cast", raising<&registrations_cached_cast>, METH_O, "Install the kernels of polycast::cached_cast."},
    {"fallthrough", raising<&run_method<&KernelRegistrations::fallthrough>>, METH_NOARGS, "Install a fallthrough for other ops."},
    {"remove", raising<&run_method<&KernelRegistrations::remove>>, METH_NOARGS, "Remove the kernels."},
    {nullptr, nullptr, 0, nullptr}};

PyMethodDef no_methods[] = {{nullptr, nullptr, 0, nullptr}};

PyModuleDef definition = {PyModuleDef_HEAD_INIT, "polycast_native", "The native engine.", -1, functions};

}  // namespace

PyMODINIT_FUNC PyInit_polycast_native() {
  PyObject* const module = PyModule_Create(&definition);
  if (module == nullptr || !add_class<const Override, &make_override>(module, "polycast_native.Override", no_methods) ||
      !add_class<UserStore, &make_store>(module, "polycast_native.UserStore", store_methods) ||
      !add_class<GraphCapture>(module, "polycast_native.GraphCapture", capture_methods) ||
      !add_class<KernelRegistrations, &make_registrations>(module, "polycast_native.KernelRegistrations", registrations_methods)) {
    Py_XDECREF(module);
    return nullptr;
  }
  return module;
}
