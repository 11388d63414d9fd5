// The regions that a thread is in, as frames, and the part of them that kernels read.
//
// A frame holds the settings of a region and the state to restore after it. The frames of a thread form a list, and a chain for
// each device within it. They hold Python objects, so they are accessed with the GIL held, except for their state, at the end of a
// kernel of the same thread; kernels read DeviceRegion without it.
// Locks: none, since frames belong to their thread. The count of open regions is atomic.

#pragma once

#include <bitset>

#include "extension.h"
#include "region_store.h"
#include "user_store.h"

namespace {

// The policies of polycast.CastPolicy, and two more. bind() checks their numbers. kNone: the kernel has no cast policy of its own, so
// the call passes through unless the region's override has one. kRecipe: LOWER_PRECISION_FP, of which the region's recipe may run calls.
enum class Policy : int8_t {
  kNone = -1, kLowerPrecisionFp, kFp32, kFp32SetOptDtype, kFp32AppendDtype, kPromote, kLowerFirst, kMatch, kBanned, kPassthrough, kRecipe };

constexpr std::array<const char*, 11> kPolicyNames = {
    "NONE", "LOWER_PRECISION_FP", "FP32", "FP32_SET_OPT_DTYPE", "FP32_APPEND_DTYPE", "PROMOTE", "LOWER_FIRST", "MATCH", "BANNED", "PASSTHROUGH",
    "RECIPE"};

// The policies by which a region overrides the table, by the op's number in this process.
class Override {
 public:
  const uint64_t id = next_id();  // of no other override, even of one that has died
  const std::string recipe;       // its text; empty without one

  explicit Override(std::string recipe) : recipe(std::move(recipe)) {}

  void set(int64_t number, Policy policy) {
    const auto index = static_cast<size_t>(number);
    policies_.resize(std::max(policies_.size(), index + 1));
    policies_[index] = policy;
  }

  // Return the policy of an op, given that of the table.
  Policy over(Policy of_table, int64_t number) const {
    const auto index = static_cast<size_t>(number);
    const Policy here = index < policies_.size() ? policies_[index].value_or(of_table) : of_table;
    return here == Policy::kRecipe && of_table != Policy::kLowerPrecisionFp ? of_table : here;
  }

 private:
  static uint64_t next_id() {
    static std::atomic<uint64_t> last{0};
    return ++last;
  }

  std::vector<std::optional<Policy>> policies_;
};

class NoAutocast;

// A region that the thread is in; see Frame in reference/frames.py.
struct Frame {
  Object owner, settings, override, cache;
  std::shared_ptr<const Override> policies;
  std::shared_ptr<UserStore> store;  // of the WeightCache; null: the thread's own store
  DeviceType device;
  bool enabled, enabled_before, cache_enabled_before;
  ScalarType dtype_before;
  Frame *older = nullptr, *newer = nullptr;  // in the thread
  Frame *below = nullptr, *above = nullptr;  // for the device
  NoAutocast* kernel;  // the innermost kernel that runs on the thread, at entry
};

// The number of regions of all threads, by device.
std::array<std::atomic<int>, c10::COMPILE_TIME_MAX_DEVICE_TYPES> open_count{};

std::atomic<int>& open_count_of(DeviceType device) { return open_count[static_cast<size_t>(device)]; }

// The part that kernels read of a device's innermost region on this thread, whose frame owns it.
struct DeviceRegion {
  Frame* innermost = nullptr;
  const Override* override = nullptr;
  UserStore* store = nullptr;
  RegionStore* casts = nullptr;
  int depth = 0;
};

using DeviceRegions = std::array<DeviceRegion, c10::COMPILE_TIME_MAX_DEVICE_TYPES>;

constinit thread_local DeviceRegions device_regions{};

DeviceRegion& region_of(DeviceType device) { return device_regions[static_cast<size_t>(device)]; }

// Counts the regions that this thread has entered and left.
constinit thread_local uint64_t region_changes = 0;

// Keeps autocast off for a device while a kernel runs, and restores it afterwards. A kernel may run Python: a backend's, a dispatch
// mode's or the garbage collector's, which may leave regions around the kernel, or leave one open. So for all devices, a kernel
// counts as a frame: it holds the state to restore, and passes it to a frame above it.
class NoAutocast {
 public:
  NoAutocast(DeviceType device, c10::DispatchKeySet keys)
      : device_(device), outer_(std::exchange(innermost_, this)), changes_(region_changes) {
    excluded_.emplace(keys);
  }
  NoAutocast(const NoAutocast&) = delete;

  ~NoAutocast() {
    innermost_ = outer_;
    if (C10_UNLIKELY(changes_ != region_changes)) {
      restore_after_changes();
    }
  }

  // Return the innermost kernel that runs on this thread, or null.
  static NoAutocast* innermost() { return innermost_; }

  // Return whether a kernel of a device runs on this thread.
  static bool runs(DeviceType device) {
    const NoAutocast* kernel = innermost_;
    while (kernel != nullptr && kernel->device_ != device) {
      kernel = kernel->outer_;
    }
    return kernel != nullptr;
  }

  // Pass the state before a frame that is left to what is above it for its device: to kernels, and to the next frame. Restore it if
  // there is no such frame; but within the outermost kernel of the device that is above, autocast stays off.
  static void pass_on(const Frame& left) {
    NoAutocast* const first = left.above == nullptr ? innermost_ : left.above->kernel;
    NoAutocast* of_device = nullptr;
    for (NoAutocast* kernel = first; kernel != nullptr && kernel != left.kernel; kernel = kernel->outer_) {
      of_device = kernel->device_ == left.device ? kernel : of_device;
    }
    NoAutocast* kernel = of_device == nullptr ? first : of_device;
    for (; kernel != nullptr && kernel != left.kernel; kernel = kernel->outer_) {
      kernel->set_after(left.device, left.enabled_before);
    }
    if (left.above != nullptr) {
      left.above->dtype_before = left.dtype_before;
      if (of_device == nullptr) {
        left.above->enabled_before = left.enabled_before;
      }
    } else {
      at::autocast::set_autocast_dtype(left.device, left.dtype_before);
      if (of_device == nullptr) {
        at::autocast::set_autocast_enabled(left.device, left.enabled_before);
      }
    }
  }

 private:
  using Devices = std::bitset<std::tuple_size_v<DeviceRegions>>;

  void set_after(DeviceType device, bool enabled) {
    is_known_after_.set(static_cast<size_t>(device));
    is_enabled_after_.set(static_cast<size_t>(device), enabled);
  }

  C10_NOINLINE void restore_after_changes() {
    excluded_.reset();  // in later torch than 2.11, the guard restores the excluded keys of all devices
    for (size_t i = 0; i < device_regions.size(); ++i) {
      const auto device = static_cast<DeviceType>(i);
      Frame* const innermost = device_regions[i].innermost;
      if (is_known_after_[i]) {
        at::autocast::set_autocast_enabled(device, is_enabled_after_[i]);
      }
      Frame* lowest = nullptr;  // of those that are left open
      for (Frame* frame = innermost; frame != nullptr && frame->kernel == this; frame = frame->below) {
        frame->kernel = outer_;
        lowest = frame;
      }
      if (lowest != nullptr) {
        if (is_known_after_[i] || device == device_) {
          lowest->enabled_before = at::autocast::is_autocast_enabled(device);
        }
        at::autocast::set_autocast_enabled(device, innermost->enabled);
      }
    }
  }

  static inline constinit thread_local NoAutocast* innermost_ = nullptr;

  const DeviceType device_;
  NoAutocast* const outer_;
  const uint64_t changes_;
  Devices is_known_after_;  // the devices of which a region beneath the kernel was left
  Devices is_enabled_after_;  // those of them for which autocast is on after the kernel
  std::optional<c10::impl::ExcludeDispatchKeyGuard> excluded_;
};

// The frames of one thread.
class Frames {
 public:
  Frames(DeviceRegions* devices, RegionStore* casts) : devices_(devices), casts_(casts) {}

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

  // Return the innermost frame of an owner, or null.
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

  // Remove a frame that find() or newest() returned.
  std::unique_ptr<Frame> remove(Frame* frame) {
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

  // Frames are mostly left in reverse order. But generators may be closed late, and there may be many.
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
  RegionStore* const casts_;
  Frame* newest_ = nullptr;
  std::unordered_map<PyObject*, std::vector<Frame*>> by_owner_;  // oldest first; empty while there are few frames
};

}  // namespace
