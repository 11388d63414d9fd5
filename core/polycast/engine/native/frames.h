// The regions that a thread is in, as frames, and what kernels read of them.
//
// Owns the frames of each thread, which hold what a region set and the state that was there before it: a list for the thread,
// and a chain for each device in it.
//
// Locks. None: what a thread is in is its own. Frames hold Python objects, and are touched with the GIL held; what kernels
// read of them (DeviceRegion) is not Python's, and is read without it. The count of open regions is atomic.

#pragma once

#include <algorithm>
#include <array>
#include <atomic>
#include <memory>
#include <optional>
#include <unordered_map>
#include <utility>
#include <vector>

#include "python.h"
#include "region_casts.h"
#include "store.h"

namespace {  // all is one unit, binding.cpp

// The order is that of polycast.CastPolicy, which bind() checks.
// kNone is that of an op that is in an override and not in the table, outside regions with that override.
// kLowBit is that of an op which the region's recipe is for: it is one of LOWER_PRECISION_FP that the recipe may run.
enum class Policy : int8_t {
  kNone = -1, kLowerPrecisionFp, kFp32, kFp32SetOptDtype, kFp32AppendDtype, kPromote, kBanned, kPassthrough, kLowBit };

constexpr std::array<const char*, 7> kPolicyNames = {
    "LOWER_PRECISION_FP", "FP32", "FP32_SET_OPT_DTYPE", "FP32_APPEND_DTYPE", "PROMOTE", "BANNED", "PASSTHROUGH"};

// The policies that a region lays over the table, by the number that an op has in this process.
class Override {
 public:
  void set(int64_t number, Policy policy) {
    const auto index = static_cast<size_t>(number);
    policies_.resize(std::max(policies_.size(), index + 1));
    policies_[index] = policy;
  }

  // The policy of an op: the one that it has here, else the table's.
  Policy over(Policy of_table, int64_t number) const {
    const auto index = static_cast<size_t>(number);
    const Policy here = index < policies_.size() ? policies_[index].value_or(of_table) : of_table;
    return here == Policy::kLowBit && of_table != Policy::kLowerPrecisionFp ? of_table : here;
  }

 private:
  std::vector<std::optional<Policy>> policies_;
};

// A region that the thread is in; see Frame in state_machine.py.
struct Frame {
  Object owner, settings, override, cache;
  std::shared_ptr<const Override> policies;
  std::shared_ptr<Store> store;  // the user's; none: casts are the thread's own
  DeviceType device;
  bool enabled_before, cache_enabled_before;
  ScalarType dtype_before;
  Frame *older = nullptr, *newer = nullptr;  // of the thread's frames, in the order of entering
  Frame *below = nullptr, *above = nullptr;  // of those, the device's
};

// How many regions for each device all threads are in.
std::array<std::atomic<int>, c10::COMPILE_TIME_MAX_DEVICE_TYPES> open_count{};

std::atomic<int>& open_count_of(DeviceType device) { return open_count[static_cast<size_t>(device)]; }

// What kernels read of the region for a device that the thread is in; the innermost frame holds it.
struct DeviceRegion {
  Frame* innermost = nullptr;
  const Override* override = nullptr;
  Store* store = nullptr;
  RegionCasts* casts = nullptr;  // the thread's own
  int depth = 0;
};

using DeviceRegions = std::array<DeviceRegion, c10::COMPILE_TIME_MAX_DEVICE_TYPES>;

constinit thread_local DeviceRegions device_regions{};

DeviceRegion& region_of(DeviceType device) { return device_regions[static_cast<size_t>(device)]; }

// The frames of one thread.
class Frames {
 public:
  Frames(DeviceRegions* devices, RegionCasts* casts) : devices_(devices), casts_(casts) {}

  Frame* newest() const { return newest_; }

  void push(std::unique_ptr<Frame> owned) {
    Frame* const frame = owned.release();
    DeviceRegion& region = of(frame->device);
    frame->older = std::exchange(newest_, frame);
    if (frame->older != nullptr) {
      frame->older->newer = frame;
    }
    frame->below = region.innermost;
    if (frame->below != nullptr) {
      frame->below->above = frame;
    }
    set_innermost(frame->device, frame);
    ++region.depth;
    ++open_count_of(frame->device);
    if (!by_owner_.empty()) {
      by_owner_[frame->owner.get()].push_back(frame);
    }
  }

  // Return the innermost frame of an owner, or none.
  Frame* find(PyObject* owner) {
    if (by_owner_.empty()) {
      int steps = 0;
      for (Frame* frame = newest_; frame != nullptr; frame = frame->older) {
        if (frame->owner.get() == owner) {
          return frame;
        }
        if (++steps == kFewFrames) {
          index_owners();
          return find(owner);
        }
      }
      return nullptr;
    }
    const auto found = by_owner_.find(owner);
    return found == by_owner_.end() ? nullptr : found->second.back();
  }

  // Take out a frame that find() or newest() returned.
  std::unique_ptr<Frame> take_out(Frame* frame) {
    (frame->newer != nullptr ? frame->newer->older : newest_) = frame->older;
    if (frame->older != nullptr) {
      frame->older->newer = frame->newer;
    }
    if (frame->below != nullptr) {
      frame->below->above = frame->above;
    }
    if (frame->above != nullptr) {
      frame->above->below = frame->below;
    } else {
      set_innermost(frame->device, frame->below);
    }
    --of(frame->device).depth;
    --open_count_of(frame->device);
    if (!by_owner_.empty()) {
      const auto found = by_owner_.find(frame->owner.get());
      found->second.pop_back();
      if (found->second.empty()) {
        by_owner_.erase(found);
      }
    }
    return std::unique_ptr<Frame>(frame);
  }

 private:
  static constexpr int kFewFrames = 32;

  DeviceRegion& of(DeviceType device) { return (*devices_)[static_cast<size_t>(device)]; }

  void set_innermost(DeviceType device, Frame* frame) {
    DeviceRegion& region = of(device);
    region.innermost = frame;
    region.override = frame ? frame->policies.get() : nullptr;
    region.store = frame ? frame->store.get() : nullptr;
    region.casts = frame ? casts_ : nullptr;
  }

  // Frames are left backwards, save by generators that are closed late: and of these there may be many.
  void index_owners() {
    std::vector<Frame*> frames;
    for (Frame* frame = newest_; frame != nullptr; frame = frame->older) {
      frames.push_back(frame);
    }
    for (auto frame = frames.rbegin(); frame != frames.rend(); ++frame) {
      by_owner_[(*frame)->owner.get()].push_back(*frame);
    }
  }

  DeviceRegions* const devices_;  // the thread's
  RegionCasts* const casts_;
  Frame* newest_ = nullptr;
  std::unordered_map<PyObject*, std::vector<Frame*>> by_owner_;  // oldest first; empty as long as a walk does
};

}  // namespace
