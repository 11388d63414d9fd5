// Between the engine and its observer, a library of its own that is built and loaded when something observes for the first time.
//
// Both are compiled with this file. Each knows the other by the functions here alone; the observer is never unloaded.

#pragma once

#include <Python.h>

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <memory>

#include "tensors.h"

namespace {

// A call of an op that is observed, as the engine sees it.
struct ObservedCall {
  bool is_timed = false;
};

// What the engine did where an observed op needed a cast.
struct SeenCast {
  bool of_weight;
  bool looked_for = false;  // where casts are kept
  bool made = true;
  bool in_torchs_region = false;  // whose cache does not tell whether it had it
  double seconds = 0;
};

// What the observer has the engine call.
struct Observer {
  // A region, known by its address, is entered by an object in Python. Called with the GIL held; Python may run, and raise.
  void (*enter_region)(const void* region, PyObject* owner, DeviceType device, bool enabled, ScalarType fast);
  void (*leave_region)(const void* region);
  void (*note_cast)(ObservedCall& op, const Tensor& tensor, const Tensor& cast, const SeenCast& seen);
};

// What the engine does for the observer.
struct Engine {
  // Where the thread's op has its address while one is observed; it stays where it is as long as the thread lives.
  ObservedCall** (*observed_op)();
  // The policies that the thread's region lays over the table, told by their address; null: none.
  const void* (*override)(DeviceType device);
  // Return the override in Python and what holds those policies, or null where the region has others by now. Called with the GIL
  // held.
  PyObject* (*hold_override)(DeviceType device, const void* override);
  // Have something freed by the next holder of the GIL that comes by; and free what was left so far, with the GIL held.
  void (*leave_behind)(std::shared_ptr<void> thing);
  void (*free_left_behind)();
  // How often something was written that counts no version.
  uint64_t (*count_of_writes)();
  void (*tell)(const Observer& observer);
};

constexpr const char* kObserving = "polycast_native.observing";  // the name of a capsule that has an Engine

}  // namespace
