// The observer's Python module: what the native engine and torch show of what runs, counted while something observes.
//
// Compiled as one unit with the files it includes. From the bottom: counts.h, flops.h, table.h, recorder.h, watch.h; then what is seen:
// entries.h, nodes.h, op_begins.h, op_ends.h, casts.h, running.h; and reading.h. Each says what it owns and which lock it takes.

#include <algorithm>
#include <atomic>
#include <memory>
#include <mutex>
#include <set>

#include "casts.h"
#include "entries.h"
#include "forks.h"
#include "op_infos.h"
#include "python.h"
#include "reading.h"
#include "running.h"
#include "watch.h"

namespace {

void take_locks() {
  const auto take = &AtForkLock::take;
  take(OpInfos::all().mutex());
  take(Recorders::running().mutex);
  for (const auto& recorder : Recorders::running().recorders) {
    take(recorder->mutex);
    take(recorder->of_ended_threads.mutex);
    for (const auto& [number, table] : recorder->tables) {
      take(table->mutex);
    }
  }
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

// enter_module(module), leave_module(module): around what the module computes.
template <bool enters>
PyObject* pass_module(PyObject*, PyObject* module) {
  if (Watch* const watch = refreshed_watch(recorders_of_all.load(std::memory_order_relaxed) != 0)) {
    for (const auto& table : watch->tables) {
      const int number = table->recorder->module_of(module);
      if (number != kNoModule) {
        enters ? table->enter_module(number) : table->leave_module(number);
      }
    }
  }
  return Py_NewRef(Py_None);
}

// The op that the thread is in.
ObservedOp* observed_op_here() { return watch_of_thread == nullptr ? nullptr : watch_of_thread->op; }

// note_compiling(begins): what runs on this thread until the compiler is done is not the program's.
PyObject* note_compiling(PyObject*, PyObject* begins) {
  if (Watch* const watch = watch_of_thread) {
    watch->compiling = std::max(0, watch->compiling + (begins == Py_True ? 1 : -1));
  }
  return Py_NewRef(Py_None);
}

// note_low_bit(recipe, declined): what became of the op that the thread is in, which a recipe was to compute; declined is empty where it
// did.
PyObject* note_low_bit(PyObject*, PyObject* arguments) {
  static auto* const known = new std::set<Outcome>();  // guarded by the GIL
  const char *recipe, *declined;
  parse(arguments, "ss", &recipe, &declined);
  if (ObservedOp* const op = observed_op_here()) {
    op->outcome = &*known->emplace(recipe, declined).first;
  }
  return Py_NewRef(Py_None);
}

// Check that an enumeration has the names, in order, that Python has for it.
template <size_t count>
void check_names(PyObject* names, const char* const (&expected)[count]) {
  const auto found = each_of(names, &string_of);
  TORCH_CHECK(
      std::equal(found.begin(), found.end(), std::begin(expected), std::end(expected)), "the names of an enumeration differ from ",
      "those in observer/recorder.py");
}

// bind(engine, call_stack, call_site, chain_kinds, nonfinite): the engine to observe, functions in Python, names of enumerations
PyObject* bind(PyObject*, PyObject* arguments) {
  static const Observer observer{&note_entry, &note_exit, &note_cast};
  PyObject *capsule, *stack, *site, *chain_kinds, *nonfinite;
  parse(arguments, "OOOOO", &capsule, &stack, &site, &chain_kinds, &nonfinite);
  check_names(chain_kinds, kChainKinds);
  check_names(nonfinite, kNonFinitePolicies);
  const auto* const observed = static_cast<const Engine*>(PyCapsule_GetPointer(capsule, kObserving));
  if (observed == nullptr) {
    raise();
  }
  engine = *observed;
  keep(call_stack, stack);
  keep(call_site, site);
  AtForkLock::have(&take_locks);
  engine.tell(observer);
  return Py_NewRef(Py_None);
}

PyMethodDef functions[] = {
    {"enter_module", &raising<&pass_module<true>>, METH_O, "A module begins to compute."},
    {"leave_module", &raising<&pass_module<false>>, METH_O, "A module has computed."},
    {"note_compiling", &raising<&note_compiling>, METH_O, "A compiler begins, or is done."},
    {"note_low_bit", &raising<&note_low_bit>, METH_VARARGS, "A recipe was to compute an op."},
    {"bind", &raising<&bind>, METH_VARARGS, "Observe an engine."},
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

PyModuleDef definition = {PyModuleDef_HEAD_INIT, "polycast_observer", "The native engine's observer.", -1, functions};

}  // namespace

PyMODINIT_FUNC PyInit_polycast_observer() {
  PyObject* const module = PyModule_Create(&definition);
  if (module == nullptr || !add_class<Recorder, &make_recorder>(module, "polycast_observer.Recorder", recorder_methods)) {
    Py_XDECREF(module);
    return nullptr;
  }
  return module;
}
