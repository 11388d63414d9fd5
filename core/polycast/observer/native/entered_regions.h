// Counts the regions that are entered and left.
//
// Locks: a table's; none is held while Python may run.

#pragma once

#include "extension.h"
#include "watch.h"

namespace {

// The Python function. Set by bind(); it lives as long as the process.
PyObject* call_site = nullptr;

// Called with the GIL held.
void note_entry(const void* id, PyObject* owner, DeviceType device, bool enabled, ScalarType dtype) {
  Watch* const watch = watch_of_observed_thread();
  if (watch == nullptr || watch->tables.empty()) {
    return;
  }
  const Object site = call(call_site, "(O)", owner);
  PyObject* where;
  int by_module_rule;
  parse(site.get(), "Up", &where, &by_module_rule);
  const RegionKey key{string_of(where), by_module_rule != 0, static_cast<int8_t>(device), enabled, dtype};
  for (const auto& table : watch->tables) {
    std::lock_guard<std::mutex> lock(table->mutex);
    ++table->totals.regions[key].entries;
  }
  watch->regions.push_back({id, key});
}

// A region's ops and compiled code are counted for the region around it, too.
void note_exit(const void* id) {
  Watch* const watch = watch_of_thread;
  if (watch == nullptr) {
    return;
  }
  auto& regions = watch->regions;
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
  for (const auto& table : watch->tables) {
    std::lock_guard<std::mutex> lock(table->mutex);
    const auto counts = table->totals.regions.find(left.key);
    if (counts != table->totals.regions.end()) {  // else it was entered before this recorder started
      counts->second.add({0, left.ops == 0 && left.compiled == 0, left.ops, left.compiled});
    }
  }
}

// Count compiled code for the innermost region of each device.
void note_compiled_in_regions(Watch& watch) {
  for (auto region = watch.regions.begin(); region != watch.regions.end(); ++region) {
    region->compiled += std::none_of(std::next(region), watch.regions.end(), [&](const auto& inner) {
      return inner.key.device == region->key.device;
    });
  }
}

// Count an op that reached the autocast of a device.
void note_op_in_region(Watch& watch, int8_t device) {
  for (auto region = watch.regions.rbegin(); region != watch.regions.rend(); ++region) {
    if (region->key.device == device) {
      ++region->ops;
      return;
    }
  }
}

}  // namespace
