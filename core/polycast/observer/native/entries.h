// The regions that are entered and left while something observes.
//
// Owns nothing. Locks: a table's; none is held while Python may run.

#pragma once

#include <algorithm>
#include <iterator>
#include <mutex>
#include <utility>

#include "watch.h"

namespace {

// Set by bind(); it lives as long as the process.
PyObject* call_site = nullptr;

// A region is entered. Called with the GIL held.
void note_entry(const void* id, PyObject* owner, DeviceType device, bool enabled, ScalarType fast) {
  Watch* const watch = refreshed_watch(recorders_of_all.load(std::memory_order_relaxed) != 0);
  if (watch == nullptr || watch->tables.empty()) {
    return;
  }
  const Object site = call(call_site, "(O)", owner);
  PyObject* where;
  int by_module_rule;
  parse(site.get(), "Up", &where, &by_module_rule);
  const RegionKey key{string_of(where), by_module_rule != 0, static_cast<int8_t>(device), enabled, fast};
  for (const auto& table : watch->tables) {
    std::lock_guard<std::mutex> lock(table->mutex);
    ++table->regions[key].entries;
  }
  watch->regions.push_back({id, key});
}

// A region is left, whose ops are those of the region around it, too.
void note_exit(const void* id) {
  Watch* const watch = watch_of_thread;
  if (watch == nullptr) {
    return;
  }
  const auto found =
      std::find_if(watch->regions.rbegin(), watch->regions.rend(), [id](const auto& region) { return region.id == id; });
  if (found == watch->regions.rend()) {
    return;
  }
  const EnteredRegion left = std::move(*found);
  const auto place = watch->regions.erase(std::next(found).base());
  for (auto outer = std::make_reverse_iterator(place); outer != watch->regions.rend(); ++outer) {
    if (outer->key.device == left.key.device) {
      outer->ops += left.ops;
      outer->compiled += left.compiled;
      break;
    }
  }
  for (const auto& table : watch->tables) {
    std::lock_guard<std::mutex> lock(table->mutex);
    const auto counts = table->regions.find(left.key);
    if (counts != table->regions.end()) {  // or it was entered before this one observed
      counts->second.ops += left.ops;
      counts->second.compiled += left.compiled;
      counts->second.unused += left.ops == 0 && left.compiled == 0;
    }
  }
}

// Compiled code begins: what it computes was compiled for the regions that the thread is in, one for each device.
void note_compiled_in_regions(Watch& watch) {
  for (auto region = watch.regions.begin(); region != watch.regions.end(); ++region) {
    const bool is_innermost = std::none_of(std::next(region), watch.regions.end(), [&](const auto& inner) {
      return inner.key.device == region->key.device;
    });
    region->compiled += is_innermost;
  }
}

// An op was seen that autocast for a device looks at.
void note_op_in_region(Watch& watch, int8_t device) {
  for (auto region = watch.regions.rbegin(); region != watch.regions.rend(); ++region) {
    if (region->key.device == device) {
      ++region->ops;
      return;
    }
  }
}

}  // namespace
