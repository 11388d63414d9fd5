// The observer's Python module. It counts what the native engine and torch run.
//
// Compiled as one unit with the files that it includes. From the bottom: numerics_counts.h, counts.h, values.h, flops.h, op_infos.h,
// thread_record.h, recorder.h and thread_state.h hold the counts; nodes.h, entered_regions.h, lost_products.h, calls_to_python.h,
// nonfinite.h, numerics.h, op_begins.h, op_ends.h, callbacks.h and casts.h make them; reading.h returns them.

#include <set>

#include "callbacks.h"
#include "casts.h"
#include "entered_regions.h"
#include "forks.h"
#include "extension.h"
#include "reading.h"

namespace {

void acquire_locks() {
  const auto acquire = &AtForkLock::acquire;
  acquire(OpInfos::all().mutex());
  acquire(Recorders::running().mutex);
  for (const auto& recorder : Recorders::running().recorders) {
    acquire(recorder->mutex);
    acquire(recorder->of_ended_threads.mutex);
    for (const auto& [number, record] : recorder->records) {
      acquire(record->mutex);
    }
  }
}

// Recorder(all_threads, timing, nonfinite, stacks, numerics)
PyObject* make_recorder(PyTypeObject*, PyObject* arguments, PyObject*) {
  int all_threads, timing, nonfinite, stacks, numerics;
  parse(arguments, "ppipp", &all_threads, &timing, &nonfinite, &stacks, &numerics);
  return Holder<Recorder>::wrap(std::make_shared<Recorder>(all_threads != 0, timing != 0, nonfinite, stacks != 0, numerics != 0));
}

PyObject* recorder_start(PyObject* self, PyObject*) {
  start_recorder(Holder<Recorder>::unwrap(self));
  return Py_NewRef(Py_None);
}

PyObject* recorder_stop(PyObject* self, PyObject*) {
  stop_recorder(Holder<Recorder>::unwrap(self));
  return Py_NewRef(Py_None);
}

PyObject* recorder_read(PyObject* self, PyObject*) { return read(*Holder<Recorder>::unwrap(self)); }

PyObject* recorder_nonfinite_count(PyObject* self, PyObject*) {
  return PyLong_FromUnsignedLongLong(Holder<Recorder>::unwrap(self)->nonfinite_seen());
}

// add_module(address, number)
PyObject* recorder_add_module(PyObject* self, PyObject* arguments) {
  unsigned long long address;
  int number;
  parse(arguments, "Ki", &address, &number);
  Holder<Recorder>::unwrap(self)->add_module(address, number);
  return Py_NewRef(Py_None);
}

// forget_module(address)
PyObject* recorder_forget_module(PyObject* self, PyObject* address) {
  Holder<Recorder>::unwrap(self)->forget_module(PyLong_AsUnsignedLongLong(address));
  return Py_NewRef(Py_None);
}

// add_parameter(parameter, module)
PyObject* recorder_add_parameter(PyObject* self, PyObject* arguments) {
  PyObject* parameter;
  int module;
  parse(arguments, "Oi", &parameter, &module);
  Holder<Recorder>::unwrap(self)->add_parameter(tensor_of(parameter), module);
  return Py_NewRef(Py_None);
}

// enter_module(module), leave_module(module): before and after a call of the module
template <bool enters>
PyObject* pass_module(PyObject*, PyObject* module) {
  if (ThreadState* const state = state_of_observed_thread()) {
    for (const auto& record : state->records) {
      const int number = record->recorder->module_of(module);
      if (number != kNoModule) {
        enters ? record->enter_module(number) : record->leave_module(number);
      }
    }
  }
  return Py_NewRef(Py_None);
}

// note_uncounted(begins): ops on this thread are not counted until this is called with False as often as with True
PyObject* note_uncounted(PyObject*, PyObject* begins) {
  if (ThreadState* const state = state_of_thread) {
    state->uncounted = std::max(0, state->uncounted + (begins == Py_True ? 1 : -1));
  }
  return Py_NewRef(Py_None);
}

// note_recipe(recipe, declined): the outcome for the op that the thread is in
PyObject* note_recipe(PyObject*, PyObject* arguments) {
  static auto* const known = new std::set<Outcome>();  // guarded by the GIL
  const char *recipe, *declined;
  parse(arguments, "ss", &recipe, &declined);
  if (state_of_thread != nullptr && state_of_thread->op != nullptr) {
    state_of_thread->op->outcome = &*known->emplace(recipe, declined).first;
  }
  return Py_NewRef(Py_None);
}

// Check that an enumeration has the names, in order, that Python has for it.
template <size_t count>
void check_names(PyObject* names, const char* const (&expected)[count]) {
  const auto found = convert_items(names, &string_of);
  TORCH_CHECK(
      std::equal(found.begin(), found.end(), std::begin(expected), std::end(expected)), "the names of an enumeration differ from ",
      "those in observer/recorder.py");
}

// bind(engine, call_stack, call_site, captures, rows, chain_kinds, nonfinite): the engine to observe, functions in Python, the classes of
// rows by name, and names of enumerations
PyObject* bind(PyObject*, PyObject* arguments) {
  static const Observer observer{&note_entry, &note_exit, &note_cast};
  PyObject *capsule, *stack, *site, *captures, *rows, *chain_kinds, *nonfinite;
  parse(arguments, "OOOOO!OO", &capsule, &stack, &site, &captures, &PyDict_Type, &rows, &chain_kinds, &nonfinite);
  check_names(chain_kinds, kChainKinds);
  check_names(nonfinite, kNonFinitePolicies);
  const auto* const observed = static_cast<const Engine*>(PyCapsule_GetPointer(capsule, kObserving));
  if (observed == nullptr) {
    throw_python_error();
  }
  engine = *observed;
  set_reference(call_stack, stack);
  set_reference(call_site, site);
  set_reference(backend_captures, captures);
  set_reference(row_classes, rows);
  AtForkLock::install(&acquire_locks);
  engine.set_observer(observer);
  return Py_NewRef(Py_None);
}

PyMethodDef functions[] = {
    {"enter_module", raising<&pass_module<true>>, METH_O, "Note that a module is called."},
    {"leave_module", raising<&pass_module<false>>, METH_O, "Note that the call has ended."},
    {"note_uncounted", raising<&note_uncounted>, METH_O, "Stop counting this thread's ops, or resume."},
    {"note_recipe", raising<&note_recipe>, METH_VARARGS, "Note what a recipe did with an op."},
    {"bind", raising<&bind>, METH_VARARGS, "Bind to an engine."},
    {nullptr, nullptr, 0, nullptr}};

PyMethodDef recorder_methods[] = {
    {"start", raising<&recorder_start>, METH_NOARGS, "Start to count."},
    {"stop", raising<&recorder_stop>, METH_NOARGS, "Stop counting."},
    {"read", raising<&recorder_read>, METH_NOARGS, "Return the counts."},
    {"nonfinite_count", raising<&recorder_nonfinite_count>, METH_NOARGS, "Count the ops that made inf or nan."},
    {"add_module", raising<&recorder_add_module>, METH_VARARGS, "Add a module."},
    {"forget_module", raising<&recorder_forget_module>, METH_O, "Forget a module."},
    {"add_parameter", raising<&recorder_add_parameter>, METH_VARARGS, "Add a parameter."},
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
