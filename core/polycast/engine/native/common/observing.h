// The interface between the native engine and its observer, a library that is loaded at the first observation and never unloaded.
//
// Both are compiled with this file, and use nothing else of each other.

#pragma once

#include <Python.h>

#include "conversions.h"
#include "tensors.h"

namespace {

// The engine's view of an observed call of an op.
struct ObservedCall {
  bool is_timed = false;
  // Calls `cast`, and counts the floats while they are in the processor's cache; null: casts are not counted. Called on torch's threads.
  void (*cast_floats)(
      ObservedCall& call, polycast::CastFloats cast, const float* from, uint16_t* to, int64_t count, ScalarType dtype) = nullptr;
};

// The origin of an input's cast.
struct SeenCast {
  bool of_weight;
  bool looked_for = false;        // in a cache
  bool is_new = true;             // and not found there
  bool in_torchs_region = false;  // whose cache does not show whether the cast was found
  double seconds = 0;
};

// The functions of the observer.
struct Observer {
  // An object in Python enters a region, identified by its address. Called with the GIL held; Python may run, and raise.
  void (*enter_region)(const void* region, PyObject* owner, DeviceType device, bool enabled, ScalarType fast);
  void (*leave_region)(const void* region);
  void (*note_cast)(ObservedCall& op, const Tensor& tensor, const Tensor& cast, const SeenCast& seen);
};

// The functions of the engine.
struct Engine {
  // Return where the engine reads the thread's observed op. Valid until the thread ends.
  ObservedCall** (*observed_op)();
  // Return the override of the thread's region, as an address; null: none.
  const void* (*override)(DeviceType device);
  // Return a Python tuple of that override and an object that keeps its address valid; null: the region has ended. Called with the GIL
  // held.
  PyObject* (*hold_override)(DeviceType device, const void* override);
  // Let the next holder of the GIL destroy an object; destroy such objects now, with the GIL held.
  void (*defer_destruction)(std::shared_ptr<void> object);
  void (*destroy_deferred)();
  // Return the length of the log of writes that increment no version counter.
  uint64_t (*count_of_writes)();
  void (*set_observer)(const Observer& observer);
};

constexpr const char* kObserving = "polycast_native.observing";  // the name of a capsule with an Engine

}  // namespace
