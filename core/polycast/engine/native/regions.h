// The state machine that enters and leaves regions; reference/state_machine.py is the same in Python, to be read first.
//
// Owns what each thread has: its frames, and the casts of its regions. The truth for enabled and dtype stays in torch's own
// thread-local state.
//
// Locks. None: what a thread has is its own, and is touched with the GIL held.

#pragma once

#include <ATen/PythonTorchFunctionTLS.h>

#include <algorithm>
#include <array>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "autocast.h"
#include "frames.h"
#include "observed.h"
#include "python.h"
#include "region_casts.h"
#include "store.h"

namespace {  // all is one unit, binding.cpp

// Set by bind(); they live as long as the process.
PyObject* native_override = nullptr;  // this engine's Override for one of engine/state.py
PyObject* native_store = nullptr;    // this engine's Store for a WeightCache

// What a thread has: the frames of its regions, and their casts.
class ThreadRegions {
 public:
  explicit ThreadRegions(DeviceRegions* devices) : frames(devices, &casts) {}

  RegionCasts casts;
  Frames frames;

  // Take everything out, for the caller to free with the GIL held. The thread is in no region any more.
  std::shared_ptr<void> end() {
    auto remains = std::make_shared<Remains>();
    while (frames.newest() != nullptr) {
      remains->frames.push_back(frames.take_out(frames.newest()));
    }
    remains->casts = casts.take_all();
    return remains;
  }

 private:
  struct Remains {
    std::vector<std::unique_ptr<Frame>> frames;
    std::shared_ptr<void> casts;
  };
};

struct ThisThread {
  std::shared_ptr<ThreadRegions> regions;
  bool ends_in_time = false;

  // The thread ends, without the GIL.
  ~ThisThread() {
    if (regions != nullptr) {
      LeftBehind::things().leave(regions->end());
    }
  }
};

thread_local ThisThread this_thread;

// A thread that ends inside a region is in it no more. Python says so in time, with the GIL held: when it drops what it keeps
// for the thread, and before it tells who waits for the thread that it has ended. What happens after that (a destructor that
// enters a region) is left to be freed by others. In the child of a fork it drops what it keeps for other threads, too.
void end_with_thread() {
  auto ending = std::make_unique<std::shared_ptr<ThreadRegions>>(this_thread.regions);
  const Object capsule = Object::made(PyCapsule_New(ending.get(), nullptr, [](PyObject* gone) {
    const std::unique_ptr<std::shared_ptr<ThreadRegions>> owned(
        static_cast<std::shared_ptr<ThreadRegions>*>(PyCapsule_GetPointer(gone, nullptr)));
    if (this_thread.regions == *owned) {
      this_thread.ends_in_time = false;
    }
    (*owned)->end();
  }));
  ending.release();
  if (PyDict_SetItemString(PyThreadState_GetDict(), "polycast_regions", capsule.get()) != 0) {
    raise();
  }
  this_thread.ends_in_time = true;
}

// What the thread has. Called with the GIL held.
ThreadRegions& here() {
  if (!this_thread.ends_in_time) {
    if (this_thread.regions == nullptr) {
      this_thread.regions = std::make_shared<ThreadRegions>(&device_regions);
    }
    LeftBehind::things().free();  // of threads that have ended; this may run Python, which may enter regions
    if (!this_thread.ends_in_time) {
      end_with_thread();
    }
  }
  return *this_thread.regions;
}

// Lay the override of a new frame over the one below it, or over None. A program enters the same few again and again, so the last
// answers are kept. Called with the GIL held; runs Python where there is no answer yet.
void lay_over(Frame& frame, PyObject* below) {
  struct Answer {
    Object override, below, result;
    std::shared_ptr<const Override> policies;
  };
  static auto* const answers = new std::array<Answer, 16>();
  static size_t oldest = 0;
  const Answer* found = std::find_if(answers->begin(), answers->end(), [&](const Answer& answer) {
    return answer.override.get() == frame.override.get() && answer.below.get() == below;
  });
  Answer made;
  if (found == answers->end()) {
    Object result = below == Py_None ? frame.override : Object::made(PyObject_CallMethod(frame.override.get(), "over", "(O)", below));
    auto policies = Holder<const Override>::of(call(native_override, "(O)", result.get()).get());
    made = {frame.override, Object::of(below), std::move(result), std::move(policies)};
    std::swap(made, (*answers)[oldest]);  // what was there dies as we return
    found = &(*answers)[oldest];
    oldest = (oldest + 1) % answers->size();
  }
  frame.policies = found->policies;
  frame.override = found->result;
}

// Enter a region; see StateMachine in engine/state.py. Python may run before the state is changed, and not after it.
bool enter_region(PyObject* owner, PyObject* all_settings) {
  std::array<PyObject*, 7> settings;
  TORCH_INTERNAL_ASSERT(PyTuple_Size(all_settings) == static_cast<Py_ssize_t>(settings.size()));
  for (size_t i = 0; i < settings.size(); ++i) {
    settings[i] = PyTuple_GetItem(all_settings, static_cast<Py_ssize_t>(i));
  }
  const auto device = device_of(settings[0]);
  const auto dtype = dtype_of(settings[2]);
  ThreadRegions& regions = here();
  auto frame = std::make_unique<Frame>();
  frame->owner = Object::of(owner);
  frame->settings = Object::of(all_settings);
  frame->override = Object::of(settings[4]);
  frame->cache = Object::of(settings[5]);
  frame->device = device;
  const bool inherits = settings[6] == Py_False;
  if (!frame->override.is_none()) {
    const Frame* const below = inherits ? region_of(device).innermost : nullptr;
    const Object its = below == nullptr ? Object::of(Py_None) : below->override;  // Python may run, and the region end
    lay_over(*frame, its.get());
  }
  if (!frame->cache.is_none()) {
    frame->store = Holder<Store>::of(call(native_store, "(O)", frame->cache.get()).get());
  }
  if (const Observer* const told = observer.load(std::memory_order_relaxed)) {
    told->enter_region(frame.get(), owner, device, settings[1] == Py_True, dtype);
  }
  // Python may have run until here, and have entered and left regions; from here on it does not.
  if (const Frame* const below = region_of(device).innermost; below != nullptr && inherits) {
    if (frame->policies == nullptr) {
      frame->policies = below->policies;
      frame->override = below->override;
    }
    if (frame->store == nullptr) {
      frame->store = below->store;
      frame->cache = below->cache;
    }
  }
  frame->enabled_before = at::autocast::is_autocast_enabled(device);
  frame->dtype_before = at::autocast::get_autocast_dtype(device);
  frame->cache_enabled_before = at::autocast::is_autocast_cache_enabled();
  regions.frames.push(std::move(frame));
  at::autocast::set_autocast_enabled(device, settings[1] == Py_True);
  at::autocast::set_autocast_dtype(device, dtype);
  if (settings[3] != Py_None) {
    at::autocast::set_autocast_cache_enabled(settings[3] == Py_True);
  }
  at::autocast::increment_nesting();
  return at::impl::torch_function_mode_enabled();
}

// Leave a region; see StateMachine in engine/state.py. What a frame would have restored passes to the frame above it: the
// device's for the device, the thread's for the cache; where there is none it is restored. Python may run once it is.
std::optional<bool> leave_region(PyObject* owner) {
  Frame* const found = this_thread.regions == nullptr ? nullptr : this_thread.regions->frames.find(owner);
  if (found == nullptr) {
    return std::nullopt;
  }
  ThreadRegions& regions = *this_thread.regions;
  if (found->newer != nullptr) {
    found->newer->cache_enabled_before = found->cache_enabled_before;
  } else {
    at::autocast::set_autocast_cache_enabled(found->cache_enabled_before);
  }
  if (found->above != nullptr) {
    found->above->enabled_before = found->enabled_before;
    found->above->dtype_before = found->dtype_before;
  } else {
    at::autocast::set_autocast_enabled(found->device, found->enabled_before);
    at::autocast::set_autocast_dtype(found->device, found->dtype_before);
  }
  if (const Observer* const told = observer.load(std::memory_order_relaxed)) {
    told->leave_region(found);
  }
  // It is freed at the end, for that may run Python.
  const std::unique_ptr<Frame> frame = regions.frames.take_out(found);
  if (at::autocast::decrement_nesting() == 0) {
    // Who has the lock of torch's cache may wait for the GIL, to free a cast that Python has seen.
    const WithoutGil others_may_run;
    at::autocast::clear_cache();
  }
  if (regions.frames.newest() == nullptr) {
    InFlight::storages().forget_ended();
    regions.casts.end_region();
  }
  return at::impl::torch_function_mode_enabled();
}

// See Engine in observing.h.
PyObject* hold_override(DeviceType device, const void* override) {
  const Frame* const frame = region_of(device).innermost;
  if (frame == nullptr || frame->policies.get() != override) {
    return nullptr;
  }
  const Object held = frame->override;
  Object policies = Object::made(Holder<const Override>::make(frame->policies));
  return Object::made(Py_BuildValue("(ON)", held.get(), policies.release())).release();
}

// enter(owner, settings) -> bool
PyObject* enter(PyObject*, PyObject* const* arguments, Py_ssize_t count) {
  TORCH_INTERNAL_ASSERT(count == 2);
  return PyBool_FromLong(enter_region(arguments[0], arguments[1]));
}

// leave(owner) -> bool | None
//
// It takes its argument as enter() does: Python checks the depth of recursion for both or for none, so that what could be
// entered at the last depth can be left.
PyObject* leave(PyObject*, PyObject* const* arguments, Py_ssize_t count) {
  TORCH_INTERNAL_ASSERT(count == 1);
  const std::optional<bool> left = leave_region(arguments[0]);
  return left ? PyBool_FromLong(*left) : Py_NewRef(Py_None);
}

// dtype(device_type) -> torch.dtype: that of autocast on this thread.
PyObject* dtype(PyObject*, PyObject* device_type) {
  return Py_NewRef(python_dtype(at::autocast::get_autocast_dtype(device_of(device_type))));
}

// excluded_keys() -> int: the dispatch keys that this thread excludes, of which those of autocast say where it is off.
PyObject* excluded_keys(PyObject*, PyObject*) {
  return PyLong_FromUnsignedLongLong(c10::impl::tls_local_dispatch_key_set().excluded_.raw_repr());
}

// last() -> (owner, settings) of the region that was entered last, or None.
PyObject* last(PyObject*, PyObject*) {
  const Frame* const frame = this_thread.regions == nullptr ? nullptr : this_thread.regions->frames.newest();
  return frame == nullptr ? Py_NewRef(Py_None) : Py_BuildValue("(OO)", frame->owner.get(), frame->settings.get());
}

// innermost(device_type) -> (override, cache) of the innermost region for a device, or None.
PyObject* innermost(PyObject*, PyObject* device_type) {
  const Frame* const frame = region_of(device_of(device_type)).innermost;
  return frame == nullptr ? Py_NewRef(Py_None) : Py_BuildValue("(OO)", frame->override.get(), frame->cache.get());
}

// nesting(device_type) -> int
PyObject* nesting(PyObject*, PyObject* device_type) { return PyLong_FromLong(region_of(device_of(device_type)).depth); }

// open_regions(device_type) -> int: of all threads
PyObject* open_regions(PyObject*, PyObject* device_type) { return PyLong_FromLong(open_count_of(device_of(device_type))); }

// clear_own_casts(all_threads)
PyObject* clear_own_casts(PyObject*, PyObject* all_threads) {
  {
    const WithoutGil others_may_run;
    if (all_threads == Py_True) {
      Writes::log().add_all();
    }
    if (this_thread.regions != nullptr) {
      this_thread.regions->casts.clear();
    }
  }
  return Py_NewRef(Py_None);
}

}  // namespace
