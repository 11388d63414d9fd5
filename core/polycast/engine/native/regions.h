// The regions that a thread is in, and the state machine that enters and leaves them; reference/state_machine.py is the same
// in Python, to be read first.
//
// Owns the frames of each thread, which hold what a region set and the state that was there before it. The truth for enabled
// and dtype stays in torch's own thread-local state.
//
// Locks. None: what a thread is in is its own. Frames hold Python objects, and are touched with the GIL held; what kernels
// read of them (DeviceRegion) is not Python's, and is read without it. The count of open regions is atomic.

#pragma once

#include <ATen/ATen.h>
#include <ATen/PythonTorchFunctionTLS.h>
#include <ATen/autocast_mode.h>
#include <torch/csrc/Dtype.h>
#include <torch/csrc/DynamicTypes.h>
#include <torch/csrc/Exceptions.h>
#include <torch/csrc/utils/pybind.h>
#include <torch/csrc/utils/python_strings.h>

#include <array>
#include <atomic>
#include <memory>
#include <string>
#include <unordered_map>
#include <utility>
#include <vector>

#include "store.h"

namespace {  // all is one unit, binding.cpp

using c10::DeviceType;

// The order is that of polycast.CastPolicy, which bind() checks.
// kNone is that of an op that is in an overlay and not in the table, outside regions with that overlay.
enum class Policy : int8_t { kNone = -1, kLowerPrecisionFp, kFp32, kFp32SetOptDtype, kFp32AppendDtype, kPromote, kBanned, kPassthrough };

constexpr std::array<const char*, 7> kPolicyNames = {
    "LOWER_PRECISION_FP", "FP32", "FP32_SET_OPT_DTYPE", "FP32_APPEND_DTYPE", "PROMOTE", "BANNED", "PASSTHROUGH"};

// Set by bind(); they live as long as the process.
PyObject* native_overlay = nullptr;  // this engine's Overlay for one of engine/state.py
PyObject* native_store = nullptr;    // this engine's Store for a WeightCache

// The policies that a region lays over the table, by the number that an op has in this process.
struct Overlay {
  std::unordered_map<int64_t, Policy> policies;
};

// A region that the thread is in; see Frame in state_machine.py.
struct Frame {
  py::object owner, settings, overlay, cache;
  std::shared_ptr<const Overlay> policies;
  std::shared_ptr<Store> store;
  DeviceType device;
  bool enabled_before, cache_enabled_before;
  ScalarType dtype_before;
  int below;  // the position of the frame of the same device under this one, or -1
  int depth;
};

// How many regions for each device all threads are in.
std::array<std::atomic<int>, c10::COMPILE_TIME_MAX_DEVICE_TYPES> open_count{};

std::atomic<int>& open_count_of(DeviceType device) { return open_count[static_cast<size_t>(device)]; }

struct DeviceRegion {
  int innermost = -1;
  const Overlay* overlay = nullptr;  // both are held by the innermost frame
  Store* store = nullptr;
};

// What a thread is in. Frames are Python's as much as ours, and are touched with the GIL only; the rest without it too.
struct ThreadRegions {
  std::vector<Frame> frames;
  std::array<DeviceRegion, c10::COMPILE_TIME_MAX_DEVICE_TYPES> devices;
  std::shared_ptr<Store> own;
  bool ends_with_thread = false;

  // A thread that ends inside a region is in it no more. Python says so in time, with the GIL held: when it drops what it
  // keeps for the thread, and before it tells who waits for the thread that it has ended.
  void end_with_thread() {
    if (ends_with_thread) {
      return;
    }
    const py::capsule end(this, [](void* regions) { static_cast<ThreadRegions*>(regions)->end(); });
    if (PyDict_SetItemString(PyThreadState_GetDict(), "polycast_regions", end.ptr()) != 0) {
      throw py::error_already_set();
    }
    ends_with_thread = true;
  }

  void end() {
    ends_with_thread = false;
    devices = {};
    for (const Frame& frame : std::exchange(frames, {})) {
      --open_count_of(frame.device);
    }
  }

  DeviceRegion& of(DeviceType device) { return devices[static_cast<size_t>(device)]; }

  void set_innermost(DeviceType device, int position) {
    const Frame* frame = position < 0 ? nullptr : &frames[position];
    of(device) = {position, frame ? frame->policies.get() : nullptr, frame ? frame->store.get() : nullptr};
  }

  std::shared_ptr<Store> own_store() {
    if (own == nullptr) {
      own = std::make_shared<Store>(true, std::nullopt, false);
    }
    return own;
  }
};

thread_local ThreadRegions regions;

// The device type that a string names. Called with the GIL held.
DeviceType device_of(PyObject* name) {
  static auto* const known = new std::unordered_map<std::string, DeviceType>();
  static PyObject* last = nullptr;  // the string asked for last, held; most ask for one and the same again
  static DeviceType type;
  if (name == last) {
    return type;
  }
  std::string text = THPUtils_unpackString(name);
  auto found = known->find(text);
  if (found == known->end()) {
    const auto parsed = c10::Device(text).type();
    found = known->emplace(std::move(text), parsed).first;
  }
  type = found->second;
  Py_XSETREF(last, Py_NewRef(name));
  return type;
}

// enter(owner, settings) -> bool; see StateMachine in engine/state.py.
PyObject* enter(PyObject*, PyObject* const* args, Py_ssize_t count) {
  HANDLE_TH_ERRORS
  TORCH_INTERNAL_ASSERT(count == 2 && PyTuple_Check(args[1]) && PyTuple_GET_SIZE(args[1]) == 7);
  PyObject* const* const settings = &PyTuple_GET_ITEM(args[1], 0);
  const auto device = device_of(settings[0]);
  const auto dtype = reinterpret_cast<THPDtype*>(settings[2])->scalar_type;
  regions.end_with_thread();
  Frame frame;
  frame.owner = py::reinterpret_borrow<py::object>(args[0]);
  frame.settings = py::reinterpret_borrow<py::object>(args[1]);
  frame.overlay = py::reinterpret_borrow<py::object>(settings[4]);
  frame.cache = py::reinterpret_borrow<py::object>(settings[5]);
  const bool inherits = settings[6] == Py_False && regions.of(device).innermost >= 0;
  if (!frame.overlay.is_none()) {
    if (inherits) {
      frame.overlay = frame.overlay.attr("over")(regions.frames[regions.of(device).innermost].overlay);
    }
    frame.policies = py::cast<std::shared_ptr<Overlay>>(py::handle(native_overlay)(frame.overlay));
  }
  if (!frame.cache.is_none()) {
    frame.store = py::cast<std::shared_ptr<Store>>(py::handle(native_store)(frame.cache));
  }
  frame.device = device;
  frame.below = regions.of(device).innermost;
  frame.depth = 1;
  if (frame.below >= 0) {
    const Frame& below = regions.frames[frame.below];
    frame.depth += below.depth;
    if (inherits && frame.policies == nullptr) {
      frame.policies = below.policies;
      frame.overlay = below.overlay;
    }
    if (inherits && frame.store == nullptr) {
      frame.store = below.store;
      frame.cache = below.cache;
    }
  }
  if (frame.store == nullptr) {
    frame.store = regions.own_store();
  }
  frame.enabled_before = at::autocast::is_autocast_enabled(device);
  frame.dtype_before = at::autocast::get_autocast_dtype(device);
  frame.cache_enabled_before = at::autocast::is_autocast_cache_enabled();
  regions.frames.push_back(std::move(frame));
  regions.set_innermost(device, static_cast<int>(regions.frames.size()) - 1);
  ++open_count_of(device);
  at::autocast::set_autocast_enabled(device, settings[1] == Py_True);
  at::autocast::set_autocast_dtype(device, dtype);
  if (settings[3] != Py_None) {
    at::autocast::set_autocast_cache_enabled(settings[3] == Py_True);
  }
  at::autocast::increment_nesting();
  return PyBool_FromLong(at::impl::torch_function_mode_enabled());
  END_HANDLE_TH_ERRORS
}

// Take a frame out that others are above: what it would have restored passes to the next above it.
void pass_on(int position) {
  auto& frames = regions.frames;
  const Frame frame = std::move(frames[position]);
  frames.erase(frames.begin() + position);
  frames[position].cache_enabled_before = frame.cache_enabled_before;
  bool passed = false;
  for (size_t i = position; i < frames.size(); ++i) {
    Frame& other = frames[i];
    if (other.device == frame.device) {
      --other.depth;
      if (!passed) {
        passed = true;
        other.enabled_before = frame.enabled_before;
        other.dtype_before = frame.dtype_before;
        other.below = frame.below;
        continue;
      }
    }
    if (other.below > position) {
      --other.below;
    }
  }
  for (size_t i = 0; i < regions.devices.size(); ++i) {
    const int innermost = regions.devices[i].innermost;
    if (innermost > position) {
      regions.devices[i].innermost = innermost - 1;
    }
  }
  if (!passed) {
    at::autocast::set_autocast_enabled(frame.device, frame.enabled_before);
    at::autocast::set_autocast_dtype(frame.device, frame.dtype_before);
    regions.set_innermost(frame.device, frame.below);
  }
}

// leave(owner) -> bool | None; see StateMachine in engine/state.py.
PyObject* leave(PyObject*, PyObject* owner) {
  HANDLE_TH_ERRORS
  auto& frames = regions.frames;
  int position = static_cast<int>(frames.size()) - 1;
  while (position >= 0 && frames[position].owner.ptr() != owner) {
    --position;
  }
  if (position < 0) {
    Py_RETURN_NONE;
  }
  const auto device = frames[position].device;
  if (position == static_cast<int>(frames.size()) - 1) {
    const Frame frame = std::move(frames.back());
    frames.pop_back();
    at::autocast::set_autocast_enabled(frame.device, frame.enabled_before);
    at::autocast::set_autocast_dtype(frame.device, frame.dtype_before);
    at::autocast::set_autocast_cache_enabled(frame.cache_enabled_before);
    regions.set_innermost(frame.device, frame.below);
  } else {
    pass_on(position);
  }
  --open_count_of(device);
  if (at::autocast::decrement_nesting() == 0) {
    at::autocast::clear_cache();
  }
  if (frames.empty() && regions.own != nullptr) {
    regions.own->end_region();
  }
  return PyBool_FromLong(at::impl::torch_function_mode_enabled());
  END_HANDLE_TH_ERRORS
}

// dtype(device_type) -> torch.dtype: that of autocast on this thread.
PyObject* dtype(PyObject*, PyObject* device_type) {
  HANDLE_TH_ERRORS
  auto* const found = reinterpret_cast<PyObject*>(torch::getTHPDtype(at::autocast::get_autocast_dtype(device_of(device_type))));
  Py_INCREF(found);
  return found;
  END_HANDLE_TH_ERRORS
}

// (owner, settings) of the region that was entered last, or None.
py::object last() {
  if (regions.frames.empty()) {
    return py::none();
  }
  const Frame& frame = regions.frames.back();
  return py::make_tuple(frame.owner, frame.settings);
}

// (overlay, cache) of the innermost region for a device, or None.
py::object innermost(const py::object& device_type) {
  const int position = regions.of(device_of(device_type.ptr())).innermost;
  if (position < 0) {
    return py::none();
  }
  return py::make_tuple(regions.frames[position].overlay, regions.frames[position].cache);
}

int nesting(const py::object& device_type) {
  const int position = regions.of(device_of(device_type.ptr())).innermost;
  return position < 0 ? 0 : regions.frames[position].depth;
}

int open_regions(const py::object& device_type) { return open_count_of(device_of(device_type.ptr())); }

void clear_own_casts() {
  if (regions.own != nullptr) {
    regions.own->clear();
  }
}

}  // namespace
