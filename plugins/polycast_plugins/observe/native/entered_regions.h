// Counts the regions that are entered and left.
//
// Locks: a ThreadRecord's; none is held while Python may run.

#pragma once

#include "extension.h"
#include "thread_state.h"

namespace {

// The Python function. Set by bind(); it lives as long as the process.
PyObject* call_site = nullptr;

// Called with the GIL held.
void note_entry(const void* id, PyObject* owner, DeviceType device, bool enabled, ScalarType dtype) {
  ThreadState* const state = state_of_observed_thread();
  if (state == nullptr || state->records.empty()) {
    return;
  }
  const Object site = call(call_site, "(O)", owner);
  PyObject* where;
  int by_module_rule;
  parse(site.get(), "Up", &where, &by_module_rule);
  const RegionKey key{string_of(where), by_module_rule != 0, static_cast<int8_t>(device), enabled, dtype};
  for (const auto& record : state->records) {
    std::lock_guard<std::mutex> lock(record->mutex);
    ++record->totals.regions[key].entries;
  }
  state->regions.push_back({id, key});
}

// A region's ops and compiled code are counted for the region around it, too.
void note_exit(const void* id) {
  ThreadState* const state = state_of_thread;
  if (state == nullptr) {
    return;
  }
  auto& regions = state->regions;
  const auto found = std::find_if(regions.rbegin(), regions.rend(), [id](const auto& region) { return region.id == id; });
  if (found == regions.rend()) {
    return;
  }
  const EnteredRegion left = std::move(*found);
  const auto place = regions.erase(std::next(found).base());
  for (auto outer = std::make_reverse_iterator(place); outer != regions.rend(); ++outer) {
    if (outer->key.device == left.key.device) {
      outer->ops += left.ops;
      outer->compiled += left.compiled;
      break;
    }
  }
  for (const auto& record : state->records) {
    std::lock_guard<std::mutex> lock(record->mutex);
    const auto counts = record->totals.regions.find(left.key);
    if (counts != record->totals.regions.end()) {  // else it was entered before this recorder started
      counts->second.add({0, left.ops == 0 && left.compiled == 0, left.ops, left.compiled});
    }
  }
}

// Count compiled code for the innermost region of each device.
void note_compiled_in_regions(ThreadState& state) {
  for (auto region = state.regions.begin(); region != state.regions.end(); ++region) {
    region->compiled += std::none_of(std::next(region), state.regions.end(), [&](const auto& inner) {
      return inner.key.device == region->key.device;
    });
  }
}

// Count an op that reached the autocast of a device.
void note_op_in_region(ThreadState& state, int8_t device) {
  for (auto region = state.regions.rbegin(); region != state.regions.rend(); ++region) {
    if (region->key.device == device) {
      ++region->ops;
      return;
    }
  }
}

}  // namespace
