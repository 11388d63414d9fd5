// The native engine's Python module: the semantics of the reference engine at the speed of torch's own kernels.
//
// Compiled as one unit with the files it includes: parsing torch's headers is most of the build, and is done once so. From
// the bottom: store.h, tally.h, regions.h, methods.h, observe.h, reading.h, casting.h, kernels.h. Each says what it owns and which
// lock it takes.

#include <torch/csrc/utils/pybind.h>

#ifndef _WIN32
#include <pthread.h>
#endif

#include <algorithm>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <unordered_map>
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

PyMethodDef functions[] = {
    {"enter",
     reinterpret_cast<PyCFunction>(reinterpret_cast<void (*)()>(&enter)),
     METH_FASTCALL,
     "Enter a region on this thread."},
    {"leave",
     reinterpret_cast<PyCFunction>(reinterpret_cast<void (*)()>(&leave)),
     METH_FASTCALL,
     "Leave the innermost region that an owner entered on this thread."},
    {"excluded_keys", &excluded_keys, METH_NOARGS, "Return the dispatch keys that this thread excludes."},
    {"dtype", &dtype, METH_O, "Return the fast dtype of a device on this thread."},
    {"enter_module", &pass_module<true>, METH_O, "A module begins to compute."},
    {"leave_module", &pass_module<false>, METH_O, "A module has computed."},
    {nullptr, nullptr, 0, nullptr}};

}  // namespace

PYBIND11_MODULE(TORCH_EXTENSION_NAME, module) {
  py::class_<Overlay, std::shared_ptr<Overlay>>(module, "Overlay", py::module_local())
      .def(py::init<const std::unordered_map<int64_t, int>&>());
  py::class_<Store, std::shared_ptr<Store>>(module, "Store", py::module_local())
      .def(
          py::init([](std::optional<size_t> max_bytes, bool verify) {
            return std::make_shared<Store>(max_bytes, verify);
          }))
      .def("clear", &Store::clear, py::call_guard<py::gil_scoped_release>())
      .def("statistics", [](Store& store) {
        const Statistics now = store.statistics();
        return py::make_tuple(
            now.casts, now.cast_bytes, now.hits, now.misses, now.evictions, now.packings, now.packed_bytes);
      });
  py::class_<Library>(module, "Library", py::module_local())
      .def(py::init<const std::string&, const std::string&>())
      .def("impl", &Library::impl)
      .def("kept_cast", &Library::kept_cast)
      .def("fallthrough", &Library::fallthrough)
      .def("remove", &Library::remove);
  py::class_<Recorder, std::shared_ptr<Recorder>>(module, "Recorder", py::module_local())
      .def(py::init<bool, bool, int, bool>())
      .def("start", &start_recorder)
      .def("stop", &stop_recorder)
      .def("read", &Reading::of)
      .def("nonfinite_count", &Recorder::nonfinite_seen)
      .def("add_module", &Recorder::add_module)
      .def("forget_module", &Recorder::forget_module)
      .def("add_parameter", &Recorder::add_parameter);
  module.def("note_compiling", &note_compiling);
  module.def("note_overlay", &note_overlay);
  module.def("note_cast", &note_python_cast);
  module.def("note_entry", [](uintptr_t id, const py::object& device, bool enabled, py::object dtype) {
    note_entry(
        reinterpret_cast<const void*>(id), device_of(device.ptr()), enabled,
        reinterpret_cast<THPDtype*>(dtype.ptr())->scalar_type);
  });
  module.def("note_exit", [](uintptr_t id) { note_exit(reinterpret_cast<const void*>(id)); });
  module.def("watch_writes", [](const std::vector<std::string>& ops, const std::vector<std::string>& collectives) {
    announcers = std::make_unique<Announcers>(ops, collectives);
  });
  module.def("unwatch_writes", [] { announcers.reset(); });
  module.def("note_writes", [](const std::vector<Tensor>& tensors) {
    Storages written;
    for (const Tensor& tensor : tensors) {
      if (tensor.has_storage()) {
        written.insert(storage_of(tensor));
      }
    }
    announce(written);
  });
  module.def("packing_of", &packing_of);
  module.def("region_methods", &region_methods);
  module.def("last", &last);
  module.def("innermost", &innermost);
  module.def("nesting", &nesting);
  module.def("open_regions", &open_regions);
  module.def("clear_own_casts", &clear_own_casts, py::call_guard<py::gil_scoped_release>());
  module.def(
      "bind",
      [](const std::vector<std::string>& policies, py::object overlay,
         py::object store,
         py::object rewritten,
         py::object error,
         std::string text,
         py::object stack,
         py::object place,
         py::object of_traced,
         py::object by_identity,
         py::object low_bit) {
        TORCH_CHECK(std::equal(policies.begin(), policies.end(), kPolicyNames.begin(), kPolicyNames.end()));
        native_overlay = overlay.release().ptr();
        native_store = store.release().ptr();
        storages_are_rewritten = rewritten.release().ptr();
        stack_now = stack.release().ptr();
        place_now = place.release().ptr();
        kept_cast_of_traced = of_traced.release().ptr();
        store_by_identity = by_identity.release().ptr();
        perform_low_bit = low_bit.release().ptr();
        hold_locks_over_forks();
        stale_weight_error = error.release().ptr();
        stale_weight_message = std::move(text);
      });
  if (PyModule_AddFunctions(module.ptr(), functions) != 0) {
    throw py::error_already_set();
  }
}
