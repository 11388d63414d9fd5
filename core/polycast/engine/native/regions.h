// The state machine that enters and leaves regions. Read reference/state_machine.py first: it is the same in Python.
//
// Owns the frames of each thread, and the casts of its regions. Whether autocast is enabled, and its dtype, stay in torch's
// thread-local state. Locks: none; a thread's state is accessed by that thread, with the GIL held.

#pragma once

#include <ATen/PythonTorchFunctionTLS.h>

#include "autocast.h"
#include "deferred_destruction.h"
#include "extension.h"
#include "frames.h"
#include "observed.h"
#include "region_store.h"
#include "torchs_cache.h"
#include "user_store.h"

namespace {

// Set by bind().
PyObject* native_override = nullptr;  // returns the Override for one of engine/state.py
PyObject* native_store = nullptr;    // returns the UserStore of a WeightCache

// The fields of Settings in engine/state.py, in its order, which bind() checks.
struct Setting {
  enum Field { kDeviceType, kEnabled, kDtype, kCacheEnabled, kOverride, kCache, kAbsolute };
};

constexpr std::array<const char*, 7> kSettingNames = {
    "device_type", "enabled", "dtype", "cache_enabled", "override", "cache", "absolute"};
constexpr Py_ssize_t kSettings = kSettingNames.size();

class ThreadRegions {
 public:
  explicit ThreadRegions(DeviceRegions* devices) : frames(devices, &casts) {}

  RegionStore casts;
  Frames frames;

  // Remove all frames and casts, for the caller to free with the GIL held.
  std::shared_ptr<void> end() {
    auto removed = std::make_shared<Removed>();
    while (frames.newest() != nullptr) {
      removed->frames.push_back(frames.remove(frames.newest()));
    }
    removed->casts = casts.release();
    return removed;
  }

 private:
  struct Removed {
    std::vector<std::unique_ptr<Frame>> frames;
    std::shared_ptr<void> casts;
  };
};

struct ThisThread {
  std::shared_ptr<ThreadRegions> regions;
  bool ends_in_time = false;

  // Runs as the thread ends, without the GIL.
  ~ThisThread() {
    if (regions != nullptr) {
      only<DeferredDestruction>().add(regions->end());
    }
  }
};

thread_local ThisThread this_thread;

// Leave the thread's regions when it ends. Python drops the thread's dict with the GIL held, before join() returns; in the child
// of a fork also those of other threads. Regions that are entered later, in a destructor, are freed by another thread.
void leave_at_thread_end() {
  auto ending = std::make_unique<std::shared_ptr<ThreadRegions>>(this_thread.regions);
  const Object capsule = Object::steal(PyCapsule_New(ending.get(), nullptr, [](PyObject* gone) {
    const std::unique_ptr<std::shared_ptr<ThreadRegions>> owned(
        static_cast<std::shared_ptr<ThreadRegions>*>(PyCapsule_GetPointer(gone, nullptr)));
    if (this_thread.regions == *owned) {
      this_thread.ends_in_time = false;
    }
    (*owned)->end();
  }));
  ending.release();
  if (PyDict_SetItemString(PyThreadState_GetDict(), "polycast_regions", capsule.get()) != 0) {
    throw_python_error();
  }
  this_thread.ends_in_time = true;
}

ThreadRegions& regions_of_thread() {
  if (!this_thread.ends_in_time) {
    if (this_thread.regions == nullptr) {
      this_thread.regions = std::make_shared<ThreadRegions>(&device_regions);
    }
    only<DeferredDestruction>().run();  // of ended threads; may run Python, which may enter regions
    if (!this_thread.ends_in_time) {
      leave_at_thread_end();
    }
  }
  return *this_thread.regions;
}

// Set frame.override and frame.policies to the frame's override merged over `below` (None: not in a region). Memoizes the last results;
// may run Python otherwise.
void merge_override(Frame& frame, PyObject* below) {
  struct Merged {
    Object override, below, result;
    std::shared_ptr<const Override> policies;
  };
  static auto* const memo = new std::array<Merged, 16>();
  static size_t oldest = 0;
  const Merged* found = std::find_if(memo->begin(), memo->end(), [&](const Merged& merged) {
    return merged.override.get() == frame.override.get() && merged.below.get() == below;
  });
  Merged made;
  if (found == memo->end()) {
    Object result = below == Py_None ? frame.override : Object::steal(PyObject_CallMethod(frame.override.get(), "over", "(O)", below));
    auto policies = Holder<const Override>::unwrap(call(native_override, "(O)", result.get()).get());
    made = {frame.override, Object::borrow(below), std::move(result), std::move(policies)};
    std::swap(made, (*memo)[oldest]);  // the former result dies on return
    found = &(*memo)[oldest];
    oldest = (oldest + 1) % memo->size();
  }
  frame.policies = found->policies;
  frame.override = found->result;
}

// Return the store of a WeightCache, which it has from its first use on.
std::shared_ptr<UserStore> store_of(PyObject* cache) {
  static PyObject* const name = PyUnicode_InternFromString("_store");
  const Object found = Object::steal(PyObject_GetAttr(cache, name));
  return Holder<UserStore>::unwrap(found.is_none() ? call(native_store, "(O)", cache).get() : found.get());
}

// Enter a region; see StateMachine in engine/state.py. Python may run before the state is changed, and not after it.
bool enter_region(PyObject* owner, PyObject* all_settings) {
  std::array<PyObject*, kSettings> settings;
  TORCH_INTERNAL_ASSERT(PyTuple_Size(all_settings) == kSettings);
  for (size_t i = 0; i < settings.size(); ++i) {
    settings[i] = PyTuple_GetItem(all_settings, static_cast<Py_ssize_t>(i));
  }
  const auto device = device_of(settings[Setting::kDeviceType]);
  const auto dtype = dtype_of(settings[Setting::kDtype]);
  ThreadRegions& regions = regions_of_thread();
  auto frame = std::make_unique<Frame>();
  frame->owner = Object::borrow(owner);
  frame->settings = Object::borrow(all_settings);
  frame->override = Object::borrow(settings[Setting::kOverride]);
  frame->cache = Object::borrow(settings[Setting::kCache]);
  frame->device = device;
  const bool inherits = settings[Setting::kAbsolute] == Py_False;
  if (!frame->override.is_none()) {
    const Frame* const below = inherits ? region_of(device).innermost : nullptr;
    // Held here: Python may run, and the enclosing region end.
    const Object enclosing_override = below == nullptr ? Object::borrow(Py_None) : below->override;
    merge_override(*frame, enclosing_override.get());
  }
  if (!frame->cache.is_none()) {
    frame->store = store_of(frame->cache.get());
  }
  if (const Observer* const current = observer.load(std::memory_order_relaxed)) {
    current->enter_region(frame.get(), owner, device, settings[Setting::kEnabled] == Py_True, dtype);
  }
  // Python may have run until here, and entered or left regions; from here on it does not.
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
  ++region_changes;
  frame->kernel = NoAutocast::innermost();
  frame->enabled = settings[Setting::kEnabled] == Py_True;
  frame->enabled_before = at::autocast::is_autocast_enabled(device);
  frame->dtype_before = at::autocast::get_autocast_dtype(device);
  frame->cache_enabled_before = at::autocast::is_autocast_cache_enabled();
  regions.frames.push(std::move(frame));
  at::autocast::set_autocast_enabled(device, settings[Setting::kEnabled] == Py_True);
  at::autocast::set_autocast_dtype(device, dtype);
  if (settings[Setting::kCacheEnabled] != Py_None) {
    at::autocast::set_autocast_cache_enabled(settings[Setting::kCacheEnabled] == Py_True);
  }
  at::autocast::increment_nesting();
  return at::impl::torch_function_mode_enabled();
}

// Leave a region; see StateMachine in engine/state.py. The frame's state to restore passes to the frame or kernels above it, for the
// device, and to the next frame for the thread's cache; if there are none, it is restored. Python may run after that.
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
  ++region_changes;
  NoAutocast::pass_on(*found);
  if (const Observer* const current = observer.load(std::memory_order_relaxed)) {
    current->leave_region(found);
  }
  const std::unique_ptr<Frame> frame = regions.frames.remove(found);  // freed on return, which may run Python
  if (at::autocast::decrement_nesting() == 0) {
    TorchsCache::clear();
  }
  if (regions.frames.newest() == nullptr) {
    only<PendingCollectives>().drop_finished();
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
  Object policies = Object::steal(Holder<const Override>::wrap(frame->policies));
  return Object::steal(Py_BuildValue("(ON)", held.get(), policies.release())).release();
}

// enter(owner, settings) -> bool
PyObject* enter(PyObject*, PyObject* const* arguments, Py_ssize_t count) {
  TORCH_INTERNAL_ASSERT(count == 2);
  return PyBool_FromLong(enter_region(arguments[0], arguments[1]));
}

// leave(owner) -> bool | None
//
// METH_FASTCALL as enter(): Python then checks the recursion depth for both or neither, so that a region which could be entered
// can be left.
PyObject* leave(PyObject*, PyObject* const* arguments, Py_ssize_t count) {
  TORCH_INTERNAL_ASSERT(count == 1);
  const std::optional<bool> left = leave_region(arguments[0]);
  return left ? PyBool_FromLong(*left) : Py_NewRef(Py_None);
}

// acquire_for_fork(blocking) -> bool
PyObject* acquire_for_fork(PyObject*, PyObject* blocking) {
  return PyBool_FromLong(TorchsCache::acquire_for_fork(blocking == Py_True));
}

// dtype(device_type) -> torch.dtype
PyObject* dtype(PyObject*, PyObject* device_type) {
  return Py_NewRef(python_dtype(at::autocast::get_autocast_dtype(device_of(device_type))));
}

// excluded_keys() -> int
PyObject* excluded_keys(PyObject*, PyObject*) {
  return PyLong_FromUnsignedLongLong(c10::impl::tls_local_dispatch_key_set().excluded_.raw_repr());
}

// last() -> (owner, settings) | None
PyObject* last(PyObject*, PyObject*) {
  const Frame* const frame = this_thread.regions == nullptr ? nullptr : this_thread.regions->frames.newest();
  return frame == nullptr ? Py_NewRef(Py_None) : Py_BuildValue("(OO)", frame->owner.get(), frame->settings.get());
}

// innermost(device_type) -> (override, cache)
PyObject* innermost(PyObject*, PyObject* device_type) {
  const Frame* const frame = region_of(device_of(device_type)).innermost;
  return frame == nullptr ? Py_BuildValue("(OO)", Py_None, Py_None) : Py_BuildValue("(OO)", frame->override.get(), frame->cache.get());
}

// nesting(device_type) -> int
PyObject* nesting(PyObject*, PyObject* device_type) { return PyLong_FromLong(region_of(device_of(device_type)).depth); }

// open_regions(device_type) -> int
PyObject* open_regions(PyObject*, PyObject* device_type) { return PyLong_FromLong(open_count_of(device_of(device_type))); }

// runs_kernel(device_type) -> bool
PyObject* runs_kernel(PyObject*, PyObject* device_type) { return PyBool_FromLong(NoAutocast::runs(device_of(device_type))); }

// clear_own_casts(all_threads)
PyObject* clear_own_casts(PyObject*, PyObject* all_threads) {
  {
    const WithoutGil others_may_run;
    if (all_threads == Py_True) {
      only<InvalidationLog>().add_all();
    }
    if (this_thread.regions != nullptr) {
      this_thread.regions->casts.clear();
    }
  }
  return Py_NewRef(Py_None);
}

}  // namespace
