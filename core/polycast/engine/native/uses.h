// Which weights are used more than once in a region: hints, by address, that may be of weights that died.
//
// Owns a table for one thread. Locks: none.

#pragma once

#include <array>
#include <cstdint>
#include <memory>

#include "content.h"

namespace {  // all is one unit, binding.cpp

class Uses {
 public:
  // Note a use that found no cast; say whether there will be others.
  bool note(const Key& key) {
    if (slots_ == nullptr) {
      slots_ = std::make_unique<std::array<Slot, kSlots>>();
    }
    Slot& slot = slot_of(key);
    if (!(slot.key == key)) {
      slot = {key, region_, 0};
      return false;
    }
    const bool again = slot.seen == region_ || slot.again == region_ - 1;
    if (slot.seen == region_) {
      slot.again = region_;
    }
    slot.seen = region_;
    return again;
  }

  // Note that a cast was found.
  void note_again(const Key& key) {
    if (slots_ != nullptr && slot_of(key).key == key) {
      slot_of(key).again = region_;
    }
  }

  void end_region() { ++region_; }

 private:
  static constexpr size_t kSlots = 2048;
  struct Slot {
    Key key{nullptr, ScalarType::Undefined};
    uint32_t seen = 0, again = 0;  // the last regions in which it was used, and used again
  };

  Slot& slot_of(const Key& key) {
    return (*slots_)[(reinterpret_cast<uintptr_t>(key.weight) / 64 * 0x9E3779B97F4A7C15ull >> 48) % kSlots];
  }

  std::unique_ptr<std::array<Slot, kSlots>> slots_;
  uint32_t region_ = 2;
};

}  // namespace
